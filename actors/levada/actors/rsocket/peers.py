"""`Peer`: whom requests are sent to. One connection, one that comes back, or several of which one is chosen for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import attrs
import trio

from levada.actors.single import SingleCarrier
from levada.framework import Asks, Receiver, Ref, Sender
from levada.transports.carriers import CarrierInfo, CarrierStatistics
from levada.transports.rsocket import Payload
from levada.transports.rsocket.events import ConnectionEnded, Interaction, SetupReceived

from .encoding import Encoding, Metadata, expected_reply, is_message

if TYPE_CHECKING:
    from .config import ClientConfig, ServerConfig

__all__ = ["ConnectedPeer", "ConnectionStatistics", "Peer"]

R = TypeVar("R")

_Convert = Callable[[Payload], Any] | None
Data = bytes | bytearray | memoryview | Payload


@attrs.frozen(kw_only=True)
class ConnectionStatistics:
    """Counters of one connection; plain numbers, a snapshot."""

    open_streams: int
    requests_sent: int
    requests_received: int
    fire_and_forget_dropped: int
    """Fire-and-forget requests of the peer that found too many, or too much, in their handlers."""
    sessions_resumed: int
    """Times that the session went on on another carrier."""
    carrier: CarrierStatistics | None
    """Of the carrier now in use; ``None`` if there is none."""


class _Requesting(Protocol):
    """What a peer needs of its connection; `levada.actors.rsocket.connection.Connection` says what each is."""

    config: ClientConfig | ServerConfig
    encoding: Encoding
    carrier: SingleCarrier[Any] | None
    info: CarrierInfo | None
    end: ConnectionEnded | None
    unusable: trio.Event
    over: trio.Event
    requests_sent: int
    requests_received: int
    dropped: int
    resumptions: int

    @property
    def ref(self) -> Ref[Any]: ...
    @property
    def streams(self) -> Sized: ...
    async def call(self, payload: Payload) -> Payload: ...
    async def fire(self, payload: Payload) -> None: ...
    async def push(self, metadata: bytes) -> None: ...
    async def items(
        self, kind: Interaction, payload: Payload, window: int, item_type: Any, convert: _Convert
    ) -> Receiver[Any]: ...
    async def open_channel(
        self, payload: Payload, window: int, item_type: Any, convert: _Convert, encode: Callable[[Any], Payload]
    ) -> tuple[Sender[Any], Receiver[Any]]: ...
    async def aclose(self) -> None: ...
    def shut(self, code: int = 0, reason: str = "") -> None: ...
    def carrier_statistics(self) -> CarrierStatistics | None: ...


class Peer(ABC):
    """Requests go out here. The same for a client, for a server's clients, and for balanced endpoints.

    What is sent: octets, a `Payload`, or an instance of a message class; a message is answered by a message, of the type that its class
    names (``class Get(Asks[int])``), everything else by `Payload`. Where it goes: `route`, and in `metadata` whatever else belongs to
    the request (credentials, tracing, entries of one's own).

    Any task of the system's trio run may call; calls do not wait for one another. Timeouts are trio's (`trio.fail_after`): a cancelled
    request sends CANCEL.

    What the methods raise:
        RequestFailed: the responder answered with an error; its subclass says which, `RequestFailed.retryable` whether to try again.
        ConnectionLost: there is no connection, or it was lost; whether the request was processed is not known in the latter case.
        ConnectionClosed: this side closed it.
        LocalProtocolError: too many requests wait for a lease, or the dialect has no such request.
        ConfigurationError, TypeError, ValueError: what was given cannot be sent.
    """

    _chosen: _Requesting | None = None
    """The connection for each request, if there is no choice."""

    @abstractmethod
    async def _choose(self) -> _Requesting:
        """Give the connection for the next request, waiting for one if that is wanted."""

    @overload
    async def request_response(self, x: Asks[R], *, route: str | None = None, metadata: Metadata = None) -> R: ...
    @overload
    async def request_response(self, x: Data, *, route: str | None = None, metadata: Metadata = None) -> Payload: ...
    @overload
    async def request_response(self, x: object, *, route: str | None = None, metadata: Metadata = None) -> Any: ...
    async def request_response(self, x: Any, *, route: str | None = None, metadata: Metadata = None) -> Any:
        """Send a request and wait for its one answer; an answer without payload is an empty one.

        Errors are those of the class; `DecodeError` if the answer to a message is not what its class promises.

        Cancellation:
            the request is cancelled at the peer. It may have been processed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = self._chosen or await self._choose()
        answer = await connection.call(connection.encoding.request(x, route, metadata))
        if type(x) is bytes or not is_message(x):  # the first as it is by far the quicker question
            return answer
        return connection.encoding.decode(answer, expected_reply(x))

    async def fire_and_forget(self, x: object, *, route: str | None = None, metadata: Metadata = None) -> None:
        """Send a request that nothing answers. It has been handed to the carrier when this returns; whether it arrives nobody knows.

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = self._chosen or await self._choose()
        await connection.fire(connection.encoding.request(x, route, metadata))

    @overload
    async def request_stream(
        self, x: Asks[R], *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[R]: ...
    @overload
    async def request_stream(
        self, x: Data, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Payload]: ...
    @overload
    async def request_stream(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Any]: ...
    async def request_stream(
        self, x: Any, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Any]:
        """Open a stream of answers; returns when the request is sent.

        Closing the receiver cancels the stream. It ends when the responder is done, and raises what the stream failed with, behind what
        had arrived.

        Args:
            x: see the class. The answers to a message are read as the ``R`` of its ``Asks[R]``, each when it is taken.
            route: see the class.
            metadata: see the class.
            window: payloads that the responder may be ahead of whoever receives; ``None``: as the settings say. This is the credit:
                half of it is granted anew whenever half has been taken.

        Cancellation:
            nothing was sent.
        """
        return await self._items(Interaction.REQUEST_STREAM, x, route, metadata, window)

    async def request_subscription(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Any]:
        """Open a stream without an end of its own; ReactiveSocket only. Otherwise as `request_stream`."""
        return await self._items(Interaction.REQUEST_SUBSCRIPTION, x, route, metadata, window)

    async def _items(
        self, kind: Interaction, x: object, route: str | None, metadata: Metadata, window: int | None
    ) -> Receiver[Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = await self._choose()
        payload = connection.encoding.request(x, route, metadata)
        return await connection.items(kind, payload, window or connection.config.window, *_answers(connection, x))

    @overload
    async def request_channel(
        self, x: Asks[R], *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> tuple[Sender[Any], Receiver[R]]: ...
    @overload
    async def request_channel(
        self, x: Data, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> tuple[Sender[Data], Receiver[Payload]]: ...
    @overload
    async def request_channel(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> tuple[Sender[Any], Receiver[Any]]: ...
    async def request_channel(
        self, x: Any, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> tuple[Sender[Any], Receiver[Any]]:
        """Open a channel with its first payload; returns when that is sent.

        The sender takes the further payloads and waits for the responder's credit; finish it when there are no more. Cancelling the
        sender, or closing the receiver, cancels the channel in both directions. A responder that wants no more payloads closes
        the sender only (`ReceiverClosed`). Arguments as for `request_stream`.

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = await self._choose()
        payload = connection.encoding.request(x, route, metadata)
        messages = is_message(x)

        def encode(value: Any) -> Payload:
            return connection.encoding.reply(value, messages=messages)

        return await connection.open_channel(
            payload, window or connection.config.window, *_answers(connection, x), encode
        )

    async def metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; nothing answers it.

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await (await self._choose()).push(metadata)


def _answers(connection: _Requesting, x: object) -> tuple[Any, Any]:
    """Item type of the answers to `x`, and how to read each."""
    if not is_message(x):
        return Payload, None
    expected = expected_reply(x)
    return expected, lambda payload: connection.encoding.decode(payload, expected)


class ConnectedPeer(Peer):
    """The other side of one connection (with resumption: of one session). It does not come back once it has ended."""

    def __init__(self, connection: _Requesting) -> None:
        self._connection = self._chosen = connection
        self.setup: SetupReceived | None = None
        """What the client said when it connected; ``None`` on the client itself."""
        self.principal: Any = None
        """What the server's `authenticate` hook made of the client's credentials."""

    async def _choose(self) -> _Requesting:
        return self._connection

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end: addresses, certificate, credentials of the process; of the newest carrier."""
        info = self._connection.info
        assert info is not None
        return info

    @property
    def connected(self) -> bool:
        """Whether requests may be sent; true too while a session is without carrier."""
        return not self._connection.unusable.is_set()

    async def terminated(self) -> ConnectionEnded:
        """Wait for the end, and return how it came.

        Cancellation:
            only the waiting ends.
        """
        await self._connection.over.wait()
        end = self._connection.end
        assert end is not None
        return end

    async def aclose(self) -> None:
        """Take no new requests, let open streams end within ``drain`` seconds (a setting), then close. Twice is harmless.

        Cancellation:
            closed at once.
        """
        await self._connection.aclose()

    def abort(self) -> None:
        """Close at once: open streams end, handlers of this peer's requests are cancelled."""
        self._connection.shut(reason="aborted")

    def drop_carrier(self) -> None:
        """Cut the carrier off, as a network may: the end of the connection, or with resumption the beginning of another carrier."""
        if self._connection.carrier is not None:
            self._connection.carrier.abort()

    def statistics(self) -> ConnectionStatistics:
        """Return the counters as they are now."""
        connection = self._connection
        return ConnectionStatistics(
            open_streams=len(connection.streams),
            requests_sent=connection.requests_sent,
            requests_received=connection.requests_received,
            fire_and_forget_dropped=connection.dropped,
            sessions_resumed=connection.resumptions,
            carrier=connection.carrier_statistics(),
        )

    def __repr__(self) -> str:
        state = "connected" if self.connected else "ended"
        return f"<ConnectedPeer {self._connection.ref.path}: {state}>"
