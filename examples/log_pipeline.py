"""A log pipeline in one sitting: an access log in, by Lumberjack over TLS; counts and rates of errors out, over RSocket; Spark in between.

::

    file ──tail──> writer ══Lumberjack, TLS══> Ingest ──> LineIntake ──> mailbox logs ──Spark──> mailboxes counts, rates
                                                                              Scorer <══asks══┘              │
                                                              this program <══RSocket══ Subscribers <────────┘

``levada demo`` is the same with three logs, six queries, supervised, and a report; its parts are used here.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import trio
from pyspark.sql import SparkSession

from levada.actors import rsocket
from levada.actors.demo import engine, ingest, known, live, queries, readers, scoring
from levada.actors.demo.rows import Count, LogLine, RateRow
from levada.actors.interop.certificates import make_certificates
from levada.actors.spark import RemoteActor
from levada.actors.spark.bridge import Bridge, Mailbox, serve_bridge
from levada.actors.spark.query import AwaitAvailable, Query
from levada.framework import ActorSystem


def stream(build: Any, mode: str, mailbox: str, bridge: Bridge, scorer: RemoteActor, spark: SparkSession) -> Any:
    """One query, from a mailbox to a mailbox. `build` makes a data frame of another: see `levada.actors.demo.queries`."""
    lines = spark.readStream.format("mailbox").options(address=bridge.address, mailbox="logs").load()
    lines = lines.withColumn("points", queries.scores(scorer)(lines.text))  # Spark's tasks ask an actor for them
    checkpoint = str(bridge.directory / f"checkpoint-{mailbox}")
    return (
        build(lines.where("source = 'access'"))
        .writeStream.format("mailbox")
        .options(address=bridge.address, mailbox=mailbox, checkpointLocation=checkpoint)
        .outputMode(mode)
    )


async def main(folder: Path) -> live.Results:
    log = ingest.unpack(folder / "logs")[0]
    pems = make_certificates(folder / "tls")
    results, desk = live.Results(), live.FeedDesk()
    async with ActorSystem() as system, serve_bridge(system, folder / "bridge") as bridge:
        # Three mailboxes, kept in journals on the disk. An actor subscribes to each of those that Spark fills.
        logs: Mailbox[LogLine] = await bridge.mailbox("logs", LogLine)
        for name, row in (("counts", Count), ("rates", RateRow)):
            await bridge.mailbox(name, row)
            bridge.subscribe(name, system.spawn(live.FeedSubscriber, desk.feeds[name]), group="example")

        # The way in. A line is acknowledged to the shipper when it is on the disk.
        intake = system.spawn(ingest.LineIntake, logs)
        url = "lumberjack+tls://127.0.0.1:0"
        async with readers.reader(system, url, intake, pems.certificate, pems.key) as urls:
            await ingest.ship(system, urls, pems.ca, [log], ingest.Pace())

        async with (
            scoring.scorers(system, folder / "asks", Counter(), on_nodes=False) as scorer,
            # The way out. `levada call URL --stream --route rates` would get the same.
            rsocket.serve(system, "rsocket+tcp://127.0.0.1:0", desk.answer) as door,
            rsocket.connect(system, door.url) as peer,
            engine.spark_session({}, folder / "spark.log") as spark,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(results.follow, peer, "counts")
            nursery.start_soon(results.follow, peer, "rates")
            # A query is an actor: it is started, stopped, asked and supervised like any other.
            for build, mode, name in (
                (queries.access_counts, "complete", "counts"),
                (queries.access_rates, "append", "rates"),
            ):
                query = system.spawn(Query, spark, functools.partial(stream, build, mode, name, bridge, scorer))
                await query.ask(AwaitAvailable(), timeout=None)
                query.stop()
                await query.terminated()
            await results.reach({"counts": 1, "rates": 82})  # of 84 hours: the watermark is not past the last two
            nursery.cancel_scope.cancel()
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = trio.run(main, Path(directory))
    for status, count in found.by_key("access", "status").items():
        print(f"{status} {count:6,}")
    for which in found.by_key("access", "damaged"):
        print(f"damaged: {which}")
    print(f"{sum(row['client_errors'] for row in found.rates.values())} errors of clients in {len(found.rates)} hours")
    access = {key: counts for key, counts in known.KNOWN.items() if key[0] == "access"}
    assert known.mistakes(found, access) == []
    print("verified: all counts match the known facts about this log")
