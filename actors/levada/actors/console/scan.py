"""A search through all actors, in slices: it never holds up the program, and costs nothing while no client asks for more."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import trio

from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef

__all__ = ["MOST_FOUND", "Scan"]

MOST_FOUND: Final = 10_000
"""Actors that one search finds."""
_SLICE: Final = 0.002
"""Seconds before other tasks run."""
_CHECK: Final = 256
"""Actors between looks at the clock."""
_FIRST: Final = 0.05
"""Seconds of work for one request while the first pass is under way: 100,000 actors take 0.05 to 0.1 s."""
_LATER: Final = 0.004
"""Seconds for one request afterwards: below 1 % of a core at two requests a second."""


class Scan:
    """Finds actors by a predicate, and keeps looking: each `advance` goes on where the last one stopped.

    Args:
        system: has been entered.
        matches: gets an actor and its path; must be quick.
    """

    def __init__(self, system: ActorSystem, matches: Callable[[LocalRef, str], bool]) -> None:
        self._system = system
        self._matches = matches
        self._found: list[LocalRef] = []
        self._finding: list[LocalRef] = []
        self._todo: list[tuple[str, list[LocalRef]]] = []
        self.complete = False
        """Whether all actors have been looked at once."""

    @property
    def found(self) -> list[LocalRef]:
        """The living actors found by the last whole pass, or so far by the first one, parents before their children."""
        return [cell for cell in (self._found if self.complete else self._finding) if cell.is_alive]

    @property
    def full(self) -> bool:
        """Whether there may be more than it can hold."""
        return max(len(self._found), len(self._finding)) >= MOST_FOUND

    async def advance(self) -> None:
        """Look at further actors; other tasks run every 2 ms.

        Cancellation:
            the next call goes on.
        """
        left = _LATER if self.complete else _FIRST
        if not self._todo:
            self._finding = []
            self._todo.append(("", list(self._system.observe.children(self._system.root))[::-1]))
        while self._todo and left > 0:
            began = perf_counter()
            self._look(began + min(left, _SLICE))
            left -= perf_counter() - began
            if not self._todo:
                self._found, self.complete = self._finding, True
            await trio.lowlevel.checkpoint()

    def _look(self, until: float) -> None:
        children_of, matches, todo = self._system.observe.children, self._matches, self._todo
        count = 0
        while todo:
            prefix, cells = todo[-1]
            if not cells:
                todo.pop()
                continue
            cell = cells.pop()
            if not cell.is_alive:
                continue
            path = f"{prefix}/{cell.name}"
            if matches(cell, path) and len(self._finding) < MOST_FOUND:
                self._finding.append(cell)
            children = children_of(cell)
            if children:
                todo.append((path, list(children)[::-1]))
            count += 1
            if not count % _CHECK and perf_counter() > until:
                return
