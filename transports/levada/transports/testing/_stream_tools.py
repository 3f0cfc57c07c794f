"""The parts of the checks of carriers: pairs of ends, both kinds of streams with one interface, registration of checks, small steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from levada.framework.errors import CarrierError, ConnectionLost, StreamError
from levada.transports.carriers.contracts import (
    ByteStream,
    CarrierInfo,
    CarrierStatistics,
    Connection,
    MessageStream,
    Octets,
)
from levada.transports.testing.traits import Carrier, CarrierTraits, Factory

BLOCK = 16 * 1024  # bytes of one send of the checks
LOST = (ConnectionLost, StreamError)


class Channel(Protocol):
    """The methods that the checks use of a byte stream or a message stream; for messages each send and each receive is one message."""

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


class Messages:
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
            await traits.settle()  # the credit for that byte is back, and blocked means blocked
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
        await body(traits, Messages(x), Messages(y))

    run_messages.__name__ = body.__name__
    bytes_check(body)
    messages_check(run_messages)
    return body


def block(number: int) -> bytes:
    """Return block number `number`, which can be recognised at each fourth byte."""
    return number.to_bytes(4, "big") * (BLOCK // 4)


async def read(y: Channel, count: int) -> bytes:
    """Take exactly `count` bytes."""
    data = bytearray()
    while len(data) < count:
        part = await y.receive_some(count - len(data))
        assert part, f"the end came after {len(data)} of {count} bytes"
        data += part
    assert len(data) == count
    return bytes(data)


async def read_to_end(y: Channel) -> bytes:
    """Take bytes until the peer's end, or its loss."""
    data = bytearray()
    try:
        while part := await y.receive_some():
            data += part
    except LOST:
        pass
    return bytes(data)


async def fill(traits: CarrierTraits, x: Channel, *, first: int = 0) -> int:
    """Send numbered blocks until a send waits, and cancel that one; return how many sends returned."""
    sent = 0

    async def send() -> None:
        nonlocal sent
        while sent * BLOCK <= traits.buffered:
            await x.send_all(block(first + sent))
            sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        before, still = -1, 0
        while still < 3:  # on a busy machine a quiet moment may be one in the midst of it
            before, still = sent, still + 1 if before == sent else 0
            await traits.settle()
        assert sent * BLOCK <= traits.buffered, f"{sent * BLOCK} bytes were taken although no task receives"
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


async def endlessly(call: Callable[[], Awaitable[object]]) -> None:
    """Call again and again until it fails. A sender that waits on a full socket may still go on once: the kernel moves bytes when it likes."""
    while True:
        await call()
        await trio.lowlevel.checkpoint()


async def outcome_of(call: Callable[[], Awaitable[object]], into: list[object]) -> None:
    """Put what `call` returns or raises into a list, for tasks."""
    try:
        into.append(await call())
    except (CarrierError, trio.BusyResourceError) as error:
        into.append(error)


async def read_on(y: Channel) -> None:
    """Take the bytes that have arrived; the loss comes after them."""
    while await y.receive_some():
        pass
