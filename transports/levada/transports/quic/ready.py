"""Which streams have data or limits to send, and how much the peer may send.

- **ready set**: only streams with something to send are visited, where aioquic walks all streams twice for each packet. Priorities are
  strict; streams of one priority take turns.
- **receive windows** follow the application's reads, where aioquic doubles them whenever half is used, read or not.
- **stream credit** is given back once the application has accepted the stream, not before.

Invariants of the ready set: a stream with a frame to send is in `_levels`; or in `_stalled`, if the peer's window stops it; or it waits for
stream credit (`is_blocked`). Every event that makes a stream sendable again (write, reset, stop, a lost frame, a raised window) passes
through `_ready`. The delivery or frame that finishes the second half of a stream puts the stream into `_done`, so no code searches for
finished streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import Limit, QuicReceiveContext
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from .engine import EngineSettings
from .lean import LeanEngine

__all__ = ["ReadyEngine"]

_ACKED = QuicDeliveryState.ACKED
_ZERO_RTT = tls.Epoch.ZERO_RTT
_STREAM_LIMIT_FRAME = 17  # most bytes of MAX_STREAM_DATA: type and two variable-length integers
_LIMIT_FRAME = 9


class ReadyEngine(LeanEngine):
    """The overrides for streams and windows; `TunedEngine` adds the ones for sending."""

    def __init__(self, *, configuration: QuicConfiguration, settings: EngineSettings, **rest: Any):
        super().__init__(configuration=configuration, settings=settings, **rest)
        self._levels: dict[int, dict[QuicStream, None]] = {}
        self._priorities: dict[int, int] = {}
        self._stalled: dict[QuicStream, None] = {}
        self._owing: dict[QuicStream, None] = {}  # streams whose MAX_STREAM_DATA must be sent
        self._settled: list[int] = []
        self._forgotten: list[int] = []
        self._peer_wants: set[Limit] = set()  # limits that block the peer, as it has reported
        # Kinds of streams that the peer's limits block: true for unidirectional.
        self._wanted: set[bool] = set()
        self._unacked = 0
        self._app_consumed = 0
        self._now = 0.0  # the time of the last call that had one
        self._consumed_by: dict[int, int] = {}
        self._window = configuration.max_stream_data
        self._connection_window = configuration.max_data
        self._largest_window = max(self._window, self._connection_window // 2)
        # By stream: the window last granted, and when.
        self._grants: dict[int, tuple[int, float]] = {}
        for limit, value in (
            (self._local_max_streams_bidi, settings.max_streams),
            (self._local_max_streams_uni, settings.max_streams_unidirectional),
        ):
            limit.value = limit.sent = value

    def release(self) -> None:
        """Release everything that is not needed after the end."""
        super().release()
        self._levels.clear()
        self._stalled.clear()
        self._owing.clear()
        self._done.clear()

    def _ready(self, stream: QuicStream) -> None:
        priority = self._priorities.get(stream.stream_id or 0, 128)
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = {}
            if len(self._levels) > 1:
                self._levels = dict(
                    sorted((key, value) for key, value in self._levels.items() if value or key == priority)
                )
        level[stream] = None

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Serve a stream before those with higher priority numbers."""
        old = self._priorities.get(stream_id, 128)
        if priority == old:
            return
        self._priorities[stream_id] = priority
        stream = self._streams.get(stream_id)
        if stream is not None and stream in self._levels.get(old, ()):
            del self._levels[old][stream]
            self._ready(stream)

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = super()._get_or_create_stream(frame_type, stream_id)
        self._streams_queue.clear()  # aioquic appends each new stream; only the slow path needs the queue, and fills it itself
        return stream

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        stream = super()._get_or_create_stream_for_send(stream_id)
        self._streams_queue.clear()
        return stream

    def send_stream_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Write to a stream."""
        stream = self._streams.get(stream_id) or self._get_or_create_stream_for_send(stream_id)
        stream.sender.write(data, end_stream=end_stream)
        self._unacked += len(data)
        if not stream.is_blocked:
            self._ready(stream)

    def discard_stream(self, stream_id: int, code: int) -> None:
        """Reset the sending half, and release its buffer."""
        self.reset_stream(stream_id, code)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop_buffer(stream)

    def _drop_buffer(self, stream: QuicStream) -> None:
        """Release the data that a reset stream still holds (aioquic keeps it) and queue the RESET_STREAM frame."""
        sender = stream.sender
        self._unacked -= len(sender._buffer)
        sender._buffer.clear()
        self._stalled.pop(stream, None)
        if not stream.is_blocked:
            self._ready(stream)

    def stop_stream(self, stream_id: int, error_code: int) -> None:
        """Ask the peer to stop sending."""
        super().stop_stream(stream_id, error_code)
        self._ready(self._streams[stream_id])

    def total_unacked(self) -> int:
        """Return the unacknowledged bytes of all streams together, from a running count."""
        return self._unacked

    def take_settled(self, known: Iterable[int]) -> list[int]:
        """Return the streams whose sending half has ended since the last call."""
        if not self._settled:
            return self._settled
        settled, self._settled = self._settled, []
        return settled

    def take_forgotten(self, known: Iterable[int]) -> list[int]:
        """Return the streams that were dropped since the last call."""
        if self._done:
            self._discard_done()
        if not self._forgotten:
            return self._forgotten
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _unblock_streams(self, is_unidirectional: bool) -> None:
        blocked = list(self._streams_blocked_uni if is_unidirectional else self._streams_blocked_bidi)
        super()._unblock_streams(is_unidirectional)
        for stream in blocked:
            if not stream.is_blocked:
                self._ready(stream)

    def _discard_done(self) -> None:
        for stream in self._done:
            stream_id = stream.stream_id
            if stream_id is not None and self._streams.pop(stream_id, None) is not None:
                self._forgotten.append(stream_id)
                for level in self._levels.values():
                    level.pop(stream, None)
                self._priorities.pop(stream_id, None)
                self._consumed_by.pop(stream_id, None)
                self._grants.pop(stream_id, None)
                self._owing.pop(stream, None)
                self._stalled.pop(stream, None)
        self._done.clear()

    def _handle_max_data_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        super()._handle_max_data_frame(context, frame_type, buf)
        stalled, self._stalled = self._stalled, {}
        for stream in stalled:
            self._ready(stream)

    def _handle_max_stream_data_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        super()._handle_max_stream_data_frame(context, frame_type, buf)
        end = buf.tell()
        buf.seek(start)
        stream = self._streams.get(buf.pull_uint_var())
        buf.seek(end)
        if stream is not None and stream in self._stalled:
            del self._stalled[stream]
            self._ready(stream)

    def _handle_stop_sending_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        super()._handle_stop_sending_frame(context, frame_type, buf)
        event = self._events[-1]
        stream = self._streams.get(event.stream_id) if isinstance(event, events.StopSendingReceived) else None
        if stream is not None and stream.sender.reset_pending:
            self._drop_buffer(stream)

    def _handle_reset_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        before = len(self._events)
        super()._handle_reset_stream_frame(context, frame_type, buf)
        if len(self._events) > before:
            event = self._events[-1]
            assert isinstance(event, events.StreamReset)
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                # Bytes that were sent and never will be taken are credited now. The stream drops the bytes it still holds.
                taken = self._consumed_by.get(event.stream_id, 0)
                self._consumed_by[event.stream_id] = stream.receiver.highest_offset
                self._credit(stream.receiver.highest_offset - taken)
                stream.receiver._buffer.clear()
                self._bound_gaps(stream, frame_type)
                self._owing.pop(stream, None)
                if stream.is_finished:
                    self._done.append(stream)

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        before = len(self._events)
        super()._handle_stream_frame(context, frame_type, buf)
        if len(self._events) > before:
            event = self._events[-1]
            if type(event) is events.StreamDataReceived:
                if context.epoch is _ZERO_RTT:
                    self.early_streams.add(event.stream_id)
                if event.end_stream:
                    stream = self._streams[event.stream_id]
                    if stream.sender.is_finished:
                        self._done.append(stream)

    def _credit(self, size: int) -> bool:
        self._app_consumed += size
        limit = self._local_max_data
        if limit.value - self._app_consumed >= self._connection_window // 2:
            return False
        limit.value = self._app_consumed + self._connection_window
        return True

    def consumed(self, stream_id: int, size: int) -> bool:
        """Raise the windows by the bytes that the application took; true if the peer should be told."""
        due = self._credit(size)
        stream = self._streams.get(stream_id)
        if stream is not None:
            taken = self._consumed_by[stream_id] = self._consumed_by.get(stream_id, 0) + size
            window, granted_at = self._grants.get(stream_id, (self._window, -math.inf))
            if not stream.receiver.is_finished and stream.max_stream_data_local - taken < window * 3 // 4:
                # A quarter of the window was used within a round trip, so one late packet, which holds back all later ones, would exhaust it. On a
                # path that reorders, such waits were a third of the time that 4 MiB took.
                if self._now - granted_at < self._loss._rtt_smoothed:
                    window = self._largest_window
                self._grants[stream_id] = (window, self._now)
                stream.max_stream_data_local = taken + window
                self._owing[stream] = None
                return True
        return due

    def grant_stream(self, *, unidirectional: bool) -> bool:
        """Let the peer open one more stream; true if it should be told now."""
        limit = self._local_max_streams_uni if unidirectional else self._local_max_streams_bidi
        limit.value += 1
        return self._streams_due(limit)

    def _streams_due(self, limit: Limit) -> bool:
        """Whether new stream credit is worth a packet of its own: the peer waits for it, or has less left than it would get."""
        return limit.value != limit.sent and (
            limit.sent - limit.used < limit.value - limit.sent or limit in self._peer_wants
        )

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        limit = self._local_max_data
        if limit.value != limit.sent:
            self._write_limit(builder, limit)
        for limit in (self._local_max_streams_bidi, self._local_max_streams_uni):
            if self._streams_due(limit):
                self._write_limit(builder, limit)
                self._peer_wants.discard(limit)

    def _handle_streams_blocked_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        super()._handle_streams_blocked_frame(context, frame_type, buf)
        unidirectional = frame_type == QuicFrameType.STREAMS_BLOCKED_UNI
        self._peer_wants.add(self._local_max_streams_uni if unidirectional else self._local_max_streams_bidi)

    def want_stream(self, *, unidirectional: bool) -> None:
        """Tell the peer that its limit blocks new streams (frame STREAMS_BLOCKED)."""
        self._wanted.add(unidirectional)

    def _write_wanted(self, builder: QuicPacketBuilder) -> None:
        while self._wanted:
            unidirectional = next(iter(self._wanted))
            if not self.stream_credit(unidirectional=unidirectional):
                limit = self._remote_max_streams_uni if unidirectional else self._remote_max_streams_bidi
                kind = QuicFrameType.STREAMS_BLOCKED_UNI if unidirectional else QuicFrameType.STREAMS_BLOCKED_BIDI
                builder.start_frame(kind, _LIMIT_FRAME, self._on_wanted_delivery, (unidirectional,)).push_uint_var(
                    limit
                )
            self._wanted.discard(unidirectional)

    def _on_wanted_delivery(self, delivery: QuicDeliveryState, unidirectional: bool) -> None:
        if delivery is not _ACKED:
            self._wanted.add(unidirectional)

    def _write_limit(self, builder: QuicPacketBuilder, limit: Limit) -> None:
        buf = builder.start_frame(limit.frame_type, _LIMIT_FRAME, self._on_connection_limit_delivery, (limit,))
        buf.push_uint_var(limit.value)
        limit.sent = limit.value

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        """Write a stream's limit if it is due. The slow path calls this for every stream; the fast path visits only `_owing`."""
        if stream in self._owing:
            self._write_stream_limit(builder, stream)

    def _write_stream_limit(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        buf = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA, _STREAM_LIMIT_FRAME, self._on_max_stream_data_delivery, (stream,)
        )
        buf.push_uint_var(stream.stream_id or 0)
        buf.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local
        del self._owing[stream]

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not _ACKED and not stream.receiver.is_finished and stream.stream_id in self._streams:
            self._owing[stream] = None
