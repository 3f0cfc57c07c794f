"""One partition of a journal: its segments in order, of which the last is written.

What was written is seen by readers after `publish` only, and until then `rollback` takes it back: the segments made meanwhile go, and the one
before is cut where it was published.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pyarrow as pa

from .errors import JournalDamaged, JournalError, OffsetGone
from .segments import Block, Message, Segment, sync_folder

__all__ = ["Partition"]


@attrs.frozen
class _Published:
    """Where `rollback` goes back to."""

    segments: tuple[Segment, ...]
    size: int
    end: int


class Partition:
    """A sequence of rows with dense offsets. Methods that write belong to one thread; `read` and `offset_within` to any."""

    def __init__(self, folder: Path, number: int, *, journal: bytes, schema: pa.Schema, segment_bytes: int) -> None:
        self.folder = folder
        self.number = number
        self.schema = schema
        self.segments: tuple[Segment, ...] = ()
        """Oldest first; a new tuple at each change, so that readers may keep the one they took."""
        self.end = 0
        """Offset behind the last row that readers see."""
        self._journal = journal
        self._segment_bytes = segment_bytes
        self._published = _Published((), 0, 0)

    @property
    def first(self) -> int:
        """Offset of the oldest row that is kept."""
        return self.segments[0].first

    @property
    def size(self) -> int:
        """Octets of all segments."""
        return sum(segment.size for segment in self.segments)

    # ------------------------------------------------------------ opening

    def create(self) -> None:
        """Make the folder and an empty segment, unless they are there already."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not any(self.folder.glob("*.segment")):
            self._make_segment(0).close()
        sync_folder(self.folder.parent)

    def open(self, committed: int) -> int:
        """Find the segments, and cut off what is torn or was never committed.

        Args:
            committed: number of the last transaction in the ledger.

        Returns:
            Octets cut off.

        Raises:
            JournalDamaged: a segment is missing or not whole; nothing was changed.
        """
        self.close()
        for left in self.folder.glob("*.new"):
            left.unlink()
        found = [
            Segment.open(path, partition=self.number, journal=self._journal)
            for path in sorted(self.folder.glob("*.segment"))
        ]
        if not found:
            raise JournalDamaged("the segments of this partition are gone", path=str(self.folder))
        state = found[-1].examine(committed)
        cut = 0
        # A transaction that was not committed may have begun in a segment before, if there is nothing else in the last one. An empty
        # one stays otherwise: its name says at which offset to go on.
        while found[-1].end == found[-1].first and len(found) > 1:
            last, before = found[-1], found[-2]
            state = before.examine(committed)
            if state != "uncommitted":
                if state == "torn" or before.end != last.first:
                    raise JournalDamaged(
                        f"ends with offset {before.end}; the next segment begins with {last.first}",
                        path=str(before.path),
                    )
                break
            # First the later file: should this be cut short, the same is found again next time.
            found.pop().path.unlink()
            sync_folder(self.folder)
            cut += last.size
        cut += found[-1].settle()
        self.segments = tuple(found)
        for before, after in itertools.pairwise(found):
            before.close()
            before.end = after.first
        self.publish()
        return cut

    def close(self) -> None:
        """Let go of all files."""
        for segment in self.segments:
            segment.close()

    # ------------------------------------------------------------ writing

    def write(self, messages: Sequence[Message], *, transaction: int, time: float) -> int:
        """Put rows behind the last ones; neither synced nor seen by readers yet. A full segment gives way to a new one.

        Returns:
            The offset of the first row.

        Raises:
            OSError: the disk does not take it; call `rollback`.
        """
        first = self.segments[-1].end
        waiting: list[Message] = []
        size = self.segments[-1].size
        for message in messages:
            if size + message.size > self._segment_bytes and (
                waiting or self.segments[-1].end > self.segments[-1].first
            ):
                self.segments[-1].write(waiting, transaction=transaction, time=time)
                waiting = []
                self.roll()
                size = self.segments[-1].size
            waiting.append(message)
            size += message.size
        self.segments[-1].write(waiting, transaction=transaction, time=time)
        return first

    def roll(self) -> None:
        """Seal the last segment, which is synced, and begin a new one; it takes the place of one without rows."""
        last = self.segments[-1]
        last.sync()
        kept = self.segments if last.end > last.first else self.segments[:-1]
        self.segments = (*kept, self._make_segment(last.end))
        last.close()

    def _make_segment(self, first: int) -> Segment:
        return Segment.create(
            self.folder, partition=self.number, first=first, schema=self.schema, journal=self._journal
        )

    def sync(self) -> None:
        """Bring what was written to the disk."""
        self.segments[-1].sync()

    def publish(self) -> bool:
        """Let readers see what was written; return whether a segment was sealed meanwhile."""
        last = self.segments[-1]
        sealed = len(self.segments) > len(self._published.segments)
        for segment in self.segments[max(0, len(self._published.segments) - 1) :]:
            segment.publish()
        self.end = last.end
        self._published = _Published(self.segments, last.size, last.end)
        return sealed

    def rollback(self) -> None:
        """Take back what was written since `publish`; it is so on the disk when this returns.

        Raises:
            OSError: it cannot be; only opening the journal again helps.
        """
        kept = self._published.segments
        if self.segments != kept:
            for segment in self.segments[len(kept) :]:
                segment.close()
                segment.path.unlink(missing_ok=True)
            self.segments = kept
            sync_folder(self.folder)
        kept[-1].cut_to(self._published.size, self._published.end)

    def drop_oldest(self) -> None:
        """Delete the oldest segment, which is not the last one."""
        oldest, *rest = self.segments
        # Readers that look it up from now on are told that it is gone; those that have it mapped keep it.
        self.segments = tuple(rest)
        self._published = _Published(self.segments, self._published.size, self._published.end)
        oldest.path.unlink()

    # ------------------------------------------------------------ reading

    def read(self, start: int, end: int, max_bytes: int) -> Iterator[Block]:
        """Yield blocks from `start` on, up to `end` or what readers see, until `max_bytes`; at least one if there is a row.

        Raises:
            OffsetGone: `start` is older than what is kept.
            JournalDamaged: a block is damaged.
        """
        end, used = min(end, self.end), 0
        while start < end:
            segment, following = self._segment_of(start)
            stop = end if following is None else min(end, following)
            try:
                segment.index(stop if following is None else following)
                for block in segment.read(start, stop, max_bytes, used):
                    yield block
                    start = block.end
                    used += block.octets.size
            except FileNotFoundError:
                raise self._gone(start) from None
            if start < stop:
                return

    def offset_within(self, start: int, end: int, max_bytes: int) -> int:
        """Find the offset at which `read` with the same arguments would end, without reading any row."""
        end, used = min(end, self.end), 0
        while start < end:
            segment, following = self._segment_of(start)
            stop = end if following is None else min(end, following)
            try:
                segment.index(stop if following is None else following)
                start, used = segment.offset_within(start, stop, max_bytes, used)
            except FileNotFoundError:
                raise self._gone(start) from None
            if start < stop:
                break
        return start

    def _segment_of(self, offset: int) -> tuple[Segment, int | None]:
        """The segment that holds an offset, and the offset at which the one after begins."""
        segments = self.segments
        if offset < segments[0].first:
            raise self._gone(offset)
        low, high = 0, len(segments)
        while high - low > 1:
            middle = (low + high) // 2
            if segments[middle].first <= offset:
                low = middle
            else:
                high = middle
        return segments[low], segments[low + 1].first if low + 1 < len(segments) else None

    def _gone(self, offset: int) -> OffsetGone:
        first = self.first
        return OffsetGone(
            f"partition {self.number}: rows {offset} to {first - 1} have been deleted by retention; the oldest left is {first}",
            path=os.fspath(self.folder),
            partition=self.number,
            wanted=offset,
            first=first,
        )

    def check_offset(self, offset: int) -> None:
        """Require that an offset is one between the beginning of the journal and its end.

        Raises:
            JournalError: it is not.
        """
        if not isinstance(offset, int) or not 0 <= offset <= self.end:
            raise JournalError(
                f"partition {self.number} has offsets 0 to {self.end}, not {offset!r}", path=str(self.folder)
            )
