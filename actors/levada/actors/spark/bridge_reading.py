"""How a bridge reads the journal of a mailbox, in its own process or in another: as streams of blocks for Spark's tasks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pyarrow as pa

from levada.actors.journal.blocks import Block
from levada.actors.journal.errors import JournalBehind, JournalError, OffsetGone, journal_error
from levada.actors.journal.extent import Extent
from levada.actors.journal.ledger import Reach
from levada.actors.journal.questions import GetExtent, GetReach, GetSchema, Read, ReadRows, Rows
from levada.framework import Asks, Ref
from levada.framework.errors import ActorError, ActorStopped
from levada.framework.platform import PLATFORM
from levada.transports.rsocket import Payload

from .protocol import BlockHead, EpochChanged
from .protocol import ReadBlocks as Wanted

if TYPE_CHECKING:
    from levada.actors.journal.archive import Archive

__all__ = ["JournalAway", "blocks_of", "require_epoch"]

R = TypeVar("R")

READ_BYTES = 4 << 20
"""Bytes of blocks taken from the journal at a time, for one stream; a block is at least one."""


@attrs.frozen
class JournalAway:
    """A journal in another process, with the part of `Ref` that a bridge uses."""

    ref: Ref[Any]

    async def ask(self, question: Asks[R], *, timeout: float | None = None) -> R:
        """Ask a question that is a message.

        Raises:
            ActorStopped: the process is away; Spark's tasks wait for it.
            JournalError: an error of the journal.
        """
        try:
            return await self.ref.ask(question, timeout=timeout)
        except ActorStopped:
            raise
        except ActorError as error:
            own = journal_error(error)
            raise own or ActorStopped(f"the journal is away: {error}", actor=error.actor) from error


async def blocks_of(
    name: str, journal: Ref[Any] | JournalAway, m: Wanted, archive: Archive | None = None
) -> AsyncGenerator[Payload, None]:
    """Yield the rows of one partition; `JournalError` or `EpochChanged` if they are not there.

    Rows that were trimmed, before this or meanwhile, are taken from the archive; see `levada.actors.journal.archive`.
    """
    extent = await require_epoch(journal, m.epoch)
    await _require_rows(journal, m, extent)
    start = m.start
    while start < m.end:
        begun, is_archived = start, False
        if archive is not None and begun < (whole := extent.whole.get(m.partition, 0)):
            found, is_archived = _archived(archive, journal, m.partition, begun, min(m.end, whole)), True
        else:
            _require_whole(extent, m.partition, begun)
            found = _away(journal, m, begun) if isinstance(journal, JournalAway) else _here(journal, m, begun)
        try:
            async with aclosing(found) as blocks:
                async for head, data in blocks:
                    yield Payload(data, head.encode())
                    start = head.first + head.rows
        except JournalError:  # of a journal in another process, `OffsetGone` is no more than that
            extent = await journal.ask(GetExtent(), timeout=None)
            if archive is None or is_archived or start >= extent.whole[m.partition]:
                raise
        else:
            if start == begun:
                raise JournalError(f"rows {begun} to {m.end} of partition {m.partition} of {name} are not there")
    if isinstance(journal, JournalAway):  # its process, or the database, may have got an older copy between two answers
        await _require_rows(journal, m, await journal.ask(GetExtent()))


async def _archived(
    archive: Archive, journal: Ref[Any] | JournalAway, partition: int, start: int, end: int
) -> AsyncGenerator[tuple[BlockHead, bytes], None]:
    columns, platform = await journal.ask(GetSchema(), timeout=None), PLATFORM.get()
    rows = archive.rows(partition, start, end, pa.ipc.read_schema(pa.py_buffer(columns)))
    while start < end:
        found = await platform.run_in_thread(_some, rows)
        for first, batch in found or [(end, None)]:
            if first > start:  # these were erased, or are the shard's own
                yield BlockHead(start, first - start, 0, columns), b""
                start, columns = first, b""
            if batch is not None:
                yield BlockHead(first, batch.num_rows, 0, columns), batch.serialize().to_pybytes()
                start, columns = first + batch.num_rows, b""


def _some(rows: Iterator[tuple[int, pa.RecordBatch]]) -> list[tuple[int, pa.RecordBatch]]:
    """Take rows together, because each call of a thread costs 50 µs, and gaps may be many."""
    found, size = list[tuple[int, pa.RecordBatch]](), 0
    for first, batch in rows:
        found.append((first, batch))
        size += batch.nbytes
        if size >= READ_BYTES:
            break
    return found


async def _here(journal: Ref[Any], m: Wanted, start: int) -> AsyncGenerator[tuple[BlockHead, bytes], None]:
    schema = None
    while start < m.end:
        blocks: list[Block] = await journal.ask(Read(m.partition, start, m.end, READ_BYTES), timeout=None)
        if not blocks:
            return
        for block in blocks:
            if not block.data.size:
                await _require_still_whole(journal, m.partition, start)
            columns = b"" if block.schema is schema else block.schema.serialize().to_pybytes()
            yield BlockHead(block.first, block.rows, block.skip, columns), block.data.to_pybytes()
            schema, start = block.schema, block.first + block.rows


async def _away(journal: JournalAway, m: Wanted, start: int) -> AsyncGenerator[tuple[BlockHead, bytes], None]:
    columns = await journal.ask(GetSchema())
    while start < m.end:
        rows: Rows = await journal.ask(ReadRows(m.partition, start, m.end, READ_BYTES))
        first = rows.first if rows.count else m.end
        if first > start:  # these were erased
            await _require_still_whole(journal, m.partition, start)
            yield BlockHead(start, first - start, 0, columns), b""
            columns = b""
        if rows.count:
            yield BlockHead(first, rows.count, 0, columns), _batch_in(rows.data)
            columns = b""
        start = first + rows.count


def _require_whole(extent: Extent, partition: int, start: int) -> None:
    """Raise `OffsetGone` if rows from an offset on were deleted, or trimmed."""
    first = max(extent.first.get(partition, 0), extent.trimmed.get(partition, 0))
    if start < first:
        what = f"partition {partition}: rows {start} to {first - 1} have been deleted by retention, or trimmed"
        raise OffsetGone(what, partition=partition, wanted=start, first=first)


async def _require_still_whole(journal: Ref[Any] | JournalAway, partition: int, start: int) -> None:
    """Raise `OffsetGone` if rows that are missing were trimmed before they were read, not erased: readers pass over erased ones."""
    _require_whole(await journal.ask(GetExtent(), timeout=None), partition, start)


def _batch_in(stream: bytes) -> bytes:
    """Return the record batch message of an Arrow IPC stream without decoding it."""
    reader = pa.ipc.MessageReader.open_stream(stream)
    reader.read_next_message()  # the columns
    batch: bytes = reader.read_next_message().serialize().to_pybytes()
    return batch


async def require_epoch(journal: Ref[Any] | JournalAway, wanted: str) -> Extent:
    """Return the extent of a journal; `EpochChanged` if the offsets belong to another journal."""
    extent: Extent = await journal.ask(GetExtent(), timeout=None)
    if extent.epoch != wanted:
        raise EpochChanged(
            f"these offsets belong to journal {wanted}, and this is {extent.epoch}: the journal was deleted and created again, or this is another "
            "bridge. Start the query with a new checkpoint",
            wanted,
            extent.epoch,
        )
    return extent


async def _require_rows(journal: Ref[Any] | JournalAway, m: Wanted, extent: Extent) -> None:
    """Raise `JournalBehind` unless the rows are still the same as when the task was planned."""
    if m.opening is not None:
        reach = Reach(True, extent.end)
        if m.opening != extent.opening:
            reach = await journal.ask(GetReach(m.opening), timeout=None)
        kept = reach.ends.get(m.partition, m.end)
        if not reach.known or kept < m.end:
            raise JournalBehind(
                f"partition {m.partition}: rows {m.start} to {m.end - 1} were asked for as they were when the journal was open as {m.opening}, "
                f"and since then it was put back to row {kept}",
                opening=m.opening,
                partition=m.partition,
                wanted=m.end,
                kept=kept,
            )
