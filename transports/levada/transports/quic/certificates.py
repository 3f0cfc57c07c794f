"""The verification of certificates, and the names in them.

OpenSSL verifies the chain, as it does for TLS over TCP. What it cannot check here, this file does. So a certificate is accepted by all
carriers or by none.
"""

from __future__ import annotations

import ssl

import certifi
from aioquic import tls
from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from levada.transports.carriers.tls import alternative_name, subject_text

__all__ = ["UNREADABLE", "ClientCertificateRequired", "asks_client", "names", "subject", "verify_peer"]

UNREADABLE = (x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)
"""Errors that cryptography raises for a malformed certificate, besides `ValueError`."""

_TYPES = {
    NameOID.COMMON_NAME: "commonName",
    NameOID.LOCALITY_NAME: "localityName",
    NameOID.STATE_OR_PROVINCE_NAME: "stateOrProvinceName",
    NameOID.ORGANIZATION_NAME: "organizationName",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "organizationalUnitName",
    NameOID.COUNTRY_NAME: "countryName",
    NameOID.STREET_ADDRESS: "streetAddress",
    NameOID.DOMAIN_COMPONENT: "domainComponent",
    NameOID.USER_ID: "userId",
    NameOID.EMAIL_ADDRESS: "emailAddress",
    NameOID.SERIAL_NUMBER: "serialNumber",
    NameOID.TITLE: "title",
    NameOID.GIVEN_NAME: "givenName",
    NameOID.SURNAME: "surname",
}
"""OpenSSL's long names of attributes; other attributes are written as numbers."""


class ClientCertificateRequired(tls.Alert):
    """A client showed no certificate (RFC 8446 section 4.4.2.4)."""

    description = tls.AlertDescription.certificate_required


def asks_client(configuration: QuicConfiguration) -> bool:
    """Whether a side asks its peer for a client certificate."""
    return not configuration.is_client and configuration.verify_mode in (ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


def verify_peer(
    certificate: x509.Certificate | None, chain: list[x509.Certificate], configuration: QuicConfiguration
) -> None:
    """Check what a peer has shown, as `verify` does, or that it may show nothing.

    Args:
        certificate: the peer's own; ``None`` if it has shown none.
        chain: further certificates that the peer sent.
        configuration: says which side this is, and what it demands.

    Raises:
        tls.Alert: the certificate is missing, or `verify` refuses it.
    """
    mode = configuration.verify_mode
    if certificate is None:  # also in a resumed session, whose server has shown its certificate before
        if asks_client(configuration) and mode == ssl.CERT_REQUIRED:
            raise ClientCertificateRequired("a client certificate is required")
    elif mode != ssl.CERT_NONE:
        verify(certificate, chain, configuration.cadata, of_client=not configuration.is_client)


def verify(
    certificate: x509.Certificate, chain: list[x509.Certificate], authorities: bytes | None, *, of_client: bool
) -> None:
    """Check the certificate of a peer as OpenSSL does for TLS over TCP. The name of a server has been checked before.

    Args:
        certificate: the peer's own; the peer has already proved that it has the key.
        chain: further certificates that the peer sent.
        authorities: the trusted certificates, as PEM; ``None`` for those of certifi.
        of_client: whether the peer is a client.

    Raises:
        tls.Alert: the certificate leads to no authority, is not valid now, is not meant for this side, or is too weak.
    """
    who = "client" if of_client else "server"
    store = crypto.X509Store()
    if authorities is None:
        store.load_locations(certifi.where())
    else:
        for authority in x509.load_pem_x509_certificates(authorities):
            store.add_cert(crypto.X509.from_cryptography(authority))
    try:
        shown = [crypto.X509.from_cryptography(one) for one in chain]
        context = crypto.X509StoreContext(store, crypto.X509.from_cryptography(certificate), shown)
        path = [one.to_cryptography() for one in context.get_verified_chain()]
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if of_client else ExtendedKeyUsageOID.SERVER_AUTH
        meant = all(_is_for(one, usage) for one in path) and _may_sign(certificate)
        weak = any(map(_is_weak, path))
    except (crypto.X509StoreContextError, ValueError) as error:  # ValueError: an extension that cannot be read
        raise tls.AlertBadCertificate(f"the {who} certificate was refused: {error}") from error
    if not meant:
        raise tls.AlertUnsupportedCertificate(f"the certificate is not for {who}s (key usage)")
    if weak:
        raise tls.AlertBadCertificate(
            f"the {who} certificate was refused: a key or a signature in its chain is too weak"
        )


# pyOpenSSL cannot make OpenSSL check the purpose and the strength of certificates.


def _is_for(certificate: x509.Certificate, usage: x509.ObjectIdentifier) -> bool:
    """Whether the extended key usage allows this side (RFC 5280 section 4.2.1.12)."""
    try:
        return usage in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True


def _may_sign(certificate: x509.Certificate) -> bool:
    """Whether the key usage allows the signature that the peer has made (RFC 8446 section 4.4.2.2)."""
    try:
        return certificate.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature
    except x509.ExtensionNotFound:
        return True


def _is_weak(certificate: x509.Certificate) -> bool:
    """Whether a key or a signature has less than the 112 bits of security that Python's ``ssl`` asks for (OpenSSL's level 2)."""
    key, digest = certificate.public_key(), certificate.signature_hash_algorithm
    if isinstance(key, rsa.RSAPublicKey | dsa.DSAPublicKey) and key.key_size < 2048:
        return True
    if isinstance(key, ec.EllipticCurvePublicKey) and key.key_size < 224:
        return True
    signed_by_itself = certificate.issuer == certificate.subject
    return not signed_by_itself and digest is not None and digest.digest_size < 28


def subject(certificate: x509.Certificate) -> str | None:
    """Return the subject in the form of `CarrierInfo.peer_subject`; ``None`` if it cannot be read."""
    try:
        parts = certificate.subject.rdns
    except (TypeError, ValueError):
        return None
    return subject_text(
        [(_TYPES.get(one.oid, one.oid.dotted_string), str(one.value)) for one in part] for part in parts
    )


def names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the alternative names in the form of `CarrierInfo.peer_names`; empty if they cannot be read."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError, *UNREADABLE):
        return ()
    written = []
    for name in found:
        match name:
            case x509.DNSName():
                written.append(alternative_name("DNS", name.value))
            case x509.UniformResourceIdentifier():
                written.append(alternative_name("URI", name.value))
            case x509.RFC822Name():
                written.append(alternative_name("email", name.value))
            case x509.IPAddress():
                written.append(alternative_name("IP Address", str(name.value)))
            case _:
                pass
    return tuple(written)
