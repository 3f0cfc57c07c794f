"""Which streams have something to send, and which have ended.

Only streams with something to send are visited, where aioquic walks all streams twice for each packet. Priorities are strict; streams of one
priority take turns.

A stream with a frame to send is in `ReadyStreams.levels`; or in `ReadyStreams.stalled`, if the peer's window stops it; or it waits for stream
credit (`QuicStream.is_blocked`). Every event that makes a stream sendable again (write, reset, stop, a lost frame, a raised window) passes
through `ReadyStreams.add`. The delivery or frame that finishes the second half of a stream puts the stream into `ReadyStreams.done`, so no code
searches for finished streams.
"""

from __future__ import annotations

from aioquic.quic.stream import QuicStream

from .windows import Windows

__all__ = ["ReadyStreams"]


class ReadyStreams:
    """The streams of a connection by what is to be done for them, and their unacknowledged bytes.

    Args:
        streams: the connection's streams, by id; ended ones are removed.
        windows: forgets ended streams.
    """

    def __init__(self, streams: dict[int, QuicStream], windows: Windows):
        self.levels: dict[int, dict[QuicStream, None]] = {}
        """By priority: the streams with something to send, next one first."""
        self.stalled: dict[QuicStream, None] = {}
        """Streams with data that the peer's window does not allow."""
        self.unacked = 0
        """Unacknowledged bytes of all streams together."""
        self.done: list[QuicStream] = []
        """Streams of which both halves have ended, to be removed."""
        self._settled: list[int] = []
        self._forgotten: list[int] = []
        self._streams = streams
        self._windows = windows
        self._priorities: dict[int, int] = {}

    def add(self, stream: QuicStream) -> None:
        """Record that a stream has something to send."""
        priority = self._priorities.get(stream.stream_id or 0, 128)
        level = self.levels.get(priority)
        if level is None:
            level = self.levels[priority] = {}
            if len(self.levels) > 1:
                self.levels = dict(
                    sorted((key, value) for key, value in self.levels.items() if value or key == priority)
                )
        level[stream] = None

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Serve a stream before those with higher priority numbers."""
        old = self._priorities.get(stream_id, 128)
        if priority == old:
            return
        self._priorities[stream_id] = priority
        stream = self._streams.get(stream_id)
        if stream is not None and stream in self.levels.get(old, ()):
            del self.levels[old][stream]
            self.add(stream)

    def unsent(self, stream_id: int) -> int:
        """Return the bytes of a stream that were written and not yet sent."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender.highest_offset

    def unacked_of(self, stream_id: int) -> int:
        """Return the bytes of a stream that were written and not yet acknowledged."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender._buffer_start

    def drop_buffer(self, stream: QuicStream) -> None:
        """Release the data that a reset stream still holds (aioquic keeps it), and send the RESET_STREAM frame."""
        sender = stream.sender
        self.unacked -= len(sender._buffer)
        sender._buffer.clear()
        self.stalled.pop(stream, None)
        if not stream.is_blocked:
            self.add(stream)

    def window_raised(self) -> None:
        """Try all streams again that stalled."""
        stalled, self.stalled = self.stalled, {}
        for stream in stalled:
            self.add(stream)

    def stream_window_raised(self, stream_id: int) -> None:
        """Try a stream again if it stalled."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream in self.stalled:
            del self.stalled[stream]
            self.add(stream)

    def queue(self) -> list[QuicStream]:
        """Return the streams with something to send, next one first."""
        return [stream for level in self.levels.values() for stream in level if not stream.is_finished]

    def served(self, queue: list[QuicStream]) -> None:
        """Remove the streams of a `queue` that have nothing more to send."""
        for stream in queue:
            if stream.sender.buffer_is_empty and not stream.sender.reset_pending and not stream.receiver.stop_pending:
                self._remove(stream)

    def _remove(self, stream: QuicStream) -> None:
        for level in self.levels.values():
            level.pop(stream, None)

    def sender_finished(self, stream: QuicStream) -> None:
        """Record that the peer has acknowledged everything of a stream, or its reset."""
        self._settled.append(stream.stream_id or 0)
        if stream.receiver.is_finished:
            self.done.append(stream)

    def receiver_finished(self, stream: QuicStream) -> None:
        """Record that the peer has sent everything of a stream, or reset it."""
        if stream.sender.is_finished:
            self.done.append(stream)

    def discard_done(self) -> None:
        """Remove the streams that have ended."""
        for stream in self.done:
            stream_id = stream.stream_id
            if stream_id is not None and self._streams.pop(stream_id, None) is not None:
                self._forgotten.append(stream_id)
                self._remove(stream)
                self._priorities.pop(stream_id, None)
                self._windows.forget(stream, stream_id)
                self.stalled.pop(stream, None)
        self.done.clear()

    @property
    def has_news(self) -> bool:
        """Whether a stream, or its sending half, has ended since the last calls of `take_settled` and `take_forgotten`."""
        return bool(self._settled or self.done or self._forgotten)

    def take_settled(self) -> list[int]:
        """Return the streams whose sending half has ended since the last call, acknowledged or reset."""
        if not self._settled:
            return self._settled
        settled, self._settled = self._settled, []
        return settled

    def take_forgotten(self) -> list[int]:
        """Return the streams that were removed since the last call."""
        if self.done:
            self.discard_done()
        if not self._forgotten:
            return self._forgotten
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def clear(self) -> None:
        """Release everything that is not needed after the end."""
        self.levels.clear()
        self.stalled.clear()
        self.done.clear()
