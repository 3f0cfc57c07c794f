"""WebSockets with npm's ws and with a program on wsproto at the other end, as server and as client, plain and over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from levada.framework.errors import ConnectionClosed, ConnectionLost
from levada.transports.carriers.tls import TlsConfig
from levada.transports.carriers.websocket import WebSocketConfig, WebSocketListener, WebSocketStream, dial, listen

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

NODE = Path(__file__).parent / "node"


@attrs.frozen
class Peer:
    """How the other end is started."""

    server: list[str]
    client: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="session", params=["ws", "wsproto"])
def peer(request: pytest.FixtureRequest) -> Peer:
    """Npm's ws, or wsproto with plain sockets."""
    if request.param == "wsproto":
        program = [sys.executable, str(Path(__file__).with_name("websocket_python.py"))]
        return Peer([*program, "serve"], [*program, "call"], {})
    install: Callable[..., Path] = request.getfixturevalue("node_packages")
    server, client = (["node", str(NODE / f"websocket_{role}.cjs")] for role in ("server", "client"))
    return Peer(server, client, {"NODE_PATH": str(install("ws@8.23.0"))})


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a key and a certificate for 127.0.0.1 that has signed itself."""
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1 << 70, now, now + datetime.timedelta(days=1))
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(addresses, critical=False).sign(key, None)
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + signed.public_bytes(Encoding.PEM))
    return path


@pytest.fixture(params=["ws", "wss"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(certificate: Path) -> WebSocketConfig:
    tls = TlsConfig(certificate=certificate, ca=certificate)
    return WebSocketConfig(max_message=6 << 20, subprotocols=("rsocket",), tls=tls)


@asynccontextmanager
async def their_server(peer: Peer, *files: Path) -> AsyncGenerator[int]:
    """A server of theirs, with certificate and key or without; its port."""
    command = [*peer.server, *map(str, files)]
    environment = {**os.environ, **peer.environment}
    pipe = subprocess.PIPE
    process = await trio.lowlevel.open_process(command, stdin=pipe, stdout=pipe, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.receive_some()
        assert line.startswith(b"LISTENING ")
        yield int(line.split()[1])
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()


async def their_client(peer: Peer, url: str, scenario: str, *files: Path) -> Any:
    """Run one scenario of their client; what it found."""
    command = [*peer.client, url, scenario, *map(str, files)]
    environment = {**os.environ, **peer.environment}
    done = await trio.run_process(command, capture_stdout=True, env=environment)
    return json.loads(done.stdout)


# ---------------------------------------------------------------- they are the server


@pytest.fixture
async def server(peer: Peer, scheme: str, certificate: Path) -> AsyncGenerator[str]:
    files = [certificate, certificate] if scheme == "wss" else []
    async with their_server(peer, *files) as port:
        yield f"{scheme}://127.0.0.1:{port}"


async def test_their_server_echoes(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/echo", config) as websocket:
        assert websocket.subprotocol == "rsocket"
        for size in (0, 1, 125, 126, 1023, 1024, 65_535, 65_536, 5 << 20):
            message = random.Random(size).randbytes(size)
            await websocket.send(message)
            assert await websocket.receive() == message


async def test_their_server_echoes_many(server: str, config: WebSocketConfig) -> None:
    wanted = [b"message %d" % i for i in range(5000)]
    async with dial(f"{server}/echo", config) as websocket, trio.open_nursery() as nursery:

        async def send() -> None:
            for message in wanted:
                await websocket.send(message)

        nursery.start_soon(send)
        assert [await websocket.receive() for _ in wanted] == wanted


async def test_their_server_sends_fragments_with_a_ping_between_them(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/fragments", config) as websocket:
        message = random.Random(1).randbytes(100_000)
        await websocket.send(message)
        assert await websocket.receive() == message


async def test_their_server_pings(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/ping", config) as websocket:
        for payload in (b"", b"are you there?", b"x" * 125):
            await websocket.send(payload)
            assert await websocket.receive() == payload


async def test_their_server_answers_our_pings(server: str, config: WebSocketConfig) -> None:
    eager = attrs.evolve(config, keepalive_interval=0.001, keepalive_timeout=5)
    async with dial(f"{server}/echo", eager) as websocket:
        before = websocket.statistics().bytes_received
        async with trio.open_nursery() as nursery:
            nursery.start_soon(websocket.receive)
            while websocket.statistics().bytes_received < before + 3 * 2:  # three empty pongs
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await websocket.send(b"fine")
        assert await websocket.receive() == b"fine"


async def test_their_server_closes(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/close", config) as websocket:
        await websocket.send("grüß dich".encode())
        assert await websocket.receive() == "grüß dich".encode()
        with pytest.raises(ConnectionLost) as caught:
            await websocket.receive()
    assert (caught.value.code, caught.value.detail) == (4001, "the peer closed with code 4001: grüß dich")


async def test_their_server_is_told_how_we_close(server: str, config: WebSocketConfig) -> None:
    for code, reason in ((1000, ""), (1001, "away"), (4999, "ü" * 61)):
        async with dial(f"{server}/echo", config) as websocket:
            await websocket.aclose(code, reason)
        async with dial(f"{server}/last-close", attrs.evolve(config, accept_text=True)) as websocket:
            await websocket.send(b"?")
            assert await websocket.receive() == f"{code} {reason}".encode()


async def test_their_server_cuts_the_connection(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/terminate", config) as websocket:
        await websocket.send(b"cut")
        with pytest.raises(ConnectionLost) as caught:
            await websocket.receive()
    assert caught.value.code is None


async def test_their_server_finds_a_message_too_large(server: str, config: WebSocketConfig) -> None:
    async with dial(f"{server}/echo", config) as websocket:
        await websocket.send(bytes((8 << 20) + 1))
        with pytest.raises(ConnectionLost) as caught:
            await websocket.receive()
    assert caught.value.code == 1009


# ---------------------------------------------------------------- they are the client


Ends = trio.MemorySendChannel[tuple[int | None, str]]


async def echo(websocket: WebSocketStream, ends: Ends) -> None:
    """Send back what comes, until the end; ``close me`` closes with code 4003."""
    async with websocket:
        try:
            while True:
                message = await websocket.receive()
                if message == b"close me":
                    await websocket.aclose(4003, "as you wish")
                await websocket.send(message)
        except ConnectionLost as error:
            await ends.send((error.code, error.detail))
        except ConnectionClosed as error:
            await ends.send((None, error.detail))


@asynccontextmanager
async def echo_server(
    url: str, config: WebSocketConfig
) -> AsyncGenerator[tuple[str, trio.MemoryReceiveChannel[tuple[int | None, str]]]]:
    """Our echo server: its URL, and how its clients ended."""
    ends, ended = trio.open_memory_channel[tuple[int | None, str]](10)

    async def serve(listener: WebSocketListener, nursery: trio.Nursery) -> None:
        while True:
            nursery.start_soon(echo, await listener.accept(), ends)

    async with listen(url, config) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, nursery)
        yield listener.url, ended
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("scenario", "found", "end"),
    [
        (
            "echo",
            {
                "results": dict.fromkeys(map(str, (0, 1, 125, 126, 1023, 1024, 65_535, 65_536, 5 << 20)), True),
                "code": 4002,
                "reason": "",
            },
            (4002, "the peer closed with code 4002: enough"),
        ),
        ("many", {"same": True, "code": 1005, "reason": ""}, (1005, "the peer closed with no code: no reason")),
        (
            "fragments",
            {"data": "one two three", "pong": "between", "code": 1000, "reason": ""},
            (1000, "the peer closed with code 1000: no reason"),
        ),
        ("closed_by_server", {"code": 4003, "reason": "as you wish"}, (None, "this side closed the WebSocket")),
        (
            "subprotocol",
            {"protocol": "rsocket", "code": 1005, "reason": ""},
            (1005, "the peer closed with no code: no reason"),
        ),
        (
            "text",
            {"code": 1003, "reason": "a text message, but only binary ones are accepted (set accept_text)"},
            (
                1003,
                "closed with code 1003: a text message, but only binary ones are accepted (set accept_text)",
            ),
        ),
        (
            "large",
            {"code": 1009, "reason": "message of 6291457 bytes or more, at most 6291456 (raise max_message)"},
            (1009, "closed with code 1009: message of 6291457 bytes or more, at most 6291456 (raise max_message)"),
        ),
        (
            "broken",
            {"code": 1002, "reason": "Reserved bit set unexpectedly"},
            (1002, "closed with code 1002: Reserved bit set unexpectedly"),
        ),
    ],
)
async def test_their_client(
    peer: Peer,
    certificate: Path,
    scheme: str,
    config: WebSocketConfig,
    scenario: str,
    found: Any,
    end: tuple[int | None, str],
) -> None:
    async with echo_server(f"{scheme}://127.0.0.1:0/echo", config) as (url, ended):
        assert await their_client(peer, url, scenario, certificate) == found
        assert await ended.receive() == end


async def test_their_client_is_refused(peer: Peer, certificate: Path, scheme: str, config: WebSocketConfig) -> None:
    async with echo_server(f"{scheme}://127.0.0.1:0/echo", config) as (url, _):
        found = await their_client(peer, url + "/other", "echo", certificate)
    assert found == {"status": 404, "body": "no WebSocket at this path\n"}
