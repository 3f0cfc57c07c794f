"""Putting messages aside and taking them up again."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    DeadLetter,
    Failed,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped, AskTimeout, MailboxFull

Log = list[Any]


@message
class Item:
    n: int


@message
class Question(Asks[str]):
    n: int


@message
class Kept(Asks[None]):
    n: int


@message
class Ends:
    pass


@message
class Open:
    pass


@message
class Close:
    pass


@message
class Fail:
    pass


class Opened(Behaviour):
    @handles
    def item(self: Any, m: Item) -> None:
        self.log.append(m.n)

    @handles
    def question(self: Any, m: Question) -> str:
        self.log.append(("asked", m.n))
        return f"answer {m.n}"

    @handles
    def close(self: Any, m: Close) -> None:
        self.become(None)

    @handles
    def fail(self: Any, m: Fail) -> None:
        raise ValueError


class Door(Actor[Item | Question | Open | Close | Fail]):
    """Puts everything aside until it is opened."""

    log: Log

    stash_limit = 5

    def undelivered(self, messages: list[Any]) -> None:
        self.log.append(("undelivered", messages))

    @handles
    def item(self, m: Item | Question | Close) -> None:
        self.stash(m)

    @handles
    def open(self, m: Open) -> None:
        self.become(Opened)
        self.unstash_all()

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError


async def test_unstash_all_puts_back_in_order_before_everything_else(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    for m in (Item(1), Item(2), Open(), Item(3)):
        door.tell(m)
    await wait_all_tasks_blocked()
    assert log == [1, 2, 3]


async def test_become_and_unstash_take_effect_within_the_batch(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    for m in (Item(1), Close(), Item(2), Open(), Item(3), Open()):
        door.tell(m)
    # Opened: 1, then closed by the stashed Close; 2 and 3 are put aside again; opened once more.
    await wait_all_tasks_blocked()
    assert log == [1, 2, 3]


async def test_an_ask_that_is_put_aside_stays_an_ask(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    answers: Log = []

    async def ask(n: int) -> None:
        answers.append(await door.ask(Question(n)))

    async with trio.open_nursery() as nursery:
        for n in range(2):
            nursery.start_soon(ask, n)
            await wait_all_tasks_blocked()
        door.tell(Item(7))
        assert answers == []
        door.tell(Open())
    assert log == [("asked", 0), ("asked", 1), 7]
    assert sorted(answers) == ["answer 0", "answer 1"]


async def test_the_time_of_a_stashed_ask_runs_on(system: ActorSystem, autojump_clock: MockClock) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    with pytest.raises(AskTimeout):
        await door.ask(Question(1), timeout=2.0)
    door.tell(Open())
    await wait_all_tasks_blocked()
    assert log == []  # nobody waits for it any more, so it is not handled


async def test_one_more_than_the_limit_is_an_error_that_gives_the_message_back(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    for n in range(6):
        door.tell(Item(n))
    reason = await door.terminated()
    assert isinstance(reason, Failed)
    assert isinstance(reason.error, MailboxFull)
    assert reason.error.capacity == 5
    assert reason.error.message == Item(5)
    assert "raise stash_limit" in str(reason.error)
    # What was put aside is handed back; the one that failed is dropped.
    assert log == [("undelivered", [Item(n) for n in range(5)])]


async def test_room_in_the_stash_after_unstash(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    for round_ in range(3):
        for n in range(5):
            door.tell(Item(n))
        door.tell(Open())
        door.tell(Close())
        await wait_all_tasks_blocked()
        assert len(log) == 5 * (round_ + 1)


async def test_a_restart_puts_the_stash_back_first(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log, supervise=restart())
    for m in (Item(1), Item(2), Fail(), Item(3), Open()):
        door.tell(m)
    await wait_all_tasks_blocked()
    assert log == [1, 2, 3]


async def test_the_end_hands_the_stash_back_before_the_mailbox_and_fails_its_asks(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ActorStopped) as caught:
                await door.ask(Question(9))
            assert caught.value.message == Question(9)

        door.tell(Item(1))
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        door.stop()
        door.tell(Item(2))
    assert log == [("undelivered", [Item(1), Item(2)])]


@pytest.mark.parametrize(
    "mailbox",
    [
        bounded(3),
        bounded(3, overflow="drop_old"),
        bounded(3, overflow=conflate(lambda m: (type(m), getattr(m, "n", 0)))),
    ],
    ids=["wait", "drop_old", "conflate"],
)
async def test_whatever_the_mailbox(system: ActorSystem, mailbox: Any) -> None:
    log: Log = []
    door = system.spawn(Door, log, mailbox=mailbox)
    for n in range(4):
        await door.send(Item(n))
        await wait_all_tasks_blocked()
    await door.send(Open())
    await wait_all_tasks_blocked()
    assert log == [0, 1, 2, 3]


async def test_unstash_of_nothing_is_harmless(system: ActorSystem) -> None:
    log: Log = []
    door = system.spawn(Door, log)
    for m in (Open(), Item(1)):
        door.tell(m)
    await wait_all_tasks_blocked()
    assert log == [1]


async def test_an_async_handler_may_stash_after_it_waited(system: ActorSystem) -> None:
    class Slow(Actor[Item | Open]):
        log: Log

        @handles
        async def item(self, m: Item) -> None:
            await trio.lowlevel.checkpoint()
            if m.n < 0:
                self.log.append(m.n)
            else:
                self.stash(Item(-m.n - 1))

        @handles
        def open(self, m: Open) -> None:
            self.unstash_all()

    log: Log = []
    slow = system.spawn(Slow, log)
    for m in (Item(0), Item(1), Open(), Item(-9)):
        slow.tell(m)
    await wait_all_tasks_blocked()
    assert log == [-1, -2, -9]


@given(st.lists(st.sampled_from(["item", "open", "close"]), max_size=60), st.data())
def test_whatever_comes_when_items_are_handled_in_order(steps: list[str], data: st.DataObject) -> None:
    """With a door that opens and closes at any time nothing is lost, doubled or overtaken."""
    pauses = [data.draw(st.booleans()) for _ in steps]

    async def main() -> None:
        log: Log = []

        class Wide(Door):
            stash_limit = 1000

            @handles
            def item(self, m: Item | Question) -> None:  # type: ignore[override]  # Close is handled below
                self.stash(m)

            @handles
            def close(self, m: Close) -> None:
                pass

        async with ActorSystem() as system:
            door = system.spawn(Wide, log)
            sent = 0
            for step, pause in zip(steps, pauses, strict=True):
                if step == "item":
                    door.tell(Item(sent))
                    sent += 1
                elif step == "open":
                    door.tell(Open())
                else:
                    door.tell(Close())
                if pause:
                    await wait_all_tasks_blocked()
            door.tell(Close())
            door.tell(Open())
            await wait_all_tasks_blocked()
        assert log == list(range(sent))

    trio.run(main)


@pytest.mark.parametrize("end", ["stop", "stop now", "kill", "stops itself", "fails"])
async def test_what_is_put_aside_when_the_actor_ends_is_not_lost_in_silence(
    system: ActorSystem, autojump_clock: MockClock, end: str
) -> None:
    """No hook, no child and no policy here: the stash alone makes the end a long one."""

    class Keeps(Actor[Any]):
        @handles
        def keep(self, m: Kept) -> None:
            self.stash(m)

        @handles
        def end(self, m: Ends) -> None:
            if end == "fails":
                raise ValueError("on purpose")
            self.stop()

    letters: list[Any] = []

    class Post(Actor[DeadLetter]):
        @handles
        def letter(self, m: DeadLetter) -> None:
            letters.append((m.message, m.why))

    system.events.subscribe(DeadLetter, system.spawn(Post))
    ref = system.spawn(Keeps)
    ref.tell(Kept(1))
    ref.tell(Kept(2))
    failed: list[int] = []

    async def ask(n: int) -> None:
        try:
            await ref.ask(Kept(n), timeout=None)
        except ActorStopped as error:
            failed.append(error.message.n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 3)
        await wait_all_tasks_blocked()
        match end:
            case "stop":
                ref.stop()
            case "stop now":
                ref.stop(now=True)
            case "kill":
                ref.kill()
            case _:
                ref.tell(Ends())
        with trio.move_on_after(20) as patience:
            await ref.terminated()
            await wait_all_tasks_blocked()
        assert not patience.cancelled_caught
        nursery.cancel_scope.deadline = trio.current_time() + 5
    assert failed == [3]
    assert letters == [(Kept(1), "stopped"), (Kept(2), "stopped")]
