"""Compact sets of numbers that mostly come in order, such as the numbers of ended streams and channels."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Numbers"]


class Numbers:
    """A set of numbers that mostly come in order, as ranges: a complete run costs nothing.

    Adding at the end of a range is O(1), elsewhere O(log n) to find and a memory move to insert.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        """Ranges, which is what costs memory."""
        return len(self._starts)

    def add(self, number: int) -> bool:
        """Put a number in; once more does nothing. Return whether it begins a range of its own."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number)
        if at and number < ends[at - 1]:
            return False
        joins_left = at > 0 and ends[at - 1] == number
        joins_right = at < len(starts) and starts[at] == number + 1
        if joins_left and joins_right:
            ends[at - 1] = ends.pop(at)
            del starts[at]
        elif joins_left:
            ends[at - 1] = number + 1
        elif joins_right:
            starts[at] = number
        else:
            starts.insert(at, number)
            ends.insert(at, number + 1)
            return True
        return False

    def append(self, start: int, end: int) -> None:
        """Put in all numbers from `start` up to, not including, `end`; all must be above every number that is in. O(1)."""
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)

    def discard(self, number: int) -> None:
        """Take a number out, if it is in."""
        if number not in self:
            return
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number) - 1
        start, end = starts[at], ends[at]
        pieces = [(a, b) for a, b in ((start, number), (number + 1, end)) if a < b]
        starts[at : at + 1] = [a for a, _ in pieces]
        ends[at : at + 1] = [b for _, b in pieces]
