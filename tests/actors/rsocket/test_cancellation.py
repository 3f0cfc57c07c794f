"""For each place where a driver waits: cancelled there, nothing is half done and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.rsocket import (
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Payload,
    Reconnect,
    Request,
    RequestCanceled,
    RequestRejected,
    ServerConfig,
    balanced,
)
from levada.framework import Actor, ActorSystem, handles
from levada.framework.errors import ReceiverClosed
from levada.transports.carriers import MemoryConfig
from levada.transports.rsocket.frames import RequestNFrame

from .conftest import below, connect, serve
from .test_requests import pair


def hold(peer: ConnectedPeer) -> Any:
    """Let nothing more through; what is sent piles up."""
    wire: Any = below(peer).carrier
    wire.stream.link.hold()
    return wire.stream.link


@pytest.mark.parametrize("kind", ["response", "forget", "stream", "channel"])
async def test_waiting_for_room_to_send_a_request(kind: str) -> None:
    """A crowded carrier holds requests back; one that is given up meanwhile was never sent."""
    narrow = ServerConfig(carrier=MemoryConfig(window=1000))
    async with pair(lambda request: b"", server=narrow, client=ClientConfig(high_watermark=2000)) as (peer, _, _system):
        await peer.request_response(b"")
        link = hold(peer)
        await peer.fire_and_forget(bytes(200_000))
        sent = peer.statistics().requests_sent
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                calls: dict[str, Any] = {
                    "response": peer.request_response,
                    "forget": peer.fire_and_forget,
                    "stream": peer.request_stream,
                    "channel": peer.request_channel,
                }
                nursery.start_soon(calls[kind], b"late")
                await wait_all_tasks_blocked()
                scope.cancel()
        assert peer.statistics().requests_sent == sent
        assert peer.statistics().open_streams == 0
        link.release()
        assert (await peer.request_response(b"")).data == b""


async def test_a_responder_that_waits_for_room() -> None:
    """CANCEL reaches an answer that the carrier has no room for."""

    async def handler(request: Request) -> bytes:
        return bytes(50_000)

    narrow = ServerConfig(carrier=MemoryConfig(window=1000), high_watermark=10_000)
    async with pair(handler, server=narrow) as (peer, listener, _):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(peer.request_response, b"")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await peer.request_response(b"")
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().open_streams == 0


async def test_a_channel_that_waits_for_credit() -> None:
    """A sender given up while it waits for the responder has not sent that payload."""
    got: list[bytes] = []
    gate = trio.Event()

    async def handler(request: Request) -> Any:
        await gate.wait()
        async for payload in request.payloads:
            got.append(payload.data)
        return b"end"

    small = ClientConfig(window=2)
    async with pair(handler, client=small, server=ServerConfig(window=2)) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0")
        sent = 0
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    nonlocal sent
                    while True:
                        await sender.send(b"%d" % (sent + 1))
                        sent += 1

                nursery.start_soon(send)
                await wait_all_tasks_blocked()
                scope.cancel()
        sender.finish_nowait()
        gate.set()
        assert [payload.data async for payload in receiver] == [b"end"]
        assert got == [b"%d" % number for number in range(sent + 1)]


@pytest.mark.parametrize("kind", ["response", "stream", "channel"])
@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_a_request_has_its_place_until_its_handler_has_ended(dialect: str, kind: str) -> None:
    """A peer that cancels its requests at once cannot have more handlers than streams: those that clean up count as well."""
    running = most = 0
    clean = trio.Event()

    async def handler(_: Request) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if not clean.is_set():
                await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await clean.wait()
            running -= 1
        return b"done"

    config = ServerConfig(core=CoreConfig(max_streams=3))
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=config) as listener,
        connect(system, listener.url) as peer,
        AsyncExitStack() as stack,
    ):
        stack.callback(clean.set)

        async def request() -> bytes:
            if kind == "response":
                return (await peer.request_response(b"")).data
            if kind == "stream":
                receiver = await peer.request_stream(b"")
            else:
                sender, receiver = await peer.request_channel(b"")
                sender.finish_nowait()
            with receiver:
                return (await receiver.receive()).data

        async def ask() -> None:
            with suppress(RequestRejected):
                await request()

        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        assert (running, most) == (3, 3)
        with pytest.raises(RequestRejected) as rejected:
            await request()
        assert rejected.value.retryable
        clean.set()
        await wait_all_tasks_blocked()
        assert (running, most) == (0, 3)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(request)
        assert await request() == b"done"


async def test_a_request_that_is_cancelled_before_its_turn_leaves_its_place() -> None:
    async def handler(_: Request) -> bytes:
        return b"done"

    async with pair(handler, server=ServerConfig(core=CoreConfig(max_streams=3))) as (peer, _, _system):
        core, now = below(peer).core, trio.current_time()
        await peer.request_response(b"")
        for _ in range(4):
            for stream_id in [core.send_request_response(Payload(b""), now) for _ in range(3)]:
                core.send_cancel(stream_id)
            below(peer).flush()
            await wait_all_tasks_blocked()
        assert (await peer.request_response(b"")).data == b"done"


async def test_waiting_for_the_end_changes_nothing() -> None:
    async with pair(lambda request: request.payload) as (peer, listener, _):
        for wait in (peer.terminated, listener.terminated):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await wait_all_tasks_blocked()
                    scope.cancel()
        assert (await peer.request_response(b"on")).data == b"on"


async def test_closing_is_cancelled(autojump_clock: MockClock) -> None:
    """`aclose` given up while streams end closes at once."""

    async def handler(_: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler) as listener:
        async with connect(system, listener.url) as peer:
            sender, receiver = await peer.request_channel(b"")
            with trio.move_on_after(1):
                await peer.aclose()
            assert peer.closed
            with pytest.raises(ReceiverClosed):
                await sender.send(b"")
            receiver.close()
        async with connect(system, listener.url) as peer:
            receiver = await peer.request_stream(b"")
            with trio.move_on_after(1):
                await listener.aclose()
            await wait_all_tasks_blocked()
            assert peer.closed
            receiver.close()


async def test_serving_is_cancelled_while_it_drains(autojump_clock: MockClock) -> None:
    ended = trio.Event()

    async def handler(_: Request) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return b""

    stack = AsyncExitStack()
    async with ActorSystem() as system:
        with trio.CancelScope() as scope:
            async with serve(system, "rsocket+memory://desk", handler) as listener:
                peer = await stack.enter_async_context(connect(system, listener.url))
                stack.callback((await peer.request_stream(b"")).close)
                await wait_all_tasks_blocked()
                scope.deadline = trio.current_time() + 1
        assert scope.cancelled_caught
        assert ended.is_set()
        await stack.aclose()
        assert system.statistics().actors == 0


async def test_dialling_again_is_cancelled(autojump_clock: MockClock) -> None:
    """A client without server, and one whose session waits for a carrier, are left at once."""
    resuming = CoreConfig(resume=True)
    async with ActorSystem() as system:
        with trio.move_on_after(3):
            async with connect(system, "rsocket+memory://desk", reconnect=Reconnect()):
                raise AssertionError("nobody is there")
        async with balanced(system, ["rsocket+memory://desk"]):
            await trio.sleep(3)
        with trio.move_on_after(5) as scope:
            async with (
                serve(system, "rsocket+memory://desk", config=ServerConfig(core=resuming)) as listener,
                connect(system, listener.url, config=ClientConfig(core=resuming)) as peer,
            ):
                await peer.fire_and_forget(b"")
                listener._actor.close_listener()
                peer.drop_carrier()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert system.statistics().actors == 0


async def test_a_handler_is_cancelled_at_each_of_its_waits() -> None:
    """CANCEL in the call, in the generator, and in what the generator does at its end."""
    log: list[str] = []

    async def handler(request: Request) -> Any:
        if request.data == b"call":
            try:
                await trio.sleep_forever()
            finally:
                log.append("call")

        async def items() -> AsyncIterator[bytes]:
            try:
                yield b"1"
                if request.data == b"item":
                    await trio.sleep_forever()
                yield b"2"
            finally:
                log.append("item" if request.data == b"item" else "credit")
                await trio.lowlevel.checkpoint()
                log.append("never")

        return items()

    async with pair(handler) as (peer, listener, _):
        for data in (b"call", b"item", b"credit"):
            receiver = await peer.request_stream(data, window=1)
            await wait_all_tasks_blocked()
            receiver.close()
            await wait_all_tasks_blocked()
        assert log == ["call", "item", "credit"]
        assert listener.peers[0].statistics().open_streams == 0


async def test_credit_that_comes_after_the_cancellation_of_what_waits_for_it() -> None:
    """In the same step, before the task that was cancelled has run: trio would refuse to wake it twice."""

    async def numbers() -> AsyncIterator[bytes]:
        for number in range(10):
            yield b"%d" % number

    async with pair(lambda _: numbers()) as (peer, listener, system):
        answers = await peer.request_stream(b"", window=1)
        await wait_all_tasks_blocked()
        serving = below(listener.peers[0])
        (stream,) = serving.streams.values()
        credit = RequestNFrame(stream.stream_id, 5).encode()

        class Credit(Actor[bytes]):
            @handles
            def on_bytes(self, m: bytes) -> None:
                serving.feed(m)

        after = system.spawn(Credit)
        stream.ref.kill()  # what this leads to comes before messages, in the same turn of the same worker
        after.tell(len(credit).to_bytes(3, "big") + credit)
        await wait_all_tasks_blocked()
        assert system.statistics().failures == 0
        with pytest.raises(RequestCanceled):
            while True:
                await answers.receive()
        after.stop()
        await after.terminated()
