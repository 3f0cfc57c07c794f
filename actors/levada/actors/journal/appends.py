"""How appends are written: in groups that share one sync, each partition's in the order of the questions.

The appends of a group are judged one after the other, so an append with `Append.at` sees the rows of those before it, and nothing comes
between its comparison and its rows: there is one thread that writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, groupby
from typing import Any

import attrs
import pyarrow as pa

from levada.framework import Reply
from levada.framework.embedding import RateLimitedLog
from levada.framework.errors import ConfigurationError

from .columns import Columns, columns_of
from .config import Keyed
from .errors import CommandReused, JournalError, JournalFull, JournalUnwritable, SchemaMismatch, refused
from .extent import Appended, Fenced
from .ipc import rows_of_stream
from .keys import Taken
from .questions import Append
from .schema import joined
from .store import Store

__all__ = ["Appends", "Told", "ToldRows", "WriteJob"]

logger = logging.getLogger("levada.actors.journal")

Answer = Appended | Fenced | Exception
_COLUMNS = pa.RecordBatch, bytes  # a tuple: to make the union each time costs as much as the rest of an append's part


class Told:
    """Takes the answers to what was told, not asked."""

    wanted = True

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def send(self, value: Any) -> None:
        """Nothing waits for it."""

    def fail(self, why: object) -> None:
        """Log why it was not done."""
        logger.warning("%s: %s", self._directory, why, extra={"event": "clean"})


class ToldRows:
    """Takes the answers to rows that were told, not asked."""

    wanted = True

    def __init__(self) -> None:
        self._log = RateLimitedLog("lost append", logger, logging.ERROR)

    def send(self, value: Any) -> None:
        """Log that the rows were not written, if that is the answer."""
        if isinstance(value, Fenced):
            self.fail(value)

    def fail(self, why: object) -> None:
        """Log why the rows were not written."""
        self._log.line("rows were told, not asked, and are lost: %s", why, event="rows_lost")


@attrs.define(eq=False)  # not frozen: that costs 0.5 µs for each append
class WriteJob:
    """Work for the thread that writes."""

    run: Callable[[], Any] | None
    """None for an append; appends are written in groups."""
    reply: Reply[Any] | Told | ToldRows
    append: Append | None = None
    size: int = 0
    waits: bool = True
    """Whether it waits for room; otherwise it fails."""


@attrs.define(eq=False)
class _Part:
    """Appends to one partition that are written as one batch."""

    number: int
    """The partition."""
    jobs: list[WriteJob]
    batch: pa.RecordBatch | None = None
    """The rows of all jobs that are to be written; None if there are none."""
    counts: list[int] = attrs.field(factory=list)
    """For each job, its number of rows to be written."""
    settled: dict[int, Answer] = attrs.field(factory=dict)
    """For some jobs, by their place, an answer that has nothing written."""

    conditional: bool = False
    """Whether an append compares before it writes."""


class Appends:
    """Turns appends into batches and writes them. Its methods belong to the thread that writes."""

    def __init__(self, store: Store, columns: Columns[Any] | None) -> None:
        self._store = store
        self._columns = columns

    def batch_of(self, rows: Any) -> pa.RecordBatch:
        """Return rows as a batch; `SchemaMismatch` if they are none, or do not fit the journal's class."""
        if isinstance(rows, pa.RecordBatch):
            return rows
        if isinstance(rows, bytes):
            return rows_of_stream(rows)
        if self._columns is not None:
            return self._columns.encode(rows)
        # A journal without a class of its own takes any class whose columns it has.
        if not rows:
            raise SchemaMismatch("an append has one row or more")
        try:
            return columns_of(type(rows[0])).encode(rows)
        except (TypeError, ConfigurationError) as error:
            raise SchemaMismatch(f"rows are a record batch or messages: {error}") from error

    def write(self, jobs: Sequence[WriteJob]) -> tuple[list[tuple[WriteJob, Answer]], Exception | None]:
        """Write a group; return the answers of finished jobs, and the error that stopped the rest."""
        choose = self._store.choose_partition
        placed = [
            (job, m, m.partition if m.partition is not None else choose(m.key)) for job in jobs if (m := job.append)
        ]
        try:
            return self._write([self._encoded(part) for part in _together(placed)]), None
        except JournalUnwritable as error:
            return [(job, error) for job in jobs], error
        except JournalError:
            pass  # the wrong append is found by trying each
        answers: list[tuple[WriteJob, Answer]] = []
        parts: list[_Part] = []
        for each in placed:
            try:
                parts += [self._encoded(part) for part in _together([each])]
            except JournalError as error:
                answers.append((each[0], error))
        try:
            answers += self._write(parts)
        except JournalFull as error:
            return answers, error
        except (JournalError, OSError) as error:
            return answers + [(job, error) for part in parts for job in part.jobs], error
        return answers, None

    def _encoded(self, part: _Part) -> _Part:
        """Put the rows of a part into a batch with the journal's columns, and check it."""
        each = [job.append.rows for job in part.jobs if job.append is not None]
        rows: Any = each[0] if len(each) == 1 else list(chain.from_iterable(each))
        if part.conditional and not isinstance(rows, pa.RecordBatch) and not rows:
            self._store.end(part.number)  # there must be such a partition
            part.counts = [0]
            return part
        _, batch = self._store.prepare(part.number, self.batch_of(rows))
        part.batch = batch
        part.counts = [batch.num_rows] if len(each) == 1 else list(map(len, each))
        return part

    def _write(self, parts: Sequence[_Part]) -> list[tuple[WriteJob, Answer]]:
        keyed = self._store.config.keyed
        if (keyed is not None and keyed.command is not None) or any(part.conditional for part in parts):
            self._judge(parts, keyed)
        answers: list[tuple[WriteJob, Answer]] = []
        written = iter(
            self._store.append_group([(part.number, part.batch) for part in parts if part.batch is not None])
        )
        for part in parts:
            done = next(written, None) if part.batch is not None else Appended(part.number, 0, 0)
            if done is None:
                break  # the rest waits for room: what it was compared with may still change
            number, settled = part.number, part.settled
            places = zip(part.jobs, accumulate(part.counts, initial=done.first), part.counts, strict=False)
            if settled:
                answers += [
                    (job, settled.get(place) or Appended(number, first, count))
                    for place, (job, first, count) in enumerate(places)
                ]
            else:
                answers += [(job, Appended(number, first, count)) for job, first, count in places]
        return answers

    def _judge(self, parts: Sequence[_Part], keyed: Keyed | None) -> None:
        """Settle the appends that may not be written, and take their rows out, and the rows of commands that have been taken."""
        ends: dict[int, int] = {}
        commands = _Commands(self._store, keyed) if keyed is not None and keyed.command is not None else None
        for part in parts:
            end = ends.get(part.number)
            if end is None:
                end = self._store.end(part.number)
            keep: list[tuple[int, int]] = []
            at = 0
            for place, job in enumerate(part.jobs):
                count, wanted = part.counts[place], job.append.at if job.append is not None else None
                fresh, first = [(at, count)], None
                at += count
                if commands is not None and part.batch is not None and count:
                    try:
                        fresh, first = commands.fresh(part.number, part.batch, at - count, count, end)
                    except JournalError as error:
                        part.settled[place], part.counts[place] = error, 0
                        continue
                    except OSError as error:  # of the rows of the command before: only this append cannot be judged
                        part.settled[place], part.counts[place] = refused(error, self._store.directory), 0
                        continue
                kept = sum(rows for _, rows in fresh)
                part.counts[place] = kept
                if first is not None and not kept:
                    part.settled[place] = Appended(part.number, first, 0, count)
                elif wanted is not None and wanted != end:
                    part.settled[place], part.counts[place] = Fenced(part.number, end), 0
                else:
                    if kept < count or not count:
                        part.settled[place] = Appended(part.number, end, kept, count - kept)
                    if commands is not None:
                        commands.take()
                    keep += fresh
                    end += kept
            ends[part.number] = end
            if part.batch is not None and sum(part.counts) < at:
                part.batch = _slices(part.batch, keep)


class _Commands:
    """Tells rows of new commands from rows of those that have been taken, by the journal or earlier in the same group."""

    def __init__(self, store: Store, keyed: Keyed) -> None:
        self._store = store
        self._keyed = keyed
        self._pending: dict[tuple[int, str | bytes], Taken] = {}
        self._new: dict[tuple[int, str | bytes], Taken] = {}

    def fresh(
        self, number: int, batch: pa.RecordBatch, start: int, count: int, end: int
    ) -> tuple[list[tuple[int, int]], int | None]:
        """Return the ranges of some rows of a batch that are to be written, and the offset of the first command that had been taken.

        Args:
            number: the partition.
            batch: with the journal's columns.
            start: place of the first row in it.
            count: of rows.
            end: offset that the first row written gets.

        Raises:
            CommandReused: a command comes again with another body.
            JournalError: the rows of a command do not follow each other.
            OSError: the rows of a command that was taken cannot be read.
        """
        self._new = {}
        fresh: list[tuple[int, int]] = []
        first: int | None = None
        at = start
        seen = set[str | bytes]()
        for command, rows in _runs(batch.column(self._keyed.command or "").slice(start, count).to_pylist()):
            taken = None
            if command is not None:
                if command in seen:
                    raise JournalError(f"the rows of command {command!r} do not follow each other in this append")
                seen.add(command)
                taken = self._pending.get((number, command)) or self._store.taken(number, command)
            if taken is None:
                if command is not None:
                    offset = end + sum(each for _, each in fresh)
                    self._new[number, command] = Taken(offset, batch.slice(at, rows))
                fresh.append((at, rows))
            else:
                place = self._place_of(number, command or "", taken, batch.slice(at, rows))
                first = place if first is None else first
            at += rows
        return fresh, first

    def take(self) -> None:
        """Record that the rows looked at last are written."""
        self._pending.update(self._new)

    def _place_of(self, number: int, command: str | bytes, taken: Taken, rows: pa.RecordBatch) -> int:
        """Return the offset that the first row of a command got when it was taken; `CommandReused` if that had another body.

        If retention has deleted its first rows, the others are compared.
        """
        names = self._keyed.body if self._keyed.body is not None else rows.schema.names
        deleted = max(0, rows.num_rows - taken.rows.num_rows) if taken.is_oldest else 0
        if deleted > taken.first or not taken.rows.select(names).equals(rows.slice(deleted).select(names)):
            raise CommandReused(
                f"command {command!r:.100} was taken before with another body, at offset {taken.first} of partition {number}: give each "
                "command an id of its own",
                path=str(self._store.directory),
                command=command,
                partition=number,
                first=taken.first,
            )
        return taken.first - deleted


def _runs(keys: Sequence[str | bytes | None]) -> Iterator[tuple[str | bytes | None, int]]:
    """Yield each key and how many of it follow each other."""
    for key, same in groupby(keys):
        yield key, sum(1 for _ in same)


def _together(placed: Sequence[tuple[WriteJob, Append, int]]) -> list[_Part]:
    """Join successive messages for one partition: making a column costs 3 µs, for one row or for a hundred."""
    parts: list[_Part] = []
    joinable: dict[int, _Part] = {}
    for job, append, number in placed:
        rows = append.rows
        if isinstance(rows, _COLUMNS) or not rows:
            part = _Part(number, [job])
            parts.append(part)
            joinable.pop(number, None)
        else:
            found = joinable.get(number)
            if found is None:
                part = joinable[number] = _Part(number, [job])
                parts.append(part)
            else:
                part = found
                part.jobs.append(job)
        if append.at is not None:
            part.conditional = True
    return parts


def _slices(batch: pa.RecordBatch, keep: Sequence[tuple[int, int]]) -> pa.RecordBatch | None:
    """Return some ranges of rows, each a place and a count, as one batch; None if they have no rows."""
    wanted = [batch.slice(at, count) for at, count in keep if count]
    return joined(wanted) if wanted else None
