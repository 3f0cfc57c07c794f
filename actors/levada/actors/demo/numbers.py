"""A set of whole numbers, kept as ranges: small as long as most of them follow each other."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MOST", "NumberSet", "Range"]

Range = tuple[int, int]
"""The first number, and the number behind the last."""
MOST = 128
"""Ranges that are kept; with more gaps than these, the lowest numbers are forgotten."""


class NumberSet:
    """A set of numbers.

    Example:
        >>> known = NumberSet()
        >>> known.add([(0, 3), (5, 7)])
        >>> known.new([(2, 6)])
        [False, True, True, False]
        >>> known.add([(3, 5)])
        >>> known.ranges
        [(0, 7)]
    """

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        """In order; none touches the next one."""

    def add(self, ranges: Iterable[Range]) -> None:
        """Put numbers in."""
        for first, end in ranges:
            before = [each for each in self.ranges if each[1] < first]
            behind = [each for each in self.ranges if each[0] > end]
            touching = self.ranges[len(before) : len(self.ranges) - len(behind)]
            joined = min([first, *(low for low, _ in touching)]), max([end, *(high for _, high in touching)])
            self.ranges = [*before, joined, *behind][-MOST:]

    def new(self, ranges: Iterable[Range]) -> list[bool]:
        """Say of each number whether it is not in the set."""
        found: list[bool] = []
        for first, end in ranges:
            known = [(low, high) for low, high in self.ranges if low < end and first < high]
            if known:
                found += [not any(low <= number < high for low, high in known) for number in range(first, end)]
            else:
                found += [True] * (end - first)
        return found
