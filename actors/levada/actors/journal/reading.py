"""What a journal reads in threads of their own, copied for the way to another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile

import pyarrow as pa

from .blocks import Block, bytes_of
from .errors import JournalError
from .extent import partition_of
from .ipc import stream_of
from .questions import MAX_BLOCK, FindCommand, Found, ReadEntity, ReadRows, Rows
from .schema import fit, joined, offsets
from .store import Store

__all__ = ["command_of", "entities_of", "entity_of", "rows_of"]

ENOUGH = 1 << 20
"""Bytes of rows of entities that are read in one turn of a thread, before the last entity."""


def rows_of(store: Store, m: ReadRows) -> Rows:
    """Answer `ReadRows`."""
    blocks = _blocks_from(store, m)
    if blocks and blocks[0].data.size > MAX_BLOCK:
        raise JournalError(
            f"the block at row {m.start} of partition {m.partition} has {blocks[0].data.size} bytes, and answers have at most "
            f"{MAX_BLOCK}: lower block_bytes, or read it in the journal's own process",
            path=str(store.directory),
        )
    batches = [fit(block.batch(), store.schema) for block in blocks]
    data = stream_of(joined(batches)) if batches else b""
    first = blocks[0].first if blocks else m.start
    return Rows(m.partition, first, sum(block.rows for block in blocks), data)


def _blocks_from(store: Store, m: ReadRows) -> list[Block]:
    """Return blocks without erased rows before, between and behind them; none if there are no more rows."""
    start = m.start
    while True:
        found = list(store.read(m.partition, start, m.end, max_bytes=m.max_bytes))
        blocks = list(takewhile(lambda block: not block.erased, dropwhile(lambda block: block.erased, found)))
        if blocks or not found:
            return blocks
        start = found[-1].end


def entity_of(store: Store, m: ReadEntity) -> Found:
    """Answer `ReadEntity`."""
    number = partition_of(m.entity, store.config.partitions) if m.partition is None else m.partition
    if m.newest is not None:
        batches: list[pa.RecordBatch] = []
        size = 0
        for batch in store.newest_of(m.entity, m.newest, partition=number, start=m.start):
            size += batch.nbytes
            if batches and size > m.max_bytes:
                break
            batches.append(batch)
        return _found(number, batches[::-1], None, m.stream)
    start = m.start if m.since is None else max(m.start, _offset_in(store, m.entity, number, m.since))
    found = store.rows_of(m.entity, partition=number, start=start, max_bytes=m.max_bytes)
    for following, batch in found:
        if batch.num_rows:
            return _found(number, [batch], following, m.stream)
    return _found(number, [], None)


def entities_of(store: Store, questions: Sequence[ReadEntity]) -> Iterator[Found | JournalError | OSError]:
    """Yield the answers to questions, or their errors, in order: one at least, and no more once they have `ENOUGH` bytes."""
    size = 0
    for m in questions:
        try:
            found = entity_of(store, m)
        except (JournalError, OSError) as error:
            yield error
        else:
            yield found
            size += bytes_of(found.data, ENOUGH) if isinstance(found.data, pa.RecordBatch) else len(found.data)
        if size > ENOUGH:
            return


def _offset_in(store: Store, entity: str | bytes, partition: int, column: str) -> int:
    """Return the offset that a column of the entity's newest row holds; 0 if it is null, or there is no row."""
    field = store.schema.field(column) if column in store.schema.names else None
    if field is None or not pa.types.is_integer(field.type):
        raise JournalError(f"since is {column!r:.100}, wanted a column of whole numbers", path=str(store.directory))
    return store.newest_value(entity, column, partition=partition) or 0


def command_of(store: Store, m: FindCommand) -> Found:
    """Answer `FindCommand`."""
    taken = store.taken(m.partition, m.command)
    if taken is None:
        return _found(m.partition, [], None)
    places = offsets(taken.first, taken.rows.num_rows)
    return _found(m.partition, [taken.rows.add_column(0, "offset", places)], None)


def _found(partition: int, batches: list[pa.RecordBatch], following: int | None, stream: bool = True) -> Found:
    if not batches:
        return Found(partition, 0, following, b"")
    batch = joined(batches)
    return Found(partition, batch.num_rows, following, stream_of(batch) if stream else batch)
