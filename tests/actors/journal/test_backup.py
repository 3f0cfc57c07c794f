"""Copies of whole journals, closed and open: whole or not there, and never a byte of the journal is changed."""

from __future__ import annotations

import contextvars
import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.surroundings import surrounded

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    Copied,
    Deliver,
    Fenced,
    GetExtent,
    Journal,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    Keyed,
    StageRows,
    Store,
    backup,
    keeper,
    restore,
    stream_of,
)
from levada.actors.nodes import NodeUp  # noqa: E402
from levada.framework import ActorSystem, bounded  # noqa: E402
from levada.framework.errors import ActorError, ConfigurationError  # noqa: E402
from levada.framework.testing.simulation import CHANGES, Call, Crashed, Fault, SimulatedDisk, SimulatedFiles  # noqa: E402

SCHEMA = pa.schema([("entity", pa.string()), ("n", pa.int64())])
CONFIG = JournalConfig(
    partitions=2, segment_bytes=2048, block_bytes=1024, retain_bytes=1 << 20, keyed=Keyed(entity="entity")
)


def rows(*numbers: int) -> Any:
    return pa.record_batch([[f"e{n % 3}" for n in numbers], list(numbers)], schema=SCHEMA)


def fill(store: Store, start: int, stop: int) -> None:
    """Append numbers, the even ones to partition 0."""
    for n in range(start, stop, 10):
        for number in range(2):
            store.append([(number, rows(*range(n + number, min(n + 10, stop), 2)))])


def contents(directory: Path) -> dict[int, list[int]]:
    """The rows of each partition, read from an opened copy."""
    with Store.open(directory, None, CONFIG) as store:
        return {
            number: [n for _, batch in store.batches(number, first) for n in batch["n"].to_pylist()]
            for number, first in store.extent().first.items()
        }


def state(directory: Path) -> dict[str, bytes]:
    """All files but the lock of copies, which stays."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "backup.lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal, which takes a quarter of a second."""
    path = tmp_path_factory.mktemp("made") / "journal"
    with Store.open(path, SCHEMA, CONFIG) as store:
        fill(store, 0, 100)
        store.declare_group("readers")
    return path


@pytest.fixture
def journal(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "journal")


@contextmanager
def copying(source: Path, target: Path, **options: Any) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """Make a copy in a thread; yield it, and its result once it has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend(backup(source, target, **options))
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread, found
    finally:
        thread.join()


def test_a_copy_of_a_closed_journal_is_the_same_journal(journal: Path, tmp_path: Path) -> None:
    before, told = state(journal), list[tuple[int, int]]()
    [copied] = backup(journal, tmp_path / "deep" / "copy", progress=lambda *now: told.append(now))
    assert state(journal) == before
    assert copied.directory == tmp_path / "deep" / "copy"
    assert (copied.first, copied.end) == ({0: 0, 1: 0}, {0: 50, 1: 50})
    copy = state(copied.directory)
    assert copy == {name: octets for name, octets in before.items() if name != "lock"}
    assert told[-1] == (copied.size, copied.size) == (sum(map(len, copy.values())),) * 2
    with Store.open(journal, None, CONFIG) as one:
        assert copied.epoch == one.epoch
    with Store.open(copied.directory, None, CONFIG) as other:
        assert other.groups() == {"readers": {0: 0, 1: 0}}
        assert other.epoch == copied.epoch
        assert other.reach(copied.opening).known
    assert names(tmp_path / "deep") == ["copy"]


def test_a_program_may_start_while_a_closed_journal_is_copied(journal: Path, tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def progress(*_: int) -> None:
        begun.set()
        assert done.wait(60)

    last = max((journal / "partition-0001").glob("*.segment"))
    last.write_bytes(last.read_bytes() + b"LvB1 and half a block")  # as if the last program had been killed
    with copying(journal, tmp_path / "copy", progress=progress) as (thread, found):
        assert begun.wait(60)
        with Store.open(journal, None, CONFIG) as store:
            fill(store, 100, 200)
            store.look()
            done.set()
            thread.join()
    assert found[0].end == {0: 50, 1: 50}
    assert contents(tmp_path / "copy") == {0: list(range(0, 100, 2)), 1: list(range(1, 100, 2))}


def test_a_closed_journal_whose_folder_has_no_links_is_locked_while_it_is_copied(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def progress(*_: int) -> None:
        with pytest.raises(JournalLocked):
            Store.open(journal, None, CONFIG)

    monkeypatch.setattr(os, "link", link)
    assert backup(journal, tmp_path / "copy", progress=progress)[0].end == {0: 50, 1: 50}
    monkeypatch.undo()
    assert contents(tmp_path / "copy") == contents(journal)


def test_a_copy_of_an_open_journal_ends_where_its_files_were_pinned_whatever_happens_to_them_later(
    journal: Path, tmp_path: Path
) -> None:
    """Segments are filled, sealed, merged, erased from and deleted meanwhile, and batches delivered."""
    config = attrs.evolve(CONFIG, retain_bytes=None)
    begun, done = threading.Event(), threading.Event()

    def progress(*_: int) -> None:
        begun.set()
        assert done.wait(60)

    with (
        Store.open(journal, None, config) as store,
        copying(journal, tmp_path / "copy", progress=progress) as (thread, found),
    ):
        while not begun.is_set():
            store.look()
            assert thread.is_alive(), found
        fill(store, 100, 200)
        store.deliver("q", 1, [(0, message) for message in store.pack([rows(1000, 1001)])])
        assert sum(store.erase("e1", partition=0)) > 0
        store.commit_group("readers", {0: 60, 1: 60})
        assert store.extent().first[0] > 0
        done.set()
        thread.join()
        [copied] = found
        assert not {"backup", "backup.new", "backup.request"} & {*names(journal)}
    assert copied.end == {0: 50, 1: 50}
    assert contents(tmp_path / "copy") == {0: list(range(0, 100, 2)), 1: list(range(1, 100, 2))}


def test_a_copy_that_is_made_while_an_erasure_is_under_way_finishes_it_when_it_is_opened(
    journal: Path, tmp_path: Path
) -> None:
    with Store.open(journal, None, CONFIG) as store, copying(journal, tmp_path / "copy") as (thread, _):
        steps = store.erase("e1", partition=0)
        assert next(steps) > 0
        while thread.is_alive():
            store.look()
    assert contents(tmp_path / "copy")[0] == [n for n in range(0, 100, 2) if n % 3 != 1]


def test_indexes_are_copied(journal: Path, tmp_path: Path) -> None:
    with Store.open(journal, None, CONFIG) as store, copying(journal, tmp_path / "copy") as (thread, _):
        while thread.is_alive():
            store.look()
    indexes = {name: octets for name, octets in state(tmp_path / "copy").items() if name.endswith(".index")}
    assert len(indexes) == 2
    assert indexes.items() <= state(journal).items()


async def copies_under_load(folder: Path, count: int) -> int:
    """Copy a journal again and again while appends, stages and deliveries go on; return how many copies have all that was answered before."""
    config = JournalConfig(partitions=2, segment_bytes=1 << 18, block_bytes=1 << 16, keyed=Keyed(entity="entity"))
    acked, delivered, whole, stop = [0, 0], -1, 0, trio.Event()
    async with ActorSystem(ask_timeout=60.0) as system:
        spawned = partial(Journal, folder / "journal", SCHEMA, config=config, clean_every=0.02)
        journal = system.spawn(spawned, mailbox=bounded(256))
        await journal.ask(GetExtent())

        async def write(partition: int) -> None:
            sizes = (1, 20, 300)
            while not stop.is_set():
                answer = await journal.ask(Append(rows(*range(sizes[acked[partition] % 3])), partition=partition))
                assert isinstance(answer, Appended)
                acked[partition] = answer.first + answer.count

        async def deliver() -> None:
            nonlocal delivered
            while not stop.is_set():
                for part in range(2):
                    await journal.ask(StageRows("q", delivered + 1, part, 0, rows(*range(50))))
                await journal.ask(Deliver("q", delivered + 1, {0: 0, 1: 0}))
                delivered += 1

        async with trio.open_nursery() as nursery:
            for each in (partial(write, 0), partial(write, 1), deliver):
                nursery.start_soon(each)
            for number in range(count):
                before, batch = list(acked), delivered
                target = folder / f"copy-{number}"
                [copied] = await trio.to_thread.run_sync(partial(backup, folder / "journal", target, verify=True))
                with Store.open(target, None, config) as store:
                    extent, newest = store.extent(), store.newest_batch("q")
                    known = -1 if newest is None else newest
                    assert (extent.first, extent.end) == (copied.first, copied.end)
                    whole += all(extent.end[number] >= before[number] for number in range(2)) and known >= batch
                    assert sum(batch.num_rows for p in range(2) for _, batch in store.batches(p, 0)) == sum(
                        extent.end.values()
                    )
            stop.set()
    return whole


@pytest.mark.ci
async def test_copies_of_a_busy_journal_open_with_all_that_was_answered(tmp_path: Path) -> None:
    assert await copies_under_load(tmp_path, 5) == 5


@pytest.mark.release
async def test_fifty_copies_of_a_busy_journal_open_with_all_that_was_answered(tmp_path: Path) -> None:
    assert await copies_under_load(tmp_path, 50) == 50


@pytest.mark.ci
async def test_a_copy_of_a_journal_in_a_keeper(tmp_path: Path) -> None:
    async with ActorSystem() as system, keeper(system) as keep:
        kept = await keep.open(tmp_path / "journal", SCHEMA, config=CONFIG)
        await kept.ask(Append(stream_of(rows(1, 2, 3)), partition=1), timeout=None)
        [copied] = await trio.to_thread.run_sync(backup, tmp_path / "journal", tmp_path / "copy")
        await kept.ask(Append(stream_of(rows(4)), partition=1), timeout=None)
    assert copied.end == {0: 0, 1: 3}
    assert contents(tmp_path / "copy") == {0: [], 1: [1, 2, 3]}


@pytest.mark.release
async def test_copies_while_the_keeper_is_killed_again_and_again(tmp_path: Path) -> None:
    """Each copy is whole, whichever way it was made; a copy of the moment without a keeper keeps the next one out only for a while."""
    written = copies = kills = 0
    async with (
        ActorSystem(ask_timeout=60.0) as system,
        keeper(system) as keep,
        keep.nodes.events() as events,
        trio.open_nursery() as nursery,
    ):
        kept = await keep.open(
            tmp_path / "journal", SCHEMA, config=attrs.evolve(CONFIG, retain_bytes=None)
        )  # a quick machine writes more

        async def write() -> None:
            nonlocal written
            while True:
                try:
                    answer = await kept.ask(Append(stream_of(rows(written)), partition=0, at=written))
                except ActorError:
                    await trio.sleep(0.05)
                else:
                    written = answer.end if isinstance(answer, Fenced) else written + 1

        async def kill() -> None:
            nonlocal kills
            while True:
                await trio.sleep(0.3 * (1 + kills % 5))
                pid = keep.nodes[keep.name].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                kills += 1
                while not isinstance(await events.receive(), NodeUp):
                    pass

        nursery.start_soon(write)
        nursery.start_soon(kill)
        while kills < 6:
            before, target = written, tmp_path / f"copy-{copies}"
            await trio.to_thread.run_sync(partial(backup, tmp_path / "journal", target, verify=True))
            found = contents(target)[0]
            assert found == list(range(len(found)))
            assert len(found) >= before
            copies += 1
        nursery.cancel_scope.cancel()
    assert copies > 6


@pytest.mark.parametrize("is_open", [False, True])
def test_an_interrupted_copy_leaves_nothing(journal: Path, tmp_path: Path, is_open: bool) -> None:
    def progress(*_: int) -> None:
        raise KeyboardInterrupt

    with Store.open(journal, None, CONFIG) as store:
        if not is_open:
            store.close()
        with copying(journal, tmp_path / "copy", progress=progress) as (thread, found):
            while thread.is_alive():
                if is_open:
                    store.look()
        assert isinstance(found[0], KeyboardInterrupt)
        assert names(tmp_path) == ["journal"]
        assert "backup" not in names(journal)


@pytest.mark.ci
def test_what_a_killed_copy_leaves_is_no_journal_and_goes_with_the_next_one(journal: Path, tmp_path: Path) -> None:
    program = "import os, sys; from levada.actors.journal import backup; backup(*sys.argv[1:], progress=lambda *_: os._exit(9))"
    with Store.open(journal, None, CONFIG) as store:
        command = [sys.executable, "-c", program, str(journal), str(tmp_path / "copy")]
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                store.look()
        assert process.returncode == 9
        assert names(tmp_path) == ["copy.partial", "journal"]
        with pytest.raises(JournalDamaged, match="its ledger is gone"):
            Store.open(tmp_path / "copy.partial", None, CONFIG)
        store.look()
        assert "backup" not in names(journal)
    (tmp_path / "copy.partial" / "lock").unlink()  # made by the opening
    backup(journal, tmp_path / "copy")
    assert names(tmp_path) == ["copy", "journal"]
    assert contents(tmp_path / "copy") == contents(journal)


@pytest.mark.ci
def test_a_copy_is_whole_or_not_there_when_its_process_dies_or_the_power_fails_at_any_call() -> None:
    tried = 0
    while True:
        tried += 1
        disk, calls = SimulatedDisk(), list[Call]()
        with surrounded(files=SimulatedFiles(disk)), Store.open("/journal", SCHEMA, CONFIG) as store:
            fill(store, 0, 4)

        def happens(call: Call, calls: list[Call] = calls, count: int = tried) -> Fault | None:
            if call.kind in CHANGES and call.path.startswith("/copy"):
                calls.append(call)
            return Fault(crash=True, done=0.5) if len(calls) == count else None

        with surrounded(files=SimulatedFiles(disk, faults=happens)), suppress(Crashed):
            backup("/journal", "/copy")
        finished = len(calls) < tried
        disk.power_failure(tried)
        with surrounded(files=SimulatedFiles(disk)):
            is_there = SimulatedFiles(disk).exists("/copy")
            assert is_there or not finished
            if is_there:
                assert contents(Path("/copy")) == {0: [0, 2], 1: [1, 3]}
            assert contents(Path("/journal")) == {0: [0, 2], 1: [1, 3]}
        if finished:
            break
    assert tried > 15


@pytest.mark.ci
def test_a_writer_that_dies_at_any_call_of_a_pin_loses_nothing_and_leaves_nothing() -> None:
    tried, finished = 0, False
    while not finished:
        tried += 1
        disk, calls = SimulatedDisk(), list[Call]()

        def happens(call: Call, calls: list[Call] = calls, count: int = tried) -> Fault | None:
            if call.kind in CHANGES and call.path.startswith("/journal/backup"):
                calls.append(call)
            return Fault(crash=True, done=count % 2) if len(calls) == count else None

        with suppress(Crashed), surrounded(files=SimulatedFiles(disk, faults=happens)):
            store = Store.open("/journal", SCHEMA, CONFIG)
            fill(store, 0, 4)
            with SimulatedFiles(disk).opened("/journal/backup.request", os.O_WRONLY | os.O_CREAT):
                pass
            store.look()
            finished = True
        disk.power_failure(tried)
        with surrounded(files=SimulatedFiles(disk)):
            with Store.open("/journal", None, CONFIG) as store:
                store.look()
                store.look()
            assert contents(Path("/journal")) == {0: [0, 2], 1: [1, 3]}
            assert not {"backup", "backup.new", "backup.request"} & {*SimulatedFiles(disk).names("/journal")}
    assert tried > 10


def test_a_writer_whose_disk_refuses_the_pin_goes_on_and_answers_later() -> None:
    disk, refusals = SimulatedDisk(), iter(range(3))

    def happens(call: Call) -> Fault | None:
        refused = call.kind == "link" and next(refusals, None) is not None
        return Fault(error=errno.ENOSPC) if refused else None

    with surrounded(files=SimulatedFiles(disk, faults=happens)):
        store = Store.open("/journal", SCHEMA, CONFIG)
        fill(store, 0, 4)
    found: list[Copied] = []
    with surrounded(files=SimulatedFiles(disk)):
        context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: found.extend(context.run(backup, "/journal", "/copy")))
    thread.start()
    while thread.is_alive():
        store.look()
    store.append([(0, rows(4))])
    store.close()
    assert found[0].end == {0: 2, 1: 2}
    assert next(refusals, None) is None


def test_a_writer_that_does_not_answer(journal: Path, tmp_path: Path) -> None:
    with Store.open(journal, None, CONFIG):
        with pytest.raises(JournalLocked, match=r"did not answer for 0\.05 s"):
            backup(journal, tmp_path / "copy", timeout=0.05)
        assert names(tmp_path) == ["journal"]
        assert not {"backup", "backup.request"} & {*names(journal)}


def test_a_writer_that_ends_before_it_answers(journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levada.actors.journal.asking._POLLS", 1)
    store = Store.open(journal, None, CONFIG)
    with copying(journal, tmp_path / "copy", timeout=60.0) as (thread, found):
        while not (journal / "backup.request").exists():
            assert thread.is_alive()
        store.append([(0, rows(100))])
        store.close()
    assert found[0].end == {0: 51, 1: 50}


def test_the_answer_to_a_copy_that_was_killed_is_no_answer_to_the_next_one(journal: Path, tmp_path: Path) -> None:
    """The writer deletes the new question with the old one, so it is asked again."""
    with Store.open(journal, None, CONFIG) as store:
        (journal / "backup.request").write_text("0123")
        store.look()
        assert (journal / "backup" / "pin.json").exists()
        (journal / "backup").rename(tmp_path / "old")
        with copying(journal, tmp_path / "copy", timeout=60.0) as (thread, found):
            while not (journal / "backup.request").exists():
                assert thread.is_alive()
            (tmp_path / "old").rename(journal / "backup")
            (journal / "backup.request").unlink()
            while not (journal / "backup.request").exists():
                assert thread.is_alive()
            while thread.is_alive():
                store.look()
        assert found[0].end == {0: 50, 1: 50}


def test_one_copy_of_an_open_journal_at_a_time(journal: Path, tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def progress(*_: int) -> None:
        begun.set()
        assert done.wait(60)

    with (
        Store.open(journal, None, CONFIG) as store,
        copying(journal, tmp_path / "copy", progress=progress) as (thread, found),
    ):
        while not begun.is_set():
            store.look()
        with pytest.raises(JournalLocked, match="another process copies this journal"):
            backup(journal, tmp_path / "other", timeout=0.0)
        store.look()
        with copying(journal, tmp_path / "other") as (second, waited):  # for its turn
            done.set()
            while second.is_alive():
                store.look()
        thread.join()
        assert isinstance(found[0], Copied)
        assert isinstance(waited[0], Copied)


def test_places_where_no_copy_can_be_made(journal: Path, tmp_path: Path) -> None:
    before = state(journal)
    (tmp_path / "there").mkdir()
    (tmp_path / "way.partial").mkdir()
    (tmp_path / "way.partial" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for source, target, text in (
        (journal, tmp_path / "there", "there is there. Nothing is overwritten: move it away, or name another folder"),
        (journal, tmp_path / "link", "link is there. Nothing is overwritten: move it away"),
        (journal, journal / "copy", "is inside"),
        (journal, tmp_path / "way", "way.partial is in the way: move it away"),
        (tmp_path / "there", tmp_path / "copy", "there is no journal in"),
        (tmp_path / "nowhere", tmp_path / "copy", "there is no journal in"),
        (journal, "", "the name of a folder is empty"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            backup(source, target)
    with pytest.raises(JournalUnwritable, match="the disk refuses"):
        backup(journal, tmp_path / "file" / "copy")
    assert names(tmp_path) == ["file", "journal", "link", "there", "way.partial"]
    assert names(tmp_path / "way.partial") == ["mine"]
    assert state(journal) == before


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_without_the_right_to_write(journal: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(JournalUnwritable, match="see whether this user may write there"):
        backup(journal, tmp_path / "closed" / "copy")


def test_a_full_disk_leaves_nothing() -> None:
    for kind in ("write", "mkdir", "create", "fdatasync", "rename"):
        disk = SimulatedDisk()
        with surrounded(files=SimulatedFiles(disk)), Store.open("/journal", SCHEMA, CONFIG) as store:
            fill(store, 0, 4)

        def happens(call: Call, kind: str = kind) -> Fault | None:
            full = call.kind == kind and call.path.startswith("/copy") and not call.path.endswith("copying")
            return Fault(error=errno.ENOSPC) if full else None

        with (
            surrounded(files=SimulatedFiles(disk, faults=happens)),
            pytest.raises(JournalFull, match="the disk is full"),
        ):
            backup("/journal", "/copy")
        assert not {"copy", "copy.partial"} & {*SimulatedFiles(disk).names("/")}


def flip(path: Path, at: int) -> None:
    octets = bytearray(path.read_bytes())
    octets[at] ^= 1
    path.write_bytes(octets)


def test_damage_is_not_copied_unseen(journal: Path, tmp_path: Path) -> None:
    oldest, *_, newest = sorted((journal / "partition-0000").glob("*.segment"))
    flip(oldest, oldest.stat().st_size // 2)
    backup(journal, tmp_path / "unverified")
    with pytest.raises(JournalDamaged, match="is damaged"):
        backup(journal, tmp_path / "copy", verify=True)
    newest.unlink()
    with pytest.raises(JournalDamaged, match="is damaged"):
        backup(journal, tmp_path / "copy")
    (journal / "ledger.sqlite").write_bytes(b"")
    with pytest.raises(JournalDamaged):
        backup(journal, tmp_path / "copy")
    assert names(tmp_path) == ["journal", "unverified"]


def test_all_journals_of_a_folder_are_copied(tmp_path: Path) -> None:
    mailboxes = tmp_path / "mailboxes"
    for number, name in enumerate(("logs", "orders")):
        with Store.open(mailboxes / name, SCHEMA, CONFIG) as store:
            fill(store, 0, 10 * (number + 1))
    copies = backup(mailboxes, tmp_path / "copy")
    assert [(each.directory.name, each.end) for each in copies] == [("logs", {0: 5, 1: 5}), ("orders", {0: 10, 1: 10})]
    assert names(tmp_path / "copy") == ["logs", "orders"]
    assert [each.end for each in restore(tmp_path / "copy", tmp_path / "again")] == [each.end for each in copies]


@pytest.mark.parametrize("archive", ["journal-format-2", "journal-format-3", "journals-0.1"])
def test_journals_of_older_formats_are_copied_as_they_are(archive: str, tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / "data" / f"{archive}.tar.xz") as packed:
        packed.extractall(tmp_path / "old", filter="data")
    for ledger in sorted((tmp_path / "old").rglob("ledger.sqlite")):
        [copied] = backup(ledger.parent, tmp_path / "copies" / ledger.parent.name)
        before = {name: octets for name, octets in state(ledger.parent).items() if "." in name or name == "ends"}
        assert state(copied.directory) == before


def test_a_restored_copy_is_told_apart_from_the_journal_that_went_on(journal: Path, tmp_path: Path) -> None:
    backup(journal, tmp_path / "copy")
    with Store.open(journal, None, CONFIG) as store:
        fill(store, 100, 110)
        newer = store.extent().opening
    [copied] = restore(tmp_path / "copy", tmp_path / "restored", verify=True)
    assert copied.end == {0: 50, 1: 50}
    with Store.open(tmp_path / "restored", None, CONFIG) as store:
        assert not store.reach(newer).known


def test_a_restore_says_how_the_journal_that_is_there_differs(journal: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    backup(journal, copy)

    def refusal(target: Path) -> str:
        with pytest.raises(ConfigurationError) as caught:
            restore(copy, target)
        text = str(caught.value)
        assert text.startswith(f"{target} is there; ")
        assert text.endswith(". Nothing is overwritten: move it away, or name another folder")
        return text.removeprefix(f"{target} is there; ").partition(". Nothing")[0]

    assert refusal(journal) == "it has the same rows as the backup"
    restore(copy, tmp_path / "older")
    with Store.open(journal, None, CONFIG) as store:
        fill(store, 100, 110)
        assert refusal(journal) == "a process has it open, so it is not compared"
    assert refusal(journal) == "the backup is older, and lacks 10 rows (partition 0: 50 to 54, partition 1: 50 to 54)"
    backup(journal, tmp_path / "newer")
    copy = tmp_path / "newer"
    older = tmp_path / "older"
    assert (
        refusal(older)
        == "it is older than the backup, and lacks 10 rows (partition 0: 50 to 54, partition 1: 50 to 54)"
    )
    with Store.open(older, None, CONFIG) as store:
        store.append([(0, rows(7, 8))])
    assert refusal(older) == (
        "it and the backup have parted: it has 2 rows (partition 0: 50 to 51), and the backup 10 rows "
        "(partition 0: 50 to 54, partition 1: 50 to 54)"
    )
    Store.open(tmp_path / "other", SCHEMA, CONFIG).close()
    assert refusal(tmp_path / "other") == "it is another journal"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").startswith("it cannot be compared (")


async def test_a_batch_that_was_staged_at_the_backup_is_staged_again_after_the_restore(tmp_path: Path) -> None:
    async with ActorSystem(ask_timeout=60.0) as system:
        journal = system.spawn(partial(Journal, tmp_path / "journal", SCHEMA, config=CONFIG))
        await journal.ask(StageRows("q", 0, 0, 0, rows(1, 2)))
    await trio.to_thread.run_sync(backup, tmp_path / "journal", tmp_path / "copy")
    async with ActorSystem(ask_timeout=60.0) as system:
        journal = system.spawn(partial(Journal, tmp_path / "copy", None, config=CONFIG))
        with pytest.raises(JournalError, match="staged"):
            await journal.ask(Deliver("q", 0, {0: 0}))
        await journal.ask(StageRows("q", 0, 0, 1, rows(1, 2)))
        delivered = await journal.ask(Deliver("q", 0, {0: 1}))
        assert (delivered.already, delivered.ranges) == (False, {0: (0, 2)})


def test_a_backup_that_is_open_is_not_restored(journal: Path, tmp_path: Path) -> None:
    with Store.open(journal, None, CONFIG), pytest.raises(JournalLocked):
        restore(journal, tmp_path / "copy")
    assert names(tmp_path) == ["journal"]
