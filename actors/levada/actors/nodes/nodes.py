"""`Nodes`: the interface of a fleet for programs, in its driver and in its nodes; and how the members connect to each other.

A system has one fleet. In its driver it is a `levada.actors.nodes.fleet.Fleet`, which starts nodes and decides; in a node it is a
`levada.actors.nodes.body.NodeSide`, which asks the driver. `nodes_of` finds either.
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
    ConnectionLost,
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
)
from .sharing import Sharing

__all__ = ["QMUX", "TO_DRIVER", "Links", "Nodes", "OwnLinks", "fleet_of", "nodes_of"]

T = TypeVar("T")

QMUX: Final = QmuxConfig(protocols=(QMUX_ALPN,), max_streams=4096, max_streams_unidirectional=4096, idle_timeout=0)
"""For connections whose end the operating system reports: no idle time-out."""
TO_DRIVER: Final = attrs.evolve(QMUX, handshake_timeout=1e9)
"""For a child process. A driver may be busy for long when its node is there; it gives late nodes up itself, and its end is noticed."""

_fleets: weakref.WeakKeyDictionary[ActorSystem, Nodes] = weakref.WeakKeyDictionary()
"""Written by `Nodes` alone, which also removes its entry."""


def fleet_of(system: ActorSystem) -> Nodes | None:
    """Return the fleet of a system, if it has one."""
    return _fleets.get(system)


def nodes_of(system: ActorSystem) -> Nodes:
    """Return the fleet of a system: of a driver, or of a node, as an app finds it.

    Raises:
        ConfigurationError: the system has none: it is neither a node nor a driver.
    """
    fleet = _fleets.get(system)
    if fleet is None:
        raise ConfigurationError(
            f"the system {system.name!r} has no nodes, and is none: start some with local_nodes(…)"
        )
    return fleet


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


class Nodes(ABC):
    """The nodes of a fleet. `local_nodes` yields it; `nodes_of` finds it in the driver and in each node."""

    is_driver: ClassVar[bool] = False
    """Whether this process starts the nodes."""

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
        self.sharing = Sharing(system, self.refs, self.directory, driver=self.is_driver)
        """The groups and names of the fleet."""
        self._leavers: tuple[list[Callable[[], Awaitable[None]]], ...] = ([], [])
        self.directory.watchers.append(self._learn)
        _fleets[system] = self
        system.at_end("flush", self._forget)

    def is_for_any(self, name: str) -> bool:
        """Say whether ``on="any"`` may choose the node of this name. Only the driver knows; elsewhere it may."""
        return True

    async def _forget(self) -> None:
        _fleets.pop(self.system, None)

    @asynccontextmanager
    async def before_leaving(self, leave: Callable[[], Awaitable[None]], *, last: bool = False) -> AsyncIterator[None]:
        """While the block lasts: if this node is to end in order, call `leave` first, while its app and its actors still work.

        The driver and the other members know by then that the node is draining. All such functions together have
        `NodeSettings.drain_timeout` seconds, then they are cancelled.

        Args:
            leave: is called at the same time as others.
            last: whether it is called when those that are not are over.
        """
        self._leavers[last].append(leave)
        try:
            yield
        finally:
            self._leavers[last].remove(leave)

    async def leave(self, seconds: float) -> None:
        """Call what `before_leaving` registered; for the process of a node."""
        with trio.move_on_after(seconds):
            for leavers in self._leavers:
                async with trio.open_nursery() as nursery:
                    for each in leavers:
                        nursery.start_soon(each)

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
        return serve(
            self.system, url, _ignore, Any, expose=_all, config=config, authenticate=authenticate, trust_traces=True
        )

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

        The events also go to the subscribers of ``system.events``. A receiver that falls very far behind gets
        `ChannelCancelled`.
        """
        return self.directory.events()

    @abstractmethod
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
                with another ref under the same name, when its node was lost.
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

    @abstractmethod
    async def register(self, name: str, ref: Ref[Any]) -> None:
        """Give an actor of any member a name of the fleet: a name in the driver's registry, which all members can look up.

        The name is free again when the actor has ended. Other members hear of it soon.

        Raises:
            NameTaken: another living actor has it.
            ActorStopped: the actor has ended, or the driver.

        Cancellation:
            the actor may have the name.
        """

    @abstractmethod
    async def unregister(self, name: str) -> None:
        """Free a name of the fleet; does nothing if no actor has it.

        Cancellation:
            the name may be free.
        """

    async def lookup(
        self, name: str, *, on: str | int | None = None, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Ref[Any]:
        """Find an actor by a name of the fleet, or, with `on`, in the registry of a node.

        A name of the fleet may be free for a while, because its actor is starting on another node: this waits until the name is taken again.

        Args:
            name: the name.
            on: the name or the index of a node; then there is no wait for the name.
            timeout: seconds to wait; ``None``: no limit. The default is the system's ``ask_timeout``.

        Raises:
            NameUnknown: no living actor has this name there, or none of the fleet got it in time.
            ConfigurationError: no such node; `timeout` is negative or NaN.
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
        """End a node in order: its app ends, open work has `NodeSettings.drain_timeout` seconds. It is not started again.

        Raises:
            ConfigurationError: no such node.

        Cancellation:
            it goes on ending.
        """

    @abstractmethod
    async def restart(self, name: str | None = None, *, rolling: bool = True) -> None:
        """Drain and start nodes again: new processes, with the app's current code.

        Args:
            name: of the only node to restart; None: all of them.
            rolling: one after another, each when the one before is up; else all at once.

        Raises:
            NodeLost: one did not start again, and stays down; the nodes after it were not restarted.
            ConfigurationError: no such node.
        """
