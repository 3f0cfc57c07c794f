"""The app of `test_fleet_shards`: each node opens the same shards before its ``yield``, and uses an entity there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from levada.actors.durable import Durable, Shards, applies, shards
from levada.actors.nodes import NodeDown, nodes_of
from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.framework.errors import ActorStopped

SETTINGS: dict[str, Any] = {}
"""The arguments of `shards` in the app."""
SUMS: dict[str, Shards[Any]] = {}
"""The shards of each node."""
SYSTEMS: dict[str, ActorSystem] = {}
LATE: list[int | str] = []
"""Answers at the end of an app, and errors."""


@message("tests.sums.Add", frozen=True)
class Add(Asks[int]):
    n: int


@message("tests.sums.Where", frozen=True)
class Where(Asks[str]):
    """Ask an entity for its node."""


@message("tests.sums.Added", frozen=True)
class Added:
    n: int


@message("tests.sums.Doubled", frozen=True)
class Doubled:
    twice: int


class Sum(Durable[Add | Where]):
    total: int = 0

    @handles
    def add(self, m: Add) -> int:
        self.record(Added(m.n))
        return self.total

    @handles
    def where(self, m: Where) -> str:
        return self.system.name

    @applies
    def added(self, e: Added) -> None:
        self.total += e.n


class Double(Durable[Add]):
    @handles
    def add(self, m: Add) -> int:
        self.record(Doubled(m.n))
        return m.n

    @applies
    def doubled(self, e: Doubled) -> None:
        pass


@message("tests.sums.Open", frozen=True)
class Open(Asks[int]):
    """Open the shards in a handler, and ask an entity."""


class Opener(Actor[Open]):
    @handles
    async def open(self, m: Open) -> int:
        sums = await shards(self.system, Sum, events=Added, **SETTINGS)
        return await sums["handler"].ask(Add(1))


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Open the shards, and use an entity before the node is up."""
    SYSTEMS[system.name] = system
    sums = SUMS[system.name] = await shards(system, Sum, events=Added, **SETTINGS)
    await sums["early"].ask(Add(1))
    yield


async def plain(system: ActorSystem) -> AsyncIterator[None]:
    """Open none."""
    SYSTEMS[system.name] = system
    yield


async def late(system: ActorSystem) -> AsyncIterator[None]:
    """Use entities when the node is told to end."""
    SYSTEMS[system.name] = system
    sums = await shards(system, Sum, events=Added, **SETTINGS)
    yield
    LATE.extend([await sums[f"e{i}"].ask(Add(1), timeout=20) for i in range(10)])


async def last(system: ActorSystem) -> AsyncIterator[None]:
    """Use entities of the other node when that has ended."""
    SYSTEMS[system.name] = system
    sums = await shards(system, Sum, events=Added, **SETTINGS)
    async with nodes_of(system).events() as events:
        yield
        if system.name == "n0":
            return
        while not isinstance(await events.receive(), NodeDown):
            pass
        for i in range(10):
            try:
                LATE.append(await sums[f"e{i}"].ask(Add(1), timeout=20))
            except ActorStopped as error:
                LATE.append(str(error))
