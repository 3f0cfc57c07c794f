"""`PostgresLog`: the actor that answers the questions of durable actors, and of Spark, from tables in PostgreSQL."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import (
    Append,
    Appended,
    AwaitRows,
    CopyRows,
    Erased,
    EraseEntity,
    Extent,
    Fenced,
    Found,
    GetExtent,
    GetReach,
    GetSchema,
    JournalDamaged,
    JournalError,
    OffsetWithin,
    Reach,
    Read,
    ReadEntity,
    ReadRows,
    Rows,
    SchemaMismatch,
    Trimmed,
    TrimRows,
    partition_of,
    rows_of_stream,
    stream_of,
)
from levada.actors.journal.actor import reply_of
from levada.actors.journal.appends import ToldRows
from levada.actors.journal.errors import bare
from levada.actors.journal.places import Archived, require_named
from levada.actors.journal.schema import conform, fit
from levada.actors.journal.trimming import COLUMNS
from levada.actors.journal.value_rows import ValueRows
from levada.actors.metrics.journal import log_samples
from levada.framework import Failed, Killed, Reason, Reply, Sample, handles
from levada.framework.embedding import DescribedActor
from levada.framework.platform import PLATFORM

from .addresses import PostgresAddress
from .errors import DatabaseAway
from .escapes import escaped
from .pool import Database, OpenLog
from .tables import IN_ORDER
from .values import kind_of
from .wire import bigint, bigints_in, double, integer, number_in, only_value, rows_in
from .writing import AppendJob, LogWriter

if TYPE_CHECKING:
    from levada.actors.journal.archive import Archive
    from levada.actors.journal.still import StillLog

__all__ = ["PostgresLog"]

ERASED_WITHIN: Final = 600.0
"""Seconds after which a connection that erases counts as lost: an entity may have many rows."""
REPORTED_WITHIN: Final = 0.4
"""Seconds that a report waits for the sizes: the dashboard waits for half a second."""
POLL_EVERY: Final = 0.05
"""Seconds between looks at the ends while `AwaitRows` waits for rows of other processes; a look takes 60 µs of CPU."""
MOST_ROWS: Final = 4096
"""The most rows of an entity in one answer."""
MOST_TRIMMED: Final = 200_000
"""The most rows that are trimmed in one transaction; to find them takes the server a look at all rows of the shard."""
_MOST_REMEMBERED: Final = (1 << 31) - 1
MOST_RUN: Final = 16_384
"""The most rows of a shard in one answer."""
_BEHIND_ALL: Final = (1 << 63) - 1
_MISFITS: Final = (pa.ArrowException, ValueError, OverflowError, struct.error)
_OFFSET: Final = kind_of(pa.field("offset", pa.int64()))


class PostgresLog(
    DescribedActor[
        Append
        | AwaitRows
        | CopyRows
        | EraseEntity
        | GetExtent
        | GetReach
        | GetSchema
        | OffsetWithin
        | Read
        | ReadEntity
        | ReadRows
        | TrimRows
    ]
):
    """A log in PostgreSQL, as this process uses it. `PostgresStore.open` starts it.

    Questions wait while the database is away, for half a minute at most, and then fail with an `OSError`. What the database refuses is a
    `JournalError`.

    Args:
        address: the database, and the table of the log.
        shards: the number of partitions of a new log.
        copy_of: the log whose rows are copied into this one; None: it is no copy.
    """

    subject = "journal"

    address: PostgresAddress
    shards: int
    copy_of: str | None = None

    def __attrs_post_init__(self) -> None:
        self._database = Database(PLATFORM.get(), self.address, self.shards, self.copy_of)
        self._writer = LogWriter(self._database, self.about, self._rows_came)
        self._waiting: list[tuple[AwaitRows, Reply[Any]]] = []
        self._came = trio.Event()

    async def started(self) -> None:
        """Start the task that writes. It connects with the first question."""
        await self.enter(_closed(self._database))
        self.start_soon(self._writer.run)

    async def stopping(self, reason: Reason) -> None:
        """Write the appends that have come."""
        if not isinstance(reason, Failed | Killed):
            await self._writer.drain()

    @property
    def about(self) -> str:
        """Where it is."""
        return self.address.shown

    async def report(self) -> Mapping[str, object]:
        """Return its counts; and the sizes, if it is open and the database answers."""
        sizes: Mapping[str, object] = {}
        if self._database.log is not None:
            with trio.move_on_after(REPORTED_WITHIN), suppress(JournalError, DatabaseAway):
                sizes = await self._sizes(self._database.log)
        return {
            "name": self.address.table,
            "directory": self.about,
            **sizes,
            "rows_appended": self._writer.rows,
            "appends_waiting": len(self._writer),
            "reconnected": self._database.reconnected,
        }

    async def _sizes(self, log: OpenLog) -> Mapping[str, object]:
        extent = await self._extent(log, None)
        [found] = await self._database.read([(log.tables.size(), [])])
        return {
            "partitions": len(extent.end),
            "rows": sum(end - extent.first[shard] for shard, end in extent.end.items()),
            "bytes_stored": 0 if found.get_value(0, 0) is None else number_in(found, 0),
        }

    def metrics(self) -> Iterable[Sample]:
        """Return its counts."""
        writer = self._writer
        return log_samples(self.address.table, appends=writer.appends, rows=writer.rows, waiting=len(writer))

    # Writing.

    @handles
    def append(self, m: Append) -> Coroutine[Any, Any, None] | None:
        """Queue rows for the next transaction."""
        # Not a coroutine function: an ask of an idle log calls this at once, without a turn of the mailbox.
        log, reply = self._database.log, reply_of(self) or ToldRows()
        if log is None or self._writer.is_full:
            return self._append_later(m, reply)
        self._append(log, m, reply)
        return None

    async def _append_later(self, m: Append, reply: Reply[Any] | ToldRows) -> None:
        await self._writer.room()
        if self._database.log is not None:
            self._append(self._database.log, m, reply)
        else:
            self.start_soon(self._append_when_open, m, reply)

    async def _append_when_open(self, m: Append, reply: Reply[Any] | ToldRows) -> None:
        try:
            log = await self._database.opened()
        except (JournalError, DatabaseAway) as error:
            reply.fail(bare(error))
        else:
            self._append(log, m, reply)

    def _append(self, log: OpenLog, m: Append, reply: Reply[Any] | ToldRows) -> None:
        try:
            shard = self._shard_of(log, m.partition, m.key)
            if m.at is None:
                raise JournalError(
                    "an append to a log in PostgreSQL says where it begins: Append(at=)", path=self.about
                )
            rows, columns = self._columns_in(log, m.rows)
            if not rows:
                self.start_soon(self._answer, reply, self._compare, log, m)
                return
        except JournalError as error:
            reply.fail(bare(error))
        else:
            text = log.append_one_text if rows == 1 else log.append_text
            self._writer.put(AppendJob(text, shard, m.at, m.at + rows, rows, self._mark(), columns, reply))

    def _columns_in(self, log: OpenLog, rows: Any) -> tuple[int, Sequence[bytes | None]]:
        """Return the number of the rows of an append, and their columns as arrays of PostgreSQL; the values of a row that comes alone."""
        if isinstance(rows, ValueRows):
            values = log.tables.values_in(rows)
            if values is not None:
                return 1, values
            try:
                batch = rows.batch
            except _MISFITS as error:
                raise self._misfit(error) from error
        elif isinstance(rows, bytes):
            batch = rows_of_stream(rows)
        elif isinstance(rows, pa.RecordBatch):
            batch = rows
        elif not rows:
            return 0, ()
        else:
            raise SchemaMismatch("rows for a log in PostgreSQL are a record batch, or a stream of one", path=self.about)
        arrays = self._encoded(log, batch) if batch.num_rows else []
        return batch.num_rows, list(map(only_value, arrays)) if batch.num_rows == 1 else arrays

    def _encoded(self, log: OpenLog, batch: pa.RecordBatch) -> list[bytes]:
        """Return rows as arrays of PostgreSQL; `SchemaMismatch` if they do not fit."""
        wanted = self._columns(log)
        try:
            if batch.num_columns < len(wanted):  # of a program that does not know the newest columns
                batch = fit(batch, wanted)
            batch = conform(batch, wanted, where=self.about)
            return [kind.encode(column) for kind, column in zip(log.tables.kinds, batch.columns, strict=True)]
        except _MISFITS as error:
            raise self._misfit(error) from error

    def _misfit(self, error: Exception) -> SchemaMismatch:
        return SchemaMismatch(f"a value does not fit PostgreSQL: {error}", path=self.about)

    def _mark(self) -> int:
        return int.from_bytes(self.system.platform.token_bytes(8), "big", signed=True)

    @handles
    def copy(self, m: CopyRows) -> None:
        """Queue rows of another log."""
        self.start_soon(self._copy, m, reply_of(self) or ToldRows())

    async def _copy(self, m: CopyRows, reply: Reply[Any] | ToldRows) -> None:
        try:
            log = await self._database.opened()
            await self._writer.room()
            shard = self._shard_of(log, m.partition, None)
            places, rows = m.placed()
            batch = pa.RecordBatch.from_pylist([], self._columns(log)) if rows is None else rows
            columns = [_OFFSET.encode(pa.array(places, pa.int64())), *self._encoded(log, batch)]
        except (JournalError, DatabaseAway) as error:
            reply.fail(bare(error))
        else:
            self._writer.put(AppendJob(log.copy_text, shard, m.at, m.end, len(places), self._mark(), columns, reply))

    def _columns(self, log: OpenLog) -> pa.Schema:
        if not len(log.tables.columns):
            raise JournalError("the log has no columns yet: ask GetSchema(wanted)", path=self.about)
        return log.tables.columns

    def _shard_of(self, log: OpenLog, number: int | None, key: str | bytes | None) -> int:
        count = log.head.shards
        if number is None:
            if key is None:
                raise JournalError("say which partition, by partition= or key=", path=self.about)
            return partition_of(key, count)
        if not 0 <= number < count:
            raise JournalError(f"there is no partition {number}, there are 0 to {count - 1}", path=self.about)
        return number

    async def _compare(self, log: OpenLog, m: Append) -> Appended | Fenced:
        """Answer an append without rows."""
        shard = self._shard_of(log, m.partition, m.key)
        [found] = await self._database.read([(log.end_text, [integer(shard)])])
        end = number_in(found, 0)
        return Appended(shard, end, 0) if end == m.at else Fenced(shard, end)

    @handles
    def erase(self, m: EraseEntity) -> None:
        """Delete rows of an entity."""
        self._later(self._erase, m)

    async def _erase(self, log: OpenLog, m: EraseEntity) -> Erased:
        self._columns(log)
        shard = self._shard_of(log, m.partition, m.entity)
        before = bigint(_BEHIND_ALL if m.before is None else m.before)
        statement = log.tables.erase(), [integer(shard), _key(m.entity), before]
        if not m.entity:  # the shard's own rows are not archived
            [found] = await self._database.read([statement], timeout=ERASED_WITHIN)
            return Erased(shard, number_in(found, 0))
        async with self._locked(shard) as still:
            require_named(still.archives.get(shard), m.archive, shard, self.about)
            if m.archive:  # first, so that rows which are gone from the log are gone from both
                archive = await self._archive_at(m.archive)
                await self.system.platform.run_in_thread(archive.erase, still, shard, m)
            [found] = await self._database.read([statement], timeout=ERASED_WITHIN)
        return Erased(shard, number_in(found, 0))

    async def _archive_at(self, place: str) -> Archive:
        from levada.actors.journal.archive import Archive  # Arrow's Parquet takes 50 ms

        platform = self.system.platform
        return await platform.run_in_thread(Archive.at, place, platform.files)

    @asynccontextmanager
    async def _locked(self, shard: int) -> AsyncIterator[StillLog]:
        """Lock the archive of a shard for a block, which it has or may get, and yield the log as it is then."""
        from .copying import locked_postgres

        platform, locked = self.system.platform, ExitStack()
        try:
            yield await platform.run_in_thread(lambda: locked.enter_context(locked_postgres(self.address, shard)))
        finally:
            with trio.CancelScope(shield=True):
                await platform.run_in_thread(locked.close)

    @handles
    def trim(self, m: TrimRows) -> None:
        """Delete rows that no durable actor needs."""
        self._later(self._trim, m)

    async def _trim(self, log: OpenLog, m: TrimRows) -> Trimmed:
        missing = [name for name in COLUMNS if name not in self._columns(log).names]
        if missing:
            raise JournalError(
                f"the log has no column {missing[0]}, so it has no snapshots to trim to", path=self.about
            )
        shard = self._shard_of(log, m.partition, None)
        layout = None if m.layout is None else integer(m.layout)
        values = [
            integer(shard),
            double(m.older),
            integer(min(m.remember, _MOST_REMEMBERED)),
            layout,
            bigint(_BEHIND_ALL),
        ]
        async with self._locked(shard) as still:
            if m.forget_archive:
                await self._note_archive(log, shard, Archived("", 0))
                still = attrs.evolve(still, archives={})
            known = still.archives.get(shard)
            require_named(known, m.archive, shard, self.about)
            if m.archive:
                [found] = await self._database.read([(log.tables.last_to_go(), values)], timeout=ERASED_WITHIN)
                none_goes = found.get_value(0, 0) is None
                if known is not None and none_goes:
                    return Trimmed(shard, 0)
                archive, run = await self._archive_at(m.archive), self.system.platform.run_in_thread
                start = await run(archive.start, still, shard)
                # Before its first file is there, as soon as it is named.
                await self._note_archive(log, shard, Archived(m.archive, known.end if known else 0))
                if none_goes:
                    return Trimmed(shard, 0)
                end = await run(archive.add, still, shard, start, m.older)
                await self._note_archive(log, shard, Archived(m.archive, end))
                values[-1] = bigint(end)
            return Trimmed(shard, await self._delete(log, values))

    async def _note_archive(self, log: OpenLog, shard: int, archived: Archived) -> None:
        """Remember where the old rows of a shard are archived."""
        values = [integer(shard), archived.place.encode(), bigint(archived.end)]
        await self._database.read([(log.tables.note_archive(), values)])

    async def _delete(self, log: OpenLog, values: list[bytes | None]) -> int:
        """Delete the rows that may be trimmed, with these parameters of `LogTables.mark`; return how many there were."""
        rows = 0
        # The mark first, so that readers never take the rows that are left for all.
        [found] = await self._database.read([(log.tables.mark(), values)], timeout=ERASED_WITHIN)
        while found.ntuples:
            statement = log.tables.trim(), [*values, bigint(MOST_TRIMMED)]
            [done] = await self._database.read([statement], timeout=ERASED_WITHIN)
            gone = done.command_tuples or 0
            rows += gone
            if gone < MOST_TRIMMED:
                noted = [(text, values[:1]) for text in (log.tables.forget_erased(), log.tables.note_first())]
                await self._database.read(noted, timeout=ERASED_WITHIN)
                break
        return rows

    # Reading.

    def _later(self, function: Callable[[OpenLog, Any], Coroutine[Any, Any, Any]], m: Any) -> None:
        reply = reply_of(self)
        if reply is not None:
            self.start_soon(self._answer_when_open, reply, function, m)

    async def _answer_when_open(
        self, reply: Reply[Any], function: Callable[[OpenLog, Any], Coroutine[Any, Any, Any]], m: Any
    ) -> None:
        try:
            log = await self._database.opened()
        except (JournalError, DatabaseAway) as error:
            reply.fail(bare(error))
        else:
            await self._answer(reply, function, log, m)

    async def _answer(
        self,
        reply: Reply[Any] | ToldRows,
        function: Callable[[OpenLog, Any], Coroutine[Any, Any, Any]],
        log: OpenLog,
        m: Any,
    ) -> None:
        try:
            if isinstance(reply, Reply) and not reply.has_room:
                await reply.room()  # this peer takes its answers slowly
            if reply.wanted:
                reply.send(await function(log, m))
        except (JournalError, DatabaseAway) as error:
            reply.fail(bare(error))

    @handles
    def schema(self, m: GetSchema) -> None:
        """Answer with the columns."""
        self._later(self._columns_of, m)

    async def _columns_of(self, log: OpenLog, m: GetSchema) -> bytes:
        if m.wanted is not None:
            try:
                wanted = pa.ipc.read_schema(pa.py_buffer(m.wanted))
            except (pa.ArrowException, OSError) as error:
                raise SchemaMismatch(f"these bytes are no columns: {error}", path=self.about) from error
            log = await self._database.grow(wanted)
        data: bytes = log.tables.columns.serialize().to_pybytes()
        return data

    @handles
    def extent(self, m: GetExtent) -> None:
        """Answer with the extent."""
        self._later(self._extent, m)

    async def _extent(self, log: OpenLog, _: Any) -> Extent:
        [found] = await self._database.read([(log.tables.extent, [])])
        end, first, trimmed, reached = (dict(enumerate(bigints_in(found, column))) for column in range(4))
        if len(end) != log.head.shards:
            what = f"the table of shards has {len(end)} of {log.head.shards} rows: it was changed by hand"
            raise JournalDamaged(what, path=self.about)
        log.tables.require_reached(end, reached)
        return Extent(log.head.epoch, first, end, (found.get_value(0, 4) or b"").decode(), trimmed)

    @handles
    def reach(self, m: GetReach) -> None:
        """Compare with an earlier opening."""
        self._later(self._reach, m)

    async def _reach(self, log: OpenLog, m: GetReach) -> Reach:
        name = None if m.opening is None else escaped(m.opening.encode())
        [found] = await self._database.read([(log.tables.reach(), [name])])
        now, since = bigints_in(found, 1), bigints_in(found, 2)
        ends = [min(pair) for pair in zip(now, since, strict=True)] if since else now
        return Reach(number_in(found, 0) == 1, dict(enumerate(ends)))

    @handles
    def read_entity(self, m: ReadEntity) -> None:
        """Read rows of an entity."""
        self._later(self._entity, m)

    async def _entity(self, log: OpenLog, m: ReadEntity) -> Found:
        shard, columns = self._shard_of(log, m.partition, m.entity), self._columns(log)
        if m.since is not None and (
            m.since not in columns.names or not pa.types.is_integer(columns.field(m.since).type)
        ):
            raise JournalError(f"since is {m.since!r:.100}, wanted a column of whole numbers", path=self.about)
        text = log.tables.newest if m.newest is not None else log.tables.entity(m.since)
        most = MOST_ROWS if m.newest is None else m.newest
        values = [integer(shard), _key(m.entity), bigint(m.start), bigint(most), bigint(m.max_bytes)]
        [_, found] = await self._database.read([(IN_ORDER, []), (text, values)])
        batch = rows_in(found, 2, [_OFFSET, *log.tables.kinds], log.found, self.about)
        rows = batch.num_rows
        if m.newest is not None:
            following = None
        elif rows == most:
            following = batch.column(0)[-1].as_py() + 1
        else:
            following = None if found.get_value(0, 1) is None else number_in(found, 1)
        if not rows:
            return Found(shard, 0, None, b"")
        return Found(shard, rows, following, stream_of(batch) if m.stream else batch)

    @handles
    def read_rows(self, m: ReadRows) -> None:
        """Read rows of a shard."""
        self._later(self._rows, m)

    async def _rows(self, log: OpenLog, m: ReadRows) -> Rows:
        shard, columns = self._shard_of(log, m.partition, None), self._columns(log)
        end = _BEHIND_ALL if m.end is None else m.end
        values = [integer(shard), bigint(end), bigint(m.start), bigint(MOST_RUN), bigint(m.max_bytes)]
        [_, found] = await self._database.read([(IN_ORDER, []), (log.tables.rows, values)])
        batch = rows_in(found, 2, [_OFFSET, *log.tables.kinds], log.found, self.about)
        if not batch.num_rows:
            await self._require_start(log, shard, m.start)
            await self._require_gone(log, shard, m.start, end)
            return Rows(shard, m.start, 0, b"")
        places = batch.column(0)
        first, rows = places[0].as_py(), batch.num_rows
        if first > m.start:
            await self._require_gone(log, shard, m.start, first)
        if places[-1].as_py() - first != rows - 1:  # rows between them were erased
            rows = next(place for place, offset in enumerate(places.to_pylist()) if offset != first + place)
        run = pa.RecordBatch.from_arrays(batch.slice(0, rows).columns[1:], schema=columns)
        return Rows(shard, first, rows, stream_of(run))

    async def _require_start(self, log: OpenLog, shard: int, start: int) -> None:
        [found] = await self._database.read([(log.end_text, [integer(shard)])])
        end = number_in(found, 0)
        if start > end:
            raise JournalError(f"row {start} of partition {shard} is behind its end, {end}", path=self.about)

    async def _require_gone(self, log: OpenLog, shard: int, start: int, end: int) -> None:
        """Raise `JournalDamaged` if a row between two offsets was deleted by hand; there were none when they were read."""
        values = [integer(shard), bigint(start), bigint(end)]
        [found] = await self._database.read([(log.tables.missing(), values)])
        if found.ntuples:
            log.tables.require_there(shard, *(number_in(found, column) for column in (1, 2, 3)))

    @handles
    def measure(self, m: OffsetWithin) -> None:
        """Measure rows."""
        self._later(self._measure, m)

    async def _measure(self, log: OpenLog, m: OffsetWithin) -> int:
        self._columns(log)
        shard = self._shard_of(log, m.partition, None)
        values = [integer(shard), bigint(m.end), bigint(m.start), bigint(_BEHIND_ALL), bigint(m.max_bytes)]
        [found] = await self._database.read([(log.tables.within(), values)])
        return m.end if found.get_value(0, 0) is None else number_in(found, 0)

    @handles
    def read(self, m: Read) -> None:
        """Refuse: there are no blocks of files."""
        reply = reply_of(self)
        if reply is not None:
            reply.fail(TypeError("a log in PostgreSQL has no blocks of files: ask ReadRows"))

    # Waiting for rows.

    @handles
    def await_rows(self, m: AwaitRows) -> None:
        """Answer when rows come."""
        reply = reply_of(self)
        if reply is not None:
            self._waiting.append((m, reply))
            self._came.set()
            if len(self._waiting) == 1:
                self.start_soon(self._watch)

    def _rows_came(self) -> None:
        self._came.set()

    async def _watch(self) -> None:
        """Look at the ends while questions wait for rows."""
        while self._waiting:
            self._came = trio.Event()
            try:
                extent = await self._extent(await self._database.opened(), None)
            except (JournalError, DatabaseAway) as error:
                for _, reply in self._waiting:
                    reply.fail(bare(error))
                self._waiting.clear()
                return
            left = []
            for m, reply in self._waiting:
                if m.reached(extent):
                    reply.send(extent)
                elif reply.wanted:
                    left.append((m, reply))
            self._waiting[:] = left
            if left:
                with trio.move_on_after(POLL_EVERY):
                    await self._came.wait()


def _key(entity: str | bytes) -> bytes:
    return escaped(entity.encode() if isinstance(entity, str) else entity)


@asynccontextmanager
async def _closed(database: Database) -> AsyncIterator[None]:
    try:
        yield
    finally:
        database.close()
