"""Pins: files of a journal that stay as they are while they are copied.

The writer of an open journal makes a pin between two writes, so that segments, ledger and record of ends are of the same moment. A pin has hard
links, and the writer never changes bytes that it has published: it appends, and gives names to new files. So a pin takes 50 ms with 160
segments, and the journal goes on. Only the bytes behind the end of a last segment change; `Pin.sizes` tells where that was.
A closed journal is pinned by the process that copies, under the lock that a writer would take.

The process that copies asks through the folder (`ask_writer`):

    backup.lock     locked by the process that copies; the writer deletes the pin once nothing has it locked
    backup.request  the question, a random token; the writer looks for it every second, and deletes it when it has answered
    backup.new/     the pin, as long as it is not whole
    backup/         the pin; `pin.json` has the token and the sizes, and everything else is named as in a journal
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from levada.framework.files import Files
from levada.framework.platform import Platform

from .asking import COPIED, ask_writer, locked, locked_in_turn, read_answer, write
from .ends import Ends, PromisedEnds
from .errors import JournalError, JournalLocked
from .ledger import Ledger, ledger_errors
from .partitions import Partition

__all__ = ["LEDGER_LAST", "Pin", "Pins", "delete_tree", "pinned"]

logger = logging.getLogger("levada.actors.journal")

_LOCK, _REQUEST, _NEW, _PIN = "backup.lock", "backup.request", "backup.new", "backup"
LEDGER_LAST = ("ends", "ledger.sqlite-wal", "ledger.sqlite")
"""Files beside the partitions, in the order of a copy: if it is cut short it has no ledger, and so it does not open."""


@attrs.frozen
class Pin:
    """Files that do not change while they are copied."""

    folder: Path
    sizes: Mapping[str, int]
    """For each file, by its path in the folder, how many bytes of it belong to the pin."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


class Pins:
    """The side of the writer. Its methods belong to the thread that writes."""

    def __init__(self, platform: Platform, directory: Path, partitions: Sequence[Partition], ledger: Ledger) -> None:
        self._platform = platform
        self._files = platform.files
        self._directory = directory
        self._partitions = partitions
        self._ledger = ledger

    def look(self) -> None:
        """Answer a process that wants to copy the journal; delete the pin of a process that was killed, or that this one could not finish."""
        files, directory = self._files, self._directory
        try:
            if files.exists(directory / _REQUEST):
                self._answer()
                return
            for left in (directory / _NEW, directory / _PIN):
                if files.exists(left):
                    with locked(files, directory / _LOCK):
                        delete_tree(files, left)
        except JournalLocked:
            pass  # it is being copied
        except (JournalError, OSError) as error:
            logger.warning("%s: no files are pinned for a copy: %s", directory, error, extra={"event": "not_pinned"})

    def _answer(self) -> None:
        files, folder = self._files, self._directory / _NEW
        token = files.read(self._directory / _REQUEST).decode("ascii", "replace")
        for left in (folder, self._directory / _PIN):
            delete_tree(files, left)
        files.make_folder(folder)
        sizes: dict[str, int] = {}
        for partition in self._partitions:
            files.make_folder(folder / partition.folder.name)
            for segment in partition.segments:
                name = f"{partition.folder.name}/{segment.path.name}"
                files.link(segment.path, folder / name)
                sizes[name] = segment.size
                index = Path(name).with_suffix(".index")
                with suppress(FileNotFoundError):  # the last segment has none, and others get theirs when it is needed
                    files.link(self._directory / index, folder / index)
                    sizes[str(index)] = files.stat(folder / index).st_size
        first, end = ([getattr(each, name) for each in self._partitions] for name in ("first", "end"))
        promise = PromisedEnds(self._ledger.journal, first, end, self._ledger.commits)
        Ends.create(self._platform, folder / "ends", promise).close()
        write(files, folder / "ledger.sqlite", b"")  # readable only for its owner
        with ledger_errors(folder):
            self._ledger.copy_to(folder / "ledger.sqlite")
        sizes |= {name: files.stat(folder / name).st_size for name in LEDGER_LAST if files.exists(folder / name)}
        write(files, folder / "pin.json", json.dumps({"token": token, "sizes": sizes}).encode())
        files.rename(folder, self._directory / _PIN)
        files.discard(self._directory / _REQUEST)


@contextmanager
def pinned(platform: Platform, directory: Path, timeout: float) -> Iterator[Pin]:
    """Have the files of a journal pinned for a block, by the process that has it open, or by this one. Blocks.

    Args:
        platform: the surroundings.
        directory: of the journal.
        timeout: seconds to wait for other processes that copy this journal, and again for the writer.

    Raises:
        JournalLocked: another process copies this journal still, or the writer does not answer.
        OSError: this user may not write into the folder, or its file system has no hard links.
    """
    files = platform.files
    with locked_in_turn(platform, directory / _LOCK, COPIED, timeout):
        try:
            for left in (directory / _NEW, directory / _PIN):
                delete_tree(files, left)
            yield _awaited(platform, directory, timeout)
        finally:
            files.discard(directory / _REQUEST)
            delete_tree(files, directory / _PIN)


def _awaited(platform: Platform, directory: Path, timeout: float) -> Pin:
    files, token = platform.files, platform.token_bytes(8).hex()

    def answer() -> Pin | None:
        found = read_answer(files, directory / _PIN / "pin.json", token=token)
        return None if found is None else Pin(directory / _PIN, found["sizes"])

    return ask_writer(
        platform,
        directory / _REQUEST,
        token.encode(),
        answer,
        lambda: _pin_closed(files, directory),
        timeout,
        "it stands still, it cannot pin its files (its log says why)",
    )


def _pin_closed(files: Files, directory: Path) -> Pin:
    """Pin the files of a journal that is locked. A program that starts afterwards need not wait for those who copy them.

    Last segments are copied: the next opening may cut them.
    """
    folder, sizes = directory / _PIN, dict[str, int]()

    def keep(names: Sequence[str], take: Callable[[Path, Path], None]) -> None:
        for name in names:
            take(directory / name, folder / name)
            sizes[name] = files.stat(folder / name).st_size

    files.make_folder(folder)
    for partition in files.glob(directory, "partition-*"):
        files.make_folder(folder / partition.name)
        names = [f"{partition.name}/{path.name}" for path in files.glob(partition, "*.segment")]
        keep(names[:-1], files.link)
        keep(names[-1:], files.copy)
        keep([f"{partition.name}/{path.name}" for path in files.glob(partition, "*.index")], files.link)
    keep([name for name in LEDGER_LAST if files.exists(directory / name)], files.copy)
    return Pin(folder, sizes)


def delete_tree(files: Files, path: Path) -> None:
    """Delete a folder and all in it, if it is there."""
    with suppress(FileNotFoundError):
        for name in files.names(path):
            if stat.S_ISDIR(files.lstat(path / name).st_mode):
                delete_tree(files, path / name)
            else:
                files.discard(path / name)
        files.rmdir(path)
