"""Makes a history that fails as small as it goes, while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from tests.simulation.history import History, Life
from tests.simulation.runner import run

__all__ = ["explain", "shrink"]

NEED_KEYS = ("commands", "copy", "erase", "prune", "repeat", "reuse", "trim")
"""Operations of a journal that is keyed."""


def explain(history: History) -> str:
    """Return the story of a history that fails, shrunk, and the file that replays it."""
    small = shrink(history, lambda smaller: bool(run(smaller).wrong))
    outcome = run(small)
    story = "\n".join([f"{small.model} disk: {outcome.wrong}", *outcome.story])
    return f"{story}\nTo keep it, save this in tests/simulation/replays/NAME.json:\n{small.to_json()}"


def shrink(history: History, fails: Callable[[History], bool], *, runs: int = 400) -> History:
    """Return a history that fails too, and has nothing that can be left out alone.

    Args:
        history: fails; its faults are at named calls.
        fails: runs a history.
        runs: most runs.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(history):
            runs -= 1
            if runs < 0:
                return history
            if fails(candidate):
                history, smaller = candidate, True
                break
    return history


def _smaller(history: History) -> Iterator[History]:
    """Yield histories with a little less, the largest steps first."""
    lives = history.lives
    for place in range(len(lives)):
        yield attrs.evolve(history, lives=lives[:place] + lives[place + 1 :])
    for place, life in enumerate(lives):
        for less in _less(life):
            yield attrs.evolve(history, lives=[*lives[:place], less, *lives[place + 1 :]])
    for name, plain in (("keyed", False), ("retain_time", None), ("segment_time", None), ("retain_bytes", None)):
        needed = name == "keyed" and any(each[0] in NEED_KEYS for life in lives for each in life.operations)
        if history.config.get(name) not in (None, plain) and not needed:
            yield attrs.evolve(history, config={**history.config, name: plain})


def _less(life: Life) -> Iterator[Life]:
    operations, faults = life.operations, life.faults
    for size in (len(operations) // 2, 1):
        for place in range(0, len(operations) - size + 1, max(size, 1)) if size else ():
            full = life.full - size * (place < life.full)
            yield attrs.evolve(life, operations=operations[:place] + operations[place + size :], full=max(full, -1))
    for size in (len(faults), 1):
        for place in range(0, len(faults) - size + 1, max(size, 1)) if size else ():
            yield attrs.evolve(life, faults=faults[:place] + faults[place + size :])
    if life.full >= 0:
        yield attrs.evolve(life, full=-1)
    if life.end == "power":
        yield attrs.evolve(life, end="kill", seed=0, share=0.0)
        if life.share:
            yield attrs.evolve(life, seed=0, share=0.0)
    for place, operation in enumerate(operations):
        for at, parts in enumerate(operation):
            if isinstance(parts, list) and len(parts) > 1:
                for drop in range(len(parts)):
                    fewer = [*operation[:at], parts[:drop] + parts[drop + 1 :], *operation[at + 1 :]]
                    yield attrs.evolve(life, operations=[*operations[:place], fewer, *operations[place + 1 :]])
