"""A streaming query as an actor: started, watched, stopped and started again like any other.

Example:
    >>> from levada.actors.spark.query import Query
    >>> def count(spark):  # doctest: +SKIP
    ...     lines = spark.readStream.format("mailbox").option("mailbox", "logs").load()
    ...     return lines.writeStream.format("noop").option("checkpointLocation", "/var/lib/desk/count")
    >>> query = system.spawn(Query, spark, count, supervise=restart(backoff=(1.0, 60.0)))  # doctest: +SKIP

How it works:

* The end of a query is learnt by a thread in ``awaitTermination``: it costs nothing while it waits, wakes at once, and brings the exception.
  Spark's listeners would do it too, but their queue drops events when it is full, and an actor that misses its own end hangs.
* Progress is learnt from a ``StreamingQueryListener``, so nobody polls; it is registered only if somebody wants to be told. Each event is a
  call from the JVM, which costs about 25 ms of Python and py4j for a query with one source. An event that the queue dropped, or that came
  while `BACKLOG` others waited for a slow receiver, is missed: progress is news, not a ledger.
* All calls into the JVM are made in threads. One that is given up goes on in its thread until Spark answers; a query that comes up after its
  actor has gone is stopped by the thread that started it.
* What Spark raises holds Java objects, which neither travel nor outlive the JVM. So it becomes a `QueryFailed` of plain values.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import trio
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery, StreamingQueryListener
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from levada.framework import Actor, Asks, Reason, Ref, Reply, Sender, handles, message
from levada.framework.errors import ActorStopped, ChannelError, ConfigurationError, LevadaError, MailboxFull

__all__ = [
    "AwaitAvailable",
    "GetProgress",
    "Query",
    "QueryEnded",
    "QueryEvent",
    "QueryFailed",
    "QueryProgress",
    "QueryStarted",
]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.spark")

BACKLOG = 64
"""Events that wait for a receiver that does not take them; then the oldest is dropped."""
LAST_EVENTS = 2.0
"""Seconds to wait, after the end of a query, for what Spark's listener queue still holds."""
THREADS = 4
"""Of one query: the wait for its end, one for all that wait for data to be processed, two for short calls."""


@attrs.define(eq=False, slots=False, str=False)
class QueryFailed(LevadaError):
    """A streaming query could not start, or ended with an error; `detail` is Spark's own text."""

    query: str = ""
    """Id of the query, the same after each start from one checkpoint; empty if it did not start."""
    run: str = ""
    """Id of this start of it."""
    condition: str = ""
    """Spark's name for the error, for example ``"STREAM_FAILED"``."""


@message("levada.spark.QueryStarted", frozen=True)
class QueryStarted:
    """A query runs."""

    query: str
    """Id, the same after each start from one checkpoint."""
    run: str
    """Id of this start."""
    name: str | None = None
    """As given to ``queryName``."""


@message("levada.spark.QueryProgress", frozen=True)
class QueryProgress:
    """What one micro-batch did, or that there was nothing to do."""

    query: str
    run: str
    name: str | None
    batch: int
    """Number of the micro-batch."""
    at: dt.datetime
    """When it began."""
    rows: int
    """Rows that came from all sources."""
    arrival_rate: float | None
    """Rows a second that came in since the batch before; None where Spark has no figure yet."""
    processing_rate: float | None
    """Rows a second that this batch worked off."""
    seconds: float
    """How long all of it took."""
    phases: dict[str, float]
    """Seconds for each of Spark's phases: ``addBatch``, ``walCommit``, ``latestOffset``…"""
    watermark: dt.datetime | None
    """Of event time; None without one."""
    state_rows: int
    """Rows in the state of all operators."""
    state_octets: int
    """Memory that it uses."""
    late_rows: int
    """Rows that the watermark dropped in this batch."""


@message("levada.spark.QueryEnded", frozen=True)
class QueryEnded:
    """A run of a query is over: the last event of it. It may be started again."""

    query: str
    run: str
    error: str | None = None
    """Spark's text, if it failed."""


QueryEvent = QueryStarted | QueryProgress | QueryEnded
"""What those who want to be told about a query get."""


@attrs.frozen
class GetProgress(Asks[QueryProgress | None]):
    """Ask for the last progress of this run; None if there was none yet."""


@attrs.frozen
class AwaitAvailable(Asks[None]):
    """Ask to be answered when all that the sources had at the moment of asking has been processed and committed to the sink.

    Fails with `QueryFailed` if the query does first. For tests and for the end of a program; with sources that never pause it may take for
    ever, so give the ask a time-out.
    """


class Query(Actor[AwaitAvailable | GetProgress]):
    """Runs a streaming query for as long as it lives.

    It ends with the query: `Normal` when the query ends by itself (``availableNow``) or is stopped by somebody else, `Failed` with
    `QueryFailed` when it fails. When the actor ends first, by `Ref.stop` or any other way, the query is stopped; that is given the
    ``stop_timeout`` of the system, after which it goes on in the background. Supervised, it starts again from its checkpoint, where `start`
    sets a ``checkpointLocation``; without one it starts over.

    Args:
        spark: the session.
        start: called in a thread, at each start; returns a writer, which is started, or a query that runs. A query that it started before
            it raises goes on.
        progress: is told `QueryStarted`, `QueryProgress` and `QueryEnded`. A `Sender` is this actor's from now on, and finished at its end.
            What is slow to take events misses the oldest ones; one that has gone is forgotten, and the query goes on.
    """

    spark: SparkSession
    start: Callable[[SparkSession], DataStreamWriter | StreamingQuery]
    progress: Ref[QueryEvent] | Sender[QueryEvent] | None = None
    _run: _Run = attrs.field(init=False)
    _waiting: list[Reply[None]] = attrs.field(init=False, factory=list)
    """Wait for the next call of ``processAllAvailable``: one that runs may have looked at the sources before they asked."""
    _processing: bool = attrs.field(init=False, default=False)
    _told: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when all events have been passed on."""
    _ending: bool = attrs.field(init=False, default=False)

    async def started(self) -> None:
        """Start the query.

        Cancellation: a query that comes up after all is stopped.
        """
        if not callable(self.start):
            raise ConfigurationError(f"start is called with the session and returns a writer, got {self.start!r}")
        self._limiter = trio.CapacityLimiter(THREADS)
        events = None if self.progress is None else _Events(trio.lowlevel.current_trio_token())
        self._run = _Run(self.spark, self.start, events)
        started = await self._in_thread(self._run.start)
        logger.info("query %s (%s) runs", started.name or started.query, started.run, extra=self._extra("query_started"))
        if events is None:
            self._told.set()
        else:
            self.start_soon(self._tell, events, started)
        self.start_soon(self._watch)

    @handles
    async def get_progress(self, m: GetProgress) -> QueryProgress | None:
        """Answer with the last progress."""
        return await self._in_thread(self._run.latest)

    @handles
    def await_available(self, m: AwaitAvailable) -> None:
        """Answer later; whoever asks while a call is under way shares the next one."""
        self._waiting.append(self.reply_later())
        if not self._processing:
            self._processing = True
            self.start_soon(self._process)

    async def stopping(self, reason: Reason) -> None:
        """Stop the query and pass its last events on."""
        await self._end()
        if isinstance(self.progress, Sender):
            self.progress.finish_nowait()

    async def restarting(self, error: BaseException | None, message: Any) -> None:
        """Stop what is left of this run."""
        await self._end()

    async def _end(self) -> None:
        self._ending = True
        if hasattr(self, "_run"):
            await self._in_thread(self._run.end)
            if self._run.started is not None:
                await self._told.wait()

    async def _process(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = [reply for reply in self._waiting if reply.wanted], []
                if asked:
                    failure = await self._in_thread(self._run.process)
                    for reply in asked:
                        if failure is None:
                            reply.send(None)
                        else:
                            reply.fail(failure)
        finally:
            self._processing = False

    async def _watch(self) -> None:
        failure = await self._in_thread(self._run.await_end)
        if self._ending:
            # What a run raises while it is being stopped is how it was stopped.
            return
        with trio.move_on_after(LAST_EVENTS):
            await self._told.wait()
        if failure is not None:
            raise failure
        self.stop()

    async def _tell(self, events: _Events, started: QueryStarted) -> None:
        """Pass events on until the last one; what comes from another thread waits in `events`."""
        try:
            await self._pass_on(started)
            while not isinstance(event := await events.next(), QueryEnded):
                await self._pass_on(event)
            await self._pass_on(event)
        except (ActorStopped, ChannelError):
            logger.debug("nobody takes the progress of a query any more", extra=self._extra("receiver_gone"))
        finally:
            self._told.set()

    async def _pass_on(self, event: QueryEvent) -> None:
        assert self.progress is not None
        try:
            await self.progress.send(event)
        except MailboxFull:
            logger.debug("an event of a query is dropped: the mailbox is full", extra=self._extra("event_dropped"))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except trio.Cancelled:
            # A start that is given up ends itself when it comes up.
            self._run.give_up()
            raise

    def _extra(self, event: str) -> dict[str, str]:
        return {"actor": self.ref.path, "event": event}


class _Run:
    """One run of a query, for threads: each method may block."""

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
        self._query: StreamingQuery | None = None
        self._given_up = False
        self.started: QueryStarted | None = None

    def start(self) -> QueryStarted:
        if self._events is not None:
            self._spark.streams.addListener(self._events)
        try:
            failure = None
            made = self._start(self._spark)
            # By what it can do: sessions over Spark Connect have classes of their own.
            query: Any = made if hasattr(made, "awaitTermination") else made.start()  # type: ignore[union-attr]
            started = QueryStarted(str(query.id), str(query.runId), query.name)
        except (PySparkException, Py4JError) as error:
            failure = self._failed(error)
        except BaseException:
            self._forget_listener()
            raise
        if failure is not None:
            self._forget_listener()
            raise failure  # outside of the handler: its context would be what it stands for
        with self._lock:
            self._query, self.started = query, started
            given_up = self._given_up
        if self._events is not None:
            self._events.run = started.run
        if given_up:
            self.end()
        return started

    def give_up(self) -> None:
        """Have a query that is not up yet stopped when it comes up. Does not block."""
        self._given_up = True
