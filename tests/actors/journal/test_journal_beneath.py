"""What happens to the files of a journal while it is open: deleted, moved, replaced, a disk that turns read-only; and clocks that jump."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    GetExtent,
    Journal,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalUnwritable,
    Read,
    Store,
)
from levada.framework import ActorSystem, restart  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])
SMALL = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None)


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers])], schema=SCHEMA)


def fill(store: Store, start: int, stop: int) -> None:
    for n in range(start, stop, 10):
        store.append([(0, rows(*range(n, n + 10)))])


def numbers(store: Store, start: int) -> list[int]:
    return [n for _, batch in store.batches(0, start) for n in batch.column("n").to_pylist()]


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "partition-0000").glob("*.segment"))


# ---------------------------------------------------------------- files


def delete(directory: Path) -> None:
    shutil.rmtree(directory)


def move(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def replace(directory: Path) -> None:
    shutil.copytree(directory, directory.with_name("other"))
    move(directory)
    directory.with_name("other").rename(directory)


def delete_partition(directory: Path) -> None:
    shutil.rmtree(directory / "partition-0000")


def delete_last_segment(directory: Path) -> None:
    segments(directory)[-1].unlink()


def delete_ledger(directory: Path) -> None:
    (directory / "ledger.sqlite").unlink()


def delete_ends(directory: Path) -> None:
    (directory / "ends").unlink()


CHANGES = [delete, move, replace, delete_partition, delete_last_segment, delete_ledger, delete_ends]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_acked_into_files_that_are_gone(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "journal"
    with Store.open(directory, SCHEMA, SMALL) as store:
        fill(store, 0, 50)
        change(directory)
        store.look()  # by itself each second
        for _ in range(2):
            with pytest.raises(JournalUnwritable, match="was deleted, moved or replaced while this journal is open"):
                store.append([(0, rows(50))])
        with pytest.raises(JournalUnwritable, match="was deleted, moved or replaced"):
            store.declare_group("g")
        assert len(caplog.messages) == 1


def test_a_directory_that_is_put_back_is_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    with Store.open(directory, SCHEMA, SMALL) as store:
        fill(store, 0, 50)
        move(directory)
        store.look()
        with pytest.raises(JournalUnwritable):
            store.append([(0, rows(50))])
        directory.with_name("moved").rename(directory)
        assert store.append([(0, rows(50))]) == [Appended(0, 50, 1)]
    with Store.open(directory, SCHEMA, SMALL) as store:
        assert numbers(store, 0) == list(range(51))


def test_a_new_segment_in_a_folder_that_is_gone_says_so_at_once(tmp_path: Path) -> None:
    """Not only when it is looked at."""
    directory = tmp_path / "journal"
    with Store.open(directory, SCHEMA, SMALL) as store:
        delete(directory)
        with pytest.raises(JournalUnwritable, match="was deleted, moved or replaced while this journal is open"):
            fill(store, 0, 100)


def test_rows_whose_file_was_deleted_are_not_said_to_have_been_deleted_by_retention(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        fill(store, 0, 100)
        oldest, second = segments(tmp_path)[:2]
        oldest.unlink()
        with pytest.raises(
            JournalDamaged, match="row 0 of partition 0 is gone: another program deleted its file"
        ) as caught:
            numbers(store, 0)
        assert caught.value.path == str(oldest)
        with pytest.raises(JournalDamaged, match="row 0 of partition 0 is gone"):
            store.offset_within(0, 0, 100, max_bytes=1)
        # The rest can be read, and written.
        assert numbers(store, int(second.stem)) == list(range(int(second.stem), 100))
        assert store.append([(0, rows(100))]) == [Appended(0, 100, 1)]


async def test_the_actor_goes_on_to_say_so_and_makes_no_new_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new start would find an empty place, and take what comes as if nothing had been there."""
    monkeypatch.setattr("levada.actors.journal.guard.LOOK_EVERY", 0.0)
    directory = tmp_path / "journal"
    async with ActorSystem("test", seed=0) as system:
        journal = system.spawn(partial(Journal, directory, SCHEMA), supervise=restart("transient"))
        await journal.ask(Append(rows(1, 2)), timeout=None)
        epoch = (await journal.ask(GetExtent(), timeout=None)).epoch
        delete(directory)
        for _ in range(3):
            with pytest.raises(JournalUnwritable, match="was deleted, moved or replaced"):
                await journal.ask(Append(rows(3)), timeout=None)
        with pytest.raises(JournalDamaged, match="another program deleted its file"):
            await journal.ask(Read(0, 0), timeout=None)
        assert (await journal.ask(GetExtent(), timeout=None)).epoch == epoch
    assert not directory.exists()


@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fdatasync"])
def test_a_disk_that_turns_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What was answered is there, what failed is not, and after a new start all goes on."""
    store = Store.open(tmp_path, SCHEMA, SMALL)
    fill(store, 0, 50)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    answered, refused = list(range(50)), ""
    with monkeypatch.context() as patch:
        patch.setattr(REAL.files, call, refuse)
        for n in (50, 51, 52):
            try:
                store.append([(0, rows(n))])
            except (JournalError, OSError) as error:
                refused = str(error)
                break
            answered.append(n)
        store.close()
    assert "Read-only file system" in refused
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store, 0)[: len(answered)] == answered
        assert numbers(store, 0) in (answered, [*answered, len(answered)])


# ---------------------------------------------------------------- clocks


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


YEARS = 10 * 365 * 86_400.0
TIMED = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None, retain_time=1000.0)


def append_each_second(store: Store, clock: Clock, start: int, stop: int, *, ahead: Callable[[int], bool]) -> None:
    """One block a second, some by a clock that is years ahead."""
    for n in range(start, stop, 10):
        clock.now += 1
        true = clock.now
        if ahead(n):
            clock.now += YEARS
        store.append([(0, rows(*range(n, n + 10)))])
        clock.now = true


@pytest.mark.parametrize("at", range(0, 120, 10))
@pytest.mark.parametrize("reopened", [False, True])
def test_one_block_of_a_clock_that_is_years_ahead_holds_up_no_retention(
    tmp_path: Path, at: int, reopened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it is in its segment, rows are kept for their time and no longer, and the jump is named."""
    clock = Clock()
    store = Store.open(tmp_path, SCHEMA, attrs.evolve(TIMED, retain_time=YEARS * 2), clock=clock)
    append_each_second(store, clock, 0, 240, ahead=lambda n: n == at)
    store.close()
    store = Store.open(tmp_path, SCHEMA, TIMED, clock=clock)
    files = len(segments(tmp_path))
    clock.now += 970
    store.retain()
    assert len(segments(tmp_path)) == files
    named = [re.search(r"the clock has jumped (ahead|back) by (\d+) s", text) for text in caplog.messages]
    jumps = [(found[1], int(found[2])) for found in named if found is not None]
    assert [way for way, seconds in jumps if abs(seconds - YEARS) < 1000] == ["ahead", "back"]
    if reopened:
        store.close()
        store = Store.open(tmp_path, SCHEMA, TIMED, clock=clock)
    clock.now += 60
    store.retain()
    assert len(segments(tmp_path)) == 1
    store.close()


@pytest.mark.parametrize(("settle", "left"), [(600.0, 12), (0.0, 3)])
def test_nothing_is_deleted_for_its_age_right_after_the_clock_has_jumped_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settle: float, left: int
) -> None:
    """It may be put right, and what was deleted does not come back. If it is right now, time goes on soon."""
    monkeypatch.setattr("levada.actors.journal.retention.SETTLE", settle)
    clock = Clock()
    with Store.open(tmp_path, SCHEMA, TIMED, clock=clock) as store:
        append_each_second(store, clock, 0, 120, ahead=lambda n: n == 90)
        assert (120 - store.extent().first[0]) // 10 == left


def test_rows_of_a_clock_that_was_always_ahead_age_from_when_it_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A journal that is full of them has nothing behind them that tells their age."""
    clock = Clock()
    with Store.open(tmp_path, SCHEMA, TIMED, clock=clock) as store:
        append_each_second(store, clock, 0, 120, ahead=lambda n: True)
        files = len(segments(tmp_path))
        store.retain()
        store.retain()
        assert sum("ahead of the clock; their age is told by the rows behind" in text for text in caplog.messages) == 1
        clock.now += 999
        store.retain()
        assert len(segments(tmp_path)) == files > 2
        clock.now += 1
        store.retain()
        assert len(segments(tmp_path)) < files


def test_a_segment_that_a_clock_began_ahead_is_sealed_by_time(tmp_path: Path) -> None:
    clock = Clock()
    with Store.open(tmp_path, SCHEMA, JournalConfig(segment_time=60.0), clock=clock) as store:
        append_each_second(store, clock, 0, 20, ahead=lambda n: n == 0)
        store.retain()
        assert len(segments(tmp_path)) == 2


def test_a_block_that_was_taken_back_says_nothing_about_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the last one of its segment, and written when the clock was years ahead."""
    clock = Clock()
    config = attrs.evolve(TIMED, partitions=2, segment_time=60.0)
    with Store.open(tmp_path, SCHEMA, config, clock=clock) as store:
        store.append([(0, rows(1))])
        with monkeypatch.context() as patch:
            writes: list[int] = []
            real = os.pwritev

            def write(descriptor: int, *args: Any) -> int:
                writes.append(descriptor)
                return real(descriptor, *args) if len(writes) < 2 else _raise(OSError(errno.EIO, "no"))

            patch.setattr(REAL.files, "pwritev", write)
            clock.now += YEARS
            with pytest.raises(JournalUnwritable):
                store.append([(0, rows(2)), (1, rows(3))])
        clock.now += 60 - YEARS
        assert (store.retain(), len(segments(tmp_path))) == (0, 2)
        clock.now += 939
        assert store.retain() == 0
        clock.now += 1
        assert store.retain() == 1
        assert numbers(store, 1) == []


def _raise(error: Exception) -> NoReturn:
    raise error


def test_staged_rows_of_a_clock_that_was_ahead_are_given_up_in_time(tmp_path: Path) -> None:
    """Their age is that of their file."""
    clock = Clock()
    with Store.open(tmp_path, SCHEMA, TIMED, clock=clock) as store:
        clock.now += YEARS
        store.stage("query", 0, 0, 0).append(rows(1))
        clock.now -= YEARS
        assert store.unstage_older(100.0) == []
        clock.now += 99
        assert store.unstage_older(100.0) == []
        clock.now += 2
        assert store.unstage_older(100.0) == [("query", 0)]


def test_the_age_of_staged_rows_is_counted_by_the_clock_of_the_journal(tmp_path: Path) -> None:
    """It is far from the file system's."""
    clock = Clock()
    clock.now += YEARS
    with Store.open(tmp_path, SCHEMA, TIMED, clock=clock) as store:
        store.stage("empty", 0, 0, 0)
        stage = store.stage("query", 0, 0, 0)
        clock.now += 99
        stage.append(rows(1))
        assert store.unstage_older(100.0) == []
        clock.now += 99
        assert store.unstage_older(100.0) == [("empty", 0)]
        clock.now += 2
        assert store.unstage_older(100.0) == [("query", 0)]
