"""Nodes as hosts of a simulated network, in virtual time: the driver's side and the nodes' are those of `spark_nodes`, but for processes.

`Task` stands for a process and for the job of Spark that it is the task of. Heartbeats are datagrams, by the rules of
`levada.actors.nodes.heartbeat`: the driver hears a node or counts its silence, and a node that does not hear the driver for long ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from tests.actors.simulated import SimConfig
from tests.simnet import SimNet

from levada.actors.authentication import Credentials
from levada.actors.nodes import NodeLost, Nodes, NodeSettings, Run
from levada.actors.nodes.certificates import NEVER
from levada.actors.nodes.fleet import Fleet
from levada.actors.nodes.heartbeat import MARGIN
from levada.actors.nodes.node_side import run_node
from levada.actors.nodes.nodes import OwnLinks
from levada.framework import ActorSystem, Identity, restart
from levada.framework.errors import ConnectionLost
from levada.transports import carriers
from levada.transports.quic import QuicConfig

__all__ = ["DRIVER", "SILENCE", "Hosts", "Task", "nodes_on_network"]

SILENCE = 10.0
DRIVER = "driver"
HELLO, MEMBERS, BEATS = 4000, 5000, 3000  # ports
SETTINGS = NodeSettings(
    start_timeout=60.0,
    drain_timeout=2.0,
    silence=SILENCE,
    hang_timeout=SILENCE + MARGIN,
    restart=restart("permanent", max=1000, initial_backoff=0.5, max_backoff=0.5),
)


class Task:
    """A node that is a host; see `levada.actors.nodes.node.Process`."""

    def __init__(self, hosts: Hosts, run: Run) -> None:
        self.run = run
        self.host = f"{run.name}.{run.number}"
        self.end = trio.Event()
        self.gone = trio.Event()
        """Set when the process has ended."""
        self.heard = trio.current_time()
        """When the driver last heard it."""
        self._hosts = hosts
        self._scope = trio.CancelScope()
        self._how = NodeLost("ended with exit code 0", exit_code=0)
        self._known = trio.Event()
        """Set when Spark says that it has ended."""

    async def live(self) -> None:
        """Run the process."""
        hosts, config = self._hosts, self._hosts.config(self.host)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat)
                    opens = partial(carriers.dial, f"simnet://{DRIVER}:{HELLO}", config)
                    links = {"aqueduct+simnet": OwnLinks(config)}
                    try:
                        await run_node(opens, name=self.run.name, end=self.end, links=links)
                    except* (NodeLost, ConnectionLost):
                        self._how = NodeLost("ended with exit code 1", exit_code=1)
                    nursery.cancel_scope.cancel()
            if self._scope.cancelled_caught:
                self._how = NodeLost("was killed by SIGKILL", signal=9)
        finally:
            self.gone.set()
        while hosts.is_cut_off(self.host):  # noqa: ASYNC110 - Spark does not hear of it; a partition has no event
            await trio.sleep(0.5)
        self._known.set()

    async def _beat(self) -> None:
        heard = trio.current_time()

        async def listen() -> None:
            nonlocal heard
            while True:
                await port.receive()
                heard = trio.current_time()

        port = self._hosts.net.port(self.host, BEATS)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                while trio.current_time() - heard <= SILENCE:
                    port.send([(b"\\0", (DRIVER, BEATS))])
                    await trio.sleep(SETTINGS.beat)
                self.die()
        finally:
            port.close()

    @property
    def silence(self) -> float:
        """Seconds since the driver last heard it."""
        return trio.current_time() - self.heard

    def die(self) -> None:
        """End at once, as if killed on its own host."""
        self._scope.cancel()

    def last_lines(self, within: float) -> list[str]:
        """Return nothing: it writes none."""
        return []

    async def trouble(self) -> str:
        """Nothing is known."""
        return ""

    async def ended(self) -> NodeLost:
        """Wait until Spark says that it has ended."""
        await self._known.wait()
        return self._how

    def terminate(self) -> None:
        """Kill it, as Spark does."""
        self.kill()

    def kill(self) -> None:
        """Send it no more heartbeats, and have Spark kill it, if Spark can reach it; Spark's own view of the job ends in any case."""
        self._hosts.beating.pop(self.host, None)
        if not self._hosts.is_cut_off(self.host):
            self.die()


class Hosts:
    """Starts nodes as hosts; a `levada.actors.nodes.node.Launcher`."""

    def __init__(self, nursery: trio.Nursery, net: SimNet, sides: tuple[QuicConfig, QuicConfig]) -> None:
        self.net = net
        self._nursery = nursery
        self.tasks: list[Task] = []
        self.beating: dict[str, Task] = {}
        """Those that the driver exchanges heartbeats with, by host."""
        self.driver_url = f"aqueduct+simnet://{DRIVER}:{MEMBERS}"
        self._sides = sides
        self._apart: set[frozenset[str]] = set()

    def config(self, host: str) -> SimConfig:
        """Return the settings of a host's connections: as in a fleet on Spark, no silence ends them."""
        return SimConfig.of(self.net, host, self._sides, idle_timeout=NEVER)

    def divide(self, *hosts: str) -> None:
        """Cut hosts off from each other."""
        self._apart |= {frozenset((one, other)) for one in hosts for other in hosts if one != other}
        self.net.partition(*hosts)

    def heal(self) -> None:
        """End all partitions."""
        self._apart.clear()
        self.net.heal()

    def is_cut_off(self, host: str) -> bool:
        """Whether the driver cannot reach it."""
        return frozenset((host, DRIVER)) in self._apart

    def task(self, name: str) -> Task:
        """Return the present process of a node."""
        return [task for task in self.tasks if task.run.name == name][-1]

    def living(self) -> list[str]:
        """The hosts whose processes run, and the driver."""
        return [DRIVER, *(task.host for task in self.tasks if not task.gone.is_set())]

    async def beat(self) -> None:
        """Exchange heartbeats with all nodes, for the driver."""
        port = self.net.port(DRIVER, BEATS)

        async def listen() -> None:
            while True:
                for _, (host, _) in await port.receive():
                    if host in self.beating:
                        self.beating[host].heard = trio.current_time()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                while True:
                    port.send([(b"\\0", (host, BEATS)) for host in self.beating])
                    await trio.sleep(SETTINGS.beat)
        finally:
            port.close()

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Know a node by its host."""
        name, _, number = credentials.info.peer.partition(":")[0].rpartition(".")
        return Identity(f"{name}#{number}")

    def listen_url(self, run: Run) -> str:
        """Where a node is to listen."""
        return f"aqueduct+simnet://{run.name}.{run.number}:{MEMBERS}"

    @asynccontextmanager
    async def start(self, run: Run) -> AsyncIterator[Task]:
        """Start a process; see `levada.actors.nodes.node.Launcher`."""
        task = Task(self, run)
        self.tasks.append(task)
        self.beating[task.host] = task
        self._nursery.start_soon(task.live)
        try:
            yield task
        finally:
            task.kill()
            with trio.fail_after(SILENCE + MARGIN, shield=True):  # out of reach, it ends by itself in time
                await task.gone.wait()


@asynccontextmanager
async def nodes_on_network(
    system: ActorSystem, n: int, app: Any, net: SimNet, sides: tuple[QuicConfig, QuicConfig]
) -> AsyncIterator[tuple[Nodes, Hosts]]:
    """Run nodes as hosts."""
    fleet = Fleet.of(system)
    async with trio.open_nursery() as nursery:
        hosts = Hosts(nursery, net, sides)
        config = hosts.config(DRIVER)
        fleet.links["aqueduct+simnet"] = OwnLinks(config)
        listening = partial(carriers.listen, f"simnet://{DRIVER}:{HELLO}", config)
        nursery.start_soon(hosts.beat)
        async with (
            fleet.listen(hosts.driver_url),
            fleet.serve(listening, hosts.authenticate),
            fleet.nodes(n, app, hosts, None, SETTINGS),
        ):
            yield fleet, hosts
            hosts.heal()
        nursery.cancel_scope.cancel()
