"""Disks that fail: an answer says what was done, a failed sync is not forgotten, and a crash at any moment of an undo leaves a journal that opens."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    Deliver,
    Journal,
    JournalConfig,
    JournalError,
    JournalFull,
    JournalUnwritable,
    Keyed,
    Read,
    StageRows,
    Store,
)
from levada.actors.journal import ends as ends_module  # noqa: E402
from levada.actors.journal.ends import Ends  # noqa: E402
from levada.framework import ActorSystem, restart  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

SCHEMA = pa.schema([("n", pa.int64())])
SMALL = JournalConfig(
    segment_bytes=2048, block_bytes=1024, block_rows=40, max_bytes=1 << 20, retain_bytes=1 << 19, sync="group"
)


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def numbers(store: Store, partition: int = 0) -> list[int]:
    return [n for _, batch in store.batches(partition, store.extent().first[partition]) for n in batch["n"].to_pylist()]


def segments(directory: Path, partition: int = 0) -> list[str]:
    return sorted(path.name for path in (directory / f"partition-{partition:04d}").glob("*.segment"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Failing:
    """Calls of `Files` that fail while a condition holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.failed = 0

    def call(self, name: str, code: int, when: Callable[..., bool], times: int = 1 << 30) -> None:
        """Have a function fail with this error, for some calls at most."""
        real = getattr(REAL.files, name)

        def fail(*args: Any, **keywords: Any) -> Any:
            if self.failed < times and when(*args):
                self.failed += 1
                raise OSError(code, os.strerror(code))
            return real(*args, **keywords)

        self._patch.setattr(REAL.files, name, fail)

    def mend(self) -> None:
        """Have all functions work again."""
        self._patch.undo()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


# ---------------------------------------------------------------- retention behind a change


@pytest.fixture
def aged(tmp_path: Path, failing: Failing) -> Iterator[Store]:
    """A journal whose partition 1 has a segment to seal, on a disk that takes no new file there."""
    clock = Clock()
    config = attrs.evolve(SMALL, partitions=2, segment_time=10.0)
    with Store.open(tmp_path, SCHEMA, config, clock=clock) as store:
        store.declare_group("g")
        store.append([(1, rows(-1))])
        clock.now += 60
        yield store
        failing.mend()
        store.retain()
        assert len(segments(tmp_path, 1)) == 2


def no_new_file(path: Any, flags: int, *_: int) -> bool:
    return bool(flags & os.O_CREAT) and "partition-0001" in str(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_rows_are_answered_whatever_retention_meets_behind_them(aged: Store, failing: Failing, code: int) -> None:
    """Else they would be written again: they are in the journal, and the error says that they are not."""
    failing.call("open", code, no_new_file)
    end = 0
    while not failing.failed:
        assert aged.append([(0, rows(*range(end, end + 40)))]) == [Appended(0, end, 40)]
        end += 40
    assert numbers(aged) == list(range(end))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_offsets_of_a_group_are_answered_whatever_retention_meets_behind_them(
    aged: Store, failing: Failing, code: int
) -> None:
    failing.call("open", code, no_new_file)
    aged.commit_group("g", {1: 1})
    assert aged.groups() == {"g": {0: 0, 1: 1}}
    aged.forget_group("g")
    assert aged.groups() == {}
    assert failing.failed == 2
    with pytest.raises(JournalFull if code == errno.ENOSPC else JournalUnwritable):
        aged.retain()


async def test_rows_on_a_full_disk_are_in_the_journal_once(tmp_path: Path, failing: Failing) -> None:
    clock = Clock()
    config = attrs.evolve(SMALL, partitions=2, segment_time=10.0)
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, SCHEMA, config=config, clock=clock, clean_every=3600.0))
        await journal.ask(Append(rows(-1), partition=1))
        clock.now += 60
        failing.call("open", errno.ENOSPC, no_new_file)
        for n in range(0, 400, 40):
            assert await journal.ask(Append(rows(*range(n, n + 40)), partition=0)) == Appended(0, n, 40)
        assert failing.failed > 0


def test_a_batch_is_delivered_though_its_staged_rows_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from levada.actors.journal.delivering import deliver, stage_rows

    real = os.unlink

    def refuse(path: Path) -> None:
        if path.parent.name == "staging":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    with Store.open(tmp_path, SCHEMA) as store:
        for part in (0, 1):
            stage_rows(store, StageRows("q", 1, part, 0, []), rows(part))
        with monkeypatch.context() as patch:
            patch.setattr(REAL.files, "unlink", refuse)
            done = deliver(store, Deliver("q", 1, {0: 0, 1: 0}))
            assert (done.already, done.ranges) == (False, {0: (0, 2)})
            stage_rows(store, StageRows("q", 2, 0, 0, []), rows(9))
            with pytest.raises(JournalUnwritable, match="staged rows cannot be deleted"):
                store.unstage("q", 2)
        assert store.statistics().bytes_staged == 0
        assert "its staged rows stay for now" in caplog.text
        assert deliver(store, Deliver("q", 1, {0: 0, 1: 0})).already
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store) == [0, 1]
        assert deliver(store, Deliver("q", 1, {0: 0, 1: 0})).already
        assert list(store.staged("q", 1)) == []
        assert list(store.staged("q", 2)) == []
    assert list((tmp_path / "staging").iterdir()) == []


# ---------------------------------------------------------------- undoing


MERGED = attrs.evolve(SMALL, segment_bytes=20_000, block_bytes=10_000)


def renamed(descriptor: int) -> bool:
    """Whether this is the sync of a folder in which a file was written anew."""
    path = path_of(descriptor)
    return path.is_dir() and any(path.glob("*.old"))


def test_a_merge_whose_folder_cannot_be_synced_leaves_the_old_file(tmp_path: Path, failing: Failing) -> None:
    failing.call("fsync", errno.EIO, renamed, times=1)
    with Store.open(tmp_path / "a", SCHEMA, MERGED) as store:
        for n in range(130):
            store.append([(0, rows(n))])
        assert failing.failed == 1
        assert numbers(store) == list(range(130))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("a", "b"):
        with Store.open(tmp_path / name, SCHEMA, MERGED) as store:
            assert numbers(store) == list(range(130))


def test_a_merge_that_cannot_be_undone_is_taken_on_by_the_next_opening(tmp_path: Path, failing: Failing) -> None:
    failing.call("fsync", errno.EIO, lambda descriptor: failing.failed > 0 or renamed(descriptor), times=2)
    with Store.open(tmp_path, SCHEMA, MERGED) as store:
        done = 0
        with pytest.raises(
            JournalUnwritable, match="nothing of this was written, and what is on the disk is not known"
        ):
            while done < 130:
                store.append([(0, rows(done))])
                done += 1
        assert numbers(store) == list(range(done))
        with pytest.raises(JournalError, match="open the journal again"):
            store.append([(0, rows(done))])
    failing.mend()
    with Store.open(tmp_path, SCHEMA, MERGED) as store:
        assert numbers(store) == list(range(done))
        assert store.append([(0, rows(done))]) == [Appended(0, done, 1)]


@pytest.mark.parametrize("sealed", [False, True])
def test_an_erasure_whose_folder_cannot_be_synced_leaves_the_old_file(
    tmp_path: Path, failing: Failing, sealed: bool
) -> None:
    """Rows that are appended to the old file later are not lost with its name."""
    schema = pa.schema([("entity", pa.string()), ("n", pa.int64())])
    config = attrs.evolve(SMALL, keyed=Keyed(entity="entity"))
    count = 100 if sealed else 5

    def of(*each: int) -> Any:
        return pa.record_batch([pa.array(["ab"[n % 2] for n in each]), pa.array(each, pa.int64())], schema=schema)

    with Store.open(tmp_path / "a", schema, config) as store:
        for n in range(0, count, 5):
            store.append([(0, of(*range(n, n + 5)))])
        assert (len(segments(tmp_path / "a")) > 1) == sealed
        path, synced = tmp_path / "a" / "partition-0000" / segments(tmp_path / "a")[0], list[int]()
        before = path.stat().st_ino
        failing.call("fsync", errno.EIO, lambda _: synced.append(path.stat().st_ino) or False)  # type: ignore[func-returns-value]
        failing.call("fsync", errno.EIO, renamed, times=1)
        with pytest.raises(JournalUnwritable, match="the disk refuses"):
            list(store.erase("a", partition=0))
        assert store.broken == ""
        assert synced == [before]  # with the old file under its name again
        assert numbers(store) == list(range(count))
        store.append([(0, of(101))])
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert sum(store.erase("a", partition=0)) == (count + 1) // 2
        assert numbers(store) == [*range(1, count, 2), 101]
    with Store.open(tmp_path / "b", schema, config) as store:  # it goes on with the erasure
        assert numbers(store) == [*range(1, count, 2), 101]


def test_a_new_segment_whose_name_cannot_be_synced_is_gone_again_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is behind rows that were taken back."""
    folder = tmp_path / "partition-0000"
    calls: list[object] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        if path_of(descriptor) == folder:
            calls.append(segments(tmp_path))
            if len(calls) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(*range(50)))])
        monkeypatch.setattr(REAL.files, "fsync", sync)
        with pytest.raises(JournalUnwritable, match="nothing of this was written"):
            store.append([(0, rows(*range(50, 250)))])
        assert calls == [["00000000000000000000.segment", f"{130:020d}.segment"], ["00000000000000000000.segment"]]
        assert store.broken == ""
        assert store.append([(0, rows(*range(50, 250)))]) == [Appended(0, 50, 200)]


def test_a_new_segment_that_cannot_be_taken_back_at_once_goes_with_the_rows_before_it(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, refused, real = tmp_path / "partition-0000", list[Path](), os.unlink

    def unlink(path: Path) -> None:
        if path.suffix == ".segment" and not refused:
            refused.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(*range(50)))])
        monkeypatch.setattr(REAL.files, "unlink", unlink)
        failing.call("fsync", errno.EIO, lambda descriptor: path_of(descriptor) == folder, times=1)
        with pytest.raises(JournalUnwritable, match="what is on the disk is not known"):
            store.append([(0, rows(*range(50, 250)))])
        assert segments(tmp_path) == ["00000000000000000000.segment"]
    assert len(refused) == 1
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert store.append([(0, rows(*range(50, 250)))]) == [Appended(0, 50, 200)]


def test_staged_rows_that_do_not_fit_leave_nothing_on_the_disk(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        stage = store.stage("q", 1, 0, 0)
        stage.append(rows(1))
        [path] = (tmp_path / "staging").iterdir()
        size = path.stat().st_size

        def full(descriptor: int, parts: Any, at: int) -> int:
            if at > size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, [memoryview(parts[0])[:8]], at)

        monkeypatch.setattr(REAL.files, "pwritev", full)
        with pytest.raises(JournalFull):
            stage.append(rows(2))
        assert path.stat().st_size == size
        failing.call("ftruncate", errno.EIO, lambda *_: True)
        with pytest.raises(JournalFull):
            stage.append(rows(2))
        failing.mend()
        stage.append(rows(2))
        assert stage.rows == 2


def test_segments_that_are_taken_back_go_newest_first_each_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between them leaves no gap."""
    left: list[list[str]] = []
    copies: list[Path] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        real(descriptor)
        if path_of(descriptor).is_dir():
            left.append(segments(tmp_path / "a"))
            copies.append(shutil.copytree(tmp_path / "a", tmp_path / str(len(copies))))

    def parts(store: Store) -> Iterator[tuple[int, Any]]:
        for n in range(10, 500, 40):
            yield from ((0, message) for message in store.pack([rows(*range(n, n + 40))]))
        monkeypatch.setattr(REAL.files, "fsync", sync)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store.open(tmp_path / "a", SCHEMA, SMALL) as store:
        store.append([(0, rows(*range(10)))])
        with pytest.raises(JournalFull):
            store.deliver("q", 1, parts(store))
        assert numbers(store) == list(range(10))
    monkeypatch.undo()
    assert [len(names) for names in left] == list(range(len(left), 0, -1))
    assert len(left) > 2
    assert all(names == left[0][: len(names)] for names in left)
    for copy in copies:
        with Store.open(copy, SCHEMA, SMALL) as store:
            assert numbers(store) == list(range(10))


def test_a_write_that_cannot_be_taken_back_says_so(tmp_path: Path, failing: Failing) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(1))])
        failing.call("fdatasync", errno.EIO, lambda _: True)
        with pytest.raises(JournalUnwritable, match="half a write cannot be taken back") as caught:
            store.append([(0, rows(2))])
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(JournalError, match="open the journal again"):
            store.append([(0, rows(3))])
        assert numbers(store) == [1]
        failing.mend()
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store)[0] == 1


# ---------------------------------------------------------------- syncs


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_sync_breaks_the_store_for_good(tmp_path: Path, failing: Failing, code: int) -> None:
    """Linux takes the pages for written after it, and the next sync succeeds without them."""
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(1))])
        failing.call("fdatasync", code, lambda _: True, times=1)
        with pytest.raises(
            JournalUnwritable, match="nothing of this was written, and what is on the disk is not known"
        ):
            store.append([(0, rows(2))])
        with pytest.raises(JournalError, match="open the journal again"):
            store.append([(0, rows(2))])
        assert numbers(store) == [1]
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store) == [1]
        assert store.append([(0, rows(2))]) == [Appended(0, 1, 1)]


def test_a_failed_sync_of_the_record_of_ends_breaks_the_store(tmp_path: Path, failing: Failing) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(1))])
        assert store.unsynced
        failing.call("fdatasync", errno.EIO, lambda descriptor: path_of(descriptor).name == "ends")
        with pytest.raises(JournalUnwritable):
            store.sync_ends()
        with pytest.raises(JournalError, match="open the journal again"):
            store.append([(0, rows(2))])
    failing.mend()
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store) == [1]


async def test_the_actor_starts_anew_after_a_failed_sync(tmp_path: Path, failing: Failing) -> None:
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, SCHEMA, config=SMALL), supervise=restart())
        await journal.ask(Append(rows(1)))
        failing.call("fdatasync", errno.ENOSPC, lambda _: True, times=1)
        with pytest.raises(JournalUnwritable, match="nothing of this was written"):
            await journal.ask(Append(rows(2)))
        assert await journal.ask(Append(rows(3))) == Appended(0, 1, 1)
        [block] = await journal.ask(Read(0, 1))
        assert block.batch()["n"].to_pylist() == [3]
        assert system.statistics().restarts == 1


async def test_the_actor_starts_anew_at_once_when_an_end_cannot_be_noted(tmp_path: Path, failing: Failing) -> None:
    """The rows are there and answered; the next append does not have to fail first."""
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, SCHEMA, config=SMALL), supervise=restart())
        await journal.ask(Append(rows(1)))
        failing.call("pwrite", errno.EIO, lambda *_: True, times=1)
        assert await journal.ask(Append(rows(2))) == Appended(0, 1, 1)
        assert await journal.ask(Append(rows(3))) == Appended(0, 2, 1)
        assert system.statistics().restarts == 1


# ---------------------------------------------------------------- the record of ends


class Crash(BaseException):
    """The power fails here."""


def test_one_copy_of_the_record_of_ends_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is torn in turn; right behind retention too, which syncs twice."""
    monkeypatch.setattr(ends_module, "SYNC_EVERY", 0.0)
    config = attrs.evolve(SMALL, partitions=40, segment_time=10.0, retain_bytes=None)
    clock = Clock()
    real = os.pwrite

    def torn(descriptor: int, octets: Any, at: int) -> int:
        real(descriptor, bytes(octets)[:512], at)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        raise Crash

    with Store.open(tmp_path / "a", SCHEMA, config, clock=clock) as store:
        store.declare_group("g")
        store.append([(0, rows(1))])
        store.commit_group("g", {0: 1})
        clock.now += 60
        assert store.retain() == 1
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(REAL.files, "pwrite", torn)
            store.append([(number, rows(2)) for number in range(40)])
    with Store.open(tmp_path / "b", SCHEMA, config) as store:
        assert store.extent().first[0] == 1
        assert numbers(store) == [2]


def test_a_short_write_of_the_record_of_ends_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with Store.open(tmp_path, SCHEMA, attrs.evolve(SMALL, partitions=40)) as store:
        monkeypatch.setattr(REAL.files, "pwrite", lambda fd, octets, at: real(fd, bytes(octets)[:100], at))
        store.append([(number, rows(number)) for number in range(40)])
        assert Ends.read(REAL.files, tmp_path / "ends").end == [1] * 40


# ---------------------------------------------------------------- keys


def test_keyed_reads_go_on_when_the_newest_segment_was_sealed_and_deleted(tmp_path: Path) -> None:
    schema = pa.schema([("entity", pa.string()), ("command", pa.string())])
    clock = Clock()
    config = JournalConfig(
        partitions=2, segment_time=10.0, retain_bytes=None, keyed=Keyed(entity="entity", command="command")
    )

    def of(*each: str) -> Any:
        return pa.record_batch([pa.array(each), pa.array([f"{name}-1" for name in each])], schema=schema)

    with Store.open(tmp_path, schema, config, clock=clock) as store:
        store.declare_group("g")
        store.append([(0, of("anna", "bert")), (1, of("carl"))])
        clock.now += 60
        store.commit_group("g", {0: 2})
        assert store.extent().first == {0: 2, 1: 0}
        assert list(store.rows_of("anna", partition=0)) == []
        assert list(store.newest_of("anna", 1, partition=0)) == []
        assert store.newest_value("anna", "command", partition=0) is None
        assert store.taken(0, "anna-1") is None
        assert [each.num_rows for _, each in store.rows_of("carl", partition=1)] == [1]
        assert store.taken(1, "carl-1") is not None
        store.append([(0, of("anna"))])
        assert [each["offset"].to_pylist() for _, each in store.rows_of("anna", partition=0)] == [[2]]


def test_a_keyed_read_goes_on_behind_rows_that_retention_deletes_meanwhile(tmp_path: Path) -> None:
    schema = pa.schema([("entity", pa.string()), ("n", pa.int64())])
    config = attrs.evolve(SMALL, retain_bytes=None, keyed=Keyed(entity="entity"))

    def of(n: int) -> Any:
        return pa.record_batch([pa.array(["a"] * 20), pa.array(range(n, n + 20), pa.int64())], schema=schema)

    with Store.open(tmp_path, schema, config) as store:
        store.declare_group("g")
        for n in range(0, 200, 20):
            store.append([(0, of(n))])
        last = int(segments(tmp_path)[-1].removesuffix(".segment"))
        reading, newest = store.rows_of("a", partition=0, max_bytes=1), store.newest_of("a", 1000, partition=0)
        assert next(reading)[0] == 20
        assert next(newest)["n"].to_pylist() == list(range(180, 200))
        store.commit_group("g", {0: 200})
        assert store.extent().first == {0: last}
        found = [n for _, each in reading for n in each["n"].to_pylist()]
        assert found[0] < last  # of the segment that was being read
        assert [n for n in found if n >= last] == list(range(last, 200))
        assert list(newest) == []
