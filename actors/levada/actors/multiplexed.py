"""Connections over a carrier with many streams: `MultiplexedDriver`.

* The core's events and outputs are taken once for a batch of turns: `MultiplexedDriver.flush_soon` asks for it. Streams are read first.
* No stream has a task. The carrier says when a stream can be read; once a turn, or once a batch of the carrier's, the core gets what is at
  hand.
* A stream that the core blocks, or that the protocol holds back, is not read; the carrier's window then stops the peer.
* Streams get their numbers in the order of opening. Where the peer gives no credit for one, its output waits, and so do later streams
  of the same kind; the other kind goes on.
* Nothing is kept of a stream that has ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

import trio

from levada.framework import FlowWindow
from levada.framework.embedding import ActorPhase, local_ref
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed, StreamWasReset
from levada.transports import carriers
from levada.transports.core import Core, OpenStream, ResetStream, StopStream, StreamData, StreamsInput

from .driver import DUE, Driver, Ended
from .listening import Accepted, begin

__all__ = ["MultiplexedCore", "MultiplexedDriver", "Opens", "Rate", "accepting"]

E = TypeVar("E")
Out = TypeVar("Out")

_UNIDIRECTIONAL: Final = 2
"""Bit of a stream's id."""
_SENDING: Final = 1
_RECEIVING: Final = 2


class MultiplexedCore(Core[E, Out], StreamsInput[E], Protocol[E, Out]):
    """A core that gets the input of streams."""

    events: list[E]
    """What `take_events` returns next."""

    def is_blocked(self, stream_id: int) -> bool:
        """Return whether a stream must not be read now."""
        ...


class Rate:
    """A limit in bytes per second, kept as the time when more may be read."""

    __slots__ = ("bytes_per_second", "until")

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        """The limit."""
        self.until = 0.0
        """When the bytes taken so far are paid for."""

    def take(self, size: int, now: float) -> None:
        """Count bytes."""
        self.until = max(self.until, now) + size / self.bytes_per_second


Opens: TypeAlias = Callable[
    [], AbstractAsyncContextManager[carriers.ByteStream | carriers.MessageStream | carriers.Connection]
]
"""Makes the context of a carrier: entering it connects or accepts, leaving it closes."""


@asynccontextmanager
async def accepting(incoming: Accepted) -> AsyncIterator[carriers.Connection]:
    """Open what a listener handed over, with its handshake; leaving the block closes it.

    Raises:
        ConfigurationError: the listener's carrier has no connections of many streams.
    """
    if not isinstance(incoming, carriers.Incoming):
        incoming.abort()
        raise _one_stream(incoming)
    async with begin(incoming) as connection:
        await connection.handshake()
        yield connection


def _one_stream(carrier: carriers.ByteStream | carriers.MessageStream) -> ConfigurationError:
    return ConfigurationError(f"needs a carrier of many streams; {carrier.info.scheme}:// has one")


def _nothing(*_: int) -> None:
    """Do nothing, since the connection is over."""


C = TypeVar("C", bound=MultiplexedCore[Any, Any])


class MultiplexedDriver(Driver[C], Generic[C]):
    """A connection over a carrier with many streams."""

    opens: Opens

    acts: ClassVar[Mapping[type, Callable[[Any, Any], None]]]
    """What to do for each class of output of the core."""
    last: ClassVar[type[Any]]
    """The class of the core's last event."""
    rounds: ClassVar[int]
    """Rounds of trio's loop that a turn which has read waits at most for tasks that can run."""
    amount: ClassVar[int]
    """About so many outputs go out in one turn, so that others can run between."""
    at_once: ClassVar[int]
    """Streams that one turn reads at most, so that others can run between. Each is read as far as it goes."""
    takes_blocked: ClassVar[bool] = False
    """Whether the core takes what had arrived on blocked streams when the carrier ends."""
    watches_all: ClassVar[bool] = False
    """Whether the core is told of stops also on streams that were opened and finished at once."""
    forgets_ended: ClassVar[bool] = False
    """Whether a bidirectional stream is forgotten when both directions have ended, and a unidirectional stream when it is reset; otherwise
    `forget_done` is the core's."""
    stopped_code: ClassVar[int] = 0
    """Tells the core that a stream that was stopped here is over, as if the peer had reset it with this code."""
    most_unsent: ClassVar[int | None] = None
    """Unsent bytes above which `crowded` is called for a stream that goes on; `None` for no limit."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.acting = self.acts
        """`acts`, or a copy in which a connection does more."""
        self.carrier: carriers.Connection | None = None
        """Stays after the end, with its counters."""
        self.live: carriers.Connection | None = None
        """The carrier, until the connection is over."""
        self.tasks: trio.Nursery | None = None
        """Where the connection's own tasks run, once it has a carrier."""
        self.early = False
        """Whether work may begin before the peer has greeted."""
        self.turns = 0
        """Times that outputs were taken."""
        self.unbegun = 0
        """Children that have been given work and have not begun: a turn waits for them, too."""
        self.held: set[int] = set()
        """Streams that are not read for now; `resume` ends it."""
        self.rate: Rate | None = None
        """Limits the bytes read of the streams that are `limited`."""
        self._carrier_over = False  # it takes and gives no more
        self._turn_due = False
        self._just_read = False  # what has come with a batch was read, and the tasks that it woke have not run yet
        self._parked: trio.lowlevel.Task | None = None
        self._streams: dict[int, carriers.Stream] = {}
        self._half: dict[int, int] = {}  # of streams: the direction that is over
        self._watched: set[int] = set()  # streams on which more is sent, so that a stop is told
        self._ready: dict[int, None] = {}  # streams to be read in the next turn
        self._stops: list[tuple[int, int]] = []  # streams that the peer has stopped, and its codes, until the next turn
        # All streams have the same two callbacks.
        self._tell_readable: Callable[[int], None] = self._readable
        self._tell_stopped: Callable[[int, int], None] = self._stopped
        self._opened = [0, 0]
        self._spares: tuple[deque[carriers.Stream], deque[carriers.Stream]] = (deque(), deque())
        self._waiting: tuple[deque[OpenStream], deque[OpenStream]] = (deque(), deque())
        self._backlog: dict[int, list[tuple[Callable[[Any], None], Any]]] = {}
        self._finished: list[int] = []  # streams that are forgotten after the next write

    @property
    def ending(self) -> bool:
        """Whether this actor is ending, and all its children with it: there may be no more of them."""
        return local_ref(self).phase is not ActorPhase.RUNNING

    async def carry(self) -> None:
        """Run the one carrier."""
        async with self.opens() as carrier:
            if not isinstance(carrier, carriers.Connection):
                raise _one_stream(carrier)
            await self.run_on(carrier)

    async def run_on(self, carrier: carriers.Connection) -> None:
        """Read and write until the carrier ends; give the core what had arrived before that."""
        self.carrier = self.live = carrier
        self.connected(carrier.info, early=self.early)
        async with trio.open_nursery() as tasks:
            self.tasks = tasks
            carrier.on_stream(self._accept)
            carrier.on_batch(self._arrived)
            tasks.start_soon(self._take_turns)
            await self.begin(carrier)
            reason = await carrier.wait_closed()
            self._read_rest()
            tasks.cancel_scope.cancel()
        self.lost(reason.code, str(reason))

    @abstractmethod
    async def begin(self, carrier: carriers.Connection) -> None:
        """Tell the core of the handshake; what comes is read already."""

    def start_task(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task that ends with the carrier; before and after it, start none."""
        if self.tasks is not None and not self._carrier_over:
            self.tasks.start_soon(function, *args)

    def carrier_statistics(self) -> carriers.CarrierStatistics | None:
        """Return the counters of the carrier."""
        return None if self.carrier is None else self.carrier.statistics()

    def flow(self, queued: int) -> FlowWindow:
        """Return what the carrier lets pass on all streams together."""
        assert self.carrier is not None, "there is no carrier"
        return FlowWindow(*self.carrier.credit(), queued, "bytes")

    def flush_soon(self) -> None:
        """Read and write soon, when the tasks that can run now have run."""
        if not self._turn_due:
            self._turn_due = True
            if self._parked is not None:
                trio.lowlevel.reschedule(self._parked)
                self._parked = None

    async def _take_turns(self) -> None:
        """Take turns. What was read wakes tasks, and what these write goes out together with what the core has to say."""

        def give_up(_: object) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            if not (self._turn_due or self._just_read):
                self._parked = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(give_up)
            # Without waiting, the answers to what was read go into packets of their own, which costs a fifth of all requests a second
            # with 64 at a time. Half of the time, trio runs this task before those that can run now; then it waits once more.
            rounds = 0
            if self._ready or self._stops:
                self._read()
                self._turn_due = False
                rounds = self.rounds
                await trio.lowlevel.checkpoint()
            elif self._just_read:
                rounds = self.rounds + 1
            self._just_read = quiet = False
            for _ in range(1, rounds):
                if not self.unbegun:
                    if self._turn_due or quiet:
                        break
                    quiet = True
                await trio.lowlevel.checkpoint()
            self.flush()
            if self._turn_due:
                await trio.lowlevel.checkpoint()

    def _arrived(self) -> None:
        """Read what a batch of the carrier has brought, in its task. An ask between nodes takes a round of trio's loop less at each end."""
        if self.live is not None and (self._ready or self._stops):
            self._read()
            self._turn_due, self._just_read = bool(self._ready), True

    def flush(self) -> bool:
        """Read the available bytes, write the output, apply the remaining events of the core, and set the timer."""
        self._turn_due = False
        carrier = self.live
        if carrier is None:
            return False
        self.turns += 1
        if self._ready or self._stops:
            self._read()
        outputs = self.outputs()
        if outputs or self._finished:
            carrier.together(partial(self._write, outputs))
        core = self.core
        if core.events:
            self.feed(core.take_events())
        deadline = core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:  # as `retime`, by a call less
            self._armed = deadline
            self.timers.at("core", deadline, DUE)
        if self._ready or len(outputs) >= self.amount:
            self.flush_soon()
        return bool(outputs)

    def outputs(self) -> list[Any]:
        """Take what the core wants done, of much only about `amount`."""
        return self.core.data_to_send(trio.current_time())

    def feed(self, events: list[Any]) -> None:
        """Apply what the core says, and have sent what follows from it."""
        if events:
            self.apply(events)
        self.flush_soon()

    def apply(self, events: list[Any]) -> None:
        """Do what events mean; children that end with the connection find `end` set already."""
        if events and type(events[-1]) is self.last:
            self.end = events[-1]
            self.ends(events[-1])
        table = self.events
        for event in events:
            table[type(event)](self, event)

    def ends(self, event: Any) -> None:
        """The connection has ended, and what ends with it is about to be told."""

    def ended(self, event: Ended, reason: str) -> None:
        """Close the carrier as the core wants it, before a caller who was waiting does."""
        super().ended(event, reason)
        self._write(self.core.data_to_send(trio.current_time()))

    def lost(self, code: int, reason: str) -> None:
        """The carrier has ended."""
        super().lost(code, reason)
        self._clear()

    def release(self) -> None:
        """Drop the carrier and its streams."""
        super().release()
        self._clear()

    def _clear(self) -> None:
        """The connection is over: forget all streams."""
        self._carrier_over = True
        self.live = self.rate = None
        self._tell_readable = self._tell_stopped = _nothing  # they referred to this object
        for collection in (self._streams, self._backlog, self._half, self._watched, self._ready, self.held):
            collection.clear()
        self._stops.clear()
        self._finished.clear()
        for line in (*self._waiting, *self._spares):
            line.clear()

    @property
    def stream_count(self) -> int:
        """Number of streams that are in use, or wait to be opened."""
        return len(self._streams) + len(self._backlog)

    def stream(self, stream_id: int) -> carriers.Stream | None:
        """Return a stream that is open."""
        return self._streams.get(stream_id)

    def stream_begun(self, stream_id: int) -> None:
        """A stream begins, or waits to be opened."""

    def crowded(self, stream_id: int) -> None:
        """More than `most_unsent` bytes of a stream are unsent."""

    def limited(self, stream_id: int) -> bool:
        """Whether `rate` limits what is read of a stream."""
        return True

    def _accept(self) -> None:
        """Begin with the streams of the peer."""
        carrier = self.live
        while carrier is not None and (stream := carrier.accept_stream_nowait()) is not None:
            stream_id = stream.stream_id
            self.stream_begun(stream_id)
            self._streams[stream_id] = stream
            stream.on_readable(self._tell_readable)
            if not stream_id & _UNIDIRECTIONAL:
                stream.on_stopped(self._tell_stopped)

    def _stopped(self, stream_id: int, code: int) -> None:
        self._stops.append((stream_id, code))
        self.flush_soon()

    def resume(self, stream_id: int) -> None:
        """Read a stream soon that is no longer held back or blocked."""
        self.held.discard(stream_id)
        self._readable(stream_id)

    def _readable(self, stream_id: int) -> None:
        ready = self._ready
        if not ready:
            self.flush_soon()
        ready[stream_id] = None

    def _read(self) -> None:
        """Give the core what is at hand."""
        now = trio.current_time()
        left = self.at_once
        while self._ready and left:
            ready, self._ready = self._ready, {}
            if len(ready) > left:
                ids = list(ready)
                ready, self._ready = dict.fromkeys(ids[:left]), dict.fromkeys(ids[left:])
            left -= len(ready)
            for stream_id in ready:
                stream = self._streams.get(stream_id)
                if stream is not None:
                    self._take(stream_id, stream, now)
        if self._stops:
            stops, self._stops = self._stops, []
            for stream_id, code in stops:
                if not stream_id & _UNIDIRECTIONAL:
                    self._end(stream_id, _SENDING)
                self.apply(self.core.stream_stopped(stream_id, code, now))

    def _take(self, stream_id: int, stream: carriers.Stream, now: float, *, blocked: bool = False) -> None:
        core, held = self.core, self.held
        while blocked or (stream_id not in held and not core.is_blocked(stream_id)):
            rate = self.rate
            if rate is not None:
                if not self.limited(stream_id):
                    rate = None
                elif rate.until > now and not self._carrier_over:
                    held.add(stream_id)
                    self.start_task(self._resume_at, stream_id, rate.until)
                    return
            try:
                data = stream.receive_nowait()
            except CarrierError as error:
                self._failed(stream_id, error, now)
                return
            if data is None:
                return
            # The end mostly comes with the last bytes: told together, it costs the core one call less.
            fin = not data or stream.at_end
            if rate is not None:
                rate.take(len(data), now)
            events = core.receive_stream_data(stream_id, data, fin, now)
            if events:
                self.apply(events)
            if fin:
                self._end(stream_id, _RECEIVING)
                return
        if stream.was_reset:
            try:
                stream.receive_nowait()  # it raises: what is given up is over now, however much is still to be processed
            except CarrierError as error:
                self._failed(stream_id, error, now)

    def _failed(self, stream_id: int, error: CarrierError, now: float) -> None:
        if isinstance(error, StreamWasReset):
            code = error.code
        elif isinstance(error, ConnectionClosed):
            code = self.stopped_code
        else:
            return  # the connection has ended
        self.apply(self.core.stream_reset(stream_id, code, now))
        self._end(stream_id, _RECEIVING)

    async def _resume_at(self, stream_id: int, at: float) -> None:
        await trio.sleep_until(at)
        self.resume(stream_id)

    def _read_rest(self) -> None:
        """The carrier has ended: give the core what had arrived."""
        self._carrier_over = True
        while self._ready:
            self._read()
        if self.takes_blocked:
            now = trio.current_time()
            for stream_id, stream in [*self._streams.items()]:
                if self.core.is_blocked(stream_id):
                    self._take(stream_id, stream, now, blocked=True)

    def _end(self, stream_id: int, direction: int) -> None:
        """A direction of a stream is over."""
        if stream_id & _UNIDIRECTIONAL:
            over = self.forgets_ended or direction == _RECEIVING
        else:
            over = (
                self.forgets_ended
                and stream_id in self._streams
                and self._half.setdefault(stream_id, direction) != direction
            )
        if over:
            self.forget(stream_id)

    def forget(self, stream_id: int) -> bool:
        """A stream is over; return whether it was in use."""
        if self._streams.pop(stream_id, None) is None:
            return False
        self._half.pop(stream_id, None)
        self._watched.discard(stream_id)
        self.held.discard(stream_id)
        return True

    def forget_later(self, stream_id: int) -> None:
        """Forget a stream after the next write, which may still reset it."""
        self._finished.append(stream_id)

    def _write(self, outputs: list[Any]) -> None:
        """Do what the core wants."""
        table = self.acting
        for output in outputs:
            table[type(output)](self, output)
        if self._finished:
            for stream_id in self._finished:
                self.forget(stream_id)
            self._finished.clear()

    def open_stream(self, output: OpenStream) -> None:
        """Open a stream now, or when the peer gives credit for it."""
        stream_id, unidirectional = output.stream_id, output.unidirectional
        if self._carrier_over or self.live is None:
            return  # which the core will be told
        waiting, spares = self._waiting[unidirectional], self._spares[unidirectional]
        stream: carriers.Stream | None = None
        if not waiting:
            if spares:
                stream = spares.popleft()
            else:
                try:
                    stream = self.live.try_open_stream(unidirectional=unidirectional)
                except CarrierError:
                    self._carrier_over = True
                    return
                if stream is not None:
                    self._opened[unidirectional] += 1
        self.stream_begun(stream_id)
        if stream is not None:
            self._begin(output, stream)
            return
        self._backlog[stream_id] = []
        waiting.append(output)
        if len(waiting) == 1:
            self.start_task(self._open_waiting, self.live, unidirectional)

    async def _open_waiting(self, carrier: carriers.Connection, unidirectional: bool) -> None:
        waiting = self._waiting[unidirectional]
        while waiting:
            try:
                stream = await carrier.open_stream(unidirectional=unidirectional)
            except CarrierError:
                return
            self._opened[unidirectional] += 1
            output = waiting.popleft()
            backlog = self._backlog.pop(output.stream_id)
            self._begin(output, stream)
            for do, queued in backlog:
                do(queued)

    def _begin(self, output: OpenStream, stream: carriers.Stream) -> None:
        stream_id = output.stream_id
        assert stream.stream_id == stream_id, "streams are opened in the order of their numbers"
        priority = output.priority
        if priority != 128:
            stream.priority = max(0, priority)
        self._streams[stream_id] = stream
        if self.watches_all:
            stream.on_stopped(self._tell_stopped)
        if not output.unidirectional:
            stream.on_readable(self._tell_readable)

    async def open_spare(self, *, unidirectional: bool) -> None:
        """Wait for a stream that the next `open_stream` takes. Errors as `carriers.Connection.open_stream`."""
        if self.live is None:
            raise ConnectionClosed("the connection has no carrier")
        stream = await self.live.open_stream(unidirectional=unidirectional)
        self._opened[unidirectional] += 1
        self._spares[unidirectional].append(stream)

    def allowed(self, *, unidirectional: bool) -> int:
        """Return how many streams of a kind the peer has allowed, those included that were opened."""
        left = 0 if self.live is None else self.live.stream_credit(unidirectional=unidirectional)
        return self._opened[unidirectional] + left

    def send_data(self, output: StreamData) -> None:
        """Send bytes, or queue them for a stream that waits to be opened."""
        stream_id = output.stream_id
        stream = self._streams.get(stream_id)
        if stream is None:
            self._later(stream_id, self.send_data, output)
            return
        fin = output.fin
        try:
            stream.send_nowait(output.data, fin=fin)
        except CarrierError:
            return  # it was stopped, which the core will be told, or the connection has ended
        if not fin:
            if not self.watches_all and stream_id not in self._watched:
                self._watched.add(stream_id)
                stream.on_stopped(self._tell_stopped)
            if self.most_unsent is not None and stream.unsent > self.most_unsent:
                self.crowded(stream_id)
        elif self.forgets_ended and not stream_id & _UNIDIRECTIONAL:
            self._end(stream_id, _SENDING)

    def reset_stream(self, output: ResetStream) -> None:
        """Give up this side's direction of a stream."""
        stream = self._streams.get(output.stream_id)
        if stream is None:
            self._later(output.stream_id, self.reset_stream, output)
            return
        stream.reset(output.code)
        if self.forgets_ended:
            self._end(output.stream_id, _SENDING)

    def stop_stream(self, output: StopStream) -> None:
        """Ask the peer to stop; its end can be "read" now."""
        stream = self._streams.get(output.stream_id)
        if stream is None:
            self._later(output.stream_id, self.stop_stream, output)
            return
        self.held.discard(output.stream_id)
        stream.stop(output.code)

    def forget_done(self, output: Any) -> None:
        """Forget the stream of an output."""
        stream_id = output.stream_id
        if stream_id in self._backlog:
            self._later(stream_id, self.forget_done, output)
        else:
            self.forget(stream_id)

    def _later(self, stream_id: int, do: Callable[[Any], None], output: Any) -> None:
        backlog = self._backlog.get(stream_id)
        if backlog is not None:
            backlog.append((do, output))
