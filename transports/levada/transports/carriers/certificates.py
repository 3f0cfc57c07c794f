"""The text of names in a certificate, the same for all TLS carriers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

__all__ = ["WRITTEN", "alternative_name", "subject_text"]

Attribute = tuple[str, str]

WRITTEN = frozenset({"DNS", "URI", "email", "IP Address"})
"""Kinds of alternative names that are written; others are left out."""

_SHORT = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
_SPECIAL = re.compile(r'[,+"\\<>;\x00]|\A[ #]| \Z')


def _escaped(found: re.Match[str]) -> str:
    return r"\00" if found[0] == "\0" else f"\\{found[0]}"


def subject_text(parts: Iterable[Iterable[Attribute]]) -> str | None:
    """Write a subject as in ``"CN=web-01,O=Example"``, in the order of the certificate; ``None`` if it is empty.

    Values are escaped as in RFC 4514, section 2.4, so that a comma inside a value does not end it.

    Args:
        parts: the relative distinguished names, each as pairs of a type, by OpenSSL's long name, and a value.
    """
    written = (
        "+".join(f"{_SHORT.get(kind, kind)}={_SPECIAL.sub(_escaped, value)}" for kind, value in part) for part in parts
    )
    return ",".join(written) or None


def alternative_name(kind: str, value: str) -> str:
    """Write a subject alternative name as in ``"DNS:web-01"``, IP addresses in their shortest form."""
    return f"{kind}:{ipaddress.ip_address(value.strip())}" if kind == "IP Address" else f"{kind}:{value}"
