"""The log of a durable class, copied to another folder: it goes on there; copies that were cut short; what was erased meanwhile; what is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pa = pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Withdraw  # noqa: E402
from tests.actors.durable.test_reminders import Clock, Plan, Rang, Seen  # noqa: E402
from tests.framework.test_cancellation import Mode, Outcome, everywhere, interrupted  # noqa: E402

from levada.actors.durable import CommandFailed, EntityErased, copy_log, log_columns, log_config, shards, trim_log  # noqa: E402
from levada.actors.journal import (  # noqa: E402
    Appended,
    CopyRows,
    CopyUnfinished,
    Erased,
    EraseEntity,
    Extent,
    Fenced,
    Found,
    GetExtent,
    Journal,
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalUnwritable,
    ReadEntity,
    Store,
    still,
    stream_of,
)
from levada.actors.journal.inspection import inspect  # noqa: E402
from levada.actors.journal.questions import MOST_COPIED  # noqa: E402
from levada.framework import Actor, ActorSystem, Ref, handles  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402
from levada.framework.platform import REAL  # noqa: E402

Row = dict[str, Any]


def rows_of(folder: Path, shards: int = 2) -> dict[tuple[int, int], Row]:
    """The rows of a log by their places."""
    with inspect(folder) as found:
        return {
            (number, first + n): row
            for number in range(shards)
            for first, batch in found.batches(number)
            for n, row in enumerate(batch.to_pylist())
        }


async def fill(folder: Path) -> None:
    async with ActorSystem("fill", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=folder, shards=2, snapshot_every=4)
        for number in range(5):
            for name in ("anna", "bert", "carl", "dora"):
                assert await accounts[name].ask(Deposit(1), command=f"c{number}") == number + 1
        with suppress(CommandFailed):
            await accounts["anna"].ask(Withdraw(100), command="too-much")
        await accounts.erase("carl")
        assert await accounts["anna"].ask(Deposit(2), command="last") == 7


async def copied(source: Any, target: Any, **more: Any) -> Any:
    async with ActorSystem("copy") as system:
        return await copy_log(system, source, target, **more)


async def test_durable_actors_go_on_with_a_copy(tmp_path: Path) -> None:
    """Command ids, snapshots and erasures are the same, and rows have the same offsets."""
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    told: list[tuple[int, int]] = []
    found = await copied(source, target, verify=True, progress=lambda *now: told.append(now))
    rows = rows_of(source)
    assert rows_of(target) == rows
    assert found.rows == len(rows) < sum(found.end.values())
    with inspect(target) as there:
        assert there.rows(0) + there.rows(1) == len(rows)
    assert told[-1] == (sum(found.end.values()),) * 2
    assert (found.target, found.source == found.epoch) == (str(target), False)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=target, shards=2, snapshot_every=4)
        assert [await accounts["bert"].ask(Deposit(1), command=f"c{n}") for n in range(5)] == [1, 2, 3, 4, 5]
        assert await accounts["anna"].ask(Deposit(2), command="last") == 7
        assert await accounts["anna"].ask(Deposit(2), command="new") == 9
        with pytest.raises(EntityErased):
            await accounts["carl"].ask(Balance())
    with pytest.raises(
        ConfigurationError,
        match=r"has rows, and is no unfinished copy of the log \w+; a finished copy is a log of its own",
    ):
        await copied(source, target)


async def test_a_trimmed_log_is_copied(tmp_path: Path) -> None:
    """The copy says as well how far rows are missing, and where they are archived."""
    await fill(tmp_path / "a")
    async with ActorSystem("trim") as system:
        assert await trim_log(system, tmp_path / "a", keep=0, remember=1, archive=tmp_path / "archive") > 0
    await copied(tmp_path / "a", tmp_path / "b", verify=True)
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    with Store.open(tmp_path / "a", None, log_config(2)) as one, Store.open(tmp_path / "b", None, log_config(2)) as two:
        assert one.extent().trimmed == two.extent().trimmed != {}
        assert one.archives == two.archives != {}


async def test_reminders_come_from_a_copy(tmp_path: Path) -> None:
    async with ActorSystem("one", ask_timeout=60.0) as system:
        clocks = await shards(system, Clock, events=Rang, journal=tmp_path / "a", shards=1, clock=lambda: 100.0)
        await clocks["anna"].ask(Plan(200.0, "late"))
    await copied(tmp_path / "a", tmp_path / "b")
    async with ActorSystem("two", ask_timeout=60.0) as system:
        clocks = await shards(system, Clock, events=Rang, journal=tmp_path / "b", shards=1, clock=lambda: 300.0)
        while not await clocks["anna"].ask(Seen()):
            await trio.lowlevel.checkpoint()
        assert await clocks["anna"].ask(Seen()) == ["late"]


class Stop(Exception):
    """Ends a copy, as a kill does."""


def stop_after(pages: int) -> Callable[[int, int], None]:
    left = [pages]

    def progress(*_: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    return progress


def stop_at(end: int) -> Callable[[int, int], None]:
    """Stop when so many offsets have been reached."""

    def progress(done: int, _: int) -> None:
        if done == end:
            raise Stop

    return progress


@pytest.mark.parametrize("pages", [1, 3])
async def test_a_copy_that_was_cut_short_goes_on_where_it_stopped(
    tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is whole it does not open as a log."""
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_after(pages))
    async with ActorSystem("test") as system:
        with pytest.raises(CopyUnfinished, match="run levada journal copy again"):
            await shards(system, Account, events=EVENTS, journal=target, shards=2)
        with pytest.raises(CopyUnfinished, match="the source is a copy of another log, and is not whole"):
            await copy_log(system, target, tmp_path / "third")
    there = len(rows_of(target))
    found = await copied(source, target, verify=True)
    rows = rows_of(source)
    assert rows_of(target) == rows
    assert 0 < there < len(rows) == there + found.rows


@pytest.mark.ci
def test_a_copy_that_is_cancelled_anywhere_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(still, "PAGE_ROWS", 20)
    source = tmp_path / "source"
    trio.run(fill, source)
    rows, held = rows_of(source), set[int]()

    async def main(outcome: Outcome, mode: Mode, place: int) -> None:
        target = tmp_path / f"{mode}-{place}"
        async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
            await interrupted(outcome, mode, place, partial(copy_log, system, source, target))
            assert outcome.struck or rows_of(target) == rows
            found = await copy_log(system, source, target, verify=True)
            held.add(len(rows) - found.rows)
            assert rows_of(target) == rows
            assert system.observe.waits() == []
        assert not (source / "backup").exists()
        shutil.rmtree(target)

    assert everywhere(main) >= 20
    assert {0, len(rows)} < held


async def test_a_full_disk_ends_a_copy_which_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    says = r"target: the disk is full .* make room on it, and copy again: it goes on where it stopped$"
    with monkeypatch.context() as disk, pytest.raises(JournalFull, match=says):
        await copied(source, target, progress=lambda *_: disk.setattr(REAL.files, "pwritev", refuse))
    there = len(rows_of(target))
    found = await copied(source, target, verify=True)
    assert rows_of(target) == rows_of(source)
    assert 0 < there < there + found.rows == len(rows_of(source))


async def test_an_unfinished_copy_of_another_log_is_refused(tmp_path: Path) -> None:
    """Also if it has no rows yet."""
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    with Store.open(target, log_columns(EVENTS), log_config(2), copy_of="0123"):
        pass
    with pytest.raises(
        ConfigurationError,
        match=r"target is an unfinished copy of another log, 0123, and cannot become a copy of the log \w+\. Nothing is",
    ):
        await copied(source, target)


async def test_an_unfinished_copy_of_another_log_is_no_copy_though_it_has_the_same_rows(tmp_path: Path) -> None:
    """It would not open as a log."""
    source, copy, target = tmp_path / "source", tmp_path / "copy", tmp_path / "target"
    await fill(source)
    await copied(source, copy)
    with inspect(source) as found:
        whole = sum(each.end for each in found.partitions)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_at(whole))
    assert rows_of(target) == rows_of(copy)
    with pytest.raises(ConfigurationError, match="target is an unfinished copy of another log"):
        await copied(copy, target)


async def test_what_is_erased_between_two_attempts_is_erased_from_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reminders of the entity, which are in rows of the shard."""
    source, target = tmp_path / "source", tmp_path / "target"

    async def life(*, erases: bool) -> None:
        async with ActorSystem("one", ask_timeout=60.0) as system:
            clocks = await shards(system, Clock, events=Rang, journal=source, shards=1, clock=lambda: 100.0)
            if erases:
                await clocks.erase("anna")
            else:
                for name in ("anna", "bert"):
                    await clocks[name].ask(Plan(1e9, f"of-{name}"))

    def octets() -> bytes:
        return b"".join(path.read_bytes() for path in target.glob("**/*.segment*"))

    await life(erases=False)
    monkeypatch.setattr(still, "PAGE_ROWS", 4)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_after(1))
    assert b"of-anna" in octets()
    await life(erases=True)
    await copied(source, target, verify=True)
    assert rows_of(target, 1) == rows_of(source, 1)
    assert b"of-anna" not in octets()
    assert b"of-bert" in octets()


@pytest.mark.parametrize("cut_short", [False, True])
async def test_an_erasure_that_is_half_done_in_the_source_is_whole_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: bool
) -> None:
    """The log says that the entity is erased, and has its rows still. If the copy is cut short, the erasure is finished before it goes on."""
    source, target = tmp_path / "source", tmp_path / "target"

    async def erase() -> None:
        async with ActorSystem("one", ask_timeout=60.0) as system:
            clocks = await shards(system, Clock, events=Rang, journal=source, shards=1, clock=lambda: 100.0)
            for name in ("anna", "bert"):
                with suppress(EntityErased):
                    await clocks[name].ask(Plan(1e9, f"of-{name}"))
            await clocks.erase("anna")

    def refuse(*_: object, **__: object) -> Any:
        raise JournalUnwritable("not now")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "erase", refuse)
        with pytest.raises(JournalError):
            await erase()
    before = rows_of(source, 1)
    assert [row["kind"] for row in before.values() if row["entity"] == "anna"][-1] == "$erased"
    if cut_short:
        with pytest.raises(Stop):
            await copied(source, target, progress=stop_after(1))
        assert rows_of(target, 1) == before
        with Store.open(source, None, log_config(1)) as store:
            assert sum(store.erase("", partition=0, before=len(before) - 2)) == 4  # the shard's rows, with the reminder
    await copied(source, target, verify=True)
    assert [row["kind"] for row in rows_of(target, 1).values() if row["entity"] == "anna"] == ["$erased"]
    octets = b"".join(path.read_bytes() for path in target.glob("**/*.segment*"))
    assert (b"of-anna" in octets, b"of-bert" in octets) == (False, True)


@pytest.mark.parametrize("pages", [1, 4])
async def test_what_is_trimmed_between_two_attempts_does_not_hold_up_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """The copy may have more of the old rows then, and is compared without them."""
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_after(pages))
    there = rows_of(target)
    async with ActorSystem("trim") as system:
        assert await trim_log(system, source, keep=0, remember=1) > 0
    left = rows_of(source)
    assert there.keys() - left.keys()
    await copied(source, target, verify=True)
    assert rows_of(target) == there | left
    assert (await copied(source, target)).rows == 0  # all rows are there
    async with ActorSystem("trim") as system:
        await trim_log(system, target, keep=0, remember=1)
    assert rows_of(target) == left


async def test_rows_of_a_copy_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still, "PAGE_ROWS", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_after(1))
    with inspect(source) as found:
        epoch, (_, (_, batch), *_) = found.epoch, found.batches(0)
    with Store.open(target, None, log_config(2), copy_of=epoch) as store:
        other = batch.slice(0, 1).add_column(0, "offset", pa.array([1]))
        assert store.copy(CopyRows(other, 1, 0, 2)) == Appended(1, 0, 2)
    with pytest.raises(
        JournalDamaged, match="shard 1: rows of the copy from offset 1 on differ from the source, in the columns"
    ):
        await copied(source, target, verify=True)
    with pytest.raises(CopyUnfinished), Store.open(target, None, log_config(2)):
        pass


async def test_mistakes_leave_everything_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    await fill(source)
    other = shutil.copytree(source, tmp_path / "other")
    Store.open(tmp_path / "mailbox").close()
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").touch()
    (tmp_path / "link").symlink_to(source)
    mistakes: list[tuple[Any, Any, str]] = [
        (source, source, "the source and the target are the same log"),
        (source, tmp_path / "link", "link is inside .*source: name a folder elsewhere"),
        (source, source / "copy", "copy is inside .*source: name a folder elsewhere"),
        (
            source,
            project,
            "project is not empty, and no log. Nothing is written into it: name a new folder, or an empty one",
        ),
        (source, other, "has rows, and is no unfinished copy of the log"),
        (tmp_path / "nowhere", tmp_path / "new", "nowhere is not a log: name a folder that has a ledger.sqlite"),
        (tmp_path / "mailbox", tmp_path / "new", "this journal is not the log of a durable class"),
        (source, "", "the name of a folder is empty"),
        (source, "http://host/a", "this is a URL, and wanted is the path of a folder"),
        (source, "postgresql://secret:word@host/a", "'' is no name for the table of a log"),
    ]
    for one, two, text in mistakes:
        with pytest.raises(ConfigurationError, match=text) as caught:
            await copied(one, two)
        assert "word" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    assert not (source / "copy").exists()
    assert [path.name for path in project.iterdir()] == ["main.py"]
    (project / "main.py").rename(project / "lock")  # as a start leaves it that is killed at once
    await copied(source, project)
    assert rows_of(project) == rows_of(source)
    assert rows_of(other) == rows_of(source)


async def test_a_source_that_lost_rows_since_is_refused(tmp_path: Path) -> None:
    source, older, target = tmp_path / "source", tmp_path / "older", tmp_path / "target"
    await fill(source)
    shutil.copytree(source, older)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=source, shards=2)
        for name in ("anna", "bert", "dora"):
            await accounts[name].ask(Deposit(1))
    with inspect(source) as found:
        whole = sum(each.end for each in found.partitions)
    with pytest.raises(Stop):
        await copied(source, target, progress=stop_at(whole))
    shutil.rmtree(source)
    older.rename(source)
    with pytest.raises(ConfigurationError, match=r"the copy has rows of shard \d up to \d+, and the source only up to"):
        await copied(source, target)


async def test_a_copy_goes_into_any_log_that_answers(tmp_path: Path) -> None:
    """A ref of the caller's. Rows that the source does not have are noticed."""
    source = tmp_path / "source"
    await fill(source)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        log: Any = system.spawn(lambda: Journal(tmp_path / "target", log_columns(EVENTS), config=log_config(2)))
        with pytest.raises(ConfigurationError, match="verify= needs a folder or a database as target"):
            await copy_log(system, source, log, verify=True)
        found = await copy_log(system, source, log)
        assert found.rows == len(rows_of(source))
        with inspect(source) as there:
            row = next(there.batches(0))[1].slice(0, 1)
        end = found.end[0]
        await log.ask(CopyRows(stream_of(row.add_column(0, "offset", pa.array([end]))), 0, end, end + 1))
        with pytest.raises(ConfigurationError, match="the copy has rows of shard 0 up to"):
            await copy_log(system, source, log)
    assert {place: each for place, each in rows_of(tmp_path / "target").items() if place != (0, end)} == rows_of(source)


class Between(Actor[CopyRows | EraseEntity | GetExtent | ReadEntity]):
    """Passes questions on to a log. Of a page, either the answer is lost on the way and it is asked again, or rows of another program come first."""

    def __init__(self, log: Ref[Any], asked: list[Any], first: str = "") -> None:
        self.log, self.asked, self.first = log, asked, first

    @handles
    async def copy(self, m: CopyRows) -> Appended | Fenced:
        if self.first == "the same rows":
            await self.log.ask(m)
        elif self.first == "other rows":
            await self.log.ask(CopyRows(b"", m.partition, m.at, m.at + 1))
        return await self.log.ask(m)

    @handles
    async def tell_extent(self, m: GetExtent) -> Extent:
        return await self.log.ask(m)

    @handles
    async def read(self, m: ReadEntity) -> Found:
        self.asked.append(m)
        return await self.log.ask(m)

    @handles
    async def erase(self, m: EraseEntity) -> Erased:
        self.asked.append(m)
        return await self.log.ask(m)


async def test_a_page_whose_answer_was_lost_is_written_and_rows_of_another_program_are_noticed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    await fill(source)
    rows, asked = rows_of(source), list[Any]()
    async with ActorSystem("test", ask_timeout=60.0) as system:
        journals = [partial(Journal, tmp_path / name, log_columns(EVENTS), config=log_config(2)) for name in "ab"]
        one, two = (system.spawn(journal) for journal in journals)
        assert (await copy_log(system, source, system.spawn(Between, one, asked, "the same rows"))).rows == len(rows)
        with pytest.raises(JournalError, match="shard 0 of the copy ends at 1, wanted 0: another program writes to it"):
            await copy_log(system, source, system.spawn(Between, two, asked, "other rows"))
    assert rows_of(tmp_path / "a") == rows
    # The rows of carl are gone from the source, so there is nothing to erase, which costs as much as an erasure.
    assert {type(each) for each in asked} == {ReadEntity}


async def test_gaps_of_any_width_are_copied(tmp_path: Path) -> None:
    """A log that was trimmed begins late. The gaps here are as wide as a page may be, or about so."""
    source, target, other = tmp_path / "source", tmp_path / "target", tmp_path / "other"
    await fill(other)
    with inspect(other) as found:
        row = next(found.batches(0))[1].slice(0, 1)
    gaps = [0, MOST_COPIED, MOST_COPIED - 1, MOST_COPIED + 1, 0, 3 * MOST_COPIED, MOST_COPIED - 1]
    places, end = list[int](), 0
    with Store.open(source, log_columns(EVENTS), log_config(1)) as store:
        for gap in gaps:
            if gap:
                store.copy(CopyRows(b"", 0, end, end + gap))
            place = end + gap
            places.append(place)
            end = place + 1
            store.copy(CopyRows(row.add_column(0, "offset", pa.array([place])), 0, place, end))
    told = list[int]()
    found = await copied(source, target, verify=True, progress=lambda done, _: told.append(done))
    assert list(rows_of(target, 1)) == [(0, place) for place in places]
    assert (found.rows, found.end) == (len(places), {0: end})
    # A gap is a step of its own unless the row behind it fits into a page with it.
    _, b, c, d, e, f, _ = places
    assert told == [1, b, b + 1, c + 1, d, e + 1, f, f + 1, end]


@pytest.mark.ci
async def test_a_log_is_copied_while_its_program_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    async with ActorSystem("test", ask_timeout=60.0) as system, trio.open_nursery() as nursery:
        accounts = await shards(system, Account, events=EVENTS, journal=source, shards=2)
        answers: list[int] = []

        async def deposit() -> None:
            while True:
                answers.append(await accounts["anna"].ask(Deposit(1)))

        nursery.start_soon(deposit)
        while len(answers) < 5:
            await trio.lowlevel.checkpoint()
        before = len(answers)
        await copy_log(system, source, target, verify=True)
        after = len(answers)
        nursery.cancel_scope.cancel()
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=target, shards=2)
        assert before <= await accounts["anna"].ask(Balance()) <= after + 1
