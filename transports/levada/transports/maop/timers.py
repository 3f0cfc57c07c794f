"""One deadline for each operation, and all of them in milliseconds' worth of owners.

Most deadlines are set, moved on and taken away without ever being reached, many of them within one turn. So a deadline is a field
of its owner at first; `settle`, once a turn, files those that are still wanted under the millisecond in which they are due, and a
heap orders the milliseconds, not the owners. One that moves on stays where it is filed, and is filed anew when that time comes.
An operation that begins and ends in one turn costs an entry in a list, and what was filed and is taken away leaves at once, so that
nothing that has ended is held. A request costs both ends together 1.1 us less than with a heap of owners.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final, Protocol

__all__ = ["Timed", "Timers"]

_SLACK: Final = 0.01
"""Milliseconds that floating point may have added to a round figure."""


class Timed(Protocol):
    """Something that wants to be woken."""

    deadline: float | None
    """When, in seconds; set by `Timers.set`."""
    filed: int | None
    """The millisecond under which it is filed; set by `Timers`. While there is none, `deadline` may be taken away without it."""

    def expire(self, now: float) -> None:
        """Do what is due; the deadline has been taken away."""


class Timers:
    """The deadlines of one connection."""

    __slots__ = ("_due", "_fresh", "_heap")

    def __init__(self) -> None:
        self._fresh: list[Timed] = []
        self._due: dict[int, dict[Timed, None]] = {}
        self._heap: list[int] = []

    def set(self, owner: Timed, at: float | None) -> None:
        """Give an owner a deadline, or take it away."""
        owner.deadline = at
        filed = owner.filed
        if filed is not None:
            if at is not None and at * 1000 > filed - 1:
                return
            owner.filed = None
            owners = self._due[filed]
            del owners[owner]
            if not owners:
                del self._due[filed]
        if at is not None:
            self._fresh.append(owner)

    def settle(self) -> None:
        """File what was set since the last call."""
        due, heap = self._due, self._heap
        for owner in self._fresh:
            at = owner.deadline
            if at is None or owner.filed is not None:
                continue
            owner.filed = key = ceil(at * 1000 - _SLACK)
            owners = due.get(key)
            if owners is None:
                due[key] = {owner: None}
                heappush(heap, key)
            else:
                owners[owner] = None
        self._fresh.clear()
        if len(heap) > 2 * len(due) + 64:
            heap[:] = due
            heapify(heap)

    def next(self) -> float | None:
        """Return the earliest deadline, a millisecond late at most; it may be that of one that has moved on since."""
        if self._fresh:
            self.settle()
        heap = self._heap
        while heap:
            if heap[0] in self._due:
                return heap[0] / 1000
            heappop(heap)
        return None

    def expire(self, now: float) -> None:
        """Wake all whose time has come."""
        at = self.next()
        while at is not None and at <= now:
            key = self._heap[0]
            due: list[Timed] = []
            for owner in self._due.pop(key):
                owner.filed = None
                assert owner.deadline is not None
                (self._fresh if owner.deadline * 1000 - _SLACK > key else due).append(owner)
            for owner in due:
                # Whoever was woken before may have taken it away, or put it off.
                if owner.deadline is not None and owner.deadline * 1000 - _SLACK <= key:
                    owner.deadline = None
                    owner.expire(now)
            at = self.next()
