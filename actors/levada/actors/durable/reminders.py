"""Reminders: commands that are due later, kept in the log.

They are rows of the shard itself, written with the events of the handler that set them. At its time a reminder becomes a command with an id of
its own, and a row that marks it as handled is written with the events of that command. So it is handled once, whatever fails in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import attrs

from levada.framework import Codec, message

from .rows import REMIND, WHOLE, LogRow
from .turns import Live

__all__ = ["MOST_BYTES", "Reminder", "Reminders"]

MOST_BYTES = 12 << 20
"""The most bytes of pending reminders of a shard, approximately: a snapshot of the shard holds them all."""


@message("levada.durable.reminder", frozen=True)
class Reminder:
    """A message that an entity gets at a given time."""

    entity: str
    key: str
    id: str
    """The id of its command."""
    at: float
    """Seconds since 1970."""
    message: bytes
    """The encoded message."""

    @property
    def size(self) -> int:
        """Its approximate size in bytes."""
        return 96 + len(self.message) + len(self.key.encode()) + len(self.entity.encode())


@attrs.define(eq=False)
class Reminders:
    """The reminders of a shard."""

    codec: Codec
    pending: dict[tuple[str, str], Reminder] = attrs.field(factory=dict)
    """The reminders that are not handled according to the written log, by entity and key."""
    handled: set[str] = attrs.field(factory=set[str])
    """Ids of pending reminders that were handled, and whose rows are still in the queue."""
    size: int = 0
    """The approximate size of the pending ones in bytes."""
    coming: int = 0
    """The approximate size of those that handlers have set and that are not in the written log yet."""
    _due: list[tuple[float, str, Reminder]] = attrs.field(factory=list)
    """A heap by the time of the next attempt; entries that are no longer pending are skipped."""

    def set(self, reminder: Reminder) -> None:
        """Add a reminder; it replaces an earlier one with the same key."""
        key = (reminder.entity, reminder.key)
        former = self.pending.get(key)
        if former is not None:
            self.size -= former.size
        self.size += reminder.size
        self.pending[key] = reminder
        self.retry(reminder, reminder.at)

    def retry(self, reminder: Reminder, at: float) -> None:
        """Make a reminder due at another time."""
        if len(self._due) > 2 * len(self.pending) + 64:
            self._due = [entry for entry in self._due if self._is_pending(entry[2])]
            heapify(self._due)
        heappush(self._due, (at, reminder.id, reminder))

    def forget_attempts(self) -> None:
        """Make the reminders that `retry` has put off due at their own times."""
        self._due = [(reminder.at, reminder.id, reminder) for _, _, reminder in self._due]
        heapify(self._due)

    def drop(self, reminder: Reminder) -> None:
        """Remove a reminder, unless another one has replaced it."""
        key = (reminder.entity, reminder.key)
        found = self.pending.get(key)
        if found is not None and found.id == reminder.id:
            del self.pending[key]
            self.size -= found.size
        self.handled.discard(reminder.id)

    def next(self) -> float | None:
        """Return the time of the next attempt; None if nothing is pending."""
        while self._due and not self._is_pending(self._due[0][2]):
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> Reminder | None:
        """Return a due reminder, or None. Call `retry` if it fails."""
        at = self.next()
        return heappop(self._due)[2] if at is not None and at <= now else None

    def pack(self) -> bytes:
        """Encode all pending reminders."""
        return WHOLE.encode(list(self.pending.values()))

    def restore(self, data: bytes) -> None:
        """Add the reminders that `pack` encoded."""
        for reminder in WHOLE.decode(data, list[Reminder]):
            self.set(reminder)

    def _is_pending(self, reminder: Reminder) -> bool:
        found = self.pending.get((reminder.entity, reminder.key))
        return found is not None and found.id == reminder.id

    def note(self, kind: str, data: bytes) -> None:
        """Apply a row of the log."""
        self._note(kind, self.codec.decode(data, Reminder))

    def _note(self, kind: str, reminder: Reminder) -> None:
        if kind == REMIND:
            self.set(reminder)
        else:
            self.drop(reminder)

    def placed(self, row: LogRow) -> None:
        """Apply a row that a handler has caused, at its place in the log."""
        reminder = self.read(row)
        if row.kind == REMIND:
            self.coming -= reminder.size
        self._note(row.kind, reminder)

    def withdraw(self, rows: Iterable[LogRow]) -> None:
        """Forget rows that will not be written, because their handler failed."""
        self.coming -= sum(self.read(row).size for row in rows if row.kind == REMIND)

    def read(self, row: LogRow) -> Reminder:
        """Return the reminder in a row."""
        return self.codec.decode(row.data or b"", Reminder)

    def row(self, own: Live, kind: str, time: int, reminder: Reminder) -> LogRow:
        """Make a row of the log."""
        return LogRow(own, kind, time, data=self.codec.encode(reminder))
