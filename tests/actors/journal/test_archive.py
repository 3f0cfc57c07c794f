"""The archive of a log: rows are in it before they leave the log, whatever happens in between, and the two read as one table."""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
from tests.pace import every
from tests.surroundings import surrounded

from levada.actors.durable import log_columns, log_config
from levada.actors.durable.rows import BOOKKEEPING
from levada.actors.journal import EraseEntity, JournalError, JournalFull, OffsetGone, Store, TrimRows, backup
from levada.actors.journal import archive as archiving
from levada.actors.journal.archive import Archive, RemoteFiles, archived_rows
from levada.actors.journal.places import archive_place
from levada.actors.journal.still import still_store
from levada.framework import message
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import CHANGES, Call, Crashed, Fault, SimulatedDisk, SimulatedFiles

COLUMNS = pa.schema(
    [*BOOKKEEPING, pa.field("amount", pa.int64()), pa.field("tags", pa.list_(pa.field("element", pa.string())))]
)
ROWS = 60
Row = dict[str, Any]


def rows_from(first: int, count: int) -> list[Row]:
    """Rows of three entities and of the shard; now and then each has a snapshot, but carl. Their times are their offsets, in seconds."""
    found = []
    for offset in range(first, first + count):
        entity = ("anna", "bert", "carl", "")[offset % 4]
        is_snapshot = entity != "carl" and offset % 20 >= 16
        found.append(
            {"entity": entity, "sequence": offset, "time": offset * 1_000_000, "kind": "$snapshot" if is_snapshot else "test.put"}
            | {"_version": 1, "amount": offset, "tags": [f"tag {offset}"]}
        )  # fmt: skip
    return found


def append(store: Store, rows: list[Row], columns: pa.Schema = COLUMNS) -> None:
    for start in range(0, len(rows), 10):
        store.append([(0, pa.RecordBatch.from_pylist(rows[start : start + 10], columns))])


def trim(store: Store, archive: str, older: float = 1e6, *, forget: bool = False) -> int:
    async def here(function: Callable[[], Any]) -> Any:
        return function()

    m = TrimRows(0, older, archive=archive, forget_archive=forget)
    return sum(store.trim(0, trio.run(archived_rows, store, m, PLATFORM.get().files, here, here)))


def erase(store: Store, archive: str, entity: str) -> None:
    archived(archive).erase(still_store(store), 0, EraseEntity(entity, partition=0))
    for _ in store.erase(entity, partition=0):
        pass


def archived(place: str) -> Archive:
    return Archive.at(place, PLATFORM.get().files)


def amounts(batches: Any) -> list[tuple[int, int]]:
    return [
        (first + place, row["amount"])
        for first, batch in batches
        for place, row in enumerate(batch.to_pylist())
        if row["entity"]
    ]


def one_table(store: Store, archive: str) -> list[tuple[int, int]]:
    """The offset and the amount of each row of an entity, as a reader of both finds them."""
    whole = store.extent().whole[0]
    return amounts(archived(archive).rows(0, 0, whole, store.schema)) + amounts(store.batches(0, whole))


ALL = [(row["sequence"], row["amount"]) for row in rows_from(0, ROWS) if row["entity"]]


def test_what_leaves_the_log_is_in_plain_files(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        assert trim(store, place, older=0.0) == 0
        assert not (tmp_path / "archive").exists()
        before = {offset for offset, _ in ALL}
        assert trim(store, place, older=38.0) > 0
        left = {offset for offset, _ in amounts(store.batches(0, 0))}
        table = pyarrow.dataset.dataset(place).to_table()
        assert before - left <= set(table.column("_offset").to_pylist()) == {offset for offset in before if offset < 38}
        assert table.column("entity").to_pylist() == sorted(table.column("entity").to_pylist())
        assert set(table.column("_shard").to_pylist()) == {0}
        # Written elsewhere, with other packages, the mark of row 37 must be the same.
        marks = {pyarrow.parquet.read_schema(file).metadata[b"levada.last"] for file in Path(place).glob("*/*")}
        assert marks == {hashlib.blake2b(b"(37, 37000000, '$snapshot')", digest_size=8).hexdigest().encode()}
        assert one_table(store, place) == ALL
        append(store, rows_from(ROWS, 30))
        assert trim(store, place) > 0
        names = [path.name for path in sorted((tmp_path / "archive" / "shard-0").iterdir())]
        assert names == [f"{0:020}-{38:020}.parquet", f"{38:020}-{90:020}.parquet"]
        assert [each for each, _ in one_table(store, place)] == [each for each in range(90) if each % 4 != 3]


def test_files_and_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiving, "FILE_BYTES", 1000)
    monkeypatch.setattr(archiving, "PIECE_BYTES", 500)
    monkeypatch.setattr("levada.actors.journal.still.PAGE_ROWS", 10)
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
        files = archived(place).files(0)
        assert [(file.start, file.end) for file in files] == [(0, 20), (20, 40), (40, 60)]
        runs = [batch.num_rows for _, batch in archived(place).rows(0, 5, 58, store.schema)]
        assert 1 <= max(runs) <= 3
        assert amounts(archived(place).rows(0, 5, 58, store.schema)) == [each for each in ALL if 5 <= each[0] < 58]


def test_rows_with_fewer_columns_are_read_in_those_of_today(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
    grown = COLUMNS.append(pa.field("note", pa.string()))
    with Store.open(tmp_path / "log", grown, log_config(1)) as store:
        append(store, [row | {"note": "new"} for row in rows_from(ROWS, 40)], grown)
        trim(store, place)
        found = [
            row["note"]
            for _, batch in archived(place).rows(0, 0, store.extent().trimmed[0], grown)
            for row in batch.to_pylist()
        ]
        assert {*found[: len(ALL)]} == {None}
        assert {*found[len(ALL) :]} == {"new"}
        assert len(one_table(store, place)) == 75


@message("test.archive.place")
class Place:
    street: str
    number: int | None


@message("test.archive.moved")
class Moved:
    at: dt.datetime
    day: dt.date
    within: dt.timedelta
    price: Decimal
    data: bytes
    share: float
    places: list[Place]
    sizes: dict[str, int]
    place: Place | None


def test_all_kinds_of_columns_come_back_as_they_were(tmp_path: Path) -> None:
    columns, place = log_columns(Moved), {"street": "ä", "number": None}
    moved = {
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC), "day": dt.date(2026, 1, 2), "within": dt.timedelta(microseconds=3),
        "price": Decimal("1.5"), "data": b"\0", "share": 0.1, "places": [place, place], "sizes": {"a": 1}, "place": place,
    }  # fmt: skip
    rows = [
        {name: row[name] for name in ("entity", "sequence", "time", "kind", "_version")} | moved
        for row in rows_from(0, ROWS)
    ]
    with Store.open(tmp_path / "log", columns, log_config(1)) as store:
        append(store, rows, columns)
        there = [row for _, batch in store.batches(0, 0) for row in batch.to_pylist() if row["entity"]]
        trim(store, str(tmp_path / "archive"))
        batches = [batch for _, batch in archived(str(tmp_path / "archive")).rows(0, 0, ROWS, columns)]
        assert [row for batch in batches for row in batch.to_pylist()] == there
        assert all(batch.schema.equals(columns, check_metadata=True) for batch in batches)


def test_the_archive_of_another_log_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
    with Store.open(tmp_path / "short", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, 50))
        with pytest.raises(JournalError, match="row 59 of shard 0 is another one in the log, or missing"):
            trim(store, place)
        assert not store.extent().trimmed
    with Store.open(tmp_path / "other", COLUMNS, log_config(1)) as store:
        append(store, [row | {"sequence": row["sequence"] + 1} for row in rows_from(0, ROWS)])
        with pytest.raises(JournalError, match="the archive of another log"):
            trim(store, place)


@pytest.mark.parametrize(("later", "trimmed", "marked", "row"), [("carl", 59, True, 59), ("bert", 58, False, 58)])
def test_the_archive_of_another_log_is_refused_by_one_that_was_trimmed_up_to_the_row_that_is_compared(
    tmp_path: Path, later: str, trimmed: int, marked: bool, row: int
) -> None:
    """As a program trims that names no archive. Without a mark, as levada 0.2 wrote it, the newest row of an entity is compared."""
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
    if not marked:
        [file] = Path(place).glob("*/*")
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).replace_schema_metadata(), file)
    with Store.open(tmp_path / "other", COLUMNS, log_config(1)) as store:
        snapshot = rows_from(ROWS, 1)[0] | {"entity": later, "kind": "$snapshot"}
        for each in [*rows_from(0, ROWS), snapshot]:  # each in a block of its own, since blocks are trimmed
            append(store, [each | {"sequence": each["sequence"] + 1}])
        assert trim(store, "") > 0
        assert store.extent().trimmed == {0: trimmed}
        with pytest.raises(JournalError, match=f"row {row} of shard 0 is another one in the log, or missing"):
            trim(store, place)


def test_a_backup_from_before_the_archive_goes_on_with_it_only_if_it_has_all_its_rows(tmp_path: Path) -> None:
    log, place = tmp_path / "log", str(tmp_path / "archive")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, 40))
    backup(log, tmp_path / "early")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        append(store, rows_from(40, 20))
    backup(log, tmp_path / "late")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        trim(store, place, 30.0)
        trim(store, place, 60.0)
        assert one_table(store, place) == ALL
    with Store.open(tmp_path / "late", COLUMNS, log_config(1)) as store:
        assert not store.archives
        assert one_table(store, place) == ALL
        assert trim(store, place) > 0
        assert store.archives[0].end == ROWS
        assert one_table(store, place) == ALL
    files = {path: path.read_bytes() for path in Path(place).glob("*/*")}
    with Store.open(tmp_path / "early", COLUMNS, log_config(1)) as store:
        for change in (lambda: trim(store, place), lambda: erase(store, place, "anna")):
            with pytest.raises(JournalError, match="row 59 of shard 0 is another one in the log, or missing"):
                change()
        append(store, [row | {"amount": 7} | {"sequence": row["sequence"] + 1} for row in rows_from(40, ROWS)])
        for change in (lambda: trim(store, place), lambda: erase(store, place, "anna")):
            with pytest.raises(JournalError, match="row 59 of shard 0 is another one in the log, or missing"):
                change()
        assert {path: path.read_bytes() for path in Path(place).glob("*/*")} == files
        max(files).unlink()
        assert trim(store, place) > 0
        assert [amount for _, amount in one_table(store, place)] == [
            7 if each >= 40 else each for each in range(100) if each % 4 != 3
        ]


@pytest.mark.parametrize("last", ["", "carl"])
def test_a_backup_that_lacks_no_row_which_is_in_the_archive_is_refused_too(tmp_path: Path, last: str) -> None:
    """The archive ends where the shard had a row of its own, or a row that was erased; the log that went on from a backup has another one there."""
    log, place = tmp_path / "log", str(tmp_path / "archive")
    rows = rows_from(0, 59 if last else 60)
    assert rows[-1]["entity"] == last
    with Store.open(log, COLUMNS, log_config(1)) as store:
        append(store, rows[:-1])
    backup(log, tmp_path / "early")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        append(store, rows[-1:])
        assert trim(store, place) > 0
        if last:
            erase(store, place, last)
        append(store, rows_from(len(rows), 1))
        assert archived(place).start(still_store(store), 0) == len(rows)
    with Store.open(tmp_path / "early", COLUMNS, log_config(1)) as store:
        for more in ([], [rows[-1] | {"entity": "anna", "sequence": 99}]):
            append(store, more)
            for change in (lambda: trim(store, place), lambda: erase(store, place, "anna")):
                with pytest.raises(JournalError, match=f"row {len(rows) - 1} of shard 0 is another one in the log, or"):
                    change()


def test_a_backup_from_before_the_first_file_remembers_the_archive(tmp_path: Path) -> None:
    log, place = tmp_path / "log", str(tmp_path / "archive")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        assert trim(store, place, 0.0) == 0
        assert not Path(place).exists()
    backup(log, tmp_path / "early")
    with Store.open(log, COLUMNS, log_config(1)) as store:
        assert trim(store, place) > 0
    with Store.open(tmp_path / "early", COLUMNS, log_config(1)) as store:
        with pytest.raises(JournalError, match=r"shard 0 has old rows in the archive .*archive, and it is not named"):
            trim(store, "")
        assert trim(store, place) > 0
        assert one_table(store, place) == ALL


def test_a_log_does_not_remember_an_archive_that_is_not_its_own(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
    with Store.open(tmp_path / "other", COLUMNS, log_config(1)) as store:
        with pytest.raises(JournalError, match="the archive of another log"):
            trim(store, place, 0.0)
        assert not store.archives


def test_another_log_is_told_from_an_archive_whose_newest_file_is_empty(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place)
    [file] = Path(place).glob("*/*")  # the next one had rows of an erased entity
    empty = pyarrow.parquet.read_table(file).slice(0, 0).replace_schema_metadata()  # as levada 0.2 wrote it
    pyarrow.parquet.write_table(empty, file.with_name(f"{60:020}-{80:020}.parquet"))
    with Store.open(tmp_path / "other", COLUMNS, log_config(1)) as store:
        append(store, [row | {"sequence": row["sequence"] + 1} for row in rows_from(0, 2 * ROWS)])
        with pytest.raises(JournalError, match="row 58 of shard 0 is another one in the log, or missing"):
            trim(store, place)


@pytest.mark.parametrize(("log", "place"), [("log", "log"), ("log", "log/old"), ("all/log", "all")])
@pytest.mark.parametrize("as_url", [False, True])
def test_log_and_archive_are_beside_each_other(tmp_path: Path, log: str, place: str, as_url: bool) -> None:
    where = (tmp_path / place).as_uri() if as_url else str(tmp_path / place)
    with Store.open(tmp_path / log, COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        with pytest.raises(JournalError, match=r"is inside its (log|archive) .*: name a folder elsewhere"):
            trim(store, where)
        assert not store.archives
        assert not store.extent().trimmed
        (tmp_path / "link").symlink_to(tmp_path / place)
        with pytest.raises(JournalError, match="name a folder elsewhere"):
            trim(store, str(tmp_path / "link"))
        assert trim(store, str(tmp_path / (log + "-archive"))) > 0


def test_rows_that_were_trimmed_without_the_archive_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        assert trim(store, "") > 0
        gone = store.extent().trimmed[0]
        append(store, rows_from(ROWS, 40))
        trim(store, place)
        assert f"rows 0 to {gone - 1} of shard 0 were trimmed without this archive" in caplog.text
        assert archived(place).first(0, store.extent().trimmed[0]) == gone
        assert archived(place).first(0, gone) == gone
        with pytest.raises(OffsetGone, match="row 0 of shard 0 is neither in the log nor in its archive"):
            one_table(store, place)


def test_a_log_remembers_its_archive(tmp_path: Path) -> None:
    place, other = tmp_path / "archive", tmp_path / "other"
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        assert trim(store, str(place)) > 0
        left = store.extent().trimmed
        place.rename(other)
        assert trim(store, str(place)) == 0  # with nothing to write it is not looked for
        other.rename(place)
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(ROWS, 40))
        with pytest.raises(JournalError, match=r"shard 0 has old rows in the archive .*archive, and it is not named"):
            trim(store, "")
        for change in (lambda: trim(store, str(other)), lambda: erase(store, str(other), "anna")):
            with pytest.raises(JournalError, match=r"are archived up to 59, in .* and the files here end before row 0"):
                change()
        assert store.extent().trimmed == left
        assert not other.exists()
        place.rename(other)
        assert trim(store, str(other)) > 0
        assert [each for each, _ in one_table(store, str(other))] == [each for each in range(100) if each % 4 != 3]
        append(store, rows_from(100, 40))
        assert trim(store, "", forget=True) > 0
        append(store, rows_from(140, 40))
        assert trim(store, "") > 0
        append(store, rows_from(180, 40))
        assert trim(store, str(tmp_path / "new"), forget=True) > 0
        with pytest.raises(JournalError, match="is not named"):
            trim(store, "")


def test_an_erased_entity_is_in_no_file(tmp_path: Path) -> None:
    place = str(tmp_path / "archive")
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, place, 30.0)
        trim(store, place)
        archived(place).erase(still_store(store), 0, EraseEntity("anna", partition=0, before=20))
        assert [offset for offset, _ in one_table(store, place) if offset % 4 == 0] == [*range(20, 60, 4)]
        erase(store, place, "anna")
        assert one_table(store, place) == [each for each in ALL if each[0] % 4]
        assert "anna" not in pyarrow.dataset.dataset(place).to_table().column("entity").to_pylist()
        for entity in ("bert", "carl"):
            erase(store, place, entity)
        assert one_table(store, place) == []
        assert archived(place).first(0, store.extent().trimmed[0]) == 0


def test_another_file_system(tmp_path: Path) -> None:
    local = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    archive = Archive(RemoteFiles(local, "bucket/accounts", "x://bucket/accounts"))
    assert archive.files(0) == []
    with Store.open(tmp_path / "log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, (tmp_path / "bucket" / "accounts").as_uri())  # the same files
        assert amounts(archive.rows(0, 0, 60, COLUMNS)) == ALL
        archive.erase(still_store(store), 0, EraseEntity("anna", partition=0))
        assert amounts(archive.rows(0, 0, 60, COLUMNS)) == [each for each in ALL if each[0] % 4]
    (tmp_path / "bucket" / "accounts" / "shard-0" / f"{0:020}-{60:020}.parquet").write_bytes(b"PAR1")
    with pytest.raises(JournalError, match="is out of reach"):
        list(archive.rows(0, 0, 60, COLUMNS))
    with pytest.raises(JournalError, match="a folder, or a URL that Arrow knows"):
        archived("nothing://bucket")
    with pytest.raises(JournalError, match="would be in memory"):
        archived("mock://bucket")


def test_the_text_of_an_archive_that_is_out_of_reach_is_short() -> None:
    class Away:
        def get_file_info(self, _: Any) -> Any:
            raise OSError("no library\nin " + "here, " * 5000)

    away: Any = Away()
    with pytest.raises(JournalError, match=r"out of reach: no library in here, .*…$") as caught:
        Archive(RemoteFiles(away, "x", "s3://x")).files(0)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("place", "reached"),
    [
        ("gs://bucket/a", "gs://bucket/a?retry_limit_seconds=10"),
        ("gs://bucket/a?scheme=http", "gs://bucket/a?scheme=http&retry_limit_seconds=10"),
        ("gs://bucket/a?retry_limit_seconds=60", "gs://bucket/a?retry_limit_seconds=60"),
        ("s3://bucket/a?region=x", "s3://bucket/a?region=x"),
    ],
)
def test_no_archive_is_waited_for_without_end(place: str, reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def from_uri(uri: str) -> Any:
        asked.append(uri)
        raise OSError("away")

    monkeypatch.setattr(archiving, "_from_uri", from_uri)
    with pytest.raises(JournalError, match="out of reach: away"):
        archived(place)
    assert asked == [reached]


@pytest.mark.parametrize("place", ["s3://key:secret@bucket/accounts", "", "a\udc80", "~/archive", "s3:/bucket"])
def test_places_that_are_refused(place: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        archive_place(place)
    assert "secret" not in str(caught.value)


def full(disk: SimulatedDisk) -> Store:
    """A log with two files in its archive, and more to come."""
    with surrounded(files=SimulatedFiles(disk)), Store.open("/log", COLUMNS, log_config(1)) as store:
        append(store, rows_from(0, ROWS))
        trim(store, "/archive", 20.0)
        trim(store, "/archive", 40.0)
    return store


def test_a_full_disk_keeps_the_rows_in_the_log() -> None:
    for kind in ("create", "write", "fdatasync", "rename"):
        disk = SimulatedDisk()
        full(disk)

        def happens(call: Call, kind: str = kind) -> Fault | None:
            return Fault(error=errno.ENOSPC) if call.kind == kind and call.path.startswith("/archive") else None

        with (
            surrounded(files=SimulatedFiles(disk, faults=happens)),
            Store.open("/log", None, log_config(1)) as store,
        ):
            before = store.extent()
            with pytest.raises(JournalFull, match=r"the disk is full.*make room"):
                trim(store, "/archive")
            assert store.extent().trimmed == before.trimmed
            assert one_table(store, "/archive") == ALL
        with surrounded(files=SimulatedFiles(disk)), Store.open("/log", None, log_config(1)) as store:
            assert trim(store, "/archive") > 0
            assert one_table(store, "/archive") == ALL


@pytest.mark.ci
@pytest.mark.parametrize("erases", [False, True])
def test_a_crash_at_any_call_leaves_each_row_in_the_log_or_in_the_archive(erases: bool) -> None:
    tried, finished = 1, False
    while not finished:
        tried += every(7)
        disk, calls, opened = SimulatedDisk("lax"), list[Call](), list[Store]()
        full(disk)

        def happens(
            call: Call, calls: list[Call] = calls, count: int = tried, opened: list[Store] = opened
        ) -> Fault | None:
            if opened and call.kind in CHANGES:
                calls.append(call)
            return Fault(crash=True, done=count % 2) if len(calls) == count else None

        with suppress(Crashed), surrounded(files=SimulatedFiles(disk, faults=happens)):
            store = Store.open("/log", None, log_config(1))
            opened.append(store)
            if erases:
                erase(store, "/archive", "bert")
            trim(store, "/archive")
            finished = True
        disk.power_failure(tried)
        with surrounded(files=SimulatedFiles(disk)), Store.open("/log", None, log_config(1)) as store:
            assert store.archives[0].end <= archived("/archive").files(0)[-1].end
            others = [each for each in ALL if each[0] % 4 != 1]
            found = one_table(store, "/archive")
            assert [each for each in found if each[0] % 4 != 1] == others
            assert erases or found == ALL
            if erases:
                if amounts(store.batches(0, 0)) and not any(
                    offset % 4 == 1 for offset, _ in amounts(store.batches(0, 0))
                ):
                    assert found == others  # what is gone from the log is gone from both
                erase(store, "/archive", "bert")
                found = others
            trim(store, "/archive")
            assert one_table(store, "/archive") == found
    assert tried > 25


@pytest.mark.parametrize("erases", [False, True])
def test_a_file_whose_name_is_only_in_memory_holds_nothing_that_the_log_has_lost(erases: bool) -> None:
    """A process is killed between the name of a file and its sync; the next one goes on from that file, and then the power fails."""
    disk, opened = SimulatedDisk("lax"), list[Store]()
    full(disk)

    def happens(call: Call) -> Fault | None:
        last = 2 if erases else 1
        is_last = call.kind == "fsync" and call.path == "/archive/shard-0" and call.count == last
        return Fault(crash=True) if opened and is_last else None

    with suppress(Crashed), surrounded(files=SimulatedFiles(disk, faults=happens)):
        opened.append(Store.open("/log", None, log_config(1)))
        if erases:
            erase(opened[0], "/archive", "bert")
        trim(opened[0], "/archive")
    with surrounded(files=SimulatedFiles(disk)), Store.open("/log", None, log_config(1)) as store:
        if erases:
            erase(store, "/archive", "bert")
        else:
            assert trim(store, "/archive") > 0
    disk.power_failure(0, share=0.0)
    with surrounded(files=SimulatedFiles(disk)), Store.open("/log", None, log_config(1)) as store:
        assert one_table(store, "/archive") == [each for each in ALL if not erases or each[0] % 4 != 1]


@pytest.mark.ci
def test_rows_that_were_never_synced_are_on_the_disk_before_the_archive_has_them() -> None:
    """With ``sync="never"`` a power failure takes rows of the log: none that are archived, or its next rows would be other ones."""
    config, more = attrs.evolve(log_config(1), sync="never"), rows_from(ROWS, 20)
    known = [each for each in ALL if each[0] < ROWS] + [
        (row["sequence"], row["amount"]) for row in more if row["entity"]
    ]
    tried, finished, lost = 1, False, 0
    while not finished:
        disk, calls, opened = SimulatedDisk("lax"), list[Call](), list[Store]()
        full(disk)

        def happens(
            call: Call, calls: list[Call] = calls, count: int = tried, opened: list[Store] = opened
        ) -> Fault | None:
            if opened and call.kind in CHANGES:
                calls.append(call)
            return Fault(crash=True, done=count % 2) if len(calls) == count else None

        with suppress(Crashed), surrounded(files=SimulatedFiles(disk, faults=happens)):
            store = Store.open("/log", None, config)
            append(store, more)
            opened.append(store)
            trim(store, "/archive")
            finished = True
        disk.power_failure(tried, share=0.0)
        with surrounded(files=SimulatedFiles(disk)), Store.open("/log", None, config) as store:
            end = store.extent().end[0]
            lost += end < ROWS + 20
            assert archived("/archive").files(0)[-1].end <= end
            assert store.archives[0].end <= end
            found = one_table(store, "/archive")
            assert found == [each for each in known if each[0] < end]
            others = [row | {"amount": -row["amount"]} for row in rows_from(end, 20)]
            append(store, others)
            trim(store, "/archive")
            assert one_table(store, "/archive") == found + [
                (row["sequence"], row["amount"]) for row in others if row["entity"]
            ]
        tried += 1 if tried < 12 else every(7)
    assert tried > 12
    assert lost > 0
