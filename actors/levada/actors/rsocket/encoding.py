"""Converts users' values to payloads and back: message classes, routes and other metadata, by the MIME types that SETUP named.

The codec's bytes travel under a MIME type of our own (`MESSAGES`). A connection with that data MIME type carries messages directly. On
others each such request says so in composite metadata (EXT-4), and the answer has the type of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from levada.framework import Asks, Codec
from levada.framework.errors import ConfigurationError, DecodeError
from levada.framework.message import reply_type
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import (
    MAX_METADATA,
    Authentication,
    CompositeMetadata,
    DataMimeType,
    Entry,
    Extension,
    Routing,
)

__all__ = ["COMPOSITE", "MESSAGES", "ROUTING", "Encoding", "Metadata", "Reading", "expected_reply", "is_message"]

MESSAGES = "application/vnd.levada.message+msgpack"
"""MIME type of data that is an instance of a message class, as `levada.framework.Codec` writes it."""

COMPOSITE = CompositeMetadata.MIME_TYPE
"""MIME type of composite metadata, the metadata of every connection by default."""
ROUTING = Routing.MIME_TYPE

Metadata = bytes | CompositeMetadata | Sequence[Extension | Entry] | None
"""Metadata of a request: bytes, or parts of composite metadata."""

_REMEMBERED, _LARGEST = 1024, 256  # pieces of metadata that are remembered for each connection, and the bytes of one


@attrs.frozen
class Reading:
    """The decoded metadata of a request."""

    entries: CompositeMetadata
    """All entries; metadata that is not composite is one entry."""
    route: str
    """The request's route; empty if it has none."""
    messages: bool
    """Whether the data is an instance of a message class."""
    has_credentials: bool = False
    """Whether an entry is an `Authentication`."""


def is_message(value: object) -> bool:
    """Whether `value` is an instance of a message class."""
    return "__message_tag__" in type(value).__dict__


@attrs.define(eq=False)
class Encoding:
    """Writes and reads the payloads of one connection."""

    data_mime_type: str
    """The data MIME type in SETUP."""
    metadata_mime_type: str
    """The metadata MIME type in SETUP."""
    codec: Codec
    _written: dict[tuple[str | None, bool], bytes] = attrs.field(factory=dict, init=False)
    _read: dict[bytes, Reading] = attrs.field(factory=dict, init=False)
    _bare: Reading = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._bare = Reading(CompositeMetadata(()), "", self.data_mime_type == MESSAGES)

    def request(self, x: object, route: str | None, metadata: Metadata) -> Payload:
        """Make the payload of a request.

        Raises:
            ConfigurationError: the metadata MIME type cannot carry the route or the metadata.
            TypeError, ValueError: data or metadata has the wrong type, or a message does not fit its annotations.
        """
        if type(x) is bytes:
            if metadata is None and (known := self._written.get((route, False))) is not None:
                return Payload(x, known)
            return Payload(x, self._metadata(route, metadata, messages=False))
        if type(x) is Payload:
            if route is None and metadata is None:
                return x
            if x.metadata is not None:
                raise ConfigurationError(
                    "a Payload with metadata brings its own; give route= and metadata= with the data alone"
                )
            return Payload(x.data, self._metadata(route, metadata, messages=False))
        if is_message(x):
            messages = self.data_mime_type != MESSAGES
            return Payload(self.codec.encode(x), self._metadata(route, metadata, messages=messages))
        return Payload(_as_bytes(x), self._metadata(route, metadata, messages=False))

    def _metadata(self, route: str | None, metadata: Metadata, *, messages: bool) -> bytes | None:
        if metadata is None and route is None and not messages:
            return None
        if isinstance(metadata, bytes):
            if route is None and not messages:
                return metadata
            raise ConfigurationError(
                "metadata as bytes leaves no room for a route or a MIME type; give entries instead"
            )
        if self.metadata_mime_type == COMPOSITE:
            return self._composite(route, metadata, messages=messages)
        if metadata is not None or messages or route is None:
            raise ConfigurationError(
                f"{'a message' if messages else 'several pieces of metadata'} need composite metadata, "
                f"but this connection's metadata is {self.metadata_mime_type} (set metadata_mime_type)"
            )
        return self._remember(
            (route, False), Routing(route).encode() if self.metadata_mime_type == ROUTING else route.encode()
        )

    def _remember(self, what: tuple[str | None, bool], written: bytes) -> bytes:
        if len(self._written) < _REMEMBERED and len(written) <= _LARGEST:
            self._written[what] = written
        return written

    def _composite(
        self, route: str | None, metadata: CompositeMetadata | Sequence[Extension | Entry] | None, *, messages: bool
    ) -> bytes:
        front = self._written.get((route, messages))
        if front is None:
            parts: list[Extension] = [] if route is None else [Routing(route)]
            if messages:
                parts.append(DataMimeType(MESSAGES))
            front = self._remember((route, messages), CompositeMetadata.of(*parts).encode())
        if metadata is None:
            return front
        more = metadata if isinstance(metadata, CompositeMetadata) else CompositeMetadata.of(*metadata)
        return front + more.encode()

    def read(self, metadata: bytes | None) -> Reading:
        """Read the metadata of a request; raise `DecodeError` if it does not fit its MIME type."""
        if metadata is None:
            return self._bare
        known = self._read.get(metadata)
        if known is not None:
            return known
        if self.metadata_mime_type == COMPOSITE:
            entries = CompositeMetadata.decode(metadata)
        elif len(metadata) > MAX_METADATA:
            raise DecodeError(f"metadata of {len(metadata)} bytes, at most {MAX_METADATA}")
        else:
            entries = CompositeMetadata((Entry(self.metadata_mime_type, metadata),))
        if self.metadata_mime_type in (COMPOSITE, ROUTING):
            routing = entries.first(Routing)
            route = routing.route or "" if routing is not None else ""
        else:
            route = metadata.decode("utf-8", "replace")
        own = entries.first(DataMimeType)
        messages = (own.mime_type if own is not None else self.data_mime_type) == MESSAGES
        has_credentials = any(entry.mime_type == Authentication.MIME_TYPE for entry in entries.entries)
        reading = Reading(entries, route, messages, has_credentials)
        # Most requests of a connection repeat the metadata of an earlier one. Metadata that holds a secret is not kept, nor are more than 8
        # entries: 64 would fit, and take 8 kB.
        if len(metadata) <= _LARGEST and len(entries.entries) <= 8 and not has_credentials:
            if len(self._read) >= _REMEMBERED:
                self._read.clear()
            self._read[metadata] = reading
        return reading

    def reply(self, value: object, *, messages: bool) -> Payload:
        """Make the payload of an answer.

        Raises:
            TypeError: the value is neither bytes, a `Payload` nor a message; a message must answer a message.
        """
        if type(value) is Payload:
            return value
        if messages:
            return Payload(self.codec.encode(value))
        if is_message(value) and self.data_mime_type == MESSAGES:
            return Payload(self.codec.encode(value))
        return Payload(_as_bytes(value))


def expected_reply(question: object) -> Any:
    """Return the type of the answers to a message: ``R`` for a subclass of ``Asks[R]``, otherwise anything."""
    return reply_type(type(question)) if isinstance(question, Asks) else Any


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"the value is {type(value).__name__}, wanted bytes, a Payload or an instance of a message class")
