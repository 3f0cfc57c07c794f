"""The checks of every kind of stream and of byte streams, also of a connection's."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from levada.framework.errors import ConnectionClosed, ConnectionLost
from levada.transports.carriers.contracts import ByteStream, MessageStream
from levada.transports.testing._stream_tools import (
    BLOCK,
    CHECKS,
    LOST,
    Channel,
    Messages,
    block,
    bytes_check,
    check,
    endlessly,
    expect,
    expect_blocks,
    fill,
    is_busy,
    outcome_of,
    read,
    read_on,
    read_to_end,
    sending_fails,
    streams_of,
)
from levada.transports.testing.traits import Carrier, CarrierTraits, Factory


@check
async def carries_bytes_in_order_both_ways_at_once(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    sizes = random.Random(0).choices([1, 2, 3, 100, 1000, 5000, 20_000], k=60)
    parts = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]

    async def send(channel: Channel) -> None:
        for part in parts:
            await channel.send_all(part)

    async def receive(channel: Channel) -> None:
        for part in parts:
            assert await read(channel, len(part)) == part

    async with trio.open_nursery() as nursery:
        for channel in (x, y):
            nursery.start_soon(send, channel)
            nursery.start_soon(receive, channel)


@check
async def takes_any_bytes_and_keeps_none_of_the_callers(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    buffer = bytearray(b"one")
    await x.send_all(buffer)
    buffer[:] = b"???"
    await x.send_all(memoryview(b"-two-")[1:4])
    got = await read(y, 6)
    assert got == b"onetwo"
    assert type(got) is bytes


@check
async def cancelled_receive_takes_nothing(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    got = bytearray()

    async def receive(scope: trio.CancelScope) -> None:
        with scope:
            got.extend(await y.receive_some())

    for number in range(10):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive, scope)
            await traits.settle()
            if number % 2:  # once before the bytes come, once just after
                scope.cancel()
            await x.send_all(bytes([number]))
            scope.cancel()
    while len(got) < 10:
        got += await y.receive_some()
    assert got == bytes(range(10))


@check
async def cancelled_send_is_all_or_nothing(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    sent = await fill(traits, x)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(x.send_all, b"tail")
        await expect_blocks(y, sent, b"tail")


@check
async def cancelled_before_it_began_is_all_or_nothing(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    sent = 0
    with trio.CancelScope() as scope:
        scope.cancel()
        await x.send_all(block(0))
        sent = 1
    await x.send_all(b"tail")
    await expect_blocks(y, sent, b"tail")


@check
async def stopped_receiver_stops_the_sender_both_ways(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    there, back = await fill(traits, x), await fill(traits, y)
    async with trio.open_nursery() as nursery:
        for sender, receiver, sent in ((x, y, there), (y, x, back)):
            nursery.start_soon(sender.send_all, b"tail")
            nursery.start_soon(expect_blocks, receiver, sent, b"tail")


@check
async def blocked_direction_leaves_the_other_alone(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await fill(traits, x)
    for number in range(5):
        await y.send_all(block(number))
        assert await read(x, BLOCK) == block(number)


@check
async def second_receiver_is_refused(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, y.receive_some, got)
        await traits.settle()
        await is_busy(y.receive_some)
        await x.send_all(b"for the first")
    assert got == [b"for the first"]


@check
async def second_sender_is_refused(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    sent = await fill(traits, x)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(x.send_all, b"tail")
        await traits.settle()
        await is_busy(lambda: x.send_all(b"?"))
        await expect_blocks(y, sent, b"tail")


@check
async def flush_waits_for_the_queue_and_may_be_cancelled(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await x.send_all(b"first")
    await x.flush()
    assert x.statistics().unsent == x.unsent == 0
    assert await read(y, 5) == b"first"
    sent = await fill(traits, x)
    assert x.statistics().unsent == x.unsent > 0
    done: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.flush, done)
        await traits.settle()
        assert done == [], "flush() came back with bytes queued"
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.flush, done)
        nursery.start_soon(x.send_all, b"tail")
        await expect_blocks(y, sent, b"tail")
    assert done == [None]
    await x.flush()
    assert x.statistics().unsent == 0


@check
async def close_sends_what_is_queued(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    sent = await fill(traits, x)
    got: list[bytes] = []

    async def receive() -> None:
        got.append(await read_to_end(y))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await x.aclose()
    assert got[0][: sent * BLOCK] == b"".join(map(block, range(sent)))
    assert got[0][sent * BLOCK :] in (b"", block(sent))


@check
async def closed_here_is_told_so_each_time(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await x.aclose()
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))
    await expect(ConnectionClosed, x.receive_some)
    await x.aclose()
    x.abort()
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))


@check
async def close_wakes_the_receiver_here(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.receive_some, got)
        await traits.settle()
        await x.aclose()
    assert [type(outcome) for outcome in got] == [ConnectionClosed]


@check
async def abort_wakes_both_directions_here(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await fill(traits, x)
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.receive_some, got)
        nursery.start_soon(outcome_of, lambda: endlessly(lambda: x.send_all(block(0))), got)
        await traits.settle()
        x.abort()
    assert [type(outcome) for outcome in got] == [ConnectionClosed, ConnectionClosed]
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))
    await expect(ConnectionClosed, x.receive_some)


@check
async def cancelled_close_still_closes(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await fill(traits, x)
    with trio.CancelScope() as scope:
        scope.cancel()
        await x.aclose()
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))
    await expect(ConnectionClosed, x.receive_some)
    await read_to_end(y)


@check
async def close_of_the_peer_fails_sending(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await y.aclose()
    await sending_fails(traits, x)


@check
async def abort_is_seen_as_a_loss_by_the_peer(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await x.send_all(b"perhaps")
    x.abort()
    try:
        while await y.receive_some():
            pass
        raise AssertionError("the peer aborted, and it looked like its end of sending")
    except LOST:
        pass
    await expect(LOST, y.receive_some)
    await sending_fails(traits, y)


@check
async def abort_of_the_peer_wakes_the_receiver(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, y.receive_some, got)
        await traits.settle()
        x.abort()
    assert isinstance(got[0], LOST) or (got[0] == b"" and not traits.tells_loss), got


@check
async def abort_of_the_peer_wakes_sender_and_flush(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    await fill(traits, y)
    got: list[object] = []

    async def flush() -> None:
        """Flush, and again if the kernel has taken the whole queue after all."""
        while True:
            before = y.statistics()
            await y.flush()
            if before.unsent and y.statistics().bytes_sent == before.bytes_sent:
                return
            await traits.settle()  # the sender fills the queue again

    async with trio.open_nursery() as nursery:
        # Not byte by byte: a queue that has become empty would take very long to fill.
        nursery.start_soon(outcome_of, lambda: endlessly(lambda: y.send_all(block(0))), got)
        nursery.start_soon(outcome_of, flush, got)
        await traits.settle()
        assert got == []
        x.abort()
    assert [isinstance(outcome, LOST) for outcome in got] == [True, True], got


@check
async def counts_what_it_carries(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    before, before_there = x.statistics(), y.statistics()
    for _ in range(10):
        await x.send_all(bytes(100))
    await x.flush()
    await read(y, 1000)
    after, after_there = x.statistics(), y.statistics()
    assert after.bytes_sent - before.bytes_sent >= 1000
    assert after_there.bytes_received - before_there.bytes_received >= 1000
    assert after.writes > before.writes
    assert after_there.reads > before_there.reads


@check
async def tells_who_is_there(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    assert x.info.scheme
    assert x.info.scheme == y.info.scheme
    assert x.info.peer
    assert x.info.local


@bytes_check
async def nothing_sent_is_not_an_end(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    await x.send_all(b"")
    await x.send_all(b"a")
    await x.send_all(b"")
    assert await y.receive_some() == b"a"


@bytes_check
async def sends_without_waiting_above_the_watermark(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    sent = await fill(traits, x)
    for number in range(2):
        x.send_nowait(block(sent + number))
    waited: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, lambda: x.send_all(b""), waited)  # waits for room, and queues nothing
        await traits.settle()
        assert waited == []
        for number in range(sent):
            assert await read(y, BLOCK) == block(number)
        # The send that `fill` cancelled went whole or not at all.
        following = await read(y, BLOCK)
        assert following == block(sent)
        rest = await read(y, BLOCK)
        if rest == block(sent):
            rest = await read(y, BLOCK)
        assert rest == block(sent + 1)
    assert waited == [None]
    x.send_nowait(b"tail")
    assert await read(y, 4) == b"tail"
    await x.aclose()
    try:
        x.send_nowait(b"x")
    except ConnectionClosed:
        return
    raise AssertionError("send_nowait() after aclose() was taken")


@bytes_check
async def receives_no_more_than_asked_for(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    await x.send_all(b"abcdefgh")
    got = [await y.receive_some(1), await y.receive_some(3)]
    assert got[0] == b"a"
    assert 1 <= len(got[1]) <= 3
    assert b"".join(got) + await read(y, 7 - len(got[1])) == b"abcdefgh"


@bytes_check
async def half_closes_in_both_orders(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    for one, other in ((x, y), (y, x)):
        await one.send_all(b"last words")
        if not traits.half_close:
            try:
                await one.send_eof()
            except NotImplementedError:
                assert await read(other, 10) == b"last words"
                continue
            raise AssertionError("send_eof() came back where half_close is false")
        await one.send_eof()
        await one.send_eof()
        await expect(ConnectionClosed, lambda one=one: one.send_all(b"x"))  # type: ignore[misc]  # a default cannot be typed
        assert await read_to_end(other) == b"last words"
        assert await other.receive_some() == b""
        assert await other.receive_some() == b""
        if one is x:  # the other direction is open still
            await y.send_all(b"answer")
            assert await read(x, 6) == b"answer"


@bytes_check
async def end_comes_after_what_is_queued(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    sent = await fill(traits, x)
    if not traits.half_close:
        return
    await x.send_eof()
    got = await read_to_end(y)
    assert got[: sent * BLOCK] == b"".join(map(block, range(sent)))
    assert got[sent * BLOCK :] in (b"", block(sent))


@bytes_check
async def close_of_the_peer_is_an_end(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    await x.send_all(b"bye")
    await x.aclose()
    assert await read(y, 3) == b"bye"
    assert await y.receive_some() == b""
    assert await y.receive_some() == b""


@bytes_check
async def leaving_the_block_closes(traits: CarrierTraits, x: ByteStream, y: ByteStream) -> None:
    async with x:
        await x.send_all(b"bye")
    assert await read(y, 3) == b"bye"
    assert await y.receive_some() == b""
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))


def _cut_check(
    name: str, prepare: Callable[[CarrierTraits, Channel, Channel, trio.Nursery, list[object]], Awaitable[None]]
) -> None:
    """Register a check in which the connection is cut while two tasks wait, one at each end."""

    async def cut(traits: CarrierTraits, a: Carrier, b: Carrier, x: Channel, y: Channel) -> None:
        assert traits.cut is not None
        got: list[object] = []
        async with trio.open_nursery() as nursery:
            await prepare(traits, x, y, nursery, got)
            await traits.settle()
            traits.cut(a, b)
        assert [isinstance(outcome, ConnectionLost) for outcome in got] == [True, True], got
        await expect(ConnectionLost, lambda: x.send_all(b"x"))
        await expect(ConnectionLost, lambda: read_on(x))
        await x.aclose()
        await expect(ConnectionClosed, x.receive_some)

    async def run_bytes(traits: CarrierTraits, factory: Factory) -> None:
        async with streams_of(traits, factory) as (a, b, x, y):
            await cut(traits, a, b, x, y)

    async def run_messages(traits: CarrierTraits, factory: Factory) -> None:
        async with factory() as (a, b):
            assert isinstance(a, MessageStream)
            assert isinstance(b, MessageStream)
            await cut(traits, a, b, Messages(a), Messages(b))

    CHECKS["bytes"][name] = CHECKS["connection"][name] = run_bytes
    CHECKS["messages"][name] = run_messages


async def _both_receive(_: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    nursery.start_soon(outcome_of, x.receive_some, got)
    nursery.start_soon(outcome_of, y.receive_some, got)


async def _both_send(traits: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    await fill(traits, x)
    await fill(traits, y)
    for end in (x, y):
        nursery.start_soon(outcome_of, partial(endlessly, partial(end.send_all, b"x")), got)


async def _both_flush(traits: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    await fill(traits, x)
    await fill(traits, y)
    nursery.start_soon(outcome_of, x.flush, got)
    nursery.start_soon(outcome_of, y.flush, got)


_cut_check("is_cut_while_receiving", _both_receive)
_cut_check("is_cut_while_sending", _both_send)
_cut_check("is_cut_while_flushing", _both_flush)
