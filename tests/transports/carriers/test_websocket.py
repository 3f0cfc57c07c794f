"""WebSockets over memory: both ends ours, or a far end written by hand; trio's virtual clock."""

from __future__ import annotations

import gc
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.transports.conftest import in_background
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    Request,
)

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers.contracts import MessageStream
from levada.transports.carriers.memory import MemoryByteStream, MemoryConfig, memory_streams
from levada.transports.carriers.websocket import (
    WebSocketConfig,
    WebSocketStream,
    accept_over,
    open_over,
)
from levada.transports.carriers.websocket_frames import WebSocketFrameError, encode_binary
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

QUIET = WebSocketConfig(keepalive_interval=None)
KEY = b"\x01\x02\x03\x04"
URL = "ws://desk.example/rsocket"


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run all at the same time; return what they return."""
    results: list[Any] = [None] * len(calls)

    async def run(i: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[i] = await call()

    async with trio.open_nursery() as nursery:
        for i, call in enumerate(calls):
            nursery.start_soon(run, i, call)
    return results


async def pair(
    client: WebSocketConfig = QUIET, server: WebSocketConfig = QUIET, memory: MemoryConfig | None = None
) -> tuple[WebSocketStream, WebSocketStream]:
    """Both ends of a WebSocket over a memory pipe."""
    near, far = memory_streams(memory or MemoryConfig())
    opened, accepted = await together(lambda: open_over(near, URL, client), lambda: accept_over(far, server))
    return opened, accepted


class Far:
    """The other end, written by hand: wsproto where that helps, raw octets where it would not allow them."""

    def __init__(self, stream: MemoryByteStream, *, client: bool) -> None:
        self.stream = stream
        self.wsproto = WSConnection(ConnectionType.CLIENT if client else ConnectionType.SERVER)
        self.client = client
        self.ended = False

    async def send(self, *events: Event) -> None:
        await self.stream.send_all(b"".join(self.wsproto.send(event) for event in events))

    async def raw(self, octets: bytes) -> None:
        await self.stream.send_all(octets)

    def frame(self, payload: bytes) -> bytes:
        return encode_binary(payload, KEY if self.client else None)

    async def events(self) -> list[Event]:
        """What comes next, in one piece; nothing at the end of the stream."""
        data = await self.stream.receive_some()
        if not data:
            self.ended = True
            return []
        self.wsproto.receive_data(data)
        return list(self.wsproto.events())

    async def event(self) -> Event:
        """The only one that comes next, perhaps in several pieces."""
        while not (got := await self.events()):
            assert not self.ended
        (event,) = got
        return event

    async def until_end(self) -> list[Event]:
        """All that comes until the stream ends."""
        got: list[Event] = []
        while not self.ended:
            got += await self.events()
        return got


async def against(
    *, client: bool, config: WebSocketConfig = QUIET, memory: MemoryConfig | None = None
) -> tuple[WebSocketStream, Far]:
    """Our end as client or server, and a far end by hand, after the handshake."""
    near, stream = memory_streams(memory or MemoryConfig())
    far = Far(stream, client=not client)

    async def shake() -> None:
        if client:
            assert isinstance(await far.event(), Request)
            await far.send(AcceptConnection())
        else:
            await far.send(Request(host="desk.example", target="/"))
            assert isinstance(await far.event(), AcceptConnection)

    ours = (lambda: open_over(near, URL, config)) if client else (lambda: accept_over(near, config))
    websocket, _ = await together(ours, shake)
    return websocket, far


# ---------------------------------------------------------------- the promises of every carrier

TRAITS = CarrierTraits(
    shape="messages",
    max_message=1 << 20,
    cut=lambda end, _: end._stream.link.cut(),  # type: ignore[union-attr]
)


@asynccontextmanager
async def promising_pair() -> AsyncGenerator[tuple[WebSocketStream, WebSocketStream]]:
    ends = await pair(WebSocketConfig(max_message=1 << 20), WebSocketConfig(max_message=1 << 20))
    yield ends
    for end in ends:
        end.abort()


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_promise(check: CarrierCheck, autojump_clock: MockClock) -> None:
    await check(promising_pair)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("size", [0, 1, 125, 126, 1023, 1024, 65_535, 65_536, 300_000])
async def test_messages_arrive_whole_and_in_order(size: int) -> None:
    client, server = await pair()
    assert isinstance(client, MessageStream)
    wanted = [bytes([i]) * size for i in range(5)]
    for near, far in ((client, server), (server, client)):

        async def send_all(near: WebSocketStream = near) -> None:
            for message in wanted:
                await near.send(message)
            await near.flush()

        async def receive_all(far: WebSocketStream = far) -> list[bytes]:
            return [await far.receive() for _ in wanted]

        assert (await together(send_all, receive_all))[1] == wanted
    assert (client.info.scheme, server.info.scheme) == ("ws", "ws")
    assert client.statistics().unsent == 0
    assert client.statistics().bytes_sent > 5 * size


@given(
    messages=st.lists(st.binary(max_size=2000), max_size=12),
    least=st.integers(1, 50),
    spread=st.integers(0, 300),
    seed=st.integers(0, 1000),
)
def test_messages_survive_any_cutting(messages: list[bytes], least: int, spread: int, seed: int) -> None:
    async def main() -> None:
        client, server = await pair(memory=MemoryConfig(chunk=(least, least + spread), seed=seed))

        async def send_all() -> None:
            for message in messages:
                await client.send(message)
            await client.aclose(4000, "all sent")

        async def receive_all() -> list[bytes]:
            got = []
            with pytest.raises(ConnectionLost) as caught:
                while True:
                    got.append(await server.receive())
            assert caught.value.code == 4000
            return got

        assert (await together(send_all, receive_all))[1] == messages

    trio.run(main)


async def test_messages_of_one_chunk_are_there_at_once() -> None:
    client, server = await pair()
    for i in range(5):
        await client.send(b"%d" % i)
    assert server.receive_nowait() is None
    assert await server.receive() == b"0"
    assert [server.receive_nowait() for _ in range(5)] == [b"1", b"2", b"3", b"4", None]


async def test_others_run_while_one_chunk_is_taken() -> None:
    """A chunk full of small messages does not keep the scheduler from other tasks."""
    client, server = await pair()
    for _ in range(1000):
        client.send_nowait(b"")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(1000):
            await server.receive()
        nursery.cancel_scope.cancel()
    assert 10 <= turns <= 100


async def test_one_task_in_each_direction() -> None:
    client, server = await pair(memory=MemoryConfig(window=200, high_watermark=0))
    async with in_background(server.receive) as received, in_background(client.flush):
        with pytest.raises(trio.BusyResourceError):
            await server.receive()
        client.send_nowait(b"x" * 300)
        client.send_nowait(b"y" * 300)
    assert received == [b"x" * 300]
    async with in_background(lambda: client.send(b"z")) as sent:
        with pytest.raises(trio.BusyResourceError):
            await client.send(b"z")
        assert await server.receive() == b"y" * 300
    assert sent == [None]
    assert await server.receive() == b"z"


async def test_text_is_taken_if_wanted() -> None:
    websocket, far = await against(client=False, config=attrs.evolve(QUIET, accept_text=True))
    await far.send(Message(data="grüß", message_finished=False), Message(data=" dich"))
    assert await websocket.receive() == "grüß dich".encode()


async def test_a_mistake_can_be_left_to_the_application() -> None:
    """It is told at once, also if messages came before; nothing goes out but its own goodbye."""
    websocket, far = await against(client=False, config=attrs.evolve(QUIET, leave_faults=True))
    await far.send(BytesMessage(data=b"fine"), Message(data="text"))
    assert await websocket.receive() == b"fine"
    for _ in range(2):
        with pytest.raises(ConnectionLost) as lost:
            await websocket.receive()
        assert lost.value.code == 1003
    await websocket.send(b"goodbye")
    assert await far.events() == [BytesMessage(data=b"goodbye")]
    async with in_background(websocket.aclose):
        assert await far.events() == [CloseConnection(code=1000, reason="")]
        await far.send(CloseConnection(code=1000))


async def test_fragments_with_a_ping_between_them() -> None:
    websocket, far = await against(client=False)
    await far.send(BytesMessage(data=b"one ", message_finished=False), Ping(b"now"), BytesMessage(data=b"two"))
    assert await websocket.receive() == b"one two"
    assert await far.events() == [Pong(b"now")]


# ---------------------------------------------------------------- pings


async def test_a_ping_is_answered_and_of_several_the_latest() -> None:
    """RFC 6455, 5.5.3: only the most recent ping need be answered."""
    websocket, far = await against(client=True)
    async with in_background(websocket.receive) as received:
        await far.send(Ping(b"a"), Ping(b"b"), Ping(b"c"))
        assert await far.events() == [Pong(b"c")]
        await far.send(Ping(b"d"))
        assert await far.events() == [Pong(b"d")]
        await far.raw(far.frame(b"message"))
    assert received == [b"message"]


async def test_a_peer_that_takes_no_pongs_gets_few() -> None:
    """Pings without end, and nothing read: what is queued for the peer stays within 4 KiB; afterwards the latest is answered."""
    websocket, far = await against(client=False, memory=MemoryConfig(window=100))
    async with in_background(websocket.receive) as received:
        for i in range(2000):
            await far.send(Ping(b"%d" % i))
            assert websocket.statistics().unsent <= 4096
        await far.raw(far.frame(b"still here"))
    assert received == [b"still here"]
    websocket.send_nowait(b"news")
    async with in_background(websocket.aclose):
        got: list[Event] = []
        while not any(isinstance(event, CloseConnection) for event in got):
            got += await far.events()
        pongs = [int(event.payload) for event in got if isinstance(event, Pong)]
        assert pongs == sorted(pongs)
        assert 0 < pongs[0] < 100  # a batch of pings got one
        assert pongs[-1] == 1999
        assert [event for event in got if not isinstance(event, Pong)] == [
            BytesMessage(data=b"news"),
            CloseConnection(1000, ""),
        ]
        await far.send(CloseConnection(1000))


async def test_silence_is_broken_by_a_ping_and_then_ends_it(autojump_clock: MockClock) -> None:
    websocket, far = await against(client=True, config=WebSocketConfig(keepalive_interval=20, keepalive_timeout=7))
    began = trio.current_time()
    async with in_background(websocket.receive) as received:
        assert await far.events() == [Ping(b"")]
        assert trio.current_time() - began == pytest.approx(20)
        await far.send(Pong(b""))
        assert await far.events() == [Ping(b"")]
        assert trio.current_time() - began == pytest.approx(40)
        await trio.sleep(6)
        await far.raw(far.frame(b"busy, but alive"))
    assert received == [b"busy, but alive"]
    began = trio.current_time()
    with pytest.raises(IdleTimeout, match="no answer to a ping within 7 s"):
        await websocket.receive()
    assert trio.current_time() - began == pytest.approx(27)
    for call in (websocket.receive, lambda: websocket.send(b""), websocket.flush):
        with pytest.raises(IdleTimeout):
            await call()
    await websocket.aclose()


async def test_pings_keep_their_pace_whatever_the_time_for_the_answer(autojump_clock: MockClock) -> None:
    websocket, far = await against(client=True, config=WebSocketConfig(keepalive_interval=2, keepalive_timeout=60))
    async with in_background(websocket.receive):
        for i in range(1, 6):
            assert await far.events() == [Ping(b"")]
            assert trio.current_time() == pytest.approx(2 * i)
            await far.send(Pong(b""))
        websocket.abort()


async def test_silence_counts_only_while_a_task_listens(autojump_clock: MockClock) -> None:
    websocket, far = await against(client=True, config=WebSocketConfig(keepalive_interval=20, keepalive_timeout=20))
    await far.raw(far.frame(b"early"))
    await trio.sleep(1000)  # nobody listens: what the peer does cannot be known
    assert await websocket.receive() == b"early"
    for _ in range(39):
        with trio.move_on_after(1):
            await websocket.receive()
    assert await far.events() == [Ping(b"")]
    with pytest.raises(IdleTimeout):
        await websocket.receive()
    with pytest.raises(ConnectionLost):
        await far.events()


async def test_a_peer_that_still_takes_a_long_queue_is_alive(autojump_clock: MockClock) -> None:
    """The ping waits behind what is queued, so its answer may be late; a peer that takes nothing any more is lost."""
    memory = MemoryConfig(window=1000, high_watermark=1 << 20)
    config = WebSocketConfig(keepalive_interval=1, keepalive_timeout=1.5)
    websocket, far = await against(client=True, config=config, memory=memory)
    await websocket.send(b"x" * 9500)
    async with in_background(websocket.receive) as received:
        for _ in range(9):
            await trio.sleep(1)
            await far.events()
        assert received == []
    assert isinstance(received[0], IdleTimeout)


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("by_client", [True, False])
async def test_the_reason_for_closing_arrives_behind_the_messages(by_client: bool) -> None:
    client, server = await pair()
    near, far = (client, server) if by_client else (server, client)
    await near.send(b"last")

    async def receive_all() -> list[Any]:
        got: list[Any] = [await far.receive()]
        for _ in range(2):
            with pytest.raises(ConnectionLost) as caught:
                await far.receive()
            got.append(caught.value)
        return got

    _, (message, lost, again) = await together(lambda: near.aclose(4321, "lunch"), receive_all)
    assert message == b"last"
    assert (lost.code, lost.detail) == (4321, "the peer closed with code 4321: lunch")
    assert again is not lost
    assert (again.code, again.detail) == (lost.code, lost.detail)
    for end, kind in ((near, ConnectionClosed), (far, ConnectionLost)):
        for kind_now in (kind, ConnectionClosed):
            for call in (end.receive, lambda end=end: end.send(b""), end.flush):
                with pytest.raises(kind_now):
                    await call()
            with pytest.raises(kind_now):
                end.send_nowait(b"")
            await end.aclose()
        end.abort()


async def test_both_may_close_at_once() -> None:
    client, server = await pair()
    await together(lambda: client.aclose(1000), lambda: server.aclose(1001))
    for end in (client, server):
        with pytest.raises(ConnectionClosed):
            await end.receive()


async def test_two_tasks_may_close_the_same_end() -> None:
    websocket, far = await against(client=True)
    async with in_background(websocket.aclose), in_background(lambda: websocket.aclose(1001)) as second:
        assert await far.events() == [CloseConnection(1000, "")]
        assert second == []
        await far.send(CloseConnection(1000))
        await wait_all_tasks_blocked()
        assert second == []
        await far.stream.send_eof()
    assert second == [None]


async def test_the_server_goes_first() -> None:
    """RFC 6455, 7.1.1: after both close frames the server closes the connection, and the client waits for that."""
    websocket, far = await against(client=False)
    async with in_background(websocket.aclose) as closed:
        assert await far.events() == [CloseConnection(1000, "")]
        await far.raw(far.frame(b"on its way"))
        await far.send(CloseConnection(1000))
        await wait_all_tasks_blocked()
        assert closed == [None]
        assert await far.until_end() == []


@pytest.mark.parametrize("client", [True, False])
async def test_a_peer_that_does_not_close_is_cut_off_in_time(client: bool, autojump_clock: MockClock) -> None:
    websocket, far = await against(client=client, config=attrs.evolve(QUIET, close_timeout=3))
    began = trio.current_time()

    async def chatter() -> None:
        with pytest.raises(ConnectionLost):
            while True:
                await far.raw(far.frame(b"and another thing"))
                await trio.sleep(0.5)

    await together(websocket.aclose, chatter)
    assert 3 <= trio.current_time() - began <= 3.5


async def test_closing_with_a_peer_that_reads_nothing(autojump_clock: MockClock) -> None:
    websocket, _ = await against(client=True, memory=MemoryConfig(window=1000, high_watermark=10_000))
    websocket.send_nowait(b"x" * 100_000)
    async with in_background(lambda: websocket.send(b"y")) as blocked:
        await websocket.aclose()
    assert isinstance(blocked[0], ConnectionClosed)
    assert trio.current_time() == pytest.approx(5)


async def test_no_ping_while_closing(autojump_clock: MockClock) -> None:
    websocket, far = await against(client=True, config=WebSocketConfig(keepalive_interval=1, keepalive_timeout=1))
    await websocket.aclose()
    assert trio.current_time() == pytest.approx(5)
    assert await far.events() == [CloseConnection(1000, "")]
    with pytest.raises(ConnectionLost):
        await far.events()


async def test_abort_wakes_a_waiting_sender() -> None:
    websocket, _ = await against(client=True, memory=MemoryConfig(window=1000, high_watermark=0))
    websocket.send_nowait(b"x" * 5000)
    async with in_background(lambda: websocket.send(b"y")) as blocked, in_background(websocket.flush) as flushed:
        websocket.abort()
    assert isinstance(blocked[0], ConnectionClosed)
    assert isinstance(flushed[0], ConnectionClosed)


async def test_messages_dropped_by_closing_are_not_received_any_more() -> None:
    """Also not by a task that gave others their turn between two of them."""
    client, server = await pair()
    for _ in range(200):
        client.send_nowait(b"m")

    async def abort() -> None:
        server.abort()

    received = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort)
        with pytest.raises(ConnectionClosed):
            while True:
                received += len(await server.receive())
    assert received < 200


async def test_nothing_follows_the_close_frame() -> None:
    """A message that waits for room when this side closes is not sent, although room comes."""
    websocket, far = await against(client=True, memory=MemoryConfig(window=1000, high_watermark=0))
    websocket.send_nowait(b"x" * 5000)
    async with in_background(lambda: websocket.send(b"too late")) as blocked, in_background(websocket.aclose):
        got: list[Event] = []
        while not got or not isinstance(got[-1], CloseConnection):
            got += await far.events()
        await wait_all_tasks_blocked()
        assert isinstance(blocked[0], ConnectionClosed)
        assert b"".join(e.data for e in got if isinstance(e, BytesMessage)) == b"x" * 5000
        await far.send(CloseConnection(1000))
        await far.stream.send_eof()
        assert await far.until_end() == []


async def test_the_peers_close_frame_stops_a_waiting_sender() -> None:
    websocket, far = await against(client=False, memory=MemoryConfig(window=1000, high_watermark=0))
    websocket.send_nowait(b"x" * 5000)
    async with (
        in_background(lambda: websocket.send(b"too late")) as blocked,
        in_background(websocket.receive) as received,
    ):
        await far.send(CloseConnection(4000, "enough"))
        await wait_all_tasks_blocked()
        got = await far.until_end()
    assert got[-1] == CloseConnection(4000, "")
    assert b"".join(e.data for e in got if isinstance(e, BytesMessage)) == b"x" * 5000
    assert [(type(error), error.code) for error in blocked + received] == [(ConnectionLost, 4000)] * 2


@pytest.mark.parametrize("answer", [True, False])
async def test_a_task_that_receives_ends_when_this_side_closes(answer: bool, autojump_clock: MockClock) -> None:
    """With the next octets of the peer, here its close frame; at the latest when its time is over."""
    websocket, far = await against(client=True)
    async with in_background(websocket.receive) as received, in_background(websocket.aclose) as closed:
        assert await far.events() == [CloseConnection(1000, "")]
        if answer:
            await far.send(CloseConnection(1000))
            await wait_all_tasks_blocked()
            assert isinstance(received[0], ConnectionClosed)
            assert closed == []
            await far.stream.send_eof()
    assert isinstance(received[0], ConnectionClosed)
    assert closed == [None]
    assert trio.current_time() == pytest.approx(0 if answer else 5)


async def test_abort_is_a_loss_for_the_peer() -> None:
    client, server = await pair()
    async with in_background(client.receive) as received:
        client.abort()
    assert isinstance(received[0], ConnectionClosed)
    with pytest.raises(ConnectionLost) as caught:
        await server.receive()
    assert caught.value.code is None
    await server.aclose()


async def test_an_end_without_a_close_frame_is_a_loss_without_a_code() -> None:
    websocket, far = await against(client=True)
    await far.raw(far.frame(b"whole") + far.frame(b"cut off")[:4])
    await far.stream.send_eof()
    assert await websocket.receive() == b"whole"
    with pytest.raises(ConnectionLost, match="ended without a close frame") as caught:
        await websocket.receive()
    assert caught.value.code is None


async def test_a_close_frame_without_a_code_counts_as_1005() -> None:
    websocket, far = await against(client=False)
    await far.raw(b"\x88\x80\0\0\0\0")
    with pytest.raises(ConnectionLost, match="the peer closed with no code: no reason") as caught:
        await websocket.receive()
    assert caught.value.code == 1005
    assert await far.stream.receive_some() == b"\x88\x00"


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1014, 1015, 1016, 2999, 5000])
async def test_codes_that_may_not_be_sent(code: int) -> None:
    """RFC 6455, 7.4: reserved ones, and those that only say something on this side."""
    client, server = await pair()
    with pytest.raises(ConfigurationError, match=f"close code {code} may not be sent"):
        await client.aclose(code)
    await client.send(b"still open")
    assert await server.receive() == b"still open"


@pytest.mark.parametrize(("error", "code"), [(None, 1000), (ValueError("a bug"), 1011)])
async def test_leaving_the_block_tells_how(error: Exception | None, code: int) -> None:
    client, server = await pair()

    async def block() -> None:
        async with client:
            if error is not None:
                raise error

    async with in_background(server.receive) as received:
        if error is None:
            await block()
        else:
            with pytest.raises(ValueError, match="a bug"):
                await block()
    assert received[0].code == code


# ---------------------------------------------------------------- peers that break rules


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize(
    ("first", "size", "code"),
    [
        (0x82, 70_000, 1009),
        (0x02, 70_000, 1009),
        (0x81, 5, 1003),
        (0xC2, 5, 1002),
        (0x83, 5, 1002),
        (0x89, 126, 1002),
    ],
)
async def test_a_peer_that_breaks_a_rule_is_told_the_code(client: bool, first: int, size: int, code: int) -> None:
    websocket, far = await against(client=client, config=attrs.evolve(QUIET, max_message=65_535))
    bit = 0 if client else 0x80
    header = struct.pack(">BBH", first, bit | 126, size) if 126 <= size < 1 << 16 else bytes((first, bit | size & 0x7F))
    if size >= 1 << 16:
        header = struct.pack(">BBQ", first, bit | 127, size)
    octets = far.frame(b"before") + header + (KEY if bit else b"") + b"x" * size
    async with in_background(lambda: far.raw(octets)):
        assert await websocket.receive() == b"before"
        async with in_background(websocket.receive) as received:
            (close,) = await far.events()
            assert isinstance(close, CloseConnection)
            assert close.code == code
            await far.send(CloseConnection(code))
            await far.stream.send_eof()
            assert await far.until_end() == []
    assert (type(received[0]), received[0].code) == (ConnectionLost, code)
    cause = received[0].__cause__
    assert isinstance(cause, WebSocketFrameError)
    assert (cause.code, cause.offset) == (code, len(far.frame(b"before")))


async def test_a_peer_that_goes_on_after_breaking_a_rule_is_cut_off(autojump_clock: MockClock) -> None:
    websocket, far = await against(client=False, config=attrs.evolve(QUIET, max_message=1000))

    async def flood() -> None:
        with pytest.raises(ConnectionLost):
            while True:
                await far.raw(far.frame(b"x" * 2000))
                await trio.sleep(0.1)

    async def receive() -> int:
        with pytest.raises(ConnectionLost) as caught:
            await websocket.receive()
        assert not websocket._core.messages
        return caught.value.code or 0

    assert await together(flood, receive) == [None, 1009]
    assert 5 <= trio.current_time() <= 5.2


# ---------------------------------------------------------------- bounds


async def test_a_stopped_reader_stops_the_sender() -> None:
    """What is kept anywhere: the queue up to its watermark, the pipe's window, one chunk of messages; and all goes on later."""
    client, server = await pair(memory=MemoryConfig(window=30_000, high_watermark=50_000))
    message = b"m" * 1000
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        while sent < 500:
            sent += 1
            await client.send(message)
            assert client.statistics().unsent <= 50_000 + 1008

    async with in_background(send_all):
        assert sent == 81  # 80 frames are 80,640 octets
        assert await server.receive() == message
        await wait_all_tasks_blocked()
        assert len(server._core.messages) == 28  # the rest of one chunk
        for _ in range(499):
            assert await server.receive() == message
    assert sent == 500


async def test_an_endless_fragment_is_bounded() -> None:
    websocket, far = await against(client=False, config=attrs.evolve(QUIET, max_message=10_000))
    async with in_background(websocket.receive) as received:
        while websocket._end is None:
            await far.send(BytesMessage(data=b"x" * 999, message_finished=False))
            await wait_all_tasks_blocked()
            assert len(websocket._core._fragments) <= 10_000
        await far.stream.aclose()
    assert received[0].code == 1009


async def test_an_idle_websocket_keeps_no_task_and_little_memory() -> None:
    gc.collect()
    tasks = trio.lowlevel.current_statistics().tasks_living
    ends = [await pair() for _ in range(20)]
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert all(not client._core._rest and not server._core.messages for client, server in ends)


# ---------------------------------------------------------------- cancellation and loss


async def test_a_cancelled_receive_takes_nothing(autojump_clock: MockClock) -> None:
    """Cancelled again and again, at any time of a message's way, none is lost and none comes twice."""
    client, server = await pair(memory=MemoryConfig(chunk=(1, 5), latency=0.05, seed=3))
    wanted = [b"%d" % i * 10 for i in range(20)]

    async def send_all() -> None:
        for message in wanted:
            await client.send(message)
            await trio.sleep(0.07)

    async def receive_all() -> list[bytes]:
        got: list[bytes] = []
        while len(got) < len(wanted):
            with trio.move_on_after(0.03):
                got.append(await server.receive())
        return got

    assert (await together(send_all, receive_all))[1] == wanted


async def test_receive_is_a_place_to_be_cancelled_also_when_messages_wait() -> None:
    client, server = await pair()
    for i in range(3):
        client.send_nowait(b"%d" % i)
    assert await server.receive() == b"0"
    with trio.CancelScope() as scope:
        scope.cancel()
        await server.receive()
    assert scope.cancelled_caught
    assert [await server.receive(), await server.receive()] == [b"1", b"2"]


async def test_a_cancelled_send_queues_nothing() -> None:
    client, server = await pair(memory=MemoryConfig(window=100, high_watermark=0))
    client.send_nowait(b"x" * 500)
    before = client.statistics().unsent
    with trio.move_on_after(0.001):
        await client.send(b"never")
    assert client.statistics().unsent == before
    assert await server.receive() == b"x" * 500
    await client.send(b"next")
    assert await server.receive() == b"next"


async def test_a_cancelled_close_is_done_at_once() -> None:
    client, server = await pair()
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.aclose()
    assert scope.cancelled_caught
    with pytest.raises(ConnectionClosed):
        await client.send(b"")
    with pytest.raises(ConnectionLost):
        while True:
            await server.receive()
    await client.aclose()


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.25, 0.35, 0.45])
async def test_a_receive_that_is_cancelled_while_it_ends_the_connection(
    seconds: float, autojump_clock: MockClock
) -> None:
    client, server = await pair(memory=MemoryConfig(latency=0.1))

    async def give_up() -> None:
        with trio.move_on_after(seconds):
            with pytest.raises(ConnectionLost):
                await server.receive()
        with pytest.raises(ConnectionLost):
            await server.receive()
        await server.aclose()

    await together(lambda: client.aclose(4000), give_up)


async def test_a_cancelled_handshake_aborts_the_stream() -> None:
    for handshake in (accept_over, partial(open_over, url=URL)):
        near, far = memory_streams()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handshake, near)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with pytest.raises(ConnectionLost):
            while True:
                await far.receive_some()


async def conversation(memory: MemoryConfig) -> tuple[list[bytes], list[bytes], int]:
    """Handshake, messages both ways, a fragment, closing; what each end received, and how many octets there were."""
    near, far = memory_streams(memory)
    got: tuple[list[bytes], list[bytes]] = ([], [])

    async def talk(websocket: WebSocketStream, received: list[bytes]) -> None:
        await websocket.send(b"short")
        await websocket.send(b"m" * 200)
        received.append(await websocket.receive())
        received.append(await websocket.receive())

    async def client() -> None:
        try:
            async with await open_over(near, URL, QUIET) as websocket:
                await talk(websocket, got[0])
        except ConnectionLost:
            pass

    async def server() -> None:
        try:
            async with await accept_over(far, QUIET) as websocket:
                await talk(websocket, got[1])
                with pytest.raises(ConnectionLost):
                    await websocket.receive()
        except ConnectionLost:
            pass

    await together(client, server)
    return got[0], got[1], near.link.bytes_carried


@pytest.mark.ci
async def test_loss_at_every_octet(autojump_clock: MockClock) -> None:
    """Wherever the connection is cut, each end sees a loss and has received a beginning of what was sent."""
    wanted = [b"short", b"m" * 200]
    *complete, octets = await conversation(MemoryConfig(latency=0.01))
    assert complete == [wanted, wanted]
    assert octets > 700
    for cut in range(octets):
        first, second, _ = await conversation(MemoryConfig(latency=0.01, cut_after=cut))
        assert first == wanted[: len(first)]
        assert second == wanted[: len(second)]
    assert trio.current_time() < octets * 0.2  # no loss is found by waiting for a time-out


async def test_loss_at_every_call(autojump_clock: MockClock) -> None:
    wanted = [b"short", b"m" * 200]
    for call in range(1, 30):
        first, second, _ = await conversation(MemoryConfig(latency=0.01, cut_at_call=call))
        assert first == wanted[: len(first)]
        assert second == wanted[: len(second)]
