"""Carriers move bytes between two ends. They know no protocol.

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
qmux+…     ``qmux+unix:///run/desk.socket``  `Connection`                         `QmuxConfig`
========== ================================= ==================================== ==========================

``docs/reference/carriers.md`` describes each of them. `register` adds a scheme.

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

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload
from urllib.parse import urlsplit

import attrs

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
from levada.transports.plugins import Part, Plugins, name_of, resolve

if TYPE_CHECKING:  # these two are extras
    from levada.transports.carriers.websocket_config import WebSocketConfig
    from levada.transports.quic import QuicConfig

__all__ = [
    "ByteStream", "Carrier", "CarrierInfo", "CarrierStatistics", "CloseReason", "Connection", "Datagram", "Incoming", "Listener",
    "MemoryConfig", "MessageStream", "Stream", "TcpConfig", "TlsConfig", "UnixConfig", "dial", "listen", "register",
]  # fmt: skip

C = TypeVar("C")
"""The class of a carrier's settings."""
C_contra = TypeVar("C_contra", contravariant=True)


class Dial(Protocol[C_contra]):
    """A function that connects."""

    def __call__(
        self, url: str, config: C_contra | None, /
    ) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]:
        """Connect. The block begins when the carrier is connected; leaving it sends the queue and closes.

        Args:
            url: the user's URL, scheme included.
            config: the user's settings; ``None`` for the defaults.

        Raises:
            ConnectionLost: no server answers at the URL, or the server is the wrong one.
            ConfigurationError: the URL or the settings cannot work.
        """
        ...


class Listen(Protocol[C_contra]):
    """A function that listens."""

    def __call__(
        self, url: str, config: C_contra, /
    ) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]:
        """Listen. The block begins when the socket is bound; leaving it stops listening.

        Args:
            url: the user's URL; `Listener.url` is the same with the real address.
            config: the user's settings, or `Carrier.config` called without arguments.

        Raises:
            ConfigurationError: the URL or the settings cannot work, or the address is taken.
        """
        ...


@attrs.frozen(kw_only=True)
class Carrier(Generic[C]):
    """A carrier, for `levada.transports.carriers.register` or an entry point of the group ``levada.carriers``.

    Each part is an object, or its name as in an entry point (``"package.module:dial"``), which is imported at its first use.
    """

    dial: Part[Dial[C]]
    """Connects, as `Dial` says. It yields a stream or connection that keeps the contracts of `levada.transports.carriers.contracts`."""
    listen: Part[Listen[C]]
    """Listens, as `Listen` says."""
    config: Part[type[C]]
    """Class of the settings; it must work without arguments. Instances of other classes are refused."""
    requires: str = ""
    """The requirement to install for modules that the parts import, such as ``"levada[quic]"``. The error for a missing module names it."""

    def __str__(self) -> str:
        return name_of(self.dial).partition(":")[0]


def _built_in(module: str, config: str, requires: str = "") -> Carrier[Any]:
    """Describe a carrier of levada: a module with ``dial``, ``listen`` and the class of its settings."""
    return Carrier(dial=f"{module}:dial", listen=f"{module}:listen", config=f"{module}:{config}", requires=requires)


_CARRIERS = Plugins(
    "levada.carriers",
    Carrier,
    {
        "memory": _built_in("levada.transports.carriers.memory", "MemoryConfig"),
        "tcp": _built_in("levada.transports.carriers.tcp", "TcpConfig"),
        "tls": _built_in("levada.transports.carriers.tls", "TlsConfig"),
        "unix": _built_in("levada.transports.carriers.unix", "UnixConfig"),
        "ws": _built_in("levada.transports.carriers.websocket", "WebSocketConfig", requires="levada[websocket]"),
        "wss": _built_in("levada.transports.carriers.websocket", "WebSocketConfig", requires="levada[websocket]"),
        "qmux+memory": _built_in("levada.transports.qmux", "QmuxConfig"),
        "qmux+tcp": _built_in("levada.transports.qmux", "QmuxConfig"),
        "qmux+tls": _built_in("levada.transports.qmux", "QmuxConfig"),
        "qmux+unix": _built_in("levada.transports.qmux", "QmuxConfig"),
        "qmux+ws": _built_in("levada.transports.qmux", "QmuxConfig"),
        "qmux+wss": _built_in("levada.transports.qmux", "QmuxConfig"),
        "quic": _built_in("levada.transports.quic", "QuicConfig", requires="levada[quic]"),
    },
)


def register(scheme: str, carrier: Carrier[Any]) -> None:
    """Add a URL scheme to `dial` and `listen`, and so to every protocol that takes this kind of carrier.

    A package adds a scheme for all programs by an entry point of the group ``levada.carriers``: it has the name of the scheme and refers to
    a `Carrier` (``docs/how-to/add-a-carrier.md``).

    Args:
        scheme: lower-case letters, digits, ``.`` and ``-``.
        carrier: the carrier's functions and settings. Registering an equal one again changes nothing.

    Raises:
        ConfigurationError: the scheme is taken, or is not a valid scheme.
        TypeError: `carrier` is not a `Carrier`.
    """
    _CARRIERS.register(scheme, carrier)


def _carrier(url: str, config: object) -> tuple[Dial[Any], Listen[Any], type[Any]]:
    """Return `dial`, `listen` and the config class of a URL's carrier."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigurationError(f"not a URL: {url!r}: {error}") from error
    carrier = _CARRIERS.find(scheme)
    if carrier is None:
        raise ConfigurationError(
            f"no carrier for {url!r}: the carrier is one of {', '.join(_CARRIERS)}, or of an installed package "
            f"(entry point group levada.carriers){_CARRIERS.hint(scheme)}"
        )
    try:
        dialling, listening, expected = resolve(carrier.dial), resolve(carrier.listen), resolve(carrier.config)
    except ModuleNotFoundError as error:
        if not carrier.requires or (error.name or "").partition(".")[0] == "levada":
            raise
        raise ConfigurationError(f"{scheme}:// needs {error.name}: pip install '{carrier.requires}'") from error
    if config is not None and not isinstance(config, expected):
        raise ConfigurationError(
            f"the config of {scheme}:// is a {type(config).__name__}, wanted a {expected.__name__}"
        )
    return dialling, listening, expected


@overload
def dial(url: str, config: TcpConfig | TlsConfig | UnixConfig) -> AbstractAsyncContextManager[ByteStream]: ...
@overload
def dial(url: str, config: WebSocketConfig) -> AbstractAsyncContextManager[MessageStream]: ...
@overload
def dial(url: str, config: QuicConfig) -> AbstractAsyncContextManager[Connection]: ...
@overload
def dial(url: str, config: object = None) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]: ...
def dial(url: str, config: object = None) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]:
    """Connect. The block begins when the carrier is connected; leaving it sends the queue and closes.

    Args:
        url: see the table of this package.
        config: the settings of the scheme's carrier; ``None`` for the defaults (for ``memory``, the listener's settings).

    Raises:
        ConnectionLost: no server answers at the URL, or its certificate is wrong.
        ConfigurationError: the URL or the settings cannot work, or an extra is not installed.
    """
    dialling, _, _ = _carrier(url, config)
    return dialling(url, config)


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
    url: str, config: object = None
) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]: ...
def listen(
    url: str, config: object = None
) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]:
    """Listen. The block begins when the socket is bound, and `Listener.url` has the real port; leaving it stops listening.

    Args:
        url: see the table of this package; port 0 takes a free one.
        config: the settings of the scheme's carrier; ``None`` for the defaults (TLS and QUIC need a certificate).

    Raises:
        ConfigurationError: the URL or the settings cannot work, the address is taken, or an extra is not installed.
    """
    _, listening, settings = _carrier(url, config)
    return listening(url, settings() if config is None else config)
