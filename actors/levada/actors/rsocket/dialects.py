"""The two protocols that these actors speak: a URL's scheme selects the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from levada.transports.rsocket import CoreConfig, RSocketCore, Sessions
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

__all__ = ["CoreFactory", "core_of"]


class CoreFactory(Protocol):
    """Makes a core; the class of one dialect."""

    def __call__(
        self,
        config: CoreConfig,
        *,
        client: bool,
        framed: bool,
        now: float,
        random_bytes: Callable[[int], bytes],
        sessions: Sessions[Any] | None = None,
    ) -> ReactiveStreamsCore:
        """Make the core of one connection."""
        ...


def core_of(dialect: str) -> CoreFactory:
    """Return the class of the core; ReactiveSocket's is imported only here."""
    if dialect == "rsocket":
        return RSocketCore
    from levada.transports.reactivesocket import ReactiveSocketCore

    return ReactiveSocketCore
