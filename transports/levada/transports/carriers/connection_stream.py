"""The stream of a connection with flow control: the part that QUIC and QMux share.

The rules of this file:

* Bytes that have arrived wait here, bounded by the window that the connection granted. Bytes to be sent wait in the connection.
* A stream has no task. The connection calls it, and it wakes the waiting tasks.
* Errors are sticky. The first error of a direction stays, even when the connection ends later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, LocalProtocolError, StreamWasReset, StreamWasStopped
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, Octets
from levada.transports.carriers.streams import again

if TYPE_CHECKING:
    from levada.transports.carriers.stream_connection import StreamConnection

__all__ = ["ConnectionStream"]

ABORTED = 0
"""Code of a reset or stop for which the application gave none."""
_SMALL = 512
"""Pieces of fewer bytes are joined as they arrive: a separate object for two bytes would take sixty."""


_NO_CHUNKS: list[bytes | bytearray] = []
"""Shared by all streams of which everything was read; nothing is put into it. A list of its own takes 56 bytes."""


C = TypeVar("C", bound="StreamConnection[Any]")


class ConnectionStream(trio.abc.AsyncResource, Generic[C]):
    """A `levada.transports.carriers.contracts.Stream` of a connection that queues its bytes and bounds the peer's.

    `send_all` waits while the connection says that the stream is full. A subclass knows which bytes the peer has acknowledged, and makes the
    connection call `wake_room`, `wake_flushing` and `wake_sending`.
    """

    __slots__ = (
        "_buffered", "_can_receive", "_can_send", "_chunks", "_connection", "_early", "_end", "_fin", "_flushed", "_news",
        "_paused", "_priority", "_reader", "_reads", "_receive_error", "_received", "_send_error", "_settled", "_stop_code",
        "_tell_readable", "_tell_stopped", "_writer", "_writes", "_written", "at_end", "stream_id",
    )  # fmt: skip

    def __init__(self, connection: C, stream_id: int, priority: int = 128):
        self.stream_id = stream_id
        """The stream's number on the wire."""
        self._connection = connection
        self._priority = priority
        self._chunks: list[bytes | bytearray] = _NO_CHUNKS
        self._buffered = 0
        self._received = 0
        self._written = 0
        self._reads = 0
        self._writes = 0
        self._early = False
        self._can_send = True
        self._can_receive = True
        self._fin = False  # this side's end was queued
        self._end = False  # the peer's end has arrived
        self.at_end = False
        """Whether the peer's end has come and everything before it was taken."""
        self._settled = False  # everything sent, with the end, is acknowledged or given up
        self._receive_error: CarrierError | None = None
        self._send_error: CarrierError | None = None
        self._stop_code: int | None = None
        self._tell_readable: Callable[[int], None] | None = None
        self._tell_stopped: Callable[[int, int], None] | None = None
        self._reader: trio.lowlevel.Task | None = None
        self._writer: trio.lowlevel.Task | None = None
        self._news: trio.Event | None = None  # set when the state of sending changes
        self._flushed: trio.Event | None = None
        self._paused = False  # above the high watermark, and not yet below the low one
        if stream_id & 2:
            self._can_send = self.initiated_here
            self._can_receive = not self._can_send
            self._settled = not self._can_send

    def __repr__(self) -> str:
        return f"<stream {self.stream_id} of {self._connection!r}>"

    @property
    def initiated_here(self) -> bool:
        """Whether this side opened the stream."""
        return bool(self.stream_id & 1) != self._connection.is_client

    @property
    def unidirectional(self) -> bool:
        """Whether only the opener sends."""
        return bool(self.stream_id & 2)

    @property
    def early(self) -> bool:
        """Whether bytes received so far came as 0-RTT data, which may be a replay."""
        return self._early

    @property
    def info(self) -> CarrierInfo:
        """The two ends of the connection."""
        return self._connection.info

    @property
    def priority(self) -> int:
        """0 (first) to 255; streams with equal priority take turns."""
        return self._priority

    @priority.setter
    def priority(self, value: int) -> None:
        if not 0 <= value <= 255:
            raise ValueError(f"priority is {value}, wanted 0 to 255")
        if not self._can_send:
            raise LocalProtocolError(f"stream {self.stream_id} is only received on, so it has no priority")
        self._priority = value
        self._connection.set_priority(self.stream_id, value)

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet sent."""
        return self._connection.unsent(self.stream_id)

    @property
    @abstractmethod
    def unacked(self) -> int:
        """Bytes queued or sent that the peer has not acknowledged."""

    def statistics(self) -> CarrierStatistics:
        """Return the counters of this stream as they are now. They count the application's bytes and calls."""
        unsent = self.unsent
        return CarrierStatistics(
            bytes_sent=self._written - unsent,
            bytes_received=self._received,
            writes=self._writes,
            reads=self._reads,
            unsent=unsent,
        )

    def send_nowait(self, data: Octets, *, fin: bool = False) -> None:
        """Queue without waiting, also above the watermark, and optionally finish. Errors as `send_all`."""
        if self._fin or self._send_error is not None or not self._can_send or self._connection.closed:
            self._check_sending()
        if isinstance(data, memoryview):
            data = data.cast("B") if data.contiguous else data.tobytes()
        self._written += len(data)
        self._writes += 1
        self._fin = fin
        self._connection.send(self.stream_id, data, fin)

    async def send_all(self, data: Octets) -> None:
        """Queue all of `data`, after waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed the connection, or finished or reset the stream.
            ConnectionLost: the connection is lost.
            StreamWasStopped: the peer has stopped the stream.
            LocalProtocolError: only the peer sends on this stream.
            trio.BusyResourceError: another task is sending.

        Cancellation:
            nothing was queued.
        """
        if self._writer is not None:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_sending()
        if self._paused or self._connection.is_full(self.stream_id):
            # If this call is cancelled, the next one also waits for the low watermark.
            self._paused = True
            await self._wait_for_room()
            self._paused = False
        self.send_nowait(data)

    async def _wait_for_room(self) -> None:
        while not self._connection.has_room(self.stream_id):
            self._check_sending()
            self._writer = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up_writing)

    async def send_eof(self) -> None:
        """End sending after the queue; a second call does nothing. Errors as `send_all`."""
        if not self._fin:
            self.send_nowait(b"", fin=True)
        await trio.lowlevel.checkpoint()

    async def flush(self) -> None:
        """Wait until all queued bytes were sent; raise the stream's error if they never will be."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.unsent:
            self._check_alive()
            await self._wait_until_flushed()
            if self._send_error is None:
                self._check_alive()  # a connection that has ended has dropped the queue
        if self._send_error is not None:
            raise again(self._send_error)

    def reset(self, code: int) -> None:
        """Give up sending: the queue is dropped, and the peer's `receive_some` raises `StreamWasReset`."""
        if not self._can_send:
            raise LocalProtocolError(f"only the peer sends on stream {self.stream_id}, so it cannot be reset: stop it")
        if not self._settled and self._send_error is None:
            self._tell_stopped = None
            self._send_error = ConnectionClosed(
                f"sending on stream {self.stream_id} was given up here with code {code}"
            )
            if not self._connection.closed:
                self._connection.reset(self.stream_id, code)
            self.wake_sending()

    async def stopped(self) -> int | None:
        """Wait until the peer stops this side's sending, and return its code; ``None`` if everything was acknowledged or reset here first."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._stop_code is None and not self._settled and self._send_error is None:
            self._check_alive()
            await self._wait_for_news(end=True)
        return self._stop_code

    def on_stopped(self, tell: Callable[[int, int], None]) -> None:
        """Call ``tell(stream_id, code)`` when the peer stops this side's sending; `Stream.on_stopped` says more."""
        if not self._can_send:
            raise LocalProtocolError(f"stream {self.stream_id} is only received on")
        if isinstance(self._send_error, StreamWasStopped):
            tell(self.stream_id, self._send_error.code)
        elif self._send_error is None and not self._settled and not self._connection.closed:
            self._tell_stopped = tell

    async def acked(self) -> bool:
        """Wait until the peer has everything, including the end; false if the stream was reset or stopped."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._settled and self._send_error is None:
            self._check_alive()
            await self._wait_for_news(end=True)
        return self._settled and self._send_error is None

    async def all_acked(self) -> None:
        """Wait until the peer has acknowledged everything sent so far; `Stream.all_acked` says more."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.unacked and self._send_error is None:
            self._check_alive()
            await self._wait_for_news(end=False)
        if self._send_error is not None:
            raise again(self._send_error)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes and take up to `max_bytes` (``None``: all that have arrived); ``b""`` is the peer's end.

        Raises:
            ConnectionClosed: this side closed the connection or stopped the stream.
            ConnectionLost: the connection is lost, and all bytes that had arrived were taken.
            StreamWasReset: the peer has reset the stream.
            LocalProtocolError: only this side sends on this stream.
            trio.BusyResourceError: another task is receiving.
            ValueError: `max_bytes` is below 1.

        Cancellation:
            no bytes were taken.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, wanted at least 1")
        if self._reader is not None:
            raise trio.BusyResourceError("another task is receiving on this stream")
        while not self._chunks:
            if self._receive_error is not None:
                raise again(self._receive_error)
            if self._end:
                return b""
            if not self._can_receive:
                raise LocalProtocolError(f"stream {self.stream_id} is only sent on")
            self._check_alive()
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up_reading)
        return self._take_some(max_bytes)

    def receive_nowait(self) -> bytes | None:
        """Take all bytes that have arrived; ``b""`` is the peer's end, ``None`` means none yet. Errors as `receive_some`."""
        if self._chunks:
            return self._take_some(None)
        if self._receive_error is not None:
            raise again(self._receive_error)
        if self._end:
            return b""
        if not self._can_receive:
            raise LocalProtocolError(f"stream {self.stream_id} is only sent on")
        self._check_alive()
        return None

    @property
    def was_reset(self) -> bool:
        """Whether the peer gave up sending, so that there is nothing to take; `Stream.was_reset` says more."""
        return not self._chunks and isinstance(self._receive_error, StreamWasReset)

    def on_readable(self, tell: Callable[[int], None]) -> None:
        """Call ``tell(stream_id)`` when there is something to take; `Stream.on_readable` says more."""
        if not self._can_receive:
            raise LocalProtocolError(f"stream {self.stream_id} is only sent on")
        over = self._end or self._receive_error is not None or self._connection.closed
        self._tell_readable = None if over else tell
        if over or self._chunks:
            tell(self.stream_id)

    def _take_some(self, max_bytes: int | None) -> bytes:
        chunks = self._chunks
        if max_bytes is None or self._buffered <= max_bytes:
            data = b"".join(chunks) if len(chunks) > 1 else bytes(chunks[0])  # `bytes` of a bytes object copies nothing
            self._chunks = _NO_CHUNKS
            self.at_end = self._end
        else:
            data = self._take(max_bytes)
        self._buffered -= len(data)
        self._reads += 1
        self._connection.consumed(self.stream_id, len(data))
        return data

    def _take(self, size: int) -> bytes:
        chunks, whole = self._chunks, 0
        while size >= len(chunks[whole]):
            size -= len(chunks[whole])
            whole += 1
        taken = chunks[:whole]
        if size:
            taken.append(chunks[whole][:size])
            chunks[whole] = chunks[whole][size:]
        del chunks[:whole]
        return b"".join(taken)

    def stop(self, code: int) -> None:
        """Ask the peer to stop sending; bytes that have arrived or still arrive are dropped."""
        if not self._can_receive:
            raise LocalProtocolError(f"stream {self.stream_id} is only sent on, so it cannot be stopped: reset it")
        if self._receive_error is None:
            self._receive_error = ConnectionClosed(
                f"receiving on stream {self.stream_id} was stopped here with code {code}"
            )
            if not self._end and not self._connection.closed:
                self._connection.stop(self.stream_id, code)
            self._drop_with_credit()
            self._receiving_is_over()

    async def aclose(self) -> None:
        """Finish sending and stop receiving, without waiting. The connection sends the queued data."""
        if not self._connection.closed:
            if self._can_send and not self._fin and self._send_error is None:
                self.send_nowait(b"", fin=True)
            if self._can_receive and not self._end:
                self.stop(ABORTED)
        if self._receive_error is None:
            self._receive_error = ConnectionClosed(f"stream {self.stream_id} was closed here")
            self._drop_with_credit()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Reset and stop the stream, both with code 0; the queued data is dropped."""
        if self._can_send:
            self.reset(ABORTED)
        if self._can_receive:
            self.stop(ABORTED)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        else:
            await self.aclose()

    def data_arrived(self, data: bytes, end: bool) -> None:
        """Take the next bytes of the peer, in order."""
        if self._receive_error is not None:
            if data:
                self._connection.consumed(self.stream_id, len(data))
        elif data:
            chunks = self._chunks
            if not chunks:
                self._chunks = [data]
            elif len(data) >= _SMALL:
                chunks.append(data)
            elif type(chunks[-1]) is bytearray:
                chunks[-1] += data
            else:
                chunks.append(bytearray(data))
            self._buffered += len(data)
        self._received += len(data)
        if end:
            self._end = True
            self.at_end = not self._chunks
            self._receiving_is_over()
        else:
            self._wake_reader()

    def outlive(self, ended: C) -> None:
        """Replace the connection, which has ended, by a copy that only knows its end."""
        self._connection = ended

    @property
    def settled(self) -> bool:
        """Whether the sending half is over for good."""
        return self._settled

    def mark_early(self) -> None:
        """Record that bytes came as 0-RTT data."""
        self._early = True

    def reset_arrived(self, code: int) -> None:
        """Record that the peer gave up sending. The connection has already given back the credit for the bytes not taken."""
        if self._receive_error is None:
            self._receive_error = StreamWasReset(f"the peer gave stream {self.stream_id} up with code {code}", code)
            self._drop()
        self._receiving_is_over()

    def stop_arrived(self, code: int) -> None:
        """Record that the peer has stopped the stream. The connection has already reset it with the same code."""
        if self._stop_code is None:
            self._stop_code = code
            if self._send_error is None and not self._settled:
                self._send_error = StreamWasStopped(f"the peer stopped stream {self.stream_id} with code {code}", code)
                tell, self._tell_stopped = self._tell_stopped, None
                if tell is not None:
                    tell(self.stream_id, code)
        self.wake_sending()

    def sending_settled(self) -> None:
        """Record that the peer has acknowledged the end, or the reset."""
        self._settled = True
        self._tell_stopped = None
        self.wake_sending()

    def connection_ended(self) -> None:
        """Wake all waiting tasks, which then raise the connection's error."""
        self._tell_stopped = None
        self._receiving_is_over()
        self.wake_sending()

    def wake_room(self) -> None:
        """Wake a waiting `send_all`, which checks again."""
        task = self._writer
        if task is not None:
            self._writer = None
            trio.lowlevel.reschedule(task)

    def wake_sending(self) -> None:
        """Wake all tasks that wait for something of this side's sending; they check again."""
        # At the end of most streams nothing waits. To see that here saves 0.35 µs of a request over QUIC, at both ends together.
        if self._writer is not None:
            self.wake_room()
        if self._news is not None:
            self._news.set()
            self._news = None
        if self._flushed is not None:
            self.wake_flushing()

    def wake_flushing(self) -> None:
        """Wake `flush`: all bytes were sent, or never will be."""
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None

    @property
    def undelivered(self) -> bool:
        """Whether the stream was finished here, and the peer has not acknowledged all of it."""
        return self._fin and not self._settled and self._send_error is None

    def _check_alive(self) -> None:
        if self._connection.closed:
            raise self._connection.error()

    def _check_sending(self) -> None:
        if not self._can_send:
            raise LocalProtocolError(f"stream {self.stream_id} is only received on")
        if self._send_error is not None:
            raise again(self._send_error)
        self._check_alive()
        if self._fin:
            raise ConnectionClosed(f"stream {self.stream_id} was finished here")

    async def _wait_until_flushed(self) -> None:
        """Wait for `wake_flushing`."""
        if self._flushed is None:
            self._flushed = trio.Event()
        await self._flushed.wait()

    async def _wait_for_news(self, *, end: bool) -> None:
        """Wait for `wake_sending`. For subclasses, `end` says whether the caller also waits for the end of the stream."""
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()

    def _drop(self) -> None:
        self._chunks = _NO_CHUNKS
        self.at_end = self._end
        self._buffered = 0

    def _drop_with_credit(self) -> None:
        if self._buffered and not self._connection.closed:
            self._connection.consumed(self.stream_id, self._buffered)
        self._drop()

    def _wake_reader(self) -> None:
        task = self._reader
        if task is not None:
            self._reader = None
            trio.lowlevel.reschedule(task)
        if self._tell_readable is not None:
            self._tell_readable(self.stream_id)

    def _receiving_is_over(self) -> None:
        """Wake the reader for the last time, and release the callback: if it refers to the stream, only the garbage collector could free both."""
        self._wake_reader()
        self._tell_readable = None

    def _give_up_reading(self, _: Any) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _give_up_writing(self, _: Any) -> trio.lowlevel.Abort:
        self._writer = None
        return trio.lowlevel.Abort.SUCCEEDED
