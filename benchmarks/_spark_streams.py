"""Streams from and into a mailbox against the same with Parquet files: rows of ``levada bench spark``.

Mailbox and files hold the same rows, with texts that all differ. A figure of CPU time is of all processes: this one with the bridge, Spark's
Java, and its Python processes, with their start in each run.

* A stream from a mailbox goes into Spark's sink that drops everything. Its base reads the files with pyarrow in a source of streams in Python,
  so both hand batches of Arrow from Python processes to Java.
* A stream into a mailbox comes from the files, read by Java, and so does its base, into other files.
* Append to visible: rows are appended at 1,000 a second to one mailbox, and a stream brings them to another one, whose subscriber is an actor.
  The figure is the median. The base is what Spark alone would take at best: one and a half micro-batches of a stream from Spark's own source
  into its sink that drops everything, since a row waits for half a micro-batch on average. A micro-batch of Spark alone takes 80 to 90 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from ._durable_spark import spent
from ._measure import Measure, Workload

__all__ = ["streams"]

OPERATIONS, TIMES = 100_000, 10
"""As many operations as the base does, and rows for each of them: with fewer, the start of a query is most of what is measured."""
COLUMNS = "id long, size long, body string"
LATE_ROWS = 20_000
"""Rows of the row about time: 20 seconds of them."""
SPARK_ALONE = 30
"""Micro-batches of Spark alone that are measured; the first ones compile what runs."""


class _Mailboxes(Protocol):
    address: str

    def fill(self, rows: int) -> None: ...

    def watched(self, early: str, late: str) -> None: ...

    def trickle(self, rows: int) -> list[int]: ...


def streams(
    spark: Any, actors: _Mailboxes, made: Callable[[int, int], Iterator[pa.RecordBatch]], folder: str
) -> tuple[list[Workload], dict[str, Measure]]:
    """Return the rows and what they run.

    Args:
        spark: the session.
        actors: the mailboxes ``source`` and ``sink``, and pairs of others.
        made: makes the rows between two numbers.
        folder: for files and checkpoints.
    """
    numbers, written = count(), set[int]()
    spark.dataSource.register(_source())

    def files(n: int) -> str:
        path = Path(folder, f"rows-{n}")
        if n not in written:
            path.mkdir()
            for part, (first, end) in enumerate([(0, n // 2), (n // 2, n)]):
                batches = made(first, end)
                batch = next(batches)
                with pq.ParquetWriter(path / f"{part}.parquet", batch.schema) as writer:
                    writer.write_batch(batch)
                    for batch in batches:
                        writer.write_batch(batch)
            written.add(n)
        return str(path)

    def by_java(n: int) -> Any:
        return spark.readStream.schema(COLUMNS).parquet(files(n))

    def by_python(n: int) -> Any:
        return spark.readStream.format("rows of files").options(path=files(n)).load()

    def rows(n: int) -> Any:
        actors.fill(n)
        limits = {"maxRowsPerBatch": n}
        return spark.readStream.format("mailbox").options(address=actors.address, mailbox="source", **limits).load()

    def run(source: Callable[[int], Any], sink: str) -> Measure:
        def query(n: int) -> float:
            writer = source(n).writeStream.format(sink).option("checkpointLocation", f"{folder}/c-{next(numbers)}")
            if sink == "mailbox":
                writer = writer.options(address=actors.address, mailbox="sink")
            place = [f"{folder}/t-{next(numbers)}"] if sink == "parquet" else []
            start = spent()
            writer.trigger(availableNow=True).start(*place).awaitTermination()
            return spent() - start

        warm = False

        def cost(operations: int) -> float:
            nonlocal warm
            n = TIMES * operations
            if not warm:
                query(n)  # Java compiles what it runs for the first time
                warm = True
            return query(n) / n * 1e9

        return cost

    def visible(n: int) -> float:
        number = next(numbers)
        early, late = f"early-{number}", f"late-{number}"
        actors.watched(early, late)
        source = spark.readStream.format("mailbox").options(address=actors.address, mailbox=early).load()
        options = {"address": actors.address, "mailbox": late, "checkpointLocation": f"{folder}/c-{number}"}
        query = source.writeStream.format("mailbox").options(**options).start()
        try:
            actors.trickle(1_000)  # the first micro-batches start Python processes
            return median(actors.trickle(n))
        finally:
            query.stop()

    def alone(_: int) -> float:
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 300).load()
        sink = source.writeStream.format("noop").option("checkpointLocation", f"{folder}/c-{next(numbers)}")
        query = sink.start()
        try:
            while len(progress := query.recentProgress) < SPARK_ALONE:
                time.sleep(0.5)
            return 1.5e6 * median(float(each["durationMs"]["triggerExecution"]) for each in progress)
        finally:
            query.stop()

    name, alone_name = "the same with Parquet", "1.5 batches of Spark alone"
    workloads = [
        Workload(key="stream", title="stream from a mailbox, a row, CPU", n=OPERATIONS, base=run(by_python, "noop"), base_name=name, budget=1.3),
        Workload(key="into", title="stream into a mailbox, a row, CPU", n=OPERATIONS, base=run(by_java, "parquet"), base_name=name, budget=1.4),
        Workload(key="visible", title="stream: append to visible, 1,000 rows/s", n=LATE_ROWS, base=alone, base_name=alone_name, budget=2.5),
    ]  # fmt: skip
    return workloads, {"stream": run(rows, "noop"), "into": run(by_java, "mailbox"), "visible": visible}


def _source() -> type[DataSource]:
    """Make the source of streams that reads files with pyarrow; its classes are local, so Spark sends their code to its processes."""

    class File(InputPartition):
        def __init__(self, path: str) -> None:
            self.path = path

    class Reader(DataSourceStreamReader):
        def __init__(self, path: str) -> None:
            self.path = path

        def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's names, here and below
            return {"read": 0}

        def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: N802
            return {"read": 1}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            return [File(str(each)) for each in sorted(Path(self.path).glob("*.parquet"))] if start != end else []

        def read(self, partition: Any) -> Iterator[Any]:
            yield from pq.ParquetFile(partition.path).iter_batches(batch_size=16_384)

    class Files(DataSource):
        @classmethod
        def name(cls) -> str:
            return "rows of files"

        def schema(self) -> str:
            return COLUMNS

        def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
            return Reader(self.options["path"])

    return Files
