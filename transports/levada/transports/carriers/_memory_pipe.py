"""One direction of bytes in memory, and the link that carries all directions between two ends.

The rules of this file:

* A `Pipe` has two sides. Each acts on the other only through `MemoryLink.post`: at once as a plain call, after the latency, or when a held
  link is released, and always in the order of posting.
* So there is no task here, except one while bytes are under way with latency, and a run with the same seed repeats exactly.
* Nothing is sent without credit. The pipe has credit for bytes that its receiver has not taken, and the flow for all pipes of a connection.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, Protocol

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost, StreamWasStopped
from levada.transports.carriers.contracts import CarrierStatistics, Octets
from levada.transports.carriers.streams import Waiter, again, cut_front

_UNLIMITED = 1 << 62


def _span(_: object, attribute: attrs.Attribute[tuple[int, int] | None], value: tuple[int, int] | None) -> None:
    if value is not None and not 1 <= value[0] <= value[1]:
        raise ValueError(f"{attribute.name} is {value!r}, wanted (least, most) with 1 <= least <= most")


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """How a memory carrier behaves, for both of its ends. Immutable; derive with `attrs.evolve`."""

    shape: Literal["bytes", "messages", "connection"] = attrs.field(
        default="bytes", validator=v.in_(["bytes", "messages", "connection"])
    )
    """Whether `dial` and `listen` give byte streams, message streams, or connections of many streams."""
    window: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Bytes that a sender may send on each stream ahead of the receiver's reads."""
    connection_window: int = attrs.field(default=1024 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Bytes that may be sent on all streams of a connection together, in each direction, ahead of the receiver's reads."""
    high_watermark: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(0)])
    """Bytes queued for lack of window credit, above which sending waits."""
    chunk: tuple[int, int] | None = attrs.field(default=None, validator=_span)
    """Least and most bytes that one `receive_some` returns, drawn with `seed`; ``None`` for everything that has arrived."""
    latency: float = attrs.field(default=0.0, validator=v.ge(0))
    """Seconds from one end to the other, on trio's clock."""
    seed: int = 0
    """Seed for the sizes of chunks and the loss of datagrams."""
    cut_after: int | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    """Lose the connection once this many bytes have been carried, in both directions together; the bytes before arrive."""
    cut_at_call: int | None = attrs.field(default=None, validator=v.optional(v.ge(1)))
    """Lose the connection when the call with this number begins, counted from 1 over both ends."""
    max_message: int = attrs.field(default=16 * 1024 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Bytes of the largest message that a message stream accepts."""
    max_streams: int = attrs.field(default=100, validator=[v.instance_of(int), v.ge(0)])
    """Bidirectional streams that each end may have open at once."""
    max_streams_unidirectional: int = attrs.field(default=100, validator=[v.instance_of(int), v.ge(0)])
    """Unidirectional streams that each end may have open at once."""
    max_datagram: int = attrs.field(default=1200, validator=[v.instance_of(int), v.ge(0)])
    """Bytes of the largest datagram; with 0 there are no datagrams."""
    datagram_queue: int = attrs.field(default=256, validator=[v.instance_of(int), v.ge(1)])
    """Most datagrams kept until a task takes them, and most that are under way."""
    datagram_loss: float = attrs.field(default=0.0, validator=[v.ge(0), v.le(1)])
    """Share of datagrams that are lost, 0 to 1, drawn with `seed`."""
    early: Literal["accepted", "refused"] | None = attrs.field(
        default=None, validator=v.optional(v.in_(["accepted", "refused"]))
    )
    """Treat data that a client sends before its first call of `handshake` as 0-RTT data, which the server accepts or refuses."""
    close_timeout: float = attrs.field(default=5.0, validator=v.ge(0))
    """Longest time in seconds that closing waits for the queue to be sent."""
    handshake_timeout: float = attrs.field(default=10.0, validator=v.gt(0))
    """Seconds that `dial` waits for a connection to be accepted."""
    backlog: int = attrs.field(default=128, validator=[v.instance_of(int), v.ge(1)])
    """Most peers that wait to be accepted; any further one is refused."""


class End(Protocol):
    """An end of a link."""

    def lose(self, error: ConnectionLost) -> None:
        """Make everything fail with `error`; bytes that have arrived may still be taken."""


class MemoryLink:
    """The link between two ends in one process, which tests may hold, release and cut.

    Args:
        config: the latency, and when the link is cut.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.ends: list[End] = []
        self.calls = 0
        """Operations that both ends have begun; counted only with `MemoryConfig.cut_at_call`."""
        self.bytes_carried = 0
        """Bytes carried, both directions together, for `MemoryConfig.cut_after`."""
        self.dead = False
        """Whether the link was cut."""
        self.random = random.Random(config.seed)
        self._under_way: deque[tuple[float, Callable[..., None], tuple[object, ...]]] = deque()
        self._held = False
        self._pumping = False
        self.direct = config.latency == 0
        """Whether posted calls run at once."""
        self.counts = config.cut_at_call is not None
        """Whether `count_call` has to be called."""

    def post(self, arrive: Callable[..., None], *args: object) -> None:
        """Call `arrive(*args)` at the other end: now, or after the latency and everything posted before.

        Code that runs for each piece of data checks `direct` itself, which saves this call.
        """
        if self.direct:
            arrive(*args)
        elif not self.dead:
            self._under_way.append((trio.current_time() + self.config.latency, arrive, args))
            self._start_pump()

    def count_call(self) -> None:
        """Count an operation of either end, and cut the link at the chosen one."""
        self.calls += 1
        if self.calls == self.config.cut_at_call:
            self.cut()

    def carry(self, size: int) -> int:
        """Return how many of the next `size` bytes get through before the link is cut."""
        limit = self.config.cut_after
        if limit is not None:
            size = min(size, limit - self.bytes_carried)
        self.bytes_carried += size
        return size

    @property
    def worn_out(self) -> bool:
        """Whether the link has carried all bytes that `MemoryConfig.cut_after` allows."""
        return self.config.cut_after is not None and self.bytes_carried >= self.config.cut_after

    def cut(self, why: str = "the memory link was cut") -> None:
        """Lose everything that is under way; both ends see `ConnectionLost`."""
        if self.dead:
            return
        self.dead = self.direct = True  # later posts find ends that have failed already
        self._under_way.clear()
        for end in list(self.ends):
            end.lose(ConnectionLost(why))

    def hold(self) -> None:
        """Stop carrying, as a stalled network does, so that senders reach their limits."""
        self._held = True
        self.direct = False

    def release(self) -> None:
        """Carry again after `hold`: the held bytes arrive in order."""
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
        """Deliver after the latency. The task ends when nothing is under way, so an idle pair has no task."""
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
    """The state that all pipes in one direction of a connection share: credit, whether data is 0-RTT data, totals."""

    __slots__ = ("blocked", "credit", "early", "bytes_received", "bytes_sent", "reads", "writes")

    def __init__(self, credit: int = _UNLIMITED) -> None:
        self.credit = credit
        self.blocked: dict[Pipe, None] = {}  # the first to run out of credit first
        self.early = False
        self.bytes_sent = self.bytes_received = self.writes = self.reads = 0

    def go_on(self) -> None:
        """Send from blocked pipes, now that there is credit: lowest priority number first, pipes of equal priority in turn."""
        while self.credit and self.blocked:
            pipe = min(self.blocked, key=lambda pipe: pipe.priority)
            del self.blocked[pipe]
            pipe.transmit()


def nothing() -> None:
    """Do nothing; the default of callbacks."""


class Pipe:
    """One direction of bytes. The first half of the methods is the sender's side, the second half the receiver's."""

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
        self.delivered = False  # the receiver's side has everything, including the end
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
        """Raise the error that sending raises now, if any."""
        if self.send_error is not None:
            raise again(self.send_error)
        if self.finished:
            raise ConnectionClosed("sending after send_eof() or aclose() of this side")

    async def send(self, data: Octets) -> None:
        """Queue all of `data`, waiting for room: see `ByteStream.send_all`."""
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
        """Queue all of `data` without waiting: see `Stream.send_nowait`."""
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
            if self.appear is not None and self.flow.credit == 0:  # refused 0-RTT: nothing at all is sent yet
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
        size = len(data)
        self.credit -= size
        flow.credit -= size
        worn_out = False
        if link.config.cut_after is None:
            link.bytes_carried += size
        elif size:
            data = data[: link.carry(size)]
            size = len(data)
            worn_out = link.worn_out
            end = end and not worn_out
        if self.appear is not None:
            link.post(self.appear)
            self.appear = None
        self._flying += size
        self.bytes_sent += size
        flow.bytes_sent += size
        self.writes += 1
        flow.writes += 1
        self.end_sent = end
        if link.direct:
            self._arrive(data, flow.early, end)
        else:
            link.post(self._arrive, data, flow.early, end)
        if worn_out:
            link.post(link.cut)

    def _acked(self, size: int, end: bool) -> None:
        self._flying -= size
        if end and self.send_error is None:
            self.delivered = True
            self._sender_is_over()
        if self._progress is not None and not self._flying:
            self._tell_progress()

    def _granted(self, size: int) -> None:
        flow = self.flow
        self.credit += size
        flow.credit += size
        if flow.blocked:
            flow.go_on()
        if self.unsent:
            self.transmit()

    def finish(self) -> None:
        """End this direction after the queued bytes."""
        if not self.finished:
            self.finished = True
            self.sender.wake()
            if self.send_error is None:
                self.transmit()

    def fail_sender(self, error: CarrierError) -> None:
        """Drop the queue; sending raises `error` from now on. An earlier error stays, unless this side closes."""
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
        # The callbacks refer to the stream and its owner, which only the garbage collector could free otherwise.
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
        """Wait until the receiver's side has everything that was sent."""
        if self.link.counts:
            self.link.count_call()
        while self.send_error is None and self.unacked:
            await self._next_progress()
        if self.send_error is not None:
            raise again(self.send_error)

    async def sent(self) -> None:
        """Wait until the queue is sent, or never will be."""
        while self.send_error is None and (self.unsent or (self.finished and not self.end_sent)):
            await self._next_progress()

    async def outcome(self) -> bool:
        """Wait until everything is delivered (true), or sending has failed (false)."""
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
        size = len(data)
        if self.receive_error is not None:
            link.post(self._granted, size)
        else:
            if not self.arrived:
                self.arrived = data
            elif data:
                if type(self.arrived) is bytes:
                    self.arrived = bytearray(self.arrived)
                self.arrived += data
            if size and early:
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
        if link.direct and not end and self._progress is None:  # as `_acked`, without the call
            self._flying -= size
        elif link.direct:
            self._acked(size, end)
        else:
            link.post(self._acked, size, end)

    def _arrive_reset(self, error: CarrierError) -> None:
        if not self.ended and self.receive_error is None:
            self._drop(error)
            self._receiver_is_over()

    def _receiver_is_over(self) -> None:
        over, self.receiver_over = self.receiver_over, nothing
        self.tell_readable = nothing
        over()

    async def receive(self, max_bytes: int | None) -> bytes:
        """Wait for bytes: see `ByteStream.receive_some`."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, wanted at least 1")
        if self.link.counts:
            self.link.count_call()
        while not self.arrived:
            if self.receive_error is not None:
                raise again(self.receive_error)
            if self.ended:
                return b""
            await self.receiver.wait()
        return self.take(max_bytes)

    def receive_nowait(self, max_bytes: int) -> bytes:
        """Take the bytes that have arrived, up to `max_bytes`; ``b""`` if there are none."""
        if self.link.counts:
            self.link.count_call()
        return self.take(max_bytes) if self.arrived else b""

    def take(self, max_bytes: int | None) -> bytes:
        """Take bytes that have arrived, and give credit for them."""
        link, flow, arrived = self.link, self.flow, self.arrived
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
        size = len(data)
        self.bytes_received += size
        flow.bytes_received += size
        self.reads += 1
        flow.reads += 1
        if link.direct and not (flow.blocked or self.unsent):  # as `_granted`, without the call
            self.credit += size
            flow.credit += size
        else:
            link.post(self._granted, size)
        if self.ended and not self.arrived:
            self._receiver_is_over()
        return data

    def fail_receiver(self, error: ConnectionLost) -> None:
        """Make receiving raise `error` once everything that has arrived was taken."""
        if not self.ended and self.receive_error is None:
            self.receive_error = error
            self.receiver.wake()
            self._tell_the_last()
            self._receiver_is_over()

    def refuse(self, error: ConnectionClosed, told: CarrierError) -> None:
        """Stop receiving: from now on, receiving raises `error` here, and sending raises `told` at the other end."""
        if not self.ended and self.receive_error is None:
            self.link.post(self.fail_sender, told)  # first, so that the credit below makes it send no more
        self.ended = False
        self._drop(error)
        self._receiver_is_over()

    def close_receiver(self, error: CarrierError) -> None:
        """Make receiving raise `error`, since the connection is over and credit no longer matters."""
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
        """Call the callback for the last time, for the end or an error, and release it, since it may refer to this pipe."""
        tell_readable, self.tell_readable = self.tell_readable, nothing
        tell_readable()


TO_RECEIVER: Final = (Pipe._arrive, Pipe._arrive_reset, Pipe.fail_receiver)
"""The calls of a sender's side to its receiver's. All other calls go the other way."""


def pipe_statistics(sending: Pipe | None, receiving: Pipe | None) -> CarrierStatistics:
    """Return the counters of the end that sends into the first pipe and receives from the second."""
    return CarrierStatistics(
        bytes_sent=sending.bytes_sent if sending else 0,
        bytes_received=receiving.bytes_received if receiving else 0,
        writes=sending.writes if sending else 0,
        reads=receiving.reads if receiving else 0,
        unsent=len(sending.unsent) if sending else 0,
    )
