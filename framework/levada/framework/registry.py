"""Finding actors: one by a name, many by a topic. Each registry belongs to one system; nothing is global."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from .errors import ActorStopped, MailboxFull, NameTaken
from .links import SHUTDOWN
from .ref import Ref

if TYPE_CHECKING:
    from .system import ActorSystem

__all__ = ["Groups", "Joined", "Left", "Registry"]


class Registry:
    """Actors by unique name: ``system.registry``. A name is free again when its actor has ended."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._refs: dict[str, Ref[Any]] = {}

    def register(self, name: str, ref: Ref[Any]) -> None:
        """Give `ref` a name.

        Raises:
            NameTaken: another living actor has it; registering the same actor again changes nothing.
            ActorStopped: `ref` has ended.
        """
        self._system.check_thread("registry.register()")
        holder = self._refs.get(name)
        if holder is ref:
            return
        if holder is not None:
            raise NameTaken(f"the name {name!r} belongs to {holder.path}", actor=holder.path, name=name)
        if not ref.is_alive:
            raise ActorStopped(f"{ref.path} has ended and takes no name", actor=ref.path, reason=SHUTDOWN)
        self._refs[name] = ref
        ref.add_watcher((self, name), lambda _: self._refs.pop(name, None))  # type: ignore[attr-defined]

    def unregister(self, name: str) -> None:
        """Free a name; does nothing if no actor has it."""
        self._system.check_thread("registry.unregister()")
        ref = self._refs.pop(name, None)
        if ref is not None:
            ref.forget_watcher((self, name))  # type: ignore[attr-defined]

    def get(self, name: str) -> Ref[Any] | None:
        """Return the actor with this name, or None."""
        return self._refs.get(name)

    def __getitem__(self, name: str) -> Ref[Any]:
        return self._refs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._refs

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


class Groups:
    """Actors by topic, many for each: ``system.groups``. A member that ends leaves its groups."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._members: dict[Hashable, dict[Ref[Any], None]] = {}
        self._subscribers: dict[Hashable, dict[Ref[Any], None]] = {}

    def join(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Add a member. Does nothing if `ref` is a member already or has ended.

        Raises:
            ConfigurationError: a router of the topic uses `pull`, and `ref` is in another system.
        """
        self._system.check_thread("groups.join()")
        if ref.is_alive and ref not in self._members.get(topic, ()):
            for subscriber in self._subscribers.get(topic, ()):
                if not isinstance(subscriber, Ref):  # a router's own
                    subscriber.check(ref)
            self._members.setdefault(topic, {})[ref] = None
            self._announce(topic, Joined(topic, ref))
            ref.add_watcher((self, "member", topic), lambda _: self.leave(topic, ref))  # type: ignore[attr-defined]

    def leave(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Remove a member; does nothing if `ref` is not one."""
        self._system.check_thread("groups.leave()")
        members = self._members.get(topic)
        if members is not None and ref in members:
            del members[ref]
            if not members:
                del self._members[topic]
            ref.forget_watcher((self, "member", topic))  # type: ignore[attr-defined]
            self._announce(topic, Left(topic, ref))

    def members(self, topic: Hashable) -> list[Ref[Any]]:
        """List the members, in the order in which they joined."""
        return list(self._members.get(topic, ()))

    def topics(self) -> list[Hashable]:
        """List the topics that have members."""
        return list(self._members)

    def publish(self, topic: Hashable, message: Any) -> int:
        """Tell all members; return how many took it. For a member with a full mailbox the message becomes a dead letter."""
        self._system.check_thread("groups.publish()")
        taken = 0
        for ref in self.members(topic):
            try:
                ref.tell(message)
                taken += 1
            except MailboxFull:
                self._system.dead_letter(message, ref, "mailbox full")
        return taken

    def subscribe(self, topic: Hashable, ref: Ref[Any]) -> None:
        """Tell `ref` a `Joined` for each member, present and future, and a `Left` for each that leaves."""
        self._system.check_thread("groups.subscribe()")
        subscribers = self._subscribers.setdefault(topic, {})
        if ref in subscribers or not ref.is_alive:
            return
        subscribers[ref] = None
        ref.add_watcher((self, "subscriber", topic), lambda _: self.unsubscribe(topic, ref))  # type: ignore[attr-defined]
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
