"""RSocket over TCP on loopback, client and server in a process each: ``levada bench rsocket``.

In each round every workload runs on levada, on the package ``rsocket`` from PyPI (if it is installed; its reads raised to 64 KiB, which
makes it faster) and, where one request waits for one answer, on a raw echo of trio's own streams. Both processes share one core, so that
the rows compare work and not the time a core takes to wake. The CPU time of both counts (outside Linux the wall clock), so that other
programs on the machine matter little. The figure is the ratio of a round.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from benchmarks._measure import verdict

__all__ = ["run"]

ROOT = Path(__file__).parents[1]


@attrs.frozen
class Workload:
    """One row of the table."""

    key: str
    title: str
    count: int
    budgets: dict[str, float]
    """Least ratio to each of the others."""
    slower: int = 1
    """By how much less work the others get, so that a round takes about the same time for all."""


WORKLOADS = (
    Workload("rr1", "request-response, 1 at a time, 64 bytes", 6_000, {"echo": 0.66, "rsocket": 2.0}),
    Workload("rr64", "request-response, 64 at a time, 64 bytes", 64_000, {"rsocket": 5.0}, slower=3),
    Workload("items", "stream items of 256 bytes, window 64", 150_000, {"rsocket": 6.0}, slower=3),
    Workload("fnf", "fire-and-forget, 64 bytes, counted at the server", 150_000, {"rsocket": 6.5}, slower=5),
)


def measure(contender: str, workload: Workload, count: int) -> float:
    """Run one workload between two fresh processes; operations in a second of CPU time of both."""
    command = [sys.executable, "-m", "benchmarks._rsocket_peers", contender]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    with subprocess.Popen(
        [*command, "server"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            client = [*command, "client", port, workload.key, str(count), str(server.pid)]
            done = subprocess.run(
                client, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
            )
        finally:
            server.kill()
    return float(done.stdout)


@attrs.frozen
class Row:
    """One workload, measured in all rounds."""

    workload: Workload
    figures: dict[str, list[float]]
    """Operations in a second of CPU time, by contender."""

    def ratios(self, other: str) -> list[float]:
        """How many times as many as `other`, round by round."""
        return [ours / theirs for ours, theirs in zip(self.figures["levada"], self.figures[other], strict=True)]

    @property
    def missed(self) -> bool:
        """Whether a ratio is below its budget."""
        return any(
            statistics.median(self.ratios(other)) < budget
            for other, budget in self.workload.budgets.items()
            if other in self.figures
        )


@attrs.frozen
class Report:
    """All rows."""

    rows: list[Row]
    absent: bool
    """Whether the package from PyPI is not installed."""

    @property
    def missed(self) -> list[str]:
        """Titles of the rows below their budgets."""
        return [row.workload.title for row in self.rows if row.missed]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        lines = [
            f"{'operations per CPU second of both ends, medians':52} {'levada':>9} {'rsocket':>9} {'echo':>9}  ratios and budgets"
        ]
        for row in self.rows:
            figures = {name: f"{statistics.median(values):,.0f}" for name, values in row.figures.items()}
            ratios = [
                f"{statistics.median(row.ratios(other)):.2f} × {other} (≥ {budget:g})"
                for other, budget in row.workload.budgets.items()
                if other in row.figures
            ]
            lines.append(
                f"{row.workload.title:52} {figures['levada']:>9} {figures.get('rsocket', '–'):>9} {figures.get('echo', '–'):>9}"
                f"  {', '.join(ratios)} {verdict(row.missed, judged)}"
            )
        if self.absent:
            lines.append("rsocket: not installed (pip install rsocket)")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {
            "rows": [
                {
                    "key": row.workload.key,
                    "figures": row.figures,
                    "budgets": row.workload.budgets,
                    "missed": row.missed,
                }
                for row in self.rows
            ]
        }


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure all workloads whose title contains `only`; `quick`: the first of them, to show that it runs."""
    absent = importlib.util.find_spec("rsocket") is None
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    rows = []
    for workload in workloads[:1] if quick else workloads:
        others = [other for other in workload.budgets if not (absent and other == "rsocket")]
        row = Row(workload, {name: [] for name in ("levada", *others)})
        for number in range(rounds):
            for name, figures in row.figures.items():
                progress(f"{workload.title}, {name}, round {number + 1} of {rounds}")
                count = workload.count // (workload.slower if name == "rsocket" else 1) // (100 if quick else 1)
                figures.append(measure(name, workload, count))
        rows.append(row)
    return Report(rows, absent)
