"""Dangers of the hand-driven run queue: ContextVars, and handlers called in their asker's own task."""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Failed, Reason, Ref, handles, message, restart
from levada.framework.embedding import Ask, adopt, local_ref
from levada.framework.errors import ActorStopped

from .conftest import Get, Item, Run, Runner


class Clock:
    """Moves on by a tenth of a millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


# ---------------------------------------------------------------- ContextVars

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


@message
class Set(Asks[str]):
    value: str
    wait: bool = False


@message
class Read(Asks[str]):
    wait: bool = False


class Remembers(Actor[Set | Read]):
    @handles
    def sync_set(self, m: Set) -> Any:
        VAR.set(m.value)
        return "set"

    @handles
    def read(self, m: Read) -> str:
        return VAR.get()


class RemembersSlowly(Actor[Set | Read]):
    @handles
    async def async_set(self, m: Set) -> str:
        if m.wait:
            await trio.lowlevel.checkpoint()
        VAR.set(m.value)
        if m.wait:
            await trio.lowlevel.checkpoint()
        assert VAR.get() == m.value
        return "set"

    @handles
    async def read(self, m: Read) -> str:
        if m.wait:
            await trio.lowlevel.checkpoint()
        return VAR.get()


@pytest.mark.parametrize("kind", [Remembers, RemembersSlowly])
@pytest.mark.parametrize("wait", [False, True])
async def test_context_a_variable_set_in_one_actor_is_seen_by_no_other_and_by_no_asker(
    system: ActorSystem, kind: type[Actor[Any]], wait: bool
) -> None:
    one, two = system.spawn(kind), system.spawn(kind)
    others = [system.spawn(Remembers), system.spawn(RemembersSlowly)]
    assert await one.ask(Set("one", wait)) == "set"
    assert VAR.get() == "unset"
    for ref in (two, *others):
        assert await ref.ask(Read(wait)) == "unset"
    assert await two.ask(Set("two", wait)) == "set"
    # An actor keeps what it has set, whichever worker runs it.
    assert await one.ask(Read(wait)) == "one"
    one.tell(Read())
    assert await one.ask(Read(wait)) == "one"
    assert await two.ask(Read(wait)) == "two"
    assert VAR.get() == "unset"


async def test_context_actors_see_what_was_set_where_the_system_was_entered() -> None:
    token = VAR.set("around")
    try:
        async with ActorSystem() as system:
            ref = system.spawn(Remembers)
            VAR.set("later")
            assert await ref.ask(Read()) == "around"
            assert VAR.get() == "later"
    finally:
        VAR.reset(token)


async def test_context_hooks_and_factories_leak_nothing_either(system: ActorSystem) -> None:
    seen: list[tuple[str, str]] = []

    class Hooks(Actor[Get]):
        def __attrs_post_init__(self) -> None:
            seen.append(("init", VAR.get()))

        def started(self) -> None:
            seen.append(("started", VAR.get()))
            VAR.set("from started")

        @handles
        def get(self, m: Get) -> int:
            raise ValueError(VAR.get())

        def restarting(self, error: BaseException | None, message: Any) -> None:
            seen.append(("restarting", VAR.get()))

        def stopping(self, reason: Reason) -> None:
            seen.append(("stopping", VAR.get()))

        def undelivered(self, messages: list[Any]) -> None:
            seen.append(("undelivered", VAR.get()))
            VAR.set("from undelivered")

    for _ in range(2):
        seen.clear()
        ref = system.spawn(Hooks, supervise=restart())
        await wait_all_tasks_blocked()
        with pytest.raises(ActorStopped, match="ValueError"):
            await ref.ask(Get())
        await wait_all_tasks_blocked()
        assert seen[:3] == [("init", "unset"), ("started", "unset"), ("restarting", "from started")]
        seen.clear()
        ref.tell(Get())
        ref.stop(now=True)
        await ref.terminated()
        assert seen == [("stopping", "from started"), ("undelivered", "from started")]
    assert VAR.get() == "unset"
    assert await system.spawn(Remembers).ask(Read()) == "unset"


async def test_context_tasks_of_an_actor_start_with_what_it_has_set(system: ActorSystem) -> None:
    seen: list[str] = []

    class Starts(Actor[Set]):
        @handles
        async def set(self, m: Set) -> str:
            VAR.set(m.value)
            await trio.lowlevel.checkpoint()
            self.start_soon(self.look)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.look)
            seen.append(await trio.to_thread.run_sync(VAR.get))
            return "set"

        async def look(self) -> None:
            seen.append(VAR.get())

    await system.spawn(Starts).ask(Set("mine"))
    await wait_all_tasks_blocked()
    assert seen == ["mine", "mine", "mine"]


# ---------------------------------------------------------------- inline


class Tasks(Actor[Get | Read]):
    """Tells which task its handlers run in."""

    tasks: list[trio.lowlevel.Task]

    @handles
    def sync(self, m: Get) -> int:
        self.tasks.append(trio.lowlevel.current_task())
        return 0

    @handles
    async def waits(self, m: Read) -> str:
        self.tasks.append(trio.lowlevel.current_task())
        await trio.lowlevel.checkpoint()
        return ""


async def test_inline_is_for_sync_handlers_only(system: ActorSystem) -> None:
    tasks: list[trio.lowlevel.Task] = []
    ref = system.spawn(Tasks, tasks)
    await ref.ask(Get())
    assert tasks == [trio.lowlevel.current_task()]
    await ref.ask(Read())
    assert tasks[1] is not trio.lowlevel.current_task()


async def test_inline_keeps_the_order_a_busy_actor_is_not_called(system: ActorSystem) -> None:
    tasks: list[trio.lowlevel.Task] = []
    ref = system.spawn(Tasks, tasks)
    ref.tell(Get())
    await ref.ask(Get())
    assert len(tasks) == 2
    assert trio.lowlevel.current_task() not in tasks


async def test_inline_is_not_re_entrant(system: ActorSystem) -> None:
    allowed: list[bool] = []

    class Looks(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            allowed.append(self.system.scheduler.may_inline())
            return 2

    ref = system.spawn(Looks)
    assert system.scheduler.may_inline()
    assert await ref.ask(Get()) == 2
    assert allowed == [False]
    assert system.scheduler.may_inline()


class Answers(Actor[Get]):
    """Answers without a turn."""

    def started(self) -> None:
        local_ref(self).take_at_once(self.take)

    def take(self, question: Ask) -> bool:
        question.answer(1)
        return True

    @handles
    def get(self, m: Get) -> int:
        raise AssertionError("the question was taken")


@pytest.mark.parametrize("kind", [Runner, Answers])
async def test_inline_is_bounded_by_the_slice(kind: type[Actor[Any]]) -> None:
    """A loop of asks that never need to wait still lets other tasks run, about once each slice."""
    measure_by(Clock())
    async with ActorSystem() as system:
        ref = system.spawn(kind)
        await wait_all_tasks_blocked()
        others: list[int] = []

        async def count() -> None:
            while True:
                others.append(1)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            for _ in range(100):
                await ref.ask(Get())
            nursery.cancel_scope.cancel()
        # Each ask looks at the clock at least once, which moves it by a fifth of a slice.
        assert 15 <= len(others) <= 101


async def test_inline_runs_no_hook_in_the_askers_task_or_under_its_cancellation(system: ActorSystem) -> None:
    tasks: list[trio.lowlevel.Task] = []
    finished: list[str] = []

    class Fails(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            scope.cancel()
            raise ValueError("on purpose")

        async def stopping(self, reason: Reason) -> None:
            tasks.append(trio.lowlevel.current_task())
            await trio.lowlevel.checkpoint()
            finished.append(type(reason).__name__)

    ref = system.spawn(Fails)
    with trio.CancelScope() as scope, pytest.raises(ActorStopped):
        await ref.ask(Get())
    assert isinstance(await ref.terminated(), Failed)
    assert finished == ["Failed"]
    assert trio.lowlevel.current_task() not in tasks


async def test_inline_under_a_cancelled_scope_does_not_even_begin(system: ActorSystem) -> None:
    tasks: list[trio.lowlevel.Task] = []
    ref = system.spawn(Tasks, tasks)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.ask(Get())
    assert scope.cancelled_caught
    assert tasks == []


async def test_inline_what_has_been_answered_stays_answered_though_the_slice_is_over() -> None:
    clock = Clock()
    measure_by(clock)
    async with ActorSystem() as system:
        ref = system.spawn(Runner)

        class Cancels(Actor[Get]):
            @handles
            def get(self, m: Get) -> int:
                clock.now += 1.0
                scope.cancel()
                return 42

        answers: list[int] = []
        with trio.CancelScope() as scope:
            answers.append(await system.spawn(Cancels).ask(Get()))
        assert answers == [42]
        assert not scope.cancelled_caught
        assert ref.is_alive


async def test_inline_a_handler_that_ends_its_own_actor_and_then_raises_has_failed(system: ActorSystem) -> None:
    """A failure weighs more than a request to end, in whichever task the handler ran."""

    class Ends(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            self.ref.kill()
            raise ValueError("after all")

    async def ask(ref: Ref[Any]) -> None:
        with pytest.raises(ActorStopped, match="ValueError"):
            await ref.ask(Get())

    for busy in (False, True):
        ref = system.spawn(Ends)
        if busy:
            gate = trio.Event()
            other = system.spawn(Runner)
            other.tell(Run(gate.wait))
            other.tell(Run(functools.partial(ask, ref)))
            gate.set()
        else:
            await ask(ref)
        reason = await ref.terminated()
        assert isinstance(reason, Failed)
        assert repr(reason.error) == "ValueError('after all')"
    assert system.statistics().failures == 2


async def test_inline_a_sync_handler_that_returns_a_coroutine_is_finished_by_a_worker(system: ActorSystem) -> None:
    tasks: list[trio.lowlevel.Task] = []

    class Delegates(Actor[Get]):
        @handles
        def get(self, m: Get) -> Any:
            return self.later()

        async def later(self) -> int:
            tasks.append(trio.lowlevel.current_task())
            await trio.lowlevel.checkpoint()
            return 7

    ref = system.spawn(Delegates)
    assert await ref.ask(Get()) == 7
    assert trio.lowlevel.current_task() not in tasks


async def test_inline_messages_that_came_meanwhile_are_handled_in_order(system: ActorSystem) -> None:
    seen: list[int] = []

    class Tells(Runner):
        @handles
        def get(self, m: Get) -> int:
            for n in range(3):
                self.ref.tell(Item(0, n))
            return len(self.seen)

    ref = system.spawn(Tells, seen)
    assert await ref.ask(Get()) == 0
    await wait_all_tasks_blocked()
    assert seen == [0, 1, 2]
    assert await ref.ask(Get()) == 3


async def test_a_sync_handler_sees_its_askers_deadline_and_an_async_one_does_not(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    class Looks(Actor[Set | Read]):
        @handles
        def sync(self, m: Set) -> str:
            return str(trio.current_effective_deadline())

        @handles
        async def waits(self, m: Read) -> str:
            return str(trio.current_effective_deadline())

    ref = system.spawn(Looks)
    with trio.fail_at(1000.0):
        assert await ref.ask(Set("")) == "1000.0"
        assert await ref.ask(Read()) == "inf"


# ---------------------------------------------------------------- within the turn of another actor


class Entry(Ask):
    """What a parent hands to its child."""


class Child(Actor[Any]):
    seen: list[object]

    @handles(Entry)
    def take(self, entry: Entry) -> Any:
        self.seen.append(("child", entry.message, VAR.get(), trio.lowlevel.current_task()))
        match entry.message:
            case "fail":
                raise ValueError("on purpose")
            case "tell":
                self.ref.tell(Item(0, 1))
            case "set":
                VAR.set("of the child")
            case "wait":
                return self.later(entry)
        entry.answer("at once")
        return None

    async def later(self, entry: Entry) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append(("later", entry.message, VAR.get(), trio.lowlevel.current_task()))
        entry.answer("later")

    @handles
    def item(self, m: Item) -> None:
        self.seen.append(("item", m.n, VAR.get(), trio.lowlevel.current_task()))


class Parent(Actor[Set]):
    """Hands each word of a question on to its child, at once unless there is an exclamation mark."""

    seen: list[object]
    offspring: list[Ref[Any]]

    def started(self) -> None:
        self.child = Child(self.seen)
        adopt(self, self.child)
        self.offspring.append(self.child.ref)
        local_ref(self).take_at_once(self.take)

    def take(self, question: Ask) -> bool:
        if "!" in question.message.value:
            return False
        if question.message.value == "busy fault":
            self.ref.tell(Set("!one"))
        if question.message.value.endswith("fault"):
            raise LookupError("in take")
        for each in question.message.value.split():
            entry = Entry(each, local_ref(self.child))
            local_ref(self.child).handle_or_enqueue(entry)
            self.seen.append(("handed", each, entry.settled, VAR.get()))
        question.answer("handed")
        return True

    @handles
    def put(self, m: Set) -> str:
        if m.value == "!fail":
            raise ValueError("on purpose")
        for each in m.value.strip("!").split():
            local_ref(self.child).enqueue(Entry(each, local_ref(self.child)))
            self.seen.append(("put", each, None, VAR.get()))
        return "put"


async def test_a_question_is_handed_on_to_an_idle_actor_in_its_askers_task(system: ActorSystem) -> None:
    seen: list[Any] = []
    ref = system.spawn(Parent, seen, [])
    await wait_all_tasks_blocked()
    VAR.set("of the asker")
    assert await ref.ask(Set("one set two")) == "handed"
    assert [each[:3] for each in seen] == [
        ("child", "one", "unset"),
        ("handed", "one", True),
        ("child", "set", "unset"),
        ("handed", "set", True),
        ("child", "two", "of the child"),
        ("handed", "two", True),
    ]
    # What the child has set is its own.
    assert {each[3] for each in seen[::2]} == {trio.lowlevel.current_task()}
    assert {each[3] for each in seen[1::2]} == {"of the asker"}
    assert VAR.get() == "of the asker"
    [parent] = [each for each in system.observe.tree().children if each.path == ref.path]
    assert (parent.handled, [each.handled for each in parent.children]) == (1, [3])


async def test_a_question_that_is_not_taken_goes_to_the_handler(system: ActorSystem) -> None:
    seen: list[Any] = []
    ref = system.spawn(Parent, seen, [])
    await wait_all_tasks_blocked()
    assert await ref.ask(Set("one!")) == "put"
    await wait_all_tasks_blocked()
    assert [each[:2] for each in seen] == [("put", "one"), ("child", "one")]


async def test_a_question_to_a_busy_actor_goes_by_the_mailbox(system: ActorSystem) -> None:
    """It comes behind what was told before."""
    seen: list[Any] = []
    ref = system.spawn(Parent, seen, [])
    await wait_all_tasks_blocked()
    ref.tell(Set("one"))
    assert await ref.ask(Set("two")) == "put"
    await wait_all_tasks_blocked()
    assert [each[:2] for each in seen] == [("put", "one"), ("put", "two"), ("child", "one"), ("child", "two")]


async def test_a_restarted_actor_takes_with_its_new_object(system: ActorSystem) -> None:
    seen: list[Any] = []
    offspring: list[Ref[Any]] = []
    ref = system.spawn(Parent, seen, offspring, supervise=restart(max=1))
    await wait_all_tasks_blocked()
    ref.tell(Set("!fail"))
    assert await ref.ask(Set("one")) in ("handed", "put")
    await wait_all_tasks_blocked()
    assert await ref.ask(Set("two")) == "handed"
    assert [each[1] for each in seen if each[0] == "child"] == ["one", "two"]
    assert [each.is_alive for each in offspring] == [False, True]
    ref.stop()
    await ref.terminated()
    with pytest.raises(ActorStopped):
        await ref.ask(Set("three"))


@pytest.mark.slow_handler
async def test_a_slow_actor_is_named_alone(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    class Slow(Child):
        @handles(Entry)
        def take(self, entry: Entry) -> Any:
            clock.now += 1.0
            entry.answer("at last")

    class SlowParent(Parent):
        def started(self) -> None:
            self.child = Slow(self.seen)
            adopt(self, self.child, name="slow")

    measure_by(clock)
    async with ActorSystem() as system:
        ref = system.spawn(SlowParent, [], [], name="parent")
        await wait_all_tasks_blocked()
        caplog.clear()
        await ref.ask(Set("one"))
    [line] = caplog.messages
    assert line.startswith("/parent/slow held everything up for 1.000 s with 1 message, last str")


async def test_a_busy_actor_handles_an_entry_behind_what_it_has(system: ActorSystem) -> None:
    seen: list[Any] = []
    ref = system.spawn(Parent, seen, [])
    await wait_all_tasks_blocked()
    await ref.ask(Set("tell two wait three"))
    await wait_all_tasks_blocked()
    assert [each[:2] for each in seen] == [
        ("child", "tell"),
        ("handed", "tell"),
        ("handed", "two"),
        ("handed", "wait"),
        ("handed", "three"),
        ("item", 1),
        ("child", "two"),
        ("child", "wait"),
        ("later", "wait"),
        ("child", "three"),
    ]


async def test_a_handler_that_waits_goes_on_in_a_worker(system: ActorSystem) -> None:
    seen: list[Any] = []
    ref = system.spawn(Parent, seen, [])
    await wait_all_tasks_blocked()
    await ref.ask(Set("wait one"))
    await wait_all_tasks_blocked()
    assert [each[:2] for each in seen] == [
        ("child", "wait"),
        ("handed", "wait"),
        ("handed", "one"),
        ("later", "wait"),
        ("child", "one"),
    ]
    assert seen[0][3] is trio.lowlevel.current_task() is not seen[3][3]


async def test_a_failure_is_the_childs_and_comes_after_the_turn(system: ActorSystem) -> None:
    seen: list[Any] = []
    offspring: list[Ref[Any]] = []
    ref = system.spawn(Parent, seen, offspring)
    await wait_all_tasks_blocked()
    [child] = offspring
    assert await ref.ask(Set("fail one")) == "handed"
    assert [each[:3] for each in seen] == [
        ("child", "fail", "unset"),
        ("handed", "fail", False),
        ("handed", "one", False),
    ]
    reason = await child.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "ValueError('on purpose')"
    assert len(seen) == 3


@pytest.mark.parametrize("word", ["fault", "busy fault"])
async def test_what_takes_questions_fails_as_a_handler_does(system: ActorSystem, word: str) -> None:
    """The asker gets the answer of a handler that failed, not the error itself; the supervisor restarts the actor."""
    seen: list[Any] = []
    offspring: list[Ref[Any]] = []
    ref = system.spawn(Parent, seen, offspring, supervise=restart(max=1))
    await wait_all_tasks_blocked()
    with pytest.raises(ActorStopped, match="LookupError"):
        await ref.ask(Set(word))
    await wait_all_tasks_blocked()
    assert [each.is_alive for each in offspring] == [False, True]
    assert [each[:2] for each in seen] == [("put", "one"), ("child", "one")] * (word == "busy fault")
    assert await ref.ask(Set("two")) == "handed"
    alone = system.spawn(Parent, [], [])
    await wait_all_tasks_blocked()
    with pytest.raises(ActorStopped, match="LookupError"):
        await alone.ask(Set(word))
    reason = await alone.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "LookupError('in take')"
