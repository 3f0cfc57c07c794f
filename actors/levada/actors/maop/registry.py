"""Who the peers are, and what connections of one identity share: quotas, finished operations, replay windows, the rate of bodies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import attrs
from attrs import validators as v

from levada.framework import Asks
from levada.transports.carriers import CarrierInfo
from levada.transports.maop import DedupStore, ErrorCode, Quota, ReplayWindow, Version

from .config import PeerConfig

__all__ = ["Authentication", "Denied", "Identity", "Registry", "Share"]


def _roles(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _limit() -> int | None:
    return attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(1)]))


@attrs.frozen
class Identity:
    """Who a client is: what `authenticate` returns to let it in."""

    identifier: str | None = None
    """Name for audit and correlation, which the client sees; 36 characters at most are recommended. ``None`` for a new UUID. Source: MA-22."""
    tenant: str = ""
    """Under whose name quotas and answers to idempotency keys are kept; empty: the identifier, or this connection alone if there is none."""
    roles: frozenset[str] = attrs.field(default=frozenset(), converter=_roles)
    """What it may do: `levada.transports.maop.HandlerSpec.role`."""
    max_inflight_ops: int | None = _limit()
    """Operations approved and not ended, instead of the setting's. Source: MA-118."""
    max_buffer_bytes: int | None = _limit()
    """Octets of bodies held, instead of the setting's."""
    max_block_rate: float | None = attrs.field(default=None, validator=v.optional(v.gt(0.0)))
    """Octets a second of bodies, instead of the setting's."""


@attrs.frozen
class Denied:
    """What `authenticate` returns to turn a client away. Source: MA-21 to MA-24."""

    reason: str = "These credentials are not valid here."
    """A sentence for people, which the client sees; no token, no personal data."""
    code: int = ErrorCode.UNAUTHORIZED
    """See `levada.transports.maop.ErrorCode`."""
    retry_after: float | None = None
    """Seconds until another attempt makes sense."""


@attrs.frozen
class Authentication(Asks["Identity | Denied"]):
    """What a client says of itself; format, limits and version have been checked."""

    auth_type: str
    """Scheme of the token, in lower case."""
    token: bytes = attrs.field(repr=False)
    """Opaque; never logged."""
    pairs: dict[str, str]
    """Metadata of the session. A demand for channel binding is checked here, by `authenticate`. Source: MA-19."""
    version: Version
    """What the client speaks."""
    vendor: str
    """The client's program."""
    info: CarrierInfo
    """Where it comes from."""


class Rate:
    """Octets a second, as a moment from which on more may be read. Source: MA-118."""

    __slots__ = ("_octets", "until")

    def __init__(self, octets: float) -> None:
        self._octets = octets
        self.until = 0.0
        """When the octets taken so far are paid for."""

    def take(self, octets: int, now: float) -> None:
        """Count octets."""
        self.until = max(self.until, now) + octets / self._octets


@attrs.define(eq=False)
class Share:
    """What connections of one identity have in common."""

    quota: Quota
    """Operations and octets in use."""
    rate: Rate | None
    """Of bodies; ``None`` without limit."""
    connections: int = 0
    """How many use it now."""


class Registry:
    """The shares of all identities that one listener knows; those that nobody uses are forgotten in turn."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._shares: OrderedDict[str, Share] = OrderedDict()
        self.dedup = DedupStore(ttl=config.dedup_ttl)
        """Answers to operations with an idempotency key."""
        self.replay = ReplayWindow()
        """When each identity last began an operation of a kind."""

    def __len__(self) -> int:
        return len(self._shares)

    def enter(self, name: str, identity: Identity) -> tuple[Share, Callable[[], None]]:
        """Let a connection use the share of `name`; the empty name is a share of its own. Returns it, and what gives it back."""
        share = self._shares.get(name) if name else None
        if share is None:
            core, rate = self._config.core, identity.max_block_rate or self._config.max_block_rate
            quota = Quota(
                identity.max_inflight_ops or core.max_inflight_ops,
                identity.max_buffer_bytes or core.max_buffer_bytes,
                shared=bool(name),
            )
            share = Share(quota, None if rate is None else Rate(rate))
            if name:
                self._shares[name] = share
        else:
            self._shares.move_to_end(name)
        share.connections += 1
        self._forget()

        def leave() -> None:
            share.connections -= 1
            self._forget()

        return share, leave

    def _forget(self) -> None:
        excess = len(self._shares) - self._config.max_identities
        if excess > 0:
            idle = [name for name, share in self._shares.items() if not share.connections]
            for name in idle[:excess]:
                del self._shares[name]
