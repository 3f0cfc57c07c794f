"""ReactiveSocket without I/O: bytes and calls in, events and bytes out.

What it does as RSocket does is in `levada.transports.rsocket.reactive_streams`. The differences are here and in `frames` and `state`, each
marked with the id of its rule.  The way of a frame:

* `_read` finds the frames (RX-3), `_receive` parses one and drops or refuses wrong ones (RX-9, RX-12), and a function of
  `_HANDLERS` applies it. A frame that makes no sense in its place is ignored (RX-99): that is each bare ``return`` there.
* Payloads of every interaction arrive in `_take` and leave through `send_payload`. Both depend on what the C flag carries (RX-58).
* A stream lives in `_streams` from its first frame to its last; a request that waits for a lease is in `_waiting` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.reactivesocket import frames as f
from levada.transports.reactivesocket.frames import SETUP_CODES, STREAM_CODES, ErrorCode, FrameError
from levada.transports.reactivesocket.state import CONNECTION, STREAM
from levada.transports.rsocket.config import CUT_INTO, CoreConfig, mime_type_fault
from levada.transports.rsocket.events import (
    CreditGranted,
    EndReason,
    Event,
    ExtensionReceived,
    FailedBy,
    Interaction,
    KeepaliveReceived,
    MetadataPushed,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    SetupReceived,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
    error_text,
)
from levada.transports.rsocket.frames import MAX_U31, Payload, not_bytes
from levada.transports.rsocket.reactive_streams import LIVE, ReactiveStreamsCore
from levada.transports.rsocket.state import ConnectionInput, ConnectionState, StreamInput, StreamState
from levada.transports.rsocket.streams import Gathering, LiveStream, PendingRequest, StreamIds, add_credit, split

__all__ = ["ReactiveSocketCore"]

_RESPONSE, _FNF, _STREAM, _CHANNEL, _SUBSCRIPTION = (
    Interaction.REQUEST_RESPONSE, Interaction.FIRE_AND_FORGET, Interaction.REQUEST_STREAM, Interaction.REQUEST_CHANNEL,
    Interaction.REQUEST_SUBSCRIPTION,
)  # fmt: skip
_AWAITING_SETUP, _DECIDING, _OPENING = ConnectionState.AWAITING_SETUP, ConnectionState.DECIDING, ConnectionState.OPENING
_OPEN, _ENDED = ConnectionState.OPEN, ConnectionState.ENDED
_BOTH, _SENDING, _RECEIVING = StreamState.BOTH, StreamState.SENDING, StreamState.RECEIVING
# By `Interaction`, whose numbers are the places here: an enum's hash costs more than all the rest of a look-up.
_FRAME_OF: Final = (f.REQUEST_RESPONSE, f.REQUEST_FNF, f.REQUEST_STREAM, f.REQUEST_CHANNEL, f.REQUEST_SUB)
_INTERACTION_OF: Final = {kind: Interaction(at) for at, kind in enumerate(_FRAME_OF)}
_MAX_U32: Final = 2**32 - 1
_Parsed = tuple[tuple[int, ...], bytes | None, bytes]  # what `frames.parse` returns: fixed fields, metadata, data


class ReactiveSocketCore(ReactiveStreamsCore):
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

    connection_table = CONNECTION
    stream_table = STREAM
    prefix, counted, smallest = 4, 4, 12  # RX-3, RX-4
    length_rules = "RX-4", "RX-5"

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
        if client:
            self._send_setup()

    def _read_message(self, message: bytes, events: list[Event]) -> None:
        self._fault = self._offset
        self._offset += len(message)
        kind, flags, stream_id = f.HEADER.unpack_from(message)
        self._receive(kind, flags, stream_id, message, f.HEADER.size, len(message), events)

    def _read(self, data: bytes, events: list[Event]) -> None:
        unpack, limit, receive, offset = f.FULL_HEADER.unpack_from, self._max_taken, self._receive, self._offset
        at, end = 0, len(data)
        while end - at >= 12:
            length, kind, flags, stream_id = unpack(data, at)
            stop = at + length
            if stop > end or not 12 <= length <= limit:
                break
            self._fault = offset + at
            receive(kind, flags, stream_id, data, at + 12, stop, events)
            at = stop
            if self._state is _DECIDING or self._state is _ENDED:
                break
        self._offset = offset + at
        if at < end and self._state is not _ENDED:
            self._keep_rest(data, at, events)

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the queued frames, frames of stream 0 first. For a carrier of messages they have no length fields (RX-2)."""
        frames = super().data_to_send(now)
        return [frame[4:] for frame in frames] if self._framed else frames

    def send_keepalive(self, data: bytes = b"") -> None:
        """Send a KEEPALIVE that the peer answers; the answer is reported as `KeepaliveReceived` (RX-80). A client does so by itself.

        Raises:
            LocalProtocolError: not set up, ended, or too much for a frame.
        """
        self._check_live(len(data))
        self._control.append(f.encode(f.KEEPALIVE, 0, f.RESPOND, data=data))

    def _on_keepalive(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        if stream_id:
            return  # RX-109
        data = parsed[2]
        if flags & f.RESPOND:
            self.own_bytes += len(data)
            self._control.append(f.encode(f.KEEPALIVE, 0, data=data))  # RX-81
        else:
            events.append(KeepaliveReceived(data))

    def _send_setup(self) -> None:
        config = self._config
        flags = (f.LEASES if config.lease is not None else 0) | (f.STRICT if config.strict else 0)
        fixed = f.encode_setup_fields(
            f.VERSION,
            round(config.keepalive_interval * 1000),
            round(config.max_lifetime * 1000),
            config.metadata_mime_type,
            config.data_mime_type,
        )
        payload = config.setup_payload
        setup = f.encode(f.SETUP, 0, flags, fixed, payload.metadata, payload.data)
        if len(setup) > self._max_taken:
            raise ConfigurationError(f"SETUP of {len(setup)} bytes (raise max_frame_size, or shorten setup_payload)")
        self._control.append(setup)

    def _receive_first(
        self, kind: int, flags: int, stream_id: int, raw: bytes, at: int, end: int, events: list[Event]
    ) -> None:
        """Server: take the first frame, which must be a valid SETUP."""
        if kind != f.SETUP or stream_id:
            text = f"expected SETUP on stream 0 as the first frame, got type {kind:#06x} on stream {stream_id}"
            return self._refuse(events, ErrorCode.INVALID_SETUP, text, "RX-30")
        try:
            numbers, mime_types, metadata, data = f.parse_setup(flags, raw, at, end)
        except FrameError as error:
            # RX-34: truncated. RX-12: a metadata length that cannot be does not make a first SETUP one to ignore.
            rule = "RX-34" if error.rule == "RX-9" else error.rule
            return self._refuse(events, ErrorCode.INVALID_SETUP, error.detail, rule)
        version, keepalive_ms, lifetime_ms = numbers
        leases, strict = bool(flags & f.LEASES), bool(flags & f.STRICT)
        understood = self._config.strict_mime_types
        if version != f.VERSION:  # RX-31
            return self._refuse(
                events, ErrorCode.INVALID_SETUP, f"version {version}, {f.VERSION} is spoken here", "RX-31"
            )
        if fault := mime_type_fault(*mime_types):
            return self._refuse(events, ErrorCode.INVALID_SETUP, fault, "RX-32")
        if strict and understood is not None and not understood.issuperset(mime_types):  # RX-33
            text = f"MIME types {mime_types[0]!r} and {mime_types[1]!r} are not both understood"
            return self._refuse(events, ErrorCode.UNSUPPORTED_SETUP, text, "RX-33")
        if leases and self._config.lease is None:  # RX-34
            return self._refuse(events, ErrorCode.UNSUPPORTED_SETUP, "no leases here", "RX-34")
        self._leasing = leases
        self._lifetime = (lifetime_ms / 1000 if keepalive_ms else 0.0) or math.inf  # RX-35
        self._move(ConnectionInput.RECEIVE_SETUP)
        times = keepalive_ms / 1000, lifetime_ms / 1000
        events.append(
            SetupReceived((0, version), *times, *mime_types, Payload(data, metadata), lease=leases, strict=strict)
        )
        return None

    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived` (RX-34).

        Raises:
            LocalProtocolError: there is no SETUP to decide about, or the code is not one of set-up.
        """
        self._require_setup()
        if code not in SETUP_CODES:
            raise LocalProtocolError(f"code {code:#x} is not one of set-up", rule="RX-22")
        self._refuse(self._events, code, text)

    def send_lease(self, ttl: float, n: int, now: float, metadata: bytes | None = None) -> None:
        """Allow the peer `n` requests within `ttl` seconds. This replaces the earlier lease (RX-65).

        Raises:
            LocalProtocolError: SETUP was without leases, a number does not fit, not set up, ended, or too much for a frame.
        """
        self._check_live(len(metadata or b""))
        if not self._leasing:
            raise LocalProtocolError("this connection has no leases", rule="RX-67")
        if not (0 <= n <= _MAX_U32 and 0 <= ttl <= _MAX_U32 / 1000):
            raise LocalProtocolError(f"a lease of {n} requests in {ttl} s does not fit 32 bits", rule="RX-65")
        self._granted_on_carrier = True
        self._granted.replace(ttl, n, now)  # RX-67: with the grace
        self._control.append(f.encode(f.LEASE, 0, 0, f.TWO_WORDS.pack(round(ttl * 1000), n), metadata))

    def _on_lease(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        if stream_id:
            return  # RX-109
        self._setup_accepted(events)
        if self._leasing:  # RX-67
            (ttl_ms, n), metadata, _ = parsed
            self._lease_received(ttl_ms, n, metadata, events)  # RX-65: from reception on

    def send_metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; needs neither lease nor credit (RX-66).

        Raises:
            LocalProtocolError: not set up, ended, or too much for a frame.
        """
        self._check_live(len(metadata))
        self._control.append(f.encode(f.METADATA_PUSH, 0, metadata=metadata))

    def _on_metadata_push(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        metadata = parsed[1]
        if not stream_id and metadata is not None:  # RX-19, RX-104
            events.append(MetadataPushed(metadata))

    def send_extension(self, stream_id: int, extended_type: int, data: bytes, *, ignorable: bool = True) -> None:
        """Send an EXT frame. A peer that does not know the type drops it if it is `ignorable`, and otherwise closes the connection (RX-9).

        Raises:
            LocalProtocolError: `stream_id` is not 0, since these frames have none (RX-20), not set up, ended, or too much for a frame.
        """
        self._check_live(len(data))
        if stream_id:
            raise LocalProtocolError(f"stream_id is {stream_id}, wanted 0: an EXT frame has none", rule="RX-20")
        self._control.append(f.encode(f.EXT, extended_type, f.IGNORE if ignorable else 0, data=data))

    def _end_undecided(self, events: list[Event]) -> None:
        if self._state is _DECIDING:
            self._refuse(events, ErrorCode.REJECTED_SETUP, "")
        else:
            self._end(events, EndReason.CLOSED)

    def _end_drain(self, events: list[Event], text: str) -> None:
        self._end(events, self._ended_by, text=text)

    def _refuse_backlog(self, events: list[Event]) -> None:
        self._fault = self._offset
        self._fail(events, "RX-39", f"more than {self._config.max_setup_backlog} bytes behind SETUP")

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """End the connection now: an ERROR frame is queued, and all streams fail. Does nothing if the connection has ended.

        Args:
            code: not used: this dialect only has CONNECTION_ERROR for it (RX-22).
            reason: the text of the frame.
            now: the current time.
        """
        return super().close(ErrorCode.CONNECTION_ERROR, reason, now)

    def _on_connection_error(self, code: int, data: bytes, events: list[Event]) -> None:
        """ERROR on stream 0."""
        text = error_text(data)  # RX-23
        if code not in SETUP_CODES:
            self._end(events, EndReason.FAILED_BY_PEER, code, text)  # RX-25, RX-26
        elif self._state is _OPENING:
            self._end(events, EndReason.REFUSED, code, text)  # RX-40; at other times RX-106, RX-107

    def _put(self, frame: bytes) -> None:
        self._out.append(frame)

    def _put_error(self, code: int, text: bytes) -> None:
        self._put_last(0, self._error_frame(0, code, text))

    def _cancel_frame(self, stream_id: int, metadata: bytes | None = None) -> bytes:
        return f.encode(f.CANCEL, stream_id, metadata=metadata)

    def _error_frame(self, stream_id: int, code: int, data: bytes, metadata: bytes | None = None) -> bytes:
        if code == ErrorCode.REJECTED and metadata is None:
            metadata = data  # RX-23: the text has the reason in the metadata, others look at the data
        return f.encode(f.ERROR, stream_id, 0, f.WORD.pack(code), metadata, data)

    def _check_live(self, size: int = 0) -> None:
        """Refuse to send before set-up or after the end, or more bytes than this side's frames may have."""
        self._require(*LIVE)
        if size + 24 > self._max_taken:
            raise LocalProtocolError(f"{size} bytes do not fit into a frame (raise max_frame_size)", rule="RX-3")

    def _receive(
        self, kind: int, flags: int, stream_id: int, data: bytes, at: int, end: int, events: list[Event]
    ) -> None:
        if self._state is _AWAITING_SETUP:
            self._max_taken = self._config.max_frame_size
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
            return self._fail(events, "RX-9", error.detail)
        return _HANDLERS[kind](self, kind, stream_id, flags, parsed, events)

    def _on_request(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        """REQUEST_RESPONSE, _FNF, _STREAM or _SUB; F means nothing on them (RX-70)."""
        if not self._may_open(stream_id):
            return
        numbers, metadata, data = parsed
        interaction = _INTERACTION_OF[kind]
        if not self._admit(stream_id, interaction, events):
            return
        n = add_credit(0, numbers[0]) if numbers else 0
        if interaction is not _FNF:
            credit = 1 if interaction is _RESPONSE else n
            self._streams[stream_id] = LiveStream(interaction, False, _SENDING, credit, 0)
            self._peer_streams += 1
        events.append(RequestReceived(interaction, stream_id, Payload(data, metadata), n, True))

    def _on_channel(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        """REQUEST_CHANNEL: opens a channel, or brings a further payload of one (RX-54)."""
        numbers, metadata, data = parsed
        stream = self._streams.get(stream_id)
        if stream is not None:
            # RX-100: on another live stream it is ignored, and behind C. RX-57: an initial n on a further one is not added.
            if stream.kind is _CHANNEL and not stream.requester and stream.state is _BOTH:
                self._take(stream_id, stream, flags, metadata, data, events)
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
            self._gather(stream_id, stream, Payload(data, metadata), events)
        else:
            self._opened(stream_id, stream, Payload(data, metadata), bool(flags & f.COMPLETE), events)

    def _opened(
        self, stream_id: int, stream: LiveStream, payload: Payload, complete: bool, events: list[Event]
    ) -> None:
        """Report a channel whose first payload is complete.

        The first payload always exists, even if it is empty (RX-54), like the response of a request-response (RX-58).
        """
        if complete:
            self._advance(stream_id, stream, StreamInput.RECEIVE_COMPLETE)
        events.append(RequestReceived(_CHANNEL, stream_id, payload, stream.credit, complete))

    def _may_open(self, stream_id: int) -> bool:
        """Whether a request may have this id: not 0, of the peer's parity (RX-17), not in use (RX-100)."""
        return stream_id != 0 and stream_id & 1 == self._peer_parity and stream_id not in self._streams

    def _admit(self, stream_id: int, interaction: Interaction, events: list[Event]) -> bool:
        """Record a request of the peer. Return false if it is refused."""
        self._setup_accepted(events)  # RX-40
        if stream_id > self._highest:
            self._highest = stream_id
        if (reason := self._refusal()) is None:
            return True
        if interaction is not _FNF:  # RX-51, RX-67: never answered
            self._put_own(self._error_frame(stream_id, ErrorCode.REJECTED, reason))  # RX-24
        return False

    def _on_response(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or not stream.requester:
            return  # RX-103
        if self._state is _OPENING:
            self._setup_accepted(events)  # RX-40
        _, metadata, data = parsed
        self._take(stream_id, stream, flags, metadata, data, events)

    def _take(
        self, stream_id: int, stream: LiveStream, flags: int, metadata: bytes | None, data: bytes, events: list[Event]
    ) -> None:
        """Take a payload of the peer, a fragment of a payload, or the end of its direction without a payload."""
        complete = flags & f.COMPLETE
        answers = stream.kind is _RESPONSE
        # RX-58: a C frame with data or metadata is a payload too; without C, and as an answer, it always is one.
        delivers = not complete or data or metadata is not None or answers
        gathering = stream.gathering
        # RX-62. A payload in fragments costs 1 (RX-61), and is refused before the first of them is kept.
        if delivers and not stream.demand and (gathering is None or not gathering.is_request):
            return self._give_up(stream_id, stream, b"a payload without credit", events)
        payload = Payload(data, metadata)
        if gathering is not None or (flags & f.FOLLOWS and not complete):
            if gathering is None:
                stream.gathering = Gathering(is_request=False, complete=False)
            if not self._gather(stream_id, stream, payload, events):
                return None
            if flags & f.FOLLOWS and not complete:  # RX-72: with C, F is ignored
                return None
            payload = self._gathered_payload(stream)
            if gathering is not None and gathering.is_request:
                return self._opened(stream_id, stream, payload, bool(complete), events)
            # RX-72: the whole payload counts, not the last fragment.
            delivers = not complete or payload.data or payload.metadata is not None or answers
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
        self._advance(stream_id, stream, by)
        return None

    def _gathered_payload(self, stream: LiveStream) -> Payload:
        gathering, stream.gathering = stream.gathering, None
        assert gathering is not None
        self._gathered -= len(gathering)
        return gathering.payload()

    def _on_request_n(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # RX-109
        if stream.requester:
            self._setup_accepted(events)  # RX-40
        n = parsed[0][0]
        # RX-63: 0. RX-56: this side has no more to send. An answer needs no credit.
        if not n or stream.state is _RECEIVING or stream.kind is _RESPONSE:
            return
        stream.credit = add_credit(stream.credit, n)  # RX-61
        if stream.heard_of:  # else the request brings it (RX-73)
            events.append(CreditGranted(stream_id, n))

    def _on_cancel(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or not stream.requester:
            self._drop_turn(stream_id)
        if stream is None or stream.requester:
            return  # RX-101
        if stream.heard_of:
            events.append(StreamCancelled(stream_id, parsed[1]))  # RX-59
        self._advance(stream_id, stream, StreamInput.RECEIVE_CANCEL)  # RX-73: and what was gathered

    def _on_error(self, kind: int, stream_id: int, flags: int, parsed: _Parsed, events: list[Event]) -> None:
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
            self._setup_accepted(events)  # RX-40
        if code == ErrorCode.REJECTED and not data and metadata is not None:
            data = metadata.removesuffix(b"\0")  # RX-23: where the text puts the reason
        if stream.heard_of:
            events.append(StreamFailed(stream_id, code, data, FailedBy.PEER, metadata))  # RX-25: any code
        self._advance(stream_id, stream, StreamInput.RECEIVE_ERROR)
        return None

    def _request(self, kind: Interaction, payload: Payload, n: int, now: float, complete: bool = False) -> int:
        if self._state is not _OPEN and self._state is not _OPENING:
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
        # While requests wait nothing is left of the lease: they are the first to use the next one.
        if self._leasing and not self._allowed.take(now):
            return self._wait_for_lease(PendingRequest(kind, payload, n, complete), "RX-66")
        stream_id = self._ids.take(self._streams, self._waiting, self._in_turn)
        self._start(stream_id, kind, payload, n, complete)
        return stream_id

    def _start(self, stream_id: int, kind: Interaction, payload: Payload, n: int, complete: bool) -> None:
        """Queue a request."""
        if kind is _CHANNEL:
            state = _RECEIVING if complete else _BOTH
            self._send(f.REQUEST_CHANNEL, stream_id, f.INITIAL, f.WORD.pack(n), payload, complete)
        else:
            state = _RECEIVING
            fixed = b"" if kind is _RESPONSE or kind is _FNF else f.WORD.pack(n)
            self._out.append(f.encode(_FRAME_OF[kind], stream_id, 0, fixed, payload.metadata, payload.data))
            if kind is _FNF:
                return
        demand = 1 if kind is _RESPONSE else add_credit(0, n)
        self._streams[stream_id] = LiveStream(kind, True, state, 0, demand)

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
        elif stream.state is not _SENDING and stream.kind is not _RESPONSE:
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
        if stream.kind is _RESPONSE:
            self._send_frames(f.RESPONSE, stream_id, f.COMPLETE, b"", payload)
            self._advance(stream_id, stream, StreamInput.RESPONDER_COMPLETE)
            return
        kind = f.REQUEST_CHANNEL if stream.requester else f.RESPONSE
        if not complete:
            self._send_frames(kind, stream_id, 0, b"", payload)
        elif stream.kind is _SUBSCRIPTION:
            self._send_frames(kind, stream_id, 0, b"", payload)
            self._complete(stream_id, stream, told=False)
        else:
            self._send(kind, stream_id, 0, b"", payload, complete=True)
            self._complete(stream_id, stream, told=True)

    def send_complete(self, stream_id: int) -> None:
        """End this direction of a stream; needs no credit. A responder ends a channel in both directions (RX-56).

        A subscription has no such end: the peer gets ERROR[CANCELED] (RX-53).

        Raises:
            LocalProtocolError: no such stream, or this direction is complete already.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and stream.state is not _RECEIVING:
            self._complete(stream_id, stream, told=False)
            return
        waiting = self._waiting.get(stream_id)
        if waiting is None or waiting.kind is not _CHANNEL or waiting.complete:
            raise self._cannot_send(stream_id)
        waiting.complete = True

    def _complete(self, stream_id: int, stream: LiveStream, *, told: bool) -> None:
        if stream.requester:
            kind, by = f.REQUEST_CHANNEL, StreamInput.SEND_COMPLETE
        else:
            kind, by = f.RESPONSE, StreamInput.RESPONDER_COMPLETE
        if stream.kind is _SUBSCRIPTION:
            # RX-53
            self._put_last(stream_id, self._error_frame(stream_id, ErrorCode.CANCELED, b"the source has ended"))
        elif not told:
            self._put_last(stream_id, f.encode(kind, stream_id, f.COMPLETE))
        self._advance(stream_id, stream, by)

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
            self._put_last(stream_id, self._error_frame(stream_id, code, data, metadata))
            self._advance(stream_id, stream, StreamInput.SEND_ERROR)

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
            self._put_own(self._cancel_frame(stream_id, metadata))
            self._advance(stream_id, stream, StreamInput.SEND_CANCEL)
        elif stream.kind is not _CHANNEL:
            raise LocalProtocolError(
                f"the responder of stream {stream_id} cannot cancel it (send an error)", rule="RX-56"
            )
        elif stream.state is _BOTH:
            self._advance(stream_id, stream, StreamInput.SEND_STOP)

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

    def _fragments(self, kind: int, stream_id: int, flags: int, fixed: bytes, payload: Payload) -> Iterator[bytes]:
        # RX-75: with the header. `split` counts 3 bytes for a metadata length, here it has 4.
        room = self._fragment - 13
        for part, follows in split(payload, room - len(fixed), room):
            # RX-72: C on the last only. RX-71: N and the initial n on the first only.
            part_flags = flags & ~f.COMPLETE | f.FOLLOWS if follows else flags
            yield f.encode(kind, stream_id, part_flags, fixed, part.metadata, part.data)
            flags &= ~f.INITIAL
            fixed = b""


_Handler = Callable[[ReactiveSocketCore, int, int, int, _Parsed, list[Event]], None]
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
