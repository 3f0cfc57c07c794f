"""The streams of a connection: MAOP's additions to `levada.actors.multiplexed`.

* The connection's next turn reads everything at hand on a stream before it writes anything, so the core has judged all of it before the
  operation's Proceed goes out (MA-50).
* The core names a stream only if the peer allows one. A stream obtained by waiting is kept as a spare until the core names its number.
* A control stream with a full queue is reported, and its signals wait in the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from levada.actors.multiplexed import Multiplexed
from levada.framework.errors import CarrierError, StreamWasStopped
from levada.transports.maop import (
    CloseConnection,
    Event,
    Incoming,
    MaopCore,
    OpenStream,
    ResetStream,
    SetPriority,
    StopStream,
    StreamData,
)

from .shares import Rate

__all__ = ["Streams"]

AT_ONCE: Final = 128
"""Streams that one turn reads: a burst of requests must not delay other connections. Each is read until it has no more at hand (MA-50)."""
CONTROL_HIGH: Final = 65_536
"""Bytes queued on a control stream above which its signals wait in the core, which orders and bounds them. Source: MA-85."""


class Streams(Multiplexed[Event]):
    """The carrier's streams of one connection.

    Args:
        core: the connection's core.
        feed: takes the core's events.
        wake: asks for a turn.
        crowded: called with the id of a control stream whose queue is full.
    """

    def __init__(
        self,
        core: MaopCore,
        feed: Callable[[list[Event]], None],
        wake: Callable[[], None],
        crowded: Callable[[int], None],
    ) -> None:
        super().__init__(
            core, feed, wake, at_once=AT_ONCE, forget_ended=True, high_watermark=CONTROL_HIGH, crowded=self._is_crowded
        )
        self._maop = core
        self._tell_crowded: Callable[[int], None] | None = crowded
        self._signals: Callable[[StreamData], None] | None = None
        self.outputs |= {
            CloseConnection: self._close,
            OpenStream: self.open,
            ResetStream: self.reset,
            SetPriority: self._set_priority,
            StopStream: self.stop,
            StreamData: self.send,
        }

    def log_signals(self, signals: Callable[[StreamData], None]) -> None:
        """Call a function with all outgoing signals."""
        self._signals = signals
        self.outputs[StreamData] = self._send_and_tell

    def limit(self, rate: Rate | None) -> None:
        """Limit the bytes of bodies, if the identity has a limit."""
        self.throttle = None if rate is None else BodyRate(self._maop, rate)

    def refresh_credit(self) -> None:
        """Tell the core how many streams the peer allows. Source: MA-130."""
        if self.carrier is not None:
            self._maop.stream_credit(
                bidirectional=self.allowed(unidirectional=False), unidirectional=self.allowed(unidirectional=True)
            )

    def _send_and_tell(self, output: StreamData) -> None:
        self.send(output)
        if self._signals is not None and not output.fin and output.stream_id in self._maop.pool.streams:
            self._signals(output)

    def _is_crowded(self, stream_id: int) -> None:
        if stream_id in self._maop.pool.streams and self._tell_crowded is not None:
            self._maop.set_control_writable(stream_id, False)
            self._tell_crowded(stream_id)

    def _set_priority(self, output: SetPriority) -> None:
        stream = self.get(output.stream_id)
        if stream is not None:
            stream.priority = output.priority

    def _close(self, output: CloseConnection) -> None:
        if self.carrier is not None:
            self.carrier.close(output.code, output.reason)

    async def room(self, stream_id: int) -> None:
        """Wait until a stream has room for more; raise `CarrierError` if it never will."""
        stream = self.get(stream_id)
        if stream is None:
            raise StreamWasStopped(f"stream {stream_id} takes no more bytes")
        await stream.send_all(b"")

    async def all_acked(self) -> None:
        """Wait until the peer's carrier has acknowledged all signals."""
        for stream in [self.get(stream_id) for stream_id in self._maop.pool.streams]:
            try:
                if stream is not None:
                    await stream.all_acked()
            except CarrierError:
                pass  # the stream was stopped, or the connection has ended

    def clear(self) -> None:
        """Release everything, because the connection is over."""
        super().clear()
        self._tell_crowded = self._signals = None


class BodyRate:
    """Limits the bytes of bodies that are read, and no other streams."""

    def __init__(self, core: MaopCore, rate: Rate) -> None:
        self._core = core
        self._rate = rate

    def until(self, stream_id: int, now: float) -> float:
        """Return when a stream may be read."""
        return self._rate.until if type(self._core.streams.get(stream_id)) is Incoming else now

    def took(self, stream_id: int, size: int, now: float) -> None:
        """Count the bytes read from a body."""
        if type(self._core.streams.get(stream_id)) is Incoming:
            self._rate.take(size, now)
