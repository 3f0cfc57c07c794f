"""Connections that come back: a `Link` keeps one to each endpoint, and a peer chooses among the endpoints that are up.

A link is an actor whose children are its connections, one after the other. When one ends, or the peer announces its end, the link dials
again, waiting longer after each attempt. A request never moves to another connection: if its connection is lost it fails, and the caller
decides whether to send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import trio

from levada.framework import Actor
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed, LevadaError

from .client import ClientConnection
from .config import Reconnect
from .connection import RSocketDriver
from .errors import NoEndpoint
from .peers import Peer

__all__ = ["Link", "Policy", "ReconnectingPeer"]

Policy = Literal["round_robin", "least_pending"]
"""Selects the endpoint for the next request: each in turn, or the one with the fewest open streams."""


class Link(Actor[Any]):
    """Keeps a connection to one endpoint."""

    make: Callable[[], ClientConnection]
    reconnect: Reconnect
    changed: Callable[[], None]

    def __attrs_post_init__(self) -> None:
        self.current: ClientConnection | None = None
        """The connection that takes requests now."""
        self.tried = False
        self.given_up = False
        """Whether it has stopped dialling."""
        self.error: LevadaError | None = None
        """Why there is no connection, or why the previous one ended."""

    def started(self) -> None:
        """Begin to dial."""
        self.start_soon(self._keep_connected)

    async def _keep_connected(self) -> None:
        attempt = 0
        while not self.given_up and not isinstance(self.error, ConfigurationError):
            connection = self._connect()
            try:
                await connection.opened()
            except (CarrierError, ConfigurationError) as error:
                self.error = error
                self._tell()
            else:
                self.current = connection
                self._tell()
                await connection.unusable.wait()
                self.current = None
                self.error = connection.error() if connection.end is not None else None
                if connection.accepted:
                    attempt = 0
            attempt += 1
            await trio.sleep(self.reconnect.delay(attempt, self.system.random))

    def _connect(self) -> ClientConnection:
        connection = self.make()
        self.spawn(lambda: connection)
        return connection

    def _tell(self) -> None:
        self.tried = True
        self.changed()


class ReconnectingPeer(Peer):
    """One endpoint that is dialled again whenever its connection is lost, or several that share the requests."""

    def __init__(self, policy: Policy, reconnect: Reconnect) -> None:
        if policy not in ("round_robin", "least_pending"):
            raise ConfigurationError(f"policy is {policy!r}, wanted round_robin or least_pending")
        self._policy = policy
        self._reconnect = reconnect
        self._turn = 0
        self._event = trio.Event()
        self._closed = False
        self.links: Sequence[Link] = ()

    @property
    def connected(self) -> int:
        """Endpoints that take requests now."""
        return len(self._usable())

    def changed(self) -> None:
        """Wake waiting requests: an endpoint came up, or could not be reached."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def tried(self, *, connected: bool) -> None:
        """Wait until an endpoint is up or, unless `connected`, the first attempt has failed for all.

        Raises:
            ConfigurationError: a URL or the settings cannot work.
        """
        while not self._usable():
            for link in self.links:
                if isinstance(link.error, ConfigurationError):
                    raise link.error
            if not connected and all(link.tried for link in self.links):
                return
            await self._event.wait()

    def _usable(self) -> list[ClientConnection]:
        return [c for link in self.links if (c := link.current) is not None and not c.unusable.is_set()]

    async def _choose(self) -> RSocketDriver:
        usable = self._usable()
        if not usable:
            with trio.move_on_after(self._reconnect.wait):
                while not self._closed and not (usable := self._usable()):
                    await self._event.wait()
        if self._closed:
            raise ConnectionClosed("this side closed the connection")
        if not usable:
            errors = [link.error for link in self.links if link.error is not None]
            raise NoEndpoint(f"none of {len(self.links)} endpoints is up") from (errors[0] if errors else None)
        self._turn += 1
        if self._policy == "least_pending":
            least = min(len(connection.streams) for connection in usable)
            usable = [connection for connection in usable if len(connection.streams) == least]
        return usable[self._turn % len(usable)]

    def connections(self) -> list[RSocketDriver]:
        """The connections that are up."""
        return [link.current for link in self.links if link.current is not None]

    def shut(self) -> None:
        """Close all connections at once."""
        for connection in self.connections():
            connection.shut()

    async def aclose(self) -> None:
        """Close all connections concurrently, as `ConnectedPeer.aclose` does, and stop dialling.

        Cancellation:
            all connections close at once.
        """
        self.give_up()
        try:
            async with trio.open_nursery() as nursery:
                for connection in self.connections():
                    nursery.start_soon(connection.aclose)
        finally:
            for link in self.links:
                link.ref.stop(now=True)
        for link in self.links:
            await link.ref.terminated()

    def give_up(self) -> None:
        """Stop dialling; requests that wait for a connection fail."""
        self._closed = True
        for link in self.links:
            link.given_up = True
        self.changed()
