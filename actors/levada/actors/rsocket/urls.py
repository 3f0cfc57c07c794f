"""How URLs of both dialects name carriers."""

from __future__ import annotations

from typing import Final

from levada.framework.errors import ConfigurationError

__all__ = ["ALPN", "carrier_url"]

ALPN: Final = "rsocket"
"""Name of the protocol over QUIC. Source: RS-8."""


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
