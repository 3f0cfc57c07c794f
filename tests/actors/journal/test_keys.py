"""Keys: rows are found by their entity without a scan, and each command is taken once, whatever happens to the files of the index."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import random
import shutil
import tarfile
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.surroundings import surrounded  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    Append,
    Appended,
    CommandReused,
    Fenced,
    FindCommand,
    GetExtent,
    Journal,
    JournalConfig,
    JournalError,
    JournalUnwritable,
    Keyed,
    ReadEntity,
    Store,
    columns_of,
    partition_of,
)
from levada.actors.journal import keys as keys_module  # noqa: E402
from levada.actors.journal.reading import entity_of  # noqa: E402
from levada.actors.journal.segments import Segment  # noqa: E402
from levada.framework import ActorSystem, Ref, bounded, message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.testing.simulation import Call, Fault, SimulatedDisk, SimulatedFiles  # noqa: E402


@message("keys.Event")
class Event:
    entity: str | None
    command: str | None
    amount: int
    text: str = ""


COLUMNS = columns_of(Event)
KEYED = Keyed(entity="entity", command="command")
SMALL = JournalConfig(keyed=KEYED, segment_bytes=4096, block_bytes=2048, retain_bytes=None)


def batch(*events: Event) -> Any:
    return COLUMNS.encode(events)


def open_store(directory: Path, config: JournalConfig = SMALL) -> Store:
    return Store.open(directory, COLUMNS.schema, config)


def found(store: Store, entity: str, start: int = 0) -> list[tuple[int, int]]:
    """The offsets and amounts of an entity's rows."""
    rows: list[tuple[int, int]] = []
    for _, each in store.rows_of(entity, partition=0, start=start):
        rows += zip(each.column("offset").to_pylist(), each.column("amount").to_pylist(), strict=True)
    return rows


def everything(store: Store) -> list[tuple[str | None, int, int]]:
    """Entity, offset and amount of all rows, by reading all of them."""
    return [
        (event.entity, first + n, event.amount)
        for first, rows in store.batches(0, store.extent().first[0])
        for n, event in enumerate(COLUMNS.decode(rows))
    ]


def fill(store: Store, rows: int, entities: int = 7) -> None:
    for n in range(rows):
        store.append([(0, batch(Event(f"e{n % entities}", f"c{n}", n, "x" * 100)))])


def check(store: Store, entities: int = 7) -> None:
    rows = everything(store)
    for n in range(entities):
        assert found(store, f"e{n}") == [(at, amount) for entity, at, amount in rows if entity == f"e{n}"]
    assert found(store, "nobody") == []


# ---------------------------------------------------------------- entities


def test_rows_of_an_entity_over_many_segments(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store, 100)
        check(store)
        assert found(store, "e3", start=60) == [(n, n) for n in range(66, 100, 7)]
        assert len(list((tmp_path / "partition-0000").glob("*.index"))) == store.statistics().segments - 1 > 3
    with open_store(tmp_path) as store:
        check(store)
        fill(store, 10)
        check(store)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_follow_each_other_are_found_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Runs of one entity, of every length around the number of rows that are compared at once, from every offset on."""
    monkeypatch.setattr(keys_module, "_RUN", 4)
    lot, names = random.Random(seed), list[str | None]()
    while len(names) < 60:
        names += [lot.choice(["anna", "ben", None])] * lot.choice([1, 2, 3, 4, 5, 6, 8, 9, 13])
    with open_store(tmp_path, JournalConfig(keyed=KEYED)) as store:
        store.append([(0, batch(*(Event(name, None, n) for n, name in enumerate(names))))])
        for entity in ("anna", "ben"):
            for start in range(len(names) + 1):
                own = [(n, n) for n, name in enumerate(names) if name == entity and n >= start]
                assert found(store, entity, start) == own


@pytest.mark.parametrize(("every", "rows"), [(2, 400), (20, 400), (3, 40)])
def test_answers_keep_their_size_and_are_whole_whatever_shares_the_blocks(
    tmp_path: Path, every: int, rows: int
) -> None:
    """One row of many, one of few, and runs: large ones of anna among small ones of ben, in blocks of 8 KiB."""
    config = JournalConfig(keyed=KEYED, block_bytes=8192, segment_bytes=1 << 20)
    with open_store(tmp_path, config) as store:
        for first in range(0, rows, 40):
            large = [n % every == 0 for n in range(first, first + 40)]
            events = [
                Event("anna" if each else "ben", None, first + n, "x" * (600 if each else 1))
                for n, each in enumerate(large)
            ]
            store.append([(0, batch(*events))])
        for entity, wanted in (("anna", range(0, rows, every)), ("ben", [n for n in range(rows) if n % every])):
            for max_bytes in (1, 2000, 10_000, 1 << 20):
                answers = [each for _, each in store.rows_of(entity, partition=0, max_bytes=max_bytes)]
                assert [n for each in answers for n in each.column("amount").to_pylist()] == list(wanted)
                sizes = [each.drop_columns("offset").nbytes for each in answers]
                blocks = [each.column("offset").to_pylist() for each in answers]
                assert all(
                    size <= max_bytes or len({n // 40 for n in here}) == 1
                    for size, here in zip(sizes, blocks, strict=True)
                )
                assert all(one + two > max_bytes * 0.9 for one, two in itertools.pairwise(sizes))


def test_an_entity_is_in_the_partition_of_its_name(tmp_path: Path) -> None:
    with open_store(tmp_path, JournalConfig(keyed=KEYED, partitions=4)) as store:
        number = partition_of("anna", 4)
        store.append([(number, batch(Event("anna", None, 1), Event(None, None, 2), Event("anna", None, 3)))])
        [(end, rows)] = store.rows_of("anna")
        assert (end, rows.column("amount").to_pylist(), rows.column("offset").to_pylist()) == (None, [1, 3], [0, 2])


def test_finding_an_entity_reads_no_block_without_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        store.append([(0, batch(Event("rare", None, -1)))])
        fill(store, 200)
    with open_store(tmp_path) as store:
        read: list[Path] = []
        real = Segment.read_at

        def noted(self: Segment, *rest: Any) -> Any:
            read.append(self.path)
            return real(self, *rest)

        monkeypatch.setattr(Segment, "read_at", noted)
        assert found(store, "rare") == [(0, -1)]
        assert [path.stem for path in read] == [f"{0:020d}"]


def test_the_newest_rows_of_an_entity(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([(0, batch(Event("rare", None, -1)))])
        fill(store, 100)
        store.append([(0, batch(*[Event(f"e{n % 2}", None, n) for n in range(20)]))])
        rows = everything(store)
        for entity in ("e0", "e3", "rare", "nobody"):
            own = [(at, amount) for name, at, amount in rows if name == entity]
            for newest in (1, 2, 11, 1000):
                for start in (0, 50, 105):
                    batches = list(store.newest_of(entity, newest, partition=0, start=start))[::-1]
                    columns = [each.select(["offset", "amount"]).to_pylist() for each in batches]
                    found = [tuple(row.values()) for each in columns for row in each]
                    assert found == [row for row in own if row[0] >= start][-newest:]


def test_the_newest_row_is_found_without_reading_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        fill(store, 200)
    with open_store(tmp_path) as store:
        for index in sorted((tmp_path / "partition-0000").glob("*.index"))[:-2]:
            index.unlink()  # older ones are not looked at either
        read: list[Any] = []
        real = Segment.read_at

        def noted(self: Segment, *rest: Any) -> Any:
            for block, places in real(self, *rest):
                read.append((block.first, block.rows))
                yield block, places

        monkeypatch.setattr(Segment, "read_at", noted)
        [rows] = store.newest_of("e3", 1, partition=0)
        assert rows.column("offset").to_pylist() == [199]
        assert read == [(199, 1)]


def test_what_keys_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a column"):
        Keyed()
    with pytest.raises(ConfigurationError, match="column amount is int64, and keys are text or bytes"):
        open_store(tmp_path, JournalConfig(keyed=Keyed(entity="amount")))
    with pytest.raises(ConfigurationError, match="column who is not there"):
        open_store(tmp_path, JournalConfig(keyed=Keyed(command="who")))
    with pytest.raises(ConfigurationError, match="no column bodies to compare"):
        open_store(tmp_path, JournalConfig(keyed=Keyed(command="command", body=("bodies",))))
    with Store.open(tmp_path, COLUMNS.schema) as store, pytest.raises(JournalError, match="this journal has no key"):
        store.rows_of("anna")


def test_a_journal_gets_keys_later(tmp_path: Path) -> None:
    with open_store(tmp_path, JournalConfig(segment_bytes=4096, block_bytes=2048)) as store:
        fill(store, 100)
        assert list((tmp_path / "partition-0000").glob("*.index")) == []
    with open_store(tmp_path) as store:
        check(store)
        [answer] = store.append([(0, batch(Event("e1", "c1", 1, "x" * 100)))])
        assert answer.first == 100  # the store itself looks at no commands; `Journal` does


def test_retention_takes_the_index_along(tmp_path: Path) -> None:
    config = JournalConfig(keyed=KEYED, segment_bytes=4096, block_bytes=2048, max_bytes=20_000, retain_bytes=8000)
    with open_store(tmp_path, config) as store:
        fill(store, 200)
        store.retain()
        assert store.extent().first[0] > 100
        check(store)
        folder = tmp_path / "partition-0000"
        assert {path.stem for path in folder.glob("*.index")} < {path.stem for path in folder.glob("*.segment")}


@message("keys.Kept")
class Kept:
    entity: str
    command: str | None
    number: int
    text: str = ""


def test_a_journal_of_format_2_is_read_with_its_indexes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """See data/README.md. No index is rebuilt."""
    with tarfile.open(Path(__file__).parent / "data" / "journal-format-2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = JournalConfig(partitions=2, keyed=KEYED, segment_bytes=8192, block_bytes=2048, retain_bytes=1 << 20)
    columns = columns_of(Kept)
    with Store.open(tmp_path / "format-2", columns.schema, config) as store:
        rows = [row for number in (0, 1) for _, batch in store.batches(number, 0) for row in columns.decode(batch)]
        kept = [Kept(f"e{n % 5}", f"c{n}", n, "x" * 50) for n in (*range(0, 100, 2), *range(1, 100, 2))]
        assert rows == [*kept[:50], *(Kept("e0", None, n) for n in range(100, 103)), *kept[50:]]
        found = [n for _, batch in store.rows_of("e3", partition=1) for n in batch.column("number").to_pylist()]
        assert found == list(range(3, 100, 10))
        taken = store.taken(1, "c7")
        assert taken is not None
        assert taken.first == 3
        assert store.delivered("query", 1) is not None
        assert store.groups() == {"readers": {0: 7, 1: 8}}
    assert caplog.records == []


def test_a_journal_of_format_3_is_read_and_goes_on_in_the_new_format(tmp_path: Path) -> None:
    """See data/README.md. Its last segment takes no appends of the new format, in which a block may say that more follows."""
    with tarfile.open(Path(__file__).parent / "data" / "journal-format-3.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = JournalConfig(keyed=Keyed(entity="entity"), segment_bytes=8192, block_bytes=2048, retain_bytes=1 << 20)
    folder = tmp_path / "format-3" / "partition-0000"
    left = [n for n in range(115) if n % 5 != 1 or n > 110]
    assert {path.read_bytes()[8] for path in folder.glob("*.segment")} == {3}
    for number in (115, 116):
        with Store.open(tmp_path / "format-3", None, config) as store:
            assert [n for _, batch in store.batches(0, 0) for n in batch.column("number").to_pylist()] == left
            found = [n for _, batch in store.rows_of("e1", partition=0) for n in batch.column("number").to_pylist()]
            assert found == [n for n in left if n % 5 == 1]
            row = pa.RecordBatch.from_pylist(
                [{"entity": f"e{number % 5}", "number": number, "text": ""}], schema=store.schema
            )
            assert store.append([(0, row)]) == [Appended(0, number, 1)]
        left.append(number)
    newest = max(folder.glob("*.segment"))
    assert (newest.stem, newest.read_bytes()[8]) == (f"{115:020d}", 4)


def test_few_indexes_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a descriptor, and a journal may have thousands of segments."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(keys_module, "OPEN_INDEXES", 2)
    gc.collect()
    before = descriptors()
    with open_store(tmp_path) as store:
        fill(store, 200)
        segments = store.statistics().segments
        check(store)
        assert segments > 8
        assert descriptors() <= before + 10
    with open_store(tmp_path) as store:
        check(store)
        check(store)
        assert descriptors() <= before + 10


# ---------------------------------------------------------------- damage


def damage(path: Path, lot: random.Random) -> None:
    octets = bytearray(path.read_bytes())
    match lot.choice(("cut", "flip", "zero", "remove", "longer")):
        case "cut":
            path.write_bytes(octets[: lot.randrange(len(octets))])
        case "flip":
            octets[lot.randrange(len(octets))] ^= 1 << lot.randrange(8)
            path.write_bytes(octets)
        case "zero":
            at = lot.randrange(len(octets))
            path.write_bytes(octets[:at] + bytes(len(octets) - at - 1) + b"\1")
        case "longer":
            path.write_bytes(octets + b"\0" * lot.randrange(1, 20))
        case _:
            path.unlink()


@pytest.mark.ci
def test_a_damaged_index_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut, flipped, zeroed, removed or longer, at random places: always the same rows, and a line in the log unless it is just not there."""
    with open_store(tmp_path / "good") as store:
        fill(store, 100)
        whole = everything(store)
    lot = random.Random(0)
    for trial in range(60):
        copy = tmp_path / f"copy{trial}"
        shutil.copytree(tmp_path / "good", copy)
        files = sorted((copy / "partition-0000").glob("*.index"))
        before = {path: path.read_bytes() for path in files}
        damage(lot.choice(files), lot)
        after = {path: path.read_bytes() for path in files if path.exists()}
        if after == before:
            continue
        caplog.clear()
        with caplog.at_level(logging.WARNING, "levada.actors.journal"), open_store(copy) as store:
            check(store)
            assert store.taken(0, "c5") is not None
            assert everything(store) == whole
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (1 if after.keys() == before.keys() else 0)
        assert all(line.endswith("rebuilding it from its segment") for line in lines)
        assert {path: path.read_bytes() for path in files} == before
        shutil.rmtree(copy)


def test_an_index_of_another_segment_or_journal_is_not_believed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with open_store(tmp_path / name) as store:
            fill(store, 60, entities=7 if name == "one" else 5)
    one, two = (sorted((tmp_path / name / "partition-0000").glob("*.index")) for name in ("one", "two"))
    shutil.copy(two[0], one[0])
    shutil.copy(one[2], one[1])
    with open_store(tmp_path / "one") as store:
        check(store)


# ---------------------------------------------------------------- commands


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0, shutdown_timeout=5.0, ask_timeout=None) as system:
        yield system


def spawn(system: ActorSystem, directory: Path, config: JournalConfig = SMALL) -> Ref[Any]:
    return system.spawn(partial(Journal, directory, Event, config=config), mailbox=bounded(64))


async def test_a_command_is_taken_once(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    order = [Event("anna", "order-17", 1), Event("ben", "order-17", 2)]
    assert await journal.ask(Append(order)) == Appended(0, 0, 2)
    assert await journal.ask(Append([Event("anna", None, 3)])) == Appended(0, 2, 1)
    assert await journal.ask(Append(order)) == Appended(0, 0, 0, repeated=2)
    assert await journal.ask(Append(batch(*order), partition=0, at=0)) == Appended(0, 0, 0, repeated=2)
    mixed = [Event("x", "order-18", 4), *order, Event("x", "order-19", 5)]
    assert await journal.ask(Append(mixed)) == Appended(0, 3, 2, repeated=2)
    assert await journal.ask(Append([Event("y", "order-20", 6), *order], partition=0, at=3)) == Fenced(0, 5)
    journal.stop()
    await journal.terminated()
    again = spawn(system, tmp_path)
    assert await again.ask(Append(order)) == Appended(0, 0, 0, repeated=2)
    assert await again.ask(Append([Event("x", "order-20", 7)])) == Appended(0, 5, 1)


async def test_a_reused_id_with_another_body_is_refused(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    await journal.ask(Append([Event("anna", "order-17", 1), Event("anna", "order-17", 2)]))
    for other in (
        [Event("anna", "order-17", 1), Event("anna", "order-17", 3)],
        [Event("anna", "order-17", 1)],
        [
            Event("z", "order-18", 1),
            Event("anna", "order-17", 1),
            Event("anna", "order-17", 2),
            Event("a", "order-17", 3),
        ],
    ):
        with pytest.raises(CommandReused, match="'order-17' was taken before with another body, at offset 0") as reused:
            await journal.ask(Append(other))
        assert (reused.value.command, reused.value.partition, reused.value.first) == ("order-17", 0, 0)
    with pytest.raises(JournalError, match="the rows of command 'a' do not follow each other"):
        await journal.ask(Append([Event("z", "a", 1), Event("z", "b", 1), Event("z", "a", 2)]))
    assert await journal.ask(Append([Event("z", "order-18", 9)])) == Appended(0, 2, 1)


async def test_the_body_may_be_some_columns(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, JournalConfig(keyed=Keyed(command="command", body=("amount",))))
    await journal.ask(Append([Event("anna", "order-17", 1, "at noon")]))
    assert await journal.ask(Append([Event("anna", "order-17", 1, "later")])) == Appended(0, 0, 0, repeated=1)
    with pytest.raises(CommandReused):
        await journal.ask(Append([Event("anna", "order-17", 2, "at noon")]))


async def test_only_the_append_whose_earlier_command_cannot_be_read_is_refused() -> None:
    bad = False

    def happens(call: Call) -> Fault | None:
        return Fault(error=errno.EIO) if bad and call.kind == "read" and call.path.endswith(".segment") else None

    config = JournalConfig(keyed=Keyed(command="command"))
    with surrounded(files=SimulatedFiles(SimulatedDisk(), faults=happens)):
        async with ActorSystem() as system:
            journal = spawn(system, Path("/log"), config)
            order = [Event("anna", "order-17", 2)]
            await journal.ask(Append(order))
            bad = True
            found: dict[int, object] = {}

            async def append(number: int, rows: list[Event]) -> None:
                try:
                    found[number] = await journal.ask(Append(rows))
                except JournalUnwritable as error:
                    found[number] = error

            async with trio.open_nursery() as nursery:
                for number, rows in enumerate(([Event("b", "c1", 1)], order, [Event("b", "c2", 1)])):
                    nursery.start_soon(append, number, rows)
            assert isinstance(refused := found.pop(1), JournalUnwritable)
            assert "Input/output error" in str(refused)
            assert "nothing of this was written" in str(refused)
            assert set(found.values()) == {Appended(0, 1, 1), Appended(0, 2, 1)}
            bad = False
            assert await journal.ask(Append(order)) == Appended(0, 0, 0, repeated=1)


async def test_commands_are_forgotten_after_some_rows(system: ActorSystem, tmp_path: Path) -> None:
    keyed = Keyed(command="command", remember=20)
    config = JournalConfig(keyed=keyed, segment_bytes=1024, block_bytes=512, retain_bytes=None)
    journal = spawn(system, tmp_path, config)
    for n in range(60):
        await journal.ask(Append([Event("e", f"c{n}", n, "x" * 50)]))
    assert await journal.ask(Append([Event("e", "c40", 40, "x" * 50)])) == Appended(0, 40, 0, repeated=1)
    assert await journal.ask(Append([Event("e", "c39", 0)])) == Appended(0, 60, 1)
    assert await journal.ask(Append([Event("e", "c39", 0)])) == Appended(0, 60, 0, repeated=1)


async def test_a_command_that_goes_over_the_end_of_a_segment_is_taken_once(system: ActorSystem, tmp_path: Path) -> None:
    config = JournalConfig(keyed=Keyed(command="command"), segment_bytes=4096, block_bytes=512, retain_bytes=None)
    journal = spawn(system, tmp_path, config)
    before, order = ([Event("e", name, n) for n in range(150)] for name in ("c1", "c2"))
    assert await journal.ask(Append(before)) == Appended(0, 0, 150)
    assert await journal.ask(Append(order)) == Appended(0, 150, 150)
    assert len(list((tmp_path / "partition-0000").glob("*.segment"))) == 5
    for again in (False, True):
        for first, rows in ((0, before), (150, order)):
            assert await journal.ask(Append(rows)) == Appended(0, first, 0, repeated=150)
            with pytest.raises(CommandReused):
                await journal.ask(Append(rows[75:]))
        if not again:
            journal.stop()
            await journal.terminated()
            journal = spawn(system, tmp_path, config)


async def test_a_command_whose_first_rows_retention_has_deleted_is_taken_once(
    system: ActorSystem, tmp_path: Path
) -> None:
    keyed = Keyed(command="command")
    config = JournalConfig(keyed=keyed, segment_bytes=4096, block_bytes=512, max_bytes=20_000, retain_bytes=9000)
    order = [Event("e", "c1", n) for n in range(150)]
    other = [*order[:-1], Event("e", "c1", 0)]
    for again in (False, True):
        journal = spawn(system, tmp_path, config)
        if not again:
            assert await journal.ask(Append(order)) == Appended(0, 0, 150)
        count = 0
        while (first := (await journal.ask(GetExtent())).first[0]) == 0:
            await journal.ask(Append([Event("e", f"d{count}", count)]))
            count += 1
        assert first < 150
        assert await journal.ask(Append(order)) == Appended(0, 0, 0, repeated=150)
        for rows in (other, order[:-1], order[first + 1 :], [order[0], *order]):
            with pytest.raises(CommandReused):
                await journal.ask(Append(rows))
        journal.stop()
        await journal.terminated()


def test_an_id_that_is_used_again_when_it_is_forgotten_has_its_new_rows(tmp_path: Path) -> None:
    """Its old rows are in the same segment."""
    config = JournalConfig(keyed=Keyed(command="command", remember=3))
    with open_store(tmp_path, config) as store:
        for n, command in enumerate(["a", "b", "c", "d", "a"]):
            assert store.taken(0, command) is None
            store.append([(0, batch(Event("e", command, n)))])
        taken = store.taken(0, "a")
        assert taken is not None
        assert (taken.first, taken.rows["amount"].to_pylist()) == (4, [4])
    with open_store(tmp_path, config) as store:
        taken = store.taken(0, "a")
        assert taken is not None
        assert taken.first == 4


def test_an_id_that_is_used_again_at_the_start_of_a_segment_has_its_new_rows(tmp_path: Path) -> None:
    """Its old rows are in the segment before, and rows there would be the beginning of a command that goes over the end."""
    config = attrs.evolve(SMALL, keyed=Keyed(command="command", remember=2))
    with open_store(tmp_path, config) as store:
        for n in range(40):
            assert store.taken(0, f"c{n % 3}") is None
            store.append([(0, batch(Event("e", f"c{n % 3}", n, "x" * 100)))])
            taken = store.taken(0, f"c{n % 3}")
            assert taken is not None
            assert (taken.first, taken.rows["amount"].to_pylist()) == (n, [n])
        assert store.statistics().segments > 3


def test_a_command_is_forgotten_as_a_whole(tmp_path: Path) -> None:
    """Its rows are in several blocks, and the newest rows that are known begin at any of them."""
    config = attrs.evolve(SMALL, block_rows=8, keyed=Keyed(command="command", remember=20))
    with open_store(tmp_path, config) as store:
        store.append([(0, batch(*(Event("e", "a", n) for n in range(60))))])
    with open_store(tmp_path, config) as store:  # which reads it block by block
        assert store.taken(0, "a") is None  # its first row is not among the newest 20
        store.append([(0, batch(*(Event("e", "b", n) for n in range(15))))])
        found = []
        for n in range(10):
            taken = store.taken(0, "b")
            found.append(None if taken is None else (taken.first, taken.rows.num_rows))
            store.append([(0, batch(Event("e", f"c{n}", n)))])
        assert found == [(60, 15)] * 6 + [None] * 4


async def test_the_same_command_twice_in_a_group(system: ActorSystem, tmp_path: Path) -> None:
    """All asks come while the first one is written."""
    journal = spawn(system, tmp_path)
    answers: list[Any] = []

    async def ask(n: int) -> None:
        answers.append(await journal.ask(Append([Event("e", f"c{n % 10}", n % 10)])))

    async with trio.open_nursery() as nursery:
        for n in range(100):
            nursery.start_soon(ask, n)
    assert sorted(answer.count for answer in answers) == [0] * 90 + [1] * 10
    assert {answer.first for answer in answers if not answer.count} == set(range(10))
    journal.stop()
    await journal.terminated()
    with open_store(tmp_path) as store:
        assert len(everything(store)) == 10


def test_reading_since_a_column_that_older_rows_do_not_have(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([(0, batch(Event("anna", None, 1), Event("ben", None, 2)))])
    grown = COLUMNS.schema.append(pa.field("extra", pa.int64()))
    with Store.open(tmp_path, grown, SMALL) as store:
        assert store.newest_value("anna", "extra", partition=0) is None
        assert store.newest_value("anna", "amount", partition=0) == 1
        assert store.newest_value("nobody", "amount", partition=0) is None
        assert entity_of(store, ReadEntity("anna", partition=0, since="extra")).count == 1


async def test_asked_as_messages(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    for n in range(40):
        await journal.ask(Append([Event("anna" if n % 2 else "ben", f"c{n}", n, "x" * 100)]))
    start: int | None = 0
    amounts: list[int] = []
    while start is not None:
        answer = await journal.ask(ReadEntity("anna", start=start, max_bytes=1000))
        amounts += answer.batch().column("amount").to_pylist()
        start = answer.next
    assert amounts == list(range(1, 40, 2))
    answer = await journal.ask(ReadEntity("anna", newest=3))
    assert (answer.batch().column("amount").to_pylist(), answer.next) == ([35, 37, 39], None)
    answer = await journal.ask(ReadEntity("anna", newest=30, start=30, max_bytes=1))
    assert answer.batch().column("amount").to_pylist() == [39]
    assert (await journal.ask(ReadEntity("nobody", newest=1))).count == 0
    answer = await journal.ask(ReadEntity("anna", since="amount"))  # its newest row has 39 there
    assert answer.batch().column("amount").to_pylist() == [39]
    answer = await journal.ask(ReadEntity("ben", since="amount", start=4))
    assert answer.batch().column("amount").to_pylist() == [38]
    assert (await journal.ask(ReadEntity("nobody", since="amount"))).count == 0
    for column in ("text", "nowhere"):
        with pytest.raises(JournalError, match=f"since is '{column}', wanted a column of whole numbers"):
            await journal.ask(ReadEntity("anna", since=column))
    with pytest.raises(ValueError, match="newest"):
        ReadEntity("anna", newest=0)
    with pytest.raises(UnicodeEncodeError):
        ReadEntity("\ud800")
    with pytest.raises(UnicodeEncodeError):
        Append([Event("anna", None, 1)], key="\ud800")
    with pytest.raises(TypeError, match="entity is int, wanted text or bytes"):
        ReadEntity(7)  # type: ignore[arg-type]
    taken = await journal.ask(FindCommand(0, "c7"))
    assert (taken.count, taken.batch().column("offset").to_pylist()) == (1, [7])
    assert (await journal.ask(FindCommand(0, "c99"))).count == 0
    assert (await journal.ask(ReadEntity("carl"))).count == 0


ACTIONS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 12)), min_size=1, max_size=5),
        st.sampled_from(["reopen", "crash", "lose the index"]),
    ),
    max_size=25,
)


@pytest.mark.ci
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_the_index_always_says_what_the_log_says(actions: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random appends, some of commands that came before; closings, copies of the open files, and lost indexes."""
    root = tmp_path_factory.mktemp("journal")
    keyed = Keyed(entity="entity", command="command", body=("amount",))
    config = JournalConfig(keyed=keyed, segment_bytes=1024, block_bytes=512, retain_bytes=None)
    directory = root / "0"
    log: list[tuple[str, int]] = []
    commands: set[str] = set()

    async def write(groups: list[list[Event]]) -> None:
        async with ActorSystem("test", seed=0, ask_timeout=None) as system:
            journal = spawn(system, directory, config)
            await journal.ask(GetExtent())  # it is open
            for events in groups:
                first = len(log)
                ids = [event.command for event in events if event.command is not None]
                fresh = [event for event in events if event.command not in commands]
                if len(set(ids)) < len(ids):
                    continue
                answer = await journal.ask(Append(events))
                commands.update(ids)
                log.extend((str(event.entity), event.amount) for event in fresh)
                assert isinstance(answer, Appended)
                assert (answer.count, answer.repeated) == (len(fresh), len(events) - len(fresh))
                assert answer.first == first or not fresh
            shutil.copytree(directory, root / f"{directory.name}-open")

    waiting: list[list[Event]] = []
    for number, action in enumerate([*actions, "reopen"]):
        if isinstance(action, list):
            waiting.append(
                [Event(f"e{entity}", None if c is None else f"c{c}", c or 0, "x" * 40) for entity, c in action]
            )
            continue
        trio.run(write, waiting)
        waiting = []
        if action == "crash":
            directory = (root / f"{directory.name}-open").rename(root / f"crash{number}")
        else:
            shutil.rmtree(root / f"{directory.name}-open")
        if action == "lose the index":
            for path in list((directory / "partition-0000").glob("*.index"))[::2]:
                path.unlink()
        with open_store(directory, config) as store:
            assert [(entity, amount) for entity, _, amount in everything(store)] == log
            check(store, 4)
            assert {f"c{n}" for n in range(13) if store.taken(0, f"c{n}") is not None} == commands


# ---------------------------------------------------------------- cost


@pytest.mark.ci
def test_an_entity_costs_at_most_150_octets(tmp_path: Path) -> None:
    """In memory, as long as its rows are in the last segment; and in the file afterwards."""
    entities = 100_000
    rows = batch(*[Event(f"customer-{n:012d}", None, n) for n in range(entities)])
    config = JournalConfig(keyed=Keyed(entity="entity"), segment_bytes=6 << 20)
    with open_store(tmp_path, config) as store:
        gc.collect()
        tracemalloc.start()
        for at in range(0, entities, 10_000):
            store.append([(0, rows.slice(at, 10_000))])
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown / entities <= 150
        store.append([(0, rows)])  # the first segment is sealed
        assert [at for at, _ in found(store, "customer-000000000777")] == [777, entities + 777]
        first, second, *_ = sorted((tmp_path / "partition-0000").glob("*.segment"))
        assert first.with_suffix(".index").stat().st_size <= 12 * int(second.stem) + 100
