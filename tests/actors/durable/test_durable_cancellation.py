"""Cancellation and kills at every await on the way of a command: each command is done once, and nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import Deposit, Deposited
from tests.actors.durable.memory_journal import MemoryJournal, Row
from tests.framework.test_cancellation import Mode, Outcome, everywhere, interrupted

from levada.actors.durable import Durable, Entity, OutcomeUnknown, Shards, applies, log_columns, shards
from levada.actors.durable.hosting import Owner
from levada.actors.durable.routing import Route, ShardRoutes
from levada.framework import Actor, ActorSystem, Asks, channel, handles, message, restart
from levada.framework.errors import ActorStopped, AskTimeout


@message("test.cancel.add")
class Add(Asks[int]):
    number: int
    how: str


@message("test.cancel.list")
class List(Asks[list[int]]):
    pass


@message("test.cancel.added")
class Added:
    number: int


@message("test.cancel.nothing")
class Nothing(Asks[None]):
    pass


class Other(Actor[Nothing]):
    @handles
    async def nothing(self, _: Nothing) -> None:
        await trio.sleep(0.001)


class Book(Durable[Add | List]):
    """Its handler waits in each way that a handler can."""

    numbers: list[int] = attrs.field(factory=list)

    @handles
    async def add(self, m: Add) -> int:
        if m.number not in self.numbers:  # a crash behind the commit leaves it, and the command comes again
            self.record(Added(m.number))
        match m.how:
            case "commits":
                await self.commit()
            case "asks":
                await self.spawn(Other).ask(Nothing())
            case "reminds":
                self.remind(0.0, List(), key="now")
            case _:
                await trio.lowlevel.checkpoint()
        return self.numbers.index(m.number)

    @handles
    def list_all(self, _: List) -> list[int]:
        return self.numbers

    @applies
    def added(self, e: Added) -> None:
        self.numbers.append(e.number)


HOWS = ["waits", "commits", "asks", "reminds", "waits"]


async def books_in(system: ActorSystem, rows: list[list[Row]]) -> Shards[Any]:
    journal = system.spawn(MemoryJournal, log_columns(Added), rows, name="journal", supervise=restart("permanent"))
    return await shards(system, Book, events=Added, journal=journal, shards=1, snapshot_every=3)


async def check(books: Shards[Any], answers: dict[int, int], rows: list[list[Row]]) -> None:
    """Ask for everything again: each command is done once, and answered as before."""
    for number, how in enumerate(HOWS):
        answer = await books["a"].ask(Add(number, how), command=f"add-{number}")
        assert answer == answers.get(number, answer)
    numbers = await books["a"].ask(List())
    assert sorted(numbers) == list(range(len(HOWS)))
    assert [numbers[answer] for answer in answers.values()] == list(answers)
    found = await books.statistics()
    assert (found.loading, found.under_way) == (0, 0)
    events = [row for row in rows[0] if row["kind"] == "test.cancel.added"]
    assert [row["sequence"] for row in events] == [1, 2, 3, 4, 5]
    assert [row["number"] for row in events] == numbers


@pytest.mark.ci
def test_an_asker_that_is_cancelled_anywhere_leaves_no_half_command() -> None:
    async def main(outcome: Outcome, mode: Mode, place: int) -> None:
        rows: list[list[Row]] = [[]]
        answers: dict[int, int] = {}
        async with ActorSystem(ask_timeout=1000.0) as system:
            books = await books_in(system, rows)

            async def act() -> None:
                for number, how in enumerate(HOWS):
                    answers[number] = await books["a"].ask(Add(number, how), command=f"add-{number}")
                await books["b"].send(List())

            await interrupted(outcome, mode, place, act)
            await trio.sleep(10)
            await check(books, answers, rows)
            assert system.observe.waits() == []

    assert everywhere(main) >= 10


class StrikeAtStep(trio.abc.Instrument):
    """Calls a function when so many steps of tasks have begun."""

    def __init__(self, step: int, strike: Callable[[], object]) -> None:
        self.left = step
        self.strike = strike

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.strike()


@pytest.mark.ci
@pytest.mark.parametrize("victim", ["/Book/0", "/Book/0/a", "/journal"])
def test_a_kill_at_any_step_loses_no_command_and_does_none_twice(victim: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the shard, the entity and the journal wait for."""
    caplog.set_level(logging.CRITICAL, "levada")

    async def main(step: int) -> bool:
        rows: list[list[Row]] = [[]]
        answers: dict[int, int] = {}
        async with ActorSystem(ask_timeout=1000.0) as system:
            books = await books_in(system, rows)

            def kill() -> None:
                target = system.lookup(victim)
                if target is not None:
                    target.kill()

            async def client(numbers: list[int]) -> None:
                for number in numbers:
                    while number not in answers:
                        try:
                            answers[number] = await books["a"].ask(Add(number, HOWS[number]), command=f"add-{number}")
                        except (OutcomeUnknown, ActorStopped, AskTimeout):
                            await trio.sleep(0.01)

            strike = StrikeAtStep(step, kill)
            trio.lowlevel.add_instrument(strike)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client, [0, 1, 2])
                    nursery.start_soon(client, [3, 4])
            except BaseException as error:
                error.add_note(f"killed at step {step}")
                raise
            finally:
                trio.lowlevel.remove_instrument(strike)
            await trio.sleep(10)
            await check(books, answers, rows)
        return strike.left > 0

    step = 1
    while not trio.run(main, step, clock=MockClock(autojump_threshold=0)):
        step += 1
    assert step > 40


@pytest.mark.ci
def test_an_asker_that_is_cancelled_while_a_shard_moves() -> None:
    """At every await of the way to a shard: it is nowhere, elsewhere, full, or takes its time."""

    async def main(outcome: Outcome, mode: Mode, place: int) -> None:
        rows: list[list[Row]] = [[]]
        answers: dict[int, int] = {}
        async with ActorSystem(ask_timeout=1000.0) as system, trio.open_nursery() as nursery:
            journal = system.spawn(MemoryJournal, log_columns(Deposited), rows)
            one, two = [
                await shards(system, OneEvent, events=Deposited, journal=journal, shards=1, name=name) for name in "12"
            ]
            routes = ShardRoutes(system, 1)
            news, owners = channel(Owner)
            nursery.start_soon(routes.follow, owners)
            account: Entity[Any] = Entity("a", OneEvent, Route(routes, 0))

            async def move() -> None:
                for each in (None, one, None, two, one):
                    ref = None if each is None else system.lookup(f"{each.ref.path}/0")
                    await news.send(Owner(0, ref))
                    await trio.sleep(1)

            async def act() -> None:
                for number in range(4):
                    answers[number] = await account.ask(Deposit(1), command=f"deposit-{number}")
                    await account.send(Deposit(10), command=f"sent-{number}")
                    await trio.sleep(0.8)

            nursery.start_soon(move)
            await interrupted(outcome, mode, place, act)
            await trio.sleep(10)
            for number in range(4):
                answer = await account.ask(Deposit(1), command=f"deposit-{number}")
                assert answer == answers.get(number, answer)
            done = [row["command"] for row in rows[0] if row["amount"] == 1]
            assert sorted(done) == [f"deposit-{number}" for number in range(4)]
            await news.finish()
            assert system.observe.waits() == []

    assert everywhere(main) > 10


class OneEvent(Durable[Deposit]):
    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount
