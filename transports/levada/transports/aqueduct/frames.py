"""The wire format of the ten frames: var-len ints, header data, ranges, and each frame in both directions.

The rules of this file:

* It knows the form of a frame. Where a frame may occur is in `state.PLACES`.
* A decoder takes bytes and a position. Too few bytes raise `Incomplete`, which says how many are needed for the next attempt, so that a
  frame in many pieces is not read again for each piece. Malformed bytes raise `RemoteProtocolError`.
* A length is compared with its limit before the decoder waits for that many bytes (AQ-3).
* All ints are little-endian groups of seven bits, in their shortest form (AQ-1, AQ-2).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import attrs

from .codes import LimitExceeded, violation

__all__ = [
    "ALPN", "ENTRYPOINT", "FLOW", "LARGEST", "MINTER", "ONESHOT", "QMUX_ALPN", "SPACES", "VERSION", "AckNackUnreliable", "AckReliable",
    "Attach", "ChannelControl", "CloseReceiver", "ClosedChannelLost", "ConnectionControl", "FinishSender", "Frame", "FrameType", "Headers",
    "Incomplete", "Message", "Octets", "SentUnreliable", "Version", "decode_frame", "decode_int", "decode_message", "encode_int",
    "encode_ranges", "split_runs",
]  # fmt: skip

FLOW: Final = 1
"""Bit of a channel id: 0 if the channel flows from the client to the server."""
MINTER: Final = 2
"""Bit of a channel id: 0 if the client minted it."""
ONESHOT: Final = 4
"""Bit of a channel id: 1 if the channel carries at most one message."""
SPACES: Final = 7
"""The three bits together. Each value has its own indices, and the ids of one space are 8 apart. Source: AQ-6."""
ENTRYPOINT: Final = 0
"""The channel that exists from the start, from the client to the server."""


class Attach(enum.Enum):
    """The half that a message carries, from the receiving peer's view; the opposite half stays here."""

    SENDER = 0
    RECEIVER = 1
    ONESHOT_SENDER = ONESHOT
    ONESHOT_RECEIVER = ONESHOT | 1


Octets: TypeAlias = bytes | memoryview
"""The input of a decoder."""
Headers: TypeAlias = tuple[tuple[str, bytes], ...]
"""Connection headers: a multimap that keeps its order. Keys are non-empty ASCII."""

ALPN: Final = "aqueduct"
"""Protocol name in TLS; the specification does not define one. Source: AQ-14 (D-7)."""
QMUX_ALPN: Final = "qmux-02.aqueduct"
"""Protocol name over QMux, of TLS and of WebSocket's subprotocol. Source: QX-40."""
LARGEST: Final = 2**64 - 1
"""The largest var-len int."""
VERSION: Final = bytes.fromhex("ef505fa6600f408e") + b"AQUEDUCT" + b"\x0b0.0.0-AFTER"
"""The whole Version frame: magic, readable text, version. Source: AQ-8."""


class FrameType(enum.IntEnum):
    """First byte of a frame. Source: AQ-8."""

    CONNECTION_CONTROL = 1
    CHANNEL_CONTROL = 2
    MESSAGE = 3
    SENT_UNRELIABLE = 4
    ACK_RELIABLE = 5
    ACK_NACK_UNRELIABLE = 6
    FINISH_SENDER = 7
    CLOSE_RECEIVER = 8
    CLOSED_CHANNEL_LOST = 9
    VERSION = 239


class Incomplete(Exception):
    """More bytes are needed: at least `need`, counted from the start of the input."""

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


SHORT: Final = [bytes((n,)) for n in range(0x80)]
"""Ints below 128."""
MORE: Final = [bytes((n | 0x80,)) for n in range(0x80)]
"""The first bytes of longer ints."""


def rest_of_number(number: int) -> bytes:
    """Encode what follows the first byte of a message's number: its other bytes, then that nothing is attached.

    128 numbers have the same rest. The writer and the reader of many messages keep it: to encode each number took a tenth of writing a message.
    """
    return encode_int(number >> 7) + b"\0" if number >= 0x80 else b"\0"


def encode_int(value: int) -> bytes:
    """Encode a var-len int, 0 to 2^64-1. Source: AQ-2."""
    if value < 0x80:
        return SHORT[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x200000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_int(data: Octets, at: int) -> tuple[int, int]:
    """Decode the var-len int that begins at `at`; return it and its end. Source: AQ-2 (D-1).

    Raises:
        IndexError: the int is cut.
        RemoteProtocolError: the int is not minimal, or has over 64 bits (E-1).
    """
    octet = data[at]
    if octet < 0x80:
        return octet, at + 1
    value = octet & 0x7F
    shift = 7
    while True:
        at += 1
        octet = data[at]
        if shift == 63 and octet > 1:
            raise violation("E-1", "over 64 bits")
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            if not octet:
                raise violation("E-1", f"{value} in more bytes than needed")
            return value, at + 1
        shift += 7


def _decode_ints(data: Octets, rule: str) -> tuple[int, ...]:
    """Decode the ints that fill an array."""
    values = []
    at = 0
    try:
        while at < len(data):
            value = data[at]
            if value < 0x80:  # as `decode_int`, without the call: most are short
                at += 1
            else:
                value, at = decode_int(data, at)
            values.append(value)
    except IndexError:
        raise violation(rule, "int cut by the end of its array") from None
    return tuple(values)


def _array(data: bytes) -> bytes:
    """Prefix an array with its length. Source: AQ-3."""
    return encode_int(len(data)) + data


def _decode_array(data: Octets, at: int, limit: int) -> tuple[bytes, int]:
    size = data[at]
    if size < 0x80:
        at += 1
    else:
        size, at = decode_int(data, at)
    if size > limit:
        raise LimitExceeded(f"array of {size} bytes, at most {limit}", rule="AQ-3")
    end = at + size
    if end > len(data):
        raise Incomplete(end)
    return bytes(data[at:end]), end


def _encode_headers(headers: Headers) -> bytes:
    return b"".join(_array(key.encode("ascii")) + _array(value) for key, value in headers)


def _decode_headers(data: bytes) -> Headers:
    """Decode header data. Source: AQ-4, E-2."""
    items = []
    at = 0
    while at < len(data):
        try:
            size, at = decode_int(data, at)
        except IndexError:
            raise violation("E-2", "length cut") from None
        if at + size > len(data):
            raise violation("E-2", "array past the end of the header data")
        items.append(data[at : at + size])
        at += size
    if len(items) % 2:
        raise violation("E-2", "key without a value")
    keys = items[::2]
    if not all(key and key.isascii() for key in keys):
        raise violation("E-2", "a key is ASCII and not empty")
    return tuple((key.decode("ascii"), value) for key, value in zip(keys, items[1::2], strict=True))


def encode_ranges(runs: Iterable[int]) -> bytes:
    """Encode alternating positive and negative run lengths as an array. Source: AQ-5."""
    return _array(b"".join(map(encode_int, runs)))


def _decode_ranges(data: bytes) -> tuple[int, ...]:
    """Decode ranges. Source: AQ-5, E-3, E-4."""
    runs = _decode_ints(data, "E-3")
    if 0 in runs[1:] or runs == (0,):
        raise violation("E-3", "a run of no numbers")
    if sum(runs) > LARGEST:
        raise violation("E-4", f"{sum(runs)} numbers")
    return runs


@attrs.frozen
class Version:
    """Begins a client's streams until it knows that the server speaks Aqueduct."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return VERSION


@attrs.frozen
class ConnectionControl:
    """One side's introduction at the start."""

    headers: Headers = attrs.field(default=(), repr=False)
    """Connection headers."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x01" + _array(_encode_headers(self.headers))


@attrs.frozen
class ChannelControl:
    """Names the channel of a control stream."""

    channel: int
    """Channel id."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x02" + encode_int(self.channel)


@attrs.frozen
class Message:
    """A message of a channel."""

    channel: int
    """Channel id."""
    number: int
    """Counted from 0, separately for streams and datagrams."""
    attachments: tuple[int, ...] = ()
    """Channel ids of the attached halves, by index."""
    payload: bytes = b""
    """The application's bytes."""

    def encode(self) -> bytes:
        """Encode the frame."""
        attached = b"".join(map(encode_int, self.attachments))
        return (
            b"\x03"
            + encode_int(self.channel)
            + encode_int(self.number)
            + _array(attached)
            + encode_int(len(self.payload))
        ) + self.payload


@attrs.frozen
class SentUnreliable:
    """Declares the datagrams that were sent on the channel since the last such frame."""

    count: int
    """Number of datagrams; 0 is legal and has no effect."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x04" + encode_int(self.count)


@attrs.frozen
class AckReliable:
    """Acks messages that came on streams, starting with the lowest unacked one."""

    runs: tuple[int, ...]
    """Acked, not acked by this frame, acked, …"""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x05" + encode_ranges(self.runs)


@attrs.frozen
class AckNackUnreliable:
    """Settles messages sent as datagrams, starting where the last such frame ended."""

    runs: tuple[int, ...]
    """Acked, nacked, acked, …"""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x06" + encode_ranges(self.runs)


@attrs.frozen
class FinishSender:
    """The sender is done."""

    count: int
    """Number of all messages that were sent on streams."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x07" + encode_int(self.count)


@attrs.frozen
class CloseReceiver:
    """The receiver ends; messages that are not acked now are nacked."""

    runs: tuple[int, ...] = ()
    """Acked, nacked, acked, …, starting with the lowest unacked one; this implementation sends none."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x08" + encode_ranges(self.runs)


@attrs.frozen
class ClosedChannelLost:
    """The other half of a channel that has already ended here was lost in transit."""

    channel: int
    """Channel id."""

    def encode(self) -> bytes:
        """Encode the frame."""
        return b"\x09" + encode_int(self.channel)


Frame: TypeAlias = (
    Version | ConnectionControl | ChannelControl | Message | SentUnreliable | AckReliable | AckNackUnreliable | FinishSender |
    CloseReceiver | ClosedChannelLost
)  # fmt: skip
"""A frame of any kind."""


def decode_message(data: Octets, at: int, max_message: int) -> tuple[int, int, tuple[int, ...], bytes, int]:
    """Decode a Message frame without creating an object, since most traffic is messages.

    Returns:
        The channel, number, attachments, payload, and the end of the frame.

    Raises:
        IndexError, Incomplete: the frame is cut.
        RemoteProtocolError: it is malformed (E-1).
        LimitExceeded: attachments or payload are larger than `max_message` bytes.
    """
    # Reading short ints in place saves two thirds of the time for a small message.
    channel = data[at + 1]
    if channel < 0x80:
        at += 2
    else:
        channel, at = decode_int(data, at + 1)
    number = data[at]
    if number < 0x80:
        at += 1
    elif 0 < (second := data[at + 1]) < 0x80:
        number += (second << 7) - 0x80
        at += 2
    elif second and 0 < (third := data[at + 2]) < 0x80:
        number += (second << 7) + (third << 14) - 0x4080
        at += 3
    else:
        number, at = decode_int(data, at)
    attachments: tuple[int, ...] = ()
    if data[at]:
        attached, at = _decode_array(data, at, max_message)
        attachments = _decode_ints(attached, "E-1")
    else:
        at += 1
    size = data[at]
    if size < 0x80:
        at += 1
    else:
        size, at = decode_int(data, at)
        if size > max_message:
            raise LimitExceeded(f"payload of {size} bytes, at most {max_message}", rule="AQ-3")
    end = at + size
    if end > len(data):
        raise Incomplete(end)
    return channel, number, attachments, bytes(data[at:end]), end


def decode_frame(data: Octets, at: int = 0, *, max_message: int = 2**24, max_control: int = 2**16) -> tuple[Frame, int]:
    """Decode the frame that begins at `at`; return it and its end. Source: AQ-8, AQ-9.

    Args:
        data: bytes of one stream or datagram.
        at: start of the frame.
        max_message: largest payload, in bytes.
        max_control: largest header data or ranges, in bytes.

    Raises:
        Incomplete: the frame is cut.
        RemoteProtocolError: it is malformed (E-1 to E-3, E-6, E-7).
        LimitExceeded: an array is larger than its limit (AQ-3).
    """
    try:
        kind = data[at]
        if kind == FrameType.MESSAGE:
            channel, number, attachments, payload, end = decode_message(data, at, max_message)
            return Message(channel, number, attachments, payload), end
        if kind == FrameType.VERSION:
            return _decode_version(data, at)
        if kind not in _DECODERS:
            raise violation("E-6", f"0x{kind:02x}")
        make, holds = _DECODERS[kind]
        if holds is None:
            value = data[at + 1]
            if value < 0x80:
                return make(value), at + 2
            value, end = decode_int(data, at + 1)
            return make(value), end
        array, end = _decode_array(data, at + 1, max_control)
        return make(holds(array) if array else ()), end
    except IndexError:
        raise Incomplete(len(data) + 1) from None


def _decode_version(data: Octets, at: int) -> tuple[Version, int]:
    """Compare byte by byte, so that a foreign protocol is refused at the first difference (AQ-9, E-7)."""
    got = bytes(data[at : at + len(VERSION)])
    if got != VERSION[: len(got)]:
        raise violation("E-7", f"got {got.hex()}")
    if len(got) < len(VERSION):
        raise Incomplete(len(data) + 1)
    return Version(), at + len(VERSION)


_DECODERS: Final[dict[int, tuple[Callable[[Any], Frame], Callable[[bytes], object] | None]]] = {
    FrameType.CONNECTION_CONTROL: (ConnectionControl, _decode_headers),
    FrameType.CHANNEL_CONTROL: (ChannelControl, None),
    FrameType.SENT_UNRELIABLE: (SentUnreliable, None),
    FrameType.ACK_RELIABLE: (AckReliable, _decode_ranges),
    FrameType.ACK_NACK_UNRELIABLE: (AckNackUnreliable, _decode_ranges),
    FrameType.FINISH_SENDER: (FinishSender, None),
    FrameType.CLOSE_RECEIVER: (CloseReceiver, _decode_ranges),
    FrameType.CLOSED_CHANNEL_LOST: (ClosedChannelLost, None),
}


def split_runs(numbers: Sequence[int], start: int) -> list[int]:
    """Convert ascending numbers to run lengths from `start`; the last run is positive. Source: AQ-5."""
    runs: list[int] = []
    at = start
    for number in numbers:
        if number == at and runs:
            runs[-1] += 1
        else:
            runs += (1,) if number == at else (0, number - at, 1) if not runs else (number - at, 1)
        at = number + 1
    return runs
