"""The event stream of a system, and its dead letters.

An event is an instance of any class. A subscription names a class and gets its instances, subclasses included.
Subscribers are ordinary refs, as a rule (`Subscriber`).  Where building an event would cost something, it is built only if it has a subscriber.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import attrs
import trio

from .errors import MailboxFull, WrongThread
from .failure_log import FailureLog
from .ref import Ref

__all__ = [
    "ActorFailed",
    "ActorRestarted",
    "ActorTerminated",
    "DeadLetter",
    "EventStream",
    "RateLimitedLog",
    "SlowHandler",
    "Subscriber",
    "Unhandled",
]  # fmt: skip

logger = logging.getLogger("levada.framework.events")

_LINES_A_SECOND = 10


@attrs.frozen(eq=False)
class DeadLetter:
    """A message that reached no handler."""

    message: Any
    to: Ref[Any]
    """The actor that it was sent to."""
    why: str
    """``"stopped"``, ``"mailbox full"`` or ``"no key"`` (the mailbox's key function failed); from a router also ``"no routee"``,
    ``"cannot travel"`` and ``"lost"``: a routee in another system had it, and is out of reach."""


@attrs.frozen(eq=False)
class Unhandled:
    """A message of a class that its actor has no handler for."""

    message: Any
    to: Ref[Any]


@attrs.frozen(eq=False)
class ActorFailed:
    """An actor failed; its supervision decides what follows."""

    ref: Ref[Any]
    error: BaseException
    message: Any
    """The message that it was handling, or ``None``."""


@attrs.frozen(eq=False)
class ActorRestarted:
    """An actor restarted: it has a new object and the same mailbox."""

    ref: Ref[Any]
    restarts: int
    """The number of its restarts so far."""


@attrs.frozen(eq=False)
class ActorTerminated:
    """An actor ended for good."""

    ref: Ref[Any]
    reason: Any
    """A `levada.framework.Reason`."""


@attrs.frozen(eq=False)
class SlowHandler:
    """Handlers of an actor blocked the system for longer than ``slow_handler`` seconds (a setting of the system)."""

    ref: Ref[Any]
    message: type
    """The class of the last message of the turn."""
    seconds: float
    count: int
    """The number of messages handled in that time."""


class Subscriber(Protocol):
    """The part of a ref that events need.

    An actor learns of an event in its next turn, which is late if thousands of others are ready before it. Another object gets the event at
    once, in the middle of the publisher's work: its `tell` must be quick and must not raise.
    """

    @property
    def path(self) -> str:
        """The subscriber's name in logs."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it still takes events."""
        ...

    def tell(self, event: Any, /) -> None:
        """Take an event."""
        ...


class EventStream:
    """Publish and subscribe within one system: ``system.events``."""

    def __init__(self) -> None:
        self.subscribers: dict[type, dict[Subscriber, None]] = {}
        """The subscribers of each class that has one. Read only."""
        self._failures = FailureLog()

    def subscribe(self, event: type, ref: Subscriber) -> None:
        """Tell `ref` every event of this class, subclasses included, from now on. A ref that ends is removed.

        Raises:
            WrongThread: `ref` is an actor that lives in another thread.
        """
        if ref in self.subscribers.get(event, ()):
            return
        if isinstance(ref, Ref):
            ref.add_watcher((self, event), lambda _: self.unsubscribe(event, ref))  # type: ignore[attr-defined]
        if ref.is_alive:
            self.subscribers.setdefault(event, {})[ref] = None

    def unsubscribe(self, event: type, ref: Subscriber) -> None:
        """Undo `subscribe`; does nothing if there is no subscription."""
        refs = self.subscribers.get(event)
        if refs is not None and ref in refs:
            del refs[ref]
            if not refs:
                del self.subscribers[event]
            if isinstance(ref, Ref):
                ref.forget_watcher((self, event))  # type: ignore[attr-defined]

    def wants(self, event: type) -> bool:
        """Whether this class, or a base of it, has a subscriber."""
        return bool(self.subscribers) and any(base in self.subscribers for base in event.__mro__)

    def publish(self, event: Any) -> None:
        """Tell all subscribers. Stopped ones are removed; one with a full mailbox misses this event."""
        if not self.subscribers:
            return
        told: dict[Subscriber, None] = {}
        for base in type(event).__mro__:
            told.update(self.subscribers.get(base, {}))
        for ref in told:
            if ref.is_alive:
                try:
                    ref.tell(event)
                except MailboxFull:
                    logger.debug("%s misses an event: its mailbox is full", ref.path, extra={"actor": ref.path})
                except WrongThread:
                    raise
                except Exception as error:  # noqa: BLE001 - the failure log has it
                    # The mailbox's key function failed. The runtime publishes in the middle of its own work and must go on.
                    kind = type(event).__name__
                    text = "%s misses %s: its mailbox refuses it"
                    self._failures.log(logger, error, text, ref.path, kind, actor=ref.path)
            else:
                for base in type(event).__mro__:
                    self.unsubscribe(base, ref)


class UntracedMessage:
    """A mixin of messages of levada's own that are of no interest in a trace or as dead letters, even if their actor is in another system."""

    __slots__ = ()


class DeadLetters:
    """Counts lost messages, publishes them, and logs at most ten a second."""

    def __init__(self, events: EventStream) -> None:
        self.count = 0
        self.silent = False
        """Set while the system ends: letters are counted and not logged."""
        self._events = events
        self._log = RateLimitedLog("dead letter")

    def add(self, message: Any, to: Ref[Any], why: str) -> None:
        """Count, publish and log one. A dead letter about a dead letter is only counted, and one of levada's own not even that."""
        if isinstance(message, UntracedMessage):
            return
        self.count += 1
        if isinstance(message, DeadLetter):
            return
        if self._events.wants(DeadLetter):
            self._events.publish(DeadLetter(message, to, why))
        if not self.silent:
            self._log.note(message, to, why)


class RateLimitedLog:
    """Logs lines that others may cause as often as they like: at most ten a second, then how many more there were.

    Args:
        what: the matter of a line, in the singular; with underscores it is the line's ``event``.
        log: where the lines go.
        level: of the lines.
    """

    def __init__(self, what: str, log: logging.Logger = logger, level: int = logging.WARNING) -> None:
        self._what = what
        self._event = what.replace(" ", "_")
        self._log = log
        self._level = level
        self._second = -1.0
        self._logged = 0
        self._unlogged = 0

    def line(self, text: str, *arguments: object, **extra: object) -> None:
        """Log one, or count it; for the arguments see `logging.Logger.log`, `extra` are fields of the record."""
        second = trio.current_time() // 1.0
        if second != self._second:
            if self._unlogged:
                more = f"%d more {self._what}s were not logged"
                self._log.log(self._level, more, self._unlogged, extra={"event": f"{self._event}s"})
            self._second, self._logged, self._unlogged = second, 0, 0
        if self._logged < _LINES_A_SECOND:
            self._logged += 1
            self._log.log(self._level, text, *arguments, extra={"event": self._event, **extra})
        else:
            self._unlogged += 1

    def note(self, message: Any, to: Ref[Any], why: str) -> None:
        """Log that an actor has not got a message."""
        kind = f"the class {message.__name__}" if isinstance(message, type) else type(message).__name__
        self.line("%s: %s to %s (%s)", self._what, kind, to.path, why, actor=to.path)
