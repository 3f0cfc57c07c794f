"""Whatever a peer writes where text is for people: logs, errors and terminals get one printable line of it."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

import levada.actors
import levada.framework
import levada.transports
from levada.actors import aqueduct, cli, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Disapproved, OperationFailed
from levada.framework import Actor, ActorSystem, Asks, Identity, handles, message
from levada.framework.errors import ConnectionLost, DecodeError, LevadaError, RemoteFailure
from levada.transports import carriers
from levada.transports.carriers import CloseReason, MemoryConfig
from levada.transports.carriers.memory import memory_streams
from levada.transports.carriers.websocket import open_over
from levada.transports.maop import Version
from levada.transports.maop.authentication import Authentication, Result
from levada.transports.maop.frames import DisconnectRequest, Fail
from levada.transports.quic import QuicConfig, dial, listen
from levada.transports.reactivesocket import frames as reactivesocket_frames
from levada.transports.rsocket.frames import ErrorFrame, Payload, SetupFrame

FORGED = "bye\r\nERROR all is lost\x1b[2J\0\x7f\x9b\u202e\u2066\u2028\u2029"
SHOWN = r"bye\r\nERROR all is lost\x1b[2J\x00\x7f\x9b\u202e\u2066\u2028\u2029"
OCTETS = FORGED.encode() + b"\xff"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every record of every test here is one printable line, and none has a traceback."""
    caplog.set_level(logging.DEBUG, "levada")
    yield caplog
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if not record.getMessage().isprintable()] == []
    assert [record for record in records if record.exc_info and record.exc_info[0]] == []


def modules() -> Iterator[Any]:
    for layer in (levada.framework, levada.transports, levada.actors):
        for found in pkgutil.walk_packages(layer.__path__, f"{layer.__name__}."):
            if not found.name.endswith("__main__"):
                try:
                    yield importlib.import_module(found.name)
                except ModuleNotFoundError as error:
                    if (error.name or "").startswith("levada"):
                        raise  # else it is a module of an extra


def below(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


# ---------------------------------------------------------------- no class can forget it


def test_every_error_of_levada_says_one_printable_line() -> None:
    """Those of a future protocol too: what it puts into fields is nobody's concern, as `LevadaError` writes the line."""
    list(modules())
    errors = sorted({cls for cls in below(LevadaError) if cls.__module__.startswith("levada.")}, key=str)
    assert len(errors) > 50
    for cls in errors:
        error = cls(FORGED)
        for field in attrs.fields(cls):
            if field.type in ("str", "str | None"):
                object.__setattr__(error, field.name, FORGED)
        lines = str(error).split("\n") if cls.__name__ == "QueryFailed" else [str(error)]  # Spark's own text, local
        assert all(line.isprintable() for line in lines), (cls, str(error))
        assert "ERROR all is lost" in str(error) or cls.__name__ in ("OperationError", "Refuse"), cls


def test_every_reason_in_an_event_is_one_printable_line() -> None:
    """What cores and carriers tell their owners goes into logs as it is."""
    found = 0
    for module in modules():
        if not module.__name__.startswith("levada.transports."):
            continue
        for cls in vars(module).values():
            if not (isinstance(cls, type) and cls.__module__ == module.__name__ and attrs.has(cls)):
                continue
            if not (module.__name__.endswith(".events") or cls is CloseReason):
                continue
            for field in attrs.fields(cls):
                if field.name in ("reason", "text", "detail") and field.type == "str":
                    found += 1
                    assert field.converter is not None, f"{cls}.{field.name}: say attrs.field(converter=printable)"
                    assert field.converter(FORGED) == SHOWN
    assert found >= 12


# ---------------------------------------------------------------- MAOP

MAOP = MemoryConfig(shape="connection")


@asynccontextmanager
async def maop_server(answer: Result, url: str = "memory://raw", config: Any = MAOP) -> AsyncIterator[Any]:
    """A server that says what it likes; gives a function that waits for its connection."""
    connections: list[Any] = []
    there = trio.Event()

    async def accept(listener: Any, *, task_status: Any) -> None:
        task_status.started(listener.url)
        connection = (await listener.accept()).accept()
        await connection.handshake()
        stream = await connection.accept_stream()
        while await stream.receive_some():
            pass
        stream.send_nowait(answer.encode(), fin=True)
        connections.append(connection)
        there.set()
        await connection.wait_closed()

    async def connection() -> Any:
        await there.wait()
        return connections[0]

    async with carriers.listen(url, config) as listener, trio.open_nursery() as nursery:
        connection.url = await nursery.start(accept, listener)  # type: ignore[attr-defined]
        yield connection
        nursery.cancel_scope.cancel()


APPROVED = Result(Version(1, 0, 0), FORGED, bytes(16), FORGED)
DISAPPROVED = Result(Version(1, 0, 0), FORGED, None, "", 1, 0, FORGED)


async def test_maop_a_server_that_disapproves() -> None:
    async with ActorSystem() as system, maop_server(DISAPPROVED):
        with pytest.raises(Disapproved) as refused:
            async with maop.connect(system, "maop+memory://raw", token=b"x"):
                pass
        assert str(refused.value) == f"UNAUTHORIZED: {SHOWN}"


async def test_maop_a_server_that_fails_an_operation_and_closes() -> None:
    async with (
        ActorSystem() as system,
        maop_server(APPROVED) as server,
        maop.connect(system, "maop+memory://raw", token=b"x") as peer,
        trio.open_nursery() as nursery,
    ):

        async def fail() -> None:
            connection = await server()
            stream = await connection.accept_stream()
            control = await connection.open_stream()
            control.send_nowait(Fail(stream.stream_id, 17, FORGED.encode()).encode())
            control.send_nowait(Fail(999, 17, FORGED.encode()).encode())

        nursery.start_soon(fail)
        with pytest.raises(OperationFailed) as failed:
            await peer.request(101, b"?")
        assert str(failed.value) == f"EXECUTION_ERROR: {SHOWN}"
        (await server()).close(0x111, FORGED)
        await wait_all_tasks_blocked()
        with pytest.raises(ConnectionLost) as lost:
            await peer.request(101, b"?")
        assert SHOWN in str(lost.value)


async def test_maop_a_client_with_texts(log: pytest.LogCaptureFixture) -> None:
    texts = Authentication("Bearer", b"secret", {FORGED: FORGED}, Version(1, 0, 0), FORGED)
    async with (
        ActorSystem() as system,
        maop.serve(system, "maop+memory://desk", {}, authenticate=BearerTokens.of({b"secret": Identity("c")})),
        carriers.dial("memory://desk", MAOP) as connection,
    ):
        assert isinstance(connection, carriers.Connection)
        stream = await connection.open_stream()
        stream.send_nowait(texts.encode(), fin=True)
        while await stream.receive_some():
            pass
        control = await connection.open_stream()
        control.send_nowait(DisconnectRequest(1000, FORGED.encode()).encode())
        await connection.wait_closed()
    assert any(r"disconnects, 1.000 s: bye\r\nERROR" in record.getMessage() for record in log.records)


# ---------------------------------------------------------------- Aqueduct


@message("tests.peer_text.Fail")
class FailSo(Asks[None]):
    text: str


async def ignore(m: Any) -> None:
    """Take it."""


class Failing(Actor[FailSo]):
    @handles
    def fail(self, m: FailSo) -> None:
        self.reply_later().fail(ValueError(m.text))


async def test_aqueduct_a_server_that_closes_with_a_reason() -> None:
    async with (
        carriers.listen("memory://raw", MAOP) as listener,
        ActorSystem() as system,
        trio.open_nursery() as nursery,
    ):

        async def close() -> None:
            connection = (await listener.accept()).accept()  # type: ignore[union-attr]
            await connection.handshake()
            connection.close(2, FORGED)

        nursery.start_soon(close)
        with pytest.raises(ConnectionLost) as lost:
            async with aqueduct.connect(system, "aqueduct+memory://raw", str) as peer:
                await peer.send("x")
        assert SHOWN in str(lost.value)


async def test_aqueduct_an_actor_that_refuses() -> None:
    async with ActorSystem("there") as there, ActorSystem("here") as here:
        there.registry.register("failing", there.spawn(Failing))
        async with (
            aqueduct.serve(there, "aqueduct+memory://desk", ignore, Any, expose={"failing"}),
            aqueduct.connect(here, "aqueduct+memory://desk", object) as peer,
        ):
            ref = await peer.lookup("failing", FailSo)
            with pytest.raises(LevadaError) as failed:
                await ref.ask(FailSo(FORGED))
    assert SHOWN in str(failed.value)
    assert isinstance(failed.value.__cause__, RemoteFailure)
    assert str(failed.value.__cause__) == f"ValueError: {SHOWN}"


# ---------------------------------------------------------------- RSocket and ReactiveSocket


def error_frame(dialect: str, stream_id: int, code: int) -> bytes:
    if dialect == "rsocket":
        return ErrorFrame(stream_id, code, OCTETS).encode()
    return reactivesocket_frames.encode(
        reactivesocket_frames.ERROR, stream_id, 0, code.to_bytes(4, "big"), None, OCTETS
    )[4:]  # messages have no length field


@asynccontextmanager
async def rsocket_server(*answers: bytes) -> AsyncIterator[None]:
    """A server that answers a client's first request with this, message by message."""

    async def serve(listener: Any) -> None:
        stream = await listener.accept()
        await stream.receive()  # SETUP
        await stream.receive()  # the request
        for answer in answers:
            await stream.send(answer)
        try:
            while True:
                await stream.receive()
        except (LevadaError, trio.EndOfChannel):
            await stream.aclose()

    async with (
        carriers.listen("memory://raw", MemoryConfig(shape="messages")) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, listener)
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("code", [0x001, 0x003, 0x101, 0x999])
@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_rsocket_an_error_of_the_connection(dialect: str, code: int) -> None:
    async with ActorSystem() as system, rsocket_server(error_frame(dialect, 0, code)):
        with pytest.raises((ConnectionLost, rsocket.RequestFailed)) as lost:
            async with rsocket.connect(system, f"{dialect}+memory://raw") as peer:
                await peer.request_response(b"?")
        assert SHOWN in str(lost.value)


@pytest.mark.parametrize("code", [0x201, 0x202, 0x203, 0x204, 0x301])
@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_rsocket_an_error_of_a_stream(dialect: str, code: int) -> None:
    first = 1 if dialect == "rsocket" else 2
    answers = (
        [error_frame("rsocket", 0, 0x102)] if dialect == "rsocket" else []
    )  # it is about to close, for whatever reason
    async with ActorSystem() as system, rsocket_server(*answers, error_frame(dialect, first, code)):
        async with rsocket.connect(system, f"{dialect}+memory://raw") as peer:
            with pytest.raises(rsocket.RequestFailed) as failed:
                await peer.request_response(b"?")
        assert str(failed.value) == SHOWN + "\ufffd"
        assert failed.value.data == OCTETS


async def test_rsocket_a_client_with_mime_types_and_a_route(log: pytest.LogCaptureFixture) -> None:
    setup = SetupFrame(
        version=(1, 0),
        keepalive_ms=1000,
        lifetime_ms=10_000,
        metadata_mime_type=FORGED,
        data_mime_type=FORGED,
        payload=Payload(OCTETS, OCTETS),
    )
    async with (
        ActorSystem() as system,
        rsocket.serve(system, "rsocket+memory://desk", ignore),
        carriers.dial("memory://desk") as carrier,
    ):
        stream: Any = carrier
        for frame in (setup.encode(), error_frame("rsocket", 0, 0x101)):
            stream.send_nowait(len(frame).to_bytes(3, "big") + frame)
        while await stream.receive_some():
            pass  # until the server has closed
    assert "refused: the metadata MIME type is not printable ASCII" in log.text


# ---------------------------------------------------------------- Lumberjack


@pytest.mark.parametrize(
    "octets",
    [OCTETS, b"2\x1b" + OCTETS, b"2W\0\0\0\1" + b"2J\0\0\0\1\0\0\0\x30" + OCTETS],
    ids=["version", "type", "JSON"],
)
async def test_lumberjack_a_writer_that_speaks_no_lumberjack(octets: bytes) -> None:
    async with (
        ActorSystem() as system,
        lumberjack.serve(system, "lumberjack+memory://desk", ignore),
        carriers.dial("memory://desk") as stream,
    ):
        stream.send_nowait(octets)  # type: ignore[union-attr]
        await stream.send_eof()  # type: ignore[union-attr]
        with pytest.raises(ConnectionLost):
            while await stream.receive_some():  # type: ignore[union-attr]
                pass
            raise ConnectionLost("ended in order")


# ---------------------------------------------------------------- carriers


async def test_quic_a_peer_that_closes_with_a_reason(certificate: Path, autojump_clock: MockClock) -> None:
    net = SimNet(1, delay=0.01)
    server = QuicConfig(alpn=("x",), certificate=certificate, key=certificate)

    async def close(listener: Any) -> None:
        connection = (await listener.accept()).accept()
        await connection.handshake()
        connection.close(7, FORGED)

    async with (
        listen("quic://server:4433", server, port=net.port("server", 4433)) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(close, listener)
        async with dial(
            "quic://server:4433", QuicConfig(alpn=("x",), ca=certificate), port=net.port("client")
        ) as client:
            reason = await client.wait_closed()
            with pytest.raises(ConnectionLost) as lost:
                await client.accept_stream()
    assert reason == CloseReason(7, SHOWN, by_peer=True)
    assert str(reason) == f"the peer closed it with code 7: {SHOWN}"
    assert str(lost.value).endswith(SHOWN)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: /\x1b[2J\x9b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 \x1b[2J\r\nUpgrade: \x9b\r\n\r\n",
        b"HTTP/1.1 400 no\r\n\x1b[2J: \x9b\r\n\r\n",
    ],
    ids=["location", "reason", "header"],
)
async def test_websocket_a_server_that_refuses_the_handshake(answer: bytes) -> None:
    here, there = memory_streams(MemoryConfig())
    there.send_nowait(answer)
    with pytest.raises(ConnectionLost) as lost:
        await open_over(here, "ws://server/")
    assert str(lost.value).isprintable()


async def test_websocket_a_server_that_closes_with_a_reason() -> None:
    async with carriers.listen("ws://127.0.0.1:0", None) as listener, carriers.dial(listener.url, None) as client:
        server: Any = await listener.accept()
        text = "bye\n\x1b[2J\x9b\u202e"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.aclose, 4000, text)
            with pytest.raises(ConnectionLost) as lost:
                await client.receive()  # type: ignore[union-attr]
        assert r"bye\n\x1b[2J\x9b\u202e" in str(lost.value)


# ---------------------------------------------------------------- what is decoded


def test_a_decode_error_shows_what_came_on_one_line() -> None:
    assert str(DecodeError(FORGED, path=FORGED)) == f"{SHOWN}: {SHOWN}"


# ---------------------------------------------------------------- levada call


@pytest.mark.loopback
@pytest.mark.parametrize(("stream_id", "code", "exit_code"), [(0, 0x003, 2), (1, 0x201, 1)])
def test_levada_call_of_an_rsocket_that_fails(
    capsys: pytest.CaptureFixture[str], stream_id: int, code: int, exit_code: int
) -> None:
    how = ("--setup", "hello") if stream_id == 0 else ("--data", "hello")
    frame = error_frame("rsocket", stream_id, code)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                octets = b""
                while b"hello" not in octets:
                    octets += connection.recv(65_536)
                connection.sendall(len(frame).to_bytes(3, "big") + frame)
                while connection.recv(65_536):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        assert cli.main(["call", f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}", *how]) == exit_code
        thread.join()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.removesuffix("\n").isprintable()
    assert SHOWN in said.err


@pytest.mark.loopback
@pytest.mark.parametrize(("result", "exit_code"), [(DISAPPROVED, 2), (APPROVED, 1)])
def test_levada_call_of_a_maop_server_that_fails(
    capsys: pytest.CaptureFixture[str], certificate: Path, result: Result, exit_code: int
) -> None:
    url: list[str] = []
    listening = threading.Event()

    async def answer() -> None:
        config = QuicConfig(alpn=("maop/1",), certificate=certificate, key=certificate)
        async with maop_server(result, "quic://127.0.0.1:0", config) as server:
            url.append(server.url)
            listening.set()
            connection = await server()
            if result is APPROVED:
                stream = await connection.accept_stream()
                control = await connection.open_stream()
                control.send_nowait(Fail(stream.stream_id, 17, FORGED.encode()).encode())
            await connection.wait_closed()

    thread = threading.Thread(target=trio.run, args=(answer,))
    thread.start()
    assert listening.wait(30)
    arguments = ["call", url[0].replace("quic", "maop", 1), "--ca", str(certificate), "--id", "101", "--data", "x"]
    assert cli.main(arguments) == exit_code
    thread.join()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.removesuffix("\n").isprintable()
    assert SHOWN in said.err
