"""Streams as actors, and the consequences when one of them is ended.

A stream in use has an actor, a child of the connection. It has no task and does nothing: `levada.actors.multiplexed` reads and writes.
When its stream is over, the actor is idle until another stream needs one (`levada.actors.pool`). If other code ends the actor, the stream
is reset and stopped; the core decides what follows for a channel or for the connection. While the connection is ending, new streams get
no actor.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import trio

from levada.actors.multiplexed import Multiplexed
from levada.actors.pool import Pool, Pooled
from levada.framework import Reason
from levada.framework.embedding import release
from levada.framework.errors import ActorStopped
from levada.transports.aqueduct import AqueductCore, CloseCode, Event, ResetCode, ResetStream, StopStream

__all__ = ["AT_ONCE", "StreamActor", "StreamActors"]

AT_ONCE = 32
"""Streams that are read or written in one turn, before other tasks run: about half a millisecond."""
_SERVER, _UNIDIRECTIONAL = 1, 2  # bits of a stream's number


class Streaming(Protocol):
    """The part of a connection that its streams use."""

    core: AqueductCore
    streams: Multiplexed[Any]
    actors: StreamActors
    idle: Pool

    @property
    def ending(self) -> bool:
        """Whether the connection's actor is ending, and all its children with it."""
        ...

    def feed(self, events: list[Event]) -> None:
        """Take the core's events."""
        ...


class StreamActor(Pooled):
    """Stands for one stream."""

    connection: Streaming
    stream_id: int = attrs.field(default=-1, init=False)
    """-1 while the actor is idle."""

    def stopping(self, reason: Reason) -> None:
        """Reset and stop the stream, if it is in use."""
        connection, stream_id = self.connection, self.stream_id
        if stream_id < 0:
            connection.idle.forget(self)
        self.fit = False
        if stream_id >= 0 and not connection.ending:
            connection.actors.give_up(stream_id)
        self.stream_id = -1


class StreamActors:
    """The actors of one connection's streams."""

    def __init__(self, connection: Streaming) -> None:
        self._connection = connection
        self._idle = connection.idle
        self._actors: dict[int, StreamActor] = {}

    def begin(self, stream_id: int) -> None:
        """Give a stream its actor, unless the connection is ending."""
        try:
            actor = self._idle.take(StreamActor)
        except ActorStopped:
            return
        actor.stream_id = stream_id
        self._actors[stream_id] = actor

    def end(self, stream_id: int) -> None:
        """Free the actor of a stream that is over, for another stream."""
        actor = self._actors.pop(stream_id, None)
        if actor is None:
            return
        actor.stream_id = -1
        if actor.fit:
            if len(self._idle.of(StreamActor)) < self._idle.limit:
                self._idle.put(actor)
            else:  # reached when ten thousand channels end at once
                release(actor)

    def give_up(self, stream_id: int) -> None:
        """End a stream in both directions, because its actor was ended, and tell the core.

        If it was a channel's control stream, the channel is lost. If it carried messages of a channel, the channel cannot complete and
        has the time of AQ-20a to end. If it was the connection's control stream, the connection ends.

        Source: AQ-20, AQ-20a, AQ-48, E-13.
        """
        connection, now = self._connection, trio.current_time()
        core, streams = connection.core, connection.streams
        self._actors.pop(stream_id, None)
        if stream_id == core.control_id:
            events = core.close(CloseCode.APPLICATION, "the actor of the connection control stream was ended", now)
        elif stream_id & _UNIDIRECTIONAL and bool(stream_id & _SERVER) is not core.client:
            streams.reset(ResetStream(stream_id, ResetCode.LOST))
            events = core.stream_stopped(stream_id, ResetCode.LOST, now)
        else:
            streams.stop(StopStream(stream_id, ResetCode.LOST))
            events = core.stream_reset(stream_id, ResetCode.LOST, now)
            if stream_id & _UNIDIRECTIONAL:
                streams.forget(stream_id)
        connection.feed(events)

    def release(self) -> None:
        """Drop the connection, whose actor has ended."""
        for actor in self._actors.values():
            actor.stream_id = -1
        self._actors.clear()
        del self._connection, self._idle
