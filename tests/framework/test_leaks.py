"""What the runtime does again and again leaves nothing that only the garbage collector would free."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    bounded,
    channel,
    conflate,
    handles,
    message,
    oneshot,
    restart,
)
from levada.framework.errors import ActorStopped, AskTimeout, ChannelError, EndOfChannel
from levada.framework.router import pool, pull

ROUNDS = 10


@message
class Item:
    n: int = 0


@message
class Get(Asks[int]):
    pass


@message
class GetSlowly(Asks[int]):
    pass


@message
class Later(Asks[int]):
    pass


@message
class Fail:
    pass


@message
class FailLate:
    pass


@message
class AskToFail(Asks[None]):
    pass


@message
class TimeOut(Asks[int]):
    pass


@message
class Sleep:
    pass


@message
class Hang:
    pass


@message
class Work:
    pass


class Worker(Actor[Any]):
    """Does all of it."""

    children_too: bool = False

    def started(self) -> None:
        if self.children_too:
            self.spawn(Worker)
            self.timers.every("beat", 1.0, Item())

    @handles
    def item(self, m: Item) -> None:
        pass

    @handles
    def get(self, m: Get) -> int:
        return 1

    @handles
    async def get_slowly(self, m: GetSlowly) -> int:
        await trio.lowlevel.checkpoint()
        return 1

    @handles
    def later(self, m: Later) -> None:
        self.reply_later().send(1)

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("on purpose")

    @handles
    async def fail_late(self, m: FailLate) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("on purpose")

    @handles
    def fail_asked(self, m: AskToFail) -> None:
        raise ValueError("on purpose")

    @handles
    async def time_out(self, m: TimeOut) -> int:
        with trio.move_on_after(1):
            await trio.sleep_forever()
        return 1

    @handles
    async def sleep(self, m: Sleep) -> None:
        await trio.sleep(1)

    @handles
    async def hang(self, m: Hang) -> None:
        await trio.sleep_forever()

    @handles
    async def work(self, m: Work) -> None:
        self.start_soon(trio.sleep, 0.1)
        await self.enter(_context())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 0.1)


class Loop(Actor[Any]):
    """Has a loop of its own."""

    async def run(self) -> None:
        async for m in self.mailbox:
            if isinstance(m, Get):
                self.reply_later().send(1)
            elif isinstance(m, Fail):
                raise ValueError("on purpose")


async def loop(system: ActorSystem, last: Any) -> None:
    ref = system.spawn(Loop)
    ref.tell(Item())
    assert await ref.ask(Get()) == 1
    ref.tell(last)
    ref.stop()
    await ref.terminated()


@asynccontextmanager
async def _context() -> AsyncIterator[None]:
    yield


async def spawn_and_stop(system: ActorSystem, **settings: Any) -> None:
    ref = system.spawn(Worker, **settings)
    ref.tell(Item())
    ref.stop()
    await ref.terminated()


async def spawn_and_kill(system: ActorSystem, *, what: Any = None, children: bool = False) -> None:
    ref = system.spawn(Worker, children)
    if what is not None:
        ref.tell(what)
    await wait_all_tasks_blocked()
    ref.kill()
    await ref.terminated()


async def ask(system: ActorSystem, what: Any) -> None:
    ref = system.spawn(Worker)
    assert await ref.ask(what) == 1
    ref.stop()
    await ref.terminated()


async def fail(system: ActorSystem, what: Any, **settings: Any) -> None:
    ref = system.spawn(Worker, **settings)
    ref.tell(what)
    await wait_all_tasks_blocked()
    ref.stop(now=True)
    await ref.terminated()


async def ask_and_fail(system: ActorSystem, **settings: Any) -> None:
    ref = system.spawn(Worker, **settings)
    try:
        await ref.ask(AskToFail())
    except ActorStopped:
        pass
    ref.stop(now=True)
    await ref.terminated()


async def ask_and_give_up(system: ActorSystem) -> None:
    ref = system.spawn(Worker)
    ref.tell(Hang())
    try:
        await ref.ask(Get(), timeout=0.5)
    except AskTimeout:
        pass
    ref.kill()
    await ref.terminated()


async def told_and_slept(system: ActorSystem) -> None:
    ref = system.spawn(Worker)
    ref.tell(Sleep())
    ref.tell(Sleep())
    ref.stop()
    await ref.terminated()


async def work(system: ActorSystem) -> None:
    ref = system.spawn(Worker)
    ref.tell(Work())
    await trio.sleep(1)
    ref.stop()
    await ref.terminated()


async def move(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    sender.ordered(2)

    async def send() -> None:
        async with sender:
            for n in range(10):
                await sender.send(n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert [n async for n in receiver] == list(range(10))


async def feed(system: ActorSystem) -> None:
    ref = system.spawn(Worker, mailbox=bounded(2))
    sender, receiver = channel(Item)
    receiver.to_mailbox(ref)
    for n in range(10):
        await sender.send(Item(n))
    await sender.finish()
    ref.stop()
    await ref.terminated()


async def give_up(system: ActorSystem, end: str) -> None:
    sender, receiver = channel(int)
    sender.send_nowait(1)
    sender.cancel() if end == "cancel" else receiver.close()
    try:
        await receiver.receive()
    except ChannelError:
        pass
    try:
        await sender.send(2)
    except ChannelError:
        pass


async def once(system: ActorSystem) -> None:
    done, answer = oneshot(int)
    done.send(1)
    assert await answer == 1
    try:
        await answer
    except EndOfChannel:
        pass


async def hold_and_fail(system: ActorSystem, **settings: Any) -> None:
    sender, receiver = channel(int)
    ref = system.spawn(Worker, sender, **settings)  # type: ignore[arg-type]
    ref.tell(Fail())
    try:
        await receiver.receive()
    except ChannelError:
        pass
    ref.stop(now=True)
    await ref.terminated()


class Ties(Worker):
    other: Any = None

    def started(self) -> None:
        self.link(self.other)
        self.watch(self.other)


async def link_and_watch(system: ActorSystem) -> None:
    other = system.spawn(Worker)
    ref = system.spawn(Ties, False, other)
    await wait_all_tasks_blocked()
    other.tell(Fail())
    await ref.terminated()


async def route(system: ActorSystem, routing: Any) -> None:
    ref = system.spawn(pool(Worker, size=2, routing=routing))
    ref.tell(Item())
    assert await ref.ask(Get()) == 1
    ref.stop()
    await ref.terminated()


OPERATIONS: dict[str, Callable[[ActorSystem], Awaitable[None]]] = {
    "spawn, tell, stop": spawn_and_stop,
    "a bounded mailbox": partial(spawn_and_stop, mailbox=bounded(4)),
    "a mailbox that conflates": partial(spawn_and_stop, mailbox=bounded(4, overflow=conflate(lambda m: m.n))),
    "kill": spawn_and_kill,
    "kill with children and timers": partial(spawn_and_kill, children=True),
    "kill a handler that waits": partial(spawn_and_kill, what=Hang()),
    "ask": partial(ask, what=Get()),
    "ask an async handler": partial(ask, what=GetSlowly()),
    "ask and be answered later": partial(ask, what=Later()),
    "fail": partial(fail, what=Fail()),
    "fail after waiting": partial(fail, what=FailLate()),
    "fail and start again": partial(fail, what=Fail(), supervise=restart(max=1000)),
    "fail after waiting and start again": partial(fail, what=FailLate(), supervise=restart(max=1000)),
    "fail and go on": partial(fail, what=Fail(), supervise=restart(resume=[ValueError])),
    "ask and fail": ask_and_fail,
    "ask, fail and start again": partial(ask_and_fail, supervise=restart(max=1000)),
    "ask and give up": ask_and_give_up,
    "a time-out in a handler": partial(ask, what=TimeOut()),
    "a sleep in a handler": told_and_slept,
    "tasks, contexts and nurseries": work,
    "a loop": partial(loop, last=Item()),
    "a loop that fails": partial(loop, last=Fail()),
    "a channel": move,
    "a channel into a mailbox": feed,
    "a channel that is cancelled": partial(give_up, end="cancel"),
    "a channel that is closed": partial(give_up, end="close"),
    "a oneshot": once,
    "a channel of an actor that fails": hold_and_fail,
    "a channel of an actor that starts again": partial(hold_and_fail, supervise=restart(max=1000)),
    "links and watches": link_and_watch,
    "a router": partial(route, routing=None),
    "a router that is pulled from": partial(route, routing=pull()),
}


@pytest.fixture
def no_records() -> Iterator[None]:
    """Pytest keeps log records; a thousand of them would be the leak."""
    log = logging.getLogger("levada")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_nothing_is_left_to_the_collector(
    system: ActorSystem, autojump_clock: MockClock, no_records: None, operation: str
) -> None:
    for _ in range(2):
        await OPERATIONS[operation](system)  # caches fill, workers start
    await wait_all_tasks_blocked()
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            await OPERATIONS[operation](system)
        await wait_all_tasks_blocked()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [describe(each) for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def describe(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}: {thing!r}"[:200]


async def test_a_worker_that_waits_for_work_lets_go_of_the_actor_that_has_ended(system: ActorSystem) -> None:
    """It stayed with a handler, and another worker took over the run queue meanwhile."""

    class Waits(Actor[Item]):
        gate: trio.Event

        @handles
        async def item(self, m: Item) -> None:
            await self.gate.wait()
            self.stop()

    gate = trio.Event()
    ref = system.spawn(Waits, gate)
    gc.disable()
    try:
        ref.tell(Item())
        await wait_all_tasks_blocked()
        system.spawn(Waits, trio.Event(), name="other").tell(Item())  # another worker takes over
        await wait_all_tasks_blocked()
        gate.set()
        await ref.terminated()
        await wait_all_tasks_blocked()
        alive = weakref.ref(ref)
        del ref
        assert alive() is None
    finally:
        gc.enable()
        other = system.lookup("/other")
        assert other is not None
        other.kill()
