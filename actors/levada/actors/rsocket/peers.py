"""`Peer`: the handle for sending requests, over one connection, a reconnecting one, or several with a choice for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

import attrs
import trio

from levada.actors.single import SingleCarrier
from levada.framework import Asks, Identity, Reason, Receiver, Ref, RemotePeer, Sender
from levada.framework.tracing import Tracing
from levada.transports.carriers import CarrierInfo, CarrierStatistics
from levada.transports.rsocket import Payload
from levada.transports.rsocket.events import ConnectionEnded, Interaction, SetupReceived

from .encoding import Encoding, Metadata, expected_reply, is_message
from .errors import RequestFailed
from .tracing import Calling

__all__ = ["ConnectedPeer", "ConnectionStatistics", "Peer"]

R = TypeVar("R")

_Convert = Callable[[Payload], Any] | None
Data = bytes | bytearray | memoryview | Payload


class RequestOptions(TypedDict, total=False):
    """The named arguments of every request, for type checkers."""

    route: str | None
    metadata: Metadata


class StreamOptions(RequestOptions, total=False):
    """Those of a stream or channel."""

    window: int | None


@attrs.frozen(kw_only=True)
class ConnectionStatistics:
    """Counters of one connection; plain numbers, a snapshot."""

    open_streams: int
    requests_sent: int
    requests_received: int
    fire_and_forget_dropped: int
    """Fire-and-forget requests of the peer that were dropped because too many, or too many bytes, were in their handlers."""
    sessions_resumed: int
    """How often the session was resumed on another carrier."""
    carrier: CarrierStatistics | None
    """The current carrier's counters; ``None`` if there is none."""


class _Requesting(Protocol):
    """The part of the connection that a peer uses; `levada.actors.rsocket.connection.RSocketDriver` documents each member."""

    encoding: Encoding
    tracing: Tracing | None
    carrier: SingleCarrier[Any] | None
    info: CarrierInfo | None
    remote: RemotePeer | None
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
        self, kind: Interaction, payload: Payload, window: int | None, item_type: Any, convert: _Convert
    ) -> Receiver[Any]: ...
    async def open_channel(
        self, payload: Payload, window: int | None, item_type: Any, convert: _Convert, encode: Callable[[Any], Payload]
    ) -> tuple[Sender[Any], Receiver[Any]]: ...
    async def aclose(self) -> None: ...
    def shut(self, code: int = 0, reason: str = "") -> None: ...
    def carrier_statistics(self) -> CarrierStatistics | None: ...


class Peer(ABC):
    """Sends requests: the same for a client, for a server's clients, and for balanced endpoints.

    Data is bytes, a `Payload`, or an instance of a message class. A message is answered by a message, of the type that its class names
    (``class Get(Asks[int])``), everything else by a `Payload`. `route` says where the request goes, and `metadata` holds everything else
    about it (credentials, tracing, the application's entries).

    Any task of the system's trio run may call; calls do not wait for one another. For timeouts use trio (`trio.fail_after`): a cancelled
    request sends CANCEL.

    The methods raise:
        RequestFailed: the responder answered with an error; its subclass says which, `RequestFailed.retryable` whether to try again.
        ConnectionLost: there is no connection, or it was lost; if it was lost, the request may have been processed.
        ConnectionClosed: this side closed it.
        LocalProtocolError: too many requests wait for a lease, or the dialect has no such request.
        ConfigurationError, TypeError, ValueError: the arguments cannot be sent.
    """

    _chosen: _Requesting | None = None
    """The connection for all requests, if there is no choice."""

    @abstractmethod
    async def _choose(self) -> _Requesting:
        """Return the connection for the next request; waits for one if configured to."""

    @overload
    async def request_response(self, x: Asks[R], **options: Unpack[RequestOptions]) -> R: ...
    @overload
    async def request_response(self, x: Data, **options: Unpack[RequestOptions]) -> Payload: ...
    @overload
    async def request_response(self, x: object, **options: Unpack[RequestOptions]) -> Any: ...
    async def request_response(self, x: Any, *, route: str | None = None, metadata: Metadata = None) -> Any:
        """Send a request and wait for its answer; an answer without a payload is an empty one.

        Raises the errors of the class, and `DecodeError` if the answer to a message does not have the promised type.

        Cancellation:
            the request is cancelled at the peer. It may have been processed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = self._chosen or await self._choose()
        if connection.tracing is None:
            answer = await connection.call(connection.encoding.request(x, route, metadata))
        else:
            with _calling(connection, connection.tracing, x, route) as calling:
                answer = await connection.call(calling.payload(connection.encoding, x, route, metadata))
        if type(x) is bytes or not is_message(x):  # `bytes` first, as that test is much faster
            return answer
        return connection.encoding.codec.decode(answer.data, expected_reply(x))

    async def fire_and_forget(self, x: object, *, route: str | None = None, metadata: Metadata = None) -> None:
        """Send a request that gets no answer. On return it has been handed to the carrier; delivery is not confirmed.

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = self._chosen or await self._choose()
        if connection.tracing is None:
            await connection.fire(connection.encoding.request(x, route, metadata))
        else:
            with _calling(connection, connection.tracing, x, route) as calling:
                await connection.fire(calling.payload(connection.encoding, x, route, metadata))

    @overload
    async def request_stream(self, x: Asks[R], **options: Unpack[StreamOptions]) -> Receiver[R]: ...
    @overload
    async def request_stream(self, x: Data, **options: Unpack[StreamOptions]) -> Receiver[Payload]: ...
    @overload
    async def request_stream(self, x: object, **options: Unpack[StreamOptions]) -> Receiver[Any]: ...
    async def request_stream(
        self, x: Any, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Any]:
        """Open a stream of answers; returns when the request is sent.

        Closing the receiver cancels the stream. The receiver ends when the responder is done; if the stream fails, it raises the error after
        everything that had arrived.

        Args:
            x: see the class. The answers to a message are read as the ``R`` of its ``Asks[R]``, each when it is taken.
            window: payloads that the responder may send ahead of the receiver; ``None``: the setting. This is the credit: each time half of it
                has been taken, half is granted again.

        Cancellation:
            nothing was sent.
        """
        return await self._items(Interaction.REQUEST_STREAM, x, route, metadata, window)

    async def request_subscription(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> Receiver[Any]:
        """Open a stream that has no natural end; ReactiveSocket only. Otherwise as `request_stream`."""
        return await self._items(Interaction.REQUEST_SUBSCRIPTION, x, route, metadata, window)

    async def _items(
        self, kind: Interaction, x: object, route: str | None, metadata: Metadata, window: int | None
    ) -> Receiver[Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = await self._choose()
        answers = window, *_answers(connection, x)
        if connection.tracing is None:
            return await connection.items(kind, connection.encoding.request(x, route, metadata), *answers)
        with _calling(connection, connection.tracing, x, route) as calling:
            payload = calling.payload(connection.encoding, x, route, metadata)
            receiver = await connection.items(kind, payload, *answers)
            calling.until(receiver)
            return receiver

    @overload
    async def request_channel(
        self, x: Asks[R], **options: Unpack[StreamOptions]
    ) -> tuple[Sender[Any], Receiver[R]]: ...
    @overload
    async def request_channel(
        self, x: Data, **options: Unpack[StreamOptions]
    ) -> tuple[Sender[Data | RequestFailed], Receiver[Payload]]: ...
    @overload
    async def request_channel(
        self, x: object, **options: Unpack[StreamOptions]
    ) -> tuple[Sender[Any], Receiver[Any]]: ...
    async def request_channel(
        self, x: Any, *, route: str | None = None, metadata: Metadata = None, window: int | None = None
    ) -> tuple[Sender[Any], Receiver[Any]]:
        """Open a channel with its first payload; returns when that is sent.

        The sender takes the later payloads and waits for the responder's credit; finish it after the last one. Cancelling the
        sender, or closing the receiver, cancels the channel in both directions. A responder that wants no more payloads closes
        the sender only (`ReceiverClosed`). Arguments as for `request_stream`.

        A `RequestFailed` as the last payload tells the responder that this side has failed, by an ERROR with its code and text. That ends
        both directions (RS-68): the receiver raises this error, too. ReactiveSocket can only cancel (RX-57).

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = await self._choose()
        messages = is_message(x)

        def encode(value: Any) -> Payload:
            try:
                return connection.encoding.reply(value, messages=messages)
            except Exception:
                if isinstance(value, RequestFailed):
                    raise value from None
                raise

        answers = window, *_answers(connection, x), encode
        if connection.tracing is None:
            return await connection.open_channel(connection.encoding.request(x, route, metadata), *answers)
        with _calling(connection, connection.tracing, x, route) as calling:
            payload = calling.payload(connection.encoding, x, route, metadata)
            sender, receiver = await connection.open_channel(payload, *answers)
            calling.until(receiver)
            return sender, receiver

    async def metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; there is no answer.

        Cancellation:
            nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await (await self._choose()).push(metadata)


def _calling(connection: _Requesting, tracing: Tracing, x: object, route: str | None) -> Calling:
    return Calling(tracing, str(connection.remote), x, route)


def _answers(connection: _Requesting, x: object) -> tuple[Any, Any]:
    """Return the item type of the answers to `x`, and the function that reads each."""
    if not is_message(x):
        return Payload, None
    expected = expected_reply(x)
    return expected, lambda payload: connection.encoding.codec.decode(payload.data, expected)


class ConnectedPeer(Peer):
    """The other side of one connection (with resumption: of one session). Once it has ended it stays so."""

    def __init__(self, connection: _Requesting) -> None:
        self._connection = self._chosen = connection
        self.setup: SetupReceived | None = None
        """The client's SETUP; ``None`` on the client itself."""
        self.identity: Identity | None = None
        """Who the client is; None without an ``authenticate`` hook, and on the client itself."""

    async def _choose(self) -> _Requesting:
        return self._connection

    @property
    def remote(self) -> RemotePeer:
        """The other end: protocol, address, identity."""
        remote = self._connection.remote
        assert remote is not None
        return remote

    @property
    def info(self) -> CarrierInfo:
        """The newest carrier's facts about the other end: addresses, certificate, credentials of the process."""
        info = self._connection.info
        assert info is not None
        return info

    @property
    def closed(self) -> bool:
        """Whether the connection has ended. A session that is without a carrier has not."""
        return self._connection.over.is_set()

    @property
    def end(self) -> ConnectionEnded | None:
        """How the protocol ended: code, text and cause; ``None`` before that, and if there never was a session."""
        return self._connection.end

    async def terminated(self) -> Reason:
        """Wait for the end of the connection (with resumption: of the session) and return the reason.

        Returns:
            `Normal` if this side closed it in order, `Lost` if the peer or the network ended it.

        Cancellation:
            only the waiting ends.
        """
        return await self._connection.ref.terminated()

    async def aclose(self) -> None:
        """Take no new requests, let open streams end within `CoreConfig.drain_timeout` seconds, then close. A second call does no harm.

        Cancellation:
            the connection closes at once.
        """
        await self._connection.aclose()

    def abort(self) -> None:
        """Close at once: open streams end, handlers of this peer's requests are cancelled."""
        self._connection.shut(reason="aborted")

    def drop_carrier(self) -> None:
        """Cut the carrier off, as a network failure would: the connection ends, or with resumption moves to another carrier."""
        if self._connection.carrier is not None:
            self._connection.carrier.abort()

    def statistics(self) -> ConnectionStatistics:
        """Return a snapshot of the counters."""
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
        state = "ended" if self.closed else "connected"
        return f"<ConnectedPeer {self._connection.ref.path}: {state}>"
