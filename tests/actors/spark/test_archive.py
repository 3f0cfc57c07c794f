"""Spark reads the log of durable actors and its archive as one table, also while rows go from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.actors.durable.accounts import EVENTS, Deposit  # noqa: E402
from tests.actors.durable.test_trimming import accounts_in  # noqa: E402

from levada.actors.durable import Keep, Shards, log_columns  # noqa: E402
from levada.actors.journal import Extent, GetExtent, JournalError, OffsetGone, TrimRows  # noqa: E402
from levada.actors.journal.archive import Archive  # noqa: E402
from levada.actors.spark import bridge_reading  # noqa: E402
from levada.actors.spark.bridge_reading import JournalAway, blocks_of  # noqa: E402
from levada.actors.spark.protocol import BlockHead, MeasureRows, ReadBlocks  # noqa: E402
from levada.framework.files import Files  # noqa: E402

from .conftest import Actors, run_to_the_end  # noqa: E402
from .test_entities import WHERE, ask, events, log_of, open_accounts, table  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.loopback


def trim(actors: Actors, accounts: Shards[Any], place: Path | str) -> int:
    journal: Any = accounts.journal
    asked = [TrimRows(number, 1e12, archive=str(place)) for number in range(2)]
    return sum(actors.do(lambda m=m: journal.ask(m, timeout=250)).rows for m in asked)


def deposit(actors: Actors, accounts: Shards[Any], times: int) -> None:
    for name in ("anna", "bert", "cleo"):
        for _ in range(times):
            ask(actors, accounts, name, Deposit(1))


@pytest.mark.parametrize("keeper", WHERE)
def test_a_log_and_its_archive_are_one_table(actors: Actors, tmp_path: Path, *, keeper: bool) -> None:
    place = tmp_path / "archive"
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=3, keeper=keeper, keep=Keep(1e9, place))
    deposit(actors, accounts, 7)
    before = events(actors)
    assert trim(actors, accounts, place) > 0
    log = log_of(actors)
    found = log.describe()
    assert found.first == {0: 0, 1: 0}
    assert events(actors) == before
    deposit(actors, accounts, 7)
    before = events(actors)
    assert trim(actors, accounts, place) > 0
    assert log.describe().first == {0: 0, 1: 0}
    assert events(actors) == before
    assert [row[1] for row in before if row[0] == "bert"] == [*range(1, 15)]
    [number] = [number for number, end in found.end.items() if end == max(found.end.values())]
    end = log.describe().end[number]
    assert log.ask(MeasureRows(number, 0, end, 1)) == found.end[number]  # the first file
    assert log.ask(MeasureRows(number, found.end[number], end, 1)) > found.end[number]
    assert actors.do(lambda: accounts.erase("bert")) > 0
    assert events(actors) == [row for row in before if row[0] != "bert"]


def test_rows_that_are_in_neither_are_named(actors: Actors, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=3, keep=Keep(1e9, place))
    deposit(actors, accounts, 7)
    assert trim(actors, accounts, "") > 0
    log = log_of(actors)
    found = log.describe()
    journal: Any = accounts.journal
    assert found.first == actors.do(lambda: journal.ask(GetExtent())).whole
    with pytest.raises(JournalError, match="neither in the log nor in its archive"):
        list(log.read(0, 0, found.end[0], epoch=found.epoch, schema=found.columns()))


async def offsets_of(blocks: AsyncIterator[Any]) -> AsyncIterator[list[int]]:
    """The offsets of the rows of each block."""
    async for payload in blocks:
        head = BlockHead.decode(payload.metadata)
        yield [*range(head.first, head.first + head.rows)] if payload.data else []


@pytest.mark.parametrize("away", [False, True])
async def test_rows_that_go_while_they_are_read_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, away: bool
) -> None:
    monkeypatch.setattr(bridge_reading, "READ_BYTES", 1)  # a block at a time
    place = str(tmp_path / "archive")
    async with accounts_in(tmp_path / "log", snapshot_every=5) as accounts:
        for _ in range(40):
            await accounts["anna"].ask(Deposit(1))
        assert accounts.journal is not None
        journal: Any = JournalAway(accounts.journal) if away else accounts.journal
        extent: Extent = await journal.ask(GetExtent(), timeout=None)
        question = ReadBlocks(0, 0, extent.end[0], extent.epoch)
        archive = Archive.at(place, Files())
        for wanted in (3, 20, 45):
            found: list[int] = []
            async with aclosing(blocks_of("log", journal, question, archive)) as blocks:
                async for offsets in offsets_of(blocks):
                    if found and found[-1] < wanted <= found[-1] + len(offsets):
                        for _ in range(5):
                            await accounts["anna"].ask(Deposit(1))
                        done = await accounts.journal.ask(TrimRows(0, 1e12, 1, archive=place))
                        assert done.rows > 0
                    found += offsets
            own = {0} if wanted == 3 and found[0] == 0 else set()  # the row of the owner is not archived
            assert found == sorted(own | {*range(1, extent.end[0])})
        with pytest.raises(OffsetGone):
            _ = [block async for block in blocks_of("log", journal, question)]
        assert log_columns(EVENTS).names == archive_columns(archive)


def archive_columns(archive: Archive) -> list[str]:
    [(_, batch), *_] = archive.rows(0, 1, 2, log_columns(EVENTS))
    names: list[str] = batch.schema.names
    return names


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_spark_counts_each_event_once(spark: SparkSession, actors: Actors, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    accounts = open_accounts(actors, tmp_path / "log", snapshot_every=3, keep=Keep(1e9, place))
    deposit(actors, accounts, 7)
    assert trim(actors, accounts, place) > 0
    deposit(actors, accounts, 7)

    def counted(rows: Any) -> list[tuple[str, int, int]]:
        found = rows.groupBy("entity").agg({"sequence": "max", "amount": "sum"}).orderBy("entity").collect()
        return [(row["entity"], row["max(sequence)"], row["sum(amount)"]) for row in found]

    wanted = [(name, 14, 14) for name in ("anna", "bert", "cleo")]
    assert counted(table(spark, actors)) == wanted
    assert trim(actors, accounts, place) > 0
    assert counted(table(spark, actors)) == wanted
    stream = spark.readStream.format("mailbox").options(address=actors.bridge.address, mailbox="accounts").load()
    writer = stream.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).format("parquet")
    run_to_the_end(writer, str(tmp_path / "out"))
    assert counted(spark.read.parquet(str(tmp_path / "out"))) == wanted
