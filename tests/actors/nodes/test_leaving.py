"""Leaving the block of nodes ends within its bounds, whatever they were doing, and leaves nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from levada.actors.nodes import NodeLost, Nodes
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError

from .apps import Add, Counter
from .conftest import SETTINGS, Task, nodes_here

LOT = random.Random()
"""Of the apps; each test seeds it."""


async def moody(system: ActorSystem) -> AsyncIterator[None]:
    """An app that is slow or fails, at its start, while it is up or at its end."""
    mood = LOT.choice(["well", "well", "well", "fails", "slow", "fails late", "slow late", "never ends", "breaks"])
    if mood == "fails":
        raise RuntimeError("no such table")
    if mood == "slow":
        await trio.sleep(SETTINGS.start_timeout * 2)
    async with trio.open_nursery() as nursery:
        if mood == "breaks":
            nursery.start_soon(_breaks)
        yield
    if mood == "slow late":
        await trio.sleep(SETTINGS.drain_timeout / 2)
    if mood == "never ends":
        await trio.sleep_forever()
    if mood == "fails late":
        raise RuntimeError("cannot flush")


async def _breaks() -> None:
    await trio.sleep(LOT.uniform(0, 3))
    raise RuntimeError("lost the database")


async def _disturb(nodes: Nodes, tasks: list[Task], lot: random.Random) -> None:
    """Do something to the nodes; errors of a node that is down are expected."""
    await trio.sleep(lot.uniform(0, 3))
    name = lot.choice(["n0", "n1"])
    try:
        match lot.randrange(5):
            case 0:
                await nodes.drain(name)
            case 1:
                await nodes.restart(name)
            case 2:
                await nodes.restart(rolling=lot.random() < 0.5)
            case 3:
                lot.choice(tasks).kill()
            case 4:
                counter = await nodes.spawn(Counter, on=name)
                await counter.ask(Add(1))
    except LevadaError:
        pass


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(10, 60))])
async def test_leaving_ends_whatever_the_nodes_do(seed: int, autojump_clock: MockClock) -> None:
    lot = random.Random(seed)
    LOT.seed(seed)
    bound = SETTINGS.drain_timeout + SETTINGS.kill_after + 5.0  # a node that waits to be restarted waits up to 5 s
    tasks: list[Task] = []
    with trio.CancelScope() as whole:
        whole.deadline = trio.current_time() + 300
        try:
            async with ActorSystem(seed=seed) as system:
                async with nodes_here(system, 2, f"{__name__}:moody") as (nodes, tasks):
                    async with trio.open_nursery() as nursery:
                        for _ in range(lot.randrange(6)):
                            nursery.start_soon(_disturb, nodes, tasks, lot)
                        await trio.sleep(lot.uniform(0, 4))
                        if lot.random() < 0.5:
                            nursery.cancel_scope.cancel()
                    left = trio.current_time()
                assert trio.current_time() - left <= bound
        except* NodeLost:
            pass  # one could not start
    assert not whole.cancelled_caught
    assert all(task.gone.is_set() for task in tasks)
