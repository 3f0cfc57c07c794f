"""What the two cores tell their drivers."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs

from levada.framework.errors import RemoteProtocolError

__all__ = [
    "AckTimedOut", "Batch", "BatchDone", "EventsAcked", "Finished", "KeepaliveReceived", "PeerClosed", "ReaderEvent", "Refused",
    "UnitReady", "WriterEvent",
]  # fmt: skip


EndReason = Literal["peer_closed", "refused", "idle", "drained", "sink_failed", "closed", "lost"]


@attrs.frozen
class PeerClosed:
    """The peer has ended its direction, or the connection was lost."""

    clean: bool
    """Not inside a frame (LJ-6), and not lost."""
    lost: bool = False
    """The carrier failed; a peer that ends its direction may still read."""


@attrs.frozen
class Refused:
    """The peer broke a rule: the connection is over, and nothing more is read (LJ-46). Comes at most once."""

    error: RemoteProtocolError
    """Which rule, and where."""
    head: bytes
    """The first bytes of the frame at fault, 32 at most, for the log line."""


@attrs.frozen
class Finished:
    """This side is done with the connection: send what `data_to_send` still gives, then close as LJ-28a says."""

    reason: EndReason
    """Why a reader has: the writer ended and has its acks; it broke a rule; nothing came for long; `ReaderCore.drain`;
    `ReaderCore.sink_failed`; `ReaderCore.close`; the carrier failed and no unit waits for its commit any more. A writer has
    ``"drained"`` and ``"closed"`` only; its other ends are `PeerClosed`, `Refused` and `AckTimedOut`."""
    unacked: int
    """Events that were handed on or sent, and not committed or acked in time; they come again."""

    @property
    def code(self) -> int:
        """Lumberjack has no codes for an end."""
        return 0


@attrs.frozen
class UnitReady:
    """Events for the sink, in order; answer with `ReaderCore.commit` when they are safe (LJ-25)."""

    number: int
    """Counts the units of this connection from 1."""
    events: list[dict[str, Any]]
    """What the writer sent: D as text to text, J as JSON. Text that was not UTF-8 holds surrogate escapes: encoding it with
    ``errors="surrogateescape"`` gives the bytes back (LJ-7)."""
    count: int
    """Events as windows count them; an array in a J frame of version 1 is one event and several items (LJ-11)."""
    sequence: int
    """Number of the last event."""
    whole: bool
    """Whether this is, or ends, a unit that is acked; false for a slice of a larger one (LJ-42a) and for what came without an
    end before the connection was lost (LJ-28)."""
    cost: int
    """What it holds of memory, as `ReaderConfig.max_cost` counts."""


ReaderEvent: TypeAlias = UnitReady | PeerClosed | Refused | Finished
"""What `ReaderCore` tells."""


@attrs.define(eq=False)
class Batch:
    """Encoded events that travel in one window; made by `SendQueue.next_batch`. Equal only to itself."""

    bodies: list[bytes]
    """Frames without their first six bytes (version, type and number), oldest first; those acked are taken out."""
    tokens: list[Any]
    """What the sender gave along with each event, in the same order."""
    age: tuple[int, ...] = ()
    """Orders the batches of one queue, the oldest first."""
    failures: int = 0
    """Live connections that ended with this batch in flight and no event of it acked (LJ-59)."""

    @property
    def size(self) -> int:
        """Bytes of its frames."""
        return sum(map(len, self.bodies)) + 6 * len(self.bodies)


@attrs.frozen
class EventsAcked:
    """The reader has committed events (LJ-52)."""

    batch: Batch
    """The window they were in; they are out of `Batch.bodies` already."""
    tokens: list[Any]
    """Of the events now safe, oldest first."""
    octets: int
    """Of their frames."""


@attrs.frozen
class BatchDone:
    """All events of a window are acked; there is room for another one in flight."""

    batch: Batch


@attrs.frozen
class KeepaliveReceived:
    """An ack that acks nothing new: the reader is alive and at work (LJ-52)."""


@attrs.frozen
class AckTimedOut:
    """No ack in `WriterConfig.ack_timeout`: close, and connect again (LJ-53)."""

    seconds: float


WriterEvent: TypeAlias = EventsAcked | BatchDone | KeepaliveReceived | AckTimedOut | PeerClosed | Refused | Finished
"""What `WriterCore` tells."""
