"""What a core of RSocket or ReactiveSocket reports; both dialects report the same things.

An event is a fact about the connection or about one stream, in the order of happening.  Events are slotted and not frozen, since
each item of a stream is one; treat them as immutable.

Which events a stream has, and what they end:

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

from levada.transports.rsocket.payload import Payload
from levada.transports.text import printable

if TYPE_CHECKING:
    from levada.transports.rsocket.core import RSocketCore

__all__ = [
    "ConnectionDraining", "ConnectionEnded", "CreditGranted", "EndReason", "Event", "ExtensionReceived", "FailedBy", "Interaction",
    "KeepaliveReceived", "LeaseGranted", "MetadataPushed", "PayloadReceived", "PeerFellSilent", "RequestReceived", "ResumeReceived",
    "SendingStopped", "SessionResumed", "SessionSuspended", "SetupAccepted", "SetupReceived", "StreamCancelled", "StreamCompleted",
    "StreamFailed", "error_text",
]  # fmt: skip


def error_text(data: bytes) -> str:
    """Read the data of an ERROR frame as one line of text: UTF-8 with replacement characters, control characters as escapes (RS-28, RX-23)."""
    return printable(
        data[:4096].decode("utf-8", "replace")
    )  # `printable` shows at most 512 characters, of at most 4 bytes


class Interaction(IntEnum):
    """The interaction models of both dialects; the numbers are ours, not those on the wire."""

    REQUEST_RESPONSE = 0
    FIRE_AND_FORGET = 1
    REQUEST_STREAM = 2
    REQUEST_CHANNEL = 3
    REQUEST_SUBSCRIPTION = 4
    """ReactiveSocket only: a stream without an end of its own."""


class FailedBy(Enum):
    """Whose doing the failure of a stream is."""

    PEER = "peer"
    """The peer sent an ERROR frame for the stream."""
    LOCAL = "local"
    """This side gave the stream up, since the peer broke a rule of it or a limit of this side; the peer was told."""
    CONNECTION = "connection"
    """The connection ended under the stream."""


class EndReason(Enum):
    """Why a connection (with resumption: a session) is over."""

    CLOSED = "closed"
    """This side closed it, or drained it to the end."""
    CLOSED_BY_PEER = "closed by peer"
    """The peer announced the end by CONNECTION_CLOSE and every stream has ended, or the drain timed out."""
    FAILED_BY_PEER = "failed by peer"
    """The peer sent CONNECTION_ERROR."""
    PROTOCOL = "protocol"
    """The peer broke a rule (`ConnectionEnded.rule`); it was told by an ERROR frame."""
    REFUSED = "refused"
    """SETUP or RESUME was refused, by the peer or by this side; `ConnectionEnded.code` tells how."""
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
    """Payloads that may be sent now; 0 for request-response and fire-and-forget, where credit is not counted."""
    complete: bool
    """The requester sends nothing further; always true but for channels."""


@attrs.define
class PayloadReceived:
    """An item, or the answer of a request-response."""

    stream_id: int
    payload: Payload
    complete: bool
    """It was the last one of this direction."""


@attrs.define
class StreamCompleted:
    """The peer's direction ended without a payload; a request-response was answered by nothing."""

    stream_id: int


@attrs.define
class StreamFailed:
    """The stream is over, in both directions."""

    stream_id: int
    code: int
    """An `ErrorCode` or an application's code; for `FailedBy.LOCAL` the code that fits, for `FailedBy.CONNECTION` the connection's."""
    data: bytes
    """What the peer sent with the code, usually text in UTF-8; for failures of this side an explanation."""
    by: FailedBy = FailedBy.PEER
    metadata: bytes | None = None
    """ReactiveSocket only: what came with the ERROR frame."""

    @property
    def text(self) -> str:
        """The data as one line of text; see `error_text`."""
        return error_text(self.data)


@attrs.define
class StreamCancelled:
    """The requester cancelled the stream, or the connection ended under its responder; it is over and nothing is to be sent."""

    stream_id: int
    metadata: bytes | None = None
    """ReactiveSocket only: what came with the CANCEL frame (RX-59)."""


@attrs.define
class SendingStopped:
    """The responder of a channel wants no further payloads (RS-69); its own payloads still come."""

    stream_id: int


@attrs.define
class CreditGranted:
    """The peer takes `n` payloads more on this stream (RS-72)."""

    stream_id: int
    n: int


@attrs.define
class SetupReceived:
    """A client wants a connection: call `accept_setup` or `reject_setup`; what it sent behind waits until then (RS-52)."""

    version: tuple[int, int]
    """Major and minor."""
    keepalive_interval: float
    """Seconds between the client's KEEPALIVEs."""
    max_lifetime: float
    """Seconds without an answer after which the client holds this side dead."""
    metadata_mime_type: str
    data_mime_type: str
    payload: Payload
    lease: bool = False
    """Both sides will need leases for requests."""
    resume_token: bytes | None = None
    """The token of a session that can be resumed."""
    strict: bool = False
    """ReactiveSocket only: the MIME types must be understood."""


@attrs.define
class SetupAccepted:
    """Client: the server has shown that it accepted SETUP (RS-53). Requests may be sent before this."""


@attrs.define
class LeaseGranted:
    """The peer allows `n` requests within `ttl` seconds from now; replaces the earlier allowance (RS-130)."""

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
    """The frame's M flag; the data is handed on as it came."""


@attrs.define
class PeerFellSilent:
    """Nothing came for the whole lifetime, and `CoreConfig.close_when_silent` is off: the application decides (RS-107)."""

    silence: float
    """Seconds since the last byte."""


@attrs.define
class ConnectionDraining:
    """The peer sent CONNECTION_CLOSE: no new requests either way, open streams go on to their end (RS-31)."""

    text: str = attrs.field(converter=printable)


@attrs.define
class SessionSuspended:
    """The carrier is gone, the streams live on (RS-102). Close the carrier; a client dials again and calls `resume`."""

    deadline: float
    """When the session is given up, on the clock of `now`."""
    text: str = attrs.field(converter=printable)
    """What happened to the carrier."""


@attrs.define
class ResumeReceived:
    """Server: a new carrier began with RESUME for a session that this side has.

    Call `resume_on` of the session's core with the core that reported this, and use the carrier for that core from then on.
    """

    session: RSocketCore
    """The core of the session."""


@attrs.define
class SessionResumed:
    """The session goes on, on its new carrier; whatever was lost is being sent again."""

    octets_resent: int


@attrs.define
class ConnectionEnded:
    """The connection is over for good; send what `data_to_send` still has, then close the carrier."""

    reason: EndReason
    code: int
    """The code of the ERROR frame that ended it, sent or received; 0 if there was none."""
    text: str = attrs.field(converter=printable)
    """What happened, for people."""
    rule: str = ""
    """`EndReason.PROTOCOL`: id of the rule that the peer broke."""
    offset: int = 0
    """`EndReason.PROTOCOL`: bytes received before the frame at fault."""


Event = (
    RequestReceived | PayloadReceived | StreamCompleted | StreamFailed | StreamCancelled | SendingStopped | CreditGranted |
    SetupReceived | SetupAccepted | LeaseGranted | MetadataPushed | KeepaliveReceived | ExtensionReceived | PeerFellSilent |
    ConnectionDraining | SessionSuspended | ResumeReceived | SessionResumed | ConnectionEnded
)  # fmt: skip
