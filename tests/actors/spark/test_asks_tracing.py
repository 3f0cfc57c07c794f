"""Questions of executors belong to the trace in which their `RemoteActor` was made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import pyarrow as pa
from opentelemetry.trace import SpanKind
from tests.actors.spans import Spans, is_below, recorded

from levada.actors.spark.asks import AskRows, RemoteActor, ask, ask_batches
from levada.actors.spark.desk import serve_asks
from levada.actors.spark.protocol import Measure
from levada.framework import Actor, ActorSystem, handles
from levada.framework.tracing import TraceHeaders

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Desk(Actor[AskRows | Measure]):
    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        return pa.record_batch({"doubled": pa.array([2 * n for n in m.rows.column("id").to_pylist()], pa.int64())})

    @handles
    def one(self, m: Measure) -> int:
        return m.partition


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


async def in_thread(function: Any) -> Any:
    return await trio.to_thread.run_sync(function)


async def test_questions_of_a_thread_are_served_below_the_context_of_their_remote_actor(
    spans: Spans, tmp_path: Path
) -> None:
    async with spans.system() as system, serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)}) as desk:
        with spans.tracer.start_as_current_span("job"):
            actor = RemoteActor("desk", desk.address)
        assert await in_thread(partial(ask, actor, Measure(0, 7, 0, 0))) == 0
        batches = [pa.record_batch({"id": [1, 2]})]
        (answer,) = await in_thread(lambda: list(ask_batches(actor, batches)))
        assert answer.column("doubled").to_pylist() == [2, 4]
    job = spans.one("job")
    for route, question in (("ask/desk", "Desk/Measure"), ("ask/desk/batch", "Desk/AskRows")):
        served = spans.one(route, SpanKind.SERVER)
        assert is_below(served, job)
        asked = spans.one(question, SpanKind.CLIENT)
        assert is_below(asked, served)
        assert is_below(spans.one(question, SpanKind.SERVER), asked)


async def test_without_tracing_a_remote_actor_has_no_context(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)}) as desk:
        actor = RemoteActor("desk", desk.address)
        assert actor.trace is None
        headers = TraceHeaders("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        traced = RemoteActor("desk", desk.address, trace=headers)
        assert await in_thread(partial(ask, traced, Measure(0, 0, 0, 0))) == 0


@pytest.mark.release
def test_questions_of_sparks_tasks_are_served_below_the_job(spans: Spans, tmp_path: Path, spark: SparkSession) -> None:
    async def main() -> None:
        async with spans.system() as system:
            serving = serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)})
            async with serving as desk:
                with spans.tracer.start_as_current_span("job"):
                    actor = RemoteActor("desk", desk.address)

                    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                        return ask_batches(actor, batches)

                    frame = spark.range(100).repartition(2).mapInArrow(doubled, "doubled long")
                    rows = await in_thread(frame.collect)
                    assert sorted(row.doubled for row in rows) == list(range(0, 200, 2))

    trio.run(main)
    job, served = spans.one("job"), spans.named("ask/desk/batch", SpanKind.SERVER)
    assert len(served) >= 2
    assert all(is_below(span, job) for span in served)
