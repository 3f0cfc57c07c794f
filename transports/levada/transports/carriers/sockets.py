"""The source of this process's listening sockets: `open_sockets` opens them here, unless `sockets_from` sets another source.

Every listener of TCP, TLS, WebSocket, QMux, Unix sockets and QUIC calls `open_sockets`.  Processes that share addresses ask the process that
has bound them: see `levada.transports.carriers.shared_sockets`.
"""

from __future__ import annotations

import errno
import os
import socket as stdlib_socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import ConfigurationError

__all__ = [
    "ListeningAddress", "ListeningSocket", "SocketSource", "address_towards", "open_here", "open_sockets", "sockets_from", "why_not_bound",
]  # fmt: skip

KINDS: Final = ("tcp", "udp", "unix")


@attrs.frozen(kw_only=True)
class ListeningAddress:
    """The address that a listener wants."""

    kind: Literal["tcp", "udp", "unix"] = attrs.field(validator=v.in_(KINDS))
    """``tcp`` and ``unix`` for sockets that listen, ``udp`` for sockets that are bound."""
    host: str = attrs.field(validator=v.instance_of(str))
    """Host name or numeric address; for ``unix`` the path."""
    port: int = attrs.field(default=0, validator=[v.instance_of(int), v.in_(range(1 << 16))])
    """0 takes a free one."""
    backlog: int = attrs.field(default=1024, validator=[v.instance_of(int), v.in_(range(1, 1 << 31))])
    """Most peers that wait in the kernel."""
    mode: int = attrs.field(default=0o600, validator=[v.instance_of(int), v.in_(range(0o1000))])
    """Mode of the file of a Unix socket."""


@attrs.frozen(kw_only=True)
class ListeningSocket:
    """A socket for a listener, which owns and closes it."""

    socket: stdlib_socket.socket
    file: os.stat_result | None = None
    """Identifies the file of a Unix socket that the listener removes when it closes; ``None`` if another process removes it."""
    turn: stdlib_socket.socket | None = None
    """UDP: the listener reads datagrams once this socket is readable, and closes it after `socket`. With ``None`` it reads at once."""

    def close(self) -> None:
        """Close the sockets, if no listener has taken them."""
        self.socket.close()
        if self.turn is not None:
            self.turn.close()


SocketSource = Callable[[ListeningAddress], Awaitable[list[ListeningSocket]]]
"""Opens the sockets of an address, at least one; raises `OSError` or `ConfigurationError` if that is impossible."""


async def open_here(address: ListeningAddress) -> list[ListeningSocket]:
    """Open sockets in this process, one for each address of a host; for port 0 only the first, since each would get a different port.

    Raises:
        OSError: the system refuses.
        ConfigurationError: a process already listens at the Unix socket, or the path is another kind of file.
    """
    if address.kind == "unix":
        return [await _open_unix(address)]
    if address.kind == "udp":
        return [ListeningSocket(socket=await _open_udp(address))]
    try:
        found = await trio.open_tcp_listeners(address.port, host=address.host, backlog=address.backlog)
    except UnicodeError as error:
        raise ConfigurationError(f"{address.host!r} cannot be the name of a host: {error}") from error
    sockets = [stdlib_socket.socket(fileno=listener.socket.detach()) for listener in found]
    for unused in sockets[1:] if address.port == 0 else []:
        unused.close()
    return [ListeningSocket(socket=each) for each in (sockets[:1] if address.port == 0 else sockets)]


_source: ContextVar[SocketSource] = ContextVar("levada_socket_source", default=open_here)


async def open_sockets(address: ListeningAddress) -> list[ListeningSocket]:
    """Open the sockets of an address with the source of this context.

    Raises:
        OSError, ConfigurationError: as `SocketSource`.
    """
    return await _source.get()(address)


@contextmanager
def sockets_from(source: SocketSource) -> Iterator[None]:
    """Use `source` for listeners that are opened within the block, and by the tasks and actor systems that begin there."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def why_not_bound(error: OSError, *, another: str = "port (0 takes a free one)") -> str:
    """Return the reason why listening failed, for the text after "cannot listen at ...: ", and what to do about it.

    Args:
        error: the error of `open_sockets`, or of the system.
        another: what to choose instead of an address in use.
    """
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return f"another process or listener has this address ({why}): stop it, or choose another {another}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine does not have this address ({why}): choose one of its own, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"this user may not listen there ({why}): choose another {another}"
    return why


async def resolve_udp(host: str, port: int) -> Any:
    """Return the first address of a host, IPv4 before IPv6. Only one is tried: UDP, unlike TCP, does not tell if nothing listens at an address.

    Raises:
        OSError: the host has no address.
        ConfigurationError: the name is not a valid host name.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_DGRAM)
    except UnicodeError as error:
        raise ConfigurationError(f"{host!r} cannot be the name of a host: {error}") from error
    found.sort(key=lambda entry: entry[0] != stdlib_socket.AF_INET)
    return found[0][4]


def address_towards(bound: tuple[Any, ...], peer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the address from which a UDP socket reaches a peer: the socket's own, but one of this machine's instead of ``0.0.0.0`` or ``::``."""
    if bound[0] not in ("0.0.0.0", "::"):
        return bound
    family = stdlib_socket.AF_INET6 if ":" in peer[0] else stdlib_socket.AF_INET
    with stdlib_socket.socket(family, stdlib_socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(peer)  # sends nothing: the kernel looks up the route
        except OSError:
            return bound
        return (probe.getsockname()[0], *bound[1:])


async def _open_udp(address: ListeningAddress) -> stdlib_socket.socket:
    bound = await resolve_udp(address.host, address.port)
    family = stdlib_socket.AF_INET6 if ":" in bound[0] else stdlib_socket.AF_INET
    socket = stdlib_socket.socket(family, stdlib_socket.SOCK_DGRAM)
    try:
        socket.bind(bound)
    except BaseException:
        socket.close()
        raise
    return socket


async def _open_unix(address: ListeningAddress) -> ListeningSocket:
    """Listen at a path, replacing the file of a dead listener, and identify the new file."""
    path = address.host
    socket = stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
    try:
        try:
            socket.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            await _remove_stale(path)
            socket.bind(path)
        os.chmod(path, address.mode)  # no process can connect before `listen` below
        file = os.lstat(path)
        socket.listen(address.backlog)
    except BaseException:
        socket.close()
        raise
    return ListeningSocket(socket=socket, file=file)


async def _remove_stale(path: str) -> None:
    """Remove a socket's file if no process listens at it.

    Raises:
        ConfigurationError: a process listens at it, or it is another kind of file.
    """
    before = os.lstat(path)
    if not stat.S_ISSOCK(before.st_mode):
        raise ConfigurationError(f"{path} exists and is not a socket: remove it, or choose another path")
    try:
        (await trio.open_unix_socket(path)).socket.close()
    except ConnectionRefusedError:
        remove_file(path, before)
        return
    error = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    raise ConfigurationError(f"cannot listen at {path}: {why_not_bound(error, another='path')}")


def remove_file(path: str, file: os.stat_result) -> None:
    """Remove the file of a Unix socket, unless it is gone or another file has taken its place."""
    try:
        if os.path.samestat(file, os.lstat(path)):
            os.unlink(path)
    except OSError:
        pass
