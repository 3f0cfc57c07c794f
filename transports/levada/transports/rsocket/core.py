"""RSocket without I/O: bytes and calls in, events and bytes out.

This file reads bytes and has the streams; `connection.py` has the connection around them.

Theory of the hot path: an item of a stream costs what its frame costs here. So the frames of `_FRAMES_OF_STREAMS` are built and read with
structs, without frame classes, and a complete, expected item is taken in the loop of `_read` itself.  `LiveStream.demand` and `LiveStream.credit`
are 0 while their direction is closed; one comparison then says whether an item may come or go.
A stream's state changes only in `_advance`, by the table in `state.py`, and an ended stream is forgotten there. Late frames find no stream
and are ignored, like frames of a stream that never existed (RS-21, RS-120).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from levada.framework.errors import LocalProtocolError
from levada.transports.rsocket.codes import ErrorCode, InvalidFrame, is_stream_code
from levada.transports.rsocket.config import CUT_INTO, LARGEST_SENT, CoreConfig
from levada.transports.rsocket.connection import RSocketConnection
from levada.transports.rsocket.events import (
    CreditGranted,
    Event,
    FailedBy,
    Interaction,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.frames import (
    COMPLETE,
    FOLLOWS,
    HEADER,
    IGNORE,
    MAX_U31,
    METADATA,
    NEXT,
    PREFIXED_HEADER,
    U32,
    ErrorFrame,
    FrameType,
    Payload,
    RequestNFrame,
    decode,
    metadata_length,
    not_bytes,
    payload_at,
)
from levada.transports.rsocket.reactive_streams import DEAF, HELD_BACK
from levada.transports.rsocket.resumption import Sessions
from levada.transports.rsocket.state import ConnectionState, StreamInput, StreamState
from levada.transports.rsocket.streams import (
    UNBOUNDED,
    Gathering,
    LiveStream,
    PendingRequest,
    StreamIds,
    add_credit,
    split,
)

__all__ = ["RSocketCore"]

# Members of enums under names of this module: an attribute of an enum costs 0.1 us or more, a global 0.01, and a frame needs several.
_RESPONSE: Final = Interaction.REQUEST_RESPONSE
_FNF: Final = Interaction.FIRE_AND_FORGET
_STREAM: Final = Interaction.REQUEST_STREAM
_CHANNEL: Final = Interaction.REQUEST_CHANNEL
_BOTH: Final = StreamState.BOTH
_SENDING: Final = StreamState.SENDING
_RECEIVING: Final = StreamState.RECEIVING
_ENDED: Final = StreamState.ENDED
_SEND_COMPLETE: Final = StreamInput.SEND_COMPLETE
_RECEIVE_COMPLETE: Final = StreamInput.RECEIVE_COMPLETE
_AWAITING_SETUP: Final = ConnectionState.AWAITING_SETUP
_OPENING: Final = ConnectionState.OPENING
_OPEN: Final = ConnectionState.OPEN
_RESUMING: Final = ConnectionState.RESUMING

_KINDS: Final = {
    FrameType.REQUEST_RESPONSE.value: _RESPONSE,
    FrameType.REQUEST_FNF.value: _FNF,
    FrameType.REQUEST_STREAM.value: _STREAM,
    FrameType.REQUEST_CHANNEL.value: _CHANNEL,
}
_REQUEST_WORDS: Final = {kind: number << 10 for number, kind in _KINDS.items()}
_RESPONSE_WORD: Final = _REQUEST_WORDS[_RESPONSE]
_FNF_WORD: Final = _REQUEST_WORDS[_FNF]
_PAYLOAD: Final = FrameType.PAYLOAD.value << 10
_ITEM: Final = _PAYLOAD | NEXT
_ITEM_MASK: Final = 0x3F << 10 | FOLLOWS | COMPLETE | NEXT
_PREFIX: Final = 3  # bytes of the frame length (RS-2)
_SMALLEST: Final = HEADER.size  # RS-5

_REQUESTING: Final = (_OPEN, _OPENING, ConnectionState.SUSPENDED, _RESUMING)
_NO_STREAMS: Final[dict[int, LiveStream]] = {}


class RSocketCore(RSocketConnection):
    """One side of a connection, or of a session that outlives its carriers; both requester and responder.

    A client's core has its SETUP queued from the start (RS-40), and requests may follow at once (RS-50).

    The peer's mistakes never raise: the ERROR frame is queued and the last event is `ConnectionEnded`; send the queue, then close the
    carrier.  A caller's mistake raises `LocalProtocolError` and changes nothing.  After `ConnectionEnded`, bytes of the peer are ignored
    (RS-7) and every ``send_…`` raises.

    Args:
        config: settings of both roles; a core uses those of its own.
        client: this side opened the connection.
        framed: the carrier keeps message boundaries (WebSocket), so frames have no length field (RS-2).
        now: seconds, on any clock that does not jump; the same clock for every `now`.
        random_bytes: the source of resume tokens.
        sessions: server with ``config.resume``: the sessions of this listener, shared by its cores.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        client: bool,
        framed: bool,
        now: float,
        random_bytes: Callable[[int], bytes],
        sessions: Sessions[RSocketCore] | None = None,
    ) -> None:
        super().__init__(config, client=client, framed=framed, now=now, random_bytes=random_bytes, sessions=sessions)
        self._parity = 1 if client else 0  # RS-18: of this side's ids
        self._ids = StreamIds(1 if client else 2, reuse=config.reuse_stream_ids)
        # RS-86: `fragment_size` counts the length field on every carrier. RS-3.
        self._fragment = min((config.fragment_size or CUT_INTO) - _PREFIX, LARGEST_SENT)
        self._max_sent = LARGEST_SENT if config.fragment_size is None else self._fragment

    def _read_message(self, message: bytes, events: list[Event]) -> None:
        size = len(message)
        self._fault = self._offset
        stream_id, word = HEADER.unpack_from(message)
        stream_id &= MAX_U31
        if stream_id:
            self._received += size
        self._take(stream_id, word, message, _SMALLEST, size, events)
        self._offset += size

    def _read(self, data: bytes, events: list[Event]) -> None:
        """Read all complete frames in `data`, and keep the rest (RS-4)."""
        unpack = PREFIXED_HEADER.unpack_from
        state = self._state
        # Items are taken in the loop once the connection is open; before, a frame may also mean that SETUP was accepted (RS-53).
        streams = self._streams if state is _OPEN else _NO_STREAMS
        max_taken = self._max_taken
        received = self._received
        at, size = 0, len(data)
        while size - at >= _PREFIX + _SMALLEST:
            high, low, stream_id, word = unpack(data, at)
            length = high << 16 | low
            end = at + _PREFIX + length
            if end > size or not _SMALLEST <= length <= max_taken:
                break
            body = at + _PREFIX + _SMALLEST
            if word & _ITEM_MASK == _ITEM:
                stream = streams.get(stream_id)
                if stream is not None and stream.demand and stream.gathering is None and not word & METADATA:
                    stream.demand -= 1
                    received += length
                    events.append(PayloadReceived(stream_id, Payload(data[body:end]), False))
                    at = end
                    continue
            stream_id &= MAX_U31  # RS-9
            if stream_id:
                received += length  # RS-91: ignored frames count too
            self._received = received
            self._fault = self._offset + at
            at = end
            handler = _FRAMES_OF_STREAMS.get(word >> 10)
            if handler is not None and state is _OPEN and stream_id:
                try:
                    handler(self, stream_id, word, data, body, end, events)
                except InvalidFrame as error:
                    self._invalid(word, error, events)
            else:
                self._take(stream_id, word, data, body, end, events)
            if self._state is not state:
                state = self._state
                if state in DEAF:
                    return
                if state in HELD_BACK:
                    break
                max_taken = self._max_taken
                streams = self._streams if state is _OPEN else _NO_STREAMS
        self._received = received
        self._offset += at
        if at < size:
            self._keep_rest(data, at, events)

    def _take(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        """Apply one frame, whose bytes behind the header are `at` to `end` of `data`."""
        state = self._state
        if state is _AWAITING_SETUP:
            self._max_taken = self._config.max_frame_size
            self._first_frame(data[at - _SMALLEST : end], events)
            return
        try:
            handler = _FRAMES_OF_STREAMS.get(word >> 10)
            if state is _RESUMING:
                self._resuming_frame(decode(data[at - _SMALLEST : end]), events)
            elif handler is not None and stream_id:
                handler(self, stream_id, word, data, at, end, events)
            else:
                frame = decode(data[at - _SMALLEST : end])
                self._connection_frame(frame, events)  # RS-122, RS-124: frames of streams on stream 0 are ignored there
        except InvalidFrame as error:
            self._invalid(word, error, events)

    def _invalid(self, word: int, error: InvalidFrame, events: list[Event]) -> None:
        if not word & IGNORE:  # RS-11, RS-12, RS-15
            self._fail(events, error.rule, error.detail)

    def _on_request(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        kind = _KINDS[word >> 10]
        n = 0
        if kind >= _STREAM:
            if end - at < U32.size:
                raise InvalidFrame("a request without its initial n")
            n = U32.unpack_from(data, at)[0] & MAX_U31
            at += U32.size
        if word & METADATA:
            # As `payload_at`, whose call costs 0.3 us.
            start = at + 3
            at = start + int.from_bytes(data[at:start])
            if start > end or at > end:
                raise InvalidFrame("metadata longer than its frame", rule="RS-15")
            payload = Payload(data[at:end], data[start:at])
        else:
            payload = Payload(data[at:end])
        if stream_id & 1 == self._parity or stream_id in self._streams:
            return  # RS-22; RS-88, RS-121
        if self._state is _OPENING:
            self._setup_accepted(events)
        code = ErrorCode.REJECTED
        text: bytes | None = None
        if self._state is not _OPEN or self._leasing or self._peer_streams >= self._config.max_streams:
            text = self._refusal()
        if text is None and n == 0 and kind >= _STREAM:
            code, text = ErrorCode.INVALID, b"initial n is 0"  # RS-74
        if text is not None:
            if kind is not _FNF:  # RS-62: that one is dropped silently
                self._put_own(self._error_frame(stream_id, code, text))
            return
        channel = kind is _CHANNEL
        complete = not channel or bool(word & COMPLETE)
        if word & FOLLOWS:
            # RS-84: the application sees it when it is complete.
            stream = self._add_responder(stream_id, kind, n, complete=not channel)
            stream.gathering = Gathering(is_request=True, complete=complete)
            self._gather(stream_id, stream, payload, events)
            return
        if kind is _RESPONSE:  # as `_add_responder`, whose call costs 0.2 us
            self._streams[stream_id] = LiveStream(_RESPONSE, False, _SENDING, 1, 0)
            self._peer_streams += 1
        elif kind is not _FNF:  # RS-62: that one opens no stream
            self._add_responder(stream_id, kind, n, complete=complete)
        events.append(RequestReceived(kind, stream_id, payload, n, complete))

    def _add_responder(self, stream_id: int, kind: Interaction, n: int, *, complete: bool) -> LiveStream:
        # RS-61: the response of a request-response needs no credit; it is one payload.
        credit = 1 if kind is _RESPONSE else add_credit(0, n)
        state = _SENDING if complete else _BOTH
        stream = self._streams[stream_id] = LiveStream(kind, False, state, credit, 0)
        self._peer_streams += 1
        return stream

    def _on_payload(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        payload = payload_at(data, at, end, word) if word & METADATA else Payload(data[at:end])
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RS-124
        if self._state is _OPENING and stream.requester:
            self._setup_accepted(events)
        complete = bool(word & COMPLETE)
        follows = bool(word & FOLLOWS) and not complete  # RS-81: with C it is the last fragment
        gathering = stream.gathering
        if gathering is not None:
            gathering.complete |= complete
            if self._gather(stream_id, stream, payload, events) and not follows:
                self._gathered -= len(gathering)
                stream.gathering = None
                self._deliver(stream_id, stream, gathering, events)
            return
        if stream.state is _SENDING:
            return  # RS-113: behind its own C, or behind this side's CANCEL
        response = stream.kind is _RESPONSE
        complete = complete or response  # RS-61
        if not (word & NEXT or follows):
            if complete:  # RS-24: C alone, whatever bytes it has
                self._advance(stream_id, stream, _RECEIVE_COMPLETE)
                events.append(StreamCompleted(stream_id))
            return
        if not response:
            if stream.demand <= 0:
                # RS-77: more than requested.
                self._give_up(stream_id, stream, b"more payloads than were requested", events)
                return
            stream.demand -= 1  # RS-73: one for all fragments
        if follows:
            stream.gathering = Gathering(is_request=False, complete=complete)
            self._gather(stream_id, stream, payload, events)
            return
        if complete:
            self._advance(stream_id, stream, _RECEIVE_COMPLETE)
        events.append(PayloadReceived(stream_id, payload, complete))

    def _deliver(self, stream_id: int, stream: LiveStream, whole: Gathering, events: list[Event]) -> None:
        payload = whole.payload()
        if not whole.is_request:
            if whole.complete:
                self._advance(stream_id, stream, _RECEIVE_COMPLETE)
            events.append(PayloadReceived(stream_id, payload, whole.complete))
            return
        kind = stream.kind
        n = 0 if kind is _RESPONSE else stream.credit  # RS-84: what REQUEST_N added meanwhile counts
        if kind is _FNF:
            self._advance(stream_id, stream, _SEND_COMPLETE)
        elif kind is _CHANNEL and whole.complete:
            self._advance(stream_id, stream, _RECEIVE_COMPLETE)
        events.append(RequestReceived(kind, stream_id, payload, min(n, MAX_U31), whole.complete))

    def _on_request_n(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        if end - at < U32.size:
            raise InvalidFrame("REQUEST_N without its n")
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RS-129
        if self._state is _OPENING and stream.requester:
            self._setup_accepted(events)
        n = U32.unpack_from(data, at)[0] & MAX_U31
        # RS-74: 0 is ignored. RS-76: so is a grant where this side has nothing more to send, and on a request-response.
        if n == 0 or stream.state is _RECEIVING or stream.kind <= _FNF:
            return
        stream.credit = add_credit(stream.credit, n)
        if stream.heard_of:
            events.append(CreditGranted(stream_id, n))

    def _on_cancel(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        if self.backlog:
            self._drop_turn(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RS-122
        gathering = stream.gathering
        if not stream.requester:
            self._advance(stream_id, stream, StreamInput.RECEIVE_CANCEL)
            if gathering is None or not gathering.is_request:  # RS-83: else it was never started
                events.append(StreamCancelled(stream_id))
            return
        if self._state is _OPENING:
            self._setup_accepted(events)
        if stream.kind is _CHANNEL:
            if stream.state is not _RECEIVING:
                self._advance(stream_id, stream, StreamInput.RECEIVE_STOP)  # RS-69
                events.append(SendingStopped(stream_id))
        elif gathering is not None:
            # RS-83: the responder broke off in the middle of its answer.
            self._advance(stream_id, stream, StreamInput.RECEIVE_ERROR)
            events.append(StreamFailed(stream_id, ErrorCode.CANCELED, b"canceled by the responder", FailedBy.LOCAL))

    def _on_error(self, stream_id: int, word: int, data: bytes, at: int, end: int, events: list[Event]) -> None:
        if end - at < U32.size:
            raise InvalidFrame("ERROR without its code")
        if self.backlog:
            self._drop_turn(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RS-123
        if self._state is _OPENING and stream.requester:
            self._setup_accepted(events)
        heard_of = stream.heard_of
        self._advance(stream_id, stream, StreamInput.RECEIVE_ERROR)
        if heard_of:
            # RS-29: any code ends only this stream, and is kept.
            code = U32.unpack_from(data, at)[0]
            events.append(StreamFailed(stream_id, code, data[at + U32.size : end]))

    def send_request_subscription(self, payload: Payload, n: int, now: float) -> int:
        """Raise an error: only ReactiveSocket has subscriptions.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError("RSocket has no subscriptions; request a stream")

    def _request(self, kind: Interaction, payload: Payload, n: int, now: float, complete: bool = False) -> int:
        if self._state not in _REQUESTING:
            raise LocalProtocolError(f"no requests while the connection is {self._state.value}")  # RS-31, RS-51, RS-52
        if not 0 < n <= MAX_U31:
            raise LocalProtocolError(f"n is {n}, wanted 1 to {MAX_U31}", rule="RS-74")
        if not isinstance(payload.data, bytes) or not (payload.metadata is None or isinstance(payload.metadata, bytes)):
            raise not_bytes(payload)
        if self._leasing and (self._waiting or not self._allowed.take(now)):
            return self._wait_for_lease(PendingRequest(kind, payload, n, complete), "RS-133")
        stream_id = self._ids.take(self._streams, self._waiting, self._in_turn)
        if kind is _RESPONSE:  # as `_start`, whose call costs 0.2 us
            self._streams[stream_id] = LiveStream(_RESPONSE, True, _RECEIVING, 0, 0)
            self._put_payload(stream_id, _RESPONSE_WORD, b"", payload)
        elif kind is _FNF:
            self._put_payload(stream_id, _FNF_WORD, b"", payload)
        else:
            self._start(stream_id, kind, payload, n, complete)
        return stream_id

    def _start(self, stream_id: int, kind: Interaction, payload: Payload, n: int, complete: bool) -> None:
        word = _REQUEST_WORDS[kind]
        if kind is _FNF:
            self._put_payload(stream_id, word, b"", payload)
            return
        state = _RECEIVING
        fixed = b""
        # RS-61: an answer needs none. It is not taken in the loop of `_read`, since it completes without C.
        demand = 0
        if kind is not _RESPONSE:
            fixed = U32.pack(n)
            demand = add_credit(0, n)
            if kind is _CHANNEL:
                if complete:
                    word |= COMPLETE
                else:
                    state = _BOTH
        self._streams[stream_id] = LiveStream(kind, True, state, 0, demand)
        self._put_payload(stream_id, word, fixed, payload)

    def send_request_n(self, stream_id: int, n: int) -> None:
        """Allow the peer `n` more payloads. Ignored if it has completed or the stream is over.

        Raises:
            LocalProtocolError: `n` is not 1 to 2**31-1.
        """
        if not 0 < n <= MAX_U31:
            raise LocalProtocolError(f"n is {n}, wanted 1 to {MAX_U31}", rule="RS-74")
        stream = self._streams.get(stream_id)
        if stream is None:
            waiting = self._waiting.get(stream_id)
            if waiting is not None and waiting.kind >= _STREAM:
                waiting.n = min(waiting.n + n, MAX_U31)
            return
        if stream.state is _SENDING or stream.kind is _RESPONSE:
            return
        if stream.demand < UNBOUNDED // 2:  # RS-75: unbounded credit needs no more
            stream.demand = add_credit(stream.demand, n)
            self._put_own(RequestNFrame(stream_id, n).encode())

    def send_payload(self, stream_id: int, payload: Payload, *, complete: bool = False) -> None:
        """Send an item, or the response of a request-response, which completes the stream; `complete`: it is the last of this direction.

        Raises:
            LocalProtocolError: no such stream, this direction is complete, or there is no credit (wait for `CreditGranted`).
            TypeError: data or metadata is not bytes.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.credit <= 0:
            raise self._why_not(stream_id, stream)
        if not isinstance(payload.data, bytes) or not (payload.metadata is None or isinstance(payload.metadata, bytes)):
            raise not_bytes(payload)
        stream.credit -= 1  # RS-73
        if complete or stream.kind is _RESPONSE:
            self._put_payload(stream_id, _ITEM | COMPLETE, b"", payload)
            self._advance(stream_id, stream, _SEND_COMPLETE)
        else:
            self._put_payload(stream_id, _ITEM, b"", payload)

    def _why_not(self, stream_id: int, stream: LiveStream | None) -> LocalProtocolError:
        if stream is None:
            return LocalProtocolError(f"stream {stream_id} is not open")
        if stream.state is _RECEIVING:
            return LocalProtocolError(f"this side of stream {stream_id} is complete", rule="RS-67")
        return LocalProtocolError(f"no credit on stream {stream_id}; wait for CreditGranted", rule="RS-73")

    def send_complete(self, stream_id: int) -> None:
        """End this direction of a stream; needs no credit.

        Raises:
            LocalProtocolError: no such stream, or this direction is complete already.
        """
        waiting = self._waiting.get(stream_id)
        if waiting is not None and waiting.kind is _CHANNEL and not waiting.complete:
            waiting.complete = True
            return
        stream = self._streams.get(stream_id)
        if stream is None or stream.state is _RECEIVING:
            raise self._why_not(stream_id, stream)
        self._put_last(stream_id, HEADER.pack(stream_id, _PAYLOAD | COMPLETE))
        self._advance(stream_id, stream, _SEND_COMPLETE)

    def send_error(self, stream_id: int, code: int = ErrorCode.APPLICATION_ERROR, data: bytes = b"") -> None:
        """End a stream in both directions with an error (RS-68). NULs at the end of the data are left out (RS-28).

        Raises:
            LocalProtocolError: no such stream, a requester of any interaction but a channel (use `send_cancel`), a code that is not for
                streams (RS-27), or more data than a frame has room for.
        """
        stream = self._streams.get(stream_id)
        waiting = self._waiting.get(stream_id)
        kind = stream.kind if stream is not None else waiting.kind if waiting is not None else None
        if kind is None:
            raise self._why_not(stream_id, None)
        if (stream is None or stream.requester) and kind is not _CHANNEL:
            raise LocalProtocolError("a requester without further payloads has no errors; cancel", rule="RS-68")
        if not is_stream_code(code):
            raise LocalProtocolError(f"{code:#x} is no code for a stream", rule="RS-27")
        if len(data) > LARGEST_SENT - HEADER.size - U32.size:
            raise LocalProtocolError(f"error data of {len(data)} bytes does not fit into a frame", rule="RS-3")
        if stream is None:
            del self._waiting[stream_id]  # the peer has not heard of it
            return
        self._put_last(stream_id, ErrorFrame(stream_id, code, data.rstrip(b"\0")).encode())
        self._advance(stream_id, stream, StreamInput.SEND_ERROR)

    def send_cancel(self, stream_id: int) -> None:
        """Requester: end the stream. Responder of a channel: accept no more payloads (RS-69). Does nothing if the stream is over.

        Raises:
            LocalProtocolError: a responder of any interaction but a channel; use `send_error`.
        """
        if self._waiting.pop(stream_id, None) is not None:
            return  # RS-133: nothing was sent, so nothing needs to be cancelled
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if stream.requester:
            self._drop_turn(stream_id)
            self._put_own(self._cancel_frame(stream_id))
            self._advance(stream_id, stream, StreamInput.SEND_CANCEL)
        elif stream.kind is not _CHANNEL:
            raise LocalProtocolError("a responder cancels channels only; use send_error", rule="RS-69")
        elif stream.state is not _SENDING:
            self._put_own(self._cancel_frame(stream_id))
            self._advance(stream_id, stream, StreamInput.SEND_STOP)

    def _put_payload(self, stream_id: int, word: int, fixed: bytes, payload: Payload) -> None:
        """Queue a REQUEST_* or PAYLOAD, in fragments if it is too large for a frame (RS-78)."""
        data, metadata = payload.data, payload.metadata
        size = _SMALLEST + len(fixed) + len(data)
        if metadata is not None:
            size += 3 + len(metadata)
            word |= METADATA
        if size > self._max_sent:
            self._put_in_turn(stream_id, self._fragments(stream_id, word, fixed, payload))
        elif self.backlog and stream_id in self._in_turn:
            before = () if metadata is None else (metadata_length(metadata), metadata)
            self._put_in_turn(stream_id, (b"".join((HEADER.pack(stream_id, word), fixed, *before, data)),))
        elif self._plain:
            header = PREFIXED_HEADER.pack(size >> 16, size & 0xFFFF, stream_id, word) + fixed
            if metadata is None:
                self._out += (header, data)
            else:
                self._out += (header, len(metadata).to_bytes(3), metadata, data)
        elif metadata is None:
            self._put(b"".join((HEADER.pack(stream_id, word), fixed, data)))
        else:
            self._put(b"".join((HEADER.pack(stream_id, word), fixed, metadata_length(metadata), metadata, data)))

    def _fragments(self, stream_id: int, word: int, fixed: bytes, payload: Payload) -> Iterator[bytes]:
        complete = word & COMPLETE
        word &= ~(COMPLETE | METADATA)
        room = self._fragment - _SMALLEST
        for part, follows in split(payload, room - len(fixed), room):
            parts = [fixed, part.data]
            flags = FOLLOWS if follows else complete  # RS-80: C on the last one only
            if part.metadata is not None:
                flags |= METADATA
                parts[1:1] = (metadata_length(part.metadata), part.metadata)
            yield b"".join((HEADER.pack(stream_id, word | flags), *parts))
            word, fixed = _ITEM, b""


_Handler = Callable[[RSocketCore, int, int, bytes, int, int, list[Event]], None]
_FRAMES_OF_STREAMS: Final[Mapping[int, _Handler]] = {
    FrameType.PAYLOAD.value: RSocketCore._on_payload,
    FrameType.REQUEST_N.value: RSocketCore._on_request_n,
    FrameType.CANCEL.value: RSocketCore._on_cancel,
    FrameType.ERROR.value: RSocketCore._on_error,
} | dict.fromkeys(_KINDS, RSocketCore._on_request)
