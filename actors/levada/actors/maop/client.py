"""The client's side: a connection, and the limiter for operations that the server starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import trio

from levada.actors.authentication import BINDING
from levada.actors.multiplexed import Opens
from levada.framework import Actor, Sample
from levada.transports import carriers

from .connection import MaopDriver, SharedState

__all__ = ["ClientActor", "ClientConnection"]


class ClientConnection(MaopDriver):
    """A connection that this program opened."""

    token: bytes
    auth_type: str
    pairs: dict[str, str]
    bind: bool

    async def begin(self, carrier: carriers.Connection) -> None:
        """Tell the core that the handshake is complete."""
        pairs = self.pairs
        binding = None if self.info is None else self.info.channel_binding
        if self.bind and binding is not None:
            pairs = {**pairs, BINDING: binding.hex()}
        self.feed(
            self.core.handshake_completed(
                auth_type=self.auth_type, token=self.token, pairs=pairs, now=trio.current_time()
            )
        )


class ClientActor(Actor[Any]):
    """Supervises a client's connection and its limiter; it stops when the connection does."""

    shared: SharedState
    opens: Opens
    token: bytes
    auth_type: str
    pairs: dict[str, str]
    bind: bool

    def __attrs_post_init__(self) -> None:
        self.connection = ClientConnection(self.opens, self.shared, self.token, self.auth_type, self.pairs, self.bind)

    def metrics(self) -> Iterable[Sample]:
        """Return the counts of the connection, by the protocol's names."""
        return self.shared.metrics.samples(trio.current_time())

    def started(self) -> None:
        """Spawn the limiter and the connection."""
        self.spawn(lambda: self.shared.limiter, name="limiter")
        self.spawn(lambda: self.connection, name="connection").on_stopped(self.stop)
