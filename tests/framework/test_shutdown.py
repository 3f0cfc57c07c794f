"""The end of a system: phases, deadlines, errors, cancellation, Ctrl-C; and that nothing outlives the block."""

from __future__ import annotations

import functools
import gc
import logging
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    PHASES,
    Actor,
    ActorSystem,
    Asks,
    Cancelled,
    Failed,
    Killed,
    Reason,
    Ref,
    Shutdown,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped, ConfigurationError

Log = list[Any]


@message
class Do(Asks[Any]):
    """Call a function, sync or async, with the actor."""

    function: Callable[[Any], Any]


@message
class Note:
    text: str


class Worker(Actor[Do | Note]):
    log: Log
    called: str = ""

    def stopping(self, reason: Reason) -> None:
        self.log.append((self.called, reason))

    @handles
    async def do(self, m: Do) -> Any:
        result = m.function(self)
        return await result if hasattr(result, "__await__") else result

    @handles
    def note(self, m: Note) -> None:
        self.log.append(m.text)


async def forever(_: Any = None) -> None:
    await trio.sleep_forever()


def tasks() -> int:
    """Tasks of this run of trio."""
    return trio.lowlevel.current_statistics().tasks_living


# ---------------------------------------------------------------- in order


async def test_leaving_the_block_lets_actors_finish_what_is_queued() -> None:
    log: Log = []
    async with ActorSystem() as system:
        ref = system.spawn(Worker, log, "w")
        for n in range(3):
            ref.tell(Note(str(n)))
    assert log == ["0", "1", "2", ("w", Shutdown())]
    assert await ref.terminated() == Shutdown()
    assert system.phase == "over"


async def test_top_level_actors_end_last_started_first() -> None:
    log: Log = []
    async with ActorSystem() as system:
        for name in "abc":
            system.spawn(Worker, log, name)
    assert log == [("c", Shutdown()), ("b", Shutdown()), ("a", Shutdown())]


async def test_an_actor_may_talk_to_those_started_before_it_until_it_has_ended() -> None:
    log: Log = []

    class Client(Actor[Any]):
        server: Ref[Any]

        async def stopping(self, reason: Reason) -> None:
            self.server.tell(Note("goodbye"))
            log.append(await self.server.ask(Do(lambda actor: "answer")))

    async with ActorSystem() as system:
        server = system.spawn(Worker, log, "server")
        system.spawn(Client, server)
    assert log == ["goodbye", "answer", ("server", Shutdown())]


async def test_phases_run_in_order_and_calls_of_one_phase_side_by_side(autojump_clock: MockClock) -> None:
    log: Log = []
    async with ActorSystem() as system:
        ref = system.spawn(Worker, log, "w")

        def note(name: str, seconds: float) -> Callable[[], Any]:
            async def call() -> None:
                await trio.sleep(seconds)
                log.append((name, system.phase, trio.current_time(), ref.is_alive))

            return call

        system.at_end("flush", note("f", 0))
        system.at_end("close", note("c2", 2))
        system.at_end("close", note("c1", 1))
        system.at_end("drain", note("d", 1))
        system.at_end("accept", note("a", 1))
        assert system.phase == "running"
    assert log == [
        ("a", "accept", 1.0, True),
        ("w", Shutdown()),
        ("d", "drain", 2.0, False),
        ("c1", "close", 3.0, False),
        ("c2", "close", 4.0, False),
        ("f", "flush", 4.0, False),
    ]
    assert PHASES == ("accept", "drain", "close", "flush")


async def test_a_phase_has_a_deadline_and_the_next_one_runs_all_the_same(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    async with ActorSystem("app", shutdown_timeout=3.0) as system:
        system.at_end("accept", forever)

        async def flush() -> None:
            log.append(("flush", trio.current_time()))

        system.at_end("flush", flush)
    assert log == [("flush", 3.0)]
    assert [record.getMessage() for record in caplog.records] == ["app: accept took longer than 3 s"]


async def test_who_does_not_end_in_time_is_killed_and_what_follows_goes_on(autojump_clock: MockClock) -> None:
    log: Log = []
    async with ActorSystem(stop_timeout=2.0, shutdown_timeout=60.0) as system:
        first = system.spawn(Worker, log, "first")
        stuck = system.spawn(Worker, log, "stuck")
        stuck.tell(Do(forever))
        stuck.tell(Note("never"))
        await wait_all_tasks_blocked()
    assert trio.current_time() == pytest.approx(2.0)
    assert await stuck.terminated() == Killed()
    assert await first.terminated() == Shutdown()
    assert log == [("stuck", Killed()), ("first", Shutdown())]


async def test_the_drain_deadline_kills_everybody(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    log: Log = []
    async with ActorSystem("app", stop_timeout=50.0, shutdown_timeout=2.0) as system:
        first = system.spawn(Worker, log, "first")
        stuck = system.spawn(Worker, log, "stuck")
        stuck.tell(Do(forever))
        await wait_all_tasks_blocked()
    assert trio.current_time() == pytest.approx(2.0)
    assert (await first.terminated(), await stuck.terminated()) == (Killed(), Killed())
    assert "app: drain took longer than 2 s" in caplog.text


async def test_spawn_while_the_system_ends_is_refused() -> None:
    errors: Log = []
    async with ActorSystem() as system:

        async def late() -> None:
            try:
                system.spawn(Worker, [])
            except ActorStopped as error:
                errors.append((system.phase, error.reason))

        system.at_end("close", late)
    assert errors == [("close", Shutdown())]
    with pytest.raises(ActorStopped):
        system.spawn(Worker, [])


async def test_a_call_at_the_end_may_be_taken_back() -> None:
    log: Log = []

    async def note(text: str) -> None:
        log.append(text)

    async with ActorSystem() as system:
        for text in ("kept", "kept", "taken back"):
            forget = system.at_end("flush", functools.partial(note, text))
        forget()
        forget()
    forget()
    assert log == ["kept", "kept"]


async def test_at_end_knows_its_phases(system: ActorSystem) -> None:
    with pytest.raises(ConfigurationError, match="accept, drain, close, flush"):
        system.at_end("stop", forever)  # type: ignore[arg-type]


async def test_a_system_is_entered_once() -> None:
    async with ActorSystem() as system:
        assert system.phase == "running"
    with pytest.raises(ConfigurationError, match="entered before"):
        async with system:
            pass


@pytest.mark.parametrize(
    "settings",
    [{"shutdown_timeout": 0}, {"stop_timeout": -1}, {"slow_handler": 0}, {"max_waiting": 0}, {"thread_inbox": 0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ActorSystem(**settings)


async def test_systems_nest_and_stand_side_by_side() -> None:
    log: Log = []
    async with ActorSystem("one") as one, ActorSystem("two") as two:
        first, second = one.spawn(Worker, log, "1", name="same"), two.spawn(Worker, log, "2", name="same")
        assert await first.ask(Do(lambda actor: second.ask(Do(lambda actor: actor.called)))) == "2"
    assert log == [("2", Shutdown()), ("1", Shutdown())]


# ---------------------------------------------------------------- what is left


async def test_what_was_not_handled_at_the_end_is_counted_and_logged_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    system = ActorSystem("app", stop_timeout=0.001, shutdown_timeout=0.001)
    with pytest.raises(ZeroDivisionError):
        async with system:
            stuck = system.spawn(Worker, [])
            stuck.tell(Do(forever))
            for n in range(100):
                stuck.tell(Note(str(n)))
            await wait_all_tasks_blocked()
            raise ZeroDivisionError
    assert system.statistics().dead_letters == 100
    assert [record.getMessage() for record in caplog.records if "dead letter" in record.getMessage()] == [
        "app ended with 0 unsupervised failures and 100 dead letters"
    ]


async def test_asks_that_wait_fail_when_the_system_ends(autojump_clock: MockClock) -> None:
    results: Log = []
    async with trio.open_nursery() as nursery, ActorSystem(stop_timeout=1.0) as system:
        stuck = system.spawn(Worker, [])

        async def ask(function: Any) -> None:
            try:
                results.append(await stuck.ask(Do(function), timeout=None))
            except ActorStopped as error:
                results.append(type(error.reason))

        nursery.start_soon(ask, forever)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, lambda actor: 1)
        await wait_all_tasks_blocked()
    assert results == [Killed, Killed]


async def test_tell_and_ask_after_the_end() -> None:
    async with ActorSystem() as system:
        ref = system.spawn(Worker, [])
    ref.tell(Note("late"))
    assert system.statistics().dead_letters == 1
    with pytest.raises(ActorStopped):
        await ref.ask(Do(lambda actor: 1))
    with pytest.raises(ActorStopped):
        await ref.send(Note("late"))
    with pytest.raises(ActorStopped):
        ref.from_thread.tell(Note("late"))


async def test_nothing_outlives_the_block() -> None:
    before = tasks()
    async with ActorSystem() as system:
        for _ in range(20):
            ref = system.spawn(Worker, [])
            ref.tell(Do(lambda actor: actor.start_soon(trio.sleep_forever)))
            ref.tell(Do(forever))
        await wait_all_tasks_blocked()
        assert tasks() > before + 40
        system.spawn(Worker, []).kill()
        for child in system.root._actor.children:
            child.kill()
        await wait_all_tasks_blocked()
    assert tasks() == before
    assert system.statistics().actors == 0
    assert system.statistics().workers == 0
    assert len(system.heap) == 0


async def test_a_system_that_has_ended_is_garbage() -> None:
    log: Log = []

    async def run() -> weakref.ref[Any]:
        async with ActorSystem() as system:
            ref = system.spawn(Worker, log, supervise=restart())
            ref.tell(Note("x"))
        return weakref.ref(system)

    dead = await run()
    gc.collect()
    assert dead() is None


# ---------------------------------------------------------------- errors


async def test_the_error_of_the_body_comes_out_after_the_phases() -> None:
    log: Log = []
    with pytest.raises(ZeroDivisionError):
        async with ActorSystem() as system:
            system.spawn(Worker, log, "w").tell(Note("queued"))
            raise ZeroDivisionError
    assert log == ["queued", ("w", Shutdown())]


async def test_the_error_of_a_phase_call_comes_out_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log: Log = []
    with pytest.raises(LookupError, match="first"):
        async with ActorSystem("app") as system:

            async def broken(text: str) -> None:
                raise LookupError(text)

            async def fine() -> None:
                await trio.lowlevel.checkpoint()
                log.append(system.phase)

            system.at_end("accept", lambda: broken("first"))
            system.at_end("close", lambda: broken("second"))
            for phase in PHASES:
                system.at_end(phase, fine)
    assert log == list(PHASES)
    assert [record.getMessage() for record in caplog.records] == [
        "app: a call in phase accept failed",
        "app: a call in phase close failed",
    ]


async def test_a_system_exit_of_a_phase_call_comes_out_as_from_a_handler() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        async with ActorSystem() as system:
            system.at_end("accept", leave)
    assert caught.value.code == 3


async def test_an_error_that_nobody_deals_with_cancels_the_body_and_runs_the_phases() -> None:
    log: Log = []
    with pytest.raises(ValueError, match="crash"):
        async with ActorSystem() as system:

            async def flush() -> None:
                log.append("flush")

            system.at_end("flush", flush)
            other = system.spawn(Worker, log, "other")
            other.tell(Note("queued"))

            def crash(actor: Worker) -> None:
                raise ValueError("crash")

            system.spawn(Worker, log, "bad", supervise="escalate").tell(Do(crash))
            try:
                await trio.sleep_forever()
            finally:
                log.append("body cancelled")
    assert log[-3:] == ["body cancelled", ("other", Shutdown()), "flush"]
    assert log[:-3] == ["queued", log[1]]


async def test_body_and_crash_together_come_out_as_a_group() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with ActorSystem("app") as system:

            def crash(actor: Worker) -> None:
                raise ValueError("crash")

            system.spawn(Worker, [], supervise="escalate").tell(Do(crash))
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("body")
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_a_second_crash_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="crash 1"):
        async with ActorSystem() as system:

            def crash(n: int) -> Callable[[Any], None]:
                def do(actor: Worker) -> None:
                    raise ValueError(f"crash {n}")

                return do

            for n in (1, 2):
                system.spawn(Worker, [], supervise="escalate").tell(Do(crash(n)))
            await trio.sleep_forever()
    assert "one more error while it ends" in caplog.text


# ---------------------------------------------------------------- cancellation


async def test_cancellation_from_around_leaves_the_phases_out() -> None:
    log: Log = []
    refs: list[Ref[Any]] = []
    with trio.CancelScope() as around:
        async with ActorSystem() as system:

            async def flush() -> None:
                log.append("flush")

            system.at_end("flush", flush)
            ref = system.spawn(Worker, log, "w")
            refs.append(ref)
            ref.tell(Do(forever))
            ref.tell(Note("never"))
            await wait_all_tasks_blocked()
            around.cancel()
            await trio.sleep_forever()
    assert around.cancelled_caught
    assert log == [("w", Cancelled())]
    assert await refs[0].terminated() == Cancelled()


async def test_a_deadline_around_the_block_ends_a_body_that_waits(autojump_clock: MockClock) -> None:
    refs: list[Ref[Any]] = []
    with trio.move_on_after(3.0) as around:
        async with ActorSystem() as system:
            refs.append(system.spawn(Worker, []))
            await trio.sleep_forever()
    assert around.cancelled_caught
    assert trio.current_time() == pytest.approx(3.0)
    assert await refs[0].terminated() == Cancelled()


async def test_cancellation_during_a_phase_cuts_the_rest_short(autojump_clock: MockClock) -> None:
    log: Log = []
    with trio.move_on_after(1.5) as around:
        async with ActorSystem(shutdown_timeout=60, stop_timeout=60) as system:

            async def note() -> None:
                log.append(system.phase)

            for phase in PHASES:
                system.at_end(phase, note)
            stuck = system.spawn(Worker, log, "stuck")
            stuck.tell(Do(forever))
            await wait_all_tasks_blocked()
    assert around.cancelled_caught
    assert trio.current_time() == pytest.approx(1.5)
    assert log == ["accept", "drain", ("stuck", Killed())]  # it was on its way out as `Shutdown` when time was up


async def test_handlers_are_not_cancelled_before_the_system_decides(autojump_clock: MockClock) -> None:
    """Cancellation from around reaches the actors through the system, so a hook still finds its siblings."""
    log: Log = []

    class Polite(Actor[Any]):
        other: Ref[Any]

        async def stopping(self, reason: Reason) -> None:
            await trio.sleep(1.0)
            log.append((reason, trio.current_time()))

    with trio.CancelScope() as around:
        async with ActorSystem() as system:
            other = system.spawn(Worker, log, "other")
            system.spawn(Polite, other)
            await wait_all_tasks_blocked()
            around.cancel()
            await trio.sleep_forever()
    assert log == [("other", Cancelled()), (Cancelled(), 1.0)]


# ---------------------------------------------------------------- Ctrl-C


def interrupt(_: Any = None) -> None:
    signal.raise_signal(signal.SIGINT)


def spin(_: Any = None) -> None:
    signal.raise_signal(signal.SIGINT)
    for _ in range(1_000_000):  # until the interpreter gets round to it
        pass


def run_interrupted(main: Callable[[], Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)


def test_ctrl_c_in_the_body_runs_the_phases() -> None:
    log: Log = []

    async def main() -> None:
        async with ActorSystem() as system:

            async def flush() -> None:
                log.append("flush")

            system.at_end("flush", flush)
            system.spawn(Worker, log, "w").tell(Note("queued"))
            interrupt()
            await trio.sleep_forever()

    run_interrupted(main)
    assert log == ["queued", ("w", Shutdown()), "flush"]


def test_ctrl_c_in_a_spinning_handler_runs_the_phases() -> None:
    log: Log = []

    async def main() -> None:
        async with ActorSystem() as system:

            async def flush() -> None:
                log.append("flush")

            system.at_end("flush", flush)
            other = system.spawn(Worker, log, "other")
            ref = system.spawn(Worker, log, "spinning", supervise=restart())
            ref.tell(Do(spin))
            ref.tell(Note("never"))
            other.tell(Note("queued"))
            await trio.sleep_forever()

    run_interrupted(main)
    assert "never" not in log
    assert isinstance(log[0][1], Failed) or isinstance(log[1][1], Failed)
    assert log[-2:] == [("other", Shutdown()), "flush"]
    assert "queued" in log


def test_a_second_ctrl_c_cuts_the_phases_short() -> None:
    log: Log = []

    async def main() -> None:
        async with ActorSystem(shutdown_timeout=60, stop_timeout=60) as system:

            async def again() -> None:
                log.append("drain")
                interrupt()
                await trio.sleep_forever()

            async def flush() -> None:
                log.append("flush")

            system.at_end("drain", again)
            system.at_end("flush", flush)
            system.spawn(Worker, log, "stuck").tell(Do(forever))
            await wait_all_tasks_blocked()
            interrupt()

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert caught.value.split(KeyboardInterrupt)[1] is None
    assert log == ["drain", ("stuck", Killed())]


def test_a_second_ctrl_c_in_a_handler_cuts_the_phases_short_too() -> None:
    log: Log = []

    class Spinning(Worker):
        def stopping(self, reason: Reason) -> None:
            spin()

    async def main() -> None:
        async with ActorSystem(shutdown_timeout=60, stop_timeout=60) as system:

            async def flush() -> None:
                log.append("flush")

            system.at_end("flush", flush)
            system.spawn(Worker, log, "stuck").tell(Do(forever))
            system.spawn(Spinning, log, "spinning")
            await wait_all_tasks_blocked()
            interrupt()

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert caught.value.split(KeyboardInterrupt)[1] is None
    assert log == [("stuck", Killed())]


# ---------------------------------------------------------------- large trees


class Level(Actor[Any]):
    depth: int
    count: list[int]

    def started(self) -> None:
        if self.depth:
            self.spawn(Level, self.depth - 1, self.count)

    def stopping(self, reason: Reason) -> None:
        self.count.append(self.depth)


@pytest.mark.ci
@pytest.mark.parametrize("how", ["stop", "kill", "stop now"])
async def test_a_tree_10_000_levels_deep_ends_without_recursion(how: str) -> None:
    count: list[int] = []
    async with ActorSystem(stop_timeout=1000.0) as system:
        top = system.spawn(Level, 10_000, count)
        await wait_all_tasks_blocked()
        assert system.statistics().actors == 10_001
        if how == "kill":
            top.kill()
        else:
            top.stop(now=how == "stop now")
        await top.terminated()
        assert system.statistics().actors == 0
    assert count == list(range(10_001))  # the deepest first


@pytest.mark.ci
async def test_leaving_with_a_deep_tree() -> None:
    count: list[int] = []
    async with ActorSystem(stop_timeout=1000.0, shutdown_timeout=1000.0) as system:
        system.spawn(Level, 10_000, count)
    assert system.statistics().actors == 0


@pytest.mark.ci
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_100_000_children_end_without_recursion_in_reverse_order(how: str) -> None:
    order: list[int] = []

    class Child(Actor[Any]):
        number: int

        def stopping(self, reason: Reason) -> None:
            order.append(self.number)

    class Parent(Actor[Any]):
        def started(self) -> None:
            for number in range(100_000):
                self.spawn(Child, number)

    async with ActorSystem(stop_timeout=1000.0) as system:
        parent = system.spawn(Parent)
        await wait_all_tasks_blocked()
        if how == "kill":
            parent.kill()
        else:
            parent.stop()
        await parent.terminated()
    assert order == list(reversed(range(100_000)))


@pytest.mark.parametrize("busy", [0, 1, 3])
async def test_a_task_of_the_runtime_that_fails_ends_the_system(busy: int, autojump_clock: MockClock) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault of the runtime")

    async def wait(actor: Worker) -> None:
        await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="a fault of the runtime")):
        async with ActorSystem() as system:
            refs = [system.spawn(Worker, []) for _ in range(3)]
            for ref in refs[:busy]:
                ref.tell(Do(wait))
            await wait_all_tasks_blocked()
            system.start_task(fail, name="fails")
            try:
                await trio.sleep_forever()
            finally:
                for ref in refs:
                    ref.tell(Note("nobody will run it"))
