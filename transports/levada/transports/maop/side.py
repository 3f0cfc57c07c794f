"""What operations of either side need of their connection; the core has it."""

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
    """An operation that has ended, as far as the table of streams needs it."""

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
        """Tell of the first Block of a body, and of its end."""
        ...

    def reason(self, text: str) -> bytes:
        """Make a reason fit for the wire."""
        ...

    def mark_stopped(self, stream_id: int) -> None:
        """STOP_SENDING is out; `retire` keeps that."""
        ...

    def retire(self, operation: Operation) -> None:
        """An operation has ended."""
        ...
