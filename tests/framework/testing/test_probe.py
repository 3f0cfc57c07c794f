"""`Probe`: waiting, matching, answering."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.framework import Actor, ActorSystem, Asks, Down, Exit, Failed, Killed, handles, message
from levada.framework.errors import ActorStopped
from levada.framework.testing import Probe


@message
class Line:
    text: str


@message
class Count:
    n: int


@message
class Ready(Asks[bool]):
    pass


@pytest.fixture
async def probe(system: ActorSystem) -> Probe:
    return Probe(system, name="probe")


async def test_expect_takes_messages_in_order_by_class_predicate_value_or_whatever(probe: Probe) -> None:
    for told in (Line("a"), Count(1), Line("b"), Count(2), "any"):
        probe.ref.tell(told)
    assert await probe.expect(Line) == Line("a")
    assert await probe.expect(lambda m: m.n == 1) == Count(1)
    assert await probe.expect(Line("b")) == Line("b")
    assert await probe.expect() == Count(2)
    assert await probe.expect("any") == "any"
    assert probe.received == [Line("a"), Count(1), Line("b"), Count(2), "any"]


async def test_expect_waits_and_says_what_came_instead(probe: Probe, autojump_clock: MockClock) -> None:
    with pytest.raises(AssertionError, match=r"expected Line within 2 s; came so far: nothing"):
        await probe.expect(Line, within=2)
    assert trio.current_time() == 2.0
    probe.ref.tell(Count(1))
    with pytest.raises(AssertionError, match=r"expected Line, got Count\(n=1\)"):
        await probe.expect(Line)
    with pytest.raises(AssertionError, match=r"came so far: Count\(n=1\)"):
        await probe.expect(Line("x"), within=0.5)
    assert trio.current_time() == 2.5


async def test_expect_sees_what_comes_while_it_waits(probe: Probe, autojump_clock: MockClock) -> None:
    async def tell_late() -> None:
        await trio.sleep(1)
        probe.ref.tell(Line("late"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_late)
        assert await probe.expect(Line, within=2) == Line("late")
    assert trio.current_time() == 1.0


async def test_fish_throws_back_what_it_does_not_want(probe: Probe, autojump_clock: MockClock) -> None:
    for n in range(3):
        probe.ref.tell(Count(n))
    probe.ref.tell(Line("fish"))
    assert await probe.fish(Line) == Line("fish")
    assert probe.received == [Count(0), Count(1), Count(2), Line("fish")]
    probe.ref.tell(Count(7))
    with pytest.raises(AssertionError, match=r"expected a boot within 1 s; came so far: .*Count\(n=7\)"):
        boot = type("a boot", (), {})
        await probe.fish(boot, within=1)


async def test_expect_none_waits_for_all_of_its_time(probe: Probe, autojump_clock: MockClock) -> None:
    await probe.expect_none(during=5)
    assert trio.current_time() == 5.0
    probe.ref.tell(Line("x"))
    with pytest.raises(AssertionError, match=r"expected no message for 5 s, got Line\(text='x'\)"):
        await probe.expect_none(during=5)
    assert await probe.expect(Line) == Line("x")


async def test_a_cancelled_expect_takes_nothing(probe: Probe, autojump_clock: MockClock) -> None:
    with trio.move_on_after(1):
        await probe.expect(Line, within=9)
    probe.ref.tell(Line("x"))
    assert await probe.expect(Line) == Line("x")


async def test_asks_are_answered_failed_or_end_with_the_probe(probe: Probe) -> None:
    answers: list[Any] = []

    async def ask() -> None:
        try:
            answers.append(await probe.ref.ask(Ready()))
        except (ValueError, ActorStopped) as error:
            answers.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await probe.expect(Ready)
        probe.reply(True)
        with pytest.raises(AssertionError, match=r"Ready\(\) waits for no answer"):
            probe.reply(True)
        await probe.expect(Ready)
        probe.fail(ValueError("no"))
        await probe.expect(Ready)
        probe.ref.stop()
    # Which task's question comes first is trio's choice.
    assert {type(answer) for answer in answers} == {bool, ValueError, ActorStopped}


async def test_reply_needs_a_question(probe: Probe) -> None:
    probe.ref.tell(Line("x"))
    await probe.expect(Line)
    with pytest.raises(AssertionError, match=r"Line\(text='x'\) waits for no answer"):
        probe.reply(1)


async def test_it_sees_the_ends_of_actors_that_it_watches_or_that_link_to_it(probe: Probe, system: ActorSystem) -> None:
    class Mortal(Actor[Line]):
        @handles
        def line(self, m: Line) -> None:
            self.link(probe.ref)
            raise ValueError(m.text)

    mortal = system.spawn(Mortal)
    probe.watch(mortal)
    mortal.tell(Line("oh"))
    ends = {type(await probe.expect()) for _ in range(2)}
    assert ends == {Down, Exit}
    assert all(isinstance(end.reason, Failed) and end.ref is mortal for end in probe.received)
    other = system.spawn(Mortal)
    other.kill()
    probe.watch(other)
    assert (await probe.expect(Down)).reason == Killed()
    assert probe.ref.is_alive
    assert repr(probe) == "<Probe /probe, 0 waiting>"
