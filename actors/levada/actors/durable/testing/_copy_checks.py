"""The checks of the question that a `levada.actors.journal.CopiedLog` answers besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from levada.actors.journal import Appended, CopyRows, Fenced, JournalError, stream_of
from levada.framework import Ref

from ._log_checks import COLUMNS, Row, append, ask, batch, end_of, entity, numbered, row
from ._promises import Maker, promise


def placed(rows: Mapping[int, Row]) -> pa.RecordBatch:
    """Return rows as they are copied."""
    return batch(list(rows.values())).add_column(0, "offset", pa.array(list(rows), pa.int64()))


async def copy(ref: Ref[Any], rows: Mapping[int, Row], at: int, end: int, partition: int = 0) -> Appended | Fenced:
    """Copy rows."""
    data = stream_of(placed(rows)) if rows else b""
    answer: Appended | Fenced = await ask(ref, CopyRows(data, partition, at, end))
    return answer


@promise
async def copied_rows_keep_their_offsets(make: Maker) -> None:
    """With gaps before them, between them and behind them, and as without rows. The log goes on behind them."""
    async with make(COLUMNS, 2) as made:
        if not made.copied:
            return
        names = ["anna", "bert", "anna", "anna", "bert", "anna"]
        offsets = [3, 4, 7, 8, 20, 30]
        rows = {
            place: row(name, place, _snapshot=7 if place == 30 else None)
            for place, name in zip(offsets, names, strict=True)
        }
        first, rest = (
            {place: each for place, each in rows.items() if (place < 10) is early} for early in (True, False)
        )
        assert await copy(made.ref, first, 0, 10) == Appended(0, 0, 10)
        assert await copy(made.ref, {}, 10, 12) == Appended(0, 10, 2)
        assert await copy(made.other or made.ref, rest, 12, 31) == Appended(0, 12, 19)
        assert await copy(made.ref, {0: row("carl", 0)}, 0, 1, partition=1) == Appended(1, 0, 1)
        if made.restart is not None:
            await made.restart()
        assert await numbered(made.ref) == rows
        assert await numbered(made.ref, 5, 20) == {place: rows[place] for place in (7, 8)}
        mine = {place: each for place, each in rows.items() if each["entity"] == "anna"}
        assert await entity(made.ref, "anna") == mine
        assert list(await entity(made.ref, "anna", newest=2)) == [8, 30]
        assert list(await entity(made.ref, "anna", since="_snapshot")) == [7, 8, 30]
        assert await append(made.ref, [row("anna", 31)], 31) == Appended(0, 31, 1)
        assert list(await entity(made.other or made.ref, "anna", start=8)) == [8, 30, 31]


@promise
async def a_copy_elsewhere_is_fenced_and_writes_nothing(make: Maker) -> None:
    """As one that was written and is sent again; rows outside of their range are refused."""
    async with make(COLUMNS, 1) as made:
        if not made.copied:
            return
        rows = {2: row("anna", 2), 5: row("bert", 5)}
        assert await copy(made.ref, rows, 0, 8) == Appended(0, 0, 8)
        for at, end in ((0, 8), (7, 9), (9, 10), (1 << 40, (1 << 40) + 1)):
            assert await copy(made.ref, {} if at else rows, at, end) == Fenced(0, 8)
        two = [row("anna", 1), row("anna", 2)]
        for places in ([7, 8], [8, 12], [10, 9], [9, 9]):
            wrong = batch(two).add_column(0, "offset", pa.array(places, pa.int64()))
            try:
                await ask(made.ref, CopyRows(stream_of(wrong), 0, 8, 12))
            except JournalError:
                continue
            raise AssertionError(f"rows with the offsets {places} were taken between 8 and 12")
        assert await numbered(made.ref) == rows
        assert await end_of(made.ref) == 8
