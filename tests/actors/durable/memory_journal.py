"""A journal in memory, without threads, for which a virtual clock does not wait."""

from __future__ import annotations

from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

import pyarrow as pa

from levada.actors.journal import (
    Append,
    Appended,
    Extent,
    Fenced,
    Found,
    GetExtent,
    GetSchema,
    ReadEntity,
    ReadRows,
    Rows,
    stream_of,
)
from levada.actors.journal.ipc import rows_of_stream
from levada.framework import Actor, handles

Row = dict[str, Any]


def no_rows(partitions: int = 1) -> list[list[Row]]:
    """Return a log without rows."""
    return [[] for _ in range(partitions)]


class MemoryJournal(Actor[Append | GetExtent | GetSchema | ReadEntity | ReadRows]):
    """Answers as `Journal` does."""

    schema: Any
    rows: list[list[Row]]

    @handles
    def extent(self, _: GetExtent) -> Extent:
        ends = {number: len(rows) for number, rows in enumerate(self.rows)}
        return Extent("epoch", dict.fromkeys(ends, 0), ends, "opening")

    @handles
    def columns(self, m: GetSchema) -> bytes:
        octets: bytes = self.schema.serialize().to_pybytes()
        return octets

    @handles
    async def append(self, m: Append) -> Appended | Fenced:
        await trio.sleep(0.001)
        return self.answer(m)

    def answer(self, m: Append) -> Appended | Fenced:
        """Append rows."""
        assert m.partition is not None
        rows = self.rows[m.partition]
        if m.at != len(rows):
            return Fenced(m.partition, len(rows))
        batch = rows_of_stream(m.rows) if isinstance(m.rows, bytes) else m.rows
        first = len(rows)
        rows += [{"offset": first + place, **row} for place, row in enumerate(batch.to_pylist())]
        return Appended(m.partition, first, batch.num_rows)

    @handles
    def read(self, m: ReadRows) -> Rows:
        rows = self.rows[m.partition][m.start : m.end]
        batch = pa.RecordBatch.from_pylist([{**row} for row in rows], self.schema)
        return Rows(m.partition, m.start, len(rows), stream_of(batch))

    @handles
    def find(self, m: ReadEntity) -> Found | None:
        assert m.partition is not None
        rows = [row for row in self.rows[m.partition][m.start :] if row["entity"] == m.entity]
        rows = rows[-m.newest :] if m.newest is not None else rows
        schema = pa.schema([pa.field("offset", pa.int64()), *self.schema])
        return Found(m.partition, len(rows), None, stream_of(pa.RecordBatch.from_pylist(rows, schema)) if rows else b"")
