"""Actors with a loop of their own: ``async def run(self)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Cancelled,
    Down,
    Failed,
    Killed,
    Normal,
    Reason,
    Ref,
    Reply,
    Shutdown,
    Supervision,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorError, ActorStopped, AskCycle, EndOfChannel, MailboxFull


@message
class Item:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class Skip(Asks[int]):
    """A question that is never answered."""


class Reader(Actor[Item | Get | Skip]):
    """Takes everything, and answers `Get` with what it has seen so far."""

    seen: list[int] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    gate: trio.Event | None = None

    async def run(self) -> None:
        async for m in self.mailbox:
            if self.gate is not None:
                await self.gate.wait()
            if isinstance(m, Get):
                self.reply_later().send(sum(self.seen))
            elif isinstance(m, Item):
                self.seen.append(m.n)
        self.ended.append("loop ended")

    def stopping(self, reason: Reason) -> None:
        self.ended.append(type(reason).__name__)


async def test_messages_come_in_order_and_asks_are_answered_with_reply_later(system: ActorSystem) -> None:
    seen: list[int] = []
    ref = system.spawn(Reader, seen)
    for n in range(5):
        ref.tell(Item(n))
    assert await ref.ask(Get()) == 10
    await ref.send(Item(5))
    await wait_all_tasks_blocked()
    assert seen == [0, 1, 2, 3, 4, 5]


async def test_receive_receive_nowait_and_the_end(system: ActorSystem) -> None:
    log: list[Any] = []

    class Reads(Actor[Item]):
        async def run(self) -> None:
            with pytest.raises(trio.WouldBlock):
                self.mailbox.receive_nowait()
            log.append((await self.mailbox.receive()).n)
            await trio.testing.wait_all_tasks_blocked()
            log.append(self.mailbox.receive_nowait().n)
            with pytest.raises(trio.WouldBlock):  # the stop is for `receive`
                self.mailbox.receive_nowait()
            for _ in range(2):
                with pytest.raises(EndOfChannel, match=r"^/reads was asked to stop$"):
                    await self.mailbox.receive()
            log.append("end")

    ref = system.spawn(Reads, name="reads")
    await wait_all_tasks_blocked()
    ref.tell(Item(1))
    ref.tell(Item(2))
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert log == [1, 2, "end"]


async def test_started_runs_before_the_loop(system: ActorSystem) -> None:
    log: list[str] = []

    class Starts(Actor[Item]):
        async def started(self) -> None:
            await trio.lowlevel.checkpoint()
            log.append("started")

        async def run(self) -> None:
            log.append("run")

    assert await system.spawn(Starts).terminated() == Normal()
    assert log == ["started", "run"]


async def test_a_loop_that_returns_ends_its_actor_normally_and_gives_back_what_is_left(system: ActorSystem) -> None:
    left: list[Any] = []

    class One(Actor[Item]):
        async def run(self) -> None:
            await self.mailbox.receive()

        def undelivered(self, messages: list[Any]) -> None:
            left.extend(messages)

    ref = system.spawn(One)
    for n in range(3):
        ref.tell(Item(n))
    assert await ref.terminated() == Normal()
    assert left == [Item(1), Item(2)]


async def test_stop_lets_the_loop_take_what_is_queued(system: ActorSystem) -> None:
    seen: list[int] = []
    ended: list[str] = []
    ref = system.spawn(Reader, seen, ended)
    ref.tell(Item(1))
    ref.tell(Item(2))
    ref.stop()
    ref.tell(Item(3))
    assert await ref.terminated() == Shutdown()
    assert (seen, ended) == ([1, 2], ["loop ended", "Shutdown"])
    assert system.statistics().dead_letters == 1


async def test_stop_now_is_seen_at_the_next_receive_before_what_is_queued(system: ActorSystem) -> None:
    seen: list[int] = []
    ended: list[str] = []
    gate = trio.Event()
    ref = system.spawn(Reader, seen, ended, gate)
    for n in range(3):
        ref.tell(Item(n))
    await wait_all_tasks_blocked()
    ref.stop(now=True)
    await wait_all_tasks_blocked()
    assert ref.is_alive  # what it does with the first message is not interrupted
    gate.set()
    assert await ref.terminated() == Shutdown()
    assert (seen, ended) == ([0], ["loop ended", "Shutdown"])
    assert system.statistics().dead_letters == 2


async def test_stop_now_wakes_a_loop_that_waits_for_a_message(system: ActorSystem) -> None:
    ended: list[str] = []
    ref = system.spawn(Reader, [], ended)
    await wait_all_tasks_blocked()
    ref.stop(now=True)
    assert await ref.terminated() == Shutdown()
    assert ended == ["loop ended", "Shutdown"]


async def test_kill_cancels_the_loop_wherever_it_waits(system: ActorSystem) -> None:
    for gate in (None, trio.Event()):
        ended: list[str] = []
        ref = system.spawn(Reader, [], ended, gate)
        ref.tell(Item(1))
        await wait_all_tasks_blocked()
        ref.kill()
        assert await ref.terminated() == Killed()
        assert ended == ["Killed"]


async def test_a_loop_may_be_killed_or_stopped_before_it_has_begun(system: ActorSystem) -> None:
    ends: list[Callable[[Ref[Any]], None]] = [
        lambda ref: ref.kill(),
        lambda ref: ref.stop(now=True),
        lambda ref: ref.stop(),
    ]
    for end in ends:
        ended: list[str] = []
        ref = system.spawn(Reader, [], ended)
        end(ref)
        assert isinstance(await ref.terminated(), Killed | Shutdown)


async def test_a_loop_that_fails_fails_its_actor_and_is_started_again_where_the_queue_was(system: ActorSystem) -> None:
    seen: list[int] = []

    class Fails(Actor[Item]):
        async def run(self) -> None:
            async for m in self.mailbox:
                seen.append(m.n)
                if m.n == 2:
                    raise ValueError("two")

    ref = system.spawn(Fails, supervise=restart())
    for n in range(5):
        ref.tell(Item(n))
    await wait_all_tasks_blocked()
    assert seen == [0, 1, 2, 3, 4]
    assert system.statistics().restarts == 1
    unsupervised = system.spawn(Fails)
    unsupervised.tell(Item(2))
    reason = await unsupervised.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "ValueError('two')"


async def test_a_question_that_was_not_answered_fails_when_the_loop_goes_on(system: ActorSystem) -> None:
    ref = system.spawn(Reader, name="reader")
    with pytest.raises(ActorError, match=r"^/reader went on without answering Skip$") as caught:
        await ref.ask(Skip())
    assert not isinstance(caught.value, ActorStopped)
    assert await ref.ask(Get()) == 0


@pytest.mark.parametrize("supervise", ["stop", restart("permanent")], ids=["stop", "restart"])
@pytest.mark.parametrize(("end", "reason"), [("return", Normal), ("raise", Failed), ("kill", Killed)])
async def test_a_question_that_was_not_answered_fails_with_the_end_of_the_loop(
    system: ActorSystem, end: str, reason: type[Reason], supervise: Supervision
) -> None:
    class Ends(Actor[Get]):
        async def run(self) -> None:
            await self.mailbox.receive()
            if end == "raise":
                raise ValueError("instead of an answer")
            if end == "kill":
                self.ref.kill()
                await trio.sleep_forever()

    ref = system.spawn(Ends, supervise=supervise)
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Get())
    assert type(caught.value.reason) is reason
    assert caught.value.message == Get()
    assert repr(caught.value.__cause__) == ("ValueError('instead of an answer')" if end == "raise" else "None")


async def test_a_reply_may_be_kept_while_the_loop_goes_on(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []

    class Keeps(Actor[Get | Item]):
        async def run(self) -> None:
            async for m in self.mailbox:
                if isinstance(m, Get):
                    replies.append(self.reply_later())
                else:
                    replies.pop(0).send(m.n)

    ref = system.spawn(Keeps)
    answers: list[int] = []

    async def ask() -> None:
        answers.append(await ref.ask(Get()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        ref.tell(Item(1))
        ref.tell(Item(2))
    assert sorted(answers) == [1, 2]


async def test_a_withdrawn_question_does_not_reach_the_loop(system: ActorSystem) -> None:
    taken: list[str] = []
    gate = trio.Event()

    class Takes(Actor[Item | Get]):
        async def run(self) -> None:
            async for m in self.mailbox:
                taken.append(type(m).__name__)
                await gate.wait()

    ref = system.spawn(Takes)
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, Get())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    ref.tell(Item(2))
    gate.set()
    await wait_all_tasks_blocked()
    assert taken == ["Item", "Item"]


async def test_a_cancelled_receive_has_taken_nothing(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: list[Any] = []

    class Times(Actor[Item]):
        async def run(self) -> None:
            for _ in range(150):  # more often than a handler may swallow its own cancellation
                with trio.move_on_after(1):
                    log.append((await self.mailbox.receive()).n)
            log.append("done")
            await self.mailbox.receive()
            log.append("and one more")

    ref = system.spawn(Times)
    await trio.sleep(10.5)
    assert log == []
    ref.tell(Item(1))
    ref.tell(Item(2))
    await wait_all_tasks_blocked()
    assert log == [1, 2]
    await trio.sleep(200)
    assert log == [1, 2, "done"]
    ref.tell(Item(3))
    assert await ref.terminated() == Normal()
    assert log == [1, 2, "done", "and one more"]


async def test_a_message_and_a_cancellation_in_one_step_lose_nothing(system: ActorSystem) -> None:
    taken: list[int] = []
    scopes: list[trio.CancelScope] = []

    class Races(Actor[Item]):
        async def run(self) -> None:
            while True:
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    taken.append((await self.mailbox.receive()).n)

    ref = system.spawn(Races)
    for n in range(20):
        await wait_all_tasks_blocked()
        steps = [lambda n=n: ref.tell(Item(n)), scopes[-1].cancel]
        for step in steps if n % 2 else reversed(steps):
            step()
    await wait_all_tasks_blocked()
    assert taken == list(range(20))


async def test_receive_from_a_bounded_mailbox_lets_senders_in(system: ActorSystem) -> None:
    seen: list[int] = []
    gate = trio.Event()
    ref = system.spawn(Reader, seen, [], gate, mailbox=bounded(1))
    ref.tell(Item(0))
    await wait_all_tasks_blocked()
    ref.tell(Item(1))
    with pytest.raises(MailboxFull):
        ref.tell(Item(99))
    async with trio.open_nursery() as nursery:
        for n in (2, 3, 4):
            nursery.start_soon(ref.send, Item(n))
            await wait_all_tasks_blocked()
        gate.set()
    assert await ref.ask(Get()) == 10
    assert seen == [0, 1, 2, 3, 4]


async def test_receive_from_a_conflating_mailbox_takes_the_newest(system: ActorSystem) -> None:
    seen: list[int] = []
    gate = trio.Event()
    ref = system.spawn(Reader, seen, [], gate, mailbox=bounded(3, overflow=conflate(lambda m: m.n % 10)))
    ref.tell(Item(0))
    await wait_all_tasks_blocked()
    for n in (1, 2, 11, 21, 12):
        ref.tell(Item(n))
    gate.set()
    await wait_all_tasks_blocked()
    assert seen == [0, 21, 12]


async def test_signals_come_first_in_a_loop_too(system: ActorSystem) -> None:
    taken: list[str] = []
    gate = trio.Event()

    class Watches(Actor[Item | Down]):
        other: Ref[Any]

        async def run(self) -> None:
            self.watch(self.other)
            await gate.wait()
            async for m in self.mailbox:
                taken.append(type(m).__name__)

    other = system.spawn(Reader)
    ref = system.spawn(Watches, other)
    await wait_all_tasks_blocked()
    ref.tell(Item(1))
    other.kill()
    await other.terminated()
    await wait_all_tasks_blocked()
    gate.set()
    await wait_all_tasks_blocked()
    assert taken == ["Down", "Item"]


async def test_timers_tasks_and_contexts_work_beside_a_loop(system: ActorSystem, autojump_clock: MockClock) -> None:
    taken: list[int] = []

    class Ticks(Actor[Item]):
        async def run(self) -> None:
            self.timers.every("beat", 1.0, Item(7))
            self.start_soon(self.beside)
            async for m in self.mailbox:
                taken.append(m.n)
                if len(taken) == 4:
                    return

        async def beside(self) -> None:
            await trio.sleep(2.5)
            await self.ref.send(Item(8))

    assert await system.spawn(Ticks).terminated() == Normal()
    assert taken == [7, 7, 8, 7]


async def test_ask_in_a_loop_sees_cycles(system: ActorSystem) -> None:
    errors: list[AskCycle] = []

    class Narcissus(Actor[Get]):
        async def run(self) -> None:
            async for _ in self.mailbox:
                reply = self.reply_later()
                try:
                    await self.ref.ask(Get())
                except AskCycle as error:
                    errors.append(error)
                    reply.send(0)

    assert await system.spawn(Narcissus, name="n").ask(Get()) == 0
    assert [error.cycle for error in errors] == [("/n", "/n")]


async def test_an_actor_with_handlers_has_no_mailbox_of_its_own(system: ActorSystem) -> None:
    class Has(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            with pytest.raises(ActorError, match=r"^/has has handlers, not a loop: they take its messages$"):
                self.mailbox  # noqa: B018
            return 1

    assert await system.spawn(Has, name="has").ask(Get()) == 1


async def test_a_loop_that_never_waits_still_ends_and_yields(system: ActorSystem) -> None:
    class Quick(Actor[Item]):
        async def run(self) -> None:
            pass

    for _ in range(20):
        assert await system.spawn(Quick).terminated() == Normal()


async def test_a_loop_with_a_flood_of_messages_lets_others_run(system: ActorSystem) -> None:
    seen: list[int] = []
    ref = system.spawn(Reader, seen)
    for n in range(20_000):
        ref.tell(Item(n))
    turns = 0
    while len(seen) < 20_000:
        await trio.lowlevel.checkpoint()
        turns += 1
    assert turns >= 3


async def test_two_tasks_may_not_wait_for_one_mailbox(system: ActorSystem) -> None:
    class Twice(Actor[Item]):
        async def run(self) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.mailbox.receive)
                nursery.start_soon(self.mailbox.receive)

    reason = await system.spawn(Twice).terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, BaseExceptionGroup)
    assert [type(error) for error in reason.error.exceptions] == [trio.BusyResourceError]


async def test_leaving_the_system_ends_loops_in_order_and_cancelling_it_cancels_them() -> None:
    ended: list[str] = []
    async with ActorSystem() as system:
        system.spawn(Reader, [], ended)
        await wait_all_tasks_blocked()
    assert ended == ["loop ended", "Shutdown"]
    ended.clear()
    refs: list[Ref[Any]] = []
    with trio.CancelScope() as scope:
        async with ActorSystem() as system:
            refs.append(system.spawn(Reader, [], ended))
            await wait_all_tasks_blocked()
            scope.cancel()
    assert ended == ["Cancelled"]
    assert await refs[0].terminated() == Cancelled()
