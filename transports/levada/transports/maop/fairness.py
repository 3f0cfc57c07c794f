"""Fair scheduling: deficit round robin over priority classes, with ageing.

The core uses it for approvals, its owner for the order of execution and writing.
"""

from __future__ import annotations

import enum
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeAlias, TypeVar

__all__ = ["FairQueue", "PriorityClass", "class_of"]

T = TypeVar("T")
_Item: TypeAlias = list[Any]
"""Priority, arrival number, waiting since, cost, and the entry; ``None`` in its place once it has left."""


class PriorityClass(enum.IntEnum):
    """A range of priorities that shares a weight. Source: MA-117."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3
    BEST_EFFORT = 4


WEIGHTS: Final = (16, 8, 4, 2, 1)
"""Shares of the classes. Source: MA-117."""
AGING: Final = 0.5
"""Seconds of waiting that raise an entry by one class. Source: MA-117."""
_BOUNDS: Final = (32, 96, 160, 224, 256)
_CLASSES: Final = tuple(next(i for i, bound in enumerate(_BOUNDS) if p < bound) for p in range(256))


def class_of(priority: int) -> PriorityClass:
    """Return the class of a priority.

    Example:
        >>> class_of(128).name, class_of(255).name
        ('NORMAL', 'BEST_EFFORT')
    """
    return PriorityClass(_CLASSES[priority])


class FairQueue(Generic[T]):
    """Waiting entries, each with a priority and a cost. Source: MA-117.

    A class takes entries while its deficit covers their cost; each round adds its weight. Over a time in which all classes have entries,
    their shares of the cost match their weights, and no class starves.
    """

    # An entry that leaves early leaves an empty item in its heap. It is removed when it reaches the top, or with all other empty items when
    # they are the majority. So leaving costs O(log n) on average, and left entries hold no memory.
    __slots__ = ("_age_at", "_classes", "_deficit", "_left", "_order", "_turn", "waiting")

    def __init__(self) -> None:
        self._classes: list[list[_Item]] = [[] for _ in WEIGHTS]
        self.waiting: dict[int, _Item] = {}
        """Entries by `id()`; read-only for callers."""
        self._left = 0
        self._deficit = [0.0] * len(WEIGHTS)
        self._turn = len(WEIGHTS) - 1  # so that the first round begins with the first class
        self._order = 0
        self._age_at = 0.0

    def __len__(self) -> int:
        return len(self.waiting)

    def push(self, entry: T, priority: int, size: int, now: float) -> None:
        """Add an entry, which must not be in the queue already.

        Args:
            priority: 0 to 255; decides the class, and the order in it.
            size: announced bytes, for the cost: 1 plus 1 for each 64 KiB, at most 128 of these, so that a turn comes in bounded time.
        """
        self._order += 1
        item: _Item = [priority, self._order, now, 1 + min(size / 65_536, 128), entry]
        self.waiting[id(entry)] = item
        heappush(self._classes[_CLASSES[priority]], item)

    def pop(self, now: float) -> T | None:
        """Take the next entry; None if the queue is empty."""
        if not self.waiting:
            return None
        self._age(now)
        while True:
            turn = self._turn
            heap = self._classes[turn]
            while heap and heap[0][4] is None:
                heappop(heap)
                self._left -= 1
            if heap and self._deficit[turn] >= heap[0][3]:
                self._deficit[turn] -= heap[0][3]
                entry: T | None = heappop(heap)[4]
                assert entry is not None
                del self.waiting[id(entry)]
                return entry
            if not heap:
                self._deficit[turn] = 0.0
            self._turn = turn = (turn + 1) % len(WEIGHTS)
            if self._classes[turn]:
                self._deficit[turn] += WEIGHTS[turn]

    def _age(self, now: float) -> None:
        if now < self._age_at:
            return
        # Looking at every entry takes time; a tenth of the step is precise enough.
        self._age_at = now + AGING / 10
        for place in range(1, len(WEIGHTS)):
            heap = self._classes[place]
            stay = [e for e in heap if now - e[2] < AGING]
            if len(stay) == len(heap):
                continue
            for item in heap:
                lift = min(place, int((now - item[2]) / AGING))
                if lift:
                    # It becomes the first of its new class. Otherwise a steady flow of better priorities would starve it.
                    item[0] = _BOUNDS[place - lift - 1] if lift < place else 0
                    item[2] += lift * AGING
                    heappush(self._classes[place - lift], item)
            heap[:] = stay
            heapify(heap)

    def remove(self, entry: T) -> bool:
        """Remove a waiting entry; return whether it was there."""
        item = self.waiting.pop(id(entry), None)
        if item is None:
            return False
        item[4] = None
        self._left += 1
        if self._left > len(self.waiting):
            self._left = 0
            for heap in self._classes:
                heap[:] = [item for item in heap if item[4] is not None]
                heapify(heap)
        return True
