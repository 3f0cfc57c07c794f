"""What a running system says about itself: tree, statistics, waits, histograms, alarms, events."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorFailed,
    ActorSystem,
    ActorTerminated,
    Asks,
    DeadLetter,
    Exit,
    Histogram,
    Killed,
    Ref,
    Shutdown,
    SlowHandler,
    Stalls,
    Supervisor,
    Unhandled,
    actor,
    bounded,
    child,
    handles,
    message,
    one_for_all,
    one_for_one,
    restart,
)
from levada.framework.embedding import LocalRef
from levada.framework.errors import ActorError, AskTimeout
from levada.framework.router import consistent_hash, pool

Log = list[Any]


@message
class Do(Asks[Any]):
    """Call a function, sync or async, with the actor."""

    function: Callable[[Any], Any]


@message
class Note:
    text: str


@message
class Stranger:
    """Nobody handles this."""


class Worker(Actor[Do | Note]):
    log: Log

    @handles
    async def do(self, m: Do) -> Any:
        result = m.function(self)
        return await result if hasattr(result, "__await__") else result

    @handles
    def note(self, m: Note) -> None:
        self.log.append(m.text)


class Family(Actor[Any]):
    def started(self) -> None:
        self.spawn(Worker, [], name="one")
        self.spawn(Worker, [], name="two", supervise=restart(initial_backoff=10.0, max_backoff=10.0))


async def pause(seconds: float = 1e9) -> None:
    await trio.sleep(seconds)


def raising(error: BaseException) -> Callable[[Any], None]:
    def do(_: Any) -> None:
        raise error

    return do


# ---------------------------------------------------------------- the tree


async def test_the_tree_shows_every_actor_with_its_state(system: ActorSystem, autojump_clock: MockClock) -> None:
    system.spawn(Family, name="family")
    waiting = system.spawn(Worker, [], name="waiting")
    await wait_all_tasks_blocked()
    one, two = system.lookup("/family/one"), system.lookup("/family/two")
    assert one is not None
    assert two is not None
    for _ in range(2):
        two.tell(Do(raising(ValueError())))
    waiting.tell(Do(lambda actor: pause(5)))
    await wait_all_tasks_blocked()
    for n in range(3):
        waiting.tell(Note(str(n)))
    one.tell(Note("x"))  # told, and nobody has had a turn yet
    tree = system.observe.tree()
    assert (tree.path, tree.kind) == ("/", "_Root")
    family, busy = tree.children
    assert (family.path, family.kind, family.state, family.depth) == ("/family", "Family", "idle", 0)
    assert [(info.path, info.state, info.depth, info.restarts) for info in family.children] == [
        ("/family/one", "ready", 1, 0),
        ("/family/two", "restarting", 0, 1),
    ]
    assert (busy.state, busy.depth, busy.handler) == ("waiting", 3, "Worker.do")
    assert busy.age >= 0.0
    assert busy.children == ()
    await trio.sleep(20)
    tree = system.observe.tree()
    assert [info.state for info in tree.children] == ["idle", "idle"]
    assert tree.children[1].handled == 4
    assert tree.children[0].children[1].restarts == 2


@pytest.mark.parametrize("strategy", [one_for_one, one_for_all])
async def test_an_actor_that_waits_for_its_restart_says_how_long(
    strategy: Callable[[], Any], system: ActorSystem, autojump_clock: MockClock
) -> None:
    policy = restart(initial_backoff=10.0, max_backoff=10.0, jitter=0.0)
    specs = [child(Worker, [], name=name, supervise=policy) for name in ("failing", "other")]
    system.spawn(Supervisor, specs, strategy(), name="family")
    await wait_all_tasks_blocked()
    failing, other = (system.lookup(f"/family/{name}") for name in ("failing", "other"))
    assert isinstance(failing, LocalRef)
    assert isinstance(other, LocalRef)

    def waits() -> tuple[float | None, float | None]:
        return system.observe.detail(failing).restarts_in, system.observe.detail(other).restarts_in

    assert waits() == (None, None)
    for _ in range(2):  # the first restart is immediate
        failing.tell(Do(raising(ValueError())))
        await wait_all_tasks_blocked()
    together = strategy is one_for_all
    assert waits() == (10.0, 10.0 if together else None)
    await trio.sleep(4)
    assert waits() == (6.0, 6.0 if together else None)
    await trio.sleep(7)
    assert waits() == (None, None)


async def test_what_an_actor_has_handled_is_exact(autojump_clock: MockClock) -> None:
    """However its turns end: by waiting, failing, stashing, new starts, questions that were given up."""
    done: list[int] = []

    @message
    class Step(Asks[None]):
        n: int

    class Slow(Actor[Step]):
        def started(self) -> None:
            self.set_receive_timeout(1000.0)

        @handles
        async def step(self, m: Step) -> None:
            done.append(m.n)
            if m.n % 10 == 3:
                await trio.sleep(1)
            if m.n % 10 == 7:
                raise ValueError(m.n)

    class Quick(Actor[Step]):
        @handles
        def step(self, m: Step) -> None:
            done.append(m.n)
            if m.n == 5:
                self.stash(m)
            if m.n == 50:
                self.unstash_all()
            if m.n == 60:
                raise ValueError

    class Loop(Actor[Step]):
        async def run(self) -> None:
            async for m in self.mailbox:
                done.append(m.n)

    kinds: tuple[Any, ...] = (Slow, Quick, Loop)
    for factory, box in itertools.product(kinds, (None, bounded(1000), bounded(1000, overflow="drop_old"))):
        done.clear()
        async with ActorSystem() as system:
            ref = system.spawn(factory, mailbox=box, supervise=restart("permanent", max=1000))
            for n in range(100):
                ref.tell(Step(n))
            with contextlib.suppress(AskTimeout):  # withdrawn, or in time after all
                await ref.ask(Step(100), timeout=0.5 if factory is Slow else 0.0)
            for seconds in (0.0, 3.0, 100.0):
                await trio.sleep(seconds)
                assert system.observe.tree().children[0].handled == len(done), (factory, box, seconds)
            assert len(done) >= 100


async def test_where_a_handler_waits_is_visible_to_trio_and_in_the_tree(system: ActorSystem) -> None:
    async def fetch(gate: trio.Event) -> None:
        await gate.wait()

    @message
    class Get(Asks[str]):
        gate: trio.Event

    class Fetches(Actor[Get]):
        @handles
        async def get(self, m: Get) -> str:
            await fetch(m.gate)
            return "got"

    def lines() -> list[list[str]]:
        """The frames of each task that waits in `fetch`, as far as trio's own."""
        nursery = system._nursery
        found = [[frame.f_code.co_name for frame, _ in task.iter_await_frames()] for task in nursery.child_tasks]
        return [names[: names.index("fetch") + 2] for names in found if "fetch" in names]

    asked, told = system.spawn(Fetches), system.spawn(Fetches)
    gate = trio.Event()
    told.tell(Get(gate))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked.ask, Get(gate))
        await wait_all_tasks_blocked()
        line = fetch.__code__.co_firstlineno + 1
        assert [child.where for child in system.observe.tree().children] == [f"test_observe.py:{line}"] * 2
        assert sorted(lines()) == [
            ["_work", "_finish_ask", "get", "fetch", "wait"],
            ["_work", "get", "fetch", "wait"],
        ]
        gate.set()
    assert lines() == []
    assert [child.where for child in system.observe.tree().children] == [None] * 2


async def test_who_waits_for_whom(system: ActorSystem, autojump_clock: MockClock) -> None:
    slow = system.spawn(Worker, [], name="slow")
    full: Ref[Any] = system.spawn(Worker, [], name="full", mailbox=bounded(1))
    asker = system.spawn(Worker, [], name="asker")
    sender = system.spawn(Worker, [], name="sender")
    slow.tell(Do(lambda actor: pause(1)))
    await full.send(Do(lambda actor: pause(1)))
    await wait_all_tasks_blocked()
    await full.send(Note("fills it"))
    asker.tell(Do(lambda actor: slow.ask(Do(lambda actor: None))))
    sender.tell(Do(lambda actor: full.send(Note("waits"))))
    await wait_all_tasks_blocked()
    assert sorted(system.observe.waits()) == [("/asker", "/slow"), ("/sender", "/full")]
    by_path = {info.path: info.waits_for for info in system.observe.tree().children}
    assert by_path == {"/slow": (), "/full": (), "/asker": ("/slow",), "/sender": ("/full",)}
    await trio.sleep(2)
    assert system.observe.waits() == []


@pytest.mark.ci
async def test_a_tree_of_10_000_levels_is_no_recursion(system: ActorSystem) -> None:
    class Level(Actor[Any]):
        depth: int

        def started(self) -> None:
            if self.depth:
                self.spawn(Level, self.depth - 1, name="x")

    top = system.spawn(Level, 2_000, name="x")
    await wait_all_tasks_blocked()
    info = system.observe.tree()
    depth = 0
    while info.children:
        (info,) = info.children
        depth += 1
    assert depth == 2_001
    top.kill()
    await top.terminated()


async def test_a_stopping_actor_is_shown_as_such(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Slow(Worker):
        async def stopping(self, reason: Any) -> None:
            await trio.sleep(1)

    ref = system.spawn(Slow, [])
    ref.stop()
    await wait_all_tasks_blocked()
    assert [info.state for info in system.observe.tree().children] == ["stopping"]
    await ref.terminated()
    assert system.observe.tree().children == ()


# ---------------------------------------------------------------- statistics


async def test_statistics_count(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    first = system.spawn(Worker, log, supervise=restart())
    second = system.spawn(Worker, log)
    first.tell(Do(raising(ValueError())))
    first.tell(Stranger())  # type: ignore[arg-type]
    await wait_all_tasks_blocked()
    second.kill()
    await second.terminated()
    second.tell(Note("late"))
    with trio.move_on_after(1):
        await first.ask(Do(lambda actor: pause(2)))
    await trio.sleep(3)
    numbers = system.statistics()
    assert (numbers.actors, numbers.spawned, numbers.stopped) == (1, 2, 1)
    assert (numbers.failures, numbers.restarts, numbers.unhandled) == (1, 1, 1)
    assert (numbers.dead_letters, numbers.late_replies) == (1, 1)
    assert (numbers.waiting, numbers.ready, numbers.timers) == (0, 0, 0)
    first.tell(Do(lambda actor: pause(1)))
    first.tell(Note("x"))
    await wait_all_tasks_blocked()
    assert system.statistics().waiting == 1


async def test_max_waiting_is_a_defined_failure(autojump_clock: MockClock) -> None:
    async with ActorSystem(max_waiting=2) as system:
        refs = [system.spawn(Worker, []) for _ in range(3)]
        for ref in refs:
            ref.tell(Do(lambda actor: pause(1)))
        await trio.sleep(2)
        assert [ref.is_alive for ref in refs] == [True, True, False]
        reason: Any = await refs[2].terminated()
        assert isinstance(reason.error, ActorError)
        assert "2 handlers wait already (raise max_waiting" in str(reason.error)


# ---------------------------------------------------------------- events


async def collect(system: ActorSystem, *kinds: type) -> Log:
    log: Log = []

    class Collector(Actor[Any]):
        def unhandled(self, message: Any) -> None:
            log.append(message)

    ref = system.spawn(Collector)
    for kind in kinds:
        system.events.subscribe(kind, ref)
    return log


async def test_failures_and_ends_are_published(system: ActorSystem) -> None:
    log = await collect(system, ActorFailed, ActorTerminated)
    ref = system.spawn(Worker, [])
    error = ValueError()
    failing = Do(raising(error))
    ref.tell(failing)
    other = system.spawn(Worker, [])
    await wait_all_tasks_blocked()
    other.stop()
    await wait_all_tasks_blocked()
    failed, ended, stopped = log
    assert (failed.ref, failed.error, failed.message) == (ref, error, failing)
    assert (ended.ref, ended.reason.error) == (ref, error)
    assert (stopped.ref, stopped.reason) == (other, Shutdown())


async def test_what_nobody_handles_is_published(system: ActorSystem) -> None:
    log = await collect(system, Unhandled, DeadLetter)
    ref = system.spawn(Worker, [])
    ref.tell(Stranger())  # type: ignore[arg-type]
    await wait_all_tasks_blocked()
    ref.kill()
    await ref.terminated()
    ref.tell(Note("late"))
    await wait_all_tasks_blocked()
    unhandled, letter = log
    assert (unhandled.message, unhandled.to) == (Stranger(), ref)
    assert (letter.message, letter.to, letter.why) == (Note("late"), ref, "stopped")


async def test_an_ask_that_nobody_handles_fails_and_the_actor_lives(system: ActorSystem) -> None:
    @message
    class Odd(Asks[int]):
        pass

    ref: Ref[Any] = system.spawn(Worker, [])
    with pytest.raises(ActorError, match="has no handler for Odd"):
        await ref.ask(Odd())
    assert ref.is_alive


async def test_object_gets_all_events_and_unsubscribe_ends_it(system: ActorSystem) -> None:
    log: Log = []

    class Collector(Actor[Any]):
        @handles(object)
        def any(self, m: object) -> None:
            log.append(m)

    ref = system.spawn(Collector)
    system.events.subscribe(object, ref)
    system.events.subscribe(str, ref)
    system.events.publish("one")  # once, though two subscriptions match
    system.events.publish(2)
    await wait_all_tasks_blocked()
    system.events.unsubscribe(object, ref)
    system.events.unsubscribe(object, ref)
    system.events.publish(3)
    system.events.publish("four")
    await wait_all_tasks_blocked()
    assert log == ["one", 2, "four"]


async def test_a_dead_or_full_subscriber_holds_nobody_up(system: ActorSystem, autojump_clock: MockClock) -> None:
    dead = system.spawn(Worker, [])
    full: Ref[Any] = system.spawn(Worker, [], mailbox=bounded(1))
    for ref in (dead, full):
        system.events.subscribe(Note, ref)
    dead.kill()
    await dead.terminated()
    await full.send(Do(lambda actor: pause(1)))
    await wait_all_tasks_blocked()
    for n in range(5):
        system.events.publish(Note(str(n)))
    await trio.sleep(2)
    assert full._actor.log == ["0"]  # type: ignore[attr-defined]
    assert system.events.subscribers == {Note: {full: None}}


async def test_dead_letters_are_logged_ten_a_second(
    system: ActorSystem, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Worker, [], name="dead")
    ref.kill()
    await ref.terminated()
    for n in range(25):
        ref.tell(Note(str(n)))
    await trio.sleep(1)
    ref.tell(Note("later"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        *["dead letter: Note to /dead (stopped)"] * 10,
        "15 more dead letters were not logged",
        "dead letter: Note to /dead (stopped)",
    ]
    assert system.statistics().dead_letters == 26


# ---------------------------------------------------------------- time


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow_handler
async def test_the_alarm_for_handlers_that_hold_everything_up(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeTime()
    measure_by(clock)
    async with ActorSystem(slow_handler=0.1) as system:
        log = await collect(system, SlowHandler)
        ref = system.spawn(Worker, [], name="slow")

        def hold_up(seconds: float) -> Callable[[Any], None]:
            def do(_: Any) -> None:
                clock.now += seconds

            return do

        ref.tell(Do(hold_up(0.05)))
        await wait_all_tasks_blocked()
        assert log == []
        ref.tell(Do(hold_up(0.25)))
        await wait_all_tasks_blocked()
        (alarm,) = log
        assert (alarm.ref, alarm.message, alarm.count) == (ref, Do, 1)
        assert alarm.seconds == pytest.approx(0.25)
        assert system.statistics().slow_turns == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage() == (
        "/slow held everything up for 0.250 s with 1 message, last Do (use @blocking, or await something)"
    )


@pytest.mark.slow_handler
async def test_the_alarm_for_an_actor_of_levada_gives_no_advice_that_only_its_author_could_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeTime()
    measure_by(clock)

    def key(m: Any) -> int:
        clock.now += 0.25
        return 1

    async def handle(m: Do) -> None:
        clock.now += 0.5

    async with ActorSystem(slow_handler=0.1) as system:
        system.spawn(pool(Worker, [], size=1, routing=consistent_hash(key)), name="pool").tell(Do(lambda _: None))
        await wait_all_tasks_blocked()
        system.spawn(actor(handle), name="function").tell(Do(lambda _: None))
        await wait_all_tasks_blocked()
    pool_says, function_says = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert pool_says.startswith("/pool held everything up for 0.250 s")
    assert pool_says.endswith("(an actor of levada: the machine is busy, or a function of yours that it calls)")
    assert function_says.startswith("/function held everything up for 0.500 s")
    assert function_says.endswith("(use @blocking, or await something)")


def test_a_histogram_counts_by_powers_of_two() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0.0
    for seconds in (0.0, 1e-6, 3e-6, 1.0, 1e9):
        histogram.add(seconds)
    assert histogram.total == 5
    assert {n: count for n, count in enumerate(histogram.counts) if count} == {0: 1, 1: 1, 2: 1, 20: 1, 31: 1}
    assert histogram.quantile(0.2) == 1e-6
    assert histogram.quantile(0.6) == 4e-6
    assert histogram.quantile(1.0) == pytest.approx(2**31 * 1e-6)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_not_below_that_share_of_the_samples(samples: list[float], share: float) -> None:
    histogram = Histogram()
    for seconds in samples:
        histogram.add(seconds)
    bound = histogram.quantile(share)
    assert sum(seconds <= bound for seconds in samples) >= share * len(samples) - 1e-9


@message
class Again(Asks[int]):
    pass


class Selfish(Actor[Again | Note]):
    """Tells itself something while it answers."""

    @handles
    def again(self, m: Again) -> int:
        self.ref.tell(Note("again"))
        return 0

    @handles
    def note(self, m: Note) -> None:
        pass


def link_to(other: Ref[Any], actor: Any) -> None:
    actor.link(other)


class Linked(Actor[Do | Exit]):
    """Traps the exits of the actors that it is linked to."""

    trap_exits = True

    @handles
    def do(self, m: Do) -> None:
        m.function(self)

    @handles
    def exit(self, m: Exit) -> None:
        pass


async def test_times_are_sampled() -> None:
    ticks = itertools.count()  # by real time, a turn in which the processor is lost would be the end of its slice
    measure_by(lambda: next(ticks) * 1e-6)
    async with ActorSystem() as system:
        ref = system.spawn(Worker, [])
        for n in range(500):
            ref.tell(Note(str(n)))
            await wait_all_tasks_blocked()
    assert system.observe.turn_times.total == pytest.approx(500, abs=63)
    assert system.observe.queue_times.total == system.observe.turn_times.total
    assert system.observe.turn_times.quantile(1.0) < 30.0


class Stalling(Actor[Note]):
    """Holds the loop up for as many milliseconds as its message says."""

    hold: Callable[[float], None]

    @handles
    def note(self, m: Note) -> None:
        self.hold(float(m.text) / 1000)


async def test_each_turn_that_is_longer_than_a_slice_is_counted() -> None:
    """They ended their slices, so none of them was ever the one that is measured."""
    clock = Ticking()
    measure_by(clock)
    async with ActorSystem() as system:
        ref = system.spawn(Stalling, clock.hold)
        for n in range(1000):
            ref.tell(Note("150" if n % 50 == 0 else "0"))
            await wait_all_tasks_blocked()
        assert sum(system.observe.turn_times.counts[17:]) == 20  # 131 ms and more
        assert system.observe.turn_times.total == pytest.approx(1000, abs=200)
        assert system.observe.turn_times.quantile(0.99) == pytest.approx(0.262, abs=0.001)
        assert system.observe.turn_times.quantile(0.9) < 0.001


class Ticking:
    """A clock of a microsecond for each look, and of time that passes by request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def hold(self, seconds: float) -> None:
        self.now += seconds


async def test_the_longest_stall_of_each_interval_is_exact(autojump_clock: MockClock) -> None:
    """Also if it came first, if a longer one follows, and for two readers with intervals of their own."""
    clock = Ticking()
    measure_by(clock)
    async with ActorSystem() as system:
        ref = system.spawn(Stalling, clock.hold)
        stalls = system.observe.stalls
        assert stalls.longest(0.0) == 0.0
        found = []
        quick = slow = trio.current_time()
        for number, holds in enumerate([(150, 30), (30, 150), (7, 7), (0, 0), (40,), (20,)]):
            for hold in holds:
                await trio.sleep(1)
                ref.tell(Note(str(hold)))
                await wait_all_tasks_blocked()
            found.append(round(stalls.longest(quick), 3))
            quick = trio.current_time()
            if number % 3 == 2:
                found.append(-round(stalls.longest(slow), 3))
                slow = trio.current_time()
        assert found == [0.15, 0.15, 0.007, -0.15, 0.0, 0.04, 0.02, -0.04]


async def test_few_stalls_are_kept_and_none_for_long(autojump_clock: MockClock) -> None:
    stalls = Stalls()
    for number in range(1000):
        stalls.add(float(number), 1 - number / 10_000)
    assert len(list(stalls)) == 100
    assert stalls.longest(950.0) == 1 - 951 / 10_000
    stalls.add(1600.0, 0.001)
    assert list(stalls) == [(1600.0, 0.001)]
    stalls.add(1601.0, 5.0)
    for number in range(200):  # each hides the one before it, and none the longest
        stalls.add(1602.0 + number / 100, 0.001 * number)
    assert list(stalls) == [(1601.0, 5.0), (1603.99, 0.199)]


async def test_a_late_timer_is_a_stall_and_counts_as_a_wait() -> None:
    """What holds the loop up is no actor, so no turn is long."""
    async with ActorSystem() as system:
        runner = system.spawn(Worker, [])
        began = trio.current_time()
        system.heap.after(0.01, lambda: None)
        await trio.lowlevel.checkpoint()
        while trio.current_time() < began + 0.05:
            pass  # as a task that computes
        await wait_all_tasks_blocked(0.001)
        assert 0.03 < system.observe.stalls.longest(began) < 30
        assert sum(system.observe.queue_times.counts[15:]) == 1  # 16 ms and more
        assert sum(system.observe.turn_times.counts[15:]) == 0
        runner.kill()


async def test_waits_for_turns_are_those_of_actors() -> None:
    """Signals of the runtime, exits, and messages that come while an ask is handled at once, do not seem to wait since what came before."""
    time = 1e6
    measure_by(lambda: time)
    async with ActorSystem() as system:
        ref = system.spawn(Selfish)
        linked = system.spawn(Linked)
        await wait_all_tasks_blocked()
        time = 2e6
        for number in range(1_000):
            await ref.ask(Again())
            other = system.spawn(Worker, [])
            if number % 2:  # in rounds that are all alike, each sampled turn would be of the same actor
                linked.tell(Do(partial(link_to, other)))
            await wait_all_tasks_blocked()
            time += 1
            other.kill()
            await wait_all_tasks_blocked()
        assert system.observe.queue_times.total >= 10
        assert system.observe.queue_times.quantile(1.0) == 1e-6


async def test_logs_go_where_libraries_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with ActorSystem("app") as system:
        ref = system.spawn(Worker, [], name="w")
        ref.tell(Do(raising(ValueError())))
        await wait_all_tasks_blocked()
    names = {record.name for record in caplog.records}
    assert names <= {"levada.framework.lifecycle", "levada.framework.system", "levada.framework.events"}
    phases = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "phase"]
    assert phases == ["app: accept", "app: drain", "app: close", "app: flush"]


async def test_killed_is_visible_in_events(system: ActorSystem) -> None:
    log = await collect(system, ActorTerminated)
    ref = system.spawn(Worker, [])
    ref.tell(Do(lambda actor: pause()))
    await wait_all_tasks_blocked()
    ref.kill()
    await wait_all_tasks_blocked()
    assert [(event.ref, event.reason) for event in log] == [(ref, Killed())]
