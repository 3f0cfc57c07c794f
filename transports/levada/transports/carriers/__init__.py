"""Carriers: what moves octets between two ends, and knows no protocol.

`dial` and `listen` choose the carrier by the scheme of a URL:

========== ================================= ==================================== ==========================
scheme     example                           gives                                settings
========== ================================= ==================================== ==========================
memory     ``memory://name``                 as `MemoryConfig.shape` says         `MemoryConfig`
tcp        ``tcp://127.0.0.1:0``             `ByteStream`                         `TcpConfig`
tls        ``tls://example.org:443``         `ByteStream`                         `TlsConfig`
unix       ``unix:///run/desk.socket``       `ByteStream`                         `UnixConfig`
ws, wss    ``wss://example.org/rsocket``     `MessageStream`                      ``WebSocketConfig``
quic       ``quic://example.org:4433``       `Connection`                         ``QuicConfig``
========== ================================= ==================================== ==========================

What each of them can and cannot do stands in ``docs/reference/carriers.md``.

Example:
    >>> import trio
    >>> async def main() -> bytes:
    ...     async with listen("memory://desk") as listener, dial("memory://desk") as client:
    ...         await client.send_all(b"hello")
    ...         async with await listener.accept() as server:
    ...             return await server.receive_some()
    >>> trio.run(main)
    b'hello'
"""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import urlsplit

from levada.framework.errors import ConfigurationError
from levada.transports.carriers.contracts import (
    ByteStream,
    CarrierInfo,
    CarrierStatistics,
    CloseReason,
    Connection,
    Datagram,
    Incoming,
    Listener,
    MessageStream,
    Stream,
)
from levada.transports.carriers.memory import MemoryConfig
from levada.transports.carriers.tcp import TcpConfig
from levada.transports.carriers.tls import TlsConfig
from levada.transports.carriers.unix import UnixConfig

if TYPE_CHECKING:  # these two are extras
    from levada.transports.carriers.websocket_config import WebSocketConfig
    from levada.transports.quic import QuicConfig

__all__ = [
    "ByteStream",
    "CarrierInfo",
    "CarrierStatistics",
    "CloseReason",
    "Connection",
    "Datagram",
    "Incoming",
    "Listener",
    "MemoryConfig",
    "MessageStream",
    "Stream",
    "TcpConfig",
    "TlsConfig",
    "UnixConfig",
    "dial",
    "listen",
]

_SCHEMES = {
    "memory": ("levada.transports.carriers.memory", "MemoryConfig", ""),
    "tcp": ("levada.transports.carriers.tcp", "TcpConfig", ""),
    "tls": ("levada.transports.carriers.tls", "TlsConfig", ""),
    "unix": ("levada.transports.carriers.unix", "UnixConfig", ""),
    "ws": ("levada.transports.carriers.websocket", "WebSocketConfig", "websocket"),
    "wss": ("levada.transports.carriers.websocket", "WebSocketConfig", "websocket"),
    "quic": ("levada.transports.quic", "QuicConfig", "quic"),
}
"""Module, class of the settings, and the extra that brings what the module needs."""


def _carrier(url: str, config: object) -> tuple[ModuleType, Any]:
    """Return the module for a URL and its settings, the defaults for ``None``."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigurationError(f"not a URL: {url!r}: {error}") from error
    if scheme not in _SCHEMES:
        raise ConfigurationError(f"no carrier for {url!r}: its scheme must be one of {', '.join(_SCHEMES)}")
    name, kind, extra = _SCHEMES[scheme]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").partition(".")[0] == "levada":
            raise
        raise ConfigurationError(f"{scheme}:// needs {error.name}: pip install 'levada[{extra}]'") from error
    expected = getattr(module, kind)
    if config is not None and not isinstance(config, expected):
        raise ConfigurationError(f"{scheme}:// takes a {kind}, got a {type(config).__name__}")
    return module, expected() if config is None else config


@overload
def dial(url: str, config: TcpConfig | TlsConfig | UnixConfig) -> AbstractAsyncContextManager[ByteStream]: ...
@overload
def dial(url: str, config: WebSocketConfig) -> AbstractAsyncContextManager[MessageStream]: ...
@overload
def dial(url: str, config: QuicConfig) -> AbstractAsyncContextManager[Connection]: ...
@overload
def dial(
    url: str, config: MemoryConfig | None = None
) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]: ...
def dial(
    url: str, config: MemoryConfig | TcpConfig | TlsConfig | UnixConfig | WebSocketConfig | QuicConfig | None = None
) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]:
    """Connect; entering the block means connected, leaving it closes after what is queued.

    Args:
        url: see the table of this package.
        config: the settings of the scheme's carrier; ``None`` takes the defaults (in memory those of the listener).

    Raises:
        ConnectionLost: nobody answers there, or not whom it should be.
        ConfigurationError: a URL or settings that cannot work, or an extra that is not installed.
    """
    module, settings = _carrier(url, config)
    carrier: AbstractAsyncContextManager[ByteStream | MessageStream | Connection]
    carrier = module.dial(url) if config is None else module.dial(url, settings)
    return carrier


@overload
def listen(
    url: str, config: TcpConfig | TlsConfig | UnixConfig
) -> AbstractAsyncContextManager[Listener[ByteStream]]: ...
@overload
def listen(url: str, config: WebSocketConfig) -> AbstractAsyncContextManager[Listener[MessageStream]]: ...
@overload
def listen(url: str, config: QuicConfig) -> AbstractAsyncContextManager[Listener[Incoming]]: ...
@overload
def listen(
    url: str, config: MemoryConfig | None = None
) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]: ...
def listen(
    url: str, config: MemoryConfig | TcpConfig | TlsConfig | UnixConfig | WebSocketConfig | QuicConfig | None = None
) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]:
    """Listen; entering the block means bound, `Listener.url` holds the real port; leaving it stops listening.

    Args:
        url: see the table of this package; port 0 takes a free one.
        config: the settings of the scheme's carrier; ``None`` takes the defaults (TLS and QUIC need a certificate).

    Raises:
        ConfigurationError: a URL or settings that cannot work, an address that is taken, or an extra that is not installed.
    """
    module, settings = _carrier(url, config)
    listener: AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]] = module.listen(
        url, settings
    )
    return listener
