"""A batch that comes again: the same rows, other rows, rows that cannot be compared, and journals that are older copies."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import (  # noqa: E402
    Append,
    BatchReused,
    CommitGroup,
    DeclareGroup,
    Deliver,
    Delivered,
    EraseEntity,
    GetExtent,
    Journal,
    JournalBehind,
    JournalConfig,
    JournalError,
    Keyed,
    StageRows,
    Store,
)
from levada.actors.journal import ledger as ledger_module  # noqa: E402
from levada.actors.journal.delivering import deliver as deliver_staged  # noqa: E402
from levada.actors.journal.delivering import stage_rows  # noqa: E402
from levada.framework import ActorSystem, Ref, bounded  # noqa: E402

SCHEMA = pa.schema(
    [
        ("host", pa.string()),
        ("number", pa.int64()),
        ("share", pa.float64()),
        ("at", pa.timestamp("ns")),
        ("tags", pa.list_(pa.string())),
    ]
)


def rows(*numbers: int, host: str = "north") -> Any:
    """Rows with every kind of value, nulls among them."""
    columns = {
        "host": [host for _ in numbers],
        "number": [n if n % 3 else None for n in numbers],
        "share": [n / 7 for n in numbers],
        "at": pa.array([1_000_000_001 * n for n in numbers], pa.timestamp("ns")),
        "tags": [[str(n), None][: n % 3] for n in numbers],
    }
    return pa.record_batch(columns, schema=SCHEMA)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0, shutdown_timeout=5.0) as system:
        yield system


def spawn(system: ActorSystem, directory: Path, schema: Any = SCHEMA, **settings: Any) -> Ref[Any]:
    config = JournalConfig(partitions=2, **settings)
    return system.spawn(partial(Journal, directory, schema, config=config), mailbox=bounded(64))


async def deliver(journal: Ref[Any], batch: int, parts: Sequence[Sequence[Any]], **more: Any) -> Delivered:
    """Stage batches of rows for each part, under an attempt of its own, and deliver them."""
    attempt = deliver.attempts = getattr(deliver, "attempts", 0) + 1  # type: ignore[attr-defined]
    for part, batches in enumerate(parts):
        for each in batches:
            await journal.ask(StageRows("q", batch, part, attempt, each))
    winners = {part: attempt for part, batches in enumerate(parts) if batches}
    done: Delivered = await journal.ask(Deliver("q", batch, winners, **more))
    return done


RANGES = {0: (0, 4), 1: (0, 2)}


@pytest.mark.parametrize(
    "again",
    [
        pytest.param([[rows(0, 1, 2, 3)], [rows(4, 5)]], id="the same"),
        pytest.param([[rows(0), rows(1, 2), rows(3)], [rows(4, 5)]], id="cut into other blocks"),
        pytest.param([[rows(5, 3, 1)], [], [rows(4, 2, 0)]], id="in other parts, in another order"),
    ],
)
async def test_a_batch_with_the_same_rows_is_the_same_batch(
    system: ActorSystem, tmp_path: Path, again: list[list[Any]]
) -> None:
    journal = spawn(system, tmp_path)
    assert await deliver(journal, 0, [[rows(0, 1, 2, 3)], [rows(4, 5)]]) == Delivered(False, RANGES)
    assert await deliver(journal, 0, again) == Delivered(True, RANGES)
    assert (await journal.ask(GetExtent())).end == {0: 4, 1: 2}
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("again", "text"),
    [
        ([[rows(0, 1, 2, 3)], [rows(4, 5, 6)]], "was delivered with 6 rows before, and has 7 rows now"),
        ([[rows(0, 1, 2, 3)]], "was delivered with 6 rows before, and has 4 rows now"),
        ([], "was delivered with 6 rows before, and has 0 rows now"),
        ([[rows(0, 1, 2, 3)], [rows(4, 6)]], "was delivered with 6 rows before, and has 6 other rows now"),
        ([[rows(0, 1, 2, 2)], [rows(4, 5)]], "was delivered with 6 rows before, and has 6 other rows now"),
        (
            [[rows(0, 1, 2, 3)], [rows(4), rows(5, host="south")]],
            "was delivered with 6 rows before, and has 6 other rows now",
        ),
    ],
)
async def test_a_batch_with_other_rows_is_refused_and_nothing_is_written(
    system: ActorSystem, tmp_path: Path, again: list[list[Any]], text: str
) -> None:
    """Its number was planned again by a checkpoint that went back, or its id belongs to another job."""
    journal = spawn(system, tmp_path)
    await deliver(journal, 3, [[rows(0, 1, 2, 3)], [rows(4, 5)]])
    with pytest.raises(BatchReused, match=f"batch 3 of q {text}") as caught:
        await deliver(journal, 3, again)
    assert (caught.value.query, caught.value.batch) == ("q", 3)
    assert (await journal.ask(GetExtent())).end == {0: 4, 1: 2}
    assert await deliver(journal, 4, [[rows(6)]]) == Delivered(False, {0: (4, 5)})


async def test_other_rows_may_count_as_delivered(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = spawn(system, tmp_path)
    await deliver(journal, 0, [[rows(0, 1)]])
    assert await deliver(journal, 0, [[rows(0, 1, 2)]], accept_loss=True) == Delivered(True, {0: (0, 2)})
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"this was accepted: {tmp_path}: batch 0 of q was delivered with 2 rows before, and has 3 rows now"
    ]
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_question_that_is_repeated_needs_no_rows(system: ActorSystem, tmp_path: Path) -> None:
    """The answer was lost. The stages are gone since it was given; those of another attempt would have to be there."""
    journal = spawn(system, tmp_path)
    await journal.ask(StageRows("q", 0, 0, 7, rows(0, 1)))
    assert not (await journal.ask(Deliver("q", 0, {0: 7}, {0: 2}))).already
    assert (await journal.ask(Deliver("q", 0, {0: 7}, {0: 2}))).already
    with pytest.raises(JournalError, match="batch 0 of q: the 2 rows of part 0 are not staged, there are 0"):
        await journal.ask(Deliver("q", 0, {0: 8}, {0: 2}))
    await journal.ask(StageRows("q", 0, 0, 8, rows(0, 1)))
    for _ in range(2):
        assert (await journal.ask(Deliver("q", 0, {0: 8}, {0: 2}))).already
    await journal.ask(StageRows("q", 0, 0, 7, rows(0, 9)))  # a number that is used again is no repetition
    with pytest.raises(BatchReused):
        await journal.ask(Deliver("q", 0, {0: 7}, {0: 2}))


CONFIG = JournalConfig(partitions=2)
QUESTION = Deliver("q", 0, {0: 7, 1: 8, 2: 9}, {0: 1, 1: 1, 2: 1})


def stage_all(store: Store, question: Deliver = QUESTION) -> None:
    """Stage a row for each part."""
    for part, attempt in question.winners.items():
        stage_rows(store, StageRows("q", 0, part, attempt, []), rows(part))


def numbers(store: Store) -> list[list[Any]]:
    """All rows, by partition."""
    return [
        [n for _, batch in store.batches(number, 0) for n in batch.column("share").to_pylist()] for number in (0, 1)
    ]


def test_a_batch_some_of_whose_stages_a_power_failure_took_is_found_when_it_is_staged_again(tmp_path: Path) -> None:
    """What is left may be of a batch that was planned again, with other rows."""
    again = attrs.evolve(QUESTION, winners={0: 17, 1: 18, 2: 19})
    with Store.open(tmp_path, SCHEMA, CONFIG) as store:
        stage_all(store)
        assert not deliver_staged(store, QUESTION).already
        stage_rows(store, StageRows("q", 0, 0, 7, []), rows(0))
        with pytest.raises(JournalError, match="the 1 rows of part 1 are not staged, there are 0"):
            deliver_staged(store, QUESTION)
        stage_all(store, again)
        assert deliver_staged(store, again).already
        assert numbers(store) == [[0 / 7, 2 / 7], [1 / 7]]


async def test_rows_of_a_second_attempt_outlive_the_journal(tmp_path: Path) -> None:
    """Killed before it compared them: no task stages them again."""
    async with ActorSystem("first", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path)
        await deliver(journal, 0, [[rows(0, 1)]])
        await journal.ask(StageRows("q", 0, 0, 99, rows(0, 1)))
    async with ActorSystem("second", shutdown_timeout=5.0) as system:
        assert (await spawn(system, tmp_path).ask(Deliver("q", 0, {0: 99}))).already


async def test_rows_that_retention_deleted_are_compared_as_they_were_staged(
    system: ActorSystem, tmp_path: Path
) -> None:
    journal = spawn(system, tmp_path, segment_bytes=2048, block_bytes=1024, retain_bytes=None)
    numbers = [[rows(*range(9))], [rows(*range(10, 19))]]
    await deliver(journal, 0, numbers)
    await journal.ask(DeclareGroup("g"))
    for _ in range(9):
        await journal.ask(Append(rows(*range(9)), partition=0))
    end = (await journal.ask(GetExtent())).end
    await journal.ask(CommitGroup("g", end))
    assert (await journal.ask(GetExtent())).first[0] > 0
    assert (await deliver(journal, 0, numbers)).already
    with pytest.raises(BatchReused, match="which were not staged like this, and are not all there to be compared"):
        await deliver(journal, 0, [*reversed(numbers)])
    assert (await deliver(journal, 0, [*reversed(numbers)], accept_loss=True)).already


async def test_erased_rows_are_compared_as_they_were_staged(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path, keyed=Keyed(entity="host"))
    north, south = rows(0, 1), rows(2, 3, host="south")
    await deliver(journal, 0, [[north], [south]])
    for partition in range(2):
        await journal.ask(EraseEntity("south", partition=partition))
    assert (await deliver(journal, 0, [[north], [south]])).already
    with pytest.raises(BatchReused, match="are not all there to be compared"):
        await deliver(journal, 0, [[south], [north]])


async def test_columns_that_grew_meanwhile_do_not_make_other_rows(tmp_path: Path) -> None:
    async with ActorSystem("first", shutdown_timeout=5.0) as system:
        await deliver(spawn(system, tmp_path), 0, [[rows(0, 1)]])
    grown = SCHEMA.append(pa.field("more", pa.int64()))
    again = pa.RecordBatch.from_arrays([*rows(0, 1).columns, pa.nulls(2, pa.int64())], schema=grown)
    other = pa.RecordBatch.from_arrays([*rows(0, 1).columns, pa.array([1, 2])], schema=grown)
    async with ActorSystem("second", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path, grown)
        assert (await deliver(journal, 0, [[again]])).already
        with pytest.raises(BatchReused, match="2 other rows now"):
            await deliver(journal, 0, [[other]])


async def test_a_batch_that_is_too_old_to_be_compared_is_refused(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "KEPT", 3)
    journal = spawn(system, tmp_path)
    for batch in range(4):
        await deliver(journal, batch, [[rows(batch)]])
    with pytest.raises(
        BatchReused, match="batch 0 of q was delivered so long ago that its rows are not known any more"
    ):
        await deliver(journal, 0, [[rows(0)]])
    assert await deliver(journal, 0, [[rows(0)]], accept_loss=True) == Delivered(True, {})
    assert (await deliver(journal, 1, [[rows(1)]])).already


async def test_an_older_copy_misses_the_batch_before(tmp_path: Path) -> None:
    """As if the folder was restored while the query stood still: its next batch would hide that others are gone."""
    journals = tmp_path / "journal"
    async with ActorSystem("first", shutdown_timeout=5.0) as system:
        journal = spawn(system, journals)
        await deliver(journal, 0, [[rows(0)]])
        await deliver(journal, 1, [[rows(1)]], after=0)
    shutil.copytree(journals, tmp_path / "copy")
    async with ActorSystem("second", shutdown_timeout=5.0) as system:
        journal = spawn(system, journals)
        for batch in (2, 3):
            await deliver(journal, batch, [[rows(batch)]], after=batch - 1)
    async with ActorSystem("third", shutdown_timeout=5.0) as system:
        journal = spawn(system, tmp_path / "copy")
        with pytest.raises(
            JournalBehind,
            match="batch 4 of q comes after batch 3, and its batches 2 to 3 are not in this journal: it is an older copy, or another one",
        ) as caught:
            await deliver(journal, 4, [[rows(4)]], after=3)
        assert (caught.value.wanted, caught.value.kept) == (3, 1)
        assert (await journal.ask(GetExtent())).end == {0: 2, 1: 0}
        assert not (await deliver(journal, 4, [[rows(4)]], after=3, accept_loss=True)).already
        assert not (await deliver(journal, 5, [[rows(5)]], after=4)).already
        assert not (await deliver(journal, 9, [[rows(9)]])).already  # other queries may leave numbers out


async def test_another_journal_has_no_batch_of_the_query(system: ActorSystem, tmp_path: Path) -> None:
    journal = spawn(system, tmp_path)
    with pytest.raises(
        JournalBehind, match="comes after batch 6, and none of its batches is in this journal"
    ) as caught:
        await deliver(journal, 7, [[rows(7)]], after=6)
    assert (caught.value.wanted, caught.value.kept) == (6, -1)


async def test_batches_of_an_older_ledger_are_compared_by_their_rows(tmp_path: Path) -> None:
    """They have no digest. See data/README.md."""
    with tarfile.open(Path(__file__).parent / "data" / "journal-format-2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    directory = tmp_path / "format-2"
    config = JournalConfig(partitions=2, segment_bytes=8192, block_bytes=2048, retain_bytes=1 << 20)
    with Store.open(directory, None, config) as store:
        line = store.line("query", 1)
        assert line is not None
        assert (line.rows, line.digest, line.attempts) == (3, None, None)
        [(number, (first, end))] = line.ranges.items()
        [(_, batch)] = store.batches(number, first, end)
    async with ActorSystem("test", shutdown_timeout=5.0) as system:
        journal = system.spawn(partial(Journal, directory, None, config=config), mailbox=bounded(64))
        for each in (batch.slice(2), batch.slice(0, 2)):
            await journal.ask(StageRows("query", 1, 1, 5, each))
        with pytest.raises(JournalError, match="the rows of part 0 are not staged"):
            await journal.ask(Deliver("query", 1, {0: 5, 1: 5}))
        assert (await journal.ask(Deliver("query", 1, {1: 5}))).already
        await journal.ask(StageRows("query", 1, 0, 6, pa.concat_batches([batch.slice(0, 2), batch.slice(0, 1)])))
        with pytest.raises(BatchReused, match="3 other rows now"):
            await journal.ask(Deliver("query", 1, {0: 6}))


@pytest.mark.ci
def test_rows_with_nanoseconds_are_compared_without_pandas(tmp_path: Path) -> None:
    """Which the extra `journal` does not install, and without which pyarrow refuses to make objects of them."""
    script = """
import sys
class WithoutPandas:
    def find_spec(self, name, *_):
        if name == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, WithoutPandas())
import pyarrow as pa
from levada.actors.journal import Deliver, StageRows, Store
from levada.actors.journal.delivering import deliver, stage_rows
columns = [pa.array([1, 1_000_000_001], kind) for kind in (pa.timestamp("ns"), pa.duration("ns"), pa.time64("ns"))]
rows = pa.record_batch(columns, names=["at", "took", "time"])
with Store.open(sys.argv[1], rows.schema) as store:
    for cut in (2, 1):
        for start in range(0, 2, cut):
            stage_rows(store, StageRows("q", 0, 0, cut, []), rows.slice(start, cut))
        print(deliver(store, Deliver("q", 0, {0: cut})).already)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")
