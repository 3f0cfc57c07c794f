"""The groups and names of a fleet: the state that its members share, and how changes travel.

* Only the process of an actor changes the actor's membership. It tells the driver, which tells all nodes. So changes of one membership have
  one source and one path, and all members end with the same groups. The wish of another process travels the same path to that process.
* The names in the driver's registry are the names of the fleet. The nodes have copies.
* The driver *keeps* the name of an actor that it starts again elsewhere. Such a name is not in its registry, has no actor for a while, and is
  found as a `levada.actors.nodes.front.Front` in every process. Each keeping has a number, so that no front outlives it.
* Changes go through a `Relay` for each receiver, in order. A relay keeps only the last change of each membership and each name, so a slow
  node costs no more memory than the state itself. The first messages have the complete state.
* No process watches the members of another. When a node has ended, its members are lost with its refs (`FleetRefs.ended`), at once in each
  process. If a ref is lost although its node lives, a new ref replaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, TypeAlias

import trio

from levada.actors.aqueduct import FleetRefs
from levada.actors.aqueduct.refs import RemoteRef
from levada.framework import ActorSystem, Ref, bounded
from levada.framework.embedding import LocalRef, UntracedActor
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, LevadaError, NameTaken
from levada.framework.text import printable

from .directory import Directory
from .front import HELD, SETTLING, Front
from .messages import Membership, MemberState, Named, SharedChanges, Wish

__all__ = ["Relay", "Sharing"]

logger = logging.getLogger("levada.actors.nodes")

BATCH: Final = 100
"""The most changes in one message. Each can carry a ref, and a ref can need a channel."""

Address: TypeAlias = tuple[bytes, int]
"""Node id and incarnation of an actor."""


class Relay(UntracedActor[Any]):
    """Sends changes to one process.

    Args:
        to: the actor there that takes `SharedChanges`.
        renames: returns the number of changes of names so far.
    """

    def __init__(self, to: Ref[Any], renames: Callable[[], int]) -> None:
        self.to = to
        self._renames = renames
        self._pending: dict[Hashable, Membership | Named | Wish] = {}
        self._news = trio.Event()

    def put(self, key: Hashable, news: Membership | Named | Wish) -> None:
        """Send a change; it replaces an unsent change with the same key."""
        self._pending.pop(key, None)
        self._pending[key] = news
        self._news.set()

    def started(self) -> None:
        """Begin."""
        self.start_soon(self._run)

    async def _run(self) -> None:
        pending = self._pending
        try:
            while True:
                self._news = trio.Event()
                batch = [pending.pop(key) for key in [*pending][:BATCH]]
                await self.to.send(SharedChanges(batch, not pending, self._renames()))
                if not pending:
                    await self._news.wait()
        except ActorError:
            self.stop()  # the process has ended
        except LevadaError as error:
            logger.error("%r gets no more changes of groups and names: %s", self.to, error)
            self.stop()


class Sharing:
    """The shared state in one process: the `levada.framework.registry.GroupSharer` and `NameSharer` of its system.

    Args:
        system: has been entered.
        refs: the refs of the fleet.
        directory: the members of the fleet.
        driver: whether this process is the driver.

    Raises:
        ConfigurationError: an existing topic or group member of the system cannot travel.
    """

    def __init__(self, system: ActorSystem, refs: FleetRefs, directory: Directory, *, driver: bool) -> None:
        self._system = system
        self._refs = refs
        self._directory = directory
        self._driver = driver
        self._driver_id = refs.node_id if driver else b""
        self._relays: dict[bytes, Relay] = {}
        """The relays, by the receiver's node id."""
        self._own: dict[tuple[Hashable, Address], Ref[Any]] = {}
        self._others: dict[tuple[Hashable, Address], RemoteRef] = {}
        self._names: dict[str, Ref[Any]] = {}
        """The names of the fleet that an actor has."""
        self._kept: dict[str, int] = {}
        """The numbers of the keepings of names, with or without an actor."""
        self._keepings = 0
        """The keepings so far, in the driver."""
        self._fronts: dict[str, Front] = {}
        self.renames = 0
        """The changes of names so far, as the driver counts them; on a node, those that have arrived."""
        self._renamed = trio.lowlevel.ParkingLot()
        self.whole = trio.Event()
        """Set when the complete first state has arrived from the driver."""
        system.groups.share(self)
        system.registry.share(self)

    # Calls of the system.

    def takes(self, topic: Hashable, ref: Ref[Any], *, member: bool) -> bool:
        """Return whether the actor lives in this process. If not, pass the wish on to its process.

        Raises:
            ConfigurationError: the topic or the ref cannot travel in the fleet.
        """
        if not _travels(topic):
            raise ConfigurationError(
                f"the topic {topic!r} cannot travel between nodes: use str, int, bytes and tuples of them"
            )
        if isinstance(ref, LocalRef):
            return True
        address = self._address(ref)
        if address is None:
            raise ConfigurationError(
                f"{ref.where} is in no member of the fleet: let an actor of this process join, and pass messages on to it"
            )
        self._pass_on(Wish(topic, address[0], ref, member), (topic, address))
        return False

    def joined(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Announce that an actor of this process has joined."""
        address = (self._refs.node_id, ref.incarnation)
        self._own[topic, address] = ref
        self._tell((topic, address), Membership(topic, *address, ref))

    def left(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Announce that an actor of this process has left."""
        address = (self._refs.node_id, ref.incarnation)
        del self._own[topic, address]
        self._tell((topic, address), Membership(topic, *address, None))

    def label(self, ref: Ref[Any]) -> str:
        """Return the path and the name of the node."""
        address = self._address(ref)
        return ref.where if address is None else f"{ref.path} at {self._name_of(address[0])}"

    def named(self, name: str, ref: Ref[Any]) -> None:
        """In the driver, announce a name to all nodes.

        A ref that belongs to no member, and a name that cannot be encoded, are known to the driver only.

        Raises:
            NameTaken: the name is kept.
        """
        if self._driver:
            self.require_free(name)
            if self._address(ref) is not None and _is_unicode(name):
                self._rename(name, ref)

    def unnamed(self, name: str) -> None:
        """In the driver, announce that a name is free."""
        if self._driver and name in self._names and name not in self._kept:
            self._rename(name, None)

    def require_free(self, name: str) -> None:
        """Raise `NameTaken` if a name is kept."""
        if self.is_kept(name):
            ref = self.actor(name)
            owner = "an actor that moves to another node" if ref is None else ref.where
            raise NameTaken(f"the name {name!r} belongs to {owner}", name=name)

    def is_kept(self, name: str) -> bool:
        """Return whether a name belongs to an actor that the driver starts again elsewhere."""
        return name in self._kept

    def keep(self, name: str, ref: Ref[Any]) -> None:
        """In the driver, give a name to an actor, and keep it until `free`.

        Raises:
            NameTaken: another actor has the name, in the driver's registry.
        """
        if name not in self._kept:
            if name in self._system.registry:
                holder = self._system.registry[name]
                raise NameTaken(f"the name {name!r} belongs to {holder.where}", actor=holder.path, name=name)
            self._keepings += 1
            self._rename(name, ref, self._keepings)
        else:
            self._rename(name, ref, self._kept[name])

    def vacate(self, name: str) -> int:
        """In the driver, announce that a kept name has no actor for now; return the number of changes of names so far."""
        if name in self._names:
            self._rename(name, None, self._kept[name])
        return self.renames

    def free(self, name: str) -> None:
        """In the driver, end the keeping of a name."""
        if name in self._kept:
            self._rename(name, None)

    def find(self, name: str) -> Ref[Any] | None:
        """Return the living actor of the fleet with this name, or its front here if the name is kept; None if the name is free."""
        return self._front(name) if self.is_kept(name) else self.actor(name)

    def _front(self, name: str) -> Ref[Any] | None:
        front = self._fronts.get(name)
        if front is None or not front.ref.is_alive:
            front = Front(name, partial(self.actor, name))
            made = front
            try:
                self._system.spawn(lambda: made, mailbox=bounded(HELD))
            except ActorStopped:
                return None  # the system is ending
            self._fronts[name] = front
        return front.ref

    async def settle(self, name: str, renames: int) -> None:
        """Wait until this process knows so many changes of names, and what its front of a name has passed on has arrived."""
        front = self._fronts.get(name)
        if await self.renamed(renames, SETTLING) and front is not None and front.ref.is_alive:
            await front.settle()

    def actor(self, name: str) -> Ref[Any] | None:
        """Return the living actor of the fleet that has a name now, or None."""
        ref = self._names.get(name)
        if isinstance(ref, RemoteRef) and not ref.is_alive and ref.fleet is not None:
            # Lost, perhaps with its connection only. If the actor has ended, the driver announces it.
            ref = self._names[name] = self._refs.third(ref.identity)
        return ref if ref is not None and ref.is_alive else None

    async def named_until(self, name: str, timeout: float) -> Ref[Any] | None:
        """Wait until an actor of the fleet has this name; return None after `timeout` seconds."""
        with trio.move_on_after(timeout):
            while (ref := self.find(name)) is None:
                await self._renamed.park()
            return ref
        return None

    async def renamed(self, renames: int, timeout: float) -> bool:
        """Wait until so many changes of names have arrived, for `timeout` seconds at most; return whether they have."""
        with trio.move_on_after(timeout):
            while self.renames < renames:
                await self._renamed.park()
        return self.renames >= renames

    # Calls for other processes.

    def begin(self, node_id: bytes, to: Ref[Any]) -> None:
        """Send the complete state to a process, and all changes from now on.

        Args:
            node_id: the node id of the process.
            to: the actor there that takes `SharedChanges`.
        """
        if not self._driver:
            self._driver_id = node_id
        self.end(node_id)
        relay = Relay(to, lambda: self.renames)
        self._relays[node_id] = relay
        self._system.spawn(lambda: relay)
        members: dict[tuple[Hashable, Address], Ref[Any]] = {**self._own, **(self._others if self._driver else {})}
        for (topic, address), ref in members.items():
            if address[0] != node_id:
                relay.put((topic, address), Membership(topic, *address, ref))
        if self._driver:
            for name in {**self._names, **self._kept}:
                self._put_name(relay, name)

    def end(self, node_id: bytes) -> None:
        """Send no more changes to a process."""
        relay = self._relays.pop(node_id, None)
        if relay is not None:
            relay.ref.stop(now=True)

    def dismiss(self, node_id: bytes) -> None:
        """In the driver, remove all members of a node that drains, and announce it. Nobody of this node joins any more."""
        for key in [key for key in self._others if key[1][0] == node_id]:
            self._take_membership(*key, None)

    def take(self, shared: SharedChanges) -> None:
        """Apply the changes of another process."""
        for news in shared.news:
            if isinstance(news, Named):
                if not self._driver:
                    self._rename(news.name, news.ref, news.kept)
                continue
            topic = _topic(news.topic)
            if not _travels(topic):
                logger.warning("a change of a group has an invalid topic: %s", printable(repr(topic)[:60]))
            elif isinstance(news, Wish):
                self._wish(topic, news)
            elif news.node != self._refs.node_id:
                ref = None if self._driver and self._is_leaving(news.node) else news.ref
                self._take_membership(topic, (news.node, news.number), ref)
        if shared.whole:
            if not self._driver:
                self.renames = shared.renames
                self._renamed.unpark_all()
            self.whole.set()

    def _take_membership(self, topic: Hashable, address: Address, ref: Ref[Any] | None) -> None:
        key = (topic, address)
        known = self._others.get(key)
        if ref is not None and known is ref:
            return
        if known is not None:
            del self._others[key]
            known.forget_watcher((self, topic))
            self._system.groups.dismiss(topic, known)
        if isinstance(ref, RemoteRef) and ref.is_alive:
            self._others[key] = ref
            ref.note_end((self, topic), lambda _: self._lost(key))
            self._system.groups.admit(topic, ref)
            self._tell(key, Membership(topic, *address, ref))
        elif known is not None:
            self._tell(key, Membership(topic, *address, None))

    def _lost(self, key: tuple[Hashable, Address]) -> None:
        """Replace a lost ref, or remove it if its actor or its node has ended."""
        ref = self._others[key]
        self._take_membership(*key, self._refs.third(ref.identity))

    def _wish(self, topic: Hashable, wish: Wish) -> None:
        groups = self._system.groups
        try:
            if wish.member:
                groups.join(topic, wish.ref)
            else:
                groups.leave(topic, wish.ref)
        except ConfigurationError as error:
            logger.warning("%s", error)

    def _pass_on(self, wish: Wish, key: Hashable) -> None:
        """Send a wish to the process of its actor, or to the driver, which passes it on."""
        relay = self._relays.get(wish.node) if self._driver else next(iter(self._relays.values()), None)
        if relay is not None:  # otherwise the node has ended
            relay.put(("wish", key), wish)

    def _rename(self, name: str, ref: Ref[Any] | None, kept: int = 0) -> None:
        """Give a name to an actor, or to none; with the number of its keeping, if it is kept."""
        front = self._fronts.get(name)
        if ref is None:
            self._names.pop(name, None)
        else:
            self._names[name] = ref
        if self._kept.get(name, 0) != kept:
            self._fronts.pop(name, None)
            if front is not None and front.ref.is_alive:
                front.free()
            self._kept.pop(name, None)
            if kept:
                self._kept[name] = kept
        elif front is not None and front.ref.is_alive:
            front.turn()
        self._renamed.unpark_all()
        if self._driver:
            self.renames += 1
            for relay in self._relays.values():
                self._put_name(relay, name)

    def _put_name(self, relay: Relay, name: str) -> None:
        if _is_unicode(name):
            relay.put(name, Named(name, self._names.get(name), self._kept.get(name, 0)))

    def _tell(self, key: tuple[Hashable, Address], news: Membership) -> None:
        """Announce a change: the driver to all nodes except the actor's, a node to the driver if the actor is its own."""
        for node_id, relay in self._relays.items():
            if node_id != news.node and (self._driver or news.node == self._refs.node_id):
                relay.put(key, news)

    def _address(self, ref: Ref[Any]) -> Address | None:
        """Return the address of an actor; None if it lives in no member of the fleet."""
        if isinstance(ref, LocalRef):
            return self._refs.node_id, ref.incarnation
        if isinstance(ref, RemoteRef) and ref.fleet is self._refs:
            return ref.identity.node, ref.incarnation
        return None

    def _is_leaving(self, node_id: bytes) -> bool:
        return any(
            member.node_id == node_id and member.state is MemberState.DRAINING for member in self._directory.members
        )

    def _name_of(self, node_id: bytes) -> str:
        if node_id == self._driver_id:
            return "the driver"
        names = (member.name for member in self._directory.members if member.node_id == node_id)
        return next(names, node_id.hex()[:8])


def _travels(topic: Hashable) -> bool:
    """Return whether a topic is the same after it has travelled."""
    if isinstance(topic, tuple):
        return type(topic) is tuple and all(_travels(part) for part in topic)
    if type(topic) is str:
        return _is_unicode(topic)
    return type(topic) is bytes or (type(topic) is int and -(1 << 63) <= topic < 1 << 64)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, as the names of files may have, which cannot be encoded."""
    return text.isascii() or text.encode(errors="ignore") == text.encode(errors="surrogatepass")


def _topic(plain: Any) -> Hashable:
    """Return a topic as it was before it travelled: arrays become tuples."""
    return tuple(_topic(part) for part in plain) if isinstance(plain, list) else plain
