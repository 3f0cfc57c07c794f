"""The app of `test_singletons`: a house that each node asks for before its ``yield``. The tests reach the systems and what the houses did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import trio

from levada.actors.nodes import singleton
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message

HOUSES: dict[str, Ref[Any]] = {}
"""The refs that the nodes got, by the name of the node."""
SYSTEMS: dict[str, ActorSystem] = {}
RUNNING: list[str] = []
"""The nodes on which a house runs."""
MOST: list[int] = []
"""How many ran, each time that one began."""
BEGIN: list[Callable[[str], None]] = []
"""What a `Cutter` calls when it begins, with its node."""
HANDLED: list[int] = []
"""The numbers that were handled."""


@message("tests.nodes.house.Where")
class Where(Asks[str]):
    """Ask for the node."""


@message("tests.nodes.house.Number")
class Number(Asks[int]):
    """A number; the answer is the same number, after some seconds."""

    number: int
    seconds: float = 0.0


@message("tests.nodes.house.Pass")
class Pass:
    """A number that nobody answers."""

    number: int


@message("tests.nodes.house.Burn")
class Burn:
    """Let the house fail."""


@message("tests.nodes.house.Leave")
class Leave:
    """Let the house end."""


class House(Actor[Where | Number | Pass | Burn | Leave]):
    """Counts how many of it run, and notes what it handles."""

    start: int = attrs.field(default=0)

    def __attrs_post_init__(self) -> None:
        if self.start < 0:
            raise ValueError("no house is below the ground")

    def started(self) -> None:
        RUNNING.append(self.system.name)
        MOST.append(len(RUNNING))

    def stopping(self, reason: Any) -> None:
        RUNNING.remove(self.system.name)

    def restarting(self, error: BaseException | None, message: Any) -> None:
        RUNNING.remove(self.system.name)

    @handles
    def where(self, m: Where) -> str:
        return self.system.name

    @handles
    async def number(self, m: Number) -> int:
        HANDLED.append(m.number)
        if m.seconds:
            await trio.sleep(m.seconds)
        return m.number

    @handles
    def take(self, m: Pass) -> None:
        HANDLED.append(m.number)

    @handles
    def burn(self, m: Burn) -> None:
        raise RuntimeError("on fire")

    @handles
    def leave(self, m: Leave) -> None:
        self.stop()


class Cutter(House):
    """Tells the test that it is made."""

    def started(self) -> None:
        super().started()
        BEGIN[0](self.system.name)


@message("tests.nodes.house.Plan")
class Plan:
    """An argument that is a message, with what it holds."""

    rooms: int
    builder: Ref[Any] | None = None
    colours: dict[str, float] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        MADE.append(self)


MADE: list[Plan] = []
"""The plans that were made, and those that were decoded."""
BUILT: list[Plan] = []
"""The plans of the planned houses that began."""


class Planned(Actor[Where]):
    """A house with a plan."""

    plan: Plan

    def started(self) -> None:
        BUILT.append(self.plan)

    @handles
    async def where(self, m: Where) -> str:
        """Ask the builder, who knows too."""
        return self.system.name if self.plan.builder is None else await self.plan.builder.ask(m)


class Shed(House):
    """Another class."""


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Ask for the house, before the node is up."""
    SYSTEMS[system.name] = system
    HOUSES[system.name] = await singleton(system, House)
    yield


async def crosswise(system: ActorSystem) -> AsyncIterator[None]:
    """Each node has an actor that the other one asks, before either is up."""
    SYSTEMS[system.name] = system
    houses = [await singleton(system, House, name=f"house {on}", on=on) for on in ("n0", "n1")]
    for name, found in zip(("n0", "n1"), houses, strict=True):
        assert await found.ask(Where(), timeout=4) == name
    yield


async def fails_on_one(system: ActorSystem) -> AsyncIterator[None]:
    """Fail on the second node, after it has asked for the house."""
    HOUSES[system.name] = await singleton(system, House, on="n1")
    if system.name == "n1":
        raise RuntimeError("no shelf is free")
    yield


async def plain(system: ActorSystem) -> AsyncIterator[None]:
    """Ask for nothing."""
    SYSTEMS[system.name] = system
    yield


async def other(system: ActorSystem) -> AsyncIterator[None]:
    """Ask for another class with the same name."""
    SYSTEMS[system.name] = system
    await singleton(system, Shed, name="House")
    yield
