"""Asks from Spark's workers to an actor in this process: rows of ``levada bench spark``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import trio

from levada.actors.spark import AskRows, Bridge, RemoteActor, ask, ask_batches, ask_many, serve_bridge

# A message class of the package: those of a benchmark are not importable in Spark's workers.
from levada.actors.spark.protocol import MeasureRows as Question
from levada.actors.spark.worker import connection
from levada.framework import Actor, ActorSystem, handles

from ._levada import clock
from ._measure import Measure, Workload

__all__ = ["asks"]

ALONE = 64
"""Questions in flight of the client without Spark."""
CLIENT = """
import sys
from benchmarks._spark_asks import alone
print(alone(sys.argv[1], int(sys.argv[2])))
"""


class Echo(Actor[AskRows | Question]):
    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        return m.rows

    @handles
    def one(self, m: Question) -> int:
        return m.partition


def alone(address: str, n: int) -> float:
    """Ask `n` questions by the blocking client, in this process; returns the nanoseconds of one."""
    peer, question = connection(address), Question(1, 0, 0, 0)
    waiting: deque[Any] = deque()
    seconds = 0.0
    for count in (n // 10, n):  # the first time is to warm up
        start = clock()
        for _ in range(count):
            if len(waiting) >= ALONE:
                waiting.popleft().result(10)
            waiting.append(peer.start_request(question, route="ask/echo"))
        while waiting:
            waiting.popleft().result(10)
        seconds = clock() - start
    return seconds / n * 1e9


@contextmanager
def asks(spark: Any) -> Iterator[tuple[Sequence[Workload], Mapping[str, Measure]]]:
    """Give the workloads and how to run them, while an actor answers in another thread."""
    with tempfile.TemporaryDirectory() as folder, _actors(folder) as bridge:
        address = bridge.address
        there = RemoteActor("echo", address)

        def client(n: int) -> float:
            command = [sys.executable, "-c", CLIENT, address, str(n)]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

        rows = _job(spark, lambda batches: batches, _wide)
        workloads = (
            Workload(
                key="ask_batches",
                title="asks from mapInArrow, a batch each, a row",
                n=1_000_000,
                base=rows,
                base_name="mapInArrow identity",
                budget=2.5,
            ),
            Workload(
                key="ask_many",
                title="asks from mapInArrow, 256 in flight, each",
                n=40_000,
                base=client,
                base_name="blocking client, 64 in flight",
                budget=1 / 0.35,
            ),
            Workload(
                key="ask",
                title="asks from mapInArrow, one at a time, each",
                n=4_000,
                base=client,
                base_name="blocking client, 64 in flight",
            ),
        )
        yield (
            workloads,
            {
                "ask_batches": _job(spark, lambda batches: ask_batches(there, batches), _wide),
                "ask_many": _job(spark, _in_window(there), _narrow),
                "ask": _job(spark, _one_at_a_time(there), _narrow),
            },
        )


@contextmanager
def _actors(folder: str) -> Iterator[Bridge]:
    ready, token, stop, bridges = threading.Event(), list[trio.lowlevel.TrioToken](), trio.Event(), list[Bridge]()

    async def main() -> None:
        async with ActorSystem() as system, serve_bridge(system, f"{folder}/bridge") as bridge:
            bridge.expose("echo", system.spawn(Echo))
            bridges.append(bridge)
            token.append(trio.lowlevel.current_trio_token())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    ready.wait()
    try:
        yield bridges[0]
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=token[0])
        thread.join()


def _wide(spark: Any, n: int) -> Any:
    """Rows of 220 bytes, as everywhere in these figures."""
    return spark.range(0, n, numPartitions=2).selectExpr("id", "id * 2 as size", "rpad('', 200, 'x') as body")


def _narrow(spark: Any, n: int) -> Any:
    return spark.range(0, n, numPartitions=2)


def _job(spark: Any, function: Callable[[Any], Any], frame: Callable[[Any, int], Any]) -> Measure:
    schema = "id long, size long, body string" if frame is _wide else "answer long"

    def run(n: int) -> float:
        mapped = frame(spark, n).mapInArrow(function, schema)
        start = clock()
        mapped.write.format("noop").mode("overwrite").save()
        return (clock() - start) / n * 1e9

    return run


def _in_window(there: RemoteActor) -> Callable[[Any], Any]:
    def answered(batches: Any) -> Any:
        for batch in batches:
            questions = (Question(number, 0, 0, 0) for number in batch.column("id").to_pylist())
            yield pa.record_batch({"answer": pa.array(ask_many(there, questions), pa.int64())})

    return answered


def _one_at_a_time(there: RemoteActor) -> Callable[[Any], Any]:
    def answered(batches: Any) -> Any:
        for batch in batches:
            answers = [ask(there, Question(number, 0, 0, 0)) for number in batch.column("id").to_pylist()]
            yield pa.record_batch({"answer": pa.array(answers, pa.int64())})

    return answered
