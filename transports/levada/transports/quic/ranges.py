"""Sets of numbers kept as ranges, for numbers in any order: packet numbers, and the bytes of a stream.

aioquic's `RangeSet` scans all ranges from the lowest. A peer that sends every second byte of a stream makes 500,000 ranges in a window of
1 MiB, and each frame would scan all of them: 700 packets took minutes. Here an addition at the end costs 0.2 us, and any other one takes a
binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicErrorCode
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.stream import QuicStream

__all__ = ["MAX_GAPS", "MAX_RANGES", "Gaps", "Ranges", "ReceivedPackets"]

MAX_GAPS: Final = 4_096
"""Most gaps in the received data of all streams of a connection: half as many as packets that fill a window of 8 MiB."""

MAX_RANGES: Final = 256
"""Most ranges of packet numbers kept. 10 ms of reordering at 100 Mbit/s, with one packet of ten late, makes 90."""

_start = attrgetter("start")
_stop = attrgetter("stop")


class Ranges(RangeSet):
    """aioquic's set of ranges with its methods, searched from the end."""

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        """Make a set from `ranges` that are in order and do not touch."""
        self._sorted = list(ranges)

    def add(self, start: int, stop: int | None = None) -> None:
        """Add the numbers from `start` to before `stop`, or `start` alone."""
        if stop is None:
            stop = start + 1
        ranges = self._sorted
        if not ranges or start > ranges[-1].stop:
            ranges.append(range(start, stop))
            return
        last = ranges[-1]
        if start >= last.start:
            if stop > last.stop:
                ranges[-1] = range(last.start, stop)
            return
        first = bisect_left(ranges, start, key=_stop)
        after = bisect_right(ranges, stop, key=_start)
        if first < after:
            start, stop = min(start, ranges[first].start), max(stop, ranges[after - 1].stop)
        ranges[first:after] = [range(start, stop)]

    def subtract(self, start: int, stop: int) -> None:
        """Remove the numbers from `start` to before `stop`."""
        ranges = self._sorted
        first = bisect_right(ranges, start, key=_stop)
        after = bisect_left(ranges, stop, key=_start)
        if first >= after:
            return
        left = range(ranges[first].start, start)
        right = range(stop, ranges[after - 1].stop)
        ranges[first:after] = [part for part in (left, right) if part]

    def shift(self) -> range:
        """Remove and return the lowest range."""
        return self._sorted.pop(0)

    def bounds(self) -> range:
        """Return the range from the lowest number to the highest."""
        return range(self._sorted[0].start, self._sorted[-1].stop)

    def __contains__(self, number: Any) -> bool:
        at = bisect_right(self._sorted, number, key=_stop)
        return at < len(self._sorted) and number in self._sorted[at]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, RangeSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as with aioquic's

    def __getitem__(self, key: Any) -> Any:
        return self._sorted[key]

    def __iter__(self) -> Iterator[range]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def __repr__(self) -> str:
        return f"Ranges({self._sorted!r})"


class ReceivedPackets:
    """The packet numbers received so far; replaces aioquic's `QuicPacketNumberWindow`.

    aioquic's class takes every packet more than 127 numbers late for a duplicate; at 15 MB/s, that is 10 ms. Here the number of gaps is limited:
    above `MAX_RANGES`, the packets of the lowest gap count as received.
    """

    __slots__ = ("_below", "_start", "following")

    def __init__(self) -> None:
        self._below = Ranges()
        self._below.add(-1)
        self._start = 0  # start of the run that the next packet in order extends
        self.following = 0
        """The number after the highest one."""

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return self._start <= number < self.following or number in self._below

    def add(self, number: int) -> bool:
        """Add a number; false if it already counts as received."""
        if number == self.following:
            self.following = number + 1
            return True
        if number in self:
            return False
        below = self._below
        if number > self.following:
            if self._start < self.following:
                below.add(self._start, self.following)
            self._start, self.following = number, number + 1
        else:
            below.add(number)
        if len(below) > MAX_RANGES:
            below.add(below[0].start, below[1].start)
        return True


class Gaps:
    """The gaps in the received data of all streams of a connection, bounded (RFC 9000 section 21.7).

    A gap costs 100 bytes of memory, and aioquic looks at all gaps for each piece of data: after thirty packets full of single bytes, a packet
    took 40 ms, and each further one more.
    """

    def __init__(self) -> None:
        self._of: dict[QuicStream, int] = {}
        self._count = 0

    def bound(self, stream: QuicStream, frame_type: int) -> None:
        """Count the gaps of a stream that a frame of this type has changed.

        Raises:
            QuicConnectionError: the connection has more than `MAX_GAPS`.
        """
        receiver = stream.receiver
        ranges = receiver._ranges
        gaps = 0 if receiver.is_finished else len(ranges)
        known = self._of.pop(stream, 0)
        self._count += gaps - known
        if not gaps:
            return
        self._of[stream] = gaps
        if type(ranges) is RangeSet:
            receiver._ranges = Ranges(ranges)
        if self._count > MAX_GAPS:
            raise QuicConnectionError(
                error_code=QuicErrorCode.PROTOCOL_VIOLATION,
                frame_type=frame_type,
                reason_phrase="Too many gaps in the received data",
            )

    def clear(self) -> None:
        """Release the streams."""
        self._of.clear()
