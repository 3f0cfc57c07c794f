"""What a check of a log is given, and how checks are found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import attrs
import pyarrow as pa

from levada.framework import ActorSystem, Ref

__all__ = ["CHECKS", "MadeLog", "Maker", "promise"]


@attrs.frozen(kw_only=True)
class MadeLog:
    """A new log, with the ways to it."""

    system: ActorSystem
    """The system of this process."""
    ref: Ref[Any]
    """Answers the questions of `levada.actors.journal.Log`."""
    other: Ref[Any] | None = None
    """Answers them too, by a way of its own, as another process would have it. None: there is one way."""
    restart: Callable[[], Awaitable[object]] | None = None
    """Kills the store and starts it again, until it answers; `ref` stays the same. None: no check does that."""
    tailed: bool = False
    """Whether it is a `levada.actors.journal.TailedLog`."""
    copied: bool = False
    """Whether it is a `levada.actors.journal.CopiedLog`."""
    trimmed: bool = False
    """Whether it is a `levada.actors.journal.TrimmedLog`."""


class Maker(Protocol):
    """Makes logs."""

    def __call__(self, columns: pa.Schema, partitions: int, /) -> AbstractAsyncContextManager[MadeLog]:
        """Make a new log with these columns, and with partitions from 0 on, for as long as the block runs."""
        ...


Check = Callable[[Maker], Awaitable[None]]

CHECKS: dict[str, Check] = {}
"""All promises, by name."""


def promise(check: Check) -> Check:
    """Add a check."""
    CHECKS[check.__name__] = check
    return check
