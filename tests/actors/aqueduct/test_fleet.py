"""Refs of a fleet: they travel between any of its members, and are claimed when they are first used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest
import trio
import trio.lowlevel
from tests.actors.carried import cut, settings
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import FleetRefs, PeerConfig, connect, serve
from levada.actors.aqueduct.refs import TRANSITIONS, RefChange, RefState, RemoteRef
from levada.framework import ActorSystem, Down, Exit, Failed, Killed, Lost, Reason, Shutdown
from levada.framework.errors import (
    ActorStopped,
    AskTimeout,
    ConfigurationError,
    ConnectionLost,
    HandleNotForwardable,
    MailboxFull,
)
from levada.framework.router import group

from .conftest import Clerk, Do, Note, Private, Trapper, settled
from .members import Fleet, Member, id_of

BeginFleet = Callable[..., Fleet]


@pytest.fixture
def fleet(scheme: str) -> BeginFleet:
    """Make a fleet; keyword arguments are those of `FleetRefs`."""
    return partial(Fleet, scheme)


def at(ref: RemoteRef) -> RefState:
    """Its state; a call, so that type checkers do not think that it stays."""
    return ref.state


async def three(f: Fleet, kind: type[Clerk] = Clerk) -> tuple[Member, Member, Member, RemoteRef]:
    """Three members, and the ref of A's clerk that B gave to C."""
    a, b, c = await f.add("a", kind), await f.add("b"), await f.add("c")
    return a, b, c, await f.hand_over(a, b, c)


# ---------------------------------------------------------------- states


def test_every_state_and_change_has_a_place() -> None:
    """A ref that has ended, or is lost, stays so."""
    final = {state for state in RefState if not any(state is before for before, _ in TRANSITIONS)}
    assert final == {RefState.ENDED, RefState.LOST}
    missing = set(product(set(RefState) - final, RefChange)) - TRANSITIONS.keys()
    assert missing == {
        (RefState.UNCLAIMED, RefChange.END),  # notice comes over the channel
        (RefState.CLAIMING, RefChange.END),
        (RefState.CLAIMING, RefChange.USE),
        (RefState.OPEN, RefChange.USE),
        (RefState.OPEN, RefChange.OPEN),
    }


# ---------------------------------------------------------------- arrival and first use


@pytest.mark.rule("RF-27", "RF-30")
async def test_rf27_rf30_a_ref_reaches_a_third_member(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """It is claimed at its first use, and what was sent before arrives first."""
    async with fleet() as f:
        a, _, c, ref = await three(f)
        assert (at(ref), ref.path, ref.incarnation, ref.is_alive) == (
            RefState.UNCLAIMED, "/clerk", a.clerk.incarnation, True,
        )  # fmt: skip
        assert repr(ref) == f"<Ref /clerk#{a.clerk.incarnation} at a>"
        assert c.whom == []
        ref.tell("first")
        assert at(ref) is RefState.CLAIMING
        await ref.send("second")
        assert await ref.ask(Do("texts")) == ["first", "second"]
        assert at(ref) is RefState.OPEN
        assert c.whom == ["a"]
        assert await ref.ask(Do("say", "hello")) == "hello"


@pytest.mark.rule("RF-30")
@pytest.mark.parametrize("use", ["tell", "ask", "send", "watch", "link", "terminated", "thread", "router", "forward"])
async def test_rf30_each_first_use_claims(fleet: BeginFleet, use: str, autojump_clock: MockClock) -> None:
    """Tell, ask, watch and link, by whatever means; only to pass it on is none."""
    async with fleet() as f:
        a, b, c, ref = await three(f, Trapper)
        near: Any = c.system.spawn(Trapper, name="near")
        async with trio.open_nursery() as nursery:
            match use:
                case "tell":
                    ref.tell("x")
                case "send":
                    await ref.send("x")
                case "ask":
                    assert await ref.ask(Do("say", 1)) == 1
                case "watch":
                    await near.ask(Do("watch", who=ref))
                case "link":
                    await near.ask(Do("link", who=ref))
                case "terminated":
                    nursery.start_soon(ref.terminated)
                case "thread":
                    assert await trio.to_thread.run_sync(ref.from_thread.ask, Do("say", 2)) == 2
                case "router":
                    c.system.groups.join("clerks", ref)
                    router = c.system.spawn(group("clerks"), name="router")
                    assert await router.ask(Do("say", 3)) == 3
                case _:
                    assert await f.give(c, b, ref) is not ref
            await settled()
            assert at(ref) is (RefState.UNCLAIMED if use == "forward" else RefState.OPEN)
            assert c.whom == ([] if use == "forward" else ["a"])
            a.clerk.kill()
            await settled()
        if use == "watch":
            assert [(type(note), note.reason) for note in near._actor.notes] == [(Down, Killed())]
        if use == "link":
            assert [(type(note), note.reason) for note in near._actor.notes] == [(Exit, Killed())]


@pytest.mark.rule("RF-28")
async def test_rf28_a_third_ref_of_an_actor_here_is_the_actor(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet() as f:
        a, _, c, ref = await three(f)
        assert await f.give(c, a, ref) is a.clerk
        ref.tell("x")
        await settled()
        assert await f.give(c, a, ref) is a.clerk  # over another connection than that of its channel


@pytest.mark.rule("RF-32")
async def test_rf32_a_ref_is_one_however_it_came(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """By way of two members, from its owner over a connection of either side, and as an answer."""
    async with fleet() as f:
        a, b, c, ref = await three(f)
        d = await f.add("d")
        assert await f.hand_over(a, d, c) is ref
        assert at(ref) is RefState.UNCLAIMED
        assert await f.give(a, c, a.clerk) is ref  # brings a channel
        assert at(ref) is RefState.OPEN
        assert c.whom == []
        assert await f.look_up(c, a) is ref
        assert await f.hand_over(a, b, c) is ref
        assert await ref.ask(Do("me")) is ref
        to_b = await f.look_up(c, b)
        assert await to_b.ask(Do("say", ref)) is ref
        other = await f.hand_over(d, b, c)
        assert other is not ref
        assert len({ref, other}) == 2


@pytest.mark.rule("RF-32")
async def test_rf32_a_lost_ref_is_not_that_of_a_later_copy(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet() as f:
        a, b, c, ref = await three(f)
        assert await ref.ask(Do("count")) == 0
        (_, peer) = c.dialled.pop()
        cut(peer._connection.carrier)
        await settled()
        assert (at(ref), ref.is_alive) == (RefState.LOST, False)
        assert ref.reason == Lost("a/server")
        again = await f.hand_over(a, b, c)
        assert again is not ref
        assert await again.ask(Do("count")) == 0
        assert await f.give(c, b, ref) == await f.give(c, b, again)  # a lost one may be passed on, and is alive there


@pytest.mark.ci
async def test_claims_of_many_refs_share_a_connection(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet() as f:
        a, b, c = [await f.add(name) for name in "abc"]
        clerks: list[Any] = [a.system.spawn(Clerk, name=f"clerk{number}") for number in range(300)]
        to_b, to_c = await f.look_up(a, b), await f.look_up(b, c)
        to_b.tell(Note(refs=clerks))
        await settled()
        to_c.tell(Note(refs=b.actor.notes.pop().refs))
        await settled()
        refs = c.actor.notes.pop().refs
        assert await refs[0].ask(Do("say", 0)) == 0
        for number, ref in enumerate(refs):
            ref.tell(str(number))
        await settled()
        assert [clerk._actor.notes for clerk in clerks] == [[str(number)] for number in range(300)]
        assert c.whom == ["a"]


# ---------------------------------------------------------------- waiting


async def no_way(source: Member, target: Member) -> None:
    raise ConnectionLost("there is no way")


async def for_ever(source: Member, target: Member) -> None:
    await trio.sleep_forever()


@pytest.mark.rule("RF-30")
async def test_rf30_what_waits_is_bounded_by_the_window(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """`tell` raises, `send` waits, `ask` runs on its time; then all arrives, in order, but what was withdrawn."""
    async with fleet(dial_timeout=100) as f:
        a, _, _, ref = await three(f)
        gate = trio.Event()

        async def behind_the_gate(source: Member, target: Member) -> None:
            await gate.wait()

        f.way = behind_the_gate
        with pytest.raises(AskTimeout):
            await ref.ask(Do("say"), timeout=5)
        texts = []
        with pytest.raises(MailboxFull, match="256 messages are on their way to /clerk at a"):
            for number in range(1000):
                ref.tell(str(number))
                texts.append(str(number))
        assert len(texts) == 255  # and the question, withdrawn
        assert ref.depth() == 256
        with pytest.raises(AskTimeout):
            await ref.ask(Do("say"), timeout=5)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await ref.ask(Do("count"), timeout=50))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ref.send, "sent")
            await wait_all_tasks_blocked()
            nursery.start_soon(ask)
            await trio.sleep(10)
            assert a.actor.notes == []
            gate.set()
        assert a.actor.notes == [*texts, "sent"]
        assert answers == [256]


@pytest.mark.rule("RF-30")
async def test_rf30_messages_to_a_ref_that_is_dropped_at_once_arrive(
    fleet: BeginFleet, autojump_clock: MockClock
) -> None:
    async with fleet() as f:
        a, _, c, ref = await three(f)
        ref.tell("x")
        del ref
        await settled()
        assert a.actor.notes == ["x"]
        assert len(c.refs.refs) == 0


async def test_a_message_that_cannot_travel_is_a_dead_letter(
    fleet: BeginFleet, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not known before there is a connection; a question fails."""
    async with fleet() as f:
        a, _, c, ref = await three(f)
        ref.tell(object())
        with pytest.raises(TypeError, match="object cannot travel"):
            await ref.ask(Do(value=object()))
        ref.tell("next")
        await settled()
        assert a.actor.notes == ["next"]
        assert c.system.statistics().dead_letters == 1
        assert "a message cannot travel" in caplog.text
        caplog.clear()


@pytest.mark.rule("RF-31")
@pytest.mark.parametrize(
    "how", ["no way", "no answer", "no such node", "another answers", "stranger", "cut", "closed", "stopped"]
)
async def test_rf31_a_claim_that_fails_ends_all_that_waits(
    fleet: BeginFleet, how: str, autojump_clock: MockClock
) -> None:
    """Dead letters, errors, and one notice with one reason."""
    async with fleet(dial_timeout=5, claim_timeout=5) as f, AsyncExitStack() as stack:
        a, _, c, ref = await three(f)
        d = await f.add("d")
        near: Any = c.system.spawn(Trapper, name="near")

        async def instead(source: Member, target: Member) -> None:
            target.listener, other.listener = other.listener, target.listener

        async def cut_soon(source: Member, target: Member) -> None:
            connections = target.listener._actor.connections
            known = len(connections)

            async def watch() -> None:
                while len(connections) == known:
                    await trio.lowlevel.checkpoint()
                cut([*connections][-1].carrier)

            nursery.start_soon(watch)

        async def close(source: Member, target: Member) -> None:
            nursery.start_soon(c.refs.aclose)
            await trio.sleep_forever()

        async def stop(source: Member, target: Member) -> None:
            a.clerk.kill()
            a.clerk = None
            await settled()
            gc.collect()

        other = d
        ways = {
            "no way": no_way, "no answer": for_ever, "another answers": instead, "cut": cut_soon, "closed": close, "stopped": stop,
        }  # fmt: skip
        f.way = ways.get(how, f.way)
        if how == "no such node":
            del f.members["a"]
            f.members["z"] = a
        if how == "stranger":
            a.listener = await stack.enter_async_context(
                serve(
                    a.system, f"aqueduct+{f.scheme}://stranger", Clerk, Any, config=PeerConfig(carrier=a.config.carrier)
                )
            )
        errors: list[Any] = []

        async def ask() -> None:
            try:
                await ref.ask(Do("count"), timeout=60)
            except ActorStopped as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            near.tell(Do("watch", who=ref))
            near.tell(Do("link", who=ref))
            await wait_all_tasks_blocked()
            ref.tell("x")
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await settled()
        assert (at(ref), ref.is_alive) == (RefState.LOST, False)
        assert {type(note) for note in near._actor.notes} == {Down, Exit}
        assert len(near._actor.notes) == 2
        assert {note.reason for note in near._actor.notes} == {ref.reason} == {error.reason for error in errors}
        assert isinstance(ref.reason, Lost)
        assert len(errors) == 2
        assert c.system.statistics().dead_letters == 1
        ref.tell("y")
        assert c.system.statistics().dead_letters == 2
        with pytest.raises(ActorStopped):
            await ref.send("y")


@pytest.mark.rule("RF-31")
async def test_rf31_an_actor_that_has_ended_says_why(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """As long as its system knows it; a claim of an actor that is forgotten is lost."""
    async with fleet() as f:
        a, _, _, ref = await three(f)
        a.clerk.kill()
        await settled()
        assert await ref.terminated() == Killed()
        assert at(ref) is RefState.ENDED


@pytest.mark.rule("RF-31")
async def test_rf31_an_actor_whose_system_ends_in_order_ends_once_for_its_holders(
    fleet: BeginFleet, autojump_clock: MockClock
) -> None:
    """As shut down if its word arrives before the connection is lost, which no side waits for, and else as lost."""
    async with fleet() as f:
        a, b = await f.add("a"), await f.add("b")
        to_b = await f.look_up(a, b)
        to_b.tell(Note("an actor", refs=[a.system.spawn(Clerk)]))
        await settled()
        ref = b.actor.notes[-1].refs[0]
        reasons: list[Reason] = []

        async def watch() -> None:
            reasons.append(await ref.terminated())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await settled()
            await f.end("a")
        assert reasons in ([Shutdown()], [Lost("b/client")])


@pytest.mark.rule("RF-31")
async def test_rf31_the_end_of_the_system_ends_what_waits(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet(dial_timeout=1000) as f:
        _, _, c, ref = await three(f)
        f.way = for_ever
        ref.tell("x")
        errors: list[Any] = []

        async def ask() -> None:
            try:
                await ref.ask(Do("count"), timeout=None)
            except ActorStopped as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            await f.end("c")
        assert at(ref) is RefState.LOST
        assert len(errors) == 1
        assert c.system.statistics().dead_letters == 1
        assert trio.current_time() < 500


async def test_a_ref_that_is_first_used_when_its_system_has_ended(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet() as f:
        *_, ref = await three(f)
        await f.end("c")
        ref.tell("x")
        with pytest.raises(ActorStopped):
            await ref.ask(Do("count"), timeout=None)
        assert at(ref) is RefState.LOST


async def test_a_ref_may_come_before_the_news_of_its_node(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """The claim waits for it, up to the time to dial."""
    async with fleet(dial_timeout=10) as f:
        b, c = await f.add("b"), await f.add("c")
        a = await f.add("a", known=False)
        b.refs.known(a.node_id)
        ref = await f.hand_over(a, b, c)
        assert repr(ref).endswith(f" at {a.node_id.hex()[:8]}>")
        start = trio.current_time()
        ref.tell("x")
        await trio.sleep(5)
        assert (at(ref), c.whom) == (RefState.CLAIMING, [])
        c.refs.known(a.node_id, "a")
        await wait_all_tasks_blocked()
        assert await ref.ask(Do("texts")) == ["x"]
        d = await f.add("d")
        late = await f.add("late", known=False)
        unknown = await f.hand_over(late, d, c)
        start = trio.current_time()
        assert await unknown.terminated() == Lost(late.node_id.hex()[:8])
        assert trio.current_time() - start == pytest.approx(10)


# ---------------------------------------------------------------- ends


@pytest.mark.rule("RF-25", "RF-33")
async def test_rf25_rf33_when_a_node_has_ended_its_refs_are_lost_at_once(
    fleet: BeginFleet, autojump_clock: MockClock
) -> None:
    """Claimed or not, over whatever connection; the connections are cut, and the node comes back under another id only."""
    async with fleet() as f:
        a, b, c, ref = await three(f)
        other: Any = a.system.spawn(Clerk, name="other")
        far: Any = a.system.spawn(Clerk, name="far")
        claiming, unclaimed = await f.hand_over(a, b, c, other), await f.hand_over(a, b, c, far)
        assert await ref.ask(Do("say", 1)) == 1
        theirs = await f.look_up(a, c)  # A holds a ref of C's, over its own connection
        b_clerk = await f.hand_over(b, a, c)
        assert await b_clerk.ask(Do("say", 2)) == 2
        f.way = for_ever
        claiming.tell("x")
        near: Any = c.system.spawn(Trapper, name="near")
        await near.ask(Do("watch", who=ref))
        reason = Failed(OSError("killed by signal 9"))
        start = trio.current_time()
        c.refs.ended(a.node_id, reason)
        assert [at(each) for each in (ref, claiming, unclaimed)] == [RefState.LOST] * 3
        assert {each.reason for each in (ref, claiming, unclaimed)} == {reason}
        await wait_all_tasks_blocked()
        assert [(note.ref, note.reason) for note in near._actor.notes] == [(ref, reason)]
        assert not theirs.is_alive
        assert trio.current_time() == start
        assert c.system.statistics().dead_letters == 1
        assert await b_clerk.ask(Do("say", 3)) == 3
        again = await f.hand_over(a, b, c)
        assert (again.is_alive, again.reason) == (False, reason)
        with pytest.raises(ConnectionLost, match="has ended, and its id is not used again"):
            async with connect(a.system, c.listener.url, object, config=a.config):
                pass
        with pytest.raises(ConnectionLost, match="has ended, and its id is not used again"):
            async with connect(c.system, a.listener.url, object, config=c.config):
                pass
        c.refs.known(a.node_id, "a")
        assert not (await f.hand_over(a, b, c)).is_alive


@pytest.mark.rule("RF-35")
async def test_rf35_a_connection_that_nothing_uses_is_closed(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """A ref that either side holds uses it; the next claim dials again."""
    async with fleet(idle=30) as f:
        a, b, c, ref = await three(f)
        assert await ref.ask(Do("count")) == 0
        (_, peer) = c.dialled[0]
        await trio.sleep(300)
        assert not peer.closed
        path = ref.path
        del ref
        await trio.sleep(70)
        assert peer.closed
        assert await peer.terminated() is not None
        again = await f.hand_over(a, b, c)
        assert await again.ask(Do("count")) == 0
        assert (again.path, c.whom) == (path, ["a", "a"])
        await again.ask(Do("say", c.clerk))  # A has had a ref of C's by this connection, and holds none
        a.clerk.tell(Note(refs=[]))
        again.tell(Note(refs=[c.clerk]))
        await settled()
        held = a.actor.notes.pop().refs[0]
        a.actor.notes.clear()
        del again
        await trio.sleep(300)
        assert not c.dialled[1][1].closed
        held.tell("still there")
        await settled()
        assert c.actor.notes == ["still there"]
        del held
        await trio.sleep(100)
        assert c.dialled[1][1].closed


async def test_closing_the_refs_of_a_fleet(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """Its connections go, refs over them are lost, and nothing is claimed any more."""
    async with fleet() as f:
        a, b, c, ref = await three(f)
        assert await ref.ask(Do("count")) == 0
        await c.refs.aclose()
        assert c.dialled[0][1].closed
        assert at(ref) is RefState.LOST
        again = await f.hand_over(a, b, c)
        again.tell("x")
        assert at(again) is RefState.CLAIMING
        await wait_all_tasks_blocked()
        assert at(again) is RefState.LOST
        assert c.system.statistics().dead_letters == 1
        await c.refs.aclose()
        assert c.whom == ["a"]


async def test_nothing_is_left_of_refs_and_connections(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    async with fleet(idle=10) as f:
        a, _, c, ref = await three(f)
        assert await ref.ask(Do("count")) == 0
        actors = c.system.statistics().actors
        await trio.sleep(1)
        del ref
        await trio.sleep(50)
        assert len(c.refs.refs) == 0
        assert c.system.statistics().actors < actors
        assert c.refs._links == {}
        assert a.node_id not in c.refs._connections
        await f.end("c")
        await settled()
        assert c.node_id not in a.refs._connections
        assert len(a.refs._keys) == len(a.refs._exported) == 1  # the clerk
        a.clerk.kill()
        a.clerk = None
        await settled()
        assert len(a.refs._keys) == len(a.refs._exported) == 0


# ---------------------------------------------------------------- links


async def test_a_link_over_a_third_ref_ties_both(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """Also when the actor here ends before there is a connection, and if the other does not accept links."""
    async with fleet() as f:
        a, _, c, ref = await three(f, Trapper)
        gate = trio.Event()

        async def behind_the_gate(source: Member, target: Member) -> None:
            await gate.wait()

        f.way = behind_the_gate
        near: Any = [c.system.spawn(Clerk, name=f"near{number}") for number in range(3)]
        for each in near:
            await each.ask(Do("link", who=ref))
        await near[1].ask(Do("unlink", who=ref))
        near[0].kill()
        near[1].kill()
        await wait_all_tasks_blocked()
        gate.set()
        await settled()
        assert [(note.ref.path, note.reason) for note in a.actor.notes] == [("/near0", Killed())]
        near[2].kill()
        await settled()
        assert a.actor.notes[1].ref.path == "/near2"
        proud: Any = a.system.spawn(Private, name="proud")
        other = await f.hand_over(a, f.members["b"], c, proud)
        trapper: Any = c.system.spawn(Trapper, name="trapper")
        await trapper.ask(Do("link", who=other))
        await settled()
        (note,) = trapper._actor.notes
        assert (note.ref, type(note.reason)) == (other, Failed)


# ---------------------------------------------------------------- the edge of the fleet


def never(node_id: bytes) -> Any:
    raise AssertionError("nobody is dialled")


@pytest.mark.rule("RF-34")
async def test_rf34_a_ref_leaves_its_fleet_to_nobody(fleet: BeginFleet, autojump_clock: MockClock) -> None:
    """Nor do a channel's halves that came from elsewhere; a ref that came from outside the fleet goes no further."""
    async with fleet() as f:
        a, _, c, ref = await three(f)
        config = PeerConfig(carrier=c.config.carrier)
        async with (
            ActorSystem("outside") as outside,
            serve(outside, f"aqueduct+{f.scheme}://outside", Clerk, Any, expose={"clerk"}, config=config) as listener,
            connect(c.system, listener.url, object, config=c.config) as peer,
        ):
            clerk: Any = outside.spawn(Clerk, name="clerk")
            outside.registry.register("clerk", clerk)
            with pytest.raises(
                HandleNotForwardable,
                match="cannot leave its fleet, and outside/server is no member of it; send a ref of",
            ):
                await peer.send(Note(refs=[ref]))
            stranger = await peer.lookup("clerk", object)
            with pytest.raises(HandleNotForwardable, match="came over another connection and cannot be forwarded"):
                await ref.ask(Do("say", stranger))
            stranger.tell(Note(refs=[c.clerk]))
            await settled()
            assert clerk._actor.notes[0].refs[0].path == "/clerk"
            stream = await ref.ask(Do("stream", 3))
            with pytest.raises(HandleNotForwardable, match="the other half is in another system"):
                ref.tell(Do(value=stream))
            stream.close()
            assert a.actor.notes == []


@pytest.mark.rule("RF-24")
async def test_rf24_a_peer_with_ones_own_id_is_no_member(scheme: str, autojump_clock: MockClock) -> None:
    """A system that connects to itself gets refs as ever."""
    async with ActorSystem() as system:
        refs = FleetRefs(system, id_of("me"), never)
        config = PeerConfig(fleet=refs, carrier=settings(scheme, None))
        clerk: Any = system.spawn(Clerk, name="clerk")
        system.registry.register("clerk", clerk)
        async with (
            serve(system, f"aqueduct+{scheme}://me", Clerk, Any, expose={"clerk"}, config=config) as listener,
            connect(system, listener.url, object, config=config) as peer,
        ):
            ref = await peer.lookup("clerk", object)
            assert isinstance(ref, RemoteRef)
            assert (ref.fleet, await ref.ask(Do("say", ref))) == (None, ref)


def test_a_fleet_wants_a_node_id_of_16_bytes_and_no_early_data() -> None:
    with pytest.raises(ValueError, match="the node id has 3 bytes, wanted 16"):
        FleetRefs(ActorSystem(), b"abc", never)
    with pytest.raises(TypeError):
        PeerConfig(fleet="a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_early_data_and_a_fleet_exclude_each_other() -> None:
    async with ActorSystem() as system:
        config = PeerConfig(early=True, fleet=FleetRefs(system, id_of("a"), never))
        with pytest.raises(ConfigurationError, match="leave `early` or `fleet` out"):
            async with connect(system, "aqueduct://localhost:1", object, config=config):
                pass
