"""`Metrics`: everything that a system can tell, collected when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final

import trio

from levada.actors.console.scan import SLICE
from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef
from levada.framework.errors import LevadaError
from levada.framework.metrics import Distribution, Labels, Measured, Metric, Sample, Series, Tally, Value

from .nodes import AskFleet, NodeFigures, find_fleet, joined
from .runtime import REPORTING, Census, system_samples

__all__ = ["Metrics"]

logger = logging.getLogger("levada.actors.metrics")

_PATIENCE: Final = 1.0
"""Seconds for the figures of one actor that has to be asked."""
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
        self._reporting: list[LocalRef] = []
        """Actors to be asked, as the last whole pass found them."""
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

        A driver of nodes asks these at the same time. All samples then have the label ``node``, its own with ``driver``.

        Cancellation:
            the next call goes on.
        """
        ask_nodes = find_fleet(self._system)
        return await (self._collect() if ask_nodes is None else self._collect_with(ask_nodes))

    async def _collect_with(self, ask_nodes: AskFleet) -> Series:
        nodes: list[NodeFigures] = []

        async def ask() -> None:
            nodes.extend(await ask_nodes())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            own = await self._collect()
        return joined(own, nodes)

    async def _collect(self) -> Series:
        async with self._line:
            complete = await self._advance()
            tally = self._latest.branch()
            for samples in await self._ask(self._reporting):
                tally.add(samples)
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
        self._latest, self._reporting, self._census = self._census.tally, self._census.reporting, None
        return True

    async def _ask(self, cells: list[LocalRef]) -> list[list[Sample]]:
        """Ask actors whose figures come from threads, all at the same time."""
        found: list[list[Sample]] = []

        async def ask(cell: LocalRef) -> None:
            observe = self._system.observe
            subject = observe.subject(cell)
            with trio.move_on_after(_PATIENCE):
                try:
                    found.append(REPORTING[subject](await observe.report(cell)))
                except LevadaError as error:
                    logger.debug("%s: %s", cell.path, error, extra={"actor": cell.path, "event": "no_metrics"})

        async with trio.open_nursery() as nursery:
            for cell in cells:
                if cell.is_alive:
                    nursery.start_soon(ask, cell)
        return found

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
