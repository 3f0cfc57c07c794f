"""The states of both sides and what leads from one to another, as data; a missing pair is a mistake in a core."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

__all__ = ["READER_TRANSITIONS", "WRITER_TRANSITIONS", "ReaderInput", "ReaderState", "WriterInput", "WriterState"]


class ReaderState(Enum):
    """Where a reader's connection is."""

    OPEN = auto()
    """Octets are taken."""
    DRAINING = auto()
    """The writer has ended its direction; units wait for their commit and are acked (LJ-28)."""
    REFUSING = auto()
    """A rule was broken; units that closed before it have a moment to be committed and acked (LJ-46)."""
    STOPPING = auto()
    """This side ends; units at the sink have `shutdown_grace` to be committed and acked (LJ-28)."""
    ORPHANED = auto()
    """The carrier is gone; units at the sink are counted as they are committed, and nobody is told (LJ-26)."""
    CLOSED = auto()
    """Over."""


class ReaderInput(Enum):
    """What moves a reader."""

    PEER_ENDED = auto()
    BROKEN_RULE = auto()
    SHUT_DOWN = auto()
    IDLE = auto()
    SINK_FAILED = auto()
    LOST = auto()
    SETTLED = auto()
    """Nothing waits for a commit any more."""
    TIME_OUT = auto()
    """The time for commits is over."""


READER_TRANSITIONS: Final[Mapping[tuple[ReaderState, ReaderInput], ReaderState]] = {
    (ReaderState.OPEN, ReaderInput.PEER_ENDED): ReaderState.DRAINING,
    (ReaderState.OPEN, ReaderInput.BROKEN_RULE): ReaderState.REFUSING,
    (ReaderState.OPEN, ReaderInput.SHUT_DOWN): ReaderState.STOPPING,
    (ReaderState.OPEN, ReaderInput.IDLE): ReaderState.CLOSED,
    (ReaderState.OPEN, ReaderInput.LOST): ReaderState.ORPHANED,
    (ReaderState.DRAINING, ReaderInput.SHUT_DOWN): ReaderState.STOPPING,
    (ReaderState.DRAINING, ReaderInput.LOST): ReaderState.ORPHANED,
    (ReaderState.DRAINING, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.REFUSING, ReaderInput.SHUT_DOWN): ReaderState.REFUSING,
    (ReaderState.REFUSING, ReaderInput.LOST): ReaderState.REFUSING,
    (ReaderState.REFUSING, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.REFUSING, ReaderInput.TIME_OUT): ReaderState.CLOSED,
    (ReaderState.STOPPING, ReaderInput.LOST): ReaderState.STOPPING,
    (ReaderState.STOPPING, ReaderInput.SETTLED): ReaderState.CLOSED,
    (ReaderState.STOPPING, ReaderInput.TIME_OUT): ReaderState.CLOSED,
    (ReaderState.ORPHANED, ReaderInput.SHUT_DOWN): ReaderState.STOPPING,
    (ReaderState.ORPHANED, ReaderInput.SETTLED): ReaderState.CLOSED,
} | {(state, ReaderInput.SINK_FAILED): ReaderState.CLOSED for state in ReaderState if state is not ReaderState.CLOSED}


class WriterState(Enum):
    """Where a writer's connection is."""

    OPEN = auto()
    """Windows are sent and acked."""
    CLOSED = auto()
    """Over; what was in flight is unacked."""


class WriterInput(Enum):
    """What moves a writer."""

    PEER_ENDED = auto()
    BROKEN_RULE = auto()
    TIME_OUT = auto()
    GIVEN_UP = auto()
    """The driver took the unacked batches back."""


WRITER_TRANSITIONS: Final[Mapping[tuple[WriterState, WriterInput], WriterState]] = {
    (WriterState.OPEN, what): WriterState.CLOSED for what in WriterInput
}
