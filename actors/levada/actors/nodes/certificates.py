"""Identities of the members of a fleet on several machines: an authority in the driver's memory, and a key in the memory of each member.

* `Authority`: made by the driver, and lost with it. It signs one certificate for each node id.
* `MemberKey`: made by each member. The private key never leaves the process, and is in no file that has a name.
* A certificate is for one DNS name, `member_name`, which contains the node id. So a member that dials a node id reaches that member or gets
  an error, and a listener knows the node id of each client. The directory knows whether that node is still a member.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from levada.actors.authority import CertificateAuthority
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig
from levada.transports.qmux import QmuxConfig

__all__ = ["Authority", "Carrier", "MemberKey", "carrier_settings", "member_name", "node_id_of"]

Carrier = Literal["tls", "quic"]
"""The carrier of connections between machines: QMux over TLS, or QUIC."""

VALID: Final = datetime.timedelta(days=3650)
"""Longer than any fleet runs. Certificates only prove identities; the directory decides about membership."""
CLOCKS_DIFFER: Final = datetime.timedelta(days=1)
NEVER: Final = 1e9
"""Seconds. Heartbeats detect hangs and partitions; a carrier's own time-out would mistake a busy handler for one."""
_NAME: Final = re.compile(r"DNS:([0-9a-f]{32})\.node\.levada")


def member_name(node_id: bytes) -> str:
    """Return the DNS name in the certificate of a member.

    Example:
        >>> member_name(bytes(16))
        '00000000000000000000000000000000.node.levada'
    """
    return f"{node_id.hex()}.node.levada"


def node_id_of(names: tuple[str, ...]) -> bytes | None:
    """Return the node id in `CarrierInfo.peer_names`, or None.

    Example:
        >>> node_id_of(("DNS:" + member_name(b"0123456789abcdef"),))
        b'0123456789abcdef'
    """
    found = [match[1] for match in map(_NAME.fullmatch, names) if match]
    return bytes.fromhex(found[0]) if len(found) == 1 else None


class MemberKey:
    """The key of one member."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.public: bytes = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        """The public half, for `Authority.sign`: DER, about 91 bytes."""

    @contextmanager
    def with_certificate(self, certificate: bytes) -> Iterator[str]:
        """Yield the path of a file with the key and a certificate, for the settings of carriers. It is valid within the block.

        The file is in memory and has no name, so nothing remains of it if the process is killed. Needs Linux.
        """
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        descriptor = os.memfd_create("levada-node")
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(pem + certificate)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"


class Authority:
    """Signs the certificates of a fleet. Its key is only in this object."""

    def __init__(self) -> None:
        self._authority = CertificateAuthority("levada fleet", CLOCKS_DIFFER, VALID)
        self.certificate = self._authority.certificate
        """The authority's certificate, which members trust. PEM."""

    def sign(self, public: bytes, node_id: bytes) -> bytes:
        """Return a certificate for a member's key, in PEM.

        Args:
            public: `MemberKey.public`, which may come from a peer.
            node_id: 16 octets. The caller makes sure that no id is signed twice.

        Raises:
            ConfigurationError: `public` is not a P-256 key.
        """
        try:
            key = serialization.load_der_public_key(public)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(f"the public key of a node cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ConfigurationError("the public key of a node is not a P-256 key")
        return self._authority.sign(key, x509.Name([]), [x509.DNSName(member_name(node_id))])


def carrier_settings(
    carrier: Carrier,
    authority: bytes,
    *,
    certificate: str | None = None,
    dials: bytes | None = None,
    clients: Literal["none", "optional", "required"] = "none",
) -> Any:
    """Return the carrier settings of a connection or a listener within a fleet, for ``PeerConfig(carrier=…)``.

    Args:
        carrier: the carrier.
        authority: `Authority.certificate`, the only authority to trust.
        certificate: the path from `MemberKey.with_certificate`; None shows no certificate.
        dials: node id of the member to dial; no other member is accepted.
        clients: whether a listener asks clients for certificates.
    """
    name = None if dials is None else member_name(dials)
    if carrier == "quic":
        try:
            from levada.transports.quic import QuicConfig
        except ModuleNotFoundError as missing:
            raise ConfigurationError(f"QUIC needs {missing.name}: pip install 'levada[quic]'") from missing
        return QuicConfig(
            certificate=certificate, ca=authority, server_name=name, client_certificates=clients, idle_timeout=NEVER
        )
    tls = TlsConfig(certificate=certificate, ca=authority, server_name=name, client_certificates=clients)
    return QmuxConfig(below=tls, idle_timeout=0, record_timeout=NEVER)
