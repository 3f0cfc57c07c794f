"""Composite metadata: several entries, each with its own MIME type (EXT-1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol, Self, TypeVar

import attrs

from levada.framework.errors import DecodeError
from levada.transports.rsocket.extensions.mime import MAX_ENTRIES, check_mime_type, decode_mime_type, encode_mime_type

__all__ = ["MAX_METADATA", "CompositeMetadata", "Entry", "Extension"]

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
