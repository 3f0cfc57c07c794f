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
EARLY, VALID = datetime.timedelta(hours=1), datetime.timedelta(days=30)


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
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        from levada.actors.authority import CertificateAuthority, common_name
    except ImportError as error:
        raise ConfigurationError("making certificates needs cryptography: pip install 'levada[quic]'") from error

    authority, own = CertificateAuthority("levada, self-signed", EARLY, VALID), ec.generate_private_key(ec.SECP256R1())
    names = [*map(x509.DNSName, NAMES), *(x509.IPAddress(ipaddress.ip_address(a)) for a in ADDRESSES)]
    certificate = authority.sign(own.public_key(), common_name(NAMES[0]), names)
    secret = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    made = SelfSigned(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made.ca.write_bytes(authority.certificate)
        made.certificate.write_bytes(certificate)
        made.key.unlink(missing_ok=True)
        made.key.touch(mode=0o600)
        made.key.write_bytes(secret)
    except OSError as error:
        raise ConfigurationError(f"cannot write certificates to {folder}: {error}") from error
    return made
