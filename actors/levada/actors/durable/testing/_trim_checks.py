"""The checks of the question that a `levada.actors.journal.TrimmedLog` answers besides."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from typing import Any

from levada.actors.durable.rows import ERASED, SNAPSHOT
from levada.actors.journal import Appended, EraseEntity, Extent, GetExtent, JournalError, Trimmed, TrimRows
from levada.actors.journal.archive import Archive
from levada.framework import Ref
from levada.framework.platform import PLATFORM

from ._log_checks import COLUMNS, Row, append, ask, entity, numbered, row
from ._promises import Maker, promise

_START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_LAYOUT = 7


def _at(second: int) -> dt.datetime:
    return _START + dt.timedelta(seconds=second)


def _log() -> list[Row]:
    """Return rows of four entities: one without a snapshot, one with a snapshot of another layout, and an erased one."""
    draw, rows = random.Random(1), list[Row]()
    newest, name = dict[str, int](), ""
    for offset in range(400):
        if draw.random() < 0.05:  # a store may keep rows that are few between others
            name = draw.choice(["", "anna", "anna", "bert", "carl", "dora"])
        kind = "test.put"
        if name != "carl" and draw.random() < 0.05:
            kind = ERASED if name == "dora" and offset < 300 else SNAPSHOT
        if kind != "test.put":
            newest[name] = offset
        layout = None if kind == ERASED or not name else _LAYOUT + (name == "bert") if kind == SNAPSHOT else 1
        command = f"c{offset}" if name and kind == "test.put" and draw.random() < 0.4 else None
        more = {"command": command, "_body": b"body", "_reply": b"reply"} if command else {}
        rows.append(row(name, offset, time=_at(offset), kind=kind, _version=layout, _snapshot=newest.get(name), **more))
    return rows


def _may_go(rows: Sequence[Row], second: int, remember: int, layout: int | None) -> set[int]:
    found, snapshots, answers = set[int](), dict[str, int](), dict[str, list[int]]()
    for offset, each in enumerate(rows):
        name = each["entity"]
        if each["kind"] == ERASED or (each["kind"] == SNAPSHOT and (not name or layout in (None, each["_version"]))):
            snapshots[name] = offset
        elif each["kind"] == SNAPSHOT:
            snapshots.pop(name, None)
        if each["_body"] is not None:
            answers.setdefault(name, []).append(offset)
    kept = {offset for each in answers.values() for offset in each[max(0, len(each) - remember) :]}
    for offset, each in enumerate(rows[:second]):
        if offset < snapshots.get(each["entity"], 0) and offset not in kept:
            found.add(offset)
    return found


async def _trim(ref: Ref[Any], second: int, remember: int = 5, layout: int | None = _LAYOUT) -> int:
    done: Trimmed = await ask(ref, TrimRows(0, _at(second).timestamp(), remember, layout))
    assert done.partition == 0
    return done.rows


@promise
async def trimmed_rows_are_behind_snapshots_and_have_no_newest_answer(make: Maker) -> None:
    """All others keep their offsets. To trim again is no error."""
    async with make(COLUMNS, 2) as made:
        if not made.trimmed:
            return
        rows = _log()
        await append(made.ref, rows[:150], 0)
        await append(made.ref, rows[150:], 150)
        await append(made.ref, rows[:100], 0, partition=1)
        left = dict(enumerate(rows))
        times = ((0, 5, _LAYOUT), (200, 5, _LAYOUT), (400, 5, _LAYOUT), (400, 5, _LAYOUT), (400, 0, None))
        for number, (second, remember, layout) in enumerate(times):
            way = made.ref if number % 2 else made.other or made.ref
            gone = await _trim(way, second, remember, layout)
            found = await numbered(made.ref)
            assert gone == len(left) - len(found)
            assert left.keys() - found.keys() <= _may_go(rows, second, remember, layout)
            assert found == {offset: rows[offset] for offset in found}
            left = found
        may_go = _may_go(rows, 400, 0, None)
        assert len(may_go - left.keys()) > 0.8 * len(may_go)
        assert await numbered(made.ref, partition=1) == dict(enumerate(rows[:100]))
        for name in ("", "anna", "bert", "carl", "dora"):
            mine = {offset: each for offset, each in left.items() if each["entity"] == name}
            assert await entity(made.ref, name) == mine
            newest = rows[max(mine)]["_snapshot"] or 0
            since = {offset: each for offset, each in enumerate(rows) if each["entity"] == name and offset >= newest}
            assert await entity(made.ref, name, since="_snapshot") == since


@promise
async def rows_are_in_the_archive_before_they_go(make: Maker) -> None:
    """A log without archives refuses. It remembers its archive. An erased entity is in neither."""
    async with make(COLUMNS, 2) as made:
        if not made.trimmed:
            return
        rows = _log()
        await append(made.ref, rows, 0)
        files = PLATFORM.get().files
        with files.temporary_folder() as path:
            folder = str(path)
            try:
                done = await ask(made.ref, TrimRows(0, _at(300).timestamp(), 5, _LAYOUT, folder))
            except JournalError:
                assert await numbered(made.ref) == dict(enumerate(rows))
                return
            archive = Archive.at(folder, files)

            def archived() -> dict[int, Row]:
                pages = archive.rows(0, 0, 300, COLUMNS)
                return {offset: each for first, page in pages for offset, each in enumerate(page.to_pylist(), first)}

            left = await numbered(made.ref)
            assert done.rows == len(rows) - len(left) > 0
            assert archived() == {offset: each for offset, each in enumerate(rows[:300]) if each["entity"]}
            assert left.keys() >= {*range(300, 400)}
            for unnamed in (TrimRows(0, _at(400).timestamp(), 5, _LAYOUT), EraseEntity("anna", 0)):
                try:
                    await ask(made.ref, unnamed)
                except JournalError:
                    assert (await numbered(made.ref)).keys() == left.keys()
                else:
                    raise AssertionError("a log takes rows out, and its archive is not named")
            await ask(made.ref, EraseEntity("anna", 0, archive=folder))
            assert archived() == {
                offset: each for offset, each in enumerate(rows[:300]) if each["entity"] not in ("", "anna")
            }
            assert "anna" not in {each["entity"] for each in (await numbered(made.ref)).values()}


@promise
async def the_extent_says_how_far_rows_were_trimmed(make: Maker) -> None:
    """The oldest row is named truly; appends and the other partition go on, also after a kill."""
    async with make(COLUMNS, 2) as made:
        if not made.trimmed:
            return
        rows = _log()
        await append(made.ref, rows, 0)
        before: Extent = await ask(made.ref, GetExtent())
        assert not any(before.trimmed.values())
        assert await _trim(made.ref, 400) > 0
        if made.restart is not None:
            await made.restart()
        extent: Extent = await ask(made.other or made.ref, GetExtent())
        left = await numbered(made.ref)
        assert extent.first[0] <= min(left)
        assert extent.trimmed[0] > max(set(range(400)) - left.keys())
        assert extent.whole == {0: extent.trimmed[0], 1: 0}
        assert (extent.epoch, dict(extent.end)) == (before.epoch, {0: 400, 1: 0})
        assert await append(made.ref, rows[:1], 400) == Appended(0, 400, 1)
