"""The memory carrier with ``shape="connection"``: QUIC's rules for streams, credit, codes, datagrams and 0-RTT, without packets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import NoReturn

import attrs
import trio

from levada.framework.errors import (
    CarrierError,
    ConnectionClosed,
    ConnectionLost,
    DatagramTooLarge,
    LocalProtocolError,
    StreamWasReset,
    StreamWasStopped,
)
from levada.transports.carriers._memory_pipe import Flow, MemoryConfig, MemoryLink, Pipe, pipe_statistics
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, CloseReason, Datagram, Octets
from levada.transports.carriers.streams import again


class MemoryStream(trio.abc.AsyncResource):
    """One stream of a memory connection; a `Stream`, made by `open_stream` and `accept_stream`.

    A call that does not have to wait is not a checkpoint. Every call that waits may be cancelled.
    """

    __slots__ = ("__weakref__", "_connection", "_in", "_out", "stream_id")

    def __init__(
        self, connection: MemoryConnection, stream_id: int, sending: Pipe | None, receiving: Pipe | None
    ) -> None:
        self._connection = connection
        self.stream_id = stream_id
        """Stream number as in QUIC: the lowest bit is 1 for streams of the server, the next bit is 1 for unidirectional streams."""
        self._out = sending
        self._in = receiving
        if sending is not None:
            sending.sender_over = self._retire
        if receiving is not None:
            receiving.receiver_over = self._retire

    @property
    def info(self) -> CarrierInfo:
        """The two ends of the connection."""
        return self._connection.info

    @property
    def initiated_here(self) -> bool:
        """Whether this side opened the stream."""
        return (self.stream_id & 1 == 0) is self._connection.is_client

    @property
    def unidirectional(self) -> bool:
        """Whether only the opener sends."""
        return self.stream_id & 2 != 0

    @property
    def early(self) -> bool:
        """Whether bytes received so far came as 0-RTT data."""
        return self._in is not None and self._in.early

    @property
    def priority(self) -> int:
        """0 (first) to 255: the order of the streams when the connection's window opens."""
        return 128 if self._out is None else self._out.priority

    @priority.setter
    def priority(self, value: int) -> None:
        if not 0 <= value <= 255:
            raise ValueError(f"priority is {value}, wanted 0 to 255")
        (self._out or self._cannot_send()).priority = value

    @property
    def unsent(self) -> int:
        """Bytes queued without window credit."""
        return 0 if self._out is None else len(self._out.unsent)

    @property
    def unacked(self) -> int:
        """Bytes queued or sent that have not arrived at the peer."""
        return 0 if self._out is None else self._out.unacked

    def _cannot_send(self) -> NoReturn:
        raise LocalProtocolError(f"stream {self.stream_id} is only received on")

    def _cannot_receive(self) -> NoReturn:
        raise LocalProtocolError(f"stream {self.stream_id} is only sent on")

    async def send_all(self, data: Octets) -> None:
        """Queue bytes, waiting for room: see `ByteStream.send_all`."""
        await (self._out or self._cannot_send()).send(data)

    def send_nowait(self, data: Octets, *, fin: bool = False) -> None:
        """Queue bytes without waiting, and finish if `fin`: see `Stream.send_nowait`."""
        (self._out or self._cannot_send()).send_nowait(data, fin=fin)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes: see `ByteStream.receive_some`."""
        return await (self._in or self._cannot_receive()).receive(max_bytes)

    def receive_nowait(self) -> bytes | None:
        """Take the bytes that have arrived: see `Stream.receive_nowait`."""
        pipe = self._in or self._cannot_receive()
        if pipe.link.counts:
            pipe.link.count_call()
        if pipe.arrived:
            return pipe.take(None)
        if pipe.receive_error is not None:
            raise again(pipe.receive_error)
        return b"" if pipe.ended else None

    @property
    def at_end(self) -> bool:
        """Whether the peer's end has come and everything before it was taken: see `Stream.at_end`."""
        return self._in is not None and self._in.ended and not self._in.arrived

    @property
    def was_reset(self) -> bool:
        """Whether the peer gave up sending, so that there is nothing to take: see `Stream.was_reset`."""
        return self._in is not None and not self._in.arrived and isinstance(self._in.receive_error, StreamWasReset)

    def on_readable(self, tell: Callable[[int], None]) -> None:
        """Call ``tell(stream_id)`` when there is something to take: see `Stream.on_readable`."""
        pipe = self._in or self._cannot_receive()
        if not (pipe.ended or pipe.receive_error is not None):
            pipe.tell_readable = partial(tell, self.stream_id)
        if pipe.arrived or pipe.ended or pipe.receive_error is not None:
            tell(self.stream_id)

    async def send_eof(self) -> None:
        """End sending: see `ByteStream.send_eof`."""
        pipe = self._out or self._cannot_send()
        pipe.link.count_call()
        if pipe.finished:
            return
        pipe.check_sending()
        if pipe.sender.task is not None:
            raise trio.BusyResourceError("another task is sending")
        pipe.finish()

    async def flush(self) -> None:
        """Wait until the queue is empty: see `ByteStream.flush`."""
        await (self._out or self._cannot_send()).flush()

    async def aclose(self) -> None:
        """Finish sending, and stop receiving with code 0. The queue is sent while the connection is open."""
        if self._out is not None:
            self._out.finish()
        if self._in is not None:
            self._in.refuse(
                ConnectionClosed("this side closed the stream"), StreamWasStopped("the peer closed the stream")
            )
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Reset sending and stop receiving, both with code 0."""
        if self._out is not None:
            self.reset(0)
        if self._in is not None:
            self.stop(0)

    def reset(self, code: int) -> None:
        """Give up sending: see `Stream.reset`."""
        (self._out or self._cannot_send()).reset(
            StreamWasReset(f"the peer reset stream {self.stream_id} with code {code}", code=code)
        )

    def stop(self, code: int) -> None:
        """Ask the peer to stop sending: see `Stream.stop`."""
        told = StreamWasStopped(f"the peer stopped stream {self.stream_id} with code {code}", code=code)
        if self._out is not None and self._out.appear is not None:
            self._out.link.post(self._out.appear)
            self._out.appear = None
        (self._in or self._cannot_receive()).refuse(ConnectionClosed("this side stopped receiving"), told)

    async def stopped(self) -> int | None:
        """Wait until the peer stops this side's sending: see `Stream.stopped`."""
        pipe = self._out or self._cannot_send()
        await pipe.outcome()
        self._raise_if_lost(pipe)
        return pipe.send_error.code if isinstance(pipe.send_error, StreamWasStopped) else None

    def on_stopped(self, tell: Callable[[int, int], None]) -> None:
        """Call ``tell(stream_id, code)`` when the peer stops this side's sending: see `Stream.on_stopped`."""
        pipe = self._out or self._cannot_send()
        if pipe.send_error is None and not pipe.delivered:
            pipe.tell_stopped = partial(tell, self.stream_id)
        elif isinstance(pipe.send_error, StreamWasStopped):
            tell(self.stream_id, pipe.send_error.code)

    async def acked(self) -> bool:
        """Wait until the peer has everything, including the end: see `Stream.acked`."""
        pipe = self._out or self._cannot_send()
        delivered = await pipe.outcome()
        self._raise_if_lost(pipe)
        return delivered

    async def all_acked(self) -> None:
        """Wait until the peer has everything sent so far: see `Stream.all_acked`."""
        await (self._out or self._cannot_send()).all_acked()

    def _raise_if_lost(self, pipe: Pipe) -> None:
        if not pipe.delivered and pipe.send_error is self._connection.error and pipe.send_error is not None:
            raise again(pipe.send_error)

    def statistics(self) -> CarrierStatistics:
        """Return the counters of this stream."""
        return pipe_statistics(self._out, self._in)

    def connection_over(self, error: CarrierError) -> None:
        """Fail both directions, since the connection has ended. After a loss, bytes that have arrived may still be taken."""
        if self._out is not None:
            self._out.fail_sender(error)
        if self._in is None:
            return
        if isinstance(error, ConnectionLost):
            self._in.fail_receiver(error)
        else:
            self._in.close_receiver(error)

    def drained(self) -> bool:
        """Whether closing need not wait for this stream: it was not finished here, was delivered, or has failed."""
        return self._out is None or not self._out.finished or self._out.delivered or self._out.send_error is not None

    async def settle(self) -> None:
        """Wait until `drained` is true."""
        if self._out is not None:
            await self._out.outcome()

    def _retire(self) -> None:
        sending, receiving = self._out, self._in
        if (sending is None or sending.delivered or sending.send_error is not None) and (
            receiving is None or receiving.receive_error is not None or (receiving.ended and not receiving.arrived)
        ):
            self._connection.forget(self)


class MemoryConnection(trio.abc.AsyncResource):
    """One end of a connection of many streams; a `Connection`, made by `memory_connections`, `dial` and `listen`."""

    def __init__(self, link: MemoryLink, *, is_client: bool, name: str) -> None:
        config = link.config
        self.link = link
        """The link between the two ends, which tests may hold and cut."""
        self.error: CarrierError | None = None
        """The error that every call raises after the end; ``None`` before."""
        self._datagrams_dropped = 0
        self._is_client = is_client
        own, other = ("client", "server") if is_client else ("server", "client")
        self._info = CarrierInfo(scheme="memory", local=f"{name}/{own}", peer=f"{name}/{other}")
        self._flow = Flow(0 if is_client and config.early == "refused" else config.connection_window)
        self._flow.early = is_client and config.early == "accepted"
        self._streams: dict[int, MemoryStream] = {}
        self._next = {False: 0 if is_client else 1, True: 2 if is_client else 3}
        self._may_open = {False: config.max_streams, True: config.max_streams_unidirectional}
        self._opening = {False: trio.lowlevel.ParkingLot(), True: trio.lowlevel.ParkingLot()}
        self._appeared: deque[MemoryStream] = deque()
        self._tell_stream: Callable[[], None] | None = None
        self._accepting = trio.lowlevel.ParkingLot()
        self._datagrams: deque[Datagram] = deque()
        self._receiving_datagram = trio.lowlevel.ParkingLot()
        self._sending_datagram = trio.lowlevel.ParkingLot()
        self._datagrams_flying = 0
        self._established = config.early is None
        self._hands_shaken = trio.Event()
        self._handshake_begun = False
        if self._established:
            self._hands_shaken.set()
        self._reason: CloseReason | None = None
        self._ended = trio.Event()
        self._peer: MemoryConnection | None = None
        """The other end, until this end has ended."""
        self._back = self._flow
        """The flow from the other end."""
        link.ends.append(self)

    @property
    def info(self) -> CarrierInfo:
        """Facts about the connection and its two ends."""
        return self._info

    @property
    def is_client(self) -> bool:
        """Whether this side dialled."""
        return self._is_client

    def meet(self, peer: MemoryConnection) -> None:
        """Set the other end."""
        self._peer, self._back = peer, peer._flow

    def _check(self) -> None:
        if self.error is not None:
            raise again(self.error)

    async def handshake(self) -> CarrierInfo:
        """Wait until the handshake is complete. With `MemoryConfig.early`, the client's first call ends its 0-RTT data."""
        if self._peer is not None and self._is_client and not (self._hands_shaken.is_set() or self._handshake_begun):
            self._handshake_begun = True
            self.link.post(self._peer.establish)
        await self._hands_shaken.wait()
        if not self._established:
            self._check()
        return self._info

    def establish(self) -> None:
        """Complete the handshake at this end; a server tells its client."""
        if self._established or self._peer is None:
            return
        self._established = True
        self._hands_shaken.set()
        if not self._is_client:
            self.link.post(self._peer.establish)
            return
        accepted = self.link.config.early == "accepted"
        self._info = attrs.evolve(self._info, early_data_accepted=accepted)
        self._flow.early = False
        if not accepted:
            self._flow.credit += self.link.config.connection_window
            self._flow.go_on()

    async def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> MemoryStream:
        """Open a stream, waiting for credit: see `Connection.open_stream`."""
        while (stream := self.try_open_stream(unidirectional=unidirectional, priority=priority)) is None:
            await self._opening[unidirectional].park()
        return stream

    def try_open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> MemoryStream | None:
        """Open a stream if there is credit: see `Connection.try_open_stream`."""
        if self.link.counts:
            self.link.count_call()
        if self.error is not None:
            raise again(self.error)
        if not self._may_open[unidirectional]:
            return None
        self._may_open[unidirectional] -= 1
        stream_id = self._next[unidirectional]
        self._next[unidirectional] += 4
        there = Pipe(self.link, self._flow)
        back = None if unidirectional else Pipe(self.link, self._back)
        stream = self._streams[stream_id] = MemoryStream(self, stream_id, there, back)
        if priority != 128:
            stream.priority = priority
        assert self._peer is not None, "this end has not ended"
        there.appear = partial(self._peer.take_in, stream_id, back, there)
        return stream

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many streams may be opened now: see `Connection.stream_credit`."""
        return self._may_open[unidirectional] if self.error is None else 0

    def credit(self) -> tuple[int, int]:
        """Return the bytes that this side, and the peer, may send now: see `Connection.credit`."""
        return (self._flow.credit, self._back.credit) if self.error is None else (0, 0)

    def take_in(self, stream_id: int, sending: Pipe | None, receiving: Pipe) -> None:
        """Queue a stream that the peer has opened."""
        if self.error is not None:
            return
        stream = self._streams[stream_id] = MemoryStream(self, stream_id, sending, receiving)
        self._appeared.append(stream)
        if self._tell_stream is not None:
            self._tell_stream()
        else:
            self._accepting.unpark()

    async def accept_stream(self) -> MemoryStream:
        """Wait for the peer's next stream. Several tasks may wait, and each gets a different stream: see `Connection.accept_stream`."""
        if self.link.counts:
            self.link.count_call()
        while not self._appeared:
            self._check()
            await self._accepting.park()
        return self._appeared.popleft()

    def accept_stream_nowait(self) -> MemoryStream | None:
        """Take the peer's next stream if there is one: see `Connection.accept_stream_nowait`."""
        if self.link.counts:
            self.link.count_call()
        return self._appeared.popleft() if self._appeared else None

    def on_stream(self, tell: Callable[[], None]) -> None:
        """Call `tell` when there is a stream to accept: see `Connection.on_stream`."""
        if self.error is None:
            self._tell_stream = tell
        if self._appeared:
            tell()

    def on_batch(self, tell: Callable[[], None]) -> None:
        """Do nothing: each write arrives by itself, so there are no batches."""

    def together(self, send: Callable[[], None]) -> None:
        """Call `send`. Each send arrives by itself: see `Connection.together`."""
        send()

    def forget(self, stream: MemoryStream) -> None:
        """Forget a stream whose directions are both over at this end. If the peer opened it, give the peer its credit back."""
        stream_id, peer = stream.stream_id, self._peer
        known = self._streams.pop(stream_id, None) is not None
        if known and peer is not None and (stream_id & 1 == 0) is not self._is_client:
            self.link.post(peer.grant_stream, stream_id & 2 != 0)

    def grant_stream(self, unidirectional: bool) -> None:
        """Allow one more stream."""
        self._may_open[unidirectional] += 1
        self._opening[unidirectional].unpark()

    def round_trip(self) -> float:
        """Return 0.0, since nothing is measured."""
        return 0.0

    def max_datagram_size(self) -> int:
        """Return `MemoryConfig.max_datagram`."""
        return self.link.config.max_datagram

    async def send_datagram(self, data: Octets) -> None:
        """Queue a datagram. The queue fills only while the link is slow: see `Connection.send_datagram`."""
        while not self.send_datagram_nowait(data):
            await self._sending_datagram.park()

    def send_datagram_nowait(self, data: Octets) -> bool:
        """Queue a datagram if there is room: see `Connection.send_datagram_nowait`."""
        if self.link.counts:
            self.link.count_call()
        self._check()
        limit = self.max_datagram_size()
        if len(data) > limit:
            raise DatagramTooLarge(f"datagram of {len(data)} bytes, at most {limit} fit", size=len(data), limit=limit)
        if self._datagrams_flying >= self.link.config.datagram_queue:
            return False
        self._flow.writes += 1
        self._flow.bytes_sent += len(data)
        refused = not self._established and self.link.config.early == "refused"
        if refused or self.link.random.random() < self.link.config.datagram_loss:
            return True
        self._datagrams_flying += 1
        assert self._peer is not None, "this end has not ended"
        self.link.post(self._peer.take_datagram, Datagram(bytes(data), self._flow.early))
        return True

    def take_datagram(self, datagram: Datagram) -> None:
        """Take a datagram from the peer."""
        if self._peer is not None:
            self._peer.datagram_gone()
        if self.error is not None:
            return
        if len(self._datagrams) == self.link.config.datagram_queue:
            self._datagrams.popleft()
            self._datagrams_dropped += 1
        self._datagrams.append(datagram)
        self._receiving_datagram.unpark()

    def datagram_gone(self) -> None:
        """Record that a datagram has arrived, so that one fewer is under way."""
        self._datagrams_flying -= 1
        self._sending_datagram.unpark()

    async def receive_datagram(self) -> Datagram:
        """Wait for a datagram: see `Connection.receive_datagram`."""
        if self.link.counts:
            self.link.count_call()
        while not self._datagrams:
            self._check()
            await self._receiving_datagram.park()
        datagram = self._datagrams.popleft()
        self._back.reads += 1
        self._back.bytes_received += len(datagram.data)
        return datagram

    def close(self, code: int = 0, reason: str = "") -> None:
        """Close at once: see `Connection.close`."""
        if self.error is None:
            lost = ConnectionLost(
                f"the peer closed the connection with code {code}: {reason or 'no reason given'}", code=code
            )
            peer = self._peer
            self.end(ConnectionClosed("this side closed the connection"), CloseReason(code, reason))
            if peer is not None:
                self.link.post(peer.end, lost, CloseReason(code, reason, by_peer=True))

    async def aclose(self, code: int = 0, reason: str = "", *, drain_timeout: float = 5.0) -> None:
        """Wait until finished streams have arrived, then close: see `Connection.aclose`."""
        try:
            with trio.move_on_after(drain_timeout):
                for stream in [stream for stream in self._streams.values() if not stream.drained()]:
                    await stream.settle()
            await trio.lowlevel.checkpoint()
        finally:
            self.close(code, reason)

    async def wait_closed(self) -> CloseReason:
        """Wait for the end: see `Connection.wait_closed`."""
        while self._reason is None:
            await self._ended.wait()
        return self._reason

    def lose(self, error: ConnectionLost) -> None:
        """Fail, since the link was cut."""
        self.end(error, CloseReason(1, error.detail, lost=True))

    def end(self, error: CarrierError, reason: CloseReason) -> None:
        """End the connection, and wake every task that waits here or on a stream."""
        if self.error is not None:
            return
        self.error = error
        self._reason = reason
        self._tell_stream = None
        if not isinstance(error, ConnectionLost):
            self._appeared.clear()
            self._datagrams.clear()
        for stream in list(self._streams.values()):
            stream.connection_over(error)
        self._streams.clear()
        for lot in (*self._opening.values(), self._accepting, self._receiving_datagram, self._sending_datagram):
            lot.unpark_all()
        self._hands_shaken.set()
        self._ended.set()
        self._peer = None
        self.link.ends.remove(self)

    def statistics(self) -> CarrierStatistics:
        """Return the counters of all streams and datagrams together."""
        back = self._back
        return CarrierStatistics(
            bytes_sent=self._flow.bytes_sent,
            bytes_received=back.bytes_received,
            writes=self._flow.writes,
            reads=back.reads,
            unsent=sum(stream.unsent for stream in self._streams.values()),
            datagrams_dropped=self._datagrams_dropped,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose(drain_timeout=self.link.config.close_timeout if error is None else 0)


def memory_connections(
    config: MemoryConfig | None = None, *, name: str = "pair"
) -> tuple[MemoryConnection, MemoryConnection]:
    """Return the two ends (client, server) of a connection of many streams in memory."""
    link = MemoryLink(config or MemoryConfig(shape="connection"))
    client = MemoryConnection(link, is_client=True, name=name)
    server = MemoryConnection(link, is_client=False, name=name)
    client.meet(server)
    server.meet(client)
    return client, server
