"""`Nodes`: a fleet, as programs use it in the driver and in nodes; and how the members connect to each other.

A system has one fleet. In the driver it is a `levada.actors.nodes.fleet.Fleet`, which starts nodes and decides; in a node it is a
`levada.actors.nodes.node_side.NodeSide`, which asks the driver. `nodes_of` finds either.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, Final, Protocol, TypeVar

import attrs
import trio

from levada.actors.aqueduct import FleetRefs, Listener, Peer, PeerConfig, connect, serve
from levada.actors.authentication import Authenticate
from levada.framework import (
    Actor,
    ActorSystem,
    Lost,
    MailboxPolicy,
    Reason,
    Receiver,
    Ref,
    Supervision,
)
from levada.framework.errors import (
    ConfigurationError,
    NameUnknown,
)
from levada.framework.ref import DEFAULT_TIMEOUT, check_timeout
from levada.transports.aqueduct import QMUX_ALPN
from levada.transports.carriers import unix
from levada.transports.qmux import QmuxConfig

from .directory import Directory
from .messages import (
    Member,
    MemberState,
    NodeDown,
    NodeUp,
    Spawn,
)
from .orders import spawn_order
from .sharing import Sharing

__all__ = ["QMUX", "TO_DRIVER", "Links", "Nodes", "OwnLinks", "fleet_of", "nodes_of"]

T = TypeVar("T")

_STREAMS: Final = PeerConfig().core.max_channels + 1
"""A channel takes a stream. With fewer streams a channel too many would wait without a word, instead of being an error."""
QMUX: Final = QmuxConfig(
    protocols=(QMUX_ALPN,), max_streams=_STREAMS, max_streams_unidirectional=_STREAMS, idle_timeout=0
)
"""For connections whose end the operating system reports, so they have no idle time-out."""
TO_DRIVER: Final = attrs.evolve(QMUX, handshake_timeout=1e9)
"""For a child process. The driver may be busy for long when its node connects; it gives up late nodes itself, and its end is noticed."""

_fleets: weakref.WeakKeyDictionary[ActorSystem, Nodes] = weakref.WeakKeyDictionary()
"""Only `Nodes` adds and removes entries."""


def fleet_of(system: ActorSystem) -> Nodes | None:
    """Return the fleet of a system, if it has one."""
    return _fleets.get(system)


def nodes_of(system: ActorSystem) -> Nodes:
    """Return the fleet of a system, which is a driver or a node.

    Raises:
        ConfigurationError: the system is neither a driver nor a node.
    """
    fleet = _fleets.get(system)
    if fleet is None:
        raise ConfigurationError(
            f"the system {system.name!r} is neither a node nor the driver of nodes: start nodes with local_nodes(…), "
            "or use singleton(…) and shards(…), which need none"
        )
    return fleet


async def _ignore(_: Any) -> None:
    """Ignore messages; members send none to the entrypoint."""


def _all(_: str) -> bool:
    return True


class Links(Protocol):
    """How members connect to each other, for URLs of one scheme."""

    def listen(self, nodes: Nodes, url: str) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members, with `Nodes.serve_members`.

        Args:
            nodes: this member's fleet.
            url: the URL from `levada.actors.nodes.Launcher`.
        """
        ...

    def carrier(self, node_id: bytes) -> Any:
        """Return the carrier's settings to dial a member."""
        ...


@attrs.frozen
class OwnLinks:
    """Links within a machine, over carriers that only this user can reach."""

    settings: Any
    """The carrier's settings."""

    def listen(self, nodes: Nodes, url: str) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members; see `Links.listen`."""
        return nodes.serve_members(url, self.settings)

    def carrier(self, node_id: bytes) -> Any:
        """Return the carrier's settings."""
        return self.settings


def _own_sockets() -> unix.UnixConfig:
    # On other systems the folder's mode alone keeps other users out.
    return unix.UnixConfig(allowed_uids={os.getuid()} if sys.platform == "linux" else None)


class Nodes(ABC):
    """The nodes of a fleet. `local_nodes` yields it; `nodes_of` finds it in the driver and in each node."""

    is_driver: ClassVar[bool] = False
    """Whether this process starts the nodes."""

    def __init__(self, system: ActorSystem, node_id: bytes) -> None:
        if system in _fleets:
            raise ConfigurationError(f"the system {system.name!r} has a fleet already")
        self.system = system
        self.node_id = node_id
        """16 random bytes that identify this process in the fleet."""
        self.directory = Directory(system)
        self.links: dict[str, Links] = {
            "aqueduct+memory": OwnLinks(None),
            "aqueduct+unix": OwnLinks(attrs.evolve(QMUX, below=_own_sockets())),
        }
        """How members connect to each other, by URL scheme."""
        self.refs = FleetRefs(system, node_id, self._dial)
        """The refs that travel between the members."""
        self.sharing = Sharing(system, self.refs, self.directory, driver=self.is_driver)
        """The groups and names of the fleet."""
        self._leavers: tuple[list[Callable[[], Awaitable[None]]], ...] = ([], [])
        self.directory.watchers.append(self._learn)
        _fleets[system] = self
        system.at_end("flush", self._forget)

    def is_for_any(self, name: str) -> bool:
        """Return whether ``on="any"`` may choose a node of this name. Only the driver knows; nodes return True."""
        return True

    def takes_orders(self, name: str) -> bool:
        """Return whether actors can be started on a node: it is up, or its app is starting. Only the driver knows."""
        return False

    async def _forget(self) -> None:
        _fleets.pop(self.system, None)

    @asynccontextmanager
    async def before_leaving(self, leave: Callable[[], Awaitable[None]], *, last: bool = False) -> AsyncIterator[None]:
        """Call `leave` when this node drains, while its app and its actors still work. This holds as long as the block lasts.

        By then the driver and the other members know that the node is draining. All such functions together have
        `NodeSettings.drain_timeout` seconds, then they are cancelled.

        Args:
            leave: the function, called at the same time as others.
            last: whether to call it when the app has ended, and the actors still work.
        """
        self._leavers[last].append(leave)
        try:
            yield
        finally:
            self._leavers[last].remove(leave)

    async def leave(self, seconds: float, *, last: bool) -> None:
        """Call the functions of `before_leaving`, with or without `last`, for at most `seconds`. For the process of a node."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for each in self._leavers[last]:
                    nursery.start_soon(each)

    def _links_of(self, url: str) -> Links:
        scheme = url.partition("://")[0]
        try:
            return self.links[scheme]
        except KeyError:
            raise ConfigurationError(f"this process has no links to members at {scheme}://") from None

    def listen(self, url: str) -> AbstractAsyncContextManager[Listener]:
        """Accept other members, which connect and claim refs."""
        return self._links_of(url).listen(self, url)

    def serve_members(
        self, url: str, carrier: Any, authenticate: Authenticate | None = None
    ) -> AbstractAsyncContextManager[Listener]:
        """Listen for other members; for `Links`.

        Args:
            url: the URL of the listener.
            carrier: the carrier's settings.
            authenticate: decides on clients; None admits all.
        """
        config = self.config(carrier)
        return serve(
            self.system, url, _ignore, Any, expose=_all, config=config, authenticate=authenticate, trust_traces=True
        )

    def config(self, carrier: Any = None) -> PeerConfig:
        """Return the settings of connections between members, with these settings of the carrier."""
        return PeerConfig(fleet=self.refs, carrier=carrier)

    def _url_of(self, node_id: bytes) -> str:
        """Return the URL of a member; empty if it is not known."""
        return next((member.url for member in self.members if member.node_id == node_id), "")

    @asynccontextmanager
    async def _dial(self, node_id: bytes) -> AsyncIterator[Peer[Any]]:
        url = self._url_of(node_id)  # `FleetRefs.met` has waited for the news of it
        config = self.config(self._links_of(url).carrier(node_id))
        async with connect(self.system, url, object, expose=_all, config=config) as peer:
            yield peer

    def _learn(self, member: Member, reason: Reason | None) -> None:
        """Make the refs of a node that listens usable, and end the refs of a node that went down."""
        if member.node_id == self.node_id or not member.node_id:
            return
        if member.state in (MemberState.STARTING, MemberState.UP) and member.url:
            self.refs.known(member.node_id, member.name)
        elif member.state is MemberState.DOWN:
            self.refs.ended(member.node_id, Lost(member.name))

    @property
    def members(self) -> list[Member]:
        """All nodes in their current state, by index."""
        return self.directory.members

    def __getitem__(self, name: str) -> Member:
        """Return a node in its current state.

        Raises:
            ConfigurationError: there is no node of this name.
        """
        return self.directory[name]

    def events(self) -> AbstractAsyncContextManager[Receiver[NodeUp | NodeDown]]:
        """Receive `NodeUp` and `NodeDown` from now on: ``async with nodes.events() as events``.

        The events also go to the subscribers of ``system.events``. A receiver that does not keep up gets `ChannelCancelled`.
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
            cls: an `Actor` class that can be imported, and that the node's app has imported. Only its name is sent, never code.
            args: the arguments of the class, which must be values that messages can hold.
            on: the name or the index of a node, or ``"any"``: the nodes that are up take turns.
            name: a name of the fleet for the actor.
            supervise: ``"stop"``, or a `restart` policy. With a policy the actor restarts on its node after a failure. When its node drains or was
                lost, it starts on a node again, as another actor with the same name. The name is kept meanwhile, see `lookup`.
            mailbox: see `bounded`; `conflate` cannot travel.

        Raises:
            ConfigurationError: the class cannot be imported elsewhere, or the node has not imported it; there is no such node; `supervise` is
                ``"escalate"``.
            TypeError, ValueError: an argument cannot travel.
            NameTaken: another actor has the name.
            ActorError: the class raised, or no node is up.
            ActorStopped: the node ended meanwhile.
            AskTimeout: the node did not answer within the system's ``ask_timeout``.

        Cancellation:
            the actor may have been started.
        """
        return await self.spawn_order(spawn_order(cls, args, supervise, mailbox, label=name), on, name)

    @abstractmethod
    async def spawn_order(self, order: Spawn, on: str | int, name: str | None) -> Ref[Any]:
        """Start the actor that an order describes; for `spawn`, which says more."""

    @abstractmethod
    async def join(self, order: Spawn, on: str | int, name: str) -> Ref[Any]:
        """Start the actor of a name that is kept, or find it; for `singleton`, which says more.

        Args:
            order: describes the actor.
            on: as for `spawn`.
            name: the name of the fleet.
        """

    @abstractmethod
    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor of any member a name of the fleet: a name in the driver's registry, which all members can look up.

        The name is free again when the actor has ended. Other members learn of the change a little later. So does this node, with a warning in
        its log, if the news has not come within the system's ``ask_timeout``.

        Raises:
            NameTaken: another living actor has the name.
            ActorStopped: the actor or the driver has ended.

        Cancellation:
            the actor may have got the name.
        """

    @abstractmethod
    async def unregister(self, name: str) -> None:
        """Free a name of the fleet. Does nothing if no actor has it.

        Raises:
            ConfigurationError: the name is kept, so it is free only when its actor has ended for good.

        Cancellation:
            the name may have become free.
        """

    async def lookup(
        self, name: str, *, on: str | int | None = None, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Ref[Any]:
        """Find an actor by a name of the fleet, or, with `on`, in the registry of a node.

        This waits until the name is taken. If the driver starts the actor again on another node (`spawn` with a policy, `singleton`), the name
        is kept: the ref is of an actor of this process that passes everything on to the actor with the name, wherever it is. While there is
        none, messages and questions wait, at most 1024. A question that the actor had when its node was lost fails with `ActorStopped`.
        The ref ends with the actor, when it has ended for good.

        Args:
            name: the name.
            on: the name or the index of a node, whose registry is asked without waiting for the name.
            timeout: seconds to wait; ``None``: no limit. The default is the system's ``ask_timeout``.

        Raises:
            NameUnknown: no living actor has the name, on that node or, until the time-out, in the fleet.
            ConfigurationError: there is no such node, or `timeout` is negative or NaN.
        """
        if on is not None:
            return await self._lookup_on(name, on)
        check_timeout(timeout)
        seconds = self.system.ask_timeout if timeout is DEFAULT_TIMEOUT else timeout
        await trio.lowlevel.checkpoint()
        ref = await self.sharing.named_until(name, math.inf if seconds is None else seconds)
        if ref is None:
            raise NameUnknown(
                f"no actor of the fleet has the name {name!r}, and none got it within {seconds:g} s", name=name
            )
        return ref

    @abstractmethod
    async def _lookup_on(self, name: str, on: str | int) -> Ref[Any]:
        """Find an actor in the registry of a node."""

    @abstractmethod
    async def drain(self, name: str) -> None:
        """Drain a node, and wait for its end: its app ends, and open work has `NodeSettings.drain_timeout` seconds. It does not restart.

        In an actor of this node, call it with `start_soon`: the node waits for the handlers of its actors.

        Raises:
            ConfigurationError: there is no such node.

        Cancellation:
            the node still ends.
        """

    @abstractmethod
    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain nodes and start them again, in new processes with the app's current code. A call waits for the calls before it.

        In a rolling restart, message classes may grow: by fields at the end that have defaults, and by new classes.

        In an actor of a node, call it with `start_soon`, as `drain`.

        Args:
            name: the only node to restart; None: all nodes, except keepers and other nodes without `NodeSettings.on_any`, and nodes whose block
                ends meanwhile.
            rolling: whether to restart them one after another, each when the one before is up; otherwise all at once.

        Raises:
            NodeLost: a node did not start again and stays down, perhaps because a message class of its code does not fit the others; the nodes
                after it were not restarted.
            ConfigurationError: there is no such node.

        Cancellation:
            a node that was told to drain still ends, and may stay down.
        """
