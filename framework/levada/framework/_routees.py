"""The routees of a router, and the common base of all routers. `levada.framework.router` has the theory.

Private fields used here: ``Cell._actor``, ``Actor._bound``.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import attrs

from ._runtime.ask import Ask, content_of
from ._runtime.cell import Cell
from ._runtime.phase import RUNNING
from ._runtime.tokens import Stop
from .actor import Actor
from .links import NORMAL, SHUTDOWN, Reason
from .mailbox import MailboxPolicy
from .ref import Ref
from .registry import Joined, Left
from .supervision import Supervision

__all__ = ["GroupMembers", "PoolChildren", "Resize", "RouterBase"]

logger = logging.getLogger("levada.framework.router")


@attrs.frozen
class Resize:
    """Change the number of a pool's routees: in its turn, or at once with `pull`. It does not travel: no peer decides how many actors there are.

    New routees take the lowest free places. The ones in the highest places leave: they handle their messages, then stop.
    """

    size: int = attrs.field(validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    """1 or more."""


@attrs.define(eq=False)
class PoolChildren:
    """Routees that are children of the router."""

    _factory: Callable[..., Any]
    _args: tuple[Any, ...]
    _size: int
    _mailbox: MailboxPolicy | None
    _supervise: Supervision
    _places: dict[Ref[Any], int] = attrs.field(factory=dict, init=False)
    """The places of all children, including those that are leaving."""
    _routees: dict[Ref[Any], None] = attrs.field(factory=dict, init=False)

    def begin(self, router: RouterBase) -> None:
        self.resize(router, self._size)

    def end(self, router: RouterBase) -> None:
        """The children end with the router."""

    def resize(self, router: RouterBase, size: int) -> None:
        places = self._places
        for last in sorted(self._routees, key=places.__getitem__)[size:][::-1]:
            del self._routees[last]
            router.remove(last)
            last.admit(Stop(SHUTDOWN, final=True))  # type: ignore[attr-defined]
        taken, place = set(places.values()), 0
        while len(self._routees) < size:
            while place in taken:
                place += 1
            taken.add(place)
            ref = router.spawn(
                self._factory, *self._args, name=str(place), mailbox=self._mailbox, supervise=self._supervise
            )
            places[ref] = place
            self._routees[ref] = None
            router.watch_end(ref, functools.partial(self._ended, router, ref))
            router.add(ref, str(place))

    def _ended(self, router: RouterBase, ref: Ref[Any]) -> None:
        del self._places[ref]
        if ref in self._routees:
            del self._routees[ref]
            router.remove(ref)
            if not self._routees:
                # Behind the escalation that this end may cause, because a failure of the router is the more severe reason.
                signal = router.system.scheduler.signal
                signal(signal, self._emptied, router)

    def _emptied(self, router: RouterBase) -> None:
        cell = router._bound()
        ending = cell.ending
        if not self._routees and cell._actor is router and cell.phase is RUNNING and ending is None:
            # Not `request`, which runs later: it would call off a restart that is on its way by then.
            router.system.lifecycle.request_now(cell, NORMAL, False, False)


class GroupMembers:
    """Routees that join and leave a topic. It subscribes itself, not the router's ref, so changes take effect at once."""

    is_alive = True

    def __init__(self, topic: Hashable) -> None:
        self._topic = topic
        self._router: RouterBase

    def begin(self, router: RouterBase) -> None:
        self._router = router
        for ref in router.system.groups.members(self._topic):
            router.check(ref)
        router.system.groups.subscribe(self._topic, self)  # type: ignore[arg-type]

    def end(self, router: RouterBase) -> None:
        router.system.groups.unsubscribe(self._topic, self)  # type: ignore[arg-type]

    def resize(self, router: RouterBase, size: int) -> None:
        router.unhandled(Resize(size))

    # `Groups` calls the next four of a subscriber.
    def check(self, ref: Ref[Any]) -> None:
        self._router.check(ref)

    def tell(self, event: Joined | Left) -> None:
        if isinstance(event, Joined):
            self._router.add(event.ref, self._router.system.groups.label(event.ref))
        else:
            self._router.remove(event.ref)

    def add_watcher(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        """Do nothing: it unsubscribes when its router ends."""

    def forget_watcher(self, key: Hashable) -> None:
        """Do nothing: no watcher is kept."""


class RouterBase(Actor[Any], ABC):
    """The base of all routers: routees that come and go."""

    source: PoolChildren | GroupMembers

    def started(self) -> None:
        self.begin()
        self.source.begin(self)

    def stopping(self, reason: Reason) -> None:
        self.source.end(self)

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.source.end(self)

    def begin(self) -> None:
        """Get ready for routees."""

    def check(self, ref: Ref[Any]) -> None:
        """Raise `ConfigurationError` if `ref` cannot be a routee of this router."""

    @abstractmethod
    def add(self, ref: Ref[Any], label: str) -> None:
        """Route to `ref` too from now on."""

    @abstractmethod
    def remove(self, ref: Ref[Any]) -> None:
        """Stop routing to `ref`."""

    def watch_end(self, ref: Any, ended: Callable[[], None]) -> None:
        """Call `ended` when a child has ended, in the same turn."""
        ref.add_watcher((self, ref), lambda _: ended())

    def not_taken(self, entry: Any, routee: Ref[Any], error: Exception) -> None:
        """Record that a routee's mailbox, or the connection to it, refuses a message."""
        path = self.ref.path
        what = type(content_of(entry)).__name__
        self.system.failure_log.log(
            logger, error, "%s: %s does not take a %s", path, routee.where, what, actor=path, event="not_taken"
        )
        self.refuse(entry, error, "no key" if isinstance(routee, Cell) else "cannot travel")

    def refuse(self, entry: Any, error: Exception, why: str) -> None:
        """Fail a question, or make a message a dead letter, because no routee takes it."""
        if isinstance(entry, Ask):
            entry.fail(error)
        else:
            self.system.dead_letter(entry, self.ref, why)
