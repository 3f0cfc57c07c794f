"""Batches of Spark on their way into a journal: staged rows, and the delivery of a batch. Both run in the thread that writes.

A number alone does not say which batch it is. A checkpoint of Spark that went back (restored from a copy, or without its newest files) plans a
number again with other rows, and a job may be given an id that was used before. So a known batch is compared. The same messages in the same
order have the same digest, which costs 0.5 ns for each byte of a delivery. Else the rows themselves decide: a shuffle may hand them to other
tasks, or in another order, each time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from .blocks import Message
from .errors import BatchReused, JournalBehind, JournalError, OffsetGone
from .ledger import Delivered, LedgerLine
from .questions import Deliver, StageRows
from .staging import Stage
from .store import Store

__all__ = ["deliver", "stage_rows"]

logger = logging.getLogger("levada.actors.journal")


def stage_rows(store: Store, m: StageRows, batch: pa.RecordBatch) -> int:
    """Answer `StageRows`, whose rows are this batch."""
    stage = store.staged(m.query, m.batch).get((m.part, m.attempt))
    there = stage.rows if stage is not None else 0
    at = there if m.at is None else m.at
    end: int = at + batch.num_rows
    if there == at:
        (stage or store.stage(m.query, m.batch, m.part, m.attempt)).append(batch)
    elif there < end:
        raise JournalError(
            f"{there} rows of part {m.part} of batch {m.batch} of {m.query} are staged, where rows {at} to {end} were to come",
            path=str(store.directory),
        )
    return end  # of rows that were sent again, too


def deliver(store: Store, m: Deliver) -> Delivered:
    """Answer `Deliver`."""
    stages, attempts = store.staged(m.query, m.batch), _attempts(m)
    line = store.line(m.query, m.batch)
    try:
        if line is not None:
            _require_same(store, m, stages, line, attempts)
        elif store.delivered(m.query, m.batch) is not None:
            raise _reused(store, m, "was delivered so long ago that its rows are not known any more")
        else:
            _require_staged(store, m, stages)
            _require_batch_before(store, m)
    except (BatchReused, JournalBehind) as error:
        if not m.accept_loss:
            raise
        logger.warning("this was accepted: %s", error, extra={"event": "batch_accepted"})
    partitions = store.config.partitions
    parts = ((part % partitions, message) for part, message in _messages(m, stages))
    done = store.deliver(m.query, m.batch, parts, attempts=attempts)
    try:
        store.unstage(m.query, m.batch)
    except JournalError as error:
        # It is delivered all the same. What is left goes at the next opening, when the batch comes again, or with its age (`DiscardOlder`).
        logger.warning(
            "%s; it has been delivered, and its staged rows stay for now", error, extra={"event": "not_unstaged"}
        )
    return done


def _attempts(m: Deliver) -> str:
    return hashlib.blake2b(repr(sorted(m.winners.items())).encode(), digest_size=8).hexdigest()


def _messages(m: Deliver, stages: Mapping[tuple[int, int], Stage]) -> Iterator[tuple[int, Message]]:
    """Yield the winners' rows, each message with its part."""
    for part, attempt in sorted(m.winners.items()):
        for message in stages[part, attempt].messages():
            yield part, message


def _require_staged(store: Store, m: Deliver, stages: Mapping[tuple[int, int], Stage]) -> None:
    for part, attempt in m.winners.items():
        stage = stages.get((part, attempt))
        there = stage.rows if stage is not None else 0
        if stage is None or there != m.rows.get(part, there):
            wanted = f"{m.rows[part]} " if part in m.rows else ""
            raise JournalError(
                f"batch {m.batch} of {m.query}: the {wanted}rows of part {part} are not staged, there are {there}: they were given up "
                "meanwhile, or lost by a power failure",
                path=str(store.directory),
            )


def _require_batch_before(store: Store, m: Deliver) -> None:
    newest = store.newest_batch(m.query)
    if m.after is None or (newest is not None and newest >= m.after):
        return
    found = "none of its batches is" if newest is None else f"its batches {newest + 1} to {m.after} are not"
    raise JournalBehind(
        f"batch {m.batch} of {m.query} comes after batch {m.after}, and {found} in this journal: it is an older copy, or another one",
        path=str(store.directory),
        wanted=m.after,
        kept=-1 if newest is None else newest,
    )


def _require_same(
    store: Store, m: Deliver, stages: Mapping[tuple[int, int], Stage], line: LedgerLine, attempts: str
) -> None:
    if line.attempts == attempts and not any(winner in stages for winner in m.winners.items()):
        return  # the same question once more: its stages were deleted before the answer
    _require_staged(store, m, stages)
    rows = sum(stages[winner].rows for winner in m.winners.items())
    if rows != line.rows:
        raise _reused(store, m, f"was delivered with {line.rows} rows before, and has {rows} rows now")
    digest = 0
    for _, message in _messages(m, stages):
        digest = message.digest(digest)
    if digest == line.digest:
        return
    delivered = _delivered_rows(store, line)
    if delivered is None:
        raise _reused(
            store,
            m,
            f"was delivered with {rows} rows before, which were not staged like this, and are not all there to be compared",
        )
    staged = (pa.ipc.read_record_batch(message.data, store.schema) for _, message in _messages(m, stages))
    if _sum_of(staged) != delivered:
        raise _reused(store, m, f"was delivered with {rows} rows before, and has {rows} other rows now")


def _reused(store: Store, m: Deliver, what: str) -> BatchReused:
    return BatchReused(f"batch {m.batch} of {m.query} {what}", path=str(store.directory), query=m.query, batch=m.batch)


def _delivered_rows(store: Store, line: LedgerLine) -> int | None:
    """Return the `_sum_of` the rows of a batch; None if retention or an erasure has deleted some."""
    total = rows = 0
    try:
        for number, (first, end) in line.ranges.items():
            for _, batch in store.batches(number, first, end):
                total += _sum_of([batch])
                rows += batch.num_rows
    except OffsetGone:
        return None
    return total if rows == line.rows else None


def _sum_of(batches: Iterable[pa.RecordBatch]) -> int:
    """Return a sum over rows that depends on their values, and not on their order. It means something in this process only.

    It takes 1 µs a row and more: this is for the rare batch that comes again, cut in another way.
    """
    return sum(hash(repr(row)) for batch in batches for row in zip(*map(_values, batch.columns), strict=True))


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        column = column.view(pa.int64())  # Python has no nanoseconds
    found: list[Any] = column.to_pylist()
    return found
