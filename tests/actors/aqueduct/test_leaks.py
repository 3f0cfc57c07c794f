"""What refs leave behind: nothing, however a question, a watch, a link or a lookup ends, and wherever it is cancelled."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct.answers import FEW
from levada.framework import ActorSystem, channel
from levada.framework.errors import ActorError, ChannelError, NameUnknown

from .conftest import Clerk, Do, Note, Trapper, Two, settled
from .scenarios import tasks
from .test_cancellation import CancelAtStep

Begin = Callable[..., Any]
Step = Callable[[Two], Awaitable[None]]


@asynccontextmanager
async def own(system: ActorSystem, kind: type[Clerk] = Clerk) -> AsyncIterator[Any]:
    """Have an actor on this side for a while."""
    ref = system.spawn(kind)
    try:
        yield ref
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(1)  # who asks it is answered
        ref.stop(now=True)


async def tell(both: Two) -> None:
    both.ref.tell(Note("told"))


async def send(both: Two) -> None:
    await both.ref.send(Note("sent"))


async def send_a_ref(both: Two) -> None:
    async with own(both.here) as mine:
        await both.ref.send(Note("with refs", [mine, mine]))


async def ask(both: Two) -> None:
    assert await both.ref.ask(Do("say", value=7)) == 7


async def ask_what_fails(both: Two) -> None:
    with pytest.raises(ActorError):
        await both.ref.ask(Do("refuse", value="no"))


async def ask_too_long(both: Two) -> None:
    with pytest.raises(ActorError):
        await both.ref.ask(Do("sleep", value=0.2), timeout=0.1)


async def ask_and_go(both: Two) -> None:
    with trio.move_on_after(0.1):
        await both.ref.ask(Do("sleep", value=0.2))


async def ask_for_an_ask(both: Two) -> None:
    async with own(both.here) as mine:
        assert await both.ref.ask(Do("ask", value=Do("say", value=8), who=mine)) == 8


async def ask_for_a_channel(both: Two) -> None:
    with await both.ref.ask(Do("stream", value=3)) as numbers:
        assert [number async for number in numbers] == [0, 1, 2]


async def give_a_channel(both: Two) -> None:
    sender, receiver = channel(int)
    with receiver:
        try:
            await both.ref.ask(Do("into", value=sender))
            await receiver.receive()
        finally:
            if sender._moved is None:
                sender.cancel()


async def watch(both: Two) -> None:
    with trio.move_on_after(0.1):
        await both.ref.terminated()


async def be_watched(both: Two) -> None:
    async with own(both.here) as mine:
        await both.ref.ask(Do("watch", who=mine))


async def link(both: Two) -> None:
    async with own(both.here, Trapper) as mine:
        await mine.ask(Do("link", who=both.ref))
        await mine.ask(Do("unlink", who=both.ref))


async def link_and_end(both: Two) -> None:
    async with own(both.here, Trapper) as mine:
        await mine.ask(Do("link", who=both.ref))


async def look_up(both: Two) -> None:
    assert await both.peer.lookup("clerk") is both.ref


async def look_up_nobody(both: Two) -> None:
    with pytest.raises(NameUnknown):
        await both.peer.lookup("nobody")


STEPS: list[Step] = [
    tell,
    send,
    send_a_ref,
    ask,
    ask_what_fails,
    ask_too_long,
    ask_and_go,
    ask_for_an_ask,
    ask_for_a_channel,
    give_a_channel,
    watch,
    be_watched,
    link,
    link_and_end,
    look_up,
    look_up_nobody,
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)


async def number_questions(both: Two) -> None:
    """Ask so often that the ref has got its channel for answers, which stays."""
    for _ in range(FEW + 1):
        await both.ref.ask(Do())


async def rest(both: Two) -> None:
    """Let everything arrive, and let the actor forget what it was told."""
    await settled()
    both.clerk.notes.clear()
    await settled()


def left(both: Two) -> tuple[object, ...]:
    """Count what is left of refs."""
    ends = both.client, both.server
    return (
        *both.left(),
        *(len(end.refs._remote) for end in ends),
        *(len(end.refs._exported) for end in ends),
        len(both.cell._extras.watchers or ()),
        tasks(),
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Count on references alone: what only the collector finds stays too long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every_step
@pytest.mark.usefixtures("no_collector")
async def test_what_is_done_with_a_ref_leaves_nothing(step: Step, two: Begin, autojump_clock: MockClock) -> None:
    async with two(Trapper) as both:
        await number_questions(both)
        await step(both)
        await rest(both)
        before = left(both)
        for _ in range(5):
            await step(both)
        await rest(both)
        assert left(both) == before


# Actors of streams rest between two uses, with their cells, and timers that were set anew stay in their heap until they are due. Streams of
# QMux that are over may wait for the next input.
KEPT = {"StreamActor", "Cell", "Alarm", "Timer", "QmuxStream", "StreamOver"}


def objects() -> Counter[str]:
    """Count the objects of ours by kind."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if f"{kind.__module__}.".startswith("levada."))


async def test_what_is_done_with_refs_leaves_no_objects(two: Begin, autojump_clock: MockClock) -> None:
    """There are as many after N times as after 2 N."""
    async with two(Trapper) as both:
        counts = []
        for _ in range(3):
            for step in STEPS * 4:
                await step(both)
            await rest(both)
            counts.append(objects())
        more = counts[2] - counts[1]
        assert not {kind: more[kind] for kind in more.keys() - KEPT}


@every_step
@pytest.mark.usefixtures("no_collector")
async def test_cancelled_at_each_step_it_leaves_nothing(step: Step, two: Begin, autojump_clock: MockClock) -> None:
    async with two(Trapper) as both:
        await number_questions(both)
        await step(both)
        await rest(both)
        before = left(both)
        steps = 0
        done = False
        while not done:
            steps += 1
            with trio.CancelScope() as scope:
                instrument = CancelAtStep(scope, steps)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await step(both)
                    done = instrument.left > 0
                except ChannelError:
                    pass  # a channel in the message was given up with it
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            await rest(both)
            assert left(both) == before, f"after step {steps}"
        assert steps < 100
