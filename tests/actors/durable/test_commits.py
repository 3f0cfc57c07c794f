"""How many of the commands under way go into one append, if another process writes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

pytest.importorskip("pyarrow")

from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.surroundings import surrounded

from levada.actors.durable import Durable, applies, log_columns, shards
from levada.actors.journal import Append, Appended, Fenced
from levada.framework import ActorSystem, Asks, Ref, Reply, handles, message

pytestmark = pytest.mark.ci

ASKERS = 128
HANDLED_IN = 10e-6
"""Seconds that a handler takes, which is 1.28 ms for all askers."""
TRIALS = 36
"""Appends by which both ways of writing are tried."""


@message("test.commits.add")
class Add(Asks[int]):
    pass


@message("test.commits.added")
class Added:
    pass


class Clock:
    """A clock that handlers move, and a journal when nothing else is to be done."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Sum(Durable[Add]):
    count: int = 0

    @handles
    def add(self, m: Add) -> int:
        CLOCK.now += HANDLED_IN
        self.record(Added())
        return self.count

    @applies
    def added(self, e: Added) -> None:
        self.count += 1


class Elsewhere(MemoryJournal):
    """A journal whose writes take time in another process: handlers run meanwhile."""

    seconds: float = 0.0
    sizes: list[int] = attrs.field(factory=list)

    @handles
    def append(self, m: Append) -> Any:
        self.start_soon(self._append, m, self.reply_later(), CLOCK.now + self.seconds)

    async def _append(self, m: Append, reply: Reply[Appended | Fenced], done: float) -> None:
        while CLOCK.now < done:
            await trio.testing.wait_all_tasks_blocked()
            CLOCK.now = max(CLOCK.now, done)
        answer = self.answer(m)
        if isinstance(answer, Appended):
            self.sizes.append(answer.count)
        reply.send(answer)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The clock by which this process measures its work."""
    CLOCK.now = 0.0
    with surrounded(perf_counter=CLOCK):
        yield CLOCK


async def sizes_of_appends(seconds: float, count: int, askers: int = ASKERS) -> list[int]:
    """Return how many rows there were in each append, until there were so many appends."""
    sizes: list[int] = []
    async with ActorSystem("test", ask_timeout=None) as system:
        journal: Ref[Any] = system.spawn(partial(Elsewhere, log_columns(Added), no_rows(), seconds, sizes))
        sums = await shards(system, Sum, events=Added, journal=journal, shards=1)
        await sums["0"].ask(Add())
        del sizes[:]

        async def ask_again_and_again(number: int) -> None:
            while len(sizes) < count:
                await sums[str(number)].ask(Add())

        async with trio.open_nursery() as nursery:
            for number in range(askers):
                nursery.start_soon(ask_again_and_again, number)
    return sizes[:count]


@pytest.mark.parametrize(
    ("seconds", "share"),
    [(0.0006, ASKERS // 2), (0.00005, ASKERS), (0.1, ASKERS)],
    ids=["as long as half of the handlers", "much less", "much longer"],
)
async def test_half_is_written_while_the_other_half_is_handled_if_that_is_quicker(
    autojump_clock: trio.testing.MockClock, clock: Clock, seconds: float, share: int
) -> None:
    sizes = await sizes_of_appends(seconds, TRIALS + 14)
    assert {ASKERS, ASKERS // 2} <= set(sizes[:TRIALS])
    assert set(sizes[-10:]) == {share}, sizes


async def test_few_commands_are_written_together(autojump_clock: trio.testing.MockClock, clock: Clock) -> None:
    sizes = await sizes_of_appends(0.0005, TRIALS + 10, askers=60)
    assert set(sizes[-10:]) == {60}
