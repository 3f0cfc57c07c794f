"""Durable actors on nodes: where entities are, and what happens to commands when nodes end or come back."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited
from tests.actors.durable.memory_journal import MemoryJournal, no_rows
from tests.actors.nodes.conftest import Task, nodes_here

from levada.actors.durable import CommandReused, Durable, OutcomeUnknown, Shards, applies, shards, shards_of
from levada.actors.durable.hosting import FINISHING, UNUSED, CheckHost, Close, EndHost, Host, Open
from levada.actors.durable.placement import target
from levada.actors.durable.rows import ShardLog, log_config
from levada.actors.durable.settings import EntityLimits, Terms
from levada.actors.durable.turns import EntityCommand
from levada.actors.journal import GetExtent, Journal, Store
from levada.actors.nodes import Member, MemberState, NodeDown, Nodes
from levada.framework import Actor, ActorSystem, Asks, Failed, Killed, Normal, handles, message
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError

APP = "tests.actors.durable.test_placement:app"


@message("test.durable.where", frozen=True)
class Where(Asks[str]):
    """Ask an entity for its node."""


@message("test.durable.slow", frozen=True)
class Slow(Asks[int]):
    """Deposit, after a while."""

    amount: int


@message("test.durable.refuse", frozen=True)
class Refuse(Asks[int]):
    """Ask an entity to fail."""


class Placed(Durable[Deposit | Balance | Where | Slow | Refuse]):
    """An account that tells where it is."""

    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    async def slow(self, m: Slow) -> int:
        await trio.sleep(0.05)
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @handles
    def where(self, _: Where) -> str:
        return self.system.name

    @handles
    def refuse(self, _: Refuse) -> int:
        self.record(Deposited(1))
        raise ValueError("no")

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount


@message("test.durable.ask_there", frozen=True)
class AskThere(Asks[int]):
    entity: str


@message("test.durable.find_twice", frozen=True)
class FindTwice(Asks[bool]):
    """Ask whether two tasks that look for the shards together find the same."""


class Clerk(Actor[AskThere | FindTwice]):
    """Asks an entity from its own node."""

    @handles
    async def find(self, _: FindTwice) -> bool:
        found = []

        async def look() -> None:
            found.append(await shards_of(self.system, Placed))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            nursery.start_soon(look)
        return found[0] is found[1]

    @handles
    async def ask(self, m: AskThere) -> int:
        accounts = await shards_of(self.system, Placed)
        return await accounts[m.entity].ask(Deposit(1))


async def app(system: ActorSystem) -> AsyncIterator[list[Any]]:
    """What runs on nodes."""
    yield []


@asynccontextmanager
async def placed(
    folder: Path, n: int = 2, cls: type[Durable[Any]] = Placed, **settings: Any
) -> AsyncIterator[tuple[Shards[Any], Nodes, list[Task]]]:
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        nodes_here(system, n, APP) as (nodes, tasks),
    ):
        accounts = await shards(
            system, cls, **{"events": Deposited, "journal": folder, "shards": 8, "nodes": nodes, **settings}
        )
        yield accounts, nodes, tasks
        accounts.ref.stop()
        await accounts.ref.terminated()


def names(n: int) -> list[str]:
    return [f"e{number}" for number in range(n)]


def rows_of(folder: Path, shards: int = 8) -> list[dict[str, Any]]:
    found = []
    with Store.open(folder, None, log_config(shards)) as store:
        for number in range(shards):
            for _, batch in store.batches(number, 0):
                found += [row for row in batch.to_pylist() if row["entity"]]
    return found


def member(name: str, state: MemberState = MemberState.UP) -> Member:
    return Member(name, 0, name.encode(), state, 1, "here", "", 0.0, 0)


def test_a_shard_moves_only_if_its_node_comes_or_goes() -> None:
    three = [member("n0"), member("n1"), member("n2")]
    before = [target(three, shard) for shard in range(600)]
    assert {found.name: before.count(found) for found in before if found} == {"n0": 214, "n1": 187, "n2": 199}
    after = [target([*three[:2], member("n2", MemberState.DRAINING)], shard) for shard in range(600)]
    assert [a for a, b in zip(after, before, strict=True) if b and b.name != "n2"] == [
        b for b in before if b and b.name != "n2"
    ]
    assert {found.name for found in after if found} == {"n0", "n1"}
    assert target([], 0) is None


async def test_entities_live_on_nodes_and_are_reached_from_everywhere(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, nodes, _):
        there = {name: await accounts[name].ask(Where()) for name in names(16)}
        assert set(there.values()) == {"n0", "n1"}
        assert [await accounts[name].ask(Deposit(2)) for name in names(16)] == [2] * 16
        for node in ("n0", "n1"):
            clerk = await nodes.spawn(Clerk, on=node)
            assert await clerk.ask(FindTwice())
            assert [await clerk.ask(AskThere(name)) for name in names(3)] == [3 if node == "n0" else 4] * 3
        assert (await accounts.statistics()).live == 16
        with pytest.raises(ActorStopped, match=r"/levada/Placed/\S+/e0 failed"):  # the path of levada top
            await accounts["e0"].ask(Refuse())


@pytest.mark.ci
async def test_a_command_with_an_id_survives_the_loss_of_its_node(tmp_path: Path) -> None:
    async with placed(tmp_path, 3) as (accounts, _, tasks):
        answers: dict[str, int] = {}
        answered, progress = trio.open_memory_channel[str](math.inf)

        async def customer(name: str) -> None:
            for number in range(12):
                answers[f"{name}-{number}"] = await accounts[name].ask(Deposit(1), command=f"{name}-{number}")
                answered.send_nowait(name)

        async with trio.open_nursery() as nursery:
            for name in names(8):
                nursery.start_soon(customer, name)
            for _ in range(20):
                await progress.receive()
            tasks[0].kill()
            for _ in range(40):
                await progress.receive()
            tasks[1].kill()
        assert answers == {f"{name}-{number}": number + 1 for name in names(8) for number in range(12)}
        again = {key: await accounts[key.partition("-")[0]].ask(Deposit(1), command=key) for key in answers}
        assert again == answers
        assert [await accounts[name].ask(Balance()) for name in names(8)] == [12] * 8
    found = [(row["entity"], row["sequence"]) for row in rows_of(tmp_path) if row["kind"] == "test.durable.deposited"]
    assert sorted(found) == sorted((name, number) for name in names(8) for number in range(1, 13))


@pytest.mark.ci
async def test_a_node_that_drains_loses_no_command_not_even_one_without_an_id(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, nodes, _):
        done = dict.fromkeys(names(8), 0)
        answered, progress = trio.open_memory_channel[str](math.inf)

        async def customer(name: str, ends: trio.CancelScope) -> None:
            with ends:
                while True:
                    with trio.CancelScope(shield=True):  # an answer counts
                        done[name] = await accounts[name].ask(Slow(1))
                    answered.send_nowait(name)
                    await trio.lowlevel.checkpoint()

        async def each_is_answered(times: int) -> None:
            left = dict.fromkeys(done, times)
            while left:
                name = await progress.receive()
                if name in left:
                    left[name] -= 1
                    if not left[name]:
                        del left[name]

        async with trio.open_nursery() as nursery:
            scopes = {name: trio.CancelScope() for name in done}
            for name, scope in scopes.items():
                nursery.start_soon(customer, name, scope)
            await each_is_answered(2)
            await nodes.restart("n0")
            await each_is_answered(2)
            await nodes.drain("n1")
            await each_is_answered(2)
            for scope in scopes.values():
                scope.cancel()
        assert {name: await accounts[name].ask(Balance()) for name in done} == done
        assert {await accounts[name].ask(Where()) for name in done} == {"n0"}


async def test_a_command_without_an_id_says_that_its_outcome_is_unknown(tmp_path: Path) -> None:
    async with placed(tmp_path, 1) as (accounts, _, tasks):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(
                    OutcomeUnknown, match="Slow of entity 'anna' is not done, or not known to be"
                ) as info:
                    await accounts["anna"].ask(Slow(1))
                assert info.value.entity == "anna"

            nursery.start_soon(ask)
            await trio.sleep(0.01)
            tasks[0].kill()
        assert await accounts["anna"].ask(Balance()) in (1, 2)


LOG = ShardLog((Deposited,))
TERMS = Terms(
    cls=f"{Placed.__module__}:Placed",
    schema=LOG.schema.serialize().to_pybytes(),
    shards=1,
    limits=EntityLimits(remember=10, snapshot_every=100, max_live=10, patience=0.0),
)


async def test_a_host_that_the_driver_does_not_know_ends(autojump_clock: MockClock) -> None:
    """Its node was stopped when it was to start it, and the driver has made another since."""
    async with ActorSystem("driver") as system, nodes_here(system, 1, APP):
        unknown, used = (system.spawn(Host, TERMS, system.spawn(Mute)) for _ in range(2))
        await used.ask(CheckHost(), timeout=None)
        await trio.sleep(UNUSED + 1)
        assert not unknown.is_alive
        assert used.is_alive


async def test_of_two_owners_of_a_shard_the_later_one_writes(tmp_path: Path) -> None:
    """As when a node is out of reach for the driver, but not dead. The earlier one does not take the shard back."""
    async with ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system, nodes_here(system, 1, APP):
        journal = system.spawn(partial(Journal, tmp_path, LOG.schema, config=log_config(1)))
        first, second = (system.spawn(Host, TERMS, journal) for _ in range(2))
        one = await first.ask(Open(0))
        assert await one.ask(EntityCommand("anna", Deposit(1), "a")) == 1
        two = await second.ask(Open(0))
        assert await two.ask(EntityCommand("anna", Deposit(1), "b")) == 2
        with pytest.raises(OutcomeUnknown, match="ask again"):
            await one.ask(EntityCommand("anna", Deposit(1), "c"))
        assert isinstance(await one.terminated(), Failed)
        assert await two.ask(EntityCommand("anna", Deposit(1), "c")) == 3
        assert two.is_alive
    rows = [row["command"] for row in rows_of(tmp_path, 1)]
    assert rows == ["a", "b", "c"]


async def test_a_shard_that_comes_back_is_read_anew(tmp_path: Path) -> None:
    """The host still has the shard, and has not noticed that another one had it since."""
    async with ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system, nodes_here(system, 1, APP):
        journal = system.spawn(partial(Journal, tmp_path, LOG.schema, config=log_config(1)))
        first, second = (system.spawn(Host, TERMS, journal) for _ in range(2))
        one = await first.ask(Open(0))
        assert await one.ask(EntityCommand("anna", Deposit(1))) == 1
        two = await second.ask(Open(0))
        assert await two.ask(EntityCommand("anna", Deposit(1), "b")) == 2
        again = await first.ask(Open(0))
        assert await again.ask(EntityCommand("anna", Balance())) == 2
        assert await again.ask(EntityCommand("anna", Deposit(1), "b")) == 2
        assert isinstance(await one.terminated(), Killed)
        await first.ask(Close(0))
        assert not again.is_alive


class Mute(Actor[Any]):
    """A journal that does not answer."""

    def __attrs_post_init__(self) -> None:
        self.open: list[Any] = []

    @handles
    def wait(self, _: GetExtent) -> None:
        self.open.append(self.reply_later())


async def test_a_shard_that_waits_for_its_journal_can_be_closed(autojump_clock: MockClock) -> None:
    async with ActorSystem("driver") as system, nodes_here(system, 1, APP):
        host = system.spawn(Host, TERMS, system.spawn(Mute))
        shard = await host.ask(Open(0), timeout=None)
        began = trio.current_time()
        await host.ask(Close(0), timeout=None)
        assert trio.current_time() - began == pytest.approx(FINISHING)
        assert isinstance(await shard.terminated(), Killed)
        await host.ask(EndHost())
        with pytest.raises(ActorStopped):
            await host.ask(Open(0))


async def test_a_host_that_ends_lets_its_shards_finish_and_opens_no_more(autojump_clock: MockClock) -> None:
    rows = no_rows()
    async with ActorSystem("driver") as system, nodes_here(system, 1, APP) as (nodes, _):
        host, ending = (system.spawn(Host, TERMS, system.spawn(MemoryJournal, LOG.schema, rows)) for _ in range(2))
        shard = await host.ask(Open(0))
        for amount in (1, 2, 3):
            shard.tell(EntityCommand("anna", Slow(amount)))
        await host.ask(EndHost())
        assert await shard.terminated() == Normal()
        assert [row["amount"] for row in rows[0] if row["entity"]] == [1, 2, 3]
        await ending.ask(CheckHost())
        await nodes.leave(1.0, last=True)
        with pytest.raises(ActorError, match="driver is about to end"):
            await ending.ask(Open(0))


async def test_a_handler_that_raises_fails_its_command_at_once(tmp_path: Path) -> None:
    """It is the entity that failed, not its shard: nothing is asked again."""
    async with placed(tmp_path, 1) as (accounts, _, _):
        assert await accounts["anna"].ask(Deposit(2), command="first") == 2
        for command in (None, "second"):
            with pytest.raises(ActorStopped, match=r"anna failed: ValueError\('no'\)"):
                await accounts["anna"].ask(Refuse(), command=command)
        assert await accounts["anna"].ask(Balance()) == 2
        assert (await accounts.statistics()).replayed == 3


async def test_errors_of_entities_are_the_same_as_in_one_process(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, _, _):
        await accounts["anna"].ask(Deposit(1), command="one")
        with pytest.raises(CommandReused, match="'one' of entity 'anna' was another message before"):
            await accounts["anna"].ask(Deposit(2), command="one")
        with pytest.raises(ConfigurationError, match="Placed has no handler for AskThere"):
            await accounts["anna"].ask(AskThere("x"))


async def test_a_class_that_a_node_does_not_know_is_refused(tmp_path: Path) -> None:
    class Nested(Account):
        pass

    async with ActorSystem("driver") as system, nodes_here(system, 1, APP) as (nodes, _):
        with pytest.raises(ConfigurationError, match="Nested is inside a function"):
            await shards(system, Nested, events=EVENTS, journal=tmp_path, nodes=nodes)


async def test_a_node_that_comes_back_with_another_class_fails_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the node and the class; when the node has the class again, so do its shards. All of them are one warning in ten seconds."""
    caplog.set_level(logging.CRITICAL, "levada")
    caplog.set_level(logging.WARNING, "levada.actors.durable")
    began = trio.current_time()
    async with placed(tmp_path, 1) as (accounts, _, tasks):
        assert await accounts["anna"].ask(Deposit(1)) == 1
        with monkeypatch.context() as changed:
            changed.setattr(sys.modules[__name__], "Placed", Account)
            tasks[0].kill()
            says = r"shard \d: n0: .*:Placed has other events on this node than in the driver"
            with pytest.raises(ConfigurationError, match=says):
                await accounts["anna"].ask(Deposit(1), command="one")
            with pytest.raises(ConfigurationError, match=says):
                accounts["anna"].tell(Deposit(1))
            with pytest.raises(ConfigurationError, match=says):
                await accounts["anna"].send(Deposit(1))
        answer = None
        while answer is None:
            try:
                answer = await accounts["anna"].ask(Deposit(1), command="one")
            except ConfigurationError:
                await trio.lowlevel.checkpoint()
        assert answer == 2
    told = [record for record in caplog.records if getattr(record, "event", "") == "shard_not_opened"]
    assert 1 <= len(told) <= 1 + (trio.current_time() - began) / 10


async def test_shards_that_nobody_started_are_not_found(tmp_path: Path) -> None:
    async with ActorSystem("alone") as system:
        with pytest.raises(ConfigurationError, match="is neither a node nor the driver"):
            await shards_of(system, Placed)
        accounts = await shards(system, Placed, events=Deposited, journal=tmp_path, shards=2)
        assert await shards_of(system, Placed) is accounts
        with pytest.raises(ConfigurationError, match=r"the shards 'Placed' are of Placed, not of Account"):
            await shards_of(system, Account, name="Placed")


async def test_the_end_of_the_shards_fails_what_waits(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, _, _):
        await accounts["anna"].ask(Deposit(1))
        accounts.ref.stop()
        await accounts.ref.terminated()
        with pytest.raises(ActorStopped, match="the shards have ended"):
            await accounts["anna"].ask(Deposit(1))
        with pytest.raises(ActorStopped, match="the shards have ended"):
            accounts["anna"].tell(Deposit(1))


async def test_shards_go_back_to_their_node_when_it_comes_back(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, nodes, tasks), nodes.events() as events:

        async def homes() -> dict[str, str]:
            return {name: await accounts[name].ask(Where()) for name in names(8)}

        before = await homes()
        assert set(before.values()) == {"n0", "n1"}
        tasks[0].kill()
        assert isinstance(await events.receive(), NodeDown)
        while await homes() != before:
            await trio.lowlevel.checkpoint()


async def test_a_message_that_is_sent_to_an_entity_on_a_node_comes_once(tmp_path: Path) -> None:
    async with placed(tmp_path) as (accounts, _, _):
        for amount in (1, 20):
            await accounts["anna"].send(Deposit(amount))
        assert await accounts["anna"].ask(Deposit(300)) == 321


async def test_a_told_command_that_cannot_travel_is_lost_alone(tmp_path: Path) -> None:
    """It waited for its shard, which was not open, and so did the others."""
    async with placed(tmp_path, 1) as (accounts, nodes, tasks), nodes.events() as events:
        assert await accounts["anna"].ask(Balance()) == 0
        tasks[0].kill()
        assert isinstance(await events.receive(), NodeDown)
        accounts["anna"].tell(Deposit(1))
        accounts["anna"].tell(Deposit(object()))  # type: ignore[arg-type]
        accounts["anna"].tell(Deposit(2))
        with trio.fail_after(100):
            assert await accounts["anna"].ask(Balance()) == 3


async def test_a_clock_for_shards_on_nodes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    async with ActorSystem("driver") as system, nodes_here(system, 1, APP) as (nodes, _):
        with pytest.raises(ConfigurationError, match="a function cannot travel to nodes: leave out clock=, or"):
            await shards(system, Placed, events=Deposited, journal=folder, nodes=nodes, clock=lambda: 1000.0)
    assert not folder.exists()
