"""The control pool of a connection: its tasks wait for the control streams.

The core assigns signals to control streams, orders them, and replaces streams that the peer stops (MA-81 to MA-88a). Tasks of
this actor wait: for room in a stream's writer, for a stream while the peer allows none, and for the acknowledgement of the last signals.
The actor keeps no state that the core does not have, so after a failure or a kill it is simply restarted.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import trio

from levada.framework import Actor, handles
from levada.framework.errors import CarrierError
from levada.transports.maop import ConnectionState

from .streams import MaopStreams

__all__ = ["ENDING", "LAST", "STARVED", "ControlKeeper", "Crowded", "Last", "Starved"]

ENDING: Final = (ConnectionState.FLUSHING, ConnectionState.CLOSING)


@attrs.frozen(eq=False)
class Crowded:
    """A control stream's queue is full; its signals wait in the core."""

    stream_id: int


class Starved:
    """Signals wait for a stream that the peer does not allow yet."""

    __slots__ = ()


class Last:
    """Only the connection's last signals are left to send."""

    __slots__ = ()


STARVED, LAST = Starved(), Last()


class ControlKeeper(Actor[Crowded | Starved | Last]):
    """Keeps the control streams of one connection going."""

    connection: MaopStreams
    _waits: set[Any] = attrs.field(factory=set, init=False)
    """Running waits: stream ids, and messages."""

    def started(self) -> None:
        """Resume the waits of the previous incarnation."""
        connection = self.connection
        for stream_id, stream in connection.core.pool.streams.items():
            if not stream.writable:
                self.on_crowded(Crowded(stream_id))
        if connection.starved:
            self.on_starved(STARVED)
        if connection.core.state in ENDING:
            self.on_last(LAST)

    @handles
    def on_crowded(self, m: Crowded) -> None:
        """Continue with signals when the writer has room. Source: MA-85."""
        if m.stream_id not in self._waits:
            self._waits.add(m.stream_id)
            self.start_soon(self._wait_for_room, m.stream_id)

    async def _wait_for_room(self, stream_id: int) -> None:
        connection = self.connection
        stream = connection.stream(stream_id)
        try:
            if stream is not None:
                await stream.send_all(b"")
                await stream.flush()
        except CarrierError:
            return  # the core learns of the stop and uses another stream
        finally:
            self._waits.discard(stream_id)
        connection.core.set_control_writable(stream_id, True)
        connection.flush_soon()

    @handles
    def on_starved(self, m: Starved) -> None:
        """Get a stream as soon as the peer allows one. Source: MA-130."""
        if m not in self._waits:
            self._waits.add(m)
            self.start_soon(self._wait_for_stream)

    async def _wait_for_stream(self) -> None:
        connection = self.connection
        try:
            await connection.open_spare(unidirectional=connection.core.config.control.control_stream_kind == "uni")
        except CarrierError:
            return  # the connection has ended
        finally:
            self._waits.discard(STARVED)
        connection.starved = False
        connection.flush_soon()

    @handles
    def on_last(self, m: Last) -> None:
        """Tell the core as soon as the peer has all signals, so that it does not wait out its time limit. Source: MA-92, MA-93."""
        if m not in self._waits:
            self._waits.add(m)
            self.start_soon(self._wait_for_last)

    async def _wait_for_last(self) -> None:
        connection = self.connection
        while connection.core.state in ENDING and connection.live is not None:
            await connection.all_acked()
            await trio.lowlevel.checkpoint()
            connection.acknowledged()

    def undelivered(self, messages: list[Any]) -> None:
        """Drop the messages: the connection has ended."""
