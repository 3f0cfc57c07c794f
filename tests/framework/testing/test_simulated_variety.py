"""What differs from one world to the next. A world that decides less finds less, and no other test would say so."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio

from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import SimulatedFiles, World, simulate

WORLDS = 200
SHARES = {
    "what is sent at one time arrives at different times": (0.35, 0.65),
    "what the first process sends arrives before what the second one sends": (0.35, 0.65),
    "the network is slow": (0.2, 0.5),
    "the task that was started first runs first": (0.35, 0.65),
    "the actor that was told first runs first": (0.35, 0.65),
    "bytes that were not synced outlive a power failure": (0.35, 0.65),
    "a name that was not synced outlives a power failure": (0.5, 0.9),
}
"""What may be so in a world, and the least and the largest share of worlds in which it is."""


@message("variety.Told")
class Told:
    name: str


class Notes(Actor[Told]):
    told: Any

    @handles
    def take(self, m: Told) -> None:
        self.told.append(m.name)


async def sent(world: World) -> tuple[bool, ...]:
    """Two processes send two messages each, all at one time, to a third one."""
    heard: list[tuple[str, float]] = []

    async def receive() -> None:
        network = PLATFORM.get().network
        assert network is not None
        network.bind("tcp", "", 1, None)
        await trio.sleep_forever()

    async def send(name: str) -> None:
        network = PLATFORM.get().network
        assert network is not None
        wire, _ = await network.connect("tcp", "localhost", 1)
        await trio.sleep_until(10)
        for _ in range(2):
            wire.post(0, lambda: heard.append((name, trio.current_time())))

    await world.start("receiver", receive)
    for name in ("first", "second"):
        await world.start(name, partial(send, name))
    await trio.sleep_until(20)
    times = [at for name, at in heard if name == "first"]
    return times[0] != times[1], heard[0][0] == "first", times[0] > 10.002


async def ran(world: World) -> tuple[bool, ...]:
    """Two tasks are started, and two actors are told, one after the other."""
    tasks: list[str] = []
    told: list[str] = []

    async def note(name: str) -> None:
        tasks.append(name)

    async def main() -> None:
        async with ActorSystem() as system:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(note, "first")
                nursery.start_soon(note, "second")
            for name, actor in [(name, system.spawn(Notes, told)) for name in ("first", "second")]:
                actor.tell(Told(name))

    await (await world.start("main", main)).wait()
    return tasks[0] == "first", told[0] == "first"


async def kept(world: World) -> tuple[bool, ...]:
    """A machine loses its power when a process has written to a file, and made another one."""
    files = SimulatedFiles(world.disk("machine"))
    with files.opened("/old", os.O_RDWR | os.O_CREAT) as old:
        files.fsync(old)
        files.sync_folder("/")
        files.pwrite(old, b"new", 0)
        with files.opened("/new", os.O_RDWR | os.O_CREAT):
            pass
    world.machines["machine"].power_failure()
    await trio.sleep(2)
    after = SimulatedFiles(world.disk("machine"))
    return after.read("/old") == b"new", after.exists("/new")


@pytest.mark.ci
def test_worlds_differ_in_all_that_they_decide() -> None:
    seen = Counter[str]()

    async def scenario(world: World) -> None:
        found = (*await sent(world), *await ran(world), *await kept(world))
        seen.update(name for name, is_so in zip(SHARES, found, strict=True) if is_so)

    simulate(scenario, seeds=range(WORLDS))
    wrong = {
        name: seen[name] / WORLDS for name, (least, most) in SHARES.items() if not least <= seen[name] / WORLDS <= most
    }
    assert wrong == {}
