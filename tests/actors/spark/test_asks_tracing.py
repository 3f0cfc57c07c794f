"""Requests of Spark's processes belong to the span of the code that makes them, or else to the trace that the job has given them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import contextvars

import pyarrow as pa
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import SpanKind
from tests.actors.spans import Spans, is_below, recorded

from levada.actors.journal import columns_of
from levada.actors.rsocket import Request
from levada.actors.spark import serve_bridge
from levada.actors.spark.asks import AskRows, RemoteActor, ask, ask_batches
from levada.actors.spark.desk import Desk as Desk_
from levada.actors.spark.desk import serve_asks
from levada.actors.spark.protocol import DeliverBatch, MeasureRows, StageHead
from levada.actors.spark.source import Options
from levada.actors.spark.worker import RemoteMailbox
from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.errors import ConfigurationError
from levada.framework.tracing import TraceHeaders

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@message("tests.spark.tracing.Line")
class Line:
    text: str


if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Desk(Actor[AskRows | MeasureRows]):
    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        return pa.record_batch({"doubled": pa.array([2 * n for n in m.rows.column("id").to_pylist()], pa.int64())})

    @handles
    def one(self, m: MeasureRows) -> int:
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
        assert await in_thread(partial(ask, actor, MeasureRows(0, 7, 0, 0))) == 0
        batches = [pa.record_batch({"id": [1, 2]})]
        (answer,) = await in_thread(lambda: list(ask_batches(actor, batches)))
        assert answer.column("doubled").to_pylist() == [2, 4]
    job = spans.one("job")
    for route, question in (("ask/desk", "Desk/MeasureRows"), ("ask/desk/batch", "Desk/AskRows")):
        served = spans.one(route, SpanKind.SERVER)
        assert is_below(served, job)
        asked = spans.one(question, SpanKind.CLIENT)
        assert is_below(asked, served)
        assert is_below(spans.one(question, SpanKind.SERVER), asked)


class Executor:
    """A function in a task of Spark: OpenTelemetry, and no system around."""

    def __init__(self, spans: Spans) -> None:
        self._tracer = spans.tracer

    async def run(self, name: str, function: Any) -> Any:
        """Call it within a span, in a thread that knows nothing of this one."""

        def in_span() -> Any:
            with self._tracer.start_as_current_span(name):
                return function()

        return await in_thread(lambda: contextvars.Context().run(in_span))


async def test_a_span_in_a_task_is_the_parent_of_the_handler_of_its_question(spans: Spans, tmp_path: Path) -> None:
    executor = Executor(spans)
    async with spans.system() as system, serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)}) as desk:
        with spans.tracer.start_as_current_span("job"):
            actor = RemoteActor("desk", desk.address)
        assert await executor.run("single", partial(ask, actor, MeasureRows(0, 7, 0, 0), idempotent=True)) == 0
        batches = [pa.record_batch({"id": [1, 2]})]
        await executor.run("batch", lambda: list(ask_batches(actor, batches)))
    for name, route in (("single", "ask/desk"), ("batch", "ask/desk/batch")):
        assert is_below(spans.one(route, SpanKind.SERVER), spans.one(name))


async def test_rows_that_a_task_reads_and_writes_belong_to_its_span_or_to_the_given_trace(
    spans: Spans, tmp_path: Path
) -> None:
    executor, columns = Executor(spans), columns_of(Line)
    rows = columns.encode([Line("a"), Line("b")])
    async with spans.system() as system, serve_bridge(system, tmp_path / "bridge") as bridge:
        await bridge.mailbox("lines", Line)
        given = TraceHeaders(PARENT)
        mailbox = RemoteMailbox(bridge.address, "lines", trace=given)

        def write() -> None:
            assert mailbox.stage(StageHead("q", 0, 0, 1), [rows]) == 2
            mailbox.ask(DeliverBatch("q", 0, {0: 1}, {0: 2}))
            mailbox.append(rows)

        def read() -> int:
            found = mailbox.describe()
            blocks = mailbox.read(0, 0, 4, epoch=found.epoch, schema=columns.schema)
            return sum(block.num_rows for block in blocks)

        await in_thread(lambda: contextvars.Context().run(write))
        assert await executor.run("task", read) == 4
    task = spans.one("task")
    for route in ("mailbox/lines", "mailbox/lines/stage", "mailbox/lines/append"):
        parent = spans.named(route, SpanKind.SERVER)[0].parent
        assert parent is not None
        assert (parent.trace_id, parent.span_id) == (0xA * (16**32 - 1) // 15, 0xB * (16**16 - 1) // 15)
    assert is_below(spans.one("mailbox/lines/read", SpanKind.SERVER), task)
    assert is_below(spans.named("mailbox/lines", SpanKind.SERVER)[-1], task)
    staged = spans.one("Journal/StageRows", SpanKind.SERVER)
    assert staged.context is not None
    assert staged.context.trace_id == 0xA * (16**32 - 1) // 15


async def test_a_bridge_that_does_not_trace_is_sent_no_context(
    spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, requests = Executor(spans), list[Request]()
    answer = Desk_.answer

    def note(desk: Desk_, request: Request) -> Any:
        requests.append(request)
        return answer(desk, request)

    monkeypatch.setattr(Desk_, "answer", note)
    async with ActorSystem() as system, serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)}) as desk:
        assert RemoteActor("desk", desk.address).trace is None
        actor = RemoteActor("desk", desk.address, trace=TraceHeaders(PARENT))
        assert await executor.run("task", partial(ask, actor, MeasureRows(0, 0, 0, 0))) == 0
    assert [request.route for request in requests] == ["hello", "ask/desk"]
    assert [request.tracing for request in requests] == [None, None]


async def test_a_process_that_gives_no_context_is_served_by_a_traced_bridge(spans: Spans, tmp_path: Path) -> None:
    async with spans.system() as system, serve_asks(system, tmp_path / "asks", {"desk": system.spawn(Desk)}) as desk:
        actor = RemoteActor("desk", desk.address)
        assert actor.trace is None
        assert await in_thread(partial(ask, actor, MeasureRows(0, 7, 0, 0))) == 0
    assert spans.one("ask/desk", SpanKind.SERVER).parent is None


def test_the_option_of_a_source_is_checked() -> None:
    given = {"address": "unix:///x", "mailbox": "lines"}
    assert Options.read(given).remote.trace is None
    assert Options.read({**given, "traceparent": PARENT}).remote.trace == TraceHeaders(PARENT)
    with pytest.raises(ConfigurationError, match="wanted the header of W3C Trace Context"):
        Options.read({**given, "traceparent": "mine"})


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
                    without = len(spans.named("ask/desk/batch", SpanKind.SERVER))

                    def in_span(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("task")
                        with tracer.start_as_current_span("task") as task:
                            for answer in ask_batches(actor, batches):
                                yield pa.record_batch({"task": [task.get_span_context().span_id >> 1] * len(answer)})

                    frame = spark.range(100).repartition(2).mapInArrow(in_span, "task long")
                    tasks.update(row.task for row in await in_thread(frame.collect))
                    served.extend(spans.named("ask/desk/batch", SpanKind.SERVER)[without:])
                    assert without >= 2

    served, tasks = list[ReadableSpan](), set[int]()
    trio.run(main)
    job = spans.one("job")
    below_tasks = [span for span in spans.named("ask/desk/batch", SpanKind.SERVER) if span in served]
    below_job = [span for span in spans.named("ask/desk/batch", SpanKind.SERVER) if span not in served]
    assert all(is_below(span, job) for span in below_job)
    assert len(tasks) == 2
    assert {span.parent.span_id >> 1 for span in below_tasks if span.parent} == tasks
