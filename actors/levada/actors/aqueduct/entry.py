"""`connect` and `serve`, the entry points for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar, overload

import attrs

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import running
from levada.actors.multiplexed import Opens
from levada.framework import ActorSystem, Phase
from levada.framework.errors import ConfigurationError

from .config import AUTHORIZATION, PeerConfig, dial_carrier, listen_carrier
from .connection import AqueductDriver
from .name_lookup import Expose, check_expose
from .peer import Peer
from .raw import RawMessage
from .server import Handler, Listener, ListenerActor, ListenerContext, check_handler

__all__ = ["connect", "connect_over", "serve", "serve_over"]

T = TypeVar("T")


@overload
def connect(
    system: ActorSystem,
    url: str,
    message_type: type[T],
    *,
    token: bytes | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Peer[T]]: ...
@overload
def connect(
    system: ActorSystem,
    url: str,
    message_type: Any,
    *,
    token: bytes | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Peer[Any]]: ...
def connect(
    system: ActorSystem,
    url: str,
    message_type: Any,
    *,
    token: bytes | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AbstractAsyncContextManager[Peer[Any]]:
    """Connect to a server; entering the block means that the server has admitted this client (with `PeerConfig.early`, it does not wait).

    Leaving the block finishes the entrypoint, lets open channels end for `AqueductConfig.drain_timeout` seconds, then closes; after an exception
    or a cancellation it closes at once. Within an actor: ``await self.enter(connect(self.system, …))``.

    Args:
        system: an actor system that has been entered.
        url: ``aqueduct://host:port``, over QUIC; or with a carrier, as in ``aqueduct+tls://host:port``: see
            `levada.actors.stream_carriers`.
        message_type: type of the messages that the server's handler takes: a message class, a union of them (then type checkers take every message:
            annotate ``Peer[A | B]``, or an entry ``Sender[A | B]``), or ``object`` for all.
        token: shows who this client is, to a server with an ``authenticate`` hook. It travels in the header ``authorization``, as a bearer
            token; over a carrier that is not encrypted, anyone on the path can read it.
        expose: names in ``system.registry`` that the server may `Peer.lookup`, or a predicate on names; by default none.
        config: see `PeerConfig`.

    Yields:
        The peer to send to.

    Raises:
        ConnectionLost: the server does not answer, is not the expected one, or does not speak this protocol; or it refuses this client, with
            its text and code (`CloseCode.REFUSED`, if its hook gave no other).
        ConfigurationError: the URL or the settings cannot work, or an extra is not installed.
        TypeError: the token is not bytes.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    if token is not None:
        if not isinstance(token, bytes):
            raise TypeError(f"the token is {type(token).__name__}, wanted bytes: encode it")
        settings = attrs.evolve(settings, headers=((AUTHORIZATION, b"Bearer " + token), *settings.headers))
    return connect_over(system, partial(dial_carrier, url, settings), message_type, expose=expose, config=settings)


@asynccontextmanager
async def connect_over(
    system: ActorSystem,
    opens: Opens,
    message_type: type[T],
    *,
    expose: Expose = (),
    config: PeerConfig | None = None,
) -> AsyncIterator[Peer[T]]:
    """Connect as `connect` does, over a carrier that the program makes. Other arguments, result and errors are as for `connect`.

    Args:
        opens: connects, such as ``partial(dial, url, settings)`` with a carrier's ``dial``; called once. Leaving its context closes it.
        config: as for `connect`; its ``carrier`` is not used.
    """
    check_expose(expose)
    if expose and message_type is RawMessage:
        raise ConfigurationError("a connection of RawMessage has no names to look up")
    item_type = Any if message_type is object else message_type
    driver = AqueductDriver(opens, config or PeerConfig(), item_type, client=True, expose=expose, home=system)
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
    """Serve clients; entering the block means bound and listening, and `Listener.url` holds the real port.

    Leaving the block accepts no more clients, closes the entrypoints, lets open channels end for `AqueductConfig.drain_timeout` seconds, then
    closes; after an exception or a cancellation it closes at once.

    Args:
        system: an actor system that has been entered.
        url: as for `connect`; port 0 takes a free one.
        handler: gets the messages of the entrypoints, see `Handler`. If an async function raises, the exception is logged and the
            handles in its message are cancelled or closed, so the client notices. An actor that ends closes the entrypoint.
        message_type: type of the messages that clients may send: a message class or a union of them. `Any` accepts every message class
            that this program has imported.
        authenticate: decides on clients: an async function of `Credentials`, the ref of an actor that answers them, or an `Authentication`
            with limits. Until the decision nothing of a client is decoded or handled. None: every client comes in, and has no identity.
        expose: names in ``system.registry`` that clients may `Peer.lookup`, or a predicate on names, which may call `current_peer` to learn who
            looks up; by default none.
        config: see `PeerConfig`; over QUIC its ``carrier`` needs a certificate.
        trust_traces: whether a traced system continues the traces of clients, see ``docs/how-to/trace.md``. None: only of clients with an
            identity.

    Yields:
        The listener.

    Raises:
        ConfigurationError: the URL, the handler or the settings cannot work, the address is taken, a certificate cannot be read, or an extra
            is not installed.

    Source: AQ-14, AQ-15, AQ-18.
    """
    settings = config or PeerConfig()
    listening = partial(listen_carrier, url, settings)
    return serve_over(
        system,
        listening,
        handler,
        message_type,
        authenticate=authenticate,
        expose=expose,
        config=settings,
        trust_traces=trust_traces,
    )


@asynccontextmanager
async def serve_over(
    system: ActorSystem,
    listening: ListenerContext,
    handler: Handler,
    message_type: Any,
    *,
    authenticate: Authenticate | Authentication | None = None,
    expose: Expose = (),
    config: PeerConfig | None = None,
    trust_traces: bool | None = None,
    closes: Phase = "accept",
) -> AsyncIterator[Listener]:
    """Serve as `serve` does, over a listener that the program makes. Other arguments, result and errors are as for `serve`.

    Args:
        listening: listens, such as ``partial(listen, url, settings)`` with a carrier's ``listen``; called once. Leaving its context stops it.
        config: as for `serve`; its ``carrier`` is not used.
        closes: the phase of the system's end in which the listener closes.
    """
    check_handler(handler)
    check_expose(expose)
    item_type = Any if message_type is object else message_type
    listener = ListenerActor(
        config or PeerConfig(),
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
