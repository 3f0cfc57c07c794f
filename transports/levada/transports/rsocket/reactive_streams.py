"""The calls that RSocket and ReactiveSocket share, so that one set of actors drives both.

Both are one connection with many Reactive Streams: requests, and payloads as far as the other side has granted credit.
The dialects differ in frames and rules, so each has its own core; the calls, the events and the counters are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import attrs

from levada.framework.errors import LocalProtocolError
from levada.transports.core import BytesInput, Core, MessagesInput
from levada.transports.rsocket.codes import ErrorCode
from levada.transports.rsocket.config import MAX_U31, CoreConfig
from levada.transports.rsocket.events import Event
from levada.transports.rsocket.payload import Payload
from levada.transports.rsocket.state import ConnectionState
from levada.transports.rsocket.streams import PendingRequest, Stream, live_ids

__all__ = ["CoreStatistics", "ReactiveStreamsCore"]


@attrs.frozen(kw_only=True)
class CoreStatistics:
    """What a core holds now, a snapshot."""

    streams: int
    """Live ones, of both sides."""
    peer_streams: int
    """Live ones that the peer opened."""
    requests_waiting: int
    """For a lease."""
    octets_gathered: int
    """Of unfinished payloads."""
    octets_unread: int
    """Received and not understood yet: part of a frame, or what waits for `accept_setup`."""
    octets_unsent: int
    """Queued for `data_to_send`."""
    octets_kept: int
    """Of sent frames, for a resumption."""


class ReactiveStreamsCore(Core[Event, bytes], BytesInput[Event], MessagesInput[Event], ABC):
    """One side of a connection, requester and responder at once; `RSocketCore` describes the arguments.

    A core of a byte stream takes `receive_data`, a core of a carrier of messages (`framed`) takes `receive_message`.
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
        self._streams: dict[int, Stream] = {}
        self._waiting: OrderedDict[int, PendingRequest] = OrderedDict()  # for a lease
        self._peer_streams = 0
        self._gathered = 0  # bytes of all unfinished payloads

    @property
    def state(self) -> ConnectionState:
        """Where the connection stands; only the dialect's table of transitions moves it."""
        return self._state

    def take_events(self) -> list[Event]:
        """Return the events that calls of the owner left behind."""
        events, self._events = self._events, []
        return events

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the queued output: pieces to join for a byte stream, else one frame for each message. Frames of stream 0 go first."""
        out, self._out = self._out, []
        if self._control:
            out = self._control + out
            self._control = []
        return out

    def credit(self, stream_id: int) -> int:
        """Return how many payloads may be sent now on this stream; 0 if it is not open for sending."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else min(stream.credit, MAX_U31)

    def has_stream(self, stream_id: int) -> bool:
        """Return whether the stream is live and the caller has heard of it; a fire-and-forget request is only while it waits."""
        stream = self._streams.get(stream_id)
        return stream_id in self._waiting if stream is None else stream.heard_of

    def stream_ids(self) -> set[int]:
        """Return the ids of the live streams that the caller has heard of, those that wait for a lease included."""
        return live_ids(self._streams, self._waiting)

    def _octets_unsent(self) -> int:
        return sum(map(len, self._control)) + sum(map(len, self._out))

    def _other_input(self) -> LocalProtocolError:
        carrier, call = ("of messages", "receive_message") if self._framed else ("of bytes", "receive_data")
        return LocalProtocolError(f"this core was made for a carrier {carrier}; call {call}")

    @property
    @abstractmethod
    def missing(self) -> int:
        """Bytes that a frame lacks whose beginning has come; 0 if there is none, or on a carrier of messages."""

    @abstractmethod
    def statistics(self) -> CoreStatistics:
        """Return the present counts."""

    @abstractmethod
    def touch(self, now: float) -> None:
        """Do not judge the peer by its silence until now: this side has not been reading."""

    @abstractmethod
    def accept_setup(self, now: float) -> None:
        """Server: accept the client, after `SetupReceived`; `take_events` has what it sent in the meantime."""

    @abstractmethod
    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived`."""

    @abstractmethod
    def resume(self, *, framed: bool, now: float) -> None:
        """Client: begin on a new carrier, after `SessionSuspended`."""

    @abstractmethod
    def resume_on(self, carrier: Any, now: float) -> None:
        """Server: take over the carrier of the core that reported `ResumeReceived`, and what came on it; that core is done."""

    @abstractmethod
    def send_request_response(self, payload: Payload, now: float) -> int:
        """Request one answer and return the stream's id."""

    @abstractmethod
    def send_fire_and_forget(self, payload: Payload, now: float) -> int:
        """Send a request without an answer; the id is of use only to cancel it while it waits for a lease."""

    @abstractmethod
    def send_request_stream(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream; `n` payloads may come until `send_request_n`."""

    @abstractmethod
    def send_request_subscription(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream that has no end of its own."""

    @abstractmethod
    def send_request_channel(self, payload: Payload, n: int, now: float, *, complete: bool = False) -> int:
        """Open a channel with its first payload; `complete`: there will be no other one."""

    @abstractmethod
    def send_request_n(self, stream_id: int, n: int) -> None:
        """Let the peer send `n` payloads more; ignored if it has completed or the stream is over."""

    @abstractmethod
    def send_payload(self, stream_id: int, payload: Payload, *, complete: bool = False) -> None:
        """Send an item, or the answer of a request-response, which it completes."""

    @abstractmethod
    def send_complete(self, stream_id: int) -> None:
        """End this direction of a stream; needs no credit."""

    @abstractmethod
    def send_error(self, stream_id: int, code: int = ErrorCode.APPLICATION_ERROR, data: bytes = b"") -> None:
        """End a stream in both directions by an error of this side."""

    @abstractmethod
    def send_cancel(self, stream_id: int) -> None:
        """Requester: end the stream. Responder of a channel: take no further payloads. Harmless if it is over."""

    @abstractmethod
    def send_metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; needs neither lease nor credit."""

    @abstractmethod
    def send_lease(self, ttl: float, n: int, now: float, metadata: bytes | None = None) -> None:
        """Allow the peer `n` requests within `ttl` seconds, instead of the earlier allowance."""

    @abstractmethod
    def send_keepalive(self, data: bytes = b"") -> None:
        """Ask the peer for a sign of life, which comes as `KeepaliveReceived`; a client does so by itself."""

    @abstractmethod
    def send_extension(self, stream_id: int, extended_type: int, data: bytes, *, ignorable: bool = True) -> None:
        """Send an EXT frame; a peer that does not know the type drops it if `ignorable`."""
