"""The way in: files are followed and shipped over Lumberjack, and their lines are appended to the mailbox ``logs``.

::

    file ──tail──> pace ──> writer ══Lumberjack, TLS══> reader ──Unit──> Ingest (an actor for each connection) ──Append──> logs

A line is acknowledged to the shipper when it is on disk, so no line is lost if any part of this is killed; lines may come twice then.
"""

from __future__ import annotations

import functools
import gzip
import math
import re
from collections.abc import Iterable
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import trio

from levada.actors.lumberjack import Deliver, HostConfig, TailConfig, Unit, connect, tail
from levada.actors.spark.bridge import Mailbox
from levada.framework import Actor, ActorSystem, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig

from .rows import LogLine

__all__ = ["LOGS", "Ingest", "Pace", "ship", "source_of", "sources_of", "unpack"]

LOGS = ("apache-access-2015.log", "linux-auth-2017.log", "kafka-controller-2016.log")
"""The demo's own logs."""
EVENT = r"^\["
"""The beginning of an event, in a log whose events may have several lines."""

_SOURCES = (
    ("access", re.compile(r"\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:")),
    ("auth", re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^:]+: ")),
    ("kafka", re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] [A-Z]+ ")),
)


def source_of(text: str) -> str:
    """Return the source of a line by its beginning, or ``other``."""
    return next((name for name, beginning in _SOURCES if beginning.match(text)), "other")


class Ingest(Actor[Unit]):
    """Appends the lines of one connection of the reader."""

    logs: Mailbox[LogLine]

    @handles
    async def take(self, unit: Unit) -> None:
        """Put the lines of a unit into the journal; the answer, when they are on disk, is the acknowledgement."""
        by_file: dict[tuple[str, str], list[LogLine]] = {}
        for event in unit.events:
            # Ours says "line", the Beats say "message" and have the rest elsewhere.
            text = str(event.get("line", event.get("message", "")))
            host, file, offset = (event.get(name) for name in ("host", "file", "offset"))
            where = (host if isinstance(host, str) else unit.origin.peer, file if isinstance(file, str) else "")
            at = int(offset) if isinstance(offset, int | str) and str(offset).isdecimal() else 0
            by_file.setdefault(where, []).append(LogLine(source_of(text), *where, at, text))
        for where, lines in by_file.items():
            # By file, so that the lines of each file stay in order.
            await self.logs.append(lines, key=":".join(where))


@attrs.define
class Pace:
    """Holds a shipper to so many lines a second, and counts acknowledged lines."""

    rate: float = math.inf
    """Lines a second, of all files together; infinite: as fast as the reader takes them."""
    shipped: int = 0
    """Acknowledged lines, or records of several lines."""
    _next: float = -math.inf

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


async def ship(system: ActorSystem, url: str, ca: Path, paths: Iterable[Path], pace: Pace) -> None:
    """Ship files and return when they are acknowledged: one writer, and a tail for each file, because records begin differently in each log.

    Args:
        system: where the actors live.
        url: URL of the reader, ``lumberjack+tls://…``.
        ca: authorities to trust, for a certificate with the name localhost.
        paths: the files.
        pace: limits the rate, and counts.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    async with AsyncExitStack() as stack:
        # A name that is in the certificate, whatever address the reader listens at.
        hosts = HostConfig(tls=TlsConfig(ca=ca, server_name="localhost"))
        writer = await stack.enter_async_context(connect(system, url, hosts=hosts))
        deliver = functools.partial(pace.deliver, writer.deliver)
        tails = []
        for path in paths:
            config = TailConfig(once=True, multiline=EVENT if re.match(EVENT, _first_line(path)) else None)
            tails.append(await stack.enter_async_context(tail(system, [str(path)], deliver, config=config)))
        for followed in tails:
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
