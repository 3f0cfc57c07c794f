"""A client and a server that keeps what it gets, on the memory carrier or on QUIC over a simulated network."""

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

from levada.actors.aqueduct import Listener, Peer, PeerConfig, connect, serve
from levada.actors.aqueduct.connection import Connection
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import ActorSystem, OneshotReceiver, OneshotSender, Receiver, Sender, channel, message
from levada.transports.carriers.simnet import SimNet
from levada.transports.quic import QuicConfig, dial, listen


@message("tests.aqueduct.Parcel")
class Parcel:
    """Handles of every kind, at every depth."""

    text: str = ""
    sender: Sender[Any] | None = None
    receiver: Receiver[Any] | None = None
    sends_one: OneshotSender[Any] | None = None
    gets_one: OneshotReceiver[Any] | None = None
    many: list[Any] = attrs.field(factory=list)
    named: dict[str, Sender[int]] = attrs.field(factory=dict)
    inner: Parcel | None = None


@attrs.frozen
class Ends:
    """Both sides of a connection."""

    system: ActorSystem
    listener: Listener
    peer: Peer[Any]
    got: Receiver[Any]
    """What the server's handler got."""

    @property
    def client(self) -> Connection:
        return self.peer._connection

    @property
    def server(self) -> Connection:
        (connection,) = self.listener._actor.connections
        return connection

    def left(self) -> tuple[int, ...]:
        """Count what may be left behind, on both sides: halves, unclaimed, tombstones, records, octets, streams but the control stream."""
        return tuple(
            count
            for end in (self.client, self.server)
            for count in (
                len(end.core.halves) - 1,  # the entrypoint
                len(end.core.unclaimed),
                len(end.core.links.tombstones),
                len(end.halves.outbound) + len(end.halves.inbound) - 1,
                end.core.held,
            )
        )


Start = Callable[..., AbstractAsyncContextManager[Ends]]


class Keeper:
    """The handler: hands on what it gets."""

    def __init__(self) -> None:
        self.sender, self.got = channel(Any)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.cancel()
        self.got.close()

    def function(self) -> Callable[[Any], Any]:
        async def keep(m: Any) -> None:
            await self.sender.send(m)

        return keep


@pytest.fixture
def start() -> Start:
    """Begin a connection in memory; keyword arguments are settings of both sides."""

    @asynccontextmanager
    async def begin(item: Any = object, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        with Keeper() as keeper:
            async with (
                ActorSystem() as system,
                serve(system, "aqueduct+memory://desk", keeper.function(), config=config) as listener,
                connect(system, listener.url, item, config=config) as peer,
            ):
                yield Ends(system, listener, peer, keeper.got)

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
    return QuicConfig(alpn=("aqueduct",), certificate=file, private_key=file), QuicConfig(alpn=("aqueduct",), ca=file)


@pytest.fixture
def start_on_network(quic: tuple[QuicConfig, QuicConfig]) -> Start:
    """Begin a connection over QUIC on a simulated network."""

    @asynccontextmanager
    async def begin(net: SimNet, item: Any = object, **changes: Any) -> AsyncIterator[Ends]:
        config = PeerConfig(**changes)
        listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
        dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
        with Keeper() as keeper:
            async with (
                ActorSystem() as system,
                serve_over(system, listening, keeper.function(), Any, config) as listener,
                connect_over(system, dialling, item, config) as peer,
            ):
                assert listener.url == "aqueduct://server:4433"
                yield Ends(system, listener, peer, keeper.got)

    return begin


async def settled() -> None:
    """Let all acks, declarations and nacks pass."""
    await trio.sleep(10)
