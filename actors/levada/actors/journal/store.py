"""The journal on the disk: partitions of segments, the ledger beside them, and one writer.

`Store` holds a lock on the directory. Its methods that write belong to one thread at a time. Any thread may call the methods that read; they
see only whole appends that have been synced.

All guarantees rest on the order of writes:

    append      blocks → sync → seen by readers → the record of ends → answered
    deliver     blocks marked with transaction n + 1 → sync → the ledger's line, synced → seen by readers → the record of ends → answered;
                an append to several partitions likewise
    new segment written aside → synced → renamed; the segment before it is synced first
    group       rows synced → the ledger's line → the record of ends
    retention   the record of ends, synced → files deleted
    erasure     the ledger's line → each segment written aside without the rows, synced, renamed → the ledger's line dropped
    trimming    the ledger's mark → each segment as at an erasure; then as retention, for the oldest segments without a row

After a crash at any point, the segments hold all rows that the ledger and the record of ends know. Rows behind those are of appends that were never
answered, or of a transaction without a line. A whole append stays; an append without its last block is cut off, and so is the transaction.
Otherwise the disk has lost rows, and opening raises `JournalDamaged` (`JournalConfig.accept_loss`).
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute

from levada.framework.files import folder_path
from levada.framework.platform import PLATFORM, Platform

from .blocks import Block, Message, bytes_of, missing, pack
from .config import JournalConfig
from .erasures import Erasures
from .errors import JournalError, JournalLocked, JournalUnwritable
from .extent import Appended, Extent, Fenced, StoreStatistics, partition_of
from .guard import Guard, Undone
from .keys import Keys, Taken
from .ledger import Delivered, Erasure, LedgerLine, Reach, ledger_errors
from .partitions import Partition
from .pinning import Pins
from .questions import CopyRows, TrimRows
from .recovery import SYNC_THREADS, Recovered, recover
from .retention import Clock, DiskRoom, Retention
from .schema import check_schema, conform, fit
from .staging import Stage, Staging
from .trim_requests import TrimRequest, TrimRequests
from .trimming import rows_to_go

__all__ = ["Store"]

logger = logging.getLogger("levada.actors.journal")

MOST_OFFSETS = 1 << 20
"""Most offsets of a segment with rows of a copy: an index in memory takes 12 bytes for each, whether there is a row or not."""
MANY_GONE = 1 << 16
"""Rows at which a last segment is sealed when it was trimmed: an opening indexes the last one anew, 0.1 µs for each row that is gone."""
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
        self._files = platform.files
        self.directory = directory
        self.config = config
        self.schema: pa.Schema = found.schema
        """Columns of every batch that is appended, and of the batches that `batches` yields."""
        self._clock = clock
        self._ledger, self._ends, self._partitions = found.ledger, found.ends, found.partitions
        self._staging = staging
        self._guard = Guard(platform, directory, found.partitions)
        self._room = DiskRoom(directory, config, found.partitions, found.ledger)
        self._retention = Retention(config, found.partitions, found.ledger, clock)
        self._resources = ExitStack()
        keyed = config.keyed
        self._keys: list[Keys] = []
        """An index for each partition, or none."""
        if keyed is not None:
            self._keys = [Keys(platform.files, each, keyed, found.ledger.journal) for each in found.partitions]
        self._erasures = Erasures(
            directory,
            found.partitions,
            self._keys,
            found.ledger,
            self._guard,
            lambda: self._note(self._partitions),
            platform.monotonic,
        )
        self._pins = Pins(platform, directory, found.partitions, found.ledger)
        self._requests = TrimRequests(platform.files, directory)
        self._trim_request: TrimRequest | None = None
        # Has no thread before there are two files to sync.
        self._syncing = platform.thread_pool(SYNC_THREADS, "levada-sync")
        self._turn = 0
        self._appends = self._rows = self._bytes = self._syncs = 0
        self._delivered = self._repeated = self._deleted = 0
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
            JournalUnwritable: the ledger cannot be read or written: the disk is full or fails, or this user may not write there.
            JournalError: written by a later version of this format.
            SchemaMismatch: the columns are others, or fewer; says which.
            ConfigurationError: it has another number of partitions, these columns cannot be kept, or `directory` is empty.
            OSError: the directory cannot be made or read.
        """
        platform = PLATFORM.get()
        files, clock = platform.files, clock or platform.time
        config = config or JournalConfig()
        if schema is not None:
            check_schema(schema)
        path = folder_path(directory)
        files.make_durable_folder(path)
        with ExitStack() as resources:
            lock = files.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            resources.callback(files.close, lock)
            try:
                files.lock(lock)
            except OSError as error:
                raise JournalLocked("another process, or this one, has this journal open", path=str(path)) from error
            found = recover(platform, path, schema, config, resources, copy_of)
            staging = Staging(
                files, path / "staging", schema=found.schema, config=config, journal=found.ledger.journal, clock=clock
            )
            resources.callback(staging.close)
            staging.recover()
            store = cls(
                platform, path, config, Clock(path, clock, platform.monotonic, found.partitions), found, staging
            )
            resources.callback(store._syncing.shutdown)
            store._erasures.finish(config.keyed)
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
        self._partition(number)
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
            self.retain()
            if not self._room.takes(packed.values()):
                if together:
                    raise self._room.full(packed.values())
                prepared, packed = self._room.prefix(prepared)
        ends = {number: self._partitions[number].end for number in packed}
        batches = _by_partition(prepared) if self._keys else {}
        if together and len(packed) > 1:
            self._transact("an append", packed.items(), self._ledger.append, batches)
        else:
            self._write(packed, batches)
        answers = []
        for number, batch in prepared:
            answers.append(Appended(number, ends[number], batch.num_rows))
            ends[number] += batch.num_rows
        self._appends += len(answers)
        return answers

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Message]:
        """Make messages of batches that have the journal's columns: large batches are cut, small ones put together."""
        return pack(batches, self.config)

    def _write(self, packed: Mapping[int, Sequence[Message]], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        now = self._clock.now()
        touched = [self._partitions[number] for number in packed]
        with Undone(self._guard, touched):
            for partition in touched:
                partition.write(packed[partition.number], transaction=0, time=now)
            if self.config.sync == "group":
                self._sync(touched)
        self._publish(touched, batches)
        for messages in packed.values():
            self._rows += sum(message.rows for message in messages)
            self._bytes += sum(message.size for message in messages)

    def _note(self, touched: Iterable[Partition]) -> None:
        """Bring the record of ends up to date with the disk."""
        for partition in touched:
            self._ends.set(partition.number, partition.first, min(partition.synced_end, partition.end))
        try:
            self._ends.write(self._ledger.commits)
        except OSError as error:
            # The rows are on the disk all the same; but nothing more is promised that cannot be noted.
            self._guard.broken = (
                f"the record of how far the partitions reach cannot be written ({error}), open the journal again"
            )
            logger.error("%s: %s", self.directory, self._guard.broken, extra={"event": "ends_unwritable"})

    @property
    def broken(self) -> str:
        """Why this store can do no more until it is opened again; empty if it can."""
        return self._guard.broken

    def look(self) -> None:
        """Look after what comes from outside. Belongs to the thread that writes; `Journal` calls it every second.

        - Check that the files are where they were; if not, all writes fail from now on. Writes check this too.
        - Pin the files for a process that copies this journal (`backup`).
        - Look for the question of a process that wants this journal trimmed; see `take_trim_request`.
        - Go on with erasures that a crash cut short and the disk refused at the opening; they are tried once a minute.
        """
        self._guard.look()
        if not self.broken:
            self._pins.look()
            self._trim_request = self._trim_request or self._requests.look()
            self._erasures.try_again()

    def take_trim_request(self) -> TrimRequest | None:
        """Return what `look` has found, once; then `answer_trim` is due."""
        found, self._trim_request = self._trim_request, None
        return found

    def answer_trim(self, request: TrimRequest, rows: int, error: str) -> None:
        """Tell the process that asked how many rows went, or why they did not. Belongs to the thread that writes."""
        with self._erasures.refusals():
            self._requests.answer(request, rows, error)

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
        try:
            self._ends.sync()
        except OSError as error:
            raise self._guard.refused(error) from error

    def _publish(self, touched: Sequence[Partition], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        """Show readers what was written; `batches` has these rows for some partitions, to be indexed."""
        sealed = [partition.publish() for partition in touched]
        if self._keys:
            self._index(touched, batches)
        self._note(touched)
        if any(sealed):
            self._retain_if_possible()

    def _retain_if_possible(self) -> None:
        """Retain behind a change that stands, whatever this raises: its error would say that nothing was changed. It is tried again later."""
        try:
            if not self.broken:
                self.retain()
        except JournalError as error:
            logger.warning("%s: %s", self.directory, error.detail, extra={"event": "retain"})

    def _index(self, touched: Sequence[Partition], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        try:
            for partition in touched:
                self._keys[partition.number].note(batches.get(partition.number, ()))
        except (JournalError, OSError) as error:
            # The rows are there all the same; but a command could be taken twice.
            self._guard.broken = f"new rows cannot be read back for the index ({error}), open the journal again"
            logger.error("%s: %s", self.directory, self._guard.broken, extra={"event": "index_behind"})

    def _sync(self, partitions: Iterable[Partition]) -> None:
        touched = list(partitions)
        self._syncs += len(touched)
        if len(touched) == 1:
            touched[0].sync()
            return
        # At once, so that the file system puts them into one commit of its own: on ext4 16 files take 6 ms, one after the other 95.
        syncs = [self._syncing.submit(partition.sync) for partition in touched]
        wait(syncs)  # all of them: after a failure the writes are taken back
        for sync in syncs:
            sync.result()

    def copy(self, question: CopyRows) -> Appended | Fenced:
        """Append rows of another log at their own offsets, see `CopyRows`. If this raises, nothing was written.

        Raises:
            JournalFull: there is no room.
            SchemaMismatch: the rows do not fit the columns, or their offsets do not fit the question.
            JournalUnwritable: the disk refuses.
        """
        self._guard.require_usable()
        number, at, end = question.partition, question.at, question.end
        partition = self._partition(number)
        if partition.end != at:
            return Fenced(number, partition.end)
        places, rows = question.placed()
        messages = list(self._with_gaps(places, None if rows is None else self.prepare(number, rows)[1], at, end))
        if not self._room.takes([messages]):
            self.retain()
            if not self._room.takes([messages]):
                raise self._room.full([messages])
        first = partition.segments[-1].first
        if first < at and end - first > MOST_OFFSETS:
            with Undone(self._guard, [partition]):
                partition.roll()
            self._publish([partition], {})
        self._write({number: messages}, {})
        self._appends += 1
        return Appended(number, at, end - at)

    def _with_gaps(self, places: Sequence[int], rows: pa.RecordBatch | None, at: int, end: int) -> Iterator[Message]:
        """Make messages of rows with these offsets, and of the gaps between `at` and `end`."""
        done = 0
        while rows is not None and done < len(places):
            yield from missing(places[done] - at)
            count = len(places) - done
            if places[-1] - places[done] != count - 1:
                count = next(n for n in range(1, count) if places[done + n] != places[done] + n)
            yield from self.pack([rows.slice(done, count)])
            at, done = places[done] + count, done + count
        yield from missing(end - at)

    def finish_copy(self, trimmed: Mapping[int, int] | None = None) -> None:
        """Record that all rows of another log are copied into this one. Belongs to the thread that writes; twice is fine.

        Args:
            trimmed: the other log's `Extent.trimmed`.

        Raises:
            JournalUnwritable: the ledger cannot be written.
        """
        self._guard.require_usable()
        if self._ledger.copy_of is not None:
            with ledger_errors(self.directory):
                for partition, end in (trimmed or {}).items():
                    self._ledger.set_trimmed(partition, end)
                self._ledger.set_copy_of(None)
            self._note(self._partitions)

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
                with ledger_errors(self.directory):
                    self._ledger.set_attempts(query, batch, attempts)
                self._note(self._partitions)
            return done
        size = digest = 0

        def checked() -> Iterator[tuple[int, Sequence[Message]]]:
            nonlocal size, digest
            for number, message in parts:
                size += message.size
                digest = message.digest(digest)
                self._room.require_for_batch(size, message.size)
                yield number, [message]

        ranges = self._transact(
            f"the delivery of batch {batch} of {query}",
            checked(),
            lambda ranges: self._ledger.deliver(query, batch, LedgerLine(ranges, digest, attempts)),
        )
        self._delivered += 1
        return Delivered(already=False, ranges=ranges)

    def _transact(
        self,
        what: str,
        parts: Iterable[tuple[int, Sequence[Message]]],
        decide: Callable[[Mapping[int, tuple[int, int]]], None],
        batches: Mapping[int, Sequence[pa.RecordBatch]] | None = None,
    ) -> Mapping[int, tuple[int, int]]:
        """Write rows that are there when the ledger has a line about them; return their ranges.

        Args:
            what: it is, for an error.
            parts: partitions and messages.
            decide: writes the line, about these ranges.
            batches: the rows for the index, if they are at hand.
        """
        now, transaction = self._clock.now(), self._ledger.transaction + 1
        begun: dict[int, int] = {}
        size = 0
        with Undone(self._guard, self._partitions):
            for number, messages in parts:
                partition = self._partition(number)
                begun.setdefault(number, partition.end)
                size += sum(message.size for message in messages)
                partition.write(messages, transaction=transaction, time=now)
            touched = [self._partitions[number] for number in begun]
            self._sync(touched)
            # From here on the ledger decides. After an error, only opening the journal again tells what it decided.
            self._guard.broken = f"{what} was cut short, open the journal again"
        ranges = {number: (first, self._partitions[number].segments[-1].end) for number, first in begun.items()}
        try:
            decide(ranges)
        except sqlite3.Error as error:
            raise JournalUnwritable(f"{self._guard.broken}: {error}", path=str(self.directory)) from error
        self._guard.broken = ""
        self._publish(touched, batches or {})
        self._rows += sum(end - first for first, end in ranges.values())
        self._bytes += size
        return ranges

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
            self._partition(number).check_offset(offset)
        self._set_group(name, offsets)
        self._retain_if_possible()

    def _set_group(self, name: str, offsets: Mapping[int, int]) -> None:
        try:
            self._sync(self._partitions[number] for number in offsets if self.config.sync == "never")
        except OSError as error:
            raise self._guard.refused(error) from error
        with ledger_errors(self.directory):
            self._ledger.set_group(name, offsets)
        self._note(self._partitions)

    def forget_group(self, name: str) -> None:
        """Keep no more rows for a group; harmless if there is none of this name."""
        self._guard.require_usable()
        with ledger_errors(self.directory):
            self._ledger.forget_group(name)
        self._note(self._partitions)
        self._retain_if_possible()

    def retain(self) -> int:
        """Seal old segments, delete those that may go; return how many were deleted.

        Raises:
            JournalUnwritable, JournalFull: the disk refuses. Segments that were deleted by then are gone.
            JournalDamaged: a segment is damaged, so its age is not known.
        """
        self._guard.require_usable()
        now, deleted = self._clock.now(), 0
        try:
            self._retention.seal_old(now)
            while (leaving := self._retention.next_to_go(now)) is not None:
                self._delete_oldest(leaving)
                deleted += 1
        except OSError as error:
            raise self._guard.refused(error) from error
        finally:
            self._deleted += deleted
        return deleted

    def _delete_oldest(self, partition: Partition) -> None:
        path = partition.drop_oldest()
        self._ends.set(partition.number, partition.first, min(partition.synced_end, partition.end))
        self._ends.write(self._ledger.commits)
        self._ends.sync()
        if self._keys:
            self._keys[partition.number].drop(path)
        self._files.unlink(path)

    @property
    def epoch(self) -> str:
        """The name of this journal, see `Extent.epoch`."""
        return self._ledger.journal.hex()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._room.size

    def extent(self) -> Extent:
        """Return the offsets between which there are rows."""
        ends = {p.number: p.end for p in self._partitions}
        first = {p.number: p.first for p in self._partitions}
        return Extent(self.epoch, first, ends, self._ledger.opening, self._ledger.trimmed)

    def end(self, partition: int) -> int:
        """Return the offset behind the last row of a partition; `JournalError` if there is no such partition."""
        return self._partition(partition).end

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
        source = self._partition(partition)
        source.check_offset(start)
        return source.read(start, source.end if end is None else end, max_bytes)

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the offset of the first row and the rows, in the columns of `schema`, up to `end` or the current end; raises as `read`.

        Erased rows are left out.
        """
        source = self._partition(partition)
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
        end = self._partition(number).end
        column = self.config.keyed.entity if self.config.keyed is not None else None
        erasure = Erasure(number, column or "", entity, end if before is None else min(before, end))
        return self._erasures.begin(erasure)

    def rows_to_go(self, m: TrimRows) -> list[range]:
        """Return the offsets of the rows that `trim` may take; all groups have read them. Any thread may call it.

        Raises:
            JournalError: this is no log of durable actors, or it was opened without an index of its entities.
            JournalDamaged: a block is damaged.
        """
        self._keys_of("entity", m.partition)
        partition = self._partition(m.partition)
        read = [offsets.get(m.partition, 0) for offsets in self._ledger.groups().values()]
        return rows_to_go(partition, self.schema, m, min([partition.end, *read]))

    def trim(self, partition: int, rows: Sequence[range]) -> Iterator[int]:
        """Take rows out of the segments that `rows_to_go` has returned, as `erase`, and raise as that.

        Nothing goes on after a crash: the rest goes the next time.
        """
        self._guard.require_usable()
        if rows:
            yield from self._erasures.trim(partition, rows)
            with self._erasures.refusals():
                source = self._partition(partition)
                last = source.segments[-1]
                if last.erased and last.end - last.first >= MANY_GONE:
                    source.roll()
                    source.publish()
                    self._keys[partition].catch_up()
                while len(source.segments) > 1 and source.segments[0].is_void:
                    self._delete_oldest(source)
                    self._deleted += 1

    def taken(self, partition: int, command: str | bytes) -> Taken | None:
        """Look a command up among the newest rows of a partition (`Keyed.remember`); None if it has not been taken. Raises as `rows_of`."""
        return self._keys_of("command", partition).taken(command, self.schema)

    def _keys_of(self, what: Literal["entity", "command"], number: int) -> Keys:
        self._partition(number)
        if self.config.keyed is None or getattr(self.config.keyed, what) is None:
            raise JournalError(f"this journal has no key: open it with Keyed({what}=)", path=str(self.directory))
        return self._keys[number]

    def offset_within(self, partition: int, start: int, end: int, *, max_bytes: int) -> int:
        """Find the offset at which `read` with the same arguments would end, without reading rows; raises as `read`.

        The same at each call, until small blocks are merged.
        """
        source = self._partition(partition)
        source.check_offset(start)
        return source.offset_within(start, end, max_bytes)

    def statistics(self) -> StoreStatistics:
        """Return the counters and sizes."""
        return StoreStatistics(
            appends=self._appends,
            rows_appended=self._rows,
            bytes_appended=self._bytes,
            syncs=self._syncs,
            batches_delivered=self._delivered,
            batches_repeated=self._repeated,
            bytes_stored=self.size,
            segments=sum(len(partition.segments) for partition in self._partitions),
            segments_deleted=self._deleted,
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
