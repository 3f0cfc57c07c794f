"""`LogWriter`: how appends get into the table.

Appends of all shards that come while the database is busy go together as one transaction, so they share one sync of the server.

Each append has a mark, a random number that it leaves in its shard's row. If a connection is lost, its appends are sent again: a shard whose end is
where the append would end, and which has its mark, says that it was written before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import trio

from levada.actors.journal import Appended, Fenced, JournalBehind, JournalDamaged, JournalError
from levada.actors.journal.appends import ToldRows
from levada.actors.journal.errors import bare
from levada.framework import Reply

from .connection import Sent
from .errors import DatabaseAway
from .pool import FIRST_PAUSE, PATIENCE, Database
from .wire import bigint, integer, number_in

__all__ = ["AppendJob", "LogWriter"]

MOST_BYTES: Final = 16 << 20
"""The most bytes of appends that go together, unless a single one has more."""
MOST_WAITING: Final = 64 << 20
"""The most bytes of appends that wait, before the next one is taken."""


@attrs.define(eq=False)
class AppendJob:
    """An append that is not answered yet."""

    statement: str
    shard: int
    at: int
    end: int
    """Where the shard ends behind it."""
    rows: int
    mark: int
    columns: Sequence[bytes | None]
    """Its rows, as arrays of PostgreSQL; or the values of its only row."""
    reply: Reply[Any] | ToldRows
    size: int = 0
    is_uncertain: bool = False
    """Whether it was sent on a connection that was lost."""

    def __attrs_post_init__(self) -> None:
        self.size = sum(len(column) for column in self.columns if column is not None)

    @property
    def parameters(self) -> list[bytes | None]:
        """The parameters of the statement."""
        return [bigint(self.end), bigint(self.mark), integer(self.shard), bigint(self.at), *self.columns]


class LogWriter:
    """Writes appends. Its `run` is a task of the log; it calls `written` after each group."""

    def __init__(self, database: Database, where: str, written: Callable[[], None]) -> None:
        self.appends = 0
        """Appends that were written."""
        self.rows = 0
        """Their rows."""
        self._database = database
        self._where = where
        self._told = written
        self._jobs: deque[AppendJob] = deque()
        self._bytes = 0
        self._sent: Sent | None = None
        """The first append of the queue, if it was sent at once."""
        self._comes_alone = True
        """Whether no other append came with the last one."""
        self._wake = trio.Event()
        self._progress = trio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that the next append has to wait too."""
        return self._bytes >= MOST_WAITING

    async def room(self) -> None:
        """Wait until it is not full."""
        while self.is_full:
            await self._progress.wait()

    async def drain(self) -> None:
        """Wait until all appends are answered."""
        while self._jobs:
            await self._progress.wait()

    def put(self, job: AppendJob) -> None:
        """Take an append."""
        if self._comes_alone and not self._jobs:
            # Not in the task: it would get its turn 15 µs later, and only waits for the database.
            self._sent = self._database.send([(job.statement, job.parameters)])
        self._jobs.append(job)
        self._bytes += job.size
        self._wake.set()

    async def run(self) -> None:
        """Write group after group."""
        while True:
            if not self._jobs:
                self._wake = trio.Event()
                await self._wake.wait()
            group, size = list[AppendJob](), 0
            for job in self._jobs:
                if group and (self._sent is not None or size + job.size > MOST_BYTES):
                    break
                group.append(job)
                size += job.size
            await self._settle(list(group), trio.current_time() + PATIENCE)
            for _ in group:
                self._jobs.popleft()
            self._bytes -= size
            self._comes_alone = len(group) + len(self._jobs) == 1
            self._progress.set()
            self._progress = trio.Event()
            self._told()

    async def _settle(self, jobs: list[AppendJob], until: float) -> None:
        """Write and answer a group; a lost connection is made again until this time."""
        pause = FIRST_PAUSE
        while True:
            why: Exception
            try:
                await self._attempt(jobs)
                return
            except JournalError as error:
                why = error
                # If one may have been written, it is not: that is known when the database does not refuse.
                if isinstance(error, JournalBehind) or not any(job.is_uncertain for job in jobs):
                    if len(jobs) > 1:  # the wrong one is found by trying each
                        for job in jobs:
                            await self._settle([job], until)
                    else:
                        jobs[0].reply.fail(bare(error))
                    return
            except DatabaseAway as error:
                why = error
            try:
                pause = await self._database.pause(why, pause, until)
            except (JournalError, DatabaseAway) as error:
                for job in jobs:
                    job.reply.fail(DatabaseAway(f"{error}; whether rows were written is not known"))
                return

    async def _attempt(self, jobs: list[AppendJob]) -> None:
        """Send appends once; those that are answered leave the list."""
        sent, self._sent = self._sent, None
        if sent is None:
            await self._database.connect()
        assert self._database.log is not None
        end = self._database.log.end_text
        try:
            results = await self._database.write([(job.statement, job.parameters) for job in jobs], sent)
            left = []
            for job, result in zip(jobs, results, strict=True):
                if job.rows and result.command_tuples == job.rows:
                    self._written(job)
                else:
                    left.append(job)
            jobs[:] = left
            if jobs:
                results = await self._database.write([(end, [integer(job.shard)]) for job in jobs])
                for job, result in zip(jobs, results, strict=True):
                    if not result.ntuples:
                        what = f"the row of shard {job.shard} is gone from the table of shards"
                        job.reply.fail(JournalDamaged(what, path=self._where))
                        continue
                    there = number_in(result, 0)
                    if there == job.end and number_in(result, 1) == job.mark:
                        if job.rows and not job.is_uncertain:  # else it was written by an earlier attempt
                            what = f"not all rows before {there} of shard {job.shard} are in the table: a trigger, a rule or a partition drops them"
                            job.reply.fail(JournalDamaged(what, path=self._where))
                        else:
                            self._written(job)
                    else:
                        job.reply.send(Fenced(job.shard, there))
        except DatabaseAway:
            for job in jobs:
                job.is_uncertain = True
            raise

    def _written(self, job: AppendJob) -> None:
        self.appends += 1
        self.rows += job.rows
        job.reply.send(Appended(job.shard, job.at, job.end - job.at))
