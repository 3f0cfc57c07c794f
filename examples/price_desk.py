"""A channel inside a message: a desk streams prices to everybody who follows a symbol, each at its own pace.

Whoever wants prices makes a channel, keeps the receiver and sends the sender away in a message.  The desk serves each follower in a task
of its own nursery.  A slow follower slows down its own stream only: the sender's window is full, and ``send`` waits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import trio

from levada.framework import Actor, ActorSystem, Asks, Receiver, Ref, Reply, Sender, channel, handles, message


@message
class Price:
    symbol: str
    bid: float


@message
class Follow:
    symbol: str
    prices: Sender[Price]


@message
class Served(Asks[dict[str, int]]):
    """How many followers of each symbol there were; answered when the last one has had enough."""


class Desk(Actor[Follow | Served]):
    seed: int = 2015

    def started(self) -> None:
        self.following = 0
        self.served: dict[str, int] = {}
        self.questions: list[Reply[dict[str, int]]] = []

    @handles
    async def follow(self, m: Follow) -> None:
        self.following += 1
        self.start_soon(self.quote, m.symbol, m.prices)  # in this actor's own nursery

    @handles
    def report(self, m: Served) -> None:
        self.questions.append(self.reply_later())
        self.answer_if_over()

    async def quote(self, symbol: str, prices: Sender[Price]) -> None:
        async with prices:  # ends when the follower has had enough
            for bid in walk(random.Random(f"{self.seed} {symbol}")):
                await prices.send(Price(symbol, bid))
        self.served[symbol] = self.served.get(symbol, 0) + 1
        self.following -= 1
        self.answer_if_over()

    def answer_if_over(self) -> None:
        if not self.following:
            for question in self.questions:
                question.send(self.served)


def walk(lot: random.Random) -> Iterator[float]:
    """A price that goes up and down forever."""
    bid = 100.0
    while True:
        bid = round(bid + lot.uniform(-1, 1), 2)
        yield bid


async def follow(desk: Ref[Follow | Served], symbol: str, count: int, into: list[Price]) -> None:
    sender, receiver = channel(Price)
    sender = sender.ordered(window=8)  # at most 8 prices under way
    desk.tell(Follow(symbol, sender))
    with receiver:  # leaving the block closes it, and so the desk learns that it can stop
        await take(receiver, count, into)


async def take(receiver: Receiver[Price], count: int, into: list[Price]) -> None:
    async for price in receiver:
        into.append(price)
        if len(into) == count:
            return


async def main() -> None:
    wanted = [("EURUSD", 5), ("EURUSD", 20), ("GBPUSD", 10)]
    got: list[list[Price]] = [[] for _ in wanted]
    async with ActorSystem() as system:
        desk = system.spawn(Desk, name="desk")
        async with trio.open_nursery() as nursery:
            for (symbol, count), into in zip(wanted, got, strict=True):
                nursery.start_soon(follow, desk, symbol, count, into)
        served = await desk.ask(Served())
    for (symbol, count), prices in zip(wanted, got, strict=True):
        print(f"{symbol}: {count:2} prices, {prices[0].bid:.2f} … {prices[-1].bid:.2f}")
        assert [price.symbol for price in prices] == [symbol] * count
    # Both followers of a symbol saw the same prices in the same order, each as many as it wanted.
    assert got[1][:5] == got[0]
    assert served == {"EURUSD": 2, "GBPUSD": 1}
    print(f"the desk served {sum(served.values())} followers of {len(served)} symbols")


if __name__ == "__main__":
    trio.run(main)
