"""The methods that RSocket and ReactiveSocket share, so that the same actors drive both.

Both run many Reactive Streams on one connection: requests, and as many payloads as the other side has granted credit for.
The dialects differ in frames and rules, so each has its own core; methods, events and counters are the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Final

import attrs

from levada.framework.errors import LocalProtocolError
from levada.transports.core import BytesInput, Core, MessagesInput
from levada.transports.rsocket.codes import ErrorCode
from levada.transports.rsocket.config import MAX_U31, CoreConfig
from levada.transports.rsocket.events import Event, Interaction
from levada.transports.rsocket.payload import Payload
from levada.transports.rsocket.state import ConnectionState
from levada.transports.rsocket.streams import LiveStream, PendingRequest, live_ids

__all__ = ["CoreStatistics", "ReactiveStreamsCore"]

_WITHOUT_CARRIER: Final = (ConnectionState.SUSPENDED, ConnectionState.RESUMING)


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

    def __init__(self, config: CoreConfig, *, client: bool, framed: bool, now: float) -> None:
        self._config = config
        self._client = client
        self._framed = framed
        self._now = now
        self._state = ConnectionState.OPENING if client else ConnectionState.AWAITING_SETUP
        self._events: list[Event] = []  # of the owner's calls
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

    @property
    def state(self) -> ConnectionState:
        """The state of the connection."""
        return self._state

    def take_events(self) -> list[Event]:
        """Return the events of the owner's calls, and forget them."""
        events, self._events = self._events, []
        return events

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

    def _drop_turns(self) -> None:
        """Drop all waiting frames: the connection has ended."""
        self._in_turn.clear()
        self.backlog = 0

    @abstractmethod
    def _put(self, frame: bytes) -> None:
        """Queue a frame of a stream."""

    def _bytes_unsent(self) -> int:
        return sum(map(len, self._control)) + sum(map(len, self._out)) + self.backlog

    def _other_input(self) -> LocalProtocolError:
        carrier, call = ("of messages", "receive_message") if self._framed else ("of bytes", "receive_data")
        return LocalProtocolError(f"this core was made for a carrier {carrier}; call {call}")

    @property
    @abstractmethod
    def missing(self) -> int:
        """Bytes still missing from a frame that has begun to arrive; 0 if there is none, or on a carrier of messages."""

    @abstractmethod
    def statistics(self) -> CoreStatistics:
        """Return the present counts."""

    @abstractmethod
    def touch(self, now: float) -> None:
        """Count the peer's silence from now on: this side has not been reading."""

    @abstractmethod
    def accept_setup(self, now: float) -> None:
        """Server: accept the client, after `SetupReceived`. `take_events` has the events of its later frames."""

    @abstractmethod
    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived`."""

    @abstractmethod
    def resume(self, *, framed: bool, now: float) -> None:
        """Client: resume on a new carrier, after `SessionSuspended`."""

    @abstractmethod
    def resume_on(self, carrier: Any, now: float) -> None:
        """Server: take over the carrier and the unread input of the core that reported `ResumeReceived`; that core has ended."""

    @abstractmethod
    def send_request_response(self, payload: Payload, now: float) -> int:
        """Request one response and return the stream's id."""

    @abstractmethod
    def send_fire_and_forget(self, payload: Payload, now: float) -> int:
        """Send a request without a response. The id is of use only to cancel it while it waits for a lease."""

    @abstractmethod
    def send_request_stream(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream; `n` payloads may come until `send_request_n`."""

    @abstractmethod
    def send_request_subscription(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream that has no end of its own."""

    @abstractmethod
    def send_request_channel(self, payload: Payload, n: int, now: float, *, complete: bool = False) -> int:
        """Open a channel with its first payload; `complete`: it is also the last."""

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
