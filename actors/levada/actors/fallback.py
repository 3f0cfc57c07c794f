"""The fallback for clients of protocols over many streams: QMux over TLS where networks block UDP, and with it QUIC."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from levada.framework.errors import ConfigurationError
from levada.transports.carriers import Connection, TlsConfig, dial
from levada.transports.carriers.race import Fallback
from levada.transports.qmux import QmuxConfig

if TYPE_CHECKING:  # an extra
    from levada.transports.quic import QuicConfig

__all__ = ["dial_either", "fallback_of", "over_tls"]


def fallback_of(setting: Any) -> Any:
    """Convert a setting: ``"tls"`` is a `Fallback` with the defaults."""
    return Fallback() if setting == "tls" else setting


def over_tls(quic: QuicConfig | None) -> QmuxConfig:
    """Return settings for QMux over TLS with the certificates and limits of settings for QUIC."""
    if quic is None:
        return QmuxConfig(below=TlsConfig())
    tls = TlsConfig(
        certificate=quic.certificate,
        key=quic.key,
        key_password=quic.key_password,
        ca=quic.ca,
        verify=quic.verify,
        server_name=quic.server_name,
        handshake_timeout=quic.handshake_timeout,
    )
    return QmuxConfig(
        below=tls,
        idle_timeout=quic.idle_timeout,
        handshake_timeout=quic.handshake_timeout,
        stream_window=quic.stream_window,
        connection_window=quic.connection_window,
        max_streams=quic.max_streams,
        max_streams_unidirectional=quic.max_streams_unidirectional,
        datagrams=quic.datagrams,
    )


def dial_either(
    url: str, quic: QuicConfig, tls: QmuxConfig, fallback: Fallback
) -> AbstractAsyncContextManager[Connection]:
    """Connect over QUIC or, if that does not work soon, by QMux over TLS to the same host and port.

    Args:
        url: of QUIC.
        quic: settings for QUIC.
        tls: settings for QMux over TLS.
        fallback: has the head start of QUIC, and remembers which carrier worked.

    Raises:
        ConnectionLost: neither works.
        ConfigurationError: the URL is not one of QUIC, or the settings cannot work.
    """
    scheme, _, server = url.partition("://")
    if scheme != "quic":
        raise ConfigurationError(f"a fallback is for QUIC: leave it out for {scheme}://")
    return fallback.dial(server, partial(_dial, url, quic), partial(_dial, f"qmux+tls://{server}", tls))


def _dial(url: str, config: object) -> AbstractAsyncContextManager[Any]:
    return dial(url, config)
