"""`Metrics`: the figures of a system and its actors, collected on request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from levada.actors.console.scan import SLICE
from levada.actors.console.survey import answers_of
from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef
from levada.framework.errors import LevadaError
from levada.framework.metrics import Distribution, Labels, Measured, Metric, Sample, Series, Tally, Value

from .nodes import AskFleet, NodeFigures, find_fleet, joined
from .runtime import REPORTING, Census, system_samples

__all__ = ["Metrics"]

logger = logging.getLogger("levada.actors.metrics")

_PATIENCE: Final = 1.0
"""Seconds for an actor to answer with its figures."""
_PASS: Final = 2.0
"""Seconds of one scrape for a pass over all actors; the next scrape continues the pass."""


class Metrics:
    """Collects the figures of a system and its actors.

    It costs nothing until `collect` is called. Make one for each exporter and keep it, because it remembers the totals that it has reported.

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
        self._sources: dict[int, Measured] = {}
        self._census: Census | None = None
        """The pass under way."""
        self._latest = system.observe.ended.branch()
        """The result of the last complete pass."""
        self._reporting: list[LocalRef] = []
        """The actors to ask, found by the last complete pass."""
        self._told: dict[Metric, dict[Labels, Value]] = {}
        """The totals that were reported last."""
        self._line = trio.Lock()

    def add(self, source: Measured) -> Callable[[], None]:
        """Also collect from an object that is not an actor. Actors with `Actor.metrics` need no `add`.

        Returns:
            A function that removes the object; its totals stay.
        """
        self._sources[id(source)] = source  # not by its hash: classes with fields often have none

        def remove() -> None:
            if self._sources.pop(id(source), None) is not None:
                self._system.observe.ended.add(source.metrics(), lasting=True)

        return remove

    async def collect(self) -> Series:
        """Visit all actors and return their figures; one call at a time, others wait.

        Other tasks run after every 2 ms of work. A pass that takes longer than 2 s is continued by the next call; until it is complete, the
        figures of actors come from the pass before, and ``levada_scrape_complete`` is 0.
        A driver also asks its nodes. All samples then have the label ``node``; it is ``driver`` for the driver's own.

        Cancellation:
            the next call continues the pass.
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
            for source in self._sources.values():
                try:
                    tally.add(source.metrics())
                except Exception as error:  # noqa: BLE001 - the failure log has it
                    failures = self._system.failure_log
                    failures.log(logger, error, "%r has no metrics", source, event="metrics_failed")
            self._never_back(tally)
            return tally.series

    async def _advance(self) -> bool:
        """Continue the pass; return whether it is complete."""
        if self._census is None:
            self._census = Census(self._system)
        perf_counter = self._system.platform.perf_counter
        until = perf_counter() + _PASS
        while not self._census.advance(perf_counter() + SLICE):
            if perf_counter() > until:
                return False
            await trio.lowlevel.checkpoint()
        self._latest, self._reporting, self._census = self._census.tally, self._census.reporting, None
        return True

    async def _ask(self, cells: list[LocalRef]) -> list[list[Sample]]:
        """Ask all actors whose figures come from threads, at the same time."""
        observe = self._system.observe
        subjects = {cell: observe.subject(cell) for cell in cells if cell.is_alive}
        found: list[list[Sample]] = []
        for cell, report in (await answers_of(subjects, observe.report, _PATIENCE)).items():
            if isinstance(report, LevadaError):
                logger.debug("%s: %s", cell.path, report, extra={"actor": cell.path, "event": "no_metrics"})
            else:
                found.append(REPORTING[subjects[cell]](report))
        return found

    def _never_back(self, tally: Tally) -> None:
        """Keep totals from going back: an actor may have ended before the pass visited it."""
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
