"""A handler that waits is an ordinary trio task: everything that works in a task works in it."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sniffio
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Failed,
    Killed,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped


@message
class Run(Asks[Any]):
    """Carry the body of a handler."""

    function: Callable[[Actor[Any]], Awaitable[Any]]


class Runner(Actor[Run]):
    @handles
    async def run_it(self, m: Run) -> Any:
        return await m.function(self)


async def rest(_: Any) -> None:
    await trio.lowlevel.checkpoint()


async def both_ways(system: ActorSystem, function: Callable[[], Awaitable[Any]]) -> Any:
    """Run a body as the first thing in a handler, and after the handler has waited."""
    ref = system.spawn(Runner)

    async def at_once(_: Any) -> Any:
        return await function()

    async def later(_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return await function()

    first = await ref.ask(Run(at_once), timeout=None)
    second = await ref.ask(Run(later), timeout=None)
    assert first == second
    return first


# ---------------------------------------------------------------- timeouts


async def test_move_on_after_and_fail_after(system: ActorSystem, autojump_clock: MockClock) -> None:
    async def body() -> list[Any]:
        log: list[Any] = []
        with trio.move_on_after(2) as scope:
            await trio.sleep_forever()
        log.append(scope.cancelled_caught)
        try:
            with trio.fail_after(3):
                await trio.sleep(10)
        except trio.TooSlowError:
            log.append("too slow")
        with trio.move_on_after(5):
            await trio.sleep(1)
            log.append("in time")
        return log

    start = trio.current_time()
    assert await both_ways(system, body) == [True, "too slow", "in time"]
    assert trio.current_time() - start == pytest.approx(12)


async def test_timeouts_may_expire_as_often_as_one_likes(system: ActorSystem, autojump_clock: MockClock) -> None:
    async def body() -> int:
        expired = 0
        for _ in range(250):
            with trio.move_on_after(1) as scope:
                await trio.sleep_forever()
            expired += scope.cancelled_caught
        return expired

    assert await both_ways(system, body) == 250


async def test_cancel_scopes_nest_and_shield(system: ActorSystem) -> None:
    async def body() -> list[str]:
        log = []
        with trio.CancelScope() as outer:
            outer.cancel()
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                log.append("shielded")
            await trio.lowlevel.checkpoint()
            log.append("not reached")
        log.append("outside")
        return log

    assert await both_ways(system, body) == ["shielded", "outside"]


async def test_a_too_slow_error_fails_the_actor_like_any_error(system: ActorSystem, autojump_clock: MockClock) -> None:
    async def body(_: Any) -> None:
        with trio.fail_after(1):
            await trio.sleep_forever()

    ref = system.spawn(Runner)
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Run(body))
    assert isinstance(caught.value.__cause__, trio.TooSlowError)


# ---------------------------------------------------------------- nurseries and groups


async def test_inner_nurseries_and_start(system: ActorSystem) -> None:
    async def child(n: int, log: list[int], *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()
        task_status.started(n * 10)
        await trio.lowlevel.checkpoint()
        log.append(n)

    async def body() -> tuple[list[int], int]:
        log: list[int] = []
        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(functools.partial(child, n, log))
            value = await nursery.start(child, 3, log)
        return sorted(log), value

    assert await both_ways(system, body) == ([0, 1, 2, 3], 30)


async def test_an_error_in_a_nursery_cancels_its_siblings_and_fails_the_actor_with_the_group(
    system: ActorSystem,
) -> None:
    log: list[str] = []

    async def fails() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("child")

    async def waits() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("sibling cancelled")

    async def body(_: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            nursery.start_soon(waits)

    ref = system.spawn(Runner)
    with pytest.raises(ActorStopped):
        await ref.ask(Run(body))
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ExceptionGroup)
    assert [repr(error) for error in reason.error.exceptions] == ["ValueError('child')"]
    assert log == ["sibling cancelled"]


async def test_a_group_may_be_caught_and_a_resume_looks_at_its_leaves(system: ActorSystem) -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def caught() -> list[str]:
        seen = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, ValueError("one"))
                nursery.start_soon(fails, KeyError("two"))
        except* ValueError as group:
            seen += [repr(error) for error in group.exceptions]
        except* KeyError as group:
            seen += [repr(error) for error in group.exceptions]
        return seen

    assert await both_ways(system, caught) == ["ValueError('one')", "KeyError('two')"]

    async def fail_with(errors: tuple[Exception, ...], _: Any) -> None:
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(fails, error)

    ref = system.spawn(Runner, supervise=restart(resume=[ValueError]))
    cases: list[tuple[tuple[Exception, ...], int]] = [
        ((ValueError(), ValueError()), 0),
        ((ValueError(), KeyError()), 1),
    ]
    for errors, restarts in cases:
        with pytest.raises(ActorStopped):
            await ref.ask(Run(functools.partial(fail_with, errors)))
        await wait_all_tasks_blocked()
        assert system.statistics().restarts == restarts


async def test_a_kill_reaches_the_tasks_of_an_inner_nursery(system: ActorSystem) -> None:
    log: list[str] = []

    async def waits(name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append(name)

    async def body(_: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, "child")
            await waits("handler")

    ref = system.spawn(Runner)
    ref.tell(Run(body))
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    assert sorted(log) == ["child", "handler"]


# ---------------------------------------------------------------- threads, sockets, pipes


async def test_to_thread_and_back(system: ActorSystem) -> None:
    async def back(n: int) -> int:
        await trio.lowlevel.checkpoint()
        return n + 1

    async def body() -> int:
        def work(n: int) -> int:
            return trio.from_thread.run(back, n) + trio.from_thread.run_sync(lambda: 10)

        return await trio.to_thread.run_sync(work, 1)

    assert await both_ways(system, body) == 12


async def test_sockets_streams_and_pipes(system: ActorSystem) -> None:
    async def sockets() -> bytes:
        one, two = trio.socket.socketpair()
        with one, two:
            left, right = trio.SocketStream(one), trio.SocketStream(two)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(left.send_all, b"over the wire")
                received = await right.receive_some(100)
        return bytes(received)

    async def pipes() -> bytes:
        read, write = os.pipe()
        async with trio.lowlevel.FdStream(read) as source, trio.lowlevel.FdStream(write) as sink:
            await sink.send_all(b"through the pipe")
            return bytes(await source.receive_some(100))

    assert await both_ways(system, sockets) == b"over the wire"
    if hasattr(trio.lowlevel, "FdStream"):
        assert await both_ways(system, pipes) == b"through the pipe"


async def test_memory_channels_between_handlers(system: ActorSystem) -> None:
    send, receive = trio.open_memory_channel[int](0)
    got: list[int] = []

    async def writes(_: Any) -> None:
        async with send:
            for n in range(5):
                await send.send(n)

    async def reads(_: Any) -> None:
        async for n in receive:
            got.append(n)

    writer, reader = system.spawn(Runner), system.spawn(Runner)
    reader.tell(Run(reads))
    writer.tell(Run(writes))
    await reader.ask(Run(rest))
    assert got == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- task-bound things


async def test_one_handler_is_one_task_with_its_locks_and_tokens(system: ActorSystem) -> None:
    lock, semaphore, limiter = trio.Lock(), trio.Semaphore(1), trio.CapacityLimiter(1)

    async def body() -> str:
        task = trio.lowlevel.current_task()
        async with lock, semaphore, limiter:
            await trio.lowlevel.checkpoint()
            assert trio.lowlevel.current_task() is task
            assert lock.statistics().owner is task
        return "released"

    assert await both_ways(system, body) == "released"
    assert not lock.locked()
    assert limiter.borrowed_tokens == 0


async def test_current_library_is_trio(system: ActorSystem) -> None:
    async def body() -> str:
        before = sniffio.current_async_library()
        await trio.lowlevel.checkpoint()
        return before + sniffio.current_async_library()

    assert await both_ways(system, body) == "triotrio"


async def test_async_generators_and_comprehensions(system: ActorSystem) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in range(4):
            await trio.lowlevel.checkpoint()
            yield n

    async def body() -> list[int]:
        return [n async for n in numbers()]

    assert await both_ways(system, body) == [0, 1, 2, 3]


async def test_low_level_traps(system: ActorSystem) -> None:
    async def body() -> str:
        task = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()
        token.run_sync_soon(trio.lowlevel.reschedule, task)
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        await trio.lowlevel.cancel_shielded_checkpoint()
        await trio.lowlevel.checkpoint_if_cancelled()
        return "woken"

    assert await both_ways(system, body) == "woken"


VAR: contextvars.ContextVar[int] = contextvars.ContextVar("VAR", default=0)


async def test_a_context_variable_lasts_over_waits_and_reaches_children_and_threads(system: ActorSystem) -> None:
    async def body(_: Any) -> list[int]:
        seen: list[int] = []

        async def child() -> None:
            seen.append(VAR.get())
            VAR.set(99)

        VAR.set(5)
        await trio.lowlevel.checkpoint()
        seen.append(VAR.get())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        seen.append(await trio.to_thread.run_sync(VAR.get))
        return seen

    assert await system.spawn(Runner).ask(Run(body)) == [5, 5, 5]
    assert VAR.get() == 0


async def test_an_actor_may_catch_what_its_own_asks_raise(system: ActorSystem) -> None:
    async def fails(_: Any) -> None:
        raise ValueError("inner")

    inner = system.spawn(Runner, name="inner")

    async def body() -> str:
        try:
            await inner.ask(Run(fails))
        except ActorStopped as error:
            return type(error).__name__
        return "no error"

    assert await both_ways(system, body) == "ActorStopped"


# ---------------------------------------------------------------- enter, and cancellation in it


class Context:
    """Notes what happens to it; can be told to wait on the way in."""

    def __init__(self, log: list[str], *, waits: bool = False, fails: bool = False) -> None:
        self.log = log
        self.waits = waits
        self.fails = fails

    async def __aenter__(self) -> str:
        self.log.append("entering")
        if self.waits:
            try:
                await trio.sleep_forever()
            finally:
                self.log.append("gave up")
        if self.fails:
            raise ValueError("cannot enter")
        return "value"

    async def __aexit__(self, *_: object) -> None:
        self.log.append("left")
        await trio.lowlevel.checkpoint()


async def test_enter_gives_the_value_and_the_context_lives_on_over_messages(system: ActorSystem) -> None:
    log: list[str] = []
    ref = system.spawn(Runner)
    assert await ref.ask(Run(lambda actor: actor.enter(Context(log)))) == "value"
    await ref.ask(Run(rest))
    assert log == ["entering"]
    ref.stop()
    await ref.terminated()
    assert log == ["entering", "left"]


async def test_enter_cancelled_on_the_way_in_leaves_nothing_behind(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: list[str] = []

    async def body(actor: Actor[Any]) -> str:
        with trio.move_on_after(1):
            await actor.enter(Context(log, waits=True))
        return ",".join(log)

    ref = system.spawn(Runner)
    assert await ref.ask(Run(body)) == "entering,gave up"
    ref.stop()
    await ref.terminated()
    assert log == ["entering", "gave up"]


async def test_enter_under_a_cancelled_scope_leaves_the_context_again(system: ActorSystem) -> None:
    log: list[str] = []

    async def body(actor: Actor[Any]) -> str:
        with trio.CancelScope() as scope:
            scope.cancel()
            await actor.enter(Context(log))
        return str(scope.cancelled_caught)

    ref = system.spawn(Runner)
    assert await ref.ask(Run(body)) == "True"
    assert log in ([], ["entering", "left"])
    ref.stop()
    await ref.terminated()
    assert log in ([], ["entering", "left"])


async def test_enter_killed_on_the_way_in(system: ActorSystem) -> None:
    log: list[str] = []
    ref = system.spawn(Runner)
    ref.tell(Run(lambda actor: actor.enter(Context(log, waits=True))))
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    assert log == ["entering", "gave up"]


async def test_a_context_that_cannot_be_entered_raises_in_the_handler(system: ActorSystem) -> None:
    log: list[str] = []

    async def body(actor: Actor[Any]) -> str:
        with pytest.raises(ValueError, match="cannot enter"):
            await actor.enter(Context(log, fails=True))
        return "caught"

    ref = system.spawn(Runner)
    assert await ref.ask(Run(body)) == "caught"
    assert ref.is_alive
    ref.stop()
    await ref.terminated()
    assert log == ["entering"]


async def test_contexts_are_left_last_entered_first_after_the_tasks(system: ActorSystem) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def named(name: str) -> AsyncIterator[None]:
        yield
        log.append(name)

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("task")

    async def body(actor: Actor[Any]) -> None:
        await actor.enter(named("first"))
        await actor.enter(named("second"))
        actor.start_soon(task)

    ref = system.spawn(Runner)
    await ref.ask(Run(body))
    await wait_all_tasks_blocked()
    ref.stop()
    await ref.terminated()
    assert log == ["task", "second", "first"]
