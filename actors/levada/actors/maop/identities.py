"""Who the peers are, and what connections of one identity share: quotas, finished operations, replay windows, the rate of bodies."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import attrs
from attrs import validators as v

from levada.framework import Asks
from levada.transports.carriers import CarrierInfo
from levada.transports.maop import DedupStore, ErrorCode, MaopCore, Quota, ReplayWindow, Version

from .config import PeerConfig

__all__ = ["Authentication", "Denied", "Identity", "Registry", "Share"]


BINDING_PAIR: Final = "channel-binding"
"""Key of the pair that names the connection, in hexadecimal."""


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
    """Metadata of the session. Source: MA-19."""
    version: Version
    """What the client speaks."""
    vendor: str
    """The client's program."""
    info: CarrierInfo
    """Where it comes from."""

    @property
    def bound(self) -> bool:
        """Whether the client has named this very connection, as ``connect(bind=True)`` does: nobody in between has handed its token on.

        False if it did not, if it named another one, or if the carrier has no channel binding. Source: MA-19, RFC 9266.
        """
        own = self.info.channel_binding
        return own is not None and hmac.compare_digest(self.pairs.get(BINDING_PAIR, "").encode(), own.hex().encode())


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
    cores: set[MaopCore] = attrs.field(factory=set)
    """Of the connections that use it now."""
    confirms: int = 0
    """Operations that were approved on connections that have ended."""
    denies: int = 0
    """Operations that were refused there."""

    def leave(self, core: MaopCore) -> None:
        """A connection has ended."""
        if core in self.cores:
            self.cores.remove(core)
            self.confirms += core.statistic.approved
            self.denies += core.statistic.refused.total()

    @property
    def approval_index(self) -> float:
        """Share of approvals among all decisions, to spot abuse; 1 before there was any. Source: MA-134."""
        confirms = self.confirms + sum(core.statistic.approved for core in self.cores)
        denies = self.denies + sum(core.statistic.refused.total() for core in self.cores)
        return confirms / (confirms + denies) if confirms + denies else 1.0


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

    def enter(self, name: str, identity: Identity, core: MaopCore) -> Share:
        """Let a connection use the share of `name`; the empty name is a share of its own. `Share.leave` ends it."""
        share = self._shares.get(name) if name else None
        if share is None:
            settings, rate = self._config.core, identity.max_block_rate or self._config.max_block_rate
            quota = Quota(
                identity.max_inflight_ops or settings.max_inflight_ops,
                identity.max_buffer_bytes or settings.max_buffer_bytes,
            )
            share = Share(quota, None if rate is None else Rate(rate))
            if name:
                self._shares[name] = share
        else:
            self._shares.move_to_end(name)
        share.cores.add(core)
        self._forget()
        return share

    def approval_indexes(self) -> dict[str, float]:
        """Return the approval index of each identity that is known. Source: MA-134."""
        return {name: share.approval_index for name, share in self._shares.items()}

    def _forget(self) -> None:
        excess = len(self._shares) - self._config.max_identities
        if excess > 0:
            idle = [name for name, share in self._shares.items() if not share.cores]
            for name in idle[:excess]:
                del self._shares[name]
