"""The two protocols that these actors speak: a URL's scheme names the dialect, whose core it selects, and the carrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from levada.framework.errors import ConfigurationError
from levada.transports.rsocket import RSocketCore

if TYPE_CHECKING:
    from levada.transports.reactivesocket import ReactiveSocketCore

__all__ = ["ALPN", "CoreFactory", "carrier_url", "core_of"]

ALPN: Final = "rsocket"
"""Name of the protocol over QUIC. Source: RS-8."""
CoreFactory = type[RSocketCore] | type["ReactiveSocketCore"]
"""Makes the core of one connection: the class of one dialect."""


def core_of(dialect: str) -> CoreFactory:
    """Return the class of the core; ReactiveSocket's is imported only here."""
    if dialect == "rsocket":
        return RSocketCore
    from levada.transports.reactivesocket import ReactiveSocketCore

    return ReactiveSocketCore


def carrier_url(url: str) -> tuple[str, str]:
    """Split a URL into the dialect and the carrier's own URL; without a ``+`` in the scheme the carrier is TCP.

    Raises:
        ConfigurationError: the scheme is unknown.

    Example:
        >>> carrier_url("rsocket+wss://example.org/quotes")
        ('rsocket', 'wss://example.org/quotes')
        >>> carrier_url("reactivesocket://127.0.0.1:7000")
        ('reactivesocket', 'tcp://127.0.0.1:7000')
    """
    scheme, separator, rest = url.partition("://")
    dialect, _, carrier = scheme.partition("+")
    if not separator or dialect not in ("rsocket", "reactivesocket"):
        raise ConfigurationError(f"expected rsocket+tcp://… or reactivesocket+tcp://…, got {url!r}")
    return dialect, f"{carrier or 'tcp'}://{rest}"
