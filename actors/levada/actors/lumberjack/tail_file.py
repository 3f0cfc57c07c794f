"""An open file that grows, is renamed, truncated or overwritten. Everything here blocks and runs in a thread.

Each call of `OpenFile.look` gets the size from the system, compares the bytes that identify the file, and then reads new bytes.  If the
file is truncated and written again between the comparison and the read, one damaged line may come out.  The next call notices, and the
new content is read from its start, so nothing is left out.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

import attrs

from .tail_registry import HEAD, TAIL, FileEntry

__all__ = ["Found", "Look", "OpenFile", "find_files", "find_moved"]


@attrs.frozen
class Found:
    """A regular file that a pattern matches."""

    path: str
    device: int
    inode: int
    size: int


@attrs.frozen
class Look:
    """The result of one round of reading."""

    data: bytes
    """New bytes, up to the limit of the call."""
    size: int
    """Bytes of the file."""
    replaced: bool = False
    """The file was truncated or overwritten: the bytes read before are no longer there."""
    head: bytes = b""
    """The first bytes, up to `HEAD`."""
    before: bytes = b""
    """Up to `TAIL` bytes before `data`."""


class OpenFile:
    """A file that is open for reading. It stays the same file when it is renamed or unlinked.

    Args:
        path: the path of a regular file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK, opening a pipe that has replaced the file would wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.device, self.inode, self.size = status.st_dev, status.st_ino, status.st_size
        self.position = 0
        """Offset of the next byte to read."""
        self._head = b""
        self._tail = b""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def is_described_by(self, entry: FileEntry) -> bool:
        """Whether this file has the content that `entry` describes."""
        return entry.describes(self._descriptor, self.size)

    def head(self) -> bytes:
        """Return the first bytes, up to `HEAD`."""
        return os.pread(self._descriptor, HEAD, 0)

    def go_to(self, position: int) -> None:
        """Read on from `position`."""
        self.position = position
        self._head = self.head()
        self._tail = os.pread(self._descriptor, TAIL, max(0, position - TAIL))[: min(TAIL, position)]

    def end_of_lines(self, most: int) -> int:
        """Return the offset behind the last complete line, searched in the last `most` bytes.

        Without a line end in them it is 0 if they are the whole file, and otherwise the size.
        """
        start = max(0, self.size - most)
        last = os.pread(self._descriptor, self.size - start, start).rfind(b"\n")
        if last < 0:
            return 0 if start == 0 else self.size
        return start + last + 1

    def look(self, most: int) -> Look:
        """Read up to `most` new bytes."""
        size = os.fstat(self._descriptor).st_size
        head = self.head()
        tail = os.pread(self._descriptor, len(self._tail), self.position - len(self._tail))
        if size < self.position or not head.startswith(self._head) or tail != self._tail:
            return Look(b"", size, replaced=True)
        before = self._tail
        data = os.pread(self._descriptor, most, self.position)
        if data:
            self._head = head
            self.position += len(data)
            self._tail = (before + data[-TAIL:])[-TAIL:]
        return Look(data, size, head=self._head, before=before)


def find_files(patterns: Iterable[str], exclude: Sequence[str]) -> list[Found]:
    """List the regular files that the patterns match, each inode once, the least recently changed first. Inaccessible files are left out."""
    found: dict[tuple[int, int], tuple[float, Found]] = {}
    for pattern in patterns:
        # An existing name is taken literally, even if it looks like a pattern.
        paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
        for path in map(os.path.abspath, paths):
            if any(fnmatch(os.path.basename(path), wrong) for wrong in exclude):
                continue
            try:
                status = os.stat(path)
            except OSError:
                continue  # it was removed, or is a broken link
            if stat.S_ISREG(status.st_mode):
                key = (status.st_dev, status.st_ino)
                found.setdefault(key, (status.st_mtime, Found(path, *key, status.st_size)))
    return [file for _, file in sorted(found.values(), key=lambda item: (item[0], item[1].path))]


def find_moved(entries: Iterable[FileEntry]) -> list[Found]:
    """Find renamed files in the folders where they were, if a part of them was not shipped.

    Args:
        entries: the registry's entries of files that no pattern matches any more.
    """
    wanted = {(entry.device, entry.inode): entry for entry in entries}
    found: list[Found] = []
    for folder in {os.path.dirname(entry.path) for entry in wanted.values()}:
        try:
            with os.scandir(folder) as items:
                for item in items:
                    status = item.stat(follow_symlinks=False)
                    key = (status.st_dev, status.st_ino)
                    if key in wanted and stat.S_ISREG(status.st_mode) and status.st_size != wanted[key].offset:
                        found.append(Found(item.path, *key, status.st_size))
        except OSError:
            continue
    return found
