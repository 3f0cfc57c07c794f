"""Fair turns of unpacking and parsing: any number of busy connections does not delay a connection with little work.

A step takes 10 ms at worst, or 300 ms if it is large (one very long JSON text), and an envelope of 9 kB can need a thousand steps.
Each connection may use `_FREE` seconds at any time, and earns more at a rate of `_EARNED`.  A connection that has used more waits for
its turn, and so does every large step; the least busy connection goes first.  Between two such steps the scheduler runs all other tasks
once.  After a large step, no other large step begins for as long as it took.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

import attrs
import trio

__all__ = ["ProcessorShare", "Turns"]

_FREE: Final = 0.01
_EARNED: Final = 1 / 64
_LARGE: Final = 0.25
_MOST: Final = 0.5  # upper bound of the used seconds: a connection that worked for hours does not come last for hours


@attrs.define(eq=False)
class ProcessorShare:
    """The processor time that one connection has used."""

    at: float
    """The time of the last step, by `Platform.perf_counter`."""
    used: float = 0.0
    """Seconds used, minus seconds earned until `at`."""

    @property
    def spent(self) -> bool:
        """Whether its steps need `Turns`."""
        return self.used > _FREE

    def use(self, seconds: float, now: float) -> None:
        """Add the time of a step that ends now."""
        self.used = min(_MOST, max(0.0, self.used - (now - self.at) * _EARNED) + seconds)
        self.at = now


@attrs.define(eq=False)
class _Waiting:
    event: trio.Event = attrs.field(factory=trio.Event)
    gone: bool = False


class Turns:
    """The order of the steps of all connections of one reader."""

    def __init__(self) -> None:
        self._busy = False
        self._resting = False  # no large step may begin
        # Heaps of waiting steps: other, and large.
        self._lines: tuple[list[tuple[float, int, _Waiting]], ...] = ([], [])
        self._numbers = count()

    def take(self, *, large: bool) -> bool:
        """Begin a step if no other step is in its way, and return whether. After it, call `rest`, whatever happens."""
        if self._busy or (large and self._resting):
            return False
        self._busy = True
        return True

    async def wait(self, share: ProcessorShare, *, large: bool) -> None:
        """Wait until a connection may make a step. After it, call `rest`, whatever happens.

        Cancellation:
            the step has not begun, and the turn goes to the next connection.
        """
        place = _Waiting()
        heapq.heappush(self._lines[large], (share.used + _LARGE * large, next(self._numbers), place))
        try:
            await place.event.wait()
        except trio.Cancelled:
            place.gone = True
            if place.event.is_set():
                self._pass_on()
            raise

    async def rest(self, took: float, *, large: bool) -> None:
        """Yield to other tasks after a step, then begin the step of the next connection in line."""
        self._resting = self._resting or large
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self._pass_on()
            if large:
                try:
                    await trio.sleep(took)
                finally:
                    self._resting = False
                    if not self._busy:
                        self._pass_on()

    def _pass_on(self) -> None:
        """Begin the next step."""
        for line in self._lines:
            while line and line[0][-1].gone:
                heapq.heappop(line)
        lines = [line for line in (self._lines[:1] if self._resting else self._lines) if line]
        self._busy = bool(lines)
        if lines:
            heapq.heappop(min(lines))[-1].event.set()
