"""Taking rows out of the segments of a partition: all of an entity, also where a crash came between; or those that are not needed any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute

from .config import Keyed
from .disk_writes import DiskWrites
from .errors import JournalError
from .ledger import Erasure
from .trimming import chooser

__all__ = ["Erasures"]

logger = logging.getLogger("levada.actors.journal")

TRY_EVERY = 60.0
"""Seconds between attempts at an erasure that the disk refuses."""
MANY_GONE = 1 << 16
"""Rows at which a last segment is sealed when it was trimmed: an opening indexes the last one anew, 0.1 µs for each row that is gone."""

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


class Erasures:
    """Erases rows. The ledger knows about it from the first step to the last. Its methods belong to the thread that writes."""

    def __init__(self, writes: DiskWrites, monotonic: Callable[[], float]) -> None:
        self._writes = writes
        self._guard = writes.guard
        self._monotonic = monotonic
        self._left: list[Erasure] = []
        """Erasures that the disk refused when the journal was opened."""
        self._tried = 0.0

    def begin(self, erasure: Erasure) -> Iterator[int]:
        """Record that rows are to be erased; return an iterator whose steps do it, and yield the number of rows of each."""
        with self._writes.ledger_change() as ledger:
            ledger.begin_erasure(erasure)
        return self._erase(erasure)

    def finish(self, erasures: Iterable[Erasure], keyed: Keyed | None) -> None:
        """Go on with erasures that a crash cut short."""
        for erasure in erasures:
            if keyed is not None and keyed.entity == erasure.column:
                self._left.append(erasure)
            else:
                self._log(f"open it with Keyed(entity={erasure.column!r})")
        self._try()

    @property
    def left(self) -> bool:
        """Whether there are erasures that could not be finished."""
        return bool(self._left)

    def try_again(self) -> None:
        """Go on with what `finish` could not do, every `TRY_EVERY` seconds."""
        if self._left and self._monotonic() - self._tried >= TRY_EVERY:
            self._try()

    def _try(self) -> None:
        self._tried = self._monotonic()
        for erasure in list(self._left):
            try:
                for _ in self._erase(erasure):
                    pass
            except JournalError as error:
                self._log(error)
            else:
                self._left.remove(erasure)

    def _log(self, why: object) -> None:
        logger.error(
            "%s: rows that were to be erased are still there: %s",
            self._writes.directory,
            why,
            extra={"event": "not_erased"},
        )

    def _erase(self, erasure: Erasure) -> Iterator[int]:
        keys = self._writes.keys[erasure.partition]
        entity = pa.scalar(erasure.entity)

        def choose(first: int, batch: pa.RecordBatch) -> Sequence[bool]:
            if erasure.column not in batch.schema.names:  # from before there was such a column
                return ()
            same = pc.fill_null(pc.equal(batch.column(erasure.column), entity), fill_value=False).to_pylist()
            return [each and first + place < erasure.before for place, each in enumerate(same)]

        with self._guard.refusals():
            found = [first for first in keys.segments_of(erasure.entity) if first < erasure.before]
        yield from self._rewrite(erasure.partition, found, choose)
        self._guard.require_usable()
        with self._writes.ledger_change() as ledger:
            ledger.end_erasure(erasure)

    def trim(self, number: int, ranges: Sequence[range]) -> Iterator[int]:
        """Take rows out of the segments of a partition in steps, as `begin`; nothing goes on after a crash."""
        self._guard.require_usable()
        if not ranges:
            return
        partition = self._writes.partitions[number]
        self._writes.make_sure([partition])
        with self._writes.ledger_change() as ledger:
            ledger.set_trimmed(number, ranges[-1].stop)
        touched = [
            each.first
            for each in partition.segments
            if any(run.start < each.end and run.stop > each.first for run in ranges)
        ]
        yield from self._rewrite(number, touched, chooser(ranges))
        with self._guard.refusals():
            last = partition.segments[-1]
            if last.erased and last.end - last.first >= MANY_GONE:
                partition.roll()
                partition.publish()
                self._writes.keys[number].catch_up()
            while len(partition.segments) > 1 and partition.segments[0].is_void:
                self._writes.delete_oldest(partition)

    def _rewrite(
        self, number: int, segments: Sequence[int], choose: Callable[[int, pa.RecordBatch], Sequence[bool]]
    ) -> Iterator[int]:
        """Rewrite segments of a partition, by their first offsets, without the rows that are chosen; yield the number of rows of each."""
        partition, keys = self._writes.partitions[number], self._writes.keys[number]
        for first in segments:
            self._guard.require_usable()
            segment = next((each for each in partition.segments if each.first == first), None)
            if segment is None:
                continue
            with self._guard.refusals():
                rows = partition.erase(segment, choose)
                if rows or segment.erased:  # the second: a crash may have come before the index was made
                    keys.rebuild(next(each for each in partition.segments if each.first == first))
            yield rows
