"""Byte streams over Unix sockets, for programs on one machine; the kernel identifies the peers.

URLs are ``unix:///path/to/socket``.  The file has its mode, by default 0600, before any process can connect.  A listener replaces the file of
a dead listener, and removes its own file at the end.  Programs that clean temporary folders may remove the file while the listener lives:
it listens there again, and makes the folder again if that is gone too.  Abstract names (Linux) are refused, since they have no mode: any
process could connect, or take the name first.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
import struct
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.framework.platform import PLATFORM
from levada.transports.carriers import simulated
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import ByteStream, CarrierInfo
from levada.transports.carriers.listeners import QueuedListener, StreamListener
from levada.transports.carriers.places import share_of
from levada.transports.carriers.sockets import ListeningAddress, open_sockets, remove_file, why_not_bound
from levada.transports.carriers.streams import (
    JoinedStream,
    StreamConfig,
    discard,
    split_url,
)
from levada.transports.private_files import make_private_folder

__all__ = ["HandedListener", "UnixConfig", "UnixListener", "check_peer", "dial", "listen", "over", "path_of"]

logger = logging.getLogger("levada.transports.carriers")

LOOK_EVERY: Final = 5.0
"""Seconds between checks that a listener's file is there; a check takes 2 µs."""
_UCRED = struct.Struct("3i")  # struct ucred of Linux: pid, uid, gid


def _users(uids: Iterable[int] | None) -> frozenset[int] | None:
    return None if uids is None else frozenset(uids)


@attrs.frozen(kw_only=True)
class UnixConfig(StreamConfig):
    """How connections over Unix sockets behave. Immutable; derive with `attrs.evolve`."""

    mode: int = attrs.field(default=0o600, validator=[v.instance_of(int), v.in_(range(0o1000))])
    """Mode of the listener's file. Users who can write to the file can connect."""
    allowed_uids: frozenset[int] | None = attrs.field(default=None, converter=_users)
    """User ids whose processes may be at the other end, of a listener or a client; ``None``: every user who can open the file."""
    max_connections_per_uid: int | None = attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(1)]))
    """Most connections of one user to a listener. Any further one is closed at once. Needs a system that identifies peers (Linux)."""
    connect_timeout: float = attrs.field(default=10.0, validator=v.gt(0))
    """Seconds to wait for room in the listener's queue."""
    backlog: int = attrs.field(default=1024, validator=[v.instance_of(int), v.ge(1)])
    """Peers that may wait to be accepted in the kernel, and as many again here."""


def path_of(url: str) -> str:
    """Return the path of a URL.

    Raises:
        ConfigurationError: it is no ``unix:///path``, or no socket can have this path.
    """
    parts = split_url(url, "unix")
    try:
        path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))  # arguments of commands may be no UTF-8
    except UnicodeError as error:
        raise ConfigurationError(f"{url!r} cannot be the name of a file: {error}") from error
    if parts.netloc.startswith("@") or path.startswith("\0"):
        raise ConfigurationError(f"abstract names are not supported, as they have no file mode: {url!r}")
    if parts.netloc or parts.query or parts.fragment or not path.startswith("/") or path.endswith("/"):
        raise ConfigurationError(f"expected unix:///path/to/socket, ? and # as %3F and %23, got {url!r}")
    if "\0" in path or len(os.fsencode(path)) > 107:
        raise ConfigurationError(
            "the path of a Unix socket has at most 107 bytes, none of them 0 (for a path in the folder for temporary files, set TMPDIR to a "
            f"shorter one): {path!r}"
        )
    return path


def check_peer(
    socket: trio.socket.SocketType | stdlib_socket.socket, path: str, config: UnixConfig
) -> tuple[int, int, int] | None:
    """Return the (pid, uid, gid) that the process at the other end had when it connected or listened; ``None`` if the system does not tell.

    Raises:
        ConnectionLost: the process runs as a user that is not allowed; the socket was closed.
    """
    credentials: tuple[int, int, int] | None = None
    if sys.platform == "linux":
        credentials = _UCRED.unpack(socket.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_PEERCRED, _UCRED.size))
    user = None if credentials is None else credentials[1]
    if config.allowed_uids is not None and user not in config.allowed_uids:
        socket.close()
        raise ConnectionLost(f"the process at the other end of {path} runs as user {user}, which is not allowed")
    return credentials


class _UnixStream(JoinedStream):
    """A joined stream that ends cleanly even if bytes are unread."""

    async def _linger(self) -> None:
        # The peer has everything. But closing with unread bytes would reset it, so stop receiving and discard the rest.
        try:
            self._socket.shutdown(stdlib_socket.SHUT_RDWR)
            while not discard(self._socket):
                await trio.lowlevel.checkpoint()
        except OSError:
            pass  # the peer is gone


def _stream(raw: trio.SocketStream, path: str, config: UnixConfig) -> JoinedStream:
    """Make a stream of a connected socket.

    Raises:
        ConnectionLost: as `check_peer`.
    """
    credentials = check_peer(raw.socket, path, config)
    other = path if credentials is None else "pid={} uid={} gid={}".format(*credentials)
    info = CarrierInfo(scheme="unix", local=path, peer=other, peer_credentials=credentials)
    return _UnixStream(raw, raw.socket, info, config)


async def _connect(path: str) -> trio.SocketStream:
    """Connect, waiting for room in the listener's queue.

    Without room, Linux fails at once with EAGAIN. trio takes this for a connection under way, and then for an open one.
    """
    pause = 0.001
    while True:
        raw = await trio.open_unix_socket(path)
        try:
            raw.socket.getpeername()
        except OSError as error:
            raw.socket.close()
            if error.errno != errno.ENOTCONN:
                raise
        else:
            return raw
        await trio.sleep(pause)
        pause = min(2 * pause, 0.1)


def over(socket: stdlib_socket.socket, peer: str, config: UnixConfig | None = None) -> JoinedStream:
    """Make a stream from one end of a socket pair. The socket belongs to the stream from now on.

    Args:
        socket: one end of ``socket.socketpair()``.
        peer: name of the process at the other end, for logs and `CarrierInfo.peer`.
        config: watermark and time limits.
    """
    raw = trio.SocketStream(trio.socket.from_stdlib_socket(socket))
    info = CarrierInfo(scheme="unix", local="socket pair", peer=peer)
    return _UnixStream(raw, raw.socket, info, config or UnixConfig())


class HandedListener(QueuedListener[ByteStream]):
    """A `Listener` for byte streams that the application passes to it, such as ends of socket pairs (`over`). Its URL is the scheme only.

    Args:
        room: most streams that wait for `accept`.
    """

    def __init__(self, room: int) -> None:
        super().__init__("unix:", room, lambda stream: stream.abort())

    async def hand(self, stream: ByteStream) -> None:
        """Pass a stream to `accept`, waiting for room.

        Raises:
            ConnectionClosed: the listener is closed. The stream was aborted.

        Cancellation:
            the stream was aborted.
        """
        if not await self.offer(stream, ""):
            raise ConnectionClosed("this side closed the listener")


@asynccontextmanager
async def dial(url: str, config: UnixConfig | None = None) -> AsyncIterator[JoinedStream]:
    """Connect to ``unix:///path``; leaving the block closes the stream.

    Raises:
        ConnectionLost: no process listens at the path, this process may not connect, or the listener's user is not allowed.
        IdleTimeout: there was no room in the listener's queue within `UnixConfig.connect_timeout`.
        ConfigurationError: the URL is malformed.
    """
    config = config or UnixConfig()
    path = path_of(url)
    if (network := PLATFORM.get().network) is not None:
        async with simulated.dial(network, "unix", path, 0, config, timeout=config.connect_timeout) as other:
            yield other
        return
    raw: trio.SocketStream | None = None
    try:
        with trio.move_on_after(config.connect_timeout):
            raw = await _connect(path)
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {path}: {error}") from error
    if raw is None:
        raise IdleTimeout(f"no connection to {path} within {config.connect_timeout} s")
    async with _stream(raw, path, config) as stream:
        yield stream


async def _bind(path: str, config: UnixConfig) -> tuple[trio.SocketListener, os.stat_result | None]:
    """Listen at a path. Also return the identity of the file, if this process made it."""
    if sys.platform != "linux":
        for name in ("allowed_uids", "max_connections_per_uid"):
            if getattr(config, name) is not None:
                raise ConfigurationError(f"{name} needs a system that identifies peers (Linux)")
    address = ListeningAddress(kind="unix", host=path, backlog=config.backlog, mode=config.mode)
    try:
        (opened,) = await open_sockets(address)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {path}: {why_not_bound(error, another='path')}") from error
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened.socket)), opened.file


class UnixListener(StreamListener):
    """Accepts connections over a Unix socket; a `Listener`, made by `listen`."""

    def __init__(self, socket: trio.SocketListener, path: str, file: os.stat_result | None, config: UnixConfig) -> None:
        url = f"unix://{quote(os.fsencode(path))}"
        limit = config.max_connections_per_uid
        admission = Admission(url, limit, "its user are open (max_connections_per_uid)")
        super().__init__(url, [socket], config.backlog, admission)
        self._path = path
        self._config = config
        self._file = file
        self._owner = os.stat(os.path.dirname(path)).st_uid

    def start(self, nursery: trio.Nursery) -> None:
        """Start the task that accepts, and a task that listens again if the file was removed."""
        super().start(nursery)
        if self._file is not None:
            nursery.start_soon(self._stay, nursery)

    async def take_in(self, nursery: trio.Nursery, raw: trio.SocketStream) -> None:
        """Make a stream from an accepted socket, unless its user is not allowed or has too many connections."""
        try:
            stream = _stream(raw, self._path, self._config)
        except (ConnectionLost, OSError) as error:
            self.admission.turn_away("a process", error)
            raw.socket.close()
            return
        credentials = stream.info.peer_credentials
        leave = self.admission.enter("" if credentials is None else f"uid {credentials[1]}")
        if leave is None:
            self.admission.too_many(stream.info.peer)
            stream.abort()
            return
        stream.at_end(leave)
        await self.offer(stream, share_of(stream.info.peer, stream.info))

    async def _stay(self, nursery: trio.Nursery) -> None:
        """Listen again, with an accepting task in `nursery`, whenever the file is gone. Returns when the listener is closed."""
        path, warned = Path(self._path), False
        while True:
            await trio.sleep(LOOK_EVERY)
            if self._sockets[0].socket.fileno() < 0:
                return
            try:
                if path.is_socket():  # noqa: ASYNC240 - a look at a small local file
                    continue
                make_private_folder(path.parent)
                if path.parent.stat().st_uid != self._owner:
                    raise ConfigurationError(f"{path.parent} belongs to another user now")
                socket, file = await _bind(self._path, self._config)
            except (OSError, ConfigurationError) as error:
                if not warned:
                    logger.error(
                        "%s was removed, no client can connect: %s", path, error, extra={"event": "socket_gone"}
                    )
                warned = True
                continue
            logger.warning("%s was removed: it is there again", path, extra={"event": "socket_again"})
            self._sockets[0].socket.close()  # it has no name any more
            self._sockets, self._file, warned = [socket], file, False
            super().start(nursery)

    async def aclose(self) -> None:
        """Stop accepting, close the connections that were not accepted, and remove the file if it is still this listener's."""
        if self._file is not None and self._sockets[0].socket.fileno() >= 0:
            remove_file(self._path, self._file)
        await super().aclose()


@asynccontextmanager
async def listen(url: str, config: UnixConfig | None = None) -> AsyncIterator[UnixListener]:
    """Listen at ``unix:///path``; leaving the block stops listening and removes the file. Accepted connections stay open.

    Raises:
        ConfigurationError: the URL is malformed, another process listens at the path, or the file cannot be made.
    """
    config = config or UnixConfig()
    path = path_of(url)
    if (network := PLATFORM.get().network) is not None:
        async with simulated.listen(network, "unix", path, 0) as other:
            yield other
        return
    socket, file = await _bind(path, config)
    async with UnixListener(socket, path, file, config).running() as listener:
        yield listener
