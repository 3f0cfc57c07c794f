"""How many requests a side may send, and until when. Both sides keep the same count."""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """What the last LEASE allows; nothing before the first one (RS-130, RS-131).

    Args:
        lease_grace: seconds for which a lease still counts after its time is over. The side that granted it needs this, because its clock
            started earlier (RS-134).
    """

    __slots__ = ("_lease_grace", "_left", "_until")

    def __init__(self, lease_grace: float = 0.0) -> None:
        self._lease_grace = lease_grace
        self._left = 0
        self._until = 0.0

    def replace(self, ttl: float, n: int, now: float) -> None:
        """Replace the earlier lease (RS-130). A `ttl` or an `n` of 0 stops all requests (RS-131)."""
        self._left = n if ttl > 0 else 0
        self._until = now + ttl + self._lease_grace

    def take(self, now: float) -> bool:
        """Use up one request. Return false if none is left or the lease has expired."""
        if self._left > 0 and now < self._until:
            self._left -= 1
            return True
        return False
