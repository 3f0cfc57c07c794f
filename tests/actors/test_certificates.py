"""Which certificates are accepted: the same ones over every carrier with TLS, and on both sides."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from levada.actors import protocols
from levada.actors.authenticators import CertificateNames
from levada.framework import ActorSystem
from levada.framework.errors import CarrierError, ConfigurationError
from levada.transports.carriers import TlsConfig

from .test_mutual_tls import connect, serve

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

CARRIERS = {
    "rsocket+tls": "tls",
    "rsocket+wss": "wss",
    "rsocket+quic": "quic",
    "aqueduct": "quic",
    "aqueduct+tls": "qmux+tls",
}
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

NOW, DAY = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
HOME = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
AUTHORITY = x509.BasicConstraints(ca=True, path_length=None)
SIDES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
OTHER = {"server": "client", "client": "server"}


def usage(*, sign: bool) -> x509.KeyUsage:
    """Signatures only, or nothing but the encryption of keys."""
    rest = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"), False
    )
    return x509.KeyUsage(
        digital_signature=sign, key_encipherment=not sign, encipher_only=False, decipher_only=False, **rest
    )


@attrs.frozen
class Made:
    """A certificate with its key and the certificates above it."""

    certificate: x509.Certificate
    key: Key
    chain: tuple[x509.Certificate, ...] = ()

    @property
    def is_root(self) -> bool:
        return self.certificate.issuer == self.certificate.subject

    def sign(
        self,
        title: str,
        *extensions: x509.ExtensionType,
        key: Key | None = None,
        begins: datetime.datetime = NOW - DAY,
        ends: datetime.datetime = NOW + DAY,
    ) -> Made:
        """Make a certificate below this one."""
        return make(title, *extensions, above=self, key=key, begins=begins, ends=ends)

    def write(self, folder: Path) -> Path:
        """Write the certificate, its chain and its key to a file."""
        file = folder / f"{self.certificate.serial_number}.pem"
        form, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        shown = b"".join(one.public_bytes(form) for one in (self.certificate, *self.chain))
        file.write_bytes(shown + self.key.private_bytes(form, private, serialization.NoEncryption()))
        file.chmod(0o600)
        return file


def make(
    title: str,
    *extensions: x509.ExtensionType,
    above: Made | None = None,
    key: Key | None = None,
    begins: datetime.datetime = NOW - DAY,
    ends: datetime.datetime = NOW + DAY,
) -> Made:
    """Make a certificate, signed by the one above or by itself."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    issuer = name if above is None else above.certificate.subject
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, name, key.public_key(), number, begins, ends)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    made = builder.sign(key if above is None else above.key, hashes.SHA256())
    return Made(made, key, () if above is None or above.is_root else (above.certificate, *above.chain))


Sign = Callable[[Made, str], Made]
"""Makes a certificate for a side below an authority."""

CASES: Mapping[str, tuple[Sign, frozenset[str]]] = {
    "for this side": (lambda ca, side: ca.sign("a", HOME, for_side(side)), frozenset(SIDES)),
    "for any use": (lambda ca, side: ca.sign("a", HOME), frozenset(SIDES)),
    "for both sides": (lambda ca, side: ca.sign("a", HOME, x509.ExtendedKeyUsage([*SIDES.values()])), frozenset(SIDES)),
    "for signatures": (lambda ca, side: ca.sign("a", HOME, usage(sign=True)), frozenset(SIDES)),
    "below another": (lambda ca, side: ca.sign("b", AUTHORITY).sign("a", HOME), frozenset(SIDES)),
    "RSA 2048": (lambda ca, side: ca.sign("a", HOME, key=rsa_key(2048)), frozenset(SIDES)),
    "for the other side": (lambda ca, side: ca.sign("a", HOME, for_side(OTHER[side])), frozenset()),
    "below one for the other side": (
        lambda ca, side: ca.sign("b", AUTHORITY, for_side(OTHER[side])).sign("a", HOME),
        frozenset(),
    ),
    "for code": (
        lambda ca, side: ca.sign("a", HOME, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])),
        frozenset(),
    ),
    "below no authority": (lambda ca, side: ca.sign("b", HOME).sign("a", HOME), frozenset()),
    "of a stranger": (lambda ca, side: make("ca", AUTHORITY).sign("a", HOME), frozenset()),
    "RSA 1024": (lambda ca, side: ca.sign("a", HOME, key=rsa_key(1024)), frozenset()),
    "below RSA 1024": (lambda ca, side: ca.sign("b", AUTHORITY, key=rsa_key(1024)).sign("a", HOME), frozenset()),
    "SHA-1": (lambda ca, side: with_sha1(ca.sign("a", HOME), ca), frozenset()),
    "below SHA-1": (lambda ca, side: with_sha1(ca.sign("b", AUTHORITY), ca).sign("a", HOME), frozenset()),
    "P-192": (lambda ca, side: ca.sign("a", HOME, key=ec.generate_private_key(ec.SECP192R1())), frozenset()),
    "below P-192": (
        lambda ca, side: ca.sign("b", AUTHORITY, key=ec.generate_private_key(ec.SECP192R1())).sign("a", HOME),
        frozenset(),
    ),
    "too old": (lambda ca, side: ca.sign("a", HOME, ends=NOW - DAY / 2), frozenset()),
    "too new": (lambda ca, side: ca.sign("a", HOME, begins=NOW + DAY / 2), frozenset()),
    # Names are those of servers only.
    "common name only": (lambda ca, side: ca.sign("localhost"), frozenset({"client"})),
    "another name": (lambda ca, side: ca.sign("localhost", names("evil.example")), frozenset({"client"})),
    "part of a name": (lambda ca, side: ca.sign("localhost", names("local*")), frozenset({"client"})),
}
"""How a certificate is made, and the sides from which it is accepted."""


def for_side(side: str) -> x509.ExtendedKeyUsage:
    return x509.ExtendedKeyUsage([SIDES[side]])


def names(name: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.DNSName(name)])


def with_sha1(made: Made, above: Made) -> Made:
    """Sign a certificate again; cryptography makes no such signatures."""
    signed = crypto.X509.from_cryptography(made.certificate)
    with pytest.deprecated_call():
        signed.sign(crypto.PKey.from_cryptography_key(above.key), "sha1")
    return attrs.evolve(made, certificate=signed.to_cryptography())


def rsa_key(bits: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


@pytest.fixture(scope="module")
def authority() -> Made:
    return make("ca", AUTHORITY)


@pytest.fixture(scope="module")
def shown(authority: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The file for each case and side."""
    folder = tmp_path_factory.mktemp("certificates")
    return {(name, side): sign(authority, side).write(folder) for name, (sign, _) in CASES.items() for side in SIDES}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_every_carrier_accepts_the_same_certificates(
    authority: Made, shown: dict[tuple[str, str], Path], scheme: str, side: str
) -> None:
    trusted = authority.certificate.public_bytes(serialization.Encoding.PEM)
    good = {side: TlsConfig(ca=trusted, certificate=shown["for this side", side]) for side in SIDES}
    accepted: dict[str, bool] = {}

    def settings(tls: TlsConfig) -> Any:
        return protocols.carrier_settings(CARRIERS[scheme], tls)

    async def try_out(name: str) -> None:
        used = good | {side: attrs.evolve(good[side], certificate=shown[name, side])}
        serving = attrs.evolve(used["server"], client_certificates="required")
        try:
            async with serve(system, f"{scheme}://127.0.0.1:0", CertificateNames(), settings(serving)) as listener:
                url = listener.url.replace("127.0.0.1", "localhost")
                async with connect(system, url, settings(used["client"])) as ask:
                    accepted[name] = bool(await ask())
        except* (
            CarrierError,
            ConfigurationError,
        ):  # the latter: OpenSSL does not even load a certificate that is too weak
            accepted[name] = False

    async with ActorSystem() as system, trio.open_nursery() as nursery:
        for name in CASES:
            nursery.start_soon(try_out, name)
    assert accepted == {name: side in sides for name, (_, sides) in CASES.items()}
