"""A certificate that the servers of all protocols show."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

if TYPE_CHECKING:
    from levada.transports.quic import QuicConfig

NAMES = [x509.DNSName("server"), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate, its own authority, and its key. Ed25519: signatures of one length make packets of one length."""
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1 << 70)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(NAMES), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    file = tmp_path_factory.mktemp("certificate") / "server.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


@pytest.fixture(scope="session")
def quic(certificate: Path) -> tuple[QuicConfig, QuicConfig]:
    """Settings of a server and of a client that trusts it."""
    from levada.transports.quic import QuicConfig

    server = QuicConfig(alpn=("aqueduct",), certificate=certificate, key=certificate)
    return server, QuicConfig(alpn=("aqueduct",), ca=certificate)
