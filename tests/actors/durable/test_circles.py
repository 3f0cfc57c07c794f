"""Durable actors that wait for each other: circles of asks are found and named, and a command that its asker gave up is not begun."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Deposit, Deposited
from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import (
    CommandFailed,
    Durable,
    Shards,
    applies,
    log_columns,
    shards,
    shards_of,
)
from levada.actors.journal import Append, Appended, Fenced, ReadEntity
from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.framework.errors import ActorStopped, AskCycle, AskTimeout
from levada.framework.router import pool, pull, round_robin

WORLD: dict[str, Any] = {}
"""The shards, and what a test gives to the handlers."""

pytestmark = pytest.mark.usefixtures("only_what_callers_see")


@message("test.circles.visit", frozen=True)
class Visit(Asks[str]):
    """Ask the next of these to visit the rest. A name with a slash in front is an actor's; one with ``!`` is told something before."""

    way: list[str]
    command: str | None = None


@message("test.circles.later", frozen=True)
class Later(Asks[int]):
    """Set a reminder to visit these."""

    way: list[str]


@message("test.circles.remember", frozen=True)
class Remember:
    way: list[str]


@message("test.circles.wait", frozen=True)
class Wait(Asks[int]):
    """Wait for the gate, then deposit one."""


@message("test.circles.meet", frozen=True)
class Meet(Asks[int]):
    """Ask an entity to greet."""

    whom: str


@message("test.circles.greet", frozen=True)
class Greet(Asks[int]):
    """Ask an entity the same as it was asked."""

    whom: str
    question: Meet


async def visit(system: ActorSystem, m: Visit) -> str:
    if not m.way:
        return "the end"
    first, *rest = m.way
    if first.startswith("/"):
        return str(await WORLD[first].ask(Visit(rest, m.command)))
    boxes: Shards[Any] = await shards_of(system, Box)
    if first.startswith("!"):
        boxes[first[1:]].tell(Deposit(1))
        first, *rest = rest
    return str(await boxes[first].ask(Visit(rest, m.command), command=m.command))


class Box(Durable[Visit | Later | Remember | Wait | Deposit | Meet | Greet]):
    balance: int = 0

    @handles
    async def visit(self, m: Visit) -> str:
        return await visit(self.system, m)

    @handles
    def later(self, m: Later) -> int:
        self.remind(0.0, Remember(m.way))
        return 0

    @handles
    async def remember(self, m: Remember) -> None:
        try:
            WORLD["found"] = await visit(self.system, Visit(m.way))
        except CommandFailed as error:
            WORLD["found"] = error

    @handles
    async def meet(self, m: Meet) -> int:
        boxes: Shards[Any] = await shards_of(self.system, Box)
        return int(await boxes[m.whom].ask(Greet(self.entity, m)))

    @handles
    async def greet(self, m: Greet) -> int:
        boxes: Shards[Any] = await shards_of(self.system, Box)
        return int(await boxes[m.whom].ask(m.question, command="one"))

    @handles
    async def wait(self, m: Wait) -> int:
        await WORLD["gate"].wait()
        self.record(Deposited(1))
        return self.balance

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount


class Visitor(Actor[Visit]):
    @handles
    async def visit(self, m: Visit) -> str:
        return await visit(self.system, m)


@asynccontextmanager
async def boxes_of(
    shard_count: int = 1, journal_type: type[MemoryJournal] = MemoryJournal
) -> AsyncIterator[tuple[ActorSystem, Shards[Any]]]:
    async with ActorSystem("test", ask_timeout=5.0) as system:
        journal = system.spawn(journal_type, log_columns(Deposited), no_rows(shard_count))
        boxes = await shards(system, Box, events=Deposited, journal=journal, shards=shard_count)
        WORLD["gate"] = trio.Event()
        yield system, boxes


def cycle_in(error: BaseException | None) -> AskCycle:
    """Find the cycle that the handlers on the way have failed of."""
    while not isinstance(error, AskCycle):
        assert isinstance(error, ActorStopped), error
        error = error.__cause__
    return error


async def test_a_chain_of_asks_that_ends_is_no_circle(autojump_clock: MockClock) -> None:
    async with boxes_of() as (_, boxes):
        assert await boxes["a"].ask(Visit(["b", "c"])) == "the end"


@pytest.mark.parametrize("awake", [True, False], ids=["in memory", "not in memory"])
@pytest.mark.parametrize(
    ("way", "names"),
    [
        (["a"], "aa"),
        (["b", "a"], "bab"),
        (["b", "c", "a"], "cabc"),
    ],
)
@pytest.mark.parametrize("command", [None, "one"], ids=["", "with ids"])
async def test_a_circle_of_asks_is_refused_at_once_and_names_the_entities(
    autojump_clock: MockClock, awake: bool, way: list[str], names: str, command: str | None
) -> None:
    async with boxes_of() as (system, boxes):
        if awake:
            for entity in "abc":
                await boxes[entity].ask(Deposit(1))
        before = trio.current_time()
        with pytest.raises(CommandFailed) as caught:
            await boxes["a"].ask(Visit(way, command))
        assert cycle_in(caught.value).cycle == tuple(f"/Box/0/{name}" for name in names)
        assert trio.current_time() - before < 0.1
        assert system.observe.waits() == []
        assert await boxes["a"].ask(Visit(["b", "c"])) == "the end"


async def test_a_circle_by_the_repetition_of_a_command_is_found(autojump_clock: MockClock) -> None:
    """An entity asks for the answer of the command on whose behalf it was asked."""
    async with boxes_of() as (_, boxes):
        with pytest.raises(CommandFailed) as caught:
            await boxes["a"].ask(Meet("b"), command="one")
        assert cycle_in(caught.value).cycle == ("/Box/0/b", "/Box/0/a", "/Box/0/b")


async def test_a_circle_by_a_question_that_waits_in_the_mailbox_of_the_shard_is_found(
    autojump_clock: MockClock,
) -> None:
    async with boxes_of() as (_, boxes):
        before = trio.current_time()
        with pytest.raises(CommandFailed) as caught:
            await boxes["a"].ask(Visit(["b", "!c", "a"]))
        assert cycle_in(caught.value).cycle == ("/Box/0/b", "/Box/0/a", "/Box/0/b")
        assert trio.current_time() - before < 0.1


async def test_a_circle_through_shards_that_are_busy_is_found(autojump_clock: MockClock) -> None:
    """The questions wait in the mailboxes of the shards, and each is in its asker's way when it comes out."""
    async with boxes_of(4) as (_, boxes):
        names = "abcdefgh"
        for entity in names:
            await boxes[entity].ask(Deposit(1))
        cycles = []

        async def ask(entity: str, other: str) -> None:
            try:
                await boxes[entity].ask(Visit([other, entity]))
            except CommandFailed as error:
                cycles.append(cycle_in(error).cycle)

        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            for entity, other in zip(names, names[1:] + names[0], strict=True):
                nursery.start_soon(ask, entity, other)
        assert trio.current_time() - before < 0.1
        assert len(cycles) == 8
        assert all(cycle[0] == cycle[-1] for cycle in cycles)


async def test_a_circle_that_begins_with_a_reminder_is_found(autojump_clock: MockClock) -> None:
    async with boxes_of() as (_, boxes):
        await boxes["a"].ask(Later(["b", "a"]))
        await trio.sleep(0.1)
        assert cycle_in(WORLD["found"]).cycle == ("/Box/0/b", "/Box/0/a", "/Box/0/b")


@pytest.mark.parametrize("routing", [round_robin(), pull()], ids=["turns", "pull"])
async def test_a_circle_through_actors_and_routers_is_found(autojump_clock: MockClock, routing: Any) -> None:
    async with boxes_of() as (system, boxes):
        WORLD["/visitor"] = system.spawn(Visitor, name="visitor")
        WORLD["/router"] = system.spawn(pool(Visitor, size=1, routing=routing), name="router")
        with pytest.raises(CommandFailed) as caught:
            await boxes["a"].ask(Visit(["/visitor", "/router", "b", "a"]))
        first, *rest = cycle_in(caught.value).cycle
        assert (first, rest[:2], rest[3:]) == ("/Box/0/b", ["/Box/0/a", "/visitor"], ["/Box/0/b"])
        assert rest[2].startswith("/router/")
        WORLD["/guest"] = system.spawn(Visitor, name="guest")
        with pytest.raises(ActorStopped) as stopped:
            await WORLD["/guest"].ask(Visit(["a", "b", "/guest"]))
        assert cycle_in(stopped.value).cycle == ("/Box/0/b", "/guest", "/Box/0/a", "/Box/0/b")


async def test_a_circle_within_a_node_is_found(autojump_clock: MockClock) -> None:
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        journal = system.spawn(MemoryJournal, log_columns(Deposited), no_rows())
        boxes = await shards(system, Box, events=Deposited, journal=journal, shards=1, nodes=nodes)
        before = trio.current_time()
        with pytest.raises(CommandFailed, match=r"AskCycle.*/b waits for .*/a waits for .*/b: none of them would ever"):
            await boxes["a"].ask(Visit(["b", "a"]))
        assert trio.current_time() - before < 1.0
        boxes.ref.stop()
        await boxes.ref.terminated()


class SlowJournal(MemoryJournal):
    """Writes when the test says so."""

    @handles
    async def append(self, m: Append) -> Appended | Fenced:
        await WORLD["disk"].wait()
        done: Appended | Fenced = await super().append(m)
        return done


class Asker(Actor[Any]):
    """Asks a box to wait for the gate; answers what it is asked afterwards."""

    answers: list[int]

    @handles
    async def ask(self, m: str) -> None:
        boxes: Shards[Any] = await shards_of(self.system, Box)
        self.answers.append(await boxes["b"].ask(Wait(), command=m or None))

    @handles
    async def visited(self, m: Visit) -> str:
        return "was visited"


@pytest.mark.parametrize("asks", ["first", "again", "again, when the handler has ended"])
async def test_an_asker_that_waits_for_the_disk_only_is_in_no_circle(autojump_clock: MockClock, asks: str) -> None:
    """An entity has answered one command, whose row is on its way to the disk, and asks the asker in the next."""
    WORLD["disk"] = trio.Event()
    WORLD["disk"].set()
    async with boxes_of(1, SlowJournal) as (system, boxes), trio.open_nursery() as nursery:
        answers: list[int] = []
        WORLD["/asker"] = system.spawn(Asker, answers, name="asker")
        await boxes["b"].ask(Deposit(1))
        WORLD["disk"] = trio.Event()
        if asks != "first":
            nursery.start_soon(lambda: boxes["b"].ask(Wait(), command="one"))
            await wait_all_tasks_blocked()
        if asks == "again, when the handler has ended":
            WORLD["gate"].set()
            await wait_all_tasks_blocked()
        else:
            nursery.start_soon(boxes["b"].ask, Wait())  # keeps what follows behind it
            await wait_all_tasks_blocked()
        WORLD["/asker"].tell("" if asks == "first" else "one")
        await wait_all_tasks_blocked()
        nursery.start_soon(boxes["b"].ask, Visit(["/asker"]))
        await wait_all_tasks_blocked()
        WORLD["gate"].set()  # the box answers, and visits the asker, which waits for the disk
        await wait_all_tasks_blocked()
        assert ("/Box/0/b", "/asker") in system.observe.waits()
        assert answers == []
        WORLD["disk"].set()
    assert answers == [3 if asks == "first" else 2]


async def test_a_command_whose_asker_gave_up_before_it_began_is_not_done(autojump_clock: MockClock) -> None:
    async with boxes_of() as (_, boxes):
        box = boxes["a"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(box.ask, Wait())
            await wait_all_tasks_blocked()

            async def give_up(command: str | None) -> None:
                with trio.move_on_after(0.5):
                    await box.ask(Deposit(10), command=command)

            async def time_out(command: str | None) -> None:
                with pytest.raises(AskTimeout):
                    await box.ask(Deposit(100), command=command, timeout=0.5)

            for command in (None, "one"):
                await give_up(command)
                await time_out(command and f"{command} more")
            await give_up("one")  # as a repetition
            box.tell(Deposit(1000))  # an asker that never waited
            assert (await boxes.statistics()).under_way == 7
            WORLD["gate"].set()
        assert await box.ask(Deposit(0)) == 1001
        assert (await boxes.statistics()).under_way == 0
        assert await box.ask(Deposit(10), command="one") == 1011


async def test_a_repetition_is_done_although_the_first_asker_gave_up(autojump_clock: MockClock) -> None:
    async with boxes_of() as (_, boxes):
        box = boxes["a"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(box.ask, Wait())
            await wait_all_tasks_blocked()
            with trio.move_on_after(1.0) as scope:
                await box.ask(Deposit(10), command="one")
            assert scope.cancelled_caught
            answers = []

            async def again() -> None:
                answers.append(await box.ask(Deposit(10), command="one"))

            nursery.start_soon(again)
            await wait_all_tasks_blocked()
            WORLD["gate"].set()
        assert answers == [11]


class Unread(MemoryJournal):
    """Does not find anna before the test says so."""

    @handles
    async def find(self, m: ReadEntity) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        if m.entity == "anna":
            await WORLD["gate"].wait()
        return super().find(m)


async def test_a_command_that_timed_out_while_its_entity_was_read_is_not_done(autojump_clock: MockClock) -> None:
    WORLD["gate"] = trio.Event()
    async with ActorSystem("test", ask_timeout=5.0) as system:
        journal = system.spawn(Unread, log_columns(EVENTS), no_rows())
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        with pytest.raises(AskTimeout, match=r"^/Account/0 did not answer Deposit to entity 'anna' in 5 s$") as caught:
            await accounts["anna"].ask(Deposit(1))
        assert caught.value.actor == "/Account/0"
        WORLD["gate"].set()
        assert await accounts["anna"].ask(Deposit(10)) == 10
        assert (await accounts.statistics()).under_way == 0


async def test_a_time_out_names_the_entity_and_the_message(autojump_clock: MockClock) -> None:
    async with boxes_of() as (_, boxes):
        for ask in (boxes["a"].ask, boxes["a"].ask):  # its handler runs; it waits for that
            with pytest.raises(AskTimeout, match=r"^/Box/0/a did not answer Wait to entity 'a' in 1 s$"):
                await ask(Wait(), timeout=1.0)
        WORLD["gate"].set()


async def test_on_nodes_a_time_out_names_the_entity_and_the_message(autojump_clock: MockClock) -> None:
    WORLD["gate"] = trio.Event()
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        journal = system.spawn(MemoryJournal, log_columns(Deposited), no_rows())
        boxes = await shards(system, Box, events=Deposited, journal=journal, shards=1, nodes=nodes)
        with pytest.raises(AskTimeout, match=r"^shard 0 did not answer Wait to entity 'a' in 1 s$"):
            await boxes["a"].ask(Wait(), timeout=1.0)
        WORLD["gate"].set()
        boxes.ref.stop()
        await boxes.ref.terminated()
