"""The layout of every operation, and its encoding and decoding.

The core packs and unpacks operations with the structures here; the classes are for tools, tests and rare operations. All numbers are
big-endian, without padding (MA-4).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from struct import Struct
from typing import ClassVar, Final, TypeAlias

import attrs

from .codes import ErrorCode, OperationFault

__all__ = [
    "ALPN", "QMUX_ALPN", "UNDEFINED", "Block", "BlockEnd", "Disconnect", "DisconnectRequest", "Done", "Fail", "Message", "Op",
    "Operation", "Proceed", "Refuse", "Request", "Response", "decode_operation", "decode_operations",
]  # fmt: skip

ALPN: Final = "maop/1"
"""Protocol name in the TLS handshake. Source: MA-1."""
QMUX_ALPN: Final = "qmux-02.maop-1"
"""Protocol name over QMux, of TLS and of WebSocket's subprotocol. Source: QX-40."""
UNDEFINED: Final = 2**64 - 1
"""Length of a body whose size is not known yet. Source: MA-57."""


class Op(enum.IntEnum):
    """The first byte of an operation. Source: section 4, MA-13."""

    MESSAGE = 0x00
    REQUEST = 0x01
    RESPONSE = 0x02
    PROCEED = 0x03
    REFUSE = 0x04
    BLOCK = 0x05
    BLOCK_END = 0x06
    FAIL = 0x07
    DONE = 0x08
    DISCONNECT_REQUEST = 0x09
    DISCONNECT = 0x0A


CONTROL_OPS: Final = frozenset(b"\x03\x04\x07\x08\x09\x0a")
"""Operations that make a stream a control stream. Source: MA-9."""

MESSAGE: Final = Struct(">BHQB")  # op, msg_id, payload_len, priority
REQUEST: Final = Struct(">BHQBHI")  # the same, response_msg_id, timeout_ms
RESPONSE: Final = Struct(">BQQI")  # op, payload_len, exec_start_ms, exec_time_ms
BATCH: Final = Struct(">BH")  # op, count
PROCEED_ENTRY: Final = Struct(">Q")
REFUSE_ENTRY: Final = Struct(">QIH")  # stream_id, retry_after_ms, reason_code
DONE_ENTRY: Final = Struct(">QQI")  # target_stream_id, exec_start_ms, exec_time_ms
BLOCK: Final = Struct(">BI")
BLOCK_END: Final = Struct(">BQ")
FAIL: Final = Struct(">BQHH")  # op, target_stream_id, error_code, reason_len
DISCONNECT_REQUEST: Final = Struct(">BIH")  # op, drain_time_ms, reason_len
ENTRIES: Final = {3: PROCEED_ENTRY, 4: REFUSE_ENTRY, 8: DONE_ENTRY}
KEY_LENGTHS: Final = (0, 16)
"""Bytes of an idempotency key. Source: MA-122."""
MAX_TRACE: Final = 55 + 512
"""Bytes of a trace field: ``traceparent``, which has 55, and ``tracestate``. Source: MA-138."""


def _tail(key: bytes | None, trace: bytes | None) -> bytes:
    """Encode the idempotency field and the trace field; None if it was not negotiated."""
    return (b"" if key is None else bytes((len(key),)) + key) + (b"" if trace is None else trace_field(trace))


def trace_field(trace: bytes) -> bytes:
    """Encode the trace field. Source: MA-138."""
    return len(trace).to_bytes(2, "big") + trace


@attrs.frozen
class Message:
    """Begins a Message."""

    op: ClassVar[Op] = Op.MESSAGE
    msg_id: int
    payload_len: int
    priority: int = 128
    key: bytes | None = None
    """Idempotency key, empty for none; None where the field is not negotiated."""
    trace: bytes | None = None
    """Context of a trace, empty for none; None where the field is not negotiated."""

    def encode(self) -> bytes:
        """Encode the operation."""
        return MESSAGE.pack(0, self.msg_id, self.payload_len, self.priority) + _tail(self.key, self.trace)


@attrs.frozen
class Request:
    """Begins a Request."""

    op: ClassVar[Op] = Op.REQUEST
    msg_id: int
    payload_len: int
    priority: int = 128
    response_msg_id: int = 0
    timeout_ms: int = 5000
    key: bytes | None = None
    """Idempotency key, empty for none; None where the field is not negotiated."""
    trace: bytes | None = None
    """Context of a trace, empty for none; None where the field is not negotiated."""

    def encode(self) -> bytes:
        """Encode the operation."""
        head = REQUEST.pack(1, self.msg_id, self.payload_len, self.priority, self.response_msg_id, self.timeout_ms)
        return head + _tail(self.key, self.trace)


@attrs.frozen
class Response:
    """Begins a Response."""

    op: ClassVar[Op] = Op.RESPONSE
    payload_len: int
    exec_start_ms: int = 0
    exec_time_ms: int = 0

    def encode(self) -> bytes:
        """Encode the operation."""
        return RESPONSE.pack(2, self.payload_len, self.exec_start_ms, self.exec_time_ms)


@attrs.frozen
class Proceed:
    """Approves bodies."""

    op: ClassVar[Op] = Op.PROCEED
    stream_ids: tuple[int, ...]

    def encode(self) -> bytes:
        """Encode the operation."""
        return BATCH.pack(3, len(self.stream_ids)) + b"".join(map(PROCEED_ENTRY.pack, self.stream_ids))


@attrs.frozen
class Refuse:
    """Refuses operations; entries are (stream id, retry after in ms, code)."""

    op: ClassVar[Op] = Op.REFUSE
    entries: tuple[tuple[int, int, int], ...]

    def encode(self) -> bytes:
        """Encode the operation."""
        return BATCH.pack(4, len(self.entries)) + b"".join(REFUSE_ENTRY.pack(*entry) for entry in self.entries)


@attrs.frozen
class Block:
    """A piece of a body."""

    op: ClassVar[Op] = Op.BLOCK
    chunk: bytes = attrs.field(repr=False)

    def encode(self) -> bytes:
        """Encode the operation."""
        return BLOCK.pack(5, len(self.chunk)) + self.chunk


@attrs.frozen
class BlockEnd:
    """Ends a body."""

    op: ClassVar[Op] = Op.BLOCK_END
    total_length: int

    def encode(self) -> bytes:
        """Encode the operation."""
        return BLOCK_END.pack(6, self.total_length)


@attrs.frozen
class Fail:
    """Ends an operation with an error."""

    op: ClassVar[Op] = Op.FAIL
    target_stream_id: int
    error_code: int
    reason: bytes = b""

    def encode(self) -> bytes:
        """Encode the operation."""
        return FAIL.pack(7, self.target_stream_id, self.error_code, len(self.reason)) + self.reason


@attrs.frozen
class Done:
    """Ends operations with success; entries are (stream id, start in UNIX ms, time in ms)."""

    op: ClassVar[Op] = Op.DONE
    entries: tuple[tuple[int, int, int], ...]

    def encode(self) -> bytes:
        """Encode the operation."""
        return BATCH.pack(8, len(self.entries)) + b"".join(DONE_ENTRY.pack(*entry) for entry in self.entries)


@attrs.frozen
class DisconnectRequest:
    """Requests an orderly end."""

    op: ClassVar[Op] = Op.DISCONNECT_REQUEST
    drain_time_ms: int
    reason: bytes = b""

    def encode(self) -> bytes:
        """Encode the operation."""
        return DISCONNECT_REQUEST.pack(9, self.drain_time_ms, len(self.reason)) + self.reason


@attrs.frozen
class Disconnect:
    """Ends the connection at once."""

    op: ClassVar[Op] = Op.DISCONNECT

    def encode(self) -> bytes:
        """Encode the operation."""
        return b"\x0a"


Operation: TypeAlias = (
    Message | Request | Response | Proceed | Refuse | Block | BlockEnd | Fail | Done | DisconnectRequest | Disconnect
)
"""A message or another operation on a stream, whole."""

_FIXED: Final = {
    0: MESSAGE,
    1: REQUEST,
    2: RESPONSE,
    3: BATCH,
    4: BATCH,
    5: BLOCK,
    6: BLOCK_END,
    7: FAIL,
    8: BATCH,
    9: DISCONNECT_REQUEST,
    10: Struct(">B"),
}


def decode_operation(
    data: bytes | bytearray | memoryview, at: int = 0, *, idempotency: bool = False, traces: bool = False
) -> tuple[Operation, int] | None:
    """Decode one whole operation. It is for tools: the core reads entries and chunks as they arrive.

    Args:
        data: bytes of a stream after the authentication.
        at: start of the operation.
        idempotency: whether the headers of Messages and Requests have the key field (MA-122).
        traces: whether they have the trace field (MA-138).

    Returns:
        The operation and the start of the next one; None if bytes are missing.

    Raises:
        ValueError: an unknown operation, or an invalid key length.

    Example:
        >>> decode_operation(bytes.fromhex("06 00 00 00 00 00 00 00 05"))
        (BlockEnd(total_length=5), 9)
    """
    if at >= len(data):
        return None
    layout = _FIXED.get(data[at])
    if layout is None:
        raise ValueError(f"unknown operation 0x{data[at]:02x} at octet {at} [MA-13]")
    begin, at = at, at + layout.size
    if at > len(data):
        return None
    op, *fields = layout.unpack_from(data, begin)
    if op in ENTRIES:
        entry = ENTRIES[op]
        end = at + fields[0] * entry.size
        if end > len(data):
            return None
        entries = tuple(entry.iter_unpack(data[at:end]))
        if op == Op.PROCEED:
            return Proceed(tuple(i for (i,) in entries)), end
        return (Refuse(entries) if op == Op.REFUSE else Done(entries)), end
    if op in (Op.BLOCK, Op.FAIL, Op.DISCONNECT_REQUEST):
        end = at + fields.pop()
        if end > len(data):
            return None
        text = bytes(data[at:end])
        if op == Op.BLOCK:
            return Block(text), end
        return (Fail(fields[0], fields[1], text) if op == Op.FAIL else DisconnectRequest(fields[0], text)), end
    if op in (Op.MESSAGE, Op.REQUEST):
        key = None
        if idempotency:
            if at >= len(data):
                return None
            size = data[at]
            if size not in KEY_LENGTHS:
                raise ValueError(f"idempotency key of {size} bytes, wanted 0 or 16 [MA-122]")
            if at + 1 + size > len(data):
                return None
            key = bytes(data[at + 1 : at + 1 + size])
            at += 1 + size
        trace = None
        if traces:
            size = int.from_bytes(data[at : at + 2], "big")
            if len(data) < at + 2 + size:
                return None
            if size and not 55 <= size <= MAX_TRACE:
                raise ValueError(f"trace field of {size} bytes, wanted 0 or 55 to {MAX_TRACE} [MA-138]")
            trace = bytes(data[at + 2 : at + 2 + size])
            at += 2 + size
        return (
            Message(fields[0], fields[1], fields[2], key, trace)
            if op == Op.MESSAGE
            else attrs.evolve(Request(*fields), key=key, trace=trace)
        ), at
    if op == Op.RESPONSE:
        return Response(*fields), at
    return (BlockEnd(*fields) if op == Op.BLOCK_END else Disconnect()), at


def decode_operations(data: bytes, *, idempotency: bool = False) -> Iterator[Operation]:
    """Yield the operations of bytes that hold whole ones.

    Raises:
        ValueError: an unknown operation, or the bytes end inside one.
    """
    at = 0
    while at < len(data):
        found = decode_operation(data, at, idempotency=idempotency)
        if found is None:
            raise ValueError(f"{len(data) - at} bytes are no whole operation")
        operation, at = found
        yield operation


def check_trace(size: int) -> None:
    """Check the length of a trace field. Source: MA-138."""
    if size and not 55 <= size <= MAX_TRACE:
        raise OperationFault(ErrorCode.INVALID_HEADER, f"trace field of {size} bytes", "MA-138")


def check_key(size: int) -> None:
    """Check the length of an idempotency key. Source: MA-122."""
    if size not in KEY_LENGTHS:
        raise OperationFault(ErrorCode.INVALID_HEADER, f"idempotency key of {size} bytes", "MA-122")
