"""The state that connections of one tenant share: quotas, finished operations, replay windows, body rates."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from levada.actors.multiplexed import Rate
from levada.framework import Identity
from levada.transports.maop import DedupStore, MaopCore, Quota, ReplayWindow

from .config import PeerConfig

__all__ = ["TenantShare", "TenantShares"]


@attrs.define(eq=False)
class TenantShare:
    """State that the connections of one tenant share."""

    quota: Quota
    """Operations and bytes in use."""
    rate: Rate | None = None
    """Limits the bytes of bodies; ``None`` without a limit. Source: MA-118."""
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


class TenantShares:
    """The shares of all tenants that one listener knows; the oldest unused ones are forgotten."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._shares: OrderedDict[str, TenantShare] = OrderedDict()
        self.dedup = DedupStore(ttl=config.dedup_ttl)
        """Answers to operations with an idempotency key."""
        self.replay = ReplayWindow()
        """When each identity last began an operation of each kind."""

    def __len__(self) -> int:
        return len(self._shares)

    def enter(self, identity: Identity, core: MaopCore) -> TenantShare:
        """Give a connection the share of its tenant, with the limits of this identity from now on. `TenantShare.leave` ends the use."""
        settings, limits = self._config.core.gate, identity.limits
        operations = limits.max_operations or settings.max_inflight_ops
        size = limits.max_bytes or settings.max_buffer_bytes
        rate = limits.bytes_per_second or self._config.max_block_rate
        share = self._shares.get(identity.tenant)
        if share is None:
            share = self._shares[identity.tenant] = TenantShare(Quota(operations, size))
        share.quota.max_operations, share.quota.max_bytes = operations, size
        if rate is None:
            share.rate = None
        elif share.rate is None:
            share.rate = Rate(rate)
        else:
            share.rate.bytes_per_second = rate
        self._shares.move_to_end(identity.tenant)
        share.cores.add(core)
        self._forget()
        return share

    def approval_indexes(self) -> dict[str, float]:
        """Return the approval index of each known tenant. Source: MA-134."""
        return {name: share.approval_index for name, share in self._shares.items()}

    def _forget(self) -> None:
        excess = len(self._shares) - self._config.max_identities
        if excess > 0:
            idle = [name for name, share in self._shares.items() if not share.cores]
            for name in idle[:excess]:
                del self._shares[name]
