"""`Nodes`, what programs use of a fleet; and `Fleet`, which is the driver's.

A system has one fleet. In its driver it is a `Fleet`, which starts nodes and decides; in a node it is a
`levada.actors.nodes.body.NodeSide`, which asks the driver. `nodes_of` finds either.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

import attrs
import trio

from levada.actors.apps import app_of, importable
from levada.actors.aqueduct import FleetRefs, Listener, Peer, PeerConfig, connect, serve, serve_over
from levada.actors.authentication import Authenticate, Credentials
from levada.actors.console.snapshot import nodes_asked_by
from levada.framework import (
    Actor,
    ActorSystem,
    Failed,
    Identity,
    Lost,
    MailboxPolicy,
    Reason,
    Receiver,
    Ref,
    Reply,
    Supervision,
    Supervisor,
    child,
    current_peer,
    handles,
    restart,
)
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    ChannelError,
    ConfigurationError,
    ConnectionLost,
    MailboxFull,
    NameTaken,
    NameUnknown,
)
from levada.framework.ref import DEFAULT_TIMEOUT
from levada.framework.supervisor import StartChild, StopChild
from levada.transports.aqueduct import QMUX_ALPN
from levada.transports.carriers import unix
from levada.transports.qmux import QmuxConfig

from .directory import Directory
from .inspection import look
from .messages import (
    Changed,
    DrainOf,
    Hello,
    LookupOn,
    Member,
    MemberState,
    NodeDown,
    NodeLost,
    NodeUp,
    Refused,
    Register,
    Restart,
    Shared,
    Spawn,
    SpawnOn,
    Unregister,
)
from .node import DrainNode, Greet, Launcher, Node, Place, Run
from .orders import policy_of, spawn_order
from .placing import Placed, Placing
from .settings import NodeSettings
from .sharing import Sharing

__all__ = ["QMUX", "Coordinator", "Fleet", "Nodes", "nodes_of"]

T = TypeVar("T")

QMUX: Final = QmuxConfig(protocols=(QMUX_ALPN,), max_streams=4096, max_streams_unidirectional=4096, idle_timeout=0)
"""For connections whose end the operating system reports: no idle time-out."""

_NAME: Final = re.compile(r"\w[\w.-]{0,63}")
_ABROAD: Final[Mapping[str, Literal["transient", "temporary"]]] = {
    "permanent": "transient",
    "transient": "transient",
    "temporary": "temporary",
}

_fleets: weakref.WeakKeyDictionary[ActorSystem, Nodes] = weakref.WeakKeyDictionary()
"""Written by `Nodes` alone, which also removes its entry."""


def nodes_of(system: ActorSystem) -> Nodes:
    """Return the fleet of a system: of a driver, or of a node, as an app finds it.

    Raises:
        ConfigurationError: the system has none: it is neither a node nor a driver.
    """
    try:
        return _fleets[system]
    except KeyError:
        raise ConfigurationError(
            f"the system {system.name!r} has no nodes, and is none: start some with local_nodes(…)"
        ) from None


async def _ignore(_: Any) -> None:
    """Take what no member sends."""


def _all(_: str) -> bool:
    return True


class Links(Protocol):
    """How members connect to each other at URLs of one scheme."""

    def listen(self, nodes: Nodes, url: str) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members, by `Nodes.serve_members`.

        Args:
            nodes: this member's.
            url: from `levada.actors.nodes.Launcher`.
        """
        ...

    def carrier(self, node_id: bytes) -> Any:
        """Return the carrier's settings to dial a member."""
        ...


@attrs.frozen
class OwnLinks:
    """Links within a machine, over carriers that only this user can reach."""

    settings: Any
    """Of the carrier."""

    def listen(self, nodes: Nodes, url: str) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members; see `Links.listen`."""
        return nodes.serve_members(url, self.settings)

    def carrier(self, node_id: bytes) -> Any:
        """Return the carrier's settings."""
        return self.settings


def _own_sockets() -> unix.UnixConfig:
    # The folder of the sockets is for this user alone, in any case.
    return unix.UnixConfig(allowed_uids={os.getuid()} if sys.platform == "linux" else None)


class Nodes:
    """The nodes of a fleet. `local_nodes` yields it; `nodes_of` finds it in the driver and in each node."""

    def __init__(self, system: ActorSystem, node_id: bytes) -> None:
        if system in _fleets:
            raise ConfigurationError(f"the system {system.name!r} has a fleet already")
        self.system = system
        self.node_id = node_id
        """16 random bytes: this process, in this fleet."""
        self.directory = Directory(system)
        self.links: dict[str, Links] = {
            "aqueduct+memory": OwnLinks(None),
            "aqueduct+unix": OwnLinks(attrs.evolve(QMUX, below=_own_sockets())),
        }
        """How members connect to each other, by the scheme of the URL."""
        self.refs = FleetRefs(system, node_id, self._dial)
        """The refs that travel between the members."""
        self.sharing = Sharing(system, self.refs, self.directory, driver=isinstance(self, Fleet))
        """The groups and names of the fleet."""
        self.directory.watchers.append(self._learn)
        _fleets[system] = self
        system.at_end("flush", self._forget)

    async def _forget(self) -> None:
        _fleets.pop(self.system, None)

    def _links_of(self, url: str) -> Links:
        scheme = url.partition("://")[0]
        try:
            return self.links[scheme]
        except KeyError:
            raise ConfigurationError(f"this process has no links to members at {scheme}://") from None

    def listen(self, url: str) -> AbstractAsyncContextManager[Listener]:
        """Let other members connect, to claim refs."""
        return self._links_of(url).listen(self, url)

    def serve_members(
        self, url: str, carrier: Any, authenticate: Authenticate | None = None
    ) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members; for `Links`.

        Args:
            url: of the listener.
            carrier: settings of its carrier.
            authenticate: decides on clients.
        """
        config = self.config(carrier)
        return serve(self.system, url, _ignore, Any, expose=_all, config=config, authenticate=authenticate)

    def config(self, carrier: Any = None) -> PeerConfig:
        """Return the settings of connections between members.

        Args:
            carrier: settings of the carrier.
        """
        return PeerConfig(fleet=self.refs, carrier=carrier)

    def _url_of(self, node_id: bytes) -> str:
        """Return where a member listens; empty if that is not known."""
        return next((member.url for member in self.members if member.node_id == node_id), "")

    @asynccontextmanager
    async def _dial(self, node_id: bytes) -> AsyncIterator[Peer[Any]]:
        url = self._url_of(node_id)
        if not url:
            raise ConnectionLost(f"the node {self.refs.name_of(node_id)} does not listen")
        config = self.config(self._links_of(url).carrier(node_id))
        async with connect(self.system, url, object, expose=_all, config=config) as peer:
            yield peer

    def _learn(self, member: Member, reason: Reason | None) -> None:
        """Let refs of a node be claimed from now on, or end them."""
        if member.node_id == self.node_id or not member.node_id:
            return
        if member.state is MemberState.UP:
            self.refs.known(member.node_id, member.name)
        elif member.state is MemberState.DOWN:
            self.refs.ended(member.node_id, Lost(member.name))

    @property
    def members(self) -> list[Member]:
        """All nodes, by index, as they are now."""
        return self.directory.members

    def __getitem__(self, name: str) -> Member:
        """Return a node as it is now.

        Raises:
            ConfigurationError: there is none of this name.
        """
        return self.directory[name]

    def events(self) -> AbstractAsyncContextManager[Receiver[NodeUp | NodeDown]]:
        """Receive `NodeUp` and `NodeDown` from now on: ``async with nodes.events() as events``.

        The events also go to the subscribers of ``system.events``. A receiver that takes none while very many come gets
        `ChannelCancelled`.
        """
        return self.directory.events()

    async def spawn(
        self,
        cls: Callable[..., Actor[T]],
        *args: Any,
        on: str | int = "any",
        name: str | None = None,
        supervise: Supervision = "stop",
        mailbox: MailboxPolicy | None = None,
    ) -> Ref[T]:
        """Start an actor on a node.

        Args:
            cls: an `Actor` class that can be imported, and that the node's app has imported. Its name travels, never code.
            args: for the class; they must be values that messages can hold.
            on: the name or the index of a node, or ``"any"``: the nodes that are up take turns.
            name: registers the actor in the driver's registry.
            supervise: ``"stop"``, or `restart`: by this policy the actor restarts on its node after a failure, and starts anew,
                as another ref under the same name, when its node was lost.
            mailbox: see `bounded`; `conflate` cannot travel.

        Raises:
            ConfigurationError: the class cannot be imported elsewhere; the node has not imported it; no such node; ``"escalate"``.
            TypeError, ValueError: an argument cannot travel.
            NameTaken: another actor has the name.
            ActorError: the class raised; no node is up.
            ActorStopped: the node ended meanwhile.
            AskTimeout: it did not answer within the system's ``ask_timeout``.

        Cancellation:
            the actor may have been started.
        """
        raise NotImplementedError

    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor of any member a name of the fleet: a name in the driver's registry, which all members can look up.

        The name is free again when the actor has ended. Other members hear of it soon.

        Raises:
            NameTaken: another living actor has it.
            ActorStopped: the actor has ended, or the driver.

        Cancellation:
            the actor may have the name.
        """
        raise NotImplementedError

    async def unregister(self, name: str) -> None:
        """Free a name of the fleet; does nothing if no actor has it.

        Cancellation:
            the name may be free.
        """
        raise NotImplementedError

    async def lookup(
        self, name: str, *, on: str | int | None = None, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Ref[Any]:
        """Find an actor by a name of the fleet, or, with `on`, in the registry of a node.

        A name of the fleet may be free for a while, because its actor starts anew on another node: this waits for it to come back.

        Args:
            name: the name.
            on: the name or the index of a node; then there is no wait for the name.
            timeout: seconds to wait; ``None``: no limit. The default is the system's ``ask_timeout``.

        Raises:
            NameUnknown: no living actor has this name there, or none of the fleet got it in time.
            ConfigurationError: no such node.
        """
        if on is not None:
            return await self._lookup_on(name, on)
        seconds = self.system.ask_timeout if timeout == DEFAULT_TIMEOUT else timeout
        await trio.lowlevel.checkpoint()
        ref = await self.sharing.named_until(name, math.inf if seconds is None else seconds)
        if ref is None:
            raise NameUnknown(
                f"no actor of the fleet has the name {name!r}, and none got it within {seconds:g} s", name=name
            )
        return ref

    async def _lookup_on(self, name: str, on: str | int) -> Ref[Any]:
        raise NotImplementedError

    async def drain(self, name: str) -> None:
        """End a node in order: its app ends, open work has `NodeSettings.grace` seconds. It is not started again.

        Raises:
            ConfigurationError: no such node.

        Cancellation:
            it goes on ending.
        """
        raise NotImplementedError

    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain and start nodes again: new processes, with the app's present code.

        Args:
            name: of the only node to restart; None: all of them.
            rolling: one after another, each when the one before is up; else all at once.

        Raises:
            NodeLost: one did not start again, and stays down; those after it are as they were.
            ConfigurationError: no such node.
        """
        raise NotImplementedError


class Fleet(Nodes):
    """The driver's side of a fleet. Made by `of`."""

    def __init__(self, system: ActorSystem) -> None:
        super().__init__(system, secrets.token_bytes(16))
        self._places: dict[str, Place] = {}
        self._count = 0
        self._turn = 0
        self._listeners: list[Listener] = []
        self.supervisor: Ref[Any] = system.spawn(Supervisor, name="nodes", supervise="escalate")
        """The parent of all `Node` actors. If a node starts too often, its error comes out of the system's block."""
        self.coordinator: Ref[Any] = system.spawn(Coordinator, self, supervise=restart("permanent"))
        """Takes the requests of nodes."""
        self.directory.watchers += [self._tell, self._share]
        nodes_asked_by(system, partial(look, self))

    @classmethod
    def of(cls, system: ActorSystem) -> Fleet:
        """Return the fleet of a driver; the first call makes it.

        Raises:
            ConfigurationError: the system is a node's.
        """
        known = _fleets.get(system)
        if known is None:
            return cls(system)
        if not isinstance(known, Fleet):
            raise ConfigurationError(f"{system.name} is a node itself: only its driver starts nodes")
        return known

    # What launchers use.

    @asynccontextmanager
    async def serve(
        self, listening: Callable[[], AbstractAsyncContextManager[Any]], authenticate: Any = None
    ) -> AsyncIterator[Listener]:
        """Let nodes connect.

        Args:
            listening: makes the context of a carrier's listener.
            authenticate: says which `Run` a connection belongs to, by `Identity.name`; by default the name that the carrier gives
                the peer, as for a socket pair.
        """
        authenticate = authenticate or _by_address
        config = self.config()
        async with serve_over(
            self.system, listening, self._hello, Hello, config, authenticate=authenticate
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
        """Run nodes for a block, which begins when all are up; see `levada.actors.nodes.local_nodes`."""
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
    ) -> list[Place]:
        if n < 1:
            raise ConfigurationError(f"a fleet has 1 node or more, not {n!r}")
        wanted = [f"n{self._count + i}" for i in range(n)] if names is None else list(names)
        if len(wanted) != n or len(set(wanted)) != n:
            raise ConfigurationError(f"{n} nodes need {n} different names, not {wanted!r}")
        for name in wanted:
            if name in self._places:
                raise ConfigurationError(f"there is a node {name!r} already")
            if not _NAME.fullmatch(name) or name == "any":
                raise ConfigurationError(
                    f"a node's name has up to 64 letters, digits, '.', '_' and '-', unlike {name!r}"
                )
        places = [Place(name, self._count + i, app, launcher, settings) for i, name in enumerate(wanted)]
        self._count += n
        self._places.update((place.name, place) for place in places)
        return places

    async def _begin(self, place: Place) -> None:
        """Start a node, for the first time or again."""
        place.begun, place.error = False, None
        # A node that has drained stays down, whatever the policy.
        policy = attrs.evolve(place.settings.restart, kind=_ABROAD[place.settings.restart.kind])
        spec = child(Node, self, place, name=place.name, supervise=policy)
        place.ref = await self.supervisor.ask(StartChild(spec), timeout=None)

    async def _begun(self, places: Sequence[Place]) -> None:
        """Wait until nodes are up.

        Raises:
            NodeLost: one could not start.
        """

        def known() -> bool:
            return any(place.error or place.closed for place in places) or all(place.begun for place in places)

        await self.directory.until(known)
        for place in places:
            if place.error is not None:
                raise place.error
            if place.closed:
                raise _closed(place)

    async def _drain(self, place: Place) -> None:
        ref = place.ref
        if ref is None or not ref.is_alive:
            return
        if self.directory[place.name].state is MemberState.DOWN:
            await self.supervisor.ask(StopChild(place.name), timeout=None)  # it waits to be started again
            return
        ref.tell(DrainNode())
        await ref.terminated()

    async def _end(self, place: Place) -> None:
        """Make sure that nothing of a node is left, and forget it."""
        place.closed = True
        try:
            await self.supervisor.ask(StopChild(place.name), timeout=None)
        except ActorStopped:  # the supervisor has failed, and its children end with it
            if place.ref is not None:
                await place.ref.terminated()
        self._places.pop(place.name, None)
        self.directory.remove(place.name)

    # What nodes use.

    async def _hello(self, m: Hello) -> None:
        peer = current_peer()
        assert peer is not None
        assert peer.identity is not None, "every connection has authenticated"
        run = peer.identity.name
        place = self._places.get(run.partition("#")[0])
        answer: Any
        try:
            if place is None or place.ref is None:
                answer = Refused(f"{run} is not expected")
            else:
                answer = await place.ref.ask(Greet(run, m), timeout=None)
        except ActorError as error:
            answer = Refused(str(error))
        with m.answer:
            try:
                m.answer.send(answer)
            except ChannelError:
                pass  # it has ended

    def cut(self, run: Run) -> None:
        """Close the connection of a start of a node at once."""
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
        for place in self._places.values():
            if place.control is None or not place.control.is_alive:
                continue
            if self.directory[place.name].state is not MemberState.DRAINING:  # else it may end before this comes
                try:
                    place.control.tell(news)
                except MailboxFull:
                    # It has read nothing for long, and would know less than the others from now on.
                    self.cut(place.run)

    def _share(self, member: Member, reason: Reason | None) -> None:
        """Share groups and names with a node from its hello to its end."""
        place = self._places.get(member.name)
        if member.state is MemberState.DOWN:
            self.sharing.end(member.node_id)
        elif member.state is MemberState.STARTING and place is not None and place.control is not None:
            self.sharing.begin(member.node_id, place.control)

    # What programs use.

    def choose(self, on: str | int) -> Place:
        """Return a node that is up.

        Raises:
            ActorError: it is not up, or none is.
            ConfigurationError: there is no such node.
        """
        if on == "any":
            up = [place for place in self._places.values() if self._is_up(place)]
            if not up:
                states = ", ".join(f"{member.name} is {member.state.value}" for member in self.members)
                raise ActorError(f"no node is up: {states or 'there is none'}")
            self._turn += 1
            return up[self._turn % len(up)]
        for place in self._places.values():
            if on in (place.name, place.index):
                if not self._is_up(place):
                    raise ActorError(f"{place.name} is {self.directory[place.name].state.value}")
                return place
        raise ConfigurationError(f"there is no node {on!r}; there are: {', '.join(self._places) or 'none'}")

    def _is_up(self, place: Place) -> bool:
        return (
            place.control is not None
            and place.name in self.directory
            and self.directory[place.name].state is MemberState.UP
        )

    async def spawn(
        self,
        cls: Callable[..., Actor[T]],
        *args: Any,
        on: str | int = "any",
        name: str | None = None,
        supervise: Supervision = "stop",
        mailbox: MailboxPolicy | None = None,
    ) -> Ref[T]:
        """Start an actor on a node; see `Nodes.spawn`."""
        return await self.spawn_order(spawn_order(cls, args, supervise, mailbox), on, name)

    async def spawn_order(self, order: Spawn, on: str | int, name: str | None) -> Ref[Any]:
        """Start the actor that an order describes, watch over it if it has a policy, and register it."""
        if name is not None and name in self.system.registry:
            raise NameTaken(f"the name {name!r} is taken", name=name)
        placing = Placing(self, order, on, name)
        if order.policy is None:
            return await placing.start(self.system.ask_timeout)
        # Whether a permanent actor restarts when it has ended by itself is the node's to decide.
        policy = attrs.evolve(policy_of(order.policy, resume=False), kind=_ABROAD[order.policy.kind])
        self.system.spawn(Supervisor, [child(Placed, placing, supervise=policy)])
        return await placing.first(self.system.ask_timeout)

    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor a name of the fleet; see `Nodes.register`."""
        await trio.lowlevel.checkpoint()
        self.system.registry.register(name, ref)

    async def unregister(self, name: str) -> None:
        """Free a name of the fleet; see `Nodes.unregister`."""
        await trio.lowlevel.checkpoint()
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

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ConfigurationError(f"there is no node {name!r}; there are: {', '.join(self._places) or 'none'}")
        return self._places[name]

    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain and start nodes again; see `Nodes.restart`."""
        places = list(self._places.values()) if name is None else [self._place(name)]
        for group in [[place] for place in places] if rolling else [places]:
            async with trio.open_nursery() as nursery:
                for place in group:
                    nursery.start_soon(self._renew, place)
            await self._begun(group)

    async def _renew(self, place: Place) -> None:
        async with place.lock:
            await self._drain(place)
            if not place.closed:
                await self._begin(place)


def _closed(place: Place) -> ActorError:
    return ActorError(f"the block of {place.name} has ended")


async def _by_address(credentials: Credentials) -> Identity:
    return Identity(credentials.info.peer)


class Coordinator(Actor[SpawnOn | LookupOn | DrainOf | Restart | Shared | Register | Unregister]):
    """Does what nodes ask of the driver. None of it holds up the others."""

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
    def lookup_on(self, m: LookupOn) -> Ref[Any] | None:
        """Find an actor."""
        self._answer(partial(self.fleet.lookup, m.name, on=m.on))
        return None

    @handles
    def shared(self, m: Shared) -> None:
        """Take a node's news of groups."""
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
    def drain_of(self, m: DrainOf) -> None:
        """Drain a node."""
        self._answer(partial(self.fleet.drain, m.name))

    @handles
    def restart(self, m: Restart) -> None:
        """Restart nodes."""
        self._answer(partial(self.fleet.restart, m.node, rolling=m.rolling))
