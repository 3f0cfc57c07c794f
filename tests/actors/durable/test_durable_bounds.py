"""Floods: each queue on the way of a command has a bound, and what does not fit is refused or held back."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Union, get_args

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Withdraw
from tests.actors.durable.memory_journal import MemoryJournal, Row, no_rows

from levada.actors.durable import (
    Durable,
    Entity,
    Shards,
    applies,
    commits,
    entry,
    erasing,
    live_entities,
    log_columns,
    routing,
    shards,
)
from levada.actors.durable.hosting import Owner
from levada.actors.durable.routing import Route, ShardRoutes
from levada.actors.durable.turns import EntityCommand
from levada.actors.journal import Append, Appended, Fenced
from levada.framework import Actor, ActorSystem, Asks, channel, handles, message
from levada.framework.errors import ActorStopped, AskTimeout, MailboxFull


class Slow(MemoryJournal):
    """Its appends wait for leave."""

    go_on: Any = None

    @handles
    async def append(self, m: Append) -> Appended | Fenced:
        await self.go_on.wait()
        done: Appended | Fenced = await super().append(m)
        assert isinstance(done, Appended)
        self.go_on.sizes.append(done.count)
        return done


class Gate:
    def __init__(self) -> None:
        self.open = trio.Event()
        self.open.set()
        self.sizes: list[int] = []

    async def wait(self) -> None:
        await self.open.wait()


HANDLED: list[str] = []


class Counted(Account):
    @handles
    def deposit(self, m: Deposit) -> int:
        HANDLED.append(self.entity)
        return super().deposit(m)


async def accounts_in(system: ActorSystem, gate: Gate) -> Shards[Any]:
    rows: list[list[Row]] = [[]]
    journal = system.spawn(Slow, log_columns(EVENTS), rows, gate)
    accounts = await shards(system, Counted, events=EVENTS, journal=journal, shards=1)
    await accounts["anna"].ask(Balance())
    gate.open = trio.Event()
    return accounts


async def test_told_commands_fill_the_shard_and_its_mailbox(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "MOST_UNDER_WAY", 40)
    monkeypatch.setattr(entry, "MAILBOX", 10)
    gate = Gate()
    async with ActorSystem(ask_timeout=1000.0) as system:
        accounts = await accounts_in(system, gate)
        taken = 0
        with pytest.raises(MailboxFull):
            for _ in range(1000):
                accounts[f"e{taken}"].tell(Deposit(1))
                taken += 1
                await wait_all_tasks_blocked()
        assert taken == 40 + 1 + 10  # one waits in the handler
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accounts["last"].send, Deposit(1))
            await wait_all_tasks_blocked()
            gate.open.set()
        assert [await accounts[f"e{number}"].ask(Balance()) for number in range(taken)] == [1] * taken
        assert await accounts["last"].ask(Balance()) == 1


async def test_large_events_hold_the_next_commands_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes count, too, as soon as a handler has recorded them."""
    monkeypatch.setattr(commits, "MOST_WAITING_BYTES", 1000)
    gate = Gate()
    async with ActorSystem(ask_timeout=1000.0) as system:
        accounts = await accounts_in(system, gate)
        gate.open.set()
        for number in range(30):
            await accounts[f"e{number}"].ask(Balance())
        gate.open = trio.Event()
        HANDLED.clear()
        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(accounts[f"e{number}"].ask, Deposit(1))
                await wait_all_tasks_blocked()
            assert [f"e{number}" for number in range(1 + 1000 // 128)] == HANDLED
            gate.open.set()
        assert sum(gate.sizes) == 1 + 30


@message("test.bounds.write", frozen=True)
class Write(Asks[int]):
    text: str


@message("test.bounds.written", frozen=True)
class Written:
    text: str


class Diary(Durable[Write]):
    """Its state grows with its events."""

    text: str = ""

    @handles
    def write(self, m: Write) -> int:
        self.record(Written(m.text))
        return len(self.text)

    @applies
    def written(self, e: Written) -> None:
        self.text += e.text


async def test_a_large_state_is_not_written_with_large_events(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both together may be more than a journal in another process takes at once."""
    monkeypatch.setattr(commits, "MOST_BYTES", 1000)
    gate = Gate()
    async with ActorSystem(ask_timeout=1000.0) as system:
        rows: list[list[Row]] = [[]]
        journal = system.spawn(Slow, log_columns(Written), rows, gate)
        diaries = await shards(system, Diary, events=Written, journal=journal, shards=1, snapshot_every=2)
        assert [await diaries["d"].ask(Write("x" * 800)) for _ in range(4)] == [800, 1600, 2400, 3200]
        assert [await diaries["e"].ask(Write("x")) for _ in range(4)] == [1, 2, 3, 4]
        assert await diaries["f"].ask(Write("x")) == 1
        await wait_all_tasks_blocked()
    assert gate.sizes == [1, *[1, 1, 1] * 2, *[1, 2] * 2, 1]


@message("test.bounds.note", frozen=True)
class Note(Asks[int]):
    text: str
    more: list[bytes]


class Notebook(Durable[Balance | Note]):
    """Its notes wait for leave."""

    gate: ClassVar[Gate]
    balance: int = 0

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount

    @handles
    async def note(self, m: Note) -> int:
        HANDLED.append(m.text)
        await self.gate.wait()
        self.record(Deposited(len(m.text)))
        return self.balance


@pytest.mark.parametrize("with_ids", [False, True])
async def test_a_burst_of_large_commands_is_held_back_before_any_is_handled(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, with_ids: bool
) -> None:
    """The bytes of a command count from the moment it is taken: here 1,000 and a few for each, of 5,000."""
    monkeypatch.setattr(commits, "MOST_WAITING_BYTES", 5000)
    Notebook.gate = gate = Gate()
    HANDLED.clear()
    async with ActorSystem(ask_timeout=1000.0) as system:
        rows: list[list[Row]] = [[]]
        journal = system.spawn(MemoryJournal, log_columns(Deposited), rows)
        notes = await shards(system, Notebook, events=Deposited, journal=journal, shards=1)
        assert await notes["e0"].ask(Balance()) == 0
        gate.open = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(30):
                command = f"note-{number}" if with_ids else None
                question = Note(f"{number:03}", [b"x" * 500] * 2)
                nursery.start_soon(partial(notes[f"e{number}"].ask, question, command=command))
                await wait_all_tasks_blocked()
            assert [f"{number:03}" for number in range(5)] == HANDLED
            gate.open.set()
        assert sorted(HANDLED) == [f"{number:03}" for number in range(30)]
        assert [await notes[f"e{number}"].ask(Balance()) for number in range(30)] == [3] * 30
        assert (await notes.statistics()).under_way == 0


async def test_an_entity_that_failed_is_read_again_behind_its_rows_that_are_on_their_way(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    gate, answers = Gate(), list[int]()
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        anna = (await accounts_in(system, gate))["anna"]

        async def ask() -> None:
            answers.append(await anna.ask(Balance()))

        anna.tell(Deposit(5))
        await wait_all_tasks_blocked()  # the journal has this row, and the next one waits in the shard
        anna.tell(Deposit(1))
        with pytest.raises(ActorStopped, match="anna has -3"):
            await anna.ask(Withdraw(9))
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert answers == []
        gate.open.set()
    assert answers == [6]


async def test_entities_that_fail_are_forgotten(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "levada")
    monkeypatch.setattr(live_entities, "MOST_FAILED", 10)
    gate = Gate()
    async with ActorSystem(ask_timeout=1000.0) as system:
        accounts = await accounts_in(system, gate)
        gate.open.set()
        for number in range(100):
            accounts[f"e{number}"].tell(Withdraw(1))
            await wait_all_tasks_blocked()
        found = await accounts.statistics()
        assert (found.live, found.under_way) == (1, 0)


async def test_erasures_have_a_bound(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasing, "MOST", 5)
    gate = Gate()
    async with ActorSystem(ask_timeout=1000.0) as system, trio.open_nursery() as nursery:
        accounts = await accounts_in(system, gate)
        for number in range(5):
            nursery.start_soon(accounts.erase, f"e{number}")
        await wait_all_tasks_blocked()
        with pytest.raises(MailboxFull, match="5 entities of this shard are being erased"):
            await accounts.erase("another")
        nursery.cancel_scope.cancel()


async def test_told_commands_wait_for_a_shard_that_moves_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAILBOX", 10)
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        routes = ShardRoutes(system, 1)
        news, owners = channel(Owner)
        nursery.start_soon(routes.follow, owners)
        for number in range(10):
            routes.tell(0, number)
        with pytest.raises(MailboxFull, match="shard 0 is not open now, and 10 messages wait for it"):
            routes.tell(0, 10)
        await news.finish()


class Leaver(Actor[EntityCommand]):
    """A shard that ends and has not begun the command."""

    reply: Any = None

    @handles
    def command(self, m: EntityCommand) -> None:
        self.reply = self.reply_later()
        self.stop()


async def test_a_command_without_an_id_that_a_shard_left_undone_is_asked_of_the_next_owner() -> None:
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        journal = system.spawn(MemoryJournal, log_columns(EVENTS), no_rows())
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        routes = ShardRoutes(system, 1)
        news, owners = channel(Owner)
        nursery.start_soon(routes.follow, owners)
        anna: Entity[Any] = Entity("anna", Account, Route(routes, 0))
        with pytest.raises(AskTimeout, match="shard 0 did not answer Deposit to entity 'anna' in 0 s") as caught:
            await anna.ask(Deposit(1), timeout=0)
        assert caught.value.seconds == 0.0
        leaver = system.spawn(Leaver)
        await news.send(Owner(0, leaver))

        async def move() -> None:
            await leaver.terminated()
            await news.send(Owner(0, system.lookup(f"{accounts.ref.path}/0")))

        nursery.start_soon(move)
        assert await anna.ask(Deposit(5)) == 5
        await news.finish()


@message("test.bounds.local")
class Local(Asks[int]):
    number: int
    other: Unknown  # type: ignore[name-defined]  # noqa: F821


class Counter(Durable[Local]):
    @handles
    def take(self, m: Local) -> int:
        return m.number + len(m.other)

    @applies
    def deposited(self, e: Deposited) -> None: ...


async def test_a_command_that_could_not_travel_is_counted_all_the_same() -> None:
    """Its annotations cannot be resolved, so the values of all fields are looked at."""
    async with ActorSystem() as system:
        rows: list[list[Row]] = [[]]
        journal = system.spawn(MemoryJournal, log_columns(Deposited), rows)
        counters = await shards(system, Counter, events=Deposited, journal=journal, shards=1)
        assert await counters["a"].ask(Local(1, "xy")) == 3


def wide(number: int) -> type:
    """Make a class of events with seven columns of its own."""
    fields = {f"f{number}_{place}": int for place in range(7)}
    return message(f"test.bounds.wide{number}")(type(f"Wide{number}", (), {"__annotations__": fields}))


WIDE: Any = Union[tuple(wide(number) for number in range(40))]  # noqa: UP007 - made at run time


def count_wide(self: Any, e: Any) -> None:
    self.count += 1


count_wide.__annotations__ = {"e": WIDE, "return": None}


class Wide(Durable[Deposit]):
    count: int = 0
    counted = applies(count_wide)

    @handles
    def deposit(self, m: Deposit) -> int:
        cls = get_args(WIDE)[m.amount]
        self.record(cls(*range(7)))
        return self.count


async def test_a_group_of_rows_of_many_columns_has_as_few_rows_as_its_bytes_need(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has 280 columns, most of them empty, and takes 2.3 KB in the journal."""
    monkeypatch.setattr(commits, "MOST_BYTES", 20_000)
    gate = Gate()
    async with ActorSystem("test", ask_timeout=1000.0) as system, trio.open_nursery() as nursery:
        journal = system.spawn(partial(Slow, log_columns(WIDE), [[]], gate))
        entities = await shards(system, Wide, events=WIDE, journal=journal, shards=1)
        gate.open = trio.Event()
        for number in range(40):
            nursery.start_soon(entities[f"e{number}"].ask, Deposit(number))
        await wait_all_tasks_blocked()
        gate.open.set()
    assert sum(gate.sizes) == 41
    assert max(gate.sizes) == 8
