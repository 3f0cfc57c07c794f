"""Trimming: rows behind snapshots go, and no durable actor misses them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited
from tests.actors.durable.test_reminders import Clock, Plan, Rang, Seen, World, world

from levada.actors.durable import EntityErased, ReplayFailed, Shards, applies, shards
from levada.actors.durable.snapshots import Snapshots
from levada.actors.journal import Extent, GetExtent, ReadRows, Rows, TrimRows
from levada.framework import ActorSystem, Ref, handles
from levada.framework.errors import ConfigurationError

__all__ = ["world"]  # a fixture

ALL = 1e12
"""Later than any row."""


@asynccontextmanager
async def accounts_in(folder: Path, cls: Any = Account, **settings: Any) -> AsyncIterator[Shards[Any]]:
    async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
        settings = {"shards": 1, "snapshot_every": 5, "remember": 3, "name": "Account", **settings}
        yield await shards(system, cls, events=EVENTS, journal=folder, **settings)


async def trim(accounts: Shards[Any], older: float = ALL, remember: int = 3, layout: int | None = None) -> int:
    assert accounts.journal is not None
    return (await accounts.journal.ask(TrimRows(0, older, remember, layout))).rows


async def kinds_in(log: Ref[Any] | None) -> dict[int, tuple[str, int, str]]:
    """The entity, the sequence and the kind of each row that is left, by its offset."""
    assert log is not None
    found: dict[int, tuple[str, int, str]] = {}
    at = 0
    while (rows := await log.ask(ReadRows(0, at))).count:
        assert isinstance(rows, Rows)
        columns = (rows.batch().column(name).to_pylist() for name in ("entity", "sequence", "kind"))
        found |= dict(enumerate(zip(*columns, strict=True), rows.first))
        at = rows.end
    return found


async def test_rows_behind_snapshots_go_and_the_others_stay(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        for number in range(12):
            await accounts["anna"].ask(Deposit(1))
            if number % 4 == 0:
                await accounts["bert"].ask(Deposit(1))  # 3 events, and no snapshot
        before = await kinds_in(accounts.journal)
        gone = await trim(accounts)
        left = await kinds_in(accounts.journal)
        snapshots = [offset for offset, (name, _, kind) in before.items() if (name, kind) == ("anna", "$snapshot")]
        assert left == {offset: row for offset, row in before.items() if row[0] != "anna" or offset >= snapshots[-1]}
        assert gone == len(before) - len(left) == 11
        assert [row[1] for row in left.values() if row[0] == "bert"] == [1, 2, 3]
        assert await trim(accounts) == 0
        extent: Extent = await accounts.journal.ask(GetExtent())  # type: ignore[union-attr]
        assert extent.trimmed[0] == max(set(before) - set(left)) + 1
        assert await accounts["anna"].ask(Deposit(1)) == 13
    async with accounts_in(tmp_path) as accounts:
        assert await accounts["anna"].ask(Balance()) == 13
        assert await accounts["bert"].ask(Balance()) == 3
        extent = await accounts.journal.ask(GetExtent())  # type: ignore[union-attr]
        assert extent.whole[0] == extent.trimmed[0] > 0


async def test_remembered_commands_get_their_recorded_answers(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        for number in range(10):
            await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
            await accounts["bert"].ask(Deposit(2), command=f"bert {number}")
        assert await trim(accounts) > 0
        for number in (7, 8, 9):
            assert await accounts["anna"].ask(Deposit(1), command=f"anna {number}") == number + 1
    async with accounts_in(tmp_path) as accounts:
        for number in (7, 8, 9):
            assert await accounts["anna"].ask(Deposit(1), command=f"anna {number}") == number + 1
            assert await accounts["bert"].ask(Deposit(2), command=f"bert {number}") == 2 * number + 2
        assert await accounts["anna"].ask(Deposit(1), command="anna 10") == 11


async def test_a_snapshot_with_more_commands_than_are_remembered_now(tmp_path: Path) -> None:
    async with accounts_in(tmp_path, remember=100) as accounts:
        for number in range(5):
            await accounts["anna"].ask(Deposit(1), command=f"anna {number}")
    async with accounts_in(tmp_path, remember=1) as accounts:
        assert await trim(accounts, remember=1) == 4
        assert await accounts["anna"].ask(Deposit(1), command="anna 4") == 5
        assert await accounts["anna"].ask(Deposit(1), command="anna 3") == 6  # it is forgotten


async def test_only_rows_from_before_a_time_go(tmp_path: Path) -> None:
    now = [1000.0]
    async with accounts_in(tmp_path, clock=lambda: now[0]) as accounts:
        for number in range(11):
            now[0] = 1000.0 + number
            await accounts["anna"].ask(Deposit(1))
        assert await trim(accounts, 1000.0) == 0
        assert await trim(accounts, 1004.0) == 4
        assert sorted(
            row[1] for row in (await kinds_in(accounts.journal)).values() if row[2] == "test.durable.deposited"
        ) == [*range(5, 12)]


async def test_reminders_stay_and_come(tmp_path: Path, world: World) -> None:
    async def clocks_in(system: ActorSystem) -> Shards[Any]:
        return await shards(system, Clock, events=Rang, journal=tmp_path, shards=1, clock=world, snapshot_every=3)

    async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
        clocks = await clocks_in(system)
        for number in range(8):
            await clocks["anna"].ask(Plan(2000.0, f"old {number}", "key"))
        await clocks["bert"].ask(Plan(2000.0, "of bert"))
        assert await trim(clocks, remember=256) > 0
    async with ActorSystem("test", ask_timeout=1e6, shutdown_timeout=1e6) as system:
        clocks = await clocks_in(system)
        world.jump(1500.0)
        for name, text in (("anna", "old 7"), ("bert", "of bert")):
            while not (found := await clocks[name].ask(Seen())):
                await trio.lowlevel.checkpoint()
            assert found == [text]


async def test_what_was_erased_stays_erased(tmp_path: Path) -> None:
    async with accounts_in(tmp_path) as accounts:
        for _ in range(3):
            await accounts["anna"].ask(Deposit(1))
        await accounts.erase("anna")
        await trim(accounts)
    async with accounts_in(tmp_path) as accounts:
        with pytest.raises(EntityErased):
            await accounts["anna"].ask(Balance())


class Other(Account):
    """The class with another field."""

    name = "Account"
    deposits: int = 0

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount
        self.deposits += 1

    @handles
    def look(self, _: Balance) -> int:
        return self.deposits


async def test_a_class_with_other_fields_keeps_the_rows_that_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with accounts_in(tmp_path) as accounts:
        for _ in range(6):
            await accounts["anna"].ask(Deposit(3))
            await accounts["bert"].ask(Deposit(3))
    layout = Snapshots(Other).layout
    async with accounts_in(tmp_path, Other) as accounts:
        assert await trim(accounts, layout=layout) == 0
        for _ in range(5):
            await accounts["anna"].ask(Deposit(3))  # it gets a snapshot with the new field
        rows = await trim(accounts, layout=layout)
        left = {name for name, *_ in (await kinds_in(accounts.journal)).values()}
        assert rows == 8  # seven events, and the snapshot of the old class
        assert left == {"", "anna", "bert"}
    async with accounts_in(tmp_path, Other) as accounts:
        assert await accounts["anna"].ask(Balance()) == 11
        assert await accounts["bert"].ask(Balance()) == 6


async def test_shards_trim_their_log_again_and_again(tmp_path: Path, world: World) -> None:
    async with accounts_in(tmp_path, clock=world, keep=100.0) as accounts:
        for _ in range(2):
            for _ in range(6):
                await accounts["anna"].ask(Deposit(1))
            rows = await kinds_in(accounts.journal)
            while (await kinds_in(accounts.journal)).keys() >= rows.keys():
                world.jump(50.0)
                await trio.testing.wait_all_tasks_blocked()
        assert await accounts["anna"].ask(Balance()) == 12


@pytest.mark.parametrize("keep", [-1, "1 day", float("nan")])
async def test_how_long_rows_are_kept_is_a_time(tmp_path: Path, keep: Any) -> None:
    async with ActorSystem("test") as system:
        with pytest.raises(ConfigurationError, match="wanted seconds, 0 or more"):
            await shards(system, Account, events=EVENTS, journal=tmp_path, keep=keep)


@pytest.mark.parametrize("deposits", [5, 7])
async def test_a_class_that_cannot_do_without_trimmed_rows_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deposits: int
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with accounts_in(tmp_path) as accounts:
        for _ in range(deposits):
            await accounts["anna"].ask(Deposit(3))
        assert await trim(accounts) == 5
    async with accounts_in(tmp_path, Other) as accounts:
        with pytest.raises(ReplayFailed, match="were trimmed, and its snapshot does not fit the class"):
            await accounts["anna"].ask(Balance())
    async with accounts_in(tmp_path) as accounts:
        assert await accounts["anna"].ask(Balance()) == 3 * deposits
