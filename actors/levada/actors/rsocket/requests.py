"""`Request`: a peer's request, as a handler gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from levada.framework import Identity, Receiver, RemotePeer, TerminalState
from levada.transports.rsocket import Payload
from levada.transports.rsocket.events import Interaction
from levada.transports.rsocket.extensions import (
    AcceptableMimeTypes,
    Authentication,
    CompositeMetadata,
    DataMimeType,
    ZipkinTracing,
)

from .flows import PayloadChannel

if TYPE_CHECKING:
    from .encoding import Encoding, Reading
    from .peers import ConnectedPeer

__all__ = ["Request", "Responder"]


class Request:
    """One request of the peer.

    The metadata is decoded on first use. If it does not fit its MIME type, that raises `levada.framework.errors.DecodeError`; if the handler
    does not catch it, the stream ends with INVALID.
    """

    __slots__ = (
        "_encoding",
        "_inbound",
        "_reading",
        "_receiver",
        "connection",
        "identity",
        "kind",
        "payload",
        "stream_id",
    )

    def __init__(
        self,
        kind: Interaction,
        stream_id: int,
        payload: Payload,
        connection: ConnectedPeer,
        encoding: Encoding,
        inbound: PayloadChannel | None,
    ) -> None:
        self.kind = kind
        """The kind of interaction."""
        self.stream_id = stream_id
        """Number of the stream, for logs."""
        self.payload = payload
        """Data and metadata as received; a channel's first payload."""
        self.connection = connection
        """The peer that sent the request; a handler may send requests to it."""
        self.identity: Identity | None = connection.identity
        """Who asks: by the request's own credentials if it has any, otherwise by the connection's. None without an ``authenticate`` hook."""
        self._encoding = encoding
        self._inbound = inbound
        self._receiver: Receiver[Any] | None = None
        self._reading: Reading | None = None

    @property
    def peer(self) -> RemotePeer:
        """The other end of the connection, with this request's `identity`."""
        peer = self.connection.remote
        return peer if peer.identity is self.identity else attrs.evolve(peer, identity=self.identity)

    @property
    def payloads(self) -> Receiver[Payload]:
        """All payloads of a channel, the first one included; any other request has one. Closed when the answer is complete."""
        return self.receive()

    def receive(self, convert: Callable[[Payload], Any] | None = None) -> Receiver[Any]:
        """Return `payloads` with each payload converted; call it at most once.

        Args:
            convert: its errors are raised where the payload is taken.
        """
        if self._receiver is None:
            if self._inbound is None:
                self._inbound = PayloadChannel(1, str(self.stream_id), Payload, lambda _, __: None)
                self._inbound.put(self.payload)
                self._inbound.finish_producer()
            if convert is not None:
                self._inbound.convert(convert)
            self._receiver = Receiver(self._inbound)
        return self._receiver

    def close(self) -> None:
        """Take no more payloads; the stream calls this when the answer is complete."""
        if self._inbound is not None:
            self._inbound.end(TerminalState.RECEIVER_CLOSED)

    @property
    def data(self) -> bytes:
        """The data as bytes."""
        return self.payload.data

    @property
    def metadata(self) -> bytes | None:
        """The metadata as bytes; ``None`` if there is none."""
        return self.payload.metadata

    @property
    def route(self) -> str:
        """The request's route: the routing entry, or on a connection without composite metadata all of the metadata."""
        return (self._reading or self._read()).route

    @property
    def entries(self) -> CompositeMetadata:
        """All entries of the metadata; on a connection without composite metadata there is one."""
        return (self._reading or self._read()).entries

    @property
    def credentials(self) -> Authentication | None:
        """The credentials that came with this request (EXT-3)."""
        reading = self._reading or self._read()
        return reading.entries.first(Authentication) if reading.has_credentials else None

    @property
    def tracing(self) -> ZipkinTracing | None:
        """The trace that the request belongs to (EXT-5)."""
        return self.entries.first(ZipkinTracing)

    @property
    def data_mime_type(self) -> str | int:
        """The MIME type of the data: the request's own (EXT-4), otherwise the connection's."""
        own = self.entries.first(DataMimeType)
        return own.mime_type if own is not None else self._encoding.data_mime_type

    @property
    def accepts(self) -> tuple[str | int, ...]:
        """The data types that the requester accepts in the answer (EXT-4); the connection's if it names none."""
        own = self.entries.first(AcceptableMimeTypes)
        return tuple(own.mime_types) if own is not None else (self._encoding.data_mime_type,)

    @property
    def holds_message(self) -> bool:
        """Whether the data is an instance of a message class, so that `message` reads it and the answer is encoded likewise."""
        return (self._reading or self._read()).messages

    def _read(self) -> Reading:
        reading = self._reading = self._encoding.read(self.payload.metadata)
        return reading

    def message(self, expected: Any = Any) -> Any:
        """Read the data as a message.

        Args:
            expected: the class, or another annotation, that it must fit.

        Raises:
            DecodeError: it is not such a message.
        """
        return self._encoding.codec.decode(self.payload.data, expected)

    def read(self, payload: Payload, expected: Any = Any) -> Any:
        """Read a further payload of a channel as a message, as `message` does."""
        return self._encoding.codec.decode(payload.data, expected)

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.stream_id}: {len(self.payload.data)} bytes>"


Responder = Callable[[Request], Any]
"""Calls the user's code; returns the answer, an awaitable for it, or an async iterable."""
