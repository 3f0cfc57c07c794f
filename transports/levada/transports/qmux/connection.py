"""One QMux connection: a core, the carrier below it, and the task that moves bytes between the two.

The rules of this file:

* One task, the reader, reads for the whole life of a connection. It gives the bytes to the core, and calls the streams directly.
* The output that the events of one batch cause is written together, at the end of the batch; so is the output of one call of `together`.
  Any other call of the application writes at once, without a task switch, if it comes alone. A second task, the writer, joins the output of
  calls that follow within `_JOIN_WITHIN` seconds, and the answers to a batch with data of several streams, since more tasks are about to send.
* The core is asked for output only while the carrier below holds little, since urgent data cannot overtake bytes in the kernel (QX-33).
  While the carrier is full, the writer waits for it, and reading continues (QX-31).
* The application learns of the end as soon as the core does. Then the reader closes the transport, within `QmuxConfig.close_timeout`.
* Reader and writer are system tasks of trio, since an accepted connection outlives the block of its listener. They never raise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.framework.failure_log import FailureLog
from levada.framework.platform import PLATFORM
from levada.transports.carriers.connection_stream import ConnectionStream
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, CloseReason, Datagram, Octets
from levada.transports.carriers.stream_connection import StreamConnection
from levada.transports.carriers.streams import Waiter

from . import events
from .below import Below, OverMessages
from .config import QmuxConfig
from .core import QmuxCore

__all__ = ["QmuxConnection", "QmuxStream"]


class QmuxStream(ConnectionStream["QmuxConnection"]):
    """A `levada.transports.carriers.contracts.Stream`, made by `QmuxConnection.open_stream` and `QmuxConnection.accept_stream`.

    `send_all` waits while more than `QmuxConfig.high_watermark` bytes are queued here, or more than `QmuxConfig.max_queued` on all streams. The
    peer may send `QmuxConfig.stream_window` bytes ahead of `receive_some`.

    An acknowledgement is the answer to a ping that was written after the bytes. The ping is only sent if a task waits for the answer, so
    `unacked` counts the bytes since the last answer that this stream waited for. Source: D-23.
    """

    __slots__ = ("_acked", "_asked")

    def __init__(self, connection: QmuxConnection, stream_id: int, priority: int = 128):
        super().__init__(connection, stream_id, priority)
        self._acked = 0
        # The bytes, and whether also the end, that the ping under way confirms.
        self._asked: tuple[int, bool] | None = None

    @property
    def unacked(self) -> int:
        """Bytes queued or sent, and not known to have reached the peer."""
        return 0 if self._settled or self._send_error is not None else self._written - self._acked

    async def _wait_for_room(self) -> None:
        blocked = self._connection.blocked
        blocked[self] = None
        try:
            await super()._wait_for_room()
        finally:
            del blocked[self]

    async def _wait_until_flushed(self) -> None:
        if self._flushed is None:
            self._connection.core.want_flushed(self.stream_id)
        await super()._wait_until_flushed()

    async def _wait_for_news(self, *, end: bool) -> None:
        if self._fin or not end:
            self.ask_for_ack()
        await super()._wait_for_news(end=end)

    def ask_for_ack(self) -> None:
        """Ask for `acked_as_asked` when the peer has everything that is queued now."""
        if self._asked is None:
            self._asked = self._written, self._fin
            self._connection.want_acked(self)

    @property
    def awaited(self) -> bool:
        """Whether a task waits for an acknowledgement, or for a stop."""
        return self._news is not None

    def acked_as_asked(self) -> None:
        """Record that the peer has everything that was queued at the last `ask_for_ack`."""
        assert self._asked is not None
        self._acked, end = self._asked
        self._asked = None
        if end:
            self.sending_settled()
        else:
            self.wake_sending()


logger = logging.getLogger("levada.transports.qmux")

_JOIN_WITHIN: Final = 50e-6
"""Fewest seconds between two writes without the writer; `levada.transports.carriers.streams` says why."""
_ALONE: Final = 2
"""Most events of a batch that wakes only one task: a stream and its data, or the data and the end of the stream."""
_SHALLOW: Final = 128 * 1024
"""Bytes in the carrier below at which the core is asked for no more. One stream moves 520 MB/s with this limit, and 400 with half of it.
Source: QX-33."""


class QmuxConnection(StreamConnection[QmuxStream]):
    """A `levada.transports.carriers.contracts.Connection`, made by `dial` and by `QmuxIncoming.accept`.

    Args:
        below: carries the records. The connection owns and closes it.
        info: the facts about both ends.
        config: windows, limits and timeouts.
        is_client: whether this side dialled.
        since: when the transport was connected; `QmuxConfig.handshake_timeout` counts from then.
        tell_ended: called with the reason once the connection has ended.
        failures: logs what fails here; None: a log of its own.
    """

    def __init__(
        self,
        below: Below,
        info: CarrierInfo,
        config: QmuxConfig,
        *,
        is_client: bool,
        since: float,
        tell_ended: Callable[[QmuxConnection, CloseReason], None] | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        super().__init__(info, is_client=is_client, datagram_queue=config.datagram_queue)
        self.core = QmuxCore(client=is_client, now=since, config=config, framed=isinstance(below, OverMessages))
        self._below = below
        self._config = config
        self._tell_ended = tell_ended
        self._failures = failures or FailureLog()

        self._in_batch = False  # output is written at the end of the batch
        self._joining = False  # the next call outside of a batch leaves its output to the writer
        self._due = False  # output is written in the writer's next turn
        self._perf_counter = PLATFORM.get().perf_counter
        self._written_at = 0.0
        self._reading = trio.CancelScope()
        self._writing = trio.CancelScope()
        self._has_writer = False
        self._said_goodbye = False
        self._work = Waiter()

        self._acking: dict[int, QmuxStream] = {}
        self._last_finished: int | None = None
        self._draining: set[int] = set()
        self._gone = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name=f"levada reader of {info.scheme}://{info.peer}")
        self._write()

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now. Bytes include the framing; writes and reads are the transport's."""
        below = self._below.statistics()
        return CarrierStatistics(
            bytes_sent=below.bytes_sent,
            bytes_received=below.bytes_received,
            writes=below.writes,
            reads=below.reads,
            unsent=self.core.queued + below.unsent,
            datagrams_dropped=self._datagrams_dropped,
        )

    def credit(self) -> tuple[int, int]:
        """Return the bytes that this side, and the peer, may send now; (0, 0) after the end. `Connection.credit` says more."""
        return self.core.credit if self._reason is None else (0, 0)

    def round_trip(self) -> float:
        """Return the seconds that the last ping and its answer took; 0 before the first."""
        return self.core.round_trip

    async def handshake(self) -> CarrierInfo:
        """Wait for the peer's parameters, and return the facts about both ends.

        Raises:
            ConnectionLost: the parameters did not come within `QmuxConfig.handshake_timeout` or were wrong, or the transport was lost.
            ConnectionClosed: this side closed the connection first.
        """
        await self._shaken.wait()
        if self.core.peer_parameters is None:
            raise self.error()
        return self._info

    def _open_stream(self, *, unidirectional: bool, priority: int) -> QmuxStream | None:
        stream_id = self.core.open_stream(unidirectional=unidirectional, priority=priority)
        if stream_id is None:
            self._changed()  # the peer is told that this side is blocked
            return None
        first = not self.streams
        stream = self.streams[stream_id] = QmuxStream(self, stream_id, priority)
        if first:
            self._set_timer()  # a silent peer is pinged while there are streams
        return stream

    def _credit_wanted(self, *, unidirectional: bool) -> None:
        pass  # the core has told the peer, which stopped it

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows to be opened now; 0 after the end."""
        return self.core.stream_credit(unidirectional=unidirectional)

    def together(self, send: Callable[[], None]) -> None:
        """Call `send`, and write what it sends together."""
        if self._in_batch:
            send()
            return
        self._in_batch = True
        try:
            send()
        finally:
            self._in_batch = False
            if self._reason is None and self.core.has_output:
                self._written_at = self._perf_counter()
                self._write()

    def _accepted(self, stream: QmuxStream) -> None:
        if self._reason is None:
            self.core.accepted(stream.stream_id)
            self._changed()  # if the stream is over already, its credit is due

    def max_datagram_size(self) -> int:
        """Return the size in bytes of the largest datagram; 0 if the peer takes none or its parameters have not come yet."""
        return self.core.max_datagram_size

    def _queue_datagram(self, data: Octets) -> bool:
        if not self.core.send_datagram(data):
            return False
        self._changed()
        return True

    def close(self, code: int = 0, reason: str = "") -> None:
        """End the connection and tell the peer at once; queued data is dropped. Does nothing if the connection has already ended."""
        if self._reason is None:
            self._apply(self.core.close(code, reason, trio.current_time()))
            self._hurry()

    def abort(self) -> None:
        """Close the transport at once, without a frame, and drop the queues: the peer sees a loss. After the end this does nothing."""
        if self._reason is None:
            self._below.abort()
            said = "the connection was cut off here"
            self._end(CloseReason(1, said), lambda: ConnectionClosed(said))
            self._reading.cancel()

    async def _drain(self) -> None:
        finished = [stream for stream in self.streams.values() if stream.undelivered]
        self._draining = {stream.stream_id for stream in finished}
        for stream in finished:
            stream.ask_for_ack()
        last = self._last_finished
        if last is not None and last not in self.streams:  # a ping now follows everything of the streams that are over
            self._draining.add(last)
            self.core.want_acked(last)
        self._changed()
        while self._draining and self._reason is None:
            self._drained = trio.Event()
            await self._drained.wait()

    def _is_drained(self, stream_id: int) -> None:
        """Record that the peer has all data of a stream, or never will."""
        self._draining.discard(stream_id)
        if not self._draining and self._drained is not None:
            self._drained.set()

    async def _all_closed(self) -> None:
        """Wait until the transport is closed, for `QmuxConfig.close_timeout` seconds at most."""
        await self._gone.wait()

    # ------------------------------------------------------------------ what streams ask for

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Change the priority of a stream's data."""
        if self._reason is None:
            self.core.set_priority(stream_id, priority)

    def unsent(self, stream_id: int) -> int:
        """Return the number of bytes of a stream that are queued and not yet written."""
        return self.core.unsent(stream_id)

    def is_full(self, stream_id: int) -> bool:
        """Whether a sender has to wait."""
        unsent = self.core.unsent(stream_id)
        return unsent > self._config.high_watermark or (unsent > 0 and self.core.crowded)

    def has_room(self, stream_id: int) -> bool:
        """Whether a sender that waited may continue."""
        unsent = self.core.unsent(stream_id)
        return not unsent or (unsent <= self._config.low_watermark and not self.core.crowded)

    def send(self, stream_id: int, data: Octets, fin: bool) -> None:
        """Queue bytes of a stream, and have them sent."""
        self.core.send(stream_id, data, fin)
        if fin:
            self._last_finished = stream_id
            stream = self.streams[stream_id]
            if stream.awaited:
                stream.ask_for_ack()
        if not self._in_batch and not self._due:
            self._write_soon()

    def reset(self, stream_id: int, code: int) -> None:
        """Drop a stream's queued data, and tell the peer."""
        self.core.reset(stream_id, code)
        self._acking.pop(stream_id, None)
        self._is_drained(stream_id)
        self._changed()

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to send no more on a stream."""
        self.core.stop(stream_id, code)
        self._changed()

    def consumed(self, stream_id: int, size: int) -> None:
        """Record that the application has taken bytes of a stream."""
        if self._reason is None:
            core = self.core
            core.consumed(stream_id, size)
            if not self._in_batch and not self._due and core.has_output:  # as `_changed`, with one call less
                self._write_soon()

    def want_acked(self, stream: QmuxStream) -> None:
        """Call `QmuxStream.acked_as_asked` when the peer has everything that is queued now."""
        self._acking[stream.stream_id] = stream
        self.core.want_acked(stream.stream_id)
        self._changed()

    # ------------------------------------------------------------------ events

    def _apply(self, happened: list[events.Event]) -> None:
        """Act on the core's events."""
        do = self._events
        for event in happened:
            do[type(event)](self, event)

    def _apply_batch(self, happened: list[events.Event]) -> None:
        """Act on the events of one batch of input, and let the application read it."""
        self._apply(happened)
        if self._tell_batch is not None:
            self._tell_batch()

    def _established(self, event: events.Established) -> None:
        self._shaken.set()
        for unidirectional in (False, True):
            self._allowed(events.StreamsAllowed(unidirectional))

    def _allowed(self, event: events.StreamsAllowed) -> None:
        credit = self.core.stream_credit(unidirectional=event.unidirectional)
        self._credit_came(credit, unidirectional=event.unidirectional)

    def _opened(self, event: events.StreamOpened) -> None:
        self._appeared(QmuxStream(self, event.stream_id))

    def _data_arrived(self, event: events.StreamData) -> None:
        self.streams[event.stream_id].data_arrived(event.data, event.fin)

    def _reset_arrived(self, event: events.StreamReset) -> None:
        self.streams[event.stream_id].reset_arrived(event.code)

    def _stop_arrived(self, event: events.StreamStopped) -> None:
        self._acking.pop(event.stream_id, None)
        self._is_drained(event.stream_id)
        self.streams[event.stream_id].stop_arrived(event.code)

    def _room(self, event: events.StreamRoom) -> None:
        self.streams[event.stream_id].wake_room()

    def _queue_room(self, event: events.QueueRoom) -> None:
        for stream in self.blocked:
            stream.wake_room()

    def _flushed(self, event: events.StreamFlushed) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.wake_flushing()

    def _acked(self, event: events.StreamAcked) -> None:
        stream = self._acking.pop(event.stream_id, None)
        if stream is not None:
            stream.acked_as_asked()
        self._is_drained(event.stream_id)

    def _over(self, event: events.StreamOver) -> None:
        del self.streams[event.stream_id]

    def _datagram_arrived(self, event: events.DatagramReceived) -> None:
        self._datagram_came(Datagram(event.data))

    def _datagram_room(self, event: events.DatagramRoom) -> None:
        self._datagram_writers.unpark_all()

    def _ended_by_core(self, event: events.Ended) -> None:
        peer, code, text = self._info.peer, event.code, event.reason
        if event.idle:
            said = f"nothing from {peer} within the idle timeout, here {self._config.idle_timeout} s"
            self._end(CloseReason(code, said, lost=True), lambda: IdleTimeout(said))
        elif event.lost:
            said = f"{peer} aborted the connection" if event.by_peer else f"connection to {peer} failed"
            said += f": {text}"
            self._end(CloseReason(code, text, event.by_peer, lost=True), lambda: ConnectionLost(said))
        elif event.by_peer:
            said = f"{peer} closed the connection with code {code}" + (f": {text}" if text else "")
            self._end(CloseReason(code, text, by_peer=True), lambda: ConnectionLost(said, code))
        else:
            said = f"the connection was closed here with code {code}"
            self._end(CloseReason(code, text), lambda: ConnectionClosed(said))

    _events: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        events.Established: _established,
        events.StreamOpened: _opened,
        events.StreamData: _data_arrived,
        events.StreamReset: _reset_arrived,
        events.StreamStopped: _stop_arrived,
        events.StreamRoom: _room,
        events.QueueRoom: _queue_room,
        events.StreamFlushed: _flushed,
        events.StreamAcked: _acked,
        events.StreamOver: _over,
        events.StreamsAllowed: _allowed,
        events.DatagramReceived: _datagram_arrived,
        events.DatagramRoom: _datagram_room,
        events.Ended: _ended_by_core,
    }

    def _end(self, reason: CloseReason, make_error: Callable[[], CarrierError]) -> None:
        super()._end(reason, make_error)
        if self._tell_ended is not None:
            self._tell_ended(self, reason)

    # ------------------------------------------------------------------ moving bytes

    def _changed(self) -> None:
        """Write the output of a call: now, or together with calls that follow at once."""
        if not self._in_batch and not self._due and self.core.has_output:
            self._write_soon()

    def _write_soon(self) -> None:
        now = self._perf_counter()
        if self._joining or now - self._written_at < _JOIN_WITHIN:
            self._write_later()
        else:
            self._written_at = now
            self._write()

    def _write_later(self) -> None:
        self._due = True
        if self._has_writer:
            self._work.wake()
        else:
            self._has_writer = True
            info = self._info
            trio.lowlevel.spawn_system_task(self._run_writer, name=f"levada writer of {info.scheme}://{info.peer}")

    def _write(self) -> None:
        """Give output to the carrier below as long as it holds little, and act on the events that this causes."""
        core, below = self.core, self._below
        if below.unsent >= _SHALLOW:
            self._write_later()
            return
        pieces = core.data_to_send(trio.current_time(), _SHALLOW)
        if pieces:
            try:
                below.send(pieces)
            except CarrierError as error:
                self._lose(error.detail)
                return
        happened = core.take_events()
        if happened:
            self._apply(happened)
        if pieces and core.has_output:
            self._write_later()

    def _set_timer(self) -> None:
        """Wake the reader when the core is due. If the deadline has become later, the reader finds out when it wakes up."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline < self._reading.deadline:
            self._reading.deadline = deadline

    async def _run_writer(self) -> None:
        """Write the output of calls that came while the carrier below was full, or soon after another write."""
        try:
            with self._writing:
                while True:
                    if self._due:  # the carrier below may take everything at once
                        await trio.lowlevel.checkpoint()
                    else:  # the wake-up comes in the next pass of trio's loop, so all tasks of this pass can join
                        await self._work.wait()
                    try:
                        await self._below.flush()
                    except CarrierError as error:
                        self._lose(error.detail)
                        return
                    self._due = self._joining = False
                    self._written_at = self._perf_counter()
                    self._write()
        except Exception as error:  # noqa: BLE001 - a core that fails ends only its own connection
            self._fail(error)

    def _lose(self, why: str) -> None:
        """Record that the carrier below has failed."""
        if self._reason is None:
            self._apply(self.core.connection_lost(0, why, trio.current_time()))
        self._reading.cancel()

    def _fail(self, error: Exception) -> None:
        """Record that this side has failed. Its state is damaged, so the peer is told nothing."""
        self._failures.log(logger, error, "the core of %r failed, which ends the connection", self)
        if self._reason is None:
            said = f"internal error: {error!r}"
            self._end(CloseReason(1, said, lost=True), lambda: ConnectionLost(said))
        self._reading.cancel()

    def _hurry(self) -> None:
        """Send the last output, however much the carrier below holds, and have the reader close it."""
        self._writing.cancel()
        pieces = self.core.data_to_send(trio.current_time())
        if pieces:
            self._said_goodbye = True
            try:
                self._below.send(pieces)
            except CarrierError:
                pass  # it has failed already
        self._reading.cancel()

    async def _run(self) -> None:
        """Read until the end, then close the carrier below."""
        try:
            while self._reason is None:
                deadline = self.core.next_deadline()
                with trio.CancelScope(deadline=math.inf if deadline is None else deadline) as self._reading:
                    await self._read()
                if self._reason is None:
                    self._take_in(self.core.handle_timeout(trio.current_time()))
            self._hurry()
            with trio.move_on_after(self._config.close_timeout):
                try:
                    await self._below.close(wait=self._said_goodbye)
                except CarrierError:
                    pass  # it has failed already
        except Exception as error:  # noqa: BLE001 - as in _run_writer
            self._fail(error)
        finally:
            self._writing.cancel()
            self._below.abort()
            self._gone.set()
            self._acking.clear()
            self._release_streams()

    async def _read(self) -> None:
        """Give received bytes to the core until it has ended."""
        core, below = self.core, self._below
        while self._reason is None:
            try:
                happened = await below.receive(core)
            except CarrierError as error:
                self._lose(error.detail)
                return
            self._take_in(happened)
            del happened  # it refers to data and streams, which may be large

    def _take_in(self, happened: list[events.Event]) -> None:
        """Act on a batch of events, and write the output that they cause together."""
        self.together(partial(self._apply_batch, happened))
        if self._reason is None:
            self._joining = len(happened) > _ALONE
            self._set_timer()
