"""Erasure: the rows of an entity are gone from the files, whatever happens meanwhile, and nothing else is."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.pace import every
from tests.surroundings import surrounded

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    CommitGroup,
    DeclareGroup,
    Erased,
    EraseEntity,
    FindCommand,
    GetExtent,
    GetGroups,
    Journal,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    Keyed,
    Read,
    ReadEntity,
    ReadRows,
    Store,
    columns_of,
)
from levada.actors.journal.erasures import TRY_EVERY  # noqa: E402
from levada.actors.journal.inspection import inspect  # noqa: E402
from levada.framework import ActorSystem, Ref, bounded, message  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402
from levada.framework.testing.simulation import (  # noqa: E402
    Call,
    Crashed,
    Fault,
    SimulatedDisk,
    SimulatedFiles,
)


@message("erase.Event")
class Event:
    entity: str | None
    number: int
    text: str
    tags: list[str]
    command: str | None = None


COLUMNS = columns_of(Event)
KEYED = Keyed(entity="entity", command="command")
SMALL = JournalConfig(keyed=KEYED, segment_bytes=6144, block_bytes=2048, retain_bytes=None)


def event(entity: str, number: int) -> Event:
    return Event(entity, number, f"{entity}'s {number}" * 3, [f"{entity}:{number}"], f"{entity}-{number}")


def batch(*events: Event) -> Any:
    return COLUMNS.encode(events)


def open_store(directory: Path, config: JournalConfig = SMALL) -> Store:
    return Store.open(directory, COLUMNS.schema, config)


NAMES = ("anna", "ben", "carl")


def fill(store: Store, rows: int, start: int = 0) -> None:
    """Batches of one to five rows, of three entities in turn."""
    lot = random.Random(start)
    at = start
    while at < start + rows:
        here = min(lot.randrange(1, 6), start + rows - at)
        store.append([(0, batch(*[event(NAMES[n % 3], n) for n in range(at, at + here)]))])
        at += here


def rows_in(store: Store) -> dict[int, tuple[str | None, int]]:
    """Entity and number of all rows by offset, by reading all of them."""
    return {
        first + n: (each.entity, each.number)
        for first, rows in store.batches(0, store.extent().first[0])
        for n, each in enumerate(COLUMNS.decode(rows))
    }


def found(store: Store, entity: str) -> list[tuple[int, int]]:
    return [
        row
        for _, each in store.rows_of(entity, partition=0)
        for row in zip(each.column("offset").to_pylist(), each.column("number").to_pylist(), strict=True)
    ]


def erase(store: Store, entity: str, before: int | None = None) -> int:
    return sum(store.erase(entity, partition=0, before=before))


def octets(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob("partition-*/*")))


def expect(store: Store, rows: dict[int, tuple[str, int]], end: int) -> None:
    """The store has exactly these rows, by every way to read them."""
    assert rows_in(store) == rows
    assert store.extent().end[0] == end
    for name in NAMES:
        own = [(at, number) for at, (entity, number) in rows.items() if entity == name]
        assert found(store, name) == own
        newest = [each.column("offset").to_pylist() for each in store.newest_of(name, 2, partition=0)]
        assert [at for each in newest[::-1] for at in each] == [at for at, _ in own[-2:]]
        for number in range(0, end, 11):
            taken = store.taken(0, f"{name}-{number}")
            assert (taken is not None) == (rows.get(number) == (name, number))
    at, read = 0, dict[int, int]()
    while at < end:
        blocks = list(store.read(0, at, max_bytes=1000))
        assert blocks[0].first == at
        for block in blocks:
            assert block.first == at
            numbers = block.batch().column("number").to_pylist()
            assert len(numbers) == (0 if block.erased else block.rows)
            read.update(zip(range(block.first, block.end), numbers, strict=False))
            at = block.end
    assert read == {at: number for at, (_, number) in rows.items()}


def after(end: int, *gone: str, before: int | None = None) -> dict[int, tuple[str, int]]:
    stop = end if before is None else before
    return {n: (NAMES[n % 3], n) for n in range(end) if n >= stop or NAMES[n % 3] not in gone}


def test_rows_of_an_entity_are_gone_from_the_files(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store, 200)
        assert store.statistics().segments > 4
        assert b"anna" in octets(tmp_path)
        assert erase(store, "anna") == 67
        assert b"anna" not in octets(tmp_path)
        expect(store, after(200, "anna"), 200)
        assert {path.suffix for path in (tmp_path / "partition-0000").iterdir()} == {".segment", ".index"}
        fill(store, 60, start=200)
        assert erase(store, "ben", before=201) == 67
        rows = {at: row for at, row in after(260, "ben", before=201).items() if row[0] != "anna" or at >= 200}
        expect(store, rows, 260)
        assert erase(store, "nobody") == 0
        assert erase(store, "ben", before=201) == 0
    with inspect(tmp_path, blocks=True) as seen:
        assert seen.findings == []
    with open_store(tmp_path) as store:
        expect(store, rows, 260)


@pytest.mark.parametrize("name", ["everything", "the end", "the beginning"])
def test_rows_at_the_edges(tmp_path: Path, name: str) -> None:
    """A whole journal, its newest rows, its oldest."""
    with open_store(tmp_path) as store:
        if name == "the beginning":
            fill(store, 30)
        store.append([(0, batch(*[event("dora", n) for n in range(30)])) for _ in range(3)])
        if name == "the end":
            fill(store, 30, start=90)
        end = store.extent().end[0]
        assert erase(store, "dora") == 90
        left = rows_in(store)
        assert len(left) == end - 90
        assert all(entity != "dora" for entity, _ in left.values())
        [answer] = store.append([(0, batch(event("anna", 1)))])
        assert answer == Appended(0, end, 1)
    with open_store(tmp_path) as store:
        assert rows_in(store) == {**left, end: ("anna", 1)}


@pytest.mark.ci
def test_small_blocks_are_merged_around_erased_rows(tmp_path: Path) -> None:
    config = JournalConfig(keyed=KEYED, sync="never", segment_bytes=48 << 10, block_bytes=8 << 10, retain_bytes=1 << 20)
    with open_store(tmp_path, config) as store:
        fill(store, 140)
        erase(store, "ben")
        before = octets(tmp_path).count(b"LvB1")
        fill(store, 700, start=140)
        rows = {at: row for at, row in after(840).items() if row[0] != "ben" or at >= 140}
        expect(store, rows, 840)
        first = min((tmp_path / "partition-0000").glob("*.segment"))
        assert before > first.read_bytes().count(b"LvB1") > 90
    with open_store(tmp_path, config) as store:
        expect(store, rows, 840)
        erase(store, "carl")
        expect(store, {at: row for at, row in rows.items() if row[0] != "carl"}, 840)


def test_a_trim_deletes_the_files_without_rows_and_no_other(tmp_path: Path) -> None:
    def firsts() -> list[int]:
        return sorted(int(path.stem) for path in tmp_path.glob("partition-*/*.segment"))

    with open_store(tmp_path) as store:
        fill(store, 200)
        before, files = rows_in(store), firsts()
        assert len(files) > 3
        # All rows of the first file but one; then the last one, and those of the second file.
        for end, files_left in ((files[1] - 1, files), (files[2], files[2:])):
            assert sum(store.trim(0, [range(end)])) > 0
            assert rows_in(store) == {offset: row for offset, row in before.items() if offset >= end}
            assert firsts() == files_left


@pytest.mark.parametrize("newest_too", [False, True])
def test_the_newest_file_is_sealed_if_a_trim_takes_rows_from_it_and_many_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest_too: bool
) -> None:
    """So that the places of rows that are gone do not stay in the file that is written. A trim of other files leaves it."""
    monkeypatch.setattr("levada.actors.journal.erasures.MANY_GONE", 1)
    with open_store(tmp_path) as store:
        fill(store, 200)
        before, newest = rows_in(store), max(tmp_path.glob("partition-*/*.segment"))
        end = int(newest.stem) + 1 if newest_too else 10
        sum(store.trim(0, [range(end)]))
        assert (max(tmp_path.glob("partition-*/*.segment")) > newest) == newest_too
        assert rows_in(store) == {offset: row for offset, row in before.items() if offset >= end}
        assert store.append([(0, batch(event("anna", 200)))]) == [Appended(0, 200, 1)]


def test_rows_that_were_never_synced_are_on_the_disk_before_a_trim_is_recorded() -> None:
    """Else a power failure leaves a log that ends before the offset up to which it says that it was trimmed."""
    disk = SimulatedDisk("lax")

    def happens(call: Call) -> Fault | None:
        return Fault(crash=True) if call.kind == "link" else None  # the first step behind the record

    with suppress(Crashed), surrounded(files=SimulatedFiles(disk, faults=happens)):
        store = Store.open("/log", COLUMNS.schema, attrs.evolve(SMALL, sync="never"))
        store.append([(0, batch(*[event("anna", n) for n in range(10)]))])
        sum(store.trim(0, [range(5)]))
    disk.power_failure(0, share=0.0)
    with surrounded(files=SimulatedFiles(disk)), Store.open("/log", COLUMNS.schema, SMALL) as store:
        assert (store.extent().trimmed, store.extent().end) == ({0: 5}, {0: 10})
        assert rows_in(store) == {n: ("anna", n) for n in range(10)}


@pytest.mark.parametrize("octet", [0, 7, 16], ids=["magic", "length", "offset"])
def test_a_block_that_is_damaged_under_an_open_journal_is_named(tmp_path: Path, octet: int) -> None:
    """Its file had been read whole, and its places are known."""
    with open_store(tmp_path) as store:
        fill(store, 60)
        assert len(rows_in(store)) == 60
        path = min(tmp_path.glob("partition-*/*.segment"))
        octets = bytearray(path.read_bytes())
        first, second = octets.find(b"LvB1"), octets.find(b"LvB1", octets.find(b"LvB1") + 1)
        assert 0 < first < second
        octets[second + octet] ^= 0x40
        path.write_bytes(octets)
        reads: list[Callable[[Store], object]] = [rows_in, partial(found, entity="ben")]
        if octet < 16:
            reads.append(lambda store: store.offset_within(0, 0, 60, max_bytes=1 << 20))
        for read in reads:
            with pytest.raises(JournalDamaged, match=f"the block at byte {second}, offset") as caught:
                read(store)
            assert caught.value.path == str(path)


def test_readers_under_way_go_on(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store, 200)
        mapped = list(store.read(0, 0, max_bytes=1 << 20))
        reading = store.batches(0, 0)
        numbers = next(reading)[1].column("number").to_pylist()
        erase(store, "anna")
        assert [n for block in mapped for n in block.batch().column("number").to_pylist()] == list(range(200))
        for _, each in reading:
            numbers += each.column("number").to_pylist()
        assert [n for n in numbers if NAMES[n % 3] != "anna"] == [n for n in range(200) if n % 3]


@pytest.mark.ci
def test_a_power_failure_at_any_moment_leaves_all_rows_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files as they are before and after each link, rename and deletion are opened: an erasure that began is finished."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(Path(shutil.copytree(tmp_path / "journal", tmp_path / f"copy{len(copies)}")))

    def noted(name: str) -> None:
        real = getattr(REAL.files, name)

        def call(path: Path, *rest: Any) -> Any:
            if "partition" in str(path):
                copy()
            done = real(path, *rest)
            if "partition" in str(path):
                copy()
            return done

        monkeypatch.setattr(REAL.files, name, call)

    with open_store(tmp_path / "journal") as store:
        fill(store, 100)
        store.declare_group("readers")
        store.commit_group("readers", {0: 3})
        steps = iter(store.erase("anna", partition=0))
        for name in ("link", "rename", "unlink"):
            noted(name)
        for _ in steps:
            copy()
        monkeypatch.undo()
        expect(store, after(100, "anna"), 100)
    assert len(copies) > 30
    for path in copies:
        with open_store(path) as store:
            expect(store, after(100, "anna"), 100)
            assert store.groups() == {"readers": {0: 3}}
        assert b"anna" not in octets(path)
        assert {each.suffix for each in (path / "partition-0000").iterdir()} == {".segment", ".index"}
        with inspect(path, blocks=True) as seen:
            assert seen.findings == []
        shutil.rmtree(path)


def test_an_erasure_that_cannot_be_finished_without_the_key_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        fill(store, 100)
        next(store.erase("anna", partition=0))
    with Store.open(tmp_path, COLUMNS.schema) as store:
        assert store.extent().end == {0: 100}
    assert ["open it with Keyed(entity='entity')" in text for text in caplog.messages] == [True]
    with open_store(tmp_path) as store:
        expect(store, after(100, "anna"), 100)


def test_an_entity_that_is_named_by_bytes_is_erased_by_the_next_opening(tmp_path: Path) -> None:
    schema = pa.schema([("entity", pa.binary()), ("n", pa.int64())])
    config = attrs.evolve(SMALL, keyed=Keyed(entity="entity"), segment_bytes=1024, block_bytes=512)
    names = [b"\x00\xff", b"b"]
    with Store.open(tmp_path, schema, config) as store:
        for n in range(20):
            store.append([(0, pa.record_batch([pa.array(names), pa.array([n, n])], schema=schema))])
        assert store.statistics().segments > 1
        assert next(store.erase(names[0], partition=0)) > 0
    with Store.open(tmp_path, schema, config) as store:
        left = [(row["entity"], row["n"]) for _, rows in store.batches(0, 0) for row in rows.to_pylist()]
        assert left == [(b"b", n) for n in range(20)]


def test_an_erasure_that_the_disk_refused_at_the_opening_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wait for the next opening."""
    clock = [1000.0]
    with open_store(tmp_path) as store:
        fill(store, 100)
        next(store.erase("anna", partition=0))

    real = os.pwritev

    def full(descriptor: int, *rest: Any) -> int:
        if "partition-0000" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return real(descriptor, *rest)

    with monkeypatch.context() as patch, surrounded(monotonic=lambda: clock[0]):
        patch.setattr(REAL.files, "pwritev", full)
        store = open_store(tmp_path)
    with store:
        assert ["rows that were to be erased are still there" in text for text in caplog.messages] == [True]
        store.look()
        assert len(rows_in(store)) > 66
        clock[0] += TRY_EVERY
        store.look()
        expect(store, after(100, "anna"), 100)
        clock[0] += TRY_EVERY
        store.look()
    with open_store(tmp_path) as store:
        expect(store, after(100, "anna"), 100)


def test_a_full_disk_leaves_the_rows_until_it_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        fill(store, 100)

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(REAL.files, "pwritev", full)
        with pytest.raises(JournalFull):
            erase(store, "anna")
        monkeypatch.undo()
        expect(store, after(100), 100)
        assert {path.suffix for path in (tmp_path / "partition-0000").iterdir()} == {".segment", ".index"}
        assert erase(store, "anna") == 34
        expect(store, after(100, "anna"), 100)


@pytest.mark.ci
def test_a_damaged_journal_with_erased_rows_is_named_or_whole(tmp_path: Path) -> None:
    """Cut, flipped or removed at random places, also while an erasure is under way: never other rows than there were."""
    with open_store(tmp_path / "good") as store:
        fill(store, 100)
        erase(store, "anna")
        steps = store.erase("ben", partition=0)
        next(steps)
        shutil.copytree(tmp_path / "good", tmp_path / "open")
    whole = after(100, "anna", "ben")
    lot = random.Random(0)
    opened = 0
    for trial in range(0, 150, every(3)):
        copy = Path(shutil.copytree(tmp_path / ("good", "open")[trial % 2], tmp_path / f"copy{trial}"))
        files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size]
        path = lot.choice([each for each in files if each.suffix != ".sqlite-shm" and each.name != "lock"])
        content = bytearray(path.read_bytes())
        match trial // 3 % 3:
            case 0:
                os.truncate(path, lot.randrange(len(content)))
            case 1:
                content[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
                path.write_bytes(content)
            case _:
                path.unlink()
        try:
            with open_store(copy) as store:
                rows = rows_in(store)
                assert rows in (whole, after(100, "anna")) or store.extent().end[0] < 100
                if rows != whole:  # a damaged block stands in the way of the erasure, which is logged
                    raise JournalDamaged("")
                opened += 1
        except JournalError:
            pass
        shutil.rmtree(copy)
    assert opened > 20 / every(3)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(8))
def test_random_erasures(tmp_path: Path, seed: int) -> None:
    """Appends, erasures and openings at random, against a dict."""
    lot = random.Random(seed)
    rows: dict[int, tuple[str, int]] = {}
    end = 0
    store = open_store(tmp_path)
    for _ in range(60):
        match lot.randrange(5):
            case 0:
                name = lot.choice(NAMES)
                before = lot.choice([None, lot.randrange(end + 1)])
                kept = {
                    at: row for at, row in rows.items() if row[0] != name or at >= (end if before is None else before)
                }
                assert erase(store, name, before) == len(rows) - len(kept)
                rows = kept
            case 1:
                store.close()
                store = open_store(tmp_path)
            case _:
                names = [lot.choice(NAMES) for _ in range(lot.randrange(1, 12))]
                store.append([(0, batch(*[event(name, end + n) for n, name in enumerate(names)]))])
                rows |= {end + n: (name, end + n) for n, name in enumerate(names)}
                end += len(names)
    expect(store, rows, end)
    store.close()


# ---------------------------------------------------------------- the actor


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0, shutdown_timeout=5.0, ask_timeout=None) as system:
        yield system


def spawn(system: ActorSystem, directory: Path, config: JournalConfig = SMALL) -> Ref[Any]:
    return system.spawn(partial(Journal, directory, Event, config=config), mailbox=bounded(64))


def chunks(rows: int) -> Iterator[list[Event]]:
    for at in range(0, rows, 4):
        yield [event(NAMES[n % 3], n) for n in range(at, at + 4)]


async def test_asked_of_the_actor(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    for events in chunks(120):
        await journal.ask(Append(events))
    await journal.ask(DeclareGroup("readers"))
    await journal.ask(CommitGroup("readers", {0: 3}))
    tombstone: Any = await journal.ask(Append([Event("anna", -1, "", [])]))
    answers: list[Any] = []

    async def append(n: int) -> None:
        answer: Any = await journal.ask(Append([event("ben", 1000 + n)]))
        answers.append(answer.first)

    async with trio.open_nursery() as nursery:
        for n in range(10):
            nursery.start_soon(append, n)
        assert await journal.ask(EraseEntity("anna", before=tombstone.first)) == Erased(0, 40)
    assert sorted(answers) == list(range(121, 131))
    answer = await journal.ask(ReadEntity("anna"))
    assert answer.batch().select(["offset", "number"]).to_pylist() == [{"offset": 120, "number": -1}]
    assert (await journal.ask(FindCommand(0, "anna-0"))).count == 0
    assert await journal.ask(GetGroups()) == {"readers": {0: 3}}
    numbers, at = list[int](), 0
    while (rows := await journal.ask(ReadRows(0, at))).count:
        assert rows.batch().num_rows == rows.count
        numbers += rows.batch().column("number").to_pylist()
        at = rows.end
    assert numbers[:81] == [*(n for n in range(120) if n % 3), -1]
    assert (await journal.ask(GetExtent())).end == {0: 131}
    blocks = await journal.ask(Read(0, 0))
    assert (blocks[0].erased, blocks[0].first, blocks[0].end) == (True, 0, 1)


async def test_rows_at_the_end_are_passed_over(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    await journal.ask(Append([event("ben", 0), *[event("anna", n) for n in range(5)]]))
    assert await journal.ask(EraseEntity("anna")) == Erased(0, 5)
    assert (await journal.ask(ReadRows(0, 1))).count == 0
    assert (await journal.ask(ReadRows(0, 0))).end == 1
    assert await journal.ask(Append([event("carl", 9)])) == Appended(0, 6, 1)
    rows = await journal.ask(ReadRows(0, 1))
    assert (rows.first, rows.count) == (6, 1)


async def test_without_a_key_it_is_refused(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, JournalConfig())
    with pytest.raises(JournalError, match=r"open it with Keyed\(entity=\)"):
        await journal.ask(EraseEntity("anna", partition=0))
    with pytest.raises(JournalError, match="wanted 0 to 0"):
        await journal.ask(EraseEntity("anna", partition=1))


async def test_a_damaged_segment_is_named_and_other_rows_go_on(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        fill(store, 100)
    path = sorted((tmp_path / "partition-0000").glob("*.segment"))[1]
    content = bytearray(path.read_bytes())
    content[content.index(b"anna")] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        journal = spawn(system, tmp_path)
        with pytest.raises(JournalDamaged, match="is damaged"):
            await journal.ask(EraseEntity("anna"))
        assert await journal.ask(Append([event("ben", 1000)])) == Appended(0, 100, 1)
