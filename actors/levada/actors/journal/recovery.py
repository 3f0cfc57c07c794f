"""Recovery: compare the files of a journal with its promises when it is opened, and clean up after a crash."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import pyarrow as pa

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files
from levada.framework.platform import Platform

from .blocks import BLOCK_MAGIC
from .columns import Envelope, columns_of
from .config import JournalConfig
from .ends import Ends, PromisedEnds
from .errors import CopyUnfinished, JournalDamaged
from .headers import MAX_SCHEMA, VERSION
from .kept_blocks import KeptBlocks
from .keys import check_keyed
from .ledger import Ledger, drop_unfinished, ledger_errors
from .partitions import Loss, Partition
from .schema import check_growth, fingerprint

__all__ = ["SYNC_THREADS", "UNFINISHED", "Recovered", "find_problems", "read_promise", "recover", "why_no_copy"]

MERGE_AT_OPENING = 1024
"""Small blocks of a last segment that are merged when a journal is opened."""

UNFINISHED = (
    "this is a copy of another log, and it is not whole: run levada journal copy again, which goes on where it stopped"
)

SYNC_THREADS = 16
"""Files that are synced at a time."""

logger = logging.getLogger("levada.actors.journal")


@attrs.frozen(kw_only=True)
class Recovered:
    """A journal whose files are open and in order."""

    ledger: Ledger
    ends: Ends
    partitions: list[Partition]
    schema: pa.Schema
    cut: int
    """Bytes that were cut off."""
    lost: int
    """Lost rows whose loss was accepted."""


def recover(
    platform: Platform,
    directory: Path,
    schema: pa.Schema | None,
    config: JournalConfig,
    resources: ExitStack,
    copy_of: str | None = None,
    *,
    noted: bool = True,
) -> Recovered:
    """Open the files of a journal, or make them. Closing `resources` closes them. Raises as `Store.open`.

    An opening that is not `noted` leaves no line in the history.
    """
    files, path = platform.files, directory / "ledger.sqlite"
    promise = read_promise(files, directory)
    commits = promise.commits if isinstance(promise, PromisedEnds) and not config.accept_loss else 0
    if not files.exists(directory / "ends") and not _has_rows(files, directory):
        _clear(files, directory, path)
    elif not files.exists(path):
        raise JournalDamaged("there is a journal, but its ledger is gone: restore it", path=str(path))
    ledger = Ledger.open(platform, path, partitions=config.partitions, commits=commits)
    resources.callback(ledger.close)
    if not ledger.ready and _has_rows(files, directory):
        raise JournalDamaged("the ledger is older than all rows: restore the ledger of the same moment", path=str(path))
    if ledger.copy_of is not None and copy_of is None:
        raise CopyUnfinished(UNFINISHED, path=str(directory))
    if ledger.copy_of != copy_of and (ledger.copy_of is not None or _has_rows(files, directory)):
        raise ConfigurationError(
            f"{directory} {why_no_copy(copy_of, ledger.copy_of)}. Nothing is overwritten: move it away, or name another folder"
        )
    if ledger.partitions != config.partitions:
        raise ConfigurationError(
            f"{directory} has {ledger.partitions} partitions, which cannot change to {config.partitions}; "
            f"of durable actors, give it as shards={ledger.partitions}"
        )
    columns = schema if schema is not None else columns_of(Envelope).schema
    memory = KeptBlocks()
    resources.callback(memory.clear)
    partitions = [
        Partition(
            files,
            directory,
            number,
            journal=ledger.journal,
            schema=columns,
            segment_bytes=config.segment_size,
            memory=memory,
        )
        for number in range(config.partitions)
    ]
    for partition in partitions:
        resources.callback(partition.close)
    if not ledger.ready:
        for partition in partitions:
            partition.create()
    problems, losses = find_problems(directory, promise, ledger, partitions)
    if problems and not config.accept_loss:
        text = f"{problems[0].detail} (JournalConfig.accept_loss goes on with what is left)"
        raise JournalDamaged(text, path=problems[0].path, offset=problems[0].offset)
    for problem in problems:
        logger.error("rows are lost, which is accepted: %s", problem, extra={"event": "rows_lost"})
    lost = sum(end - first for found in losses.values() for first, end in found)
    schemas: list[pa.Schema] = []
    if ledger.ready:  # until then nothing was answered, so the columns of a start that was cut short do not count
        schemas = [found for partition in partitions if (found := partition.newest_schema) is not None]
    if schema is None:
        # Partitions may differ if the last attempt to add columns was cut short: the one with most columns is the truth.
        columns = max(schemas, key=len, default=columns)
    for each in schemas:
        check_growth(each, columns, where=str(directory))
    if config.keyed is not None:
        check_keyed(config.keyed, columns)
    if any(losses.values()):
        with ledger_errors(directory):
            ledger.add_losses(losses)
    closed = isinstance(promise, PromisedEnds) and promise.closed and not problems
    cut = sum(partition.settle(ledger.losses(partition.number), closed=closed) for partition in partitions)
    _harden(platform, [partition for partition in partitions if partition.shaky])
    mark = fingerprint(columns)
    for partition in partitions:
        partition.schema = columns
        last = partition.segments[-1]
        if last.fingerprint != mark or last.version < VERSION or (last.fragmented and last.blocks >= MERGE_AT_OPENING):
            partition.roll()
            partition.publish()
    # This file is not read before the history has its first line.
    first, end = [partition.first for partition in partitions], [partition.end for partition in partitions]
    ends = Ends.create(platform, directory / "ends", PromisedEnds(ledger.journal, first, end, ledger.commits))
    resources.callback(ends.close)
    for partition in partitions:
        partition.delete_stale()
    with ledger_errors(directory):
        if ledger.copy_of != copy_of:
            ledger.set_copy_of(copy_of)
        if noted:
            ledger.begin({partition.number: partition.end for partition in partitions})
        elif not ledger.ready:
            ledger.make_ready()
    return Recovered(ledger=ledger, ends=ends, partitions=partitions, schema=columns, cut=cut, lost=lost)


def why_no_copy(wanted: str | None, found: str | None) -> str:
    """Say why a log cannot become a copy of the log `wanted`: it is an unfinished copy of the log `found`; None: it has rows of its own."""
    if found is not None:
        return f"is an unfinished copy of another log, {found}, and cannot become a copy of the log {wanted}"
    return f"has rows, and is no unfinished copy of the log {wanted}; a finished copy is a log of its own"


def _clear(files: Files, directory: Path, ledger: Path) -> None:
    """Delete what is left of a start that was cut short, unless it can go on. Nothing was ever answered."""
    if drop_unfinished(files, ledger):
        for path in _segments(files, directory):
            files.unlink(path)


def _has_rows(files: Files, directory: Path) -> bool:
    """Whether a journal has a segment other than the empty first ones. A wrong yes refuses a start that made no ledger; a wrong no is none."""
    return any(
        path.name != f"{0:020d}.segment" or files.stat(path).st_size > MAX_SCHEMA or BLOCK_MAGIC in files.read(path)
        for path in _segments(files, directory)
    )


def _segments(files: Files, directory: Path) -> Iterator[Path]:
    for folder in files.glob(directory, "partition-*"):
        yield from files.glob(folder, "*.segment")


def _harden(platform: Platform, partitions: list[Partition]) -> None:
    """Bring partitions to the disk, at once: 16 files take 6 ms on ext4, one after the other 95."""
    with platform.thread_pool(SYNC_THREADS, "levada-sync") as threads:
        for done in [threads.submit(partition.harden) for partition in partitions]:
            done.result()


def read_promise(files: Files, directory: Path) -> PromisedEnds | JournalDamaged:
    """Read the record of ends, or return the error that it ends with."""
    try:
        return Ends.read(files, directory / "ends")
    except JournalDamaged as error:
        return error


def find_problems(
    directory: Path, promised: PromisedEnds | JournalDamaged, ledger: Ledger, partitions: list[Partition]
) -> tuple[list[JournalDamaged], dict[int, list[tuple[int, int]]]]:
    """Check all promises, and change nothing; return the problems, and the ranges of lost rows by partition."""
    if isinstance(promised, PromisedEnds) and promised.journal != ledger.journal:
        text = "this record of how far the partitions reach is of another journal: restore the right one"
        promised = JournalDamaged(text, path=str(directory / "ends"))
    promise = promised if ledger.begun and isinstance(promised, PromisedEnds) else None
    problems = [promised] if ledger.begun and isinstance(promised, JournalDamaged) else []
    if promise is not None and ledger.commits < promise.commits:
        text = f"the newest {promise.commits - ledger.commits} commits of the ledger are gone"
        problems.append(JournalDamaged(text, path=str(directory / "ledger.sqlite")))
    ends = ledger.ends()
    losses: dict[int, list[Loss]] = {}
    for partition in partitions:
        number = partition.number
        losses[number] = partition.find(
            ledger.transaction,
            first=None if promise is None else promise.first[number],
            end=ends[number] if promise is None else max(ends[number], promise.end[number]),
            known=ledger.losses(number),
        )
    problems += [loss.error for found in losses.values() for loss in found]
    return problems, {
        number: [(loss.first, loss.end) for loss in found if loss.end > loss.first] for number, found in losses.items()
    }
