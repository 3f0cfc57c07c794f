"""Certificates for the tests of TLS, made once for a run, and calls beside a test."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from trio.testing import wait_all_tasks_blocked

from levada.framework.errors import CarrierError


@attrs.frozen
class Authority:
    """A certificate authority of one's own; `ca` is its certificate's file."""

    ca: Path
    issue: Callable[..., Path]
    """`issue(name)` writes a file with a certificate for a host, 127.0.0.1 and localhost included, and its key."""


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def make_authority(folder: Path, title: str = "test authority") -> Authority:
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def builder(subject: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(title))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    top = builder(title, key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    ca = folder / "ca.pem"
    ca.write_bytes(top.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(name: str, *, file: Path | None = None) -> Path:
        own = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            builder(name, own.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key, hashes.SHA256())
        )
        file = file or folder / f"{name}.pem"
        file.write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        return file

    return Authority(ca, issue)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority without trust."""
    return make_authority(tmp_path_factory.mktemp("stranger"), "stranger")


@asynccontextmanager
async def in_background(call: Callable[[], Awaitable[Any]]) -> AsyncGenerator[list[Any]]:
    """Run a call beside the block; the list gets its result, or its error."""
    outcome: list[Any] = []

    async def run() -> None:
        try:
            outcome.append(await call())
        except CarrierError as error:
            outcome.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        yield outcome
