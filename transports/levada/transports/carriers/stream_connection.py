"""A connection of many `ConnectionStream`s: the part that QUIC and QMux share.

Here the application waits: for streams of the peer, credit for streams, datagrams, the handshake and the end. A subclass moves the bytes.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, DatagramTooLarge
from levada.transports.carriers.connection_stream import ConnectionStream
from levada.transports.carriers.contracts import CarrierInfo, CloseReason, Datagram, Octets

__all__ = ["StreamConnection"]

S = TypeVar("S", bound=ConnectionStream[Any])


class StreamConnection(trio.abc.AsyncResource, Generic[S]):
    """The base of `QuicConnection` and `QmuxConnection`.

    Args:
        info: the facts about both ends, as far as they are known.
        is_client: whether this side dialled.
        datagram_queue: most datagrams that wait for the application; further ones push out the oldest.
    """

    def __init__(self, info: CarrierInfo, *, is_client: bool, datagram_queue: int) -> None:
        self.is_client = is_client
        self.streams: dict[int, S] = {}
        """Streams that have not ended, by number."""
        self.closed = False
        """Whether the connection has ended."""
        self.blocked: dict[S, None] = {}
        """Streams whose `send_all` waits for room."""
        self._info = info
        self._reason: CloseReason | None = None
        self._make_error: Callable[[], CarrierError] = lambda: ConnectionClosed("the connection is closed")
        self._waiting: deque[S] = deque()
        self._tell_stream: Callable[[], None] | None = None
        self._tell_batch: Callable[[], None] | None = None
        self._accepting = trio.lowlevel.ParkingLot()
        self._opening = (trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot())  # bidirectional, unidirectional
        self._datagrams: deque[Datagram] = deque()
        self._datagram_queue = datagram_queue
        self._datagrams_dropped = 0
        self._datagram_readers = trio.lowlevel.ParkingLot()
        self._datagram_writers = trio.lowlevel.ParkingLot()
        self._shaken = trio.Event()
        self._drained: trio.Event | None = None
        self._ended = trio.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'to' if self.is_client else 'from'} {self._info.peer}>"

    @property
    def info(self) -> CarrierInfo:
        """The peer and this end; complete after `handshake`."""
        return self._info

    def error(self) -> CarrierError:
        """Return the error that every call raises after the end."""
        return self._make_error()

    @abstractmethod
    async def handshake(self) -> CarrierInfo:
        """Wait until the handshake is complete; `Connection.handshake` says more."""

    async def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> S:
        """Open a stream, waiting for the peer's credit. The peer sees the stream with its first byte, end or reset.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended.
            ValueError: the priority is not between 0 and 255.

        Cancellation:
            no stream was opened.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while (stream := self.try_open_stream(unidirectional=unidirectional, priority=priority)) is None:
            self._credit_wanted(unidirectional=unidirectional)
            await self._opening[unidirectional].park()
        return stream

    def try_open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> S | None:
        """Open a stream if there is credit for it now; otherwise return ``None``. Errors as `open_stream`."""
        if not 0 <= priority <= 255:
            raise ValueError(f"priority is {priority}, wanted 0 to 255")
        if self._reason is not None:
            raise self.error()
        return self._open_stream(unidirectional=unidirectional, priority=priority)

    @abstractmethod
    def _open_stream(self, *, unidirectional: bool, priority: int) -> S | None:
        """Open a stream if there is credit for it now; otherwise return ``None``."""

    @abstractmethod
    def _credit_wanted(self, *, unidirectional: bool) -> None:
        """Tell the peer that a task waits for credit for a stream."""

    async def accept_stream(self) -> S:
        """Wait for the next stream that the peer opened, in the order in which they appeared.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended, and all its streams were accepted.

        Cancellation:
            no stream was taken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while (stream := self.accept_stream_nowait()) is None:
            if self._reason is not None:
                raise self.error()
            await self._accepting.park()
        return stream

    def accept_stream_nowait(self) -> S | None:
        """Take the next stream that the peer has opened, if there is one; `Connection.accept_stream_nowait` says more."""
        if not self._waiting:
            return None
        stream = self._waiting.popleft()
        self._accepted(stream)
        return stream

    def on_stream(self, tell: Callable[[], None]) -> None:
        """Call `tell` when there is a stream to accept; `Connection.on_stream` says more."""
        if self._reason is None:  # after the end no stream comes, and the callback may refer to the connection
            self._tell_stream = tell
        if self._waiting:
            tell()

    def on_batch(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each batch of input; `Connection.on_batch` says more."""
        self._tell_batch = tell

    @abstractmethod
    def together(self, send: Callable[[], None]) -> None:
        """Call `send`, and write what it sends together; `Connection.together` says more."""

    @abstractmethod
    def _accepted(self, stream: S) -> None:
        """Grant the peer credit for a stream that the application has accepted."""

    @abstractmethod
    def max_datagram_size(self) -> int:
        """Return the size in bytes of the largest datagram that fits now; 0 if the peer takes none or its limit is not known yet."""

    async def send_datagram(self, data: Octets) -> None:
        """Queue a datagram. Wait while the queue is full, and for the handshake unless the datagram can be sent before.

        Raises:
            DatagramTooLarge: more than `max_datagram_size`.
            ConnectionClosed, ConnectionLost: the connection has ended.

        Cancellation:
            nothing was queued.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._shaken.is_set() and not self.max_datagram_size():
            await self.handshake()
        while not self.send_datagram_nowait(data):
            await self._datagram_writers.park()

    def send_datagram_nowait(self, data: Octets) -> bool:
        """Queue a datagram; false if the queue is full. Errors as `send_datagram`."""
        if self._reason is not None:
            raise self.error()
        size, limit = memoryview(data).nbytes, self.max_datagram_size()
        if size > limit or not limit:
            raise DatagramTooLarge(f"a datagram of {size} bytes, at most {limit} fit now", size=size, limit=limit)
        return self._queue_datagram(data)

    @abstractmethod
    def _queue_datagram(self, data: Octets) -> bool:
        """Queue a datagram that is not too large; false if the queue is full."""

    async def receive_datagram(self) -> Datagram:
        """Wait for a datagram. Datagrams that come while the queue is full push out the oldest, which are counted as dropped.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended, and all its datagrams were taken.

        Cancellation:
            no datagram was taken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._datagrams:
            if self._reason is not None:
                raise self.error()
            await self._datagram_readers.park()
        return self._datagrams.popleft()

    async def wait_closed(self) -> CloseReason:
        """Wait for the end of the connection and return its reason."""
        await self._ended.wait()
        assert self._reason is not None
        return self._reason

    @abstractmethod
    def close(self, code: int = 0, reason: str = "") -> None:
        """End the connection and tell the peer at once; queued data is dropped. Does nothing if the connection has already ended."""

    async def aclose(self, code: int = 0, reason: str = "", *, drain_timeout: float = 5.0) -> None:
        """Wait up to `drain_timeout` seconds until the peer has the data of finished streams, then close.

        Cancellation:
            the connection is closed at once; data that the peer has not acknowledged may be lost.
        """
        try:
            if self._reason is None:
                with trio.move_on_after(drain_timeout):
                    await self._drain()
        finally:
            self.close(code, reason)
        await trio.lowlevel.checkpoint()
        await self._all_closed()

    @abstractmethod
    async def _drain(self) -> None:
        """Wait until the peer has the data of finished streams, or the connection has ended."""

    @abstractmethod
    async def _all_closed(self) -> None:
        """Wait until what carries the connection alone is closed too."""

    # What its streams call.

    @abstractmethod
    def set_priority(self, stream_id: int, priority: int) -> None:
        """Change the priority of a stream's data."""

    @abstractmethod
    def unsent(self, stream_id: int) -> int:
        """Return the number of bytes of a stream that are queued and not yet sent."""

    @abstractmethod
    def is_full(self, stream_id: int) -> bool:
        """Whether a sender on this stream has to wait."""

    @abstractmethod
    def has_room(self, stream_id: int) -> bool:
        """Whether a sender that waited may continue."""

    @abstractmethod
    def send(self, stream_id: int, data: Octets, fin: bool) -> None:
        """Queue bytes of a stream, and have them sent."""

    @abstractmethod
    def reset(self, stream_id: int, code: int) -> None:
        """Drop a stream's queued data, and tell the peer."""

    @abstractmethod
    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to send no more on a stream."""

    @abstractmethod
    def consumed(self, stream_id: int, size: int) -> None:
        """Record that received bytes of a stream were taken or dropped, and grant the peer as many."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            self.close()
            await self._all_closed()

    def _appeared(self, stream: S) -> None:
        """Queue a stream of the peer for `accept_stream`."""
        self.streams[stream.stream_id] = stream
        self._waiting.append(stream)
        if self._tell_stream is not None:
            self._tell_stream()
        else:
            self._accepting.unpark()

    def _datagram_came(self, datagram: Datagram) -> None:
        """Queue a datagram for `receive_datagram`."""
        if len(self._datagrams) >= self._datagram_queue:
            self._datagrams.popleft()
            self._datagrams_dropped += 1
        self._datagrams.append(datagram)
        if self._datagram_readers:  # `unpark` without a waiting task would be a third of the cost of a small datagram
            self._datagram_readers.unpark()

    def _credit_came(self, credit: int, *, unidirectional: bool) -> None:
        """Wake as many waiting tasks as can open a stream."""
        lot = self._opening[unidirectional]
        if lot:
            lot.unpark(count=min(len(lot), credit))

    def _end(self, reason: CloseReason, make_error: Callable[[], CarrierError]) -> None:
        """Record why the connection has ended, and wake all tasks."""
        self.closed, self._reason = True, reason
        self._make_error = make_error
        self._tell_stream = self._tell_batch = None
        for stream in list(self.streams.values()):
            stream.connection_ended()
        for lot in (self._accepting, *self._opening, self._datagram_readers, self._datagram_writers):
            lot.unpark_all()
        if self._drained is not None:
            self._drained.set()
        self._shaken.set()
        self._ended.set()

    def _release_streams(self) -> None:
        """Release the streams, which refer to the connection. Streams that wait to be accepted stay."""
        self.streams.clear()
        # Waiting streams get a copy of the connection that does not refer to them.
        ended = copy.copy(self)
        ended._waiting = deque()
        for stream in self._waiting:
            stream.outlive(ended)
