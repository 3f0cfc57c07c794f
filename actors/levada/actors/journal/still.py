"""Logs that stand still: the rows of one moment, for those who read a log from the beginning to the end.

A journal that a process has open is pinned as for a `backup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs
import pyarrow as pa

from levada.framework.files import Files
from levada.framework.platform import Platform

from .copying import errors_of, pinned_files, require_whole, write_pinned
from .inspection import Inspection, inspect
from .pinning import Pin
from .schema import joined, offsets

if TYPE_CHECKING:
    from .extent import Extent
    from .store import Store

__all__ = ["PAGE_BYTES", "PAGE_ROWS", "StillLog", "still_folder", "still_journal", "still_store"]

PAGE_ROWS, PAGE_BYTES = 16_384, 4 << 20
"""The most rows of a page, and about its most bytes, but for a single row."""


class StillLog(Protocol):
    """The rows of a log at one moment."""

    @property
    def epoch(self) -> str:
        """The name of the log."""
        ...

    @property
    def copy_of(self) -> str | None:
        """The log that it is a copy of, if the copy is not whole."""
        ...

    @property
    def columns(self) -> pa.Schema:
        """The columns of its rows."""
        ...

    @property
    def ends(self) -> Mapping[int, int]:
        """For each shard, the offset behind the last row."""
        ...

    @property
    def trimmed(self) -> Mapping[int, int]:
        """As `Extent.trimmed`."""
        ...

    def pages(self, shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard between two offsets, in order: a column ``offset``, then the columns of the log. Blocks."""
        ...


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


@attrs.frozen
class _StillFolder:
    """A journal that stands still."""

    found: Inspection

    @property
    def epoch(self) -> str:
        return self.found.epoch

    @property
    def copy_of(self) -> str | None:
        return self.found.ledger.copy_of

    @property
    def columns(self) -> pa.Schema:
        return self.found.schema

    @property
    def ends(self) -> Mapping[int, int]:
        return {each.number: each.end for each in self.found.partitions}

    @property
    def trimmed(self) -> Mapping[int, int]:
        return self.found.ledger.trimmed

    def pages(self, shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return _pages(self.found.batches(shard, start), end)


@attrs.frozen
class _StillStore:
    """A journal that this process has open."""

    store: Store
    extent: Extent

    @property
    def epoch(self) -> str:
        return self.extent.epoch

    @property
    def copy_of(self) -> str | None:
        return None  # else it would not be open

    @property
    def columns(self) -> pa.Schema:
        return self.store.schema

    @property
    def ends(self) -> Mapping[int, int]:
        return self.extent.end

    @property
    def trimmed(self) -> Mapping[int, int]:
        return self.extent.trimmed

    def pages(self, shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return _pages(self.store.batches(shard, start, end), end)


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
        yield _StillFolder(found)


def still_store(store: Store) -> StillLog:
    """Return the rows of a journal that this process has open, up to where it ends now. They stand still while none are trimmed or erased."""
    return _StillStore(store, store.extent())
