"""Addresses in their text form: ``HOST:PORT``, as in URLs, in ``Host`` headers and in `CarrierInfo`."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

__all__ = ["host_of", "is_address", "is_loopback"]


def host_of(authority: str) -> str:
    """Return the host of ``HOST:PORT`` in lower case, without brackets and the scope of an IPv6 address.

    >>> host_of("[fe80::1%eth0]:80"), host_of("Desk.example")
    ('fe80::1', 'desk.example')
    """
    try:
        return (urlsplit(f"//{authority}").hostname or "").partition("%")[0]
    except ValueError:
        return authority


def is_address(host: str) -> bool:
    """Return whether a host is an address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(authority: str) -> bool:
    """Return whether ``HOST:PORT`` is a loopback address; a name is not.

    >>> is_loopback("[::1]:80"), is_loopback("192.0.2.1:80"), is_loopback("desk/server")
    (True, False, False)
    """
    host = host_of(authority)
    return is_address(host) and ip_address(host).is_loopback
