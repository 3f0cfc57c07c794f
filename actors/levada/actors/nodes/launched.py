"""`LaunchedProcesses`: nodes as processes that the driver's platform starts, in place of child processes; a `Launcher`.

A node runs in the same interpreter, in surroundings of its own (`levada.framework.platform.Platform.launch`). It is the same program as
`levada.actors.nodes.__main__`, except for what belongs to an interpreter: settings of the process, its output, and the frozen heap.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import attrs
import trio

from levada.framework.errors import ConnectionLost
from levada.framework.platform import Launch, Launched, ProcessExit, Shares, Wire
from levada.transports.carriers import simulated, unix
from levada.transports.carriers.contracts import ByteStream
from levada.transports.qmux import dial_over

from .heartbeat import ORPHANED
from .messages import NodeLost, Welcome
from .node import Run, how_it_ended
from .node_side import run_node
from .nodes import TO_DRIVER
from .settings import NodeSettings
from .tracing import made_by

__all__ = ["LaunchedProcesses"]

logger = logging.getLogger("levada.actors.nodes")

_TO_NODE: Final = 0  # ways of the wires
_TO_DRIVER: Final = 1
_FIRST_BEAT: Final = 1.0  # seconds, until the driver says


@attrs.define(eq=False)
class LaunchedProcesses:
    """Starts nodes as processes of a platform.

    Args:
        launch: starts a process.
        handed: gets the driver's ends of their connections.
        folder: the folder of their sockets.
        settings: the settings of the nodes.
        shares: the addresses that their listeners share; None: none.
        tracing: as of `ChildProcesses`.
    """

    _launch: Launch
    _handed: unix.HandedListener
    _folder: str
    _settings: NodeSettings
    _shares: Shares | None
    _tracing: str

    @property
    def driver_url(self) -> str:
        """Where the driver listens for these nodes."""
        return f"aqueduct+unix://{self._folder}/driver"

    def listen_url(self, run: Run) -> str:
        """Return the URL where a node is to listen."""
        return f"aqueduct+unix://{self._folder}/{run.index}.{run.number}"

    @asynccontextmanager
    async def start(self, run: Run) -> AsyncIterator[Child]:
        """Start a process; see `Launcher.start`."""
        process = self._launch(run.name, lambda exit: node.main(exit), shares=self._shares)
        ours, theirs = simulated.over(process.wire, ("the driver", run.id))
        beats = _Beats(process.heart)
        node = _Node(run.name, self._tracing, theirs, beats)
        child = Child(process, run.name, beats)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat, beats)
            try:
                await self._handed.hand(ours)
                yield child
            finally:
                child.kill()
                with trio.CancelScope(shield=True):
                    await child.ended()
                nursery.cancel_scope.cancel()

    async def _beat(self, beats: _Beats) -> None:
        while True:
            beats.send(_TO_NODE)
            await trio.sleep(self._settings.beat)


class _Beats:
    """The heartbeats of a driver and one node, on a wire of their own."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._heard = [trio.current_time()] * 2
        wire.on_lost = lambda side, why: None  # the connection says so

    def send(self, way: int) -> None:
        """Send a heartbeat one way."""
        self._wire.post(way, self._hear, way)

    def _hear(self, way: int) -> None:
        self._heard[way] = trio.current_time()

    def silence(self, way: int) -> float:
        """Return the seconds since a heartbeat has arrived."""
        return trio.current_time() - self._heard[way]


class Child:
    """A process of a platform; a `levada.actors.nodes.node.Process`."""

    def __init__(self, process: Launched, name: str, beats: _Beats) -> None:
        self._process = process
        self._name = name
        self._beats = beats

    @property
    def silence(self) -> float:
        """Seconds since its last heartbeat."""
        return self._beats.silence(_TO_DRIVER)

    def last_lines(self, within: float) -> list[str]:
        """Return no lines: what it logs is in the log of this interpreter."""
        return []

    async def trouble(self) -> str:
        """Return nothing: an error says more."""
        return ""

    async def ended(self) -> NodeLost:
        """Wait until the process has ended."""
        return how_it_ended(await self._process.wait(), self._name)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


class _Node:
    """A process as a node, from its inside."""

    def __init__(self, name: str, tracing: str, connection: ByteStream, beats: _Beats) -> None:
        self._name = name
        self._tracing = tracing
        self._connection = connection
        self._beats = beats
        self._life = trio.CancelScope()
        self._end = trio.Event()
        self._welcome: Welcome | None = None
        self._lost = ""

    async def main(self, exit: ProcessExit) -> int:
        """Run the node to its end; return the exit code: 0 drained, 1 failed, 70 lost its driver."""
        code = 0
        try:
            with self._life:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat, exit)
                    nursery.start_soon(self._obey, exit)
                    await run_node(
                        partial(dial_over, self._connection, TO_DRIVER),
                        name=self._name,
                        end=self._end,
                        tracing=made_by(self._tracing),
                        settle=self._settle,
                        lost=lambda seconds: exit.exit_within(seconds, ORPHANED),
                    )
                    nursery.cancel_scope.cancel()
        except* ConnectionLost as group:
            self._lost = self._lost or str(group.exceptions[0])
        except* NodeLost:
            code = 1
        if self._lost:
            logger.warning("%s: %s", self._name, self._lost)
            return ORPHANED
        return code

    def _settle(self, welcome: Welcome) -> None:
        self._welcome = welcome

    async def _beat(self, exit: ProcessExit) -> None:
        """Send heartbeats. End without draining when the driver is silent for too long."""
        while True:
            self._beats.send(_TO_DRIVER)
            welcome, silence = self._welcome, self._beats.silence(_TO_NODE)
            if welcome is not None and silence > welcome.silence:
                self._lost = f"nothing was heard from the driver for {silence:.1f} s"
                exit.exit_within(welcome.drain_timeout, ORPHANED)
                self._life.cancel()
            await trio.sleep(_FIRST_BEAT if welcome is None else welcome.beat)

    async def _obey(self, exit: ProcessExit) -> None:
        """Drain at SIGTERM."""
        await exit.terminated.wait()
        self._end.set()
