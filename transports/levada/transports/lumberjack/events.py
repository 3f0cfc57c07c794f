"""The events of the two cores, for their drivers."""

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
    """The end came between two frames (LJ-6), and the connection was not lost."""
    lost: bool = False
    """The carrier failed. If false, the peer may still read."""


@attrs.frozen
class Refused:
    """The peer broke a rule: the connection is over, and the core ignores all further input (LJ-46). Comes at most once."""

    error: RemoteProtocolError
    """The rule, and the place of the frame that broke it."""
    head: bytes
    """The first bytes of that frame, 32 at most, for the log."""


@attrs.frozen
class Finished:
    """This side is done with the connection: send what `data_to_send` still gives, then close as LJ-28a says."""

    reason: EndReason
    """Why a reader has ended: the writer ended its direction and has all its acks; the writer broke a rule; the connection was idle;
    `ReaderCore.drain`; `ReaderCore.sink_failed`; `ReaderCore.close`; the carrier failed and the sink has committed every unit.
    A writer has only ``"drained"`` and ``"closed"``; its other ends are `PeerClosed`, `Refused` and `AckTimedOut`."""
    unacked: int
    """Events of a reader that were delivered and not committed, or events of a writer that were sent and not acked. They come again."""

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
    """The events as the writer sent them: D frames map text to text, J frames hold any JSON. Text that was not UTF-8 holds surrogate
    escapes: `encode_text` gives the bytes back (LJ-7). A number beyond a float's range, such as ``1e400``, is text (LJ-12)."""
    count: int
    """Events as windows count them; an array in a J frame of version 1 is one event and several items (LJ-11)."""
    sequence: int
    """Number of the last event."""
    whole: bool
    """Whether an ack of the whole unit follows the commit. False for a slice of a larger unit (LJ-42a), and for a unit whose end
    was lost with the connection (LJ-28)."""
    cost: int
    """Its cost in memory, as `ReaderConfig.max_cost` counts."""


ReaderEvent: TypeAlias = UnitReady | PeerClosed | Refused | Finished
"""The events of `ReaderCore`."""


@attrs.define(eq=False)
class Batch:
    """Encoded events that travel in one window; made by `SendQueue.next_batch`. Batches are compared by identity."""

    bodies: list[bytes]
    """Frames without their first six bytes (version, type and number), oldest first. Acked events are removed."""
    tokens: list[Any]
    """The sender's token of each event, in the same order."""
    age: tuple[int, ...] = ()
    """Sort key among the batches of one queue, the oldest first."""
    failures: int = 0
    """Connections that ended with this batch in flight and no event of it acked (LJ-59)."""

    @property
    def size(self) -> int:
        """Bytes of its frames, before compression."""
        return sum(map(len, self.bodies)) + 6 * len(self.bodies)


@attrs.frozen
class EventsAcked:
    """The reader has committed events (LJ-52)."""

    batch: Batch
    """The window that they were in. They are no longer in `Batch.bodies`."""
    tokens: list[Any]
    """The tokens of these events, oldest first."""
    size: int
    """Bytes of their frames, before compression."""


@attrs.frozen
class BatchDone:
    """All events of a window are acked, so another window may be sent."""

    batch: Batch


@attrs.frozen
class KeepaliveReceived:
    """An ack of 0: the reader is alive, and its sink is working (LJ-52)."""


@attrs.frozen
class AckTimedOut:
    """No ack came within `WriterConfig.ack_timeout`: close, and connect again (LJ-53)."""

    seconds: float


WriterEvent: TypeAlias = EventsAcked | BatchDone | KeepaliveReceived | AckTimedOut | PeerClosed | Refused | Finished
"""The events of `WriterCore`."""
