"""`Node`: the driver's actor for one node, from the start of its process to its end; and `Launcher`, which starts processes.

* The actor enters its process as a context. However the actor ends or restarts, the process is gone before the next one starts.
* The end of the process ends the actor as `Normal` if the node was told to drain. Otherwise the actor fails with `NodeLost`, and its
  supervisor decides. A node whose app was never ready is not restarted: the caller that started it gets the error.
* A process that has lost its connection has `NodeSettings.drain_timeout` seconds to end its actors and say why, and `NodeSettings.kill_after`
  seconds more. Then it is killed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs
import trio

from levada.actors.aqueduct.schema import compare_classes, schemas
from levada.framework import Asks, Down, Failed, Normal, Reason, Ref, Reply, Shutdown, handles, schema_fingerprint
from levada.framework.embedding import UntracedActor, release
from levada.framework.text import printable

from .heartbeat import ORPHANED
from .messages import (
    CONTROL,
    AppFailed,
    Drain,
    Hello,
    Imported,
    Leaving,
    Member,
    MemberState,
    NodeLost,
    NodeRefused,
    Ready,
    Welcome,
)
from .settings import NodeSettings

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["DrainNode", "FleetNode", "Greet", "Launcher", "Node", "Process", "Run", "control_schema", "how_it_ended"]

logger = logging.getLogger("levada.actors.nodes")

_RECENT: Final = 10.0  # seconds for which the last lines of a node that is up may say why it ends
_EXPLAINED: Final = 5.0  # seconds to find out why a node is late

_LAST_WORDS: Final = 1.0  # seconds

_REMEDIES: Final = {
    errno.EMFILE: ": raise the limit of open files (ulimit -n)",
    errno.EAGAIN: ": raise the limit of processes and threads (ulimit -u)",
}


Classes: TypeAlias = dict[str, list[tuple[str, str, bool]]]
"""Message classes, as `levada.framework.codec.schema_of` describes them."""


def control_schema() -> str:
    """Return the fingerprint of the messages between drivers and nodes."""
    return schema_fingerprint(CONTROL)


@attrs.frozen
class Run:
    """One start of a node."""

    name: str
    """The node's name."""
    index: int
    """The node's number in the fleet."""
    number: int
    """The number of this start, from 0."""

    @property
    def id(self) -> str:
        """The name under which its connection authenticates (`levada.framework.Identity.name`): ``"n0#2"``."""
        return f"{self.name}#{self.number}"


class Process(Protocol):
    """The process of a node: a child process, or a task of Spark."""

    @property
    def silence(self) -> float:
        """Seconds since its last heartbeat; 0 if it has none."""
        ...

    def last_lines(self, within: float) -> list[str]:
        """Return the last lines of its output of the last `within` seconds, for errors; none if they are not known."""
        ...

    async def trouble(self) -> str:
        """Return a likely reason why it did not say hello in time, for errors; empty if nothing is known."""
        ...

    async def ended(self) -> NodeLost:
        """Wait until it has ended. Return how it ended as an error, which the caller raises if the end was not wanted."""
        ...

    def terminate(self) -> None:
        """Ask it to end with SIGTERM or the like, because its connection does not help. Does nothing if it has ended."""
        ...

    def kill(self) -> None:
        """Kill it. Does nothing if it has ended."""
        ...


def how_it_ended(code: int, node: str) -> NodeLost:
    """Return how a process ended as an error, by its exit code, which is negative for a signal."""
    if code < 0:
        return NodeLost(f"was killed by {_signal_name(-code)}", node=node, signal=-code)
    why = ", because its connection with this process was lost" if code == ORPHANED else ""
    return NodeLost(f"ended with exit code {code}{why}", node=node, exit_code=code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Launcher(Protocol):
    """Starts the processes of nodes."""

    @property
    def driver_url(self) -> str:
        """The URL at which the driver listens when these nodes claim its refs."""
        ...

    def listen_url(self, run: Run) -> str:
        """Return the URL at which a node listens for other members."""
        ...

    def start(self, run: Run) -> AbstractAsyncContextManager[Process]:
        """Start a process. Leaving the context kills it if it still runs, and waits until it has ended.

        Its connection has to authenticate as `Run.id`.

        Raises:
            NodeLost, OSError: it cannot be started; the text says why.
        """
        ...


@attrs.define(eq=False)
class FleetNode:
    """A node of a fleet, through all its starts."""

    name: str
    index: int
    app: str
    launcher: Launcher
    settings: NodeSettings
    starts: int = 0
    """How often its process was started."""
    begun: bool = False
    """Whether its app has ever been ready."""

    @property
    def run(self) -> Run:
        """Its current start, or the last one."""
        return Run(self.name, self.index, self.starts - 1)

    ref: Ref[Any] | None = None
    """Its `Node` actor."""
    control: Ref[Any] | None = None
    """The control actor in its process, while it is up."""
    imported: bool = False
    """Whether its process, while it is up, has imported the app's module, so that actors can be started there."""
    listeners: list[str] = attrs.field(factory=list)
    """The URLs that its app serves, or served before it went down."""
    classes: dict[str, list[tuple[str, str, bool]]] = attrs.field(factory=dict)
    """Its message classes, or those that it had before it went down, see `Ready`."""
    error: NodeLost | None = None
    """Why it could not start."""
    closed: bool = False
    """Whether the block that started it has ended, so that it does not restart."""
    lock: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while a caller drains or restarts it."""


def _refused(name: str, error: OSError | ValueError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{name} cannot be started: {error}{remedy}"


@attrs.frozen
class Greet(Asks[Welcome | NodeRefused]):
    """A hello has arrived over the connection of one start."""

    run: str
    hello: Hello


@attrs.frozen
class DrainNode:
    """Drain the node, then end."""


@attrs.frozen
class _Ended:
    how: NodeLost


@attrs.frozen
class _TooLate:
    """The node did not become ready within `NodeSettings.start_timeout`."""


@attrs.frozen
class _Look:
    """Check the heartbeat."""


@attrs.frozen
class _Terminate:
    """The node did not drain in time: send SIGTERM."""


@attrs.frozen
class _Kill:
    """The node did not end: send SIGKILL."""


def _misfits(name: str, classes: Classes, up: Mapping[str, Classes]) -> tuple[str, list[str]]:
    """Compare the message classes of a node that starts with the classes of the driver and of the nodes that are up.

    A class may have grown: by fields at the end that have defaults. A class that only one side has is no difference.

    Returns:
        The first difference that cannot work, empty if there is none; and the fields that are renamed.
    """
    renamed: dict[str, None] = {}
    for other, known in {"the driver": schemas(classes), **up}.items():
        errors, remarks = compare_classes(known, classes, f"in {other}", f"in {name}")
        if errors:
            return printable(errors[0], 1000), []
        renamed |= dict.fromkeys(remarks)
    return "", [printable(text) for text in renamed]


class Node(UntracedActor[Any]):
    """One node: starts its process, admits it, watches it and ends it."""

    fleet: Fleet
    place: FleetNode

    def __attrs_post_init__(self) -> None:
        self.state = MemberState.STARTING
        self.process: Process | None = None
        self.greeted = False
        self.was_up = False
        self.up_since = math.inf
        self.reason: Reason = Shutdown()
        """Why the process ends; for the directory."""
        self.cut_off: Reason | None = None
        """The same, if it was to drain and did not in order, or not in time."""
        self.place.starts += 1
        self.run_of = self.place.run

    @property
    def settings(self) -> NodeSettings:
        """How the node behaves."""
        return self.place.settings

    async def started(self) -> None:
        """Start the process."""
        place, settings = self.place, self.settings
        member = Member(
            place.name, place.index, b"", MemberState.STARTING, 0, "", "", self.system.platform.time(), self.run_of.number
        )  # fmt: skip
        self.fleet.directory.change(member)
        try:
            with trio.fail_after(settings.start_timeout):
                self.process = await self.enter(self._process())
        except trio.TooSlowError:
            self._fail(self._lost(f"was not started within {settings.start_timeout:g} s (NodeSettings.start_timeout)"))
            return
        except (OSError, ValueError, NodeLost) as error:  # a variable of the environment may be impossible
            self._fail(error if isinstance(error, NodeLost) else NodeLost(_refused(place.name, error), node=place.name))
            return
        self.start_soon(self._wait, self.process)
        self.timers.once("start", settings.start_timeout, _TooLate())

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        try:
            async with self.place.launcher.start(self.run_of) as process:
                yield process
        finally:
            self.place.control, self.place.imported = None, False
            self.fleet.cut(self.run_of)
            self._change(MemberState.DOWN, self.cut_off or self.reason)

    async def _wait(self, process: Process) -> None:
        how = await process.ended()
        if self.place.control is not None:
            # Read everything that the process has sent. A child of the process that keeps the connection open delays this by 1 s at most.
            with trio.move_on_after(_LAST_WORDS):
                await self.place.control.terminated()
        self.ref.tell(_Ended(how))

    def _change(self, state: MemberState, reason: Reason | None = None, **more: object) -> None:
        self.state = state
        directory = self.fleet.directory
        directory.change(directory.renew(self.place.name, state=state, **more), reason)

    def _fail(self, error: NodeLost) -> None:
        """End this start with an error. The supervisor restarts the node or gives up; if the node was never ready, the caller gets the error."""
        self.reason = Failed(error)
        if self.place.begun:
            logger.warning("%s", error, extra={"node": self.place.name, "event": "node_lost"})
            # Not raised: the traceback would be this file's.
            release(self, self.reason)
            return
        self.place.error = error
        self.fleet.directory.wake()
        self.stop()

    def _lost(self, what: str, how: NodeLost | None = None) -> NodeLost:
        # An old traceback of a node that is up is not why it ends now.
        within = _RECENT if self.was_up else math.inf
        lines = [] if self.process is None else self.process.last_lines(within)
        said = f"; its last lines: {' | '.join(lines)}" if lines else ""
        error = NodeLost(f"{self.place.name} {what}{said}", node=self.place.name)
        return error if how is None else attrs.evolve(error, exit_code=how.exit_code, signal=how.signal)

    @handles
    def greet(self, m: Greet) -> Welcome | NodeRefused:
        """Answer the node's hello."""
        hello, place, settings = m.hello, self.place, self.settings
        if m.run != self.run_of.id or self.state is not MemberState.STARTING:
            return NodeRefused(f"{m.run} is not expected: {place.name} is {self.state.value}")
        if self.greeted:
            return NodeRefused(f"{m.run} has said hello before")
        if hello.schema != control_schema():
            error = self._lost(
                f"runs levada {printable(hello.version)} on Python {printable(hello.python)}, whose control messages are not those "
                "of this process: install the same version on both sides"
            )
            self._fail(error)
            return NodeRefused(str(error))
        self.greeted = True
        place.control = hello.control
        self.watch(hello.control)
        self._change(MemberState.STARTING, node_id=hello.node_id, pid=hello.pid, host=printable(hello.host))
        affinity = settings.affinity
        return Welcome(
            name=place.name,
            index=place.index,
            app=place.app,
            path=[os.fsencode(str(entry)) for entry in sys.path],
            log_level=logging.getLogger().getEffectiveLevel(),
            drain_timeout=settings.drain_timeout,
            silence=settings.silence,
            beat=settings.beat,
            nice=settings.nice,
            affinity=list(affinity[place.index % len(affinity)]) if affinity else [],
            rlimits=dict(settings.rlimits),
            members=self.fleet.directory.members,
            listen=place.launcher.listen_url(self.run_of),
            driver=self.fleet.node_id,
            driver_url=place.launcher.driver_url,
            node=self.ref,
            coordinator=self.fleet.coordinator,
        )

    def _is_mine(self) -> bool:
        peer = self.peer
        return peer is not None and peer.identity is not None and peer.identity.name == self.run_of.id

    @handles
    def imported(self, m: Imported) -> str:
        """Take orders for the node from now on."""
        refusal, _ = self._refusal(m.classes)
        if not refusal and self.state is MemberState.STARTING:
            self.place.imported = True
            self._change(MemberState.STARTING, url=m.url)
        return refusal

    def _refusal(self, classes: Classes) -> tuple[str, list[str]]:
        """Return why a node that starts cannot go on: the others could not read its messages, or it theirs. Also return what is renamed."""
        if self._is_mine() and self.state is MemberState.DRAINING:
            return "", []  # it was told to drain, and does so now
        if not self._is_mine() or self.state is not MemberState.STARTING:
            return f"{self.place.name} is {self.state.value}", []
        misfit, renamed = _misfits(self.place.name, classes, {each.name: each.classes for each in self._up()})
        if misfit:
            error = self._lost(f"has another version of a message class, and the two cannot work together: {misfit}")
            self._fail(error)
            return str(error), []
        return "", renamed

    def _up(self) -> list[FleetNode]:
        return [each for each in self.fleet.places if self.fleet.directory[each.name].state is MemberState.UP]

    @handles
    def ready(self, m: Ready) -> str:
        """Take the node as up. The app may have imported more message classes since it was imported."""
        refusal, renamed = self._refusal(m.classes)
        if refusal or self.state is MemberState.DRAINING:
            return refusal
        for text in renamed:
            logger.warning("message classes differ: %s", text, extra={"node": self.place.name, "event": "schema"})
        self.timers.cancel("start")
        if self.settings.hang_timeout is not None:
            self.up_since = trio.current_time()
            self.timers.every("look", self.settings.beat, _Look())
        self.place.begun = self.was_up = self.place.imported = True
        # One object for all nodes of a version.
        self.place.classes = next((each.classes for each in self._up() if each.classes == m.classes), m.classes)
        self.place.listeners = m.listeners
        self._change(MemberState.UP, url=m.url)
        return ""

    @handles
    def app_failed(self, m: AppFailed) -> None:
        """The app could not be imported, or has failed."""
        if self._is_mine():
            error = NodeLost(f"{self.place.name} has failed: {printable(m.text)}", node=self.place.name)
            error.add_note(f"In {self.place.name}:\n" + "\n".join(map(printable, m.traceback.splitlines()[-200:])))
            if isinstance(self.reason, Normal):  # it was draining
                level = logging.WARNING if self.was_up else logging.INFO
                logger.log(level, "%s", error, extra={"node": self.place.name, "event": "node_lost"})
                if self.was_up:  # as in `terminate`
                    self.cut_off = Failed(error)
            else:
                self._fail(error)

    @handles
    def leaving(self, m: Leaving) -> None:
        """The process has begun to drain, perhaps because of a signal. It goes on when its supervised actors have moved."""
        if not self._is_mine():
            return
        if self.state is not MemberState.DRAINING:
            self._change(MemberState.DRAINING)
            self.timers.once("terminate", self.settings.drain_timeout, _Terminate())
        self.start_soon(self._let_leave, self.reply_later())

    async def _let_leave(self, reply: Reply[None]) -> None:
        await self.fleet.moved(self.place, self.settings.drain_timeout / 2)
        reply.send(None)

    @handles
    def drain(self, m: DrainNode) -> None:
        """Tell the process to drain."""
        if self.process is None:
            self.stop()  # it could not be started
            return
        self.reason = Normal()
        if self.state is MemberState.DRAINING:
            return
        self.timers.cancel("start")
        control = self.place.control
        self._change(MemberState.DRAINING)
        if control is None:
            self.process.kill()  # it has not connected yet
            return
        if control.is_alive:  # otherwise the process is about to end
            control.tell(Drain())
        self.timers.once("terminate", self.settings.drain_timeout, _Terminate())

    @handles
    def terminate(self, m: _Terminate) -> None:
        """The node did not drain in time."""
        if self.process is not None:
            late = f"has not ended within {self.settings.drain_timeout:g} s (NodeSettings.drain_timeout)"
            if self.was_up:  # otherwise there was no work that it could cut off
                self.cut_off = Failed(NodeLost(f"{self.place.name} {late}", node=self.place.name))
            logger.warning("%s %s: SIGTERM", self.place.name, late)
            self.process.terminate()
            self.timers.once("kill", self.settings.kill_after, _Kill())

    @handles
    def kill(self, m: _Kill) -> None:
        """The node did not end in time."""
        if self.process is not None:
            logger.warning("%s has not ended: SIGKILL", self.place.name)
            self.process.kill()

    @handles
    def ended(self, m: _Ended) -> None:
        """The process has ended."""
        if not isinstance(self.reason, Normal):
            order = ", without an order" if m.how.exit_code == 0 else ""
            self._fail(self._lost(m.how.detail + order, m.how))
            return
        if m.how.exit_code != 0 and self.was_up:
            error = self._lost(f"was draining and {m.how.detail}", m.how)
            self.reason = Failed(error)
            if self.cut_off is None:  # otherwise the log says why already
                logger.warning("%s", error, extra={"node": self.place.name, "event": "node_lost"})
        self.stop()

    @handles
    def disconnected(self, m: Down) -> None:
        """Give the process some time to end, since its connection has ended."""
        if m.ref == self.place.control and "terminate" not in self.timers:
            self.timers.once("kill", self.settings.drain_timeout + self.settings.kill_after, _Kill())

    @handles
    async def too_late(self, m: _TooLate) -> None:
        """The node did not become ready in time."""
        what = "that its app is ready" if self.greeted else "hello"
        trouble = ""
        with trio.move_on_after(_EXPLAINED):
            if self.process is not None and not self.greeted:
                trouble = await self.process.trouble()
        text = f"did not say {what} within {self.settings.start_timeout:g} s (NodeSettings.start_timeout)"
        self._fail(self._lost(f"{text}: {trouble}" if trouble else text))

    @handles
    def look(self, m: _Look) -> None:
        """Kill the process if its heartbeat has stopped."""
        process, limit = self.process, self.settings.hang_timeout
        # A process that starts or ends may send no heartbeat: imports of native code hold the interpreter's lock. Its time is limited anyway.
        if self.state is not MemberState.UP or process is None or limit is None:
            return
        silence = min(process.silence, trio.current_time() - self.up_since)
        if silence > limit:
            self._fail(self._lost(f"hangs: no heartbeat for {silence:.1f} s (NodeSettings.hang_timeout)"))

    def undelivered(self, messages: list[Any]) -> None:
        """Drop messages that arrive after the end."""
