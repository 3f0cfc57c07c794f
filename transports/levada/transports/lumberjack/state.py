"""The states of both sides and what leads from one to another, as data; a missing pair is a mistake in a core."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

__all__ = ["READER_TRANSITIONS", "WRITER_TRANSITIONS", "ReaderInput", "ReaderState", "WriterInput", "WriterState"]


class ReaderState(Enum):
    """Where a reader's connection is."""

    OPEN = auto()
    """Bytes are taken."""
    HALF_CLOSED = auto()
    """The writer has ended its direction; units wait for their commit and are acked (LJ-28)."""
    REFUSING = auto()
    """A rule was broken; units that closed before it have a moment to be committed and acked (LJ-46)."""
    DRAINING = auto()
    """This side ends; units at the sink have `drain_timeout` to be committed and acked (LJ-28)."""
    ORPHANED = auto()
    """The carrier is gone; commits of units at the sink are counted, and not acked (LJ-26)."""
    CLOSED = auto()
    """Over."""


class ReaderInput(Enum):
    """What moves a reader."""

    PEER_ENDED = auto()
    BROKEN_RULE = auto()
    DRAIN = auto()
    IDLE = auto()
    SINK_FAILED = auto()
    CLOSE = auto()
    LOST = auto()
    SETTLED = auto()
    """Nothing waits for a commit any more."""
    TIME_OUT = auto()
    """The time for commits is over."""


READER_TRANSITIONS: Final[Mapping[tuple[ReaderState, ReaderInput], ReaderState]] = {
    (ReaderState.OPEN, ReaderInput.PEER_ENDED): ReaderState.HALF_CLOSED,
    (ReaderState.OPEN, ReaderInput.BROKEN_RULE): ReaderState.REFUSING,
    (ReaderState.OPEN, ReaderInput.DRAIN): ReaderState.DRAINING,
    (ReaderState.OPEN, ReaderInput.IDLE): ReaderState.CLOSED,
    (ReaderState.OPEN, ReaderInput.LOST): ReaderState.ORPHANED,
    (ReaderState.HALF_CLOSED, ReaderInput.DRAIN): ReaderState.DRAINING,
    (ReaderState.HALF_CLOSED, ReaderInput.LOST): ReaderState.ORPHANED,
    (ReaderState.HALF_CLOSED, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.REFUSING, ReaderInput.DRAIN): ReaderState.REFUSING,
    (ReaderState.REFUSING, ReaderInput.LOST): ReaderState.REFUSING,
    (ReaderState.REFUSING, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.REFUSING, ReaderInput.TIME_OUT): ReaderState.CLOSED,
    (ReaderState.DRAINING, ReaderInput.LOST): ReaderState.DRAINING,
    (ReaderState.DRAINING, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.DRAINING, ReaderInput.TIME_OUT): ReaderState.CLOSED,
    (ReaderState.ORPHANED, ReaderInput.DRAIN): ReaderState.DRAINING,
    (ReaderState.ORPHANED, ReaderInput.SETTLED): ReaderState.CLOSED,
} | {
    (state, what): ReaderState.CLOSED
    for state in ReaderState
    if state is not ReaderState.CLOSED
    for what in (ReaderInput.SINK_FAILED, ReaderInput.CLOSE)
}


class WriterState(Enum):
    """Where a writer's connection is."""

    OPEN = auto()
    """Windows are sent and acked."""
    DRAINING = auto()
    """No more windows are sent; those in flight are acked."""
    CLOSED = auto()
    """Over; events in flight are unacked."""


class WriterInput(Enum):
    """What moves a writer."""

    PEER_ENDED = auto()
    BROKEN_RULE = auto()
    TIME_OUT = auto()
    DRAIN = auto()
    SETTLED = auto()
    """Nothing is in flight any more."""
    CLOSE = auto()


WRITER_TRANSITIONS: Final[Mapping[tuple[WriterState, WriterInput], WriterState]] = {
    (WriterState.OPEN, WriterInput.DRAIN): WriterState.DRAINING,
    (WriterState.DRAINING, WriterInput.SETTLED): WriterState.CLOSED,
} | {
    (state, what): WriterState.CLOSED
    for state in (WriterState.OPEN, WriterState.DRAINING)
    for what in (WriterInput.PEER_ENDED, WriterInput.BROKEN_RULE, WriterInput.TIME_OUT, WriterInput.CLOSE)
}
