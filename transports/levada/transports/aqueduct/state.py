"""The state machines as data: where a frame may occur, and how connections, senders and receivers change.

The rules of this file:

* A key that is missing from `PLACES` is a protocol error of the peer. A key that is missing from another table is never looked up, because
  it is impossible or was refused before; a lookup would raise `KeyError`.
* The effects of a transition are beside the lookup (`core`, `sender`, `receiver`), once. No state changes in another way.
* The diagrams in the documentation are drawn from these tables, and a test compares them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from .codes import violation
from .frames import FrameType

__all__ = [
    "CONNECTION", "ENDS", "PLACES", "RECEIVER", "SENDER", "ConnectionInput", "ConnectionState", "Mode",
    "ReceiverInput", "ReceiverState", "SenderInput", "SenderState", "StreamPosition", "next_place",
]  # fmt: skip


class _Key(enum.Enum):
    """A part of the keys of tables. `enum.Enum` hashes its members by name, in Python: thirty times for a round trip with a oneshot."""

    __hash__ = object.__hash__


class StreamPosition(_Key):
    """Position in one direction of a stream, or in a datagram. Source: AQ-10."""

    UNI = "unidirectional stream"
    UNI_VERSION = "unidirectional stream, after Version"
    MESSAGES = "messages"
    ALONE = "after ClosedChannelLost"
    DATAGRAM = "datagram"
    DATAGRAM_VERSION = "datagram, after Version"
    DATAGRAM_MESSAGES = "messages of a datagram"
    CLIENT_BIDI = "bidirectional stream of the client"
    CLIENT_BIDI_VERSION = "bidirectional stream of the client, after Version"
    SERVER_BIDI = "bidirectional stream of the server"
    SERVER_BIDI_VERSION = "bidirectional stream of the server, after Version"
    ANSWER = "server's direction of the connection control stream"
    ANSWER_VERSION = "server's direction of the connection control stream, after Version"
    CONNECTION = "after ConnectionControl"
    CHANNEL = "after ChannelControl"
    SENDER = "sender's direction"
    SENDER_VERSION = "sender's direction, after Version"
    SENDER_FRAMES = "frames of the sender"
    SENDER_DONE = "after FinishSender"
    RECEIVER = "receiver's direction"
    RECEIVER_VERSION = "receiver's direction, after Version"
    RECEIVER_FRAMES = "frames of the receiver"
    RECEIVER_DONE = "after CloseReceiver"
    DISCARD = "read and discarded"


_P, _F = StreamPosition, FrameType

PLACES: Final[Mapping[tuple[StreamPosition, int], StreamPosition]] = {
    (_P.UNI, _F.VERSION): _P.UNI_VERSION,
    (_P.UNI, _F.MESSAGE): _P.MESSAGES,
    (_P.UNI, _F.CLOSED_CHANNEL_LOST): _P.ALONE,
    (_P.UNI_VERSION, _F.MESSAGE): _P.MESSAGES,
    (_P.UNI_VERSION, _F.CLOSED_CHANNEL_LOST): _P.ALONE,
    (_P.MESSAGES, _F.MESSAGE): _P.MESSAGES,
    (_P.DATAGRAM, _F.VERSION): _P.DATAGRAM_VERSION,
    (_P.DATAGRAM, _F.MESSAGE): _P.DATAGRAM_MESSAGES,
    (_P.DATAGRAM_VERSION, _F.MESSAGE): _P.DATAGRAM_MESSAGES,
    (_P.DATAGRAM_MESSAGES, _F.MESSAGE): _P.DATAGRAM_MESSAGES,
    (_P.CLIENT_BIDI, _F.VERSION): _P.CLIENT_BIDI_VERSION,
    (_P.CLIENT_BIDI, _F.CHANNEL_CONTROL): _P.CHANNEL,
    (_P.CLIENT_BIDI_VERSION, _F.CONNECTION_CONTROL): _P.CONNECTION,
    (_P.CLIENT_BIDI_VERSION, _F.CHANNEL_CONTROL): _P.CHANNEL,
    (_P.SERVER_BIDI, _F.VERSION): _P.SERVER_BIDI_VERSION,
    (_P.SERVER_BIDI, _F.CHANNEL_CONTROL): _P.CHANNEL,
    (_P.SERVER_BIDI_VERSION, _F.CHANNEL_CONTROL): _P.CHANNEL,
    (_P.ANSWER, _F.VERSION): _P.ANSWER_VERSION,
    (_P.ANSWER_VERSION, _F.CONNECTION_CONTROL): _P.CONNECTION,
    (_P.SENDER, _F.VERSION): _P.SENDER_VERSION,
    (_P.SENDER, _F.SENT_UNRELIABLE): _P.SENDER_FRAMES,
    (_P.SENDER, _F.FINISH_SENDER): _P.SENDER_DONE,
    (_P.SENDER_VERSION, _F.SENT_UNRELIABLE): _P.SENDER_FRAMES,
    (_P.SENDER_VERSION, _F.FINISH_SENDER): _P.SENDER_DONE,
    (_P.SENDER_FRAMES, _F.SENT_UNRELIABLE): _P.SENDER_FRAMES,
    (_P.SENDER_FRAMES, _F.FINISH_SENDER): _P.SENDER_DONE,
    (_P.RECEIVER, _F.VERSION): _P.RECEIVER_VERSION,
    (_P.RECEIVER, _F.ACK_RELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER, _F.ACK_NACK_UNRELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER, _F.CLOSE_RECEIVER): _P.RECEIVER_DONE,
    (_P.RECEIVER_VERSION, _F.ACK_RELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER_VERSION, _F.ACK_NACK_UNRELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER_VERSION, _F.CLOSE_RECEIVER): _P.RECEIVER_DONE,
    (_P.RECEIVER_FRAMES, _F.ACK_RELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER_FRAMES, _F.ACK_NACK_UNRELIABLE): _P.RECEIVER_FRAMES,
    (_P.RECEIVER_FRAMES, _F.CLOSE_RECEIVER): _P.RECEIVER_DONE,
}
"""Frames allowed in each place, and the next place. `CHANNEL` becomes the frames of the half that opened the stream, according to
the flow bit of the channel. All else is E-8. Source: AQ-10, D-4."""

ENDS: Final[Mapping[StreamPosition, str | None]] = {
    _P.UNI: "E-9",
    _P.UNI_VERSION: None,
    _P.MESSAGES: None,
    _P.ALONE: None,
    _P.DATAGRAM: "E-9",
    _P.DATAGRAM_VERSION: None,
    _P.DATAGRAM_MESSAGES: None,
    _P.CLIENT_BIDI: "E-9",
    _P.CLIENT_BIDI_VERSION: "E-10",
    _P.SERVER_BIDI: "E-9",
    _P.SERVER_BIDI_VERSION: "E-10",
    _P.ANSWER: "E-13",
    _P.ANSWER_VERSION: "E-13",
    _P.CONNECTION: "E-13",
    _P.SENDER: "E-9",
    _P.SENDER_VERSION: "E-10",
    _P.SENDER_FRAMES: "E-10",
    _P.SENDER_DONE: None,
    _P.RECEIVER: "E-9",
    _P.RECEIVER_VERSION: "E-10",
    _P.RECEIVER_FRAMES: "E-10",
    _P.RECEIVER_DONE: None,
    _P.DISCARD: None,
}
"""The rule broken if a direction finishes, or a datagram ends, in this place. Source: AQ-11, AQ-13, AQ-15."""

_KINDS = frozenset(FrameType)
_BEGINNINGS = (_P.UNI, _P.DATAGRAM, _P.CLIENT_BIDI)


def next_place(place: StreamPosition, kind: int, *, greeted: bool) -> StreamPosition:
    """Return the place behind a frame of this kind; `greeted`: this side is a client, or the client has greeted it.

    Raises:
        RemoteProtocolError: it may not occur here.

    Source: AQ-8, AQ-10, AQ-16, E-6, E-8, E-12, E-14.
    """
    following = PLACES.get((place, kind))
    if following is None:
        if kind not in _KINDS:
            raise violation("E-6", f"0x{kind:02x}")
        if kind == FrameType.CONNECTION_CONTROL and place is StreamPosition.CONNECTION:
            raise violation("E-12")
        raise violation("E-8", f"{FrameType(kind).name} on {place.value}")
    if kind != FrameType.VERSION and place in _BEGINNINGS and not greeted:
        raise violation("E-14", f"{FrameType(kind).name} on {place.value}")
    return following


class ConnectionState(_Key):
    """How far the two sides have greeted each other. Source: AQ-15 to AQ-18, AQ-21."""

    HANDSHAKE = "handshake"
    """The QUIC handshake is not complete: data may be a replay."""
    GREETING = "greeting"
    """Waiting for the peer's ConnectionControl."""
    OFFERED = "offered"
    """Server only: the client's headers are known, and the application has not answered."""
    OPEN = "open"
    """Both sides have greeted."""
    DRAINING = "draining"
    """Open channels may end. When they have, or the time is over, the connection ends by itself."""
    CLOSED = "closed"
    """The connection is over."""


class ConnectionInput(_Key):
    """Inputs of the connection's state machine."""

    HANDSHAKE_COMPLETED = "handshake completed"
    CLIENT_GREETED = "ConnectionControl of the client"
    SERVER_GREETED = "ConnectionControl of the server"
    ACCEPTED = "app accepts"
    DRAIN = "drain"
    CLOSED = "closed"


_C, _CI = ConnectionState, ConnectionInput

CONNECTION: Final[Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState]] = {
    (_C.HANDSHAKE, _CI.HANDSHAKE_COMPLETED): _C.GREETING,
    (_C.GREETING, _CI.CLIENT_GREETED): _C.OFFERED,
    (_C.OFFERED, _CI.ACCEPTED): _C.OPEN,
    (_C.GREETING, _CI.SERVER_GREETED): _C.OPEN,
    (_C.OPEN, _CI.DRAIN): _C.DRAINING,
    (_C.HANDSHAKE, _CI.CLOSED): _C.CLOSED,
    (_C.GREETING, _CI.CLOSED): _C.CLOSED,
    (_C.OFFERED, _CI.CLOSED): _C.CLOSED,
    (_C.OPEN, _CI.CLOSED): _C.CLOSED,
    (_C.DRAINING, _CI.CLOSED): _C.CLOSED,
}


class Mode(enum.Enum):
    """How a message travels. Source: AQ-23."""

    ORDERED = "ordered"
    """On the channel's one stream, after the messages before it."""
    UNORDERED = "unordered"
    """On its own stream."""
    UNRELIABLE = "unreliable"
    """In a datagram, or on its own stream if it does not fit (AQ-22)."""


class SenderState(_Key):
    """State of a local sender; the last five are ends. Source: section 8."""

    UNATTACHED = "unattached"
    """Open; the channel control stream has not come yet."""
    OPEN = "open"
    FINISH_WAIT = "finish-wait"
    """The application has finished it; unattached."""
    FINISHING = "finishing"
    """FinishSender was sent."""
    CANCEL_WAIT = "cancel-wait"
    """The application has cancelled it; unattached, or the gate is shut."""
    CANCELLING = "cancelling"
    """The sender's direction is reset."""
    FINISHED = "finished"
    RECEIVER_CLOSED = "receiver closed"
    CANCELLED = "cancelled"
    LOST = "lost"
    CONNECTION_LOST = "connection lost"


class SenderInput(_Key):
    """Inputs of a sender's state machine."""

    ATTACHED = "control attached"
    FINISH = "app finish"
    CANCEL = "app cancel, gate open"
    CANCEL_SHUT = "app cancel, gate shut or unattached"
    GATE_OPENED = "gate opens"
    CLOSED = "CloseReceiver"
    CLOSED_COMPLETE = "CloseReceiver, all reliable acked"
    LOST = "lost"
    CONNECTION_CLOSED = "connection closed"


_S, _SI = SenderState, SenderInput

SENDER: Final[Mapping[tuple[SenderState, SenderInput], SenderState]] = {
    (_S.UNATTACHED, _SI.ATTACHED): _S.OPEN,
    (_S.UNATTACHED, _SI.FINISH): _S.FINISH_WAIT,
    (_S.UNATTACHED, _SI.CANCEL_SHUT): _S.CANCEL_WAIT,
    (_S.UNATTACHED, _SI.LOST): _S.LOST,
    (_S.UNATTACHED, _SI.CONNECTION_CLOSED): _S.CONNECTION_LOST,
    (_S.OPEN, _SI.FINISH): _S.FINISHING,
    (_S.OPEN, _SI.CANCEL): _S.CANCELLING,
    (_S.OPEN, _SI.CANCEL_SHUT): _S.CANCEL_WAIT,
    (_S.OPEN, _SI.CLOSED): _S.RECEIVER_CLOSED,
    (_S.OPEN, _SI.CLOSED_COMPLETE): _S.RECEIVER_CLOSED,
    (_S.OPEN, _SI.LOST): _S.LOST,
    (_S.OPEN, _SI.CONNECTION_CLOSED): _S.CONNECTION_LOST,
    (_S.FINISH_WAIT, _SI.ATTACHED): _S.FINISHING,
    (_S.FINISH_WAIT, _SI.FINISH): _S.FINISH_WAIT,
    (_S.FINISH_WAIT, _SI.CANCEL_SHUT): _S.CANCEL_WAIT,
    (_S.FINISH_WAIT, _SI.LOST): _S.LOST,
    (_S.FINISH_WAIT, _SI.CONNECTION_CLOSED): _S.CONNECTION_LOST,
    (_S.FINISHING, _SI.FINISH): _S.FINISHING,
    (_S.FINISHING, _SI.CANCEL): _S.CANCELLING,
    (_S.FINISHING, _SI.CANCEL_SHUT): _S.CANCEL_WAIT,
    (_S.FINISHING, _SI.CLOSED): _S.RECEIVER_CLOSED,
    (_S.FINISHING, _SI.CLOSED_COMPLETE): _S.FINISHED,
    (_S.FINISHING, _SI.LOST): _S.LOST,
    (_S.FINISHING, _SI.CONNECTION_CLOSED): _S.CONNECTION_LOST,
    (_S.CANCEL_WAIT, _SI.ATTACHED): _S.CANCELLING,
    (_S.CANCEL_WAIT, _SI.GATE_OPENED): _S.CANCELLING,
    (_S.CANCEL_WAIT, _SI.CLOSED): _S.CANCELLED,
    (_S.CANCEL_WAIT, _SI.CLOSED_COMPLETE): _S.CANCELLED,
    (_S.CANCEL_WAIT, _SI.LOST): _S.LOST,
    (_S.CANCEL_WAIT, _SI.CONNECTION_CLOSED): _S.CANCELLED,
    (_S.CANCELLING, _SI.CLOSED): _S.CANCELLED,
    (_S.CANCELLING, _SI.CLOSED_COMPLETE): _S.CANCELLED,
    (_S.CANCELLING, _SI.LOST): _S.LOST,
    (_S.CANCELLING, _SI.CONNECTION_CLOSED): _S.CANCELLED,
}


class ReceiverState(_Key):
    """State of a local receiver; the last five are ends. Its mailbox outlives it. Source: section 8."""

    UNATTACHED = "unattached"
    """Open; the channel control stream has not come yet."""
    OPEN = "open"
    FINISHING = "finishing"
    """FinishSender was received."""
    CLOSE_WAIT = "close-wait"
    """Closed by the application, unattached."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    LOST = "lost"
    CONNECTION_LOST = "connection lost"


class ReceiverInput(_Key):
    """Inputs of a receiver's state machine."""

    ATTACHED = "control attached"
    FINISH_SENDER = "FinishSender"
    COMPLETE = "all declared settled"
    CANCELLED = "reset cancelled"
    CLOSE = "app close"
    LOST = "lost"
    CONNECTION_CLOSED = "connection closed"


_R, _RI = ReceiverState, ReceiverInput

RECEIVER: Final[Mapping[tuple[ReceiverState, ReceiverInput], ReceiverState]] = {
    (_R.UNATTACHED, _RI.ATTACHED): _R.OPEN,
    (_R.UNATTACHED, _RI.CLOSE): _R.CLOSE_WAIT,
    (_R.UNATTACHED, _RI.LOST): _R.LOST,
    (_R.UNATTACHED, _RI.CONNECTION_CLOSED): _R.CONNECTION_LOST,
    (_R.OPEN, _RI.FINISH_SENDER): _R.FINISHING,
    (_R.OPEN, _RI.CANCELLED): _R.CANCELLED,
    (_R.OPEN, _RI.CLOSE): _R.CLOSED,
    (_R.OPEN, _RI.LOST): _R.LOST,
    (_R.OPEN, _RI.CONNECTION_CLOSED): _R.CONNECTION_LOST,
    (_R.FINISHING, _RI.COMPLETE): _R.FINISHED,
    (_R.FINISHING, _RI.CANCELLED): _R.CANCELLED,
    (_R.FINISHING, _RI.CLOSE): _R.CLOSED,
    (_R.FINISHING, _RI.LOST): _R.LOST,
    (_R.FINISHING, _RI.CONNECTION_CLOSED): _R.CONNECTION_LOST,
    (_R.CLOSE_WAIT, _RI.ATTACHED): _R.CLOSED,
    (_R.CLOSE_WAIT, _RI.CLOSE): _R.CLOSE_WAIT,
    (_R.CLOSE_WAIT, _RI.LOST): _R.LOST,
    (_R.CLOSE_WAIT, _RI.CONNECTION_CLOSED): _R.CLOSED,
}
