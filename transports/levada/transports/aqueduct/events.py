"""What the core tells its owner: events, and what is to be done to the QUIC connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

from levada.framework.errors import RemoteProtocolError
from levada.transports.text import printable

from .frames import Headers

if TYPE_CHECKING:
    from .receiver import ReceiverHalf
    from .sender import SenderHalf

__all__ = [
    "CloseConnection",
    "ConnectionEnded",
    "DatagramData",
    "Ended",
    "Event",
    "HeadersReceived",
    "OpenStream",
    "Output",
    "Reached",
    "Readable",
    "ResetStream",
    "Settled",
    "StopStream",
    "StreamData",
    "StreamDone",
    "StreamUnblocked",
    "Writable",
]

# ---------------------------------------------------------------- events


@attrs.frozen
class HeadersReceived:
    """The peer's ConnectionControl came. A server answers with `AqueductCore.accept`; a client may take channels from now on."""

    headers: Headers
    """The peer's connection headers."""


@attrs.frozen(eq=False)
class Readable:
    """A mailbox that was empty is not any more: `ReceiverHalf.take` until it is empty."""

    half: ReceiverHalf
    """Whose mailbox; the application has this handle."""


@attrs.frozen(eq=False)
class Writable:
    """A window that was full has room: `SenderHalf.send` may go on."""

    half: SenderHalf
    """Whose window."""


@attrs.frozen(eq=False)
class Settled:
    """It is known what became of messages, each exactly once."""

    half: SenderHalf
    """The sender that sent them."""
    tokens: list[object]
    """What was given to `SenderHalf.send` with each of them, in ascending order of their numbers; None is left out."""
    delivered: bool | None
    """Whether the peer has processed them, or never will; None if that cannot be known, as the channel or the connection was lost."""


@attrs.frozen(eq=False)
class Reached:
    """The peer's application has the other half of a channel that was attached here, or will come across it: no loss takes it along any more.

    Source: AQ-54, AQ-56.
    """

    half: SenderHalf | ReceiverHalf
    """The half that stayed here."""


@attrs.frozen(eq=False)
class Ended:
    """A half is gone; its ``state`` says how, and nothing more is reported of it. A receiver's mailbox may still hold messages."""

    half: SenderHalf | ReceiverHalf
    """Which; the application has this handle."""


@attrs.frozen
class StreamUnblocked:
    """A stream for which `AqueductCore.is_blocked` was true is read again."""

    stream_id: int
    """Which."""


@attrs.frozen
class ConnectionEnded:
    """The last event. Every half has ended; messages in mailboxes stay there."""

    code: int
    """Close code, this side's or the peer's; see `CloseCode`."""
    reason: str = attrs.field(converter=printable)
    """For humans."""
    error: RemoteProtocolError | None = None
    """What the peer did wrong, if that is why."""
    closed_here: bool = False
    """Whether this side has closed the connection: it was asked to, or `error` says why."""


Event: TypeAlias = HeadersReceived | Readable | Writable | Settled | Reached | Ended | StreamUnblocked | ConnectionEnded

# ---------------------------------------------------------------- outputs


@attrs.frozen
class OpenStream:
    """Open a stream. Streams of one kind, opened in this order, get these very ids from QUIC."""

    stream_id: int
    """Number under which the core speaks of it."""
    unidirectional: bool
    """Whether only this side sends on it."""
    priority: int
    """0 (first) to 255: control streams go before others, so that acks do not queue behind bulk data."""


@attrs.frozen
class StreamData:
    """Send octets on a stream."""

    stream_id: int
    """Which."""
    data: bytes
    """Octets; may be empty if `fin`."""
    fin: bool
    """Whether they are the last."""


@attrs.frozen
class ResetStream:
    """Reset this side's direction of a stream; harmless if it was finished."""

    stream_id: int
    """Which."""
    code: int
    """See `ResetCode`."""


@attrs.frozen
class StopStream:
    """Ask the peer to stop sending on a stream. What still comes may be given to the core or thrown away; its end must be given."""

    stream_id: int
    """Which."""
    code: int
    """See `ResetCode`."""


@attrs.frozen
class StreamDone:
    """The core is through with a stream: no output will name it again, and no input about it is wanted."""

    stream_id: int
    """Which."""


@attrs.frozen
class DatagramData:
    """Send a datagram; it may be dropped if there is no room."""

    data: bytes
    """Octets, no more than the limit that the core was told."""


@attrs.frozen
class CloseConnection:
    """Close the QUIC connection. The last output."""

    code: int
    """See `CloseCode`."""
    reason: str = attrs.field(converter=printable)
    """For humans; holds the id of a rule that was broken."""
    drain: float = 0.0
    """Seconds to wait until the peer has what was sent on finished streams; 0: close at once."""


Output: TypeAlias = OpenStream | StreamData | ResetStream | StopStream | StreamDone | DatagramData | CloseConnection
