"""A client and a server, on the memory carrier or on QUIC over a simulated network; and a server whose peer is a bare core."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from levada.actors.maop import Call, Identity, Listener, Peer, PeerConfig, connect, serve
from levada.actors.maop.connection import Connection
from levada.actors.maop.entry import connect_over, serve_over
from levada.framework import ActorSystem, message
from levada.transports.carriers.simnet import SimNet
from levada.transports.quic import QuicConfig, dial, listen

TOKENS = {b"secret": Identity("client-1")}


@message("tests.maop.Question")
class Question:
    """A body that is a message."""

    number: int


@message("tests.maop.Answer")
class Answer:
    """What is answered to it."""

    number: int
    text: str = ""


async def echo(call: Call) -> bytes:
    """Answer with the body."""
    return await call.body()


async def nothing(call: Call) -> None:
    """Answer without body."""


@attrs.frozen
class Ends:
    """Both sides of a connection."""

    system: ActorSystem
    listener: Listener
    peer: Peer

    @property
    def client(self) -> Connection:
        return self.peer._connection

    @property
    def server(self) -> Connection:
        (connection,) = self.listener._actor.connections
        return connection

    @property
    def caller(self) -> Peer:
        """What the server calls the client by."""
        return self.server.peer

    def left(self) -> list[int]:
        """Count what may be left behind, on both sides: operations, records, waiting callers, streams but those of signals, places."""
        return [
            count
            for end in (self.client, self.server)
            for count in (
                end.core.operations,
                len(end.operations),
                len(end.executions),
                *map(len, end.credit.values()),
                (0 if end.streams is None else len(end.streams)) - control_streams(end),
                end.shared.scheduler.running + end.shared.scheduler.waiting,
                end.core.quota.operations + end.core.quota.buffered,
            )
        ]


def control_streams(end: Connection) -> int:
    """Count the streams of signals, of both sides."""
    from levada.transports.maop.control import ControlIn

    return len(end.core.pool.streams.keys() | {i for i, e in end.core.streams.items() if isinstance(e, ControlIn)})


NOTHING = [0] * 16

Start = Callable[..., AbstractAsyncContextManager[Ends]]


@pytest.fixture
def start() -> Start:
    """Begin a connection in memory.

    `handlers` are the server's, `client` holds keyword arguments of `connect`, `server` those of `serve`; others are settings of both.
    """

    @asynccontextmanager
    async def begin(
        handlers: Any = None,
        *,
        client: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **changes: Any,
    ) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        serving = {"authenticate": TOKENS, "config": config, **(server or {})}
        calling = {"token": b"secret", "config": config, **(client or {})}
        async with (
            ActorSystem() as system,
            serve(system, "maop+memory://desk", handlers or {}, **serving) as listener,
            connect(system, listener.url, **calling) as peer,
        ):
            yield Ends(system, listener, peer)

    return begin


@pytest.fixture(scope="session")
def quic(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuicConfig, QuicConfig]:
    """Settings of a server and of a client that trusts it."""
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1 << 70)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("server"), x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    file: Path = tmp_path_factory.mktemp("certificate") / "server.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return QuicConfig(alpn=("maop/1",), certificate=file, private_key=file), QuicConfig(alpn=("maop/1",), ca=file)


@pytest.fixture
def start_on_network(quic: tuple[QuicConfig, QuicConfig]) -> Start:
    """Begin a connection over QUIC on a simulated network."""

    @asynccontextmanager
    async def begin(net: SimNet, handlers: Any, *, carrier: Any = None, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        listening = partial(
            listen, "quic://server:4433", attrs.evolve(quic[0], **(carrier or {})), port=net.port("server", 4433)
        )
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        async with (
            ActorSystem() as system,
            serve_over(system, listening, handlers, authenticate=TOKENS, config=config) as listener,
            connect_over(system, dialling, token=b"secret", config=config) as peer,
        ):
            assert listener.url == "maop://server:4433"
            yield Ends(system, listener, peer)

    return begin


async def settled() -> None:
    """Let all signals and timeouts of ended operations pass."""
    await trio.sleep(5)
