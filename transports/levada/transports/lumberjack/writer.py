"""The writer's side, without I/O: `WriterCore` is one connection, `SendQueue` holds the events that wait for a connection.

Until it is acked, an event is in exactly one place: new in the queue, in a batch that came back from a lost connection, or in a batch
in flight on one core.  Only an ack, a drop policy or `WriterConfig.on_stuck` removes it.  So "at least once" (LJ-55) needs no further
bookkeeping: when a connection ends, the driver returns `WriterCore.unacked` to the queue, and the queue hands out the oldest events first.

Numbers exist only on the wire.  In batch mode each window counts from 1 (LJ-49), so an ack is a count of the oldest window's events.
In stream mode numbers run on and wrap, so an ack is a distance modulo 2**32 from the last one.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.lumberjack.config import WriterConfig
from levada.transports.lumberjack.events import (
    AckTimedOut,
    Batch,
    BatchDone,
    EndReason,
    EventsAcked,
    Finished,
    KeepaliveReceived,
    PeerClosed,
    Refused,
    WriterEvent,
)
from levada.transports.lumberjack.frames import encode_envelope, encode_window
from levada.transports.lumberjack.state import WRITER_TRANSITIONS, WriterInput, WriterState

__all__ = ["SendQueue", "WriterCore"]

_HEAD = struct.Struct(">2sI")
_PLAIN_BELOW = 200  # LJ-34: fewer bytes of frames are not worth an envelope
_STUCK_AFTER = 5  # LJ-59
_MODULUS = 2**32


class _InFlight:
    """A batch on the wire: its number of events, and the end of its bytes among all that were queued."""

    __slots__ = ("batch", "ends", "number", "size")

    def __init__(self, batch: Batch, ends: int) -> None:
        self.batch = batch
        self.size = len(batch.bodies)
        self.ends = ends
        self.number = 0  # its acked events


class WriterCore:
    """One connection of a Lumberjack writer, versions 1 and 2, without I/O.

    Args:
        config: version, mode, windows and clocks.
        now: the time; any clock that only goes forward.
        first_sequence: number of the first event in stream mode.

    Source: LJ-48 to LJ-53.
    """

    def __init__(self, config: WriterConfig, *, now: float, first_sequence: int = 1) -> None:
        self.state = WriterState.OPEN
        self._config = config
        self._event = b"%d" % config.version + (b"J" if config.json else b"D")
        self._ack = b"%dA" % config.version
        self._stream = config.mode == "stream"
        self._most_flights = config.windows_in_flight
        self._in = bytearray()
        self._offset = 0
        self._out: list[bytes] = []
        self._queued = 0  # bytes queued so far
        self._taken = 0  # bytes of them that the carrier took
        self._flights: deque[_InFlight] = deque()
        self._unacked = 0
        self._next = first_sequence % _MODULUS
        self._last_ack = (first_sequence - 1) % _MODULUS if self._stream else 0
        self._announced = False
        self._clock = now

    @property
    def room(self) -> int:
        """Events that may be sent now (LJ-50); 0 after the end."""
        if self.state is not WriterState.OPEN:
            return 0
        if self._stream:
            return self._config.window - self._unacked
        return self._config.window if len(self._flights) < self._most_flights else 0

    @property
    def in_flight(self) -> int:
        """Events sent and not acked."""
        return self._unacked

    def send_batch(self, batch: Batch, now: float) -> None:
        """Queue a window of events; in stream mode, events of the only window (LJ-48).

        Args:
            batch: at most `room` events. It belongs to the core until `BatchDone`, or until `unacked` returns it.
            now: the time.

        Raises:
            LocalProtocolError: more events than `room`, or none.
        """
        count = len(batch.bodies)
        if not 0 < count <= self.room:
            raise LocalProtocolError(f"a batch of {count} events, at most {self.room} may be sent now", rule="LJ-50")
        if not self._flights:
            self._clock = now
        window = b""
        if self._stream:
            if not self._announced:
                self._announced = True
                window = encode_window(self._config.version, self._config.window)
            first, self._next = self._next, (self._next + count) % _MODULUS
        else:
            window, first = encode_window(self._config.version, count), 1
        frames = self._pack(batch.bodies, first)
        self._queued += len(window) + len(frames)
        self._out += (window, frames) if window else (frames,)
        self._flights.append(_InFlight(batch, self._queued))
        self._unacked += count

    def _pack(self, bodies: list[bytes], first: int) -> bytes:
        """Number the frames and put them into one envelope if that pays (LJ-33, LJ-34)."""
        head, event = _HEAD.pack, self._event
        parts: list[bytes] = []
        for number, body in enumerate(bodies, first):
            parts.append(head(event, number % _MODULUS))
            parts.append(body)
        frames = b"".join(parts)
        if not self._config.compression or len(frames) < _PLAIN_BELOW:
            return frames
        return encode_envelope(self._config.version, zlib.compress(frames, self._config.compression))

    def take_events(self) -> list[WriterEvent]:
        """Return an empty list: every call of this core returns its events itself."""
        return []

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the frames that are queued, in order."""
        out, self._out = self._out, []
        return out

    def bytes_taken(self, count: int, now: float) -> None:
        """Record that the carrier took `count` more bytes, which restarts the clock of the ack: a slow line is not a dead one (LJ-53)."""
        if self._flights and self._taken < self._flights[0].ends:
            self._clock = now
        self._taken += count

    def receive_data(self, data: bytes | bytearray, now: float) -> list[WriterEvent]:
        """Take bytes from the reader. A broken rule is the event `Refused`, not an exception. After the end, input is ignored.

        Args:
            data: any number of bytes, cut anywhere; ``b""`` is the end of the reader's direction.
            now: the time.

        Source: LJ-2, LJ-4 to LJ-6, LJ-52.
        """
        if self.state is WriterState.CLOSED:
            return []
        if not data:
            self._move(WriterInput.PEER_ENDED)
            return [PeerClosed(clean=not self._in)]
        self._in += data
        events: list[WriterEvent] = []
        at = 0
        try:
            while len(self._in) - at >= _HEAD.size:
                kind, number = _HEAD.unpack_from(self._in, at)
                if kind != self._ack:
                    raise self._broken(f"expected an ack of version {self._config.version}, got {kind!r}", "LJ-52", at)
                self._acked(number, at, now, events)
                at += _HEAD.size
            head = bytes(self._in[at : at + 2])
            if not self._ack.startswith(head):
                raise self._broken(f"expected an ack of version {self._config.version}, got {head!r}", "LJ-52", at)
        except RemoteProtocolError as error:
            self._move(WriterInput.BROKEN_RULE)
            events.append(Refused(error, bytes(self._in[at : at + 32])))
            return events
        del self._in[:at]
        self._offset += at
        if self.state is WriterState.DRAINING and not self._flights:
            events.append(self._finish(WriterInput.SETTLED, "drained"))
        return events

    def _broken(self, detail: str, rule: str, at: int) -> RemoteProtocolError:
        return RemoteProtocolError(detail, rule=rule, offset=self._offset + at)

    def _acked(self, number: int, at: int, now: float, events: list[WriterEvent]) -> None:
        if self._stream:
            count = (number - self._last_ack) % _MODULUS
            if count == 0:
                return
            if count > self._unacked:
                raise self._broken(f"ack {number} is beyond the last event sent, {self._next - 1}", "LJ-52", at)
        elif not self._flights:
            if number not in (0, self._last_ack):
                raise self._broken(f"ack {number} while nothing is in flight", "LJ-52", at)
            return
        else:
            oldest = self._flights[0]
            if number > oldest.size:
                raise self._broken(f"ack {number} for a window of {oldest.size}", "LJ-52", at)
            if number == 0:
                self._clock = now
                events.append(KeepaliveReceived())
                return
            count = number - oldest.number
            if count <= 0:
                return
        self._clock = now
        self._last_ack = number
        self._unacked -= count
        while count:
            flight = self._flights[0]
            batch = flight.batch
            safe = min(count, len(batch.bodies))
            tokens = batch.tokens[:safe]
            size = sum(map(len, batch.bodies[:safe])) + _HEAD.size * safe
            del batch.bodies[:safe], batch.tokens[:safe]
            count -= safe
            flight.number += safe
            events.append(EventsAcked(batch, tokens, size))
            if not batch.bodies:
                self._flights.popleft()
                events.append(BatchDone(batch))

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due; ``None`` while nothing is in flight."""
        if self.state is WriterState.CLOSED or not self._flights:
            return None
        return self._clock + self._config.ack_timeout

    def handle_timeout(self, now: float) -> list[WriterEvent]:
        """End the connection if no ack came in time (LJ-53)."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        self._move(WriterInput.TIME_OUT)
        return [AckTimedOut(self._config.ack_timeout)]

    def connection_lost(self, code: int, reason: str, now: float) -> list[WriterEvent]:
        """Record that the carrier has failed. `unacked` returns the events in flight."""
        if self.state is WriterState.CLOSED:
            return []
        self._move(WriterInput.PEER_ENDED)
        return [PeerClosed(clean=False, lost=True)]

    def drain(self, now: float) -> list[WriterEvent]:
        """Send no more windows. The connection ends when those in flight are acked, or after `WriterConfig.ack_timeout` without an ack."""
        if self.state is not WriterState.OPEN:
            return []
        self._move(WriterInput.DRAIN)
        return [] if self._flights else [self._finish(WriterInput.SETTLED, "drained")]

    def close(self, code: int, reason: str, now: float) -> list[WriterEvent]:
        """End now. `unacked` returns the events in flight.

        Lumberjack sends neither `code` nor `reason`: the reader only sees the connection close.
        """
        return [] if self.state is WriterState.CLOSED else [self._finish(WriterInput.CLOSE, "closed")]

    def unacked(self) -> list[Batch]:
        """Take the batches that must be sent again once the connection has ended, oldest first (LJ-55).

        If no event of a batch was acked, its failures go up by one.

        Raises:
            LocalProtocolError: the connection has not ended.
        """
        if self.state is not WriterState.CLOSED:
            raise LocalProtocolError("unacked() before the end: close() first", rule="LJ-55")
        flights, self._flights = self._flights, deque()
        self._unacked = 0
        for flight in flights:
            flight.batch.failures += flight.number == 0
        return [flight.batch for flight in flights]

    def _finish(self, what: WriterInput, reason: EndReason) -> Finished:
        self._move(what)
        return Finished(reason, self._unacked)

    def _move(self, what: WriterInput) -> None:
        self.state = WRITER_TRANSITIONS[self.state, what]


class SendQueue:
    """Events that wait for a connection or for an ack; shared by all connections of a writer.

    Args:
        config: windows, bounds and policies.

    Source: LJ-51, LJ-55, LJ-57, LJ-59.
    """

    def __init__(self, config: WriterConfig) -> None:
        self._config = config
        self._max_events = config.queue * config.window
        self._max_bytes = config.queue * config.max_bytes
        self._new: deque[tuple[bytes, Any, float]] = deque()
        self._new_bytes = 0
        self._again: list[Batch] = []  # by age
        self._next_age = 0
        self._events = 0
        self._bytes = 0
        self.full = False
        """Whether a sender has to wait: `WriterConfig.queue` windows of events, or of bytes, are here."""
        self.dropped = 0
        """Events that a full queue dropped."""
        self.rejected = 0
        """Events given up because they alone ended one connection after another."""
        self.stuck_windows = 0
        """Windows that ended five connections with no event acked."""
        self.stuck = False
        """Whether a window is stuck: until an event is acked, one window may be in flight on all connections together (LJ-59)."""

    def __len__(self) -> int:
        """Count the events that are not acked, including those in flight."""
        return self._events

    @property
    def waiting(self) -> bool:
        """Whether events wait for a connection that sends them, for the first time or again."""
        return bool(self._new or self._again)

    def put(self, body: bytes, token: Any, now: float) -> Sequence[Any]:
        """Take an encoded event, see `encode_event`.

        Returns:
            The token of the event that was dropped to make room, which may be its own; or nothing.

        Raises:
            LocalProtocolError: the queue is full and nothing may be dropped.
        """
        dropped: Sequence[Any] = ()
        size = len(body) + _HEAD.size
        if self.full:
            if self._config.drop is None:
                raise LocalProtocolError("the queue of the writer is full", rule="LJ-57")
            self.dropped += 1
            if self._config.drop == "newest" or not self._new:
                return (token,)
            old, old_token, _ = self._new.popleft()
            self._new_bytes -= len(old) + _HEAD.size
            self._gone(1, len(old) + _HEAD.size)
            dropped = (old_token,)
        self._new.append((body, token, now))
        self._new_bytes += size
        self._events += 1
        self._bytes += size
        self.full = self._events >= self._max_events or self._bytes >= self._max_bytes
        return dropped

    def _gone(self, events: int, size: int) -> None:
        self._events -= events
        self._bytes -= size
        self.full = self._events >= self._max_events or self._bytes >= self._max_bytes

    def next_batch(self, now: float, room: int, *, flush: bool = False) -> Batch | None:
        """Take the next events to send: first those that came back, then new ones, once there are enough or they have waited long enough.

        Args:
            now: the time.
            room: events at most, see `WriterCore.room`.
            flush: do not wait for more events.

        Returns:
            ``None`` if there is nothing to send now.
        """
        if room < 1:
            return None
        if self._again:
            return self._old_batch(room)
        new = self._new
        config = self._config
        most = min(room, config.window)
        if not new or not (
            flush or len(new) >= most or self._new_bytes >= config.max_bytes or now >= new[0][2] + config.linger
        ):
            return None
        bodies: list[bytes] = []
        tokens: list[Any] = []
        total = 0
        for body, token, _ in itertools.islice(new, most):
            size = len(body) + _HEAD.size
            if bodies and total + size > config.max_bytes:
                break
            total += size
            bodies.append(body)
            tokens.append(token)
        for _ in bodies:
            new.popleft()
        self._new_bytes -= total
        batch = Batch(bodies, tokens, (self._next_age,))
        self._next_age += 1
        return batch

    def _old_batch(self, room: int) -> Batch:
        batch = self._again.pop(0)
        limit = min(room, max(1, len(batch.bodies) // 2)) if self.stuck else room
        if len(batch.bodies) > limit:
            # Ages compare from the left, so no other batch can come between the two parts.
            rest = Batch(batch.bodies[limit:], batch.tokens[limit:], (*batch.age, 1), batch.failures)
            del batch.bodies[limit:], batch.tokens[limit:]
            batch.age = (*batch.age, 0)
            self._again.insert(0, rest)
            for part in (batch, rest):
                if len(part.bodies) == 1:
                    part.failures = 0  # from now on the failures of this event alone are counted
        return batch

    def acked(self, event: EventsAcked) -> None:
        """Remove the events of an `EventsAcked`."""
        self._gone(len(event.tokens), event.size)
        event.batch.failures = 0
        self.stuck = False

    def give_back(self, batches: Iterable[Batch]) -> list[Any]:
        """Take back the batches that `WriterCore.unacked` returned; they go before everything newer (LJ-55).

        Returns:
            Tokens of the events that are given up, which happens only by `WriterConfig.on_stuck`.
        """
        rejected: list[Any] = []
        for batch in batches:
            if batch.failures >= _STUCK_AFTER:
                if batch.failures == _STUCK_AFTER:
                    self.stuck_windows += 1
                self.stuck = True
                if len(batch.bodies) == 1 and self._config.on_stuck == "reject":
                    self.rejected += 1
                    rejected += batch.tokens
                    self._gone(1, batch.size)
                    continue
            insort(self._again, batch, key=lambda each: each.age)
        return rejected

    def next_deadline(self) -> float | None:
        """Return when the oldest new event has waited long enough; ``None`` if there is none."""
        return self._new[0][2] + self._config.linger if self._new else None
