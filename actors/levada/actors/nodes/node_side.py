"""The node's side of a fleet: it connects to the driver, runs the app, carries out orders, and ends with the connection."""

from __future__ import annotations

import json
import logging
import math
import platform
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio

from levada.actors.app_failures import AppImportFailed, ended_itself, failure_text, own_frames, says_enough
from levada.actors.apps import app_of, find, listed, reloaded
from levada.actors.aqueduct import Peer, connect_over
from levada.actors.aqueduct.schema import schemas
from levada.actors.console import take_snapshot
from levada.actors.metrics.collecting import Metrics
from levada.actors.metrics.nodes import to_json
from levada.actors.protocols import Served
from levada.framework import (
    ActorSystem,
    Failed,
    Normal,
    OneshotReceiver,
    OneshotSender,
    Ref,
    Reply,
    Supervisor,
    __version__,
    child,
    handles,
    oneshot,
)
from levada.framework.embedding import LocalRef, UntracedActor, finish
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ChannelError,
    ConfigurationError,
    ConnectionLost,
    LevadaError,
    NameTaken,
    NameUnknown,
    RemoteFailure,
)
from levada.framework.message import BY_TAG
from levada.framework.supervisor import StartChild
from levada.framework.tracing import Tracing

from .inspection import Watcher
from .messages import (
    AppFailed,
    Changed,
    Drain,
    DrainOf,
    End,
    Finish,
    Hello,
    Imported,
    Join,
    Leaving,
    Look,
    LookupOn,
    Measure,
    MemberState,
    NodeLeaves,
    NodeLost,
    NodeRefused,
    Ready,
    Register,
    Reload,
    Renames,
    Restart,
    Settle,
    SharedChanges,
    Spawn,
    SpawnOn,
    Unregister,
    Watch,
    Welcome,
)
from .node import control_schema
from .nodes import Links, Nodes
from .orders import actor_class, arguments_of, mailbox_of, policy_of

__all__ = ["NodeSide", "run_node"]

logger = logging.getLogger("levada.actors.nodes")

_ERRORS: Final[Mapping[str, Callable[[str], LevadaError]]] = {
    each.__name__: each for each in (ActorStopped, AskTimeout, ConfigurationError, NameTaken, NameUnknown, NodeLost)
}
"""The errors of the driver that a node raises again, by class name."""

T = TypeVar("T")
Opens = Callable[[], AbstractAsyncContextManager[Any]]


async def run_node(
    opens: Opens,
    *,
    name: str,
    end: trio.Event,
    node_id: bytes | None = None,
    tracing: Tracing | None = None,
    links: Mapping[str, Links] = {},
    settle: Callable[[Welcome], None] = lambda _: None,
    ready: Callable[[], None] = lambda: None,
    lost: Callable[[float], None] = lambda _: None,
) -> None:
    """Run one start of a node. Returns when the node has drained.

    Args:
        opens: connects to the driver, as the client of an Aqueduct connection.
        name: the node's name for logs, until the driver has answered.
        end: drains the node when it is set, as an order of the driver does.
        node_id: 16 random bytes, new for each start; None makes them here.
        tracing: the tracing of the node's system.
        links: how to connect to other members, by URL scheme; Unix sockets are always known.
        settle: applies the driver's settings to this process, before the app is imported.
        ready: called when the app has started.
        lost: called when the driver is gone, with the number of seconds within which this process must end.

    Raises:
        ConnectionLost: the driver has ended or cut the connection; the actors have ended without draining.
        NodeLost: the driver refused this node, or the app failed; the driver knows.
    """
    gone = False
    failure: NodeLost | None = None

    async def follow(peer: Peer[Hello], node: _Body) -> None:
        nonlocal gone
        await peer.terminated()
        gone = True
        lost(node.drain_timeout)
        life.cancel()

    with trio.CancelScope() as life:
        async with ActorSystem(name, tracing=tracing) as system:
            side = NodeSide(system, node_id or system.platform.token_bytes(16))
            side.links.update(links)
            async with (
                connect_over(system, opens, Hello, expose=lambda _: True, config=side.config()) as peer,
                trio.open_nursery() as nursery,
            ):
                node = _Body(side, peer, end, settle, ready)
                nursery.start_soon(follow, peer, node)
                failure = await node.run()
                nursery.cancel_scope.cancel()
    if gone:
        raise ConnectionLost("the driver has ended, or has cut the connection")
    if failure is not None:
        raise failure


@attrs.define(eq=False)
class _Body:
    """Runs the app of a node, from its hello to its end."""

    _side: NodeSide
    _peer: Peer[Hello]
    _end: trio.Event
    _settle: Callable[[Welcome], None]
    _ready: Callable[[], None]
    drain_timeout: float = attrs.field(default=1.0, init=False)

    async def run(self) -> NodeLost | None:
        """Run the app until it is to end; return the failure, if any."""
        system, side, failure = self._side.system, self._side, None
        control = system.spawn(Control, side, self._end, name="levada")
        answer: OneshotSender[Welcome | NodeRefused]
        answered: OneshotReceiver[Welcome | NodeRefused]
        answer, answered = oneshot(Welcome | NodeRefused, name="welcome")
        hello = Hello(
            node_id=side.node_id,
            pid=system.platform.pid(),
            host=system.platform.host(),
            python=platform.python_version(),
            version=__version__,
            schema=control_schema(),
            control=control,
            answer=answer,
        )
        try:
            with answer, answered:
                await self._peer.send(hello)
                welcome = await answered
        except ChannelError as error:
            raise ConnectionLost("the driver has not answered") from error
        if isinstance(welcome, NodeRefused):
            return NodeLost(f"refused by the driver: {welcome.text}")
        ready = False
        system.name, system.shutdown_timeout = welcome.name, welcome.drain_timeout
        self.drain_timeout = welcome.drain_timeout
        side.welcomed(welcome)
        try:
            self._settle(welcome)
            await side.sharing.whole.wait()  # the app may use names and groups of the fleet from its first line
            app = app_of(find(welcome.app), welcome.app)
            async with AsyncExitStack() as stack:
                members = await stack.enter_async_context(side.listen(welcome.listen))
                # Before the app opens its listeners: a node that is refused would cut off the clients that it has accepted.
                if refusal := await welcome.node.ask(Imported(members.url, schemas(list(BY_TAG))), timeout=None):
                    return NodeLost(f"refused by the driver: {refusal}")
                side.listeners = listed(await stack.enter_async_context(app(system)), welcome.app)
                urls = [listener.url for listener in side.listeners]
                self._ready()
                if refusal := await welcome.node.ask(Ready(members.url, urls, schemas(list(BY_TAG))), timeout=None):
                    return NodeLost(f"refused by the driver: {refusal}")
                ready = True
                await self._end.wait()
                # Sent before any actor ends, so that the driver knows why they end.
                await welcome.node.ask(Leaving(), timeout=None)
                await side.leave(self.drain_timeout, last=False)
        except BaseException as error:
            if not ended_itself(error):
                raise
            text = failure_text(error, welcome.app)
            logger.debug("the whole traceback of what ended the app", exc_info=error)
            own_frames(error, welcome.app)
            if self._end.is_set() and not ready:
                # There was no work yet, and the app may have failed because the server is ending.
                logger.info(
                    "the app has failed while it started, and was to end: %s", text, extra={"event": "app_ended"}
                )
            else:
                cause = error.__cause__ if isinstance(error, AppImportFailed) else error
                shown = None if says_enough(error) else cause
                logger.error("the app has failed: %s", text, exc_info=shown, extra={"event": "app_failed"})
                failure = NodeLost(text, node=welcome.name)
                welcome.node.tell(AppFailed(text[:1000], "".join(traceback.format_exception(error))[-20_000:]))
        await side.leave(self.drain_timeout, last=True)
        control.stop()
        await control.terminated()
        return failure


class Control(
    UntracedActor[Spawn | End | Finish | Settle | Changed | Drain | Look | Measure | Reload | SharedChanges | Watch]
):
    """Carries out the driver's orders, and is the parent of the actors that the driver starts here."""

    side: NodeSide
    end: trio.Event

    def started(self) -> None:
        """Prepare to be measured, and to have supervised actors, whose supervisors are found by their numbers."""
        self._metrics = Metrics(self.system)
        self._supervisors: dict[int, Ref[Any]] = {}

    @handles
    def drain(self, m: Drain) -> None:
        """Drain this node."""
        self.end.set()

    @handles
    def changed(self, m: Changed) -> None:
        """Update another node in the directory."""
        self.side.changed(m)

    @handles
    def shared(self, m: SharedChanges) -> None:
        """Take news of groups and names."""
        self.side.sharing.take(m)

    @handles
    def look(self, m: Look) -> str:
        """Take a snapshot."""
        return json.dumps(take_snapshot(self.system, limit=m.limit).to_json())

    @handles
    def measure(self, m: Measure) -> None:
        """Collect metrics in a task, because it takes a while."""
        self.start_soon(self._measure, self.reply_later())

    async def _measure(self, reply: Reply[str]) -> None:
        if reply.wanted:
            reply.send(to_json(await self._metrics.collect()))

    @handles
    def show(self, m: Watch) -> Ref[Any]:
        """Start a viewer for a browser."""
        return self.spawn(Watcher, m.actions, m.tracebacks)

    @handles
    def reload(self, m: Reload) -> list[str]:
        """Make the listeners read their files again."""
        return reloaded(self.side.listeners)

    @handles
    async def spawn_here(self, m: Spawn) -> Ref[Any] | None:
        """Start an actor; an error is the caller's."""
        try:
            if self.end.is_set():
                raise NodeLeaves(f"{self.system.name} is draining")
            cls, args, mailbox = actor_class(m.cls), arguments_of(m), mailbox_of(m.mailbox)
            if m.policy is None:
                return self.spawn(cls, *args, mailbox=mailbox, name=self._free(m.label))
            spec = child(cls, *args, mailbox=mailbox, supervise=policy_of(m.policy))
            # Its own supervisor, so that an actor that fails too often ends nothing else.
            supervisor = self.spawn(Supervisor, name=self._free(m.label))
            try:
                ref: Ref[Any] = await supervisor.ask(StartChild(spec), timeout=None)
            except BaseException:
                supervisor.stop()
                raise
            self._supervisors[ref.incarnation] = supervisor
            ref.on_stopped(partial(self._ended, ref.incarnation))
            return ref
        except Exception as error:  # noqa: BLE001 - it is the asker's
            self.reply_later().fail(error)
            return None

    def _free(self, label: str) -> str | None:
        """Return a label that can be a name here; a former actor that has it may still be ending."""
        is_name = label.isprintable() and label != "" and not label.startswith("$")
        return label if is_name and self.system.lookup(f"{self.ref.path}/{label}") is None else None

    @handles
    def end_here(self, m: End) -> None:
        """Kill an actor of this node."""
        if isinstance(m.ref, LocalRef):
            self._supervisors.get(m.ref.incarnation, m.ref).kill()

    @handles
    def finish_here(self, m: Finish) -> None:
        """Stop an actor of this node, after the messages that it has."""
        if isinstance(m.ref, LocalRef):
            finish(m.ref)

    @handles
    def settle(self, m: Settle) -> None:
        """Answer when the mailbox of an actor has all that this node has sent to its name."""
        self.start_soon(self._settle, m, self.reply_later())

    async def _settle(self, m: Settle, reply: Reply[None]) -> None:
        await self.side.sharing.settle(m.name, m.renames)
        reply.send(None)

    def _ended(self, incarnation: int) -> None:
        self._supervisors.pop(incarnation).stop()


class NodeSide(Nodes):
    """A fleet, as one of its nodes knows it."""

    def __init__(self, system: ActorSystem, node_id: bytes) -> None:
        super().__init__(system, node_id)
        self._welcome: Welcome | None = None
        self._early: list[Changed] = []
        """Changes that came before the welcome, which travels on another channel: its members are older than they are."""
        self.listeners: list[Served] = []
        """The app's listeners, once it is ready."""

    def welcomed(self, welcome: Welcome) -> None:
        """Store the driver's answer: the other members, and the refs for orders."""
        self._welcome = welcome
        self.refs.known(welcome.driver, "the driver")
        self.sharing.begin(welcome.driver, welcome.coordinator)
        for member in welcome.members:
            self.directory.change(member)
        for news in self._early:
            self.changed(news)
        self._early.clear()

    def _url_of(self, node_id: bytes) -> str:
        welcome = self._welcome
        if welcome is not None and welcome.driver == node_id:
            return welcome.driver_url
        return super()._url_of(node_id)

    def changed(self, news: Changed) -> None:
        """Update a node in the directory."""
        if self._welcome is None:
            self._early.append(news)
            return
        member = news.member
        if news.forgotten:
            self.directory.remove(member.name)
            return
        if member.state is not MemberState.DOWN or not news.lost:
            self.directory.change(member, Normal())
            return
        lost = NodeLost(news.lost, node=member.name, exit_code=news.exit_code, signal=news.signal)
        self.directory.change(member, Failed(lost))

    async def _ask(self, question: Any, timeout: float | None) -> Any:
        if self._welcome is None:
            raise ActorError("the driver has not answered yet")
        try:
            return await self._welcome.coordinator.ask(question, timeout=timeout)
        except ActorError as error:
            cause = error.__cause__
            if isinstance(cause, RemoteFailure) and cause.kind in _ERRORS:
                raise _ERRORS[cause.kind](cause.detail) from error
            raise

    async def spawn_order(self, order: Spawn, on: str | int, name: str | None) -> Ref[Any]:
        """Start an actor on a node; see `Nodes.spawn`."""
        ref: Ref[Any] = await self._ask(SpawnOn(order, on, name), self.system.ask_timeout)
        if name is not None:
            await self._settled(name)
        return ref

    async def join(self, order: Spawn, on: str | int, name: str) -> Ref[Any]:
        """Start a singleton, or find it; see `Nodes.join`."""
        await self._ask(Join(order, on, name), self.system.ask_timeout)
        await self._settled(name)
        return await self.lookup(name)

    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor a name of the fleet; see `Nodes.register`."""
        if not ref.is_alive:  # the driver might not know it yet
            raise ActorStopped(f"{ref.path} has ended and takes no name", actor=ref.path)
        await self._ask(Register(name, ref), self.system.ask_timeout)
        await self._settled(name)

    async def unregister(self, name: str) -> None:
        """Free a name of the fleet; see `Nodes.unregister`."""
        await self._ask(Unregister(name), self.system.ask_timeout)
        await self._settled(name)

    async def _settled(self, name: str) -> None:
        """Wait until this node knows all names as the driver had them at its last answer: changes travel on another channel.

        The driver has carried out the request, so a change that is long on its way is a warning, and no error.
        """
        timeout = self.system.ask_timeout
        renames = await self._ask(Renames(), timeout)
        if not await self.sharing.renamed(renames, math.inf if timeout is None else timeout):
            logger.warning(
                "the driver has changed the name %r, but this node did not learn of it within %g s: lookups here do not know it yet",
                name,
                timeout,
                extra={"event": "names_late"},
            )

    async def _lookup_on(self, name: str, on: str | int) -> Ref[Any]:
        ref: Ref[Any] = await self._ask(LookupOn(name, on), self.system.ask_timeout)
        return ref

    async def drain(self, name: str) -> None:
        """End a node in order; see `Nodes.drain`."""
        await self._ask(DrainOf(name), None)

    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain and start nodes again; see `Nodes.restart`."""
        await self._ask(Restart(name, rolling), None)
