"""The deadlines of all channels of a connection.

A core reads no clock. A half requests a deadline at once, and the deadline gets its time when the owner next calls `next_deadline`: only
then, and after a timeout, is the earliest of all looked for. All acks share one deadline, and so do all declarations, for one wake-up and one flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

import attrs

from .config import AqueductConfig

__all__ = ["AqueductTimers", "DueReceiver", "DueSender", "NackDue"]

_AT_ONCE = 256
"""Channels handled in one call, about 1 ms, so that the owner can let other tasks run."""


class DueSender(Protocol):
    """A sender with a deadline."""

    id: int
    declaring: bool
    """Whether it is queued to declare."""

    @property
    def ended(self) -> bool:
        """Whether the half has ended."""
        ...

    def declare(self) -> None:
        """Tell the peer how many datagrams were sent."""


class DueReceiver(Protocol):
    """A receiver with a deadline."""

    acking: bool
    """Whether it is queued to ack."""
    nack: NackDue | None
    """When the datagrams declared last are settled."""
    total: int
    """Datagrams that were declared."""

    def about_to_ack(self) -> None:
        """Record that half of the ack delay is over."""

    def ack(self, *, due: bool) -> None:
        """Ack the processed messages."""

    def settle_due(self, end: int) -> None:
        """Settle the datagrams below `end`."""


@attrs.define(order=True)
class NackDue:
    """Datagrams of one channel that are settled at one moment."""

    at: float
    order: int
    receiver: DueReceiver = attrs.field(order=False)
    end: int = attrs.field(order=False)
    """The number after the last datagram that was declared in time for it."""


class AqueductTimers:
    """All deadlines of one connection."""

    __slots__ = (
        "_ack_at", "_acking", "_acking_next", "_config", "_declare_at", "_declaring", "_nacks", "_order", "_stops",
        "_undated", "_unstopped", "changed", "end_at", "greet_at", "next",
    )  # fmt: skip

    def __init__(self, config: AqueductConfig) -> None:
        self._config = config
        self._acking: list[DueReceiver] = []
        self._acking_next: list[DueReceiver] = []
        self._ack_at: float | None = None
        self._declaring: list[DueSender] = []
        self._declare_at: float | None = None
        self._undated: list[DueReceiver] = []
        self._nacks: list[NackDue] = []
        self._order = 0
        self._unstopped: list[DueSender] = []
        self.end_at: float | None = None
        """When a draining connection ends."""
        self.greet_at: float | None = None
        """When a connection ends whose client has not greeted."""
        self._stops: list[tuple[float, DueSender]] = []
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
            self._undated,
            self._nacks,
            self._unstopped,
            self._stops,
        ):
            waiting.clear()
        self.next = None

    def ack(self, receiver: DueReceiver) -> None:
        """Set the time of a receiver's ack: within the ack delay, and not before half of it."""
        receiver.acking = self.changed = True
        self._acking_next.append(receiver)

    def declare(self, sender: DueSender) -> None:
        """Set the time at which a sender declares its datagrams: within the declare delay."""
        sender.declaring = self.changed = True
        self._declaring.append(sender)

    def nack(self, receiver: DueReceiver) -> None:
        """Set the time at which a receiver settles its declared datagrams."""
        self._undated.append(receiver)
        self.changed = True

    def stopped(self, sender: DueSender) -> None:
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
            for receiver in self._undated:
                due = receiver.nack
                # Declarations within an eighth of the delay share an entry, so that a flood of them needs nine at most, and none is settled early.
                if due is None or due.at < now + delay:
                    self._order += 1
                    due = receiver.nack = NackDue(now + delay * 1.125, self._order, receiver, receiver.total)
                    heappush(self._nacks, due)
                due.end = receiver.total
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

    def acks_due(self, now: float) -> list[DueReceiver]:
        """Take the receivers that must ack now."""
        if self._ack_at is None or now < self._ack_at:
            return []
        if len(self._acking) > _AT_ONCE:
            due = self._acking[-_AT_ONCE:]
            del self._acking[-_AT_ONCE:]
            for receiver in due:
                receiver.acking = False
            return due
        due, self._acking, self._acking_next = self._acking, self._acking_next, []
        for receiver in due:
            receiver.acking = False
        for receiver in self._acking:
            receiver.about_to_ack()
        self._ack_at = now + self._config.ack_delay / 2 if self._acking else None
        return due

    def declarations_due(self, now: float) -> list[DueSender]:
        """Take the senders that must declare now."""
        if self._declare_at is None or now < self._declare_at:
            return []
        due, self._declaring = self._declaring[:_AT_ONCE], self._declaring[_AT_ONCE:]
        if not self._declaring:
            self._declare_at = None
        for sender in due:
            sender.declaring = False
        return due

    def nacks_due(self, now: float) -> Iterator[NackDue]:
        """Take the datagrams that must be settled now."""
        left = _AT_ONCE
        while self._nacks and self._nacks[0].at <= now and left:
            left -= 1
            due = heappop(self._nacks)
            if due.receiver.nack is due:
                due.receiver.nack = None
            yield due

    def stops_due(self, now: float) -> Iterator[DueSender]:
        """Take the senders whose time is over."""
        while self._stops and self._stops[0][0] <= now:
            yield self._stops.pop(0)[1]
