"""`forward` passes a channel on to another one: messages, room, and how each half ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct
from levada.framework import ActorSystem, Receiver, Sender, TerminalState, channel, forward, message
from levada.framework.errors import ChannelCancelled, HandleNotForwardable, ReceiverClosed


@attrs.define
class Passing:
    """A writer's channel that is forwarded to a reader's."""

    writer: Sender[Any]
    reader: Receiver[Any]
    scope: trio.CancelScope
    ended: list[TerminalState]


@asynccontextmanager
async def passing(window: int = 256) -> AsyncIterator[Passing]:
    writer, source = channel(Any, name="source")
    sink, reader = channel(Any, name="sink")
    scope, ended = trio.CancelScope(), list[TerminalState]()

    async def run() -> None:
        with scope:
            ended.append(await forward(source, sink.ordered(window)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield Passing(writer.ordered(window), reader, scope, ended)


async def test_all_messages_arrive_and_a_finish_waits_for_the_last_reader(autojump_clock: MockClock) -> None:
    async with passing() as both:
        for n in range(3):
            both.writer.send_nowait(n)
        both.writer.finish_nowait()
        await wait_all_tasks_blocked()
        assert both.ended == []
        assert [n async for n in both.reader] == [0, 1, 2]
    assert both.ended == [TerminalState.FINISHED]


async def test_the_writer_waits_when_the_last_reader_does_not_read(autojump_clock: MockClock) -> None:
    async with passing(window=2) as both:
        sent = 0
        with trio.move_on_after(1):
            while True:
                await both.writer.send(sent)
                sent += 1
        assert sent == 5  # two in each window, and one between them
        assert [await both.reader.receive() for _ in range(5)] == [0, 1, 2, 3, 4]
        both.reader.close()


async def test_a_cancelled_channel_is_cancelled_behind_too(autojump_clock: MockClock) -> None:
    async with passing() as both:
        both.writer.send_nowait(1)
        await wait_all_tasks_blocked()
        both.writer.cancel()
        with pytest.raises(
            ChannelCancelled, match="what it forwards has ended: channel source: the sender cancelled the channel"
        ):
            while True:
                await both.reader.receive()
    assert both.ended == [TerminalState.CANCELLED]


@pytest.mark.parametrize("held", [False, True])
async def test_a_reader_that_leaves_is_a_normal_end_for_the_writer(held: bool, autojump_clock: MockClock) -> None:
    async with passing(window=1) as both:
        if held:
            both.writer.send_nowait(1)
            await wait_all_tasks_blocked()
            both.writer.send_nowait(2)
        await wait_all_tasks_blocked()
        both.reader.close()
        await wait_all_tasks_blocked()
        with pytest.raises(ReceiverClosed):
            await both.writer.send(3)
        both.writer.finish_nowait()
    assert both.ended == [TerminalState.RECEIVER_CLOSED]


@pytest.mark.parametrize("finished", [False, True])
async def test_a_cancellation_ends_both_channels(finished: bool, autojump_clock: MockClock) -> None:
    async with passing() as both:
        both.writer.send_nowait(1)
        if finished:
            both.writer.finish_nowait()
        await wait_all_tasks_blocked()
        both.scope.cancel()
        await wait_all_tasks_blocked()
        assert both.writer.state is (TerminalState.FINISHED if finished else TerminalState.RECEIVER_CLOSED)
        assert both.reader.state is TerminalState.CANCELLED
        both.writer.finish_nowait()
    assert both.ended == []


@message("tests.forward.follow")
class Follow:
    to: Sender[int]


@asynccontextmanager
async def chain(at_home: Any) -> AsyncIterator[Receiver[int]]:
    """A follower of a front, which forwards what it follows at home; three systems."""

    async def at_front(m: Follow) -> None:
        sender, receiver = channel(int)
        await home.send(Follow(sender))
        states.append(await forward(receiver, m.to))

    states = list[TerminalState]()
    async with (
        ActorSystem("home") as first,
        ActorSystem("front") as second,
        ActorSystem("follower") as third,
        aqueduct.serve(first, "aqueduct+memory://home", at_home, Follow),
        aqueduct.connect(second, "aqueduct+memory://home", Follow) as home,
        aqueduct.serve(second, "aqueduct+memory://front", at_front, Follow),
        aqueduct.connect(third, "aqueduct+memory://front", Follow) as front,
    ):
        sender, receiver = channel(int)
        await front.send(Follow(sender))
        async with receiver:
            yield receiver


async def test_a_follower_of_a_front_gets_what_the_owner_sends(autojump_clock: MockClock) -> None:
    async def at_home(m: Follow) -> None:
        async with m.to as to:
            for n in range(1000):
                await to.send(n)

    async with chain(at_home) as receiver:
        assert [n async for n in receiver] == list(range(1000))


async def test_the_owner_learns_that_a_follower_of_a_front_has_left(autojump_clock: MockClock) -> None:
    left = trio.Event()

    async def at_home(m: Follow) -> None:
        async with m.to as to:
            while True:
                await to.send(1)
        left.set()

    async with chain(at_home) as receiver:
        assert await receiver.receive() == 1
        assert not left.is_set()
        receiver.close()
        with trio.fail_after(10):
            await left.wait()


@message("tests.forward.offer")
class Offer:
    to: Sender[int]


@message("tests.forward.browse")
class Browse:
    offers: Sender[Offer]


async def test_a_message_with_a_handle_that_cannot_travel_on_ends_both_channels_and_is_raised(
    autojump_clock: MockClock,
) -> None:
    """A channel that came from another process cannot be sent on to a third one."""
    raised: list[HandleNotForwardable] = []  # with the frames that have the message
    left = trio.Event()

    async def at_home(m: Browse) -> None:
        sender, orders = channel(int)
        async with orders:
            async with m.offers as offers:
                await offers.send(Offer(sender))
                await offers.terminated()
            with pytest.raises(ChannelCancelled):
                await orders.receive()
        left.set()

    async def at_front(m: Browse) -> None:
        sender, receiver = channel(Offer)
        await home.send(Browse(sender))
        try:
            await forward(receiver, m.offers)
        except HandleNotForwardable as error:
            raised.append(error)

    async with (
        ActorSystem("home") as first,
        ActorSystem("front") as second,
        ActorSystem("follower") as third,
        aqueduct.serve(first, "aqueduct+memory://home", at_home, Browse),
        aqueduct.connect(second, "aqueduct+memory://home", Browse) as home,
        aqueduct.serve(second, "aqueduct+memory://front", at_front, Browse),
        aqueduct.connect(third, "aqueduct+memory://front", Browse) as front,
    ):
        sender, offers = channel(Offer)
        await front.send(Browse(sender))
        async with offers:
            with pytest.raises(ChannelCancelled):
                await offers.receive()
        await left.wait()
    assert len(raised) == 1
    assert "forward" in str(raised[0])
