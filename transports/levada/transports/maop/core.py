"""One MAOP connection without I/O: bytes in, events out; calls in, bytes out.

The owner works in turns:

1. Pass in all input at hand: `receive_stream_data`, `stream_reset`, `stream_stopped`, `handle_timeout`. Do so before step 3: a Block that
   arrives before its Proceed was written is a mistake of the peer (MA-50).
2. Act on the events. Each `receive_…` returns them; calls of the application leave theirs for `take_events`.
3. Once a turn, call `data_to_send(now)`, carry out the outputs, call `take_events`, and sleep until `next_deadline`.

Outputs of one stream are carried out in order, each waiting for room on that stream; other streams do not wait for it. Each side begins
operations (`send_message`, `send_request`) and executes the peer's (`Execute`). In every call `stream_id` is as in QUIC, and `now` is the
present moment.

A mistake of the peer ends the operation or the connection, with outputs and an event. A mistake of the caller is a `LocalProtocolError`,
and changes nothing. A call for an operation that has just ended does nothing if the caller cannot know of the end yet. Ended streams are
remembered as ranges of numbers, so late signals cost no memory (MA-115).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.core import OpenStream, ResetStream, StopStream, StreamData
from levada.transports.numbers import Numbers

from .codes import ErrorCode, check_code, close_code
from .config import DEFAULT_TERMS, TEST_SPEC, HandlerSpec, MaopConfig, ResponseTerms
from .control import ControlIn, ControlPool, Signals
from .events import Begun, CloseConnection, ConnectionEnded, Event, Octets, Output, ResponseRejected
from .frames import CONTROL_OPS, MESSAGE, REQUEST, UNDEFINED, trace_field
from .gate import OperationGate
from .initiator import Outgoing
from .receiver import Incoming
from .shared import DedupStore, Quota, ReplayWindow
from .side import STOPPED, EndedOperation, Side, nothing
from .state import ConnectionInput, ConnectionState
from .timers import MaopTimers

__all__ = ["MaopCore"]

_OPEN, _DRAINING, _CLOSED = ConnectionState.OPEN, ConnectionState.DRAINING, ConnectionState.CLOSED
_OVER = 0
"""Replaces what has ended on a stream whose peer direction is open, before STOP_SENDING was sent."""
_MAX_HOLES: Final = 65_536
"""Ranges in the record of streams. Each is a stream that the peer opened and never used; QUIC bounds these as well."""


class MaopCore(Side):
    """One side of a connection.

    Args:
        client: whether this side dialled.
        config: limits, delays and policies.
        handlers: the operations that the peer may request, by msg_id; 0 and 1 are native.
        random_bytes: returns that many unpredictable bytes, for session ids and audit ids.
        wall_offset: UNIX time at moment 0 of the clock that `now` is read from. Source: MA-73.
        now: the present moment, in seconds of any monotonic clock.
        quota, dedup, replay: state shared by connections of one identity; by default each connection has its own.

    Raises:
        ValueError: a handler has a native msg_id, or one above 65535.
    """

    streams: dict[int, Incoming | Outgoing | ControlIn | int]

    def __init__(
        self,
        *,
        client: bool,
        random_bytes: Callable[[int], bytes],
        config: MaopConfig | None = None,
        handlers: Mapping[int, HandlerSpec] | None = None,
        wall_offset: float = 0.0,
        now: float = 0.0,
        quota: Quota | None = None,
        dedup: DedupStore | None = None,
        replay: ReplayWindow | None = None,
    ) -> None:
        specs: Mapping[int, HandlerSpec] = handlers or {}
        if any(not 1 < msg_id < 65_536 for msg_id in specs):
            raise ValueError("handlers have msg_ids from 2 to 65535; 0 and 1 are native [MA-41]")
        config = config or MaopConfig()
        super().__init__(
            client=client,
            config=config,
            random_bytes=random_bytes,
            specs={**({1: TEST_SPEC} if config.native_test else {}), **specs},
            wall_offset=wall_offset,
            now=now,
            quota=quota or Quota(config.gate.max_inflight_ops, config.gate.max_buffer_bytes),
            dedup=DedupStore() if dedup is None else dedup,  # an empty one is false
            replay=replay or ReplayWindow(),
        )
        self.gate = OperationGate(self, now)
        self.pool = ControlPool(self)
        self.signals = Signals(self, now)
        self._seen = {kind: Numbers() for kind in range(4)}
        self._expected = {0: 4, 1: 1, 2: 2, 3: 3}
        self._parity = 0 if client else 1

    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> list[Event]:
        """Take bytes of a stream, cut anywhere; return the events. The core keeps views of large pieces."""
        self.now = now
        if self.state is _OPEN or self.state is _DRAINING:
            if type(data) is not bytes:
                data = bytes(data)
            entry = self.streams.get(stream_id)
            if entry is None:
                self._begin(stream_id, data, fin, now)
            elif isinstance(entry, int):
                self._drop(stream_id, entry, data, fin)
            else:
                if type(entry) is Incoming:
                    self.statistic.block_bytes += len(data)
                entry.receive(data, fin, now)
                if fin and type(self.streams.get(stream_id)) is int:
                    del self.streams[stream_id]
        else:
            self.receive_early(stream_id, bytes(data), fin, now)
        if not self.events:
            return []
        events = self.events[:]  # as `take_events`, by a call less
        self.events.clear()
        return events

    def stream_reset(self, stream_id: int, code: int, now: float) -> list[Event]:
        """Record that the peer has reset its direction of a stream. The code has no meaning (MA-7)."""
        self.now = now
        if self.state is _OPEN or self.state is _DRAINING:
            entry = self.streams.get(stream_id)
            if entry is None:
                if stream_id and stream_id & 1 != self._parity:
                    self._first_sight(stream_id)
            elif isinstance(entry, int):
                del self.streams[stream_id]
            elif isinstance(entry, ControlIn):
                entry.gone(now)
            else:
                entry.reset(now)
        else:
            self.reset_early(stream_id, code)
        return self.take_events()

    def stream_stopped(self, stream_id: int, code: int, now: float) -> list[Event]:
        """Record that the peer stopped a stream, so that QUIC has reset this side's direction. The code has no meaning (MA-7)."""
        self.now = now
        if self.state is _OPEN or self.state is _DRAINING:
            if stream_id in self.pool.streams:
                self.pool.stopped(stream_id)
            else:
                entry = self.streams.get(stream_id)
                if isinstance(entry, Outgoing) or (isinstance(entry, Incoming) and entry.is_request):
                    entry.stopped(now)
        return self.take_events()

    def receive_datagram(self, data: bytes, now: float) -> list[Event]:
        """End the connection: MAOP's QUIC profile has no datagrams, so the peer broke a rule. Source: MA-2."""
        self.now = now
        self.fail_connection(ErrorCode.PROTOCOL_VIOLATION, "datagrams are not used", "MA-2")
        return self.take_events()

    def stream_credit(self, *, bidirectional: int, unidirectional: int) -> None:
        """Set the total number of streams of each kind that the peer allows, as in QUIC; stream 0 counts. Source: MA-130."""
        self._credit = {False: bidirectional, True: unidirectional}

    def set_control_writable(self, stream_id: int, writable: bool) -> None:
        """Set whether a control stream of ours takes bytes; while it does not, its signals wait here. Source: MA-85."""
        stream = self.pool.streams.get(stream_id)
        if stream is not None:
            stream.writable = writable

    def _begin(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        """Classify a stream. Source: MA-9, MA-10, MA-14."""
        if stream_id & 1 == self._parity or not stream_id:
            if stream_id == 0:
                self.auth_data(data, fin)
            return  # the end of a stream of ours that has been forgotten
        if not data:
            if fin:
                self._first_sight(stream_id)
            return
        kind = stream_id & 3
        if stream_id == self._expected[kind]:
            self._expected[kind] = stream_id + 4
        elif not self._first_sight(stream_id):
            return
        op = data[0]
        if op <= 1:
            self.statistic.received += 1
            if bool(op) == bool(stream_id & 2):
                what = "Message on a bidirectional stream" if op == 0 else "Request on a unidirectional stream"
                self._reject(stream_id, ErrorCode.PROTOCOL_VIOLATION, what, fin)
            elif len(self.streams) >= self.config.gate.max_open_streams:
                self._reject(stream_id, ErrorCode.CAPACITY_LIMIT, "too many streams", fin)
            else:
                operation = Incoming(self, stream_id, now)
                self.streams[stream_id] = operation
                self.operations += 1
                operation.receive(data, fin, now)
                if fin and type(self.streams.get(stream_id)) is int:
                    del self.streams[stream_id]
        elif op in CONTROL_OPS:
            self._control_streams += 1
            if self._control_streams > self.config.control.max_control_streams:
                self.fail_connection(ErrorCode.PROTOCOL_VIOLATION, "too many control streams", "MA-87")
                return
            control = ControlIn(self, stream_id, own=False)
            self.keep_control(control)
            control.receive(data, fin, now)
        else:
            self._reject(stream_id, ErrorCode.ILLEGAL_STREAM, f"first operation 0x{op:02x}", fin)

    def _first_sight(self, stream_id: int) -> bool:
        """Whether a stream of the peer is new; QUIC never repeats a number (MA-42)."""
        kind = stream_id & 3
        if stream_id == self._expected[kind]:
            self._expected[kind] = stream_id + 4
            return True
        number = stream_id >> 2
        seen = self._seen[kind]
        # Numbers below `_expected` came in order; all others are in `seen`.
        if stream_id < self._expected[kind] or number in seen:
            return False
        seen.add(number)
        while self._expected[kind] >> 2 in seen:
            seen.discard(self._expected[kind] >> 2)
            self._expected[kind] += 4
        if len(seen) > _MAX_HOLES:
            self.fail_connection(ErrorCode.CAPACITY_LIMIT, "too many streams were left out", "MA-3")
            return False
        return True

    def _known(self, stream_id: int) -> bool:
        """Whether a signal names a present or past stream on which the peer may answer. Source: MA-49, MA-115."""
        if not 0 < stream_id < 2**62:
            return False
        if stream_id & 1 == self._parity:
            return stream_id < self._next_id[bool(stream_id & 2)]
        kind = stream_id & 3
        return not stream_id & 2 and (stream_id < self._expected[kind] or stream_id >> 2 in self._seen[kind])

    def _reject(self, stream_id: int, code: int, reason: str, fin: bool) -> None:
        self.fail_stream(stream_id, code, reason)
        if not fin:
            self.out.append(StopStream(stream_id, close_code(code)))
            self.streams[stream_id] = STOPPED
        if not stream_id & 2:
            self.out.append(ResetStream(stream_id, close_code(code)))

    def _drop(self, stream_id: int, entry: int, data: bytes, fin: bool) -> None:
        """Drop bytes after the end of an operation. Source: MA-11, section 21 (ENDED)."""
        if fin:
            del self.streams[stream_id]
        elif data and entry == _OVER:
            self.out.append(StopStream(stream_id, close_code(ErrorCode.CANCELLED)))
            self.streams[stream_id] = STOPPED

    def retire(self, operation: EndedOperation) -> None:
        """Replace an ended operation; its stream is remembered until the peer's direction has ended too."""
        stream_id = operation.stream_id
        operation.deadline = None
        if operation.filed is not None:
            self.timers.set(operation, None)
        self.operations -= 1
        if operation.fin:
            del self.streams[stream_id]
        else:
            self.streams[stream_id] = STOPPED if self._stopping == stream_id else _OVER
        self._stopping = -1

    def on_proceed(self, stream_id: int, now: float) -> None:
        """Process a Proceed. Source: MA-48."""
        operation = self.streams.get(stream_id)
        if type(operation) is Outgoing:
            operation.on_proceed(now)
        else:
            self._late(stream_id, now)

    def on_refuse(self, stream_id: int, retry_ms: int, code: int, now: float) -> None:
        """Process a Refuse. Source: MA-49."""
        operation = self.streams.get(stream_id)
        if type(operation) is Outgoing:
            operation.on_refuse(retry_ms, code, now)
        else:
            self._late(stream_id, now)

    def _late(self, stream_id: int, now: float) -> None:
        """Count a decision about what is no operation of ours, or no longer. Source: MA-80."""
        if stream_id & 1 == self._parity and self._known(stream_id):
            self.signals.late += 1
        else:
            self.signals.unknown(now)

    def on_done(self, stream_id: int, start_ms: int, time_ms: int, now: float) -> None:
        """Process a Done for a Message or a Response of ours."""
        if self.unacked.pop(stream_id, None) is not None:
            return
        operation = self._subject(stream_id, now)
        if isinstance(operation, Outgoing):
            operation.on_done(start_ms, time_ms, now)
        elif operation is not None:
            self.signals.late += 1

    def on_fail(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """Process a Fail for an operation of ours, or from a requester that cannot use the Response."""
        if self.unacked.pop(stream_id, None) is not None:
            self.events.append(ResponseRejected(stream_id, code, reason))
            return
        operation = self._subject(stream_id, now)
        if isinstance(operation, Outgoing):
            operation.on_fail(code, reason, now)
        elif operation is not None:
            # MA-14a, MA-71: the requester has given up before the Response was complete.
            operation.abort(code, reason, now, signal=False)

    def _subject(self, stream_id: int, now: float) -> Outgoing | Incoming | None:
        entry = self.streams.get(stream_id)
        if type(entry) is Outgoing or (type(entry) is Incoming and entry.is_request):
            return entry
        if self._known(stream_id):
            self.signals.late += 1
        else:
            self.signals.unknown(now)
        return None

    def can_open(self, *, request: bool) -> bool:
        """Whether a Message or Request may be sent now: the connection is open, and the credit lasts, less one control stream."""
        left = self._credit[not request] - (self._next_id[not request] >> 2)
        return self.state is _OPEN and (left > 1 or (left == 1 and not self._kept_for_control(request)))

    def _kept_for_control(self, request: bool) -> bool:
        return not self.pool.streams and (self.config.control.control_stream_kind == "bidi") == request

    def send_message(
        self,
        msg_id: int,
        body: Octets | None = b"",
        *,
        length: int | None = None,
        priority: int = 128,
        key: bytes = b"",
        trace: bytes = b"",
        timeout: float | None = None,
        while_draining: bool = False,
        now: float,
    ) -> int:
        """Begin a Message, which ends with `Completed`, `Refused` or `Failed`; return its stream id.

        Args:
            msg_id: the handler.
            body: sent once the peer says Proceed; None for `BodyWanted`, then `send_body` and `end_body`.
            length: bytes of a body sent in this way; None for undefined length.
            priority: 0 (first) to 255.
            key: idempotency key of 16 bytes, if the peer supports keys (`idempotency`).
            trace: ``traceparent`` and ``tracestate``, 55 to 567 bytes; not sent to a peer that does not read it (`traces`).
            timeout: seconds to wait for Done after the body; None without limit.
            while_draining: whether running operations need this one. Source: MA-89.

        Raises:
            LocalProtocolError: not open, draining, no stream credit, or an invalid field. No bytes were sent.

        Source: section 6, MA-55 to MA-57, MA-122.
        """
        return self._start(
            msg_id, body, length, priority, key, trace, while_draining, DEFAULT_TERMS, timeout, None, now
        )

    def send_request(
        self,
        msg_id: int,
        body: Octets | None = b"",
        *,
        response: ResponseTerms = DEFAULT_TERMS,
        length: int | None = None,
        priority: int = 128,
        key: bytes = b"",
        trace: bytes = b"",
        while_draining: bool = False,
        now: float,
    ) -> int:
        """Begin a Request, which ends with `Completed`, `Refused` or `Failed`; return its stream id.

        Args:
            msg_id, body, length, priority, key, trace, while_draining: as for `send_message`.
            response: what this side wants of the Response.

        Raises:
            LocalProtocolError: as for `send_message`.

        Source: section 8. MA-89 for `while_draining`.
        """
        timeout_ms = response.timeout_ms
        if timeout_ms is None:
            timeout_ms = self.config.times.default_request_timeout_ms
        wanted = response.msg_id
        if not 0 <= timeout_ms < 2**32 or not 0 <= wanted < 65_536:
            raise LocalProtocolError(f"timeout {timeout_ms} ms or response {wanted} out of range", rule="MA-4")
        timeout = timeout_ms / 1000 + self.config.times.response_grace if timeout_ms else None
        asks = (wanted, timeout_ms)
        return self._start(msg_id, body, length, priority, key, trace, while_draining, response, timeout, asks, now)

    def _start(
        self,
        msg_id: int,
        body: Octets | None,
        length: int | None,
        priority: int,
        key: bytes,
        trace: bytes,
        while_draining: bool,
        terms: ResponseTerms,
        timeout: float | None,
        asks: tuple[int, int] | None,
        now: float,
    ) -> int:
        """Check a call and begin; `asks` is the id of the Response and the milliseconds in the header of a Request, None for a Message."""
        message = asks is None
        stream_id = self._next_id[message]
        if self.state is not _OPEN:
            if not while_draining or self.state is not _DRAINING:
                raise LocalProtocolError(f"no new operations in state {self.state.name}", rule="MA-89")
        elif self._credit[message] - (stream_id >> 2) < 2 and not self.can_open(request=not message):
            raise LocalProtocolError("the peer allows no more streams now", rule="MA-130")
        if not 0 < msg_id < 65_536 or not 0 <= priority < 256:
            raise LocalProtocolError(f"msg_id {msg_id} or priority {priority} out of range", rule="MA-43")
        if key and (len(key) != 16 or not self.idempotency):
            why = "the peer takes none" if not self.idempotency else f"the key has {len(key)} bytes, wanted 16"
            raise LocalProtocolError(f"idempotency key: {why}", rule="MA-122")
        size = len(body) if body is not None else UNDEFINED if length is None else length
        if not 0 <= size < UNDEFINED and (body is not None or length is not None):
            raise LocalProtocolError(f"length {size} out of range", rule="MA-57")
        self.now = now
        self.streams[stream_id] = operation = Outgoing(self, stream_id, size, body, terms, timeout, now)
        self._next_id[message] = stream_id + 4
        self.operations += 1
        self.statistic.opened += 1
        if self.steps:
            self.emit(Begun(stream_id, msg_id, None if size == UNDEFINED else size, priority))
        header = (
            MESSAGE.pack(0, msg_id, size, priority) if asks is None else REQUEST.pack(1, msg_id, size, priority, *asks)
        )
        if self.idempotency:
            header += bytes((len(key),)) + key
        if self.traces:
            header += trace_field(trace)
        self.out.append(OpenStream(stream_id, message, priority))
        self.out.append(StreamData(stream_id, header, not size))
        limit = self.config.times.approval_timeout if size else timeout  # MA-53, MA-69
        if limit is not None:
            self.timers.set(operation, now + limit)
        return stream_id

    def _mine(self, stream_id: int) -> Outgoing | None:
        entry = self.streams.get(stream_id)
        if type(entry) is Outgoing:
            return entry
        if isinstance(entry, Incoming | ControlIn) or not self._known(stream_id) or stream_id & 1 != self._parity:
            raise LocalProtocolError(f"stream {stream_id} is no operation of this side", rule="MA-42")
        return None

    def _theirs(self, stream_id: int) -> Incoming | None:
        entry = self.streams.get(stream_id)
        if type(entry) is Incoming:
            return entry
        if not isinstance(entry, int | None) or stream_id & 1 == self._parity:
            raise LocalProtocolError(f"stream {stream_id} is no operation of the peer", rule="MA-42")
        return None

    def cancel(self, stream_id: int, now: float) -> None:
        """Cancel an operation of ours; no event follows. An ended one is left alone. Source: MA-61."""
        self.now = now
        operation = self._mine(stream_id)
        if operation is not None:
            operation.cancel()

    def consumed(self, stream_id: int, now: float) -> None:
        """Acknowledge a Response that was requested with ``acknowledge=False``. Source: MA-71.

        Raises:
            LocalProtocolError: it is not complete.
        """
        operation = self._mine(stream_id)
        if operation is not None:
            operation.consumed(now)

    def reject(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """Report a Response as unusable, while it arrives or before it is acknowledged. Source: MA-71.

        Raises:
            LocalProtocolError: it has not begun.
        """
        operation = self._mine(stream_id)
        if operation is not None:
            operation.reject(check_code(code), reason, now)

    def send_body(self, stream_id: int, data: Octets, now: float) -> None:
        """Send bytes of a body, after `BodyWanted` or `start_response`. Large pieces are not copied, so they must not change.

        Raises:
            LocalProtocolError: not now, or more than was announced.
        """
        operation = self._either(stream_id)
        if operation is not None:
            operation.send_body(data, now)

    def end_body(self, stream_id: int, now: float) -> None:
        """End a body. Source: MA-56, MA-57, MA-62.

        Raises:
            LocalProtocolError: not now, or less than was announced.
        """
        operation = self._either(stream_id)
        if operation is not None:
            operation.end_body(now)

    def _either(self, stream_id: int) -> Outgoing | Incoming | None:
        return self._mine(stream_id) if stream_id & 1 == self._parity else self._theirs(stream_id)

    def body_consumed(self, stream_id: int, size: int, now: float) -> list[Event]:
        """Record that the application has consumed bytes of a streamed body of the peer's operation: there is room again."""
        operation = self._theirs(stream_id)
        if operation is not None:
            blocked = self.is_blocked(stream_id)
            operation.consumed(size)
            if blocked and not self.is_blocked(stream_id):
                self.unblock(stream_id)
            self.gate.pump(now)
        return self.take_events()

    def has_room(self, stream_id: int, now: float) -> list[Event]:
        """Record that a stream has room again, after `RoomWanted`; for an ended one it does nothing."""
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.has_room(now)
        return self.take_events()

    def is_blocked(self, stream_id: int) -> bool:
        """Whether a stream must not be read now, so that QUIC holds the peer back until `StreamUnblocked`. Source: MA-88, MA-118."""
        entry = self.streams.get(stream_id)
        if entry is None or type(entry) is Outgoing:
            return False
        if isinstance(entry, ControlIn):
            return entry in self.signals.blocked
        return isinstance(entry, Incoming) and entry.spec.streaming and entry.reserved >= self.config.gate.stream_window

    def proceed(self, stream_id: int, now: float) -> list[Event]:
        """Accept an operation that was offered.

        Raises:
            LocalProtocolError: it was not offered, or is already decided.
        """
        operation = self._theirs(stream_id)
        if operation is not None:
            if not (operation.pending and operation.told):
                raise LocalProtocolError(f"operation {stream_id} waits for no decision", rule="MA-48")
            self.gate.approve(operation, now)
        return self.take_events()

    def refuse(self, stream_id: int, code: int, retry_after: float = 0.0, *, now: float) -> None:
        """Refuse an operation that was offered; `retry_after` is in seconds, 0 for no hint.

        Raises:
            LocalProtocolError: it was not offered, or is already decided.
        """
        operation = self._theirs(stream_id)
        if operation is not None:
            if not (operation.pending and operation.told):
                raise LocalProtocolError(f"operation {stream_id} waits for no decision", rule="MA-48")
            check_code(code)
            operation.told = False
            operation.refuse(code, retry_after, now)

    def finish(self, stream_id: int, now: float) -> None:
        """Send Done for an executed Message. Source: MA-74.

        Raises:
            LocalProtocolError: a Request, or not complete yet.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.finish(now)

    def respond(self, stream_id: int, body: Octets = b"", content_type: str | None = None, *, now: float) -> None:
        """Answer a Request with a whole Response.

        Args:
            body: large ones are not copied, so they must not change.
            content_type: of a Success, without parameters; None for other kinds, and for a Success without body.

        Raises:
            LocalProtocolError: a Message, not complete, already answered, or not a valid content type.

        Source: MA-65, MA-96 to MA-99a.
        """
        self.now = now
        operation = self.streams.get(stream_id)
        if type(operation) is Incoming or (operation := self._theirs(stream_id)) is not None:
            operation.respond(body, content_type, now)

    def start_response(
        self, stream_id: int, length: int | None, content_type: str | None = None, *, now: float
    ) -> None:
        """Begin a Response whose body follows with `send_body` and `end_body`.

        Args:
            length: bytes of the body, without native header; None for undefined length. 0 completes the Response.
            content_type: as for `respond`.

        Raises:
            LocalProtocolError: as for `respond`.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.start_response(length, content_type, now)

    def fail(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """Report that a handler failed. Source: MA-66, MA-67, MA-77 to MA-79.

        Args:
            code: `ErrorCode.EXECUTION_ERROR`, another protocol code, or an application code from 1024 on.
            reason: text for people, sanitised and shortened here.

        Raises:
            LocalProtocolError: it was not handed out, or the code must not be sent.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.fail(check_code(code), reason, now)

    def cancel_all(self, *, signal: bool) -> None:
        """End every operation; with `signal` the peer is told of each. Source: MA-92, MA-93."""
        for entry in list(self.streams.values()):
            if isinstance(entry, Incoming):
                if signal:
                    entry.abort(ErrorCode.CANCELLED, "SHUTDOWN", self.now)
                else:
                    entry.forget()
            elif isinstance(entry, Outgoing):
                if signal:
                    entry.fail(ErrorCode.CANCELLED, "SHUTDOWN", self.now)
                else:
                    entry.forget()
        if not signal:
            self.streams = {i: e for i, e in self.streams.items() if isinstance(e, ControlIn)}
            self.operations = 0
            self.timers = MaopTimers()
        self.unacked.clear()

    def end(self, code: int, reason: str, error: RemoteProtocolError | None, *, tell: bool) -> None:
        """End the connection and everything in it."""
        if self.state is _CLOSED:
            return
        self.gate.quit()
        self.cancel_all(signal=False)
        self.streams.clear()
        self.go(ConnectionInput.CLOSED)
        self.at = self.stream0_at = None
        if tell:
            self.out.append(CloseConnection(code, self.reason(reason).decode()))
        self.emit(ConnectionEnded(code, reason, error))

    def let_go(self) -> None:
        """Drop all references back to this core after `ConnectionEnded`, so that it is freed without the garbage collector."""
        self.wake = nothing
        self.gate.let_go()
        self.pool.let_go()
        self.signals.let_go()

    def fail_connection(self, code: int, detail: str, rule: str) -> None:
        """End the connection because the peer broke a rule."""
        self.end(close_code(code), detail, RemoteProtocolError(detail, rule=rule), tell=True)

    def data_to_send(self, now: float) -> list[Output]:
        """Take the outputs. Call it once a turn, when the core has all input at hand."""
        self.now = now
        if self.gate.due and (self.state is _OPEN or self.state is _DRAINING):
            self.gate.flush(now)
        if self.state is not _CLOSED and self.state is not ConnectionState.CLOSING:
            paused = self.pool.backlog > self.config.control.control_ring
            self.pool.flush(self.out, now)
            if paused and self.pool.backlog <= self.config.control.control_ring:
                # MA-85: approvals go on.
                self.gate.pump(now)
                self.gate.flush(now)
                self.pool.flush(self.out, now)
        # MA-92: without a word of the peer, operations that it began before it heard of the drain may be on their way.
        if self.state is _DRAINING and self.heard and not self.operations and not self.pool.waiting():
            self.drained(now)
        out, self.out = self.out, []
        return out

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due, as of the last `data_to_send`; None if never."""
        if self.state is _CLOSED:
            return None
        first = self.timers.next()
        for at in (self.at, self.stream0_at, self.pool.done_at):
            if at is not None and (first is None or at < first):
                first = at
        # These rarely have a deadline.
        if self.gate.timed and (at := self.gate.deadline()) is not None and (first is None or at < first):
            first = at
        if self.signals.blocked and (at := self.signals.deadline()) is not None and (first is None or at < first):
            first = at
        if self.unacked:
            at = next(iter(self.unacked.values()))
            if first is None or at < first:
                first = at
        return first

    def handle_timeout(self, now: float) -> list[Event]:
        """Do the work that is due. A call too early or too often does nothing."""
        self.now = now
        if self.state is _CLOSED:
            return self.take_events()
        self.timers.expire(now)
        while self.unacked:
            stream_id, at = next(iter(self.unacked.items()))
            if at > now:
                break
            del self.unacked[stream_id]
            self.statistic.responses_unacked += 1
        self.signals.resume(now)
        self.gate.pump(now)
        if self.stream0_at is not None and now >= self.stream0_at:
            self.stream0_overdue()
        if self.at is not None and now >= self.at:
            self.at = None
            if self.state is _DRAINING:
                self.drained(now)
            elif self.state in (ConnectionState.FLUSHING, ConnectionState.CLOSING):
                self.step(now)
            else:
                self.session_overdue(now)
        return self.take_events()
