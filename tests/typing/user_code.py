"""What type checkers must see in code of users; read by mypy and pyright in `run.py check`, never run.

`assert_type` holds what must be inferred; an ignored error holds what must be refused (an unused ignore is an error too).
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, assert_type

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

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@message
class Add:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class GetSoon(Get):
    """A question of a subclass is one of the base."""


@message
class Numbers(Asks[list[int]]):
    pass


@message
class Ratio(Asks[float]):
    pass


@message
class Find(Asks[str | None]):
    pass


@message
class Held(Asks[T], Generic[T]):
    value: T


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
    assert_type(await counter.ask(GetSoon()), int)
    anything: Ref[Any] = counter
    assert_type(await anything.ask(Get()), int)
    assert_type(counter.from_thread.ask(Get()), int)
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


async def ask_what_is_not_taken(only_adds: Ref[Add]) -> None:
    await only_adds.ask(Get())  # type: ignore[arg-type]
    only_adds.from_thread.ask(Get())  # type: ignore[arg-type]


async def connected(system: ActorSystem, url: str) -> None:
    async with aqueduct.connect(system, url, Add) as one, aqueduct.connect(system, url, Add | Get) as several:
        assert_type(one, aqueduct.Peer[Add])
        assert_type(several, aqueduct.Peer[Any])
        await one.send(Get())  # type: ignore[call-overload]


async def through(portal: aio.Portal, counter: Ref[Add | Get], only_adds: Ref[Add]) -> None:
    assert_type(await portal.ask(counter, Get()), int)
    await portal.ask(only_adds, Get())  # type: ignore[misc]


class WrongAnswers(Actor[Any]):
    """What pyright sees; mypy sees none of it, and levada refuses the classes whose annotations show it when they are made."""

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def get(self, m: Get) -> str:
        return ""

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    async def get_soon(self, m: GetSoon) -> str:
        return ""

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def get_perhaps(self, m: Get) -> str | None:
        return None

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def get_or_add(self, m: Get | Add) -> str:
        return ""

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def numbers(self, m: Numbers) -> list[str]:
        return []

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def held(self, m: Held[int]) -> str:
        return ""

    @handles  # pyright: ignore[reportGeneralTypeIssues]
    def of_two_questions(self, m: Get | Numbers) -> int | list[int]:
        """A valid one that pyright refuses: ``@handles(Get, Numbers)`` is accepted."""
        return 1


def traced(function: Callable[P, R]) -> Callable[P, R]:
    return function


class RightAnswers(Actor[Any]):
    @handles
    def get(self, m: Get) -> bool:
        return True

    @handles
    async def get_soon(self, m: GetSoon) -> int:
        return 1

    @handles
    async def get_later(self, m: Get) -> None:
        self.reply_later()

    @handles
    def get_anything(self, m: Get) -> Any:
        return self.get(m)

    @handles
    def get_or_add(self, m: Get | Add) -> int:
        return self.get(Get())

    @handles
    def ratio(self, m: Ratio) -> int:
        return 1

    @handles
    def found(self, m: Find) -> str | None:
        return None

    @handles
    def held(self, m: Held[str]) -> str:
        return m.value

    @handles
    def held_anything(self, m: Held[Any]) -> bytes:
        return b""

    @handles
    def plain(self, m: Add | bytes | None) -> str:
        return "the answer to any ask"

    @handles
    def anything(self, m: object) -> int:
        return 1

    @handles
    def anything_too(self, m: Any) -> int:
        return 1

    @handles(Get, Numbers)
    def of_two_questions(self, m: Get | Numbers) -> int | list[int]:
        return 1

    @traced
    @handles
    def traced_above(self, m: Get) -> int:
        return 1

    @handles
    @traced
    async def traced_below(self, m: Get) -> int:
        return 1


class MoreRightAnswers(RightAnswers):
    @handles
    def get(self, m: Get) -> bool:
        return super().get(m)

    @handles
    def held(self, m: Held[str] | Add) -> str:
        return ""

    @handles
    def get_or_add(self, m: Get) -> int:  # type: ignore[override]
        return 1

    async def use(self) -> None:
        assert_type(self.get(Get()), bool)
        assert_type(await self.get_soon(GetSoon()), int)
        assert_type(self.of_two_questions(Get()), int | list[int])
        assert_type(RightAnswers.get(self, Get()), bool)


class Gets(Protocol):
    def get(self, m: Get) -> int: ...


GETS: type[Gets] = RightAnswers  # an actor class may have the handlers of a protocol


def later(reply: Reply[int]) -> None:
    reply.send(1)
    reply.send("text")  # type: ignore[arg-type]
