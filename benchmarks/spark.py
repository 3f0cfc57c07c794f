"""Mailboxes in Spark against the cost of Spark's own round trip through Python: ``levada bench spark``.

Rows are 220 bytes: a body of 200 and two int64. The base is a `mapInArrow` that returns its input, in the same session and the same
round: rows go out of Java to a Python worker and back. A mailbox is read into Spark's sink that drops everything, and written from rows that
Spark makes; two tasks, a bridge in this process, its journal on the disk, with each write staged, appended and synced.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import trio

from levada.actors.journal import JournalConfig
from levada.actors.spark import Mailbox, serve_bridge, session
from levada.framework import ActorSystem

from ._levada import clock
from ._measure import Contender, Measure, Progress, Report, Workload, measure
from ._spark_asks import asks
from ._spark_streams import streams

__all__ = ["run"]

BATCH = 16_384
"""Rows of a batch: one block of the journal."""
SCHEMA = pa.schema([("id", pa.int64()), ("size", pa.int64()), ("body", pa.string())])


class Actors:
    """The actors' side, in trio in another thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ready, self._stop = threading.Event(), trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        config = JournalConfig(partitions=2)
        async with ActorSystem() as system, serve_bridge(system, f"{self._folder}/bridge") as bridge:
            self.address = bridge.address
            self._source: Mailbox[Any] = await bridge.mailbox("source", SCHEMA, config=config)
            await bridge.mailbox("sink", SCHEMA, config=config)
            self.rows = 0
            self._ready.set()
            await self._stop.wait()

    def fill(self, rows: int) -> None:
        """Append rows until so many can be read."""
        trio.from_thread.run(self._fill, rows, trio_token=self._token)

    async def _fill(self, rows: int) -> None:
        while self.rows < rows:
            count = min(BATCH, rows - self.rows)
            first = pa.array(range(self.rows, self.rows + count), pa.int64())
            batch = pa.record_batch([first, first, pa.array(["x" * 200] * count)], schema=SCHEMA)
            await self._source.append(batch)
            self.rows += count

    def close(self) -> None:
        """Stop it."""
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()


@contextmanager
def _actors() -> Iterator[Actors]:
    with tempfile.TemporaryDirectory() as folder:
        actors = Actors(folder)
        try:
            yield actors
        finally:
            actors.close()


def _made(spark: Any, n: int) -> Any:
    return spark.range(0, n, numPartitions=2).selectExpr("id", "id * 2 AS size", "rpad('', 200, 'x') AS body")


def _identity(spark: Any) -> Measure:
    def run(n: int) -> float:
        mapped = _made(spark, n).mapInArrow(lambda batches: batches, "id long, size long, body string")
        return _seconds(mapped.write.format("noop").mode("overwrite")) / n * 1e9

    return run


def _read(spark: Any, actors: Actors) -> Measure:
    def run(n: int) -> float:
        actors.fill(n)
        frame = spark.read.format("mailbox").options(address=actors.address, mailbox="source").load()
        return _seconds(frame.write.format("noop").mode("overwrite")) / actors.rows * 1e9

    return run


def _write(spark: Any, actors: Actors) -> Measure:
    def run(n: int) -> float:
        to = _made(spark, n).write.format("mailbox").options(address=actors.address, mailbox="sink")
        return _seconds(to.mode("append")) / n * 1e9

    return run


def _seconds(writer: Any) -> float:
    start = clock()
    writer.save()
    return clock() - start


def run(*, rounds: int, quick: bool, only: str, progress: Progress) -> Report:
    """Measure all workloads whose title contains `only`."""
    spark = session(master="local[2]", app="levada bench")
    try:
        with (
            _actors() as actors,
            asks(spark) as (ask_workloads, ask_runs),
            tempfile.TemporaryDirectory() as folder,
        ):
            stream_workloads, stream_runs = streams(spark, actors, _made, folder)
            base, name = _identity(spark), "mapInArrow identity"
            n = 1_000_000
            workloads = [
                # 0.7 of the rows in the same time.
                Workload(key="read", title="batch read, Arrow, a row", n=n, base=base, base_name=name, budget=1 / 0.7),
                Workload(
                    key="write", title="batch write, Arrow, a row", n=n, base=base, base_name=name, budget=1 / 0.7
                ),
                *stream_workloads,
                *ask_workloads,
            ]
            runs = {"read": _read(spark, actors), "write": _write(spark, actors), **stream_runs, **ask_runs}
            ours = Contender(name="levada", remark=f"this checkout, Spark {spark.version}, two tasks", runs=runs)
            chosen = [workload for workload in workloads if only in workload.title]
            return measure(chosen, [ours], rounds=rounds, quick=quick, progress=progress)
    finally:
        spark.stop()
