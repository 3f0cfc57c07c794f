"""The journal against a deque of references, row by row: ``levada bench journal``.

Rows are 220 bytes: a body of 200, two int64, and what Arrow adds for the body.  An append is answered when the rows are on disk, by one
fdatasync for each group.  A deque holds its references in memory, so the ratios say how far rows on a disk are from objects that never leave.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import trio

from levada.actors.journal import Append, Columns, Journal, JournalConfig, Read, Store, columns_of, keeper, stream_of
from levada.framework import ActorSystem, Ref, bounded, message

from ._levada import clock
from ._measure import Contender, Measure, Progress, Report, Workload, deque_limit, measure

__all__ = ["WORKLOADS", "run"]

BATCH = 16_384
"""Rows of a batch: one block, the unit in which the bridge sends and reads."""
MESSAGES = 4_096
"""Messages of one ask, where rows are not in columns yet."""
WINDOW = 8
"""Asks in flight, as the bridge has them."""

WORKLOADS = (
    Workload(key="append", title=f"append, Arrow batches of {BATCH:,}, each row", n=2_000_000, budget=20),
    Workload(key="messages", title=f"append, {MESSAGES:,} messages an ask, each", n=300_000, budget=20),
    Workload(
        key="single",
        title="append, one message an ask, 256 in flight, CPU time",
        n=10_000,
        base=partial(deque_limit, clock=time.thread_time),
        budget=320,
    ),
    Workload(key="kept", title="append, one row an ask to a keeper, 256 in flight", n=4_000),
    Workload(key="read", title=f"read to Arrow, blocks of {BATCH:,}, first time", n=2_000_000, budget=2),
    Workload(key="again", title="read to Arrow, checked before", n=2_000_000, budget=2),
    Workload(key="ask", title="read through the actor, 4 MB an ask", n=2_000_000),
)


@message("bench.Row")
class Row:
    number: int
    size: int
    body: bytes


def _batch(rows: int) -> pa.RecordBatch:
    columns: Columns[Row] = columns_of(Row)
    return columns.encode([Row(n, 200, b"x" * 200) for n in range(rows)])


def in_journal(work: Callable[[Ref[Append | Read], int], Awaitable[float]]) -> Measure:
    """Make a measure of an async function that gets a new journal and takes so many seconds for `n` rows."""

    async def main(n: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem() as system:
                journal = system.spawn(partial(Journal, folder, Row), mailbox=bounded(1024))
                await journal.ask(Append(_batch(1)))
                return await work(journal, n) / n * 1e9

    return lambda n: trio.run(main, n)


def in_keeper(n: int) -> float:
    """Append rows one at a time, in a child process."""

    async def main() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ActorSystem(ask_timeout=60.0) as system, keeper(system) as keep:
                journal = await keep.open(folder, Row)
                question = Append(stream_of(_batch(1)))
                await journal.ask(question)
                return await _all(journal, [question] * n, 256) / n * 1e9

    return trio.run(main)


async def _all(
    journal: Ref[Append | Read], questions: list[Append], window: int, clock: Callable[[], float] = clock
) -> float:
    waiting = questions[::-1]

    async def some() -> None:
        while waiting:
            await journal.ask(waiting.pop(), timeout=None)

    start = clock()
    async with trio.open_nursery() as nursery:
        for _ in range(window):
            nursery.start_soon(some)
    return clock() - start


async def append(journal: Ref[Append | Read], n: int) -> float:
    size = min(n, BATCH)
    question = Append(_batch(size))
    return await _all(journal, [question] * (n // size), WINDOW) * n / (n // size * size)


async def append_messages(journal: Ref[Append | Read], n: int) -> float:
    size = min(n, MESSAGES)
    rows = [Row(number, 200, b"x" * 200) for number in range(size)]
    return await _all(journal, [Append(rows)] * (n // size), WINDOW) * n / (n // size * size)


async def append_single(journal: Ref[Append | Read], n: int) -> float:
    # The process's CPU time: a sync takes from 0.2 to 20 ms for 256 rows, as the disk pleases.
    questions = [Append([Row(number, 200, b"x" * 200)]) for number in range(n)]
    return await _all(journal, questions, 256, time.process_time)


async def read_asked(journal: Ref[Append | Read], n: int) -> float:
    await append(journal, n)
    start, at = clock(), 0
    while blocks := await journal.ask(Read(0, at), timeout=None):
        for block in blocks:
            at = block.first + block.batch().num_rows
    return clock() - start


def read(n: int, *, times: int) -> float:
    """Read everything; only the last time counts."""
    size, seconds, rows = min(n, BATCH), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        with Store.open(folder, columns_of(Row).schema) as store:
            batch = _batch(size)
            for _ in range(n // size):
                store.append([(0, batch)])
            store.append([(0, _batch(1))])
        with Store.open(folder, config=JournalConfig()) as store:
            for _ in range(times):
                start, rows = clock(), 0
                for _, batch in store.batches(0, 0):
                    rows += batch.num_rows
                seconds = clock() - start
    assert rows == n // size * size + 1
    return seconds / rows * 1e9


def plain_write(n: int) -> float:
    """Write the bytes of the same batches to a file, a window at a time, each with its sync: the least that the disk costs."""
    size = min(n, BATCH)
    octets = _batch(size).serialize()
    with tempfile.NamedTemporaryFile() as file:
        start = clock()
        for number in range(n // size):
            os.write(file.fileno(), octets)
            if number % WINDOW == WINDOW - 1:
                os.fdatasync(file.fileno())
        seconds = clock() - start
    return seconds / (n // size * size) * 1e9


def plain_read(n: int) -> float:
    """Map the same bytes and add up a checksum."""
    size = min(n, BATCH)
    octets = _batch(size).serialize()
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(n // size):
            file.write(octets)
        file.flush()
        start = clock()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
            for at in range(0, len(view), octets.size):
                zlib.crc32(view[at : at + octets.size])
            seconds = clock() - start
    return seconds / (n // size * size) * 1e9


PLAIN = Contender(
    name="plain file",
    remark="the same bytes, written with one sync for eight batches, and mapped and summed",
    runs={"append": plain_write, "read": plain_read},
)

CONTENDER = Contender(
    name="levada",
    remark=f"this checkout, pyarrow {pa.__version__}, journal under {Path(tempfile.gettempdir())}",
    runs={
        "append": in_journal(append),
        "messages": in_journal(append_messages),
        "single": in_journal(append_single),
        "kept": in_keeper,
        "read": partial(read, times=1),
        "again": partial(read, times=2),
        "ask": in_journal(read_asked),
    },
)


def run(*, rounds: int, quick: bool, only: str, progress: Progress) -> Report:
    """Measure all workloads whose title contains `only`."""
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    return measure(workloads, [CONTENDER, PLAIN], rounds=rounds, quick=quick, progress=progress)
