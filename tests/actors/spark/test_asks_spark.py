"""Questions from Spark's own workers: functions of a data frame that ask actors in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import pyarrow as pa
import trio
from pyspark.sql.functions import pandas_udf

from levada.actors.spark.asks import AskRows, RemoteActor, ask_batches, ask_many

# Message classes must be importable in the workers, which this module is not: these two come with the package.
from levada.actors.spark.protocol import MeasureRows
from levada.framework import Actor, Ref, handles

pandas = pytest.importorskip("pandas")
pytestmark = [pytest.mark.ci, pytest.mark.timeout(180)]


class Doubler(Actor[AskRows | MeasureRows]):
    most: list[int]
    refused: int = -1
    gate: trio.Event | None = None

    def started(self) -> None:
        self._open = 0

    @handles
    def rows(self, m: AskRows) -> None:
        reply = self.reply_later()
        numbers = m.rows.column("id").to_pylist()
        if self.refused in numbers:
            raise ValueError(f"no {self.refused} here")
        self._open += 1
        self.most[0] = max(self.most[0], self._open)

        async def answer() -> None:
            # All that are on their way come in first.
            await (trio.testing.wait_all_tasks_blocked(0.005) if self.gate is None else self.gate.wait())
            self._open -= 1
            reply.send(pa.record_batch({"doubled": pa.array([2 * n for n in numbers], pa.int64())}))

        self.start_soon(answer)

    @handles
    def one(self, m: MeasureRows) -> int:
        return m.partition * 2


def expose(actors: Any, **settings: Any) -> tuple[RemoteActor, list[int], Ref[Any]]:
    most = [0]

    def make() -> Ref[Any]:
        ref: Ref[Any] = actors.system.spawn(partial(Doubler, most, **settings), name="doubler")
        actors.bridge.expose("doubler", ref)
        return ref

    return RemoteActor("doubler", actors.bridge.address), most, actors.do(make)


def in_batches(actor: RemoteActor, **settings: Any) -> Any:
    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return ask_batches(actor, batches, **settings)

    return doubled


@pytest.fixture
def numbers(spark: Any) -> Iterator[Any]:
    """Two partitions of ten batches each."""
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    yield spark.range(0, 2_000, numPartitions=2)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)


def test_rows_of_a_data_frame_go_through_an_actor_in_their_order(actors: Any, numbers: Any) -> None:
    there, most, _ = expose(actors)
    doubled = numbers.mapInArrow(in_batches(there, window=3), "doubled long")
    assert [row.doubled for row in doubled.collect()] == [2 * n for n in range(2_000)]
    # Two tasks, three batches each; never more.
    assert 1 < most[0] <= 6


def test_single_questions_from_a_data_frame(actors: Any, numbers: Any) -> None:
    there, _, _ = expose(actors)

    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            questions = (MeasureRows(number, 0, 0, 0) for number in batch.column("id").to_pylist())
            yield pa.record_batch({"doubled": pa.array(ask_many(there, questions, window=64), pa.int64())})

    answers = numbers.mapInArrow(doubled, "doubled long").collect()
    assert [row.doubled for row in answers] == [2 * n for n in range(2_000)]


def test_functions_of_pandas_ask_too(actors: Any, spark: Any) -> None:
    """Frames and series are columns in Arrow on the way there and back."""
    there, _, _ = expose(actors)

    def in_frames(frames: Iterator[Any]) -> Iterator[Any]:
        batches = (pa.RecordBatch.from_pandas(frame, preserve_index=False) for frame in frames)
        return (answer.to_pandas() for answer in ask_batches(there, batches))

    def in_series(ids: Any) -> Any:
        [answer] = ask_batches(there, [pa.record_batch({"id": pa.array(ids)})])
        return answer.column("doubled").to_pandas()

    # Spark looks there to learn which of its kinds of function this is.
    in_series.__annotations__ = {"ids": pandas.Series, "return": pandas.Series}
    few = spark.range(0, 200, numPartitions=1)
    mapped = few.mapInPandas(in_frames, "doubled long").selectExpr("doubled AS id")
    twice = cast("Any", pandas_udf)(in_series, "long")
    assert [row[0] for row in mapped.select(twice("id")).collect()] == [4 * n for n in range(200)]


def failure(numbers: Any, function: Any) -> str:
    """Run it in one task, which Spark tries twice, each time in a new worker."""
    frame = numbers.coalesce(1).mapInArrow(function, "doubled long")
    with pytest.raises(Exception, match=r"PythonException|doubler") as caught:
        frame.collect()
    return str(caught.value)


def test_a_dead_actor_fails_the_task_and_is_named(actors: Any, numbers: Any) -> None:
    there, _, ref = expose(actors)
    actors.do(ref.stop)
    actors.do(ref.terminated)
    text = failure(numbers, in_batches(there, idempotent=True))
    assert "levada.framework.errors.ActorStopped: /doubler has stopped (shutdown)" in text


def test_a_failing_handler_fails_the_task_with_its_text(actors: Any, numbers: Any) -> None:
    there, _, _ = expose(actors, refused=1321)
    text = failure(numbers, in_batches(there))
    # Whichever question is first told of it: the one that failed, or one that waited behind it.
    assert (
        "failed on this question: ValueError('no 1321 here')" in text
        or "/doubler failed: ValueError('no 1321 here')" in text
    )


def test_a_slow_actor_fails_the_task_at_the_deadline(actors: Any, numbers: Any) -> None:
    gate = trio.Event()
    there, _, _ = expose(actors, gate=gate)
    text = failure(numbers, in_batches(there, timeout=0.1))
    assert "levada.framework.errors.AskTimeout: doubler did not answer within 0.1 s" in text
    actors.do(gate.set)


def test_a_limit_leaves_the_rest_unasked(actors: Any, numbers: Any) -> None:
    there, _, ref = expose(actors)
    doubled = numbers.mapInArrow(in_batches(there, window=2), "doubled long")
    assert [row.doubled for row in doubled.limit(3).collect()] == [0, 2, 4]
    assert actors.do(lambda: ref.is_alive)
