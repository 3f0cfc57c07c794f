"""Rows of a journal as Parquet, Arrow and CSV: every type, ranges, erased rows, open journals, and files that are whole or not there."""

from __future__ import annotations

import base64
import csv
import datetime as dt
import errno
import shutil
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.surroundings import surrounded

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

import pyarrow.csv  # noqa: E402
import pyarrow.feather  # noqa: E402
import pyarrow.parquet  # noqa: E402

from levada.actors.durable import Durable, applies, shards  # noqa: E402
from levada.actors.journal import (  # noqa: E402
    Exported,
    JournalConfig,
    JournalDamaged,
    JournalFull,
    JournalLocked,
    Keyed,
    Store,
    export,
)
from levada.actors.journal.asking import locked  # noqa: E402
from levada.framework import ActorSystem, Asks, handles, message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.files import Files  # noqa: E402
from levada.framework.testing.simulation import Call, Fault, SimulatedDisk, SimulatedFiles  # noqa: E402

SCHEMA = pa.schema([("entity", pa.string()), ("n", pa.int64())])
CONFIG = JournalConfig(
    partitions=2, segment_bytes=2048, block_bytes=1024, retain_bytes=1 << 20, keyed=Keyed(entity="entity")
)
READ: dict[str, Callable[[Path], Any]] = {"parquet": pyarrow.parquet.read_table, "arrow": pyarrow.feather.read_table}


def rows(*numbers: int) -> Any:
    return pa.record_batch([[f"e{n % 3}" for n in numbers], list(numbers)], schema=SCHEMA)


def fill(directory: Path | str, count: int = 40) -> None:
    with Store.open(directory, SCHEMA, CONFIG) as store:
        for n in range(0, count, 10):
            for number in range(2):
                store.append([(number, rows(*range(n + number, min(n + 10, count), 2)))])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal, which takes a quarter of a second."""
    path = tmp_path_factory.mktemp("made") / "journal"
    fill(path)
    return path


@pytest.fixture
def journal(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "journal")


def places(path: Path) -> list[tuple[int, int, int]]:
    """Partition, offset and number of each row."""
    table = pyarrow.parquet.read_table(path)
    return list(zip(*(table.column(name).to_pylist() for name in ("partition", "offset", "n")), strict=True))


NOON = dt.datetime(2026, 11, 29, 12, 0, 0, 5, tzinfo=dt.UTC)
VALUES: dict[str, tuple[Any, Any, str]] = {
    "bits": (pa.bool_(), True, "true"),
    "blob": (pa.binary(), b"\xff\x00,\n", base64.b64encode(b"\xff\x00,\n").decode()),
    "day": (pa.date32(), dt.date(2026, 11, 29), "2026-11-29"),
    "digits": (pa.decimal128(20, 2), Decimal("12345678901234567.25"), "12345678901234567.25"),
    "fixed": (pa.binary(2), b"ab", "YWI="),
    "float": (pa.float64(), 0.1, "0.1"),
    "int": (pa.int64(), 2**63 - 1, "9223372036854775807"),
    "list": (pa.list_(pa.timestamp("us", tz="UTC")), [NOON], '["2026-11-29T12:00:00.000005+00:00"]'),
    "map": (pa.map_(pa.string(), pa.binary()), [("a", b"\xff")], '[["a", "/w=="]]'),
    "nested": (pa.struct([("at", pa.duration("us")), ("d", pa.float64())]), {"at": dt.timedelta(seconds=1.5), "d": 0.5}, '{"at": 1.5, "d": 0.5}'),
    "span": (pa.duration("us"), dt.timedelta(seconds=1.5), "1.5"),
    "text": (pa.string(), 'say "é",\nor not', 'say "é",\nor not'),
    "time": (pa.time64("us"), dt.time(1, 2, 3), "01:02:03.000000"),
    "when": (pa.timestamp("us", tz="UTC"), NOON, "2026-11-29 12:00:00.000005Z"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_each_type_of_a_column(tmp_path: Path, suffix: str) -> None:
    schema = pa.schema([(name, kind) for name, (kind, _, _) in VALUES.items()])
    columns = [pa.array([value, None], kind) for kind, value, _ in VALUES.values()]
    with Store.open(tmp_path / "journal", schema) as store:
        store.append([(0, pa.record_batch(columns, schema=schema))])
    path = tmp_path / f"rows.{suffix}"
    found = export(tmp_path / "journal", path)
    assert found == Exported(
        path=path, rows=2, size=path.stat().st_size, epoch=found.epoch, opening=found.opening, end={0: 2}
    )
    if suffix == "csv":
        with path.open(newline="", encoding="utf-8") as file:
            full, empty = csv.DictReader(file)
        assert full == {"partition": "0", "offset": "0", **{name: text for name, (_, _, text) in VALUES.items()}}
        assert empty == {"partition": "0", "offset": "1", **dict.fromkeys(VALUES, "")}
    else:
        table = READ[suffix](path)
        assert table.schema.types == [pa.int32(), pa.int64(), *schema.types]
        assert table.drop_columns(["partition", "offset"]).to_pylist() == pa.table(columns, schema=schema).to_pylist()
        assert table.column("offset").to_pylist() == [0, 1]


def test_all_rows_in_order_with_their_places(journal: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    export(journal, tmp_path / "rows.parquet", progress=lambda *now: told.append(now))
    assert places(tmp_path / "rows.parquet") == [(n % 2, n // 2, n) for n in [*range(0, 40, 2), *range(1, 40, 2)]]
    assert told[-1] == (40, 40)


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ({"partition": 1}, range(1, 40, 2)),
        ({"partition": 0, "start": 7, "end": 12}, range(14, 24, 2)),
        ({"start": 18}, [36, 38, 37, 39]),
        ({"end": 1}, [0, 1]),
        ({"start": 20}, []),
        ({"start": 3, "end": 3}, []),
        ({"start": 500}, []),
    ],
)
def test_a_range(journal: Path, tmp_path: Path, chosen: dict[str, int], wanted: Any) -> None:
    found = export(journal, tmp_path / "rows.parquet", **chosen)  # type: ignore[arg-type]
    assert places(tmp_path / "rows.parquet") == [(n % 2, n // 2, n) for n in wanted]
    assert found.rows == len(wanted)


def test_the_next_export_goes_on_where_the_last_one_ended(journal: Path, tmp_path: Path) -> None:
    before = export(journal, tmp_path / "1.parquet", partition=0)
    with Store.open(journal, None, CONFIG) as store:
        store.append([(0, rows(40, 42))])
    export(journal, tmp_path / "2.parquet", partition=0, start=before.end[0])
    assert places(tmp_path / "2.parquet") == [(0, 20, 40), (0, 21, 42)]


def test_erased_rows_are_left_out(journal: Path, tmp_path: Path) -> None:
    with Store.open(journal, None, CONFIG) as store:
        assert sum(store.erase("e1", partition=0)) == 6
    found = export(journal, tmp_path / "rows.parquet", partition=0)
    kept = [n for n in range(0, 40, 2) if n % 3 != 1]
    assert places(tmp_path / "rows.parquet") == [(0, n // 2, n) for n in kept]
    assert (found.rows, found.end) == (14, {0: 20})


def test_rows_from_before_a_column_have_its_default(journal: Path, tmp_path: Path) -> None:
    grown = SCHEMA.append(pa.field("note", pa.string()))
    with Store.open(journal, grown, CONFIG) as store:
        store.append([(0, pa.record_batch([["e1"], [40], ["new"]], schema=grown))])
    export(journal, tmp_path / "rows.parquet", partition=0, start=19)
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").column("note").to_pylist() == [None, "new"]


def test_columns_that_have_the_names_of_the_places(tmp_path: Path) -> None:
    schema = pa.schema([("offset", pa.int64()), ("partition", pa.string())])
    with Store.open(tmp_path / "journal", schema) as store:
        store.append([(0, pa.record_batch([[7], ["a"]], schema=schema))])
    export(tmp_path / "journal", tmp_path / "rows.arrow")
    [row] = pyarrow.feather.read_table(tmp_path / "rows.arrow").to_pylist()
    assert row == {"_partition": 0, "_offset": 0, "offset": 7, "partition": "a"}


def test_an_open_journal_is_read_as_it_was_at_one_moment(journal: Path, tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def progress(*_: int) -> None:
        begun.set()
        assert done.wait(60)

    with Store.open(journal, None, CONFIG) as store:
        write = partial(export, journal, tmp_path / "rows.parquet", progress=progress)
        thread = threading.Thread(target=write)
        thread.start()
        while not begun.is_set():
            store.look()
            assert thread.is_alive()
        store.append([(0, rows(*range(40, 140, 2)))])
        store.deliver("q", 1, [(1, message) for message in store.pack([rows(1000)])])
        done.set()
        thread.join()
        assert not (journal / "backup").exists()
    assert places(tmp_path / "rows.parquet") == [(n % 2, n // 2, n) for n in [*range(0, 40, 2), *range(1, 40, 2)]]


def test_an_interrupted_export_leaves_nothing(journal: Path, tmp_path: Path) -> None:
    def progress(*_: int) -> None:
        raise KeyboardInterrupt

    for suffix in ("parquet", "arrow", "csv"):
        with pytest.raises(KeyboardInterrupt):
            export(journal, tmp_path / f"rows.{suffix}", progress=progress)
    (tmp_path / "rows.csv.partial").write_text("of an export that was killed")
    export(journal, tmp_path / "rows.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "rows.csv"]


async def test_an_export_in_a_thread_is_cancelled_between_two_pages_and_while_it_waits(
    journal: Path, tmp_path: Path
) -> None:
    before = {path.name for path in journal.iterdir()}  # noqa: ASYNC240
    scope = trio.CancelScope()

    def progress(*_: int) -> None:
        trio.from_thread.run_sync(scope.cancel)
        trio.from_thread.check_cancelled()

    with scope:
        await trio.to_thread.run_sync(partial(export, journal, tmp_path / "rows.csv", progress=progress))
    assert scope.cancelled_caught
    for lock in ("lock", "backup.lock"):  # of a writer that does not answer, of another process that asks it
        with locked(Files(), journal / lock), trio.move_on_after(0.02) as scope:
            await trio.to_thread.run_sync(partial(export, journal, tmp_path / "rows.csv", timeout=1e9))
        assert scope.cancelled_caught
    assert {path.name for path in journal.iterdir()} <= before | {"backup.lock"}  # noqa: ASYNC240
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]  # noqa: ASYNC240


@pytest.mark.parametrize("kind", ["create", "write", "fdatasync", "rename"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_a_full_disk_leaves_nothing(kind: str, suffix: str) -> None:
    disk = SimulatedDisk()
    with surrounded(files=SimulatedFiles(disk)):
        fill("/journal", 4)

    def happens(call: Call) -> Fault | None:
        return Fault(error=errno.ENOSPC) if call.kind == kind and call.path.startswith("/rows") else None

    with surrounded(files=SimulatedFiles(disk, faults=happens)), pytest.raises(JournalFull, match="the disk is full"):
        export("/journal", f"/rows.{suffix}")
    assert not [name for name in SimulatedFiles(disk).names("/") if name.startswith("rows")]


def test_mistakes(journal: Path, tmp_path: Path) -> None:
    (tmp_path / "there.csv").touch()
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere")
    mistakes: list[tuple[Path, str, dict[str, Any], str]] = [
        (journal, "there.csv", {}, "there.csv is there. Nothing is overwritten"),
        (journal, "link.csv", {}, "link.csv is there. Nothing is overwritten"),
        (
            journal,
            "rows.xlsx",
            {},
            "the format of rows.xlsx is 'xlsx', wanted arrow, csv or parquet, as the end of its name",
        ),
        (journal, "rows", {}, "the format of rows is '', wanted"),
        (journal, "none/rows.csv", {}, "there is no folder .*none for rows.csv: make it first"),
        (tmp_path, "rows.csv", {}, "is not a journal: name a folder that has a ledger.sqlite"),
        (tmp_path / "nowhere", "rows.csv", {}, "is not a journal"),
        (journal, "rows.csv", {"partition": 2}, "the partition is 2, wanted 0 to 1"),
        (journal, "rows.csv", {"start": 5, "end": 4}, "the range is 5 to 4"),
        (journal, "rows.csv", {"start": -1}, "the range is -1 to None"),
        (journal, "rows.csv", {"events": True}, "this journal is not the log of a durable class"),
    ]
    for source, target, options, text in mistakes:
        with pytest.raises(ConfigurationError, match=text):
            export(source, tmp_path / target, **options)
    with Store.open(journal, None, CONFIG), pytest.raises(JournalLocked, match="did not answer"):
        export(journal, tmp_path / "rows.csv", timeout=0.01)
    next((journal / "partition-0001").glob("*.segment")).unlink()
    with pytest.raises(JournalDamaged):
        export(journal, tmp_path / "rows.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "link.csv", "there.csv"]


def test_a_format_that_cannot_hold_a_column(tmp_path: Path) -> None:
    schema = pa.schema([("span", pa.month_day_nano_interval())])
    with Store.open(tmp_path / "journal", schema) as store:
        store.append([(0, pa.record_batch([pa.array([(1, 2, 3)], schema.types[0])], schema=schema))])
    for suffix in ("parquet", "csv"):
        with pytest.raises(ConfigurationError, match=f"{suffix} cannot hold these columns"):
            export(tmp_path / "journal", tmp_path / f"rows.{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    assert export(tmp_path / "journal", tmp_path / "rows.feather").rows == 1


@message("export.deposit")
class Deposit(Asks[int]):
    amount: int


@message("export.deposited")
class Deposited:
    amount: int
    offset: str = "kept"


class Account(Durable[Deposit]):
    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount


async def test_the_events_of_durable_actors(tmp_path: Path) -> None:
    async with ActorSystem(ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=Deposited, journal=tmp_path / "accounts", shards=1)
        for amount in (5, 7):
            await accounts["anna"].ask(Deposit(amount), command=f"order-{amount}")
    await trio.to_thread.run_sync(partial(export, tmp_path / "accounts", tmp_path / "events.arrow", events=True))
    await trio.to_thread.run_sync(partial(export, tmp_path / "accounts", tmp_path / "log.arrow"))
    table = pyarrow.feather.read_table(tmp_path / "events.arrow")
    assert table.column_names == [
        "partition", "_offset", "entity", "sequence", "command", "time", "kind", "amount", "offset",
    ]  # fmt: skip
    assert [
        {name: row[name] for name in ("entity", "command", "kind", "amount", "offset")} for row in table.to_pylist()
    ] == [
        {"entity": "anna", "command": f"order-{n}", "kind": "export.deposited", "amount": n, "offset": "kept"}
        for n in (5, 7)
    ]
    log = pyarrow.feather.read_table(tmp_path / "log.arrow")
    assert log.num_rows > 2
    assert {"_reply", "_data"} <= {*log.column_names}
    kinds = dict(zip(log.column("_offset").to_pylist(), log.column("kind").to_pylist(), strict=True))
    assert [kinds[at] for at in table.column("_offset").to_pylist()] == ["export.deposited"] * 2
