"""A node as a task of Spark: the code that runs in a Python worker of an executor."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final

import attrs
import trio

from levada.actors.app_failures import AppImportFailed
from levada.actors.apps import find
from levada.actors.aqueduct import PeerConfig, connect
from levada.actors.aqueduct.config import dial_carrier
from levada.framework import ActorSystem, OneshotReceiver, OneshotSender, oneshot
from levada.framework.errors import ChannelError, ConfigurationError, ConnectionLost

from .certificates import Carrier, MemberKey, carrier_settings
from .heartbeat import LAST, Heart, exit_within
from .messages import NodeLost, Welcome
from .node_side import run_node
from .spark_gate import CertificateRefused, Certified, Certify
from .spark_links import SparkLinks
from .spark_output import named_output
from .tracing import made_by, resource

__all__ = ["NodeTask"]

PR_SET_PDEATHSIG: Final = 1
"""Source: prctl(2)."""
ANSWERED: Final = 10.0
"""Seconds for each answer of the driver."""


@attrs.frozen(kw_only=True)
class NodeTask:
    """One start of a node, as Spark ships it to an executor. A call runs the node, and returns when it has drained.

    If the node ends otherwise, the call raises or ends the process, so Spark reports it and uses a new process for the next task.
    """

    driver: bytes
    """The driver's node id."""
    gate: str
    """The URL of the listener for certificates."""
    fleet: str
    """The URL of the fleet's listener."""
    heart: tuple[str, int]
    """Host and port of the socket for heartbeats."""
    authority: bytes
    """The certificate to trust, in PEM."""
    carrier: Carrier
    ports: range
    """The ports at which the node may listen."""
    tracing: str = ""
    """The name of the function that makes the node's tracing, see `levada.framework.tracing.Tracing.elsewhere`."""
    run: str = ""
    """`levada.actors.nodes.node.Run.id`."""
    token: bytes = attrs.field(default=b"", repr=False)
    """Proves that this process was started for that run."""

    def __call__(self, _: Any) -> None:
        """Run the node. Spark calls this with the only row of the job."""
        _end_with_daemon()
        process, name = _Process(self), self.run.partition("#")[0]
        if self.tracing:
            os.environ.update(resource(os.environ, name))
        with named_output(name):
            try:
                trio.run(process.run)
            except Exception as error:  # noqa: BLE001 - all of them end the task
                first: BaseException = error
                while isinstance(first, BaseExceptionGroup):
                    first = first.exceptions[0]
                sys.stderr.write(f"ended: {first}\n")
            else:
                gc.callbacks.append(_end_after_task)
                return
        if process.is_alone:
            os._exit(1)  # the driver has gone, so no process reads the error
        raise first from None  # Spark reports the text, and this process ends


def _end_with_daemon() -> None:
    """Tell the kernel to kill this process when its parent ends, Spark's fork daemon, without which Spark cannot kill a worker.

    Raises:
        NodeLost: the daemon has already ended.
    """
    # SIGKILL, because this process may be stopped or busy. The daemon is the leader of the process group of its workers.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != os.getpgid(0):
        raise NodeLost("Spark's daemon for Python workers has ended")


def _end_after_task(phase: str, info: Mapping[str, int]) -> None:
    """End this process after the task's result was delivered, so that the next node gets a new process.

    Spark reuses workers for further tasks, with all modules and globals of this node. Between two tasks ``manager`` in ``pyspark/daemon.py``
    calls `gc.collect` in this process, and Spark tolerates that the worker ends then.
    """
    frame = inspect.currentframe()
    if frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name == "manager":
        os._exit(0)


class _Process:
    """This process as a node."""

    def __init__(self, task: NodeTask) -> None:
        self.is_alone = False
        """Whether the driver has gone."""
        self._task = task
        self._drain_timeout = 1.0
        self._life = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._heart: Heart | None = None
        self._signal: signal.Signals | None = None

    async def run(self) -> None:
        """Run the node to its end.

        Raises:
            ConnectionLost: the driver cannot be reached, or has gone.
            NodeLost: the driver refused this node, the app failed, or a signal ended the node.
        """
        task, key, node_id = self._task, MemberKey(), secrets.token_bytes(16)
        self._token = trio.lowlevel.current_trio_token()
        certified, address = await self._certified(node_id, key)
        self._heart = Heart(await self._beating(certified.heart), self._driver_lost)
        try:
            with key.with_certificate(certified.certificate) as certificate, self._life:
                links = SparkLinks(
                    kind=task.carrier,
                    authority=task.authority,
                    certificate=certificate,
                    driver=task.driver,
                    bind=address,
                    ports=task.ports,
                )
                await self._live(node_id, links)
        finally:
            self._heart.close()
        if self._life.cancelled_caught:
            raise ConnectionLost("the driver has gone, or a second signal came")
        if self._signal is not None:
            raise NodeLost(f"was told to end by {self._signal.name}")

    async def _live(self, node_id: bytes, links: SparkLinks) -> None:
        task, end = self._task, trio.Event()
        scheme = task.fleet.partition("://")[0]
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals, end)
                await run_node(
                    partial(dial_carrier, task.fleet, PeerConfig(carrier=links.carrier(task.driver))),
                    name=task.run,
                    end=end,
                    node_id=node_id,
                    tracing=made_by(task.tracing),
                    links={scheme: links},
                    settle=self._settle,
                    lost=self._cut_off,
                )
                nursery.cancel_scope.cancel()

    async def _certified(self, node_id: bytes, key: MemberKey) -> tuple[Certified, str]:
        """Get a certificate. Return it, and this machine's address on the path to the driver."""
        task = self._task
        config = PeerConfig(carrier=carrier_settings(task.carrier, task.authority, dials=task.driver))
        answer: OneshotSender[Certified | CertificateRefused]
        answered: OneshotReceiver[Certified | CertificateRefused]
        answer, answered = oneshot(Certified | CertificateRefused)
        found: Certified | CertificateRefused | None = None
        address = ""
        with trio.move_on_after(ANSWERED), answered:
            async with (
                ActorSystem(task.run) as system,
                connect(system, task.gate, Certify, token=task.token, config=config) as peer,
            ):
                address = peer.info.local.rpartition(":")[0].strip("[]")
                await peer.send(Certify(node_id, key.public, _attempt(), answer))
                try:
                    found = await answered
                except ChannelError as error:
                    raise ConnectionLost(f"the driver at {task.gate} has not answered: {error}") from error
        if found is None:
            raise ConnectionLost(f"the driver at {task.gate} has not answered within {ANSWERED:g} s")
        if isinstance(found, CertificateRefused):
            raise NodeLost(f"{task.run} is refused by its driver: {found.text}")
        return found, address

    async def _beating(self, token: bytes) -> socket.socket:
        host, port = self._task.heart
        try:
            with trio.fail_after(ANSWERED):
                stream = await trio.open_tcp_stream(host, port)
                with stream.socket:
                    await stream.send_all(token)
                    return socket.socket(fileno=stream.socket.detach())
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            raise ConnectionLost(f"no connection for heartbeats to the driver at {host}:{port}: {error}") from error

    def _settle(self, welcome: Welcome) -> None:
        assert self._heart is not None
        self._drain_timeout = welcome.drain_timeout
        self._heart.settle(welcome.beat, welcome.silence)
        try:
            find(welcome.app)
        except ConfigurationError as error:
            if isinstance(error, AppImportFailed) and not isinstance(error.__cause__, ImportError):
                raise
            raise ConfigurationError(
                f"{error}: executors import the app from their own Python; install its modules there, "
                "or ship them with spark.sparkContext.addPyFile(…)"
            ) from error

    def _driver_lost(self, reason: str) -> None:
        """End without draining; called in the heart's thread."""
        self._cut_off(self._drain_timeout)
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._life.cancel)
            except trio.RunFinishedError:
                pass

    def _cut_off(self, within: float) -> None:
        self.is_alone = True
        exit_within(min(within, LAST))

    async def _obey(self, signals: AsyncIterator[int], end: trio.Event) -> None:
        async for number in signals:
            if end.is_set():
                self._life.cancel()
            self._signal = signal.Signals(number)
            end.set()


def _attempt() -> int:
    """Return Spark's number of this attempt at the task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()
