"""Connections over a carrier with many streams: `MultiplexedDriver`, and the streams under the ids that a core uses for them.

* The core's events and outputs are taken once for a batch of turns: `MultiplexedDriver.flush_soon` asks for it. Streams are read first.
* No stream has a task. The carrier says when a stream can be read; `Multiplexed.read`, called once a turn or once a batch of the
  carrier's, gives the core what is at hand.
* A stream that the core blocks, or that the owner holds back, is not read; the carrier's window then stops the peer.
* Streams get their numbers in the order of opening. Where the peer gives no credit for one, its output waits, and so do later streams
  of the same kind; the other kind goes on.
* The code that opens or ends a stream tells `Multiplexed`, which keeps nothing of a stream that has ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

import trio

from levada.framework import FlowWindow
from levada.framework.embedding import ActorPhase, local_ref
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed, StreamWasReset
from levada.transports import carriers
from levada.transports.core import Core, StreamsInput

from .driver import DUE, Driver, Ended
from .listening import Accepted, begin

__all__ = [
    "Ending", "Multiplexed", "MultiplexedCore", "MultiplexedDriver", "Opening", "Opens", "Sending", "accepting",
]  # fmt: skip

E = TypeVar("E")

_UNIDIRECTIONAL: Final = 2
"""Bit of a stream's id."""
_SENDING: Final = 1
_RECEIVING: Final = 2
_BOTH: Final = 3


def _nothing(*_: Any) -> None:
    """Call no owner, which is over."""


class MultiplexedCore(StreamsInput[E], Protocol[E]):
    """The core, which gets the input of streams."""

    def is_blocked(self, stream_id: int) -> bool:
        """Return whether a stream must not be read now."""
        ...


class Opening(Protocol):
    """Open a stream."""

    @property
    def stream_id(self) -> int:
        """Which."""
        ...

    @property
    def unidirectional(self) -> bool:
        """Whether only this side sends on it."""
        ...

    @property
    def priority(self) -> int:
        """0 (first) to 255; a lower number counts as 0."""
        ...


class Sending(Protocol):
    """Send bytes on a stream."""

    @property
    def stream_id(self) -> int:
        """Which."""
        ...

    @property
    def data(self) -> bytes | memoryview:
        """The bytes."""
        ...

    @property
    def fin(self) -> bool:
        """Whether they are the last."""
        ...


class Ending(Protocol):
    """Reset a stream, or stop it."""

    @property
    def stream_id(self) -> int:
        """Which."""
        ...

    @property
    def code(self) -> int:
        """The code for the peer."""
        ...


class Throttle(Protocol):
    """Bounds the rate of reading."""

    def until(self, stream_id: int, now: float) -> float:
        """Return when a stream may be read; not after `now` if it may be read at once."""
        ...

    def took(self, stream_id: int, size: int, now: float) -> None:
        """Count the bytes that were read."""
        ...


class Multiplexed(Generic[E]):
    """The streams of one connection.

    Args:
        core: gets the input.
        apply: takes the core's events.
        wake: asks the owner for a `read`.
        watch_all: whether the core is told of stops also on streams that were opened and finished at once.
        at_once: streams that one `read` takes at most, so that others can run between. Each is read as far as it goes.
        stopped_code: tells the core that a stream that was stopped here is over, as if the peer had reset it with this code.
        forget_ended: whether a bidirectional stream is forgotten when both directions have ended, and a unidirectional stream when it
            is reset; otherwise `done` says when.
        high_watermark: number of unsent bytes above which `crowded` is called with the id of a stream that goes on.
        crowded: see `high_watermark`.
        begun: called with the id of each stream that begins.
        ended: called with the id of each stream that is forgotten.
    """

    def __init__(
        self,
        core: MultiplexedCore[E],
        apply: Callable[[list[E]], None],
        wake: Callable[[], None],
        *,
        watch_all: bool = False,
        at_once: int,
        stopped_code: int = 0,
        forget_ended: bool = False,
        high_watermark: int = 0,
        crowded: Callable[[int], None] | None = None,
        begun: Callable[[int], None] | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self.carrier: carriers.Connection | None = None
        """`None` before `start`, and after the end."""
        self.over = False
        """Whether the carrier has ended."""
        self.ready: dict[int, None] = {}
        """Streams to be read. While there are any, or any `stops`, the owner calls `read`."""
        self.stops: list[tuple[int, int]] = []
        """Streams that the peer has stopped, with its codes, until the core is told."""
        self.held: set[int] = set()
        """Streams that the owner holds back; `resume` ends it."""
        self.throttle: Throttle | None = None
        self._core = core
        self._apply = apply
        self._wake = wake
        self._watch_all = watch_all
        self._at_once = at_once
        self._stopped_code = stopped_code
        self._forget_ended = forget_ended
        self._high_watermark = high_watermark
        self._crowded = crowded
        self._begun = begun
        self._ended = ended
        self._tasks: trio.Nursery
        self._streams: dict[int, carriers.Stream] = {}
        self._directions: dict[int, int] = {}
        self._watched: set[int] = set()
        self._backlog: dict[int, list[tuple[Callable[[Any], None], Any]]] = {}
        self._waiting: tuple[deque[Opening], deque[Opening]] = (deque(), deque())
        self._spares: tuple[deque[carriers.Stream], deque[carriers.Stream]] = (deque(), deque())
        self._opened = [0, 0]
        self.finished: list[int] = []
        """Streams that are forgotten after the next `write`."""
        self.outputs: dict[type, Callable[[Any], None]] = {}
        """What does each kind of output; the owner fills it in."""

    def __len__(self) -> int:
        """Count the streams that are in use, or wait to be opened."""
        return len(self._streams) + len(self._backlog)

    def get(self, stream_id: int) -> carriers.Stream | None:
        """Return a stream that is open."""
        return self._streams.get(stream_id)

    def start(self, carrier: carriers.Connection, tasks: trio.Nursery) -> None:
        """Begin to accept streams; tasks that wait for streams end with the carrier, or with the nursery."""
        self.carrier, self._tasks = carrier, tasks
        carrier.on_stream(self._accept)

    def _accept(self) -> None:
        carrier = self.carrier
        while carrier is not None and (stream := carrier.accept_stream_nowait()) is not None:
            self._take_on(stream.stream_id, stream)

    def _take_on(self, stream_id: int, stream: carriers.Stream) -> None:
        """Begin with a stream of the peer."""
        if self._begun is not None:
            self._begun(stream_id)
        self._streams[stream_id] = stream
        stream.on_readable(partial(self._readable, stream_id))
        if not stream_id & _UNIDIRECTIONAL:
            self._watch(stream_id, stream)

    def _watch(self, stream_id: int, stream: carriers.Stream) -> None:
        """Tell the core when the peer stops this side's direction of a stream, also while nothing is sent there."""
        self._watched.add(stream_id)
        stream.on_stopped(partial(self._stopped, stream_id))

    def _stopped(self, stream_id: int, code: int) -> None:
        self.stops.append((stream_id, code))
        self._wake()

    def resume(self, stream_id: int) -> None:
        """Read a stream soon that is no longer held back or blocked."""
        self.held.discard(stream_id)
        self._readable(stream_id)

    def _readable(self, stream_id: int) -> None:
        ready = self.ready
        if not ready:
            self._wake()
        ready[stream_id] = None

    def read(self) -> None:
        """Give the core what is at hand."""
        now = trio.current_time()
        left = self._at_once
        while self.ready and left:
            ready, self.ready = self.ready, {}
            if len(ready) > left:
                ids = list(ready)
                ready, self.ready = dict.fromkeys(ids[:left]), dict.fromkeys(ids[left:])
            left -= len(ready)
            for stream_id in ready:
                stream = self._streams.get(stream_id)
                if stream is not None:
                    self._take(stream_id, stream, now)
        if self.stops:
            stops, self.stops = self.stops, []
            for stream_id, code in stops:
                if not stream_id & _UNIDIRECTIONAL:
                    self._end(stream_id, _SENDING)
                self._tell(self._core.stream_stopped(stream_id, code, now))

    def _take(self, stream_id: int, stream: carriers.Stream, now: float, *, blocked: bool = False) -> None:
        core, held, throttle = self._core, self.held, self.throttle
        while blocked or (stream_id not in held and not core.is_blocked(stream_id)):
            if throttle is not None and (until := throttle.until(stream_id, now)) > now and not self.over:
                held.add(stream_id)
                self._tasks.start_soon(self._resume_at, stream_id, until)
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
            if throttle is not None:
                throttle.took(stream_id, len(data), now)
            events = core.receive_stream_data(stream_id, data, fin, now)
            if events:
                self._apply(events)
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
            code = self._stopped_code
        else:
            return  # the connection has ended
        self._tell(self._core.stream_reset(stream_id, code, now))
        self._end(stream_id, _RECEIVING)

    async def _resume_at(self, stream_id: int, at: float) -> None:
        await trio.sleep_until(at)
        self.resume(stream_id)

    def _tell(self, events: list[E]) -> None:
        if events:
            self._apply(events)

    def _end(self, stream_id: int, direction: int) -> None:
        """A direction of a stream is over."""
        if stream_id & _UNIDIRECTIONAL:
            if self._forget_ended or direction == _RECEIVING:
                self.forget(stream_id)
        elif self._forget_ended and stream_id in self._streams:
            over = self._directions[stream_id] = self._directions.get(stream_id, 0) | direction
            if over == _BOTH:
                self.forget(stream_id)

    def forget(self, stream_id: int) -> None:
        """A stream is over."""
        if self._streams.pop(stream_id, None) is None:
            return
        self._directions.pop(stream_id, None)
        self._watched.discard(stream_id)
        self.held.discard(stream_id)
        if self._ended is not None:
            self._ended(stream_id)

    def finish(self, *, blocked: bool = False) -> None:
        """The carrier has ended: give the core what had arrived.

        Args:
            blocked: also on streams that the core has blocked.
        """
        self.over = True
        while self.ready:
            self.read()
        if blocked:
            now = trio.current_time()
            for stream_id, stream in [*self._streams.items()]:
                if self._core.is_blocked(stream_id):
                    self._take(stream_id, stream, now, blocked=True)

    def clear(self) -> None:
        """The connection is over: forget all streams, and call the owner no more."""
        self.over = True
        self._apply = self._wake = _nothing
        self._crowded = self._begun = self._ended = None
        self.outputs.clear()
        self.finished.clear()
        self.carrier = self.throttle = None
        for collection in (self._streams, self._backlog, self._directions, self._watched, self.ready, self.held):
            collection.clear()
        self.stops.clear()
        for line in (*self._waiting, *self._spares):
            line.clear()

    def write(self, outputs: list[Any]) -> None:
        """Do what the core wants."""
        do = self.outputs
        for output in outputs:
            do[type(output)](output)
        if self.finished:
            for stream_id in self.finished:
                self.forget(stream_id)
            self.finished.clear()

    def forget_later(self, stream_id: int) -> None:
        """Forget a stream after the next `write`, which may still reset it."""
        self.finished.append(stream_id)

    def open(self, output: Opening) -> None:
        """Open a stream now, or when the peer gives credit for it."""
        stream_id, unidirectional = output.stream_id, output.unidirectional
        if self.over or self.carrier is None:
            return  # which the core will be told
        waiting, spares = self._waiting[unidirectional], self._spares[unidirectional]
        stream: carriers.Stream | None = None
        if not waiting:
            if spares:
                stream = spares.popleft()
            else:
                try:
                    stream = self.carrier.try_open_stream(unidirectional=unidirectional)
                except CarrierError:
                    self.over = True
                    return
                if stream is not None:
                    self._opened[unidirectional] += 1
        if self._begun is not None:
            self._begun(stream_id)
        if stream is not None:
            self._begin(output, stream)
            return
        self._backlog[stream_id] = []
        waiting.append(output)
        if len(waiting) == 1:
            self._tasks.start_soon(self._open_waiting, self.carrier, unidirectional)

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

    def _begin(self, output: Opening, stream: carriers.Stream) -> None:
        stream_id = output.stream_id
        assert stream.stream_id == stream_id, "streams are opened in the order of their numbers"
        priority = output.priority
        if priority != 128:
            stream.priority = max(0, priority)
        self._streams[stream_id] = stream
        if self._watch_all:
            self._watch(stream_id, stream)
        if not output.unidirectional:
            stream.on_readable(partial(self._readable, stream_id))

    async def open_spare(self, *, unidirectional: bool) -> None:
        """Wait for a stream that the next `open` takes. Errors as `carriers.Connection.open_stream`."""
        if self.carrier is None:
            raise ConnectionClosed("the connection has no carrier")
        stream = await self.carrier.open_stream(unidirectional=unidirectional)
        self._opened[unidirectional] += 1
        self._spares[unidirectional].append(stream)

    def allowed(self, *, unidirectional: bool) -> int:
        """Return how many streams of a kind the peer has allowed, those included that were opened."""
        left = 0 if self.carrier is None else self.carrier.stream_credit(unidirectional=unidirectional)
        return self._opened[unidirectional] + left

    def send(self, output: Sending) -> None:
        """Send bytes, or queue them for a stream that waits to be opened."""
        stream_id = output.stream_id
        stream = self._streams.get(stream_id)
        if stream is None:
            self._later(stream_id, self.send, output)
            return
        fin = output.fin
        try:
            stream.send_nowait(output.data, fin=fin)
        except CarrierError:
            return  # it was stopped, which the core will be told, or the connection has ended
        if not fin:
            if stream_id not in self._watched:
                self._watch(stream_id, stream)
            if self._crowded is not None and stream.unsent > self._high_watermark:
                self._crowded(stream_id)
        elif self._forget_ended and not stream_id & _UNIDIRECTIONAL:
            self._end(stream_id, _SENDING)

    def reset(self, output: Ending) -> None:
        """Give up this side's direction of a stream."""
        stream = self._streams.get(output.stream_id)
        if stream is None:
            self._later(output.stream_id, self.reset, output)
            return
        stream.reset(output.code)
        if self._forget_ended:
            self._end(output.stream_id, _SENDING)

    def stop(self, output: Ending) -> None:
        """Ask the peer to stop; its end can be "read" now."""
        stream = self._streams.get(output.stream_id)
        if stream is None:
            self._later(output.stream_id, self.stop, output)
            return
        self.held.discard(output.stream_id)
        stream.stop(output.code)

    def done(self, output: Any) -> None:
        """Forget the stream of an output."""
        stream_id = output.stream_id
        if stream_id in self._backlog:
            self._later(stream_id, self.done, output)
        else:
            self.forget(stream_id)

    def _later(self, stream_id: int, do: Callable[[Any], None], output: Any) -> None:
        backlog = self._backlog.get(stream_id)
        if backlog is not None:
            backlog.append((do, output))


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


C = TypeVar("C", bound=Core[Any, Any])


class MultiplexedDriver(Driver[C], Generic[C]):
    """A connection over a carrier with many streams; a protocol makes `streams`."""

    opens: Opens

    last: ClassVar[type[Any]]
    """The class of the core's last event."""
    rounds: ClassVar[int]
    """Rounds of trio's loop that a turn which has read waits at most for tasks that can run."""
    amount: ClassVar[int]
    """About so many outputs go out in one turn, so that others can run between."""
    takes_blocked: ClassVar[bool] = False
    """Whether the core takes what had arrived on blocked streams when the carrier ends."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.streams: Any  # a `Multiplexed`, or a class that is derived from it
        self.carrier: carriers.Connection | None = None
        self.tasks: trio.Nursery
        """Where the connection's own tasks run, while it has a carrier."""
        self.early = False
        """Whether work may begin before the peer has greeted."""
        self.turns = 0
        """Times that outputs were taken."""
        self.unbegun = 0
        """Children that have been given work and have not begun: a turn waits for them, too."""
        self._turn_due = False
        self._just_read = False  # what has come with a batch was read, and the tasks that it woke have not run yet
        self._parked: trio.lowlevel.Task | None = None

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
        self.carrier = carrier
        self.connected(carrier.info, early=self.early)
        async with trio.open_nursery() as self.tasks:
            self.streams.start(carrier, self.tasks)
            carrier.on_batch(self._arrived)
            self.tasks.start_soon(self._take_turns)
            await self.begin(carrier)
            reason = await carrier.wait_closed()
            self.streams.finish(blocked=self.takes_blocked)
            self.tasks.cancel_scope.cancel()
        self.lost(reason.code, str(reason))

    @abstractmethod
    async def begin(self, carrier: carriers.Connection) -> None:
        """Tell the core of the handshake; what comes is read already."""

    def start_task(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task that ends with the carrier; after that, start none."""
        if not self.streams.over:
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

        streams = self.streams
        while True:
            if not (self._turn_due or self._just_read):
                self._parked = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(give_up)
            # Without waiting, the answers to what was read go into packets of their own, which costs a fifth of all requests a second
            # with 64 at a time. Half of the time, trio runs this task before those that can run now; then it waits once more.
            rounds = 0
            if streams.ready or streams.stops:
                streams.read()
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
        streams = self.streams
        if streams.carrier is not None and (streams.ready or streams.stops):
            streams.read()
            self._turn_due, self._just_read = bool(streams.ready), True

    def flush(self) -> bool:
        """Read the available bytes, write the output, apply the remaining events of the core, and set the timer."""
        self._turn_due = False
        core, streams = self.core, self.streams
        if streams.carrier is None:
            return False
        self.turns += 1
        if streams.ready or streams.stops:
            streams.read()
        outputs = self.outputs()
        if outputs or streams.finished:
            streams.carrier.together(partial(streams.write, outputs))
        events = core.take_events()
        if events:
            self.apply(events)
        deadline = core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:  # as `retime`, by a call less
            self._armed = deadline
            self.timers.at("core", deadline, DUE)
        if streams.ready or len(outputs) >= self.amount:
            self.flush_soon()
        return bool(outputs)

    def outputs(self) -> list[Any]:
        """Take what the core wants done, of much only about `amount`."""
        outputs: list[Any] = self.core.data_to_send(trio.current_time())
        return outputs

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
        self.streams.write(self.core.data_to_send(trio.current_time()))

    def lost(self, code: int, reason: str) -> None:
        """The carrier has ended."""
        super().lost(code, reason)
        self.streams.clear()
