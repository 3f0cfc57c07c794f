"""`PostgresLog` answers the questions of a log as `Journal` does; what only it does; and what it refuses."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

import psycopg
import pyarrow as pa
from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Withdraw
from tests.actors.postgres.cluster import Cluster
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.durable import (
    Durable,
    OutcomeUnknown,
    ReplayFailed,
    applies,
    copy_log,
    log_columns,
    log_config,
    shards,
    trim_log,
)
from levada.actors.journal import (
    Append,
    Appended,
    AwaitRows,
    CopyRows,
    Erased,
    EraseEntity,
    Fenced,
    GetExtent,
    GetReach,
    GetSchema,
    Journal,
    JournalBehind,
    JournalDamaged,
    JournalError,
    JournalUnwritable,
    OffsetWithin,
    Reach,
    ReadEntity,
    ReadRows,
    Rows,
    SchemaMismatch,
    partition_of,
    stream_of,
)
from levada.actors.journal.value_rows import ValueRows
from levada.actors.postgres import PostgresStore
from levada.actors.postgres.addresses import PostgresAddress
from levada.actors.postgres.errors import DatabaseReadOnly
from levada.actors.postgres.log import REPORTED_WITHIN
from levada.actors.postgres.opening import refuse_server
from levada.actors.postgres.pool import ANSWERED_WITHIN, LAST_PAUSE, READERS
from levada.actors.postgres.tables import IN_ORDER, MOST_COLUMNS, LogTables
from levada.framework import ActorSystem, Asks, Ref, handles, message
from levada.framework.embedding import LocalRef
from levada.framework.errors import ActorStopped, ConfigurationError

pytestmark = pytest.mark.release

COLUMNS = log_columns(Deposited)


def store(url: str) -> PostgresStore:
    return PostgresStore.at(url, "log")


@asynccontextmanager
async def log_at(url: str, shards: int = 2, columns: pa.Schema | None = COLUMNS) -> AsyncIterator[Ref[Any]]:
    async with ActorSystem("test", ask_timeout=50.0) as system, store(url).open(system, shards) as log:
        if columns is not None:
            await log.ask(GetSchema(columns.serialize().to_pybytes()))
        yield log


def table_of(url: str) -> str:
    return store(url).table


def rows_for(*entities: str, size: int = 0, snapshot: int | None = None) -> pa.RecordBatch:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = [
        (entity, number, None, now, "test.durable.deposited", 1, None, None, snapshot, b"x" * size or None, number)
        for number, entity in enumerate(entities)
    ]
    return pa.RecordBatch.from_struct_array(pa.array(found, pa.struct(list(COLUMNS))))


def values_for(*entities: str, columns: pa.Schema = COLUMNS, amount: Any = 7) -> ValueRows:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = ValueRows(
        (
            entity,
            number,
            None,
            int(now.timestamp()) * 1_000_000,
            "test.durable.deposited",
            1,
            None,
            None,
            None,
            None,
            amount,
        )
        for number, entity in enumerate(entities)
    )
    found.columns = pa.struct(list(columns))
    return found


def plain(answer: Any) -> Any:
    """An answer with its rows in words."""
    if hasattr(answer, "batch"):
        return {"next": getattr(answer, "next", None), "rows": answer.batch().to_pylist() if answer.count else []}
    return answer


QUESTIONS: list[Any] = [
    Append(rows_for("a", "b", "a"), partition=0, at=0),
    Append(rows_for("c"), partition=0, at=0),
    Append(rows_for("c"), partition=0, at=7),
    Append(stream_of(rows_for("c", "", "ü")), partition=0, at=3),
    Append([], partition=0, at=6),
    Append([], partition=0, at=5),
    Append(rows_for("a", snapshot=2), key="a", at=0),
    Append(rows_for("a", snapshot=2), partition=0, at=6),
    ReadEntity("a", partition=0),
    ReadEntity("a", partition=0, start=1),
    ReadEntity("a", partition=0, newest=1),
    ReadEntity("a", partition=0, newest=2, stream=False),
    ReadEntity("a", partition=0, newest=9, start=1),
    ReadEntity("a", partition=0, since="_snapshot"),
    ReadEntity("b", partition=0, since="_snapshot"),
    ReadEntity("a", partition=0, since="kind"),
    ReadEntity("nobody", partition=0, newest=1),
    ReadEntity("nobody", partition=0, since="_snapshot"),
    ReadEntity("a"),
    ReadRows(0, 0),
    ReadRows(0, 2, 4),
    ReadRows(0, 7),
    ReadRows(0, 8),
    ReadRows(5, 0),
    GetSchema(),
    EraseEntity("a", partition=0, before=6),
    ReadEntity("a", partition=0),
    ReadRows(0, 0),
    ReadRows(0, 2, 3),
    ReadRows(0, 3),
    EraseEntity("a", partition=0),
    EraseEntity("a", partition=0),
    ReadRows(0, 6),
    Append(rows_for("a"), partition=0, at=7),
    ReadRows(0, 0, 8),
    Append(pa.RecordBatch.from_pylist([{"x": 1}]), partition=0, at=8),
    Append(rows_for("a"), partition=9, at=8),
    AwaitRows({0: 7, 1: 1}),
    AwaitRows({0: 0, 1: 0}, rows=9),
]


async def test_the_answers_are_those_of_a_journal_on_disk(url: str, tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=50.0) as system, log_at(url) as there:
        here: Ref[Any] = system.spawn(partial(Journal, tmp_path, COLUMNS, config=log_config(2)))
        for number, question in enumerate(QUESTIONS):
            found = []
            for log in (here, there):
                try:
                    found.append(plain(await log.ask(question)))
                except JournalError as error:
                    found.append(type(error))
            if isinstance(question, AwaitRows):
                found = [each.end for each in found]
            assert found[0] == found[1], (number, question)


async def test_rows_that_come_as_values_are_kept_as_those_in_columns(url: str) -> None:
    async with log_at(url) as log:
        for first, rows in ((0, values_for("a")), (1, values_for("ü", "a\0b")), (3, values_for("c"))):
            for partition, each in enumerate((rows, rows.batch)):
                answer = await log.ask(Append(each, partition=partition, at=first))
                assert answer == Appended(partition, first, len(rows))
        assert await log.ask(Append(values_for("a"), partition=0, at=3)) == Fenced(0, 4)
        values, columns = [(await log.ask(ReadRows(partition, 0))).batch() for partition in (0, 1)]
        assert values.equals(columns)
        assert values.column("entity").to_pylist() == ["a", "ü", "a\0b", "c"]
        assert await log.ask(Append(values_for(), partition=0, at=4)) == Appended(0, 4, 0)
        fewer = pa.schema(list(COLUMNS)[:-1])
        for wrong in (
            values_for("a", amount="a text"),
            values_for("a", "b", amount=1 << 70),
            values_for("\ud800"),
            values_for("a", columns=COLUMNS.append(pa.field("more", pa.int64()))),
            values_for("a", columns=fewer.append(pa.field("price", pa.int64()))),
        ):
            with pytest.raises(SchemaMismatch):
                await log.ask(Append(wrong, partition=0, at=4))
        assert (await log.ask(GetExtent())).end == {0: 4, 1: 4}


async def test_appends_that_come_together_are_one_transaction(url: str, server: Cluster) -> None:
    """Also behind one that came alone, which did not wait for others."""
    async with log_at(url, 4) as log:
        for at in range(3):
            async with trio.open_nursery() as nursery:
                for shard in range(4):
                    nursery.start_soon(log.ask, Append(values_for("a"), partition=shard, at=at))
        found = server.execute(
            f"SELECT _offset, count(DISTINCT xmin::text) FROM {table_of(url)} GROUP BY _offset ORDER BY _offset"
        )
        assert [tuple(row) for row in found][1:] == [(1, 1), (2, 1)]


async def test_rows_come_in_pieces_of_the_size_that_is_asked_for(url: str) -> None:
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for(*"ababab", size=100_000), partition=0, at=0))
        at: int | None = 0
        found: list[list[int]] = []
        while at is not None:
            some = await log.ask(ReadEntity("a", partition=0, start=at, max_bytes=250_000))
            found.append(some.batch().column("offset").to_pylist())
            at = some.next
        assert found == [[0, 2], [4]]
        some = await log.ask(ReadEntity("a", partition=0, newest=3, max_bytes=250_000))
        assert (some.batch().column("offset").to_pylist(), some.next) == ([2, 4], None)
        some = await log.ask(ReadEntity("a", partition=0, max_bytes=1))
        assert (some.count, some.next) == (1, 2)
        assert [(await log.ask(ReadRows(0, 1, end, size))).count for end, size in ((6, 250_000), (6, 1), (2, 1))] == [
            2,
            1,
            1,
        ]
        assert [await log.ask(OffsetWithin(0, 0, 6, size)) for size in (1, 250_000, 10_000_000)] == [1, 2, 6]


async def test_its_report_has_rows_and_their_size(url: str, server: Cluster) -> None:
    """As the dashboard shows them. While the database is away, the other counts are there."""
    async with ActorSystem("test", ask_timeout=50.0) as system, store(url).open(system, 2) as log:
        assert isinstance(log, LocalRef)
        assert "rows" not in await system.observe.report(log)  # a report opens nothing
        assert (await log.ask(GetExtent())).end == {0: 0, 1: 0}
        empty = await system.observe.report(log)
        assert (empty["partitions"], empty["rows"], empty["bytes_stored"]) == (2, 0, 0)
        await log.ask(GetSchema(COLUMNS.serialize().to_pybytes()))
        await log.ask(Append(rows_for("a", "b", "c", size=10_000), partition=1, at=0))
        full = await system.observe.report(log)
        assert (full["rows"], full["rows_appended"], full["appends_waiting"]) == (3, 3, 0)
        assert int(str(full["bytes_stored"])) >= 8192 * 3  # the table, and two indexes


async def test_many_rows_come_in_pieces_too(url: str) -> None:
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for(*["a"] * 9000), partition=0, at=0))
        at: int | None = 0
        counts: list[int] = []
        while at is not None:
            some = await log.ask(ReadEntity("a", partition=0, start=at))
            counts.append(some.count)
            at = some.next
        assert counts == [4096, 4096, 808]


@message("test.postgres.part")
class Part:
    name: str
    weight: float | None = None


@message("test.postgres.everything", frozen=True)
class Everything(Asks[bool]):
    text: str
    number: int
    ratio: float
    flag: bool
    data: bytes
    at: datetime
    day: date
    took: timedelta
    price: Decimal
    id: UUID
    names: list[str]
    sizes: dict[str, float]
    part: Part
    parts: list[Part]
    maybe: int | None = None


@message("test.postgres.keep_all")
class KeepAll(Asks[bool]):
    pass


class Store(Durable[Everything | KeepAll]):
    kept_so_far: int = 0

    @handles
    def keep_all(self, _: KeepAll) -> bool:
        for each in EVERYTHING:
            self.record(each)
        return True

    @handles
    def keep(self, m: Everything) -> bool:
        self.record(m)
        return True

    @applies
    def kept(self, e: Everything) -> None:
        self.kept_so_far += 1
        SEEN.append(e)


SEEN: list[Everything] = []
ODD = "\0é\x10\x100 \U0001f600'\"\\"
EVERYTHING = [
    Everything(
        ODD, -(1 << 63), float("-inf"), True, b"\0\xff", datetime(1, 1, 1, tzinfo=UTC), date(9999, 12, 31), timedelta(days=-999, microseconds=1),
        Decimal("-12345678901234567890.123456789012345678"), UUID(int=1), [ODD, ""], {ODD: -0.0, "a": 1e300, "b": 5e-324}, Part(ODD),
        [Part("x", 0.1), Part("y")],
    ),
    Everything("", 0, -0.0, False, b"", datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), date(1, 1, 1), timedelta(0),
        Decimal('0E-18'), UUID(int=0), [], {}, Part(""), [], 1),
]  # fmt: skip


@pytest.mark.parametrize("commands", [EVERYTHING, [KeepAll()]], ids=["appends of one row", "an append of all"])
async def test_every_type_of_column_and_every_text_comes_back_as_it_was(
    commands: list[Any], url: str, server: Cluster
) -> None:
    for _ in range(2):
        SEEN.clear()
        async with ActorSystem("test", ask_timeout=50.0) as system:
            found = await shards(system, Store, events=Everything, journal=url, shards=1)
            for number, each in enumerate(commands):
                assert await found[ODD].ask(each, command=f"{ODD}{number}") is True
            assert SEEN == EVERYTHING
            assert [(repr(each.sizes), repr(each.ratio)) for each in SEEN] == [
                (repr(each.sizes), repr(each.ratio)) for each in EVERYTHING
            ]
    assert len(SEEN) == 2  # read again, and the commands were known
    [kinds] = server.execute(
        f"SELECT array_agg(pg_typeof(x)::text) FROM {table_of(url)}_events e, LATERAL (VALUES (1)) v(x) LIMIT 1"
    )
    assert kinds is not None
    [row] = server.execute(
        f"SELECT number, price::text, took, names ->> 1, jsonb_array_length(parts), entity FROM {table_of(url)}_events WHERE sequence = 1"
    )
    assert row == (
        -(1 << 63),
        "-12345678901234567890.123456789012345678",
        timedelta(days=-999, microseconds=1),
        "",
        2,
        ODD.replace("\x10", "\x10\x10").replace("\0", "\x100"),
    )


async def test_a_large_event_is_kept_and_read(url: str) -> None:
    big = rows_for("a", "a", "b", size=14 << 20)
    async with log_at(url, 1) as log:
        await log.ask(Append(big, partition=0, at=0))
        some = await log.ask(ReadEntity("a", partition=0))
        assert (some.count, some.next, some.batch().column("_data").equals(big.slice(0, 1).column("_data"))) == (
            1,
            1,
            True,
        )


async def test_a_log_grows_and_the_older_program_goes_on(url: str, server: Cluster) -> None:
    table = table_of(url)
    async with log_at(url, 1) as old:
        assert await old.ask(Append(rows_for("a"), partition=0, at=0)) == Appended(0, 0, 1)
        async with ActorSystem("test", ask_timeout=50.0) as system:
            accounts = await shards(system, Account, events=EVENTS, journal=url, shards=1)
            assert await accounts["b"].ask(Withdraw(-5)) == 5
        end = (await old.ask(GetExtent())).end[0]
        assert await old.ask(Append(rows_for("a"), partition=0, at=end)) == Appended(0, end, 1)
        assert (await old.ask(ReadEntity("a", partition=0))).count == 2
    assert server.execute(f"SELECT entity, amount, note FROM {table}_events ORDER BY _offset") == [
        ("a", 0, None),
        ("b", -5, ""),
        ("a", 0, None),
    ]
    async with log_at(url, 1, None) as log:
        schema = pa.ipc.read_schema(pa.py_buffer(await log.ask(GetSchema())))
        assert schema.names == [*COLUMNS.names, "note"]


async def test_programs_that_start_at_once_make_one_log(url: str) -> None:
    async with ActorSystem("test", ask_timeout=50.0) as system:
        found: list[Any] = []

        async def start(name: str) -> None:
            found.append(await shards(system, Account, events=EVENTS, journal=url, shards=2, name=name))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(start, f"n{number}")
        epochs = {(await each.journal.ask(GetExtent())).epoch for each in found}
        assert len(epochs) == 1


async def test_a_second_program_fences_the_first(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with ActorSystem("one", ask_timeout=50.0) as one, ActorSystem("two", ask_timeout=50.0) as two:
        first = await shards(one, Account, events=EVENTS, journal=url, shards=1)
        assert await first["anna"].ask(Deposit(5)) == 5
        second = await shards(two, Account, events=EVENTS, journal=url, shards=1)
        assert await second["anna"].ask(Deposit(6)) == 11
        with pytest.raises(OutcomeUnknown):
            await first["anna"].ask(Deposit(7), command="c")
        assert await first["anna"].ask(Deposit(7), command="c") == 18


async def test_serializable_as_the_default_isolation_is_fine(url: str, server: Cluster) -> None:
    options = "&options=-c%20default_transaction_isolation%3Dserializable"
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url + options, shards=4)
        answers: dict[str, list[int]] = {}

        async def deposit(name: str) -> None:
            answers[name] = [await accounts[name].ask(Deposit(1), command=str(n)) for n in range(10)]

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(deposit, f"a{number}")
        assert set(map(tuple, answers.values())) == {tuple(range(1, 11))}


async def test_opening_a_log_fails_no_transaction_that_is_serializable(url: str, server: Cluster) -> None:
    """Not even one that is cancelled if a serializable one reads what it has changed."""
    options, table = "&options=-c%20default_transaction_isolation%3Dserializable", table_of(url)
    async with log_at(url) as log:
        await log.ask(Append(rows_for("a"), partition=0, at=0))
    server.execute(f"CREATE TABLE {table}_other AS SELECT 1 AS x")
    with psycopg.connect(server.url()) as early, psycopg.connect(server.url()) as late:
        for each in (early, late):
            each.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        assert late.execute(f"SELECT x FROM {table}_other".encode()).fetchall() == [(1,)]
        early.execute(f"UPDATE {table}_other SET x = 2".encode())
        early.commit()
        late.execute(f"UPDATE {table}_shards SET append = 3".encode())
        async with ActorSystem("test") as system, store(url + options).open(system, 2):
            late.commit()


async def test_those_who_wait_for_rows_see_those_of_another_process(url: str) -> None:
    async with log_at(url) as here, log_at(url) as there:
        await there.ask(GetExtent())
        async with trio.open_nursery() as nursery:
            found: list[Any] = []

            async def wait() -> None:
                found.append((await here.ask(AwaitRows({0: 0, 1: 0}, rows=3))).end)

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert (await here.ask(AwaitRows({}, rows=0))).end == {0: 0, 1: 0}  # a look that the other one sees too
            await there.ask(Append(rows_for("a"), partition=1, at=0))
            await there.ask(Append(rows_for("a", "b"), partition=0, at=0))
        assert found == [{0: 2, 1: 1}]


async def test_openings_tell_how_far_rows_are_the_same(url: str, server: Cluster) -> None:
    table = table_of(url)
    async with log_at(url) as log:
        one = await log.ask(GetExtent())
        await log.ask(Append(rows_for("a", "b", "c"), partition=0, at=0))
        assert await log.ask(GetReach(one.opening)) == Reach(True, {0: 3, 1: 0})
    async with log_at(url) as log:
        two = await log.ask(GetExtent())
        assert (two.epoch, two.opening == one.opening) == (one.epoch, False)
        await log.ask(Append(rows_for("d"), partition=0, at=3))
        assert await log.ask(GetReach(one.opening)) == Reach(True, {0: 3, 1: 0})
        assert await log.ask(GetReach(two.opening)) == Reach(True, {0: 4, 1: 0})
        assert await log.ask(GetReach(None)) == Reach(True, {0: 0, 1: 0})
    # What a fail-over to a standby without the newest rows leaves.
    server.execute(f"DELETE FROM {table} WHERE _offset >= 2")
    server.execute(f'UPDATE {table}_shards SET "end" = 2 WHERE shard = 0')
    async with log_at(url) as log:
        await log.ask(Append(rows_for("e", "f", "g"), partition=0, at=2))
        assert await log.ask(GetReach(two.opening)) == Reach(True, {0: 2, 1: 0})
        server.execute(f"DELETE FROM {table}_openings WHERE name = %s", two.opening)
        assert await log.ask(GetReach(two.opening)) == Reach(False, {0: 2, 1: 0})
    # Each process that connects is an opening, here one with rows of the restored log.
    async with log_at(url) as log:
        assert await log.ask(GetReach(two.opening)) == Reach(False, {0: 2, 1: 0})
        of_levada_0_2 = two.opening.partition("-")[0]
        assert await log.ask(GetReach(of_levada_0_2)) == Reach(False, {0: 5, 1: 0})


async def opened(url: str) -> Any:
    async with ActorSystem("test", ask_timeout=50.0) as system:
        return await shards(system, Account, events=EVENTS, journal=url, shards=2)


async def test_another_number_of_shards_and_other_columns_are_refused(url: str) -> None:
    await opened(url)
    async with ActorSystem("test") as system:
        with pytest.raises(ConfigurationError, match="shards is 3, wanted 2, as many as the journal has partitions"):
            await shards(system, Account, events=EVENTS, journal=url, shards=3)
    other = pa.schema([field if field.name != "amount" else pa.field("amount", pa.string()) for field in COLUMNS])
    for wrong, says in (
        (other, "amount: string, in the journal int64"),
        (pa.schema([*COLUMNS, pa.field("new", pa.int64(), nullable=False)]), "new: new, so it must be nullable"),
    ):
        async with log_at(url, 2, None) as log:
            with pytest.raises(SchemaMismatch, match=says):
                await log.ask(GetSchema(wrong.serialize().to_pybytes()))
    async with log_at(url, 2, pa.schema([("entity", pa.string())])) as log:
        assert (await log.ask(GetExtent())).end == {0: 1, 1: 1}  # of a log, one may know less


async def test_a_new_log_has_no_columns_until_they_are_wanted(url: str) -> None:
    async with log_at(url, 2, None) as log:
        assert len(pa.ipc.read_schema(pa.py_buffer(await log.ask(GetSchema())))) == 0
        assert (await log.ask(GetExtent())).end == {0: 0, 1: 0}
        for question in (ReadRows(0, 0), ReadEntity("a"), Append(rows_for("a"), partition=0, at=0), EraseEntity("a")):
            with pytest.raises(JournalError, match=r"the log has no columns yet: ask GetSchema\(wanted\)"):
                await log.ask(question)
        with pytest.raises(SchemaMismatch, match="PostgreSQL keeps the logs of durable actors"):
            await log.ask(GetSchema(pa.schema([("x", pa.string())]).serialize().to_pybytes()))
        with pytest.raises(SchemaMismatch, match="these bytes are no columns"):
            await log.ask(GetSchema(b"x"))


async def test_a_table_that_is_no_log_is_left_alone(url: str, server: Cluster) -> None:
    server.execute(f"CREATE TABLE {table_of(url)} (x integer)")
    with pytest.raises(JournalError, match=r"there is a table .* which is no log: give the log another name, \?table="):
        await opened(url)
    assert server.execute(f"SELECT count(*) FROM {table_of(url)}") == [(0,)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("ALTER TABLE {} ALTER COLUMN amount TYPE integer", "was changed by hand: amount: integer, wanted bigint"),
        ("DROP VIEW {}_events; ALTER TABLE {} DROP COLUMN _body", "was changed by hand: _body: missing, wanted bytea"),
        ("CREATE TRIGGER t BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()", "the trigger t may change"),
        ("CREATE RULE r AS ON INSERT TO {} DO INSTEAD NOTHING", "the rule r may change or hide rows"),
        ("DELETE FROM {}_log", "_log\" is empty"),
        ("DELETE FROM {}_shards", "_shards\" lacks shards"),
        ("DELETE FROM {}_shards WHERE shard = 1", "_shards\" has 1 shards, and the log 2"),
        ("INSERT INTO {}_shards VALUES (2, 0, 0)", "_shards\" has 3 shards, and the log 2"),
        ("UPDATE {}_log SET columns = 'x'", "cannot be read"),
        ("DROP TABLE {}_log", "some tables of the log are there, and others are gone"),
        ("ALTER TABLE {} DROP CONSTRAINT log_pkey", "the primary key (_shard, _offset) is missing"),
    ],
)  # fmt: skip
async def test_a_table_that_was_changed_by_hand_is_named(url: str, server: Cluster, change: str, says: str) -> None:
    await opened(url)
    if "TYPE" in change:
        server.execute(f"DROP VIEW {table_of(url)}_events")
    for each in change.split("; "):
        server.execute(each.format(table_of(url)))
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=re.escape(says)):
            await opened(url)


async def test_rows_that_a_trigger_drops_are_not_answered(url: str, server: Cluster) -> None:
    """Also where it was made while the log is open."""
    table = table_of(url)
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for("a"), partition=0, at=0))
        body = "BEGIN IF NEW.entity = ''b'' THEN RETURN NULL; END IF; RETURN NEW; END"
        server.execute(f"CREATE FUNCTION {table}_drop() RETURNS trigger LANGUAGE plpgsql AS '{body}'")
        server.execute(f"CREATE TRIGGER dropping BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_drop()")
        with pytest.raises(JournalDamaged, match="not all rows before 3 of shard 0 are in the table: a trigger"):
            await log.ask(Append(rows_for("c", "b"), partition=0, at=1))
    with pytest.raises(JournalDamaged, match="the trigger dropping may change or hide rows"):
        await opened(url)


async def test_the_settings_of_a_role_change_no_names(url: str, server: Cluster) -> None:
    server.execute("ALTER ROLE levada SET quote_all_identifiers = on")
    try:
        await opened(url)
        await opened(url)
        async with log_at(url, columns=None) as log:
            assert pa.ipc.read_schema(pa.py_buffer(await log.ask(GetSchema()))) == log_columns(EVENTS)
    finally:
        server.execute("ALTER ROLE levada RESET quote_all_identifiers")


async def test_tables_that_change_while_the_log_is_open_are_named(url: str, server: Cluster) -> None:
    table = table_of(url)
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for("a"), partition=0, at=0))
        server.execute(
            f"INSERT INTO {table} (_shard, _offset, entity, sequence, time, kind) VALUES (0, 1, 'x', 1, now(), 'x')"
        )
        with pytest.raises(JournalDamaged, match="rows behind the end of the log, which levada has not written"):
            await log.ask(Append(rows_for("a"), partition=0, at=1))
        server.execute(f"DELETE FROM {table} WHERE _offset = 1")
        server.execute(f"ALTER TABLE {table} ALTER COLUMN sequence DROP NOT NULL")
        server.execute(f"UPDATE {table} SET sequence = NULL")
        with pytest.raises(
            JournalDamaged, match="the column sequence has a value that levada did not write: it is null"
        ):
            await log.ask(ReadRows(0, 0))
        server.execute(f"DELETE FROM {table}_shards")
        with pytest.raises(JournalDamaged, match="the row of shard 0 is gone"):
            await log.ask(Append(rows_for("a"), partition=0, at=1))
        with pytest.raises(JournalDamaged, match="the table of shards has 0 of 1 rows: it was changed by hand"):
            await log.ask(GetExtent())
        server.execute(f"DROP TABLE {table} CASCADE")
        with pytest.raises(JournalDamaged, match="a table of the log is gone"):
            await log.ask(ReadRows(0, 0))


async def annas_balance(url: str) -> int:
    """Ask in a program of its own."""
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=2)
        return await accounts["anna"].ask(Balance())


async def test_newest_rows_that_were_deleted_by_hand_are_named(url: str, server: Cluster, tmp_path: Path) -> None:
    """Where the log is opened, waited for, trimmed and copied; until they are back, or the table of shards ends before them."""
    table, shard = table_of(url), partition_of("anna", 2)

    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=2)
        for _ in range(3):
            await accounts["anna"].ask(Deposit(1))
        assert accounts.journal is not None
        end = (await accounts.journal.ask(GetExtent())).end[shard]
        newest = f"FROM {table} WHERE _shard = {shard} AND _offset >= {end - 2}"
        server.execute(f"CREATE TABLE {table}_saved AS SELECT * {newest}")
        server.execute(f"DELETE {newest}")
        says = f"rows {end - 2} to {end - 1} of shard {shard} are gone from the table .* changed by hand: put them back"
        for question in (GetExtent(), AwaitRows({shard: end})):
            with pytest.raises(JournalDamaged, match=says):
                await accounts.journal.ask(question)
        for copy in (
            copy_log(system, url, tmp_path / "copy"),
            trim_log(system, url, keep=0, archive=tmp_path / "archive"),
        ):
            with pytest.raises(JournalDamaged, match=says):
                await copy
    with pytest.raises(JournalDamaged, match=says):
        await annas_balance(url)
    server.execute(f"INSERT INTO {table} SELECT * FROM {table}_saved")
    assert await annas_balance(url) == 3
    [(end,)] = server.execute(f'SELECT "end" FROM {table}_shards WHERE shard = {shard}')  # with the answer of `Balance`
    move = f"UPDATE {table} SET _offset = {{}} WHERE _shard = {shard} AND _offset = {{}}"
    server.execute(move.format(end, end - 1))
    with pytest.raises(
        JournalDamaged, match=f"rows {end} to {end} of shard {shard} of the table .* are behind the end"
    ):
        await annas_balance(url)
    server.execute(move.format(end - 1, end))
    server.execute(
        f"DELETE FROM {table} WHERE _shard = {shard} AND _offset >= (SELECT min(_offset) FROM {table} WHERE sequence = 2)"
    )
    server.execute(
        f'UPDATE {table}_shards SET "end" = (SELECT max(_offset) + 1 FROM {table} WHERE _shard = {shard}) WHERE shard = {shard}'
    )
    assert await annas_balance(url) == 1


def note_as_gone(server: Cluster, table: str, shard: int, first: int, last: int) -> None:
    """Note that rows are gone, as the page has it: all offsets between two that have no row, and were not erased."""
    server.execute(
        f"INSERT INTO {table}_erased SELECT {shard}, each, each + 1 FROM ("
        f"SELECT generate_series({first}, {last}) EXCEPT SELECT _offset FROM {table} WHERE _shard = {shard} "
        f'EXCEPT SELECT generate_series(first, "end" - 1) FROM {table}_erased WHERE shard = {shard}) AS gone(each)'
    )


async def test_rows_between_others_that_were_deleted_by_hand_are_named(
    url: str, server: Cluster, tmp_path: Path
) -> None:
    """Where the log is read in order, copied, trimmed and opened; until they are back, or noted as erased."""
    table, shard = table_of(url), partition_of("anna", 2)

    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=2)
        gone = next(name for name in map(str, itertools.count()) if partition_of(name, 2) == shard)
        for entity in ("anna", "anna", gone, "anna", "anna"):
            await accounts[entity].ask(Deposit(1))
        assert accounts.journal is not None
        first, last = (
            offset for (offset,) in server.execute(f"SELECT _offset FROM {table} WHERE sequence IN (2, 3) ORDER BY 1")
        )
        assert await accounts.erase(gone) == 1
        server.execute(f"CREATE TABLE {table}_saved AS SELECT * FROM {table} WHERE _offset BETWEEN {first} AND {last}")
        server.execute(f"DELETE FROM {table} WHERE _offset BETWEEN {first} AND {last}")
        end = (await accounts.journal.ask(GetExtent())).end[shard]
        says = f"2 of the rows {{}} to {{}} of shard {shard} are gone from the table .* changed by hand: put them back"
        run: Rows = await accounts.journal.ask(ReadRows(shard, 0))
        assert run.end == first
        with pytest.raises(JournalDamaged, match=says.format(first, last)):
            await accounts.journal.ask(ReadRows(shard, first))
        with pytest.raises(JournalDamaged, match=says.format(first, last)):
            await accounts.journal.ask(ReadRows(shard, first, last + 1))
        for copy in (
            copy_log(system, url, tmp_path / "copy"),
            trim_log(system, url, keep=0, archive=tmp_path / "archive"),
        ):
            with pytest.raises(JournalDamaged, match=says.format(0, end - 1)):
                await copy
    with pytest.raises(JournalDamaged, match=says.format(0, end - 1)):
        await annas_balance(url)
    server.execute(f"INSERT INTO {table} SELECT * FROM {table}_saved")
    assert await annas_balance(url) == 4
    server.execute(f"DELETE FROM {table} WHERE _offset BETWEEN {first} AND {last}")
    note_as_gone(server, table, shard, first, last)
    with pytest.raises(ReplayFailed, match="it follows event 1: rows are missing"):
        await annas_balance(url)


@pytest.mark.parametrize(
    ("entities", "start", "end", "gone"),
    [
        ("aaeeee-eeeec", 4, None, (4, 10)),
        ("aaeeee-eeeec", 6, 9, (6, 8)),
        ("aaeeee-eeeec", 3, 9, (3, 8)),
        ("aaeeee-eeeec", 6, 7, (6, 6)),
        ("aaeeeeb-eeeec", 7, 9, (7, 8)),
        ("aaeeee-eeeec", 4, 6, None),
        ("aaeeee-eeeec", 2, 6, None),
        ("aaeeee-eeeec", 7, 11, None),
        ("aaeeee-eeeec", 8, 9, None),
    ],
)
async def test_a_row_that_was_deleted_by_hand_beside_erased_ones_is_named(
    url: str, server: Cluster, entities: str, start: int, end: int | None, gone: tuple[int, int] | None
) -> None:
    """Of what was erased, only what is between the two offsets counts."""
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for(*entities), partition=0, at=0))
        assert await log.ask(EraseEntity("e", partition=0)) == Erased(0, 8)
        server.execute(f"DELETE FROM {table_of(url)} WHERE entity = '-'")
        question = ReadRows(0, start, end)
        if gone is None:
            assert await log.ask(question) == Rows(0, start, 0, b"")
        else:
            with pytest.raises(JournalDamaged, match="1 of the rows {} to {} of shard 0 are gone".format(*gone)):
                await log.ask(question)


async def test_what_is_noted_as_gone_beside_erased_rows_hides_none_of_them(url: str, server: Cluster) -> None:
    """From wherever the log is read, and to wherever."""
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for(*"aaeeee-eeeec"), partition=0, at=0))
        await log.ask(EraseEntity("e", partition=0))
        server.execute(f"DELETE FROM {table_of(url)} WHERE entity = '-'")
        with pytest.raises(JournalDamaged, match="1 of the rows 6 to 8 of shard 0 are gone"):
            await log.ask(ReadRows(0, 6, 9))
        note_as_gone(server, table_of(url), 0, 6, 8)
        for start, end in itertools.combinations(range(13), 2):
            there = [offset for offset in (0, 1, 11) if start <= offset < end]
            rows = await log.ask(ReadRows(0, start, end))
            assert rows.first == (there[0] if there else start)
        server.execute(f"INSERT INTO {table_of(url)}_erased VALUES (0, 3, 4)")  # what is noted twice is no row too many
        assert (await log.ask(ReadRows(0, 2, 6))).count == 0
        await log.ask(Append(rows_for("f", "f", "g"), partition=0, at=12))
        server.execute(f"INSERT INTO {table_of(url)}_erased VALUES (0, 12, 13)")  # too early, since the row is there
        assert await log.ask(EraseEntity("f", partition=0)) == Erased(0, 2)
        assert (await log.ask(ReadRows(0, 12))).first == 14


async def test_rows_before_the_first_one_are_named(url: str, server: Cluster) -> None:
    """Else who reads a log from its first row would pass them by: such as rows that were put back, or a first row that was noted by hand."""
    table = table_of(url)
    async with log_at(url) as log:
        await log.ask(Append(rows_for("a", "b"), partition=1, at=0))
    server.execute(f"INSERT INTO {table}_trims (shard, first) VALUES (1, 1)")
    with pytest.raises(JournalDamaged, match=r"rows of shard 1 before its first one, 1, in the table .*: set first to"):
        await opened(url)
    server.execute(f"UPDATE {table}_trims SET first = 0")  # as it says
    async with log_at(url) as log:
        assert (await log.ask(ReadRows(1, (await log.ask(GetExtent())).first[1]))).count == 2


async def test_a_newest_row_that_was_erased_is_not_missed(url: str, server: Cluster, tmp_path: Path) -> None:
    """Also in copies; what is deleted by hand behind it is."""
    copies = [server.url(f"{server.schema()}.log"), str(tmp_path / "copy")]
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for("a", "b", "a"), partition=0, at=0))
        assert await log.ask(EraseEntity("a", partition=0)) == Erased(0, 2)
    async with ActorSystem("test", ask_timeout=50.0) as system:
        for source, target in itertools.pairwise([url, *copies]):
            assert (await copy_log(system, source, target, verify=True)).rows == 1
    for each in (url, copies[0]):
        async with log_at(each, 1) as log:
            assert (await log.ask(GetExtent())).end == {0: 3}
            await log.ask(Append(rows_for("c"), partition=0, at=3))
            server.execute(f"DELETE FROM {table_of(each)} WHERE _offset = 3")
            with pytest.raises(JournalDamaged, match="rows 3 to 3 of shard 0 are gone"):
                await log.ask(GetExtent())


async def test_a_log_that_was_made_anew_is_behind(url: str, server: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    table = table_of(url)
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=1)
        for _ in range(3):
            await accounts["anna"].ask(Deposit(1))
        server.execute(
            f"DROP TABLE {table}, {table}_shards, {table}_log, {table}_openings, {table}_trims, {table}_erased CASCADE"
        )
        async with log_at(url, 1, log_columns(EVENTS)) as log:
            await log.ask(GetExtent())
        with pytest.raises(JournalBehind, match="rows 0 to 3 were on the disk and are gone from the log"):
            await accounts["anna"].ask(Deposit(1))
        terminate(server)
        assert accounts.journal is not None
        with pytest.raises(
            JournalBehind, match=r"was opened, and this one is .*: its tables were dropped, or this is another database"
        ):
            await accounts.journal.ask(Append(rows_like(log_columns(EVENTS)), partition=0, at=0))


def rows_like(columns: pa.Schema) -> pa.RecordBatch:
    row = {**rows_for("a").to_pylist()[0]}
    return pa.RecordBatch.from_pylist([row], columns)


def terminate(server: Cluster) -> None:
    """End all connections of others."""
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            "-c default_transaction_read_only=on",
            JournalUnwritable,
            "it only reads: it is a standby, or default_transaction_read_only is set",
        ),
        (
            "-c synchronous_commit=off",
            ConfigurationError,
            "synchronous_commit is off, so a crash of the server would lose rows",
        ),
    ],
)
async def test_sessions_that_cannot_keep_a_log_are_refused(
    url: str, options: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        await opened(f"{url}&options={options.replace(' ', '%20').replace('=', '%3D')}&target_session_attrs=any")


@pytest.mark.parametrize(
    ("version", "changed", "kind", "says"),
    [
        (13_00_09, {}, ConfigurationError, "this is PostgreSQL 13, and levada needs 14 or later"),
        (15_00_01, {"recovery": "true"}, DatabaseReadOnly, "it is a standby"),
        (15_00_01, {"encoding": "LATIN1"}, ConfigurationError, "the encoding of the database is LATIN1, wanted UTF8"),
    ],
)
def test_servers_that_cannot_keep_a_log_are_refused(
    version: int, changed: dict[str, str], kind: type[Exception], says: str
) -> None:
    fine = {"recovery": "false", "read_only": "off", "encoding": "UTF8", "synchronous_commit": "on"}
    place = PostgresAddress.of("postgresql://db/bank", "log")
    refuse_server(place, 14_00_00, fine)
    with pytest.raises(kind, match=says):
        refuse_server(place, version, {**fine, **changed})


async def test_no_database_is_an_error_at_once(url: str, server: Cluster) -> None:
    for wrong, says in (
        (url.replace("/postgres?", "/nowhere?"), 'database "nowhere" does not exist'),
        (url.replace("levada@", "mallory:s3cret@"), 'role "mallory" does not exist'),
        (url.replace("host=", "host=%2Fnowhere"), "the database cannot be reached"),
    ):
        with pytest.raises(JournalError, match=says) as caught:
            await opened(wrong)
        assert "s3cret" not in str(caught.value)


async def test_a_role_needs_no_more_than_the_page_says(url: str, server: Cluster) -> None:
    await opened(url)
    schema, table = table_of(url).split(".")
    role = f"writer_{schema}"
    grants = [
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT ON {schema}.{table}_log TO {role}",
        f"GRANT SELECT, UPDATE ON {schema}.{table}_shards TO {role}; GRANT SELECT, INSERT, UPDATE ON {schema}.{table}_trims TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.{table}_erased TO {role}",
        f"GRANT SELECT, INSERT, DELETE ON {schema}.{table}, {schema}.{table}_openings TO {role}",
    ]
    server.execute("; ".join(grants[:-1]))
    server.execute(
        f"GRANT SELECT, INSERT, DELETE ON {schema}.{table} TO {role}; GRANT SELECT ON {schema}.{table}_openings TO {role}"
    )
    own = url.replace("levada@", f"{role}@")
    with pytest.raises(
        JournalUnwritable, match=f'lacks rights: GRANT INSERT ON "{schema}"."log_openings" TO "{role}"; GRANT DELETE'
    ):
        await opened(own)
    server.execute(grants[-1])
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=own, shards=2)
        assert await accounts["anna"].ask(Deposit(5), command="c") == 5
        assert await accounts.erase("anna") == 1
        assert await accounts["bert"].ask(Balance()) == 0
    server.execute(f"ALTER TABLE {schema}.{table} ENABLE ROW LEVEL SECURITY")
    with pytest.raises(JournalDamaged, match="row security may change or hide rows"):
        await opened(own)


async def test_an_append_without_a_place_is_refused(url: str) -> None:
    async with log_at(url) as log:
        with pytest.raises(JournalError, match="says where it begins"):
            await log.ask(Append(rows_for("a"), partition=0))
        with pytest.raises(SchemaMismatch, match="are a record batch, or a stream of one"):
            await log.ask(Append([Deposited(5)], partition=0, at=0))
        assert await log.ask(Append(rows_for("a"), partition=0, at=3)) == Fenced(0, 0)
        log.tell(Append(rows_for("a"), partition=0, at=0))
        assert (await log.ask(AwaitRows({}))).end == {0: 1, 1: 0}


async def test_told_rows_are_written_and_the_log_names_those_that_are_lost(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = rows_for("a").add_column(0, pa.field("offset", pa.int64(), nullable=False), pa.array([0]))
    async with log_at(url, 2) as log:
        log.tell(CopyRows(stream_of(first), 0, 0, 1))
        assert (await log.ask(AwaitRows({}))).end == {0: 1, 1: 0}
        log.tell(CopyRows(stream_of(first), 7, 0, 1))
        log.tell(Append(rows_for("b"), partition=1, at=5))
        log.tell(Append(rows_for(), partition=0, at=1))  # compares, and has nobody to answer
        assert await log.ask(Append(rows_for("c"), partition=0, at=1)) == Appended(0, 1, 1)
    assert [text.partition("lost: ")[2] for text in caplog.messages if "told, not asked" in text] == [
        f"{store(url).address.shown}: there is no partition 7, there are 0 to 1",
        "Fenced(partition=1, end=0)",
    ]


def test_a_table_has_no_more_columns_than_postgresql_takes(url: str) -> None:
    most = pa.schema([("entity", pa.string()), *((f"c{number}", pa.int64()) for number in range(MOST_COLUMNS - 1))])
    assert len(LogTables.of(store(url).address, most).kinds) == MOST_COLUMNS
    with pytest.raises(ConfigurationError, match=f"has {MOST_COLUMNS} columns at most, these are {MOST_COLUMNS + 1}"):
        LogTables.of(store(url).address, most.append(pa.field("last", pa.int64())))


@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
async def test_no_connection_outlives_its_log(url: str, server: Cluster, how: str) -> None:
    """However it ends, and whatever is under way."""
    with trio.CancelScope() as scope:
        async with log_at(f"{url}&application_name={how}", 1) as log, trio.open_nursery() as nursery:

            async def append(at: int) -> None:
                with suppress(ActorStopped):
                    await log.ask(Append(rows_for("a", size=1_000_000), partition=0, at=at))

            async def read() -> None:
                with suppress(ActorStopped):
                    await log.ask(ReadRows(0, 0))

            await append(0)
            for at in range(1, 4):
                nursery.start_soon(append, at)
                nursery.start_soon(read)
            await trio.sleep(0.005)
            if how == "cancel":
                scope.cancel()
            else:
                log.stop(now=how == "kill")
    assert server.connections(how) == 0


@asynccontextmanager
async def log_with_a_gap(url: str) -> AsyncIterator[Ref[Any]]:
    """A log of one shard whose first row was erased."""
    async with log_at(url, 1) as log:
        await log.ask(Append(rows_for("a", "b"), partition=0, at=0))
        await log.ask(EraseEntity("a", partition=0))
        yield log


@contextmanager
def gaps_held(url: str, server: Cluster) -> Iterator[None]:
    """Let no session look whether a gap was erased; what is read without a gap goes on."""
    with psycopg.connect(server.url()) as session:
        session.execute(f"LOCK TABLE {table_of(url)}_erased IN ACCESS EXCLUSIVE MODE".encode())
        yield


async def until_held(server: Cluster, application: str, count: int) -> None:
    """Wait until so many connections of an application wait for a lock."""
    text = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    while await trio.to_thread.run_sync(server.execute, text, application) != [(count,)]:
        pass


async def run_behind_the_gap(log: Ref[Any]) -> tuple[int, int]:
    rows: Rows = await log.ask(ReadRows(0, 0))
    return rows.first, rows.count


@pytest.mark.parametrize("how", ["the asker", "stop", "kill"])
async def test_a_question_behind_a_gap_that_is_given_up_leaves_nothing_behind(
    url: str, server: Cluster, how: str
) -> None:
    """More askers than the log has connections are cancelled, or the log ends, while the database looks for the rows that are not there."""
    async with log_with_a_gap(f"{url}&application_name={how}") as log:
        with gaps_held(url, server):
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with nullcontext() if how == "the asker" else pytest.raises(ActorStopped):
                        await run_behind_the_gap(log)

                for _ in range(READERS + 2):
                    nursery.start_soon(ask)
                await until_held(server, how, READERS)
                if how == "the asker":
                    nursery.cancel_scope.cancel()
                else:
                    log.stop(now=how == "kill")
            if how == "the asker":
                assert await log.ask(Append(rows_for("c"), partition=0, at=2)) == Appended(0, 2, 1)
        if how == "the asker":
            for _ in range(READERS + 2):
                assert await run_behind_the_gap(log) == (1, 2)
            text = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
            assert server.execute(text, how) == [(1 + READERS,)]
    assert server.connections(how) == 0
    async with log_at(url, 1) as log:
        assert (await run_behind_the_gap(log))[0] == 1


async def test_a_question_behind_a_gap_without_an_answer_is_asked_again(
    url: str, server: Cluster, mock_clock: MockClock
) -> None:
    answers: list[tuple[int, int]] = []
    async with log_with_a_gap(f"{url}&application_name=again") as log, trio.open_nursery() as nursery:

        async def ask() -> None:
            answers.append(await run_behind_the_gap(log))

        with gaps_held(url, server):
            nursery.start_soon(ask)
            await until_held(server, "again", 1)
            mock_clock.jump(ANSWERED_WITHIN)
            await wait_all_tasks_blocked()
            mock_clock.jump(LAST_PAUSE)
            await until_held(server, "again", 2)  # the server has not noticed that the first one is closed
            assert await log.ask(Append(rows_for("c"), partition=0, at=2)) == Appended(0, 2, 1)
            assert answers == []
    assert answers == [(1, 1)]
    assert server.connections("again") == 0


async def test_a_report_that_takes_too_long_gives_its_connection_up(
    url: str, server: Cluster, mock_clock: MockClock
) -> None:
    """What comes later on that connection would be the answer to its question."""
    async with log_with_a_gap(f"{url}&application_name=report") as log, trio.open_nursery() as nursery:
        assert isinstance(log, LocalRef)
        reports: list[Mapping[str, object]] = []

        async def look() -> None:
            reports.append(await log.system.observe.report(log))

        with gaps_held(url, server):
            nursery.start_soon(look)
            await until_held(server, "report", 1)
            mock_clock.jump(REPORTED_WITHIN)
            await wait_all_tasks_blocked()
            assert [(report["rows_appended"], "rows" in report) for report in reports] == [(2, False)]
        assert await run_behind_the_gap(log) == (1, 1)
        await look()
        assert reports[-1]["rows"] == 2
    assert server.connections("report") == 0


async def test_an_answer_on_a_connection_from_before_a_new_one_is_asked_for_again(url: str, server: Cluster) -> None:
    """An old primary that lives on would say on it what is true there; so it is closed."""
    answers: list[tuple[int, int]] = []
    async with log_with_a_gap(f"{url}&application_name=old") as log:

        async def ask() -> None:
            answers.append(await run_behind_the_gap(log))

        ours = "FROM pg_stat_activity WHERE application_name = 'old'"
        async with trio.open_nursery() as nursery:
            with gaps_held(url, server):
                nursery.start_soon(ask)
                await until_held(server, "old", 1)
                before = server.execute(f"SELECT pid {ours}")
                assert server.execute(f"SELECT pg_terminate_backend(pid) {ours} AND state = 'idle'") == [(True,)]
                assert await log.ask(Append(rows_for("c"), partition=0, at=2)) == Appended(0, 2, 1)
                assert answers == []
        assert answers == [(1, 1)]
        with trio.fail_after(10):  # the server takes its time to notice
            while {*before} & {*(after := await trio.to_thread.run_sync(server.execute, f"SELECT pid {ours}"))}:
                pass
        assert len(after) == 2, "one that writes, and one that reads"


async def test_pages_of_rows_are_read_in_the_order_of_an_index(url: str, server: Cluster) -> None:
    """Else the server sorts all rows of the entity for each page, once the table was analyzed; and what it must sort, it is not to compile."""
    async with log_at(url, 1) as log:
        for at in range(0, 12_000, 4000):
            await log.ask(Append(rows_for(*["anna", "bert", "carl", "dora"] * 1000, size=200), partition=0, at=at))
        tables = LogTables.of(store(url).address, COLUMNS)
        server.execute(f"ANALYZE {table_of(url)}")
        with psycopg.connect(server.url()) as session:
            for name, text in (
                ("rows", tables.rows),
                ("entity", tables.entity("_snapshot")),
                ("newest", tables.newest),
            ):
                second = "bigint" if name == "rows" else "text"
                session.execute(f"PREPARE {name}(integer, {second}, bigint, bigint, bigint) AS {text}".encode())
                plans = []
                for _ in range(2):
                    value = "'9000'" if name == "rows" else "'anna'"
                    found = session.execute(f"EXPLAIN EXECUTE {name}(0, {value}, 0, 8000, 1000000)".encode()).fetchall()
                    plans.append("\n".join(line for (line,) in found))
                    session.execute(IN_ORDER)
                    session.execute("SELECT set_config('plan_cache_mode', 'force_custom_plan', true)")
                if name == "newest":
                    assert "Sort" in plans[1]
                else:
                    assert ["Sort" in plan for plan in plans] == [name == "entity", False]
                assert "JIT" not in plans[1]
                session.rollback()
        read = await log.ask(ReadEntity("anna", partition=0, start=11_000))
        assert read.count == 250
