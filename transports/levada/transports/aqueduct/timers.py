"""The deadlines of all channels of a connection.

A core reads no clock. A half requests a deadline at once, and the deadline gets its time when the owner next calls `next_deadline`: only
then, and after a timeout, is the earliest of all looked for. All acks share one deadline, and so do all declarations, for one wake-up and one flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

import attrs

from .config import AqueductConfig

__all__ = ["AqueductTimers", "NackDue"]

S = TypeVar("S")
R = TypeVar("R")

_AT_ONCE = 256
"""Channels handled in one call, about 1 ms, so that the owner can let other tasks run."""


@attrs.define(order=True)
class NackDue(Generic[R]):
    """Datagrams of one channel that are settled at one moment."""

    at: float
    receiver: R = attrs.field(order=False)
    end: int = attrs.field(order=False)
    """The number after the last datagram that was declared in time for it."""


class AqueductTimers(Generic[S, R]):
    """All deadlines of one connection, of its senders and its receivers."""

    __slots__ = (
        "_ack_at", "_acking", "_acking_next", "_config", "_declare_at", "_declaring", "_latest", "_nacks", "_stops", "_undated",
        "_unstopped", "changed", "end_at", "greet_at", "next",
    )  # fmt: skip

    def __init__(self, config: AqueductConfig) -> None:
        self._config = config
        self._acking: list[R] = []
        self._acking_next: list[R] = []
        self._ack_at: float | None = None
        self._declaring: list[S] = []
        self._declare_at: float | None = None
        self._undated: dict[R, int] = {}
        self._nacks: list[NackDue[R]] = []
        self._latest: dict[R, NackDue[R]] = {}
        self._unstopped: list[S] = []
        self.end_at: float | None = None
        """When a draining connection ends."""
        self.greet_at: float | None = None
        """When a connection ends whose client has not greeted."""
        self._stops: list[tuple[float, S]] = []
        self.next: float | None = None
        """The earliest deadline, unless they have `changed`."""
        self.changed = False
        """Whether there are new deadlines, or some are over, so that `date` has to be called."""

    def close(self) -> None:
        """Forget all deadlines."""
        for waiting in (
            self._acking,
            self._acking_next,
            self._declaring,
            self._nacks,
            self._unstopped,
            self._stops,
        ):
            waiting.clear()
        self._undated.clear()
        self._latest.clear()
        self.next = None

    def ack(self, receiver: R) -> None:
        """Set the time of a receiver's ack: within the ack delay, and not before half of it."""
        self._acking_next.append(receiver)
        self.changed = True

    def declare(self, sender: S) -> None:
        """Set the time at which a sender declares its datagrams: within the declare delay."""
        self._declaring.append(sender)
        self.changed = True

    def nack(self, receiver: R, end: int) -> None:
        """Set the time at which a receiver settles its declared datagrams, which are all below `end`."""
        self._undated[receiver] = end
        self.changed = True

    def stopped(self, sender: S) -> None:
        """Limit the time until a sender whose message stream was stopped must end."""
        self._unstopped.append(sender)
        self.changed = True

    def date(self, now: float, round_trip: float) -> None:
        """Set the times of new deadlines, and find the earliest of all."""
        config = self._config
        if self._acking_next and self._ack_at is None:
            self._ack_at = now + config.ack_delay / 2
        if self._declaring and self._declare_at is None:
            self._declare_at = now + min(config.declare_delay, max(0.05, round_trip / 2))
        if self._undated:
            delay = max(config.nack_delay, 2 * round_trip)
            for receiver, end in self._undated.items():
                due = self._latest.get(receiver)
                # Declarations within an eighth of the delay share an entry, so that a flood of them needs nine at most, and none is settled early.
                if due is None or due.at < now + delay:
                    due = self._latest[receiver] = NackDue(now + delay * 1.125, receiver, end)
                    heappush(self._nacks, due)
                due.end = end
            self._undated.clear()
        if self._unstopped:
            self._stops += [(now + config.stop_timeout, sender) for sender in self._unstopped]
            self._unstopped.clear()
        times = [at for at in (self._ack_at, self._declare_at, self.end_at, self.greet_at) if at is not None]
        if self._nacks:
            times.append(self._nacks[0].at)
        if self._stops:
            times.append(self._stops[0][0])
        self.next, self.changed = min(times, default=None), False

    def acks_due(self, now: float) -> tuple[list[R], list[R]]:
        """Take the receivers that must ack now, and return those for which half of the delay is over."""
        if self._ack_at is None or now < self._ack_at:
            return [], []
        if len(self._acking) > _AT_ONCE:
            due = self._acking[-_AT_ONCE:]
            del self._acking[-_AT_ONCE:]
            return due, []
        due, self._acking, self._acking_next = self._acking, self._acking_next, []
        self._ack_at = now + self._config.ack_delay / 2 if self._acking else None
        return due, self._acking

    def declarations_due(self, now: float) -> list[S]:
        """Take the senders that must declare now."""
        if self._declare_at is None or now < self._declare_at:
            return []
        due, self._declaring = self._declaring[:_AT_ONCE], self._declaring[_AT_ONCE:]
        if not self._declaring:
            self._declare_at = None
        return due

    def nacks_due(self, now: float) -> Iterator[NackDue[R]]:
        """Take the datagrams that must be settled now."""
        left = _AT_ONCE
        while self._nacks and self._nacks[0].at <= now and left:
            left -= 1
            due = heappop(self._nacks)
            if self._latest.get(due.receiver) is due:
                del self._latest[due.receiver]
            yield due

    def stops_due(self, now: float) -> Iterator[S]:
        """Take the senders whose time is over."""
        while self._stops and self._stops[0][0] <= now:
            yield self._stops.pop(0)[1]
