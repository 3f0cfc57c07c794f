"""The reader's side, without I/O: units, acks, limits and clocks of one connection.

Terms:

* A *unit* is the set of events that one ack covers, usually a window (LJ-16).  The *open* unit still grows.
* A *piece* is a unit, or a slice of a unit that is too large to hold (LJ-42a).  The sink gets one piece at a time.  Pieces go to the
  sink in order and may be committed in any order; acks are sent in order.  The sink never sees a piece without events: such a piece
  only keeps the place of an ack in the queue.

An envelope passes through up to three phases (`_Phase`).  First, its events are built while it is unpacked, and finished pieces wait
until the whole envelope, its checksum included, has proved valid (LJ-31a).  Most envelopes end here.  If the events cost more than a
connection may hold, the rest of the envelope is only checked.  Then the envelope is unpacked again: the events that were built are
skipped, and the rest is built slice by slice, at the speed of the sink.  Invalid JSON is an error at its place in the order of units
(LJ-12), so the rest of its envelope is also checked first.

Clocks run only while the driver waits in a read (`reading`, `stop_reading`): silence means nothing while the driver does not read.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from operator import itemgetter
from typing import Any

import attrs

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.lumberjack.config import ReaderConfig
from levada.transports.lumberjack.envelope import Unpacker
from levada.transports.lumberjack.events import EndReason, Finished, PeerClosed, ReaderEvent, Refused, UnitReady
from levada.transports.lumberjack.frames import encode_ack
from levada.transports.lumberjack.parser import EVENT_COST, FrameParser, ParserStop
from levada.transports.lumberjack.state import READER_TRANSITIONS, ReaderInput, ReaderState

__all__ = ["ReaderCore"]

_IMPLICIT_WINDOW = 1024  # LJ-22
_ANNOUNCED_PER_SECOND = 256 * 1024  # LJ-29
_UNBOUNDED = 2**63
_WHEN = itemgetter(0)
_SMALLEST = 10  # bytes of the smallest event, and so of the smallest window with an event
_WINDOWS = 1024  # W frames in one step; one takes longer than six bytes of other frames
# Acks that may wait behind a unit at the sink. At this limit the reader stops reading (LJ-21).
_LINE = 1024


class _Phase(Enum):
    BUILD = auto()
    """First pass: events are built, and pieces are held back."""
    CHECK = auto()
    """Rest of the first pass: frames are only checked."""
    SKIP = auto()
    """Second pass: the events of the first pass are skipped."""
    REST = auto()
    """Second pass: the other events are built."""


@attrs.define
class _Piece:
    unit: UnitReady | None
    ack: int | None
    """The ack to send once this piece and all earlier ones are committed."""
    events: int
    cost: int
    partial: bool = False
    """More of the unit follows (LJ-19)."""
    committed: bool = False
    since: float = 0.0
    """When the sink got it."""


class ReaderCore:
    """One connection of a Lumberjack reader, versions 1 and 2, without I/O.

    The driver reads while `wants_data`, and calls `work` while `has_work`, letting other tasks run in between (LJ-35).  It gives each
    `UnitReady` to the sink and calls `commit` after the reply.  After each call it sends `data_to_send`.

    Args:
        config: limits, clocks and policies.
        now: the time; any clock that only goes forward.

    Source: LJ-1 to LJ-47.
    """

    def __init__(self, config: ReaderConfig, *, now: float) -> None:
        self.state = ReaderState.OPEN
        self.version: int | None = None
        """Fixed by the first byte (LJ-3); ``None`` before it."""
        self.units = 0
        """Units and slices delivered, or about to be."""
        self.events = 0
        """Events received, as windows count them."""
        self.bytes_unpacked = 0
        """Bytes that came out of envelopes."""
        self.acks = 0
        """Acks sent, without keepalives."""
        self.keepalives = 0
        """Acks of 0 sent while the sink was working."""
        self.late_commits = 0
        """Units committed after the connection had ended (LJ-26)."""
        self._config = config
        self._line = config.max_uncommitted_units + _LINE
        self._out: list[bytes] = []
        self._events: list[ReaderEvent] = []
        # Input, and the frame or envelope that is being parsed.
        self._parser = FrameParser(1, config)
        self._input: deque[bytes] = deque()
        self._ended = False  # no more bytes will come
        self._lost = False  # and nothing can be sent
        self._envelope: Unpacker | None = None
        self._phase = _Phase.BUILD
        self._payload = memoryview(b"")
        self._built = 0  # events of the envelope that the first pass built
        self._built_windows = 0  # W frames that it took after the last of these events
        self._windows_left = 0  # that it may still announce or fill
        self._bad_json: RemoteProtocolError | None = None
        # The open unit.
        self._window = self._left = _IMPLICIT_WINDOW
        self._since = 0  # its events
        self._sequence = 0  # number of the last one
        self._open: list[dict[str, Any]] = []  # the events among them that were not handed on
        self._open_count = 0
        self._open_cost = 0
        # Pieces, the oldest first: with the sink; waiting for it; waiting for the end of their envelope.
        self._handed: deque[_Piece] = deque()
        self._waiting: deque[_Piece] = deque()
        self._held: list[_Piece] = []
        self._uncommitted = 0
        self._piece_cost = 0  # of those with the sink or waiting for it
        self._held_cost = 0
        self._partial_ack: int | None = None  # number of the last ack inside the unit whose acks are being sent
        # Clocks.
        self._now = now
        self._reading_since: float | None = None
        self._silence = 0.0  # seconds in reads without bytes from the writer
        self._quiet = 0.0  # seconds in reads without bytes in either direction
        self._frame = 0  # offset of the unfinished frame
        self._frame_time = 0.0  # seconds in reads since it began
        self._alive_at: float | None = None
        self._grace_ends: float | None = None

    @property
    def wants_data(self) -> bool:
        """Whether the driver should read: false while `work` is left, or the sink has `max_uncommitted_units` to commit (LJ-25)."""
        return (
            not self._ended
            and self._uncommitted < self._config.max_uncommitted_units
            and self._able
            and not self._has_input
        )

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return self._able and (self._ended or self._has_input)

    @property
    def large(self) -> bool:
        """Whether the next `work` takes long, because it counts or builds an event of more than 64 KiB."""
        return self._parser.large if self._envelope is None else self._envelope.large

    @property
    def _able(self) -> bool:
        return self.state is ReaderState.OPEN and not self._waiting and len(self._handed) < self._line

    @property
    def _has_input(self) -> bool:
        return self._envelope is not None or bool(self._input) or self._parser.has_data

    @property
    def held(self) -> int:
        """Bytes, and costs of events, that this connection holds (LJ-42b)."""
        return (
            self._open_cost
            + self._held_cost
            + self._piece_cost
            + self._parser.held
            + sum(map(len, self._input))
            + (self._envelope.held if self._envelope is not None else 0)
        )

    @property
    def room(self) -> int:
        """Events that the writer may still send in its window before it waits for an ack; 0 while `wants_data` is false."""
        return self._left if self.wants_data else 0

    @property
    def unacked(self) -> int:
        """Events handed to the sink, or about to be, that it has not committed."""
        return sum(piece.events for pieces in (self._handed, self._waiting) for piece in pieces)

    @property
    def oldest_uncommitted(self) -> float | None:
        """The time at which the sink got the oldest unit that it has not committed; ``None`` if there is none."""
        for piece in self._handed:
            if not piece.committed:
                return piece.since
        return None

    def take_events(self) -> list[ReaderEvent]:
        """Return the events that `commit`, `sink_failed` and `hand_on` caused. Each is returned once."""
        events, self._events = self._events, []
        return events

    def data_to_send(self, now: float) -> list[bytes]:
        """Take the acks that are queued, in order."""
        out, self._out = self._out, []
        return out

    def receive_data(self, data: bytes, now: float) -> list[ReaderEvent]:
        """Take bytes from the writer, and process the first of them; `work` processes the rest. After the end, input is ignored.

        A broken rule is the event `Refused`, not an exception.

        Args:
            data: any number of bytes, cut anywhere; ``b""`` is the end of the writer's direction.
            now: the time.
        """
        if self.state is not ReaderState.OPEN or self._ended:
            return self.take_events()
        if self._reading_since is not None:
            self.stop_reading(now)
        if data:
            self._silence = self._quiet = 0.0
            self._input.append(data)
        else:
            self._ended = True
        return self.work(now)

    def connection_lost(self, code: int, reason: str, now: float) -> list[ReaderEvent]:
        """Record that the carrier has failed. Complete events are still handed to the sink, without an ack (LJ-28); continue with `work`."""
        if self._lost or self.state is ReaderState.CLOSED:
            return self.take_events()
        self._lost = True
        self._out.clear()
        if self.state is ReaderState.OPEN:
            self._ended = True
            return self.work(now)
        self._move(ReaderInput.LOST)
        self._advance(now)
        return self.take_events()

    def work(self, now: float) -> list[ReaderEvent]:
        """Process more of the input: one step of an envelope (LJ-35), or frames outside envelopes."""
        if self.has_work:
            try:
                self._step(now)
            except RemoteProtocolError as error:
                head = self._parser.head()
                if self._payload:
                    error.offset = self._parser.frame_offset - len(self._payload) - 6
                    head = struct.pack(">2sI", b"%dC" % (self.version or 0), len(self._payload)) + self._payload[:26]
                self._refuse(error, head, now)
        self._advance(now)
        return self.take_events()

    def _step(self, now: float) -> None:
        steps = 1
        windows = _WINDOWS
        while windows and not self._waiting and len(self._handed) < self._line:
            if self._envelope is not None:
                inner = self._parse_envelope(self._envelope)
                if inner is ParserStop.LARGE:
                    return
                if inner is ParserStop.NEED_DATA:
                    if not steps:
                        return
                    steps -= 1
                    before = self._envelope.unpacked
                    self._envelope.unpack()
                    self.bytes_unpacked += self._envelope.unpacked - before
                windows -= inner is ParserStop.WINDOW
                continue
            stop = self._parser.parse(self._open, self._room(), self._cost_room())
            self._count(self._parser, stop)
            if stop is ParserStop.LARGE:
                return
            if stop is ParserStop.WINDOW:
                windows -= 1
                self._take_window(self._parser.window)
            elif stop is ParserStop.ENVELOPE:
                self._payload, self._parser.payload = self._parser.payload, memoryview(b"")
                self._envelope = Unpacker(self.version or 0, self._payload, self._config)
                self._phase, self._built, self._built_windows, self._bad_json = _Phase.BUILD, 0, 0, None
                self._windows_left = self._config.max_windows + len(self._payload) // _SMALLEST
            elif stop is ParserStop.NEED_DATA:
                if self._input:
                    self._feed(self._input.popleft())
                else:
                    if self._ended:
                        self._take_end()
                    elif self._frame != self._parser.frame_offset:
                        self._frame = self._parser.frame_offset
                        self._frame_time = 0.0
                    return

    def _feed(self, data: bytes) -> None:
        if self.version is None:
            version = data[0] - ord("0")
            if version not in self._config.versions:
                rule, spoken = ("LJ-3" if version in (1, 2) else "LJ-2"), sorted(self._config.versions)
                self._parser.feed(data)
                raise RemoteProtocolError(f"expected version {spoken} in ASCII, got {data[:1]!r}", rule=rule)
            self.version = version
            self._parser = FrameParser(version, self._config)
        self._parser.feed(data)

    def _parse_envelope(self, envelope: Unpacker) -> ParserStop | None:
        """Parse the bytes unpacked so far; returns as `Unpacker.parse` does."""
        stop: ParserStop | None
        if self._phase is _Phase.CHECK:
            stop = envelope.parse(None, _UNBOUNDED, _UNBOUNDED)
            if stop is ParserStop.WINDOW:
                self._use_window()
        elif self._phase is _Phase.SKIP:
            stop = envelope.parse(None, max(1, self._built), _UNBOUNDED)
            if self._built:
                self._built -= envelope.count
            elif stop is ParserStop.WINDOW:
                self._built_windows -= 1
            if not self._built and not self._built_windows:
                self._phase = _Phase.REST
                return ParserStop.FULL
        else:
            building = self._phase is _Phase.BUILD
            try:
                stop = envelope.parse(self._open, self._room(), self._cost_room(), cut=not building)
            except RemoteProtocolError as error:
                if error.rule != "LJ-12" or self._phase is _Phase.REST:
                    raise
                error.__traceback__ = error.__context__ = None  # they hold what was being parsed
                self._bad_json = error
                stop = ParserStop.FULL
            if envelope.count:
                self._built += envelope.count
                self._built_windows = 0
            self._count(envelope, stop)
            if stop is ParserStop.WINDOW:
                if building:
                    self._use_window()
                self._built_windows += 1
                self._take_window(envelope.window)
            if building and (self._bad_json is not None or stop is ParserStop.COST or self._cost_room() <= 0):
                self._phase = _Phase.CHECK
        if stop is None:
            self._end_envelope()
        return stop

    def _use_window(self) -> None:
        """Count a window that the envelope announces or fills, because each makes work for the sink or an ack (LJ-41a)."""
        if not self._windows_left:
            limit = self._config.max_windows
            raise RemoteProtocolError(
                f"an envelope of {len(self._payload)} bytes with more than {limit + len(self._payload) // _SMALLEST} windows"
                " (raise max_windows)",
                rule="LJ-41a",
            )
        self._windows_left -= 1

    def _end_envelope(self) -> None:
        """Release the pieces of a valid envelope, and build the events that were only checked."""
        self._envelope = None
        self._waiting += self._held
        self._piece_cost += self._held_cost
        self._held = []
        self._held_cost = 0
        if self._phase is not _Phase.CHECK:
            self._payload = memoryview(b"")
            return
        if self._bad_json is not None:
            raise self._bad_json
        self._slice()
        self._envelope = Unpacker(self.version or 0, self._payload, self._config)
        self._phase = _Phase.SKIP

    def _room(self) -> int:
        """Return how many events fit before the unit or the piece must be closed."""
        config = self._config
        # LJ-23: in an envelope of version 1 `max_window` ends a slice, elsewhere the unit.
        size = self._open_count if self.version == 1 and self._envelope is not None else self._since
        room = min(self._left, max(1, config.max_window - size))
        if config.partial_ack_every is not None and self.version == 2:
            room = min(room, config.partial_ack_every - self._open_count)
        return room

    def _cost_room(self) -> int:
        return self._config.max_cost - self._open_cost - self._held_cost

    def _count(self, found: FrameParser | Unpacker, stop: ParserStop | None) -> None:
        """Count parsed events, and close the unit or the piece if it is full (LJ-16, LJ-23, LJ-42)."""
        count = found.count
        if not count and stop is not ParserStop.COST:
            return
        config = self._config
        self.events += count
        if count:
            self._sequence = found.sequence
        self._since += count
        self._left -= count
        self._open_count += count
        self._open_cost += found.cost
        if self._left == 0:
            self._left = self._window
            if self._envelope is not None:
                self._use_window()
            self._close_unit()
        elif self._since >= config.max_window and (self.version == 2 or self._envelope is None):
            self._close_unit()
        elif (
            self._open_count >= config.max_window
            or (stop is ParserStop.COST and (self._envelope is None or self._phase is _Phase.REST))
            or (self.version == 2 and self._open_count == config.partial_ack_every)
        ):
            self._slice()

    def _take_window(self, size: int) -> None:
        if self._since:
            self._close_unit()
        if size:
            self._window = self._left = size
        elif self.version == 2:
            self._close_piece(0)  # LJ-21: in line behind the acks of earlier units

    def _close_unit(self) -> None:
        self._close_piece(self._sequence)
        self._since = 0

    def _slice(self) -> None:
        """Hand on the open unit as far as it has come (LJ-42a). It is acked only with `partial_ack_every` (LJ-19)."""
        if self._open_count or self._open:
            partial = self.version == 2 and self._config.partial_ack_every is not None
            self._close_piece(self._sequence if partial else None, partial=partial)

    def _close_piece(self, ack: int | None, *, partial: bool = False) -> None:
        unit = None
        if self._open:
            self.units += 1
            unit = UnitReady(
                number=self.units,
                events=self._open,
                count=self._open_count,
                sequence=self._sequence,
                whole=ack is not None and not partial,
                cost=self._open_cost,
            )
        # A piece without events also takes memory until it is acked.
        piece = _Piece(unit, ack, self._open_count, max(EVENT_COST, self._open_cost), partial)
        if self._envelope is not None and self._phase is _Phase.BUILD:
            self._held.append(piece)
            self._held_cost += piece.cost
        else:
            self._piece_cost += piece.cost
            if unit is not None or self._waiting:
                self._waiting.append(piece)
            else:  # nothing for the sink
                piece.committed = True
                self._handed.append(piece)
                self._queue_acks()
        self._drop_open()

    def _drop_open(self) -> None:
        self._open = []
        self._open_count = self._open_cost = 0

    def _drop_input(self) -> None:
        """Forget the open unit and all unprocessed input."""
        self._drop_open()
        self._since = 0
        self._input.clear()
        self._envelope = None
        self._payload = memoryview(b"")
        self._held = []
        self._held_cost = 0
        self._parser = FrameParser(self.version or 1, self._config)

    def commit(self, number: int, now: float) -> None:
        """Record that the events of a unit are safe, and queue the acks that are due now, in order (LJ-17).

        Args:
            number: `UnitReady.number`.
            now: the time.

        Raises:
            LocalProtocolError: no such unit waits for its commit.
        """
        for piece in self._handed:
            if piece.unit is not None and piece.unit.number == number and not piece.committed:
                piece.committed = True
                break
        else:
            raise LocalProtocolError(f"no unit {number} waits for its commit", rule="LJ-25")
        self._uncommitted -= 1
        if self._reading_since is not None:
            self.reading(now)  # the silence so far comes before the ack
        self.late_commits += self._lost or self.state is ReaderState.CLOSED
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Hand on pieces, queue acks, and finish if nothing is left to do."""
        if self.state is ReaderState.CLOSED:
            return
        limit = self._config.max_uncommitted_units
        while self._waiting and (self._waiting[0].unit is None or self._uncommitted < limit):
            piece = self._waiting.popleft()
            self._handed.append(piece)
            if piece.unit is None:
                piece.committed = True
            else:
                self._uncommitted += 1
                piece.since = now
                self._events.append(piece.unit)
        self._queue_acks()
        if not self._uncommitted:
            self._alive_at = None
        elif self._alive_at is None and self.version == 2:
            self._alive_at = now + self._config.keepalive_interval
        if not self._handed and not self._waiting and (self.state, ReaderInput.SETTLED) in READER_TRANSITIONS:
            self._finish(ReaderInput.SETTLED)

    def _queue_acks(self) -> None:
        while self._handed and self._handed[0].committed:
            piece = self._handed.popleft()
            self._piece_cost -= piece.cost
            if piece.ack is None:
                continue
            again = piece.ack == self._partial_ack  # LJ-19: no number twice
            if piece.partial:
                if piece.ack == 0:
                    continue  # it would be a keepalive
                self._partial_ack = piece.ack
            else:
                self._partial_ack = None
            if not again and not self._lost:
                self._out.append(encode_ack(self.version or 1, piece.ack))
                self._quiet = 0.0
                self.acks += 1

    def sink_failed(self) -> None:
        """Record that a unit will not be committed: the connection ends without its ack (LJ-25)."""
        self._end_now(ReaderInput.SINK_FAILED)

    def _end_now(self, what: ReaderInput) -> None:
        if self.state is not ReaderState.CLOSED:
            self._drop_input()
            self._finish(what)

    def hand_on(self, now: float) -> None:
        """Hand on the open unit as a slice, because the driver stops reading for a while (LJ-42b)."""
        if self.state is ReaderState.OPEN and self._envelope is None:
            self._slice()
        self._advance(now)

    def _take_end(self) -> None:
        """Take the end of the input, all of which was processed (LJ-6, LJ-28)."""
        lost = self._lost
        clean = not lost and not self._parser.in_frame
        if clean and self._since:
            self._close_unit()
        elif self._open_count:
            self._close_piece(None)
        self._drop_input()
        self._events.append(PeerClosed(clean, lost))
        self._move(ReaderInput.LOST if lost else ReaderInput.PEER_ENDED)

    def _refuse(self, error: RemoteProtocolError, head: bytes, now: float) -> None:
        # The traceback refers to the data that was being parsed, and to this event.
        error.__traceback__ = error.__context__ = None
        self._drop_input()
        self._move(ReaderInput.BROKEN_RULE)
        self._grace_ends = now + self._config.close_timeout
        self._events.append(Refused(error, head))

    def drain(self, now: float) -> list[ReaderEvent]:
        """End this side. Units at the sink may be committed for `drain_timeout`, and are acked; the writer sends the rest again (LJ-28)."""
        if self.state in (ReaderState.CLOSED, ReaderState.DRAINING):
            return self.take_events()
        if self.state is not ReaderState.REFUSING:
            self._grace_ends = now + self._config.drain_timeout
        self._move(ReaderInput.DRAIN)
        self._drop_input()
        self._piece_cost -= sum(piece.cost for piece in self._waiting)
        self._waiting.clear()
        self._advance(now)
        return self.take_events()

    def close(self, code: int, reason: str, now: float) -> list[ReaderEvent]:
        """End now. Units at the sink are not acked, so the writer sends them again.

        Lumberjack sends neither `code` nor `reason`: the writer only sees the connection close.
        """
        self._end_now(ReaderInput.CLOSE)
        return self.take_events()

    def _finish(self, what: ReaderInput) -> None:
        reason = _REASONS.get(what) or _REASONS[self.state]
        self._move(what)
        self._alive_at = self._grace_ends = None
        self._events.append(Finished(reason, self.unacked))

    def _move(self, what: ReaderInput) -> None:
        self.state = READER_TRANSITIONS[self.state, what]

    def reading(self, now: float) -> None:
        """Record that the driver waits for bytes from now on."""
        if self._reading_since is not None:
            self.stop_reading(now)
        self._reading_since = now

    def stop_reading(self, now: float) -> None:
        """Record that the driver no longer waits and got no bytes; `receive_data` implies it."""
        if self._reading_since is not None:
            waited = now - self._reading_since
            self._reading_since = None
            self._silence += waited
            self._quiet += waited
            self._frame_time += waited

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due, or ``None`` if no clock runs. Any other call may change the answer."""
        if self.state is ReaderState.CLOSED:
            return None
        clocks = self._deadlines()
        return min(clocks, key=_WHEN)[0] if clocks else None

    def _deadlines(self) -> list[tuple[float, _Clock]]:
        clocks: list[tuple[float, _Clock]] = []
        if self._alive_at is not None:
            clocks.append((self._alive_at, _Clock.KEEPALIVE))
        if self._grace_ends is not None:
            clocks.append((self._grace_ends, _Clock.GRACE))
        since, config = self._reading_since, self._config
        # LJ-25a: keepalives make a writer of version 2 wait for as long as the sink takes.
        if self.version == 1 and config.commit_timeout is not None and (asked := self.oldest_uncommitted) is not None:
            clocks.append((asked + config.commit_timeout, _Clock.COMMIT))
        if since is None or self.state is not ReaderState.OPEN:
            return clocks
        if self._parser.in_frame:
            clocks.append((since + self._frame_limit() - self._frame_time, _Clock.FRAME))
        elif self._since:
            clocks.append((since + config.idle_ack - self._silence, _Clock.IDLE_ACK))
        elif config.idle_timeout is not None and not self._handed and not self._waiting:
            clocks.append((since + config.idle_timeout - self._quiet, _Clock.IDLE))
        return clocks

    def _frame_limit(self) -> float:
        return self._config.frame_timeout + self._parser.announced / _ANNOUNCED_PER_SECOND

    def handle_timeout(self, now: float) -> list[ReaderEvent]:
        """Act on every clock that has run out."""
        if self.state is ReaderState.CLOSED:
            return self.take_events()
        due = {clock for when, clock in self._deadlines() if when <= now}
        if self._reading_since is not None:
            self.reading(now)
        if _Clock.KEEPALIVE in due:
            self._alive_at = now + self._config.keepalive_interval
            self._quiet = 0.0
            if not self._lost:
                self._out.append(encode_ack(2, 0))
                self.keepalives += 1
        if _Clock.GRACE in due:
            self._finish(ReaderInput.TIME_OUT)
        elif _Clock.COMMIT in due:
            self.sink_failed()
        elif _Clock.FRAME in due:
            limit = self._frame_limit()
            error = RemoteProtocolError(
                f"a frame took longer than {limit:.0f} s", rule="LJ-29", offset=self._parser.frame_offset
            )
            self._refuse(error, self._parser.head(), now)
        elif _Clock.IDLE_ACK in due:
            self._close_unit()
            self._silence = 0.0
        elif _Clock.IDLE in due:
            self._finish(ReaderInput.IDLE)
        self._advance(now)
        return self.take_events()


class _Clock(Enum):
    KEEPALIVE = auto()
    GRACE = auto()
    COMMIT = auto()
    FRAME = auto()
    IDLE_ACK = auto()
    IDLE = auto()


_REASONS: Mapping[ReaderInput | ReaderState, EndReason] = {
    ReaderInput.SINK_FAILED: "sink_failed",
    ReaderInput.CLOSE: "closed",
    ReaderState.OPEN: "idle",
    ReaderState.HALF_CLOSED: "peer_closed",
    ReaderState.REFUSING: "refused",
    ReaderState.DRAINING: "drained",
    ReaderState.ORPHANED: "lost",
}
