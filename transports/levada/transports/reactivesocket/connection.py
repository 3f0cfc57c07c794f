"""The connection below the streams: framing, set-up, leases, keepalive, drain and end.

The streams are in `core`, whose class derives from the class here. It is one object, split into two files for the reader.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Self

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.reactivesocket import frames as f
from levada.transports.reactivesocket.codes import SETUP_CODES, ErrorCode
from levada.transports.reactivesocket.frames import FrameError
from levada.transports.reactivesocket.state import CONNECTION, ConnectionInput, ConnectionState
from levada.transports.rsocket.config import CoreConfig, mime_type_fault
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    Event,
    KeepaliveReceived,
    LeaseGranted,
    MetadataPushed,
    PeerFellSilent,
    SetupAccepted,
    SetupReceived,
    error_text,
)
from levada.transports.rsocket.lease import Allowance
from levada.transports.rsocket.payload import Payload
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

__all__ = ["ConnectionCore", "Parsed"]

MAX_U32: Final = 2**32 - 1

_AWAITING_SETUP, _DECIDING, _OPENING = ConnectionState.AWAITING_SETUP, ConnectionState.DECIDING, ConnectionState.OPENING
_OPEN, _DRAINING, _ENDED = ConnectionState.OPEN, ConnectionState.DRAINING, ConnectionState.ENDED

Parsed = tuple[tuple[int, ...], bytes | None, bytes]
"""What `levada.transports.reactivesocket.frames.parse` returns: fixed fields, metadata, data."""


class ConnectionCore(ReactiveStreamsCore):
    """The connection of a `ReactiveSocketCore`, which describes the arguments."""

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
        # Bytes in.
        # Until a client is accepted, a frame has at most the bytes of the whole backlog.
        self._max_frame = config.max_frame_size if client else min(config.max_frame_size, config.max_setup_backlog)
        self._rest = bytearray()  # of a frame that is not whole; in DECIDING all that came
        self._wanted = 0  # bytes that `_rest` must have before it is worth a look
        self._base = 0  # bytes received before the first of `_rest`, or of the chunk in hand
        self._at = 0  # bytes received before the frame in hand
        # Leases.
        self._leases = client and config.lease is not None
        self._granted, self._held = Allowance(config.lease_grace), Allowance()
        self._lease_sent = False
        # Time.
        self._heard = self._judged_from = now
        self._setup_deadline = None if client else now + config.setup_timeout
        self._drain_deadline: float | None = None
        # RX-35: 0 is no keepalive, no limit. Without the former silence is no sign of anything.
        self._keepalive = config.keepalive_interval if client else 0.0
        self._lifetime = config.max_lifetime if self._keepalive else 0.0
        self._next_keepalive = now + self._keepalive if self._keepalive else None
        if client:
            self._send_setup()

    # Implemented by the streams.

    @abstractmethod
    def _receive(
        self, kind: int, flags: int, stream_id: int, data: bytes, at: int, end: int, events: list[Event]
    ) -> None:
        """Take one whole frame whose fixed fields begin at `at`."""

    @abstractmethod
    def _lease_came(self) -> None:
        """Send the requests that wait for a lease."""

    @abstractmethod
    def _refuse_waiting(self, events: list[Event]) -> None:
        """Fail the requests that wait for a lease."""

    @abstractmethod
    def _end_streams(self, code: int, text: str, events: list[Event]) -> None:
        """Report the end of the connection on every stream, and forget the streams."""

    @property
    def missing(self) -> int:
        """Bytes still missing from a frame that has begun to arrive; 0 if there is none, or on a framed carrier."""
        return max(0, self._wanted - len(self._rest)) if self._rest else 0

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the carrier, cut anywhere, and return their events; ``b""`` means `connection_lost`.

        Raises:
            LocalProtocolError: the carrier keeps the boundaries of messages.

        Source: RX-2 to RX-7.
        """
        if self._framed:
            raise self._other_input()
        if not data:
            return self.connection_lost(0, "", now)
        events, self._events = self._events, []
        if self._state is _ENDED:
            return events  # RX-7
        self._now = self._heard = self._judged_from = now  # RX-82: everything counts as life
        if self._state is _DECIDING:
            self._rest += data
            self._bound_backlog(events)
            return events
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return events
            data = bytes(self._rest)
            self._rest.clear()
        self._receive_frames(data, events)
        self._end_if_drained(events)
        return events

    def receive_message(self, message: bytes, now: float) -> list[Event]:
        """Take exactly one message from the carrier, a frame without its length field, and return its events (RX-2).

        Raises:
            LocalProtocolError: the carrier is a byte stream.
        """
        if not self._framed:
            raise self._other_input()
        events, self._events = self._events, []
        if self._state is _ENDED:
            return events  # RX-7
        self._now = self._heard = self._judged_from = now  # RX-82
        if self._state is _DECIDING:
            self._rest += f.LENGTH.pack(len(message) + 4)
            self._rest += message
            self._bound_backlog(events)
        else:
            self._receive_message(message, events)
        self._end_if_drained(events)
        return events

    def _bound_backlog(self, events: list[Event]) -> None:
        if len(self._rest) > self._config.max_setup_backlog:
            self._at = self._base
            self._fail("RX-39", f"more than {self._config.max_setup_backlog} bytes behind SETUP", events)

    def _receive_message(self, data: bytes, events: list[Event]) -> None:
        self._at = self._base
        self._base += len(data)
        # RX-5: counted as on other carriers, with the 4 bytes of the length field.
        if not 8 <= len(data) <= self._max_frame - 4:
            return self._fail("RX-5", f"message of {len(data)} bytes, 8 to {self._max_frame - 4} wanted", events)
        kind, flags, stream_id = f.HEADER.unpack_from(data)
        return self._receive(kind, flags, stream_id, data, 8, len(data), events)

    def _receive_frames(self, data: bytes, events: list[Event]) -> None:
        unpack, limit, receive, base = f.FULL_HEADER.unpack_from, self._max_frame, self._receive, self._base
        at, end = 0, len(data)
        while end - at >= 12:
            length, kind, flags, stream_id = unpack(data, at)
            stop = at + length
            if stop > end or not 12 <= length <= limit:
                break
            self._at = base + at
            receive(kind, flags, stream_id, data, at + 12, stop, events)
            at = stop
            if self._state is _DECIDING or self._state is _ENDED:
                break
        self._base = base + at
        self._wanted = 4
        if self._state is _ENDED:
            return None
        if end - at >= 4 and self._state is not _DECIDING:
            self._wanted = length = f.LENGTH.unpack_from(data, at)[0]
            # RX-3, RX-4: R set is a length that no limit allows. Checked before anything of that size is kept.
            if not 12 <= length <= limit:
                self._at = self._base
                return self._fail("RX-4", f"frame length {length}, 12 to {limit} wanted (see max_frame_size)", events)
        self._rest += memoryview(data)[at:]
        return None

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the queued frames, frames of stream 0 first. For a carrier of messages they have no length fields (RX-2)."""
        frames = super().data_to_send(now)
        return [frame[4:] for frame in frames] if self._framed else frames

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due; in the past if something is due at once (a drained connection ends so)."""
        if self._state is _ENDED:
            return None
        if self._state is _DRAINING and not (self._streams or self._in_turn):
            return -math.inf
        # While the application decides about SETUP nothing can be late.
        silence = self._judged_from + self._lifetime if self._lifetime and self._state is not _DECIDING else None
        deadlines = (self._setup_deadline, self._drain_deadline, self._next_keepalive, silence)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle_timeout(self, now: float) -> list[Event]:
        """Do everything that is due: keepalive, silence of the peer, set-up and drain time-outs."""
        self._now = now
        events = self.take_events()
        self._end_if_drained(events)
        if self._state is _ENDED:
            return events
        if self._setup_deadline is not None and now >= self._setup_deadline:
            # RX-36: without an ERROR frame.
            self._end(EndReason.TIMED_OUT, 0, f"no SETUP within {self._config.setup_timeout} s", events)
        elif self._drain_deadline is not None and now >= self._drain_deadline:
            self._end(EndReason.CLOSED, 0, f"streams open {self._config.drain_timeout} s after the drain began", events)
        elif self._lifetime and now >= self._judged_from + self._lifetime and self._state is not _DECIDING:
            self._peer_is_silent(now, events)
        if self._next_keepalive is not None and now >= self._next_keepalive and self._state is not _ENDED:
            self._next_keepalive = now + self._keepalive
            self.send_keepalive()  # RX-80: one, however many were missed
        return events

    def _peer_is_silent(self, now: float, events: list[Event]) -> None:
        silence = now - self._heard
        if not self._config.close_when_silent:
            self._judged_from = now  # reported again after another lifetime
            events.append(PeerFellSilent(silence))
            return
        text = f"nothing came for {silence:.3f} s"
        self._tell_end(ErrorCode.CONNECTION_ERROR, text)  # RX-82
        self._end(EndReason.TIMED_OUT, ErrorCode.CONNECTION_ERROR, text, events)

    def touch(self, now: float) -> None:
        """Count the peer's silence from now on: this side has not been reading."""
        self._judged_from = max(self._judged_from, now)

    def send_keepalive(self, data: bytes = b"") -> None:
        """Send a KEEPALIVE that the peer answers; the answer is reported as `KeepaliveReceived` (RX-80). A client does so by itself.

        Raises:
            LocalProtocolError: not set up, ended, or too much for a frame.
        """
        self._check_live(len(data))
        self._control.append(f.encode(f.KEEPALIVE, 0, f.RESPOND, data=data))

    def _on_keepalive(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
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
        if len(setup) > self._max_frame:
            raise ConfigurationError(f"SETUP of {len(setup)} bytes (raise max_frame_size, or shorten setup_payload)")
        self._control.append(setup)

    def _receive_first(
        self, kind: int, flags: int, stream_id: int, raw: bytes, at: int, end: int, events: list[Event]
    ) -> None:
        """Server: take the first frame, which must be a valid SETUP."""
        if kind != f.SETUP or stream_id:
            text = f"expected SETUP on stream 0 as the first frame, got type {kind:#06x} on stream {stream_id}"
            return self._refuse(ErrorCode.INVALID_SETUP, text, events, "RX-30")
        try:
            numbers, mime_types, metadata, data = f.parse_setup(flags, raw, at, end)
        except FrameError as error:
            # RX-34: truncated. RX-12: a metadata length that cannot be does not make a first SETUP one to ignore.
            rule = "RX-34" if error.rule == "RX-9" else error.rule
            return self._refuse(ErrorCode.INVALID_SETUP, error.detail, events, rule)
        version, keepalive_ms, lifetime_ms = numbers
        leases, strict = bool(flags & f.LEASES), bool(flags & f.STRICT)
        understood = self._config.strict_mime_types
        if version != f.VERSION:  # RX-31
            return self._refuse(
                ErrorCode.INVALID_SETUP, f"version {version}, {f.VERSION} is spoken here", events, "RX-31"
            )
        if fault := mime_type_fault(*mime_types):
            return self._refuse(ErrorCode.INVALID_SETUP, fault, events, "RX-32")
        if strict and understood is not None and not understood.issuperset(mime_types):  # RX-33
            text = f"MIME types {mime_types[0]!r} and {mime_types[1]!r} are not both understood"
            return self._refuse(ErrorCode.UNSUPPORTED_SETUP, text, events, "RX-33")
        if leases and self._config.lease is None:  # RX-34
            return self._refuse(ErrorCode.UNSUPPORTED_SETUP, "no leases here", events, "RX-34")
        self._leases = leases
        self._lifetime = lifetime_ms / 1000 if keepalive_ms else 0.0  # RX-35
        self._setup_deadline = None
        self._enter(ConnectionInput.RECEIVE_SETUP)
        times = keepalive_ms / 1000, lifetime_ms / 1000
        events.append(
            SetupReceived((0, version), *times, *mime_types, Payload(data, metadata), lease=leases, strict=strict)
        )
        return None

    def accept_setup(self, now: float) -> None:
        """Server: accept the client, after `SetupReceived`. `take_events` has the events of its later frames.

        Raises:
            LocalProtocolError: there is no SETUP to decide about.
        """
        self._check_deciding()
        self._now = self._heard = self._judged_from = now
        self._enter(ConnectionInput.ACCEPT)
        self._max_frame = self._config.max_frame_size
        self._send_first_lease()
        backlog = bytes(self._rest)
        self._rest.clear()
        self._receive_frames(backlog, self._events)

    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived` (RX-34).

        Raises:
            LocalProtocolError: there is no SETUP to decide about, or the code is not one of set-up.
        """
        self._check_deciding()
        if code not in SETUP_CODES:
            raise LocalProtocolError(f"code {code:#x} is not one of set-up", rule="RX-22")
        self._refuse(code, text, self._events)

    def _check_deciding(self) -> None:
        if self._state is not _DECIDING:
            raise LocalProtocolError(f"no SETUP to decide about, the connection is {self._state.value}", rule="RX-30")

    def _accepted(self, events: list[Event]) -> None:
        """Client: note that the server has accepted SETUP (RX-40)."""
        if self._state is _OPENING:
            self._enter(ConnectionInput.ACCEPT)
            events.append(SetupAccepted())

    def send_lease(self, ttl: float, n: int, now: float, metadata: bytes | None = None) -> None:
        """Allow the peer `n` requests within `ttl` seconds. This replaces the earlier lease (RX-65).

        Raises:
            LocalProtocolError: SETUP was without leases, a number does not fit, not set up, ended, or too much for a frame.
        """
        self._check_live(len(metadata or b""))
        if not self._leases:
            raise LocalProtocolError("this connection has no leases", rule="RX-67")
        if not (0 <= n <= MAX_U32 and 0 <= ttl <= MAX_U32 / 1000):
            raise LocalProtocolError(f"a lease of {n} requests in {ttl} s does not fit 32 bits", rule="RX-65")
        self._lease_sent = True
        self._granted.replace(ttl, n, now)  # RX-67: with the grace
        self._control.append(f.encode(f.LEASE, 0, 0, f.TWO_WORDS.pack(round(ttl * 1000), n), metadata))

    def _send_first_lease(self) -> None:
        lease = self._config.lease
        # RX-38: each side must send one, if the application has not done so before.
        if self._leases and lease is not None and not self._lease_sent:
            self.send_lease(lease.ttl, lease.n, self._now, lease.metadata)

    def _on_lease(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
        if stream_id:
            return  # RX-109
        self._accepted(events)  # RX-40
        if not self._leases:
            return  # RX-67
        (ttl_ms, n), metadata, _ = parsed
        self._held.replace(ttl_ms / 1000, n, self._now)  # RX-65: from reception on
        events.append(LeaseGranted(ttl_ms / 1000, n, metadata))
        if self._client:
            self._send_first_lease()
        self._lease_came()

    def send_metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; needs neither lease nor credit (RX-66).

        Raises:
            LocalProtocolError: not set up, ended, or too much for a frame.
        """
        self._check_live(len(metadata))
        self._control.append(f.encode(f.METADATA_PUSH, 0, metadata=metadata))

    def _on_metadata_push(self, kind: int, stream_id: int, flags: int, parsed: Parsed, events: list[Event]) -> None:
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

    def drain(self, now: float) -> list[Event]:
        """Stop new requests in both directions. The connection ends with its last stream.

        This dialect has no frame that announces a drain: requests of the peer are answered with REJECTED.
        Ask for `next_deadline` after each call that may have ended a stream: it is in the past once the last stream has ended.
        """
        self._now = now
        events = self.take_events()
        if self._state is _AWAITING_SETUP:
            self._end(EndReason.CLOSED, 0, "", events)
        elif self._state is _DECIDING:
            self._refuse(ErrorCode.REJECTED_SETUP, "", events)
        elif self._state is _OPEN or self._state is _OPENING:
            self._enter(ConnectionInput.DRAIN)
            self._drain_deadline = now + self._config.drain_timeout
            self._refuse_waiting(events)
            self._end_if_drained(events)
        return events

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """End the connection now: an ERROR frame is queued, and all streams fail. Does nothing if the connection has ended.

        Args:
            code: not used: this dialect only has CONNECTION_ERROR for it (RX-22).
            reason: the text of the frame.
            now: the current time.
        """
        events = self.take_events()
        if self._state is not _ENDED:
            self._tell_end(ErrorCode.CONNECTION_ERROR, reason)
            self._end(EndReason.CLOSED, ErrorCode.CONNECTION_ERROR, reason, events)
        return events

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """The carrier is gone, and the connection with it (RX-60)."""
        self._now = now
        events = self.take_events()
        if self._state is not _ENDED:
            self._end(EndReason.LOST, 0, reason or "the carrier ended", events)
        return events

    def resume(self, *, framed: bool, now: float) -> None:
        """Raise `LocalProtocolError`: there is no resumption in this dialect (RX-60)."""
        raise LocalProtocolError("ReactiveSocket has no resumption", rule="RX-60")

    def resume_on(self, carrier: Self, now: float) -> None:
        """Raise `LocalProtocolError`: there is no resumption in this dialect (RX-60)."""
        raise LocalProtocolError("ReactiveSocket has no resumption", rule="RX-60")

    def _on_connection_error(self, code: int, data: bytes, events: list[Event]) -> None:
        """ERROR on stream 0."""
        text = error_text(data)  # RX-23
        if code not in SETUP_CODES:
            self._end(EndReason.FAILED_BY_PEER, code, text, events)  # RX-25, RX-26
        elif self._state is _OPENING:
            self._end(EndReason.REFUSED, code, text, events)  # RX-40; at other times RX-106, RX-107

    def _send_error(self, stream_id: int, code: int, data: bytes, metadata: bytes | None = None) -> None:
        if code == ErrorCode.REJECTED and metadata is None:
            metadata = data  # RX-23: the text has the reason in the metadata, others look at the data
        self._put_last(stream_id, f.encode(f.ERROR, stream_id, 0, f.WORD.pack(code), metadata, data))

    def _put_last(self, stream_id: int, frame: bytes) -> None:
        """Queue the frame that ends this direction, which carries no payload of the owner."""
        self.own_bytes += len(frame)
        self._put_behind(stream_id, frame)

    def _put_own(self, frame: bytes) -> None:
        """Queue a frame of a stream that carries no payload of the owner."""
        self.own_bytes += len(frame)
        self._out.append(frame)

    def _tell_end(self, code: int, text: str) -> None:
        # Behind what is queued, so that nothing of it comes too late.
        self._send_error(0, code, text.encode()[:65_536])

    def _refuse(self, code: int, text: str, events: list[Event], rule: str = "") -> None:
        """Server: refuse SETUP; the ERROR frame is sent, then the carrier is closed (RX-34)."""
        self._tell_end(code, text)
        self._end(EndReason.REFUSED, code, text, events, rule)

    def _fail(self, rule: str, text: str, events: list[Event]) -> None:
        """End the connection for a fault of the peer."""
        self._tell_end(ErrorCode.CONNECTION_ERROR, text)
        self._end(EndReason.PROTOCOL, ErrorCode.CONNECTION_ERROR, text, events, rule)

    def _end(self, reason: EndReason, code: int, text: str, events: list[Event], rule: str = "") -> None:
        self._rest = bytearray()
        self._end_streams(code or ErrorCode.CONNECTION_ERROR, text, events)
        self._enter(ConnectionInput.END)
        events.append(ConnectionEnded(reason, code, text, rule, self._at if rule else 0))

    def _enter(self, by: ConnectionInput) -> None:
        self._state = CONNECTION[self._state, by]

    def _end_if_drained(self, events: list[Event]) -> None:
        if self._state is _DRAINING and not (self._streams or self._in_turn):
            self._end(EndReason.CLOSED, 0, "every stream has ended", events)

    def _check_live(self, size: int = 0) -> None:
        """Refuse to send before set-up or after the end, or more bytes than this side's frames may have."""
        if self._state not in (_OPENING, _OPEN, _DRAINING):
            raise LocalProtocolError(f"not possible while the connection is {self._state.value}")
        if size + 24 > self._max_frame:
            raise LocalProtocolError(f"{size} bytes do not fit into a frame (raise max_frame_size)", rule="RX-3")
