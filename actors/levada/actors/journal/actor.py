"""`Journal`: the actor that keeps a journal.

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import dropwhile, islice, takewhile
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import attrs
import pyarrow as pa
import trio

from levada.actors.metrics.journal import journal_samples
from levada.framework import Behaviour, Failed, Killed, Reason, Reply, Sample, handles
from levada.framework.embedding import DescribedActor
from levada.framework.errors import ActorError
from levada.transports.text import printable

from .appends import Appends, Job
from .blocks import Block
from .columns import Columns, columns_of
from .config import JournalConfig
from .ends import SYNC_EVERY
from .errors import JournalError, JournalFull, fresh, refused
from .extent import Appended, Extent, partition_of
from .ipc import stream_of
from .ledger import Delivered, Reach
from .packing import bytes_of
from .questions import (
    MAX_BLOCK,
    Append,
    AwaitRows,
    CommitGroup,
    DeclareGroup,
    Deliver,
    DiscardOlder,
    DiscardStaged,
    Erased,
    EraseEntity,
    FindCommand,
    ForgetGroup,
    Found,
    GetExtent,
    GetGroups,
    GetJournalStatistics,
    GetReach,
    GetSchema,
    JournalStatistics,
    OffsetWithin,
    Read,
    ReadEntity,
    ReadRows,
    Rows,
    StageRows,
)
from .schema import fit, offsets
from .staging import Stage
from .store import Store

__all__ = ["Journal"]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.journal")

GROUP_APPENDS = 4096
"""Most appends that share one sync."""
GROUP_BYTES = 32 << 20
"""Most bytes that share one sync, unless one append is larger."""
ROW_BYTES = 256
"""Assumed size of a message before it is in columns."""
READERS = 4
"""Threads that read at a time."""


@attrs.frozen
class _Clean:
    """Time to delete rows that may go."""


@attrs.frozen
class _Reopen:
    """Time to try to open it again."""


class Journal(
    DescribedActor[
        Append
        | AwaitRows
        | CommitGroup
        | DeclareGroup
        | Deliver
        | DiscardOlder
        | DiscardStaged
        | EraseEntity
        | FindCommand
        | ForgetGroup
        | GetExtent
        | GetGroups
        | GetJournalStatistics
        | GetReach
        | GetSchema
        | OffsetWithin
        | Read
        | ReadEntity
        | ReadRows
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
        max_pending_bytes: bytes that wait for the disk before the next append is taken; the mailbox fills meanwhile, so give it a bound.
        reopen_every: seconds between attempts to open a journal that cannot be opened; until then each question fails with the reason. None:
            the actor fails.
        clean_every: seconds between runs of retention, which also check for room on a full disk and for deleted files.
        clock: seconds since 1970.

    Raises:
        JournalError: in `started`, see `Store.open`; not with `reopen_every`.

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
        Appended(partition=0, first=0, count=1, repeated=0)
        b'hello'
    """

    subject = "journal"

    directory: str | os.PathLike[str]
    columns: type | pa.Schema | None = None
    config: JournalConfig = attrs.field(factory=JournalConfig, kw_only=True)
    max_waiting: int = attrs.field(default=1024, kw_only=True)
    max_pending_bytes: int = attrs.field(default=64 << 20, kw_only=True)
    clean_every: float = attrs.field(default=1.0, kw_only=True)
    reopen_every: float | None = attrs.field(default=None, kw_only=True)
    clock: Callable[[], float] = attrs.field(default=time.time, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._refusal: JournalError | None = JournalError("it is being opened", path=self.about)
        """Why it cannot answer; None: it is open."""
        self._waiting: deque[Job] = deque()
        self._urgent: deque[Job] = deque()
        self._octets = 0
        self._full: JournalFull | None = None
        """Why appends wait."""
        self._warned = False
        self._expected = 0
        """Appends that may be there soon: those that waited when the last group was answered, and as many as were answered."""
        self._refused = self._appended = 0
        self._watchers: list[tuple[AwaitRows, Reply[Extent]]] = []
        self._wake = trio.Event()
        self._progress = trio.Event()
        self._writing = trio.CapacityLimiter(1)
        self._reading = trio.CapacityLimiter(READERS)
        self._erasing = trio.Lock()

    @property
    def about(self) -> str:
        """The directory."""
        return printable(os.fspath(self.directory))

    @property
    def _label(self) -> str:
        return printable(PurePath(self.directory).name)

    def metrics(self) -> Iterable[Sample]:
        """Return the counts and sizes, once it is open."""
        if self._refusal is not None:
            return ()
        return journal_samples(
            self._label,
            self._store.statistics(),
            appends=self._appended,
            refused=self._refused,
            waiting=len(self._waiting),
            waiting_bytes=self._octets,
            full=self._full is not None,
        )

    async def report(self) -> dict[str, object]:
        """Return the sizes, and how many rows each group is behind.

        Raises:
            JournalError: the journal is not open.
        """
        if self._refusal is not None:
            raise fresh(self._refusal)
        extent, sizes = self._store.extent(), self._store.statistics()
        groups = await self.ref.ask(GetGroups(), timeout=None)
        return {
            "name": self._label,
            "directory": self.about,
            "partitions": len(extent.end),
            "rows": sum(end - extent.first[number] for number, end in extent.end.items()),
            "octets": sizes.octets,
            "rows_appended": sizes.rows_appended,
            "appends_waiting": len(self._waiting),
            "full": self._full is not None,
            "groups": {printable(group): _behind(extent, offsets) for group, offsets in groups.items()},
        }

    async def started(self) -> None:
        """Open the journal and start the task that writes."""
        if self.reopen_every is None:
            await self._open()
        else:
            await self._try_to_open(self.reopen_every)

    async def _try_to_open(self, every: float) -> None:
        try:
            await self._open()
        except (JournalError, OSError) as error:
            known = self._refusal
            self._refusal = error if isinstance(error, JournalError) else refused(error, Path(self.directory))
            if str(known) != str(self._refusal):
                logger.error(
                    "%s; it is tried again every %g s", self._refusal, every, extra={"event": "journal_refused"}
                )
            self.become(_Refusing)
            self.timers.once("reopen", every, _Reopen())
        else:
            self.become(None)

    async def reopen(self) -> None:
        """Try to open a journal again that could not be opened."""
        assert self.reopen_every is not None
        await self._try_to_open(self.reopen_every)

    def refuse(self) -> None:
        """Have the question that is being handled fail, because the journal is not open."""
        assert self._refusal is not None
        reply = self._reply()
        if reply is not None:
            reply.fail(fresh(self._refusal))
        else:
            logger.error("rows were told, not asked, and are lost: %s", self._refusal, extra={"event": "rows_lost"})

    async def _open(self) -> None:
        columns: Columns[Any] | None = columns_of(self.columns) if isinstance(self.columns, type) else None
        schema = columns.schema if columns is not None else self.columns
        opening = functools.partial(Store.open, self.directory, schema, self.config, clock=self.clock)
        self._store = await self.enter(_opened(opening, self._writing))
        self._appends = Appends(self._store, columns)
        self._refusal = None
        self.start_soon(self._write)
        self.timers.every("clean", self.clean_every, _Clean())

    async def stopping(self, reason: Reason) -> None:
        """Write all pending appends, as far as there is room."""
        if not isinstance(reason, Failed | Killed):
            while self._urgent or (self._waiting and not self._full):
                await self._progress.wait()

    @handles
    def append(self, m: Append) -> Coroutine[Any, Any, None] | None:
        """Queue rows for the next group."""
        # Not a coroutine function: an ask of an idle journal calls this at once, without a turn of the mailbox.
        if self._octets >= self.max_pending_bytes and not self._full:
            return self._append_later(m)
        self._queue(Job(None, self._reply(), m, _bytes_of(m.rows)))
        return None

    async def _append_later(self, m: Append) -> None:
        # Not while it is full: the questions that make room come by the same mailbox.
        while self._octets >= self.max_pending_bytes and not self._full:
            await self._progress.wait()
        self._queue(Job(None, self._reply(), m, _bytes_of(m.rows)))

    @handles
    def deliver(self, m: Deliver) -> None:
        """Queue a batch behind the appends that wait."""
        self._queue(Job(functools.partial(self._deliver, m), self._reply()))

    def _queue(self, job: Job) -> None:
        if self._full is not None and job.append is not None and not job.append.waits:
            job.fail(fresh(self._full))
            return
        if self._full is not None and len(self._waiting) >= self.max_waiting:
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
        octets = _bytes_of(m.rows)
        # A full journal still stages, so this wait ends.
        while self._urgent and sum(job.octets for job in self._urgent) + octets > self.max_pending_bytes:
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
        self._urgent.append(Job(functools.partial(function, *args), self._reply(), None, octets))
        self._wake.set()

    async def _write(self) -> None:
        while True:
            # Only the jobs that are there now: tasks that stage block after block would hold up appends forever.
            for _ in range(len(self._urgent)):
                job = self._urgent[0]
                if job.wanted:
                    await self._run(job)
                self._urgent.popleft()
                if not job.octets:  # any job may have made room, except staging, which takes some
                    self._full = None
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
                    await self._run(Job(self._store.sync_ends, None))

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def _run(self, job: Job) -> None:
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
        self._take([job])

    async def _run_group(self) -> None:
        await self._let_askers_come()
        jobs: list[Job] = []
        octets = 0
        for job in islice(self._waiting, GROUP_APPENDS):
            octets += job.octets
            if job.append is None or (jobs and octets > GROUP_BYTES):
                break
            jobs.append(job)
        wanted = [job for job in jobs if job.reply is None or job.reply.wanted]
        answers, error = await self._in_thread(functools.partial(self._appends.write, wanted)) if wanted else ([], None)
        self._take(jobs)
        if len(answers) < len(wanted):  # the others wait for room
            answered = {job for job, _ in answers}
            left = [job for job in wanted if job not in answered]
            if isinstance(error, JournalFull):
                for job in left:
                    if job.append is not None and not job.append.waits:
                        job.fail(fresh(error))
                left = [job for job in left if job.append is None or job.append.waits]
            self._waiting.extendleft(reversed(left))
            self._octets += sum(job.octets for job in left)
        done = 0
        for job, answer in answers:
            if isinstance(answer, Exception):
                job.fail(answer)
            else:
                job.answer(answer)
                done += isinstance(answer, Appended)
        self._expected = len(self._waiting) + len(answers)
        if done:
            self._appended += done
            self._warned = False
        if isinstance(error, JournalFull):
            self._note_full(error)
        elif error is not None:
            self._require_store(error)

    async def _let_askers_come(self) -> None:
        """Let those that got answers ask again before the next group is written: half as many groups, for the same rows, cost less."""
        there = 0
        while there < len(self._waiting) < min(self._expected, GROUP_APPENDS):
            there = len(self._waiting)
            for _ in range(2):  # the first wakes them, in the second a busy mailbox has its turn
                await trio.lowlevel.checkpoint()

    def _take(self, jobs: Sequence[Job]) -> None:
        """Take the first jobs out of the queue."""
        for job in jobs:
            self._waiting.popleft()
            self._octets -= job.octets

    def _note_full(self, error: JournalFull) -> None:
        self._full = error
        if not self._warned:
            logger.warning("%s: appends wait: %s", self.directory, error.detail, extra={"event": "journal_full"})
            self._warned = True

    def _require_store(self, error: Exception) -> None:
        """Fail if the store is broken, so that a new start reads the state from the disk."""
        if self._store.broken:
            raise error

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=self._writing)

    def _stage(self, m: StageRows) -> int:
        stage = self._store.staged(m.query, m.batch).get((m.part, m.attempt))
        batch, there = self._appends.batch_of(m.rows), stage.rows if stage is not None else 0
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
    def read_rows(self, m: ReadRows) -> None:
        """Read in another thread, and copy the rows for the way."""
        self._read_soon(lambda: self._rows(m))

    def _rows(self, m: ReadRows) -> Rows:
        blocks = self._blocks_from(m)
        if blocks and blocks[0].octets.size > MAX_BLOCK:
            raise JournalError(
                f"the block at row {m.start} of partition {m.partition} has {blocks[0].octets.size} bytes, and answers have at most "
                f"{MAX_BLOCK}: lower block_bytes, or read it in the journal's own process",
                path=str(self.directory),
            )
        batches = [fit(block.batch(), self._store.schema) for block in blocks]
        if len(batches) > 1:
            batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
        octets = stream_of(batches[0]) if batches else b""
        first = blocks[0].first if blocks else m.start
        return Rows(m.partition, first, sum(block.rows for block in blocks), octets)

    def _blocks_from(self, m: ReadRows) -> list[Block]:
        """Return blocks without erased rows before, between and behind them; none if there are no more rows."""
        start = m.start
        while True:
            found = list(self._store.read(m.partition, start, m.end, max_bytes=m.max_bytes))
            blocks = list(takewhile(lambda block: not block.erased, dropwhile(lambda block: block.erased, found)))
            if blocks or not found:
                return blocks
            start = found[-1].end

    @handles
    def read_entity(self, m: ReadEntity) -> None:
        """Read in another thread, and copy the rows for the way."""
        self._read_soon(lambda: self._entity(m))

    def _entity(self, m: ReadEntity) -> Found:
        number = partition_of(m.entity, self.config.partitions) if m.partition is None else m.partition
        if m.newest is not None:
            batches: list[pa.RecordBatch] = []
            octets = 0
            for batch in self._store.newest_of(m.entity, m.newest, partition=number, start=m.start):
                octets += batch.nbytes
                if batches and octets > m.max_bytes:
                    break
                batches.append(batch)
            return _found(number, batches[::-1], None, m.stream)
        found = self._store.rows_of(m.entity, partition=number, start=m.start, max_bytes=m.max_bytes)
        for following, batch in found:
            if batch.num_rows:
                return _found(number, [batch], following, m.stream)
        return _found(number, [], None)

    @handles
    def erase(self, m: EraseEntity) -> None:
        """Erase rows, a segment at a time, between the appends."""
        self.start_soon(self._erase, m, self._reply())

    async def _erase(self, m: EraseEntity, reply: Reply[Erased] | None) -> None:
        try:
            async with self._erasing:
                number = partition_of(m.entity, self.config.partitions) if m.partition is None else m.partition
                steps = await self._in_thread(lambda: self._store.erase(m.entity, partition=number, before=m.before))
                rows = 0
                while (erased := await self._in_thread(lambda: next(steps, None))) is not None:
                    rows += erased
        except (JournalError, OSError) as error:
            if reply is not None:
                reply.fail(error)
            else:
                logger.error("%s: rows are not erased: %s", self.directory, error, extra={"event": "not_erased"})
            self._require_store(error)
            return
        self._full = None  # there may be room now
        self._wake.set()
        if reply is not None:
            reply.send(Erased(number, rows))

    @handles
    def find_command(self, m: FindCommand) -> None:
        """Look it up in another thread."""
        self._read_soon(lambda: self._command(m))

    def _command(self, m: FindCommand) -> Found:
        taken = self._store.taken(m.partition, m.command)
        if taken is None:
            return _found(m.partition, [], None)
        places = offsets(taken.first, taken.rows.num_rows)
        return _found(m.partition, [taken.rows.add_column(0, "offset", places)], None)

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
    def schema(self, m: GetSchema) -> bytes:
        """Answer with the columns."""
        columns: bytes = self._store.schema.serialize().to_pybytes()
        return columns

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
            bytes_waiting=self._octets,
            full=self._full is not None,
            appends_refused=self._refused,
            readers_waiting=sum(reply.wanted for _, reply in self._watchers),
        )


class _Refusing(Behaviour):
    """What a journal does while it cannot be opened."""

    @handles
    async def again(self, _: _Reopen) -> None:
        await _journal(self).reopen()

    @handles
    def other(self, _: object) -> None:
        _journal(self).refuse()


def _journal(actor: object) -> Journal:
    assert isinstance(actor, Journal)
    return actor


def _found(partition: int, batches: list[pa.RecordBatch], following: int | None, stream: bool = True) -> Found:
    if len(batches) > 1:
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    rows = sum(batch.num_rows for batch in batches)
    if not batches:
        return Found(partition, 0, following, b"")
    return Found(partition, rows, following, stream_of(batches[0]) if stream else batches[0])


def _behind(extent: Extent, offsets: Mapping[int, int]) -> int:
    """Count the rows that a group has not read."""
    return sum(end - max(offsets.get(number, 0), extent.first[number]) for number, end in extent.end.items())


def _bytes_of(rows: Any) -> int:
    if isinstance(rows, pa.RecordBatch):
        return bytes_of(rows, GROUP_BYTES)
    return len(rows) if isinstance(rows, bytes) else ROW_BYTES * len(rows)


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
