"""An actor in front of another one: what passes at once, what waits in order, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Failed, MailboxPolicy, Shutdown, bounded, handles, message
from levada.framework.embedding import Forwarder, finish
from levada.framework.errors import ActorStopped, AskCycle, AskTimeout, MailboxFull
from levada.framework.events import DeadLetter
from levada.framework.router import group, pull


@message("test.forwarder.add", frozen=True)
class Add(Asks[int]):
    n: int
    seconds: float = 0.0


class Sum(Actor[Add]):
    """Adds numbers, and keeps them."""

    def __init__(self) -> None:
        self.got: list[int] = []

    @handles
    async def add(self, m: Add) -> int:
        if m.seconds:
            await trio.sleep(m.seconds)
        self.got.append(m.n)
        return sum(self.got)


class Letters(Actor[DeadLetter]):
    def __init__(self, kept: list[tuple[Any, str]]) -> None:
        self.kept = kept

    @handles
    def letter(self, m: DeadLetter) -> None:
        self.kept.append((m.message, m.why))


def forwarder(system: ActorSystem, mailbox: MailboxPolicy | None = None) -> tuple[Forwarder, Any]:
    made = Forwarder()
    return made, system.spawn(lambda: made, mailbox=mailbox)


async def test_messages_and_questions_pass_at_once_and_wait_in_order_without_an_actor(
    autojump_clock: MockClock,
) -> None:
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        front, ref = forwarder(system)
        answers: list[int] = []

        async def ask(n: int) -> None:
            answers.append(await ref.ask(Add(n)))

        ref.tell(Add(1))
        await trio.sleep(1)
        nursery.start_soon(ask, 10)
        await wait_all_tasks_blocked()
        ref.tell(Add(100))
        ours = Sum()
        front.point(system.spawn(lambda: ours))
        assert await ref.ask(Add(0)) == 111
        await wait_all_tasks_blocked()
        assert answers == [11]
        assert ours.got == [1, 10, 100, 0]
        theirs = Sum()
        front.point(None)
        with pytest.raises(AskTimeout):
            await ref.ask(Add(5), timeout=1)  # it is withdrawn, so no actor handles it
        front.point(system.spawn(lambda: theirs))
        assert await ref.ask(Add(7)) == 7
        assert (ours.got, theirs.got) == ([1, 10, 100, 0], [7])


async def test_what_an_actor_had_when_it_ended_is_not_passed_on_again(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        front, ref = forwarder(system)
        first = system.spawn(Sum)
        front.point(first)

        async def ask() -> None:
            with pytest.raises(ActorStopped, match=rf"^{first.path.replace('$', '.')} has stopped"):
                await ref.ask(Add(1, seconds=5))

        nursery.start_soon(ask)
        await trio.sleep(1)
        first.kill()
        await first.terminated()
        second = Sum()
        front.point(system.spawn(lambda: second))
        assert await ref.ask(Add(2)) == 2
        assert second.got == [2]


async def test_senders_wait_for_room_at_the_actor_and_behind_it(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        front, ref = forwarder(system, bounded(3))
        slow = Sum()
        front.point(system.spawn(lambda: slow, mailbox=bounded(1)))
        sent: list[int] = []

        async def send() -> None:
            for n in range(10):
                await ref.send(Add(n, seconds=1))
                sent.append(n)

        nursery.start_soon(send)
        await trio.sleep(0.5)
        assert 2 <= len(sent) < 7
        with pytest.raises(MailboxFull, match="holds 3 messages"):
            for _ in range(4):
                ref.tell(Add(-1))
        await trio.sleep(60)
        assert [n for n in slow.got if n >= 0] == [*range(10)]


async def test_a_message_that_waits_for_room_goes_to_the_next_actor(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        front, ref = forwarder(system)
        first, second = Sum(), Sum()
        old: Any = system.spawn(lambda: first, mailbox=bounded(1))
        front.point(old)
        for n in range(4):
            ref.tell(Add(n, seconds=1))
        await trio.sleep(0.1)
        front.point(None)
        finish(old)
        assert await old.terminated() == Shutdown()
        front.point(system.spawn(lambda: second))
        await trio.sleep(60)
        assert first.got + second.got == [0, 1, 2, 3]
        assert second.got != []


async def test_it_ends_for_a_reason_and_what_waits_fails(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        letters: list[tuple[Any, str]] = []
        system.events.subscribe(DeadLetter, system.spawn(Letters, letters))
        for end in ("reason", "stop", "now", "kill"):
            front, ref = forwarder(system)

            async def ask(ref: Any = ref) -> None:
                with pytest.raises(ActorStopped):
                    await ref.ask(Add(1))

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            ref.tell(Add(2))
            error = ValueError("gone")
            if end == "reason":
                front.end(Failed(error))
                assert await ref.terminated() == Failed(error)
            else:
                ref.kill() if end == "kill" else ref.stop(now=end == "now")
                await ref.terminated()
            assert not ref.is_alive
        await trio.sleep(1)
        assert [m for m, _ in letters if m == Add(2)] == [Add(2)] * 4


async def test_circles_through_it_are_found(autojump_clock: MockClock) -> None:
    class Ring(Actor[Add]):
        @handles
        async def add(self, m: Add) -> int:
            answer: int = await ref.ask(Add(m.n + 1))
            return answer

    async with ActorSystem() as system:
        front, ref = forwarder(system)
        front.point(system.spawn(Ring))
        with pytest.raises(ActorStopped) as caught:
            await ref.ask(Add(0))
        assert isinstance(caught.value.__cause__, AskCycle)


async def test_it_works_for_a_pull_router(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        front, ref = forwarder(system)
        system.groups.join("work", ref)
        ours = Sum()
        front.point(system.spawn(lambda: ours))
        router = system.spawn(group("work", routing=pull()))
        assert [await router.ask(Add(n)) for n in range(3)] == [0, 1, 3]
