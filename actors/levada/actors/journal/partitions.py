"""One partition of a journal: its segments in order. Writes go to the last one.

Readers see new rows after `publish`. Until then `rollback` takes them back: it deletes the segments made meanwhile, and cuts the one before
where it was published.
"""

from __future__ import annotations

import itertools
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pyarrow as pa

from levada.framework.files import Files

from .blocks import Block, Message, Uncertain, pack
from .config import JournalConfig
from .errors import JournalDamaged, JournalError, OffsetGone
from .kept_blocks import KeptBlocks
from .rewriting import merged, without
from .segments import Segment, State

__all__ = ["Loss", "Partition"]

logger = logging.getLogger("levada.actors.journal")


MERGE_BLOCKS = 16_384
"""Small blocks at which a segment is sealed, so that it is merged: at most 9 MB of them, which take 0.2 s to read."""
_MERGED = JournalConfig()
"""Has the size of blocks that small ones are merged into."""


@attrs.frozen
class _Published:
    """The state that `rollback` restores."""

    segments: tuple[Segment, ...]
    size: int
    end: int
    newest: float
    last: float


@attrs.frozen
class Loss:
    """Rows that should be there and are gone."""

    first: int
    end: int
    """The offset behind the last one."""
    error: JournalDamaged


class Partition:
    """A sequence of rows with dense offsets. Methods that write belong to one thread; any thread may `read` and call `offset_within`."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        number: int,
        *,
        journal: bytes,
        schema: pa.Schema,
        segment_bytes: int,
        memory: KeptBlocks,
    ) -> None:
        self._files = files
        self.folder = directory / f"partition-{number:04d}"
        self.number = number
        self.schema = schema
        self.segments: tuple[Segment, ...] = ()
        """Oldest first; each change makes a new tuple, so readers may keep theirs."""
        self.end = 0
        """Offset behind the last row that readers see."""
        self.synced_end = 0
        """Offset behind the last row that has been synced."""
        self._journal = journal
        self._segment_bytes = segment_bytes
        self._memory = memory
        self._published = _Published((), 0, 0, 0.0, 0.0)
        self._losses: dict[int, int] = {}

    @property
    def first(self) -> int:
        """Offset of the oldest row that is kept."""
        return self.segments[0].first

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    def create(self) -> None:
        """Make the folder and an empty segment, unless they are there already."""
        self._files.make_folder(self.folder)
        if not self._files.glob(self.folder, "*.segment"):
            self._make_segment(0).close()
        self._files.sync_folder(self.folder.parent)

    def find(
        self, committed: int, *, first: int | None = None, end: int = 0, known: Mapping[int, int] | None = None
    ) -> list[Loss]:
        """Examine the segments; return the rows that are gone or damaged. Nothing is changed before `settle`.

        Args:
            committed: number of the last transaction in the ledger.
            first: offset of the oldest row that must be there; None: any.
            end: the offset that the rows must reach.
            known: accepted losses: the offset behind each range, and its first offset.

        Raises:
            JournalDamaged: the ledger is older than the segments.
        """
        self.close()
        self._damaged = set[Path]()
        self._stale = list[Path]()
        self._unfinished = list[Path]()
        self._shaky = list[Segment]()
        self._wanted = end
        losses: list[Loss] = []
        found: list[Segment] = []
        for path in self._files.glob(self.folder, "*.segment"):
            try:
                found.append(Segment.open(self._files, path, partition=self.number, journal=self._journal))
            except JournalDamaged as error:
                self._damaged.add(path)
                losses.append(Loss(end, end, error))
        if first is not None:
            while len(found) > 1 and found[1].first <= first:
                self._stale.append(found.pop(0).path)
        oldest = found[0].first if found else end
        if not (found or losses):
            text = "the segments of this partition are gone: restore them"
            losses.append(Loss(first or 0, oldest, JournalDamaged(text, path=str(self.folder))))
        elif first is not None and oldest > first:
            text = f"the oldest segment begins with row {oldest}, but rows from {first} on were promised: restore the segments"
            losses.append(Loss(first, oldest, JournalDamaged(text, path=str(self.folder))))
        losses += self._examine_sealed(found, committed, known or {})
        if found:
            losses += self._examine_last(found, committed)
        self._found = found
        return losses

    def _examine_sealed(self, found: list[Segment], committed: int, known: Mapping[int, int]) -> Iterator[Loss]:
        """Check that each segment follows the one before."""
        for before, after in itertools.pairwise(found):
            before.end = known.get(after.first, after.first)
            if before.end == after.first and not after.follows(before):
                name, size = after.before or (0, 0)
                before.examine(committed, before.end)
                self._damaged.add(before.path)
                what = f"the segment before it began with row {name} and had {size} bytes, and is gone or has changed: restore it"
                yield Loss(min(before.end, after.first), after.first, JournalDamaged(what, path=str(after.path)))

    def _examine_last(self, found: list[Segment], committed: int) -> Iterator[Loss]:
        """Find the end of the rows."""
        state: State = found[-1].examine(committed, self._wanted)
        # If the last segment has no good rows, a transaction or an append may have begun in a segment before it. Otherwise an empty
        # segment stays: its name says at which offset to go on.
        while len(found) > 1 and found[-1].end == found[-1].first:
            last, before, wanted = found[-1], found[-2], found[-2].end
            if before.examine(committed, self._wanted) != "unfinished":
                if before.end != wanted:
                    self._damaged.add(before.path)
                    text = f"ends with offset {before.end}; the next segment begins with {last.first}"
                    yield Loss(before.end, wanted, JournalDamaged(text, path=str(before.path)))
                break
            # The later file goes first: if this is interrupted, the next start finds the same.
            self._unfinished.append(found.pop().path)
            state = "unfinished"
        last = found[-1]
        if state == "damaged":
            self._damaged.add(last.path)
            yield Loss(last.end, max(last.end, self._wanted), last.damage())
        elif last.end < self._wanted:
            if state != "whole":
                self._damaged.add(last.path)
            text = f"ends with offset {last.end}, but rows up to {self._wanted} were promised: restore the segments"
            yield Loss(last.end, self._wanted, JournalDamaged(text, path=str(self.folder)))

    @property
    def newest_schema(self) -> pa.Schema | None:
        """Columns of the last segment, once `find` has run; None if there is no segment."""
        return self._found[-1].schema if self._found else None

    def look(self) -> int:
        """Show readers the rows that `find` found, and change nothing; return the bytes that `settle` would cut off."""
        cut = sum(self._files.stat(path).st_size for path in self._unfinished)
        self.segments = tuple(self._found)
        if self.segments:
            last = self.segments[-1]
            cut += self._files.stat(last.path).st_size - last.size
            self.publish()
        return cut

    def settle(self, losses: Mapping[int, int], *, closed: bool = False) -> int:
        """Cut off rows that are torn or of something unfinished, and go on behind all rows that should be there; return the bytes cut off.

        Damaged files are kept as ``NAME.damaged``. If it is `shaky` behind this, `harden` comes next.

        Args:
            losses: the accepted ones: the offset behind each range, and its first offset.
            closed: whether the journal was closed in order.
        """
        files, found, cut = self._files, self._found, 0
        self._losses = dict(losses)
        files.make_folder(self.folder)
        for left in [*files.glob(self.folder, "*.new"), *files.glob(self.folder, "*.old")]:
            files.unlink(left)
        for path in self._damaged:
            kept = path.with_name(path.name + ".damaged")
            if any(segment.path == path for segment in found):
                files.copy(path, kept)
            else:
                files.rename(path, kept)
        for path in self._unfinished:
            cut += files.stat(path).st_size
            self._delete_newest(path)
        for segment in found:
            if segment.path in self._damaged or segment is found[-1]:
                if files.stat(segment.path).st_size > segment.size:
                    # An earlier process may have removed a later segment, which names this size, in memory only: it goes before this one changes.
                    files.sync_folder(self.folder)
                off = segment.settle()
                cut += off
                segment.close()
                if off or not closed or segment.end > self._wanted:
                    self._shaky.append(segment)
                else:
                    segment.synced = segment.size  # a sync takes 3 ms, and there may be many partitions
        self.segments = tuple(found)
        if not found or found[-1].end < self._wanted:
            self._begin_at(self._wanted)
        self.segments[-1].open_for_writing()
        self.synced_end = self.segments[-1].end
        self.publish()
        if cut:
            logger.warning(
                "%s: %d bytes were cut off, of a write or a delivery that was interrupted and never answered",
                self.folder,
                cut,
                extra={"event": "tail_cut"},
            )
        return cut

    @property
    def shaky(self) -> bool:
        """Whether files or names may not be on the disk, though they look so."""
        return bool(self._shaky)

    def harden(self) -> None:
        """Bring everything that `settle` has left to the disk."""
        for segment in [each for each in self._shaky if each in self.segments]:
            segment.open_for_writing()
            segment.harden(self._wanted)
            if segment is not self.segments[-1]:
                segment.close()
        self._files.sync_folder(self.folder)
        self._shaky = []

    def delete_stale(self) -> None:
        """Delete the segments before the promised first row. Not earlier than the promise is on the disk: `find` may have read it from memory."""
        for path in self._stale:
            self._files.unlink(path)
        self._stale = []

    def close(self) -> None:
        """Close all files."""
        for segment in self.segments:
            segment.close()

    def _begin_at(self, first: int) -> None:
        """Go on at this offset, which is behind the end."""
        empty = [segment for segment in self.segments[-1:] if segment.end == segment.first]
        self.segments = self.segments[: len(self.segments) - len(empty)]
        self.segments = (*self.segments, self._make_segment(first))
        for segment in empty:
            self._files.unlink(segment.path)

    def write(self, messages: Sequence[Message], *, transaction: int, time: float) -> int:
        """Write an append behind the last rows, unsynced and unseen by readers; return the offset of its first row.

        A full segment gives way to a new one. After a crash all of the append is there, or nothing. After an `OSError`, call `rollback`.
        """
        first = self.segments[-1].end
        waiting: list[Message] = []
        size = self.segments[-1].size
        for message in messages:
            last, more = self.segments[-1], message.size
            full = size + more > self._segment_bytes or (last.blocks >= MERGE_BLOCKS and last.fragmented)
            if full and (waiting or last.end > last.first):
                self.segments[-1].write(waiting, transaction=transaction, time=time, more=True)
                waiting = []
                self.roll()
                size = self.segments[-1].size
            waiting.append(message)
            size += more
        self.segments[-1].write(waiting, transaction=transaction, time=time)
        return first

    def roll(self) -> None:
        """Sync and seal the last segment, and begin a new one; a segment without rows is replaced."""
        last = self.segments[-1]
        last.sync()
        self.synced_end = self.end  # rows behind it are of an append that goes on in the new segment
        if last.end == last.first:
            self.segments = self.segments[:-1]
        elif last.end == self.end and last.fragmented:
            last = self._merge(last)
        self.segments = (*self.segments, self._make_segment(last.end))
        last.close()

    def _merge(self, last: Segment) -> Segment:
        """Merge the small blocks of the last segment, all of which readers see; if that fails, it stays as it is, or this raises `Uncertain`."""
        try:
            large = merged(last, self._journal, lambda batches: pack(batches, _MERGED))
        except Uncertain:
            raise
        except (OSError, JournalDamaged) as error:
            logger.warning("%s: its small blocks are not merged: %s", last.path, error, extra={"event": "not_merged"})
            return last
        self.segments = (*self.segments[:-1], large)
        self._published = attrs.evolve(self._published, segments=self.segments, size=large.size)
        self._memory.drop(last)
        last.close()
        self._files.unlink(last.path)
        return large

    def erase(self, segment: Segment, choose: Callable[[int, pa.RecordBatch], Sequence[bool]]) -> int:
        """Rewrite a segment without the rows that `choose` chooses (see `without`); return how many there were.

        Readers see all rows written. Readers that are under way go on with the old file, which has no name any more.

        Raises:
            OSError: the disk refuses; the segment stays as it is, or this is `Uncertain`.
            JournalDamaged: a block is damaged.
        """
        place = self.segments.index(segment)
        sealed = place + 1 < len(self.segments)
        if sealed:
            # The new file is whole by itself. If the old one ends within an append, a power failure must not leave the beginning alone.
            self.sync()
        done = without(segment, self._journal, choose, sealed=sealed)
        if done is None:
            return 0
        erased, rows = done
        self.segments = (*self.segments[:place], erased, *self.segments[place + 1 :])
        size = self._published.size if sealed else erased.size
        self._published = attrs.evolve(self._published, segments=self.segments, size=size)
        if sealed:
            erased.close()
        else:
            # The new file was synced whole. Its blocks no longer say which rows are one append, so it must be known as a whole.
            self.synced_end = erased.end
        self._memory.drop(segment)
        segment.close()
        self._files.unlink(segment.path)
        self._files.sync_folder(self.folder)
        return rows

    def _make_segment(self, first: int) -> Segment:
        before = (self.segments[-1].first, self.segments[-1].named_size) if self.segments else None
        return Segment.create(
            self._files,
            self.folder,
            partition=self.number,
            first=first,
            schema=self.schema,
            journal=self._journal,
            before=before,
        )

    def written_file(self) -> tuple[Path, int]:
        """Return the file of the last segment, and its inode."""
        return self.segments[-1].path, self.segments[-1].inode()

    def sync(self) -> None:
        """Sync all writes; `Uncertain` if the disk refuses."""
        self.segments[-1].sync()
        self.synced_end = self.segments[-1].end

    def publish(self) -> bool:
        """Show readers all writes; return whether a segment was sealed since the last time."""
        last = self.segments[-1]
        sealed = len(self.segments) > len(self._published.segments)
        for segment in self.segments[max(0, len(self._published.segments) - 1) :]:
            segment.publish()
        self.end = last.end
        self._published = _Published(self.segments, last.size, last.end, last.newest, last.last)
        return sealed

    def rollback(self) -> None:
        """Take back all writes since `publish`, on the disk too. After an `OSError`, only opening the journal again helps."""
        kept = self._published.segments
        for segment in self.segments[len(kept) :]:
            segment.close()
        # By name: the making of the last one may have failed when it had its name already.
        behind = [path for path in self._files.glob(self.folder, "*.segment") if int(path.stem) > kept[-1].first]
        for path in reversed(behind):
            self._delete_newest(path)
        self.segments = kept
        kept[-1].cut_to(self._published.size, self._published.end)
        kept[-1].newest, kept[-1].last = self._published.newest, self._published.last
        self.synced_end = min(self.synced_end, self._published.end)

    def _delete_newest(self, path: Path) -> None:
        """Delete the newest segment, which has rows that nobody was told about. A crash must leave no gap, so the name goes before the next does."""
        self._files.unlink(path)
        self._files.sync_folder(self.folder)

    def drop_oldest(self) -> Path:
        """Hide the oldest segment, which is not the last one, from readers; return its file, which may be deleted."""
        oldest, *rest = self.segments
        # Readers that look it up from now on get `OffsetGone`; a reader that has mapped it keeps it.
        self.segments = tuple(rest)
        self._published = attrs.evolve(self._published, segments=self.segments)
        self._memory.drop(oldest)
        return oldest.path

    def read(self, start: int, end: int, max_bytes: int) -> Iterator[Block]:
        """Yield blocks from `start` on, up to `end` or the last row that readers see, until `max_bytes`; at least one if there is a row.

        Raises:
            OffsetGone: `start` is older than the oldest row.
            JournalDamaged: a block is damaged.
        """
        end, used = min(end, self.end), 0
        while start < end:
            segment, following = self._segment_of(start)
            path = segment.path
            stop = end if following is None else min(end, segment.end)
            if start >= stop and used:
                return
            try:
                self._index(segment, start, following)
                for block in segment.read(start, stop, max_bytes, used):
                    yield block
                    start = block.end
                    used += block.data.size
            except (FileNotFoundError, JournalDamaged, ValueError) as error:
                self._require_merged(segment, path, start, error)
                continue
            if start < stop:
                return

    def read_at(self, places: Sequence[int]) -> Iterator[tuple[Block, Sequence[int]]]:
        """Yield the whole blocks that hold some rows, whose offsets are in order, each with the offsets of its own; raises as `read`."""
        place = 0
        while place < len(places):
            segment, following = self._segment_of(places[place])
            path = segment.path
            end = len(places) if following is None else bisect_left(places, following, place)
            try:
                self._index(segment, places[place], following)
                for block, here in segment.read_at(places[place:end], self._memory):
                    yield block, here
                    place += len(here)
            except (FileNotFoundError, JournalDamaged, ValueError) as error:
                self._require_merged(segment, path, places[place], error)

    def offset_within(self, start: int, end: int, max_bytes: int) -> int:
        """Find the offset at which `read` with the same arguments would end, without reading rows."""
        end, used = min(end, self.end), 0
        while start < end:
            segment, following = self._segment_of(start)
            path = segment.path
            stop = end if following is None else min(end, segment.end)
            if start >= stop and used:
                break
            try:
                self._index(segment, start, following)
                start, used = segment.offset_within(start, stop, max_bytes, used)
            except (FileNotFoundError, JournalDamaged, ValueError) as error:
                self._require_merged(segment, path, start, error)
                continue
            if start < stop:
                break
        return start

    def _require_merged(self, segment: Segment, path: Path, offset: int, error: Exception) -> None:
        """Raise the error unless it came because the segment was merged meanwhile; then the reader looks it up again."""
        if segment.path is not path or (segment not in self.segments and offset >= self.first):
            return
        if isinstance(error, FileNotFoundError):
            raise self._vanished(segment, offset) from None
        raise error

    def _index(self, segment: Segment, start: int, following: int | None) -> None:
        """Index the segment that holds the row at `start`, or would hold it if it were not lost."""
        if following is not None:
            segment.index()
            if start >= segment.end:
                raise self._gone(start, following)

    def _segment_of(self, offset: int) -> tuple[Segment, int | None]:
        """Return the segment that holds an offset, and the offset at which the next one begins."""
        segments = self.segments
        if offset < segments[0].first:
            raise self._gone(offset, segments[0].first)
        low, high = 0, len(segments)
        while high - low > 1:
            middle = (low + high) // 2
            if segments[middle].first <= offset:
                low = middle
            else:
                high = middle
        return segments[low], segments[low + 1].first if low + 1 < len(segments) else None

    def _gone(self, offset: int, first: int) -> OffsetGone:
        if self._losses.get(first, first) <= offset:
            why = "were lost, which was accepted when the journal was opened; the next row is"
        else:
            why = "have been deleted by retention, or trimmed; the oldest left is"
        return OffsetGone(
            f"partition {self.number}: rows {offset} to {first - 1} {why} {first}",
            path=os.fspath(self.folder),
            partition=self.number,
            wanted=offset,
            first=first,
        )

    def _vanished(self, segment: Segment, offset: int) -> JournalError:
        """Return the error for a file that was there when it was looked up and is gone now."""
        if offset < self.first:
            return self._gone(offset, self.first)
        return JournalDamaged(
            f"row {offset} of partition {self.number} is gone: another program deleted its file. Restore it from a copy",
            path=os.fspath(segment.path),
        )

    def check_offset(self, offset: int) -> None:
        """Require that an offset is between 0 and the end; else raise `JournalError`."""
        if not isinstance(offset, int) or not 0 <= offset <= self.end:
            raise JournalError(
                f"the offset is {offset!r}, wanted 0 to {self.end} in partition {self.number}", path=str(self.folder)
            )
