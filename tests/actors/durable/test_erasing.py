"""Erasing: rows, reminders and their messages are gone from the files, also on nodes and when it is interrupted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.test_placement import placed
from tests.actors.durable.test_reminders import Clock, Plan, Rang, Seen

from levada.actors.durable import EntityErased, OutcomeUnknown, Shards, shards
from levada.framework import ActorSystem

SECRET = "the-secret-of-anna"


def octets(folder: Path) -> bytes:
    """All that is in the segments."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("**/*.segment*")))


async def clocks_in(system: ActorSystem, folder: Path, **settings: Any) -> Shards[Any]:
    return await shards(system, Clock, events=Rang, journal=folder, shards=1, clock=lambda: 100.0, **settings)


@pytest.fixture
def silent() -> Iterator[None]:
    logger = logging.getLogger("levada")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)


async def set_reminders(clocks: Shards[Any]) -> None:
    await clocks["anna"].ask(Plan(1e9, f"{SECRET}-1"))
    await clocks["bert"].ask(Plan(1e9, "of-bert"))
    await clocks["anna"].ask(Plan(1e9, f"{SECRET}-2", "other"))
    await clocks["anna"].ask(Plan(50.0, f"{SECRET}-3", "late"))  # fires at once
    while not await clocks["anna"].ask(Seen()):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("snapshot_every", [1000, 2])
async def test_reminders_of_an_erased_entity_are_gone_from_the_files(tmp_path: Path, snapshot_every: int) -> None:
    async with ActorSystem("test", ask_timeout=300.0, shutdown_timeout=100.0) as system:
        clocks = await clocks_in(system, tmp_path, snapshot_every=snapshot_every)
        await set_reminders(clocks)
        assert SECRET.encode() in octets(tmp_path)
        assert await clocks.erase("anna") >= 1
        assert SECRET.encode() not in octets(tmp_path)
    async with ActorSystem("test", ask_timeout=300.0, shutdown_timeout=100.0) as system:
        clocks = await shards(system, Clock, events=Rang, journal=tmp_path, shards=1, clock=lambda: 2e9)
        while not await clocks["bert"].ask(Seen()):
            await trio.lowlevel.checkpoint()
        assert await clocks["bert"].ask(Seen()) == ["of-bert"]
        with pytest.raises(EntityErased):
            await clocks["anna"].ask(Seen())
    assert SECRET.encode() not in octets(tmp_path)


@pytest.mark.parametrize("victim", ["/Clock/0", "/Clock/journal", "/Clock/0/anna"])
@pytest.mark.parametrize("turns", range(0, 40, 8))
@pytest.mark.usefixtures("silent")
def test_an_interrupted_erasure_is_finished_when_it_is_asked_again(tmp_path: Path, victim: str, turns: int) -> None:
    async def main() -> None:
        async with (
            ActorSystem("test", ask_timeout=1000.0, shutdown_timeout=1000.0) as system,
            trio.open_nursery() as nursery,
        ):
            clocks = await clocks_in(system, tmp_path)
            await set_reminders(clocks)

            async def kill() -> None:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                target = system.lookup(victim)
                if target is not None:
                    target.kill()

            nursery.start_soon(kill)
            while True:
                try:
                    await clocks.erase("anna")
                    break
                except OutcomeUnknown:
                    await trio.lowlevel.checkpoint()
            assert SECRET.encode() not in octets(tmp_path)
            with pytest.raises(EntityErased):
                await clocks["anna"].ask(Seen())
            assert await clocks["bert"].ask(Seen()) == []

    # A database, which `test_durable_on_postgres` has in place of the folder, answers by the real clock.
    trio.run(main, clock=trio.testing.MockClock(rate=20 if isinstance(tmp_path, Path) else 1))


@pytest.mark.ci
async def test_an_entity_on_a_node_is_erased_and_stays_so_when_its_shard_moves(tmp_path: Path) -> None:
    from tests.actors.durable.accounts import Balance, Deposit

    async with placed(tmp_path) as (accounts, _, tasks):
        for name in ("anna", "bert"):
            assert await accounts[name].ask(Deposit(5), command=f"{SECRET}-{name}") == 5
        assert await accounts.erase("anna") == 1
        assert f"{SECRET}-anna".encode() not in octets(tmp_path)
        with pytest.raises(EntityErased, match="'anna' was erased"):
            await accounts["anna"].ask(Balance())
        tasks[0].kill()
        with pytest.raises(EntityErased, match="'anna' was erased"):
            await accounts["anna"].ask(Balance())
        assert await accounts["bert"].ask(Balance()) == 5
        assert await accounts.erase("bert") == 1
    assert SECRET.encode() not in octets(tmp_path)
