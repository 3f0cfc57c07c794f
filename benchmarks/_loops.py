"""The workloads without any actor library: a task with a queue for each actor, on plain trio and on plain asyncio."""

from __future__ import annotations

import asyncio
import functools
import math
import platform
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from ._levada import Hit, Hop, Total, in_trio
from ._measure import Contender, Measure

__all__ = ["ASYNCIO", "TRIO", "asyncio_ask", "trio_switches"]

clock = time.perf_counter

# ---------------------------------------------------------------- trio


def on_trio(work: Callable[[trio.Nursery, int], Awaitable[float]]) -> Measure:
    """Make a measure of an async function that starts its tasks in a nursery."""

    async def main(n: int) -> float:
        async with trio.open_nursery() as nursery:
            seconds = await work(nursery, n)
            nursery.cancel_scope.cancel()
        return seconds / n * 1e9

    return in_trio(main)


async def _trio_sink(mailbox: trio.MemoryReceiveChannel[Any]) -> None:
    hits = 0
    async for m in mailbox:
        if type(m) is Hit:
            hits += 1
        else:
            m[1].send_nowait(hits)


async def _trio_total(sink: trio.MemorySendChannel[Any]) -> int:
    send, receive = trio.open_memory_channel[int](1)
    await sink.send((Total(), send))
    return await receive.receive()


async def _trio_tell(nursery: trio.Nursery, n: int) -> float:
    send, receive = trio.open_memory_channel[Any](math.inf)
    nursery.start_soon(_trio_sink, receive)
    await _trio_total(send)
    hit = Hit()
    start = clock()
    for _ in range(n):
        send.send_nowait(hit)
    assert await _trio_total(send) == n
    return clock() - start


async def _trio_bounded(nursery: trio.Nursery, n: int) -> float:
    send, receive = trio.open_memory_channel[Any](256)
    nursery.start_soon(_trio_sink, receive)
    await _trio_total(send)
    hit = Hit()
    start = clock()
    for _ in range(n):
        await send.send(hit)
    assert await _trio_total(send) == n
    return clock() - start


async def _trio_ask(nursery: trio.Nursery, n: int) -> float:
    send, receive = trio.open_memory_channel[Any](math.inf)
    nursery.start_soon(_trio_sink, receive)
    await _trio_total(send)
    start = clock()
    for _ in range(n):
        await _trio_total(send)
    return clock() - start


async def _trio_switches(nursery: trio.Nursery, n: int) -> float:
    """A task wakes another one, and waits until that one wakes it: what a question and its answer need at least."""
    tasks: list[trio.lowlevel.Task] = [trio.lowlevel.current_task()]

    def succeed(_: object) -> trio.lowlevel.Abort:
        return trio.lowlevel.Abort.SUCCEEDED

    async def other() -> None:
        tasks.append(trio.lowlevel.current_task())
        while True:
            await trio.lowlevel.wait_task_rescheduled(succeed)
            trio.lowlevel.reschedule(tasks[0])

    nursery.start_soon(other)
    await wait_all_tasks_blocked()
    start = clock()
    for _ in range(n):
        trio.lowlevel.reschedule(tasks[1])
        await trio.lowlevel.wait_task_rescheduled(succeed)
    return clock() - start


async def _trio_passer(
    mailbox: trio.MemoryReceiveChannel[Hop], following: trio.MemorySendChannel[Hop], done: trio.Event
) -> None:
    async for m in mailbox:
        if m.left:
            following.send_nowait(Hop(m.left - 1))
        else:
            done.set()


async def _trio_ring(nursery: trio.Nursery, n: int, *, size: int) -> float:
    done = trio.Event()
    channels = [trio.open_memory_channel[Hop](math.inf) for _ in range(size)]
    for number, (_, receive) in enumerate(channels):
        nursery.start_soon(_trio_passer, receive, channels[(number + 1) % size][0], done)
    await trio.lowlevel.checkpoint()
    start = clock()
    channels[0][0].send_nowait(Hop(n))
    await done.wait()
    return clock() - start


async def _trio_fan_out(nursery: trio.Nursery, n: int) -> float:
    rounds = max(1, n // 1000)
    left = rounds * 1000
    done = trio.Event()

    async def leaf(mailbox: trio.MemoryReceiveChannel[Hit]) -> None:
        nonlocal left
        async for _ in mailbox:
            left -= 1
            if not left:
                done.set()

    leaves = []
    for _ in range(1000):
        send, receive = trio.open_memory_channel[Hit](math.inf)
        nursery.start_soon(leaf, receive)
        leaves.append(send)
    await trio.lowlevel.checkpoint()
    hit = Hit()
    start = clock()
    for _ in range(rounds):
        for send in leaves:
            send.send_nowait(hit)
    await done.wait()
    return (clock() - start) / (rounds * 1000) * n


async def _trio_spawn(nursery: trio.Nursery, n: int) -> float:
    start = clock()
    async with trio.open_nursery() as own:
        for _ in range(n):
            send, receive = trio.open_memory_channel[Any](math.inf)
            own.start_soon(_trio_sink, receive)
            send.close()
    return clock() - start


async def _trio_channel(nursery: trio.Nursery, n: int) -> float:
    send, receive = trio.open_memory_channel[Hit](256)
    hit = Hit()

    async def produce() -> None:
        async with send:
            for _ in range(n):
                await send.send(hit)

    start = clock()
    nursery.start_soon(produce)
    count = 0
    async for _ in receive:
        count += 1
    assert count == n
    return clock() - start


async def _trio_nowait(nursery: trio.Nursery, n: int) -> float:
    send, receive = trio.open_memory_channel[Hit](256)
    hit = Hit()
    start = clock()
    for _ in range(n):
        send.send_nowait(hit)
        receive.receive_nowait()
    return clock() - start


async def _trio_idle(n: int) -> float:
    async with trio.open_nursery() as nursery:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        mailboxes = []
        for _ in range(n):
            send, receive = trio.open_memory_channel[Any](math.inf)
            nursery.start_soon(_trio_sink, receive)
            mailboxes.append(send)
        await wait_all_tasks_blocked()
        octets = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        nursery.cancel_scope.cancel()
    return octets / n


trio_switches = on_trio(_trio_switches)

TRIO = Contender(
    name="trio",
    remark=f"{trio.__version__}: a task and a memory channel for each actor",
    slower=5,
    runs={
        "tell": on_trio(_trio_tell),
        "hop": on_trio(functools.partial(_trio_ring, size=2)),
        "ask": on_trio(_trio_ask),
        "ask inside": on_trio(_trio_ask),
        "tell async": on_trio(_trio_tell),
        "ask async": on_trio(_trio_ask),
        "spawn": on_trio(_trio_spawn),
        "idle": in_trio(_trio_idle),
        "bounded": on_trio(_trio_bounded),
        "fan-out": on_trio(_trio_fan_out),
        "ring": on_trio(functools.partial(_trio_ring, size=1000)),
        "channel": on_trio(_trio_channel),
        "channel nowait": on_trio(_trio_nowait),
    },
)

# ---------------------------------------------------------------- asyncio

Mailbox = asyncio.Queue[Any]


def on_asyncio(
    work: Callable[[asyncio.TaskGroup, int], Awaitable[tuple[float, list[asyncio.Task[None]]]]],
) -> Measure:
    """Make a measure of an async function that returns its seconds and the tasks that are still waiting."""

    async def main(n: int) -> float:
        async with asyncio.TaskGroup() as group:
            seconds, tasks = await work(group, n)
            for task in tasks:
                task.cancel()
        return seconds / n * 1e9

    return lambda n: asyncio.run(main(n))


async def _asyncio_sink(mailbox: Mailbox) -> None:
    hits = 0
    while True:
        m = await mailbox.get()
        if type(m) is Hit:
            hits += 1
        elif m is None:
            return
        else:
            m[1].set_result(hits)


async def _asyncio_total(mailbox: Mailbox) -> int:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await mailbox.put((Total(), answer))
    return await answer


async def _asyncio_tell(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    mailbox: Mailbox = asyncio.Queue()
    task = group.create_task(_asyncio_sink(mailbox))
    await _asyncio_total(mailbox)
    hit = Hit()
    start = clock()
    for _ in range(n):
        mailbox.put_nowait(hit)
    assert await _asyncio_total(mailbox) == n
    return clock() - start, [task]


async def _asyncio_bounded(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    mailbox: Mailbox = asyncio.Queue(256)
    task = group.create_task(_asyncio_sink(mailbox))
    await _asyncio_total(mailbox)
    hit = Hit()
    start = clock()
    for _ in range(n):
        await mailbox.put(hit)
    assert await _asyncio_total(mailbox) == n
    return clock() - start, [task]


async def _asyncio_ask(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    mailbox: Mailbox = asyncio.Queue()
    task = group.create_task(_asyncio_sink(mailbox))
    await _asyncio_total(mailbox)
    start = clock()
    for _ in range(n):
        await _asyncio_total(mailbox)
    return clock() - start, [task]


async def _asyncio_passer(mailbox: Mailbox, following: Mailbox, done: asyncio.Event) -> None:
    while True:
        m = await mailbox.get()
        if m.left:
            following.put_nowait(Hop(m.left - 1))
        else:
            done.set()


async def _asyncio_ring(group: asyncio.TaskGroup, n: int, *, size: int) -> tuple[float, list[asyncio.Task[None]]]:
    done = asyncio.Event()
    mailboxes: list[Mailbox] = [asyncio.Queue() for _ in range(size)]
    tasks = [
        group.create_task(_asyncio_passer(mailbox, mailboxes[(number + 1) % size], done))
        for number, mailbox in enumerate(mailboxes)
    ]
    await asyncio.sleep(0)
    start = clock()
    mailboxes[0].put_nowait(Hop(n))
    await done.wait()
    return clock() - start, tasks


async def _asyncio_fan_out(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    rounds = max(1, n // 1000)
    left = rounds * 1000
    done = asyncio.Event()

    async def leaf(mailbox: Mailbox) -> None:
        nonlocal left
        while True:
            await mailbox.get()
            left -= 1
            if not left:
                done.set()

    mailboxes: list[Mailbox] = [asyncio.Queue() for _ in range(1000)]
    tasks = [group.create_task(leaf(mailbox)) for mailbox in mailboxes]
    await asyncio.sleep(0)
    hit = Hit()
    start = clock()
    for _ in range(rounds):
        for mailbox in mailboxes:
            mailbox.put_nowait(hit)
    await done.wait()
    return (clock() - start) / (rounds * 1000) * n, tasks


async def _asyncio_spawn(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    start = clock()
    async with asyncio.TaskGroup() as own:
        for _ in range(n):
            mailbox: Mailbox = asyncio.Queue()
            own.create_task(_asyncio_sink(mailbox))
            mailbox.put_nowait(None)
    return clock() - start, []


async def _asyncio_channel(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    queue: Mailbox = asyncio.Queue(256)
    hit = Hit()

    async def produce() -> None:
        for _ in range(n):
            await queue.put(hit)

    start = clock()
    task = group.create_task(produce())
    for _ in range(n):
        await queue.get()
    return clock() - start, [task]


async def _asyncio_nowait(group: asyncio.TaskGroup, n: int) -> tuple[float, list[asyncio.Task[None]]]:
    queue: Mailbox = asyncio.Queue(256)
    hit = Hit()
    start = clock()
    for _ in range(n):
        queue.put_nowait(hit)
        queue.get_nowait()
    return clock() - start, []


def _asyncio_idle(n: int) -> float:
    async def main() -> float:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        mailboxes: list[Mailbox] = [asyncio.Queue() for _ in range(n)]
        tasks = [asyncio.create_task(_asyncio_sink(mailbox)) for mailbox in mailboxes]
        await asyncio.sleep(0)
        octets = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        for mailbox in mailboxes:
            mailbox.put_nowait(None)
        await asyncio.gather(*tasks)
        return octets / n

    return asyncio.run(main())


asyncio_ask = on_asyncio(_asyncio_ask)

ASYNCIO = Contender(
    name="asyncio",
    remark=f"of Python {platform.python_version()}: a task and a queue for each actor",
    slower=2,
    runs={
        "tell": on_asyncio(_asyncio_tell),
        "hop": on_asyncio(functools.partial(_asyncio_ring, size=2)),
        "ask": asyncio_ask,
        "ask inside": asyncio_ask,
        "tell async": on_asyncio(_asyncio_tell),
        "ask async": asyncio_ask,
        "spawn": on_asyncio(_asyncio_spawn),
        "idle": _asyncio_idle,
        "bounded": on_asyncio(_asyncio_bounded),
        "fan-out": on_asyncio(_asyncio_fan_out),
        "ring": on_asyncio(functools.partial(_asyncio_ring, size=1000)),
        "channel": on_asyncio(_asyncio_channel),
        "channel nowait": on_asyncio(_asyncio_nowait),
    },
)
