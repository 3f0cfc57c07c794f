"""The server's side: a listener, its connections, and the authentication of clients."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, TypeAlias

import trio

from levada.actors.listening import Acceptor, ListenerHandle
from levada.actors.multiplexed import accepting
from levada.actors.stream_carriers import url_of
from levada.framework import Reason, Ref
from levada.framework.errors import ActorStopped, ConfigurationError, LevadaError
from levada.transports import carriers
from levada.transports.maop import AttemptLimiter, AuthenticationReceived, ErrorCode
from levada.transports.maop import Disapproved as DisapprovedEvent

from .authenticator import DECIDE, Authenticator
from .connection import MaopDriver
from .identities import Authentication, Denied, Identity, Share
from .metrics import Metrics
from .peer import Peer
from .shared import Shared

__all__ = ["Authenticate", "Listener", "ListenerActor", "ServerConnection", "check_authenticate"]

logger = logging.getLogger("levada.actors.maop")

Authenticate: TypeAlias = Callable[[Authentication], Awaitable[Identity | Denied]] | Ref[Any] | Mapping[bytes, Identity]
"""Decides on a client: an async function; the ref of an actor that answers an `Authentication`; or a mapping from valid ``Bearer`` tokens
to identities."""

ListenerContext = Callable[[], AbstractAsyncContextManager[Any]]
"""Listens at a carrier until the context is left."""


def check_authenticate(authenticate: Authenticate) -> None:
    """Raise `ConfigurationError` for a value that is none of the three kinds and so cannot admit any client."""
    if not (
        isinstance(authenticate, Ref | Mapping) or inspect.iscoroutinefunction(authenticate) or callable(authenticate)
    ):
        raise ConfigurationError(f"authenticate is an async function, a Ref or a dict of tokens, not {authenticate!r}")


class ServerConnection(MaopDriver):
    """A connection that a client opened."""

    listener: ListenerActor

    is_client: ClassVar[bool] = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._authenticator: Ref[Any] | None = None
        self._share: Share | None = None

    async def begin(self, carrier: carriers.Connection) -> None:
        """Tell the core that the handshake is complete."""
        self.feed(self.core.handshake_completed(now=trio.current_time()))

    def _on_authentication(self, event: AuthenticationReceived) -> None:
        assert self.info is not None
        question = Authentication(event.auth_type, event.token, event.pairs, event.version, event.vendor, self.info)
        try:
            self._authenticator = self.spawn(lambda: Authenticator(self, question), name="authenticator")
        except ActorStopped:  # the connection ends in a moment
            return
        self._authenticator.tell(DECIDE)

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        super()._on_disapproved(event)
        if self._authenticator is not None:
            self._authenticator.kill()  # it has run out of time

    events: ClassVar = {
        **MaopDriver.events,
        AuthenticationReceived: _on_authentication,
        DisapprovedEvent: _on_disapproved,
    }

    def decided(self, answer: Identity | Denied) -> None:
        """Admit the client or turn it away, unless it is too late for that."""
        if self.end is not None or self.disapproval is not None:
            return
        core, now = self.core, trio.current_time()
        if isinstance(answer, Denied):
            self.feed(core.disapprove_client(answer.code, answer.reason, answer.retry_after, now=now))
            return
        registry = self.shared.registry
        share = self._share = registry.enter(answer.tenant or answer.identifier or "", answer, core)
        self.who = answer
        self.streams.limit(share.rate)
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
        """Stop, and leave the client's share."""
        await super().stopping(reason)
        if self._share is not None:
            self._share.leave(self.core)


class ListenerActor(Acceptor[ServerConnection]):
    """Accepts carriers and makes a connection of each, which adds itself when its client is admitted."""

    shared: Shared
    listens: ListenerContext
    decides: Authenticate

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.refused_attempts = 0
        """Connections that were refused unread."""
        rate = self.shared.config.max_attempts
        self._attempts = None if rate is None else AttemptLimiter(rate)

    @property
    def max_connections(self) -> int:
        """The most connections at a time, as configured."""
        return self.shared.config.max_connections

    def started(self) -> None:
        """Log the settings, spawn the limiter, and listen. Source: MA-131b."""
        logger.info("%s serves %s", self.ref.path, self.shared.config)
        self.spawn(lambda: self.shared.limiter, name="limiter")
        super().started()

    def listening(self) -> AbstractAsyncContextManager[carriers.Listener[carriers.Incoming]]:
        """Listen at the carrier."""
        return self.listens()

    def url_of(self, carrier_url: str) -> str:
        """Turn the carrier's URL, with the real port, into the protocol's."""
        return url_of("maop", carrier_url)

    async def accept(self, listener: carriers.Listener[Any]) -> carriers.Incoming:
        """Accept the next client; refuse addresses that try too often. Source: MA-128."""
        while True:
            incoming: carriers.Incoming = await listener.accept()
            host = incoming.peer.rpartition(":")[0]
            # Peers in this process and at a Unix socket have no network address.
            if self._attempts is None or not host or self.url.startswith("maop+memory:"):
                return incoming
            if self._attempts.allow(host, trio.current_time()):
                return incoming
            self.refused_attempts += 1
            incoming.refuse("its address has tried too often (max_attempts)")

    def make(self, accepted: carriers.Incoming) -> ServerConnection:
        """Make the connection of an accepted carrier."""
        return ServerConnection(partial(accepting, accepted), self.shared, self)


class Listener(ListenerHandle[ListenerActor]):
    """The handle that `serve` yields: its address and its connected clients."""

    @property
    def peers(self) -> list[Peer]:
        """The admitted clients; operations may be sent to each."""
        return [connection.peer for connection in self._actor.connections]

    @property
    def metrics(self) -> Metrics:
        """The metrics of all connections."""
        return self._actor.shared.metrics

    def approval_indexes(self) -> dict[str, float]:
        """Return approvals as a fraction of all decisions, by tenant or identifier: a low value may mean abuse. Source: MA-134."""
        return self._actor.shared.registry.approval_indexes()
