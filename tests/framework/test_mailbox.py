"""Bounds, overflow policies, senders that wait, and what `stop` means to a queue."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
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
    Asks,
    DeadLetter,
    Failed,
    MailboxPolicy,
    Overflow,
    Ref,
    Shutdown,
    actor,
    bounded,
    channel,
    conflate,
    handles,
    message,
    restart,
    unbounded,
)
from levada.framework.errors import ActorStopped, AskTimeout, ConfigurationError, MailboxFull


@message
class Hold:
    """Keep the actor busy until the gate opens."""

    key: Any = None


@message
class Item:
    n: int
    key: Any = None


@message
class Query(Asks[int]):
    n: int


@message
class Boom:
    pass


@attrs.define
class Desk:
    """An actor that is held, and what it has seen."""

    ref: Ref[Any]
    gate: trio.Event
    seen: list[int]
    left: list[Any]
    letters: list[Any]
    system: ActorSystem

    async def open(self) -> list[int]:
        """Let the actor go on, and return what it saw."""
        self.gate.set()
        await wait_all_tasks_blocked()
        return self.seen


class Till(Actor[Hold | Item | Query | Boom]):
    gate: trio.Event
    seen: list[int]

    @handles
    async def hold(self, m: Hold) -> None:
        await self.gate.wait()

    @handles
    def item(self, m: Item) -> None:
        self.seen.append(m.n)

    @handles
    def query(self, m: Query) -> int:
        self.seen.append(m.n)
        return -m.n

    @handles
    def boom(self, m: Boom) -> None:
        raise ValueError("boom")


async def held(system: ActorSystem, policy: MailboxPolicy, **keywords: Any) -> Desk:
    """Start an actor whose handler waits; its mailbox is empty."""
    letters: list[Any] = []

    @actor
    def listener(letter: DeadLetter) -> None:
        if letter.to is desk.ref:
            letters.append((letter.message, letter.why))

    system.events.subscribe(DeadLetter, system.spawn(listener))
    gate = trio.Event()
    seen: list[int] = []
    ref = system.spawn(Till, gate, seen, mailbox=policy, name="till", **keywords)
    desk = Desk(ref, gate, seen, [], letters, system)
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    return desk


class Task:
    """A call in a task of its own."""

    def __init__(self, nursery: trio.Nursery, call: Callable[[], Awaitable[Any]]) -> None:
        self.scope = trio.CancelScope()
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        nursery.start_soon(self._run, call)

    async def _run(self, call: Callable[[], Awaitable[Any]]) -> None:
        with self.scope:
            try:
                self.value = await call()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.error = error
            self.done = True


async def sender(nursery: trio.Nursery, ref: Ref[Any], message: Any) -> Task:
    task = Task(nursery, lambda: ref.send(message))
    await wait_all_tasks_blocked()
    return task


async def asker(nursery: trio.Nursery, ref: Ref[Any], message: Any) -> Task:
    task = Task(nursery, lambda: ref.ask(message, timeout=None))
    await wait_all_tasks_blocked()
    return task


FULL = "the mailbox of /till holds 2 messages; send() waits for room, or give it a larger one"


def assert_full(error: BaseException | None, message: Any) -> None:
    assert isinstance(error, MailboxFull)
    assert (str(error), error.actor, error.capacity) == (FULL, "/till", 2)
    assert error.message is message


# ---------------------------------------------------------------- settings


def test_policies_check_their_arguments() -> None:
    assert bounded() == MailboxPolicy(1024, "wait")
    assert unbounded() == MailboxPolicy(None, "wait")
    for capacity in (0, -1, 1.5, "many"):
        with pytest.raises(ConfigurationError, match="wanted 1 message or more"):
            bounded(capacity)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="wanted one of wait, raise, drop_new, drop_old, stop or conflate"):
        bounded(1, overflow="drop")  # type: ignore[arg-type]


# ---------------------------------------------------------------- every policy with tell, send, ask


async def test_unbounded_takes_everything(system: ActorSystem) -> None:
    desk = await held(system, unbounded())
    for n in range(5000):
        desk.ref.tell(Item(n))
    await desk.ref.send(Item(5000))
    assert await desk.open() == list(range(5001))


async def test_wait_tell_raises_send_and_ask_wait(system: ActorSystem) -> None:
    desk = await held(system, bounded(2))
    desk.ref.tell(Item(1))
    await desk.ref.send(Item(2))
    told = Item(3)
    with pytest.raises(MailboxFull) as caught:
        desk.ref.tell(told)
    assert_full(caught.value, told)
    async with trio.open_nursery() as nursery:
        sending = await sender(nursery, desk.ref, Item(4))
        asking = await asker(nursery, desk.ref, Query(5))
        assert (sending.done, asking.done) == (False, False)
        assert await desk.open() == [1, 2, 4, 5]
    assert (sending.done, asking.value, desk.letters) == (True, -5, [])


async def test_raise_raises_for_all_three(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow="raise"))
    desk.ref.tell(Item(1))
    desk.ref.tell(Item(2))
    told, sent, asked = Item(3), Item(4), Query(5)
    with pytest.raises(MailboxFull) as caught:
        desk.ref.tell(told)
    assert_full(caught.value, told)
    with pytest.raises(MailboxFull) as caught:
        await desk.ref.send(sent)
    assert_full(caught.value, sent)
    with pytest.raises(MailboxFull) as caught:
        await desk.ref.ask(asked)
    assert_full(caught.value, asked)
    assert await desk.open() == [1, 2]
    assert desk.letters == []


async def test_drop_new_makes_dead_letters_of_what_comes_and_an_ask_fails(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow="drop_new"))
    desk.ref.tell(Item(1))
    desk.ref.tell(Item(2))
    desk.ref.tell(Item(3))
    await desk.ref.send(Item(4))
    asked = Query(5)
    with pytest.raises(MailboxFull) as caught:
        await desk.ref.ask(asked)
    assert_full(caught.value, asked)
    assert await desk.open() == [1, 2]
    assert desk.letters == [(Item(3), "mailbox full"), (Item(4), "mailbox full")]


async def test_drop_old_makes_dead_letters_of_what_is_oldest_and_an_ask_fails(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow="drop_old"))
    async with trio.open_nursery() as nursery:
        asked = Query(1)
        asking = await asker(nursery, desk.ref, asked)
        desk.ref.tell(Item(2))
        desk.ref.tell(Item(3))  # drops the ask
        assert not asking.done
        await wait_all_tasks_blocked()
        assert_full(asking.error, asked)
        await desk.ref.send(Item(4))  # drops 2
        second = await asker(nursery, desk.ref, Query(5))  # drops 3
        assert await desk.open() == [4, 5]
    assert second.value == -5
    assert desk.letters == [(Item(2), "mailbox full"), (Item(3), "mailbox full")]


@pytest.mark.parametrize("overflow", ["drop_old", "drop_new", conflate(lambda m: type(m).__name__)])
async def test_a_mailbox_keeps_no_message_that_was_handled(system: ActorSystem, overflow: Overflow) -> None:
    """Otherwise a channel in it would end with the next message."""
    desk = await held(system, bounded(2, overflow=overflow))
    kept: list[weakref.ref[Any]] = []

    def held_by(kind: Any, *arguments: Any) -> Any:
        sender, _ = channel(int)
        sender.finish_nowait()
        kept.append(weakref.ref(sender))
        return kind(*arguments, key=sender)

    await desk.open()
    for kind in (Item, Hold):
        desk.ref.tell(held_by(kind, *([1] if kind is Item else [])))
        await wait_all_tasks_blocked()
    assert [each() for each in kept] == [None, None]
    assert desk.seen == [1]


@pytest.mark.parametrize("way", ["tell", "send", "ask"])
async def test_stop_fails_the_actor(system: ActorSystem, way: str, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Any] = []

    @actor
    def failed(event: ActorFailed) -> None:
        failures.append((event.ref, str(event.error)))

    system.events.subscribe(ActorFailed, system.spawn(failed))
    desk = await held(system, bounded(2, overflow="stop"))
    desk.ref.tell(Item(1))
    desk.ref.tell(Item(2))
    last = Query(3)
    if way == "tell":
        desk.ref.tell(last)
    elif way == "send":
        await desk.ref.send(last)
    else:
        with pytest.raises(MailboxFull) as caught:
            await desk.ref.ask(last)
        assert_full(caught.value, last)
    reason = await desk.ref.terminated()
    assert isinstance(reason, Failed)
    assert_full(reason.error, None)  # the reason is kept, and must not keep the channels of a message
    await wait_all_tasks_blocked()
    dropped = [(last, "mailbox full")] if way != "ask" else []
    assert desk.letters == [*dropped, (Item(1), "stopped"), (Item(2), "stopped")]
    assert failures == [(desk.ref, FULL)]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == ["/till failed"]


async def test_stop_restarts_a_supervised_actor_with_what_is_queued(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow="stop"), supervise=restart())
    for n in (1, 2, 3):
        desk.ref.tell(Item(n))
    await wait_all_tasks_blocked()
    assert desk.seen == [1, 2]
    assert desk.letters == [(Item(3), "mailbox full")]
    assert system.statistics().restarts == 1


async def test_conflate_keeps_the_newest_of_each_key_in_the_place_of_the_oldest(system: ActorSystem) -> None:
    desk = await held(system, bounded(3, overflow=conflate(lambda m: m.key)))
    desk.ref.tell(Item(1, "a"))
    desk.ref.tell(Item(2, "b"))
    await desk.ref.send(Item(3, "a"))
    desk.ref.tell(Item(4, "b"))
    assert desk.letters == []
    assert await desk.open() == [3, 4]


async def test_conflate_with_too_many_keys_drops_the_oldest(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow=conflate(lambda m: m.key)))
    for n, key in enumerate("abcb"):
        desk.ref.tell(Item(n, key))
    await desk.ref.send(Item(4, "a"))
    assert await desk.open() == [2, 4]
    assert desk.letters == [(Item(0, "a"), "mailbox full"), (Item(3, "b"), "mailbox full")]


async def test_asks_are_never_conflated(system: ActorSystem) -> None:
    desk = await held(system, bounded(4, overflow=conflate(lambda m: "same")))
    async with trio.open_nursery() as nursery:
        one = await asker(nursery, desk.ref, Query(1))
        two = await asker(nursery, desk.ref, Query(2))
        desk.ref.tell(Item(3))
        desk.ref.tell(Item(4))
        assert await desk.open() == [1, 2, 4]
    assert (one.value, two.value) == (-1, -2)


async def test_a_message_that_has_been_taken_is_not_conflated_any_more(system: ActorSystem) -> None:
    desk = await held(system, bounded(2, overflow=conflate(lambda m: "same")))
    desk.ref.tell(Item(1))
    await desk.open()
    desk.ref.tell(Item(2))
    await wait_all_tasks_blocked()
    assert desk.seen == [1, 2]


@pytest.mark.parametrize("overflow", ["wait", "raise", "stop", "drop_new", "drop_old"])
async def test_what_the_runtime_itself_queues_takes_no_room(system: ActorSystem, overflow: Overflow) -> None:
    seen: list[int] = []

    class Begins(Actor[Item]):
        def started(self) -> None:
            self.timers.every("beat", 1000.0, Item(0))

        @handles
        def item(self, m: Item) -> None:
            seen.append(m.n)

    ref = system.spawn(Begins, mailbox=bounded(1, overflow=overflow))
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    assert seen == [1]
    assert system.statistics().dead_letters == 0


# ---------------------------------------------------------------- senders that wait


async def test_waiting_senders_and_askers_come_in_first_come_first_served(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        for n in range(1, 10):
            await (asker(nursery, desk.ref, Query(n)) if n % 3 == 0 else sender(nursery, desk.ref, Item(n)))
        assert await desk.open() == list(range(10))


async def test_a_free_place_belongs_to_those_in_line(system: ActorSystem) -> None:
    """They are let in when half of the messages are handled; until then no other message takes the places that are free."""
    gates, seen = [trio.Event() for _ in range(3)], list[int]()

    @actor
    async def slow(m: Item) -> None:
        seen.append(m.n)
        if m.n < len(gates):
            await gates[m.n].wait()

    ref = system.spawn(slow, mailbox=bounded(4))
    ref.tell(Item(0))
    await wait_all_tasks_blocked()
    for n in range(1, 5):
        ref.tell(Item(n))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.send, Item(5))
        for gate in gates[:2]:
            await wait_all_tasks_blocked()
            gate.set()
        await wait_all_tasks_blocked()
        assert seen == [0, 1, 2]
        with pytest.raises(MailboxFull):
            ref.tell(Item(-1))
        nursery.start_soon(ref.send, Item(6))
        await wait_all_tasks_blocked()
        gates[2].set()
    await wait_all_tasks_blocked()
    assert seen == [0, 1, 2, 3, 4, 5, 6]


async def test_a_sender_that_was_let_in_has_its_slot_before_it_wakes(system: ActorSystem) -> None:
    """A later tell neither overtakes it nor goes past the bound."""
    refused: list[int] = []

    class Greedy(Actor[Hold | Item]):
        gate: trio.Event
        seen: list[int]

        @handles
        async def hold(self, m: Hold) -> None:
            await self.gate.wait()

        @handles
        def item(self, m: Item) -> None:
            self.seen.append(m.n)
            if m.n < 100:
                try:
                    self.ref.tell(Item(100 + m.n))
                except MailboxFull:
                    refused.append(m.n)

    gate = trio.Event()
    seen: list[int] = []
    ref = system.spawn(Greedy, gate, seen, mailbox=bounded(1))
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        for n in (1, 2):
            await sender(nursery, ref, Item(n))
        gate.set()
    await wait_all_tasks_blocked()
    assert seen[:3] == [0, 1, 2]
    # Those in line had the slots that came free, so the tells in between found the mailbox full.
    assert refused == [0, 1]
    assert seen[3:] == [102]


async def test_a_waiting_sender_that_is_cancelled_leaves_nothing_behind(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        tasks = [await sender(nursery, desk.ref, Item(n)) for n in (1, 2, 3)]
        tasks[1].scope.cancel()
        await wait_all_tasks_blocked()
        assert await desk.open() == [0, 1, 3]
    assert [task.done for task in tasks] == [True, False, True]


async def test_when_all_who_waited_have_gone_the_next_one_is_still_let_in(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        for n in (1, 2, 3):
            task = await sender(nursery, desk.ref, Item(n))
            task.scope.cancel()
            await wait_all_tasks_blocked()
        last = await sender(nursery, desk.ref, Item(4))
        with trio.fail_after(60):
            assert await desk.open() == [0, 4]
    assert last.done


async def test_messages_that_cannot_be_compared_may_be_cancelled_while_they_wait(system: ActorSystem) -> None:
    class Touchy:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compare me not")

        __hash__ = None  # type: ignore[assignment]

    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        first = await sender(nursery, desk.ref, Touchy())
        second = await sender(nursery, desk.ref, Touchy())
        second.scope.cancel()
        await wait_all_tasks_blocked()
        first.scope.cancel()
    assert await desk.open() == [0]


async def test_an_ask_that_runs_out_of_time_in_line_is_skipped(system: ActorSystem, autojump_clock: MockClock) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    async with trio.open_nursery() as nursery:
        task = Task(nursery, lambda: desk.ref.ask(Query(1), timeout=1))
        await trio.sleep(0.5)
        after = await sender(nursery, desk.ref, Item(2))
        await trio.sleep(1)
        assert isinstance(task.error, AskTimeout)
        assert await desk.open() == [0, 2]
    assert after.done


async def test_the_actor_dies_while_they_wait(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(0))
    sent, asked = Item(1), Query(2)
    async with trio.open_nursery() as nursery:
        sending = await sender(nursery, desk.ref, sent)
        asking = await asker(nursery, desk.ref, asked)
        desk.ref.kill()
    for task, given_back in ((sending, sent), (asking, asked)):
        assert isinstance(task.error, ActorStopped)
        assert task.error.message is given_back
    await wait_all_tasks_blocked()
    assert desk.letters == [(Item(0), "stopped")]


async def test_a_restart_keeps_the_queue_the_line_and_their_order(system: ActorSystem) -> None:
    desk = await held(system, bounded(2), supervise=restart())
    desk.ref.tell(Boom())
    desk.ref.tell(Item(1))
    async with trio.open_nursery() as nursery:
        for n in (2, 3, 4):
            await sender(nursery, desk.ref, Item(n))
        assert await desk.open() == [1, 2, 3, 4]
    assert system.statistics().restarts == 1


async def test_cancelled_before_there_was_room_or_not_at_all(system: ActorSystem) -> None:
    """With room `send` does not wait, so there is nothing to cancel; without it the message is not put in."""
    desk = await held(system, bounded(1))
    with trio.CancelScope() as scope:
        scope.cancel()
        await desk.ref.send(Item(1))
        await desk.ref.send(Item(2))
    assert scope.cancelled_caught
    assert await desk.open() == [1]


class Ticking:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("overflow", ["none", "raise", "drop_new", "drop_old", "stop"])
async def test_send_yields_after_a_slice_and_may_be_cancelled_there(overflow: Any) -> None:
    clock = Ticking()
    measure_by(clock)
    async with ActorSystem() as system:
        desk = await held(system, unbounded() if overflow == "none" else bounded(1, overflow=overflow))
        desk.ref.tell(Item(1))
        clock.now += 1.0
        with trio.CancelScope() as scope:
            scope.cancel()
            await desk.ref.send(Item(2))
        assert scope.cancelled_caught
        assert await desk.open() == [1]


@pytest.mark.parametrize("overflow", ["raise", "drop_new", "stop"])
async def test_send_to_an_actor_that_dies_while_it_yields_says_so(overflow: Any) -> None:
    clock = Ticking()
    measure_by(clock)
    async with ActorSystem() as system:
        for _ in range(10):  # trio draws lots for who is first, the sender or the end of the actor
            desk = await held(system, bounded(1, overflow=overflow))
            desk.ref.tell(Item(1))
            desk.ref.kill()
            clock.now += 1.0
            with contextlib.suppress(ActorStopped, MailboxFull):
                await desk.ref.send(Item(2))
            assert await desk.ref.terminated() != Shutdown()
            await wait_all_tasks_blocked()
            assert (Item(2), "stopped") not in desk.letters


# ---------------------------------------------------------------- stop and the queue


@pytest.mark.parametrize("policy", [unbounded(), bounded(3), bounded(3, overflow="drop_old")], ids=repr)
async def test_stop_comes_after_what_is_queued_and_stop_now_before(system: ActorSystem, policy: MailboxPolicy) -> None:
    desk = await held(system, policy)
    desk.ref.tell(Item(1))
    desk.ref.tell(Item(2))
    desk.ref.stop()
    desk.ref.tell(Item(3))
    assert await desk.open() == [1, 2]
    assert await desk.ref.terminated() == Shutdown()
    assert desk.letters == [(Item(3), "stopped")]


async def test_stop_finds_room_in_a_full_mailbox(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(1))
    desk.ref.stop()
    assert await desk.open() == [1]
    assert not desk.ref.is_alive


async def test_those_in_line_behind_a_stop_get_their_messages_back(system: ActorSystem) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(1))
    desk.ref.stop()
    async with trio.open_nursery() as nursery:
        waiting = await sender(nursery, desk.ref, Item(2))
        assert await desk.open() == [1]
    assert isinstance(waiting.error, ActorStopped)
    assert waiting.error.message == Item(2)
    assert desk.letters == []


async def test_stop_now_leaves_the_queue_to_undelivered_oldest_first(system: ActorSystem) -> None:
    left: list[Any] = []

    class Careful(Till):
        def undelivered(self, messages: list[Any]) -> None:
            left.extend(messages)

    gate = trio.Event()
    ref = system.spawn(Careful, gate, [], mailbox=bounded(3))
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    for n in (1, 2, 3):
        ref.tell(Item(n))
    ref.stop(now=True)
    await wait_all_tasks_blocked()
    assert ref.is_alive  # a running handler is not interrupted
    gate.set()
    assert await ref.terminated() == Shutdown()
    assert left == [Item(1), Item(2), Item(3)]
    assert system.statistics().dead_letters == 0


# ---------------------------------------------------------------- against a model


class Model:
    """What a mailbox of a held actor holds, in twenty lines."""

    def __init__(self, capacity: int, overflow: str) -> None:
        self.capacity = capacity
        self.overflow = overflow
        self.queue: list[int] = []
        self.line: list[int] = []
        self.dropped: list[int] = []
        self.refused: list[int] = []

    def put(self, n: int, *, waits: bool) -> None:
        if len(self.queue) < self.capacity and not self.line:
            self.queue.append(n)
        elif self.overflow == "wait" and waits:
            self.line.append(n)
        elif self.overflow in ("wait", "raise"):
            self.refused.append(n)
        elif self.overflow == "drop_new":
            self.dropped.append(n)
        else:
            self.dropped.append(self.queue.pop(0))
            self.queue.append(n)


@given(
    capacity=st.integers(1, 4),
    overflow=st.sampled_from(["wait", "raise", "drop_new", "drop_old"]),
    steps=st.lists(st.sampled_from(["tell", "send", "ask", "cancel"]), max_size=25),
)
async def test_any_mix_does_what_the_model_says(capacity: int, overflow: Any, steps: list[str]) -> None:
    model = Model(capacity, overflow)
    async with ActorSystem(seed=0) as system:
        desk = await held(system, bounded(capacity, overflow=overflow))
        refused: list[int] = []
        waiting: dict[int, Task] = {}
        async with trio.open_nursery() as nursery:
            for n, step in enumerate(steps):
                if step == "cancel":
                    if model.line:
                        gone = model.line.pop(len(model.line) // 2)
                        waiting.pop(gone).scope.cancel()
                elif step == "tell":
                    model.put(n, waits=False)
                    try:
                        desk.ref.tell(Item(n))
                    except MailboxFull:
                        refused.append(n)
                else:
                    model.put(n, waits=True)
                    task = await (
                        sender(nursery, desk.ref, Item(n)) if step == "send" else asker(nursery, desk.ref, Query(n))
                    )
                    if step == "send" and task.error is not None:
                        refused.append(n)
                    waiting[n] = task
                await wait_all_tasks_blocked()
            assert await desk.open() == [*model.queue, *model.line]
        asks = {n for n, step in enumerate(steps) if step == "ask"}
        assert refused == [n for n in model.refused if n not in asks]
        assert [m.n for m, _ in desk.letters] == [n for n in model.dropped if n not in asks]
        for n in asks & set(waiting):
            expected = -n if n in desk.seen else None
            assert waiting[n].value == expected
            assert (waiting[n].error is None) == (n in desk.seen)


# ---------------------------------------------------------------- a line of many


class Loop(Actor[Any]):
    gate: trio.Event
    seen: list[int]

    async def run(self) -> None:
        async for m in self.mailbox:
            if isinstance(m, Hold):
                await self.gate.wait()
            else:
                self.seen.append(m.n)


@pytest.mark.parametrize("kind", [Till, Loop])
async def test_who_stands_in_line_behind_a_stop_has_a_turn_if_the_actor_starts_again(
    system: ActorSystem, kind: Any
) -> None:
    gate = trio.Event()
    seen: list[int] = []
    ref = system.spawn(kind, gate, seen, mailbox=bounded(1), supervise=restart("permanent"))
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    ref.tell(Item(1))
    ref.stop()
    async with trio.open_nursery() as nursery:
        for n in (2, 3, 4):
            nursery.start_soon(ref.send, Item(n))
            await wait_all_tasks_blocked()
        gate.set()
    await wait_all_tasks_blocked()
    assert seen == [1, 2, 3, 4]
    assert ref.is_alive
    ref.tell(Item(5))
    with pytest.raises(MailboxFull):
        ref.tell(Item(6))  # the stop that came up is not counted as room


async def test_a_signal_in_mid_turn_takes_no_place_in_a_mailbox(system: ActorSystem) -> None:
    class Killer(Till):
        @handles
        async def hold(self, m: Hold) -> None:
            m.key.kill()
            await self.gate.wait()

    seen: list[int] = []
    gate = trio.Event()
    ref = system.spawn(Killer, gate, seen, mailbox=bounded(3))
    ref.tell(Hold(system.spawn(Till, trio.Event(), seen)))
    ref.tell(Item(1))
    await wait_all_tasks_blocked()
    ref.tell(Item(2))
    ref.tell(Item(3))
    with pytest.raises(MailboxFull):
        ref.tell(Item(4))
    gate.set()
    await wait_all_tasks_blocked()
    assert seen == [1, 2, 3]


async def test_questions_that_were_given_up_do_not_pile_up_in_line(
    system: ActorSystem, autojump_clock: MockClock
) -> None:
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(1))
    for n in range(1000):
        with pytest.raises(AskTimeout):
            await desk.ref.ask(Query(n), timeout=0.01)
    assert len(desk.ref.line or ()) <= 64  # type: ignore[attr-defined]
    async with trio.open_nursery() as nursery:
        for n in range(1000, 1200):
            nursery.start_soon(desk.ref.ask, Query(n))
        await wait_all_tasks_blocked()
        assert sorted(await desk.open()) == [1, *range(1000, 1200)]


@pytest.mark.parametrize("many", [100, pytest.param(30_000, marks=pytest.mark.release)])
async def test_many_senders_in_line_that_give_up_together(system: ActorSystem, many: int) -> None:
    """One by one, each looked for in the whole line, it took 4 s for 8,000."""
    desk = await held(system, bounded(1))
    desk.ref.tell(Item(1))
    async with trio.open_nursery() as nursery:
        for n in range(many):
            nursery.start_soon(desk.ref.send, Item(n))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert await desk.open() == [1]
