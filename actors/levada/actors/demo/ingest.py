"""The way in: files are followed and shipped over Lumberjack, and their lines are appended to the mailbox ``logs``.

::

    file ──tail──> pace ──> writer ══Lumberjack, TLS══> reader ──Unit──> Ingest (an actor for each connection)
                                                                            │ Lines: Arrow columns, as bytes
                                                                         Intake ──Append──> logs

A line is acknowledged to the shipper when it is on disk, so no line is lost if any part of this is killed. The shipper numbers its lines,
and `LineIntake` knows the numbers that it has appended, so a line that comes again is in the journal once.
"""

from __future__ import annotations

import functools
import gzip
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import columns_of
from levada.actors.journal.ipc import rows_of_stream
from levada.actors.lumberjack import Deliver, HostConfig, Tail, TailConfig, WriterConfig, connect, tail
from levada.actors.spark.bridge import Mailbox
from levada.framework import Actor, ActorSystem, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig

from .numbers import NumberSet
from .parsing import source_of
from .rows import Lines, LogLine

__all__ = ["LOGS", "LineIntake", "Pace", "ship", "sources_of", "unpack"]

LOGS = ("apache-access-2015.log", "linux-auth-2017.log", "kafka-controller-2016.log")
"""The demo's own logs."""
EVENT = r"^\["
"""The beginning of an event, in a log whose events may have several lines."""
WINDOW = 4096
"""Lines that are sent, parsed and appended together: a quarter of the messages of the writer's default."""
UNDER_WAY = 4 * WINDOW
"""Lines of a file that are read and not acknowledged: two windows for each of two nodes."""
WRITERS = 64
"""Writers whose numbers are known. One more, and the writer that was silent for longest is forgotten."""


class LineIntake(Actor[Lines]):
    """Appends lines to the journal, each once, one message after another.

    Args:
        logs: the journal.
        read: counts the lines that were new, by the node that read them.
    """

    logs: Mailbox[LogLine]
    read: Counter[str] = attrs.field(factory=Counter[str])

    def started(self) -> None:
        """Begin with no numbers known."""
        self._known: dict[str, NumberSet] = {}

    @handles
    async def take(self, m: Lines) -> None:
        """Append the lines that have not come before."""
        rows = rows_of_stream(m.rows)
        known = NumberSet()
        if m.writer:
            known = self._known.pop(m.writer, known)
            self._known[m.writer] = known  # the newest one last
            if len(self._known) > WRITERS:
                del self._known[next(iter(self._known))]
            new = known.new(m.numbers)
            rows = rows if all(new) else rows.filter(pa.array(new))
        if rows.num_rows:
            await self.logs.append(_whole(rows, m), key=f"{m.host}:{m.file}")  # lines of a file stay in order
        known.add(m.numbers)
        self.read[m.node] += rows.num_rows


def _whole(rows: pa.RecordBatch, m: Lines) -> pa.RecordBatch:
    """Add the columns that are the same for all rows."""
    host, file = (pa.repeat(text, rows.num_rows) for text in (m.host, m.file))
    schema = columns_of(LogLine).schema
    return pa.RecordBatch.from_arrays([rows["source"], host, file, rows["offset"], rows["text"]], schema=schema)


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
        done = sum(status.bytes_acked for status in found)
        return done / max(1, done + sum(status.bytes_behind for status in found))

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
        config = WriterConfig(window=WINDOW, max_bytes=4 << 20)
        writer = await stack.enter_async_context(connect(system, urls, config=config, hosts=hosts, stamp=True))
        deliver = functools.partial(pace.deliver, writer.deliver)
        for path in paths:
            begins = EVENT if re.match(EVENT, _first_line(path)) else None
            follow = TailConfig(once=True, multiline=begins, max_lines=UNDER_WAY)
            pace.tails.append(await stack.enter_async_context(tail(system, [str(path)], deliver, config=follow)))
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
