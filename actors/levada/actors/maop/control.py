"""The control pool of a connection: what its control streams wait for.

The core says what is written to which of them, in which order, and replaces those that the peer stops (MA-81 to MA-88a). What takes time is
done here, by tasks of this actor: waiting for room in their writers, for a stream where the peer allows none, and for the acknowledgement
of the last signals. It keeps nothing that the core does not know, so it is simply started again if it fails or is killed.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import attrs
import trio

from levada.framework import Actor, handles
from levada.framework.errors import CarrierError
from levada.transports.maop import ConnectionState, MaopCore

from .streams import Streams

__all__ = ["ENDING", "LAST", "STARVED", "ControlPool", "Crowded", "Last", "Starved"]

ENDING: Final = (ConnectionState.FLUSHING, ConnectionState.CLOSING)


@attrs.frozen(eq=False)
class Crowded:
    """A control stream has too much queued: its signals wait in the core."""

    stream_id: int


class Starved:
    """Signals wait for a stream that the peer does not allow now."""

    __slots__ = ()


class Last:
    """Nothing but the last signals is left of the connection."""

    __slots__ = ()


STARVED, LAST = Starved(), Last()


class Signalling(Protocol):
    """The connection, as far as its control streams need it."""

    core: MaopCore
    streams: Streams
    starved: bool

    def flush_soon(self) -> None:
        """Read and write soon."""
        ...

    def acknowledged(self) -> None:
        """The peer has all signals."""
        ...

    async def open_spare(self, *, unidirectional: bool) -> None:
        """Wait for a stream."""
        ...


class ControlPool(Actor[Crowded | Starved | Last]):
    """Keeps the control streams of one connection going."""

    connection: Signalling
    _waits: set[Any] = attrs.field(factory=set, init=False)
    """What tasks wait for: stream ids, and messages."""

    def started(self) -> None:
        """See `Actor.started`: go on with what the last incarnation was at."""
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
        """Let signals go on when the writer has room. Source: MA-85."""
        if m.stream_id not in self._waits:
            self._waits.add(m.stream_id)
            self.start_soon(self._wait_for_room, m.stream_id)

    async def _wait_for_room(self, stream_id: int) -> None:
        connection = self.connection
        stream = connection.streams.get(stream_id)
        try:
            if stream is not None:
                await stream.send_all(b"")
                await stream.flush()
        except CarrierError:
            return  # the core hears that it was stopped, and takes another
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
            await connection.open_spare(unidirectional=connection.core.config.control_stream_kind == "uni")
        except CarrierError:
            return  # the connection has ended
        finally:
            self._waits.discard(STARVED)
        connection.starved = False
        connection.flush_soon()

    @handles
    def on_last(self, m: Last) -> None:
        """Tell the core as soon as the peer has all signals, so that nobody waits for nothing. Source: MA-92, MA-93."""
        if m not in self._waits:
            self._waits.add(m)
            self.start_soon(self._wait_for_last)

    async def _wait_for_last(self) -> None:
        connection = self.connection
        while connection.core.state in ENDING and connection.streams.carrier is not None:
            await connection.streams.all_acked()
            await trio.lowlevel.checkpoint()
            connection.acknowledged()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: the connection has ended."""
