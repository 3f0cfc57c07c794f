"""The checks of single questions."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pyarrow as pa
import trio

from levada.actors.durable.rows import log_columns
from levada.actors.journal import (
    Append,
    Appended,
    AwaitRows,
    EraseEntity,
    Extent,
    Fenced,
    Found,
    GetExtent,
    GetReach,
    GetSchema,
    JournalError,
    Reach,
    ReadEntity,
    ReadRows,
    Rows,
    journal_error,
    stream_of,
)
from levada.framework import Ref, message
from levada.framework.errors import ActorError

from ._promises import Maker, promise


@message("levada.durable.testing.put")
class Put:
    """An event."""

    number: int
    text: str


COLUMNS = log_columns(Put)
MORE = log_columns(Put).append(pa.field("more", pa.int64()))
ODD = ["", "a\0b", "ä€𝄞", "'\"\\\n\t;--", "x" * 1000]
"""Texts that a store may take for something else."""
_TIME = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC)

Row = dict[str, Any]


def row(entity: str, number: int, **values: Any) -> Row:
    """Make a row of an entity."""
    found = dict.fromkeys(COLUMNS.names) | {"entity": entity, "sequence": number, "time": _TIME, "kind": "test.put"}
    return found | {"number": number, "text": f"text {number}"} | values


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as they are appended."""
    return pa.RecordBatch.from_pylist(list(rows), COLUMNS)


async def ask(ref: Ref[Any], question: Any) -> Any:
    """Ask; an error of the store keeps its class on its way from another process."""
    try:
        return await ref.ask(question, timeout=None)
    except ActorError as error:
        raise journal_error(error) or error from error


async def append(
    ref: Ref[Any], rows: Sequence[Row], at: int, partition: int = 0, *, stream: bool = True
) -> Appended | Fenced:
    """Append rows."""
    data = stream_of(batch(rows)) if stream else batch(rows)
    answer: Appended | Fenced = await ask(ref, Append(data, partition=partition, at=at, waits=False))
    return answer


async def end_of(ref: Ref[Any], partition: int = 0) -> int:
    """Return the end of a partition."""
    extent: Extent = await ask(ref, GetExtent())
    return extent.end[partition]


async def pages(
    ref: Ref[Any], start: int = 0, end: int | None = None, partition: int = 0, max_bytes: int = 4 << 20
) -> AsyncIterator[tuple[int, list[Row]]]:
    """Read rows as long as there are some; yield each answer, with the offset of its first row."""
    while True:
        rows: Rows = await ask(ref, ReadRows(partition, start, end, max_bytes))
        assert rows.partition == partition
        if not rows.count:
            return
        assert rows.first >= start
        assert end is None or rows.end <= end
        found = rows.batch()
        assert found.num_rows == rows.count
        assert found.schema.names == COLUMNS.names
        yield rows.first, found.to_pylist()
        start = rows.end


async def numbered(ref: Ref[Any], *args: Any, **more: Any) -> dict[int, Row]:
    """Read rows; return them by their offsets."""
    found: dict[int, Row] = {}
    async for first, rows in pages(ref, *args, **more):
        found |= dict(enumerate(rows, first))
    return found


async def entity(ref: Ref[Any], name: str, partition: int = 0, **more: Any) -> dict[int, Row]:
    """Read the rows of an entity; return them by their offsets."""
    found: dict[int, Row] = {}
    start: int | None = more.pop("start", 0)
    while start is not None:
        answer: Found = await ask(ref, ReadEntity(name, partition=partition, start=start, **more))
        more.pop("since", None)
        if answer.count:
            rows = answer.batch()
            assert rows.schema.names == ["offset", *COLUMNS.names]
            assert rows.num_rows == answer.count
            for each in rows.to_pylist():
                offset = each.pop("offset")
                assert offset >= start
                assert offset not in found
                found[offset] = each
        assert answer.next is None or answer.next > start
        start = answer.next
    assert list(found) == sorted(found)
    return found


@promise
async def a_new_log_is_empty_and_has_its_columns(make: Maker) -> None:
    """The extent names each partition."""
    async with make(COLUMNS, 3) as made:
        extent: Extent = await ask(made.ref, GetExtent())
        assert dict(extent.first) == dict(extent.end) == {0: 0, 1: 0, 2: 0}
        assert extent.epoch
        there = pa.ipc.read_schema(pa.py_buffer(await ask(made.ref, GetSchema())))
        assert there.names == COLUMNS.names
        assert there.types == COLUMNS.types
        assert await numbered(made.ref) == {}
        assert await entity(made.ref, "anna") == {}
        assert await entity(made.ref, "anna", newest=1) == {}


@promise
async def appends_get_offsets_without_gaps_in_each_partition(make: Maker) -> None:
    """As streams and as record batches; rows are read as soon as their append is answered."""
    async with make(COLUMNS, 2) as made:
        rows = [row("anna", number) for number in range(6)]
        assert await append(made.ref, rows[:1], 0) == Appended(0, 0, 1)
        assert await append(made.ref, rows[1:4], 1) == Appended(0, 1, 3)
        assert await append(made.ref, rows[4:5], 0, partition=1) == Appended(1, 0, 1)
        assert await append(made.ref, rows[5:6], 4) == Appended(0, 4, 1)
        extent: Extent = await ask(made.ref, GetExtent())
        assert dict(extent.end) == {0: 5, 1: 1}
        assert await numbered(made.ref) == dict(enumerate([*rows[:4], rows[5]]))
        assert await numbered(made.ref, partition=1) == {0: rows[4]}


@promise
async def an_append_elsewhere_is_fenced_and_writes_nothing(make: Maker) -> None:
    """Before the end, at an offset that is taken, and behind the end."""
    async with make(COLUMNS, 2) as made:
        rows = [row("anna", number) for number in range(3)]
        await append(made.ref, rows, 0)
        for at in (0, 1, 2, 4, 1 << 40):
            assert await append(made.ref, [row("bert", 1)], at) == Fenced(0, 3)
        assert await append(made.ref, [row("bert", 1)], 3, partition=1) == Fenced(1, 0)
        assert await numbered(made.ref) == dict(enumerate(rows))
        assert await append(made.ref, [row("bert", 1)], 3) == Appended(0, 3, 1)


@promise
async def of_appends_for_one_place_one_is_written(make: Maker) -> None:
    """At the same time, by both ways."""
    async with make(COLUMNS, 1) as made:
        ways = [made.ref, made.other or made.ref]
        end, wrote = 0, list[str]()
        for turn in range(8):
            answers: dict[str, Appended | Fenced] = {}

            async def compete(name: str, way: Ref[Any], answers: Any = answers, at: int = end) -> None:
                answers[name] = await append(way, [row(name, 1), row(name, 2)], at)

            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(compete, f"{turn} {number}", ways[number % 2])
            winners = [name for name, answer in answers.items() if isinstance(answer, Appended)]
            assert len(winners) == 1, f"{winners} were written at {end}"
            assert {answer for answer in answers.values() if isinstance(answer, Fenced)} == {Fenced(0, end + 2)}
            wrote += [winners[0]] * 2
            end += 2
        assert [each["entity"] for each in (await numbered(made.ref)).values()] == wrote


@promise
async def an_append_that_is_sent_again_is_written_once(make: Maker) -> None:
    """After a lost answer: it is fenced by itself, and the row in its place is its own."""
    async with make(COLUMNS, 1) as made:
        rows = [row("anna", number) for number in range(5)]
        assert await append(made.ref, rows, 0) == Appended(0, 0, 5)
        assert await append(made.other or made.ref, rows, 0) == Fenced(0, 5)
        assert await numbered(made.ref, 0, 1) == {0: rows[0]}
        assert await numbered(made.ref) == dict(enumerate(rows))


@promise
async def large_appends_are_whole_and_are_read_in_pages(make: Maker) -> None:
    """4,096 rows of 4 MiB, as a shard writes at most, and one row of 8 MiB."""
    async with make(COLUMNS, 1) as made:
        rows = [row(f"e{number % 7}", number, text="x" * 1000) for number in range(4096)]
        assert await append(made.ref, rows, 0) == Appended(0, 0, 4096)
        large = row("large", 1, _data=b"\0\xff" * (4 << 20))
        assert await append(made.ref, [large], 4096) == Appended(0, 4096, 1)
        answers = [found async for found in pages(made.ref, max_bytes=1 << 20)]
        assert len(answers) > 1
        assert dict(answers)[answers[-1][0]][-1] == large
        assert [each for _, page in answers for each in page] == [*rows, large]
        assert await entity(made.ref, "e3", max_bytes=1 << 16) == {n: rows[n] for n in range(3, 4096, 7)}
        assert await entity(made.ref, "large") == {4096: large}


@promise
async def ranges_of_rows_are_exact(make: Maker) -> None:
    """Beginnings and ends are anywhere in an append."""
    async with make(COLUMNS, 1) as made:
        rows = [row("anna", number) for number in range(20)]
        for at in range(0, 20, 5):
            await append(made.ref, rows[at : at + 5], at)
        for start, end in ((0, 1), (3, 4), (4, 12), (19, 20), (7, 7), (20, 20), (12, None)):
            found = await numbered(made.ref, start, end)
            assert found == {n: rows[n] for n in range(start, 20 if end is None else end)}, (start, end)


@promise
async def the_rows_of_an_entity_are_found(make: Maker) -> None:
    """From an offset on, the newest ones, and from the snapshot on that the newest one names."""
    async with make(COLUMNS, 2) as made:
        names = ["anna", "bert", "", "anna", "anna", "bert", "anna", ""]
        rows = [row(name, number, _snapshot=3 if number == 6 else None) for number, name in enumerate(names)]
        await append(made.ref, rows[:5], 0)
        await append(made.ref, rows[5:], 5)
        await append(made.ref, [row("anna", 100)], 0, partition=1)
        for name in ("anna", "bert", "", "carl", "ann", "anna "):
            mine = {n: rows[n] for n, each in enumerate(names) if each == name}
            assert await entity(made.ref, name) == mine
            assert await entity(made.ref, name, start=4) == {n: each for n, each in mine.items() if n >= 4}
            for newest in (1, 2, 100):
                assert await entity(made.ref, name, newest=newest) == dict(list(mine.items())[-newest:])
        assert list(await entity(made.ref, "anna", since="_snapshot")) == [3, 4, 6]
        assert list(await entity(made.ref, "anna", since="_snapshot", start=5)) == [6]
        assert list(await entity(made.ref, "bert", since="_snapshot")) == [1, 5]
        assert list(await entity(made.ref, "carl", since="_snapshot")) == []
        assert list(await entity(made.ref, "anna", partition=1)) == [0]


@promise
async def texts_come_back_as_they_were_or_are_refused(make: Maker) -> None:
    """In ids and in events. A refused row is not written."""
    async with make(COLUMNS, 1) as made:
        kept: list[Row] = []
        for number, text in enumerate(ODD):
            for each in (row(text or "-", number), row("anna", number, text=text, command=text or None)):
                try:
                    assert await append(made.ref, [each], len(kept)) == Appended(0, len(kept), 1)
                except JournalError:
                    continue
                kept.append(each)
        assert await numbered(made.ref) == dict(enumerate(kept))
        for each in kept:
            assert each in (await entity(made.ref, each["entity"])).values()
        assert len(kept) >= 2 * len(ODD) - 2  # only the text with a zero may be refused


@promise
async def rows_of_other_columns_are_refused_and_not_written(make: Maker) -> None:
    """The log goes on."""
    async with make(COLUMNS, 1) as made:
        wrong = pa.RecordBatch.from_pylist([{"entity": "anna"}], pa.schema([("entity", pa.string())]))
        rows = batch([row("anna", 1)])
        place = COLUMNS.get_field_index("number")
        for each in (
            wrong,
            rows.set_column(place, "number", pa.array(["one"])),
            rows.rename_columns([*COLUMNS.names[:-1], "other"]),
        ):
            try:
                await ask(made.ref, Append(stream_of(each), partition=0, at=0, waits=False))
            except JournalError:
                continue
            raise AssertionError(f"rows with these columns were taken: {each.schema}")
        assert await end_of(made.ref) == 0
        assert await append(made.ref, [row("anna", 1)], 0) == Appended(0, 0, 1)


@promise
async def a_log_grows_at_its_end_or_stays_as_it_is(make: Maker) -> None:
    """Rows from before have nothing in a new column."""
    async with make(COLUMNS, 1) as made:
        old = row("anna", 1)
        await append(made.ref, [old], 0)
        answer = await ask(made.ref, GetSchema(MORE.serialize().to_pybytes()))
        there = pa.ipc.read_schema(pa.py_buffer(answer))
        if there.names == COLUMNS.names:
            return
        assert there.names == MORE.names
        new = row("anna", 2) | {"more": 5}
        rows = stream_of(pa.RecordBatch.from_pylist([new], MORE))
        assert await ask(made.ref, Append(rows, partition=0, at=1, waits=False)) == Appended(0, 1, 1)
        found: Rows = await ask(made.ref, ReadRows(0, 0, 2))
        assert found.batch().to_pylist() == [old | {"more": None}, new]


@promise
async def erased_rows_are_gone_and_the_others_keep_their_offsets(make: Maker) -> None:
    """Only rows before an offset are erased; readers pass over them."""
    async with make(COLUMNS, 2) as made:
        names = ["anna", "anna", "bert", "anna", "bert", "anna", "anna"]
        rows = [row(name, number) for number, name in enumerate(names)]
        await append(made.ref, rows[:4], 0)
        await append(made.ref, rows[4:], 4)
        await append(made.ref, [row("anna", 7)], 0, partition=1)
        for count in (4, 0):
            done = await ask(made.ref, EraseEntity("anna", partition=0, before=6))
            assert (done.partition, done.rows) == (0, count)
        left = {n: rows[n] for n in (2, 4, 6)}
        assert await numbered(made.ref) == left
        assert await entity(made.ref, "anna") == {6: rows[6]}
        assert await entity(made.ref, "anna", newest=5) == {6: rows[6]}
        assert await numbered(made.ref, 3, 4) == {}
        assert await numbered(made.ref, 0, 3) == {2: rows[2]}
        assert await append(made.ref, [row("carl", 1)], 7) == Appended(0, 7, 1)
        assert list(await numbered(made.ref, partition=1)) == [0]
        assert list(await numbered(made.other or made.ref)) == [2, 4, 6, 7]


@promise
async def what_was_answered_is_there_after_a_kill(make: Maker) -> None:
    """Rows, erasures and the name of the log."""
    async with make(COLUMNS, 1) as made:
        if made.restart is None:
            return
        before: Extent = await ask(made.ref, GetExtent())
        rows = [row(f"e{number % 3}", number) for number in range(12)]
        for number, each in enumerate(rows):
            assert await append(made.ref, [each], number) == Appended(0, number, 1)
            if number % 4 == 3:
                await made.restart()
                assert await numbered(made.ref) == dict(enumerate(rows[: number + 1]))
        await ask(made.ref, EraseEntity("e1", partition=0, before=12))
        await made.restart()
        assert list(await numbered(made.ref)) == [n for n in range(12) if n % 3 != 1]
        after: Extent = await ask(made.ref, GetExtent())
        assert (after.epoch, dict(after.end)) == (before.epoch, {0: 12})


# The questions that a `TailedLog` answers besides.


@promise
async def rows_that_come_answer_those_who_wait(make: Maker) -> None:
    """As many as were asked for, in all partitions together; at once, if they are there."""
    async with make(COLUMNS, 2) as made:
        if not made.tailed:
            return
        found: list[Extent] = []

        async def wait(rows: int) -> None:
            found.append(await ask(made.ref, AwaitRows({0: 1, 1: 0}, rows)))

        await append(made.ref, [row("anna", 1)], 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 2)
            await append(made.other or made.ref, [row("anna", 2)], 1)
            await append(made.other or made.ref, [row("bert", 1)], 0, partition=1)
        await wait(1)
        assert [dict(each.end) for each in found] == [{0: 2, 1: 1}] * 2


@promise
async def an_opening_names_the_rows_of_its_time(make: Maker) -> None:
    """They are all the same, also after a kill; an opening that the log does not know is from a newer copy."""
    async with make(COLUMNS, 2) as made:
        if not made.tailed:
            return
        await append(made.ref, [row("anna", 1), row("anna", 2)], 0)
        extent: Extent = await ask(made.ref, GetExtent())
        assert extent.opening
        if made.restart is not None:
            await made.restart()
        await append(made.ref, [row("anna", 3)], 2)
        reach: Reach = await ask(made.ref, GetReach(extent.opening))
        assert reach.known
        assert all(reach.ends[number] >= end for number, end in extent.end.items())
        reach = await ask(made.ref, GetReach("another"))
        assert not reach.known
