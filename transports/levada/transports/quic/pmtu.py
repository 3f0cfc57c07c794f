"""Packetization-layer path MTU discovery (RFC 8899): the search, without I/O.

The path is assumed to carry the base size. Probes are sent one at a time, padded to the size under test. An acknowledged probe raises the
lower end of the interval; three lost ones lower the upper end. The first probe tests the upper end, since most paths carry that size. Then the
interval is halved until it is too small to matter. When several packets above the base size are lost in a row, the path has changed: the
search returns to the base size and starts again later.
"""

from __future__ import annotations

import math

__all__ = ["MtuSearch"]

MAX_PROBES = 3
GRANULARITY = 16  # bytes; a smaller gain is not worth a probe
PROBE_AGAIN = 600.0  # seconds from the end of a search to the next (RFC 8899, PMTU_RAISE_TIMER)
BLACK_HOLE_PAUSE = 60.0  # seconds from a black hole to the next search
BLACK_HOLE_LOSSES = 6  # packets above the base size lost in a row that make a black hole


class MtuSearch:
    """The search on one path: the packet size known to pass, and the size to probe next, in bytes of UDP payload."""

    def __init__(self, base: int, ceiling: int):
        self.base = base
        self.size = base
        """Packet size known to pass."""
        self.ceiling = ceiling
        self._high = max(ceiling, base)
        self._failures = 0
        self._first = True
        self._in_flight = 0
        self.losses = 0
        self.next_at = 0.0 if ceiling > base else math.inf
        """Time at which a probe may be sent."""

    @property
    def probing(self) -> bool:
        """Whether a probe is on its way."""
        return self._in_flight > 0

    def limit(self, size: int, now: float) -> None:
        """Send and probe at most the `size` that the peer accepts, which is at least 1,200."""
        self.base, self.size = min(self.base, size), min(self.size, size)
        self.ceiling = min(self.ceiling, size)
        self._high = max(min(self._high, self.ceiling), self.base)
        if self._high <= self.size:
            self.next_at = now + PROBE_AGAIN if self.ceiling > self.size else math.inf

    def probe(self, now: float) -> int:
        """Return the size to probe now, or 0 for no probe. After a probe, `acked` or `lost` must be called."""
        if self._in_flight or now < self.next_at:
            return 0
        if self.next_at > 0 and self._high == self.size:
            self._high, self._first = self.ceiling, True
        self._in_flight = self._high if self._first else (self.size + self._high + 1) // 2
        return self._in_flight

    def acked(self, size: int, now: float) -> None:
        """Record that the probe arrived."""
        self._in_flight = 0
        self._failures = 0
        self.size = max(self.size, size)
        self._high = max(self._high, self.size)
        self._settle(now)

    def lost(self, size: int, now: float) -> None:
        """Record that the probe was lost."""
        self._in_flight = 0
        self._failures += 1
        if self._failures >= MAX_PROBES:
            self._failures = 0
            self._first = False
            self._high = max(size - 1, self.size)
        self._settle(now)

    def large_acked(self) -> None:
        """Record that a packet above the base size arrived."""
        self.losses = 0

    def large_lost(self, now: float) -> bool:
        """Record that a packet above the base size was lost; true if this makes a black hole, so that `size` is the base size again."""
        if self.size == self.base:
            return False
        self.losses += 1
        if self.losses < BLACK_HOLE_LOSSES:
            return False
        self.fall_back(now)
        return True

    def fall_back(self, now: float) -> None:
        """Return to the base size and search again later."""
        self.size = self._high = self.base
        self.losses = self._failures = 0
        self.next_at = now + BLACK_HOLE_PAUSE

    def _settle(self, now: float) -> None:
        if self._high - self.size < GRANULARITY:
            self._high = self.size
            # At the ceiling there is nothing more to find.
            self.next_at = now + PROBE_AGAIN if self.size < self.ceiling else math.inf
