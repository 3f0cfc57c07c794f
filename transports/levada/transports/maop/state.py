"""The states of a connection and of an operation on either side, with their transitions.

A missing key is an illegal step: a mistake of the peer or of the caller. Members are ints, so that a lookup costs no more than with a
number.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from .codes import ErrorCode
from .frames import Op

__all__ = [
    "CONNECTION", "INITIATOR", "MISPLACED", "RECEIVER", "UNARMED", "ConnectionInput", "ConnectionState",
    "InitiatorInput", "InitiatorState", "ReceiverInput", "ReceiverState",
]  # fmt: skip


class ConnectionState(enum.IntEnum):
    """How far a connection has come. Source: sections 3 and 11."""

    HANDSHAKE = 0
    """QUIC is not ready."""
    AUTHENTICATING = 1
    """Server: reads the message. Client: waits for the result."""
    DECIDING = 2
    """Server: the application decides."""
    LINGERING = 3
    """Refused; the client may close."""
    OPEN = 4
    """Operations may begin."""
    DRAINING = 5
    """A Disconnect Request was sent or received; running operations may finish."""
    FLUSHING = 6
    """All operations have ended; the last signals are on their way."""
    CLOSING = 7
    """Disconnect is on its way."""
    CLOSED = 8
    """Over."""


class ConnectionInput(enum.IntEnum):
    """Inputs of the connection's state machine."""

    HANDSHAKE_COMPLETED = 0
    MESSAGE_READ = 1
    APPROVED = 2
    DISAPPROVED = 3
    DRAIN = 4
    DRAINED = 5
    DISCONNECT = 6
    CLOSED = 7


_C, _CI = ConnectionState, ConnectionInput

CONNECTION: Final[Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState]] = {
    (_C.HANDSHAKE, _CI.HANDSHAKE_COMPLETED): _C.AUTHENTICATING,
    (_C.AUTHENTICATING, _CI.MESSAGE_READ): _C.DECIDING,
    (_C.AUTHENTICATING, _CI.APPROVED): _C.OPEN,
    (_C.AUTHENTICATING, _CI.DISAPPROVED): _C.LINGERING,
    (_C.AUTHENTICATING, _CI.DISCONNECT): _C.CLOSING,
    (_C.DECIDING, _CI.APPROVED): _C.OPEN,
    (_C.DECIDING, _CI.DISAPPROVED): _C.LINGERING,
    (_C.OPEN, _CI.DRAIN): _C.DRAINING,
    (_C.OPEN, _CI.DISCONNECT): _C.CLOSING,
    (_C.DRAINING, _CI.DRAIN): _C.DRAINING,
    (_C.DRAINING, _CI.DRAINED): _C.FLUSHING,
    (_C.DRAINING, _CI.DISCONNECT): _C.CLOSING,
    (_C.FLUSHING, _CI.DISCONNECT): _C.CLOSING,
    **{(state, _CI.CLOSED): _C.CLOSED for state in _C if state is not _C.CLOSED},
}


class ReceiverState(enum.IntEnum):
    """State of an operation that the peer began. Source: section 21."""

    NEW = 0
    """The header is not whole; or it is, announces no body, and the gate has not decided."""
    PENDING = 1
    """A body is announced and the gate has not decided."""
    ARMED = 2
    """Proceed is written; Blocks may come."""
    RUNNING = 3
    """The body is complete and the handler is at work."""
    RESPONDING = 4
    """The Response header is written; its body is not complete."""
    ENDED = 5
    """The terminal is written, or the operation was given up."""


class ReceiverInput(enum.IntEnum):
    """Inputs of a received operation's state machine."""

    CHECKED = 0
    APPROVED = 1
    BODY_COMPLETE = 2
    RESPONSE = 3
    DONE = 4
    REFUSED = 5
    FAILED = 6
    RESET = 7


_R, _RI = ReceiverState, ReceiverInput

RECEIVER: Final[Mapping[tuple[ReceiverState, ReceiverInput], ReceiverState]] = {
    (_R.NEW, _RI.CHECKED): _R.PENDING,
    (_R.NEW, _RI.APPROVED): _R.RUNNING,
    (_R.NEW, _RI.REFUSED): _R.ENDED,
    (_R.NEW, _RI.FAILED): _R.ENDED,
    (_R.NEW, _RI.RESET): _R.ENDED,
    (_R.NEW, _RI.DONE): _R.ENDED,
    (_R.NEW, _RI.RESPONSE): _R.RESPONDING,
    (_R.PENDING, _RI.APPROVED): _R.ARMED,
    (_R.PENDING, _RI.REFUSED): _R.ENDED,
    (_R.PENDING, _RI.FAILED): _R.ENDED,
    (_R.PENDING, _RI.RESET): _R.ENDED,
    (_R.ARMED, _RI.BODY_COMPLETE): _R.RUNNING,
    (_R.ARMED, _RI.FAILED): _R.ENDED,
    (_R.ARMED, _RI.RESET): _R.ENDED,
    (_R.RUNNING, _RI.RESPONSE): _R.RESPONDING,
    (_R.RUNNING, _RI.DONE): _R.ENDED,
    (_R.RUNNING, _RI.FAILED): _R.ENDED,
    (_R.RUNNING, _RI.RESET): _R.ENDED,
    (_R.RESPONDING, _RI.DONE): _R.ENDED,
    (_R.RESPONDING, _RI.FAILED): _R.ENDED,
    (_R.RESPONDING, _RI.RESET): _R.ENDED,
}
"""NEW takes DONE and RESPONSE if a stored terminal answers a repetition without a body (MA-123)."""

MISPLACED: Final[Mapping[int, ErrorCode]] = {
    Op.MESSAGE: ErrorCode.PROTOCOL_VIOLATION,  # MA-11: one operation for each stream
    Op.REQUEST: ErrorCode.PROTOCOL_VIOLATION,
    Op.RESPONSE: ErrorCode.ILLEGAL_STREAM,  # MA-70
    Op.PROCEED: ErrorCode.ILLEGAL_STREAM,  # MA-12
    Op.REFUSE: ErrorCode.ILLEGAL_STREAM,
    Op.FAIL: ErrorCode.ILLEGAL_STREAM,
    Op.DONE: ErrorCode.ILLEGAL_STREAM,
    Op.DISCONNECT_REQUEST: ErrorCode.ILLEGAL_STREAM,
    Op.DISCONNECT: ErrorCode.ILLEGAL_STREAM,
}
"""The error for each operation that comes on a data stream after the header; unknown operations are INVALID_FORMAT (MA-13)."""

UNARMED: Final[Mapping[tuple[ReceiverState, bool], ErrorCode]] = {
    (_R.NEW, True): ErrorCode.PAYLOAD_LENGTH_MISMATCH,  # MA-55
    (_R.PENDING, False): ErrorCode.UNAUTHORIZED,  # MA-50
    (_R.RUNNING, True): ErrorCode.PAYLOAD_LENGTH_MISMATCH,  # MA-55
    (_R.RUNNING, False): ErrorCode.ILLEGAL_STREAM,  # MA-60
    (_R.RESPONDING, True): ErrorCode.PAYLOAD_LENGTH_MISMATCH,
    (_R.RESPONDING, False): ErrorCode.ILLEGAL_STREAM,
}
"""The error for a Block or Block End, by state and whether the header announced an empty body."""


class InitiatorState(enum.IntEnum):
    """State of an operation that this side began. Source: section 21."""

    HEADER_SENT = 0
    """A body is announced; waits for Proceed."""
    SENDING = 1
    """The body is on its way."""
    WAITING = 2
    """Everything is sent; waits for Done or Response."""
    RECEIVING = 3
    """The Response header came; its body is not complete."""
    CONSUMING = 4
    """The Response is complete; the application has not accepted or rejected it."""
    ENDED = 5
    """Completed, refused or failed."""


class InitiatorInput(enum.IntEnum):
    """Inputs of an operation of our own."""

    PROCEED = 0
    BODY_SENT = 1
    RESPONSE = 2
    RESPONSE_COMPLETE = 3
    DONE = 4
    REFUSED = 5
    FAILED = 6


_I, _II = InitiatorState, InitiatorInput

INITIATOR: Final[Mapping[tuple[InitiatorState, InitiatorInput], InitiatorState]] = {
    (_I.HEADER_SENT, _II.PROCEED): _I.SENDING,
    (_I.HEADER_SENT, _II.RESPONSE): _I.RECEIVING,
    (_I.HEADER_SENT, _II.DONE): _I.ENDED,
    (_I.HEADER_SENT, _II.REFUSED): _I.ENDED,
    (_I.HEADER_SENT, _II.FAILED): _I.ENDED,
    (_I.SENDING, _II.BODY_SENT): _I.WAITING,
    (_I.SENDING, _II.FAILED): _I.ENDED,
    (_I.WAITING, _II.PROCEED): _I.WAITING,
    (_I.WAITING, _II.RESPONSE): _I.RECEIVING,
    (_I.WAITING, _II.DONE): _I.ENDED,
    (_I.WAITING, _II.REFUSED): _I.ENDED,
    (_I.WAITING, _II.FAILED): _I.ENDED,
    (_I.RECEIVING, _II.PROCEED): _I.RECEIVING,
    (_I.RECEIVING, _II.RESPONSE_COMPLETE): _I.CONSUMING,
    (_I.RECEIVING, _II.FAILED): _I.ENDED,
    (_I.CONSUMING, _II.DONE): _I.ENDED,
    (_I.CONSUMING, _II.FAILED): _I.ENDED,
}
"""WAITING takes PROCEED and REFUSED because an empty body does not wait (MA-47)."""
