"""The QUIC streams of a connection: their output queues, their reading positions, and their ends.

A stream opened here gets its number when its first bytes are handed out, so a stream that is given up before that never existed. Writes are
queued and joined, so the messages of one turn leave as one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from levada.transports.core import OpenStream, ResetStream, StopStream, StreamData

from .frames import VERSION
from .state import StreamPosition

if TYPE_CHECKING:
    from .links import ChannelHalf

__all__ = ["NO_BYTES", "AqueductStream", "DatagramData", "StreamDone", "StreamOutput", "StreamTable"]

NO_BYTES: Any = b""
"""The buffer of a stream of which everything was read, which is nearly always so."""
_NO_CHUNKS: list[bytes] = []
"""Shared by all streams that have nothing to write; nothing is put into it. A list of its own takes 56 bytes."""
URGENT, USUAL = 64, 128
"""Priorities of control streams and of message streams."""


@attrs.frozen
class StreamDone:
    """The core has finished with a stream: no output names it again, and no input about it is needed."""

    stream_id: int
    """Number of the stream."""


@attrs.frozen
class DatagramData:
    """Send a datagram, or drop it if there is no room."""

    data: bytes
    """At most as many bytes as the limit that the core was given."""


StreamOutput: TypeAlias = OpenStream | StreamData | ResetStream | StopStream | StreamDone | DatagramData
"""What streams ask of the connection."""


class AqueductStream:
    """One stream, both directions."""

    __slots__ = (
        "all", "blocked", "buffer", "chunks", "dirty", "early", "fin", "fin_seen", "gate_open", "given_up", "half",
        "id", "kept", "need", "opened_here", "place", "received", "receives", "reset_seen", "sender", "sends",
    )  # fmt: skip

    def __init__(
        self, streams: StreamTable, stream_id: int | None, *, place: StreamPosition | None, sends: bool
    ) -> None:
        self.all = streams
        self.id = stream_id
        self.opened_here = stream_id is None

        # Reading.
        self.receives = place is not None
        """Whether the peer's direction has not ended."""
        self.place = place or StreamPosition.DISCARD
        self.buffer: bytearray = NO_BYTES
        """Unread bytes: a cut frame, or everything while the stream waits."""
        self.need = 0
        """Bytes that the buffer must hold before it is worth reading."""
        self.received = 0
        """Bytes read so far."""
        self.blocked = False
        """Whether the stream waits: for the connection to open, or for room in a mailbox."""
        self.fin_seen = False
        self.reset_seen: int | None = None
        """The peer's end, or its reset, while the stream waits."""
        self.half: ChannelHalf | None = None
        """The half whose control stream this is."""

        # Writing.
        self.sends = sends
        """Whether this side's direction has not ended."""
        self.sender: ChannelHalf | None = None
        """The sender whose messages are written here."""
        self.kept = False
        """Whether a sender may still reset it, or needs to know of a stop, though everything was written."""
        self.chunks = _NO_CHUNKS
        """Queued bytes; a list of its own only while the stream is marked."""
        self.dirty = False
        self.fin = False
        self.given_up = False
        """Whether this side's direction was reset, by this side or because the peer stopped it."""
        self.gate_open = not self.opened_here
        """Whether the peer is known to have seen the stream, so that it can tell which channel a reset is for. Source: AQ-45 (D-22)."""
        self.early: bytearray | None = None
        """Everything written, as long as it may have to be written again. Source: AQ-21."""

    def write(self, data: bytes, *, fin: bool = False) -> None:
        """Queue bytes, the last ones if `fin`. After the end this does nothing: callers need not check whether the peer stopped the stream."""
        if self.fin or self.given_up:
            return
        if not self.dirty:
            self.mark()
        self.chunks.append(data)
        self.fin = fin

    def finish(self) -> None:
        """End this side's direction after the queued bytes. A second call does nothing."""
        if not self.fin and not self.given_up:
            self.fin = True
            if not self.dirty:
                self.mark()

    def mark(self) -> None:
        """Mark this stream, which is not marked, for the next flush."""
        self.dirty = True
        if self.chunks is _NO_CHUNKS:
            self.chunks = []
        self.all.dirty.append(self)

    def reset(self, code: int) -> None:
        """Give up this side's direction, even after its end, which the peer may not have received."""
        if self.given_up or (self.id is not None and self.id not in self.all.table):
            return
        self._give_up()
        if self.id is not None:
            self.all.commands.append(ResetStream(self.id, code))
        self.check()

    def stopped(self) -> None:
        """Record that the peer stopped the stream, so that QUIC has reset the direction (AQ-20a)."""
        self._give_up()
        self.check()

    def stop(self, code: int) -> None:
        """Ask the peer to end its direction, and discard data until then."""
        self.place = StreamPosition.DISCARD
        if self.receives and self.id is not None:
            self.all.commands.append(StopStream(self.id, code))

    def release(self) -> None:
        """Record that the sender no longer needs the stream."""
        self.kept = False
        self.check()

    def check(self) -> None:
        """Forget the stream if it is over."""
        if self.sends or self.receives or self.kept or self.id is None:
            return
        if self.all.table.pop(self.id, None) is not None and (self.opened_here or not self.id & 2):
            self.all.commands.append(StreamDone(self.id))
            self.all.done.add(self.id)

    def _give_up(self) -> None:
        self.given_up = True
        self.sends = False
        self.chunks = _NO_CHUNKS


class StreamTable:
    """All streams of a connection, and the outputs for them."""

    __slots__ = ("client", "commands", "dirty", "done", "early", "next_ids", "prefix", "table")

    def __init__(self, *, client: bool, early: bool) -> None:
        self.client = client
        self.early = early
        """Whether written bytes are kept to be sent again."""
        self.prefix = VERSION if client else b""
        """The start of every direction; empty once the peer is known to speak Aqueduct. Source: AQ-16."""
        self.table: dict[int, AqueductStream] = {}
        self.dirty: list[AqueductStream] = []
        self.commands: list[StreamOutput] = []
        """Outputs that follow the queued writes."""
        self.done: set[int] = set()
        """Streams that are over, until the owner has their `StreamDone`."""
        self.next_ids = [0, 2] if client else [1, 3]

    def close(self) -> None:
        """Forget all streams, which refer back to this object."""
        self.table.clear()
        self.dirty.clear()
        self.commands.clear()

    def accept(self, stream_id: int) -> AqueductStream:
        """Create the record of a stream that the peer opened."""
        if stream_id & 2:
            stream = AqueductStream(self, stream_id, place=StreamPosition.UNI, sends=False)
        else:
            place = StreamPosition.SERVER_BIDI if self.client else StreamPosition.CLIENT_BIDI
            stream = AqueductStream(self, stream_id, place=place, sends=True)
        self.table[stream_id] = stream
        return stream

    def open(self, place: StreamPosition | None = None) -> AqueductStream:
        """Open a stream whose peer direction begins in `place`; without one it is unidirectional."""
        stream = AqueductStream(self, None, place=place, sends=True)
        if self.prefix:
            stream.chunks = [self.prefix]
        return stream

    def announce(self, data: bytes) -> None:
        """Send bytes on their own unidirectional stream."""
        self.open().write(data, fin=True)

    def flush(self, most: int) -> list[StreamOutput]:
        """Take the outputs, in their order. Fewer than `most` means that nothing is left."""
        out: list[StreamOutput] = []
        count = 0
        for stream in self.dirty:
            if len(out) >= most:
                break
            count += 1
            stream.dirty = False
            if stream.given_up:
                continue
            if stream.id is None:
                self._open(stream, out)
            data = b"".join(stream.chunks)
            stream.chunks = _NO_CHUNKS
            if stream.early is not None:
                stream.early += data
            assert stream.id is not None
            out.append(StreamData(stream.id, data, stream.fin))
            if stream.fin:
                stream.sends = False
                stream.check()
        del self.dirty[:count]
        # No command concerns a stream that is left in `dirty` to be written later.
        out += self.commands[:most]
        del self.commands[:most]
        if not self.commands:
            self.done.clear()
        return out

    def _open(self, stream: AqueductStream, out: list[StreamOutput]) -> None:
        unidirectional = not stream.receives
        stream.id = self.next_ids[unidirectional]
        self.next_ids[unidirectional] += 4
        self.table[stream.id] = stream
        if self.early:
            stream.early = bytearray()
        out.append(OpenStream(stream.id, unidirectional, priority=USUAL if unidirectional else URGENT))

    def replay(self) -> None:
        """Write everything again on new streams: the peer has refused the early ones. Source: AQ-21."""
        for stream in list(self.table.values()):
            if stream.early is None or stream.id is None:
                continue
            del self.table[stream.id]
            self.commands.append(StreamDone(stream.id))
            stream.id = None
            if not stream.given_up:
                stream.chunks = [bytes(stream.early), *stream.chunks]
                stream.sends = True
                if not stream.dirty:
                    stream.mark()

    def settle_early(self) -> None:
        """Stop keeping data for a replay: QUIC knows whether early data arrived."""
        self.early = False
        for stream in self.table.values():
            stream.early = None
        for stream in self.dirty:
            stream.early = None
