"""``levada bench``: run a benchmark of the source tree. Rows are ratios to a baseline, or to another library, measured in the same run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from levada.framework.errors import ConfigurationError

from . import Subparsers
from .arguments import positive
from .terminal import show_progress

__all__ = ["add_parser", "run"]

ROOT = Path(__file__).parents[4]
"""The root of the source tree, if levada runs from one."""


class Report(Protocol):
    """The result of a benchmark."""

    @property
    def missed(self) -> list[str]:
        """The rows above their budgets."""
        ...

    def text(self, *, judged: bool) -> str:
        """Return a table, with verdicts if it is `judged`."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return values that the `json` module writes."""
        ...


class Benchmark(Protocol):
    """A module of ``benchmarks/`` whose name does not begin with ``_``."""

    def run(self, *, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
        """Measure."""
        ...


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="run benchmarks against budgets and other libraries (in a source tree)",
        description="Run a benchmark in interleaved rounds and print one table. Needs a source tree (a clone or an unpacked sdist), "
        "because benchmarks/ is not installed. Exit code 1 if a budget is missed.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the benchmark to run (default: list them)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a hundredth of the work, one round: only shows that it runs, no budget is judged",
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose title contains this")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if a budget is missed (never with ``--quick``)."""
    names = find_benchmarks()
    if args.name is None:
        print(*names, sep="\n")
        return 0
    if args.name not in names:
        raise ConfigurationError(f"no benchmark is named {args.name!r}: choose from {', '.join(names)}")

    benchmark = cast("Benchmark", importlib.import_module(f"benchmarks.{args.name}"))
    report = benchmark.run(
        rounds=1 if args.quick else args.rounds, quick=args.quick, only=args.only, progress=show_progress
    )
    show_progress("")
    if args.json:
        told = report.to_json()
        if args.quick:
            for row in told["rows"]:
                row["missed"] = None
        print(json.dumps(told, indent=2))
    else:
        print(report.text(judged=not args.quick), end="")
    if args.quick:
        return 0
    return 1 if report.missed else 0


def find_benchmarks() -> list[str]:
    """Return the names of the benchmarks, and make ``benchmarks`` importable.

    Raises:
        ConfigurationError: levada does not run from a source tree.
    """
    folder = ROOT / "benchmarks"
    names = sorted(file.stem for file in folder.glob("[!_]*.py"))
    if not names:
        raise ConfigurationError(
            f"levada bench needs a source tree and there is no {folder}: clone the repository, pip install -e '.[dev]' in it, and run "
            "levada bench there"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return names
