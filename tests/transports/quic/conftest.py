"""Two ends of QUIC on a simulated network."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.simnet import SimNet
from trio._core import _run as trio_run

from levada.transports.quic import DatagramPort, QuicConfig, QuicConnection, QuicListener, dial, listen


@attrs.frozen
class Certificate:
    certificate: Path
    private_key: Path


def make_certificate(folder: Path, key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("server"), x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1 << 70)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    )
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.private_key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    made.private_key.chmod(0o600)  # or there is a warning
    return made


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Ed25519: its signatures have one length, so that packets have too."""
    return make_certificate(tmp_path_factory.mktemp("ed25519"), ed25519.Ed25519PrivateKey.generate())


@pytest.fixture(scope="session")
def ecdsa_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("ecdsa"), ec.generate_private_key(ec.SECP256R1()))


@attrs.frozen
class Ends:
    """Both ends of a connection."""

    client: QuicConnection
    server: QuicConnection
    listener: QuicListener
    net: SimNet


class Lab:
    """Makes configurations and connections."""

    def __init__(self, certificate: Certificate):
        self.certificate = certificate
        self.base = QuicConfig()

    def server(self, **changes: Any) -> QuicConfig:
        own = {"certificate": self.certificate.certificate, "key": self.certificate.private_key}
        return attrs.evolve(self.base, **{**own, **changes})

    def client(self, **changes: Any) -> QuicConfig:
        return attrs.evolve(self.base, **{"ca": self.certificate.certificate, **changes})

    @asynccontextmanager
    async def listening(self, net: SimNet, **changes: Any) -> AsyncIterator[QuicListener]:
        async with self.listening_at(net.port("server", 4433), **changes) as listener:
            yield listener

    def listening_at(self, port: DatagramPort, **changes: Any) -> AbstractAsyncContextManager[QuicListener]:
        return listen("quic://server:4433", self.server(**changes), port=port)

    def dialling(
        self, net: SimNet, *, early: bool = False, host: str = "client", **changes: Any
    ) -> AbstractAsyncContextManager[QuicConnection]:
        return dial("quic://server:4433", self.client(**changes), early=early, port=net.port(host))

    @asynccontextmanager
    async def connected(
        self, net: SimNet | None = None, *, client: dict[str, Any] | None = None, **server: Any
    ) -> AsyncIterator[Ends]:
        net = net or SimNet(1)
        accepted: list[QuicConnection] = []
        ready = trio.Event()

        async def accept(listener: QuicListener) -> None:
            connection = (await listener.accept()).accept()
            await connection.handshake()
            accepted.append(connection)
            ready.set()

        async with self.listening(net, **server) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(accept, listener)
            async with self.dialling(net, **(client or {})) as connection:
                await ready.wait()
                yield Ends(connection, accepted[0], listener, net)


@pytest.fixture
def lab(certificate: Certificate) -> Lab:
    return Lab(certificate)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that fixes the order in which trio runs tasks, and connection ids, tokens and challenges."""
    monkeypatch.setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    octets = random.Random()
    monkeypatch.setattr(os, "urandom", octets.randbytes)

    def fix(seed: int) -> None:
        trio_run._r.seed(seed)
        octets.seed(seed)

    return fix
