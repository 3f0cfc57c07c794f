"""The parts that byte-stream carriers share: a stream that joins small writes, sticky errors, how sockets are accepted.

How `JoinedStream`, the stream of TCP, TLS and Unix sockets, writes:

* A send of trio costs 15 us, a turn of its scheduler 5, the system call only 2.  So all writes of one turn go out together: 2 to 4 million
  64-byte frames a second instead of 26 to 47 thousand.  `send_all` appends to a queue, and a writer task takes the whole queue at a time.
* If requests come one at a time, waiting for the writer would delay each answer.  So a small write that finds nothing queued, at least
  `_JOIN_WITHIN` seconds after the last such write, goes straight to the kernel without any task: 15 instead of 8.5 thousand round trips a
  second.  Trio's own stream, which joins nothing, makes 16.
* A write above `_JOINED` bytes that finds nothing queued also goes straight: the kernel usually takes all of it, and any rest is queued.
* The writer is a system task of trio's run, which the first queued write starts.  So an idle connection has no task, and an accepted one
  outlives the block of its listener.  The writer never raises: a failure becomes the sticky error of sending.  It ends with the stream.
* The bytes that are queued or being written stay below the high watermark plus one write.  A write is queued as a whole, so a cancelled
  `send_all` has queued all of it or nothing.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket as stdlib_socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed, ConnectionLost
from levada.framework.platform import PLATFORM
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, Octets

__all__ = [
    "JoinedStream", "StreamConfig", "Waiter", "accept_from", "again", "cut_front", "discard",
    "host_and_port", "plain_nursery", "split_url",
]  # fmt: skip

E = TypeVar("E", bound=CarrierError)

logger = logging.getLogger("levada.transports.carriers")

_SILENCE = 60.0
"""Seconds after a warning that no connection can be accepted before the next. There are ten attempts a second."""

# Seconds. For writes further apart, a system call of 2 to 5 us each is at most a tenth of the time.
_JOIN_WITHIN = 50e-6
_JOINED = 16 * 1024  # bytes; larger writes are not worth joining: without the writer 64 KiB cost 30 us less
# Bytes handed on at once, so that `unsent` and the watermark see the progress of a very large write.
_SLICE = 256 * 1024


class Waiter:
    """A place where one task at a time waits until it is woken; the task then checks whether it may continue.

    It is a place for a task, since an event or a parking lot would need new objects for each wait.
    """

    task: trio.lowlevel.Task | None = None
    """The waiting task."""

    async def wait(self) -> None:
        """Wait for `wake`.

        Raises:
            trio.BusyResourceError: another task waits here.
        """
        if self.task is not None:
            raise trio.BusyResourceError("another task is using this direction of the stream")
        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._give_up)

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        """Wake the waiting task, if there is one."""
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)


def again(error: E) -> E:
    """Return a copy of a sticky error to raise. The same object would collect the traceback of every call."""
    copy = attrs.evolve(error)
    copy.__cause__ = error.__cause__
    return copy


def cut_front(buffer: bytearray, count: int) -> bytes:
    """Remove and return the first `count` bytes of `buffer`, or all. The time is linear in `count`, not in the rest."""
    if count >= len(buffer):
        data = bytes(buffer)
        buffer.clear()
        return data
    with memoryview(buffer) as view:
        data = bytes(view[:count])
    del buffer[:count]
    return data


def split_url(url: str, scheme: str) -> SplitResult:
    """Return the parts of a URL with this scheme.

    Raises:
        ConfigurationError: `url` has another scheme, or is not a URL.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a port
    except ValueError as error:
        raise ConfigurationError(f"not a URL: {url!r}: {error}") from error
    if parts.scheme != scheme:
        raise ConfigurationError(f"expected a URL with {scheme}://, got {url!r}")
    return parts


def host_and_port(url: str, scheme: str) -> tuple[str, int]:
    """Return the host and the port of a URL.

    Raises:
        ConfigurationError: the host or the port is missing, or there is more: a user, a path but ``/``, a query or a fragment.
    """
    parts = split_url(url, scheme)
    if not parts.hostname or parts.port is None:
        missing = "port" if parts.hostname else "host"
        raise ConfigurationError(f"there is no {missing} in {url!r}: expected {scheme}://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        where = f"{scheme}://{parts.netloc.rpartition('@')[2]}"  # without a password
        raise ConfigurationError(
            f"{where} is all that such a URL can say: leave out its user, path, query and fragment"
        )
    return parts.hostname, parts.port


@attrs.frozen(kw_only=True)
class StreamConfig:
    """Settings that all carriers on sockets share. Immutable; derive with `attrs.evolve`."""

    high_watermark: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(0)])
    """Bytes queued above which sending waits, until half as many are left."""
    receive_size: int = attrs.field(default=64 * 1024, validator=[v.instance_of(int), v.ge(1)])
    """Most bytes that one `receive_some` without a limit returns."""
    close_timeout: float = attrs.field(default=5.0, validator=v.ge(0))
    """Seconds that `aclose` waits until the queue is sent; then the rest is lost."""
    linger: float = attrs.field(default=0.0, validator=v.ge(0))
    """Seconds of `close_timeout` for which `aclose` reads and discards until the peer ends too. This is for protocols whose peers send until
    they see the end, and must still receive the last bytes."""


class JoinedStream(trio.abc.AsyncResource):
    """A byte stream on a socket that joins small writes; a `ByteStream`, made by `dial` and `listen` of its carrier.

    Args:
        raw: sends and receives over `socket`, directly or with TLS.
        socket: the socket itself, for operations that `raw` does not have.
        info: the two ends.
        config: watermark and time limits.
        half_close: whether `raw` can end sending alone.
        straight: whether bytes may be written to the socket without `raw`.
        since: when the socket was connected, on trio's clock; `None`: now.
    """

    def __init__(
        self,
        raw: trio.abc.Stream,
        socket: trio.socket.SocketType,
        info: CarrierInfo,
        config: StreamConfig,
        *,
        half_close: bool = True,
        straight: bool = True,
        since: float | None = None,
    ) -> None:
        self.since = trio.current_time() if since is None else since
        """When the socket was connected, before any TLS handshake, on trio's clock."""
        self._raw = raw
        self._socket = socket
        # -1 once the socket is closed. Trio's method `fileno`, called three times for each request, would cost 0.5 us.
        self._fd = socket.fileno()
        self._info = info
        self._config = config
        self._half_close = half_close
        self._straight = straight and os.name == "posix"  # elsewhere a socket is not a file descriptor
        self._queue = bytearray()
        self.unsent = 0
        """Bytes queued that the kernel does not have yet."""
        self._finished = False
        self._end_sent = False
        self._closed = False
        self._send_error: CarrierError | None = None
        self._receive_error: CarrierError | None = None
        self._ended = False
        self._receiving = False
        self._room = Waiter()
        self._work = Waiter()
        self._has_writer = False
        self._progress = trio.lowlevel.ParkingLot()
        self._was_empty = True  # the kernel's buffer, after the last read
        self._perf_counter = PLATFORM.get().perf_counter
        self._last_straight = 0.0
        self._unyielded = 0  # bytes written straight since a call of this stream last let other tasks run
        self._bytes_sent = self._bytes_received = self._writes = self._reads = 0
        self._leave: Callable[[], None] | None = None

    def at_end(self, leave: Callable[[], None]) -> None:
        """Call `leave` once, when the socket is closed; at once if it is closed already."""
        if self._fd < 0:
            leave()
        else:
            self._leave = leave

    @property
    def info(self) -> CarrierInfo:
        """Facts about the connection and its two ends."""
        return self._info

    def asked_for(self, server_name: str | None) -> None:
        """Set `CarrierInfo.server_name`, which is known only after the TLS handshake."""
        self._info = attrs.evolve(self._info, server_name=server_name)

    async def send_all(self, data: Octets) -> None:
        """Queue bytes, waiting for room: see `ByteStream.send_all`."""
        self._check_sending()
        while self.unsent > self._config.high_watermark:
            await self._room.wait()
            self._check_sending()
        if self._unyielded > self._config.high_watermark:
            self._unyielded = 0
            await trio.lowlevel.checkpoint()
        self.send_nowait(data)

    def send_nowait(self, data: Octets) -> None:
        """Write bytes straight to the kernel if that is faster, otherwise queue them, without waiting: see `ByteStream.send_nowait`."""
        if self._closed or self._finished or self._send_error is not None:
            self._check_sending()
        if self._straight and data and not self.unsent:
            now = self._perf_counter()
            if len(data) > _JOINED or now - self._last_straight >= _JOIN_WITHIN:
                self._last_straight = now
                try:
                    count = os.write(self._fd, data)
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._fail_sending(error)
                    self._check_sending()
                    raise
                else:
                    self._bytes_sent += count
                    self._writes += 1
                    self._unyielded += count
                    if count == len(data):
                        return
                    data = memoryview(data).cast("B")[count:]
        if data:
            self._queue += data
            self.unsent += len(data)
            self._start_writer()

    def _check_sending(self) -> None:
        if self._closed or self._finished:
            what = "this side closed the stream" if self._closed else "send_all() after send_eof()"
            raise ConnectionClosed(what)
        if self._send_error is not None:
            raise again(self._send_error)

    def _handed_on(self, count: int) -> None:
        self._bytes_sent += count
        self._writes += 1

    def _start_writer(self) -> None:
        if self._has_writer:
            self._work.wake()
        else:
            self._has_writer = True
            trio.lowlevel.spawn_system_task(
                self._write, name=f"levada writer of {self._info.scheme}://{self._info.peer}"
            )

    async def _write(self) -> None:
        """Write the queue, all of it at a time, until the stream is closed."""
        try:
            while True:
                if self._queue:
                    await self._write_queue()
                elif self._finished and not self._end_sent:
                    await self._send_raw_eof()
                    self._end_sent = True
                    self._progress.unpark_all()
                elif self._closed:
                    return
                else:
                    await self._work.wait()
        except (trio.BrokenResourceError, OSError) as error:
            self._fail_sending(error)
        except trio.ClosedResourceError:
            pass  # `_shut` closed the socket, and has woken all waiting tasks

    async def _write_queue(self) -> None:
        data, self._queue = self._queue, bytearray()
        low = self._config.high_watermark // 2
        with memoryview(data) as view:
            for at in range(0, len(data), _SLICE):
                with view[at : at + _SLICE] as part:
                    await self._raw.send_all(part)
                    self.unsent -= len(part)
                    self._handed_on(len(part))
                if self.unsent <= low:
                    self._room.wake()
        if not self._queue:
            self._progress.unpark_all()

    async def _send_raw_eof(self) -> None:
        assert isinstance(self._raw, trio.abc.HalfCloseableStream)
        await self._raw.send_eof()

    def _fail_sending(self, cause: BaseException) -> None:
        if self._send_error is None:
            self._send_error = lost(cause)
            self._drop_queue()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.unsent = 0
        self._room.wake()
        self._progress.unpark_all()

    async def send_eof(self) -> None:
        """End sending: see `ByteStream.send_eof`."""
        if not self._half_close:
            raise NotImplementedError(
                f"{self._info.scheme} has no half-close: use aclose(), which ends both directions"
            )
        if self._finished and not self._closed:
            return
        self._check_sending()
        if self._room.task is not None:
            raise trio.BusyResourceError("another task is sending")
        self._finished = True
        self._start_writer()

    async def flush(self) -> None:
        """Wait until the queue is empty: see `ByteStream.flush`."""
        await self._drained()
        if self._closed:
            raise ConnectionClosed("this side closed the stream")
        if self._send_error is not None:
            raise again(self._send_error)

    async def _drained(self) -> None:
        while self._send_error is None and (self.unsent or (self._finished and not self._end_sent)):
            await self._progress.park()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes: see `ByteStream.receive_some`."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving")
        if self._closed:
            raise ConnectionClosed("this side closed the stream")
        if self._receive_error is not None:
            raise again(self._receive_error)
        if self._ended:
            return b""
        size = self._config.receive_size if max_bytes is None else max_bytes
        if size < 1:
            raise ValueError(f"max_bytes is {size}, wanted at least 1")  # reading 0 bytes would look like the end
        self._receiving = True
        try:
            if self._straight:
                # trio's own stream tries first, waits, tries again, and yields after a success: that is 15 us more for each read that waits.
                # Here a read waits first if the socket was empty after the last read. Nothing is awaited after the bytes are taken, so a
                # cancelled read has taken nothing.
                if self._was_empty:
                    await trio.lowlevel.wait_readable(self._fd)
                else:
                    await trio.lowlevel.checkpoint()
                data: bytes | bytearray | None = None
                while data is None:
                    try:
                        data = os.read(self._fd, size)
                    except BlockingIOError:
                        await trio.lowlevel.wait_readable(self._fd)
                self._was_empty = len(data) < size
            else:
                data = await self._raw.receive_some(size)
        except trio.ClosedResourceError as error:
            raise ConnectionClosed("this side closed the stream") from error
        except (trio.BrokenResourceError, OSError) as error:
            if self._closed:  # aborted after the socket became readable and before the read
                raise ConnectionClosed("this side closed the stream") from error
            self._receive_error = lost(error)
            raise again(self._receive_error) from self._receive_error.__cause__
        finally:
            self._receiving = False
        if self._closed:  # closed meanwhile: that drops the bytes not taken
            raise ConnectionClosed("this side closed the stream")
        if data:
            self._bytes_received += len(data)
            self._reads += 1
            return data if isinstance(data, bytes) else bytes(data)
        self._ended = True
        return b""

    async def aclose(self) -> None:
        """Send the queue, for up to `StreamConfig.close_timeout`, and close: see `ByteStream.aclose`."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        self._room.wake()
        try:
            with trio.move_on_after(self._config.close_timeout):
                await self._drained()
                if self._send_error is None:
                    await self._say_goodbye()
                    await self._linger()
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            self._shut(hard=self.unsent > 0)

    async def _say_goodbye(self) -> None:
        """Send the carrier's own end of a stream. A plain socket has none: closing the socket is the end."""

    async def _linger(self) -> None:
        """Wait until the peer's kernel has everything.

        A socket that closes with unread bytes sends a reset, which destroys the last bytes on their way to the peer. So bytes that come
        meanwhile are discarded.
        """
        pause = 0.001
        try:
            self._socket.shutdown(stdlib_socket.SHUT_WR)
            until = trio.current_time() + self._config.linger
            while not discard(self._socket) and (_unacknowledged(self._socket) or trio.current_time() < until):
                await trio.sleep(pause)
                pause = min(2 * pause, 0.1)
        except OSError:
            pass  # the peer has gone

    def abort(self) -> None:
        """Close at once and drop the queue: see `ByteStream.abort`."""
        self._closed = True
        self._shut(hard=True)

    def _shut(self, *, hard: bool) -> None:
        """Close the socket. With `hard` the peer sees a reset, if the carrier has one."""
        if self._fd < 0:
            return
        self._fd = -1
        if hard:
            try:
                self._socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError:
                pass  # the socket is not connected any more
        self._socket.close()
        self._drop_queue()
        self._work.wake()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        return CarrierStatistics(
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            writes=self._writes,
            reads=self._reads,
            unsent=self.unsent,
        )


def lost(cause: BaseException) -> ConnectionLost:
    """Return the `ConnectionLost` for an error of the system, without trio's wrapper."""
    told = cause.__cause__ if isinstance(cause, trio.BrokenResourceError) and cause.__cause__ is not None else cause
    error = ConnectionLost(f"the connection was lost: {told}" if str(told) else "the connection was lost")
    # The stream keeps the error, and the frames of a traceback would keep the stream.
    error.__cause__ = told.with_traceback(None)
    return error


def discard(socket: trio.socket.SocketType) -> bool:
    """Discard the bytes that have arrived, without waiting; return whether the peer has ended."""
    if os.name != "posix":
        return False
    try:
        for _ in range(64):  # so that a fast peer does not hold up other tasks
            if not os.read(socket.fileno(), 64 * 1024):
                return True
    except BlockingIOError:
        pass
    return False


def _unacknowledged(socket: trio.socket.SocketType) -> bool:
    """Whether the kernel still has bytes for the peer; false if the system cannot tell."""
    try:
        import fcntl
        import termios

        return fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4)
    except (ImportError, OSError):
        return False


@asynccontextmanager
async def plain_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for tasks that never raise. It cancels them at the end of the block, and does not wrap an error of the block in a group."""
    error: BaseException | None = None
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = _essence(group)
    if error is not None:
        try:
            raise error  # outside the handler, so that its context is not the group
        finally:
            # This frame is in the error's traceback, so the two would keep each other and everything in the frames.
            del error


def _essence(group: BaseExceptionGroup[BaseException]) -> BaseException:
    own = [raised for raised in group.exceptions if not isinstance(raised, trio.Cancelled)] or [group.exceptions[0]]
    return own[0] if len(own) == 1 else group


async def accept_from(
    listener: trio.abc.Listener[trio.SocketStream], handle: Callable[[trio.SocketStream], Awaitable[None]]
) -> None:
    """Take connections from the kernel and hand them to `handle`, one at a time, until the listener is closed.

    If the system has no descriptors or memory left, wait 0.1 s and try again; open connections are not affected. A warning says so, at most
    once a minute.

    Raises:
        OSError: `accept` failed for another reason.
    """
    silent = -math.inf
    while True:
        try:
            stream = await listener.accept()
        except trio.ClosedResourceError:
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            if trio.current_time() >= silent:
                silent = trio.current_time() + _SILENCE
                logger.warning("cannot accept: %s", error, extra={"event": "accept_failed"})
            await trio.sleep(0.1)
            continue
        try:
            await handle(stream)
        except BaseException:
            stream.socket.close()
            raise
