"""The serving side of the console: a Unix socket and the actor that answers on it.

A client can cost the system little: it has one request under way, gets at most so many actors, must take the answer in time and may
not be idle for ever; there are only so many clients.  Whatever a client does wrong ends its own connection.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from levada.framework import Actor, ActorSystem
from levada.framework.errors import ConfigurationError, DecodeError

from .snapshot import MOST_ACTORS, take_snapshot
from .wire import LineReader, parse_line, to_line

__all__ = ["Console", "serve_console"]

logger = logging.getLogger("levada.actors.console")

REQUEST_LIMIT = 4096
MOST_CLIENTS = 8
IDLE = 600.0  # seconds; nobody looks so rarely
PATIENCE = 10.0  # seconds for an answer to be taken

GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


class Console(Actor[Any]):
    """Answers with snapshots of its own system. Started by `serve_console`."""

    listener: trio.SocketListener
    clients: int = 0

    def started(self) -> None:
        """Begin to accept, in a task of this actor."""
        self.start_soon(trio.serve_listeners, self.serve_client, [self.listener], name="<console>")

    async def serve_client(self, stream: trio.abc.Stream) -> None:
        """Answer one client until it leaves, idles or breaks a rule; raises nothing of the client's doing.

        Cancellation:
            the connection is closed.
        """
        self.clients += 1
        try:
            async with stream:
                if self.clients > MOST_CLIENTS:
                    await self._answer(stream, {"error": f"{MOST_CLIENTS} are looking already; try again later"})
                else:
                    await self._answer_requests(stream)
        except GONE as error:
            logger.debug("a client of the console is gone: %r", error, extra={"event": "console_client_gone"})
        finally:
            self.clients -= 1

    async def _answer_requests(self, stream: trio.abc.Stream) -> None:
        lines = LineReader(stream, REQUEST_LIMIT)
        while True:
            line = None
            try:
                with trio.move_on_after(IDLE):
                    line = await lines.line()
                if line is None:
                    return
                limit = parse_line(line).get("limit", MOST_ACTORS)
                if type(limit) is not int or limit < 1:
                    raise DecodeError(f"limit is a number of actors, 1 or more, not {limit!r}")
            except DecodeError as error:
                await self._answer(stream, {"error": str(error)})
                return
            if not await self._answer(stream, take_snapshot(self.system, limit=limit).to_json()):
                return

    async def _answer(self, stream: trio.abc.Stream, members: dict[str, Any]) -> bool:
        with trio.move_on_after(PATIENCE) as scope:
            await stream.send_all(to_line(members))
        return not scope.cancelled_caught


@asynccontextmanager
async def serve_console(system: ActorSystem, path: str | os.PathLike[str]) -> AsyncIterator[str]:
    """Let ``levada top PATH`` look at `system` while the block lasts.

    The socket can be opened by this user only (mode 0600).  Whoever can open it sees names, classes and counts, never a message,
    and can change nothing.  Within an actor: ``await self.enter(serve_console(self.system, path))``.

    Args:
        system: has been entered.
        path: where the socket is made; one that a dead program has left there is replaced.

    Yields:
        The path.

    Raises:
        ConfigurationError: somebody listens at the path already, something else is there, its folder does not exist or may not be
            written to, or it is too long for a socket (about 100 octets).
    """
    path = os.fspath(path)
    with _bound(path) as listening:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        console = system.spawn(Console, listener)
        try:
            yield path
        finally:
            console.stop(now=True)
            with trio.CancelScope(shield=True):
                await console.terminated()


@contextmanager
def _bound(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if _is_stale(path):
                Path(path).unlink()
            listening.bind(path)
            # Nobody can have connected with other rights: that needs the next line.
            Path(path).chmod(0o600)
            listening.listen(MOST_CLIENTS)
        except OSError as error:
            why = "a program listens there already" if error.errno == errno.EADDRINUSE else error.strerror or error
            raise ConfigurationError(f"cannot serve a console at {path}: {why}") from error
        ours = Path(path).stat()
        try:
            yield listening
        finally:
            # Somebody else may have taken the place meanwhile.
            if Path(path).exists() and os.path.samestat(Path(path).stat(), ours):
                Path(path).unlink()


def _is_stale(path: str) -> bool:
    """Whether there is a socket at `path` that nobody listens on."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigurationError(f"cannot serve a console at {path}: there is something that is not a socket")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of waiting clients is no reason to wait
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass
    return False
