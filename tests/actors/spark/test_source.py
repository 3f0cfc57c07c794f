"""Reading mailboxes from Spark: options, columns, offsets and limits without a session; then batches and streams with one."""

from __future__ import annotations

import datetime as dt
import json
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows  # noqa: E402
from pyspark.sql.types import StructType  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    DeclareGroup,
    EraseEntity,
    GetExtent,
    GetGroups,
    GetJournalStatistics,
    JournalConfig,
    JournalError,
    Keyed,
    OffsetGone,
    SchemaMismatch,
)
from levada.actors.journal.store import Store  # noqa: E402
from levada.actors.spark import EpochChanged, UnknownName  # noqa: E402
from levada.actors.spark import source as module  # noqa: E402
from levada.actors.spark.datasource import MailboxSource  # noqa: E402
from levada.actors.spark.source import BatchSource, Options, StreamSource, columns_for, shares  # noqa: E402
from levada.framework import message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

from .conftest import Actors, Server, run_to_the_end  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = [pytest.mark.ci, pytest.mark.loopback, pytest.mark.timeout(300)]


@message("source.Line")
class Line:
    number: int
    text: str = ""


ONE_ROW = JournalConfig(
    partitions=2, block_rows=1, block_bytes=512, segment_bytes=2048, retain_bytes=None, max_bytes=1 << 20
)


def fill(actors: Actors, name: str = "lines", *counts: int, config: JournalConfig = ONE_ROW) -> Any:
    """Make a mailbox with so many rows in its partitions."""
    made = actors.mailbox(name, Line, config=config)

    async def append() -> None:
        for partition, count in enumerate(counts):
            for number in range(count):
                await made.append([Line(number)], partition=partition)

    actors.do(append)
    return made


def options(actors: Actors, **more: str) -> dict[str, str]:
    return {"address": actors.bridge.address, "mailbox": "lines", **more}


WANTED = StructType().add("number", "long").add("text", "string")


def source(actors: Actors, wanted: StructType = WANTED, **more: str) -> StreamSource:
    return StreamSource(Options.read(options(actors, **more)), wanted)


def bounds(offset: dict[str, Any]) -> tuple[int, ...]:
    return tuple(offset[number] for number in sorted(offset) if number.isdigit())


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mailbox": ""}, "needs option mailbox"),
        ({"maxRowPerBatch": "3"}, "format mailbox has no option maxrowperbatch; its options are address"),
        ({"maxRowsPerBatch": "0"}, "maxRowsPerBatch is '0', wanted a whole number of 1 or more"),
        ({"maxTriggerDelay": "soon"}, "wanted a time such as 500ms"),
        ({"startingOffsets": "first"}, "wanted earliest, latest, group or JSON"),
        ({"startingOffsets": "group"}, "startingOffsets=group needs option group"),
        ({"failOnDataLoss": "maybe"}, "wanted true or false"),
    ],
)
def test_options_that_cannot_be_say_which(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Options.read({"address": "unix:///x", "mailbox": "m", **wrong})


def test_spark_finds_the_format_by_itself() -> None:
    """It looks for a class of this name in modules whose names begin so."""
    import pyspark_mailbox

    assert pyspark_mailbox.DefaultSource is MailboxSource
    assert MailboxSource.name() == "mailbox"


def test_what_spark_adds_to_the_options_of_a_query_is_no_mistake() -> None:
    """Names of queries and places of checkpoints come with the options of sinks, and of sources that are given all settings."""
    read = Options.read({"address": "unix:///x", "mailbox": "m", "queryName": "copy", "checkpointLocation": "/y"})
    assert read.remote.name == "m"


def test_a_table_of_the_catalog_is_refused_with_what_to_say_instead() -> None:
    """As Spark 4.3 passes them when the table is made; to queries of the table it passes none."""
    table = {"option.address": "unix:///b", "option.mailbox": "m", "owner": "root", "provider": "mailbox"}
    with pytest.raises(ConfigurationError, match="CREATE TEMPORARY VIEW … USING mailbox"):
        Options.read({"address": "unix:///b", "mailbox": "m", **table})


def test_decimals_that_spark_has_not_are_named() -> None:
    with pytest.raises(SchemaMismatch, match=r"price: Spark has no type for decimal256\(50, 2\)"):
        columns_for(pa.schema([("price", pa.decimal256(50, 2))]))


def test_names_of_options_are_spelt_as_one_likes() -> None:
    read = Options.read(
        {"ADDRESS": "unix:///x", "Mailbox": "m", "maxtriggerdelay": "250ms", "startingOffsets": '{"1": 4}'}
    )
    assert (read.remote.name, read.max_delay, read.starting) == ("m", 0.25, {1: 4})


# ---------------------------------------------------------------- columns


def test_columns_are_those_of_the_mailbox(actors: Actors) -> None:
    fill(actors)
    schema = MailboxSource(options(actors)).schema()
    assert isinstance(schema, StructType)
    assert schema.simpleString() == "struct<number:bigint,text:string>"
    assert MailboxSource(options(actors, schema="text string")).schema() == "text string"


def test_columns_that_differ_are_named(actors: Actors) -> None:
    fill(actors)
    with pytest.raises(SchemaMismatch) as refused:
        source(actors, StructType().add("number", "string").add("level", "integer")).initialOffset()
    assert refused.value.differences == (
        "number: string, in the mailbox bigint",
        "level: not in the mailbox, which has number, text",
    )
    actors.mailbox("odd", pa.schema([("a", pa.uint64()), ("b", pa.int64())]))
    with pytest.raises(SchemaMismatch, match="a: Spark has no type for uint64"):
        MailboxSource({"address": actors.bridge.address, "mailbox": "odd"}).schema()
    with pytest.raises(UnknownName):
        MailboxSource(options(actors, mailbox="none")).schema()


def test_nanoseconds_of_an_older_mailbox_are_read_if_they_fit(actors: Actors) -> None:
    columns = pa.schema(
        [("at", pa.timestamp("ns", "UTC")), ("took", pa.list_(pa.duration("ns"))), ("number", pa.int64())]
    )
    # Today `Bridge.mailbox` refuses these columns.
    Store.open(Path(actors.bridge.directory, "mailboxes", "events"), columns, JournalConfig()).close()
    made = actors.mailbox("events")

    def append(at: int, took: int, number: int) -> None:
        arrays = [pa.array([value], kind) for value, kind in zip((at, [took], number), columns.types, strict=True)]
        actors.do(made.append, pa.record_batch(arrays, schema=columns))

    def read(wanted: StructType) -> list[dict[str, Any]]:
        reader = BatchSource(Options.read(options(actors, mailbox="events")), wanted)
        return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]

    wanted = columns_for(columns)
    append(1000, 2000, 1)
    moment, second = dt.datetime(1970, 1, 1, microsecond=1, tzinfo=dt.UTC), dt.timedelta(microseconds=2)
    assert read(wanted) == [{"at": moment, "took": [second], "number": 1}]
    append(1001, 2001, 2)
    with pytest.raises(SchemaMismatch) as refused:
        read(wanted)
    assert str(refused.value).startswith("mailbox events has values that Spark cannot hold, name other columns")
    assert refused.value.differences == (
        "at: Casting from timestamp[ns, tz=UTC] to timestamp[us, tz=UTC] would lose data: 1001",
        "took: Casting from duration[ns] to duration[us] would lose data: 2001",
    )
    assert read(StructType().add("number", "long")) == [{"number": 1}, {"number": 2}]


# ---------------------------------------------------------------- offsets


def test_a_stream_begins_where_it_is_told(actors: Actors) -> None:
    made = fill(actors, "lines", 3, 2)
    assert bounds(source(actors).initialOffset()) == (0, 0)
    assert bounds(source(actors, startingOffsets="latest").initialOffset()) == (3, 2)
    assert bounds(source(actors, startingOffsets='{"1": 2}').initialOffset()) == (0, 2)
    with pytest.raises(ConfigurationError, match=r"partitions \[7\], wanted \[0, 1\]"):
        source(actors, startingOffsets='{"7": 2}').initialOffset()
    late = source(actors, startingOffsets="latest", group="late")
    late.initialOffset()
    assert actors.ask(made, GetGroups()) == {"late": {0: 3, 1: 2}}
    assert bounds(source(actors, startingOffsets="group", group="late").initialOffset()) == (3, 2)


def test_without_limits_a_micro_batch_is_all_there_is(actors: Actors) -> None:
    fill(actors, "lines", 3, 2)
    stream = source(actors)
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert bounds(end) == (3, 2)
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    assert stream.reportLatestOffset() == end
    assert [(each.partition, each.start, each.end) for each in stream.partitions(start, end)] == [(0, 0, 3), (1, 0, 2)]


def test_rows_and_octets_of_a_micro_batch_are_limited(actors: Actors) -> None:
    fill(actors, "lines", 8, 4)
    assert source(actors).getDefaultReadLimit() == ReadMaxRows(1_000_000)
    stream = source(actors, maxRowsPerBatch="3")
    assert stream.getDefaultReadLimit() == ReadMaxRows(3)
    start = stream.initialOffset()
    first = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert bounds(first) == (2, 1)
    assert bounds(stream.latestOffset(first, ReadAllAvailable())) == (8, 4)
    small = source(actors, maxBytesPerBatch="1")
    assert small.getDefaultReadLimit() == ReadMaxBytes(1)
    assert bounds(small.latestOffset(start, ReadMaxBytes(1))) == (1, 1)
    assert bounds(small.latestOffset(start, ReadMaxBytes(1 << 20))) == (8, 4)
    both = source(actors, maxRowsPerBatch="6", maxBytesPerBatch="1")
    assert bounds(both.latestOffset(start, both.getDefaultReadLimit())) == (1, 1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 60))
def test_shares_use_the_limit_up_and_keep_within_it(partitions: list[tuple[int, int]], rows: int) -> None:
    start = {number: first for number, (first, _) in enumerate(partitions)}
    end = {number: first + count for number, (first, count) in enumerate(partitions)}
    shared = shares(start, end, rows)
    assert all(start[number] <= shared[number] <= end[number] for number in end)
    assert sum(shared[number] - start[number] for number in end) == min(rows, sum(count for _, count in partitions))


def test_a_micro_batch_waits_for_enough_rows_or_for_its_time(actors: Actors) -> None:
    made = fill(actors, "lines", 2, 0)
    patient = source(actors, minRowsPerBatch="3")
    start = patient.initialOffset()
    assert patient.latestOffset(start, ReadAllAvailable()) == start
    # The time is over at once; and Trigger.AvailableNow has nothing to wait for.
    hasty = source(actors, minRowsPerBatch="3", maxTriggerDelay="0s")
    assert bounds(hasty.latestOffset(start, ReadAllAvailable())) == (2, 0)
    now = source(actors, minRowsPerBatch="3")
    now.prepareForTriggerAvailableNow()
    assert bounds(now.latestOffset(start, ReadAllAvailable())) == (2, 0)
    actors.do(lambda: made.append([Line(2)]))
    assert sum(bounds(patient.latestOffset(start, ReadAllAvailable()))) == 3


def test_a_query_without_new_rows_waits_for_them_at_the_bridge(actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks every 10 ms."""
    monkeypatch.setattr(module, "IDLE", 250.0)
    made = fill(actors, "lines", 2, 0)
    stream = source(actors)
    start = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    happened: list[str] = []

    def ask() -> None:
        stream.latestOffset(start, ReadAllAvailable())
        happened.append("answered")

    asking = threading.Thread(target=ask)
    asking.start()
    happened.append("appended")
    actors.do(lambda: made.append([Line(2)]))
    asking.join(250)
    assert happened == ["appended", "answered"]
    assert sum(bounds(stream.latestOffset(start, ReadAllAvailable()))) == 3


def test_available_now_reads_up_to_what_was_there_while_appends_go_on(actors: Actors) -> None:
    made = fill(actors, "lines", 3, 2)
    stream = source(actors)
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    actors.do(lambda: made.append([Line(9)] * 5, partition=0))
    end = stream.latestOffset(start, ReadAllAvailable())
    assert bounds(end) == (3, 2)
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    # A checkpoint that is ahead already stays where it is.
    ahead = {**end, "0": 7}
    assert stream.latestOffset(ahead, ReadAllAvailable()) == ahead


def test_a_checkpoint_of_another_journal_is_refused(actors: Actors) -> None:
    fill(actors, "lines", 1)
    stream = source(actors)
    start = {**stream.initialOffset(), "epoch": "0" * 32}
    with pytest.raises(EpochChanged, match="You can start the query with a new checkpoint"):
        stream.latestOffset(start, ReadAllAvailable())


def test_a_group_is_kept_and_moves_with_the_commits_of_the_query(actors: Actors) -> None:
    made = fill(actors, "lines", 3, 2)
    stream = source(actors, group="job")
    start = stream.initialOffset()
    assert actors.ask(made, GetGroups()) == {"job": {0: 0, 1: 0}}
    stream.commit(stream.latestOffset(start, ReadAllAvailable()))
    assert actors.ask(made, GetGroups()) == {"job": {0: 3, 1: 2}}


def test_a_group_moves_though_no_more_rows_come_and_never_back(actors: Actors) -> None:
    """Spark commits a batch with the next one, which would never come if the mailbox were full of rows that have been read."""
    made = fill(actors, "lines", 3, 2)
    stream = source(actors, group="job")
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert actors.ask(made, GetGroups()) == {"job": {0: 0, 1: 0}}
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    assert actors.ask(made, GetGroups()) == {"job": {0: 3, 1: 2}}
    again = source(actors, group="job", minRowsPerBatch="100")
    start = again.initialOffset()
    assert again.latestOffset(start, ReadAllAvailable()) == start
    assert actors.ask(made, GetGroups()) == {"job": {0: 3, 1: 2}}


def test_a_full_mailbox_goes_on_once_its_rows_are_read(actors: Actors) -> None:
    """Though one micro-batch has read all of it, and Spark has nothing to begin the next one with."""
    made = fill(actors, "lines", 0, 0, config=attrs.evolve(ONE_ROW, max_bytes=8192))
    actors.ask(made, DeclareGroup("job"))

    async def append() -> None:
        for number in range(1000):
            await made.append([Line(number)], partition=0)

    async def until_full() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            while not (await made.ref.ask(GetJournalStatistics())).full:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        return int((await made.ref.ask(GetExtent())).end[0])

    held = actors.do(until_full)
    stream = source(actors, group="job")
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert bounds(end) == (held, 0)
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    actors.do(partial(made.append, [Line(held)], partition=0))
    assert bounds(stream.latestOffset(end, ReadAllAvailable())) == (held + 1, 0)


def test_lost_rows_fail_the_query_or_are_left_out(actors: Actors) -> None:
    """Rows that another group has done with are deleted: no group of this query kept them."""
    config = JournalConfig(block_rows=1, block_bytes=512, segment_bytes=1024, retain_bytes=None, max_bytes=1 << 20)
    made = fill(actors, "lines", 30, config=config)
    first = source(actors)
    start = first.initialOffset()
    actors.ask(made, DeclareGroup("other"))
    done = source(actors, group="other")
    done.commit(done.latestOffset(start, ReadAllAvailable()))
    end = first.latestOffset(start, ReadAllAvailable())
    oldest = Options.read(options(actors)).remote.describe().first[0]
    assert 0 < oldest < 30
    with pytest.raises(OffsetGone, match=rf"partition 0: rows 0 to {oldest - 1} have been deleted") as gone:
        first.partitions(start, end)
    assert (gone.value.wanted, gone.value.first) == (0, oldest)
    lenient = source(actors, failOnDataLoss="false")
    [task] = lenient.partitions(start, end)
    rows = [number for batch in lenient.read(task) for number in batch.column("number").to_pylist()]
    assert rows == list(range(oldest, 30))
    with pytest.raises(JournalError):
        list(first.read(task))


# ---------------------------------------------------------------- with Spark


def test_a_task_passes_over_erased_rows_once(actors: Actors) -> None:
    made = actors.mailbox("lines", Line, config=JournalConfig(keyed=Keyed(entity="text")))
    actors.do(lambda: made.append([Line(n, "gone" if n % 4 == 1 or n == 9 else "kept") for n in range(10)]))
    assert actors.ask(made, EraseEntity("gone", partition=0)).rows == 3
    reader = BatchSource(Options.read(options(actors)), WANTED)
    [task] = reader.partitions()
    assert [n for rows in reader.read(task) for n in rows.column("number").to_pylist()] == [0, 2, 3, 4, 6, 7, 8]


def frame(spark: Any, actors: Actors, **more: str) -> Any:
    return spark.read.format("mailbox").options(**options(actors, **more)).load()


def test_ctrl_c_stays_with_whoever_had_it(spark: SparkSession) -> None:
    """Pyspark takes SIGINT for itself when it starts; `session` gives it back."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_batch_is_what_is_there(spark: SparkSession, actors: Actors) -> None:
    """Whole, some columns in another order, filtered, ended early; of a mailbox without rows as well."""
    fill(actors, "lines", 60, 40)
    lines = frame(spark, actors)
    assert [str(field) for field in lines.schema] == [
        "StructField('number', LongType(), False)",
        "StructField('text', StringType(), False)",
    ]
    assert lines.groupBy().sum("number").first()[0] == sum(range(60)) + sum(range(40))
    assert frame(spark, actors, schema="text string, number bigint").where("number = 59").collect() == [("", 59)]
    assert len(lines.limit(3).collect()) == 3
    fill(actors, "none")
    assert frame(spark, actors, mailbox="none").count() == 0


def test_a_mailbox_may_be_a_view_and_no_table(spark: SparkSession, actors: Actors) -> None:
    made = actors.mailbox("lines", Line)
    actors.do(lambda: made.append([Line(1, "a"), Line(2, "b")]))
    given = f"USING mailbox OPTIONS (address '{actors.bridge.address}', mailbox 'lines')"
    with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE lines {given}")
    spark.sql(f"CREATE TEMPORARY VIEW lines {given}")
    assert [row.number for row in spark.sql("SELECT number FROM lines ORDER BY number").collect()] == [1, 2]
    spark.catalog.dropTempView("lines")


@pytest.mark.release
def test_a_session_that_nobody_prepared_finds_the_format(spark: SparkSession, actors: Actors) -> None:
    """What `session` registers is of its own session; any other one looks through the modules that are there."""
    fill(actors, "lines", 3)
    assert frame(spark.newSession(), actors).count() == 3


def test_every_type_of_column_arrives(spark: SparkSession, actors: Actors) -> None:
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
            ("day", pa.date32()),
            ("amount", pa.decimal128(38, 18)),
            ("raw", pa.binary()),
            ("names", pa.list_(pa.field("item", pa.string(), nullable=False))),
            ("by", pa.map_(pa.string(), pa.struct([pa.field("n", pa.int64(), nullable=False)]))),
            ("took", pa.duration("us")),
        ]
    )
    made = actors.mailbox("typed", schema)
    rows = [
        {
            "at": 1_700_000_000_000_000,
            "day": 19_000,
            "amount": None,
            "raw": b"\x00",
            "names": ["a", "b"],
            "by": [("k", {"n": 1})],
            "took": 5,
        }
    ]
    actors.do(lambda: made.append(pa.RecordBatch.from_pylist(rows, schema=schema)))
    [row] = (
        frame(spark, actors, mailbox="typed")
        .selectExpr("unix_micros(at)", "day", "amount", "raw", "names", "by.k.n")
        .collect()
    )
    assert [row[0], str(row[1]), row[2], bytes(row[3]), row[4], row[5]] == [
        1_700_000_000_000_000,
        "2022-01-08",
        None,
        b"\x00",
        ["a", "b"],
        1,
    ]


def test_a_stream_reads_each_row_once_over_restarts(
    spark: SparkSession, make_actors: Callable[..., Actors], tmp_path: Path
) -> None:
    """With limits, in several micro-batches; a new start of both sides goes on from the checkpoint."""
    actors = make_actors()
    made = fill(actors, "lines", 30, 20)
    settings = options(actors, maxRowsPerBatch="20", group="job")

    def run() -> Any:
        stream = spark.readStream.format("mailbox").options(**settings).load()
        to = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return run_to_the_end(to, str(tmp_path / "out"))

    progress = [each.numInputRows for each in run().recentProgress]
    assert sorted(count for count in progress if count) == [10, 20, 20]
    actors.stop()
    actors.start()
    made = fill(actors, "lines", 0, 5)
    run()
    rows: Any = spark.read.parquet(str(tmp_path / "out"))
    assert (rows.count(), rows.groupBy().sum("number").first()[0]) == (
        55,
        sum(range(30)) + sum(range(20)) + sum(range(5)),
    )
    last = tmp_path / "checkpoint" / "offsets" / "3"
    assert bounds(json.loads(last.read_text().splitlines()[-1])) == (30, 25)
    assert sum(actors.ask(made, GetGroups())["job"].values()) >= 50


@pytest.mark.release
@pytest.mark.timeout(120)
def test_streams_that_start_leave_the_environment_they_share_as_large_as_it_was(
    serve: Callable[..., Server], spark: SparkSession, tmp_path: Path
) -> None:
    """Spark keeps one map of variables for all streams of a source; growing while a task is made from it, it would be damaged for good."""
    java: Any = spark

    def names() -> set[str]:
        sources = java._jsparkSession.sessionState().dataSourceManager()
        return set(sources.lookupDataSource("mailbox").dataSourceCls().envVars())

    before = names()
    lines = spark.readStream.format("mailbox").options(address=serve(0).address, mailbox="lines").load()
    run_to_the_end(lines.writeStream.format("noop").option("checkpointLocation", str(tmp_path)))
    assert names() == before
