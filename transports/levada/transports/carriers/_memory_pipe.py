"""One direction of bytes in memory, and the link that carries all directions between two ends.

The rules of this file:

* A `Pipe` is seen from both of its ends. What the sender's side does to the receiver's side, and back, goes through `MemoryLink.post`
  and nothing else: at once as a plain call, or after the latency, or when a held link is released; always in the order of posting.
* So there is no task here, but one while bytes are under way with latency; and what two ends do is repeated exactly from one seed.
* Nothing is sent without credit: of the pipe (what its receiver has not taken) and of the flow (all pipes of a connection together).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost, StreamWasStopped
from levada.transports.carriers.contracts import CarrierStatistics, Octets
from levada.transports.carriers.streams import Waiter, again, cut_front

_UNLIMITED = 1 << 62


def _span(_: object, attribute: attrs.Attribute[tuple[int, int] | None], value: tuple[int, int] | None) -> None:
    if value is not None and not 1 <= value[0] <= value[1]:
        raise ValueError(f"{attribute.name} must be (least, most) with 1 <= least <= most, got {value!r}")


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """How a memory carrier behaves, for both of its ends. Immutable; derive with `attrs.evolve`."""

    shape: Literal["bytes", "messages", "connection"] = attrs.field(
        default="bytes", validator=v.in_(["bytes", "messages", "connection"])
    )
    """What `dial` and `listen` give: byte streams, message streams, or connections of many streams."""
    window: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Bytes that a sender may be ahead of its receiver's taking them, on each stream."""
    connection_window: int = attrs.field(default=1024 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """The same for all streams of a connection together, in each direction."""
    high_watermark: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(0)])
    """Bytes queued for want of a window above which sending waits."""
    chunk: tuple[int, int] | None = attrs.field(default=None, validator=_span)
    """Least and most bytes that one `receive_some` returns, drawn by `seed`; ``None`` returns all that has arrived."""
    latency: float = attrs.field(default=0.0, validator=v.ge(0))
    """Seconds on trio's clock from one end to the other."""
    seed: int = 0
    """Of the sizes of chunks and the loss of datagrams."""
    cut_after: int | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    """Lose the connection once this many bytes have been carried, both directions together; the part before arrives."""
    cut_at_call: int | None = attrs.field(default=None, validator=v.optional(v.ge(1)))
    """Lose the connection as this call begins, counted over both ends."""
    max_message: int = attrs.field(default=16 * 1024 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Bytes of the largest message that a message stream takes."""
    max_streams: int = attrs.field(default=100, validator=[v.instance_of(int), v.ge(0)])
    """Streams with two directions that each end may have open."""
    max_streams_unidirectional: int = attrs.field(default=100, validator=[v.instance_of(int), v.ge(0)])
    """Streams with one direction that each end may have open."""
    max_datagram: int = attrs.field(default=1200, validator=[v.instance_of(int), v.ge(0)])
    """Bytes of the largest datagram; 0 takes none."""
    datagram_queue: int = attrs.field(default=256, validator=[v.instance_of(int), v.ge(1)])
    """Datagrams kept until a task takes them, and datagrams that may be under way."""
    datagram_loss: float = attrs.field(default=0.0, validator=[v.ge(0), v.le(1)])
    """Share of datagrams that vanish, drawn by `seed`."""
    early: Literal["accepted", "refused"] | None = attrs.field(
        default=None, validator=v.optional(v.in_(["accepted", "refused"]))
    )
    """Treat what a client sends before its first call of `handshake` as 0-RTT data, and how the server takes that."""
    close_timeout: float = attrs.field(default=5.0, validator=v.ge(0))
    """Seconds that closing waits for the queue to go out."""
    handshake_timeout: float = attrs.field(default=10.0, validator=v.gt(0))
    """Seconds that `dial` waits for a connection to be accepted."""
    backlog: int = attrs.field(default=128, validator=[v.instance_of(int), v.ge(1)])
    """Peers that a listener keeps until they are accepted; further ones are refused."""


class End(Protocol):
    """What a link does to either of its ends."""

    def lose(self, error: ConnectionLost) -> None:
        """Make everything fail with `error`; bytes that have arrived may still be taken."""


class MemoryLink:
    """What lies between two ends in one process; tests may hold it, release it, cut it.

    Args:
        config: latency and the points at which it is cut.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.ends: list[End] = []
        self.calls = 0
        """Operations that both ends have begun, counted only for `MemoryConfig.cut_at_call`."""
        self.octets = 0
        """Bytes carried, both directions together; see `MemoryConfig.cut_after`."""
        self.dead = False
        """Whether the link was cut."""
        self.random = random.Random(config.seed)
        self._under_way: deque[tuple[float, Callable[..., None], tuple[object, ...]]] = deque()
        self._held = False
        self._pumping = False
        self.direct = config.latency == 0
        """Whether posted calls run at once."""
        self.counts = config.cut_at_call is not None
        """Whether `count_call` is to be called."""

    def post(self, arrive: Callable[..., None], *args: object) -> None:
        """Let `arrive(*args)` happen at the other end: now, or when everything posted before it and the latency are over.

        What happens for each piece of bytes looks at `direct` itself and saves this call.
        """
        if self.direct:
            arrive(*args)
        elif not self.dead:
            self._under_way.append((trio.current_time() + self.config.latency, arrive, args))
            self._start_pump()

    def count_call(self) -> None:
        """Count an operation of either end, and cut the link if it is the one chosen for that."""
        self.calls += 1
        if self.calls == self.config.cut_at_call:
            self.cut()

    def carry(self, octets: int) -> int:
        """Return how many of `octets` still get through before the link is cut."""
        limit = self.config.cut_after
        if limit is not None:
            octets = min(octets, limit - self.octets)
        self.octets += octets
        return octets

    @property
    def worn_out(self) -> bool:
        """Whether as much was carried as `MemoryConfig.cut_after` allows."""
        return self.config.cut_after is not None and self.octets >= self.config.cut_after

    def cut(self, why: str = "the memory link was cut") -> None:
        """Lose everything that is under way; both ends see `ConnectionLost`."""
        if self.dead:
            return
        self.dead = self.direct = True  # whatever is posted from now on finds ends that have failed already
        self._under_way.clear()
        for end in list(self.ends):
            end.lose(ConnectionLost(why))

    def hold(self) -> None:
        """Stop carrying, as a network that has stalled; senders run into their bounds."""
        self._held = True
        self.direct = False

    def release(self) -> None:
        """Go on after `hold`: the held bytes arrive in order."""
        self._held = False
        if not self.config.latency:
            self._deliver(_UNLIMITED)
            self.direct = True
        else:
            self._start_pump()

    def _start_pump(self) -> None:
        if self._under_way and not self._held and not self._pumping:
            self._pumping = True
            trio.lowlevel.spawn_system_task(self._pump)

    async def _pump(self) -> None:
        """Runs only while something is under way, so that an idle pair leaves no task behind."""
        while self._under_way and not self._held:
            await trio.sleep_until(self._under_way[0][0])
            if not self._held:
                self._deliver(trio.current_time())
        self._pumping = False

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, arrive, args = self._under_way.popleft()
            arrive(*args)


class Flow:
    """What all pipes in one direction of a connection share: credit, whether 0-RTT is going on, totals."""

    __slots__ = ("blocked", "credit", "early", "bytes_received", "bytes_sent", "reads", "writes")

    def __init__(self, credit: int = _UNLIMITED) -> None:
        self.credit = credit
        self.blocked: dict[Pipe, None] = {}  # the first to run out of credit first
        self.early = False
        self.bytes_sent = self.bytes_received = self.writes = self.reads = 0

    def go_on(self) -> None:
        """Let the blocked pipes go on, as there is credit again: lowest priority number first, equal ones in turn."""
        while self.credit and self.blocked:
            pipe = min(self.blocked, key=lambda pipe: pipe.priority)
            del self.blocked[pipe]
            pipe.transmit()


def nothing() -> None:
    """Do nothing: a stream of its own has no connection to tell."""


class Pipe:
    """One direction of bytes: the upper half of the methods is the sender's side, the lower half the receiver's."""

    __slots__ = (
        "_flying", "_progress", "appear", "arrived", "credit", "delivered", "early", "end_sent", "ended", "finished", "flow", "link",
        "bytes_received", "bytes_sent", "priority", "reads", "receive_error", "receiver", "receiver_over", "send_error", "sender",
        "sender_over", "tell_readable", "tell_stopped", "unsent", "writes",
    )  # fmt: skip

    def __init__(self, link: MemoryLink, flow: Flow) -> None:
        self.link = link
        self.flow = flow
        self.priority = 128
        self.unsent = bytearray()
        self.credit = link.config.window
        self.finished = False  # nothing more may be sent
        self.end_sent = False
        self.delivered = False  # the receiver's side has everything, the end too
        self.send_error: CarrierError | None = None
        self.sender = Waiter()
        self.sender_over: Callable[[], None] = nothing
        self.tell_stopped: Callable[[int], None] | None = None
        self.appear: Callable[[], None] | None = None  # tells the other end of a new stream, before anything else
        self.bytes_sent = self.writes = 0
        self._flying = 0
        self._progress: trio.Event | None = None

        self.arrived: bytes | bytearray = b""  # `bytes` while it is one piece, which is never copied
        self.ended = False
        self.early = False
        self.receive_error: CarrierError | None = None
        self.receiver = Waiter()
        self.receiver_over: Callable[[], None] = nothing
        self.tell_readable: Callable[[], None] = nothing
        self.bytes_received = self.reads = 0

    @property
    def unacked(self) -> int:
        """Bytes that are not at the receiver's side yet."""
        return len(self.unsent) + self._flying

    def check_sending(self) -> None:
        """Raise what sending raises now, if anything."""
        if self.send_error is not None:
            raise again(self.send_error)
        if self.finished:
            raise ConnectionClosed("sending after send_eof() or aclose() of this side")

    async def send(self, data: Octets) -> None:
        """Queue all of `data`; see `ByteStream.send_all`."""
        if len(self.unsent) <= self.link.config.high_watermark:
            self.send_nowait(data)
            return
        if self.link.counts:
            self.link.count_call()
        self.check_sending()
        while len(self.unsent) > self.link.config.high_watermark:
            await self.sender.wait()
            self.check_sending()
        self.unsent += data
        self.transmit()

    def send_nowait(self, data: Octets, *, fin: bool = False) -> None:
        """Queue all of `data`, however much is queued; see `Stream.send_nowait`."""
        if self.link.counts:
            self.link.count_call()
        if self.finished or self.send_error is not None:
            self.check_sending()
        if data and not self.unsent and len(data) <= self.credit and len(data) <= self.flow.credit:
            self.finished = fin
            self._put(data if type(data) is bytes else bytes(data), fin)
            return
        self.unsent += data
        if fin:
            self.finish()
        else:
            self.transmit()

    def transmit(self) -> None:
        """Send as much as there is credit for."""
        while self.unsent:
            count = min(len(self.unsent), self.credit, self.flow.credit)
            if not count:
                if self.credit:
                    self.flow.blocked[self] = None
                break
            self._put(cut_front(self.unsent, count), self.finished and not self.unsent)
            if self.link.worn_out:
                return
        if not self.unsent and self.finished and not self.end_sent and self.send_error is None:
            if self.appear is not None and self.flow.credit == 0:  # refused 0-RTT: nothing at all goes out yet
                self.flow.blocked[self] = None
                return
            self._put(b"", True)
        if len(self.unsent) <= self.link.config.high_watermark // 2:
            self.sender.wake()
        if not self.unsent and self._progress is not None:
            self._tell_progress()

    def _put(self, data: bytes, end: bool) -> None:
        """Send bytes for which there is credit, and the end."""
        link, flow = self.link, self.flow
        octets = len(data)
        self.credit -= octets
        flow.credit -= octets
        worn_out = False
        if link.config.cut_after is None:
            link.octets += octets
        elif octets:
            data = data[: link.carry(octets)]
            octets = len(data)
            worn_out = link.worn_out
            end = end and not worn_out
        if self.appear is not None:
            link.post(self.appear)
            self.appear = None
        self._flying += octets
        self.bytes_sent += octets
        flow.bytes_sent += octets
        self.writes += 1
        flow.writes += 1
        self.end_sent = end
        if link.direct:
            self._arrive(data, flow.early, end)
        else:
            link.post(self._arrive, data, flow.early, end)
        if worn_out:
            link.post(link.cut)

    def _acked(self, octets: int, end: bool) -> None:
        self._flying -= octets
        if end and self.send_error is None:
            self.delivered = True
            self._sender_is_over()
        if self._progress is not None and not self._flying:
            self._tell_progress()

    def _granted(self, octets: int) -> None:
        flow = self.flow
        self.credit += octets
        flow.credit += octets
        if flow.blocked:
            flow.go_on()
        if self.unsent:
            self.transmit()

    def finish(self) -> None:
        """End sending after the queue."""
        if not self.finished:
            self.finished = True
            self.sender.wake()
            if self.send_error is None:
                self.transmit()

    def fail_sender(self, error: CarrierError) -> None:
        """Drop the queue; sending raises `error` from now on. The first error stays, unless this side closes."""
        if self.delivered or (self.send_error is not None and not isinstance(error, ConnectionClosed)):
            return
        self.send_error = error
        self.unsent.clear()
        self.flow.blocked.pop(self, None)
        self.sender.wake()
        self._tell_progress()
        tell_stopped = self.tell_stopped
        self._sender_is_over()
        if tell_stopped is not None and isinstance(error, StreamWasStopped):
            tell_stopped(error.code)

    def _sender_is_over(self) -> None:
        # The callbacks refer to the stream and to its user: without this, only the garbage collector could free them.
        over, self.sender_over = self.sender_over, nothing
        self.tell_stopped = self.appear = None
        over()

    def reset(self, error: CarrierError) -> None:
        """Give up sending; receiving raises `error` at the other end."""
        if self.send_error is None and not self.delivered:
            if self.appear is not None:
                self.link.post(self.appear)
                self.appear = None
            self.fail_sender(ConnectionClosed("this side gave up sending"))
            self.link.post(self._arrive_reset, error)

    async def flush(self) -> None:
        """Wait until nothing is queued."""
        if self.link.counts:
            self.link.count_call()
        await self.sent()
        if self.send_error is not None:
            raise again(self.send_error)

    async def all_acked(self) -> None:
        """Wait until everything that was sent is at the receiver's side."""
        if self.link.counts:
            self.link.count_call()
        while self.send_error is None and self.unacked:
            await self._next_progress()
        if self.send_error is not None:
            raise again(self.send_error)

    async def sent(self) -> None:
        """Wait until the queue has been sent, or never will be."""
        while self.send_error is None and (self.unsent or (self.finished and not self.end_sent)):
            await self._next_progress()

    async def outcome(self) -> bool:
        """Wait until everything is delivered (true), or this side has given up or been stopped (false)."""
        while not self.delivered and self.send_error is None:
            await self._next_progress()
        return self.delivered

    async def _next_progress(self) -> None:
        if self._progress is None:
            self._progress = trio.Event()
        await self._progress.wait()

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _arrive(self, data: bytes, early: bool, end: bool) -> None:
        link = self.link
        octets = len(data)
        if self.receive_error is not None:
            link.post(self._granted, octets)
        else:
            if not self.arrived:
                self.arrived = data
            elif data:
                if type(self.arrived) is bytes:
                    self.arrived = bytearray(self.arrived)
                self.arrived += data
            if octets and early:
                self.early = True
            if self.receiver.task is not None:
                self.receiver.wake()
            if end:
                self.ended = True
                self._tell_the_last()
                if not self.arrived:
                    self._receiver_is_over()
            else:
                self.tell_readable()
        if link.direct:
            self._acked(octets, end)
        else:
            link.post(self._acked, octets, end)

    def _arrive_reset(self, error: CarrierError) -> None:
        if not self.ended and self.receive_error is None:
            self._drop(error)
            self._receiver_is_over()

    def _receiver_is_over(self) -> None:
        over, self.receiver_over = self.receiver_over, nothing
        self.tell_readable = nothing
        over()

    async def receive(self, max_bytes: int | None) -> bytes:
        """Wait for bytes; see `ByteStream.receive_some`."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        if self.link.counts:
            self.link.count_call()
        while not self.arrived:
            if self.receive_error is not None:
                raise again(self.receive_error)
            if self.ended:
                return b""
            await self.receiver.wait()
        return self._take(max_bytes)

    def take_nowait(self) -> bytes | None:
        """Take the bytes that have arrived; see `Stream.receive_nowait`."""
        if self.link.counts:
            self.link.count_call()
        if self.arrived:
            return self._take(None)
        if self.receive_error is not None:
            raise again(self.receive_error)
        return b"" if self.ended else None

    def receive_nowait(self, max_bytes: int) -> bytes:
        """Take the bytes that have arrived, up to `max_bytes`; ``b""`` if there are none."""
        if self.link.counts:
            self.link.count_call()
        return self._take(max_bytes) if self.arrived else b""

    def _take(self, max_bytes: int | None) -> bytes:
        link, arrived = self.link, self.arrived
        limit = len(arrived) if link.config.chunk is None else link.random.randint(*link.config.chunk)
        if max_bytes is not None and max_bytes < limit:
            limit = max_bytes
        if limit >= len(arrived):
            data = bytes(arrived)
            self.arrived = b""
        else:
            if type(arrived) is bytes:
                self.arrived = arrived = bytearray(arrived)
            assert type(arrived) is bytearray
            data = cut_front(arrived, limit)
        octets = len(data)
        self.bytes_received += octets
        self.flow.bytes_received += octets
        self.reads += 1
        self.flow.reads += 1
        if link.direct:
            self._granted(octets)
        else:
            link.post(self._granted, octets)
        if self.ended and not self.arrived:
            self._receiver_is_over()
        return data

    def fail_receiver(self, error: ConnectionLost) -> None:
        """Receiving raises `error` once everything that has arrived is taken."""
        if not self.ended and self.receive_error is None:
            self.receive_error = error
            self.receiver.wake()
            self._tell_the_last()
            self._receiver_is_over()

    def refuse(self, error: ConnectionClosed, told: CarrierError) -> None:
        """Take nothing more: receiving raises `error` here, sending raises `told` at the other end."""
        if not self.ended and self.receive_error is None:
            self.link.post(self.fail_sender, told)  # first, so that the credit below makes it send no more
        self.ended = False
        self._drop(error)
        self._receiver_is_over()

    def close_receiver(self, error: CarrierError) -> None:
        """Make receiving raise `error`: the connection is over, and its credit is of no more use."""
        self.ended = False
        self.arrived = b""
        self._drop(error)
        self._receiver_is_over()

    def _drop(self, error: CarrierError) -> None:
        self.receive_error = error
        if self.arrived:
            self.link.post(self._granted, len(self.arrived))
            self.arrived = b""
        self.receiver.wake()
        self._tell_the_last()

    def _tell_the_last(self) -> None:
        """Call back for the last time: the end is there to take. The callback may hold this pipe."""
        tell_readable, self.tell_readable = self.tell_readable, nothing
        tell_readable()


def pipe_statistics(sending: Pipe | None, receiving: Pipe | None) -> CarrierStatistics:
    """Return the counters of the end that sends into the one and receives out of the other."""
    return CarrierStatistics(
        bytes_sent=sending.bytes_sent if sending else 0,
        bytes_received=receiving.bytes_received if receiving else 0,
        writes=sending.writes if sending else 0,
        reads=receiving.reads if receiving else 0,
        unsent=len(sending.unsent) if sending else 0,
    )
