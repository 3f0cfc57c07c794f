"""Rows that were appended one at a time: their small blocks are merged, without loss, under the eyes of readers."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import Append, Journal, JournalConfig, JournalDamaged, Keyed, Store, columns_of, stream_of  # noqa: E402
from levada.actors.journal import partitions as partitions_module  # noqa: E402
from levada.framework import ActorSystem, Ref, bounded, message  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402


@message("small.Row")
class Row:
    number: int
    size: int
    body: bytes


COLUMNS = columns_of(Row)
CONFIG = JournalConfig(sync="never", segment_bytes=64 << 10, block_bytes=32 << 10, retain_bytes=1 << 20)


def row(number: int) -> Any:
    return COLUMNS.encode([Row(number, 200, b"x" * 200)])


def fill(store: Store, rows: int) -> None:
    first = store.extent().end[0]
    for number in range(first, first + rows):
        store.append([(0, row(number))])


def numbers(store: Store, start: int = 0) -> list[int]:
    return [n for _, batch in store.batches(0, start) for n in batch.column("number").to_pylist()]


def blocks(directory: Path) -> list[int]:
    """The number of blocks in each segment."""
    return [path.read_bytes().count(b"LvB1") for path in sorted((directory / "partition-0000").glob("*.segment"))]


def test_a_sealed_segment_has_large_blocks(tmp_path: Path) -> None:
    with Store.open(tmp_path, COLUMNS.schema, CONFIG) as store:
        fill(store, 500)
        assert numbers(store) == list(range(500))
        assert numbers(store, 130) == list(range(130, 500))
        *sealed, last = blocks(tmp_path)
        assert (set(sealed), len(sealed) > 2) == ({1}, True)
        first, second, *_ = sorted((tmp_path / "partition-0000").glob("*.segment"))
        assert first.stat().st_size / int(second.stem) < 240
        assert {path.suffix for path in (tmp_path / "partition-0000").iterdir()} == {".segment"}
    with Store.open(tmp_path, COLUMNS.schema, CONFIG) as store:
        assert numbers(store) == list(range(500))
        fill(store, 200)
        assert numbers(store) == list(range(700))
        assert last > 1


def test_many_small_blocks_seal_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions_module, "MERGE_BLOCKS", 100)
    with Store.open(tmp_path, COLUMNS.schema, JournalConfig(sync="never")) as store:
        fill(store, 250)
        assert blocks(tmp_path) == [1, 1, 50]
        assert numbers(store) == list(range(250))


@pytest.mark.ci
def test_many_small_blocks_are_merged_when_a_journal_is_opened(tmp_path: Path) -> None:
    with Store.open(tmp_path, COLUMNS.schema, JournalConfig(sync="never")) as store:
        fill(store, 1100)
        assert blocks(tmp_path) == [1100]
    with Store.open(tmp_path, COLUMNS.schema, JournalConfig()) as store:
        assert blocks(tmp_path) == [1, 0]
        assert numbers(store) == list(range(1100))
        assert store.size / 1100 < 240


def test_a_batch_that_is_not_delivered_yet_is_not_merged(tmp_path: Path) -> None:
    """A merge would make its rows look like appends."""
    with Store.open(tmp_path, COLUMNS.schema, CONFIG) as store:
        fill(store, 70)
        messages = ((0, each) for number in range(70, 270) for each in store.pack([row(number)]))
        store.deliver("query", 1, messages)
        fill(store, 130)
        assert numbers(store) == list(range(400))
        assert max(blocks(tmp_path)) > 64
    with Store.open(tmp_path, COLUMNS.schema, CONFIG) as store:
        assert numbers(store) == list(range(400))


def test_a_full_disk_leaves_the_blocks_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.link

    def link(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(REAL.files, "link", link)
    with Store.open(tmp_path, COLUMNS.schema, CONFIG) as store, caplog.at_level(logging.WARNING):
        fill(store, 150)
        monkeypatch.setattr(REAL.files, "link", real)
        fill(store, 150)
        assert numbers(store) == list(range(300))
    assert blocks(tmp_path)[:2] == [123, 1]
    assert [record.getMessage() for record in caplog.records if "not merged" in record.getMessage()] != []


@pytest.mark.parametrize("moment", ["link", "rename", "before the next"])
def test_a_crash_while_merging_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The files as they are at that moment are opened."""
    copies: list[Path] = []

    def copy() -> None:
        if not copies:
            copies.append(Path(shutil.copytree(tmp_path / "journal", tmp_path / "copy")))

    real_make = partitions_module.Partition._make_segment

    def link(source: Path, target: Path) -> None:
        os.link(source, target)
        if moment == "link":
            copy()

    def rename(source: Path, target: Path) -> None:
        merged = source.suffix == ".new" and target.exists()
        source.rename(target)
        if merged and moment == "rename":
            copy()

    def make(self: Any, first: int) -> Any:
        if first and moment == "before the next":
            copy()
        return real_make(self, first)

    with Store.open(tmp_path / "journal", COLUMNS.schema, CONFIG) as store:
        monkeypatch.setattr(REAL.files, "link", link)
        monkeypatch.setattr(REAL.files, "rename", rename)
        monkeypatch.setattr(partitions_module.Partition, "_make_segment", make)
        fill(store, 150)
        monkeypatch.undo()
    with Store.open(copies[0], COLUMNS.schema, CONFIG) as store:
        assert numbers(store) == list(range(123))
        fill(store, 100)
        assert numbers(store) == list(range(223))
    assert {path.suffix for path in (copies[0] / "partition-0000").iterdir()} == {".segment"}


@pytest.mark.ci
def test_readers_notice_nothing(tmp_path: Path) -> None:
    """Three threads read all the time, from the beginning and from the middle, while segments are merged."""
    config = JournalConfig(sync="never", segment_bytes=36 << 10, block_bytes=16 << 10, retain_bytes=64 << 20)
    errors: list[BaseException] = []
    done = threading.Event()

    def read(store: Store, lot: random.Random) -> None:
        try:
            while not done.is_set():
                end = store.extent().end[0]
                start = lot.randrange(end + 1)
                assert numbers(store, start)[: end - start] == list(range(start, end))
                assert store.offset_within(0, start, end, max_bytes=1 << 30) == end
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    with Store.open(tmp_path, COLUMNS.schema, config) as store:
        threads = [threading.Thread(target=read, args=(store, random.Random(n))) for n in range(3)]
        for thread in threads:
            thread.start()
        fill(store, 2700)
        done.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert numbers(store) == list(range(2700))
        assert sum(count == 1 for count in blocks(tmp_path)) >= 35


@pytest.mark.ci
def test_a_damaged_merged_segment_is_named(tmp_path: Path) -> None:
    with Store.open(tmp_path / "good", COLUMNS.schema, CONFIG) as store:
        fill(store, 300)
    lot = random.Random(0)
    for trial in range(60):
        copy = tmp_path / f"copy{trial}"
        shutil.copytree(tmp_path / "good", copy)
        path = sorted((copy / "partition-0000").glob("*.segment"))[lot.randrange(2)]
        octets = bytearray(path.read_bytes())
        if trial % 2:
            octets[lot.randrange(len(octets) - 8)] ^= 1 << lot.randrange(8)
            path.write_bytes(octets)
        else:
            os.truncate(path, lot.randrange(len(octets)))
        try:
            with Store.open(copy, COLUMNS.schema, CONFIG) as store:
                assert numbers(store) == list(range(300))
        except JournalDamaged:
            pass
        shutil.rmtree(copy)


def test_keys_of_merged_rows(tmp_path: Path) -> None:
    @message("small.Event")
    class Event:
        entity: str
        number: int

    columns = columns_of(Event)
    config = JournalConfig(
        keyed=Keyed(entity="entity"), sync="never", segment_bytes=32 << 10, block_bytes=16 << 10, retain_bytes=1 << 20
    )
    with Store.open(tmp_path, columns.schema, config) as store:
        for n in range(300):
            store.append([(0, columns.encode([Event(f"e{n % 3}", n)]))])
        found = [each for _, batch in store.rows_of("e1") for each in batch.column("number").to_pylist()]
        assert found == list(range(1, 300, 3))
        assert blocks(tmp_path)[0] == 1


async def test_asks_under_way_together_share_a_block(tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=None) as system:
        journal: Ref[Any] = system.spawn(partial(Journal, tmp_path, Row), mailbox=bounded(256))
        async with trio.open_nursery() as nursery:
            for number in range(256):
                nursery.start_soon(journal.ask, Append([Row(number, 200, b"x" * 200)]))
    [count] = blocks(tmp_path)
    assert count <= 4
    [path] = (tmp_path / "partition-0000").glob("*.segment")
    assert path.stat().st_size / 256 < 240


async def test_streams_under_way_together_share_a_block(tmp_path: Path) -> None:
    """Each counts with its bytes, 1 MiB here, so 32 share a sync."""
    large = stream_of(COLUMNS.encode([Row(0, 200, b"x" * (1 << 20))]))
    config = JournalConfig(block_bytes=16 << 20)
    async with ActorSystem("test", ask_timeout=None) as system:
        journal: Ref[Any] = system.spawn(partial(Journal, tmp_path, Row, config=config), mailbox=bounded(256))
        async with trio.open_nursery() as nursery:
            for _ in range(15):
                nursery.start_soon(journal.ask, Append(large))
    [count] = blocks(tmp_path)
    assert count <= 3


def test_rows_without_bytes_are_packed(tmp_path: Path) -> None:
    schema = pa.schema([("nothing", pa.null())])
    with Store.open(tmp_path, schema, JournalConfig(block_rows=10)) as store:
        [answer] = store.append([(0, pa.record_batch([pa.nulls(25)], schema=schema))])
        assert (answer.count, sum(batch.num_rows for _, batch in store.batches(0, 0))) == (25, 25)
