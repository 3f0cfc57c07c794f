"""Who is started again after which end, what a restart keeps, and which errors need none."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorRestarted,
    ActorSystem,
    Down,
    Failed,
    Killed,
    Normal,
    Ref,
    Shutdown,
    bounded,
    handles,
    one_for_one,
    restart,
)
from levada.framework.errors import ActorStopped

from .conftest import ENDS, PERMANENT, Log, Raise, Say, Wait, Work, Worker, crew, end, restarts

# ---------------------------------------------------------------- kinds


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
        Worker, log, "w", mailbox=bounded(1), supervise=restart(initial_backoff=1.0, max_backoff=1.0, jitter=0)
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


# ---------------------------------------------------------------- children of whoever starts again


async def test_children_are_stopped_before_their_parent_starts_again(system: ActorSystem) -> None:
    log: Log = []
    parent, a, b = await crew(system, log, one_for_one(), "stop", PERMANENT, supervise=PERMANENT)
    system.lifecycle.task_failed(parent, ValueError())  # type: ignore[arg-type]
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
