"""A certificate authority in the memory of a process. Needs ``cryptography``."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

__all__ = ["CertificateAuthority", "common_name"]

_USAGES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
    "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class CertificateAuthority:
    """Signs certificates for servers and clients. Its key is in no file.

    Args:
        name: its common name.
        early: how far other clocks may be behind this one.
        valid: for how long its certificate, and those that it signs, are valid.
    """

    def __init__(self, name: str, early: datetime.timedelta, valid: datetime.timedelta) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = common_name(name)
        self._early = early
        self._valid = valid
        usage = {each: each in ("key_cert_sign", "crl_sign") for each in _USAGES}
        builder = self._builder(self._name, self._key.public_key())
        self.certificate: bytes = self._signed(
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
                x509.KeyUsage(**usage), critical=True
            )
        )
        """Its certificate, in PEM."""

    def sign(self, key: ec.EllipticCurvePublicKey, subject: x509.Name, names: Iterable[x509.GeneralName]) -> bytes:
        """Return a certificate for a public key, in PEM; ``names`` are the alternative names."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        # RFC 5280, section 4.2.1.6: they are critical if there is no other name.
        alternative, alone = x509.SubjectAlternativeName(names), not list(subject)
        return self._signed(
            self._builder(subject, key)
            .add_extension(alternative, critical=alone)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            self._name, subject, key, x509.random_serial_number(), now - self._early, now + self._valid
        ).add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def common_name(name: str) -> x509.Name:
    """Return a name of one part."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
