"""How often a child is started again, and after how long."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import ActorSystem, Failed, Killed, Shutdown, one_for_all, one_for_one, rest_for_one, restart
from levada.framework.errors import ActorError, ConfigurationError
from levada.framework.supervision import delay, record

from .conftest import Log, Raise, Say, Wait, Work, Worker, crew, restarts

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
    policy = restart(initial_backoff=first, max_backoff=first * factor, jitter=jitter)
    wait = delay(policy, in_a_row, random.Random(seed))
    if in_a_row == 1:
        assert wait == 0.0
    else:
        whole = min(first * factor, first * 2.0 ** min(in_a_row - 2, 64))
        assert whole * (1 - jitter) <= wait <= whole


async def test_backoff_doubles_to_its_most_in_virtual_time(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        log: Log = []
        policy = restart(max=100, within=1000.0, initial_backoff=1.0, max_backoff=5.0, jitter=0.0)
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
            ref = system.spawn(Worker, [], "w", supervise=restart(initial_backoff=10.0, max_backoff=10.0, jitter=0.5))
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
    policy = restart(kind, initial_backoff=10.0, max_backoff=10.0, jitter=0.0)
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
    parent, worker = await crew(
        system, log, one_for_one(), restart("permanent", initial_backoff=10.0, max_backoff=10.0)
    )
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


# ---------------------------------------------------------------- values out of range


@pytest.mark.parametrize(
    "keywords",
    [
        {"kind": "sometimes"},
        {"max": -1},
        {"within": 0},
        {"within": -1.0},
        {"initial_backoff": 2.0, "max_backoff": 1.0},
        {"initial_backoff": -1.0},
        {"jitter": 1.1},
        {"jitter": -0.1},
        {"max": "3"},
        {"within": "10"},
        {"jitter": "0.1"},
    ],
    ids=str,
)
def test_restart_refuses_values_out_of_range(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        restart(**keywords)


@pytest.mark.parametrize("strategy", [one_for_all, rest_for_one])
@pytest.mark.parametrize("keywords", [{"max": -1}, {"max": "3"}, {"within": 0}], ids=str)
def test_strategies_refuse_values_out_of_range(strategy: Callable[..., object], keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="wanted 0 or more restarts in more than 0 seconds"):
        strategy(**keywords)


async def test_supervise_must_be_known(system: ActorSystem) -> None:
    with pytest.raises(ConfigurationError, match="supervise is"):
        system.spawn(Worker, [], supervise="always")  # type: ignore[call-overload]
