"""Erasing: the rows of an entity and of its reminders are removed from the files; one row stays, which says that the id was erased.

Reminders are rows of the shard itself, mixed with the reminders of other entities. So the shard writes the remaining reminders into a snapshot,
and erases all its own rows before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from levada.actors.journal import EraseEntity, JournalError
from levada.actors.journal.errors import fresh
from levada.framework.embedding import Ask
from levada.framework.errors import MailboxFull

from .errors import EntityErased, OutcomeUnknown, ShardLost
from .reminders import Reminder
from .rows import ERASED, FORGOT, SNAPSHOT, LogRow
from .snapshots import MOST_BYTES as SNAPSHOT_BYTES
from .turns import Erase, Live

if TYPE_CHECKING:
    from .shard import Shard

__all__ = ["Erasing"]

MOST = 1000
"""The most entities of a shard that are erased at the same time."""


class Erasing:
    """The entities of a shard that are being erased."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.questions: dict[str, Ask] = {}
        """By entity. Not a `Reply`: `give_up` fails them."""

    def refusal(self, entity: str) -> EntityErased | None:
        """Return the error for a command, if its entity is being erased."""
        if entity in self.questions:
            return EntityErased(f"entity {entity!r:.100} is being erased", entity=entity)
        return None

    def begin(self, entity: str, question: Ask) -> None:
        """Begin to erase an entity. The answer is the number of rows, or the error."""
        refusal = self.refusal(entity)
        if refusal is not None:
            question.fail(refusal)
            return
        if len(self.questions) >= MOST:
            what = f"{MOST} entities of this shard are being erased: ask again when some are"
            question.fail(MailboxFull(what, capacity=MOST, message=Erase(entity)))
            return
        self.questions[entity] = question
        self._shard.start_task(self._erase, entity, question)

    def give_up(self) -> None:
        """Fail all waiting answers, because the shard was lost."""
        for entity, question in self.questions.items():
            what = f"entity {entity!r:.100} is not erased, or not known to be: call erase() again"
            question.fail(OutcomeUnknown(what, entity=entity))
        self.questions.clear()

    async def _erase(self, entity: str, question: Ask) -> None:
        shard = self._shard
        await shard.entities.end(entity)
        pending = [reminder for reminder in shard.reminders.pending.values() if reminder.entity == entity]
        left = shard.reminders.size - sum(each.size for each in pending)
        if left > SNAPSHOT_BYTES and shard.access.streams:
            what = f"the shard has {left} bytes of other pending reminders, and at most {SNAPSHOT_BYTES} can be rewritten: forget some of them"
            question.fail(JournalError(what))
            del self.questions[entity]
            return
        gone, written, now = Live(entity, shard), trio.Event(), shard.now()
        if pending:
            forgotten = [Reminder(each.entity, each.key, each.id, each.at, b"") for each in pending]
            shard.write([shard.reminders.row(shard.own, FORGOT, now, each) for each in forgotten], trio.Event())
        shard.own.since = 0
        shard.write([LogRow(shard.own, SNAPSHOT, now), LogRow(gone, ERASED, now)], written)
        await written.wait()
        assert gone.snapshot is not None
        # The shard's snapshot is the row before. A later snapshot may not be on disk yet.
        own = EraseEntity("", partition=shard.number, before=gone.snapshot - 1)
        erasure = EraseEntity(entity, shard.number, gone.snapshot, shard.settings.terms.archive)
        try:
            await shard.access.ask(own)
            done = await shard.access.ask(erasure)
        except ShardLost:
            raise
        except JournalError as error:
            found = fresh(error)
            found.detail = f"entity {entity!r:.100} takes no commands any more, and rows of it are still in the files: call erase() again: "
            found.detail += error.detail
            question.fail(found)
        else:
            question.answer(done.rows)
        shard.entities.unreadable.pop(entity, None)
        del self.questions[entity]
