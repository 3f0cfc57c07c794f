"""The server's side: a listener, its connections, and the authentication of clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar

import attrs
import trio

from levada.actors.authentication import Refused
from levada.actors.listening import Accepted, Acceptor, ListenerHandle
from levada.actors.multiplexed import accepting
from levada.actors.stream_carriers import url_of
from levada.framework import Identity, Reason, Sample
from levada.framework.errors import LevadaError
from levada.transports import carriers
from levada.transports.maop import AttemptLimiter, AuthenticationReceived, ErrorCode
from levada.transports.maop import Disapproved as DisapprovedEvent

from .connection import MaopDriver, SharedState
from .metrics import Metrics
from .peer import Peer
from .shares import TenantShare

__all__ = ["Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.maop")

ListenerContext = Callable[[], AbstractAsyncContextManager[Any]]
"""Listens at a carrier until the context is left."""


class ServerConnection(MaopDriver):
    """A connection that a client opened."""

    listener: ListenerActor

    is_client: ClassVar[bool] = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._share: TenantShare | None = None

    async def begin(self, carrier: carriers.Connection) -> None:
        """Tell the core that the handshake is complete."""
        self.feed(self.core.handshake_completed(now=trio.current_time()))

    def _on_authentication(self, event: AuthenticationReceived) -> None:
        headers = {name: value.encode() for name, value in event.pairs.items()}
        self.authenticate(
            attrs.evolve(self.credentials, scheme=event.auth_type, token=event.token, headers=headers, setup=event)
        )

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        super()._on_disapproved(event)
        # Not recorded yet if the core has run out of time. Source: MA-20.
        self.record_refusal(Refused(event.reason, code=event.code))
        self.cancel_authentication()

    events: ClassVar = {
        **MaopDriver.events,
        AuthenticationReceived: _on_authentication,
        DisapprovedEvent: _on_disapproved,
    }

    def admitted(self, identity: Identity | None) -> None:
        """Approve the client. Source: MA-22, MA-118."""
        assert identity is not None, "a listener of MAOP has a hook"
        core, now = self.core, trio.current_time()
        share = self._share = self.shared.registry.enter(identity, core)
        self.records.who = self.who
        self.rate = share.rate
        try:
            events = core.approve_client(
                identity.name, identity=identity.tenant, roles=identity.roles, quota=share.quota, now=now
            )
        except LevadaError as error:
            logger.error("%s: authenticate returned an identity that cannot be used: %s", self.ref.path, error)
            events = core.disapprove_client(ErrorCode.UNAUTHORIZED, "The server could not name this client.", now=now)
        self.feed(events)

    def refused(self, refusal: Refused) -> None:
        """Disapprove the client. Source: MA-21 to MA-24."""
        code = refusal.code if refusal.code is not None and refusal.code < 1 << 16 else ErrorCode.UNAUTHORIZED
        self.feed(self.core.disapprove_client(code, refusal.reason, refusal.retry_after, now=trio.current_time()))

    async def stopping(self, reason: Reason) -> None:
        """Stop, and leave the client's share."""
        await super().stopping(reason)
        if self._share is not None:
            self._share.leave(self.core)


class ListenerActor(Acceptor[ServerConnection]):
    """Accepts carriers and makes a connection from each; the connection adds itself when its client is admitted."""

    shared: SharedState
    listens: ListenerContext

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

    @property
    def turned_away(self) -> int:
        """Also clients that tried too often."""
        return super().turned_away + self.refused_attempts

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of its connections, by the protocol's names."""
        return (*super().metrics(), *self.shared.metrics.samples(trio.current_time()))

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

    async def accept(self, listener: carriers.Listener[Any]) -> Accepted:
        """Accept the next client; refuse addresses that try too often. Source: MA-128."""
        while True:
            incoming: Accepted = await listener.accept()
            if not isinstance(incoming, carriers.Incoming):
                return incoming  # a stream alone, which the connection refuses
            host = incoming.peer.rpartition(":")[0]
            # Peers in this process and at a Unix socket have no network address.
            if self._attempts is None or not host or self.url.startswith("maop+memory:"):
                return incoming
            if self._attempts.allow(host, trio.current_time()):
                return incoming
            self.refused_attempts += 1
            incoming.refuse("its address has tried too often (max_attempts)")

    def make(self, accepted: Accepted) -> ServerConnection:
        """Make the connection of an accepted carrier."""
        return ServerConnection(partial(accepting, accepted), self.shared, self)


class Listener(ListenerHandle[ListenerActor]):
    """The handle that `serve` yields: its address and its connected clients."""

    @property
    def peers(self) -> list[Peer]:
        """The admitted clients; operations may be sent to each."""
        return [connection.handle for connection in self._actor.connections]

    @property
    def metrics(self) -> Metrics:
        """The metrics of all connections."""
        return self._actor.shared.metrics

    def approval_indexes(self) -> dict[str, float]:
        """Return approvals as a fraction of all decisions, by tenant or identifier: a low value may mean abuse. Source: MA-134."""
        return self._actor.shared.registry.approval_indexes()
