"""Encoding and decoding of QMux: integers, frames, transport parameters.

`read_frame` reads any frame. STREAM frames, which are nearly all of a busy connection, are read and written in place by
`levada.transports.qmux.receiving` and `levada.transports.qmux.sending`.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

import attrs

from .codes import MAX_CODE, ConnectionFault, TransportError

__all__ = [
    "DEFAULT_MAX_RECORD", "LARGEST", "MAX_STREAMS", "PARAMETERS_PREFIX", "Frame", "FrameType", "Parameters", "encode_close", "encode_frame",
    "encode_head", "encode_int", "read_frame", "read_int",
]  # fmt: skip

LARGEST: Final = MAX_CODE
"""The largest integer. Source: QX-1."""
MAX_STREAMS: Final = 1 << 60
"""Most streams of one kind. Source: QX-12."""
DEFAULT_MAX_RECORD: Final = 16_382
"""Largest Size unless the receiver declares more. Source: QX-3, QX-18."""
MAX_PARAMETERS: Final = 256
"""Most parameters in one list. Source: QX-17 (D-9)."""
MAX_REASON: Final = 1024
"""Longest reason sent, in bytes. Source: QX-36."""

_ENCODING = TransportError.FRAME_ENCODING_ERROR
_PARAMETER = TransportError.TRANSPORT_PARAMETER_ERROR


class FrameType(enum.IntEnum):
    """Types of frames; the eight types of STREAM are one here. Source: QX-7."""

    PADDING = 0x00
    """No fields."""
    RESET_STREAM = 0x04
    """Stream id, code, final size."""
    STOP_SENDING = 0x05
    """Stream id, code."""
    STREAM = 0x08
    """Stream id, offset, data; the low three bits are OFF, LEN and FIN."""
    MAX_DATA = 0x10
    """Maximum."""
    MAX_STREAM_DATA = 0x11
    """Stream id, maximum."""
    MAX_STREAMS_BIDI = 0x12
    """Maximum."""
    MAX_STREAMS_UNI = 0x13
    """Maximum."""
    DATA_BLOCKED = 0x14
    """Limit."""
    STREAM_DATA_BLOCKED = 0x15
    """Stream id, limit."""
    STREAMS_BLOCKED_BIDI = 0x16
    """Limit."""
    STREAMS_BLOCKED_UNI = 0x17
    """Limit."""
    TRANSPORT_CLOSE = 0x1C
    """Code, type of the frame that caused it, reason."""
    APPLICATION_CLOSE = 0x1D
    """Code, reason."""
    RESET_STREAM_AT = 0x24
    """Stream id, code, final size, reliable size."""
    DATAGRAM = 0x30
    """Data to the end of the record."""
    DATAGRAM_LEN = 0x31
    """Data with its length."""
    PARAMETERS = 0x3F5153300D0A0D0A
    """Transport parameters."""
    PING = 0x348C67529EF8C7BD
    """Number."""
    PING_ANSWER = 0x348C67529EF8C7BE
    """Number."""


_INTS: Final = {
    FrameType.PADDING: 0,
    FrameType.RESET_STREAM: 3,
    FrameType.STOP_SENDING: 2,
    FrameType.MAX_DATA: 1,
    FrameType.MAX_STREAM_DATA: 2,
    FrameType.MAX_STREAMS_BIDI: 1,
    FrameType.MAX_STREAMS_UNI: 1,
    FrameType.DATA_BLOCKED: 1,
    FrameType.STREAM_DATA_BLOCKED: 2,
    FrameType.STREAMS_BLOCKED_BIDI: 1,
    FrameType.STREAMS_BLOCKED_UNI: 1,
    FrameType.TRANSPORT_CLOSE: 2,
    FrameType.APPLICATION_CLOSE: 1,
    FrameType.RESET_STREAM_AT: 4,
    FrameType.DATAGRAM: 0,
    FrameType.DATAGRAM_LEN: 0,
    FrameType.PARAMETERS: 0,
    FrameType.PING: 1,
    FrameType.PING_ANSWER: 1,
}
"""Number of integers of each type, before its data if it has some. Source: QX-7."""
_WITH_DATA: Final = frozenset(
    (FrameType.TRANSPORT_CLOSE, FrameType.APPLICATION_CLOSE, FrameType.DATAGRAM_LEN, FrameType.PARAMETERS)
)
"""Types that end with a length and data."""


@attrs.define
class Frame:
    """One frame as it was read."""

    kind: int
    """A `FrameType`; for STREAM the type on the wire, 0x08 to 0x0f."""
    fields: tuple[int, ...]
    """The frame's integers, without a length; for STREAM the stream id and, if present, the offset."""
    data: bytes
    """The frame's data, reason or parameters."""


def encode_int(number: int) -> bytes:
    """Return the shortest encoding of an integer. Source: QX-1.

    Example:
        >>> [encode_int(n).hex() for n in (0, 63, 64, 16384, 2**30)]
        ['00', '3f', '4040', '80004000', 'c000000040000000']
    """
    if number < 0x40:
        return number.to_bytes(1, "big")
    if number < 0x4000:
        return (number | 0x4000).to_bytes(2, "big")
    if number < 0x4000_0000:
        return (number | 0x8000_0000).to_bytes(4, "big")
    return (number | 0xC000_0000_0000_0000).to_bytes(8, "big")


def read_int(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the integer at `at`, and where it ends.

    Raises:
        Fault: the integer goes beyond `stop`.

    Source: QX-1, QX-4.
    """
    if at < stop:
        size = 1 << (data[at] >> 6)
        end = at + size
        if end <= stop:
            return int.from_bytes(data[at:end], "big") & ((1 << (8 * size - 2)) - 1), end
    raise ConnectionFault(_ENCODING, "QX-4", "a frame is cut by the end of its record")


PARAMETERS_PREFIX: Final = encode_int(FrameType.PARAMETERS)
"""The first bytes of every connection, after the first Size. Source: QX-9 (D-5, D-6)."""


def read_frame(data: bytes, at: int, stop: int) -> tuple[Frame, int]:
    """Return the frame at `at`, and where it ends.

    Args:
        data: contains a record.
        at: where the frame begins.
        stop: where the record ends.

    Raises:
        Fault: the frame is cut, or its type is prohibited, unknown, or not in its shortest form.

    Source: QX-4, QX-5, QX-7, QX-8, D-1.
    """
    kind, after = read_int(data, at, stop)
    if after - at != len(encode_int(kind)):
        raise ConnectionFault(
            TransportError.PROTOCOL_VIOLATION, "QX-1", f"frame type {kind:#x} is not in its shortest form"
        )
    at = after
    if kind & ~7 == FrameType.STREAM:
        count, has_length, to_end = 2 if kind & 4 else 1, kind & 2 != 0, kind & 2 == 0
    elif kind in _INTS:
        count, has_length, to_end = _INTS[FrameType(kind)], kind in _WITH_DATA, kind == FrameType.DATAGRAM
    else:
        raise ConnectionFault(_ENCODING, "QX-8", f"frame type {kind:#x} does not exist here")
    fields = []
    for _ in range(count):
        number, at = read_int(data, at, stop)
        fields.append(number)
    end = stop if to_end else at
    if has_length:
        length, at = read_int(data, at, stop)
        end = at + length
        if end > stop:
            raise ConnectionFault(_ENCODING, "QX-4", f"{length} bytes in a frame, {stop - at} in its record")
    return Frame(kind, tuple(fields), data[at:end]), end


_HEAD = struct.Struct(">BIBB")  # for stream ids of four bytes: all but the first 4,096 streams of a kind


def encode_head(stream_id: int, offset: int, size: int, fin: bool) -> bytes:
    """Return the head of a STREAM frame with OFF and LEN, without its data. Source: QX-7."""
    kind = 0x0F if fin else 0x0E
    if 0x4000 <= stream_id < 0x4000_0000 and offset < 0x40 and size < 0x40:
        # As in a request: 0.2 us, where the last line takes 0.6.
        return _HEAD.pack(kind, stream_id | 0x8000_0000, offset, size)
    return kind.to_bytes(1, "big") + encode_int(stream_id) + encode_int(offset) + encode_int(size)


def encode_frame(kind: int, *fields: int, data: bytes | None = None) -> bytes:
    """Return a frame: its type, its integers and, if given, data with its length. Source: QX-7."""
    frame = encode_int(kind) + b"".join(map(encode_int, fields))
    return frame if data is None else frame + encode_int(len(data)) + data


def encode_close(code: int, reason: str, *, cause: int | None) -> bytes:
    """Return CONNECTION_CLOSE. The reason is cut to at most 1024 bytes, between two characters.

    Args:
        code: the application's code, or a `TransportError`.
        reason: text for the peer.
        cause: type of the frame at fault (0: unknown) for a transport error; `None` for the application's close.

    Source: QX-7, QX-36.
    """
    text = reason.encode("utf-8", "replace")[:MAX_REASON].decode("utf-8", "ignore").encode()
    if cause is None:
        return encode_frame(FrameType.APPLICATION_CLOSE, code, data=text)
    return encode_frame(FrameType.TRANSPORT_CLOSE, code, cause, data=text)


_INTEGERS: Final = {
    0x01: "max_idle_timeout_ms",
    0x04: "max_data",
    0x05: "max_stream_data_bidi_local",
    0x06: "max_stream_data_bidi_remote",
    0x07: "max_stream_data_uni",
    0x08: "max_streams_bidi",
    0x09: "max_streams_uni",
    0x20: "max_datagram_frame_size",
    0x0571C59429CD0845: "max_record_size",
}
_RESET_STREAM_AT: Final = 0x1D
_PROHIBITED: Final = frozenset((0x00, 0x02, 0x03, 0x0A, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F, 0x10))  # QX-15
_STREAM_COUNTS: Final = frozenset((0x08, 0x09))


@attrs.frozen(kw_only=True)
class Parameters:
    """The transport parameters that one side declares. Source: QX-14."""

    max_idle_timeout_ms: int = 0
    """Idle timeout in milliseconds; 0 for none."""
    max_data: int = 0
    """First limit in bytes for all streams together."""
    max_stream_data_bidi_local: int = 0
    """First limit in bytes for a bidirectional stream that the declaring side opens."""
    max_stream_data_bidi_remote: int = 0
    """First limit in bytes for a bidirectional stream that the other side opens."""
    max_stream_data_uni: int = 0
    """First limit in bytes for a unidirectional stream."""
    max_streams_bidi: int = 0
    """First limit of bidirectional streams that the other side may open."""
    max_streams_uni: int = 0
    """First limit of unidirectional streams that the other side may open."""
    max_datagram_frame_size: int = 0
    """Largest DATAGRAM frame accepted, in bytes with type and length; 0 if none is."""
    max_record_size: int = DEFAULT_MAX_RECORD
    """The largest Size of a record."""
    reset_stream_at: bool = False
    """Whether RESET_STREAM_AT is accepted."""

    def encode(self) -> bytes:
        """Return the list of parameters, without the frame around it. Default values are left out."""
        pieces = []
        for number, name in _INTEGERS.items():
            value = getattr(self, name)
            if value != getattr(_DEFAULTS, name):
                pieces.append(encode_frame(number, data=encode_int(value)))
        if self.reset_stream_at:
            pieces.append(encode_frame(_RESET_STREAM_AT, data=b""))
        return b"".join(pieces)

    @classmethod
    def decode(cls, data: bytes) -> Parameters:
        """Read a list of parameters.

        Raises:
            Fault: the list breaks QX-12, QX-14, QX-15, QX-17 or QX-18.
        """
        values: dict[str, Any] = {}
        seen: set[int] = set()
        at, stop = 0, len(data)
        while at < stop:
            try:
                number, at = read_int(data, at, stop)
                length, at = read_int(data, at, stop)
            except ConnectionFault as fault:
                raise ConnectionFault(_PARAMETER, "QX-14", "the parameters are cut") from fault
            end = at + length
            if end > stop:
                raise ConnectionFault(
                    _PARAMETER, "QX-14", f"parameter {number:#x} has {length} bytes, {stop - at} are left"
                )
            if number in seen:
                raise ConnectionFault(_PARAMETER, "QX-14", f"parameter {number:#x} twice")
            if number in _PROHIBITED:
                raise ConnectionFault(_PARAMETER, "QX-15", f"parameter {number:#x} is prohibited")
            seen.add(number)
            if len(seen) > MAX_PARAMETERS:
                raise ConnectionFault(_PARAMETER, "QX-17", f"more than {MAX_PARAMETERS} parameters")
            if number == _RESET_STREAM_AT:
                if length:
                    raise ConnectionFault(_PARAMETER, "QX-14", f"reset_stream_at has {length} bytes, wanted none")
                values["reset_stream_at"] = True
            elif number in _INTEGERS:
                values[_INTEGERS[number]] = _parameter(number, data, at, end)
            at = end
        return cls(**values)


_DEFAULTS: Final = Parameters()


def _parameter(number: int, data: bytes, at: int, end: int) -> int:
    """Return the integer that is a parameter's value."""
    name = _INTEGERS[number]
    try:
        value, after = read_int(data, at, end)
    except ConnectionFault as fault:
        raise ConnectionFault(_PARAMETER, "QX-14", f"{name} has no whole integer") from fault
    if after != end:
        raise ConnectionFault(_PARAMETER, "QX-14", f"{name} has {end - after} bytes behind its integer")
    if number in _STREAM_COUNTS and value > MAX_STREAMS:
        raise ConnectionFault(_PARAMETER, "QX-12", f"{name} is {value}, at most 2^60 are possible")
    if name == "max_record_size" and value < DEFAULT_MAX_RECORD:
        raise ConnectionFault(
            _PARAMETER, "QX-14", f"max_record_size is {value}, at least {DEFAULT_MAX_RECORD} is possible"
        )
    return value
