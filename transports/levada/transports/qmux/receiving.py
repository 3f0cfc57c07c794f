"""The receiving side: records and their frames, and the windows of this side.

`ReceivingParts.record` is on the path of every message: it reads STREAM frames in place, and passes each other frame on as a `Frame`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from levada.framework.errors import LocalProtocolError

from .codes import ConnectionFault, TransportError
from .events import StreamData, StreamReset
from .frames import LARGEST, MAX_STREAMS, Frame, FrameType, encode_frame, read_frame, read_int
from .sending import SendingParts
from .state import ReceivingState, SendingState
from .streams import QmuxStreams, StreamParts

__all__ = ["ReceivingParts"]

_PADDING = re.compile(rb"\0+")  # 0.1 ms for a mebibyte of padding, where a loop takes 40
_ENCODING = TransportError.FRAME_ENCODING_ERROR
_OPEN, _SIZE_KNOWN, _STOPPED, _OVER = (
    ReceivingState.OPEN,
    ReceivingState.SIZE_KNOWN,
    ReceivingState.STOPPED,
    ReceivingState.OVER,
)
_SENT = SendingState.OVER


class ReceivingParts:
    """The receiving parts of all streams.

    Args:
        streams: the streams.
        sender: gets the limits that the peer declares.
        other: gets the frames that have no stream id and no limit.
    """

    def __init__(self, streams: QmuxStreams, sender: SendingParts, other: Callable[[Frame], None]) -> None:
        self.last_type = 0
        """Type of the frame that was read last."""
        self._streams = streams
        self._sender = sender
        self._other = other
        self._window = streams.config.connection_window
        self._half = self._window // 2
        self._half_of_stream = streams.config.stream_window // 2
        self._limit = self._window
        self._received = 0
        self._consumed = 0
        self._handlers: dict[int, Callable[[Frame], None]] = {
            FrameType.RESET_STREAM: self._reset_stream,
            FrameType.STOP_SENDING: self._stop_sending,
            FrameType.MAX_DATA: self._max_data,
            FrameType.MAX_STREAM_DATA: self._max_stream_data,
            FrameType.MAX_STREAMS_BIDI: self._max_streams,
            FrameType.MAX_STREAMS_UNI: self._max_streams,
            FrameType.DATA_BLOCKED: self._ignore,
            FrameType.STREAM_DATA_BLOCKED: self._stream_data_blocked,
            FrameType.STREAMS_BLOCKED_BIDI: self._streams_blocked,
            FrameType.STREAMS_BLOCKED_UNI: self._streams_blocked,
        }

    @property
    def credit(self) -> int:
        """Bytes that the peer may still send under the connection's limit. Source: QX-27."""
        return self._limit - self._received

    def record(self, data: bytes, at: int, stop: int) -> None:
        """Process a record.

        Args:
            data: bytes that contain the record.
            at: where the record begins, after its Size.
            stop: where it ends.

        Raises:
            Fault: the peer broke a rule; `last_type` is the type of the frame at fault, 0 if unknown.
            PeerClosed: the peer closed the connection.
        """
        table, events = self._streams.table, self._streams.events
        kind = 0
        try:
            while at < stop:
                kind = data[at]
                if kind & 0xF8 != 0x08:
                    if not kind:
                        at = _PADDING.match(data, at, stop).end()  # type: ignore[union-attr]  # it matches one byte at least
                        continue
                    if kind >= 0x40:
                        kind = 0
                    frame, at = read_frame(data, at, stop)
                    kind = frame.kind
                    self._handlers.get(kind, self._other)(frame)
                    continue
                # Integers of one and two bytes, and stream ids of four, are read in place: 0.3 us for three, where calls of read_int take 1.5.
                at += 1
                stream_id = data[at]
                if stream_id < 0x40:
                    at += 1
                elif stream_id < 0x80:
                    stream_id = (stream_id & 0x3F) << 8 | data[at + 1]
                    at += 2
                elif stream_id < 0xC0:
                    # Fewer than 4 bytes if the record is cut.
                    stream_id = int.from_bytes(data[at : at + 4], "big") & 0x3FFF_FFFF
                    at += 4
                else:
                    stream_id, at = read_int(data, at, stop)
                offset = 0
                if kind & 4:
                    offset = data[at]
                    if offset < 0x40:
                        at += 1
                    elif offset < 0x80:
                        offset = (offset & 0x3F) << 8 | data[at + 1]
                        at += 2
                    else:
                        offset, at = read_int(data, at, stop)
                end = stop
                if kind & 2:
                    size = data[at]
                    if size < 0x40:
                        at += 1
                    elif size < 0x80:
                        size = (size & 0x3F) << 8 | data[at + 1]
                        at += 2
                    else:
                        size, at = read_int(data, at, stop)
                    end = at + size
                size = end - at
                if end > stop or size < 0:
                    raise ConnectionFault(_ENCODING, "QX-4", "a frame is cut by the end of its record")
                stream = table.get(stream_id) or self._streams.find(stream_id, sent_by_peer=True)
                if stream is None:
                    # QX-27: bytes for a stream that is over count against the limit, and are given back.
                    self._count(size)
                    self._give_back(size)
                elif stream.receiving is _OPEN and offset == stream.received:
                    self._received += size
                    stream.received = offset = offset + size
                    if self._received > self._limit or offset > stream.receive_limit:
                        self._check_limits(stream, offset)
                    if kind & 1:
                        events.append(StreamData(stream_id, data[at:end], True))
                        stream.final_size = offset
                        stream.receiving = _SIZE_KNOWN
                        if stream.consumed == offset:
                            stream.receiving = _OVER
                            self._streams.settle(stream)
                    elif size:
                        events.append(StreamData(stream_id, data[at:end], False))
                else:
                    self._irregular(stream, offset, size, kind & 1 != 0)
                at = end
        except IndexError:
            self.last_type = kind
            raise ConnectionFault(_ENCODING, "QX-4", "a frame is cut by the end of its record") from None
        except ConnectionFault:
            self.last_type = kind
            raise

    def _irregular(self, stream: StreamParts, offset: int, size: int, fin: bool) -> None:
        """Process a STREAM frame that is wrong, or of a stream that is stopped or whose final size is known. Source: QX-13."""
        self._streams.find(stream.id, sent_by_peer=True)
        end = offset + size
        if stream.final_size >= 0 and (end > stream.final_size or (fin and end != stream.final_size)):
            raise ConnectionFault(
                TransportError.FINAL_SIZE_ERROR, "QX-24", f"stream {stream.id} ends at {stream.final_size}, got {end}"
            )
        if offset != stream.received:
            raise ConnectionFault(
                TransportError.PROTOCOL_VIOLATION, "QX-11", f"stream {stream.id} is at {stream.received}, got {offset}"
            )
        stream.received = end
        if stream.receiving is _STOPPED:
            self._check_limits(stream, end)
            self._count(size)
            self._give_back(size)
            stream.consumed = end
            if fin:
                stream.final_size = end
                stream.receiving = _OVER
                self._streams.settle(stream)

    def _check_limits(self, stream: StreamParts, end: int) -> None:
        """Check the limits of a stream and of the connection. Source: QX-27."""
        if end > stream.receive_limit:
            raise ConnectionFault(
                TransportError.FLOW_CONTROL_ERROR,
                "QX-27",
                f"{end} bytes on stream {stream.id}, limit {stream.receive_limit}",
            )
        self._count(0)

    def _count(self, size: int) -> None:
        """Count bytes against the limit of the connection. Source: QX-27."""
        self._received += size
        if self._received > self._limit:
            raise ConnectionFault(
                TransportError.FLOW_CONTROL_ERROR, "QX-27", f"{self._received} bytes, limit {self._limit}"
            )

    def _give_back(self, size: int) -> None:
        """Grow the window of the connection: bytes were taken or dropped. Source: QX-27, QX-29 (D-15)."""
        self._consumed += size
        if self._limit - self._consumed <= self._half:
            self._streams.due[self.max_data] = None

    def max_data(self) -> bytes:
        """Make MAX_DATA."""
        self._limit = min(self._consumed + self._window, LARGEST)
        return encode_frame(FrameType.MAX_DATA, self._limit)

    def consumed(self, stream: StreamParts, size: int) -> None:
        """Record that the application took bytes.

        Raises:
            LocalProtocolError: more than have come.
        """
        if stream.receiving is not _OPEN and stream.receiving is not _SIZE_KNOWN:
            return
        consumed = stream.consumed + size
        if consumed > stream.received:
            raise LocalProtocolError(f"{consumed} bytes taken of stream {stream.id}, {stream.received} have come")
        stream.consumed = consumed
        self._consumed += size
        if self._limit - self._consumed <= self._half:
            self._streams.due[self.max_data] = None
        if stream.receiving is _OPEN:
            if stream.receive_limit - consumed <= self._half_of_stream:
                self._streams.due[stream.max_stream_data] = None
        elif consumed == stream.final_size:
            stream.receiving = _OVER
            if stream.sending is _SENT:
                self._streams.settle(stream)

    def stop(self, stream: StreamParts, code: int) -> None:
        """Stop receiving on a stream. Source: QX-25."""
        if stream.receiving is _OPEN:
            stream.receiving = _STOPPED
            stream.stop_code = code
            self._streams.due[stream.stop_sending] = None
            self._drop(stream)
        elif stream.receiving is _SIZE_KNOWN:
            stream.receiving = _OVER
            self._drop(stream)
            self._streams.settle(stream)

    def _drop(self, stream: StreamParts) -> None:
        """Give back the credit for bytes that have come and were not taken."""
        self._give_back(stream.received - stream.consumed)
        stream.consumed = stream.received

    def _reset_stream(self, frame: Frame) -> None:
        """Process RESET_STREAM. Source: QX-24 (D-12)."""
        stream_id, code, final_size = frame.fields
        stream = self._streams.find(stream_id, sent_by_peer=True)
        if stream is None:
            return
        known = stream.final_size if stream.final_size >= 0 else max(final_size, stream.received)
        if final_size != known:
            raise ConnectionFault(
                TransportError.FINAL_SIZE_ERROR, "QX-24", f"stream {stream_id} ends at {known}, got {final_size}"
            )
        if stream.receiving is _OVER:
            return
        self._received += final_size - stream.received
        self._check_limits(stream, final_size)
        stream.final_size = final_size
        stream.receiving = _OVER
        self._give_back(final_size - stream.consumed)
        self._streams.events.append(StreamReset(stream_id, code))
        self._streams.settle(stream)

    def _stop_sending(self, frame: Frame) -> None:
        stream_id, code = frame.fields
        stream = self._streams.find(stream_id, sent_by_peer=False)
        if stream is not None:
            self._sender.stopped(stream, code)

    def _max_data(self, frame: Frame) -> None:
        self._sender.max_data(frame.fields[0])

    def _max_stream_data(self, frame: Frame) -> None:
        stream_id, maximum = frame.fields
        stream = self._streams.find(stream_id, sent_by_peer=False)
        if stream is not None:
            self._sender.max_stream_data(stream, maximum)

    def _stream_data_blocked(self, frame: Frame) -> None:
        """Open the stream; the frame is a hint. Source: QX-21, QX-30."""
        self._streams.find(frame.fields[0], sent_by_peer=True)

    def _max_streams(self, frame: Frame) -> None:
        self._check_streams(frame)
        self._streams.allow(frame.kind - FrameType.MAX_STREAMS_BIDI, frame.fields[0])

    def _streams_blocked(self, frame: Frame) -> None:
        self._check_streams(frame)
        self._streams.blocked(frame.kind - FrameType.STREAMS_BLOCKED_BIDI)

    def _check_streams(self, frame: Frame) -> None:
        """Check a limit of streams. Source: QX-12."""
        if frame.fields[0] > MAX_STREAMS:
            raise ConnectionFault(_ENCODING, "QX-12", f"{frame.fields[0]} streams, at most 2^60 are possible")

    def _ignore(self, frame: Frame) -> None:
        """Ignore DATA_BLOCKED. Source: QX-30."""
