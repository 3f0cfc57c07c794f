"""The events that a core of RSocket or ReactiveSocket reports; both dialects have the same events.

An event is a fact about the connection or about one stream; events come in the order in which things happened.  They are slotted and not
frozen, since each item of a stream is one; treat them as immutable.

The events of a stream:

* the responder's side: `RequestReceived`, then `PayloadReceived` and `StreamCompleted` (channels: the requester's further payloads and its
  end), `CreditGranted`, and `StreamCancelled` or `StreamFailed`, after which nothing more is sent or reported;
* the requester's side: `PayloadReceived`, `StreamCompleted` or `StreamFailed`, and on a channel `CreditGranted` and `SendingStopped`.

`PayloadReceived.complete` and `StreamCompleted` end the peer's direction only.  A stream is over when both directions are; request-response
and request-stream have one direction behind the request, fire-and-forget has none (RS-60 to RS-64).

When the connection ends, each live stream first gets its own last event (`StreamFailed` with `FailedBy.CONNECTION` for a requester,
`StreamCancelled` for a responder; RS-71), then comes `ConnectionEnded`, which is always the last event of a core.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING

import attrs

from levada.framework.text import printable
from levada.transports.rsocket.frames import Payload

if TYPE_CHECKING:
    from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

__all__ = [
    "ConnectionDraining", "ConnectionEnded", "CreditGranted", "EndReason", "Event", "ExtensionReceived", "FailedBy", "Interaction",
    "KeepaliveReceived", "LeaseGranted", "MetadataPushed", "PayloadReceived", "PeerFellSilent", "RequestReceived", "ResumeReceived",
    "SendingStopped", "SessionResumed", "SessionSuspended", "SetupAccepted", "SetupReceived", "StreamCancelled", "StreamCompleted",
    "StreamFailed", "error_text",
]  # fmt: skip


def error_text(data: bytes) -> str:
    """Read the data of an ERROR frame as one line of text: UTF-8 with replacement characters, control characters as escapes (RS-28, RX-23)."""
    # `printable` shows at most 512 characters, of at most 4 bytes.
    return printable(data[:4096].decode("utf-8", "replace"))


class Interaction(IntEnum):
    """The interaction models of both dialects; the numbers are not the ones on the wire."""

    REQUEST_RESPONSE = 0
    FIRE_AND_FORGET = 1
    REQUEST_STREAM = 2
    REQUEST_CHANNEL = 3
    REQUEST_SUBSCRIPTION = 4
    """ReactiveSocket only: a stream without an end of its own."""


class FailedBy(Enum):
    """Who made a stream fail."""

    PEER = "peer"
    """The peer sent an ERROR frame for the stream."""
    LOCAL = "local"
    """This side ended the stream, because the peer broke one of its rules or passed a limit; the peer was told."""
    CONNECTION = "connection"
    """The connection ended while the stream was open."""


class EndReason(Enum):
    """Why a connection, or a session that can be resumed, has ended."""

    CLOSED = "closed"
    """This side closed it, or drained it to the end."""
    CLOSED_BY_PEER = "closed by peer"
    """The peer sent CONNECTION_CLOSE, and then every stream ended, the drain timed out, or the peer closed the carrier."""
    FAILED_BY_PEER = "failed by peer"
    """The peer sent CONNECTION_ERROR."""
    PROTOCOL = "protocol"
    """The peer broke a rule (`ConnectionEnded.rule`); an ERROR frame told it."""
    REFUSED = "refused"
    """The peer or this side refused SETUP or RESUME; `ConnectionEnded.code` says why."""
    LOST = "lost"
    """The carrier ended, and there is no resumption."""
    TIMED_OUT = "timed out"
    """The peer was silent for too long, sent no first frame, or the session was not resumed in time."""


@attrs.define
class RequestReceived:
    """The peer opened a stream, or sent a fire-and-forget request, which opens none."""

    kind: Interaction
    stream_id: int
    payload: Payload
    n: int
    """Payloads that this side may send now; 0 for request-response and fire-and-forget, which have no credit."""
    complete: bool
    """The requester sends nothing more; always true except for channels."""


@attrs.define
class PayloadReceived:
    """A stream item, or the response of a request-response."""

    stream_id: int
    payload: Payload
    complete: bool
    """It was the last one of this direction."""


@attrs.define
class StreamCompleted:
    """The peer's direction ended without a payload; for a request-response there is no response."""

    stream_id: int


@attrs.define
class StreamFailed:
    """The stream is over, in both directions."""

    stream_id: int
    code: int
    """An `ErrorCode` or an application's code. For `FailedBy.CONNECTION` it is the connection's code."""
    data: bytes
    """The data of the peer's ERROR frame, usually text in UTF-8; an explanation if this side made the stream fail."""
    by: FailedBy = FailedBy.PEER
    metadata: bytes | None = None
    """ReactiveSocket only: the metadata of the ERROR frame."""

    @property
    def text(self) -> str:
        """The data as one line of text; see `error_text`."""
        return error_text(self.data)


@attrs.define
class StreamCancelled:
    """The stream of a responder is over: the requester cancelled it, or the connection ended. Send nothing more on it."""

    stream_id: int
    metadata: bytes | None = None
    """ReactiveSocket only: the metadata of the CANCEL frame (RX-59)."""


@attrs.define
class SendingStopped:
    """The responder of a channel accepts no more payloads (RS-69); it may still send its own."""

    stream_id: int


@attrs.define
class CreditGranted:
    """The peer accepts `n` more payloads on this stream (RS-72)."""

    stream_id: int
    n: int


@attrs.define
class SetupReceived:
    """A client wants a connection: call `accept_setup` or `reject_setup`. Its later frames wait until then (RS-52)."""

    version: tuple[int, int]
    """Major and minor."""
    keepalive_interval: float
    """Seconds between the client's KEEPALIVEs."""
    max_lifetime: float
    """Seconds of silence after which the client considers this side dead."""
    metadata_mime_type: str
    data_mime_type: str
    payload: Payload = attrs.field(repr=False)
    lease: bool = False
    """Both sides will need leases for requests."""
    resume_token: bytes | None = attrs.field(default=None, repr=False)
    """The token of a session that can be resumed."""
    strict: bool = False
    """ReactiveSocket only: refuse the client if a MIME type is not understood."""


@attrs.define
class SetupAccepted:
    """Client: the server has shown that it accepted SETUP (RS-53). Requests may be sent before this."""


@attrs.define
class LeaseGranted:
    """The peer allows `n` requests within the next `ttl` seconds. This replaces the earlier lease (RS-130)."""

    ttl: float
    n: int
    metadata: bytes | None


@attrs.define
class MetadataPushed:
    """Metadata of the connection as a whole."""

    metadata: bytes


@attrs.define
class KeepaliveReceived:
    """The peer answered a KEEPALIVE of this side. The core answers the peer's without an event."""

    data: bytes
    """The bytes that were sent with it."""


@attrs.define
class ExtensionReceived:
    """An EXT frame of a type named in `CoreConfig.extensions`."""

    stream_id: int
    extended_type: int
    data: bytes
    metadata_flag: bool
    """The frame's M flag; `data` is unchanged in either case."""


@attrs.define
class PeerFellSilent:
    """The peer was silent for the whole lifetime, and `CoreConfig.close_when_silent` is off: the application decides (RS-107)."""

    silence: float
    """Seconds since the last byte."""


@attrs.define
class ConnectionDraining:
    """The peer sent CONNECTION_CLOSE: neither side sends new requests, and open streams continue to their end (RS-31)."""

    text: str = attrs.field(converter=printable)


@attrs.define
class SessionSuspended:
    """The carrier is gone, and the streams live on (RS-102). Close the carrier; a client connects again and calls `resume`."""

    deadline: float
    """When the session ends unless it is resumed, on the clock of `now`."""
    text: str = attrs.field(converter=printable)
    """What happened to the carrier."""


@attrs.define
class ResumeReceived:
    """Server: a new carrier began with RESUME for a session that this side has.

    Call `resume_on` of the session's core with the core that reported this, and use the carrier for that core from then on.
    """

    session: ReactiveStreamsCore
    """The core of the session."""


@attrs.define
class SessionResumed:
    """The session continues on its new carrier; lost frames are sent again."""

    bytes_resent: int


@attrs.define
class ConnectionEnded:
    """The connection has ended. Send the rest of `data_to_send`, then close the carrier."""

    reason: EndReason
    code: int
    """The code of the ERROR frame that ended it, sent or received; 0 if there was none."""
    text: str = attrs.field(converter=printable)
    """What happened, for people."""
    rule: str = ""
    """`EndReason.PROTOCOL`: id of the rule that the peer broke."""
    offset: int = 0
    """`EndReason.PROTOCOL`: bytes received before the bad frame."""


Event = (
    RequestReceived | PayloadReceived | StreamCompleted | StreamFailed | StreamCancelled | SendingStopped | CreditGranted |
    SetupReceived | SetupAccepted | LeaseGranted | MetadataPushed | KeepaliveReceived | ExtensionReceived | PeerFellSilent |
    ConnectionDraining | SessionSuspended | ResumeReceived | SessionResumed | ConnectionEnded
)  # fmt: skip
