"""The control pool: our signals to the peer, and the peer's to us.

Out: each control stream has a bounded backlog, written in the order of MA-85 whenever the owner says that the stream takes bytes. A
stream is opened by its first signal. Signals of one operation share a stream, so they arrive in order. No queued signal can overtake an
earlier one of the same operation: an unwritten Proceed is taken back when its operation ends, and the Fail or Refuse is then the only
decision.

In: signals are read entry by entry, so a batch needs no memory. A text is buffered until it is whole, 64 KiB at most. A token bucket
counts entries; while it is empty, the streams are not read.
"""

from __future__ import annotations

from levada.transports.core import OpenStream, StopStream, StreamData

from .codes import ErrorCode, OperationFault, close_code
from .events import Output, StreamUnblocked
from .frames import BATCH, CONTROL_OPS, DISCONNECT_REQUEST, DONE_ENTRY, ENTRIES, FAIL, PROCEED_ENTRY, REFUSE_ENTRY
from .rates import TokenBucket
from .side import Side
from .state import ConnectionState

__all__ = ["ControlIn", "ControlPool", "Signals"]

_CLOSED = ConnectionState.CLOSED


class ControlOut:
    """One of our control streams, with its backlog."""

    __slots__ = ("dones", "fails", "proceeds", "refuses", "requests", "stream_id", "writable")

    def __init__(self) -> None:
        self.stream_id: int | None = None
        """None until its first signal is written."""
        self.writable = True
        self.refuses: list[bytes] = []
        self.fails: list[bytes] = []
        self.dones: list[bytes] = []
        self.proceeds: dict[int, None] = {}
        self.requests: list[bytes] = []

    def waiting(self) -> int:
        """Entries waiting."""
        return len(self.refuses) + len(self.fails) + len(self.dones) + len(self.proceeds) + len(self.requests)

    def take(self, most: int, *, dones: bool) -> bytes:
        """Take the backlog in the order of MA-85, in batches of at most `most` entries."""
        parts: list[bytes] = []
        if self.refuses:
            _batches(parts, 4, self.refuses, most)
        if self.fails:
            parts += self.fails
            self.fails.clear()
        if self.dones and dones:
            _batches(parts, 8, self.dones, most)
        if self.proceeds:
            _batches(parts, 3, [PROCEED_ENTRY.pack(i) for i in self.proceeds], most)
            self.proceeds.clear()
        if self.requests:
            parts += self.requests
            self.requests.clear()
        return b"".join(parts)


def _batches(parts: list[bytes], op: int, entries: list[bytes], most: int) -> None:
    if len(entries) <= most:
        parts.append(BATCH.pack(op, len(entries)))
        parts += entries
    else:
        for at in range(0, len(entries), most):
            piece = entries[at : at + most]
            parts.append(BATCH.pack(op, len(piece)))
            parts += piece
    entries.clear()


class ControlPool:
    """Our control streams."""

    __slots__ = ("_core", "_dirty", "_size", "_slots", "backlog", "done_at", "starved", "stops", "streams")

    def __init__(self, core: Side) -> None:
        self._core = core
        self._size = core.config.control.global_control_pool_size
        self._slots: list[ControlOut | None] = [None] * self._size
        self.streams: dict[int, ControlOut] = {}
        """Open streams by stream id."""
        self._dirty: dict[ControlOut, None] = {}
        self.done_at: float | None = None
        """When the waiting Dones must be sent. Source: MA-126 (`done_flush_ms`)."""
        self.starved = False
        """Whether signals waited for stream credit at the last flush."""
        self.backlog = 0
        """Most entries waiting on one stream at the last flush."""
        self.stops = 0
        """How many of our control streams the peer has stopped."""

    def let_go(self) -> None:
        """Drop the references to the ended connection."""
        del self._core

    def _slot(self, stream_id: int) -> ControlOut:
        # MA-84: by the operation's number. A slot keeps its stream, so signals of one operation stay in order.
        place = (stream_id >> 2) % self._size
        out = self._slots[place] or self._new(place)
        self._dirty[out] = None
        return out

    def _new(self, place: int) -> ControlOut:
        slots, out = self._slots, None
        # MA-130: if few streams would be left for operations, the slot shares an existing stream. Both uses take at most as many as the pool.
        if self._credit() - self._unopened() <= self._size:
            out = next((o for o in slots if o is not None), None)
        slots[place] = out = out or ControlOut()
        return out

    def _unopened(self) -> int:
        return sum(1 for o in set(self._slots) if o is not None and o.stream_id is None)

    def _credit(self) -> int:
        return self._core.credit_left(unidirectional=self._core.config.control.control_stream_kind == "uni")

    def proceed(self, stream_id: int) -> None:
        """Queue a Proceed."""
        self._slot(stream_id).proceeds[stream_id] = None

    def refuse(self, stream_id: int, code: int, retry_after_ms: int) -> None:
        """Queue a Refuse."""
        self._slot(stream_id).refuses.append(REFUSE_ENTRY.pack(stream_id, retry_after_ms, code))

    def fail(self, stream_id: int, code: int, reason: bytes) -> None:
        """Queue a Fail; an unwritten Proceed for the same operation is not sent."""
        out = self._slot(stream_id)
        out.proceeds.pop(stream_id, None)
        out.fails.append(FAIL.pack(7, stream_id, code, len(reason)) + reason)

    def done(self, stream_id: int, start_ms: int, time_ms: int) -> None:
        """Queue a Done."""
        self._slot(stream_id).dones.append(DONE_ENTRY.pack(stream_id, start_ms, time_ms))

    def withdraw(self, stream_id: int) -> None:
        """Take back an unwritten Proceed, whose operation has ended."""
        out = self._slots[(stream_id >> 2) % len(self._slots)]
        if out is not None:
            out.proceeds.pop(stream_id, None)

    def disconnect_request(self, drain_ms: int, reason: bytes) -> None:
        """Queue a Disconnect Request."""
        self._slot(0).requests.append(DISCONNECT_REQUEST.pack(9, drain_ms, len(reason)) + reason)

    def disconnect(self, out: list[Output]) -> None:
        """Write Disconnect, before or instead of the backlog. Source: MA-85, MA-93."""
        for stream in list(self.streams.values()) or [self._slot(0)]:
            self._open(stream, out)
            if stream.stream_id is not None:
                out.append(StreamData(stream.stream_id, b"\x0a", False))
                break
        self._dirty.clear()
        self.starved = False

    def waiting(self) -> bool:
        """Whether any signal is unwritten."""
        return any(stream.waiting() for stream in self._dirty)

    def flush(self, out: list[Output], now: float) -> None:
        """Write as much as possible."""
        config = self._core.config
        self.backlog = 0
        if not self._dirty:
            self.starved = False
            return
        dones = True
        if config.control.done_flush:
            if self.done_at is None and any(s.dones for s in self._dirty):
                self.done_at = now + config.control.done_flush
            dones = self.done_at is not None and now >= self.done_at
            if dones:
                self.done_at = None
        left: dict[ControlOut, None] = {}
        for stream in self._dirty:
            if stream.stream_id is None:
                self._open(stream, out)
            if stream.writable and stream.stream_id is not None:
                data = stream.take(config.control.control_batch_max, dones=dones)
                if data:
                    out.append(StreamData(stream.stream_id, data, False))
                if dones:
                    continue
            if waits := stream.waiting():
                left[stream] = None
                self.backlog = max(self.backlog, waits)
        self._dirty = left
        self.starved = bool(left) and any(stream.stream_id is None for stream in left)
        if self.backlog > 4 * config.control.control_ring:
            self._core.fail_connection(ErrorCode.CAPACITY_LIMIT, "signals are not read", "MA-85")

    def _open(self, stream: ControlOut, out: list[Output]) -> None:
        core = self._core
        unidirectional = core.config.control.control_stream_kind == "uni"
        if stream.stream_id is not None or not core.credit_left(unidirectional=unidirectional):
            return
        stream.stream_id = core.take_stream_id(unidirectional=unidirectional)
        self.streams[stream.stream_id] = stream
        out.append(OpenStream(stream.stream_id, unidirectional, -1))
        if not unidirectional:
            core.keep_control(ControlIn(core, stream.stream_id, own=True))

    def stopped(self, stream_id: int) -> None:
        """Move the backlog of a control stream that the peer has stopped to another. Source: MA-86, MA-88a."""
        stream = self.streams.pop(stream_id)
        stream.stream_id = None
        stream.writable = True
        self.stops += 1
        # Otherwise the pool would reopen each stream forever.
        if self.stops > self._core.config.control.max_control_streams:
            self._core.fail_connection(ErrorCode.PROTOCOL_VIOLATION, "all control streams were stopped", "MA-86")


class Signals:
    """The limits on the peer's signals: the rate, strikes, signals for unknown streams."""

    __slots__ = (
        "_core", "_blocked_at", "_resume_at", "_since", "_unknown", "_unknown_at", "blocked", "bucket", "late",
        "strikes",
    )  # fmt: skip

    def __init__(self, core: Side, now: float) -> None:
        config = core.config
        self._core = core
        self.bucket = TokenBucket(config.control.signal_rate, config.control.signal_burst, now)
        self.blocked: dict[ControlIn, None] = {}
        """Streams waiting for tokens."""
        self._since: float | None = None
        """When the flood began."""
        self._blocked_at = now
        """When a stream was last blocked."""
        self._resume_at = now
        self.strikes = 0
        self.late = 0
        """Signals for operations that have ended or are unknown."""
        self._unknown = 0
        self._unknown_at = now

    def let_go(self) -> None:
        """Drop the references to the ended connection."""
        self.blocked.clear()
        del self._core

    def strike(self, detail: str, rule: str) -> None:
        """Count a grave mistake; the third ends the connection. Source: MA-12."""
        self.strikes += 1
        if self.strikes >= self._core.config.control.max_strikes:
            self._core.fail_connection(ErrorCode.PROTOCOL_VIOLATION, detail, rule)

    def unknown(self, now: float) -> None:
        """Count a signal for a stream that this side never opened. Source: MA-49."""
        self.late += 1
        if now - self._unknown_at >= 1:
            self._unknown, self._unknown_at = 0, now
        self._unknown += 1
        if self._unknown == self._core.config.control.unknown_signal_rate:
            self.strike("signals for unknown streams", "MA-49")

    def block(self, stream: ControlIn, now: float) -> None:
        """Stop reading a stream until there are tokens. Source: MA-88."""
        self.blocked[stream] = None
        # A stream is read again as soon as its held bytes are processed; the flood still counts as going on.
        if self._since is None or now - self._blocked_at > 1:
            self._since = now
        self._blocked_at = now
        # A tenth of a second's worth at a time: a wake-up for each token would itself be a flood.
        self._resume_at = now + max(0.01, 0.1 - max(0.0, self.bucket.tokens) / self.bucket.rate)

    def deadline(self) -> float | None:
        """When blocked streams may be read again."""
        if not self.blocked or self._since is None:
            return None
        return min(self._resume_at, self._since + self._core.config.control.flood_timeout)

    def resume(self, now: float) -> None:
        """Read blocked streams, as far as the tokens last."""
        if not self.blocked or self._since is None:
            return
        if now >= self._since + self._core.config.control.flood_timeout:
            self._core.fail_connection(ErrorCode.CAPACITY_LIMIT, "too many signals", "MA-88")
            return
        if now < self._resume_at:
            return
        for stream in list(self.blocked):
            del self.blocked[stream]
            stream.resume(now)
            if stream not in self.blocked and self._core.is_control(stream):
                self._core.emit(StreamUnblocked(stream.stream_id))


class ControlIn:
    """One stream on which the peer sends signals: its own, or the reverse direction of one of ours (MA-82)."""

    __slots__ = ("_buffer", "_core", "_fin", "_left", "_need", "_op", "own", "stream_id")

    def __init__(self, core: Side, stream_id: int, *, own: bool) -> None:
        self._core = core
        self.stream_id = stream_id
        self.own = own
        """Whether this side opened it."""
        self._buffer = bytearray()
        self._need = 1
        self._op = 0
        self._left = 0
        """Entries of the current batch that have not come."""
        self._fin = False

    def receive(self, data: bytes, fin: bool, now: float) -> None:
        """Take bytes."""
        self._fin = fin
        if self in self._core.signals.blocked:
            self._buffer += data
            if len(self._buffer) > self._core.config.gate.stream_window:
                self._buffer.clear()
                self._core.fail_connection(ErrorCode.CAPACITY_LIMIT, "too many signals", "MA-88")
            return
        if self._buffer:
            self._buffer += data
            if len(self._buffer) >= self._need:
                data = bytes(self._buffer)
                self._buffer.clear()
                self._parse(data, now)
        elif data:
            self._parse(data, now)
        if fin:
            self._ended(now)

    def resume(self, now: float) -> None:
        """Continue reading with the held bytes."""
        data = bytes(self._buffer)
        self._buffer.clear()
        self._parse(data, now)
        self._ended(now)

    def _ended(self, now: float) -> None:
        core = self._core
        if self._fin and self not in core.signals.blocked and core.is_control(self):
            self.gone(now)

    def gone(self, now: float) -> None:
        """Record that the peer's direction has ended. Source: MA-86, MA-91."""
        core = self._core
        core.signals.blocked.pop(self, None)
        core.forget_control(self)
        if self._buffer or self._left:
            if self._buffer and not self._left and self._buffer[0] == 9:
                core.fail_connection(ErrorCode.PROTOCOL_VIOLATION, "Disconnect Request broken off", "MA-91")
            else:
                core.signals.strike("control stream ended inside a signal", "MA-86")

    def _parse(self, data: bytes, now: float) -> None:
        core = self._core
        bucket = core.signals.bucket
        tokens = bucket.tokens
        if tokens < len(data):  # an entry takes at least one byte
            tokens = bucket.refill(now)
        at, end = 0, len(data)
        try:
            while at < end and core.state is not _CLOSED:
                if self._left:
                    entry = ENTRIES[self._op]
                    count = min(self._left, (end - at) // entry.size, int(tokens))
                    if count:
                        after = at + count * entry.size
                        entries = entry.iter_unpack(data[at:after])
                        if self._op == 3:
                            for (stream_id,) in entries:
                                core.on_proceed(stream_id, now)
                        elif self._op == 4:
                            for stream_id, retry_ms, code in entries:
                                core.on_refuse(stream_id, retry_ms, code, now)
                        else:
                            for stream_id, start_ms, time_ms in entries:
                                core.on_done(stream_id, start_ms, time_ms, now)
                        at = after
                        self._left -= count
                        tokens -= count
                        continue
                    if tokens < 1:
                        core.signals.block(self, now)
                    self._need = entry.size
                    break
                op = data[at]
                if op not in CONTROL_OPS:
                    raise OperationFault(ErrorCode.ILLEGAL_STREAM, f"operation 0x{op:02x} on a control stream", "MA-12")
                if tokens < 1:
                    core.signals.block(self, now)
                    break
                if op in ENTRIES:
                    if end - at < 3:
                        self._need = 3
                        break
                    self._op, self._left = BATCH.unpack_from(data, at)
                    at += 3
                    if not self._left:
                        tokens -= 1  # MA-38: it does nothing, but counts, or a flood would be free.
                    continue
                if op == 0x0A:
                    core.on_disconnect(now)
                    return
                layout = FAIL if op == 7 else DISCONNECT_REQUEST
                if end - at < layout.size:
                    self._need = layout.size
                    break
                fields = layout.unpack_from(data, at)
                size = layout.size + fields[-1]
                if end - at < size:
                    self._need = size
                    break
                tokens -= 1
                text = self._text(data[at + layout.size : at + size])
                at += size
                if op == 7:
                    core.on_fail(fields[1], fields[2], text, now)
                else:
                    core.on_disconnect_request(fields[1] / 1000, text, now)
        except OperationFault as fault:
            bucket.tokens = tokens
            self._lost(fault)
            return
        bucket.tokens = tokens
        if at < end and core.state is not _CLOSED:
            self._buffer += data[at:]

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # MA-5: the length is known, so framing holds and the signal counts, but its text does not.
            self._core.fail_stream(self.stream_id, ErrorCode.PARSE, "text of a signal is not UTF-8")
            self._core.signals.strike("text of a signal is not UTF-8", "MA-5")
            return ""

    def _lost(self, fault: OperationFault) -> None:
        # MA-12: the start of the next signal is unknown.
        core = self._core
        core.fail_stream(self.stream_id, fault.code, fault.reason)
        core.out.append(StopStream(self.stream_id, close_code(fault.code)))
        core.forget_control(self, ended=self._fin)
        core.signals.strike(fault.reason, fault.rule)
