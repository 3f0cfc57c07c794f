"""Logs that stand still: the rows of one moment, for those who read a log from the beginning to the end.

A journal that a process has open is pinned as for a `backup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pyarrow as pa

from levada.framework.files import Files
from levada.framework.platform import Platform

from .copying import errors_of, pinned_files, require_whole, write_pinned
from .inspection import Inspection, inspect
from .pinning import Pin
from .places import Archived
from .schema import joined, offsets

if TYPE_CHECKING:
    from .store import Store

__all__ = ["PAGE_BYTES", "PAGE_ROWS", "StillLog", "still_folder", "still_journal", "still_store"]

PAGE_ROWS, PAGE_BYTES = 16_384, 4 << 20
"""The most rows of a page, and about its most bytes, but for a single row."""


@attrs.frozen
class StillLog:
    """The rows of a log at one moment."""

    epoch: str
    """The name of the log."""
    copy_of: str | None
    """The log that it is a copy of, if the copy is not whole."""
    columns: pa.Schema
    """The columns of its rows."""
    ends: Mapping[int, int]
    """For each shard, the offset behind the last row."""
    trimmed: Mapping[int, int]
    """As `Extent.trimmed`."""
    archives: Mapping[int, Archived]
    """Where its old rows are, for shards that have an archive."""
    pages: Callable[[int, int, int], Iterator[pa.RecordBatch]] = attrs.field(repr=False)
    """Yields the rows of a shard between two offsets, in order: a column ``offset``, then the columns of the log. Blocks."""


@contextmanager
def still_journal(platform: Platform, journal: Path, timeout: float) -> Iterator[Inspection]:
    """Have a journal stand still for a block. A process that has it open goes on meanwhile. Blocks; raises as `backup`."""
    with ExitStack() as resources:
        pin = pinned_files(platform, timeout, journal, resources)
        if pin.folder != journal:
            _cut(platform.files, pin)
        with errors_of(pin.folder, journal):
            found = resources.enter_context(inspect(pin.folder))
            require_whole(found)
            yield found


def _cut(files: Files, pin: Pin) -> None:
    """Make a pin a journal of its own: the last segment of each partition, to which the writer appends, becomes a copy."""
    last = {name.partition("/")[0]: name for name in sorted(pin.sizes) if name.endswith(".segment")}
    for name in last.values():
        segment = pin.folder / name
        beside = segment.with_suffix(".new")
        write_pinned(files, segment, pin.sizes[name], beside, lambda _: None)
        files.rename(beside, segment)


def _pages(batches: Iterable[tuple[int, pa.RecordBatch]], end: int) -> Iterator[pa.RecordBatch]:
    page, rows, size = list[pa.RecordBatch](), 0, 0
    for first, batch in batches:
        if first >= end:
            break
        here = batch.slice(0, end - first)
        if page and (rows + here.num_rows > PAGE_ROWS or size + here.nbytes > PAGE_BYTES):
            yield joined(page)
            page, rows, size = [], 0, 0
        page.append(here.add_column(0, _OFFSET, offsets(first, here.num_rows)))
        rows, size = rows + here.num_rows, size + here.nbytes
    if page:
        yield joined(page)


_OFFSET = pa.field("offset", pa.int64(), nullable=False)


@contextmanager
def still_folder(platform: Platform, journal: Path, timeout: float) -> Iterator[StillLog]:
    """Have a journal stand still for a block, as a `StillLog`. Blocks; raises as `backup`."""
    with still_journal(platform, journal, timeout) as found:
        ledger, ends = found.ledger, {each.number: each.end for each in found.partitions}

        def pages(shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
            return _pages(found.batches(shard, start), end)

        yield StillLog(found.epoch, ledger.copy_of, found.schema, ends, ledger.trimmed, ledger.archives, pages)


def still_store(store: Store) -> StillLog:
    """Return the rows of a journal that this process has open, up to where it ends now. They stand still while none are trimmed or erased."""
    extent = store.extent()

    def pages(shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return _pages(store.batches(shard, start, end), end)

    return StillLog(extent.epoch, None, store.schema, extent.end, extent.trimmed, store.archives, pages)
