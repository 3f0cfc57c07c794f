"""The server's side: a listener, its connections, and who is let in."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, TypeAlias

import trio

from levada.framework import Actor, Reason, Ref
from levada.framework.errors import ActorStopped, CarrierError, ConfigurationError, LevadaError
from levada.transports import carriers
from levada.transports.maop import AttemptLimiter, AuthenticationReceived, ErrorCode
from levada.transports.maop import Disapproved as DisapprovedEvent

from .connection import Connection
from .metrics import Metrics
from .peer import Peer
from .registry import Authentication, Denied, Identity, Share
from .shared import Shared

__all__ = ["Authenticate", "Listener", "ListenerActor", "ServerConnection", "check_authenticate"]

logger = logging.getLogger("levada.actors.maop")

Authenticate: TypeAlias = Callable[[Authentication], Awaitable[Identity | Denied]] | Ref[Any] | Mapping[bytes, Identity]
"""Who decides on a client: an async function; the ref of an actor that answers an `Authentication`; or the tokens that are valid, as they
are, for the type ``Bearer``."""

ListenerContext = Callable[[], AbstractAsyncContextManager[Any]]
"""Listens at a carrier; leaving the context stops that."""


def check_authenticate(authenticate: Authenticate) -> None:
    """Refuse what can let nobody in.

    Raises:
        ConfigurationError: it is none of the three.
    """
    if not (
        isinstance(authenticate, Ref | Mapping) or inspect.iscoroutinefunction(authenticate) or callable(authenticate)
    ):
        raise ConfigurationError(f"authenticate is an async function, a Ref or a dict of tokens, not {authenticate!r}")


class ServerConnection(Connection):
    """A connection that a client opened."""

    listener: ListenerActor

    is_client: ClassVar[bool] = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._deciding = trio.CancelScope()
        self._share: Share | None = None

    def begin(self) -> None:
        """See `Connection.begin`."""
        self.feed(self.core.handshake_completed(now=trio.current_time()))

    def _on_authentication(self, event: AuthenticationReceived) -> None:
        self.handlers.start_soon(self._authenticate, event)

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        super()._on_disapproved(event)
        self._deciding.cancel()  # the time for it is over

    _events: ClassVar = {
        **Connection._events,
        AuthenticationReceived: _on_authentication,
        DisapprovedEvent: _on_disapproved,
    }

    async def _authenticate(self, event: AuthenticationReceived) -> None:
        assert self.info is not None
        question = Authentication(event.auth_type, event.token, event.pairs, event.version, event.vendor, self.info)
        answer: Identity | Denied = Denied("Authentication did not come to an end.")
        with self._deciding:
            try:
                answer = await self._ask(question)
                if not isinstance(answer, Identity | Denied):
                    raise TypeError(f"authenticate returns an Identity or a Denied, not {type(answer).__name__}")
            except Exception:
                logger.exception("%s: authenticate failed", self.ref.path)
                answer = Denied("The server could not check these credentials.", retry_after=1.0)
        if self.end is not None or self.disapproval is not None:
            return
        self._decide(answer)

    async def _ask(self, question: Authentication) -> Any:
        authenticate = self.listener.authenticate
        if isinstance(authenticate, Ref):
            return await authenticate.ask(question, timeout=self.config.core.auth_timeout)
        if isinstance(authenticate, Mapping):
            known = authenticate.get(question.token) if question.auth_type == "bearer" else None
            return known or Denied()
        return await authenticate(question)

    def _decide(self, answer: Identity | Denied) -> None:
        core, now = self.core, trio.current_time()
        if isinstance(answer, Denied):
            self.feed(core.disapprove_client(answer.code, answer.reason, answer.retry_after, now=now))
            return
        registry = self.shared.registry
        share = self._share = registry.enter(answer.tenant or answer.identifier or "", answer, core)
        self.peer.identity = answer
        assert self.streams is not None
        self.streams.rate = share.rate
        self.listener.connections[self] = None
        try:
            events = core.approve_client(
                answer.identifier,
                identity=answer.tenant or answer.identifier or "",
                roles=answer.roles,
                quota=share.quota,
                now=now,
            )
        except LevadaError as error:
            logger.error("%s: authenticate gave an identity that cannot be: %s", self.ref.path, error)
            events = core.disapprove_client(ErrorCode.UNAUTHORIZED, "The server could not name this client.", now=now)
        self.feed(events)

    async def stopping(self, reason: Reason) -> None:
        """See `Connection.stopping`."""
        self.listener.connections.pop(self, None)
        await super().stopping(reason)
        if self._share is not None:
            self._share.leave(self.core)


class ListenerActor(Actor[Any]):
    """Accepts carriers and makes a connection of each."""

    shared: Shared
    listening: ListenerContext
    authenticate: Authenticate

    def __attrs_post_init__(self) -> None:
        config = self.shared.config
        self.url = ""
        self.connections: dict[ServerConnection, None] = {}
        """Those whose client was let in."""
        self.refused_attempts = 0
        """Connections that were refused unread."""
        self._attempts = None if config.max_attempts is None else AttemptLimiter(config.max_attempts)
        self._places = trio.CapacityLimiter(config.max_connections)
        self._accepting = trio.CancelScope()
        self._opened = trio.Event()
        self._refusal: LevadaError | OSError | None = None

    def started(self) -> None:
        """See `Actor.started`."""
        self.spawn(lambda: self.shared.scheduler, name="scheduler")
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
                    self.url = f"maop+{listener.url}".replace("maop+quic:", "maop:")
                    logger.info("%s listens at %s: %s", self.ref.path, self.url, self.shared.config)
                    self._opened.set()
                    while True:
                        place = object()
                        await self._places.acquire_on_behalf_of(place)
                        self._connect(await self._allowed(listener), place)
        except (ConfigurationError, OSError, CarrierError) as error:
            if self._opened.is_set():
                raise
            self._refusal = error
        finally:
            self._opened.set()

    async def _allowed(self, listener: Any) -> carriers.Incoming:
        """Wait for a client whose address has not tried too often. Source: MA-128."""
        while True:
            incoming: carriers.Incoming = await listener.accept()
            if self._attempts is None or self.url.startswith("maop+memory:"):
                return incoming
            host = incoming.peer.rpartition(":")[0]
            if self._attempts.allow(host, trio.current_time()):
                return incoming
            self.refused_attempts += 1
            incoming.refuse()

    def _connect(self, incoming: carriers.Incoming, place: object) -> None:
        def carrier() -> AbstractAsyncContextManager[carriers.Connection]:
            return _accepted(incoming)

        connection = ServerConnection(self.shared, carrier, self)
        try:
            ref = self.spawn(lambda: connection)
        except ActorStopped:  # the listener is ending
            incoming.refuse()
            return
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
    def peers(self) -> list[Peer]:
        """The clients that were let in; operations may be sent to each."""
        return [connection.peer for connection in self._actor.connections]

    @property
    def metrics(self) -> Metrics:
        """What all connections have counted."""
        return self._actor.shared.metrics

    def approval_indexes(self) -> dict[str, float]:
        """Return, by tenant or identifier, the share of approvals among all decisions: a low one may be abuse. Source: MA-134."""
        return self._actor.shared.registry.approval_indexes()

    async def aclose(self) -> None:
        """Accept nobody any more and close all connections as `Peer.aclose` does, at the same time. Twice is harmless.

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
