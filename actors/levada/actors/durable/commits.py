"""The group commit of a shard: while one append is under way, finished commands gather for the next.

Answers are sent in the order of the queue, once their rows are on disk. So an answer waits for everything queued before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import attrs
import trio

from levada.actors.journal import Appended, JournalError
from levada.actors.journal.writing import let_askers_come
from levada.framework import Ref

from .access import Access
from .errors import ShardLost
from .rows import LogRow, ShardLog
from .turns import ShardWriter

__all__ = ["Commit", "CommitPart", "Commits"]

MOST_ROWS = 4096
"""The most rows of one append, unless a single command has more."""
MOST_BYTES = 4 << 20
"""The most bytes of one append, approximately, unless a single command has more."""
_ROWS: Callable[[Commit], Sequence[LogRow]] = attrgetter("rows")


class Commit(Protocol):
    """Rows that are written together, and a function to call when they are on disk: a `CommandTurn`, or a `CommitPart`."""

    rows: Sequence[LogRow]
    size: int
    """About the size of the rows."""

    def done(self) -> None:
        """Called when the rows are on disk."""
        ...


@attrs.define(eq=False)
class CommitPart:
    """The rows that a running handler commits, or rows of the shard itself."""

    writer: ShardWriter
    rows: Sequence[LogRow]
    size: int
    written: trio.Event
    """Set when the rows are on disk."""
    entity: str = ""
    """The id of the handler's entity."""
    tells: Sequence[tuple[Ref[Any], Any]] = ()

    def done(self) -> None:
        """Send the messages that waited, and let the handler continue."""
        self.writer.part_done(self.entity, self.tells)
        self.written.set()


class Commits:
    """The queue of one shard. Its `run` is a task of the shard."""

    def __init__(self, access: Access, log: ShardLog, end: int) -> None:
        self.end = end
        """The offset after the last row of the partition."""
        self.queued = 0
        """The number of rows that were queued so far."""
        self.written = 0
        """The number of these rows that are on disk."""
        self.size = 0
        """About the bytes of the rows in the queue."""
        self._access = access
        self._log = log
        self._queue: deque[Commit] = deque()
        self._wake = trio.Event()
        self._progress = trio.Event()

    def put(self, commit: Commit) -> int:
        """Queue rows; return their place. They are on disk when `written` has reached it."""
        if not self._queue:
            self._wake.set()
        self._queue.append(commit)
        self.size += commit.size
        self.queued += len(commit.rows)
        return self.queued

    async def reach(self, place: int) -> None:
        """Wait until all rows up to a place are on disk."""
        while self.written < place:
            await self._progress.wait()

    async def drain(self) -> None:
        """Wait until the queue is empty."""
        while self._queue:
            await self._progress.wait()

    async def run(self) -> None:
        """Write group after group.

        Raises:
            ShardLost: another process has written to the partition, or the journal refused or is out of reach. The rows of the last group may
                have been written.
        """
        shard, expected = self._access.shard, 0
        while True:
            if not self._queue:
                self._wake = trio.Event()
                await self._wake.wait()
            if len(self._queue) < expected:
                await let_askers_come(self._queue, min(expected, MOST_ROWS))
            group, rows, octets = self._group()
            if rows:
                try:
                    answer = await self._access.append(self._log.batch(rows, self.end), self.end)
                except JournalError as error:
                    raise ShardLost(f"shard {shard}: the journal refused rows: {error}", shard=shard) from error
                if not isinstance(answer, Appended):
                    raise ShardLost(
                        f"shard {shard}: another process has written to it, up to row {answer.end} where this one knows {self.end}: it owns "
                        "the shard now",
                        shard=shard,
                    )
                self.end = answer.first + answer.count
            for _ in group:
                self._queue.popleft()
            self.written += len(rows)
            self.size -= octets
            for commit in group:
                commit.done()
            expected = len(self._queue) + len(group)
            self._progress.set()
            self._progress = trio.Event()

    def _group(self) -> tuple[list[Commit], list[LogRow], int]:
        """Return the first commits of the queue, their rows, and about the size of these."""
        if self.size <= MOST_BYTES and self.queued - self.written <= MOST_ROWS:  # nearly always
            group = list(self._queue)
            return group, list(chain.from_iterable(map(_ROWS, group))), self.size
        group, rows, octets = [], list[LogRow](), 0
        for commit in self._queue:
            if group and (len(rows) + len(commit.rows) > MOST_ROWS or octets + commit.size > MOST_BYTES):
                break
            group.append(commit)
            rows += commit.rows
            octets += commit.size
        return group, rows, octets
