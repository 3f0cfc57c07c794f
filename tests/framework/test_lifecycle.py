"""Hooks, reasons of ending, and what happens when two of them coincide."""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorSystem,
    Asks,
    Cancelled,
    DeadLetter,
    Failed,
    Killed,
    Lost,
    Normal,
    Reason,
    Ref,
    Shutdown,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError
from levada.framework.links import more_severe

Log = list[Any]

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


@message
class Note:
    text: str


@message
class Fail:
    text: str = "boom"


@message
class Sleep:
    seconds: float


@message
class Paint:
    color: str


@message
class Call:
    function: Callable[[Any], Any]


@message
class Ping(Asks[str]):
    pass


class Plain(Actor[Note | Fail | Sleep | Paint | Call | Ping]):
    """Without hooks."""

    log: Log

    @handles
    def note(self, m: Note) -> None:
        self.log.append(m.text)

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError(m.text)

    @handles
    async def sleep(self, m: Sleep) -> None:
        try:
            await trio.sleep(m.seconds)
        except trio.Cancelled:
            self.log.append("cancelled")
            raise

    @handles
    def paint(self, m: Paint) -> None:
        color.set(m.color)

    @handles
    def call(self, m: Call) -> Any:
        return m.function(self)

    @handles
    def ping(self, m: Ping) -> str:
        return "pong"


class SyncHooks(Plain):
    def started(self) -> None:
        self.log.append("started")

    def stopping(self, reason: Reason) -> None:
        self.log.append(("stopping", reason, color.get()))

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append(("restarting", str(error), message, color.get()))

    def undelivered(self, messages: list[Any]) -> None:
        self.log.append(("undelivered", messages, color.get()))


class AsyncHooks(Plain):
    async def started(self) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append("started")

    async def stopping(self, reason: Reason) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(("stopping", reason, color.get()))

    async def restarting(self, error: BaseException | None, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(("restarting", str(error), message, color.get()))

    def undelivered(self, messages: list[Any]) -> None:
        self.log.append(("undelivered", messages, color.get()))


class AwaitableHooks(Plain):
    """Plain functions that return something to await."""

    def started(self) -> Awaitable[None]:
        return self._later("started")

    def stopping(self, reason: Reason) -> Awaitable[None]:
        return self._later(("stopping", reason, color.get()))

    def restarting(self, error: BaseException | None, message: Any) -> Awaitable[None]:
        return self._later(("restarting", str(error), message, color.get()))

    def undelivered(self, messages: list[Any]) -> None:
        self.log.append(("undelivered", messages, color.get()))

    async def _later(self, entry: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(entry)


HOOKED = pytest.mark.parametrize("kind", [SyncHooks, AsyncHooks, AwaitableHooks])


def call(function: Callable[[Any], Any]) -> Call:
    return Call(function)


# ---------------------------------------------------------------- hooks


@HOOKED
async def test_started_runs_before_the_first_message(system: ActorSystem, kind: type[Plain]) -> None:
    log: Log = []
    ref = system.spawn(kind, log)
    ref.tell(Note("first"))
    assert await ref.ask(Ping()) == "pong"
    assert log == ["started", "first"]


@HOOKED
async def test_stopping_gets_the_reason_after_what_was_queued(system: ActorSystem, kind: type[Plain]) -> None:
    log: Log = []
    ref = system.spawn(kind, log)
    ref.tell(Note("queued"))
    ref.stop()
    ref.tell(Note("too late"))
    assert await ref.terminated() == Shutdown()
    assert log == ["started", "queued", ("stopping", Shutdown(), "none"), ("undelivered", [Note("too late")], "none")]


@HOOKED
async def test_stop_now_hands_back_what_was_queued(system: ActorSystem, kind: type[Plain]) -> None:
    log: Log = []
    ref = system.spawn(kind, log)
    await wait_all_tasks_blocked()
    ref.tell(Note("a"))
    ref.tell(Note("b"))
    ref.stop(now=True)
    assert await ref.terminated() == Shutdown()
    assert log == ["started", ("stopping", Shutdown(), "none"), ("undelivered", [Note("a"), Note("b")], "none")]


@HOOKED
async def test_released_by_its_parent_an_idle_actor_ends_here_and_now(system: ActorSystem, kind: type[Plain]) -> None:
    """Without its hook, as there is nothing to do for it; one that has something to do ends as one that is stopped."""
    log: Log = []
    idle: Any = system.spawn(kind, log)
    await wait_all_tasks_blocked()
    system.lifecycle.release(idle, Normal())
    assert not idle.is_alive
    assert await idle.terminated() == Normal()
    assert log == ["started"]
    log.clear()
    busy: Any = system.spawn(kind, log)
    await wait_all_tasks_blocked()
    busy.tell(Note("a"))
    system.lifecycle.release(busy, Normal())
    assert await busy.terminated() == Normal()
    assert log == ["started", ("stopping", Normal(), "none"), ("undelivered", [Note("a")], "none")]


async def test_released_by_its_parent_an_idle_actor_that_owns_something_ends_as_if_stopped(system: ActorSystem) -> None:
    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("task")

    owns: list[tuple[Callable[[Any], Any], Log]] = [
        (lambda actor: actor.spawn(NamedHooks, log, "child"), [("child", Shutdown()), ("owner", Normal())]),
        (lambda actor: actor.start_soon(task), [("owner", Normal()), "task"]),
    ]
    for own, end in owns:
        log: Log = []
        ref: Any = system.spawn(NamedHooks, log, "owner")
        ref.tell(call(own))
        await wait_all_tasks_blocked()
        system.lifecycle.release(ref, Normal())
        assert ref.is_alive
        assert await ref.terminated() == Normal()
        assert log == end


async def test_released_by_its_parent_an_idle_actor_starts_again_if_its_policy_says_so(system: ActorSystem) -> None:
    log: Log = []
    ref: Any = system.spawn(SyncHooks, log, supervise=restart("permanent"))
    await wait_all_tasks_blocked()
    system.lifecycle.release(ref, Normal())
    await wait_all_tasks_blocked()
    assert log == ["started", ("restarting", "None", None, "none"), "started"]


async def test_released_by_its_parent_an_idle_actor_that_is_watched_ends_here_and_now(system: ActorSystem) -> None:
    reasons: list[Reason] = []
    ref: Any = system.spawn(Plain, [])
    ref.add_watcher("me", reasons.append)
    for _ in range(3):
        await ref.ask(Ping())
    system.lifecycle.release(ref, Normal())
    assert not ref.is_alive
    assert reasons == [Normal()]
    assert system.observe.handled == {Plain: 3}


@HOOKED
async def test_restarting_gets_the_error_and_the_message_and_replaces_stopping(
    system: ActorSystem, kind: type[Plain]
) -> None:
    log: Log = []
    ref = system.spawn(kind, log, supervise=restart())
    ref.tell(Fail())
    ref.tell(Note("after"))
    assert await ref.ask(Ping()) == "pong"
    assert log == ["started", ("restarting", "boom", Fail(), "none"), "started", "after"]


@HOOKED
async def test_a_failure_gives_stopping_the_error(system: ActorSystem, kind: type[Plain]) -> None:
    log: Log = []
    ref = system.spawn(kind, log)
    ref.tell(Fail())
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert str(reason.error) == "boom"
    assert log == ["started", ("stopping", reason, "none")]


@HOOKED
async def test_hooks_see_the_context_variables_of_their_actor_and_of_no_other(
    system: ActorSystem, kind: type[Plain]
) -> None:
    log: Log = []
    other: Log = []
    ref = system.spawn(kind, log, supervise=restart())
    ref.tell(Paint("red"))
    ref.tell(Fail())
    second = system.spawn(kind, other)
    ref.stop()
    ref.tell(Note("left"))
    second.stop()
    await ref.terminated()
    await second.terminated()
    assert log == [
        "started",
        ("restarting", "boom", Fail(), "red"),
        "started",
        ("stopping", Shutdown(), "red"),
        ("undelivered", [Note("left")], "red"),
    ]
    assert other == ["started", ("stopping", Shutdown(), "none")]
    assert color.get() == "none"


class PaintingHooks(Plain):
    def started(self) -> None:
        self.log.append(color.get())
        color.set("started")

    def stopping(self, reason: Reason) -> None:
        self.log.append(color.get())
        color.set("stopping")

    def undelivered(self, messages: list[Any]) -> None:
        self.log.append(color.get())
        color.set("undelivered")


async def test_what_a_hook_sets_stays_with_its_actor(system: ActorSystem) -> None:
    logs: list[Log] = [[], [], []]
    refs = [system.spawn(PaintingHooks, log) for log in logs]
    await wait_all_tasks_blocked()
    for ref in refs:
        ref.stop()
        ref.tell(Note("left"))
    for ref in refs:
        await ref.terminated()
    log: Log = []
    after = system.spawn(SyncHooks, log)
    after.stop()
    await after.terminated()
    assert logs == [["none", "started", "stopping"]] * 3
    assert log == ["started", ("stopping", Shutdown(), "none")]
    assert color.get() == "none"


class OnlyUndelivered(Plain):
    def undelivered(self, messages: list[Any]) -> None:
        self.log.append((messages, color.get()))
        color.set("leak")


async def test_undelivered_alone_sees_its_context_too(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(OnlyUndelivered, log)
    ref.tell(Paint("blue"))
    ref.tell(Fail())
    ref.tell(Note("left"))
    await ref.terminated()
    assert log == [([Note("left")], "blue")]
    probe = system.spawn(Plain, [])
    seen: Log = []
    probe.tell(call(lambda actor: seen.append(color.get())))
    await probe.ask(Ping())
    assert seen == ["none"]


async def test_without_undelivered_the_rest_are_dead_letters(system: ActorSystem) -> None:
    letters: Log = []

    async def collect(letter: DeadLetter) -> None:
        letters.append((letter.message, letter.why))

    system.events.subscribe(DeadLetter, system.spawn(collect))
    ref = system.spawn(Plain, [])
    ref.tell(Fail())
    ref.tell(Note("a"))
    ref.tell(Note("b"))
    await ref.terminated()
    ref.tell(Note("c"))
    await wait_all_tasks_blocked()
    assert letters == [(Note("a"), "stopped"), (Note("b"), "stopped"), (Note("c"), "stopped")]
    assert system.statistics().dead_letters == 3


async def test_undelivered_does_not_get_asks_and_entries_of_the_runtime(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(OnlyUndelivered, log)
    async with trio.open_nursery() as nursery:
        ref.tell(Sleep(1000))
        await wait_all_tasks_blocked()
        ref.tell(Note("a"))

        async def ask() -> None:
            with pytest.raises(ActorStopped) as caught:
                await ref.ask(Ping())
            assert caught.value.reason == Killed()
            assert caught.value.message == Ping()

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        ref.stop()
        ref.tell(Note("b"))
        ref.kill()
    assert log == ["cancelled", ([Note("a"), Note("b")], "none")]


def test_undelivered_cannot_be_async() -> None:
    with pytest.raises(ConfigurationError, match="undelivered must not be async"):

        class Late(Actor[Any]):
            async def undelivered(self, messages: list[Any]) -> None: ...  # type: ignore[override]


# ---------------------------------------------------------------- hooks that fail


class BadHooks(Plain):
    bad: str = ""

    def started(self) -> None:
        self._hook("started")

    def stopping(self, reason: Reason) -> None:
        self._hook("stopping")

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self._hook("restarting")

    def undelivered(self, messages: list[Any]) -> None:
        self._hook("undelivered")

    def _hook(self, name: str) -> None:
        self.log.append(name)
        if name == self.bad:
            raise RuntimeError(f"bad {name}")


class BadAsyncHooks(BadHooks):
    async def started(self) -> None:  # type: ignore[override]
        await trio.lowlevel.checkpoint()
        self._hook("started")

    async def stopping(self, reason: Reason) -> None:  # type: ignore[override]
        await trio.lowlevel.checkpoint()
        self._hook("stopping")

    async def restarting(self, error: BaseException | None, message: Any) -> None:  # type: ignore[override]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.checkpoint)
        self._hook("restarting")


BAD = pytest.mark.parametrize("kind", [BadHooks, BadAsyncHooks])


@BAD
async def test_a_failing_started_is_a_failure_of_the_actor(system: ActorSystem, kind: type[BadHooks]) -> None:
    log: Log = []
    failures: Log = []

    async def collect(event: ActorFailed) -> None:
        failures.append((event.ref, str(event.error), event.message))

    system.events.subscribe(ActorFailed, system.spawn(collect))
    ref = system.spawn(kind, log, "started")
    ref.tell(Note("never"))
    reason = await ref.terminated()
    await wait_all_tasks_blocked()
    assert isinstance(reason, Failed)
    assert str(reason.error) == "bad started"
    assert log == ["started", "stopping", "undelivered"]
    assert failures == [(ref, "bad started", None)]


@BAD
async def test_a_failing_stopping_is_the_weightier_reason(system: ActorSystem, kind: type[BadHooks]) -> None:
    log: Log = []
    ref = system.spawn(kind, log, "stopping")
    ref.stop()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert str(reason.error) == "bad stopping"
    assert log == ["started", "stopping"]


@BAD
async def test_a_failing_restarting_does_not_keep_the_actor_from_its_new_start(
    system: ActorSystem, kind: type[BadHooks]
) -> None:
    log: Log = []
    ref = system.spawn(kind, log, "restarting", supervise=restart())
    ref.tell(Fail())
    assert await ref.ask(Ping()) == "pong"
    assert log == ["started", "restarting", "started"]
    assert system.statistics().failures == 2


async def test_a_failing_undelivered_changes_nothing_but_the_log(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    ref = system.spawn(BadHooks, log, "undelivered")
    ref.stop()
    ref.tell(Note("left"))
    assert await ref.terminated() == Shutdown()
    assert log == ["started", "stopping", "undelivered"]
    assert [record.getMessage() for record in caplog.records] == [f"{ref.path} failed"]


# ---------------------------------------------------------------- deadlines of hooks


class SlowHooks(Plain):
    seconds: float = 100.0
    steps: int = 1

    async def stopping(self, reason: Reason) -> None:
        for _ in range(self.steps):
            try:
                await trio.sleep(self.seconds)
            except trio.Cancelled:
                self.log.append("hook cancelled")
                raise
        self.log.append("stopped")

    async def restarting(self, error: BaseException | None, message: Any) -> None:
        await trio.sleep(self.seconds)


async def test_a_stopping_hook_may_wait_until_its_deadline(autojump_clock: MockClock) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=3.0, shutdown_timeout=50.0) as system:
        ref = system.spawn(SlowHooks, log, 2.5)
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() == pytest.approx(2.5)
    assert log == ["stopped"]


async def test_a_stopping_hook_is_cancelled_at_its_deadline(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=3.0, shutdown_timeout=50.0) as system:
        ref = system.spawn(SlowHooks, log, name="slow")
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() == pytest.approx(3.0)
    assert log == ["hook cancelled"]
    assert "a hook of /slow took longer than 3 s: cancelled" in caplog.text


async def test_a_restarting_hook_is_cancelled_at_its_deadline(autojump_clock: MockClock) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=3.0) as system:
        ref = system.spawn(SlowHooks, log, supervise=restart())
        ref.tell(Fail())
        assert await ref.ask(Ping()) == "pong"
        assert trio.current_time() == pytest.approx(3.0)
        ref.tell(call(lambda actor: setattr(actor, "seconds", 0.0)))
    assert log == ["stopped"]


class NurseryHook(Plain):
    """What it waits in is a nursery: its cancellation may come as a group."""

    async def stopping(self, reason: Reason) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)


async def test_the_deadline_of_a_hook_that_waits_in_a_nursery_is_no_failure(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=3.0) as system:
        ref = system.spawn(NurseryHook, [])
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() == pytest.approx(3.0)
        assert system.statistics().failures == 0


async def test_a_stopping_hook_waits_while_everything_around_is_cancelled(autojump_clock: MockClock) -> None:
    log: Log = []
    with trio.CancelScope() as around:
        async with ActorSystem(stop_timeout=3.0) as system:
            system.spawn(SlowHooks, log, 2.0)
            await wait_all_tasks_blocked()
            around.cancel()
    assert around.cancelled_caught
    assert log == ["stopped"]
    assert trio.current_time() == pytest.approx(2.0)


class InContext(Plain):
    """Has a context that takes its time."""

    async def started(self) -> None:
        await self.enter(self.slow())

    @asynccontextmanager
    async def slow(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await trio.sleep(20.0)


async def test_a_kill_ends_the_contexts_that_an_end_waits_for(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=30.0) as system:
        ref = system.spawn(InContext, [])
        ref.stop()
        await trio.sleep(2.0)
        assert ref.is_alive
        ref.kill()
        await ref.terminated()
        assert trio.current_time() == pytest.approx(2.0)


async def test_a_second_stop_does_not_hurry_the_contexts_of_an_actor(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=30.0) as system:
        ref = system.spawn(InContext, [])
        ref.stop()
        await trio.sleep(2.0)
        ref.stop(now=True)
        await ref.terminated()
        assert trio.current_time() == pytest.approx(20.0)


class Waits(Plain):
    """The parent of one whose handler does not end by itself."""

    def started(self) -> None:
        self.spawn(Plain, self.log, name="late").tell(Sleep(1e6))


async def test_a_child_has_one_deadline_however_often_its_parent_is_stopped(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=3.0, shutdown_timeout=50.0) as system:
        ref = system.spawn(Waits, log, name="parent")
        await wait_all_tasks_blocked()
        for _ in range(4):
            ref.stop(now=True)
            await trio.sleep(1.0)
        assert not ref.is_alive
        assert await ref.terminated() == Shutdown()
    assert log == ["cancelled"]
    assert caplog.messages == ["/parent/late did not stop in 3 s: killed"]


class Parent(SyncHooks):
    child: Any = None

    def started(self) -> None:
        super().started()
        self.child = self.spawn(functools.partial(NamedHooks, self.log, "child"), name="child")
        self.spawn(functools.partial(NamedHooks, self.log, "second"), name="second")


class NamedHooks(Plain):
    called: str = ""

    def stopping(self, reason: Reason) -> None:
        self.log.append((self.called, reason))


class Spawner(Plain):
    def stopping(self, reason: Reason) -> None:
        try:
            self.spawn(Plain, self.log)
        except ActorStopped as error:
            self.log.append(error.reason)


async def test_stopping_cannot_spawn(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Spawner, log)
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert log == [Shutdown()]


async def test_children_have_ended_when_stopping_runs(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Parent, log)
    ref.stop()
    await ref.terminated()
    assert log == ["started", ("second", Shutdown()), ("child", Shutdown()), ("stopping", Shutdown(), "none")]


async def test_children_of_a_killed_actor_are_killed(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Parent, log)
    await wait_all_tasks_blocked()
    ref.kill()
    await ref.terminated()
    assert log == ["started", ("second", Killed()), ("child", Killed()), ("stopping", Killed(), "none")]


# ---------------------------------------------------------------- reasons


async def test_normal_is_an_actor_that_stops_itself(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(SyncHooks, log)
    ref.tell(call(lambda actor: actor.stop()))
    ref.tell(Note("left"))
    assert await ref.terminated() == Normal()
    assert log == ["started", ("stopping", Normal(), "none"), ("undelivered", [Note("left")], "none")]


class Loop(Actor[Note]):
    log: Log

    async def run(self) -> None:
        async for m in self.mailbox:
            self.log.append(m.text)
            if m.text == "return":
                return
            if m.text == "raise":
                raise ValueError(m.text)


async def test_a_loop_that_returns_ends_as_normal(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Loop, log)
    ref.tell(Note("return"))
    assert await ref.terminated() == Normal()


async def test_a_loop_that_was_asked_to_stop_ends_as_shutdown(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(Loop, log)
    ref.tell(Note("a"))
    ref.stop()
    assert await ref.terminated() == Shutdown()
    assert log == ["a"]


async def test_a_loop_that_raises_has_failed(system: ActorSystem) -> None:
    ref = system.spawn(Loop, [])
    ref.tell(Note("raise"))
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert str(reason.error) == "raise"


async def test_killed_is_a_handler_that_was_cancelled(system: ActorSystem) -> None:
    log: Log = []
    ref = system.spawn(SyncHooks, log)
    ref.tell(Sleep(1e6))
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    assert log == ["started", "cancelled", ("stopping", Killed(), "none")]


async def test_stop_now_waits_for_the_running_handler(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(SyncHooks, log)
    ref.tell(Sleep(2.0))
    ref.tell(Note("left"))
    await wait_all_tasks_blocked()
    ref.stop(now=True)
    assert await ref.terminated() == Shutdown()
    assert trio.current_time() == pytest.approx(2.0)
    assert log == ["started", ("stopping", Shutdown(), "none"), ("undelivered", [Note("left")], "none")]


async def test_cancelled_is_the_scope_around_the_system() -> None:
    log: Log = []
    refs: list[Ref[Any]] = []
    system = ActorSystem()
    with trio.CancelScope() as around:
        async with system:
            parent = system.spawn(Parent, log)
            waiting = system.spawn(SyncHooks, log)
            refs += parent, waiting
            waiting.tell(Sleep(1e6))
            await wait_all_tasks_blocked()
            log.clear()
            around.cancel()
    parent, waiting = refs
    assert await parent.terminated() == Cancelled()
    assert await waiting.terminated() == Cancelled()
    assert log.count(("stopping", Cancelled(), "none")) == 2
    assert {("second", Cancelled()), ("child", Cancelled()), "cancelled"} < set(log)
    assert len(log) == 5


async def test_an_actor_that_is_cancelled_with_its_system_does_not_restart() -> None:
    log: Log = []
    with trio.CancelScope() as scope:
        async with ActorSystem() as system:
            ref: Ref[Any] = system.spawn(SyncHooks, log, supervise=restart("permanent"))
            ref.tell(Sleep(1000.0))
            await wait_all_tasks_blocked()
            scope.cancel()
    assert log == ["started", "cancelled", ("stopping", Cancelled(), "none")]


async def test_lost_comes_from_whoever_knows_of_the_connection(system: ActorSystem) -> None:
    ref = system.spawn(Plain, [])
    system.lifecycle.request(ref, Lost("peer:1"), cancel=True)  # type: ignore[arg-type]
    assert await ref.terminated() == Lost("peer:1")


# ---------------------------------------------------------------- two reasons

ERROR = Failed(ValueError())
ORDER: list[tuple[Reason, int]] = [
    (Normal(), 0),
    (Lost("peer"), 1),
    (Shutdown(), 2),
    (Killed(), 2),
    (Cancelled(), 2),
    (ERROR, 3),
]


@pytest.mark.parametrize(("first", "rank"), ORDER, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("second", "other"), ORDER, ids=lambda value: type(value).__name__)
def test_the_weightier_reason_stands_and_of_equals_the_earlier(
    first: Reason, rank: int, second: Reason, other: int
) -> None:
    assert more_severe(first, second) is (second if other > rank else first)


async def test_an_error_in_the_clean_up_of_a_killed_handler_is_the_reason(system: ActorSystem) -> None:
    class Untidy(Actor[Sleep]):
        @handles
        async def sleep(self, m: Sleep) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("clean-up")

    ref = system.spawn(Untidy)
    ref.tell(Sleep(0))
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, KeyError)


async def test_a_group_of_cancellation_and_error_is_the_error(system: ActorSystem) -> None:
    class Grouped(Actor[Sleep]):
        @handles
        async def sleep(self, m: Sleep) -> None:
            async def untidy() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise KeyError("clean-up")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(untidy)
                nursery.start_soon(trio.sleep_forever)

    ref = system.spawn(Grouped)
    ref.tell(Sleep(0))
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, BaseExceptionGroup)
    assert [type(error) for error in reason.error.exceptions] == [KeyError]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (["stop", "kill"], Shutdown()),
        (["kill", "stop"], Killed()),
        (["lost", "stop"], Shutdown()),
        (["lost", "kill"], Killed()),
        (["stop", "lost"], Shutdown()),
        (["normal", "lost"], Lost("peer")),
        (["normal", "kill"], Killed()),
    ],
    ids=str,
)
async def test_requests_that_coincide_are_weighed(
    system: ActorSystem, autojump_clock: MockClock, requests: list[str], expected: Reason
) -> None:
    ref = system.spawn(Plain, [])
    ref.tell(Sleep(1.0))
    await wait_all_tasks_blocked()
    reasons: dict[str, Reason] = {
        "stop": Shutdown(),
        "kill": Killed(),
        "lost": Lost("peer"),
        "normal": Normal(),
    }
    for request in requests:
        system.lifecycle.request(ref, reasons[request], cancel=request == "kill")  # type: ignore[arg-type]
    assert await ref.terminated() == expected


@pytest.mark.parametrize("by", ["tell", "ask"])
async def test_a_handler_that_stops_its_actor_and_raises_has_failed(system: ActorSystem, by: str) -> None:
    def stop_and_raise(actor: Plain) -> None:
        actor.stop()
        raise ValueError("both")

    @message
    class Both(Asks[None]):
        pass

    class Worker(Actor[Both]):
        @handles
        def both(self, m: Both) -> None:
            stop_and_raise(self)  # type: ignore[arg-type]

    ref = system.spawn(Worker)
    if by == "tell":
        ref.tell(Both())
    else:
        with pytest.raises(ActorStopped):
            await ref.ask(Both())
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert str(reason.error) == "both"


async def test_an_ask_that_fails_its_actor_names_the_cause(system: ActorSystem) -> None:
    @message
    class Break(Asks[None]):
        pass

    class Worker(Actor[Break]):
        @handles
        def on_break(self, m: Break) -> None:
            raise LookupError("why")

    ref = system.spawn(Worker)
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Break())
    assert isinstance(caught.value.__cause__, LookupError)
    assert isinstance(caught.value.reason, Failed)
    assert caught.value.message == Break()


# ---------------------------------------------------------------- which message failed


class Recorder(Actor[Note | Ping | Fail]):
    log: Log

    def started(self) -> None:
        self.timers.every("never", 1e6, Fail())

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append(message)

    @handles
    async def note(self, m: Note) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError

    @handles
    def ping(self, m: Ping) -> str:
        raise ValueError

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError


@pytest.mark.parametrize(
    "mailbox",
    [None, bounded(8), bounded(8, overflow="drop_old"), bounded(8, overflow=conflate(repr))],
    ids=["unbounded", "bounded", "drop_old", "conflate"],
)
async def test_restarting_is_told_the_message_itself_whatever_the_mailbox(system: ActorSystem, mailbox: Any) -> None:
    log: Log = []
    ref = system.spawn(Recorder, log, mailbox=mailbox, supervise=restart(max=10))
    ref.tell(Note("async"))
    ref.tell(Fail())
    with pytest.raises(ActorStopped):
        await ref.ask(Ping())
    await wait_all_tasks_blocked()
    with pytest.raises(ActorStopped):
        await ref.ask(Ping())  # idle: answered in this task
    await wait_all_tasks_blocked()
    assert log == [Note("async"), Fail(), Ping(), Ping()]


async def test_restarting_is_told_the_message_of_a_timer(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Clock(Recorder):
        def started(self) -> None:
            self.timers.once("tick", 1.0, Fail("timer"))

    log: Log = []
    ref = system.spawn(Clock, log, supervise=restart())
    await trio.sleep(1.5)
    assert log == [Fail("timer")]
    assert ref.is_alive


async def test_a_sync_handler_that_returned_a_coroutine_and_was_killed_before_it_ran(system: ActorSystem) -> None:
    @message
    class Ask(Asks[int]):
        pass

    class Lazy(Actor[Ask]):
        @handles
        def on_ask(self, m: Ask) -> Any:
            self.ref.kill()
            return self._answer()

        async def _answer(self) -> int:
            return 1

    ref = system.spawn(Lazy)
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Ask())
    assert caught.value.reason == Killed()
    assert system.statistics().dead_letters == 0


# ---------------------------------------------------------------- being nobody yet, or no longer


async def test_what_needs_the_runtime_fails_before_spawn() -> None:
    loner = Plain([])
    uses: list[Callable[[], object]] = [
        lambda: loner.ref,
        lambda: loner.system,
        lambda: loner.timers,
        lambda: loner.spawn(Plain, []),
        loner.stop,
    ]
    for use in uses:
        with pytest.raises(ActorError, match="was not spawned"):
            use()


async def test_terminated_of_the_dead_is_at_once_and_a_checkpoint(system: ActorSystem) -> None:
    ref = system.spawn(Plain, [])
    ref.kill()
    await ref.terminated()
    with trio.testing.assert_checkpoints():
        assert await ref.terminated() == Killed()


async def test_stop_and_kill_of_the_dead_are_harmless(system: ActorSystem) -> None:
    ref = system.spawn(Plain, [])
    ref.stop()
    assert await ref.terminated() == Shutdown()
    ref.stop()
    ref.stop(now=True)
    ref.kill()
    await wait_all_tasks_blocked()
    assert await ref.terminated() == Shutdown()
    assert not ref.is_alive


async def test_many_wait_for_the_same_end(system: ActorSystem) -> None:
    ref: Ref[Any] = system.spawn(Plain, [])
    reasons: list[Reason] = []

    async def wait() -> None:
        reasons.append(await ref.terminated())

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(wait)
        with trio.move_on_after(0):
            await ref.terminated()
        await wait_all_tasks_blocked()
        ref.stop()
    assert reasons == [Shutdown()] * 5


async def test_a_failure_is_logged_once_with_the_path_and_the_message(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Plain, [], name="worker")
    ref.tell(Fail())
    await ref.terminated()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "/worker failed while it handled Fail"
    assert record.name == "levada.framework.lifecycle"
    assert record.__dict__["actor"] == "/worker"
