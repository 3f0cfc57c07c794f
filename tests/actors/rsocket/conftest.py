"""A certificate for the tests over TLS and QUIC, and the settings of each carrier."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from levada.transports.carriers import TlsConfig
from levada.transports.carriers.websocket import WebSocketConfig
from levada.transports.quic import QuicConfig


@attrs.frozen
class CarrierSettings:
    """What a URL and two configurations need to use one carrier."""

    url: str
    serving: Any = None
    dialling: Any = None


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a self-signed certificate for localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("certificate") / "server.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


@pytest.fixture
def settings(certificate: Path, tmp_path: Path) -> Callable[[str], CarrierSettings]:
    """Make the settings of a carrier by its scheme."""
    serving = TlsConfig(certificate=certificate)
    dialling = TlsConfig(ca=certificate)

    def make(scheme: str) -> CarrierSettings:
        match scheme:
            case "memory":
                return CarrierSettings("memory://desk")
            case "unix":
                return CarrierSettings(f"unix://{tmp_path}/desk.socket")
            case "tls":
                return CarrierSettings("tls://127.0.0.1:0", serving, dialling)
            case "ws":
                return CarrierSettings("ws://127.0.0.1:0/desk")
            case "wss":
                return CarrierSettings(
                    "wss://127.0.0.1:0/", WebSocketConfig(tls=serving), WebSocketConfig(tls=dialling)
                )
            case "quic":
                return CarrierSettings(
                    "quic://127.0.0.1:0",
                    QuicConfig(certificate=certificate, private_key=certificate),
                    QuicConfig(ca=certificate),
                )
        return CarrierSettings("tcp://127.0.0.1:0")

    return make
