"""One stream of a QUIC connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from levada.transports.carriers.connection_stream import ConnectionStream

if TYPE_CHECKING:
    from .connection import QuicConnection

__all__ = ["QuicStream"]


class QuicStream(ConnectionStream["QuicConnection"]):
    """A `levada.transports.carriers.contracts.Stream`, made by `QuicConnection.open_stream` and `QuicConnection.accept_stream`.

    `send_all` waits while more than `QuicConfig.high_watermark` bytes are not sent yet, and while the connection has more than
    `QuicConfig.max_unacked` unacknowledged bytes. The peer may send `QuicConfig.stream_window` bytes ahead of `receive_some`.
    """

    __slots__ = ("_forgotten", "_waiting")

    def __init__(self, connection: QuicConnection, stream_id: int, priority: int = 128):
        super().__init__(connection, stream_id, priority)
        self._waiting = False  # for the application to accept it
        self._forgotten = False  # the engine has dropped its state

    def appeared(self) -> None:
        """Record that the stream waits to be accepted."""
        self._waiting = True

    def accepted(self) -> bool:
        """Record that the application has taken the stream. Return whether its credit is due, because the engine has already dropped it."""
        self._waiting = False
        return self._forgotten

    def forgotten(self) -> bool:
        """Record that the engine has dropped the stream. Return whether its credit is due, because the peer opened it and it was accepted."""
        self._forgotten = True
        return not self._waiting and not self.initiated_here

    @property
    def unacked(self) -> int:
        """Bytes queued or sent that the peer has not acknowledged."""
        return self._connection.engine.ready.unacked_of(self.stream_id)

    async def _wait_for_room(self) -> None:
        blocked = self._connection.blocked
        blocked[self] = None
        try:
            await super()._wait_for_room()
        finally:
            blocked.pop(self, None)

    async def _wait_until_flushed(self) -> None:
        self._connection.flushing[self] = None
        await super()._wait_until_flushed()

    async def _wait_for_news(self, *, end: bool) -> None:
        if end:
            await super()._wait_for_news(end=end)
            return
        acking = self._connection.acking
        acking[self] = None
        try:
            await super()._wait_for_news(end=end)
        finally:
            acking.pop(self, None)

    def wake_flushing(self) -> None:
        """Wake `flush`: all bytes have been sent, or never will be."""
        self._connection.flushing.pop(self, None)
        super().wake_flushing()
