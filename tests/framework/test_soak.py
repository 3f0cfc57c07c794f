"""Everything at once, for a long time, under a seed: nothing leaks, nothing hangs, nothing arrives twice or out of order.

``LEVADA_SOAK_SECONDS`` (600) is how long the long run takes, ``LEVADA_SOAK_SEED`` (drawn by lot) repeats one.  Time inside is virtual,
so that back-off, deadlines and timers are part of every round.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Down,
    Exit,
    Killed,
    ReceiveTimeout,
    Ref,
    bounded,
    child,
    conflate,
    handles,
    message,
    one_for_all,
    one_for_one,
    rest_for_one,
    restart,
)
from levada.framework._runtime.cell import Cell, Extras
from levada.framework.channel import channel
from levada.framework.errors import ActorError, ChannelError, LevadaError
from levada.framework.supervisor import Children, StartChild, StopChild, Supervisor


@message
class Count:
    """One of a series that one sender tells one actor."""

    sender: int
    number: int


@message
class Echo(Asks[int]):
    n: int
    seconds: float


@message
class Later(Asks[int]):
    """Answered after the handler has returned, perhaps by nobody."""

    n: int


@message
class Act:
    """Do one of the things that actors do, chosen by lot."""

    lot: random.Random


@message
class Busy:
    seconds: float


class Trouble(Exception):
    """What fails, fails with this."""


class World:
    """What the actors of one run know of each other."""

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.refs: list[Ref[Any]] = []
        self.seen: dict[tuple[int, Ref[Any]], int] = {}
        self.open_contexts = 0
        self.open_tasks = 0
        self.wrong: list[str] = []

    def any(self, lot: random.Random) -> Ref[Any]:
        return lot.choice(self.refs)


@asynccontextmanager
async def context(world: World, seconds: float) -> AsyncIterator[None]:
    await trio.sleep(seconds)
    world.open_contexts += 1
    try:
        yield
    finally:
        world.open_contexts -= 1
        with trio.move_on_after(seconds):
            await trio.sleep(seconds)


async def pause(seconds: float) -> None:
    await trio.sleep(seconds)


class Other(Behaviour):
    @handles
    def busy(self: Any, m: Busy) -> None:
        self.become(None)
        self.unstash_all()

    @handles
    def rest(self: Any, m: Count | Echo | Later | Act | Down | Exit | ReceiveTimeout) -> None:
        self.stash(m)


class Soaked(Actor[Count | Echo | Later | Act | Busy | Down | Exit | ReceiveTimeout]):
    world: World
    kind: int

    stash_limit = 50

    def started(self) -> Any:
        self.trap_exits = self.kind % 3 == 0
        self.strategy = (one_for_one(), one_for_all(), rest_for_one())[self.kind % 3]
        self.world.refs.append(self.ref)
        if self.kind % 7 == 1:
            return pause(0.01)
        return None

    def stopping(self, reason: Any) -> Any:
        if self.kind % 5 == 1:
            return pause(0.01)
        if self.kind % 11 == 1:
            raise Trouble("stopping")
        return None

    def restarting(self, error: BaseException | None, message: Any) -> Any:
        if self.kind % 5 == 2:
            return pause(0.01)
        return None

    @handles
    def count(self, m: Count) -> None:
        key = (m.sender, self.ref)
        if m.number <= self.world.seen.get(key, -1):
            self.world.wrong.append(f"{m} at {self.ref!r} after {self.world.seen[key]}")
        self.world.seen[key] = m.number

    @handles
    async def echo(self, m: Echo) -> int:
        if m.seconds:
            await trio.sleep(m.seconds)
        return m.n

    @handles
    def later(self, m: Later) -> None:
        reply = self.reply_later()
        if m.n % 3 == 0:
            self.start_soon(self._answer, reply, m.n)
        elif m.n % 3 == 1:
            reply.send(m.n)

    async def _answer(self, reply: Any, n: int) -> None:
        await trio.sleep(0.01)
        reply.send(n)

    @handles
    async def busy(self, m: Busy) -> None:
        await trio.sleep(m.seconds)

    @handles
    def signal(self, m: Down | Exit | ReceiveTimeout) -> None:
        pass

    @handles
    async def act(self, m: Act) -> None:
        lot, world = m.lot, self.world
        what = lot.randrange(20)
        if what == 0:
            raise Trouble("handler")
        if what == 1:
            self.stop()
        elif what == 2 and len(self.children) < 4:
            self.spawn_some(lot)
        elif what == 3:
            self.watch(world.any(lot), lot.randrange(3))
        elif what == 4:
            self.link(world.any(lot))
        elif what == 5:
            self.unlink(world.any(lot))
            self.unwatch(world.any(lot), 1)
        elif what == 6:
            self.timers.every(lot.randrange(3), lot.uniform(0.05, 1), Busy(0))
        elif what == 7:
            self.timers.once(lot.randrange(3), lot.uniform(0, 1), Echo(1, 0.0))
            self.timers.cancel(lot.randrange(3))
        elif what == 8:
            self.set_receive_timeout(lot.choice([None, 0.1, 1.0]))
        elif what == 9:
            self.start_soon(self._task, lot.uniform(0, 1), lot.random() < 0.2)
        elif what == 10:
            with trio.move_on_after(lot.uniform(0, 0.2)):
                await self.enter(context(world, lot.uniform(0, 0.1)))
        elif what == 11:
            self.pipe(functools.partial(trio.sleep, lot.uniform(0, 0.5)), lambda _: Busy(0))
        elif what == 12:
            self.become(Other)
            self.timers.once("open", 0.1, Busy(0))
        elif what == 13:
            with contextlib.suppress(LevadaError):
                world.system.groups.join(lot.randrange(3), self.ref)
            with contextlib.suppress(LevadaError):
                world.system.registry.register(str(lot.randrange(5)), self.ref)
        elif what == 14:
            # May be refused as a cycle, time out, or find nobody: all of it is an ActorError.
            with contextlib.suppress(ActorError):
                await world.any(lot).ask(Echo(7, 0.0), timeout=0.5)
        elif what == 15:
            with contextlib.suppress(ActorError), trio.move_on_after(0.5):
                await world.any(lot).send(Busy(0.01))
        elif what == 16:
            await trio.sleep(lot.uniform(0, 0.3))
        elif what == 17:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep, 0.05)
                nursery.start_soon(self._task, 0.01, lot.random() < 0.2)
        elif what == 18:
            world.any(lot).kill()

    async def _task(self, seconds: float, fails: bool) -> None:
        self.world.open_tasks += 1
        try:
            await trio.sleep(seconds)
            if fails:
                raise Trouble("task")
        finally:
            self.world.open_tasks -= 1

    def spawn_some(self, lot: random.Random) -> None:
        self.spawn(Soaked, self.world, lot.randrange(1000), mailbox=mailbox(lot), supervise=policy(lot))


def policy(lot: random.Random) -> Any:
    if lot.random() < 0.2:
        return lot.choice(["stop", "escalate"])
    return restart(
        lot.choice(["permanent", "transient", "temporary"]),
        max=lot.randrange(5),
        within=lot.choice([0.1, 1.0]),
        initial_backoff=lot.choice([0.0, 0.05]),
        max_backoff=0.5,
        resume=lot.choice([(), (Trouble,)]),
    )


def mailbox(lot: random.Random) -> Any:
    # Those that drop would break series; they are counted elsewhere.
    return lot.choice([None, None, bounded(3), bounded(20, overflow="raise"), bounded(5, overflow=conflate(id))])


# ---------------------------------------------------------------- the load


async def drive(world: World, number: int, lot: random.Random, steps: int) -> None:
    """One task outside the actors: tells, sends, asks, kills, channels."""
    series: dict[Ref[Any], int] = {}
    for _ in range(steps):
        ref = world.any(lot)
        what = lot.randrange(10)
        try:
            if what < 3:
                n = series[ref] = series.get(ref, -1) + 1
                if lot.random() < 0.5:
                    ref.tell(Count(number, n))
                else:
                    with trio.move_on_after(0.2):
                        await ref.send(Count(number, n))
            elif what < 6:
                ref.tell(Act(lot))
            elif what == 6:
                n = lot.randrange(1000)
                answer = await ref.ask(Echo(n, lot.choice([0.0, 0.0, 0.05])), timeout=0.3)
                if answer not in (n, None):  # None: somebody's stash let go of it
                    world.wrong.append(f"{answer!r} for {n}")
            elif what == 7:
                n = lot.randrange(1000)
                with trio.move_on_after(0.2):
                    answer = await ref.ask(Later(n), timeout=0.3)
                    if answer not in (n, None):
                        world.wrong.append(f"{answer!r} for {n}")
            elif what == 8:
                await feed(ref, number, series, lot)
            elif lot.random() < 0.3:
                ref.kill()
            else:
                ref.stop(now=lot.random() < 0.5)
        except (ActorError, ChannelError):
            pass
        if lot.random() < 0.3:
            await trio.sleep(lot.choice([0, 0.001, 0.05]))


async def feed(ref: Ref[Any], number: int, series: dict[Ref[Any], int], lot: random.Random) -> None:
    sender, receiver = channel(Count)
    sender.ordered(window=4)
    with sender:
        receiver.to_mailbox(ref)
        with trio.move_on_after(0.2):
            for _ in range(lot.randrange(10)):
                n = series[ref] = series.get(ref, -1) + 1
                await sender.send(Count(number, n))
        # What this one still holds must not come behind what the next one sends.
        sender.cancel()


async def manage(world: World, top: Ref[Any], lot: random.Random, steps: int) -> None:
    """Keep the tree populated."""
    for step in range(steps):
        name = f"run {step}"
        spec = child(Soaked, world, lot.randrange(1000), name=name, mailbox=mailbox(lot), supervise=policy(lot))
        try:
            await top.ask(StartChild(spec), timeout=None)
            if lot.random() < 0.3:
                await top.ask(StopChild(name), timeout=None)
            children = await top.ask(Children(), timeout=None)
        except ActorError:
            children = []
        for ref in children[:-30]:
            ref.stop()
        world.refs = [ref for ref in world.refs if ref.is_alive][-200:] or [top]
        await trio.sleep(0.05)


async def one_round(system: ActorSystem, lot: random.Random) -> int:
    """Run a world to its end within a system that goes on; return how many actors there were."""
    before = system.statistics().spawned
    world = World(system)
    again = restart("permanent", max=1_000_000, within=1.0)
    top = system.spawn(
        Supervisor, [child(Soaked, world, n, supervise=again) for n in range(5)], one_for_one(), supervise=again
    )
    await wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(drive, world, number, random.Random(lot.random()), 300)
        nursery.start_soon(manage, world, top, random.Random(lot.random()), 30)
    # A kill alone would be followed by a new start.
    system.lifecycle.request(top, Killed(), cancel=True, final=True)  # type: ignore[arg-type]
    await top.terminated()
    await trio.sleep(5)
    await wait_all_tasks_blocked()
    assert world.wrong == []
    at_rest(system)
    assert (world.open_contexts, world.open_tasks) == (0, 0)
    return system.statistics().spawned - before


def at_rest(system: ActorSystem) -> None:
    """What holds of a system in which nobody lives."""
    numbers = system.statistics()
    assert numbers.actors == 0
    assert numbers.waiting == 0
    assert numbers.ready == 0
    assert numbers.timers == 0
    assert numbers.workers <= 9
    assert len(system.heap._entries) <= 130
    assert system.observe.waits() == []
    assert system.observe.tree().children == ()
    assert not system.registry._refs
    # Workers, the timers' task, nothing else.
    assert len(system._nursery.child_tasks) == numbers.workers + 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Thousands of failures are the point here; their log lines are not."""
    logger = logging.getLogger("levada")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def resident() -> int:
    """Octets of memory that this process holds."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


def leftovers() -> int:
    """Count what only living actors should keep alive."""
    gc.collect()
    return sum(issubclass(type(thing), Cell | Extras | Soaked) for thing in gc.get_objects())


async def soak(seconds: float, rounds: int, seed: int) -> dict[str, Any]:
    """Run rounds for so long, at least so many; return measures after a third of the time, and at the end."""
    lot = random.Random(seed)
    begin = time.monotonic()
    measures: list[tuple[int, int, int]] = []
    done = actors = 0
    async with ActorSystem("soak", seed=seed, stop_timeout=0.5) as system:
        while done < rounds or time.monotonic() - begin < seconds:
            actors += await one_round(system, lot)
            done += 1
            if done >= rounds // 3 and time.monotonic() - begin > seconds / 3:
                left = leftovers()
                measures.append((left, sys.getallocatedblocks(), resident()))
    return {"rounds": done, "actors": actors, "first": measures[0], "last": measures[-1], "measures": measures}


def run(seconds: float, rounds: int, seed: int) -> dict[str, Any]:
    try:
        with quiet():
            return trio.run(soak, seconds, rounds, seed, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.ci
def test_two_rounds() -> None:
    """The same as below, so short that it is part of every run."""
    found = run(0.0, 2, 7)
    assert found["actors"] > 20


@pytest.mark.soak
def test_long_run_in_flat_memory(record_property: Any) -> None:
    seed = int(os.environ.get("LEVADA_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    found = run(float(os.environ.get("LEVADA_SOAK_SECONDS", "600")), 12, seed)
    record_property("seed", seed)
    record_property("rounds", found["rounds"])
    where = f"seed {seed}, {found['rounds']} rounds, {found['actors']} actors"
    (cells, blocks, octets), (cells_after, blocks_after, bytes_after) = found["first"], found["last"]
    assert cells_after <= cells, where
    assert blocks_after <= blocks * 1.05, where
    assert bytes_after <= octets * 1.05, where
