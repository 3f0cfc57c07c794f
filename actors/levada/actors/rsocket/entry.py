"""`connect`, `serve` and `balanced`, the entry points for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import overload

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import closing, running
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

from .client import make_client
from .config import ClientConfig, Reconnect, ServerConfig
from .dialects import carrier_url, core_of
from .peers import ConnectedPeer
from .reconnecting import Link, Policy, ReconnectingPeer
from .routing import Handler
from .server import Listener, ListenerActor

__all__ = ["balanced", "connect", "serve"]


@overload
def connect(
    system: ActorSystem,
    url: str,
    handler: Handler = None,
    *,
    config: ClientConfig | None = None,
    reconnect: None = None,
) -> AbstractAsyncContextManager[ConnectedPeer]: ...
@overload
def connect(
    system: ActorSystem, url: str, handler: Handler = None, *, config: ClientConfig | None = None, reconnect: Reconnect
) -> AbstractAsyncContextManager[ReconnectingPeer]: ...
def connect(
    system: ActorSystem,
    url: str,
    handler: Handler = None,
    *,
    config: ClientConfig | None = None,
    reconnect: Reconnect | None = None,
) -> AbstractAsyncContextManager[ConnectedPeer] | AbstractAsyncContextManager[ReconnectingPeer]:
    """Connect to a server; entering the block means that the carrier is connected and SETUP sent.

    Leaving it rejects new requests, lets open streams end for `CoreConfig.drain_timeout` seconds, then closes; after an exception or a
    cancellation it closes at once. Within an actor: ``await self.enter(connect(self.system, url))``.

    Args:
        system: an actor system that has been entered.
        url: ``rsocket+tcp://host:port``; instead of ``tcp`` also ``tls``, ``unix``, ``ws``, ``wss``, ``quic`` or ``memory``.
        handler: answers the server's requests; without one, they are rejected.
        config: see `ClientConfig`.
        reconnect: dial again whenever the connection is lost; entering then waits for the first connection as long as it takes.

    Yields:
        The peer to send requests to.

    Raises:
        ConnectionLost: no server answers at the URL, or its certificate is wrong.
        ConfigurationError: the URL, the handler or the settings cannot work, or an extra is not installed.
    """
    if reconnect is not None:
        return _keep_connected(system, (url,), handler, config, reconnect, "round_robin", first=True)
    return _connect(system, url, handler, config)


@asynccontextmanager
async def _connect(
    system: ActorSystem, url: str, handler: Handler, config: ClientConfig | None
) -> AsyncIterator[ConnectedPeer]:
    async with running(system, make_client(url, handler, config)()) as connection:
        yield connection.handle


def balanced(
    system: ActorSystem,
    urls: Sequence[str],
    handler: Handler = None,
    *,
    policy: Policy = "round_robin",
    config: ClientConfig | None = None,
    reconnect: Reconnect | None = None,
) -> AbstractAsyncContextManager[ReconnectingPeer]:
    """Connect to several servers and choose an available one for each request.

    A lost server is dialled again and rejoins. While none is up, requests fail at once with `NoEndpoint`, unless `Reconnect.wait` lets them
    wait. Entering the block waits until one is up, or the first attempt has failed for all.

    Args:
        system: an actor system that has been entered.
        urls: one or more, as for `connect`.
        handler: answers the servers' requests.
        policy: selects the server for the next request, see `Policy`.
        config: for all connections.
        reconnect: how to dial again; without it, the defaults of `Reconnect` apply, and requests do not wait.

    Yields:
        The peer to send requests to.

    Raises:
        ConfigurationError: as for `connect`, or no URL was given.
    """
    if not urls:
        raise ConfigurationError("balanced() needs one URL or more")
    return _keep_connected(system, tuple(urls), handler, config, reconnect or Reconnect(wait=0.0), policy, first=False)


@asynccontextmanager
async def _keep_connected(
    system: ActorSystem,
    urls: Sequence[str],
    handler: Handler,
    config: ClientConfig | None,
    reconnect: Reconnect,
    policy: Policy,
    *,
    first: bool,
) -> AsyncIterator[ReconnectingPeer]:
    peer = ReconnectingPeer(policy, reconnect)
    peer.links = [Link(make_client(url, handler, config), reconnect, peer.changed) for url in urls]
    roots = [system.spawn(lambda actor: actor, link) for link in peer.links]
    async with closing(roots, peer.shut, peer.aclose):
        try:
            await peer.tried(connected=first)
            yield peer
        finally:
            peer.give_up()


@asynccontextmanager
async def serve(
    system: ActorSystem,
    url: str,
    handler: Handler = None,
    *,
    authenticate: Authenticate | Authentication | None = None,
    config: ServerConfig | None = None,
    trust_traces: bool | None = None,
) -> AsyncIterator[Listener]:
    """Serve clients; entering the block means bound and listening, and `Listener.url` holds the real port.

    Leaving it accepts no more clients, rejects new requests, lets open streams end for `CoreConfig.drain_timeout` seconds, then closes;
    after an exception or a cancellation it closes at once. Within an actor: ``await self.enter(serve(self.system, …))``.

    Args:
        system: an actor system that has been entered.
        url: as for `connect`; port 0 takes a free one.
        handler: answers the clients' requests: see `Handler`. An actor class is made once for each connection.
        authenticate: decides on each client by its SETUP and its carrier, and on each request that brings credentials of its own: see
            `levada.actors.authentication`. A refusal is REJECTED_SETUP, or REJECTED for a request. Without it, every client is admitted.
        config: see `ServerConfig`; ``carrier`` is required if the carrier needs a certificate.
        trust_traces: whether a traced system goes on with the traces of clients, see ``docs/how-to/trace.md``. None: if they have an
            identity.

    Yields:
        The listener.

    Raises:
        ConfigurationError: the URL, the handler or the settings cannot work, the address is taken, a certificate cannot be read, or an extra
            is not installed.
    """
    dialect, carrier = carrier_url(url)
    settings = config or ServerConfig()
    if not isinstance(settings, ServerConfig):
        raise ConfigurationError(f"the config of a server is a {type(settings).__name__}, wanted a ServerConfig")
    listener = ListenerActor(
        settings,
        handler,
        core_of(dialect),
        dialect,
        carrier,
        authenticate=authenticate,
        trust_traces=trust_traces,
    )
    async with running(system, listener) as actor:
        yield Listener(actor)
