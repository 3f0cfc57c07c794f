"""One MAOP connection without I/O: octets in, events out; calls in, octets out.

How an owner uses it, in turns:

1. Give it whatever is at hand: `receive_stream_data`, `stream_reset`, `stream_stopped`, `handle_timeout`. Take in everything that has
   come before step 3: a Block that is there before its Proceed was written is a mistake of the peer (MA-50).
2. Do what the events say. Each `receive_…` returns them; calls of the application leave theirs for `take_events`.
3. Once a turn take `data_to_send(now)`, do it, `take_events`, and sleep until `next_deadline`.

Outputs of one stream are done in order, each waiting for room on that stream; other streams do not wait for it. Each side of a
connection begins operations (`send_message`, `send_request`) and executes those of the peer (`Execute`).

A mistake of the peer ends the operation, or the connection, by what is queued and an event. A mistake of the caller is a
`LocalProtocolError`, and nothing has changed. A call for an operation that has just ended is no mistake where the caller cannot know
yet: it does nothing. Streams that have ended are remembered as ranges of numbers, so that late signals cost no memory (MA-115).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.numbers import Numbers

from .body import BodyReader
from .config import TEST_SPEC, HandlerSpec, MaopConfig
from .control import ControlIn, ControlPool, Signals
from .counters import Statistics
from .ending import Ending
from .errors import ErrorCode, check_code, close_code, sanitise
from .events import (
    Begun,
    CloseConnection,
    ConnectionEnded,
    Event,
    Octets,
    OpenStream,
    Output,
    ResetStream,
    ResponseRejected,
    Stepped,
    StopStream,
    StreamData,
)
from .frames import CONTROL_OPS, MESSAGE, REQUEST, UNDEFINED
from .gate import Gate
from .initiator import Outgoing
from .receiver import Incoming
from .shared import DedupStore, Quota, ReplayWindow
from .side import Operation
from .state import ConnectionInput, ConnectionState
from .timers import Timers

__all__ = ["MaopCore"]

_OPEN, _DRAINING, _CLOSED = ConnectionState.OPEN, ConnectionState.DRAINING, ConnectionState.CLOSED
_OVER, _STOPPED = 0, 1
"""In place of an operation that has ended on a stream whose peer's direction has not: whether STOP_SENDING is out."""
_ENDLESS: Final = 2**60
"""Streams that may be opened as long as nobody says how many."""
_MAX_HOLES: Final = 65_536
"""Ranges in the record of streams; each is a stream that the peer opened and never used, which QUIC bounds as well."""


def _nothing() -> None:
    """Wake nobody."""


class MaopCore(Ending):
    """One side of a connection.

    Args:
        client: whether this side dialled.
        config: limits, delays and policies.
        handlers: what the peer may ask for, by msg_id; 0 and 1 are native.
        random_bytes: returns so many octets that nobody can guess, for session ids and audit ids.
        wall_offset: UNIX time at the moment 0 of the clock whose readings are the `now` of each call. Source: MA-73.
        now: the present moment; seconds by any clock that does not go back.
        quota, dedup, replay: what connections of one identity share; each connection has its own unless given.

    Raises:
        ValueError: a handler for a native msg_id, or for one beyond 65535.
    """

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
        super().__init__(client=client, config=config or MaopConfig(), random_bytes=random_bytes, now=now)
        self.specs: Mapping[int, HandlerSpec] = {
            **({1: TEST_SPEC} if self.config.native_test else {}),
            **(handlers or {}),
        }
        """What the peer may ask for, by msg_id; the native Test too, unless it is switched off. Source: MA-41, MA-112."""
        if any(not 1 < msg_id < 65_536 for msg_id in handlers or ()):
            raise ValueError("handlers have msg_ids from 2 to 65535; 0 and 1 are native [MA-41]")
        self.wall_offset = wall_offset
        self.wake: Callable[[], None] = _nothing
        """Called when another connection has freed room in a shared quota: the owner then takes a turn."""
        self.steps = False
        """Whether `Begun` and `Stepped` are emitted, for a log."""
        self.quota = quota or Quota(self.config.max_inflight_ops, self.config.max_buffer_bytes)
        self.dedup = DedupStore() if dedup is None else dedup  # an empty one is false
        self.replay = replay or ReplayWindow()
        self.statistic = Statistics()
        self.streams: dict[int, Incoming | Outgoing | ControlIn | int] = {}
        """What each stream carries whose operation has not ended, or whose peer's direction has not."""
        self.operations = 0
        """Operations that have not ended, of either side."""
        self.unacked: OrderedDict[int, float] = OrderedDict()
        """Responses of ours that nobody has acknowledged, and when they are forgotten. Source: MA-71."""
        self.timers = Timers()
        self.gate = Gate(self, now)
        self.pool = ControlPool(self)
        self.signals = Signals(self, now)
        self._control_streams = 0
        self._seen = {kind: Numbers() for kind in range(4)}
        self._expected = {0: 4, 1: 1, 2: 2, 3: 3}
        self._parity = 0 if client else 1
        self._next_id = {False: 4 if client else 1, True: 2 if client else 3}
        self._credit = {False: _ENDLESS, True: _ENDLESS}

    # ------------------------------------------------ what comes

    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> list[Event]:
        """Take octets of a stream; return what they mean.

        Args:
            stream_id: as in QUIC.
            data: any number of octets, cut anywhere. The core keeps views of large ones: `bytes`, which nobody changes.
            fin: whether they are the last.
            now: the present moment.
        """
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
                    self.statistic.block_octets += len(data)
                entry.receive(data, fin, now)
                if fin and type(self.streams.get(stream_id)) is int:
                    del self.streams[stream_id]
        else:
            self.receive_early(stream_id, bytes(data), fin, now)
        return self.take_events() if self._events else []

    def stream_reset(self, stream_id: int, code: int, now: float) -> list[Event]:
        """The peer reset its direction of a stream: what had not arrived never will. The code says nothing (MA-7)."""
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
        """The peer wants no more on a stream, and QUIC has reset this side's direction. The code says nothing (MA-7)."""
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
        """End the connection: the profile of QUIC has no datagrams, so a peer that sends one breaks a rule. Source: MA-2."""
        self.now = now
        self.fail_connection(ErrorCode.PROTOCOL_VIOLATION, "datagrams are not used", "MA-2")
        return self.take_events()

    def stream_credit(self, *, bidirectional: int, unidirectional: int) -> None:
        """Say how many streams of each kind the peer allows in all, as in QUIC; stream 0 is one of them. Source: MA-130."""
        self._credit = {False: bidirectional, True: unidirectional}

    def set_control_writable(self, stream_id: int, writable: bool) -> None:
        """Say whether a control stream of ours takes octets; while it does not, its signals wait here. Source: MA-85."""
        stream = self.pool.streams.get(stream_id)
        if stream is not None:
            stream.writable = writable

    def _begin(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        """Classify a stream. Source: MA-9, MA-10, MA-14."""
        if stream_id & 1 == self._parity or not stream_id:
            if stream_id == 0:
                self.auth_data(data, fin)
            return  # the end of a stream of ours, which has been forgotten
        if not data:
            if fin:
                self._first_sight(stream_id)
            return
        if not self._first_sight(stream_id):
            return
        op = data[0]
        if op <= 1:
            self.statistic.received += 1
            if bool(op) == bool(stream_id & 2):
                kind = "Message on a bidirectional stream" if op == 0 else "Request on a unidirectional stream"
                self._reject(stream_id, ErrorCode.PROTOCOL_VIOLATION, kind, fin)
            elif len(self.streams) >= self.config.max_open_streams:
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
            if self._control_streams > self.config.max_control_streams:
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
        # Numbers below `_expected` came in order, all others are in `seen`.
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
        """Whether a signal names a stream that exists or existed, on which the peer may answer. Source: MA-49, MA-115."""
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
            self.streams[stream_id] = _STOPPED
        if not stream_id & 2:
            self.out.append(ResetStream(stream_id, close_code(code)))

    def _drop(self, stream_id: int, entry: int, data: bytes, fin: bool) -> None:
        """Octets behind the end of an operation. Source: MA-11, section 21 (ENDED)."""
        if fin:
            del self.streams[stream_id]
        elif data and entry == _OVER:
            self.out.append(StopStream(stream_id, close_code(ErrorCode.CANCELLED)))
            self.streams[stream_id] = _STOPPED

    # ------------------------------------------------ what operations and signals ask for

    def fail_stream(self, stream_id: int, code: int, reason: str) -> None:
        """Queue a Fail for a stream that carries no operation."""
        self.pool.fail(stream_id, code, self.reason(reason))
        self.statistic.failed[code] += 1

    def note_blocks(self, stream_id: int, before: int, body: BodyReader) -> None:
        """Tell of the first Block of a body, and of its end; `before` counts the Blocks that had come before. Source: MA-132."""
        if body.blocks and not before:
            self.emit(Stepped(stream_id, "first_block", body.total))
        if body.ended:
            self.emit(Stepped(stream_id, "last_block", body.total))

    def reason(self, text: str) -> bytes:
        """Make a reason fit for the wire. Source: MA-78."""
        return sanitise(text, self.random_bytes(4).hex(), secrets=self.secrets)

    def mark_stopped(self, stream_id: int) -> None:
        """STOP_SENDING is out; `retire` keeps that."""
        self._stopping = stream_id

    def retire(self, operation: Operation) -> None:
        """An operation has ended; its stream is remembered until the peer's direction has ended too."""
        stream_id = operation.stream_id
        self.operations -= 1
        if operation.fin:
            del self.streams[stream_id]
        else:
            self.streams[stream_id] = _STOPPED if self._stopping == stream_id else _OVER
        self._stopping = -1

    def keep_control(self, control: ControlIn) -> None:
        """A stream carries signals from now on."""
        self.streams[control.stream_id] = control

    def is_control(self, control: ControlIn) -> bool:
        """Whether a stream still carries signals."""
        return self.streams.get(control.stream_id) is control

    def forget_control(self, control: ControlIn, *, ended: bool = True) -> None:
        """A stream carries no signals any more."""
        if ended:
            self.streams.pop(control.stream_id, None)
        else:
            self.streams[control.stream_id] = _STOPPED
        if not control.own:
            self._control_streams -= 1

    def target(self, stream_id: int, now: float) -> Outgoing | None:
        """Find the operation of ours that a signal is about. Source: MA-48, MA-49, MA-80."""
        entry = self.streams.get(stream_id)
        if type(entry) is Outgoing:
            return entry
        if self._known(stream_id) and stream_id & 1 == self._parity:
            self.signals.late += 1
        else:
            self.signals.unknown(now)
        return None

    def on_done(self, stream_id: int, start_ms: int, time_ms: int, now: float) -> None:
        """A Done has come: for a Message of ours, or for a Response of ours."""
        if self.unacked.pop(stream_id, None) is not None:
            return
        operation = self._subject(stream_id, now)
        if isinstance(operation, Outgoing):
            operation.on_done(start_ms, time_ms, now)
        elif operation is not None:
            self.signals.late += 1

    def on_fail(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """A Fail has come: for an operation of ours, or from a requester that cannot use the Response."""
        if self.unacked.pop(stream_id, None) is not None:
            self._events.append(ResponseRejected(stream_id, code, reason))
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

    # ------------------------------------------------ operations of ours

    def credit_left(self, *, unidirectional: bool) -> int:
        """Return how many streams of a kind may be opened, as far as `stream_credit` has said."""
        return max(0, self._credit[unidirectional] - (self._next_id[unidirectional] >> 2))

    def take_stream_id(self, *, unidirectional: bool) -> int:
        """Number a stream of ours."""
        stream_id = self._next_id[unidirectional]
        self._next_id[unidirectional] = stream_id + 4
        return stream_id

    def can_open(self, *, request: bool) -> bool:
        """Whether a Message or Request may be sent now: open, and the peer's credit lasts, a control stream set aside."""
        left = self._credit[not request] - (self._next_id[not request] >> 2)
        return self.state is _OPEN and (left > 1 or (left == 1 and not self._kept_for_control(request)))

    def _kept_for_control(self, request: bool) -> bool:
        return not self.pool.streams and (self.config.control_stream_kind == "bidi") == request

    def send_message(
        self,
        msg_id: int,
        body: Octets | None = b"",
        *,
        length: int | None = None,
        priority: int = 128,
        key: bytes = b"",
        timeout: float | None = None,
        while_draining: bool = False,
        now: float,
    ) -> int:
        """Begin a Message; `Completed`, `Refused` or `Failed` ends it.

        Args:
            msg_id: names the handler.
            body: sent as soon as the peer says Proceed; None for `BodyWanted`, then `send_body` and `end_body`.
            length: octets of a body that is sent so; None for undefined length.
            priority: 0 (first) to 255.
            key: idempotency key of 16 octets, if the peer takes any (`idempotency`).
            timeout: seconds to wait for Done after the body; None without limit.
            while_draining: whether running operations need this one. Source: MA-89.
            now: the present moment.

        Returns:
            The stream id.

        Raises:
            LocalProtocolError: not open, draining, no credit for a stream, or a field that does not fit. Nothing was sent.

        Source: section 6, MA-55 to MA-57, MA-122.
        """
        size = self._check_start(msg_id, body, length, priority, key, while_draining, unidirectional=True)
        operation = Outgoing(self, self._next_id[True], size, body, now)
        operation.timeout = timeout
        self._start(operation, MESSAGE.pack(0, msg_id, size, priority), priority, key, now)
        return operation.stream_id

    def send_request(
        self,
        msg_id: int,
        body: Octets | None = b"",
        *,
        length: int | None = None,
        response_msg_id: int = 0,
        success_layout: bool | None = None,
        timeout_ms: int | None = None,
        priority: int = 128,
        key: bytes = b"",
        stream_response: bool = False,
        acknowledge: bool = True,
        max_response: int | None = 8 * 2**20,
        allow_undefined: bool = True,
        while_draining: bool = False,
        now: float,
    ) -> int:
        """Begin a Request; `Completed`, `Refused` or `Failed` ends it.

        Args:
            msg_id: names the handler.
            body: as for `send_message`.
            length: as for `send_message`.
            response_msg_id: kind of Response that is wanted; 0 is Success.
            success_layout: whether that kind has the Success header; None: 0 alone has. Source: MA-99a.
            timeout_ms: milliseconds from the whole body to the Response header; 0 for no limit, None for the default.
            priority: 0 (first) to 255.
            key: idempotency key of 16 octets, if the peer takes any (`idempotency`).
            stream_response: whether its body comes as `ResponseStarted`, `BodyReceived`, `Completed`; else whole.
            acknowledge: whether Done is sent as soon as it is complete; else by `consumed`, or not by `reject`.
            max_response: octets that it may have, native header included; None without limit.
            allow_undefined: whether it may be of undefined length.
            while_draining: whether running operations need this one. Source: MA-89.
            now: the present moment.

        Returns:
            The stream id.

        Raises:
            LocalProtocolError: as for `send_message`.

        Source: section 8.
        """
        size = self._check_start(msg_id, body, length, priority, key, while_draining, unidirectional=False)
        if timeout_ms is None:
            timeout_ms = self.config.default_request_timeout_ms
        if not 0 <= timeout_ms < 2**32 or not 0 <= response_msg_id < 65_536:
            raise LocalProtocolError(f"timeout {timeout_ms} ms or response {response_msg_id} out of range", rule="MA-4")
        operation = Outgoing(self, self._next_id[False], size, body, now)
        if timeout_ms:
            operation.timeout = timeout_ms / 1000 + self.config.response_grace
        operation.success = response_msg_id == 0 if success_layout is None else success_layout
        operation.streamed = stream_response
        operation.acknowledge = acknowledge
        operation.limit = max_response
        operation.allow_undefined = allow_undefined
        header = REQUEST.pack(1, msg_id, size, priority, response_msg_id, timeout_ms)
        self._start(operation, header, priority, key, now)
        return operation.stream_id

    def _check_start(
        self,
        msg_id: int,
        body: Octets | None,
        length: int | None,
        priority: int,
        key: bytes,
        while_draining: bool,
        *,
        unidirectional: bool,
    ) -> int:
        """Judge a call; return the length to announce."""
        if self.state is not _OPEN:
            if not while_draining or self.state is not _DRAINING:
                raise LocalProtocolError(f"no new operations in state {self.state.name}", rule="MA-89")
        elif self._credit[unidirectional] - (self._next_id[unidirectional] >> 2) < 2 and not self.can_open(
            request=not unidirectional
        ):
            raise LocalProtocolError("the peer allows no more streams now", rule="MA-130")
        if not 0 < msg_id < 65_536 or not 0 <= priority < 256:
            raise LocalProtocolError(f"msg_id {msg_id} or priority {priority} out of range", rule="MA-43")
        if key and (len(key) != 16 or not self.idempotency):
            why = "the peer takes none" if not self.idempotency else f"16 octets, not {len(key)}"
            raise LocalProtocolError(f"idempotency key: {why}", rule="MA-122")
        if body is not None:
            return len(body)
        if length is not None and not 0 <= length < UNDEFINED:
            raise LocalProtocolError(f"length {length} out of range", rule="MA-57")
        return UNDEFINED if length is None else length

    def _start(self, operation: Outgoing, header: bytes, priority: int, key: bytes, now: float) -> None:
        self.now = now
        stream_id = operation.stream_id
        unidirectional = stream_id & 2 != 0
        if self.idempotency:
            header += bytes((len(key),)) + key
        self._next_id[unidirectional] = stream_id + 4
        self.streams[stream_id] = operation
        self.operations += 1
        self.statistic.opened += 1
        if self.steps:
            _, msg_id, length = MESSAGE.unpack_from(header)[:3]
            self.emit(Begun(stream_id, msg_id, None if length == UNDEFINED else length, priority))
        self.out.append(OpenStream(stream_id, unidirectional, priority))
        self.out.append(StreamData(stream_id, header, operation.own_over))
        operation.wait(now)

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
        """Give an operation of ours up; no event follows. One that has ended is left alone. Source: MA-61."""
        self.now = now
        operation = self._mine(stream_id)
        if operation is not None:
            operation.cancel()

    def consumed(self, stream_id: int, now: float) -> None:
        """Acknowledge a Response that was asked for with ``acknowledge=False``. Source: MA-71.

        Raises:
            LocalProtocolError: it is not complete.
        """
        operation = self._mine(stream_id)
        if operation is not None:
            operation.consumed(now)

    def reject(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """Say that a Response is of no use, while it comes or before it is acknowledged. Source: MA-71.

        Raises:
            LocalProtocolError: it has not begun.
        """
        operation = self._mine(stream_id)
        if operation is not None:
            operation.reject(check_code(code), reason, now)

    # ------------------------------------------------ bodies of either side

    def send_body(self, stream_id: int, data: Octets, now: float) -> None:
        """Send octets of a body: after `BodyWanted`, or after `start_response`.

        Args:
            stream_id: which.
            data: any number; large ones are not copied, so they must not change.
            now: the present moment.

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

    def body_consumed(self, stream_id: int, octets: int, now: float) -> list[Event]:
        """The application is through with octets of a streamed body of the peer's operation: there is room again."""
        operation = self._theirs(stream_id)
        if operation is not None:
            blocked = self.is_blocked(stream_id)
            operation.consumed(octets)
            if blocked and not self.is_blocked(stream_id):
                self.unblock(stream_id)
            self.gate.pump(now)
        return self.take_events()

    def has_room(self, stream_id: int, now: float) -> list[Event]:
        """Say that a stream has room again, as `RoomWanted` asked; for one that has ended it does nothing."""
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.has_room(now)
        return self.take_events()

    def is_blocked(self, stream_id: int) -> bool:
        """Whether a stream must not be read now, so that QUIC holds the peer back; `StreamUnblocked` ends it. Source: MA-88, MA-118."""
        entry = self.streams.get(stream_id)
        if isinstance(entry, ControlIn):
            return entry in self.signals.blocked
        return isinstance(entry, Incoming) and entry.spec.streaming and entry.reserved >= self.config.stream_window

    # ------------------------------------------------ operations of the peer

    def proceed(self, stream_id: int, now: float) -> list[Event]:
        """Let an operation in that was offered.

        Raises:
            LocalProtocolError: it was not offered, or is decided already.
        """
        operation = self._theirs(stream_id)
        if operation is not None:
            if not (operation.pending and operation.told):
                raise LocalProtocolError(f"operation {stream_id} waits for no decision", rule="MA-48")
            self.gate.approve(operation, now)
        return self.take_events()

    def refuse(self, stream_id: int, code: int, retry_after: float = 0.0, *, now: float) -> None:
        """Turn an operation down that was offered; `retry_after` is seconds, 0 for no hint.

        Raises:
            LocalProtocolError: it was not offered, or is decided already.
        """
        operation = self._theirs(stream_id)
        if operation is not None:
            if not (operation.pending and operation.told):
                raise LocalProtocolError(f"operation {stream_id} waits for no decision", rule="MA-48")
            check_code(code)
            operation.told = False
            operation.refuse(code, retry_after, now)

    def finish(self, stream_id: int, now: float) -> None:
        """A Message is executed: Done. Source: MA-74.

        Raises:
            LocalProtocolError: a Request, or not complete yet.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.finish(now)

    def respond(self, stream_id: int, body: Octets = b"", content_type: str | None = None, *, now: float) -> None:
        """Answer a Request by a whole Response.

        Args:
            stream_id: which.
            body: of it; large ones are not copied, so they must not change.
            content_type: of a Success, without parameters; None for other kinds, and for a Success without body.
            now: the present moment.

        Raises:
            LocalProtocolError: a Message, not complete, answered already, or no such content type.

        Source: MA-65, MA-96 to MA-99a.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.respond(body, content_type, now)

    def start_response(
        self, stream_id: int, length: int | None, content_type: str | None = None, *, now: float
    ) -> None:
        """Begin a Response whose body follows by `send_body` and `end_body`.

        Args:
            stream_id: which.
            length: octets of the body, without native header; None for undefined length. 0 completes the Response.
            content_type: as for `respond`.
            now: the present moment.

        Raises:
            LocalProtocolError: as for `respond`.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.start_response(length, content_type, now)

    def fail(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """A handler failed.

        Args:
            stream_id: which.
            code: `ErrorCode.EXECUTION_ERROR`, another one of the protocol, or from 1024 on an own one.
            reason: for people; sanitised and cut here.
            now: the present moment.

        Raises:
            LocalProtocolError: it was not handed out, or a code that must not be sent.

        Source: MA-66, MA-67, MA-77 to MA-79.
        """
        self.now = now
        operation = self._theirs(stream_id)
        if operation is not None:
            operation.fail(check_code(code), reason, now)

    # ------------------------------------------------ the end

    def cancel_all(self, *, signal: bool) -> None:
        """End every operation; with `signal` the peer hears of each. Source: MA-92, MA-93."""
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
            self.timers = Timers()
        self.unacked.clear()

    def end(self, code: int, reason: str, error: RemoteProtocolError | None, *, tell: bool) -> None:
        """The connection is over; everything in it too."""
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
        """After `ConnectionEnded`: keep nothing that refers back to this core, so that it is freed with its last user, without the collector."""
        self.wake = _nothing
        self.gate.let_go()
        self.pool.let_go()
        self.signals.let_go()

    def fail_connection(self, code: int, detail: str, rule: str) -> None:
        """The peer has broken a rule that ends the connection."""
        self.end(close_code(code), detail, RemoteProtocolError(detail, rule=rule), tell=True)

    # ------------------------------------------------ turns

    def data_to_send(self, now: float) -> list[Output]:
        """Take what is to be done. Once a turn, when everything at hand has been given to the core."""
        self.now = now
        if self.gate.due and (self.state is _OPEN or self.state is _DRAINING):
            self.gate.flush(now)
        if self.state is not _CLOSED and self.state is not ConnectionState.CLOSING:
            paused = self.pool.backlog > self.config.control_ring
            self.pool.flush(self.out, now)
            if paused and self.pool.backlog <= self.config.control_ring:
                # MA-85: approvals go on.
                self.gate.pump(now)
                self.gate.flush(now)
                self.pool.flush(self.out, now)
        if self.state is _DRAINING and not self.operations and not self.pool.waiting():
            self.drained(now)
        out, self.out = self.out, []
        return out

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is wanted; None if never. As of the last `data_to_send`."""
        if self.state is _CLOSED:
            return None
        first = self.timers.next()
        for at in (self.at, self.stream0_at, self.pool.done_at):
            if at is not None and (first is None or at < first):
                first = at
        # These rarely have any.
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
        """Do what is due. Too early or too often does nothing."""
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
