"""The streams of a connection's carrier, under the numbers by which the core speaks of them.

* A stream is an actor, a child of the connection, driven by direct calls, and has no task. When its stream is over it rests until there is
  another (`levada.actors.resting`). Ended by somebody else, it gives the stream up in both directions, and what follows from that for a
  channel, or for the connection, is the core's to say. While the connection is ending, new streams are records.
* The carrier tells which streams have something to read, or were stopped by the peer; they stand in line until the connection looks at
  them.
* What the core does not take yet stays with the carrier, which then holds back the peer: a stream that is blocked is not read.
* Streams are opened in the order in which the core names them. Where the peer gives no credit for one, what is to be done on it waits,
  and so do those behind it of the same kind; control streams, which carry the acks, do not wait for streams of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from levada.actors.resting import Restful
from levada.framework import Reason
from levada.framework.embedding import release
from levada.framework.errors import ActorStopped, CarrierError, ConnectionClosed, StreamWasReset, StreamWasStopped
from levada.transports import carriers
from levada.transports.aqueduct import (
    CloseCode,
    Event,
    OpenStream,
    ResetCode,
    ResetStream,
    StopStream,
    StreamData,
    StreamDone,
)

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["AT_ONCE", "StreamOutput", "Wire", "Wires"]

StreamOutput = StreamData | ResetStream | StopStream | StreamDone
"""What is to be done on a stream that the core has named."""

AT_ONCE = 32
"""Streams that are read or written before others may run: about half a millisecond."""
URGENT, USUAL = 64, 128  # priorities of streams
_SERVER, _UNIDIRECTIONAL = 1, 2  # bits of a stream's number


class Wire(Restful):
    """One stream of the carrier, or one that waits to be opened."""

    connection: Connection
    stream_id: int = attrs.field(default=-1, init=False)
    """-1 while it rests."""
    stream: carriers.Stream | None = attrs.field(default=None, init=False)
    priority: int = attrs.field(default=USUAL, init=False)
    backlog: list[StreamOutput] | None = attrs.field(default=None, init=False)
    """What is to be done when the stream is open."""
    stop_code: int | None = attrs.field(default=None, init=False)
    """The peer has stopped this side's direction, and the core does not know yet."""
    waits: bool = attrs.field(default=False, init=False)
    """Whether it stands in line."""
    over: bool = attrs.field(default=True, init=False)
    """Whether nothing that comes is wanted any more."""

    def take(self, stream: carriers.Stream) -> None:
        """Begin with a stream of the carrier."""
        self.stream = stream
        if stream.initiated_here or not stream.unidirectional:
            stream.on_stopped(partial(self._stopped, self.stream_id))
        if not (stream.initiated_here and stream.unidirectional):
            stream.on_readable(self.look)

    def look(self) -> None:
        """Have it read soon. That of a stream that is over does no harm to the next one."""
        if not (self.waits or self.over):
            self.waits = True
            wires = self.connection.wires
            wires.line.append(self)
            wires.wake()

    def _stopped(self, stream_id: int, code: int) -> None:
        if stream_id == self.stream_id:
            self.stop_code = code
            self.look()

    def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`: somebody else ends it, if it does not rest."""
        connection = self.connection
        if self.over:
            connection.resting.forget(self)
        self.fit = False
        if not (self.over or connection.ending):
            connection.wires.give_up(self)
        self.over = True
        del self.connection  # the carrier's stream still holds this


class Wires:
    """All streams of one connection.

    Args:
        connection: whose children they are.
        wake: called when somebody stands in line.
    """

    def __init__(self, connection: Connection, wake: Callable[[], None]) -> None:
        self._connection = connection
        self._core = connection.core
        self._feed = connection.feed
        self._resting = connection.resting
        self.wake = wake
        self._table: dict[int, Wire] = {}
        self._opening: tuple[deque[Wire], deque[Wire]] = (deque(), deque())
        self.line: deque[Wire] = deque()
        """Those to be looked at."""
        self._drained = False
        self._carrier: carriers.Connection
        self._tasks: trio.Nursery

    def __len__(self) -> int:
        """Count streams that are in use, or wait to be opened."""
        return len(self._table)

    def start(self, carrier: carriers.Connection, tasks: trio.Nursery) -> None:
        """Begin; the tasks for it end with the carrier."""
        self._carrier, self._tasks = carrier, tasks
        tasks.start_soon(self._accept)

    def drain(self) -> None:
        """Give the core all that had arrived, blocked or not, when the tasks have ended."""
        self._drained = True
        now = trio.current_time()
        for wire in list(self._table.values()):
            if wire.stream is not None:
                self._look(wire, now)

    def clear(self) -> None:
        """Forget all streams."""
        for wire in self._table.values():
            wire.over = True
            wire.stream = wire.backlog = None
        self._table.clear()
        for line in self._opening:
            line.clear()

    def release(self) -> None:
        """The connection's actor has ended: let go of it."""
        self.line.clear()
        del self._connection, self._feed, self.wake

    def _add(self, stream_id: int, priority: int = USUAL) -> Wire:
        try:
            wire = self._resting.take(Wire)
        except ActorStopped:  # the connection is ending
            wire = Wire(self._connection)
            wire.fit = False
        wire.stream_id, wire.priority, wire.over = stream_id, priority, False
        self._table[stream_id] = wire
        return wire

    def _leave(self, wire: Wire) -> None:
        """A stream is over: its actor may have another one."""
        if self._table.pop(wire.stream_id, None) is None:
            return
        wire.stream_id, wire.over = -1, True
        wire.stream = wire.backlog = wire.stop_code = None
        if wire.fit:
            if len(self._resting.of(Wire)) < self._resting.most:
                self._resting.put(wire)
            else:  # where ten thousand channels end at once
                release(wire)

    def give_up(self, wire: Wire) -> None:
        """Somebody has ended the actor of a stream: end the stream, in both directions, and tell the core.

        A channel whose control stream this was is lost; one with messages on it cannot complete any more, and has the time of AQ-20a to
        end; the connection ends with its own control stream.

        Source: AQ-20, AQ-20a, AQ-48, E-13.
        """
        core, stream_id, now = self._core, wire.stream_id, trio.current_time()
        if stream_id == core.control_id:
            self._feed(core.close(CloseCode.APPLICATION, "the actor of the connection control stream was ended", now))
        elif stream_id & _UNIDIRECTIONAL and bool(stream_id & _SERVER) is not core.client:
            self.do(ResetStream(stream_id, ResetCode.LOST))
            self._feed(core.stream_stopped(stream_id, ResetCode.LOST, now))
        else:
            self.do(StopStream(stream_id, ResetCode.LOST))
            self._over(wire, core.stream_reset(stream_id, ResetCode.LOST, now))
        wire.over = True

    # ------------------------------------------------ writing

    def open(self, output: OpenStream) -> None:
        """Open a stream now, or when the peer lets it be."""
        wire = self._add(output.stream_id, URGENT if output.urgent else USUAL)
        line = self._opening[output.unidirectional]
        if not line:
            try:
                stream = self._carrier.try_open_stream(unidirectional=output.unidirectional, priority=wire.priority)
            except CarrierError:
                return  # it has ended, which the core will be told
            if stream is not None:
                self._opened(wire, stream)
                return
            self._tasks.start_soon(self._open_more, output.unidirectional)
        line.append(wire)

    async def _open_more(self, unidirectional: bool) -> None:
        line = self._opening[unidirectional]
        try:
            while line:
                stream = await self._carrier.open_stream(unidirectional=unidirectional, priority=line[0].priority)
                self._opened(line.popleft(), stream)
        except CarrierError:
            pass

    def _opened(self, wire: Wire, stream: carriers.Stream) -> None:
        assert stream.stream_id == wire.stream_id, "streams are opened in the order of their numbers"
        wire.take(stream)
        backlog, wire.backlog = wire.backlog, None
        for output in backlog or ():
            self.do(output)

    def do(self, output: StreamOutput) -> None:
        """Do what the core wants done on a stream."""
        wire = self._table.get(output.stream_id)
        if wire is None:
            return  # the carrier had ended when it was to be opened
        stream = wire.stream
        if stream is None:
            if wire.backlog is None:
                wire.backlog = []
            wire.backlog.append(output)
            return
        try:
            match output:
                case StreamData(data=data, fin=fin):
                    stream.send_nowait(data, fin=fin)
                case ResetStream(code=code):
                    stream.reset(code)
                case StopStream(code=code):
                    stream.stop(code)
                case StreamDone():
                    self._leave(wire)
        except StreamWasStopped:
            pass  # it stands in line, and the core will hear of it
        except CarrierError:
            pass

    # ------------------------------------------------ reading

    async def _accept(self) -> None:
        carrier = self._carrier
        try:
            while True:
                stream: carriers.Stream | None = await carrier.accept_stream()
                while stream is not None:
                    self._add(stream.stream_id).take(stream)
                    stream = carrier.accept_stream_nowait()
        except CarrierError:
            pass

    def look(self) -> None:
        """Give the core what has come on the first of those that stand in line."""
        now = trio.current_time()
        for _ in range(min(len(self.line), AT_ONCE)):
            self._look(self.line.popleft(), now)

    def unblock(self, stream_id: int) -> None:
        """Read a stream on."""
        wire = self._table.get(stream_id)
        if wire is not None:
            wire.look()

    def _look(self, wire: Wire, now: float) -> None:
        wire.waits = False
        stream, stream_id, core = wire.stream, wire.stream_id, self._core
        if stream is None:
            return  # its stream was over meanwhile
        if wire.stop_code is not None and not wire.over:
            code, wire.stop_code = wire.stop_code, None
            self._feed(core.stream_stopped(stream_id, code, now))
        if wire.over or (stream.unidirectional and stream.initiated_here):
            return
        try:
            while self._drained or not core.is_blocked(stream_id):
                data = stream.receive_nowait()
                if data is None:
                    return
                if not data:
                    self._over(wire, core.receive_stream_data(stream_id, b"", True, now))
                    return
                self._feed(core.receive_stream_data(stream_id, data, False, now))
        except StreamWasReset as error:
            self._over(wire, core.stream_reset(stream_id, error.code, now))
        except ConnectionClosed:
            # Stopped here; nothing happens if the connection is over.
            self._over(wire, core.stream_reset(stream_id, ResetCode.LOST, now))
        except CarrierError:
            pass  # the connection has ended

    def _over(self, wire: Wire, events: list[Event]) -> None:
        """The peer's direction has ended: a stream of which that is all is forgotten."""
        if wire.stream_id & _UNIDIRECTIONAL:
            self._leave(wire)
        self._feed(events)
