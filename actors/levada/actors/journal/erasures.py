"""Taking rows out of the segments of a partition: all of an entity, also where a crash came between; or those that are not needed any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from .config import Keyed
from .errors import JournalError
from .guard import Guard
from .keys import Keys
from .ledger import Erasure, Ledger, ledger_errors
from .partitions import Partition
from .trimming import chooser

__all__ = ["Erasures"]

logger = logging.getLogger("levada.actors.journal")

TRY_EVERY = 60.0
"""Seconds between attempts at an erasure that the disk refuses."""

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


class Erasures:
    """Erases rows. The ledger knows about it from the first step to the last. Its methods belong to the thread that writes."""

    def __init__(
        self,
        directory: Path,
        partitions: Sequence[Partition],
        keys: Sequence[Keys],
        ledger: Ledger,
        guard: Guard,
        note: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._partitions = partitions
        self._keys = keys
        self._ledger = ledger
        self._guard = guard
        self._note = note
        self._monotonic = monotonic
        self._left: list[Erasure] = []
        """Erasures that the disk refused when the journal was opened."""
        self._tried = 0.0

    def begin(self, erasure: Erasure) -> Iterator[int]:
        """Record that rows are to be erased; return an iterator whose steps do it, and yield the number of rows of each."""
        with ledger_errors(self._directory):
            self._ledger.begin_erasure(erasure)
        self._note()
        return self._erase(erasure)

    def finish(self, keyed: Keyed | None) -> None:
        """Go on where a crash came between."""
        for erasure in self._ledger.erasures:
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
            "%s: rows that were to be erased are still there: %s", self._directory, why, extra={"event": "not_erased"}
        )

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of the disk into the journal's."""
        try:
            yield
        except OSError as error:
            raise self._guard.refused(error) from error

    def _erase(self, erasure: Erasure) -> Iterator[int]:
        partition, keys = self._partitions[erasure.partition], self._keys[erasure.partition]
        entity = pa.scalar(erasure.entity)

        def choose(first: int, batch: pa.RecordBatch) -> Sequence[bool]:
            if erasure.column not in batch.schema.names:  # from before there was such a column
                return ()
            same = pc.fill_null(pc.equal(batch.column(erasure.column), entity), fill_value=False).to_pylist()
            return [each and first + place < erasure.before for place, each in enumerate(same)]

        with self.refusals():
            found = [first for first in keys.segments_of(erasure.entity) if first < erasure.before]
        yield from self._rewrite(partition, keys, found, choose)
        self._guard.require_usable()
        with ledger_errors(self._directory):
            self._ledger.end_erasure(erasure)
        self._note()

    def trim(self, number: int, ranges: Sequence[range]) -> Iterator[int]:
        """Return an iterator whose steps take rows out of the segments of a partition, as `begin`; nothing goes on after a crash."""
        partition = self._partitions[number]
        with ledger_errors(self._directory):
            self._ledger.set_trimmed(number, ranges[-1].stop)
        self._note()
        touched = [
            each.first
            for each in partition.segments
            if any(run.start < each.end and run.stop > each.first for run in ranges)
        ]
        return self._rewrite(partition, self._keys[number], touched, chooser(ranges))

    def _rewrite(
        self,
        partition: Partition,
        keys: Keys,
        segments: Sequence[int],
        choose: Callable[[int, pa.RecordBatch], Sequence[bool]],
    ) -> Iterator[int]:
        """Rewrite segments, by their first offsets, without the rows that are chosen; yield the number of rows of each."""
        for first in segments:
            self._guard.require_usable()
            segment = next((each for each in partition.segments if each.first == first), None)
            if segment is None:
                continue
            with self.refusals():
                rows = partition.erase(segment, choose)
                if rows or segment.erased:  # the second: a crash may have come before the index was made
                    keys.rebuild(next(each for each in partition.segments if each.first == first))
            yield rows
