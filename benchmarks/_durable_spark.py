"""The log of a durable class, read in Spark, against a plain mailbox of the same rows: a row of ``levada bench durable``.

Rows are events of 220 bytes, 256 in each append, in two partitions. The figures compare the CPU time of all processes: this one with the
bridge, Spark's Java, and its Python workers.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from levada.actors.durable import Durable, Shards, applies, log_columns, shards
from levada.actors.journal import Append, JournalConfig, ReadRows
from levada.actors.journal.log_events import events_of
from levada.actors.journal.schema import fit
from levada.actors.spark import Mailbox, serve_bridge, session
from levada.actors.spark.protocol import shown
from levada.framework import ActorSystem, Asks, handles, message

from ._measure import Measure

__all__ = ["reading", "spent"]

TIMES = 10
"""Rows for each operation that is asked for: with fewer, the costs of a job are most of what is measured."""
EACH, UNDER_WAY = 16, 16
"""Events of a command, and commands under way."""


@message("bench.durable.fill")
class Fill(Asks[int]):
    first: int


@message("bench.durable.filled")
class Filled:
    number: int
    size: int
    text: bytes


class Full(Durable[Fill]):
    events: int = 0

    @handles
    def fill(self, m: Fill) -> int:
        self.record(*(Filled(m.first + each, 200, b"x" * 200) for each in range(EACH)))
        return self.events

    @applies
    def filled(self, e: Filled) -> None:
        self.events += 1


class _Actors:
    """The actors' side, in trio in another thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ready, self._stop = threading.Event(), trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with (
            ActorSystem(ask_timeout=600.0) as system,
            serve_bridge(system, f"{self._folder}/bridge") as bridge,
        ):
            self.address = bridge.address
            self._full: Shards[Any] = await shards(
                system, Full, events=Filled, journal=f"{self._folder}/log", shards=2, snapshot_every=1 << 30
            )
            await bridge.log("log", self._full)
            self._columns = shown(log_columns(Filled)).remove_metadata()
            self._plain: Mailbox[Any] = await bridge.mailbox(
                "plain", self._columns, config=JournalConfig(partitions=2, max_bytes=8 << 30)
            )
            self.rows, self._copied = 0, {0: 0, 1: 0}
            self._ready.set()
            await self._stop.wait()
            self._full.ref.stop()
            await self._full.ref.terminated()

    def fill(self, rows: int) -> None:
        """Write events until there are so many, and copy them."""
        if self.rows < rows:
            trio.from_thread.run(self._fill, rows, trio_token=self._token)

    async def _fill(self, rows: int) -> None:
        left = iter(range(self.rows, rows, EACH))

        async def some() -> None:
            for first in left:
                await self._full[f"entity-{first % 1000}"].ask(Fill(first))

        async with trio.open_nursery() as nursery:
            for _ in range(UNDER_WAY):
                nursery.start_soon(some)
        self.rows += -(-(rows - self.rows) // EACH) * EACH
        for partition in self._copied:
            await self._copy(partition)

    async def _copy(self, partition: int) -> None:
        """Append the events to the plain mailbox, in as many appends."""
        journal = self._full.journal
        assert journal is not None
        while (found := await journal.ask(ReadRows(partition, self._copied[partition], max_bytes=1))).count:
            events = fit(events_of(found.batch()), self._columns)
            if events.num_rows:
                await self._plain.ref.ask(Append(events, partition=partition))
            self._copied[partition] = found.end

    def close(self) -> None:
        """Stop it."""
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()


def _read(spark: Any, actors: _Actors, mailbox: str) -> Measure:
    def run(n: int) -> float:
        actors.fill(TIMES * n)
        frame = spark.read.format("mailbox").options(address=actors.address, mailbox=mailbox).load()
        start = spent()
        frame.write.format("noop").mode("overwrite").save()
        return (spent() - start) / actors.rows * 1e9

    return run


def spent() -> float:
    """Return the seconds of CPU time of this process and all below it."""
    parents, spent = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        spent[process] = sum(map(int, fields[11:15]))  # with the children that it has waited for
    below, waiting = set[int](), {os.getpid()}
    while waiting:
        below |= waiting
        waiting = {process for process, parent in parents.items() if parent in waiting} - below
    own = os.getpid()
    ticks: int = os.sysconf("SC_CLK_TCK")
    return time.process_time() + sum(spent[process] for process in below - {own} if process in spent) / ticks


@contextmanager
def reading() -> Iterator[tuple[Measure, Measure]]:
    """Give the measures of reading a plain mailbox and of reading the log."""
    spark = session(master="local[2]", app="levada bench")
    try:
        with tempfile.TemporaryDirectory() as folder:
            actors = _Actors(folder)
            try:
                plain, log = _read(spark, actors, "plain"), _read(spark, actors, "log")
                for each in (plain, log) * 2:  # Java compiles what it runs for the first time
                    each(100)
                yield plain, log
            finally:
                actors.close()
    finally:
        spark.stop()
