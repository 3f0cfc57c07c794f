"""One QMux connection without I/O: bytes in, events out; calls in, bytes out.

The owner works in turns:

1. Pass in the input: `receive_data` (byte streams) or `receive_message` (WebSocket), `handle_timeout`. Use `open_stream`, `send` and so on.
2. Act on the events. Each input returns them; `take_events` returns those of other calls, such as `data_to_send`.
3. While the carrier below takes bytes, write what `data_to_send(now)` returns. Sleep until `next_deadline`.

The core has the queues, flow control and priorities of sending. It hands received bytes on at once, as events: the owner buffers them, bounded
by the windows, and calls `consumed` when the application has taken them.

After `Ended` the owner writes the last output, ends its sending direction, reads and drops input until the peer's end, for
`QmuxConfig.close_timeout` at most, and closes. Source: QX-36, QX-37.
"""

from __future__ import annotations

import math
from collections import deque

from levada.framework.errors import LocalProtocolError

from .codes import MAX_CODE, ClosedByPeer, ConnectionFault, TransportError, error_name
from .config import QmuxConfig
from .events import DatagramReceived, DatagramRoom, Ended, Established, Event, StreamFlushed
from .frames import (
    DEFAULT_MAX_RECORD,
    PARAMETERS_PREFIX,
    Frame,
    FrameType,
    Parameters,
    encode_close,
    encode_frame,
    read_int,
)
from .liveness import Liveness
from .receiving import ReceivingParts
from .sending import Records, SendingParts
from .state import ConnectionState, SendingState
from .streams import Due, QmuxStreams

__all__ = ["QmuxCore"]

LARGEST_RECORD = 65_536
"""Largest record sent, in bytes, so that an urgent frame never waits long. Source: QX-6 (D-4)."""
DEFAULT_PRIORITY = 128
"""The priority of streams that the peer opens."""
LOST = 1
"""The code of an end for which no frame gave one."""
_SENDING = SendingState.OPEN
_GREETING, _OPEN, _DRAINING, _ENDED = (
    ConnectionState.GREETING,
    ConnectionState.OPEN,
    ConnectionState.DRAINING,
    ConnectionState.ENDED,
)


class QmuxCore:
    """One side of a connection; a `levada.transports.core.Core` with `BytesInput` and `MessagesInput`.

    Args:
        client: whether this side dialled.
        now: the current time, from which `QmuxConfig.handshake_timeout` counts.
        config: windows, limits and timeouts.
        framed: whether the carrier keeps boundaries: a message is a record without its Size. Source: QX-41.
    """

    def __init__(self, *, client: bool, now: float, config: QmuxConfig | None = None, framed: bool = False) -> None:
        self.client = client
        self.config = config or QmuxConfig()
        self.peer_parameters: Parameters | None = None
        """The peer's parameters, once they have come."""
        self._state = _GREETING
        self._now = now  # of the last input
        self._events: list[Event] = []
        self._due: Due = {}
        self._streams = QmuxStreams(client=client, config=self.config, events=self._events, due=self._due)
        self._sender = SendingParts(self._streams)
        self._receiver = ReceivingParts(self._streams, self._sender, self._other)
        self._liveness = Liveness(self._streams, now)
        self._records = Records(framed=framed)
        # Frames in a record of their own: the very first one and the last one.
        self._alone = [encode_frame(FrameType.PARAMETERS, data=self._parameters().encode())]
        self._datagrams: deque[bytes] = deque()
        self._partial = bytearray()
        self._begun = now  # when the partial record began
        self._start = 0  # bytes of its Size; 0 while that is not complete
        self._stop = 0  # bytes of the whole record, its Size included
        self._greet_until = now + self.config.handshake_timeout
        self._drain_until: float | None = None
        self._drain_ping: int | None = None  # the ping whose answer ends the drain

    @property
    def ended(self) -> bool:
        """Whether `Ended` was emitted."""
        return self._state is _ENDED

    @property
    def round_trip(self) -> float:
        """Seconds that the last ping and its answer took; 0 before the first."""
        return self._liveness.round_trip

    @property
    def credit(self) -> tuple[int, int]:
        """Bytes that this side may send now, and those that the peer may send, on all streams together. Source: QX-27."""
        return self._sender.credit, self._receiver.credit

    @property
    def max_datagram_size(self) -> int:
        """Size in bytes of the largest datagram that the peer takes; 0 before `Established`, or if the peer takes none. Source: QX-19.

        It stays the same after the end, so a connection lost right after its handshake does not look like a connection without datagrams.
        """
        peer = self.peer_parameters
        if peer is None:
            return 0
        return max(min(peer.max_datagram_frame_size, self._records.largest) - 1, 0)

    @property
    def crowded(self) -> bool:
        """Whether more than `QmuxConfig.max_queued` bytes are queued on all streams; `QueueRoom` follows when that is over."""
        return self._sender.queued > self.config.max_queued

    @property
    def queued(self) -> int:
        """Bytes queued on all streams and in datagrams."""
        return self._sender.queued + sum(map(len, self._datagrams))

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` may have something to return now. Owners ask before each write, so this is fast."""
        sender = self._sender
        if self._due or self._datagrams or self._alone or (sender.queued and sender.ready):
            return True
        if self._streams.unconfirmed or self._liveness.ping_due:
            return self._liveness.may_ping
        return self._state is _DRAINING and self._drain_ping is None and not self._streams.table

    def take_events(self) -> list[Event]:
        """Return the events that calls of the owner caused. Each is returned once."""
        events = self._events[:]
        self._events.clear()
        return events

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes, cut anywhere, and return the events; `b""` means that the peer sends no more."""
        if self._state is not _ENDED:
            self._now = now
            try:
                self._take(data)
            except (ConnectionFault, ClosedByPeer) as error:
                self._end_by(error)
            if self._state is _DRAINING:
                self._confirm_drain()
        return self.take_events()

    def receive_message(self, message: bytes, now: float) -> list[Event]:
        """Take one message, which is one record without its Size, and return the events. Source: QX-41."""
        if self._state is not _ENDED:
            self._now = now
            try:
                self._take_message(message)
            except (ConnectionFault, ClosedByPeer) as error:
                self._end_by(error)
            if self._state is _DRAINING:
                self._confirm_drain()
        return self.take_events()

    def data_to_send(self, now: float, budget: int = 65_536) -> list[bytes]:
        """Take records of about `budget` bytes, the most urgent first. Call it only when the carrier takes bytes. Source: QX-33.

        Returns:
            For a byte stream, one piece with all records. For messages, one piece per record. Empty if there is nothing to send.
        """
        records = self._records
        if self._state is _DRAINING:
            self._confirm_drain()
        if self._alone:
            for frame in self._alone:
                records.add(frame)
                records.close()
            self._alone.clear()
        if self._due:
            frames = list(self._due)
            self._due.clear()
            for make in frames:
                records.add(make())
        if self._datagrams:
            self._write_datagrams(budget)
        self._sender.write(records, budget)
        if (self._streams.unconfirmed or self._liveness.ping_due) and self._liveness.may_ping:
            records.add(self._liveness.ping(now))
        out = records.take()
        if out:
            self._liveness.wrote(now)
        return out

    def next_deadline(self) -> float | None:
        """Return the time when `handle_timeout` is due; `None` if never."""
        if self._state is _ENDED:
            return None
        deadline = self._liveness.deadline()
        if self._state is _OPEN and not self._partial:
            return deadline
        if self._partial:
            deadline = _earlier(deadline, self._begun + self.config.record_timeout)
        if self._state is _GREETING:
            deadline = _earlier(deadline, self._greet_until)
        if self._drain_until is not None:
            deadline = _earlier(deadline, self._drain_until)
        return deadline

    def handle_timeout(self, now: float) -> list[Event]:
        """Do the work that is due. A call too early or too often does nothing."""
        if self._state is _ENDED:
            return self.take_events()
        config = self.config
        if self._state is _GREETING and now >= self._greet_until:
            self._lose(f"no transport parameters within {config.handshake_timeout:g} s")
        elif self._partial and now >= self._begun + config.record_timeout:
            self._lose(f"a record was not complete within {config.record_timeout:g} s")
        elif self._liveness.expired(now):
            self._end(Ended(LOST, "the peer was silent for too long", False, True, idle=True))
        elif self._drain_until is not None and now >= self._drain_until:
            self._close(0, "")
        return self.take_events()

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Record that the carrier below has failed."""
        if self._state is not _ENDED:
            self._lose(reason or "the transport broke")
        return self.take_events()

    def drain(self, now: float) -> list[Event]:
        """Open no more streams. Close with code 0 once the peer has everything queued, at the latest after `QmuxConfig.drain_timeout`."""
        if self._state is _GREETING:
            return self.close(0, "", now)
        if self._state is _OPEN:
            self._state = _DRAINING
            self._streams.opening = False
            self._drain_until = now + self.config.drain_timeout
        return self.take_events()

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """Drop the queues, and tell the peer the application's code and reason. After the end this does nothing. Source: QX-36.

        Raises:
            LocalProtocolError: the code does not fit 62 bits.
        """
        self._check_code(code)
        if self._state is not _ENDED:
            self._close(code, reason)
        return self.take_events()

    def fail(self, code: TransportError, reason: str, now: float) -> list[Event]:
        """Close because the peer broke a rule that the owner checks, such as a text message on a WebSocket (E-10)."""
        if self._state is not _ENDED:
            self._fault(ConnectionFault(code, "", reason), 0)
        return self.take_events()

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows now; 0 once the connection drains or has ended."""
        return self._streams.credit(unidirectional)

    def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> int | None:
        """Open a stream; the peer sees it with its first byte, end or reset.

        Args:
            unidirectional: whether only this side sends.
            priority: 0 (first) to 255.

        Returns:
            The stream's number, or `None` without credit; then `StreamsAllowed` tells of new credit.

        Raises:
            LocalProtocolError: the priority is not between 0 and 255.
        """
        stream = self._streams.open(unidirectional, self._sender.level(priority))
        return None if stream is None else stream.id

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        """Queue bytes on a stream, and its end if `fin`. Without bytes and without the end this does nothing.

        Raises:
            LocalProtocolError: the stream is over, was finished or reset, or is one on which only the peer sends.
        """
        stream = self._streams.table.get(stream_id)
        if stream is None or stream.sending is not _SENDING:
            raise LocalProtocolError(f"stream {stream_id} takes no more data")
        # Only a buffer that may change is copied.
        self._sender.send(stream, data if type(data) is bytes else bytes(data), fin)

    def reset(self, stream_id: int, code: int) -> None:
        """Give up sending: drop the queue, send RESET_STREAM. Once the end was written, or after a reset, this does nothing.

        Raises:
            LocalProtocolError: only the peer sends on this stream, or the code does not fit 62 bits.
        """
        self._check_code(code)
        stream = self._streams.table.get(stream_id)
        if stream_id & 2 and stream_id & 1 == self.client:
            raise LocalProtocolError(f"only the peer sends on stream {stream_id}")
        if stream is not None and stream.sending in (_SENDING, SendingState.ENDING):
            self._sender.reset(stream, code)

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to stop sending. No more data of the stream becomes an event, and the credit for bytes not taken is given back.

        Once everything was taken, or after a reset, this does nothing. `StreamReset` still comes, as the peer's answer. Source: QX-25.

        Raises:
            LocalProtocolError: only this side sends on this stream, or the code does not fit 62 bits.
        """
        self._check_code(code)
        stream = self._streams.table.get(stream_id)
        if stream_id & 2 and stream_id & 1 != self.client:
            raise LocalProtocolError(f"only this side sends on stream {stream_id}")
        if stream is not None:
            self._receiver.stop(stream, code)

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Change the priority of queued and later data: 0 (first) to 255.

        Raises:
            LocalProtocolError: the priority is not between 0 and 255.
        """
        level = self._sender.level(priority)
        stream = self._streams.table.get(stream_id)
        if stream is not None:
            self._sender.set_priority(stream, level)

    def consumed(self, stream_id: int, size: int) -> None:
        """Record that the application took bytes of `StreamData`, so the windows grow. For a stream that was stopped or reset this does nothing.

        A stream is over once all its data was taken and this side's end was written.

        Raises:
            LocalProtocolError: more bytes than have come.
        """
        stream = self._streams.table.get(stream_id)
        if stream is not None:
            self._receiver.consumed(stream, size)

    def accepted(self, stream_id: int) -> None:
        """Record that the application has taken a stream of the peer.

        A stream counts against the peer's limit until it is over and accepted. So a peer cannot pile up streams at an application that
        accepts none, however short they are.
        """
        self._streams.accepted(stream_id)

    def unsent(self, stream_id: int) -> int:
        """Return the number of bytes queued on a stream and not yet written."""
        stream = self._streams.table.get(stream_id)
        return 0 if stream is None else stream.queued

    def want_flushed(self, stream_id: int) -> None:
        """Ask for `StreamFlushed` once everything that is queued on a stream now is written, including its end.

        The event comes at once if nothing is queued. It never comes if the stream is reset or stopped first.
        """
        stream = self._streams.table.get(stream_id)
        if stream is not None:
            self._sender.want_flushed(stream)
        elif self._state is not _ENDED:
            self._events.append(StreamFlushed(stream_id))

    def want_acked(self, stream_id: int) -> None:
        """Ask for `StreamAcked` once the peer has everything that is queued on a stream now, including its end. Source: D-23.

        The core writes a ping after it; the answer proves that the peer has processed everything before the ping. One ping is under way at a
        time. The stream may be over. Ask again only after the event. The event never comes if the stream is reset or stopped before everything
        was written.
        """
        stream = self._streams.table.get(stream_id)
        if stream is not None:
            self._sender.want_acked(stream)
        elif self._state is not _ENDED:
            self._streams.unconfirmed[stream_id] = None

    def send_datagram(self, data: bytes | bytearray | memoryview) -> bool:
        """Queue a datagram, and return whether there was room.

        Raises:
            LocalProtocolError: it is larger than `max_datagram_size`, or the connection has ended.
        """
        limit = 0 if self._state is _ENDED else self.max_datagram_size
        if len(data) > limit or not limit:
            raise LocalProtocolError(f"datagram of {len(data)} bytes, at most {limit} fit")
        if len(self._datagrams) >= self.config.datagram_queue:
            return False
        self._datagrams.append(bytes(data))
        return True

    def _parameters(self) -> Parameters:
        """Return this side's parameters. Source: section 3, QX-18, QX-19 (D-8, D-10, D-13)."""
        config = self.config
        return Parameters(
            max_idle_timeout_ms=math.ceil(config.idle_timeout * 1000),
            max_data=config.connection_window,
            max_stream_data_bidi_local=config.stream_window,
            max_stream_data_bidi_remote=config.stream_window,
            max_stream_data_uni=config.stream_window,
            max_streams_bidi=config.max_streams,
            max_streams_uni=config.max_streams_unidirectional,
            max_datagram_frame_size=DEFAULT_MAX_RECORD if config.datagrams else 0,
        )

    def _take_message(self, message: bytes) -> None:
        """Process a message. Source: QX-41."""
        size = len(message)
        _check_size(size)
        if self._state is _GREETING:
            _check_first(message, 0, size)
        self._receiver.record(message, 0, size)
        self._liveness.heard(self._now)

    def _take(self, data: bytes) -> None:
        """Process bytes, cut anywhere. Each byte is copied once; in a record that comes in several pieces, twice."""
        at, end, partial = 0, len(data), self._partial
        if not end:
            self._lose(f"the peer ended the transport {'inside a record' if partial else 'without closing'}")
            return
        if partial:
            if self._start:
                at = min(self._stop - len(partial), end)
                partial += data[:at]
                if self._state is _GREETING:
                    _check_first(partial, self._start, len(partial))
                if len(partial) < self._stop:
                    return
                whole = bytes(partial)
                partial.clear()
                self._receiver.record(whole, self._start, self._stop)
            else:
                data = bytes(partial) + data  # at most 7 bytes, of an incomplete Size
                end = len(data)
        record = self._receiver.record
        while at < end:
            size = data[at]
            start = at + 1
            if size >= 0x40:
                start = at + (1 << (size >> 6))
                if start > end:
                    self._hold(data, at, 0, 0)
                    break
                size = (size & 0x3F) << 8 | data[at + 1] if size < 0x80 else read_int(data, at, end)[0]
            if not 0 < size <= DEFAULT_MAX_RECORD:
                _check_size(size)
            stop = start + size
            if self._state is _GREETING:
                _check_first(data, start, min(stop, end))
            if stop > end:
                self._hold(data, at, start - at, stop - at)
                break
            record(data, start, stop)
            at = stop
        else:
            partial.clear()
        if at:
            self._liveness.heard(self._now)

    def _hold(self, data: bytes, at: int, start: int, stop: int) -> None:
        """Keep an incomplete record. Source: QX-3, QX-43."""
        if at or not self._partial:
            self._begun = self._now
        self._partial = bytearray(data[at:])
        self._start = start
        self._stop = stop

    def _other(self, frame: Frame) -> None:
        """Process a frame that has no stream id and no limit."""
        match frame.kind:
            case FrameType.DATAGRAM | FrameType.DATAGRAM_LEN:
                if not self.config.datagrams:
                    raise ConnectionFault(TransportError.PROTOCOL_VIOLATION, "QX-7", "a datagram, and none is taken")
                self._events.append(DatagramReceived(frame.data))
            case FrameType.PING:
                self._liveness.requested(frame.fields[0])
            case FrameType.PING_ANSWER:
                self._liveness.answered(frame.fields[0], self._now)
            case FrameType.PARAMETERS:
                self._establish(frame)
            case FrameType.TRANSPORT_CLOSE | FrameType.APPLICATION_CLOSE as kind:
                reason = frame.data.decode("utf-8", "replace")
                raise ClosedByPeer(frame.fields[0], reason, transport=kind == FrameType.TRANSPORT_CLOSE)
            case _:  # RESET_STREAM_AT
                raise ConnectionFault(TransportError.PROTOCOL_VIOLATION, "QX-26", "RESET_STREAM_AT was not declared")

    def _establish(self, frame: Frame) -> None:
        """Process QX_TRANSPORT_PARAMETERS. Source: QX-9."""
        if self._state is not _GREETING:
            raise ConnectionFault(TransportError.PROTOCOL_VIOLATION, "QX-9", "transport parameters twice")
        parameters = self.peer_parameters = Parameters.decode(frame.data)
        self._state = _OPEN
        self._streams.establish(parameters, self._sender.level(DEFAULT_PRIORITY))
        self._sender.establish(parameters)
        self._liveness.establish(parameters)
        self._records.largest = min(parameters.max_record_size, LARGEST_RECORD)
        self._events.append(Established(parameters))

    def _write_datagrams(self, budget: int) -> None:
        """Write datagrams, each in a record of its own, where a datagram needs no length. Source: QX-19, QX-33."""
        records, datagrams = self._records, self._datagrams
        if len(datagrams) >= self.config.datagram_queue:
            self._events.append(DatagramRoom())
        records.close()
        while datagrams and records.written < budget:
            records.add(b"\x30" + datagrams.popleft())
            records.close()

    def _confirm_drain(self) -> None:
        """Ping the peer once no stream is open; close once it has answered."""
        liveness = self._liveness
        if self._drain_ping is None:
            if not self._streams.table and not self._datagrams:
                self._drain_ping = liveness.last_ping + 1
                liveness.ping_due = True
        elif liveness.last_answer >= self._drain_ping:
            self._close(0, "")

    def _check_code(self, code: int) -> None:
        if not 0 <= code <= MAX_CODE:
            raise LocalProtocolError(f"code {code} is not a number of 62 bits", rule="QX-1")

    def _end_by(self, error: ConnectionFault | ClosedByPeer) -> None:
        """End because of the peer."""
        if isinstance(error, ConnectionFault):
            self._fault(error, self._receiver.last_type)
        else:
            text = f"{error_name(error.code)}: {error.reason}" if error.transport else error.reason
            self._end(Ended(error.code, text, True, error.transport))

    def _close(self, code: int, reason: str) -> None:
        """End as the application has asked, and tell the peer. Source: QX-36."""
        self._end(Ended(code, reason, False, False), encode_close(code, reason, cause=None))

    def _fault(self, fault: ConnectionFault, kind: int) -> None:
        """End because the peer broke a rule, and tell it so. Source: section 9."""
        text = f"{fault.detail} [{fault.rule}]" if fault.rule else fault.detail
        self._end(
            Ended(fault.code, f"{error_name(fault.code)}: {text}", False, True),
            encode_close(fault.code, text, cause=kind),
        )

    def _lose(self, why: str) -> None:
        """End without telling the peer. Source: QX-34, QX-37."""
        self._end(Ended(LOST, why, False, True))

    def _end(self, event: Ended, farewell: bytes = b"") -> None:
        """Drop everything that is queued, except the parameters before a farewell, since they must be first. Source: QX-9, QX-36."""
        self._state = _ENDED
        self._streams.end()
        self._sender.end()
        self._due.clear()
        self._datagrams.clear()
        self._partial.clear()
        if farewell:
            self._alone.append(farewell)
        else:
            self._alone.clear()
        self._events.append(event)


def _check_size(size: int) -> None:
    """Check the Size of a record. Source: QX-2 (D-2), QX-3."""
    if not size:
        raise ConnectionFault(TransportError.PROTOCOL_VIOLATION, "QX-2", "an empty record")
    if size > DEFAULT_MAX_RECORD:
        raise ConnectionFault(
            TransportError.FRAME_ENCODING_ERROR, "QX-3", f"a record of {size} bytes, at most {DEFAULT_MAX_RECORD}"
        )


def _check_first(data: bytes | bytearray, at: int, stop: int) -> None:
    """Check that a first record begins with parameters, as far as it has come. Source: QX-9 (D-5)."""
    if not PARAMETERS_PREFIX.startswith(bytes(data[at : min(at + len(PARAMETERS_PREFIX), stop)])):
        raise ConnectionFault(
            TransportError.PROTOCOL_VIOLATION, "QX-9", "the first frame is not QX_TRANSPORT_PARAMETERS"
        )


def _earlier(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)
