"""`copy_log`: the log of a durable class, copied to another place, which may be of another kind.

Rows keep their offsets, because snapshots and command ids refer to them. The source is read as it is at one moment.

The copy has the epoch of its source as a mark, from its making until all rows are there, and does not open as a log meanwhile. What was killed goes
on where each shard ends. Rows that were copied before may have been erased from the source since. Their erasures are among the rows that come
later, and are carried out in the copy too.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pyarrow as pa
import pyarrow.compute
import trio

from levada.actors.journal import (
    Appended,
    CopyRows,
    CopyUnfinished,
    EraseEntity,
    Extent,
    Found,
    GetExtent,
    GetSchema,
    Journal,
    JournalDamaged,
    JournalError,
    JournalFull,
    ReadEntity,
    Store,
    journal_error,
    stream_of,
)
from levada.actors.journal.copying import require_outside
from levada.actors.journal.inspection import journals_in
from levada.actors.journal.log_events import event_columns
from levada.actors.journal.questions import MOST_COPIED
from levada.actors.journal.still import StillLog, still_folder
from levada.framework import ActorSystem, Asks, Ref, bounded
from levada.framework.errors import ActorError, ConfigurationError, LevadaError
from levada.framework.files import folder_path
from levada.framework.platform import Platform

from .opening import database_at
from .rows import ERASED, log_config

if TYPE_CHECKING:
    from levada.actors.postgres import PostgresStore

__all__ = ["CopiedRows", "copy_log"]

R = TypeVar("R")
T = TypeVar("T")
Progress = Callable[[int, int], None]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


@attrs.frozen(kw_only=True)
class CopiedRows:
    """A log that was copied."""

    target: str
    """Where the copy is, without a password."""
    source: str
    """The epoch of the source."""
    epoch: str
    """The epoch of the copy, which is a log of its own."""
    end: Mapping[int, int]
    """For each shard, the offset behind its last row."""
    rows: int
    """The number of rows that were copied now."""


async def copy_log(
    system: ActorSystem,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | Ref[Any],
    *,
    verify: bool = False,
    timeout: float = 30.0,
    progress: Progress | None = None,
) -> CopiedRows:
    """Copy the log of a durable class to a new place. Rows keep their offsets, so command ids, snapshots and reminders work there as before.

    The copy has the rows that were there when the call began; a program that goes on with the source writes no rows to the copy. The copy is a log of
    its own, with another epoch: a checkpoint of Spark on the source is refused there.

    If this ends early, however that comes, call it again with the same arguments: it goes on where it stopped. Until then the copy does not open as a
    log: `CopyUnfinished`. A call after the last one compares all rows, and copies none.

    Args:
        system: the system of this process.
        source: a folder; or the URL of a database, with the name of the table: ``postgresql://host/bank?table=accounts``.
        target: a folder or URL, which is new, or empty, or has what an earlier copy has left; or the ref of a
            `levada.actors.journal.CopiedLog`, which is empty, or has the first rows of the source, and does nothing else meanwhile.
        verify: compare all rows with the source before the copy counts as whole. Not with a ref.
        timeout: seconds to wait for a process that has the folder of the source open.
        progress: called with the offsets that the copy has reached, and with all offsets.

    Raises:
        ConfigurationError: the source is not the log of a durable class; or the target has rows and is no unfinished copy of it, or is a folder
            with other files, or inside the source.
        CopyUnfinished: the source is a copy that is not whole.
        JournalFull: there is no room for the copy. Nothing waits for room.
        JournalDamaged: the source is damaged; or with `verify`, the copy is not the same.
        JournalError, OSError: one of the two cannot be read or written, or is lost.

    Cancellation:
        the copy stays as it is, and the next call goes on.
    """
    platform = system.platform
    origin, copy = _place_of(source), _RefTarget(target) if isinstance(target, Ref) else _place_of(target)
    checked = copy if verify else None
    if isinstance(checked, _RefTarget):
        raise ConfigurationError("verify= needs a folder or a database as target, and got a ref")
    if origin == copy:
        raise ConfigurationError("the source and the target are the same log")
    if isinstance(copy, _FolderPlace):
        if isinstance(origin, _FolderPlace):
            require_outside(copy.path, origin.path)
        await platform.run_in_thread(copy.require_own, platform)
    async with _in_thread(platform, partial(origin.still, platform, timeout)) as still:
        event_columns(still.columns)  # raises, if it is another kind of journal
        if still.copy_of is not None:
            raise CopyUnfinished(
                "the source is a copy of another log, and is not whole: finish it with levada journal copy"
            )
        copying = _Copying(system, still, progress)
        try:
            async with copy.open(system, still) as log:
                extent = await _ask(log, GetExtent())
                try:
                    await copying.run(log, extent)
                except JournalFull as error:
                    error.detail += ", and copy again: it goes on where it stopped"
                    raise
        except ConfigurationError:
            whole = await platform.run_in_thread(_whole_copy, still, copy, platform, timeout)
            if whole is None:
                raise
            return CopiedRows(target=str(copy), source=still.epoch, epoch=whole, end=still.ends, rows=0)
        if checked is not None:
            async with _in_thread(platform, partial(checked.still, platform, timeout)) as other:
                await platform.run_in_thread(_compare, still, other)
        await platform.run_in_thread(copy.finish, still)
        return CopiedRows(target=str(copy), source=still.epoch, epoch=extent.epoch, end=still.ends, rows=copying.rows)


@attrs.frozen
class _FolderPlace:
    """A folder, as source or target of a copy."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def require_own(self, platform: Platform) -> None:
        """Raise `ConfigurationError` if the folder has files that are not of a log. Blocks."""
        files, own = platform.files, journals_in(self.path) == [self.path]
        # A start that was cut short may have left the lock alone.
        if not own and files.exists(self.path) and {*files.names(self.path)} - {"lock"}:
            raise ConfigurationError(
                f"{self.path} is not empty, and no log. Nothing is written into it: name a new folder, or an empty one"
            )

    def still(self, platform: Platform, timeout: float) -> AbstractContextManager[StillLog]:
        """Have the log there stand still for a block. Blocks."""
        if journals_in(self.path) != [self.path]:
            raise ConfigurationError(f"{self.path} is not a log: name a folder that has a ledger.sqlite")
        return still_folder(platform, self.path, timeout)

    @asynccontextmanager
    async def open(self, system: ActorSystem, source: StillLog) -> AsyncIterator[Ref[Any]]:
        """Open a copy of a log that is not whole; it is made if there is none."""
        config = log_config(len(source.ends))
        # Opened here, because the error of an actor that fails does not come to those who ask it.
        await system.platform.run_in_thread(lambda: self._store(source).close())
        journal = partial(Journal, self.path, source.columns, config=config, copy_of=source.epoch)
        ref: Ref[Any] = system.spawn(journal, mailbox=bounded(16))
        try:
            yield ref
        finally:
            ref.stop()
            with trio.CancelScope(shield=True):
                await ref.terminated()

    def finish(self, source: StillLog) -> None:
        """Record that the copy is whole. Blocks."""
        with self._store(source) as store:
            store.finish_copy(source.trimmed, source.archives)

    def _store(self, source: StillLog) -> Store:
        return Store.open(self.path, source.columns, log_config(len(source.ends)), copy_of=source.epoch)


@attrs.frozen
class _PostgresPlace:
    """A table in PostgreSQL, as source or target of a copy."""

    store: PostgresStore

    def __str__(self) -> str:
        return str(self.store.address)

    def still(self, platform: Platform, timeout: float) -> AbstractContextManager[StillLog]:
        from levada.actors.postgres.copying import still_postgres

        return still_postgres(self.store.address)

    @asynccontextmanager
    async def open(self, system: ActorSystem, source: StillLog) -> AsyncIterator[Ref[Any]]:
        async with self.store.open(system, len(source.ends), copy_of=source.epoch) as log:
            await _ask(log, GetSchema(source.columns.serialize().to_pybytes()))
            yield log

    def finish(self, source: StillLog) -> None:
        from levada.actors.postgres.copying import finish_postgres

        finish_postgres(self.store.address, source)


@attrs.frozen
class _RefTarget:
    """A log of the caller's: the target of a copy, and no source."""

    ref: Ref[Any]

    def __str__(self) -> str:
        return repr(self.ref)

    @asynccontextmanager
    async def open(self, system: ActorSystem, source: StillLog) -> AsyncIterator[Ref[Any]]:
        yield self.ref

    def finish(self, source: StillLog) -> None:
        pass


def _place_of(place: str | os.PathLike[str]) -> _FolderPlace | _PostgresPlace:
    store = database_at(place)
    return _FolderPlace(folder_path(place).absolute()) if store is None else _PostgresPlace(store)


@asynccontextmanager
async def _in_thread(platform: Platform, enter: Callable[[], AbstractContextManager[T]]) -> AsyncIterator[T]:
    """Enter and leave a context that blocks in threads."""
    resources = ExitStack()
    found = await platform.run_in_thread(lambda: resources.enter_context(enter()))
    try:
        yield found
    finally:
        with trio.CancelScope(shield=True):
            await platform.run_in_thread(resources.close)


async def _ask(log: Ref[Any], question: Asks[R]) -> R:
    try:
        return await log.ask(question, timeout=None)
    except ActorError as error:
        raise journal_error(error) or error from error


@attrs.frozen
class _Page:
    """Rows between two offsets of a shard."""

    shard: int
    at: int
    end: int
    rows: pa.RecordBatch | None


class _Copying:
    """Copies the rows of a log."""

    def __init__(self, system: ActorSystem, source: StillLog, progress: Progress | None) -> None:
        self.rows = 0
        """Rows that were copied."""
        self._system = system
        self._source = source
        self._progress = progress
        self._whole = sum(source.ends.values())
        self._done = 0

    async def run(self, log: Ref[Any], extent: Extent) -> None:
        """Copy what the log lacks."""
        if extent.end.keys() != self._source.ends.keys():
            raise ConfigurationError(
                f"the target has {len(extent.end)} shards, wanted {len(self._source.ends)}, as many as the source has"
            )
        for shard, end in self._source.ends.items():
            start = extent.end[shard]
            if start > end:
                raise ConfigurationError(
                    f"the copy has rows of shard {shard} up to {start - 1}, and the source only up to {end - 1}: an older copy of the source was put "
                    "in its place. Remove the copy, and begin again"
                )
            self._done += start
        for shard, end in self._source.ends.items():
            await self._copy(log, shard, extent.end[shard], end)

    async def _copy(self, log: Ref[Any], shard: int, start: int, end: int) -> None:
        run, pages = self._system.platform.run_in_thread, self._pages(shard, start, end)
        # An erasure may have been half done when an earlier attempt copied its mark, with rows that are gone by now.
        erased = await run(_erased_in, self._source.pages(shard, 0, start))
        while (page := await run(next, pages, None)) is not None:
            await self._write(log, page)
            if page.rows is not None:
                erased |= _erased_in([page.rows])
        for entity, before in _with_reminders(erased).items():
            await _erase(log, shard, entity, before)

    def _pages(self, shard: int, start: int, end: int) -> Iterator[_Page]:
        """Yield pages that follow each other without gaps between them. Blocks."""
        at = start
        for page in self._source.pages(shard, start, end):
            rows = page
            while rows.num_rows:
                places = rows.column(0)
                first, last = places[0].as_py(), places[-1].as_py()
                if first - at >= MOST_COPIED:  # a log that was trimmed
                    yield _Page(shard, at, first, None)
                    at = first
                most = at + MOST_COPIED
                count = rows.num_rows if last < most else bisect_left(places.to_pylist(), most)
                stop = places[count - 1].as_py() + 1
                yield _Page(shard, at, stop, rows.slice(0, count))
                at, rows = stop, rows.slice(count)
        if at < end:
            yield _Page(shard, at, end, None)

    async def _write(self, log: Ref[Any], page: _Page) -> None:
        rows = b"" if page.rows is None else stream_of(page.rows)
        answer = await _ask(log, CopyRows(rows, page.shard, page.at, page.end))
        if not isinstance(answer, Appended) and answer.end != page.end:
            raise JournalError(
                f"shard {page.shard} of the copy ends at {answer.end}, wanted {page.at}: another program writes to it"
            )
        self.rows += 0 if page.rows is None else page.rows.num_rows
        self._done += page.end - page.at
        if self._progress is not None:
            self._progress(self._done, self._whole)


def _erased_in(pages: Iterable[pa.RecordBatch]) -> dict[str, int]:
    """Return the entities that were erased, and the offsets of the rows that say so. Blocks."""
    found: dict[str, int] = {}
    for rows in pages:
        marks = rows.filter(pc.equal(rows.column("kind"), ERASED))
        found |= dict(zip(marks.column("entity").to_pylist(), marks.column(0).to_pylist(), strict=True))
    return found


def _with_reminders(erased: dict[str, int]) -> dict[str, int]:
    """Add the reminders of a shard to its erased entities: they were written anew before its newest erasure (`erasing`)."""
    return erased and {**erased, "": max(erased.values()) - 1}


def _gone(rows: pa.RecordBatch, erased: Mapping[str, int]) -> pa.Array:
    """Tell which rows are of erased entities, and before their erasure."""
    names, ends = pa.array(erased, pa.string()), pa.array(erased.values(), pa.int64())
    end = ends.take(pc.index_in(rows.column("entity"), names))
    return pc.fill_null(pc.less(rows.column(0), end), fill_value=False)


async def _erase(log: Ref[Any], shard: int, entity: str, before: int) -> None:
    """Erase rows of an entity, if there are some. An erasure without rows costs as much as one with them."""
    found: Found = await _ask(log, ReadEntity(entity, partition=shard, max_bytes=1))
    if found.count and found.batch().column(0)[0].as_py() < before:
        await _ask(log, EraseEntity(entity, partition=shard, before=before))


def _whole_copy(
    source: StillLog, place: _FolderPlace | _PostgresPlace | _RefTarget, platform: Platform, timeout: float
) -> str | None:
    """Return the epoch of a log that is not open as a copy any more and has the rows of the source, no others; else None. Blocks."""
    if isinstance(place, _RefTarget):
        return None
    with suppress(LevadaError, OSError), place.still(platform, timeout) as copy:
        if copy.copy_of is None and copy.epoch != source.epoch:
            _compare(source, copy)
            return copy.epoch
    return None


def _compare(source: StillLog, copy: StillLog) -> None:
    """Require that a copy has the rows of its source, and no others. Blocks.

    Erased rows are in neither, but in the source where an erasure is half done. The copy may have rows that were trimmed since they were copied.
    """
    if source.ends != copy.ends:
        raise JournalDamaged(f"the copy ends at {dict(copy.ends)}, and its source at {dict(source.ends)}")
    for shard, end in source.ends.items():
        start, trimmed = 0, source.trimmed.get(shard, 0)
        erased = _with_reminders(_erased_in(source.pages(shard, 0, end)))
        for page in source.pages(shard, 0, end):
            behind = page.column(0)[-1].as_py() + 1
            rows = page.filter(pc.invert(_gone(page, erased)))
            _compare_rows(shard, rows, copy.pages(shard, start, behind), erased, trimmed)
            start = behind
        _compare_rows(shard, None, copy.pages(shard, start, end), erased, trimmed)


def _compare_rows(
    shard: int, page: pa.RecordBatch | None, pages: Iterator[pa.RecordBatch], erased: Mapping[str, int], trimmed: int
) -> None:
    mine = pa.array([], pa.int64()) if page is None else page.column(0)

    def not_trimmed(rows: pa.RecordBatch) -> pa.RecordBatch:
        places = rows.column(0)
        kept = pc.or_(pc.greater_equal(places, trimmed), pc.is_in(places, mine))
        return rows.filter(pc.or_(kept, _gone(rows, erased)))

    there = [rows for rows in map(not_trimmed, pages) if rows.num_rows]
    if page is None and not there:
        return
    found = pa.Table.from_batches(there, page.schema if page is not None else None)
    if page is not None and found.column(0).equals(pa.chunked_array([page.column(0)])):
        wanted = pa.Table.from_batches([page])
        # Arrow says that a NaN is no NaN.
        differ = [
            name
            for name in page.schema.names
            if not found.column(name).equals(wanted.column(name))
            and repr(found.column(name).to_pylist()) != repr(wanted.column(name).to_pylist())
        ]
        if not differ:
            return
        what = f"in the columns {', '.join(differ)}"
    else:
        what = "in their offsets"
    first = (page if page is not None and page.num_rows else there[0]).column(0)[0].as_py()
    raise JournalDamaged(f"shard {shard}: rows of the copy from offset {first} on differ from the source, {what}")
