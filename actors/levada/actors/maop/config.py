"""Settings of each side, in addition to the protocol's `levada.transports.maop.MaopConfig`, and the meaning of URLs."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal

import attrs
from attrs import validators as v

from levada.actors.fallback import dial_either, fallback_of, over_tls
from levada.actors.stream_carriers import AsWritten, carrier_url
from levada.framework import Codec
from levada.framework.supervision import doubled
from levada.transports.carriers import MemoryConfig, dial, listen
from levada.transports.carriers.race import Fallback
from levada.transports.core import MAX_CONNECTIONS
from levada.transports.maop import ALPN, QMUX_ALPN, Capability, ErrorCode, MaopConfig
from levada.transports.qmux import QmuxConfig

from .errors import MaopError, OperationFailed, OperationRefused

__all__ = ["PeerConfig", "RetryPolicy", "dial_carrier", "listen_carrier"]

_COUNT: Final = [v.instance_of(int), v.ge(1)]
_RATE: Final[Any] = v.optional(v.gt(0.0))
_STREAMS: Final = 116
"""The least number of streams of each kind that the peer may have open: 100 for operations and 16 for control. Source: MA-129."""
_IDLE: Final = 30.0
"""Seconds of silence that a connection survives at least. Source: MA-129."""
_WINDOW: Final = 10 * 2**20
"""Bytes that the peer may send ahead on a connection. Source: MA-129."""


def _core() -> MaopConfig:
    return MaopConfig(capabilities=Capability(0b11111))


@attrs.frozen(kw_only=True)
class PeerConfig:
    """Settings of one side, client or server. Immutable; derive with `attrs.evolve`."""

    core: MaopConfig = attrs.field(factory=_core, validator=v.instance_of(MaopConfig))
    """The protocol: limits, delays, policies. Idempotency keys go on the wire if the other side accepts them too."""
    carrier: Any = None
    """Settings of the URL's carrier: ``QuicConfig``, ``QmuxConfig`` or `MemoryConfig`; ``None`` for the defaults (a server over QUIC or TLS
    needs a certificate). The protocol name is filled in, and windows and idle time are raised to the minimum for MAOP. Its stream limits
    bound the peer's operations."""
    fallback: Fallback | None = attrs.field(
        default=None, converter=fallback_of, validator=v.optional(v.instance_of(Fallback))
    )
    """Client over QUIC: ``"tls"`` connects by QMux over TLS to the same host and port if QUIC gets no answer within 250 ms. Certificates and
    windows are those of ``carrier``. The settings remember for ten minutes that QUIC did not work at a server, so keep them; a `Fallback`
    has other times. `CarrierInfo.scheme` says which carrier it is."""
    codec: Codec = attrs.field(factory=Codec, validator=v.instance_of(Codec))
    """Writes and reads message classes."""
    cancel_timeout: float = attrs.field(default=5.0, validator=v.ge(0.0))
    """Seconds that a handler's ``on_cancel`` may take."""
    max_running: int = attrs.field(default=1024, validator=_COUNT)
    """Handlers that run at once, over all connections, their ``on_cancel`` included; further operations wait for their turn.

    Source: MA-117.
    """
    max_connections: int = attrs.field(default=MAX_CONNECTIONS, validator=_COUNT)
    """Clients of a server at the same time. At that number, a client that has not been admitted makes room for the newest. If there is none,
    new clients wait."""
    max_attempts: float | None = attrs.field(default=20.0, validator=_RATE)
    """Connections per second from one network address; above this rate a server refuses them unread. ``None``: no limit. Source: MA-128."""
    max_block_rate: float | None = attrs.field(default=None, validator=_RATE)
    """Bytes of bodies that an identity may send per second; above this rate flow-control credit is delayed. Source: MA-118."""
    max_identities: int = attrs.field(default=10_000, validator=_COUNT)
    """Tenants whose quotas are remembered. Beyond that, the idle tenant that was quiet the longest is forgotten."""
    dedup_ttl: float = attrs.field(default=600.0, validator=v.gt(0.0))
    """Seconds that the answer to an operation with an idempotency key is kept. Source: MA-123."""
    log_reasons: Literal["debug", "production"] = attrs.field(
        default="production", validator=v.in_(("debug", "production"))
    )
    """Where reasons that the peer gives are logged, 100 characters of each. ``"production"``: with the code, in the record of the event
    (`info` or `warning`). ``"debug"``: in a separate `debug` record. Source: MA-94."""


MAX_TOKEN: Final = 65_535
"""The longest token, in bytes. Source: MA-18."""


def fit_carrier(url: str, config: PeerConfig) -> PeerConfig:
    """Complete the carrier's settings, so that the log shows the settings in use."""
    return attrs.evolve(config, carrier=_fit(carrier_url("maop", url), config))


def dial_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Connect to a ``maop://`` URL. Source: MA-1."""
    carrier = carrier_url("maop", url)
    return AsWritten(url, carrier, partial(_dial, carrier, config))


def _dial(carrier: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    if config.fallback is None:
        return dial(carrier, config.carrier)
    tls = _fit("qmux+tls:", attrs.evolve(config, carrier=over_tls(config.carrier)))
    return dial_either(carrier, config.carrier, tls, config.fallback)


def listen_carrier(url: str, config: PeerConfig) -> AbstractAsyncContextManager[Any]:
    """Listen at a ``maop://`` URL. Source: MA-1."""
    carrier = carrier_url("maop", url)
    return AsWritten(url, carrier, partial(listen, carrier, config.carrier))


def _fit(url: str, config: PeerConfig) -> Any:
    """Complete the carrier's settings. Source: MA-1, MA-2, MA-125, MA-129.

    Settings of a carrier other than the URL's are not changed; `dial` and `listen` raise the error.
    """
    carrier = config.carrier
    scheme = url.partition("://")[0]
    if scheme == "memory":
        carrier = MemoryConfig(shape="connection") if carrier is None else carrier
        return attrs.evolve(carrier, shape="connection") if isinstance(carrier, MemoryConfig) else carrier
    if scheme.startswith("qmux+"):
        if carrier is None:
            carrier = QmuxConfig(max_streams=_STREAMS, max_streams_unidirectional=_STREAMS)
        if not isinstance(carrier, QmuxConfig):
            return carrier
        return attrs.evolve(
            carrier,
            protocols=(QMUX_ALPN,),
            datagrams=False,
            idle_timeout=max(_IDLE, carrier.idle_timeout) if carrier.idle_timeout else 0.0,
            keepalive_without_streams=True,
            stream_window=max(2**20, carrier.stream_window),
            connection_window=max(_WINDOW, carrier.connection_window),
        )
    if scheme != "quic":
        return carrier
    from levada.transports.quic import QuicConfig  # comes with an extra

    carrier = QuicConfig(max_streams=_STREAMS, max_streams_unidirectional=_STREAMS) if carrier is None else carrier
    if not isinstance(carrier, QuicConfig):
        return carrier
    idle = max(_IDLE, carrier.idle_timeout)
    return attrs.evolve(
        carrier,
        alpn=(ALPN,),
        datagrams=False,
        early_data=False,
        idle_timeout=idle,
        keepalive_interval=idle / 3 if carrier.keepalive_interval is None else carrier.keepalive_interval,
        stream_window=max(2**20, carrier.stream_window),
        connection_window=max(_WINDOW, carrier.connection_window),
    )


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """When and how often a call is repeated. Without a policy nothing is repeated. Source: MA-120, MA-127."""

    attempts: int = attrs.field(default=3, validator=_COUNT)
    """Attempts in total, including the first."""
    initial_backoff: float = attrs.field(default=0.1, validator=v.ge(0.0))
    """Seconds before the first repetition; each further wait is twice as long."""
    max_backoff: float = attrs.field(default=10.0, validator=v.ge(0.0))
    """The longest wait in seconds; a longer hint from the peer still applies."""
    jitter: float = attrs.field(default=0.2, validator=[v.ge(0.0), v.le(1.0)])
    """Share of each wait that is random, so that many callers do not come back in step."""

    def allows(self, error: MaopError, *, keyed: bool) -> bool:
        """Whether an operation that ended with this error may be repeated.

        It may if the peer refused it for lack of capacity or with a hint, if it was certainly not executed, or if it failed and had an
        idempotency key.

        Args:
            error: how it ended.
            keyed: whether it had an idempotency key.
        """
        if isinstance(error, OperationRefused):
            return error.code == ErrorCode.CAPACITY_LIMIT or error.retry_after is not None
        # DUPLICATE_OPERATION: the key belongs to a different body, so repeating cannot help.
        keyed = keyed and error.code != ErrorCode.DUPLICATE_OPERATION
        return isinstance(error, OperationFailed) and (keyed or error.not_executed)

    def delay(self, attempt: int, error: MaopError, lot: random.Random) -> float:
        """Seconds to wait after attempt number `attempt`, counted from 1; never less than the peer's hint."""
        wait = doubled(self.initial_backoff, attempt - 1, self.max_backoff) * (1.0 - self.jitter * lot.random())
        hint = error.retry_after if isinstance(error, OperationRefused) else None
        return max(wait, hint or 0.0)
