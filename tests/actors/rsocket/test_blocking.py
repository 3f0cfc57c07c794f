"""The blocking client: threads on one side, a server on trio on the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import pytest
import trio

from levada.actors.authentication import Authenticate, Credentials, Refused
from levada.actors.rsocket import (
    ApplicationError,
    ClientConfig,
    CoreConfig,
    LeaseGrant,
    Payload,
    Request,
    RequestFailed,
    RequestRejected,
    ServerConfig,
    SetupRejected,
    blocking,
)
from levada.actors.rsocket.blocking import BlockingPeer, RequestTimeout, connect
from levada.framework import ActorSystem, Asks, Identity, message
from levada.framework.errors import (
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    ReceiverClosed,
    SenderFinished,
)
from levada.transports.carriers import TcpConfig, UnixConfig
from levada.transports.rsocket.codes import ErrorCode
from levada.transports.rsocket.events import PayloadReceived
from levada.transports.rsocket.frames import ErrorFrame, KeepaliveFrame

from .conftest import CarrierSettings, serve
from .conftest import connect as connect_async

pytestmark = pytest.mark.loopback


@message("tests.rsocket.Length")
class Length(Asks[int]):
    text: str


class Server:
    """Runs a listener on trio in a thread of its own."""

    def __init__(self, url: str, config: ServerConfig | None, authenticate: Authenticate | None = None) -> None:
        self.slow = 0
        self.produced = 0
        self.noted = 0
        self.url = ""
        self.go_on = trio.Event()
        self._config = config
        self._authenticate = authenticate
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=trio.run, args=(self._run, url))
        self._thread.start()
        assert self._ready.wait(250)

    async def _run(self, url: str) -> None:
        self._token = token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:
            self._stop = lambda: token.run_sync_soon(scope.cancel)
            async with (
                ActorSystem() as system,
                serve(system, url, self.handle, authenticate=self._authenticate, config=self._config) as self.listener,
            ):
                self.url = self.listener.url
                self._ready.set()
                await trio.sleep_forever()

    def call(self, function: Callable[[], object]) -> None:
        """Call something in the server's thread."""
        self._token.run_sync_soon(function)

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop()
            self._thread.join(50)

    async def handle(self, request: Request) -> Any:
        match request.route:
            case "numbers":
                return self.numbers(int(request.data))
            case "back":
                return request.payloads
            case "two":
                return self.first_two(request)
            case "slow":
                self.slow += 1
                try:
                    await trio.sleep_forever()
                finally:
                    self.slow -= 1
            case "fail":
                raise ApplicationError("on purpose")
            case "note":
                self.noted += 1
            case "noted":
                return b"%d" % self.noted
            case "ask":
                return (await request.connection.request_response(b"you?")).data
        return len(request.message(Length).text) if request.holds_message else request.payload

    async def first_two(self, request: Request) -> AsyncIterator[bytes]:
        """Take two payloads and no more; answer when `go_on` is called."""
        async with request.payloads as payloads:
            got = [(await payloads.receive()).data for _ in range(2)]
        yield b" ".join(got)
        await self.go_on.wait()
        yield b"end"

    async def numbers(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            self.produced += 1
            yield b"%d" % number


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server("rsocket+tcp://127.0.0.1:0", None)
    yield running
    running.close()


@pytest.fixture
def peer(server: Server) -> Iterator[BlockingPeer]:
    with connect(server.url) as connected:
        yield connected


def until(condition: Callable[[], bool]) -> None:
    """Give the other threads time; fails after fifty seconds."""
    end = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
def test_each_carrier(scheme: str, dialect: str, settings: Callable[[str], CarrierSettings]) -> None:
    carrier = settings(scheme)
    server = Server(f"{dialect}+{carrier.url}", ServerConfig(carrier=carrier.serving))
    try:
        with connect(server.url, config=ClientConfig(carrier=carrier.dialling)) as peer:
            large = bytes(range(256)) * 8000
            assert peer.request_response(b"hello", route="echo").data == b"hello"
            assert peer.request_response(large, timeout=250.0).data == large
            assert peer.request_response(Length("hello")) == 5
            with peer.request_stream(b"100", route="numbers", window=7) as items:
                assert [item.data for item in items] == [b"%d" % number for number in range(100)]
            for _ in range(100):
                peer.fire_and_forget(b"", route="note")
            until(lambda: peer.request_response(b"", route="noted").data == b"100")
        assert peer.closed
    finally:
        server.close()


def test_a_socket_whose_name_is_no_text(tmp_path: Path) -> None:
    server = Server(f"rsocket+unix://{quote(os.fsencode(tmp_path))}/%FF%25", ServerConfig())
    try:
        with connect(server.url) as peer:
            assert peer.request_response(b"hello", route="echo").data == b"hello"
    finally:
        server.close()


def test_many_under_way_from_one_thread_and_from_many(peer: BlockingPeer) -> None:
    pending = [peer.start_request(b"%d" % number) for number in range(256)]
    done, _ = wait([answer.future for answer in pending], 50)
    assert len(done) == 256
    assert [answer.result().data for answer in pending] == [b"%d" % number for number in range(256)]
    wrong: list[bytes] = []

    def work(name: int) -> None:
        for number in range(50):
            data = b"%d %d" % (name, number)
            if peer.request_response(data, timeout=250.0).data != data:
                wrong.append(data)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_window_is_the_credit(server: Server, peer: BlockingPeer) -> None:
    with peer.request_stream(b"1000", route="numbers", window=4) as items:
        assert next(items).data == b"0"
        peer.request_response(b"")  # what it had to send before this answer, it has sent
        assert server.produced <= 6
    assert list(items) == []
    peer.request_response(b"")
    assert server.produced <= 6


def test_a_channel_brings_back_what_is_sent(peer: BlockingPeer) -> None:
    """Both directions at once, with windows that are smaller than what goes through."""
    with peer.request_channel(b"0", route="back", window=4, timeout=250.0) as channel:

        def send() -> None:
            for number in range(1, 500):
                channel.send(b"%d" % number, timeout=250.0)
            channel.finish()

        sender = threading.Thread(target=send)
        sender.start()
        assert [payload.data for payload in channel] == [b"%d" % number for number in range(500)]
        sender.join()
        with pytest.raises(SenderFinished):
            channel.send(b"more")
        channel.finish()
    assert peer._streams == {}


def test_a_responder_that_takes_no_more_goes_on_answering(server: Server, peer: BlockingPeer) -> None:
    with peer.request_channel(b"one", route="two", timeout=250.0) as channel:
        channel.send(b"two", timeout=250.0)
        assert next(channel).data == b"one two"
        with pytest.raises(ReceiverClosed):
            while True:
                channel.send(b"too many", timeout=250.0)
        channel.finish()
        server.call(server.go_on.set)
        assert [payload.data for payload in channel] == [b"end"]
    assert peer._streams == {}


def test_a_channel_that_has_ended_takes_nothing_more(peer: BlockingPeer) -> None:
    """By an error of the responder in both directions, or closed here after all answers."""
    with peer.request_channel(b"", route="numbers", timeout=250.0) as channel:
        with pytest.raises(RequestFailed):
            next(channel)
        with pytest.raises(RequestFailed):
            channel.send(b"more")
    with peer.request_channel(b"3", route="numbers", timeout=250.0) as channel:
        assert [payload.data for payload in channel] == [b"0", b"1", b"2"]
        channel.close()
        with pytest.raises(ReceiverClosed):
            channel.send(b"more")
    assert peer._streams == {}


def test_a_channel_that_gets_no_credit_or_is_closed(server: Server, peer: BlockingPeer) -> None:
    channel = peer.request_channel(b"", route="slow")
    until(lambda: server.slow == 1)
    with pytest.raises(RequestTimeout, match="no credit"):
        while True:
            channel.send(b"more", timeout=0.05)
    got: list[BaseException] = []

    def send() -> None:
        try:
            channel.send(b"more")
        except ReceiverClosed as error:
            got.append(error)

    waiting = threading.Thread(target=send)
    waiting.start()
    channel.close()
    waiting.join(50)
    assert len(got) == 1
    until(lambda: server.slow == 0)
    lost = peer.request_channel(b"", route="slow")
    peer.close()
    with pytest.raises(ConnectionClosed):
        lost.send(b"more")
    with pytest.raises((ConnectionClosed, ConnectionLost)):
        next(lost)


def test_errors_and_time_outs(server: Server, peer: BlockingPeer) -> None:
    with pytest.raises(ApplicationError, match="on purpose"):
        peer.request_response(b"", route="fail")
    with pytest.raises(ApplicationError, match="on purpose"), peer.request_stream(b"", route="fail") as items:
        next(items)
    with pytest.raises(RequestTimeout, match=r"no answer in 0.05 s"):
        peer.request_response(b"", route="slow", timeout=0.05)
    with pytest.raises(TimeoutError), peer.request_stream(b"", route="slow", timeout=0.05) as items:
        next(items)
    pending = peer.start_request(b"", route="slow")
    until(lambda: server.slow > 0)
    pending.cancel()
    until(lambda: server.slow == 0)
    with pytest.raises(ApplicationError, match="no handler"):
        peer.request_response(b"", route="ask")
    assert peer.request_response(b"still").data == b"still"


@pytest.mark.parametrize("how", ["cancel", "the future", "timeout"])
def test_a_cancelled_request_ends_for_every_thread_that_waits(how: str, server: Server, peer: BlockingPeer) -> None:
    pending = peer.start_request(b"", route="slow")
    until(lambda: server.slow == 1)
    got: list[object] = []

    def take() -> None:
        try:
            pending.result()
        except CancelledError:
            got.append("cancelled")

    threads = [
        threading.Thread(target=take, daemon=True),
        threading.Thread(target=lambda: got.append(wait([pending.future]).done), daemon=True),
    ]
    for thread in threads:
        thread.start()
    match how:
        case "cancel":
            pending.cancel()
        case "the future":
            assert pending.future.cancel()
        case "timeout":
            with pytest.raises(RequestTimeout):
                pending.result(0.05)
    for thread in threads:
        thread.join(50)
    assert "cancelled" in got
    assert {pending.future} in got
    with pytest.raises(CancelledError):
        pending.result(50)
    until(lambda: server.slow == 0)
    assert peer._calls == {}
    assert peer.request_response(b"still").data == b"still"


def test_an_answer_that_meets_its_cancellation(peer: BlockingPeer) -> None:
    """The future is cancelled and the peer does not know yet: the answer is dropped, and the connection stays."""
    pending = peer.start_request(b"", route="slow")
    with peer._lock:
        (stream_id,) = peer._calls
        withdrawing = threading.Thread(target=pending.cancel)
        withdrawing.start()
        until(pending.future.cancelled)
        peer._apply([PayloadReceived(stream_id, Payload(b"late"), True)])
    withdrawing.join(50)
    assert wait([pending.future], 50).done == {pending.future}
    assert peer.request_response(b"still").data == b"still"


@pytest.mark.parametrize("kind", ["request_stream", "request_channel"])
def test_closing_a_stream_ends_the_iteration_of_another_thread(kind: str, server: Server, peer: BlockingPeer) -> None:
    items = getattr(peer, kind)(b"", route="slow")
    until(lambda: server.slow == 1)
    got: list[list[Payload]] = []
    iterating = threading.Thread(target=lambda: got.append(list(items)), daemon=True)
    iterating.start()
    items.close()
    iterating.join(50)
    assert got == [[]]


def test_the_end(server: Server) -> None:
    peer = connect(server.url)
    pending = peer.start_request(b"", route="slow")
    items = peer.request_stream(b"", route="slow")
    until(lambda: server.slow == 2)
    peer.close()
    peer.close()
    for ended in (pending.result, lambda: next(items), lambda: peer.request_response(b"")):
        with pytest.raises((ConnectionClosed, ConnectionLost)):
            ended()
    until(lambda: server.slow == 0)
    lost = connect(server.url)
    pending = lost.start_request(b"", route="slow")
    until(lambda: server.slow == 1)
    server.close()
    with pytest.raises(ConnectionLost):
        pending.result(50)
    with pytest.raises(ConnectionLost):
        lost.request_response(b"")
    lost.close()
    with pytest.raises(ConnectionLost, match="cannot connect"):
        connect(server.url, timeout=5.0)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
def test_closing_loses_nothing_while_answers_arrive(scheme: str, settings: Callable[[str], CarrierSettings]) -> None:
    carrier = settings(scheme)
    server = Server(f"rsocket+{carrier.url}", ServerConfig(carrier=carrier.serving))
    defaults = {"tcp": TcpConfig(), "unix": UnixConfig()}
    patient = attrs.evolve(carrier.dialling or defaults[scheme], close_timeout=250.0)  # a busy machine needs seconds
    try:
        with connect(server.url, config=ClientConfig(carrier=patient)) as peer:
            items = peer.request_stream(b"1000000", route="numbers", window=1_000_000)
            assert next(items).data == b"0"
            for _ in range(500):
                peer.fire_and_forget(bytes(1000), route="note")
        until(lambda: server.noted == 500)
    finally:
        server.close()


def test_closing_waits_until_the_server_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        peer = connect(url, config=ClientConfig(carrier=TcpConfig(close_timeout=250.0)))
        with listening.accept()[0] as server:
            server.settimeout(50.0)
            for _ in range(500):
                peer.fire_and_forget(1000 * b"y")
            closing = threading.Thread(target=peer.close, daemon=True)
            closing.start()
            until(lambda: peer.closed)
            server.sendall(bytes(2_000_000))
            got = bytearray()
            while data := server.recv(65_536):
                got += data
            assert got.count(1000 * b"y") == 500
            assert closing.is_alive()
        closing.join(50)
        assert not closing.is_alive()


@pytest.mark.parametrize("kind", ["stream", "channel"])
def test_a_drain_of_the_peer_ends_with_the_last_stream_of_this_side(kind: str) -> None:
    """Which a thread of the program gives up, while the connection's own thread waits for input."""
    patient = CoreConfig(keepalive_interval=1000.0, max_lifetime=2000.0, drain_timeout=1000.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        with connect(url, config=ClientConfig(core=patient)) as peer, listening.accept()[0] as server:
            server.settimeout(10.0)
            stream = peer.request_stream(b"") if kind == "stream" else peer.request_channel(b"")
            goodbye = ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, b"").encode()
            server.sendall(len(goodbye).to_bytes(3) + goodbye)
            until(lambda: peer._draining)
            stream.close()
            while server.recv(65_536):  # until this side has closed
                pass
            until(lambda: peer.closed)


def test_closing_waits_no_longer_than_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        peer = connect(url, config=ClientConfig(carrier=TcpConfig(close_timeout=0.05)))
        with listening.accept()[0]:
            closing = threading.Thread(target=peer.close, daemon=True)
            closing.start()
            closing.join(50)
            assert not closing.is_alive()


def test_refused_setup() -> None:
    async def refuse(_: Credentials) -> Identity | Refused:
        return Refused("not you")

    server = Server("rsocket+tcp://127.0.0.1:0", None, refuse)
    try:
        with connect(server.url) as peer, pytest.raises(SetupRejected, match="not you"):
            peer.request_response(b"", timeout=250.0)
    finally:
        server.close()


def test_a_server_that_does_not_read_holds_requests_back() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        with connect(url, config=ClientConfig(high_watermark=100_000)) as peer:
            with pytest.raises(RequestTimeout, match="does not read"):
                while True:
                    peer.fire_and_forget(bytes(100_000), timeout=0.05)
            assert len(peer._unsent) <= 300_000
            peer._config = ClientConfig(carrier=TcpConfig(close_timeout=0.05))
    finally:
        listening.close()


class Clock:
    """Stands for the module `time` in the client; jumps once, after a thread that is watched has looked."""

    def __init__(self) -> None:
        self.added = 0.0
        self.watched: int | None = None

    def monotonic(self) -> float:
        now = time.monotonic() + self.added
        if threading.get_ident() == self.watched:
            self.watched = None
            self.added += 310.0
        return now


def test_a_timeout_is_for_the_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for room and the wait for the answer share it: the server reads when it is over, and never answers."""
    clock = Clock()
    monkeypatch.setattr(blocking, "time", clock)
    config = ClientConfig(high_watermark=100_000, core=CoreConfig(keepalive_interval=1000.0, max_lifetime=2000.0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        with connect(url, config=config) as peer, listening.accept()[0] as server:
            with pytest.raises(RequestTimeout, match="does not read"):
                while True:
                    peer.fire_and_forget(bytes(100_000), timeout=0.05)
            over = threading.Event()

            def read() -> None:
                buffer = bytearray(65_536)
                server.settimeout(0.1)
                while not over.is_set():
                    with suppress(TimeoutError):
                        server.recv_into(buffer)

            reading = threading.Thread(target=read)
            clock.watched = threading.get_ident()
            reading.start()
            began = time.monotonic()
            try:
                with pytest.raises(RequestTimeout, match="no answer in 300 s"):
                    peer.request_response(b"", timeout=300.0)
            finally:
                over.set()
                reading.join()
    assert time.monotonic() - began < 290.0, "300 s if the wait for the answer had its own"


def test_a_server_that_asks_and_does_not_read_is_not_read_either(tmp_path: Path) -> None:
    question = KeepaliveFrame(respond=True, position=0, data=bytes(4096)).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{tmp_path}/desk")
        listening.listen()
        url = f"rsocket+unix://{tmp_path}/desk"
        with connect(url, config=ClientConfig(high_watermark=16_384)) as peer, listening.accept()[0] as server:
            server.settimeout(0.5)
            with pytest.raises(TimeoutError):
                server.sendall(2_000 * (len(question).to_bytes(3) + question))
            with pytest.raises(RequestTimeout, match="does not read"):
                peer.fire_and_forget(b"", timeout=0.01)
            server.shutdown(socket.SHUT_RD)


def test_an_end_that_has_arrived_is_known_whether_or_not_the_thread_has_read_it() -> None:
    """Else the next request is sent into a connection that is over, and may count as carried out."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(20):
            with connect(url) as peer:
                server = listening.accept()[0]
                while b"\x00" not in server.recv(65_536):  # SETUP; a socket that closes with unread bytes sends a reset
                    pass
                assert not peer.closed
                server.close()
                assert peer.closed


def test_a_connection_that_cannot_be_used_is_closed() -> None:
    core = CoreConfig(setup_payload=Payload(bytes(2**24)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(ConfigurationError, match="setup_payload"):
            connect(f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}", config=ClientConfig(core=core))
        with listening.accept()[0] as server:
            server.settimeout(50.0)
            assert server.recv(1) == b""


@pytest.mark.ci
def test_keepalive_goes_on_while_nobody_calls(server: Server) -> None:
    config = ClientConfig(core=CoreConfig(keepalive_interval=0.05, max_lifetime=50.0))
    with connect(server.url, config=config) as peer:
        until(lambda: bool(server.listener.peers))
        statistics = server.listener.peers[0].statistics
        until(lambda: (now := statistics().carrier) is not None and now.bytes_received > 200)
        assert not peer.closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_it_and_closes_it_without_harm(server: Server, peer: BlockingPeer) -> None:
    assert peer.request_response(b"before").data == b"before"
    waiting = peer.start_request(b"", route="slow")
    stream, channel = peer.request_stream(b"3", route="numbers", window=1), peer.request_channel(b"1", route="back")
    calls: list[Callable[[], object]] = [
        lambda: peer.request_response(b"child"),
        lambda: peer.fire_and_forget(b"child"),
        lambda: peer.request_stream(b"1", route="numbers"),
        lambda: waiting.result(50.0),
        waiting.cancel,
        lambda: next(stream),
        lambda: channel.send(b"child"),
        channel.finish,
        lambda: channel.fail(ApplicationError("child")),
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for call in calls:
                try:
                    call()
                except ConnectionClosed:
                    refused += 1
            peer.close()
            peer.close()
        finally:
            os._exit(len(calls) - refused)
    assert os.waitpid(child, 0)[1] == 0
    channel.finish()
    assert [payload.data for payload in channel] == [b"1"]
    assert [payload.data for payload in stream] == [b"0", b"1", b"2"]
    assert not waiting.future.done()


@pytest.mark.parametrize(
    ("url", "carrier"),
    [
        ("rsocket+tcp://127.0.0.1", None),
        ("rsocket+tcp://127.0.0.1:99999", None),
        ("rsocket+tcp://127.0.0.1:seven", None),
        ("rsocket+tcp://[::1:7000", None),
        ("rsocket+tcp://me:secret@127.0.0.1:7000", None),
        ("rsocket+tcp://127.0.0.1:7000/desk", None),
        ("rsocket+tls://127.0.0.1:7000?token=secret", None),
        (f"rsocket+tcp://{70 * 'a'}:7000", None),
        ("rsocket+unix://desk/run/desk.socket", None),
        ("rsocket+unix:///run/desk.socket?x=1", None),
        (f"rsocket+unix:///{108 * 'a'}", None),
        ("rsocket+tls://127.0.0.1:7000", TcpConfig()),
        ("http://desk", None),
    ],
)
def test_both_clients_refuse_the_same_urls(url: str, carrier: object) -> None:
    config = ClientConfig(carrier=carrier)

    async def other() -> None:
        async with ActorSystem() as system, connect_async(system, url, config=config):
            pass

    with pytest.raises(ConfigurationError) as refused:
        trio.run(other)
    with pytest.raises(ConfigurationError) as caught:
        connect(url, config=config)
    assert str(caught.value) == str(refused.value)


def test_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"a blocking client has no carrier rsocket\+quic://, wanted one of tcp, tls, unix$"
    ) as caught:
        connect("rsocket+quic://me:secret@127.0.0.1:1")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="neither"):
        connect("rsocket+tcp://127.0.0.1:1", config=ClientConfig(lease=LeaseGrant()))
    with pytest.raises(ConnectionLost):
        connect(f"rsocket+unix://{tmp_path}/nobody")


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not identify peers")
def test_a_server_of_a_user_that_is_not_allowed(tmp_path: Path) -> None:
    refused = rf"the process at the other end of {tmp_path}/desk runs as user {os.getuid()}, which is not allowed"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{tmp_path}/desk")
        listening.listen()
        url = f"rsocket+unix://{tmp_path}/desk"
        with pytest.raises(ConnectionLost, match=f"^{refused}$"):
            connect(url, config=ClientConfig(carrier=UnixConfig(allowed_uids={os.getuid() + 1})))
        with listening.accept()[0] as server:
            assert server.recv(1) == b"", "SETUP is not for this user"


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is not an address here")
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_the_settings_of_the_socket(scheme: str, settings: Callable[[str], CarrierSettings]) -> None:
    tcp = TcpConfig(no_delay=False, keepalive_idle=7.0, keepalive_count=3, local_address="127.0.0.2")
    carrier = settings(scheme)
    dialling = tcp if carrier.dialling is None else attrs.evolve(carrier.dialling, tcp=tcp)
    server = Server(f"rsocket+{carrier.url}", ServerConfig(carrier=carrier.serving))
    try:
        with connect(server.url, config=ClientConfig(carrier=dialling)) as peer:
            options = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)
            assert [peer._socket.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [0, 7, 3]
            assert peer._socket.getsockname()[0] == "127.0.0.2"
    finally:
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a full queue refuses here")
def test_a_full_queue_of_a_unix_socket_is_waited_for(tmp_path: Path) -> None:
    url = f"rsocket+unix://{tmp_path}/desk"
    config = ClientConfig(carrier=UnixConfig(connect_timeout=0.05))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first,
    ):
        listening.bind(f"{tmp_path}/desk")
        listening.listen(0)
        first.connect(f"{tmp_path}/desk")
        with pytest.raises(ConnectionLost, match="the listener's queue is full"):
            connect(url, config=config)
        peers: list[BlockingPeer] = []
        connecting = threading.Thread(target=lambda: peers.append(connect(url, timeout=50.0)))
        connecting.start()
        with listening.accept()[0], listening.accept()[0] as server:
            connecting.join(50)
            assert server.recv(7)[3:] == bytes(4), "SETUP is on stream 0"
        peers[0].close()


def test_a_rejected_request_says_that_it_may_be_sent_again() -> None:
    server = Server("rsocket+tcp://127.0.0.1:0", ServerConfig(core=CoreConfig(max_streams=1)))
    try:
        with connect(server.url) as peer:
            peer.start_request(b"", route="slow")
            with pytest.raises(RequestRejected) as caught:
                peer.request_response(b"")
            assert caught.value.retryable
    finally:
        server.close()


@pytest.mark.ci
def test_importing_it_starts_nothing() -> None:
    program = (
        "import threading, levada.actors.rsocket.blocking\n"
        "assert threading.active_count() == 1\n"
        "import trio\n"
        "try: trio.lowlevel.current_trio_token()\n"
        "except RuntimeError: print('quiet')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)
    assert (done.stdout, done.stderr) == ("quiet\n", "")
