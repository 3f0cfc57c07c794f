"""The end of shards: a normal end finishes the commands that they have, and any other says how many are lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio
import trio.testing

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.durable.test_durable_handlers import TIMES, Gate, slow_journal

from levada.actors.durable import Durable, applies, shards, shards_of
from levada.framework import Actor, ActorSystem, Asks, Sender, channel, handles, message
from levada.framework.errors import ChannelCancelled


@message("test.end.pass_on")
class PassOn:
    to: str


@message("test.end.take")
class Take(Asks[int]):
    pass


@message("test.end.taken")
class Taken:
    pass


class Chain(Durable[PassOn | Take]):
    taken: int = 0

    @handles
    async def pass_on(self, m: PassOn) -> None:
        await (await shards_of(self.system, Chain))[m.to].ask(Take())

    @handles
    def take(self, _: Take) -> int:
        self.record(Taken())
        return self.taken

    @applies
    def was_taken(self, e: Taken) -> None:
        self.taken += 1


@message("test.end.follow")
class Follow(Asks[None]):
    to: Sender[int]


class Board(Actor[Follow]):
    to: Sender[int] | None = None

    @handles
    def follow(self, m: Follow) -> None:
        self.to = m.to
        m.to.send_nowait(1)


class Shown(Durable[Follow]):
    def started(self) -> None:
        self.board = self.spawn(Board)

    @handles
    def follow(self, m: Follow) -> None:
        self.after_commit(self.board, m)

    @applies
    def was_taken(self, e: Taken) -> None:
        pass


async def test_an_entity_that_leaves_memory_ends_its_children_and_their_channels(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with ActorSystem("test") as system:
        shown = await shards(system, Shown, events=Taken, journal=tmp_path, shards=1, idle=60.0)
        for _ in range(2):  # what it held is gone, and it can be followed again
            begin = trio.current_time()
            sender, receiver = channel(int)
            await shown["h"].ask(Follow(sender))
            assert await receiver.receive() == 1
            with pytest.raises(ChannelCancelled, match="the actor that sent has stopped"):
                await receiver.receive()
            assert 60.0 <= trio.current_time() - begin <= 90.0


@pytest.mark.parametrize("keeper", [False, pytest.param(True, marks=pytest.mark.ci)])
@pytest.mark.parametrize("awake", [False, True])
async def test_told_commands_are_handled_before_the_system_ends(tmp_path: Path, awake: bool, keeper: bool) -> None:
    async with ActorSystem("test", ask_timeout=60.0, shutdown_timeout=60.0, stop_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=2, keeper=keeper)
        if awake:
            assert await accounts["anna"].ask(Balance()) == 0
        for _ in range(300):
            accounts["anna"].tell(Deposit(1))
            accounts["bert"].tell(Deposit(2))
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=2)
        assert await accounts["anna"].ask(Balance()) == 300
        assert await accounts["bert"].ask(Balance()) == 600


async def test_a_told_command_may_ask_an_entity_of_any_shard_at_the_end(tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=60.0, shutdown_timeout=60.0, stop_timeout=60.0) as system:
        chains = await shards(system, Chain, events=Taken, journal=tmp_path, shards=4)
        for number in range(20):
            chains[f"{number}"].tell(PassOn(f"to {number}"))
    async with ActorSystem("test", ask_timeout=60.0) as system:
        chains = await shards(system, Chain, events=Taken, journal=tmp_path, shards=4)
        assert [await chains[f"to {number}"].ask(Take()) for number in range(20)] == [2] * 20


async def test_a_killed_shard_counts_the_told_commands_that_it_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with ActorSystem("test", **TIMES) as system:
        journal = slow_journal(system, tmp_path, gate)
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=1)
        assert await accounts["anna"].ask(Balance()) == 0
        gate.open = trio.Event()
        for _ in range(3):
            accounts["anna"].tell(Deposit(1))
        await gate.until_one_waits()
        # The others wait behind it. One that is still handled would be told of by itself.
        await trio.testing.wait_all_tasks_blocked()
        shard = system.lookup("/Account/0")
        assert shard is not None
        shard.kill()
        gate.open.set()
        await accounts["anna"].ask(Balance())
    lost = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert lost == ["/Account/0 ends: 3 told commands are not done, or not known to be"]


@message("test.end.stay")
class Stay:
    pass


class Stays(Durable[Stay]):
    @handles
    async def stay(self, _: Stay) -> None:
        await trio.sleep_forever()

    @applies
    def was_taken(self, e: Taken) -> None:
        pass


async def test_a_handler_that_does_not_end_holds_the_end_up_for_its_time_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(100):
        async with ActorSystem("test", shutdown_timeout=60.0, stop_timeout=0.2) as system:
            stays = await shards(system, Stays, events=Taken, journal=tmp_path, shards=1)
            stays["anna"].tell(Stay())
            while (await stays.statistics()).live == 0:
                await trio.lowlevel.checkpoint()
    lost = [each.getMessage() for each in caplog.records if "told" in each.getMessage()]
    assert "Stay to 'anna' was told and failed" in lost[0]
