"""Systems for the runtime's tests, and an actor that does what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest

from levada.framework import Actor, ActorSystem, Asks, handles, message


@message
class Item:
    sender: int
    n: int


@message
class Run:
    """Carry a function that the handler is to call, and await if that gives something to await."""

    function: Callable[[], Any]


@message
class Get(Asks[int]):
    pass


class Runner(Actor[Run | Get | Item]):
    """Does what it is told, in a sync or in an async handler."""

    seen: list[int] = attrs.field(factory=list)

    @handles
    async def run_it(self, m: Run) -> None:
        result = m.function()
        if result is not None:
            await result

    @handles
    def get(self, m: Get) -> int:
        return len(self.seen)

    @handles
    def item(self, m: Item) -> None:
        self.seen.append(m.n)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """A running system; leaving the test ends it in its phases."""
    async with ActorSystem("test", seed=0, shutdown=1.0) as system:
        yield system


@pytest.fixture
async def strict_system() -> AsyncIterator[ActorSystem]:
    """The same with the checks for tests switched on."""
    async with ActorSystem("strict", seed=0, shutdown=1.0, strict=True) as system:
        yield system
