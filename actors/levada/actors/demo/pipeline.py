"""The demo's pipeline, from files to the clients that ask for the results.

::

    files ──Lumberjack, TLS──> ingest actors ──> mailbox logs ──Spark──> mailboxes counts, rates, attacks, anomalies
                                                                               │
             RSocket request-streams, Aqueduct channels <── subscriber actors <─┘

`pipeline` puts it together; `levada.actors.cli.demo` is the command, which shows the results.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from levada.actors import aqueduct, rsocket
from levada.actors.apps import freeze_heap
from levada.actors.interop.certificates import make_certificates
from levada.actors.journal import DeclareGroup, GetExtent, JournalConfig
from levada.actors.spark.asks import RemoteActor
from levada.actors.spark.bridge import Bridge, Mailbox, serve_bridge
from levada.actors.spark.query import AwaitAvailable, GetProgress, Query, QueryEvent, QueryFailed, QueryProgress
from levada.framework import Actor, ActorSystem, Failed, Ref, bounded, handles, restart
from levada.framework.errors import ActorStopped, NoValue

from .engine import spark_session
from .ingest import LineIntake, Pace, ship
from .live import MAILBOXES, FeedDesk, FeedSubscriber, Results
from .queries import QUERIES, SOURCES, StreamQuery, scores
from .readers import reader, readers
from .rows import Follow, LogLine, Result
from .scoring import scorers

__all__ = ["Pipeline", "PipelineSettings", "pipeline"]

logger = logging.getLogger("levada.actors.demo")

LANES = 2
"""How many queries start at the same time."""
ASK_TIMEOUT = 60.0
"""Seconds for the parts to answer each other: while Spark starts, it takes all cores."""
DRAIN = 1.0
"""Seconds that subscribers over Aqueduct have at the end; their channels have no end of their own."""
AGAIN = restart("transient", max=8, within=300.0, initial_backoff=1.0, max_backoff=10.0)
"""A failed query goes on from its checkpoint. On a busy machine that happens: Spark gives each of its Python processes ten seconds to start."""
GRACE = 2.0
"""Seconds that queries have to end after a cancellation."""
BATCH_ROWS = 50_000
"""Lines in one micro-batch: about five seconds on two cores, so counts appear and grow while lines arrive."""
AHEAD, LINE = 2, 512
"""Micro-batches of lines that may wait for Spark, and the bytes of a line in the journal, with some to spare."""
SEGMENT = 16 << 20
"""Bytes of a segment of the lines' journal: the largest message fits."""
ROUTES = rsocket.CoreConfig(metadata_mime_type=rsocket.COMPOSITE)
SPARK: dict[str, Any] = {
    # transformWithState takes no other.
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    # Only what changed goes into a checkpoint.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": True,
}
# Most of a minute's run is code that runs for the first time: Java's quick compiler is enough.
SHORT_RUN = SPARK | {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1"}
LONG = 64 << 20
"""Java's slow compiler pays from this many bytes of lines on: 400,000 lines of an access log take 12 % less CPU time."""


@attrs.frozen(kw_only=True)
class PipelineSettings:
    """What to run."""

    paths: tuple[Path, ...]
    """Files to ship."""
    folder: Path
    """For the journals, the checkpoints and the certificates; this user's alone."""
    log: Path
    """File for Spark's warnings and errors."""
    sources: frozenset[str] = frozenset(SOURCES)
    """Whose queries to run."""
    rate: float = math.inf
    """Lines to ship per second."""
    host: str = "127.0.0.1"
    """Where to listen."""
    ports: tuple[int, int, int] = (0, 0, 0)
    """Ports of Lumberjack, RSocket and Aqueduct; 0: any free port."""
    batch_rows: int = BATCH_ROWS
    """Most lines of one micro-batch."""
    nodes: int = 0
    """Nodes that read, parse and score; 0: this process does."""
    watch: Callable[[str], object] | None = None
    """Serve a dashboard, and call this with the address that logs in."""


@attrs.define
class Pipeline:
    """A pipeline that runs."""

    phase: str = "starting actors"
    sources: tuple[str, ...] = ()
    """Whose queries run."""
    results: Results = attrs.field(factory=Results)
    """The results, over RSocket."""
    by_channel: Results = attrs.field(factory=Results)
    """The results, over Aqueduct."""
    batches: int = 0
    """Micro-batches of all queries."""
    largest: int = 0
    """Lines in the largest micro-batch that a query has reported."""
    reader_urls: list[str] = attrs.field(factory=list)
    """URLs that take lines in."""
    read: Counter[str] = attrs.field(factory=Counter[str])
    """Lines by the node that read them."""
    scored: Counter[str] = attrs.field(factory=Counter[str])
    """Lines by the node that scored them."""
    door_url: str = ""
    """URL of the results, over RSocket."""
    channels_url: str = ""
    """URL of the results, over Aqueduct; without QUIC only for this process."""
    ca: Path = Path()
    """The certificate authority for shippers."""
    pace: Pace = attrs.field(factory=Pace)
    shipped: trio.Event = attrs.field(factory=trio.Event)
    """Set when all lines are shipped and acknowledged."""
    log: Path = Path()
    """File of Spark's log."""
    queries: dict[str, Ref[AwaitAvailable | GetProgress]] = attrs.field(factory=dict)
    mailboxes: dict[str, Mailbox[Result]] = attrs.field(factory=dict)

    async def finish(self) -> None:
        """Wait until all lines that were in the files when they were read have passed the whole pipeline.

        Raises:
            QueryFailed: a query failed again and again; the first line says why, and where the log is.
        """
        self.phase = "shipping"
        async with trio.open_nursery() as nursery:
            for query in self.queries.values():
                nursery.start_soon(_fails_for_good, query, self.log)
            await self.shipped.wait()
            nursery.cancel_scope.cancel()
        self.phase = "running the queries"
        async with trio.open_nursery() as nursery:
            for query in self.queries.values():
                nursery.start_soon(_all_seen, query, self.log)
        self.phase = "delivering results"
        extents = {name: await mailbox.ref.ask(GetExtent()) for name, mailbox in self.mailboxes.items()}
        wanted = {name: sum(extent.end.values()) for name, extent in extents.items()}
        await self.results.reach(wanted)
        await self.by_channel.reach(wanted)
        await self.count_batches()
        self.phase = "done"

    async def count_batches(self) -> None:
        """Start to count the micro-batches again."""
        found = [await query.ask(GetProgress(), timeout=None) for query in self.queries.values()]
        self.batches = sum(progress.batch + 1 for progress in found if progress is not None)


@asynccontextmanager
async def pipeline(settings: PipelineSettings, run: Pipeline) -> AsyncIterator[None]:
    """Run the pipeline. On entry all queries run and have processed the first lines; leaving stops everything, Spark before its servers.

    Args:
        settings: what to run.
        run: filled in while the pipeline starts and runs, so that another task can watch.

    Raises:
        ConfigurationError: a file cannot be read, a port is taken, or there is no Java.

    Cancellation:
        nothing is left running.
    """
    run.sources = tuple(source for source in SOURCES if source in settings.sources)
    pems = make_certificates(settings.folder / "tls")
    run.ca, run.log = pems.ca, settings.log
    lumberjack_port, rsocket_port, aqueduct_port = settings.ports
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    async with (
        ActorSystem("demo", ask_timeout=ASK_TIMEOUT) as system,
        _watched(system, settings),
        serve_bridge(system, settings.folder / "bridge") as bridge,
    ):
        # From Spark's end to the watcher. Each subscriber is an actor of its own.
        desk = FeedDesk()
        for name, row in MAILBOXES.items():
            run.mailboxes[name] = await bridge.mailbox(name, row)
            bridge.subscribe(name, system.spawn(FeedSubscriber, desk.feeds[name], name=name), group="demo")
        door_url = f"rsocket+tcp://{host}:{rsocket_port}"
        channels_url, carrier = f"aqueduct://{host}:{aqueduct_port}", None
        if importlib.util.find_spec("aioquic") is None:
            channels_url = "aqueduct+memory://demo"
        else:
            from levada.transports.quic import QuicConfig  # an extra

            # One for both sides; the client checks for the name in the certificate, wherever the server listens.
            carrier = QuicConfig(certificate=pems.certificate, key=pems.key, ca=pems.ca, server_name="localhost")
        channels = aqueduct.PeerConfig(carrier=carrier, core=aqueduct.AqueductConfig(drain_timeout=DRAIN))
        # From the files to Spark.
        logs: Mailbox[LogLine] = await bridge.mailbox("logs", LogLine, config=waiting_lines(settings.batch_rows))
        for query in QUERIES:
            if query.source in run.sources:  # before there are lines, so that each query gets all of them
                await logs.ref.ask(DeclareGroup(query.name))
        intake = system.spawn(LineIntake, logs, run.read, name="intake", mailbox=bounded(64))
        reader_url = f"lumberjack+tls://{host}:{lumberjack_port}"
        reading = functools.partial(readers, nodes=settings.nodes) if settings.nodes else reader
        async with (
            rsocket.serve(system, door_url, desk.answer, config=rsocket.ServerConfig(core=ROUTES)) as door,
            rsocket.connect(system, _near(door.url), config=rsocket.ClientConfig(core=ROUTES)) as peer,
            aqueduct.serve(system, channels_url, desk.send, Follow, config=channels) as publisher,
            aqueduct.connect(system, _near(publisher.url), Follow, config=channels) as subscriber,
            reading(system, reader_url, intake, pems.certificate, pems.key) as urls,
            scorers(system, settings.folder / "asks", run.scored, on_nodes=settings.nodes > 0) as scorer,
            trio.open_nursery() as nursery,
        ):
            run.door_url, run.channels_url, *run.reader_urls = map(_near, (door.url, publisher.url, *urls))
            for route in MAILBOXES:
                nursery.start_soon(run.results.follow, peer, route)
                nursery.start_soon(run.by_channel.receive, subscriber, route)
            freeze_heap()
            nursery.start_soon(_ship, system, settings, run)
            # Lines come in already, and wait in the journal.
            run.phase = "starting Spark"
            short = sum(path.stat().st_size for path in settings.paths) < LONG
            async with spark_session(SHORT_RUN if short else SPARK, settings.log) as spark:
                run.phase = "running the queries"
                try:
                    start = functools.partial(_stream, bridge=bridge, scorer=scorer, settings=settings)
                    await _start(system, spark, start, run)
                    yield
                    await _stop(run.queries.values())
                finally:
                    await _give_up(run.queries.values())
            nursery.cancel_scope.cancel()


def waiting_lines(batch_rows: int) -> JournalConfig:
    """Return the settings of the journal that holds lines back: it has room for `AHEAD` micro-batches, and lines go when all queries have them.

    So a shipper waits for Spark, counts appear while lines still arrive, and waiting lines use neither disk nor processor.
    """
    room = max(AHEAD * batch_rows * LINE, 4 * SEGMENT)
    return JournalConfig(partitions=2, segment_bytes=SEGMENT, max_bytes=room, retain_bytes=None)


@asynccontextmanager
async def _watched(system: ActorSystem, settings: PipelineSettings) -> AsyncIterator[None]:
    if settings.watch is None:
        yield
        return
    from levada.actors.dashboard import DashboardConfig, serve_dashboard  # an extra

    async with serve_dashboard(system, DashboardConfig(tracebacks=True)) as dashboard:
        settings.watch(dashboard.login_url())
        yield


def _near(url: str) -> str:
    """Return the URL at which this machine reaches a server that listens at all addresses."""
    return url.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")


async def _ship(system: ActorSystem, settings: PipelineSettings, run: Pipeline) -> None:
    run.pace.rate = settings.rate
    await ship(system, run.reader_urls, run.ca, settings.paths, run.pace)
    run.shipped.set()


async def _start(
    system: ActorSystem,
    spark: SparkSession,
    stream: Callable[[StreamQuery, SparkSession], DataStreamWriter],
    run: Pipeline,
) -> None:
    """Start a supervised actor for each query, `LANES` at a time; the next starts when one has processed its first micro-batch.

    Each query starts Python processes of its own, and Spark gives up on a process that is not up within ten seconds.
    """
    lanes = trio.Semaphore(LANES)

    async def one(query: StreamQuery) -> None:
        async with lanes, trio.open_nursery() as first:
            start = functools.partial(stream, query)
            under_way = trio.Event()
            progress = system.spawn(_Batches, run, under_way)
            ref = system.spawn(Query, spark, start, progress, name=query.name, supervise=AGAIN)
            run.queries[query.name] = ref

            async def until(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                first.cancel_scope.cancel()

            first.start_soon(until, under_way.wait)
            # Without lines there is no micro-batch; this also reports a query that fails for good.
            first.start_soon(until, functools.partial(_all_seen, ref, run.log))

    async with trio.open_nursery() as starting:
        for query in QUERIES:
            if query.source in run.sources:
                starting.start_soon(one, query)


class _Batches(Actor[QueryEvent]):
    """Counts the micro-batches of one query while they come."""

    run: Pipeline
    under_way: trio.Event
    """Set at the first one."""

    @handles
    def note(self, m: QueryEvent) -> None:
        """Count a micro-batch that had rows."""
        if isinstance(m, QueryProgress) and m.rows:
            self.run.batches += 1
            self.run.largest = max(self.run.largest, m.rows)
            self.under_way.set()


def _stream(
    query: StreamQuery, spark: SparkSession, *, bridge: Bridge, scorer: RemoteActor, settings: PipelineSettings
) -> DataStreamWriter:
    """Read from one mailbox, through a query, into another."""
    mailboxes = {"address": bridge.address, "tokenFile": str(bridge.token_file)}
    lines = (
        spark.readStream.format("mailbox")
        .options(**mailboxes, mailbox="logs", group=query.name, maxRowsPerBatch=str(settings.batch_rows))
        .load()
    )
    # Spark asks for the points only where a query uses them.
    scored = lines.where(lines.source == query.source).withColumn("points", scores(scorer)(lines.text))
    rows = query.build(scored)
    return (
        rows.writeStream.format("mailbox")
        .options(
            **mailboxes,
            mailbox=query.mailbox,
            checkpointLocation=str(settings.folder / "checkpoints" / query.name),
        )
        .queryName(query.name)
        .outputMode(query.mode)
    )


async def _all_seen(query: Ref[AwaitAvailable | GetProgress], log: Path) -> None:
    """Wait until a query has processed the existing rows. Its supervisor restarts a failed query until it gives up."""
    while True:
        try:
            await query.ask(AwaitAvailable(), timeout=None)
        except (QueryFailed, NoValue, ActorStopped) as error:
            logger.warning("%s failed: %s", query.path, str(error).partition("\n")[0])
            if not query.is_alive:
                await _fails_for_good(query, log)
            await trio.sleep(1.0)
        else:
            return


async def _fails_for_good(query: Ref[AwaitAvailable | GetProgress], log: Path) -> None:
    """Wait for the end of a query that should not end, and raise it. Shippers would wait for it forever."""
    reason = await query.terminated()
    # In one line: Spark's text has many.
    failure = str(reason.error if isinstance(reason, Failed) else reason).partition("\n")[0]
    raise QueryFailed(f"query {query.path.rpartition('/')[2]} has failed for good: {failure}; Spark's log is {log}")


async def _give_up(queries: Iterable[Ref[AwaitAvailable | GetProgress]]) -> None:
    """End queries before Spark does: they take the end of Spark for a failure, and would be restarted without it."""
    for query in queries:
        query.stop(now=True)
    with trio.move_on_after(GRACE, shield=True):
        for query in queries:
            await query.terminated()


async def _stop(queries: Iterable[Ref[AwaitAvailable | GetProgress]]) -> None:
    for query in queries:
        query.stop()
    for query in queries:
        await query.terminated()
