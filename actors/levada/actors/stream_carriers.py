"""The carrier of each URL scheme, for protocols over many streams.

Aqueduct and MAOP run over any carrier whose connections are a `levada.transports.carriers.Connection`. The part of a scheme after the
``+`` names the carrier. A carrier with one stream means QMux over that carrier, and without a ``+`` the carrier is QUIC:

================= ==================
scheme            carrier
================= ==================
``maop``          ``quic``
``maop+quic``     ``quic``
``maop+memory``   ``memory``
``maop+tls``      ``qmux+tls``, and so for ``tcp``, ``unix``, ``ws``, ``wss``
``maop+NAME``     ``NAME``, of a package or of the program (`levada.transports.carriers.register`)
================= ==================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

from levada.framework.errors import CarrierError, ConfigurationError, LevadaError

__all__ = ["AsWritten", "carrier_of", "carrier_url", "name_as_written", "url_of"]

T = TypeVar("T")

_QMUX: Final = {name: f"qmux+{name}" for name in ("tls", "tcp", "unix", "ws", "wss")}
_NAMES: Final = {"quic": "", **{carrier: name for name, carrier in _QMUX.items()}}


def carrier_of(name: str) -> str:
    """Return the carrier's own scheme.

    Args:
        name: the part of a URL's scheme after the ``+``; may be empty.
    """
    return _QMUX.get(name, name or "quic")


def carrier_url(protocol: str, url: str) -> str:
    """Return the carrier's own URL.

    Raises:
        ConfigurationError: the scheme belongs to another protocol.

    Example:
        >>> carrier_url("maop", "maop://example.org:4433"), carrier_url("maop", "maop+unix:///run/desk")
        ('quic://example.org:4433', 'qmux+unix:///run/desk')
    """
    scheme, separator, rest = url.partition("://")
    name, _, carrier = scheme.partition("+")
    if not separator or name != protocol:
        raise ConfigurationError(
            f"expected {protocol}://host:port, or {protocol}+CARRIER://… as in {protocol}+tls://host:port, got {url!r}"
        )
    return f"{carrier_of(carrier)}://{rest}"


def url_of(protocol: str, carrier_url: str) -> str:
    """Return the protocol's URL for a carrier's.

    Example:
        >>> url_of("maop", "quic://127.0.0.1:4433"), url_of("maop", "qmux+tls://127.0.0.1:4433")
        ('maop://127.0.0.1:4433', 'maop+tls://127.0.0.1:4433')
    """
    carrier, _, rest = carrier_url.partition("://")
    name = _NAMES.get(carrier, carrier)
    return f"{protocol}{'+' if name else ''}{name}://{rest}"


class AsWritten(AbstractAsyncContextManager[T, "bool | None"]):
    """Open a carrier; its errors while it opens name the URL as the user wrote it.

    A class: the exit stack of a generator would hold a cancelled connection in a cycle.

    Args:
        url: the user's.
        carrier_url: the carrier's.
        opens: dials, or listens.
    """

    def __init__(self, url: str, carrier_url: str, opens: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._url, self._carrier_url, self._opens = url, carrier_url, opens

    async def __aenter__(self) -> T:
        try:
            self._carrier = self._opens()
            return await self._carrier.__aenter__()
        except (CarrierError, ConfigurationError) as error:
            name_as_written(error, self._url, self._carrier_url)
            raise

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._carrier.__aexit__(*error)


def name_as_written(error: LevadaError, url: str, carrier_url: str) -> None:
    """Write the user's URL in place of the carrier's into an error.

    Example:
        >>> error = ConfigurationError("there is no port in 'tls://h': expected tls://host:port")
        >>> name_as_written(error, "maop+tls://h", "qmux+tls://h")
        >>> print(error)
        there is no port in 'maop+tls://h': expected maop+tls://host:port
    """
    written, carrier = (each.partition("://")[0] for each in (url, carrier_url))
    below = re.escape(carrier.removeprefix("qmux+"))  # the carrier of QMux knows only its own URL
    error.detail = re.sub(rf"(?<![\w+])(?:qmux\+)?{below}://", f"{written}://", error.detail)
