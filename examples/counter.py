"""The first actor: state that only its handlers touch, tells that do not wait, an ask that does."""

from __future__ import annotations

import trio

from levada.framework import Actor, ActorSystem, Asks, handles, message


@message
class Add:
    n: int


@message
class Total(Asks[int]):
    pass


class Counter(Actor[Add | Total]):
    total: int = 0

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles
    def report(self, m: Total) -> int:
        return self.total


async def main() -> None:
    async with ActorSystem() as system:
        counter = system.spawn(Counter, name="counter")
        for n in range(1, 101):
            counter.tell(Add(n))
        # Messages from one sender arrive in order, so this question comes after all the numbers.
        total = await counter.ask(Total())
    print(f"1 + 2 + … + 100 = {total}")
    assert total == 5050


if __name__ == "__main__":
    trio.run(main)
