"""Streams from and into a mailbox against the same with Parquet files: rows of ``levada bench spark``.

A figure is the CPU time of all processes: this one with the bridge, Spark's Java, and its Python processes, with their start in each run.
A stream from a mailbox goes into Spark's sink that drops everything; a stream into one comes from the Parquet files.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from ._durable_spark import spent
from ._measure import Measure, Workload

__all__ = ["streams"]

OPERATIONS, TIMES = 100_000, 10
"""As many operations as the base does, and rows for each of them: with fewer, the start of a query is most of what is measured."""


class _Mailboxes(Protocol):
    address: str

    def fill(self, rows: int) -> None: ...


def streams(
    spark: Any, actors: _Mailboxes, made: Callable[[Any, int], Any], folder: str
) -> tuple[list[Workload], dict[str, Measure]]:
    """Return the rows and what they run.

    Args:
        spark: the session.
        actors: the mailboxes ``source`` and ``sink``.
        made: makes rows.
        folder: for files and checkpoints.
    """
    numbers, written = count(), set[int]()

    def files(n: int) -> Any:
        path = f"{folder}/rows-{n}"
        if n not in written:
            made(spark, n).write.parquet(path)
            written.add(n)
        return spark.readStream.schema("id long, size long, body string").parquet(path)

    def rows(n: int) -> Any:
        actors.fill(n)
        limits = {"maxRowsPerBatch": n}
        return spark.readStream.format("mailbox").options(address=actors.address, mailbox="source", **limits).load()

    def run(source: Callable[[int], Any], sink: str) -> Measure:
        def cost(operations: int) -> float:
            n = TIMES * operations
            writer = source(n).writeStream.format(sink).option("checkpointLocation", f"{folder}/c-{next(numbers)}")
            if sink == "mailbox":
                writer = writer.options(address=actors.address, mailbox="sink")
            place = [f"{folder}/t-{next(numbers)}"] if sink == "parquet" else []
            start = spent()
            writer.trigger(availableNow=True).start(*place).awaitTermination()
            return (spent() - start) / n * 1e9

        return cost

    name = "the same with Parquet"
    workloads = [
        Workload(key="stream", title="stream from a mailbox, a row, CPU", n=OPERATIONS, base=run(files, "noop"), base_name=name, budget=1.3),
        Workload(key="into", title="stream into a mailbox, a row, CPU", n=OPERATIONS, base=run(files, "parquet"), base_name=name, budget=1.4),
    ]  # fmt: skip
    return workloads, {"stream": run(rows, "noop"), "into": run(files, "mailbox")}
