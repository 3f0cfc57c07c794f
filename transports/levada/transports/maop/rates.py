"""Rate limits."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["AttemptLimiter", "TokenBucket"]


class TokenBucket:
    """Tokens that arrive at a rate, up to a burst."""

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self.tokens = float(burst)
        """Tokens left, as of the last `refill`."""
        self._at = now

    def refill(self, now: float) -> float:
        """Add the tokens since the last call; return the total."""
        if now > self._at:
            self.tokens = min(self.burst, self.tokens + (now - self._at) * self.rate)
            self._at = now
        return self.tokens

    def take(self, now: float) -> bool:
        """Take one token if there is one."""
        if self.refill(now) < 1:
            return False
        self.tokens -= 1
        return True

    def wait(self) -> float:
        """Return the seconds until the next token, as of the last `refill`."""
        return max(0.0, (1 - self.tokens) / self.rate)


class AttemptLimiter:
    """Limits authentication attempts by source address; above the rate a listener closes before it reads. Source: MA-128.

    Args:
        rate: attempts a second from one address, and the burst.
        addresses: how many are remembered; the least recently seen is forgotten.
    """

    def __init__(self, rate: float = 20.0, addresses: int = 4096) -> None:
        self._rate: Final = rate
        self._addresses: Final = addresses
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def allow(self, address: str, now: float) -> bool:
        """Count an attempt; return whether it is allowed."""
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = TokenBucket(self._rate, self._rate, now)
            if len(self._buckets) > self._addresses:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(address)
        return bucket.take(now)
