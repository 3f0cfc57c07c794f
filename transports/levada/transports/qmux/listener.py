"""`QmuxListener`, which accepts QMux clients on any listener of byte streams, and `QmuxIncoming`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import trio

from levada.framework.errors import LocalProtocolError
from levada.framework.failure_log import FailureLog
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, CloseReason, Listener
from levada.transports.carriers.listeners import UpgradingListener
from levada.transports.carriers.places import share_of
from levada.transports.carriers.streams import JoinedStream

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
        return self._listener.connect(self._decide(), self.info, self._since)

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


class QmuxListener(UpgradingListener[QmuxIncoming]):
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
        super().__init__(below, url, backlog, QmuxIncoming.ignore)
        self._config = config
        self._upgrade = upgrade
        self._failures = FailureLog()

    async def take_in(self, nursery: trio.Nursery, stream: ByteStream) -> None:
        """Offer a client, after its WebSocket handshake in the nursery if there is one."""
        info, upgrade = attrs.evolve(stream.info, scheme=self.url.partition(":")[0]), self._upgrade
        share = share_of(info.peer, info)
        since = stream.since if isinstance(stream, JoinedStream) else trio.current_time()
        if upgrade is not None:

            async def shake_hands() -> QmuxIncoming:
                # The handshake of QMux counts from the same time.
                left = since + self._config.handshake_timeout - trio.current_time()
                websocket = await upgrade(stream, max(left, 1e-3))
                agreed = attrs.evolve(info, alpn=websocket.subprotocol)
                return QmuxIncoming(self, OverMessages(websocket), agreed, since)

            await self.open_for(nursery, info.peer, share, shake_hands, stream.abort)
        elif info.tls_version is not None and info.alpn not in self._config.protocols:
            self.admission.turn_away(info.peer, f"it speaks none of {', '.join(self._config.protocols)}")
            stream.abort()
        else:
            await self.offer(QmuxIncoming(self, OverBytes(stream), info, since), share)

    def connect(self, below: Below, info: CarrierInfo, since: float) -> QmuxConnection:
        """Make the connection of an accepted client."""
        return QmuxConnection(
            below, info, self._config, is_client=False, since=since, tell_ended=self._over, failures=self._failures
        )

    def _over(self, connection: QmuxConnection, reason: CloseReason) -> None:
        """Record that a connection has ended, perhaps before its handshake."""
        if connection.core.peer_parameters is None:
            self.admission.ended_early(connection.info.peer, reason)
