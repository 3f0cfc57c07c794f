"""How the benchmarks measure: interleaved rounds, each figure paired with a limit of the same moment.

On a shared machine nanoseconds mean little from one hour to the next.  In each round every contender runs once, and
right before ours runs its *base* (a deque loop, for example).  The figure is the ratio of the two, per round; of all rounds the table shows
the median and the best.  Garbage is collected before each run of each contender, and not during it.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "Contender",
    "Measure",
    "Progress",
    "Report",
    "Row",
    "Workload",
    "cpu_of",
    "deque_limit",
    "measure",
    "verdict",
]

Measure = Callable[[int], float]
"""Does a number of operations and returns the nanoseconds of one (or whatever else the unit of the workload says)."""

Progress = Callable[[str], None]


def cpu_of(process: int) -> float:
    """Return the seconds of CPU time of another process, in steps of 10 ms; only on Linux."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def deque_limit(n: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Fill a deque with `n` references, then drain it: the least that a mailbox of Python objects can cost."""
    queue: deque[object] = deque()
    item = object()
    best = float("inf")
    for _ in range(3):
        start = clock()
        for _ in range(n):
            queue.append(item)
        while queue:
            queue.popleft()
        best = min(best, clock() - start)
    return best / n * 1e9


@attrs.frozen(kw_only=True)
class Contender:
    """A library, or plain tasks, that can run the workloads."""

    name: str
    remark: str
    """Version, and how its actors run; or that it is not installed."""
    runs: Mapping[str, Measure]
    slower: int = 1
    """Divides the number of operations, so that a round does not take minutes."""


@attrs.frozen(kw_only=True)
class Workload:
    """One row of the table."""

    key: str
    """Of `Contender.runs`."""
    title: str
    n: int
    """Operations per run."""
    unit: str = "ns"
    """``ns`` or ``B``."""
    base: Measure | None = deque_limit
    """The figure is divided by this one."""
    base_name: str = "deque"
    budget: float | None = None
    """What the ratio, or without a base the figure, should not exceed."""
    once: bool = False
    """Whether one round has to do, because it takes long."""


@attrs.frozen(kw_only=True)
class Row:
    """The results of one workload."""

    workload: Workload
    figures: Mapping[str, Sequence[float]]
    """By contender, a figure for each round; the first contender is ours."""
    ratios: Sequence[float]
    """Ours to the base, for each round; empty without a base."""

    @property
    def missed(self) -> bool:
        """Whether there is a budget and the median is above it."""
        budget = self.workload.budget
        if budget is None:
            return False
        ours = next(iter(self.figures.values()))
        return statistics.median(self.ratios or ours) > budget

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {
            "key": self.workload.key,
            "title": self.workload.title,
            "unit": self.workload.unit,
            "base": self.workload.base_name if self.ratios else None,
            "budget": self.workload.budget,
            "ratio": _summary(self.ratios) if self.ratios else None,
            "missed": self.missed,
            "figures": {name: _summary(figures) for name, figures in self.figures.items()},
        }


@attrs.frozen(kw_only=True)
class Report:
    """All rows, and who took part."""

    rows: Sequence[Row]
    contenders: Sequence[Contender]
    rounds: int

    @property
    def missed(self) -> list[str]:
        """Titles of the rows above their budgets."""
        return [row.workload.title for row in self.rows if row.missed]

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rounds": self.rounds,
            "contenders": {contender.name: contender.remark for contender in self.contenders},
            "rows": [row.to_json() for row in self.rows],
        }

    def text(self, *, judged: bool) -> str:
        """Lay it out as one table, with a line for each contender below it."""
        ours, *others = [contender.name for contender in self.contenders]
        table: list[tuple[str, ...]] = [
            ("workload", f"{ours} median", "best", "ratio", "best", "to", "budget", "", *others)
        ]
        for row in self.rows:
            unit, budget = row.workload.unit, row.workload.budget
            mine = row.figures[ours]
            ratio = ("", "", "")
            if row.ratios:
                ratio = (f"{statistics.median(row.ratios):.1f} ×", f"{min(row.ratios):.1f} ×", row.workload.base_name)
            allowed = "" if budget is None else f"≤ {budget:g} ×" if row.ratios else f"≤ {figure(budget, unit)}"
            table.append(
                (
                    row.workload.title,
                    figure(statistics.median(mine), unit),
                    figure(min(mine), unit),
                    *ratio,
                    allowed,
                    "" if budget is None else verdict(row.missed, judged),
                    *(figure(statistics.median(row.figures[o]), unit) if o in row.figures else "–" for o in others),
                )
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if number in (0, 5, 7) else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        name_width = max(len(contender.name) for contender in self.contenders)
        lines.append("")
        lines += [f"{contender.name.ljust(name_width)}  {contender.remark}" for contender in self.contenders]
        lines.append(
            f"\n{self.rounds} interleaved rounds on Python {platform.python_version()}; medians unless it says best"
        )
        return "\n".join(lines) + "\n"


def _summary(figures: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(figures), "best": min(figures)}


def verdict(missed: bool, judged: bool) -> str:
    """Say whether a row keeps its budget; one quick round measures mostly the warming up, and is not judged."""
    if not judged:
        return "not judged: quick"
    return "MISS" if missed else "pass"


def figure(value: float, unit: str) -> str:
    """Write a figure with three digits or so: ``350 ns``, ``12.7 µs``, ``330 B``."""
    if unit == "B":
        return f"{value:,.0f} B"
    for limit, divisor, name in ((1e3, 1.0, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms")):
        if value < limit:
            return f"{value / divisor:.{0 if value / divisor >= 100 or divisor == 1.0 else 1}f} {name}"
    return f"{value / 1e9:.1f} s"


def measure(
    workloads: Sequence[Workload], contenders: Sequence[Contender], *, rounds: int, quick: bool, progress: Progress
) -> Report:
    """Run everything.

    Args:
        workloads: the rows.
        contenders: ours first; whoever lacks a workload is left out of its row.
        rounds: how often.
        quick: a hundredth of the operations; shows that all of it runs, the figures mean nothing.
        progress: is told what comes next.
    """
    figures: dict[str, dict[str, list[float]]] = {workload.key: {} for workload in workloads}
    ratios: dict[str, list[float]] = {workload.key: [] for workload in workloads}
    for number in range(rounds):
        for workload in workloads:
            if workload.once and number:
                continue
            for contender in contenders:
                run = contender.runs.get(workload.key)
                if run is None:
                    continue
                progress(f"round {number + 1} of {rounds}: {workload.title}, {contender.name}")
                n = max(10, workload.n // contender.slower // (100 if quick else 1))
                ours = contender is contenders[0]
                base = _undisturbed(workload.base, 1000 if quick else 100_000) if ours and workload.base else None
                value = _undisturbed(run, n)
                figures[workload.key].setdefault(contender.name, []).append(value)
                if base is not None:
                    ratios[workload.key].append(value / base)
    rows = [Row(workload=w, figures=figures[w.key], ratios=ratios[w.key]) for w in workloads if figures[w.key]]
    return Report(rows=rows, contenders=contenders, rounds=rounds)


def _undisturbed(run: Measure, n: int) -> float:
    gc.collect()
    gc.disable()
    try:
        return run(n)
    finally:
        gc.enable()
