"""Where WebSocket clients come in: over memory with trio's virtual clock, and over the sockets of this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from tests.transports.conftest import Authority
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost
from levada.transports.carriers import memory
from levada.transports.carriers.contracts import ByteStream, Listener
from levada.transports.carriers.memory import MemoryByteStream
from levada.transports.carriers.places import GRACE
from levada.transports.carriers.tcp import TcpConfig
from levada.transports.carriers.tls import TlsConfig
from levada.transports.carriers.websocket import (
    UpgradeRequest,
    WebSocketConfig,
    WebSocketListener,
    WebSocketStream,
    dial,
    listen,
    listen_over,
    open_over,
)
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

URL = "ws://desk.example/rsocket"


def streams(below: memory.MemoryListener) -> Listener[ByteStream]:
    """It takes in byte streams, as its settings say."""
    return cast("Listener[ByteStream]", below)


@asynccontextmanager
async def listening(config: WebSocketConfig | None = None) -> AsyncGenerator[WebSocketListener]:
    async with memory.listen("memory://desk") as below, listen_over(streams(below), URL, config) as listener:
        yield listener


@asynccontextmanager
async def connection() -> AsyncGenerator[MemoryByteStream]:
    """A byte stream to the listener, no handshake yet."""
    async with memory.dial("memory://desk") as stream:
        assert isinstance(stream, MemoryByteStream)
        yield stream


@asynccontextmanager
async def client(config: WebSocketConfig | None = None) -> AsyncGenerator[WebSocketStream]:
    async with connection() as stream, await open_over(stream, URL, config) as websocket:
        yield websocket


async def test_a_client_is_accepted_after_its_handshake(autojump_clock: MockClock) -> None:
    async with listening() as listener:
        assert isinstance(listener, Listener)
        assert listener.url == URL
        async with client() as websocket, await listener.accept() as accepted:
            await websocket.send(b"question")
            assert await accepted.receive() == b"question"
            await accepted.aclose(4001)
            with pytest.raises(ConnectionLost) as caught:
                await websocket.receive()
            assert caught.value.code == 4001


async def test_clients_that_dawdle_or_fail_disturb_nobody(autojump_clock: MockClock) -> None:
    async with listening() as listener, AsyncExitStack() as stack:
        dawdlers = [await stack.enter_async_context(connection()) for _ in range(20)]
        for i, dawdler in enumerate(dawdlers):
            await dawdler.send_all((b"GET / HTTP", b"\x16\x03\x01", b"GET /other HTTP/1.1\r\n\r\n", b"")[i % 4])
        async with client(), await listener.accept():
            assert trio.current_time() == 0
        answers = [await dawdler.receive_some() for dawdler in dawdlers]
        assert trio.current_time() == 10
        assert [answer[9:12] for answer in answers] == [b"408", b"400", b"426", b"408"] * 5


async def test_clients_at_whose_requests_the_users_check_raises_fill_no_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def allow(asked: UpgradeRequest) -> None:
        raise KeyError(asked.target)

    async with listening(WebSocketConfig(allow=allow)) as listener:
        for _ in range(20):
            with pytest.raises(ConnectionLost, match="500"):
                async with client():
                    pass
        await wait_all_tasks_blocked()
        assert listener.admission.refused == 20
    assert caplog.messages.count("the check of an upgrade request failed") == 10
    assert all("KeyError: '/rsocket'" in (each.exc_text or "") for each in caplog.records if each.exc_info)


async def test_one_handshake_too_many_ends_the_oldest(autojump_clock: MockClock) -> None:
    async with listening(WebSocketConfig(backlog=3)) as listener, AsyncExitStack() as stack:
        dawdlers = [await stack.enter_async_context(connection()) for _ in range(3)]
        await wait_all_tasks_blocked()
        async with client(), await listener.accept():
            with pytest.raises(ConnectionLost):
                await dawdlers[0].receive_some()
            assert trio.current_time() == GRACE
            assert (await dawdlers[1].receive_some())[9:12] == b"408"


async def test_clients_wait_for_accept_in_order() -> None:
    """As many as the backlog have done their handshake; the next have theirs when there is room."""
    async with listening(WebSocketConfig(backlog=2)) as listener, trio.open_nursery() as nursery:
        opened = []

        async def come(number: int) -> None:
            async with client() as websocket:
                opened.append(number)
                await websocket.send(b"%d" % number)
                with pytest.raises(ConnectionLost):
                    await websocket.receive()

        for number in range(5):
            nursery.start_soon(come, number)
            await wait_all_tasks_blocked()
        assert opened == [0, 1]
        for number in range(5):
            async with await listener.accept() as websocket:
                assert await websocket.receive() == b"%d" % number
        assert opened == [0, 1, 2, 3, 4]


async def test_closing_a_listener_leaves_what_was_accepted() -> None:
    async with AsyncExitStack() as stack:
        async with listening() as listener:
            accepted_client = await stack.enter_async_context(client())
            accepted = await stack.enter_async_context(await listener.accept())
            waiting = await stack.enter_async_context(client())
            dawdler = await stack.enter_async_context(connection())
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listener.aclose)
            for _ in range(2):
                with pytest.raises(ConnectionClosed):
                    await listener.accept()
            await listener.aclose()
        await accepted.send(b"still here")
        assert await accepted_client.receive() == b"still here"
        with pytest.raises(ConnectionLost):
            await waiting.receive()
        with pytest.raises(ConnectionLost):
            await dawdler.receive_some()
        accepted.abort()


async def test_closing_a_listener_cuts_off_who_waits_for_a_place() -> None:
    async with listening(WebSocketConfig(backlog=1)) as listener, AsyncExitStack() as stack:
        waiting = await stack.enter_async_context(client())
        outside = await stack.enter_async_context(connection())
        await wait_all_tasks_blocked()
        await listener.aclose()
        for call in (waiting.receive, outside.receive_some):
            with pytest.raises(ConnectionLost):
                await call()


async def test_closing_a_listener_wakes_who_waits_in_accept() -> None:
    async with listening() as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            with pytest.raises(ConnectionClosed):
                await listener.accept()

        nursery.start_soon(accept)
        await wait_all_tasks_blocked()
        await listener.aclose()


async def test_a_cancelled_accept_takes_no_client(autojump_clock: MockClock) -> None:
    async with listening() as listener:
        with trio.move_on_after(0):
            await listener.accept()
        async with client() as websocket:
            with trio.CancelScope() as scope:
                scope.cancel()
                await listener.accept()
            assert scope.cancelled_caught
            async with await listener.accept() as accepted:
                await accepted.send(b"hello")
                assert await websocket.receive() == b"hello"


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with listening():
            raise KeyError("mine")
    with pytest.raises(ExceptionGroup) as caught:
        async with listening():
            raise ExceptionGroup("also mine", [KeyError("a")])
    assert caught.value.message == "also mine"
    with trio.move_on_after(0.01) as scope:
        async with listening():
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_query_says_nothing_to_a_listener() -> None:
    with pytest.raises(ConfigurationError, match="has a query"):
        async with memory.listen("memory://desk") as below, listen_over(streams(below), URL + "?a=b"):
            pass
    with pytest.raises(ConfigurationError, match="expected ws://host:port"):
        async with listen("tcp://127.0.0.1:0"):
            pass


# ---------------------------------------------------------------- sockets


@pytest.fixture(params=["ws", "wss"])
def socket_config(request: pytest.FixtureRequest, authority: Authority) -> tuple[str, WebSocketConfig]:
    """Scheme, and settings for both sides; the kernel's buffers are small."""
    tcp = TcpConfig(send_buffer=65_536, receive_buffer=65_536)
    tls = TlsConfig(certificate=authority.issue("desk"), ca=authority.ca, tcp=tcp)
    config = WebSocketConfig(tcp=tcp, tls=tls, subprotocols=("rsocket",), max_message=1 << 22, close_timeout=1.0)
    return str(request.param), config


@pytest.mark.loopback
@pytest.mark.parametrize("path", ["", "/", "/rsocket"])
async def test_over_sockets(socket_config: tuple[str, WebSocketConfig], path: str) -> None:
    scheme, config = socket_config
    async with listen(f"{scheme}://127.0.0.1:0{path}", config) as listener:
        assert listener.url.startswith(f"{scheme}://127.0.0.1:")
        assert listener.url.endswith(path)
        asked = listener.url + ("" if path else "/anything") + "?a=b"
        async with dial(asked, config) as websocket, await listener.accept() as accepted:
            assert accepted.request is not None
            assert accepted.request.target == (path or "/anything") + "?a=b"
            assert (websocket.subprotocol, accepted.subprotocol) == ("rsocket", "rsocket")
            assert (websocket.info.scheme, websocket.info.peer) == (scheme, accepted.info.local)
            assert websocket.info.tls_version == {"ws": None, "wss": "TLSv1.3"}[scheme]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(websocket.send, b"x" * 3_000_000)
                assert await accepted.receive() == b"x" * 3_000_000
            if path:
                with pytest.raises(ConnectionLost) as caught:
                    async with dial(listener.url.removesuffix(path) + "/elsewhere", config):
                        pass
                assert caught.value.code == 404
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accepted.aclose, 4000)
                with pytest.raises(ConnectionLost) as caught:
                    await websocket.receive()
            assert caught.value.code == 4000


@pytest.mark.loopback
async def test_nobody_listens() -> None:
    async with listen("ws://127.0.0.1:0") as listener:
        url = listener.url
    with pytest.raises(ConnectionLost):
        async with dial(url):
            pass


@pytest.mark.loopback
async def test_a_certificate_that_nobody_trusts(socket_config: tuple[str, WebSocketConfig]) -> None:
    async with listen("wss://127.0.0.1:0", socket_config[1]) as listener:
        with pytest.raises(ConnectionLost, match="certificate"):
            async with dial(listener.url):
                pass


async def settle() -> None:
    await wait_all_tasks_blocked(0.01)


TRAITS = CarrierTraits(shape="messages", max_message=1 << 22, settle=settle)


@pytest.mark.loopback
@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_promise_over_sockets(check: CarrierCheck, socket_config: tuple[str, WebSocketConfig]) -> None:
    scheme, config = socket_config
    if check.name.startswith("close"):  # the peer does not receive, so it does not answer the close frame
        config = attrs.evolve(config, close_timeout=0.05)

    @asynccontextmanager
    async def pair() -> AsyncGenerator[tuple[WebSocketStream, WebSocketStream]]:
        async with listen(f"{scheme}://127.0.0.1:0", config) as listener, dial(listener.url, config) as websocket:
            accepted = await listener.accept()
            yield websocket, accepted
            websocket.abort()
            accepted.abort()

    await check(pair)


@pytest.mark.loopback
async def test_a_listener_at_loopback_refuses_foreign_hosts() -> None:
    """Asked of a real socket: the address at which the client has come is the kernel's word."""
    async with listen("ws://127.0.0.1:0/") as listener:
        stream = await trio.open_tcp_stream("127.0.0.1", urlsplit(listener.url).port or 0)
        async with stream:
            await stream.send_all(
                b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 421 ")
