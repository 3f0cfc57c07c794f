"""The order of the writes of a journal. All its guarantees rest on it.

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
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from levada.framework.platform import Platform

from .blocks import Message
from .config import JournalConfig
from .errors import JournalError, JournalUnwritable
from .guard import Guard, Undone
from .keys import Keys
from .ledger import Ledger, ledger_errors
from .partitions import Partition
from .recovery import SYNC_THREADS, Recovered
from .retention import Clock, DiskRoom, Retention

__all__ = ["DiskWrites"]

logger = logging.getLogger("levada.actors.journal")

MOST_OFFSETS = 1 << 20
"""Most offsets of a segment with rows of a copy: an index in memory takes 12 bytes for each, whether there is a row or not."""


class DiskWrites:
    """Writes to the files of an open journal. Its methods belong to the thread that writes."""

    def __init__(
        self, platform: Platform, directory: Path, config: JournalConfig, clock: Clock, found: Recovered
    ) -> None:
        self.directory = directory
        self.partitions = found.partitions
        self.keys: list[Keys] = []
        """An index for each partition, or none."""
        if config.keyed is not None:
            self.keys = [Keys(platform.files, each, config.keyed, found.ledger.journal) for each in found.partitions]
        self.guard = Guard(platform, directory, found.partitions)
        self.room = DiskRoom(directory, config, found.partitions, found.ledger)
        self.rows = self.bytes = self.syncs = self.segments_deleted = 0
        """Counters since the opening."""
        self._files = platform.files
        self._config = config
        self._clock = clock
        self._ledger: Ledger = found.ledger
        self._ends = found.ends
        self._retention = Retention(config, found.partitions, found.ledger, clock)
        # Has no thread before there are two files to sync.
        self._syncing = platform.thread_pool(SYNC_THREADS, "levada-sync")

    def close(self) -> None:
        """End the threads that sync."""
        self._syncing.shutdown()

    def append(self, packed: Mapping[int, Sequence[Message]], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        """Write messages to some partitions; `batches` has their rows for the index, if they are at hand."""
        now = self._clock.now()
        touched = [self.partitions[number] for number in packed]
        with Undone(self.guard, touched):
            for partition in touched:
                partition.write(packed[partition.number], transaction=0, time=now)
            if self._config.sync == "group":
                self.sync(touched)
        self._publish(touched, batches)
        for messages in packed.values():
            self.rows += sum(message.rows for message in messages)
            self.bytes += sum(message.size for message in messages)

    def transact(
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
        with Undone(self.guard, self.partitions):
            for number, messages in parts:
                partition = self.partition(number)
                begun.setdefault(number, partition.end)
                size += sum(message.size for message in messages)
                partition.write(messages, transaction=transaction, time=now)
            touched = [self.partitions[number] for number in begun]
            self.sync(touched)
            # From here on the ledger decides. After an error, only opening the journal again tells what it decided.
            self.guard.broken = f"{what} was cut short, open the journal again"
        ranges = {number: (first, self.partitions[number].segments[-1].end) for number, first in begun.items()}
        try:
            decide(ranges)
        except sqlite3.Error as error:
            raise JournalUnwritable(f"{self.guard.broken}: {error}", path=str(self.directory)) from error
        self.guard.broken = ""
        self._publish(touched, batches or {})
        self.rows += sum(end - first for first, end in ranges.values())
        self.bytes += size
        return ranges

    def partition(self, number: int) -> Partition:
        """Return a partition; `JournalError` if there is none of this number."""
        if not isinstance(number, int) or not 0 <= number < len(self.partitions):
            raise JournalError(
                f"the partition is {number!r}, wanted 0 to {len(self.partitions) - 1}", path=str(self.directory)
            )
        return self.partitions[number]

    def sync(self, partitions: Iterable[Partition]) -> None:
        """Sync the newest segments of partitions."""
        touched = list(partitions)
        self.syncs += len(touched)
        if len(touched) == 1:
            touched[0].sync()
            return
        # At once, so that the file system puts them into one commit of its own: on ext4 16 files take 6 ms, one after the other 95.
        syncs = [self._syncing.submit(partition.sync) for partition in touched]
        wait(syncs)  # all of them: after a failure the writes are taken back
        for sync in syncs:
            sync.result()

    def make_sure(self, partitions: Iterable[Partition]) -> None:
        """Bring all rows of partitions to the disk before the ledger says something about them; with ``sync="group"`` they are there.

        Otherwise, after a power failure, the ledger would know more rows than there are.
        """
        if self._config.sync == "never":
            with self.guard.refusals():
                self.sync(partitions)

    def _publish(self, touched: Sequence[Partition], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        """Show readers what was written; `batches` has these rows for some partitions, to be indexed."""
        sealed = [partition.publish() for partition in touched]
        if self.keys:
            self._index(touched, batches)
        self._note(touched)
        if any(sealed):
            self.retain_if_possible()

    def _index(self, touched: Sequence[Partition], batches: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        try:
            for partition in touched:
                self.keys[partition.number].note(batches.get(partition.number, ()))
        except (JournalError, OSError) as error:
            # The rows are there all the same; but a command could be taken twice.
            self.guard.broken = f"new rows cannot be read back for the index ({error}), open the journal again"
            logger.error("%s: %s", self.directory, self.guard.broken, extra={"event": "index_behind"})

    @contextmanager
    def ledger_change(self) -> Iterator[Ledger]:
        """Change the ledger in a block, and bring the record of ends up to date with it; `JournalUnwritable` if the ledger refuses."""
        with ledger_errors(self.directory):
            yield self._ledger
        self._note(self.partitions)

    def _note(self, touched: Iterable[Partition]) -> None:
        """Bring the record of ends up to date with the disk."""
        for partition in touched:
            self._ends.set(partition.number, partition.first, min(partition.synced_end, partition.end))
        try:
            self._ends.write(self._ledger.commits)
        except OSError as error:
            # The rows are on the disk all the same; but nothing more is promised that cannot be noted.
            self.guard.broken = (
                f"the record of how far the partitions reach cannot be written ({error}), open the journal again"
            )
            logger.error("%s: %s", self.directory, self.guard.broken, extra={"event": "ends_unwritable"})

    def begin_segment(self, partition: Partition, end: int) -> None:
        """Begin a new segment for rows up to `end`, if the last one has rows and would get more than `MOST_OFFSETS`."""
        first = partition.segments[-1].first
        if first < partition.end and end - first > MOST_OFFSETS:
            with Undone(self.guard, [partition]):
                partition.roll()
            self._publish([partition], {})

    def retain(self) -> int:
        """Seal old segments, delete those that may go; return how many were deleted. Raises as `Store.retain`."""
        self.guard.require_usable()
        now, before = self._clock.now(), self.segments_deleted
        with self.guard.refusals():
            self._retention.seal_old(now)
            while (leaving := self._retention.next_to_go(now)) is not None:
                self.delete_oldest(leaving)
        return self.segments_deleted - before

    def retain_if_possible(self) -> None:
        """Retain behind a change that stands, whatever this raises: its error would say that nothing was changed. It is tried again later."""
        try:
            if not self.guard.broken:
                self.retain()
        except JournalError as error:
            logger.warning("%s: %s", self.directory, error.detail, extra={"event": "retain"})

    def delete_oldest(self, partition: Partition) -> None:
        """Delete the oldest segment of a partition, which has another one."""
        path = partition.drop_oldest()
        self._ends.set(partition.number, partition.first, min(partition.synced_end, partition.end))
        self._ends.write(self._ledger.commits)
        self._ends.sync()
        if self.keys:
            self.keys[partition.number].drop(path)
        self._files.unlink(path)
        self.segments_deleted += 1
