"""The server of the console: a Unix socket and the actor that answers on it.

Clients cannot load the system much.  Each has one request under way, gets a limited number of actors, and must take the answer in time.
Their number is limited; if all places are taken, a new client replaces a client that has not sent a whole request or has been silent for
`PATIENCE` seconds (see `Places`), and a client that is silent for `IDLE` seconds is disconnected anyway.  Snapshots for all clients together
take at most half of the system's time.  An invalid request ends the connection that it came on.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import attrs
import trio

from levada.framework import Actor, ActorSystem, Reason
from levada.framework.errors import ActorStopped, ConfigurationError, DecodeError
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.places import Place, Places
from levada.transports.carriers.sockets import why_not_bound
from levada.transports.carriers.streams import accept_from

from .history import keep_history
from .snapshot import MOST_ACTORS, ask_nodes, take_snapshot
from .viewing import Viewer
from .wire import LineReader, parse_line, to_line

__all__ = ["Console", "serve_console"]

logger = logging.getLogger("levada.actors.console")

REQUEST_LIMIT = 65_536  # a view with many open actors
MOST_CLIENTS = 8
IDLE = 600.0  # seconds; clients ask every few seconds
PATIENCE = 10.0  # seconds for a client to take its answer, and of silence after which a new client may replace it

GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


Command = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class Console(Actor[Any]):
    """Answers clients with snapshots of its system. Started by `serve_console`."""

    listener: trio.SocketListener
    commands: Mapping[str, Command] = attrs.field(factory=dict)
    """Further requests of clients, by name."""
    actions: bool = False
    """Whether clients may stop, kill and restart actors."""
    tracebacks: bool = False
    """Whether clients see the texts and tracebacks of errors."""

    def started(self) -> None:
        """Accept clients, in a task of this actor."""
        self._admission = Admission(f"unix://{self.listener.socket.getsockname()}")
        self._places = Places(MOST_CLIENTS)
        self._looking = trio.Lock()
        self._rest_until = -inf
        self.start_soon(accept_from, self.listener, self._take_in, name="<console>")
        self.start_soon(keep_history, self.system, name="<history>")

    async def stopping(self, reason: Reason) -> None:
        """Close the socket."""
        await self.listener.aclose()

    async def _take_in(self, stream: trio.SocketStream) -> None:
        self.start_soon(self.serve_client, stream, name="<console client>")

    async def serve_client(self, stream: trio.abc.Stream) -> None:
        """Answer one client until it leaves, is replaced or disconnected. Errors of the client are logged, not raised.

        Cancellation:
            the connection is closed.
        """
        why = None
        try:
            async with stream:
                if self._places.full:
                    why = f"{MOST_CLIENTS} clients are connected already; try again later"
                    await self._answer(stream, to_line({"error": why}))
                else:
                    with trio.CancelScope() as scope, ExitStack() as resources:
                        place = self._places.take("", scope.cancel)  # only this user can connect
                        resources.callback(place.leave)
                        why = await self._answer_requests(stream, place, resources)
                    if scope.cancelled_caught:
                        why = "it was silent, and all places were taken"
        except GONE as error:
            logger.debug("a client of the console has left: %r", error, extra={"event": "console_client_gone"})
        if why is not None:
            self._admission.turn_away("a process", why)

    async def _answer_requests(self, stream: trio.abc.Stream, place: Place, resources: ExitStack) -> str | None:
        """Answer a client until it leaves. Return the reason if the server disconnects it."""
        lines = LineReader(stream, REQUEST_LIMIT)
        viewer: Viewer | None = None
        while True:
            line = None
            try:
                with trio.move_on_after(PATIENCE) as patience:
                    line = await lines.line()
                if patience.cancelled_caught:
                    place.give_way()
                    with trio.move_on_after(IDLE - PATIENCE):
                        line = await lines.line()
                if line is None:
                    return None
                members = parse_line(line)
                place.keep()
                if "view" in members or "act" in members or "confirm" in members:
                    if viewer is None:
                        viewer = Viewer(self.system, actions=self.actions, tracebacks=self.tracebacks)
                        resources.callback(viewer.close)
                    answer = to_line(await viewer.answer(members))
                else:
                    answer = await (self._obey(members) if "do" in members else self._look(members))
            except ActorStopped:  # the system is ending
                return None
            except (DecodeError, ConfigurationError) as error:
                await self._answer(stream, to_line({"error": str(error)}))
                return str(error)
            if not await self._answer(stream, answer):
                return f"it did not take its answer within {PATIENCE:g} s"

    async def _obey(self, members: Mapping[str, Any]) -> bytes:
        """Run a command."""
        command = self.commands.get(members["do"]) if isinstance(members["do"], str) else None
        if command is None:
            raise DecodeError(f"this program has no command {members['do']!r}")
        try:
            return to_line(await command(members))
        except ConfigurationError as error:  # the command has failed, and the client has made no mistake
            return to_line({"error": str(error)})

    async def _look(self, members: Mapping[str, Any]) -> bytes:
        """Take a snapshot. The next one waits for as long as this one took."""
        limit = members.get("limit", MOST_ACTORS)
        if type(limit) is not int or limit < 1:
            raise DecodeError(f"limit is {limit!r}, wanted a whole number, 1 or more")
        async with self._looking:
            await trio.sleep_until(self._rest_until)
            nodes = await ask_nodes(self.system, limit)
            began = trio.current_time()
            snapshot = take_snapshot(self.system, limit=limit).to_json()
            line = to_line({**snapshot, "nodes": nodes} if nodes else snapshot)
            now = trio.current_time()
            self._rest_until = now + (now - began)
            return line

    async def _answer(self, stream: trio.abc.Stream, line: bytes) -> bool:
        with trio.move_on_after(PATIENCE) as scope:
            await stream.send_all(line)
        return not scope.cancelled_caught


@asynccontextmanager
async def serve_console(
    system: ActorSystem,
    path: str | os.PathLike[str],
    *,
    commands: Mapping[str, Command] | None = None,
    actions: bool = False,
    tracebacks: bool = False,
) -> AsyncIterator[str]:
    """Show `system` to ``levada top PATH`` while the block lasts.

    Only this user can open the socket (mode 0600).  Clients see names, classes and counts, never the contents of messages, and can change
    nothing except through `commands` and `actions`.  In an actor: ``await self.enter(serve_console(self.system, path))``.

    Args:
        system: has been entered.
        path: where to make the socket. The socket of a dead program is replaced.
        commands: the functions that clients may call with ``{"do": name}``. A function gets the request and returns the answer, or raises
            `ConfigurationError` for the client.
        actions: whether ``levada top --web --actions`` may stop, kill and restart actors.
        tracebacks: whether ``levada top --web --tracebacks`` may show the texts and tracebacks of errors, which can quote messages.

    Yields:
        The path.

    Raises:
        ConfigurationError: a program listens at the path already, the path is another kind of file, its folder does not exist or cannot be
            written to, or the path is too long for a socket (about 100 bytes).
    """
    path = os.fspath(path)
    with _bound(path) as listening:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        console = system.spawn(Console, listener, commands or {}, actions, tracebacks)
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
            # No process can have connected with other rights: that needs the next line.
            Path(path).chmod(0o600)
            listening.listen(MOST_CLIENTS)
        except OSError as error:
            why = why_not_bound(error, another="path")
            raise ConfigurationError(f"cannot serve a console at {path}: {why}") from error
        ours = Path(path).stat()
        try:
            yield listening
        finally:
            # Another program may have replaced the socket meanwhile.
            if Path(path).exists() and os.path.samestat(Path(path).stat(), ours):
                Path(path).unlink()


def _is_stale(path: str) -> bool:
    """Whether `path` is the socket of a dead program."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigurationError(f"cannot serve a console at {path}: this file is not a socket")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # do not wait if the queue of clients is full
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass
    return False
