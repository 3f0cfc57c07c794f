"""The auction, as its clients see it; and a program that prints the prices of a lot: ``python client.py 7``."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from auction import FRONT, Bid, Browse, Follow, Open, Order, Price, carrier

from levada.actors import aqueduct
from levada.framework import ActorSystem, channel, oneshot
from levada.framework.errors import CarrierError, ChannelError

LOG = logging.getLogger("auction")


class House:
    """Stays connected to the auction: when its node is lost, it connects to another one, and goes on."""

    def __init__(self, system: ActorSystem, url: str) -> None:
        self._system = system
        self._url = url
        self._config = aqueduct.PeerConfig(carrier=carrier(url))
        self._connected = trio.Event()

    async def stay_connected(self) -> None:
        said = ""
        while True:
            try:
                async with aqueduct.connect(self._system, self._url, object, config=self._config) as self._peer:
                    said = ""
                    self._connected.set()
                    await self._peer.terminated()
                    self._connected = trio.Event()
            except CarrierError as error:
                if str(error) != said:
                    said = str(error)
                    LOG.warning("no connection to the auction: %s", said)
            await trio.sleep(0.2)

    async def order(self, lot: str, id: str, what: Open | Bid) -> bool:
        """Send a command until it is answered. It is done once, because each attempt has the same id."""
        while True:
            answer, answered = oneshot(bool)
            try:
                await self._send(Order(lot, id, what, answer))
                return await answered
            except (CarrierError, ChannelError):
                await trio.sleep(0.2)

    async def browse(self) -> list[Price]:
        """List the open lots."""
        while True:
            answer, answered = oneshot(list[Price])
            try:
                await self._send(Browse(answer))
                return await answered
            except (CarrierError, ChannelError):
                await trio.sleep(0.2)

    async def follow(self, lot: str) -> AsyncGenerator[Price, None]:
        """Yield the price of a lot, now and whenever it changes, until the lot is closed."""
        last = None
        while True:
            sender, prices = channel(Price)
            try:
                with prices:
                    await self._send(Follow(lot, sender))
                    async for price in prices:
                        if price != last:  # the first one after a loss may be known
                            yield price
                            last = price
                    return
            except (CarrierError, ChannelError):
                await trio.sleep(0.2)

    async def _send(self, message: Any) -> None:
        await self._connected.wait()
        await self._peer.send(message)


@asynccontextmanager
async def connect(system: ActorSystem, url: str = FRONT) -> AsyncIterator[House]:
    async with trio.open_nursery() as nursery:
        house = House(system, url)
        nursery.start_soon(house.stay_connected)
        yield house
        nursery.cancel_scope.cancel()


async def main(lot: str) -> None:
    async with ActorSystem() as system, connect(system) as house:
        async for price in house.follow(lot):
            print(f"{price.title}: {price.cents / 100:.2f} {price.bidder}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
