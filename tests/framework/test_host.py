"""An actor's own tasks and contexts: `start_soon`, `enter`, `pipe`, and handlers that block a thread."""

from __future__ import annotations

import contextvars
import functools
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Failed,
    Killed,
    Reason,
    Ref,
    Shutdown,
    blocking,
    bounded,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped

Log = list[Any]

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


@message
class Do(Asks[Any]):
    """Call a function, sync or async, with the actor."""

    function: Callable[[Any], Any]


@message
class Result:
    value: Any


class Worker(Actor[Do | Result]):
    log: Log

    def stopping(self, reason: Reason) -> None:
        self.log.append("stopping")

    @handles
    async def do(self, m: Do) -> Any:
        result = m.function(self)
        return await result if hasattr(result, "__await__") else result

    @handles
    def result(self, m: Result) -> None:
        self.log.append(m.value)


@asynccontextmanager
async def context(log: Log, name: str, *, slow_in: float = 0.0, slow_out: float = 0.0) -> AsyncIterator[str]:
    """Log entering and leaving; ``slow_in`` and ``slow_out`` seconds each."""
    await trio.sleep(slow_in)
    log.append(f"in {name}")
    try:
        yield name
    finally:
        try:
            await trio.sleep(slow_out)
            log.append(f"out {name}")
        except trio.Cancelled:
            log.append(f"torn {name}")
            raise


async def pause(seconds: float = 1e9) -> None:
    await trio.sleep(seconds)


def system_tasks(system: ActorSystem) -> list[str]:
    """Names of the tasks that the system runs now, without its workers."""
    names = [task.name for task in system._nursery.child_tasks]
    return sorted(name for name in names if name not in ("<worker>", "<timers>"))


# ---------------------------------------------------------------- start_soon


async def test_tasks_run_beside_the_handlers_and_end_with_the_actor(system: ActorSystem) -> None:
    log: Log = []
    names: dict[str, str] = {}
    ref = system.spawn(Worker, log)

    async def task(name: str) -> None:
        names[name] = trio.lowlevel.current_task().name
        log.append(f"begin {name}")
        try:
            await trio.sleep_forever()
        finally:
            log.append(f"end {name}")

    await ref.ask(Do(lambda actor: actor.start_soon(task, "a", name="ay")))
    await wait_all_tasks_blocked()
    await ref.ask(Do(lambda actor: actor.start_soon(task, "b", name="bee")))
    await ref.ask(Do(lambda actor: actor.start_soon(task, "c")))
    await wait_all_tasks_blocked()
    assert sorted(log) == ["begin a", "begin b", "begin c"]
    assert names == {"a": "ay", "b": "bee", "c": f"{task.__module__}.{task.__qualname__}"}
    assert await ref.ask(Do(lambda actor: "still here")) == "still here"
    ref.stop()
    assert await ref.terminated() == Shutdown()
    # Hooks come before the tasks are ended.
    assert log[3] == "stopping"
    assert sorted(log[4:]) == ["end a", "end b", "end c"]
    assert system_tasks(system) == []


async def test_a_task_that_has_ended_leaves_none_of_its_arguments(system: ActorSystem) -> None:
    class Value:
        pass

    async def task(value: Value) -> None:
        pass

    ref, values = system.spawn(Worker, []), list[weakref.ref[Value]]()
    for _ in range(2):  # the second one finds the nursery open
        value = Value()
        values.append(weakref.ref(value))
        await ref.ask(Do(functools.partial(lambda value, actor: actor.start_soon(task, value), value)))
        del value
        await wait_all_tasks_blocked()
    gc.collect()
    assert [each() for each in values] == [None, None]


async def test_a_task_that_fails_is_a_failure_of_the_actor(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)
    error = ValueError("in a task")

    async def task() -> None:
        raise error

    await ref.ask(Do(lambda actor: actor.start_soon(task)))
    assert await ref.terminated() == Failed(error)
    assert system_tasks(system) == []


async def test_a_failing_task_cancels_the_waiting_handler_and_its_sibling_tasks(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log, supervise=restart())

    async def sibling() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("sibling ended")

    async def task(event: trio.Event) -> None:
        await event.wait()
        raise ValueError

    event = trio.Event()

    async def handler(actor: Worker) -> None:
        actor.start_soon(sibling)
        actor.start_soon(task, event)
        try:
            await trio.sleep_forever()
        finally:
            log.append("handler cancelled")

    ref.tell(Do(handler))
    await wait_all_tasks_blocked()
    event.set()
    await wait_all_tasks_blocked()
    assert log == ["handler cancelled", "sibling ended"]
    assert ref.is_alive
    assert await ref.ask(Do(lambda actor: actor.log)) == log


async def test_a_failure_of_an_old_incarnations_task_is_not_the_new_ones(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    ref: Any = system.spawn(Worker, log, supervise=restart(max=1))

    async def untidy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise LookupError("while it is ended")

    await ref.ask(Do(lambda actor: actor.start_soon(untidy)))
    await wait_all_tasks_blocked()
    ref.kill()
    await wait_all_tasks_blocked()
    assert ref.is_alive
    assert ref._extras.restarts == 1
    assert system.statistics().failures == 1


async def test_an_error_while_tasks_are_ended_is_the_weightier_reason(system: ActorSystem) -> None:
    ref = system.spawn(Worker, [])

    async def untidy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise LookupError("clean-up")

    await ref.ask(Do(lambda actor: actor.start_soon(untidy)))
    await wait_all_tasks_blocked()
    ref.stop()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, LookupError)


async def test_groups_out_of_tasks_stay_groups(system: ActorSystem) -> None:
    ref = system.spawn(Worker, [])

    async def fail(error: Exception) -> None:
        raise error

    async def task() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ValueError())
            nursery.start_soon(fail, KeyError())

    await ref.ask(Do(lambda actor: actor.start_soon(task)))
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ExceptionGroup)
    assert {type(error) for error in reason.error.exceptions} == {ValueError, KeyError}


async def test_tasks_see_the_context_variables_of_the_handler_that_started_them(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def task() -> None:
        log.append(color.get())

    def start(actor: Worker) -> None:
        color.set("red")
        actor.start_soon(task)
        color.set("blue")

    await ref.ask(Do(start))
    await wait_all_tasks_blocked()
    await ref.ask(Do(lambda actor: actor.start_soon(task)))
    await wait_all_tasks_blocked()
    # The first one is remembered until the nursery is open; it was started in red, and so was its nursery.
    assert log == ["red", "blue"]
    assert color.get() == "none"


async def test_started_may_start_tasks(system: ActorSystem) -> None:
    class Starter(Worker):
        def started(self) -> None:
            self.start_soon(self._task)

        async def _task(self) -> None:
            self.log.append("task")

    log: Log = []
    system.spawn(Starter, log)
    await wait_all_tasks_blocked()
    assert log == ["task"]


@pytest.mark.parametrize("use", ["start_soon", "enter"])
async def test_an_actor_that_stops_starts_nothing_more(system: ActorSystem, use: str) -> None:
    log: Log = []
    outcomes: Log = []

    class Late(Worker):
        async def stop_late(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                try:
                    if use == "start_soon":
                        self.start_soon(trio.sleep_forever)
                    else:
                        with trio.CancelScope(shield=True):
                            await self.enter(context(log, "late"))
                except RuntimeError as error:
                    outcomes.append(str(error))

    ref = system.spawn(Late, log)
    await ref.ask(Do(lambda actor: actor.start_soon(actor.stop_late)))
    await wait_all_tasks_blocked()
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert len(outcomes) == 1
    assert "is stopping" in outcomes[0]
    assert log == ["stopping"]


async def test_who_waits_for_a_context_that_is_cancelled_is_told_so(autojump_clock: MockClock) -> None:
    """Also where its own cancellation does not reach it."""
    log: Log = []

    async def enters(actor: Worker) -> None:
        with trio.CancelScope(shield=True), pytest.raises(RuntimeError) as caught:
            await actor.enter(context(log, "slow", slow_in=1000.0))
        log.append((trio.current_time(), str(caught.value)))

    async with ActorSystem(stop_timeout=2.0, shutdown_timeout=60) as system:
        ref = system.spawn(Worker, log, name="worker")
        await ref.ask(Do(lambda actor: actor.start_soon(enters, actor)))
        await wait_all_tasks_blocked()
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert log[-1] == (pytest.approx(2.0), "/worker is stopping")


async def test_a_task_that_swallows_its_cancellation_is_waited_for_and_reported(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem(stop_timeout=2.0, shutdown_timeout=60) as system:
        ref = system.spawn(Worker, [], name="stubborn")

        async def stubborn() -> None:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)

        await ref.ask(Do(lambda actor: actor.start_soon(stubborn)))
        await wait_all_tasks_blocked()
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() == pytest.approx(5.0)
    assert "tasks of /stubborn took longer than 2 s to end" in caplog.text


async def test_a_keyboard_interrupt_in_a_task_ends_the_system() -> None:
    with pytest.raises(KeyboardInterrupt):
        async with ActorSystem() as system:
            ref = system.spawn(Worker, [], supervise=restart())

            async def task(event: trio.Event) -> None:
                await event.wait()
                raise KeyboardInterrupt

            event = trio.Event()
            await ref.ask(Do(lambda actor: actor.start_soon(task, event)))
            ref.tell(Do(lambda actor: pause()))  # a handler waits meanwhile
            await wait_all_tasks_blocked()
            event.set()
            await trio.sleep_forever()


# ---------------------------------------------------------------- enter


async def test_contexts_are_left_last_entered_first_after_the_hooks_and_the_tasks(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("task ended")

    async def enter(actor: Worker) -> list[str]:
        actor.start_soon(task)
        return [await actor.enter(context(log, name)) for name in "abc"]

    assert await ref.ask(Do(enter)) == ["a", "b", "c"]
    await wait_all_tasks_blocked()
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert log == ["in a", "in b", "in c", "stopping", "task ended", "out c", "out b", "out a"]
    assert system_tasks(system) == []


async def test_a_restart_leaves_the_contexts_of_the_old_object(system: ActorSystem) -> None:
    log: Log = []

    class Entering(Worker):
        async def started(self) -> None:
            await self.enter(context(self.log, "x"))

    ref = system.spawn(Entering, log, supervise=restart())
    await wait_all_tasks_blocked()
    ref.kill()
    await wait_all_tasks_blocked()
    assert log == ["in x", "torn x", "in x"]


async def test_what_entering_raises_comes_out_of_enter(system: ActorSystem) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        raise OSError("no")
        yield

    ref = system.spawn(Worker, [])

    async def enter(actor: Worker) -> str:
        with pytest.raises(OSError, match="no"):
            await actor.enter(broken())
        return "fine"

    assert await ref.ask(Do(enter)) == "fine"
    assert ref.is_alive
    assert system_tasks(system) == []


async def test_what_a_context_raises_later_is_a_failure_of_the_actor(system: ActorSystem) -> None:
    @asynccontextmanager
    async def dying(event: trio.Event) -> AsyncIterator[None]:
        async def die() -> None:
            await event.wait()
            raise ConnectionError("gone")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            yield
            nursery.cancel_scope.cancel()

    event = trio.Event()
    ref = system.spawn(Worker, [])
    await ref.ask(Do(lambda actor: actor.enter(dying(event))))
    assert ref.is_alive
    event.set()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ExceptionGroup)
    assert reason.error.split(ConnectionError)[1] is None
    assert system_tasks(system) == []


async def test_what_leaving_raises_is_the_weightier_reason(system: ActorSystem) -> None:
    @asynccontextmanager
    async def sticky() -> AsyncIterator[None]:
        yield
        raise LookupError("on the way out")

    ref = system.spawn(Worker, [])
    await ref.ask(Do(lambda actor: actor.enter(sticky())))
    ref.stop()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, LookupError)


async def test_enter_that_is_cancelled_leaves_nothing_behind(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def enter(actor: Worker) -> bool:
        with trio.move_on_after(1.0) as scope:
            await actor.enter(context(log, "slow", slow_in=10.0))
        return scope.cancelled_caught

    assert await ref.ask(Do(enter)) is True
    assert trio.current_time() == pytest.approx(1.0)
    assert log == []
    assert system_tasks(system) == []
    ref.stop()
    assert await ref.terminated() == Shutdown()


async def test_an_enter_that_is_cancelled_while_the_value_is_on_its_way_keeps_neither_context_nor_value(
    system: ActorSystem,
) -> None:
    """An actor may enter contexts with a deadline as often as it likes."""
    values: list[weakref.ref[Any]] = []
    log: Log = []
    ref = system.spawn(Worker, log)

    class Value:
        pass

    @asynccontextmanager
    async def resource() -> AsyncIterator[Value]:
        value = Value()
        values.append(weakref.ref(value))
        yield value
        log.append("left")

    async def enter(actor: Worker) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await actor.enter(resource())

    await ref.ask(Do(enter))
    await wait_all_tasks_blocked()
    gc.collect()
    assert [value() for value in values] == [None]
    assert system_tasks(system) == []


async def test_a_kill_while_entering_gives_the_context_up(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)
    ref.tell(Do(lambda actor: actor.enter(context(log, "slow", slow_in=10.0))))
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    assert trio.current_time() == 0.0
    assert log == ["stopping"]
    assert system_tasks(system) == []


async def test_a_context_that_does_not_leave_is_cancelled_at_the_deadline(autojump_clock: MockClock) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=2.0, shutdown_timeout=60) as system:
        ref = system.spawn(Worker, log)

        async def enter(actor: Worker) -> None:
            await actor.enter(context(log, "first", slow_out=0.5))
            await actor.enter(context(log, "slow", slow_out=100.0))

        await ref.ask(Do(enter))
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() == pytest.approx(2.0)
        # With the time used up, what is left is torn too; but all of it has been left.
        assert log[:3] == ["in first", "in slow", "stopping"]
        assert sorted(log[3:]) == ["torn first", "torn slow"]
        assert system_tasks(system) == []


async def test_a_kill_tears_contexts(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)
    await ref.ask(Do(lambda actor: actor.enter(context(log, "x", slow_out=1.0))))
    ref.kill()
    assert await ref.terminated() == Killed()
    assert log == ["in x", "stopping", "torn x"]
    assert trio.current_time() == 0.0


async def test_two_tasks_enter_at_the_same_time(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def both(actor: Worker) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.enter, context(log, "slow", slow_in=2.0))
            nursery.start_soon(actor.enter, context(log, "fast", slow_in=1.0))

    await ref.ask(Do(both))
    ref.stop()
    await ref.terminated()
    assert sorted(log[:2]) == ["in fast", "in slow"]
    assert sorted(log[3:]) == ["out fast", "out slow"]


# ---------------------------------------------------------------- pipe


async def test_pipe_answers_as_a_message_while_others_are_handled(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def slow() -> int:
        await trio.sleep(2)
        return 42

    await ref.ask(Do(lambda actor: actor.pipe(slow, lambda n: Result(("slow", n)))))
    ref.tell(Result("meanwhile"))
    await trio.sleep(3)
    assert log == ["meanwhile", ("slow", 42)]


async def test_pipe_turns_an_exception_into_a_message_if_asked(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def broken() -> int:
        raise OSError("no")

    await ref.ask(Do(lambda actor: actor.pipe(broken, Result, failed=lambda error: Result(repr(error)))))
    await wait_all_tasks_blocked()
    assert log == ["OSError('no')"]
    await ref.ask(Do(lambda actor: actor.pipe(broken, Result)))
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, OSError)


async def test_pipe_ends_with_the_actor(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Worker, log)

    async def forever() -> int:
        try:
            await trio.sleep_forever()
        finally:
            log.append("cancelled")
        return 0

    await ref.ask(Do(lambda actor: actor.pipe(forever, Result)))
    await wait_all_tasks_blocked()
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert log == ["stopping", "cancelled"]
    assert system.statistics().dead_letters == 0


async def test_pipe_waits_for_room_in_its_own_mailbox(system: ActorSystem) -> None:
    log: Log = []
    ref: Ref[Any] = system.spawn(Worker, log, mailbox=bounded(1))

    async def quick(n: int) -> int:
        return n

    def start(actor: Worker) -> None:
        for n in range(5):
            actor.pipe(functools.partial(quick, n), Result)

    await ref.send(Do(start))
    await wait_all_tasks_blocked()
    assert sorted(log) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- blocking handlers


@message
class Block(Asks[str]):
    event: threading.Event


class Blocking(Actor[Block | Result]):
    log: Log

    @handles
    @blocking
    def block(self, m: Block) -> str:
        m.event.wait(30)
        return threading.current_thread().name

    @handles
    def result(self, m: Result) -> None:
        self.log.append(m.value)


async def test_a_blocking_handler_runs_in_a_thread_and_holds_up_only_its_actor(system: ActorSystem) -> None:
    log: Log = []
    ref, other = system.spawn(Blocking, log), system.spawn(Blocking, log)
    event = threading.Event()
    answers: Log = []

    async def ask() -> None:
        answers.append(await ref.ask(Block(event)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        ref.tell(Result("queued"))
        other.tell(Result("elsewhere"))
        await wait_all_tasks_blocked()
        assert log == ["elsewhere"]
        event.set()
    await wait_all_tasks_blocked()
    assert log == ["elsewhere", "queued"]
    assert answers[0] != threading.current_thread().name


async def test_blocking_threads_is_the_most_at_a_time() -> None:
    async with ActorSystem(blocking_threads=2) as system:
        events = [threading.Event() for _ in range(3)]
        for event in events:
            system.spawn(Blocking, []).tell(Block(event))
        await wait_all_tasks_blocked()
        assert system.blocking_limiter.borrowed_tokens == 2
        assert system.blocking_limiter.statistics().tasks_waiting == 1
        for event in events:
            event.set()


async def test_an_exception_in_the_thread_is_the_actors_failure(system: ActorSystem) -> None:
    class Broken(Actor[Block]):
        @handles
        @blocking
        def block(self, m: Block) -> str:
            raise ValueError("in the thread")

    ref = system.spawn(Broken)
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Block(threading.Event()))
    assert str(caught.value.__cause__) == "in the thread"


async def test_a_killed_actor_waits_for_its_thread(system: ActorSystem) -> None:
    ref = system.spawn(Blocking, [])
    event = threading.Event()
    ref.tell(Block(event))
    await wait_all_tasks_blocked()
    ref.kill()
    await wait_all_tasks_blocked()
    assert ref.is_alive
    event.set()
    assert await ref.terminated() == Killed()


@pytest.mark.parametrize("end", ["stop", "kill", "fail"])
async def test_the_tasks_and_contexts_of_an_actor_without_hooks_end_before_it_has_ended(
    system: ActorSystem, end: str
) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        try:
            yield
        finally:
            seen.append("context")

    class Bare(Actor[Any]):
        async def task(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                seen.append("task")

        @handles
        async def begin(self, m: str) -> None:
            if m == "fail":
                raise ValueError("on purpose")
            self.start_soon(self.task)
            await self.enter(context())

    ref = system.spawn(Bare)
    ref.tell("begin")
    await wait_all_tasks_blocked()
    assert seen == []
    match end:
        case "stop":
            ref.stop()
        case "kill":
            ref.kill()
        case _:
            ref.tell("fail")
    await ref.terminated()
    # A kill cancels both at once.
    assert (sorted(seen, reverse=True) if end == "kill" else seen) == ["task", "context"]
