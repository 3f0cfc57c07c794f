"""Streams as actors, and the consequences when one of them is ended.

A stream in use has an actor, a child of the connection. It has no task and does nothing: `levada.actors.multiplexed` reads and writes.
When its stream is over, the actor is idle until another stream needs one (`levada.actors.pool`). If other code ends the actor, the stream
is reset and stopped; the core decides what follows for a channel or for the connection. While the connection is ending, new streams get
no actor.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import attrs
import trio

from levada.actors.multiplexed import MultiplexedDriver
from levada.actors.pool import Pool, Pooled
from levada.framework import Reason, Sender
from levada.framework.errors import ActorStopped
from levada.transports.aqueduct import (
    AqueductCore,
    CloseCode,
    OpenStream,
    ResetCode,
    ResetStream,
    StopStream,
    StreamData,
    StreamDone,
)

__all__ = ["AT_ONCE", "AqueductStreams", "StreamActor"]

AT_ONCE = 32
"""Streams that are read or written in one turn, before other tasks run: about half a millisecond."""
MAX_IDLE: Final = 256
"""Actors without a stream that are kept: 0.1 MB."""
_SERVER, _UNIDIRECTIONAL = 1, 2  # bits of a stream's number


class StreamActor(Pooled):
    """Stands for one stream."""

    connection: AqueductStreams
    stream_id: int = attrs.field(default=-1, init=False)
    """-1 while the actor is idle."""

    def stopping(self, reason: Reason) -> None:
        """Reset and stop the stream, if it is in use."""
        connection, stream_id = self.connection, self.stream_id
        if stream_id < 0:
            connection.idle.forget(self)
        self.fit = False
        if stream_id >= 0 and not connection.ending:
            connection.give_up(stream_id)
        self.stream_id = -1


class AqueductStreams(MultiplexedDriver[AqueductCore]):
    """The part of a connection that its streams and halves use. It gives each stream an actor."""

    amount: ClassVar = AT_ONCE
    at_once: ClassVar = AT_ONCE
    takes_blocked: ClassVar = True
    watches_all: ClassVar = True
    stopped_code: ClassVar = ResetCode.LOST

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.idle = Pool(self, MAX_IDLE)
        """Actors without a stream."""
        self.lookups: Sender[Any] | None = None
        """Sends lookups to the peer, if it exposes actors."""
        self._actors: dict[int, StreamActor] = {}

    def stream_begun(self, stream_id: int) -> None:
        """Give a stream its actor, unless the connection is ending."""
        try:
            actor = self.idle.take(StreamActor)
        except ActorStopped:
            return
        actor.stream_id = stream_id
        self._actors[stream_id] = actor

    def forget(self, stream_id: int) -> bool:
        """Free the actor of a stream that is over, for another stream."""
        if not super().forget(stream_id):
            return False
        actor = self._actors.pop(stream_id, None)
        if actor is not None:
            actor.stream_id = -1
            if actor.fit:
                self.idle.put(actor, hook=False)  # there may be ten thousand, whose channels end at once
        return True

    def give_up(self, stream_id: int) -> None:
        """End a stream in both directions, because its actor was ended, and tell the core.

        If it was a channel's control stream, the channel is lost. If it carried messages of a channel, the channel cannot complete and
        has the time of AQ-20a to end. If it was the connection's control stream, the connection ends.

        Source: AQ-20, AQ-20a, AQ-48, E-13.
        """
        core, now = self.core, trio.current_time()
        self._actors.pop(stream_id, None)
        if stream_id == core.control_id:
            events = core.close(CloseCode.APPLICATION, "the actor of the connection control stream was ended", now)
        elif stream_id & _UNIDIRECTIONAL and bool(stream_id & _SERVER) is not core.client:
            self.reset_stream(ResetStream(stream_id, ResetCode.LOST))
            events = core.stream_stopped(stream_id, ResetCode.LOST, now)
        else:
            self.stop_stream(StopStream(stream_id, ResetCode.LOST))
            events = core.stream_reset(stream_id, ResetCode.LOST, now)
            if stream_id & _UNIDIRECTIONAL:
                self.forget(stream_id)
        self.feed(events)

    def look_up_at(self, there: Sender[Any]) -> None:
        """Send lookups to the client here."""
        if self.lookups is not None:
            self.lookups.finish_nowait()
        self.lookups = there

    def release(self) -> None:
        """Release the actors, too."""
        super().release()
        for actor in self._actors.values():
            actor.stream_id = -1
        self._actors.clear()
        self.idle.close()

    acts: ClassVar = {
        OpenStream: MultiplexedDriver.open_stream,
        ResetStream: MultiplexedDriver.reset_stream,
        StopStream: MultiplexedDriver.stop_stream,
        StreamData: MultiplexedDriver.send_data,
        StreamDone: MultiplexedDriver.forget_done,
    }
