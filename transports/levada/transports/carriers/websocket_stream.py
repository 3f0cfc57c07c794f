"""WebSocket carrier (RFC 6455): whole messages each way over any byte stream.

The rules of this file:

* Reading happens inside `receive` (and `aclose`): while a task waits there, pings are answered, pongs and close frames are seen, and
  silence is measured.  Only one chunk and one incomplete message are read ahead of the application.
* With keepalive, a connection has one task, which watches for silence.  The task wakes about once in each interval and costs nothing per
  message; a deadline around each wait for bytes would cost 12 of 35 µs.  It never raises.
* Whole frames are written to the byte stream's queue, without an await between building and queueing.  `send` first waits for room and
  then checks again.  So a frame is queued whole or not at all, and none follows the close frame.  Control frames do not wait for room:
  two receivers that each waited for the other to read would wait forever.  They are bounded instead: one ping, one close frame, and
  pongs of 4 KiB, after which only the latest ping is answered (RFC 6455, 5.5.3).
* The first reason for an end stays, unless this side closes.  Messages that arrived before the peer's close frame are returned before
  `ConnectionLost` is raised; this side's own `aclose` drops them.
* The server closes the byte stream first, after both close frames (RFC 6455, 7.1.1), and the client waits for that.  After
  `close_timeout` the byte stream is aborted.
"""

from __future__ import annotations

import logging
from types import TracebackType

import attrs
import trio

from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.framework.platform import PLATFORM
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, CarrierStatistics, Octets
from levada.transports.carriers.streams import again
from levada.transports.carriers.websocket_config import UpgradeRequest, WebSocketConfig
from levada.transports.carriers.websocket_frames import (
    NO_CODE,
    NORMAL,
    CloseReceived,
    Ping,
    WebSocketCore,
    WebSocketFrameError,
)

__all__ = ["WebSocketStream"]

logger = logging.getLogger("levada.transports.websocket")

_CHUNK = 65_536  # bytes taken from the byte stream and parsed at a time
# Messages returned between two turns of the scheduler; a turn costs as much as 20 small messages.
_MESSAGES_PER_TURN = 64
_PONGS_UNSENT = 4096  # bytes


class WebSocketStream(trio.abc.AsyncResource):
    """One WebSocket, at either end: the `MessageStream` of this carrier.

    Made by `dial`, `listen`, `open_over` and `accept_over`.  As an async context manager it closes at the end of the block, with
    code 1000, or 1011 if an exception leaves the block.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        config: WebSocketConfig,
        client: bool,
        early: bytes,
        subprotocol: str | None,
        request: UpgradeRequest | None,
    ) -> None:
        self.info: CarrierInfo = attrs.evolve(stream.info, scheme="wss" if stream.info.tls_version else "ws")
        """Facts about the connection and its two ends."""
        self.subprotocol = subprotocol
        """The negotiated subprotocol, or ``None``."""
        self.request = request
        """The client's request; ``None`` at the client."""
        self._stream = stream
        self._client = client
        self._config = config
        self._core = WebSocketCore(
            client=client,
            max_message=config.max_message,
            accept_text=config.accept_text,
            random=PLATFORM.get().token_bytes,
        )
        self._end: CarrierError | None = None  # why the WebSocket has ended
        self._over = trio.Event()  # the byte stream is closed
        self._ending = False  # a task is closing the byte stream
        self._eof = False
        self._fault: ConnectionLost | None = None  # the error for a rule that the peer broke
        self._peer_closed = False
        self._reading = False  # whether a task waits for bytes
        self._not_reading: trio.Event | None = None  # set when that task has returned, for a task that closes
        self._sending = False
        self._turn = _MESSAGES_PER_TURN
        self._reading_since = 0.0  # on trio's clock
        self._silence = 0.0  # seconds of cancelled waits since bytes came
        self._pinged: CarrierStatistics | None = None  # counters at the time of the ping under way
        self._pongs_unsent = 0
        self._pong = b""  # the latest pong, while no more may be queued
        if early:
            self._take(early)
        if config.keepalive_interval is not None:
            trio.lowlevel.spawn_system_task(
                self._watch, config.keepalive_interval, name=f"levada keepalive of {self.info.peer}"
            )

    @property
    def unsent(self) -> int:
        """Bytes queued and not handed on yet, including framing."""
        return self._stream.unsent

    async def send(self, message: Octets) -> None:
        """Queue one message, waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the peer closed or was lost.
            trio.BusyResourceError: another task is sending.

        Cancellation:
            nothing was queued.
        """
        await self.wait_for_room()
        self.send_nowait(message)

    async def wait_for_room(self) -> None:
        """Wait while more than the high watermark is queued, and queue nothing. Errors as `send`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this WebSocket")
        self._raise_if_over()
        self._sending = True
        try:
            await self._stream.send_all(b"")
        except CarrierError:
            self._raise_if_over()
            raise
        finally:
            self._sending = False
        self._raise_if_over()

    def send_nowait(self, message: Octets) -> None:
        """Queue one message without waiting, also above the watermark; the caller keeps its own bound. Errors as `send`."""
        self._raise_if_over()
        self._stream.send_nowait(self._core.message(message))
        if self._pong:
            pong, self._pong = self._pong, b""
            self._queue(pong)

    async def receive(self) -> bytes:
        """Wait for the next message; an accepted text message comes as its UTF-8 bytes.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the peer closed; `ConnectionLost.code` is its code, or 1005 if it gave none. Or the connection was lost; the code
                is ``None``. Or the peer broke a rule, and this side closed with this code; the cause is a `WebSocketFrameError`.
            IdleTimeout: the peer did not answer a ping.
            trio.BusyResourceError: another task is receiving.

        Cancellation:
            no message was taken.
        """
        while True:
            if self._core.messages:
                self._turn -= 1
                if self._turn > 0:
                    await trio.lowlevel.checkpoint_if_cancelled()
                else:
                    self._turn = _MESSAGES_PER_TURN
                    await trio.lowlevel.checkpoint()
                if self._core.messages:
                    return self._core.messages.popleft()
            elif (end := self._end) is not None:
                if not isinstance(end, ConnectionClosed):  # else `aclose` finishes
                    await self._finish()
                raise again(end)
            elif self._fault is not None:
                raise again(self._fault)
            else:
                await self._read()

    def receive_nowait(self) -> bytes | None:
        """Take the next message that has arrived; ``None`` if there is none. It never raises: `receive` raises the error.

        After `receive` has returned, it finds all other messages of the same chunk.
        """
        return self._core.messages.popleft() if self._core.messages else None

    async def flush(self) -> None:
        """Wait until nothing is queued on this side any more. Errors as `send`."""
        self._raise_if_over()
        try:
            await self._stream.flush()
        except CarrierError:
            self._raise_if_over()
            raise

    async def aclose(self, code: int = NORMAL, reason: str = "") -> None:
        """Send the queue and a close frame, and wait for the peer's, all within `close_timeout`.

        Messages that have arrived and were not taken are dropped.  Later calls do nothing.

        Args:
            code: 1000 to 1003 or 1007 to 1013 (RFC 6455, 7.4.1), or 3000 to 4999.
            reason: cut to 123 bytes of UTF-8.

        Raises:
            ConfigurationError: the code may not be sent.

        Cancellation:
            the connection is closed at once; the queue may be lost.
        """
        if not (1000 <= code <= 1003 or 1007 <= code <= 1013 or 3000 <= code <= 4999):
            raise ConfigurationError(f"close code {code} may not be sent: 1000 to 1003, 1007 to 1013, or 3000 to 4999")
        if self._end is None:
            self._queue(self._core.close(code, reason))
        if not isinstance(self._end, ConnectionClosed):
            self._end = ConnectionClosed("this side closed the WebSocket")
        self._core.discard()
        await self._finish()

    def abort(self) -> None:
        """Close at once, without a close frame; the peer sees a loss."""
        self._end = ConnectionClosed("this side aborted the WebSocket")
        self._core.discard()
        self._stream.abort()
        self._over.set()

    def statistics(self) -> CarrierStatistics:
        """Return the counters of the byte stream below: bytes with all framing, without that of TLS."""
        return self._stream.statistics()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose(NORMAL if error is None or isinstance(error, trio.Cancelled) else 1011)

    def _raise_if_over(self) -> None:
        if self._end is not None:
            raise again(self._end)

    async def _finish(self) -> None:
        """Finish the close handshake and close the byte stream, or wait for the task that is doing it."""
        if self._ending or self._over.is_set():
            await self._over.wait()
            return
        self._ending = True
        try:
            with trio.move_on_after(self._config.close_timeout) as scope:
                if self._fault is not None and not self._client:
                    try:  # the peer's close frame may no longer be recognisable, but the peer closes after this
                        await self._stream.send_eof()
                    except NotImplementedError:
                        pass
                while not (self._eof or (self._peer_closed and not self._client)):
                    if self._reading:  # in `receive`, which ends as soon as bytes come
                        self._not_reading = trio.Event()
                        await self._not_reading.wait()
                    else:
                        await self._read()
                await self._stream.aclose()
            if scope.cancelled_caught:
                self._stream.abort()
        except BaseException:
            self._stream.abort()
            raise
        finally:
            self._over.set()
        logger.debug("%s is over: %s", self.info.peer, self._end, extra={"protocol": "websocket", "event": "closed"})

    async def _watch(self, interval: float) -> None:
        """Ping the peer after `interval` seconds of silence, and end the connection if nothing comes."""
        while not self._over.is_set():
            allowed = interval if self._pinged is None else self._config.keepalive_timeout
            silence = self._silence + (trio.current_time() - self._reading_since if self._reading else 0.0)
            if silence < allowed:
                # After a ping wait for `interval` at most, since the answer begins a new silence.
                with trio.move_on_after(min(allowed - silence, interval)):
                    await self._over.wait()
            elif self._end is None:
                self._break_silence()
            else:
                await self._over.wait()

    def _break_silence(self) -> None:
        self._silence = 0.0
        self._reading_since = trio.current_time()
        before = self._pinged
        if before is None:
            self._queue(self._core.ping())
        self._pinged = self._stream.statistics()
        # A peer that takes bytes from a long queue is alive, even if the ping has not reached it yet.
        if before is not None and not (before.unsent and self._pinged.bytes_sent > before.bytes_sent):
            self._end = IdleTimeout(f"no answer to a ping within {self._config.keepalive_timeout} s")
            self._stream.abort()
            self._over.set()

    async def _read(self) -> None:
        """Wait for bytes once, and process them."""
        if self._reading:
            raise trio.BusyResourceError("another task is receiving from this WebSocket")
        self._reading = True
        self._reading_since = trio.current_time()
        try:
            data = await self._stream.receive_some(_CHUNK)
        except CarrierError as error:
            data = b""
            if self._end is None:
                self._end = error
        except BaseException:
            self._silence += trio.current_time() - self._reading_since
            raise
        finally:
            self._reading = False
            if self._not_reading is not None:
                self._not_reading.set()
        self._silence = 0.0
        self._pinged = None
        self._take(data)

    def _take(self, data: bytes) -> None:
        if not data:
            self._eof = True
            if self._end is None:
                self._end = ConnectionLost("the connection ended without a close frame")
            return
        try:
            controls = self._core.receive_data(data)
        except WebSocketFrameError as error:
            self._fault = ConnectionLost(f"closed with code {error.code}: {error.detail}", error.code)
            self._fault.__cause__ = error
            if self._end is None:
                logger.info(
                    "%s broke a rule: %s", self.info.peer, error, extra={"protocol": "websocket", "event": "refused"}
                )
            if not self._config.leave_faults:
                self._queue(self._core.close(error.code, error.detail))
                self._end = self._end or self._fault
            return
        ping = None
        for control in controls:
            if isinstance(control, Ping):
                ping = control
            elif isinstance(control, CloseReceived):
                self._peer_closed = True
                self._queue(self._core.close(control.code))
                if self._end is None:
                    code = "no code" if control.code == NO_CODE else f"code {control.code}"
                    detail = f"the peer closed with {code}: {control.reason or 'no reason'}"
                    self._end = ConnectionLost(detail, control.code)
        if ping is not None:
            self._answer(ping)

    def _answer(self, ping: Ping) -> None:
        """Queue a pong, or keep it for later if the peer does not read earlier ones."""
        pong = self._core.pong(ping.payload)
        self._pongs_unsent = min(self._pongs_unsent, self._stream.statistics().unsent)
        if self._pongs_unsent + len(pong) > _PONGS_UNSENT:
            self._pong = pong
            return
        self._pongs_unsent += len(pong)
        self._queue(pong)

    def _queue(self, frame: bytes) -> None:
        """Queue a control frame. If the byte stream has failed, reading raises the error."""
        if frame:
            try:
                self._stream.send_nowait(frame)
            except CarrierError:
                pass
