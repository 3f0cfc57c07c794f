"""One segment file of a journal: Arrow IPC record batch messages in checksummed blocks.

On the disk
    A header, then blocks without gaps. Numbers are little-endian; header and blocks are padded with zeros to multiples of 8 bytes.

    header: ``levadaJ1``, version (4), partition (4), first offset (8), journal id (16), fingerprint of the schema (16), bytes of the schema
    (4), first offset (8) and size (8) of the segment before it, or zeros, crc32 of all of it (4); then the schema as an Arrow IPC message.
    Version 1 has no segment before it. Versions 3 and 5, of a file from which rows were erased, have two numbers (8 each) before the crc32: the
    size that the next segment names, and the file's own size; both are 0 if it was the last segment, and grew on.

    block: ``LvB1``, bytes of the message (4), crc32 of the rest of the block (4), rows (4), offset of the first row (8), transaction (8), time in
    microseconds since 1970 (8), bytes of this file that were synced when this block was written (8); then the record batch as an Arrow IPC message.
    The highest bit of the transaction says that the append goes on in the next block (versions 4 and 5). A block without a message stands for
    erased rows, or for offsets without a row in a log that was copied (since version 3).

The rules of this file
    * A segment appears under its name with a whole, synced header, by rename. A file cut short inside its header is damage.
    * Offsets are dense: a block begins where the one before ended.
    * An append is good with its last block, and not before. Its blocks follow each other, perhaps over several segments, because one thread writes
      and takes back what it could not finish. So an append without its last block is at the end of a partition, and is cut off. In front of other
      rows an append was finished, and where rows were promised, too: then its blocks are good one by one.
    * A bad block is a torn tail if no whole block behind it says that this place had been synced. A torn tail is cut off. Otherwise the
      bad bytes had been on the disk, and the rows behind them may have been promised: that is `JournalDamaged`, and nothing is cut.
    * Opening a journal reads the last segment only. Each header says which segment comes before it, and how long that one is. Blocks of older
      segments are checked when they are first read.
    * A segment of many small blocks is merged when it is sealed: a file with the same rows in large blocks takes its name. Headers of blocks and
      of IPC messages have 300 bytes and take 10 µs to read, so rows that were appended one at a time cost 530 bytes until then, and 220
      afterwards. Readers that are under way read the old file by another name, and look the segment up again when that is gone.
    * One thread writes. Readers in other threads stay below an end that the writer has published, and see lists that only grow.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from levada.framework.files import Files

from .blocks import (
    BLOCK,
    BLOCK_MAGIC,
    MORE,
    SUMMED,
    Block,
    Header,
    Message,
    Uncertain,
    header_at,
    map_file,
    padded,
    write_all,
)
from .errors import JournalDamaged
from .headers import FileHeader
from .kept_blocks import Kept, KeptBlocks

__all__ = ["Segment", "State"]

STRIDE = 1 << 16
"""Bytes between entries of the index in memory: 160,000 entries for 10 GiB; a search walks through this much at most."""
_SMALL = 4096
"""Bytes of a block below which it costs more than its rows."""
_ANEW = 4 << 20
"""Bytes that are rewritten at a time."""
MOST_CHECKED = 1 << 14
"""Blocks here and there of which a segment remembers that they have passed their checksum: 1 MB. Then it forgets them, and checks them again."""
_FEW = 64
"""Fewer blocks are not worth a merge."""


State = Literal["whole", "torn", "damaged", "unfinished"]
"""What follows the last good block of a segment."""


class Segment:
    """A segment file. Made by `create` and `open`; the methods that write belong to one thread."""

    def __init__(self, files: Files, path: Path, header: FileHeader) -> None:
        self.files = files
        self.path = path
        self.partition = header.partition
        self.first = first = header.first
        """Offset of the first row."""
        self.before = header.before
        """First offset and size of the segment before this one; None if there was none, or the header does not say."""
        self.version = header.version
        """Version of the format."""
        self.sizes = header.sizes
        """If rows were erased: the size that the next segment names, and its own; zeros if it grew on."""
        self.erased = header.erased
        """Whether rows were erased from it."""
        self.schema = header.schema
        self.fingerprint = header.fingerprint
        self.start = self.size = start = header.size
        """Bytes of the header and all whole blocks."""
        self.end = first
        """Offset behind the last row written."""
        self.synced = 0
        """Bytes that have been synced."""
        self.visible = start
        """Bytes that readers may look at; see `publish`."""
        self.oldest = 0.0
        """When the first block was written, in seconds since 1970; 0 without blocks."""
        self.newest = 0.0
        """The latest stamp of any block. Clocks jump, so another block than the last may have it."""
        self.last = 0.0
        """When the last block was written, or 0."""
        self.indexed = True
        """Whether the fields above and the index have been read from the file; false for a sealed segment before its first read."""
        self.blocks = 0
        """Number of blocks; 0 for a sealed segment that has not been read."""
        self.replaced = False
        """Whether another file has taken its place, or it is deleted; see `KeptBlocks.drop`."""
        self._offsets: list[int] = []
        self._positions: list[int] = []
        self._checked = (0, 0)  # blocks between these positions have passed their checksum
        self._checked_alone = set[int]()  # and those at these positions, which `read_at` has looked at
        self._descriptor = -1

    @classmethod
    def create(
        cls,
        files: Files,
        folder: Path,
        *,
        partition: int,
        first: int,
        schema: pa.Schema,
        journal: bytes,
        before: tuple[int, int] | None = None,
        durable: bool = True,
        messages: Sequence[tuple[Message, int, float]] = (),
        erased: int | None = None,
    ) -> Segment:
        """Make a segment file, open for writing; if `durable`, it is synced.

        After an `OSError` a new name is gone again; a name that was taken (`rewriting`) may be of either file.

        Args:
            files: where it is.
            folder: of the partition.
            partition: its number.
            first: offset of the first row.
            schema: columns.
            journal: sixteen bytes that identify it.
            before: first offset and size of the segment before.
            durable: whether the file is on the disk when this returns.
            messages: rows that it has from the beginning, each with its transaction and time.
            erased: the size that the next segment names, if rows were erased from this one; 0 if there is no next one.

        Raises:
            OSError: the disk refuses; `Uncertain` if the new name may stay.
        """
        header, data = FileHeader.make(
            partition,
            first,
            schema,
            journal,
            before=before,
            erased=erased,
            messages_size=sum(message.size for message, _, _ in messages),
        )
        path = folder / f"{first:020d}.segment"
        beside, taken = path.with_suffix(".new"), files.exists(path)
        descriptor = files.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(files, descriptor, [data], 0)
            segment = cls(files, path, header)
            segment._descriptor = descriptor
            for message, transaction, time in messages:
                segment.synced = segment.size  # all of it, before the file gets its name
                segment.write([message], transaction=transaction, time=time)
            if durable:
                files.fdatasync(descriptor)
            files.rename(beside, path)
            if durable:
                files.sync_folder(folder)
        except BaseException:
            files.close(descriptor)
            try:
                files.discard(beside)
                if not taken and files.exists(path):
                    # On the disk too: else a power failure could bring an empty segment back, behind rows that were taken back.
                    files.unlink(path)
                    files.sync_folder(folder)
            except OSError as failure:
                raise Uncertain.of(failure) from failure
            raise
        segment.synced = segment.size
        segment.publish()
        return segment

    @classmethod
    def open(cls, files: Files, path: Path, *, partition: int, journal: bytes) -> Segment:
        """Read the header of a file; its blocks are read later.

        Raises:
            JournalDamaged: the header is not whole, or this is a file of another journal or partition.
            JournalError: written by a later version of this format.
        """
        segment = cls(files, path, FileHeader.read(files, path, partition=partition, journal=journal))
        segment.size = segment.visible = files.stat(path).st_size
        if segment.size < segment.start:
            raise FileHeader.damaged(path)
        segment.indexed = False
        return segment

    def open_for_writing(self) -> None:
        """Open the file again, to write behind its last block."""
        if self._descriptor < 0:
            self._descriptor = self.files.open(self.path, os.O_RDWR)

    @property
    def named_size(self) -> int:
        """The size that the next segment names; after an erasure it is the size of the file before."""
        return self.sizes[0] or self.size

    def follows(self, before: Segment) -> bool:
        """Whether this segment was made behind `before`, and that file has the size it should have; true if this header does not say."""
        if self.before is None:
            return True
        return self.before == (before.first, before.named_size) and before.sizes[1] in (0, before.size)

    @property
    def fragmented(self) -> bool:
        """Whether its blocks cost more than their rows."""
        return self.blocks >= _FEW and self.size - self.start < self.blocks * _SMALL

    def walk(self) -> Iterator[tuple[Header, memoryview]]:
        """Yield the header and the message of each block, unchecked."""
        view, at = map_file(self.files, self.path, 0, self.size), self.start
        while at < self.size:
            header = header_at(view, at, None)
            if header is None:
                raise self._damaged(at, self.end)
            yield header, view[at + BLOCK.size : at + BLOCK.size + header.length]
            at += header.size

    @property
    def rows(self) -> int:
        """Rows that it has, by the headers of its blocks: an offset may be without one."""
        return sum(header.rows for header, _ in self.walk() if header.length)

    @property
    def is_void(self) -> bool:
        """Whether all its rows were erased."""
        return self.erased and not any(header.length for header, _ in self.walk())

    def inode(self) -> int:
        """Return the number of the file that is open for writing."""
        return self.files.fstat(self._descriptor).st_ino

    def close(self) -> None:
        """Close the file; it can still be read."""
        if self._descriptor >= 0:
            self.files.close(self._descriptor)
            self._descriptor = -1

    def index(self) -> None:
        """Walk over the headers of a sealed segment, whose `end` is known; `JournalDamaged` if some are missing or damaged."""
        if self.indexed:
            return
        view = map_file(self.files, self.path, 0, self.size)
        at, size = self.start, len(view)
        offset, offsets, positions = self.first, list[int](), list[int]()
        oldest = newest = last = 0
        while at < size:
            header = header_at(view, at, offset)
            if header is None:
                raise self._damaged(at, offset)
            if not positions or at - positions[-1] >= STRIDE:
                offsets.append(offset)
                positions.append(at)
            oldest, newest, last = oldest or header.time, max(newest, header.time), header.time
            offset += header.rows
            at += header.size
        if offset != self.end:
            raise JournalDamaged(f"ends with offset {offset}, and should with {self.end}", path=str(self.path))
        self.oldest, self.newest, self.last = oldest / 1e6, newest / 1e6, last / 1e6
        self._offsets, self._positions = offsets, positions
        self.indexed = True

    def examine(self, committed: int, promised: int = 0) -> State:
        """Check the whole segment and find the end of its good blocks; the file is not changed.

        Args:
            committed: number of the last transaction that was committed; blocks of a later one are not good.
            promised: rows before this offset are of finished appends.

        Returns:
            What follows the end: nothing, a torn tail, a damaged block (see the rules above), or blocks of a transaction or an append that was
            not finished.

        Raises:
            JournalDamaged: blocks are of a later transaction than the next one.
        """
        view = map_file(self.files, self.path, 0, self.size)
        self._clear()
        at, offset, pending = self.start, self.first, False
        begun: list[Header] = []  # blocks of an append whose last one has not come
        while at < len(view):
            header = header_at(view, at, offset)
            if header is None or not header.fits(view[at + BLOCK.size : at + BLOCK.size + header.length]):
                if pending:
                    return "unfinished"
                if not self._was_synced(view, at):
                    return "torn"
                self._note_all(begun)
                return "damaged"
            if header.transaction > committed + 1 or (pending and header.transaction <= committed):
                later = header.transaction > committed + 1
                place = f"of transaction {header.transaction}" if later else f"behind transaction {committed + 1}"
                raise JournalDamaged(
                    f"offset {offset} is {place}, but the ledger ends with {committed}: "
                    "it is older than this segment, restore the ledger of the same moment",
                    path=str(self.path),
                    offset=at,
                )
            pending = pending or header.transaction > committed
            if not pending:
                begun.append(header)
                if not header.more or header.first < promised:
                    self._note_all(begun)
            at, offset = at + header.size, offset + header.rows
        return "unfinished" if pending or begun else "whole"

    def settle(self) -> int:
        """Open an examined file for writing, and cut it at its end, unsynced; return how many bytes were cut off."""
        self.open_for_writing()
        self._checked = (self.start, self.size)
        cut = self.files.fstat(self._descriptor).st_size - self.size
        if cut:
            self.cut()
        self.publish()
        return cut

    def harden(self, promised: int) -> None:
        """Sync everything, as the first thing after `settle`.

        Rows from the offset `promised` on are rewritten before: if an earlier process failed to sync them, the system has them in memory,
        takes them for written, and would not write them now.
        """
        first = max(promised, self.first)
        at = self._before(first) if first < self.end else self.size
        while at < self.size:
            data = self.files.pread(self._descriptor, min(_ANEW, self.size - at), at)
            write_all(self.files, self._descriptor, [data], at)
            at += len(data)
        self._sync()
        self.synced = self.size

    def _clear(self) -> None:
        self.size = self.visible = self.start
        self.end, self.synced = self.first, 0
        self.oldest = self.newest = self.last = 0.0
        self._offsets, self._positions = [], []
        self.blocks = 0
        self.indexed = True

    def _was_synced(self, view: memoryview, at: int) -> bool:
        """Whether a whole block behind this position says that it had been synced."""
        found = at
        data = view.obj
        assert isinstance(data, mmap.mmap | bytes)
        while (found := data.find(BLOCK_MAGIC, found + 1)) >= 0:
            header = header_at(view, found, None)
            if (
                header is not None
                and header.synced > at
                and header.fits(view[found + BLOCK.size : found + BLOCK.size + header.length])
            ):
                return True
        return False

    def damage(self) -> JournalDamaged:
        """Return the error for a damaged block at the end."""
        return self._damaged(self.size, self.end)

    def _damaged(self, at: int, offset: int) -> JournalDamaged:
        return JournalDamaged(
            f"the block at byte {at}, offset {offset}, is damaged: restore this file from a copy, or move the journal away",
            path=str(self.path),
            offset=at,
        )

    def write(self, messages: Sequence[Message], *, transaction: int, time: float, more: bool = False) -> None:
        """Write an append behind the last block, unsynced. After an `OSError` the file must be cut.

        Args:
            messages: one for each block.
            transaction: its number; 0 for an append.
            time: seconds since 1970.
            more: the append goes on in the next segment.
        """
        parts: list[bytes | pa.Buffer] = []
        headers: list[Header] = []
        at, offset, stamp = self.size, self.end, int(time * 1e6)
        last = -1 if more else len(messages) - 1
        for place, message in enumerate(messages):
            mark = transaction if place == last else transaction + MORE
            rest = SUMMED.pack(message.rows, offset, mark, stamp, self.synced)
            length, size = message.data.size, message.size
            crc = zlib.crc32(message.data, zlib.crc32(rest, length))
            head = BLOCK.pack(BLOCK_MAGIC, length, crc, message.rows, offset, mark, stamp, self.synced)
            parts += [head, message.data, bytes(size - BLOCK.size - length)]
            headers.append(Header(at, length, crc, message.rows, offset, mark, stamp, self.synced))
            at, offset = at + size, offset + message.rows
        write_all(self.files, self._descriptor, parts, self.size)
        for header in headers:
            self._note(header)

    def _note_all(self, headers: list[Header]) -> None:
        for header in headers:
            self._note(header)
        headers.clear()

    def _note(self, header: Header) -> None:
        if not self._positions or header.at - self._positions[-1] >= STRIDE:
            self._positions.append(header.at)  # first: a reader that finds the offset finds the position
            self._offsets.append(header.first)
        self.last = header.time / 1e6
        self.oldest = self.oldest or self.last
        self.newest = max(self.newest, self.last)
        self.end = header.first + header.rows
        self.size = header.at + header.size
        self.blocks += 1

    def sync(self) -> None:
        """Sync everything written; `Uncertain` if the disk refuses."""
        if self.synced < self.size:
            self._sync()
            self.synced = self.size

    def _sync(self) -> None:
        try:
            self.files.fdatasync(self._descriptor)
        except OSError as error:
            raise Uncertain.of(error) from error

    def publish(self) -> None:
        """Show readers everything written."""
        self.visible = self.size

    def cut(self) -> None:
        """Cut off what a failed `write` left, unsynced."""
        self.files.ftruncate(self._descriptor, self.size)

    def cut_to(self, size: int, end: int) -> None:
        """Cut off the blocks from position `size`, offset `end`, on, and sync that; raises as `sync`."""
        self.open_for_writing()
        self.files.ftruncate(self._descriptor, size)
        self._sync()
        self.size = self.synced = size
        self.visible = min(self.visible, size)
        self.end = end
        while self._positions and self._positions[-1] >= size:
            self._offsets.pop()
            self._positions.pop()
        low, high = self._checked
        self._checked = (low, min(high, size))
        self._checked_alone = set()  # not those that are left: another thread may add one meanwhile
        if end == self.first:
            self.oldest = self.newest = self.last = 0.0

    def read(self, start: int, end: int, max_bytes: int, used: int) -> Iterator[Block]:
        """Yield the blocks that hold the rows from `start` up to `end` while they fit in `max_bytes`, less the bytes `used` already.

        If none are used, one block is yielded whatever its size. The segment is indexed, ``first <= start < end``, and `end` was published.

        Raises:
            JournalDamaged: the checksum of a block is wrong.
            FileNotFoundError: retention has deleted the file.
        """
        at = self._before(start)
        window = max_bytes + STRIDE
        while start < end:
            view = map_file(self.files, self.path, at, min(self.visible, at + window))
            here = 0
            while start < end:
                header = header_at(view, here, None)
                if header is None:
                    window = self._wider(view, at, here, start, window)
                    break
                last = header.first + header.rows
                if last > start:
                    if header.first > start:
                        raise self._damaged(at + here, start)
                    if used and used + header.length > max_bytes:
                        return
                    data = view[here + BLOCK.size : here + BLOCK.size + header.length]
                    self.check(header, at + here, data)
                    used += header.length
                    rows, skip = min(last, end) - start, start - header.first
                    message = pa.py_buffer(data)
                    yield Block(self.partition, start, rows, skip, message, self.schema, header.time / 1e6)
                    start += rows
                here += header.size
            at += here

    def read_at(self, places: Sequence[int], memory: KeptBlocks) -> Iterator[tuple[Block, Sequence[int]]]:
        """Yield the whole blocks that hold some rows, each with the offsets of those rows, and look at no other block. As `read` otherwise.

        Args:
            places: offsets of rows of this segment, in order.
            memory: keeps the blocks, unless the rows follow each other.
        """
        is_run = places[-1] - places[0] + 1 == len(places)
        kept = None if is_run else memory.of(self)
        if kept is not None:
            inside = bisect_left(places, self._end_within(len(kept.view)))
            yield from self._blocks_of(places[:inside], kept.view, 0, kept, memory)
            places = places[inside:]
        if places:
            start = self._before(places[0])
            behind = bisect_right(self._offsets, places[-1])
            stop = min([*self._positions[behind : behind + 1], self.visible])
            view = map_file(self.files, self.path, start, stop, whole=is_run)
            yield from self._blocks_of(places, view, start, None, memory)

    def _end_within(self, size: int) -> int:
        """Return an offset before which all rows are within the first bytes of the file: the end, or not more than `STRIDE` before the last one."""
        if size >= self.visible:
            return self.end
        before = bisect_left(self._positions, size)
        return self._offsets[before - 1] if before else self.first

    def _blocks_of(
        self, places: Sequence[int], view: memoryview, start: int, kept: Kept | None, memory: KeptBlocks
    ) -> Iterator[tuple[Block, Sequence[int]]]:
        """Yield the blocks of some rows; `start` is the position of `view` in the file."""
        place, count, at = 0, len(places), start
        while place < count:
            at = max(at, self._before(places[place]))
            at, length, rows, first, stamp = self._find(view, start, at, places[place])
            block = None if kept is None else kept.blocks.get(at)
            if block is None:
                data = view[at - start + BLOCK.size : at - start + BLOCK.size + length]
                if not self._has_checked(at) and (header := header_at(view, at - start, first)) is not None:
                    self._require_fit(header, at, data)
                    if len(self._checked_alone) >= MOST_CHECKED:
                        self._checked_alone = set()
                    self._checked_alone.add(at)
                block = Block(self.partition, first, rows, 0, pa.py_buffer(data), self.schema, stamp / 1e6)
                if kept is not None and length:
                    block = memory.add(kept, at, block)
            following = min(place + rows, count)
            # Rarely in a log of one entity: to search takes a third of the time of all this.
            if places[following - 1] >= first + rows:
                following = bisect_left(places, first + rows, place, following)
            yield block, places[place:following]
            place = following
            at += padded(BLOCK.size + length)

    def _before(self, offset: int) -> int:
        """Return the position of the last indexed block that does not begin behind an offset."""
        return self._positions[bisect_right(self._offsets, offset) - 1]

    def _find(self, view: memoryview, start: int, at: int, offset: int) -> tuple[int, int, int, int, int]:
        """Walk to the block that holds an offset; return its position, length, rows, first offset, and stamp.

        Args:
            view: bytes of the file.
            start: the position of the first of them.
            at: the position of a block before.
            offset: of a row.
        """
        # Without `header_at`: small blocks are walked over by the hundred, and that takes four times as long.
        unpack, size, stop = BLOCK.unpack_from, BLOCK.size, start + len(view)
        while at + size <= stop:
            magic, length, _, rows, first, _, stamp, _ = unpack(view, at - start)
            following = at + ((size + length + 7) & ~7)
            if magic != BLOCK_MAGIC or not rows or first > offset or following > stop:
                break
            if first + rows > offset:
                return at, length, rows, first, stamp
            at = following
        raise self._damaged(at, offset)

    def _wider(self, view: memoryview, at: int, here: int, offset: int, window: int) -> int:
        """Return how much to map from ``at + here`` on, to get the whole block that begins there."""
        size = BLOCK.size
        if here + size <= len(view):
            if view[here : here + 4] != BLOCK_MAGIC:
                raise self._damaged(at + here, offset)
            size = padded(size + BLOCK.unpack_from(view, here)[1])
        if at + here + size > self.visible or size <= len(view) - here:
            raise self._damaged(at + here, offset)
        return max(window, size)

    def _has_checked(self, at: int) -> bool:
        low, high = self._checked
        return low <= at < high or at in self._checked_alone

    def check(self, header: Header, at: int, data: memoryview) -> None:
        """Check the sum of a block at a position, unless that has been done."""
        if self._has_checked(at):
            return
        self._require_fit(header, at, data)
        low, high = self._checked
        self._checked = (low, at + header.size) if at == high else (at, at + header.size)

    def _require_fit(self, header: Header, at: int, data: memoryview) -> None:
        if not header.fits(data):
            raise self._damaged(at, header.first)

    def offset_within(self, start: int, end: int, max_bytes: int, used: int) -> tuple[int, int]:
        """Find the offset at which `read` would end; return it, and the bytes used by then."""
        at = self._before(start)
        view = map_file(self.files, self.path, at, self.visible)
        here = 0
        while start < end:
            header = header_at(view, here, None)
            if header is None:
                raise self._damaged(at + here, start)
            last = header.first + header.rows
            if last > start:
                if used and used + header.length > max_bytes:
                    break
                used += header.length
                start = min(last, end)
            here += header.size
        return start, used
