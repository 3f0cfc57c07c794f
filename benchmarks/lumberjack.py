"""Lumberjack over TCP on loopback, writer and reader in a process each: ``levada bench lumberjack``.

Reader rows: a raw writer against levada's reader and against a plain threaded reader that decodes the same and has no limits, one
right after the other in each round; the ratio within a round counts.  Lines of 300 bytes with four other fields, windows
of 2,000, one in flight.

The writer's rows count encoding; both writers send to the threaded reader.  Ours has two windows in flight, so that writer and reader
work at the same time; that needs a second core with nothing else to do.

Rows that end in "CPU" compare events per second of a process's own CPU time, which other work on the machine disturbs least.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from benchmarks._lumberjack_peers import EVENTS, raw_writer
from benchmarks._lumberjack_writers import WRITERS
from benchmarks._measure import verdict

__all__ = ["run"]

ROOT = Path(__file__).parents[1]
COUNT = 40_000  # events of one measurement
FLOORS, AIM = {1: 0.9, 2: 1.0}, 1.0  # by version
WRITER = 1.5


@attrs.frozen
class Row:
    """A ratio, measured in all rounds."""

    title: str
    ours: list[float]
    """Events a second, of the clock or of CPU time."""
    other: str
    theirs: list[float]
    budget: float
    aim: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as many as `other`, the median of the rounds."""
        return statistics.median(mine / other for mine, other in zip(self.ours, self.theirs, strict=True))

    @property
    def missed(self) -> bool:
        """Whether it is below the budget."""
        return self.ratio < self.budget


@attrs.frozen
class Report:
    """All rows."""

    rows: list[Row]

    @property
    def missed(self) -> list[str]:
        """Titles of the rows below their budgets."""
        return [row.title for row in self.rows if row.missed]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        lines = [f"{'events a second, medians':40} {'levada':>9} {'other':>9}  ratio and budget"]
        for row in self.rows:
            aim = f", aim {row.aim:g}" if row.aim is not None else ""
            lines.append(
                f"{row.title:40} {statistics.median(row.ours):>9,.0f} {statistics.median(row.theirs):>9,.0f}"
                f"  {row.ratio:.2f} × {row.other} (≥ {row.budget:g}{aim}) {verdict(row.missed, judged)}"
            )
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {"rows": [{**attrs.asdict(row), "ratio": row.ratio, "missed": row.missed} for row in self.rows]}


@contextlib.contextmanager
def process(name: str) -> Iterator[tuple[int, Callable[[], float]]]:
    """A fresh reader: its port, and a function that returns its CPU time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    command = [sys.executable, "-m", "benchmarks._lumberjack_peers", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        ask, told = reader.stdin, reader.stdout

        def cpu() -> float:
            print(file=ask, flush=True)
            return float(told.readline())

        try:
            yield int(told.readline()), cpu
        finally:
            reader.kill()


def measure_reader(name: str, version: int, packed: bool, count: int) -> tuple[float, float]:
    """Events a second that a reader takes, and in a second of its CPU time."""
    with process(name) as (port, cpu):
        raw_writer(port, version, packed, EVENTS)
        before = cpu()
        return raw_writer(port, version, packed, count), count / (cpu() - before)


def reader_rows(rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> list[Row]:
    """Readers of both versions, plain and packed, then packed against plain of the same rounds."""
    rows = []
    for version in (1, 2):
        plain, packed = (
            Row(f"reader, version {version}, {how}", [], "threads", [], FLOORS[version], AIM)
            for how in ("plain", "packed")
        )
        ratio = Row(f"reader, version {version}, packed or not, CPU", [], "plain", [], 0.8)
        wanted = [row for row in (plain, packed) if only in row.title or only in ratio.title][: 1 if quick else 2]
        for number in range(rounds):
            for row in wanted:
                for name, figures in (("levada", row.ours), ("threads", row.theirs)):
                    progress(f"{row.title}, {name}, round {number + 1} of {rounds}")
                    rate, per_cpu = measure_reader(name, version, row is packed, EVENTS if quick else COUNT)
                    figures.append(rate)
                    if name == "levada":
                        (ratio.ours if row is packed else ratio.theirs).append(per_cpu)
        rows += wanted
        if quick:
            break
        if len(wanted) == 2:
            rows.append(ratio)
    return rows


def measure_writer(name: str, count: int) -> tuple[float, float]:
    """Events a second that a writer gets acked by the threaded reader, and in a second of its CPU time."""
    with process("threads") as (port, _):
        WRITERS[name](port, EVENTS)
        before = time.process_time()
        return WRITERS[name](port, count), count / (time.process_time() - before)


def writer_rows(rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> list[Row]:
    """Our writer against pylogbeat, both packed, to the same reader."""
    row = Row("writer, version 2, packed", [], "pylogbeat", [], WRITER)
    cost = Row("writer, version 2, packed, CPU", [], "pylogbeat", [], 1.0)
    if only not in cost.title or (quick and not only) or importlib.util.find_spec("pylogbeat") is None:
        return []
    for number in range(rounds):
        for name, figures, costs in (("levada", row.ours, cost.ours), ("pylogbeat", row.theirs, cost.theirs)):
            progress(f"{row.title}, {name}, round {number + 1} of {rounds}")
            rate, per_cpu = measure_writer(name, EVENTS if quick else COUNT)
            figures.append(rate)
            costs.append(per_cpu)
    return [row, cost]


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure all rows whose title contains `only`; `quick`: the first of them, to show that it runs."""
    return Report(reader_rows(rounds, quick, only, progress) + writer_rows(rounds, quick, only, progress))
