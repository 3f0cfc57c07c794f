"""Prices over RSocket: a desk that streams them, a client on a network that fails, and nothing lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import trio

from levada.actors.rsocket import COMPOSITE, ClientConfig, CoreConfig, ServerConfig, connect, route, serve
from levada.framework import Actor, ActorSystem, Asks, message

RESUMING = CoreConfig(metadata_mime_type=COMPOSITE, resume=True)


@message("prices.Price")
class Price:
    number: int
    bid: float


@message("prices.Follow")
class Follow(Asks[Price]):
    symbol: str
    count: int


class Desk(Actor[Any]):
    @route("follow")
    async def follow(self, m: Follow) -> AsyncIterator[Price]:
        for number in range(m.count):
            yield Price(number, 1.08 + number / 10_000)


async def main() -> None:
    async with ActorSystem() as system:
        server = ServerConfig(core=RESUMING)
        client = ClientConfig(core=RESUMING)
        async with (
            serve(system, "rsocket+tcp://127.0.0.1:0", Desk, config=server) as listener,
            connect(system, listener.url, config=client) as peer,
        ):
            numbers = []
            # Sixteen prices may be under way; the desk makes no more until some of them were taken.
            async with await peer.request_stream(Follow("EURUSD", 500), route="follow", window=16) as prices:
                async for price in prices:
                    numbers.append(price.number)
                    if price.number in (100, 300):
                        peer.drop_carrier()
            resumed = peer.statistics().sessions_resumed
    assert numbers == list(range(500))
    print(f"{len(numbers)} prices, none lost and none twice, over {resumed + 1} carriers")


if __name__ == "__main__":
    trio.run(main)
