"""The checks of message streams."""

from __future__ import annotations

import random

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost
from levada.transports.carriers.contracts import MessageStream
from levada.transports.testing._stream_tools import (
    BLOCK,
    LOST,
    Messages,
    block,
    expect,
    fill,
    is_busy,
    messages_check,
    outcome_of,
    sending_fails,
)
from levada.transports.testing.traits import CarrierTraits


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
    sent = await fill(traits, Messages(x))
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
    await fill(traits, Messages(x))
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
    await sending_fails(traits, Messages(y))


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
