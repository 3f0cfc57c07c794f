"""The journal on the disk: partitions of segments, the ledger beside them, and one writer.

`Store` holds a lock on the directory. Its methods that write belong to one thread at a time. Any thread may call the methods that read; they
see only whole appends that have been synced. `DiskWrites` says what happens in which order, and what is there after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute

from levada.framework.errors import ConfigurationError
from levada.framework.files import folder_path
from levada.framework.platform import PLATFORM, Platform

from .asking import held
from .blocks import Block, Message, bytes_of, pack, pack_with_gaps
from .config import JournalConfig
from .disk_writes import DiskWrites
from .erasures import Erasures
from .errors import JournalError, refusals
from .extent import Appended, Extent, Fenced, StoreStatistics, partition_of
from .inspection import require_apart
from .keys import Keys, Taken
from .ledger import Delivered, Erasure, LedgerLine, Reach
from .partitions import Partition
from .pinning import Pins
from .places import Archived, require_named
from .questions import CopyRows, TrimRows
from .recovery import Recovered, recover
from .retention import Clock
from .schema import check_schema, conform, fit
from .staging import Stage, Staging
from .trimming import rows_to_go

__all__ = ["Store"]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


class Store:
    """An open journal. Made by `Store.open`; a context manager that closes it."""

    def __init__(
        self,
        platform: Platform,
        directory: Path,
        config: JournalConfig,
        clock: Clock,
        found: Recovered,
        staging: Staging,
    ) -> None:
        self.directory = directory
        self.config = config
        self.schema: pa.Schema = found.schema
        """Columns of every batch that is appended, and of the batches that `batches` yields."""
        self.epoch = found.ledger.journal.hex()
        """The name of this journal, see `Extent.epoch`."""
        self._ledger, self._ends, self._partitions = found.ledger, found.ends, found.partitions
        self._staging = staging
        self._resources = ExitStack()
        self._writes = DiskWrites(platform, directory, config, clock, found)
        self._guard, self._room = self._writes.guard, self._writes.room
        self._erasures = Erasures(self._writes, platform.monotonic)
        self._pins = Pins(platform, directory, found.partitions, found.ledger)
        self._turn = 0
        self._appends = self._delivered = self._repeated = 0
        self._cut, self._lost = found.cut, found.lost

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        schema: pa.Schema | None = None,
        config: JournalConfig | None = None,
        *,
        clock: Callable[[], float] | None = None,
        copy_of: str | None = None,
    ) -> Store:
        """Open the journal in a directory, or make one, and recover from a crash. Blocks.

        Args:
            directory: made if it is not there.
            schema: columns; it may have grown since the last time. None: the journal's own, or `Envelope`'s for a new journal. A journal is
                new until it has been opened once without an error.
            config: None: the defaults.
            clock: returns seconds since 1970. None: the clock of the context's `levada.framework.platform.PLATFORM`, like all else that this
                takes from its surroundings.
            copy_of: the epoch of another log whose rows are copied into this journal, which is new, or such a copy that is not whole. It opens
                without this once `finish_copy` was called. None: it is no copy.

        Raises:
            CopyUnfinished: it is a copy that is not whole.
            JournalLocked: another process, or another store in this one, has it open.
            JournalDamaged: rows that were promised are not there, or the ledger is damaged; nothing was changed.
            JournalUnwritable, JournalFull: the folder or the ledger cannot be written: the disk is full, fails or only reads, or this user may not
                write there.
            JournalError: written by a later version of this format.
            SchemaMismatch: the columns are others, or fewer; says which.
            ConfigurationError: it has another number of partitions, these columns cannot be kept, or `directory` is empty, or a file, or a
                new one inside another journal.
            OSError: the directory cannot be read.
        """
        return cls._open(directory, schema, config, clock, copy_of, noted=True)

    @classmethod
    def try_to_open(
        cls, directory: str | os.PathLike[str], schema: pa.Schema | None = None, config: JournalConfig | None = None
    ) -> pa.Schema:
        """Open the journal as `open` does, or make one, and close it again; return its columns. Blocks, and raises as `open`.

        The history of the journal does not have this opening.
        """
        with cls._open(directory, schema, config, None, None, noted=False) as store:
            return store.schema

    @classmethod
    def _open(
        cls,
        directory: str | os.PathLike[str],
        schema: pa.Schema | None,
        config: JournalConfig | None,
        clock: Callable[[], float] | None,
        copy_of: str | None,
        *,
        noted: bool,
    ) -> Store:
        platform = PLATFORM.get()
        files, clock = platform.files, clock or platform.time
        config = config or JournalConfig()
        if schema is not None:
            check_schema(schema)
        path = folder_path(directory)
        if not files.exists(path / "ledger.sqlite"):
            require_apart(files, path)
        with ExitStack() as resources:
            with refusals(path):
                try:
                    files.make_durable_folder(path)
                except (FileExistsError, NotADirectoryError) as error:
                    raise ConfigurationError(f"{path} is no folder: it is a file, or inside one") from error
                lock = files.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            resources.callback(files.close, lock)
            try:
                files.lock(lock)
            except OSError as error:
                raise held(platform, path, lock) from error
            found = recover(platform, path, schema, config, resources, copy_of, noted=noted)
            staging = Staging(
                files, path / "staging", schema=found.schema, config=config, journal=found.ledger.journal, clock=clock
            )
            resources.callback(staging.close)
            staging.recover()
            store = cls(
                platform, path, config, Clock(path, clock, platform.monotonic, found.partitions), found, staging
            )
            resources.callback(store._writes.close)
            store._erasures.finish(found.ledger.erasures, config.keyed)
            store._resources = resources.pop_all()
        return store

    def close(self) -> None:
        """Close all files. Blocks that were read stay valid, and staged rows stay on the disk. Closing twice is fine."""
        if not self._guard.broken:
            self._ends.finish(self._ledger.commits)
        self._resources.close()
        self._guard.broken = self._guard.broken or "this journal is closed"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def choose_partition(self, key: str | bytes | None = None) -> int:
        """Choose the partition of the key, or without a key the next one in turn."""
        if key is not None:
            return partition_of(key, len(self._partitions))
        self._turn = (self._turn + 1) % len(self._partitions)
        return self._turn

    def prepare(self, number: int, batch: pa.RecordBatch) -> tuple[int, pa.RecordBatch]:
        """Check one part of an append, and give the batch the schema of the journal.

        Raises:
            SchemaMismatch: the columns differ from the journal's.
            JournalError: the batch is empty or larger than `segment_bytes`, or there is no such partition.
        """
        self._writes.partition(number)
        if not batch.num_rows:
            raise JournalError("an append has one row or more", path=str(self.directory))
        conformed, limit = conform(batch, self.schema), self.config.segment_size
        size = bytes_of(batch, limit)
        if size > limit:
            raise JournalError(
                f"an append of {size} bytes, at most {limit} (segment_bytes): send fewer rows at a time",
                path=str(self.directory),
            )
        return number, conformed

    def append(self, parts: Sequence[tuple[int, pa.RecordBatch]]) -> list[Appended]:
        """Write batches, each to a partition, as one append. If this raises, nothing was written; after a crash all of it is there, or nothing.

        An append to several partitions costs a commit of the ledger, which is synced.

        Returns:
            The place of each batch.

        Raises:
            JournalFull: there is no room for all of them.
            SchemaMismatch, JournalError: as `prepare`.
            JournalUnwritable: the disk refuses; or the ledger does, and then only opening the journal again tells whether they were written.
        """
        return self._append([self.prepare(number, batch) for number, batch in parts], together=True)

    def append_group(self, prepared: list[tuple[int, pa.RecordBatch]]) -> list[Appended]:
        """Write batches that `prepare` has returned, each an append of its own, and sync them together. If this raises, nothing was written.

        Returns:
            The place of each batch; fewer than were given if there was no room for the others, which were not written.

        Raises:
            JournalFull: there was no room for the first one.
            JournalUnwritable: the disk refuses.
        """
        return self._append(prepared, together=False)

    def _append(self, prepared: list[tuple[int, pa.RecordBatch]], *, together: bool) -> list[Appended]:
        self._guard.require_usable()
        packed = {number: list(self.pack(batches)) for number, batches in _by_partition(prepared).items()}
        if not self._room.takes(packed.values()):
            self._writes.retain()
            if not self._room.takes(packed.values()):
                if together:
                    raise self._room.full(packed.values())
                prepared, packed = self._room.prefix(prepared)
        ends = {number: self._partitions[number].end for number in packed}
        batches = _by_partition(prepared) if self._writes.keys else {}
        if together and len(packed) > 1:
            self._writes.transact("an append", packed.items(), self._ledger.append, batches)
        else:
            self._writes.append(packed, batches)
        answers = []
        for number, batch in prepared:
            answers.append(Appended(number, ends[number], batch.num_rows))
            ends[number] += batch.num_rows
        self._appends += len(answers)
        return answers

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Message]:
        """Make messages of batches that have the journal's columns: large batches are cut, small ones put together."""
        return pack(batches, self.config)

    @property
    def broken(self) -> str:
        """Why this store can do no more until it is opened again; empty if it can."""
        return self._guard.broken

    def look(self) -> None:
        """Look after what comes from outside. Belongs to the thread that writes; `Journal` calls it every second.

        - Check that the files are where they were; if not, all writes fail from now on. Writes check this too.
        - Pin the files for a process that copies this journal (`backup`).
        - Go on with erasures that a crash cut short and the disk refused at the opening; they are tried once a minute.
        """
        self._guard.look()
        if not self.broken:
            self._pins.look()
            self._erasures.try_again()

    @property
    def erasures_left(self) -> bool:
        """Whether `look` has erasures to go on with."""
        return self._erasures.left

    @property
    def unsynced(self) -> bool:
        """Whether the record of ends has something that is not synced yet; see `sync_ends`."""
        return self._ends.pending

    def sync_ends(self) -> None:
        """Sync the record of ends. The next append does it too; call this within `SYNC_EVERY` seconds if there is none."""
        with self._guard.refusals():
            self._ends.sync()

    def copy(self, question: CopyRows) -> Appended | Fenced:
        """Append rows of another log at their own offsets, see `CopyRows`. If this raises, nothing was written.

        Raises:
            JournalFull: there is no room.
            SchemaMismatch: the rows do not fit the columns, or their offsets do not fit the question.
            JournalUnwritable: the disk refuses.
        """
        self._guard.require_usable()
        number, at, end = question.partition, question.at, question.end
        partition = self._writes.partition(number)
        if partition.end != at:
            return Fenced(number, partition.end)
        places, rows = question.placed()
        fitting = None if rows is None else self.prepare(number, rows)[1]
        messages = list(pack_with_gaps(places, fitting, at, end, self.config))
        if not self._room.takes([messages]):
            self._writes.retain()
            if not self._room.takes([messages]):
                raise self._room.full([messages])
        self._writes.begin_segment(partition, end)
        self._writes.append({number: messages}, {})
        self._appends += 1
        return Appended(number, at, end - at)

    def finish_copy(
        self, trimmed: Mapping[int, int] | None = None, archives: Mapping[int, Archived] | None = None
    ) -> None:
        """Record that all rows of another log are copied into this one. Belongs to the thread that writes; twice is fine.

        Args:
            trimmed: the other log's `Extent.trimmed`.
            archives: the other log's `archives`.

        Raises:
            JournalUnwritable: the ledger cannot be written.
        """
        self._guard.require_usable()
        if self._ledger.copy_of is not None:
            with self._writes.ledger_change() as ledger:
                for partition, end in (trimmed or {}).items():
                    ledger.set_trimmed(partition, end)
                for partition, archived in (archives or {}).items():
                    ledger.set_archived(partition, archived)
                ledger.set_copy_of(None)

    def deliver(
        self, query: str, batch: int, parts: Iterable[tuple[int, Message]], *, attempts: str | None = None
    ) -> Delivered:
        """Append a batch exactly once. Readers see all of it or nothing; a batch that was delivered before is not written again.

        Args:
            query: whose batch.
            batch: its number; the numbers of a query grow.
            parts: partitions and messages (of `pack`, or of a `Stage`); not looked at if the batch has been delivered (`line` tells which
                rows it had).
            attempts: identifies these messages; the last ones are kept in the `LedgerLine`.

        Raises:
            JournalFull: no room. Nothing was written; try again.
            JournalError: the batch is larger than the journal can ever take.
            JournalUnwritable: the disk refuses, and nothing was written; or the ledger does, and then only opening the journal again
                tells whether the batch was delivered.
        """
        self._guard.require_usable()
        done = self.delivered(query, batch)
        if done is not None:
            self._repeated += 1
            if attempts is not None:
                with self._writes.ledger_change() as ledger:
                    ledger.set_attempts(query, batch, attempts)
            return done
        size = digest = 0

        def checked() -> Iterator[tuple[int, Sequence[Message]]]:
            nonlocal size, digest
            for number, message in parts:
                size += message.size
                digest = message.digest(digest)
                self._room.require_for_batch(size, message.size)
                yield number, [message]

        ranges = self._writes.transact(
            f"the delivery of batch {batch} of {query}",
            checked(),
            lambda ranges: self._ledger.deliver(query, batch, LedgerLine(ranges, digest, attempts)),
        )
        self._delivered += 1
        return Delivered(already=False, ranges=ranges)

    def delivered(self, query: str, batch: int) -> Delivered | None:
        """Look up whether a batch has been delivered; None if not."""
        self._guard.require_usable()
        return self._ledger.delivered(query, batch)

    def line(self, query: str, batch: int) -> LedgerLine | None:
        """Return what the ledger knows of a batch; None if it has not been delivered, or was forgotten."""
        self._guard.require_usable()
        return self._ledger.line(query, batch)

    def newest_batch(self, query: str) -> int | None:
        """Return the highest number of a delivered batch of this query; None if there is none."""
        return self._ledger.newest(query)

    def stage(self, query: str, batch: int, part: int, attempt: int) -> Stage:
        """Return the stage of one attempt at one part of a batch; make it if there is none."""
        self._guard.require_usable()
        return self._staging.begin(query, batch, part, attempt)

    def staged(self, query: str, batch: int) -> Mapping[tuple[int, int], Stage]:
        """Return the stages of a batch by part and attempt."""
        return self._staging.of(query, batch)

    def unstage(self, query: str, batch: int, part: int | None = None, attempt: int | None = None) -> int:
        """Delete the stages of a batch, or some of them; return how many. `JournalUnwritable` if a file cannot be deleted, until the next opening."""
        return self._staging.drop(query, batch, part, attempt)

    def unstage_older(self, age: float) -> list[tuple[str, int]]:
        """Delete the staged batches that got no rows for `age` seconds; return their queries and numbers."""
        return self._staging.drop_older(age)

    def groups(self) -> dict[str, dict[int, int]]:
        """Return the offset of each group in each partition."""
        return self._ledger.groups()

    def declare_group(self, name: str, at: Literal["first", "end"] = "first") -> dict[int, int]:
        """Keep all rows that this group has not read; return its offsets.

        Args:
            name: a group that is known already stays where it is.
            at: where a new one begins.
        """
        self._guard.require_usable()
        known = self._ledger.groups().get(name)
        if known is not None:
            return known
        extent = self.extent()
        offsets = extent.whole if at == "first" else dict(extent.end)
        self._set_group(name, offsets)
        return offsets

    def commit_group(self, name: str, offsets: Mapping[int, int]) -> None:
        """Record how far a group has come; it may go back, as far as there are rows.

        Args:
            name: a group that was declared.
            offsets: for some partitions, the offset behind the last row that the group has done with.

        Raises:
            JournalError: the group is unknown, or an offset is beyond the end.
            JournalUnwritable: the ledger cannot be written.
        """
        self._guard.require_usable()
        if name not in self._ledger.groups():
            raise JournalError(f"no group {name!r}: declare it first", path=str(self.directory))
        for number, offset in offsets.items():
            self._writes.partition(number).check_offset(offset)
        self._set_group(name, offsets)
        self._writes.retain_if_possible()

    def _set_group(self, name: str, offsets: Mapping[int, int]) -> None:
        self._writes.make_sure(self._partitions[number] for number in offsets)
        with self._writes.ledger_change() as ledger:
            ledger.set_group(name, offsets)

    def forget_group(self, name: str) -> None:
        """Keep no more rows for a group; harmless if there is none of this name."""
        self._guard.require_usable()
        with self._writes.ledger_change() as ledger:
            ledger.forget_group(name)
        self._writes.retain_if_possible()

    def retain(self) -> int:
        """Seal old segments, delete those that may go; return how many were deleted.

        Raises:
            JournalUnwritable, JournalFull: the disk refuses. Segments that were deleted by then are gone.
            JournalDamaged: a segment is damaged, so its age is not known.
        """
        return self._writes.retain()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._room.size

    def extent(self) -> Extent:
        """Return the offsets between which there are rows."""
        first, ends = dict[int, int](), dict[int, int]()
        for number, partition in enumerate(self._partitions):  # each question of a reader comes by here
            first[number], ends[number] = partition.segments[0].first, partition.end
        return Extent(self.epoch, first, ends, self._ledger.opening, self._ledger.trimmed)

    def end(self, partition: int) -> int:
        """Return the offset behind the last row of a partition; `JournalError` if there is no such partition."""
        return self._writes.partition(partition).end

    def reach(self, opening: str | None) -> Reach:
        """Say how far the rows that were there in an opening are still the same rows.

        A journal may be older than the rows that were read from it: an older copy was put in its place, or a power failure took appends that
        were not synced. Its next rows get offsets that other rows had.

        Args:
            opening: `Extent.opening` of that time; None for a time before openings had names.
        """
        return self._ledger.reach(opening, {p.number: p.end for p in self._partitions})

    def read(self, partition: int, start: int, end: int | None = None, *, max_bytes: int = 4 << 20) -> Iterator[Block]:
        """Yield the blocks that hold the rows from `start` on, without copying: at least one, if there is a row, and up to `max_bytes`.

        To read on, start at the `Block.end` of the last one. The same offsets always give the same rows, or the block is `Block.erased`.

        Args:
            partition: its number.
            start: offset of the first row.
            end: offset behind the last one; None: the end.
            max_bytes: size of the messages.

        Raises:
            OffsetGone: retention has deleted the row at `start`.
            JournalDamaged: the checksum of a block is wrong.
            JournalError: `start` is beyond the end.
        """
        source = self._writes.partition(partition)
        source.check_offset(start)
        return source.read(start, source.end if end is None else end, max_bytes)

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the offset of the first row and the rows, in the columns of `schema`, up to `end` or the current end; raises as `read`.

        Erased rows are left out.
        """
        source = self._writes.partition(partition)
        source.check_offset(start)
        stop = min(source.end, source.end if end is None else end)
        while start < stop:
            for block in source.read(start, stop, self.config.block_bytes):
                if not block.erased:
                    yield block.first, fit(block.batch(), self.schema)
                start = block.end

    def rows_of(
        self, entity: str | bytes, *, partition: int | None = None, start: int = 0, max_bytes: int = 4 << 20
    ) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Yield the rows of an entity in order, without reading a block that has none of them.

        Args:
            entity: value of the column `Keyed.entity`.
            partition: None: the partition of the entity as a key (`partition_of`).
            start: offset in this partition of the first row.
            max_bytes: size of the rows that are yielded together; the rows of one block always are.

        Returns:
            The offset at which to go on, None behind the last row, and the rows: a column ``offset``, then the columns of `schema`.

        Raises:
            JournalError: the journal has no `Keyed.entity`.
            JournalDamaged: as `read`.
        """
        keys = self._keys_of("entity", partition_of(entity, len(self._partitions)) if partition is None else partition)
        return keys.rows_of(entity, start, self.schema, max_bytes)

    def newest_of(
        self, entity: str | bytes, newest: int, *, partition: int | None = None, start: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the newest rows of an entity, the newest block first, and read no block that has none of them.

        Args:
            entity: value of the column `Keyed.entity`.
            newest: most rows; the rows of each batch are in order.
            partition: None: the partition of the entity as a key (`partition_of`).
            start: rows before this offset are left out.

        Returns:
            The rows: a column ``offset``, then the columns of `schema`.

        Raises:
            JournalError: the journal has no `Keyed.entity`.
            JournalDamaged: as `read`.
        """
        keys = self._keys_of("entity", partition_of(entity, len(self._partitions)) if partition is None else partition)
        return keys.newest_of(entity, start, newest, self.schema)

    def newest_value(self, entity: str | bytes, column: str, *, partition: int) -> Any:
        """Return the value that a column has in the newest row of an entity; None if there is no row, or it is null.

        Raises:
            JournalError: the journal has no `Keyed.entity`.
            JournalDamaged: as `read`.
        """
        return self._keys_of("entity", partition).newest_value(entity, column, self.schema)

    def erase(self, entity: str | bytes, *, partition: int | None = None, before: int | None = None) -> Iterator[int]:
        """Erase the rows of an entity, even from disk. Belongs to the thread that writes.

        Each step rewrites one segment without them; between steps there may be other writes. All other rows keep their offsets. The
        ledger knows about it from the first step to the last: if a crash comes between, the next opening goes on.

        Args:
            entity: value of the column `Keyed.entity`.
            partition: None: the partition of the entity as a key (`partition_of`).
            before: rows from this offset on stay; None: the end.

        Returns:
            The number of rows erased in each step.

        Raises:
            JournalError: the journal has no `Keyed.entity`.
            JournalDamaged: a block is damaged, so its rows cannot be told apart.
            JournalUnwritable, JournalFull: the disk refuses; ask again.
        """
        number = partition_of(entity, len(self._partitions)) if partition is None else partition
        self._keys_of("entity", number)
        self._guard.require_usable()
        end = self._writes.partition(number).end
        column = self.config.keyed.entity if self.config.keyed is not None else None
        erasure = Erasure(number, column or "", entity, end if before is None else min(before, end))
        return self._erasures.begin(erasure)

    @property
    def archives(self) -> Mapping[int, Archived]:
        """Where the old rows are, for partitions that have an archive. Any thread may look."""
        return self._ledger.archives

    def note_archive(self, partition: int, archived: Archived | None) -> None:
        """Remember where the old rows of a partition are archived; None: nowhere. Belongs to the thread that writes.

        Raises:
            JournalUnwritable, JournalFull: the ledger cannot be written.
        """
        self._guard.require_usable()
        self._writes.make_sure([self._partitions[partition]])
        if self.archives.get(partition) != archived:
            with self._writes.ledger_change() as ledger:
                ledger.set_archived(partition, archived)

    def rows_to_go(self, m: TrimRows) -> list[range]:
        """Return the offsets of the rows that `trim` may take; all groups have read them. Any thread may call it.

        Raises:
            JournalError: this is no log of durable actors, it was opened without an index of its entities, or `m` does not name its archive.
            JournalDamaged: a block is damaged.
        """
        self._keys_of("entity", m.partition)
        require_named(self.archives.get(m.partition), m.archive, m.partition, str(self.directory))
        partition = self._writes.partition(m.partition)
        read = [offsets.get(m.partition, 0) for offsets in self._ledger.groups().values()]
        return rows_to_go(partition, self.schema, m, min([partition.end, *read]))

    def trim(self, partition: int, rows: Sequence[range]) -> Iterator[int]:
        """Take rows out of the segments that `rows_to_go` has returned, as `erase`, and raise as that.

        Nothing goes on after a crash: the rest goes the next time.
        """
        return self._erasures.trim(partition, rows)

    def taken(self, partition: int, command: str | bytes) -> Taken | None:
        """Look a command up among the newest rows of a partition (`Keyed.remember`); None if it has not been taken. Raises as `rows_of`."""
        return self._keys_of("command", partition).taken(command, self.schema)

    def _keys_of(self, what: Literal["entity", "command"], number: int) -> Keys:
        self._writes.partition(number)
        if self.config.keyed is None or getattr(self.config.keyed, what) is None:
            raise JournalError(f"this journal has no key: open it with Keyed({what}=)", path=str(self.directory))
        return self._writes.keys[number]

    def offset_within(self, partition: int, start: int, end: int, *, max_bytes: int) -> int:
        """Find the offset at which `read` with the same arguments would end, without reading rows; raises as `read`.

        The same at each call, until small blocks are merged.
        """
        source = self._writes.partition(partition)
        source.check_offset(start)
        return source.offset_within(start, end, max_bytes)

    def statistics(self) -> StoreStatistics:
        """Return the counters and sizes."""
        return StoreStatistics(
            appends=self._appends,
            rows_appended=self._writes.rows,
            bytes_appended=self._writes.bytes,
            syncs=self._writes.syncs,
            batches_delivered=self._delivered,
            batches_repeated=self._repeated,
            bytes_stored=self.size,
            segments=sum(len(partition.segments) for partition in self._partitions),
            segments_deleted=self._writes.segments_deleted,
            bytes_cut=self._cut,
            rows_lost=self._lost,
            bytes_staged=self._staging.size,
        )

    def _partition(self, number: int) -> Partition:
        if not isinstance(number, int) or not 0 <= number < len(self._partitions):
            raise JournalError(
                f"the partition is {number!r}, wanted 0 to {len(self._partitions) - 1}", path=str(self.directory)
            )
        return self._partitions[number]


def _by_partition(parts: Iterable[tuple[int, pa.RecordBatch]]) -> dict[int, list[pa.RecordBatch]]:
    found: dict[int, list[pa.RecordBatch]] = {}
    for number, batch in parts:
        found.setdefault(number, []).append(batch)
    return found
