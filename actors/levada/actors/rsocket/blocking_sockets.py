"""The sockets of clients for code without an event loop: over TCP, TLS and Unix."""

from __future__ import annotations

import os
import socket
import ssl
import time
from typing import Final, TypeAlias

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import TcpConfig, TlsConfig, UnixConfig
from levada.transports.carriers.streams import host_and_port
from levada.transports.carriers.tcp import set_options
from levada.transports.carriers.tls import make_context
from levada.transports.carriers.unix import check_peer, path_of

__all__ = ["SocketConfig", "open_socket", "socket_settings"]

SocketConfig: TypeAlias = TcpConfig | TlsConfig | UnixConfig

_CARRIERS: Final[dict[str, type[SocketConfig]]] = {"tcp": TcpConfig, "tls": TlsConfig, "unix": UnixConfig}


def socket_settings(url: str, given: object) -> SocketConfig:
    """Return the settings for a carrier's URL, or those that are given; `ConfigurationError` if they do not fit it."""
    scheme = url.partition("://")[0].lower()
    kind = _CARRIERS.get(scheme)
    if kind is None:
        raise ConfigurationError(f"a blocking client has no carrier {scheme}://, wanted one of {', '.join(_CARRIERS)}")
    settings = kind() if given is None else given
    if not isinstance(settings, kind):
        raise ConfigurationError(f"the config of {scheme}:// is a {type(settings).__name__}, wanted a {kind.__name__}")
    return settings


def open_socket(url: str, config: SocketConfig, timeout: float | None) -> socket.socket:
    """Connect to a carrier's URL. Blocks; arguments and errors are as for `levada.actors.rsocket.blocking.connect`."""
    match config:
        case UnixConfig():
            return _open_unix(path_of(url), config, timeout)
        case TlsConfig():
            return _open_tls(*host_and_port(url, "tls"), config, timeout)
        case TcpConfig():
            return _open_tcp(*host_and_port(url, "tcp"), config, timeout)


def _open_unix(path: str, config: UnixConfig, timeout: float | None) -> socket.socket:
    until = time.monotonic() + (config.connect_timeout if timeout is None else timeout)
    pause = 0.001
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.setblocking(False)
    try:
        while not _connected(opened, path):
            if time.monotonic() >= until:
                raise ConnectionLost(f"no connection to {path} in time: the listener's queue is full")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        check_peer(opened, path, config)
    except BaseException:
        opened.close()
        raise
    return opened


def _connected(opened: socket.socket, path: str) -> bool:
    """Connect, if there is room in the listener's queue."""
    try:
        opened.connect(os.fsencode(path))
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {path}: {error}") from error
    return True


def _open_tcp(host: str, port: int, config: TcpConfig, timeout: float | None) -> socket.socket:
    source = None if config.local_address is None else (config.local_address, 0)
    try:
        opened = socket.create_connection((host, port), config.connect_timeout if timeout is None else timeout, source)
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {host}:{port}: {error}") from error
    except UnicodeError as error:
        raise ConfigurationError(f"{host!r} cannot be the name of a host: {error}") from error
    try:
        set_options(opened, config)
    except OSError as error:
        opened.close()
        raise ConnectionLost(f"the peer left as soon as it was connected: {error}") from error
    return opened


def _open_tls(host: str, port: int, config: TlsConfig, timeout: float | None) -> socket.socket:
    context = make_context(config, ssl.Purpose.SERVER_AUTH)
    name = config.server_name or host
    opened = _open_tcp(host, port, config.tcp, timeout)
    try:
        opened.settimeout(config.handshake_timeout if timeout is None else timeout)
        return context.wrap_socket(opened, server_hostname=name)
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConnectionLost(f"the TLS handshake with {host}:{port} failed: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{name!r} cannot be the name of a server: {error}") from error
    finally:
        opened.close()  # a TLS socket has taken it over
