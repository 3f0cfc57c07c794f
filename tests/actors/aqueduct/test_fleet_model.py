"""Three members and more, connections that are lost, stalled and refused at every point, actors and members that end; and a model.

The promises: a message is handled at most once, and in the order of its sender; every question ends; every watcher learns of one end, for
one reason; refs of one actor are equal. What was sent over refs that were never lost arrives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import attrs
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from tests.actors.carried import cut
from trio.testing import MockClock

from levada.actors.aqueduct.refs import RefState, RemoteRef
from levada.framework import Down, Exit, Killed, Lost, Reason, Shutdown
from levada.framework.errors import ActorStopped, AskTimeout, ConnectionLost, MailboxFull
from levada.framework.testing.stateful import ActorStateMachine, initialize, invariant, rule
from levada.transports.carriers import MemoryConfig

from .conftest import Do, Note, Trapper, settled
from .members import Fleet, Member

# ---------------------------------------------------------------- every point of one story


def at(ref: Any) -> RefState:
    """Its state; a call, so that type checkers do not think that it stays."""
    state: RefState = ref.state
    return state


@attrs.define
class Heard:
    """What came of the story."""

    texts: list[Any]
    answers: list[Any]
    notes: list[Any]
    ref: Any
    calls: int
    """Calls of the carriers that were chosen."""


async def story(faulty: tuple[str, str], carrier: MemoryConfig, stall: float = 0.0) -> Heard:
    """C uses a ref of A's that B gave it: tells, asks, watches, links; then the actor ends. One way between two members is faulty."""
    lines: list[Any] = []

    def carriers(source: Member, target: Member) -> MemoryConfig | None:
        return carrier if (source.name, target.name) == faulty else attrs.evolve(carrier, cut_at_call=None)

    async with Fleet("memory", dial_timeout=5, claim_timeout=5) as f, trio.open_nursery() as nursery:
        a, b, c = [await f.add(name, Trapper) for name in "abc"]
        f.carrier = carriers
        near: Any = c.system.spawn(Trapper, name="near")
        answers: list[Any] = []
        actor = a.actor
        ref: Any = None

        async def ask(number: int) -> None:
            try:
                answers.append(await ref.ask(Do("say", number), timeout=20))
            except (ActorStopped, AskTimeout) as error:
                answers.append(type(error))

        try:
            ref = await f.hand_over(a, b, c)
        except (ConnectionLost, ActorStopped, ValueError, LookupError):
            return Heard([], [], [], None, 0)
        except Exception as error:  # the look-up itself, or its channel
            if "lost" not in str(error):
                raise
            return Heard([], [], [], None, 0)
        near.tell(Do("watch", who=ref))
        near.tell(Do("link", who=ref))
        for number in range(3):
            ref.tell(str(number))
            nursery.start_soon(ask, number)
            await trio.sleep(stall)
        await trio.sleep(1)
        again = await f.give(a, c, a.clerk)
        assert again is ref or at(ref) is RefState.LOST, "RF-32"
        for number in range(3, 6):
            ref.tell(str(number))
            nursery.start_soon(ask, number)
        await trio.sleep(30)
        assert len(answers) == 6
        a.clerk.kill()
        await settled()
        lines = [peer for source, target, peer in f.lines if (source.name, target.name) == faulty]
        calls = max((peer._connection.carrier.link.calls for peer in lines if peer._connection.carrier), default=0)
        return Heard([note for note in actor.notes if isinstance(note, str)], answers, near._actor.notes, ref, calls)


def check(heard: Heard, texts: list[str]) -> None:
    """What holds whatever was lost."""
    if heard.ref is None:
        return
    order = [texts.index(text) for text in heard.texts]
    assert order == sorted(set(order)), "at most once, and in order"
    assert [type(note) for note in heard.notes if isinstance(note, Down)] == [Down]
    assert [type(note) for note in heard.notes if isinstance(note, Exit)] == [Exit]
    assert {type(note.reason) for note in heard.notes} <= {Killed, Lost}
    if heard.ref.state is not RefState.LOST:
        assert heard.texts == texts
        assert sorted(heard.answers) == list(range(6))
        assert [note.reason for note in heard.notes if isinstance(note, Down)] == [Killed()]


TEXTS = [str(number) for number in range(6)]


@pytest.mark.rule("RF-31")
@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.release)])
@pytest.mark.parametrize("faulty", [("c", "a"), ("b", "c"), ("b", "a")], ids="-".join)
async def test_rf31_cut_at_every_call(faulty: tuple[str, str], stride: int, autojump_clock: MockClock) -> None:
    """The connection is lost at each operation on it, of either side, until the story ends before."""
    ends = Counter[Any]()
    for call in range(1, 600, stride):
        heard = await story(faulty, MemoryConfig(shape="connection", cut_at_call=call))
        check(heard, TEXTS)
        ends[heard.ref and at(heard.ref)] += 1
        if 0 < heard.calls < call:
            break  # nothing was cut
    else:
        raise AssertionError("the story has no end")
    assert ends[RefState.ENDED] >= 1
    if faulty == ("c", "a"):
        assert ends[RefState.LOST] * stride > 50


@pytest.mark.parametrize("latency", [0.001, 0.3, 2.0])
@pytest.mark.parametrize("stall", [0.0, 0.5, 3.0])
async def test_delays(latency: float, stall: float, autojump_clock: MockClock) -> None:
    """Everything arrives, at any speed of the network."""
    heard = await story(("", ""), MemoryConfig(shape="connection", latency=latency), stall)
    assert heard.ref.state is RefState.ENDED
    check(heard, TEXTS)


# ---------------------------------------------------------------- the model


@attrs.define(eq=False)
class Being:
    """An actor of some member."""

    member: Member
    cell: Any
    actor: Any
    reason: type[Reason] | None = None
    """Why it has ended."""


@attrs.define(eq=False)
class Held:
    """A ref that some member has."""

    holder: Member
    being: Being
    ref: Any
    number: int
    told: list[str] = attrs.field(factory=list)
    """What was accepted."""
    reasons: list[Reason] = attrs.field(factory=list)
    watches: int = 0
    asks: int = 0
    answers: int = 0

    @property
    def lost(self) -> bool:
        return isinstance(self.ref, RemoteRef) and self.ref.state is RefState.LOST


NUMBER = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 7, 11])
TIME = st.sampled_from([0.0, 0.0, 0.004, 0.1, 3.0, 30.0])
MOST = 24  # refs


class Fleets(ActorStateMachine):
    """Whatever is sent, cut, stalled and ended: the promises hold."""

    latency = 0.0

    @initialize()
    async def begin(self) -> None:
        """Three members, who know each other."""
        self.fleet = await self.make_fleet().__aenter__()
        self.blocked: dict[frozenset[str], str] = {}
        self.beings: list[Being] = []
        self.held: list[Held] = []
        self.numbers = 0
        self.ways: dict[tuple[str, str], Any] = {}
        self.news: list[tuple[Member, Member]] = []
        """Ends of members that others have not been told of."""
        self.stack = trio.open_nursery()
        self.nursery = await self.stack.__aenter__()
        for name in "abc":
            await self.start(name)
        for source in [*self.fleet.members.values()]:
            for target in [*self.fleet.members.values()]:
                if source is not target:
                    await self.road(source, target)

    def make_fleet(self) -> Fleet:
        """Make the fleet, and its network."""
        fleet = Fleet("memory", dial_timeout=5, claim_timeout=5, idle=15)
        fleet.way = self.way
        fleet.carrier = lambda source, target: MemoryConfig(shape="connection", latency=self.latency)
        return fleet

    async def way(self, source: Member, target: Member) -> None:
        """A member dials another: it may be refused, or wait."""
        state = self.blocked.get(frozenset((source.name, target.name)))
        if state == "refused":
            raise ConnectionLost("the way is closed")
        if state == "stalled":
            await trio.sleep_forever()

    async def start(self, name: str) -> None:
        member = await self.fleet.add(name, Trapper)
        self.beings.append(Being(member, member.clerk, member.actor))

    async def road(self, source: Member, target: Member) -> Any:
        """A ref of the target's clerk, by which the source hands refs over; None if there is no way."""
        ref = self.ways.get((source.name, target.name))
        if ref is None or not ref.is_alive:
            pair = frozenset((source.name, target.name))
            if pair in self.blocked or not target.clerk.is_alive:
                return None
            ref = self.ways[source.name, target.name] = await self.fleet.look_up(source, target)
        return ref

    def member(self, number: int) -> Member:
        return [*self.fleet.members.values()][number % len(self.fleet.members)]

    def note(self, holder: Member, ref: Any, being: Being) -> None:
        """A member has got a ref: it is that which it has already, unless that was lost."""
        for held in self.held:
            if held.holder is holder and held.ref is ref:
                assert held.being is being, "one ref, two actors"
                return
        for held in self.held:
            if held.holder is holder and held.being is being and not held.lost:
                assert held.ref is ref, "RF-32: two refs of one actor"
        self.numbers += 1
        self.held.append(Held(holder, being, ref, self.numbers))

    def collect(self) -> None:
        """See which refs have arrived where."""
        for member in self.fleet.members.values():
            for note in [note for note in member.actor.notes if isinstance(note, Note)]:
                member.actor.notes.remove(note)
                self.note(member, note.refs[0], self.beings[int(note.text)])
        living = [held for held in self.held if held.holder.name in self.fleet.members]
        self.held = living[-MOST:]

    def pick(self, number: int) -> Held:
        return self.held[-1 - number % len(self.held)]  # the newest ones most

    @rule(order=st.permutations(range(3)), how=st.sampled_from(["", "", "cut", "stall", "close"]))
    async def introduce(self, order: list[int], how: str) -> None:
        """A new actor, whose ref goes from its member to a second, and on to a third; then something happens to their connection."""
        owner, source, target = map(self.member, order)
        if len([being for being in self.beings if being.reason is None]) < 12 and len(self.held) < MOST:
            cell: Any = owner.system.spawn(Trapper)
            being = Being(owner, cell, cell._actor)
            self.beings.append(being)
            self.note(owner, cell, being)
            for giver, taker in ((owner, source), (source, target)):
                for held in [held for held in self.held if held.holder is giver and held.being is being]:
                    await self.give(held, taker)
                    await trio.sleep(0.5)
                    self.collect()
            self.trouble(target, owner, how)

    async def give(self, held: Held, target: Member) -> None:
        """A holder sends a ref on."""
        if held.holder is not target:
            ref = await self.road(held.holder, target)
            if ref is not None:
                try:
                    ref.tell(Note(str(self.beings.index(held.being)), refs=[held.ref]))
                except MailboxFull:
                    pass

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, to=NUMBER, time=TIME)
    async def hand_over(self, number: int, to: int, time: float) -> None:
        """A holder sends a ref on."""
        held, target = self.pick(number), self.member(to)
        if len(self.held) < MOST:
            await self.give(held, target)
            await trio.sleep(time)

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, count=st.sampled_from([1, 2, 300]), time=TIME)
    async def tell(self, number: int, count: int, time: float) -> None:
        """One after the other, as many as the window takes."""
        held = self.pick(number)
        for _ in range(count):
            text = f"{held.number}:{len(held.told)}"
            alive = held.ref.is_alive
            try:
                held.ref.tell(text)
            except MailboxFull:
                break
            if alive:
                held.told.append(text)
        await trio.sleep(time)

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, timeout=st.sampled_from([0.001, 4.0, 60.0]), time=TIME)
    async def ask(self, number: int, timeout: float, time: float) -> None:
        """It ends."""
        held = self.pick(number)
        held.asks += 1
        self.nursery.start_soon(self.await_answer, held, timeout)
        await trio.sleep(time)

    async def await_answer(self, held: Held, timeout: float) -> None:
        try:
            assert await held.ref.ask(Do("say", held.number), timeout=timeout) == held.number
        except ActorStopped:
            pass
        except AskTimeout:
            assert not held.lost, "a lost ref lets its askers go"
        held.answers += 1

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, time=TIME)
    async def watch(self, number: int, time: float) -> None:
        """It hears of one end."""
        held = self.pick(number)
        if held.watches < 3:
            held.watches += 1
            self.nursery.start_soon(self.await_end, held)
            await trio.sleep(time)

    async def await_end(self, held: Held) -> None:
        held.reasons.append(await held.ref.terminated())

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, forth=st.booleans(), time=TIME)
    async def link(self, number: int, forth: bool, time: float) -> None:
        """Ties and unties, with the holder's clerk."""
        held = self.pick(number)
        clerk = held.holder.clerk
        if clerk.is_alive and held.ref is not clerk:
            clerk.tell(Do("link" if forth else "unlink", who=held.ref))
            await trio.sleep(time)

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, how=st.sampled_from(["cut", "stall", "go on", "close", "open"]), time=TIME)
    async def disturb(self, number: int, how: str, time: float) -> None:
        """The connections between two members are lost or stalled, and new ones refused or not answered; or all goes on."""
        held = self.pick(number)
        self.trouble(held.holder, held.being.member, how)
        await trio.sleep(time)

    def trouble(self, here: Member, there: Member, how: str) -> None:
        """Lose, stall or refuse connections, or let them go on."""
        pair = frozenset((here.name, there.name))
        for carrier in self.fleet.between(here, there):
            match how:
                case "cut" | "close":
                    cut(carrier)
                case "stall":
                    carrier.link.hold()
                case "open" | "go on":
                    carrier.link.release()
        match how:
            case "stall":
                self.blocked[pair] = "stalled"
            case "close":
                self.blocked[pair] = "refused"
            case "open" | "go on":
                self.blocked.pop(pair, None)

    @rule(number=NUMBER, now=st.booleans(), time=TIME)
    async def end_actor(self, number: int, now: bool, time: float) -> None:
        """An actor that is no clerk ends."""
        beings = [b for b in self.beings if b.reason is None and b.cell is not b.member.clerk]
        if beings:
            being = beings[number % len(beings)]
            being.reason = Killed if now else Shutdown
            being.cell.kill() if now else being.cell.stop()
            await trio.sleep(time)

    @rule(number=NUMBER, orderly=st.booleans(), time=TIME)
    async def end_member(self, number: int, orderly: bool, time: float) -> None:
        """A member ends, and another takes its place."""
        member = self.member(number)
        if self.numbers > 60 or len(member.name) > 3:
            return
        if not orderly:
            for other in self.fleet.members.values():
                self.trouble(member, other, "cut")
        await self.fleet.end(member.name)
        for being in self.beings:
            if being.member is member:
                # In order, it says of its actors that they end; the connection may be quicker lost than that arrives.
                being.reason = being.reason or (Shutdown if orderly else Lost)
        self.news += [(other, member) for other in self.fleet.members.values()]
        self.collect()
        await self.start(member.name + "'")
        await trio.sleep(time)

    @precondition(lambda self: self.news)
    @rule(number=NUMBER)
    def tell_news(self, number: int) -> None:
        """A member hears that another has ended."""
        self.hear(*self.news.pop(number % len(self.news)))

    def hear(self, member: Member, over: Member) -> None:
        if member.name in self.fleet.members:
            member.refs.ended(over.node_id, Lost(over.name))
            for held in self.held:
                if held.holder is member and held.being.member is over:
                    assert not held.ref.is_alive, "RF-33"

    @rule(time=TIME)
    async def wait(self, time: float) -> None:
        """Time passes."""
        await trio.sleep(time)

    @rule()
    async def come_to_rest(self) -> None:
        """Nothing hangs, and what should have arrived has."""
        await self.rest()

    async def rest(self) -> None:
        """All ways are open, all news are told: nothing hangs, and what should have arrived has."""
        self.open_all()
        while self.news:
            self.hear(*self.news.pop())
        await trio.sleep(100)
        self.collect()
        for held in self.held:
            ref = held.ref
            assert held.asks == held.answers, "a question that has not ended"
            if isinstance(ref, RemoteRef):
                assert ref.state is not RefState.CLAIMING, "a claim that has not ended"
                used = held.watches
            else:
                used = 0
            over = held.being.reason
            if over is not None and (used or not isinstance(ref, RemoteRef)):
                assert not ref.is_alive
            assert len(held.reasons) == (held.watches if not ref.is_alive else 0), "one reason each"
            assert len(set(map(type, held.reasons))) <= 1
            for reason in held.reasons:
                assert isinstance(reason, (Lost, over or Lost)), f"{ref} of {held.holder.name}: {reason}, not {over}"
            if not held.lost and over is None:
                assert self.texts_of(held) == held.told, "what was told over a ref that is not lost"

    def open_all(self) -> None:
        """Let all connections go on, and all be made."""
        self.blocked.clear()
        for *_, peer in self.fleet.lines:
            carrier: Any = peer._connection.carrier
            if carrier is not None and not peer.closed:
                carrier.link.release()

    def texts_of(self, held: Held) -> list[str]:
        mine = f"{held.number}:"
        return [note for note in held.being.actor.notes if isinstance(note, str) and note.startswith(mine)]

    @invariant()
    def at_most_once_and_in_order(self) -> None:
        """For each ref: what has arrived is a part of what was told, in its order."""
        if not hasattr(self, "nursery"):
            return
        self.collect()
        for being in self.beings:
            seen: dict[str, int] = defaultdict(lambda: -1)
            for note in being.actor.notes:
                if isinstance(note, str):
                    sender, number = note.split(":")
                    assert int(number) > seen[sender], "twice, or out of order"
                    seen[sender] = int(number)

    def teardown(self) -> None:
        """Rest, then leave the members."""

        async def leave() -> None:
            self.nursery.cancel_scope.cancel()
            await self.stack.__aexit__(None, None, None)
            await self.fleet.__aexit__(None, None, None)

        try:
            if hasattr(self, "nursery"):
                try:
                    self._run(self.rest)
                finally:
                    self._run(leave)
        finally:
            super().teardown()


class FleetsOnSlowNetworks(Fleets):
    """The same with latency."""

    latency = 0.02


TestFleets = pytest.mark.rule("RF-30", "RF-31", "RF-32")(Fleets.TestCase)
TestFleets.settings = settings(settings.default, max_examples=10, stateful_step_count=25)  # 0.1 s for one
TestFleetsOnSlowNetworks = pytest.mark.ci(FleetsOnSlowNetworks.TestCase)
TestFleetsOnSlowNetworks.settings = settings(settings.default, stateful_step_count=40)  # 0.3 s for one
