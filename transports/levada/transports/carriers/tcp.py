"""Byte streams over TCP, with happy eyeballs, joined small writes, TCP_NODELAY, and keepalive.

URLs are ``tcp://host:port``.  A listener with port 0 takes a free port, which is in `TcpListener.url`.
"""

from __future__ import annotations

import os
import socket as stdlib_socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.framework.platform import PLATFORM
from levada.transports.carriers import simulated
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CarrierInfo
from levada.transports.carriers.listeners import StreamListener
from levada.transports.carriers.places import share_of
from levada.transports.carriers.sockets import ListeningAddress, open_sockets, why_not_bound
from levada.transports.carriers.streams import JoinedStream, StreamConfig, host_and_port

__all__ = ["TcpConfig", "TcpListener", "dial", "listen"]

# Seconds; the most that Linux accepts. Setting the option to more would fail on each connection.
_LONGEST_SILENCE = 32_767
_IDLE: Any = v.optional(v.and_(v.gt(0), v.le(_LONGEST_SILENCE)))
_BUFFER = v.optional(v.and_(v.instance_of(int), v.gt(0), v.lt(1 << 31)))


@attrs.frozen(kw_only=True)
class TcpConfig(StreamConfig):
    """How TCP connections behave. Immutable; derive with `attrs.evolve`."""

    connect_timeout: float = attrs.field(default=10.0, validator=v.gt(0))
    """Seconds for the name lookup and all attempts to connect together."""
    happy_eyeballs_delay: float = attrs.field(default=0.25, validator=v.ge(0))
    """Seconds after which the next address of a name is tried as well (RFC 8305)."""
    local_address: str | None = None
    """Local address to connect from; ``None`` lets the system choose."""
    no_delay: bool = True
    """Whether small packets are sent at once (TCP_NODELAY); small writes are already joined here."""
    keepalive_idle: float | None = attrs.field(default=60.0, validator=_IDLE)
    """Seconds of silence, at most 32,767, after which the kernel probes the peer; ``None`` for never. The system counts in whole seconds."""
    keepalive_interval: float = attrs.field(default=10.0, validator=[v.ge(1), v.le(_LONGEST_SILENCE)])
    """Seconds between probes, at most 32,767."""
    keepalive_count: int = attrs.field(default=6, validator=[v.instance_of(int), v.ge(1), v.le(127)])
    """Probes without an answer after which the connection is lost."""
    send_buffer: int | None = attrs.field(default=None, validator=_BUFFER)
    """Bytes of the kernel's buffer for sending; ``None`` leaves it to the kernel."""
    receive_buffer: int | None = attrs.field(default=None, validator=_BUFFER)
    """Bytes of the kernel's buffer for receiving; ``None`` leaves it to the kernel."""
    backlog: int = attrs.field(default=1024, validator=[v.instance_of(int), v.ge(1)])
    """Peers that may wait to be accepted in the kernel, and as many again here."""
    max_connections_per_address: int | None = attrs.field(
        default=None, validator=v.optional(v.and_(v.instance_of(int), v.ge(1)))
    )
    """Most connections that a listener admits from one address (IPv6: from one /64), including unfinished handshakes. Any further one is
    closed at once. ``None``: no limit."""


def set_options(socket: trio.socket.SocketType | stdlib_socket.socket, config: TcpConfig) -> None:
    """Apply the settings to a connected socket, except options that the system lacks."""
    options: list[tuple[int, str, int]] = [(stdlib_socket.IPPROTO_TCP, "TCP_NODELAY", int(config.no_delay))]
    if config.keepalive_idle is not None:
        options += [
            (stdlib_socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (stdlib_socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, round(config.keepalive_idle))),
            (stdlib_socket.IPPROTO_TCP, "TCP_KEEPINTVL", max(1, round(config.keepalive_interval))),
            (stdlib_socket.IPPROTO_TCP, "TCP_KEEPCNT", config.keepalive_count),
        ]
    for level, name, value in options:
        if hasattr(stdlib_socket, name):
            socket.setsockopt(level, getattr(stdlib_socket, name), value)
    set_buffers(socket, config)


def set_buffers(socket: trio.socket.SocketType | stdlib_socket.socket, config: TcpConfig) -> None:
    """Set the sizes of the kernel's buffers. This is best done before the connection begins, since the two ends then agree on a fitting window."""
    if config.send_buffer is not None:
        socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF, config.send_buffer)
    if config.receive_buffer is not None:
        socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVBUF, config.receive_buffer)


def authority(address: tuple[object, ...]) -> str:
    """Return a socket's address as in a URL."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _reason(error: OSError) -> str:
    """Return the system's error for each address that was tried. Trio's own text only says that all have failed."""
    if isinstance(error.__cause__, BaseExceptionGroup):
        tried = (each for each in error.__cause__.exceptions if isinstance(each, OSError))
        return ", ".join(dict.fromkeys(os.strerror(each.errno) if each.errno else str(each) for each in tried))
    return error.strerror or str(error)  # of `getaddrinfo`


async def connect(host: str, port: int, config: TcpConfig) -> trio.SocketStream:
    """Connect to the first address of `host` that answers.

    Raises:
        ConnectionLost: no address answers, or the host has none.
        IdleTimeout: there was no connection within `TcpConfig.connect_timeout`.
        ConfigurationError: the name is not a valid host name.
    """
    stream: trio.SocketStream | None = None
    try:
        with trio.move_on_after(config.connect_timeout):
            stream = await trio.open_tcp_stream(
                host, port, happy_eyeballs_delay=config.happy_eyeballs_delay, local_address=config.local_address
            )
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {host}:{port}: {_reason(error)}") from error
    except UnicodeError as error:
        raise ConfigurationError(f"{host!r} cannot be the name of a host: {error}") from error
    if stream is None:
        raise IdleTimeout(f"no connection to {host}:{port} within {config.connect_timeout} s")
    return stream


def prepare(stream: trio.SocketStream, scheme: str, config: TcpConfig) -> CarrierInfo:
    """Apply the settings to a new connection, and return its addresses.

    Raises:
        ConnectionLost: the peer has gone already; the socket was closed.
    """
    try:
        set_options(stream.socket, config)
        return CarrierInfo(
            scheme=scheme, local=authority(stream.socket.getsockname()), peer=authority(stream.socket.getpeername())
        )
    except OSError as error:
        stream.socket.close()
        raise ConnectionLost(f"the peer left as soon as it was connected: {error}") from error


def let_in(raw: trio.SocketStream, admission: Admission) -> tuple[str, Callable[[], None]] | None:
    """Count an accepted connection. Return its peer and a function that removes it from the count; close it and return ``None`` if refused."""
    try:
        peer = raw.socket.getpeername()
    except OSError:  # it is gone already
        raw.socket.close()
        return None
    leave = admission.enter(str(peer[0]))
    if leave is None:
        admission.too_many(authority(peer))
        raw.socket.close()
        return None
    return authority(peer), leave


@asynccontextmanager
async def dial(url: str, config: TcpConfig | None = None) -> AsyncIterator[JoinedStream]:
    """Connect to ``tcp://host:port``; leaving the block closes the stream.

    Raises:
        ConnectionLost: no server answers at the URL.
        IdleTimeout: there was no connection within `TcpConfig.connect_timeout`.
        ConfigurationError: the URL is malformed.
    """
    config = config or TcpConfig()
    if (network := PLATFORM.get().network) is not None:
        place = host_and_port(url, "tcp")
        async with simulated.dial(network, "tcp", *place, config, timeout=config.connect_timeout) as other:
            yield other
        return
    raw = await connect(*host_and_port(url, "tcp"), config)
    async with JoinedStream(raw, raw.socket, prepare(raw, "tcp", config), config) as stream:
        yield stream


async def bind(url: str, scheme: str, config: TcpConfig) -> list[trio.SocketListener]:
    """Listen on every address of a URL's host; for port 0 only on the first, since each would get a different port.

    Raises:
        ConfigurationError: the address is taken, or not available here.
    """
    host, port = host_and_port(url, scheme)
    address = ListeningAddress(kind="tcp", host=host, port=port, backlog=config.backlog)
    try:
        opened = await open_sockets(address)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {url}: {why_not_bound(error)}") from error
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each.socket)) for each in opened]
    for listener in listeners:
        set_buffers(listener.socket, config)
    return listeners


class TcpListener(StreamListener):
    """Accepts TCP connections; a `Listener`, made by `listen`."""

    def __init__(self, sockets: list[trio.SocketListener], config: TcpConfig) -> None:
        url = f"tcp://{authority(sockets[0].socket.getsockname())}"
        super().__init__(url, sockets, config.backlog, Admission(url, config.max_connections_per_address))
        self._config = config

    async def take_in(self, nursery: trio.Nursery, raw: trio.SocketStream) -> None:
        """Make a stream of an accepted socket."""
        entry = let_in(raw, self.admission)
        if entry is None:
            return
        peer, leave = entry
        try:
            stream = JoinedStream(raw, raw.socket, prepare(raw, "tcp", self._config), self._config)
        except ConnectionLost:
            leave()
            return
        stream.at_end(leave)
        await self.offer(stream, share_of(peer))


@asynccontextmanager
async def listen(url: str, config: TcpConfig | None = None) -> AsyncIterator[TcpListener]:
    """Listen at ``tcp://host:port``; leaving the block stops listening. Accepted connections stay open.

    Raises:
        ConfigurationError: the URL is malformed, or the address cannot be used.
    """
    config = config or TcpConfig()
    if (network := PLATFORM.get().network) is not None:
        async with simulated.listen(network, "tcp", *host_and_port(url, "tcp")) as other:
            yield other
        return
    sockets = await bind(url, "tcp", config)
    async with TcpListener(sockets, config).running() as listener:
        yield listener
