"""MIME types in RSocket metadata, and the names and ids that stand for them.

A MIME type is one byte if it is well known, otherwise its name (EXT-1, EXT-4, EXT-6).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from types import MappingProxyType
from typing import ClassVar, Self

import attrs

from levada.framework.errors import DecodeError

__all__ = [
    "MAX_ENTRIES", "WELL_KNOWN_MIME_TYPES", "AcceptableMimeTypes", "DataMimeType", "check_mime_type", "check_name", "decode_mime_type",
    "decode_name", "encode_mime_type", "encode_name",
]  # fmt: skip

MAX_ENTRIES = 1000
"""Entries, types or tags that are read. A frame could hold 4 million empty ones, which take 1.5 GB and 10 s."""

_REGISTERED = """
    application/avro application/cbor application/graphql application/gzip application/javascript application/json
    application/octet-stream application/pdf application/vnd.apache.thrift.binary application/vnd.google.protobuf
    application/xml application/zip audio/aac audio/mp3 audio/mp4 audio/mpeg3 audio/mpeg audio/ogg audio/opus audio/vorbis
    image/bmp image/gif image/heic-sequence image/heic image/heif-sequence image/heif image/jpeg image/png image/tiff
    multipart/mixed text/css text/csv text/html text/plain text/xml video/H264 video/H265 video/VP8
    application/x-hessian application/x-java-object application/cloudevents+json application/x-capnp application/x-flatbuffers
"""  # EXT-6: in the order of their ids, from 0x00

# EXT-6: in the order of their ids, from 0x7A.
_EXTENSIONS = "mime-type accept-mime-types authentication tracing-zipkin routing composite-metadata"

WELL_KNOWN_MIME_TYPES = MappingProxyType(
    dict(enumerate(_REGISTERED.split()))
    | {0x7A + at: f"message/x.rsocket.{name}.v0" for at, name in enumerate(_EXTENSIONS.split())}
)
"""Names by id (EXT-6)."""

_IDS = {name: id_ for id_, name in WELL_KNOWN_MIME_TYPES.items()}
_KNOWN = 0x80  # EXT-1: this bit of the first byte says that the rest of it is an id


def check_name(name: str | int, known: Container[int], what: str) -> None:
    """Refuse a type that has no encoding.

    Raises:
        TypeError: it is neither a name nor an id.
        ValueError: the name is not 1 to 128 ASCII characters, or the id has a name or is above 127.
    """
    if isinstance(name, str):
        if not (1 <= len(name) <= 128 and name.isascii()):
            raise ValueError(f"{what} is {name!r}, wanted 1 to 128 ASCII characters")
    elif not isinstance(name, int) or isinstance(name, bool):
        raise TypeError(f"{what} is {type(name).__name__}, wanted a name or an id")
    elif not 0 <= name < _KNOWN or name in known:
        raise ValueError(f"{what} id {name:#x} must be below 0x80 and without a name of its own")


def encode_name(name: str | int, ids: dict[str, int]) -> bytes:
    """Return the byte of an id, or of a name that has an id; otherwise length - 1 and the name (EXT-1)."""
    id_ = ids.get(name) if isinstance(name, str) else name
    if id_ is not None:
        return bytes((_KNOWN | id_,))
    encoded = str(name).encode("ascii")
    return bytes((len(encoded) - 1,)) + encoded


def decode_name(data: bytes, at: int, path: str) -> tuple[str | int, int]:
    """Read a name or an id. Return it and the offset behind it.

    Raises:
        DecodeError: the bytes end too soon, or a name is not ASCII.
    """
    if at >= len(data):
        raise DecodeError("ends where an id or a name was to begin", path=path)
    first = data[at]
    at += 1
    if first & _KNOWN:
        return first & ~_KNOWN, at
    end = at + first + 1
    name = data[at:end]
    if len(data) < end:
        raise DecodeError(f"a name of {first + 1} bytes, {len(name)} left", path=path)
    if not name.isascii():
        raise DecodeError("a name that is not ASCII", path=path)
    return name.decode("ascii"), end


def check_mime_type(mime_type: str | int) -> None:
    """Refuse a MIME type that has no encoding."""
    check_name(mime_type, WELL_KNOWN_MIME_TYPES, "a MIME type")


def encode_mime_type(mime_type: str | int) -> bytes:
    """Return a MIME entry without its length (EXT-1, EXT-4)."""
    return encode_name(mime_type, _IDS)


def decode_mime_type(data: bytes, at: int, path: str) -> tuple[str | int, int]:
    """Read a MIME entry. Return its name, or its id if that has no name, and the offset behind it."""
    found, at = decode_name(data, at, path)
    return (WELL_KNOWN_MIME_TYPES.get(found, found) if isinstance(found, int) else found), at


@attrs.frozen
class DataMimeType:
    """The MIME type of the data of one request; without it, the type from SETUP applies.

    Source: per-stream data MIME types (EXT-4).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.mime-type.v0"
    """What this kind of metadata is called in composite metadata."""

    mime_type: str | int
    """The name, or an id that has none in `WELL_KNOWN_MIME_TYPES`."""

    def __attrs_post_init__(self) -> None:
        check_mime_type(self.mime_type)

    def encode(self) -> bytes:
        """Return the bytes."""
        return encode_mime_type(self.mime_type)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read one MIME type.

        Raises:
            DecodeError: too few bytes or too many, or a name that is not ASCII.
        """
        mime_type, at = decode_mime_type(data, 0, "mime_type")
        if at != len(data):
            raise DecodeError(f"{len(data) - at} bytes behind the MIME type")
        return cls(mime_type)


def _names(mime_types: Iterable[str | int]) -> tuple[str | int, ...]:
    if isinstance(mime_types, str):
        raise TypeError("MIME types must be several names, got one str")
    return tuple(mime_types)


@attrs.frozen
class AcceptableMimeTypes:
    """The MIME types that the requester accepts in the responses to one request, the preferred one first.

    Source: per-stream data MIME types (EXT-4).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.accept-mime-types.v0"
    """What this kind of metadata is called in composite metadata."""

    mime_types: tuple[str | int, ...] = attrs.field(converter=_names)
    """Names, or ids that have none in `WELL_KNOWN_MIME_TYPES`."""

    def __attrs_post_init__(self) -> None:
        for mime_type in self.mime_types:
            check_mime_type(mime_type)

    def encode(self) -> bytes:
        """Return the bytes."""
        return b"".join(map(encode_mime_type, self.mime_types))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read MIME types to the end.

        Raises:
            DecodeError: the last one is cut off, a name is not ASCII, or there are more than `MAX_ENTRIES`.
        """
        found: list[str | int] = []
        at = 0
        while at < len(data):
            path = f"mime_types[{len(found)}]"
            if len(found) >= MAX_ENTRIES:
                raise DecodeError(f"more than {MAX_ENTRIES} types", path=path)
            mime_type, at = decode_mime_type(data, at, path)
            found.append(mime_type)
        return cls(found)
