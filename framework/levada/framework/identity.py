"""Who a peer is: `Identity`, its `Limits`, and `RemotePeer`, the other end of a connection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs import validators as v

from .errors import ConfigurationError
from .text import printable

__all__ = ["Identity", "Limits", "RemotePeer"]

_MOST = 256  # characters of a name


def _count() -> Any:
    return attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(1)]))


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of one tenant's connections, together, at one listener; None: the listener's own settings decide."""

    max_connections: int | None = _count()
    """Connections at a time. Every listener keeps this limit; the others are for protocols that say so."""
    max_operations: int | None = _count()
    """Operations at a time."""
    max_bytes: int | None = _count()
    """Bytes held for operations at a time."""
    bytes_per_second: float | None = attrs.field(default=None, validator=v.optional(v.gt(0.0)))
    """Bytes received a second."""


def _roles(roles: Iterable[str]) -> frozenset[str]:
    if isinstance(roles, str):
        raise TypeError(f"roles is the text {roles!r}, wanted a set of names")
    found = frozenset(roles)
    if not all(isinstance(role, str) for role in found):
        raise TypeError(f"roles is {roles!r}, wanted a set of names")
    if "" in found:
        raise ConfigurationError("a role needs a name")
    return found


def _headers(headers: Iterable[tuple[str, bytes]]) -> tuple[tuple[str, bytes], ...]:
    pairs = tuple((name, value) for name, value in headers)
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise TypeError(f"a header is {type(name).__name__} and {type(value).__name__}, wanted str and bytes")
    return pairs


def _check_name(_: Any, attribute: Any, value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} is {type(value).__name__}, wanted str")
    if len(value) > _MOST or not value.isprintable():
        raise ConfigurationError(
            f"{attribute.name} is {printable(value, 40)!r}, wanted up to {_MOST} printable characters"
        )


@attrs.frozen
class Identity:
    """Who a peer is. An ``authenticate`` hook returns it to admit a client.

    Raises:
        ConfigurationError: the name or a role is empty, or a name is too long or not printable.
        TypeError: a value has the wrong type.

    Example:
        >>> Identity("ada", roles={"admin"}).tenant
        'ada'
    """

    name: str = attrs.field(validator=_check_name)
    """For logs, quotas and handlers: 1 to 256 printable characters."""
    tenant: str = attrs.field(default="", kw_only=True, validator=_check_name)
    """The name under which `limits` count; if it is left out, `name`."""
    roles: frozenset[str] = attrs.field(default=frozenset(), kw_only=True, converter=_roles)
    """What the peer may do, in the application's own words."""
    limits: Limits = attrs.field(default=Limits(), kw_only=True, validator=v.instance_of(Limits))
    """What the tenant may use."""
    headers: tuple[tuple[str, bytes], ...] = attrs.field(default=(), kw_only=True, converter=_headers, repr=False)
    """Pairs for the server's answer, in protocols whose answer has headers (Aqueduct, AQ-15)."""

    def __attrs_post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("an identity needs a name")
        if not self.tenant:
            object.__setattr__(self, "tenant", self.name)


@attrs.frozen
class RemotePeer:
    """The other end of a connection.

    Example:
        >>> str(RemotePeer("maop", "192.0.2.1:4000", Identity("ada"), None))
        'ada (192.0.2.1:4000)'
    """

    protocol: str
    """Of the connection, for example ``"aqueduct"``."""
    address: str
    """The peer's address: `levada.transports.carriers.CarrierInfo.peer`."""
    identity: Identity | None
    """Who the peer is; None if the listener has no ``authenticate`` hook, and on the client's side."""
    info: Any
    """All facts about the connection: a `levada.transports.carriers.CarrierInfo`."""
    trace_trusted: bool = attrs.field(default=True, kw_only=True)
    """Whether a traced system goes on with the peer's traces; if not, it begins traces of its own, with links to the peer's."""

    def __str__(self) -> str:
        return f"{self.identity.name} ({self.address})" if self.identity is not None else self.address
