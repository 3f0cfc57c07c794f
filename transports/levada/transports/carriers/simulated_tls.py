"""TLS between processes of a simulated network: real handshakes, whose bytes do not travel.

The rules of this file:

* OpenSSL does both sides of each handshake, with the contexts of both processes, in memory, in the process that listens. So certificates, names,
  authorities, client certificates, ALPN and versions are checked as in reality, with the same errors. Certificates are read from the
  real disk, and their dates are compared with the real clock.
* The question and the answer travel over the wire, so that cuts and pauses hold a handshake up.
* Nothing is encrypted afterwards, so that a seed sends the same bytes in each run: keys are random.
* As with TLS 1.3, a server that refuses the client's certificate does so after the client's handshake: its stream is lost at once.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.framework.platform import Network, Wire
from levada.transports.carriers import simulated
from levada.transports.carriers.contracts import CarrierInfo
from levada.transports.carriers.tls import TlsConfig, asked_name, listening_context, make_context, with_agreed

__all__ = ["SimulatedTlsListener", "dial", "listen"]

_FLIGHTS: Final = 3
"""Turns of both sides until TLS 1.2 is through; TLS 1.3 needs two."""


@attrs.define(eq=False)
class _Hello:
    """What a client brings to a handshake, and how it has ended."""

    context: ssl.SSLContext
    server_name: str
    infos: tuple[CarrierInfo, CarrierInfo]
    """The facts of the client's and of the server's side."""
    done: trio.Event = attrs.field(factory=trio.Event)
    refused: str = ""
    """Why the client has failed, or lost its connection."""
    alert: str = ""
    """Why the server has refused a client that has done its part."""

    def lose(self, side: int, why: str) -> None:
        """Learn that the wire was cut."""
        if side == 0:
            self.refused = why
            self.done.set()


class SimulatedTlsListener(simulated.SimulatedListener):
    """Accepts the peers of a simulated network that speak TLS."""

    def __init__(self, config: TlsConfig) -> None:
        super().__init__()
        self._config = config
        self.reload(config.context)

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files again, see `TlsListener.reload`."""
        self._context = listening_context(self._config, context)

    def greet(self, hello: _Hello, wire: Wire) -> None:
        """Do a handshake, and answer."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = hello.context.wrap_bio(to_client, to_server, server_hostname=hello.server_name)
        server = self._context.wrap_bio(to_server, to_client, server_side=True)
        with asked_name() as asked:
            why = ""
            for _ in range(_FLIGHTS):
                hello.refused = hello.refused or _step(client)
                why = why or _step(server)
            mine, theirs = hello.infos
            if not hello.refused and not why:
                hello.infos = (
                    with_agreed(mine, client, hello.context, hello.server_name),
                    with_agreed(theirs, server, self._context, asked()),
                )
        if why:
            self.admission.turn_away(theirs.peer, ConnectionLost(f"the TLS handshake with {theirs.peer} failed: {why}"))
            hello.alert = hello.refused or _read(client)
        wire.post(1, hello.done.set)


def _step(side: ssl.SSLObject) -> str:
    """Go on with a handshake; return why it has failed, or nothing."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        pass
    except ssl.SSLError as error:
        return str(error)
    return ""


def _read(side: ssl.SSLObject) -> str:
    """Read the alert after a handshake."""
    try:
        side.read(1)
    except ssl.SSLError as error:
        return str(error)
    return ""


@asynccontextmanager
async def dial(network: Network, host: str, port: int, config: TlsConfig) -> AsyncIterator[Any]:
    """Connect to a listener and do the handshake; leaving the block closes the stream.

    Raises:
        ConnectionLost: no process listens there, it does not speak TLS, or its certificate is wrong.
        IdleTimeout: it was out of reach for too long.
        ConfigurationError: the name or the certificates cannot be used.
    """
    context = make_context(config, ssl.Purpose.SERVER_AUTH)
    name = config.server_name or host
    try:
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)
    except ValueError as error:
        raise ConfigurationError(f"{name!r} cannot be the name of a server: {error}") from error
    wire, listener, mine, theirs = await simulated.connect(
        network, "tcp", host, port, config.tcp.connect_timeout, SimulatedTlsListener
    )
    infos = attrs.evolve(mine, scheme="tls"), attrs.evolve(theirs, scheme="tls")
    hello = _Hello(context, name, infos)
    wire.on_lost = hello.lose
    wire.post(0, listener.greet, hello, wire)
    with trio.move_on_after(config.handshake_timeout):
        await hello.done.wait()
    if not hello.done.is_set():
        raise IdleTimeout(f"no TLS handshake with {mine.peer} within {config.handshake_timeout} s")
    if hello.refused:
        raise ConnectionLost(f"the TLS handshake with {mine.peer} failed: {hello.refused}")
    stream, other = simulated.join(wire, config, hello.infos)
    if hello.alert:
        stream.lose(ConnectionLost(f"the connection was lost: {hello.alert}"))
    else:
        wire.post(0, listener.arrive, other)
    async with stream:
        yield stream


@asynccontextmanager
async def listen(network: Network, host: str, port: int, config: TlsConfig) -> AsyncIterator[Any]:
    """Listen at an address of this process's machine, see `simulated.listen`.

    Raises:
        ConfigurationError: the address or the certificate cannot be used.
    """
    async with simulated.listen(network, "tls", host, port, SimulatedTlsListener(config)) as listener:
        yield listener
