"""``levada bench``: measure, beside a limit of the same moment and beside others that do the same work."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, cast

from levada.framework.errors import ConfigurationError

from . import Subparsers

__all__ = ["add_parser", "run"]

ROOT = Path(__file__).parents[4]
"""Of the checkout, if this is one."""


class Report(Protocol):
    """What a benchmark gives back."""

    @property
    def missed(self) -> list[str]:
        """The rows above their budgets."""
        ...

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table; without verdicts if it is not `judged`."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
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
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose title contains this")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if a budget is missed (never with ``--quick``)."""
    names = find_benchmarks()
    if args.name is None:
        print(*names, sep="\n")
        return 0
    if args.name not in names:
        raise ConfigurationError(f"no benchmark {args.name!r}; there are: {', '.join(names)}")
    if args.rounds < 1:
        raise ConfigurationError(f"wanted 1 round or more, not {args.rounds}")
    benchmark = cast("Benchmark", importlib.import_module(f"benchmarks.{args.name}"))
    report = benchmark.run(
        rounds=1 if args.quick else args.rounds, quick=args.quick, only=args.only, progress=_tell_progress
    )
    _tell_progress("")
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
    """List the benchmarks of the checkout, and make ``benchmarks`` importable.

    Raises:
        ConfigurationError: this levada does not run from a source tree.
    """
    folder = ROOT / "benchmarks"
    names = sorted(file.stem for file in folder.glob("[!_]*.py"))
    if not names:
        raise ConfigurationError(
            f"levada bench needs a source tree and there is no {folder}: unpack the sdist (pip download --no-deps --no-binary levada "
            f"levada=={version('levada')}) or clone the repository, pip install -e '.[dev]' in it, and run levada bench there"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return names


def _tell_progress(text: str) -> None:
    """Show one line, in the place of the line before; nothing without a terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
