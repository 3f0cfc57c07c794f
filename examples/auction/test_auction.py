"""The auction in virtual time; and on three nodes of a simulated world, whose processes are killed and cut off."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import auction
import client
import pytest
import trio
from auction import Bid, Open, Price

from levada.actors import rsocket
from levada.actors.nodes import local_nodes
from levada.framework import ActorSystem
from levada.framework.testing import autojump
from levada.framework.testing.simulation import Faults, World, check_linear, simulate
from levada.transports.carriers.shared_sockets import share_sockets

HOUR = 3600.0
BIDDERS = ("anna", "bert", "cleo")
FAULTS = Faults(aims={"Bid"}, strikes=8, clock_jumps=0.0)  # a clock that jumps closes the lot too early


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app has its log in the current folder."""
    monkeypatch.chdir(tmp_path)


def test_a_lot_is_sold_after_an_hour() -> None:
    async def main() -> None:
        serving = asynccontextmanager(auction.app)
        async with (
            ActorSystem("auction") as system,
            serving(system, "aqueduct+memory://front", "rsocket+memory://ticker") as (front, ticker),
            client.connect(system, front.url) as house,
            rsocket.connect(system, ticker.url) as peer,
        ):
            assert await house.order("7", "offer", Open("Clock", 1000, HOUR))
            async with await peer.request_stream(b"7") as ticks:
                assert json.loads((await ticks.receive()).data)["cents"] == 1000
                assert await house.order("7", "bid 1", Bid("anna", 1500))
                assert json.loads((await ticks.receive()).data)["bidder"] == "anna"
            assert not await house.order("7", "bid 2", Bid("bert", 1500))
            assert await house.order("7", "bid 1", Bid("anna", 1500))  # sent again, so not done again
            sold = Price("7", "Clock", 1500, "anna", is_open=False)
            assert await house.browse() == [Price("7", "Clock", 1500, "anna", is_open=True)]
            assert [price async for price in house.follow("7")][-1] == sold
            assert trio.current_time() == pytest.approx(HOUR, abs=1)
            assert not await house.order("7", "bid 3", Bid("bert", 2000))
            assert await house.browse() == []

    trio.run(main, clock=autojump())


async def fleet() -> None:
    """What `levada serve auction:app --nodes 3` does."""
    async with (
        ActorSystem("driver") as system,
        share_sockets() as sockets,
        local_nodes(system, 3, auction.app, sockets=sockets),
    ):
        await trio.sleep_forever()


async def scenario(world: World) -> None:
    """Three bidders outbid each other up to 20.00. Each bid is done once, and all of them see the same end."""
    ends: list[Price | None] = []

    async def bid(name: str, step: int) -> None:
        async with ActorSystem(name) as system, client.connect(system) as house:
            await house.order("7", "offer", Open("Clock", 100, 60.0))
            last, cents = None, 0
            async for price in house.follow("7"):
                assert price.cents >= cents
                last, cents = price, price.cents
                if price.bidder != name and cents < 2000:
                    ask = partial(house.order, "7", f"{name} {cents}")
                    await world.history.call("7", Bid(name, cents + step), ask)
            ends.append(last)

    await world.start("auction", fleet, restart=1.0)
    bidders = [await world.start(name, partial(bid, name, 30 + step)) for step, name in enumerate(BIDDERS)]
    for bidder in bidders:
        assert await bidder.wait() == 0
    check_linear(world.history, lambda best, bid: (max(best, bid.cents), bid.cents > best), 100)
    assert ends == [ends[0]] * 3


def test_no_bid_is_lost_or_done_twice() -> None:
    simulate(scenario, seeds=range(12, 15), faults=FAULTS)
