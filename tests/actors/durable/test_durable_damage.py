"""Damage of the files, as the callers of entities see it: a named error or the whole state, never less in silence."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.memory_journal import MemoryJournal, Row
from tests.actors.durable.test_reminders import Clock, Drop, Plan, Rang, Seen

from levada.actors.durable import EntityErased, ReplayFailed, log_columns, log_config, shards
from levada.actors.journal import Found, Journal, JournalDamaged, JournalError, ReadEntity
from levada.framework import ActorSystem, handles

NAMES = ["anna", "bert", "cleo"]
DEPOSITS = 12
SMALL = attrs.evolve(log_config(1), segment_bytes=8192, block_bytes=2048)
"""For some sealed segments."""
TIMES: dict[str, Any] = {"ask_timeout": 60.0, "shutdown_timeout": 20.0}


async def live_first(folder: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        journal = system.spawn(lambda: Journal(folder, log_columns(EVENTS), config=SMALL))
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, snapshot_every=5)
        for number in range(DEPOSITS):
            for name in NAMES:
                assert await accounts[name].ask(Deposit(1), command=f"deposit-{number}") == number + 1
        accounts.ref.stop()
        await accounts.ref.terminated()


async def live_again(folder: Path) -> list[str]:
    """Return what comes of each entity: its state and its answers are all there, or the class of an error."""
    async with ActorSystem("test", **TIMES) as system:
        try:
            accounts = await shards(system, Account, events=EVENTS, journal=folder, shards=1)
        except JournalError as error:
            return [type(error).__name__]
        found = []
        for name in NAMES:
            account = accounts[name]
            try:
                assert await account.ask(Balance()) == DEPOSITS
                assert await account.ask(Deposit(1), command="deposit-1") == 2
                assert await account.ask(Deposit(1), command="another") == DEPOSITS + 1
            except (JournalError, ReplayFailed) as error:
                found.append(type(error).__name__)
            else:
                found.append("whole")
        return found


REMINDERS = 4


async def ring_first(folder: Path) -> None:
    """Reminders that were handled, that are pending, and that were taken back, and an entity that was erased."""
    async with ActorSystem("test", **TIMES) as system:
        journal = system.spawn(lambda: Journal(folder, log_columns(Rang), config=SMALL))
        clocks = await shards(
            system, Clock, events=Rang, journal=journal, shards=1, snapshot_every=5, clock=lambda: 100.0
        )
        for number in range(REMINDERS):
            for name in [*NAMES, "dora"]:
                await clocks[name].ask(Plan(50.0, f"early {number}", f"early {number}"), command=f"early-{number}")
                await clocks[name].ask(Plan(1e9, f"late {number}", f"late {number}"), command=f"late-{number}")
        for name in NAMES:
            assert await clocks[name].ask(Drop("late 0"))
            while len(await clocks[name].ask(Seen())) < REMINDERS:
                await trio.lowlevel.checkpoint()
        await clocks.erase("dora")
        clocks.ref.stop()
        await clocks.ref.terminated()


async def ring_again(folder: Path) -> list[str]:
    """Return what comes of each entity: each reminder is handled once, or the class of an error."""
    early, late = ([f"{when} {number}" for number in range(REMINDERS)] for when in ("early", "late"))
    async with ActorSystem("test", **TIMES) as system:
        try:
            clocks = await shards(system, Clock, events=Rang, journal=folder, shards=1, clock=lambda: 2e9)
        except JournalError as error:
            return [type(error).__name__]
        found = []
        for name in NAMES:
            try:
                seen: list[str] = []
                with trio.move_on_after(20.0):
                    while len(seen) < 2 * REMINDERS - 1:
                        seen = await clocks[name].ask(Seen())
                        await trio.lowlevel.checkpoint()
                assert sorted(seen) == sorted([*early, *late[1:]])
            except (JournalError, ReplayFailed) as error:
                found.append(type(error).__name__)
            else:
                found.append("whole")
        with pytest.raises((JournalError, EntityErased)):
            await clocks["dora"].ask(Seen())
        return found


LIVES = {"accounts": (live_first, live_again), "clocks": (ring_first, ring_again)}


@attrs.frozen
class Original:
    folder: Path
    again: Callable[[Path], Awaitable[list[str]]]

    def look(self, name: str, octets: bytes | None) -> list[str]:
        """Put other bytes into a file, or remove it, and live again."""
        folder = self.folder.with_name("copy")
        shutil.copytree(self.folder, folder)
        if octets is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(octets)
        try:
            return trio.run(self.again, folder)
        finally:
            shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["accounts", pytest.param("clocks", marks=pytest.mark.release)])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    first, again = LIVES[request.param]
    folder = tmp_path_factory.mktemp("original") / "log"
    trio.run(first, folder)
    assert len(segments(folder)) > 2
    return Original(folder, again)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("partition-0000/*.segment"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_that_is_gone_is_named_or_not_missed(original: Original, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    found = {Path(name).suffix or name: original.look(name, None) for name in files(original.folder)}
    assert found == {
        ".index": ["whole"] * 3, ".segment": ["JournalDamaged"], ".sqlite": ["JournalDamaged"],
        "ends": ["JournalDamaged"], "lock": ["whole"] * 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(0, marks=pytest.mark.ci),
        pytest.param(20, marks=[pytest.mark.release, pytest.mark.timeout(3600)]),
    ],
)
def test_files_that_are_cut_or_flipped_take_nothing_in_silence(
    original: Original, caplog: pytest.LogCaptureFixture, cuts: int
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    seed = int(os.environ.get("LEVADA_SEED", "7"))
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    for name in files(original.folder):
        octets = (original.folder / name).read_bytes()
        if not octets:
            continue
        places = [0, len(octets) - 1, *(chance.randrange(len(octets)) for _ in range(cuts))]
        for place in places:
            cut, rest = octets[:place], octets[place + 1 :]
            flipped = cut + bytes([octets[place] ^ 1 << chance.randrange(8)]) + rest
            for damaged in (cut, flipped, cut + rest[chance.randrange(200) :]):
                try:
                    found.update(original.look(name, damaged))
                except BaseException as error:
                    error.add_note(f"LEVADA_SEED={seed}: {name} at byte {place}")
                    raise
    assert found["JournalDamaged"] > 10
    assert found["whole"] > 10
    assert set(found) <= {"whole", "JournalDamaged", "JournalError", "ReplayFailed"}


class Damaged(MemoryJournal):
    """Cannot read the rows of shards, until it is repaired."""

    repaired: Any = None

    @handles
    def find(self, m: ReadEntity) -> Found | None:
        if m.entity or self.repaired.is_set():
            return super().find(m)
        self.reply_later().fail(JournalDamaged("the block at byte 7 is damaged", path="log"))
        return None


async def test_a_shard_whose_own_rows_are_damaged_refuses_commands_until_they_are_repaired(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem(ask_timeout=1000.0) as system:
        rows: list[list[Row]] = [[]]
        repaired = trio.Event()
        journal = system.spawn(Damaged, log_columns(EVENTS), rows, repaired)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        with pytest.raises(JournalDamaged, match="the block at byte 7 is damaged"):
            await accounts["anna"].ask(Balance())
        with pytest.raises(JournalDamaged):
            await accounts.erase("anna")
        assert (await accounts.statistics()).under_way == 0
        repaired.set()
        await trio.sleep(10.0)
        assert await accounts["anna"].ask(Deposit(1)) == 1
    assert [record.exc_info for record in caplog.records] == [None] * len(caplog.records)
