"""``levada simulate``: run a scenario in simulated worlds, one for each seed, and tell the story of a world in which it fails."""

from __future__ import annotations

import argparse
import inspect
import logging
import shlex
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from levada.actors.apps import find
from levada.framework.errors import ConfigurationError

from . import Subparsers
from .arguments import positive, seconds, whole
from .terminal import show_progress, shown

__all__ = ["add_parser", "run"]

Scenario = Callable[[Any], Awaitable[object]]

_SHOWN = 50
"""Events of a failing world that are printed."""


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a scenario in simulated worlds of processes, networks and disks, one for each seed",
        description="Import a scenario, an async function that takes a levada.framework.testing.simulation.World, and run it once for each "
        "seed, each time in a new world. A world takes no real time to wait, and the same seed is the same world as long as the code stays the "
        "same. For a world in which the scenario fails, print what happened in it, with the virtual time, the error, and the command that "
        "runs it again.",
        epilog="Ctrl-C ends it and says how far it came. "
        "Exit codes: 0 all worlds passed; 1 a world failed; 2 a mistake; 130 after Ctrl-C.",
    )
    parser.add_argument(
        "target", metavar="MODULE:SCENARIO", help="what to run; the current folder is searched first for the module"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=positive, default=20, metavar="N", help="run N worlds (default: 20)")
    which.add_argument(
        "--seed",
        type=whole(0),
        action="append",
        default=[],
        metavar="N",
        help="run the world of this seed only; may be repeated",
    )
    parser.add_argument(
        "--first", type=whole(0), default=0, metavar="N", help="with --seeds: the first seed (default: 0)"
    )
    parser.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="NAME",
        help="a machine of the world, as machines= of simulate; may be repeated (default: one, named machine)",
    )
    parser.add_argument(
        "--faults",
        metavar="N|MODULE:NAME",
        help="what goes wrong by chance: at most N strikes in a world, or a Faults by its name (default: only what the scenario does)",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=3600.0,
        metavar="S",
        help="virtual seconds after which a world counts as hung (default: 3600)",
    )
    parser.add_argument("--keep-going", action="store_true", help="run the other worlds after a failure, too")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print what the worlds log, and do not look for the fewest strikes (default: only what the program's own log handlers print)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the worlds; 1 if one of them fails."""
    scenario = _scenario(find(args.target), args.target)
    faults = _faults(args.faults)
    if args.seed and args.first:
        raise ConfigurationError("--first goes with --seeds, and --seed names its world itself")
    for machine in args.machine:
        if args.machine.count(machine) > 1:
            raise ConfigurationError(f"--machine {machine} is given twice")
    quiet = logging.NullHandler()  # without a handler, Python prints warnings
    if not args.verbose:
        logging.getLogger().addHandler(quiet)
    try:
        return _Worlds(scenario, faults, args).run(args.seed or range(args.first, args.first + args.seeds))
    finally:
        logging.getLogger().removeHandler(quiet)


def _scenario(found: Any, target: str) -> Scenario:
    wanted = "a scenario is an async function that takes a World"
    if not inspect.iscoroutinefunction(found):
        raise ConfigurationError(f"{target} is no scenario: {wanted}; got {found!r}")
    scenario: Scenario = found
    try:
        inspect.signature(scenario).bind(None)
    except TypeError as error:
        raise ConfigurationError(f"{target} is no scenario: {wanted}, and nothing else ({error})") from None
    return scenario


def _faults(text: str | None) -> Any:
    """Return the `Faults` of ``--faults``."""
    from levada.framework.testing.simulation import Faults

    if text is None:
        return None
    if text.isdecimal():
        return Faults(strikes=int(text))
    found = find(text) if ":" in text else text
    if not isinstance(found, Faults):
        raise ConfigurationError(
            f"--faults: {text} is {found!r}, wanted a number or MODULE:NAME of a levada.framework.testing.simulation.Faults"
        )
    return found


class _Worlds:
    """The worlds of one command, one after another."""

    def __init__(self, scenario: Scenario, faults: Any, args: argparse.Namespace) -> None:
        self._scenario = scenario
        self._faults = faults
        self._args = args
        self._failed: list[int] = []
        """The seeds of worlds that failed."""
        self._done = 0
        self._seconds = 0.0
        """Virtual seconds of all worlds that passed."""
        self._strikes = 0

    def run(self, seeds: Sequence[int]) -> int:
        """Run them; return the exit code."""
        try:
            for seed in seeds:
                failed = f", {len(self._failed)} failed" if self._failed else ""
                if not self._args.verbose:
                    show_progress(f"world {self._done + 1:,} of {len(seeds):,}: seed {seed}{failed}")
                self._run(seed)
                if self._failed and not self._args.keep_going:
                    break
        except BaseException as error:
            if not _is_interrupt(error):
                raise
            show_progress("")
            print(f"levada: {self._summary(seeds)}; stopped in the world of seed {seeds[self._done]}", file=sys.stderr)
            return 130
        show_progress("")
        print(self._summary(seeds))
        return 1 if self._failed else 0

    def _run(self, seed: int) -> None:
        from levada.framework.testing.simulation import SimulationFailure, simulate

        try:
            result = simulate(
                self._scenario,
                seeds=[seed],
                machines=self._args.machine or ("machine",),
                faults=self._faults,
                limit=self._args.limit,
                shrink=not self._args.verbose,  # else the log has those worlds too
            )
        except SimulationFailure as failure:
            self._failed.append(seed)
            show_progress("")
            print(shown(self._story(failure)))
        else:
            self._seconds += result.seconds
            self._strikes += result.strikes
        self._done += 1

    def _story(self, failure: Any) -> str:
        """Tell what happened in a world that failed."""
        events = [f"{at:>12.4f} s  {text}" for at, text in failure.events[-_SHOWN:]]
        if len(failure.events) > _SHOWN:
            events.insert(0, f"  … {len(failure.events) - _SHOWN} earlier events")
        error = "".join(traceback.format_exception(failure.__cause__)).rstrip()
        return "\n".join(
            [
                f"The world of seed {failure.seed} failed. Its events, in virtual time:",
                *(events or ["  none"]),
                "and the error:",
                *(f"  {line}" for line in error.split("\n")),
                f"Run it again, with its log: {self._again(failure.seed)}",
                *(
                    []
                    if failure.strikes is None or self._args.verbose
                    else [f"As a test that outlives changes of the code: {failure.call}"]
                ),
            ]
        )

    def _again(self, seed: int) -> str:
        args = self._args
        words = ["levada", "simulate", args.target, "--seed", str(seed)]
        for machine in args.machine:
            words += ["--machine", machine]
        if args.faults is not None:
            words += ["--faults", args.faults]
        if args.limit != 3600.0:
            words += ["--limit", f"{args.limit:g}"]
        words.append("-v")
        return shlex.join(words)

    def _summary(self, seeds: Sequence[int]) -> str:
        count = f"{self._done:,} of {len(seeds):,} worlds" if self._done < len(seeds) else f"{self._done:,} worlds"
        others = f"{self._seconds:,.0f} virtual seconds and {self._strikes:,} strikes"
        if not self._failed:
            return f"{count} ran, none failed; {others}"
        seeds_ = ", ".join(map(str, self._failed))
        return f"{count} ran, {len(self._failed):,} failed (seed {seeds_}); {others} in the others"


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_interrupt, error.exceptions))
    return isinstance(error, KeyboardInterrupt)
