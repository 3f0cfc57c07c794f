"""`export`: rows of a journal as one file that other programs read."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files, StrPath, folder_path
from levada.framework.platform import PLATFORM
from levada.framework.text import finite

from .archive import Archive
from .blocks import write_all
from .copying import Progress, synced_file
from .errors import refusals
from .inspection import Inspection, journal_path, journals_in
from .log_events import event_columns, events_of
from .places import archive_place
from .schema import offsets
from .still import still_journal

__all__ = ["ExportFormat", "Exported", "export"]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

ExportFormat: TypeAlias = Literal["arrow", "csv", "parquet"]
"""Kinds of files: an Arrow IPC file (also called Feather), CSV with a header, Parquet."""
Write: TypeAlias = Callable[[pa.Table], object]

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_ROWS = 1 << 16
_BYTES = 32 << 20
"""Rows and bytes that are written at a time: a row group of Parquet, a batch of Arrow."""


@attrs.frozen(kw_only=True)
class Exported:
    """A file with rows of a journal."""

    path: Path
    rows: int
    size: int
    """Bytes of the file."""
    epoch: str
    """The name of the journal, see `Extent.epoch`."""
    opening: str
    """The newest opening, see `Extent.opening`."""
    end: Mapping[int, int]
    """For each partition that was read, the offset behind the last row: the next export may start there."""


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: ExportFormat | None = None,
    partition: int | None = None,
    start: int = 0,
    end: int | None = None,
    events: bool = False,
    archive: StrPath | None = None,
    timeout: float = 30.0,
    progress: Progress | None = None,
) -> Exported:
    """Write rows of a journal to a file. Blocks; call it in a thread.

    The file has the columns ``partition`` and ``offset``, and then the journal's, with their types. If the journal has a column of that name,
    the first two are called ``_partition`` and ``_offset``. Rows are in the order of partition and offset. Erased and lost rows are left out.

    CSV has no types: bytes are written in base64, durations in seconds, and lists, maps and nested messages as JSON.

    A journal that a process has open is read as it is at one moment, as `backup` does it.

    Args:
        source: the journal.
        target: the new file; the folder must be there.
        format: None: by the suffix of `target`, ``.arrow``, ``.feather``, ``.csv`` or ``.parquet``.
        partition: None: all.
        start: offset of the first row, in each partition.
        end: offset behind the last row; None: all.
        events: write only the events of a log of durable actors, without the columns that only levada needs.
        archive: where the trimmed rows of the log are, see `levada.actors.durable.Keep`: they are written too. None: there is no archive.
        timeout: seconds to wait for a process that has the journal open.
        progress: called with the rows that were read, and with all rows of the range.

    Returns:
        The file, its size, and where its rows end.

    Raises:
        ConfigurationError: there is no journal in `source`, or there are several; `target` is there; `format` is unknown or cannot hold a column;
            there are no such rows; or with `events`, the journal is no log of durable actors.
        JournalLocked, JournalDamaged, JournalFull, JournalUnwritable, OSError: as `backup`.
        JournalError: the archive is out of reach.

    If this raises, there is nothing at `target`.
    """
    platform = PLATFORM.get()
    path = folder_path(target)
    kind = _format_of(path) if format is None else format
    if kind not in _ENCODERS:
        wanted = "arrow, csv or parquet, as the end of its name or as the format"
        raise ConfigurationError(f"the format of {path.name} is {kind!r}, wanted {wanted}")
    if platform.files.is_taken(path):
        raise ConfigurationError(f"{path} is there. Nothing is overwritten: move it away, or name another file")
    if not platform.files.exists(path.parent):
        raise ConfigurationError(f"there is no folder {path.parent} for {path.name}: make it first")
    journal = journal_path(source)
    if journals_in(journal) != [journal]:
        raise ConfigurationError(f"{journal} is not a journal: name a folder that has a ledger.sqlite")
    with still_journal(platform, journal, timeout) as found:
        _check_range(found, partition, start, end)
        numbers = range(len(found.partitions)) if partition is None else [partition]
        stops = {n: found.partitions[n].end if end is None else min(end, found.partitions[n].end) for n in numbers}
        columns = event_columns(found.schema) if events else found.schema
        table = _Table(columns)
        archived = None if archive is None else Archive.at(archive_place(archive), platform.files)
        whole = sum(max(0, stop - max(start, 0 if archived else _first(found, n))) for n, stop in stops.items())
        with _written(platform.files, path) as out, _encoded(out, table.schema, kind, path) as write:
            rows = read = 0
            for number, first, batch in _rows(found, stops, start, archived):
                read += batch.num_rows
                for part in table.add(number, first, batch, events=events):
                    rows += part.num_rows
                    write(part)
                if progress is not None:
                    progress(read, whole)
            for part in table.rest():
                rows += part.num_rows
                write(part)
        size, opening = out.tell(), found.ledger.opening
        return Exported(path=path, rows=rows, size=size, epoch=found.epoch, opening=opening, end=stops)


def _format_of(path: Path) -> str:
    suffix = path.suffix.removeprefix(".").lower()
    return "arrow" if suffix == "feather" else suffix


def _check_range(found: Inspection, partition: int | None, start: int, end: int | None) -> None:
    count = len(found.partitions)
    if partition is not None and not 0 <= partition < count:
        raise ConfigurationError(f"the partition is {partition}, wanted 0 to {count - 1}")
    if start < 0 or (end is not None and end < start):
        raise ConfigurationError(f"the range is {start} to {end}, wanted offsets from 0 on, the smaller one first")


def _first(found: Inspection, number: int) -> int:
    partition = found.partitions[number]
    return partition.first if partition.segments else 0


def _rows(
    found: Inspection, stops: Mapping[int, int], start: int, archive: Archive | None
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    for number, stop in stops.items():
        begin = end = start
        if archive is not None:
            end = max(start, min(stop, found.ledger.trimmed.get(number, 0)))
            begin = max(start, archive.first(number, end))
        yield from _hot_rows(found, number, start, begin)
        if archive is not None:
            for first, batch in archive.rows(number, begin, end, found.schema):
                yield number, first, batch
        yield from _hot_rows(found, number, end, stop)


def _hot_rows(found: Inspection, number: int, start: int, stop: int) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    for first, batch in found.batches(number, start):
        if first >= stop:
            break
        yield number, first, batch.slice(0, stop - first)


class _Table:
    """Collects rows until they are enough to be written."""

    def __init__(self, columns: pa.Schema) -> None:
        names = ["_" + name if name in columns.names else name for name in ("partition", "offset")]
        if taken := {*names} & {*columns.names}:
            raise ConfigurationError(f"the journal has columns that an export adds: {', '.join(sorted(taken))}")
        places = [pa.field(names[0], pa.int32(), nullable=False), pa.field(names[1], pa.int64(), nullable=False)]
        self.schema = pa.schema([*places, *(field.remove_metadata() for field in columns)])
        self._parts: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, number: int, first: int, batch: pa.RecordBatch, *, events: bool) -> Iterator[pa.Table]:
        """Add rows; yield those that are to be written."""
        placed = batch.append_column("", offsets(first, batch.num_rows))
        if events:
            placed = events_of(placed)
        *columns, places = placed.columns
        numbers = pa.repeat(pa.scalar(number, pa.int32()), placed.num_rows)
        self._parts.append(pa.RecordBatch.from_arrays([numbers, places, *columns], schema=self.schema))
        self._rows += placed.num_rows
        self._bytes += placed.nbytes
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.Table]:
        """Yield the rows that are left."""
        if self._rows:
            yield pa.Table.from_batches(self._parts, self.schema)
        self._parts, self._rows, self._bytes = [], 0, 0


class _Out:
    """A new file as Arrow writes it: unbuffered, and in order."""

    closed = False
    mode = "wb"

    def __init__(self, files: Files, descriptor: int, path: Path) -> None:
        self._files = files
        self._descriptor = descriptor
        self._path = path
        self._at = 0

    def write(self, data: Any) -> int:
        """Write bytes; `JournalFull` or `JournalUnwritable` if the disk refuses."""
        view = memoryview(data).cast("B")
        with refusals(self._path):
            write_all(self._files, self._descriptor, [view], self._at)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes there are."""
        return self._at

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Do nothing: the file is closed by those who opened it."""

    def readable(self) -> bool:
        """It is only written."""
        return False

    def writable(self) -> bool:
        """It is only written."""
        return True

    def seekable(self) -> bool:
        """It is only written in order."""
        return False


@contextmanager
def _written(files: Files, path: Path) -> Iterator[_Out]:
    """Write to a partial file, which gets its name at the end of the block, once it is on the disk; after an error it is removed."""
    aside = path.with_name(path.name + ".partial")
    with refusals(aside):
        files.discard(aside)  # of an export that was killed
    try:
        with synced_file(files, aside) as descriptor:
            yield _Out(files, descriptor, aside)
        with refusals(path):
            files.rename(aside, path)
    except BaseException:
        with suppress(OSError):
            files.discard(aside)
        raise
    with suppress(PermissionError):  # a folder that this user may write to and not read cannot be synced
        files.sync_folder(path.parent)


@contextmanager
def _parquet(sink: pa.PythonFile, columns: pa.Schema) -> Iterator[Write]:
    with pyarrow.parquet.ParquetWriter(sink, columns, compression="zstd") as parquet:
        yield parquet.write_table


@contextmanager
def _arrow(sink: pa.PythonFile, columns: pa.Schema) -> Iterator[Write]:
    with pa.ipc.new_file(sink, columns) as arrow:
        yield arrow.write_table


@contextmanager
def _csv(sink: pa.PythonFile, columns: pa.Schema) -> Iterator[Write]:
    with pyarrow.csv.CSVWriter(sink, pa.schema([_plain_field(field) for field in columns])) as csv:
        yield lambda rows: csv.write_table(_plain(rows))


_ENCODERS: Mapping[str, Callable[[pa.PythonFile, pa.Schema], AbstractContextManager[Write]]] = {
    "arrow": _arrow,
    "csv": _csv,
    "parquet": _parquet,
}
"""For each format, what yields a function that writes rows."""


@contextmanager
def _encoded(out: _Out, columns: pa.Schema, kind: str, path: Path) -> Iterator[Write]:
    try:
        with _ENCODERS[kind](pa.PythonFile(out, mode="w"), columns) as write:
            yield write
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise ConfigurationError(
            f"{path}: {kind} cannot hold these columns ({error}): choose another format"
        ) from error


def _plain_field(field: pa.Field) -> pa.Field:
    """Return the column of CSV for a column."""
    if pa.types.is_duration(field.type):
        return pa.field(field.name, pa.float64(), nullable=field.nullable)
    return field if _is_plain(field.type) else pa.field(field.name, pa.string(), nullable=field.nullable)


def _is_plain(kind: pa.DataType) -> bool:
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return not (is_bytes or pa.types.is_nested(kind) or pa.types.is_duration(kind))


def _plain(rows: pa.Table) -> pa.Table:
    """Return rows in the columns of CSV."""
    columns, fields = [], [_plain_field(field) for field in rows.schema]
    for column, field in zip(rows.columns, rows.schema, strict=True):
        if pa.types.is_duration(field.type):
            # Not by way of Python, whose durations have no nanoseconds.
            column = pc.divide(column.cast(pa.int64()).cast(pa.float64(), safe=False), float(_UNITS[field.type.unit]))
        elif not _is_plain(field.type):
            column = pa.array([None if each is None else _text(each) for each in column.to_pylist()], pa.string())
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _text(value: Any) -> str:
    return (
        _in_json(value) if isinstance(value, bytes) else json.dumps(finite(value), default=_in_json, ensure_ascii=False)
    )


def _in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else str(value)
