"""What goes wrong in a program has a defined outcome: the table in ``docs/reference/outcomes.md``, row by row."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorSystem,
    Asks,
    Failed,
    Killed,
    Reason,
    Ref,
    Shutdown,
    SlowHandler,
    Unhandled,
    actor,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.embedding import adopt
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskCycle,
    AskTimeout,
    ConfigurationError,
    MailboxFull,
    NameTaken,
)


@message
class Do(Asks[Any]):
    pass


@message
class Item:
    n: Any


class Takes(Actor[Item]):
    seen: list[Any] = attrs.field(factory=list)

    @handles
    def item(self, m: Item) -> None:
        self.seen.append(m.n)


async def others_go_on(system: ActorSystem) -> None:
    """An actor that has nothing to do with it must notice nothing."""
    seen: list[Any] = []
    system.spawn(Takes, seen).tell(Item(1))
    await wait_all_tasks_blocked()
    assert seen == [1]


# ---------------------------------------------------------------- raises


class Raises(Actor[Do]):
    @handles
    def do(self, m: Do) -> None:
        raise ValueError("on purpose")


class RaisesLater(Actor[Do]):
    @handles
    async def do(self, m: Do) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("on purpose")


@pytest.mark.parametrize("kind", [Raises, RaisesLater])
async def test_raises_the_actor_fails_the_asker_hears_the_log_tells(
    system: ActorSystem, kind: type[Actor[Do]], caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Any] = []

    @actor
    def listener(event: ActorFailed) -> None:
        failures.append((event.ref, repr(event.error)))

    system.events.subscribe(ActorFailed, system.spawn(listener))
    ref = system.spawn(kind, name="raises")
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Do())
    assert repr(caught.value.__cause__) == "ValueError('on purpose')"
    assert isinstance(await ref.terminated(), Failed)
    await others_go_on(system)
    assert failures == [(ref, "ValueError('on purpose')")]
    assert caplog.messages == ["/raises failed while it handled Do"]


async def test_raises_for_ever_restarts_so_often_and_then_fails_upwards() -> None:
    system = ActorSystem()
    with pytest.raises(ValueError, match="on purpose"):
        async with system:

            class Parent(Actor[Do]):
                @handles
                def do(self, m: Do) -> Any:
                    return self.spawn(Raises, supervise=restart(max=2, within=100.0))

            parent = system.spawn(Parent, supervise="escalate")
            child = await parent.ask(Do())
            for _ in range(3):
                child.tell(Do())
            await trio.sleep_forever()
    assert system.statistics().restarts == 2


# ---------------------------------------------------------------- hangs


class Hangs(Actor[Do]):
    @handles
    async def do(self, m: Do) -> None:
        await trio.sleep_forever()


async def test_hangs_asks_time_out_and_a_kill_ends_it(system: ActorSystem, autojump_clock: MockClock) -> None:
    ref = system.spawn(Hangs)
    with pytest.raises(AskTimeout):
        await ref.ask(Do(), timeout=1)
    ref.stop()
    await trio.sleep(10)
    assert ref.is_alive  # nothing interrupts a handler but a kill
    ref.kill()
    assert await ref.terminated() == Killed()
    await others_go_on(system)


async def test_hangs_at_the_end_of_the_system_it_is_killed_after_its_time(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    start = trio.current_time()
    async with ActorSystem("hung", shutdown_timeout=3.0, stop_timeout=2.0) as system:
        ref = system.spawn(Hangs, name="hangs")
        ref.tell(Do())
        await trio.sleep(1)
    assert trio.current_time() - start == pytest.approx(1 + 2)
    reason = await ref.terminated()
    assert reason in (Killed(), Shutdown())
    assert "/hangs did not stop in 2 s: killed" in caplog.messages


async def test_hangs_in_stopping_it_has_its_time_and_no_more(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class HangsAtTheEnd(Actor[Do]):
        @handles
        def do(self, m: Do) -> None:
            pass

        async def stopping(self, reason: Reason) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)

    async with ActorSystem(stop_timeout=2.0) as system:
        ref = system.spawn(HangsAtTheEnd, name="hangs")
        start = trio.current_time()
        ref.stop()
        assert await ref.terminated() == Shutdown()
        assert trio.current_time() - start == pytest.approx(2.0)
        assert system.statistics().failures == 0
    assert "a hook of /hangs took longer than 2 s: cancelled" in caplog.messages


# ---------------------------------------------------------------- swallows cancellation


async def test_swallows_its_cancellation_is_hit_again_and_at_last_closed(system: ActorSystem) -> None:
    caught = 0

    class Swallows(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            nonlocal caught
            while True:
                try:
                    await trio.sleep_forever()
                except trio.Cancelled:
                    caught += 1

    ref = system.spawn(Swallows, name="swallows")
    ref.tell(Do())
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert caught == 100
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "RuntimeError('/swallows caught its cancellation 100 times and went on waiting')"
    await others_go_on(system)


async def test_swallows_even_the_closing_of_its_coroutine(system: ActorSystem) -> None:
    class Stubborn(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            closings = 0
            while closings < 2:
                try:
                    await trio.sleep_forever()
                except trio.Cancelled:
                    pass
                except GeneratorExit:
                    closings += 1

    ref = system.spawn(Stubborn, name="stubborn")
    ref.tell(Do())
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "RuntimeError('/stubborn caught its cancellation 100 times and went on waiting')"
    await others_go_on(system)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python complains about the coroutine
@pytest.mark.parametrize("ends", ["kill", "the system"])
async def test_swallows_everything_in_a_bare_except_and_its_cancel_scopes_stay_open(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """The worker's task, whose scopes are torn then, takes no other actor."""

    class Poller(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            while True:
                try:
                    await trio.sleep(1000)
                except:  # noqa: E722
                    pass

    async with ActorSystem(stop_timeout=1.0, shutdown_timeout=1.0) as system:
        refs = [system.spawn(Poller, name=f"poller{number}") for number in range(3)]
        for ref in refs:
            ref.tell(Do())
        await wait_all_tasks_blocked()
        if ends == "kill":
            for ref in refs:
                ref.kill()
            reasons = [await ref.terminated() for ref in refs]
            assert all(isinstance(reason, Failed) for reason in reasons)
            await others_go_on(system)
    failed = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert sorted(failed) == [f"/poller{number} failed while it handled Do" for number in range(3)]


async def test_swallows_inside_a_nursery_of_its_own_and_is_left_to_end_by_itself(system: ActorSystem) -> None:
    """Its coroutine cannot be closed there: the nursery's tasks would outlive it."""
    caught = 0

    class Nested(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            nonlocal caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                while caught < 150:
                    try:
                        await trio.sleep_forever()
                    except trio.Cancelled:
                        caught += 1

    ref = system.spawn(Nested)
    ref.tell(Do())
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    assert caught == 150
    await others_go_on(system)


async def test_an_error_of_the_closing_of_its_coroutine_is_the_failure(system: ActorSystem) -> None:
    class Fails(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            while True:
                try:
                    await trio.sleep_forever()
                except trio.Cancelled:
                    pass
                except GeneratorExit:
                    raise RuntimeError("at the end") from None

    ref = system.spawn(Fails)
    ref.tell(Do())
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "RuntimeError('at the end')"
    await others_go_on(system)


async def test_swallows_once_and_then_ends_is_killed_all_the_same(system: ActorSystem) -> None:
    class Once(Actor[Do]):
        @handles
        async def do(self, m: Do) -> None:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                pass

    ref = system.spawn(Once)
    ref.tell(Do())
    await wait_all_tasks_blocked()
    ref.kill()
    assert await ref.terminated() == Killed()
    await others_go_on(system)


# ---------------------------------------------------------------- blocks the thread


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow_handler
async def test_blocks_the_thread_the_alarm_is_given(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    alarms: list[tuple[Any, ...]] = []

    class Blocks(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            clock.now += m.n

    @actor
    def listener(event: SlowHandler) -> None:
        alarms.append((event.ref, event.message, event.seconds, event.count))

    measure_by(clock)
    async with ActorSystem(slow_handler=0.5) as system:
        system.events.subscribe(SlowHandler, system.spawn(listener))
        ref = system.spawn(Blocks, name="blocks")
        ref.tell(Item(0.25))
        await wait_all_tasks_blocked()
        ref.tell(Item(2.0))
        await others_go_on(system)
        assert alarms == [(ref, Item, 2.0, 1)]
        assert system.statistics().slow_turns == 1
        assert ref.is_alive
    (record,) = (r for r in caplog.records if vars(r).get("event") == "slow_handler")
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("/blocks held everything up for 2.000 s with 1 message, last Item")


async def test_blocks_the_thread_also_when_its_asker_called_it() -> None:
    clock = Clock()

    @message
    class Long(Asks[int]):
        pass

    class Blocks(Actor[Long]):
        @handles
        def long(self, m: Long) -> int:
            clock.now += 3.0
            return 1

    measure_by(clock)
    async with ActorSystem(slow_handler=0.5) as system:
        assert await system.spawn(Blocks).ask(Long()) == 1
        assert system.statistics().slow_turns == 1


# ---------------------------------------------------------------- floods itself


async def test_floods_itself_others_and_trio_still_have_their_turns(system: ActorSystem) -> None:
    class Floods(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            self.ref.tell(m)

    ref = system.spawn(Floods)
    ref.tell(Item(0))
    seen: list[Any] = []
    other = system.spawn(Takes, seen)
    for n in range(20):
        other.tell(Item(n))
        await trio.lowlevel.checkpoint()
    while len(seen) < 20:
        await trio.lowlevel.checkpoint()
    ref.kill()
    assert await ref.terminated() == Killed()


async def test_floods_itself_with_a_bound_it_fails_or_is_told_of_the_cycle(system: ActorSystem) -> None:
    class Tells(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            self.ref.tell(m)
            self.ref.tell(m)

    class Sends(Actor[Item]):
        @handles
        async def item(self, m: Item) -> None:
            await self.ref.send(m)
            await self.ref.send(m)

    for kind, error in ((Tells, MailboxFull), (Sends, AskCycle)):
        ref: Ref[Item] = system.spawn(kind, mailbox=bounded(8))
        ref.tell(Item(0))
        reason = await ref.terminated()
        assert isinstance(reason, Failed)
        assert type(reason.error) is error
    await others_go_on(system)


# ---------------------------------------------------------------- asks itself


async def test_asks_itself_the_cycle_is_named(system: ActorSystem) -> None:
    class Asks_(Actor[Do]):  # noqa: N801
        @handles
        async def do(self, m: Do) -> Any:
            return await self.ref.ask(Do(), timeout=None)

    ref = system.spawn(Asks_, name="self")
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Do())
    cause = caught.value.__cause__
    assert isinstance(cause, AskCycle)
    assert cause.cycle == ("/self", "/self")
    await others_go_on(system)


# ---------------------------------------------------------------- spawns in stopping


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_spawns_in_stopping_is_refused_and_is_the_actors_failure(system: ActorSystem, asynchronous: bool) -> None:
    class Sync(Actor[Do]):
        @handles
        def do(self, m: Do) -> None:
            pass

        def stopping(self, reason: Reason) -> None:
            self.spawn(Takes)

    class Async(Sync):
        async def stopping(self, reason: Reason) -> None:  # type: ignore[override]
            await trio.lowlevel.checkpoint()
            self.spawn(Takes)

    ref = system.spawn(Async if asynchronous else Sync, name="late")
    before = system.statistics().spawned
    ref.stop()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ActorStopped)
    assert str(reason.error) == "/late is ending: it spawns no more"
    assert system.statistics().spawned == before
    await others_go_on(system)


async def test_spawns_after_the_system_has_ended_is_refused() -> None:
    async with ActorSystem() as system:
        pass
    with pytest.raises(ActorStopped, match="is ending: it spawns no more"):
        system.spawn(Takes)


async def test_starts_tasks_or_enters_contexts_in_stopping_is_refused_or_cleaned_up(system: ActorSystem) -> None:
    log: list[str] = []

    class Late(Actor[Do]):
        @handles
        def do(self, m: Do) -> None:
            pass

        async def stopping(self, reason: Reason) -> None:
            self.start_soon(self.task)
            await trio.lowlevel.checkpoint()

        async def task(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                log.append("task ended")

    ref = system.spawn(Late)
    ref.stop()
    await ref.terminated()
    assert log in ([], ["task ended"])


# ---------------------------------------------------------------- nobody handles it


async def test_unhandled_a_tell_is_published_and_an_ask_fails(system: ActorSystem) -> None:
    events: list[Any] = []

    @actor
    def listener(event: Unhandled) -> None:
        events.append(event.message)

    system.events.subscribe(Unhandled, system.spawn(listener))
    ref: Ref[Any] = system.spawn(Takes, name="takes")
    strays: list[Any] = [None, (), "text", 5, [], {}, Do, Do(), print, ActorSystem]
    for stray in strays:
        ref.tell(stray)
    await wait_all_tasks_blocked()
    assert len(events) == 10
    with pytest.raises(ActorError, match=r"^/takes \(Takes\) has no handler for Do$"):
        await ref.ask(Do())
    await wait_all_tasks_blocked()
    assert ref.is_alive
    assert system.statistics().unhandled == 11


# ---------------------------------------------------------------- an unhashable key


async def test_unhashable_key_is_the_senders_error(system: ActorSystem) -> None:
    seen: list[Any] = []
    ref = system.spawn(Takes, seen, mailbox=bounded(4, overflow=conflate(lambda m: m.n)))
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        ref.tell(Item([]))
    with pytest.raises(TypeError, match="unhashable type: 'dict'"):
        await ref.send(Item({}))
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    assert seen == [1]


@pytest.mark.parametrize("name", ["children", "mailbox", "peer", "ref", "system", "timers"])
def test_a_field_with_the_name_of_a_property_of_actors_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Holds.{name}: each actor has a property of this name"):
        type("Holds", (Actor,), {"__annotations__": {name: int}})


async def test_unhashable_tags_timer_keys_and_topics_are_the_callers_error(system: ActorSystem) -> None:
    caught: list[str] = []
    unhashable: Any = []

    class Tries(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            attempts: list[Callable[[], None]] = [
                lambda: self.watch(m.n, tag=unhashable),
                lambda: self.timers.once(unhashable, 1.0, m),
                lambda: self.system.groups.join(unhashable, self.ref),
            ]
            for attempt in attempts:
                try:
                    attempt()
                except TypeError as error:
                    caught.append(str(error))

    ref = system.spawn(Tries)
    ref.tell(Item(system.spawn(Takes)))
    await wait_all_tasks_blocked()
    assert ["unhashable type: 'list'" in text for text in caught] == [True] * 3  # Python 3.14 says more
    assert ref.is_alive


# ---------------------------------------------------------------- a name taken twice


async def test_name_taken_twice_is_refused_and_the_first_keeps_it(system: ActorSystem) -> None:
    first = system.spawn(Takes, name="name")
    with pytest.raises(NameTaken):
        system.spawn(Takes, name="name")
    with pytest.raises(NameTaken):
        system.registry.register("name", first)
        system.registry.register("name", system.spawn(Takes))
    assert system.lookup("/name") is first
    assert system.registry["name"] is first
    assert system.statistics().spawned == 2


# ---------------------------------------------------------------- a few more


async def test_settings_out_of_range_are_refused() -> None:
    for keywords in (
        {"shutdown_timeout": 0},
        {"stop_timeout": -1},
        {"slow_handler": 0},
        {"max_waiting": 0},
        {"blocking_threads": 0},
        {"thread_inbox": 0},
    ):
        with pytest.raises(ConfigurationError):
            ActorSystem(**keywords)  # type: ignore[arg-type]


async def test_a_system_is_entered_once() -> None:
    system = ActorSystem("once")
    async with system:
        with pytest.raises(ConfigurationError, match="the system 'once' was entered before; make a new one"):
            await system.__aenter__()
    with pytest.raises(ConfigurationError):
        await system.__aenter__()


@pytest.mark.parametrize("how", ["sync", "async", "after a wait", "group"])
async def test_a_cancellation_kept_and_raised_again_is_that_actors_failure(system: ActorSystem, how: str) -> None:
    """A `Cancelled` belongs to its scope. Raised when that is over, it may not take the system with it."""
    kept: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            kept.append(BaseExceptionGroup("", [error]) if how == "group" else error)
            raise

    class Keeps(Actor[Do]):
        @handles
        def do(self, m: Do) -> Any:
            if how == "sync":
                raise kept[0]
            return self.later()

        async def later(self) -> None:
            if how != "async":
                await trio.lowlevel.checkpoint()
            raise kept[0]

    ref = system.spawn(Keeps)
    ref.tell(Do())
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert reason.error is kept[0]
    await others_go_on(system)


def test_each_outcome_is_documented() -> None:
    """Each row of the table names tests of this file by their prefix."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "outcomes.md").read_text(encoding="utf-8")
    prefixes = re.findall(r"`(test_[a-z_]+)`", text)
    here = [name for name in globals() if name.startswith("test_")]
    assert prefixes
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in here), prefix


async def test_those_adopted_that_hang_have_one_time_together(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """300 would take 10 minutes one after another; the child that was started first ends last, in its own time."""
    ends: list[tuple[str, float]] = []

    class Parent(Actor[Any]):
        def started(self) -> None:
            self.spawn(lambda: First("first"))
            for _ in range(300):
                child = Hangs()
                assert adopt(self, child)
                child.ref.tell(Do())
            self.spawn(lambda: First("last"))

    class First(Actor[Any]):
        name: str

        def stopping(self, reason: Reason) -> None:
            ends.append((self.name, trio.current_time() - start))

    start = trio.current_time()
    async with ActorSystem("hung", stop_timeout=2.0, slow_handler=math.inf) as system:
        parent = system.spawn(Parent, name="parent")
        await wait_all_tasks_blocked()
        parent.stop()
        await parent.terminated()
    assert ends == [("last", 0.0), ("first", 2.0)]
    assert caplog.messages == ["300 children of /parent did not stop in 2 s: killed"]


@pytest.mark.parametrize(
    ("setting", "value", "refused"),
    [
        ("ask_timeout", -1.0, "ask_timeout is -1.0, wanted None or more than 0 seconds"),
        ("ask_timeout", 0, "ask_timeout is 0, wanted None or more than 0 seconds"),
        ("shutdown_timeout", 0, "shutdown_timeout is 0, wanted more than 0 seconds"),
        ("ask_timeout", "5", "ask_timeout is '5', wanted None or more than 0 seconds"),
        ("shutdown_timeout", "5", "shutdown_timeout is '5', wanted more than 0 seconds"),
        ("stop_timeout", None, "stop_timeout is None, wanted more than 0 seconds"),
        ("stop_timeout", math.nan, "stop_timeout is nan, wanted more than 0 seconds"),
        ("slow_handler", -0.1, "slow_handler is -0.1, wanted more than 0 seconds"),
        ("blocking_threads", 0, "max_waiting, blocking_threads and thread_inbox are 1 or more"),
    ],
)
def test_a_setting_of_a_system_that_cannot_work_is_refused_when_it_is_made(
    setting: str, value: Any, refused: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(refused)}$"):
        ActorSystem(**{setting: value})


async def test_those_adopted_have_one_time_together_though_some_end_before_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each end that came first gave the others their time again."""

    class Ends(Actor[Do]):
        after: float

        @handles
        async def do(self, m: Do) -> None:
            await trio.sleep(self.after)

    class Parent(Actor[Any]):
        def started(self) -> None:
            for seconds in (1.0, 1.5, math.inf, math.inf):
                child = Ends(seconds)
                assert adopt(self, child)
                child.ref.tell(Do())

    start = trio.current_time()
    async with ActorSystem("hung", stop_timeout=2.0, slow_handler=math.inf) as system:
        parent = system.spawn(Parent, name="parent")
        await wait_all_tasks_blocked()
        parent.stop()
        await parent.terminated()
        assert trio.current_time() - start == 2.0
    assert caplog.messages == ["2 children of /parent did not stop in 2 s: killed"]
