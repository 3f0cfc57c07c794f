from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorRestarted, ActorSystem, handles, restart


class Once(Actor[Any]):
    """Counts how often it was started."""

    objects: list[Once]
    starts: int = 0

    def started(self) -> None:
        self.starts += 1
        self.objects.append(self)


class Striker(Actor[ActorRestarted]):
    """Kills some of those that are about to start again."""

    lot: random.Random

    @handles
    def restarted(self, m: ActorRestarted) -> None:
        if self.lot.random() < 0.5:
            m.ref.kill()


class Brief(Actor[Any]):
    """Is stopped at once."""


@pytest.mark.parametrize("seed", range(10))
async def test_an_object_is_started_once_however_often_its_actor_is_killed(
    seed: int, autojump_clock: MockClock
) -> None:
    """Each turn is a slice of its own, so kills come between any two turns, and signals find any actor at the worker."""
    lot = random.Random(seed)
    ticks = itertools.count()
    objects: list[Once] = []
    measure_by(lambda: next(ticks) * 0.001)
    async with ActorSystem() as system:
        policy = restart(max=1_000_000, within=0.02, initial_backoff=0.001, max_backoff=0.01)
        refs = [system.spawn(Once, objects, supervise=policy) for _ in range(3)]
        system.events.subscribe(ActorRestarted, system.spawn(Striker, lot))
        for _ in range(1500):
            if lot.random() < 0.2:
                lot.choice(refs).kill()
            if lot.random() < 0.5:
                system.spawn(Brief).stop(now=True)
            await trio.lowlevel.checkpoint()
            if lot.random() < 0.1:
                await trio.sleep(0.001)
        await wait_all_tasks_blocked()
        assert system.statistics().restarts > 20, system.statistics().restarts
    assert {each.starts for each in objects} == {1}
