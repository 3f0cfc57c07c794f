"""`Archive`: the old rows of a log of durable actors, in plain Parquet files that other programs read too.

``shard-3/00000000000000000000-00000000000000131072.parquet`` has all rows of entities of shard 3 with offsets from 0 to 131071, sorted by entity.
Rows are in the archive before the first of them leaves the log, and `Extent.trimmed` is moved in between. So a reader looks at that mark first, takes
the rows before it from the archive and the rest from the log, and where rows are missing from the log it looks again: what went meanwhile is in the
archive by then. No row comes twice, because each offset is read in one place; and a crash leaves rows in the log, or in both, and never in neither.

Log and archive are changed by one process at a time: the caller sees to it. A shard's own rows, such as reminders, are not archived.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import attrs
import pyarrow as pa
import pyarrow.compute
import pyarrow.fs
import pyarrow.parquet

from levada.framework.files import Files

from .blocks import write_all
from .copying import synced_file
from .errors import JournalError, JournalUnwritable, OffsetGone, refusals
from .places import Archived, is_url, misplaced, shown
from .questions import EraseEntity, TrimRows
from .schema import fit
from .still import StillLog, still_store

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Archive", "archived_rows"]

logger = logging.getLogger("levada.actors.journal")

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

FILE_BYTES: Final = 64 << 20
"""Bytes of rows in memory after which a file ends: a reader takes a whole file at a time."""
PIECE_BYTES: Final = 4 << 20
"""Bytes of rows that are read at a time; one row is whatever its size."""
_GROUP: Final = 16_384
"""Rows of a row group: to read one entity, programs read the groups that may have it."""
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.parquet")
_from_uri: Final = pyarrow.fs.FileSystem.from_uri
_LONGEST: Final = 400
"""The most characters of an error of Arrow."""
_TRIED_FOR: Final = 10
"""Seconds for which a request to Google's storage is tried again, unless the URL has ``retry_limit_seconds``."""
_ATOMIC: Final = ("abfs", "gcs", "s3")
"""File systems whose files get their names when all bytes are there."""


@attrs.frozen(order=True)
class ArchiveFile:
    """A file of an archive, by its name."""

    start: int
    end: int
    """The offset behind its last row."""

    @property
    def name(self) -> str:
        """Its name in the folder of the shard."""
        return f"{self.start:020}-{self.end:020}.parquet"


class _Disk(Protocol):
    """Where the files of an archive are. The methods raise `JournalError` if it is out of reach."""

    @property
    def shown(self) -> str:
        """Where it is, without what may be secret."""
        ...

    def names(self, folder: str) -> Sequence[str]: ...

    def keep_names(self, folder: str) -> None:
        """Bring what `names` says to the disk: a process may have been killed when it had given a file its name in memory only."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: pa.Buffer) -> None:
        """Write a file as a whole: it is on the disk with all its bytes when this returns, and otherwise as it was before."""
        ...


@attrs.frozen
class FolderFiles:
    """A folder of this machine."""

    files: Files
    path: Path

    @property
    def shown(self) -> str:
        return str(self.path)

    def names(self, folder: str) -> Sequence[str]:
        with _errors(self.shown):
            return [path.name for path in self.files.glob(self.path / folder, "*.parquet")]

    def keep_names(self, folder: str) -> None:
        with refusals(self.path / folder):
            self.files.sync_folder(self.path / folder)

    def read(self, name: str) -> bytes:
        with _errors(self.shown):
            return self.files.read(self.path / name)

    def write(self, name: str, data: pa.Buffer) -> None:
        files, path = self.files, self.path / name
        with refusals(path):
            files.make_durable_folder(path.parent)
            for left in files.glob(path.parent, "*.partial"):  # of a process that was killed
                files.discard(left)
        aside = path.with_name(path.name + ".partial")
        try:
            with synced_file(files, aside) as descriptor, refusals(path):
                write_all(files, descriptor, [data], 0)
            with refusals(path):
                files.rename(aside, path)
        except BaseException:
            with refusals(aside):
                files.discard(aside)
            raise
        with refusals(path):
            files.sync_folder(path.parent)


@attrs.frozen
class RemoteFiles:
    """A file system of Arrow."""

    system: pyarrow.fs.FileSystem
    path: str
    shown: str

    def names(self, folder: str) -> Sequence[str]:
        selected = pyarrow.fs.FileSelector(f"{self.path}/{folder}", allow_not_found=True)
        with _errors(self.shown):
            return [each.base_name for each in self.system.get_file_info(selected)]

    def keep_names(self, folder: str) -> None:
        """Do nothing: a file system of Arrow has no such call."""

    def read(self, name: str) -> bytes:
        with _errors(self.shown), self.system.open_input_file(f"{self.path}/{name}") as file:
            data: bytes = file.read()  # at once, so that a file that is replaced meanwhile is read before or after
            return data

    def write(self, name: str, data: pa.Buffer) -> None:
        path = f"{self.path}/{name}"
        aside = path if self.system.type_name in _ATOMIC else f"{path}.partial"
        with _errors(self.shown):
            if aside != path:
                self.system.create_dir(path.rpartition("/")[0], recursive=True)
            with self.system.open_output_stream(aside) as file:
                file.write(data)
            if aside != path:
                self.system.move(aside, path)
            size = self.system.get_file_info(path).size
        if size != data.size:
            raise JournalUnwritable(f"a file of {data.size} bytes has {size} in the archive", path=self.shown)


@contextmanager
def _errors(shown: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise JournalError(f"the archive is out of reach: {_cut(error)}", path=shown) from error


def _cut(error: BaseException) -> str:
    """Return the text of an error of Arrow, which may name each of a hundred places where a library is not."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _patiently(place: str) -> str:
    """Return a URL with an end of the attempts to reach it: Google's library goes on for a quarter of an hour."""
    url = urlsplit(place)
    if url.scheme not in ("gs", "gcs") or "retry_limit_seconds" in url.query:
        return place
    query = f"{url.query}&" if url.query else ""
    return url._replace(query=f"{query}retry_limit_seconds={_TRIED_FOR}").geturl()


@attrs.frozen
class Archive:
    """The archive of a log. Its methods block."""

    disk: _Disk

    @classmethod
    def at(cls, place: str, files: Files) -> Archive:
        """Return the archive at a place, which `archive_place` has checked; nothing is read.

        Raises:
            JournalError: it is out of reach, or Arrow has no such kind of file system.
        """
        if not is_url(place):
            return cls(FolderFiles(files, Path(place)))
        try:
            system, path = _from_uri(_patiently(place))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ImportError) as error:
            what = f"an archive is a folder, or a URL that Arrow knows, such as s3://bucket/accounts ({_cut(error)})"
            raise JournalError(what, path=shown(place)) from error
        except OSError as error:
            raise JournalError(f"the archive is out of reach: {_cut(error)}", path=shown(place)) from error
        if system.type_name == "mock":
            raise JournalError(
                "this archive would be in memory: name a folder, or a URL such as s3://bucket/accounts",
                path=shown(place),
            )
        if isinstance(system, pyarrow.fs.LocalFileSystem):
            return cls(FolderFiles(files, Path(path)))
        return cls(RemoteFiles(system, path.rstrip("/"), shown(place)))

    def files(self, shard: int) -> list[ArchiveFile]:
        """Return the files of a shard, in their order."""
        found = filter(None, map(_NAME.fullmatch, self.disk.names(_folder(shard))))
        return sorted(ArchiveFile(int(each[1]), int(each[2])) for each in found)

    def first(self, shard: int, end: int) -> int:
        """Return the offset from which on the archive has all rows before `end`; `end` if it has none of them."""
        for each in reversed(self.files(shard)):
            if each.start < end <= each.end:
                end = each.start
        return end

    def start(self, log: StillLog, shard: int) -> int:
        """Return the offset of the first row of a shard that is to be archived next.

        Args:
            log: its trimmed rows are in this archive, or in none.
            shard: its number.

        Raises:
            JournalError: this is the archive of another log, it lacks files, or is out of reach.
        """
        files = self._files_of(shard, log.archives.get(shard))
        self._require_same(log, shard, files)
        begun = files[-1].end if files else 0
        start = max(begun, log.trimmed.get(shard, 0))
        if start > begun:
            text = "%s: rows %d to %d of shard %d were trimmed without this archive, and are not in it; if it has files elsewhere, move them here"
            logger.warning(text, self.disk.shown, begun, start - 1, shard, extra={"event": "archive_gap"})
        return start

    def add(self, log: StillLog, shard: int, start: int, older: float) -> int:
        """Write the rows of a shard that are not in the archive yet.

        Args:
            log: where they are.
            shard: its number.
            start: as `start` says.
            older: seconds since 1970. The first row with this time or a later one is not written, nor are those behind it.

        Returns:
            The offset before which all rows are in the archive, or were trimmed without it.

        Raises:
            JournalError: it is out of reach, or Parquet cannot hold the columns.
            JournalFull, JournalUnwritable: the disk of the archive does not take them. Files that are whole stay.
        """
        at = start
        end, micros = log.ends[shard], int(older * 1e6)
        parts, size, last = list[pa.RecordBatch](), 0, b""
        for page in log.pages(shard, start, end):
            young = pc.index(pc.less(page.column("time").cast(pa.int64()), micros), pa.scalar(value=False)).as_py()
            old = page if young < 0 else page.slice(0, young)
            if old.num_rows:
                at, last = old.column("offset")[-1].as_py() + 1, _mark_of(old)
                parts.append(old.filter(pc.not_equal(old.column("entity"), "")))
                size += parts[-1].nbytes
            if young >= 0:
                break
            if size >= FILE_BYTES:
                self._write(shard, ArchiveFile(start, at), _stored(parts, shard, last))
                start, parts, size = at, [], 0
        if at > start:
            self._write(shard, ArchiveFile(start, at), _stored(parts, shard, last))
        return at

    def rows(self, shard: int, start: int, end: int, columns: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield rows in the order of offsets: runs without gaps, each with the offset of its first row. Erased rows are left out.

        Args:
            shard: its number.
            start: offset of the first row.
            end: offset behind the last one.
            columns: of the log; columns that are younger than a row have their defaults, or null.

        Raises:
            OffsetGone: a part of these rows is in no file.
            JournalError: the archive is out of reach.
        """
        for file in self.files(shard):
            if start < file.end and start < end:
                if file.start > start:
                    break
                stop = min(end, file.end)
                table = self._read(shard, file)
                places = table.column("_offset")
                table = table.filter(pc.and_(pc.greater_equal(places, start), pc.less(places, stop)))
                yield from _runs(table.sort_by("_offset"), columns)
                start = stop
        if start < end:
            raise OffsetGone(
                f"row {start} of shard {shard} is neither in the log nor in its archive, {self.disk.shown}: it was trimmed without the archive, "
                "or files are missing from it",
                partition=shard, wanted=start, first=end,
            )  # fmt: skip

    def erase(self, log: StillLog, shard: int, m: EraseEntity) -> None:
        """Write the files of a shard anew that have rows of an entity. Raises as `start` and `add`."""
        entity = m.entity if isinstance(m.entity, str) else m.entity.decode()
        files = self._files_of(shard, log.archives.get(shard))
        self._require_same(log, shard, files, but=entity)
        for file in files:
            before = file.end if m.before is None else m.before
            if file.start < before:
                table = self._read(shard, file)
                gone = pc.and_(pc.equal(table.column("entity"), entity), pc.less(table.column("_offset"), before))
                if pc.any(gone).as_py():
                    self._write(shard, file, table.filter(pc.invert(gone)))

    def _files_of(self, shard: int, known: Archived | None) -> list[ArchiveFile]:
        """Return the files of a shard, which are on the disk; require that they have what the log remembers."""
        files = self.files(shard)
        if files:
            self.disk.keep_names(_folder(shard))
        end = files[-1].end if files else 0
        if known is not None and end < known.end:
            raise JournalError(
                f"rows of shard {shard} are archived up to {known.end - 1}, in {shown(known.place)}, and the files here end before row {end}: mount "
                "the archive, or move its files here; or, if they are gone for good, levada journal trim --forget-archive",
                path=self.disk.shown,
            )
        return files

    def _require_same(self, log: StillLog, shard: int, files: Sequence[ArchiveFile], *, but: str = "") -> None:
        """Require that the log has the last row that there was when the archive ended with it, if it was neither trimmed nor erased.

        It may be a row of the shard's own. If it was erased, or levada 0.2 wrote the file, the newest row in the archive that is not of an entity
        stands for it.
        """
        if files and (last := files[-1].end - 1) >= log.trimmed.get(shard, 0):
            if last >= log.ends[shard]:
                raise self._not_same(shard, last)
            mark = (self._read(shard, files[-1]).schema.metadata or {}).get(_LAST)
            for row in log.pages(shard, last, last + 1) if mark is not None else ():
                if mark != _mark_of(row):
                    raise self._not_same(shard, last)
                return
        for file in reversed(files):  # all rows of a file may be erased
            table = self._read(shard, file)
            newest = pc.max(table.filter(pc.not_equal(table.column("entity"), but)).column("_offset")).as_py()
            if newest is not None:
                break
        else:
            return
        if newest < log.trimmed.get(shard, 0):
            return
        there = log.pages(shard, newest, newest + 1) if newest < log.ends[shard] else ()
        mine = table.filter(pc.equal(table.column("_offset"), newest)).select(_COMPARED).to_pylist()
        theirs = [row for page in there for row in page.select(_COMPARED).to_pylist()]
        if mine != theirs:
            raise self._not_same(shard, newest)

    def _not_same(self, shard: int, offset: int) -> JournalError:
        return JournalError(
            f"row {offset} of shard {shard} is another one in the log, or missing: this is the archive of another log, an older copy of the log "
            'was put back, or the row was erased without this archive; see the page "Trim and archive a log"',
            path=self.disk.shown,
        )

    def _read(self, shard: int, file: ArchiveFile) -> pa.Table:
        data = self.disk.read(f"{_folder(shard)}/{file.name}")
        with _errors(f"{self.disk.shown}/{_folder(shard)}/{file.name}"):
            # Without threads: a program that ends while Arrow's threads hold Python's bytes may be aborted.
            return pyarrow.parquet.ParquetFile(pa.BufferReader(data)).read(use_threads=False)

    def _write(self, shard: int, file: ArchiveFile, rows: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        try:
            pyarrow.parquet.write_table(rows, sink, compression="zstd", row_group_size=_GROUP)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise JournalError(f"Parquet cannot hold these columns ({error})", path=self.disk.shown) from error
        self.disk.write(f"{_folder(shard)}/{file.name}", sink.getvalue())


T = TypeVar("T")
Run = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs a function in a thread of its own choice."""


async def archived_rows(store: Store, m: TrimRows, files: Files, read: Run[Any], write: Run[Any]) -> list[range]:
    """Return what `Store.rows_to_go` does, without the rows that are not in the archive; old ones are written to it first.

    Rows of the shard are not erased meanwhile, and no other call writes to the archive. The log remembers the archive before its first file is there,
    and as soon as it is named: so backups from before that file do too.

    Args:
        store: has the rows.
        m: says which rows.
        files: the file system.
        read: runs what any thread may do.
        write: runs what belongs to the thread that writes.

    Raises:
        JournalError: log and archive are inside each other; or as `Store.rows_to_go`, `Store.note_archive`,
            `Archive.start` and `Archive.add`.
    """
    shard = m.partition
    if wrong := misplaced(m.archive, store.directory):
        raise JournalError(wrong, path=str(store.directory))
    if m.forget_archive:
        await write(lambda: store.note_archive(shard, None))
    found: list[range] = await read(lambda: store.rows_to_go(m))
    known = store.archives.get(shard)
    if not m.archive or (known is not None and not found):
        return found
    log, archive = still_store(store), Archive.at(m.archive, files)
    start = await read(lambda: archive.start(log, shard))
    await write(lambda: store.note_archive(shard, Archived(m.archive, known.end if known else 0)))
    if not found:
        return found
    end = await read(lambda: archive.add(log, shard, start, m.older))
    await write(lambda: store.note_archive(shard, Archived(m.archive, end)))
    return [range(run.start, min(run.stop, end)) for run in found if run.start < end]


_LAST: Final = b"levada.last"
"""The key of a file's metadata under which is the mark of its last row, which may be the shard's own."""
_COMPARED: Final = ["entity", "sequence", "time", "kind"]
_PLACES: Final = (
    pa.field("_shard", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
)


def _folder(shard: int) -> str:
    return f"shard-{shard}"


def _mark_of(rows: pa.RecordBatch) -> bytes:
    """Return what tells the last of some rows apart from another one with its offset, without what an entity's erasure has to delete."""
    last = rows.slice(rows.num_rows - 1)
    micros = last.column("time").cast(pa.int64())  # how a time is written depends on the packages that are installed
    text = repr(tuple(column[0].as_py() for column in (last.column("sequence"), micros, last.column("kind"))))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest().encode()


def _stored(parts: Sequence[pa.RecordBatch], shard: int, last: bytes) -> pa.Table:
    """Return rows with their offsets as a file has them, and the mark of the last one, see `_mark_of`."""
    table = pa.Table.from_batches(parts)
    table = table.take(pc.sort_indices(table, sort_keys=[("entity", "ascending"), ("offset", "ascending")]))
    shards = pa.repeat(pa.scalar(shard, pa.int32()), table.num_rows)
    schema = pa.schema([*_PLACES, *list(table.schema)[1:]], metadata={_LAST: last})
    return pa.Table.from_arrays([shards, *table.columns], schema=schema)


def _runs(table: pa.Table, columns: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in table.combine_chunks().to_batches():
        places = batch.column("_offset").to_pylist()
        rows = fit(batch.select(batch.schema.names[len(_PLACES) :]), columns)
        start = 0
        for place in range(1, len(places) + 1):
            if place == len(places) or places[place] != places[place - 1] + 1:
                yield from _pieces(places[start], rows.slice(start, place - start))
                start = place


def _pieces(first: int, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    half = rows.num_rows // 2
    if rows.nbytes <= PIECE_BYTES or not half:
        yield first, rows
    else:
        yield from _pieces(first, rows.slice(0, half))
        yield from _pieces(first + half, rows.slice(half))
