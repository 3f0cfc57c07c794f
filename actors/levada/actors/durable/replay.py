"""Replay: an entity's state from its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute

from levada.actors.journal import ReadEntity
from levada.framework import Ref

from .commits import JOURNAL_TIMEOUT
from .entity import Durable, bind
from .errors import ReplayFailed
from .rows import EventKind, Log
from .turns import Live, Writer

__all__ = ["load"]

pc: Any = pyarrow.compute


class _Misfit(Exception):
    """A row cannot be an event; the text says why."""


async def load(
    cls: Callable[[], Durable[Any]], entity: str, writer: Writer, journal: Ref[Any], shard: int, remember: int
) -> Live:
    """Read an entity's rows and make its actor.

    Raises:
        ReplayFailed: an event cannot be applied.
        JournalError: the rows cannot be read.
        ActorStopped, AskTimeout: the journal is out of reach.
    """
    live = Live(entity, writer)
    actor = cls()
    bind(actor, live)
    start: int | None = 0
    while start is not None:
        found = await journal.ask(ReadEntity(entity, partition=shard, start=start), timeout=JOURNAL_TIMEOUT)
        if found.count:
            _replay(found.batch(), actor, live, writer.log, remember)
        start = found.next
    return live


def _replay(batch: pa.RecordBatch, actor: Durable[Any], live: Live, log: Log, remember: int) -> None:
    kinds = batch.column("kind").to_pylist()
    events = _events(batch, kinds, log, type(actor).__name__, live)
    sequences = batch.column("sequence").to_pylist()
    appliers = actor.appliers
    row = 0
    try:
        for row, event in enumerate(events):
            if event is None:
                continue
            if sequences[row] != live.sequence + 1:
                raise _Misfit(f"its sequence follows {live.sequence}: rows are missing")
            appliers[type(event)](actor, event)
            live.sequence += 1
            live.since += 1
    except Exception as error:
        raise _failed(batch, row, type(actor).__name__, live, error) from error
    _remember(batch, live, remember)


def _events(batch: pa.RecordBatch, kinds: list[str], log: Log, name: str, live: Live) -> list[Any]:
    """Return for each row its event, None for a row that is none."""
    distinct = dict.fromkeys(kinds)
    events: list[Any] = [None] * len(kinds)
    for tag in distinct:
        if tag.startswith("$"):
            continue
        whole = len(distinct) == 1
        places = range(len(kinds)) if whole else [row for row, kind in enumerate(kinds) if kind == tag]
        kind = log.tags.get(tag)
        if kind is None or kind.cls not in live.actor.appliers:
            raise _failed(batch, places[0], name, live, _Misfit("no class of events has this name"))
        rows = batch if whole else batch.take(pa.array(places, pa.int64()))
        versions = rows.column("version")
        if pc.any(pc.not_equal(versions, kind.version)).as_py():
            row = next(
                row for row, version in zip(places, versions.to_pylist(), strict=True) if version != kind.version
            )
            raise _failed(batch, row, name, live, _Misfit(f"it is not of version {kind.version}"))
        try:
            found = kind.events(rows)
        except Exception:  # noqa: BLE001 - the first bad row is found below
            found = _one_by_one(batch, places, kind, name, live)
        if whole:
            return found
        for row, event in zip(places, found, strict=True):
            events[row] = event
    return events


def _one_by_one(batch: pa.RecordBatch, places: Any, kind: EventKind, name: str, live: Live) -> list[Any]:
    found = []
    for row in places:
        try:
            found += kind.events(batch.slice(row, 1))
        except Exception as error:
            raise _failed(batch, row, name, live, error) from error
    return found


def _remember(batch: pa.RecordBatch, live: Live, remember: int) -> None:
    bodies = batch.column("body")
    if bodies.null_count == len(bodies):
        return
    found = live.commands = live.commands or {}
    for command, offset, body in zip(
        batch.column("command").to_pylist(), batch.column("offset").to_pylist(), bodies.to_pylist(), strict=True
    ):
        if body is not None:
            found[command] = (offset, body)
    while len(found) > remember:
        del found[next(iter(found))]


def _failed(batch: pa.RecordBatch, row: int, name: str, live: Live, error: Exception) -> ReplayFailed:
    sequence, kind, offset = (batch.column(column)[row].as_py() for column in ("sequence", "kind", "offset"))
    what = (
        f"{name} {live.entity!r:.100} cannot be replayed: event {sequence}, {kind!r:.300}, at row {offset} of shard {live.writer.number}: "
        f"{error or type(error).__name__}. Its log is unchanged: repair the class and start again"
    )
    return ReplayFailed(what, entity=live.entity, type=name, sequence=sequence, kind=kind, offset=offset)
