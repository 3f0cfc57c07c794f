"""How many requests a side may send, and until when; the same count on the side that may and on the side that allowed it."""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """What the last LEASE allows; nothing before the first one (RS-130, RS-131).

    Args:
        grace: seconds for which it holds beyond its time; for the side that allowed it, whose clock started earlier (RS-134).
    """

    __slots__ = ("_grace", "_left", "_until")

    def __init__(self, grace: float = 0.0) -> None:
        self._grace = grace
        self._left = 0
        self._until = 0.0

    def replace(self, ttl: float, n: int, now: float) -> None:
        """Forget the earlier lease, this one holds (RS-130); 0 in either value stops all requests (RS-131)."""
        self._left = n if ttl > 0 else 0
        self._until = now + ttl + self._grace

    def take(self, now: float) -> bool:
        """Use one request up; false if there is none left, or the time is over."""
        if self._left > 0 and now < self._until:
            self._left -= 1
            return True
        return False
