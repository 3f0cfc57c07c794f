"""Settings of one side, beyond the protocol (`levada.transports.aqueduct.AqueductConfig`), and the meaning of URLs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import attrs
from attrs import validators as v

from levada.actors.stream_carriers import carrier_url
from levada.framework import Codec
from levada.framework.errors import ConfigurationError
from levada.transports.aqueduct import ALPN, AqueductConfig, Headers
from levada.transports.carriers import MemoryConfig, dial, listen

__all__ = ["PeerConfig", "dial_carrier", "listen_carrier"]

_COUNT = [v.instance_of(int), v.ge(1)]


def _headers(pairs: Iterable[tuple[str, bytes]]) -> Headers:
    return tuple(pairs)


@attrs.frozen(kw_only=True)
class PeerConfig:
    """Settings of one side, client or server. Immutable; derive with `attrs.evolve`."""

    core: AqueductConfig = attrs.field(factory=AqueductConfig, validator=v.instance_of(AqueductConfig))
    """The protocol: windows, limits, delays. A server's running handlers also have ``drain`` seconds, from the end of the connection on."""
    carrier: Any = None
    """``QuicConfig`` or `MemoryConfig`; ``None`` for the defaults (a QUIC server needs a certificate). `connect` and `serve` set the
    protocol name and raise the numbers of streams that are too small for `AqueductConfig.max_channels`. A client also sets a keepalive
    if there is none, so that quiet channels last."""
    codec: Codec = attrs.field(factory=Codec, validator=v.instance_of(Codec))
    """Writes and reads messages."""
    headers: Headers = attrs.field(default=(), converter=_headers)
    """Connection headers that the peer sees: pairs of ASCII text and bytes."""
    schema: Literal["refuse", "warn", "off"] = attrs.field(default="refuse", validator=v.in_(("refuse", "warn", "off")))
    """What to do if a message class of the peer is incompatible with the class that has the same tag here: end the connection with an
    error that names the difference, log a warning, or do not compare."""
    early: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Client over QUIC: `connect` does not wait for the server, and the first messages travel with the first packet (0-RTT) if
    `QuicConfig.sessions` has a ticket of an earlier connection. A server handles them when the handshake is complete, so a replay by an
    attacker is never handled. If the server refuses early data, the carrier sends it again."""
    max_connections: int = attrs.field(default=1000, validator=_COUNT)
    """Clients connected to a server at the same time; further ones wait."""
    max_handlers: int = attrs.field(default=100, validator=_COUNT)
    """Messages of one client that an async function handles at the same time; further ones wait in the window."""


def dial_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Connect to an ``aqueduct://`` URL. Source: AQ-14."""
    carrier = carrier_url("aqueduct", url)
    settings = fit(carrier, config, client=True)
    if not config.early:
        return dial(carrier, settings)
    from levada.transports import quic  # an extra

    if not isinstance(settings, quic.QuicConfig) or settings.sessions is None:
        raise ConfigurationError("early data needs QuicConfig(sessions=ClientSessions()), which keeps the tickets")
    return quic.dial(carrier, settings, early=True)


def listen_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Listen at an ``aqueduct://`` URL. Source: AQ-14."""
    carrier = carrier_url("aqueduct", url)
    return listen(carrier, fit(carrier, config, client=False))


def fit(url: str, config: PeerConfig, *, client: bool) -> Any:
    """Complete the carrier's settings: a channel takes a stream of each kind, and the connection takes one more.

    Settings of another carrier than the URL's stay as they are; `dial` and `listen` raise the error.
    """
    streams = config.core.max_channels + 1
    carrier = config.carrier
    scheme = url.partition("://")[0]
    if scheme == "memory":
        carrier = MemoryConfig(shape="connection") if carrier is None else carrier
        if not isinstance(carrier, MemoryConfig):
            return carrier
        return attrs.evolve(
            carrier,
            max_streams_bidi=max(streams, carrier.max_streams_bidi),
            max_streams_uni=max(streams, carrier.max_streams_uni),
        )
    if scheme != "quic":
        return carrier
    from levada.transports.quic import QuicConfig  # an extra

    carrier = QuicConfig() if carrier is None else carrier
    if not isinstance(carrier, QuicConfig):
        return carrier
    return attrs.evolve(
        carrier,
        alpn=(ALPN,),
        keepalive=carrier.keepalive or (carrier.idle_timeout / 3 if client else None),
        max_streams=max(streams, carrier.max_streams),
        max_streams_unidirectional=max(streams, carrier.max_streams_unidirectional),
    )
