"""The path of log lines into the journal, against its parts: ``levada bench ingest``.

The whole is what `levada demo` does before Spark: a file is followed, shipped over Lumberjack with TLS, read, parsed and appended to a
journal on the disk, all in one process. The parts are measured alone, each in this process with its other end in a process of its own:
shipping to a reader that acknowledges everything, reading from such a shipper, parsing units, appending parsed units.

On nodes, two processes read and parse and this one ships and appends; all three count.

All figures are lines per second of CPU time, of all threads of the measured process, which other work on the machine disturbs least.
The lines are the demo's access log, repeated.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from levada.actors.apps import freeze_heap
from levada.actors.demo.ingest import LineIntake, Pace, ship, unpack
from levada.actors.demo.parsing import lines_of, warm_up
from levada.actors.demo.readers import reader, readers
from levada.actors.demo.rows import Lines, LogLine
from levada.actors.interop.certificates import make_certificates
from levada.actors.journal import Journal, JournalConfig
from levada.actors.journal.columns import columns_of
from levada.actors.lumberjack import Origin, Unit, serve
from levada.actors.nodes import nodes_of
from levada.actors.spark.bridge import Mailbox
from levada.framework import ActorSystem, Ref, bounded
from levada.transports.carriers import TlsConfig

from ._ingest_peers import take
from ._measure import cpu_of
from .lumberjack import Report, Row

__all__ = ["run"]

ROOT = Path(__file__).parents[1]
COPIES = 10
"""Copies of the log of 10,000 lines."""
PARTS = 0.8
NODES = 0.8
"""At most a quarter more CPU time a line."""
SHARE = 0.8
"""The node with fewer lines takes 40 % of all or more."""
UNIT = 1024
"""Lines of a unit, as the writer sends them."""

URL = "lumberjack+tls://127.0.0.1:0"

Spent = tuple[float, int]
"""Seconds of CPU time, and lines."""


def spent(work: Callable[[Path, Path], Awaitable[Spent]], log: Path) -> float:
    """Lines in a second of CPU time, in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, lines = trio.run(work, Path(folder), log)
    return lines / seconds


def begun() -> float:
    """Hide what there is from the garbage collector, as the commands do before lines come in, and return the CPU time so far."""
    freeze_heap()
    return time.process_time()


@contextlib.contextmanager
def peer(role: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The other end, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    command = [sys.executable, "-m", "benchmarks._ingest_peers", role, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def journal(system: ActorSystem, folder: Path, read: Counter[str]) -> AsyncIterator[Ref[Lines]]:
    """The end of the way: a journal, and the actor in front of it."""
    config = JournalConfig(partitions=2)
    ref = system.spawn(partial(Journal, folder / "logs", LogLine, config=config), mailbox=bounded(256))
    mailbox = Mailbox("logs", ref, columns_of(LogLine))
    yield system.spawn(LineIntake, mailbox, read, mailbox=bounded(64))


async def whole(folder: Path, log: Path) -> Spent:
    """All of it."""
    pems, pace = make_certificates(folder), Pace()
    async with (
        ActorSystem(ask_timeout=60.0) as system,
        journal(system, folder, Counter[str]()) as intake,
        reader(system, URL, intake, pems.certificate, pems.key) as urls,
    ):
        start = begun()
        await ship(system, urls, pems.ca, [log], pace)
        return time.process_time() - start, pace.shipped


async def on_nodes(folder: Path, log: Path) -> tuple[Spent, Counter[str]]:
    """All of it, with two nodes that read and parse; and the lines of each node."""
    pems, pace, read = make_certificates(folder), Pace(), Counter[str]()
    async with (
        ActorSystem(ask_timeout=60.0) as system,
        journal(system, folder, read) as intake,
        readers(system, URL, intake, pems.certificate, pems.key, nodes=2) as urls,
    ):
        processes = [member.pid for member in nodes_of(system).members]
        start = begun() + sum(map(cpu_of, processes))
        await ship(system, urls, pems.ca, [log], pace)
        return (time.process_time() + sum(map(cpu_of, processes)) - start, pace.shipped), read


async def shipping(folder: Path, log: Path) -> Spent:
    """Ship to a reader in another process."""
    pace = Pace()
    with peer("reader", folder) as process:
        assert process.stdout is not None
        url = (await trio.to_thread.run_sync(process.stdout.readline)).strip()
        async with ActorSystem() as system:
            start = begun()
            await ship(system, [url], folder / "ca.pem", [log], pace)
            return time.process_time() - start, pace.shipped


async def reading(folder: Path, log: Path) -> Spent:
    """Read from a shipper in another process."""
    pems = make_certificates(folder)
    tls = TlsConfig(certificate=pems.certificate, key=pems.key)
    async with ActorSystem() as system, serve(system, URL, take, carrier=tls) as taker:
        start = begun()
        with peer("shipper", folder, taker.url, log) as process:
            await trio.to_thread.run_sync(process.wait)
        return time.process_time() - start, taker.statistics().events


def units_of(log: Path) -> list[Unit]:
    """The units that a reader makes of a log."""
    origin = Origin("0" * 32, "127.0.0.1:5044", 2)
    events = [
        {"line": line, "host": "bench", "file": str(log), "offset": "0", "stamp": f"{'0' * 12}-{number}"}
        for number, line in enumerate(log.read_text().splitlines())
    ]
    parts = range(0, len(events), UNIT)
    return [Unit(events[at : at + UNIT], origin, number, True) for number, at in enumerate(parts, 1)]


async def parsing(folder: Path, log: Path) -> Spent:
    """Parse units."""
    await warm_up()
    units = units_of(log)
    start = begun()
    for unit in units:
        lines_of(unit)
    return time.process_time() - start, sum(len(unit.events) for unit in units)


async def appending(folder: Path, log: Path) -> Spent:
    """Append units that are parsed."""
    parsed = [(lines, len(unit.events)) for unit in units_of(log) for lines in lines_of(unit)]
    async with ActorSystem() as system, journal(system, folder, Counter[str]()) as intake:
        start = begun()
        for lines, _ in parsed:
            await intake.ask(lines, timeout=None)
        return time.process_time() - start, sum(count for _, count in parsed)


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure; `quick`: one copy of the log, to show that it runs."""
    parts = Row("ship, read, parse and append, CPU", [], "its parts", [], PARTS)
    nodes = Row("the same on 2 nodes, CPU", [], "one process", [], NODES)
    share = Row("lines of the node with fewer", [], "half of all", [], SHARE)
    wanted = [row for row in (parts, nodes, share) if only in row.title]
    with tempfile.TemporaryDirectory() as folder:
        one, *_ = unpack(Path(folder))
        log = Path(folder) / "long.log"
        log.write_bytes(one.read_bytes() * (1 if quick else COPIES))
        for number in range(rounds):
            if parts in wanted or nodes in wanted:
                progress(f"{parts.title}, round {number + 1} of {rounds}")
                alone = spent(whole, log)
                parts.ours.append(alone)
                nodes.theirs.append(alone)
            if parts in wanted:
                parts.theirs.append(1 / sum(1 / spent(part, log) for part in (shipping, reading, parsing, appending)))
            if nodes in wanted or share in wanted:
                progress(f"{nodes.title}, round {number + 1} of {rounds}")
                with tempfile.TemporaryDirectory() as place:
                    (seconds, lines), read = trio.run(on_nodes, Path(place), log)
                nodes.ours.append(lines / seconds)
                share.ours.append(min(read["n0"], read["n1"]))
                share.theirs.append(lines / 2)
    return Report(wanted)
