"""Nodes as processes of a simulated world: how each of their ends looks from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import attrs
import pytest
import trio
from tests.actors.nodes.apps import fails_late

from levada.actors.nodes import NodeLost, NodeSettings, Run, local_nodes
from levada.actors.nodes.launched import LaunchedProcesses
from levada.framework import ActorSystem
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import Faults, World, simulate
from levada.transports.carriers import unix

SETTINGS: Final = NodeSettings(start_timeout=20.0, drain_timeout=2.0, silence=5.0)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    yield


@attrs.define(eq=False)
class Driver:
    """A process with one node, until it is told to end."""

    app: object = app
    over: trio.Event = attrs.field(factory=trio.Event)
    up: trio.Event = attrs.field(factory=trio.Event)

    async def run(self) -> None:
        async with ActorSystem("driver") as system, local_nodes(system, 1, self.app, settings=SETTINGS):
            self.up.set()
            await self.over.wait()


def in_one_world(scenario: object) -> None:
    simulate(scenario, seeds=[1], faults=Faults(strikes=0, skew=0), limit=120.0)  # type: ignore[arg-type]


def test_a_node_that_has_drained_ends_well() -> None:
    async def scenario(world: World) -> None:
        driver = Driver()
        await world.start("driver", driver.run)
        await driver.up.wait()
        driver.over.set()
        assert await world["n0"].wait() == 0
        assert await world["driver"].wait() == 0

    in_one_world(scenario)


def test_a_node_whose_app_fails_at_its_end_ends_with_1() -> None:
    async def scenario(world: World) -> None:
        driver = Driver(fails_late)
        await world.start("driver", driver.run)
        await driver.up.wait()
        driver.over.set()
        assert await world["n0"].wait() == 1
        assert await world["driver"].wait() == 0

    in_one_world(scenario)


def test_a_node_whose_driver_cuts_the_connection_says_so_and_ends_with_70(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[NodeLost] = []

    async def main() -> None:
        launch = PLATFORM.get().launch
        assert launch is not None
        handed = unix.HandedListener(1)
        async with LaunchedProcesses(launch, handed, "/nodes", SETTINGS, None, "").start(Run("n0", 0, 0)) as child:
            (await handed.accept()).abort()
            ended.append(await child.ended())

    async def scenario(world: World) -> None:
        await (await world.start("driver", main)).wait()

    in_one_world(scenario)
    assert [str(each) for each in ended] == [
        "ended with exit code 70, because its connection with this process was lost"
    ]
    assert [each for each in caplog.messages if each.startswith("n0: ")] == [
        "n0: connection to the driver failed: the peer aborted the stream"
    ]


def test_a_node_that_does_not_hear_its_driver_says_so_and_ends_with_70(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        driver = Driver()
        await world.start("driver", driver.run)
        await driver.up.wait()
        began = trio.current_time()
        world["driver"].pause(30.0)
        assert await world["n0"].wait() == 70
        assert SETTINGS.silence <= trio.current_time() - began < 2 * SETTINGS.silence
        driver.over.set()
        await world["driver"].wait()

    in_one_world(scenario)
    (line,) = [each for each in caplog.messages if each.startswith("n0: nothing")]
    assert line.startswith("n0: nothing was heard from the driver for 5.")
