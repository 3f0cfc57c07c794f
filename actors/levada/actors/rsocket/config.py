"""How the two sides behave, beyond what `levada.transports.rsocket.CoreConfig` says of the protocol."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from levada.actors.single import CarrierConfig
from levada.framework import Codec
from levada.transports.rsocket import CoreConfig, LeaseGrant

from .encoding import COMPOSITE

if TYPE_CHECKING:
    from levada.transports.rsocket.extensions import Authentication

    from .peers import ConnectedPeer

__all__ = ["Backoff", "ClientConfig", "Lease", "ServerConfig"]

_COUNT = [v.instance_of(int), v.ge(1)]

Lease = LeaseGrant | Callable[["ConnectedPeer"], LeaseGrant]
"""What a responder allows: the same again each time it has run out, or what a function of the peer says then (called at once, too)."""


def _composite() -> CoreConfig:
    return CoreConfig(metadata_mime_type=COMPOSITE)


@attrs.frozen(kw_only=True)
class Backoff:
    """How a client tries again when its connection is lost."""

    first: float = attrs.field(default=0.1, validator=v.ge(0.0))
    """Seconds before the first attempt; they double from one to the next."""
    most: float = attrs.field(default=10.0, validator=v.ge(0.0))
    """Seconds at most."""
    jitter: float = attrs.field(default=0.2, validator=[v.ge(0.0), v.le(1.0)])
    """Share of a wait that is drawn by lot, so that many clients do not come back in step."""
    wait: float = attrs.field(default=math.inf, validator=v.ge(0.0))
    """Seconds that a request waits for a connection when there is none; 0: it fails at once."""

    def delay(self, attempt: int, lot: random.Random) -> float:
        """Seconds to wait before the attempt of this number, the first being 1."""
        # The exponent is capped: 2 ** 1100 is no float.
        wait: float = min(self.most, self.first * 2.0 ** min(attempt - 1, 64))
        return wait * (1.0 - self.jitter * lot.random())


@attrs.frozen(kw_only=True)
class _SideConfig:
    """What both sides have."""

    core: CoreConfig = attrs.field(factory=_composite, validator=v.instance_of(CoreConfig))
    """The protocol: keepalive, MIME types, resumption, fragments, limits. By default the metadata is composite (EXT-1)."""
    carrier: CarrierConfig = None
    """Settings of the carrier that the URL names, for example `TlsConfig`; ``None`` for its defaults."""
    codec: Codec = attrs.field(factory=Codec, validator=v.instance_of(Codec))
    """Writes and reads data that is a message class."""
    window: int = attrs.field(default=32, validator=_COUNT)
    """Payloads of a stream or channel that the peer may be ahead of whoever takes them; half a window is granted at a time."""
    high_water: int = attrs.field(default=256 * 1024, validator=_COUNT)
    """Bytes queued on the carrier above which requests and streams wait before they send more."""
    drain: float = attrs.field(default=5.0, validator=v.ge(0.0))
    """Seconds that open streams have to end when this side closes."""
    max_fire_and_forget: int = attrs.field(default=10_000, validator=_COUNT)
    """Fire-and-forget requests of the peer that may be queued or in their handlers at once; one more is dropped and counted."""
    max_fire_and_forget_octets: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of such requests, data and metadata; one more is dropped, too, unless it is the only one."""
    max_request_octets: int = attrs.field(default=64 * 1024 * 1024, validator=_COUNT)
    """Bytes of data and metadata in requests of the peer whose handlers have not ended, and in payloads of channels that wait for their
    handlers. One more request is answered by REJECTED, a channel with one more payload by CANCELED, unless it is the only one. Up to
    4 KiB do not count: `CoreConfig.max_streams` and `window` bound them. Nor do requests without an answer."""
    lease: Lease | None = None
    """Requests of either side need a lease of the other; this is what this side gives (section 10 of the rules)."""
    metadata_pushed: Callable[[ConnectedPeer, bytes], Awaitable[None]] | None = None
    """Called with each METADATA_PUSH, one at a time; of more than 64 that wait, or more than 1 MiB, the oldest are dropped."""


@attrs.frozen(kw_only=True)
class ClientConfig(_SideConfig):
    """How a client behaves. Immutable; derive with `attrs.evolve`."""

    redial: Backoff = attrs.field(factory=Backoff, validator=v.instance_of(Backoff))
    """How to get a new carrier for a session that is resumed; its `Backoff.wait` has no meaning here."""


@attrs.frozen(kw_only=True)
class ServerConfig(_SideConfig):
    """How a server behaves. Immutable; derive with `attrs.evolve`."""

    accept: Callable[[ConnectedPeer], Awaitable[None]] | None = None
    """Called before a client is let in; raises `SetupRejected` with a text for the client to refuse it."""
    authenticate: Callable[[Authentication | None, ConnectedPeer], Awaitable[Any]] | None = None
    """Called with the credentials in SETUP, ``None`` if there are none, and with those of a request that brings its own. What it returns
    is the `principal` of the connection, or of that request; it raises `SetupRejected`, or `RequestRejected`, to refuse."""
    max_connections: int = attrs.field(default=10_000, validator=_COUNT)
    """Clients at once; while there are so many, no more are accepted from the carrier."""
    max_sessions: int = attrs.field(default=1_000, validator=_COUNT)
    """Sessions that can be resumed, those without a carrier included; a SETUP that asks for one more is refused."""
    max_session_octets: int = attrs.field(default=256 * 1024 * 1024, validator=_COUNT)
    """Bytes of sent frames that all these sessions keep, and 48 for each frame. Beyond it the session that keeps the most loses what it
    keeps, and cannot be resumed if its peer has not all of it."""
