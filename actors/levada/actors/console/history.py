"""The last 15 minutes of a system: figures for charts, taken every five seconds while a console or a dashboard is served, and the latest events.

The ring has 180 rows of eleven numbers, 0.1 MB.  A row takes 0.1 ms with 20 actors, 2 ms with a thousand or more: 0.002 to 0.05 % of a core.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import trio

from levada.framework import ActorSystem, Histogram

from .news import Recorder
from .survey import Survey

__all__ = ["EVERY", "KEPT_ROWS", "SystemHistory", "history_of", "keep_history"]

EVERY: Final = 5.0
"""Seconds between two rows."""
KEPT_ROWS: Final = 180
"""Rows in the ring: 15 minutes."""
_BUDGET: Final = 0.002
"""Seconds of work for a row; a pass over more actors than that goes on in the next row."""


class _Collections:
    """Counts garbage collections of the process, and the time that they take (0.5 µs for each)."""

    def __init__(self, system: ActorSystem) -> None:
        self._perf_counter = system.platform.perf_counter
        self._began: float | None = None
        self.count = 0
        self.seconds = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = self._perf_counter()
        elif self._began is not None:
            self.count += 1
            self.seconds += self._perf_counter() - self._began
            self._began = None


class SystemHistory:
    """The figures of a system, and what its actors are doing. Made by `history_of`."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._rows: deque[dict[str, float | None]] = deque(maxlen=KEPT_ROWS)
        self._collections = _Collections(system)
        self._before: dict[str, Any] | None = None
        self._recorder = Recorder(system, tracebacks=False)
        self.survey = Survey(system)
        """The actors as a whole."""
        self.users = 0
        gc.callbacks.append(self._collections)

    def close(self) -> None:
        """Record and count no more."""
        self._recorder.close()
        gc.callbacks.remove(self._collections)

    def figures(self) -> dict[str, Any]:
        """Return the memory of the process in bytes, and the number and the seconds of its garbage collections while this object exists."""
        return {
            "memory": _memory(),
            "collections": self._collections.count,
            "collection_seconds": self._collections.seconds,
            "handled_rate": self.survey.rate,
        }

    def note(self) -> None:
        """Add a row if the last one is `EVERY` seconds old."""
        now = trio.current_time()
        if self._before is not None and now < self._before["time"] + EVERY / 2:
            return
        self.survey.advance(_BUDGET)
        self._recorder.after(0)
        system, before = self._system, self._before
        counts = system.statistics()
        after: dict[str, Any] = {
            "time": now,
            "cpu": system.platform.process_time(),
            "bad": counts.failures + counts.dead_letters,
            "turns": list(system.observe.turn_times.counts),
            "queues": list(system.observe.queue_times.counts),
            **self.figures(),
        }
        self._before = after
        if before is None:
            return
        seconds = now - before["time"]
        self._rows.append(
            {
                "time": now,
                "cpu": 100 * (after["cpu"] - before["cpu"]) / seconds,
                "memory": after["memory"],
                "collecting": 100 * (after["collection_seconds"] - before["collection_seconds"]) / seconds,
                "handled": after["handled_rate"],
                "wait": _quantile(before["queues"], after["queues"]),
                "turn": _quantile(before["turns"], after["turns"]),
                "stall": system.observe.stalls.longest(before["time"]),
                "actors": counts.actors,
                "waiting": counts.waiting,
                "bad": (after["bad"] - before["bad"]) / seconds,
            }
        )

    def events(self) -> list[dict[str, Any]]:
        """Return the latest events, oldest first, without the texts of errors."""
        return self._recorder.after(0)[1]

    def to_json(self, before: float) -> dict[str, Any]:
        """Return the rows and the events until a time of the platform's clock, oldest first.

        In a row rates are per second, shares in percent, times in seconds.
        """
        return {"rows": list(self._rows), "events": [each for each in self.events() if each["at"] < before]}


_kept: WeakKeyDictionary[ActorSystem, SystemHistory] = WeakKeyDictionary()


@contextmanager
def history_of(system: ActorSystem) -> Iterator[SystemHistory]:
    """Share the history of a system; it ends with the last block that uses it."""
    history = _kept.get(system)
    if history is None:
        history = _kept[system] = SystemHistory(system)
    history.users += 1
    try:
        yield history
    finally:
        history.users -= 1
        if not history.users:
            del _kept[system]
            history.close()


async def keep_history(system: ActorSystem) -> None:
    """Add rows until cancelled."""
    with history_of(system) as history:
        while True:
            history.note()
            await trio.sleep(EVERY)


def _quantile(before: list[int], after: list[int]) -> float:
    histogram = Histogram()
    histogram.counts = [now - then for now, then in zip(after, before, strict=True)]
    return histogram.quantile(0.99)


def _memory() -> int | None:
    """Return the bytes of memory that the process has, or None where the system does not say (Linux does)."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
    try:
        return int(os.read(file, 100).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)
