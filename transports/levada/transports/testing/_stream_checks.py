"""The checks of byte streams and message streams, and of the streams of a connection as byte streams."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost, StreamError
from levada.transports.carriers.contracts import (
    ByteStream,
    CarrierInfo,
    CarrierStatistics,
    Connection,
    MessageStream,
    Octets,
)
from levada.transports.testing.check_carrier import Carrier, CarrierTraits, Factory

BLOCK = 16 * 1024  # octets of one send of the checks
LOST = (ConnectionLost, StreamError)


class Channel(Protocol):
    """What the checks use of either shape; for messages each send and each receive is one message."""

    @property
    def info(self) -> CarrierInfo: ...
    @property
    def unsent(self) -> int: ...
    async def send_all(self, data: Octets, /) -> None: ...
    async def receive_some(self, max_bytes: int | None = None, /) -> bytes: ...
    async def flush(self) -> None: ...
    async def aclose(self) -> None: ...
    def abort(self) -> None: ...
    def statistics(self) -> CarrierStatistics: ...


class _Messages:
    """A message stream with the names of a byte stream."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self.send_all = stream.send
        self.flush = stream.flush
        self.aclose = stream.aclose
        self.abort = stream.abort
        self.statistics = stream.statistics

    @property
    def info(self) -> CarrierInfo:
        return self._stream.info

    @property
    def unsent(self) -> int:
        return self._stream.unsent

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._stream.receive()


Body = Callable[[CarrierTraits, Channel, Channel], Awaitable[None]]
ByteBody = Callable[[CarrierTraits, ByteStream, ByteStream], Awaitable[None]]
MessageBody = Callable[[CarrierTraits, MessageStream, MessageStream], Awaitable[None]]
Run = Callable[[CarrierTraits, Factory], Awaitable[None]]

CHECKS: dict[str, dict[str, Run]] = {"bytes": {}, "messages": {}, "connection": {}}
"""By the shape of the carrier, then by name."""


@asynccontextmanager
async def streams_of(
    traits: CarrierTraits, factory: Factory
) -> AsyncIterator[tuple[Carrier, Carrier, ByteStream, ByteStream]]:
    """Open a pair; of a connection also one stream on it, which both ends know."""
    async with factory() as (a, b):
        if isinstance(a, Connection) and isinstance(b, Connection):
            here = await a.open_stream()
            await here.send_all(b"\0")
            there = await b.accept_stream()
            assert await there.receive_some(1) == b"\0"
            await traits.settle()  # the credit for that octet is back, and blocked means blocked
            yield a, b, here, there
        else:
            assert isinstance(a, ByteStream)
            assert isinstance(b, ByteStream)
            yield a, b, a, b


def bytes_check(body: ByteBody) -> ByteBody:
    """Register a check of byte streams, also of those in a connection."""

    async def run(traits: CarrierTraits, factory: Factory) -> None:
        async with streams_of(traits, factory) as (_, _, x, y):
            await body(traits, x, y)

    CHECKS["bytes"][body.__name__] = CHECKS["connection"][body.__name__] = run
    return body


def messages_check(body: MessageBody) -> MessageBody:
    """Register a check of message streams."""

    async def run(traits: CarrierTraits, factory: Factory) -> None:
        async with factory() as (x, y):
            assert isinstance(x, MessageStream)
            assert isinstance(y, MessageStream)
            await body(traits, x, y)

    CHECKS["messages"][body.__name__] = run
    return body


def check(body: Body) -> Body:
    """Register a check of every kind of stream."""

    async def run_messages(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
        await body(traits, _Messages(x), _Messages(y))

    run_messages.__name__ = body.__name__
    bytes_check(body)
    messages_check(run_messages)
    return body


# ---------------------------------------------------------------- tools


def block(number: int) -> bytes:
    """Return the block of that number: it can be recognised at each fourth octet."""
    return number.to_bytes(4, "big") * (BLOCK // 4)


async def read(y: Channel, count: int) -> bytes:
    """Take exactly `count` octets."""
    data = bytearray()
    while len(data) < count:
        part = await y.receive_some(count - len(data))
        assert part, f"the end came after {len(data)} of {count} octets"
        data += part
    assert len(data) == count
    return bytes(data)


async def read_to_end(y: Channel) -> bytes:
    """Take octets until the peer's end, or its loss."""
    data = bytearray()
    try:
        while part := await y.receive_some():
            data += part
    except LOST:
        pass
    return bytes(data)


async def fill(traits: CarrierTraits, x: Channel, *, first: int = 0) -> int:
    """Send numbered blocks until sending waits, then cancel that one; return how many sends came back."""
    sent = 0

    async def send() -> None:
        nonlocal sent
        while sent * BLOCK <= traits.buffered:
            await x.send_all(block(first + sent))
            sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await traits.settle()
        assert sent * BLOCK <= traits.buffered, f"{sent * BLOCK} octets were taken although nobody receives"
        nursery.cancel_scope.cancel()
    return sent


async def expect_blocks(y: Channel, sent: int, tail: bytes) -> None:
    """Read `sent` blocks, perhaps one more (a cancelled send goes whole or not at all), then `tail`, which is shorter than a block."""
    for number in range(sent):
        assert await read(y, BLOCK) == block(number), f"block {number} is wrong"
    rest = await read(y, len(tail))
    if rest != tail:
        rest += await read(y, BLOCK - len(tail))
        assert rest == block(sent), "a cancelled send went out in part"
        assert await read(y, len(tail)) == tail


async def failure(call: Callable[[], Awaitable[object]]) -> CarrierError:
    """Return the error that `call` raises, after seeing that it raises the same kind again."""
    errors: list[CarrierError] = []
    for _ in range(2):
        try:
            result = await call()
        except CarrierError as error:
            errors.append(error)
        else:
            raise AssertionError(f"an error was to come, {result!r} did")
    assert type(errors[0]) is type(errors[1]), f"first {errors[0]!r}, then {errors[1]!r}"
    return errors[0]


async def expect(
    kinds: type[CarrierError] | tuple[type[CarrierError], ...], call: Callable[[], Awaitable[object]]
) -> CarrierError:
    """Return the error of `call`, which must be of these kinds, twice."""
    error = await failure(call)
    assert isinstance(error, kinds), f"expected {kinds}, got {error!r}"
    return error


async def sending_fails(traits: CarrierTraits, x: Channel) -> None:
    """Send until sending fails with a loss, as it must before long; then it fails again."""
    for _ in range(2 + traits.buffered // BLOCK):
        try:
            await x.send_all(block(0))
        except LOST:
            break
        await traits.settle()
    await expect(LOST, lambda: x.send_all(b"x"))


async def is_busy(call: Callable[[], Awaitable[object]]) -> None:
    """Expect that another task is at it."""
    try:
        await call()
    except trio.BusyResourceError:
        return
    raise AssertionError("two tasks in one direction, and no BusyResourceError")


async def outcome_of(call: Callable[[], Awaitable[object]], into: list[object]) -> None:
    """Put what `call` returns or raises into a list, for tasks."""
    try:
        into.append(await call())
    except (CarrierError, trio.BusyResourceError) as error:
        into.append(error)


# ---------------------------------------------------------------- every kind of stream


@check
async def carries_octets_in_order_both_ways_at_once(traits: CarrierTraits, x: Channel, y: Channel) -> None:
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
async def takes_any_octets_and_keeps_none_of_the_callers(traits: CarrierTraits, x: Channel, y: Channel) -> None:
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
            if number % 2:  # once before the octets come, once just after
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
        assert done == [], "flush() came back with octets queued"
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
        nursery.start_soon(outcome_of, lambda: x.send_all(b"x"), got)
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
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, lambda: y.send_all(b"x"), got)
        nursery.start_soon(outcome_of, y.flush, got)
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
    assert after.octets_sent - before.octets_sent >= 1000
    assert after_there.octets_received - before_there.octets_received >= 1000
    assert after.writes > before.writes
    assert after_there.reads > before_there.reads


@check
async def tells_who_is_there(traits: CarrierTraits, x: Channel, y: Channel) -> None:
    assert x.info.scheme
    assert x.info.scheme == y.info.scheme
    assert x.info.peer
    assert x.info.local


# ---------------------------------------------------------------- byte streams


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


# ---------------------------------------------------------------- message streams


@messages_check
async def messages_stay_whole(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    messages = [random.Random(size).randbytes(size) for size in (0, 1, 125, 126, 127, 0, 1024, 65_535, 65_536, 70_000)]

    async def send() -> None:
        for message in messages:
            await x.send(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert [await y.receive() for _ in messages] == messages


@messages_check
async def queues_messages_without_waiting(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    sent = await fill(traits, _Messages(x))
    before = x.unsent
    x.send_nowait(block(sent))
    assert x.unsent >= before + BLOCK
    waited: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.wait_for_room, waited)
        await traits.settle()
        assert waited == []
        await is_busy(x.wait_for_room)
        await is_busy(lambda: x.send(b"?"))
        for number in range(sent + 1):
            assert await y.receive() == block(number)
    assert waited == [None]
    await x.wait_for_room()
    x.send_nowait(b"tail")
    rest = await y.receive()
    assert rest in (b"tail", block(sent)), "`wait_for_room` sent something"
    if rest != b"tail":  # the send that `fill` cancelled went after all, whole
        assert await y.receive() == b"tail"


@messages_check
async def wait_for_room_ends_with_the_stream(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    await fill(traits, _Messages(x))
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.wait_for_room, got)
        await traits.settle()
        assert got == []
        x.abort()
    assert [type(outcome) for outcome in got] == [ConnectionClosed]
    await expect(ConnectionClosed, x.wait_for_room)
    try:
        x.send_nowait(b"x")
    except ConnectionClosed:
        return
    raise AssertionError("send_nowait() after abort() was taken")


@messages_check
async def takes_what_is_here_without_waiting(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    messages = [bytes([number]) * number for number in range(8)]
    assert y.receive_nowait() is None
    for message in messages:
        x.send_nowait(message)
    await traits.settle()
    got: list[bytes] = []
    waits = 0
    while len(got) < len(messages):
        if (taken := y.receive_nowait()) is None:
            taken = await y.receive()
            waits += 1
        got.append(taken)
    assert got == messages
    assert waits <= 2, "messages that came together were not handed over together"
    assert y.receive_nowait() is None
    y.abort()
    assert y.receive_nowait() is None
    await expect(LOST, x.receive)
    assert x.receive_nowait() is None


@messages_check
async def leaving_the_block_closes_after_the_messages(
    traits: CarrierTraits, x: MessageStream, y: MessageStream
) -> None:
    got: list[object] = []

    async def receive() -> None:
        got.append(await y.receive())
        got.append(await expect(ConnectionLost, y.receive))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async with x as same:
            assert same is x
            await x.send(b"bye")
    assert got[0] == b"bye"
    assert isinstance(got[1], ConnectionLost)
    assert got[1].code == 1000
    await expect(ConnectionClosed, lambda: x.send(b"x"))


@messages_check
async def close_code_comes_after_the_messages(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    got: list[object] = []

    async def receive() -> None:
        got.append(await y.receive())
        got.append(await y.receive())
        got.append(await expect(ConnectionLost, y.receive))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await x.send(b"one")
        await x.send(b"")
        await x.aclose(4001, "enough")
    assert got[:2] == [b"one", b""]
    assert isinstance(got[2], ConnectionLost)
    assert got[2].code == 4001
    await sending_fails(traits, _Messages(y))


@messages_check
async def larger_message_than_allowed_closes(traits: CarrierTraits, x: MessageStream, y: MessageStream) -> None:
    assert traits.max_message is not None
    errors: list[CarrierError] = []

    async def receive(stream: MessageStream) -> None:
        errors.append(await expect(ConnectionLost, stream.receive))

    async def send() -> None:
        try:
            await x.send(bytes(size + 1))
        except ConnectionLost:
            pass  # the peer may be faster than this call

    size = traits.max_message
    async with trio.open_nursery() as nursery:
        nursery.start_soon(x.send, bytes(size))
        assert await y.receive() == bytes(size)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        nursery.start_soon(receive, x)
        nursery.start_soon(receive, y)
    assert [error.code for error in errors if isinstance(error, ConnectionLost)] == [1009, 1009]


# ---------------------------------------------------------------- lost by the network


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
            await cut(traits, a, b, _Messages(a), _Messages(b))

    CHECKS["bytes"][name] = CHECKS["connection"][name] = run_bytes
    CHECKS["messages"][name] = run_messages


async def read_on(y: Channel) -> None:
    """Take what has arrived; the loss comes after it."""
    while await y.receive_some():
        pass


async def _both_receive(_: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    nursery.start_soon(outcome_of, x.receive_some, got)
    nursery.start_soon(outcome_of, y.receive_some, got)


async def _both_send(traits: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    await fill(traits, x)
    await fill(traits, y)
    nursery.start_soon(outcome_of, lambda: x.send_all(b"x"), got)
    nursery.start_soon(outcome_of, lambda: y.send_all(b"x"), got)


async def _both_flush(traits: CarrierTraits, x: Channel, y: Channel, nursery: trio.Nursery, got: list[object]) -> None:
    await fill(traits, x)
    await fill(traits, y)
    nursery.start_soon(outcome_of, x.flush, got)
    nursery.start_soon(outcome_of, y.flush, got)


_cut_check("is_cut_while_receiving", _both_receive)
_cut_check("is_cut_while_sending", _both_send)
_cut_check("is_cut_while_flushing", _both_flush)
