"""`connect` and `serve`, the entry points for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import attrs

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import closing, running
from levada.actors.multiplexed import Opens
from levada.actors.stream_carriers import carrier_url
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.tracing import Tracing
from levada.transports.maop import Capability

from .client import ClientActor
from .config import MAX_TOKEN, PeerConfig, dial_carrier, fit_carrier, listen_carrier
from .connection import SharedState
from .executions import Limiter
from .handlers import Handlers, handler_table
from .peer import Peer
from .server import Listener, ListenerActor, ListenerContext
from .shares import TenantShares

__all__ = ["connect", "connect_over", "serve", "serve_over"]


def _share(handlers: Handlers | None, config: PeerConfig, tracing: Tracing | None) -> SharedState:
    if tracing is not None:
        core = attrs.evolve(config.core, capabilities=config.core.capabilities | Capability.TRACE)
        config = attrs.evolve(config, core=core)
    return SharedState(config, handler_table(handlers), Limiter(config.max_running), TenantShares(config), tracing)


def connect(
    system: ActorSystem,
    url: str,
    *,
    token: bytes = b"",
    auth_type: str = "Bearer",
    pairs: Mapping[str, str] | None = None,
    bind: bool = False,
    handlers: Handlers | None = None,
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Peer]:
    """Connect to a server; entering the block means that the server has admitted this client.

    Leaving it stops new operations, lets running ones of both sides end for `TimesConfig.drain_timeout` seconds, then disconnects; after an
    exception or a cancellation it closes at once. Within an actor: ``await self.enter(connect(self.system, …))``.

    Args:
        system: an actor system that has been entered.
        url: ``maop://host:port``, over QUIC; or with a carrier, as in ``maop+tls://host:port``: see `levada.actors.stream_carriers`.
        token: opaque bytes that identify this client.
        auth_type: scheme of the token, such as ``"Bearer"`` or ``"Basic"``.
        pairs: metadata of the session: region, role, tenant.
        bind: whether to name the connection itself in the pair ``channel-binding``, so that the server can detect a token that a third party
            passes on: see `Credentials.bound`. Over QUIC only. Source: MA-19.
        handlers: answer operations that the server starts.
        config: see `PeerConfig`.

    Yields:
        The peer to call.

    Raises:
        Disapproved: the server turned this client away.
        ConnectionLost: no server answers at the URL, its certificate is wrong, or it does not speak the protocol.
        ConfigurationError: the URL, the token or the settings cannot work, or an extra is not installed.
        TypeError: the token is not bytes.

    Source: MA-1, MA-15, MA-29.
    """
    settings = fit_carrier(url, config or PeerConfig())
    if bind and (settings.fallback is not None or not carrier_url("maop", url).startswith("quic:")):
        raise ConfigurationError(f"the URL is {url!r}, wanted maop:// without a fallback: bind=True needs QUIC")
    dialling = partial(dial_carrier, url, settings)
    return connect_over(
        system, dialling, token=token, auth_type=auth_type, pairs=pairs, bind=bind, handlers=handlers, config=settings
    )


@asynccontextmanager
async def connect_over(
    system: ActorSystem,
    opens: Opens,
    *,
    token: bytes = b"",
    auth_type: str = "Bearer",
    pairs: Mapping[str, str] | None = None,
    bind: bool = False,
    handlers: Handlers | None = None,
    config: PeerConfig | None = None,
) -> AsyncIterator[Peer]:
    """Connect as `connect` does, over a carrier that the program makes. Other arguments, result and errors are as for `connect`.

    Args:
        opens: connects, such as ``partial(dial, url, settings)`` with a carrier's ``dial``; called once. Leaving its context closes it.
        bind: as for `connect`; the carrier must provide `CarrierInfo.channel_binding`.
        config: as for `connect`; its ``carrier`` is not used.
    """
    if not isinstance(token, bytes | bytearray | memoryview):
        raise TypeError(f"the token is {type(token).__name__}, wanted bytes: encode it")
    if len(token) > MAX_TOKEN:
        raise ConfigurationError(f"the token has {len(token):,} bytes, wanted at most {MAX_TOKEN:,} [MA-18]")
    token = bytes(token)
    shared = _share(handlers, config or PeerConfig(), system.tracing)
    client = ClientActor(shared, opens, token, auth_type, dict(pairs or {}), bind)
    root = system.spawn(lambda: client)
    async with closing([root], lambda: client.connection.shut(), client.connection.aclose):
        await client.connection.opened()
        yield client.connection.handle


def serve(
    system: ActorSystem,
    url: str,
    handlers: Handlers,
    *,
    authenticate: Authenticate | Authentication,
    config: PeerConfig | None = None,
    trust_traces: bool = True,
) -> AbstractAsyncContextManager[Listener]:
    """Serve clients; entering the block means bound and listening, and `Listener.url` holds the real port.

    Leaving it accepts no more clients, asks all clients to end, lets running operations end for `TimesConfig.drain_timeout` seconds, then
    disconnects; after an exception or a cancellation it closes at once. Within an actor: ``await self.enter(serve(self.system, …))``.

    Args:
        system: an actor system that has been entered.
        url: as for `connect`; port 0 takes a free one.
        handlers: answer operations that clients start, by msg_id: see `Handler`.
        authenticate: decides which clients are admitted, see `levada.actors.authentication`; it also ends after
            `levada.transports.maop.AuthenticationConfig.auth_timeout` seconds.
        config: see `PeerConfig`; over QUIC its ``carrier`` needs a certificate.
        trust_traces: whether a traced system goes on with the traces of clients, see ``docs/how-to/trace.md``.

    Yields:
        The listener.

    Raises:
        ConfigurationError: the URL, a handler or the settings cannot work, the address is taken, a certificate cannot be read, or an extra is
            not installed.

    Source: MA-1, MA-20, MA-112.
    """
    settings = fit_carrier(url, config or PeerConfig())
    listening = partial(listen_carrier, url, settings)
    return serve_over(
        system, listening, handlers, authenticate=authenticate, config=settings, trust_traces=trust_traces
    )


@asynccontextmanager
async def serve_over(
    system: ActorSystem,
    listening: ListenerContext,
    handlers: Handlers,
    *,
    authenticate: Authenticate | Authentication,
    config: PeerConfig | None = None,
    trust_traces: bool = True,
) -> AsyncIterator[Listener]:
    """Serve as `serve` does, over a listener that the program makes. Other arguments, result and errors are as for `serve`.

    Args:
        listening: listens, such as ``partial(listen, url, settings)`` with a carrier's ``listen``; called once. Leaving its context stops it.
        config: as for `serve`; its ``carrier`` is not used.
    """
    if authenticate is None:
        raise ConfigurationError("MAOP authenticates every client: serve needs authenticate=")
    shared = _share(handlers, config or PeerConfig(), system.tracing)
    async with running(
        system, ListenerActor(shared, listening, authenticate=authenticate, trust_traces=trust_traces)
    ) as actor:
        yield Listener(actor)
