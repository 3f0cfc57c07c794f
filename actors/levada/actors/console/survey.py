"""What all actors are doing as a whole, pass after pass: throughput, the program's own actors, the kinds that there are, and what falls behind.

A pass goes on where the last call stopped, in slices, so that a program with a million actors is not held up.  A small program is passed
over at each call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import attrs
import trio

from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef
from levada.framework.errors import LevadaError

from .scan import MOST_FOUND, Walk

__all__ = ["Falling", "Survey", "answers_of"]

K = TypeVar("K")
T = TypeVar("T")

_MOST_SUSPECTS: Final = 1000
"""The most actors that are compared with an earlier pass."""
_MOST_REPORTING: Final = 100
"""The most actors of one subject that are asked for a report."""
_QUEUED: Final = 100
"""Messages in a mailbox from which on it can be called growing."""
_LOOPS: Final = 3
"""Restarts within `_WINDOW` from which on they are called a loop."""
_WINDOW: Final = 30.0
"""Seconds over which suspects are compared."""
_BETWEEN: Final = 2.0
"""Seconds between two passes that are kept for comparison."""


@attrs.frozen
class _Glance:
    depth: int
    handled: int
    restarts: int


@attrs.frozen
class Falling:
    """An actor that falls behind, or restarts again and again."""

    actor: LocalRef
    seconds: float
    """The time over which it was compared."""
    depth: int
    """Messages in its mailbox now."""
    grown: int
    """How many more these are than at the beginning."""
    handled: int
    """Messages handled meanwhile."""
    restarts: int
    """Restarts meanwhile."""


@attrs.define
class _Pass:
    handled: int
    own: list[LocalRef] = attrs.field(factory=list)
    subjects: dict[str, list[LocalRef]] = attrs.field(factory=dict)
    suspects: dict[LocalRef, _Glance] = attrs.field(factory=dict)
    channels: bool = False


class Survey:
    """Passes over all actors.

    Args:
        system: has been entered.
    """

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        """The system."""
        self._walk: Walk | None = None
        self._passing = _Pass(0)
        self._passed = _Pass(0)
        self._at: float | None = None  # when the last pass ended
        self._suspects: deque[tuple[float, dict[LocalRef, _Glance]]] = deque()
        self.rate: float | None = None
        """Messages handled per second between the last two passes."""

    @property
    def complete(self) -> bool:
        """Whether a pass is over."""
        return self._at is not None

    @property
    def own(self) -> list[LocalRef]:
        """The program's own living actors, `MOST_FOUND` at most."""
        return [cell for cell in self._passed.own if cell.is_alive]

    def of(self, subject: str) -> list[LocalRef]:
        """Return the living actors of a subject (`levada.framework.embedding.DescribedActor.subject`), a hundred at most."""
        return [cell for cell in self._passed.subjects.get(subject, ()) if cell.is_alive]

    @property
    def channels(self) -> bool:
        """Whether an actor holds an end of a channel."""
        return self._passed.channels

    def advance(self, seconds: float) -> None:
        """Visit more actors, for some seconds of work; one pass at most."""
        system = self.system
        if self._walk is None:
            self._walk = Walk(system)
            self._passing = _Pass(sum(system.observe.handled.values()))
        if not self._walk.advance(system.platform.perf_counter() + seconds, self._look):
            return
        self._walk = None
        now, before = trio.current_time(), self._passed
        if self._at is not None and now > self._at:
            self.rate = max(0, self._passing.handled - before.handled) / (now - self._at)
        self._passed, self._at = self._passing, now
        kept = self._suspects
        if not kept or now >= kept[-1][0] + _BETWEEN:
            kept.append((now, self._passed.suspects))
            while kept[0][0] < now - _WINDOW:
                kept.popleft()

    def falling(self) -> list[Falling]:
        """Return the actors that fall behind or restart again and again, the longest mailboxes first."""
        found = []
        for cell, now in self._passed.suspects.items():
            if self._at is None or not cell.is_alive:
                continue
            # In a pass that does not know it, it had not restarted; how many messages it had handled is known from its first pass on.
            first, restarts = self._suspects[0][0], 0
            if cell in self._suspects[0][1] or first == self._at:
                restarts = self._suspects[0][1].get(cell, now).restarts
            restarts = now.restarts - restarts
            began, before = next(((at, then[cell]) for at, then in self._suspects if cell in then), (self._at, now))
            grown = now.depth - before.depth
            if (now.depth >= _QUEUED and grown > 0) or restarts >= _LOOPS:
                seconds = self._at - (first if restarts else began)
                found.append(Falling(cell, seconds, now.depth, grown, now.handled - before.handled, restarts))
        return sorted(found, key=lambda each: each.depth, reverse=True)

    def _look(self, cell: LocalRef, _: str) -> None:
        observe, passing = self.system.observe, self._passing
        depth, handled, restarts = observe.glance(cell)
        passing.handled += handled
        if observe.is_own(cell) and len(passing.own) < MOST_FOUND:
            passing.own.append(cell)
        if (depth >= _QUEUED or restarts) and len(passing.suspects) < _MOST_SUSPECTS:
            passing.suspects[cell] = _Glance(depth, handled, restarts)
        if (subject := observe.subject(cell)) and len(
            those := passing.subjects.setdefault(subject, [])
        ) < _MOST_REPORTING:
            those.append(cell)
        if not passing.channels:
            passing.channels = observe.holds_channels(cell)


async def answers_of(
    those: Iterable[K], ask: Callable[[K], Awaitable[T]], patience: float = math.inf
) -> dict[K, T | LevadaError]:
    """Ask many at once; return the answers and errors that come within so many seconds."""
    answers: dict[K, T | LevadaError] = {}

    async def note(one: K) -> None:
        try:
            answers[one] = await ask(one)
        except LevadaError as error:
            answers[one] = error

    with trio.move_on_after(patience):
        async with trio.open_nursery() as nursery:
            for one in those:
                nursery.start_soon(note, one)
    return answers
