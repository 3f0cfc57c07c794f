"""The server's side: a listener, its connections, and the handlers of their entrypoints."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
import trio

from levada.actors.authentication import FAILED, Refused
from levada.actors.listening import Acceptor, ListenerHandle
from levada.actors.multiplexed import accepting
from levada.actors.stream_carriers import url_of
from levada.framework import Actor, Identity, OneshotSender, Reason, Receiver, Ref, RemotePeer, Sender
from levada.framework.embedding import ChannelCore, Outcome, UntracedMessage, act_for, let_others_run
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.text import printable
from levada.transports import carriers
from levada.transports.aqueduct import CloseCode, HeadersReceived, ReceiverHalf

from .config import AUTHORIZATION, PeerConfig
from .connection import AqueductDriver
from .halves import Arrival, give_up
from .name_lookup import EntryInbound, Expose
from .peer import Peer
from .raw import RawMessage

__all__ = ["Handler", "Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.aqueduct")

Handler: TypeAlias = Callable[[Any], Awaitable[None]] | Callable[[], Actor[Any]] | Ref[Any]
"""Gets the messages of the entrypoint: an async function of one message, called for each; an actor class or a `functools.partial` of
one, started once for each connection; or the ref of a running actor."""

ListenerContext = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes the context of a carrier's listener; leaving the context stops listening."""


def check_handler(handler: Handler) -> None:
    """Check the type of a handler.

    Raises:
        ConfigurationError: the handler is neither callable nor a ref.
    """
    if not (isinstance(handler, Ref) or callable(handler)):
        raise ConfigurationError(f"the handler is {handler!r}, wanted an actor class, a Ref or an async function")


_CALL = f"{__name__}.Calls._call"
"""Name of each handler's task: trio would make the same text for each, and keep it."""


@attrs.define(eq=False)
class Calls:
    """Calls an async function for each message of a channel, several at a time."""

    _function: Callable[[Any], Awaitable[None]]
    _channel: ChannelCore
    _connection: ServerConnection
    _tasks: trio.Nursery
    _running: int = attrs.field(default=0, init=False)
    _peer: RemotePeer | None = attrs.field(init=False)
    _context: Context = attrs.field(factory=copy_context, init=False)
    """Each handler begins with a copy of this, in which `current_peer` is `_peer`: not with what another handler has set."""

    def __attrs_post_init__(self) -> None:
        self._peer = self._connection.halves.remote
        self._context.run(act_for, self._peer)

    def pump(self) -> None:
        """Call the function for queued messages, up to `PeerConfig.max_handlers` at a time."""
        channel, peer = self._channel, self._connection.halves.remote
        if peer is not self._peer:
            self._peer = peer
            self._context.run(act_for, peer)
        while channel.queue and self._running < self._connection.config.max_handlers:
            self._running += 1
            arrival = channel.take()
            channel.settle(arrival, outcome=Outcome.PROCESSED)  # a running handler takes no room in the window
            self._context.run(partial(self._tasks.start_soon, partial(self._call, arrival), name=_CALL))
        if channel.pending is not None and not channel.queue and not self._running:
            channel.end_pending()

    async def _call(self, arrival: Arrival) -> None:
        path, halves = self._connection.who, self._connection.halves
        try:
            try:
                if arrival.large:
                    async with self._connection.listener.decoding:
                        began = trio.current_time()
                        message = arrival.open()
                        await let_others_run(trio.current_time() - began)
                else:
                    message = arrival.open()
            except LevadaError as error:
                halves.complain("%s: a message from %s cannot be read: %s", path, halves.peer, printable(str(error)))
                return
            if halves.tracing is None or isinstance(message, UntracedMessage):
                await self._function(message)
            else:
                with halves.tracing.serve("aqueduct", type(message).__name__, str(halves.remote), arrival.context):
                    await self._function(message)
        except Exception as error:  # noqa: BLE001 - the failure log has it
            senders = [handle for handle in arrival.handles if isinstance(handle, Sender | OneshotSender)]
            if any(sender.says_reader_left(error) for sender in senders):
                logger.debug("%s: the client wants no more from a handler: %s", path, error)
                reason = ""
            else:
                reason = self._connection.system.failure_log.for_peer(error)
                self._connection.log_failure(error, "%s: a handler failed", path, event="handler_failed")
            give_up(arrival.handles, reason)
        except BaseException:
            give_up(arrival.handles)
            raise
        finally:
            self._running -= 1
            self.pump()


class ServerConnection(AqueductDriver):
    """A connection that a client opened."""

    handler: Handler
    listener: ListenerActor

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.handlers: trio.Nursery | None = None
        """None before there is a carrier."""

    async def run_on(self, carrier: carriers.Connection) -> None:
        """Run the carrier; handlers still running at its end get `AqueductConfig.drain_timeout` seconds."""
        async with trio.open_nursery() as handlers:
            self.handlers = handlers
            await super().run_on(carrier)
            handlers.cancel_scope.deadline = trio.current_time() + self.config.core.drain_timeout

    def _on_headers(self, event: HeadersReceived) -> None:
        headers = dict(event.headers)
        scheme, _, token = headers.get(AUTHORIZATION, b"").partition(b" ")
        control = self.core.control_id
        stream = None if control is None else self.stream(control)
        self.authenticate(
            attrs.evolve(
                self.credentials,
                scheme=scheme.decode("ascii", "replace").lower(),
                token=token.strip(),
                headers=headers,
                early=stream is not None and stream.early,
            )
        )

    events: ClassVar = {**AqueductDriver.events, HeadersReceived: _on_headers}

    def admitted(self, identity: Identity | None) -> None:
        """Answer the client, and take its messages. Source: AQ-15, AQ-18."""
        if self.differs(self.core.peer_headers or ()):
            return
        try:
            self.core.accept((*self.headers(), *(() if identity is None else identity.headers)))
        except ValueError as error:
            logger.error("%s: authenticate gave headers that cannot be sent: %s", self.who, error)
            self.record_refusal(FAILED)
            self.refused(FAILED)
            return
        entrance = self.core.entrypoint
        if isinstance(entrance, ReceiverHalf):
            self.entry.sender.away = 1
            if self.item_type is RawMessage:
                self.halves.bind(self.entry, entrance)
            else:
                self.halves.start(EntryInbound(self.halves, self.entry, self.names(), half=entrance))
            self.serve()
        self.greeted()
        self.welcome.set()
        self.flush_soon()

    def refused(self, refusal: Refused) -> None:
        """Close with the refusal's code and text. Source: AQ-15, AQ-19."""
        code = CloseCode.REFUSED if refusal.code is None else refusal.code
        self.feed(self.core.close(code, printable(refusal.reason), trio.current_time()))

    def serve(self) -> None:
        """Begin to take messages of the entrypoint."""
        handler = self.handler
        if inspect.iscoroutinefunction(handler):
            assert self.handlers is not None, "messages come over a carrier"
            self.entry.consume(Calls(handler, self.entry, self, self.handlers).pump)
            return
        receiver: Receiver[Any] = Receiver(self.entry)
        receiver.to_mailbox(handler if isinstance(handler, Ref) else self.spawn(handler, name="handler"))

    async def stopping(self, reason: Reason) -> None:
        """Close the entrypoint first, and cancel the handlers."""
        self.close_entry()
        self.shut()
        if self.handlers is not None:
            self.handlers.cancel_scope.cancel()
        await super().stopping(reason)


class ListenerActor(Acceptor[ServerConnection]):
    """Accepts carriers and makes a connection of each, which registers itself when the client has greeted."""

    config: PeerConfig
    listens: ListenerContext
    item_type: Any
    handler: Handler
    expose: Expose = ()
    decoding: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while a large message is decoded, and for the same time again, so that others run."""

    @property
    def max_connections(self) -> int:
        """The most connections at a time, as configured."""
        return self.config.max_connections

    def listening(self) -> AbstractAsyncContextManager[carriers.Listener[carriers.Incoming]]:
        """Listen at the carrier of the URL."""
        return self.listens()

    def url_of(self, carrier_url: str) -> str:
        """Turn the carrier's URL, with the real port, into the protocol's."""
        return url_of("aqueduct", carrier_url)

    def make(self, accepted: carriers.Incoming) -> ServerConnection:
        """Make the connection of an accepted carrier."""
        return ServerConnection(
            partial(accepting, accepted),
            self.config,
            self.item_type,
            handler=self.handler,
            listener=self,
            client=False,
            expose=self.expose,
            home=self.system,
        )


class Listener(ListenerHandle[ListenerActor]):
    """The listener that `serve` returns: its URL, and the connected clients.

    Closing it closes the entrypoints at once, and the connections when open channels have ended or after `AqueductConfig.drain_timeout` seconds.
    """

    @property
    def peers(self) -> list[Peer[Any]]:
        """The connected clients."""
        return [Peer(connection) for connection in self._actor.connections]
