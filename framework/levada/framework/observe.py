"""What a look into a running system shows: actors, and how long things take."""

from __future__ import annotations

import attrs

__all__ = ["ActorInfo", "Histogram"]


class Histogram:
    """Counts by powers of two of a microsecond."""

    def __init__(self) -> None:
        self.counts = [0] * 32
        """``counts[n]``: samples below 2**n microseconds that the one before did not count."""

    def add(self, seconds: float) -> None:
        """Count one sample."""
        self.counts[min(31, int(seconds * 1e6).bit_length())] += 1

    @property
    def total(self) -> int:
        """Samples in all."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds that `share` (0 to 1) of the samples stay below, rounded up to a power of two of a microsecond; 0.0 if there are none."""
        left = self.total * share
        if not left:
            return 0.0
        power = 0
        while power < 31 and left > self.counts[power]:
            left -= self.counts[power]
            power += 1
        return float(2**power) * 1e-6


@attrs.frozen
class ActorInfo:
    """One actor in a snapshot of the tree."""

    path: str
    kind: str
    """Name of its class."""
    state: str
    """``idle``, ``ready``, ``waiting`` (in an async handler), ``restarting`` or ``stopping``."""
    depth: int
    """Messages in its mailbox, about."""
    age: float
    """Seconds that the oldest of them has waited at most."""
    handled: int
    """Messages that were taken out of the mailbox for a handler so far, the one that is being handled included."""
    restarts: int
    handler: str | None
    """The handler that waits, if one does."""
    where: str | None
    """The line at which it waits, as ``file.py:57``: the innermost one outside of trio and this package."""
    waits_for: tuple[str, ...]
    """Paths of the actors that it waits for, by ask or send."""
    children: tuple[ActorInfo, ...]
    hidden: int = 0
    """Children that the snapshot left out, see `Observer.tree`."""
