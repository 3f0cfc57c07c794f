"""The idle timeout, and pings with their answers. They show whether the peer is alive, and what it has received."""

from __future__ import annotations

from .codes import ConnectionFault, TransportError
from .events import StreamAcked
from .frames import FrameType, Parameters, encode_frame
from .streams import QmuxStreams

__all__ = ["Liveness"]


class Liveness:
    """Idle timeout and pings of a connection.

    One ping is under way at a time. It serves as keepalive. Its answer also proves that the peer has processed everything written before the
    ping. Source: D-23.

    Args:
        streams: the streams, some of which wait for an answer.
        now: the current time.
    """

    def __init__(self, streams: QmuxStreams, now: float) -> None:
        self.round_trip = 0.0
        """Seconds that the last ping and its answer took; 0 before the first."""
        self.ping_due = False
        """Whether a ping is to be written even if no stream waits for one."""
        self._streams = streams
        self._timeout = 0.0
        self._heard = now
        self._idle_since = now
        self._may_extend = True  # no record was written since the last one was received
        self.last_ping = 0
        """Number of the last ping."""
        self.last_answer = 0
        """Number of the last ping that was answered."""
        self._sent_at: float | None = None  # when the ping under way was written
        self._covered: dict[int, None] = {}  # streams that it confirms
        self._request = -1

    def establish(self, parameters: Parameters) -> None:
        """Set the idle timeout: the smaller one of this side and the peer. Source: QX-34."""
        times = [self._streams.config.idle_timeout, parameters.max_idle_timeout_ms / 1000]
        self._timeout = min((time for time in times if time), default=0.0)

    def heard(self, now: float) -> None:
        """Record that a complete record has come."""
        self._heard = self._idle_since = now
        self._may_extend = True

    def wrote(self, now: float) -> None:
        """Record that a record was written. Source: QX-34 (D-18)."""
        if self._may_extend:
            # Only once after each record received: otherwise this side's own pings would keep the connection to a dead peer forever.
            self._may_extend = False
            self._idle_since = now

    @property
    def may_ping(self) -> bool:
        """Whether no ping is under way."""
        return self._sent_at is None

    def ping(self, now: float) -> bytes:
        """Make a ping, to be written after everything so far. Source: QX-10, D-23."""
        self.ping_due = False
        self._sent_at = now
        self._covered = dict(self._streams.unconfirmed)
        self._streams.unconfirmed.clear()
        self.last_ping += 1
        return encode_frame(FrameType.PING, self.last_ping)

    def requested(self, number: int) -> None:
        """Process QX_PING. Source: QX-10."""
        if number <= self._request:
            raise ConnectionFault(TransportError.PROTOCOL_VIOLATION, "QX-10", f"ping {number} after {self._request}")
        self._request = number
        self._streams.due[self.answer] = None

    def answer(self) -> bytes:
        """Make the answer to the newest ping. Source: QX-10."""
        return encode_frame(FrameType.PING_ANSWER, self._request)

    def answered(self, number: int, now: float) -> None:
        """Process an answer. Source: QX-10 (D-7)."""
        if number > self.last_ping:
            raise ConnectionFault(
                TransportError.PROTOCOL_VIOLATION, "QX-10", f"answer {number}, the last ping was {self.last_ping}"
            )
        if number == self.last_ping and self._sent_at is not None:
            self.round_trip = now - self._sent_at
            self.last_answer = number
            self._sent_at = None
            self._streams.events += map(StreamAcked, self._covered)
            self._covered.clear()

    def deadline(self) -> float | None:
        """Return the time when `expired` has something to do; `None` if never."""
        if not self._timeout:
            return None
        if self._wants_ping():
            return self._heard + self._timeout / 3  # earlier than the expiry, which counts from the same time or later
        return self._expiry()

    def _expiry(self) -> float:
        """Return the time when a silent peer counts as lost; it has two thirds of the timeout to answer a ping. Source: QX-34, QX-35."""
        expiry = self._idle_since + self._timeout
        if self._sent_at is None:
            return expiry
        return min(expiry, max(self._heard + self._timeout, self._sent_at + self._timeout * 2 / 3))

    def expired(self, now: float) -> bool:
        """Return whether the peer was silent for too long. After a third of the timeout, make a ping due. Source: QX-34, QX-35 (D-19)."""
        if not self._timeout:
            return False
        if now >= self._heard + self._timeout / 3 and self._wants_ping():
            self.ping_due = True
        return now >= self._expiry()

    def _wants_ping(self) -> bool:
        """Whether a ping must still be made due before the timeout. A ping that is due or under way is enough."""
        return (
            self._sent_at is None
            and not self.ping_due
            and (self._streams.config.keepalive_without_streams or bool(self._streams.table))
        )
