"""A shard, an entity or a journal that fails takes no question with it: whoever waits for it learns of that at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.actors.durable.test_placement import APP
from tests.actors.nodes.conftest import nodes_here

from levada.actors.durable import OutcomeUnknown, Shards, log_columns, shards
from levada.actors.journal import Append, Appended, EraseEntity, Extent, Fenced, GetExtent, ReadEntity, ReadRows
from levada.framework import Actor, ActorSystem, handles, message, restart
from levada.framework.errors import ActorStopped
from levada.framework.router import group

pytestmark = pytest.mark.usefixtures("only_what_callers_see")


@attrs.define
class Gates:
    """What the journal does not do yet."""

    append: trio.Event = attrs.field(factory=trio.Event)
    find: trio.Event = attrs.field(factory=trio.Event)
    read: trio.Event = attrs.field(factory=trio.Event)

    def open(self) -> None:
        for gate in (self.append, self.find, self.read):
            gate.set()


class Held(MemoryJournal):
    """Answers when its gates are open; erases never."""

    gates: Gates = attrs.field(kw_only=True)

    @handles
    def append(self, m: Append) -> Any:
        return self._soon(self.gates.append, MemoryJournal.append, m)

    @handles
    def find(self, m: ReadEntity) -> Any:
        return self._soon(self.gates.find if m.entity else None, MemoryJournal.find, m)

    @handles
    def read(self, m: ReadRows) -> Any:
        return self._soon(self.gates.read, MemoryJournal.read, m)

    @handles
    def erase(self, _: EraseEntity) -> None:
        self.start_soon(trio.sleep_forever)
        self.reply_later()

    def _soon(self, gate: trio.Event | None, handler: Callable[..., Any], m: Any) -> None:
        self.start_soon(self._later, gate, handler, m, self.reply_later())

    async def _later(self, gate: trio.Event | None, handler: Callable[..., Any], m: Any, reply: Any) -> None:
        if gate is not None:
            await gate.wait()
        found = handler(self, m)
        reply.send(await found if hasattr(found, "__await__") else found)


async def test_every_question_to_a_shard_that_is_killed_fails_at_once(autojump_clock: MockClock) -> None:
    """Commands that are written, that wait for their entity's rows, that are repeated, that read their answer; an erasure."""
    gates = Gates()
    gates.open()
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        journal = system.spawn(lambda: Held(log_columns(EVENTS), no_rows(), gates=gates))
        accounts: Shards[Any] = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        for entity in ("anna", "bert", "carl"):
            assert await accounts[entity].ask(Deposit(1), command="old") == 1
        owner = system.lookup("/Account/0")
        assert owner is not None
        gates.append, gates.find, gates.read = trio.Event(), trio.Event(), trio.Event()
        ends: dict[str, str] = {}

        async def ask(what: str, question: Callable[[], Any]) -> None:
            try:
                ends[what] = repr(await question())
            except (OutcomeUnknown, ActorStopped) as error:
                ends[what] = type(error).__name__

        questions = {
            "is written": lambda: accounts["anna"].ask(Deposit(1)),
            "is behind": lambda: accounts["anna"].ask(Balance()),
            "with an id": lambda: accounts["anna"].ask(Deposit(1), command="one"),
            "repeated": lambda: accounts["anna"].ask(Deposit(1), command="one"),
            "reads its answer": lambda: accounts["bert"].ask(Deposit(1), command="old"),
            "is loaded": lambda: accounts["dora"].ask(Balance()),
            "waits for the load": lambda: accounts["dora"].ask(Balance()),
            "erasure": lambda: accounts.erase("carl"),
        }
        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            for what, question in questions.items():
                nursery.start_soon(ask, what, question)
                await wait_all_tasks_blocked()
            assert ends == {}
            owner.kill()
        assert ends == dict.fromkeys(questions, "OutcomeUnknown")
        assert trio.current_time() - before < 0.1
        gates.open()


@message("test.durable.break", frozen=True)
class Break:
    """Let a journal fail."""


class Breaking(Actor[Append | Break | GetExtent]):
    """Takes appends over, and fails."""

    async def started(self) -> None:
        self.system.groups.join("test.breaking", self.ref)
        self._replies: list[Any] = []

    @handles
    def extent(self, _: GetExtent) -> Extent:
        return Extent("epoch", {}, {}, "opening")

    @handles
    def append(self, _: Append) -> Appended | Fenced | None:
        self._replies.append(self.reply_later())
        return None

    @handles
    def fail(self, _: Break) -> None:
        raise OSError(5, "Input/output error")


async def test_an_append_fails_at_once_when_the_journal_of_a_keeper_restarts(autojump_clock: MockClock) -> None:
    """Through the router of this process, and the connection to the other one."""
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, 1, APP) as (nodes, _),
    ):
        kept = await nodes.spawn(Breaking, on=0, supervise=restart("permanent"))
        await kept.ask(GetExtent())
        journal: Any = system.spawn(group("test.breaking"))
        caught: list[ActorStopped] = []

        async def append() -> None:
            with pytest.raises(ActorStopped, match=r"failed: OSError\(5, 'Input/output error'\)") as failed:
                await journal.ask(Append(b""), timeout=None)
            caught.append(failed.value)

        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(append)
            await wait_all_tasks_blocked()
            kept.tell(Break())
        assert [type(error.message).__name__ for error in caught] == ["Append"] * 2
        assert trio.current_time() - before < 1.0
