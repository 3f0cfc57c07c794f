"""Identities of peers, and the state that connections of one identity share: quotas, finished operations, replay windows, body rates."""

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
    """A client's identity: `authenticate` returns it to admit the client."""

    identifier: str | None = None
    """Name for audit and correlation, visible to the client; at most 36 characters are recommended. ``None`` for a new UUID. Source: MA-22."""
    tenant: str = ""
    """The name under which quotas and answers to idempotency keys are kept. Empty: the identifier, or only this connection if there is none."""
    roles: frozenset[str] = attrs.field(default=frozenset(), converter=_roles)
    """What the client may do: `levada.transports.maop.HandlerSpec.role`."""
    max_inflight_ops: int | None = _limit()
    """Operations approved and not ended; overrides the setting. Source: MA-118."""
    max_buffer_bytes: int | None = _limit()
    """Bytes of bodies held; overrides the setting."""
    max_block_rate: float | None = attrs.field(default=None, validator=v.optional(v.gt(0.0)))
    """Bytes of bodies per second; overrides the setting."""


@attrs.frozen
class Denied:
    """A refusal: `authenticate` returns it to turn the client away. Source: MA-21 to MA-24."""

    reason: str = "These credentials are not valid here."
    """A sentence for people, visible to the client; no token, no personal data."""
    code: int = ErrorCode.UNAUTHORIZED
    """A `levada.transports.maop.ErrorCode`."""
    retry_after: float | None = None
    """Seconds to wait before another attempt."""


@attrs.frozen
class Authentication(Asks["Identity | Denied"]):
    """A client's claims about itself; format, limits and version have been checked."""

    auth_type: str
    """Scheme of the token, in lower case."""
    token: bytes = attrs.field(repr=False)
    """Opaque; never logged."""
    pairs: dict[str, str]
    """Metadata of the session. Source: MA-19."""
    version: Version
    """The version that the client speaks."""
    vendor: str
    """The name of the client's program."""
    info: CarrierInfo
    """The client's address and other facts from the carrier."""

    @property
    def bound(self) -> bool:
        """Whether the client has named this very connection, as ``connect(bind=True)`` does, so that no third party can have passed its token on.

        False if the client named none or another one, or if the carrier has no channel binding. Source: MA-19, RFC 9266.
        """
        own = self.info.channel_binding
        return own is not None and hmac.compare_digest(self.pairs.get(BINDING_PAIR, "").encode(), own.hex().encode())


class Rate:
    """A limit in bytes per second, kept as the time when more may be read. Source: MA-118."""

    __slots__ = ("_octets", "until")

    def __init__(self, octets: float) -> None:
        self._octets = octets
        self.until = 0.0
        """When the bytes taken so far are paid for."""

    def take(self, octets: int, now: float) -> None:
        """Count bytes."""
        self.until = max(self.until, now) + octets / self._octets


@attrs.define(eq=False)
class Share:
    """State that the connections of one identity share."""

    quota: Quota
    """Operations and bytes in use."""
    rate: Rate | None
    """Limits the bytes of bodies; ``None`` without a limit."""
    cores: set[MaopCore] = attrs.field(factory=set)
    """Cores of the connections that use it now."""
    confirms: int = 0
    """Operations that were approved on connections that have ended."""
    denies: int = 0
    """Operations that were refused on connections that have ended."""

    def leave(self, core: MaopCore) -> None:
        """Remove a connection that has ended."""
        if core in self.cores:
            self.cores.remove(core)
            self.confirms += core.statistic.approved
            self.denies += core.statistic.refused.total()

    @property
    def approval_index(self) -> float:
        """Approvals as a fraction of all decisions, to spot abuse; 1 before the first decision. Source: MA-134."""
        confirms = self.confirms + sum(core.statistic.approved for core in self.cores)
        denies = self.denies + sum(core.statistic.refused.total() for core in self.cores)
        return confirms / (confirms + denies) if confirms + denies else 1.0


class Registry:
    """The shares of all identities that one listener knows; the oldest unused ones are forgotten."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._shares: OrderedDict[str, Share] = OrderedDict()
        self.dedup = DedupStore(ttl=config.dedup_ttl)
        """Answers to operations with an idempotency key."""
        self.replay = ReplayWindow()
        """When each identity last began an operation of each kind."""

    def __len__(self) -> int:
        return len(self._shares)

    def enter(self, name: str, identity: Identity, core: MaopCore) -> Share:
        """Let a connection use the share of `name`; a connection with an empty name gets its own share. `Share.leave` ends the use."""
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
        """Return the approval index of each known identity. Source: MA-134."""
        return {name: share.approval_index for name, share in self._shares.items()}

    def _forget(self) -> None:
        excess = len(self._shares) - self._config.max_identities
        if excess > 0:
            idle = [name for name, share in self._shares.items() if not share.cores]
            for name in idle[:excess]:
                del self._shares[name]
