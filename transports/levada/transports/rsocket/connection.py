"""The connection: set-up, leases, keepalive, drain, sessions and their carriers, and everything on stream 0.

`core.py` adds the streams, `reactive_streams.py` has what ReactiveSocket does alike.  Rules of this file:

* Bytes leave through `_put` (streams; `_put_own` if the owner gave none of them) and `_put_control` (stream 0, which goes first).  With
  resumption, `_put` also keeps the frame, and without a carrier it does only that, so no other code needs to know whether there is a carrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import attrs

from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.rsocket.codes import SETUP_CODES, ErrorCode, InvalidFrame
from levada.transports.rsocket.config import LARGEST_SENT, CoreConfig, mime_type_fault
from levada.transports.rsocket.events import (
    ConnectionDraining,
    EndReason,
    Event,
    ExtensionReceived,
    KeepaliveReceived,
    MetadataPushed,
    ResumeReceived,
    SessionResumed,
    SessionSuspended,
    SetupAccepted,
    SetupReceived,
    error_text,
)
from levada.transports.rsocket.frames import (
    IGNORE,
    MAX_U31,
    CancelFrame,
    ErrorFrame,
    ExtensionFrame,
    Frame,
    KeepaliveFrame,
    LeaseFrame,
    MetadataPushFrame,
    ResumeFrame,
    ResumeOkFrame,
    SetupFrame,
    UnknownFrame,
    decode,
)
from levada.transports.rsocket.reactive_streams import LIVE, CoreStatistics, ReactiveStreamsCore
from levada.transports.rsocket.resumption import Replay, Sessions
from levada.transports.rsocket.state import CONNECTION, ConnectionInput, ConnectionState

__all__ = ["RSocketConnection"]

_VERSIONS: Final = ((1, 0), (0, 2))  # RS-41
_REFUSALS: Final = SETUP_CODES - {ErrorCode.REJECTED_RESUME}
_LINGER: Final = 1.0
"""The most seconds that a server waits behind CONNECTION_CLOSE until the client closes the carrier. A request that crosses the frame is rejected,
so the client knows that it was not done; without this wait it would be lost with the carrier."""
_WITHOUT_CARRIER: Final = (ConnectionState.SUSPENDED, ConnectionState.RESUMING)


class RSocketConnection(ReactiveStreamsCore):
    """`RSocketCore` without its streams; that class describes the arguments."""

    prefix, counted, smallest = 3, 0, 6  # RS-2, RS-5
    length_rules = "RS-5", "RS-5"

    def __init__(
        self,
        config: CoreConfig,
        *,
        client: bool,
        framed: bool,
        now: float,
        random_bytes: Callable[[int], bytes],
        sessions: Sessions[Any] | None = None,  # of the class that is made of this one
    ) -> None:
        if config.resume and not client and sessions is None:
            raise ConfigurationError("a server that resumes needs sessions, shared by the cores of one listener")
        super().__init__(config, client=client, framed=framed, now=now)
        self._sessions = sessions
        self._received = 0  # RS-92: position in the peer's direction
        self._replay: Replay | None = None
        self._plain = not framed  # a byte carrier, and nothing is kept: no frame is needed in one piece
        self._asked_position = False
        self._token: bytes | None = None
        self._version = config.version
        self._resume_frame: ResumeFrame | None = None
        self._farewell = ""
        """How the peer ended the connection, once it has sent CONNECTION_CLOSE."""
        if client:
            self._send_setup(random_bytes)

    def statistics(self) -> CoreStatistics:
        """Return the present counts."""
        return attrs.evolve(super().statistics(), bytes_kept=0 if self._replay is None else self._replay.kept)

    def _put(self, frame: bytes) -> None:
        """Queue a whole frame of a stream, without its length field."""
        replay = self._replay
        if replay is not None:
            replay.keep(frame)
            if self._state in _WITHOUT_CARRIER:
                return  # RS-102: it is sent on the next carrier
            # Only KEEPALIVEs tell the peer's position. Ask once, when the buffer is half full, before frames are dropped (RS-94).
            if replay.half_full and not self._asked_position:
                self._asked_position = True
                self._put_control(KeepaliveFrame(respond=True, position=self._received))
        if not self._framed:
            self._out.append(len(frame).to_bytes(3))  # RS-2
        self._out.append(frame)

    def _put_control(self, frame: Frame, *, behind: bool = False) -> None:
        """Queue a frame of stream 0. ERROR goes `behind` the queued frames, since the peer ignores frames after it."""
        data = frame.encode()
        queue = self._out if behind else self._control
        if not self._framed:
            queue.append(len(data).to_bytes(3))
        queue.append(data)

    def _put_error(self, code: int, text: bytes) -> None:
        self._put_control(ErrorFrame(0, code, text), behind=True)

    def _cancel_frame(self, stream_id: int) -> bytes:
        return CancelFrame(stream_id).encode()

    def _error_frame(self, stream_id: int, code: int, data: bytes) -> bytes:
        return ErrorFrame(stream_id, code, data).encode()

    def _forget_bytes(self) -> None:
        """Drop partly read and unsent data of a carrier that is gone."""
        self._control.clear()
        self._out.clear()
        self._forget_unread()

    def _forget_session(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        if self._sessions is not None and self._token is not None:
            self._sessions.remove(self._token)

    def _refuse_backlog(self, events: list[Event]) -> None:
        self._refuse(events, ErrorCode.REJECTED_SETUP, "too much was sent behind SETUP")

    def _end_undecided(self, events: list[Event]) -> None:
        self._end(events, EndReason.CLOSED, ErrorCode.REJECTED_SETUP, tell=True)

    def _end_drain(self, events: list[Event], text: str) -> None:
        if self._ended_by is EndReason.CLOSED:  # this side began the drain
            # RS-31: not earlier. A peer may end its streams when it gets CONNECTION_CLOSE, as rsocket-java does.
            said = text.encode() if self._streams else b""
            self._put_control(ErrorFrame(0, ErrorCode.CONNECTION_CLOSE, said), behind=True)
            if not (self._client or self._streams or self._in_turn) and self._now < self._until:
                self._move(ConnectionInput.SEND_CLOSE)
                self._until = min(self._until, self._now + _LINGER)
                return
        self._end(events, self._ended_by, ErrorCode.CONNECTION_CLOSE, text)

    def _lost(self, events: list[Event], reason: str, now: float) -> None:
        if self._farewell and not reason and self._state is ConnectionState.DRAINING:
            self._end(events, EndReason.CLOSED_BY_PEER, ErrorCode.CONNECTION_CLOSE, self._farewell)
        else:
            super()._lost(events, reason, now)

    def _send_setup(self, random_bytes: Callable[[int], bytes]) -> None:
        config = self._config
        if config.resume:
            # RS-104: unguessable, and chosen by the client.
            self._token = config.resume_token if config.resume_token is not None else random_bytes(16)
            self._keep_frames()
        setup = SetupFrame(
            version=config.version,
            keepalive_ms=round(config.keepalive_interval * 1000),
            lifetime_ms=round(config.max_lifetime * 1000),
            token=self._token,
            metadata_mime_type=config.metadata_mime_type,
            data_mime_type=config.data_mime_type,
            payload=config.setup_payload,
            lease=self._leasing,
        )
        if len(setup.encode()) > LARGEST_SENT:
            raise ConfigurationError("setup_payload does not fit into a frame, and SETUP cannot be fragmented")
        self._put_control(setup)

    def _keep_frames(self) -> None:
        self._replay = Replay(self._config.resume_buffer, None if self._sessions is None else self._sessions.room)
        self._plain = False

    def _first_frame(self, data: bytes, events: list[Event]) -> None:
        """Server: accept only SETUP or RESUME on stream 0 (RS-40, RS-48)."""
        try:
            frame = decode(data)
        except InvalidFrame as error:
            # RS-12, RS-42: a damaged first frame is refused with the code of the frame that it claims to be.
            is_resume = data[4] >> 2 == 0x0D
            code = ErrorCode.REJECTED_RESUME if is_resume else ErrorCode.INVALID_SETUP
            self._refuse(events, code, error.detail, "RS-12" if is_resume else "RS-42")
            return
        match frame:
            case SetupFrame(stream_id=0):
                self._on_first_setup(frame, events)
            case ResumeFrame(stream_id=0):
                self._on_first_resume(frame, events)
            case _:
                text = "the first frame must be SETUP or RESUME on stream 0"
                self._refuse(events, ErrorCode.INVALID_SETUP, text, "RS-48")

    def _on_first_setup(self, setup: SetupFrame, events: list[Event]) -> None:
        config = self._config
        if setup.version not in _VERSIONS:
            text = "version {}.{} is not supported; 1.0 and 0.2 are".format(*setup.version)
            self._refuse(events, ErrorCode.INVALID_SETUP, text, "RS-41")
        elif setup.keepalive_ms == 0 or setup.lifetime_ms == 0:
            self._refuse(events, ErrorCode.INVALID_SETUP, "keepalive interval and lifetime must be above 0", "RS-42")
        elif fault := mime_type_fault(setup.metadata_mime_type, setup.data_mime_type):
            self._refuse(events, ErrorCode.INVALID_SETUP, fault, "RS-42")
        elif setup.token is not None and not config.resume:
            self._refuse(events, ErrorCode.REJECTED_SETUP, "sessions cannot be resumed here", "RS-43")
        elif setup.token == b"":
            self._refuse(events, ErrorCode.INVALID_SETUP, "the resume token is empty", "RS-44")
        elif setup.lease and config.lease is None:
            self._refuse(events, ErrorCode.UNSUPPORTED_SETUP, "leases are not supported here", "RS-45")
        elif setup.token is not None and not self._register(setup.token):
            self._refuse(events, ErrorCode.REJECTED_SETUP, "the resume token is in use, or too many sessions", "RS-44")
        else:
            self._leasing = setup.lease
            self._lifetime = setup.lifetime_ms / 1000  # RS-107
            self._version = setup.version
            self._move(ConnectionInput.RECEIVE_SETUP)
            events.append(
                SetupReceived(
                    version=setup.version,
                    keepalive_interval=setup.keepalive_ms / 1000,
                    max_lifetime=setup.lifetime_ms / 1000,
                    metadata_mime_type=setup.metadata_mime_type,
                    data_mime_type=setup.data_mime_type,
                    payload=setup.payload,
                    lease=setup.lease,
                    resume_token=setup.token,
                )
            )

    def _register(self, token: bytes) -> bool:
        if self._sessions is None or not self._sessions.add(token, self):
            return False
        self._token = token
        self._keep_frames()
        return True

    def reject_setup(self, text: str = "", code: int = ErrorCode.REJECTED_SETUP) -> None:
        """Server: refuse the client, after `SetupReceived` (RS-46).

        Raises:
            LocalProtocolError: there is no SETUP to decide about, or `code` is not one of a refused SETUP.
        """
        self._require_setup()
        if code not in _REFUSALS:
            raise LocalProtocolError(f"{code:#x} is no code of a refused SETUP", rule="RS-47")
        self._refuse(self._events, ErrorCode(code), text)

    def send_metadata_push(self, metadata: bytes) -> None:
        """Send metadata of the connection as a whole; needs neither lease nor credit (RS-26).

        Raises:
            LocalProtocolError: the connection is not set up, has ended or has no carrier, or the metadata does not fit into a frame.
        """
        self._require(*LIVE)
        if len(metadata) > LARGEST_SENT - 6:
            raise LocalProtocolError(f"metadata of {len(metadata)} bytes does not fit into a frame", rule="RS-3")
        self._put_control(MetadataPushFrame(metadata))

    def send_lease(self, ttl: float, n: int, now: float, metadata: bytes | None = None) -> None:
        """Allow the peer `n` requests within `ttl` seconds. This replaces the earlier lease (RS-130).

        Raises:
            LocalProtocolError: SETUP did not ask for leases, a value is out of range, or the connection is not set up, has ended or has
            no carrier.
        """
        self._require(*LIVE)
        ttl_ms = round(ttl * 1000)
        if not (
            self._leasing and 0 <= n <= MAX_U31 and 0 <= ttl_ms <= MAX_U31 and len(metadata or b"") <= LARGEST_SENT - 14
        ):
            raise LocalProtocolError("leases were not agreed on in SETUP, or a value is out of range", rule="RS-130")
        self._granted.replace(ttl, n, now)
        self._granted_on_carrier = True
        self._put_control(LeaseFrame(ttl_ms, n, metadata))

    def send_keepalive(self, data: bytes = b"") -> None:
        """Send a KEEPALIVE that the peer answers; the answer is reported as `KeepaliveReceived` (RS-105). A client does so by itself.

        Raises:
            LocalProtocolError: the connection is not set up, has ended or has no carrier, or the data does not fit into a frame.
        """
        self._require(*LIVE)
        if len(data) > LARGEST_SENT - 14:
            raise LocalProtocolError(f"{len(data)} bytes do not fit into a frame", rule="RS-3")
        self._put_control(KeepaliveFrame(respond=True, position=self._position(), data=data))

    def send_extension(self, stream_id: int, extended_type: int, data: bytes, *, ignorable: bool = True) -> None:
        """Send an EXT frame. A peer that does not know the type drops it if it is `ignorable`, and may close the connection otherwise.

        Source: RS-11.

        Raises:
            LocalProtocolError: the connection is not set up, has ended or has no carrier, a number is out of range, the data does not
                fit into a frame, or the frame names a stream of a session that can be resumed: peers do not agree on whether such a
                frame has a position (RS-91).
        """
        self._require(*LIVE)
        if not (0 <= stream_id <= MAX_U31 and 0 < extended_type <= MAX_U31 and len(data) <= LARGEST_SENT - 10):
            raise LocalProtocolError("no such stream or extended type, or too much data for a frame", rule="RS-11")
        if stream_id and self._replay is not None:
            raise LocalProtocolError("no EXT on a stream of a session that can be resumed", rule="RS-91")
        frame = ExtensionFrame(stream_id=stream_id, extended_type=extended_type, data=data, ignore=ignorable)
        if stream_id:
            self._put(frame.encode())
        else:
            self._put_control(frame)

    def _connection_frame(self, frame: Frame, events: list[Event]) -> None:
        """Apply a frame of a connection that is set up. Frames that make no sense here are ignored (RS-113)."""
        match frame:
            case KeepaliveFrame(stream_id=0):
                self._on_keepalive(frame, events)
            case ErrorFrame(stream_id=0):
                self._on_connection_error(frame, events)
            case LeaseFrame(stream_id=0):
                self._on_lease(frame, events)
            case MetadataPushFrame(stream_id=0):
                events.append(MetadataPushed(frame.metadata))
            case ResumeFrame(stream_id=0) if not self._client:
                self._on_late_resume(events)
            case ExtensionFrame():
                if frame.extended_type in self._config.extensions:
                    events.append(ExtensionReceived(frame.stream_id, frame.extended_type, frame.data, frame.metadata))
                elif not frame.ignore:
                    self._fail(events, "RS-11", f"EXT type {frame.extended_type:#x} is not known")
            case UnknownFrame():
                if not frame.flags & IGNORE:
                    self._fail(events, "RS-11", f"frame type {frame.type:#04x} is not known")
            case _:
                # RS-126, RS-129: unexpected SETUP, RESUME and RESUME_OK. RS-26, RS-125, RS-129: METADATA_PUSH, KEEPALIVE and
                # LEASE on a stream.
                pass

    def _on_connection_error(self, frame: ErrorFrame, events: list[Event]) -> None:
        text = error_text(frame.data)  # RS-28
        if frame.code in SETUP_CODES:
            if self._state is ConnectionState.OPENING:
                self._end(events, EndReason.REFUSED, frame.code, text)  # RS-53
            # else RS-127, RS-128: ignored
        elif frame.code == ErrorCode.CONNECTION_CLOSE:
            if self._state is ConnectionState.CLOSING:
                self._end(events, EndReason.CLOSED, ErrorCode.CONNECTION_CLOSE, "both sides have ended the connection")
            elif self._state is not ConnectionState.DRAINING:
                self._farewell = "the peer closed the connection" + (f": {text}" if text else "")
                events.append(ConnectionDraining(text))
                self._drain(events, EndReason.CLOSED_BY_PEER, self._now)
        else:
            # RS-29: codes of streams, and unknown ones, count as CONNECTION_ERROR here.
            self._end(events, EndReason.FAILED_BY_PEER, frame.code, text)

    def _on_lease(self, frame: LeaseFrame, events: list[Event]) -> None:
        if self._leasing:  # RS-135
            self._setup_accepted(events)
            self._lease_received(frame.ttl_ms, frame.n, frame.metadata, events)

    def _position(self) -> int:
        return 0 if self._replay is None else self._received

    def _on_keepalive(self, frame: KeepaliveFrame, events: list[Event]) -> None:
        if self._replay is not None:
            self._asked_position = False
            if not self._replay.release(frame.position):
                self._fail(events, "RS-93", f"no frame of this side ends at position {frame.position}")
                return
        if frame.respond:
            # RS-106: the same data back.
            self.own_bytes += len(frame.data)
            self._put_control(KeepaliveFrame(respond=False, position=self._position(), data=frame.data))
        else:
            events.append(KeepaliveReceived(frame.data))

    def _lose_carrier(self, events: list[Event], text: str, now: float) -> bool:
        """Suspend the session, if there is one that can be resumed in this state (RS-101)."""
        if self._replay is None or (self._state, ConnectionInput.LOSE_CARRIER) not in CONNECTION:
            return False
        self._suspend(events, text, now)
        return True

    def _suspend(self, events: list[Event], text: str, now: float) -> None:
        if self._state is not ConnectionState.RESUMING:  # RS-98: another attempt has the rest of the time
            self._until = now + self._config.resume_timeout
        self._move(ConnectionInput.LOSE_CARRIER)
        self._forget_bytes()
        self._allowed.replace(0, 0, now)  # RS-103: requests wait for a lease on the next carrier
        events.append(SessionSuspended(self._until, text))

    def resume(self, *, framed: bool, now: float) -> None:
        """Client: resume on a new carrier. RESUME is queued, and nothing else until the server answers (RS-95).

        Raises:
            LocalProtocolError: the session is not suspended, or this is a server.
        """
        self._require(ConnectionState.SUSPENDED)
        if not self._client or self._replay is None or self._token is None:
            raise LocalProtocolError("the client resumes; a server waits for ResumeReceived", rule="RS-95")
        self._move(ConnectionInput.SEND_RESUME)
        self._framed = framed
        self._heard = now
        frame = ResumeFrame(
            version=self._config.version,
            token=self._token,
            server_position=self._received,
            client_position=self._replay.first,
        )
        self._put_control(frame)

    def _resuming_frame(self, frame: Frame, events: list[Event]) -> None:
        """Client: the first frame on a new carrier."""
        match frame:
            case ResumeOkFrame(stream_id=0) if self._replay is not None:
                position = frame.client_position
                # RS-97.
                if position < self._replay.first or not self._replay.release(position):
                    self._fail(events, "RS-97", f"this side cannot send again from position {position}")
                    return
                self._move(ConnectionInput.RESUME)
                if not self._was_accepted:
                    self._was_accepted = True
                    events.append(SetupAccepted())
                self._go_on(events)
            case ErrorFrame(stream_id=0, code=ErrorCode.REJECTED_RESUME):
                text = error_text(frame.data)
                self._end(events, EndReason.REFUSED, frame.code, text)  # RS-98
            case ErrorFrame(stream_id=0):
                self._suspend(events, error_text(frame.data), self._now)  # RS-98
            case _:
                if frame.stream_id:
                    # Its position is unknown before RESUME_OK.
                    self._fail(events, "RS-95", "a frame of a stream before RESUME_OK")

    def _on_first_resume(self, frame: ResumeFrame, events: list[Event]) -> None:
        """Server: a carrier that begins with RESUME (RS-96)."""
        session = self._sessions.find(frame.token) if self._sessions is not None else None
        resumable = (ConnectionState.OPEN, ConnectionState.SUSPENDED)
        if session is None or session._version != frame.version or session.state not in resumable:
            # The same text for all three, since a token is a secret.
            self._refuse(events, ErrorCode.REJECTED_RESUME, "no such session", "RS-96")
            return
        self._move(ConnectionInput.RECEIVE_RESUME)
        self._resume_frame = frame
        events.append(ResumeReceived(session))

    def resume_on(self, carrier: Self, now: float) -> None:
        """Server: take over the carrier and the unread input of the core that reported `ResumeReceived`; that core has ended.

        Close the session's old carrier if there still is one; nothing more is sent on it (RS-102).

        Raises:
            LocalProtocolError: this session has ended or drains: `close` the carrier's core with `ErrorCode.REJECTED_RESUME`. Or
                `carrier` has not reported `ResumeReceived`.
        """
        self._require(ConnectionState.OPEN, ConnectionState.SUSPENDED)
        frame, replay = carrier._resume_frame, self._replay
        if frame is None or replay is None or carrier.state is not ConnectionState.HANDED_OVER:
            raise LocalProtocolError("that core reported no ResumeReceived", rule="RS-96")
        self._forget_bytes()
        self._framed = carrier._framed
        self._offset = carrier._offset
        self._tail += carrier._hand_over()
        self._move(ConnectionInput.RESUME)
        self._now = now
        events, position = self._events, frame.server_position
        # RS-96; the order matters, `release` drops what the client has.
        if frame.client_position > self._received or position < replay.first or not replay.release(position):
            self._refuse(events, ErrorCode.REJECTED_RESUME, "what is missing is no longer there", "RS-96")
            return
        self._put_control(ResumeOkFrame(self._received))
        self._go_on(events)
        self._grant_on_carrier()
        self._read_held(events)

    def _hand_over(self) -> bytes:
        """End this core, whose carrier another one has now; return the unread input."""
        unread = bytes(self._tail)
        self._forget_unread()
        self._move(ConnectionInput.END)
        return unread

    def _go_on(self, events: list[Event]) -> None:
        """Continue on a new carrier: send the frames that the peer has not received, before all later ones (RS-96, RS-97)."""
        assert self._replay is not None
        for frame in self._replay.frames():
            if not self._framed:
                self._out.append(len(frame).to_bytes(3))
            self._out.append(frame)
        self._asked_position = False
        # RS-103: leases do not carry over, keepalive starts afresh.
        self._allowed.replace(0, 0, self._now)
        self._granted.resume(self._now)
        self._granted_on_carrier = False
        self._heard = self._now
        if self._client:
            self._keepalive_at = self._now + self._config.keepalive_interval
        events.append(SessionResumed(self._replay.kept))

    def _on_late_resume(self, events: list[Event]) -> None:
        """Server: refuse RESUME on a carrier that has a connection; this ends the carrier but not its session (RS-100)."""
        text = "RESUME must be the first frame of a carrier"
        if not self._lose_carrier(events, text, self._now):
            self._fail(events, "RS-100", text)
            return
        self._put_control(ErrorFrame(0, ErrorCode.CONNECTION_ERROR, text.encode()))
