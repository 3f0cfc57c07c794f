"""ReactiveSocket frames and their bytes.

All integers are big endian. A frame is ``[length] type flags stream-id``, the fixed fields of the type, ``[metadata length, metadata]``
if M is set, and data (section 1.1 of the rules). Both lengths have 32 bits and **count themselves** (RX-3, RX-10).

There are two levels. `encode` and `parse` work on plain values; the core calls them for each frame. `Frame` is a whole frame
as a value, for tools and tests.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Self

import attrs

from levada.framework.errors import DecodeError

__all__ = ["ErrorCode", "Frame", "FrameError", "FrameType"]


class ErrorCode(IntEnum):
    """Codes of an ERROR frame.

    Source: error codes (section 3.1 of the rules, RX-22).
    """

    INVALID_SETUP = 0x001
    """The SETUP is not valid for this server, for example from a newer client."""
    UNSUPPORTED_SETUP = 0x002
    """Some parameters of the SETUP are not supported."""
    REJECTED_SETUP = 0x003
    """The server refused; the reason may be in the data."""
    CONNECTION_ERROR = 0x101
    """The connection ends at once."""
    APPLICATION_ERROR = 0x201
    """The application failed. An unknown code on a stream counts as this one (RX-25)."""
    REJECTED = 0x202
    """Not processed; the reason is in the metadata (RX-23)."""
    CANCELED = 0x203
    """The responder gave up; the request may have been processed in part."""
    INVALID = 0x204
    """The request is invalid."""


SETUP_CODES = range(0x001, 0x100)  # RX-22
STREAM_CODES = range(0x201, 0xFFFFFFFF)  # RX-22


class FrameType(IntEnum):
    """The type of a frame (section 3 of the rules)."""

    SETUP = 0x0001
    LEASE = 0x0002
    KEEPALIVE = 0x0003
    REQUEST_RESPONSE = 0x0004
    REQUEST_FNF = 0x0005
    REQUEST_STREAM = 0x0006
    REQUEST_SUB = 0x0007
    REQUEST_CHANNEL = 0x0008
    REQUEST_N = 0x0009
    CANCEL = 0x000A
    RESPONSE = 0x000B
    ERROR = 0x000C
    METADATA_PUSH = 0x000D
    EXT = 0xFFFF


# Plain integers: comparing with a member of an enum costs 40 ns more, and each frame is compared several times.
SETUP, LEASE, KEEPALIVE, REQUEST_RESPONSE, REQUEST_FNF, REQUEST_STREAM, REQUEST_SUB = range(1, 8)
REQUEST_CHANNEL, REQUEST_N, CANCEL, RESPONSE, ERROR, METADATA_PUSH = range(8, 14)
EXT = 0xFFFF

IGNORE, METADATA = 0x8000, 0x4000  # I and M of every type
LEASES, STRICT = 0x2000, 0x1000  # L and S of SETUP
RESPOND = 0x2000  # R of KEEPALIVE
FOLLOWS, COMPLETE = 0x2000, 0x1000  # F and C of RESPONSE and REQUEST_CHANNEL
INITIAL = 0x0800  # N of REQUEST_CHANNEL: an initial n follows

LENGTH = struct.Struct(">I")
HEADER = struct.Struct(">HHI")  # type, flags, stream id
FULL_HEADER = struct.Struct(">IHHI")
WORD = struct.Struct(">I")
TWO_WORDS = struct.Struct(">II")
_SETUP = struct.Struct(">III")  # version, keepalive ms, max lifetime ms

MAX_LENGTH = 2**31 - 1  # RX-3: 31 bits
VERSION = 0  # RX-31

# Fixed fields by type; SETUP is read by `parse_setup`, and what is not here is not understood (RX-9).
_FIXED: dict[int, struct.Struct | None] = {
    LEASE: TWO_WORDS,  # ttl ms, number of requests
    KEEPALIVE: None,
    REQUEST_RESPONSE: None,
    REQUEST_FNF: None,
    REQUEST_STREAM: WORD,  # initial n
    REQUEST_SUB: WORD,  # initial n
    REQUEST_CHANNEL: WORD,  # initial n, only if N is set
    REQUEST_N: WORD,  # n
    CANCEL: None,
    RESPONSE: None,
    ERROR: WORD,  # code
    METADATA_PUSH: None,
}


@attrs.define(eq=False, slots=False, str=False)
class FrameError(DecodeError):
    """Bytes that this side cannot read as a frame."""

    rule: str = "RX-9"
    """``"RX-4"`` a wrong length, ``"RX-9"`` not understood, ``"RX-12"`` a wrong metadata length."""


def encode(
    kind: int, stream_id: int, flags: int = 0, fixed: bytes = b"", metadata: bytes | None = None, data: bytes = b""
) -> bytes:
    """Return a frame with its length field; M is set if there is metadata.

    Args:
        fixed: the fixed fields of the type.

    Source: RX-3, section 1.1, RX-10, RX-11.
    """
    if metadata is None:
        return FULL_HEADER.pack(12 + len(fixed) + len(data), kind, flags, stream_id) + fixed + data
    size = 4 + len(metadata)  # RX-10: counts its own 4 bytes
    header = FULL_HEADER.pack(12 + len(fixed) + size + len(data), kind, flags | METADATA, stream_id)
    return b"".join((header, fixed, LENGTH.pack(size), metadata, data))


def encode_setup_fields(version: int, keepalive_ms: int, lifetime_ms: int, metadata_mime: str, data_mime: str) -> bytes:
    """Return the fixed fields of SETUP (section 4.1); RX-32: no NUL behind the MIME types."""
    metadata_bytes, data_bytes = metadata_mime.encode("latin-1"), data_mime.encode("latin-1")
    return b"".join(
        (
            _SETUP.pack(version, keepalive_ms, lifetime_ms),
            bytes((len(metadata_bytes),)),
            metadata_bytes,
            bytes((len(data_bytes),)),
            data_bytes,
        )
    )


def parse(kind: int, flags: int, data: bytes, at: int, end: int) -> tuple[tuple[int, ...], bytes | None, bytes]:
    """Read a frame behind its header, any type except SETUP and EXT. Return fixed fields, metadata and data.

    Raises:
        FrameError: RX-9, an unknown type, or too short for its fixed fields; RX-12, an impossible metadata length.
    """
    numbers: tuple[int, ...] = ()
    try:
        fixed = _FIXED[kind]
    except KeyError:
        raise FrameError(f"unknown frame type {kind:#06x}") from None
    if fixed is not None and (kind != REQUEST_CHANNEL or flags & INITIAL):
        if end - at < fixed.size:
            raise FrameError(f"{FrameType(kind).name} of {end - at} bytes behind the header, {fixed.size} wanted")
        numbers = fixed.unpack_from(data, at)
        at += fixed.size
    # RX-18: M means nothing on the two types that never have metadata.
    if flags & METADATA and kind != KEEPALIVE and kind != REQUEST_N:
        metadata, at = _parse_metadata(data, at, end)
        return numbers, metadata, data[at:end]
    return numbers, None, data[at:end]


def _parse_metadata(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    start = at + 4
    size = int.from_bytes(data[at:start], "big")
    # RX-12. R makes the number greater than any frame; with fewer than 4 bytes left no number will do.
    if not 4 <= size <= end - at:
        raise FrameError(f"metadata of {size} bytes with its length field, {end - at} left", rule="RX-12")
    return data[start : at + size], at + size


def parse_setup(
    flags: int, data: bytes, at: int, end: int
) -> tuple[tuple[int, ...], tuple[str, str], bytes | None, bytes]:
    """Read a SETUP behind its header. Return version and the two times in ms, the MIME types, metadata and data.

    Raises:
        FrameError: RX-9, cut off; RX-12, an impossible metadata length.
    """
    if end - at < _SETUP.size:
        raise FrameError(f"SETUP of {end - at} bytes behind the header, {_SETUP.size + 2} wanted")
    numbers = _SETUP.unpack_from(data, at)
    at += _SETUP.size
    mime_types: list[str] = []
    for what in ("metadata", "data"):
        stop = at + 1 + data[at] if at < end else at + 1
        if stop > end:
            raise FrameError(f"SETUP ends within its {what} MIME type")
        # RX-32: a NUL at the end does not count. Latin-1 keeps whatever bytes a peer calls a MIME type.
        mime_types.append(data[at + 1 : stop].removesuffix(b"\0").decode("latin-1"))
        at = stop
    metadata = None
    if flags & METADATA:
        metadata, at = _parse_metadata(data, at, end)
    return numbers, (mime_types[0], mime_types[1]), metadata, data[at:end]


@attrs.frozen
class Frame:
    """One frame as a value.

    Example:
        >>> Frame.decode(bytes.fromhex("00000010 0009 0000 00000004 00000005"))
        Frame(REQUEST_N, stream 4, numbers=(5,))
    """

    kind: FrameType
    """Its type."""
    stream_id: int
    """Its stream; 0 for the connection. For an EXT frame it is the extended type, which is in the same place (RX-20)."""
    flags: int = 0
    """Flag bits as on the wire, except M, which is set if `metadata` is not ``None``."""
    numbers: tuple[int, ...] = ()
    """Fixed fields, in their order: for example ttl in ms and number of requests of a LEASE."""
    mime_types: tuple[str, str] | None = None
    """SETUP: the types of metadata and of data."""
    metadata: bytes | None = None
    """``b""`` and ``None`` are not the same (RX-13)."""
    data: bytes = b""
    """The bytes behind the metadata."""

    def encode(self, *, framed: bool = False) -> bytes:
        """Return the bytes; without the length field if the carrier keeps message boundaries (RX-2)."""
        if self.mime_types is None:
            fixed = b"".join(map(WORD.pack, self.numbers))
        else:
            version, keepalive_ms, lifetime_ms = self.numbers
            fixed = encode_setup_fields(version, keepalive_ms, lifetime_ms, *self.mime_types)
        data = encode(self.kind, self.stream_id, self.flags, fixed, self.metadata, self.data)
        return data[4:] if framed else data

    @classmethod
    def decode(cls, raw: bytes, *, framed: bool = False) -> Self:
        """Read exactly one frame.

        Raises:
            FrameError: it is cut off, too long, or not understood.
        """
        start = 0 if framed else 4
        if len(raw) < start + HEADER.size:
            raise FrameError(f"{len(raw)} bytes, {start + HEADER.size} at least", rule="RX-4")
        if not framed and LENGTH.unpack_from(raw)[0] != len(raw):
            raise FrameError(f"length {LENGTH.unpack_from(raw)[0]}, {len(raw)} bytes here", rule="RX-4")
        kind, flags, stream_id = HEADER.unpack_from(raw, start)
        at, end = start + HEADER.size, len(raw)
        mime_types, metadata = None, None
        numbers: tuple[int, ...] = ()
        if kind == SETUP:
            numbers, mime_types, metadata, data = parse_setup(flags, raw, at, end)
        elif kind == EXT:
            # M is handed on with the other flags: where metadata would be, only the extended type knows (RX-20).
            return cls(FrameType.EXT, stream_id, flags, data=raw[at:])
        else:
            numbers, metadata, data = parse(kind, flags, raw, at, end)
        return cls(FrameType(kind), stream_id, flags & ~METADATA, numbers, mime_types, metadata, data)

    def __repr__(self) -> str:
        parts = [self.kind.name, f"stream {self.stream_id}"]
        if self.flags:
            parts.append(f"flags {self.flags:#06x}")
        for name in ("numbers", "mime_types", "metadata", "data"):
            value = getattr(self, name)
            if value or (name == "metadata" and value is not None):
                parts.append(f"{name}={value!r}")
        return f"Frame({', '.join(parts)})"
