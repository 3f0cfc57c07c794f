"""A program on PyPI's ``rsocket`` that prints the first two prices of a lot: ``rsocket_ticker.py PORT LOT``; run by `test_auction`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from reactivestreams.subscriber import DefaultSubscriber
from reactivestreams.subscription import Subscription
from rsocket.helpers import single_transport_provider
from rsocket.payload import Payload
from rsocket.rsocket_client import RSocketClient
from rsocket.transports.tcp import TransportTCP


class Prices(DefaultSubscriber):  # type: ignore[misc]  # the library is untyped
    def __init__(self) -> None:
        self.left = 2
        self.over = asyncio.Event()
        self.subscription: Any = None

    def on_subscribe(self, subscription: Subscription) -> None:
        self.subscription = subscription
        subscription.request(self.left)

    def on_next(self, value: Payload, is_complete: bool = False) -> None:
        print((value.data or b"").decode(), flush=True)
        self.left -= 1
        if not self.left:
            self.subscription.cancel()
            self.over.set()

    def on_error(self, exception: Exception) -> None:
        print(exception, flush=True)
        self.over.set()


async def main(port: str, lot: str) -> None:
    transport = TransportTCP(*await asyncio.open_connection("127.0.0.1", int(port)))
    async with RSocketClient(single_transport_provider(transport)) as client:
        prices = Prices()
        answer: Any = client.request_stream(Payload(lot.encode()))
        answer.subscribe(prices)
        await prices.over.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
