"""Opening a journal: what an earlier process left in memory is brought to the disk, first starts are finished, and nothing starts anew over rows."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Appended,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    SchemaMismatch,
    Store,
    backup,
    restore,
)
from levada.actors.journal.ends import Ends, PromisedEnds  # noqa: E402
from levada.actors.journal.ledger import Ledger  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.platform import REAL, Platform  # noqa: E402

SCHEMA = pa.schema([("n", pa.int64())])
CONFIG = JournalConfig(partitions=2)
LEDGER = "ledger.sqlite"


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def numbers(store: Store, partition: int = 0) -> list[int]:
    return [n for _, batch in store.batches(partition, 0) for n in batch["n"].to_pylist()]


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def killed(directory: Path, target: Path) -> Path:
    """Copy a journal that is open, as a process leaves it that is killed."""
    return Path(shutil.copytree(directory, target))


class Calls:
    """Writes and syncs of files and folders, by their path below a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.synced: list[str] = []
        self.unsynced: dict[str, dict[int, bytes]] = {}
        """What was written since the file was synced, by position."""
        self.written: dict[str, dict[int, bytes]] = {}
        """What had been written when the file was synced."""
        writing, folder = REAL.files.pwritev, folder.resolve()

        def write(descriptor: int, parts: Any, at: int) -> int:
            done = writing(descriptor, parts, at)
            if path_of(descriptor).is_relative_to(folder):
                octets = b"".join(bytes(part) for part in parts)[:done]
                self.unsynced.setdefault(str(path_of(descriptor).relative_to(folder)), {})[at] = octets
            return done

        monkeypatch.setattr(REAL.files, "pwritev", write)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(REAL.files, name, self._recorded(getattr(REAL.files, name), folder))

    def _recorded(self, real: Any, folder: Path) -> Any:
        def sync(descriptor: int) -> None:
            real(descriptor)
            if path_of(descriptor).is_relative_to(folder):
                path = str(path_of(descriptor).relative_to(folder))
                self.synced.append(path)
                self.written.setdefault(path, {}).update(self.unsynced.pop(path, {}))

        return sync


# ---------------------------------------------------------------- what was in memory


FIRST = "00000000000000000000.segment"


def test_rows_that_no_promise_covers_are_written_anew_before_they_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync of them may have failed. The system then has them in memory, and takes them for written."""
    with Store.open(tmp_path / "a", SCHEMA, CONFIG) as store:
        store.append([(0, rows(*range(20_000))), (1, rows(1))])
        promised = store.directory / "partition-0000" / FIRST
        start = promised.stat().st_size
        shutil.copy(tmp_path / "a" / "ends", tmp_path / "ends")
        store.append([(0, rows(*range(20_000)))])
        killed(tmp_path / "a", tmp_path / "b")
    shutil.copy(tmp_path / "ends", tmp_path / "b" / "ends")
    calls = Calls(monkeypatch, tmp_path / "b")
    with Store.open(tmp_path / "b", SCHEMA, CONFIG) as store:
        assert store.extent().end == {0: 40_000, 1: 1}
        octets = (tmp_path / "b" / "partition-0000" / FIRST).read_bytes()
        assert calls.written[f"partition-0000/{FIRST}"] == {start: octets[start:]}
        assert calls.written[f"partition-0001/{FIRST}"] == {}
        assert {"partition-0000", "partition-0001", f"partition-0001/{FIRST}"} <= set(calls.synced)


def test_a_journal_that_was_closed_in_order_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(1)), (1, rows(2))])
        assert not Ends.read(REAL.files, tmp_path / "ends").closed
    assert Ends.read(REAL.files, tmp_path / "ends").closed
    calls = Calls(monkeypatch, tmp_path)
    with Store.open(tmp_path, SCHEMA, CONFIG):
        assert [path for path in calls.synced if "partition" in path] == []
        assert not Ends.read(REAL.files, tmp_path / "ends").closed


def test_a_journal_that_was_closed_after_a_failed_sync_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows were cut off in memory. On the disk they may be there still."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(1))])
        with monkeypatch.context() as patch:

            def refuse(_: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(REAL.files, "fdatasync", refuse)
            with pytest.raises(JournalUnwritable):
                store.append([(0, rows(2))])
    assert not Ends.read(REAL.files, tmp_path / "ends").closed
    calls = Calls(monkeypatch, tmp_path)
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert f"partition-0000/{FIRST}" in calls.synced
        assert numbers(store) == [1]


def test_the_mark_of_a_closed_journal_counts_for_the_copy_that_it_was_written_with(tmp_path: Path) -> None:
    """A power failure may bring the sector of the mark to the disk, and not that of the copy."""
    promise = PromisedEnds(bytes(16), [0], [5], 1)
    ends = Ends.create(REAL, tmp_path / "ends", promise)
    before = (tmp_path / "ends").read_bytes()
    ends.finish(1)
    ends.close()
    behind = (tmp_path / "ends").read_bytes()
    assert Ends.read(REAL.files, tmp_path / "ends") == attrs.evolve(promise, closed=True)
    at = behind.index(b"shut")
    copy = before[:at] + behind[at : len(behind) // 2]
    (tmp_path / "ends").write_bytes(copy + before[len(before) // 2 :][:at] + behind[len(behind) // 2 + at :])
    assert Ends.read(REAL.files, tmp_path / "ends") == promise


def test_a_record_of_ends_of_another_journal_says_nothing_about_how_this_one_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        with Store.open(tmp_path / name, SCHEMA, CONFIG) as store:
            store.append([(0, rows(1))])
    shutil.copy(tmp_path / "b" / "ends", tmp_path / "a" / "ends")
    calls = Calls(monkeypatch, tmp_path / "a")
    with Store.open(tmp_path / "a", SCHEMA, attrs.evolve(CONFIG, accept_loss=True)) as store:
        assert f"partition-0000/{FIRST}" in calls.synced
        assert numbers(store) == [1]


def test_commits_of_the_ledger_that_a_killed_process_left_are_written_anew(tmp_path: Path) -> None:
    """Into the database: the sync of the log may have failed."""
    with Store.open(tmp_path / "a", SCHEMA, CONFIG) as store:
        store.declare_group("g")
        killed(tmp_path / "a", tmp_path / "b")
    groups = "SELECT count(*) FROM groups"
    for directory, wanted in ((tmp_path / "b", 0), (tmp_path / "b", 2)):
        alone = Path(shutil.copy(directory / LEDGER, tmp_path / "alone.sqlite"))
        with closing(sqlite3.connect(alone)) as connection:
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
            assert (connection.execute(groups).fetchone()[0] if tables else 0) == wanted
        if not wanted:
            store = Store.open(directory, SCHEMA, CONFIG)
    assert store.groups() == {"g": {0: 0, 1: 0}}
    store.close()


def test_the_names_of_a_new_journal_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure takes the whole journal, and the next start makes an empty one."""
    calls = Calls(monkeypatch, tmp_path)
    with Store.open(tmp_path / "x" / "y" / "z", SCHEMA, CONFIG) as store:
        assert {".", "x", "x/y", "x/y/z", "x/y/z/partition-0000", "x/y/z/partition-0001"} <= set(calls.synced)
        store.append([(0, rows(1))])


def test_the_folder_of_a_start_that_was_killed_is_synced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal").mkdir()
    calls = Calls(monkeypatch, tmp_path)
    with Store.open(tmp_path / "journal", SCHEMA, CONFIG):
        assert "." in calls.synced


def test_a_journal_may_be_made_in_a_folder_that_its_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name cannot be synced there."""
    real = os.open

    def refuse(path: Any, flags: int, *mode: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode)

    monkeypatch.setattr(REAL.files, "open", refuse)
    with Store.open(tmp_path / "journal", SCHEMA, CONFIG) as store:
        assert store.append([(0, rows(1))]) == [Appended(0, 0, 1)]


@pytest.mark.parametrize("call", ["mkdir", "open"])
@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (errno.EACCES, JournalUnwritable, "see whether this user may write there"),
        (errno.EROFS, JournalUnwritable, "Read-only file system"),
        (errno.ENOSPC, JournalFull, "make room on it"),
    ],
)
def test_a_folder_that_cannot_be_written_is_an_error_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[JournalError], text: str
) -> None:
    real = getattr(os, call)

    def refuse(path: Any, *arguments: Any) -> Any:
        if tmp_path / "journal" in (Path(path), Path(path).parent):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments)

    monkeypatch.setattr(REAL.files, call, refuse)
    with pytest.raises(error, match=text) as caught:
        Store.open(tmp_path / "journal", SCHEMA, CONFIG)
    assert caught.value.path == str(tmp_path / "journal")


# ---------------------------------------------------------------- first starts


def hot_journal(directory: Path) -> None:
    """Leave the rollback journal of a change that was cut short."""
    with closing(sqlite3.connect(directory / LEDGER, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,) for _ in range(100)])
        for name in (LEDGER, LEDGER + "-journal"):
            shutil.copy(directory / name, directory / f"{name}-kept")
        connection.execute("ROLLBACK")
    for name in (LEDGER, LEDGER + "-journal"):
        (directory / f"{name}-kept").rename(directory / name)


def torn(directory: Path) -> None:
    """Leave a ledger of which the first bytes came to the disk."""
    (directory / LEDGER).write_bytes(b"SQLite format 3\0" + bytes(100))


def zeros(directory: Path) -> None:
    """Leave a ledger that has its size and no content."""
    (directory / LEDGER).write_bytes(bytes(8192))


def empty(directory: Path) -> None:
    """Leave a ledger that has its name only."""
    (directory / LEDGER).write_bytes(b"")


def empty_with_log(directory: Path) -> None:
    """Leave a ledger that has its name only, and a log of zeros."""
    empty(directory)
    (directory / f"{LEDGER}-wal").write_bytes(bytes(5000))


def gone(directory: Path) -> None:
    """Leave no ledger."""
    (directory / LEDGER).unlink(missing_ok=True)


LEFT = pytest.mark.parametrize("leave", [hot_journal, torn, zeros, empty, empty_with_log, gone])


@LEFT
@pytest.mark.parametrize("segments", [False, True])
def test_what_a_first_start_left_that_answered_nothing_is_made_anew(tmp_path: Path, leave: Any, segments: bool) -> None:
    if segments:
        Store.open(tmp_path, SCHEMA, CONFIG).close()
        (tmp_path / "ends").unlink()
        gone(tmp_path)
    leave(tmp_path)
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert store.append([(0, rows(1)), (1, rows(2))]) == [Appended(0, 0, 1), Appended(1, 0, 1)]
    with Store.open(tmp_path, None, CONFIG) as store:
        assert (numbers(store, 0), numbers(store, 1)) == ([1], [2])


def test_a_ledger_that_had_tables_is_not_replaced_even_if_all_else_is_gone(tmp_path: Path) -> None:
    """Such as one that was damaged, or a database of another program."""
    Store.open(tmp_path / "whole", SCHEMA, CONFIG).close()
    whole = (tmp_path / "whole" / LEDGER).read_bytes()
    with closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.commit()
    damaged = whole[:5000] + bytes(len(whole) - 5000)
    for number, (left, text) in enumerate(
        [
            (b"garbage" * 1000, "file is not a database"),
            (b"a letter", "file is not a database"),
            (damaged, "damaged|malformed"),
            (whole[:8192], "malformed"),
            ((tmp_path / "other").read_bytes(), "no such table: facts"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / LEDGER).write_bytes(left)
        for _ in range(2):
            with pytest.raises(JournalDamaged, match=text) as caught:
                Store.open(folder, SCHEMA, CONFIG)
            assert caught.value.path == str(folder / LEDGER)
            assert (folder / LEDGER).read_bytes() == left


def test_no_journal_is_made_for_columns_that_none_keeps(tmp_path: Path) -> None:
    twice = pa.schema([("n", pa.int64()), ("n", pa.int64())])
    with pytest.raises(ConfigurationError, match="each column has a name of its own: n, n"):
        Store.open(tmp_path, twice, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_journal_has_no_open_files_and_no_threads(tmp_path: Path) -> None:
    def ours() -> tuple[list[str], list[str]]:
        with os.scandir("/proc/self/fd") as found:
            open_files = [path for each in found if (path := os.path.realpath(each.path)).startswith(str(tmp_path))]
        return open_files, [each.name for each in threading.enumerate() if each.name.startswith("levada-sync")]

    with Store.open(tmp_path, SCHEMA, JournalConfig(partitions=2)) as store:
        store.append([(0, rows(1)), (1, rows(2))])
        store.stage("q", 0, 0, 1).append(rows(3))
        open_files, threads = ours()
        assert len(open_files) > 3
        assert threads
    assert ours() == ([], [])


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a letter")
    for path in (tmp_path / "file", tmp_path / "file" / "journal"):
        with pytest.raises(ConfigurationError, match=f"{path} is no folder: it is a file, or inside one"):
            Store.open(path, SCHEMA, CONFIG)
    assert (tmp_path / "file").read_text() == "a letter"


@LEFT
@pytest.mark.parametrize("ends", ["there", "empty", "gone"])
@pytest.mark.parametrize("accept_loss", [False, True])
def test_no_journal_is_made_over_another_one(tmp_path: Path, leave: Any, ends: str, accept_loss: bool) -> None:
    """Not even if its loss is accepted: only the ledger knows which batches were delivered."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(1))])
    ledger, record = (tmp_path / LEDGER).read_bytes(), (tmp_path / "ends").read_bytes()
    if ends == "empty":
        (tmp_path / "ends").write_bytes(b"")
    elif ends == "gone":
        (tmp_path / "ends").unlink()
    gone(tmp_path)
    leave(tmp_path)
    there = (tmp_path / LEDGER).exists()
    with pytest.raises(JournalError) as caught:
        Store.open(tmp_path, SCHEMA, attrs.evolve(CONFIG, accept_loss=accept_loss))
    assert caught.value.path == str(tmp_path / LEDGER)
    assert (tmp_path / LEDGER).exists() == there
    for path in tmp_path.glob(f"{LEDGER}*"):
        path.unlink()
    (tmp_path / LEDGER).write_bytes(ledger)
    (tmp_path / "ends").write_bytes(record)
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert numbers(store) == [1]
        assert store.append([(0, rows(2))]) == [Appended(0, 1, 1)]


def test_a_rollback_journal_that_a_power_failure_brought_back_undoes_no_ledger(tmp_path: Path) -> None:
    """It is of the first change of all, so SQLite would leave an empty database."""
    Store.open(tmp_path / "a", SCHEMA, CONFIG).close()
    (tmp_path / "a" / "ends").unlink()
    (tmp_path / "b").mkdir()
    with closing(sqlite3.connect(tmp_path / "b" / LEDGER, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,) for _ in range(100)])
        shutil.copy(tmp_path / "b" / f"{LEDGER}-journal", tmp_path / "a" / f"{LEDGER}-journal")
    with Store.open(tmp_path / "a", SCHEMA, CONFIG) as store:
        assert store.append([(0, rows(1))]) == [Appended(0, 0, 1)]


def test_no_journal_is_made_over_one_whose_rows_were_all_deleted(tmp_path: Path) -> None:
    """Its offsets were given."""
    config = JournalConfig(retain_bytes=None, segment_time=10.0)
    clock = [1e9]
    with Store.open(tmp_path, SCHEMA, config, clock=lambda: clock[0]) as store:
        store.declare_group("g")
        store.append([(0, rows(1, 2, 3))])
        clock[0] += 60
        store.commit_group("g", {0: 3})
        assert store.extent().first == {0: 3}
    (tmp_path / "ends").unlink()
    gone(tmp_path)
    with pytest.raises(JournalDamaged, match="its ledger is gone"):
        Store.open(tmp_path, SCHEMA, attrs.evolve(config, accept_loss=True))


def test_no_journal_is_made_over_an_empty_one_that_has_answered(tmp_path: Path) -> None:
    """Its groups are answers."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.declare_group("g")
    empty(tmp_path)
    with pytest.raises(JournalDamaged, match="the ledger is empty: restore it"):
        Store.open(tmp_path, SCHEMA, attrs.evolve(CONFIG, accept_loss=True))


@pytest.mark.parametrize("name", ["staging", "partition-0000", "other/deep"])
def test_no_journal_is_made_inside_another_one(tmp_path: Path, name: str) -> None:
    """Each would take files of the other for its own: what is in the folder of staged rows is deleted, and others are left over."""
    Store.open(tmp_path / "log", SCHEMA, CONFIG).close()
    Store.open(tmp_path / "copied", SCHEMA, CONFIG).close()
    inside = tmp_path / "log" / name
    with pytest.raises(ConfigurationError, match=r"is inside the journal .*log: name a folder elsewhere"):
        Store.open(inside, SCHEMA, CONFIG)
    with pytest.raises(ConfigurationError, match="is inside the journal"):
        backup(tmp_path / "copied", inside)
    with pytest.raises(ConfigurationError, match="is inside the journal"):
        restore(tmp_path / "copied", inside)
    assert not (tmp_path / "log" / "other").exists()
    Store.open(tmp_path / "log", SCHEMA, CONFIG).close()


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_ledger_of_before_the_first_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_loss: bool
) -> None:
    """It would take the rows of the first batch for a delivery that was cut short."""
    real = Ends.create

    def create(platform: Platform, path: Path, promise: Any) -> Any:
        shutil.copy(tmp_path / "a" / LEDGER, tmp_path / LEDGER)
        shutil.copy(tmp_path / "a" / f"{LEDGER}-wal", tmp_path / f"{LEDGER}-wal")
        return real(platform, path, promise)

    with monkeypatch.context() as patch:
        patch.setattr(Ends, "create", create)
        store = Store.open(tmp_path / "a", SCHEMA, CONFIG)
    with store:
        store.deliver("q", 1, ((0, message) for message in store.pack([rows(1, 2)])))
    for name in (LEDGER, f"{LEDGER}-wal"):
        shutil.copy(tmp_path / name, tmp_path / "a" / name)
    (tmp_path / "a" / "ends").unlink()
    with pytest.raises(JournalDamaged, match="the ledger is older than all rows"):
        Store.open(tmp_path / "a", SCHEMA, attrs.evolve(CONFIG, accept_loss=accept_loss))


# ---------------------------------------------------------------- clocks

HOUR = 3600.0
AGED = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None, retain_time=1000.0)


@pytest.mark.parametrize(
    ("later", "settle", "kept"), [(24 * HOUR, 600.0, True), (24 * HOUR, 0.0, False), (1200.0, 600.0, False)]
)
def test_nothing_is_deleted_for_its_age_right_after_an_opening_far_behind_the_newest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float, settle: float, kept: bool
) -> None:
    """The clock may be wrong, and what was deleted does not come back."""
    monkeypatch.setattr("levada.actors.journal.retention.SETTLE", settle)
    with Store.open(tmp_path, SCHEMA, AGED, clock=lambda: 1e9) as store:
        for n in range(0, 1000, 50):
            store.append([(0, rows(*range(n, n + 50)))])
        count = store.statistics().segments
    assert count > 3
    with Store.open(tmp_path, SCHEMA, AGED, clock=lambda: 1e9 + later) as store:
        store.retain()
        assert store.statistics().segments == (count if kept else 1)


@pytest.mark.parametrize(("size", "files"), [(1, 2), (5000, 1)])
def test_many_blocks_are_merged_at_an_opening_if_they_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, files: int
) -> None:
    """A segment of large blocks goes on."""
    monkeypatch.setattr("levada.actors.journal.recovery.MERGE_AT_OPENING", 64)
    schema = pa.schema([("text", pa.string())])
    config = JournalConfig(sync="never")
    with Store.open(tmp_path, schema, config) as store:
        for n in range(64):
            store.append([(0, pa.record_batch([pa.array([f"{n} ".ljust(size, "x")])], schema=schema))])
    blocks = next(tmp_path.glob("partition-*/*.segment")).read_bytes().count(b"LvB1")
    for _ in range(2):
        with Store.open(tmp_path, schema, config) as store:
            found = [int(text.split()[0]) for _, batch in store.batches(0, 0) for text in batch["text"].to_pylist()]
            assert found == list(range(64))
    segments = sorted(tmp_path.glob("partition-*/*.segment"))
    assert len(segments) == files
    assert (segments[0].read_bytes().count(b"LvB1") < blocks) == (files == 2)


def commits(directory: Path) -> int:
    ledger = Ledger.open(REAL, directory / "ledger.sqlite", partitions=CONFIG.partitions)
    ledger.close()
    return ledger.commits


def test_a_trial_is_no_opening(tmp_path: Path) -> None:
    more = SCHEMA.append(pa.field("m", pa.int64()))
    openings = []
    for wanted in [SCHEMA, SCHEMA, None, more]:
        columns = SCHEMA if wanted is None else wanted
        assert Store.try_to_open(tmp_path, wanted, CONFIG) == columns
        before = commits(tmp_path)
        assert (
            Store.try_to_open(tmp_path, None, CONFIG) == columns
        )  # those of the first one, also if nothing was ever written
        assert commits(tmp_path) == before
        with Store.open(tmp_path, wanted, CONFIG) as store:
            openings.append(store.extent().opening)
            with pytest.raises(JournalLocked):
                Store.try_to_open(tmp_path, wanted, CONFIG)
            row = pa.record_batch([pa.array([len(openings)])] * len(columns), schema=columns)
            store.append([(0, row)])
    assert [opening.partition("-")[0] for opening in openings] == ["1", "2", "3", "4"]
    with pytest.raises(SchemaMismatch):
        Store.try_to_open(tmp_path, SCHEMA, CONFIG)
    with Store.open(tmp_path, None, CONFIG) as store:
        assert numbers(store) == [1, 2, 3, 4]
        assert store.reach(openings[0]).known


def test_what_was_promised_is_checked_after_a_trial_too(tmp_path: Path) -> None:
    """After an end in order the trial is one too, and after a crash it checks as an opening does."""
    with Store.open(tmp_path / "whole", SCHEMA, CONFIG) as store:
        store.append([(0, rows(1, 2, 3))])
        crashed = killed(tmp_path / "whole", tmp_path / "crashed")
    for folder in tmp_path / "whole", crashed:
        assert Store.try_to_open(folder, SCHEMA, CONFIG) == SCHEMA
        segment = max((folder / "partition-0000").glob("*.segment"))
        segment.write_bytes(segment.read_bytes()[:-1])
        for look in Store.try_to_open, Store.open:
            with pytest.raises(JournalDamaged):
                look(folder, SCHEMA, CONFIG)
