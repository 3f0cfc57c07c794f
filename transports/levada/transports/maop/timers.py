"""One deadline for each operation, grouped by millisecond.

Most deadlines are set, moved and removed without ever being reached, many of them within one turn. So a deadline is at first only a
field of its owner. Once a turn, `settle` files the remaining ones under the millisecond in which they are due, and a heap orders the
milliseconds, not the owners. A deadline that moves later stays where it is filed, and is filed again when that time comes. An operation
that begins and ends in one turn costs an entry in a list. A filed deadline that is removed leaves at once, so that ended operations are
not held. A request costs both ends together 1.1 us less than with a heap of owners.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final, Protocol

__all__ = ["MaopTimers", "Timed"]

_SLACK: Final = 0.01
"""Milliseconds that floating point may have added to a round figure."""


class Timed(Protocol):
    """An object with a deadline."""

    deadline: float | None
    """When, in seconds; set by `MaopTimers.set`."""
    filed: int | None
    """The millisecond under which it is filed; set by `MaopTimers`. While it is None, `deadline` may be removed without `MaopTimers`."""

    def expire(self, now: float) -> None:
        """Handle the deadline, which has been removed."""


class MaopTimers:
    """The deadlines of one connection."""

    __slots__ = ("_due", "_fresh", "_heap")

    def __init__(self) -> None:
        self._fresh: list[Timed] = []
        self._due: dict[int, dict[Timed, None]] = {}
        self._heap: list[int] = []

    def set(self, owner: Timed, at: float | None) -> None:
        """Set or remove the deadline of an owner."""
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
        """File the deadlines that were set since the last call."""
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
        """Return the earliest deadline, at most a millisecond late. Its owner may have moved it since."""
        if self._fresh:
            self.settle()
        heap = self._heap
        while heap:
            if heap[0] in self._due:
                return heap[0] / 1000
            heappop(heap)
        return None

    def expire(self, now: float) -> None:
        """Wake all owners whose time has come."""
        at = self.next()
        while at is not None and at <= now:
            key = self._heap[0]
            due: list[Timed] = []
            for owner in self._due.pop(key):
                owner.filed = None
                assert owner.deadline is not None
                (self._fresh if owner.deadline * 1000 - _SLACK > key else due).append(owner)
            for owner in due:
                # An owner woken before may have removed or postponed it.
                if owner.deadline is not None and owner.deadline * 1000 - _SLACK <= key:
                    owner.deadline = None
                    owner.expire(now)
            at = self.next()
