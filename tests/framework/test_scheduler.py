"""Order, fairness, the cell of signals, and the dangers of a hand-driven run queue, each by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.surroundings import measure_by
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Down,
    Exit,
    Failed,
    Killed,
    MailboxPolicy,
    Ref,
    Reply,
    Shutdown,
    bounded,
    handles,
    message,
    restart,
    unbounded,
)
from levada.framework.errors import ActorError, ActorStopped, EndOfChannel, MailboxFull

from .conftest import Get, Item, Run, Runner


@message
class Question(Asks[int]):
    sender: int
    n: int


# ---------------------------------------------------------------- order


class Sync(Actor[Item | Question]):
    seen: list[tuple[int, int]]

    @handles
    def take(self, m: Item | Question) -> int:
        self.seen.append((m.sender, m.n))
        return m.n


class Async(Actor[Item | Question]):
    """Does not wait, so its handler never becomes a task."""

    seen: list[tuple[int, int]]

    @handles
    async def take(self, m: Item | Question) -> int:
        self.seen.append((m.sender, m.n))
        return m.n


class Waiting(Actor[Item | Question]):
    seen: list[tuple[int, int]]

    @handles
    async def take(self, m: Item | Question) -> int:
        if m.n % 2:
            await trio.lowlevel.checkpoint()
        self.seen.append((m.sender, m.n))
        if m.n % 3:
            await trio.lowlevel.checkpoint()
        return m.n


class Failing(Actor[Item | Question]):
    """Starts over now and then."""

    seen: list[tuple[int, int]]

    @handles
    def take(self, m: Item | Question) -> int:
        self.seen.append((m.sender, m.n))
        if type(m) is Item and m.n % 4 == 3:
            raise ValueError("now and then")
        return m.n


class Loop(Actor[Item | Question]):
    seen: list[tuple[int, int]]

    async def run(self) -> None:
        async for m in self.mailbox:
            self.seen.append((m.sender, m.n))
            if isinstance(m, Question):
                self.reply_later().send(m.n)


RECEIVERS: list[type[Any]] = [Sync, Async, Waiting, Failing, Loop]
POLICIES = [unbounded(), bounded(1), bounded(3), bounded(2, overflow="raise")]
STEPS = st.lists(st.tuples(st.sampled_from(["tell", "send", "ask", "rest"]), st.integers(0, 2)), max_size=15)


@given(
    receivers=st.lists(st.tuples(st.sampled_from(RECEIVERS), st.sampled_from(POLICIES)), min_size=1, max_size=3),
    scripts=st.lists(STEPS, min_size=1, max_size=3),
    inside=st.booleans(),
)
async def test_messages_of_one_sender_arrive_in_order_whatever_the_mix(
    receivers: list[tuple[type[Any], MailboxPolicy]], scripts: list[list[tuple[str, int]]], inside: bool
) -> None:
    """First in, first out for each pair; asks included, restarts included, bounds included."""
    seen: list[list[tuple[int, int]]] = [[] for _ in receivers]
    sent: dict[tuple[int, int], list[int]] = {}

    async with ActorSystem(seed=0) as system:
        refs: list[Ref[Any]] = [
            system.spawn(kind, log, mailbox=policy, supervise=restart(max=1000))
            for (kind, policy), log in zip(receivers, seen, strict=True)
        ]

        async def follow(sender: int, script: list[tuple[str, int]]) -> None:
            for n, (step, where) in enumerate(script):
                where %= len(refs)
                put = sent.setdefault((sender, where), [])
                try:
                    if step == "tell":
                        refs[where].tell(Item(sender, n))
                        put.append(n)
                    elif step == "send":
                        await refs[where].send(Item(sender, n))
                        put.append(n)
                    elif step == "ask":
                        put.append(n)
                        assert await refs[where].ask(Question(sender, n)) == n
                    else:
                        await trio.lowlevel.checkpoint()
                except MailboxFull:
                    if step == "ask":
                        put.remove(n)

        if inside:
            for sender, script in enumerate(scripts):
                system.spawn(Runner).tell(Run(functools.partial(follow, sender, script)))
            await wait_all_tasks_blocked()
        else:
            async with trio.open_nursery() as nursery:
                for sender, script in enumerate(scripts):
                    nursery.start_soon(follow, sender, script)
        await wait_all_tasks_blocked()
        assert [system.statistics().dead_letters, system.statistics().waiting] == [
            0,
            sum(kind is Loop for kind, _ in receivers),
        ]
    for (sender, where), numbers in sent.items():
        assert [n for who, n in seen[where] if who == sender] == numbers


# ---------------------------------------------------------------- fairness


class Clock:
    """Moves on by a tenth of a millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


async def test_a_flood_lets_trio_and_other_actors_have_their_turns() -> None:
    measure_by(Clock())
    async with ActorSystem() as system:
        turns: list[int] = []

        class Flood(Actor[Item]):
            @handles
            def item(self, m: Item) -> None:
                if len(turns) < 50:
                    self.ref.tell(m)
                    turns.append(-1)

        flood, other = system.spawn(Flood), system.spawn(Runner)
        flood.tell(Item(0, 0))
        for n in range(5):
            other.tell(Run(functools.partial(turns.append, n)))
            await trio.lowlevel.checkpoint()
        assert [n for n in turns if n >= 0] == [0, 1, 2, 3, 4][: len([n for n in turns if n >= 0])]
        # A slice is 0.5 ms and each turn costs one look at the clock, so no more than a few turns come between checkpoints.
        assert len(turns) < 50
        await wait_all_tasks_blocked()
        assert [n for n in turns if n >= 0] == [0, 1, 2, 3, 4]


async def test_a_cell_with_a_long_queue_does_not_starve_the_others(system: ActorSystem) -> None:
    order: list[str] = []

    class Busy(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            order.append("busy")

    busy, other = system.spawn(Busy), system.spawn(Runner)
    for n in range(1000):
        busy.tell(Item(0, n))
    other.tell(Run(lambda: order.append("other")))
    await wait_all_tasks_blocked()
    assert order.index("other") <= 128
    assert order.count("busy") == 1000


async def test_waiting_handlers_cost_a_task_each_and_idle_actors_none(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    refs = [system.spawn(Runner) for _ in range(1000)]
    for ref in refs:
        ref.tell(Run(functools.partial(trio.sleep, 1)))
    await wait_all_tasks_blocked()
    assert system.statistics().waiting == 1000
    assert 1000 <= system.statistics().workers <= 1001
    assert await refs[0].ask(Get(), timeout=None) == 0
    assert trio.current_time() - start == pytest.approx(1, abs=0.05)
    await wait_all_tasks_blocked()
    assert system.statistics().waiting == 0
    assert system.statistics().workers <= 9


async def test_other_messages_wait_while_a_handler_waits_and_other_actors_do_not(system: ActorSystem) -> None:
    gate = trio.Event()
    seen: list[int] = []
    held, free = system.spawn(Runner, seen), system.spawn(Runner)
    held.tell(Run(gate.wait))
    held.tell(Item(0, 1))
    free.tell(Item(0, 2))
    assert await free.ask(Get()) == 1
    assert seen == []
    gate.set()
    assert await held.ask(Get()) == 1


# ---------------------------------------------------------------- the cell of signals


async def test_stop_now_and_kill_overtake_what_is_queued(system: ActorSystem) -> None:
    ends: list[Callable[[Ref[Any]], None]] = [lambda ref: ref.stop(now=True), lambda ref: ref.kill()]
    for end in ends:
        seen: list[int] = []
        ref = system.spawn(Runner, seen)
        for n in range(10):
            ref.tell(Item(0, n))
        end(ref)
        assert isinstance(await ref.terminated(), Shutdown | Killed)
        assert seen == []


async def test_a_kill_from_its_own_batch_ends_an_actor_after_the_running_handler(system: ActorSystem) -> None:
    """The sync handler is not interrupted; the next message of the same batch is not handled."""
    log: list[str] = []

    class Ends(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            log.append(f"begin {m.n}")
            if m.n == 1:
                self.ref.kill()
            log.append(f"end {m.n}")

    ref = system.spawn(Ends)
    for n in range(4):
        ref.tell(Item(0, n))
    assert await ref.terminated() == Killed()
    assert log == ["begin 0", "end 0", "begin 1", "end 1"]


async def test_a_kill_by_another_actor_comes_before_that_ones_next_message(system: ActorSystem) -> None:
    log: list[str] = []
    victim_seen: list[int] = []
    victim = system.spawn(Runner, victim_seen)
    killer = system.spawn(Runner)
    victim.tell(Run(lambda: log.append("victim runs")))
    killer.tell(Run(victim.kill))
    killer.tell(Run(lambda: log.append(f"killer goes on, victim alive: {victim.is_alive}")))
    victim.tell(Item(0, 1))
    await victim.terminated()
    await wait_all_tasks_blocked()
    assert log == ["victim runs", "killer goes on, victim alive: False"]
    # Both were told before anything ran: the batch that held the victim's message was over when it was killed, or was not.
    assert victim_seen in ([1], [])


@message
class Tie:
    ref: Ref[Any]


class Watcher(Actor[Down | Exit | Tie | Item | Run]):
    trap_exits = True
    log: list[str]

    @handles
    def down(self, m: Down) -> None:
        self.log.append(f"down {m.tag} {type(m.reason).__name__}")

    @handles
    def exit(self, m: Exit) -> None:
        self.log.append(f"exit {type(m.reason).__name__}")

    @handles
    def item(self, m: Item) -> None:
        self.log.append(f"item {m.n}")

    @handles
    async def run_it(self, m: Run) -> None:
        await m.function()

    @handles
    def tie(self, m: Tie) -> None:
        self.watch(m.ref, tag="t")
        self.link(m.ref)


async def test_down_and_exit_overtake_what_is_queued(system: ActorSystem) -> None:
    log: list[str] = []
    gate = trio.Event()
    watched = system.spawn(Runner)
    watcher = system.spawn(Watcher, log)
    watcher.tell(Tie(watched))
    watcher.tell(Run(gate.wait))
    await wait_all_tasks_blocked()
    for n in range(3):
        watcher.tell(Item(0, n))
    watched.kill()
    await watched.terminated()
    assert log == []
    gate.set()
    await wait_all_tasks_blocked()
    assert sorted(log[:2]) == ["down t Killed", "exit Killed"]
    assert log[2:] == ["item 0", "item 1", "item 2"]


async def test_an_exit_signal_overtakes_what_is_queued_and_cancels_a_handler_that_waits(system: ActorSystem) -> None:
    seen: list[int] = []

    class Linked(Runner):
        other: Ref[Any] | None = None

        def started(self) -> None:
            assert self.other is not None
            self.link(self.other)

    for waits in (False, True):
        other = system.spawn(Runner)
        ref = system.spawn(Linked, seen, other)
        await wait_all_tasks_blocked()
        if waits:
            ref.tell(Run(trio.sleep_forever))
            await wait_all_tasks_blocked()
        ref.tell(Item(0, 1))
        other.kill()
        assert await ref.terminated() == Killed()
        assert seen == []


# ---------------------------------------------------------------- dangers (a): kills that come too late, scopes


async def others_are_unharmed(system: ActorSystem) -> None:
    """Let handlers wait on all workers there are: a cancelled scope that was left behind would hit one of them."""
    others = [system.spawn(Runner) for _ in range(12)]
    done: list[int] = []

    async def wait() -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        done.append(1)

    for _ in range(2):
        for ref in others:
            ref.tell(Run(wait))
        await wait_all_tasks_blocked()
    assert len(done) == 24
    assert all(ref.is_alive for ref in others)
    for ref in others:
        ref.stop()


@pytest.mark.parametrize("order", ["wake first", "kill first"])
async def test_a_a_kill_takes_effect_though_the_wake_up_was_scheduled(system: ActorSystem, order: str) -> None:
    for _ in range(10):
        gate = trio.Event()
        seen: list[int] = []
        ref = system.spawn(Runner, seen)
        ref.tell(Run(gate.wait))
        await wait_all_tasks_blocked()
        ref.tell(Item(0, 1))
        for step in (gate.set, ref.kill) if order == "wake first" else (ref.kill, gate.set):
            step()
        assert await ref.terminated() == Killed()
        assert seen == []
        await others_are_unharmed(system)


async def test_a_a_kill_takes_effect_though_the_handler_finishes_first(system: ActorSystem) -> None:
    gate = trio.Event()
    seen: list[int] = []

    async def deaf() -> None:
        with trio.CancelScope(shield=True):
            await gate.wait()
        seen.append(-1)

    ref = system.spawn(Runner, seen)
    ref.tell(Run(deaf))
    await wait_all_tasks_blocked()
    ref.tell(Item(0, 1))
    ref.kill()
    await wait_all_tasks_blocked()
    assert ref.is_alive
    gate.set()
    assert await ref.terminated() == Killed()
    assert seen == [-1]
    await others_are_unharmed(system)


async def test_a_a_worker_opens_a_new_scope_before_any_other_cell_runs(system: ActorSystem) -> None:
    """Killed and told to wait in one go, many times over, on the same few workers."""
    for _ in range(20):
        ref = system.spawn(Runner)
        ref.tell(Run(trio.sleep_forever))
        await wait_all_tasks_blocked()
        ref.kill()
        other = system.spawn(Runner)
        finished = trio.Event()

        async def wait(finished: trio.Event = finished) -> None:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            finished.set()

        other.tell(Run(wait))
        assert await ref.terminated() == Killed()
        with trio.fail_after(60):
            await finished.wait()
        assert other.is_alive


# ---------------------------------------------------------------- dangers (b): groups


async def test_b_cancelled_inside_a_group_counts_as_killed(system: ActorSystem) -> None:
    async def nurseries() -> None:
        async with trio.open_nursery() as outer:
            outer.start_soon(trio.sleep_forever)
            async with trio.open_nursery() as inner:
                inner.start_soon(trio.sleep_forever)
                inner.start_soon(trio.sleep_forever)

    async def by_hand() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            raise BaseExceptionGroup("kept", [BaseExceptionGroup("inner", [error])]) from None

    for function in (nurseries, by_hand):
        ref = system.spawn(Runner, supervise="escalate")
        ref.tell(Run(function))
        await wait_all_tasks_blocked()
        ref.kill()
        assert await ref.terminated() == Killed()
    assert system.statistics().failures == 0
    await others_are_unharmed(system)


async def test_b_a_group_with_an_error_besides_counts_as_the_error(system: ActorSystem) -> None:
    async def fails_in_clean_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("clean-up")

    async def mixed() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fails_in_clean_up)

    ref = system.spawn(Runner)
    ref.tell(Run(mixed))
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, BaseExceptionGroup)
    assert [repr(error) for error in reason.error.exceptions] == ["ValueError('clean-up')"]
    await others_are_unharmed(system)


# ---------------------------------------------------------------- dangers (c): clean-up that fails


async def test_c_an_error_in_the_clean_up_of_a_killed_handler_is_that_actors_failure(system: ActorSystem) -> None:
    async def fails_in_clean_up() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise ValueError("clean-up") from None

    bystander = system.spawn(Runner)
    ref = system.spawn(Runner)
    ref.tell(Run(fails_in_clean_up))
    await wait_all_tasks_blocked()
    ref.kill()
    reason = await ref.terminated()
    assert isinstance(reason, Failed)
    assert repr(reason.error) == "ValueError('clean-up')"
    assert system.statistics().failures == 1
    assert await bystander.ask(Get()) == 0
    await others_are_unharmed(system)


async def test_c_the_system_itself_goes_on_and_ends_in_order(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_in_clean_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("clean-up")

    async with ActorSystem() as system:
        ref = system.spawn(Runner, name="dirty")
        ref.tell(Run(fails_in_clean_up))
        await wait_all_tasks_blocked()
        ref.kill()
    assert "/dirty failed while it handled Run" in caplog.messages


# ---------------------------------------------------------------- the cap of waiting handlers


async def test_cap_one_waiting_handler_too_many_fails_and_only_that_one() -> None:
    async with ActorSystem(max_waiting=2) as system:
        refs = [system.spawn(Runner, name=f"r{n}") for n in range(3)]
        gate = trio.Event()
        finished: list[int] = []

        async def wait(n: int) -> None:
            await gate.wait()
            finished.append(n)

        for n, ref in enumerate(refs):
            ref.tell(Run(functools.partial(wait, n)))
            await wait_all_tasks_blocked()
        reason = await refs[2].terminated()
        assert isinstance(reason, Failed)
        assert isinstance(reason.error, ActorError)
        assert str(reason.error) == "2 handlers wait already (raise max_waiting, or let fewer wait)"
        assert system.statistics().waiting == 2
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(finished) == [0, 1]
        assert [ref.is_alive for ref in refs] == [True, True, False]
        assert system.statistics().failures == 1


async def test_cap_an_asker_hears_of_it_and_a_supervised_actor_starts_again() -> None:
    gate = trio.Event()

    @message
    class Wait(Asks[str]):
        pass

    class Waits(Actor[Wait | Get]):
        @handles
        async def wait(self, m: Wait) -> str:
            await gate.wait()
            return "waited"

        @handles
        def get(self, m: Get) -> int:
            return 1

    async with ActorSystem(max_waiting=1) as system:
        first, second = system.spawn(Waits), system.spawn(Waits, supervise=restart())
        first.tell(Wait())
        await wait_all_tasks_blocked()
        with pytest.raises(ActorStopped):
            await second.ask(Wait())
        assert await second.ask(Get()) == 1
        assert system.statistics().restarts == 1
        gate.set()
        await wait_all_tasks_blocked()  # the first handler no longer waits, so there is room for one
        assert await second.ask(Wait()) == "waited"


# ---------------------------------------------------------------- other rules


async def test_a_deferred_reply_and_a_loop_count_as_waiting_only_while_they_do(system: ActorSystem) -> None:
    replies: list[Reply[int]] = []

    class Defers(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            replies.append(self.reply_later())
            return 0

    class Reads(Actor[Any]):
        async def run(self) -> None:
            with pytest.raises(EndOfChannel):
                await self.mailbox.receive()

    ref, loop = system.spawn(Defers), system.spawn(Reads)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, Get())
        await wait_all_tasks_blocked()
        assert system.statistics().waiting == 1  # the loop
        replies[0].send(1)
    loop.stop()
    await loop.terminated()
    assert system.statistics().waiting == 0


async def test_a_fault_of_the_runtime_itself_ends_the_block_and_comes_out_of_it() -> None:
    class Broken(Clock):
        good = -2
        """Looks until the one that fails."""

        def __call__(self) -> float:
            self.good -= 1
            if self.good == -1:
                raise OSError("the clock is broken")
            return super().__call__()

    clock = Broken()
    with pytest.raises(OSError, match="the clock is broken"):
        measure_by(clock)
        async with ActorSystem() as system:
            waits, works = system.spawn(Runner), system.spawn(Runner)
            waits.tell(Run(trio.sleep_forever))
            await wait_all_tasks_blocked()
            clock.good = 1  # the first look is that of `tell`, the second that of the worker
            works.tell(Item(0, 0))
            await trio.sleep_forever()
