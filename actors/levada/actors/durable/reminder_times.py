"""When a shard's reminders come: each is a command of the shard at its time, and comes again if it fails."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from levada.framework.errors import ActorError, LevadaError
from levada.framework.supervision import doubled

from .entity import handler_of
from .reminders import Reminder
from .turns import CommandTurn, EntityCommand

if TYPE_CHECKING:
    from .shard import Shard

__all__ = ["ReminderTimes"]

logger = logging.getLogger("levada.actors.durable")

LOOK_EVERY = 10.0
"""Seconds after which a clock that may be set is looked at again."""
LONGEST_WAIT = 60.0
"""Most seconds between attempts at a reminder."""
FULL_DELAY = 0.05
"""Seconds before a shard without room looks again."""


class ReminderTimes:
    """The times of a shard's reminders."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._attempts: dict[str, int] = {}
        self._looked_at = 0.0
        """What the clock showed last."""

    def arm(self) -> None:
        """Wake up for the next reminder, or in a while, since the clock may be set."""
        reminders, settings = self._shard.reminders, self._shard.settings
        at = reminders.next()
        if at is not None:
            now = settings.clock()
            if now < self._looked_at - LONGEST_WAIT:  # it was set back, and further attempts may be far ahead
                reminders.forget_attempts()
                at = reminders.next() or 0.0
            self._looked_at = now
            wait = max(0.0, at - now)
            self._shard.wake_in(min(wait, LOOK_EVERY) if settings.clock_jumps else wait)

    def remind(self) -> None:
        """Give entities the reminders that are due, as far as there is room."""
        shard = self._shard
        while shard.under_way.has_place and (reminder := shard.reminders.take(shard.settings.clock())):
            self._begin(reminder)
        if shard.under_way.has_place:
            self.arm()
        else:
            shard.wake_in(FULL_DELAY)

    def done(self, command: str | None) -> None:
        """Record that a command was answered, which may be a reminder's."""
        self._attempts.pop(command or "", None)
        self.arm()

    def again(self, reminder: Reminder, error: BaseException) -> None:
        """Try a reminder that failed once more, later each time."""
        shard = self._shard
        tried = self._attempts[reminder.id] = self._attempts.get(reminder.id, 0) + 1
        wait = doubled(1.0, tried - 1, LONGEST_WAIT)
        logger.warning(
            "%s: reminder %r of %r failed, again in %g s: %s",
            shard.place.path,
            reminder.key,
            reminder.entity,
            wait,
            error,
        )
        shard.reminders.retry(reminder, shard.settings.clock() + wait)
        self.arm()

    def _begin(self, reminder: Reminder) -> None:
        shard, settings = self._shard, self._shard.settings
        try:
            command = EntityCommand(reminder.entity, settings.codec.decode(reminder.message), reminder.id)
            handler = handler_of(settings.cls, type(command.message))
            if handler is None:
                raise ActorError(f"{settings.cls.__name__} has no handler for {type(command.message).__name__}")
        except LevadaError as error:
            self.again(reminder, error)
            return
        turn = CommandTurn(shard.place, shard, command, handler, None, reminder)
        turn.body = hashlib.blake2b(reminder.message, digest_size=16).digest()
        turn.message_bytes = len(reminder.message)
        shard.begin_turn(turn)
