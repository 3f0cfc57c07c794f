"""Deliver the lines of one file in batches, and move its place over the lines that are safe.

Several batches may be under way and may finish in any order.  The place moves over the finished batches at the front.
Lines under way are bounded in number and in bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from levada.framework import Reason

from .multiline import Record
from .tail_config import TailConfig
from .tail_registry import TAIL, FileEntry, FileRegistry

__all__ = ["Deliver", "Key", "LineDelivery", "TailCounters", "TailState"]

Deliver = Callable[[list[dict[str, Any]]], Awaitable[object]]
"""Takes events and returns once they are safe: `Writer.deliver`, or an ask of any actor."""

logger = logging.getLogger("levada.actors.lumberjack.tail")

Key = tuple[int, int]
"""Device and inode of a file."""

_BATCH = 1024  # lines in one call of `deliver`
_LINE_COST = 256  # bytes of memory that a line takes beside its text


@attrs.define
class TailCounters:
    """The counters of a `TailStatus`."""

    lines_read: int = 0
    lines_acked: int = 0
    lines_cut: int = 0
    bytes_acked: int = 0
    replacements: int = 0
    failures: int = 0
    save_errors: int = 0


@attrs.define(eq=False)
class TailState:
    """The state that the scanner shares with the actors of its files."""

    config: TailConfig
    registry: FileRegistry
    deliver: Deliver
    counters: TailCounters = attrs.field(factory=TailCounters)
    files: int = 0
    waiting: int = 0
    looked: trio.Event = attrs.field(factory=trio.Event)
    """Set after the first look for files."""
    bytes_waiting: int = 0
    """Unacknowledged bytes of the files that wait."""
    crowded: bool = False
    """Whether files wait until others are closed."""
    sizes: dict[Key, tuple[FileEntry, int]] = attrs.field(factory=dict)
    """Entry and last known size of the files that are being read, and of those that were closed undelivered at the end."""
    left: dict[Key, tuple[int, int]] = attrs.field(factory=dict)
    """Sizes and times of change that files had when they were closed as inactive."""
    cut: Reason | None = None
    """How the scanner ended, if that was before all files were read."""
    refused: dict[Key, str] = attrs.field(factory=dict)
    """Why files cannot be read."""

    def refuse(self, key: Key, path: str, error: OSError) -> None:
        """Record that a file cannot be read. Each reason is logged and counted once."""
        why = str(error)
        if self.refused.get(key) != why:
            self.refused[key] = why
            self.counters.failures += 1
            logger.warning("cannot read %s: %s", path, error.strerror or error, extra={"event": "file_refused"})


@attrs.define(eq=False)
class _Batch:
    """Lines that are being delivered."""

    entry: FileEntry
    end: int
    tail: bytes
    lines: int
    cost: int
    done: bool = False


class LineDelivery:
    """The lines of one file that are under way.

    Args:
        shared: the settings and counters.
        start_soon: runs a task of the file's actor that delivers a batch; if it fails, the actor fails.
    """

    def __init__(self, shared: TailState, start_soon: Callable[..., None]) -> None:
        self.draining = False
        """Whether reading has ended; records that wait for room are left for the next run."""
        self._shared = shared
        self._start_soon = start_soon
        self._under_way: deque[_Batch] = deque()
        self._lines = self._cost = 0
        self._wake = trio.Event()

    def drain(self) -> None:
        """Take no more lines; batches under way are still delivered."""
        self.draining = True
        self._wake.set()

    async def woken(self) -> None:
        """Wait until a batch is done, or `drain` is called."""
        if not self.draining or self._under_way:
            self._wake = trio.Event()
            await self._wake.wait()

    async def finished(self) -> None:
        """Wait until nothing is under way."""
        while self._under_way:
            await self.woken()

    async def hand_on(self, entry: FileEntry, records: list[Record], window: bytes, end: int) -> None:
        """Begin to deliver records in batches, waiting while too much is under way. After `drain`, the rest is left for the next run.

        Args:
            entry: the registry's entry of the file.
            records: in the order of the file.
            window: the bytes around the records; the last bytes before a place identify it.
            end: offset in the file behind the window.

        Cancellation:
            batches that have begun stay under way; the rest was not taken.
        """
        config, counters = self._shared.config, self._shared.counters
        base = end - len(window)
        most = min(_BATCH, config.max_lines)
        for first in range(0, len(records), most):
            part = records[first : first + most]
            cost = sum(len(record.text) for record in part) + _LINE_COST * len(part)
            while self._under_way and (
                self._lines + len(part) > config.max_lines or self._cost + cost > config.max_bytes
            ):
                if self.draining:
                    return
                await self.woken()
            behind = part[-1].end
            tail = window[max(0, behind - base - TAIL) : max(0, behind - base)]
            batch = _Batch(entry, behind, tail, len(part), cost)
            self._under_way.append(batch)
            self._lines += batch.lines
            self._cost += cost
            counters.lines_read += batch.lines
            counters.lines_cut += sum(record.cut for record in part)
            self._start_soon(self._deliver, batch, [self._event(entry, record) for record in part])
            await trio.lowlevel.checkpoint()

    def _event(self, entry: FileEntry, record: Record) -> dict[str, Any]:
        config = self._shared.config
        event = {
            "line": record.text,
            "host": config.host,
            "file": entry.path,
            "offset": str(record.start),
            **config.fields,
        }
        if record.cut:
            event["cut"] = "true"
        return event

    async def _deliver(self, batch: _Batch, events: list[dict[str, Any]]) -> None:
        await self._shared.deliver(events)
        batch.done = True
        counters = self._shared.counters
        while self._under_way and self._under_way[0].done:
            first = self._under_way.popleft()
            self._lines -= first.lines
            self._cost -= first.cost
            counters.lines_acked += first.lines
            counters.bytes_acked += first.end - first.entry.offset
            first.entry.move_to(first.end, first.tail)
            self._shared.registry.dirty = True
        self._wake.set()
