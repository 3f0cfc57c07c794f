"""`Request`: what a handler is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from levada.framework import Receiver, TerminalState
from levada.transports.rsocket import Payload
from levada.transports.rsocket.events import Interaction
from levada.transports.rsocket.extensions import (
    AcceptableMimeTypes,
    Authentication,
    CompositeMetadata,
    DataMimeType,
    ZipkinTracing,
)

from .flows import Inbound

if TYPE_CHECKING:
    from .encoding import Encoding
    from .peers import ConnectedPeer

__all__ = ["Request"]


class Request:
    """One request of the peer.

    What is in the metadata is read when it is asked for; `levada.framework.errors.DecodeError` says that it is not what its MIME type
    says, and, not caught by the handler, ends the stream with INVALID.
    """

    __slots__ = ("_encoding", "_inbound", "_receiver", "connection", "kind", "payload", "principal", "stream_id")

    def __init__(
        self,
        kind: Interaction,
        stream_id: int,
        payload: Payload,
        connection: ConnectedPeer,
        encoding: Encoding,
        inbound: Inbound | None,
    ) -> None:
        self.kind = kind
        """Which of the interactions was asked for."""
        self.stream_id = stream_id
        """Number of the stream, for logs."""
        self.payload = payload
        """Data and metadata as they came; of a channel the first ones."""
        self.connection = connection
        """The peer that asks; requests may be sent to it."""
        self.principal: Any = connection.principal
        """What the `authenticate` hook made of the credentials: of this request's own, else of the connection's."""
        self._encoding = encoding
        self._inbound = inbound
        self._receiver: Receiver[Any] | None = None

    @property
    def payloads(self) -> Receiver[Payload]:
        """All payloads of a channel, the first one included; of another request the one it has. Closed when the answer is complete."""
        return self.receive()

    def receive(self, convert: Callable[[Payload], Any] | None = None) -> Receiver[Any]:
        """Give what `payloads` gives, each payload turned into something else; to be called once then.

        Args:
            convert: its errors are raised where the payload is taken.
        """
        if self._receiver is None:
            if self._inbound is None:
                self._inbound = Inbound(1, str(self.stream_id), Payload, lambda _, __: None)
                self._inbound.put(self.payload)
                self._inbound.finish_producer()
            if convert is not None:
                self._inbound.convert(convert)
            self._receiver = Receiver(self._inbound)
        return self._receiver

    def close(self) -> None:
        """Take no more payloads; the stream does it when the answer is complete."""
        if self._inbound is not None:
            self._inbound.end(TerminalState.RECEIVER_CLOSED)

    @property
    def data(self) -> bytes:
        """Bytes of the data."""
        return self.payload.data

    @property
    def metadata(self) -> bytes | None:
        """Bytes of the metadata; ``None`` if there are none."""
        return self.payload.metadata

    @property
    def route(self) -> str:
        """Where the request is to go: the routing entry, or the whole metadata of a connection without composite metadata."""
        return self._encoding.read(self.payload.metadata).route

    @property
    def entries(self) -> CompositeMetadata:
        """All entries of the metadata; those of a connection without composite metadata are one."""
        return self._encoding.read(self.payload.metadata).entries

    @property
    def credentials(self) -> Authentication | None:
        """The credentials that came with this very request (EXT-3)."""
        return self.entries.first(Authentication)

    @property
    def tracing(self) -> ZipkinTracing | None:
        """The trace that it belongs to (EXT-5)."""
        return self.entries.first(ZipkinTracing)

    @property
    def data_mime_type(self) -> str | int:
        """What the data is: its own type (EXT-4), else that of the connection."""
        own = self.entries.first(DataMimeType)
        return own.mime_type if own is not None else self._encoding.data_mime_type

    @property
    def accepts(self) -> tuple[str | int, ...]:
        """The data types that the requester wants in the answer (EXT-4); the connection's if it does not say."""
        own = self.entries.first(AcceptableMimeTypes)
        return tuple(own.mime_types) if own is not None else (self._encoding.data_mime_type,)

    @property
    def holds_message(self) -> bool:
        """Whether the data is an instance of a message class, so that `message` reads it and the answer is encoded likewise."""
        return self._encoding.read(self.payload.metadata).messages

    def message(self, expected: Any = Any) -> Any:
        """Read the data as a message.

        Args:
            expected: the class, or another annotation, that it must fit.

        Raises:
            DecodeError: it is not such a message.
        """
        return self._encoding.decode(self.payload, expected)

    def read(self, payload: Payload, expected: Any = Any) -> Any:
        """Read a further payload of a channel as a message; as `message`."""
        return self._encoding.decode(payload, expected)

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.stream_id}: {len(self.payload.data)} octets>"
