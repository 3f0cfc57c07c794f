"""The states and transitions of both sides, as data. A pair that is missing from a table is a bug in a core."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

__all__ = ["READER_TRANSITIONS", "WRITER_TRANSITIONS", "ReaderInput", "ReaderState", "WriterInput", "WriterState"]


class ReaderState(Enum):
    """The state of a reader's connection."""

    OPEN = auto()
    """The reader takes bytes."""
    HALF_CLOSED = auto()
    """The writer has ended its direction. Units at the sink may still be committed, and are acked (LJ-28)."""
    REFUSING = auto()
    """The writer broke a rule. Earlier units may be committed within `close_timeout`, and are acked (LJ-46)."""
    DRAINING = auto()
    """This side ends. Units at the sink may be committed within `drain_timeout`, and are acked (LJ-28)."""
    ORPHANED = auto()
    """The carrier has failed. Commits are counted and not acked (LJ-26)."""
    CLOSED = auto()
    """The connection is over."""


class ReaderInput(Enum):
    """The inputs that change a reader's state."""

    PEER_ENDED = auto()
    BROKEN_RULE = auto()
    DRAIN = auto()
    IDLE = auto()
    SINK_FAILED = auto()
    CLOSE = auto()
    LOST = auto()
    SETTLED = auto()
    """No unit waits for a commit any more."""
    TIME_OUT = auto()
    """The grace period for commits is over."""


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
    """The state of a writer's connection."""

    OPEN = auto()
    """The writer sends windows."""
    DRAINING = auto()
    """The writer sends no more windows, and waits for the acks of those in flight."""
    CLOSED = auto()
    """The connection is over. Events in flight stay unacked."""


class WriterInput(Enum):
    """The inputs that change a writer's state."""

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
