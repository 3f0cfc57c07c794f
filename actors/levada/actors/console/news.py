"""The events of a system for a client that watches it: dead letters, failures, restarts, slow turns.

The recorder is no actor: in a system with 10,000 ready actors its turn would come seconds late.  It gets each event when it is published,
keeps it as it is, and makes values of it at the next request.

A flood of events costs little: after `MOST_NEWS` events of one class the recorder unsubscribes from that class until the next request, which
says how many were left out. The system's counters count them all.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from levada.framework import ActorFailed, ActorRestarted, ActorSystem, DeadLetter, SlowHandler, Unhandled
from levada.framework.text import printable

__all__ = ["KEPT", "MOST_NEWS", "Recorder"]

MOST_NEWS: Final = 100
"""The most events of one class between two requests."""
KEPT: Final = 600
"""The most events that are kept, which is more than one request can find; then the oldest is dropped."""
_LINES: Final = 60
"""The most lines of a traceback; the last ones are kept."""

Event = DeadLetter | ActorFailed | ActorRestarted | SlowHandler | Unhandled
_EVENTS: Final[Mapping[type[Event], tuple[str, str]]] = {
    DeadLetter: ("dead letter", "dead_letters"),
    ActorFailed: ("failure", "failures"),
    ActorRestarted: ("restart", "restarts"),
    SlowHandler: ("slow turn", "slow_turns"),
    Unhandled: ("unhandled", "unhandled"),
}
"""The name of each class for people, and of its counter in `levada.framework.Statistics`."""


class Recorder:
    """Keeps the latest events as plain values, with the classes of messages and never their contents.

    Args:
        system: the system whose events are recorded, from now on.
        tracebacks: whether to keep the texts and tracebacks of errors.
    """

    path = "the console"

    def __init__(self, system: ActorSystem, *, tracebacks: bool) -> None:
        self._system = system
        self._tracebacks = tracebacks
        self._fresh: list[tuple[float, type[Event], Event]] = []
        self._room = dict.fromkeys(_EVENTS, MOST_NEWS)
        self._counted: dict[type[Event], int] = {}  # of the classes without room: the system's counter at that time
        self._count = 0
        self._news: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.is_alive = True
        for kind in _EVENTS:
            system.events.subscribe(kind, self)

    def close(self) -> None:
        """Unsubscribe."""
        self.is_alive = False
        for kind in _EVENTS:
            self._system.events.unsubscribe(kind, self)

    def tell(self, event: Event, /) -> None:
        """Keep an event for the next request."""
        kind = next(each for each in _EVENTS if isinstance(event, each))
        self._fresh.append((self._system.platform.time(), kind, event))
        self._room[kind] -= 1
        if not self._room[kind]:
            self._system.events.unsubscribe(kind, self)
            self._counted[kind] = self._counter(kind)

    def after(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the newest event, and the events after `number`, oldest first; make room for more."""
        fresh, self._fresh = self._fresh, []
        for at, kind, event in fresh:
            self._add(at, _EVENTS[kind][0], **self._members(event))
        for kind, counted in self._counted.items():
            if left_out := self._counter(kind) - counted:
                self._add(
                    self._system.platform.time(),
                    _EVENTS[kind][0],
                    actor="",
                    why=f"{left_out:,} more, which are not listed",
                )
            self._system.events.subscribe(kind, self)
        self._counted.clear()
        self._room = dict.fromkeys(_EVENTS, MOST_NEWS)
        return self._count, [each for each in self._news if each["number"] > number]

    def _counter(self, kind: type[Event]) -> int:
        count: int = getattr(self._system.statistics(), _EVENTS[kind][1])
        return count

    def _add(self, at: float, what: str, **members: object) -> None:
        self._count += 1
        self._news.append({"number": self._count, "at": at, "what": what, **members})

    def _members(self, event: Event) -> dict[str, object]:
        match event:
            case DeadLetter():
                return {**_subject(event.to.path, type(event.message)), "why": printable(event.why)}
            case Unhandled():
                return _subject(event.to.path, type(event.message))
            case ActorFailed():
                told = {"traceback": _traceback(event.error)} if self._tracebacks else {}
                kind = None if event.message is None else type(event.message)
                return {
                    **_subject(event.ref.path, kind),
                    "why": type(event.error).__name__,
                    "where": _where(event.error),
                    **told,
                }
            case ActorRestarted():
                return {**_subject(event.ref.path), "why": f"restart {event.restarts}"}
            case SlowHandler():
                why = f"{event.seconds:.3f} s, messages: {event.count}"
                return {**_subject(event.ref.path, event.message), "why": why}


def _subject(path: str, message: type | None = None) -> dict[str, object]:
    return {"actor": printable(path, 1000), "message": "" if message is None else message.__name__}


def _where(error: BaseException) -> str:
    """Return the file and the line of the innermost frame that is not levada's, or of the innermost one."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][-_LINES:]
    if not places:
        return ""
    own = [place for place in places if f"{os.sep}levada{os.sep}" not in place[0]]
    file, line = (own or places)[-1]
    return printable(f"{PurePath(file).name}:{line}")


def _traceback(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error, limit=-20)).splitlines()
    return [printable(line, 500) for line in lines[-_LINES:]]
