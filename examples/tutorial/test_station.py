"""Step 5: tests, in virtual time."""

from __future__ import annotations

import pytest
import trio
from examples.tutorial.step4_channels import Follow, Mean, Reading, Station
from trio.testing import MockClock

from levada.framework import ActorSystem, channel


async def test_the_mean_of_two_places() -> None:
    async with ActorSystem() as system:
        station = system.spawn(Station, {})
        station.tell(Reading("roof", 12.0))
        station.tell(Reading("cellar", 8.0))
        station.tell(Reading("roof", 10.0))
        assert await station.ask(Mean()) == 9.0


async def test_a_minute_of_readings(autojump_clock: MockClock) -> None:
    begin = trio.current_time()
    async with ActorSystem() as system:
        station = system.spawn(Station, {"roof": lambda: trio.current_time() - begin})
        await trio.sleep(60.005)
        assert await station.ask(Mean()) == pytest.approx(60.0)


async def test_a_follower_gets_every_reading_and_the_end() -> None:
    async with ActorSystem() as system:
        station = system.spawn(Station, {})
        sender, receiver = channel(Reading)
        station.tell(Follow(sender))
        for celsius in (10.0, 10.5, 11.0):
            station.tell(Reading("roof", celsius))
        station.stop()
        assert [reading.celsius async for reading in receiver] == [10.0, 10.5, 11.0]
