"""Strategies: siblings that are stopped and started together."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Failed,
    Ref,
    Shutdown,
    Strategy,
    one_for_all,
    one_for_one,
    rest_for_one,
    restart,
)

from .conftest import ENDS, PERMANENT, Crew, Late, Log, Raise, Say, Wait, Work, Worker, crew, end, restarts


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


@pytest.mark.parametrize("policy", ["stop", "escalate"])
@pytest.mark.parametrize("rules", [one_for_all(), rest_for_one()], ids=["all", "rest"])
async def test_temporary_siblings_are_stopped_for_good_and_plain_ones_left_alone(
    system: ActorSystem, rules: Strategy, policy: str
) -> None:
    log: Log = []
    _, a, temporary, plain = await crew(system, log, rules, restart(), restart("temporary"), policy)
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
    policy = restart(initial_backoff=3.0, max_backoff=3.0, jitter=0.0)
    _, a, b = await crew(system, log, one_for_all(), policy, policy)
    a.tell(Raise(ValueError()))
    await b.ask(Say(""))
    assert trio.current_time() == 0.0
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    await b.ask(Say(""))
    assert trio.current_time() == pytest.approx(3.0)
    assert (restarts(a), restarts(b)) == (2, 2)


@pytest.mark.parametrize("busy", ["b", "c"])
async def test_a_group_that_has_grown_during_its_backoff_starts_when_all_have_ended(
    system: ActorSystem, autojump_clock: MockClock, busy: str
) -> None:
    log: Log = []
    policy = restart(initial_backoff=1.0, max_backoff=1.0, jitter=0.0)
    _, a, b, c, d = await crew(system, log, rest_for_one(), policy, policy, policy, policy)
    for _ in range(2):
        d.tell(Raise(ValueError()))  # the first restart is at once
        await wait_all_tasks_blocked()
    (b if busy == "b" else c).tell(Wait(3.0))
    await trio.sleep(0.5)
    log.clear()
    a.tell(Raise(ValueError()))
    stopped = [("c", "restart", type(None)), ("b", "restart", type(None))]
    await trio.sleep(
        2.0
    )  # the backoff of d is over, one is still busy, and if that is c, then b waits for its turn to be stopped
    assert log == [("a", "restart", ValueError), *(stopped[:1] if busy == "b" else [])]
    await a.ask(Say(""))
    assert trio.current_time() == pytest.approx(4.0)
    assert log[1:] == [*stopped, *((name, "start") for name in "abcd")]


async def test_a_member_that_leaves_during_the_backoff_does_not_cut_the_next_one_short(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    policy = restart(initial_backoff=2.0, jitter=0.0)
    _, a, b, c = await crew(system, [], one_for_all(), policy, policy, policy)
    for _ in range(2):
        a.tell(Raise(ValueError()))
        await wait_all_tasks_blocked()
    await trio.sleep(1.0)
    c.stop(now=True)
    await trio.sleep(1.5)  # a and b have started at 2.0
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    await b.ask(Say(""), timeout=None)
    assert trio.current_time() == pytest.approx(2.5 + 4.0)
    assert (restarts(a), restarts(b), c.is_alive) == (3, 3, False)


async def test_members_are_stopped_one_after_the_other_also_if_one_fails_meanwhile(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    _, a, _, c, d = await crew(system, log, one_for_all(), PERMANENT, PERMANENT, PERMANENT, PERMANENT)
    d.tell(Wait(1.0))
    await wait_all_tasks_blocked()
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    c.tell(Raise(LookupError()))
    await wait_all_tasks_blocked()
    assert log == [("a", "restart", ValueError), ("c", "restart", LookupError)]
    await a.ask(Say(""))
    assert log[2:] == [
        ("d", "restart", type(None)),
        ("b", "restart", type(None)),
        *((name, "start") for name in "abcd"),
    ]


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


async def test_members_that_the_group_has_not_stopped_are_told_that_the_parent_stops(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    parent, a, _, c = await crew(system, log, one_for_all(), PERMANENT, PERMANENT, PERMANENT)
    c.tell(Wait(1.0))
    await wait_all_tasks_blocked()
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    parent.stop(now=True)
    assert await parent.terminated() == Shutdown()
    assert log == [("a", "restart", ValueError), *((name, "stop", Shutdown) for name in ("c", "b", "crew"))]


async def test_a_group_does_not_start_in_a_parent_that_stops(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    policy = restart(initial_backoff=3.0, jitter=0.0)
    parent, a, _, busy = await crew(system, log, one_for_all(), policy, policy, "stop")
    busy.tell(Wait(5.0))
    for _ in range(2):
        a.tell(Raise(ValueError()))
        await wait_all_tasks_blocked()
    log.clear()
    parent.stop(now=True)
    assert await parent.terminated() == Shutdown()
    assert trio.current_time() == pytest.approx(5.0)
    assert log == [("c", "stop", Shutdown), ("crew", "stop", Shutdown)]


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


async def test_a_factory_that_kills_what_it_fails_to_make_has_the_hook_called_once(system: ActorSystem) -> None:
    log: Log = []
    made: list[Worker] = []

    def make() -> Worker:
        if len(made) == 1:
            made.append(made[0])
            made[0].ref.kill()
            raise OSError("factory")
        made.append(Worker(log, "a"))
        return made[-1]

    class Parent(Actor[Any]):
        def started(self) -> None:
            self.spawn(make, name="a", supervise=restart())

    system.spawn(Parent, name="crew")
    await wait_all_tasks_blocked()
    a = system.lookup("/crew/a")
    assert a is not None
    a.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
    assert log == [("a", "start"), ("a", "restart", ValueError), ("a", "start")]


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
