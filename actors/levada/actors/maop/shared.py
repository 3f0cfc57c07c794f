"""What the connections of one listener, or of one client, have in common."""

from __future__ import annotations

import attrs

from levada.transports.maop import HandlerSpec

from .config import PeerConfig
from .handlers import Handler
from .identities import Registry
from .limiter import Limiter
from .metrics import Metrics

__all__ = ["Shared"]


@attrs.frozen(eq=False)
class Shared:
    """Handlers, and what is counted, queued and remembered across connections."""

    config: PeerConfig
    handlers: dict[int, Handler]
    """By msg_id; fixed. Source: MA-112."""
    limiter: Limiter
    """Who may work."""
    registry: Registry
    """Who shares what."""
    metrics: Metrics = attrs.field(factory=Metrics)
    """What happened."""
    specs: dict[int, HandlerSpec] = attrs.field(init=False)
    """Declarations of the handlers."""

    def __attrs_post_init__(self) -> None:
        specs = {msg_id: handler.declared() for msg_id, handler in self.handlers.items()}
        object.__setattr__(self, "specs", specs)
        self.metrics.approval_indexes = self.registry.approval_indexes
