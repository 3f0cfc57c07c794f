"""Blocks of segment files: how they are made of record batches, found in a file, read and written. `segments` says how they are laid out.

Large batches are cut, and small ones share a block.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import attrs
import pyarrow as pa

from levada.framework.files import Files

from .config import JournalConfig
from .schema import joined

__all__ = [
    "BLOCK", "BLOCK_MAGIC", "MORE", "NOTHING", "SUMMED", "Block", "Header", "Message", "Uncertain", "bytes_of", "header_at", "map_file", "measured",
    "missing", "pack", "pack_with_gaps", "padded", "split_erased", "write_all",
]  # fmt: skip

BLOCK = struct.Struct("<4sIIIQQqQ")
SUMMED = struct.Struct("<IQQqQ")  # the part of a block's header under the checksum, besides the length
BLOCK_MAGIC = b"LvB1"
MORE = 1 << 63
"""Added to the transaction of a block if the append goes on in the next block."""
NOTHING = pa.py_buffer(b"")
_MOST_ROWS = 1 << 31
_MANY = 512  # buffers of one writev; systems take 1024
_COPY_BELOW = 1 << 16  # a read this small is copied in 4 µs; a mapping costs 15 µs
_COPY_WHOLE_BELOW = 8 << 20  # of which all is needed: 25 µs for each MiB; to map its pages one after the other takes 40


class Uncertain(OSError):
    """A sync or an undo failed, so what is on the disk is not known. Only opening the journal again helps.

    After a failed sync Linux takes the pages for written, and the next sync succeeds without them.
    """

    @classmethod
    def of(cls, error: OSError) -> Uncertain:
        """Make one of the error that it came from."""
        return cls(*error.args)


@attrs.frozen
class Message:
    """A record batch ready to be written, or the place of erased rows."""

    data: pa.Buffer
    """The Arrow IPC message; empty for erased rows."""
    rows: int

    @property
    def size(self) -> int:
        """Bytes on the disk, header and padding included."""
        return padded(BLOCK.size + self.data.size)

    def digest(self, before: int) -> int:
        """Return the CRC-32 of this message behind others, whose digest is `before`."""
        return zlib.crc32(self.data, before)


@attrs.frozen
class Block:
    """Some rows as they are in the file."""

    partition: int
    first: int
    """Offset of the first row asked for."""
    rows: int
    """Number of rows asked for."""
    skip: int
    """Rows of the message before `first`."""
    data: pa.Buffer
    """The whole block as an Arrow IPC message; usually a slice of the mapped file. Its schema is `schema`. Empty if its rows were erased."""
    schema: pa.Schema
    """Columns of the segment; an old segment may have fewer than the journal."""
    time: float
    """When the rows were appended, in seconds since 1970."""
    _decoded: pa.RecordBatch | None = attrs.field(default=None, repr=False, eq=False)
    """The rows, if they have been decoded."""

    @property
    def end(self) -> int:
        """The offset behind the last row."""
        return self.first + self.rows

    @property
    def erased(self) -> bool:
        """Whether the rows were erased (`EraseEntity`); only their offsets are left."""
        return not self.data.size

    def decoded(self) -> Block:
        """Return the block with its rows decoded, once for all calls of `batch`."""
        return attrs.evolve(self, decoded=self.batch())

    def batch(self) -> pa.RecordBatch:
        """Return the rows in the columns they were written with, without copying them; no rows if they were erased."""
        if self._decoded is not None:
            return self._decoded
        if self.erased:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)
        batch = pa.ipc.read_record_batch(self.data, self.schema)
        return batch if batch.num_rows == self.rows else batch.slice(self.skip, self.rows)


@attrs.frozen
class Header:
    """A block's header, and its position in the file."""

    at: int
    length: int
    checksum: int
    rows: int
    first: int
    mark: int
    """The transaction, and `MORE` if the append goes on."""
    time: int
    synced: int

    @property
    def transaction(self) -> int:
        """Number of the transaction; 0 for an append."""
        return self.mark & (MORE - 1)

    @property
    def more(self) -> bool:
        """Whether the append goes on in the next block."""
        return self.mark >= MORE

    @property
    def size(self) -> int:
        """Bytes on the disk, header and padding included."""
        return padded(BLOCK.size + self.length)

    def fits(self, data: memoryview) -> bool:
        """Whether the checksum fits these bytes of the message."""
        rest = SUMMED.pack(self.rows, self.first, self.mark, self.time, self.synced)
        return zlib.crc32(data, zlib.crc32(rest, self.length)) == self.checksum


def bytes_of(batch: pa.RecordBatch, limit: int) -> int:
    """Return the size of rows; if it is far below a limit, the size of the buffers that they are in."""
    # To measure rows takes 5 µs for 13 columns; this 1 µs, and a batch of one append is measured four times.
    whole: int = batch.get_total_buffer_size()
    return whole if whole < limit >> 4 else measured(batch)


def measured(batch: pa.RecordBatch) -> int:
    """Return the size of rows: the `nbytes` of the batch, in a fifth of its time."""
    size: int = batch.to_struct_array().nbytes
    return size


def pack(batches: Iterable[pa.RecordBatch], config: JournalConfig) -> Iterator[Message]:
    """Make messages of batches that have the journal's columns, none larger than a block."""
    run: list[pa.RecordBatch] = []
    rows = total = 0
    for batch in batches:
        for piece in _pieces(batch, config):
            size = bytes_of(piece, config.block_bytes)
            if run and (rows + piece.num_rows > config.block_rows or total + size > config.block_bytes):
                yield _message(run)
                run, rows, total = [], 0, 0
            run.append(piece)
            rows += piece.num_rows
            total += size
    if run:
        yield _message(run)


def _pieces(batch: pa.RecordBatch, config: JournalConfig) -> Iterator[pa.RecordBatch]:
    rows, limit = batch.num_rows, config.block_bytes
    size = bytes_of(batch, limit)
    if rows <= config.block_rows and (size <= limit or rows == 1):
        yield batch
        return
    step = max(1, min(config.block_rows, rows * limit // max(size, 1), (rows + 1) // 2))
    for start in range(0, rows, step):
        yield from _pieces(batch.slice(start, step), config)


def _message(run: list[pa.RecordBatch]) -> Message:
    batch = joined(run)
    return Message(batch.serialize(), batch.num_rows)


def split_erased(batch: pa.RecordBatch, gone: Sequence[bool]) -> Iterator[Message]:
    """Yield the runs of rows that stay, and of those that go."""
    at = 0
    for erased, run in groupby(gone):
        rows = sum(1 for _ in run)
        # Not a slice: that could take bytes beside its rows along.
        kept = None if erased else batch.take(pa.array(range(at, at + rows), pa.int64()))
        yield Message(NOTHING if kept is None else kept.serialize(), rows)
        at += rows


def missing(rows: int) -> Iterator[Message]:
    """Yield messages for offsets without rows, which may be many."""
    while rows > 0:
        yield Message(NOTHING, min(rows, _MOST_ROWS))
        rows -= _MOST_ROWS


def pack_with_gaps(
    places: Sequence[int], rows: pa.RecordBatch | None, at: int, end: int, config: JournalConfig
) -> Iterator[Message]:
    """Make messages of rows with these offsets, and of the gaps between `at` and `end`."""
    done = 0
    while rows is not None and done < len(places):
        yield from missing(places[done] - at)
        count = len(places) - done
        if places[-1] - places[done] != count - 1:
            count = next(n for n in range(1, count) if places[done + n] != places[done] + n)
        yield from pack([rows.slice(done, count)], config)
        at, done = places[done] + count, done + count
    yield from missing(end - at)


def padded(size: int) -> int:
    """Return the next multiple of 8."""
    return (size + 7) & ~7


def header_at(view: memoryview, at: int, offset: int | None) -> Header | None:
    """Read the header at a position; None if there is none, it is not for `offset`, or its block is not whole."""
    if at + BLOCK.size > len(view):
        return None
    magic, length, crc, rows, first, mark, time, synced = BLOCK.unpack_from(view, at)
    if magic != BLOCK_MAGIC or at + padded(BLOCK.size + length) > len(view) or not rows:
        return None
    if offset is not None and first != offset:
        return None
    return Header(at, length, crc, rows, first, mark, time, synced)


def map_file(files: Files, path: Path, start: int, stop: int, *, whole: bool = False) -> memoryview:
    """Map some bytes of a file, or copy them if they are few, or not many and needed as a whole. A slice keeps the mapping alive."""
    descriptor = files.open(path, os.O_RDONLY)
    try:
        if stop - start <= (_COPY_WHOLE_BELOW if whole else _COPY_BELOW):
            return memoryview(files.pread(descriptor, stop - start, start))
        base = start - start % mmap.ALLOCATIONGRANULARITY
        return memoryview(files.map(descriptor, stop - base, base))[start - base :]
    finally:
        files.close(descriptor)


def write_all(files: Files, descriptor: int, parts: Sequence[bytes | memoryview | pa.Buffer], at: int) -> None:
    """Write all bytes to a place in a file."""
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        written = files.pwritev(descriptor, views[:_MANY], at)
        at += written
        done = 0
        while done < len(views) and written >= len(views[done]):
            written -= len(views[done])
            done += 1
        del views[:done]
        if written:
            views[0] = views[0][written:]
