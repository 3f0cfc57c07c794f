"""Streaming queries as actors, on a real Spark: start, progress, end, failure, restart from the checkpoint, and stopping at any moment."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from pyspark.errors import PySparkException
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamWriter,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)

from levada.actors.console import View, Viewer
from levada.actors.metrics import Metrics
from levada.actors.spark.query import (
    AwaitAvailable,
    GetProgress,
    Query,
    QueryEnded,
    QueryEvent,
    QueryFailed,
    QueryProgress,
    QueryStarted,
)
from levada.framework import (
    Actor,
    ActorRestarted,
    ActorSystem,
    Failed,
    Killed,
    Normal,
    Receiver,
    Shutdown,
    channel,
    handles,
    restart,
)
from levada.framework.errors import ActorStopped
from levada.framework.testing import Probe

# A first query on a busy machine compiles its plan for several seconds.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(180)]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", seed=0) as system:
        yield system


def lines(
    folder: Path, checkpoint: Path, sink: Callable[[Any, int], None], *, once: bool = False
) -> Callable[[Any], Any]:
    """A query over text files: what it reads is decided by what the test writes, and each file is read once."""
    folder.mkdir(exist_ok=True)

    def start(spark: Any) -> Any:
        writer = spark.readStream.text(str(folder)).writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(checkpoint))
        return writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")

    return start


def put(folder: Path, name: str, *text: str) -> None:
    folder.mkdir(exist_ok=True)
    beside = folder.parent / name
    beside.write_text("".join(f"{line}\n" for line in text))
    beside.rename(folder / name)


def rate(spark: Any) -> Any:
    return spark.readStream.format("rate").load().writeStream.format("noop")


class Sink:
    """What reached the end of a query, as sorted lines by batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}
        self.fail_at: int | None = None

    def __call__(self, frame: Any, batch: int) -> None:
        if batch == self.fail_at:
            self.fail_at = None
            raise ValueError("the sink is out of order")
        self.batches[batch] = sorted(row.value for row in frame.collect())

    @property
    def rows(self) -> list[str]:
        return sorted(line for batch in self.batches.values() for line in batch)


async def events_of(receiver: Receiver[QueryEvent]) -> list[QueryEvent]:
    return [event async for event in receiver]


async def test_a_query_that_ends_by_itself_tells_all_of_its_progress_and_ends_normally(
    spark: Any, system: ActorSystem, tmp_path: Path
) -> None:
    sink = Sink()
    put(tmp_path / "in", "1.txt", "a", "b", "c")
    sender, receiver = channel(QueryEvent)
    query = system.spawn(
        partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink, once=True), progress=sender)
    )
    async with receiver:
        events = await events_of(receiver)
    assert await query.terminated() == Normal()
    assert sink.batches == {0: ["a", "b", "c"]}
    first, *middle, last = events
    assert isinstance(first, QueryStarted)
    assert last == QueryEnded(first.query, first.run)
    progress = [event for event in middle if isinstance(event, QueryProgress)]
    assert progress == middle
    assert [(p.query, p.run, p.batch, p.rows, p.watermark) for p in progress if p.rows] == [
        (first.query, first.run, 0, 3, None)
    ]
    assert progress[0].seconds > 0
    assert 0 < progress[0].phases["addBatch"] <= progress[0].seconds
    assert spark.streams.active == []


async def test_await_available_answers_when_all_has_reached_the_sink(
    spark: Any, system: ActorSystem, tmp_path: Path
) -> None:
    sink = Sink()
    query = system.spawn(partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink)))
    seen = []
    for number in range(3):
        put(tmp_path / "in", f"{number}.txt", f"line {number}")
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(partial(query.ask, AwaitAvailable(), timeout=300.0))
        seen.append(list(sink.rows))
    assert seen == [["line 0"], ["line 0", "line 1"], ["line 0", "line 1", "line 2"]]
    progress = await query.ask(GetProgress(), timeout=300.0)
    assert progress is not None
    assert progress.batch >= 2
    # A dashboard shows the same.
    viewer = Viewer(system)
    (row,) = (await viewer.look(View(page="queries")))["rows"]
    viewer.close()
    assert (row["path"], row["report"]["name"], row["report"]["batch"] >= 2) == (query.path, progress.query, True)
    # So does an exporter, without the id.
    series = {metric.name: values for metric, values in (await Metrics(system).collect()).items()}
    assert series["levada_spark_batch"] == {("unnamed",): row["report"]["batch"]}
    json.dumps(row)
    query.stop()
    assert await query.terminated() == Shutdown()
    assert spark.streams.active == []
    with pytest.raises(ActorStopped):
        await query.ask(AwaitAvailable(), timeout=300.0)


async def test_a_failing_query_is_the_failure_of_its_actor_in_plain_values(
    spark: Any, system: ActorSystem, tmp_path: Path
) -> None:
    sink = Sink()
    sink.fail_at = 0
    put(tmp_path / "in", "1.txt", "a")
    sender, receiver = channel(QueryEvent)
    query = system.spawn(partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink), progress=sender))
    async with receiver:
        events = await events_of(receiver)
    reason = await query.terminated()
    assert isinstance(reason, Failed)
    error = reason.error
    assert isinstance(error, QueryFailed)
    started, ended = events[0], events[-1]
    assert isinstance(started, QueryStarted)
    assert isinstance(ended, QueryEnded)
    assert (error.query, error.run, error.condition) == (started.query, started.run, "STREAM_FAILED")
    assert str(error).partition("\n")[0] == "ValueError: the sink is out of order"
    assert error.__cause__ is None
    assert error.__context__ is None
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.condition) == (str(error), error.condition)
    assert ended.error is not None
    assert "the sink is out of order" in ended.error


async def test_watchers_and_linked_actors_learn_of_the_failure(spark: Any, system: ActorSystem, tmp_path: Path) -> None:
    sink = Sink()
    sink.fail_at = 0
    put(tmp_path / "in", "1.txt", "a")

    class Owner(Actor[str]):
        def started(self) -> None:
            self.link(query)

        @handles
        def take(self, m: str) -> None:
            pass

    query = system.spawn(partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink)))
    owner = system.spawn(Owner)
    reason = await query.terminated()
    assert isinstance(reason, Failed)
    assert await owner.terminated() == reason


async def test_its_supervisor_starts_it_again_from_its_checkpoint(
    spark: Any, system: ActorSystem, tmp_path: Path
) -> None:
    sink = Sink()
    sink.fail_at = 1
    put(tmp_path / "in", "1.txt", "a")
    probe = Probe(system)
    system.events.subscribe(ActorRestarted, probe.ref)
    sender, receiver = channel(QueryEvent)
    query = system.spawn(
        partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink), progress=sender), supervise=restart()
    )
    async with receiver, trio.open_nursery() as nursery:
        events: list[QueryEvent] = []

        async def collect() -> None:
            events.extend(await events_of(receiver))

        nursery.start_soon(collect)
        await query.ask(AwaitAvailable(), timeout=300.0)
        put(tmp_path / "in", "2.txt", "b")
        restarted = await probe.expect(ActorRestarted, within=60.0)
        assert restarted.ref is query
        put(tmp_path / "in", "3.txt", "c")
        await query.ask(AwaitAvailable(), timeout=300.0)
        query.stop()
    # Each line once, though one batch was tried twice.
    assert sink.rows == ["a", "b", "c"]
    starts = [event for event in events if isinstance(event, QueryStarted)]
    assert len({start.query for start in starts}) == 1
    assert len({start.run for start in starts}) == len(starts) == 2
    assert [event.error is None for event in events if isinstance(event, QueryEnded)] == [False, True]


class Unsettled:
    """A streaming query whose ``processAllAvailable`` returns without a word when the query fails, as Spark's may."""

    id = runId = name = "unsettled"  # noqa: N815 - a name of Spark
    isActive = False  # noqa: N815

    def __init__(self) -> None:
        self.waited_for, self.ended, self.stopped = threading.Event(), threading.Event(), threading.Event()

    def awaitTermination(self) -> None:  # noqa: N802
        self.ended.wait()
        if not self.stopped.is_set():
            raise PySparkException("no room on the disk")

    def processAllAvailable(self) -> None:  # noqa: N802
        self.waited_for.set()
        self.stopped.wait()

    def stop(self) -> None:
        self.stopped.set()
        self.ended.set()


async def test_who_waits_for_a_query_that_is_started_again_learns_why(system: ActorSystem) -> None:
    """Also who asked while the call for others was under way."""
    runs = [Unsettled(), Unsettled()]
    left: Iterator[Any] = iter(runs)
    session: Any = SimpleNamespace()
    query = system.spawn(partial(Query, session, lambda spark: next(left)), supervise=restart())
    told: list[str] = []

    async def wait() -> None:
        with pytest.raises(QueryFailed) as caught:
            await query.ask(AwaitAvailable(), timeout=300.0)
        told.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.to_thread.run_sync(runs[0].waited_for.wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        runs[0].ended.set()
    assert told == ["no room on the disk"] * 2
    query.stop()
    assert await query.terminated() == Shutdown()


async def test_what_cannot_start_fails_at_once(spark: Any, system: ActorSystem) -> None:
    missing = system.spawn(
        Query, spark, lambda spark: spark.readStream.format("no.such.source").load().writeStream.format("noop")
    )
    wrong = system.spawn(Query, spark, lambda spark: spark.no_such_thing)
    reasons = [await missing.terminated(), await wrong.terminated()]
    assert [type(getattr(reason, "error", None)) for reason in reasons] == [QueryFailed, AttributeError]
    assert "no.such.source" in str(reasons[0])


async def test_sources_and_sinks_are_those_of_the_session_that_was_given(
    spark: Any, system: ActorSystem, tmp_path: Path
) -> None:
    """Spark looks them up in the session that is active in the thread, and else in the first one that there was."""

    class Letters(DataSource):  # type: ignore[misc]  # mypy is not shown pyspark
        @classmethod
        def name(cls) -> str:
            return "letters"

        def schema(self) -> str:
            return "value string"

        def simpleStreamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
            return LettersReader()

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            return LettersWriter()

    class LettersReader(SimpleDataSourceStreamReader):  # type: ignore[misc]
        def initialOffset(self) -> dict[str, int]:  # noqa: N802
            return {"at": 0}

        def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[str]], dict[str, int]]:
            return iter(()), start

        def readBetweenOffsets(self, start: Any, end: Any) -> Iterator[tuple[str]]:  # noqa: N802
            return iter(())

    class LettersWriter(DataSourceStreamWriter):  # type: ignore[misc]
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            return WriterCommitMessage()

    def copy(spark: Any) -> Any:
        writer = spark.readStream.format("letters").load().writeStream.format("letters")
        return writer.option("checkpointLocation", str(tmp_path))

    own = spark.newSession()
    own.dataSource.register(Letters)
    query = system.spawn(Query, own, copy)
    # Answered by a query that has started.
    await query.ask(GetProgress(), timeout=150.0)
    query.stop()
    assert await query.terminated() == Shutdown()


async def test_a_query_that_somebody_else_stops_is_no_failure(spark: Any, system: ActorSystem) -> None:
    sender, receiver = channel(QueryEvent)
    query = system.spawn(partial(Query, spark, rate, progress=sender))
    async with receiver:
        started = await receiver.receive()
        assert isinstance(started, QueryStarted)
        await trio.to_thread.run_sync(lambda: spark.streams.get(started.query).stop())
        assert await query.terminated() == Normal()
        assert [event async for event in receiver][-1] == QueryEnded(started.query, started.run)


async def test_progress_goes_to_an_actor_too(spark: Any, system: ActorSystem, tmp_path: Path) -> None:
    probe = Probe(system)
    put(tmp_path / "in", "1.txt", "a", "b")
    start = lines(tmp_path / "in", tmp_path / "at", Sink(), once=True)
    query = system.spawn(partial(Query, spark, start, progress=probe.ref))
    started = await probe.expect(QueryStarted, within=60.0)
    progress = await probe.expect(QueryProgress, within=60.0)
    ended = await probe.fish(QueryEnded, within=60.0)
    assert (started.run, progress.rows, ended.error) == (progress.run, 2, None)
    assert await query.terminated() == Normal()


async def test_who_waits_for_a_query_that_is_killed_is_told(spark: Any, system: ActorSystem, tmp_path: Path) -> None:
    in_sink, go_on = threading.Event(), threading.Event()

    def held(frame: Any, batch: int) -> None:
        in_sink.set()
        go_on.wait()

    put(tmp_path / "in", "1.txt", "a")
    query = system.spawn(Query, spark, lines(tmp_path / "in", tmp_path / "at", held))
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(ActorStopped):
                await query.ask(AwaitAvailable(), timeout=300.0)

        nursery.start_soon(wait)
        await trio.to_thread.run_sync(in_sink.wait)
        query.kill()
        # A batch in a function of the driver cannot be interrupted; the query ends with it.
        go_on.set()
        assert await query.terminated() == Killed()
    assert spark.streams.active == []


@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
async def test_however_the_actor_ends_the_query_is_stopped(spark: Any, how: str) -> None:
    with trio.CancelScope() as scope:
        async with ActorSystem() as own:
            query = own.spawn(Query, spark, rate)
            await query.ask(GetProgress(), timeout=300.0)
            assert len(spark.streams.active) == 1
            if how == "cancel":
                scope.cancel()
            else:
                query.stop() if how == "stop" else query.kill()
                await query.terminated()
    assert spark.streams.active == []


async def test_a_query_that_comes_up_after_its_actor_was_killed_is_stopped(spark: Any, system: ActorSystem) -> None:
    about_to, go_on, is_up = threading.Event(), threading.Event(), threading.Event()
    up = []

    def slow(spark: Any) -> Any:
        about_to.set()
        go_on.wait()
        up.append(rate(spark).start())
        is_up.set()
        return up[0]

    query = system.spawn(Query, spark, slow)
    await trio.to_thread.run_sync(about_to.wait)
    query.kill()
    await query.terminated()
    go_on.set()
    await trio.to_thread.run_sync(is_up.wait)
    # It is stopped by the thread that started it.
    await trio.to_thread.run_sync(up[0].awaitTermination)
    assert spark.streams.active == []


async def test_a_receiver_that_closes_does_not_end_the_query(spark: Any, system: ActorSystem, tmp_path: Path) -> None:
    sink = Sink()
    sender, receiver = channel(QueryEvent)
    query = system.spawn(partial(Query, spark, lines(tmp_path / "in", tmp_path / "at", sink), progress=sender))
    receiver.close()
    put(tmp_path / "in", "1.txt", "a")
    await query.ask(AwaitAvailable(), timeout=300.0)
    assert sink.rows == ["a"]
