"""Channel ids: who minted one, which way it flows, and compact sets of them."""

from __future__ import annotations

import enum
from bisect import bisect_right
from typing import Final

__all__ = ["ENTRYPOINT", "FLOW", "MINTER", "ONESHOT", "SPACES", "Attach", "Numbers"]

FLOW: Final = 1
"""Bit of a channel id: 0 if the channel flows from the client to the server."""
MINTER: Final = 2
"""Bit of a channel id: 0 if the client minted it."""
ONESHOT: Final = 4
"""Bit of a channel id: the channel carries at most one message."""
SPACES: Final = 7
"""The three bits together: each value has indices of its own, and ids of one space are 8 apart. Source: AQ-6."""
ENTRYPOINT: Final = 0
"""The channel that is there from the start, from the client to the server."""


class Attach(enum.Enum):
    """What travels inside a message, seen from the peer that gets it; the opposite half stays here."""

    SENDER = 0
    RECEIVER = 1
    ONESHOT_SENDER = ONESHOT
    ONESHOT_RECEIVER = ONESHOT | 1


class Numbers:
    """A set of numbers that mostly come in order, as ranges: what is complete costs nothing.

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

    def add(self, number: int) -> None:
        """Put a number in; once more does nothing."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number)
        if at and number < ends[at - 1]:
            return
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
