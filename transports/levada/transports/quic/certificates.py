"""The server's verification of client certificates, and the names in the certificates of both sides.

OpenSSL verifies the chain, as it does for TLS over TCP and for the certificates of QUIC servers. So a certificate is accepted by all of these
carriers or by none.
"""

from __future__ import annotations

from aioquic import tls
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from levada.transports.carriers.certificates import alternative_name, subject_text

__all__ = ["UNREADABLE", "ClientCertificateRequired", "names", "subject", "verify_client"]

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


def verify_client(certificate: x509.Certificate, chain: list[x509.Certificate], authorities: bytes) -> None:
    """Check that a client's certificate leads to an authority.

    Args:
        certificate: the client's own; the client has already proved that it has the key.
        chain: further certificates that the client sent.
        authorities: the trusted certificates, as PEM.

    Raises:
        tls.Alert: the certificate leads to no authority, is not valid now, or is not meant for clients.
    """
    store = crypto.X509Store()
    for authority in x509.load_pem_x509_certificates(authorities):
        store.add_cert(crypto.X509.from_cryptography(authority))
    try:
        shown = [crypto.X509.from_cryptography(one) for one in chain]
        context = crypto.X509StoreContext(store, crypto.X509.from_cryptography(certificate), shown)
        path = [one.to_cryptography() for one in context.get_verified_chain()]
        meant = all(_for_clients(one) for one in path) and _may_sign(certificate)
    except (crypto.X509StoreContextError, ValueError) as error:  # ValueError: an extension that cannot be read
        raise tls.AlertBadCertificate(f"the client certificate was refused: {error}") from error
    if not meant:
        raise tls.AlertUnsupportedCertificate("the certificate is not for clients (extended key usage)")


def _for_clients(certificate: x509.Certificate) -> bool:
    """Whether the extended key usage allows clients (RFC 5280 section 4.2.1.12). pyOpenSSL cannot make OpenSSL check this."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return ExtendedKeyUsageOID.CLIENT_AUTH in usages


def _may_sign(certificate: x509.Certificate) -> bool:
    """Whether the key usage allows the signature that a client has made (RFC 8446 section 4.4.2.2)."""
    try:
        return certificate.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature
    except x509.ExtensionNotFound:
        return True


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
