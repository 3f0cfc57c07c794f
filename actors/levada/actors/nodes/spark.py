"""`spark_nodes`: nodes that are tasks of Spark, which places them.

Each node is a job of one task (`SparkJob`). An actor of the driver starts and watches it, as it would a child process. Spark is the failure
detector: when a node is lost, its job ends with an error. Heartbeats (`levada.actors.nodes.heartbeat`) detect hangs and partitions.
Nodes are admitted by a `Gate`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, Literal

import attrs
import trio

try:
    import cryptography as _  # noqa: F401 - to name the missing package
    from pyspark import SparkContext
    from pyspark.errors import PySparkAttributeError
    from pyspark.sql import SparkSession
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"nodes under Spark need {missing.name}: pip install 'levada[spark,quic]'", name=missing.name
    ) from missing

from levada.actors.aqueduct import Listener, PeerConfig
from levada.actors.aqueduct.config import listen_carrier
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

from .certificates import Authority, Carrier, MemberKey, carrier_settings
from .fleet import Fleet
from .heartbeat import MARGIN, Beats, Pulse
from .messages import NodeLost
from .node import Run
from .nodes import Links, Nodes
from .settings import NodeSettings
from .spark_gate import Gate, Ticket, listening_in, member_url, open_gate, port_of
from .spark_job import SparkJob, room
from .spark_links import SparkLinks
from .spark_settings import check_settings, cores_of_a_node
from .spark_task import NodeTask
from .tracing import tracing_in_nodes

__all__ = ["SparkTasks", "TaskProcess", "spark_nodes"]

logger = logging.getLogger("levada.actors.nodes")

CANCELLED: Final = 10.0
"""Seconds for Spark to end a cancelled job; in trials it took 0.5 at most."""

_authorities: weakref.WeakKeyDictionary[Fleet, Authority] = weakref.WeakKeyDictionary()
"""The authority of each fleet, shared by all blocks so that their nodes know each other. Only `spark_nodes` adds entries."""


@asynccontextmanager
async def spark_nodes(
    system: ActorSystem,
    spark: SparkSession,
    n: int,
    app: Any,
    *,
    names: Sequence[str] | None = None,
    settings: NodeSettings | None = None,
    cores: int | None = None,
    carrier: Carrier = "tls",
    ports: range = range(1),
) -> AsyncIterator[Nodes]:
    """Start nodes as tasks of Spark. The block begins when the app is ready on all of them.

    Spark decides where each node runs, and a node holds its slot until it ends. Leaving the block drains all nodes at the same time; after
    an exception or a cancellation they are killed.

    Args:
        system: has been entered. It becomes the driver of a fleet; a system has one fleet.
        spark: a classic session, whose driver is this process.
        n: the number of nodes.
        app: an async generator function of an actor system, as for ``levada serve``, that the executors can import
            (``SparkContext.addPyFile``); or its ``"module:name"``.
        names: the names of the nodes; by default ``"n0"``, ``"n1"`` and so on.
        settings: how the nodes start, end and restart. Here ``hang_timeout=None`` means ``silence + 5`` seconds, because only heartbeats tell
            that a machine is out of reach. ``nice``, ``affinity``, ``rlimits`` and ``env`` are for child processes only.
        cores: the cores that each node takes of its executor. None: more than half of ``spark.executor.cores``, so that no executor gets
            two nodes; if that setting is not known, as many as any task.
        carrier: the carrier of all connections: QMux over TLS, or QUIC. Both are mutual TLS, with certificates in memory.
        ports: the ports for the driver and the nodes, for firewalls; ``range(1)`` takes free ones. The driver needs four, each node one.

    Yields:
        The fleet.

    Raises:
        ConfigurationError: settings of Spark would harm nodes, with the names and the remedies; there are too few slots; the session is one of
            Spark Connect; the app cannot be imported elsewhere; a name is taken; no port is free; an extra is not installed.
        NodeLost: a node could not start; the text says why.

    Example:
        ::

            spark = session(master="local[6]")
            async with ActorSystem() as system, spark_nodes(system, spark, 2, "shop.workers:app") as nodes:
                worker = await nodes.spawn(Worker, on="any")
    """
    context = _context_of(spark)
    conf: dict[str, str] = dict(context.getConf().getAll())
    check_settings(conf["spark.master"], conf, n)
    cores = cores_of_a_node(conf["spark.master"], conf, cores)
    settings = settings or NodeSettings()
    if settings.hang_timeout is None:
        settings = attrs.evolve(settings, hang_timeout=settings.silence + MARGIN)
    fleet = Fleet.of(system)
    authority, key = _authorities.setdefault(fleet, Authority()), MemberKey()
    host = conf["spark.driver.host"]
    bind = conf.get("spark.driver.bindAddress", host)
    scheme = member_url(carrier, host, 0).partition("://")[0]
    with (
        Pulse(settings.beat) as pulse,
        key.with_certificate(authority.sign(key.public, fleet.node_id)) as certificate,
    ):

        def settle(clients: Literal["none", "required"]) -> PeerConfig:
            return PeerConfig(
                carrier=carrier_settings(carrier, authority.certificate, certificate=certificate, clients=clients)
            )

        def listen(port: int) -> AbstractAsyncContextManager[Listener]:
            listening = partial(listen_carrier, member_url(carrier, bind, port), settle("required"))
            return fleet.serve(listening, gate.by_certificate)

        links = SparkLinks(
            kind=carrier,
            authority=authority.certificate,
            certificate=certificate,
            driver=fleet.node_id,
            bind=bind,
            ports=ports,
        )
        async with (
            _linked(fleet, scheme, links),
            open_gate(system, authority, settle("none"), carrier, host, bind, ports) as gate,
            listening_in(ports, listen) as listener,
            fleet.listen(f"{scheme}://") as members,
        ):
            task = NodeTask(
                driver=fleet.node_id,
                gate=gate.url,
                fleet=member_url(carrier, host, port_of(listener.url)),
                heart=gate.heart,
                authority=authority.certificate,
                carrier=carrier,
                ports=ports,
                tracing=tracing_in_nodes(system),
            )
            driver_url = member_url(carrier, host, port_of(members.url))
            launcher = SparkTasks(context, gate, pulse, driver_url, task, settings, cores)
            async with fleet.nodes(n, app, launcher, names, settings):
                yield fleet


@asynccontextmanager
async def _linked(fleet: Fleet, scheme: str, links: Links) -> AsyncIterator[None]:
    """Connect members with these links while the block lasts; blocks may be nested."""
    before = fleet.links.get(scheme, links)
    fleet.links[scheme] = links
    try:
        yield
    finally:
        fleet.links[scheme] = before


def _context_of(spark: SparkSession) -> SparkContext:
    """Return the context of a classic session."""
    try:
        return spark.sparkContext
    except PySparkAttributeError as error:
        raise ConfigurationError(
            "nodes need a classic session of Spark, whose driver is this process; this is a session of Spark Connect"
        ) from error


@attrs.define(eq=False)
class SparkTasks:
    """Starts nodes as jobs of one task; a `levada.actors.nodes.node.Launcher`.

    Args:
        context: the context of the application.
        gate: admits their processes.
        pulse: exchanges heartbeats with them.
        driver_url: the URL at which the driver listens for claims of its refs.
        task: the task to run, without the fields of a single start.
        settings: the settings of the nodes.
        cores: the cores of each task; None: Spark's default.
    """

    context: SparkContext
    _gate: Gate
    _pulse: Pulse
    driver_url: str
    _task: NodeTask
    _settings: NodeSettings
    cores: int | None
    running: set[TaskProcess] = attrs.field(factory=set, init=False)
    """The processes that have connected."""

    def listen_url(self, run: Run) -> str:
        """Return the driver's URL. A node uses only its scheme, because the node alone knows its own address."""
        return self.driver_url

    @asynccontextmanager
    async def start(self, run: Run) -> AsyncIterator[TaskProcess]:
        """Submit a job; see `Launcher.start`."""
        with self._gate.expect(run.id) as ticket:
            # The name of the group is in Spark's logs, and is no secret.
            group = f"levada-{self._task.driver.hex()[:8]}-{run.id}-{secrets.token_hex(4)}"
            task = attrs.evolve(self._task, run=run.id, token=ticket.token)
            job = SparkJob(self.context, group, f"levada node {run.name}", task, self.cores)
            try:
                await job.submit()
            except ConfigurationError as error:
                raise NodeLost(f"{run.name} cannot be started: {error}", node=run.name) from error
            process = TaskProcess(self, job, ticket, run.name)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.listen, self._pulse)
                nursery.start_soon(process.obey)
                try:
                    yield process
                finally:
                    with trio.CancelScope(shield=True):
                        await process.gone(self._settings.silence + MARGIN)
                    nursery.cancel_scope.cancel()


class TaskProcess:
    """The process of a node, and its job; a `levada.actors.nodes.node.Process`."""

    def __init__(self, launcher: SparkTasks, job: SparkJob, ticket: Ticket, name: str) -> None:
        self._launcher = launcher
        self._job = job
        self._ticket = ticket
        self._name = name
        self._beats: Beats | None = None
        self._killed = trio.Event()

    @property
    def _where_it_logs(self) -> str:
        return f"its log is in the stderr of its executor, in lines that begin with {self._name}:"

    @property
    def silence(self) -> float:
        """Seconds since its last heartbeat."""
        return 0.0 if self._beats is None else self._beats.silence

    def last_lines(self, within: float) -> list[str]:
        """Return nothing: the output is in the log of the executor."""
        return []

    async def listen(self, pulse: Pulse) -> None:
        """Exchange heartbeats once the process has connected."""
        await self._ticket.came.wait()
        assert self._ticket.heart is not None
        self._beats = pulse.listen(self._ticket.heart)
        self._launcher.running.add(self)

    async def ended(self) -> NodeLost:
        """Wait until Spark reports its end, or starts its task again."""
        how: NodeLost | None = None

        async def first(wait: Callable[[], Awaitable[NodeLost]]) -> None:
            nonlocal how
            how = await wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first, self._spark_says)
            nursery.start_soon(first, self._spark_retries)
        assert how is not None
        return how

    async def _spark_says(self) -> NodeLost:
        error = await self._job.ended()
        if error is None:
            return NodeLost("ended", node=self._name, exit_code=0)
        return NodeLost(f"has ended; Spark says: {error}; {self._where_it_logs}", node=self._name)

    async def _spark_retries(self) -> NodeLost:
        await self._ticket.superseded.wait()
        return NodeLost(f"has ended; Spark has tried its task again; {self._where_it_logs}", node=self._name)

    async def trouble(self) -> str:
        """Return a likely reason why it did not say hello; empty if nothing is known.

        Cancellation:
            has no effect on the process.
        """
        launcher = self._launcher
        if self._ticket.node_id or await self._job.is_running():
            return f"its task runs; {self._where_it_logs}"
        found = await room(launcher.context, launcher.cores, len(launcher.running))
        return found.describe(str(launcher.context.master))

    def terminate(self) -> None:
        """Tell Spark to cancel the task; Spark kills the process some seconds later."""
        self.kill()

    def kill(self) -> None:
        """Close the heartbeats, which the process notices, and let Spark cancel the task and kill the process."""
        self._killed.set()

    async def obey(self) -> None:
        """Wait for `kill`, and carry it out."""
        await self._killed.wait()
        if self._ticket.heart is not None:
            with contextlib.suppress(OSError):
                self._ticket.heart.shutdown(socket.SHUT_WR)
        await self._job.cancel()

    async def gone(self, longest: float) -> None:
        """Kill the process, and wait until its connection closes. In trials Spark needed 3.5 seconds at most.

        Args:
            longest: the seconds after the driver's last heartbeat within which a process that is out of reach has certainly ended.
        """
        self.kill()
        with trio.move_on_after(CANCELLED) as scope:
            await self._job.ended()
        if scope.cancelled_caught:
            logger.error("%s: Spark did not end its job within %g s", self._name, CANCELLED)
        heart = self._ticket.heart
        if heart is not None:
            with trio.move_on_after(longest):
                await _hung_up(heart)
        self._launcher.running.discard(self)
        if self._beats is not None:
            self._beats.close()
        elif heart is not None:
            heart.close()


async def _hung_up(connection: socket.socket) -> None:
    """Wait until the other end of a socket is closed; the kernel closes it when its process is killed."""
    while True:
        await trio.lowlevel.wait_readable(connection)
        try:
            if not connection.recv(4096):
                return
        except BlockingIOError:
            pass  # the heartbeat thread was faster
        except OSError:
            return
