"""The journal on the disk: appending, reading, torn tails, damage, retention, locks, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pace import every

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Appended,
    Journal,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    OffsetGone,
    SchemaMismatch,
    Store,
)
from levada.actors.journal.kept_blocks import KeptBlocks  # noqa: E402
from levada.actors.journal.partitions import Partition  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])
SMALL = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None)


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers])], schema=SCHEMA)


def span(start: int, stop: int) -> Any:
    return rows(*range(start, stop))


def numbers(store: Store, partition: int = 0, start: int = 0, end: int | None = None) -> list[int]:
    found: list[int] = []
    for first, batch in store.batches(partition, start, end):
        assert first == start + len(found)
        found += batch.column("n").to_pylist()
    return found


def segment_files(directory: Path, partition: int = 0) -> list[Path]:
    return sorted((directory / f"partition-{partition:04d}").glob("*.segment"))


# ---------------------------------------------------------------- appending and reading


def test_rows_come_back_with_their_offsets(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, JournalConfig(partitions=2)) as store:
        assert store.append([(0, rows(1, 2)), (1, rows(10)), (0, rows(3))]) == [
            Appended(0, 0, 2),
            Appended(1, 0, 1),
            Appended(0, 2, 1),
        ]
        assert store.append([(1, rows(11, 12))]) == [Appended(1, 1, 2)]
        assert numbers(store, 0) == [1, 2, 3]
        assert numbers(store, 1) == [10, 11, 12]
        assert numbers(store, 1, 1, 2) == [11]
        assert numbers(store, 1, 3) == []
        extent = store.extent()
        assert (extent.first, extent.end) == ({0: 0, 1: 0}, {0: 3, 1: 3})
        statistics = store.statistics()
        assert (statistics.appends, statistics.rows_appended, statistics.syncs) == (4, 6, 3)
        assert statistics.bytes_stored == sum(
            path.stat().st_size for n in (0, 1) for path in segment_files(tmp_path, n)
        )
    with Store.open(tmp_path, SCHEMA, JournalConfig(partitions=2)) as store:
        assert (store.extent().first, store.extent().end) == (extent.first, extent.end)
        assert (store.extent().epoch == extent.epoch, store.extent().opening == extent.opening) == (True, False)
        assert numbers(store, 0) == [1, 2, 3]
        assert store.append([(0, rows(4))]) == [Appended(0, 3, 1)]
        assert numbers(store, 0) == [1, 2, 3, 4]
        assert store.statistics().bytes_cut == 0


@pytest.mark.ci
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=8),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    max_bytes=st.sampled_from([1, 700, 5000, 1 << 20]),
)
def test_any_range_reads_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    cut: tuple[float, float],
    max_bytes: int,
) -> None:
    """However rows were grouped, cut into blocks and segments, an offset is one row, and blocks name where they begin."""
    with Store.open(tmp_path_factory.mktemp("journal"), SCHEMA, SMALL) as store:
        at = 0
        for group in sizes:
            batches = []
            for size in group:
                batches.append((0, span(at, at + size)))
                at += size
            store.append(batches)
        start, end = sorted(int(part * at) for part in cut)
        assert numbers(store, 0, start, end) == list(range(start, end))
        found: list[int] = []
        while start + len(found) < end:
            here = start + len(found)
            blocks = list(store.read(0, here, end, max_bytes=max_bytes))
            assert blocks[0].first == here
            assert blocks[-1].end == store.offset_within(0, here, end, max_bytes=max_bytes)
            assert len(blocks) == 1 or sum(block.data.size for block in blocks) <= max_bytes
            for block in blocks:
                assert block.first == start + len(found)
                found += block.batch().column("n").to_pylist()
        assert found == list(range(start, end))


def test_small_appends_share_a_block_and_a_sync(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(n)) for n in range(500)])
        [block] = store.read(0, 0)
        assert (block.rows, store.statistics().syncs) == (500, 1)


def test_large_appends_are_cut_into_blocks(tmp_path: Path) -> None:
    config = JournalConfig(block_rows=100, block_bytes=1 << 20)
    with Store.open(tmp_path, SCHEMA, config) as store:
        store.append([(0, span(0, 1050))])
        assert [block.rows for block in store.read(0, 0)] == [100] * 10 + [50]
        lumpy = pa.record_batch([pa.array([1, 2, 3]), pa.array(["x" * 900_000, "y", "z" * 900_000])], schema=SCHEMA)
        store.append([(0, lumpy)])
        assert [block.rows for block in store.read(0, 1050)] == [2, 1]
        assert [block.time > 1.7e9 for block in store.read(0, 1050)] == [True, True]


def test_a_block_is_a_slice_of_the_file(tmp_path: Path) -> None:
    """Reading copies nothing: the column's memory lies in the mapping, and stays when the store is closed and the file gone."""
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, span(0, 16_384))])
        [block] = store.read(0, 0)
        batch = block.batch()
        low, size = block.data.address, block.data.size
        assert all(low <= buffer.address < low + size for buffer in batch.column("n").buffers() if buffer is not None)
    for path in segment_files(tmp_path):
        path.unlink()
    assert batch.column("n").to_pylist() == list(range(16_384))


def test_an_append_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        with pytest.raises(JournalError, match="one row or more"):
            store.append([(0, rows(1)), (0, rows())])
        with pytest.raises(JournalError, match="the partition is 1, wanted 0 to 0"):
            store.append([(1, rows(1))])
        with pytest.raises(SchemaMismatch, match="text: missing, wanted string") as caught:
            store.append([(0, pa.record_batch({"n": [1], "note": ["x"]}))])
        assert caught.value.differences == ("text: missing, wanted string", "note: string, not wanted")
        with pytest.raises(JournalError, match=r"at most 2048 \(segment_bytes\)"):
            store.append([(0, span(0, 1000))])
        with pytest.raises(JournalError, match="the offset is 1, wanted 0 to 0"):
            store.read(0, 1)
        assert store.extent().end == {0: 0}


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path, SCHEMA)
    store.close()
    store.close()
    with pytest.raises(JournalError, match="this journal is closed"):
        store.append([(0, rows(1))])


def test_readers_in_other_threads_see_whole_appends_only(tmp_path: Path) -> None:
    """Appends are of three rows each; no reader ever sees a part of one."""
    wrong: list[object] = []
    done = threading.Event()
    with Store.open(tmp_path, SCHEMA, JournalConfig(segment_bytes=1 << 13, block_bytes=1 << 12, sync="never")) as store:

        def look() -> None:
            while not done.is_set():
                end = store.extent().end[0]
                found = numbers(store, 0, max(0, end - 60), end)
                if end % 3 or found != list(range(max(0, end - 60), end)):
                    wrong.append((end, found))

        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(0, 900, 3):
            store.append([(0, span(n, n + 3))])
        done.set()
        for reader in readers:
            reader.join()
        assert len(segment_files(tmp_path)) > 5
    assert wrong == []


# ---------------------------------------------------------------- torn tails and damage


def filled(directory: Path, groups: Sequence[int] = (3, 4, 2)) -> list[int]:
    """Append groups of rows; return the size of the file after each."""
    sizes = []
    with Store.open(directory, SCHEMA) as store:
        shutil.copy(directory / "ends", directory / "ends-of-none")
        sizes.append(segment_files(directory)[0].stat().st_size)
        at = 0
        for group in groups:
            store.append([(0, span(at, at + group))])
            at += group
            sizes.append(segment_files(directory)[0].stat().st_size)
    return sizes


def answer_none(directory: Path) -> None:
    """Have it that the process was killed before it answered any of these appends."""
    shutil.copy(directory / "ends-of-none", directory / "ends")


@pytest.mark.ci
def test_a_tail_torn_at_any_octet_is_cut_to_the_last_whole_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = filled(tmp_path, (3, 2))
    [path] = segment_files(tmp_path)
    whole = path.read_bytes()
    rows_at = dict(zip(sizes, (0, 3, 5), strict=True))
    with Store.open(tmp_path, SCHEMA) as store:
        journal = bytes.fromhex(store.epoch)
    for length in range(sizes[0], len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = max(size for size in sizes if size <= length)
        partition = Partition(
            REAL.files, tmp_path, 0, journal=journal, schema=SCHEMA, segment_bytes=1 << 20, memory=KeptBlocks()
        )
        assert partition.find(0) == []
        assert path.read_bytes() == whole[:length]
        caplog.clear()
        assert partition.settle({}) == length - kept
        assert [f"{length - kept} bytes were cut off" in text for text in caplog.messages] == [True] * (length > kept)
        assert path.read_bytes() == whole[:kept]
        partition.close()
        assert partition.end == rows_at[kept]
        if length % 40:
            continue
        answer_none(tmp_path)
        with Store.open(tmp_path, SCHEMA) as store:
            assert numbers(store) == list(range(rows_at[kept]))
            # What comes next is written where the torn block was.
            assert store.append([(0, rows(100))]) == [Appended(0, rows_at[kept], 1)]
        with Store.open(tmp_path, SCHEMA) as store:
            assert numbers(store) == [*range(rows_at[kept]), 100]


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"L"])
def test_a_tail_of_other_octets_is_cut(tmp_path: Path, filler: bytes) -> None:
    """After a power failure a file may have its length and not its content."""
    sizes = filled(tmp_path)
    [path] = segment_files(tmp_path)
    whole = path.read_bytes()
    for length in range(sizes[2], sizes[3] - 8, every(21)):
        path.write_bytes(whole[:length] + filler * (sizes[3] - length + 4096))
        answer_none(tmp_path)
        with Store.open(tmp_path, SCHEMA) as store:
            assert numbers(store) == list(range(7))


@pytest.mark.ci
def test_a_header_cut_short_is_damage(tmp_path: Path) -> None:
    """A segment gets its name with a whole header, so no crash does this."""
    start = filled(tmp_path)[0]
    [path] = segment_files(tmp_path)
    whole = path.read_bytes()
    for length in range(0, start, every(3)):
        path.write_bytes(whole[:length])
        with pytest.raises(JournalDamaged) as caught:
            Store.open(tmp_path, SCHEMA)
        assert caught.value.path == str(path)
    for octet in range(0, start, every(3)):
        path.write_bytes(whole[:octet] + bytes([whole[octet] ^ 1]) + whole[octet + 1 :])
        try:
            Store.open(tmp_path, SCHEMA).close()
        except JournalError:
            continue
        assert whole[octet] == 0, "only padding does not matter"


@pytest.mark.ci
def test_a_changed_octet_before_the_tail_is_damage_and_nothing_is_cut(tmp_path: Path) -> None:
    """A block behind it says that the place had been synced, so somebody may have been promised these rows."""
    sizes = filled(tmp_path)
    [path] = segment_files(tmp_path)
    whole = path.read_bytes()
    for octet in range(sizes[0], sizes[2], every(3)):
        changed = whole[:octet] + bytes([whole[octet] ^ 0x55]) + whole[octet + 1 :]
        path.write_bytes(changed)
        block, end = (sizes[0], sizes[1]) if octet < sizes[1] else (sizes[1], sizes[2])
        if not whole[octet:end].strip(b"\0"):  # padding, or a zero at the end of a column: nobody looks at the former
            continue
        with pytest.raises(JournalDamaged, match=f"the block at byte {block}, offset") as caught:
            Store.open(tmp_path, SCHEMA)
        assert caught.value.offset == block
        assert path.read_bytes() == changed


def several_segments(directory: Path, count: int = 200) -> list[Path]:
    with Store.open(directory, SCHEMA, SMALL) as store:
        for n in range(0, count, 10):
            store.append([(0, span(n, n + 10))])
    files = segment_files(directory)
    assert len(files) > 3
    return files


def test_a_damaged_segment_in_the_middle_is_named_when_it_is_read(tmp_path: Path) -> None:
    files = several_segments(tmp_path)
    first = int(files[1].stem)
    octets = bytearray(files[1].read_bytes())
    octets[-60] ^= 1
    files[1].write_bytes(octets)
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store, 0, 0, first) == list(range(first))
        with pytest.raises(JournalDamaged, match=r"the block at byte \d+, offset \d+, is damaged: restore") as caught:
            numbers(store)
        assert caught.value.path == str(files[1])
        after = int(files[2].stem)
        assert numbers(store, 0, after) == list(range(after, 200))


def test_a_damaged_header_in_the_middle_is_named_when_it_is_read(tmp_path: Path) -> None:
    files = several_segments(tmp_path)
    octets = bytearray(files[1].read_bytes())
    octets[octets.index(b"LvB1")] ^= 1
    files[1].write_bytes(octets)
    with Store.open(tmp_path, SCHEMA, SMALL) as store, pytest.raises(JournalDamaged, match="is damaged"):
        numbers(store)


def test_files_of_another_journal_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    filled(tmp_path / "b")
    [ours], [theirs] = segment_files(tmp_path / "a"), segment_files(tmp_path / "b")
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(JournalDamaged, match=r"a segment of journal .* belongs somewhere else"):
        Store.open(tmp_path / "a", SCHEMA)
    ours.unlink()
    with pytest.raises(JournalDamaged, match="the segments of this partition are gone"):
        Store.open(tmp_path / "a", SCHEMA)
    (tmp_path / "b" / "ledger.sqlite").unlink()
    with pytest.raises(JournalDamaged, match="its ledger is gone"):
        Store.open(tmp_path / "b", SCHEMA)
    (tmp_path / "b" / "ledger.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(JournalDamaged, match="this is no ledger"):
        Store.open(tmp_path / "b", SCHEMA)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    [path] = segment_files(tmp_path)
    octets = bytearray(path.read_bytes())
    octets[8] = 6
    path.write_bytes(octets)
    with pytest.raises(JournalError, match="format version 6, this program reads 1 to 5: use the levada that wrote it"):
        Store.open(tmp_path, SCHEMA)


# ---------------------------------------------------------------- who may open it, and with which columns


@pytest.mark.ci
def test_two_cannot_open_the_same_journal(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from levada.actors.journal import JournalLocked, Store
        try:
            Store.open(sys.argv[1])
        except JournalLocked as error:
            print(error)
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with Store.open(tmp_path):
        with pytest.raises(JournalLocked):
            Store.open(tmp_path)
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        who = f"process {os.getpid()}" if sys.platform == "linux" else "another process, or this one,"
        assert f"{who} has this journal open" in done.stdout
    Store.open(tmp_path).close()


def test_the_number_of_partitions_stays(tmp_path: Path) -> None:
    Store.open(tmp_path, config=JournalConfig(partitions=2)).close()
    with pytest.raises(ConfigurationError, match="has 2 partitions, which cannot change to 3"):
        Store.open(tmp_path, config=JournalConfig(partitions=3))


def test_columns_grow_at_the_end(tmp_path: Path) -> None:
    wider = SCHEMA.append(pa.field("note", pa.string()))
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1))])
    with Store.open(tmp_path, wider) as store:
        store.append([(0, pa.record_batch([[2], ["b"], ["new"]], schema=wider))])
        together = pa.Table.from_batches([batch for _, batch in store.batches(0, 0)]).to_pylist()
        assert together == [{"n": 1, "text": "row 1", "note": None}, {"n": 2, "text": "b", "note": "new"}]
    with Store.open(tmp_path) as store:
        assert store.schema == wider
    with pytest.raises(SchemaMismatch, match="note: missing, the journal has string"):
        Store.open(tmp_path, SCHEMA)
    # Nothing was written with the new columns: opened again and again, no segment is added.
    for _ in range(3):
        Store.open(tmp_path, wider).close()
    assert len(segment_files(tmp_path)) == 2


def test_growth_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    """One partition has the new columns, the other not yet."""
    wider = SCHEMA.append(pa.field("note", pa.string()))
    config = JournalConfig(partitions=2)
    with Store.open(tmp_path, SCHEMA, config) as store:
        store.append([(0, rows(1)), (1, rows(2))])
    with Store.open(tmp_path, wider, config):
        pass
    segment_files(tmp_path, 1)[-1].unlink()
    with Store.open(tmp_path, None, config) as store:
        assert store.schema == wider
        assert (numbers(store, 0), numbers(store, 1)) == ([1], [2])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_bytes": 1 << 20}, "max_bytes is 1048576, less than"),
        ({"block_bytes": 1 << 30, "segment_bytes": 64 << 20}, "more than segment_bytes"),
        ({"partitions": 0}, "partitions"),
        ({"retain_time": 0}, "retain_time"),
        ({"sync": "always"}, "sync"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        JournalConfig(**settings)


# ---------------------------------------------------------------- retention and bounds


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_deleted_that_a_group_has_not_read(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert store.declare_group("slow") == {0: 0}
        assert store.declare_group("quick") == {0: 0}
        for n in range(0, 200, 10):
            store.append([(0, span(n, n + 10))])
        files = segment_files(tmp_path)
        third = int(files[2].stem)
        store.commit_group("quick", {0: 200})
        assert segment_files(tmp_path) == files
        store.commit_group("slow", {0: third})
        assert segment_files(tmp_path) == files[2:]
        assert store.extent().first == {0: third}
        assert store.statistics().segments_deleted == 2
        with pytest.raises(OffsetGone, match=f"rows 5 to {third - 1} have been deleted") as caught:
            numbers(store, 0, 5)
        assert (caught.value.wanted, caught.value.first) == (5, third)
        store.commit_group("slow", {0: third + 1})
        assert numbers(store, 0, third) == list(range(third, 200))
        store.forget_group("slow")
        assert len(segment_files(tmp_path)) == 1
        assert store.groups() == {"quick": {0: 200}}
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert store.groups() == {"quick": {0: 200}}
        assert store.extent().end == {0: 200}


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        store.append([(0, rows(1))])
        with pytest.raises(JournalError, match="no group 'x': declare it first"):
            store.commit_group("x", {0: 1})
        assert store.declare_group("x", "end") == {0: 1}
        assert store.declare_group("x", "first") == {0: 1}
        with pytest.raises(JournalError, match="the offset is 2, wanted 0 to 1"):
            store.commit_group("x", {0: 2})
        with pytest.raises(JournalError, match="the partition is 4, wanted 0 to 0"):
            store.commit_group("x", {4: 0})
        store.commit_group("x", {0: 0})
        assert store.groups() == {"x": {0: 0}}


def test_retention_by_size_and_by_time(tmp_path: Path) -> None:
    """What was read stays for a grace, as checkpoints are restored; either bound ends it."""
    clock = Clock()
    config = JournalConfig(
        segment_bytes=4096, block_bytes=1024, max_bytes=1 << 20, retain_bytes=9000, retain_time=100.0
    )
    with Store.open(tmp_path, SCHEMA, config, clock=clock) as store:
        for n in range(0, 400, 10):
            store.append([(0, span(n, n + 10))])
            clock.now += 1
        assert 9000 <= store.size < 9000 + 2 * 4096  # looked at whenever a segment is sealed
        assert numbers(store, 0, store.extent().first[0])[-1] == 399
        left = segment_files(tmp_path)
        clock.now += 99
        store.retain()
        assert 1 <= len(segment_files(tmp_path)) < len(left)
        assert store.extent().end == {0: 400}


def test_old_segments_are_sealed_by_time(tmp_path: Path) -> None:
    clock = Clock()
    with Store.open(tmp_path, SCHEMA, JournalConfig(segment_time=60.0), clock=clock) as store:
        store.append([(0, rows(1))])
        clock.now += 59
        store.retain()
        assert len(segment_files(tmp_path)) == 1
        clock.now += 1
        store.retain()
        store.retain()
        assert len(segment_files(tmp_path)) == 2
        assert numbers(store) == [1]


def test_a_full_journal_takes_nothing_until_there_is_room(tmp_path: Path) -> None:
    config = JournalConfig(segment_bytes=4096, block_bytes=1024, max_bytes=10_000, retain_bytes=None)
    with Store.open(tmp_path, SCHEMA, config) as store:
        store.declare_group("reader")
        written = 0
        with pytest.raises(JournalFull, match=r"at most 10000 \(max_bytes\).*\(reader\)"):
            while True:
                store.append([(0, span(written, written + 10))])
                written += 10
        assert store.size <= 10_000
        assert numbers(store) == list(range(written))
        # Of a group, as many are taken as there is room for.
        store.commit_group("reader", {0: written})
        many = [(0, span(written + n, written + n + 10)) for n in range(0, 400, 10)]
        with pytest.raises(JournalFull):
            store.append(many)
        assert numbers(store, 0, written) == []
        taken = store.append_group([store.prepare(*each) for each in many])
        assert 1 <= len(taken) < len(many)
        assert store.size <= 10_000
        assert numbers(store, 0, written) == list(range(written, written + 10 * len(taken)))
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) <= 10_000


def test_reading_a_journal_larger_than_memory_may_be_takes_no_memory(tmp_path: Path) -> None:
    """64 MiB are read with less than 16 MiB of Arrow's memory, and mappings of what was read are gone."""
    batch = pa.record_batch([pa.array(range(4096), pa.int64()), pa.array(["x" * 1000] * 4096)], schema=SCHEMA)
    with Store.open(tmp_path, SCHEMA, JournalConfig(sync="never", segment_bytes=8 << 20)) as store:
        for _ in range(16):
            store.append([(0, batch)])
        before = pa.total_allocated_bytes()
        total = peak = most = 0
        for _, each in store.batches(0, 0):
            total += each.num_rows
            peak = max(peak, pa.total_allocated_bytes() - before)
            if sys.platform == "linux":
                maps = Path("/proc/self/maps").read_text()
                most = max(most, sum(_size(line) for line in maps.splitlines() if ".segment" in line))
        assert total == 65_536
        assert peak < 16 << 20
        assert most < 32 << 20


def _size(line: str) -> int:
    low, _, high = line.split()[0].partition("-")
    return int(high, 16) - int(low, 16)


# ---------------------------------------------------------------- disks that refuse

LIMITED = textwrap.dedent(
    """
    import resource, sys
    import pyarrow as pa
    from levada.actors.journal import JournalError, Store

    schema = pa.schema([("n", pa.int64())])
    with Store.open(sys.argv[1], schema) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        done = 0
        try:
            while True:
                store.append([(0, pa.record_batch([pa.array(range(done, done + 1000))], schema=schema))])
                done += 1000
        except JournalError as error:
            print(done, type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.append([(0, pa.record_batch([pa.array([done])], schema=schema))])
    """
)


@pytest.mark.ci
def test_a_file_that_may_not_grow_leaves_a_consistent_journal(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, name, detail = done.stdout.split(maxsplit=2)
    assert (int(count), name) == (12_000, "JournalUnwritable")
    assert "the disk refuses ([Errno 27] File too large); nothing of this was written" in detail
    with Store.open(tmp_path) as store:
        assert numbers(store) == list(range(12_001))
        assert store.statistics().bytes_cut == 0


FULL = textwrap.dedent(
    """
    import errno, os, resource, sys
    from levada.actors.journal import JournalError, Store

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if len(sys.argv) > 3:
        os.pwritev = full  # SQLite does not call it
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        Store.open(sys.argv[1])
    except JournalError as error:
        print(type(error).__name__, error.path, error.detail)
    """
)


@pytest.mark.parametrize("limit", [0, 4096])
def test_a_disk_without_room_is_no_damage_of_the_ledger(tmp_path: Path, limit: int) -> None:
    """SQLite needs room to open a ledger. If it had none, an older copy must not be restored."""
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1))])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", FULL, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = "the ledger cannot be read or written (disk I/O error): see whether the disk has room"
    assert done.stdout.startswith(f"JournalUnwritable {tmp_path}/ledger.sqlite {said}")
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store) == [1]


def test_a_full_disk_is_called_full_where_sqlite_has_an_error_of_the_disk(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1))])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", FULL, str(tmp_path), "0", "full"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"JournalFull {tmp_path}/ledger.sqlite the disk is full (disk I/O error)")
    assert not (tmp_path / "room").exists()
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store) == [1]


def test_a_ledger_whose_log_cannot_be_opened_is_not_damaged(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1))])
    log = tmp_path / "ledger.sqlite-wal"
    log.mkdir()
    with pytest.raises(JournalUnwritable, match="unable to open database file") as caught:
        Store.open(tmp_path, SCHEMA)
    assert caught.value.path == str(tmp_path / "ledger.sqlite")
    log.rmdir()
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store) == [1]


def test_a_ledger_whose_texts_are_not_utf_8_is_damaged(tmp_path: Path) -> None:
    """Python names them itself, without a code of SQLite."""
    Store.open(tmp_path, SCHEMA).close()
    ledger = tmp_path / "ledger.sqlite"
    content = ledger.read_bytes()
    assert content.count(b"row_sum(NEW.") > 0
    ledger.write_bytes(content.replace(b"row_sum(NEW.", b"row_sum(\xb7EW."))
    with pytest.raises(JournalDamaged, match="Could not decode to UTF-8"):
        Store.open(tmp_path, SCHEMA)


def test_a_folder_without_a_name_is_not_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    for use in (lambda: Store.open("", SCHEMA), lambda: Journal("", SCHEMA)):
        with pytest.raises(ConfigurationError, match="the name of a folder is empty: name one, or the current folder"):
            use()
    with pytest.raises(ConfigurationError, match="this is a URL") as refused:
        Store.open("postgresql://me:secret@db.example/bank", SCHEMA)
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    with Store.open(".", SCHEMA):
        assert (tmp_path / "ledger.sqlite").exists()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "fsync", "rename"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, JournalFull), (errno.EDQUOT, JournalFull), (errno.EIO, JournalUnwritable)]
)
def test_a_disk_that_refuses_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[JournalError]
) -> None:
    """Whatever fails, in the middle of an append that needs a new segment too, nothing of it stays, and the next one works."""
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        for n in range(0, 60, 10):
            store.append([(0, span(n, n + 10))])
        before = [path.read_bytes() for path in segment_files(tmp_path)]
        failures = [OSError(code, os.strerror(code))]
        real = getattr(REAL.files, call)

        def refuse(*args: Any) -> Any:
            if failures and call == "pwritev":
                real(args[0], [memoryview(args[1][0])[:10]], args[2])  # a part of it got through
            if failures:
                raise failures.pop()
            return real(*args)

        monkeypatch.setattr(REAL.files, call, refuse)
        with pytest.raises(kind, match="nothing of this was written") as caught:
            store.append([(0, span(60, 120))])
        assert isinstance(caught.value.__cause__, OSError)
        assert [path.read_bytes() for path in segment_files(tmp_path)] == before
        assert store.broken == ""
        assert store.append([(0, span(60, 120))]) == [Appended(0, 60, 60)]
        assert numbers(store) == list(range(120))
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store) == list(range(120))


def test_a_store_that_cannot_take_back_does_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path, SCHEMA)
    store.append([(0, rows(1))])

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(REAL.files, "fdatasync", refuse)
        with pytest.raises(JournalUnwritable, match="half a write cannot be taken back"):
            store.append([(0, rows(2))])
    with pytest.raises(JournalError, match="open the journal again"):
        store.append([(0, rows(3))])
    store.close()
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store)[0] == 1


def test_a_store_whose_undoing_is_interrupted_does_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error that is not the disk's, which its caller gets."""
    store = Store.open(tmp_path, SCHEMA)
    store.append([(0, rows(1))])
    failures: list[Exception] = [MemoryError(), OSError(errno.EIO, "no")]

    def refuse(*_: object) -> None:
        raise failures.pop()

    with monkeypatch.context() as patch:
        patch.setattr(REAL.files, "fdatasync", refuse)
        with pytest.raises(MemoryError):
            store.append([(0, rows(2))])
    with pytest.raises(JournalError, match="half a write cannot be taken back, open the journal again"):
        store.append([(0, rows(3))])
    store.close()
    with Store.open(tmp_path, SCHEMA) as store:
        assert numbers(store)[0] == 1


def test_a_read_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, opened = REAL.files, set[int]()
    open_, close = files.open, files.close

    def noted(*args: Any) -> int:
        descriptor = open_(*args)
        opened.add(descriptor)
        return descriptor

    def closed(descriptor: int) -> None:
        opened.discard(descriptor)
        close(descriptor)

    def refuse(*_: object) -> bytes:
        assert opened
        raise OSError(errno.EIO, "no")

    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1))])
        with monkeypatch.context() as patch:
            for name, replacement in (("open", noted), ("close", closed), ("pread", refuse)):
                patch.setattr(files, name, replacement)
            with pytest.raises(OSError, match="no"):
                list(store.batches(0, 0))
            assert opened == set()
        assert numbers(store) == [1]


def test_rows_whose_end_cannot_be_noted_are_not_said_to_be_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they begin a segment, after which old ones may go."""
    store = Store.open(tmp_path, SCHEMA, SMALL)
    store.append([(0, span(0, 60))])

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(REAL.files, "pwrite", refuse)  # of the record of ends
        assert store.append([(0, span(60, 120))]) == [Appended(0, 60, 60)]
    assert len(segment_files(tmp_path)) == 2
    with pytest.raises(JournalError, match="open the journal again"):
        store.append([(0, span(120, 130))])
    store.close()
    with Store.open(tmp_path, SCHEMA, SMALL) as store:
        assert numbers(store) == list(range(120))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(REAL.files, "pwritev", lambda fd, views, at: real(fd, [memoryview(views[0])[:5]], at))
    with Store.open(tmp_path, SCHEMA) as store:
        store.append([(0, rows(1, 2))])
        assert numbers(store) == [1, 2]


def test_each_block_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first reading; the checksum costs more than all the rest of reading."""
    several_segments(tmp_path)
    checks: list[int] = []
    real = zlib.crc32
    with Store.open(tmp_path, SCHEMA, SMALL) as store:

        def count(octets: Any, before: int = 0) -> int:
            checks.append(len(octets))
            return real(octets, before)

        monkeypatch.setattr(zlib, "crc32", count)
        assert numbers(store) == list(range(200))
        first = len(checks)
        assert numbers(store) == list(range(200))
        assert first > 0
        assert len(checks) == first
