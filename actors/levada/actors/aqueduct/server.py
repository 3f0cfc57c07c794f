"""The server's side: a listener, its connections, and what handles the messages of their entrypoints."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import trio

from levada.framework import Actor, Reason, Receiver, Ref
from levada.framework.channel_core import ChannelCore
from levada.framework.errors import CarrierError, ConfigurationError, LevadaError
from levada.transports import carriers

from .config import PeerConfig
from .connection import Connection
from .halves import Arrival, give_up
from .peer import Peer

__all__ = ["Handler", "Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.aqueduct")

Handler: TypeAlias = Callable[[Any], Awaitable[None]] | Callable[[], Actor[Any]] | Ref[Any]
"""What gets the messages of the entrypoint: an async function of one message, called for each; an actor class or a
`functools.partial` of one, made once for each connection; or the ref of an actor that is there already."""

ListenerContext = Callable[[], AbstractAsyncContextManager[Any]]
"""Listens at a carrier; leaving the context stops that."""


def check_handler(handler: Handler) -> None:
    """Refuse what can handle nothing.

    Raises:
        ConfigurationError: it is neither callable nor a ref.
    """
    if not (isinstance(handler, Ref) or callable(handler)):
        raise ConfigurationError(f"a handler is an actor class, a Ref or an async function, not {handler!r}")


class Calls:
    """Calls an async function for each message of a channel, several at a time."""

    def __init__(
        self, function: Callable[[Any], Awaitable[None]], channel: ChannelCore, connection: Connection
    ) -> None:
        self._function = function
        self._channel = channel
        self._connection = connection
        self._running = 0

    def pump(self) -> None:
        """Begin with what is there and may begin."""
        channel = self._channel
        while channel.queue and self._running < self._connection.config.max_handlers:
            self._running += 1
            arrival = channel.take()
            channel.settle(arrival, delivered=True)  # a handler that runs takes no room in the window
            self._connection.handlers.start_soon(self._call, arrival)
        if channel.pending is not None and not channel.queue and not self._running:
            channel.end_pending()

    async def _call(self, arrival: Arrival) -> None:
        try:
            await self._function(arrival.open())
        except Exception:
            logger.exception("%s: a handler failed", self._connection.ref.path)
            give_up(arrival.handles)
        except BaseException:
            give_up(arrival.handles)
            raise
        finally:
            self._running -= 1
            self.pump()


class ServerConnection(Connection):
    """A connection that a client opened."""

    handler: Handler
    listener: ListenerActor

    def serve(self) -> None:
        """See `Connection.serve`."""
        handler = self.handler
        self.listener.connections[self] = None
        if inspect.iscoroutinefunction(handler):
            self.entry.consume(Calls(handler, self.entry, self).pump)
            return
        receiver: Receiver[Any] = Receiver(self.entry)
        receiver.to_mailbox(handler if isinstance(handler, Ref) else self.spawn(handler, name="handler"))

    async def stopping(self, reason: Reason) -> None:
        """See `Connection.stopping`."""
        self.listener.connections.pop(self, None)
        self.close_entry()
        await super().stopping(reason)


class ListenerActor(Actor[Any]):
    """Accepts carriers and makes a connection of each."""

    config: PeerConfig
    listening: ListenerContext
    item_type: Any
    handler: Handler

    def __attrs_post_init__(self) -> None:
        self.url = ""
        self.connections: dict[ServerConnection, None] = {}
        """Those that have greeted."""
        self._places = trio.CapacityLimiter(self.config.max_connections)
        self._accepting = trio.CancelScope()
        self._opened = trio.Event()
        self._refusal: LevadaError | OSError | None = None

    def started(self) -> None:
        """See `Actor.started`."""
        self.start_soon(self._listen)

    async def opened(self) -> None:
        """Wait until it listens.

        Raises:
            ConfigurationError: a URL or settings that cannot work.
            OSError: an address that cannot be had, or a file that cannot be read.
        """
        await self._opened.wait()
        if self._refusal is not None:
            raise self._refusal

    async def _listen(self) -> None:
        try:
            with self._accepting:
                async with self.listening() as listener:
                    self.url = f"aqueduct+{listener.url}".replace("aqueduct+quic:", "aqueduct:")
                    self._opened.set()
                    while True:
                        place = object()
                        await self._places.acquire_on_behalf_of(place)
                        self._connect(await listener.accept(), place)
        except (ConfigurationError, OSError, CarrierError) as error:
            if self._opened.is_set():
                raise
            self._refusal = error
        finally:
            self._opened.set()

    def _connect(self, incoming: carriers.Incoming, place: object) -> None:
        def carrier() -> AbstractAsyncContextManager[carriers.Connection]:
            return _accepted(incoming)

        connection = ServerConnection(
            self.config, carrier, self.item_type, handler=self.handler, listener=self, client=False
        )
        ref = self.spawn(lambda: connection)
        ref.on_stopped(lambda: self._places.release_on_behalf_of(place))

    def close_listener(self) -> None:
        """Accept nobody any more."""
        self._accepting.cancel()


@asynccontextmanager
async def _accepted(incoming: carriers.Incoming) -> AsyncIterator[carriers.Connection]:
    async with incoming.accept() as connection:
        await connection.handshake()
        yield connection


class Listener:
    """What `serve` gives: where it listens, and who is connected."""

    def __init__(self, actor: ListenerActor) -> None:
        self._actor = actor

    @property
    def url(self) -> str:
        """Where clients connect to, with the real port."""
        return self._actor.url

    @property
    def peers(self) -> list[Peer[Any]]:
        """The clients that are connected."""
        return [Peer(connection) for connection in self._actor.connections]

    async def aclose(self) -> None:
        """Accept nobody any more and close all connections in order, at the same time.

        Their entrypoints close at once, the rest when open channels have ended or had `PeerConfig.drain` seconds for it. Twice is harmless.

        Cancellation:
            closed at once.
        """
        self._actor.close_listener()
        try:
            async with trio.open_nursery() as nursery:
                for connection in list(self._actor.connections):
                    nursery.start_soon(connection.aclose)
        finally:
            self._actor.ref.stop(now=True)
        await self._actor.ref.terminated()

    async def terminated(self) -> Reason:
        """Wait for the end of the listener and of all its connections.

        Cancellation:
            only the waiting ends.
        """
        return await self._actor.ref.terminated()
