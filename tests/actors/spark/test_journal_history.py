"""Offsets of a journal that is older than what was read from it: an older copy was put in its place, or rows were lost."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes  # noqa: E402
from pyspark.sql.types import StructType  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    GetGroups,
    GetSchema,
    JournalBehind,
    JournalConfig,
    JournalDamaged,
    OffsetGone,
    Reach,
    Store,
)
from levada.actors.journal.ledger import Ledger  # noqa: E402
from levada.actors.spark import Delivery  # noqa: E402
from levada.actors.spark.bridge import serve_bridge  # noqa: E402
from levada.actors.spark.source import Options, StreamSource  # noqa: E402
from levada.framework import ActorSystem, channel, message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

from .conftest import Actors, run_to_the_end  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])
WANTED = StructType().add("n", "long", nullable=False)


def rows(start: int, stop: int) -> Any:
    return pa.record_batch([pa.array(range(start, stop), pa.int64())], schema=SCHEMA)


# ---------------------------------------------------------------- the store


def opened(directory: Path, count: int = 0) -> str:
    """Open a journal, append so many rows; return the name of the opening."""
    with Store.open(directory, SCHEMA) as store:
        if count:
            store.append([(0, rows(0, count))])
        return store.extent().opening


def reach(directory: Path, opening: str | None) -> Reach:
    with Store.open(directory, SCHEMA) as store:
        return store.reach(opening)


def test_each_opening_has_a_name_and_offsets_stay_good_over_all_of_them(tmp_path: Path) -> None:
    names = [opened(tmp_path, 5) for _ in range(3)]
    assert len({*names}) == 3
    # Up to where the next one began, which is where it ended.
    assert [reach(tmp_path, name) for name in names] == [Reach(True, {0: end}) for end in (5, 10, 15)]
    assert reach(tmp_path, None) == Reach(True, {0: 0})


def test_an_older_copy_knows_nothing_of_later_openings(tmp_path: Path) -> None:
    first = opened(tmp_path / "a", 15)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    later = [opened(tmp_path / "a", 5), opened(tmp_path / "a", 5)]
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "copy", tmp_path / "a")
    mine = [opened(tmp_path / "a", 10), opened(tmp_path / "a", 10)]
    # Where the copy was opened first after the other one had been.
    assert [reach(tmp_path / "a", name) for name in later] == [Reach(False, {0: 15}), Reach(False, {0: 15})]
    # levada 0.2 wrote no time: where the copy was opened for as many times as the other one.
    older = [name.rpartition("-")[0] for name in later]
    assert [reach(tmp_path / "a", name) for name in older] == [Reach(False, {0: 15}), Reach(False, {0: 25})]
    assert [reach(tmp_path / "a", name) for name in mine] == [Reach(True, {0: 25}), Reach(True, {0: 35})]
    assert reach(tmp_path / "a", first) == Reach(True, {0: 15})


def test_a_copy_of_a_journal_that_was_open_knows_the_opening_and_where_it_was_taken(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a", SCHEMA) as store:
        store.append([(0, rows(0, 15))])
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        store.append([(0, rows(15, 20))])
        name = store.extent().opening
        assert store.reach(name) == Reach(True, {0: 20})
    with Store.open(tmp_path / "copy", SCHEMA) as store:
        store.append([(0, rows(0, 100))])
        assert store.reach(name) == Reach(True, {0: 15})


@pytest.mark.parametrize("name", ["", "x", "-", "99999-00", "1-0000000000000000", "²-1"])
def test_a_name_that_never_was_is_not_known(tmp_path: Path, name: str) -> None:
    opened(tmp_path, 5)
    found = reach(tmp_path, name)
    assert not found.known
    assert found.ends[0] <= 5


def test_the_history_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levada.actors.journal.ledger.KEPT_OPENINGS", 8)
    ledger = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    ledger.begin({0: 1})
    oldest = ledger.opening
    ledger.begin({0: 2})
    second = ledger.opening
    for end in range(3, 9):
        ledger.begin({0: end})
    assert ledger.reach(oldest, {0: 9999}).known
    ledger.begin({0: 9999})
    assert not ledger.reach(oldest, {0: 9999}).known
    ledger.close()
    again = Ledger.open(REAL, tmp_path / "ledger.sqlite", partitions=1)
    assert not again.reach(oldest, {0: 9999}).known
    assert again.reach(second, {0: 9999}) == Reach(True, {0: 3})
    assert again.reach(ledger.opening, {0: 9999}) == Reach(True, {0: 9999})
    assert again.openings == 9
    again.close()


# ---------------------------------------------------------------- the source


class Mailboxes:
    """A bridge with one mailbox, whose files may be put back to what they were."""

    def __init__(self, make: Callable[..., Actors], folder: Path) -> None:
        self.actors = make()
        self.folder = folder
        self.journal = self.actors.directory / "mailboxes" / "rows"
        self.made = self.actors.mailbox("rows", SCHEMA)

    def append(self, start: int, stop: int) -> None:
        self.actors.do(lambda: self.made.append(rows(start, stop)))

    def restart(self, change: Callable[[], object] = lambda: None, **settings: Any) -> None:
        """Change something while nobody has the files open."""
        self.actors.stop()
        change()
        self.actors.start()
        self.made = self.actors.mailbox("rows", SCHEMA, **settings)

    def keep(self) -> None:
        shutil.copytree(self.journal, self.folder / "copy")

    def put_back(self) -> None:
        shutil.rmtree(self.journal)
        shutil.copytree(self.folder / "copy", self.journal)

    def options(self, **more: str) -> dict[str, str]:
        return {"address": self.actors.bridge.address, "mailbox": "rows", **more}

    def source(self, **more: str) -> StreamSource:
        return StreamSource(Options.read(self.options(**more)), WANTED)


@pytest.fixture
def mailboxes(make_actors: Callable[..., Actors], tmp_path: Path) -> Mailboxes:
    return Mailboxes(make_actors, tmp_path)


def read(stream: StreamSource, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [
        n
        for task in stream.partitions(start, end)
        for batch in stream.read(task)
        for n in batch.column("n").to_pylist()
    ]


pytestmark = [pytest.mark.loopback]


def test_a_checkpoint_is_good_over_restarts(mailboxes: Mailboxes) -> None:
    mailboxes.append(0, 20)
    stream = mailboxes.source()
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    for _ in range(2):
        mailboxes.restart()
        assert read(mailboxes.source(), start, end) == list(range(20))
    mailboxes.append(20, 30)
    stream = mailboxes.source()
    assert read(stream, end, stream.latestOffset(end, ReadAllAvailable())) == list(range(20, 30))


@pytest.mark.parametrize("copied", ["closed", "open"])
def test_rows_that_a_restored_copy_gets_are_not_skipped_in_silence(mailboxes: Mailboxes, copied: str) -> None:
    """The query stands at 2,000, and the copy, which had 1,500, gets other rows under these offsets."""
    mailboxes.append(0, 1500)
    if copied == "closed":
        mailboxes.restart(mailboxes.keep)
    else:
        mailboxes.keep()
    mailboxes.append(1500, 2000)
    stream = mailboxes.source()
    start = stream.initialOffset()
    checkpoint = stream.latestOffset(start, ReadAllAvailable())
    assert (checkpoint["0"], len(read(stream, start, checkpoint))) == (2000, 2000)
    planned = stream.partitions(start, checkpoint)
    mailboxes.restart(mailboxes.put_back)
    mailboxes.append(5000, 6500)

    stream = mailboxes.source()
    with pytest.raises(JournalBehind, match="option failOnDataLoss=false") as behind:
        stream.latestOffset(checkpoint, ReadAllAvailable())
    assert (behind.value.opening, behind.value.partition) == (checkpoint["opening"], 0)
    assert (behind.value.wanted, behind.value.kept) == (2000, 1500)
    says = (
        "rows 1500 to 1999 of partition 0, which this query has read, are gone"
        if copied == "open"
        else "it is an older copy"
    )
    assert says in str(behind.value)
    with pytest.raises(JournalBehind):
        stream.partitions(start, checkpoint)
    with pytest.raises(JournalBehind, match="put back to row 1500"):
        list(stream.read(planned[0]))

    lenient = mailboxes.source(failOnDataLoss="false", group="job")
    end = lenient.latestOffset(checkpoint, ReadAllAvailable())
    assert read(lenient, checkpoint, end) == list(range(5000, 6500))
    lenient.commit(checkpoint)
    assert mailboxes.actors.ask(mailboxes.made, GetGroups()) == {"job": {0: 1500}}
    # From its next checkpoint on it needs no leniency.
    assert stream.latestOffset(end, ReadAllAvailable()) == end


def first_version(directory: Path) -> None:
    """Put a journal there as version 0.1.0 left it; ``data/README.md`` says what is in it."""
    with tarfile.open(Path(__file__).parents[1] / "journal/data/journals-0.1.tar.xz") as archive:
        archive.extractall(directory.parent, filter="data")
    (directory.parent / "closed").rename(directory)


def test_a_checkpoint_of_the_first_version_is_read(make_actors: Callable[..., Actors]) -> None:
    """It names no opening, and is good up to where the journal ended when it got its first one."""
    actors = make_actors()
    (actors.directory / "mailboxes").mkdir(exist_ok=True)
    first_version(actors.directory / "mailboxes" / "old")
    made = actors.mailbox("old", None, partitions=2)
    stream = StreamSource(Options.read({"address": actors.bridge.address, "mailbox": "old"}), WANTED)
    epoch = stream.initialOffset()["epoch"]
    checkpoint = {"epoch": epoch, "0": 103, "1": 13}
    batch = pa.record_batch(
        [pa.array([7], pa.int64()), pa.array(["new"])],
        schema=pa.ipc.read_schema(pa.py_buffer(actors.ask(made, GetSchema()))),
    )
    actors.do(lambda: made.append(batch, partition=0))
    end = stream.latestOffset(checkpoint, ReadAllAvailable())
    assert read(stream, checkpoint, end) == [5001, 5002, 5003, 7, 5001, 5002, 5003]
    with pytest.raises(JournalBehind, match="rows 106 to 106 of partition 0, which this query has read, are gone"):
        stream.latestOffset({"epoch": epoch, "0": 107, "1": 13}, ReadAllAvailable())


def test_rows_are_lost_and_none_is_skipped_that_comes_after(mailboxes: Mailboxes) -> None:
    """The tail is cut off, which is refused, and accepted: the next rows come behind the lost ones, where the checkpoint stands."""
    for at in range(0, 2000, 100):
        mailboxes.append(at, at + 100)
    stream = mailboxes.source(group="job")
    start = stream.initialOffset()
    checkpoint = stream.latestOffset(start, ReadAllAvailable())
    stream.commit(checkpoint)
    [path] = (mailboxes.journal / "partition-0000").glob("*.segment")

    def cut() -> None:
        octets = path.read_bytes()
        place = -1
        for _ in range(16):  # the first 15 of 20 blocks stay
            place = octets.index(b"LvB1", place + 1)
        path.write_bytes(octets[:place])

    with pytest.raises(JournalDamaged, match=r"ends with offset 1500, but rows up to 2000 were promised.*accept_loss"):
        mailboxes.restart(cut)
    mailboxes.restart(config=JournalConfig(accept_loss=True))
    mailboxes.append(5000, 6500)
    stream = mailboxes.source()
    assert read(stream, checkpoint, stream.latestOffset(checkpoint, ReadAllAvailable())) == list(range(5000, 6500))
    # A query that comes from before has to be told to go on without them.
    with pytest.raises(OffsetGone, match="rows 1500 to 1999 were lost"):
        read(stream, start, stream.latestOffset(start, ReadAllAvailable()))
    lenient = mailboxes.source(failOnDataLoss="false")
    found: list[int] = []
    for _ in range(40):
        end = lenient.latestOffset(start, ReadMaxBytes(3000))
        found += read(lenient, start, end)
        start = end
    assert found == [*range(1500), *range(5000, 6500)]


@message("history.Row")
class Row:
    n: int


async def test_a_subscriber_goes_on_behind_rows_whose_loss_was_accepted(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        async with serve_bridge(system, tmp_path / "b") as bridge:
            made = await bridge.mailbox("rows", Row)
            await made.append([Row(n) for n in range(10)])
        [path] = (tmp_path / "b" / "mailboxes" / "rows" / "partition-0000").glob("*.segment")
        path.unlink()
        async with serve_bridge(system, tmp_path / "b") as bridge:
            made = await bridge.mailbox("rows", Row, config=JournalConfig(accept_loss=True))
            await made.append([Row(50)])
            sender, receiver = channel(Delivery)
            bridge.subscribe("rows", sender, group="g")
            with receiver, trio.fail_after(100):
                got = await receiver.receive()
            assert (got.message, got.key.offset) == (Row(50), 10)


def test_a_start_beyond_the_end_is_refused(mailboxes: Mailboxes) -> None:
    mailboxes.append(0, 10)
    assert mailboxes.source(startingOffsets='{"0": 10}').initialOffset()["0"] == 10
    with pytest.raises(ConfigurationError, match=r"startingOffsets is \{0: 11\}, wanted at most \{0: 10\}"):
        mailboxes.source(startingOffsets='{"0": 11}').initialOffset()


# ---------------------------------------------------------------- with Spark


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_query_says_that_an_older_copy_was_put_in_place(
    spark: SparkSession, mailboxes: Mailboxes, tmp_path: Path
) -> None:
    def run(**more: str) -> Any:
        stream = spark.readStream.format("mailbox").options(**mailboxes.options(**more)).load()
        to = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_the_end(to, str(tmp_path / "out"))

    def total() -> int:
        found: Any = spark.read.parquet(str(tmp_path / "out"))
        return int(found.count())

    mailboxes.append(0, 15)
    run()
    mailboxes.restart(mailboxes.keep)
    mailboxes.append(15, 20)
    run()
    assert total() == 20
    mailboxes.restart(mailboxes.put_back)
    mailboxes.append(5000, 5010)
    with pytest.raises(Exception, match="it is an older copy") as failed:
        run()
    assert "failOnDataLoss=false" in str(failed.value)
    assert total() == 20
    run(failOnDataLoss="false")
    assert total() == 30


@pytest.mark.release
def test_a_query_goes_on_from_a_checkpoint_of_the_first_version(
    spark: SparkSession, make_actors: Callable[..., Actors], tmp_path: Path
) -> None:
    actors = make_actors()
    (actors.directory / "mailboxes").mkdir(exist_ok=True)
    first_version(actors.directory / "mailboxes" / "old")
    made = actors.mailbox("old", None, partitions=2)

    def run() -> int:
        stream = spark.readStream.format("mailbox").options(address=actors.bridge.address, mailbox="old").load()
        to = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_the_end(to, str(tmp_path / "out"))
        found: Any = spark.read.parquet(str(tmp_path / "out"))
        return int(found.count())

    assert run() == 66 + 16
    offsets = tmp_path / "checkpoint" / "offsets"
    *lines, last = (offsets / "0").read_text().splitlines()
    offset = json.loads(last)
    assert offset.pop("opening")
    (offsets / "0").write_text("\n".join([*lines, json.dumps(offset)]))
    (offsets / ".0.crc").unlink()
    batch = pa.record_batch(
        [pa.array([7], pa.int64()), pa.array(["new"])],
        schema=pa.ipc.read_schema(pa.py_buffer(actors.ask(made, GetSchema()))),
    )
    actors.do(lambda: made.append(batch, partition=0))
    assert run() == 66 + 16 + 1
