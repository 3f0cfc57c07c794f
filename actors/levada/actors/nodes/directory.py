"""The members of a fleet, as one of its processes knows them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import trio

from levada.framework import ActorSystem, Normal, Reason, Receiver, Sender, channel
from levada.framework.errors import ChannelError, ConfigurationError

from .messages import Member, MemberState, NodeDown, NodeUp

__all__ = ["Directory"]


class Directory:
    """The members by name, with events for subscribers and a way to wait for changes."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._members: dict[str, Member] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._listeners: dict[Sender[NodeUp | NodeDown], None] = {}
        self.watchers: list[Callable[[Member, Reason | None], None]] = []
        """Called with each changed member, and with the reason if it is down."""

    @property
    def members(self) -> list[Member]:
        """All members but the driver, by index."""
        return sorted(self._members.values(), key=lambda member: member.index)

    def __getitem__(self, name: str) -> Member:
        try:
            return self._members[name]
        except KeyError:
            names = ", ".join(self._members) or "none"
            raise ConfigurationError(f"there is no node {name!r}; there are: {names}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def change(self, member: Member, reason: Reason | None = None) -> None:
        """Store the new state of a member; `reason` says why it is down."""
        before = self._members.get(member.name)
        self._members[member.name] = member
        self.wake()
        for watcher in list(self.watchers):
            watcher(member, reason)
        if member.state is MemberState.UP and (before is None or before.state is not MemberState.UP):
            self._publish(NodeUp(member))
        elif member.state is MemberState.DOWN and (before is None or before.state is not MemberState.DOWN):
            self._publish(NodeDown(member, reason or Normal()))

    def remove(self, name: str) -> None:
        """Forget a member that is down for good."""
        self._members.pop(name, None)
        self.wake()

    def wake(self) -> None:
        """Wake waiting tasks, which check their conditions again."""
        self._changed.unpark_all()

    async def until(self, ready: Callable[[], bool], timeout: float = math.inf) -> bool:
        """Wait until a condition holds; return False if it does not within `timeout` seconds.

        Args:
            ready: the condition, checked after each change.
            timeout: seconds.
        """
        with trio.move_on_after(timeout):
            while not ready():
                await self._changed.park()
            return True
        return False

    def _publish(self, event: NodeUp | NodeDown) -> None:
        self._system.events.publish(event)
        for sender in list(self._listeners):
            try:
                sender.send_nowait(event)
            except trio.WouldBlock:
                # A subscriber that does not keep up gets an error, so it cannot miss an event without noticing.
                self._listeners.pop(sender)
                sender.cancel()
            except ChannelError:
                self._listeners.pop(sender, None)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[Receiver[NodeUp | NodeDown]]:
        """Receive all events from now on."""
        sender: Sender[NodeUp | NodeDown]
        sender, receiver = channel(NodeUp | NodeDown, name="node events")
        self._listeners[sender] = None
        try:
            with receiver:
                yield receiver
        finally:
            self._listeners.pop(sender, None)
            sender.cancel()

    def renew(self, name: str, **changes: object) -> Member:
        """Return a member with changes."""
        return attrs.evolve(self[name], **changes)  # type: ignore[misc]  # a message class is an attrs class
