"""A journal that is out of reach for a while: commands wait for it, and an append whose answer was lost is written once."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.memory_journal import MemoryJournal, Row, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import Durable, OutcomeUnknown, Shards, applies, log_columns, log_config, shards
from levada.actors.durable.testing import FaultyLog
from levada.actors.journal import Append, GetExtent, GetSchema, Journal, JournalFull, ReadEntity, TrimRows
from levada.framework import ActorSystem, Asks, handles, message
from levada.framework.errors import AskTimeout, ConfigurationError
from levada.framework.router import group

pytestmark = pytest.mark.usefixtures("only_what_callers_see")

PATIENCE = 30.0
QUESTIONS = 30
"""More than `some_work` asks of its journal."""


def in_time(_: int, __: Any) -> str:
    """Every question is answered."""
    return ""


@attrs.define
class Wire:
    """Which questions a journal does not get, and which answers are lost."""

    fate: Callable[[int, Any], str] = in_time
    """Of the nth question: ``question`` and ``answer`` are what is lost, ``refused`` is a full disk."""
    asked: int = 0


class Cut(MemoryJournal):
    """A journal behind a connection that breaks."""

    wire: Wire = attrs.field(kw_only=True)

    @handles
    def any(self, m: Append | GetExtent | ReadEntity | object) -> None:
        self.start_soon(self._answer, m, self.reply_later())

    async def _answer(self, m: Any, reply: Any) -> None:
        fate = self.wire.fate(self.wire.asked, m)
        self.wire.asked += 1
        if fate == "refused":
            reply.fail(JournalFull("the disk is full", path="/var/log"))
        elif fate == "question":
            reply.fail(OSError("the connection is reset"))
        else:
            found = getattr(MemoryJournal, HANDLERS[type(m).__name__])(self, m)
            found = await found if hasattr(found, "__await__") else found
            if fate == "answer":
                reply.fail(OSError("the connection is reset"))
            else:
                reply.send(found)


HANDLERS = {"Append": "append", "GetExtent": "extent", "GetSchema": "columns", "ReadEntity": "find", "ReadRows": "read"}


@asynccontextmanager
async def cut_off(
    rows: list[list[Row]], wire: Wire, cls: Any = Account, events: Any = EVENTS, **settings: Any
) -> AsyncIterator[tuple[ActorSystem, Shards[Any]]]:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(lambda: Cut(log_columns(events), rows, wire=wire))
        settings = {"shards": 1, "patience": PATIENCE, "idle": 10.0, **settings}
        yield system, await shards(system, cls, events=events, journal=journal, **settings)


async def some_work(accounts: Shards[Any]) -> None:
    """Commands that write, at the same time and one after the other; a repetition from the log; an entity that is read again."""
    answers: list[int] = []

    async def deposit() -> None:
        answers.append(await accounts["anna"].ask(Deposit(1)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(deposit)
    assert sorted(answers) == [1, 2, 3]
    assert await accounts["anna"].ask(Deposit(1), command="four") == 4
    await trio.sleep(20.0)
    assert await accounts["anna"].ask(Balance()) == 4
    assert await accounts["anna"].ask(Deposit(1), command="four") == 4
    assert await accounts["anna"].ask(Deposit(1)) == 5


def _lost_from(first: int, end: int, what: str, number: int, _: Any) -> str:
    return what if first <= number < end else ""


@pytest.mark.parametrize("lost", ["question", "answer"])
@pytest.mark.parametrize("times", [1, 3])
async def test_each_question_and_each_answer_may_be_lost(autojump_clock: MockClock, lost: str, times: int) -> None:
    """The opening asks some too. The two that `shards` itself asks are errors of its own."""
    asked = math.inf
    first = 3  # after those of `shards`
    while first < asked:
        rows, wire = no_rows(), Wire()
        wire.fate = partial(_lost_from, first, first + times, lost)
        async with cut_off(rows, wire) as (_, accounts):
            await some_work(accounts)
        asked = wire.asked - times
        kinds = [row["kind"] for row in rows[0]]
        assert kinds == ["$owned", *["test.durable.deposited"] * 5], f"question {first}"
        first += 1
    assert 10 < first < QUESTIONS


async def test_after_its_patience_commands_fail_and_the_shard_goes_on_when_the_journal_is_back(
    autojump_clock: MockClock,
) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        wire.fate = lambda _, m: "question"
        before = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await accounts["anna"].ask(Deposit(1))
        assert PATIENCE <= trio.current_time() - before < PATIENCE + 1.0
        with pytest.raises(AskTimeout):
            await accounts["anna"].ask(Balance(), timeout=100.0)
        wire.fate = in_time
        assert await accounts["anna"].ask(Balance()) == 1
        assert await accounts["anna"].ask(Deposit(1)) == 2


async def test_a_read_waits_as_long(autojump_clock: MockClock) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire, patience=5.0) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        wire.fate = lambda _, m: "question" if isinstance(m, ReadEntity) else ""
        before = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await accounts["bert"].ask(Balance())
        assert 5.0 <= trio.current_time() - before < 6.0


async def test_a_command_waits_no_longer_than_its_own_time(autojump_clock: MockClock) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        wire.fate = lambda _, m: "question"
        before = trio.current_time()
        with pytest.raises(AskTimeout):
            await accounts["anna"].ask(Deposit(1), timeout=3.0)
        assert trio.current_time() - before == pytest.approx(3.0)
        wire.fate = in_time
        assert await accounts["anna"].ask(Balance()) == 2


async def test_a_journal_that_has_ended_is_not_waited_for(autojump_clock: MockClock) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        assert accounts.journal is not None
        accounts.journal.kill()
        await accounts.journal.terminated()
        before = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await accounts["anna"].ask(Deposit(1))
        assert trio.current_time() == before


def owned(rows: list[list[Row]]) -> None:
    """Write as another owner."""
    row = dict.fromkeys(rows[0][0]) | {"offset": len(rows[0]), "entity": "", "kind": "$owned", "_data": b"another"}
    rows[0].append({**row, "sequence": 0, "time": rows[0][-1]["time"]})


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("more", [1, 2])
async def test_rows_of_another_owner_are_not_taken_for_its_own(
    autojump_clock: MockClock, written: bool, more: int
) -> None:
    """The other owner has written one row or two, before those of the shard could be written, or behind them."""
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1

        def fate(_: int, m: Any) -> str:
            return ("answer" if written else "question") if isinstance(m, Append) else ""

        wire.fate = fate
        answers: list[int | None] = []

        async def deposit() -> None:
            try:
                answers.append(await accounts["anna"].ask(Deposit(1)))
            except OutcomeUnknown:
                answers.append(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deposit)
            await trio.sleep(0.01)
            for _ in range(more):
                owned(rows)
            wire.fate = in_time
        assert answers == [2 if written else None]
        if written:  # it learns of the other owner with its next append
            await deposit()
            assert answers == [2, None]
        assert await accounts["anna"].ask(Deposit(1)) == 2 + written
        kinds = [row["kind"] for row in rows[0]]
        mine = "test.durable.deposited"
        assert kinds == ["$owned", *[mine] * (1 + written), *["$owned"] * (more + 1), mine]


async def test_a_refusal_after_a_lost_answer_says_nothing_of_the_rows(autojump_clock: MockClock) -> None:
    """The first attempt was written, and the disk was full when it was sent again: the shard asks on until it knows."""
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        fates = ["answer", *["refused"] * 4]
        wire.fate = lambda _, m: fates.pop(0) if isinstance(m, Append) and fates else ""
        assert await accounts["anna"].ask(Deposit(1)) == 2
        assert fates == []

        wire.fate = lambda _, m: "refused" if isinstance(m, Append) else ""
        with pytest.raises(JournalFull):  # nothing was lost before
            await accounts["anna"].ask(Deposit(1))
        assert await accounts["anna"].ask(Balance()) == 2
    assert len(rows[0]) == 3


async def test_a_refusal_for_all_its_patience_leaves_the_outcome_unknown(autojump_clock: MockClock) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire) as (_, accounts):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        fates = ["answer"]
        wire.fate = lambda _, m: (fates.pop(0) if fates else "refused") if isinstance(m, Append) else ""
        with pytest.raises(OutcomeUnknown):
            await accounts["anna"].ask(Deposit(1))
        assert await accounts["anna"].ask(Balance()) == 2


@message("test.lost.measured")
class Measured:
    value: float


@message("test.lost.measure")
class Measure(Asks[int]):
    value: float


class Gauge(Durable[Measure]):
    count: int = 0

    @handles
    def measure(self, m: Measure) -> int:
        self.record(Measured(m.value))
        return self.count

    @applies
    def measured(self, e: Measured) -> None:
        self.count += 1


async def test_an_event_that_equals_nothing_is_found_again(autojump_clock: MockClock) -> None:
    rows, wire = no_rows(), Wire()
    async with cut_off(rows, wire, Gauge, Measured) as (_, gauges):
        fates = ["answer"]
        wire.fate = lambda _, m: fates.pop(0) if isinstance(m, Append) and fates else ""
        assert await gauges["anna"].ask(Measure(math.nan)) == 1
        assert await gauges["anna"].ask(Measure(1.0)) == 2
    assert len(rows[0]) == 3


KEPT: list[list[Row]] = []
"""The rows of the journal that is on a node."""
FAILING: list[trio.Event] = []
"""An event is set when the journal has written rows and fails."""


class Kept(MemoryJournal):
    """Is on a node, and is reached through a router, as the journal of a keeper."""

    def __init__(self) -> None:
        super().__init__(log_columns(EVENTS), KEPT)

    async def started(self) -> None:
        self.system.groups.join("test.lost.kept", self.ref)

    @handles
    async def append(self, m: Append) -> Any:
        done = await super().append(m)
        if FAILING:
            FAILING.pop().set()
            raise OSError(5, "Input/output error")
        return done


async def test_on_nodes_an_append_is_known_after_the_end_of_its_journal(autojump_clock: MockClock) -> None:
    """From the shard's node to the driver's router, and from there to the journal's node."""
    KEPT[:] = no_rows()
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 2, APP) as (nodes, _),
    ):
        journal: Any = system.spawn(group("test.lost.kept"))
        kept = await nodes.spawn(Kept, on=0)
        await kept.ask(GetSchema())
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, nodes=nodes)
        assert await accounts["anna"].ask(Deposit(1)) == 1
        written = trio.Event()
        FAILING.append(written)
        answers: list[int] = []

        async def deposit() -> None:
            answers.append(await accounts["anna"].ask(Deposit(1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deposit)
            await written.wait()
            await kept.terminated()
            await wait_all_tasks_blocked()
            assert answers == []
            await nodes.spawn(Kept, on=1)
        assert answers == [2]
        assert await accounts["anna"].ask(Deposit(1)) == 3
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert [row["kind"] for row in KEPT[0]] == ["$owned", *["test.durable.deposited"] * 3]


async def test_an_append_is_found_again_when_its_first_rows_were_trimmed_before_its_answer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The append ends with a snapshot, so the event before it may go at once."""
    is_away = False
    async with ActorSystem("test", ask_timeout=1e4) as system:
        factory = partial(Journal, tmp_path / "log", log_columns(EVENTS), config=log_config(1))
        real = system.spawn(factory)
        journal = system.spawn(FaultyLog, real, lambda *_: "answer" if is_away else "")
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1, snapshot_every=1)
        assert await accounts["anna"].ask(Deposit(1)) == 1
        is_away = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(accounts["anna"].ask, Deposit(1)))
            await trio.sleep(1)
            assert (await real.ask(GetExtent())).end == {0: 5}
            assert (await real.ask(TrimRows(0, 1e12))).rows == 3
            is_away = False
        assert await accounts["anna"].ask(Deposit(1)) == 3


@pytest.mark.parametrize("patience", [-1.0, math.nan, "x", None])
async def test_a_patience_that_is_no_time_is_refused(autojump_clock: MockClock, patience: Any) -> None:
    async with ActorSystem("test") as system:
        with pytest.raises(ConfigurationError, match=r"patience is .*, wanted seconds, 0 or more"):
            await shards(system, Account, events=EVENTS, journal="nowhere", shards=1, patience=patience)


async def test_an_outage_has_one_line_in_the_log_and_one_at_its_end(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """However many shards and entities wait."""
    caplog.set_level("WARNING", "levada")
    is_away = False
    async with ActorSystem("test", ask_timeout=1e4) as system:
        factory = partial(Journal, tmp_path / "log", log_columns(EVENTS), config=log_config(4))
        journal = system.spawn(FaultyLog, system.spawn(factory), lambda *_: "question" if is_away else "")
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=4)
        await accounts["anna"].ask(Deposit(1))
        for _ in range(2):
            caplog.clear()
            is_away = True
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(partial(accounts[f"a{number}"].ask, Deposit(1)))
                await trio.sleep(10)
                is_away = False
            events = [vars(each).get("event") for each in caplog.records if each.name == "levada.actors.durable"]
            assert events == ["journal_away", "journal_back"]
