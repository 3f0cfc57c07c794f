"""`QmuxListener`, which accepts QMux clients on any listener of byte streams, and `QmuxIncoming`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import trio

from levada.framework.errors import CarrierError, ConnectionClosed, LocalProtocolError
from levada.framework.failure_log import FailureLog
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, CloseReason, Listener
from levada.transports.carriers.places import Place, share_of
from levada.transports.carriers.streams import JoinedStream, ReadyQueue

from .below import Below, OverBytes, OverMessages
from .config import QmuxConfig
from .connection import QmuxConnection

if TYPE_CHECKING:  # an extra
    from levada.transports.carriers.websocket_stream import WebSocketStream

__all__ = ["QmuxIncoming", "QmuxListener"]


class QmuxIncoming:
    """A client whose transport is connected, and that was sent nothing of QMux yet. Accept, refuse or ignore it, once."""

    def __init__(self, listener: QmuxListener, below: Below, info: CarrierInfo, since: float) -> None:
        self._listener = listener
        self._below: Below | None = below
        self.info = info
        """The facts that the transport knows about the client."""
        self._since = since

    @property
    def peer(self) -> str:
        """The client's address."""
        return self.info.peer

    @property
    def validated(self) -> bool:
        """True, since the transport has shown that the client receives at this address."""
        return True

    def accept(self) -> QmuxConnection:
        """Begin QMux on the transport; `QmuxConnection.handshake` waits for the client's parameters.

        They must come within `QmuxConfig.handshake_timeout`, counted from the time when the kernel accepted the client.

        Raises:
            LocalProtocolError: the client was already decided on.
        """
        return self._listener.start(self._decide(), self.info, self._since)

    def refuse(self, why: str = "the application refused it") -> None:
        """Close the client's transport before anything of QMux is sent. `why` appears in the listener's warning only.

        Raises:
            LocalProtocolError: the client was already decided on.
        """
        self._decide().abort()
        self._listener.admission.turn_away(self.peer, why)

    def retry(self) -> None:
        """Raise `LocalProtocolError`: the client has proved its address."""
        raise LocalProtocolError("this client has proved its address; accept, refuse or ignore it")

    def ignore(self) -> None:
        """Close the client's transport, since an open transport cannot be forgotten silently.

        Raises:
            LocalProtocolError: the client was already decided on.
        """
        self._decide().abort()

    def _decide(self) -> Below:
        below, self._below = self._below, None
        if below is None:
            raise LocalProtocolError("this client was already accepted, refused or ignored")
        return below


class QmuxListener:
    """Accepts clients; a `Listener`, made by `listen`.

    Args:
        below: the listener of byte streams below. It belongs to this listener, which closes it.
        url: the URL to dial, with the real port.
        config: settings of the connections.
        backlog: most clients that are in their WebSocket handshake or wait for `accept`.
        upgrade: opens a WebSocket over a byte stream, within the given seconds; with `None`, records go over the byte stream itself.
    """

    def __init__(
        self,
        below: Listener[ByteStream],
        url: str,
        config: QmuxConfig,
        *,
        backlog: int,
        upgrade: Callable[[ByteStream, float], Awaitable[WebSocketStream]] | None = None,
    ) -> None:
        self.url = url
        """The URL to dial, with the real port."""
        self.below = below
        """The listener below; for ``qmux+tls`` and ``qmux+wss`` a `TlsListener`, which can reload its certificates."""
        self._config = config
        self._upgrade = upgrade
        self._ready: ReadyQueue[QmuxIncoming] = ReadyQueue(backlog)
        self._serving = trio.CancelScope()
        self._failures = FailureLog()
        self.admission = Admission(url)
        """Counts the clients that were refused here. `below` counts the clients that got no transport."""

    async def accept(self) -> QmuxIncoming:
        """Wait for the next client whose transport is ready.

        Raises:
            ConnectionClosed: the listener was closed.

        Cancellation:
            no client was taken.
        """
        return await self._ready.take(self.url)

    async def aclose(self) -> None:
        """Stop accepting. Accepted connections stay open; clients that wait for `accept` are cut off."""
        self._serving.cancel()
        for incoming in self._ready.close():
            incoming.ignore()
        await self.below.aclose()

    async def serve(self, nursery: trio.Nursery) -> None:
        """Accept clients until the listener is closed. WebSocket handshakes run in the nursery."""
        with self._serving:
            while True:
                try:
                    stream = await self.below.accept()
                except ConnectionClosed:
                    return
                info = attrs.evolve(stream.info, scheme=self.url.partition(":")[0])
                if info.tls_version is not None and self._upgrade is None and info.alpn not in self._config.protocols:
                    self.admission.turn_away(info.peer, f"it speaks none of {', '.join(self._config.protocols)}")
                    stream.abort()
                    continue
                scope = trio.CancelScope()
                end = stream.abort if self._upgrade is None else scope.cancel
                try:
                    place = await self._ready.reserve(share_of(info.peer, info), end)
                except BaseException:
                    stream.abort()
                    raise
                since = stream.since if isinstance(stream, JoinedStream) else trio.current_time()
                if self._upgrade is None:
                    self._offer(OverBytes(stream), info, since, place)
                else:
                    nursery.start_soon(self._shake_hands, stream, self._upgrade, info, since, scope, place)

    def _offer(self, below: Below, info: CarrierInfo, since: float, place: Place) -> None:
        """Queue a client for `accept`, in its reserved place."""
        try:
            self._ready.put(QmuxIncoming(self, below, info, since), place)
        except trio.ClosedResourceError:
            place.leave()
            below.abort()

    async def _shake_hands(
        self,
        stream: ByteStream,
        upgrade: Callable[[ByteStream, float], Awaitable[WebSocketStream]],
        info: CarrierInfo,
        since: float,
        scope: trio.CancelScope,
        place: Place,
    ) -> None:
        """Open a WebSocket within the time that is left of the handshake timeout."""
        left = since + self._config.handshake_timeout - trio.current_time()
        done = False
        try:
            with scope:
                websocket = await upgrade(stream, max(left, 1e-3))
                done = True
                self._offer(OverMessages(websocket), attrs.evolve(info, alpn=websocket.subprotocol), since, place)
            if not done:
                self.admission.turn_away(info.peer, "its handshake made room for others")
        except CarrierError as error:
            self.admission.turn_away(info.peer, error)
        finally:
            if not done:
                stream.abort()
                place.leave()

    def start(self, below: Below, info: CarrierInfo, since: float) -> QmuxConnection:
        """Make the connection of an accepted client."""
        return QmuxConnection(
            below, info, self._config, is_client=False, since=since, tell_ended=self._over, failures=self._failures
        )

    def _over(self, connection: QmuxConnection, reason: CloseReason) -> None:
        """Record that a connection has ended, perhaps before its handshake."""
        if connection.core.peer_parameters is None:
            self.admission.ended_early(connection.info.peer, reason)
