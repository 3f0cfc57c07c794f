"""``levada demo``: a whole program made of actors, which checks its own result."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping

import trio

from levada.actors.demo import KNOWN, Summary, log_lines, mistakes, summarise

from . import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "demo",
        help="run a whole program made of actors; it checks its own result",
        description="Send the 10,000 lines of a real access log through a pool of parsing actors with a bounded mailbox, count them by "
        "status and by day through channels, and compare with what is known about that log. Exit code 1 if a count is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Run the program; 1 if what came out is wrong."""
    start = time.perf_counter()
    try:
        summary = trio.run(summarise, log_lines(), _tell_progress)
    finally:
        _tell_progress(None)
    seconds = time.perf_counter() - start
    wrong = mistakes(summary)
    if args.json:
        print(json.dumps(_to_json(summary, wrong), indent=2))
    else:
        print(_to_text(summary, seconds))
    for mistake in wrong:
        print(f"levada: {mistake}", file=sys.stderr)
    if not wrong and not args.json:
        print("verified: all counts are those that are known for this log")
    return 1 if wrong else 0


def _tell_progress(done: int | None) -> None:
    if not sys.stderr.isatty():
        return
    bar = "" if done is None else f"{_bar(done / KNOWN.lines):40} {done:,} of {KNOWN.lines:,} lines"
    print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def _to_json(summary: Summary, wrong: list[str]) -> dict[str, object]:
    return {
        "lines": summary.lines,
        "statuses": dict(summary.statuses),
        "days": {day.isoformat(): count for day, count in summary.days.items()},
        "damaged": {str(number): why for number, why in summary.damaged.items()},
        "verified": not wrong,
    }


def _to_text(summary: Summary, seconds: float) -> str:
    return "\n".join(
        [
            f"{summary.lines:,} lines of a web server's access log, parsed and counted by actors in {seconds:.1f} s",
            "",
            *_table("status", dict(sorted(summary.statuses.items(), key=lambda item: -item[1]))),
            "",
            *_table("day", {f"{day:%a} {day}": count for day, count in sorted(summary.days.items())}),
            "",
            *(f"damaged, and reported: line {number:,}, {why}" for number, why in summary.damaged.items()),
        ]
    )


def _table(heading: str, counts: Mapping[str, int]) -> list[str]:
    width = max(map(len, (heading, *counts)))
    most = max(counts.values(), default=1)
    lines = [f"{heading:{width}}   lines"]
    return lines + [f"{key:{width}}  {count:6,}  {_bar(count / most)}".rstrip() for key, count in counts.items()]


def _bar(share: float) -> str:
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    return block * round(share * 40)
