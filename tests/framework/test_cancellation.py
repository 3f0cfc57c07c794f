"""Cancellation at every await of the runtime: nothing half done, nothing left behind.

A scenario is run once to count how often its task gives up control, then once for each of these times, cancelled there: ``parked`` cancels
it while it waits, ``stepping`` when it has just been woken and will notice at its next checkpoint, ``kill`` kills its actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import attrs
import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Failed,
    Killed,
    Normal,
    Ref,
    Shutdown,
    bounded,
    handles,
    message,
)
from levada.framework.channel import channel
from levada.framework.errors import ActorStopped
from levada.framework.links import Cancelled

Mode = Literal["parked", "stepping", "kill"]
Log = list[Any]


@message
class Item:
    n: int


@message
class Question(Asks[int]):
    n: int


@message
class Hold:
    event: trio.Event


@message
class Run:
    """Call an async function with the actor."""

    function: Callable[[Any], Awaitable[object]]


class Worker(Actor[Item | Question | Hold | Run]):
    log: Log
    seconds: float = 0.0

    @handles
    def item(self, m: Item) -> None:
        self.log.append(m.n)

    @handles
    async def question(self, m: Question) -> int:
        self.log.append(m.n)
        if self.seconds:
            await trio.sleep(self.seconds)
        return m.n * 2

    @handles
    async def hold(self, m: Hold) -> None:
        await m.event.wait()

    @handles
    async def run_it(self, m: Run) -> None:
        await m.function(self)


class Quick(Actor[Question]):
    log: Log

    @handles
    def question(self, m: Question) -> int:
        self.log.append(m.n)
        return m.n * 2


# ---------------------------------------------------------------- the helper


class At(trio.abc.Instrument):
    """Calls `strike` when `task` gives up control, or is about to get it back, for the n-th time."""

    def __init__(self, mode: Mode, number: int, strike: Callable[[], None]) -> None:
        self.mode = mode
        self.number = number
        self.strike = strike
        self.count = 0
        self.task = trio.lowlevel.current_task()

    def _count(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.count += 1
            if self.count == self.number:
                self.strike()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.mode == "stepping":
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.mode != "stepping":
            self._count(task)


@attrs.define
class Outcome:
    """How one run of a scenario went."""

    struck: bool = False
    """The n-th time came before the scenario was done."""
    done: bool = False
    """The scenario ran to its end."""


async def interrupted(outcome: Outcome, mode: Mode, number: int, act: Callable[[], Awaitable[object]]) -> None:
    """Run `act`, cancelled the n-th time that this task waits."""
    with trio.CancelScope() as scope:

        def strike() -> None:
            outcome.struck = True
            scope.cancel()

        at = At(mode, number, strike)
        trio.lowlevel.add_instrument(at)
        try:
            await act()
            outcome.done = True
        finally:
            trio.lowlevel.remove_instrument(at)


def everywhere(main: Callable[[Outcome, Mode, int], Awaitable[object]], *modes: Mode) -> int:
    """Run `main` with each number until the scenario is done before its time; return how many places there were."""
    places = 0
    for mode in modes or ("parked", "stepping"):
        for number in range(1, 10_000):
            outcome = Outcome()

            async def run(outcome: Outcome = outcome, mode: Mode = mode, number: int = number) -> None:
                before = trio.lowlevel.current_statistics().tasks_living
                await main(outcome, mode, number)
                assert trio.lowlevel.current_statistics().tasks_living == before, "a task is left"

            try:
                trio.run(run, clock=MockClock(autojump_threshold=0))
            except BaseException as error:
                error.add_note(f"{mode} at {number}")
                raise
            if not outcome.struck:
                assert outcome.done
                break
            places += 1
    return places


def nothing_left(system: ActorSystem) -> None:
    """What must hold of a system that has come to rest."""
    assert system.observe.waits() == []
    assert system.scheduler.waiting == 0
    assert not system.scheduler.ready
    assert len(system.heap) == 0


def empty(ref: Any) -> None:
    """What must hold of a mailbox that has been worked off."""
    assert not ref._box
    assert not ref._batch
    assert not ref.line
    assert ref._asking is None
    assert ref._idle


# ---------------------------------------------------------------- send


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_a_cancelled_send_was_not_sent(capacity: int) -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        sent: Log = []
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            ref: Ref[Any] = system.spawn(Worker, log, mailbox=bounded(capacity))
            events = [trio.Event() for _ in range(3)]

            async def act() -> None:
                for n, event in enumerate(events):
                    await ref.send(Hold(event))
                    for k in range(4):
                        await ref.send(Item(4 * n + k))
                        sent.append(4 * n + k)

            async def release() -> None:
                for event in events:
                    await trio.sleep(1)
                    event.set()

            nursery.start_soon(release)
            await interrupted(outcome, mode, number, act)
            await trio.sleep(10)
            assert log == sent
            empty(ref)
            nothing_left(system)
            assert ref.try_tell(Item(99)) is True

    assert everywhere(main) >= 4


def test_a_cancelled_send_to_an_unbounded_mailbox() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        sent: Log = []
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 0.0002
            return now

        measure_by(clock)
        async with ActorSystem() as system:
            ref = system.spawn(Worker, log)

            async def act() -> None:
                for n in range(20):
                    await ref.send(Item(n))
                    sent.append(n)

            await interrupted(outcome, mode, number, act)
            await wait_all_tasks_blocked()
            assert log == sent
            empty(ref)

    assert everywhere(main) > 4


# ---------------------------------------------------------------- ask


@pytest.mark.parametrize("mailbox", [None, bounded(1)], ids=["unbounded", "bounded"])
def test_a_cancelled_ask_is_withdrawn_or_its_answer_dropped(mailbox: Any) -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        answers: Log = []
        async with ActorSystem() as system:
            ref: Ref[Any] = system.spawn(Worker, log, 0.5, mailbox=mailbox)

            async def act() -> None:
                for n in range(3):
                    answers.append(await ref.ask(Question(n)))

            await interrupted(outcome, mode, number, act)
            await trio.sleep(5)
            assert answers == [2 * n for n in range(len(answers))]
            assert log == list(range(len(log)))
            assert len(log) - len(answers) in (0, 1)
            assert system.statistics().late_replies == (len(log) - len(answers))
            empty(ref)
            nothing_left(system)

    assert everywhere(main) >= 6


def test_a_cancelled_ask_in_line_for_room_is_never_handled() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        answers: Log = []
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            ref: Ref[Any] = system.spawn(Worker, log, mailbox=bounded(1))
            event = trio.Event()
            await ref.send(Hold(event))
            await wait_all_tasks_blocked()
            await ref.send(Item(-1))

            async def act() -> None:
                answers.append(await ref.ask(Question(1)))

            nursery.start_soon(self_release, event)
            await interrupted(outcome, mode, number, act)
            await trio.sleep(5)
            assert log == [-1, *([1] if answers else [])]
            empty(ref)
            nothing_left(system)

    async def self_release(event: trio.Event) -> None:
        await trio.sleep(1)
        event.set()

    assert everywhere(main) >= 1


def test_an_ask_answered_on_the_spot_is_a_cancellation_point() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        answers: Log = []
        async with ActorSystem() as system:
            ref = system.spawn(Quick, log)

            async def act() -> None:
                await trio.lowlevel.checkpoint()
                for n in range(40):
                    answers.append(await ref.ask(Question(n)))

            await interrupted(outcome, mode, number, act)
            # What the handler did, its asker was told.
            assert answers == [2 * n for n in log]
            empty(ref)
            nothing_left(system)

    assert everywhere(main) >= 1


def test_asks_with_deadlines() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        async with ActorSystem() as system:
            ref = system.spawn(Worker, log, 2.0)

            async def act() -> None:
                for n in range(2):
                    with pytest.raises(TimeoutError):
                        await ref.ask(Question(n), timeout=1.0)

            await interrupted(outcome, mode, number, act)
            await trio.sleep(10)
            empty(ref)
            nothing_left(system)

    assert everywhere(main) >= 4


def test_waiting_for_an_end() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            ref: Any = system.spawn(Worker, [])

            async def act() -> None:
                assert await ref.terminated() == Shutdown()
                assert await ref.terminated() == Shutdown()

            async def later() -> None:
                await trio.sleep(1)
                assert ref._extras.ended.statistics().tasks_waiting == 1
                ref.stop()

            nursery.start_soon(later)
            await interrupted(outcome, mode, number, act)
            await ref.terminated()

    assert everywhere(main) >= 3


# ---------------------------------------------------------------- inside handlers


@asynccontextmanager
async def context(log: Log, name: str) -> AsyncIterator[str]:
    await trio.sleep(0.1)
    log.append(f"in {name}")
    try:
        yield name
    finally:
        try:
            await trio.sleep(0.1)
        finally:
            log.append(f"out {name}")


async def in_handler(
    system: ActorSystem, outcome: Outcome, mode: Mode, number: int, ref: Any, act: Callable[[Any], Awaitable[object]]
) -> None:
    """Run `act` in a handler of `ref`; cancelled there, or with its actor killed, the n-th time that it waits."""

    async def run(actor: Any) -> None:
        if mode != "kill":
            await interrupted(outcome, mode, number, partial(act, actor))
            return

        def strike() -> None:
            outcome.struck = True
            ref.kill()

        at = At(mode, number, strike)
        trio.lowlevel.add_instrument(at)
        try:
            await act(actor)
            outcome.done = True
        finally:
            trio.lowlevel.remove_instrument(at)

    ref.tell(Run(run))
    await trio.sleep(20)
    if mode == "kill" and outcome.struck:
        # A kill that finds the handler just ended still counts.
        assert await ref.terminated() == Killed()
    else:
        assert ref.is_alive
        empty(ref)


MODES: tuple[Mode, ...] = ("parked", "stepping", "kill")


def test_contexts_and_tasks_of_a_handler_that_is_cancelled_or_killed() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        async with ActorSystem() as system:
            ref = system.spawn(Worker, [])

            async def task(name: str) -> None:
                log.append(f"in {name}")
                try:
                    await trio.sleep_forever()
                finally:
                    log.append(f"out {name}")

            async def act(actor: Worker) -> None:
                await actor.enter(context(log, "a"))
                actor.start_soon(task, "t")
                await actor.enter(context(log, "b"))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(actor.enter, context(log, "c"))
                    nursery.start_soon(actor.enter, context(log, "d"))

            await in_handler(system, outcome, mode, number, ref, act)
            ref.stop()
            await ref.terminated()
            ins = sorted(entry[3:] for entry in log if entry.startswith("in "))
            outs = sorted(entry[4:] for entry in log if entry.startswith("out "))
            assert ins == outs
            if outcome.done:
                assert ins == ["a", "b", "c", "d", "t"]
            nothing_left(system)

    assert everywhere(main, *MODES) >= 9


def test_asks_and_sends_of_a_handler_that_is_cancelled_or_killed() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        sent: Log = []
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            other: Ref[Any] = system.spawn(Worker, log, 0.1, mailbox=bounded(1))
            ref = system.spawn(Worker, [])

            async def act(actor: Worker) -> None:
                await other.send(Item(0))
                sent.append(0)
                await other.send(Item(1))
                sent.append(1)
                with trio.move_on_after(0.2):
                    await other.send(Item(99))
                assert await other.ask(Question(2)) == 4
                sent.append(2)
                await other.send(Item(3))
                sent.append(3)

            event = trio.Event()
            other.tell(Hold(event))
            await wait_all_tasks_blocked()
            nursery.start_soon(release, event)
            await in_handler(system, outcome, mode, number, ref, act)
            arrived = [n for n in log if n != 99]
            assert arrived in (sent, [*sent, 2])  # a question that was begun with is answered, whoever waits for it
            empty(other)
            nothing_left(system)

    async def release(event: trio.Event) -> None:
        await trio.sleep(1)
        event.set()

    assert everywhere(main, *MODES) >= 6


def test_a_loop_that_is_cancelled_in_receive_took_nothing() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []

        class Loop(Actor[Item]):
            async def run(self) -> None:
                async def act() -> None:
                    while len(log) < 6:
                        log.append((await self.mailbox.receive()).n)

                await interrupted(outcome, mode, number, act)
                async for m in self.mailbox:
                    log.append(m.n)

        async with ActorSystem() as system:
            ref = system.spawn(Loop)
            for n in range(8):
                if n % 2 == 0:
                    await trio.sleep(1)
                ref.tell(Item(n))
            await trio.sleep(1)
            ref.stop()
            assert await ref.terminated() == Shutdown()
            assert log == list(range(8))

    assert everywhere(main) >= 6


# ---------------------------------------------------------------- channels into mailboxes


def test_a_cancelled_send_on_a_channel_that_feeds_a_mailbox() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        sent: Log = []
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            ref: Ref[Any] = system.spawn(Worker, log, mailbox=bounded(1))
            sender, receiver = channel(Item)
            sender.ordered(window=1)
            receiver.to_mailbox(ref)
            events = [trio.Event() for _ in range(3)]

            async def act() -> None:
                for n, event in enumerate(events):
                    await ref.send(Hold(event))
                    for k in range(4):
                        await sender.send(Item(4 * n + k))
                        sent.append(4 * n + k)

            async def release() -> None:
                for event in events:
                    await trio.sleep(1)
                    event.set()

            nursery.start_soon(release)
            await interrupted(outcome, mode, number, act)
            await trio.sleep(5)
            assert log == sent
            empty(ref)
            await sender.finish()

    assert everywhere(main) > 5


# ---------------------------------------------------------------- a whole system


def test_a_system_that_is_cancelled_anywhere_leaves_nothing() -> None:
    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []
        refs: list[Ref[Any]] = []
        systems: list[ActorSystem] = []

        class Polite(Worker):
            async def stopping(self, reason: Any) -> None:
                await trio.sleep(0.1)
                self.log.append("stopped")

        async def act() -> None:
            async with ActorSystem() as system:
                systems.append(system)

                async def flush() -> None:
                    await trio.sleep(0.1)

                for phase in ("accept", "close", "flush"):
                    system.at_end(phase, flush)
                refs.append(system.spawn(Polite, log))
                refs.append(system.spawn(Worker, log, 0.5))
                refs[0].tell(Item(1))
                assert await refs[1].ask(Question(2)) == 4

                async def enter(actor: Worker) -> None:
                    await actor.enter(context(log, "x"))

                refs[1].tell(Run(enter))
                await trio.sleep(1)
                refs[1].tell(Item(3))

        await interrupted(outcome, mode, number, act)
        assert all(not ref.is_alive for ref in refs)
        for ref in refs:
            assert isinstance(await ref.terminated(), Shutdown | Cancelled | Killed)
        for system in systems:
            assert system.phase == "over"
            nothing_left(system)
            assert system.statistics().workers == 0
            assert system.statistics().failures == 0
        assert log.count("stopped") == (1 if refs else 0)
        assert log.count("in x") == log.count("out x")
        if outcome.done:
            assert [entry for entry in log if isinstance(entry, int)] == [1, 2, 3]

    assert everywhere(main) >= 8


def test_an_actor_that_is_killed_at_every_await_of_its_life() -> None:
    """Including its hooks: a kill does not cut these short, but the end is in order and complete."""

    async def main(outcome: Outcome, mode: Mode, number: int) -> None:
        log: Log = []

        class Living(Actor[Item | Question]):
            async def started(self) -> None:
                await trio.sleep(0.1)
                self.start_soon(trio.sleep_forever)
                await self.enter(context(log, "own"))
                self.spawn(Worker, log)
                await trio.sleep(0.1)

            async def stopping(self, reason: Any) -> None:
                await trio.sleep(0.1)
                log.append(reason)

            def undelivered(self, messages: list[Any]) -> None:
                log.append([m.n for m in messages])

            @handles
            async def item(self, m: Item) -> None:
                await trio.sleep(0.1)
                log.append(m.n)
                if m.n == 2:
                    self.stop()

            @handles
            async def question(self, m: Question) -> int:
                await trio.sleep(0.1)
                return m.n

        async with ActorSystem() as system, trio.open_nursery() as nursery:
            ref = system.spawn(Living)

            async def ask() -> None:
                try:
                    assert await ref.ask(Question(0)) == 0
                except ActorStopped as error:
                    log.append(("ask", error.reason))

            nursery.start_soon(ask)
            for n in range(1, 4):
                ref.tell(Item(n))
            steps = 0

            class Kill(trio.abc.Instrument):
                def after_task_step(self, task: trio.lowlevel.Task) -> None:
                    nonlocal steps
                    if task in system.scheduler.workers:
                        steps += 1
                        if steps == number:
                            outcome.struck = True
                            ref.kill()

            kill = Kill()
            trio.lowlevel.add_instrument(kill)
            reason = await ref.terminated()
            trio.lowlevel.remove_instrument(kill)
            assert not isinstance(reason, Failed)
            assert reason == (Killed() if outcome.struck else Normal()) or reason == Normal()
            outcome.done = reason == Normal()
            assert {entry for entry in log if isinstance(entry, tuple)} <= {("ask", Killed()), ("ask", Normal())}
            (given,) = [entry for entry in log if isinstance(entry, Normal | Killed)]
            assert given in (reason, Normal())  # a kill that comes while the hook runs is the weightier reason
            assert log.count("in own") == log.count("out own")
            handled = [entry for entry in log if isinstance(entry, int)]
            (left,) = [entry for entry in log if isinstance(entry, list)] or [[]]
            # At most the message in hand is lost.
            assert handled == list(range(1, len(handled) + 1))
            assert left == list(range(4 - len(left), 4))
            assert len(handled) + len(left) in (2, 3)
        assert system.statistics().failures == 0

    assert everywhere(main, "kill") >= 8
