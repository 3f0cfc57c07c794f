"""Look at a journal without changing a byte of it: its content and its damage.

The ledger is read from a copy, because SQLite writes beside a database that it opens. A shared lock is held meanwhile, so no process can open the
journal for writing; a copy of a journal may lack the lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import pyarrow as pa
import pyarrow.compute

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files, folder_path
from levada.framework.platform import PLATFORM, Platform

from .columns import Envelope, columns_of
from .ends import PromisedEnds
from .errors import JournalDamaged, JournalError, JournalLocked, SchemaMismatch
from .kept_blocks import KeptBlocks
from .keys import check_index
from .ledger import Ledger
from .log import DATABASES
from .log_events import is_log
from .partitions import Partition
from .recovery import find_problems, read_promise
from .schema import fit
from .segments import Segment

__all__ = ["Finding", "Inspection", "inspect", "journal_path", "journals_in"]

_BLOCKS = 4 << 20
pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none


@attrs.frozen
class Finding:
    """Something that is not as it should be."""

    kind: Literal["damage", "cut", "note"]
    """``damage``: rows or commits that were promised are gone or changed. ``cut``: bytes of a write that was never answered; the next opening
    cuts them off, and nothing is lost. ``note``: something that is rebuilt, or is not needed."""
    text: str
    path: str
    rows: int = 0
    """Rows that are lost."""


@attrs.frozen
class Inspection:
    """A journal as it lies on the disk."""

    directory: Path
    epoch: str
    openings: int
    """How often it has been opened, as far as the history goes."""
    partitions: list[Partition]
    """By number; only for reading. One without segments has no rows."""
    schema: pa.Schema
    groups: Mapping[str, Mapping[int, int]]
    promise: PromisedEnds | None
    """The record of ends; None if it is damaged, or the journal is of version 0.1."""
    findings: list[Finding]
    staged: int
    """Files of batches that are not delivered yet."""
    transaction: int
    """Number of transactions: batches that were delivered, and appends to several partitions."""
    ledger: Ledger
    """A copy of it. Behind the block only what it keeps in memory is left, such as its history of openings."""

    def batches(self, number: int, start: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of a partition from an offset on, in the columns of `schema`, with the offset of the first.

        Lost and erased rows are left out.

        Raises:
            JournalDamaged: a block is damaged.
        """
        partition = self.partitions[number]
        if not partition.segments:
            return
        for segment in partition.segments:
            at, end = max(segment.first, start or 0), min(segment.end, partition.end)
            while at < end:
                for block in partition.read(at, end, _BLOCKS):
                    if not block.erased:
                        yield block.first, fit(block.batch(), self.schema)
                    at = block.end

    def rows(self, number: int) -> int:
        """Count the rows of a partition that were not erased, trimmed or lost. In a damaged segment all offsets count.

        Reads the headers of the blocks of segments that may have offsets without rows, and nothing of the others.
        """
        rows = 0
        for segment in self.partitions[number].segments:
            # The log of a durable class may be a copy, which has offsets without rows from its beginning.
            gaps = segment.erased or is_log(self.schema)
            try:
                rows += segment.rows if gaps else segment.end - segment.first
            except JournalDamaged:
                rows += segment.end - segment.first
        return rows

    def rows_of(self, column: str, entity: str) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Yield all rows whose column has a value, by reading everything: the partition, the offset of the first row, and the rows.

        Rows of a block that are not the entity's are left out; so a column ``offset`` says which are there. Surrogates in `entity` are the
        bytes of an argument that is not UTF-8.
        """
        self._key_type(column)
        value = pa.scalar(entity.encode(errors="surrogateescape"), pa.binary())
        for number in range(len(self.partitions)):
            for first, batch in self.batches(number):
                offsets = pa.array(range(first, first + batch.num_rows), pa.int64())
                found = batch.add_column(0, "offset", offsets).filter(
                    pc.equal(batch.column(column).cast(pa.binary()), value)
                )
                if found.num_rows:
                    yield number, first, found

    def entities(self, column: str, most: int) -> tuple[dict[str, int], int]:
        """Count the rows of each value of a column, by reading everything.

        Args:
            column: of text or bytes.
            most: values that are counted, the first ones found.

        Returns:
            The counts, and the number of rows of other values.
        """
        self._key_type(column)
        counts: dict[str, int] = {}
        others = 0
        for number in range(len(self.partitions)):
            for _, batch in self.batches(number):
                for each in pc.value_counts(batch.column(column)).to_pylist():
                    value = each["values"]
                    name = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
                    if name is not None and (name in counts or len(counts) < most):
                        counts[name] = counts.get(name, 0) + each["counts"]
                    elif name is not None:
                        others += each["counts"]
        return counts, others

    def _key_type(self, column: str) -> pa.DataType:
        kind = self.schema.field(column).type if column in self.schema.names else None
        if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            raise SchemaMismatch(
                f"no column of text or bytes is called {column!r}; there are: {', '.join(self.schema.names)}",
                path=str(self.directory),
            )
        return kind


def journal_path(place: str | os.PathLike[str]) -> Path:
    """Return the path of a journal, or of the folder above it, that a user has named; `ConfigurationError` as `folder_path`, and for a database."""
    if os.fspath(place).startswith(DATABASES):
        raise ConfigurationError(
            "this is the URL of a database, and wanted is a folder. Back a database up with its own tools, such as pg_dump; read its events by "
            "SQL, in the view that ends in _events; and levada journal copy copies the log to a folder"
        )
    return folder_path(place)


def journals_in(directory: Path) -> list[Path]:
    """Return the journals at or right below a directory, such as the mailboxes of a bridge."""
    files = PLATFORM.get().files
    if files.exists(directory / "ledger.sqlite") or files.glob(directory, "partition-*"):
        return [directory]
    return [path for path in files.glob(directory, "*") if files.exists(path / "ledger.sqlite")]


def require_apart(files: Files, directory: Path) -> None:
    """Raise `ConfigurationError` if a folder, which is no journal yet, is inside a journal: the two would take files for their own."""
    for above in directory.absolute().parents:
        if files.exists(above / "ledger.sqlite"):
            raise ConfigurationError(f"{directory} is inside the journal {above}: name a folder elsewhere")


@contextmanager
def inspect(directory: Path, *, blocks: bool = False) -> Iterator[Inspection]:
    """Examine a journal; nothing is changed.

    Args:
        directory: of the journal.
        blocks: check every block, even in sealed segments, which an opening does not check before they are first read.

    Raises:
        JournalLocked: a process has it open.
        JournalDamaged: there is no ledger, or it is damaged, and without it nothing can be told.
        JournalError: written by a later version of this format.
    """
    platform = PLATFORM.get()
    files = platform.files
    with ExitStack() as resources:
        _lock(files, directory, resources)
        path = directory / "ledger.sqlite"
        if not files.exists(path):
            raise JournalDamaged("there is no ledger of a journal", path=str(path))
        promised = read_promise(files, directory)
        ledger = _ledger(platform, path, promised.commits if isinstance(promised, PromisedEnds) else 0, resources)
        columns = columns_of(Envelope).schema
        partitions = [
            Partition(
                files, directory, number, journal=ledger.journal, schema=columns, segment_bytes=1, memory=KeptBlocks()
            )
            for number in range(ledger.partitions)
        ]
        findings: list[Finding] = []
        if ledger.ready:
            problems, losses = find_problems(directory, promised, ledger, partitions)
            findings += [Finding("damage", problem.detail, problem.path) for problem in problems]
            for number, ranges in losses.items():
                findings += [
                    Finding(
                        "damage", f"rows {first} to {end - 1} are lost", str(partitions[number].folder), end - first
                    )
                    for first, end in ranges
                ]
            findings += [
                Finding("cut", _cut(cut, bool(losses.get(partition.number))), str(partition.folder))
                for partition in partitions
                if (cut := partition.look())
            ]
        schemas = [each for partition in partitions if partition.segments for each in [partition.segments[-1].schema]]
        found = Inspection(
            directory=directory,
            epoch=ledger.journal.hex(),
            openings=ledger.openings,
            partitions=partitions,
            schema=max(schemas, key=len, default=columns_of(Envelope).schema),
            groups=ledger.groups(),
            promise=promised if isinstance(promised, PromisedEnds) else None,
            findings=findings,
            staged=len(files.glob(directory / "staging", "*.segment")),
            transaction=ledger.transaction,
            ledger=ledger,
        )
        findings += [
            Finding(
                "note",
                f"the erasure of {each.entity!r:.100} is not finished; the next opening with Keyed(entity={each.column!r}) finishes it",
                str(partitions[each.partition].folder),
            )
            for each in ledger.erasures
        ]
        if ledger.copy_of is not None:
            text = f"a copy of the log {ledger.copy_of} that is not whole: run levada journal copy again"
            findings.append(Finding("note", text, str(directory)))
        if blocks:
            findings += _examine_all(files, found)
        yield found


def _lock(files: Files, directory: Path, resources: ExitStack) -> None:
    try:
        lock = files.open(directory / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return
    resources.callback(files.close, lock)
    try:
        files.lock(lock, shared=True)
    except OSError as error:
        raise JournalLocked(
            "a process has this journal open: stop it first, or look at a copy made by levada journal backup",
            path=str(directory),
        ) from error


def _ledger(platform: Platform, path: Path, commits: int, resources: ExitStack) -> Ledger:
    files = platform.files
    folder = resources.enter_context(files.temporary_folder())
    for name in (path.name, path.name + "-wal"):
        if files.exists(path.with_name(name)):
            files.copy(path.with_name(name), folder / name)
    try:
        ledger = Ledger.open(platform, folder / path.name, partitions=1, commits=commits)
    except JournalError as error:
        error.path = str(path)
        raise
    resources.callback(ledger.close)
    return ledger


def _examine_all(files: Files, found: Inspection) -> Iterator[Finding]:
    for partition in found.partitions:
        for segment in partition.segments[:-1]:
            yield from _examine(segment, found.transaction)
        for path in files.glob(partition.folder, "*"):
            if path.suffix == ".index":
                wrong = check_index(files, path)
                if not files.exists(path.with_suffix(".segment")):
                    wrong = "its segment is gone"
                if wrong:
                    yield Finding("note", f"an index that will be rebuilt: {wrong}", str(path))
            elif path.suffix == ".damaged":
                yield Finding("note", "kept from a repair; rows in it are not read", str(path))
            elif path.suffix != ".segment":
                yield Finding("note", "left over from a file that was being made", str(path))


def _examine(segment: Segment, committed: int) -> Iterator[Finding]:
    end = segment.end
    try:
        state = segment.examine(committed, end)
    except JournalDamaged as error:
        yield Finding("damage", error.detail, error.path)
        return
    if state != "whole" or segment.end != end:
        damage = segment.damage()
        yield Finding("damage", damage.detail, damage.path, rows=max(0, end - segment.end))


def _cut(size: int, rows_are_lost: bool) -> str:
    """Describe the bytes behind the last whole block."""
    if rows_are_lost:
        return f"{size} bytes behind the last whole block, of the lost rows or of a write that was never answered"
    return f"{size} bytes of a write that was never answered"
