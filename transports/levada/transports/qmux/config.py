"""Settings of QMux connections."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.framework.text import texts

if TYPE_CHECKING:  # a core knows no carrier
    from levada.transports.carriers.memory import MemoryConfig
    from levada.transports.carriers.tcp import TcpConfig
    from levada.transports.carriers.tls import TlsConfig
    from levada.transports.carriers.unix import UnixConfig
    from levada.transports.carriers.websocket_config import WebSocketConfig

__all__ = ["QmuxConfig"]

_PROTOCOL = re.compile(r"qmux-02(\.[!#$%&'*+\-.^_`|~0-9A-Za-z]+)?")

_size: Any = [v.instance_of(int), v.in_(range(1, 1 << 62))]
_streams: Any = [v.instance_of(int), v.in_(range((1 << 60) + 1))]
# The wire has milliseconds, in 62 bits.
_idle: Any = [v.instance_of((int, float)), v.ge(0), v.lt(1 << 52)]
_seconds: Any = [v.instance_of((int, float)), v.gt(0)]


@attrs.frozen(kw_only=True)
class QmuxConfig:
    """Windows, limits and timeouts of one side. Immutable; derive with `attrs.evolve`."""

    stream_window: int = attrs.field(default=1 << 20, validator=_size)
    """Bytes that the peer may send on one stream ahead of the application's reads."""
    connection_window: int = attrs.field(default=8 << 20, validator=_size)
    """Bytes that the peer may send on all streams together, ahead of the application's reads."""
    max_streams: int = attrs.field(default=128, validator=_streams)
    """Bidirectional streams that the peer may have open at once."""
    max_streams_unidirectional: int = attrs.field(default=128, validator=_streams)
    """Unidirectional streams that the peer may have open at once."""
    high_watermark: int = attrs.field(default=256 << 10, validator=_size)
    """Bytes queued on a stream above which `send_all` waits."""
    low_watermark: int = attrs.field(default=128 << 10, validator=[v.instance_of(int), v.ge(0)])
    """Bytes queued on a stream at which `send_all` continues."""
    max_queued: int = attrs.field(default=8 << 20, validator=_size)
    """Bytes queued on all streams together, above which `send_all` waits, except on a stream with an empty queue."""
    datagrams: bool = True
    """Whether datagrams from the peer are accepted."""
    datagram_queue: int = attrs.field(default=256, validator=_size)
    """Most datagrams kept in each direction. When that many are kept, senders wait and receivers lose the oldest."""
    idle_timeout: float = attrs.field(default=30.0, validator=_idle)
    """Seconds without a record from the peer after which the connection is lost; the smaller value of the two ends applies. 0 for never."""
    keepalive_without_streams: bool = False
    """Whether a silent peer is pinged even while no stream is open. Source: QX-35 (D-19)."""
    handshake_timeout: float = attrs.field(default=10.0, validator=_seconds)
    """Seconds within which the peer's parameters must have come. Source: QX-43."""
    record_timeout: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds within which a record that has begun must be complete. Source: QX-43."""
    drain_timeout: float = attrs.field(default=5.0, validator=[v.instance_of((int, float)), v.ge(0)])
    """Seconds after `QmuxCore.drain` in which the peer can receive everything queued."""
    close_timeout: float = attrs.field(default=3.0, validator=_seconds)
    """Seconds to wait for the peer's end after a close. Source: QX-36 (D-20)."""

    protocols: tuple[str, ...] = attrs.field(
        default=("qmux-02.levada",),
        converter=texts,
        validator=[v.min_len(1), v.deep_iterable(v.matches_re(_PROTOCOL))],
    )
    """Identifiers of the application protocol, the preferred one first, such as ``"qmux-02.aqueduct"``: ALPN names of TLS, subprotocols of
    WebSockets. Both ends must have one in common. Other transports negotiate nothing. Source: QX-40 (D-21), QX-41."""
    below: UnixConfig | TcpConfig | TlsConfig | WebSocketConfig | MemoryConfig | None = None
    """Settings of the carrier below, an instance of its config class; `None` for the defaults."""
    plaintext_off_loopback: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Whether ``qmux+tcp`` and ``qmux+ws`` are allowed beyond loopback, where others on the network can read and change everything.
    Source: QX-39."""

    def __attrs_post_init__(self) -> None:
        """Check the watermarks."""
        if self.low_watermark > self.high_watermark:
            raise ConfigurationError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}"
            )
