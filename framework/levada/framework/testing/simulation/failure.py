"""The failure of a world: what it says, and how few strikes it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from levada.framework import __version__
from levada.framework.platform import PLATFORM
from levada.framework.text import error_text

from .strike import Strike, as_code

__all__ = ["Hung", "SimulationFailure", "is_interrupt", "shrunk"]

_SHOWN: Final = 30
"""Events in the text of a failure."""
_WORLDS: Final = 50
"""The most worlds that try fewer strikes."""
_TIME: Final = 30.0
"""Real seconds after which no other one is tried."""
_RECOVERY: Final = 60.0
"""Virtual seconds for what strikes delay, see `shrunk`."""


class Hung(AssertionError):
    """A world does not end."""


class SimulationFailure(AssertionError):
    """A scenario failed in one world; the error itself is the ``__cause__``."""

    def __init__(
        self,
        seed: int,
        error: BaseException,
        events: tuple[tuple[float, str], ...],
        strikes: tuple[Strike, ...] | None = None,
    ) -> None:
        self.seed = seed
        """Run it again with ``simulate(scenario, seeds=[seed])``."""
        self.events = events
        """The fates of processes and machines in this world, each with its time in seconds."""
        self.strikes = strikes
        """What struck this world, as far as it is needed for the failure: ``simulate(scenario, seeds=[seed], strikes=[…])`` repeats it, also when
        the code has changed. None if nothing was to go wrong by chance or as told, or if this list alone does not repeat it."""
        self.version = __version__
        """The version of levada: with another one, the seed may make another world."""
        last = "\n  ".join(f"{at:.4f} s  {text}" for at, text in events[-_SHOWN:])
        kept = "" if strikes is None else f"\nas a test that outlives changes of the code: {self.call}"
        super().__init__(
            f"failed in the world of seed {seed} (repeat it: simulate(…, seeds=[{seed}]), levada {self.version}): "
            f"{error_text(error)}\nlast events:\n  {last}{kept}"
        )

    @property
    def call(self) -> str:
        """The call that repeats it, as Python; the scenario and other arguments are an ellipsis."""
        strikes = "" if self.strikes is None else f", {as_code(self.strikes)}"
        return f"simulate(…, seeds=[{self.seed}]{strikes})"

    def __reduce__(self) -> Any:
        return type(self), (self.seed, self.__cause__, self.events, self.strikes)


def shrunk(
    found: SimulationFailure, run: Callable[[Sequence[Strike], float], SimulationFailure | float]
) -> SimulationFailure:
    """Return the failure of the same world, and with an error of the same type, that needs the fewest strikes of those tried.

    A world that hangs takes long. So while it is looked for fewer strikes, a world counts as hung when its last strike has been over for as long as
    the world takes without strikes, and `_RECOVERY`. The result has to hang for good.

    Args:
        found: the failure of a world that was struck by chance, or as told.
        run: runs the same world with other strikes, for so many virtual seconds after the last one; returns how it failed, or how long it took.

    Ctrl-C ends the search. If the strikes that were noted do not make the world fail again, the failure has no strikes: only the seed repeats it.
    """
    assert found.__cause__ is not None
    cause, smallest, left, ends = found.__cause__, found, _WORLDS, PLATFORM.get().monotonic() + _TIME
    rest = inf

    def attempt(strikes: tuple[Strike, ...]) -> SimulationFailure | float | None:
        """Return the failure if it is alike; of a world that has ended well, its virtual seconds."""
        try:
            ended = run(strikes, rest)
        except RuntimeError:  # it imports a module in each run
            return None
        return None if isinstance(ended, SimulationFailure) and type(ended.__cause__) is not type(cause) else ended

    def fails(strikes: tuple[Strike, ...]) -> bool:
        nonlocal smallest, left
        if not left or PLATFORM.get().monotonic() > ends:
            return False
        left -= 1
        ended = attempt(strikes)
        if isinstance(ended, SimulationFailure):
            smallest = ended
        return isinstance(ended, SimulationFailure)

    try:
        if isinstance(cause, Hung):
            calm = attempt(())
            if isinstance(calm, SimulationFailure):
                return calm
            rest = inf if calm is None else calm + _RECOVERY
        if found.strikes and not fails(found.strikes):
            plain = SimulationFailure(found.seed, cause, found.events)
            plain.__cause__ = cause
            return plain
        _fewest(found.strikes or (), fails)
        if rest < inf:
            rest = inf
            ended, smallest = attempt(smallest.strikes or ()), found
            return ended if isinstance(ended, SimulationFailure) else found
    except BaseException as error:
        if not is_interrupt(error):
            raise
        return smallest if rest == inf else found
    return smallest


def _fewest(found: tuple[Strike, ...], fails: Callable[[tuple[Strike, ...]], bool]) -> None:
    """Look for fewer strikes that fail too: without all of them, a half, …, and each one.

    Args:
        found: the strikes of a world that fails.
        fails: runs a world with these strikes; tells whether it fails in the same way.
    """
    size = len(found)
    while size:
        at = 0
        while at < len(found):
            fewer = found[:at] + found[at + size :]
            if fails(fewer):
                found = fewer
            else:
                at += size
        size //= 2


def is_interrupt(error: BaseException) -> bool:
    """Return whether it is Ctrl-C, alone or in a group."""
    return BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt) is not None
