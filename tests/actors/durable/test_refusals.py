"""A journal that cannot be opened or written: callers get its own error at once, and its way back is found."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited
from tests.actors.durable.memory_journal import MemoryJournal, Row, no_rows
from tests.actors.durable.test_placement import APP, placed
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import (
    Durable,
    EntityErased,
    OutcomeUnknown,
    Shards,
    applies,
    log_columns,
    log_config,
    shard,
    shards,
)
from levada.actors.journal import (
    Append,
    Appended,
    EraseEntity,
    Fenced,
    Found,
    GetExtent,
    Journal,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    ReadEntity,
    Store,
)
from levada.actors.nodes import nodes_of
from levada.framework import ActorSystem, Asks, Ref, handles, message
from levada.framework.errors import ActorError
from levada.framework.platform import REAL
from levada.framework.router import group
from levada.framework.testing import Probe

TIMES: dict[str, Any] = {"ask_timeout": 30.0, "shutdown_timeout": 20.0}

pytestmark = pytest.mark.usefixtures("only_what_callers_see")


class Disk:
    """Refuses to write, with an error number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = 0
        self._write = os.pwritev
        monkeypatch.setattr(REAL.files, "pwritev", self)

    def __call__(self, *args: Any) -> int:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        return self._write(*args)


async def ask_until_it_works(accounts: Shards[Any], number: int, refusal: type[Exception]) -> int:
    while True:
        try:
            answer: int = await accounts["anna"].ask(Deposit(1), command=f"c{number}")
            return answer
        except refusal:
            await trio.lowlevel.checkpoint()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (errno.ENOSPC, JournalFull, r"log: the disk is full \(No space left on device\); nothing of this was written"),
        (errno.EIO, JournalUnwritable, r"log: the disk refuses \(.*Input/output error\); nothing of this was written"),
    ],
)
@pytest.mark.parametrize("on_nodes", [False, True])
async def test_a_disk_that_refuses_is_what_callers_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], says: str, on_nodes: bool
) -> None:
    monkeypatch.setattr(shard, "LAST_DELAY", 0.05)
    disk = Disk(monkeypatch)

    async def check(accounts: Shards[Any]) -> None:
        assert await accounts["anna"].ask(Deposit(1)) == 1
        disk.refuses = number
        for place in range(3):  # the first is refused by the append, the others by the shard
            with pytest.raises(error, match=says), trio.fail_after(75):
                await accounts["anna"].ask(Deposit(1), command=f"c{place}")
        disk.refuses = 0
        assert [await ask_until_it_works(accounts, place, error) for place in range(3)] == [2, 3, 4]

    if on_nodes:
        async with placed(tmp_path / "log") as (accounts, _, _):
            await check(accounts)
        return
    async with ActorSystem("test", **TIMES) as system:
        await check(await shards(system, Account, events=EVENTS, journal=tmp_path / "log", shards=2))


async def test_a_journal_that_cannot_be_opened_says_why_until_it_can(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        columns, config = log_columns(EVENTS), log_config(1)
        with Store.open(tmp_path / "log", columns, config):
            journal: Ref[Any] = system.spawn(
                partial(Journal, tmp_path / "log", columns, config=config, reopen_every=0.01)
            )
            for _ in range(3):
                with pytest.raises(JournalLocked, match=str(tmp_path / "log")):
                    await journal.ask(GetExtent())
            journal.tell(Append(b""))
            with pytest.raises(JournalLocked):
                await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        while True:
            try:
                extent = await journal.ask(GetExtent())
                break
            except JournalLocked:
                await trio.sleep(0.005)
        assert extent.end == {0: 0}
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert await accounts["anna"].ask(Deposit(5)) == 5
        accounts.ref.stop()
        await accounts.ref.terminated()


@pytest.mark.ci
async def test_a_journal_that_its_keeper_cannot_open_again_says_why(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        accounts = await shards(
            system, Account, events=EVENTS, journal=tmp_path / "log", shards=2, patience=2.0, keeper=True
        )
        assert await accounts["anna"].ask(Deposit(5), command="one") == 5
        os.kill(nodes_of(system)["Account-keeper"].pid, signal.SIGKILL)
        store = await _locked(tmp_path / "log")
        with pytest.raises(JournalLocked, match=f"{tmp_path / 'log'}.*open"), trio.fail_after(125):
            await ask_until_it_works(accounts, 2, OutcomeUnknown)  # until the keeper is back
        with pytest.raises(JournalLocked):
            await accounts["anna"].ask(Deposit(5), command="one")
        store.close()
        assert await ask_until_it_works(accounts, 2, JournalLocked) == 6
        accounts.ref.stop()
        await accounts.ref.terminated()


async def _locked(folder: Path) -> Store:
    while True:
        try:
            return Store.open(folder, None, log_config(2))
        except JournalLocked:
            await trio.lowlevel.checkpoint()


class Picky(MemoryJournal):
    """Refuses appends while it is told to, and erasure always."""

    refusal: Any = None

    @handles
    def erase(self, _: EraseEntity) -> None:
        self.reply_later().fail(JournalFull("the disk is full; nothing of this was written", path="/var/log"))

    @handles
    async def append(self, m: Append) -> Appended | Fenced:
        if self.refusal:
            self.reply_later().fail(self.refusal[0])
            return Fenced(0, 0)  # not what is answered
        done: Appended | Fenced = await super().append(m)
        return done


@asynccontextmanager
async def refusing(
    cls: type[Durable[Any]] = Account, events: Any = EVENTS, refusal: Sequence[JournalFull] = (), **settings: Any
) -> AsyncIterator[tuple[ActorSystem, Shards[Any], list[JournalFull], list[list[Row]]]]:
    """Run a shard over a journal that refuses what it is given while there is a refusal."""
    refusals, rows = [*refusal], no_rows()
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(Picky, log_columns(events), rows, refusals)
        accounts = await shards(system, cls, events=events, journal=journal, shards=1, **settings)
        yield system, accounts, refusals, rows


FULL = JournalFull("the disk is full", path="/var/log")
KEPT: dict[str, Any] = {}
"""The rows and the refusal of the journal that is on a node."""


class Kept(Picky):
    """Is on a node, and is reached through a router, as the journal of a keeper."""

    def __init__(self) -> None:
        super().__init__(log_columns(EVENTS), KEPT["rows"], KEPT["refusal"])

    async def started(self) -> None:
        self.system.groups.join("test.kept", self.ref)


async def test_a_refusal_is_the_journals_own_at_once_however_many_processes_it_crosses(
    autojump_clock: MockClock,
) -> None:
    """From the journal to the driver's router, from there to the shard's node, and back to the caller."""
    KEPT.update(rows=[[]], refusal=[])
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 2, APP) as (nodes, _),
    ):
        await (await nodes.spawn(Kept, on=0)).ask(GetExtent())
        journal: Ref[Any] = system.spawn(group("test.kept"))
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, nodes=nodes)
        assert await accounts["anna"].ask(Deposit(1)) == 1
        KEPT["refusal"].append(FULL)
        before = trio.current_time()
        for _ in range(3):  # the first is refused by the append, the others by the shard
            with pytest.raises(JournalFull, match=r"^/var/log: the disk is full$"):
                await accounts["anna"].ask(Deposit(1))
        assert trio.current_time() - before < 1.0
        accounts.ref.stop()
        await accounts.ref.terminated()


async def test_every_command_under_way_gets_the_refusal_and_is_not_done(autojump_clock: MockClock) -> None:
    async with refusing() as (_, accounts, refusal, _):
        for n in range(10):
            assert await accounts[f"e{n}"].ask(Balance()) == 0
        refusal.append(FULL)
        before = trio.current_time()
        seen: list[JournalFull] = []

        async def ask(n: int) -> None:
            with pytest.raises(JournalFull, match=r"^/var/log: the disk is full$") as caught:
                await accounts[f"e{n}"].ask(Deposit(1))
            seen.append(caught.value)

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(ask, n)
        for n in range(10):
            await ask(n)
        assert trio.current_time() - before < 1.0
        assert len(set(map(id, seen))) == 20  # an error that is raised keeps frames, so each caller gets its own
        refusal.clear()
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert [await accounts[f"e{n}"].ask(Deposit(1)) for n in range(10)] == [1] * 10


async def test_a_full_disk_does_not_hold_up_what_writes_nothing(autojump_clock: MockClock) -> None:
    async with refusing() as (_, accounts, refusal, rows):
        for n in range(3):
            assert await accounts[f"e{n}"].ask(Deposit(n)) == n
        refusal.append(FULL)
        before = trio.current_time()
        for _ in range(2):  # the first is refused by the append, the second by the shard
            with pytest.raises(JournalFull, match=r"^/var/log: the disk is full$"):
                await accounts["e1"].ask(Deposit(10))
            assert [await accounts[f"e{n}"].ask(Balance()) for n in range(3)] == [0, 1, 2]
        assert await accounts["new"].ask(Balance()) == 0
        with pytest.raises(JournalFull):  # its answer would be written
            await accounts["e2"].ask(Balance(), command="one")
        with pytest.raises(JournalFull):
            await accounts.erase("e2")

        async def both() -> None:
            """The second waits for the first, which is refused and costs the entity its place in memory."""
            async with trio.open_nursery() as nursery:
                for question in (Deposit(1), Balance()):
                    nursery.start_soon(ask, question)

        async def ask(question: Any) -> None:
            try:
                answers.append(await accounts["e2"].ask(question))
            except JournalFull:
                answers.append(None)

        answers: list[int | None] = []
        await both()
        assert sorted(answers, key=str) == [2, None]
        assert trio.current_time() - before < 1.0
        assert len(rows[0]) == 4
        refusal.clear()
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert [await accounts[f"e{n}"].ask(Deposit(1)) for n in range(3)] == [1, 2, 3]
        assert [row["kind"] for row in rows[0][4:5]] == ["$owned"]


async def test_a_shard_that_waited_for_room_reads_what_another_has_written_meanwhile(
    autojump_clock: MockClock,
) -> None:
    async with refusing() as (system, accounts, refusal, _):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        refusal.append(FULL)
        with pytest.raises(JournalFull):
            await accounts["anna"].ask(Deposit(10))
        assert await accounts["anna"].ask(Balance()) == 1
        refusal.clear()
        assert accounts.journal is not None
        others = await shards(system, Account, events=EVENTS, journal=accounts.journal, shards=1, name="others")
        assert await others["anna"].ask(Deposit(5)) == 6
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert await accounts["anna"].ask(Balance()) == 6
        assert await accounts["anna"].ask(Deposit(1)) == 7


class Unlucky(Picky):
    """Has no room for the first row, and is away when the shard's rows are read for the first time."""

    def __init__(self, rows: list[list[Row]]) -> None:
        super().__init__(log_columns(EVENTS), rows, [FULL])
        self.reads = 0

    @handles
    def find(self, m: ReadEntity) -> Found | None:
        if not m.entity and m.newest is None:
            self.reads += 1
            if self.reads == 1:
                self.refusal.clear()
                self.reply_later().fail(ActorError("it is away"))
                return None
        return super().find(m)


async def test_a_shard_that_has_its_partition_after_all_takes_it_once(autojump_clock: MockClock) -> None:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        rows = no_rows()
        journal = system.spawn(Unlucky, rows)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, patience=0.0)
        assert await accounts["anna"].ask(Deposit(1)) == 1
        await trio.sleep(3 * shard.LAST_DELAY)
        assert await accounts["anna"].ask(Deposit(1)) == 2
        assert [row["kind"] for row in rows[0]] == ["$owned", *["test.durable.deposited"] * 2]


async def test_reminders_wait_for_room(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "levada.actors.durable")
    start = trio.current_time()
    async with refusing(Reminded, Deposited, clock=trio.current_time) as (_, accounts, refusal, _):
        assert await accounts["anna"].ask(Halves(str(start + 1.0))) == 0
        refusal.append(FULL)
        with pytest.raises(JournalFull):
            await accounts["anna"].ask(Deposit(10))
        with pytest.raises(JournalFull):
            await accounts["bert"].ask(Halves(str(start + 2.0)))
        await trio.sleep(2.0)
        assert await accounts["anna"].ask(Balance()) == 0
        caplog.clear()
        await trio.sleep(2 * shard.LAST_DELAY)
        refusal.clear()
        await trio.sleep(shard.LAST_DELAY)
        assert [await accounts[name].ask(Balance()) for name in ("anna", "bert")] == [7, 0]
        assert caplog.messages == []  # it was not tried in vain, and the reason is not logged again


@message("test.durable.halves", frozen=True)
class Halves(Asks[int]):
    """Do something and commit it, then deposit one."""

    first: str


BETWEEN: dict[str, Any] = {}
"""What a handler does between its halves, and whom it tells something."""


class Halving(Durable[Halves | Deposit | Balance]):
    balance: int = 0

    @handles
    async def halve(self, m: Halves) -> int:
        match m.first:
            case "event" | "event, committed twice":
                self.record(Deposited(1))
            case "reminder":
                self.remind(1e12, Balance())
            case "message":
                self.after_commit(BETWEEN["probe"].ref, "told")
        await self.commit()
        BETWEEN["do"]()
        self.record(Deposited(1))
        if m.first.endswith("twice"):
            await self.commit()
        return self.balance

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount


class Reminded(Durable[Halves | Deposit | Balance]):
    """Deposits seven at a time that it is given."""

    balance: int = 0

    @handles
    def begin(self, m: Halves) -> int:
        self.remind(float(m.first), Deposit(7))
        return self.balance

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount


async def test_a_handler_that_commits_on_a_full_disk_gets_the_refusal(autojump_clock: MockClock) -> None:
    async with refusing(Halving, Deposited, [FULL]) as (system, accounts, _, rows):
        gone_on: list[str] = []
        BETWEEN.update(do=lambda: gone_on.append("past it"), probe=Probe(system))
        for first in ("event", "reminder", "message", ""):
            with pytest.raises(JournalFull, match=r"^/var/log: the disk is full$"):
                await accounts["anna"].ask(Halves(first))
        assert await accounts["anna"].ask(Balance()) == 0
        assert BETWEEN["probe"].received == []
        assert gone_on == ["past it"]  # by the last, which had nothing to commit
        assert rows == [[]]


@pytest.mark.parametrize(
    ("first", "balance", "says"),
    [
        ("event", 1, OutcomeUnknown),
        ("event, committed twice", 1, OutcomeUnknown),
        ("reminder", 0, OutcomeUnknown),
        ("message", 0, OutcomeUnknown),
        ("", 0, JournalFull),
    ],
)
async def test_a_command_of_which_a_part_is_on_the_disk_is_not_said_to_be_undone(
    autojump_clock: MockClock, first: str, balance: int, says: type[Exception]
) -> None:
    outcomes: list[tuple[str, type[Exception], str]] = []
    async with refusing(Halving, Deposited) as (system, accounts, refusal, _):
        assert await accounts["bert"].ask(Balance()) == 0

        async def ask(entity: str, question: Any, command: str | None = None) -> None:
            with pytest.raises((JournalFull, OutcomeUnknown)) as caught:
                await accounts[entity].ask(question, command=command)
            outcomes.append((command or "", caught.type, str(caught.value)))

        async with trio.open_nursery() as nursery:

            def go_on() -> None:
                refusal.append(FULL)
                nursery.start_soon(ask, "bert", Deposit(1))
                nursery.start_soon(ask, "anna", Deposit(1), "behind it")

            BETWEEN.update(do=go_on, probe=Probe(system))
            for _ in range(2):  # the second while the first is under way
                nursery.start_soon(ask, "anna", Halves(first), "one")
        assert sorted(each[:2] for each in outcomes) == [
            ("", JournalFull),
            ("behind it", JournalFull),
            *[("one", says)] * 2,
        ]
        if says is OutcomeUnknown:
            part = "command 'one' of entity 'anna' is done in part, without the rest (/var/log: the disk is full): ask again with the same"
            assert [part in text for command, _, text in outcomes if command == "one"] == [True, True]
        refusal.clear()
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert await accounts["anna"].ask(Balance()) == balance
        BETWEEN["do"] = list
        assert await accounts["anna"].ask(Halves(first), command="one") == 2 * balance + 1
        assert BETWEEN["probe"].received == ["told"] * 2 * (first == "message")


@pytest.mark.parametrize("first", ["event", "reminder"])
async def test_a_command_whose_first_part_is_refused_is_said_to_be_undone(
    autojump_clock: MockClock, first: str
) -> None:
    """The part is in the queue of the shard, and the append that has it is refused; a part of another command is on the disk."""
    async with refusing(Halving, Deposited) as (system, accounts, refusal, _):
        BETWEEN.update(do=list, probe=Probe(system))
        assert await accounts["anna"].ask(Halves("event")) == 2
        assert await accounts["bert"].ask(Balance()) == 0
        refusal.append(FULL)
        with pytest.raises(JournalFull, match=r"^/var/log: the disk is full$"):
            await accounts["bert"].ask(Halves(first), command="one")
        refusal.clear()
        await trio.sleep(shard.LAST_DELAY + 0.1)
        assert await accounts["bert"].ask(Balance()) == 0
        assert await accounts["bert"].ask(Halves(first), command="one") == 1 + (first == "event")


@pytest.mark.ci
async def test_a_command_that_is_asked_again_and_refused_may_have_been_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On nodes a command with an id is asked again. The refusal of a later attempt says nothing of the first."""
    disk = Disk(monkeypatch)

    def fill() -> None:
        disk.refuses = errno.ENOSPC

    BETWEEN["do"] = fill
    async with placed(tmp_path / "log", cls=Halving) as (accounts, _, _):
        with pytest.raises(
            OutcomeUnknown, match=r"'one' of entity 'anna' is not done, or not known to be: .*log: the disk is full"
        ):
            await accounts["anna"].ask(Halves("event"), command="one")
        with pytest.raises(JournalFull):
            await accounts["anna"].ask(Deposit(1), command="two")
        disk.refuses = 0
        BETWEEN["do"] = list
        assert await ask_until_it_works(accounts, 3, JournalFull) == 2


async def test_an_erasure_that_is_refused_after_its_tombstone_says_so(autojump_clock: MockClock) -> None:
    async with refusing() as (_, accounts, _, _):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        says = "^/var/log: entity 'anna' takes no commands any more, and rows of it are still in the files: call erase.. again: the disk is full"
        with pytest.raises(JournalFull, match=says):
            await accounts.erase("anna")
        with pytest.raises(EntityErased):
            await accounts["anna"].ask(Balance())
