"""`local_nodes`: nodes that are child processes of the driver."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import quote

import attrs
import trio

from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable
from levada.transports.carriers import unix
from levada.transports.carriers.shared_sockets import SharedSockets
from levada.transports.private_files import make_private_folder
from levada.transports.qmux import listen_over

from .fence import fenced
from .fleet import Fleet
from .heartbeat import Beats, Pulse
from .launched import LaunchedProcesses
from .messages import LINE_END, NodeLost
from .node import Run, how_it_ended
from .nodes import QMUX, Nodes
from .settings import NodeSettings
from .tracing import resource, tracing_in_nodes

__all__ = ["ChildProcesses", "local_nodes"]

logger = logging.getLogger("levada.actors.nodes")
output = logging.getLogger("levada.actors.nodes.output")
"""Gets what nodes write: a record for each line, and for each of their own records, which may have several lines. A record's ``node`` and
``stream`` (``stdout`` or ``stderr``) say where it is from."""

_LINE: Final = 64 * 1024  # bytes of a line that are logged; the rest of it is dropped
_KEPT: Final = 5  # lines of stderr that errors show
_LEVEL: Final = re.compile(rb"<([3-7])>")  # as in syslog; written by `levada.actors.nodes.__main__`
_LEVELS: Final = {b"3": logging.ERROR, b"4": logging.WARNING, b"6": logging.INFO, b"7": logging.DEBUG}
_REST: Final = 16  # times 64 KiB that are read after the end of a process, whose own children may still write
_GONE: Final = 5.0  # seconds for a killed process to end; only the kernel's uninterruptible sleep takes longer


@asynccontextmanager
async def local_nodes(
    system: ActorSystem,
    n: int,
    app: Any,
    *,
    names: Sequence[str] | None = None,
    settings: NodeSettings | None = None,
    sockets: SharedSockets | None = None,
) -> AsyncIterator[Nodes]:
    """Start nodes as child processes. The block begins when the app is ready on all of them.

    Leaving the block drains all nodes at the same time; after an exception or a cancellation they are killed. No process and no file of
    them remains.

    Args:
        system: has been entered. It becomes the driver of a fleet; a system has one fleet.
        n: the number of nodes.
        app: an async generator function of an actor system, as for ``levada serve``, that can be imported; or its ``"module:name"``.
        names: the names of the nodes; by default ``"n0"``, ``"n1"`` and so on.
        settings: how the nodes start, end and restart.
        sockets: shares the addresses of the apps' listeners among the nodes, as ``levada serve --nodes`` does. None: each node binds its own.

    Yields:
        The fleet.

    Raises:
        ConfigurationError: the system has no Unix sockets, the app cannot be imported elsewhere, a name is taken, or another fleet has the
            `NodeSettings.fence`, or that file cannot be opened.
        NodeLost: a node could not start; the text says why, and a note has its traceback.
        OSError: the folder for the nodes' sockets cannot be made.

    Example:
        ::

            async with ActorSystem() as system, local_nodes(system, 4, "shop.workers:app") as nodes:
                worker = await nodes.spawn(Worker, on="any")
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("nodes as child processes need Unix sockets, which this system does not have")
    settings = settings or NodeSettings()
    fleet = Fleet.of(system)
    async with AsyncExitStack() as ours:
        handed = unix.HandedListener(1024)
        # The time starts with the process, which has to import everything first.
        qmux = attrs.evolve(QMUX, handshake_timeout=settings.start_timeout)
        launcher: ChildProcesses | LaunchedProcesses
        if (launch := system.platform.launch) is not None:
            folder = f"/levada-{system.platform.token_bytes(4).hex()}"
            shares = None if sockets is None else sockets.shares
            launcher = LaunchedProcesses(launch, handed, folder, settings, shares, tracing_in_nodes(system))
        elif hasattr(os, "posix_spawn"):
            fence = await ours.enter_async_context(fenced(settings.fence, settings.start_timeout))
            pulse = ours.enter_context(Pulse(settings.beat))
            folder = ours.enter_context(TemporaryDirectory(prefix="levada-"))
            launcher = ChildProcesses(handed, pulse, folder, settings, sockets, tracing_in_nodes(system), fence)
        else:
            raise ConfigurationError("local nodes need POSIX: child processes with inherited sockets")
        async with (
            fleet.listen(launcher.driver_url),
            fleet.serve(partial(listen_over, handed, qmux)),
            fleet.nodes(n, app, launcher, names, settings),
        ):
            yield fleet


@attrs.define(eq=False)
class ChildProcesses:
    """Starts nodes as child processes; a `Launcher`.

    Args:
        handed: gets the driver's ends of their connections.
        pulse: exchanges heartbeats with them.
        folder: the folder of their sockets, which only this user may enter.
        settings: the settings of the nodes.
        sockets: opens listening sockets for them.
        tracing: the name of the function that makes their tracing, see `levada.framework.tracing.Tracing.elsewhere`.
        fence: the locked file that they keep open, see `levada.actors.nodes.fence`; None: there is none.
    """

    _handed: unix.HandedListener
    _pulse: Pulse
    _folder: str
    _settings: NodeSettings
    _sockets: SharedSockets | None = None
    _tracing: str = ""
    _fence: int | None = None

    @property
    def driver_url(self) -> str:
        """Where the driver listens for these nodes."""
        return f"aqueduct+unix://{quote(os.fsencode(self._folder))}/driver"

    def listen_url(self, run: Run) -> str:
        """Return the URL where a node is to listen."""
        return f"aqueduct+unix://{quote(os.fsencode(self._folder))}/{self._file(run)}"

    def _file(self, run: Run) -> str:
        return f"{run.index}.{run.number}"

    @asynccontextmanager
    async def start(self, run: Run) -> AsyncIterator[Child]:
        """Start a process; see `Launcher.start`."""
        environment = {**os.environ, **self._settings.env}
        if self._tracing:
            environment |= resource(environment, run.name)
        with ExitStack() as ours:
            ours.callback(Path(self._folder, self._file(run)).unlink, missing_ok=True)  # if it was killed
            make_private_folder(Path(self._folder))  # again, if it was removed while the fleet ran
            with ExitStack() as theirs:
                link, heart = (_pair(ours, theirs) for _ in range(2))
                output, errors = (_pipe(ours, theirs) for _ in range(2))
                numbers = [link[1].fileno(), heart[1].fileno()]
                if self._sockets is not None:
                    numbers.append(theirs.enter_context(self._sockets.offer()).fileno())
                fence = [] if self._fence is None else [self._fence]
                try:
                    process = await trio.lowlevel.open_process(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "levada.actors.nodes",
                            run.name,
                            self._tracing,
                            ",".join(map(str, fence)),
                            *map(str, numbers),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=output[1],
                        stderr=errors[1],
                        pass_fds=numbers + fence,
                        # Ctrl-C at the terminal is for the driver alone, which drains its nodes; and `Child.kill` ends what a node has started.
                        process_group=0,
                        env=environment,
                    )
                except RuntimeError as error:  # no thread for `subprocess.Popen`, which may block
                    raise BlockingIOError(errno.EAGAIN, str(error)) from error
            child = Child(process, run.name, self._pulse.listen(heart[0]))
            ours.callback(child.close)
            # Another task serves the stream. It would go on with the number of a socket that is closed behind its back, as the kernel gives the
            # number to the next file.
            stream = unix.over(link[0], run.id)
            ours.callback(stream.abort)
            async with trio.open_nursery() as nursery:
                try:
                    nursery.start_soon(child.read, output[0], logging.INFO)
                    nursery.start_soon(child.read, errors[0], logging.WARNING)
                    await self._handed.hand(stream)
                    yield child
                finally:
                    child.kill()
                    with trio.CancelScope(shield=True), trio.move_on_after(_GONE) as scope:
                        await child.ended()
                    if scope.cancelled_caught:
                        logger.error("%s: process %d was killed and does not end", run.name, process.pid)
                    nursery.cancel_scope.cancel()


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Make a socket pair; each end is closed by its stack."""
    mine, other = socket.socketpair()
    ours.callback(mine.close)
    theirs.callback(other.close)
    return mine, other


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    """Make a pipe; each end is closed by its stack."""
    mine, other = os.pipe()
    ours.callback(os.close, mine)
    theirs.callback(os.close, other)
    os.set_blocking(mine, False)
    return mine, other


class Child:
    """A child process; a `levada.actors.nodes.node.Process`."""

    def __init__(self, process: trio.Process, name: str, beats: Beats) -> None:
        self._process = process
        self._name = name
        self._beats = beats
        self._kept: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        self._outputs: list[Lines] = []

    @property
    def silence(self) -> float:
        """Seconds since its last heartbeat."""
        return self._beats.silence

    def last_lines(self, within: float) -> list[str]:
        """Return the end of its stderr, of the last `within` seconds."""
        return [line for time, line in self._kept if trio.current_time() - time <= within]

    async def read(self, number: int, level: int) -> None:
        """Log what the process writes to a pipe, line by line."""
        lines = Lines(number, self._name, level, self._kept if level >= logging.WARNING else None)
        self._outputs.append(lines)
        while lines.read(1):  # 64 KiB, so that a node that writes much does not hold up the others
            await trio.lowlevel.wait_readable(number)

    async def trouble(self) -> str:
        """Return nothing: its last lines say more."""
        return ""

    async def ended(self) -> NodeLost:
        """Wait until the process has ended and its output is logged."""
        code = await self._process.wait()
        for lines in self._outputs:
            lines.read(_REST)
        return how_it_ended(code, self._name)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the process, and to all that it has started in its process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the heartbeat, and log the last, incomplete line."""
        self._beats.close()
        for lines in self._outputs:
            lines.finish()


class Lines:
    """Logs the lines from a pipe, each with the node's name and cut to `_LINE` bytes. A node's record of several lines is one line here.

    Args:
        number: the pipe's file descriptor, which does not block.
        name: the node's name.
        level: the level of lines that do not begin with one.
        kept: also gets the lines of standard error, and when they came.
    """

    def __init__(self, number: int, name: str, level: int, kept: deque[tuple[float, str]] | None) -> None:
        self._number = number
        self._name = name
        self._level = level
        self._kept = kept
        self._begun = b""
        self._dropped = 0

    def read(self, times: int) -> bool:
        """Log the available lines, up to `times` 64 KiB; return whether more may follow."""
        for _ in range(times):
            try:
                data = os.read(self._number, 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            *whole, rest = data.split(b"\n")
            for line in whole:
                self._take(line)
                self.finish()
            self._take(rest)
        return True

    def _take(self, part: bytes) -> None:
        room = _LINE - len(self._begun)
        self._begun += part[:room]
        self._dropped += max(0, len(part) - room)

    def finish(self) -> None:
        """Log the line that was read so far."""
        line, dropped, self._begun, self._dropped = self._begun, self._dropped, b"", 0
        level, parts = self._level, [line]
        if (found := _LEVEL.match(line)) is not None:
            level, parts = _LEVELS.get(found[1], level), line[found.end() :].split(LINE_END.encode())
        lines = [printable(part, _LINE) for part in parts]
        if not any(map(str.strip, lines)):
            return
        lines[-1] += f" ({dropped} bytes more)" if dropped else ""
        output.log(
            level,
            "%s: %s",
            self._name,
            "\n    ".join(lines),
            extra={"node": self._name, "stream": "stdout" if self._kept is None else "stderr"},
        )
        if self._kept is not None:
            ends = lines[:1] + lines[1:][-1:]  # of a traceback, what failed and why
            self._kept.append((trio.current_time(), " … ".join(each.strip()[:300] for each in ends)))
