"""One deadline for each operation, and all of them in one heap.

Deadlines move often and are mostly never reached, so an entry stays where it is when its owner's deadline is moved on or taken
away; it is looked at when its time comes. When most entries are of that kind the heap is made anew, which bounds it by twice the
owners that have a deadline.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

__all__ = ["Timed", "Timers"]


class Timed(Protocol):
    """Something that wants to be woken."""

    deadline: float | None
    """When; set by `Timers.set`."""
    scheduled: float | None
    """Time of its entry in the heap; set by `Timers`."""

    def expire(self, now: float) -> None:
        """Do what is due; the deadline has been taken away."""


class Timers:
    """The deadlines of one connection."""

    __slots__ = ("_heap", "_live", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._live = 0
        self._order = 0

    def set(self, owner: Timed, at: float | None) -> None:
        """Give an owner a deadline, or take it away."""
        if at is None:
            if owner.deadline is not None:
                owner.deadline = None
                self._live -= 1
            return
        if owner.deadline is None:
            self._live += 1
        owner.deadline = at
        if owner.scheduled is None or at < owner.scheduled:
            self._push(owner, at)

    def _push(self, owner: Timed, at: float) -> None:
        owner.scheduled = at
        self._order += 1
        heap = self._heap
        heappush(heap, (at, self._order, owner))
        if len(heap) > 2 * self._live + 64:
            heap[:] = [e for e in heap if e[2].scheduled == e[0] and e[2].deadline is not None]
            heapify(heap)

    def next(self) -> float | None:
        """Return the earliest deadline; entries of those that need none are thrown away on the way."""
        heap = self._heap
        while heap:
            at, _, owner = heap[0]
            if owner.scheduled == at:
                if owner.deadline == at:
                    return at
                heappop(heap)
                owner.scheduled = None
                if owner.deadline is not None:
                    self._push(owner, owner.deadline)
            else:
                heappop(heap)
        return None

    def expire(self, now: float) -> None:
        """Wake all whose time has come."""
        at = self.next()
        while at is not None and at <= now:
            owner = heappop(self._heap)[2]
            owner.scheduled = owner.deadline = None
            self._live -= 1
            owner.expire(now)
            at = self.next()
