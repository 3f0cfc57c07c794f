"""Settings of the two sides, in addition to the protocol's `levada.transports.rsocket.CoreConfig`."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
from attrs import validators as v

from levada.actors.single import CarrierConfig
from levada.framework import Codec
from levada.framework.errors import ConfigurationError
from levada.framework.supervision import doubled
from levada.transports.core import MAX_CONNECTIONS
from levada.transports.rsocket import CoreConfig, LeaseGrant
from levada.transports.rsocket.frames import MAX_U31

from .encoding import COMPOSITE

if TYPE_CHECKING:
    from .peers import ConnectedPeer

__all__ = ["ClientConfig", "Lease", "Reconnect", "ServerConfig"]

_COUNT = [v.instance_of(int), v.ge(1)]

Lease = LeaseGrant | Callable[["ConnectedPeer"], LeaseGrant]
"""A responder's grant: the same one again each time it has run out, or the result of a function of the peer (first called at once)."""


def _composite() -> CoreConfig:
    return CoreConfig(metadata_mime_type=COMPOSITE)


@attrs.frozen(kw_only=True)
class Reconnect:
    """How a client reconnects after its connection is lost."""

    initial_backoff: float = attrs.field(default=0.1, validator=v.ge(0.0))
    """Seconds before the first attempt; each further wait is twice as long."""
    max_backoff: float = attrs.field(default=10.0, validator=v.ge(0.0))
    """The longest wait in seconds."""
    jitter: float = attrs.field(default=0.2, validator=[v.ge(0.0), v.le(1.0)])
    """Share of each wait that is random, so that many clients do not come back in step."""
    wait: float = attrs.field(default=math.inf, validator=v.ge(0.0))
    """Seconds that a request waits for a connection when there is none; 0: it fails at once."""

    def delay(self, attempt: int, lot: random.Random) -> float:
        """Seconds to wait before attempt number `attempt`, counted from 1."""
        return doubled(self.initial_backoff, attempt - 1, self.max_backoff) * (1.0 - self.jitter * lot.random())


@attrs.frozen(kw_only=True)
class _SideConfig:
    """Settings that both sides have."""

    core: CoreConfig = attrs.field(factory=_composite, validator=v.instance_of(CoreConfig))
    """The protocol: keepalive, MIME types, resumption, fragments, limits, `drain_timeout`. By default the metadata is composite (EXT-1)."""
    carrier: CarrierConfig = None
    """Settings of the carrier that the URL names, for example `TlsConfig`; ``None`` for its defaults."""
    codec: Codec = attrs.field(factory=Codec, validator=v.instance_of(Codec))
    """Writes and reads data that is an instance of a message class."""
    window: int = attrs.field(default=32, validator=[*_COUNT, v.le(MAX_U31)])
    """Payloads of a stream or channel that the peer may send ahead of the receiver; half a window is granted at a time."""
    high_watermark: int = attrs.field(default=256 * 1024, validator=_COUNT)
    """Bytes queued on the carrier above which requests and streams wait before they send more."""
    max_fire_and_forget: int = attrs.field(default=10_000, validator=_COUNT)
    """Fire-and-forget requests of the peer that may be queued or in their handlers at once; any beyond that are dropped and counted."""
    max_fire_and_forget_bytes: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of such requests, data and metadata; any beyond that are dropped too, except a request that is alone."""
    max_request_bytes: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of data and metadata in requests of the peer whose handlers have not ended, and in payloads of channels that wait for their
    handlers. Beyond that, a further request is answered with REJECTED and a channel with a further payload with CANCELED, except when it is
    alone. Up to 4 KiB does not count, since `CoreConfig.max_streams` and `window` bound it, nor do requests without an answer."""
    max_answer_bytes: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of answers that wait until the carrier has room (`high_watermark`), since the peer takes them slowly. Meanwhile no further handlers
    begin; the answers of those that run already are errors beyond this limit, except one that is alone. Up to 4 KiB does not count."""
    lease: Lease | None = None
    """Makes requests of either side need a lease from the other; this is the lease that this side gives (section 10 of the rules)."""
    error_texts: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Whether the peer gets the texts of exceptions that handlers raise, other than `RequestFailed` and `DecodeError`. By default it gets an id
    that ends the traceback in the log: texts quote file names, addresses and data."""
    metadata_pushed: Callable[[ConnectedPeer, bytes], Awaitable[None]] | None = None
    """Called with each METADATA_PUSH, one at a time; if more than 64 or more than 1 MiB wait, the oldest are dropped."""

    def credit(self, window: int | None) -> int:
        """Return the window of one request: as given, or else the setting.

        Raises:
            ConfigurationError: REQUEST_N cannot carry it (RS-74, RX-63).
        """
        if window is None:
            return self.window
        if not isinstance(window, int) or not 0 < window <= MAX_U31:
            raise ConfigurationError(f"the window is {window!r}, wanted 1 to {MAX_U31} payloads")
        return window


@attrs.frozen(kw_only=True)
class ClientConfig(_SideConfig):
    """How a client behaves. Immutable; derive with `attrs.evolve`."""

    redial: Reconnect = attrs.field(factory=Reconnect, validator=v.instance_of(Reconnect))
    """How to dial a new carrier for a session that is resumed; its `Reconnect.wait` has no meaning here."""


@attrs.frozen(kw_only=True)
class ServerConfig(_SideConfig):
    """How a server behaves. Immutable; derive with `attrs.evolve`."""

    max_connections: int = attrs.field(default=MAX_CONNECTIONS, validator=_COUNT)
    """Clients at once. At that number, a client that has not been let in, or whose session was left, makes room for the newest. If there is
    none, new clients wait at the carrier."""
    max_sessions: int = attrs.field(default=1_000, validator=_COUNT)
    """Sessions that can be resumed, including sessions without a carrier. A SETUP that asks for one more ends a session without a carrier; if
    there is none, it is refused."""
    max_session_bytes: int = attrs.field(default=256 * 1024 * 1024, validator=_COUNT)
    """Bytes of sent frames that all these sessions keep, plus 48 for each frame. Beyond this limit the session that keeps the most loses its
    frames, and cannot be resumed unless its peer has received all of them."""
