"""A throw-away certificate authority: ``levada interop --self-signed`` and the demo show its certificates to their clients."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import attrs

from levada.framework.errors import ConfigurationError

__all__ = ["SelfSigned", "make_certificates"]

NAMES = ("localhost",)
ADDRESSES = ("127.0.0.1", "::1")
VALID = datetime.timedelta(days=30)


@attrs.frozen
class SelfSigned:
    """Files in PEM."""

    ca: Path
    """The authority's certificate, for clients."""
    certificate: Path
    """For localhost, 127.0.0.1 and ::1; clients may show it, too."""
    key: Path
    """Its key, readable by its owner only."""


def make_certificates(folder: Path) -> SelfSigned:
    """Write ``ca.pem``, ``cert.pem`` and ``key.pem``; files of an earlier run are replaced.

    The authority's own key is not kept, so nothing else can ever be signed with it.

    Raises:
        ConfigurationError: the package ``cryptography`` is not installed, or the folder cannot be written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise ConfigurationError("making certificates needs cryptography: pip install 'levada[quic]'") from error

    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "levada, self-signed")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAMES[0])])
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def builder(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        start = now - datetime.timedelta(hours=1)  # clocks differ
        return x509.CertificateBuilder(
            issuer, name, key.public_key(), x509.random_serial_number(), start, now + VALID
        ).add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)

    usage = {
        name: name in ("key_cert_sign", "crl_sign")
        for name in (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        )
    }
    ca = (
        builder(issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(authority, hashes.SHA256())
    )
    names = [*map(x509.DNSName, NAMES), *(x509.IPAddress(ipaddress.ip_address(a)) for a in ADDRESSES)]
    certificate = (
        builder(subject, own)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    made = SelfSigned(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made.ca.write_bytes(ca.public_bytes(pem))
        made.certificate.write_bytes(certificate.public_bytes(pem))
        made.key.unlink(missing_ok=True)
        made.key.touch(mode=0o600)
        made.key.write_bytes(secret)
    except OSError as error:
        raise ConfigurationError(f"cannot write certificates to {folder}: {error}") from error
    return made
