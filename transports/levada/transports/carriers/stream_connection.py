"""A connection of many `ConnectionStream`s: the part that QUIC and QMux share.

Here the application waits: for streams of the peer, credit for streams, datagrams, the handshake and the end. A subclass moves the bytes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import trio

from levada.framework.errors import CarrierError, ConnectionClosed
from levada.transports.carriers.connection_stream import ConnectionStream
from levada.transports.carriers.contracts import CarrierInfo, CloseReason, Datagram

__all__ = ["StreamConnection"]

S = TypeVar("S", bound=ConnectionStream[Any])


class StreamConnection(ABC, Generic[S]):
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

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._reason is not None

    def error(self) -> CarrierError:
        """Return the error that every call raises after the end."""
        return self._make_error()

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

    async def __aenter__(self) -> Self:
        return self

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
        self._reason = reason
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
