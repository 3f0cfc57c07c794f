"""What RSocket and ReactiveSocket share: one machine of connections and streams, below the frames of the dialects.

Both run many Reactive Streams on one connection: requests, and as many payloads as the other side has granted credit for. The dialects differ
in frames and rules, so each has its own core; the same actors drive both. Rules of this file:

* A core's hot path is here down to `_read`, which finds the frames of a dialect in a piece of input.
* `_state` changes only in `_move` and a stream's state only in `_advance`, each by the table of the dialect. An ended stream is forgotten there.
* Only `_end` ends a connection: it gives each stream its last event, then the connection its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import attrs

from levada.framework.errors import LocalProtocolError
from levada.transports.core import BytesInput, Core, MessagesInput
from levada.transports.rsocket.codes import ErrorCode
from levada.transports.rsocket.config import CoreConfig
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    FailedBy,
    Interaction,
    LeaseGranted,
    PeerFellSilent,
    SetupAccepted,
    StreamCancelled,
    StreamFailed,
)
from levada.transports.rsocket.frames import MAX_U31, Payload
from levada.transports.rsocket.state import (
    CONNECTION,
    STREAM,
    ConnectionInput,
    ConnectionState,
    StreamInput,
    StreamState,
)
from levada.transports.rsocket.streams import Allowance, LiveStream, PendingRequest, StreamIds, live_ids

__all__ = ["DEAF", "HELD_BACK", "LIVE", "CoreStatistics", "ReactiveStreamsCore"]

_MAX_TEXT: Final = 65_536  # bytes of an explanation; it has to fit into a frame
_DRAINED: Final = "the connection has drained: every stream has ended"
LIVE: Final = (ConnectionState.OPENING, ConnectionState.OPEN, ConnectionState.DRAINING, ConnectionState.CLOSING)
DEAF: Final = (ConnectionState.ENDED, ConnectionState.SUSPENDED)
HELD_BACK: Final = (ConnectionState.DECIDING, ConnectionState.HANDED_OVER)
_WITHOUT_CARRIER: Final = (ConnectionState.SUSPENDED, ConnectionState.RESUMING)
# Members of enums under names of this module: an attribute of an enum costs 0.1 us or more, a global 0.01.
_RESPONSE, _FNF, _STREAM, _CHANNEL, _SUBSCRIPTION = (
    Interaction.REQUEST_RESPONSE, Interaction.FIRE_AND_FORGET, Interaction.REQUEST_STREAM, Interaction.REQUEST_CHANNEL,
    Interaction.REQUEST_SUBSCRIPTION,
)  # fmt: skip
_OPEN, _OPENING, _DRAINING = ConnectionState.OPEN, ConnectionState.OPENING, ConnectionState.DRAINING
_SENDING, _ENDED = StreamState.SENDING, StreamState.ENDED


@attrs.frozen(kw_only=True)
class CoreStatistics:
    """A snapshot of the counts of a core."""

    streams: int
    """Live streams of both sides."""
    peer_streams: int
    """Live streams that the peer opened."""
    requests_waiting: int
    """Requests of this side that wait for a lease."""
    bytes_gathered: int
    """Bytes of unfinished payloads."""
    bytes_unread: int
    """Bytes received but not processed: part of a frame, or frames that wait for `accept_setup`."""
    bytes_unsent: int
    """Bytes queued for `data_to_send`."""
    bytes_kept: int
    """Bytes of sent frames kept for a resumption."""


class ReactiveStreamsCore(Core[Event, bytes], BytesInput[Event], MessagesInput[Event], ABC):
    """One side of a connection, both requester and responder; `RSocketCore` describes the arguments.

    Call `receive_data` for a carrier of bytes and `receive_message` for a carrier of messages (`framed`).
    """

    connection_table: ClassVar[Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState]] = CONNECTION
    stream_table: ClassVar[Mapping[tuple[StreamState, StreamInput], StreamState]] = STREAM
    prefix: ClassVar[int]
    """Bytes of the length field before a frame on a carrier of bytes."""
    counted: ClassVar[int]
    """Bytes of that field which the length counts."""
    smallest: ClassVar[int]
    """The smallest length."""
    length_rules: ClassVar[tuple[str, str]]
    """The ids of the rules that a length on a carrier of bytes, and a message of a wrong size, breaks."""

    _ids: StreamIds

    def __init__(self, config: CoreConfig, *, client: bool, framed: bool, now: float) -> None:
        self._config = config
        self._client = client
        self._framed = framed
        self._now = now
        self._state = ConnectionState.OPENING if client else ConnectionState.AWAITING_SETUP
        self._events: list[Event] = []  # of the owner's calls
        # Bytes in: the rest of the last call, and how many bytes a look at it needs.
        self._tail: bytearray = bytearray()
        self._need = 0
        self._offset = 0  # bytes received before those in hand
        self._fault = 0  # where the frame in hand began
        # Until a client is accepted, a frame has at most the bytes of the whole backlog.
        self._max_taken = config.max_frame_size if client else min(config.max_frame_size, config.max_setup_backlog)
        # Bytes out.
        self._control: list[bytes] = []  # frames of stream 0, which go first
        self._out: list[bytes] = []
        self._streams: dict[int, LiveStream] = {}
        self._waiting: OrderedDict[int, PendingRequest] = OrderedDict()  # for a lease
        self._peer_streams = 0
        self._gathered = 0  # bytes of all unfinished payloads
        self._in_turn: OrderedDict[int, deque[bytes]] = OrderedDict()  # frames of each stream that wait for room
        self.backlog = 0
        """Bytes of fragments, and of frames behind them, that wait for `room`."""
        self.room: float = math.inf
        """How many bytes of them `data_to_send` may take, and one frame more; counted down. An owner that sets it lets other frames overtake
        fragments."""
        self.own_bytes = 0
        """Bytes that this core has queued by itself, such as errors, grants and answers to KEEPALIVE: because of the peer, however much waits."""
        # Leases.
        self._leasing = client and config.lease is not None
        self._was_accepted = False  # client
        self._allowed = Allowance()  # by the peer
        self._granted = Allowance(config.lease_grace)  # to the peer
        self._granted_on_carrier = False
        # Time. RX-35: 0 is no keepalive and no limit, and without the former silence is no sign of anything.
        self._heard = now
        self._silence_reported = -math.inf
        self._lifetime = (config.max_lifetime if config.keepalive_interval else 0.0) or math.inf
        self._keepalive_at = now + config.keepalive_interval if client and config.keepalive_interval else math.inf
        self._until = now + config.setup_timeout  # of the state: set-up, drain or session without carrier
        self._ended_by = EndReason.CLOSED  # what the end of a drain will be

    @property
    def state(self) -> ConnectionState:
        """The state of the connection."""
        return self._state

    def statistics(self) -> CoreStatistics:
        """Return the present counts."""
        return CoreStatistics(
            streams=len(self._streams),
            peer_streams=self._peer_streams,
            requests_waiting=len(self._waiting),
            bytes_gathered=self._gathered,
            bytes_unread=len(self._tail),
            bytes_unsent=sum(map(len, self._control)) + sum(map(len, self._out)) + self.backlog,
            bytes_kept=0,
        )

    @property
    def missing(self) -> int:
        """Bytes still missing from a frame that has begun to arrive; 0 if there is none, or on a carrier of messages."""
        return max(0, self._need - len(self._tail)) if self._tail else 0

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the carrier, cut anywhere, and return their events; ``b""`` means `connection_lost`.

        Raises:
            LocalProtocolError: the carrier keeps the boundaries of messages.
        """
        if self._framed:
            raise self._other_input()
        events, self._events = self._events, []
        if self._state is _OPEN and data and not self._tail:  # the usual case first
            self._now = self._heard = now
            self._read(data, events)
        elif self._state in DEAF:
            return events  # RS-7, RX-7
        elif not data:
            self._lost(events, "the peer ended the carrier", now)
        else:
            self._now = self._heard = now  # RS-107, RX-82: any input shows that the peer is alive
            self._receive_bytes(data, events)
        if self._state is _DRAINING:
            self._end_if_drained(events)
        return events

    def receive_message(self, message: bytes, now: float) -> list[Event]:
        """Take exactly one message from the carrier, a frame without its length field, and return its events (RS-6, RX-2).

        Raises:
            LocalProtocolError: the carrier is a byte stream.
        """
        if not self._framed:
            raise self._other_input()
        events, self._events = self._events, []
        if self._state in DEAF:
            return events  # RS-7, RX-7
        self._now = self._heard = now  # RS-107, RX-82
        length = self.counted + len(message)
        # RS-5, RS-6, RX-5. A message that must wait is checked at once, so that a count of bytes bounds the backlog.
        if self._is_length(length, self.length_rules[1], events):
            if self._state in HELD_BACK:
                self._tail += length.to_bytes(self.prefix)
                self._tail += message
                self._bound_backlog(events)
            else:
                self._read_message(message, events)
        if self._state is _DRAINING:
            self._end_if_drained(events)
        return events

    def _is_length(self, length: int, rule: str, events: list[Event]) -> bool:
        """End the connection if no frame may have this length."""
        if self.smallest <= length <= self._max_taken:
            return True
        self._fault = self._offset
        self._fail(events, rule, f"a frame of {length} bytes, {self.smallest} to {self._max_taken} wanted")
        return False

    def _receive_bytes(self, data: bytes, events: list[Event]) -> None:
        if self._state in HELD_BACK:
            self._tail += data
            self._bound_backlog(events)
            return
        if self._tail:
            self._tail += data
            if len(self._tail) < self._need:
                return
            data = bytes(self._tail)
            self._tail.clear()
        self._read(data, events)

    @abstractmethod
    def _read(self, data: bytes, events: list[Event]) -> None:
        """Take all complete frames in `data`, and give the rest to `_keep_rest`."""

    @abstractmethod
    def _read_message(self, message: bytes, events: list[Event]) -> None:
        """Take a frame without its length field."""

    def _keep_rest(self, data: bytes, at: int, events: list[Event]) -> None:
        self._need = self.prefix
        held_back = self._state in HELD_BACK
        if not held_back and len(data) - at >= self.prefix:
            length = int.from_bytes(data[at : at + self.prefix])
            # RS-5, RX-4: checked by the announced length, before anything of that size is kept.
            if not self._is_length(length, self.length_rules[0], events):
                return
            self._need = self.prefix - self.counted + length
        self._tail += data[at:]
        if held_back:
            self._bound_backlog(events)

    def _bound_backlog(self, events: list[Event]) -> None:
        """Bound the frames that wait while the application decides about SETUP (RS-52, RX-39)."""
        if len(self._tail) > self._config.max_setup_backlog:
            self._refuse_backlog(events)

    @abstractmethod
    def _refuse_backlog(self, events: list[Event]) -> None:
        """End the connection, because too much was sent behind SETUP."""

    def _read_held(self, events: list[Event]) -> None:
        """Read the input that was held back."""
        held = bytes(self._tail)
        self._tail.clear()
        self._read(held, events)

    def _forget_unread(self) -> None:
        self._tail.clear()
        self._need = 0

    def _move(self, cause: ConnectionInput) -> None:
        self._state = self.connection_table[self._state, cause]

    def _require(self, *states: ConnectionState) -> None:
        if self._state not in states:
            raise LocalProtocolError(f"not possible while the connection is {self._state.value}")

    def _require_setup(self) -> None:
        if self._state is not ConnectionState.DECIDING:
            raise LocalProtocolError(f"no SETUP to decide about, the connection is {self._state.value}")

    def accept_setup(self, now: float) -> None:
        """Server: accept the client, after `SetupReceived`. `take_events` has the events of its later frames.

        With leases, the LEASE of `CoreConfig.lease` is queued (RS-54, RX-38).

        Raises:
            LocalProtocolError: there is no SETUP to decide about.
        """
        self._require_setup()
        self._move(ConnectionInput.ACCEPT)
        self._now = self._heard = now
        self._grant_on_carrier()
        self._read_held(self._events)

    @abstractmethod
    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived`."""

    def _setup_accepted(self, events: list[Event]) -> None:
        """Client: record that the server has accepted SETUP (RS-53, RX-40)."""
        if self._state is _OPENING:
            self._move(ConnectionInput.ACCEPT)
            self._was_accepted = True
            events.append(SetupAccepted())

    def _grant_on_carrier(self) -> None:
        """Send the first LEASE on this carrier, if the application has not done so (RS-54, RS-55, RS-103, RX-38)."""
        grant = self._config.lease
        if self._leasing and grant is not None and not self._granted_on_carrier:
            self.send_lease(grant.ttl, grant.n, self._now, grant.metadata)

    def _lease_received(self, ttl_ms: int, n: int, metadata: bytes | None, events: list[Event]) -> None:
        self._allowed.replace(ttl_ms / 1000, n, self._now)
        events.append(LeaseGranted(ttl_ms / 1000, n, metadata))
        if self._client:
            self._grant_on_carrier()
        while self._waiting and self._allowed.take(self._now):
            stream_id, waiting = self._waiting.popitem(last=False)
            self._start(stream_id, waiting.kind, waiting.payload, waiting.n, waiting.complete)

    def touch(self, now: float) -> None:
        """Count the peer's silence from now on: this side has not been reading."""
        self._heard = max(self._heard, now)

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due. It is in the past if something is due at once, as for a drained connection."""
        silent = max(self._heard, self._silence_reported) + self._lifetime
        match self._state:
            case ConnectionState.OPEN | ConnectionState.OPENING:
                due = min(silent, self._keepalive_at)
            case ConnectionState.DRAINING if not (self._streams or self._in_turn):
                due = -math.inf
            case ConnectionState.DRAINING | ConnectionState.CLOSING:
                due = min(silent, self._keepalive_at, self._until)
            case ConnectionState.AWAITING_SETUP | ConnectionState.SUSPENDED:
                due = self._until
            case ConnectionState.RESUMING:
                due = min(silent, self._until)
            case _:
                return None
        return due if due < math.inf else None

    def handle_timeout(self, now: float) -> list[Event]:
        """Do everything that is due: keepalive, silence of the peer, and the time-outs of set-up, drain and resumption."""
        events = self.take_events()
        self._now = now
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return events
        match self._state:
            case ConnectionState.AWAITING_SETUP:
                # RS-49, RX-36: without an ERROR frame.
                self._end(events, EndReason.TIMED_OUT, text="no first frame in time")
            case ConnectionState.SUSPENDED | ConnectionState.RESUMING if now >= self._until:
                self._end(events, EndReason.TIMED_OUT, text="the session was not resumed in time")  # RS-102
            case ConnectionState.RESUMING:
                self._lose_carrier(events, "no answer to RESUME", now)
            case ConnectionState.CLOSING if now >= self._until:
                self._end(events, EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "the client did not close the carrier")
            case _:
                self._end_if_drained(events)
                if self._state is _DRAINING and now >= self._until:
                    self._end_drain(events, "streams were open after the drain timeout")
                elif self._state is not ConnectionState.ENDED:
                    self._live_timeout(events, now)
        return events

    def _live_timeout(self, events: list[Event], now: float) -> None:
        if now >= max(self._heard, self._silence_reported) + self._lifetime:
            # RS-107, RS-110, RX-82.
            if not self._config.close_when_silent:
                self._silence_reported = now
                events.append(PeerFellSilent(now - self._heard))
            elif not self._lose_carrier(events, "the peer is silent", now):
                text = "nothing heard for the lifetime"
                self._end(events, EndReason.TIMED_OUT, ErrorCode.CONNECTION_ERROR, text, tell=True)
        if now >= self._keepalive_at and self._state in LIVE:
            self._keepalive_at = now + self._config.keepalive_interval  # RS-105, RX-80: one, however many were missed
            self.send_keepalive()

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Report that the carrier is gone. It ends the connection, or suspends the session (RS-71, RS-102, RX-60)."""
        events = self.take_events()
        self._lost(events, reason, now)
        return events

    def _lost(self, events: list[Event], reason: str, now: float) -> None:
        if self._state is ConnectionState.CLOSING:
            self._end(events, EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, _DRAINED)
        elif self._state not in DEAF and not self._lose_carrier(events, reason, now):
            self._end(events, EndReason.LOST, text=reason or "the peer ended the connection")

    def _lose_carrier(self, events: list[Event], text: str, now: float) -> bool:
        """Suspend the session, if there is one that can be resumed in this state; return whether there is."""
        return False

    def drain(self, now: float) -> list[Event]:
        """Stop new requests in both directions. The connection ends with its last stream; RSocket announces it (RS-31).

        Until then, requests of the peer are answered with REJECTED, and fire-and-forget requests are dropped.
        A connection that is not set up, or has no carrier, ends at once.

        Ask for `next_deadline` after each call that may have ended a stream: it is in the past once the last stream has ended.
        """
        events = self.take_events()
        match self._state:
            case ConnectionState.OPENING | ConnectionState.OPEN:
                self._drain(events, EndReason.CLOSED, now)
            case ConnectionState.AWAITING_SETUP | ConnectionState.DECIDING:
                self._end_undecided(events)
            case ConnectionState.SUSPENDED | ConnectionState.RESUMING:
                self._end(events, EndReason.CLOSED, ErrorCode.CONNECTION_ERROR, tell=True)  # RS-99
            case _:
                pass
        return events

    def _drain(self, events: list[Event], ends_by: EndReason, now: float) -> None:
        self._move(ConnectionInput.DRAIN)
        self._ended_by = ends_by
        self._now = now
        self._until = now + self._config.drain_timeout
        for stream_id in self._waiting:  # RS-31: they would be new requests
            events.append(StreamFailed(stream_id, ErrorCode.REJECTED, b"the connection is draining", FailedBy.LOCAL))
        self._waiting.clear()
        self._end_if_drained(events)

    def _end_if_drained(self, events: list[Event]) -> None:
        if self._state is _DRAINING and not (self._streams or self._in_turn):
            self._end_drain(events, _DRAINED)

    @abstractmethod
    def _end_drain(self, events: list[Event], text: str) -> None:
        """End a connection that drains."""

    @abstractmethod
    def _end_undecided(self, events: list[Event]) -> None:
        """Server: end a connection whose SETUP has not come, or is not accepted."""

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """End the connection now: an ERROR frame with `code` (0 for CONNECTION_CLOSE) is queued, and all streams fail."""
        events = self.take_events()
        if self._state is not ConnectionState.ENDED:
            self._end(events, EndReason.CLOSED, code or ErrorCode.CONNECTION_CLOSE, reason, tell=True)
        return events

    def _fail(self, events: list[Event], rule: str, text: str) -> None:
        """End the connection because the peer broke a rule: ERROR[CONNECTION_ERROR] (RS-30, RX-26)."""
        self._end(events, EndReason.PROTOCOL, ErrorCode.CONNECTION_ERROR, text, rule, tell=True)

    def _refuse(self, events: list[Event], code: int, text: str, rule: str = "") -> None:
        """Server: refuse the first frame; the ERROR frame is sent, then the carrier is closed (RS-47, RX-34)."""
        self._end(events, EndReason.REFUSED, code, text, rule, tell=True)

    def _end(
        self,
        events: list[Event],
        reason: EndReason,
        code: int = 0,
        text: str = "",
        rule: str = "",
        *,
        tell: bool = False,
    ) -> None:
        """End the connection; `tell` the peer with an ERROR frame of this code."""
        if tell and self._state is not ConnectionState.SUSPENDED:
            self._put_error(code, text.encode()[:_MAX_TEXT])
        self._move(ConnectionInput.END)
        # RS-30, RS-71, RX-26, RX-60: requests fail, responders are cancelled. The application has not seen an incomplete request.
        shown = code or ErrorCode.CONNECTION_ERROR
        for stream_id, stream in self._streams.items():
            if stream.requester:
                events.append(StreamFailed(stream_id, shown, text.encode(), FailedBy.CONNECTION))
            elif stream.heard_of:
                events.append(StreamCancelled(stream_id))
        events += [StreamFailed(stream_id, shown, text.encode(), FailedBy.CONNECTION) for stream_id in self._waiting]
        self._streams.clear()
        self._waiting.clear()
        self._in_turn.clear()
        self.backlog = self._peer_streams = self._gathered = 0
        self._forget_unread()
        self._forget_session()
        events.append(ConnectionEnded(reason, code, text, rule, self._fault if rule else 0))

    def _forget_session(self) -> None:
        """Give back what a session without a carrier needs."""

    def take_events(self) -> list[Event]:
        """Return the events of the owner's calls, and forget them."""
        events, self._events = self._events, []
        return events

    @property
    def has_output(self) -> bool:
        """Whether output is queued, or fragments wait in the backlog."""
        return bool(self._out or self._control or self.backlog)

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the queued output: pieces to join for a byte stream, otherwise one frame for each message. Frames of stream 0 go first.

        Fragments stay in the backlog if there is no `room` for them.
        """
        if self.backlog:
            self._take_turns()
        out, self._out = self._out, []
        if self._control:
            out = self._control + out
            self._control = []
        return out

    def credit(self, stream_id: int) -> int:
        """Return how many payloads may be sent now on this stream; 0 if it is not open for sending."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else min(stream.credit, MAX_U31)

    def credits(self) -> tuple[int, int]:
        """Return how many payloads this side may send now, and how many the peer may send, on all streams together.

        The answer of a request-response needs no credit and is left out. Takes as long as there are streams.
        """
        streams = [stream for stream in self._streams.values() if stream.kind is not Interaction.REQUEST_RESPONSE]
        return sum(min(each.credit, MAX_U31) for each in streams), sum(min(each.demand, MAX_U31) for each in streams)

    def has_stream(self, stream_id: int) -> bool:
        """Return whether the caller has seen the stream and it is live.

        A fire-and-forget request counts only while it waits for a lease.
        """
        stream = self._streams.get(stream_id)
        return stream_id in self._waiting if stream is None else stream.heard_of

    def stream_ids(self) -> set[int]:
        """Return the ids of the live streams that the caller has seen, and of those that wait for a lease."""
        return live_ids(self._streams, self._waiting)

    def is_cut(self, stream_id: int) -> bool:
        """Return whether frames of a stream wait for room; its later frames wait behind them."""
        return stream_id in self._in_turn

    def _put_in_turn(self, stream_id: int, frames: Iterable[bytes]) -> None:
        """Queue frames of a stream in order; if `room` is bounded, frames of other streams may go between them (RS-82).

        The first one goes at once: the peer has to know of a request before REQUEST_N or CANCEL.
        """
        later = deque(frames)
        waiting = self._in_turn.get(stream_id)
        if waiting is None and self.room == math.inf:
            for frame in later:
                self._put(frame)
            return
        if waiting is not None:
            waiting += later
        else:
            self._put(later.popleft())
            if later:
                self._in_turn[stream_id] = later
        self.backlog += sum(map(len, later))

    def _put_behind(self, stream_id: int, frame: bytes) -> None:
        """Queue a frame of a stream behind those that wait."""
        if stream_id in self._in_turn:
            self._put_in_turn(stream_id, (frame,))
        else:
            self._put(frame)

    def _take_turns(self) -> None:
        """Queue a frame of each stream in turn, as long as there is room."""
        if self._state in _WITHOUT_CARRIER:
            return
        waiting = self._in_turn
        while waiting and self.room > 0:
            stream_id, frames = waiting.popitem(last=False)
            frame = frames.popleft()
            if frames:
                waiting[stream_id] = frames
            self.room -= len(frame)
            self.backlog -= len(frame)
            self._put(frame)

    def _drop_turn(self, stream_id: int) -> None:
        """Drop the frames of a stream that wait: the peer or this side has given the stream up (RS-83)."""
        self.backlog -= sum(map(len, self._in_turn.pop(stream_id, ())))

    @abstractmethod
    def _put(self, frame: bytes) -> None:
        """Queue a frame of a stream."""

    def _put_own(self, frame: bytes) -> None:
        """Queue a frame of a stream that carries no payload of the owner."""
        self.own_bytes += len(frame)
        self._put(frame)

    def _put_last(self, stream_id: int, frame: bytes) -> None:
        """Queue the frame that ends this direction, which carries no payload of the owner."""
        self.own_bytes += len(frame)
        self._put_behind(stream_id, frame)

    @abstractmethod
    def _put_error(self, code: int, text: bytes) -> None:
        """Queue an ERROR of stream 0 behind all frames, since the peer ignores frames after it."""

    @abstractmethod
    def _cancel_frame(self, stream_id: int) -> bytes:
        """Return a requester's CANCEL."""

    @abstractmethod
    def _error_frame(self, stream_id: int, code: int, data: bytes) -> bytes:
        """Return an ERROR of a stream."""

    def _refusal(self) -> bytes | None:
        """Return why a request of the peer cannot be served, if so; it uses up a lease."""
        if self._leasing and not self._granted.take(self._now):
            return b"no lease for this request"  # RS-134, RX-67
        if self._state in (_DRAINING, ConnectionState.CLOSING):
            return b"the connection is draining"  # RS-31
        if self._peer_streams >= self._config.max_streams:
            return b"too many streams are open"
        return None

    def _gather(self, stream_id: int, stream: LiveStream, part: Payload, events: list[Event]) -> bool:
        """Add a fragment. Return false if the payload became too large and the stream has ended (RS-85, RX-74)."""
        gathering = stream.gathering
        assert gathering is not None
        size = part.size
        if len(gathering) + size > self._config.max_payload_size:
            self._give_up(stream_id, stream, b"a payload above max_payload_size", events)
            return False
        if self._gathered + size > self._config.max_reassembly:
            self._give_up(stream_id, stream, b"unfinished payloads above max_reassembly", events)
            return False
        self._gathered += size
        gathering.add(part)
        return True

    def _give_up(self, stream_id: int, stream: LiveStream, text: bytes, events: list[Event]) -> None:
        """End a stream because the peer passed a limit: a requester cancels, a responder sends INVALID (RS-77, RS-85, RX-62, RX-74)."""
        heard_of = stream.heard_of
        self._drop_turn(stream_id)
        if stream.requester:
            self._put_own(self._cancel_frame(stream_id))
            self._advance(stream_id, stream, StreamInput.SEND_CANCEL)
        else:
            if stream.kind is not _FNF:
                self._put_own(self._error_frame(stream_id, ErrorCode.INVALID, text))
            self._advance(stream_id, stream, StreamInput.SEND_ERROR)
        if heard_of:
            events.append(StreamFailed(stream_id, ErrorCode.INVALID, text, FailedBy.LOCAL))

    def _advance(self, stream_id: int, stream: LiveStream, cause: StreamInput) -> None:
        state = stream.state = self.stream_table[stream.state, cause]
        if state is _ENDED:
            del self._streams[stream_id]
            stream.credit = stream.demand = 0
            if not stream.requester:
                self._peer_streams -= 1
        elif state is _SENDING:
            stream.demand = 0
        else:
            stream.credit = 0
            return
        if stream.gathering is not None:  # nothing further is taken from the peer
            self._gathered -= len(stream.gathering)
            stream.gathering = None

    def _other_input(self) -> LocalProtocolError:
        carrier, call = ("of messages", "receive_message") if self._framed else ("of bytes", "receive_data")
        return LocalProtocolError(f"this core was made for a carrier {carrier}; call {call}")

    def resume(self, *, framed: bool, now: float) -> None:
        """Client: resume on a new carrier, after `SessionSuspended`; RSocket only (RX-60)."""
        raise LocalProtocolError("ReactiveSocket has no resumption", rule="RX-60")

    def resume_on(self, carrier: Any, now: float) -> None:
        """Server: take over the carrier and the unread input of the core that reported `ResumeReceived`; RSocket only (RX-60)."""
        raise LocalProtocolError("ReactiveSocket has no resumption", rule="RX-60")

    def send_request_response(self, payload: Payload, now: float) -> int:
        """Request one response and return the stream's id.

        With leases, the request waits in order until a lease allows it (RS-133, RX-66). Cancelling it before that sends nothing.

        Raises:
            LocalProtocolError: the connection drains or has ended, a server has not accepted SETUP, too many requests wait for a lease, or
                ReactiveSocket's payload is above ``max_frame_size``, since its requests cannot be fragmented (RX-70).
            StreamIdsExhausted: every stream id has been used; open a new connection.
            TypeError: data or metadata is not bytes.
        """
        return self._request(_RESPONSE, payload, 1, now)

    def send_fire_and_forget(self, payload: Payload, now: float) -> int:
        """Send a request without a response (RS-62, RX-51). The id is of use only to cancel it while it waits for a lease.

        Raises:
            LocalProtocolError, StreamIdsExhausted, TypeError: as `send_request_response`.
        """
        return self._request(_FNF, payload, 1, now)

    def send_request_stream(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream; `n` payloads (1 to 2**31-1, or 0 in ReactiveSocket) may come until `send_request_n`.

        Raises:
            LocalProtocolError, StreamIdsExhausted, TypeError: as `send_request_response`, or `n` is out of range (RS-74, RX-63).
        """
        return self._request(_STREAM, payload, n, now)

    def send_request_subscription(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream that has no end of its own (RX-53), otherwise as `send_request_stream`.

        Raises:
            LocalProtocolError: also in RSocket, which has no subscriptions.
        """
        return self._request(_SUBSCRIPTION, payload, n, now)

    def send_request_channel(self, payload: Payload, n: int, now: float, *, complete: bool = False) -> int:
        """Open a channel with its first payload; `complete`: it is also the last.

        Raises:
            LocalProtocolError, StreamIdsExhausted, TypeError: as `send_request_stream`. ReactiveSocket's first payload may be larger than a
                frame (RX-54).
        """
        return self._request(_CHANNEL, payload, n, now, complete)

    @abstractmethod
    def _request(self, kind: Interaction, payload: Payload, n: int, now: float, complete: bool = False) -> int: ...

    def _wait_for_lease(self, request: PendingRequest, rule: str) -> int:
        """Queue a request until there is a lease: first come, first served (RS-54, RX-38)."""
        if len(self._waiting) >= self._config.max_pending:
            text = f"{len(self._waiting)} requests wait for a lease (see max_pending)"
            raise LocalProtocolError(text, rule=rule)
        stream_id = self._ids.take(self._streams, self._waiting, self._in_turn)
        self._waiting[stream_id] = request
        return stream_id

    @abstractmethod
    def _start(self, stream_id: int, kind: Interaction, payload: Payload, n: int, complete: bool) -> None:
        """Queue a request."""

    @abstractmethod
    def send_request_n(self, stream_id: int, n: int) -> None:
        """Allow the peer `n` more payloads. Ignored if it has completed or the stream is over."""

    @abstractmethod
    def send_payload(self, stream_id: int, payload: Payload, *, complete: bool = False) -> None:
        """Send an item, or the response of a request-response, which completes the stream."""

    @abstractmethod
    def send_complete(self, stream_id: int) -> None:
        """End this direction of a stream; needs no credit."""

    @abstractmethod
    def send_error(self, stream_id: int, code: int = ErrorCode.APPLICATION_ERROR, data: bytes = b"") -> None:
        """End a stream in both directions with an error."""

    @abstractmethod
    def send_cancel(self, stream_id: int) -> None:
        """Requester: end the stream. Responder of a channel: accept no more payloads. Does nothing if the stream is over."""

    @abstractmethod
    def send_metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; needs neither lease nor credit."""

    @abstractmethod
    def send_lease(self, ttl: float, n: int, now: float, metadata: bytes | None = None) -> None:
        """Allow the peer `n` requests within `ttl` seconds. This replaces the earlier lease."""

    @abstractmethod
    def send_keepalive(self, data: bytes = b"") -> None:
        """Send a KEEPALIVE that the peer answers; the answer is reported as `KeepaliveReceived`. A client does so by itself."""

    @abstractmethod
    def send_extension(self, stream_id: int, extended_type: int, data: bytes, *, ignorable: bool = True) -> None:
        """Send an EXT frame. A peer that does not know the type drops it if it is `ignorable`."""
