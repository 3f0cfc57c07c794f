"""State that the connections of one listener, or of one client, share."""

from __future__ import annotations

import attrs

from levada.framework.tracing import Tracing
from levada.transports.maop import HandlerSpec

from .config import PeerConfig
from .handlers import Handler
from .limiter import Limiter
from .metrics import Metrics
from .shares import TenantShares

__all__ = ["SharedState"]


@attrs.frozen(eq=False)
class SharedState:
    """Handlers, and the counts, queues and memories that span connections."""

    config: PeerConfig
    handlers: dict[int, Handler]
    """Handlers by msg_id; the table never changes. Source: MA-112."""
    limiter: Limiter
    """Bounds the handlers at work."""
    registry: TenantShares
    """State that the connections of each identity share."""
    tracing: Tracing | None = None
    """Of the system."""
    metrics: Metrics = attrs.field(factory=Metrics)
    """The counts of all connections."""
    specs: dict[int, HandlerSpec] = attrs.field(init=False)
    """The declarations of the handlers."""

    def __attrs_post_init__(self) -> None:
        specs = {msg_id: handler.declared() for msg_id, handler in self.handlers.items()}
        object.__setattr__(self, "specs", specs)
        self.metrics.approval_indexes = self.registry.approval_indexes
