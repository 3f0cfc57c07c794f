"""Which rows of a log of durable actors may go (`TrimRows`): those that no durable actor reads any more.

A durable actor is read from its newest snapshot on. Rows before that are read for one reason only: each of its newest commands has its answer in a
row of its own, wherever that is. A tombstone counts as a snapshot, because nothing is read before it. Without a snapshot, all rows stay.

Columns and kinds have the names that `levada.actors.durable` gives them. This module does not import it, because a keeper needs nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.compute

from .blocks import BLOCK, Block
from .errors import JournalError
from .partitions import Partition
from .questions import TrimRows
from .schema import offsets

__all__ = ["COLUMNS", "SNAPSHOTS", "chooser", "rows_to_go"]

COLUMNS = ("entity", "time", "kind", "_version", "_body")
"""The columns that are looked at."""
SNAPSHOTS = ("$snapshot", "$erased")
"""The kinds of rows behind which nothing is needed; only the first ones have a layout."""
_READ = 4 << 20
pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


@attrs.define
class _Survey:
    """What all rows of a partition say."""

    end: int
    """The offset before which rows are old enough."""
    snapshots: dict[str, int] = attrs.field(factory=dict[str, int])
    """For each entity, the offset of the newest snapshot."""
    answers: Counter[str] = attrs.field(factory=Counter[str])
    """For each entity, how many rows have the answer of a command."""


def rows_to_go(partition: Partition, schema: pa.Schema, m: TrimRows, before: int) -> list[range]:
    """Return the offsets of the rows that may go, in order. Reads the whole partition; any thread may call it.

    Args:
        partition: its rows.
        schema: the columns of the journal.
        m: says which rows.
        before: rows from this offset on stay.

    Raises:
        JournalError: this is no log of durable actors.
        JournalDamaged: a block is damaged.
    """
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise JournalError(
            f"this journal has no column {missing[0]}, so it is no log of durable actors, and has no snapshots to trim to",
            path=str(partition.folder.parent),
        )
    end = partition.end
    survey = _survey(_blocks(partition, end), m, min(before, end))
    if not survey.snapshots:
        return []
    found: list[range] = []
    seen, gap = Counter[str](), _gap_bytes(schema)
    for block in _blocks(partition, survey.end):
        for run in _runs(block, _chosen(block, survey, m.remember, seen), gap):
            if found and found[-1].stop == run.start:
                found[-1] = range(found[-1].start, run.stop)
            else:
                found.append(run)
    return found


def chooser(ranges: Sequence[range]) -> Callable[[int, pa.RecordBatch], Sequence[bool]]:
    """Return the function that `Partition.erase` wants, for blocks that come in order."""
    left = list(reversed(ranges))

    def choose(first: int, batch: pa.RecordBatch) -> Sequence[bool]:
        end = first + batch.num_rows
        while left and left[-1].stop <= first:
            left.pop()
        if not left or left[-1].start >= end:
            return ()
        gone = [False] * batch.num_rows
        for run in reversed(left):
            if run.start >= end:
                break
            for offset in range(max(run.start, first), min(run.stop, end)):
                gone[offset - first] = True
        return gone

    return choose


def _blocks(partition: Partition, end: int) -> Iterator[Block]:
    at = partition.first
    while at < end:
        for block in partition.read(at, end, _READ):
            at = block.end
            if not block.erased:
                yield block


def _survey(blocks: Iterator[Block], m: TrimRows, before: int) -> _Survey:
    found, older, is_old = _Survey(before), int(m.older * 1e6), True
    kinds = pa.array(SNAPSHOTS)
    for block in blocks:
        batch = block.batch()
        if is_old and block.first < before:
            place = pc.index(pc.less(batch.column("time").cast(pa.int64()), older), pa.scalar(value=False)).as_py()
            if place >= 0:
                is_old, found.end = False, min(before, block.first + place)
        entities = batch.column("entity")
        for place in pc.indices_nonzero(pc.is_in(batch.column("kind"), kinds)).to_pylist():
            entity = entities[place].as_py()
            known = not entity or m.layout is None or batch.column("kind")[place].as_py() != SNAPSHOTS[0]
            if known or batch.column("_version")[place].as_py() == m.layout:
                found.snapshots[entity] = block.first + place
            else:  # the class of today reads this entity from its first row on
                found.snapshots.pop(entity, None)
        bodies = batch.column("_body")
        if bodies.null_count < len(bodies):
            found.answers.update(entities.filter(pc.is_valid(bodies)).to_pylist())
    return found


def _chosen(block: Block, survey: _Survey, remember: int, seen: Counter[str]) -> Sequence[bool]:
    """Say which rows of a block go. `seen` counts the answers of each entity, from block to block."""
    batch = block.batch()
    entities = batch.column("entity").dictionary_encode()
    starts = pa.array(map(survey.snapshots.get, entities.dictionary.to_pylist()), pa.int64())
    behind = pc.less(offsets(block.first, batch.num_rows), starts.take(entities.indices))
    gone: list[bool] = pc.fill_null(behind, fill_value=False).to_pylist()
    bodies = batch.column("_body")
    if bodies.null_count < len(bodies):
        for place in pc.indices_nonzero(pc.is_valid(bodies)).to_pylist():
            entity = entities[place].as_py()
            seen[entity] += 1
            if survey.answers[entity] - seen[entity] < remember:
                gone[place] = False
    return gone


def _runs(block: Block, gone: Sequence[bool], gap: int) -> Iterator[range]:
    """Yield the runs of rows that go, without those that would cost more than they give: a gap of so many bytes makes two blocks of one."""
    least = 1 + block.rows * gap // max(1, block.data.size - gap)
    at, end = block.first, block.end
    for goes, run in groupby(gone):
        start, at = at, at + sum(1 for _ in run)
        if goes and (at - start >= least or start == block.first or at == end):
            yield range(start, at)


def _gap_bytes(schema: pa.Schema) -> int:
    """Return the bytes that a block costs besides its rows, with one header more."""
    nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    return 2 * BLOCK.size + int(nothing.serialize().size)
