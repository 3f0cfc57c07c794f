"""The end of a connection: at once, or after a drain that both sides may shorten."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from levada.framework.errors import LocalProtocolError

from .codes import close_code
from .events import Draining, Event
from .session import Session
from .state import CONNECTION, ConnectionInput, ConnectionState

if TYPE_CHECKING:
    from .control import ControlPool

__all__ = ["Ending"]

_OPEN, _DRAINING = ConnectionState.OPEN, ConnectionState.DRAINING


class Ending(Session):
    """The steps from an open connection to a closed one. Source: section 11."""

    pool: ControlPool
    """Our control streams."""

    @abstractmethod
    def cancel_all(self, *, signal: bool) -> None:
        """End every operation; with `signal` the peer is told of each."""

    @abstractmethod
    def reason(self, text: str) -> bytes:
        """Make a reason fit for the wire."""

    def drain(self, now: float) -> list[Event]:
        """Begin no new work, let open work finish within `MaopConfig.drain_timeout` seconds, then end. A second call changes nothing.

        A connection that is not open yet has no work and ends at once.
        """
        if self.state < ConnectionState.LINGERING:
            return self.close(0, "", now)
        if self.state is _OPEN or (self.state is _DRAINING and not self._asked):
            return self.request_disconnect(self.config.drain_timeout, "", now)
        return self.take_events()

    def request_disconnect(self, drain_time: float, reason: str, now: float) -> list[Event]:
        """Request the end: running operations may finish within `drain_time` seconds; 0 ends the connection at once.

        While draining, the call answers the peer's request with our own time, and the shorter one holds. If our own request was answered, it
        grants more time.

        Raises:
            LocalProtocolError: not open.

        Source: MA-89, MA-90, MA-92.
        """
        if self.state not in (_OPEN, _DRAINING):
            raise LocalProtocolError(f"request_disconnect() in state {self.state.name}", rule="MA-89")
        self.now = now
        self.pool.disconnect_request(min(round(drain_time * 1000), 2**32 - 1), self.reason(reason))
        if self.state is _DRAINING and not self._asked:
            left = max(0.0, (self.at or now) - now)
            drain_time = min(drain_time, left)
            self._answered = True
        self._asked = True
        self._drain(drain_time, reason, by_peer=False, now=now)
        return self.take_events()

    def _drain(self, time: float, reason: str, *, by_peer: bool, now: float) -> None:
        self.go(ConnectionInput.DRAIN)
        self._drain_time = time
        self.at = now + time
        self.emit(Draining(time, reason, by_peer))

    def disconnect(self, now: float) -> list[Event]:
        """End the connection at once, which also denies a drain. A second call does nothing. Source: MA-28, MA-90 (c), MA-93."""
        self.now = now
        if (self.state, ConnectionInput.DISCONNECT) in CONNECTION:
            self.cancel_all(signal=False)
            self._say_disconnect(0)
        return self.take_events()

    def control_acknowledged(self, now: float) -> list[Event]:
        """Record that the peer has all signals, if QUIC can tell; it matters only at the end. Source: MA-92, MA-93."""
        if self.state in (ConnectionState.FLUSHING, ConnectionState.CLOSING) and not self.pool.waiting():
            self.step(now)
        return self.take_events()

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """Close with only QUIC's own close frame. `code` is 0 for an orderly end, else an `ErrorCode` (MA-7); the reason is sanitised here."""
        self.now = now
        self.end(close_code(code) if code else 0, reason, None, tell=True)
        return self.take_events()

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Record that QUIC has ended, by the peer or the network."""
        self.now = now
        self.end(code, reason, None, tell=False)
        return self.take_events()

    def _say_disconnect(self, code: int) -> None:
        self.go(ConnectionInput.DISCONNECT)
        self.closing_code = code
        self.pool.disconnect(self.out)
        self.at = self.now + self.config.flush_timeout

    def step(self, now: float) -> None:
        """Continue towards the end: flush the signals, then Disconnect. Source: MA-92."""
        if self.state is ConnectionState.FLUSHING:
            self._say_disconnect(0)
        else:
            self.end(
                self.closing_code, "disconnected" if not self.closing_code else self.closing_reason, None, tell=True
            )

    def drained(self, now: float) -> None:
        """Continue when no operation is left, or the time is up. Source: MA-92."""
        self.cancel_all(signal=True)
        self.go(ConnectionInput.DRAINED)
        self.at = now + self.config.flush_timeout
        if not self.pool.streams and not self.pool.waiting():
            self.step(now)

    def on_disconnect(self, now: float) -> None:
        """Process a Disconnect. Source: MA-93."""
        self.end(0, "the peer disconnected", None, tell=True)

    def on_disconnect_request(self, drain_time: float, reason: str, now: float) -> None:
        """Process a Disconnect Request. Source: MA-89, MA-90, MA-92."""
        time = min(drain_time, self.config.max_drain_time)
        if self.state is _DRAINING and self._asked and not self._answered:
            # MA-90 (b): an answer; the shorter time holds. Two simultaneous requests look the same to both sides.
            self._answered = True
            time = min(time, self._drain_time)
        self._drain(time, reason, by_peer=True, now=now)
