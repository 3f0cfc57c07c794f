"""Rows of another log, at their own offsets: gaps on the disk, in the index and behind merges; and copies that are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Appended,
    CopyRows,
    CopyUnfinished,
    Fenced,
    JournalConfig,
    JournalError,
    JournalFull,
    Keyed,
    SchemaMismatch,
    Store,
    stream_of,
)
from levada.actors.journal.inspection import inspect  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

SCHEMA = pa.schema([("entity", pa.string()), ("n", pa.int64())])
CONFIG = JournalConfig(
    partitions=2, segment_bytes=4096, block_bytes=1024, retain_bytes=1 << 20, keyed=Keyed(entity="entity")
)
KEPT = [n for n in range(400) if n % 7 < 3 and n > 5]
"""Offsets of rows; there are gaps of four between them, and larger ones at the ends."""


def rows(places: list[int]) -> Any:
    columns = [pa.array(places, pa.int64()), pa.array([f"e{n % 5}" for n in places]), pa.array(places, pa.int64())]
    return pa.record_batch(columns, names=["offset", "entity", "n"])


def fill(store: Store, step: int) -> None:
    for at in range(0, 400, step):
        end = min(at + step, 400)
        here = [n for n in KEPT if at <= n < end]
        question = CopyRows(rows(here) if here else b"", 0, at, end)
        assert store.copy(question) == Appended(0, at, end - at)
        assert store.copy(question) == Fenced(0, end)


def numbers(store: Store) -> list[int]:
    return [n for _, batch in store.batches(0, 0) for n in batch.column("n").to_pylist()]


@pytest.mark.parametrize("step", [9, 400])
def test_rows_keep_their_offsets_over_segments_and_openings(tmp_path: Path, step: int) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        fill(store, step)
        assert store.statistics().segments > 2
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert numbers(store) == KEPT
        assert store.extent().end == {0: 400, 1: 0}
        assert next(store.batches(0, 0))[0] == KEPT[0]
        for who in range(5):
            places = [
                n for _, batch in store.rows_of(f"e{who}", partition=0) for n in batch.column("offset").to_pylist()
            ]
            assert places == [n for n in KEPT if n % 5 == who]
        assert sum(store.erase("e1", partition=0)) == len([n for n in KEPT if n % 5 == 1])
        assert numbers(store) == [n for n in KEPT if n % 5 != 1]
    with inspect(tmp_path, blocks=True) as found:
        assert found.findings == []


def test_gaps_stay_in_a_segment_whose_blocks_are_merged(tmp_path: Path) -> None:
    config = JournalConfig(keyed=CONFIG.keyed)
    with Store.open(tmp_path, SCHEMA, config) as store:
        for n in range(0, 140, 2):
            store.copy(CopyRows(rows([n + 1]), 0, n, n + 2))
    for _ in range(2):
        with Store.open(
            tmp_path, SCHEMA.append(pa.field("more", pa.int64())), config
        ) as store:  # which seals a segment
            assert numbers(store) == list(range(1, 140, 2))
            assert store.statistics().segments == 2


def test_gaps_of_any_size_take_no_memory(tmp_path: Path) -> None:
    """A log that was trimmed begins late. The index in memory has a place for each offset, and the file four bytes for its number."""
    places = [5, 1 << 20, 3 << 32, (3 << 32) + 7, 5 << 36]
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        at = 0
        for place in places:
            if place > at + 10:
                store.copy(CopyRows(b"", 0, at, place))
                at = place
            store.copy(CopyRows(rows([place]), 0, at, place + 1))
            at = place + 1
    for _ in range(2):
        with Store.open(tmp_path, SCHEMA, CONFIG) as store:
            assert numbers(store) == places
            for who in range(5):
                found = [
                    n for _, batch in store.rows_of(f"e{who}", partition=0) for n in batch.column("offset").to_pylist()
                ]
                assert found == [n for n in places if n % 5 == who]
        for index in tmp_path.glob("**/*.index"):
            index.unlink()


def test_wrong_rows_are_refused_and_not_written(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        nulls = pa.record_batch([pa.array([None], pa.int64()), ["e"], [1]], names=["offset", "entity", "n"])
        for wrong, kind, text in (
            (rows([5]), SchemaMismatch, "offsets of a copy grow, and are between 0 and 5"),
            (rows([2, 1]), SchemaMismatch, "offsets of a copy grow"),
            (nulls, SchemaMismatch, "offsets of a copy grow"),
            (rows([1]).drop_columns(["offset"]), SchemaMismatch, "begin with a column of their offsets"),
            (rows([1]).drop_columns(["n"]), SchemaMismatch, "the columns differ"),
            (b"x", SchemaMismatch, "these bytes are not rows"),
        ):
            with pytest.raises(kind, match=text):
                store.copy(CopyRows(wrong, 0, 0, 5))
        with pytest.raises(JournalError, match="the partition is 2, wanted 0 to 1"):
            store.copy(CopyRows(rows([1]), 2, 0, 5))
        assert store.extent().end == {0: 0, 1: 0}
        assert store.copy(CopyRows(stream_of(rows([1]).slice(1)), 0, 0, 5)) == Appended(0, 0, 5)
    for end in (5, 4, (1 << 20) + 6):
        with pytest.raises(ValueError, match="end is"):
            CopyRows(rows([5]), 0, 5, end)
    with pytest.raises(TypeError, match="rows is list, wanted a record batch or bytes"):
        CopyRows([1], 0, 0, 1)
    small = JournalConfig(segment_bytes=4096, block_bytes=1024, max_bytes=12_000, retain_bytes=1)
    with Store.open(tmp_path.with_name(f"{tmp_path.name}-small"), SCHEMA, small) as store, pytest.raises(JournalFull):
        store.declare_group("g")
        for at in range(0, 1000, 100):
            store.copy(CopyRows(rows(list(range(at, at + 100))), 0, at, at + 100))


def test_a_copy_opens_when_it_is_whole(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG, copy_of="a" * 32) as store:
        store.copy(CopyRows(rows([3]), 0, 0, 5))
        epoch = store.epoch
    for _ in range(2):
        with pytest.raises(CopyUnfinished, match="it is not whole: run levada journal copy again"):
            Store.open(tmp_path, SCHEMA, CONFIG)
    with inspect(tmp_path) as found:
        assert [(each.kind, each.text) for each in found.findings] == [
            ("note", f"a copy of the log {'a' * 32} that is not whole: run levada journal copy again")
        ]
    with pytest.raises(
        ConfigurationError, match=f"is an unfinished copy of another log, {'a' * 32}, and cannot become"
    ):
        Store.open(tmp_path, SCHEMA, CONFIG, copy_of="b" * 32)
    with Store.open(tmp_path, SCHEMA, CONFIG, copy_of="a" * 32) as store:
        assert (store.epoch, store.extent().end) == (epoch, {0: 5, 1: 0})
        store.finish_copy()
        store.finish_copy()
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert numbers(store) == [3]
    with pytest.raises(ConfigurationError, match="Nothing is overwritten"):
        Store.open(tmp_path, SCHEMA, CONFIG, copy_of="a" * 32)


def test_an_empty_journal_may_become_a_copy(tmp_path: Path) -> None:
    Store.open(tmp_path, SCHEMA, CONFIG).close()
    Store.open(tmp_path, SCHEMA, CONFIG, copy_of="a" * 32).close()
    with pytest.raises(CopyUnfinished):
        Store.open(tmp_path, SCHEMA, CONFIG)
