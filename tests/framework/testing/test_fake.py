"""`FakeRef`: usable wherever a `Ref` is."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Down, Exit, Killed, Normal, Ref, Shutdown, handles, message
from levada.framework.channel import channel
from levada.framework.errors import ActorStopped
from levada.framework.router import broadcast, group, least_mailbox, round_robin
from levada.framework.testing import FakeRef, Probe


@message
class Line:
    text: str


@message
class Total(Asks[int]):
    n: int


@message
class Subtotal(Total):
    pass


async def test_it_writes_down_what_is_done_to_it() -> None:
    ref = FakeRef(path="/bank")
    ref.tell(Line("a"))
    await ref.send(Line("b"))
    ref.from_thread.tell(Line("c"))
    assert (ref.told, ref.sent, ref.asked) == ([Line("a"), Line("c")], [Line("b")], [])
    assert (ref.path, ref.is_alive, ref.stops) == ("/bank", True, [])
    assert {ref: 1}[ref] == 1
    assert ref != FakeRef(path="/bank")
    assert repr(ref).startswith("<Ref /bank#")


async def test_it_answers_from_its_table() -> None:
    ref = FakeRef({Total: lambda question: question.n + 1})
    assert await ref.ask(Total(1)) == 2
    assert await ref.ask(Subtotal(2)) == 3
    ref.answers[Subtotal] = 7
    assert await ref.ask(Subtotal(2)) == 7
    ref.answers[Total] = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        await ref.ask(Total(1))
    assert await trio.to_thread.run_sync(ref.from_thread.ask, Subtotal(3)) == 7
    assert ref.asked == [Total(1), Subtotal(2), Subtotal(2), Total(1), Subtotal(3)]
    with pytest.raises(AssertionError, match=r"has no answer to Total\(n=1\): FakeRef\(\{Total: …\}\)"):
        await FakeRef().ask(Total(1))


async def test_its_waits_are_cancellation_points() -> None:
    ref = FakeRef({Total: 1})
    with trio.CancelScope() as scope:
        scope.cancel()
        for wait in (ref.ask, ref.send):
            with pytest.raises(trio.Cancelled):
                await wait(Total(1))
        with pytest.raises(trio.Cancelled):
            await ref.terminated()
    assert (ref.asked, ref.sent) == ([], [])


async def test_stop_and_kill_end_it() -> None:
    stopped, killed, hurried = FakeRef(), FakeRef({Total: 1}), FakeRef()
    stopped.stop()
    hurried.stop(now=True)
    killed.kill()
    killed.kill()
    assert (stopped.stops, hurried.stops, killed.stops) == (["stop"], ["stop now"], ["kill", "kill"])
    assert await stopped.terminated() == Shutdown()
    assert await killed.terminated() == Killed()
    for wait in (killed.ask, killed.send):
        with pytest.raises(ActorStopped) as error:
            await wait(Total(1))
        assert (error.value.reason, error.value.message) == (Killed(), Total(1))


async def test_terminated_waits_for_the_end() -> None:
    ref = FakeRef()
    reasons: list[Any] = []

    async def wait() -> None:
        reasons.append(await ref.terminated())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert reasons == []
        ref.end()
    assert reasons == [Normal()]


async def test_actors_watch_it_and_link_to_it(system: ActorSystem) -> None:
    probe = Probe(system)
    ref = FakeRef()
    probe.watch(ref)
    probe._actor.link(ref)
    ref.end(Shutdown())
    ends = [await probe.expect() for _ in range(2)]
    assert {type(end) for end in ends} == {Down, Exit}
    assert all(end.ref is ref and end.reason == Shutdown() for end in ends)
    probe.watch(ref)
    assert (await probe.expect(Down)).reason == Shutdown()
    probe._actor.link(ref)
    assert (await probe.expect(Exit)).reason == Shutdown()


async def test_it_outlives_actors_that_it_is_linked_to(system: ActorSystem) -> None:
    ref, other = FakeRef(), FakeRef()
    probe = Probe(system)
    probe._actor.link(ref)
    probe._actor.link(other)
    probe._actor.unlink(other)
    probe.ref.kill()
    await probe.ref.terminated()
    await wait_all_tasks_blocked()
    assert [(end.ref, end.reason) for end in ref.exits] == [(probe.ref, Killed())]
    assert other.exits == []
    assert ref.is_alive


async def test_it_can_be_registered_published_to_and_fed_by_a_channel(system: ActorSystem) -> None:
    ref = FakeRef()
    system.registry.register("fake", ref)
    system.groups.join("topic", ref)
    assert system.groups.publish("topic", Line("a")) == 1
    sender, receiver = channel(Line)
    receiver.to_mailbox(ref)
    await sender.send(Line("b"))
    await wait_all_tasks_blocked()
    assert ref.told == [Line("a"), Line("b")]
    ref.end()
    assert "fake" not in system.registry
    assert system.groups.members("topic") == []


async def test_routers_route_to_it(system: ActorSystem) -> None:
    refs = [FakeRef({Total: lambda question: question.n}), FakeRef({Total: ValueError("no")})]
    for ref in refs:
        system.groups.join("topic", ref)
    router = system.spawn(group("topic", routing=round_robin()))
    assert await router.ask(Total(5)) == 5
    with pytest.raises(ValueError, match="no"):
        await router.ask(Total(6))
    system.spawn(group("topic", routing=broadcast())).tell(Line("all"))
    system.spawn(group("topic", routing=least_mailbox())).tell(Line("least"))
    await wait_all_tasks_blocked()
    assert sorted(len(ref.told) for ref in refs) == [1, 2]


async def test_an_actor_cannot_tell_the_difference(system: ActorSystem) -> None:
    class Client(Actor[Line]):
        bank: Ref[Total | Line]

        @handles
        async def line(self, m: Line) -> None:
            total = await self.bank.ask(Total(len(m.text)))
            self.bank.tell(Line(f"{m.text}={total}"))

    bank = FakeRef({Total: lambda question: question.n * 2})
    system.spawn(Client, bank).tell(Line("abc"))
    await wait_all_tasks_blocked()
    assert bank.told == [Line("abc=6")]
