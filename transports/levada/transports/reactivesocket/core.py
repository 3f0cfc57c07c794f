"""ReactiveSocket without I/O: bytes and calls in, events and bytes out.

It has the methods and events of `levada.transports.rsocket.core.RSocketCore`, so that the same actors drive both. The differences are here
and in `connection`, `frames` and `state`, each marked with the id of its rule.  The way of a frame:

* `receive_data` finds the frames (RX-3), `_receive` parses one and drops or refuses wrong ones (RX-9, RX-12), and a function of
  `_HANDLERS` applies it. A frame that makes no sense in its place is ignored (RX-99): that is each bare ``return`` there.
* Payloads of every interaction arrive in `_take` and leave through `send_payload`. Both depend on what the C flag carries (RX-58).
* A stream lives in `_streams` from its first frame to its last; a request that waits for a lease is in `_waiting` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from levada.framework.errors import LocalProtocolError
from levada.transports.reactivesocket import frames as f
from levada.transports.reactivesocket.codes import STREAM_CODES, ErrorCode
from levada.transports.reactivesocket.connection import ConnectionCore, Parsed
from levada.transports.reactivesocket.frames import FrameError
from levada.transports.reactivesocket.state import STREAM, ConnectionState, StreamInput, StreamState
from levada.transports.rsocket.config import CUT_INTO, MAX_U31, CoreConfig
from levada.transports.rsocket.events import (
    CreditGranted,
    Event,
    ExtensionReceived,
    FailedBy,
    Interaction,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.fragments import Gathering, split
from levada.transports.rsocket.payload import Payload, not_bytes
from levada.transports.rsocket.reactive_streams import CoreStatistics
from levada.transports.rsocket.streams import LiveStream, PendingRequest, StreamIds, add_credit

__all__ = ["ReactiveSocketCore"]

_ANSWER, _FNF, _STREAM, _CHANNEL, _SUBSCRIPTION = (
    Interaction.REQUEST_RESPONSE, Interaction.FIRE_AND_FORGET, Interaction.REQUEST_STREAM, Interaction.REQUEST_CHANNEL,
    Interaction.REQUEST_SUBSCRIPTION,
)  # fmt: skip
_BOTH, _SENDING, _RECEIVING = StreamState.BOTH, StreamState.SENDING, StreamState.RECEIVING
# By `Interaction`, whose numbers are the places here: an enum's hash costs more than all the rest of a look-up.
_FRAME_OF: Final = (f.REQUEST_RESPONSE, f.REQUEST_FNF, f.REQUEST_STREAM, f.REQUEST_CHANNEL, f.REQUEST_SUB)
_INTERACTION_OF: Final = {kind: Interaction(at) for at, kind in enumerate(_FRAME_OF)}


class ReactiveSocketCore(ConnectionCore):
    """One side of a connection, requester and responder at once.

    A client's core has its SETUP queued from the start (RX-30), and without leases requests may follow at once (RX-37).

    The peer's mistakes never raise: the ERROR frame is queued and the last event is `ConnectionEnded`; send the queue, then
    close the carrier.  A caller's mistake raises `LocalProtocolError` and changes nothing.  After `ConnectionEnded`, bytes of the
    peer are ignored (RX-7) and requests and payloads raise.

    Args:
        config: a `CoreConfig` or a `ReactiveSocketConfig`.
        client: this side opened the connection.
        framed: the carrier keeps message boundaries (WebSocket), so frames have no length field (RX-2).
        now: seconds, on any clock that does not jump; the same clock for every `now`.
        random_bytes: not used, since this dialect has no tokens; here for the signature of `RSocketCore`.
        sessions: likewise.

    Raises:
        ConfigurationError: SETUP does not fit into a frame.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        client: bool,
        framed: bool,
        now: float,
        random_bytes: Callable[[int], bytes] | None = None,
        sessions: object = None,
    ) -> None:
        super().__init__(config, client=client, framed=framed, now=now)
        # RX-75: 64 at least, since below that a fragment may have no room for anything.
        self._max_out = max(64, min(config.fragment_size or config.max_frame_size, config.max_frame_size))
        self._fragment = min(self._max_out, config.fragment_size or CUT_INTO)
        self._ids = StreamIds(2 if client else 1, reuse=True)  # RX-14, RX-16
        self._peer_parity = 1 if client else 0  # RX-14
        self._highest = 0  # RX-16: the only thing remembered of ended streams

    def statistics(self) -> CoreStatistics:
        """Return the present counts."""
        return CoreStatistics(
            streams=len(self._streams),
            peer_streams=self._peer_streams,
            requests_waiting=len(self._waiting),
            bytes_gathered=self._gathered,
            bytes_unread=len(self._rest),
            bytes_unsent=self._bytes_unsent(),
            bytes_kept=0,
        )

    def _receive(
        self, kind: int, flags: int, stream_id: int, data: bytes, at: int, end: int, events: list[Event]
    ) -> None:
        if self._state is ConnectionState.AWAITING_SETUP:
            return self._receive_first(kind, flags, stream_id, data, at, end, events)
        try:
            parsed = f.parse(kind, flags, data, at, end)
        except FrameError as error:
            if kind == f.SETUP:
                return None  # RX-105, RX-108
            if kind == f.EXT and stream_id in self._config.extensions:
                # RX-20: the extended type is in the place of the stream id.
                events.append(ExtensionReceived(0, stream_id, data[at:end], bool(flags & f.METADATA)))
                return None
            # RX-12: a metadata length that cannot be. RX-9: not understood, and may be ignored.
            if error.rule == "RX-12" or flags & f.IGNORE:
                return None
            return self._fail("RX-9", error.detail, events)
        return _HANDLERS[kind](self, kind, stream_id, flags, parsed, events)

    def _on_request(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        """REQUEST_RESPONSE, _FNF, _STREAM or _SUB; F means nothing on them (RX-70)."""
        if not self._may_open(stream_id):
            return
        numbers, metadata, data = parsed
        interaction = _INTERACTION_OF[kind]
        if not self._admit(stream_id, interaction, events):
            return
        n = add_credit(0, numbers[0]) if numbers else 0
        if interaction is not _FNF:
            credit = 1 if interaction is _ANSWER else n
            self._streams[stream_id] = LiveStream(interaction, False, _SENDING, credit, 0)
            self._peer_streams += 1
        events.append(RequestReceived(interaction, stream_id, Payload(data, metadata), n, True))

    def _on_channel(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        """REQUEST_CHANNEL: opens a channel, or brings a further payload of one (RX-54)."""
        numbers, metadata, data = parsed
        stream = self._streams.get(stream_id)
        if stream is not None:
            # RX-100: on another live stream it is ignored, and behind C. RX-57: an initial n on a further one is not added.
            if stream.kind is _CHANNEL and not stream.requester and stream.state is _BOTH:
                self._take(stream, stream_id, flags, metadata, data, events)
            return
        # RX-57, RX-109: without initial n it may be a late payload of an ended channel.
        if not self._may_open(stream_id) or not (numbers or stream_id > self._highest):
            return
        if not self._admit(stream_id, _CHANNEL, events):
            return
        credit = add_credit(0, numbers[0]) if numbers else 0
        stream = self._streams[stream_id] = LiveStream(_CHANNEL, False, _BOTH, credit, 0)
        self._peer_streams += 1
        if flags & f.FOLLOWS and not flags & f.COMPLETE:  # RX-71, RX-72
            stream.gathering = Gathering(is_request=True, complete=False)
            self._gather(stream, stream_id, metadata, data, events)
        else:
            self._opened(stream, stream_id, Payload(data, metadata), bool(flags & f.COMPLETE), events)

    def _opened(
        self, stream: LiveStream, stream_id: int, payload: Payload, complete: bool, events: list[Event]
    ) -> None:
        """Report a channel whose first payload is complete.

        The first payload always exists, even if it is empty (RX-54), like the response of a request-response (RX-58).
        """
        if complete:
            self._move(stream, stream_id, StreamInput.RECEIVE_COMPLETE)
        events.append(RequestReceived(_CHANNEL, stream_id, payload, stream.credit, complete))

    def _may_open(self, stream_id: int) -> bool:
        """Whether a request may have this id: not 0, of the peer's parity (RX-17), not in use (RX-100)."""
        return stream_id != 0 and stream_id & 1 == self._peer_parity and stream_id not in self._streams

    def _admit(self, stream_id: int, interaction: Interaction, events: list[Event]) -> bool:
        """Record a request of the peer. Return false if it is refused."""
        self._accepted(events)  # RX-40
        if stream_id > self._highest:
            self._highest = stream_id
        if self._leases and not self._granted.take(self._now):
            reason = b"no lease for this request"  # RX-67
        elif self._state is ConnectionState.DRAINING:
            reason = b"the connection is about to close"
        elif self._peer_streams >= self._config.max_streams:
            reason = b"too many streams"
        else:
            return True
        if interaction is not _FNF:  # RX-51, RX-67: never answered
            self._send_error(stream_id, ErrorCode.REJECTED, reason)  # RX-24
        return False

    def _on_response(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or not stream.requester:
            return  # RX-103
        if self._state is ConnectionState.OPENING:
            self._accepted(events)  # RX-40
        _, metadata, data = parsed
        self._take(stream, stream_id, flags, metadata, data, events)

    def _take(
        self, stream: LiveStream, stream_id: int, flags: int, metadata: bytes | None, data: bytes, events: list[Event]
    ) -> None:
        """Take a payload of the peer, a fragment of a payload, or the end of its direction without a payload."""
        complete = flags & f.COMPLETE
        answers = stream.kind is _ANSWER
        # RX-58: a C frame with data or metadata is a payload too; without C, and as an answer, it always is one.
        delivers = not complete or data or metadata is not None or answers
        gathering = stream.gathering
        # RX-62. A payload in fragments costs 1 (RX-61), and is refused before the first of them is kept.
        if delivers and not stream.demand and (gathering is None or not gathering.is_request):
            return self._give_up(stream, stream_id, b"a payload without credit", events)
        if gathering is not None or (flags & f.FOLLOWS and not complete):
            if not self._gather(stream, stream_id, metadata, data, events):
                return None
            if flags & f.FOLLOWS and not complete:  # RX-72: with C, F is ignored
                return None
            payload = self._gathered_payload(stream)
            if gathering is not None and gathering.is_request:
                return self._opened(stream, stream_id, payload, bool(complete), events)
            # RX-72: the whole payload counts, not the last fragment.
            delivers = not complete or payload.data or payload.metadata is not None or answers
        else:
            payload = Payload(data, metadata)
        if not complete and not answers:
            stream.demand -= 1
            events.append(PayloadReceived(stream_id, payload, False))
            return None
        if stream.state is _BOTH and stream.requester:
            # RX-56: the responder's end takes the requester's direction with it.
            events.append(SendingStopped(stream_id))
        if delivers:
            stream.demand -= 1
            events.append(PayloadReceived(stream_id, payload, True))  # RX-50, RX-95: the answer, with C or without
        else:
            events.append(StreamCompleted(stream_id))  # RX-53: of a subscription as well
        by = StreamInput.RESPONDER_COMPLETE if stream.requester else StreamInput.RECEIVE_COMPLETE
        self._move(stream, stream_id, by)
        return None

    def _gather(
        self, stream: LiveStream, stream_id: int, metadata: bytes | None, data: bytes, events: list[Event]
    ) -> bool:
        """Keep a fragment. Return false if it passed a limit and ended the stream."""
        gathering = stream.gathering
        if gathering is None:
            gathering = stream.gathering = Gathering(is_request=False, complete=False)
        size = len(data) + (len(metadata) if metadata is not None else 0)
        # RX-74, before the bytes are kept.
        if len(gathering) + size > self._config.max_payload_size:
            self._give_up(stream, stream_id, b"a payload above max_payload_size", events)
        elif self._gathered + size > self._config.max_reassembly:
            self._give_up(stream, stream_id, b"unfinished payloads above max_reassembly", events)
        else:
            gathering.add(Payload(data, metadata))
            self._gathered += size
            return True
        return False

    def _gathered_payload(self, stream: LiveStream) -> Payload:
        gathering, stream.gathering = stream.gathering, None
        assert gathering is not None
        self._gathered -= len(gathering)
        return gathering.payload()

    def _give_up(self, stream: LiveStream, stream_id: int, reason: bytes, events: list[Event]) -> None:
        """End a stream because the peer broke a rule: a requester cancels, a responder sends INVALID (RX-62, RX-74)."""
        self._drop_turn(stream_id)
        if stream.requester:
            self._put_own(f.encode(f.CANCEL, stream_id))
        else:
            self._send_error(stream_id, ErrorCode.INVALID, reason)
        if stream.heard_of:
            events.append(StreamFailed(stream_id, ErrorCode.INVALID, reason, FailedBy.LOCAL))
        self._move(stream, stream_id, StreamInput.ERROR)

    def _on_request_n(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RX-109
        if stream.requester:
            self._accepted(events)  # RX-40
        n = parsed[0][0]
        # RX-63: 0. RX-56: this side has no more to send. An answer needs no credit.
        if not n or stream.state is _RECEIVING or stream.kind is _ANSWER:
            return
        stream.credit = add_credit(stream.credit, n)  # RX-61
        if stream.heard_of:  # else the request brings it (RX-73)
            events.append(CreditGranted(stream_id, n))

    def _on_cancel(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or not stream.requester:
            self._drop_turn(stream_id)
        if stream is None or stream.requester:
            return  # RX-101
        if stream.heard_of:
            events.append(StreamCancelled(stream_id, parsed[1]))  # RX-59
        self._move(stream, stream_id, StreamInput.CANCEL)  # RX-73: and what was gathered

    def _on_error(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        (code,), metadata, data = parsed
        data = data.removesuffix(b"\0")  # RX-23
        if not stream_id:
            return self._on_connection_error(code, data, events)
        self._drop_turn(stream_id)
        stream = self._streams.get(stream_id)
        # RX-102. RX-57: of a requester's ERRORs only those on a channel make sense.
        if stream is None or not (stream.requester or stream.kind is _CHANNEL):
            return None
        if stream.requester:
            self._accepted(events)  # RX-40
        if code == ErrorCode.REJECTED and not data and metadata is not None:
            data = metadata.removesuffix(b"\0")  # RX-23: where the text puts the reason
        if stream.heard_of:
            events.append(StreamFailed(stream_id, code, data, FailedBy.PEER, metadata))  # RX-25: any code
        self._move(stream, stream_id, StreamInput.ERROR)
        return None

    def send_request_response(self, payload: Payload, now: float) -> int:
        """Request one response and return the stream's id (RX-50).

        With leases, the request waits in order until a lease allows it (RX-66). Cancelling it before that sends nothing.

        Raises:
            LocalProtocolError: the connection drains or has ended, a server has not accepted SETUP, too many requests wait for a lease,
                or the payload is above ``max_frame_size``, since requests cannot be fragmented (RX-70).
            TypeError: data or metadata is not bytes.
        """
        return self._request(_ANSWER, payload, 0, now)

    def send_fire_and_forget(self, payload: Payload, now: float) -> int:
        """Send a request without a response (RX-51). The id is of use only to cancel it while it waits for a lease.

        Raises:
            LocalProtocolError, TypeError: as `send_request_response`.
        """
        return self._request(_FNF, payload, 0, now)

    def send_request_stream(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream; `n` payloads (0 to 2**31-1) may come until `send_request_n` (RX-52, RX-63).

        Raises:
            LocalProtocolError, TypeError: as `send_request_response`, or `n` is out of range.
        """
        return self._request(_STREAM, payload, n, now)

    def send_request_subscription(self, payload: Payload, n: int, now: float) -> int:
        """Request a stream that has no end of its own (RX-53), otherwise like `send_request_stream`."""
        return self._request(_SUBSCRIPTION, payload, n, now)

    def send_request_channel(self, payload: Payload, n: int, now: float, *, complete: bool = False) -> int:
        """Open a channel with its first payload (RX-54), which may be larger than a frame; `complete`: it is also the last.

        Raises:
            LocalProtocolError, TypeError: as `send_request_stream`.
        """
        return self._request(_CHANNEL, payload, n, now, complete)

    def _request(self, kind: Interaction, payload: Payload, n: int, now: float, complete: bool = False) -> int:
        if self._state is not ConnectionState.OPEN and self._state is not ConnectionState.OPENING:
            raise LocalProtocolError(f"no requests while the connection is {self._state.value}", rule="RX-39")
        if not 0 <= n <= MAX_U31:
            raise LocalProtocolError(f"n is {n}, wanted 0 to {MAX_U31}", rule="RX-63")
        if not isinstance(payload.data, bytes) or not (payload.metadata is None or isinstance(payload.metadata, bytes)):
            raise not_bytes(payload)
        if kind is not _CHANNEL:
            size = 20 + len(payload.data) + len(payload.metadata or b"")  # at most
            if size > self._config.max_frame_size:
                detail = f"a request of {size} bytes cannot be fragmented (raise max_frame_size on both sides)"
                raise LocalProtocolError(detail, rule="RX-70")
        # RX-38, RX-66: in order. While requests wait nothing is left of the lease: they are the first to use the next one.
        if self._leases and not self._held.take(now):
            if len(self._waiting) >= self._config.max_pending:
                raise LocalProtocolError(
                    f"{len(self._waiting)} requests wait for a lease (see max_pending)", rule="RX-66"
                )
            stream_id = self._ids.take(self._streams, self._waiting, self._in_turn)
            self._waiting[stream_id] = PendingRequest(kind, payload, n, complete)
            return stream_id
        stream_id = self._ids.take(self._streams, self._waiting, self._in_turn)
        self._open(stream_id, kind, payload, n, complete)
        return stream_id

    def _open(self, stream_id: int, kind: Interaction, payload: Payload, n: int, complete: bool) -> None:
        """Queue a request."""
        if kind is _CHANNEL:
            state = _RECEIVING if complete else _BOTH
            self._send(f.REQUEST_CHANNEL, stream_id, f.INITIAL, f.WORD.pack(n), payload, complete)
        else:
            state = _RECEIVING
            fixed = b"" if kind is _ANSWER or kind is _FNF else f.WORD.pack(n)
            self._out.append(f.encode(_FRAME_OF[kind], stream_id, 0, fixed, payload.metadata, payload.data))
            if kind is _FNF:
                return
        demand = 1 if kind is _ANSWER else add_credit(0, n)
        self._streams[stream_id] = LiveStream(kind, True, state, 0, demand)

    def _lease_came(self) -> None:
        while self._waiting and self._held.take(self._now):
            stream_id, waiting = self._waiting.popitem(last=False)
            self._open(stream_id, waiting.kind, waiting.payload, waiting.n, waiting.complete)

    def send_request_n(self, stream_id: int, n: int) -> None:
        """Allow the peer `n` more payloads; ignored if it has completed or the stream is over.

        On a channel the responder answers the request by this (RX-55).

        Raises:
            LocalProtocolError: `n` is not 1 to 2**31-1, or the connection has ended.
        """
        self._check_live()
        if not 1 <= n <= MAX_U31:
            raise LocalProtocolError(f"n is {n}, wanted 1 to {MAX_U31}", rule="RX-63")
        stream = self._streams.get(stream_id)
        if stream is None:
            waiting = self._waiting.get(stream_id)
            if waiting is not None:
                waiting.n = min(waiting.n + n, MAX_U31)
        # RX-55: none if the channel's requester has completed.
        elif stream.state is not _SENDING and stream.kind is not _ANSWER:
            stream.demand = add_credit(stream.demand, n)
            self._put_own(f.encode(f.REQUEST_N, stream_id, 0, f.WORD.pack(n)))

    def send_payload(self, stream_id: int, payload: Payload, *, complete: bool = False) -> None:
        """Send an item, or the response of a request-response, which completes the stream; `complete`: it is the last of this direction.

        The responder's completion ends a channel in both directions (RX-56).

        Raises:
            LocalProtocolError: no such stream, this direction is complete, or there is no credit (wait for `CreditGranted`).
            TypeError: data or metadata is not bytes.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not stream.credit:
            raise self._cannot_send(stream_id)
        if not isinstance(payload.data, bytes) or not (payload.metadata is None or isinstance(payload.metadata, bytes)):
            raise not_bytes(payload)
        stream.credit -= 1
        if stream.kind is _ANSWER:
            self._send_frames(f.RESPONSE, stream_id, f.COMPLETE, b"", payload)
            self._move(stream, stream_id, StreamInput.RESPONDER_COMPLETE)
            return
        kind = f.REQUEST_CHANNEL if stream.requester else f.RESPONSE
        if not complete:
            self._send_frames(kind, stream_id, 0, b"", payload)
        elif stream.kind is _SUBSCRIPTION:
            self._send_frames(kind, stream_id, 0, b"", payload)
            self._complete(stream, stream_id, told=False)
        else:
            self._send(kind, stream_id, 0, b"", payload, complete=True)
            self._complete(stream, stream_id, told=True)

    def send_complete(self, stream_id: int) -> None:
        """End this direction of a stream; needs no credit. A responder ends a channel in both directions (RX-56).

        A subscription has no such end: the peer gets ERROR[CANCELED] (RX-53).

        Raises:
            LocalProtocolError: no such stream, or this direction is complete already.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and stream.state is not _RECEIVING:
            self._complete(stream, stream_id, told=False)
            return
        waiting = self._waiting.get(stream_id)
        if waiting is None or waiting.kind is not _CHANNEL or waiting.complete:
            raise self._cannot_send(stream_id)
        waiting.complete = True

    def _complete(self, stream: LiveStream, stream_id: int, *, told: bool) -> None:
        if stream.requester:
            kind, by = f.REQUEST_CHANNEL, StreamInput.SEND_COMPLETE
        else:
            kind, by = f.RESPONSE, StreamInput.RESPONDER_COMPLETE
        if stream.kind is _SUBSCRIPTION:
            self._send_error(stream_id, ErrorCode.CANCELED, b"the source has ended")  # RX-53
        elif not told:
            self._put_last(stream_id, f.encode(kind, stream_id, f.COMPLETE))
        stream.credit = 0
        self._move(stream, stream_id, by)

    def _cannot_send(self, stream_id: int) -> LocalProtocolError:
        stream = self._streams.get(stream_id)
        if stream is None and stream_id not in self._waiting:
            return LocalProtocolError(f"no stream {stream_id}")
        if stream is not None and stream.state is _RECEIVING:
            return LocalProtocolError(f"this side has no more to send on stream {stream_id}", rule="RX-56")
        return LocalProtocolError(f"no credit on stream {stream_id} (wait for CreditGranted)", rule="RX-62")

    def send_error(
        self, stream_id: int, code: int = ErrorCode.APPLICATION_ERROR, data: bytes = b"", metadata: bytes | None = None
    ) -> None:
        """End a stream in both directions with an error; a requester can only cancel (RX-57).

        Args:
            data: text in UTF-8; for REJECTED it is also sent as metadata, unless `metadata` is given (RX-23).

        Raises:
            LocalProtocolError: no such stream, not a code of streams, or more data than a frame has room for.
        """
        stream = self._streams.get(stream_id)
        if stream is None and stream_id not in self._waiting:
            raise LocalProtocolError(f"no stream {stream_id}")
        if code not in STREAM_CODES:
            raise LocalProtocolError(f"code {code:#x} is not one of a stream", rule="RX-22")
        if 20 + 2 * len(data) + len(metadata or b"") > self._config.max_frame_size:
            raise LocalProtocolError(f"error data of {len(data)} bytes (see max_frame_size)", rule="RX-70")
        if stream is None or stream.requester:
            self.send_cancel(stream_id)
        else:
            self._send_error(stream_id, code, data, metadata)
            self._move(stream, stream_id, StreamInput.ERROR)

    def send_cancel(self, stream_id: int, metadata: bytes | None = None) -> None:
        """Requester: end the stream. Responder of a channel: accept no more payloads. Does nothing if the stream is over.

        This dialect has no frame for the responder's case: later payloads are dropped, at most as many as the credit already granted.

        Args:
            metadata: for the responder's application (RX-59).

        Raises:
            LocalProtocolError: the responder of anything but a channel; use `send_error`.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            self._waiting.pop(stream_id, None)  # the peer never heard of it
        elif stream.requester:
            self._drop_turn(stream_id)
            self._put_own(f.encode(f.CANCEL, stream_id, metadata=metadata))
            self._move(stream, stream_id, StreamInput.CANCEL)
        elif stream.kind is not _CHANNEL:
            raise LocalProtocolError(
                f"the responder of stream {stream_id} cannot cancel it (send an error)", rule="RX-56"
            )
        elif stream.state is _BOTH:
            if stream.gathering is not None:
                self._gathered_payload(stream)
            self._move(stream, stream_id, StreamInput.STOP_RECEIVING)

    def _send(self, kind: int, stream_id: int, flags: int, fixed: bytes, payload: Payload, complete: bool) -> None:
        """Queue a payload, and the end of this direction if it is the last one."""
        if complete and not payload.data and payload.metadata is None:
            # RX-58: C would swallow it.
            self._put_behind(stream_id, f.encode(kind, stream_id, flags, fixed))
            self._put_behind(stream_id, f.encode(kind, stream_id, f.COMPLETE))
        else:
            self._send_frames(kind, stream_id, flags | f.COMPLETE if complete else flags, fixed, payload)

    def _send_frames(self, kind: int, stream_id: int, flags: int, fixed: bytes, payload: Payload) -> None:
        """Queue a payload as RESPONSE or REQUEST_CHANNEL, in fragments if it is too large for one frame."""
        frame = f.encode(kind, stream_id, flags, fixed, payload.metadata, payload.data)
        if len(frame) > self._max_out:
            self._put_in_turn(stream_id, self._fragments(kind, stream_id, flags, fixed, payload))
        else:
            self._put_behind(stream_id, frame)

    def _put(self, frame: bytes) -> None:
        self._out.append(frame)

    def _fragments(self, kind: int, stream_id: int, flags: int, fixed: bytes, payload: Payload) -> Iterator[bytes]:
        # RX-75: with the header. `split` counts 3 bytes for a metadata length, here it has 4.
        room = self._fragment - 13
        for part, follows in split(payload, room - len(fixed), room):
            # RX-72: C on the last only. RX-71: N and the initial n on the first only.
            part_flags = flags & ~f.COMPLETE | f.FOLLOWS if follows else flags
            yield f.encode(kind, stream_id, part_flags, fixed, part.metadata, part.data)
            flags &= ~f.INITIAL
            fixed = b""

    def _move(self, stream: LiveStream, stream_id: int, by: StreamInput) -> None:
        stream.state = STREAM[stream.state, by]
        if stream.state is StreamState.ENDED:
            del self._streams[stream_id]
            if not stream.requester:
                self._peer_streams -= 1
            if stream.gathering is not None:
                self._gathered -= len(stream.gathering)

    def _refuse_waiting(self, events: list[Event]) -> None:
        for stream_id in self._waiting:
            events.append(StreamFailed(stream_id, ErrorCode.REJECTED, b"the connection is draining", FailedBy.LOCAL))
        self._waiting.clear()

    def _end_streams(self, code: int, text: str, events: list[Event]) -> None:
        """Fail requests and cancel responders (RX-26, RX-60)."""
        for stream_id, stream in self._streams.items():
            if stream.requester:
                events.append(StreamFailed(stream_id, code, text.encode(), FailedBy.CONNECTION))
            elif stream.heard_of:
                events.append(StreamCancelled(stream_id))
        for stream_id in self._waiting:
            events.append(StreamFailed(stream_id, code, text.encode(), FailedBy.CONNECTION))
        self._streams.clear()
        self._waiting.clear()
        self._drop_turns()
        self._peer_streams = self._gathered = 0


_Handler = Callable[[ReactiveSocketCore, int, int, int, Parsed, list[Event]], None]
_HANDLERS: Final[dict[int, _Handler]] = {
    f.LEASE: ReactiveSocketCore._on_lease,
    f.KEEPALIVE: ReactiveSocketCore._on_keepalive,
    f.REQUEST_RESPONSE: ReactiveSocketCore._on_request,
    f.REQUEST_FNF: ReactiveSocketCore._on_request,
    f.REQUEST_STREAM: ReactiveSocketCore._on_request,
    f.REQUEST_SUB: ReactiveSocketCore._on_request,
    f.REQUEST_CHANNEL: ReactiveSocketCore._on_channel,
    f.REQUEST_N: ReactiveSocketCore._on_request_n,
    f.CANCEL: ReactiveSocketCore._on_cancel,
    f.RESPONSE: ReactiveSocketCore._on_response,
    f.ERROR: ReactiveSocketCore._on_error,
    f.METADATA_PUSH: ReactiveSocketCore._on_metadata_push,
}
