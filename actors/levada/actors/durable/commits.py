"""Group commit of a shard: one append is under way, and commands that finish meanwhile form the next one.

Answers leave in the order of the queue, when their rows are on the disk. So an answer waits for everything queued before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import trio

from levada.actors.journal import Appended, JournalError
from levada.framework import Ref

from .access import Access
from .errors import ShardLost
from .rows import Log, Row
from .turns import Writer

__all__ = ["Commit", "Commits", "Part"]

MOST_ROWS = 4096
"""Rows of one append, unless one command has more."""
MOST_BYTES = 4 << 20
"""About the bytes of one append, unless one command has more."""


class Commit(Protocol):
    """Rows that belong together, and what happens when they are on the disk: a `Turn`, or a `Part`."""

    rows: Sequence[Row]
    octets: int
    """About the size of the rows."""

    def done(self) -> None:
        """Do it."""
        ...


@attrs.define(eq=False)
class Part:
    """What a handler has recorded before it goes on, or rows of the shard itself."""

    writer: Writer
    rows: Sequence[Row]
    octets: int
    written: trio.Event
    """Set when they are on the disk."""
    tells: Sequence[tuple[Ref[Any], Any]] = ()

    def done(self) -> None:
        """Send the messages that waited, and let the handler go on."""
        self.writer.part_done(self.tells)
        self.written.set()


class Commits:
    """The queue of one shard. Its `run` is a task of the shard."""

    def __init__(self, access: Access, log: Log, end: int) -> None:
        self.end = end
        """Offset behind the last row of the partition."""
        self.queued = 0
        """Rows that were queued."""
        self.written = 0
        """Rows of these that are on the disk."""
        self.octets = 0
        """About the bytes of the rows in the queue."""
        self._access = access
        self._log = log
        self._queue: deque[Commit] = deque()
        self._wake = trio.Event()
        self._progress = trio.Event()

    def put(self, commit: Commit) -> int:
        """Queue rows; return their place: they are on the disk when `written` has reached it."""
        self._queue.append(commit)
        self.octets += commit.octets
        self.queued += len(commit.rows)
        self._wake.set()
        return self.queued

    async def reach(self, place: int) -> None:
        """Wait until all up to a place is on the disk."""
        while self.written < place:
            await self._progress.wait()

    async def drain(self) -> None:
        """Wait until the queue is empty."""
        while self._queue:
            await self._progress.wait()

    async def run(self) -> None:
        """Write group after group.

        Raises:
            ShardLost: another writer has been there, or the journal failed or is out of reach. Rows of the last group may have been written.
        """
        expected = 0
        while True:
            if not self._queue:
                self._wake = trio.Event()
                await self._wake.wait()
            await self._let_askers_come(expected)
            group, rows = self._group()
            if rows:
                await self._append(rows)
            for commit in group:
                self._queue.popleft()
                self.written += len(commit.rows)
                self.octets -= commit.octets
                commit.done()
            expected = len(self._queue) + len(group)
            self._progress.set()
            self._progress = trio.Event()

    async def _let_askers_come(self, expected: int) -> None:
        """Let those that got answers ask again before the next group is written: half as many groups, for the same rows, cost less."""
        there = 0
        while there < len(self._queue) < min(expected, MOST_ROWS):
            there = len(self._queue)
            for _ in range(3):  # the first wakes them, in the others the shard and the entities have their turns
                await trio.lowlevel.checkpoint()

    def _group(self) -> tuple[list[Commit], list[Row]]:
        group: list[Commit] = []
        rows: list[Row] = []
        octets = 0
        for commit in self._queue:
            octets += commit.octets
            if group and (len(rows) + len(commit.rows) > MOST_ROWS or octets > MOST_BYTES):
                break
            group.append(commit)
            rows += commit.rows
        return group, rows

    async def _append(self, rows: list[Row]) -> None:
        shard = self._access.shard
        try:
            answer = await self._access.append(self._log.batch(rows, self.end), self.end)
        except JournalError as error:
            raise ShardLost(f"shard {shard}: the journal refused rows: {error}", shard=shard) from error
        if not isinstance(answer, Appended):
            raise ShardLost(
                f"shard {shard}: another process has written to it, up to row {answer.end} where this one knows {self.end}: it owns the "
                "shard now",
                shard=shard,
            )
        self.end = answer.first + answer.count
