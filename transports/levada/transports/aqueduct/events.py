"""Events for the owner of the core, and outputs to carry out on the QUIC connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

from levada.framework.errors import RemoteProtocolError
from levada.framework.text import printable

from .frames import Headers
from .streams import StreamOutput

if TYPE_CHECKING:
    from .receiver import ReceiverHalf
    from .sender import SenderHalf

__all__ = [
    "CloseConnection", "ConnectionEnded", "Ended", "Event", "HeadersReceived", "Output", "Reached", "Readable", "Settled",
    "StreamUnblocked", "Writable",
]  # fmt: skip


@attrs.frozen
class HeadersReceived:
    """The peer's ConnectionControl came. A server answers with `AqueductCore.accept`; a client may now use channels."""

    headers: Headers = attrs.field(repr=False)
    """The peer's connection headers."""


@attrs.frozen(eq=False)
class Readable:
    """An empty mailbox has a message: call `ReceiverHalf.take` until it is empty."""

    half: ReceiverHalf
    """The receiver; the application has this handle."""


@attrs.frozen(eq=False)
class Writable:
    """A full window has room: `SenderHalf.send` may continue."""

    half: SenderHalf
    """The sender."""


@attrs.frozen(eq=False)
class Settled:
    """The fate of messages is known. Each message is reported exactly once."""

    half: SenderHalf
    """The sender that sent them."""
    tokens: list[object]
    """The tokens passed to `SenderHalf.send`, in ascending order of the message numbers, without None."""
    delivered: bool | None
    """True if the peer has processed them, False if it never will; None if the channel or connection was lost first."""


@attrs.frozen(eq=False)
class Reached:
    """The peer's application has, or can get, the other half of a channel that was attached here: it can no longer be lost.

    Source: AQ-54, AQ-56.
    """

    half: SenderHalf | ReceiverHalf
    """The half that stayed on this side."""


@attrs.frozen(eq=False)
class Ended:
    """A half has ended; its ``state`` says how. No further event names it. A receiver's mailbox may still hold messages."""

    half: SenderHalf | ReceiverHalf
    """The half; the application has this handle."""


@attrs.frozen
class StreamUnblocked:
    """A stream for which `AqueductCore.is_blocked` was true is read again."""

    stream_id: int
    """Number of the stream."""


@attrs.frozen
class ConnectionEnded:
    """The last event. Every half has ended; mailboxes keep their messages."""

    code: int
    """Close code, this side's or the peer's; see `CloseCode`."""
    reason: str = attrs.field(converter=printable)
    """The reason in words."""
    error: RemoteProtocolError | None = None
    """The rule or limit that the peer broke, if that ended the connection."""
    closed_here: bool = False
    """Whether this side closed the connection, by a call or because of `error`."""


Event: TypeAlias = HeadersReceived | Readable | Writable | Settled | Reached | Ended | StreamUnblocked | ConnectionEnded
"""The events of `AqueductCore`."""


@attrs.frozen
class CloseConnection:
    """Close the QUIC connection. The last output."""

    code: int
    """A `CloseCode`."""
    reason: str = attrs.field(converter=printable)
    """The reason in words, with the id of a broken rule."""
    drain_timeout: float = 0.0
    """Seconds to wait until the peer has everything sent on finished streams; 0 closes at once."""


Output: TypeAlias = StreamOutput | CloseConnection
"""What `AqueductCore` asks of the connection."""
