"""What type checkers must see in code of users; read by mypy and pyright in `run.py check`, never run.

`assert_type` holds what must be inferred; an ignored error holds what must be refused (an unused ignore is an error too).
"""

from __future__ import annotations

from typing import Any, assert_type

from levada.actors import aqueduct
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Receiver,
    Ref,
    Reply,
    Sender,
    actor,
    aio,
    channel,
    handles,
    message,
    oneshot,
    restart,
)


@message
class Add:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class GetSoon(Get):
    """A question of a subclass is one of the base."""


class Counter(Actor[Add | Get]):
    total: int = 0

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles(Get)
    async def get(self, m: Get) -> int:
        return self.total

    def started(self) -> None:
        assert_type(self.ref, Ref[Add | Get])
        assert_type(self.spawn(Counter, 3), Ref[Add | Get])


class Untyped(Actor):
    @handles
    def add(self, m: Add) -> None:
        assert_type(self.ref, Ref[Any])


@actor
async def show(m: Add) -> None:
    print(m.n)


async def show_too(m: Add) -> None:
    print(m.n)


async def use(system: ActorSystem) -> None:
    counter = system.spawn(Counter, name="counter", supervise=restart())
    assert_type(counter, Ref[Add | Get])
    assert_type(system.spawn(Counter, 5), Ref[Add | Get])
    assert_type(system.spawn(show), Ref[Add])
    assert_type(system.spawn(show_too), Ref[Add])
    assert_type(await counter.ask(Get()), int)
    only_adds: Ref[Add] = counter
    only_adds.tell(Add(1))
    counter.tell("text")  # type: ignore[arg-type]
    await counter.ask(Add(1))  # type: ignore[arg-type]
    await only_adds.ask(Get())  # type: ignore[arg-type]
    assert_type(await counter.ask(GetSoon()), int)
    anything: Ref[Any] = counter
    assert_type(await anything.ask(Get()), int)
    assert_type(counter.from_thread.ask(Get()), int)
    only_adds.from_thread.ask(Get())  # type: ignore[arg-type]
    Add("text")  # type: ignore[arg-type]
    Counter(total="text")  # type: ignore[arg-type]

    sender, receiver = channel(Add)
    assert_type(sender, Sender[Add])
    assert_type(receiver, Receiver[Add])
    await sender.send(Get())  # type: ignore[call-overload]
    async for item in receiver:
        assert_type(item, Add)
    done, answer = oneshot(int)
    done.send(1)
    assert_type(await answer, int)


async def connected(system: ActorSystem, url: str) -> None:
    async with aqueduct.connect(system, url, Add) as one, aqueduct.connect(system, url, Add | Get) as several:
        assert_type(one, aqueduct.Peer[Add])
        assert_type(several, aqueduct.Peer[Any])
        await one.send(Get())  # type: ignore[call-overload]


async def through(portal: aio.Portal, counter: Ref[Add | Get], only_adds: Ref[Add]) -> None:
    assert_type(await portal.ask(counter, Get()), int)
    await portal.ask(only_adds, Get())  # type: ignore[misc]


class WrongAnswer(Actor[Get]):
    """What no type checker sees: the class is refused when it is made."""

    @handles
    def get(self, m: Get) -> str:
        return ""


def later(reply: Reply[int]) -> None:
    reply.send(1)
    reply.send("text")  # type: ignore[arg-type]
