"""The entry points: `dial` and `listen`, over any carrier of bytes or messages."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

import attrs
import trio

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.failure_log import FailureLog
from levada.transports.carriers import memory, tcp, tls, unix
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, Listener
from levada.transports.carriers.websocket_config import Refusal, UpgradeRequest, WebSocketConfig

from .below import Below, OverBytes, OverMessages
from .config import QmuxConfig
from .connection import QmuxConnection
from .frames import DEFAULT_MAX_RECORD
from .listener import QmuxListener

if TYPE_CHECKING:  # an extra
    from levada.transports.carriers.websocket_stream import WebSocketStream

__all__ = ["dial", "dial_over", "listen", "listen_over"]

_PREFIX: Final = "qmux+"
_SETTINGS: Final[dict[str, type[Any]]] = {
    "memory": memory.MemoryConfig,
    "tcp": tcp.TcpConfig,
    "tls": tls.TlsConfig,
    "unix": unix.UnixConfig,
    "ws": WebSocketConfig,
    "wss": WebSocketConfig,
}
"""The config class of each carrier below."""


def _split(url: str) -> tuple[str, SplitResult]:
    """Return the scheme of the carrier below, and the parts of the URL for it."""
    try:
        parts = urlsplit(url.removeprefix(_PREFIX))
        _ = parts.port  # raises if it is not a port
    except ValueError as error:
        raise ConfigurationError(f"not a URL: {url!r}: {error}") from error
    if parts.scheme not in _SETTINGS or not url.startswith(_PREFIX):
        raise ConfigurationError(
            f"expected a URL with {' or '.join(_PREFIX + name for name in _SETTINGS)}, got {url!r}"
        )
    return parts.scheme, parts


def _carrier(scheme: str) -> Any:
    """Return the module of the carrier below."""
    if scheme not in ("ws", "wss"):
        return {"memory": memory, "tcp": tcp, "tls": tls, "unix": unix}[scheme]
    try:
        from levada.transports.carriers import websocket
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"qmux+{scheme}:// needs {error.name}: pip install 'levada[websocket]'") from error
    return websocket


def _settings(scheme: str, config: QmuxConfig) -> Any:
    """Return the settings of the carrier below, with the values that QMux needs."""
    kind = _SETTINGS[scheme]
    settings = kind() if config.below is None else config.below
    if not isinstance(settings, kind):
        raise ConfigurationError(
            f"`below` of qmux+{scheme}:// is a {type(settings).__name__}, wanted a {kind.__name__}"
        )
    if isinstance(settings, tls.TlsConfig):
        return attrs.evolve(_modern(settings, config), alpn=config.protocols)
    if isinstance(settings, WebSocketConfig):
        # QX-41. The WebSocket's own pings are off, since QMux has pings.
        return attrs.evolve(
            settings,
            subprotocols=config.protocols,
            allow=_Allow(config.protocols, settings.allow),
            max_message=DEFAULT_MAX_RECORD,
            accept_text=False,
            leave_faults=True,
            keepalive_interval=None,
            handshake_timeout=min(settings.handshake_timeout, config.handshake_timeout),
            tls=_modern(settings.tls, config),
        )
    return settings


def _modern(settings: tls.TlsConfig, config: QmuxConfig) -> tls.TlsConfig:
    """Restrict settings to TLS 1.3, and to the timeout of the whole handshake. Source: QX-40, QX-43."""
    return attrs.evolve(
        settings,
        minimum_version=ssl.TLSVersion.TLSv1_3,
        handshake_timeout=min(settings.handshake_timeout, config.handshake_timeout),
    )


@attrs.frozen
class _Allow:
    """Refuses clients that offer none of the protocols, then calls the application's own check."""

    protocols: tuple[str, ...]
    others: Callable[[UpgradeRequest], Refusal | None] | None

    def __call__(self, request: UpgradeRequest) -> Refusal | None:
        if not set(self.protocols) & set(request.subprotocols):
            return Refusal(400, f"wanted one of these subprotocols: {', '.join(self.protocols)}")
        return None if self.others is None else self.others(request)


def _check_loopback(scheme: str, address: str, config: QmuxConfig) -> None:
    """Refuse plain TCP beyond loopback, unless the settings ask for it by name. Source: QX-39."""
    if scheme not in ("tcp", "ws") or config.plaintext_off_loopback:
        return
    host = urlsplit(f"//{address}").hostname or ""
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        encrypted = "wss" if scheme == "ws" else "tls"
        raise ConfigurationError(
            f"a connection over {scheme} is not encrypted, and {host} is not loopback: use {encrypted} in the URL, with a certificate, "
            "or set QmuxConfig.plaintext_off_loopback"
        )


@asynccontextmanager
async def dial(url: str, config: QmuxConfig | None = None) -> AsyncIterator[QmuxConnection]:
    """Connect to a server; leaving the block drains for up to 5 s and closes.

    Args:
        url: ``qmux+unix:///path``, ``qmux+tls://host:port``, ``qmux+wss://host:port/path`` and so on.
        config: its field `below` has the settings of the transport.

    Raises:
        ConnectionLost: no server answers at the URL, or it speaks none of `QmuxConfig.protocols`.
        IdleTimeout: the transport was not connected in time.
        ConfigurationError: the URL or the settings cannot work, or the URL means plain TCP beyond loopback.
    """
    config = config or QmuxConfig()
    scheme, _ = _split(url)
    # A WebSocket would send its request before this looks at the address.
    check = {"check": lambda info: _check_loopback(scheme, info.peer, config)} if scheme == "ws" else {}
    async with _carrier(scheme).dial(url.removeprefix(_PREFIX), _settings(scheme, config), **check) as stream:
        info = attrs.evolve(stream.info, scheme=_PREFIX + scheme)
        below: Below
        if scheme in ("ws", "wss"):
            below = OverMessages(stream)
            info = attrs.evolve(info, alpn=stream.subprotocol)
        else:
            below = OverBytes(stream)
        try:
            _check_loopback(scheme, info.peer, config)
            if scheme in ("tls", "ws", "wss") and info.alpn not in config.protocols:
                raise ConnectionLost(f"{info.peer} speaks none of {', '.join(config.protocols)}")
        except BaseException:
            below.abort()
            raise
        async with _open(below, info, config) as connection:
            yield connection


@asynccontextmanager
async def _open(below: Below, info: CarrierInfo, config: QmuxConfig) -> AsyncIterator[QmuxConnection]:
    async with QmuxConnection(below, info, config, is_client=True, since=trio.current_time()) as connection:
        await connection.handshake()
        yield connection


def dial_over(stream: ByteStream, config: QmuxConfig | None = None) -> AbstractAsyncContextManager[QmuxConnection]:
    """Open a connection as the client over an open byte stream, such as one from `levada.transports.carriers.unix.over`.

    Leaving the block drains for up to 5 s and closes the stream.

    Args:
        stream: belongs to the connection from now on.
        config: its field `below` is not used.

    Raises:
        ConnectionLost: the other end has gone, does not speak QMux, or did not send its parameters in time.
    """
    info = attrs.evolve(stream.info, scheme=_PREFIX + stream.info.scheme)
    return _open(OverBytes(stream), info, config or QmuxConfig())


async def _upgrade(
    settings: WebSocketConfig, path: str | None, failures: FailureLog, stream: ByteStream, left: float
) -> WebSocketStream:
    """Open a WebSocket as the server within `left` seconds."""
    hurried = attrs.evolve(settings, handshake_timeout=min(left, settings.handshake_timeout))
    websocket: WebSocketStream = await _carrier("ws").accept_over(stream, hurried, path=path, failures=failures)
    return websocket


@asynccontextmanager
async def listen(url: str, config: QmuxConfig | None = None) -> AsyncIterator[QmuxListener]:
    """Listen for clients. Leaving the block stops listening; accepted connections stay open.

    Args:
        url: as for `dial`; port 0 takes a free one. ``qmux+ws`` and ``qmux+wss`` with a path (also ``/``) serve only this path.
        config: its field `below` has the settings of the transport; TLS needs a certificate there.

    Raises:
        ConfigurationError: the URL or the settings cannot work, the address is taken, or the URL means plain TCP beyond loopback.
    """
    config = config or QmuxConfig()
    scheme, parts = _split(url)
    settings = _settings(scheme, config)
    upgrade = None
    below: AbstractAsyncContextManager[Any]
    if scheme in ("ws", "wss"):
        upgrade = partial(_upgrade, settings, parts.path or None, FailureLog())
        address = _carrier(scheme).below_of_listener(url.removeprefix(_PREFIX))
        below = tls.listen(address, settings.tls) if scheme == "wss" else tcp.listen(address, settings.tcp)
    else:
        below = _carrier(scheme).listen(url.removeprefix(_PREFIX), settings)
    async with below as streams:
        real = urlsplit(streams.url)
        _check_loopback(scheme, real.netloc, config)
        # `geturl` would write a path without an authority as in "unix:/run/desk".
        found = f"{_PREFIX}{scheme}://{real.netloc}{real.path or parts.path}"
        made = QmuxListener(streams, found, config, backlog=settings.backlog, upgrade=upgrade)
        async with made.running() as listener:
            yield listener


def listen_over(
    below: Listener[ByteStream], config: QmuxConfig | None = None
) -> AbstractAsyncContextManager[QmuxListener]:
    """Accept clients from a listener of byte streams, such as a `levada.transports.carriers.unix.HandedListener`.

    Leaving the block closes the listener; accepted connections stay open.

    Args:
        below: belongs to the new listener from now on.
        config: its field `below` is not used.
    """
    return QmuxListener(below, _PREFIX + below.url, config or QmuxConfig(), backlog=1024).running()
