"""`Access`: how a shard uses its partition of the journal, which may be in another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import pyarrow as pa

from levada.actors.journal import (
    Append,
    Appended,
    Fenced,
    Found,
    GetExtent,
    JournalBehind,
    JournalError,
    ReadEntity,
    ReadRows,
    journal_error,
    stream_of,
)
from levada.framework import Ref
from levada.framework.errors import LevadaError
from levada.framework.message import Asks

from .errors import ShardLost
from .rows import SNAPSHOT

__all__ = ["Access"]

JOURNAL_TIMEOUT = 60.0
"""Seconds after which a journal that may be in another process counts as out of reach; one in this process only waits for its disk."""


@attrs.define
class Access:
    """One partition of the log. All methods raise `ShardLost` if the journal is out of reach, and the `JournalError` of the journal if it refuses.

    It is older than its shard, which may restart, and remembers how far the log reached: `JournalBehind` says that rows are gone from it since.
    """

    journal: Ref[Any] = attrs.field(repr=False)
    shard: int
    """Number of the partition."""
    streams: bool
    """Whether rows go to the journal as bytes, because it may be in another process."""
    known: int = attrs.field(default=0, init=False)
    """The offset after the last row that was there."""

    async def ask(self, question: Asks[Any]) -> Any:
        """Ask the journal."""
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

    async def append(self, batch: pa.RecordBatch, at: int) -> Appended | Fenced:
        """Append rows if `at` is the end; otherwise return `Fenced`."""
        rows, known = stream_of(batch) if self.streams else batch, self.known
        try:
            answer: Appended | Fenced = await self.ask(Append(rows, partition=self.shard, at=at, waits=False))
        except ValueError as error:
            raise JournalError(f"shard {self.shard}: these rows cannot travel to the journal: {error}") from error
        self._reached(answer.first + answer.count if isinstance(answer, Appended) else answer.end, known)
        return answer

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


def _batch_of(found: Found) -> pa.RecordBatch:
    """Return found rows with their offsets in the column ``_offset``, because an event may have a field named ``offset``."""
    batch = found.batch()
    return batch.rename_columns(["_offset", *batch.schema.names[1:]])
