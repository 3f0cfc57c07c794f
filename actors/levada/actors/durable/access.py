"""`Access`: how a shard uses its partition of the journal, which may be in another process.

A journal that is out of reach has been killed, restarts, or its connection was cut. Its questions are asked again until it answers, so commands
only wait. An append whose answer was lost may have been written: it is sent again, the same rows at the same place, and is written at most once.
If the log does not end there any more, the row in the place of the last one of this append says whose it is: it has the entity's sequence, the
command, and the time in microseconds. The last row of a log is never trimmed, so it is there unless another owner has written behind it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import (
    Append,
    Appended,
    Fenced,
    Found,
    GetExtent,
    JournalBehind,
    JournalError,
    OffsetGone,
    ReadEntity,
    ReadRows,
    journal_error,
    stream_of,
)
from levada.actors.journal.value_rows import ValueRows
from levada.framework import Ref
from levada.framework.errors import LevadaError
from levada.framework.message import Asks

from .errors import ShardLost
from .rows import BOOKKEEPING, SNAPSHOT

__all__ = ["Access"]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.durable")
_waiting = Counter[Ref[Any]]()
"""For each journal that is out of reach, the number of questions of this process that wait for it: an outage has one line in the log."""

JOURNAL_TIMEOUT = 60.0
"""Seconds after which a journal that may be in another process counts as out of reach; one in this process only waits for its disk."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between questions to a journal that is out of reach."""


@attrs.define
class Access:
    """One partition of the log.

    All methods raise `ShardLost` if the journal stays out of reach, or has ended; and the `JournalError` of the journal if it refuses.

    It is older than its shard, which may restart, and remembers how far the log reached: `JournalBehind` says that rows are gone from it since.
    """

    journal: Ref[Any] = attrs.field(repr=False)
    shard: int
    """Number of the partition."""
    streams: bool
    """Whether rows go to the journal as bytes, because it may be in another process."""
    patience: float
    """Seconds for which a journal that is out of reach is asked again."""
    takes_values: bool = False
    """Whether its rows may be `ValueRows`."""
    known: int = attrs.field(default=0, init=False)
    """The offset after the last row that was there."""

    async def ask(self, question: Asks[Any]) -> Any:
        """Ask the journal; again, if it is out of reach."""
        try:
            return await self._ask_once(question)
        except ShardLost as lost:
            return await self._until_reached(lambda: self._ask_once(question), lost)

    async def _until_reached(self, attempt: Callable[[], Awaitable[T]], lost: ShardLost) -> T:
        """Try again until the journal is in reach, or `patience` is at its end. `lost` is the error of the first attempt."""
        if not _waiting[self.journal]:
            text = "%s; what needs it waits, and asks again for %g s"
            logger.warning(text, lost, self.patience, extra={"event": "journal_away"})
        _waiting[self.journal] += 1
        pause = FIRST_PAUSE
        ended = trio.Event()
        forget = self.journal.on_stopped(ended.set)  # a ref of another process does not know it otherwise
        try:
            with trio.move_on_after(self.patience):
                while True:
                    with trio.move_on_after(pause):
                        await ended.wait()
                        break
                    pause = min(2 * pause, LAST_PAUSE)
                    try:
                        found = await attempt()
                    except ShardLost as error:
                        lost = error
                    else:
                        if _waiting[self.journal] == 1:
                            logger.warning("the journal is in reach again", extra={"event": "journal_back"})
                        return found
        finally:
            forget()
            _waiting[self.journal] -= 1
            if not _waiting[self.journal]:
                del _waiting[self.journal]
        raise lost

    async def _ask_once(self, question: Asks[Any]) -> Any:
        try:
            return await self.journal.ask(question, timeout=JOURNAL_TIMEOUT if self.streams else None)
        except JournalError:
            raise
        except (LevadaError, OSError) as error:
            own = journal_error(error)
            if own is not None:
                raise own from error
            raise ShardLost(f"shard {self.shard}: the journal is out of reach: {error}", shard=self.shard) from error

    async def end(self) -> int:
        """Return the offset after the last row."""
        known = self.known
        extent = await self.ask(GetExtent())
        end: int = extent.end[self.shard]
        self._reached(end, known)
        return end

    async def append(self, rows: Any, at: int) -> Appended | Fenced:
        """Append rows, as `ShardLog.batch` returns them, if `at` is the end; otherwise return `Fenced`."""
        known = self.known
        question = Append(stream_of(rows) if self.streams else rows, partition=self.shard, at=at, waits=False)
        answer: Appended | Fenced
        try:
            answer = await self._ask_once(question)
        except ValueError as error:
            raise JournalError(f"shard {self.shard}: these rows cannot travel to the journal: {error}") from error
        except ShardLost as lost:
            answer = await self._until_reached(lambda: self._append_again(question, rows, at), lost)
        self._reached(answer.first + answer.count if isinstance(answer, Appended) else answer.end, known)
        return answer

    async def _append_again(self, question: Append, rows: Any, at: int) -> Appended | Fenced:
        """Send an append again that may have been written."""
        batch = rows.batch if isinstance(rows, ValueRows) else rows
        try:
            answer: Appended | Fenced = await self._ask_once(question)
            last = at + batch.num_rows - 1
            if (
                isinstance(answer, Fenced)
                and answer.end > last
                and await self._has(batch.slice(batch.num_rows - 1), last)
            ):
                return Appended(self.shard, at, batch.num_rows)
        except JournalError as error:
            # It refuses this attempt, and the one before may have been written: that is known when it does not refuse.
            raise ShardLost(f"shard {self.shard}: the journal refuses: {error}", shard=self.shard) from None
        return answer

    async def _has(self, row: pa.RecordBatch, offset: int) -> bool:
        try:
            there = await self._ask_once(ReadRows(self.shard, offset, offset + 1))
        except OffsetGone:  # another owner has written behind it, and the log was trimmed
            return False
        return bool(there.count) and _is_same(there.batch(), row)

    def _reached(self, end: int, known: int) -> None:
        """Record the end of the log. `known` is what was known of it before it was asked for, because answers may overtake each other."""
        if end < known:
            what = (
                f"shard {self.shard}: rows {end} to {known - 1} were on the disk and are gone from the log, which was replaced by an older copy. "
                f"Put the newest copy back; or start the program again, and the shard continues with the rows before {end}"
            )
            raise JournalBehind(what, partition=self.shard, wanted=known, kept=end)
        self.known = max(self.known, end)

    async def row(self, offset: int) -> pa.RecordBatch:
        """Return the row that has the answer of a command."""
        rows = await self.ask(ReadRows(self.shard, offset, offset + 1))
        if not rows.count:
            await self.end()
            raise JournalError(f"row {offset} of shard {self.shard}, which has the answer, is gone from the log")
        batch: pa.RecordBatch = rows.batch()
        return batch

    async def newest(self, entity: str) -> tuple[pa.RecordBatch | None, int | None]:
        """Return the newest row of an entity and the offset of its newest snapshot; None if there is none."""
        found = await self.ask(ReadEntity(entity, partition=self.shard, newest=1, stream=self.streams))
        if not found.count:
            return None, None
        batch = _batch_of(found)
        is_one = batch.column("kind")[0].as_py() == SNAPSHOT
        snapshot: int | None = batch.column("_offset" if is_one else "_snapshot")[0].as_py()
        return batch, snapshot

    async def rows(self, entity: str, start: int | None = None) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the rows of an entity, with their offsets: from an offset on, or from the newest snapshot on, if there is one."""
        since = "_snapshot" if start is None else None
        at: int | None = start or 0
        while at is not None:
            found = await self.ask(ReadEntity(entity, partition=self.shard, start=at, stream=self.streams, since=since))
            since = None
            if found.count:
                yield _batch_of(found)
            at = found.next


def _is_same(there: pa.RecordBatch, mine: pa.RecordBatch) -> bool:
    """Whether a row in the log is this one. Columns of events are not compared: a NaN there equals nothing."""
    first, second = (rows.select(BOOKKEEPING.names).to_pylist() for rows in (there, mine))
    return bool(first == second)


def _batch_of(found: Found) -> pa.RecordBatch:
    """Return found rows with their offsets in the column ``_offset``, because an event may have a field named ``offset``."""
    batch = found.batch()
    return batch.rename_columns(["_offset", *batch.schema.names[1:]])
