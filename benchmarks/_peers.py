"""The workloads on other actor libraries, each as its own documentation would write them; none is a dependency.

What a library cannot do (a bounded mailbox whose senders wait, an ask from within an actor) is left out and shows as a dash.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from ._levada import Go, Hit, Hop, Meet, Total
from ._measure import Contender, Measure

__all__ = ["peers"]

clock = time.perf_counter


def peers() -> list[Contender]:
    """Find the installed libraries; the others get a row that says so and no figures."""
    return [
        _contender("Pykka", "pykka", pykka_runs, slower=10, how="a thread for each actor"),
        _contender(
            "Thespian",
            "thespian.actors",
            thespian_runs,
            slower=5,
            how="its simple base, which runs one handler at a time",
        ),
        _contender("xoscar", "xoscar", xoscar_runs, slower=50, how="one pool in this process"),
    ]


def _contender(
    name: str, module: str, runs: Callable[[ModuleType], Mapping[str, Measure]], *, slower: int, how: str
) -> Contender:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return Contender(name=name, remark=f"not installed (pip install {name.lower()})", runs={})
    version = importlib.metadata.version(name)
    return Contender(name=name, remark=f"{version}: {how}", runs=runs(found), slower=slower)


# ---------------------------------------------------------------- Pykka


def pykka_runs(pykka: Any) -> Mapping[str, Measure]:
    class Sink(pykka.ThreadingActor):  # type: ignore[misc]  # its types are not here
        def __init__(self) -> None:
            super().__init__()
            self.hits = 0

        def on_receive(self, m: object) -> Any:
            if type(m) is Hit:
                self.hits += 1
                return None
            return self.hits

    class Asker(pykka.ThreadingActor):  # type: ignore[misc]  # its types are not here
        def __init__(self, sink: Any) -> None:
            super().__init__()
            self.sink = sink

        def on_receive(self, m: Go) -> int:
            total = Total()
            for _ in range(m.n):
                self.sink.ask(total)
            return m.n

    class Passer(pykka.ThreadingActor):  # type: ignore[misc]  # its types are not here
        def __init__(self, done: threading.Event) -> None:
            super().__init__()
            self.other: Any = None
            self.done = done

        def on_receive(self, m: Hop | Meet) -> None:
            if isinstance(m, Meet):
                self.other = m.other
            elif m.left:
                self.other.tell(Hop(m.left - 1))
            else:
                self.done.set()

    def per_operation(work: Callable[[int], float]) -> Measure:
        def run(n: int) -> float:
            try:
                return work(n) / n * 1e9
            finally:
                pykka.ActorRegistry.stop_all()

        return run

    def tell(n: int) -> float:
        sink = Sink.start()
        hit = Hit()
        start = clock()
        for _ in range(n):
            sink.tell(hit)
        assert sink.ask(Total()) == n
        return clock() - start

    def ask(n: int) -> float:
        sink = Sink.start()
        total = Total()
        start = clock()
        for _ in range(n):
            sink.ask(total)
        return clock() - start

    def ask_inside(n: int) -> float:
        asker = Asker.start(Sink.start())
        start = clock()
        asker.ask(Go(n))
        return clock() - start

    def ring(n: int, *, size: int) -> float:
        done = threading.Event()
        ring = [Passer.start(done) for _ in range(size)]
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            one.tell(Meet(other))
        start = clock()
        ring[0].tell(Hop(n))
        done.wait()
        return clock() - start

    def fan_out(n: int) -> float:
        rounds = max(1, n // 1000)
        left = rounds * 1000
        lock, done = threading.Lock(), threading.Event()

        class Leaf(pykka.ThreadingActor):  # type: ignore[misc]  # its types are not here
            def on_receive(self, m: object) -> None:
                nonlocal left
                with lock:
                    left -= 1
                if not left:
                    done.set()

        leaves = [Leaf.start() for _ in range(1000)]
        hit = Hit()
        start = clock()
        for _ in range(rounds):
            for leaf in leaves:
                leaf.tell(hit)
        done.wait()
        return (clock() - start) / (rounds * 1000) * n

    def spawn(n: int) -> float:
        start = clock()
        for _ in range(n):
            Sink.start().stop()
        return clock() - start

    def idle(n: int) -> float:
        n = min(n, 500)  # threads; their stacks are not counted here
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        actors = [Sink.start() for _ in range(n)]
        octets = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(actors) == n
        pykka.ActorRegistry.stop_all()
        return octets / n

    return {
        "tell": per_operation(tell),
        "hop": per_operation(functools.partial(ring, size=2)),
        "ask": per_operation(ask),
        "ask inside": per_operation(ask_inside),
        "spawn": per_operation(spawn),
        "idle": idle,
        "fan-out": per_operation(fan_out),
        "ring": per_operation(functools.partial(ring, size=1000)),
    }


# ---------------------------------------------------------------- Thespian


def thespian_runs(thespian: Any) -> Mapping[str, Measure]:
    class Sink(thespian.Actor):  # type: ignore[misc]  # its types are not here
        hits = 0

        def receiveMessage(self, m: object, sender: Any) -> None:  # noqa: N802  # its name
            if type(m) is Hit:
                self.hits += 1
            elif type(m) is Total:
                self.send(sender, self.hits)

    class Passer(thespian.Actor):  # type: ignore[misc]  # its types are not here
        other: Any = None
        asker: Any = None

        def receiveMessage(self, m: object, sender: Any) -> None:  # noqa: N802  # its name
            if isinstance(m, Meet):
                self.other = m.other
            elif isinstance(m, Hop):
                if m.left:
                    self.send(self.other, Hop(m.left - 1))
                else:
                    self.send(self.asker, "done")
            elif m == "asker":
                self.asker = sender
                self.send(sender, "ready")

    def in_system(work: Callable[[Any, int], float]) -> Measure:
        def run(n: int) -> float:
            system = thespian.ActorSystem("simpleSystemBase")
            try:
                return work(system, n) / n * 1e9
            finally:
                system.shutdown()

        return run

    def tell(system: Any, n: int) -> float:
        sink = system.createActor(Sink)
        hit = Hit()
        start = clock()
        for _ in range(n):
            system.tell(sink, hit)
        assert system.ask(sink, Total()) == n
        return clock() - start

    def ask(system: Any, n: int) -> float:
        sink = system.createActor(Sink)
        total = Total()
        start = clock()
        for _ in range(n):
            system.ask(sink, total)
        return clock() - start

    def ring(system: Any, n: int, *, size: int) -> float:
        ring = [system.createActor(Passer) for _ in range(size)]
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            system.tell(one, Meet(other))
        system.ask(ring[n % size], "asker")
        start = clock()
        assert system.ask(ring[0], Hop(n)) == "done"
        return clock() - start

    def fan_out(system: Any, n: int) -> float:
        rounds = max(1, n // 1000)
        leaves = [system.createActor(Sink) for _ in range(1000)]
        hit = Hit()
        start = clock()
        for _ in range(rounds):
            for leaf in leaves:
                system.tell(leaf, hit)
        seconds = clock() - start
        # This base has handled everything by the time `tell` returns.
        assert all(system.ask(leaf, Total()) == rounds for leaf in leaves)
        return seconds / (rounds * 1000) * n

    def spawn(system: Any, n: int) -> float:
        start = clock()
        for _ in range(n):
            system.tell(system.createActor(Sink), thespian.ActorExitRequest())
        return clock() - start

    def idle(n: int) -> float:
        system = thespian.ActorSystem("simpleSystemBase")
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        actors = [system.createActor(Sink) for _ in range(n)]
        octets = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(actors) == n
        system.shutdown()
        return octets / n

    return {
        "tell": in_system(tell),
        "hop": in_system(functools.partial(ring, size=2)),
        "ask": in_system(ask),
        "spawn": in_system(spawn),
        "idle": idle,
        "fan-out": in_system(fan_out),
        "ring": in_system(functools.partial(ring, size=1000)),
    }


# ---------------------------------------------------------------- xoscar


def xoscar_runs(xoscar: Any) -> Mapping[str, Measure]:
    class Sink(xoscar.Actor):  # type: ignore[misc]  # its types are not here
        def __init__(self) -> None:
            self.hits = 0

        def hit(self, m: Hit) -> None:
            self.hits += 1

        def total(self) -> int:
            return self.hits

    class Asker(xoscar.Actor):  # type: ignore[misc]  # its types are not here
        def __init__(self, sink: Any) -> None:
            self.sink = sink

        async def go(self, n: int) -> None:
            for _ in range(n):
                await self.sink.total()

    class Passer(xoscar.Actor):  # type: ignore[misc]  # its types are not here
        def __init__(self) -> None:
            self.other: Any = None
            self.over = asyncio.Event()

        def meet(self, other: Any) -> None:
            self.other = other

        async def hop(self, m: Hop) -> None:
            if m.left:
                await self.other.hop.tell(Hop(m.left - 1))
            else:
                DONE[0].set()

    # A pool of one process shares memory with its maker, so an event will do to say that the ring is through.
    DONE: list[asyncio.Event] = []  # noqa: N806  # shared by the actors above

    def in_pool(work: Callable[[Callable[..., Awaitable[Any]], int], Awaitable[float]]) -> Measure:
        async def main(n: int) -> float:
            pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=0)
            async with pool:
                create = functools.partial(xoscar.create_actor, address=pool.external_address)
                return await work(create, n) / n * 1e9

        return lambda n: asyncio.run(main(n))

    async def tell(create: Callable[..., Awaitable[Any]], n: int) -> float:
        sink = await create(Sink, uid="sink")
        hit = Hit()
        start = clock()
        for _ in range(n):
            await sink.hit.tell(hit)
        assert await sink.total() == n
        return clock() - start

    async def ask(create: Callable[..., Awaitable[Any]], n: int) -> float:
        sink = await create(Sink, uid="sink")
        start = clock()
        for _ in range(n):
            await sink.total()
        return clock() - start

    async def ask_inside(create: Callable[..., Awaitable[Any]], n: int) -> float:
        asker = await create(Asker, await create(Sink, uid="sink"), uid="asker")
        start = clock()
        await asker.go(n)
        return clock() - start

    async def ring(create: Callable[..., Awaitable[Any]], n: int, *, size: int) -> float:
        DONE[:] = [asyncio.Event()]
        ring = [await create(Passer, uid=f"passer-{number}") for number in range(size)]
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            await one.meet(other)
        start = clock()
        await ring[0].hop.tell(Hop(n))
        await DONE[0].wait()
        return clock() - start

    async def fan_out(create: Callable[..., Awaitable[Any]], n: int) -> float:
        rounds = max(1, n // 1000)
        leaves = [await create(Sink, uid=f"leaf-{number}") for number in range(1000)]
        hit = Hit()
        start = clock()
        for _ in range(rounds):
            for leaf in leaves:
                await leaf.hit.tell(hit)
        # Messages are handled in the order of sending, so the last actor is the last to be done.
        assert await leaves[-1].total() == rounds
        seconds = clock() - start
        for leaf in leaves:
            assert await leaf.total() == rounds
        return seconds / (rounds * 1000) * n

    async def spawn(create: Callable[..., Awaitable[Any]], n: int) -> float:
        start = clock()
        for number in range(n):
            await xoscar.destroy_actor(await create(Sink, uid=f"sink-{number}"))
        return clock() - start

    async def idle(create: Callable[..., Awaitable[Any]], n: int) -> float:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        actors = [await create(Sink, uid=f"sink-{number}") for number in range(n)]
        octets = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(actors) == n
        return octets / 1e9  # `in_pool` divides by n and multiplies by this

    return {
        "tell": in_pool(tell),
        "hop": in_pool(functools.partial(ring, size=2)),
        "ask": in_pool(ask),
        "ask inside": in_pool(ask_inside),
        "tell async": in_pool(tell),
        "spawn": in_pool(spawn),
        "idle": in_pool(idle),
        "fan-out": in_pool(fan_out),
        "ring": in_pool(functools.partial(ring, size=1000)),
    }
