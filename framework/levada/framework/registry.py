"""Finding actors: one by a name, many by a topic. Each registry belongs to one system; nothing is global."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .errors import ActorStopped, MailboxFull, NameTaken
from .links import SHUTDOWN
from .ref import Ref

if TYPE_CHECKING:
    from .system import ActorSystem

__all__ = ["GroupSharer", "Groups", "Joined", "Left", "NameSharer", "Registry"]


class NameSharer(Protocol):
    """Shares names with other systems, see `Registry.share`."""

    def named(self, name: str, ref: Ref[Any]) -> None:
        """Record that an actor is about to get a name here.

        Raises:
            NameTaken: the name belongs to another actor, elsewhere.
        """
        ...

    def unnamed(self, name: str) -> None:
        """Record that a name is free here."""
        ...

    def find(self, name: str) -> Ref[Any] | None:
        """Return the actor that has the name elsewhere, if none has it here."""
        ...


class Registry:
    """Actors by unique name: ``system.registry``. A name is free again when its actor has ended.

    On a node, the names of its fleet can be read here too: `get`, ``[]`` and ``in`` find them if no actor of this system has the name.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._refs: dict[str, Ref[Any]] = {}
        self._sharer: NameSharer | None = None

    def share(self, sharer: NameSharer) -> None:
        """Tell `sharer` of each name, present and future, and find names through it; at most one. For code that connects systems."""
        self._sharer = sharer
        for name, ref in self._refs.items():
            sharer.named(name, ref)

    def register(self, name: str, ref: Ref[Any]) -> None:
        """Give `ref` a name.

        Raises:
            NameTaken: another living actor has it; registering the same actor again changes nothing.
            ActorStopped: `ref` has ended.
            TypeError: the name is not a str.
            WrongThread: `ref` lives in another thread.
        """
        self._system.check_thread("registry.register()")
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}, wanted a str")
        holder = self._refs.get(name)
        if holder is ref:
            return
        if holder is not None:
            raise NameTaken(f"the name {name!r} belongs to {holder.where}", actor=holder.path, name=name)
        if not ref.is_alive:
            raise ActorStopped(f"{ref.path} has ended and takes no name", actor=ref.path, reason=SHUTDOWN)
        if self._sharer is not None:
            self._sharer.named(name, ref)
        ref.add_watcher((self, name), lambda _: self._free(name))  # type: ignore[attr-defined]
        self._refs[name] = ref

    def unregister(self, name: str) -> None:
        """Free a name; does nothing if no actor has it."""
        self._system.check_thread("registry.unregister()")
        ref = self._free(name)
        if ref is not None:
            ref.forget_watcher((self, name))  # type: ignore[attr-defined]

    def _free(self, name: str) -> Ref[Any] | None:
        ref = self._refs.pop(name, None)
        if ref is not None and self._sharer is not None:
            self._sharer.unnamed(name)
        return ref

    def get(self, name: str) -> Ref[Any] | None:
        """Return the actor with this name, or None."""
        ref = self._refs.get(name)
        return self._sharer.find(name) if ref is None and self._sharer is not None else ref

    def __getitem__(self, name: str) -> Ref[Any]:
        ref = self.get(name)
        if ref is None:
            raise KeyError(name)
        return ref

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)


@attrs.frozen(eq=False)
class Joined:
    """An actor joined a group; sent to the group's subscribers."""

    topic: Hashable
    ref: Ref[Any]


@attrs.frozen(eq=False)
class Left:
    """An actor left a group or ended."""

    topic: Hashable
    ref: Ref[Any]


class GroupSharer(Protocol):
    """Shares groups with other systems, see `Groups.share`. Each membership is changed by the system of its actor alone."""

    def takes(self, topic: Hashable, ref: Ref[Any], *, member: bool) -> bool:
        """Whether a change is this system's to make; if it is not, pass the wish on to the system of `ref`.

        Raises:
            ConfigurationError: the topic, or the ref, cannot be shared.
        """
        ...

    def joined(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Record that an actor of this system has joined."""
        ...

    def left(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Record that an actor of this system has left."""
        ...

    def label(self, ref: Ref[Any]) -> str:
        """Return a text for the actor that is the same in all systems, and after a restart of the actor's system."""
        ...


class Groups:
    """Actors by topic, many for each: ``system.groups``. A member that ends leaves its groups.

    In a fleet of nodes the groups are those of all its members: see `Groups.share`.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._members: dict[Hashable, dict[Ref[Any], None]] = {}
        self._subscribers: dict[Hashable, dict[Ref[Any], None]] = {}
        self._sharer: GroupSharer | None = None

    def share(self, sharer: GroupSharer) -> None:
        """Tell `sharer` of each member of this system, present and future; at most one. For code that connects systems.

        Members of other systems come by `admit` and go by `dismiss`.

        Raises:
            ConfigurationError: a topic, or a member, cannot be shared; nothing has changed.
        """
        present = [(topic, ref) for topic, members in self._members.items() for ref in members]
        for topic, ref in present:
            sharer.takes(topic, ref, member=True)
        self._sharer = sharer
        for topic, ref in present:
            sharer.joined(topic, ref)

    def label(self, ref: Ref[Any]) -> str:
        """Return the name of a member for `consistent_hash`: its path, and its system if that is another one."""
        return ref.where if self._sharer is None else self._sharer.label(ref)

    def join(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Add a member. Does nothing if `ref` is a member already or has ended.

        In a fleet, an actor of another process joins when the request reaches its process.

        Raises:
            ConfigurationError: a router of the topic uses `pull`, and the system of `ref` does not report finished work; or the system is in
                a fleet, and the topic is not made of str, int, bytes and tuples, or the actor is in no member of the fleet.
            WrongThread: `ref` lives in another thread.
        """
        self._system.check_thread("groups.join()")
        if self._sharer is not None and not self._sharer.takes(topic, ref, member=True):
            return
        if ref.is_alive and ref not in self._members.get(topic, ()):
            for subscriber in self._subscribers.get(topic, ()):
                if not isinstance(subscriber, Ref):  # a router's own
                    subscriber.check(ref)
            ref.add_watcher((self, "member", topic), lambda _: self._leave(topic, ref))  # type: ignore[attr-defined]
            self.admit(topic, ref)
            if self._sharer is not None:
                self._sharer.joined(topic, ref)

    def leave(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Remove a member; does nothing if `ref` is not one. In a fleet, the same holds as for `join`."""
        self._system.check_thread("groups.leave()")
        if self._sharer is None or self._sharer.takes(topic, ref, member=False):
            self._leave(topic, ref)

    def _leave(self, topic: Hashable, ref: Ref[Any]) -> None:
        if ref in self._members.get(topic, ()):
            ref.forget_watcher((self, "member", topic))  # type: ignore[attr-defined]
            self.dismiss(topic, ref)
            if self._sharer is not None:
                self._sharer.left(topic, ref)

    def admit(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Add a member of another system, as its system reported; it is not watched. For the sharer."""
        self._members.setdefault(topic, {})[ref] = None
        self._announce(topic, Joined(topic, ref))

    def dismiss(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Remove a member of another system. For the sharer."""
        members = self._members[topic]
        del members[ref]
        if not members:
            del self._members[topic]
        self._announce(topic, Left(topic, ref))

    def members(self, topic: Hashable) -> list[Ref[Any]]:
        """List the members, in the order in which they joined."""
        return list(self._members.get(topic, ()))

    def topics(self) -> list[Hashable]:
        """List the topics that have members."""
        return list(self._members)

    def publish(self, topic: Hashable, message: Any) -> int:
        """Tell all members; return how many took it. For a member with a full mailbox the message becomes a dead letter.

        Raises:
            TypeError, ValueError, LevadaError: the message cannot be encoded for members in other systems, or a mailbox has no key for it; the
                other members got it.
        """
        self._system.check_thread("groups.publish()")
        taken = 0
        refused: Exception | None = None
        for ref in self.members(topic):
            try:
                ref.tell(message)
                taken += 1
            except MailboxFull:
                self._system.dead_letter(message, ref, "mailbox full")
            except Exception as error:  # noqa: BLE001 - raised below
                refused = error if refused is None else refused
        if refused is not None:
            raise refused
        return taken

    def subscribe(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Tell `ref` a `Joined` for each member, present and future, and a `Left` for each that leaves.

        Raises:
            WrongThread: `ref` lives in another thread.
        """
        self._system.check_thread("groups.subscribe()")
        if ref in self._subscribers.get(topic, ()) or not ref.is_alive:
            return
        ref.add_watcher((self, "subscriber", topic), lambda _: self.unsubscribe(topic, ref))  # type: ignore[attr-defined]
        self._subscribers.setdefault(topic, {})[ref] = None
        for member in self.members(topic):
            ref.tell(Joined(topic, member))

    def unsubscribe(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Undo `subscribe`; does nothing if there is no subscription."""
        self._system.check_thread("groups.unsubscribe()")
        subscribers = self._subscribers.get(topic)
        if subscribers is not None and ref in subscribers:
            del subscribers[ref]
            if not subscribers:
                del self._subscribers[topic]
            ref.forget_watcher((self, "subscriber", topic))  # type: ignore[attr-defined]

    def _announce(self, topic: Hashable, event: Joined | Left) -> None:
        for ref in list(self._subscribers.get(topic, ())):
            try:
                ref.tell(event)
            except MailboxFull:
                self._system.dead_letter(event, ref, "mailbox full")
            except Exception:  # noqa: BLE001 - a key that fails is the subscriber's mistake, and this may be the runtime's own turn
                self._system.dead_letter(event, ref, "no key")
