"""The QUIC streams of a connection: what waits to be written on each, how far each has been read, when one is over.

A stream that this side opens gets its number when its first octets are handed out: one that is given up before was never there.
Writing is queued and joined, so that many messages of one turn leave as one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .events import OpenStream, Output, ResetStream, StopStream, StreamData, StreamDone
from .frames import VERSION
from .state import Place

if TYPE_CHECKING:
    from .receiver import ReceiverHalf
    from .sender import SenderHalf

__all__ = ["Stream", "Streams"]

URGENT, USUAL = 64, 128
"""Priorities of control streams and of streams with messages."""


class Stream:
    """One stream, both directions."""

    __slots__ = (
        "all",
        "blocked",
        "buffer",
        "chunks",
        "dirty",
        "early",
        "fin",
        "fin_seen",
        "gate_open",
        "given_up",
        "half",
        "id",
        "kept",
        "need",
        "opened_here",
        "place",
        "received",
        "receives",
        "reset_seen",
        "sender",
        "sends",
    )

    def __init__(self, streams: Streams, stream_id: int | None, *, place: Place | None, sends: bool) -> None:
        self.all = streams
        self.id = stream_id
        self.opened_here = stream_id is None

        # Reading.
        self.receives = place is not None
        """Whether the peer's direction has not ended."""
        self.place = place or Place.DISCARD
        self.buffer = bytearray()
        """Octets that were not read: a cut frame, or all while the stream waits."""
        self.need = 0
        """Octets that the buffer must hold before it is worth reading."""
        self.received = 0
        """Octets read so far."""
        self.blocked = False
        """Whether the stream waits: for the connection to open, or for room in a mailbox."""
        self.fin_seen = False
        self.reset_seen: int | None = None
        """The peer's end, while the stream waits."""
        self.half: SenderHalf | ReceiverHalf | None = None
        """Whose control stream it is."""

        # Writing.
        self.sends = sends
        """Whether this side's direction has not ended."""
        self.sender: SenderHalf | None = None
        """Whose messages are written here."""
        self.kept = False
        """Whether a sender still wants to reset it, or to hear of a stop, though everything was written."""
        self.chunks: list[bytes] = []
        self.dirty = False
        self.fin = False
        self.given_up = False
        """Whether this side's direction was reset, by this side or because the peer stopped it."""
        self.gate_open = not self.opened_here
        """Whether the peer is known to have seen the stream, so that a reset says what it resets. Source: AQ-45 (D-22)."""
        self.early: bytearray | None = None
        """What was written, as long as it may have to be written again. Source: AQ-21."""

    def write(self, data: bytes) -> None:
        """Queue octets, unless the direction has ended: a control stream that the peer stopped is not worth an `if` elsewhere."""
        if self.fin or self.given_up:
            return
        self.chunks.append(data)
        self.mark()

    def finish(self) -> None:
        """End this side's direction after what is queued. Once more, it does nothing."""
        if not self.fin and not self.given_up:
            self.fin = True
            self.mark()

    def mark(self) -> None:
        """Have the next flush look at it."""
        if not self.dirty:
            self.dirty = True
            self.all.dirty.append(self)

    def reset(self, code: int) -> None:
        """Give up this side's direction; also after its end, which the peer may not have got yet."""
        if self.given_up or (self.id is not None and self.id not in self.all.table):
            return
        self._give_up()
        if self.id is None:
            self.receives = False
        else:
            self.all.commands.append(ResetStream(self.id, code))
        self.check()

    def stopped(self) -> None:
        """The peer wants no more, and QUIC has reset the direction for that (AQ-20a)."""
        self._give_up()
        self.check()

    def stop(self, code: int) -> None:
        """Ask the peer to end its direction, and throw away what comes until then."""
        self.place = Place.DISCARD
        if self.receives and self.id is not None:
            self.all.commands.append(StopStream(self.id, code))

    def release(self) -> None:
        """The sender has no more use for it."""
        self.kept = False
        self.check()

    def check(self) -> None:
        """Forget it if it is over."""
        if self.sends or self.receives or self.kept or self.id is None:
            return
        if self.all.table.pop(self.id, None) is not None and (self.opened_here or not self.id & 2):
            self.all.commands.append(StreamDone(self.id))
            self.all.done.add(self.id)

    def _give_up(self) -> None:
        self.given_up = True
        self.sends = False
        self.chunks.clear()


class Streams:
    """All streams of a connection, and what is to be done to them."""

    __slots__ = ("client", "commands", "dirty", "done", "early", "next_ids", "prefix", "table")

    def __init__(self, *, client: bool, early: bool) -> None:
        self.client = client
        self.early = early
        """Whether what is written is kept for a repetition."""
        self.prefix = VERSION if client else b""
        """What every direction begins with: empty as soon as the peer is known to speak Aqueduct. Source: AQ-16."""
        self.table: dict[int, Stream] = {}
        self.dirty: list[Stream] = []
        self.commands: list[Output] = []
        """What to do after what has been written so far."""
        self.done: set[int] = set()
        """Streams that are over, which the owner does not know yet."""
        self.next_ids = [0, 2] if client else [1, 3]

    def close(self) -> None:
        """Forget all streams, which hold this in turn."""
        self.table.clear()
        self.dirty.clear()
        self.commands.clear()

    def accept(self, stream_id: int) -> Stream:
        """Make the record of a stream that the peer opened."""
        if stream_id & 2:
            stream = Stream(self, stream_id, place=Place.UNI, sends=False)
        else:
            place = Place.SERVER_BIDI if self.client else Place.CLIENT_BIDI
            stream = Stream(self, stream_id, place=place, sends=True)
        self.table[stream_id] = stream
        return stream

    def open(self, place: Place | None = None) -> Stream:
        """Open a stream on which the peer's direction begins in `place`; a unidirectional one without."""
        stream = Stream(self, None, place=place, sends=True)
        if self.prefix:
            stream.chunks.append(self.prefix)
        return stream

    def announce(self, octets: bytes) -> None:
        """Send octets on a unidirectional stream of their own."""
        stream = self.open()
        stream.write(octets)
        stream.finish()

    def flush(self, most: int) -> list[Output]:
        """Take what is to be done, in an order in which it may be done; less than `most` only if nothing is left."""
        out: list[Output] = []
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
            stream.chunks.clear()
            if stream.early is not None:
                stream.early += data
            assert stream.id is not None
            out.append(StreamData(stream.id, data, stream.fin))
            if stream.fin:
                stream.sends = False
                stream.check()
        del self.dirty[:count]
        # No command is about a stream that is left in `dirty` to be written on.
        out += self.commands[:most]
        del self.commands[:most]
        if not self.commands:
            self.done.clear()
        return out

    def _open(self, stream: Stream, out: list[Output]) -> None:
        unidirectional = not stream.receives
        stream.id = self.next_ids[unidirectional]
        self.next_ids[unidirectional] += 4
        self.table[stream.id] = stream
        if self.early:
            stream.early = bytearray()
        out.append(OpenStream(stream.id, unidirectional, priority=USUAL if unidirectional else URGENT))

    def replay(self) -> None:
        """Write everything once more on new streams: the peer has refused the early ones. Source: AQ-21."""
        for stream in list(self.table.values()):
            if stream.early is None or stream.id is None:
                continue
            del self.table[stream.id]
            self.commands.append(StreamDone(stream.id))
            stream.id = None
            if not stream.given_up:
                stream.chunks.insert(0, bytes(stream.early))
                stream.sends = True
                stream.mark()

    def settle_early(self) -> None:
        """It is known whether early data arrived; nothing is kept any more."""
        self.early = False
        for stream in self.table.values():
            stream.early = None
        for stream in self.dirty:
            stream.early = None
