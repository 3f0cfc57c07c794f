"""The journal as an actor: group commit, back-pressure, waiting for rows, restarts, cancellation."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402  # noqa: E402
    Append,
    Appended,
    AwaitRows,
    CommitGroup,
    DeclareGroup,
    Deliver,
    Delivered,
    DiscardStaged,
    Envelope,
    ForgetGroup,
    GetExtent,
    GetGroups,
    GetJournalStatistics,
    GetReach,
    GetSchema,
    Journal,
    JournalConfig,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    Keyed,
    OffsetGone,
    OffsetWithin,
    Read,
    ReadEntity,
    SchemaMismatch,
    StageRows,
    Store,
    actor,
    columns_of,
    reading,
)
from levada.actors.journal.ledger import Ledger  # noqa: E402
from levada.framework import ActorSystem, Failed, Ref, bounded, message, restart  # noqa: E402
from levada.framework.errors import ActorStopped, AskTimeout  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402


@message("journal.Line")
class Line:
    number: int
    text: str = ""


COLUMNS = columns_of(Line)
SMALL = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=8192, retain_bytes=None)


def lines(*numbers: int) -> list[Line]:
    return [Line(n) for n in numbers]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0, shutdown_timeout=5.0) as system:
        yield system


def spawn(system: ActorSystem, directory: Path, **settings: Any) -> Ref[Any]:
    return system.spawn(partial(Journal, directory, Line, **settings), name="journal", mailbox=bounded(64))


async def numbers(journal: Ref[Any], partition: int = 0, start: int = 0) -> list[int]:
    found: list[int] = []
    while blocks := await journal.ask(Read(partition, start)):
        for block in blocks:
            found += [line.number for line in COLUMNS.decode(block.batch())]
        start = blocks[-1].end
    return found


async def test_rows_are_on_the_disk_when_the_answer_comes(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    assert await journal.ask(Append(lines(1, 2))) == Appended(0, 0, 2)
    assert await journal.ask(Append(COLUMNS.encode(lines(3)))) == Appended(0, 2, 1)
    files = (tmp_path / "partition-0000").glob("*.segment")
    assert sum(path.read_bytes().count(b"LvB1") for path in files) == 2
    assert await numbers(journal) == [1, 2, 3]
    assert await numbers(journal, start=1) == [2, 3]
    assert await journal.ask(OffsetWithin(0, 0, 3, 1)) == 2
    assert pa.ipc.read_schema(pa.py_buffer(await journal.ask(GetSchema()))).names == ["number", "text"]
    assert (await journal.ask(GetExtent())).end == {0: 3}


async def test_refused_appends_leave_nothing_to_the_collector(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Told or asked: their rows may be large, and refusals come as fast as a peer sends appends."""
    caplog.set_level(logging.CRITICAL)  # records would be kept, with what is in them
    gc.collect()
    gc.disable()
    try:
        async with ActorSystem() as system:
            journal = spawn(system, tmp_path, config=JournalConfig(keyed=Keyed(command="text")))
            await journal.ask(Append([Line(1, "a")]))

            async def refused() -> list[weakref.ref[Append]]:
                appends = [
                    Append(b"no rows"),
                    Append([]),
                    Append(b""),
                    Append([Line(2, "a")]),
                    Append(lines(1), 99),
                ]  # the last: no such partition
                for each in appends:
                    journal.tell(each)
                    with pytest.raises(JournalError):
                        await journal.ask(each)
                return [weakref.ref(each) for each in appends]

            gone = await refused()
            assert await journal.ask(Append([Line(3, "b")])) == Appended(0, 1, 1)
            assert [each() for each in gone] == [None] * 5
    finally:
        gc.enable()


async def test_refusals_of_told_appends_are_few_lines(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flood of them fills no disk with lines: ten a second, then how many more there were."""
    journal = system.spawn(partial(Journal, tmp_path, Line))
    began = trio.current_time()
    for _ in range(2000):
        journal.tell(Append(b"no rows"))
    assert await journal.ask(Append(lines(1)), timeout=None) == Appended(0, 0, 1)
    seconds = int(trio.current_time()) - int(began) + 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    lost = [text for text in said if text.startswith("rows were told, not asked, and are lost: ")]
    assert 10 <= len(lost) <= 10 * seconds
    assert len(said) - len(lost) < seconds


async def test_the_record_of_ends_is_synced_soon_after_the_last_append(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later append does it."""
    journal = spawn(system, tmp_path, clean_every=3600.0)
    await journal.ask(Append(lines(1)), timeout=None)
    ends = (tmp_path / "ends").stat().st_ino
    synced = threading.Event()
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        real(descriptor)
        if os.fstat(descriptor).st_ino == ends:
            synced.set()

    monkeypatch.setattr(REAL.files, "fdatasync", sync)
    await journal.ask(Append(lines(2)), timeout=None)
    assert await trio.to_thread.run_sync(synced.wait, 20, abandon_on_cancel=True)


async def test_tasks_that_never_stop_staging_hold_up_no_append(system: ActorSystem, tmp_path: Path) -> None:
    """Two of them are enough for one to be waiting at any time."""
    journal = spawn(system, tmp_path, config=JournalConfig(max_staged_bytes=2 << 20))

    async def stage(part: int) -> None:
        while True:
            await journal.ask(StageRows("q", 0, part, 1, lines(1)))

    async with trio.open_nursery() as nursery:
        for part in range(2):
            nursery.start_soon(stage, part)
        await wait_all_tasks_blocked()
        assert await journal.ask(Append(lines(1)), timeout=100) == Appended(0, 0, 1)
        nursery.cancel_scope.cancel()


async def test_a_dedicated_process_writes_a_lone_append_without_a_thread_while_the_disk_is_quick(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, now = 0.0, 0.0
    threads: list[bool] = []
    real, here = os.fdatasync, threading.get_ident()

    def sync(descriptor: int) -> None:
        nonlocal now
        real(descriptor)
        now += took
        threads.append(threading.get_ident() != here)

    async def append(*rows: int) -> bool:
        threads.clear()
        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(journal.ask, Append(lines(row)))
        return all(threads)

    system.platform = attrs.evolve(system.platform, perf_counter=lambda: now)
    journal = spawn(system, tmp_path, dedicated=True, clean_every=3600.0)
    await journal.ask(GetExtent())
    monkeypatch.setattr(REAL.files, "fdatasync", sync)
    assert await append(1)  # nothing is known of the disk yet
    assert not await append(2)
    assert await append(3, 4, 5)
    assert await append(6)  # others may be about to come
    assert not await append(7)
    took = 0.003  # it begins to be slow, which only the next write can tell
    assert not await append(8)
    assert await append(9)
    took = 0.001
    assert await append(10)
    assert not await append(11)
    with monkeypatch.context() as patch:
        patch.setattr("levada.actors.journal.writing.QUICK_BYTES", 1)
        assert await append(12)
    assert sorted(await numbers(journal)) == list(range(1, 13))


async def test_an_actor_among_others_leaves_every_append_to_a_thread(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = spawn(system, tmp_path, clean_every=3600.0)
    await journal.ask(GetExtent())
    threads: list[int] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        real(descriptor)
        threads.append(threading.get_ident())

    monkeypatch.setattr(REAL.files, "fdatasync", sync)
    for row in range(3):
        await journal.ask(Append(lines(row)))
    assert len(threads) >= 3
    assert threading.get_ident() not in threads


async def test_many_small_asks_share_a_sync(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    answers: list[Any] = []

    async def ask(n: int) -> None:
        answers.append(await journal.ask(Append(lines(n))))

    async with trio.open_nursery() as nursery:
        for n in range(300):
            nursery.start_soon(ask, n)
    assert sorted(answer.first for answer in answers) == list(range(300))
    statistics = await journal.ask(GetJournalStatistics())
    assert (statistics.appends, statistics.store.rows_appended) == (300, 300)
    assert statistics.store.syncs == statistics.store.appends < 60
    assert (statistics.appends_waiting, statistics.bytes_waiting, statistics.full) == (0, 0, False)
    assert sorted(await numbers(journal)) == list(range(300))


async def test_appends_of_one_sender_are_in_order(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    for n in range(200):
        await journal.send(Append(lines(n)))
    await journal.ask(Append(lines(200)))
    assert await numbers(journal) == list(range(201))


async def test_partitions_by_key_and_in_turns(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=JournalConfig(partitions=4))
    by_key = [(await journal.ask(Append(lines(n), key=f"host-{n % 8}"))).partition for n in range(24)]
    assert by_key[:8] == by_key[8:16] == by_key[16:]
    assert len(set(by_key)) > 1
    in_turns = [(await journal.ask(Append(lines(n)))).partition for n in range(8)]
    assert sorted(in_turns) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (await journal.ask(Append(lines(1), partition=3))).partition == 3


async def test_one_bad_append_spoils_no_other(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    errors: list[Exception] = []

    async def ask(rows: Any) -> None:
        try:
            await journal.ask(Append(rows))
        except JournalError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        bad = [Line("x"), [], pa.record_batch({"a": [1]})]  # type: ignore[arg-type]
        for rows in (lines(1), [bad[0]], lines(2), bad[1], bad[2], lines(3)):
            nursery.start_soon(ask, rows)
    assert sorted(await numbers(journal)) == [1, 2, 3]
    assert sorted(str(error) for error in errors) == [
        f"{tmp_path}: an append has one row or more",
        "Line.number, row 0: expected int, got str",
        "the columns differ from the journal's: number: missing, wanted int64 not null; "
        "text: missing, wanted string not null; a: int64, not wanted",
    ]


async def test_a_journal_of_envelopes(system: ActorSystem, tmp_path: Path) -> None:
    journal = system.spawn(Journal, tmp_path)
    envelope = Envelope(dt.datetime(2024, 1, 2, tzinfo=dt.UTC), key="k", value=b"v")
    await journal.ask(Append([envelope]))
    with pytest.raises(SchemaMismatch, match="the columns differ from the journal's"):
        await journal.ask(Append(lines(1)))
    with pytest.raises(SchemaMismatch, match="rows are a record batch or messages"):
        await journal.ask(Append([5]))
    [block] = await journal.ask(Read(0, 0))
    assert columns_of(Envelope).decode(block.batch()) == [envelope]


async def test_rows_can_be_waited_for(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=JournalConfig(partitions=2))
    ends: list[tuple[str, dict[int, int]]] = []

    async def wait(name: str, rows: int) -> None:
        ends.append((name, dict((await journal.ask(AwaitRows({0: 0, 1: 0}, rows), timeout=None)).end)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "three", 3)
        nursery.start_soon(wait, "one", 1)
        await wait_all_tasks_blocked()
        assert ends == []
        assert (await journal.ask(GetJournalStatistics())).readers_waiting == 2
        await journal.ask(Append(lines(1), partition=1))
        await wait_all_tasks_blocked()
        assert ends == [("one", {0: 0, 1: 1})]
        await journal.ask(Append(lines(2, 3), partition=0))
    assert ends[1:] == [("three", {0: 2, 1: 1})]
    assert (await journal.ask(AwaitRows({0: 1}))).end == {0: 2, 1: 1}
    with pytest.raises(AskTimeout):
        await journal.ask(AwaitRows({0: 2, 1: 1}), timeout=0.01)
    assert (await journal.ask(GetJournalStatistics())).readers_waiting == 0


async def test_groups_hold_rows_and_forgetting_lets_them_go(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=attrs.evolve(SMALL, max_bytes=1 << 20))
    assert await journal.ask(DeclareGroup("a")) == {0: 0}
    for n in range(0, 150, 10):
        await journal.ask(Append(lines(*range(n, n + 10))))
    assert (await journal.ask(GetExtent())).first == {0: 0}
    await journal.ask(CommitGroup("a", {0: 40}))
    assert await journal.ask(GetGroups()) == {"a": {0: 40}}
    with pytest.raises(JournalError, match="the offset is 151, wanted 0 to 150"):
        await journal.ask(CommitGroup("a", {0: 151}))
    with pytest.raises(JournalError, match="no group 'b'"):
        await journal.ask(CommitGroup("b", {0: 0}))
    await journal.ask(CommitGroup("a", {0: 150}))
    first = (await journal.ask(GetExtent())).first[0]
    assert first > 0
    with pytest.raises(OffsetGone):
        await journal.ask(Read(0, first - 1))
    await journal.ask(ForgetGroup("a"))
    assert await journal.ask(GetGroups()) == {}


async def test_a_full_journal_holds_senders_back_until_a_group_has_read(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=SMALL, clean_every=3600.0)
    await journal.ask(DeclareGroup("reader"))
    written: list[int] = []

    async def fill() -> None:
        for n in range(0, 600, 10):
            await journal.ask(Append(lines(*range(n, n + 10))), timeout=None)
            written.append(n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        read = 0
        while len(written) < 60:
            while not (await journal.ask(GetJournalStatistics())).full and len(written) < 60:
                await wait_all_tasks_blocked(0.001)  # a loop that never waits would starve the journal's thread
            assert (await journal.ask(GetJournalStatistics())).store.bytes_stored <= 8192
            found = await numbers(journal, start=read)
            assert found == list(range(read, read + len(found)))
            read += len(found)
            await journal.ask(CommitGroup("reader", {0: read}))
    assert (await journal.ask(GetExtent())).end == {0: 600}


async def test_no_more_wait_for_room_than_may(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=SMALL, max_waiting=3, clean_every=3600.0)
    await journal.ask(DeclareGroup("reader"))
    outcomes: list[str] = []

    async def ask(n: int) -> None:
        try:
            await journal.ask(Append(lines(*range(n, n + 10))), timeout=None)
            outcomes.append("appended")
        except JournalFull as error:
            outcomes.append(error.detail)

    async def fill() -> None:
        while outcomes.count("appended") == len(outcomes) and not full:
            await ask(0)

    full: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        while not (await journal.ask(GetJournalStatistics())).full:
            await wait_all_tasks_blocked(0.001)
        full.append(True)
        before = len(outcomes)
        for _ in range(5):
            nursery.start_soon(ask, 0)
        await wait_all_tasks_blocked()
        assert outcomes[before:] == ["it is full, and 3 appends wait already (max_waiting)"] * 3
        assert (await journal.ask(GetJournalStatistics())).appends_refused == 3
        end = (await journal.ask(GetExtent())).end[0]
        await journal.ask(CommitGroup("reader", {0: end}))
    assert outcomes.count("appended") == before + 3


async def test_a_disk_that_has_room_again_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: ActorSystem
) -> None:
    journal = spawn(system, tmp_path, clean_every=0.01)
    await journal.ask(Append(lines(1)))
    refused = threading.Event()
    real = os.pwritev

    def refuse(*args: Any) -> int:
        if not refused.is_set():
            refused.set()
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(REAL.files, "pwritev", refuse)
    assert await journal.ask(Append(lines(2))) == Appended(0, 1, 1)
    assert refused.is_set()
    assert await numbers(journal) == [1, 2]


async def test_a_batch_is_delivered_once_from_the_attempts_that_won(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, config=JournalConfig(partitions=2))
    assert await journal.ask(StageRows("q", 7, 0, 0, lines(99))) == 1
    assert await journal.ask(StageRows("q", 7, 0, 1, lines(1, 2))) == 2
    assert await journal.ask(StageRows("q", 7, 0, 1, lines(3))) == 3
    assert await journal.ask(StageRows("q", 7, 1, 0, COLUMNS.encode(lines(4)))) == 1
    assert await journal.ask(StageRows("q", 8, 0, 0, lines(5))) == 1
    with pytest.raises(JournalError, match="batch 7 of q: the rows of part 2 are not staged, there are 0"):
        await journal.ask(Deliver("q", 7, {0: 1, 2: 0}))
    assert (await journal.ask(GetExtent())).end == {0: 0, 1: 0}
    assert await journal.ask(Deliver("q", 7, {0: 1, 1: 0})) == Delivered(False, {0: (0, 3), 1: (0, 1)})
    assert await journal.ask(Deliver("q", 7, {0: 1, 1: 0})) == Delivered(True, {0: (0, 3), 1: (0, 1)})
    assert (await numbers(journal, 0), await numbers(journal, 1)) == ([1, 2, 3], [4])
    assert len(list((tmp_path / "staging").iterdir())) == 1
    assert await journal.ask(DiscardStaged("q", 8, part=0, attempt=5)) == 0
    assert await journal.ask(DiscardStaged("q", 8)) == 1
    assert list((tmp_path / "staging").iterdir()) == []
    with pytest.raises(SchemaMismatch):
        await journal.ask(StageRows("q", 9, 0, 0, pa.record_batch({"a": [1]})))
    assert await journal.ask(Deliver("q", 9)) == Delivered(False, {})


async def test_two_actors_cannot_keep_the_same_journal(system: ActorSystem, tmp_path: Path) -> None:
    await spawn(system, tmp_path).ask(GetExtent())
    reason = await system.spawn(partial(Journal, tmp_path, Line), name="second").terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, JournalLocked)


async def test_what_was_asked_for_is_written_when_it_stops(tmp_path: Path) -> None:
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path)
        for n in range(50):
            await journal.send(Append(lines(n)))
    with Store.open(tmp_path) as store:
        assert store.extent().end == {0: 50}


async def test_a_ledger_that_refuses_starts_the_actor_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line was written, nobody was told: asked again, the batch is there already."""
    real = Ledger.deliver
    failures = [sqlite3.OperationalError("disk I/O error")]

    def refuse(ledger: Ledger, *args: Any) -> None:
        real(ledger, *args)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(Ledger, "deliver", refuse)
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, Line), supervise=restart())
        await journal.ask(StageRows("q", 0, 0, 0, lines(1, 2)))
        with pytest.raises(JournalError, match="was cut short, open the journal again"):
            await journal.ask(Deliver("q", 0, {0: 0}))
        assert await journal.ask(Deliver("q", 0, {0: 0})) == Delivered(True, {0: (0, 2)})
        assert await numbers(journal) == [1, 2]
        assert system.statistics().restarts == 1


async def test_questions_that_wait_fail_at_once_when_the_journal_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time-out, too: what waits for room, for rows or behind the write that broke the journal."""
    begun, go_on = threading.Event(), threading.Event()
    real = Ledger.deliver
    failures = [sqlite3.OperationalError("disk I/O error")]

    def refuse(ledger: Ledger, *args: Any) -> None:
        begun.set()
        go_on.wait(20)
        real(ledger, *args)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(Ledger, "deliver", refuse)
    ends: dict[str, BaseException] = {}
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, tmp_path, Line), supervise=restart())
        await journal.ask(StageRows("q", 0, 0, 0, lines(1, 2)))

        async def ask(question: Any) -> None:
            try:
                await journal.ask(question, timeout=None)
            except JournalError as error:
                ends[type(question).__name__] = error
            except ActorStopped as error:
                ends[type(question).__name__] = error.__cause__ or error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, Deliver("q", 0, {0: 0}))
            await trio.to_thread.run_sync(begun.wait)
            nursery.start_soon(ask, Append(lines(3)))
            nursery.start_soon(ask, GetGroups())
            nursery.start_soon(ask, AwaitRows({0: 100}))
            await wait_all_tasks_blocked()
            go_on.set()
        assert {name: type(error) for name, error in ends.items()} == dict.fromkeys(
            ("Deliver", "Append", "GetGroups", "AwaitRows"), JournalUnwritable
        )
        assert await numbers(journal) == [1, 2]  # the delivery was on the disk


async def test_killed_in_a_write_it_waits_for_the_disk_and_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait(20)
        real(descriptor)

    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path)
        await journal.ask(Append(lines(1)))
        monkeypatch.setattr(REAL.files, "fdatasync", slow)
        outcomes: list[object] = []

        async def ask() -> None:
            try:
                outcomes.append(await journal.ask(Append(lines(2))))
            except ActorStopped as error:
                outcomes.append(type(error.reason).__name__)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(begun.wait, 20)
            journal.kill()
            await wait_all_tasks_blocked()
            go_on.set()
        await journal.terminated()
        # It was on its way to the disk, so the answer is true.
        assert outcomes == [Appended(0, 1, 1)]
    with Store.open(tmp_path) as store:
        assert store.extent().end == {0: 2}


@pytest.mark.parametrize(
    "question",
    [
        Append(lines(5)),
        AwaitRows({0: 10}),
        Read(0, 0),
        OffsetWithin(0, 0, 1, 1),
        StageRows("q", 0, 0, 0, lines(6)),
        Deliver("q", 1),
        DiscardStaged("q", 0),
        DeclareGroup("g"),
        GetGroups(),
    ],
    ids=lambda question: type(question).__name__,
)
async def test_an_asker_that_is_cancelled_disturbs_nobody(system: ActorSystem, tmp_path: Path, question: Any) -> None:
    """Cancelled before the question is looked at, and while the answer is on its way; the next one is answered."""
    journal = spawn(system, tmp_path)
    assert await journal.ask(Append(lines(1))) == Appended(0, 0, 1)
    for wait in (False, True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.ask, question)
            if wait:
                await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    done = await journal.ask(Append(lines(2)))
    assert isinstance(done, Appended)
    end = done.first
    assert (await numbers(journal))[end] == 2
    assert (await journal.ask(GetJournalStatistics())).appends_waiting == 0


async def test_an_append_given_up_before_its_turn_is_not_written(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait(20)
        real(descriptor)

    journal = spawn(system, tmp_path)
    await journal.ask(Append(lines(1)))
    monkeypatch.setattr(REAL.files, "fdatasync", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.ask, Append(lines(2)))
        await trio.to_thread.run_sync(begun.wait, 20)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(journal.ask, Append(lines(3)))
                await wait_all_tasks_blocked()
                scope.cancel()
        go_on.set()
    assert await numbers(journal) == [1, 2]


@pytest.mark.parametrize("killed", [False, True])
async def test_an_asker_that_is_cancelled_in_a_turn_that_reads_for_several_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    begun, go_on, together = threading.Event(), threading.Event(), list[int]()
    real = reading.entities_of

    def slow(store: Store, questions: Sequence[ReadEntity]) -> Iterator[Any]:
        together.append(len(questions))
        begun.set()
        go_on.wait(20)
        return real(store, questions)

    monkeypatch.setattr(actor, "entities_of", slow)
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path, config=JournalConfig(keyed=Keyed(entity="text")))
        await journal.ask(Append([Line(number, str(number)) for number in (1, 2, 3)]))
        found: dict[int, object] = {}

        async def ask(number: int) -> None:
            try:
                answer = await journal.ask(ReadEntity(str(number), partition=0))
                found[number] = answer.batch().column("number").to_pylist()
            except ActorStopped as error:
                found[number] = type(error.reason).__name__

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    nursery.start_soon(ask, 1)
                    inner.start_soon(ask, 2)
                    nursery.start_soon(ask, 3)
                    await trio.to_thread.run_sync(begun.wait, 20)
                    await wait_all_tasks_blocked()
                    if killed:
                        journal.kill()
                    scope.cancel()
            go_on.set()
        if killed:
            await journal.terminated()
            assert all(answer in ([number], "Killed") for number, answer in found.items())
            assert found.keys() == {1, 3}
        else:
            assert found == {1: [1], 3: [3]}
            assert sum(together) >= 3
            assert max(together) > 1
            await ask(2)
            assert found[2] == [2]
        assert system.observe.waits() == []
    with Store.open(tmp_path) as store:
        assert store.extent().end == {0: 3}


async def test_cancelled_while_it_opens_it_lets_go(tmp_path: Path) -> None:
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path)
        await wait_all_tasks_blocked(0.001)
        journal.kill()
        await journal.terminated()
        with Store.open(tmp_path, COLUMNS.schema) as store:
            assert set(store.extent().end.values()) == {0}


async def test_senders_wait_while_too_much_waits_for_the_disk(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Octets that wait are bounded, then the mailbox is, then `send` waits."""
    begun, go_on = threading.Event(), threading.Event()
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait(20)
        real(descriptor)

    journal = system.spawn(partial(Journal, tmp_path, Line, max_pending_bytes=3000), mailbox=bounded(4))
    await journal.ask(Append(lines(0)))
    monkeypatch.setattr(REAL.files, "fdatasync", slow)
    sent: list[int] = []

    async def flood() -> None:
        for n in range(1, 41):
            await journal.send(Append(lines(n)))
            sent.append(n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        await trio.to_thread.run_sync(begun.wait, 20)
        await wait_all_tasks_blocked()
        # About 12 of 257 octets each, one that the handler holds, and 4 in the mailbox.
        assert 12 <= len(sent) <= 18
        go_on.set()
    await journal.ask(Append(lines(41)))
    assert await numbers(journal) == list(range(42))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Append(5),
        lambda: Append([], partition="0"),  # type: ignore[arg-type]
        lambda: CommitGroup("g", 5),  # type: ignore[arg-type]
        lambda: Deliver(b"q", 1),  # type: ignore[arg-type]
        lambda: Read(0, None),  # type: ignore[arg-type]
        lambda: CommitGroup("g", {0: "1"}),  # type: ignore[dict-item]
        lambda: CommitGroup("g", {"0": 1}),  # type: ignore[dict-item]
        lambda: AwaitRows({0: None}),  # type: ignore[dict-item]
        lambda: Deliver("q", 1, {0: "0"}),  # type: ignore[dict-item]
        lambda: Deliver("q", 1, {0: 0}, {None: 0}),  # type: ignore[dict-item]
    ],
)
def test_a_question_of_the_wrong_types_is_none(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("name", ["\ud800", "x" * 1001])
@pytest.mark.parametrize(
    "make",
    [
        DeclareGroup,
        ForgetGroup,
        GetReach,
        lambda name: CommitGroup(name, {0: 1}),
        lambda name: StageRows(name, 0, 0, 0, []),
        lambda name: Deliver(name, 0),
        lambda name: DiscardStaged(name, 0),
    ],
)
def test_a_name_that_cannot_be_kept_is_refused_where_it_is_given(make: Any, name: str) -> None:
    """The journal would fail on it, and with it all its questions."""
    with pytest.raises(ValueError):  # noqa: PT011 - Python's own, and attrs' own
        make(name)


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "\N{PILE OF POO}" * 1000, "../../x", "'; DROP TABLE groups"])
async def test_any_other_name_is_kept(system: ActorSystem, tmp_path: Path, name: str) -> None:
    journal = system.spawn(Journal, tmp_path, Line)
    await journal.ask(Append(lines(1)))
    await journal.ask(DeclareGroup(name))
    await journal.ask(CommitGroup(name, {0: 1}))
    await journal.ask(StageRows(name, 0, 0, 0, lines(2)))
    assert (await journal.ask(Deliver(name, 0, {0: 0}))).ranges == {0: (1, 2)}
    await journal.ask(StageRows(name, 1, 0, 0, lines(3)))
    journal.stop()
    await journal.terminated()
    with Store.open(tmp_path) as store:
        assert store.groups() == {name: {0: 1}}
        assert store.delivered(name, 0) is not None
        assert store.staged(name, 1)[0, 0].rows == 1
