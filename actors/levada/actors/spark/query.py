"""A streaming query as an actor: started, watched, stopped and restarted like any other.

Example:
    >>> from levada.actors.spark.query import Query
    >>> def count(spark):  # doctest: +SKIP
    ...     lines = spark.readStream.format("mailbox").option("mailbox", "logs").load()
    ...     return lines.writeStream.format("noop").option("checkpointLocation", "/var/lib/desk/count")
    >>> query = system.spawn(Query, spark, count, supervise=restart(initial_backoff=1.0, max_backoff=60.0))  # doctest: +SKIP

How it works:

* A thread in ``awaitTermination`` waits for the end of the query: it uses no CPU, wakes at once, and gets the exception.
  Spark's listeners also report the end, but their queue drops events when it is full, and an actor that misses its own end hangs.
* A ``StreamingQueryListener`` reports progress, so nothing polls; it is registered only if `Query.progress` is given. Events can be lost: if
  Spark's queue drops one, or if `BACKLOG` others wait for a slow receiver.
* Threads make all calls into the JVM. A cancelled call continues in its thread until Spark answers. If a query starts after its actor has
  ended, the thread that started it stops it.
* Spark's exceptions refer to Java objects, which cannot be sent and do not outlive the JVM. So each becomes a `QueryFailed` of plain values.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import trio

try:
    import pyspark as _  # noqa: F401 - to name the missing package
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.actors.spark.query needs pyspark: pip install 'levada[spark]'", name="pyspark"
    ) from missing

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    JStreamingQueryListener,
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from levada.framework import Asks, Reason, Ref, Reply, Sender, handles, message
from levada.framework.embedding import DescribedActor
from levada.framework.errors import ActorStopped, ChannelError, LevadaError, MailboxFull
from levada.framework.text import printable

from .root_cause import explained

__all__ = [
    "AwaitAvailable", "GetProgress", "Query", "QueryEnded", "QueryEvent", "QueryFailed", "QueryProgress",
    "QueryStarted",
]  # fmt: skip

T = TypeVar("T")

logger = logging.getLogger("levada.actors.spark")

BACKLOG = 64
"""The most events that wait for a slow receiver; then the oldest is dropped."""
LAST_EVENTS = 2.0
"""Seconds to wait, after the end of a query, for events in Spark's listener queue."""
THREADS = 4
"""The most threads of one query: one waits for its end, one for all `AwaitAvailable`, two make short calls."""


@attrs.define(eq=False, slots=False, str=False)
class QueryFailed(LevadaError):
    """A streaming query could not start, or ended with an error. The first line of `detail` is the root cause; Spark's own text follows."""

    query: str = ""
    """Id of the query, the same after each start from one checkpoint; empty if it did not start."""
    run: str = ""
    """Id of this start."""
    condition: str = ""
    """Spark's name for the error, for example ``"STREAM_FAILED"``."""

    # Spark's text has many lines, with tracebacks of Python among them.
    def __str__(self) -> str:
        return "\n".join(printable(line, 10_000) for line in self.detail.splitlines())


@message("levada.spark.QueryStarted", frozen=True)
class QueryStarted:
    """A query has started."""

    query: str
    """Id, the same after each start from one checkpoint."""
    run: str
    """Id of this start."""
    name: str | None = None
    """The name given to ``queryName``."""


@message("levada.spark.QueryProgress", frozen=True)
class QueryProgress:
    """The work of one micro-batch; no rows if there was nothing to do."""

    query: str
    run: str
    name: str | None
    batch: int
    """Number of the micro-batch."""
    at: dt.datetime
    """When it began."""
    rows: int
    """Rows from all sources."""
    arrival_rate: float | None
    """Rows per second that arrived since the batch before; None if Spark has no figure yet."""
    processing_rate: float | None
    """Rows per second that this batch processed; None if Spark has no figure yet."""
    seconds: float
    """Duration of the whole batch."""
    phases: dict[str, float]
    """Seconds for each of Spark's phases: ``addBatch``, ``walCommit``, ``latestOffset``…"""
    watermark: dt.datetime | None
    """The watermark of event time; None if the query has none."""
    state_rows: int
    """Rows in the state of all operators."""
    state_bytes: int
    """Memory of the state."""
    late_rows: int
    """Rows that the watermark dropped in this batch."""


@message("levada.spark.QueryEnded", frozen=True)
class QueryEnded:
    """The last event of a run. The query may be started again."""

    query: str
    run: str
    error: str | None = None
    """Why it failed: the root cause in the first line, then Spark's own text; None if it did not fail."""


QueryEvent = QueryStarted | QueryProgress | QueryEnded
"""The messages that `Query.progress` gets."""


@attrs.frozen
class GetProgress(Asks[QueryProgress | None]):
    """Ask for the last progress of this run; None if there is none yet."""


@attrs.frozen
class AwaitAvailable(Asks[None]):
    """Wait until all rows that the sources have now are processed and committed to the sink.

    The ask fails with `QueryFailed` if the query fails first, and with `ActorStopped` if it ends first (with ``availableNow``, wait for the end of
    the actor instead). It is for tests and for the end of a program. With sources that never pause it may never be answered, so give the ask a
    time-out.
    """


@attrs.frozen(eq=False)
class _Outlet:
    """The receiver of a query's events. It stays open over all restarts of the query; `Query.stopping` closes it.

    The runtime ends a `Sender` in a field of an actor at each restart of the actor. So the query keeps it in this object.
    """

    to: Ref[QueryEvent] | Sender[QueryEvent]

    async def send(self, event: QueryEvent) -> None:
        await self.to.send(event)

    def close(self) -> None:
        if isinstance(self.to, Sender):
            self.to.finish_nowait()


class Query(DescribedActor[AwaitAvailable | GetProgress]):
    """Runs a streaming query for as long as it lives.

    The actor ends with the query: `Normal` when the query ends by itself (``availableNow``) or is stopped from outside, `Failed` with
    `QueryFailed` when it fails. If the actor ends first, it stops the query and waits up to the system's ``stop_timeout``; after that Spark
    stops it in the background. A supervised query restarts from its checkpoint if `start` sets a ``checkpointLocation``, otherwise from the
    beginning.

    Args:
        spark: the session.
        start: called in a thread at each start. It returns a writer, which is started, or a running query.
        progress: gets `QueryStarted`, `QueryProgress` and `QueryEnded`. The actor owns a `Sender`, and finishes it at its end.
            A slow receiver misses the oldest events; if it has ended, the query continues without it.
    """

    subject = "query"

    spark: SparkSession
    start: Callable[[SparkSession], DataStreamWriter | StreamingQuery]
    progress: Ref[QueryEvent] | Sender[QueryEvent] | None = None
    _outlet: _Outlet | None = attrs.field(init=False, default=None)
    """Takes over `progress`."""
    _run: _Run | None = attrs.field(init=False, default=None)
    _waiting: list[Reply[None]] = attrs.field(init=False, factory=list)
    """Replies for the next call of ``processAllAvailable``: a call under way may have read the sources before they asked."""
    _asked: list[Reply[None]] = attrs.field(init=False, factory=list)
    """Replies for the call under way."""
    _processing: bool = attrs.field(init=False, default=False)
    _told: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when the last event has been passed on."""
    _ending: bool = attrs.field(init=False, default=False)
    _limiter: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(THREADS))

    def __attrs_post_init__(self) -> None:
        if self.progress is not None:
            self._outlet, self.progress = _Outlet(self.progress), None

    @property
    def about(self) -> str:
        """The name of the query, or its id; empty until it runs."""
        started = None if self._run is None else self._run.started
        return "" if started is None else printable(started.name or started.query)

    async def report(self) -> dict[str, object]:
        """Return the last progress of this run."""
        run = self._run
        progress = None if run is None or run.started is None else await self._in_thread(run.latest)
        if progress is None:
            return {"name": self.about}
        return {
            "name": self.about,
            "named": bool(run is not None and run.started is not None and run.started.name),
            "batch": progress.batch,
            "at": progress.at.isoformat(),
            "rows": progress.rows,
            "arrival_rate": progress.arrival_rate,
            "processing_rate": progress.processing_rate,
            "seconds": progress.seconds,
            "watermark": None if progress.watermark is None else progress.watermark.isoformat(),
            "state_rows": progress.state_rows,
            "state_bytes": progress.state_bytes,
            "late_rows": progress.late_rows,
        }

    async def started(self) -> None:
        """Start the query. If this is cancelled and the query starts later, it is stopped."""
        events = None if self._outlet is None else _Events(trio.lowlevel.current_trio_token())
        self._run = run = _Run(self.spark, self.start, events)
        started = await self._in_thread(run.start)
        logger.info(
            "query %s runs (%s)", started.name or started.query, started.run, extra=self._extra("query_started")
        )
        if events is not None:
            self.start_soon(self._tell, events, started)
        else:
            self._told.set()
        self.start_soon(self._watch, run)

    @handles
    async def get_progress(self, m: GetProgress) -> QueryProgress | None:
        """Answer with the last progress."""
        assert self._run is not None
        return await self._in_thread(self._run.latest)

    @handles
    def await_available(self, m: AwaitAvailable) -> None:
        """Answer later; questions that come while a call is under way share the next one."""
        assert self._run is not None
        self._waiting.append(self.reply_later())
        if not self._processing:
            self._processing = True
            self.start_soon(self._process, self._run)

    async def stopping(self, reason: Reason) -> None:
        """Stop the query, and pass its last events on."""
        await self._end()
        if self._outlet is not None:
            self._outlet.close()

    async def restarting(self, error: BaseException | None, message: Any) -> None:
        """Stop this run, and pass its last events on."""
        await self._end()

    async def _end(self) -> None:
        run, self._ending = self._run, True
        if run is None:
            return
        # Shielded, because the query must be told to stop; bounded, because Spark may take long.
        with trio.move_on_after(self.system.stop_timeout, shield=True):
            await self._in_thread(run.stop)
        if run.started is not None:
            with trio.move_on_after(LAST_EVENTS):
                await self._told.wait()
            with trio.move_on_after(self.system.stop_timeout, shield=True):
                await self._in_thread(run.close)

    async def _process(self, run: _Run) -> None:
        try:
            while self._waiting:
                self._asked, self._waiting = self._waiting, []
                if not any(reply.wanted for reply in self._asked):
                    continue
                done, failure = await self._in_thread(run.process)
                if failure is not None:
                    for reply in self._asked:
                        reply.fail(failure)
                elif done:
                    for reply in self._asked:
                        reply.send(None)
                else:
                    return  # the query was stopped meanwhile: the actor ends, or starts again
        finally:
            self._processing = False

    async def _watch(self, run: _Run) -> None:
        failure = await self._in_thread(run.wait)
        if self._ending:
            return  # an exception now only tells how the query was stopped
        with trio.move_on_after(LAST_EVENTS):
            await self._told.wait()
        if failure is not None:
            for reply in self._asked + self._waiting:
                reply.fail(failure)
            raise failure
        self.stop()

    async def _tell(self, events: _Events, started: QueryStarted) -> None:
        try:
            await self._pass_on(started)
            while not self._told.is_set():
                event = await events.next()
                await self._pass_on(event)
                if isinstance(event, QueryEnded):
                    self._told.set()
        except (ActorStopped, ChannelError):
            logger.debug("the receiver of a query's events has gone", extra=self._extra("receiver_gone"))
        finally:
            self._told.set()

    async def _pass_on(self, event: QueryEvent) -> None:
        assert self._outlet is not None
        try:
            await self._outlet.send(event)
        except MailboxFull:
            logger.debug("an event of a query is dropped: the mailbox is full", extra=self._extra("event_dropped"))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    def _extra(self, event: str) -> dict[str, str]:
        return {"actor": self.ref.path, "event": event}


class _Run:
    """One run of a query. All methods block, and are called in threads."""

    def __init__(
        self,
        spark: SparkSession,
        start: Callable[[SparkSession], DataStreamWriter | StreamingQuery],
        events: _Events | None,
    ) -> None:
        self._spark = spark
        self._start = start
        self._events = events
        self._lock = threading.Lock()
        self._query: Any = None
        self._given_up = False
        """Whether a query that comes up now is to be stopped at once."""
        self.started: QueryStarted | None = None

    def start(self) -> QueryStarted:
        if self._events is not None:
            self._spark.streams.addListener(self._events)
        up = False
        try:
            query: Any
            query, failure = self._attempt(self._start_query)
            if failure is not None:
                raise failure
            started = QueryStarted(str(query.id), str(query.runId), query.name)
            with self._lock:
                self._query, self.started = query, started
                up = not self._given_up
            if self._events is not None:
                self._events.run = started.run
            if not up:
                query.stop()
        finally:
            if not up:
                self.close()
        return started

    def _start_query(self) -> Any:
        spark: Any = self._spark
        if hasattr(spark, "_jsparkSession"):
            # Spark looks up Python data sources in the active session of the thread, and this thread has none.
            spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
        made: Any = self._start(self._spark)
        # Not by its class: sessions over Spark Connect have classes of their own.
        return made if hasattr(made, "awaitTermination") else made.start()

    def wait(self) -> QueryFailed | None:
        """Wait for the end of the query; return its error, if any."""
        return self._attempt(self._query.awaitTermination)[1]

    def process(self) -> tuple[bool, QueryFailed | None]:
        """Wait until all is processed; return whether it is. Spark does not say so if the query ends meanwhile."""
        active, failure = self._attempt(lambda: (self._query.processAllAvailable(), self._query.isActive)[1])
        return bool(active), failure

    def latest(self) -> QueryProgress | None:
        progress, failure = self._attempt(lambda: self._query.lastProgress)
        return None if failure is not None or progress is None else _progress(progress)

    def stop(self) -> None:
        with self._lock:
            self._given_up = True
            query = self._query
        if query is not None:
            _, failure = self._attempt(query.stop)
            if failure is not None:
                cause = str(failure).partition("\n")[0]
                logger.warning("a query did not stop in order: %s", cause, extra={"event": "query_not_stopped"})

    def close(self) -> None:
        """Remove the listener."""
        events = self._events
        if events is not None:
            self._attempt(lambda: self._spark.streams.removeListener(events))

    def _attempt(self, call: Callable[[], T]) -> tuple[T | None, QueryFailed | None]:
        """Call Spark; return its exception as one of plain values. Raised here, it would hold Spark's own as its context."""
        try:
            return call(), None
        except (PySparkException, Py4JError) as error:
            condition = error.getCondition() if isinstance(error, PySparkException) else None
            started = self.started or QueryStarted("", "")
            text = str(error).strip() or type(error).__name__
            return None, QueryFailed(explained(text), query=started.query, run=started.run, condition=condition or "")


class _OneText(JStreamingQueryListener):  # type: ignore[misc]  # mypy is not shown pyspark
    """Takes a progress from the JVM as one text, in 3 ms on a busy machine.

    pyspark takes each field by a call of its own: 400 ms, and all listeners wait meanwhile.
    """

    def onQueryProgress(self, jevent: Any) -> None:  # noqa: N802 - Spark's name
        progress = StreamingQueryProgress.fromJson(json.loads(jevent.progress().json()))
        self.pylistener.onQueryProgress(QueryProgressEvent(progress))


class _Events(StreamingQueryListener):  # type: ignore[misc]  # mypy is not shown pyspark
    """Events of a query, on their way from a thread of the JVM's to a task."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self.run: str | None = None
        """The run whose events count; None: not known yet."""
        self._token = token
        self._waiting: deque[QueryProgress | QueryEnded] = deque(maxlen=BACKLOG)
        self._some = trio.Event()

    @property
    def _jlistener(self) -> Any:
        """The object that pyspark registers with the JVM; sessions over Spark Connect do not use it."""
        if not hasattr(self, "_registered"):
            jvm: Any = SparkContext._jvm
            self._registered = jvm.PythonStreamingQueryListenerWrapper(_OneText(self))
        return self._registered

    async def next(self) -> QueryProgress | QueryEnded:
        """Wait for the next event of this run."""
        while True:
            self._some = trio.Event()
            while self._waiting:
                event = self._waiting.popleft()
                if event.run == self.run:
                    return event
            await self._some.wait()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        if self.run in (None, str(event.progress.runId)):
            self._put(_progress(event.progress))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        if self.run in (None, str(event.runId)):
            error = None if event.exception is None else explained(event.exception)
            self._put(QueryEnded(str(event.id), str(event.runId), error))

    def _put(self, event: QueryProgress | QueryEnded) -> None:
        self._waiting.append(event)
        try:
            self._token.run_sync_soon(self._wake, idempotent=True)
        except trio.RunFinishedError:
            pass  # trio has ended

    def _wake(self) -> None:
        self._some.set()


def _progress(progress: StreamingQueryProgress) -> QueryProgress:
    phases = {name: milliseconds / 1000 for name, milliseconds in progress.durationMs.items()}
    watermark = progress.eventTime.get("watermark")
    return QueryProgress(
        query=str(progress.id),
        run=str(progress.runId),
        name=progress.name,
        batch=progress.batchId,
        at=dt.datetime.fromisoformat(progress.timestamp),
        rows=progress.numInputRows,
        arrival_rate=_rate(progress.inputRowsPerSecond),
        processing_rate=_rate(progress.processedRowsPerSecond),
        seconds=progress.batchDuration / 1000,
        phases=phases,
        watermark=None if watermark is None else dt.datetime.fromisoformat(watermark),
        state_rows=sum(operator.numRowsTotal for operator in progress.stateOperators),
        state_bytes=sum(operator.memoryUsedBytes for operator in progress.stateOperators),
        late_rows=sum(operator.numRowsDroppedByWatermark for operator in progress.stateOperators),
    )


def _rate(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
