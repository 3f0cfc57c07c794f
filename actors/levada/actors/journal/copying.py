"""Copies of whole journals: `backup`, also while a process has the journal open, and `restore`.

A copy is made aside, in ``TARGET.partial``, and gets its name when all of it is on the disk and has been checked. Until then it has no ledger
where it has rows, so it does not open as a journal. Of each journal, the segments are copied first, then the record of ends, then the ledger.

Rows that are staged and not delivered are left out: the query stages them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import attrs

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files, folder_path
from levada.framework.platform import PLATFORM, Platform

from .asking import locked
from .blocks import write_all
from .errors import JournalDamaged, JournalError, JournalLocked, refusals
from .inspection import Inspection, inspect, journal_path, journals_in, require_apart
from .pinning import LEDGER_LAST, Pin, delete_tree, pinned

__all__ = [
    "Copied", "Progress", "backup", "errors_of", "pinned_files", "require_outside", "require_whole", "restore", "synced_file",
    "write_pinned",
]  # fmt: skip

_MARK = "copying"
"""In a copy that is not whole: locked by the process that makes it."""
_PART = 1 << 20
_NAMED = 3
"""Journals or partitions that an error names."""

Progress = Callable[[int, int], None]


@attrs.frozen(kw_only=True)
class Copied:
    """A journal that was copied."""

    directory: Path
    """The copy."""
    epoch: str
    """The name of the journal, see `Extent.epoch`."""
    opening: str
    """The newest opening in the copy, see `Extent.opening`."""
    first: Mapping[int, int]
    """For each partition, the offset of the oldest row."""
    end: Mapping[int, int]
    """For each partition, the offset behind the newest row."""
    rows: int
    """The number of rows that it has. Erased and trimmed ones do not count."""
    size: int
    """Bytes of all files."""


def backup(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    verify: bool = False,
    timeout: float = 30.0,
    progress: Progress | None = None,
) -> list[Copied]:
    """Copy a journal, or all journals of a folder, such as the mailboxes of a bridge. Blocks; call it in a thread.

    A journal that a process has open is copied as it is at one moment, with all rows that were answered before the call: its process pins the
    files, within about a second and in tens of milliseconds, and goes on. That is any process with a `Journal`: a bridge, a keeper, durable actors.
    Only a process in virtual time does not answer.
    Several journals are copied one after the other, each as it is at its own moment. A journal that is not open is locked only until its files are
    pinned; if its folder cannot be written to, it stays locked until it is copied.

    Args:
        source: the journal, or the folder above it.
        target: the new folder; folders above it are made.
        verify: check every byte of the copy.
        timeout: seconds to wait for a process that has the journal open.
        progress: called with the bytes that were copied, and with all bytes of this journal.

    Returns:
        The journals that were copied.

    Raises:
        ConfigurationError: there is no journal in `source`, or `target` is there, or it is inside `source`.
        JournalLocked: a process has the journal open and does not answer, or another copy is being made.
        JournalDamaged: the journal is damaged, or the copy is.
        JournalFull, JournalUnwritable: the disk of `target` is full, or refuses.
        OSError: this user may not read the journal, or it is open and this user may not write into its folder.

    If this raises, there is nothing at `target`.
    """
    platform = PLATFORM.get()
    journals, folder = _places(source, target)

    still = partial(pinned_files, platform, timeout)
    return _copy_all(platform, journals, folder_path(source), folder, still, verify=verify, progress=progress)


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    verify: bool = False,
    progress: Progress | None = None,
) -> list[Copied]:
    """Copy a backup to where a journal should be. Blocks. Nothing is overwritten: first move away a journal that is there.

    Args:
        source: what `backup` made; nothing in it is changed.
        target: the new folder; folders above it are made.
        verify: check every byte of the copy.
        progress: as `backup`.

    Returns:
        The journals that were copied.

    Raises:
        ConfigurationError: there is no journal in `source`, or `target` is there: says which of the two is older, and by how many rows.
        JournalLocked: a process has `source` open.
        JournalDamaged, JournalFull, JournalUnwritable, OSError: as `backup`.
    """
    platform = PLATFORM.get()
    journals, folder = _places(source, target, compares=True)

    def still(journal: Path, resources: ExitStack) -> Pin:
        return resources.enter_context(_closed(platform, journal))

    return _copy_all(platform, journals, folder_path(source), folder, still, verify=verify, progress=progress)


def _places(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, compares: bool = False
) -> tuple[list[Path], Path]:
    """Check the arguments; return the journals, and the target."""
    origin, folder = journal_path(source), folder_path(target)
    journals = journals_in(origin)
    if not journals:
        raise ConfigurationError(
            f"there is no journal in {origin}: name a folder that has a ledger.sqlite, or the folder above it"
        )
    require_outside(folder, origin)
    files = PLATFORM.get().files
    require_apart(files, folder)
    if files.is_taken(folder):
        what = _comparison(journals, origin, folder) if compares and files.exists(folder) else "is there"
        raise ConfigurationError(f"{folder} {what}. Nothing is overwritten: move it away, or name another folder")
    return journals, folder


def require_outside(target: Path, source: Path) -> None:
    """Raise `ConfigurationError` if the folder of a copy is inside what is copied."""
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"{target} is inside {source}: name a folder elsewhere, best on another disk")


def pinned_files(platform: Platform, timeout: float, journal: Path, resources: ExitStack) -> Pin:
    """Have the files of a journal pinned until `resources` are closed. Raises as `backup`.

    A closed journal whose folder cannot be written to, or has no hard links, stays locked instead.
    """
    try:
        return resources.enter_context(pinned(platform, journal, timeout))
    except OSError as error:
        try:
            return resources.enter_context(_closed(platform, journal))
        except JournalLocked:
            raise error from None


@contextmanager
def _closed(platform: Platform, directory: Path) -> Iterator[Pin]:
    """Lock a journal that no process has open; yield its files."""
    files, sizes = platform.files, dict[str, int]()
    with inspect(directory) as found:
        require_whole(found)
        for partition in found.partitions:
            for pattern in ("*.segment", "*.index"):
                for path in files.glob(partition.folder, pattern):
                    sizes[f"{path.parent.name}/{path.name}"] = files.stat(path).st_size
        for name in LEDGER_LAST:
            if files.exists(directory / name):
                sizes[name] = files.stat(directory / name).st_size
        yield Pin(directory, sizes)


@contextmanager
def errors_of(copy: Path, journal: Path) -> Iterator[None]:
    """Make errors name the journal, not a copy that will be gone."""
    try:
        yield
    except JournalError as error:
        error.path = error.path.replace(str(copy), str(journal), 1)
        raise


def require_whole(found: Inspection) -> None:
    """Raise `JournalDamaged` for the first damage that was found."""
    for each in found.findings:
        if each.kind == "damage":
            raise JournalDamaged(f"{each.text} (levada journal verify finds all damage)", path=each.path)


def _copy_all(
    platform: Platform,
    journals: list[Path],
    origin: Path,
    target: Path,
    still: Callable[[Path, ExitStack], Pin],
    *,
    verify: bool,
    progress: Progress | None,
) -> list[Copied]:
    files, aside, done = platform.files, target.with_name(target.name + ".partial"), list[Copied]()
    with _made_aside(files, aside):
        for journal in journals:
            name = journal.relative_to(origin)
            with ExitStack() as reading:
                size = _copy(files, still(journal, reading), aside / name, progress)
            with errors_of(aside / name, journal), inspect(aside / name, blocks=verify) as found:
                require_whole(found)
                done.append(_copied(found, target / name, size))
        with refusals(aside):
            files.unlink(aside / _MARK)
            files.sync_folder(aside)
            files.rename(aside, target)
    with suppress(PermissionError):  # a folder that this user may write to and not read cannot be synced
        files.sync_folder(target.parent)
    return done


@contextmanager
def _made_aside(files: Files, aside: Path) -> Iterator[None]:
    """Make the folder of a copy, in place of what a killed process has left of one; after an error it is gone again."""
    with refusals(aside):
        if files.exists(aside) and files.names(aside):
            if not files.exists(aside / _MARK):
                raise ConfigurationError(f"{aside} is in the way: move it away")
            with locked(files, aside / _MARK):
                delete_tree(files, aside)
        files.make_durable_folder(aside)
    try:
        with ExitStack() as held:
            with refusals(aside):
                held.enter_context(locked(files, aside / _MARK))
            yield
    except BaseException:
        with suppress(OSError):
            delete_tree(files, aside)
        raise


def _copy(files: Files, pin: Pin, folder: Path, progress: Progress | None) -> int:
    """Copy files into a folder, in their order, and sync them; return their size."""
    before, folders = 0, {folder: None, **{(folder / name).parent: None for name in pin.sizes}}

    def wrote(size: int) -> None:
        if progress is not None:
            progress(before + size, pin.size)

    with refusals(folder):
        for each in folders:
            files.make_folder(each)
    for name, size in pin.sizes.items():
        write_pinned(files, pin.folder / name, size, folder / name, wrote)
        before += size
    with refusals(folder):
        for each in reversed(folders):
            files.sync_folder(each)
    return pin.size


def write_pinned(files: Files, source: Path, size: int, copy: Path, wrote: Callable[[int], None]) -> None:
    """Copy the first bytes of a file to a new one, and sync it; `wrote` is called with how many have been copied."""
    with files.opened(source) as read, synced_file(files, copy) as write:
        at = 0
        while at < size:
            part = files.pread(read, min(_PART, size - at), at)
            if not part:
                raise JournalDamaged(f"it has {at} bytes, and should have {size}", path=str(source))
            with refusals(copy):
                write_all(files, write, [part], at)
            at += len(part)
            wrote(at)


@contextmanager
def synced_file(files: Files, path: Path) -> Iterator[int]:
    """Make a file for a block, and sync it."""
    with refusals(path):
        descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield descriptor
        with refusals(path):
            files.fdatasync(descriptor)
    finally:
        files.close(descriptor)


def _copied(found: Inspection, directory: Path, size: int) -> Copied:
    return Copied(
        directory=directory,
        epoch=found.epoch,
        opening=found.ledger.opening,
        first={each.number: each.first if each.segments else 0 for each in found.partitions},
        end={each.number: each.end for each in found.partitions},
        rows=sum(found.rows(each.number) for each in found.partitions),
        size=size,
    )


def _comparison(journals: list[Path], origin: Path, target: Path) -> str:
    """Say how the journals at a target, which is there, differ from copies of them."""
    found = []
    for journal in journals:
        there = target / journal.relative_to(origin)
        found.append(f"{there.name}: {_compared(journal, there)}" if len(journals) > 1 else _compared(journal, there))
    return "is there; " + "; ".join(found[:_NAMED])


def _compared(copy: Path, there: Path) -> str:
    try:
        with inspect(copy) as one, inspect(there) as other:
            return _difference(one, other)
    except JournalLocked:
        return "a process has it open, so it is not compared"
    except (JournalError, OSError) as error:
        return f"it cannot be compared ({error})"


def _difference(copy: Inspection, there: Inspection) -> str:
    if copy.epoch != there.epoch:
        return "it is another journal"
    ends = [{each.number: each.end for each in found.partitions} for found in (copy, there)]
    same = dict(ends[0])
    for found, other in ((copy, there), (there, copy)):
        if found.ledger.begun and other.ledger.begun:
            reach = found.ledger.reach(other.ledger.opening, ends[found is there])
            if reach.known:
                same = {number: min(end, reach.ends[number], ends[0][number]) for number, end in ends[1].items()}
                break
            same = {number: min(end, reach.ends[number]) for number, end in same.items()}
    mine, others = (_ranges(same, each) for each in ends)
    if mine and others:
        return f"it and the backup have parted: it has {others}, and the backup {mine}"
    if others:
        return f"the backup is older, and lacks {others}"
    if mine:
        return f"it is older than the backup, and lacks {mine}"
    return "it has the same rows as the backup"


def _ranges(start: Mapping[int, int], end: Mapping[int, int]) -> str:
    """Describe the rows between two offsets of each partition; empty if there are none."""
    rows = {number: (start[number], end[number]) for number in end if end[number] > start[number]}
    if not rows:
        return ""
    places = [f"partition {number}: {first:,} to {behind - 1:,}" for number, (first, behind) in rows.items()]
    total = sum(behind - first for first, behind in rows.values())
    return f"{total:,} rows ({', '.join(places[:_NAMED])}{', …' if len(places) > _NAMED else ''})"
