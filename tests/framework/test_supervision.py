"""Restarts: who, how often, after how long, in which order, and where a failure goes that is one too many."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorRestarted,
    ActorSystem,
    Asks,
    Down,
    Failed,
    Killed,
    Normal,
    Reason,
    Ref,
    Shutdown,
    Strategy,
    bounded,
    child,
    handles,
    message,
    one_for_all,
    one_for_one,
    rest_for_one,
    restart,
)
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, NameTaken
from levada.framework.supervision import delay, record
from levada.framework.supervisor import Children, StartChild, StopChild, Supervisor

Log = list[Any]


@message
class Say(Asks[str]):
    text: str


@message
class Raise:
    error: BaseException


@message
class Work:
    n: int


@message
class End:
    """End yourself as `Normal`."""


@message
class Wait:
    seconds: float


@message
class Late:
    """Fail in so many seconds."""

    seconds: float


class Worker(Actor[Say | Raise | Work | End | Wait | Late]):
    """Logs what happens to it as ``(name, what)``."""

    log: Log
    called: str = ""

    def started(self) -> None:
        self.log.append((self.called, "start"))

    def stopping(self, reason: Reason) -> None:
        self.log.append((self.called, "stop", type(reason)))

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append((self.called, "restart", type(error)))

    @handles
    def say(self, m: Say) -> str:
        return m.text

    @handles
    def fail(self, m: Raise) -> None:
        raise m.error

    @handles
    def work(self, m: Work) -> None:
        self.log.append((self.called, m.n))

    @handles
    def end(self, m: End) -> None:
        self.stop()

    @handles
    async def wait(self, m: Wait) -> None:
        await trio.sleep(m.seconds)

    @handles
    async def late(self, m: Late) -> None:
        await trio.sleep(m.seconds)
        raise ValueError


class Crew(Actor[Any]):
    """A parent of workers, one for each policy, under a strategy."""

    log: Log
    rules: Strategy
    policies: tuple[Any, ...]

    def started(self) -> None:
        self.strategy = self.rules
        for name, policy in zip("abcdefgh", self.policies, strict=False):
            self.spawn(Worker, self.log, name, name=name, supervise=policy)

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append(("crew", "restart", type(error)))

    def stopping(self, reason: Reason) -> None:
        self.log.append(("crew", "stop", type(reason)))


async def crew(
    system: ActorSystem, log: Log, rules: Strategy, *policies: Any, supervise: Any = "stop"
) -> tuple[Ref[Any], ...]:
    """Start a crew; return its ref and those of its workers."""
    parent = system.spawn(Crew, log, rules, policies, name="crew", supervise=supervise)
    await wait_all_tasks_blocked()
    refs: list[Ref[Any]] = [parent]
    for name, _ in zip("abcdefgh", policies, strict=False):
        ref = system.lookup(f"/crew/{name}")
        assert ref is not None
        refs.append(ref)
    log.clear()
    return tuple(refs)


def restarts(ref: Any) -> int:
    count: int = ref._extras.restarts if ref._extras is not None else 0
    return count


# ---------------------------------------------------------------- kinds

ENDS = ["normal", "stop", "kill", "fail"]


async def end(ref: Ref[Any], how: str) -> None:
    if how == "normal":
        ref.tell(End())
    elif how == "stop":
        ref.stop(now=True)
    elif how == "kill":
        ref.kill()
    else:
        ref.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (restart("permanent"), {"normal", "stop", "kill", "fail"}),
        (restart("transient"), {"kill", "fail"}),
        (restart("temporary"), set()),
        ("stop", set()),
    ],
    ids=["permanent", "transient", "temporary", "stop"],
)
async def test_which_ends_are_followed_by_a_start(system: ActorSystem, policy: Any, again: set[str], how: str) -> None:
    log: Log = []
    parent, worker, other = await crew(system, log, one_for_one(), policy, policy)
    await end(worker, how)
    assert worker.is_alive == (how in again)
    assert restarts(worker) == (how in again)
    assert other.is_alive
    assert restarts(other) == 0
    assert parent.is_alive
    if how in again:
        assert log == [("a", "restart", ValueError if how == "fail" else type(None)), ("a", "start")]
    else:
        reason = {"normal": Normal, "stop": Shutdown, "kill": Killed, "fail": Failed}[how]
        assert log == [("a", "stop", reason)]


async def test_a_graceful_stop_of_a_permanent_child_comes_after_its_mailbox_and_starts_it_again(
    system: ActorSystem,
) -> None:
    log: Log = []
    _, worker = await crew(system, log, one_for_one(), restart("permanent"))
    worker.tell(Work(1))
    worker.stop()
    worker.tell(Work(2))
    await wait_all_tasks_blocked()
    assert log == [("a", 1), ("a", "restart", type(None)), ("a", "start"), ("a", 2)]


async def test_a_plain_child_that_fails_is_the_business_of_nobody(system: ActorSystem) -> None:
    log: Log = []
    parent, worker = await crew(system, log, one_for_one(), "stop")
    await end(worker, "fail")
    assert not worker.is_alive
    assert parent.is_alive
    assert system.lookup("/crew/a") is None


# ---------------------------------------------------------------- what a restart keeps


async def test_a_restart_keeps_ref_name_mailbox_and_order_and_drops_the_message_that_failed(
    system: ActorSystem,
) -> None:
    log: Log = []
    _, worker = await crew(system, log, one_for_one(), restart())
    for entry in (Work(1), Raise(ValueError()), Work(2), Raise(KeyError()), Work(3)):
        worker.tell(entry)
    assert await worker.ask(Say("hi")) == "hi"
    assert log == [
        ("a", 1),
        ("a", "restart", ValueError),
        ("a", "start"),
        ("a", 2),
        ("a", "restart", KeyError),
        ("a", "start"),
        ("a", 3),
    ]
    assert system.lookup("/crew/a") is worker


async def test_asks_that_were_queued_are_answered_by_the_next_incarnation(system: ActorSystem) -> None:
    _, worker = await crew(system, [], one_for_one(), restart())
    answers: list[str] = []

    async def ask(text: str) -> None:
        answers.append(await worker.ask(Say(text)))

    async with trio.open_nursery() as nursery:
        worker.tell(Wait(0))
        worker.tell(Raise(ValueError()))
        for text in "xy":
            nursery.start_soon(ask, text)
    assert sorted(answers) == ["x", "y"]


async def test_senders_that_wait_for_room_go_on_waiting(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    worker: Ref[Any] = system.spawn(
        Worker, log, "w", mailbox=bounded(1), supervise=restart(backoff=(1.0, 1.0), jitter=0)
    )
    worker.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    worker.tell(Raise(ValueError()))  # the second in a row waits for its back-off
    await wait_all_tasks_blocked()
    await worker.send(Work(1))
    log.clear()
    await worker.send(Work(2))
    assert trio.current_time() == pytest.approx(1.0)
    await wait_all_tasks_blocked()
    assert log == [("w", "start"), ("w", 1), ("w", 2)]


class Counting(Actor[Any]):
    made: Counter[str]

    def __attrs_post_init__(self) -> None:
        self.made["made"] += 1


async def test_state_is_that_of_a_new_object_from_the_same_factory(system: ActorSystem) -> None:
    made: Counter[str] = Counter()
    ref = system.spawn(functools.partial(Counting, made), supervise=restart(max=10))
    for _ in range(3):
        ref.kill()
        await wait_all_tasks_blocked()
    assert made["made"] == 4
    assert system.statistics().restarts == 3


async def test_restarts_are_published(system: ActorSystem) -> None:
    events: Log = []

    async def collect(event: ActorRestarted) -> None:
        events.append((event.ref, event.restarts))

    system.events.subscribe(ActorRestarted, system.spawn(collect))
    _, worker = await crew(system, [], one_for_one(), restart())
    worker.kill()
    worker.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert events == [(worker, 1), (worker, 2)]


async def test_watchers_and_links_hear_nothing_of_a_restart(system: ActorSystem) -> None:
    class Watcher(Actor[Down]):
        log: Log
        target: Ref[Any]

        def started(self) -> None:
            self.watch(self.target)
            self.link(self.target)

        @handles
        def down(self, m: Down) -> None:
            self.log.append(m.reason)

    log: Log = []
    _, worker = await crew(system, log, one_for_one(), restart())
    watcher = system.spawn(Watcher, log, worker)
    worker.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert watcher.is_alive
    worker.stop()
    assert await watcher.terminated() == Shutdown()


async def test_a_started_that_waits_keeps_messages_waiting(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Slow(Worker):
        async def started(self) -> None:  # type: ignore[override]
            self.log.append("begin")
            await trio.sleep(1)
            self.log.append("end")

    log: Log = []
    ref = system.spawn(Slow, log, "s", supervise=restart())
    ref.tell(Work(1))
    ref.tell(Raise(ValueError()))
    ref.tell(Work(2))
    await ref.ask(Say(""))
    assert log == ["begin", "end", ("s", 1), ("s", "restart", ValueError), "begin", "end", ("s", 2)]


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (ValueError(), True),
        (UnicodeError(), True),
        (KeyError(), False),
        (ExceptionGroup("", [ValueError(), ExceptionGroup("", [UnicodeError()])]), True),
        (ExceptionGroup("", [ValueError(), KeyError()]), False),
        (OSError(), True),
    ],
    ids=repr,
)
async def test_resume_keeps_the_object(system: ActorSystem, error: Exception, goes_on: bool) -> None:
    log: Log = []
    _, worker = await crew(system, log, one_for_one(), restart(resume=[ValueError, OSError]))
    worker.tell(Raise(error))
    worker.tell(Work(1))
    await wait_all_tasks_blocked()
    assert restarts(worker) == (not goes_on)
    assert log == ([("a", 1)] if goes_on else [("a", "restart", type(error)), ("a", "start"), ("a", 1)])


async def test_resume_fails_the_ask_and_nothing_else(system: ActorSystem) -> None:
    class Picky(Actor[Say]):
        count: int = 0

        @handles
        async def say(self, m: Say) -> str:
            self.count += 1
            await trio.lowlevel.checkpoint()
            if m.text == "bad":
                raise ValueError(m.text)
            return f"{m.text} {self.count}"

    ref = system.spawn(Picky, supervise=restart(resume=[ValueError]))
    assert await ref.ask(Say("one")) == "one 1"
    with pytest.raises(ActorStopped) as caught:
        await ref.ask(Say("bad"))
    assert isinstance(caught.value.__cause__, ValueError)
    assert await ref.ask(Say("three")) == "three 3"


@pytest.mark.parametrize("busy", [False, True])
async def test_resume_holds_for_the_actors_own_tasks(
    system: ActorSystem, autojump_clock: MockClock, busy: bool
) -> None:
    class Tasked(Worker):
        def started(self) -> None:
            self.start_soon(self._break)

        async def _break(self) -> None:
            await trio.sleep(1)
            raise ValueError

    log: Log = []
    ref = system.spawn(Tasked, log, "t", supervise=restart(resume=[ValueError]))
    if busy:
        ref.tell(Wait(2.0))
    await trio.sleep(3)
    assert restarts(ref) == 0
    assert log == []
    assert system.statistics().failures == 1


async def test_keyboard_interrupt_is_never_resumed() -> None:
    with pytest.raises(KeyboardInterrupt):
        async with ActorSystem() as system:
            ref = system.spawn(Worker, [], supervise=restart(resume=[BaseException]))
            ref.tell(Raise(KeyboardInterrupt()))
            await trio.sleep_forever()


# ---------------------------------------------------------------- how often


async def test_one_restart_more_than_max_is_a_failure_of_the_parent(system: ActorSystem) -> None:
    log: Log = []
    parent, worker = await crew(system, log, one_for_one(), restart(max=2, within=10.0))
    error = ValueError("third")
    for failure in (ValueError("first"), ValueError("second"), error):
        worker.tell(Raise(failure))
    reason = await parent.terminated()
    assert reason == Failed(error)
    assert await worker.terminated() == Failed(error)
    assert log == [
        ("a", "restart", ValueError),
        ("a", "start"),
        ("a", "restart", ValueError),
        ("a", "start"),
        ("a", "stop", Failed),
        ("crew", "stop", Failed),
    ]


async def test_max_0_allows_no_restart(system: ActorSystem) -> None:
    parent, worker = await crew(system, [], one_for_one(), restart(max=0))
    worker.kill()
    reason = await parent.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, ActorError)
    assert str(reason.error) == "/crew/a ended too often"
    assert await worker.terminated() == Killed()


async def test_the_window_slides(system: ActorSystem, autojump_clock: MockClock) -> None:
    parent, worker = await crew(system, [], one_for_one(), restart(max=2, within=10.0))
    for at in (0.0, 9.0, 10.0, 19.0, 20.0):  # never three in less than ten seconds
        await trio.sleep_until(at)
        worker.kill()
        await wait_all_tasks_blocked()
    assert restarts(worker) == 5
    await trio.sleep_until(28.9)
    worker.kill()
    await wait_all_tasks_blocked()
    assert not parent.is_alive


@given(st.lists(st.floats(0.0, 5.0), max_size=40), st.integers(0, 5), st.floats(0.1, 10.0))
def test_record_counts_what_lies_within_the_window(gaps: list[float], most: int, within: float) -> None:
    from collections import deque

    times: deque[float] = deque()
    all_times: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        all_times.append(now)
        expected = sum(time > now - within for time in all_times) <= most
        assert record(times, now, max=most, within=within) == expected


# ---------------------------------------------------------------- back-off


@given(
    st.floats(0.001, 10.0),
    st.floats(1.0, 100.0),
    st.floats(0.0, 1.0),
    st.integers(1, 3000),
    st.integers(0, 2**32),
)
def test_the_delay_is_within_its_bounds(first: float, factor: float, jitter: float, in_a_row: int, seed: int) -> None:
    policy = restart(backoff=(first, first * factor), jitter=jitter)
    wait = delay(policy, in_a_row, random.Random(seed))
    if in_a_row == 1:
        assert wait == 0.0
    else:
        whole = min(first * factor, first * 2.0 ** min(in_a_row - 2, 64))
        assert whole * (1 - jitter) <= wait <= whole


async def test_backoff_doubles_to_its_most_in_virtual_time(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        log: Log = []
        policy = restart(max=100, within=1000.0, backoff=(1.0, 5.0), jitter=0.0)
        ref = system.spawn(Worker, log, "w", supervise=policy)
        waits = []
        for _ in range(6):
            before = trio.current_time()
            ref.tell(Raise(ValueError()))
            await ref.ask(Say(""), timeout=None)
            waits.append(trio.current_time() - before)
        assert waits == pytest.approx([0.0, 1.0, 2.0, 4.0, 5.0, 5.0])


async def test_jitter_takes_off_up_to_its_share_and_follows_the_seed(autojump_clock: MockClock) -> None:
    async def wait(seed: int) -> float:
        async with ActorSystem(seed=seed) as system:
            ref = system.spawn(Worker, [], "w", supervise=restart(backoff=(10.0, 10.0), jitter=0.5))
            ref.tell(Raise(ValueError()))
            await ref.ask(Say(""))
            before = trio.current_time()
            ref.tell(Raise(ValueError()))
            await ref.ask(Say(""), timeout=None)
            return trio.current_time() - before

    for seed in (1, 2):
        assert await wait(seed) == pytest.approx(10.0 * (1 - 0.5 * random.Random(seed).random()))


async def test_a_busy_parent_delays_no_restart(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Busy(Worker):
        def started(self) -> None:
            self.spawn(Worker, self.log, "child", name="child", supervise=restart())

    parent = system.spawn(Busy, [], "parent", name="parent")
    await wait_all_tasks_blocked()
    ref = system.lookup("/parent/child")
    assert ref is not None
    parent.tell(Wait(100.0))
    ref.tell(Raise(ValueError()))
    assert await ref.ask(Say("up")) == "up"
    assert trio.current_time() == 0.0


@pytest.mark.parametrize(
    ("kind", "how", "lives"),
    [
        ("permanent", "kill", True),
        ("permanent", "stop now", True),
        ("permanent", "stop", True),
        ("transient", "kill", True),
        ("transient", "stop now", False),
        ("transient", "stop", False),
    ],
)
async def test_kill_and_stop_during_backoff(
    system: ActorSystem, autojump_clock: MockClock, kind: Any, how: str, lives: bool
) -> None:
    log: Log = []
    policy = restart(kind, backoff=(10.0, 10.0), jitter=0.0)
    _, worker = await crew(system, log, one_for_one(), policy)
    for _ in range(2):
        worker.tell(Raise(ValueError()))
    worker.tell(Work(1))
    await wait_all_tasks_blocked()
    assert system.observe.tree().children[0].children[0].state == "restarting"
    log.clear()
    if how == "kill":
        worker.kill()
    else:
        worker.stop(now=how == "stop now")
    await wait_all_tasks_blocked()
    if how == "stop now" and not lives:  # at once: nothing runs that would have to be waited for
        assert isinstance(await worker.terminated(), Failed)
        assert trio.current_time() == 0.0
        assert log == []
        return
    assert worker.is_alive
    await trio.sleep(21.0)
    assert worker.is_alive == lives
    assert log[:2] == [("a", "start"), ("a", 1)]  # what was queued is kept
    if how == "stop":
        assert log[2][:2] == ("a", "restart" if lives else "stop")


async def test_the_parent_stops_during_backoff(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    parent, worker = await crew(system, log, one_for_one(), restart("permanent", backoff=(10.0, 10.0)))
    for _ in range(2):
        worker.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    parent.stop()
    assert await parent.terminated() == Shutdown()
    assert trio.current_time() == 0.0
    assert isinstance(await worker.terminated(), Failed)
    await trio.sleep(20)
    assert log == [
        ("a", "restart", ValueError),
        ("a", "start"),
        ("a", "restart", ValueError),
        ("crew", "stop", Shutdown),
    ]


async def test_stop_now_while_a_restarting_hook_waits_ends_a_transient_child(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    class Slow(Worker):
        async def restarting(self, error: BaseException | None, message: Any) -> None:  # type: ignore[override]
            await trio.sleep(1)
            self.log.append("restarting")

    log: Log = []
    ref = system.spawn(Slow, log, "s", supervise=restart())
    ref.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    ref.stop(now=True)
    assert isinstance(await ref.terminated(), Failed)
    assert log == [("s", "start"), "restarting"]
    assert trio.current_time() == pytest.approx(1.0)


# ---------------------------------------------------------------- groups


PERMANENT = restart("permanent")


async def test_one_for_all_stops_in_reverse_order_and_starts_in_order(system: ActorSystem) -> None:
    log: Log = []
    _, _, b, *_ = await crew(system, log, one_for_all(), PERMANENT, restart(), PERMANENT, PERMANENT)
    b.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [
        ("b", "restart", ValueError),
        ("d", "restart", type(None)),
        ("c", "restart", type(None)),
        ("a", "restart", type(None)),
        ("a", "start"),
        ("b", "start"),
        ("c", "start"),
        ("d", "start"),
    ]


async def test_rest_for_one_takes_those_that_were_started_after(system: ActorSystem) -> None:
    log: Log = []
    _, _, b, *_ = await crew(system, log, rest_for_one(), PERMANENT, restart(), PERMANENT, PERMANENT)
    b.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [
        ("b", "restart", ValueError),
        ("d", "restart", type(None)),
        ("c", "restart", type(None)),
        ("b", "start"),
        ("c", "start"),
        ("d", "start"),
    ]


@pytest.mark.parametrize("rules", [one_for_all(), rest_for_one()], ids=["all", "rest"])
async def test_temporary_siblings_are_stopped_for_good_and_plain_ones_left_alone(
    system: ActorSystem, rules: Strategy
) -> None:
    log: Log = []
    _, a, temporary, plain = await crew(system, log, rules, restart(), restart("temporary"), "stop")
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [("a", "restart", ValueError), ("b", "stop", Shutdown), ("a", "start")]
    assert not temporary.is_alive
    assert plain.is_alive


@pytest.mark.parametrize("how", ENDS)
async def test_an_end_that_wants_no_restart_leaves_the_siblings_alone(system: ActorSystem, how: str) -> None:
    log: Log = []
    _, a, b = await crew(system, log, one_for_all(), restart("temporary"), PERMANENT)
    await end(a, how)
    assert not a.is_alive
    assert restarts(b) == 0
    assert [entry[0] for entry in log] == ["a"]


async def test_mailboxes_of_all_members_are_kept(system: ActorSystem) -> None:
    log: Log = []
    _, a, b = await crew(system, log, one_for_all(), PERMANENT, PERMANENT)
    a.tell(Raise(ValueError()))
    for n in range(3):
        a.tell(Work(n))
        b.tell(Work(n))
    await wait_all_tasks_blocked()
    assert [entry for entry in log if entry[0] == "a" and entry[1] in range(3)] == [("a", 0), ("a", 1), ("a", 2)]
    assert [entry for entry in log if entry[0] == "b" and entry[1] in range(3)] == [("b", 0), ("b", 1), ("b", 2)]


async def test_a_group_is_counted_once(system: ActorSystem) -> None:
    parent, a, b = await crew(system, [], one_for_all(max=2, within=10), restart(max=0), restart(max=0))
    for worker in (a, b):
        worker.tell(Raise(ValueError()))
        await wait_all_tasks_blocked()
    assert (restarts(a), restarts(b)) == (2, 2)
    a.tell(Raise(ValueError()))
    assert isinstance(await parent.terminated(), Failed)


async def test_two_failures_of_one_moment_are_one_group_restart(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    parent, a, b, c = await crew(system, log, one_for_all(max=1), PERMANENT, PERMANENT, PERMANENT)
    a.tell(Late(1.0))
    b.tell(Late(1.0))
    await trio.sleep(1.5)
    assert [restarts(ref) for ref in (a, b, c)] == [1, 1, 1]
    assert parent.is_alive


async def test_a_group_waits_for_its_backoff(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    policy = restart(backoff=(3.0, 3.0), jitter=0.0)
    _, a, b = await crew(system, log, one_for_all(), policy, policy)
    a.tell(Raise(ValueError()))
    await b.ask(Say(""))
    assert trio.current_time() == 0.0
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    await b.ask(Say(""))
    assert trio.current_time() == pytest.approx(3.0)
    assert (restarts(a), restarts(b)) == (2, 2)


async def test_a_sibling_that_waits_is_given_until_the_deadline_and_then_killed(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=2.0) as system:
        log: Log = []
        _, a, b, c = await crew(system, log, one_for_all(), PERMANENT, PERMANENT, PERMANENT)
        b.tell(Wait(1.0))
        c.tell(Wait(1000.0))
        await wait_all_tasks_blocked()
        a.tell(Raise(ValueError()))
        await a.ask(Say(""), timeout=None)
        assert trio.current_time() == pytest.approx(2.0)
        assert log == [
            ("a", "restart", ValueError),
            ("c", "restart", type(None)),
            ("b", "restart", type(None)),
            ("a", "start"),
            ("b", "start"),
            ("c", "start"),
        ]


async def test_the_parent_stops_during_a_group_restart(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    parent, a, b, c = await crew(system, log, one_for_all(), PERMANENT, PERMANENT, PERMANENT)
    b.tell(Wait(1.0))
    await wait_all_tasks_blocked()
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [("a", "restart", ValueError), ("c", "restart", type(None))]
    parent.stop()
    assert await parent.terminated() == Shutdown()
    assert trio.current_time() == pytest.approx(1.0)
    assert log[2:] == [("b", "stop", Shutdown), ("crew", "stop", Shutdown)]
    assert [ref.is_alive for ref in (a, b, c)] == [False, False, False]


async def test_the_parent_starts_again_during_a_group_restart(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    parent, a, b = await crew(system, log, one_for_all(max=1), PERMANENT, PERMANENT, supervise=PERMANENT)
    b.tell(Wait(1.0))
    await wait_all_tasks_blocked()
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    parent.kill()
    await wait_all_tasks_blocked()
    assert not a.is_alive
    assert not b.is_alive
    again = [system.lookup(f"/crew/{name}") for name in "ab"]
    assert all(ref is not None and ref.is_alive for ref in again)
    # The new crew has its own count and no memory of the old group.
    log.clear()
    assert again[0] is not None
    again[0].tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [
        ("a", "restart", ValueError),
        ("b", "restart", type(None)),
        ("a", "start"),
        ("b", "start"),
    ]
    assert parent.is_alive


async def test_a_member_that_fails_while_it_is_being_stopped_starts_with_the_others(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    class Untidy(Worker):
        def restarting(self, error: BaseException | None, message: Any) -> None:
            super().restarting(error, message)
            if self.called == "c":
                raise LookupError("while it is stopped")

    class Team(Crew):
        def started(self) -> None:
            self.strategy = self.rules
            for name in "abc":
                self.spawn(Untidy, self.log, name, name=name, supervise=PERMANENT)

    log: Log = []
    system.spawn(Team, log, one_for_all(max=1), (), name="crew")
    await wait_all_tasks_blocked()
    a = system.lookup("/crew/a")
    assert a is not None
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert [entry[:2] for entry in log[-3:]] == [("a", "start"), ("b", "start"), ("c", "start")]


class Fragile(Worker):
    """Fails in its constructor or in `started` as often as `plan` says."""

    plan: dict[str, list[str]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self._next("made"):
            raise OSError("factory")

    def started(self) -> None:
        super().started()
        if self._next("started"):
            raise OSError("started")

    def _next(self, where: str) -> bool:
        plan = self.plan.get(f"{self.called} {where}")
        return bool(plan) and plan.pop(0) == "bad"  # type: ignore[union-attr]


class FragileCrew(Crew):
    plan: dict[str, list[str]] = attrs.field(factory=dict)

    def started(self) -> None:
        self.strategy = self.rules
        for name, policy in zip("abcdefgh", self.policies, strict=False):
            self.spawn(functools.partial(Fragile, self.log, name, plan=self.plan), name=name, supervise=policy)


async def fragile(
    system: ActorSystem, log: Log, rules: Strategy, plan: dict[str, list[str]], *policies: Any
) -> tuple[Ref[Any], ...]:
    parent = system.spawn(functools.partial(FragileCrew, log, rules, policies, plan=plan), name="crew")
    await wait_all_tasks_blocked()
    refs: list[Any] = [parent, *(system.lookup(f"/crew/{name}") for name, _ in zip("abcdefgh", policies, strict=False))]
    log.clear()
    return tuple(refs)


async def test_a_factory_that_fails_at_a_restart_is_tried_again_and_counted(system: ActorSystem) -> None:
    log: Log = []
    plan = {"a made": ["ok", "bad", "bad", "ok"]}
    parent, a = await fragile(system, log, one_for_one(), plan, restart(max=3))
    a.tell(Raise(ValueError()))
    a.tell(Work(7))
    await wait_all_tasks_blocked()
    assert log == [("a", "restart", ValueError), ("a", "start"), ("a", 7)]
    assert system.statistics().failures == 3
    assert parent.is_alive
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert not parent.is_alive  # the fourth within the window


async def test_a_factory_that_always_fails_ends_with_the_parent(system: ActorSystem) -> None:
    log: Log = []
    parent, a = await fragile(system, log, one_for_one(), {"a made": ["ok", *["bad"] * 9]}, restart(max=3))
    a.tell(Raise(ValueError()))
    a.tell(Work(1))
    reason = await parent.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, OSError)
    assert isinstance(await a.terminated(), Failed)
    assert system.statistics().dead_letters == 1
    assert log == [("a", "restart", ValueError), ("crew", "stop", Failed)]


async def test_a_started_that_fails_at_a_restart_is_tried_again(system: ActorSystem) -> None:
    log: Log = []
    _, a = await fragile(system, log, one_for_one(), {"a started": ["ok", "bad", "ok"]}, restart())
    a.tell(Raise(ValueError()))
    a.tell(Work(7))
    await wait_all_tasks_blocked()
    assert log == [
        ("a", "restart", ValueError),
        ("a", "start"),
        ("a", "restart", OSError),
        ("a", "start"),
        ("a", 7),
    ]


async def test_a_first_start_that_fails_starts_again_too(system: ActorSystem) -> None:
    log: Log = []
    plan = {"a started": ["bad", "ok"]}
    system.spawn(functools.partial(FragileCrew, log, one_for_one(), (restart(),), plan=plan), name="crew")
    await wait_all_tasks_blocked()
    assert log == [("a", "start"), ("a", "restart", OSError), ("a", "start")]


async def test_a_factory_that_fails_within_a_group_starts_the_group_once_more(system: ActorSystem) -> None:
    log: Log = []
    policies = [PERMANENT] * 3
    _, a, b, c = await fragile(system, log, one_for_all(), {"b made": ["ok", "bad", "ok"]}, *policies)
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    # The first attempt makes a, fails at b and never comes to c.
    assert log[:3] == [("a", "restart", ValueError), ("c", "restart", type(None)), ("b", "restart", type(None))]
    assert log[-3:] == [("a", "start"), ("b", "start"), ("c", "start")]
    assert [entry[:2] for entry in log if entry[0] == "b"] == [("b", "restart"), ("b", "start")]
    assert [entry[:2] for entry in log if entry[0] == "c"] == [("c", "restart"), ("c", "start")]
    assert a.is_alive
    assert b.is_alive
    assert c.is_alive


async def test_a_started_that_fails_within_a_group_starts_the_group_once_more(system: ActorSystem) -> None:
    log: Log = []
    policies = [PERMANENT] * 3
    await_refs = await fragile(system, log, one_for_all(), {"b started": ["ok", "bad", "ok"]}, *policies)
    await_refs[1].tell(Raise(ValueError()))
    await_refs[3].tell(Work(1))
    await wait_all_tasks_blocked()
    starts = [entry for entry in log if entry[1] == "start"]
    assert starts[-3:] == [("a", "start"), ("b", "start"), ("c", "start")]
    # One `started` for each incarnation: a twice, b twice (once it failed), c at most twice.
    assert Counter(entry[0] for entry in starts)["a"] == 2
    assert Counter(entry[0] for entry in starts)["b"] == 2
    assert ("c", 1) in log


async def test_a_child_that_fails_before_its_sibling_has_started_starts_it_only_once(system: ActorSystem) -> None:
    log: Log = []
    plan = {"a started": ["bad", "ok"]}
    policies = (PERMANENT, PERMANENT)
    system.spawn(functools.partial(FragileCrew, log, one_for_all(), policies, plan=plan), name="crew")
    await wait_all_tasks_blocked()
    assert [entry for entry in log if entry[1] == "start"] == [("a", "start"), ("a", "start"), ("b", "start")]


async def test_a_group_of_1000_needs_no_recursion(system: ActorSystem) -> None:
    class Many(Actor[Any]):
        strategy = one_for_all()

        def started(self) -> None:
            for n in range(1000):
                self.spawn(Worker, [], name=str(n), supervise=PERMANENT)

    parent = system.spawn(Many, name="many")
    await wait_all_tasks_blocked()
    first = system.lookup("/many/0")
    last = system.lookup("/many/999")
    assert first is not None
    assert last is not None
    first.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert restarts(first) == restarts(last) == 1
    assert parent.is_alive


# ---------------------------------------------------------------- children of whoever starts again


async def test_children_are_stopped_before_their_parent_starts_again(system: ActorSystem) -> None:
    log: Log = []
    parent, a, b = await crew(system, log, one_for_one(), "stop", PERMANENT, supervise=PERMANENT)
    system.lifecycle.task_failed(parent, None, ValueError())  # type: ignore[arg-type]
    await wait_all_tasks_blocked()
    assert log == [
        ("b", "stop", Shutdown),
        ("a", "stop", Shutdown),
        ("crew", "restart", ValueError),
        ("a", "start"),
        ("b", "start"),
    ]
    assert not a.is_alive
    assert not b.is_alive
    assert system.lookup("/crew/a") is not a


# ---------------------------------------------------------------- upwards


async def test_escalate_makes_it_the_parents_failure(system: ActorSystem) -> None:
    log: Log = []
    parent, a, _ = await crew(system, log, one_for_one(), "escalate", PERMANENT, supervise=restart())
    error = ValueError()
    a.tell(Raise(error))
    await wait_all_tasks_blocked()
    assert await a.terminated() == Failed(error)
    assert restarts(parent) == 1
    assert log == [
        ("a", "stop", Failed),
        ("b", "stop", Shutdown),
        ("crew", "restart", ValueError),
        ("a", "start"),
        ("b", "start"),
    ]


@pytest.mark.parametrize("how", ["normal", "stop", "kill"])
async def test_escalate_is_for_failures_only(system: ActorSystem, how: str) -> None:
    parent, a = await crew(system, [], one_for_one(), "escalate")
    await end(a, how)
    assert not a.is_alive
    assert parent.is_alive


async def test_a_top_level_actor_that_escalates_ends_the_block_with_its_error() -> None:
    error = ValueError("out of the block")
    with pytest.raises(ValueError, match="out of the block") as caught:
        async with ActorSystem() as system:
            ref = system.spawn(Worker, [], supervise="escalate")
            ref.tell(Raise(error))
            await trio.sleep_forever()
    assert caught.value is error


async def test_a_top_level_actor_that_ends_too_often_ends_the_block() -> None:
    with pytest.raises(ValueError, match="once more"):
        async with ActorSystem() as system:
            ref = system.spawn(Worker, [], supervise=restart(max=1))
            ref.tell(Raise(ValueError("once")))
            ref.tell(Raise(ValueError("once more")))
            await trio.sleep_forever()


async def test_an_escalation_climbs_one_level_at_a_time() -> None:
    class Level(Actor[Any]):
        log: Log
        n: int

        def started(self) -> None:
            if self.n:
                self.spawn(Level, self.log, self.n - 1, name=str(self.n - 1), supervise="escalate")
            else:
                self.spawn(Worker, self.log, "leaf", name="leaf", supervise="escalate")

        def stopping(self, reason: Reason) -> None:
            self.log.append((self.n, type(reason)))

    log: Log = []
    with pytest.raises(ValueError, match="leaf"):
        async with ActorSystem() as system:
            system.spawn(Level, log, 2, name="2", supervise="escalate")
            await wait_all_tasks_blocked()
            leaf = system.lookup("/2/1/0/leaf")
            assert leaf is not None
            leaf.tell(Raise(ValueError("leaf")))
            await trio.sleep_forever()
    assert log == [("leaf", "start"), ("leaf", "stop", Failed), (0, Failed), (1, Failed), (2, Failed)]


async def test_an_escalation_cancels_the_parents_handler(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Busy(Worker):
        def started(self) -> None:
            self.spawn(Worker, self.log, "child", name="child", supervise="escalate")

    parent: Ref[Any] = system.spawn(Busy, [], "parent", name="parent")
    await wait_all_tasks_blocked()
    ref = system.lookup("/parent/child")
    assert ref is not None
    parent.tell(Wait(100.0))
    await wait_all_tasks_blocked()
    ref.tell(Raise(ValueError()))
    assert isinstance(await parent.terminated(), Failed)
    assert trio.current_time() == 0.0


# ---------------------------------------------------------------- values out of range


@pytest.mark.parametrize(
    "keywords",
    [
        {"kind": "sometimes"},
        {"max": -1},
        {"within": 0},
        {"within": -1.0},
        {"backoff": (2.0, 1.0)},
        {"backoff": (-1.0, 1.0)},
        {"jitter": 1.1},
        {"jitter": -0.1},
    ],
    ids=str,
)
def test_restart_refuses_values_out_of_range(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        restart(**keywords)


async def test_supervise_must_be_known(system: ActorSystem) -> None:
    with pytest.raises(ConfigurationError, match="supervise is"):
        system.spawn(Worker, [], supervise="always")  # type: ignore[call-overload]


# ---------------------------------------------------------------- Supervisor


def worker(log: Log, name: str, **keywords: Any) -> Any:
    return child(Worker, log, name, name=name, **keywords)


async def test_supervisor_starts_its_list_in_order_and_supervises_it(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a"), worker(log, "b"), worker(log, "c")], rest_for_one(), name="team")
    refs = await team.ask(Children())
    assert [ref.path for ref in refs] == ["/team/a", "/team/b", "/team/c"]
    assert log == [("a", "start"), ("b", "start"), ("c", "start")]
    log.clear()
    refs[1].kill()
    await wait_all_tasks_blocked()
    assert log == [("b", "restart", type(None)), ("c", "restart", type(None)), ("b", "start"), ("c", "start")]
    assert await team.ask(Children()) == refs


async def test_supervisor_starts_and_stops_children_at_run_time(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a")], name="team")
    late = await team.ask(StartChild(worker(log, "late", supervise=PERMANENT)))
    assert late.path == "/team/late"
    assert await late.ask(Say("here")) == "here"
    assert await team.ask(StopChild("late")) is True
    assert not late.is_alive
    assert await late.terminated() == Shutdown()
    assert await team.ask(StopChild("late")) is False
    assert [ref.path for ref in await team.ask(Children())] == ["/team/a"]
    again = await team.ask(StartChild(worker(log, "late")))
    assert again is not late


async def test_a_child_that_cannot_be_started_is_an_answer_and_no_failure(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    team = system.spawn(Supervisor, [worker([], "a")], name="team")
    with pytest.raises(NameTaken):
        await team.ask(StartChild(worker([], "a")))

    def broken() -> Worker:
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        await team.ask(StartChild(child(broken)))
    team.tell(StartChild(child(broken)))
    await wait_all_tasks_blocked()
    assert team.is_alive
    assert "/team could not start a child" in caplog.text
    assert len(await team.ask(Children())) == 1


async def test_stop_child_kills_after_the_deadline(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=2.0) as system:
        team = system.spawn(Supervisor, [worker([], "a", supervise=PERMANENT)], name="team")
        (ref,) = await team.ask(Children())
        ref.tell(Wait(1000.0))
        await wait_all_tasks_blocked()
        assert await team.ask(StopChild("a"), timeout=None) is True
        assert trio.current_time() == pytest.approx(2.0)
        assert await ref.terminated() == Shutdown()
        assert await team.ask(Children()) == []


async def test_a_supervisor_that_starts_again_has_the_children_of_its_list(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a", supervise=restart(max=0))], name="team", supervise=restart())
    await team.ask(StartChild(worker(log, "late")))
    first, late = await team.ask(Children())
    first.kill()
    await wait_all_tasks_blocked()
    (again,) = await team.ask(Children())
    assert again.path == "/team/a"
    assert again is not first
    assert not late.is_alive
    assert restarts(team) == 1


async def test_child_ref_finds_the_living(system: ActorSystem) -> None:
    found: Log = []

    class Looking(Supervisor):
        def started(self) -> None:
            super().started()
            found.extend([self.child_ref("a"), self.child_ref("nobody")])

    system.spawn(Looking, [worker([], "a")], name="team")
    await wait_all_tasks_blocked()
    assert found == [system.lookup("/team/a"), None]


def test_a_supervisor_checks_its_list() -> None:
    with pytest.raises(ConfigurationError, match="described by child"):
        Supervisor([Worker])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="different names"):
        Supervisor([worker([], "a"), worker([], "a")])
    with pytest.raises(TypeError):
        Supervisor([], "one_for_one")  # type: ignore[arg-type]


async def test_supervisors_nest(system: ActorSystem) -> None:
    log: Log = []
    inner = child(Supervisor, [worker(log, "leaf", supervise=restart(max=1))], name="inner", supervise=restart(max=1))
    top = system.spawn(Supervisor, [inner], name="top", supervise="stop")
    await wait_all_tasks_blocked()
    for _ in range(4):  # a restart of the leaf, of inner, of the leaf, and then it is too much for the top
        leaf = system.lookup("/top/inner/leaf")
        assert leaf is not None
        leaf.kill()
        await wait_all_tasks_blocked()
    assert isinstance(await top.terminated(), Failed)
    assert [entry[1] for entry in log] == ["start", "restart", "start", "stop", "start", "restart", "start", "stop"]
