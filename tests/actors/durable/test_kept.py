"""The journal of durable actors in a child process: its start, its end and its way back."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit, Deposited, Move, Withdrawn
from tests.actors.nodes.processes import is_alive

from levada.actors.durable import Entity, OutcomeUnknown, log_columns, log_config, shards
from levada.actors.journal import Journal, JournalError, JournalLocked, Store, keeper
from levada.actors.nodes import nodes_of
from levada.framework import ActorSystem, Ref
from levada.framework.errors import ActorStopped, ConfigurationError

TIMES: dict[str, Any] = {"ask_timeout": 30.0, "shutdown_timeout": 20.0}
KEPT: dict[str, Any] = {"events": EVENTS, "shards": 2, "keeper": True}


def amounts(folder: Path) -> list[int]:
    with Store.open(folder, None, log_config(2)) as store:
        rows = [row for number in (0, 1) for _, batch in store.batches(number, 0) for row in batch.to_pylist()]
    return [row["amount"] for row in rows if row["kind"] == "test.durable.deposited"]


@pytest.mark.ci
async def test_the_journal_is_in_a_process_that_ends_with_the_shards(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        accounts = await shards(system, Account, journal=tmp_path, **KEPT)
        assert await accounts["anna"].ask(Deposit(5), command="one") == 5
        pid = nodes_of(system)["Account-keeper"].pid
        assert pid != os.getpid()
        with pytest.raises(JournalLocked):
            Store.open(tmp_path, None, log_config(2))
        accounts["anna"].tell(Deposit(6))
        assert await accounts["anna"].ask(Deposit(5), command="one") == 5
        accounts.ref.stop()
        await accounts.ref.terminated()
        assert not is_alive(pid)
        assert amounts(tmp_path) == [5, 6]


@pytest.mark.ci
async def test_a_keeper_that_is_killed_costs_no_command_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Commands without ids, so none of them may be asked again."""
    caplog.set_level(logging.CRITICAL, "levada")
    answers: dict[str, list[int]] = {f"e{number}": [] for number in range(8)}
    kills = 0

    async def ask(name: str) -> None:
        while kills < 3:
            answers[name].append(await accounts[name].ask(Deposit(1)))
        answers[name].append(await accounts[name].ask(Deposit(1)))

    async with ActorSystem("test", **TIMES) as system:
        accounts = await shards(system, Account, journal=tmp_path, **KEPT)
        nodes = nodes_of(system)
        async with trio.open_nursery() as askers:
            for name in answers:
                askers.start_soon(ask, name)
            while kills < 3:
                wanted = len(answers["e0"]) + 20
                while len(answers["e0"]) < wanted:
                    await accounts["other"].ask(Balance())
                os.kill(nodes["Account-keeper"].pid, signal.SIGKILL)
                await accounts["other"].ask(Deposit(1))
                kills += 1
        assert [await accounts[name].ask(Balance()) for name in answers] == [len(each) for each in answers.values()]
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert all(each == [*range(1, len(each) + 1)] for each in answers.values())
    assert amounts(tmp_path) == [1] * (3 + sum(map(len, answers.values())))


@pytest.mark.ci
async def test_rows_that_are_too_large_for_the_way_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    async with ActorSystem("test", **TIMES) as system:
        accounts = await shards(system, Account, journal=tmp_path, **KEPT)
        with pytest.raises(JournalError, match=r"shard \d: these rows cannot travel to the journal: .* bytes, at most"):
            await accounts["a" * 1000].ask(Move([1] * 20_000))
        assert await accounts["anna"].ask(Deposit(5)) == 5
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert amounts(tmp_path) == [5]


@pytest.mark.ci
async def test_a_journal_of_a_keeper_is_given_as_a_ref(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system, keeper(system) as keep:
        journal = await keep.open(tmp_path, log_columns(EVENTS), config=log_config(2))
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=2)
        assert await accounts["anna"].ask(Deposit(5)) == 5
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert amounts(tmp_path) == [5]


async def test_a_journal_of_this_process_is_given_as_a_ref(tmp_path: Path) -> None:
    async with ActorSystem("test", **TIMES) as system:
        journal: Ref[Any] = system.spawn(
            lambda: Journal(tmp_path, log_columns(Deposited | Withdrawn), config=log_config(2))
        )
        accounts = await shards(system, Account, events=EVENTS, journal=journal, shards=2)
        assert await accounts["anna"].ask(Deposit(5), command="one") == 5
        assert await accounts["anna"].ask(Deposit(5), command="one") == 5
        with pytest.raises(ConfigurationError, match="keeper=True needs a folder as journal=, and got a ref"):
            await shards(system, Account, events=EVENTS, journal=journal, shards=2, keeper=True, name="other")
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert amounts(tmp_path) == [5]


@pytest.mark.ci
@pytest.mark.parametrize("turns", [5, *(pytest.param(turns, marks=pytest.mark.release) for turns in (0, 10, 20))])
async def test_the_shards_end_before_the_way_to_their_keeper(
    tmp_path: Path, turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The system ends while commands are under way. What is in the log was answered, and nobody lost the journal."""
    outcomes: list[str] = []

    async def ask(account: Entity[Any]) -> None:
        try:
            outcomes.append(f"answer {await account.ask(Deposit(1))}")
        except (ActorStopped, OutcomeUnknown):
            outcomes.append("not begun, or not to its end")

    async with trio.open_nursery() as nursery, ActorSystem("test", **TIMES) as system:
        accounts = await shards(system, Account, journal=tmp_path, **KEPT)
        await accounts["anna"].ask(Balance())
        for number in range(60):
            nursery.start_soon(ask, accounts[f"e{number}"])
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
    assert len(outcomes) == 60
    assert amounts(tmp_path) == [1] * outcomes.count("answer 1")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
