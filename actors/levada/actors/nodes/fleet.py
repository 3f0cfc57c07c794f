"""`Fleet`: the driver's side of a fleet. It starts nodes, admits them, and carries out their requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeVar

import attrs
import trio

from levada.actors.apps import app_of, importable
from levada.actors.aqueduct import Listener, serve_over
from levada.actors.authentication import Credentials
from levada.actors.console.snapshot import nodes_asked_by
from levada.actors.metrics.nodes import fleet_measured_by
from levada.framework import (
    ActorSystem,
    Failed,
    Identity,
    Reason,
    Ref,
    Reply,
    Supervisor,
    child,
    current_peer,
    handles,
    restart,
)
from levada.framework.embedding import LocalRef, UntracedActor
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    ChannelError,
    ConfigurationError,
    LevadaError,
    MailboxFull,
)
from levada.framework.supervisor import StartChild, StopChild

from .driver_actor import DRIVER, driver_actor
from .front import SETTLING
from .inspection import look, measure, watch
from .messages import (
    Changed,
    DrainOf,
    Hello,
    Join,
    LookupOn,
    Member,
    MemberState,
    NodeLost,
    NodeRefused,
    Register,
    Renames,
    Restart,
    Settle,
    SharedChanges,
    Spawn,
    SpawnOn,
    Unregister,
)
from .node import DrainNode, FleetNode, Greet, Launcher, Node, Run
from .nodes import Nodes, fleet_of
from .orders import joined, policy_of
from .placing import Placed, Placing
from .settings import NodeSettings

__all__ = ["Coordinator", "Fleet"]

T = TypeVar("T")

_NAME: Final = re.compile(r"\w[\w.-]{0,63}")
_ABROAD: Final[Mapping[str, Literal["transient", "temporary"]]] = {
    "permanent": "transient",
    "transient": "transient",
    "temporary": "temporary",
}


class Fleet(Nodes):
    """The driver's side of a fleet. Made by `of`."""

    is_driver: ClassVar[bool] = True

    def __init__(self, system: ActorSystem) -> None:
        super().__init__(system, system.platform.token_bytes(16))
        self._places: dict[str, FleetNode] = {}
        self._count = 0
        self._turn = 0
        self._restarting = trio.Lock()
        self.starting: set[str] = set()
        """The names of actors that are starting."""
        self.placings: dict[Placing, None] = {}
        """The actors on nodes that are started again elsewhere."""
        self._listeners: list[Listener] = []
        self.supervisor: Ref[Any] = system.spawn(Supervisor, name="nodes", supervise="escalate")
        """The parent of all `Node` actors. If a node restarts too often, its error ends the system."""
        self.coordinator: Ref[Any] = system.spawn(Coordinator, self, supervise=restart("permanent"))
        """Takes the requests of nodes."""
        self.directory.watchers += [self._tell, self._share]
        nodes_asked_by(system, partial(look, self), partial(watch, self))
        fleet_measured_by(system, partial(measure, self))

    @classmethod
    def of(cls, system: ActorSystem) -> Fleet:
        """Return the fleet of a driver; the first call makes it.

        Raises:
            ConfigurationError: the system is a node's.
        """
        known = fleet_of(system)
        if known is None:
            return cls(system)
        if not isinstance(known, Fleet):
            raise ConfigurationError(f"{system.name} is a node itself: only its driver starts nodes")
        return known

    @property
    def places(self) -> list[FleetNode]:
        """All nodes, in the order in which they were added."""
        return [*self._places.values()]

    # For launchers.

    @asynccontextmanager
    async def serve(
        self, listening: Callable[[], AbstractAsyncContextManager[Any]], authenticate: Any = None
    ) -> AsyncIterator[Listener]:
        """Accept connections of nodes.

        Args:
            listening: returns the context manager of a carrier's listener.
            authenticate: returns the identity of a connection, whose name is the `Run.id`; by default the carrier's name of the peer, as
                for a socket pair.
        """
        authenticate = authenticate or _by_address
        config = self.config()
        async with serve_over(
            # Closed late (`closes`), because actors that end may still ask actors on nodes.
            self.system,
            listening,
            self._hello,
            Hello,
            authenticate=authenticate,
            config=config,
            closes="close",
        ) as listener:
            self._listeners.append(listener)
            try:
                yield listener
            finally:
                self._listeners.remove(listener)

    @asynccontextmanager
    async def nodes(
        self, n: int, app: Any, launcher: Launcher, names: Sequence[str] | None, settings: NodeSettings
    ) -> AsyncIterator[None]:
        """Run nodes while the block lasts. It begins when all are up; see `levada.actors.nodes.local_nodes`."""
        target = importable(app)
        if not isinstance(app, str):
            app_of(app, target)
        places = self._reserve(n, target, launcher, names, settings)
        try:
            for place in places:
                await self._begin(place)
            await self._begun(places)
            yield
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(self._drain, place)
        finally:
            with trio.CancelScope(shield=True):
                for place in places:
                    await self._end(place)

    def _reserve(
        self, n: int, app: str, launcher: Launcher, names: Sequence[str] | None, settings: NodeSettings
    ) -> list[FleetNode]:
        if not isinstance(n, int) or n < 1:
            raise ConfigurationError(f"n is {n!r}, wanted 1 node or more")
        if isinstance(names, str) or not isinstance(names, Sequence | None):
            raise ConfigurationError(f"names is {names!r}, wanted a list of {n} different names")
        wanted = [f"n{self._count + i}" for i in range(n)] if names is None else list(names)
        if len(wanted) != n or len(set(wanted)) != n:
            raise ConfigurationError(f"names is {wanted!r}, wanted {n} different names")
        for name in wanted:
            if name in self._places:
                raise ConfigurationError(f"there is a node {name!r} already")
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "any":
                raise ConfigurationError(
                    f"the name of a node is {name!r}, wanted up to 64 letters, digits, '.', '_' and '-'"
                )
        places = [FleetNode(name, self._count + i, app, launcher, settings) for i, name in enumerate(wanted)]
        self._count += n
        self._places.update((place.name, place) for place in places)
        return places

    async def _begin(self, place: FleetNode) -> None:
        """Start a node for the first time, or restart it."""
        place.begun, place.error = False, None
        # A node that has drained stays down, whatever the policy.
        policy = attrs.evolve(place.settings.restart, kind=_ABROAD[place.settings.restart.kind])
        spec = child(Node, self, place, name=place.name, supervise=policy)
        place.ref = await self.supervisor.ask(StartChild(spec), timeout=None)

    async def _begun(self, places: Sequence[FleetNode], *, may_leave: bool = False) -> None:
        """Wait until nodes are up; with `may_leave`, a node whose block ends does not count.

        Raises:
            NodeLost: one could not start.
            ActorError: its block has ended.
        """

        def wanted() -> list[FleetNode]:
            return [place for place in places if not (may_leave and place.closed)]

        def known() -> bool:
            return any(place.error or place.closed for place in wanted()) or all(place.begun for place in wanted())

        await self.directory.until(known)
        for place in wanted():
            if place.error is not None:
                raise place.error
            if place.closed:
                raise _closed(place)

    async def _drain(self, place: FleetNode) -> None:
        ref = place.ref
        if ref is None or not ref.is_alive:
            return
        if not place.begun and place.error is None:
            place.error = NodeLost(f"{place.name} was drained before its app was ready", node=place.name)
            self.directory.wake()  # the caller that started it waits in `_begun`
        if self.directory[place.name].state is MemberState.DOWN:
            await self.supervisor.ask(StopChild(place.name), timeout=None)  # it is waiting for its restart
            return
        ref.tell(DrainNode())
        await ref.terminated()

    async def _end(self, place: FleetNode) -> None:
        """Make sure that a node's process has ended, and forget the node."""
        place.closed = True
        try:
            await self.supervisor.ask(StopChild(place.name), timeout=None)
        except ActorStopped:  # the supervisor has failed, so its children are ending
            if place.ref is not None:
                await place.ref.terminated()
        self._places.pop(place.name, None)
        if place.name in self.directory:
            self._announce(Changed(self.directory[place.name], "", forgotten=True))
            self.directory.remove(place.name)

    # For nodes.

    async def _hello(self, m: Hello) -> None:
        peer = current_peer()
        assert peer is not None
        assert peer.identity is not None, "every connection has authenticated"
        run = peer.identity.name
        place = self._places.get(run.partition("#")[0])
        answer: Any
        try:
            if place is None or place.ref is None:
                answer = NodeRefused(f"{run} is not expected")
            else:
                answer = await place.ref.ask(Greet(run, m), timeout=None)
        except ActorError as error:
            answer = NodeRefused(str(error))
        with m.answer:
            try:
                m.answer.send(answer)
            except ChannelError:
                pass  # the node has ended

    def cut(self, run: Run) -> None:
        """Abort the connection of one start of a node."""
        for peer in self._peers(run.id):
            peer.abort()

    def _peers(self, run: str) -> list[Any]:
        return [
            peer
            for listener in self._listeners
            for peer in listener.peers
            if peer.identity is not None and peer.identity.name == run
        ]

    def _tell(self, member: Member, reason: Reason | None) -> None:
        """Tell the nodes that are up of a change."""
        error = reason.error if isinstance(reason, Failed) else None
        news = Changed(member, "")
        if isinstance(error, NodeLost):
            news = Changed(member, str(error), error.exit_code, error.signal)
        self._announce(news)

    def _announce(self, news: Changed) -> None:
        for place in self._places.values():
            if place.control is None or not place.control.is_alive:
                continue
            try:
                place.control.tell(news)
            except MailboxFull:
                # It has not read for long, and would miss this change.
                self.cut(place.run)

    def _share(self, member: Member, reason: Reason | None) -> None:
        """Share groups and names with a node from its hello to its end. Its actors stay members of groups until it drains."""
        place = self._places.get(member.name)
        if member.state is MemberState.DOWN:
            self.sharing.end(member.node_id)
        elif member.state is MemberState.DRAINING:
            self.sharing.dismiss(member.node_id)
        elif (
            member.state is MemberState.STARTING and not member.url and place is not None and place.control is not None
        ):
            self.sharing.begin(member.node_id, place.control)

    # For programs.

    def choose(self, on: str | int) -> FleetNode:
        """Return a node for an actor, in turn if there are several. Errors are as for `candidates`."""
        ready = self.candidates(on)
        self._turn += len(ready) > 1
        return ready[self._turn % len(ready)]

    def candidates(self, on: str | int) -> list[FleetNode]:
        """Return the nodes that are up; if there is none, those whose app is starting.

        Raises:
            ActorError: the node is not up, or with ``"any"`` no node is.
            ConfigurationError: there is no such node.
        """
        if on == "any":
            ready = [place for place in self._places.values() if place.settings.on_any and self._takes_orders(place)]
            if not ready:
                states = ", ".join(f"{member.name} is {member.state.value}" for member in self.members)
                raise ActorError(f"no node is up: {states or 'there is none'}")
            return [place for place in ready if self.directory[place.name].state is MemberState.UP] or ready
        for place in self._places.values():
            if on in (place.name, place.index):
                if not self._takes_orders(place):
                    state = self.directory[place.name].state
                    lost = state is MemberState.UP  # and its process is about to end
                    raise ActorError(f"{place.name} {'has lost its connection' if lost else f'is {state.value}'}")
                return [place]
        raise ConfigurationError(f"there is no node {on!r}; there are: {', '.join(self._places) or 'none'}")

    def is_for_any(self, name: str) -> bool:
        """Return whether ``on="any"`` may choose a node of this name."""
        place = self._places.get(name)
        return place is not None and place.settings.on_any

    def starts_in(self, name: str) -> float | None:
        """Return the seconds until a node that was lost starts again; None if it does not wait for that."""
        ref = self._places[name].ref if name in self._places else None
        if not isinstance(ref, LocalRef) or not ref.is_alive:
            return None
        return self.system.observe.detail(ref).restarts_in

    def takes_orders(self, name: str) -> bool:
        """Return whether actors can be started on a node; see `Nodes.takes_orders`."""
        return name in self._places and self._takes_orders(self._places[name])

    def _takes_orders(self, place: FleetNode) -> bool:
        return (
            place.imported
            and place.control is not None
            and place.control.is_alive
            and place.name in self.directory
            and self.directory[place.name].state in (MemberState.STARTING, MemberState.UP)
        )

    async def spawn_order(self, order: Spawn, on: str | int, name: str | None) -> Ref[Any]:
        """Start an actor, supervise it if it has a policy, and register its name; see `Nodes.spawn`."""
        placing = Placing(self, order, on, name)
        if order.policy is None:
            return await placing.start(self.system.ask_timeout)
        await self._place_for_good(placing)
        return await placing.first(self.system.ask_timeout)

    async def _place_for_good(self, placing: Placing) -> None:
        """Start an actor and supervise it; the caller waits for it with `Placing.first`."""
        assert placing.order.policy is not None
        # A permanent actor that ends by itself is restarted on its node; here only the loss of the node counts.
        policy = attrs.evolve(policy_of(placing.order.policy, resume=False), kind=_ABROAD[placing.order.policy.kind])
        self.placings[placing] = None
        supervisor = self.system.spawn(Supervisor)
        with trio.CancelScope(shield=True):  # it answers at once
            placed = await supervisor.ask(StartChild(child(Placed, placing, supervise=policy)), timeout=None)
            placed.on_stopped(partial(self._is_over, placing, supervisor))

    def _is_over(self, placing: Placing, supervisor: Ref[Any]) -> None:
        """Forget an actor that is not started again."""
        supervisor.stop()
        del self.placings[placing]
        if placing.kept:
            assert placing.name is not None
            self.sharing.free(placing.name)
        self.directory.wake()

    async def join(self, order: Spawn, on: str | int, name: str) -> Ref[Any]:
        """Start a singleton, or find it; see `Nodes.join`."""
        if on == DRIVER:
            return await self._join_here(order, name)
        known = [placing for placing in self.placings if placing.singleton and placing.name == name]
        if known:
            [placing] = known
            placing.order = joined(name, (placing.order, placing.on), (order, on))
        else:
            placing = Placing(self, order, on, name, singleton=True)
            await self._place_for_good(placing)
        await placing.first(self.system.ask_timeout)
        front = self.sharing.find(name)
        if front is None:
            raise ActorStopped(f"the singleton {name!r} has ended")
        return front

    async def _join_here(self, order: Spawn, name: str) -> Ref[Any]:
        """Start an actor of levada in this process, or find it."""
        cls = await self.system.platform.run_in_thread(driver_actor, order.cls)
        holder = self.system.registry.get(name)
        if holder is not None:
            return holder
        assert order.policy is not None
        ref = self.system.spawn(cls, name=name.rpartition("/")[2], supervise=policy_of(order.policy))
        self.system.registry.register(name, ref)
        return ref

    async def settle(self, name: str) -> None:
        """Announce that a kept name has no actor, and wait until its mailbox has all that was sent to it by that name."""
        renames = self.sharing.vacate(name)

        async def ask(control: Ref[Any]) -> None:
            try:
                await control.ask(Settle(name, renames), timeout=SETTLING)
            except LevadaError:
                pass  # it has ended, or hangs: what it sends late fails

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sharing.settle, name, renames)
            for place in self._places.values():
                if place.control is not None:
                    nursery.start_soon(ask, place.control)

    async def moved(self, place: FleetNode, seconds: float) -> None:
        """Wait until supervised actors have left a node, as far as another node is up for them, for `seconds` at most."""
        name = place.name
        await self.directory.until(lambda: not any(each.moves_from(name) for each in self.placings), seconds)

    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor a name of the fleet; see `Nodes.register`."""
        await trio.lowlevel.checkpoint()
        self.system.registry.register(name, ref)

    async def unregister(self, name: str) -> None:
        """Free a name of the fleet; see `Nodes.unregister`."""
        await trio.lowlevel.checkpoint()
        if self.sharing.is_kept(name):
            raise ConfigurationError(
                f"the name {name!r} is kept for an actor that starts again elsewhere: end the actor"
            )
        self.system.registry.unregister(name)

    async def _lookup_on(self, name: str, on: str | int) -> Ref[Any]:
        place = self.choose(on)
        for peer in self._peers(place.run.id):
            ref: Ref[Any] = await peer.lookup(name)
            return ref
        raise ActorError(f"{place.name} is not connected")

    async def drain(self, name: str) -> None:
        """End a node in order; see `Nodes.drain`."""
        place = self._place(name)
        async with place.lock:
            await self._drain(place)

    def _place(self, name: str) -> FleetNode:
        if name not in self._places:
            raise ConfigurationError(f"there is no node {name!r}; there are: {', '.join(self._places) or 'none'}")
        return self._places[name]

    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain and start nodes again; see `Nodes.restart`."""
        if name is not None:
            self._place(name)
        async with self._restarting:  # otherwise one call would drain what another starts
            everyday = [place for place in self._places.values() if place.settings.on_any]
            places = everyday if name is None else [self._place(name)]
            for group in [[place] for place in places] if rolling else [places]:
                async with trio.open_nursery() as nursery:
                    for place in group:
                        nursery.start_soon(self._renew, place)
                await self._begun(group, may_leave=name is None)

    async def _renew(self, place: FleetNode) -> None:
        async with place.lock:
            await self._drain(place)
            if not place.closed:
                await self._begin(place)


def _closed(place: FleetNode) -> ActorError:
    return ActorError(f"the block of {place.name} has ended")


async def _by_address(credentials: Credentials) -> Identity:
    return Identity(credentials.info.peer)


class Coordinator(
    UntracedActor[SpawnOn | Join | LookupOn | DrainOf | Restart | SharedChanges | Register | Unregister | Renames]
):
    """Carries out the requests of nodes, each in a task of its own."""

    fleet: Fleet

    def _answer(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.start_soon(self._work, work, self.reply_later())

    async def _work(self, work: Callable[[], Awaitable[Any]], reply: Reply[Any]) -> None:
        try:
            reply.send(await work())
        except Exception as error:  # noqa: BLE001 - it is the asker's
            reply.fail(error)

    @handles
    def spawn_on(self, m: SpawnOn) -> Ref[Any] | None:
        """Start an actor."""
        self._answer(partial(self.fleet.spawn_order, m.spawn, m.on, m.name))
        return None

    @handles
    def join(self, m: Join) -> None:
        """Start a singleton, or find it. Each node has a front of its own."""
        self._answer(partial(self._join, m))

    async def _join(self, m: Join) -> None:
        await self.fleet.join(m.spawn, m.on, m.name)

    @handles
    def lookup_on(self, m: LookupOn) -> Ref[Any] | None:
        """Find an actor."""
        self._answer(partial(self.fleet.lookup, m.name, on=m.on))
        return None

    @handles
    def shared(self, m: SharedChanges) -> None:
        """Apply a node's changes of groups."""
        self.fleet.sharing.take(m)

    @handles
    def register(self, m: Register) -> None:
        """Give an actor a name."""
        self._answer(partial(self.fleet.register, m.name, m.ref))

    @handles
    def unregister(self, m: Unregister) -> None:
        """Free a name."""
        self._answer(partial(self.fleet.unregister, m.name))

    @handles
    def renames(self, m: Renames) -> int:
        """Return the number of changes of names."""
        return self.fleet.sharing.renames

    @handles
    def drain_of(self, m: DrainOf) -> None:
        """Drain a node."""
        self._answer(partial(self.fleet.drain, m.name))

    @handles
    def restart(self, m: Restart) -> None:
        """Restart nodes."""
        self._answer(partial(self.fleet.restart, m.node, rolling=m.rolling))
