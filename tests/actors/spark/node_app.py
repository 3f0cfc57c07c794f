"""An app for nodes under Spark, shipped to executors by itself."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator

from levada.framework import Actor, ActorSystem, Asks, handles, message


@message(frozen=True)
class Add(Asks[int]):
    n: int


@message(frozen=True)
class Where(Asks[int]):
    pass


class Counter(Actor[Add | Where]):
    total: int = 0

    @handles
    def add(self, m: Add) -> int:
        self.total += m.n
        return self.total

    @handles
    def where(self, m: Where) -> int:
        return os.getpid()


async def app(system: ActorSystem) -> AsyncIterator[None]:
    importlib.import_module("single")  # shipped, too; nodes run only what they have imported
    system.registry.register("counter", system.spawn(Counter))
    print("the app begins")
    yield
