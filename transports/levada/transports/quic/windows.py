"""How much the peer may send: the windows of streams and of the connection, and the number of streams that it may open.

- **receive windows** follow the application's reads, where aioquic doubles them whenever half is used, read or not.
- **stream credit** is given back once the application has accepted the stream, not before.
"""

from __future__ import annotations

import math

from aioquic.quic.connection import Limit
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.stream import QuicStream

__all__ = ["Windows"]

_ACKED = QuicDeliveryState.ACKED
_STREAM_LIMIT_FRAME = 17  # most bytes of MAX_STREAM_DATA: type and two variable-length integers
_LIMIT_FRAME = 9


class Windows:
    """What a connection allows its peer, and the frames that say so.

    Args:
        streams: the connection's streams, by id.
        data: the limit of the bytes on all streams together.
        bidirectional: the limit of the streams of this kind.
        unidirectional: the limit of the other streams.
        stream_window: bytes that the peer may send on a stream ahead of the application's reads.
    """

    def __init__(
        self,
        streams: dict[int, QuicStream],
        *,
        data: Limit,
        bidirectional: Limit,
        unidirectional: Limit,
        stream_window: int,
    ):
        self.owing: dict[QuicStream, None] = {}
        """Streams whose MAX_STREAM_DATA must be sent."""
        self._streams = streams
        self._data = data
        self._kinds = (bidirectional, unidirectional)
        self._peer_wants: set[Limit] = set()  # limits that block the peer, as it has reported
        self._consumed = 0
        self._consumed_by: dict[int, int] = {}
        self._window = stream_window
        self._connection_window = data.value
        self._largest_window = max(stream_window, data.value // 2)
        # By stream: the window last granted, and when.
        self._grants: dict[int, tuple[int, float]] = {}

    def consumed(self, stream_id: int, size: int, now: float, round_trip: float) -> bool:
        """Raise the windows by the bytes that the application took; true if the peer should be told."""
        due = self._credit(size)
        stream = self._streams.get(stream_id)
        if stream is not None:
            taken = self._consumed_by[stream_id] = self._consumed_by.get(stream_id, 0) + size
            window, granted_at = self._grants.get(stream_id, (self._window, -math.inf))
            if not stream.receiver.is_finished and stream.max_stream_data_local - taken < window * 3 // 4:
                # A quarter of the window was used within a round trip, so one late packet, which holds back all later ones, would exhaust it. On a
                # path that reorders, such waits were a third of the time that 4 MiB took.
                if now - granted_at < round_trip:
                    window = self._largest_window
                self._grants[stream_id] = (window, now)
                stream.max_stream_data_local = taken + window
                self.owing[stream] = None
                return True
        return due

    def reset(self, stream: QuicStream, stream_id: int) -> None:
        """Credit the bytes of a stream that the peer has sent and reset, since the application will never take them."""
        received = stream.receiver.highest_offset
        taken = self._consumed_by.get(stream_id, 0)
        self._consumed_by[stream_id] = received
        self._credit(received - taken)
        self.owing.pop(stream, None)

    def forget(self, stream: QuicStream, stream_id: int) -> None:
        """Remove all traces of a stream."""
        self._consumed_by.pop(stream_id, None)
        self._grants.pop(stream_id, None)
        self.owing.pop(stream, None)

    def _credit(self, size: int) -> bool:
        self._consumed += size
        limit = self._data
        if limit.value - self._consumed >= self._connection_window // 2:
            return False
        limit.value = self._consumed + self._connection_window
        return True

    def grant_stream(self, *, unidirectional: bool) -> bool:
        """Allow the peer one more stream; true if it should be told now."""
        limit = self._kinds[unidirectional]
        limit.value += 1
        return self._is_due(limit)

    def streams_wanted(self, *, unidirectional: bool) -> None:
        """Record that the peer waits for stream credit."""
        self._peer_wants.add(self._kinds[unidirectional])

    def _is_due(self, limit: Limit) -> bool:
        """Whether new stream credit is worth a packet of its own: the peer waits for it, or has less left than it would get."""
        return limit.value != limit.sent and (
            limit.sent - limit.used < limit.value - limit.sent or limit in self._peer_wants
        )

    @property
    def due(self) -> bool:
        """Whether the peer should be told of a limit now."""
        data, (bidirectional, unidirectional) = self._data, self._kinds
        return bool(
            self.owing
            or data.value != data.sent
            or (bidirectional.value != bidirectional.sent and self._is_due(bidirectional))
            or (unidirectional.value != unidirectional.sent and self._is_due(unidirectional))
        )

    def write_connection_limits(self, builder: QuicPacketBuilder) -> None:
        """Write MAX_DATA and MAX_STREAMS if they are due."""
        if self._data.value != self._data.sent:
            self._write_limit(builder, self._data)
        for limit in self._kinds:
            if self._is_due(limit):
                self._write_limit(builder, limit)
                self._peer_wants.discard(limit)

    def _write_limit(self, builder: QuicPacketBuilder, limit: Limit) -> None:
        buf = builder.start_frame(limit.frame_type, _LIMIT_FRAME, self._limit_delivered, (limit,))
        buf.push_uint_var(limit.value)
        limit.sent = limit.value

    def _limit_delivered(self, delivery: QuicDeliveryState, limit: Limit) -> None:
        if delivery is not _ACKED:
            limit.sent = 0

    def write_stream_limit(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        """Write the MAX_STREAM_DATA that a stream owes."""
        buf = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA, _STREAM_LIMIT_FRAME, self._stream_limit_delivered, (stream,)
        )
        buf.push_uint_var(stream.stream_id or 0)
        buf.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local
        del self.owing[stream]

    def _stream_limit_delivered(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not _ACKED and not stream.receiver.is_finished and stream.stream_id in self._streams:
            self.owing[stream] = None
