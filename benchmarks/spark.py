"""Mailboxes in Spark against the cost of Spark's own round trip through Python: ``levada bench spark``.

Rows are 220 bytes: a body of 200, different in each row of a mailbox that is read, and two int64. The base is a `mapInArrow` that returns its
input, in the same session and the same round: rows go out of Java to a Python worker and back. A mailbox is read into Spark's sink that drops
everything, and written from rows that Spark makes; two tasks, a bridge in this process, its journal on the disk, with each write staged,
appended and synced.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import trio

from levada.actors.journal import JournalConfig
from levada.actors.spark import Mailbox, serve_bridge, session
from levada.framework import Actor, ActorSystem, Asks, Reply, handles, message

from ._levada import clock
from ._measure import Contender, Measure, Progress, Report, Workload, measure
from ._spark_asks import asks
from ._spark_streams import streams

__all__ = ["run"]

BATCH = 16_384
"""Rows of a batch: one block of the journal."""
SCHEMA = pa.schema([("id", pa.int64()), ("size", pa.int64()), ("body", pa.string())])


@message("bench.spark.timed")
class Timed:
    """A row that says when it was appended."""

    at: int
    """Nanoseconds of the clock of `time.monotonic_ns`."""


@message("bench.spark.times")
class Times(Asks[list[int]]):
    """Asks for the times of the next rows, when so many have come."""

    rows: int


class Watch(Actor[Timed | Times]):
    """Notes how many nanoseconds rows took."""

    def __attrs_post_init__(self) -> None:
        self._took: list[int] = []
        self._wanted = 0
        self._reply: Reply[list[int]] | None = None

    @handles
    def times(self, m: Times) -> None:
        """Begin to note."""
        self._took, self._wanted, self._reply = [], m.rows, self.reply_later()

    @handles
    def note(self, m: Timed) -> None:
        """Take a row."""
        self._took.append(time.monotonic_ns() - m.at)
        if len(self._took) == self._wanted and self._reply is not None:
            self._reply.send(self._took)


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
            self._system, self._bridge = system, bridge
            self.rows = 0
            self._ready.set()
            await self._stop.wait()

    def fill(self, rows: int) -> None:
        """Append rows until so many can be read."""
        trio.from_thread.run(self._fill, rows, trio_token=self._token)

    async def _fill(self, rows: int) -> None:
        if self.rows < rows:
            for batch in _batches(self.rows, rows):
                await self._source.append(batch)
            self.rows = rows

    def watched(self, early: str, late: str) -> None:
        """Make two mailboxes, and let an actor watch the second."""
        trio.from_thread.run(self._watched, early, late, trio_token=self._token)

    async def _watched(self, early: str, late: str) -> None:
        self._early: Mailbox[Timed] = await self._bridge.mailbox(early, Timed)
        await self._bridge.mailbox(late, Timed)
        self._watch = self._system.spawn(Watch)
        self._bridge.subscribe(late, self._watch, group="watch", keyed=False)

    def trickle(self, rows: int) -> list[int]:
        """Append rows to the first at 1,000 a second; return the nanoseconds until the actor behind the second had each."""
        return trio.from_thread.run(self._trickle, rows, trio_token=self._token)

    async def _trickle(self, rows: int) -> list[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._append_slowly, rows)
            return await self._watch.ask(Times(rows), timeout=300.0)  # the query may have failed

    async def _append_slowly(self, rows: int) -> None:
        due = trio.current_time()
        for _ in range(rows // 10):
            await self._early.append([Timed(time.monotonic_ns())] * 10)
            due += 0.01
            await trio.sleep_until(due)

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


def _batches(first: int, end: int) -> Iterator[pa.RecordBatch]:
    """Make rows whose texts all differ, so that a file stores each."""
    for begin in range(first, end, BATCH):
        numbers = range(begin, min(begin + BATCH, end))
        names = [b"%d" % number for number in numbers]
        bodies = [(hashlib.sha512(name).hexdigest() + hashlib.sha384(name).hexdigest())[:200] for name in names]
        ids = pa.array(numbers, pa.int64())
        yield pa.record_batch([ids, ids, pa.array(bodies)], schema=SCHEMA)


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
            stream_workloads, stream_runs = streams(spark, actors, _batches, folder)
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
