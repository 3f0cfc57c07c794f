"""Frames of RSocket: their layout, bytes to classes and back.

A frame here is the bytes behind the 24-bit length field of byte carriers, or a whole message of a message carrier (RS-2).  `decode` checks
lengths only, which it can see from one frame.  The core decides what a frame means and whether it is allowed.

The core builds and reads the frequent frames (REQUEST_*, REQUEST_N, CANCEL and PAYLOAD) with the structs of this file, without these
classes, which would double the cost of an item.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import attrs

from levada.transports.rsocket.codes import InvalidFrame

__all__ = [
    "COMPLETE", "FOLLOWS", "HEADER", "IGNORE", "LEASE", "MAX_U31", "METADATA", "NEXT", "PREFIXED_HEADER", "RESPOND", "RESUME", "U32", "CancelFrame",
    "ErrorFrame", "ExtensionFrame", "Frame", "FrameType", "KeepaliveFrame", "LeaseFrame", "MetadataPushFrame", "Payload", "PayloadFrame",
    "RequestFrame", "RequestNFrame", "ResumeFrame", "ResumeOkFrame", "SetupFrame", "UnknownFrame", "decode", "metadata_length", "not_bytes",
    "payload_at",
]  # fmt: skip


# Not frozen: attrs sets the fields of a frozen class through object.__setattr__, 0.8 instead of 0.25 us, and every item has one.
@attrs.define
class Payload:
    """Data and metadata of one request, item or response. Treat it as immutable."""

    data: bytes = b""
    """Empty data and no data are the same thing (RS-16)."""
    metadata: bytes | None = None
    """``None`` if there is none, which is not the same as empty metadata (RS-16)."""

    @property
    def size(self) -> int:
        """Bytes of data and metadata together."""
        return len(self.data) + (len(self.metadata) if self.metadata is not None else 0)


def not_bytes(payload: Payload) -> TypeError:
    """Return the error of a payload with other types.

    Cores raise it at the call: frames are joined, and requests that wait for a lease are sent, when the caller is no longer there to blame.
    """
    kinds = f"{type(payload.data).__name__} and {type(payload.metadata).__name__}"
    return TypeError(f"data and metadata are {kinds}, wanted bytes, and bytes or None")


class FrameType(IntEnum):
    """The upper 6 bits of a frame's type-and-flags word (reference, section 3)."""

    SETUP = 0x01
    LEASE = 0x02
    KEEPALIVE = 0x03
    REQUEST_RESPONSE = 0x04
    REQUEST_FNF = 0x05
    REQUEST_STREAM = 0x06
    REQUEST_CHANNEL = 0x07
    REQUEST_N = 0x08
    CANCEL = 0x09
    PAYLOAD = 0x0A
    ERROR = 0x0B
    METADATA_PUSH = 0x0C
    RESUME = 0x0D
    RESUME_OK = 0x0E
    EXT = 0x3F


# The lower 10 bits; the same bit means different things on different types (reference, section 1.1).
IGNORE: Final = 0x200
METADATA: Final = 0x100
FOLLOWS: Final = 0x080  # REQUEST_*, PAYLOAD
RESUME: Final = 0x080  # SETUP
RESPOND: Final = 0x080  # KEEPALIVE
COMPLETE: Final = 0x040  # REQUEST_CHANNEL, PAYLOAD
LEASE: Final = 0x040  # SETUP
NEXT: Final = 0x020  # PAYLOAD

HEADER: Final = struct.Struct(">IH")  # stream id, type and flags
PREFIXED_HEADER: Final = struct.Struct(">BHIH")  # the 24-bit frame length in two parts, then the header (RS-2)
MAX_U31: Final = 2**31 - 1
U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_SETUP: Final = struct.Struct(">HHII")  # version, keepalive ms, lifetime ms
_VERSION: Final = struct.Struct(">HH")
_POSITIONS: Final = struct.Struct(">QQ")

_MAX_U63: Final = 2**63 - 1

_REQUESTS_WITH_N: Final = (FrameType.REQUEST_STREAM, FrameType.REQUEST_CHANNEL)


def metadata_length(metadata: bytes) -> bytes:
    """Return the 24-bit length field of metadata (RS-13)."""
    return len(metadata).to_bytes(3)


def payload_at(frame: bytes, at: int, end: int, flags: int) -> Payload:
    """Read metadata and data from bytes `at` to `end` of a buffer. The flags say whether there is metadata (RS-13, RS-16).

    Raises:
        InvalidFrame: the metadata length exceeds the rest of the frame (RS-15).
    """
    if not flags & METADATA:
        return Payload(frame[at:end])
    start = at + 3
    data = start + int.from_bytes(frame[at:start])
    if start > end or data > end:
        raise InvalidFrame("metadata longer than its frame", rule="RS-15")
    return Payload(frame[data:end], frame[start:data])


def _payload_bytes(payload: Payload) -> bytes:
    if payload.metadata is None:
        return payload.data
    return b"".join((metadata_length(payload.metadata), payload.metadata, payload.data))


def _header(frame_type: FrameType, flags: int = 0, stream_id: int = 0) -> bytes:
    return HEADER.pack(stream_id, frame_type << 10 | flags)


def _flag(payload: Payload) -> int:
    return 0 if payload.metadata is None else METADATA


@attrs.frozen(kw_only=True)
class SetupFrame:
    """SETUP: the client's parameters of the connection."""

    version: tuple[int, int]
    keepalive_ms: int
    lifetime_ms: int
    token: bytes | None = attrs.field(default=None, repr=False)
    """The session can be resumed with this token; ``None`` for a session that cannot be resumed."""
    metadata_mime_type: str
    data_mime_type: str
    payload: Payload = attrs.field(repr=False)
    lease: bool = False
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        flags = _flag(self.payload) | (RESUME if self.token is not None else 0) | (LEASE if self.lease else 0)
        parts = [
            _header(FrameType.SETUP, flags, self.stream_id),
            _SETUP.pack(*self.version, self.keepalive_ms, self.lifetime_ms),
        ]
        if self.token is not None:
            parts += (len(self.token).to_bytes(2), self.token)
        for mime_type in (self.metadata_mime_type, self.data_mime_type):
            data = mime_type.encode("utf-8", "surrogateescape")
            parts += (len(data).to_bytes(1), data)
        return b"".join((*parts, _payload_bytes(self.payload)))


@attrs.frozen
class LeaseFrame:
    """LEASE: the number of requests allowed, and for how long."""

    ttl_ms: int
    n: int
    metadata: bytes | None = None
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        # RS-14: only metadata follows, so it has no length field.
        flags = 0 if self.metadata is None else METADATA
        header = _header(FrameType.LEASE, flags, self.stream_id)
        return b"".join((header, U32.pack(self.ttl_ms), U32.pack(self.n), self.metadata or b""))


@attrs.frozen
class KeepaliveFrame:
    """KEEPALIVE: a sign of life, and the position up to which its sender has received."""

    respond: bool
    position: int
    data: bytes = b""
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        header = _header(FrameType.KEEPALIVE, RESPOND if self.respond else 0, self.stream_id)
        return b"".join((header, _U64.pack(self.position), self.data))


@attrs.frozen(kw_only=True)
class RequestFrame:
    """REQUEST_RESPONSE, REQUEST_FNF, REQUEST_STREAM or REQUEST_CHANNEL."""

    type: FrameType
    stream_id: int
    n: int | None = None
    """Initial credit; ``None`` for request-response and fire-and-forget, which have no such field."""
    payload: Payload
    follows: bool = False
    complete: bool = False
    """REQUEST_CHANNEL only."""

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        flags = _flag(self.payload) | (FOLLOWS if self.follows else 0) | (COMPLETE if self.complete else 0)
        n = b"" if self.n is None else U32.pack(self.n)
        return b"".join((_header(self.type, flags, self.stream_id), n, _payload_bytes(self.payload)))


@attrs.frozen
class RequestNFrame:
    """REQUEST_N: credit for further payloads."""

    stream_id: int
    n: int

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return _header(FrameType.REQUEST_N, stream_id=self.stream_id) + U32.pack(self.n)


@attrs.frozen
class CancelFrame:
    """CANCEL: send no more payloads."""

    stream_id: int

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return _header(FrameType.CANCEL, stream_id=self.stream_id)


@attrs.frozen(kw_only=True)
class PayloadFrame:
    """PAYLOAD: an item, a completion, both, or a fragment."""

    stream_id: int
    payload: Payload
    next: bool = False
    complete: bool = False
    follows: bool = False

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        flags = _flag(self.payload) | (FOLLOWS if self.follows else 0)
        flags |= (COMPLETE if self.complete else 0) | (NEXT if self.next else 0)
        return _header(FrameType.PAYLOAD, flags, self.stream_id) + _payload_bytes(self.payload)


@attrs.frozen
class ErrorFrame:
    """ERROR: of a stream, or of the connection on stream 0."""

    stream_id: int
    code: int
    data: bytes = b""

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return b"".join((_header(FrameType.ERROR, stream_id=self.stream_id), U32.pack(self.code), self.data))


@attrs.frozen
class MetadataPushFrame:
    """METADATA_PUSH: metadata of the connection; M is always set, and there is no length field (RS-14, RS-26)."""

    metadata: bytes
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return _header(FrameType.METADATA_PUSH, METADATA, self.stream_id) + self.metadata


@attrs.frozen(kw_only=True)
class ResumeFrame:
    """RESUME: the client continues on a new carrier."""

    version: tuple[int, int]
    token: bytes = attrs.field(repr=False)
    server_position: int
    """The client has received everything up to this position."""
    client_position: int
    """The client can send again from this position on."""
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        parts = (
            _header(FrameType.RESUME, stream_id=self.stream_id),
            _VERSION.pack(*self.version),
            len(self.token).to_bytes(2),
            self.token,
            _POSITIONS.pack(self.server_position, self.client_position),
        )
        return b"".join(parts)


@attrs.frozen
class ResumeOkFrame:
    """RESUME_OK: the session continues."""

    client_position: int
    """The server has received everything up to this position."""
    stream_id: int = 0

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return _header(FrameType.RESUME_OK, stream_id=self.stream_id) + _U64.pack(self.client_position)


@attrs.frozen(kw_only=True)
class ExtensionFrame:
    """EXT: a type of frame that both sides agreed on elsewhere."""

    stream_id: int
    extended_type: int
    data: bytes
    ignore: bool = False
    """A receiver that does not know the type drops the frame."""
    metadata: bool = False
    """The M flag; its meaning depends on the extended type."""

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        flags = (IGNORE if self.ignore else 0) | (METADATA if self.metadata else 0)
        return b"".join((_header(FrameType.EXT, flags, self.stream_id), U32.pack(self.extended_type), self.data))


@attrs.frozen
class UnknownFrame:
    """A frame of a type that the specification does not define, 0x00 included."""

    stream_id: int
    type: int
    flags: int
    rest: bytes

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        return HEADER.pack(self.stream_id, self.type << 10 | self.flags) + self.rest


Frame = (
    SetupFrame | LeaseFrame | KeepaliveFrame | RequestFrame | RequestNFrame | CancelFrame | PayloadFrame | ErrorFrame |
    MetadataPushFrame | ResumeFrame | ResumeOkFrame | ExtensionFrame | UnknownFrame
)  # fmt: skip


def decode(frame: bytes) -> Frame:
    """Read one whole frame, without the length field of byte carriers.

    Reserved bits are masked off (RS-9). Flags that a type does not have are ignored (RS-10), and so are bytes behind frames of a fixed size
    (RS-23).

    Raises:
        InvalidFrame: too short for its type (RS-12; below 6 bytes RS-5), or its metadata length is wrong (RS-15).

    Source: RSocket, frame header and frame types.
    """
    if len(frame) < HEADER.size:
        raise InvalidFrame(f"a frame of {len(frame)} bytes, at least {HEADER.size} wanted", rule="RS-5")
    stream_id, word = HEADER.unpack_from(frame)
    stream_id &= MAX_U31
    flags = word & 0x3FF
    try:
        return _decode_type(frame, stream_id, word >> 10, flags)
    except (struct.error, IndexError):
        raise InvalidFrame(f"a frame of {len(frame)} bytes is too short for type {word >> 10:#04x}") from None


def _decode_type(frame: bytes, stream_id: int, kind: int, flags: int) -> Frame:
    match kind:
        case FrameType.PAYLOAD:
            return PayloadFrame(
                stream_id=stream_id,
                payload=payload_at(frame, 6, len(frame), flags),
                next=bool(flags & NEXT),
                complete=bool(flags & COMPLETE),
                follows=bool(flags & FOLLOWS),
            )
        case FrameType.REQUEST_RESPONSE | FrameType.REQUEST_FNF | FrameType.REQUEST_STREAM | FrameType.REQUEST_CHANNEL:
            with_n = kind in _REQUESTS_WITH_N
            return RequestFrame(
                type=FrameType(kind),
                stream_id=stream_id,
                n=U32.unpack_from(frame, 6)[0] & MAX_U31 if with_n else None,
                payload=payload_at(frame, 10 if with_n else 6, len(frame), flags),
                follows=bool(flags & FOLLOWS),
                complete=kind == FrameType.REQUEST_CHANNEL and bool(flags & COMPLETE),
            )
        case FrameType.REQUEST_N:
            return RequestNFrame(stream_id, U32.unpack_from(frame, 6)[0] & MAX_U31)
        case FrameType.CANCEL:
            return CancelFrame(stream_id)
        case FrameType.ERROR:
            return ErrorFrame(stream_id, U32.unpack_from(frame, 6)[0], frame[10:])
        case FrameType.KEEPALIVE:
            position = _U64.unpack_from(frame, 6)[0] & _MAX_U63
            return KeepaliveFrame(bool(flags & RESPOND), position, frame[14:], stream_id)
        case FrameType.LEASE:
            ttl_ms, n = (value & MAX_U31 for value in struct.unpack_from(">II", frame, 6))
            return LeaseFrame(ttl_ms, n, frame[14:] if flags & METADATA else None, stream_id)
        case FrameType.METADATA_PUSH:
            return MetadataPushFrame(frame[6:], stream_id)  # RS-26: M clear is read as set
        case FrameType.SETUP:
            return _decode_setup(frame, stream_id, flags)
        case FrameType.RESUME:
            token, at = _counted(frame, 10, 2)
            server, client = (value & _MAX_U63 for value in _POSITIONS.unpack_from(frame, at))
            version: tuple[int, int] = _VERSION.unpack_from(frame, 6)
            return ResumeFrame(
                version=version, token=token, server_position=server, client_position=client, stream_id=stream_id
            )
        case FrameType.RESUME_OK:
            return ResumeOkFrame(_U64.unpack_from(frame, 6)[0] & _MAX_U63, stream_id)
        case FrameType.EXT:
            return ExtensionFrame(
                stream_id=stream_id,
                extended_type=U32.unpack_from(frame, 6)[0] & MAX_U31,
                data=frame[10:],
                ignore=bool(flags & IGNORE),
                metadata=bool(flags & METADATA),
            )
        case _:
            return UnknownFrame(stream_id, kind, flags, frame[6:])


def _decode_setup(frame: bytes, stream_id: int, flags: int) -> SetupFrame:
    major, minor, keepalive_ms, lifetime_ms = _SETUP.unpack_from(frame, 6)
    at = 6 + _SETUP.size
    token = None
    if flags & RESUME:
        token, at = _counted(frame, at, 2)
    metadata_mime_type, at = _counted(frame, at, 1)
    data_mime_type, at = _counted(frame, at, 1)
    return SetupFrame(
        version=(major, minor),
        keepalive_ms=keepalive_ms & MAX_U31,
        lifetime_ms=lifetime_ms & MAX_U31,
        token=token,
        # Any bytes survive a round trip; the core judges them (RS-42).
        metadata_mime_type=metadata_mime_type.decode("utf-8", "surrogateescape"),
        data_mime_type=data_mime_type.decode("utf-8", "surrogateescape"),
        payload=payload_at(frame, at, len(frame), flags),
        lease=bool(flags & LEASE),
        stream_id=stream_id,
    )


def _counted(frame: bytes, at: int, width: int) -> tuple[bytes, int]:
    """Return the bytes behind a length field of `width` bytes, and the offset behind them."""
    start = at + width
    end = start + int.from_bytes(frame[at:start])
    if end > len(frame):
        raise IndexError
    return frame[start:end], end
