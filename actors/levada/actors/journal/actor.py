"""`Journal`: the actor that keeps a journal.

One thread at a time does all the writing, in the order of the questions. Appends that come while the disk is busy form the next group, so many
small appends share one sync, and none waits for more than two. Groups' offsets, retention and staging go before the next group of appends: the
first two make room.

When the journal is full, appends and deliveries wait, in order, until there is room again. This holds the senders back.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import attrs
import pyarrow as pa
import trio

from levada.actors.metrics.journal import journal_samples
from levada.framework import Actor, Behaviour, Failed, Killed, Reason, Reply, Sample, handles
from levada.framework.embedding import DescribedActor
from levada.framework.errors import ActorError, LevadaError
from levada.framework.files import folder_path
from levada.framework.platform import Platform
from levada.framework.text import printable

from .appends import Appends, Told, ToldRows, WriteJob
from .asking import until_free
from .blocks import bytes_of
from .columns import Columns, columns_of
from .config import JournalConfig
from .delivering import deliver, stage_rows
from .errors import JournalError, bare, fresh, refused
from .extent import Extent, partition_of
from .ledger import Reach
from .places import require_named
from .questions import (
    Append,
    AwaitRows,
    CommitGroup,
    CopyRows,
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
    StageRows,
    Trimmed,
    TrimRows,
)
from .reading import command_of, entities_of, entity_of, rows_of
from .store import Store
from .trim_requests import TrimRequest, TrimRequests
from .writing import GROUP_BYTES, JournalWriter, Queue

__all__ = ["Journal", "reply_of"]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.journal")

ROW_BYTES = 256
"""Assumed size of a message before it is in columns."""
READERS = 4
"""Threads that read at a time."""
TOGETHER = 16
"""Entities that one of them reads in a turn, if their rows are few."""


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
        | CopyRows
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
        | TrimRows
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
        clean_every: seconds between runs of retention, which also check for room on a full disk, for deleted files and for a `backup`.
        dedicated: whether this process does nothing else, so that an append that comes alone may hold it up while the disk is quick.
        clock: returns seconds since 1970. None: the time of the system, which is virtual if a test's clock of trio is.
        copy_of: see `Store.open`.

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
    dedicated: bool = attrs.field(default=False, kw_only=True)
    clock: Callable[[], float] | None = attrs.field(default=None, kw_only=True)
    copy_of: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._refusal: JournalError | None = JournalError("it is being opened", path=self.about)
        """Why it cannot answer; None: it is open."""
        self._queue = Queue(os.fspath(folder_path(self.directory)), self.max_waiting)
        self._writing = trio.CapacityLimiter(1)
        self._reading = trio.CapacityLimiter(READERS)
        self._entities = deque[tuple[ReadEntity, Reply[Found]]]()
        self._erasing = trio.Lock()
        self._told, self._told_rows = Told(self._queue.directory), ToldRows()

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
            appends=self._writer.appended,
            refused=self._queue.refused,
            waiting=len(self._queue.waiting),
            waiting_bytes=self._queue.waiting_bytes,
            full=self._queue.full is not None,
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
            "bytes_stored": sizes.bytes_stored,
            "rows_appended": sizes.rows_appended,
            "appends_waiting": len(self._queue.waiting),
            "full": self._queue.full is not None,
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
        """Fail the question that is being handled, because the journal is not open."""
        assert self._refusal is not None
        (reply_of(self) or self._told_rows).fail(fresh(self._refusal))

    async def _open(self) -> None:
        columns: Columns[Any] | None = columns_of(self.columns) if isinstance(self.columns, type) else None
        schema = columns.schema if columns is not None else self.columns
        opening = functools.partial(
            Store.open, self.directory, schema, self.config, clock=self.clock, copy_of=self.copy_of
        )
        self._store = await self.enter(_opened(self.system.platform, opening, self._writing))
        self._appends = Appends(self._store, columns)
        self._trim_requests = TrimRequests(self.system.platform.files, self._store.directory)
        self._writer = JournalWriter(
            self.system.platform,
            self._queue,
            self._store,
            self._appends,
            self._writing,
            dedicated=self.dedicated,
            full=self._clean_later,
        )
        self._refusal = None
        self.start_soon(self._writer.run)
        self._clean_later()

    async def stopping(self, reason: Reason) -> None:
        """Write all pending appends, as far as there is room."""
        if not isinstance(reason, Failed | Killed):
            await self._queue.drain()

    @handles
    def append(self, m: Append) -> Coroutine[Any, Any, None] | None:
        """Queue rows for the next group."""
        # Not a coroutine function: an ask of an idle journal calls this at once, without a turn of the mailbox.
        if self._queue.waiting_bytes >= self.max_pending_bytes and not self._queue.full:
            return self._append_later(m)
        self._queue.put(WriteJob(None, reply_of(self) or self._told_rows, m, _bytes_of(m.rows), m.waits))
        return None

    async def _append_later(self, m: Append) -> None:
        # Not while it is full: the questions that make room come by the same mailbox.
        while self._queue.waiting_bytes >= self.max_pending_bytes and not self._queue.full:
            await self._queue.progress()
        self._queue.put(WriteJob(None, reply_of(self) or self._told_rows, m, _bytes_of(m.rows), m.waits))

    @handles
    def deliver(self, m: Deliver) -> None:
        """Queue a batch behind the appends that wait."""
        self._queue.put(WriteJob(functools.partial(deliver, self._store, m), reply_of(self) or self._told_rows))

    @handles
    def copy(self, m: CopyRows) -> None:
        """Queue rows of another log behind the appends that wait."""
        copy = functools.partial(self._store.copy, m)
        self._queue.put(WriteJob(copy, reply_of(self) or self._told_rows, waits=False))

    @handles
    async def stage(self, m: StageRows) -> None:
        """Stage rows."""
        size = _bytes_of(m.rows)
        # A full journal still stages, so this wait ends.
        urgent = self._queue.urgent
        while urgent and sum(job.size for job in urgent) + size > self.max_pending_bytes:
            await self._queue.progress()
        self._do_soon(self._stage, m, size=size)

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
        """Look after what comes from outside (`Store.look`), delete rows that may go, and try again if the journal was full."""
        self._clean_later()
        is_behind = bool(self._queue.urgent)  # then questions go first
        self._do_soon(self._look)
        if (request := self._trim_requests.take()) is not None:
            self.start_soon(self._trim_all, request)
        if not is_behind and (self._queue.full or self._counts_time):
            self._do_soon(self._store.retain)

    def _look(self) -> None:
        self._store.look()
        self._trim_requests.look()

    @property
    def _counts_time(self) -> bool:
        return self.config.retain_time is not None or self.config.segment_time is not None

    def _clean_later(self) -> None:
        # In virtual time nobody moves the files while it passes.
        if self._queue.full or self._counts_time or self._store.erasures_left or not self.system.platform.virtual:
            self.timers.once("clean", self.clean_every, _Clean())

    def _stage(self, m: StageRows) -> int:
        return stage_rows(self._store, m, self._appends.batch_of(m.rows))

    def _do_soon(self, function: Callable[..., Any], *args: Any, size: int = 0) -> None:
        self._queue.put_first(WriteJob(functools.partial(function, *args), reply_of(self) or self._told, None, size))

    @handles
    def read(self, m: Read) -> None:
        """Read in another thread."""
        self._read_soon(lambda: list(self._store.read(m.partition, m.start, m.end, max_bytes=m.max_bytes)))

    @handles
    def read_rows(self, m: ReadRows) -> None:
        """Read in another thread, and copy the rows for the way."""
        self._read_soon(lambda: rows_of(self._store, m))

    @handles
    def read_entity(self, m: ReadEntity) -> None:
        """Read in another thread, and copy the rows for the way."""
        reply = reply_of(self)
        if reply is not None:
            self._entities.append((m, reply))
            self.start_soon(self._read_entities)

    @handles
    def erase(self, m: EraseEntity) -> None:
        """Erase rows, a segment at a time, between the appends."""
        self.start_soon(self._erase, m, reply_of(self))

    async def _erase(self, m: EraseEntity, reply: Reply[Erased] | None) -> None:
        number = partition_of(m.entity, self.config.partitions) if m.partition is None else m.partition
        platform = self.system.platform

        async def steps() -> Iterator[int]:
            known = self._store.archives.get(number)
            if m.entity:  # the shard's own rows are not archived
                require_named(known, m.archive, number, str(self.directory))
            if m.archive:
                from .archive import Archive
                from .still import still_store

                archive, log = Archive.at(m.archive, platform.files), still_store(self._store)
                # First, so that rows which are gone from the log are gone from both.
                await platform.run_in_thread(archive.erase, log, number, m)
            return await self._writer.in_thread(lambda: self._store.erase(m.entity, partition=number, before=m.before))

        rows = await self._rewrite(steps, reply)
        if rows is not None and reply is not None:
            reply.send(Erased(number, rows))

    @handles
    def trim(self, m: TrimRows) -> None:
        """Find the rows in another thread, and take them out, a segment at a time, between the appends."""
        self.start_soon(self._trim, m, reply_of(self))

    async def _trim(self, m: TrimRows, reply: Reply[Trimmed] | None) -> None:
        platform = self.system.platform

        async def steps() -> Iterator[int]:
            async with self._reading:
                from .archive import archived_rows  # Arrow's Parquet takes 50 ms

                read, write = platform.run_in_thread, self._writer.in_thread
                found = await archived_rows(self._store, m, platform.files, read, write)
            return self._store.trim(m.partition, found)

        rows = await self._rewrite(steps, reply)
        if rows is not None and reply is not None:
            reply.send(Trimmed(m.partition, rows))

    async def _trim_all(self, request: TrimRequest) -> None:
        """Trim all partitions for another process."""
        rows, why = 0, ""
        try:
            for number in range(self.config.partitions):
                m = request.question(number)
                done = await self.ref.ask(m, timeout=None)
                rows += done.rows
        except LevadaError as error:
            why = str(error)
        await self._writer.in_thread(lambda: self._trim_requests.answer(request, rows, why))

    async def _rewrite(
        self, begin: Callable[[], Coroutine[Any, Any, Iterator[int]]], reply: Reply[Any] | None
    ) -> int | None:
        """Take rows out in steps; return how many, or None if the journal refuses."""
        rows = 0
        try:
            async with self._erasing:
                steps = await begin()
                while (gone := await self._writer.in_thread(lambda: next(steps, None))) is not None:
                    rows += gone
        except (JournalError, OSError) as error:
            if reply is not None:
                reply.fail(error)
            else:
                logger.error("%s: rows are not erased: %s", self.directory, error, extra={"event": "not_erased"})
            self._writer.require_store(error)
            return None
        self._queue.made_room()  # perhaps
        return rows

    @handles
    def find_command(self, m: FindCommand) -> None:
        """Look it up in another thread."""
        self._read_soon(lambda: command_of(self._store, m))

    @handles
    def measure(self, m: OffsetWithin) -> None:
        """Measure in another thread."""
        self._read_soon(lambda: self._store.offset_within(m.partition, m.start, m.end, max_bytes=m.max_bytes))

    def _read_soon(self, function: Callable[[], Any]) -> None:
        reply = reply_of(self)
        if reply is not None:
            self.start_soon(self._read, function, reply)

    async def _read(self, function: Callable[[], Any], reply: Reply[Any]) -> None:
        try:
            while True:
                async with self._reading:
                    if not reply.wanted:
                        return
                    if reply.has_room:
                        reply.send(await self.system.platform.run_in_thread(function))
                        return
                await reply.room()  # without a place among the readers: this peer takes its answers slowly
        except (JournalError, OSError) as error:
            reply.fail(bare(error))

    async def _read_entities(self) -> None:
        """Read for entities whose questions wait, several in one turn of a thread: a turn takes 0.1 ms, a tenth of a question."""
        async with self._reading:
            some: list[tuple[ReadEntity, Reply[Found]]] = []
            while self._entities and len(some) < TOGETHER:
                m, reply = self._entities.popleft()
                if reply.wanted and reply.has_room:
                    some.append((m, reply))
                elif reply.wanted:
                    self.start_soon(self._read, functools.partial(entity_of, self._store, m), reply)
            if not some:  # another turn has read for them
                return
            questions = [m for m, _ in some]
            answers = await self.system.platform.run_in_thread(lambda: list(entities_of(self._store, questions)))
        for (_, reply), answer in zip(some, answers, strict=False):
            if isinstance(answer, Found):
                reply.send(answer)
            else:
                reply.fail(bare(answer))
        for left in some[len(answers) :]:
            self._entities.append(left)
            self.start_soon(self._read_entities)

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
        if m.reached(extent):
            return extent
        reply = cast("Reply[Extent] | None", reply_of(self))
        if reply is not None:
            self._writer.watch(m, reply)
        return None

    @handles
    def count(self, m: GetJournalStatistics) -> JournalStatistics:
        """Answer with the counters."""
        return JournalStatistics(
            store=self._store.statistics(),
            appends=self._writer.appended,
            appends_waiting=len(self._queue.waiting),
            bytes_waiting=self._queue.waiting_bytes,
            full=self._queue.full is not None,
            appends_refused=self._queue.refused,
            readers_waiting=self._writer.readers_waiting,
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


def reply_of(actor: Actor[Any]) -> Reply[Any] | None:
    """Take the right to answer the message that is being handled; None if it was told, not asked."""
    try:
        return actor.reply_later()
    except ActorError:
        return None


def _behind(extent: Extent, offsets: Mapping[int, int]) -> int:
    """Count the rows that a group has not read."""
    return sum(end - max(offsets.get(number, 0), extent.first[number]) for number, end in extent.end.items())


def _bytes_of(rows: Any) -> int:
    if isinstance(rows, pa.RecordBatch):
        return bytes_of(rows, GROUP_BYTES)
    return len(rows) if isinstance(rows, bytes) else ROW_BYTES * len(rows)


@asynccontextmanager
async def _opened(
    platform: Platform, opening: Callable[[], Store], writing: trio.CapacityLimiter
) -> AsyncIterator[Store]:
    # Threads cannot be interrupted: if this is cancelled, the store is opened and closed again; if killed, it is closed behind the current write.
    store = await until_free(lambda: platform.run_in_thread(opening, limiter=writing))
    try:
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await platform.run_in_thread(store.close, limiter=writing)
