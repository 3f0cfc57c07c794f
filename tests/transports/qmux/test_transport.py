"""QMux on its transports: who is there, what is negotiated, who is refused, how a connection is lost, what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import itertools
import math
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework.errors import (
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    IdleTimeout,
    LocalProtocolError,
    StreamWasStopped,
)
from levada.transports import carriers
from levada.transports.carriers import MemoryConfig, TcpConfig, TlsConfig, UnixConfig, tcp, tls, websocket
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CarrierInfo, CloseReason, Stream
from levada.transports.carriers.memory import memory_streams
from levada.transports.carriers.websocket_config import WebSocketConfig
from levada.transports.qmux import Parameters, QmuxConfig, QmuxConnection, QmuxListener, dial, listen
from levada.transports.qmux.below import OverBytes
from levada.transports.qmux.core import QmuxCore
from levada.transports.qmux.frames import FrameType, encode_frame, encode_int, read_frame

if TYPE_CHECKING:
    from tests.transports.conftest import Authority

GREETING = encode_frame(
    FrameType.PARAMETERS,
    data=Parameters(
        max_idle_timeout_ms=30_000, max_data=1 << 20, max_stream_data_bidi_local=1 << 18, max_streams_bidi=100
    ).encode(),
)
"""What a hand-written peer sends first."""


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer does ends in a traceback."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


def record(*frames: bytes) -> bytes:
    body = b"".join(frames)
    return encode_int(len(body)) + body


@asynccontextmanager
async def accepting(listener: QmuxListener) -> AsyncIterator[list[QmuxConnection]]:
    """Accept all clients; the list has their connections."""
    accepted: list[QmuxConnection] = []

    async def accept() -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                accepted.append((await listener.accept()).accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        yield accepted
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def memory_pair(
    client: QmuxConfig | None = None, server: QmuxConfig | None = None
) -> AsyncIterator[tuple[QmuxConnection, QmuxConnection]]:
    """Two ends over a memory link; `aclose` of both at the end."""
    one, other = memory_streams()
    ends = [
        QmuxConnection(OverBytes(stream), stream.info, config or QmuxConfig(), is_client=is_client, since=0.0)
        for stream, config, is_client in ((one, client, True), (other, server, False))
    ]
    async with ends[0], ends[1]:
        for end in ends:
            await end.handshake()
        yield ends[0], ends[1]


# ---------------------------------------------------------------- who is there


@pytest.mark.loopback
@pytest.mark.rule("QX-42")
async def test_qx42_unix_peers_are_known_by_their_credentials(tmp_path: Path) -> None:
    async with listen(f"qmux+unix://{tmp_path}/socket") as listener, accepting(listener) as accepted:
        assert listener.url == f"qmux+unix://{tmp_path}/socket"
        async with dial(listener.url) as client:
            server = accepted[0]
            for end in (client, server):
                info = await end.handshake()
                assert (info.scheme, info.local) == ("qmux+unix", f"{tmp_path}/socket")
                assert info.peer_credentials == (os.getpid(), os.getuid(), os.getgid())


@pytest.mark.loopback
@pytest.mark.rule("QX-40")
async def test_qx40_tls_agrees_on_a_protocol_and_shows_certificates(authority: Authority) -> None:
    serving = TlsConfig(certificate=authority.issue("server"), ca=authority.ca, client_certificates="required")
    server = QmuxConfig(below=serving, protocols=("qmux-02.interop", "qmux-02"))
    client = QmuxConfig(
        below=TlsConfig(ca=authority.ca, certificate=authority.issue("client")), protocols=("qmux-02", "qmux-02.other")
    )
    async with listen("qmux+tls://127.0.0.1:0", server) as listener, accepting(listener) as accepted:
        async with dial(listener.url, client) as connection:
            assert (connection.info.scheme, connection.info.alpn) == ("qmux+tls", "qmux-02")
            assert connection.info.tls_version == "TLSv1.3"
            info = await accepted[0].handshake()
            assert (info.alpn, info.peer_subject) == ("qmux-02", "CN=client")
        with pytest.raises(ConnectionLost, match=r"speaks none of qmux-02\.else"):
            async with dial(listener.url, attrs.evolve(client, protocols=("qmux-02.else",))):
                pass
        await wait_all_tasks_blocked(0.02)
        assert (len(accepted), listener.admission.refused) == (1, 1)


@pytest.mark.loopback
@pytest.mark.rule("QX-40")
@pytest.mark.parametrize("scheme", ["tls", "wss"])
async def test_qx40_tls_is_1_3(scheme: str, authority: Authority) -> None:
    serving = TlsConfig(certificate=authority.issue("server"))
    server = QmuxConfig(below=serving if scheme == "tls" else WebSocketConfig(tls=serving))
    old = ssl.create_default_context(cafile=authority.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.set_alpn_protocols(server.protocols)
    async with listen(f"qmux+{scheme}://127.0.0.1:0", server) as listener, accepting(listener) as accepted:
        with pytest.raises(ConnectionLost, match="handshake"):
            async with tls.dial(listener.url.replace(f"qmux+{scheme}", "tls"), TlsConfig(context=old)):
                pass
        assert accepted == []


@pytest.mark.loopback
@pytest.mark.rule("QX-41")
async def test_qx41_websockets_agree_on_a_subprotocol() -> None:
    config = QmuxConfig(protocols=("qmux-02.interop",))
    async with listen("qmux+ws://127.0.0.1:0/desk", config) as listener, accepting(listener) as accepted:
        assert listener.url.endswith("/desk")
        async with dial(listener.url, config) as connection:
            assert (connection.info.scheme, connection.info.alpn) == ("qmux+ws", "qmux-02.interop")
            assert (await accepted[0].handshake()).alpn == "qmux-02.interop"
        with pytest.raises(ConnectionLost, match="400"):
            async with dial(listener.url, QmuxConfig(protocols=("qmux-02.else",))):
                pass
        with pytest.raises(ConnectionLost, match="404"):
            async with dial(listener.url + "s", config):
                pass
        await wait_all_tasks_blocked(0.02)
        assert listener.admission.refused == 2
    assert await accepted[0].wait_closed() == CloseReason(0, by_peer=True)


@pytest.mark.loopback
@pytest.mark.rule("QX-39")
async def test_qx39_plain_tcp_stays_on_loopback_unless_asked() -> None:
    for scheme in ("tcp", "ws"):
        with pytest.raises(ConfigurationError, match="plaintext_off_loopback"):
            async with listen(f"qmux+{scheme}://0.0.0.0:0"):
                pass
        async with listen(f"qmux+{scheme}://0.0.0.0:0", QmuxConfig(plaintext_off_loopback=True)) as listener:
            port = listener.url.rpartition(":")[2]
            async with accepting(listener), dial(f"qmux+{scheme}://127.0.0.1:{port}") as client:
                assert client.info.scheme == f"qmux+{scheme}"


@pytest.mark.loopback
@pytest.mark.rule("QX-39")
@pytest.mark.parametrize("scheme", ["tcp", "ws"])
async def test_qx39_a_client_sends_nothing_beyond_loopback_unless_asked(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of the server is taken for one that is elsewhere."""
    elsewhere = ipaddress.ip_address("192.0.2.1")
    monkeypatch.setattr("levada.transports.qmux.entry.ipaddress.ip_address", lambda _: elsewhere)
    with trio.socket.socket() as server:
        await server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ConfigurationError, match="plaintext_off_loopback"):
            async with dial(f"qmux+{scheme}://127.0.0.1:{server.getsockname()[1]}"):
                pass
        client, _ = await server.accept()
        with client:
            try:
                assert await client.recv(1) == b""
            except ConnectionResetError:
                pass


@pytest.mark.loopback
async def test_certificates_are_read_again(authority: Authority, tmp_path: Path) -> None:
    file = authority.issue("first", file=tmp_path / "file.pem")
    server, client = QmuxConfig(below=TlsConfig(certificate=file)), QmuxConfig(below=TlsConfig(ca=authority.ca))
    async with (
        listen("qmux+tls://127.0.0.1:0", server) as listener,
        accepting(listener),
        dial(listener.url, client) as before,
    ):
        authority.issue("second", file=tmp_path / "file.pem")
        assert isinstance(listener.below, tls.TlsListener)
        listener.below.reload()
        async with dial(listener.url, client) as after:
            assert "DNS:first" in before.info.peer_names
            assert "DNS:second" in after.info.peer_names


@pytest.mark.parametrize(
    ("url", "config", "match"),
    [
        ("qmux://127.0.0.1:1", None, "expected a URL with qmux"),
        ("qmux+quic://127.0.0.1:1", None, "expected a URL with qmux"),
        ("qmux+tcp://127.0.0.1:x", None, "not a URL"),
        ("qmux+tls://127.0.0.1:0", QmuxConfig(below=TcpConfig()), "is a TcpConfig, wanted a TlsConfig"),
        ("qmux+ws://:1/", None, r"expected ws://host:port/path or wss://host:port/path, got 'ws://:1/'"),
        ("qmux+ws://127.0.0.1:1/path#here", None, "has a fragment or a user"),
        ("qmux+unix:///run/desk?here", None, r"got 'unix:///run/desk\?here'"),
    ],
)
async def test_what_cannot_work_is_refused(url: str, config: QmuxConfig | None, match: str) -> None:
    for opening in (listen(url, config), dial(url, config)):
        with pytest.raises(ConfigurationError, match=match):
            async with opening:
                pass


async def test_a_listener_refuses_a_query() -> None:
    with pytest.raises(ConfigurationError, match="has a query, but only the path selects clients"):
        async with listen("qmux+ws://127.0.0.1:0/path?word=1"):
            pass


@pytest.mark.loopback
async def test_a_path_with_two_slashes(tmp_path: Path) -> None:
    """As made of a folder that is called ``//…``."""
    url = f"qmux+unix:///{tmp_path}/desk"
    async with listen(url) as listener:
        assert listener.url == url
        assert (tmp_path / "desk").is_socket()
    with pytest.raises(ConnectionLost, match=f"cannot connect to /{tmp_path}/desk"):
        async with dial(url):
            pass


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, -1.0])
def test_idle_timeouts_that_cannot_be_declared(seconds: float) -> None:
    with pytest.raises(ValueError, match="idle_timeout"):
        QmuxConfig(idle_timeout=seconds)


@pytest.mark.parametrize("name", ["qmux-01.x", "qmux-02.", "qmux-02.a b", "aqueduct"])
def test_protocols_are_tokens_of_qmux(name: str) -> None:
    with pytest.raises(ValueError, match="protocols"):
        QmuxConfig(protocols=(name,))


async def test_schemes_are_known_to_dial_and_listen(autojump_clock: MockClock) -> None:
    async with carriers.listen("qmux+memory://desk", QmuxConfig(below=MemoryConfig())) as listener:
        assert isinstance(listener, QmuxListener)
        async with accepting(listener), carriers.dial(listener.url) as client:
            assert isinstance(client, QmuxConnection)
            assert client.info == CarrierInfo(scheme="qmux+memory", local="desk/client", peer="desk/server")
        with pytest.raises(ConfigurationError, match="taken"):
            async with carriers.listen("qmux+memory://desk"):
                pass


# ---------------------------------------------------------------- who is refused


@pytest.mark.loopback
async def test_the_limits_of_the_transport_hold(tmp_path: Path) -> None:
    below = UnixConfig(max_connections_per_uid=1)
    async with listen(f"qmux+unix://{tmp_path}/socket", QmuxConfig(below=below)) as listener:
        async with accepting(listener) as accepted, dial(listener.url):
            with pytest.raises(ConnectionLost):
                async with dial(listener.url):
                    pass
            assert len(accepted) == 1
        async with accepting(listener), dial(listener.url):
            pass


async def test_a_refused_client_gets_no_octet(autojump_clock: MockClock) -> None:
    async with (
        listen("qmux+memory://") as listener,
        carriers.dial(listener.url.removeprefix("qmux+"), MemoryConfig()) as stream,
    ):
        incoming = await listener.accept()
        with pytest.raises(LocalProtocolError, match="has proved its address"):
            incoming.retry()
        incoming.refuse("full")
        assert listener.admission.refused == 1
        for decide in (incoming.accept, incoming.refuse, incoming.ignore):
            with pytest.raises(LocalProtocolError, match="already accepted, refused or ignored"):
                decide()
        with pytest.raises(ConnectionLost):
            await stream.receive_some()  # type: ignore[union-attr]  # a byte stream, by its settings


async def test_a_closed_listener_refuses_who_waits_and_leaves_the_others(autojump_clock: MockClock) -> None:
    async with listen("qmux+memory://") as listener:
        async with accepting(listener) as accepted, dial(listener.url) as client:
            await wait_all_tasks_blocked()
            await listener.aclose()
            stream = await client.open_stream()
            stream.send_nowait(b"still here", fin=True)
            assert await (await accepted[0].accept_stream()).receive_some() == b"still here"
            with pytest.raises(ConnectionLost):
                async with dial(listener.url):
                    pass
        with pytest.raises(ConnectionClosed):
            await listener.accept()


# ---------------------------------------------------------------- time


@pytest.mark.rule("QX-43")
@pytest.mark.parametrize("sent", [b"", record(GREETING)[:10]])
async def test_qx43_parameters_have_their_time(sent: bytes, autojump_clock: MockClock) -> None:
    """Counted from the transport, also while the client waits to be accepted."""
    async with (
        listen("qmux+memory://") as listener,
        carriers.dial(listener.url.removeprefix("qmux+"), MemoryConfig()) as stream,
    ):
        begun = trio.current_time()
        stream.send_nowait(sent)  # type: ignore[union-attr]  # a byte stream, by its settings
        await wait_all_tasks_blocked()
        await trio.sleep(4)
        connection = (await listener.accept()).accept()
        with pytest.raises(ConnectionLost, match="no transport parameters within 10 s"):
            await connection.handshake()
        assert trio.current_time() - begun == pytest.approx(10, abs=4.1)
        assert listener.admission.refused == 1


async def refused_one(admission: Admission) -> None:
    """Wait until a client counts as refused, which is when its connection has ended on this side too."""
    while not admission.refused:  # noqa: ASYNC110 - a number has no event
        await trio.sleep(0.01)
    assert admission.refused == 1


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.rule("QX-43")
async def test_qx43_the_handshake_of_the_transport_counts(authority: Authority) -> None:
    """The time of a TLS client runs from its TCP connection, and that of a WebSocket client too."""
    serving = TlsConfig(certificate=authority.issue("server"))
    config = QmuxConfig(below=serving, handshake_timeout=0.2)
    async with listen("qmux+tls://127.0.0.1:0", config) as listener:
        async with tcp.dial(listener.url.replace("qmux+tls", "tcp")) as stream:
            assert await stream.receive_some() == b""  # nothing but the end, after 0.2 s
        await refused_one(listener.below.admission)  # type: ignore[attr-defined]  # a TlsListener
    async with listen("qmux+ws://127.0.0.1:0", QmuxConfig(handshake_timeout=0.2)) as listener:
        async with tcp.dial(listener.url.replace("qmux+ws", "tcp")) as stream:
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")
        await refused_one(listener.admission)


@pytest.mark.rule("QX-34")
async def test_qx34_a_silent_peer_is_lost_in_the_idle_time(autojump_clock: MockClock) -> None:
    async with memory_pair(QmuxConfig(idle_timeout=9.0)) as (client, server):
        begun = trio.current_time()
        assert (await client.wait_closed()).lost
        assert trio.current_time() - begun == pytest.approx(9.0, abs=0.01)
        with pytest.raises(IdleTimeout):
            await client.open_stream()
        assert (await server.wait_closed()).lost


@pytest.mark.rule("QX-35")
async def test_qx35_pings_keep_a_connection_with_a_stream(autojump_clock: MockClock) -> None:
    """While a stream is open the peer is pinged; if it is gone, that is known within the idle time-out."""
    one, other = memory_streams()
    client = QmuxConnection(OverBytes(one), one.info, QmuxConfig(idle_timeout=9.0), is_client=True, since=0.0)
    server = QmuxConnection(OverBytes(other), other.info, QmuxConfig(), is_client=False, since=0.0)
    async with server, client:
        await client.handshake()
        stream = await client.open_stream()
        await trio.sleep(100)
        assert not client.closed
        assert not server.closed
        one.link.hold()  # a peer that has vanished: no end, no reset
        begun = trio.current_time()
        with pytest.raises(IdleTimeout):
            await stream.receive_some()
        assert 6.0 <= trio.current_time() - begun <= 9.0
        one.link.cut()


@pytest.mark.rule("QX-37")
@pytest.mark.parametrize("how", ["end", "abort", "cut"])
async def test_qx37_the_end_of_the_transport_is_known_at_once(how: str, autojump_clock: MockClock) -> None:
    one, other = memory_streams()
    server = QmuxConnection(OverBytes(other), other.info, QmuxConfig(), is_client=False, since=0.0)
    await one.send_all(record(GREETING) + record(b"\x0a\x00\x02hi"))
    stream = await server.accept_stream()
    match how:
        case "end":
            await one.send_eof()
        case "abort":
            one.abort()
        case _:
            one.link.cut()
    begun = trio.current_time()
    assert await server.wait_closed() == CloseReason(1, (await server.wait_closed()).text, lost=True)
    assert trio.current_time() == begun
    # QX-38: what had come stays readable.
    assert await stream.receive_some() == b"hi"
    with pytest.raises(ConnectionLost):
        await stream.receive_some()
    one.abort()


@pytest.mark.loopback
@pytest.mark.rule("QX-36")
async def test_qx36_two_ends_that_close_at_once_do_not_wait_for_each_other(authority: Authority) -> None:
    """TLS has no half-close here, so neither could see the other's end before its own."""
    server = QmuxConfig(below=TlsConfig(certificate=authority.issue("server")), close_timeout=50.0)
    client = QmuxConfig(below=TlsConfig(ca=authority.ca), close_timeout=50.0)
    async with listen("qmux+tls://127.0.0.1:0", server) as listener, accepting(listener) as accepted:
        async with dial(listener.url, client) as here:
            await accepted[0].handshake()
            with trio.fail_after(40):
                async with trio.open_nursery() as nursery:
                    for end in (here, accepted[0]):
                        nursery.start_soon(end.aclose)
        assert [(await end.wait_closed()).code for end in (here, accepted[0])] == [0, 0]


@pytest.mark.rule("QX-33")
async def test_all_queues_of_a_connection_have_a_bound(autojump_clock: MockClock) -> None:
    """`send_all` waits above it, but not on a stream with nothing queued: so no stream waits for the reader of another."""
    async with memory_pair(QmuxConfig(max_queued=10_000), QmuxConfig(stream_window=1_000)) as (client, server):
        streams = [await client.open_stream() for _ in range(5)]
        written = [0] * len(streams)

        async def write(number: int) -> None:
            for _ in range(4):
                await streams[number].send_all(bytes(4_000))
                written[number] += 4_000

        async with trio.open_nursery() as nursery:
            for number in range(len(streams)):
                nursery.start_soon(write, number)
            await trio.sleep(1)
            assert 10_000 < client.statistics().unsent <= 10_000 + 5 * 4_000
            assert sum(written) == client.statistics().unsent + 5 * 1_000
            late = await client.open_stream()
            await late.send_all(b"late")
            taken = dict[int, int]()
            for _ in range(6):
                stream = await server.accept_stream()
                nursery.start_soon(_drain, stream, taken)
            await trio.sleep(1)
            assert client.statistics().unsent == 0
        assert written == [16_000] * 5
        assert sorted(taken.values()) == [4] + [16_000] * 5


async def _drain(stream: Stream, taken: dict[int, int]) -> None:
    want = 4 if stream.stream_id == 20 else 16_000
    while taken.get(stream.stream_id, 0) < want:
        taken[stream.stream_id] = taken.get(stream.stream_id, 0) + len(await stream.receive_some())


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_a_block_that_fails_says_goodbye(how: str, tmp_path: Path) -> None:
    async with listen(f"qmux+unix://{tmp_path}/socket") as listener, accepting(listener) as accepted:
        with trio.CancelScope() as scope, contextlib.suppress(ZeroDivisionError):
            async with dial(listener.url) as client:
                (await client.open_stream()).send_nowait(b"x")
                if how == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
                raise ZeroDivisionError
        assert await accepted[0].wait_closed() == CloseReason(0, by_peer=True)


@pytest.mark.loopback
async def test_a_core_that_fails_for_each_client_does_not_fill_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = QmuxCore.receive_data

    def fail(core: QmuxCore, *arguments: Any) -> Any:
        if core.client:
            return receive(core, *arguments)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(QmuxCore, "receive_data", fail)
    async with listen(f"qmux+unix://{tmp_path}/socket") as listener, accepting(listener):
        for _ in range(15):
            async with dial(listener.url) as client:
                await client.wait_closed()
    lines = [record for record in caplog.records if "the core of" in record.message]
    caplog.clear()
    assert len(lines) == 10
    assert all("a fault of ours" in str(record.exc_text) for record in lines)


@pytest.mark.loopback
async def test_a_killed_socket_is_known_at_once(tmp_path: Path) -> None:
    async with (
        listen(f"qmux+unix://{tmp_path}/socket") as listener,
        accepting(listener) as accepted,
        dial(listener.url) as client,
    ):
        stream = await client.open_stream()
        accepted[0].abort()
        with pytest.raises(ConnectionLost):
            await stream.receive_some()
        assert (await client.wait_closed()).lost


# ---------------------------------------------------------------- acknowledgements


@pytest.mark.rule("D-23")
async def test_d23_what_a_ping_follows_is_acknowledged(autojump_clock: MockClock) -> None:
    async with memory_pair() as (client, server):
        stream = await client.open_stream()
        assert client.round_trip() == 0
        stream.send_nowait(b"x" * 1000)
        assert stream.unacked == 1000
        await stream.all_acked()
        assert stream.unacked == 0
        assert (await server.accept_stream()).receive_nowait() == b"x" * 1000, "the peer had it before the answer"
        stream.send_nowait(b"end", fin=True)
        assert await stream.acked() is True
        assert await stream.stopped() is None


async def test_a_stop_is_told_to_who_waits_for_the_end(autojump_clock: MockClock) -> None:
    async with memory_pair() as (client, server):
        stream = await client.open_stream()
        stream.send_nowait(b"x")
        got: list[Any] = []
        stream.on_stopped(lambda *told: got.append(told))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_append, stream.stopped, got)
            (await server.accept_stream()).stop(7)
        assert sorted(got, key=str) == [(stream.stream_id, 7), 7]
        with pytest.raises(StreamWasStopped):
            stream.send_nowait(b"y")


async def _append(call: Callable[[], Awaitable[int | None]], into: list[Any]) -> None:
    into.append(await call())


# ---------------------------------------------------------------- what is left


@pytest.mark.rule("QX-36")
async def test_qx36_a_peer_that_does_not_end_is_left_after_three_seconds(autojump_clock: MockClock) -> None:
    one, other = memory_streams()
    server = QmuxConnection(OverBytes(other), other.info, QmuxConfig(), is_client=False, since=0.0)
    await one.send_all(record(GREETING))
    await server.handshake()
    begun = trio.current_time()
    await server.aclose(5, "enough")
    assert trio.current_time() - begun == pytest.approx(3.0)
    got = b""
    with pytest.raises(ConnectionLost):
        while data := await one.receive_some():
            got += data
        await one.send_all(b"too late")
    assert got.endswith(record(b"\x1d\x05\x06enough"))
    one.abort()


async def test_ended_connections_are_freed_without_the_collector(autojump_clock: MockClock) -> None:
    gc.collect()
    gc.disable()
    try:
        gone: list[weakref.ref[QmuxConnection]] = []
        for _ in range(3):
            async with memory_pair() as (client, server):
                stream = await client.open_stream()
                stream.send_nowait(b"x", fin=True)
                (await client.open_stream()).send_nowait(b"y", fin=True)
                left = await server.accept_stream()
                gone += [weakref.ref(client), weakref.ref(server)]
            del client, server, stream, left
            await wait_all_tasks_blocked()
        assert [end() for end in gone] == [None] * 6
    finally:
        gc.enable()


@pytest.mark.loopback
@pytest.mark.rule("QX-41")
@pytest.mark.parametrize(
    ("sent", "code", "detail"),
    [
        (b"\x81\x82\0\0\0\0hi", 0x0A, "text"),
        (b"\x82\xfe\x3f\xff\0\0\0\0", 0x07, "above the largest"),  # 16,383 bytes will come
        (b"\x02\xfe\x20\0\0\0\0\0" + bytes(0x2000) + b"\x80\xfe\x20\0\0\0\0\0", 0x07, "above the largest"),
        (b"\x83\x80\0\0\0\0", 0x0A, "opcode"),
        (b"\x82\x80\0\0\0\0", 0x0A, "empty record"),
    ],
    ids=["text", "too large", "fragments too large", "unknown frame", "empty"],
)
async def test_qx41_wrong_messages(sent: bytes, code: int, detail: str) -> None:
    """Known as soon as the frame's head is there; the answer is a message with CONNECTION_CLOSE, then the close frame 1000."""
    plain = WebSocketConfig(subprotocols=QmuxConfig().protocols)
    async with listen("qmux+ws://127.0.0.1:0") as listener, accepting(listener) as accepted:
        url = listener.url.removeprefix("qmux+")
        async with tcp.dial(url.replace("ws", "tcp")) as stream, await websocket.open_over(stream, url, plain) as peer:
            await peer.send(GREETING)
            stream.send_nowait(sent)
            assert (await peer.receive()).startswith(GREETING[:8])
            message = await peer.receive()
            frame, end = read_frame(message, 0, len(message))
            assert end == len(message)
            assert frame.kind == FrameType.TRANSPORT_CLOSE
            assert frame.fields[0] == code
            assert detail in frame.data.decode()
            with pytest.raises(ConnectionLost) as lost:
                await peer.receive()
            assert lost.value.code == 1000
        reason = await accepted[0].wait_closed()
        assert (reason.code, reason.lost, reason.by_peer) == (code, True, False)
        assert detail in reason.text


@pytest.mark.rule("QX-32")
async def test_qx32_d17_others_have_their_turn_after_256_kib() -> None:
    """A carrier that always has bytes, and so never waits, does not keep the tasks of other connections out."""
    piece = record(bytes(16_000)) * 4

    class Ready:
        """Has always arrived."""

        async def receive_some(self) -> bytes:
            return piece

    ready: Any = Ready()
    below, core = OverBytes(ready), QmuxCore(client=False, now=0.0)
    core.receive_data(record(GREETING), 0.0)
    taken, turns = 0, list[int]()

    async def other() -> None:
        while True:
            turns.append(taken)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        for _ in range(40):
            await below.receive(core)
            taken += len(piece)
        nursery.cancel_scope.cancel()
    gaps = [after - before for before, after in itertools.pairwise(turns)]
    assert not core.ended
    assert len(turns) >= 7  # 2.5 MB
    assert max(gaps) < 2 * (256 * 1024 + len(piece))  # twice: trio runs the tasks of each pass in any order


async def test_what_one_turn_sends_is_one_write(autojump_clock: MockClock) -> None:
    """What a call of `together` sends goes out in one write, and so do the answers of all tasks that one batch has woken."""
    async with memory_pair() as (client, server):
        opened = [await client.open_stream() for _ in range(20)]

        def say(what: bytes, *, fin: bool = False) -> None:
            for stream in opened:
                stream.send_nowait(what, fin=fin)

        async def answer(stream: Stream) -> None:
            assert await stream.receive_some() == b"hello"
            assert await stream.receive_some() == b"ask"
            stream.send_nowait(b"answer", fin=True)

        async with trio.open_nursery() as nursery:
            say(b"hello")
            for _ in opened:
                nursery.start_soon(answer, await server.accept_stream())
            await wait_all_tasks_blocked()
            before = client.statistics().writes, server.statistics().writes
            client.together(partial(say, b"ask", fin=True))
            assert client.statistics().writes == before[0] + 1
        await wait_all_tasks_blocked()
        assert server.statistics().writes == before[1] + 1
        assert [await stream.receive_some() for stream in opened] == [b"answer"] * 20


async def test_a_batch_is_told_when_all_its_streams_have_their_data(autojump_clock: MockClock) -> None:
    """And what is sent then goes out in one write."""
    async with memory_pair() as (client, server):
        opened = [await client.open_stream() for _ in range(3)]
        batches: list[list[bytes | None]] = []

        def ask() -> None:
            for stream in opened:
                stream.send_nowait(b"ask", fin=True)

        def answer() -> None:
            batches.append([])
            while (stream := server.accept_stream_nowait()) is not None:
                batches[-1].append(stream.receive_nowait())
                stream.send_nowait(b"answer", fin=True)

        server.on_batch(answer)
        before = server.statistics().writes
        client.together(ask)
        await wait_all_tasks_blocked()
        assert batches[0] == [b"ask"] * 3
        assert server.statistics().writes == before + 1
        assert [await stream.receive_some() for stream in opened] == [b"answer"] * 3
