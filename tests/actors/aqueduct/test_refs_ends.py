"""Who hears of an end over a network: watches, links, and the loss of the connection at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import AqueductConfig, connect
from levada.framework import (
    Actor,
    DeadLetter,
    Down,
    Exit,
    Failed,
    Killed,
    Lost,
    Normal,
    Reason,
    Shutdown,
    TerminalState,
    bounded,
    handles,
    restart,
)
from levada.framework.errors import (
    ActorStopped,
    AskTimeout,
    RemoteFailure,
)

from .conftest import Clerk, Do, Note, Private, Start, Trapper, settled

ENDS: dict[str, tuple[Callable[[Any], Any], Reason]] = {
    "stopped": (lambda cell: cell.stop(), Shutdown()),
    "killed": (lambda cell: cell.kill(), Killed()),
    "by itself": (lambda cell: cell.tell(Do("stop")), Normal()),
    "failed": (lambda cell: cell.tell(Do("fail", "x")), Failed(RemoteFailure("'x'", actor="/clerk", kind="KeyError"))),
}


def same(got: Any, wanted: Any) -> bool:
    """Equality of reasons, of what they say of a failure too."""
    if isinstance(wanted, Failed) and isinstance(wanted.error, RemoteFailure):
        error = got.error
        return (type(error), error.kind, error.detail) == (RemoteFailure, wanted.error.kind, wanted.error.detail)
    return bool(got == wanted)


# ---------------------------------------------------------------- watch


@pytest.mark.parametrize("how", ENDS)
async def test_an_end_is_told_to_who_watches(two: Any, autojump_clock: MockClock, how: str) -> None:
    end, reason = ENDS[how]
    async with two() as both:
        watcher = both.here.spawn(Clerk, name="watcher")
        for tag in ("a", "b", "a"):
            await watcher.ask(Do("watch", tag, both.ref))
        callbacks: list[str] = []
        forget = both.ref.on_stopped(lambda: callbacks.append("forgotten"))
        both.ref.on_stopped(lambda: callbacks.append("told"))
        forget()
        await settled()
        end(both.cell)
        assert same(await both.ref.terminated(), reason)
        await wait_all_tasks_blocked()
        downs = watcher._actor.notes
        assert sorted(down.tag for down in downs) == ["a", "b"]
        for down in downs:
            assert isinstance(down, Down)
            assert down.ref is both.ref
            assert same(down.reason, reason)
        assert callbacks == ["told"]
        # It is known now: no more is sent, and whoever comes later hears at once.
        assert not both.ref.is_alive
        channels = len(both.client.core.halves)
        with pytest.raises(ActorStopped) as stopped:
            await both.ref.send(Note("late"))
        assert same(stopped.value.reason, reason)
        with pytest.raises(ActorStopped):
            await both.ref.ask(Do())
        letters = both.here.spawn(Clerk)
        await letters.ask(Do())
        both.ref.tell(Note("dead"))
        assert both.here.statistics().dead_letters == 1
        await watcher.ask(Do("watch", "c", both.ref))
        await wait_all_tasks_blocked()
        assert watcher._actor.notes[-1].tag == "c"
        assert same(await both.ref.terminated(), reason)
        assert len(both.client.core.halves) <= channels
        await settled()
        assert len(both.client.core.halves) == 1


async def test_a_watch_of_the_dead_is_answered_at_once(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        both.cell.kill()
        await wait_all_tasks_blocked()
        assert both.ref.is_alive  # nobody has asked
        assert await both.ref.terminated() == Killed()


async def test_tell_to_the_dead_is_a_dead_letter_where_it_lived(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        listener = both.there.spawn(Clerk)
        seen: list[Any] = []

        class Letters(Actor[Any]):
            @handles
            def letter(self, m: DeadLetter) -> None:
                seen.append((m.message.text, m.to, m.why))

        both.there.events.subscribe(DeadLetter, both.there.spawn(Letters))
        both.cell.stop()
        await wait_all_tasks_blocked()
        both.ref.tell(Note("late"))
        await settled()
        assert seen == [("late", both.cell, "stopped")]
        assert listener.is_alive


async def test_a_watch_taken_back(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        watcher = both.here.spawn(Clerk)
        await settled()
        before = len(both.server.core.halves)
        await watcher.ask(Do("watch", "a", both.ref))
        await watcher.ask(Do("watch", "b", both.ref))
        await settled()
        assert len(both.server.core.halves) == before + 1  # one notice for all who watch
        await watcher.ask(Do("unwatch", "a", both.ref))
        await settled()
        assert len(both.server.core.halves) == before + 1
        await watcher.ask(Do("unwatch", "b", both.ref))
        await watcher.ask(Do("unwatch", "b", both.ref))
        await settled()
        assert len(both.server.core.halves) == before
        assert both.cell._extras.watchers.keys() == {(both.there.registry, "clerk")}
        both.cell.kill()
        await settled()
        assert watcher._actor.notes == []
        await watcher.ask(Do("watch", "c", both.ref))
        await settled()
        assert [down.reason for down in watcher._actor.notes] == [Killed()]


async def test_watches_outlive_a_restart_there(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        cell = both.there.spawn(Trapper, supervise=restart())
        await both.peer.send(Do(who=cell))
        both.there.registry.unregister("clerk")
        both.there.registry.register("clerk", cell)
        ref = await both.peer.lookup("clerk", object)
        watcher = both.here.spawn(Clerk)
        await watcher.ask(Do("watch", 1, ref))
        await watcher.ask(Do("link", who=ref))
        with pytest.raises(ActorStopped, match="KeyError"):
            await ref.ask(Do("fail", 1))
        assert await ref.ask(Do("say", "again")) == "again"
        await settled()
        assert watcher._actor.notes == []
        await both.got.receive()


async def test_an_actor_there_watches_one_here(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        mine = both.here.spawn(Clerk, name="mine")
        await both.ref.ask(Do("watch", "tag", mine))
        mine.stop()
        await settled()
        (down,) = both.clerk.notes
        assert (down.ref.path, down.reason, down.tag) == ("/mine", Shutdown(), "tag")


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("trap", [False, True], ids=["plain", "trapping"])
@pytest.mark.parametrize("who", ["here", "there"])
@pytest.mark.parametrize("how", ENDS)
async def test_links_both_ways(two: Any, autojump_clock: MockClock, how: str, who: str, trap: bool) -> None:
    """Whoever ends, the other end hears why: it ends too, or gets a message; `Normal` ends nobody."""
    end, reason = ENDS[how]
    kind = Trapper if trap else Clerk
    async with two(kind) as both:
        mine = both.here.spawn(kind, name="mine")
        await mine.ask(Do("link", who=both.ref))
        await mine.ask(Do("link", who=both.ref))  # twice is once
        await settled()
        ends, other = (mine, both.cell) if who == "here" else (both.cell, mine)
        actor = other._actor
        end(ends)
        await settled()
        if trap:
            (exit_,) = actor.notes
            assert isinstance(exit_, Exit)
            assert exit_.ref.path == ends.path
            assert same(exit_.reason, reason)
            assert other.is_alive
        elif reason == Normal():
            assert other.is_alive
        else:
            assert same(await other.terminated(), reason)
        both.ref.on_stopped(lambda: None)


async def test_unlink_unties_both(two: Any, autojump_clock: MockClock) -> None:
    async with two(Trapper) as both:
        mine = both.here.spawn(Trapper, name="mine")
        await settled()
        before = len(both.client.core.halves)
        for _ in range(2):
            await mine.ask(Do("link", who=both.ref))
            await settled()
            assert len(both.client.core.halves) == before + 3  # a ref of mine, and a oneshot each way
            await mine.ask(Do("unlink", who=both.ref))
            await settled()
            assert not both.cell._extras.links
            assert not mine._extras.links
        both.cell.kill()
        mine.kill()
        await settled()


async def test_the_far_side_may_unlink_too(two: Any, autojump_clock: MockClock) -> None:
    async with two(Trapper) as both:
        mine = both.here.spawn(Trapper, name="mine")
        await mine.ask(Do("link", who=both.ref))
        await both.ref.send(Note(refs=[mine]))
        await settled()
        (theirs,) = both.clerk.notes[0].refs
        await both.cell.ask(Do("unlink", who=theirs))
        await settled()
        assert not both.cell._extras.links
        assert not mine._extras.links


async def test_both_link_at_the_same_time(two: Any, autojump_clock: MockClock) -> None:
    async with two(Trapper) as both:
        mine = both.here.spawn(Trapper, name="mine")
        await both.ref.send(Note(refs=[mine]))
        await settled()
        (theirs,) = both.clerk.notes.pop().refs
        mine.tell(Do("link", who=both.ref))
        both.cell.tell(Do("link", who=theirs))
        await settled()
        mine.kill()
        await settled()
        assert {(type(note), note.reason) for note in both.clerk.notes} == {(Exit, Killed())}
        assert not both.cell._extras.links


async def test_who_does_not_accept_remote_links_refuses_them(two: Any, autojump_clock: MockClock) -> None:
    async with two(Private) as both:
        assert not Actor.accept_remote_links
        mine = both.here.spawn(Trapper, name="mine")
        await mine.ask(Do("link", who=both.ref))
        await settled()
        (exit_,) = mine._actor.notes
        assert exit_.ref is both.ref
        assert exit_.reason.error.kind == "ActorError"
        assert exit_.reason.error.detail == ("/clerk lets no actor of another system link to it (accept_remote_links)")
        assert both.cell.is_alive
        assert not both.cell._extras.links
        assert not mine._extras.links
        # The other way round it is the one there that asks, and this one that lets it.
        await both.ref.ask(Do("link", who=mine))
        both.cell.kill()
        await settled()
        assert mine._actor.notes[-1].reason == Killed()


async def test_a_link_to_the_dead_ends_at_once(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        both.cell.kill()
        await wait_all_tasks_blocked()
        mine = both.here.spawn(Clerk)
        await mine.ask(Do("link", who=both.ref))
        assert await mine.terminated() == Killed()
        assert await both.ref.terminated() == Killed()
        again = both.here.spawn(Clerk)
        again.tell(Do("link", who=both.ref))
        assert await again.terminated() == Killed()  # known here by now


async def test_an_end_does_not_wait_behind_messages(two: Any, autojump_clock: MockClock) -> None:
    """The actor there has stopped reading; the end of the one it is linked to still reaches it."""
    async with two(mailbox=bounded(1), core=AqueductConfig(window=2, mailbox=2)) as both:
        mine = both.here.spawn(Clerk)
        await mine.ask(Do("link", who=both.ref))
        both.ref.tell(Do("wait"))
        with trio.move_on_after(5):
            while True:
                await both.ref.send(Note())
        mine.kill()
        assert await both.cell.terminated() == Killed()


# ---------------------------------------------------------------- the connection is lost


async def test_a_lost_connection_is_the_end_of_its_refs(two: Any, autojump_clock: MockClock) -> None:
    """Questions in flight fail at once; who watches, is linked, or waits hears `Lost`; on both sides."""
    async with two(Trapper) as both:
        lost = Lost(both.peer.info.peer)
        mine = both.here.spawn(Trapper, name="mine")
        plain = both.here.spawn(Clerk, name="plain")
        for actor in (mine, plain):
            await actor.ask(Do("link", who=both.ref))
        await mine.ask(Do("watch", 7, both.ref))
        await both.ref.ask(Do("watch", 8, mine))
        errors: list[Any] = []

        async def ask(question: Any) -> None:
            with pytest.raises(ActorStopped, match=r"has stopped \(lost\)") as stopped:
                await both.ref.ask(question, timeout=None)
            errors.append((stopped.value.message, stopped.value.reason, trio.current_time()))

        questions = [Do("wait"), Do("count"), Do("sleep", 1)]
        async with trio.open_nursery() as nursery:
            for question in questions:
                nursery.start_soon(ask, question)
                await wait_all_tasks_blocked()
            await settled()
            began = trio.current_time()
            both.cut()
        assert {id(message) for message, _, _ in errors} == {id(question) for question in questions}
        assert all(reason == lost and at == began for _, reason, at in errors)
        assert await both.ref.terminated() == lost
        assert await plain.terminated() == lost
        await wait_all_tasks_blocked()  # an actor notes it in a turn of its own
        kinds = {type(note): note for note in mine._actor.notes}
        assert kinds.keys() == {Exit, Down}
        assert (kinds[Exit].ref, kinds[Exit].reason) == (both.ref, lost)
        assert (kinds[Down].ref, kinds[Down].reason, kinds[Down].tag) == (both.ref, lost, 7)
        both.clerk.gate.set()
        await settled()
        there = {(type(note), note.ref.path, type(note.reason)) for note in both.clerk.notes}
        assert there == {(Exit, "/mine", Lost), (Exit, "/plain", Lost), (Down, "/mine", Lost)}
        assert both.cell.is_alive
        assert not both.ref.is_alive
        both.ref.tell(Note())
        assert both.here.statistics().dead_letters == 1
        assert not both.cell._extras.links


STAGES = [
    "before the question leaves",
    "question under way",
    "question queued",
    "handler runs",
    "standing in line",
    "sending",
    "link under way",
    "watch under way",
]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_loss_at_every_stage(two: Any, autojump_clock: MockClock, stage: str) -> None:
    """Nothing waits forever, nothing is left behind."""
    config = {"core": AqueductConfig(window=2, mailbox=2)}
    async with two(Trapper, bounded(2), **config) as both:
        lost = Lost(both.peer.info.peer)
        outcomes: list[Any] = []

        async def attempt(function: Any, *arguments: Any) -> None:
            try:
                outcomes.append(await function(*arguments))
            except ActorStopped as error:
                outcomes.append(error.reason)

        mine = both.here.spawn(Trapper, name="mine")
        if stage in ("standing in line", "sending"):
            both.ref.tell(Do("wait"))
            with trio.move_on_after(5):
                while True:
                    await both.ref.send(Note())
        async with trio.open_nursery() as nursery:
            match stage:
                case "question queued":
                    both.cell.tell(Do("wait"))
                    nursery.start_soon(attempt, both.ref.ask, Do("count"))
                    await trio.sleep(1)
                case "handler runs":
                    nursery.start_soon(attempt, both.ref.ask, Do("wait"))
                    await trio.sleep(1)
                case "sending":
                    nursery.start_soon(attempt, both.ref.send, Note("never"))
                    await settled()
                case "link under way":
                    mine.tell(Do("link", who=both.ref))
                case "watch under way":
                    mine.tell(Do("watch", who=both.ref))
                case "before the question leaves" | "question under way":
                    nursery.start_soon(attempt, both.ref.ask, Do("count"))
                    if stage == "question under way":
                        await trio.lowlevel.checkpoint()
                case "standing in line":
                    nursery.start_soon(attempt, both.ref.ask, Do("count"))
                    await trio.sleep(1)
            both.cut()
        await settled()
        if stage in ("link under way", "watch under way"):
            assert [(note.ref, note.reason) for note in mine._actor.notes] == [(both.ref, lost)]
        else:
            assert outcomes in ([lost], [0])  # the answer may have been faster than the cut
            if stage not in ("before the question leaves", "question under way"):
                assert outcomes == [lost]
        assert not both.client.halves.records
        assert not both.client.core.background
        both.clerk.gate.set()


async def test_leaving_in_order_does_not_wait_for_refs_that_rest(two: Any, autojump_clock: MockClock) -> None:
    """What was told arrives, what was asked is answered; refs that are only held, watched or linked hold nobody up."""
    async with two(Trapper) as both:
        await settled()
        mine = both.here.spawn(Trapper, name="mine")
        answers: list[Any] = []
        began = trio.current_time()
        async with connect(both.here, both.listener.url, object) as peer:
            ref = await peer.lookup("clerk", object)
            await mine.ask(Do("link", who=ref))
            await mine.ask(Do("watch", who=ref))
            await ref.ask(Do("watch", who=mine))

            async def ask() -> None:
                answers.append(await ref.ask(Do("sleep", 2)))

            both.here.start_task(ask, name="ask")
            await wait_all_tasks_blocked()
            for number in range(100):
                ref.tell(str(number))
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.2)
        assert answers == ["slept"]
        await wait_all_tasks_blocked()  # the clerk has had its turns
        texts = [note for note in both.clerk.notes if isinstance(note, str)]
        assert texts == [str(number) for number in range(100)]
        assert {type(note.reason) for note in mine._actor.notes} == {Lost}
        assert await ref.terminated() == Lost(peer.info.peer)


async def test_a_network_that_falls_silent(start_on_network: Start, autojump_clock: MockClock) -> None:
    """Over QUIC with packets lost and reordered; then nothing comes any more, and everybody hears of it."""
    net = SimNet(6, delay=0.01, jitter=0.02, loss=0.05, turns=200_000)
    async with start_on_network(net) as ends:
        clerk: Any = ends.system.spawn(Trapper, name="clerk")
        mine: Any = ends.system.spawn(Trapper, name="mine")
        await ends.peer.send(Note(refs=[clerk]))
        (ref,) = (await ends.got.receive()).refs
        for number in range(50):
            await ref.send(str(number))
        assert await ref.ask(Do("texts")) == [str(number) for number in range(50)]
        await mine.ask(Do("link", who=ref))
        assert await ref.ask(Do("count")) == 50
        net.partition("client", "server")
        with pytest.raises(ActorStopped) as stopped:
            await ref.ask(Do("count"), timeout=None)
        assert isinstance(stopped.value.reason, Lost)
        await settled()
        assert [type(note.reason) for note in mine._actor.notes] == [Lost]
        assert isinstance(clerk._actor.notes[-1].reason, Lost)
        net.heal()


async def test_a_connection_that_closes_waits_for_all_that_was_told(two: Any, autojump_clock: MockClock) -> None:
    """A ref that rests is not waited for; messages that its window still holds back are."""
    core = AqueductConfig(window=2)
    async with two(core=core) as both:
        clerk = both.clerk
        await both.ref.ask(Do("count"))
        for number in range(50):
            both.ref.tell(Note(str(number)))
    assert [note.text for note in clerk.notes] == [str(number) for number in range(50)]


async def test_errors_say_at_which_peer_the_actor_is(two: Any, autojump_clock: MockClock) -> None:
    """A path alone could be that of an actor here."""
    async with two() as both:
        with pytest.raises(AskTimeout, match=r"^/clerk at office/server did not answer Do in 0\.1 s$"):
            await both.ref.ask(Do("wait"), timeout=0.1)
        both.cut()
        await both.ref.terminated()
        with pytest.raises(ActorStopped, match=r"^/clerk at office/server has stopped \(lost\)$"):
            await both.ref.ask(Do("count"))
        both.clerk.gate.set()


# ---------------------------------------------------------------- the server leaves in order


@pytest.mark.parametrize(("question", "answer"), [(Do("say", 7), 7), (Do("sleep", 0.5), "slept")])
async def test_a_question_on_its_way_when_the_server_leaves_is_answered(
    two: Any, autojump_clock: MockClock, question: Do, answer: Any
) -> None:
    """It crosses with the news that the entrypoint is closed. Then the connection ends: an idle ref does not hold it up."""
    async with two() as both:
        answers: list[Any] = []

        async def ask() -> None:
            assert both.peer.entry.state is TerminalState.OPEN
            answers.append(await both.ref.ask(question))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(both.listener.aclose)
        assert answers == [answer]
        assert both.peer.closed
        assert trio.current_time() < 1.0
