"""Listening sockets shared by several processes: one process binds each address, and passes duplicates of the socket to the others.

`SharedSockets` is the side that binds; `PassedSockets` is the other side, a `SocketSource`.  They are connected by a pair of Unix sockets.
A request is a `ListeningAddress` as one line of JSON, with the descriptor of a new socket for its answer.  The answer is also one line:
``{"sockets": n}`` with n descriptors, or the error as ``{"errno": 98, "text": …}`` or ``{"refused": …}``, with
``"ending": true`` if the side that binds is ending.

The kernel queues clients for the address, not for a process.  Each connection goes to one of the processes that accept, or waits until
there is one. A process that closes its copy drops no connection.  The address is free again when all copies are closed.
Datagrams belong to connections that live in one process, so one process at a time reads a UDP socket.  With its copy, each process gets
one end of another pair of sockets.  A byte there tells the process that it is its turn.  The turn passes to the next process when this one
closes that end, or ends.

The order of calls distinguishes listeners on port 0: the k-th listener of each process at ``host:0`` gets the k-th socket.
"""

from __future__ import annotations

import array
import errno
import json
import logging
import os
import socket as stdlib_socket
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import trio

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.platform import PLATFORM
from levada.transports.carriers.sockets import (
    ListeningAddress,
    ListeningSocket,
    SocketSource,
    open_here,
    remove_file,
)
from levada.transports.carriers.streams import plain_nursery

__all__ = ["PassedSockets", "ServerEnding", "SharedSockets", "share_sockets"]

logger = logging.getLogger("levada.transports.carriers")

MOST_SOCKETS: Final = 16
"""Most sockets of one address, since a host name may have several addresses."""
MOST_ADDRESSES: Final = 256
"""Most addresses that a `SharedSockets` binds."""
_LINE: Final = 16 * 1024
_ROOM: Final = stdlib_socket.CMSG_SPACE((MOST_SOCKETS + 1) * array.array("i").itemsize)
_CLOEXEC: Final = getattr(stdlib_socket, "MSG_CMSG_CLOEXEC", 0)

_Key = tuple[str, str, int, int]


class ServerEnding(ConfigurationError):
    """The process that binds the addresses is ending: it shares no more sockets."""


@attrs.define(eq=False)
class _Shared:
    """The sockets of one address, and for UDP the processes in the order of their turns."""

    sockets: list[ListeningSocket]
    turns: list[trio.socket.SocketType] = attrs.field(factory=list)

    def close(self, key: _Key) -> None:
        kind, host, _, _ = key
        for each in self.sockets:
            if kind == "unix" and each.file is not None:
                remove_file(host, each.file)
            each.close()


class SharedSockets:
    """Binds addresses for other processes; made by `share_sockets`."""

    def __init__(self, nursery: trio.Nursery, source: SocketSource) -> None:
        self._nursery = nursery
        self._source = source
        self._shared: dict[_Key, _Shared] = {}
        self._binding = trio.Lock()
        self._closed = False
        network = PLATFORM.get().network
        self.shares = None if network is None else network.share()
        """In place of the sockets, on a network that is not the real one."""

    def offer(self) -> stdlib_socket.socket:
        """Make the socket for one process, for its `PassedSockets`.

        The caller passes it on and closes its own copy; the process is served until all copies are closed.
        """
        ours, theirs = stdlib_socket.socketpair(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
        ours.setblocking(False)
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(ours))
        return theirs

    def close(self) -> None:
        """Close all sockets here and remove the files of Unix sockets; further requests are refused. Copies elsewhere stay open."""
        self._closed = True
        if self.shares is not None:
            self.shares.close()
        for key, shared in self._shared.items():
            shared.close(key)
        self._shared.clear()

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        asked: dict[tuple[str, str], int] = {}
        data = b""
        answers: deque[stdlib_socket.socket] = deque()
        with connection, ExitStack() as unanswered:
            unanswered.callback(_close_all, answers)
            try:
                while len(data) <= _LINE:
                    received, sockets, whole = await _receive(connection)
                    if not received:
                        return
                    if not whole:
                        # A request without its descriptor cannot be answered: the requester sees its socket end.
                        logger.warning("no file descriptor is free: a listening socket was not passed to a process")
                        _close_all((*answers, *sockets))
                        answers.clear()
                        data = b""
                        continue
                    data += received
                    answers += sockets
                    while answers and b"\n" in data:
                        line, _, data = data.partition(b"\n")
                        self._nursery.start_soon(self._answer, answers.popleft(), line, asked)
            except OSError:
                pass  # the process has ended

    async def _answer(self, to: stdlib_socket.socket, line: bytes, asked: dict[tuple[str, str], int]) -> None:
        to.setblocking(False)
        with trio.socket.from_stdlib_socket(to) as back, ExitStack() as sent:
            passed: list[stdlib_socket.socket] = []
            try:
                shared = await self._find(ListeningAddress(**json.loads(line)), asked)
                passed += (each.socket for each in shared.sockets)
                if shared.sockets[0].socket.type == stdlib_socket.SOCK_DGRAM:
                    passed.append(sent.enter_context(self._wait_for_turn(shared)))
                answer: dict[str, Any] = {"sockets": len(passed)}
            except OSError as error:
                answer = {"errno": error.errno, "text": error.strerror or str(error)}
            except (ConfigurationError, TypeError, ValueError) as error:
                answer = {"refused": str(error), "ending": isinstance(error, ServerEnding)}
            try:
                await _send(back, answer, passed)
            except OSError:
                pass  # the process has ended, or has given up its request

    async def _find(self, address: ListeningAddress, asked: dict[tuple[str, str], int]) -> _Shared:
        """Return the sockets of an address, bound at the first request."""
        count = 0
        if address.port == 0 and address.kind != "unix":
            count = asked[address.kind, address.host] = asked.get((address.kind, address.host), 0) + 1
        key = (address.kind, address.host, address.port, count)
        async with self._binding:
            if self._closed:
                raise ServerEnding("the server is ending")
            if key not in self._shared:
                if len(self._shared) >= MOST_ADDRESSES:
                    raise ConfigurationError(f"{MOST_ADDRESSES} addresses are shared already")
                shared = _Shared(await self._source(address))
                if self._closed:
                    shared.close(key)
                    raise ServerEnding("the server is ending")
                if len(shared.sockets) > MOST_SOCKETS:
                    shared.close(key)
                    raise ConfigurationError(f"{address.host} has over {MOST_SOCKETS} addresses")
                self._shared[key] = shared
            return self._shared[key]

    def _wait_for_turn(self, shared: _Shared) -> stdlib_socket.socket:
        """Put a process at the end of the queue for a UDP socket; return the socket that tells it of its turn."""
        ours, theirs = stdlib_socket.socketpair()
        ours.setblocking(False)
        self._nursery.start_soon(_keep_turn, shared.turns, trio.socket.from_stdlib_socket(ours))
        return theirs


async def _keep_turn(turns: list[trio.socket.SocketType], end: trio.socket.SocketType) -> None:
    with end:
        turns.append(end)
        try:
            if turns[0] is end:
                await end.send(b"1")
            await end.recv(1)  # until the process closes its end
        except OSError:
            pass  # it has ended already
        finally:
            had = turns[0] is end
            turns.remove(end)
        if had and turns:
            try:
                await turns[0].send(b"1")
            except OSError:
                pass  # its own task sees the same


@asynccontextmanager
async def share_sockets(source: SocketSource = open_here) -> AsyncIterator[SharedSockets]:
    """Share listening sockets with other processes for a block, which ends with `SharedSockets.close`.

    Args:
        source: opens the sockets.
    """
    async with plain_nursery() as nursery:
        shared = SharedSockets(nursery, source)
        try:
            yield shared
        finally:
            shared.close()
            nursery.cancel_scope.cancel()


class PassedSockets:
    """A `SocketSource` that asks the `SharedSockets` at the other end of a connection.

    Args:
        connection: made by `SharedSockets.offer`. It belongs to this object from now on.
    """

    def __init__(self, connection: stdlib_socket.socket) -> None:
        connection.setblocking(False)
        self._connection = trio.socket.from_stdlib_socket(connection)
        self._sending = trio.Lock()
        self._open: list[tuple[ListeningAddress, stdlib_socket.socket]] = []

    def close(self) -> None:
        """Close the connection. Sockets that came over it stay open."""
        self._connection.close()

    async def __call__(self, address: ListeningAddress) -> list[ListeningSocket]:
        """Ask for the sockets of an address.

        Raises:
            OSError: the other process could not bind them (with its ``errno``), or this process already listens there.
            ServerEnding: the other process is ending.
            ConfigurationError: the other process refuses.
            ConnectionLost: the other process has ended.

        Cancellation:
            no socket is left open here.
        """
        self._open = [entry for entry in self._open if entry[1].fileno() >= 0]
        if address.port or address.kind == "unix":
            for other, _ in self._open:
                if (other.kind, other.host, other.port) == (address.kind, address.host, address.port):
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        answer, sockets = await self._ask(address)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        if "refused" in answer:
            raise (ServerEnding if answer["ending"] else ConfigurationError)(answer["refused"])
        if address.kind == "udp":
            socket, turn = sockets
            opened = [ListeningSocket(socket=socket, turn=turn)]
        else:
            opened = [ListeningSocket(socket=socket) for socket in sockets]
        self._open += ((address, each.socket) for each in opened)
        return opened

    async def _ask(self, address: ListeningAddress) -> tuple[dict[str, Any], list[stdlib_socket.socket]]:
        ours, theirs = stdlib_socket.socketpair(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
        ours.setblocking(False)
        data = b""
        sockets: list[stdlib_socket.socket] = []
        with trio.socket.from_stdlib_socket(ours) as answers, ExitStack() as failed:
            failed.callback(_close_all, sockets)
            try:
                with theirs:
                    async with self._sending:  # a line is sent whole, before the next one
                        await _send(self._connection, attrs.asdict(address), [theirs])
                while not data.endswith(b"\n"):
                    received, more, _ = await _receive(answers)
                    sockets += more
                    if not received:
                        raise ConnectionLost(
                            "the process that binds the addresses has ended, or has no file descriptor free"
                        )
                    data += received
            except OSError as error:
                raise ConnectionLost("the process that binds the addresses has ended") from error
            answer = json.loads(data)
            if answer.get("sockets", 0) != len(sockets):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel drops descriptors that have no room
            failed.pop_all()
            return answer, sockets


async def _send(
    connection: trio.socket.SocketType, members: Mapping[str, Any], passed: list[stdlib_socket.socket]
) -> None:
    """Send one line, and duplicates of sockets with its first byte. Once sending has begun, it cannot be cancelled."""
    data = json.dumps(members).encode() + b"\n"
    descriptors = array.array("i", [each.fileno() for each in passed])
    rights = [(stdlib_socket.SOL_SOCKET, stdlib_socket.SCM_RIGHTS, descriptors)] if passed else []
    sent = await connection.sendmsg([data], rights)
    with trio.CancelScope(shield=True):
        while sent < len(data):
            sent += await connection.send(data[sent:])


async def _receive(connection: trio.socket.SocketType) -> tuple[bytes, list[stdlib_socket.socket], bool]:
    """Receive bytes and the sockets sent with them. Also return whether all sockets came; false if this process had no room for some."""
    received, ancillary, flags, _ = await connection.recvmsg(_LINE, _ROOM, _CLOEXEC)
    found = array.array("i")
    for _, kind, value in ancillary:
        if kind == stdlib_socket.SCM_RIGHTS:
            found.frombytes(value[: len(value) - len(value) % found.itemsize])
    sockets = [stdlib_socket.socket(fileno=descriptor) for descriptor in found]
    return received, sockets, not flags & stdlib_socket.MSG_CTRUNC


def _close_all(sockets: Iterable[stdlib_socket.socket]) -> None:
    for socket in sockets:
        socket.close()
