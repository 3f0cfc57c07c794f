"""Refs of actors in another system: what is sent to them, what they answer, how they travel, and how they are found."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import AqueductConfig, PeerConfig, RawMessage, connect, envelopes, serve
from levada.actors.aqueduct.refs import RemoteRef
from levada.framework import Actor, ActorSystem, Killed, Lost, Normal, Ref, Shutdown, bounded, channel, handles, message
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ChannelCancelled,
    ChannelConnectionLost,
    ChannelError,
    ConfigurationError,
    HandleNotForwardable,
    MailboxFull,
    NameUnknown,
    NoValue,
    RemoteFailure,
)
from levada.framework.testing import FakeRef
from levada.transports.quic import QuicConfig

from .conftest import Clerk, Do, Note, Trapper, settled

NOTHING = (0,) * 8


@message("tests.aqueduct.Unknown")
class Unknown:
    """Nobody handles it."""


# ---------------------------------------------------------------- tell, send, ask


async def test_tell_send_and_ask_keep_their_order(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        both.ref.tell(Note("a"))
        await both.ref.send("b")
        assert await both.ref.ask(Do("texts")) == ["a", "b"]
        both.ref.tell(Note("c"))
        assert await both.ref.ask(Do("texts")) == ["a", "b", "c"]
        assert (both.ref.path, both.ref.incarnation, both.ref.is_alive) == ("/clerk", both.cell.incarnation, True)
        assert repr(both.ref) == f"<Ref /clerk#{both.cell.incarnation} at {both.peer.info.peer}>"


@pytest.mark.rule("RF-15")
async def test_rf15_one_task_is_one_sender_however_it_sends(two: Any, autojump_clock: MockClock) -> None:
    """More messages than any window holds, told and sent in turn: all arrive, in order."""
    async with two(mailbox=bounded(3)) as both:
        for number in range(1000):
            if number % 3:
                await both.ref.send(str(number))
            else:
                while True:
                    try:
                        both.ref.tell(str(number))
                        break
                    except MailboxFull:
                        await trio.sleep(0.01)
        await settled()
        assert both.clerk.notes == [str(number) for number in range(1000)]


@pytest.mark.rule("RF-15")
async def test_rf15_tell_raises_when_the_window_is_full_and_send_waits(two: Any, autojump_clock: MockClock) -> None:
    async with two(mailbox=bounded(2), core=AqueductConfig(window=4, mailbox=4)) as both:
        with trio.CancelScope() as scope:

            async def block(into: list[Any]) -> None:
                into.append(await both.ref.ask(Do("wait"), timeout=None))

            answers: list[Any] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(block, answers)
                await wait_all_tasks_blocked()
                sent = 0
                with pytest.raises(MailboxFull, match="256 messages are on their way to /clerk") as full:
                    while True:
                        both.ref.tell(str(sent))
                        sent += 1
                        await wait_all_tasks_blocked()
                assert (full.value.capacity, full.value.message, full.value.actor) == (256, str(sent), "/clerk")
                # The actor's mailbox, one that waits at its door, the peer's mailbox, the window, the queue here.
                assert 256 <= sent <= 2 + 1 + 4 + 4 + 256
                with trio.move_on_after(5) as patience:
                    await both.ref.send("too late")
                assert patience.cancelled_caught
                nursery.start_soon(both.ref.send, "last")
                await wait_all_tasks_blocked()
                both.clerk.gate.set()
            await settled()
            assert answers == ["waited"]
            assert both.clerk.notes == [*map(str, range(sent)), "last"]
        assert not scope.cancelled_caught


async def test_what_cannot_travel_is_its_senders_error(two: Any, autojump_clock: MockClock) -> None:
    """The handles in it stay here, and the ref goes on."""
    async with two() as both:
        sender, receiver = channel(int)
        for method in (both.ref.send, both.ref.ask):
            with pytest.raises(TypeError, match="cannot travel"):
                await method(Do(value=[sender, object()]))
        with pytest.raises(TypeError, match="object cannot travel"):
            both.ref.tell(object())
        with pytest.raises(HandleNotForwardable, match="a FakeRef cannot travel"):
            both.ref.tell(Note(refs=[FakeRef()]))
        sender.send_nowait(1)
        assert receiver.receive_nowait() == 1
        sender.finish_nowait()
        assert await both.ref.ask(Do("count")) == 0


async def test_handles_travel_in_what_is_told_asked_and_answered(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        for method in (both.ref.tell, both.ref.send, both.ref.ask):
            sender, receiver = channel(int)
            done = method(Do("into", sender))
            if done is not None:
                await done
            assert [number async for number in receiver] == [0]
        numbers = await both.ref.ask(Do("stream", 5))
        assert [number async for number in numbers] == [0, 1, 2, 3, 4]
        assert await both.ref.ask(Do("say", [1, {"ref": both.ref}])) == [1, {"ref": both.ref}]


@pytest.mark.handler_fails
async def test_an_answer_that_cannot_travel_is_an_error_of_the_ask(two: Any, autojump_clock: MockClock) -> None:
    class Odd(Clerk):
        @handles
        async def do(self, m: Do) -> Any:
            return object()

    async with two(Odd) as both:
        with pytest.raises(ActorError, match="the answer to Do cannot travel: object cannot travel"):
            await both.ref.ask(Do())
        await both.ref.send("goes on")
        await settled()
        assert both.clerk.notes == ["goes on"]


async def test_a_failed_handler_is_actor_stopped_with_its_text(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        question = Do("fail", "no such thing")
        with pytest.raises(ActorStopped, match=r"/clerk failed: KeyError\('no such thing'\)") as caught:
            await both.ref.ask(question)
        error = caught.value
        assert (error.actor, error.message) == ("/clerk", question)
        cause = error.__cause__
        assert isinstance(cause, RemoteFailure)
        assert (cause.kind, cause.detail, str(cause)) == ("KeyError", "'no such thing'", "KeyError: 'no such thing'")
        assert error.reason.error is cause


@pytest.mark.parametrize(
    "text", ["\ud800", "x" * 100_000, "nul \x00 and esc \x1b"], ids=["surrogate", "long", "control"]
)
async def test_whatever_an_exception_says_gets_across(two: Any, autojump_clock: MockClock, text: str) -> None:
    class Talkative(Clerk):
        @handles
        async def do(self, m: Do) -> Any:
            raise RuntimeError(text)

    async with two(Talkative) as both:
        with pytest.raises(ActorStopped) as caught:
            await both.ref.ask(Do())
        assert isinstance(caught.value.__cause__, RemoteFailure)
        assert caught.value.__cause__.detail == text[:4096].encode("utf-8", "replace").decode()


async def test_an_exception_without_a_text(two: Any, autojump_clock: MockClock) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

        __repr__ = __str__

    class Broken(Clerk):
        @handles
        async def do(self, m: Do) -> Any:
            self.reply_later().fail(Mute())

    async with two(Broken) as both:
        with pytest.raises(ActorError, match=r"/clerk refused: Mute: <Mute without text: ValueError>"):
            await both.ref.ask(Do())


async def test_other_failures_of_an_ask(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        with pytest.raises(ActorError, match="/clerk refused: ValueError: not today") as refused:
            await both.ref.ask(Do("refuse", "not today"))
        assert isinstance(refused.value.__cause__, RemoteFailure)
        with pytest.raises(NoValue, match="the answer to Do was given up"):
            await both.ref.ask(Do("forget"))
        with pytest.raises(ActorError, match="has no handler for Unknown"):
            await both.ref.ask(Unknown())
        assert await both.ref.ask(Do("stop")) == "stopping"
        with pytest.raises(ActorStopped, match="has stopped") as stopped:
            await both.ref.ask(Do("count"))
        assert stopped.value.reason == Normal()
        await settled()


async def test_a_mailbox_that_drops_refuses_the_question(two: Any, autojump_clock: MockClock) -> None:
    async with two(mailbox=bounded(1, overflow="drop_new")) as both, trio.open_nursery() as nursery:
        nursery.start_soon(both.ref.ask, Do("wait"))
        await wait_all_tasks_blocked()
        both.ref.tell("takes the room")
        with pytest.raises(MailboxFull, match="holds 1 message") as full:
            await both.ref.ask(Do("count"))
        assert (full.value.capacity, full.value.actor) == (1, "/clerk")
        both.clerk.gate.set()


async def test_an_ask_out_of_time_is_withdrawn(two: Any, autojump_clock: MockClock) -> None:
    """The handler never begins with what nobody waits for, and nothing is left behind."""
    async with two() as both, trio.open_nursery() as nursery:
        nursery.start_soon(both.ref.ask, Do("sleep", 2))
        await wait_all_tasks_blocked()
        began = trio.current_time()
        with pytest.raises(AskTimeout, match=r"/clerk at \S+ did not answer Do in 0\.5 s") as late:
            await both.ref.ask(Do("fail", "never begun"), timeout=0.5)
        assert trio.current_time() - began == pytest.approx(0.5)
        assert late.value.actor == "/clerk"
        with trio.move_on_after(0.5):
            await both.ref.ask(Do("fail", "cancelled, never begun"))
        await trio.sleep(2)
        assert await both.ref.ask(Do("say", "alive")) == "alive"
        await settled()
        assert len(both.client.core.halves) == 2  # the entrypoint and the ref


async def test_a_channel_in_a_withdrawn_question_ends_as_one_that_its_holder_gave_up(
    two: Any, autojump_clock: MockClock
) -> None:
    """It has arrived, so it is not lost."""
    async with two() as both, trio.open_nursery() as nursery:
        nursery.start_soon(both.ref.ask, Do("sleep", 2))
        await wait_all_tasks_blocked()
        sender, receiver = channel(int)
        with trio.move_on_after(0.5):
            await both.ref.ask(Do("into", value=sender))
        with pytest.raises(ChannelCancelled, match="the sender cancelled"):
            await receiver.receive()


async def test_a_late_answer_is_dropped(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        with pytest.raises(AskTimeout):
            await both.ref.ask(Do("sleep", 2), timeout=1)
        await settled()
        assert both.there.statistics().late_replies == 1
        assert await both.ref.ask(Do("count")) == 0


async def test_the_systems_time_for_asks_counts(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        began = trio.current_time()
        with pytest.raises(AskTimeout):
            await both.ref.ask(Do("wait"))
        assert trio.current_time() - began == pytest.approx(5.0)
        both.clerk.gate.set()


async def test_asks_inside_asks_and_a_circle_that_only_time_ends(two: Any, autojump_clock: MockClock) -> None:
    """Over two systems nobody sees the circle; each ask has its time."""
    async with two() as both:
        local = both.here.spawn(Clerk, name="local")
        helper = both.here.spawn(Clerk, name="helper")
        # From here to there and back here, to another actor: an answer.
        assert await local.ask(Do("ask", Do("ask", Do("say", 7), helper), both.ref)) == 7
        began = trio.current_time()
        with pytest.raises(ActorStopped, match="AskTimeout") as stopped:
            await local.ask(Do("ask", Do("ask", Do("say", 7), local), both.ref), timeout=None)
        assert isinstance(stopped.value.__cause__, AskTimeout)
        assert trio.current_time() - began == pytest.approx(5.0)


# ---------------------------------------------------------------- the rest of a ref


async def test_stop_and_kill_are_refused(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        for method, word in ((both.ref.stop, "stopped"), (both.ref.kill, "killed")):
            with pytest.raises(ActorError, match=f"/clerk lives at .* and is {word} only by its own system") as error:
                method()
            assert error.value.actor == "/clerk"
        with pytest.raises(ConfigurationError, match="has no mailbox in this process"):
            both.ref.try_tell("x")
        with pytest.raises(TypeError, match="cannot be pickled"):
            both.ref.__reduce__()
        assert await both.ref.ask(Do("count")) == 0


async def test_threads_tell_and_ask(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        remote = both.ref.from_thread

        def work() -> list[Any]:
            remote.tell("from a thread")
            got: list[Any] = [remote.ask(Do("texts"))]
            for question, kind in ((Do("fail", "x"), ActorStopped), (Do("say", object()), TypeError)):
                with pytest.raises(kind):
                    remote.ask(question)
            return got

        autojump_clock.autojump_threshold = math.inf  # a thread works in real time
        assert await trio.to_thread.run_sync(work) == [["from a thread"]]
        autojump_clock.autojump_threshold = 0
        with pytest.raises(RuntimeError, match="would wait forever"):
            remote.ask(Do("count"))


async def test_a_thread_out_of_time_withdraws_its_question(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        remote = both.ref.from_thread
        autojump_clock.autojump_threshold = math.inf

        def work() -> None:
            with pytest.raises(AskTimeout):
                remote.ask(Do("wait"), timeout=0.01)

        await trio.to_thread.run_sync(work)
        autojump_clock.autojump_threshold = 0
        await settled()
        assert len(both.client.core.halves) == 2
        both.clerk.gate.set()


async def test_remote_refs_in_groups_registries_and_routers(two: Any, autojump_clock: MockClock) -> None:
    """What the framework does with refs it does with these."""
    from levada.framework.router import group

    async with two() as both:
        both.here.registry.register("far", both.ref)
        both.here.groups.join("desks", both.ref)
        assert both.here.groups.publish("desks", "published") == 1
        router = both.here.spawn(group("desks"))
        assert await router.ask(Do("texts")) == ["published"]
        both.cell.stop()
        await settled()
        assert both.here.registry.get("far") is None
        assert both.here.groups.members("desks") == []


async def test_routers_and_loops_are_actors_too(two: Any, autojump_clock: MockClock) -> None:
    """Questions from elsewhere go through them as those from here do."""
    from levada.framework.router import pool, pull

    class Loop(Actor[Any]):
        async def run(self) -> None:
            async for m in self.mailbox:
                if isinstance(m, Do):
                    self.reply_later().send([m.what])

    async with two() as both:
        for name, factory in (
            ("pool", pool(Clerk, size=2)),
            ("pull", pool(Clerk, size=2, routing=pull())),
            ("loop", Loop),
        ):
            await both.ref.send(Note(refs=[both.here.spawn(factory)], named={}))
            await settled()
            ref = both.clerk.notes.pop().refs[0]
            assert await ref.ask(Do("say", ["say"])) == ["say"], name
            ref.tell(Note())


async def test_signals_stand_in_line_behind_a_full_window(two: Any, autojump_clock: MockClock) -> None:
    """Watches, links, and what threads and routers tell: nobody waits for them, and they leave in their turn."""
    from levada.framework.router import group

    async with two(Trapper, bounded(2), core=AqueductConfig(window=2, mailbox=2)) as both:
        mine: Any = both.here.spawn(Trapper, name="mine")
        both.here.groups.join("desks", both.ref)
        router = both.here.spawn(group("desks"))
        both.ref.tell(Do("wait"))
        with trio.move_on_after(5):
            while True:
                await both.ref.send("x")
        await mine.ask(Do("unwatch", 1, both.ref))
        for what in ("link", "watch"):
            await mine.ask(Do(what, 1, both.ref))
        both.ref.from_thread.tell("from a thread")
        with trio.move_on_after(1):
            await router.ask(Do("fail", "given up, never begun"))
        with pytest.raises(AskTimeout):
            await router.ask(Do("fail", "out of time, never begun"), timeout=1)
        assert not both.cell._extras.links
        both.clerk.gate.set()
        await settled()
        assert both.clerk.notes[-1] == "from a thread"
        assert set(both.clerk.notes[:-1]) == {"x"}
        both.cell.kill()
        await settled()
        assert {type(note).__name__ for note in mine._actor.notes} == {"Exit", "Down"}


async def test_nothing_that_stands_in_line_is_forgotten_when_the_actor_ends(
    two: Any, autojump_clock: MockClock
) -> None:
    """Questions fail; what was told or sent is a dead letter, there or here, or given back."""
    async with two(Trapper, bounded(2), core=AqueductConfig(window=2, mailbox=2)) as both:
        mine: Any = both.here.spawn(Trapper, name="mine")
        await mine.ask(Do("watch", 1, both.ref))
        both.ref.tell(Do("wait"))
        told = 0
        with trio.move_on_after(5):
            while True:
                await both.ref.send("x")
                told += 1
        both.ref.from_thread.tell("from a thread")
        given_back: list[Any] = []

        async def ask() -> None:
            with pytest.raises(ActorStopped) as stopped:
                await both.ref.ask(Do("count"))
            assert stopped.value.reason == Killed()

        async def send() -> None:
            try:
                await both.ref.send("y")
            except ActorStopped as stopped:  # if its end is known before there is room
                given_back.append(stopped.reason)

        async with trio.open_nursery() as nursery:
            for function in (ask, send):
                nursery.start_soon(function)
            await mine.ask(Do("link", 1, both.ref))
            await trio.sleep(1)
            both.cell.kill()
        await settled()
        letters = both.there.statistics().dead_letters + both.here.statistics().dead_letters
        assert letters + len(given_back) == told + 2
        assert given_back in ([], [Killed()])
        notes = {(type(note).__name__, note.reason) for note in mine._actor.notes}
        assert notes == {("Exit", Killed()), ("Down", Killed())}


async def test_refs_do_not_travel_beside_octets(autojump_clock: MockClock) -> None:
    async def ignore(m: Any) -> None: ...

    async with ActorSystem() as system:
        clerk = system.spawn(Clerk)
        async with (
            serve(system, "aqueduct+memory://raw", ignore, message_type=RawMessage) as listener,
            connect(system, listener.url, RawMessage) as peer,
        ):
            with pytest.raises(HandleNotForwardable, match="cannot travel in a RawMessage"):
                await peer.send(RawMessage(b"", (clerk,)))


# ---------------------------------------------------------------- how refs travel


@pytest.mark.rule("RF-12")
async def test_rf12_a_ref_goes_home_as_itself(two: Any, autojump_clock: MockClock) -> None:
    """In fields, lists, dicts, nested messages, answers and channels; without a channel of its own."""
    async with two() as both:
        assert await both.ref.ask(Do("me")) is both.ref  # the same actor is the same ref
        channels = len(both.client.core.halves)
        await both.ref.send(
            Note(refs=[both.ref, both.ref], named={"a": both.ref}, inner=Note(refs=[both.ref], inner=Note()))
        )
        await settled()
        (note,) = both.clerk.notes
        assert [note.refs, note.named, note.inner.refs] == [[both.cell] * 2, {"a": both.cell}, [both.cell]]
        assert await both.ref.ask(Do("last")) is both.ref
        await settled()
        assert len(both.client.core.halves) <= channels + 1  # `send` watches


async def test_refs_travel_both_ways_and_are_the_same_actor_each_time(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        mine = both.here.spawn(Clerk, name="mine")
        await both.ref.send(Note(refs=[mine, mine], named={"x": mine}))
        await settled()
        (note,) = both.clerk.notes
        there = note.refs[0]
        assert isinstance(there, RemoteRef)
        assert (there.path, there.incarnation) == ("/mine", mine.incarnation)
        assert note.refs[1] is note.named["x"] is there
        assert await both.ref.ask(Do("last")) is mine
        there.tell("hello")
        assert await there.ask(Do("texts")) == ["hello"]
        await settled()
        # Copies that brought nothing new have given their channels up: the entrypoint, the ref and its watch, mine.
        assert len(both.client.core.halves) == 4


async def test_refs_in_channels(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        mine = both.here.spawn(Clerk, name="mine")
        sender, receiver = channel(Ref[Any])
        await both.peer.send(Do(value=receiver))
        arrived = (await both.got.receive()).value
        await sender.send(mine)
        await sender.send(both.ref)
        sender.finish_nowait()
        far, home = [ref async for ref in arrived]
        assert (far.path, home) == ("/mine", both.cell)
        assert await far.ask(Do("say", 1)) == 1


@pytest.mark.rule("RF-13")
async def test_rf13_a_ref_of_a_third_system_goes_no_further(two: Any, autojump_clock: MockClock) -> None:
    async def ignore(m: Any) -> None: ...

    async with two() as both, ActorSystem("third") as third:
        async with (
            serve(third, "aqueduct+memory://third", ignore, Any) as listener,
            connect(both.here, listener.url, object) as peer,
        ):
            sender, receiver = channel(int)
            with pytest.raises(HandleNotForwardable, match="came over another connection and cannot be forwarded"):
                await peer.send(Do(value=[sender, both.ref]))
            sender.send_nowait(1)
            assert receiver.receive_nowait() == 1  # given back
            sender.finish_nowait()
        assert await both.ref.ask(Do("count")) == 0


async def test_a_dropped_ref_gives_its_channel_up(two: Any, autojump_clock: MockClock) -> None:
    """What was told on it still arrives; when it comes again, it is a new ref of the same actor."""
    async with two() as both:
        clerk, client, server = both.clerk, both.client, both.server
        gone = weakref.ref(both.ref)
        both.ref.tell("last words")
        await both.ref.send("really")
        both.ref = None
        await trio.lowlevel.checkpoint()  # trio holds the result of a step until the next one
        gc.collect()
        assert gone() is None
        await settled()
        assert clerk.notes == ["last words", "really"]
        assert [len(end.core.halves) for end in (client, server)] == [1, 1]
        assert not client.core.background
        again = await both.peer.lookup("clerk", object)
        assert await again.ask(Do("texts")) == clerk.notes


async def test_a_ref_that_comes_home_after_its_actor_has_ended(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        incarnation = both.cell.incarnation
        both.cell.stop()
        both.cell = None
        await settled()
        gc.collect()
        await both.peer.send(Note(refs=[both.ref]))
        (home,) = (await both.got.receive()).refs
        assert not isinstance(home, RemoteRef)
        assert (home.is_alive, home.incarnation) == (False, incarnation)
        with pytest.raises(ActorStopped):
            await home.ask(Do())
        home.tell("x")
        assert (await home.terminated()) is not None
        home.stop()
        home.kill()


async def test_channels_for_refs_have_a_limit(two: Any, autojump_clock: MockClock) -> None:
    async with two(core=AqueductConfig(max_channels=6)) as both:
        refs = [both.here.spawn(Clerk) for _ in range(6)]
        with pytest.raises(ChannelError, match="more than 6 channels"):
            both.ref.tell(Note(refs=refs))
        both.ref.tell(Note(refs=refs[:2]))
        assert await both.ref.ask(Do("count")) == 1


@pytest.mark.handler_fails
@pytest.mark.parametrize("asked", [0, 20])
async def test_an_answer_with_too_many_refs_is_an_error_of_the_ask(
    two: Any, autojump_clock: MockClock, asked: int
) -> None:
    """Whether the ref has a channel for its answers, or a oneshot for each."""

    class Odd(Clerk):
        @handles
        async def do(self, m: Do) -> Any:
            return [self.spawn(Clerk) for _ in range(20)] if m.what == "spawn" else m.value

    async with two(Odd, core=AqueductConfig(max_channels=20)) as both:
        for count in range(asked):
            assert await both.ref.ask(Do("say", count)) == count
            await settled()
        with pytest.raises(ActorError, match=r"the answer to Do cannot travel: .*more than 20 channels"):
            await both.ref.ask(Do("spawn"))
        await settled()
        assert await both.ref.ask(Do("say", 1)) == 1


async def test_nothing_is_left_when_all_refs_are_gone(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        mine = both.here.spawn(Clerk, name="mine")
        both.ref.tell(Note(refs=[mine]))
        await both.ref.ask(Do("count"))
        await both.ref.ask(Do("watch", who=mine))
        await both.ref.ask(Do("unwatch", who=mine))
        both.clerk.notes.clear()
        both.ref = None
        await settled()
        gc.collect()
        await settled()
        assert both.left() == NOTHING


# ---------------------------------------------------------------- lookup


async def test_lookup(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        assert await both.peer.lookup("clerk", object) is both.ref
        both.there.registry.register("secret", both.there.spawn(Clerk))
        for name in ("secret", "nobody", "", "x" * 300):
            with pytest.raises(NameUnknown, match="exposes no actor named") as unknown:
                await both.peer.lookup(name)
            assert unknown.value.name == name
        assert isinstance(unknown.value, LookupError)
        with pytest.raises(trio.WouldBlock):
            both.got.receive_nowait()  # no handler has seen any of it
        (other,) = both.listener.peers
        with pytest.raises(NameUnknown, match="exposes no actors"):
            await other.lookup("clerk")
        both.cell.stop()
        await settled()
        with pytest.raises(NameUnknown):
            await both.peer.lookup("clerk")


async def test_a_lookup_of_an_actor_in_a_third_system_gives_a_ref_that_passes_everything_on(
    autojump_clock: MockClock,
) -> None:
    """Its ref cannot be passed on to the peer. One actor of the server stands in for it, for all peers."""

    async def ignore(_: object) -> None:
        pass

    async with ActorSystem("third") as third, ActorSystem("desk") as desk, ActorSystem("here") as here:
        clerk = third.spawn(Clerk)
        third.registry.register("clerk", clerk)
        async with (
            serve(third, "aqueduct+memory://third", ignore, Any, expose={"clerk"}) as far,
            connect(desk, far.url, object) as between,
            serve(desk, "aqueduct+memory://desk", ignore, Any, expose={"clerk"}) as near,
            connect(here, near.url, object) as peer,
            connect(here, near.url, object) as other,
        ):
            desk.registry.register("clerk", await between.lookup("clerk"))
            found = await peer.lookup("clerk")
            assert await found.ask(Do("say", "hi")) == "hi"
            assert await peer.lookup("clerk") is found
            assert (await other.lookup("clerk")).path == found.path
            clerk.stop()
            assert await found.terminated() == Shutdown()
            with pytest.raises(NameUnknown):
                await peer.lookup("clerk")


def test_an_actor_stopped_without_a_reason_travels_too() -> None:
    """A program may raise it, and leave out the reason."""
    payload = envelopes.encode_failure(ActorStopped("the warehouse is closed"))
    error = envelopes.error_from(payload, "/clerk", None)
    assert isinstance(error, ActorStopped)
    assert (str(error), error.actor, error.reason) == ("the warehouse is closed", "/clerk", Normal())


@pytest.mark.rule("RF-23")
async def test_rf23_a_server_looks_up_at_its_client(autojump_clock: MockClock) -> None:
    """A client that exposes names says so in its first message; the server finds actors there, and only those."""
    seen: list[tuple[Any, Any]] = []

    async with ActorSystem("there") as there, ActorSystem("here") as here:
        mine = here.spawn(Clerk)
        here.registry.register("mine", mine)
        here.registry.register("secret", mine)

        async def take(m: int) -> None:
            (client,) = listener.peers
            seen.append((m, await client.lookup("mine", object)))
            with pytest.raises(NameUnknown, match="no actor named 'secret'"):
                await client.lookup("secret")

        async with serve(there, "aqueduct+memory://desk", take, message_type=int) as listener:
            async with connect(here, listener.url, int, expose={"mine"}) as peer:
                await peer.send(1)
                await settled()
                ((number, ref),) = seen
                assert (number, await ref.ask(Do("say", "found"))) == (1, "found")
                began = trio.current_time()
            assert trio.current_time() - began < 1  # nothing of it holds up the end
            assert isinstance(await ref.terminated(), Lost)
            async with connect(here, listener.url, int, expose=lambda name: name != "secret"):
                await settled()
                (client,) = listener.peers
                assert await client.lookup("mine") != ref
                began = trio.current_time()
                await listener.aclose()
                assert trio.current_time() - began < 1
        with pytest.raises(ConfigurationError, match="collection of names"):
            async with connect(here, "aqueduct+memory://desk", int, expose="mine"):
                pass
        with pytest.raises(ConfigurationError, match="no names to look up"):
            async with connect(here, "aqueduct+memory://desk", RawMessage, expose={"mine"}):
                pass


@pytest.mark.handler_fails
async def test_lookup_beside_a_typed_entrypoint_and_by_function(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[int] = []

    async def take(m: int) -> None:
        got.append(m)

    def may(name: str) -> bool:
        if name == "broken":
            raise ChannelConnectionLost(name)  # of another connection, which the predicate asks
        return name.startswith("public.")

    async with ActorSystem() as system:
        clerk = system.spawn(Clerk)
        system.registry.register("public.clerk", clerk)
        system.registry.register("clerk", clerk)
        async with (
            serve(system, "aqueduct+memory://desk", take, message_type=int, expose=may) as listener,
            connect(system, listener.url, int) as peer,
        ):
            await peer.send(1)
            ref: Ref[Any] = await peer.lookup("public.clerk", Note)
            await peer.send(2)
            assert await ref.ask(Do("say", "found")) == "found"
            with pytest.raises(NameUnknown):
                await peer.lookup("clerk")
            for _ in range(20):  # a peer cannot fill the log with them
                with pytest.raises(NoValue):
                    await peer.lookup("broken")
            failures = [record.getMessage() for record in caplog.records if "lookup" in record.getMessage()]
            assert failures == ["the lookup of broken failed: ChannelConnectionLost: broken"] * 10
            await wait_all_tasks_blocked()
            assert got == [1, 2]


async def test_a_lookup_has_its_time(autojump_clock: MockClock) -> None:
    async def ignore(m: Any) -> None:
        for handle in m.attachments:
            held.append(handle)

    held: list[Any] = []
    async with ActorSystem() as system:
        async with (
            serve(system, "aqueduct+memory://desk", ignore, message_type=RawMessage) as listener,
            connect(system, listener.url, object) as peer,
        ):
            began = trio.current_time()
            with pytest.raises(AskTimeout, match=r"did not answer the lookup of 'clerk' in 2 s"):
                await peer.lookup("clerk", timeout=2)
            assert trio.current_time() - began == pytest.approx(2.0)
            for handle in held:
                handle.cancel()
        async with (
            serve(system, "aqueduct+memory://raw", ignore, message_type=RawMessage) as listener,
            connect(system, listener.url, RawMessage) as raw,
        ):
            with pytest.raises(ConfigurationError, match="RawMessage"):
                await raw.lookup("clerk")


@pytest.mark.parametrize("expose", ["clerk", 7, None])
async def test_what_is_exposed_is_names_or_a_function(expose: Any, autojump_clock: MockClock) -> None:
    async def ignore(m: Any) -> None: ...

    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="a collection of names, or a function"):
            async with serve(system, "aqueduct+memory://desk", ignore, Any, expose=expose):
                pass


# ---------------------------------------------------------------- over QUIC


@pytest.mark.loopback
async def test_over_a_real_socket(quic: tuple[QuicConfig, QuicConfig]) -> None:
    async def ignore(m: Any) -> None: ...

    async with ActorSystem("there") as there, ActorSystem("here") as here:
        there.registry.register("clerk", there.spawn(Clerk, name="clerk"))
        client = PeerConfig(carrier=attrs.evolve(quic[1], server_name="localhost"))
        async with (
            serve(
                there, "aqueduct://127.0.0.1:0", ignore, Any, expose={"clerk"}, config=PeerConfig(carrier=quic[0])
            ) as listener,
            connect(here, listener.url, object, config=client) as peer,
        ):
            ref = await peer.lookup("clerk", object)
            mine = here.spawn(Clerk, name="mine")
            for number in range(300):
                await ref.send(str(number))
            assert await ref.ask(Do("count")) == 300
            await ref.ask(Do("link", who=mine))
            await ref.ask(Do("watch", who=mine))
            assert await ref.ask(Do("ask", Do("say", ref), mine)) is ref
            with pytest.raises(ActorStopped, match="KeyError"):
                await ref.ask(Do("fail", 1))
            assert type(await ref.terminated()).__name__ == "Failed"
            assert type(await mine.terminated()).__name__ == "Failed"  # linked
