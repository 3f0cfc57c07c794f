"""Apps and actors of the tests, which child processes import."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from levada.actors.nodes import nodes_of
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message


@message("tests.nodes.Add")
class Add(Asks[int]):
    """Add a number; the answer is the total."""

    n: int


@message("tests.nodes.Where")
class Where(Asks[tuple[int, str]]):
    """Ask for the process and the name of the system."""


@message("tests.nodes.Fail")
class Fail:
    """Let the handler raise."""


class Counter(Actor[Add | Where | Fail]):
    """Counts from a start."""

    total: int = 0

    def started(self) -> None:
        """Check the start."""
        if self.total < 0:
            raise ValueError(f"a counter starts at 0 or more, not {self.total}")

    def __attrs_post_init__(self) -> None:
        if self.total == 13:
            raise ValueError("no counter starts at 13")

    @handles
    def add(self, m: Add) -> int:
        """Count."""
        self.total += m.n
        return self.total

    @handles
    def where(self, m: Where) -> tuple[int, str]:
        """Tell."""
        return os.getpid(), self.system.name

    @handles
    def fail(self, m: Fail) -> None:
        """Fail."""
        raise RuntimeError("as told")


@message("tests.nodes.SpawnOn")
class SpawnOn(Asks[Ref[Any]]):
    """Spawn a counter on a node, from another node."""

    on: str
    name: str | None = None


@message("tests.nodes.Ask")
class Ask(Asks[int]):
    """Ask a counter."""

    counter: Ref[Any]


class Friend(Actor[SpawnOn | Ask]):
    """Uses the fleet from a node."""

    @handles
    async def spawn_on(self, m: SpawnOn) -> Ref[Any]:
        """Spawn."""
        return await nodes_of(self.system).spawn(Counter, 40, on=m.on, name=m.name)

    @handles
    async def ask(self, m: Ask) -> int:
        """Ask."""
        total: int = await m.counter.ask(Add(1))
        return total


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Registers a counter."""
    counter: Ref[Add | Where | Fail] = system.spawn(Counter, 100)
    system.registry.register("counter", counter)
    yield


async def fails(system: ActorSystem) -> AsyncIterator[None]:
    """An app that fails before it is ready."""
    raise RuntimeError("no such table")
    yield


def not_an_app() -> None:
    """A function without a system."""
