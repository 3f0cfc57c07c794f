"""The streams of a connection: their ids, their life cycle, and how many of them each side may open.

Control frames are not queued as bytes. `Due` holds the methods that make them, each at most once. A method makes its frame when there is
room to write it, from the values of that moment; it makes nothing if the frame is no longer needed. So a limit that changes a thousand times
before it is written makes one frame, and the memory for a peer that does not read is bounded. Source: QX-29 (D-15), QX-43.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

from levada.transports.numbers import Numbers

from .codes import ConnectionFault, TransportError
from .config import QmuxConfig
from .events import Event, StreamFlushed, StreamOpened, StreamOver, StreamsAllowed
from .frames import LARGEST, MAX_STREAMS, FrameType, Parameters, encode_frame
from .state import ReceivingState, SendingState

__all__ = ["NEVER", "Due", "Level", "QmuxStreams", "SideStreams", "StreamParts"]

SERVER: Final = 1
"""Bit of a stream id: the server opened it. Source: QX-20."""
UNIDIRECTIONAL: Final = 2
"""Bit of a stream id: only its opener sends. Source: QX-20."""
# Looking up a member of an enum is slow.
_OPEN: Final = SendingState.OPEN
_SENT: Final = SendingState.OVER
_RECEIVING: Final = ReceivingState.OPEN
_RECEIVED: Final = ReceivingState.OVER
NEVER: Final = 1 << 63
"""A position that no stream reaches."""

Due: TypeAlias = dict[Callable[[], bytes], None]
"""The methods that make the control frames to write, in order."""


class StreamParts:
    """One stream. Positions count its bytes from the start; the end counts as one more byte.

    Each object sets all attributes: reading a default from the class takes 10 times as long.
    """

    __slots__ = (
        "ack_at", "chunks", "consumed", "final_size", "flush_at", "id", "level", "offset", "queued", "receive_limit", "received",
        "receiving", "reset_code", "send_limit", "sending", "stop_code", "streams", "taken", "watch",
    )  # fmt: skip

    def __init__(self, stream_id: int, streams: QmuxStreams, level: Level) -> None:
        self.id = stream_id
        self.streams = streams
        self.level = level
        """The queue that the stream is in while it has data and credit."""
        self.sending = _OPEN
        self.chunks: deque[bytes] = deque()
        """The queued data."""
        self.taken = 0
        """Bytes of the first chunk that are written."""
        self.queued = 0
        """Bytes of `chunks` that are not written."""
        self.offset = 0
        """Bytes written: where the next STREAM frame begins."""
        self.send_limit = 0
        """The peer's limit for `offset`."""
        self.flush_at = NEVER
        """The position for `StreamFlushed`."""
        self.ack_at = NEVER
        """The position for `StreamAcked`."""
        self.watch = NEVER
        """The smaller of `flush_at` and `ack_at`, so that writing a frame compares one number."""
        self.reset_code = 0
        """The code of RESET_STREAM, while it is due."""
        self.receiving = _RECEIVING
        self.received = 0
        """Bytes that have come: where the next STREAM frame begins."""
        self.receive_limit = streams.config.stream_window
        """The limit for `received` that the peer knows."""
        self.consumed = 0
        """Bytes that the application has taken or will never take."""
        self.final_size = -1
        """The value of `received` at the end, once it is known; -1 before."""
        self.stop_code = 0
        """The code of STOP_SENDING, while it is due."""

    def max_stream_data(self) -> bytes:
        """Make MAX_STREAM_DATA. Source: QX-29."""
        if self.receiving is not ReceivingState.OPEN:
            return b""
        self.receive_limit = min(self.consumed + self.streams.config.stream_window, LARGEST)
        return encode_frame(FrameType.MAX_STREAM_DATA, self.id, self.receive_limit)

    def data_blocked(self) -> bytes:
        """Make STREAM_DATA_BLOCKED. Source: QX-30 (D-16)."""
        if not self.queued or self.offset < self.send_limit:
            return b""
        return encode_frame(FrameType.STREAM_DATA_BLOCKED, self.id, self.send_limit)

    def end(self) -> bytes:
        """Make the STREAM frame of an end that comes without data."""
        if self.sending is not SendingState.ENDING:
            return b""
        self.sending = SendingState.OVER
        self.streams.progress(self, self.offset + 1)
        self.streams.settle(self)
        return encode_frame(FrameType.STREAM | 7, self.id, self.offset, data=b"")

    def reset_stream(self) -> bytes:
        """Make RESET_STREAM; the final size is the number of bytes written. Source: QX-24."""
        self.sending = SendingState.OVER
        self.streams.settle(self)
        return encode_frame(FrameType.RESET_STREAM, self.id, self.reset_code, self.offset)

    def stop_sending(self) -> bytes:
        """Make STOP_SENDING. Source: QX-25."""
        if self.receiving is not ReceivingState.STOPPED:
            return b""
        return encode_frame(FrameType.STOP_SENDING, self.id, self.stop_code)


Level: TypeAlias = OrderedDict[StreamParts, None]
"""Streams of one priority that can write, in turn: an ordered dict, because a stream that is reset leaves from the middle."""


class SideStreams:
    """The streams of one kind that one side opens."""

    __slots__ = ("allowed", "blocked_at", "count", "freed", "kind", "skipped", "wanted")

    def __init__(self, kind: int, allowed: int) -> None:
        self.kind = kind
        """0 for bidirectional, 1 for unidirectional."""
        self.allowed = allowed
        """Streams that may ever be opened, as last declared to the other side."""
        self.count = 0
        """Streams that were opened, including the skipped ones."""
        self.skipped = Numbers()
        """Streams opened implicitly by a higher id, which have had no frame yet. Source: QX-20 (D-11)."""
        self.freed = 0
        """Streams that are over, and whose credit is not yet in a MAX_STREAMS."""
        self.wanted = False
        """Whether the peer has said that it needs more credit."""
        self.blocked_at = -1
        """The last limit for which STREAMS_BLOCKED was made."""

    def max_streams(self) -> bytes:
        """Make MAX_STREAMS. Source: QX-28 (D-14)."""
        self.allowed = min(self.allowed + self.freed, MAX_STREAMS)
        self.freed = 0
        self.wanted = False
        return encode_frame(FrameType.MAX_STREAMS_BIDI + self.kind, self.allowed)

    def streams_blocked(self) -> bytes:
        """Make STREAMS_BLOCKED. Source: QX-30 (D-16)."""
        if self.count < self.allowed:
            return b""
        return encode_frame(FrameType.STREAMS_BLOCKED_BIDI + self.kind, self.allowed)


class QmuxStreams:
    """All streams of a connection.

    Args:
        client: whether this side dialled.
        config: windows and limits.
        events: gets the events.
        due: gets the control frames.
    """

    def __init__(self, *, client: bool, config: QmuxConfig, events: list[Event], due: Due) -> None:
        self.client = client
        self.config = config
        self.events = events
        self.due = due
        self.table: dict[int, StreamParts] = {}
        """Streams that are not over, by id. Read only."""
        self.unconfirmed: dict[int, None] = {}
        """Streams whose data is written, and that wait for `StreamAcked`."""
        self.opening = False
        """Whether this side may open streams: the peer's limits are known, and the connection is not draining."""
        self._unaccepted: set[int] = set()  # streams of the peer's; they count against its limit
        self._parameters = Parameters()
        self._ours = (SideStreams(0, 0), SideStreams(1, 0))
        self._theirs = (SideStreams(0, config.max_streams), SideStreams(1, config.max_streams_unidirectional))
        self._level: Level = OrderedDict()

    def establish(self, parameters: Parameters, level: Level) -> None:
        """Take the peer's limits.

        Args:
            parameters: the peer's parameters.
            level: the first queue of a stream that the peer opens.
        """
        self.opening = True
        self._parameters = parameters
        self._level = level
        self._ours[0].allowed = parameters.max_streams_bidi
        self._ours[1].allowed = parameters.max_streams_uni

    def credit(self, unidirectional: bool) -> int:
        """Return how many streams this side may open now."""
        side = self._ours[unidirectional]
        return side.allowed - side.count if self.opening else 0

    def open(self, unidirectional: bool, level: Level) -> StreamParts | None:
        """Open a stream of this side; `None` without credit."""
        side = self._ours[unidirectional]
        index = side.count
        if index >= side.allowed or not self.opening:
            if side.blocked_at != side.allowed and self.opening:
                side.blocked_at = side.allowed
                self.due[side.streams_blocked] = None
            return None
        side.count = index + 1
        stream_id = index << 2 | unidirectional << 1 | (not self.client)
        stream = self.table[stream_id] = StreamParts(stream_id, self, level)
        if unidirectional:
            stream.receiving = ReceivingState.OVER
            stream.send_limit = self._parameters.max_stream_data_uni
        else:
            stream.send_limit = self._parameters.max_stream_data_bidi_remote
        return stream

    def find(self, stream_id: int, *, sent_by_peer: bool) -> StreamParts | None:
        """Return the stream that a frame names, and open it if it is a new stream of the peer.

        Args:
            stream_id: the number in the frame.
            sent_by_peer: whether the frame belongs to the direction in which the peer sends.

        Returns:
            The stream, or `None` if it is over and forgotten.

        Raises:
            Fault: the stream cannot have this frame (E-5), or exceeds the limit of streams (E-4).

        Source: QX-20, QX-21.
        """
        opened_by_peer = (stream_id & SERVER != 0) is self.client
        unidirectional = stream_id & UNIDIRECTIONAL != 0
        if unidirectional and opened_by_peer is not sent_by_peer:
            raise ConnectionFault(
                TransportError.STREAM_STATE_ERROR, "QX-21", f"stream {stream_id} has no such direction"
            )
        stream = self.table.get(stream_id)
        if stream is not None:
            return stream
        index = stream_id >> 2
        side = (self._theirs if opened_by_peer else self._ours)[unidirectional]
        if not opened_by_peer:
            if index >= side.count:
                raise ConnectionFault(
                    TransportError.STREAM_STATE_ERROR, "QX-21", f"stream {stream_id} was never opened"
                )
            return None
        if index == side.count < side.allowed:
            side.count = index + 1
        elif index < side.count:
            if index not in side.skipped:
                return None
            side.skipped.discard(index)
        elif index >= side.allowed:
            raise ConnectionFault(
                TransportError.STREAM_LIMIT_ERROR, "QX-28", f"stream {stream_id}, {side.allowed} are allowed"
            )
        else:
            side.skipped.append(side.count, index)
            side.count = index + 1
        stream = self.table[stream_id] = StreamParts(stream_id, self, self._level)
        if unidirectional:
            stream.sending = SendingState.OVER
        else:
            stream.send_limit = self._parameters.max_stream_data_bidi_local
        self._unaccepted.add(stream_id)
        self.events.append(StreamOpened(stream_id))
        return stream

    def allow(self, kind: int, maximum: int) -> None:
        """Process MAX_STREAMS."""
        side = self._ours[kind]
        if maximum > side.allowed:
            side.allowed = maximum
            self.events.append(StreamsAllowed(kind == 1))

    def settle(self, stream: StreamParts) -> None:
        """Forget a stream if both its parts are over. If the peer opened it and the application accepted it, give the peer credit for another.

        Source: QX-23, QX-28 (D-14).
        """
        if stream.sending is not _SENT or stream.receiving is not _RECEIVED:
            return
        stream_id = stream.id
        del self.table[stream_id]
        self.events.append(StreamOver(stream_id))
        if (stream_id & SERVER != 0) is self.client and stream_id not in self._unaccepted:
            self._free(stream_id)

    def accepted(self, stream_id: int) -> None:
        """Record that the application has a stream of the peer's."""
        if stream_id in self._unaccepted:
            self._unaccepted.discard(stream_id)
            if stream_id not in self.table:
                self._free(stream_id)

    def _free(self, stream_id: int) -> None:
        """Give the peer credit for another stream. Source: QX-28 (D-14)."""
        side = self._theirs[stream_id >> 1 & 1]
        side.freed += 1
        # The peer is told when it has no more streams left than are freed: rarely if it uses few of many, each time if it has none left.
        if side.freed >= side.allowed - side.count or side.wanted:
            self.due[side.max_streams] = None

    def blocked(self, kind: int) -> None:
        """Process STREAMS_BLOCKED: tell the peer of freed streams at once, and of the next one as soon as it is freed. Source: QX-30."""
        side = self._theirs[kind]
        side.wanted = True
        if side.freed:
            self.due[side.max_streams] = None

    def progress(self, stream: StreamParts, position: int) -> None:
        """Record that a stream was written up to a position: emit `StreamFlushed` if the owner waits for it, and see to `StreamAcked`."""
        if stream.flush_at <= position:
            stream.flush_at = NEVER
            self.events.append(StreamFlushed(stream.id))
        if stream.ack_at <= position:
            stream.ack_at = NEVER
            self.unconfirmed[stream.id] = None
        stream.watch = min(stream.flush_at, stream.ack_at)

    def end(self) -> None:
        """Forget all streams."""
        self.table.clear()
        self.unconfirmed.clear()
        self._unaccepted.clear()
        self.opening = False
