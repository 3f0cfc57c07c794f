"""Keyed timers, receive timeouts, and the heap that they share with asks and deadlines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, ReceiveTimeout, Shutdown, bounded, handles, message, restart
from levada.framework.errors import AskTimeout, ConfigurationError, MailboxFull
from levada.framework.timers import TimerHeap

Log = list[Any]


@message
class Do(Asks[Any]):
    """Call a function with the actor."""

    function: Callable[[Any], Any]


@message
class Tick:
    text: str


@message
class Busy:
    seconds: float


@message
class Never(Asks[None]):
    """A question that is never answered."""


class Clock(Actor[Do | Tick | Busy | Never | ReceiveTimeout]):
    log: Log

    @handles
    def do(self, m: Do) -> Any:
        return m.function(self)

    @handles
    def tick(self, m: Tick) -> None:
        if m.text == "fail":
            raise ValueError(m.text)
        self.log.append((round(trio.current_time(), 6), m.text))

    @handles
    async def busy(self, m: Busy) -> None:
        await trio.sleep(m.seconds)

    @handles
    async def never(self, m: Never) -> None:
        await trio.sleep_forever()

    @handles
    def quiet(self, m: ReceiveTimeout) -> None:
        self.log.append((round(trio.current_time(), 6), m.seconds))


# ---------------------------------------------------------------- once, at, every


async def test_once_and_at_fire_once(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    await trio.sleep(1)

    def set_(actor: Clock) -> None:
        actor.timers.once("in", 2.0, Tick("in"))
        actor.timers.at("at", 2.5, Tick("at"))
        actor.timers.at("past", 0.5, Tick("past"))
        actor.timers.once("now", 0.0, Tick("now"))

    await ref.ask(Do(set_))
    await trio.sleep(10)
    assert log == [(1.0, "past"), (1.0, "now"), (2.5, "at"), (3.0, "in")]
    assert await ref.ask(Do(lambda actor: len(actor.timers))) == 0


async def test_every_fires_each_period(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    ref.tell(Do(lambda actor: actor.timers.every("beat", 0.5, Tick("beat"))))
    await trio.sleep(2.25)
    assert log == [(0.5, "beat"), (1.0, "beat"), (1.5, "beat"), (2.0, "beat")]


async def test_every_does_not_pile_up_behind_a_busy_actor(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    ref.tell(Do(lambda actor: actor.timers.every("beat", 1.0, Tick("beat"))))
    await trio.sleep(0.25)
    ref.tell(Busy(10.0))
    await trio.sleep(12.25)
    # One beat waits while it is busy until 10.25; the next one is on the old beat again.
    assert log == [(10.25, "beat"), (11.0, "beat"), (12.0, "beat")]


async def test_every_after_a_stall_of_the_clock_fires_once(system: ActorSystem, mock_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    ref.tell(Do(lambda actor: actor.timers.every("beat", 1.0, Tick("beat"))))
    await wait_all_tasks_blocked()
    mock_clock.jump(7.25)  # the machine slept
    await wait_all_tasks_blocked()
    mock_clock.jump(0.5)
    await wait_all_tasks_blocked()
    assert log == [(7.25, "beat")]
    mock_clock.jump(0.25)
    await wait_all_tasks_blocked()
    assert log == [(7.25, "beat"), (8.0, "beat")]


async def test_setting_a_key_again_replaces_it(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)

    def set_(actor: Clock) -> None:
        actor.timers.once("k", 1.0, Tick("old"))
        actor.timers.every("k", 2.0, Tick("beat"))
        actor.timers.once("k", 3.0, Tick("new"))
        actor.timers.once(("k", 1), 1.0, Tick("other"))
        assert len(actor.timers) == 2
        assert "k" in actor.timers

    await ref.ask(Do(set_))
    await trio.sleep(10)
    assert log == [(1.0, "other"), (3.0, "new")]


@pytest.mark.parametrize("change", ["cancel", "replace"])
@pytest.mark.parametrize("periodic", [False, True])
async def test_a_tick_that_is_queued_already_counts_no_more(
    system: ActorSystem, autojump_clock: MockClock, change: str, periodic: bool
) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)

    def set_(actor: Clock) -> None:
        if periodic:
            actor.timers.every("k", 1.0, Tick("old"))
        else:
            actor.timers.once("k", 1.0, Tick("old"))

    def change_(actor: Clock) -> None:
        if change == "cancel":
            assert actor.timers.cancel("k")
        else:
            actor.timers.once("k", 5.0, Tick("new"))

    await ref.ask(Do(set_))
    ref.tell(Busy(2.0))
    ref.tell(Do(change_))  # in front of the tick of 1.0
    await trio.sleep(20)
    assert log == ([] if change == "cancel" else [(7.0, "new")])


async def test_cancel_says_whether_there_was_one(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)

    def use(actor: Clock) -> list[bool]:
        actor.timers.once("k", 1.0, Tick("k"))
        return [actor.timers.cancel("k"), actor.timers.cancel("k"), actor.timers.cancel("other")]

    assert await ref.ask(Do(use)) == [True, False, False]
    await trio.sleep(2)
    assert log == []
    assert len(system.heap) == 0


async def test_a_handler_may_set_its_own_timer_again(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []

    class Again(Clock):
        @handles
        def tick(self, m: Tick) -> None:
            super().tick(m)
            if len(self.log) < 3:
                self.timers.once("k", 1.0, m)

    ref = system.spawn(Again, log)
    ref.tell(Do(lambda actor: actor.timers.once("k", 1.0, Tick("k"))))
    await trio.sleep(10)
    assert log == [(1.0, "k"), (2.0, "k"), (3.0, "k")]


async def test_a_restart_cancels_all_timers_queued_ticks_included(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    ref = system.spawn(Clock, log, supervise=restart())

    def set_(actor: Clock) -> None:
        actor.timers.every("beat", 1.0, Tick("beat"))
        actor.timers.once("once", 1.0, Tick("once"))
        actor.timers.once("fail", 0.5, Tick("fail"))

    await ref.ask(Do(set_))
    ref.tell(Busy(3.0))
    await trio.sleep(20)
    assert log == []
    assert await ref.ask(Do(lambda actor: len(actor.timers))) == 0
    assert len(system.heap) == 0


async def test_the_end_cancels_all_timers(system: ActorSystem, autojump_clock: MockClock) -> None:
    ref = system.spawn(Clock, [])
    await ref.ask(Do(lambda actor: [actor.timers.every(n, 1.0, Tick("")) for n in range(10)]))
    assert len(system.heap) == 10
    ref.stop()
    await ref.terminated()
    assert len(system.heap) == 0
    assert system.statistics().dead_letters == 0


async def test_timers_of_a_loop_arrive_in_its_mailbox(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []

    class Loop(Actor[Tick]):
        async def run(self) -> None:
            self.timers.every("beat", 1.0, Tick("beat"))
            async for m in self.mailbox:
                log.append((trio.current_time(), m.text))
                if len(log) == 2:
                    self.timers.cancel("beat")

    system.spawn(Loop)
    await trio.sleep(5)
    assert log == [(1.0, "beat"), (2.0, "beat")]


@pytest.mark.parametrize("delay", [-1.0, float("inf"), float("nan")])
async def test_delays_out_of_range_are_refused(system: ActorSystem, delay: float) -> None:
    ref = system.spawn(Clock, [], supervise=restart(resume=[AssertionError]))

    def use(actor: Clock) -> None:
        for set_ in (actor.timers.once, actor.timers.every):
            with pytest.raises(ConfigurationError):
                set_("k", delay, Tick(""))
        assert len(actor.timers) == 0

    await ref.ask(Do(use))


async def test_a_period_is_more_than_0(system: ActorSystem) -> None:
    ref = system.spawn(Clock, [])

    def use(actor: Clock) -> None:
        with pytest.raises(ConfigurationError):
            actor.timers.every("k", 0.0, Tick(""))

    await ref.ask(Do(use))


# ---------------------------------------------------------------- receive timeout


async def test_a_receive_timeout_repeats_while_nothing_is_handled(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(2.0)))
    await trio.sleep(5)
    assert log == [(2.0, 2.0), (4.0, 2.0)]


async def test_each_message_puts_a_receive_timeout_off(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    ref.tell(Do(lambda actor: actor.set_receive_timeout(2.0)))
    for _ in range(3):
        await trio.sleep(1.5)
        ref.tell(Tick("here"))
    await trio.sleep(3)
    assert log == [(1.5, "here"), (3.0, "here"), (4.5, "here"), (6.5, 2.0)]


async def test_an_ask_that_is_answered_at_once_puts_it_off_too(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(2.0)))
    for _ in range(3):
        await trio.sleep(1.5)
        await ref.ask(Do(lambda actor: None))
    await trio.sleep(1.9)
    assert log == []
    await trio.sleep(0.2)
    assert log == [(6.5, 2.0)]


async def test_a_handler_that_waits_is_not_quiet(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(2.0)))
    ref.tell(Busy(5.0))
    await trio.sleep(7.5)
    assert log == [(7.0, 2.0)]


async def test_changing_and_switching_off(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log)
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(10.0)))
    await trio.sleep(1)
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(1.0)))  # shorter: counts from now
    await trio.sleep(1.5)
    assert log == [(2.0, 1.0)]
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(None)))
    await trio.sleep(20)
    assert log == [(2.0, 1.0)]
    for _ in range(5):
        await ref.ask(Do(lambda actor: actor.set_receive_timeout(None)))
        await ref.ask(Do(lambda actor: actor.set_receive_timeout(3.0)))
    assert len(system.heap) == 1
    await trio.sleep(3.5)
    assert log[1:] == [(25.5, 3.0)]


async def test_a_restart_forgets_the_receive_timeout(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    ref = system.spawn(Clock, log, supervise=restart())
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(2.0)))
    ref.tell(Tick("fail"))
    await trio.sleep(10)
    assert log == []
    assert len(system.heap) == 0


async def test_the_end_forgets_the_receive_timeout(system: ActorSystem) -> None:
    ref = system.spawn(Clock, [])
    await ref.ask(Do(lambda actor: actor.set_receive_timeout(2.0)))
    ref.kill()
    await ref.terminated()
    assert len(system.heap) == 0


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
async def test_a_receive_timeout_is_more_than_0(system: ActorSystem, seconds: float) -> None:
    ref = system.spawn(Clock, [])

    def use(actor: Clock) -> None:
        with pytest.raises(ConfigurationError):
            actor.set_receive_timeout(seconds)

    await ref.ask(Do(use))


# ---------------------------------------------------------------- the heap


async def test_asks_share_the_heap_and_leave_it(system: ActorSystem, autojump_clock: MockClock) -> None:
    ref = system.spawn(Clock, [])
    async with trio.open_nursery() as nursery:

        async def ask(seconds: float) -> None:
            with pytest.raises(AskTimeout) as caught:
                await ref.ask(Never(), timeout=seconds)
            assert caught.value.seconds == seconds
            assert trio.current_time() == pytest.approx(seconds)

        for seconds in (3.0, 1.0, 2.0):
            nursery.start_soon(ask, seconds)
        await wait_all_tasks_blocked()
        assert len(system.heap) == 3
    assert len(system.heap) == 0
    ref.kill()


async def test_the_heap_stays_small_whatever_is_cancelled(system: ActorSystem, autojump_clock: MockClock) -> None:
    class Slow(Actor[Never]):
        @handles
        async def never(self, m: Never) -> None:
            await trio.lowlevel.checkpoint()

    ref = system.spawn(Slow)
    for _ in range(2000):
        await ref.ask(Never(), timeout=1000.0)
    assert len(system.heap._entries) <= 130
    assert len(system.heap) == 0


@given(st.data())
def test_the_heap_fires_what_was_not_cancelled_in_order_of_deadline(data: st.DataObject) -> None:
    delays = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=200))
    doomed = data.draw(st.sets(st.integers(0, len(delays) - 1)))

    async def main() -> list[tuple[float, int]]:
        heap = TimerHeap(lambda late: None)
        fired: list[tuple[float, int]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heap.run)
            timers = [
                heap.after(delay, lambda n=n: fired.append((trio.current_time(), n)))  # type: ignore[misc]
                for n, delay in enumerate(delays)
            ]
            for n in doomed:
                timers[n].cancel()
                timers[n].cancel()
            assert len(heap) == len(delays) - len(doomed)
            assert len(heap._entries) <= max(130, 2 * len(heap) + 2)
            await trio.sleep(30)
            for timer in timers:
                timer.cancel()
            assert len(heap) == 0
            assert heap._entries == []
            nursery.cancel_scope.cancel()
        return fired

    fired = trio.run(main, clock=MockClock(autojump_threshold=0))
    expected = sorted((delay, n) for n, delay in enumerate(delays) if n not in doomed)
    assert [n for _, n in fired] == [n for _, n in expected]
    assert [when for when, _ in fired] == pytest.approx([delay for delay, _ in expected])


async def test_a_timer_may_set_an_earlier_one(autojump_clock: MockClock) -> None:
    heap = TimerHeap(lambda late: None)
    fired: Log = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heap.run)
        heap.after(10.0, lambda: fired.append(trio.current_time()))
        heap.after(1.0, lambda: heap.after(1.0, lambda: fired.append(trio.current_time())))
        await wait_all_tasks_blocked()
        heap.after(0.5, lambda: fired.append(trio.current_time()))
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert fired == pytest.approx([0.5, 2.0, 10.0])


async def test_stopping_a_system_with_timers_leaves_nothing(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        ref = system.spawn(Clock, [])
        await ref.ask(Do(lambda actor: actor.timers.every("k", 0.1, Tick("x"))))
        await trio.sleep(1)
    assert await ref.terminated() == Shutdown()
    assert len(system.heap) == 0


async def test_a_period_too_short_for_the_clock_lets_others_run(autojump_clock: MockClock) -> None:
    """So far from its beginning the clock does not see 1e-12 s: each beat is due when it is set."""
    autojump_clock.jump(1e6)
    log: Log = []
    async with ActorSystem() as system:
        clock = system.spawn(Clock, log)
        clock.tell(Do(lambda actor: actor.timers.every("beat", 1e-12, Tick("beat"))))
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        await clock.ask(Do(lambda actor: actor.timers.cancel("beat")))
    assert log[:3] == [(1e6, "beat")] * 3


async def test_the_beats_that_were_handled_take_no_room_and_make_none(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    class Beats(Actor[Any]):
        def started(self) -> None:
            self.timers.every("beat", 1.0, "beat")

        @handles
        def beat(self, m: str) -> None:
            if m == "enough":
                self.timers.cancel("beat")

    ref = system.spawn(Beats, mailbox=bounded(2))
    await trio.sleep(5.5)
    ref.tell("enough")
    await wait_all_tasks_blocked()
    for _ in range(2):
        ref.tell("one")
    with pytest.raises(MailboxFull):
        ref.tell("one too many")


@pytest.mark.parametrize("wrong", ["5", None, -1, math.nan, 1j])
async def test_a_time_that_is_no_number_is_refused_where_it_is_given(wrong: Any) -> None:
    """With the value, not by an error of some comparison."""
    text = re.escape(repr(wrong))
    async with ActorSystem() as system:
        refused: list[str] = []

        class Sets(Actor[Any]):
            def started(self) -> None:
                for call in (
                    lambda: self.timers.once("key", wrong, 1),
                    lambda: self.timers.every("key", wrong, 1),
                    lambda: self.set_receive_timeout(0 if wrong is None else wrong),
                    lambda: restart(within=wrong),
                    lambda: restart(initial_backoff=wrong),
                    lambda: restart(max_backoff=wrong),
                ):
                    with pytest.raises(ConfigurationError, match="wanted "):
                        call()
                    refused.append("refused")
                if not isinstance(wrong, float | int):
                    with pytest.raises(
                        ConfigurationError, match=rf"^the deadline is {text}, wanted a time on trio's clock$"
                    ):
                        self.timers.at("key", wrong, 1)

        system.spawn(Sets)
        await wait_all_tasks_blocked()
        assert refused == ["refused"] * 6
