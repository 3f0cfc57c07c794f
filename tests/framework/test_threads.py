"""Other threads: `Ref.from_thread`, and what strict mode finds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    DeadLetter,
    Failed,
    actor,
    bounded,
    conflate,
    handles,
    message,
)
from levada.framework.errors import ActorError, ActorStopped, AskTimeout, MailboxFull


@message
class Item:
    n: Any


@message
class Get(Asks[int]):
    pass


@message
class Hold(Asks[None]):
    pass


class Takes(Actor[Item | Get | Hold]):
    seen: list[Any] = attrs.field(factory=list)
    gate: trio.Event = attrs.field(factory=trio.Event)

    @handles
    def item(self, m: Item) -> None:
        self.seen.append(m.n)

    @handles
    def get(self, m: Get) -> int:
        return len(self.seen)

    @handles
    async def hold(self, m: Hold) -> None:
        await self.gate.wait()


async def in_thread(function: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(function)


async def drained(system: ActorSystem) -> None:
    """Wait until what threads have sent has arrived: it comes by a call that trio makes of itself."""
    arrived = trio.Event()
    trio.lowlevel.current_trio_token().run_sync_soon(arrived.set)
    await arrived.wait()
    await wait_all_tasks_blocked()


# ---------------------------------------------------------------- tell


async def test_tells_of_one_thread_arrive_in_order(system: ActorSystem) -> None:
    seen: list[int] = []
    ref = system.spawn(Takes, seen)

    def tell() -> None:
        for n in range(5000):
            ref.from_thread.tell(Item(n))

    await in_thread(tell)
    await drained(system)
    assert await ref.ask(Get()) == 5000
    assert seen == list(range(5000))


async def test_tells_and_asks_of_one_thread_keep_their_order(system: ActorSystem) -> None:
    ref = system.spawn(Takes)

    def mix() -> list[int]:
        answers = []
        for n in range(20):
            ref.from_thread.tell(Item(n))
            if n % 3 == 0:
                answers.append(ref.from_thread.ask(Get()))
        return answers

    assert await in_thread(mix) == [1, 4, 7, 10, 13, 16, 19]


async def test_tells_of_many_threads_all_arrive(system: ActorSystem) -> None:
    seen: list[tuple[int, int]] = []
    ref = system.spawn(Takes, seen)

    def tell(thread: int) -> None:
        for n in range(300):
            ref.from_thread.tell(Item((thread, n)))

    async with trio.open_nursery() as nursery:
        for thread in range(5):
            nursery.start_soon(trio.to_thread.run_sync, tell, thread)
    await drained(system)
    assert [[n for who, n in seen if who == thread] for thread in range(5)] == [list(range(300))] * 5


async def test_tell_may_be_called_in_the_systems_own_thread(system: ActorSystem) -> None:
    seen: list[int] = []
    ref = system.spawn(Takes, seen)
    ref.from_thread.tell(Item(1))
    assert seen == []
    await drained(system)
    assert seen == [1]


async def test_only_so_many_messages_may_be_on_their_way() -> None:
    async with ActorSystem(thread_inbox=3) as system:
        seen: list[int] = []
        ref = system.spawn(Takes, seen, name="takes")

        # In the system's own thread nothing arrives before the next checkpoint.
        for n in range(3):
            ref.from_thread.tell(Item(n))
        with pytest.raises(MailboxFull) as caught:
            ref.from_thread.tell(Item(3))
        error = caught.value
        assert str(error) == "3 messages from threads are on their way to /takes (raise thread_inbox, or send fewer)"
        assert (error.actor, error.capacity, error.message) == ("/takes", 3, Item(3))
        await drained(system)
        ref.from_thread.tell(Item(4))
        await drained(system)
        assert seen == [0, 1, 2, 4]


async def test_a_flood_to_a_bounded_mailbox_waits_outside_it_and_is_bounded_too() -> None:
    async with ActorSystem(thread_inbox=10) as system:
        gate = trio.Event()
        seen: list[int] = []
        ref = system.spawn(Takes, seen, gate, mailbox=bounded(2))
        ref.tell(Hold())
        await wait_all_tasks_blocked()

        told = 0
        with pytest.raises(MailboxFull):
            for n in range(1000):
                ref.from_thread.tell(Item(n))
                told += 1
                await drained(system)
        assert told == 12  # two in the mailbox, ten in line
        gate.set()
        await wait_all_tasks_blocked()
        assert seen == list(range(12))
        assert system.statistics().dead_letters == 0


@pytest.mark.parametrize(
    ("overflow", "kept", "dropped"),
    [("raise", [0, 1, 2], []), ("drop_new", [0, 1], [2]), ("drop_old", [1, 2], [0]), ("stop", [], [2, 0, 1])],
)
async def test_the_overflow_policy_is_applied_when_the_message_arrives(
    system: ActorSystem, overflow: Any, kept: list[int], dropped: list[int]
) -> None:
    """Where it says `raise` there is nobody to raise to, so the message waits its turn outside the mailbox."""
    letters: list[int] = []

    @actor
    def listener(letter: DeadLetter) -> None:
        letters.append(letter.message.n)

    system.events.subscribe(DeadLetter, system.spawn(listener))
    gate = trio.Event()
    seen: list[int] = []
    ref = system.spawn(Takes, seen, gate, mailbox=bounded(2, overflow=overflow))
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    for n in range(3):
        ref.from_thread.tell(Item(n))
    await drained(system)
    gate.set()
    await wait_all_tasks_blocked()
    assert (seen, letters) == (kept, dropped)


async def test_a_key_that_cannot_be_hashed_makes_a_dead_letter_and_harms_nobody(system: ActorSystem) -> None:
    letters: list[tuple[Any, str]] = []

    @actor
    def listener(letter: DeadLetter) -> None:
        letters.append((letter.message.n, letter.why))

    system.events.subscribe(DeadLetter, system.spawn(listener))
    seen: list[Any] = []
    ref = system.spawn(Takes, seen, mailbox=bounded(2, overflow=conflate(lambda m: m.n)))
    ref.from_thread.tell(Item([]))
    ref.from_thread.tell(Item(1))
    await drained(system)
    assert seen == [1]
    assert letters == [([], "no key")]


async def test_a_tell_to_the_dead_is_a_dead_letter(system: ActorSystem) -> None:
    ref = system.spawn(Takes)
    ref.kill()
    await ref.terminated()
    await in_thread(lambda: ref.from_thread.tell(Item(1)))
    await drained(system)
    assert system.statistics().dead_letters == 1


# ---------------------------------------------------------------- ask


@pytest.mark.parametrize("timeout", [None, 1e10, math.inf])
async def test_ask_blocks_the_thread_until_the_answer(system: ActorSystem, timeout: float | None) -> None:
    gate = trio.Event()
    ref = system.spawn(Takes, [], gate)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await in_thread(lambda: ref.from_thread.ask(Hold(), timeout=timeout)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while system.statistics().waiting == 0:
            await trio.lowlevel.checkpoint()
        assert answers == []
        gate.set()
    assert answers == [None]


async def test_ask_in_the_systems_own_thread_is_refused(system: ActorSystem) -> None:
    ref = system.spawn(Takes)
    text = r"from_thread.ask\(\) in the system's own thread would wait forever; await ask\(\) instead"
    with pytest.raises(RuntimeError, match=text):
        ref.from_thread.ask(Get())


async def test_ask_gives_up_after_its_timeout_and_is_withdrawn(system: ActorSystem) -> None:
    gate = trio.Event()
    seen: list[Any] = []
    ref = system.spawn(Takes, seen, gate, name="takes")
    ref.tell(Hold())
    await wait_all_tasks_blocked()

    def ask() -> AskTimeout:
        with pytest.raises(AskTimeout) as caught:
            ref.from_thread.ask(Get(), timeout=0.01)
        return caught.value

    error = await in_thread(ask)
    assert str(error) == "/takes did not answer Get in 0.01 s"
    await drained(system)
    gate.set()
    await wait_all_tasks_blocked()
    assert system.statistics().late_replies == 0


async def test_a_failing_handler_fails_the_threads_ask(system: ActorSystem) -> None:
    class Fails(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            raise ValueError("on purpose")

    ref = system.spawn(Fails)

    def ask() -> ActorStopped:
        with pytest.raises(ActorStopped) as caught:
            ref.from_thread.ask(Get())
        return caught.value

    error = await in_thread(ask)
    assert isinstance(error.reason, Failed)
    assert repr(error.__cause__) == "ValueError('on purpose')"


async def test_asks_fail_at_once_when_the_actor_dies_or_is_dead(system: ActorSystem) -> None:
    ref = system.spawn(Takes)

    def ask() -> type[BaseException]:
        with pytest.raises(ActorStopped) as caught:
            ref.from_thread.ask(Hold(), timeout=None)
        return type(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, ask)
        while system.statistics().waiting == 0:
            await trio.lowlevel.checkpoint()
        ref.kill()
    assert await in_thread(ask) is ActorStopped


async def test_an_ask_that_a_mailbox_drops_fails_in_the_thread(system: ActorSystem) -> None:
    gate = trio.Event()
    ref = system.spawn(Takes, [], gate, mailbox=bounded(1, overflow="drop_new"))
    ref.tell(Hold())
    await wait_all_tasks_blocked()
    ref.tell(Item(1))

    def ask() -> None:
        with pytest.raises(MailboxFull):
            ref.from_thread.ask(Get())

    await in_thread(ask)
    gate.set()


# ---------------------------------------------------------------- after the end


def test_after_the_end_tell_and_ask_say_so() -> None:
    refs: list[Any] = []

    async def main() -> None:
        async with ActorSystem() as system:
            refs.append(system.spawn(Takes, name="takes"))

        def attempts() -> None:
            for attempt in (refs[0].from_thread.tell, refs[0].from_thread.ask):
                with pytest.raises(ActorStopped) as caught:
                    attempt(Get())
                assert caught.value.actor == "/takes"
                assert caught.value.message == Get()

        await in_thread(attempts)
        attempts_later.append(attempts)

    attempts_later: list[Callable[[], None]] = []
    trio.run(main)
    attempts_later[0]()  # trio itself is over


def test_a_thread_that_asks_while_the_system_ends_is_not_left_waiting() -> None:
    outcomes: list[type[BaseException] | None] = []
    ready, over = threading.Event(), threading.Event()

    async def main() -> None:
        async with ActorSystem() as system:
            ref = system.spawn(Takes)

            def ask() -> None:
                ready.set()
                while True:
                    try:
                        ref.from_thread.ask(Get(), timeout=None)
                    except ActorStopped as error:
                        outcomes.append(type(error))
                        return

            thread = threading.Thread(target=ask)
            thread.start()
            threads.append(thread)
            while not ready.is_set():
                await trio.lowlevel.checkpoint()

    threads: list[threading.Thread] = []
    for _ in range(10):
        ready.clear()
        trio.run(main)
    over.set()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert outcomes == [ActorStopped] * 10


# ---------------------------------------------------------------- strict mode


@pytest.fixture
def bare_thread() -> Callable[[Callable[[], Any]], BaseException | None]:
    """Run a function in a thread that trio knows nothing of, and give back what it raised."""

    def run(function: Callable[[], Any]) -> BaseException | None:
        errors: list[BaseException] = []

        def body() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(50)
        return errors[0] if errors else None

    return run


@pytest.mark.parametrize("overflow", [None, "wait", "drop_old"])
async def test_strict_tell_from_a_wrong_thread_raises(
    strict_system: ActorSystem, bare_thread: Any, overflow: Any
) -> None:
    ref = strict_system.spawn(Takes, name="takes", mailbox=bounded(9, overflow=overflow) if overflow else None)
    error = bare_thread(lambda: ref.tell(Item(1)))
    assert isinstance(error, RuntimeError)
    assert str(error) == "tell to /takes from a foreign thread or trio run; use ref.from_thread"
    await in_thread(lambda: ref.from_thread.tell(Item(2)))
    await drained(strict_system)
    ref.tell(Item(3))
    assert await ref.ask(Get()) == 2


async def test_strict_tell_from_a_second_trio_run_raises(strict_system: ActorSystem, bare_thread: Any) -> None:
    ref = strict_system.spawn(Takes)

    async def other_run() -> None:
        ref.tell(Item(1))

    async def other_send() -> None:
        await ref.send(Item(1))

    for function in (other_run, other_send):
        error = bare_thread(lambda function=function: trio.run(function))
        assert isinstance(error, RuntimeError)
        assert "foreign thread or trio run" in str(error)


async def test_strict_a_flood_of_tells_is_found(strict_system: ActorSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levada.framework._runtime.observer._FLOOD", 100)
    ref = strict_system.spawn(Takes, name="takes")
    for n in range(100):
        ref.tell(Item(n))
    with pytest.raises(ActorError) as caught:
        ref.tell(Item(100))
    assert str(caught.value) == "100 tells (the last to /takes) and no actor had a turn; use send()"
    await wait_all_tasks_blocked()
    for n in range(99):
        ref.tell(Item(n))
    assert await ref.ask(Get()) == 199
