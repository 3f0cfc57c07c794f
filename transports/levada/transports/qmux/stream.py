"""One stream of a QMux connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from levada.transports.carriers.connection_stream import ConnectionStream

if TYPE_CHECKING:
    from .connection import QmuxConnection

__all__ = ["QmuxStream"]


class QmuxStream(ConnectionStream["QmuxConnection"]):
    """A `levada.transports.carriers.contracts.Stream`, made by `QmuxConnection.open_stream` and `QmuxConnection.accept_stream`.

    `send_all` waits while more than `QmuxConfig.high_watermark` bytes are queued here, or more than `QmuxConfig.max_queued` on all streams. The
    peer may send `QmuxConfig.stream_window` bytes ahead of `receive_some`.

    An acknowledgement is the answer to a ping that was written after the bytes. The ping is only sent if a task waits for the answer, so
    `unacked` counts the bytes since the last answer that this stream waited for. Source: D-23.
    """

    __slots__ = ("_acked", "_asked")

    def __init__(self, connection: QmuxConnection, stream_id: int, priority: int = 128):
        super().__init__(connection, stream_id, priority)
        self._acked = 0
        self._asked: tuple[int, bool] | None = (
            None  # the bytes, and whether also the end, that the ping under way confirms
        )

    @property
    def unacked(self) -> int:
        """Bytes queued or sent, and not known to have reached the peer."""
        return 0 if self._settled or self._send_error is not None else self._written - self._acked

    async def _wait_for_room(self) -> None:
        blocked = self._connection.blocked
        blocked[self] = None
        try:
            await super()._wait_for_room()
        finally:
            del blocked[self]

    async def _wait_until_flushed(self) -> None:
        if self._flushed is None:
            self._connection.core.want_flushed(self.stream_id)
        await super()._wait_until_flushed()

    async def _wait_for_news(self, *, end: bool) -> None:
        if self._fin or not end:
            self.ask_for_ack()
        await super()._wait_for_news(end=end)

    def ask_for_ack(self) -> None:
        """Ask for `acked_as_asked` when the peer has everything that is queued now."""
        if self._asked is None:
            self._asked = self._written, self._fin
            self._connection.want_acked(self)

    @property
    def awaited(self) -> bool:
        """Whether a task waits for an acknowledgement, or for a stop."""
        return self._news is not None

    def acked_as_asked(self) -> None:
        """Record that the peer has everything that was queued at the last `ask_for_ack`."""
        assert self._asked is not None
        self._acked, end = self._asked
        self._asked = None
        if end:
            self.sending_settled()
        else:
            self.wake_sending()
