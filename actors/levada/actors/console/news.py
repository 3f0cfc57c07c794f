"""The events of a system for a client that watches it: dead letters, failures, restarts, slow turns.

The recorder subscribes to the system's events while it lives.  A flood of events costs little: after `MOST_NEWS` events of one class the
recorder unsubscribes from that class until the next request. The system's counters count them all.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import attrs

from levada.framework import Actor, ActorFailed, ActorRestarted, DeadLetter, Reason, SlowHandler, Unhandled, handles
from levada.transports.text import printable

__all__ = ["KEPT", "MOST_NEWS", "Recorder"]

KEPT: Final = 500
"""The most events that are kept; then the oldest is dropped."""
MOST_NEWS: Final = 100
"""The most events of one class between two requests."""
_EVENTS: Final = (DeadLetter, ActorFailed, ActorRestarted, SlowHandler, Unhandled)
_LINES: Final = 60
"""The most lines of a traceback; the last ones are kept."""

Event = DeadLetter | ActorFailed | ActorRestarted | SlowHandler | Unhandled


class Recorder(Actor[Event]):
    """Keeps the latest events as plain values, with the classes of messages and never their contents."""

    tracebacks: bool
    """Whether to keep the texts and tracebacks of errors."""
    _count: int = attrs.field(init=False, default=0)
    _news: deque[dict[str, Any]] = attrs.field(init=False, factory=lambda: deque(maxlen=KEPT))
    _left: dict[type, int] = attrs.field(init=False, factory=dict)

    def started(self) -> None:
        """Subscribe."""
        self.renew()

    def stopping(self, reason: Reason) -> None:
        """Unsubscribe."""
        for event in _EVENTS:
            self.system.events.unsubscribe(event, self.ref)

    def renew(self) -> None:
        """Subscribe to all classes again, for up to `MOST_NEWS` events of each."""
        for event in _EVENTS:
            if self._left.get(event, 0) <= 0:
                self.system.events.subscribe(event, self.ref)
            self._left[event] = MOST_NEWS

    def after(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the newest event, and the events after `number`, oldest first."""
        return self._count, [each for each in self._news if each["number"] > number]

    def _add(self, event: Event, what: str, actor: str, **members: object) -> None:
        self._count += 1
        self._left[type(event)] = self._left.get(type(event), 0) - 1
        if self._left[type(event)] <= 0:
            self.system.events.unsubscribe(type(event), self.ref)
        self._news.append(
            {"number": self._count, "at": time.time(), "what": what, "actor": printable(actor, 1000), **members}
        )

    @handles
    def dead_letter(self, m: DeadLetter) -> None:
        """Record a dead letter."""
        self._add(m, "dead letter", m.to.path, message=type(m.message).__name__, why=printable(m.why))

    @handles
    def no_handler(self, m: Unhandled) -> None:
        """Record a message without a handler."""
        self._add(m, "unhandled", m.to.path, message=type(m.message).__name__)

    @handles
    def failure(self, m: ActorFailed) -> None:
        """Record a failure."""
        told: Mapping[str, object] = {"traceback": _traceback(m.error)} if self.tracebacks else {}
        kind = "" if m.message is None else type(m.message).__name__
        self._add(m, "failure", m.ref.path, message=kind, why=type(m.error).__name__, **told)

    @handles
    def restart(self, m: ActorRestarted) -> None:
        """Record a restart."""
        self._add(m, "restart", m.ref.path, why=f"restart {m.restarts}")

    @handles
    def slow(self, m: SlowHandler) -> None:
        """Record a turn that held up the system."""
        why = f"{m.seconds:.3f} s, messages: {m.count}"
        self._add(m, "slow turn", m.ref.path, message=m.message.__name__, why=why)


def _traceback(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error, limit=-20)).splitlines()
    return [printable(line, 500) for line in lines[-_LINES:]]
