"""Durable actors whose log is in PostgreSQL, against the same ones on disk: rows of ``levada bench durable``.

The server is of this machine's packages, on the same disk, with its syncs, and runs only for these rows. Its CPU time is not counted.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import trio

from levada.actors.durable import Shards, shards
from levada.framework import ActorSystem

from ._levada import clock
from ._measure import Measure, Workload
from .durable import (
    ALONE,
    EVENTS,
    TIMES,
    Box,
    Count,
    Put,
    WasPut,
    commands,
    commands_alone,
    commands_in_seconds,
    under_way,
)

__all__ = ["in_postgres"]

UNDER_WAY = "command, 256 under way, one shard, PostgreSQL"
UNDER_WAY_CPU = "command, 256 under way, one shard, PostgreSQL, CPU time"
ONE_AT_A_TIME = "command, one at a time, PostgreSQL"
RECOVERY = "recovery of 10,000 events, each, PostgreSQL"
_TITLES = (UNDER_WAY, UNDER_WAY_CPU, ONE_AT_A_TIME, RECOVERY)


@contextmanager
def in_postgres(only: str) -> Iterator[tuple[list[Workload], dict[str, Measure]]]:
    """Give the rows that need a database, if one is wanted, and PostgreSQL and psycopg are installed."""
    if not any(only in title for title in _TITLES) or find_spec("psycopg") is None:
        yield [], {}
        return
    from tests.actors.postgres.cluster import cluster, programs

    found = programs()
    if found is None:
        yield [], {}
        return
    with cluster(found, fsync="on", max_wal_size="1GB", shared_buffers="128MB") as server:
        numbers = itertools.count()

        def log() -> str:
            return server.url(f"bench_{next(numbers)}")

        def folder() -> str:
            return tempfile.mkdtemp(dir=scratch)

        with tempfile.TemporaryDirectory() as scratch:
            seconds, alone = partial(boxes_at, commands_in_seconds), partial(boxes_at, commands_alone)
            cpu, recovery = partial(boxes_at, commands), replay_at
            workloads = [
                # 0.8 of the commands in the same time.
                Workload(key="pg", title=UNDER_WAY, n=20_000, base=partial(seconds, folder), base_name="on disk", budget=1 / 0.8),
                Workload(key="pg_cpu", title=UNDER_WAY_CPU, n=20_000, base=partial(cpu, folder), base_name="on disk", budget=1.2),
                Workload(
                    key="pg_alone", title=ONE_AT_A_TIME, n=ALONE, base=partial(inserts, server.url()), base_name="INSERT", budget=2
                ),
                Workload(key="pg_replay", title=RECOVERY, n=EVENTS, base=partial(recovery, folder), base_name="on disk", budget=6),
            ]  # fmt: skip
            runs: dict[str, Measure] = {
                "pg": partial(seconds, log),
                "pg_cpu": partial(cpu, log),
                "pg_alone": partial(alone, log),
                # As it is after a minute: the server then plans otherwise.
                "pg_replay": partial(recovery, log, settle=lambda: server.execute("ANALYZE")),
            }
            yield [workload for workload in workloads if only in workload.title], runs


def boxes_at(work: Callable[[Shards[Any], int], Any], place: Callable[[], str], n: int) -> float:
    """Measure new boxes of one shard, whose log is at a place."""

    async def main() -> float:
        async with ActorSystem(ask_timeout=600.0) as system:
            boxes = await shards(system, Box, events=WasPut, journal=place(), shards=1)
            await boxes["box-0"].ask(Count())
            found: float = await work(boxes, n)
            return found

    return trio.run(main)


def inserts(url: str, n: int) -> float:
    """Insert a row of 220 bytes, and commit, one after the other, on a connection without levada."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as session:
        session.execute(
            "CREATE TABLE IF NOT EXISTS plain (number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, data bytea)"
        )
        text, data = "INSERT INTO plain (data) VALUES (%s)", b"x" * 220
        session.execute(text, (data,), prepare=True)
        count = min(n, ALONE)
        start = clock()
        for _ in range(count):
            session.execute(text, (data,), prepare=True)
        return (clock() - start) / count * 1e9


def replay_at(place: Callable[[], str], n: int, settle: Callable[[], object] = lambda: None) -> float:
    """Wake five entities of 10,000 events, one after the other, in seconds; the best counts. `settle` is called when they are on the disk."""

    async def main() -> float:
        where, names = place(), [f"box-{number}" for number in range(TIMES)]
        count = min(n, EVENTS)
        settings: dict[str, Any] = {"events": WasPut, "journal": where, "shards": 1, "snapshot_every": 1 << 30}
        async with ActorSystem(ask_timeout=600.0) as system:
            boxes = await shards(system, Box, **settings)
            for name in names:
                await under_way(count, lambda number, name=name: boxes[name].ask(Put(number, b"x" * 200)))  # type: ignore[misc]
        settle()
        async with ActorSystem(ask_timeout=600.0) as system:
            boxes = await shards(system, Box, **settings)
            await boxes["another"].ask(Count())
            best = float("inf")
            for name in names:
                start = time.perf_counter()
                assert await boxes[name].ask(Count()) == count
                best = min(best, time.perf_counter() - start)
            return best / count * 1e9

    return trio.run(main)
