"""Our side of the workloads, in the order of the table."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import msgpack
import trio

from levada.framework import Actor, ActorSystem, Asks, Codec, Ref, bounded, channel, handles, message, restart

from ._measure import Contender, Measure

__all__ = ["CONTENDER", "in_trio", "raw_msgpack", "raw_msgpack_list", "raw_msgpack_nested"]

clock = time.perf_counter

LINUX = Path("/proc/self/statm").exists()


@message
class Hit:
    pass


@message
class Total(Asks[int]):
    pass


@message
class Hop:
    left: int


@message
class Meet:
    other: Ref[Any]


@message
class Go:
    n: int


class Sink(Actor[Hit | Total]):
    hits: int = 0

    @handles
    def hit(self, m: Hit) -> None:
        self.hits += 1

    @handles
    def total(self, m: Total) -> int:
        return self.hits


class AsyncSink(Actor[Hit | Total]):
    hits: int = 0

    @handles
    async def hit(self, m: Hit) -> None:
        self.hits += 1

    @handles
    async def total(self, m: Total) -> int:
        return self.hits


class Passer(Actor[Hop | Meet]):
    done: trio.Event
    other: Ref[Hop] | None = None

    @handles
    def meet(self, m: Meet) -> None:
        self.other = m.other

    @handles
    def hop(self, m: Hop) -> None:
        if m.left:
            assert self.other is not None
            self.other.tell(Hop(m.left - 1))
        else:
            self.done.set()


class Asker(Actor[Go]):
    sink: Ref[Hit | Total]
    done: trio.Event

    @handles
    async def go(self, m: Go) -> None:
        for _ in range(m.n):
            await self.sink.ask(Total())
        self.done.set()


class Tally:
    """Counts what many actors handled."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = trio.Event()

    def count(self) -> None:
        self.wanted -= 1
        if not self.wanted:
            self.done.set()


class Leaf(Actor[Hit]):
    tally: Tally

    @handles
    def hit(self, m: Hit) -> None:
        self.tally.count()


class Clumsy(Actor[Hit | Total]):
    @handles
    def hit(self, m: Hit) -> None:
        raise ValueError("on purpose")

    @handles
    def total(self, m: Total) -> int:
        return 0


class Nothing(Actor[Any]):
    pass


def in_trio(main: Callable[[int], Awaitable[float]]) -> Measure:
    """Make a measure of an async function."""
    return lambda n: trio.run(main, n)


def in_system(work: Callable[[ActorSystem, int], Awaitable[float]]) -> Measure:
    """Make a measure of an async function that gets a system and does `n` operations in the seconds that it returns."""

    async def main(n: int) -> float:
        async with ActorSystem() as system:
            return await work(system, n) / n * 1e9

    return in_trio(main)


async def flood(system: ActorSystem, n: int, sink: Ref[Hit | Total]) -> float:
    hit = Hit()
    await sink.ask(Total())
    tell = sink.tell
    start = clock()
    for _ in range(n):
        tell(hit)
    assert await sink.ask(Total(), timeout=None) == n
    return clock() - start


async def tell_sync(system: ActorSystem, n: int) -> float:
    return await flood(system, n, system.spawn(Sink))


async def tell_async(system: ActorSystem, n: int) -> float:
    return await flood(system, n, system.spawn(AsyncSink))


async def send_bounded(system: ActorSystem, n: int) -> float:
    sink = system.spawn(Sink, mailbox=bounded(256))
    hit = Hit()
    await sink.ask(Total())
    start = clock()
    for _ in range(n):
        await sink.send(hit)
    assert await sink.ask(Total(), timeout=None) == n
    return clock() - start


async def in_ring(system: ActorSystem, n: int, *, size: int) -> float:
    done = trio.Event()
    ring = [system.spawn(Passer, done) for _ in range(size)]
    for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
        one.tell(Meet(other))
    await trio.lowlevel.checkpoint()
    start = clock()
    ring[0].tell(Hop(n))
    await done.wait()
    return clock() - start


async def hop(system: ActorSystem, n: int) -> float:
    return await in_ring(system, n, size=2)


async def ring(system: ActorSystem, n: int) -> float:
    return await in_ring(system, n, size=1000)


async def ask_outside(system: ActorSystem, n: int) -> float:
    sink = system.spawn(Sink)
    total = Total()
    await sink.ask(total)
    start = clock()
    for _ in range(n):
        await sink.ask(total)
    return clock() - start


async def ask_async(system: ActorSystem, n: int) -> float:
    sink = system.spawn(AsyncSink)
    total = Total()
    await sink.ask(total)
    start = clock()
    for _ in range(n):
        await sink.ask(total)
    return clock() - start


async def ask_inside(system: ActorSystem, n: int) -> float:
    done = trio.Event()
    asker = system.spawn(Asker, system.spawn(Sink), done)
    start = clock()
    asker.tell(Go(n))
    await done.wait()
    return clock() - start


async def fan_out(system: ActorSystem, n: int) -> float:
    rounds = max(1, n // 1000)
    tally = Tally(rounds * 1000)
    leaves = [system.spawn(Leaf, tally) for _ in range(1000)]
    hit = Hit()
    start = clock()
    for _ in range(rounds):
        for leaf in leaves:
            leaf.tell(hit)
    await tally.done.wait()
    return (clock() - start) / (rounds * 1000) * n


async def spawn_stop(system: ActorSystem, n: int) -> float:
    start = clock()
    last = system.spawn(Nothing)
    last.stop()
    for _ in range(n - 1):
        last = system.spawn(Nothing)
        last.stop()
    await last.terminated()
    seconds = clock() - start
    assert system.statistics().actors == 0
    return seconds


async def fail_restart(system: ActorSystem, n: int) -> float:
    log = logging.getLogger("levada")
    # Records are made and thrown away: a handler's own work does not count.
    handler, propagate = logging.NullHandler(), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        clumsy = system.spawn(Clumsy, supervise=restart(max=n + 1, within=3600.0))
        hit = Hit()
        start = clock()
        for _ in range(n):
            clumsy.tell(hit)
        await clumsy.ask(Total(), timeout=None)
        seconds = clock() - start
    finally:
        log.propagate = propagate
        log.removeHandler(handler)
    assert system.statistics().restarts == n
    return seconds


async def from_thread(system: ActorSystem, n: int) -> float:
    sink = system.spawn(Sink)
    await sink.ask(Total())

    def tell() -> float:
        hit, tell = Hit(), sink.from_thread.tell
        start = clock()
        for _ in range(n):
            tell(hit)
        return clock() - start

    seconds = await trio.to_thread.run_sync(tell)
    while await sink.ask(Total()) < n:
        await trio.lowlevel.checkpoint()
    return seconds


async def lateness(system: ActorSystem, n: int, choose: Callable[[list[float]], float]) -> float:
    """How late a sleep of 5 ms ends while two actors exchange messages as fast as they can."""
    await_never = trio.Event()
    pair = [system.spawn(Passer, await_never) for _ in range(2)]
    pair[0].tell(Meet(pair[1]))
    pair[1].tell(Meet(pair[0]))
    pair[0].tell(Hop(1 << 60))
    late = []
    for _ in range(n):
        due = trio.current_time() + 0.005
        await trio.sleep_until(due)
        late.append(trio.current_time() - due)
    for one in pair:
        one.kill()
    return choose(late) * n


async def late_median(system: ActorSystem, n: int) -> float:
    return await lateness(system, n, statistics.median)


async def late_worst(system: ActorSystem, n: int) -> float:
    return await lateness(system, n, max)


async def _channel_tasks(n: int) -> float:
    sender, receiver = channel(Hit)
    hit = Hit()

    async def send() -> None:
        async with sender:
            for _ in range(n):
                await sender.send(hit)

    start = clock()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        count = 0
        async for _ in receiver:
            count += 1
    assert count == n
    return (clock() - start) / n * 1e9


async def _channel_nowait(n: int) -> float:
    sender, receiver = channel(Hit)
    hit = Hit()
    start = clock()
    for _ in range(n):
        sender.send_nowait(hit)
        receiver.receive_nowait()
    seconds = clock() - start
    sender.finish_nowait()
    return seconds / n * 1e9


@message("bench.Trade")
class Trade:
    symbol: str
    price: float
    quantity: int
    venues: list[str]


TRADE = Trade("EURUSD", 1.0842, 1_000_000, ["one", "two"])


@message("bench.Order")
class Order:
    by: str
    trade: Trade


@message("bench.Quote")
class Quote:
    symbol: str
    bid: float
    ask: float
    volume: int


@message("bench.Quotes")
class Quotes:
    quotes: list[Quote]


ORDER = Order("anna", TRADE)
QUOTES = Quotes([Quote("EURUSD", 1.0842, 1.0843, 1_000_000)] * 100)


def _codec(value: object, n: int) -> float:
    codec = Codec()
    start = clock()
    for _ in range(n):
        codec.decode(codec.encode(value))
    seconds = clock() - start
    assert codec.decode(codec.encode(value)) == value
    return seconds / n * 1e9


def _raw(value: object, n: int) -> float:
    """Pack and unpack the same values as lists, without classes around them."""
    row, pack, unpack = _row(value), msgpack.packb, msgpack.unpackb
    start = clock()
    for _ in range(n):
        unpack(pack(row))
    return (clock() - start) / n * 1e9


def _row(value: Any) -> Any:
    if isinstance(value, list):
        return [_row(each) for each in value]
    if attrs.has(type(value)):
        return [
            f"bench.{type(value).__name__}",
            *(_row(getattr(value, field.name)) for field in attrs.fields(type(value))),
        ]
    return value


def codec(n: int) -> float:
    return _codec(TRADE, n)


def codec_nested(n: int) -> float:
    return _codec(ORDER, n)


def codec_list(n: int) -> float:
    return _codec(QUOTES, n)


def raw_msgpack(n: int) -> float:
    return _raw(TRADE, n // 5)


def raw_msgpack_nested(n: int) -> float:
    return _raw(ORDER, n // 5)


def raw_msgpack_list(n: int) -> float:
    return _raw(QUOTES, n // 5)


def _table_of(children: int) -> int:
    """Bytes of a parent's table of so many children, grown one by one as a parent's is."""
    table: dict[object, None] = {}
    for child in range(children):
        table[child] = None
    return sys.getsizeof(table)


async def _idle_bytes(n: int) -> float:
    async with ActorSystem() as system:
        system.spawn(Nothing)  # the first actor makes what all share
        table = _table_of(1)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(n):
            system.spawn(Nothing)
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        # The parent's table of its children doubles now and then; it is no part of the child.
        return (after - before - (_table_of(n + 1) - table)) / n


def million(key: str) -> Measure:
    """Take one figure of a run in a process of its own, whose memory nothing else has used before."""

    def run(n: int) -> float:
        if n not in _MILLION:
            root = Path(__file__).parents[1]
            command = [sys.executable, "-m", "benchmarks._million", str(n)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
            _MILLION[n] = json.loads(done.stdout)
        return _MILLION[n][key]

    return run


_MILLION: dict[int, dict[str, float]] = {}

CONTENDER = Contender(
    name="levada",
    remark="this checkout: actors on a run queue, all features on",
    runs={
        "tell": in_system(tell_sync),
        "hop": in_system(hop),
        "ask": in_system(ask_outside),
        "ask inside": in_system(ask_inside),
        "tell async": in_system(tell_async),
        "spawn": in_system(spawn_stop),
        "idle": in_trio(_idle_bytes),
        "bounded": in_system(send_bounded),
        "ask async": in_system(ask_async),
        "fan-out": in_system(fan_out),
        "ring": in_system(ring),
        "restart": in_system(fail_restart),
        "thread": in_system(from_thread),
        "channel": in_trio(_channel_tasks),
        "channel nowait": in_trio(_channel_nowait),
        "codec": codec,
        "codec nested": codec_nested,
        "codec list": codec_list,
        "late": in_system(late_median),
        "late worst": in_system(late_worst),
        # The memory of a process is read from /proc, which only Linux has.
        **({f"million {key}": million(key) for key in ("spawn", "bytes", "tell", "stop")} if LINUX else {}),
    },
)
