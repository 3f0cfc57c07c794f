"""`connect` and `serve`, where programs begin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import attrs

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import running
from levada.actors.multiplexed import Opens
from levada.framework import ActorSystem, Phase
from levada.framework.errors import ConfigurationError

from .config import AUTHORIZATION, PeerConfig, dial_carrier, listen_carrier
from .connection import AqueductDriver
from .lookup import Expose, check_expose
from .peer import Peer
from .raw import RawMessage
from .server import Handler, Listener, ListenerActor, ListenerContext, check_handler

__all__ = ["connect", "connect_over", "serve", "serve_over"]

T = TypeVar("T")


def connect(
    system: ActorSystem,
    url: str,
    message_type: type[T],
    *,
    token: bytes | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Peer[T]]:
    """Connect to a server; the block begins when the server has greeted (with `PeerConfig.early`: at once).

    Leaving the block finishes the entrypoint, lets open channels end for `AqueductConfig.drain` seconds, then closes; after an exception
    or a cancellation it closes at once. Within an actor: ``await self.enter(connect(self.system, …))``.

    Args:
        system: has been entered.
        url: ``aqueduct://host:port``, over QUIC; or with a carrier, as in ``aqueduct+tls://host:port``: see
            `levada.actors.stream_carriers`.
        message_type: type of the messages that the server's handler takes: a message class, a union of them (then the variable needs
            an annotation), or ``object`` for all.
        token: shows who this client is, to a server with an ``authenticate`` hook. It travels in the header ``authorization``, as a bearer
            token; over a carrier that is not encrypted, anyone on the path can read it.
        expose: names in ``system.registry`` that the server may `Peer.lookup`, or a predicate on names; by default none.
        config: settings of this side.

    Yields:
        The peer to send to.

    Raises:
        ConnectionLost: the server does not answer, is not the expected one, or does not speak this protocol; or it refuses this client, with
            its text and code (`CloseCode.REFUSED`, if its hook gave no other).
        ConfigurationError: the URL or the settings cannot work, or an extra is not installed.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    if token is not None:
        settings = attrs.evolve(settings, headers=((AUTHORIZATION, b"Bearer " + token), *settings.headers))
    return connect_over(system, partial(dial_carrier, url, settings), message_type, settings, expose)


@asynccontextmanager
async def connect_over(
    system: ActorSystem, opens: Opens, message_type: type[T], config: PeerConfig, expose: Expose = ()
) -> AsyncIterator[Peer[T]]:
    """Connect like `connect`, over a carrier that the program makes.

    Args:
        system: has been entered.
        opens: connects, such as ``partial(dial, url, settings)`` of a carrier's own; called once. Leaving its context closes.
        message_type: as for `connect`.
        config: as for `connect`; its ``carrier`` is not used.
        expose: as for `connect`.

    Yields:
        The peer. Errors are those `connect` raises.
    """
    check_expose(expose)
    if expose and message_type is RawMessage:
        raise ConfigurationError("a connection of RawMessage has no names to look up")
    item_type = Any if message_type is object else message_type
    driver = AqueductDriver(opens, config, item_type, client=True, expose=expose, tracing=system.tracing)
    async with running(system, driver) as connection:
        yield Peer(connection)


def serve(
    system: ActorSystem,
    url: str,
    handler: Handler,
    message_type: Any,
    *,
    authenticate: Authenticate | Authentication | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
    trust_traces: bool | None = None,
) -> AbstractAsyncContextManager[Listener]:
    """Serve clients; the block begins when the server listens, and `Listener.url` holds the real port.

    Leaving the block accepts no more clients, closes the entrypoints, lets open channels end for `AqueductConfig.drain` seconds, then
    closes; after an exception or a cancellation it closes at once.

    Args:
        system: has been entered.
        url: as for `connect`; port 0 takes a free one.
        handler: gets the messages of the entrypoints, see `Handler`. If an async function raises, the exception is logged and the
            handles in its message are cancelled or closed, so the client notices. An actor that ends closes the entrypoint.
        message_type: type of the messages that clients may send: a message class or a union of them. `Any` accepts every message class
            that this program has imported.
        authenticate: decides on clients: an async function of `Credentials`, the ref of an actor that answers them, or an `Authentication`
            with limits. Until the decision nothing of a client is decoded or handled. None: every client comes in, and has no identity.
        expose: names in ``system.registry`` that clients may `Peer.lookup`, or a predicate on names, which may call `current_peer` to learn who
            looks up; by default none.
        config: settings of this side; over QUIC its ``carrier`` needs a certificate.
        trust_traces: whether a traced system goes on with the traces of clients, see ``docs/how-to/trace.md``. None: if they have an
            identity.

    Yields:
        The listener.

    Raises:
        ConfigurationError: the URL, the handler or the settings cannot work, or an extra is not installed.
        OSError: the address is not available, or a file cannot be read.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    listening = partial(listen_carrier, url, settings)
    return serve_over(
        system, listening, handler, message_type, settings, expose, authenticate, trust_traces=trust_traces
    )


@asynccontextmanager
async def serve_over(
    system: ActorSystem,
    listening: ListenerContext,
    handler: Handler,
    message_type: Any,
    config: PeerConfig,
    expose: Expose = (),
    authenticate: Authenticate | Authentication | None = None,
    closes: Phase = "accept",
    trust_traces: bool | None = None,
) -> AsyncIterator[Listener]:
    """Serve like `serve`, over a listener that the program makes.

    Args:
        system: has been entered.
        listening: listens, such as ``partial(listen, url, settings)`` of a carrier's own; called once. Leaving its context stops that.
        handler: as for `serve`.
        message_type: as for `serve`.
        config: as for `serve`; its ``carrier`` is not used.
        expose: as for `serve`.
        authenticate: as for `serve`.
        closes: phase of the system's end in which the listener closes.
        trust_traces: as for `serve`.

    Yields:
        The listener. Errors are those `serve` raises.
    """
    check_handler(handler)
    check_expose(expose)
    item_type = Any if message_type is object else message_type
    listener = ListenerActor(
        config,
        listening,
        item_type,
        handler,
        expose,
        authenticate=authenticate,
        closes=closes,
        trust_traces=trust_traces,
    )
    async with running(system, listener) as actor:
        yield Listener(actor)
