"""The states of a connection and of a stream, and one table of transitions for each. A missing key is not a transition.

A stream's states name the directions in which payloads may still flow, as seen from this side.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

__all__ = ["CONNECTION", "STREAM", "ConnectionInput", "ConnectionState", "StreamInput", "StreamState"]


# IntEnum, as the hash of a plain Enum is a call of Python's, and each stream looks into its table at least once: 0.12 instead of 0.4 us.
class StreamState(IntEnum):
    """Which directions of a stream are open."""

    BOTH = 0
    SENDING = 1
    """Only this side may send payloads."""
    RECEIVING = 2
    """Only the peer may send payloads."""
    ENDED = 3
    """Forgotten: later frames count as frames of an unknown stream."""


class StreamInput(IntEnum):
    """An input that ends a direction, or the stream."""

    SEND_COMPLETE = 0
    RECEIVE_COMPLETE = 1
    SEND_ERROR = 2
    RECEIVE_ERROR = 3
    SEND_CANCEL = 4
    """By the requester."""
    RECEIVE_CANCEL = 5
    """From the requester."""
    SEND_STOP = 6
    """CANCEL by the responder of a channel (RS-69)."""
    RECEIVE_STOP = 7
    """CANCEL from the responder of a channel (RS-69)."""
    RESPONDER_COMPLETE = 8
    """ReactiveSocket: the responder's completion, sent or received, which ends both directions (RX-56)."""


def _stream_table() -> Mapping[tuple[StreamState, StreamInput], StreamState]:
    s, i = StreamState, StreamInput
    table = {
        # RS-64: each direction of a channel completes on its own; the stream is over when both have.
        (s.BOTH, i.SEND_COMPLETE): s.RECEIVING,
        (s.BOTH, i.RECEIVE_COMPLETE): s.SENDING,
        (s.SENDING, i.SEND_COMPLETE): s.ENDED,
        (s.RECEIVING, i.RECEIVE_COMPLETE): s.ENDED,
        # RS-69: the responder's CANCEL counts as completion of the requester's direction.
        (s.BOTH, i.SEND_STOP): s.SENDING,
        (s.RECEIVING, i.SEND_STOP): s.ENDED,
        (s.BOTH, i.RECEIVE_STOP): s.RECEIVING,
        (s.SENDING, i.RECEIVE_STOP): s.ENDED,
    }
    for live in (s.BOTH, s.SENDING, s.RECEIVING):
        # RS-60, RS-63, RS-68: ERROR from either side and CANCEL from the requester end both directions.
        for ending in (i.SEND_ERROR, i.RECEIVE_ERROR, i.SEND_CANCEL, i.RECEIVE_CANCEL):
            table[live, ending] = s.ENDED
    return MappingProxyType(table)


STREAM: Final = _stream_table()


class ConnectionState(Enum):
    """The state of a connection."""

    AWAITING_SETUP = "awaiting setup"
    """Server: nothing has come yet."""
    DECIDING = "deciding"
    """Server: the application decides about SETUP; later frames wait (RS-52)."""
    OPENING = "opening"
    """Client: SETUP is sent, and requests may follow (RS-50). The server has not shown that it accepted."""
    OPEN = "open"
    DRAINING = "draining"
    """CONNECTION_CLOSE was received, or will be sent: open streams continue, new ones are refused (RS-31)."""
    CLOSING = "closing"
    """Server: CONNECTION_CLOSE is sent, and the client has not closed the carrier yet (RS-31)."""
    SUSPENDED = "suspended"
    """A session without a carrier (RS-102)."""
    RESUMING = "resuming"
    """Client: RESUME is sent, nothing else until the answer (RS-95)."""
    HANDED_OVER = "handed over"
    """Server: the carrier began with RESUME and now belongs to the core of the session."""
    ENDED = "ended"


class ConnectionInput(Enum):
    """An input that moves a connection from one state to another."""

    RECEIVE_SETUP = "receive setup"
    RECEIVE_RESUME = "receive resume"
    ACCEPT = "accept"
    """Server: accepts SETUP. Client: sees that it was accepted."""
    DRAIN = "drain"
    """CONNECTION_CLOSE is received, or this side begins to drain."""
    SEND_CLOSE = "send close"
    LOSE_CARRIER = "lose carrier"
    """With resumption; without it the input is END."""
    SEND_RESUME = "send resume"
    RESUME = "resume"
    """RESUME_OK, sent or received."""
    END = "end"


def _connection_table() -> Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState]:
    s, i = ConnectionState, ConnectionInput
    table = {
        (s.AWAITING_SETUP, i.RECEIVE_SETUP): s.DECIDING,
        (s.AWAITING_SETUP, i.RECEIVE_RESUME): s.HANDED_OVER,
        (s.DECIDING, i.ACCEPT): s.OPEN,
        (s.OPENING, i.ACCEPT): s.OPEN,
        (s.OPENING, i.DRAIN): s.DRAINING,
        (s.OPEN, i.DRAIN): s.DRAINING,
        (s.DRAINING, i.SEND_CLOSE): s.CLOSING,
        # RS-101: a draining connection is not resumed.
        (s.OPENING, i.LOSE_CARRIER): s.SUSPENDED,
        (s.OPEN, i.LOSE_CARRIER): s.SUSPENDED,
        (s.RESUMING, i.LOSE_CARRIER): s.SUSPENDED,
        (s.SUSPENDED, i.SEND_RESUME): s.RESUMING,
        (s.RESUMING, i.RESUME): s.OPEN,
        (s.SUSPENDED, i.RESUME): s.OPEN,
        # RS-102: RESUME while the old carrier still looks alive.
        (s.OPEN, i.RESUME): s.OPEN,
    }
    for live in s:
        if live is not s.ENDED:
            table[live, i.END] = s.ENDED
    return MappingProxyType(table)


CONNECTION: Final = _connection_table()
