"""TCP: the contract, joined writes, what a lingering close saves, options, listeners."""

# ruff: noqa: ASYNC240 - a look at /proc blocks nobody

from __future__ import annotations

import errno
import os
import socket as stdlib_socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers import streams, tcp
from levada.transports.carriers.contracts import ByteStream, CarrierInfo
from levada.transports.carriers.sockets import why_not_bound
from levada.transports.carriers.streams import JoinedStream, StreamConfig
from levada.transports.carriers.tcp import TcpConfig
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

pytestmark = pytest.mark.loopback

ANY = "tcp://127.0.0.1:0"
SMALL = TcpConfig(send_buffer=32 * 1024, receive_buffer=32 * 1024)
"""Small buffers of the kernel, so that a stopped receiver is felt soon."""


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


@asynccontextmanager
async def pair(config: TcpConfig = SMALL) -> AsyncIterator[tuple[JoinedStream, JoinedStream]]:
    async with (
        tcp.listen(ANY, config) as listener,
        tcp.dial(listener.url, config) as client,
        await listener.accept() as server,
    ):
        yield client, server


TRAITS = CarrierTraits(shape="bytes", buffered=512 * 1024, settle=settle, timeout=20)


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_contract(check: CarrierCheck) -> None:
    await check(pair)


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_contract_without_straight_writes(check: CarrierCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write takes the way over the queue and the writer."""
    monkeypatch.setattr(streams, "_JOIN_WITHIN", 1e9)
    monkeypatch.setattr(streams, "_JOINED", 1 << 40)
    await check(pair)


async def test_addresses() -> None:
    async with tcp.listen(ANY) as listener:
        port = listener.url.removeprefix("tcp://127.0.0.1:")
        assert 0 < int(port) < 65_536
        async with tcp.dial(listener.url) as client, await listener.accept() as server:
            assert client.info.peer == server.info.local == f"127.0.0.1:{port}"
            assert client.info.local == server.info.peer
            assert client.info == CarrierInfo(scheme="tcp", local=client.info.local, peer=client.info.peer)


async def test_writes_of_one_turn_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_JOIN_WITHIN", 1e9)  # seconds since the machine began: none goes straight
    async with pair() as (client, server):
        for number in range(1000):
            await client.send_all(number.to_bytes(4, "big"))
        await client.flush()
        assert client.statistics().writes == 1
        got = b""
        while len(got) < 4000:
            got += await server.receive_some()
        assert got == b"".join(number.to_bytes(4, "big") for number in range(1000))


async def test_lonely_writes_need_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_JOIN_WITHIN", 0)
    async with pair() as (client, server):
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(10):
            await client.send_all(b"ping")
            assert await server.receive_some() == b"ping"
        assert client.statistics().writes == 10
        assert trio.lowlevel.current_statistics().tasks_living == before


async def test_straight_writes_let_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take everything at once forever: the sender still gives way every watermark."""
    monkeypatch.setattr(streams, "_JOIN_WITHIN", 0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with pair(TcpConfig(high_watermark=1000)) as (client, _), trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(100):
            await client.send_all(bytes(100))
        assert turns >= 4
        nursery.cancel_scope.cancel()


async def test_straight_reads_lose_nothing_when_cancelled() -> None:
    """Cancelled before the socket was readable, when it is, and while octets are left of the last read."""
    octets = bytes(range(200))
    async with pair() as (client, server):
        got = b""
        with trio.move_on_after(0):
            got += await client.receive_some()
        await server.send_all(octets)
        while len(got) < 100:
            with trio.CancelScope() as scope:
                scope.cancel()
                got += await client.receive_some(7)
            got += await client.receive_some(7)
        await settle()
        for _ in range(3):
            with trio.CancelScope() as scope:
                scope.cancel()
                got += await client.receive_some()
        while len(got) < 200:
            got += await client.receive_some()
        assert got == octets


async def test_straight_reads_see_the_end_behind_the_last_octet() -> None:
    """Whether the last read took all there was, or as many octets as were asked for."""
    async with pair() as (client, server):
        await server.send_all(b"abcd")
        await server.send_eof()
        assert await client.receive_some(2) == b"ab"
        assert await client.receive_some(2) == b"cd"
        assert [await client.receive_some(2) for _ in range(3)] == [b"", b"", b""]
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="wanted at least 1"):
                await server.receive_some(wrong)
        await client.send_all(b"still open")
        assert await server.receive_some() == b"still open"


async def test_straight_reads_always_let_others_run() -> None:
    async with pair() as (client, server), trio.open_nursery() as nursery:
        turns = 0

        @nursery.start_soon
        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        await server.send_all(bytes(50))
        await server.flush()
        for _ in range(50):
            assert await client.receive_some(1) == b"\0"
        assert turns >= 49  # in the last batch the other one may come second
        nursery.cancel_scope.cancel()


async def test_aborted_between_readable_and_read() -> None:
    """It is this side that closed, not the peer that was lost."""
    async with pair() as (client, server):
        await server.send_all(b"ab")
        assert await client.receive_some(1) == b"a"  # there is more, so the next read does not wait for the socket
        receiving = client.receive_some()
        receiving.send(None)  # by hand as far as its checkpoint, so that the order is certain
        client.abort()
        with pytest.raises(ConnectionClosed):
            receiving.send(outcome.Value(None))


async def test_writer_ends_with_the_stream() -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with pair() as (client, server):
        await client.send_all(bytes(20_000))
        await server.send_all(bytes(20_000))
        assert trio.lowlevel.current_statistics().tasks_living > before
    await settle()
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_what_was_said_last_arrives_though_the_peer_was_speaking() -> None:
    """A close with octets unread sends a reset; the last words must be in the peer's hands by then."""
    async with pair() as (client, server):
        await client.send_all(bytes(10_000))
        await settle()
        await server.send_all(b"go away")
        await server.aclose()
        got = b""
        try:
            while part := await client.receive_some():
                got += part
        except ConnectionLost:
            pass
        assert got == b"go away"


async def test_close_gives_up_after_its_time() -> None:
    config = TcpConfig(send_buffer=4096, receive_buffer=4096, close_timeout=0.05)
    async with pair(config) as (client, server):
        while not client.statistics().unsent:
            with trio.move_on_after(0.05):
                while True:
                    await client.send_all(bytes(20_000))
        await client.aclose()
        with pytest.raises(ConnectionLost):
            while await server.receive_some():
                pass


async def test_reset_by_a_raw_peer_is_a_loss_with_its_cause() -> None:
    async with tcp.listen(ANY) as listener:
        raw = stdlib_socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2])))
        async with await listener.accept() as server:
            raw.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            raw.close()
            with pytest.raises(ConnectionLost) as caught:
                await server.receive_some()
            assert isinstance(caught.value.__cause__, ConnectionResetError)
            with pytest.raises(ConnectionLost):
                await server.send_all(b"x")


async def test_half_closed_peer_still_listens() -> None:
    async with tcp.listen(ANY) as listener:
        raw = stdlib_socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2])))
        async with await listener.accept() as server:
            raw.sendall(b"question")
            raw.shutdown(stdlib_socket.SHUT_WR)
            got = b""
            while part := await server.receive_some():
                got += part
            assert got == b"question"
            await server.send_all(b"answer")
        assert raw.recv(100) == b"answer"
        assert raw.recv(100) == b""
        raw.close()


async def test_options_reach_the_kernel() -> None:
    config = TcpConfig(keepalive_idle=30, keepalive_interval=5, keepalive_count=3, no_delay=True)
    async with pair(config) as ends, pair(TcpConfig(keepalive_idle=None, no_delay=False)) as others:
        for stream in ends:
            get = stream._socket.getsockopt
            assert get(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_KEEPALIVE) == 1
            assert get(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY) != 0
            if hasattr(stdlib_socket, "TCP_KEEPIDLE"):
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
                values = [get(stdlib_socket.IPPROTO_TCP, getattr(stdlib_socket, name)) for name in names]
                assert values == [30, 5, 3]
        for stream in others:
            assert stream._socket.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_KEEPALIVE) == 0
            assert stream._socket.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY) == 0


async def test_the_settings_say_how_much_one_read_takes() -> None:
    async with pair(TcpConfig(receive_size=3)) as (client, server):
        await client.send_all(b"abcdefg")
        await settle()
        assert [await server.receive_some() for _ in range(3)] == [b"abc", b"def", b"g"]


async def test_errors_of_the_block_come_out_as_they_are() -> None:
    for context in (lambda: tcp.listen(ANY), pair):
        with pytest.raises(KeyError) as caught:
            async with context():
                raise KeyError("mine")
        assert caught.value.__context__ is None


async def test_nobody_listens() -> None:
    async with tcp.listen(ANY) as listener:
        url = listener.url
    with pytest.raises(ConnectionLost, match=r"^cannot connect to 127\.0\.0\.1:[0-9]+: Connection refused$") as caught:
        async with tcp.dial(url):
            pass
    assert isinstance(caught.value.__cause__, OSError)


@contextmanager
def deaf_listener() -> Iterator[int]:
    """Listen at a port of 127.0.0.1 with a queue that is full, which answers no more."""
    with ExitStack() as sockets:
        deaf = sockets.enter_context(stdlib_socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port: int = deaf.getsockname()[1]
        for _ in range(3):
            stream = sockets.enter_context(stdlib_socket.socket())
            stream.setblocking(False)
            stream.connect_ex(("127.0.0.1", port))
        yield port


async def test_connecting_has_a_deadline(autojump_clock: trio.testing.MockClock) -> None:
    with deaf_listener() as port, pytest.raises(IdleTimeout, match="within 7 s"):
        async with tcp.dial(f"tcp://127.0.0.1:{port}", TcpConfig(connect_timeout=7)):
            pass


class TwoAddresses(trio.abc.HostnameResolver):
    """Knows a host with an address that does not answer and one that does."""

    async def getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        return [
            (stdlib_socket.AF_INET, stdlib_socket.SOCK_STREAM, 6, "", (address, int(port)))
            for address in ("127.0.0.1", "127.0.0.2")
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_the_next_address_is_tried_when_the_first_is_slow(autojump_clock: trio.testing.MockClock) -> None:
    trio.socket.set_custom_hostname_resolver(TwoAddresses())
    with deaf_listener() as port:
        async with (
            tcp.listen(f"tcp://127.0.0.2:{port}"),
            tcp.dial(f"tcp://two.test:{port}", TcpConfig(happy_eyeballs_delay=3.0)) as stream,
        ):
            assert stream.info.peer == f"127.0.0.2:{port}"
            assert trio.current_time() == 3.0


async def test_addresses_that_cannot_be() -> None:
    for url in ("tcp://127.0.0.1", "tcp://:0", "udp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://[::1"):
        with pytest.raises(ConfigurationError):
            async with tcp.listen(url):
                pass
    async with tcp.listen(ANY) as listener:
        with pytest.raises(ConfigurationError) as raised:
            async with tcp.listen(listener.url):
                pass
        assert str(raised.value) == (
            f"cannot listen at {listener.url}: another process or listener has this address (Address already in use): "
            "stop it, or choose another port (0 takes a free one)"
        )
    with pytest.raises(ConfigurationError, match=r"choose one of its own, or 0\.0\.0\.0 for all of them$"):
        async with tcp.listen("tcp://203.0.113.1:0"):  # of no machine
            pass
    forbidden = OSError(errno.EACCES, "Permission denied")
    assert why_not_bound(forbidden, another="path") == (
        "this user may not listen there (Permission denied): choose another path"
    )
    for extra in ("/path", "?query", "#fragment"):
        for context in (tcp.listen, tcp.dial):
            with pytest.raises(
                ConfigurationError, match=r"^tcp://127.0.0.1:1 is all that such a URL can say: leave out"
            ):
                async with context(f"tcp://127.0.0.1:1{extra}"):
                    pass
    with pytest.raises(ConfigurationError, match="leave out its user") as refused:
        async with tcp.dial("tcp://me:secret@127.0.0.1:1"):
            pass
    assert "secret" not in str(refused.value)
    for context in (tcp.listen, tcp.dial):
        with pytest.raises(ConfigurationError, match="label"):
            async with context(f"tcp://{'x' * 70}.test:1"):
                pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"keepalive_idle": 86_400},
        {"keepalive_interval": 40_000},
        {"keepalive_count": 128},
        {"send_buffer": 1 << 31},
        {"receive_buffer": 0},
    ],
    ids=str,
)
def test_what_the_kernel_would_refuse_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TcpConfig(**wrong)


async def test_the_largest_settings_reach_the_kernel() -> None:
    async with pair(TcpConfig(keepalive_idle=32_767, keepalive_interval=32_767, keepalive_count=127)) as (
        client,
        server,
    ):
        await client.send_all(b"x")
        assert await server.receive_some() == b"x"


async def test_octets_of_wide_items_that_the_kernel_takes_in_part() -> None:
    """A straight write of a view whose items have 8 octets each, into a buffer that holds a part of it."""
    wide = memoryview(bytes(range(256)) * 512).cast("Q")
    assert len(wide) == 16 * 1024
    async with pair() as (client, server), trio.open_nursery() as nursery:
        nursery.start_soon(client.send_all, wide)
        got = b""
        while len(got) < wide.nbytes:
            got += await server.receive_some()
        assert got == wide.tobytes()


async def test_port_is_free_again_at_once() -> None:
    async with tcp.listen(ANY) as listener, tcp.dial(listener.url) as client, await listener.accept() as server:
        await server.aclose()
        assert await client.receive_some() == b""
    async with tcp.listen(listener.url):
        pass


async def test_accepted_streams_outlive_the_listener() -> None:
    async with tcp.listen(ANY) as listener, tcp.dial(listener.url) as client:
        server = await listener.accept()
        await listener.aclose()
        with pytest.raises(ConnectionClosed):
            await listener.accept()
        await client.send_all(bytes(50_000))
        got = 0
        while got < 50_000:
            got += len(await server.receive_some())
        await server.aclose()


async def test_who_is_not_accepted_is_cut_off() -> None:
    async with tcp.listen(ANY) as listener, tcp.dial(listener.url) as client:
        await settle()
        await listener.aclose()
        with pytest.raises(ConnectionLost):
            await client.receive_some()


async def test_cancelled_accept_takes_nothing() -> None:
    async with tcp.listen(ANY) as listener:
        with trio.move_on_after(0) as scope:
            await listener.accept()
        assert scope.cancelled_caught
        async with tcp.dial(listener.url) as client, await listener.accept() as server:
            await client.send_all(b"taken")
            assert await server.receive_some() == b"taken"


@pytest.mark.ci  # what the kernel turned away comes again after a second
async def test_backlog_bounds_what_waits_here() -> None:
    """The rest waits in the kernel, or outside, and comes in once somebody accepts."""
    async with tcp.listen(ANY, TcpConfig(backlog=2)) as listener, trio.open_nursery() as nursery:

        async def dial() -> None:
            async with tcp.dial(listener.url) as client:
                assert await client.receive_some() == b""

        for _ in range(6):
            nursery.start_soon(dial)
        await settle()
        for _ in range(6):
            await (await listener.accept()).aclose()


class _Exhausted(trio.abc.Listener[trio.SocketStream]):
    """Out of descriptors for a while, then closed."""

    def __init__(self) -> None:
        self.errors = [OSError(number, "too many") for number in (errno.EMFILE, errno.ENFILE) for _ in range(400)]

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_out_of_descriptors_is_waited_out(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(stream: trio.SocketStream) -> None:
        raise AssertionError

    await streams.accept_from(_Exhausted(), handle)
    assert trio.current_time() == pytest.approx(80.0)
    texts = [f"cannot accept: [Errno {number}] too many" for number in (errno.ENFILE, errno.EMFILE)]
    assert caplog.messages == texts, "one a minute, not ten a second"


async def test_descriptors_are_given_back() -> None:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("needs /proc to count descriptors")
    before = len(os.listdir(folder))
    async with pair() as (client, server):
        await client.send_all(bytes(20_000))
        server.abort()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            async with tcp.dial("tcp://127.0.0.1:1"):
                pass
    await settle()
    assert len(os.listdir(folder)) == before


async def test_a_stream_of_ones_own() -> None:
    """Any two-way stream of trio over a socket can be joined."""
    here, there = trio.socket.socketpair()
    info = CarrierInfo(scheme="pair", local="here", peer="there")
    raw = trio.SocketStream(here)
    async with JoinedStream(raw, here, info, StreamConfig(high_watermark=0), half_close=False) as stream:
        assert isinstance(stream, ByteStream)
        await stream.send_all(b"x")
        assert await there.recv(10) == b"x"
        with pytest.raises(NotImplementedError, match="pair has no half-close"):
            await stream.send_eof()
    there.close()
