"""The journal on the disk: partitions of segments, the ledger beside them, and who may write.

One writer at a time: `Store` holds a lock on the directory, and its methods that write belong to one thread at a time. Methods that read may be
called from any thread; they see whole appends only, and only what has been synced.

The order of writes, which is all that the guarantees rest on:

    append      blocks → sync → seen by readers → the record of ends → answered
    deliver     blocks marked with transaction n + 1 → sync → the ledger's line, synced → seen by readers → the record of ends → answered
    new segment written aside → synced → renamed; the segment before it is synced first
    group       rows synced → the ledger's line → the record of ends
    retention   the record of ends, synced → files deleted

So after a crash at any point, what the ledger and the record of ends know is in the segments, and what is in the segments behind it is either an
append that nobody was told about, which stays, or a transaction without a line, which is cut off. Where one of these does not hold, the disk has lost
what it had taken, and opening raises `JournalDamaged` rather than going on (`JournalConfig.accept_loss`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs
import pyarrow as pa
from attrs import validators as v

from levada.framework.errors import ConfigurationError

from .columns import Envelope, columns_of
from .ends import Ends, Promise
from .errors import JournalDamaged, JournalError, JournalFull, JournalLocked, JournalUnwritable
from .ledger import Delivered, Ledger, Reach
from .partitions import Loss, Partition
from .schema import check_growth, check_schema, conform, fingerprint, fit
from .segments import VERSION, Block, Message, Segment

__all__ = ["Appended", "Extent", "JournalConfig", "Reach", "Stage", "Store", "StoreStatistics", "partition_of"]

logger = logging.getLogger("levada.actors.spark")

_STAGE, _STAGE_FORMAT = b"levada.stage", 1
"""Key of the metadata in the schema of a staged file: JSON of the format, query, batch, part and attempt."""
SEGMENT_BYTES = 128 << 20
_SIZE = [v.instance_of(int), v.ge(1)]
_SECONDS = v.optional([v.instance_of((int, float)), v.gt(0)])  # type: ignore[arg-type]  # a list is taken, the stubs say otherwise


@attrs.frozen(kw_only=True)
class JournalConfig:
    """How a journal is kept. Immutable; sizes in octets, times in seconds.

    Raises:
        ConfigurationError: `max_bytes` has no room for what is always kept.
    """

    partitions: int = attrs.field(default=1, validator=_SIZE)
    """Fixed when the journal is made. Order holds within a partition."""
    segment_bytes: int | None = attrs.field(default=None, validator=v.optional(_SIZE))
    """Size at which a segment is sealed, and the most that one append may hold. None: 128 MiB, or with many partitions what `max_bytes` has
    room for; see `segment_size`."""
    segment_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """Age at which a segment is sealed, however small it is; None: never."""
    block_rows: int = attrs.field(default=16_384, validator=_SIZE)
    """Rows of one block at most. Appends of fewer rows that are written together share blocks."""
    block_bytes: int = attrs.field(default=4 << 20, validator=_SIZE)
    """Size of one block at most, unless a single row is larger."""
    max_bytes: int = attrs.field(default=4 << 30, validator=_SIZE)
    """Size of all segments at most; then appends wait until something may be deleted."""
    retain_bytes: int | None = attrs.field(default=1 << 30, validator=v.optional(_SIZE))  # type: ignore[arg-type]
    """What all groups have read is deleted once there is this much besides it."""
    retain_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """What all groups have read is deleted at this age. Without this and `retain_bytes`: at once, but nothing as long as there is no group."""
    max_staged_bytes: int = attrs.field(default=1 << 30, validator=_SIZE)
    """Size at most of batches that were staged and not delivered yet."""
    sync: Literal["group", "never"] = attrs.field(default="group", validator=v.in_(("group", "never")))
    """``group``: what is written together is synced before anybody is answered. ``never``: it is left to the operating system, so a power
    failure may take the newest appends back; deliveries and what groups have read are synced all the same."""

    accept_loss: bool = attrs.field(default=False, kw_only=True, validator=v.instance_of(bool))
    """Open the journal though rows that were promised are gone or damaged, instead of raising `JournalDamaged`. Each loss is logged as an
    error. Offsets go on behind the lost rows; reading a lost one raises `OffsetGone`. Damaged files are kept as ``NAME.damaged``. Meant for one
    start."""

    def __attrs_post_init__(self) -> None:
        """Check what belongs together."""
        if self.segment_bytes is not None and self.block_bytes > self.segment_bytes:
            raise ConfigurationError(
                f"block_bytes is {self.block_bytes}, more than segment_bytes, {self.segment_bytes}"
            )
        # One segment of each partition is always there, and one more is the room for the next append.
        wanted = (self.retain_bytes or 0) + (self.partitions + 1) * self.segment_size
        if self.max_bytes < wanted:
            raise ConfigurationError(
                f"max_bytes is {self.max_bytes}, less than {wanted}: retain_bytes and a segment for each partition and one more; "
                f"raise it, or lower retain_bytes or {'block_bytes' if self.segment_bytes is None else 'segment_bytes'}"
            )

    @property
    def segment_size(self) -> int:
        """`segment_bytes`, or what it is where that is None: never less than a block."""
        if self.segment_bytes is not None:
            return self.segment_bytes
        room = (self.max_bytes - (self.retain_bytes or 0)) // (self.partitions + 1)
        return max(self.block_bytes, min(SEGMENT_BYTES, room))


@attrs.frozen
class Appended:
    """Where rows went."""

    partition: int
    first: int
    """Offset of the first row; the others follow without gaps."""
    count: int


@attrs.frozen
class Extent:
    """What a journal holds."""

    epoch: str
    """Names this journal: a directory that was deleted and made anew has another one, and offsets of the old one mean nothing in it."""
    first: Mapping[int, int]
    """For each partition, the offset of the oldest row."""
    end: Mapping[int, int]
    """For each partition, the offset behind the newest row."""
    opening: str
    """Names this opening of the journal: each time it is opened has a name of its own. See `Store.reach`."""


@attrs.frozen(kw_only=True)
class StoreStatistics:
    """Counters since the store was opened, and sizes of this moment."""

    appends: int
    """Batches that were appended; what `Journal` puts into one batch counts once."""
    rows_appended: int
    octets_appended: int
    """On the disk, headers included."""
    syncs: int
    """Of segments; many appends share one."""
    batches_delivered: int
    batches_repeated: int
    """Deliveries that had been done before."""
    octets: int
    """Of all segments now."""
    segments: int
    segments_deleted: int
    octets_cut: int
    """Torn or never committed, cut off when the store was opened."""
    rows_lost: int
    """Found missing when the store was opened, and accepted; see `JournalConfig.accept_loss`."""
    octets_staged: int
    """Of batches that are staged now."""


LOOK_EVERY = 1.0
"""Seconds between looks at whether the files are still there; one costs 2 µs a partition and 5 µs."""
JUMP = 3600.0
"""Seconds by which the clock may differ from the time that has passed, before it is called a jump."""
SETTLE = 600.0
"""Seconds for which nothing is deleted for its age after the clock has jumped ahead, unless it jumps back: time to put it right."""


def partition_of(key: str | bytes, partitions: int) -> int:
    """Choose the partition of a key; the same in every process.

    Example:
        >>> partition_of("host-1/syslog", 8)
        6
    """
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % partitions


class Store:
    """An open journal. Made by `Store.open`; a context manager that closes it."""

    def __init__(
        self, directory: Path, schema: pa.Schema, config: JournalConfig, lock: int, clock: Callable[[], float]
    ) -> None:
        self.directory = directory
        self.config = config
        self.schema: pa.Schema = schema
        """Columns of every batch that is appended, and of those that `batches` gives."""
        self._lock = lock
        self._clock = clock
        self._ledger: Ledger
        self._ends: Ends
        self._partitions: list[Partition] = []
        self._turn = 0
        self._stages: dict[tuple[str, int], dict[tuple[int, int], Stage]] = {}
        self._stage_number = 0
        self._staged = 0
        self.broken = ""
        """Why this store can do no more until it is opened again; empty if it can."""
        self._files: dict[Path, int] = {}
        """Inodes of what must stay where it is."""
        self.gone = ""
        """Why nothing may be written: the files are not where they were; empty if they are. See `look`."""
        self._looked = time.monotonic()
        self._ahead: dict[Segment, float] = {}
        """Segments with stamps in the future, and when that was noticed."""
        self._told = clock(), time.monotonic()
        """What the clock said the last time, and when that was."""
        self._trusted_from = 0.0
        """The monotonic time from which on the clock tells what is old."""
        self._appends = self._rows = self._octets = self._syncs = 0
        self._delivered = self._repeated = self._deleted = self._cut = self._lost = 0

    # ------------------------------------------------------------ opening and closing

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        schema: pa.Schema | None = None,
        config: JournalConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open the journal in a directory, or make one; what a crash has left is put in order. Blocks.

        Args:
            directory: made if it is not there.
            schema: columns; it may have grown since the last time. None: those it has, or those of `Envelope` for a new one.
            config: None: the defaults.
            clock: seconds since 1970.

        Raises:
            JournalLocked: somebody else has it open.
            JournalDamaged: rows that were promised are not there, or the ledger is damaged; nothing was changed.
            JournalError: written by a later version of this format.
            SchemaMismatch: the columns are others, or fewer; says which.
            ConfigurationError: it has another number of partitions, or these columns cannot be kept.
            OSError: the directory cannot be made or read.
        """
        config = config or JournalConfig()
        if schema is not None:
            check_schema(schema)
        path = Path(directory)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise JournalLocked("another process, or this one, has this journal open", path=str(path)) from error
        columns = schema if schema is not None else columns_of(Envelope).schema
        store = cls(path, columns, config, lock, clock)
        try:
            store._recover(grown=schema is not None)
        except BaseException:
            store.close()
            raise
        return store

    def _recover(self, *, grown: bool) -> None:
        path = self.directory / "ledger.sqlite"
        folders = [self.directory / f"partition-{number:04d}" for number in range(self.config.partitions)]
        if not path.exists() and any(self.directory.glob("partition-*/*.segment")):
            raise JournalDamaged("there are segments, but their ledger is gone: restore it", path=str(path))
        promise = self._read_promise()
        commits = promise.commits if isinstance(promise, Promise) and not self.config.accept_loss else 0
        ledger = self._ledger = Ledger.open(path, partitions=self.config.partitions, commits=commits)
        if ledger.partitions != self.config.partitions:
            raise ConfigurationError(
                f"{self.directory} has {ledger.partitions} partitions, which is for ever, not {self.config.partitions}"
            )
        partitions = self._partitions = [
            Partition(
                folder,
                number,
                journal=ledger.journal,
                schema=self.schema,
                segment_bytes=self.config.segment_size,
            )
            for number, folder in enumerate(folders)
        ]
        if not ledger.ready:
            for partition in partitions:
                partition.create()
        losses = self._find(promise)
        schemas = [schema for partition in partitions if (schema := partition.newest_schema) is not None]
        if not grown:
            # Partitions may differ if the last attempt to add columns was cut short: the one with most columns is the truth.
            self.schema = max(schemas, key=len, default=self.schema)
        for schema in schemas:
            check_growth(schema, self.schema, where=str(self.directory))
        if any(losses.values()):
            with self._ledger_errors():
                ledger.add_losses(losses)
        mark = fingerprint(self.schema)
        for partition in partitions:
            partition.schema = self.schema
            self._cut += partition.settle(ledger.losses(partition.number))
            last = partition.segments[-1]
            if last.fingerprint != mark or last.version < VERSION:
                partition.roll()
                partition.publish()
        # Before the history has its first line, nobody asks for this file.
        first, end = [partition.first for partition in partitions], [partition.end for partition in partitions]
        promise = Promise(ledger.journal, first, end, ledger.commits)
        self._ends = Ends.create(self.directory / "ends", promise)
        with self._ledger_errors():
            ledger.begin({partition.number: partition.end for partition in partitions})
        for name in ("lock", "ends", "ledger.sqlite"):
            self._files[self.directory / name] = (self.directory / name).stat().st_ino
        self._recover_stages()

    def _recover_stages(self) -> None:
        staging = self.directory / "staging"
        staging.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(staging.iterdir()):
            if path.suffix != ".segment":
                path.unlink()  # it was being made
                continue
            try:
                stage = Stage.recover(self, path)
            except (JournalError, OSError) as error:
                logger.warning("staged rows are dropped: %s", error, extra={"event": "stage_dropped"})
                path.unlink(missing_ok=True)
                continue
            if self._ledger.delivered(*stage.key[:2]) is not None:
                stage.discard()
                continue
            self._stage_number = max(self._stage_number, stage.number)
            self._stages.setdefault(stage.key[:2], {})[stage.key[2:]] = stage
            self._staged += stage.octets

    def _read_promise(self) -> Promise | JournalDamaged:
        try:
            return Ends.read(self.directory / "ends")
        except JournalDamaged as error:
            return error

    def _find(self, promised: Promise | JournalDamaged) -> dict[int, list[tuple[int, int]]]:
        """Look for all that was promised; return the ranges of rows that are gone, which is accepted."""
        ledger = self._ledger
        if isinstance(promised, Promise) and promised.journal != ledger.journal:
            text = "this record of how far the partitions reach is of another journal: restore the right one"
            promised = JournalDamaged(text, path=str(self.directory / "ends"))
        promise = promised if ledger.begun and isinstance(promised, Promise) else None
        problems = [promised] if ledger.begun and isinstance(promised, JournalDamaged) else []
        if promise is not None and ledger.commits < promise.commits:
            text = f"the newest {promise.commits - ledger.commits} commits of the ledger are gone"
            problems.append(JournalDamaged(text, path=str(self.directory / "ledger.sqlite")))
        ends = ledger.ends()
        losses: dict[int, list[Loss]] = {}
        for partition in self._partitions:
            number = partition.number
            losses[number] = partition.find(
                ledger.transaction,
                first=None if promise is None else promise.first[number],
                end=ends[number] if promise is None else max(ends[number], promise.end[number]),
                known=ledger.losses(number),
            )
        problems += [loss.error for found in losses.values() for loss in found]
        if problems and not self.config.accept_loss:
            text = f"{problems[0].detail} (JournalConfig.accept_loss goes on with what is left)"
            raise JournalDamaged(text, path=problems[0].path, octet=problems[0].octet)
        for problem in problems:
            logger.error("rows are lost, which is accepted: %s", problem, extra={"event": "rows_lost"})
        ranges = {
            number: [(loss.first, loss.end) for loss in found if loss.end > loss.first]
            for number, found in losses.items()
        }
        self._lost = sum(end - first for found in ranges.values() for first, end in found)
        return ranges

    def close(self) -> None:
        """Let go of everything; blocks that were read stay valid, and so does what was staged. Closing twice is fine."""
        for stages in self._stages.values():
            for stage in stages.values():
                stage.close()
        if hasattr(self, "_ends") and self._lock >= 0:
            self._ends.close(self._ledger.commits)
        for partition in self._partitions:
            partition.close()
        if hasattr(self, "_ledger"):
            self._ledger.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.broken = self.broken or "this journal is closed"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ appending

    def choose_partition(self, key: str | bytes | None = None) -> int:
        """Choose a partition: that of the key, or without one the next in turn."""
        if key is not None:
            return partition_of(key, len(self._partitions))
        self._turn = (self._turn + 1) % len(self._partitions)
        return self._turn

    def prepare(self, number: int, batch: pa.RecordBatch) -> tuple[int, pa.RecordBatch]:
        """Check one part of an append, and give the batch the schema of the journal.

        Raises:
            SchemaMismatch: columns are not those of the journal.
            JournalError: it is empty, larger than `segment_bytes`, or for a partition that there is not.
        """
        self._partition(number)
        if not batch.num_rows:
            raise JournalError("an append has one row or more", path=str(self.directory))
        conformed, limit = conform(batch, self.schema), self.config.segment_size
        if batch.nbytes > limit:
            raise JournalError(
                f"an append of {batch.nbytes} octets, at most {limit} (segment_bytes): send fewer rows at a time",
                path=str(self.directory),
            )
        return number, conformed

    def append(self, parts: Sequence[tuple[int, pa.RecordBatch]]) -> list[Appended]:
        """Write batches, each to a partition, and sync them together. Either all that are answered are there, or none.

        Returns:
            Where each one went; fewer than were given if there was no room for the others.

        Raises:
            JournalFull: there was no room for the first one.
            SchemaMismatch, JournalError: as `prepare`.
            JournalUnwritable: the disk refuses.
            In each case nothing was written.
        """
        self._require_usable()
        conformed = [self.prepare(number, batch) for number, batch in parts]
        packed = self._packed(conformed)
        if not self._has_room(packed.values()):
            self.retain()
            if not self._has_room(packed.values()):
                conformed, packed = self._prefix(conformed)
        ends = {number: self._partitions[number].end for number in packed}
        self._write(packed)
        answers = []
        for number, batch in conformed:
            answers.append(Appended(number, ends[number], batch.num_rows))
            ends[number] += batch.num_rows
        self._appends += len(answers)
        return answers

    def _packed(self, parts: Iterable[tuple[int, pa.RecordBatch]]) -> dict[int, list[Message]]:
        by_partition: dict[int, list[pa.RecordBatch]] = {}
        for number, batch in parts:
            by_partition.setdefault(number, []).append(batch)
        return {number: list(self.pack(batches)) for number, batches in by_partition.items()}

    def _prefix(
        self, parts: list[tuple[int, pa.RecordBatch]]
    ) -> tuple[list[tuple[int, pa.RecordBatch]], dict[int, list[Message]]]:
        """As many of the first parts as there is room for."""
        packed: dict[int, list[Message]] = {}
        for count, (number, batch) in enumerate(parts):
            messages = list(self.pack([batch]))
            if not self._has_room([*packed.values(), messages]):
                if not count:
                    raise self._full(sum(message.size for message in messages))
                return parts[:count], packed
            packed.setdefault(number, []).extend(messages)
        return parts, packed

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Message]:
        """Make messages of batches with the columns of the journal: large ones in pieces, small ones together."""
        run: list[pa.RecordBatch] = []
        rows = octets = 0
        for batch in batches:
            for piece in self._pieces(batch):
                size = piece.nbytes
                if run and (rows + piece.num_rows > self.config.block_rows or octets + size > self.config.block_bytes):
                    yield _message(run)
                    run, rows, octets = [], 0, 0
                run.append(piece)
                rows += piece.num_rows
                octets += size
        if run:
            yield _message(run)

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows, size, limit = batch.num_rows, batch.nbytes, self.config.block_bytes
        if rows <= self.config.block_rows and (size <= limit or rows == 1):
            yield batch
            return
        step = max(1, min(self.config.block_rows, rows * limit // size, (rows + 1) // 2))
        for start in range(0, rows, step):
            yield from self._pieces(batch.slice(start, step))

    def _write(self, packed: Mapping[int, Sequence[Message]]) -> None:
        now = self._now()
        touched = [self._partitions[number] for number in packed]
        with _Undone(self, touched):
            for partition in touched:
                partition.write(packed[partition.number], transaction=0, time=now)
            if self.config.sync == "group":
                self._sync(touched)
        self._publish(touched)
        for messages in packed.values():
            self._rows += sum(message.rows for message in messages)
            self._octets += sum(message.size for message in messages)

    def _now(self) -> float:
        """Ask the clock. If it has jumped, that is named, and nothing is deleted for its age right after a jump ahead."""
        now, passed = self._clock(), time.monotonic()
        jump = (now - self._told[0]) - (passed - self._told[1])
        if abs(jump) > JUMP:
            way = "ahead" if jump > 0 else "back"
            logger.warning(
                "%s: the clock has jumped %s by %.0f s", self.directory, way, abs(jump), extra={"event": "clock"}
            )
            self._trusted_from = passed + SETTLE if jump > 0 else passed
        self._told = now, passed
        return now

    def _note(self, touched: Iterable[Partition]) -> None:
        """Write into the record of ends what is on the disk now."""
        for partition in touched:
            self._ends.set(partition.number, partition.first, min(partition.synced_end, partition.end))
        try:
            self._ends.write(self._ledger.commits)
        except OSError as error:
            # What was written is there all the same; but nothing more is promised that cannot be noted.
            self.broken = (
                f"the record of how far the partitions reach cannot be written ({error}), open the journal again"
            )
            logger.error("%s: %s", self.directory, self.broken, extra={"event": "ends_unwritable"})

    @property
    def unsynced(self) -> bool:
        """Whether the record of ends has something that is not synced yet; see `sync_ends`."""
        return self._ends.pending

    def sync_ends(self) -> None:
        """Sync the record of ends. The next append does it too; call this within `SYNC_EVERY` seconds if there is none."""
        try:
            self._ends.sync()
        except OSError as error:
            raise _refused(error, self.directory) from error

    def _publish(self, touched: Sequence[Partition]) -> None:
        sealed = [partition.publish() for partition in touched]
        self._note(touched)
        if any(sealed):
            try:
                self.retain()
            except JournalUnwritable as error:
                # The rows are there all the same. What could not be deleted is tried again.
                logger.warning("%s: %s", self.directory, error.detail, extra={"event": "retain"})

    def _sync(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            partition.sync()
            self._syncs += 1

    # ------------------------------------------------------------ delivering batches of a sink

    def deliver(self, query: str, batch: int, parts: Iterable[tuple[int, Message]]) -> Delivered:
        """Append a batch exactly once, whole: readers see all of it or nothing, and a batch that was delivered is not written again.

        Args:
            query: whose batch.
            batch: its number; those of a query grow.
            parts: partitions and messages (of `pack`, or of a `Stage`); not looked at if the batch has been delivered.

        Raises:
            JournalFull: no room. Nothing was written; try again.
            JournalError: the batch is larger than the journal can ever take.
            JournalUnwritable: the disk refuses, and nothing was written; or the ledger does, and then only opening the journal again
                tells whether the batch was delivered.
        """
        self._require_usable()
        done = self.delivered(query, batch)
        if done is not None:
            self._repeated += 1
            return done
        now, transaction = self._now(), self._ledger.transaction + 1
        begun: dict[int, int] = {}
        rows = size = 0
        with _Undone(self, self._partitions):
            for number, message in parts:
                partition = self._partition(number)
                size += message.size
                rows += message.rows
                self._require_room_for_batch(size, message.size)
                begun.setdefault(number, partition.end)
                partition.write([message], transaction=transaction, time=now)
            touched = [self._partitions[number] for number in begun]
            self._sync(touched)
            # From here to the end of the method the ledger decides, and an error at any point leaves that to whoever opens it again.
            self.broken = f"the delivery of batch {batch} of {query} was cut short, open the journal again"
        ranges = {number: (first, self._partitions[number].segments[-1].end) for number, first in begun.items()}
        try:
            self._ledger.deliver(query, batch, ranges)
        except sqlite3.Error as error:
            raise JournalUnwritable(f"{self.broken}: {error}", path=str(self.directory)) from error
        self.broken = ""
        self._publish(touched)
        self._delivered += 1
        self._rows += rows
        self._octets += size
        return Delivered(already=False, ranges=ranges)

    def delivered(self, query: str, batch: int) -> Delivered | None:
        """Look up whether a batch has been delivered; None if not."""
        self._require_usable()
        return self._ledger.delivered(query, batch)

    def _require_room_for_batch(self, size: int, more: int) -> None:
        config = self.config
        most = config.max_bytes - (config.retain_bytes or 0) - config.partitions * config.segment_size
        if size > most:
            raise JournalError(
                f"a batch of more than {most} octets never fits: raise max_bytes, or let batches be smaller",
                path=str(self.directory),
            )
        if self.size + more + self._header_size > config.max_bytes:
            raise self._full(size)

    def stage(self, query: str, batch: int, part: int, attempt: int) -> Stage:
        """Return the stage of one attempt at one part of a batch; begin it if there is none."""
        self._require_usable()
        stages = self._stages.setdefault((query, batch), {})
        stage = stages.get((part, attempt))
        if stage is None:
            self._stage_number += 1
            stage = stages[part, attempt] = Stage.create(self, self._stage_number, (query, batch, part, attempt))
        return stage

    def staged(self, query: str, batch: int) -> Mapping[tuple[int, int], Stage]:
        """For each part and attempt of a batch, the stage."""
        return self._stages.get((query, batch), {})

    def unstage(self, query: str, batch: int, part: int | None = None, attempt: int | None = None) -> int:
        """Drop what was staged for a batch, or some of it; return how many stages."""
        stages = self._stages.get((query, batch), {})
        chosen = [key for key in stages if part in (None, key[0]) and attempt in (None, key[1])]
        for key in chosen:
            stage = stages.pop(key)
            self._staged -= stage.octets
            stage.discard()
        if not stages:
            self._stages.pop((query, batch), None)
        return len(chosen)

    def unstage_older(self, age: float) -> list[tuple[str, int]]:
        """Drop the batches to which no task has added rows for so many seconds; return their queries and numbers."""
        now = self._clock()
        before = now - age
        for stages in self._stages.values():
            for stage in stages.values():
                if stage.touched > now:  # the clock was ahead at that time
                    stage.touch(now)
        old = [key for key, stages in self._stages.items() if all(stage.touched < before for stage in stages.values())]
        for query, batch in old:
            self.unstage(query, batch)
        return old

    # ------------------------------------------------------------ groups and retention

    def groups(self) -> dict[str, dict[int, int]]:
        """For each group, how far it has come in each partition."""
        return self._ledger.groups()

    def declare_group(self, name: str, at: Literal["first", "end"] = "first") -> dict[int, int]:
        """Have nothing deleted that this group has not read; return how far it has come.

        Args:
            name: a group that is known already stays where it is.
            at: where a new one begins.
        """
        self._require_usable()
        known = self._ledger.groups().get(name)
        if known is not None:
            return known
        offsets = {p.number: p.first if at == "first" else p.end for p in self._partitions}
        self._set_group(name, offsets)
        return offsets

    def commit_group(self, name: str, offsets: Mapping[int, int]) -> None:
        """Note how far a group has come; it may go back, as far as there are rows.

        Args:
            name: a group that was declared.
            offsets: for some partitions, the offset behind the last row that the group has done with.

        Raises:
            JournalError: the group is unknown, or an offset is beyond the end.
            JournalUnwritable: the ledger cannot be written.
        """
        self._require_usable()
        if name not in self._ledger.groups():
            raise JournalError(f"no group {name!r}: declare it first", path=str(self.directory))
        for number, offset in offsets.items():
            self._partition(number).check_offset(offset)
        self._set_group(name, offsets)
        self.retain()

    def _set_group(self, name: str, offsets: Mapping[int, int]) -> None:
        with self._ledger_errors():
            self._sync(self._partitions[number] for number in offsets if self.config.sync == "never")
            self._ledger.set_group(name, offsets)
        self._note(self._partitions)

    @contextmanager
    def _ledger_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalUnwritable(f"the ledger cannot be written: {error}", path=str(self.directory)) from error

    def forget_group(self, name: str) -> None:
        """Let a group hold nothing up any more; harmless if there is none."""
        self._require_usable()
        with self._ledger_errors():
            self._ledger.forget_group(name)
        self._note(self._partitions)
        self.retain()

    def retain(self) -> int:
        """Seal segments that are old enough, delete what may go; return how many were deleted.

        Raises:
            JournalUnwritable: a file cannot be made or deleted.
        """
        self._require_usable()
        now, deleted = self._now(), 0
        try:
            for partition in self._partitions:
                last = partition.segments[-1]
                age = self.config.segment_time
                # A stamp in the future says nothing about the age.
                if age is not None and last.end > last.first and (last.oldest > now or now - last.oldest >= age):
                    partition.roll()
                    partition.publish()
            while (leaving := self._next_to_go(now)) is not None:
                path = leaving.drop_oldest()
                self._ends.set(leaving.number, leaving.first, min(leaving.synced_end, leaving.end))
                self._ends.write(self._ledger.commits)
                self._ends.sync()
                path.unlink()
                deleted += 1
        except OSError as error:
            raise _refused(error, self.directory) from error
        finally:
            self._deleted += deleted
        return deleted

    def _next_to_go(self, now: float) -> Partition | None:
        """The partition with the oldest segment that may be deleted."""
        config, groups = self.config, self._ledger.groups().values()
        found: tuple[float, Partition] | None = None
        for partition in self._partitions:
            if len(partition.segments) < 2:
                continue
            oldest, following = partition.segments[:2]
            if any(offsets.get(partition.number, 0) < following.first for offsets in groups):
                continue
            if config.retain_bytes is None and config.retain_time is None:
                if groups:
                    return partition
                continue
            large = config.retain_bytes is not None and self.size - oldest.size >= config.retain_bytes
            written = self._written(partition, now)
            trusted = time.monotonic() >= self._trusted_from
            aged = trusted and config.retain_time is not None and now - written >= config.retain_time
            if (large or aged) and (found is None or written < found[0]):
                found = written, partition
        return found[1] if found is not None else None

    def _written(self, partition: Partition, now: float) -> float:
        """When the oldest segment was written at the latest.

        That is its latest stamp. If the clock was ahead at that time, it is the first stamp from its end on that is not in the future; if all are,
        the time at which this was noticed.
        """
        oldest, *newer = partition.segments
        oldest.index()
        if oldest.newest <= now:
            return oldest.newest
        if oldest not in self._ahead:
            self._ahead[oldest] = now
            logger.warning(
                "%s: rows are stamped %.0f s ahead of the clock; their age is told by the rows behind them, or counted from now",
                oldest.path,
                oldest.newest - now,
                extra={"event": "clock"},
            )
        if 0 < oldest.last <= now:
            return oldest.last
        for segment in newer:
            segment.index()
            for stamp in (segment.oldest, segment.last):
                if 0 < stamp <= now:
                    return stamp
        return self._ahead[oldest]

    # ------------------------------------------------------------ reading

    @property
    def epoch(self) -> str:
        """Names this journal, see `Extent.epoch`."""
        return self._ledger.journal.hex()

    @property
    def size(self) -> int:
        """Octets of all segments."""
        return sum(partition.size for partition in self._partitions)

    def extent(self) -> Extent:
        """Say what there is to read."""
        ends = {p.number: p.end for p in self._partitions}
        return Extent(self.epoch, {p.number: p.first for p in self._partitions}, ends, self._ledger.opening)

    def reach(self, opening: str | None) -> Reach:
        """Say how far the rows that were there in an opening are still the same rows.

        A journal may be older than what was read from it: an older copy was put in its place, or a power failure took appends that were not
        synced. Its next rows get offsets that other rows had.

        Args:
            opening: `Extent.opening` of that time; None for a time before openings had names.
        """
        return self._ledger.reach(opening, {p.number: p.end for p in self._partitions})

    def read(self, partition: int, start: int, end: int | None = None, *, max_bytes: int = 4 << 20) -> Iterator[Block]:
        """Yield rows from `start` on as the blocks that they are in, without copying: at least one, if there is a row, and up to `max_bytes`.

        Go on at the `Block.end` of the last one. The same offsets always give the same rows.

        Args:
            partition: its number.
            start: offset of the first row.
            end: offset behind the last one; None: what there is.
            max_bytes: octets of messages.

        Raises:
            OffsetGone: retention has deleted the row at `start`.
            JournalDamaged: a block does not have its checksum.
            JournalError: `start` is beyond the end.
        """
        source = self._partition(partition)
        source.check_offset(start)
        return source.read(start, source.end if end is None else end, max_bytes)

    def batches(self, partition: int, start: int, end: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the offset of the first row and the rows, in the columns of `schema`, up to `end` or what there is now; raises as `read`."""
        source = self._partition(partition)
        source.check_offset(start)
        stop = min(source.end, source.end if end is None else end)
        while start < stop:
            for block in source.read(start, stop, self.config.block_bytes):
                yield block.first, fit(block.batch(), self.schema)
                start = block.end

    def offset_within(self, partition: int, start: int, end: int, *, max_bytes: int) -> int:
        """Find the offset at which `read` with the same arguments would end, without reading rows. The same at each call; raises as `read`."""
        source = self._partition(partition)
        source.check_offset(start)
        return source.offset_within(start, end, max_bytes)

    def statistics(self) -> StoreStatistics:
        """Count what was done."""
        return StoreStatistics(
            appends=self._appends,
            rows_appended=self._rows,
            octets_appended=self._octets,
            syncs=self._syncs,
            batches_delivered=self._delivered,
            batches_repeated=self._repeated,
            octets=self.size,
            segments=sum(len(partition.segments) for partition in self._partitions),
            segments_deleted=self._deleted,
            octets_cut=self._cut,
            rows_lost=self._lost,
            octets_staged=self._staged,
        )

    # ------------------------------------------------------------ checks

    def _partition(self, number: int) -> Partition:
        if not isinstance(number, int) or not 0 <= number < len(self._partitions):
            raise JournalError(
                f"there are partitions 0 to {len(self._partitions) - 1}, not {number!r}", path=str(self.directory)
            )
        return self._partitions[number]

    def _has_room(self, packed: Iterable[Sequence[Message]]) -> bool:
        wanted = self.size
        for messages in packed:
            octets = sum(message.size for message in messages)
            # A segment that gives way is at least half full, or the next one is.
            wanted += octets + (2 * octets // self.config.segment_size + 1) * self._header_size
        return wanted <= self.config.max_bytes

    @property
    def _header_size(self) -> int:
        """Octets of a new segment without rows."""
        return self._partitions[0].segments[-1].start

    def _full(self, needed: int) -> JournalFull:
        limit = self.config.max_bytes
        return JournalFull(
            f"holds {self.size} octets, at most {limit} (max_bytes), and {needed} more were to come; nothing may be deleted "
            f"before the groups have read it ({', '.join(self.groups()) or 'there are none'})",
            path=str(self.directory),
            needed=needed,
            limit=limit,
        )

    def _require_usable(self) -> None:
        if self.broken:
            raise JournalError(self.broken, path=str(self.directory))
        if self.gone or time.monotonic() - self._looked >= LOOK_EVERY:
            self.look()
        if self.gone:
            raise JournalUnwritable(self.gone, path=str(self.directory))

    def look(self) -> None:
        """Look whether the files are where they were; if not, all that writes fails from now on. Done by itself each `LOOK_EVERY` seconds."""
        self._looked = time.monotonic()
        files = {**self._files, **dict(partition.written_file() for partition in self._partitions)}
        missing = [path for path, inode in files.items() if _inode(path) != inode]
        if not missing:
            self.gone = ""
        elif not self.gone:
            self.gone = (
                f"{missing[0].relative_to(self.directory)} was deleted, moved or replaced while this journal is open, and what was appended since is "
                "lost: nothing more is written. Put the directory back, or start again"
            )
            logger.error("%s: %s", self.directory, self.gone, extra={"event": "journal_gone"})


class _Undone:
    """Takes back what was written to partitions if the block fails."""

    __slots__ = ("_store", "_touched")

    def __init__(self, store: Store, touched: Sequence[Partition]) -> None:
        self._store, self._touched = store, touched

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        try:
            for partition in self._touched:
                partition.rollback()
        except BaseException:
            self._store.broken = "what was half written cannot be taken back, open the journal again"
            raise
        if isinstance(error, FileNotFoundError):
            self._store.look()
            self._store._require_usable()
        if isinstance(error, OSError):
            raise _refused(error, self._store.directory) from error


class Stage:
    """Rows on the disk that wait to become part of a batch. Made by `Store.stage`; methods belong to the thread that writes.

    A segment file of its own, which says in the metadata of its schema whose rows it has (`_STAGE`). It outlives the process, so that a
    batch can be delivered by the next one. Nothing is synced: after a power failure rows may be missing, which shows in their number.
    """

    def __init__(self, store: Store, segment: Segment, key: tuple[str, int, int, int]) -> None:
        self._store = store
        self._segment = segment
        self.key = key
        """Query, batch, part and attempt."""

    @classmethod
    def create(cls, store: Store, number: int, key: tuple[str, int, int, int]) -> Stage:
        """Make the file."""
        metadata = {**(store.schema.metadata or {}), _STAGE: json.dumps([_STAGE_FORMAT, *key]).encode()}
        folder = store.directory / "staging"
        try:
            segment = Segment.create(
                folder,
                partition=0,
                first=number,
                schema=store.schema.with_metadata(metadata),
                journal=store._ledger.journal,
                durable=False,
            )
        except OSError as error:
            raise _refused(error, folder) from error
        return cls(store, segment, key)

    @classmethod
    def recover(cls, store: Store, path: Path) -> Stage:
        """Open a file that an earlier process made.

        Raises:
            JournalError: it is of no use any more; says why.
        """
        segment = Segment.open(path, partition=0, journal=store._ledger.journal)
        try:
            version, query, batch, part, attempt = json.loads((segment.schema.metadata or {}).get(_STAGE, b"[]"))
        except ValueError as error:
            raise JournalError("written by another version", path=str(path)) from error
        if version != _STAGE_FORMAT:
            raise JournalError(f"stage format {version}, this program reads {_STAGE_FORMAT}", path=str(path))
        if segment.fingerprint != fingerprint(store.schema):
            raise JournalError(f"batch {batch} of {query} has the columns of before the journal grew", path=str(path))
        if segment.examine(0) == "damaged":
            raise segment.damage()
        segment.settle()
        return cls(store, segment, (query, batch, part, attempt))

    @property
    def number(self) -> int:
        """Of the file."""
        return self._segment.first

    @property
    def rows(self) -> int:
        """Rows that were staged."""
        return self._segment.end - self._segment.first

    @property
    def octets(self) -> int:
        """Their size on the disk."""
        return self._segment.size - self._segment.start

    @property
    def touched(self) -> float:
        """When rows last came, in seconds since 1970: what the file says, as other processes may have written it."""
        return self._segment.path.stat().st_mtime

    def touch(self, now: float) -> None:
        """Have it that rows came at this time."""
        os.utime(self._segment.path, (now, now))

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows; nothing is synced.

        Raises:
            SchemaMismatch: columns are not those of the journal.
            JournalFull: all stages together would be larger than `max_staged_bytes`, or the disk is full.
            JournalUnwritable: the disk refuses.
        """
        store, segment = self._store, self._segment
        messages = list(store.pack([conform(batch, store.schema)]))
        size, limit = sum(message.size for message in messages), store.config.max_staged_bytes
        if store._staged + size > limit:
            raise JournalFull(
                f"batches that are not delivered yet hold {store._staged} octets, at most {limit} (max_staged_bytes), and "
                f"{size} more were to come",
                path=os.fspath(segment.path),
                needed=size,
                limit=limit,
            )
        before = segment.size, segment.end
        try:
            segment.write(messages, transaction=0, time=0.0)
        except OSError as error:
            segment.cut_to(*before)
            raise _refused(error, segment.path) from error
        segment.publish()
        store._staged += size

    def messages(self) -> Iterator[Message]:
        """Yield what was staged, without copying it."""
        segment = self._segment
        if segment.end == segment.first:
            return
        for block in segment.read(segment.first, segment.end, segment.size, 0):
            yield Message(block.octets, block.rows)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._segment.close()

    def discard(self) -> None:
        """Delete the file."""
        self._segment.close()
        self._segment.path.unlink(missing_ok=True)


def _message(run: list[pa.RecordBatch]) -> Message:
    batch = run[0]
    if len(run) > 1:
        [batch] = pa.Table.from_batches(run).combine_chunks().to_batches()
    return Message(batch.serialize(), batch.num_rows)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _refused(error: OSError, path: Path) -> JournalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(f"the disk is full ({error.strerror}); nothing of this was written", path=str(path))
    return JournalUnwritable(f"the disk refuses ({error}); nothing of this was written", path=str(path))
