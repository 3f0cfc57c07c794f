"""The streams of a connection: between the core, which speaks of numbers, and the carrier.

* No stream has a task. The carrier says when one can be read, and it is read in the connection's next turn, before anything is
  written: so all that is at hand on a stream has been judged before its Proceed goes out (MA-50).
* A stream that the core, or a slow reader here, wants to be held back is not read; the carrier's window then stops the peer.
* Streams get their numbers in the order of opening. One that was waited for is kept as a spare until the core names its number.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, StreamWasReset, StreamWasStopped
from levada.transports import carriers
from levada.transports.maop import (
    CloseConnection,
    Event,
    Incoming,
    MaopCore,
    OpenStream,
    Output,
    ResetStream,
    SetPriority,
    StopStream,
    StreamData,
)

if TYPE_CHECKING:
    from .registry import Rate

__all__ = ["Streams"]

logger = logging.getLogger("levada.actors.maop")

_SENDING, _RECEIVING, _BOTH = 1, 2, 3
AT_ONCE: Final = 128
"""Streams that are read in one turn: a burst of requests must not keep other connections waiting. Each is read as far as it goes (MA-50)."""
CONTROL_HIGH: Final = 65_536
"""Octets queued on a control stream above which its signals wait in the core, where they are ordered and bounded. Source: MA-85."""


class Streams:
    """The carrier's streams of one connection.

    Args:
        core: of the connection.
        feed: takes the core's events.
        turn: asks for a turn.
        tasks: runs what has to wait.
        crowded: is told of a control stream that takes no more for now.
        signals: hears of all signals that go out; ``None`` for nobody.
    """

    def __init__(
        self,
        core: MaopCore,
        feed: Callable[[list[Event]], None],
        turn: Callable[[], None],
        tasks: trio.Nursery,
        crowded: Callable[[int], None],
        signals: Callable[[StreamData], None] | None,
    ) -> None:
        self.carrier: carriers.Connection | None = None
        """``None`` before the beginning."""
        self.over = False
        """Whether the carrier has ended."""
        self.held: set[int] = set()
        """Streams that a slow reader here holds back."""
        self.rate: Rate | None = None
        """Bounds the octets of bodies, if the identity has a limit."""
        self._core = core
        self._feed = feed
        self._turn = turn
        self._tasks = tasks
        self._crowded = crowded
        self._signals = signals
        self._streams: dict[int, carriers.Stream] = {}
        self._directions: dict[int, int] = {}
        self._ready: dict[int, None] = {}
        self._stops: list[tuple[int, int]] = []
        self._now = 0.0
        self._finished: list[int] = []
        self._spares: dict[bool, deque[carriers.Stream]] = {False: deque(), True: deque()}
        self._opened = {False: 0, True: 0}

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, stream_id: int) -> carriers.Stream | None:
        """Return a stream that is in use."""
        return self._streams.get(stream_id)

    # ------------------------------------------------ what comes

    async def accept(self) -> None:
        """Take the peer's streams until the carrier ends."""
        carrier = self.carrier
        assert carrier is not None
        try:
            while True:
                stream: carriers.Stream | None = await carrier.accept_stream()
                while stream is not None:
                    self._adopt(stream)
                    stream = carrier.accept_stream_nowait()
        except CarrierError:
            pass

    def finish(self) -> None:
        """The carrier has ended: give the core what had arrived."""
        assert self.carrier is not None
        self.over = True
        while (stream := self.carrier.accept_stream_nowait()) is not None:
            self._adopt(stream)
        while self._ready:
            self.read()

    def _adopt(self, stream: carriers.Stream) -> None:
        """Take a stream of the peer."""
        stream_id = stream.stream_id
        self._streams[stream_id] = stream
        stream.on_readable(partial(self._readable, stream_id))
        if not stream_id & 2:
            stream.on_stopped(partial(self._stopped, stream_id))

    def _readable(self, stream_id: int) -> None:
        self._ready[stream_id] = None
        self._turn()

    def _stopped(self, stream_id: int, code: int) -> None:
        self._stops.append((stream_id, code))
        self._turn()

    def resume(self, stream_id: int) -> None:
        """Read a stream again that was held back."""
        self.held.discard(stream_id)
        if stream_id in self._streams:
            self._readable(stream_id)

    def read(self) -> bool:
        """Give the core what is at hand, `AT_ONCE` streams at most; say whether there was anything. For the rest another turn is due."""
        some = bool(self._ready)
        self._now = trio.current_time()
        left = AT_ONCE
        while self._ready and left:
            ready, self._ready = self._ready, {}
            if len(ready) > left:
                ids = list(ready)
                ready, self._ready = dict.fromkeys(ids[:left]), dict.fromkeys(ids[left:])
                self._turn()
            left -= len(ready)
            for stream_id in ready:
                stream = self._streams.get(stream_id)
                if stream is not None:
                    self._take(stream_id, stream)
        if self._stops:
            stops, self._stops = self._stops, []
            for stream_id, code in stops:
                if not stream_id & 2:
                    self._end(stream_id, _SENDING)
                self._feed(self._core.stream_stopped(stream_id, code, now=self._now))
        return some

    def _take(self, stream_id: int, stream: carriers.Stream) -> None:
        core, held, now = self._core, self.held, self._now
        rate = self.rate
        if rate is not None and type(core.streams.get(stream_id)) is not Incoming:
            rate = None
        try:
            while stream_id not in held and not core.is_blocked(stream_id):
                if rate is not None and rate.until > now and not self.over:
                    held.add(stream_id)
                    self._tasks.start_soon(self._resume_at, stream_id, rate.until)
                    return
                data = stream.receive_nowait()
                if data is None:
                    return
                # The end mostly comes with the last octets: told together, it costs the core one call less.
                fin = not data or stream.at_end
                if rate is not None:
                    rate.take(len(data), now)
                events = core.receive_stream_data(stream_id, data, fin, now=now)
                if events:
                    self._feed(events)
                if fin:
                    self._end(stream_id, _RECEIVING)
                    return
        except (StreamWasReset, ConnectionClosed) as error:
            # A stream that was stopped here ends for the core as if the peer had reset it.
            self._feed(core.stream_reset(stream_id, getattr(error, "code", 0), now=now))
            self._end(stream_id, _RECEIVING)
        except CarrierError:
            pass  # the connection has ended

    async def _resume_at(self, stream_id: int, at: float) -> None:
        await trio.sleep_until(at)
        self.resume(stream_id)

    def _end(self, stream_id: int, direction: int) -> None:
        """A direction of a stream is over; forget the stream if it was the last."""
        over = _BOTH if stream_id & 2 else self._directions.get(stream_id, 0) | direction
        if over == _BOTH:
            self._streams.pop(stream_id, None)
            self._directions.pop(stream_id, None)
            self.held.discard(stream_id)
        elif stream_id in self._streams:
            self._directions[stream_id] = over

    # ------------------------------------------------ what the core wants done

    def write(self, outputs: list[Output]) -> None:
        """Do what the core wants, in its order."""
        do = self._do
        for output in outputs:
            do[type(output)](self, output)
        if self._finished:
            for stream_id in self._finished:
                self._streams.pop(stream_id, None)
            self._finished.clear()

    def finished(self, stream_id: int) -> None:
        """A Message of ours is over: until now its stream might have been reset."""
        self._finished.append(stream_id)

    def refresh_credit(self) -> None:
        """Tell the core how many streams the peer allows. Source: MA-130."""
        carrier = self.carrier
        if carrier is not None:
            opened = self._opened
            self._core.stream_credit(
                bidirectional=opened[False] + carrier.stream_credit(unidirectional=False),
                unidirectional=opened[True] + carrier.stream_credit(unidirectional=True),
            )

    async def open_spare(self, *, unidirectional: bool) -> None:
        """Wait for a stream, for whoever is next in the core."""
        assert self.carrier is not None
        stream = await self.carrier.open_stream(unidirectional=unidirectional)
        self._opened[unidirectional] += 1
        self._spares[unidirectional].append(stream)

    def _open(self, output: OpenStream) -> None:
        unidirectional = output.unidirectional
        spares = self._spares[unidirectional]
        stream: carriers.Stream | None = None
        if spares:
            stream = spares.popleft()
        elif not self.over:
            assert self.carrier is not None
            try:
                stream = self.carrier.try_open_stream(unidirectional=unidirectional)
                self._opened[unidirectional] += 1
            except CarrierError:
                self.over = True
        if stream is None:
            return  # it has ended, which the core will hear
        assert stream.stream_id == output.stream_id, "streams are opened in the order of their numbers"
        priority = max(0, output.priority)
        if priority != 128:
            stream.priority = priority
        stream_id = output.stream_id
        self._streams[stream_id] = stream
        if not unidirectional:
            stream.on_readable(partial(self._readable, stream_id))

    def _send(self, output: StreamData) -> None:
        stream_id = output.stream_id
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        try:
            stream.send_nowait(output.data, fin=output.fin)
        except CarrierError:
            return  # it was stopped, of which the core hears, or the connection has ended
        if output.fin:
            if not stream_id & 2:
                self._end(stream_id, _SENDING)
            return
        stream.on_stopped(partial(self._stopped, stream_id))
        if stream_id not in self._core.pool.streams:
            return
        if self._signals is not None:
            self._signals(output)
        if stream.unsent > CONTROL_HIGH:
            self._core.set_control_writable(stream_id, False)
            self._crowded(stream_id)

    def _reset(self, output: ResetStream) -> None:
        stream = self._streams.get(output.stream_id)
        if stream is not None:
            stream.reset(output.code)
            self._end(output.stream_id, _SENDING)

    def _stop(self, output: StopStream) -> None:
        stream = self._streams.get(output.stream_id)
        if stream is not None:
            self.held.discard(output.stream_id)
            stream.stop(output.code)  # it can be "read" now: its end

    def _set_priority(self, output: SetPriority) -> None:
        stream = self._streams.get(output.stream_id)
        if stream is not None:
            stream.priority = output.priority

    def _close(self, output: CloseConnection) -> None:
        if self.carrier is not None:
            self.carrier.close(output.code, output.reason)

    _do: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        CloseConnection: _close,
        OpenStream: _open,
        ResetStream: _reset,
        SetPriority: _set_priority,
        StopStream: _stop,
        StreamData: _send,
    }

    async def room(self, stream_id: int) -> None:
        """Wait until a stream has room for more.

        Raises:
            CarrierError: there will be none.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            raise StreamWasStopped(f"stream {stream_id} takes no more octets")
        await stream.send_all(b"")

    async def all_acked(self) -> None:
        """Wait until the peer's carrier has all signals that were written."""
        for stream in [self._streams.get(stream_id) for stream_id in self._core.pool.streams]:
            try:
                if stream is not None:
                    await stream.all_acked()
            except CarrierError:
                pass  # it was stopped, or the connection has ended

    def clear(self) -> None:
        """The connection is over."""
        self.over = True
        self.carrier = None
        for collection in (self._streams, self._ready, self._directions, self.held, self._stops, self._finished):
            collection.clear()
