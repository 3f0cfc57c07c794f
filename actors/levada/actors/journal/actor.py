"""`Journal`: the actor that keeps a journal, and the questions it answers.

One thread at a time does all the writing, in the order of the questions. Appends that come while the disk is busy form the next group, so many
small appends share one sync, and none waits for more than two. Groups' offsets, retention and staging go before the next group of appends: the
first two make room.

When the journal is full, appends and deliveries wait, in order, until there is room again. This holds the senders back.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast

import attrs
import pyarrow as pa
import trio
from attrs import validators as v

from levada.framework import Actor, Asks, Failed, Killed, Reason, Reply, handles
from levada.framework.errors import ActorError, ConfigurationError

from .columns import Columns, columns_of
from .config import JournalConfig
from .ends import SYNC_EVERY
from .errors import JournalError, JournalFull, JournalUnwritable, SchemaMismatch
from .extent import Appended, Extent, StoreStatistics
from .ledger import Delivered, Reach
from .segments import Block
from .staging import Stage
from .store import Store

__all__ = [
    "Append", "AwaitRows", "CommitGroup", "DeclareGroup", "Deliver", "DiscardOlder", "DiscardStaged", "ForgetGroup",
    "GetExtent", "GetGroups", "GetJournalStatistics", "GetReach", "GetSchema", "Journal", "JournalStatistics",
    "OffsetWithin", "Read", "StageRows",
]  # fmt: skip

T = TypeVar("T")

logger = logging.getLogger("levada.actors.journal")

GROUP_APPENDS = 4096
"""Most appends that share one sync."""
GROUP_OCTETS = 32 << 20
"""Most bytes that share one sync, unless one append is larger."""
ROW_OCTETS = 256
"""Assumed size of a message before it is in columns."""
READERS = 4
"""Threads that read at a time."""


# Types are checked where a question is made: a wrong one must not end the journal.
_INT, _MAP = v.instance_of(int), v.instance_of((Mapping,))
_ROWS = v.instance_of((pa.RecordBatch, Sequence))
_NUMBER = v.and_(v.instance_of(int), v.ge(0), v.lt(1 << 63))
_NAME = v.and_(v.instance_of(str), v.max_len(1000))


@attrs.frozen
class Append(Asks[Appended]):
    """Append rows; answered when they are on the disk (`JournalConfig.sync`).

    Fails with `SchemaMismatch` if they do not fit the columns, `JournalError` if there are none or too many at once, `JournalUnwritable` if
    the disk refuses, `JournalFull` if the journal is full and `max_waiting` others wait already. A failed append has written nothing. If the
    asker is cancelled, the rows may have been written.
    """

    rows: pa.RecordBatch | Sequence[Any] = attrs.field(validator=_ROWS)
    """A record batch, or messages of the journal's class."""
    partition: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """None: by `key`."""
    key: str | bytes | None = attrs.field(default=None, validator=v.optional(v.instance_of((str, bytes))))
    """Rows with the same key go to the same partition, in order. None: partitions take turns."""


@attrs.frozen
class StageRows(Asks[int]):
    """Stage rows of a batch until `Deliver`; answered with the number of rows of this part so far. Readers do not see them before.

    They outlive the journal's process. With `at` they may be sent again, and are staged once.

    Fails with `JournalFull` if too much is staged, with `JournalError` if `at` leaves a gap, with `SchemaMismatch` and `JournalUnwritable` as
    `Append`.
    """

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    part: int = attrs.field(validator=_NUMBER)
    """Part of the batch: for Spark the task's partition."""
    attempt: int = attrs.field(validator=_NUMBER)
    """Try at this part; each has rows of its own."""
    rows: pa.RecordBatch | Sequence[Any] = attrs.field(validator=_ROWS)
    at: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """Number of rows of this part before these. None: all that are staged."""


@attrs.frozen
class Deliver(Asks[Delivered]):
    """Append a staged batch exactly once. A second time, also after a crash, the answer is ``already``.

    Afterwards all stages of this batch are deleted. Fails with `JournalError` if a winner was not staged, has another number of `rows`, or
    the batch is larger than the journal can ever take, with `JournalUnwritable` as `Append`.
    """

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    winners: Mapping[int, int] = attrs.field(factory=dict[int, int], validator=_MAP)
    """For each part with rows, the attempt that counts. Part n goes to partition n modulo the number of partitions."""
    rows: Mapping[int, int] = attrs.field(factory=dict[int, int], validator=_MAP)
    """For some parts, the number of rows that were staged. A power failure may have lost some of them."""


@attrs.frozen
class DiscardStaged(Asks[int]):
    """Drop staged rows that were not delivered; answered with the number of stages dropped."""

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    part: int | None = None
    """None: all parts."""
    attempt: int | None = None
    """None: all attempts."""


@attrs.frozen
class DiscardOlder(Asks[list[tuple[str, int]]]):
    """Drop the staged batches that got no rows for `age` seconds; answered with their queries and numbers."""

    age: float = attrs.field(validator=v.instance_of((int, float)))


@attrs.frozen
class DeclareGroup(Asks[Mapping[int, int]]):
    """Keep all rows that this group has not read; answered with its offsets."""

    group: str = attrs.field(validator=_NAME)
    at: Literal["first", "end"] = attrs.field(default="first", validator=v.in_(("first", "end")))
    """Where a new group begins."""


@attrs.frozen
class CommitGroup(Asks[None]):
    """Set the offsets of a group. Fails with `JournalError` for an unknown group or an offset beyond the end."""

    group: str = attrs.field(validator=_NAME)
    offsets: Mapping[int, int] = attrs.field(validator=_MAP)
    """For some partitions, the offset behind the last row the group has done with."""


@attrs.frozen
class ForgetGroup(Asks[None]):
    """Keep no more rows for a group."""

    group: str = attrs.field(validator=_NAME)


@attrs.frozen
class GetGroups(Asks[Mapping[str, Mapping[int, int]]]):
    """Ask for the offsets of all groups."""


@attrs.frozen
class GetExtent(Asks[Extent]):
    """Ask for the `Extent`."""


@attrs.frozen
class GetReach(Asks[Reach]):
    """Ask how far the rows of an earlier opening are still the same; see `Store.reach`."""

    opening: str | None = attrs.field(validator=v.optional(_NAME))


@attrs.frozen
class GetSchema(Asks[pa.Schema]):
    """Ask for the columns."""


@attrs.frozen
class AwaitRows(Asks[Extent]):
    """Ask for the `Extent` once there are `rows` rows behind some offsets; the ask's own time-out ends the wait."""

    after: Mapping[int, int] = attrs.field(validator=_MAP)
    """For each partition, the offset at which counting starts; the oldest one for a partition that is not named."""
    rows: int = attrs.field(default=1, validator=_INT)


@attrs.frozen
class Read(Asks[list[Block]]):
    """Read blocks of one partition, as `Store.read`. To read on, start at the end of the last block; an empty list: there are no more."""

    partition: int = attrs.field(validator=_INT)
    start: int = attrs.field(validator=_INT)
    end: int | None = attrs.field(default=None, validator=v.optional(_INT))
    max_bytes: int = attrs.field(default=4 << 20, validator=_INT)


@attrs.frozen
class OffsetWithin(Asks[int]):
    """Ask for the offset at which `Read` with the same arguments would end."""

    partition: int = attrs.field(validator=_INT)
    start: int = attrs.field(validator=_INT)
    end: int = attrs.field(validator=_INT)
    max_bytes: int = attrs.field(validator=_INT)


@attrs.frozen(kw_only=True)
class JournalStatistics:
    """Counters of a journal."""

    store: StoreStatistics
    appends: int
    """Appends that succeeded."""
    appends_waiting: int
    """Appends and deliveries that are not answered yet."""
    octets_waiting: int
    full: bool
    """Whether they wait for room."""
    appends_refused: int
    """Because the journal was full and too many waited."""
    readers_waiting: int
    """`AwaitRows` that are not answered yet."""


@attrs.frozen
class GetJournalStatistics(Asks[JournalStatistics]):
    """Ask for `JournalStatistics`."""


@attrs.frozen
class _Clean:
    """Time to delete rows that may go."""


@attrs.frozen(eq=False)
class _Job:
    """Work for the thread that writes."""

    run: Callable[[], Any] | None
    """None for an append; appends are written in groups."""
    reply: Reply[Any] | None
    append: Append | None = None
    octets: int = 0

    @property
    def rows(self) -> int:
        """Number of rows to append."""
        rows: Any = self.append.rows if self.append is not None else ()
        return rows.num_rows if isinstance(rows, pa.RecordBatch) else len(rows)

    @property
    def wanted(self) -> bool:
        """Whether the asker still waits."""
        return self.reply is None or self.reply.wanted

    def answer(self, value: Any) -> None:
        if self.reply is not None:
            self.reply.send(value)

    def fail(self, error: Exception) -> None:
        if self.reply is not None:
            self.reply.fail(error)
        else:
            logger.error("rows were told, not asked, and are lost: %s", error, extra={"event": "rows_lost"})


@attrs.frozen(eq=False)
class _Part:
    """Appends that are written as one."""

    number: int
    """The partition."""
    jobs: list[_Job]

    def takes(self, job: _Job) -> bool:
        """Whether another append can join: both have messages, and at least one."""
        assert job.append is not None
        return not any(
            isinstance(rows, pa.RecordBatch) or not rows for rows in (self._rows_of(self.jobs[-1]), self._rows_of(job))
        )

    @staticmethod
    def _rows_of(job: _Job) -> Any:
        return job.append.rows if job.append is not None else ()

    @property
    def rows(self) -> Any:
        """All rows: a record batch, or a list of messages."""
        if len(self.jobs) == 1:
            return self._rows_of(self.jobs[0])
        return [row for job in self.jobs for row in self._rows_of(job)]


class Journal(
    Actor[
        Append
        | AwaitRows
        | CommitGroup
        | DeclareGroup
        | Deliver
        | DiscardOlder
        | DiscardStaged
        | ForgetGroup
        | GetExtent
        | GetGroups
        | GetJournalStatistics
        | GetReach
        | GetSchema
        | OffsetWithin
        | Read
        | StageRows
        | _Clean
    ]
):
    """Keeps a journal. Supervise it: if the ledger refuses, the actor fails, because only a new start tells what was committed.

    On `Ref.stop` it writes all pending appends, unless it is full. When killed, pending questions fail with `ActorStopped`.

    Args:
        directory: made if it is not there.
        columns: a message class (see `columns_of`), an Arrow schema, or None for the journal's own, or `Envelope`'s for a new one.
        config: see `JournalConfig`.
        max_waiting: most appends that wait while the journal is full.
        max_octets: bytes that wait for the disk before the next append is taken; the mailbox fills meanwhile, so give it a bound.
        clean_every: seconds between runs of retention, which also check for room on a full disk and for deleted files.
        clock: seconds since 1970.

    Raises:
        JournalError: in `started`, see `Store.open`.

    Example:
        >>> import tempfile
        >>> from levada.framework import ActorSystem, bounded
        >>> from levada.actors.journal import Envelope
        >>> from datetime import datetime, UTC
        >>> async def main(directory: str) -> None:
        ...     async with ActorSystem(ask_timeout=60.0) as system:  # a disk may take its time
        ...         journal = system.spawn(Journal, directory, mailbox=bounded(256))
        ...         print(await journal.ask(Append([Envelope(datetime.now(UTC), value=b"hello")])))
        ...         [block] = await journal.ask(Read(0, 0))
        ...         print(block.batch().column("value")[0])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trio.run(main, directory)
        Appended(partition=0, first=0, count=1)
        b'hello'
    """

    directory: str | os.PathLike[str]
    columns: type | pa.Schema | None = None
    config: JournalConfig = attrs.field(factory=JournalConfig, kw_only=True)
    max_waiting: int = attrs.field(default=1024, kw_only=True)
    max_octets: int = attrs.field(default=64 << 20, kw_only=True)
    clean_every: float = attrs.field(default=1.0, kw_only=True)
    clock: Callable[[], float] = attrs.field(default=time.time, kw_only=True)

    async def started(self) -> None:
        """Open the journal and start the task that writes."""
        self._columns: Columns[Any] | None = columns_of(self.columns) if isinstance(self.columns, type) else None
        schema = self._columns.schema if self._columns is not None else self.columns
        self._waiting: deque[_Job] = deque()
        self._urgent: deque[_Job] = deque()
        self._octets = 0
        self._full = self._warned = False
        self._refused = self._appended = 0
        self._watchers: list[tuple[AwaitRows, Reply[Extent]]] = []
        self._wake = trio.Event()
        self._progress = trio.Event()
        self._writing = trio.CapacityLimiter(1)
        self._reading = trio.CapacityLimiter(READERS)
        opening = functools.partial(Store.open, self.directory, schema, self.config, clock=self.clock)
        self._store = await self.enter(_opened(opening, self._writing))
        self.start_soon(self._write)
        self.timers.every("clean", self.clean_every, _Clean())

    async def stopping(self, reason: Reason) -> None:
        """Write all pending appends, as far as there is room."""
        if hasattr(self, "_store") and not isinstance(reason, Failed | Killed):
            while self._urgent or (self._waiting and not self._full):
                await self._progress.wait()

    @handles
    async def append(self, m: Append) -> None:
        """Queue rows for the next group."""
        # Not while it is full: the questions that make room come by the same mailbox.
        while self._octets >= self.max_octets and not self._full:
            await self._progress.wait()
        self._queue(_Job(None, self._reply(), m, _octets_of(m.rows)))

    @handles
    def deliver(self, m: Deliver) -> None:
        """Queue a batch behind the appends that wait."""
        self._queue(_Job(functools.partial(self._deliver, m), self._reply()))

    def _queue(self, job: _Job) -> None:
        if self._full and len(self._waiting) >= self.max_waiting:
            self._refused += 1
            job.fail(
                JournalFull(
                    f"it is full, and {self.max_waiting} appends wait already (max_waiting)", path=str(self.directory)
                )
            )
            return
        self._waiting.append(job)
        self._octets += job.octets
        self._wake.set()

    def _reply(self) -> Reply[Any] | None:
        try:
            return self.reply_later()
        except ActorError:  # told, not asked
            return None

    @handles
    async def stage(self, m: StageRows) -> None:
        """Stage rows."""
        octets = _octets_of(m.rows)
        # A full journal still stages, so this wait ends.
        while self._urgent and sum(job.octets for job in self._urgent) + octets > self.max_octets:
            await self._progress.wait()
        self._do_soon(self._stage, m, octets=octets)

    @handles
    def discard(self, m: DiscardStaged) -> None:
        """Drop staged rows."""
        self._do_soon(self._store.unstage, m.query, m.batch, m.part, m.attempt)

    @handles
    def discard_older(self, m: DiscardOlder) -> None:
        """Drop staged rows that were given up."""
        self._do_soon(self._store.unstage_older, m.age)

    @handles
    def declare(self, m: DeclareGroup) -> None:
        """Declare a group."""
        self._do_soon(self._store.declare_group, m.group, m.at)

    @handles
    def commit(self, m: CommitGroup) -> None:
        """Set the offsets of a group."""
        self._do_soon(self._store.commit_group, m.group, m.offsets)

    @handles
    def forget(self, m: ForgetGroup) -> None:
        """Drop a group."""
        self._do_soon(self._store.forget_group, m.group)

    @handles
    def groups(self, m: GetGroups) -> None:
        """Answer with the offsets of all groups, behind the commits that were asked for before."""
        self._do_soon(self._store.groups)

    @handles
    def clean(self, _: _Clean) -> None:
        """Check that the files are still there, delete rows that may go, and try again if the journal was full."""
        if self._urgent:
            return  # it is behind, and questions go first
        self._do_soon(self._store.look)
        if self._full or self.config.retain_time is not None or self.config.segment_time is not None:
            self._do_soon(self._store.retain)

    def _do_soon(self, function: Callable[..., Any], *args: Any, octets: int = 0) -> None:
        self._urgent.append(_Job(functools.partial(function, *args), self._reply(), None, octets))
        self._wake.set()

    async def _write(self) -> None:
        while True:
            # Only the jobs that are there now: tasks that stage block after block would hold up appends for ever.
            for _ in range(len(self._urgent)):
                job = self._urgent[0]
                if job.wanted:
                    await self._run(job)
                self._urgent.popleft()
                # Any job may have made room, except staging, which takes some.
                self._full = self._full and bool(job.octets)
                self._tell_progress()
            if self._waiting and not self._full:
                await (self._run_group() if self._waiting[0].append is not None else self._run_first())
                self._tell_watchers()
                self._tell_progress()
            elif not self._urgent:
                self._wake = trio.Event()
                with trio.move_on_after(SYNC_EVERY if self._store.unsynced else math.inf) as idle:
                    await self._wake.wait()
                if idle.cancelled_caught:
                    await self._run(_Job(self._store.sync_ends, None))

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def _run(self, job: _Job) -> None:
        try:
            assert job.run is not None
            job.answer(await self._in_thread(job.run))
        except (JournalError, OSError) as error:
            if job.reply is not None:
                job.fail(error)
            else:
                logger.warning("%s: %s", self.directory, error, extra={"event": "clean"})
            self._require_store(error)

    async def _run_first(self) -> None:
        job = self._waiting[0]
        try:
            if job.wanted and job.run is not None:
                job.answer(await self._in_thread(job.run))
        except JournalFull as error:
            self._note_full(error)
            return
        except (JournalError, OSError) as error:
            job.fail(error)
            self._require_store(error)
        self._done(job)

    async def _run_group(self) -> None:
        jobs: list[_Job] = []
        octets = 0
        for job in self._waiting:
            if job.append is None or len(jobs) >= GROUP_APPENDS or (jobs and octets + job.octets > GROUP_OCTETS):
                break
            jobs.append(job)
            octets += job.octets
        for job in [job for job in jobs if not job.wanted]:
            jobs.remove(job)
            self._done(job)
        if not jobs:
            return
        answers, error = await self._in_thread(functools.partial(self._append, jobs))
        for job, answer in answers:
            if isinstance(answer, Appended):
                job.answer(answer)
                self._appended += 1
                self._warned = False
            else:
                job.fail(answer)
            self._done(job)
        if isinstance(error, JournalFull):
            self._note_full(error)
        elif error is not None:
            self._require_store(error)

    def _done(self, job: _Job) -> None:
        self._waiting.remove(job)
        self._octets -= job.octets

    def _note_full(self, error: JournalFull) -> None:
        self._full = True
        if not self._warned:
            logger.warning("%s: appends wait: %s", self.directory, error.detail, extra={"event": "journal_full"})
            self._warned = True

    def _require_store(self, error: Exception) -> None:
        """Fail if the store is broken, so that a new start reads the state from the disk."""
        if self._store.broken:
            raise error

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=self._writing)

    def _batch(self, rows: pa.RecordBatch | Sequence[Any]) -> pa.RecordBatch:
        if isinstance(rows, pa.RecordBatch):
            return rows
        if self._columns is None:
            # A journal without a class of its own takes any class whose columns it has.
            if not rows:
                raise SchemaMismatch("an append has one row or more")
            try:
                return columns_of(type(rows[0])).encode(rows)
            except (TypeError, ConfigurationError) as error:
                raise SchemaMismatch(f"rows are a record batch or messages: {error}") from error
        return self._columns.encode(rows)

    def _append(self, jobs: list[_Job]) -> tuple[list[tuple[_Job, Appended | Exception]], Exception | None]:
        """Write a group; return the answers of finished jobs, and the error that stopped the rest."""
        choose = self._store.choose_partition
        placed = [(job, m.partition if m.partition is not None else choose(m.key)) for job in jobs if (m := job.append)]
        try:
            return self._append_parts(self._together(placed)), None
        except JournalUnwritable as error:
            return [(job, error) for job in jobs], error
        except JournalError:
            pass  # the wrong append is found by trying each
        answers: list[tuple[_Job, Appended | Exception]] = []
        parts: list[_Part] = []
        for job, number in placed:
            part = _Part(number, [job])
            try:
                self._store.prepare(number, self._batch(part.rows))
            except JournalError as error:
                answers.append((job, error))
            else:
                parts.append(part)
        try:
            answers += self._append_parts(parts)
        except JournalFull as error:
            return answers, error
        except (JournalError, OSError) as error:
            return answers + [(job, error) for part in parts for job in part.jobs], error
        return answers, None

    def _together(self, placed: list[tuple[_Job, int]]) -> list[_Part]:
        """Join successive messages for one partition: making a column costs 3 µs, for one row or for a hundred."""
        parts: list[_Part] = []
        last: dict[int, _Part] = {}
        for job, number in placed:
            part = last.get(number)
            if part is not None and part.takes(job):
                part.jobs.append(job)
            else:
                part = last[number] = _Part(number, [job])
                parts.append(part)
        return parts

    def _append_parts(self, parts: list[_Part]) -> list[tuple[_Job, Appended | Exception]]:
        if not parts:
            return []
        answers: list[tuple[_Job, Appended | Exception]] = []
        written = self._store.append([(part.number, self._batch(part.rows)) for part in parts])
        for part, answer in zip(parts, written, strict=False):
            first = answer.first
            for job in part.jobs:
                answers.append((job, Appended(answer.partition, first, job.rows)))
                first += job.rows
        return answers

    def _stage(self, m: StageRows) -> int:
        stage = self._store.staged(m.query, m.batch).get((m.part, m.attempt))
        batch, there = self._batch(m.rows), stage.rows if stage is not None else 0
        at = there if m.at is None else m.at
        end: int = at + batch.num_rows
        if there == at:
            (stage or self._store.stage(m.query, m.batch, m.part, m.attempt)).append(batch)
        elif there < end:
            raise JournalError(
                f"{there} rows of part {m.part} of batch {m.batch} of {m.query} are staged, where rows {at} to {end} were to come",
                path=str(self.directory),
            )
        return end  # of rows that were sent again, too

    def _deliver(self, m: Deliver) -> Delivered:
        stages = self._store.staged(m.query, m.batch)
        if self._store.delivered(m.query, m.batch) is None:
            self._require_staged(m, stages)
        partitions = self.config.partitions
        done = self._store.deliver(
            m.query,
            m.batch,
            (
                (part % partitions, message)
                for part, attempt in sorted(m.winners.items())
                for message in stages[part, attempt].messages()
            ),
        )
        self._store.unstage(m.query, m.batch)
        return done

    def _require_staged(self, m: Deliver, stages: Mapping[tuple[int, int], Stage]) -> None:
        for part, attempt in m.winners.items():
            stage = stages.get((part, attempt))
            there = stage.rows if stage is not None else 0
            if stage is None or there != m.rows.get(part, there):
                wanted = f"{m.rows[part]} " if part in m.rows else ""
                raise JournalError(
                    f"batch {m.batch} of {m.query}: the {wanted}rows of part {part} are not staged, there are {there}: they were given up "
                    "meanwhile, or lost by a power failure",
                    path=str(self.directory),
                )

    @handles
    def read(self, m: Read) -> None:
        """Read in another thread."""
        self._read_soon(lambda: list(self._store.read(m.partition, m.start, m.end, max_bytes=m.max_bytes)))

    @handles
    def measure(self, m: OffsetWithin) -> None:
        """Measure in another thread."""
        self._read_soon(lambda: self._store.offset_within(m.partition, m.start, m.end, max_bytes=m.max_bytes))

    def _read_soon(self, function: Callable[[], Any]) -> None:
        reply = self._reply()
        if reply is not None:
            self.start_soon(self._read, function, reply)

    async def _read(self, function: Callable[[], Any], reply: Reply[Any]) -> None:
        try:
            async with self._reading:
                if reply.wanted:
                    reply.send(await trio.to_thread.run_sync(function))
        except (JournalError, OSError) as error:
            reply.fail(error)

    @handles
    def extent(self, m: GetExtent) -> Extent:
        """Answer with the extent."""
        return self._store.extent()

    @handles
    def reach(self, m: GetReach) -> Reach:
        """Compare with an earlier opening."""
        return self._store.reach(m.opening)

    @handles
    def schema(self, m: GetSchema) -> pa.Schema:
        """Answer with the columns."""
        return self._store.schema

    @handles
    def await_rows(self, m: AwaitRows) -> Extent | None:
        """Answer now, or when rows come."""
        extent = self._store.extent()
        if _has_rows(extent, m):
            return extent
        reply = cast("Reply[Extent] | None", self._reply())
        if reply is not None:
            self._watchers = [each for each in self._watchers if each[1].wanted]
            self._watchers.append((m, reply))
        return None

    def _tell_watchers(self) -> None:
        if self._watchers:
            extent, waiting = self._store.extent(), self._watchers
            self._watchers = [each for each in waiting if not _has_rows(extent, each[0])]
            for question, reply in waiting:
                if _has_rows(extent, question):
                    reply.send(extent)

    @handles
    def count(self, m: GetJournalStatistics) -> JournalStatistics:
        """Answer with the counters."""
        return JournalStatistics(
            store=self._store.statistics(),
            appends=self._appended,
            appends_waiting=len(self._waiting),
            octets_waiting=self._octets,
            full=self._full,
            appends_refused=self._refused,
            readers_waiting=sum(reply.wanted for _, reply in self._watchers),
        )


def _octets_of(rows: Any) -> int:
    return int(rows.nbytes) if isinstance(rows, pa.RecordBatch) else ROW_OCTETS * len(rows)


def _has_rows(extent: Extent, wanted: AwaitRows) -> bool:
    rows = sum(max(0, end - wanted.after.get(number, extent.first[number])) for number, end in extent.end.items())
    return rows >= wanted.rows


@asynccontextmanager
async def _opened(opening: Callable[[], Store], writing: trio.CapacityLimiter) -> AsyncIterator[Store]:
    # Threads cannot be interrupted: if this is cancelled, the store is opened and closed again; if killed, it is closed behind the current write.
    store = await trio.to_thread.run_sync(opening, limiter=writing)
    try:
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(store.close, limiter=writing)
