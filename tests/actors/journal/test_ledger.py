"""The sink ledger: each batch exactly once, whatever is cut short and wherever."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Appended,
    Delivered,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalUnwritable,
    Keyed,
    SchemaMismatch,
    Store,
)
from levada.actors.journal.ledger import KEPT, Ledger, LedgerLine  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])
CONFIG = JournalConfig(
    partitions=2, segment_bytes=2048, block_rows=40, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None
)


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def numbers(store: Store, partition: int) -> list[int]:
    return [n for _, batch in store.batches(partition, 0) for n in batch.column("n").to_pylist()]


def deliver(store: Store, query: str, batch: int, *parts: tuple[int, Any]) -> Delivered:
    return store.deliver(query, batch, ((number, message) for number, each in parts for message in store.pack([each])))


def test_a_batch_is_delivered_once(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(1))])
        first = deliver(store, "q", 0, (0, rows(2, 3)), (1, rows(4)), (0, rows(5)))
        assert first == Delivered(already=False, ranges={0: (1, 4), 1: (0, 1)})
        again = deliver(store, "q", 0, (0, rows(99)))
        assert again == Delivered(already=True, ranges={0: (1, 4), 1: (0, 1)})
        assert deliver(store, "other", 0, (1, rows(6))).ranges == {1: (1, 2)}
        assert deliver(store, "q", 1).ranges == {}
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert deliver(store, "q", 0, (0, rows(99))).already
        assert deliver(store, "q", 1, (0, rows(99))).already
        assert store.delivered("q", 2) is None
        assert (numbers(store, 0), numbers(store, 1)) == ([1, 2, 3, 5], [4, 6])
        statistics = store.statistics()
        assert (statistics.batches_delivered, statistics.batches_repeated) == (0, 2)


def test_staged_rows_are_delivered_without_a_copy_of_their_columns(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        stage = store.stage("q", 0, 0, 1)
        stage.append(rows(*range(50)))
        stage.append(rows(50))
        assert stage.rows == 51
        assert numbers(store, 1) == []
        assert store.statistics().bytes_staged > 400
        assert store.deliver("q", 0, ((1, message) for message in stage.messages())).ranges == {1: (0, 51)}
        assert (store.unstage("q", 0), store.unstage("q", 0)) == (1, 0)
        assert store.statistics().bytes_staged == 0
        assert numbers(store, 1) == list(range(51))
        assert list((tmp_path / "staging").iterdir()) == []


def test_staged_rows_outlive_the_store(tmp_path: Path) -> None:
    """What was torn is cut off. Rows of a batch that has been delivered may be of a later attempt, still to be compared."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        for batch, attempt in ((0, 1), (1, 2), (2, 3)):
            store.stage("q", batch, 0, attempt).append(rows(batch, batch + 10))
        size = store.statistics().bytes_staged
        deliver(store, "q", 2, (0, rows(2, 12)))
    torn = tmp_path / "staging" / f"{2:020d}.segment"
    torn.write_bytes(torn.read_bytes()[:-1])
    (tmp_path / "staging" / f"{9:020d}.new").touch()
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert {key: stage.rows for key, stage in store.staged("q", 0).items()} == {(0, 1): 2}
        assert {key: stage.rows for key, stage in store.staged("q", 1).items()} == {(0, 2): 0}
        assert {key: stage.rows for key, stage in store.staged("q", 2).items()} == {(0, 3): 2}
        assert store.statistics().bytes_staged == size // 3 * 2
        assert store.unstage("q", 2) == 1
        store.stage("q", 0, 0, 1).append(rows(20))
        store.stage("q", 3, 0, 4).append(rows(3))
        assert {path.name for path in (tmp_path / "staging").iterdir()} == {f"{n:020d}.segment" for n in (1, 2, 4)}
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        stage = store.stage("q", 0, 0, 1)
        assert store.deliver("q", 0, ((1, message) for message in stage.messages())).ranges == {1: (0, 3)}
        assert numbers(store, 1) == [0, 10, 20]


def test_staged_rows_of_other_columns_or_formats_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.stage("q", 0, 0, 1).append(rows(1))
        (tmp_path / "staging" / f"{7:020d}.segment").write_bytes(b"no segment")
    with Store.open(tmp_path, SCHEMA.append(pa.field("more", pa.int64())), CONFIG) as store:
        assert store.staged("q", 0) == {}
        assert store.statistics().bytes_staged == 0
    assert list((tmp_path / "staging").iterdir()) == []
    assert [record.message.partition("segment: ")[2] for record in caplog.records] == [
        "batch 0 of q has the columns of before the journal grew",
        "this is no segment of a journal",
    ]


def test_stages_have_a_bound(tmp_path: Path) -> None:
    config = JournalConfig(max_staged_bytes=2000)
    with Store.open(tmp_path, SCHEMA, config) as store:
        stage = store.stage("q", 0, 0, 1)
        stage.append(rows(1))
        with pytest.raises(JournalFull, match=r"at most 2000 \(max_staged_bytes\)"):
            store.stage("q", 0, 1, 2).append(rows(*range(1000)))
        assert [message.rows for message in stage.messages()] == [1]


def test_a_batch_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    config = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=8192, retain_bytes=None)
    with Store.open(tmp_path, SCHEMA, config) as store:
        store.declare_group("reader")
        count = 0
        with pytest.raises(JournalFull):
            while True:
                deliver(store, "q", count, (0, rows(*range(count * 100, count * 100 + 100))))
                count += 1
        assert numbers(store, 0) == list(range(count * 100))
        store.commit_group("reader", {0: count * 100})
        assert not deliver(store, "q", count, (0, rows(*range(count * 100, count * 100 + 100)))).already
        assert store.size <= 8192
        store.commit_group("reader", {0: store.extent().end[0]})
        with pytest.raises(JournalFull):
            deliver(store, "big", 0, (0, rows(*range(900))))
        assert store.delivered("big", 0) is None
    with (
        Store.open(tmp_path.with_name(f"{tmp_path.name}-empty"), SCHEMA, config) as store,
        pytest.raises(JournalError, match="a batch of more than 6144 bytes never fits"),
    ):
        deliver(store, "big", 0, (0, rows(*range(900))))


def test_a_source_of_rows_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(store: Store) -> Iterator[tuple[int, Any]]:
        for message in store.pack([rows(*range(200))]):
            yield 0, message
        raise KeyError("gone")

    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        with pytest.raises(KeyError):
            store.deliver("q", 0, broken(store))
        assert (numbers(store, 0), store.broken) == ([], "")
        assert not deliver(store, "q", 0, (0, rows(1))).already
        assert numbers(store, 0) == [1]


def test_the_ledger_syncs_each_commit(tmp_path: Path) -> None:
    """What no simulation sees: SQLite's own writes."""
    ledger = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    settings = [ledger._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]
    ledger.close()


def test_only_the_newest_batches_keep_their_ranges(tmp_path: Path) -> None:
    ledger = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    for batch in range(KEPT + 5):
        ledger.deliver("q", batch, LedgerLine({0: (batch, batch + 1)}))
    assert ledger.delivered("q", 3) == Delivered(already=True, ranges={})
    assert ledger.delivered("q", 5) == Delivered(already=True, ranges={0: (5, 6)})
    assert ledger.delivered("q", KEPT + 5) is None
    assert ledger.delivered("p", 0) is None
    assert ledger.transaction == KEPT + 5
    ledger.close()


def test_a_batch_that_comes_again_under_the_same_attempts_costs_no_commit(tmp_path: Path) -> None:
    ledger = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    ledger.deliver("q", 0, LedgerLine({0: (0, 1)}, attempts="first"))
    commits = ledger.commits
    ledger.set_attempts("q", 0, "first")
    ledger.set_attempts("q", 1, "of a batch that is not known")
    assert ledger.commits == commits
    ledger.set_attempts("q", 0, "second")
    assert ledger.commits == commits + 1
    assert ledger.line("q", 0) == LedgerLine({0: (0, 1)}, attempts="second")
    assert ledger.line("q", 1) is None
    ledger.close()


def test_rows_that_the_ledger_promised_and_that_are_gone(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        deliver(store, "q", 0, (0, rows(1, 2)))
    [path] = (tmp_path / "partition-0000").glob("*.segment")
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(JournalDamaged, match="ends with offset 0, but rows up to 2 were promised"):
        Store.open(tmp_path, SCHEMA, CONFIG)


def test_a_group_that_has_read_rows_that_are_gone(tmp_path: Path) -> None:
    """Else the next rows would get their offsets, and the group would never see them."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(1, 2))])
        store.declare_group("g")
        store.commit_group("g", {0: 2})
    [path] = (tmp_path / "partition-0000").glob("*.segment")
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(JournalDamaged, match="rows up to 2 were promised"):
        Store.open(tmp_path, SCHEMA, CONFIG)


def test_a_ledger_older_than_the_segments_destroys_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(0))])
    shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "old")
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        deliver(store, "q", 0, (0, rows(1)))
        deliver(store, "q", 1, (0, rows(2)))
    shutil.copy(tmp_path / "old", tmp_path / "ledger.sqlite")
    [path] = (tmp_path / "partition-0000").glob("*.segment")
    before = path.read_bytes()
    with pytest.raises(JournalDamaged, match="the ledger has had 4 commits, and the newest 3 of them are gone"):
        Store.open(tmp_path, SCHEMA, CONFIG)
    with pytest.raises(JournalDamaged, match="of transaction 2, but the ledger ends with 0: it is older"):
        Store.open(tmp_path, SCHEMA, attrs.evolve(CONFIG, accept_loss=True))
    assert path.read_bytes() == before


def test_a_ledger_from_before_a_delivery_is_older_than_the_appends_behind_it(tmp_path: Path) -> None:
    """Nothing is cut off: only the last transaction can have been cut short."""
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        store.append([(0, rows(0))])
    shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "old")
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        deliver(store, "q", 0, (0, rows(1)))
        store.append([(0, rows(2))])
    shutil.copy(tmp_path / "old", tmp_path / "ledger.sqlite")
    [path] = (tmp_path / "partition-0000").glob("*.segment")
    before = path.read_bytes()
    with pytest.raises(
        JournalDamaged, match="offset 2 is behind transaction 1, but the ledger ends with 0: it is older"
    ):
        Store.open(tmp_path, SCHEMA, attrs.evolve(CONFIG, accept_loss=True))
    assert path.read_bytes() == before


def test_a_ledger_that_refuses_decides_when_it_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does no more: only what is on the disk tells whether the line was written."""
    store = Store.open(tmp_path, SCHEMA, CONFIG)
    deliver(store, "q", 0, (0, rows(1)))

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "deliver", refuse)
        with pytest.raises(JournalUnwritable, match="was cut short, open the journal again: disk I/O error"):
            deliver(store, "q", 1, (0, rows(2)))
    with pytest.raises(JournalError, match="open the journal again"):
        store.append([(0, rows(3))])
    assert numbers(store, 0) == [1]
    store.close()
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        assert store.statistics().bytes_cut > 0
        assert not deliver(store, "q", 1, (0, rows(2))).already
        assert numbers(store, 0) == [1, 2]


@pytest.mark.parametrize("made", ["lock", "ledger.sqlite"])
def test_a_journal_of_which_there_is_only_an_empty_file_is_made_by_the_next_start(tmp_path: Path, made: str) -> None:
    """A process was killed while it made the journal. What else it may leave is tested on a simulated disk."""
    (tmp_path / made).touch()
    for number in (1, 2):
        with Store.open(tmp_path, SCHEMA, CONFIG) as store:
            store.append([(0, rows(number)), (1, rows(number))])
    with Store.open(tmp_path, None, CONFIG) as store:
        assert store.schema == SCHEMA
        assert (numbers(store, 0), numbers(store, 1)) == ([1, 2], [1, 2])


def test_a_new_journal_that_is_refused_may_get_other_columns(tmp_path: Path) -> None:
    """Its segments have the first columns already, and nobody has seen them."""
    wrong = attrs.evolve(CONFIG, keyed=Keyed(entity="n"))
    for schema in (None, SCHEMA):
        with pytest.raises(ConfigurationError, match="Keyed: column n is"):
            Store.open(tmp_path, schema, wrong)
    other = pa.schema([pa.field("n", pa.string())])
    with Store.open(tmp_path, other, wrong) as store:
        assert store.append([(0, pa.record_batch([["a"]], schema=other))]) == [Appended(0, 0, 1)]
    with Store.open(tmp_path, None, wrong) as store:
        assert [each.to_pylist() for _, each in store.rows_of("a", partition=0)] == [[{"offset": 0, "n": "a"}]]
    with pytest.raises(SchemaMismatch, match="n: int64, in the journal string"):
        Store.open(tmp_path, SCHEMA, CONFIG)


@pytest.mark.parametrize("partitions", [1, 8, 64, 500])
def test_any_number_of_partitions_has_room_by_default(partitions: int) -> None:
    config = JournalConfig(partitions=partitions)
    room = config.max_bytes - (config.retain_bytes or 0)
    assert config.block_bytes <= config.segment_size <= 128 << 20
    assert (partitions + 1) * config.segment_size <= room
    assert attrs.evolve(JournalConfig(), partitions=partitions).segment_size == config.segment_size


def test_too_many_partitions_are_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigurationError, match="raise it, or lower retain_bytes or block_bytes"):
        JournalConfig(partitions=1000)
    assert JournalConfig(partitions=1000, max_bytes=8 << 30).segment_size == (7 << 30) // 1001


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Store.open(tmp_path / "deep" / "journal", SCHEMA, CONFIG) as store:
            store.append([(0, rows(1))])
            store.stage("q", 0, 0, 1).append(rows(1))
            deliver(store, "q", 1, (0, rows(2)))
            found = {
                path.relative_to(store.directory): path.stat().st_mode & 0o777 for path in store.directory.rglob("*")
            }
            assert {path: mode for path, mode in found.items() if mode & 0o077} == {}
            assert store.directory.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
