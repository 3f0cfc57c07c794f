"""Calls by MAOP: small questions and answers, each on a stream of its own, many at once, urgent ones first."""

from __future__ import annotations

import trio

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import (
    Call,
    Handler,
    HandlerSpec,
    OperationError,
    OperationFailed,
    OperationTimeout,
    Refuse,
    RetryPolicy,
    connect,
    serve,
)
from levada.framework import ActorSystem, Identity, message

PING, QUOTE, SLOW, WARMING_UP = 300, 301, 302, 303
UNKNOWN_SYMBOL = 1024
"""Codes from 1024 on are the application's own."""


@message("rpc.Quote")
class Quote:
    symbol: str


@message("rpc.Price")
class Price:
    symbol: str
    bid: float


PRICES = {f"S{n}": n / 4 for n in range(100)}


async def ping(call: Call) -> None:
    """An answer without a body."""


async def quote(call: Call) -> Price:
    asked = call.decode(Quote)
    if asked.symbol not in PRICES:
        raise OperationError(code=UNKNOWN_SYMBOL, detail=f"no price for {asked.symbol}")
    return Price(asked.symbol, PRICES[asked.symbol])


async def slow(call: Call) -> bytes:
    await trio.sleep_forever()
    return b""


class WarmingUp:
    """Turns the first two away, with a hint when to come again."""

    def __init__(self) -> None:
        self.left = 2

    async def decide(self, call: Call) -> None:
        if self.left:
            self.left -= 1
            raise Refuse(retry_after=0.01)

    async def answer(self, call: Call) -> bytes:
        return b"warm"


async def main() -> None:
    oven = WarmingUp()
    handlers = {
        PING: Handler(ping),
        QUOTE: Handler(quote),
        SLOW: Handler(slow, spec=HandlerSpec(messages=False)),
        WARMING_UP: Handler(oven.answer, before_execute=oven.decide),
    }
    async with (
        ActorSystem() as system,
        serve(
            system, "maop+memory://desk", handlers, authenticate=BearerTokens.of({b"secret": Identity("desk-1")})
        ) as listener,
        connect(system, listener.url, token=b"secret") as peer,
    ):
        assert await peer.request(PING) == b""
        total = 0.0

        async def ask(symbol: str) -> None:
            nonlocal total
            price = await peer.request(QUOTE, Quote(symbol), response=Price, priority=10)
            total += price.bid

        async with trio.open_nursery() as nursery:
            for symbol in PRICES:
                nursery.start_soon(ask, symbol)
        print(f"{len(PRICES)} quotes at once, {total:g} in all")

        try:
            await peer.request(QUOTE, Quote("XXX"), response=Price)
        except OperationFailed as error:
            print(f"code {error.code}: {error.detail}")
        try:
            await peer.request(SLOW, timeout=0.05)
        except OperationTimeout as error:
            print("slow:", error)
        again = RetryPolicy(attempts=5)
        print("after being turned away twice:", (await peer.request(WARMING_UP, retry=again)).decode())
        counted = peer.statistics()
    assert sum(PRICES.values()) == total
    print(f"{counted.opened} calls on one connection, {counted.operations} left")


if __name__ == "__main__":
    trio.run(main)
