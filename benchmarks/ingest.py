"""The way of log lines into the journal against its parts: ``levada bench ingest``.

The whole is what `levada demo` does before Spark: a file is followed, shipped over Lumberjack with TLS, read, parsed and appended to a
journal on the disk, all in one process. The parts are measured alone, each in this process with its other end in a process of its own:
shipping to a reader that acknowledges everything, reading from such a shipper, parsing units, appending parsed units.

All figures are lines in a second of CPU time, of all threads of the measured process: other work on the machine disturbs these least.
The lines are the demo's access log, repeated.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from levada.actors.demo.ingest import Intake, Pace, ship, unpack
from levada.actors.demo.parsing import Ingest, lines_of
from levada.actors.demo.rows import Lines, LogLine
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.actors.journal import Journal, JournalConfig
from levada.actors.journal.columns import columns_of
from levada.actors.lumberjack import Origin, Unit, serve
from levada.actors.spark.bridge import Mailbox
from levada.framework import ActorSystem, Ref, bounded
from levada.transports.carriers import TlsConfig

from ._ingest_peers import take
from .lumberjack import Report, Row

__all__ = ["run"]

ROOT = Path(__file__).parents[1]
COPIES = 10
"""Copies of the log of 10,000 lines."""
PARTS = 0.8
UNIT = 1024
"""Lines of a unit, as the writer sends them."""

Spent = tuple[float, int]
"""Seconds of CPU time, and lines."""


def spent(work: Callable[[Path, Path], Awaitable[Spent]], log: Path) -> float:
    """Lines in a second of CPU time, in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, lines = trio.run(work, Path(folder), log)
    return lines / seconds


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
async def journal(system: ActorSystem, folder: Path) -> AsyncIterator[Ref[Lines]]:
    """The end of the way: a journal, and the actor in front of it."""
    config = JournalConfig(partitions=2)
    ref = system.spawn(partial(Journal, folder / "logs", LogLine, config=config), mailbox=bounded(256))
    mailbox = Mailbox("logs", ref, columns_of(LogLine))
    yield system.spawn(Intake, mailbox, mailbox=bounded(64))


def tls_of(pems: SelfSigned) -> TlsConfig:
    """A reader's settings."""
    return TlsConfig(certificate=pems.certificate, key=pems.key)


async def whole(folder: Path, log: Path) -> Spent:
    """All of it."""
    pems, pace = make_certificates(folder), Pace()
    async with (
        ActorSystem() as system,
        journal(system, folder) as intake,
        serve(system, "lumberjack+tls://127.0.0.1:0", partial(Ingest, intake), carrier=tls_of(pems)) as reader,
    ):
        start = time.process_time()
        await ship(system, [reader.url], pems.ca, [log], pace)
        return time.process_time() - start, pace.shipped


async def shipping(folder: Path, log: Path) -> Spent:
    """Ship to a reader in another process."""
    pace = Pace()
    with peer("reader", folder) as process:
        assert process.stdout is not None
        url = (await trio.to_thread.run_sync(process.stdout.readline)).strip()
        async with ActorSystem() as system:
            start = time.process_time()
            await ship(system, [url], folder / "ca.pem", [log], pace)
            return time.process_time() - start, pace.shipped


async def reading(folder: Path, log: Path) -> Spent:
    """Read from a shipper in another process."""
    pems = make_certificates(folder)
    async with (
        ActorSystem() as system,
        serve(system, "lumberjack+tls://127.0.0.1:0", take, carrier=tls_of(pems)) as reader,
    ):
        start = time.process_time()
        with peer("shipper", folder, reader.url, log) as process:
            await trio.to_thread.run_sync(process.wait)
        return time.process_time() - start, reader.statistics().events


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
    units = units_of(log)
    start = time.process_time()
    for unit in units:
        lines_of(unit)
    return time.process_time() - start, sum(len(unit.events) for unit in units)


async def appending(folder: Path, log: Path) -> Spent:
    """Append units that are parsed."""
    parsed = [(lines, len(unit.events)) for unit in units_of(log) for lines in lines_of(unit)]
    async with ActorSystem() as system, journal(system, folder) as intake:
        start = time.process_time()
        for lines, _ in parsed:
            await intake.ask(lines, timeout=None)
        return time.process_time() - start, sum(count for _, count in parsed)


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure; `quick`: one copy of the log, to show that it runs."""
    parts = Row("ship, read, parse and append, CPU", [], "its parts", [], PARTS)
    with tempfile.TemporaryDirectory() as folder:
        one, *_ = unpack(Path(folder))
        log = Path(folder) / "long.log"
        log.write_bytes(one.read_bytes() * (1 if quick else COPIES))
        for number in range(rounds if only in parts.title else 0):
            progress(f"{parts.title}, round {number + 1} of {rounds}")
            parts.ours.append(spent(whole, log))
            parts.theirs.append(1 / sum(1 / spent(part, log) for part in (shipping, reading, parsing, appending)))
    return Report([row for row in (parts,) if row.ours])
