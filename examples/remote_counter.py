"""A counter in one system, used from another: found by its name, told, asked, watched; and what its users see when the way is lost."""

from __future__ import annotations

from typing import Any

import trio

from levada.actors.aqueduct import Peer, connect, serve
from levada.framework import Actor, ActorSystem, Asks, Down, Lost, Ref, handles, message
from levada.framework.errors import ActorStopped, NameUnknown


@message("remote_counter.Add")
class Add:
    n: int


@message("remote_counter.Total")
class Total(Asks[int]):
    """What has been added so far?"""


@message("remote_counter.Notify")
class Notify:
    """Tell `who` whenever there is a round hundred."""

    who: Ref[int]


class Counter(Actor[Add | Total | Notify]):
    total: int = 0

    def started(self) -> None:
        self.listeners: list[Ref[int]] = []

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n
        if self.total % 100 == 0:
            for listener in self.listeners:
                listener.tell(self.total)

    @handles
    def answer(self, m: Total) -> int:
        return self.total

    @handles
    def notify(self, m: Notify) -> None:
        self.listeners.append(m.who)


class User(Actor[Any]):
    """Lives in the other system: adds numbers, hears of round hundreds, and of the end."""

    counter: Ref[Any]
    hundreds: list[int]
    done: trio.Event
    end: trio.Event

    def started(self) -> None:
        self.watch(self.counter)
        self.counter.tell(Notify(self.ref))
        self.start_soon(self.count)

    async def count(self) -> None:
        for _ in range(25):
            await self.counter.send(Add(10))
        self.done.set()

    @handles(int)
    def hundred(self, m: int) -> None:
        self.hundreds.append(m)

    @handles
    def down(self, m: Down) -> None:
        assert isinstance(m.reason, Lost)
        self.end.set()


async def ignore(m: Any) -> None:
    """The server wants nothing but lookups."""


async def use(system: ActorSystem, peer: Peer[Any]) -> str:
    counter = await peer.lookup("counter", Add | Total | Notify)
    try:
        await peer.lookup("secret")
    except NameUnknown as unknown:
        print(unknown.name, "is not for everybody")
    hundreds: list[int] = []
    done, end = trio.Event(), trio.Event()
    system.spawn(User, counter, hundreds, done, end, name="user")
    await done.wait()
    total = await counter.ask(Total())  # behind everything that was sent
    peer.abort()  # as if the network had failed
    await end.wait()
    try:
        await counter.ask(Total())
    except ActorStopped as stopped:
        what = "the connection was lost" if isinstance(stopped.reason, Lost) else "the counter has stopped"
        return f"25 times 10 is {total}, heard of {hundreds}, then {what}"
    return "the counter is still there"


async def main() -> None:
    async with ActorSystem("counting") as counting, ActorSystem("using") as using:
        counter = counting.spawn(Counter, name="counter")
        counting.registry.register("counter", counter)
        counting.registry.register("secret", counting.spawn(Counter))
        async with (
            serve(counting, "aqueduct+memory://counting", ignore, Any, expose={"counter"}) as listener,
            connect(using, listener.url, object) as peer,
        ):
            print(await use(using, peer))


if __name__ == "__main__":
    trio.run(main)
