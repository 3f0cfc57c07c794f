"""The way in: files are followed and shipped over Lumberjack, and their lines are appended to the mailbox ``logs``.

::

    file ──tail──> pace ──> writer ══Lumberjack, TLS══> reader ──Unit──> Ingest (an actor for each connection)
                                                                            │ Lines: Arrow columns, as bytes
                                                                         Intake ──Append──> logs

A line is acknowledged to the shipper when it is on disk, so no line is lost if any part of this is killed. The shipper numbers its lines,
and `Intake` knows the numbers that it has appended, so a line that comes again is in the journal once.
"""

from __future__ import annotations

import functools
import gzip
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import trio

from levada.actors.journal.columns import columns_of
from levada.actors.lumberjack import Deliver, HostConfig, Tail, TailConfig, Unit, connect, tail
from levada.actors.spark.bridge import Mailbox
from levada.actors.spark.ipc import rows_of_stream
from levada.actors.spark.protocol import stream_of
from levada.framework import Actor, ActorSystem, Ref, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig

from .numbers import Numbers
from .rows import Lines, LogLine

__all__ = ["LOGS", "Ingest", "Intake", "Pace", "lines_of", "ship", "source_of", "sources_of", "unpack"]

LOGS = ("apache-access-2015.log", "linux-auth-2017.log", "kafka-controller-2016.log")
"""The demo's own logs."""
EVENT = r"^\["
"""The beginning of an event, in a log whose events may have several lines."""
WRITERS = 64
"""Writers whose numbers are known; one more, and the one that was silent for longest is forgotten."""

# One expression with three names: 0.5 µs a line, half of what three expressions take.
_SOURCE = re.compile(
    r"(?P<access>\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:)"
    r"|(?P<auth>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^:]+: )"
    r"|(?P<kafka>\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] [A-Z]+ )"
)
# As `levada.actors.lumberjack.connect` makes them; a field of this name that says something else does not count.
_STAMP = re.compile(r"([0-9a-f]{12})-(\d{1,18})")


def source_of(text: str) -> str:
    """Return the source of a line by its beginning, or ``other``."""
    found = _SOURCE.match(text)
    return "other" if found is None else found.lastgroup or "other"


def lines_of(unit: Unit) -> list[Lines]:
    """Put the lines of a unit into columns, those of each file and writer apart."""
    by_file: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}
    for event in unit.events:
        # Ours says "line", the Beats say "message" and have the rest elsewhere.
        text = str(event.get("line", event.get("message", "")))
        host, file = event.get("host"), event.get("file")
        stamp = _STAMP.fullmatch(str(event.get("stamp", "")))
        writer, number = stamp.groups() if stamp is not None else ("", "0")
        where = (host if isinstance(host, str) else unit.origin.peer, file if isinstance(file, str) else "", writer)
        by_file.setdefault(where, []).append((text, _number(event.get("offset")), int(number)))
    return [_lines(*where, found) for where, found in by_file.items()]


def _lines(host: str, file: str, writer: str, found: list[tuple[str, int, int]]) -> Lines:
    texts, offsets, numbers = zip(*found, strict=True)
    count = len(found)
    # By columns: a message for each line would cost 2 µs more.
    columns = [
        pa.array(list(map(source_of, texts)), pa.string()),
        pa.repeat(_readable(host), count),
        pa.repeat(_readable(file), count),
        pa.array(offsets, pa.int64()),
        _strings(texts),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=columns_of(LogLine).schema)
    return Lines(stream_of(rows), _readable(f"{host}:{file}"), writer, _runs(numbers) if writer else [])


def _number(text: object) -> int:
    """Read a number that a writer sent as text; 0 for anything else."""
    # A column has 63 bits for it.
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 19 else 0


def _strings(texts: Sequence[str]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array(list(map(_readable, texts)), pa.string())


def _readable(text: str) -> str:
    """Replace what was not UTF-8 in the file; Spark's strings cannot hold it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Write numbers as ranges: the first number, and the one behind the last."""
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 and numbers == tuple(range(first, last + 1)):
        return [(first, last + 1)]
    return [(number, number + 1) for number in numbers]


class Ingest(Actor[Unit]):
    """Parses the lines of one connection of the reader."""

    intake: Ref[Lines]

    async def started(self) -> None:
        """Make the first array in a thread: Arrow looks for pandas then, which takes half a second."""
        await trio.to_thread.run_sync(pa.array, [""])

    @handles
    async def take(self, unit: Unit) -> None:
        """Have the lines of a unit put into the journal; the answer, when they are on disk, is the acknowledgement."""
        for lines in lines_of(unit):
            await self.intake.ask(lines, timeout=None)


class Intake(Actor[Lines]):
    """Appends lines to the journal, each once, one message after another."""

    logs: Mailbox[LogLine]

    def started(self) -> None:
        """Begin with no numbers known."""
        self._known: dict[str, Numbers] = {}

    @handles
    async def take(self, m: Lines) -> None:
        """Append the lines that have not come before."""
        rows = rows_of_stream(m.rows)
        if not m.writer:
            await self.logs.append(rows, key=m.key)
            return
        known = self._known.pop(m.writer, Numbers())
        self._known[m.writer] = known  # the newest one last
        if len(self._known) > WRITERS:
            del self._known[next(iter(self._known))]
        new = known.new(m.numbers)
        if not all(new):
            rows = rows.filter(pa.array(new))
        if rows.num_rows:
            await self.logs.append(rows, key=m.key)
        known.add(m.numbers)


@attrs.define
class Pace:
    """Holds a shipper to so many lines a second, and counts acknowledged lines."""

    rate: float = math.inf
    """Lines a second, of all files together; infinite: as fast as the reader takes them."""
    shipped: int = 0
    """Acknowledged lines, or records of several lines."""
    tails: list[Tail] = attrs.field(factory=list)
    """The files being shipped."""
    _next: float = -math.inf

    @property
    def share(self) -> float:
        """The share of the files that is acknowledged, by bytes: from 0 to 1."""
        found = [tail.status() for tail in self.tails]
        done = sum(status.octets_acked for status in found)
        return done / max(1, done + sum(status.octets_behind for status in found))

    async def deliver(self, onward: Deliver, events: list[dict[str, Any]]) -> None:
        """Deliver onward, a tenth of a second's worth at a time.

        Cancellation:
            some events may have been delivered.
        """
        size = int(min(max(self.rate / 10, 1), len(events)))
        for at in range(0, len(events), size):
            some = events[at : at + size]
            start = max(self._next, trio.current_time())
            self._next = start + len(some) / self.rate
            await trio.sleep_until(start)
            await onward(some)
            self.shipped += len(some)


async def ship(system: ActorSystem, urls: Sequence[str], ca: Path, paths: Iterable[Path], pace: Pace) -> None:
    """Ship files and return when they are acknowledged: one writer, and a tail for each file, because records begin differently in each log.

    Args:
        system: where the actors live.
        urls: URLs of the readers, ``lumberjack+tls://…``; each gets what it has room for.
        ca: authorities to trust, for a certificate with the name localhost.
        paths: the files.
        pace: limits the rate, and counts.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    async with AsyncExitStack() as stack:
        # A name that is in the certificate, whatever address the reader listens at.
        hosts = HostConfig(tls=TlsConfig(ca=ca, server_name="localhost"), several="balance")
        writer = await stack.enter_async_context(connect(system, urls, hosts=hosts, stamp=True))
        deliver = functools.partial(pace.deliver, writer.deliver)
        for path in paths:
            config = TailConfig(once=True, multiline=EVENT if re.match(EVENT, _first_line(path)) else None)
            pace.tails.append(await stack.enter_async_context(tail(system, [str(path)], deliver, config=config)))
        for followed in pace.tails:
            await followed.finished()


def unpack(folder: Path, limit: int | None = None) -> list[Path]:
    """Unpack the demo's own logs.

    Args:
        folder: where to unpack.
        limit: lines of each log; None: all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        text = gzip.decompress((files("levada.actors.demo") / "data" / f"{name}.gz").read_bytes())
        (folder / name).write_bytes(b"".join(text.splitlines(keepends=True)[:limit]))
    return [folder / name for name in LOGS]


def sources_of(paths: Iterable[Path]) -> frozenset[str]:
    """Return the sources of files by their first lines.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    return frozenset(source_of(_first_line(path)) for path in paths)


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(4096)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
