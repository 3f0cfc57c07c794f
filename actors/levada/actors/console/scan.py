"""Visiting all actors in slices, so that other tasks run between them: `Walk`, and the search of consoles on top of it, `Scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef

__all__ = ["MOST_FOUND", "SLICE", "Scan", "Walk"]

MOST_FOUND: Final = 10_000
"""The most actors that one search finds."""
SLICE: Final = 0.002
"""Seconds of work before other tasks run."""
_CHECK: Final = 32
"""Actors visited between two looks at the clock."""
_FIRST: Final = 0.05
"""Seconds of work for a request during the first pass: 100,000 actors take 0.05 to 0.1 s."""
_LATER: Final = 0.004
"""Seconds of work for a request afterwards: below 1 % of a core at two requests a second."""


class Walk:
    """One pass over all actors, parents before their children.

    An actor that lives throughout the pass is visited once, any other actor once or not at all.

    Args:
        system: has been entered.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._children_of = system.observe.children
        self._perf_counter = system.platform.perf_counter
        self._todo: list[tuple[str, list[LocalRef]]] = [("", list(self._children_of(system.root))[::-1])]

    def advance(self, until: float, visit: Callable[[LocalRef, str], object]) -> bool:
        """Visit actors until `Platform.perf_counter` reaches a time.

        Args:
            until: that time.
            visit: called with an actor and the path of its parent, which is empty for the root; must be quick.

        Returns:
            Whether all actors have been visited.
        """
        children_of, todo = self._children_of, self._todo
        count = 0
        while todo:
            parent, cells = todo[-1]
            if not cells:
                todo.pop()
                continue
            cell = cells.pop()
            if not cell.is_alive:
                continue
            visit(cell, parent)
            children = children_of(cell)
            if children:
                todo.append((f"{parent}/{cell.name}", list(children)[::-1]))
            count += 1
            if not count % _CHECK and self._perf_counter() > until:
                break
        return not todo


class Scan:
    """Finds actors by a predicate, pass after pass: each `advance` continues where the last one stopped.

    Args:
        system: has been entered.
        matches: called with an actor and its path; must be quick.
    """

    def __init__(self, system: ActorSystem, matches: Callable[[LocalRef, str], bool]) -> None:
        self._system = system
        self._matches = matches
        self._found: list[LocalRef] = []
        self._finding: list[LocalRef] = []
        self._walk: Walk | None = None
        self.complete = False
        """Whether the first pass is over."""

    @property
    def found(self) -> list[LocalRef]:
        """The living actors that the last complete pass found, or the first pass so far, parents before their children."""
        return [cell for cell in (self._found if self.complete else self._finding) if cell.is_alive]

    @property
    def full(self) -> bool:
        """Whether there may be more than `MOST_FOUND`."""
        return max(len(self._found), len(self._finding)) >= MOST_FOUND

    async def advance(self) -> None:
        """Visit more actors; other tasks run after every 2 ms of work.

        Cancellation:
            the next call continues.
        """
        left = _LATER if self.complete else _FIRST
        perf_counter = self._system.platform.perf_counter
        if self._walk is None:
            self._finding, self._walk = [], Walk(self._system)
        while self._walk is not None and left > 0:
            began = perf_counter()
            if self._walk.advance(began + min(left, SLICE), self._look):
                self._found, self.complete, self._walk = self._finding, True, None
            left -= perf_counter() - began
            await trio.lowlevel.checkpoint()

    def _look(self, cell: LocalRef, parent: str) -> None:
        if self._matches(cell, f"{parent}/{cell.name}") and len(self._finding) < MOST_FOUND:
            self._finding.append(cell)
