"""Crashes: entities, shards and the journal are killed while commands are under way, and the disk stops at every write.

Each client keeps a list of the answers that it got; the model is that list. A number has been added once if its command was answered, and once or
not at all if not; both its events are there, or neither; its reminder comes once; and each answer comes again, unchanged, for the same id.
"""

from __future__ import annotations

import itertools
import logging
import signal
import tempfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from tests.pace import every

from levada.actors.durable import Durable, EntityErased, OutcomeUnknown, Shards, applies, shards
from levada.actors.durable.rows import ShardLog, log_config
from levada.actors.journal import Journal, Store
from levada.framework import ActorSystem, Asks, handles, message
from levada.framework.errors import ActorStopped, AskTimeout, MailboxFull
from levada.framework.testing.simulation import World, simulate


@message("test.crashes.add")
class Add(Asks[int]):
    number: int


@message("test.crashes.list")
class List(Asks[list[int]]):
    pass


@message("test.crashes.rung")
class Rung(Asks[list[int]]):
    pass


@message("test.crashes.ring")
class Ring:
    number: int


@message("test.crashes.added")
class Added:
    number: int
    half: bool = False
    rung: bool = False


REMINDED = 3
"""Every third number is followed by a reminder."""


class Book(Durable[Add | List | Ring | Rung]):
    numbers: list[int] = attrs.field(factory=list)
    rung: list[int] = attrs.field(factory=list)
    halves: int = 0

    @handles
    async def add(self, m: Add) -> int:
        self.record(Added(m.number, half=True))
        if m.number % 2:
            await trio.lowlevel.checkpoint()
        if m.number % REMINDED == 0:
            self.remind(-1e12, Ring(m.number), key=str(m.number))
        self.record(Added(m.number))
        return len(self.numbers)

    @handles
    def ring(self, m: Ring) -> None:
        self.record(Added(m.number, half=True, rung=True), Added(m.number, rung=True))

    @handles
    def list_all(self, _: List) -> list[int]:
        return self.numbers

    @handles
    def list_rung(self, _: Rung) -> list[int]:
        return self.rung

    @applies
    def added(self, e: Added) -> None:
        if e.half:
            self.halves += 1
        else:
            (self.rung if e.rung else self.numbers).append(e.number)


SHARDS = 2
ENTITIES = ["a", "b", "c"]
GONE = "d"
"""An entity that is erased."""
SETTINGS: dict[str, Any] = {
    "events": Added,
    "shards": SHARDS,
    "snapshot_every": 5,
    "remember": 1000,
    "clock": trio.current_time,
}
CONFIG = attrs.evolve(log_config(SHARDS), block_rows=3, block_bytes=2048, segment_bytes=8192)
"""A group of commands has several blocks, and may go over the end of a segment."""
AGAIN = (OutcomeUnknown, ActorStopped, AskTimeout, MailboxFull)


@attrs.define
class Model:
    """What the clients know."""

    answers: dict[str, dict[int, int]] = attrs.field(factory=lambda: {name: {} for name in ENTITIES})
    """For each entity, numbers that were added, and the answer."""
    asked: dict[str, list[int]] = attrs.field(factory=lambda: {name: [] for name in ENTITIES})
    erased: bool = False
    """Whether the entity `GONE` is erased."""

    async def add(self, books: Shards[Any], entity: str, number: int) -> None:
        """Ask until there is an answer."""
        self.asked[entity].append(number)
        while True:
            try:
                answer = await books[entity].ask(Add(number), command=f"add-{number}")
            except AGAIN:
                await trio.lowlevel.checkpoint()
                continue
            self.answers[entity][number] = answer
            return

    async def erase(self, books: Shards[Any]) -> None:
        """Have the entity that goes add a number, and erase it, until there is an answer."""
        while not self.erased:
            try:
                await books[GONE].ask(Add(REMINDED), command="gone")
                await books.erase(GONE)
            except AGAIN:
                await trio.sleep(0.01)
            except EntityErased:
                await books.erase(GONE)
                self.erased = True
            else:
                self.erased = True

    async def check(self, books: Shards[Any]) -> None:
        """Compare with what the entities say."""
        if self.erased:
            with pytest.raises(EntityErased):
                await books[GONE].ask(List())
        for entity in ENTITIES:
            found = await books[entity].ask(List())
            answered = self.answers[entity]
            assert len(set(found)) == len(found)
            assert set(answered) <= set(found) <= set(self.asked[entity])
            for number, answer in answered.items():
                assert found[answer - 1] == number
                assert await books[entity].ask(Add(number), command=f"add-{number}") == answer
            assert await books[entity].ask(List()) == found
            rung: list[int] = []
            while len(rung) < sum(number % REMINDED == 0 for number in found):
                rung = await books[entity].ask(Rung())
                await trio.sleep(0.01)
            assert sorted(rung) == sorted(number for number in found if number % REMINDED == 0)

    def check_log(self, folder: Path) -> None:
        """Compare with the rows, read without any of the actors."""
        with Store.open(folder, None, CONFIG) as store:
            gone = [row["kind"] for _, batch in store.rows_of(GONE) for row in batch.to_pylist()]
            assert not self.erased or gone == ["$erased"]
            for entity in ENTITIES:
                batches = [batch for _, batch in store.rows_of(entity)]
                rows = [row for batch in batches for row in batch.to_pylist()]
                events = [row for row in rows if not row["kind"].startswith("$")]
                assert [row["sequence"] for row in events] == list(range(1, len(events) + 1))
                numbers = [row["number"] for row in events if not row["half"] and not row["rung"]]
                assert set(self.answers[entity]) <= set(numbers)
                assert len(set(numbers)) == len(numbers)
                for rung in (False, True):
                    each = [row for row in events if row["rung"] == rung]
                    halves = [row["number"] for row in each if row["half"]]
                    assert halves == [row["number"] for row in each if not row["half"]]


steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(ENTITIES)),
    st.tuples(st.just("kill"), st.sampled_from(["/Book/0", "/Book/1", "/Book/journal", "/Book/0/a", "/Book/1/a"])),
    st.tuples(st.just("wait"), st.integers(1, 30)),
    st.tuples(st.just("restart")),
)


async def live(folder: Path, plan: list[Any], model: Model, numbers: Any) -> None:
    """Follow a plan in as many lives of the system as it says."""
    while plan:
        async with (
            ActorSystem("test", ask_timeout=1000.0, shutdown_timeout=1000.0) as system,
            trio.open_nursery() as nursery,
        ):
            books = await shards(system, Book, journal=folder, **SETTINGS)
            while plan:
                match plan.pop(0):
                    case ["add", entity]:
                        nursery.start_soon(model.add, books, entity, next(numbers))
                    case ["kill", path]:
                        target = system.lookup(path)
                        if target is not None:
                            target.kill()
                    case ["wait", turns]:
                        for _ in range(turns):
                            await trio.lowlevel.checkpoint()
                    case _:
                        nursery.cancel_scope.cancel()
                        break
    async with ActorSystem("test", ask_timeout=1000.0, shutdown_timeout=1000.0) as system:
        await model.check(await shards(system, Book, journal=folder, **SETTINGS))
    model.check_log(folder)


def follow(plan: list[Any]) -> None:
    logging.getLogger("levada").setLevel(logging.CRITICAL + 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            clock = trio.testing.MockClock(rate=20)
            trio.run(live, Path(folder), plan, Model(), itertools.count(), clock=clock)
    finally:
        logging.getLogger("levada").setLevel(logging.NOTSET)


@pytest.mark.parametrize("victim", ["/Book/0", "/Book/1", "/Book/journal", "/Book/0/a", "/Book/1/a"])
def test_a_kill_under_way_does_nothing_twice(victim: str) -> None:
    adds = [("add", entity) for entity in ENTITIES for _ in range(2)]
    follow([*adds, ("wait", 20), *adds, ("kill", victim), *adds, ("wait", 5), ("kill", victim), *adds])


@pytest.mark.ci
@given(st.lists(steps, max_size=40))
def test_whatever_is_killed_each_command_is_done_once(plan: list[Any]) -> None:
    follow(plan)


# ---------------------------------------------------------------- the disk stops


@pytest.mark.ci
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power failure"])
def test_a_crash_at_every_call_of_the_disk_loses_nothing_that_was_answered(power: bool) -> None:
    """The process dies in the middle of a call that changes the disk, or the power fails there. The next one dies soon after."""
    step, call = every(4), 0
    for call in itertools.count(1 + power % step, step):
        crashes: list[int] = []
        simulate(partial(crash, call, power, crashes), seeds=[1])
        if not crashes:
            break
    assert call > 80


async def crash(call: int, power: bool, crashes: list[int], world: World) -> None:
    """Let the process that has the books crash at a call, and the next one at another; require that all is done once."""
    model, checked = Model(), trio.Event()
    todo = {entity: deque(range(at, 9, 3)) for at, entity in enumerate(ENTITIES)}
    victims = iter([call, 1 + call % 20])

    async def books() -> None:
        world["books"].crash_in(next(victims, 0))
        async with ActorSystem("test", ask_timeout=1000.0, shutdown_timeout=1000.0) as system:
            journal = system.spawn(lambda: Journal("/books", ShardLog([Added]).schema, config=CONFIG))
            books = await shards(system, Book, journal=journal, **{**SETTINGS, "clock": system.platform.time})
            await model.check(books)
            async with trio.open_nursery() as nursery:
                for entity in ENTITIES:
                    nursery.start_soon(add_all, books, entity)
                nursery.start_soon(model.erase, books)
            await model.check(books)
        model.check_log(Path("/books"))
        checked.set()

    async def add_all(books: Shards[Any], entity: str) -> None:
        while todo[entity]:
            await model.add(books, entity, todo[entity][0])
            todo[entity].popleft()

    await world.start("books", books, restart=1.0)
    while code := await world["books"].wait():
        assert code == -signal.SIGKILL
        crashes.append(call)
        if power:
            world["books"].power_failure(0.5)
        await trio.sleep(1.5)
    assert checked.is_set()
