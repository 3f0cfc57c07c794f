"""The connection, as operations of either side see it; `MaopCore` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .body import BodyReader
from .config import MaopConfig
from .control import ControlPool
from .counters import Statistics
from .events import Event, Output
from .timers import Timers

__all__ = ["Operation", "Side"]


class Operation(Protocol):
    """An ended operation, as the table of streams sees it."""

    stream_id: int
    fin: bool
    """Whether the peer's direction has ended."""


class Side(Protocol):
    """One side of a connection."""

    config: MaopConfig
    wall_offset: float
    steps: bool
    out: list[Output]
    emit: Callable[[Event], None]
    pool: ControlPool
    timers: Timers
    statistic: Statistics

    def note_blocks(self, stream_id: int, before: int, body: BodyReader) -> None:
        """Report the first Block of a body, and its end."""

    def reason(self, text: str) -> bytes:
        """Make a reason fit for the wire."""
        ...

    def mark_stopped(self, stream_id: int) -> None:
        """Record for `retire` that STOP_SENDING was sent."""

    def retire(self, operation: Operation) -> None:
        """Replace an ended operation."""
