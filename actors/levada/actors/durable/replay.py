"""Replay: an entity's state from its rows.

The newest row of an entity says where its newest snapshot is. Reading begins there, or at the first row if there is none or it does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pyarrow as pa
import pyarrow.compute

from levada.actors.journal import Found, ReadEntity
from levada.framework import Ref

from .commits import JOURNAL_TIMEOUT
from .entity import Durable, bind
from .errors import EntityErased, ReplayFailed
from .rows import BOOKKEEPING, ERASED, SNAPSHOT, Log
from .snapshots import Snapshots
from .turns import Live, Writer

__all__ = ["load", "newest_snapshot", "rows_from"]

logger = logging.getLogger("levada.actors.durable")
pc: Any = pyarrow.compute


class _Misfit(Exception):
    """A row cannot be an event; the text says why."""


async def newest_snapshot(journal: Ref[Any], entity: str, shard: int) -> tuple[pa.RecordBatch | None, int | None]:
    """Return the newest row of an entity, None if it has none, and the offset of its newest snapshot."""
    found = await journal.ask(ReadEntity(entity, partition=shard, newest=1), timeout=JOURNAL_TIMEOUT)
    if not found.count:
        return None, None
    batch = _batch_of(found)
    is_one = batch.column("kind")[0].as_py() == SNAPSHOT
    snapshot: int | None = batch.column("_offset" if is_one else "_snapshot")[0].as_py()
    return batch, snapshot


async def rows_from(journal: Ref[Any], entity: str, shard: int, start: int) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the rows of an entity, with their offsets, from some offset on."""
    at: int | None = start
    while at is not None:
        found = await journal.ask(ReadEntity(entity, partition=shard, start=at), timeout=JOURNAL_TIMEOUT)
        if found.count:
            yield _batch_of(found)
        at = found.next


def _batch_of(found: Found) -> pa.RecordBatch:
    """Return rows that were found, with their offsets in the column ``_offset``: an event may have a field of the name ``offset``."""
    batch = found.batch()
    return batch.rename_columns(["_offset", *batch.schema.names[1:]])


async def load(
    cls: type[Durable[Any]], entity: str, writer: Writer, journal: Ref[Any], snapshots: Snapshots, remember: int
) -> Live:
    """Read an entity's rows and make its actor.

    Raises:
        ReplayFailed: an event cannot be applied.
        EntityErased: it was erased.
        JournalError: the rows cannot be read.
        ActorStopped, AskTimeout: the journal is out of reach.
    """
    shard = writer.number
    newest, snapshot = await newest_snapshot(journal, entity, shard)
    live = Live(entity, writer)
    bind(cls(), live)
    if newest is None:
        return live
    if newest.column("kind")[0].as_py() == ERASED:
        raise EntityErased(f"{cls.__name__} {entity!r:.100} was erased, and takes no commands", entity=entity)
    live.snapshot = snapshot
    replay = _Replay(live, writer.log, snapshots, remember)
    if newest.column("_offset")[0].as_py() == (0 if snapshot is None else snapshot):
        if replay.begin(newest, snapshot):
            return live
    else:
        async with aclosing(rows_from(journal, entity, shard, snapshot or 0)) as batches:
            fits = True
            async for batch in batches:
                fits = fits and replay.begin(batch, snapshot)
                if not fits:
                    break
                snapshot = None
            if fits:
                return live
    logger.warning(
        "%s %r: its snapshot does not fit the class, so it is replayed from its first event",
        cls.__name__,
        entity,
        extra={"event": "snapshot"},
    )
    snapshot, live = live.snapshot, Live(entity, writer)
    bind(cls(), live)
    live.snapshot = snapshot
    replay = _Replay(live, writer.log, snapshots, remember)
    async with aclosing(rows_from(journal, entity, shard, 0)) as batches:
        async for batch in batches:
            replay.apply(batch)
    return live


class _Replay:
    """One replay of one entity."""

    def __init__(self, live: Live, log: Log, snapshots: Snapshots, remember: int) -> None:
        self._live = live
        self._actor = live.actor
        self._name = type(live.actor).__name__
        self._log = log
        self._snapshots = snapshots
        self._remember = remember

    def begin(self, batch: pa.RecordBatch, snapshot: int | None) -> bool:
        """Apply rows whose first is the snapshot at this offset, if one is given; False if it does not fit."""
        if snapshot is not None:
            if batch.column("kind")[0].as_py() != SNAPSHOT:
                return False
            if not self._snapshots.restore(batch.column("_data")[0].as_py(), self._actor, self._live):
                return False
            self._live.sequence = batch.column("sequence")[0].as_py()
        self.apply(batch)
        return True

    def apply(self, batch: pa.RecordBatch) -> None:
        """Apply rows."""
        live, actor = self._live, self._actor
        sequences = batch.column("sequence").to_pylist()
        appliers = actor.appliers
        row = 0
        try:
            for row, event in enumerate(self._events(batch)):
                if event is not None:
                    if sequences[row] != live.sequence + 1:
                        raise _Misfit(f"it follows event {live.sequence}: rows are missing")
                    appliers[type(event)](actor, event)
                    live.sequence += 1
        except ReplayFailed:
            raise
        except Exception as error:
            raise self._failed(batch, row, error) from error
        live.since += batch.num_rows
        self._note_commands(batch)

    def _events(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """Return for each row its event, None for a row that is none."""
        kinds = batch.column("kind").to_pylist()
        distinct = dict.fromkeys(kinds)
        events: list[Any] = [None] * len(kinds)
        for tag in distinct:
            if tag.startswith("$"):
                continue
            places = range(len(kinds)) if len(distinct) == 1 else [row for row, each in enumerate(kinds) if each == tag]
            for row, event in zip(places, self._events_of(batch, tag, places), strict=True):
                events[row] = event
        return events

    def _events_of(self, batch: pa.RecordBatch, tag: str, places: Sequence[int]) -> list[Any]:
        kind = self._log.tags.get(tag)
        rows = batch if len(places) == batch.num_rows else batch.take(pa.array(places, pa.int64()))
        if kind is not None and pc.all(pc.equal(rows.column("_version"), kind.version)).as_py():
            try:
                return kind.events(rows)
            except Exception:  # noqa: BLE001 - the first bad row is found below
                pass
        found = []
        for row in places:
            try:
                found.append(self._event(batch.slice(row, 1), tag))
            except Exception as error:
                raise self._failed(batch, row, error) from error
        return found

    def _event(self, row: pa.RecordBatch, tag: str) -> Any:
        """Turn one row into an event, by upcasters if it is old."""
        kind, version = self._log.tags.get(tag), row.column("_version")[0].as_py()
        columns: dict[str, Any] | None = None
        while kind is None or version != kind.version:
            upcast = self._actor.upcasters.get((tag, version))
            if upcast is None:
                known = (
                    f"shards() knows version {kind.version}"
                    if kind is not None
                    else "shards(events=…) does not name it"
                )
                raise _Misfit(f"it has version {version}, {known}, and no method upcasts it")
            if columns is None:
                columns = {name: value for name, value in row.to_pylist()[0].items() if name not in _HEAD}
            event = upcast(columns)
            if type(event) in self._log.kinds:
                return event
            columns = dict(event)
            version += 1
        if columns is None:
            [event] = kind.events(row)
        else:
            [event] = kind.events(kind.batch(columns))
        return event

    def _note_commands(self, batch: pa.RecordBatch) -> None:
        bodies = batch.column("_body")
        if bodies.null_count == len(bodies):
            return
        found = self._live.commands = self._live.commands or {}
        for command, offset, body in zip(
            batch.column("command").to_pylist(), batch.column("_offset").to_pylist(), bodies.to_pylist(), strict=True
        ):
            if body is not None:
                found[command] = (offset, body)
                if len(found) > self._remember:
                    del found[next(iter(found))]

    def _failed(self, batch: pa.RecordBatch, row: int, error: Exception) -> ReplayFailed:
        sequence, kind, offset = (batch.column(column)[row].as_py() for column in ("sequence", "kind", "_offset"))
        live = self._live
        why = str(error) if isinstance(error, _Misfit) else repr(error)
        what = (
            f"{self._name} {live.entity!r:.100} cannot be replayed: event {sequence}, {kind!r:.300}, at row {offset} of shard "
            f"{live.writer.number}: {why}. Its log is unchanged: repair the class and start again"
        )
        return ReplayFailed(what, entity=live.entity, type=self._name, sequence=sequence, kind=kind, offset=offset)


_HEAD = frozenset([*BOOKKEEPING.names, "_offset"])
