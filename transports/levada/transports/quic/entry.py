"""The two entry points, `dial` and `listen`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.platform import PLATFORM
from levada.transports.carriers.sockets import (
    ListeningAddress,
    ListeningSocket,
    open_sockets,
    resolve_udp,
    why_not_bound,
)
from levada.transports.carriers.streams import host_and_port

from .config import QuicConfig
from .connection import QuicConnection
from .endpoint import QuicEndpoint
from .listener import QuicListener
from .port import DatagramPort, SharedUdpPort, UdpPort

__all__ = ["dial", "listen"]


@asynccontextmanager
async def dial(
    url: str, config: QuicConfig | None = None, *, early: bool = False, port: DatagramPort | None = None
) -> AsyncIterator[QuicConnection]:
    """Connect to a server. Leaving the block drains for up to 5 s and closes.

    Args:
        url: ``quic://host:port``.
        config: by default the public certificate authorities are trusted.
        early: do not wait for the handshake. If `QuicConfig.sessions` has a ticket for this server, data travels with the first packet
            (0-RTT). An attacker may replay this data. `QuicConnection.handshake` tells whether the server refused it; the carrier then sends
            streams again, but not datagrams.
        port: replaces the UDP socket.

    Raises:
        ConnectionLost: the host has no address, does not answer, or the handshake failed.
        ConfigurationError: `url` is not a QUIC URL, or a file cannot be used.
    """
    config = config or QuicConfig()
    host, number = _parse(url)
    address: Any = (host, number)
    if port is None:
        network = PLATFORM.get().network
        try:
            address = await resolve_udp(host, number) if network is None else (network.resolve(host), number)
        except OSError as error:
            raise ConnectionLost(f"no address for {host!r}: {error}") from error
        anywhere = ("::" if ":" in address[0] else "0.0.0.0", 0)
        port = UdpPort.bind(anywhere, **_options(config)) if network is None else network.datagrams(*anywhere)
    async with QuicEndpoint(port, config) as endpoint:
        connection = endpoint.connect(address, server=host, early=early)
        async with connection:
            if not early:
                await connection.handshake()
            yield connection


@asynccontextmanager
async def listen(url: str, config: QuicConfig, *, port: DatagramPort | None = None) -> AsyncIterator[QuicListener]:
    """Listen for clients; leaving the block closes the remaining connections.

    Args:
        url: ``quic://host:port``, port 0 for any free one.
        config: needs a certificate.
        port: replaces the UDP socket.

    Raises:
        ConfigurationError: the address is not available, the certificate is missing or cannot be used, or the URL is not a QUIC URL.
    """
    host, number = _parse(url, listening=True)
    if port is None:
        network = PLATFORM.get().network
        try:
            if network is None:
                (opened,) = await open_sockets(ListeningAddress(kind="udp", host=host, port=number))
                port = _port(opened, config)
            else:
                port = network.datagrams(host, number)
        except OSError as error:
            raise ConfigurationError(f"cannot listen at {url}: {why_not_bound(error)}") from error
    endpoint = QuicEndpoint(port, config)
    try:
        listener = QuicListener(endpoint)
    except BaseException:
        port.close()
        raise
    async with endpoint:
        try:
            yield listener
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()


def _port(opened: ListeningSocket, config: QuicConfig) -> UdpPort:
    try:
        if opened.turn is None:
            return UdpPort(opened.socket, **_options(config))
        return SharedUdpPort(opened.socket, opened.turn, **_options(config))
    except BaseException:
        opened.close()
        raise


def _options(config: QuicConfig) -> dict[str, Any]:
    return {"gso": config.gso, "gro": config.gro, "buffer": config.socket_buffer}


def _parse(url: str, *, listening: bool = False) -> tuple[str, int]:
    host, number = host_and_port(url, "quic")
    if not number and not listening:
        raise ConfigurationError(f"port 0 is for listeners: expected quic://host:port, got {url!r}")
    return host, number
