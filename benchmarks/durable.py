"""Durable actors against what they are made of: ``levada bench durable``.

Events are 220 bytes, as the rows of ``levada bench journal``. A command is answered when its event is on the disk. The bases are one-row appends
to a journal, here or in a keeper, the disk's own fdatasync with asks, and a loop that decodes and applies the same events. Rows that say so compare
the CPU time of the process, all threads together, because the time of a sync depends on the disk.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import trio

from levada.actors.durable import Durable, Shards, applies, log_columns, shards
from levada.actors.journal import Append, Journal, columns_of, keeper, stream_of
from levada.actors.nodes import local_nodes
from levada.framework import ActorSystem, Asks, bounded, handles, message

from ._levada import clock
from ._measure import Contender, Measure, Progress, Report, Workload, measure
from ._nodes_app import Echo, Ping, app

__all__ = ["WORKLOADS", "run"]

WINDOW = 256
"""Commands under way."""
EVENTS = 10_000
"""Of the entity that is replayed."""
EACH = 100
"""Events of each entity that is woken among others."""
TIMES = 5
"""How often that and its base are done; the best counts, because the first time finds everything cold."""
ALONE = 500
"""Operations of a base that does one at a time."""


@message("bench.durable.put")
class Put(Asks[int]):
    number: int
    body: bytes


@message("bench.durable.count")
class Count(Asks[int]):
    pass


@message("bench.durable.was_put")
class WasPut:
    number: int
    size: int
    text: bytes


class Box(Durable[Put | Count]):
    puts: int = 0
    octets: int = 0

    @handles
    def put(self, m: Put) -> int:
        self.record(WasPut(m.number, len(m.body), m.body))
        return self.puts

    @handles
    def count(self, _: Count) -> int:
        return self.puts

    @applies
    def was_put(self, e: WasPut) -> None:
        self.puts += 1
        self.octets += e.size


async def under_way(
    count: int,
    one: Callable[[int], Awaitable[object]],
    window: int = WINDOW,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Do something so many times, a window of it at a time; return the nanoseconds of one."""
    left = iter(range(count))

    async def some() -> None:
        for number in left:
            await one(number)

    start = clock()
    async with trio.open_nursery() as nursery:
        for _ in range(window):
            nursery.start_soon(some)
    return (clock() - start) / count * 1e9


def in_boxes(work: Callable[[Shards[Any], int], Awaitable[float]], count: int, *, keeper: bool = False) -> Measure:
    """Make a measure of an async function that gets new boxes, of so many shards, whose journal is here or in a keeper."""

    async def main(n: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem(ask_timeout=600.0) as system:
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=count, keeper=keeper)
                for number in range(count):
                    await boxes[f"box-{number}"].ask(Count())
                return await work(boxes, n)

    return lambda n: trio.run(main, n)


async def commands(boxes: Shards[Any], n: int) -> float:
    for number in range(WINDOW):
        await boxes[f"box-{number}"].ask(Count())
    return await under_way(n, lambda number: boxes[f"box-{number % WINDOW}"].ask(Put(number, b"x" * 200)))


async def commands_with_ids(boxes: Shards[Any], n: int) -> float:
    for number in range(WINDOW):
        await boxes[f"box-{number}"].ask(Count())
    return await under_way(
        n, lambda number: boxes[f"box-{number % WINDOW}"].ask(Put(number, b"x" * 200), command=f"put-{number}")
    )


async def commands_in_seconds(boxes: Shards[Any], n: int) -> float:
    for number in range(WINDOW):
        await boxes[f"box-{number}"].ask(Count())
    return await under_way(
        n, lambda number: boxes[f"box-{number % WINDOW}"].ask(Put(number, b"x" * 200)), clock=time.perf_counter
    )


async def commands_alone(boxes: Shards[Any], n: int) -> float:
    box = boxes["box-0"]
    return await under_way(n, lambda number: box.ask(Put(number, b"x" * 200)), 1, clock)


def appends(n: int) -> float:
    """Append one row with each of 256 asks under way."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem(ask_timeout=600.0) as system:
                journal = system.spawn(partial(Journal, folder, WasPut), mailbox=bounded(1024))
                await journal.ask(Append([WasPut(0, 0, b"")]))
                return await under_way(n, lambda number: journal.ask(Append([WasPut(number, 200, b"x" * 200)])))

    return trio.run(main)


def appends_alone_to_a_keeper(n: int) -> float:
    """Append one row after the other, such as a command writes, to a journal in a keeper."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem(ask_timeout=600.0) as system, keeper(system) as keep:
                columns = log_columns(WasPut)
                journal, kind = await keep.open(folder, columns), pa.struct(list(columns))

                async def append(number: int) -> None:
                    row = ("box-0", number, None, number, "bench.durable.put", 1, *[None] * 4, number, 200, b"x" * 200)
                    await journal.ask(Append(stream_of(pa.RecordBatch.from_struct_array(pa.array([row], kind)))))

                await append(0)
                return await under_way(min(n, ALONE), append, 1, clock)

    return trio.run(main)


def sync_and_asks(n: int, *, near: bool) -> float:
    """Write 220 bytes, sync them, and ask an actor of another process; with `near`, one of this process before."""
    count = min(n, ALONE)

    async def main() -> float:
        async with ActorSystem() as system, local_nodes(system, 1, app) as nodes:
            here, far = system.spawn(Echo), await nodes.spawn(Echo, on=0)
            await far.ask(Ping(0))
            with tempfile.NamedTemporaryFile() as file:
                start = clock()
                for _ in range(count):
                    os.write(file.fileno(), b"x" * 220)
                    os.fdatasync(file.fileno())
                    if near:
                        await here.ask(Ping(0))
                    await far.ask(Ping(0))
                return (clock() - start) / count * 1e9

    return trio.run(main)


def replay(n: int) -> float:
    """Wake five entities of 10,000 events, one after the other; the best counts, as of the loop that it is compared with."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            names = [f"box-{number}" for number in range(TIMES)]
            count = min(n, EVENTS)
            async with ActorSystem(ask_timeout=600.0) as system:
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=1, snapshot_every=1 << 30)
                for name in names:
                    await under_way(count, lambda number, name=name: boxes[name].ask(Put(number, b"x" * 200)))  # type: ignore[misc]
            async with ActorSystem(ask_timeout=600.0) as system:
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=1, snapshot_every=1 << 30)
                await boxes["another"].ask(Count())
                best = float("inf")
                for name in names:
                    start = time.process_time()
                    assert await boxes[name].ask(Count()) == count
                    best = min(best, time.process_time() - start)
                return best / count * 1e9

    return trio.run(main)


def scattered(n: int) -> float:
    """Wake all entities of a log where the events of each lie between the events of others."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            names = [f"box-{number}" for number in range(max(1, n // EACH))]
            async with ActorSystem(ask_timeout=600.0) as system:
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=1)
                await under_way(
                    EACH * len(names), lambda number: boxes[names[number % len(names)]].ask(Put(number, b"x" * 200))
                )
            async with ActorSystem(ask_timeout=600.0) as system:
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=1)
                await boxes["another"].ask(Count())

                async def wake(number: int) -> None:
                    assert await boxes[names[number]].ask(Count()) == EACH

                return await under_way(len(names), wake) / EACH

    return trio.run(main)


def decode_and_apply(n: int) -> float:
    """Turn 10,000 rows in columns into events and apply each."""
    columns = columns_of(WasPut)
    batch = columns.encode([WasPut(number, 200, b"x" * 200) for number in range(EVENTS)])
    best = float("inf")
    for _ in range(TIMES):
        box = Box()
        start = time.thread_time()
        for event in columns.decode(batch):
            box.was_put(event)
        best = min(best, time.thread_time() - start)
    return best / EVENTS * 1e9


def memory(n: int, *, live: bool) -> float:
    """Count the bytes of each entity in memory, or of each that has left it."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem(ask_timeout=600.0) as system:
                most = 10 * n if live else 16
                boxes = await shards(system, Box, events=WasPut, journal=folder, shards=16, max_live=most, idle=1e6)
                await under_way(100, lambda number: boxes[f"first-{number}"].ask(Put(number, b"x")))
                gc.collect()
                tracemalloc.start()
                await under_way(n, lambda number: boxes[f"box-{number}"].ask(Put(number, b"x")))
                gc.collect()
                found = tracemalloc.get_traced_memory()[0]
                tracemalloc.stop()
                assert ((await boxes.statistics()).live > n) is live
                return found / n

    return trio.run(main)


WORKLOADS = (
    Workload(
        key="commands",
        title="command, 256 under way, one shard, CPU time",
        n=20_000,
        base=appends,
        base_name="append of a row",
        budget=1.6,
    ),
    Workload(
        key="sixteen",
        title="command, 256 under way, 16 shards, CPU time",
        n=20_000,
        base=appends,
        base_name="append of a row",
    ),
    Workload(
        key="ids",
        title="command with an id, 256 under way, CPU time",
        n=20_000,
        base=appends,
        base_name="append of a row",
    ),
    Workload(key="seconds", title="command, 256 under way, one shard", n=20_000, base=None),
    Workload(key="seconds_kept", title="command, 256 under way, one shard, keeper", n=20_000, base=None),
    Workload(
        key="alone_kept",
        title="command, one at a time, keeper",
        n=ALONE,
        base=appends_alone_to_a_keeper,
        base_name="append to a keeper",
        budget=1.25,
    ),
    Workload(
        key="append_kept",
        title="append of a row, one at a time, keeper",
        n=ALONE,
        base=partial(sync_and_asks, near=False),
        base_name="fdatasync and an ask",
        budget=2,
    ),
    Workload(
        key="alone",
        title="command, one at a time",
        n=ALONE,
        base=partial(sync_and_asks, near=True),
        base_name="fdatasync and two asks",
    ),
    Workload(
        key="replay",
        title="recovery of 10,000 events, each, CPU time",
        n=10_000,
        base=decode_and_apply,
        base_name="decode and apply",
        budget=2,
    ),
    Workload(
        key="scattered",
        title="waking, 100 scattered events, each, CPU time",
        n=100_000,
        base=None,
        budget=15_000,
    ),
    Workload(
        key="live",
        title="memory of an entity in memory, of 100,000",
        n=100_000,
        unit="B",
        base=None,
        budget=1500,
        once=True,
    ),
    Workload(
        key="passive", title="memory of an entity that has left", n=20_000, unit="B", base=None, budget=150, once=True
    ),
)

CONTENDER = Contender(
    name="levada",
    remark=f"this checkout, pyarrow {pa.__version__}, journal under {Path(tempfile.gettempdir())}",
    runs={
        "commands": in_boxes(commands, 1),
        "sixteen": in_boxes(commands, 16),
        "ids": in_boxes(commands_with_ids, 1),
        "seconds": in_boxes(commands_in_seconds, 1),
        "seconds_kept": in_boxes(commands_in_seconds, 1, keeper=True),
        "alone_kept": in_boxes(commands_alone, 1, keeper=True),
        "append_kept": appends_alone_to_a_keeper,
        "alone": in_boxes(commands_alone, 1),
        "replay": replay,
        "scattered": scattered,
        "live": partial(memory, live=True),
        "passive": partial(memory, live=False),
    },
)


IN_SPARK = "reading the log in Spark, a row, CPU time"


@contextmanager
def _in_spark(only: str) -> Iterator[tuple[list[Workload], dict[str, Measure]]]:
    """Give the row that needs a Spark session, if it is wanted and Spark is installed."""
    if only not in IN_SPARK or find_spec("pyspark") is None:
        yield [], {}
        return
    from ._durable_spark import reading

    with reading() as (plain, log):
        # 0.9 of the rows in the same time.
        yield (
            [Workload(key="spark", title=IN_SPARK, n=100_000, base=plain, base_name="plain mailbox", budget=1 / 0.9)],
            {"spark": log},
        )


def run(*, rounds: int, quick: bool, only: str, progress: Progress) -> Report:
    """Measure all workloads whose title contains `only`."""
    from ._durable_postgres import in_postgres  # it uses what is above

    with _in_spark(only) as (in_spark, runs), in_postgres(only) as (in_database, more):
        workloads = [*(workload for workload in WORKLOADS if only in workload.title), *in_database, *in_spark]
        contender = attrs.evolve(CONTENDER, runs={**CONTENDER.runs, **runs, **more})
        return measure(workloads, [contender], rounds=rounds, quick=quick, progress=progress)
