"""Nodes in the test's own process: the same body and the same driver, over socket pairs, in virtual time."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import trio

from levada.actors.nodes import NodeLost, Nodes, NodeSettings, Run
from levada.actors.nodes.fleet import Fleet
from levada.actors.nodes.node_side import run_node
from levada.actors.nodes.nodes import QMUX, TO_DRIVER
from levada.framework import ActorSystem
from levada.framework.errors import ConnectionLost
from levada.transports.carriers import unix
from levada.transports.qmux import dial_over, listen_over

SETTINGS = NodeSettings(start_timeout=5.0, drain_timeout=2.0)


class Task:
    """A node that is a task."""

    def __init__(self, run: Run, connection: socket.socket, body: Callable[..., Awaitable[None]]) -> None:
        self.run = run
        self.body = body
        self.end = trio.Event()
        self.scope = trio.CancelScope()
        self.gone = trio.Event()
        self.connection = connection
        self.how = NodeLost("was killed by SIGKILL", signal=9)
        self.silence = 0.0
        self.written: list[tuple[float, str]] = []
        """The lines that it has written, each with its age in seconds."""

    def last_lines(self, within: float) -> list[str]:
        """Tell what it was said to have written."""
        return [line for age, line in self.written if age <= within]

    async def live(self) -> None:
        """Run the body."""
        try:
            with self.scope:
                opens = partial(dial_over, unix.over(self.connection, "the driver"), TO_DRIVER)
                try:
                    await self.body(opens, name=self.run.name, end=self.end)
                    self.how = NodeLost("ended with exit code 0", exit_code=0)
                except* (NodeLost, ConnectionLost):
                    self.how = NodeLost("ended with exit code 1", exit_code=1)
        finally:
            self.connection.close()  # if it was cancelled before it had begun
            self.gone.set()

    async def trouble(self) -> str:
        """Nothing: its last lines say more."""
        return ""

    async def ended(self) -> NodeLost:
        """Wait for the end."""
        await self.gone.wait()
        return self.how

    def terminate(self) -> None:
        """Drain."""
        self.end.set()

    def kill(self) -> None:
        """Cancel all; nothing more goes out."""
        if self.connection.fileno() >= 0:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.scope.cancel()


class InProcess:
    """Starts nodes as tasks."""

    def __init__(
        self, handed: unix.HandedListener, body: Callable[..., Awaitable[None]], busy: float, driver_url: str
    ) -> None:
        self.handed = handed
        self.busy = busy
        self.body = body
        self.tasks: list[Task] = []
        self.driver_url = driver_url

    def listen_url(self, run: Run) -> str:
        """Where a node is to listen."""
        return f"aqueduct+memory://{run.name}.{run.number}"

    @asynccontextmanager
    async def start(self, run: Run) -> AsyncIterator[Task]:
        """Start a task; see `levada.actors.nodes.Launcher`."""
        ours, theirs = socket.socketpair()
        with ours, theirs, ExitStack() as after:
            async with trio.open_nursery() as nursery:
                task = Task(run, theirs, self.body)
                self.tasks.append(task)
                nursery.start_soon(task.live)
                try:
                    await trio.sleep(self.busy)
                    stream = unix.over(ours, run.id)
                    after.callback(stream.abort)
                    await self.handed.hand(stream)
                    yield task
                finally:
                    task.kill()
                    with trio.CancelScope(shield=True):
                        await task.gone.wait()


@asynccontextmanager
async def nodes_here(
    system: ActorSystem,
    n: int,
    app: Any = "tests.actors.nodes.apps:app",
    *,
    settings: NodeSettings = SETTINGS,
    names: Sequence[str] | None = None,
    body: Callable[..., Awaitable[None]] = run_node,
    busy: float = 0.0,
) -> AsyncIterator[tuple[Nodes, list[Task]]]:
    """Run nodes as tasks; yields the fleet, and the tasks in the order of their starts.

    Args:
        system: the driver's.
        n: how many nodes.
        app: theirs.
        settings: theirs.
        names: theirs.
        body: what they do, by default what nodes do.
        busy: seconds before the driver turns to a process that it has started.
    """
    fleet = Fleet.of(system)
    handed = unix.HandedListener(100)
    launcher = InProcess(handed, body, busy, f"aqueduct+memory://driver.{len(fleet.members)}")
    async with (
        fleet.listen(launcher.driver_url),
        fleet.serve(partial(listen_over, handed, QMUX)),
        fleet.nodes(n, app, launcher, names, settings),
    ):
        yield fleet, launcher.tasks
