"""`Actor.peer` and `current_peer`: whose message is being handled, through waits, restarts, stashes, routers and loops."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    DeadLetter,
    Identity,
    Ref,
    RemotePeer,
    actor,
    bounded,
    conflate,
    current_peer,
    handles,
    message,
    restart,
)
from levada.framework.embedding import ConnectionActor, act_for, adopt, ask_for, send_for
from levada.framework.errors import ActorStopped, MailboxFull
from levada.framework.router import Resize, broadcast, pool, pull, round_robin
from levada.framework.testing import FakeRef, strict

ADA = RemotePeer("test", "192.0.2.1:1", Identity("ada"), None)
BOB = RemotePeer("test", "192.0.2.2:2", Identity("bob"), None)

Seen = list[tuple[str, RemotePeer | None]]


@message
class Note(Asks[str]):
    text: str


@message
class Slow(Asks[str]):
    text: str


@message
class Fail:
    text: str


@message
class Keep(Asks[str]):
    text: str


@message
class TakeUp:
    pass


class Desk(Actor[Note | Slow | Fail | Keep | TakeUp]):
    seen: Seen
    keeps: bool = True

    def note(self, text: str) -> str:
        assert self.peer == current_peer()
        self.seen.append((text, self.peer))
        return text

    @handles
    def on_note(self, m: Note) -> str:
        return self.note(m.text)

    @handles
    async def on_slow(self, m: Slow) -> str:
        await trio.sleep(1)
        return self.note(m.text)

    @handles
    def on_fail(self, m: Fail) -> None:
        self.note(m.text)
        raise ZeroDivisionError

    @handles
    def on_keep(self, m: Keep) -> str | None:
        if self.keeps:
            self.stash(m)
            return None
        return self.note(m.text)

    @handles
    def take_up(self, m: TakeUp) -> None:
        self.keeps = False
        self.note("take up")
        self.unstash_all()

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.note("restarting")


async def test_only_a_message_of_a_connection_has_a_peer(autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen)
        await send_for(ADA, desk, Note("1"))
        desk.tell(Note("2"))
        await send_for(BOB, desk, Slow("3"))
        await send_for(ADA, desk, Slow("4"))
        desk.tell(Slow("5"))
        await send_for(None, desk, Note("6"))
        assert await desk.ask(Note("7")) == "7"
        assert current_peer() is None
    assert seen == [("1", ADA), ("2", None), ("3", BOB), ("4", ADA), ("5", None), ("6", None), ("7", None)]


async def test_questions_have_a_peer(autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen)
        assert [await ask_for(ADA, desk, kind("x")) for kind in (Note, Slow)] == ["x", "x"]
        assert await desk.ask(Slow("y")) == "y"
        with trio.move_on_after(0.5):
            await ask_for(BOB, desk, Slow("z"))
        await trio.sleep(1)
        desk.stop()
        await desk.terminated()
        with pytest.raises(ActorStopped):
            await ask_for(ADA, desk, Note("late"))
    assert seen == [("x", ADA), ("x", ADA), ("y", None), ("z", BOB)]


@pytest.mark.filterwarnings("ignore")
async def test_a_restart_keeps_the_peers_of_queued_messages(caplog: pytest.LogCaptureFixture) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen, supervise=restart())
        await send_for(ADA, desk, Fail("1"))
        await send_for(BOB, desk, Note("2"))
        desk.tell(Note("3"))
        await wait_all_tasks_blocked()
    assert seen == [("1", ADA), ("restarting", None), ("2", BOB), ("3", None)]
    assert "while it handled Fail" in caplog.text


async def test_a_message_that_was_put_aside_keeps_its_peer() -> None:
    seen: Seen = []
    answers: list[str] = []
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        desk = system.spawn(Desk, seen)

        async def ask() -> None:
            answers.append(await ask_for(BOB, desk, Keep("2")))

        await send_for(ADA, desk, Keep("1"))
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        desk.tell(Keep("3"))
        desk.tell(TakeUp())
        desk.tell(Note("4"))
        await wait_all_tasks_blocked()
    assert seen == [("take up", None), ("1", ADA), ("2", BOB), ("3", None), ("4", None)]
    assert answers == ["2"]


async def test_a_message_that_an_actor_passes_on_is_a_local_one() -> None:
    seen: Seen = []

    class Clerk(Actor[Note]):
        desk: Ref[Note]

        @handles
        async def on_note(self, m: Note) -> None:
            self.desk.tell(m)
            await self.desk.ask(Note("waiting"))  # of an actor with a message in its mailbox
            await self.desk.ask(Note("inline"))
            assert (self.peer, current_peer()) == (ADA, ADA)

    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen)
        await send_for(ADA, system.spawn(Clerk, desk), Note("forwarded"))
        await wait_all_tasks_blocked()
    assert seen == [("forwarded", None), ("waiting", None), ("inline", None)]


@pytest.mark.parametrize("routing", [round_robin, pull, broadcast])
async def test_a_router_keeps_the_peer(routing: Any) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desks = system.spawn(pool(Desk, seen, size=1, routing=routing()))
        await send_for(ADA, desks, Note("1"))
        desks.tell(Note("2"))
        await wait_all_tasks_blocked()
        if routing is not broadcast:
            assert await ask_for(BOB, desks, Note("3")) == "3"
            await desks.ask(Note("4"))
        await send_for(ADA, desks, Resize(2))
        await wait_all_tasks_blocked()
        assert system.statistics().actors == 3
    assert seen == [("1", ADA), ("2", None), ("3", BOB), ("4", None)][: 2 if routing is broadcast else 4]


@pytest.mark.parametrize(
    ("mailbox", "left"),
    [(bounded(2), ["1", "2", "3"]), (bounded(2, overflow="drop_old"), ["2", "3"]), (None, ["1", "2", "3"])],
)
async def test_every_mailbox_keeps_the_peer(mailbox: Any, left: list[str], autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen, mailbox=mailbox)
        desk.tell(Slow("0"))
        await wait_all_tasks_blocked()
        for text, peer in (("1", ADA), ("2", BOB), ("3", ADA)):
            await send_for(peer, desk, Note(text))
    assert seen == [("0", None), *((text, BOB if text == "2" else ADA) for text in left)]


async def test_questions_in_line_for_a_full_mailbox_keep_their_peers(autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        desk = system.spawn(Desk, seen, mailbox=bounded(1))
        desk.tell(Slow("0"))
        await wait_all_tasks_blocked()
        for text, peer in (("1", ADA), ("2", BOB), ("3", None)):
            nursery.start_soon(ask_for, peer, desk, Note(text))
            await wait_all_tasks_blocked()
    assert seen == [("0", None), ("1", ADA), ("2", BOB), ("3", None)]


async def test_strict_systems_check_the_message_itself(autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with strict(codec=True)() as system:
        desk = system.spawn(Desk, seen, mailbox=bounded(9, overflow=conflate(lambda m: m.text)))
        await send_for(ADA, desk, Note("1"))
        assert await ask_for(BOB, desk, Slow("2")) == "2"
        await send_for(ADA, desk, Note("3"))
    assert seen == [("1", ADA), ("2", BOB), ("3", ADA)]


async def test_a_conflating_mailbox_sees_the_message(autojump_clock: MockClock) -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        desk = system.spawn(Desk, seen, mailbox=bounded(9, overflow=conflate(lambda m: m.text[0])))
        desk.tell(Slow("0"))
        await wait_all_tasks_blocked()
        for text, peer in (("a1", ADA), ("b1", ADA), ("a2", BOB)):
            await send_for(peer, desk, Note(text))
    assert seen == [("0", None), ("a2", BOB), ("b1", ADA)]


async def test_errors_and_dead_letters_hold_the_message_itself(autojump_clock: MockClock) -> None:
    letters: list[Any] = []

    @actor
    def collect(m: DeadLetter) -> None:
        letters.append(m.message)

    class Closed(Actor[Note]):
        left: list[Any]

        @handles
        async def on_note(self, m: Note) -> None:
            await trio.sleep_forever()

        def undelivered(self, messages: list[Any]) -> None:
            self.left += messages

    left: list[Any] = []
    async with ActorSystem() as system:
        system.events.subscribe(DeadLetter, system.spawn(collect))
        closed = system.spawn(Closed, left, mailbox=bounded(1, overflow="raise"))
        await send_for(ADA, closed, Note("0"))
        await wait_all_tasks_blocked()
        await send_for(ADA, closed, Note("1"))
        with pytest.raises(MailboxFull) as full:
            await send_for(ADA, closed, Note("2"))
        closed.kill()
        await closed.terminated()
        with pytest.raises(ActorStopped) as stopped:
            await send_for(ADA, closed, Note("3"))
        await send_for(ADA, system.spawn(pool(Closed, left, size=1, mailbox=bounded(1, overflow="raise"))), Note("x"))
        await wait_all_tasks_blocked()
    assert (full.value.message, stopped.value.message, left) == (Note("2"), Note("3"), [Note("1")])
    assert letters == []


async def test_a_loop_has_the_peer_of_the_message_it_took_last() -> None:
    seen: Seen = []

    class Loop(Actor[Note]):
        async def run(self) -> None:
            async for m in self.mailbox:
                await trio.lowlevel.checkpoint()
                assert self.peer == current_peer()
                seen.append((m.text, self.peer))
                if m.text == "question":
                    self.reply_later().send("answer")

    async with ActorSystem() as system:
        loop = system.spawn(Loop)
        await send_for(ADA, loop, Note("1"))
        loop.tell(Note("2"))
        assert await ask_for(BOB, loop, Note("question")) == "answer"
        loop.tell(Note("3"))
        await wait_all_tasks_blocked()
    assert seen == [("1", ADA), ("2", None), ("question", BOB), ("3", None)]


class Connection(ConnectionActor):
    seen: Seen
    desk: Desk | None = None

    @property
    def remote_peer(self) -> RemotePeer:
        return ADA

    def started(self) -> None:
        self.desk = Desk(self.seen)
        adopt(self, self.desk)
        self.seen.append(("connection", self.peer))

    @handles
    def on_note(self, m: Note) -> None:
        self.spawn(Child, self.seen)


class Child(Actor[Any]):
    seen: Seen

    def started(self) -> None:
        self.spawn(Desk, self.seen).tell(Note("grandchild"))


async def test_an_actor_of_a_connection_has_its_peer_at_any_time() -> None:
    seen: Seen = []
    async with ActorSystem() as system:
        connection = Connection(seen)
        ref = system.spawn(lambda: connection)
        await wait_all_tasks_blocked()
        assert connection.desk is not None
        connection.desk.ref.tell(Note("local"))
        await send_for(BOB, connection.desk.ref, Note("of another"))
        connection.desk.ref.tell(Note("local"))
        await wait_all_tasks_blocked()
        assert connection.desk.peer == ADA
        ref.tell(Note(""))
        await wait_all_tasks_blocked()
    assert seen == [("connection", ADA), ("local", ADA), ("of another", BOB), ("local", ADA), ("grandchild", None)]


async def test_a_task_acts_for_a_peer_and_so_do_the_tasks_it_starts() -> None:
    seen: Seen = []

    async def note(text: str) -> None:
        seen.append((text, current_peer()))

    async def task(desk: Ref[Note]) -> None:
        act_for(ADA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, "child")
        await desk.ask(Note("inline"))
        async with ActorSystem() as inner:  # whose messages are its own
            await inner.spawn(Desk, seen).ask(Note("another system"))
        await note("task")

    async with ActorSystem() as system, trio.open_nursery() as nursery:
        nursery.start_soon(task, system.spawn(Desk, seen))
    await note("outside")
    assert seen == [("child", ADA), ("inline", None), ("another system", None), ("task", ADA), ("outside", None)]


async def test_a_killed_handler_lets_go_of_its_peer(autojump_clock: MockClock) -> None:
    peers: list[RemotePeer | None] = []

    class Waits(Actor[Note]):
        @handles
        async def on_note(self, m: Note) -> None:
            try:
                await trio.sleep_forever()
            finally:
                peers.append(self.peer)

        def stopping(self, reason: Any) -> None:
            peers.append(self.peer)

    async with ActorSystem() as system:
        waits = system.spawn(Waits)
        await send_for(ADA, waits, Note("1"))
        await wait_all_tasks_blocked()
        waits.kill()
        await waits.terminated()
    assert peers == [ADA, None]


async def test_a_double_of_an_actor_gets_the_message_itself() -> None:
    double = FakeRef()
    await send_for(ADA, double, Note("1"))
    assert [*double.told, *double.sent] == [Note("1")]
