"""The streams of a connection's carrier, under the numbers by which the core speaks of them.

* No stream has a task. The carrier tells which streams have something to read, or were stopped by the peer; they stand in line until
  the connection looks at them.
* What the core does not take yet stays with the carrier, which then holds back the peer: a stream that is blocked is not read.
* Streams are opened in the order in which the core names them. Where the peer gives no credit for one, what is to be done on it waits,
  and so do those behind it of the same kind; control streams, which carry the acks, do not wait for streams of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, StreamWasReset, StreamWasStopped
from levada.transports import carriers
from levada.transports.aqueduct import (
    AqueductCore,
    Event,
    OpenStream,
    ResetCode,
    ResetStream,
    StopStream,
    StreamData,
    StreamDone,
)

__all__ = ["AT_ONCE", "StreamOutput", "Wires"]

StreamOutput = StreamData | ResetStream | StopStream | StreamDone
"""What is to be done on a stream that the core has named."""

AT_ONCE = 32
"""Streams that are read or written before others may run: about half a millisecond."""
URGENT, USUAL = 64, 128  # priorities of streams


class Wire:
    """One stream of the carrier, or one that waits to be opened."""

    __slots__ = ("_wires", "backlog", "over", "priority", "stop_code", "stream", "stream_id", "waits")

    def __init__(self, wires: Wires, stream_id: int, priority: int = USUAL) -> None:
        self._wires = wires
        self.stream_id = stream_id
        self.stream: carriers.Stream | None = None
        self.priority = priority
        self.backlog: list[StreamOutput] | None = None
        """What is to be done when the stream is open."""
        self.stop_code: int | None = None
        """The peer has stopped this side's direction, and the core does not know yet."""
        self.waits = False
        """Whether it stands in line."""
        self.over = False
        """Whether nothing that comes is wanted any more."""

    def take(self, stream: carriers.Stream) -> None:
        """Begin with a stream of the carrier."""
        self.stream = stream
        if stream.initiated_here or not stream.unidirectional:
            stream.on_stopped(self._stopped)
        if not (stream.initiated_here and stream.unidirectional):
            stream.on_readable(self.look)

    def look(self) -> None:
        """Have it read soon."""
        if not (self.waits or self.over):
            self.waits = True
            self._wires.line.append(self)
            self._wires.wake()

    def _stopped(self, code: int) -> None:
        self.stop_code = code
        self.look()


class Wires:
    """All streams of one connection.

    Args:
        core: of the connection.
        feed: takes what the core says about what came.
        wake: called when somebody stands in line.
    """

    def __init__(self, core: AqueductCore, feed: Callable[[list[Event]], None], wake: Callable[[], None]) -> None:
        self._core = core
        self._feed = feed
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
        for wire in list(self._table.values()):
            if wire.stream is not None:
                self._look(wire)

    def clear(self) -> None:
        """Forget all streams."""
        for wire in self._table.values():
            wire.over = True
        self._table.clear()

    # ------------------------------------------------ writing

    def open(self, output: OpenStream) -> None:
        """Open a stream now, or when the peer lets it be."""
        wire = Wire(self, output.stream_id, URGENT if output.urgent else USUAL)
        self._table[output.stream_id] = wire
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
                    wire.over = True
                    del self._table[output.stream_id]
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
                    wire = self._table[stream.stream_id] = Wire(self, stream.stream_id)
                    wire.take(stream)
                    stream = carrier.accept_stream_nowait()
        except CarrierError:
            pass

    def look(self) -> None:
        """Give the core what has come on the first of those that stand in line."""
        for _ in range(min(len(self.line), AT_ONCE)):
            self._look(self.line.popleft())

    def unblock(self, stream_id: int) -> None:
        """Read a stream on."""
        wire = self._table.get(stream_id)
        if wire is not None:
            wire.look()

    def _look(self, wire: Wire) -> None:
        wire.waits = False
        stream, stream_id, core = wire.stream, wire.stream_id, self._core
        assert stream is not None
        if wire.stop_code is not None and not wire.over:
            code, wire.stop_code = wire.stop_code, None
            self._feed(core.stream_stopped(stream_id, code))
        if wire.over or (stream.unidirectional and stream.initiated_here):
            return
        try:
            while self._drained or not core.is_blocked(stream_id):
                data = stream.receive_nowait()
                if data is None:
                    return
                if not data:
                    self._over(wire, core.receive_stream_data(stream_id, b"", fin=True))
                    return
                self._feed(core.receive_stream_data(stream_id, data))
        except StreamWasReset as error:
            self._over(wire, core.stream_reset(stream_id, error.code))
        except ConnectionClosed:
            # Stopped here; nothing happens if the connection is over.
            self._over(wire, core.stream_reset(stream_id, ResetCode.LOST))
        except CarrierError:
            pass  # the connection has ended

    def _over(self, wire: Wire, events: list[Event]) -> None:
        """The peer's direction has ended: a stream of which that is all is forgotten."""
        stream = wire.stream
        assert stream is not None
        if stream.unidirectional:
            wire.over = True
            self._table.pop(wire.stream_id, None)
        self._feed(events)
