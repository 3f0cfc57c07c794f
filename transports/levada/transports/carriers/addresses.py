"""Addresses in their text form: ``HOST:PORT``, as in URLs, in ``Host`` headers and in `CarrierInfo`."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

__all__ = ["host_of", "is_address", "is_loopback", "may_name"]


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


def may_name(host: str, at: str, hosts: tuple[str, ...] = ()) -> bool:
    """Return whether a client may know a server by the host of its request, so that no web page reads it under a name of its own.

    Only domain names can be rebound, and only names with a dot can be had.

    Args:
        host: the ``Host`` header.
        at: ``HOST:PORT`` where the client has reached the server; only at loopback addresses are names checked.
        hosts: further names that are right; ``"*"`` for any.

    >>> may_name("page.example:80", "127.0.0.1:80"), may_name("localhost:80", "127.0.0.1:80")
    (False, True)
    """
    if "*" in hosts or not is_loopback(at):
        return True
    name = host_of(host).rstrip(".")
    return "." not in name or name.endswith(".localhost") or is_address(name) or name in map(str.lower, hosts)
