"""`connect` and `serve`: what programs begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from levada.actors.listening import running
from levada.actors.multiplexed import Opens
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

from .config import PeerConfig, dial_carrier, listen_carrier
from .connection import Connection
from .lookup import Expose, check_expose
from .peer import Peer
from .raw import RawMessage
from .server import Handler, Listener, ListenerActor, ListenerContext, check_handler

__all__ = ["connect", "connect_over", "serve", "serve_over"]

T = TypeVar("T")


def connect(
    system: ActorSystem, url: str, message_type: type[T], *, expose: Expose = (), config: PeerConfig | None = None
) -> AbstractAsyncContextManager[Peer[T]]:
    """Connect to a server; entering the block means that it has greeted (with `PeerConfig.early`: that it was called).

    Leaving it finishes the entrypoint, lets open channels end for `AqueductConfig.drain` seconds, then closes; after an exception or a
    cancellation it closes at once. Within an actor: ``await self.enter(connect(self.system, …))``.

    Args:
        system: has been entered.
        url: ``aqueduct://host:port``, over QUIC, or ``aqueduct+memory://name``.
        message_type: of the messages that the server's handler takes: a message class, a union of them (then the variable wants an
            annotation), or ``object`` for all.
        expose: names in ``system.registry`` that the server may `Peer.lookup`, or a function that says so of a name; by default none.
        config: see `PeerConfig`.

    Yields:
        The peer to send to.

    Raises:
        ConnectionLost: nobody answers there, or not whom it should be, or not in this protocol.
        ConfigurationError: a URL or settings that cannot work, or an extra that is not installed.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    return connect_over(system, partial(dial_carrier, url, settings), message_type, settings, expose)


@asynccontextmanager
async def connect_over(
    system: ActorSystem, opens: Opens, message_type: type[T], config: PeerConfig, expose: Expose = ()
) -> AsyncIterator[Peer[T]]:
    """Connect as `connect` does, over a carrier that the program makes.

    Args:
        system: has been entered.
        opens: connects, such as ``partial(dial, url, settings)`` of a carrier's own; called once. Leaving its context closes.
        message_type: as for `connect`.
        config: as for `connect`; its ``carrier`` is not used.
        expose: as for `connect`.

    Yields:
        The peer, as `connect` does; errors as there.
    """
    check_expose(expose)
    if expose and message_type is RawMessage:
        raise ConfigurationError("a connection of RawMessage has no names to look up")
    item_type = Any if message_type is object else message_type
    async with running(system, Connection(opens, config, item_type, client=True, expose=expose)) as connection:
        yield Peer(connection)


def serve(
    system: ActorSystem,
    url: str,
    handler: Handler,
    *,
    message_type: Any = Any,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Listener]:
    """Serve clients; entering the block means bound and listening, `Listener.url` holds the real port.

    Leaving it accepts nobody any more, closes the entrypoints, lets open channels end for `AqueductConfig.drain` seconds, then closes;
    after an exception or a cancellation it closes at once.

    Args:
        system: has been entered.
        url: as for `connect`; port 0 takes a free one.
        handler: gets the messages of the entrypoints, see `Handler`. An async function that raises is logged, and the handles in its
            message are given up, so that the client sees it; an actor that ends closes the entrypoint.
        message_type: of the messages; `Any` admits every message class that this program has.
        expose: names in ``system.registry`` that clients may `Peer.lookup`, or a function that says so of a name; by default none.
        config: see `PeerConfig`; over QUIC its ``carrier`` needs a certificate.

    Yields:
        The listener.

    Raises:
        ConfigurationError: a URL, a handler or settings that cannot work, or an extra that is not installed.
        OSError: the address cannot be had, or a file cannot be read.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    return serve_over(system, partial(listen_carrier, url, settings), handler, message_type, settings, expose)


@asynccontextmanager
async def serve_over(
    system: ActorSystem,
    listening: ListenerContext,
    handler: Handler,
    message_type: Any,
    config: PeerConfig,
    expose: Expose = (),
) -> AsyncIterator[Listener]:
    """Serve as `serve` does, over a listener that the program makes.

    Args:
        system: has been entered.
        listening: listens, such as ``partial(listen, url, settings)`` of a carrier's own; called once. Leaving its context stops that.
        handler: as for `serve`.
        message_type: as for `serve`.
        config: as for `serve`; its ``carrier`` is not used.
        expose: as for `serve`.

    Yields:
        The listener, as `serve` does; errors as there.
    """
    check_handler(handler)
    check_expose(expose)
    async with running(system, ListenerActor(config, listening, message_type, handler, expose)) as actor:
        yield Listener(actor)
