"""Conventions for RSocket metadata: the route of a request, credentials, MIME types and trace ids.

They are optional: the protocol cores carry metadata as bytes and never look inside. Each class here is a value with ``encode()`` and
``decode(octets)``. `decode` raises only `levada.framework.errors.DecodeError`, and a constructor refuses wrong values with `TypeError` or
`ValueError`.

Secrets are in no ``repr``, in no error and in no error's cause. Comparing two objects with credentials takes a time that depends on the secrets,
so compare secrets with `hmac.compare_digest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol, Self, TypeVar

import attrs

from levada.framework.errors import DecodeError

from .mime_types import (
    MAX_ENTRIES,
    WELL_KNOWN_MIME_TYPES,
    AcceptableMimeTypes,
    DataMimeType,
    check_mime_type,
    check_name,
    decode_mime_type,
    decode_name,
    encode_mime_type,
    encode_name,
)

__all__ = [
    "WELL_KNOWN_MIME_TYPES", "AcceptableMimeTypes", "Authentication", "BearerAuthentication", "CompositeMetadata", "DataMimeType", "Entry",
    "Extension", "OtherAuthentication", "Routing", "SimpleAuthentication", "ZipkinTracing",
]  # fmt: skip

MAX_METADATA = 2**24 - 1  # EXT-1: 24-bit length


class Extension(Protocol):
    """Metadata of a known kind: `Routing`, `Authentication`, `ZipkinTracing`, `DataMimeType`, `AcceptableMimeTypes`."""

    MIME_TYPE: ClassVar[str]
    """What this kind of metadata is called in composite metadata."""

    def encode(self) -> bytes:
        """Return the bytes."""
        ...

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the bytes; `DecodeError` if they are not of this kind."""
        ...


E = TypeVar("E", bound=Extension)


@attrs.frozen
class Entry:
    """One entry of composite metadata as bytes, of a known kind or not."""

    mime_type: str | int
    """The name, or an id that has no name in `WELL_KNOWN_MIME_TYPES`."""
    # The content may be a password: it is not shown.
    metadata: bytes = attrs.field(repr=lambda data: f"<{len(data)} bytes>")
    """The bytes, at most 16,777,215; not shown by ``repr``."""

    def __attrs_post_init__(self) -> None:
        check_mime_type(self.mime_type)
        if not isinstance(self.metadata, bytes):
            raise TypeError(f"metadata is {type(self.metadata).__name__}, wanted bytes")
        if len(self.metadata) > MAX_METADATA:
            raise ValueError(f"metadata of {len(self.metadata)} bytes, at most {MAX_METADATA} fit an entry")


def _entries(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(entries)


@attrs.frozen
class CompositeMetadata:
    """Entries of metadata, in order; a kind may occur several times.

    Entries of unknown kinds are kept, so that metadata can be forwarded unchanged.

    Example:
        >>> from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata, Routing
        >>> metadata = CompositeMetadata.of(Routing("quotes.follow"), BearerAuthentication("tok"))
        >>> read = CompositeMetadata.decode(metadata.encode())
        >>> read.first(Routing)
        Routing(tags=('quotes.follow',))
        >>> read.entries[1]
        Entry(mime_type='message/x.rsocket.authentication.v0', metadata=<4 bytes>)

    Source: composite metadata (EXT-1).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.composite-metadata.v0"
    """The metadata MIME type of a SETUP that announces this."""

    entries: tuple[Entry, ...] = attrs.field(converter=_entries)
    """All entries, in the order of the bytes."""

    @classmethod
    def of(cls, *parts: Extension | Entry) -> Self:
        """Combine metadata of known kinds and entries, in this order."""
        return cls(part if isinstance(part, Entry) else Entry(part.MIME_TYPE, part.encode()) for part in parts)

    def encode(self) -> bytes:
        """Return the bytes. A well-known MIME type is always encoded as its id."""
        pieces: list[bytes] = []
        for entry in self.entries:
            pieces += encode_mime_type(entry.mime_type), len(entry.metadata).to_bytes(3, "big"), entry.metadata
        return b"".join(pieces)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read all entries; `first` and `all` read their contents.

        Raises:
            DecodeError: the last entry is cut off, a MIME type is not ASCII, or there are more than `MAX_ENTRIES`.
        """
        entries: list[Entry] = []
        at = 0
        while at < len(data):
            path = f"entries[{len(entries)}]"
            if len(entries) >= MAX_ENTRIES:
                raise DecodeError(f"more than {MAX_ENTRIES} entries", path=path)
            mime_type, at = decode_mime_type(data, at, path)
            start = at + 3
            end = start + int.from_bytes(data[at:start], "big")
            if len(data) < max(start, end):
                raise DecodeError("the entry is cut off", path=path)
            entries.append(Entry(mime_type, data[start:end]))
            at = end
        return cls(entries)

    def first(self, kind: type[E]) -> E | None:
        """Read the first entry of a kind; ``None`` if there is no such entry.

        Raises:
            DecodeError: its bytes are not of that kind.
        """
        return next((kind.decode(entry.metadata) for entry in self.entries if entry.mime_type == kind.MIME_TYPE), None)

    def all(self, kind: type[E]) -> list[E]:
        """Read all entries of a kind, in order.

        Raises:
            DecodeError: the bytes of one of them are not of that kind.
        """
        return [kind.decode(entry.metadata) for entry in self.entries if entry.mime_type == kind.MIME_TYPE]


@attrs.frozen(init=False)
class Routing:
    """A route, and perhaps further tags.

    Args:
        tags: each at most 255 bytes of UTF-8; the first one is the route.

    Source: routing metadata (EXT-2).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.routing.v0"
    """What this kind of metadata is called in composite metadata."""

    tags: tuple[str, ...]
    """All tags, the route first; a peer may send none at all."""

    def __init__(self, *tags: str) -> None:
        for tag in tags:
            if not isinstance(tag, str):
                raise TypeError(f"the tag is {type(tag).__name__}, wanted str")
            if len(tag.encode()) > 255:
                raise ValueError(f"a tag of {len(tag.encode())} bytes, at most 255: {tag[:40]!r}")
        object.__setattr__(self, "tags", tags)

    @property
    def route(self) -> str | None:
        """The first tag; ``None`` if there is none."""
        return self.tags[0] if self.tags else None

    def encode(self) -> bytes:
        """Return the bytes."""
        encoded = [tag.encode() for tag in self.tags]
        return b"".join(bytes((len(tag),)) + tag for tag in encoded)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read tags to the end.

        Raises:
            DecodeError: the last tag is cut off, one is not UTF-8, or there are more than `MAX_ENTRIES`.
        """
        tags: list[str] = []
        at = 0
        while at < len(data):
            if len(tags) >= MAX_ENTRIES:
                raise DecodeError(f"more than {MAX_ENTRIES} tags", path=f"tags[{len(tags)}]")
            end = at + 1 + data[at]
            if len(data) < end:
                raise DecodeError(f"a tag of {data[at]} bytes, {len(data) - at - 1} left", path=f"tags[{len(tags)}]")
            try:
                tags.append(data[at + 1 : end].decode())
            except UnicodeDecodeError as error:
                raise DecodeError(f"not UTF-8: {error.reason}", path=f"tags[{len(tags)}]") from error
            at = end
        return cls(*tags)


_AUTHENTICATIONS = {"simple": 0, "bearer": 1}  # EXT-3
_MAX_USERNAME = 2**16 - 1  # EXT-3: 16-bit length


class Authentication:
    """Base of the three classes; `decode` returns one of them.

    Source: authentication metadata (EXT-3).
    """

    __slots__ = ()

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.authentication.v0"
    """What this kind of metadata is called in composite metadata."""

    def encode(self) -> bytes:
        """Return the bytes."""
        raise TypeError(f"{type(self).__name__} is a base class, wanted one of the three that `decode` returns")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read credentials of any type; called on a subclass, of that type only.

        Raises:
            DecodeError: cut off, not UTF-8, or another type than wanted. The error holds no part of the bytes.
        """
        kind, at = decode_name(data, 0, "type")
        found: Authentication
        if kind in (0, "simple"):
            start = at + 2
            end = start + int.from_bytes(data[at:start], "big")
            if len(data) < max(start, end):
                raise DecodeError("cut off", path="username")
            found = SimpleAuthentication(_text(data[start:end], "username"), _text(data[end:], "password"))
        elif kind in (1, "bearer"):
            found = BearerAuthentication(_text(data[at:], "token"))
        else:
            found = OtherAuthentication(kind, data[at:])
        if not isinstance(found, cls):
            raise DecodeError(f"{type(found).__name__} where {cls.__name__} was wanted")
        return found


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    # Raised out here, since a UnicodeDecodeError as its context would hold the secret.
    raise DecodeError("not UTF-8", path=path)


def _check_text(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str):  # the value is not shown
        raise TypeError(f"{attribute.name} is {type(value).__name__}, wanted str")


@attrs.frozen
class SimpleAuthentication(Authentication):
    """A user name and a password."""

    username: str = attrs.field(validator=_check_text)
    """At most 65,535 bytes of UTF-8."""
    password: str = attrs.field(validator=_check_text, repr=False)
    """Not shown by ``repr``."""

    def __attrs_post_init__(self) -> None:
        if len(self.username.encode()) > _MAX_USERNAME:
            raise ValueError(f"a username of {len(self.username.encode())} bytes, at most {_MAX_USERNAME}")

    def encode(self) -> bytes:
        """Return the bytes."""
        username = self.username.encode()
        return b"\x80" + len(username).to_bytes(2, "big") + username + self.password.encode()


@attrs.frozen
class BearerAuthentication(Authentication):
    """A bearer token."""

    token: str = attrs.field(validator=_check_text, repr=False)
    """Not shown by ``repr``."""

    def encode(self) -> bytes:
        """Return the bytes."""
        return b"\x81" + self.token.encode()


@attrs.frozen
class OtherAuthentication(Authentication):
    """Credentials of any other type, as bytes."""

    type: str | int
    """Name of the type, or an id other than the ids of ``simple`` and ``bearer``."""
    credentials: bytes = attrs.field(repr=False)
    """Not shown by ``repr``."""

    def __attrs_post_init__(self) -> None:
        check_name(self.type, _AUTHENTICATIONS.values(), "an authentication type")
        if self.type in _AUTHENTICATIONS:
            raise ValueError(f"authentication type {self.type!r} has a class of its own")
        if not isinstance(self.credentials, bytes):
            raise TypeError(f"credentials is {type(self.credentials).__name__}, wanted bytes")

    def encode(self) -> bytes:
        """Return the bytes."""
        return encode_name(self.type, _AUTHENTICATIONS) + self.credentials


# EXT-5: from the highest bit; the lowest two have no meaning and are not read.
_HAS_IDS, _DEBUG, _SAMPLED, _NOT_SAMPLED, _WIDE, _PARENT = 0x80, 0x40, 0x20, 0x10, 0x08, 0x04


@attrs.frozen(kw_only=True)
class ZipkinTracing:
    """Trace, span and sampling decision, or the decision alone.

    Source: Zipkin tracing metadata (EXT-5).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.tracing-zipkin.v0"
    """What this kind of metadata is called in composite metadata."""

    trace_id: int | None = None
    """Below 2^128; an id below 2^64 is sent in 64 bits. Set it together with `span_id`."""
    span_id: int | None = None
    """Below 2^64."""
    parent_id: int | None = None
    """Below 2^64; only with the other two."""
    sampled: bool | None = None
    """Whether the trace is recorded; ``None`` leaves it to the receiver."""
    debug: bool = False
    """Record the trace whatever the sampler says."""

    def __attrs_post_init__(self) -> None:
        if (self.trace_id is None) is not (self.span_id is None):
            raise ValueError("trace_id and span_id come together")
        if self.parent_id is not None and self.span_id is None:
            raise ValueError("parent_id needs trace_id and span_id")
        for name, value, bits in (
            ("trace", self.trace_id, 128),
            ("span", self.span_id, 64),
            ("parent", self.parent_id, 64),
        ):
            if value is not None and not 0 <= value < 1 << bits:
                raise ValueError(f"{name}_id is {value:#x}, wanted at most {bits} bits")

    def encode(self) -> bytes:
        """Return the bytes."""
        flags = _DEBUG if self.debug else 0
        if self.sampled is not None:
            flags |= _SAMPLED if self.sampled else _NOT_SAMPLED
        if self.trace_id is None or self.span_id is None:
            return bytes((flags,))
        flags |= _HAS_IDS
        ids = self.span_id.to_bytes(8, "big")
        if self.trace_id < 1 << 64:
            ids = self.trace_id.to_bytes(8, "big") + ids
        else:
            flags |= _WIDE
            ids = self.trace_id.to_bytes(16, "big") + ids
        if self.parent_id is not None:
            flags |= _PARENT
            ids += self.parent_id.to_bytes(8, "big")
        return bytes((flags,)) + ids

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read flags and ids.

        Raises:
            DecodeError: too few bytes or too many for the flags, or both sampled and not sampled.
        """
        if not data:
            raise DecodeError("no flags")
        flags = data[0]
        if flags & _SAMPLED and flags & _NOT_SAMPLED:
            raise DecodeError("both sampled and not sampled", path="sampled")
        sampled = True if flags & _SAMPLED else False if flags & _NOT_SAMPLED else None
        debug = bool(flags & _DEBUG)
        span = 1 + (16 if flags & _WIDE else 8)
        size = span + (16 if flags & _PARENT else 8) if flags & _HAS_IDS else 1
        if len(data) != size:
            raise DecodeError(f"{len(data)} bytes, {size} wanted by the flags {flags:#04x}")
        if not flags & _HAS_IDS:
            return cls(sampled=sampled, debug=debug)
        return cls(
            trace_id=int.from_bytes(data[1:span], "big"),
            span_id=int.from_bytes(data[span : span + 8], "big"),
            parent_id=int.from_bytes(data[span + 8 :], "big") if flags & _PARENT else None,
            sampled=sampled,
            debug=debug,
        )
