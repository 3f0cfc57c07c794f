"""The part of a connection before operations: authentication on either side, and its results."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.core import OpenStream, StopStream, StreamData

from .authentication import MIN_RESULT, Authentication, Octets, Result, read_authentication, read_result
from .codes import ErrorCode, OperationFault, close_code, sanitise
from .config import MaopConfig
from .events import Approved, Audited, AuthenticationReceived, Disapproved, Event, Output, StreamUnblocked
from .state import CONNECTION, ConnectionInput, ConnectionState
from .versions import CAPABILITY_PAIR, Capability, Version, parse_capabilities

if TYPE_CHECKING:
    from .shared import Quota

__all__ = ["Session"]


class Session(ABC):
    """The facts about both sides, and the exchange that established them."""

    def __init__(self, *, client: bool, config: MaopConfig, random_bytes: Callable[[int], bytes], now: float) -> None:
        self.client = client
        self.config = config
        self.random_bytes = random_bytes
        self.now = now
        """The latest moment that the owner has passed in."""
        self.state = ConnectionState.HANDSHAKE
        self.out: list[Output] = []
        self.session_id = b""
        """16 bytes, for correlation; empty before approval."""
        self.identifier = ""
        """The server's name for the client."""
        self.identity = ""
        """The key of quotas and finished operations: the identifier, unless `approve_client` says otherwise."""
        self.roles: frozenset[str] = frozenset()
        """The peer's roles; a client may give its server some."""
        self.peer: Authentication | Result | None = None
        """The peer's self-description."""
        self.version = (config.version.major, config.version.minor, config.version.patch)
        """The effective version."""
        self.capabilities = Capability(0)
        """The capabilities of both sides."""
        self.idempotency = False
        """Whether headers have the idempotency field."""
        self.traces = False
        """Whether headers have the trace field."""
        self.secrets: tuple[str, ...] = ()
        """Texts that must not appear in reasons."""
        self.at: float | None = None
        """When the present state must end."""
        self.stream0_at: float | None = None
        """When stream 0 must be closed."""
        self.closing_code = 0
        self.closing_reason = ""
        self.events: list[Event] = []
        """What `take_events` returns next. Read only."""
        self.emit = self.events.append
        """Queues an event for the owner."""
        self._stopping = -1
        self._reader: Octets[Authentication] | Octets[Result] = (
            Octets(read_result()) if client else Octets(read_authentication(config))
        )
        self._early: list[tuple[int, bytes | None, bool]] = []
        self._early_bytes = 0
        self._auth_fin = False
        self._asked = False
        self.heard = False
        """Whether the peer has sent a Disconnect Request."""
        self._drain_time = 0.0

    @abstractmethod
    def end(self, code: int, reason: str, error: RemoteProtocolError | None, *, tell: bool) -> None:
        """End the connection."""

    @abstractmethod
    def fail_connection(self, code: int, detail: str, rule: str) -> None:
        """End the connection because the peer broke a rule."""

    @abstractmethod
    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> list[Event]:
        """Take bytes of a stream."""

    @abstractmethod
    def stream_reset(self, stream_id: int, code: int, now: float) -> list[Event]:
        """Record that the peer reset its direction of a stream."""

    @abstractmethod
    def _say_disconnect(self, code: int) -> None:
        """Write Disconnect."""

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self.state is ConnectionState.CLOSED

    def go(self, what: ConnectionInput) -> None:
        """Change the state."""
        self.state = CONNECTION[self.state, what]

    def take_events(self) -> list[Event]:
        """Take the events since the last call."""
        events = self.events
        if events:
            events = events.copy()
            self.events.clear()
            return events
        return []

    def unblock(self, stream_id: int) -> None:
        """Report that a stream may be read again."""
        self.events.append(StreamUnblocked(stream_id))

    def handshake_completed(
        self, *, auth_type: str = "Bearer", token: bytes = b"", pairs: dict[str, str] | None = None, now: float
    ) -> list[Event]:
        """Record that QUIC is ready: a client authenticates, a server starts its clock.

        Args:
            auth_type: scheme of the token, such as ``"Bearer"``; only a client passes this and the next two.
            token: opaque bytes.
            pairs: metadata; the capabilities are added.

        Raises:
            ValueError: an argument does not fit the message.
            LocalProtocolError: it was called before.

        Source: MA-8, MA-15, MA-20, MA-35, MA-125: call it when the handshake is complete, never with 0-RTT.
        """
        if self.state is not ConnectionState.HANDSHAKE:
            raise LocalProtocolError("handshake_completed() twice", rule="MA-30")
        self.now = now
        if self.client:
            announced = {**(pairs or {})}
            if self.config.capabilities:
                announced.setdefault(CAPABILITY_PAIR, f"{self.config.capabilities:016x}")
            message = Authentication(auth_type, token, announced, self.config.version, self.config.vendor)
            data = message.encode()
            self.out += [OpenStream(0, False, 0), StreamData(0, data, True)]
            self.secrets = _secrets(token)
        self.go(ConnectionInput.HANDSHAKE_COMPLETED)
        self.at = now + (
            self.config.authentication.answer_timeout if self.client else self.config.authentication.auth_timeout
        )
        return self.take_events()

    def receive_early(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        """Take bytes while operations are not possible. Source: MA-15 to MA-18, MA-28, MA-29."""
        if stream_id == 0 and self.state in (ConnectionState.AUTHENTICATING, ConnectionState.DECIDING):
            self.auth_data(data, fin)
        elif self.state is ConnectionState.CLOSED or stream_id == 0:
            return
        elif self.state is ConnectionState.HANDSHAKE and not self.client:
            # MA-125: these bytes can only be 0-RTT.
            self.fail_connection(ErrorCode.UNAUTHORIZED, "bytes before the handshake", "MA-125")
        elif self.client and self.state in (ConnectionState.HANDSHAKE, ConnectionState.AUTHENTICATING):
            # MA-29: the server wrote its result earlier, but streams overtake each other.
            self._hold(stream_id, data, fin, len(data))
        elif self.state in (ConnectionState.AUTHENTICATING, ConnectionState.DECIDING) and data:
            if data[0] == 0x0A:
                self.end(0, "disconnected before approval", None, tell=True)
            else:
                self.fail_connection(ErrorCode.UNAUTHORIZED, f"bytes on stream {stream_id} before approval", "MA-28")
        elif data[:1] == b"\x0a" and self.state in (ConnectionState.FLUSHING, ConnectionState.CLOSING):
            # MA-92: both ends are finished; after a lone Disconnect the rest need not be read.
            self.end(0, "the peer disconnected", None, tell=True)

    def reset_early(self, stream_id: int, code: int) -> None:
        """Handle a reset while operations are not possible."""
        if stream_id == 0 and self.state is ConnectionState.AUTHENTICATING:
            self.fail_connection(ErrorCode.INVALID_FORMAT, "stream 0 was reset", "MA-17")
        elif self.client and self.state is ConnectionState.AUTHENTICATING:
            self._hold(stream_id, None, True, 0)

    def _hold(self, stream_id: int, data: bytes | None, fin: bool, size: int) -> None:
        # Each piece costs more than its bytes.
        self._early_bytes += size + 64
        if self._early_bytes > self.config.authentication.max_held_early:
            self.fail_connection(ErrorCode.CAPACITY_LIMIT, "too much before the result", "MA-29")
            return
        self._early.append((stream_id, data, fin))

    def auth_data(self, data: bytes, fin: bool) -> None:
        """Take bytes of stream 0."""
        self._auth_fin = self._auth_fin or fin
        if fin and self.state is not ConnectionState.AUTHENTICATING:
            self.stream0_at = None
        if self.state is not ConnectionState.AUTHENTICATING:
            return  # MA-17, MA-26: later bytes are dropped.
        try:
            whole = self._reader.feed(data)
            if not whole:
                if fin:
                    raise OperationFault(ErrorCode.INVALID_FORMAT, "stream 0 ended too early.", "MA-17")
                return
            read = self._reader.value
            if isinstance(read, Result):
                self._result(read)
            elif read is not None:
                if self._reader.rest:
                    raise OperationFault(ErrorCode.INVALID_FORMAT, "there are bytes behind the vendor.", "MA-17")
                self._offered(read)
        except OperationFault as fault:
            if self.client:
                self.fail_connection(fault.code, fault.reason, fault.rule)
            else:
                self._disapprove(fault.code, 0, f"Authentication was refused: {fault.reason}")

    def _result(self, result: Result) -> None:
        self.peer = result
        if not self._auth_fin:
            self.out.append(StopStream(0, 0))
        if result.session_id is None:
            self.go(ConnectionInput.DISAPPROVED)
            self.emit(Disapproved(result.code, result.retry_after_ms / 1000 or None, result.reason))
            self.end(close_code(result.code), result.reason, None, tell=True)
            return
        self.session_id, self.identifier = result.session_id, result.identifier
        if result.version.major != self.config.version.major:
            # MA-33: the client says goodbye and closes.
            reason = f"the server speaks version {result.version}"
            self.emit(Audited(0, ErrorCode.PROTOCOL_VIOLATION, reason))
            self.emit(Disapproved(ErrorCode.PROTOCOL_VIOLATION, None, reason))
            self.closing_reason = reason
            self._say_disconnect(close_code(ErrorCode.PROTOCOL_VIOLATION))
            return

        self._agree(result.version, parse_capabilities(result.version.capabilities))
        self._open(result.vendor)
        early, self._early = self._early, []
        for stream_id, data, fin in early:
            # Each call takes all events, including earlier ones.
            self.events += (
                self.stream_reset(stream_id, 0, now=self.now)
                if data is None
                else self.receive_stream_data(stream_id, data, fin, now=self.now)
            )

    def _open(self, vendor: str) -> None:
        self.go(ConnectionInput.APPROVED)
        self.at = None
        self.identity = self.identity or self.identifier
        self.emit(Approved(self.session_id, self.identifier, self.version, vendor, self.capabilities))

    def _agree(self, version: Version, capabilities: Capability) -> None:
        self.version = self.config.version.effective(version)
        self.capabilities = self.config.capabilities & capabilities
        self.idempotency = bool(self.capabilities & Capability.IDEMPOTENCY)
        self.traces = bool(self.capabilities & Capability.TRACE)

    def _offered(self, message: Authentication) -> None:
        self.peer = message
        self.secrets = _secrets(message.token)
        if message.version.major != self.config.version.major:
            detail = f"This server speaks version {self.config.version}, not {message.version}."
            self.emit(Audited(0, ErrorCode.PROTOCOL_VIOLATION, detail))
            self._disapprove(ErrorCode.PROTOCOL_VIOLATION, 0, detail)
            return
        self.go(ConnectionInput.MESSAGE_READ)
        self.emit(
            AuthenticationReceived(
                message.auth_type, message.token, message.pairs, message.version, message.vendor, message.capabilities
            )
        )

    def approve_client(
        self,
        identifier: str | None = None,
        *,
        identity: str = "",
        roles: frozenset[str] = frozenset(),
        quota: Quota | None = None,
        now: float,
    ) -> list[Event]:
        """Approve the client.

        Args:
            identifier: the client's name, for audit; None for a new UUID.
            identity: the key of quotas and finished operations; the identifier if empty.
            roles: the client's roles. Source: MA-44.
            quota: shared with other connections of the identity. Source: MA-118.

        Raises:
            LocalProtocolError: no client awaits a decision, or identifier and vendor together are too short.

        Source: MA-22, MA-25, MA-29, MA-35.
        """
        if self.state is not ConnectionState.DECIDING:
            raise LocalProtocolError(f"approve_client() in state {self.state.name}", rule="MA-29")
        assert isinstance(self.peer, Authentication)
        identifier = str(uuid.UUID(bytes=self.random_bytes(16), version=4)) if identifier is None else identifier
        version = self.config.version
        if CAPABILITY_PAIR in self.peer.pairs:
            version = attrs.evolve(version, build=f"cap.{self.config.capabilities:016x}")
        if not 0 < len(identifier.encode()) < 256:
            raise LocalProtocolError("an identifier has 1 to 255 bytes", rule="MA-22")
        result = Result(version, self.config.vendor, self.random_bytes(16), identifier)
        data = result.encode()
        if len(data) < MIN_RESULT:
            raise LocalProtocolError("identifier and vendor need 7 bytes together", rule="MA-25")
        self.now = now
        self._answer(data)
        assert result.session_id is not None
        self.session_id, self.identifier, self.identity = result.session_id, identifier, identity
        self.roles = roles
        if quota is not None:
            self.quota = quota
        self._agree(self.peer.version, self.peer.capabilities)
        self._open(self.peer.vendor)
        return self.take_events()

    def disapprove_client(self, code: int, reason: str, retry_after: float | None = None, *, now: float) -> list[Event]:
        """Refuse the client.

        Args:
            code: mostly `ErrorCode.UNAUTHORIZED`.
            reason: a sentence for people, sanitised here.
            retry_after: seconds until another attempt makes sense; ignored for errors that a retry cannot fix.

        Raises:
            LocalProtocolError: no client awaits a decision.

        Source: MA-23 to MA-27.
        """
        if self.state is not ConnectionState.DECIDING:
            raise LocalProtocolError(f"disapprove_client() in state {self.state.name}", rule="MA-30")
        self.now = now
        retry_ms = 0 if retry_after is None else min(round(retry_after * 1000), 2**32 - 1)
        # MA-23: a retry does not fix these.
        if code in (ErrorCode.INVALID_FORMAT, ErrorCode.PROTOCOL_VIOLATION):
            retry_ms = 0
        self._disapprove(code, retry_ms, reason)
        return self.take_events()

    def _disapprove(self, code: int, retry_ms: int, reason: str) -> None:
        text = sanitise(reason, self.random_bytes(4).hex(), secrets=self.secrets).decode()
        result = Result(self.config.version, self.config.vendor, None, "", code, retry_ms, text)
        if len(result.encode()) < MIN_RESULT:
            # MA-25: a known peer waits for 32 bytes.
            result = attrs.evolve(result, reason=f"Authentication was refused: {text}")
        if self.state is ConnectionState.DECIDING or self.state is ConnectionState.AUTHENTICATING:
            self.go(ConnectionInput.DISAPPROVED)
        self._answer(result.encode())
        self.emit(Disapproved(code, retry_ms / 1000 or None, result.reason))
        self.closing_code, self.closing_reason = close_code(code), result.reason
        self.at = self.now + self.config.authentication.disapproved_linger

    def _answer(self, data: bytes) -> None:
        self.out.append(StreamData(0, data, True))
        if not self._auth_fin:
            self.stream0_at = self.now + self.config.authentication.auth_close_timeout

    def stream0_overdue(self) -> None:
        """Handle a client's direction of stream 0 that is still open. Source: MA-26."""
        self.stream0_at = None
        # Our direction ended with the result; a reset could still discard it.
        self.out.append(StopStream(0, 0))

    def session_overdue(self, now: float) -> None:
        """Handle a state that took too long. Source: MA-20, MA-27."""
        if self.state is ConnectionState.LINGERING:
            self.end(self.closing_code, self.closing_reason, None, tell=True)
        elif self.client:
            self.fail_connection(ErrorCode.TIMEOUT, "no result from the server", "MA-20")
        else:
            # MA-20: and close. The linger gives the result time to arrive.
            self._disapprove(ErrorCode.UNAUTHORIZED, 0, "Authentication took too long.")


def _secrets(token: bytes) -> tuple[str, ...]:
    text = token.decode("utf-8", "replace")
    # A short secret would match innocent words.
    return (text,) if len(text) >= 4 else ()
