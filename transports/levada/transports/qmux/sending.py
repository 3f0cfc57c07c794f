"""The sending side: queues of streams, the peer's limits, priorities, and records.

`SendingParts.write` is on the path of every message. A record has one large STREAM frame, or many small frames. Chunks are never joined in the
queue: a frame takes views of them, and one `bytes.join` puts all records of a write together. So each byte is copied once.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from levada.framework.errors import LocalProtocolError

from .events import QueueRoom, StreamFlushed, StreamRoom, StreamStopped
from .frames import DEFAULT_MAX_RECORD, FrameType, Parameters, encode_frame, encode_head, encode_int
from .state import ReceivingState, SendingState
from .streams import Level, QmuxStreams, StreamParts

__all__ = ["Records", "SendingParts"]


class Records:
    """The records of one write.

    Args:
        framed: whether a record is a message, without its Size. Source: QX-2, QX-41.
    """

    __slots__ = ("body", "fill", "framed", "largest", "pieces", "written")

    def __init__(self, *, framed: bool) -> None:
        self.framed = framed
        self.largest = DEFAULT_MAX_RECORD
        """The largest Size that may be sent. Source: QX-3, QX-6."""
        self.body: list[bytes | memoryview] = []
        """Pieces of the record that is being filled."""
        self.fill = 0
        """Bytes in `body`."""
        self.pieces: list[bytes | memoryview] = []
        """Complete records: messages, or the pieces of all records, with their Sizes."""
        self.written = 0
        """Bytes in complete records, with two bytes for each Size."""

    def add(self, frame: bytes) -> None:
        """Add a frame to the record that is being filled, or to the next one if it does not fit."""
        size = len(frame)
        if self.fill + size > self.largest:
            self.close()
        self.body.append(frame)
        self.fill += size

    def close(self) -> None:
        """Complete the record that is being filled, unless it is empty."""
        fill = self.fill
        if fill:
            if self.framed:
                self.pieces.append(b"".join(self.body))
            else:
                self.pieces.append(encode_int(fill))
                self.pieces += self.body
            self.written += fill + 2
            self.body.clear()
            self.fill = 0

    def take(self) -> list[bytes]:
        """Return the messages, or all records in one piece, and begin the next write."""
        self.close()
        if not self.written:
            return []
        pieces = self.pieces
        out = [bytes(piece) for piece in pieces] if self.framed else [b"".join(pieces)]
        pieces.clear()
        self.written = 0
        return out


# Looking up a member of an enum is slow.
_OPEN, _ENDING, _OVER = (SendingState.OPEN, SendingState.ENDING, SendingState.OVER)
_RECEIVED = ReceivingState.OVER
_MOST_HEAD = 1 + 8 + 8 + 4
"""Most bytes of a STREAM frame before its data."""


class SendingParts:
    """The sending parts of all streams.

    Args:
        streams: the streams.
    """

    def __init__(self, streams: QmuxStreams) -> None:
        self._streams = streams
        self.queued = 0
        """Bytes queued on all streams."""
        self._limit = 0
        self._sent = 0
        self._blocked_at = -1
        self._levels: dict[int, Level] = {}
        self._order: list[tuple[int, Level]] = []

    def establish(self, parameters: Parameters) -> None:
        """Take the peer's limits."""
        self._limit = parameters.max_data

    @property
    def credit(self) -> int:
        """Bytes that this side may still send under the connection's limit. Source: QX-27."""
        return self._limit - self._sent

    @property
    def ready(self) -> bool:
        """Whether a stream can write."""
        if self._sent < self._limit:
            for _, level in self._order:  # the loop takes 0.1 µs, `any` 0.5
                if level:
                    return True
        return False

    def level(self, priority: int) -> Level:
        """Return the queue of the streams with a priority.

        Raises:
            LocalProtocolError: the priority is not between 0 and 255.
        """
        level = self._levels.get(priority)
        if level is None:
            if not 0 <= priority <= 255:
                raise LocalProtocolError(f"priority is {priority}, wanted 0 to 255")
            level = self._levels[priority] = OrderedDict()
            insort(self._order, (priority, level))
        return level

    def set_priority(self, stream: StreamParts, level: Level) -> None:
        """Move a stream to the queue of another priority."""
        if stream in stream.level:
            del stream.level[stream]
            level[stream] = None
        stream.level = level

    def send(self, stream: StreamParts, data: bytes, fin: bool) -> None:
        """Queue bytes, and the end if `fin`."""
        if data:
            if not stream.queued:
                if stream.offset < stream.send_limit:
                    stream.level[stream] = None
                else:
                    self._streams.due[stream.data_blocked] = None
            stream.chunks.append(data)
            stream.queued += len(data)
            self.queued += len(data)
        if fin:
            stream.sending = _ENDING
            if not stream.queued:
                self._streams.due[stream.end] = None

    def reset(self, stream: StreamParts, code: int) -> None:
        """Drop the queue and send RESET_STREAM. Source: QX-24, QX-33."""
        stream.level.pop(stream, None)
        stream.chunks.clear()
        self._shrink(stream.queued)
        stream.queued = 0
        stream.sending = SendingState.RESETTING
        stream.reset_code = code
        self._streams.due[stream.reset_stream] = None

    def stopped(self, stream: StreamParts, code: int) -> None:
        """Process STOP_SENDING. Source: QX-25."""
        if stream.sending is _OPEN or stream.sending is _ENDING:
            self.reset(stream, code)
            self._streams.events.append(StreamStopped(stream.id, code))

    def max_data(self, maximum: int) -> None:
        """Process MAX_DATA. Source: QX-27."""
        self._limit = max(self._limit, maximum)

    def max_stream_data(self, stream: StreamParts, maximum: int) -> None:
        """Process MAX_STREAM_DATA. Source: QX-27."""
        if maximum > stream.send_limit:
            if stream.queued and stream.offset == stream.send_limit:
                stream.level[stream] = None
            stream.send_limit = maximum

    def want_flushed(self, stream: StreamParts) -> None:
        """Ask for `StreamFlushed`."""
        if not stream.queued and stream.sending is not _ENDING:
            self._streams.events.append(StreamFlushed(stream.id))
        else:
            stream.flush_at = self._queued_end(stream)
            stream.watch = min(stream.flush_at, stream.ack_at)

    def want_acked(self, stream: StreamParts) -> None:
        """Ask for `StreamAcked`, for a stream that is not reset."""
        stream.ack_at = self._queued_end(stream)
        self._streams.progress(stream, stream.offset)

    def _queued_end(self, stream: StreamParts) -> int:
        return stream.offset + stream.queued + (stream.sending is _ENDING)

    def _shrink(self, size: int) -> None:
        """Record that bytes have left the queues."""
        most = self._streams.config.max_queued
        if self.queued > most >= self.queued - size:
            self._streams.events.append(QueueRoom())
        self.queued -= size

    def end(self) -> None:
        """Drop everything."""
        self.queued = 0
        self._levels.clear()
        self._order.clear()

    def write(self, records: Records, budget: int) -> None:
        """Write STREAM frames of about `budget` bytes, by priority, streams of equal priority in turn. Source: QX-6, QX-33."""
        body, fill, largest = records.body, records.fill, records.largest
        before = self._sent
        config = self._streams.config
        low = config.low_watermark if self.queued <= config.max_queued else 0
        while records.written + fill < budget:
            for _, level in self._order:
                if level:
                    break
            else:
                break
            size = self._limit - self._sent
            if not size:
                if self._blocked_at != self._limit:
                    self._blocked_at = self._limit
                    self._streams.due[self.data_blocked] = None
                break
            stream = next(iter(level))
            offset, queued = stream.offset, stream.queued
            if size > queued:
                size = queued
            if size > stream.send_limit - offset:
                size = stream.send_limit - offset
            if size > largest - fill - _MOST_HEAD:
                # 3 bytes: the type, and two for the size.
                space = largest - fill - len(encode_int(stream.id)) - len(encode_int(offset)) - 3
                if size > space:
                    if fill:
                        records.fill = fill
                        records.close()
                        space += fill
                        fill = 0
                    if size > space:
                        # Full records of 16,382 bytes with their Sizes make 64 KiB, which is one read of the peer.
                        size = space if space < 0x4000 else space - 2
            left = queued - size
            fin = not left and stream.sending is _ENDING
            header = encode_head(stream.id, offset, size, fin)
            fill += len(header) + size
            body.append(header)
            chunks = stream.chunks
            if not stream.taken and len(chunks[0]) == size:
                body.append(chunks.popleft())
            else:
                _take(stream, size, body)
            stream.offset = offset = offset + size
            stream.queued = left
            self._sent += size
            if queued > low >= left:
                self._streams.events.append(StreamRoom(stream.id))
            if not left:
                del level[stream]
                if fin:
                    stream.sending = _OVER
                    offset += 1
                    if stream.receiving is _RECEIVED:
                        self._streams.settle(stream)
            elif offset == stream.send_limit:
                del level[stream]
                self._streams.due[stream.data_blocked] = None
            else:
                level.move_to_end(stream)
            if offset >= stream.watch:
                self._streams.progress(stream, offset)
        records.fill = fill
        if self._sent != before:
            self._shrink(self._sent - before)

    def data_blocked(self) -> bytes:
        """Make DATA_BLOCKED. Source: QX-30 (D-16)."""
        return encode_frame(FrameType.DATA_BLOCKED, self._limit) if self._sent == self._limit else b""


def _take(stream: StreamParts, size: int, body: list[bytes | memoryview]) -> None:
    """Move the next `size` bytes of the queue to `body`, without a copy."""
    chunks, taken = stream.chunks, stream.taken
    while size:
        chunk = chunks[0]
        left = len(chunk) - taken
        if left > size:
            body.append(memoryview(chunk)[taken : taken + size])
            taken += size
            break
        body.append(memoryview(chunk)[taken:] if taken else chunk)
        chunks.popleft()
        size -= left
        taken = 0
    stream.taken = taken
