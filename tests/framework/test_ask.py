"""The contract of `ask`: answers, deadlines, death, withdrawal, cycles, answers that come later."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Failed,
    Killed,
    Normal,
    Reason,
    Receiver,
    Ref,
    Reply,
    Sender,
    Shutdown,
    Supervision,
    bounded,
    channel,
    handles,
    message,
    one_for_all,
    restart,
)
from levada.framework._runtime.ask import OpenAsks
from levada.framework._runtime.tokens import TURN
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskCycle,
    AskTimeout,
    ConfigurationError,
    MailboxFull,
    NoValue,
    ReceiverClosed,
)


@message
class Get(Asks[int]):
    pass


@message
class Wait(Asks[str]):
    """Answered once the gate is open."""


@message
class Fail(Asks[None]):
    pass


@message
class Tell:
    n: int


class Gate(Actor[Get | Wait | Fail | Tell]):
    gate: trio.Event = attrs.field(factory=trio.Event)
    begun: list[str] = attrs.field(factory=list)

    @handles
    def get(self, m: Get) -> int:
        self.begun.append("get")
        return 7

    @handles
    async def wait(self, m: Wait) -> str:
        self.begun.append("wait")
        await self.gate.wait()
        return "through"

    @handles
    def fail(self, m: Fail) -> None:
        self.begun.append("fail")
        raise KeyError("on purpose")

    @handles
    def on_tell(self, m: Tell) -> None:
        self.begun.append(f"tell {m.n}")


class Outcome:
    """What became of a call in a task of its own."""

    value: Any = None
    error: BaseException | None = None
    at: float | None = None

    async def of(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.value = await call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.at = trio.current_time()


# ---------------------------------------------------------------- answers


async def test_a_reply_may_be_anything_none_included(system: ActorSystem) -> None:
    class Nothing(Actor[Get | Wait]):
        @handles
        def sync(self, m: Get) -> None:
            return None

        @handles
        async def later(self, m: Wait) -> None:
            await trio.lowlevel.checkpoint()

    ref: Ref[Any] = system.spawn(Nothing)
    assert await ref.ask(Get()) is None
    assert await ref.ask(Wait()) is None
    ref.tell(Wait())
    assert await ref.ask(Get()) is None


async def test_many_asks_at_once_each_get_their_own_answer(system: ActorSystem) -> None:
    @message
    class Square(Asks[int]):
        n: int

    class Squares(Actor[Square]):
        @handles
        async def square(self, m: Square) -> int:
            await trio.lowlevel.checkpoint()
            return m.n * m.n

    ref = system.spawn(Squares)
    answers: dict[int, int] = {}

    async def ask(n: int) -> None:
        answers[n] = await ref.ask(Square(n))

    async with trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(ask, n)
    assert answers == {n: n * n for n in range(50)}


# ---------------------------------------------------------------- deadlines


async def test_ask_gives_up_after_its_timeout_and_names_it(system: ActorSystem, autojump_clock: MockClock) -> None:
    ref = system.spawn(Gate, name="gate")
    question = Wait()
    start = trio.current_time()
    with pytest.raises(AskTimeout) as caught:
        await ref.ask(question, timeout=1.5)
    error = caught.value
    assert trio.current_time() - start == pytest.approx(1.5)
    assert str(error) == "/gate did not answer Wait in 1.5 s"
    assert (error.actor, error.seconds) == ("/gate", 1.5)
    assert error.message is question
    assert isinstance(error, TimeoutError)
    assert not isinstance(error, trio.TooSlowError)


@pytest.mark.parametrize("timeout", [-1, -1.0, -0.001, math.nan, "5", "", b"1", [1.0], 1j])
async def test_a_timeout_that_no_clock_can_count_is_refused_before_anything_is_sent(
    system: ActorSystem, timeout: Any
) -> None:
    ref = system.spawn(Gate)
    refused = f"timeout is {timeout!r}, wanted None, or 0 seconds or more"
    with pytest.raises(ConfigurationError) as caught:
        await ref.ask(Wait(), timeout=timeout)
    assert str(caught.value) == refused
    with pytest.raises(ConfigurationError) as caught:
        await trio.to_thread.run_sync(partial(ref.from_thread.ask, Wait(), timeout=timeout))
    assert str(caught.value) == refused
    assert await ref.ask(Get()) == 7  # no Wait that nobody answers is before it


async def test_the_systems_timeout_counts_unless_told_otherwise(autojump_clock: MockClock) -> None:
    async with ActorSystem(ask_timeout=2.0) as system:
        ref = system.spawn(Gate)
        start = trio.current_time()
        with pytest.raises(AskTimeout) as caught:
            await ref.ask(Wait())
        assert trio.current_time() - start == pytest.approx(2.0)
        assert caught.value.seconds == 2.0
        with trio.move_on_after(1000) as scope:
            await ref.ask(Wait(), timeout=None)
        assert scope.cancelled_caught
        with pytest.raises(AskTimeout):
            await ref.ask(Wait(), timeout=0)
        ref.kill()
    async with ActorSystem(ask_timeout=None) as system:
        ref = system.spawn(Gate)
        with trio.move_on_after(1000) as scope:
            await ref.ask(Wait())
        assert scope.cancelled_caught
        ref.kill()


async def test_the_timeout_covers_the_wait_for_room(system: ActorSystem, autojump_clock: MockClock) -> None:
    begun: list[str] = []
    gate = trio.Event()
    ref = system.spawn(Gate, gate, begun, mailbox=bounded(1))
    ref.tell(Wait())
    await wait_all_tasks_blocked()
    ref.tell(Tell(1))
    start = trio.current_time()
    with pytest.raises(AskTimeout):
        await ref.ask(Get(), timeout=3)
    assert trio.current_time() - start == pytest.approx(3)
    gate.set()
    await wait_all_tasks_blocked()
    assert begun == ["wait", "tell 1"]


async def test_a_late_answer_is_dropped_and_counted(system: ActorSystem, autojump_clock: MockClock) -> None:
    gate = trio.Event()
    ref = system.spawn(Gate, gate)
    with pytest.raises(AskTimeout):
        await ref.ask(Wait(), timeout=1)
    assert system.statistics().late_replies == 0
    gate.set()
    await wait_all_tasks_blocked()
    assert system.statistics().late_replies == 1
    assert await ref.ask(Get()) == 7


@message("test.ask.open")
class Open(Asks[Receiver[int]]):
    pass


async def test_a_channel_in_a_late_answer_ends_without_a_warning(
    system: ActorSystem, autojump_clock: MockClock, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    senders: list[Sender[int]] = []

    class Late(Actor[Open]):
        @handles
        async def open(self, m: Open) -> Receiver[int]:
            sender, receiver = channel(int)
            senders.append(sender)
            await trio.sleep(2.0)
            return receiver

    with pytest.raises(AskTimeout):
        await system.spawn(Late).ask(Open(), timeout=1.0)
    await trio.sleep(2.0)
    with pytest.raises(ReceiverClosed):
        await senders[0].send(1)
    assert (recwarn.list, caplog.messages) == ([], [])


async def test_an_answer_in_time_leaves_no_timer_behind(system: ActorSystem) -> None:
    ref = system.spawn(Gate)
    ref.tell(Tell(0))
    for _ in range(10):
        ref.tell(Tell(1))
        assert await ref.ask(Get(), timeout=60) == 7
    assert system.statistics().timers == 0


async def test_a_question_that_failed_at_once_leaves_no_timer_behind(system: ActorSystem) -> None:
    gate = trio.Event()
    ref = system.spawn(Gate, gate, mailbox=bounded(1, overflow="drop_new"))
    ref.tell(Wait())
    await wait_all_tasks_blocked()
    ref.tell(Tell(1))
    with pytest.raises(MailboxFull):
        await ref.ask(Get(), timeout=60)
    assert system.statistics().timers == 0
    gate.set()


# ---------------------------------------------------------------- death


async def test_a_failing_handler_fails_its_ask_with_the_cause(system: ActorSystem) -> None:
    ref = system.spawn(Gate, name="gate")
    question = Fail()
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(question)
    error = caught.value
    assert str(error) == "/gate failed: KeyError('on purpose')"
    assert isinstance(error.__cause__, KeyError)
    assert error.reason == Failed(error.__cause__)
    assert error.message is question
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert reason.error is error.__cause__


async def test_only_the_ask_that_failed_has_the_exception_as_its_cause(system: ActorSystem) -> None:
    gate = trio.Event()
    ref: Ref[Any] = system.spawn(Gate, gate, name="gate", mailbox=bounded(2))
    handled, failed, queued, patient = outcomes = [Outcome() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for outcome, question in zip(outcomes, (Wait(), Fail(), Get(), Get()), strict=True):
            nursery.start_soon(outcome.of, partial(ref.ask, question))
            await wait_all_tasks_blocked()
        gate.set()
    late = Outcome()
    await late.of(lambda: ref.ask(Get()))
    assert handled.value == "through"
    assert isinstance(failed.error, ActorStopped)
    assert isinstance(failed.error.__cause__, KeyError)
    for outcome in (queued, patient, late):
        assert isinstance(outcome.error, ActorStopped)
        assert str(outcome.error) == "/gate failed: KeyError('on purpose')"
        assert outcome.error.reason == failed.error.reason
        assert outcome.error.__cause__ is None


async def test_an_ask_to_be_answered_later_has_the_exception_as_its_cause(system: ActorSystem) -> None:
    class Later(Actor[Get | Fail]):
        @handles
        def get(self, m: Get) -> None:
            self._reply = self.reply_later()

        @handles
        def fail(self, m: Fail) -> None:
            raise KeyError("on purpose")

    ref, outcome = system.spawn(Later), Outcome()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome.of, lambda: ref.ask(Get()))
        await wait_all_tasks_blocked()
        ref.tell(Fail())
    assert isinstance(outcome.error, ActorStopped)
    assert isinstance(outcome.error.__cause__, KeyError)


@pytest.mark.parametrize("busy", [False, True], ids=["inline", "queued"])
async def test_a_question_that_restarts_its_actor_fails_all_the_same(system: ActorSystem, busy: bool) -> None:
    ref = system.spawn(Gate, supervise=restart())
    if busy:
        ref.tell(Tell(1))
    with pytest.raises(ActorStopped, match="KeyError"):
        await ref.ask(Fail())
    assert await ref.ask(Get()) == 7
    assert system.statistics().restarts == 1


async def test_asks_queued_and_in_flight_fail_at_once_when_the_actor_is_killed(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    begun: list[str] = []
    ref = system.spawn(Gate, trio.Event(), begun, mailbox=bounded(2))
    outcomes = [Outcome() for _ in range(5)]
    async with trio.open_nursery() as nursery:
        # One in the handler, two in the mailbox, two waiting for room.
        for outcome in outcomes:
            nursery.start_soon(outcome.of, lambda: ref.ask(Wait(), timeout=None))
            await wait_all_tasks_blocked()
        ref.kill()
    assert begun == ["wait"]
    assert [type(outcome.error) for outcome in outcomes] == [ActorStopped] * 5
    assert {outcome.error.reason for outcome in outcomes if isinstance(outcome.error, ActorStopped)} == {Killed()}
    assert {outcome.at for outcome in outcomes} == {trio.current_time()} == {0.0}


async def test_asks_behind_a_stop_fail_and_those_before_it_are_answered(system: ActorSystem) -> None:
    gate = trio.Event()
    ref = system.spawn(Gate, gate)
    before, after = Outcome(), Outcome()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(before.of, lambda: ref.ask(Wait()))
        await wait_all_tasks_blocked()
        ref.stop()
        nursery.start_soon(after.of, lambda: ref.ask(Get()))
        await wait_all_tasks_blocked()
        gate.set()
    assert before.value == "through"
    assert isinstance(after.error, ActorStopped)
    assert after.error.reason == Shutdown()


async def test_asks_while_an_actor_is_stopping_fail_when_it_has(system: ActorSystem) -> None:
    gate = trio.Event()

    class Lingers(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            return 1

        async def stopping(self, reason: Any) -> None:
            await gate.wait()

    ref = system.spawn(Lingers)
    ref.stop()
    await wait_all_tasks_blocked()
    outcome = Outcome()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome.of, lambda: ref.ask(Get()))
        await wait_all_tasks_blocked()
        gate.set()
    assert isinstance(outcome.error, ActorStopped)


# ---------------------------------------------------------------- cancellation


async def test_a_withdrawn_question_is_never_begun(system: ActorSystem) -> None:
    gate = trio.Event()
    begun: list[str] = []
    ref = system.spawn(Gate, gate, begun)
    ref.tell(Wait())
    await wait_all_tasks_blocked()
    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.ask(Get())
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, Get())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    gate.set()
    await wait_all_tasks_blocked()
    assert begun == ["wait"]
    assert system.statistics().late_replies == 0


async def test_a_withdrawn_question_keeps_nothing_of_the_task_that_asked(system: ActorSystem) -> None:
    gate = trio.Event()
    ref = system.spawn(Gate, gate)
    ref.tell(Wait())
    tasks: list[weakref.ref[trio.lowlevel.Task]] = []

    async def ask() -> None:
        tasks.append(weakref.ref(trio.lowlevel.current_task()))
        await ref.ask(Get())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await wait_all_tasks_blocked()
    gc.collect()
    assert [task() for task in tasks] == [None]
    gate.set()


async def test_cancelled_while_the_handler_is_at_work_the_handler_goes_on(system: ActorSystem) -> None:
    gate = trio.Event()
    begun: list[str] = []
    ref = system.spawn(Gate, gate, begun)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, Wait())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    ref.tell(Tell(1))
    gate.set()
    await wait_all_tasks_blocked()
    assert begun == ["wait", "tell 1"]
    assert system.statistics().late_replies == 1
    assert system.statistics().timers == 0


async def test_ask_is_always_a_cancellation_point(system: ActorSystem) -> None:
    begun: list[str] = []
    ref = system.spawn(Gate, trio.Event(), begun)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.ask(Get())
    assert scope.cancelled_caught
    await wait_all_tasks_blocked()
    assert begun == []


# ---------------------------------------------------------------- cycles


@message
class Go(Asks[str]):
    """Pass it on to the next one."""


@message
class Fill:
    pass


class Link(Actor[Go | Fill]):
    """One of a ring; `how` says in which way it waits for the next."""

    how: str
    ring: list[Ref[Any]]
    position: int

    @handles
    def fill(self, m: Fill) -> None:
        pass

    @handles
    async def go(self, m: Go) -> str:
        following = self.ring[(self.position + 1) % len(self.ring)]
        if self.how == "nursery":
            answers: list[str] = []

            async def ask() -> None:
                answers.append(await following.ask(Go(), timeout=None))

            async with trio.open_nursery() as outer, trio.open_nursery() as inner:
                inner.start_soon(trio.lowlevel.checkpoint)
                outer.start_soon(ask)
            return answers[0]
        if self.how == "send" and self.position == len(self.ring) - 1:
            following.tell(Fill())
            await following.send(Fill())
            return "sent"
        return await following.ask(Go(), timeout=None)


def cycle_of(error: BaseException) -> AskCycle:
    """Dig out the cycle that the whole ring failed of."""
    while not isinstance(error, AskCycle):
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        assert inner is not None
        error = inner
    return error


@pytest.mark.parametrize("how", ["ask", "send", "nursery"])
@pytest.mark.parametrize("length", [1, 2, 3])
async def test_a_cycle_of_waits_is_refused_and_named(system: ActorSystem, how: str, length: int) -> None:
    ring: list[Ref[Any]] = []
    for position in range(length):
        ring.append(system.spawn(Link, how, ring, position, name=f"link{position}", mailbox=bounded(1)))
    with pytest.raises(ActorStopped) as caught:
        await ring[0].ask(Go())
    error = cycle_of(caught.value)
    last = length - 1
    names = [f"/link{(last + step) % length}" for step in range(length + 1)]
    assert error.cycle == tuple(names)
    assert error.actor == "/link0"
    assert str(error) == " waits for ".join(names) + ": none of them would ever go on"
    assert system.observe.waits() == []


async def test_a_handler_may_catch_the_cycle_and_go_on(system: ActorSystem) -> None:
    """The question that was refused is not handled."""
    begun: list[Go] = []

    class Narcissus(Actor[Go]):
        @handles
        async def go(self, m: Go) -> str:
            begun.append(m)
            try:
                return await self.ref.ask(Go())
            except AskCycle as error:
                return " ".join(error.cycle)

    ref = system.spawn(Narcissus, name="narcissus")
    assert await ref.ask(Go()) == "/narcissus /narcissus"
    assert await ref.ask(Go()) == "/narcissus /narcissus"
    assert len(begun) == 2


async def test_a_wait_that_is_over_is_no_part_of_a_cycle(system: ActorSystem) -> None:
    """An actor that has got its answer, and still handles its message, may be asked by the one that answered."""
    gate = trio.Event()

    class Asker(Actor[Any]):
        other: Ref[Any] | None

        @handles
        async def go(self, m: Go) -> str:
            assert self.other is not None
            await self.other.ask(Get())
            await gate.wait()
            return "done"

        @handles
        async def count(self, m: Get) -> int:
            await trio.lowlevel.checkpoint()  # so that the asker waits
            return 1

    class Answerer(Asker):
        @handles
        async def go(self, m: Go) -> str:
            assert self.other is not None
            return str(await self.other.ask(Get(), timeout=None))

    answerer: Any = system.spawn(Answerer, None)
    asker = system.spawn(Asker, answerer)
    answerer._actor.other = asker
    async with trio.open_nursery() as nursery:
        answers = [Outcome(), Outcome()]
        for ref, answer in zip((asker, answerer), answers, strict=True):
            nursery.start_soon(answer.of, partial(ref.ask, Go(), timeout=None))
            await wait_all_tasks_blocked()
        assert system.observe.waits() == [(answerer.path, asker.path)]
        gate.set()
    assert [answer.value for answer in answers] == ["done", "1"]


async def test_a_cycle_names_only_the_actors_that_are_in_it(system: ActorSystem) -> None:
    """The asked actor waits for two, of which only one leads back to the asker."""
    gate = trio.Event()

    class Fork(Actor[Go]):
        below: list[Ref[Any]]

        @handles
        async def go(self, m: Go) -> str:
            async with trio.open_nursery() as nursery:
                for ref in self.below:
                    nursery.start_soon(partial(ref.ask, Go(), timeout=None))
                    await wait_all_tasks_blocked()
                gate.set()
            return ""

    class Deaf(Actor[Go]):
        @handles
        async def go(self, m: Go) -> str:
            await trio.sleep_forever()
            return ""

    class Back(Actor[Go]):
        above: list[Ref[Any]]

        @handles
        async def go(self, m: Go) -> str:
            await gate.wait()
            return await self.above[0].ask(Go(), timeout=None)

    above: list[Ref[Any]] = []
    deaf = system.spawn(Deaf, name="deaf")
    back = system.spawn(Back, above, name="back")
    above.append(system.spawn(Fork, [deaf, back, deaf], name="fork"))
    with pytest.raises(ActorStopped) as caught:
        await above[0].ask(Go(), timeout=None)
    assert cycle_of(caught.value).cycle == ("/back", "/fork", "/back")


async def test_the_search_for_a_cycle_visits_each_actor_once(system: ActorSystem) -> None:
    """Each of two waits for both of the next two, so there are a billion ways through them."""

    class Both(Actor[Go]):
        below: list[Ref[Any]]

        @handles
        async def go(self, m: Go) -> str:
            async with trio.open_nursery() as nursery:
                for ref in self.below:
                    nursery.start_soon(partial(ref.ask, m, timeout=None))
            if not self.below:
                await trio.sleep_forever()
            return ""

    below: list[Ref[Any]] = []
    all_refs: list[Ref[Any]] = []
    for _ in range(30):
        below = [system.spawn(Both, below), system.spawn(Both, below)]
        all_refs += below
    async with trio.open_nursery() as nursery:
        for ref in below:
            nursery.start_soon(partial(ref.ask, Go(), timeout=None))
        await wait_all_tasks_blocked()
        assert len(system.observe.waits()) == 4 * 29
        nursery.cancel_scope.cancel()
    for ref in all_refs:
        ref.kill()


@pytest.mark.parametrize("where", ["handler", "nursery"])
async def test_a_handler_that_waits_for_its_own_end_is_refused(system: ActorSystem, where: str) -> None:
    class Dying(Actor[Go]):
        @handles
        async def go(self, m: Go) -> str:
            self.ref.stop()
            if where == "handler":
                return repr(await self.ref.terminated())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.ref.terminated)
            return "ended"

    ref = system.spawn(Dying, name="dying")
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Go())
    error = cycle_of(caught.value)
    assert (error.actor, error.cycle) == ("/dying", ("/dying", "/dying"))


async def test_a_handler_may_wait_for_the_end_of_another_and_a_task_for_its_own(system: ActorSystem) -> None:
    scopes: list[trio.CancelScope] = []

    class Waiting(Actor[Go | Get]):
        @handles
        async def go(self, m: Go) -> str:
            child = self.spawn(Gate)
            child.stop()
            return repr(await child.terminated())

        @handles
        def get(self, m: Get) -> int:
            self.start_soon(self.wait)
            self.ref.stop()
            return 3

        async def wait(self) -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await self.ref.terminated()

    ref = system.spawn(Waiting)
    assert await ref.ask(Go()) == "Shutdown()"
    assert await ref.ask(Get()) == 3
    assert await ref.terminated() == Shutdown()
    assert len(scopes) == 1


async def test_a_task_beside_the_handlers_may_ask_its_own_actor(system: ActorSystem) -> None:
    answers: list[int] = []

    class Selfish(Actor[Go | Get]):
        @handles
        def go(self, m: Go) -> str:
            self.start_soon(self.ask_myself)
            return "started"

        @handles
        async def get(self, m: Get) -> int:
            await trio.lowlevel.checkpoint()
            return 3

        async def ask_myself(self) -> None:
            answers.append(await self.ref.ask(Get()))

    ref = system.spawn(Selfish)
    assert await ref.ask(Go()) == "started"
    await wait_all_tasks_blocked()
    assert answers == [3]


async def test_a_chain_without_a_cycle_works_and_is_visible(system: ActorSystem) -> None:
    gate = trio.Event()
    last = system.spawn(Gate, gate, name="last")

    class Middle(Actor[Wait]):
        following: Ref[Any]

        @handles
        async def wait(self, m: Wait) -> str:
            return str(await self.following.ask(m))

    two = system.spawn(Middle, last, name="two")
    one = system.spawn(Middle, two, name="one")
    outcome = Outcome()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome.of, lambda: one.ask(Wait()))
        await wait_all_tasks_blocked()
        assert sorted(system.observe.waits()) == [("/one", "/two"), ("/two", "/last")]
        gate.set()
    assert outcome.value == "through"
    assert system.observe.waits() == []


async def test_the_wait_is_forgotten_when_it_ends_by_timeout_or_cancellation(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    class Two(Actor[Go | Get]):
        other: list[Ref[Any]]

        @handles
        async def go(self, m: Go) -> str:
            with pytest.raises(AskTimeout):
                await self.other[0].ask(Wait(), timeout=1)
            with trio.move_on_after(1):
                await self.other[0].ask(Wait(), timeout=None)
            return "gave up"

        @handles
        def get(self, m: Get) -> int:
            return 1

    others: list[Ref[Any]] = []
    two = system.spawn(Two, others)

    class Back(Actor[Wait]):
        @handles
        async def wait(self, m: Wait) -> str:
            await trio.sleep(5)
            assert await two.ask(Get()) == 1
            return "back"

    others.append(system.spawn(Back))
    assert await two.ask(Go()) == "gave up"
    await wait_all_tasks_blocked()
    await trio.sleep(20)
    assert system.statistics().failures == 0


# ---------------------------------------------------------------- answers that come later


class Deferring(Actor[Get | Fill | Fail]):
    """Answers `Get` later, from outside."""

    replies: list[Reply[int]]

    @handles
    def get(self, m: Get) -> int:
        self.replies.append(self.reply_later())
        return -1

    @handles
    def fill(self, m: Fill) -> None:
        pass

    @handles
    def fail(self, m: Fail) -> None:
        raise KeyError("on purpose")


async def deferred(nursery: trio.Nursery, ref: Ref[Any]) -> Outcome:
    outcome = Outcome()
    nursery.start_soon(outcome.of, lambda: ref.ask(Get(), timeout=None))
    await wait_all_tasks_blocked()
    assert (outcome.value, outcome.error) == (None, None)
    return outcome


@pytest.mark.parametrize("busy", [False, True], ids=["inline", "queued"])
async def test_a_deferred_reply_is_what_it_is_answered_with(system: ActorSystem, busy: bool) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)

    async def ask() -> int:
        if busy:
            ref.tell(Fill())  # a worker runs the handler then, not the asker
        return await ref.ask(Get(), timeout=None)

    outcome = Outcome()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome.of, ask)
        await wait_all_tasks_blocked()
        (reply,) = replies
        assert reply.wanted
        assert reply.has_room is True
        assert repr(reply) == "<Reply to Get, wanted>"
        reply.send(42)
        assert not reply.wanted
        assert repr(reply) == "<Reply to Get, settled>"
    assert outcome.value == 42
    reply.send(43)
    assert system.statistics().late_replies == 1


async def test_a_deferred_reply_may_fail_the_ask_without_failing_the_actor(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        error = ValueError("no such thing")
        replies[0].fail(error)
    assert outcome.error is error
    assert ref.is_alive


async def test_a_deferred_reply_that_is_dropped_fails_the_ask(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        replies.clear()
        gc.collect()
    assert isinstance(outcome.error, NoValue)
    assert str(outcome.error) == "the answer to Get was given up"


async def test_a_deferred_reply_of_an_actor_that_stops_fails_the_ask_at_once(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        ref.stop()
    assert isinstance(outcome.error, ActorStopped)
    assert outcome.error.reason == Shutdown()
    assert not replies[0].wanted
    replies[0].send(1)
    assert system.statistics().late_replies == 1


class Holder:
    """Holds something, and itself: only the collector of cycles frees it."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


class TakesOver(Actor[Get | Fail | Tell]):
    """Takes `Get` over, and keeps the reply at some place."""

    place: str
    outside: list[Reply[int]]
    held: object = None

    @handles
    def get(self, m: Get) -> int:
        reply = self.reply_later()
        if self.place == "field":
            self.held = reply
        elif self.place == "cycle":
            self.held = Holder(reply)
        elif self.place == "elsewhere":
            self.outside.append(reply)
        else:
            self.start_soon(self.keep, reply)
        return 0

    async def keep(self, reply: Reply[int]) -> None:
        await trio.sleep_forever()

    @handles
    def fail(self, m: Fail) -> None:
        raise KeyError("on purpose")

    @handles
    def tell(self, m: Tell) -> None:
        self.stop()


PLACES = ["field", "cycle", "elsewhere", "task"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("supervise", ["stop", restart("permanent")], ids=["stop", "restart"])
async def test_a_question_taken_over_fails_at_once_when_its_actor_fails(
    system: ActorSystem, autojump_clock: MockClock, place: str, supervise: Supervision
) -> None:
    ref = system.spawn(TakesOver, place, [], name="taker", supervise=supervise)
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        began = trio.current_time()
        ref.tell(Fail())
    assert trio.current_time() == began
    assert isinstance(outcome.error, ActorStopped)
    assert isinstance(outcome.error.message, Get)
    assert str(outcome.error) == "/taker failed: KeyError('on purpose')"
    assert isinstance(outcome.error.reason, Failed)
    assert outcome.error.__cause__ is outcome.error.reason.error
    await wait_all_tasks_blocked()
    assert ref.is_alive == (supervise != "stop")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (lambda ref: ref.stop(), Shutdown()),
        (lambda ref: ref.stop(now=True), Shutdown()),
        (lambda ref: ref.kill(), Killed()),
        (lambda ref: ref.tell(Tell(1)), Normal()),
    ],
    ids=["stop", "stop now", "kill", "itself"],
)
async def test_a_question_taken_over_fails_when_its_actor_ends(
    system: ActorSystem, autojump_clock: MockClock, place: str, ends: Callable[[Ref[Any]], None], reason: Reason
) -> None:
    ref = system.spawn(TakesOver, place, [])
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        ends(ref)
    assert isinstance(outcome.error, ActorStopped)
    assert outcome.error.reason == reason
    assert outcome.error.__cause__ is None


@pytest.mark.parametrize("place", PLACES)
async def test_a_question_taken_over_fails_when_its_actor_restarts_with_its_siblings(
    system: ActorSystem, place: str
) -> None:
    class Parent(Actor[Any]):
        strategy = one_for_all()

        def started(self) -> None:
            self.spawn(TakesOver, place, [], name="a", supervise=restart())
            self.spawn(TakesOver, place, [], name="b", supervise=restart())

    system.spawn(Parent, name="parent")
    await wait_all_tasks_blocked()
    first, second = system.lookup("/parent/a"), system.lookup("/parent/b")
    assert first is not None
    assert second is not None
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, first)
        second.tell(Fail())
    assert isinstance(outcome.error, ActorStopped)
    assert outcome.error.reason == Shutdown()
    assert first.is_alive


async def test_a_question_taken_over_outlives_an_error_that_its_actor_resumes_from(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies, supervise=restart(resume=[KeyError]))
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        ref.tell(Fail())
        await wait_all_tasks_blocked()
        replies[0].send(5)
    assert outcome.value == 5


@pytest.mark.parametrize("who", ["hook", "task"])
async def test_a_hook_or_a_task_may_answer_while_the_actor_stops_as_asked(system: ActorSystem, who: str) -> None:
    class Answers(Deferring):
        async def stopping(self, reason: Reason) -> None:
            await wait_all_tasks_blocked()
            if who == "hook":
                self.replies[0].send(6)

        def started(self) -> None:
            self.start_soon(self.answer)

        async def answer(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                if who == "task":
                    self.replies[0].send(6)

    ref = system.spawn(Answers, [])
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        ref.stop()
    assert outcome.value == 6


async def test_a_failure_does_not_wait_for_the_hook_or_for_the_running_handler(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    """The hook takes two seconds, and so does a handler that is being cancelled."""

    class Slow(Deferring):
        @handles
        async def wait(self, m: Wait) -> str:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)
            return ""

        async def break_down(self) -> None:
            raise KeyError("on purpose")

        @handles
        def fill(self, m: Fill) -> None:
            self.start_soon(self.break_down)

        async def stopping(self, reason: Reason) -> None:
            await trio.sleep(2)

    for breaks in (Fail(), Fill()):
        ref: Ref[Any] = system.spawn(Slow, [])
        async with trio.open_nursery() as nursery:
            outcome = await deferred(nursery, ref)
            began = trio.current_time()
            ref.tell(breaks)
            if isinstance(breaks, Fill):
                ref.tell(Wait())
        assert trio.current_time() == began
        assert isinstance(outcome.error, ActorStopped)
        assert isinstance(outcome.error.__cause__, KeyError)
        assert (await ref.terminated(), trio.current_time() - began) == (
            outcome.error.reason,
            4 if isinstance(breaks, Fill) else 2,
        )


async def test_a_failure_during_a_stop_fails_the_questions_taken_over(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    class Slow(Deferring):
        async def stopping(self, reason: Reason) -> None:
            await trio.sleep(2)

        def started(self) -> None:
            self.start_soon(self.break_down)

        async def break_down(self) -> None:
            await trio.sleep(1)
            raise KeyError("on purpose")

    ref = system.spawn(Slow, [])
    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, ref)
        ref.stop()
    assert trio.current_time() == 1
    assert isinstance(outcome.error, ActorStopped)
    assert isinstance(outcome.error.__cause__, KeyError)


async def test_only_the_ask_that_is_being_handled_can_be_taken_over_and_only_once(system: ActorSystem) -> None:
    class Greedy(Actor[Get | Tell]):
        @handles
        def get(self, m: Get) -> int:
            reply = self.reply_later()
            with pytest.raises(ActorError, match=r"^/greedy is not handling an ask now$"):
                self.reply_later()
            reply.send(1)
            return 2

        @handles
        def on_tell(self, m: Tell) -> None:
            with pytest.raises(ActorError, match=r"^/greedy is not handling an ask now$"):
                self.reply_later()

    ref = system.spawn(Greedy, name="greedy")
    ref.tell(Tell(1))
    await wait_all_tasks_blocked()
    assert await ref.ask(Get()) == 1
    assert system.statistics().failures == 0


async def test_an_async_handler_may_take_over_its_reply_after_it_has_waited(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []

    class Later(Actor[Get]):
        @handles
        async def get(self, m: Get) -> int:
            await trio.lowlevel.checkpoint()
            replies.append(self.reply_later())
            await trio.lowlevel.checkpoint()
            return 0

    async with trio.open_nursery() as nursery:
        outcome = await deferred(nursery, system.spawn(Later))
        replies[0].send(9)
    assert outcome.value == 9


async def test_a_full_mailbox_that_raises_gives_the_question_back(system: ActorSystem) -> None:
    gate = trio.Event()
    ref = system.spawn(Gate, gate, mailbox=bounded(1, overflow="raise"))
    ref.tell(Wait())
    await wait_all_tasks_blocked()
    ref.tell(Tell(1))
    question = Get()
    with pytest.raises(MailboxFull) as caught:
        await ref.ask(question)
    assert caught.value.message is question
    assert caught.value.capacity == 1
    gate.set()


@pytest.mark.parametrize("many", [100, pytest.param(30_000, marks=pytest.mark.release)])
async def test_many_answers_that_come_later(system: ActorSystem, many: int) -> None:
    """Each new one looked for all those that are open: 8 s for 8,000."""
    replies: list[Reply[str]] = []

    class Later(Actor[Wait]):
        @handles
        def wait(self, m: Wait) -> None:
            replies.append(self.reply_later())

    ref = system.spawn(Later)
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await ref.ask(Wait(), timeout=None))

    async with trio.open_nursery() as nursery:
        for _ in range(many):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert len(ref._extras.open_asks) == many  # type: ignore[attr-defined]
        for reply in replies:
            reply.send("late")
    assert answers == ["late"] * many
    assert len(ref._extras.open_asks) == 0  # type: ignore[attr-defined]


async def test_questions_taken_over_and_given_up_do_not_pile_up(system: ActorSystem, autojump_clock: MockClock) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)
    for _ in range(100):
        with pytest.raises(AskTimeout):
            await ref.ask(Get(), timeout=0.01)
    assert len(ref._extras.open_asks) <= 17  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["send", "fail"])
async def test_a_question_taken_over_and_answered_is_not_kept(system: ActorSystem, how: str) -> None:
    replies: list[Reply[int]] = []
    ref = system.spawn(Deferring, replies)

    async def ask() -> None:
        with suppress(ActorError):
            await ref.ask(Get())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        if how == "send":
            replies[0].send(1)
        else:
            replies[0].fail(ActorError("no"))
        assert not ref._extras.open_asks  # type: ignore[attr-defined]


def test_open_asks_are_looked_at_twice_each_on_average() -> None:
    looks = 0

    class Unsettled:
        @property
        def settled(self) -> bool:
            nonlocal looks
            looks += 1
            return False

    asks = OpenAsks()
    for _ in range(5000):
        asks.take(Unsettled())  # type: ignore[arg-type]
    assert len(asks) == 5000
    assert 0 < looks < 10_000


async def test_an_asked_token_of_the_runtime_is_answered_and_the_turn_goes_on(system: ActorSystem) -> None:
    """Only who imports the runtime's internals could ask it; what is queued behind it is handled all the same."""
    ref: Ref[Any] = system.spawn(Gate)
    answers: list[Any] = []
    async with trio.open_nursery() as nursery:
        for question in (TURN, Get()):
            ref.tell(Tell(1))

            async def ask(question: Any = question) -> None:
                answers.append(await ref.ask(question))

            nursery.start_soon(ask)
    assert len(answers) == 2
    assert 7 in answers
