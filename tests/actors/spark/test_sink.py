"""Writing mailboxes from Spark: columns that fit, batches that are seen at once, micro-batches that are there once, whoever is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructType  # noqa: E402

from levada.actors.journal import GetExtent, GetJournalStatistics, SchemaMismatch, columns_of  # noqa: E402
from levada.actors.spark.datasource import MailboxSource  # noqa: E402
from levada.actors.spark.sink import check_columns, fitting  # noqa: E402
from levada.actors.spark.worker import RemoteMailbox  # noqa: E402
from levada.framework import message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

from .conftest import Actors, run_to_the_end  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = [pytest.mark.ci, pytest.mark.loopback, pytest.mark.timeout(300)]


@message("sink.Line")
class Line:
    number: int
    text: str = "none"


COLUMNS = columns_of(Line).schema


def rows(address: str, name: str) -> list[int]:
    """All numbers in a mailbox, sorted."""
    mailbox = RemoteMailbox(address, name)
    found = mailbox.describe()
    columns = found.columns()
    return sorted(
        number
        for partition, end in found.end.items()
        for batch in mailbox.read(partition, found.first[partition], end, epoch=found.epoch, schema=columns)
        for number in batch.column("number").to_pylist()
    )


# ---------------------------------------------------------------- columns


def test_rows_that_do_not_fit_are_refused_with_what_differs() -> None:
    with pytest.raises(SchemaMismatch) as refused:
        check_columns(StructType().add("number", "string").add("level", "integer"), COLUMNS)
    assert refused.value.differences == ("number: string, wanted int64", "level: int32, not wanted")
    with pytest.raises(SchemaMismatch, match="number: missing, wanted int64"):
        check_columns(StructType().add("text", "string"), COLUMNS)
    # Whatever has a default may be left out, and columns may come in any order.
    check_columns(StructType().add("number", "long"), COLUMNS)
    check_columns(StructType().add("text", "string").add("number", "long"), COLUMNS)


def test_rows_are_brought_to_the_columns_of_the_mailbox() -> None:
    given = pa.record_batch({"text": ["a"], "number": [1]})
    assert fitting(given, COLUMNS).to_pylist() == [{"number": 1, "text": "a"}]
    assert fitting(pa.record_batch({"number": [1, 2]}), COLUMNS).column("text").to_pylist() == ["none", "none"]
    assert fitting(given, COLUMNS).schema.equals(COLUMNS, check_metadata=True)
    with pytest.raises(SchemaMismatch, match="number: has nulls"):
        fitting(pa.record_batch({"number": pa.array([None], pa.int64())}), COLUMNS)


def test_nulls_within_a_column_matter_in_the_rows_only() -> None:
    """Spark calls the parts of lists and maps by other names, and allows nulls in them."""
    strict = pa.schema(
        [
            ("a", pa.list_(pa.field("item", pa.int64(), nullable=False))),
            ("b", pa.map_(pa.string(), pa.struct([pa.field("n", pa.int64(), nullable=False)]))),
        ]
    )
    loose = StructType().add("a", ArrayType(LongType())).add("b", MapType(StringType(), StructType().add("n", "long")))
    check_columns(loose, strict)
    inner = pa.map_(pa.string(), pa.struct([("n", pa.int64())]))
    arrays = [pa.array([[1, 2]], pa.list_(pa.field("element", pa.int64()))), pa.array([[("k", {"n": 1})]], inner)]
    given = pa.record_batch(arrays, names=["a", "b"])
    assert fitting(given, strict).to_pylist() == [{"a": [1, 2], "b": [("k", {"n": 1})]}]


def test_a_mailbox_is_not_overwritten(actors: Actors) -> None:
    actors.mailbox("out", Line)
    source = MailboxSource({"address": actors.bridge.address, "mailbox": "out"})
    with pytest.raises(ConfigurationError, match="cannot be overwritten"):
        source.writer(StructType().add("number", "long"), overwrite=True)


# ---------------------------------------------------------------- batches


def write(frame: DataFrame, address: str, **more: str) -> None:
    frame.write.format("mailbox").options(address=address, mailbox="out", **more).mode("append").save()


def test_a_batch_is_seen_when_its_job_commits(spark: SparkSession, actors: Actors, tmp_path: Path) -> None:
    """A job that fails leaves nothing; one with the same id is written once; a task's second try counts, its first does not."""
    out = actors.mailbox("out", Line, partitions=2)
    address = actors.bridge.address
    marker = str(tmp_path / "failed once")

    def once(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            if not os.path.exists(marker):
                open(marker, "w").close()
                raise ValueError("the first try fails behind its first rows")

    numbers = spark.range(100).selectExpr("id AS number")
    write(numbers.mapInArrow(once, "number bigint"), address, jobId="one")
    assert rows(address, "out") == list(range(100))
    write(numbers, address, jobId="one")
    assert rows(address, "out") == list(range(100))
    others = spark.range(1, 101).selectExpr("id AS number")
    with pytest.raises(Exception, match="job:one was delivered with 100 rows before, and has 100 other rows now"):
        write(others, address, jobId="one")
    write(others, address, jobId="one", failOnDataLoss="false")
    assert rows(address, "out") == list(range(100))
    with pytest.raises(Exception, match="number: string, wanted int64"):
        write(spark.range(1).selectExpr("'x' AS number"), address)
    with pytest.raises(Exception, match="division by zero"):
        write(numbers.mapInArrow(always_failing, "number bigint"), address)
    assert rows(address, "out") == list(range(100))
    assert actors.ask(out, GetJournalStatistics()).store.bytes_staged == 0


def always_failing(batches: Iterator[Any]) -> Iterator[Any]:
    yield next(batches)
    _ = 1 / 0


# ---------------------------------------------------------------- micro-batches


def copy(
    spark: SparkSession, address: str, checkpoint: Path, through: Callable[..., Any] | None = None, **more: str
) -> None:
    """Copy mailbox ``lines`` to mailbox ``out``, until its present end."""
    lines = spark.readStream.format("mailbox").options(address=address, mailbox="lines", **more).load()
    if through is not None:
        lines = lines.mapInArrow(through, "number bigint")
    writer = lines.select("number").writeStream.format("mailbox").options(address=address, mailbox="out", **more)
    run_to_the_end(writer.option("checkpointLocation", str(checkpoint)).queryName("copy"))


@pytest.mark.release
def test_a_micro_batch_is_there_once_though_spark_forgot_it(
    spark: SparkSession, actors: Actors, tmp_path: Path
) -> None:
    """As if the driver died between the commit of the sink and its own: that it committed is what it has not written down."""
    made = actors.mailbox("lines", Line, partitions=2)
    out = actors.mailbox("out", Line, partitions=2)
    actors.do(lambda: made.append([Line(n) for n in range(50)]))
    checkpoint = tmp_path / "checkpoint"
    copy(spark, actors.bridge.address, checkpoint)
    before = actors.ask(out, GetExtent()).end
    for left in (checkpoint / "commits").glob("*0*"):
        left.unlink()
    copy(spark, actors.bridge.address, checkpoint)
    assert actors.ask(out, GetExtent()).end == before
    assert actors.ask(out, GetJournalStatistics()).store.batches_repeated == 1
    actors.do(lambda: made.append([Line(n) for n in range(50, 60)]))
    copy(spark, actors.bridge.address, checkpoint)
    assert rows(actors.bridge.address, "out") == list(range(60))


@pytest.mark.release
def test_a_checkpoint_or_a_mailbox_that_went_back_loses_no_rows_silently(
    spark: SparkSession, make_actors: Callable[..., Actors], tmp_path: Path
) -> None:
    """Spark does not sync its checkpoint, and either may be restored from a copy."""
    actors = make_actors("bridge")
    made = actors.mailbox("lines", Line)
    actors.mailbox("out", Line)
    actors.do(lambda: made.append([Line(n) for n in range(10)]))
    checkpoint, mailboxes = tmp_path / "checkpoint", tmp_path / "bridge" / "mailboxes"
    copy(spark, actors.bridge.address, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "older checkpoint")
    actors.do(lambda: made.append([Line(n) for n in range(10, 20)]))
    actors.stop()
    shutil.copytree(mailboxes / "out", tmp_path / "older mailbox")
    actors = make_actors("bridge")
    made = actors.mailbox("lines", Line)
    actors.mailbox("out", Line)
    copy(spark, actors.bridge.address, checkpoint)
    actors.do(lambda: made.append([Line(n) for n in range(20, 25)]))
    with pytest.raises(Exception, match="was delivered with 10 rows before, and has 15 rows now"):
        copy(spark, actors.bridge.address, tmp_path / "older checkpoint")
    assert rows(actors.bridge.address, "out") == list(range(20))
    actors.stop()
    shutil.rmtree(mailboxes / "out")
    (tmp_path / "older mailbox").rename(mailboxes / "out")
    actors = make_actors("bridge")
    actors.mailbox("lines", Line)
    actors.mailbox("out", Line)
    with pytest.raises(Exception, match="comes after batch 1, and its batches 1 to 1 are not in this journal"):
        copy(spark, actors.bridge.address, checkpoint)
    copy(spark, actors.bridge.address, checkpoint, failOnDataLoss="false")
    assert rows(actors.bridge.address, "out") == [*range(10), *range(20, 25)]
