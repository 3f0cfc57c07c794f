"""Rows that were acked and are gone: known when the journal is opened, refused, and passed over if that is accepted."""

from __future__ import annotations

import logging
import math
import random
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import every

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

import attrs  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    Appended,
    JournalConfig,
    JournalDamaged,
    JournalError,
    OffsetGone,
    Store,
)
from levada.actors.journal.ends import Ends, PromisedEnds  # noqa: E402
from levada.actors.journal.ledger import Ledger  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])
SMALL = JournalConfig(segment_bytes=2048, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None)
ACCEPTING = attrs.evolve(SMALL, accept_loss=True)
COUNT = 120


def rows(*numbers: int) -> Any:
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers])], schema=SCHEMA)


def fill(store: Store, start: int = 0, stop: int = COUNT) -> None:
    for n in range(start, stop, 10):
        store.append([(0, rows(*range(n, n + 10)))])


def numbers(store: Store, start: int | None = None) -> list[int]:
    start = store.extent().first[0] if start is None else start
    return [n for _, batch in store.batches(0, start) for n in batch.column("n").to_pylist()]


def readable(store: Store) -> list[int]:
    """Read all rows that are left, passing over those that are lost."""
    found: list[int] = []
    at, end = store.extent().first[0], store.extent().end[0]
    while at < end:
        try:
            for block in store.read(0, at):
                found += block.batch().column("n").to_pylist()
                at = block.end
        except OffsetGone as gone:
            at = gone.first
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of some segments, closed, whose last one has three blocks."""
    directory = tmp_path_factory.mktemp("original") / "journal"
    with Store.open(directory, SCHEMA, SMALL) as store:
        fill(store)
    assert len(blocks_of(segments(directory)[-1])) == 3
    return directory


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "journal"))


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "partition-0000").glob("*.segment"))


def blocks_of(path: Path) -> list[int]:
    """Where the blocks of a segment begin."""
    octets, found, at = path.read_bytes(), list[int](), -1
    while (at := octets.find(b"LvB1", at + 1)) >= 0:
        found.append(at)
    return found


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }


# ---------------------------------------------------------------- segments

CUTS = [
    "to nothing",
    "in the header",
    "at the first block",
    "in a block's header",
    "in a block",
    "before the last octet",
]


def cut_at(path: Path, place: str) -> int:
    first, second, third = blocks_of(path)
    return {
        "to nothing": 0,
        "in the header": 70,
        "at the first block": first,
        "in a block's header": second + 20,
        "in a block": third + 100,
        "before the last octet": path.stat().st_size - 1,
    }[place]


def cut(place: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        last = segments(directory)[-1]
        last.write_bytes(last.read_bytes()[: cut_at(last, place)])

    return damage


def flip(segment: int, block: int, octet: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = segments(directory)[segment]
        at = blocks_of(path)[block] + octet if block >= 0 else octet
        octets = bytearray(path.read_bytes())
        octets[at] ^= 0x10
        path.write_bytes(octets)

    return damage


def zero(block: int) -> Callable[[Path], None]:
    """From a block of the last segment on."""

    def damage(directory: Path) -> None:
        path = segments(directory)[-1]
        octets, at = path.read_bytes(), blocks_of(path)[block] if block >= 0 else 0
        path.write_bytes(octets[:at] + bytes(len(octets) - at))

    return damage


def remove(*which: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for path in [segments(directory)[number] for number in which]:
            path.unlink()

    return damage


def remove_all(directory: Path) -> None:
    shutil.rmtree(directory / "partition-0000")


def cut_sealed(directory: Path) -> None:
    path = segments(directory)[1]
    path.write_bytes(path.read_bytes()[: blocks_of(path)[-1]])


def lengthen_sealed(directory: Path) -> None:
    with segments(directory)[1].open("ab") as file:
        file.write(bytes(64))


FIELDS = {
    "magic": 0,
    "length": 4,
    "checksum": 8,
    "rows": 12,
    "offset": 16,
    "transaction": 24,
    "time": 32,
    "synced": 40,
    "body": 60,
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"the last segment is cut {place}": cut(place) for place in CUTS},
    **{f"a flip in the last block, {name}": flip(-1, 2, octet) for name, octet in FIELDS.items()},
    **{f"a flip in the block before, {name}": flip(-1, 1, octet) for name, octet in FIELDS.items()},
    **{f"a flip in the header at {octet}": flip(-1, -1, octet) for octet in (0, 8, 12, 16, 24, 40, 56, 60, 68, 76, 90)},
    **{f"zeros from block {block} on": zero(block) for block in (-1, 0, 1, 2)},
    "the last segment is gone": remove(-1),
    "the two last ones are gone": remove(-1, -2),
    "one in the middle is gone": remove(1),
    "the oldest is gone": remove(0),
    "all are gone": remove_all,
    "one in the middle is cut": cut_sealed,
    "one in the middle is longer": lengthen_sealed,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_were_acked_and_are_gone_are_refused_or_accepted(
    journal: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused, and nothing is touched. Accepted, the rest is read, and no offset is used twice; later starts need not accept it again."""
    DAMAGES[damage](journal)
    before = content(journal)
    with pytest.raises(JournalError) as caught:
        Store.open(journal, SCHEMA, SMALL)
    assert content(journal) == before
    if not isinstance(caught.value, JournalDamaged):  # the octet of the version
        assert "use the levada that wrote it" in str(caught.value)
        return
    assert "JournalConfig.accept_loss" in str(caught.value)
    assert caplog.messages == []
    with Store.open(journal, SCHEMA, ACCEPTING) as store:
        assert any("rows are lost, which is accepted" in text for text in caplog.messages)
        left = readable(store)
        assert set(left) < set(range(COUNT)) or damage == "one in the middle is longer"
        assert left == sorted(left)
        assert store.statistics().rows_lost == COUNT - len(left)
        assert store.extent().end == {0: COUNT}
        assert store.append([(0, rows(COUNT))]) == [Appended(0, COUNT, 1)]
    with Store.open(journal, SCHEMA, SMALL) as store:
        assert readable(store) == [*left, COUNT]
        assert store.statistics().rows_lost == 0


def test_a_longer_file_loses_no_row_of_an_append_that_goes_over_its_end(tmp_path: Path) -> None:
    """The last block of the append is in the next segment, which is intact."""
    with Store.open(tmp_path, SCHEMA, attrs.evolve(SMALL, block_bytes=512)) as store:
        store.append([(0, rows(*range(100)))])
    first, _ = segments(tmp_path)
    with first.open("ab") as file:
        file.write(bytes(64))
    with pytest.raises(JournalDamaged, match="has changed: restore it"):
        Store.open(tmp_path, SCHEMA, SMALL)
    with Store.open(tmp_path, SCHEMA, ACCEPTING) as store:
        assert numbers(store) == list(range(100))
        assert store.statistics().rows_lost == 0
    ledger = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    assert ledger.losses(0) == {}
    ledger.close()


def test_a_row_that_was_lost_is_not_said_to_have_been_deleted(journal: Path) -> None:
    last = int(segments(journal)[-1].stem)
    remove(-1)(journal)
    with Store.open(journal, SCHEMA, ACCEPTING) as store:
        with pytest.raises(OffsetGone, match=f"rows {last} to {COUNT - 1} were lost, which was accepted") as gone:
            list(store.read(0, last))
        assert gone.value.first == COUNT
        with pytest.raises(OffsetGone):
            store.offset_within(0, last, COUNT, max_bytes=1)
        # What is there before is given first, in one piece, wherever it is asked to end.
        assert [block.end for block in store.read(0, last - 1, COUNT)] == [last]
        assert store.offset_within(0, last - 1, COUNT, max_bytes=1 << 20) == last


def test_the_columns_are_those_of_what_is_left(journal: Path) -> None:
    """Opened by somebody who leaves them to the journal."""
    remove(-1)(journal)
    with Store.open(journal, None, ACCEPTING) as store:
        assert store.schema == SCHEMA
        assert store.append([(0, rows(1))]) == [Appended(0, COUNT, 1)]


@pytest.mark.parametrize(
    ("damage", "place"),
    [("a flip in the block before, body", -1), ("one in the middle is cut", 1), ("one in the middle is longer", 1)],
)
def test_damaged_files_are_kept_beside(journal: Path, damage: str, place: int) -> None:
    DAMAGES[damage](journal)
    path = segments(journal)[place]
    before = path.read_bytes()
    Store.open(journal, SCHEMA, ACCEPTING).close()
    assert path.with_name(path.name + ".damaged").read_bytes() == before


def test_a_damaged_file_before_one_without_rows_is_kept_beside(journal: Path) -> None:
    grown = SCHEMA.append(pa.field("more", pa.string()))
    Store.open(journal, grown, SMALL).close()  # begins a segment with these columns
    flip(-2, 2, 60)(journal)
    path = segments(journal)[-2]
    before = path.read_bytes()
    for config in (ACCEPTING, SMALL):
        with Store.open(journal, grown, config) as store:
            assert readable(store) == list(range(COUNT - 10))
            assert store.extent().end == {0: COUNT}
            assert store.statistics().rows_lost == (10 if config is ACCEPTING else 0)
    assert path.with_name(path.name + ".damaged").read_bytes() == before


def test_rows_that_only_a_group_knows_of_are_counted_if_nothing_is_left(journal: Path) -> None:
    """The segments are gone, and the record of ends with them: the ledger knows how far a group had read."""
    with Store.open(journal, SCHEMA, SMALL) as store:
        store.declare_group("readers")
        store.commit_group("readers", {0: 50})
    remove_all(journal)
    (journal / "ends").unlink()
    with Store.open(journal, SCHEMA, ACCEPTING) as store:
        assert store.statistics().rows_lost == 50
        assert store.append([(0, rows(50))]) == [Appended(0, 50, 1)]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(67, marks=[pytest.mark.ci, pytest.mark.timeout(300)]),
        pytest.param(1, marks=[pytest.mark.release, pytest.mark.timeout(1800)]),
    ],
)
def test_no_octet_of_any_segment_takes_rows_in_silence(original: Path, tmp_path: Path, step: int) -> None:
    """Flipped or cut there, the journal is refused, or its reading is, or all rows are there."""
    journal = Path(shutil.copytree(original, tmp_path / "journal"))
    for number, path in enumerate(segments(original)):
        octets = path.read_bytes()
        damaged = [octets[:at] + bytes([octets[at] ^ 1]) + octets[at + 1 :] for at in range(0, len(octets), step)]
        damaged += [octets[:at] for at in range(0, len(octets), 3 * step)]
        for each in damaged:
            segments(journal)[number].write_bytes(each)
            try:
                with Store.open(journal, SCHEMA, SMALL) as store:
                    assert numbers(store) == list(range(COUNT)), (path, each)
            except JournalError:
                pass
            shutil.rmtree(journal)
            shutil.copytree(original, journal)


def test_the_record_of_ends_is_at_most_one_group_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process leaves it that is killed right behind an answer."""
    monkeypatch.setattr("levada.actors.journal.ends.SYNC_EVERY", math.inf)  # a slow machine would sync in between
    with Store.open(tmp_path / "journal", SCHEMA, SMALL) as store:
        for n in range(0, 60, 10):
            fill(store, n, n + 10)
            assert Ends.read(REAL.files, tmp_path / "journal" / "ends").end == [n + 10]
        assert store.unsynced
        store.sync_ends()
        assert not store.unsynced


def test_without_syncs_nothing_is_promised_that_was_not_synced(tmp_path: Path) -> None:
    """Else a power failure that takes what nobody was promised would close the journal."""
    config = JournalConfig(sync="never")
    with Store.open(tmp_path / "journal", SCHEMA, config) as store:
        fill(store)
        assert Ends.read(REAL.files, tmp_path / "journal" / "ends").end == [0]
        store.declare_group("all", "end")
        assert Ends.read(REAL.files, tmp_path / "journal" / "ends").end == [COUNT]


# ---------------------------------------------------------------- the record of ends


def test_a_record_of_ends_of_another_journal_is_refused(journal: Path, tmp_path: Path) -> None:
    Store.open(tmp_path / "other", SCHEMA, SMALL).close()
    shutil.copy(tmp_path / "other" / "ends", journal / "ends")
    with pytest.raises(JournalDamaged, match="is of another journal"):
        Store.open(journal, SCHEMA, SMALL)


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "zeroed", "both flipped"])
def test_a_record_of_ends_that_is_damaged_is_refused_or_accepted(journal: Path, damage: str) -> None:
    path = journal / "ends"
    octets = bytearray(path.read_bytes())
    if damage == "both flipped":
        octets[50] ^= 1
        octets[4096 + 50] ^= 1
    left = {"cut": bytes(octets[:30]), "zeroed": bytes(len(octets)), "both flipped": bytes(octets)}
    path.write_bytes(left.get(damage, b""))
    if damage == "gone":
        path.unlink()
    with pytest.raises(JournalDamaged, match=r"the record of how far the partitions reach is .*accept_loss"):
        Store.open(journal, SCHEMA, SMALL)
    with Store.open(journal, SCHEMA, ACCEPTING) as store:
        assert numbers(store) == list(range(COUNT))
    Store.open(journal, SCHEMA, SMALL).close()


def test_one_damaged_copy_of_the_record_of_ends_is_named(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A journal that was closed says the same in both."""
    octets = (journal / "ends").read_bytes()
    for at in range(0, 68, 3):
        for copy in (0, 4096):
            damaged = bytearray(octets)
            damaged[copy + at] ^= 1
            (journal / "ends").write_bytes(damaged)
            caplog.clear()
            assert Ends.read(REAL.files, journal / "ends").end == [COUNT]
            assert len(caplog.messages) == 1


def test_a_later_record_of_ends_is_refused_by_name(tmp_path: Path) -> None:
    Ends.create(REAL, tmp_path / "ends", PromisedEnds(bytes(16), [0], [1], 0)).close()
    octets = bytearray((tmp_path / "ends").read_bytes())
    octets[8] = octets[4096 + 8] = 2
    (tmp_path / "ends").write_bytes(octets)
    with pytest.raises(JournalError, match="format version 2, this program reads 1: use the levada that wrote it"):
        Ends.read(REAL.files, tmp_path / "ends")


# ---------------------------------------------------------------- the ledger


# ---------------------------------------------------------------- staged rows


@pytest.mark.ci
def test_damaged_staged_rows_are_refused_and_never_other_rows(tmp_path: Path) -> None:
    """Cut, flipped or removed at random places: a delivery has all rows that were staged, or it has fewer, or an error names the file."""
    with Store.open(tmp_path / "good", SCHEMA, SMALL) as store:
        stage = store.stage("q", 1, 0, 0)
        for n in range(0, 60, 10):
            stage.append(rows(*range(n, n + 10)))
    lot = random.Random(0)
    whole = 0
    for trial in range(0, 90, every(2)):
        copy = Path(shutil.copytree(tmp_path / "good", tmp_path / f"copy{trial}"))
        [path] = (copy / "staging").glob("*.segment")
        octets = bytearray(path.read_bytes())
        if trial % 3 == 0:
            path.write_bytes(octets[: lot.randrange(len(octets))])
        elif trial % 30 == 2:
            path.unlink()
        else:
            octets[lot.randrange(len(octets))] ^= 1 << lot.randrange(8)
            path.write_bytes(octets)
        with Store.open(copy, SCHEMA, SMALL) as store:
            found = store.staged("q", 1).get((0, 0))
            parts = [] if found is None else [(0, message) for message in found.messages()]
            store.deliver("q", 1, parts)
            left = numbers(store)
            assert left == list(range(60))[: len(left)]
            assert len(left) == (0 if found is None else found.rows)
            whole += len(left) == 60
        shutil.rmtree(copy)
    assert whole < 30


def facts(directory: Path) -> object:
    """Everything that a ledger says."""
    with sqlite3.connect(directory / "ledger.sqlite") as connection:
        tables = ("facts", "partitions", "groups", "batches", "openings", "losses", "checks")
        found = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    connection.close()
    return found


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two journals with groups and batches: one closed, and one as a process leaves it that is killed."""
    folder = tmp_path_factory.mktemp("ledgers")
    with Store.open(folder / "closed", SCHEMA, SMALL) as store:
        fill(store, 0, 20)
        store.declare_group("readers")
        for batch in range(3):
            store.commit_group("readers", {0: batch})
            store.deliver("query", batch, ((0, message) for message in store.pack([rows(batch)])))
        shutil.copytree(folder / "closed", folder / "killed")
    return folder


def ledger_says(directory: Path) -> object:
    """What the ledger says, or None if it is refused."""
    try:
        Store.open(directory, SCHEMA, SMALL).close()
    except JournalError:
        return None
    found: Any = facts(directory)
    del found["openings"], found["checks"]
    found["facts"] = [fact for fact in found["facts"] if fact[0] != "commits"]
    return found


def damaged(directory: Path, name: str, damage: Callable[[bytearray], None], target: Path) -> Path:
    shutil.copytree(directory, target)
    octets = bytearray((directory / name).read_bytes())
    damage(octets)
    (target / name).write_bytes(octets)
    return target


def flipped(at: int) -> Callable[[bytearray], None]:
    def damage(octets: bytearray) -> None:
        octets[at] ^= 0x04

    return damage


def positions(octets: bytes, step: int) -> Iterator[int]:
    """Octets that say something: those around others that are not zero, each so many."""
    told = [at for at in range(len(octets)) if any(octets[max(0, at - 2) : at + 3])]
    yield from told[::step]


@pytest.mark.parametrize(
    ("kind", "name", "step"),
    [
        ("closed", "ledger.sqlite", 499),
        ("killed", "ledger.sqlite-wal", 997),
        pytest.param("closed", "ledger.sqlite", 29, marks=pytest.mark.ci),
        pytest.param("killed", "ledger.sqlite-wal", 97, marks=pytest.mark.ci),
        pytest.param("closed", "ledger.sqlite", 1, marks=[pytest.mark.release, pytest.mark.timeout(1800)]),
        pytest.param("killed", "ledger.sqlite-wal", 7, marks=[pytest.mark.release, pytest.mark.timeout(1800)]),
    ],
)
def test_a_flipped_octet_of_the_ledger_changes_nothing_in_silence(
    ledgers: Path, tmp_path: Path, kind: str, name: str, step: int
) -> None:
    said = ledger_says(Path(shutil.copytree(ledgers / kind, tmp_path / "whole")))
    assert said is not None
    refused = 0
    for at in positions((ledgers / kind / name).read_bytes(), step):
        target = damaged(ledgers / kind, name, flipped(at), tmp_path / "damaged")
        found = ledger_says(target)
        assert found in (None, said), at
        refused += found is None
        shutil.rmtree(target)
    assert refused > 1


@pytest.mark.parametrize("size", [0, 1, 4000, 4096, 0.5, 0.9, -1])
@pytest.mark.parametrize(("kind", "name"), [("closed", "ledger.sqlite"), ("killed", "ledger.sqlite-wal")])
def test_a_ledger_that_is_cut_is_refused(ledgers: Path, tmp_path: Path, kind: str, name: str, size: float) -> None:
    """SQLite takes a log that ends early for one that was never longer, and an empty file for a new database."""

    def cut(octets: bytearray) -> None:
        del octets[int(size * len(octets)) if 0 < size < 1 else int(size) :]

    target = damaged(ledgers / kind, name, cut, tmp_path / "damaged")
    before = content(target)
    with pytest.raises(JournalDamaged):
        Store.open(target, SCHEMA, SMALL)
    assert content(target) == before


def test_a_ledger_without_its_log_is_refused(ledgers: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(ledgers / "killed", tmp_path / "damaged"))
    (target / "ledger.sqlite-wal").unlink()
    with pytest.raises(JournalDamaged):
        Store.open(target, SCHEMA, SMALL)


@pytest.mark.parametrize(
    "change",
    [
        'UPDATE groups SET "offset" = 1',
        "DELETE FROM groups",
        "DELETE FROM batches WHERE batch = 1",
        "UPDATE batches SET batch = 7 WHERE batch = 2",
        "UPDATE facts SET value = 9 WHERE name = 'transaction'",
        "UPDATE openings SET ends = '[3]'",
        "DELETE FROM checks WHERE name = 'groups'",
        "DROP TABLE losses",
        "DROP TRIGGER check_insert_groups",
    ],
)
def test_a_ledger_that_somebody_else_changed_is_refused(ledgers: Path, tmp_path: Path, change: str) -> None:
    """SQLite's own structure is whole."""
    target = Path(shutil.copytree(ledgers / "closed", tmp_path / "damaged"))
    with sqlite3.connect(target / "ledger.sqlite") as connection:
        kept = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        if not change.startswith("DROP"):
            for name, _ in kept:
                connection.execute(f"DROP TRIGGER {name}")
        connection.execute(change)
        if not change.startswith("DROP"):
            for _, statement in kept:
                connection.execute(statement)
    connection.close()
    with pytest.raises(JournalDamaged, match="ledger"):
        Store.open(target, SCHEMA, SMALL)


def test_a_later_ledger_is_refused_by_name(tmp_path: Path) -> None:
    Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.create_function("row_sum", -1, lambda *_: 0)
        connection.execute("UPDATE facts SET value = 4 WHERE name = 'format'")
    connection.close()
    with pytest.raises(JournalError, match="format version 4, this program reads 1 to 3: use the levada that wrote it"):
        Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)


# ---------------------------------------------------------------- journals of the first version


@pytest.fixture
def first_version(tmp_path: Path) -> Path:
    """Two journals as version 0.1.0 left them; ``data/README.md`` says what is in them."""
    with tarfile.open(Path(__file__).parent / "data" / "journals-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_a_journal_of_the_first_version_is_read_and_written(first_version: Path, kind: str) -> None:
    directory, config = first_version / kind, attrs.evolve(SMALL, partitions=2)
    for more in range(2):
        with Store.open(directory, None, config) as store:
            assert (store.extent().first, store.extent().end) == ({0: 40, 1: 0}, {0: 106 + more, 1: 16})
            assert numbers(store)[:106] == [*range(40, 100), 5000, 5001, 5002, 5001, 5002, 5003, *[7] * more]
            assert store.groups() == {"readers": {0: 60, 1: 4 + more}}
            delivered = [store.delivered("query", batch) for batch in range(3)]
            assert [each and dict(each.ranges) for each in delivered] == [
                {0: (100, 103), 1: (10, 13)},
                {0: (103, 106), 1: (13, 16)},
                None,
            ]
            assert store.append([(0, rows(7))]) == [Appended(0, 106 + more, 1)]
            store.commit_group("readers", {1: 5 + more})
    remove(-1)(directory)
    with pytest.raises(JournalDamaged, match="rows up to 108 were promised"):
        Store.open(directory, None, config)


def test_what_was_torn_is_logged_with_its_size(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    with segments(journal)[-1].open("ab") as file:
        file.write(b"LvB1" + bytes(80))
    with caplog.at_level(logging.WARNING), Store.open(journal, SCHEMA, SMALL) as store:
        assert store.statistics().bytes_cut == 84
    assert any(
        "84 bytes were cut off, of a write or a delivery that was interrupted" in text for text in caplog.messages
    )
