"""`Metrics`: everything that a system can tell, collected when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final

import trio

from levada.actors.console.scan import SLICE
from levada.framework import ActorSystem
from levada.framework.metrics import Distribution, Labels, Measured, Metric, Series, Tally, Value

from .runtime import Census, system_samples

__all__ = ["Metrics"]

logger = logging.getLogger("levada.actors.metrics")

_PASS: Final = 2.0
"""Seconds for a pass over all actors; then the next scrape goes on with it."""


class Metrics:
    """What a system and its actors tell in figures.

    Nobody who does not ask pays for it. Make one for each exporter, and keep it: it knows the totals that it has told.

    Args:
        system: has been entered.

    Example:
        >>> import trio
        >>> from levada.actors.metrics import Metrics
        >>> from levada.framework import ActorSystem
        >>> async def main() -> None:
        ...     async with ActorSystem() as system:
        ...         series = await Metrics(system).collect()
        ...         print({metric.name: value for metric, value in series.items()}["levada_timers"])
        >>> trio.run(main)
        {(): 0}
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._sources: dict[Measured, None] = {}
        self._census: Census | None = None
        """A pass that has begun."""
        self._latest = system.observe.ended.branch()
        """Of the last whole pass."""
        self._told: dict[Metric, dict[Labels, Value]] = {}
        """Totals as they were told last."""
        self._line = trio.Lock()

    def add(self, source: Measured) -> Callable[[], None]:
        """Collect from an object that is no actor, too; an actor's `Actor.metrics` is found without this.

        Returns:
            A function that takes it away again; its totals stay.
        """
        self._sources[source] = None

        def remove() -> None:
            if source in self._sources:
                del self._sources[source]
                self._system.observe.ended.add(source.metrics(), lasting=True)

        return remove

    async def collect(self) -> Series:
        """Go over all actors in slices of 2 ms, other tasks run between; calls wait for one another.

        Cancellation:
            the next call goes on.
        """
        async with self._line:
            complete = await self._advance()
            tally = self._latest.branch()
            tally.add(system_samples(self._system, complete=complete))
            for source in self._sources:
                try:
                    tally.add(source.metrics())
                except Exception:
                    logger.exception("%r has no metrics", source, extra={"event": "metrics_failed"})
            self._never_back(tally)
            return tally.series

    async def _advance(self) -> bool:
        """Go on with a pass; return whether it is complete."""
        if self._census is None:
            self._census = Census(self._system)
        until = perf_counter() + _PASS
        while not self._census.advance(perf_counter() + SLICE):
            if perf_counter() > until:
                return False
            await trio.lowlevel.checkpoint()
        self._latest, self._census = self._census.tally, None
        return True

    def _never_back(self, tally: Tally) -> None:
        """Tell no total below its last value: an actor may have ended before a pass has come to it."""
        for metric, told in self._told.items():
            values = tally.series.setdefault(metric, {})
            for labels, before in told.items():
                values[labels] = _larger(values.get(labels, before), before)
        self._told = {metric: dict(values) for metric, values in tally.series.items() if metric.kind != "gauge"}


def _larger(now: Value, before: Value) -> Value:
    if isinstance(now, Distribution) and isinstance(before, Distribution):
        counts = tuple(map(max, now.counts, before.counts))
        return Distribution(now.bounds, counts, max(now.total, before.total))
    assert not isinstance(now, Distribution)
    assert not isinstance(before, Distribution)
    return max(now, before)
