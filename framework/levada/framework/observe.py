"""Snapshots of a running system: actors, and how long things take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal

import attrs

from .metrics import Distribution

__all__ = [
    "ActorDetail", "ActorInfo", "ChannelInfo", "ClassFigures", "FlowWindow", "Histogram", "Stalls", "longest_stall",
]  # fmt: skip

_BOUNDS: Final = tuple(2.0**power * 1e-6 for power in range(0, 26, 2))
"""Upper bounds of `Histogram.distribution`: every second power of two of a microsecond, up to 17 s."""


class Histogram:
    """Counts by powers of two of a microsecond."""

    def __init__(self) -> None:
        self.counts = [0] * 32
        """``counts[n]``: samples below 2**n microseconds, without those in lower entries."""
        self.seconds = 0.0
        """The sum of the samples."""

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a sample, which stands for `count` alike."""
        self.seconds += seconds * count
        self.counts[min(31, int(seconds * 1e6).bit_length())] += count

    @property
    def total(self) -> int:
        """The number of samples."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the seconds that `share` (0 to 1) of the samples stay below, rounded up to 2**n µs; 0.0 without samples."""
        left = self.total * share
        if not left:
            return 0.0
        power = 0
        while power < 31 and left > self.counts[power]:
            left -= self.counts[power]
            power += 1
        return float(2**power) * 1e-6

    def distribution(self) -> Distribution:
        """Return the same counts in half as many buckets, for a monitoring system."""
        counts = iter(self.counts)
        # 2**0 µs alone, then two powers at a time.
        buckets = [next(counts), *(sum(islice(counts, 2)) for _ in _BOUNDS[1:])]
        return Distribution(_BOUNDS, (*buckets, sum(counts)), self.seconds)


class Stalls:
    """The times for which the event loop was held up, so that each reader gets the longest of its own interval, exactly.

    Of two stalls the shorter one counts only until the longer one ends, so few are kept.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=100)

    def add(self, ended: float, seconds: float) -> None:
        """Add a stall that ended at a time on trio's clock."""
        kept = self._kept
        while kept and kept[-1][1] <= seconds:
            kept.pop()
        while kept and kept[0][0] < ended - 600:
            kept.popleft()
        kept.append((ended, seconds))

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Yield when a stall ended and how long it took, for those that no later one exceeds: of ten minutes, and a hundred at most."""
        return iter(self._kept)

    def longest(self, since: float) -> float:
        """Return the seconds of the longest stall that ended after `since`, on trio's clock; 0.0 if there was none."""
        return longest_stall(self, since)


def longest_stall(stalls: Iterable[Sequence[float]], since: float) -> float:
    """Return the seconds of the longest of some stalls, each (end, seconds), that ended after `since`; 0.0 if there is none."""
    return max((seconds for ended, seconds in stalls if ended > since), default=0.0)


@attrs.define
class ClassFigures:
    """What the living actors of one class have in common: `Observer.count`."""

    actors: int = 0
    waiting: int = 0
    """In an async handler."""
    handled: int = 0
    """Messages that they have handled."""
    depth: int = 0
    """Messages in their mailboxes."""
    age: float = 0.0
    """Seconds that the oldest message has waited, at most."""
    channels: int = 0
    """Open ends of channels in their fields."""
    queued: int = 0
    """Messages in the channels that they receive from."""


@attrs.frozen
class FlowWindow:
    """What flow control lets pass on a connection at the moment of the snapshot: `ActorInfo.window`."""

    send: int | None
    """How much this side may send now; None if the protocol sets no limit."""
    receive: int | None
    """How much the peer may send now; None if the protocol sets no limit."""
    queued: int | None
    """Bytes that wait in the carrier; None if it does not count them."""
    unit: Literal["bytes", "payloads", "lines"]
    """What `send` and `receive` count; a protocol of streams sums up its open streams."""


@attrs.frozen
class ActorInfo:
    """One actor in a snapshot of the tree."""

    path: str
    kind: str
    """The name of its class."""
    state: str
    """``idle``, ``ready``, ``waiting`` (in an async handler), ``restarting`` or ``stopping``."""
    depth: int
    """The number of messages in its mailbox, approximately."""
    age: float
    """An upper bound of the seconds that the oldest message has waited."""
    handled: int
    """Messages handled so far, including the current one."""
    restarts: int
    handler: str | None
    """The waiting handler, if any."""
    where: str | None
    """The line where it waits, as ``file.py:57``: the innermost line outside of trio and this package."""
    waits_for: tuple[str, ...]
    """The paths of the actors that it waits for, by ask or send."""
    children: tuple[ActorInfo, ...]
    hidden: int = 0
    """The number of children left out of the snapshot, see `Observer.tree`."""
    about: str = ""
    """Of a connection: who is at its other end. Of a listener: its URL, clients and refusals."""
    own: bool = True
    """Whether it is one of the program's: of a class outside of levada, or a journal, a query or a shard of durable entities."""
    window: FlowWindow | None = None
    """Of a connection that has a carrier; None of other actors."""


@attrs.frozen
class ChannelInfo:
    """One end of a channel that an actor holds in a field: `ActorDetail.channels`."""

    name: str
    end: str
    """The class of the handle: ``Sender``, ``Receiver``, ``OneshotSender`` or ``OneshotReceiver``."""
    item: str
    """The name of the type of its messages."""
    mode: str
    """``ordered``, ``unordered`` or ``unreliable``."""
    queued: int
    """Messages in this process that the receiver has not taken."""
    window: int
    """Messages that may be under way."""


@attrs.frozen
class ActorDetail:
    """What a snapshot of the tree leaves out about an actor: `Observer.detail`."""

    supervision: str
    """What follows a failure, for example ``stop`` or ``restart (permanent, 3 in 5 s)``."""
    capacity: int | None
    """Of the mailbox; ``None``: unbounded."""
    links: tuple[str, ...]
    """Paths of the actors that it is linked to, at most a hundred."""
    watchers: int
    """Actors and parts of the runtime that learn of its end."""
    channels: tuple[ChannelInfo, ...]
    """Open channels in its fields, at most a hundred ends."""
    restarts_in: float | None = None
    """Seconds until it restarts; None if it does not wait for a restart."""
