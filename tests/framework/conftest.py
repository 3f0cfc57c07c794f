"""Systems for the runtime's tests, an actor that does what it is told, and calls that wait in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Receiver, Sender, handles, message
from levada.framework.errors import ChannelError


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
    async with ActorSystem("test", seed=0, shutdown_timeout=1.0) as system:
        yield system


@pytest.fixture
async def strict_system() -> AsyncIterator[ActorSystem]:
    """The same with the checks for tests switched on."""
    async with ActorSystem("strict", seed=0, shutdown_timeout=1.0, strict=True) as system:
        yield system


class Task:
    """An awaitable under way in a nursery: its outcome, and a way to cancel it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.result: Any = "waiting"

    async def run(self, call: Callable[[], Awaitable[Any]]) -> None:
        self.result = "cancelled"
        with self.scope:
            self.result = "waiting"
            try:
                self.result = await call()
            except ChannelError as error:
                self.result = type(error)
            except trio.Cancelled:
                self.result = "cancelled"
                raise


class Background:
    """Starts awaitables one by one, each up to the point where it waits."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery

    async def start(self, call: Callable[[], Awaitable[Any]]) -> Task:
        task = Task()
        self.nursery.start_soon(task.run, call)
        await wait_all_tasks_blocked()
        return task


@asynccontextmanager
async def background() -> AsyncIterator[Background]:
    async with trio.open_nursery() as nursery:
        yield Background(nursery)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


def queued(sender: Sender[int], *messages: int) -> None:
    for each in messages:
        sender.send_nowait(each)


async def rest(receiver: Receiver[int]) -> list[int]:
    return [message async for message in receiver]
