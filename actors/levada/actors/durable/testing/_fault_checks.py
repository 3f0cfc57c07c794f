"""The checks of durable actors over a log that is out of reach now and then."""

from __future__ import annotations

import datetime as dt
import enum
import math
from decimal import Decimal
from typing import Any
from uuid import UUID

import attrs
import trio

from levada.actors.durable.entity import Durable, applies
from levada.actors.durable.entry import shards
from levada.actors.durable.errors import OutcomeUnknown
from levada.actors.durable.rows import log_columns
from levada.framework import Asks, Ref, handles, message

from ._promises import MadeLog, Maker, promise
from .faulty_log import FaultyLog, Lost


class Colour(enum.Enum):
    """Is kept by its value."""

    RED = "red"


@message("levada.durable.testing.place")
class Place:
    """A part of an event."""

    name: str
    height: float | None = None


@message("levada.durable.testing.noted")
class Noted:
    """An event with every type of column."""

    number: int
    flag: bool
    share: float
    text: str
    data: bytes
    moment: dt.datetime
    day: dt.date
    span: dt.timedelta
    price: Decimal
    id: UUID
    colour: Colour
    place: Place
    numbers: list[int]
    names: dict[str, int]
    places: tuple[Place, ...]
    maybe: str | None
    either: int | str


@message("levada.durable.testing.note")
class Note(Asks[int]):
    """Record an event; the answer is how many there are."""

    event: Noted


@message("levada.durable.testing.get_notes")
class GetNotes(Asks[list[Noted]]):
    """Ask for all events."""


class Book(Durable[Note | GetNotes]):
    """Keeps its events."""

    notes: list[Noted] = attrs.field(factory=list)

    @handles
    def note(self, m: Note) -> int:
        """Record an event."""
        self.record(m.event)
        return len(self.notes)

    @handles
    def all(self, _: GetNotes) -> list[Noted]:
        """Answer with all events."""
        return self.notes

    @applies
    def noted(self, e: Noted) -> None:
        """Keep an event."""
        self.notes = [*self.notes, e]


COLUMNS = log_columns(Noted)


def event(number: int, **values: Any) -> Noted:
    """Make an event."""
    usual: dict[str, Any] = {
        "flag": True, "share": 0.1, "text": "text", "data": b"\0\xff", "moment": dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC),
        "day": dt.date(2024, 2, 29), "span": dt.timedelta(days=-1, microseconds=5), "price": Decimal("12345678901234567890.000000000000000001"),
        "id": UUID(int=7), "colour": Colour.RED, "place": Place("here", 1.5), "numbers": [1, -2], "names": {"a": 1, "": 2},
        "places": (Place("a"), Place("b", math.inf)), "maybe": None, "either": "one",
    }  # fmt: skip
    return Noted(number, **{**usual, **values})


EVENTS = [
    event(0),
    event(1, share=-0.0, text="", data=b"", numbers=[], names={}, places=(), maybe="", either=2, flag=False),
    event(-(1 << 63), share=math.inf, moment=dt.datetime(1, 1, 1, tzinfo=dt.UTC), day=dt.date(1, 1, 1)),
    event((1 << 63) - 1, share=5e-324, moment=dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC), day=dt.date(9999, 12, 31)),
    event(4, text="ä€𝄞'\"\\\n", price=Decimal("-0.000000000000000001"), place=Place("x" * 10_000)),
]  # fmt: skip


async def books(made: MadeLog, journal: Ref[Any], name: str, **more: Any) -> Any:
    """Start durable actors over a log."""
    return await shards(made.system, Book, events=Noted, journal=journal, shards=1, nodes=None, name=name, **more)


async def end(accounts: Any) -> None:
    """End them."""
    accounts.ref.stop()
    await accounts.ref.terminated()


@promise
async def every_type_of_value_comes_back_as_it_was(make: Maker) -> None:
    """From memory, and read from the log."""
    async with make(COLUMNS, 1) as made:
        for life in range(2):
            found = await books(made, made.ref, f"books-{life}")
            if not life:
                answers = [
                    await found["one"].ask(Note(each), command=f"c{number}") for number, each in enumerate(EVENTS)
                ]
                assert answers == [1, 2, 3, 4, 5]
            assert await found["one"].ask(GetNotes()) == EVENTS
            assert await found["one"].ask(Note(EVENTS[1]), command="c1") == 2
            await end(found)


@promise
async def of_two_owners_one_is_fenced_off(make: Maker) -> None:
    """By both ways. Each takes the shard back when it learns of the other."""
    async with make(COLUMNS, 1) as made:
        one = await books(made, made.ref, "one")
        assert await one["x"].ask(Note(event(1)), command="a") == 1
        two = await books(made, made.other or made.ref, "two")
        assert await two["x"].ask(Note(event(2)), command="b") == 2
        while True:
            try:
                assert await one["x"].ask(Note(event(3)), command="c") == 3
            except OutcomeUnknown:
                continue
            break
        for found in (one, two):
            await end(found)


async def _work(accounts: Any, turn: str) -> None:
    """Commands at the same time and one after the other, a repetition, and entities that are read again."""
    answers: list[int] = []

    async def note() -> None:
        answers.append(await accounts[f"{turn} a"].ask(Note(event(1))))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(note)
    assert sorted(answers) == [1, 2, 3]
    assert await accounts[f"{turn} a"].ask(Note(event(2)), command="four") == 4
    assert await accounts[f"{turn} b"].ask(Note(event(1))) == 1  # the first one leaves memory
    assert await accounts[f"{turn} a"].ask(Note(event(2)), command="four") == 4
    assert [each.number for each in await accounts[f"{turn} a"].ask(GetNotes())] == [1, 1, 1, 2]
    assert await accounts.erase(f"{turn} b") >= 0


@attrs.define
class _Losing:
    """Loses some questions, one after the other, or their answers."""

    first: int
    count: int
    what: Lost
    asked: int = 0

    def __call__(self, number: int, _: object) -> Lost:
        self.asked = number + 1
        return self.what if self.first <= number < self.first + self.count else ""


_FIRST = 3
"""The questions that `shards` itself asks are not asked again."""


@promise
async def each_question_and_each_answer_may_be_lost(make: Maker) -> None:
    """Once, or two in turn. Commands without ids are done once, and answered."""
    async with make(COLUMNS, 1) as made:
        losses: list[tuple[Lost, int]] = [("question", 1), ("answer", 1), ("answer", 2)]
        for what, count in losses:
            first, asked = _FIRST, math.inf
            while first < asked:
                losing = _Losing(first, count, what)
                journal = made.system.spawn(FaultyLog, made.ref, losing)
                name = f"{what}-{count}-{first}"
                accounts = await books(made, journal, name, max_live=1)
                await _work(accounts, name)
                asked = losing.asked - count
                await end(accounts)
                journal.stop()
                first += 1
            assert first > 2 * _FIRST


@promise
async def kills_leave_every_command_done_once(make: Maker) -> None:
    """The store is killed while commands without ids are under way."""
    async with make(COLUMNS, 1) as made:
        if made.restart is None:
            return
        accounts = await books(made, made.ref, "killed")
        answers: dict[str, list[int]] = {f"e{number}": [] for number in range(4)}
        kills, restart = 0, made.restart

        async def note(name: str) -> None:
            while kills < 3:
                answers[name].append(await accounts[name].ask(Note(event(1)), timeout=None))

        async def kill() -> None:
            nonlocal kills
            for _ in range(3):
                for _ in range(5):
                    await accounts["other"].ask(Note(event(1)), timeout=None)
                await restart()
                kills += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            for name in answers:
                nursery.start_soon(note, name)
        for name, found in answers.items():
            assert found == [*range(1, len(found) + 1)], name
            assert len(await accounts[name].ask(GetNotes(), timeout=None)) == len(found)
        await end(accounts)
