"""Reminders: commands of the future, kept in the log.

They are rows of the shard itself, written with the events of the handler that set them. When its time comes, a reminder is a command with an id
of its own, and the row that says it was fired is written with what that command records. So it is handled once, whatever ends in between.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import attrs

from levada.framework import Codec, message

from .rows import REMIND, Row
from .turns import Live

__all__ = ["Reminder", "Reminders"]


@message("levada.durable.reminder", frozen=True)
class Reminder:
    """A message that an entity gets at some time."""

    entity: str
    key: str
    id: str
    """Id of its command."""
    at: float
    """Seconds since 1970."""
    message: bytes
    """Encoded."""


@attrs.define(eq=False)
class Reminders:
    """The reminders of a shard."""

    codec: Codec
    pending: dict[tuple[str, str], Reminder] = attrs.field(factory=dict)
    """By entity and key, all that were not handled, as far as the log is written."""
    handled: set[str] = attrs.field(factory=set[str])
    """Ids of those of them that were, and whose rows are in the queue."""
    _due: list[tuple[float, str, Reminder]] = attrs.field(factory=list)
    """A heap, by the time of the next attempt; those that are not pending any more are skipped."""

    def set(self, reminder: Reminder) -> None:
        """Add one, in place of the other with its key."""
        self.pending[reminder.entity, reminder.key] = reminder
        self.retry(reminder, reminder.at)

    def retry(self, reminder: Reminder, at: float) -> None:
        """Have it due at another time."""
        if len(self._due) > 2 * len(self.pending) + 64:
            self._due = [entry for entry in self._due if self._is_pending(entry[2])]
            heapify(self._due)
        heappush(self._due, (at, reminder.id, reminder))

    def drop(self, reminder: Reminder) -> None:
        """Remove one, unless another has taken its place."""
        key = (reminder.entity, reminder.key)
        found = self.pending.get(key)
        if found is not None and found.id == reminder.id:
            del self.pending[key]
        self.handled.discard(reminder.id)

    def next(self) -> float | None:
        """Return the time of the next attempt."""
        while self._due and not self._is_pending(self._due[0][2]):
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> Reminder | None:
        """Return a due reminder; `retry` it if it fails."""
        at = self.next()
        return heappop(self._due)[2] if at is not None and at <= now else None

    def pack(self) -> bytes:
        """Encode all."""
        return self.codec.encode(list(self.pending.values()))

    def restore(self, data: bytes) -> None:
        """Take over what `pack` made."""
        for reminder in self.codec.decode(data, list[Reminder]):
            self.set(reminder)

    def _is_pending(self, reminder: Reminder) -> bool:
        found = self.pending.get((reminder.entity, reminder.key))
        return found is not None and found.id == reminder.id

    def note(self, kind: str, data: bytes) -> None:
        """Take over a row of the log."""
        reminder = self.codec.decode(data, Reminder)
        if kind == REMIND:
            self.set(reminder)
        else:
            self.drop(reminder)

    def read(self, row: Row) -> Reminder:
        """Return the reminder in a row."""
        return self.codec.decode(row.data or b"", Reminder)

    def row(self, own: Live, kind: str, time: int, reminder: Reminder) -> Row:
        """Make a row of the log."""
        return Row(own, kind, time, data=self.codec.encode(reminder))
