"""Where a failure goes that is one too many."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Failed, Reason, Ref, Shutdown, handles, one_for_one, restart

from .conftest import PERMANENT, Late, Log, Raise, Wait, Worker, crew, end, restarts


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


async def test_the_final_stop_of_a_child_that_escalates_is_no_failure_of_its_parent(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    """The child has failed, and its hook is at work, when its parent is asked to stop."""

    class Child(Actor[Raise]):
        async def stopping(self, reason: Reason) -> None:
            await trio.sleep(1)

        @handles
        def fail(self, m: Raise) -> None:
            raise m.error

    class Parent(Actor[Any]):
        def started(self) -> None:
            self.spawn(Child, name="child", supervise="escalate")

    parent = system.spawn(Parent, name="parent")
    await wait_all_tasks_blocked()
    child = system.lookup("/parent/child")
    assert child is not None
    child.tell(Raise(ValueError()))
    await trio.sleep(0.5)
    parent.stop()
    assert await parent.terminated() == Shutdown()
    assert trio.current_time() == 1
    assert system.statistics().failures == 1


async def test_nor_is_that_of_one_that_was_stopped_before_and_fails_then(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    parent, a = await crew(system, [], one_for_one(), "escalate")
    a.tell(Late(1.0))
    await wait_all_tasks_blocked()
    a.stop(now=True)
    parent.stop(now=True)
    assert await parent.terminated() == Shutdown()
    assert isinstance(await a.terminated(), Failed)
    assert trio.current_time() == 1


async def test_a_child_that_fails_while_its_parent_ends_does_not_restart(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    """Its turn to be stopped has not come: a later sibling still stops."""
    log: Log = []

    class Slow(Actor[Any]):
        async def stopping(self, reason: Reason) -> None:
            await trio.sleep(1)

    class Parent(Actor[Any]):
        def started(self) -> None:
            self.spawn(Worker, log, "child", name="child", supervise=PERMANENT)
            self.spawn(Slow)

    parent = system.spawn(Parent, name="parent")
    await wait_all_tasks_blocked()
    child = system.lookup("/parent/child")
    assert child is not None
    parent.stop()
    await trio.sleep(0.5)
    error = ValueError()
    child.tell(Raise(error))
    assert await child.terminated() == Failed(error)
    assert trio.current_time() == 0.5
    assert await parent.terminated() == Shutdown()
    assert log == [("child", "start"), ("child", "stop", Failed)]
    assert system.statistics().restarts == 0
