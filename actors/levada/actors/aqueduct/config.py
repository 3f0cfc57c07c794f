"""Settings of one side, beyond the protocol (`levada.transports.aqueduct.AqueductConfig`), and the meaning of URLs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal

import attrs
from attrs import validators as v

from levada.actors.fallback import dial_either, fallback_of, over_tls
from levada.actors.stream_carriers import AsWritten, carrier_url
from levada.framework import Codec
from levada.framework.errors import ConfigurationError
from levada.transports.aqueduct import ALPN, QMUX_ALPN, AqueductConfig, Headers
from levada.transports.carriers import MemoryConfig, dial, listen
from levada.transports.carriers.race import Fallback
from levada.transports.core import MAX_CONNECTIONS
from levada.transports.qmux import QmuxConfig

from .fleet import FleetRefs

__all__ = ["AUTHORIZATION", "PeerConfig", "dial_carrier", "listen_carrier"]

AUTHORIZATION: Final = "authorization"
"""Header of a client with a scheme and a token, as in HTTP: ``Bearer`` and a token."""

_COUNT = [v.instance_of(int), v.ge(1)]


def _headers(pairs: Iterable[tuple[str, bytes]]) -> Headers:
    return tuple(pairs)


@attrs.frozen(kw_only=True)
class PeerConfig:
    """Settings of one side, client or server. Immutable; derive with `attrs.evolve`."""

    core: AqueductConfig = attrs.field(factory=AqueductConfig, validator=v.instance_of(AqueductConfig))
    """The protocol: windows, limits, delays. `AqueductConfig.drain_timeout` is also the time of a server's running handlers after the end."""
    carrier: Any = None
    """Settings of the URL's carrier: ``QuicConfig``, ``QmuxConfig`` or `MemoryConfig`; ``None`` for the defaults (a server over QUIC or TLS
    needs a certificate). `connect` and `serve` set the protocol name and raise the numbers of streams that are too small for
    `AqueductConfig.max_channels`. A client over QUIC also sets a keepalive if there is none, so that quiet channels last."""
    fallback: Fallback | None = attrs.field(
        default=None, converter=fallback_of, validator=v.optional(v.instance_of(Fallback))
    )
    """Client over QUIC: ``"tls"`` connects by QMux over TLS to the same host and port if QUIC gets no answer within 250 ms. Certificates and
    windows come from ``carrier``. The settings remember for ten minutes that QUIC did not work at a server, so keep them; a `Fallback`
    has other times. `CarrierInfo.scheme` says which carrier it is."""
    codec: Codec = attrs.field(factory=Codec, validator=v.instance_of(Codec))
    """Writes and reads messages."""
    headers: Headers = attrs.field(default=(), converter=_headers, repr=False)
    """Connection headers that the peer sees: pairs of ASCII text and bytes. A server sends them before `Identity.headers`."""
    schema: Literal["refuse", "warn", "off"] = attrs.field(default="refuse", validator=v.in_(("refuse", "warn", "off")))
    """What to do if a message class of the peer is incompatible with the class that has the same tag here: end the connection with an
    error that names the difference, log a warning, or do not compare."""
    early: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Client over QUIC: `connect` does not wait for the server, and the first messages travel with the first packet (0-RTT) if
    `QuicConfig.sessions` has a ticket of an earlier connection. A server handles them when the handshake is complete, so a replay by an
    attacker is never handled. If the server refuses early data, the carrier sends it again."""
    fleet: FleetRefs | None = attrs.field(default=None, validator=v.optional(v.instance_of(FleetRefs)))
    """The refs of the fleet that this system is a member of. If the peer is a member too, refs of any member may travel to it. The
    listener's ``authenticate`` hook decides which clients count as members: the header ``levada-node`` has the node id of a client."""
    max_connections: int = attrs.field(default=MAX_CONNECTIONS, validator=_COUNT)
    """Clients connected to a server at the same time. At that number, a client that has not been let in makes room for the newest. If there
    is none, new clients wait."""
    max_answer_bytes: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of the answers to one peer's questions that wait for room, or are under way on oneshots. Beyond that an answer above 4 KiB
    is an error instead; an actor that waits for room first (`Reply.room`) does not get that far."""
    max_handlers: int = attrs.field(default=100, validator=_COUNT)
    """Messages of one client that an async function handles at the same time; later ones wait in the window."""


def dial_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Connect to an ``aqueduct://`` URL. Source: AQ-14."""
    carrier = carrier_url("aqueduct", url)
    return AsWritten(url, carrier, partial(_dial, carrier, config))


def _dial(carrier: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    settings = fit(carrier, config, client=True)
    if config.fallback is not None:
        if config.early:
            raise ConfigurationError(
                "early data goes before it is known whether QUIC works: leave `early` or `fallback` out"
            )
        tls = fit("qmux+tls:", attrs.evolve(config, carrier=over_tls(config.carrier)), client=True)
        return dial_either(carrier, settings, tls, config.fallback)
    if not config.early:
        return dial(carrier, settings)
    if config.fleet is not None:
        raise ConfigurationError(
            "early data goes before the peer has said which node it is: leave `early` or `fleet` out"
        )
    from levada.transports import quic  # an extra

    if not isinstance(settings, quic.QuicConfig) or settings.sessions is None:
        raise ConfigurationError("early data needs QuicConfig(sessions=ClientSessions()), which keeps the tickets")
    return quic.dial(carrier, settings, early=True)


def listen_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Listen at an ``aqueduct://`` URL. Source: AQ-14."""
    carrier = carrier_url("aqueduct", url)
    return AsWritten(url, carrier, lambda: listen(carrier, fit(carrier, config, client=False)))


def fit(url: str, config: PeerConfig, *, client: bool) -> Any:
    """Complete the carrier's settings: a channel takes a stream of each kind, and the connection takes one more.

    Settings of a carrier other than the URL's are not changed; `dial` and `listen` raise the error.
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
            max_streams=max(streams, carrier.max_streams),
            max_streams_unidirectional=max(streams, carrier.max_streams_unidirectional),
        )
    if scheme.startswith("qmux+"):
        carrier = QmuxConfig() if carrier is None else carrier
        if not isinstance(carrier, QmuxConfig):
            return carrier
        return attrs.evolve(
            carrier,
            protocols=(QMUX_ALPN,),
            max_streams=max(streams, carrier.max_streams),
            max_streams_unidirectional=max(streams, carrier.max_streams_unidirectional),
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
        keepalive_interval=carrier.keepalive_interval or (carrier.idle_timeout / 3 if client else None),
        max_streams=max(streams, carrier.max_streams),
        max_streams_unidirectional=max(streams, carrier.max_streams_unidirectional),
    )
