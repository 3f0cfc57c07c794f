"""An open file that grows, is renamed, truncated or overwritten. Everything here blocks and runs in a thread.

Each call of `OpenFile.look` gets the size from the system, compares the bytes that identify the file, and then reads new bytes.  If the
file is truncated and written again between the comparison and the read, one damaged line may come out.  The next call notices, and the
new content is read from its start, so nothing is left out.

A file that is rewritten with the same text has the same bytes and the same size, but a new time of change.  The time alone is not enough:
systems set it before they add the bytes of an append, and may wait for the disk between the two.  So the file counts as rewritten when
its time of change has been new for `SETTLE` seconds while its size has not changed.  A rewrite with the same text *and more* cannot be
told from an append.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

import attrs

from levada.actors.descriptors import NO_ROOM
from levada.framework.files import Files
from levada.framework.platform import PLATFORM

from .tail_registry import HEAD, TAIL, FileEntry

__all__ = ["SETTLE", "FoundFile", "OpenFile", "ReadRound", "find_files", "find_moved"]

SETTLE = 2.0
"""Seconds for which a file keeps a new time of change, without a new size, before it counts as rewritten."""


@attrs.frozen
class FoundFile:
    """A regular file that a pattern matches."""

    path: str
    target: str
    """The end of the symbolic links at `path`; empty if it is not a link."""
    device: int
    inode: int
    size: int
    changed: int
    """Its time of change, in nanoseconds since 1970."""


@attrs.frozen
class ReadRound:
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
        self._files = files = PLATFORM.get().files
        self._descriptor = files.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        status = files.fstat(self._descriptor)
        self.device, self.inode, self.size = status.st_dev, status.st_ino, status.st_size
        self.born = files.born(self._descriptor)
        """The time of birth in nanoseconds since 1970; 0: not known."""
        self.changed = 0
        """The time of change when the file got its size, in nanoseconds since 1970; 0: not known."""
        self.position = 0
        """Offset of the next byte to read."""
        self._suspected = math.inf
        self._head = b""
        self._tail = b""

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)

    def is_described_by(self, entry: FileEntry) -> bool:
        """Whether this file has the content that `entry` describes."""
        return entry.describes(self._files, self._descriptor, self.size)

    def is_born_as(self, entry: FileEntry) -> bool:
        """Whether this file may be as old as that of `entry`: true if one of the times is not known."""
        return 0 in (self.born, entry.born) or self.born == entry.born

    def head(self) -> bytes:
        """Return the first bytes, up to `HEAD`."""
        return self._files.pread(self._descriptor, HEAD, 0)

    def go_to(self, position: int, size: int = 0, changed: int = 0) -> None:
        """Read on from `position`.

        Args:
            position: where to read on.
            size: bytes of the file when it was last looked at.
            changed: its time of change then; 0: not known.
        """
        self.position, self.size, self.changed, self._suspected = position, size, changed, math.inf
        self._head = self.head()
        self._tail = self._files.pread(self._descriptor, TAIL, max(0, position - TAIL))[: min(TAIL, position)]

    def end_of_lines(self, size: int, most: int) -> int:
        """Return the offset behind the last complete line of the first `size` bytes, searched in the last `most` of them.

        Without a line end in them it is 0 if they are all, and otherwise their number.
        """
        size = min(size, self.size)
        start = max(0, size - most)
        last = self._files.pread(self._descriptor, size - start, start).rfind(b"\n")
        if last < 0:
            return 0 if start == 0 else size
        return start + last + 1

    @property
    def is_suspected(self) -> bool:
        """Whether the time of change is new and the size is not: the next looks find new bytes, or that the file was rewritten."""
        return self._suspected < math.inf

    def look(self, most: int, now: float) -> ReadRound:
        """Read up to `most` new bytes.

        Args:
            most: the most bytes.
            now: the time in seconds, on a clock that never goes back.
        """
        status = self._files.fstat(self._descriptor)
        head = self.head()
        tail = self._files.pread(self._descriptor, len(self._tail), self.position - len(self._tail))
        if (
            status.st_size < max(self.position, self.size)
            or not head.startswith(self._head)
            or tail != self._tail
            or self._is_rewritten(status, now)
        ):
            return ReadRound(b"", status.st_size, replaced=True)
        before = self._tail
        data = self._files.pread(self._descriptor, most, self.position)
        if data:
            self._head = head
            self.position += len(data)
            self._tail = (before + data[-TAIL:])[-TAIL:]
        return ReadRound(data, status.st_size, head=self._head, before=before)

    def _is_rewritten(self, status: os.stat_result, now: float) -> bool:
        if status.st_size > self.size or not self.changed or not self.position:
            self.size, self.changed = status.st_size, status.st_mtime_ns
        if status.st_mtime_ns == self.changed:
            self._suspected = math.inf
            return False
        self._suspected = min(self._suspected, now)
        return now >= self._suspected + SETTLE


def find_files(patterns: Iterable[str], exclude: Sequence[str]) -> list[FoundFile]:
    """List the regular files that the patterns match, each inode once, the least recently changed first. Inaccessible files are left out.

    Raises:
        OSError: no descriptor is free to look for files.
    """
    files = PLATFORM.get().files
    found: dict[tuple[int, int], FoundFile] = {}
    for pattern in map(os.path.abspath, patterns):
        for path in _matching(files, pattern):
            if any(fnmatch.fnmatch(os.path.basename(path), wrong) for wrong in exclude):
                continue
            try:
                status = files.stat(path)
                target = files.link_target(path)
            except OSError:
                continue  # it was removed, or is a broken link
            if stat.S_ISREG(status.st_mode):
                file = _found(path, target, status)
                found.setdefault((file.device, file.inode), file)
    return sorted(found.values(), key=lambda file: (file.changed, file.path))


def _matching(files: Files, pattern: str) -> Iterable[str]:
    """Return the path that `pattern` is if there is one, even if it looks like a pattern; otherwise those that it matches, as for `glob.glob`."""
    try:
        files.lstat(pattern)
    except OSError:
        return _below(files, os.sep, pattern.strip(os.sep).split(os.sep)) if glob.has_magic(pattern) else ()
    return (pattern,)


def _below(files: Files, folder: str, parts: Sequence[str]) -> Iterator[str]:
    """Yield the paths in a folder that match the parts of a pattern; ``**`` stands for any number of folders."""
    part, rest = parts[0], parts[1:]
    if not glob.has_magic(part):
        names = [part]
    else:
        try:
            names = files.names(folder)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            return
        if not part.startswith("."):
            names = [name for name in names if not name.startswith(".")]
        names = fnmatch.filter(names, part)
    if part == "**" and rest:
        yield from _below(files, folder, rest)
    for name in names:
        path = os.path.join(folder, name)
        if part == "**":
            yield from _below(files, path, parts)
        if not rest:
            yield path
        elif part != "**":
            yield from _below(files, path, rest)


def find_moved(entries: Iterable[FileEntry]) -> list[FoundFile]:
    """Find renamed files that are not shipped as they are now, in the folders where they were.

    Args:
        entries: the registry's entries of files that no pattern matches any more.

    Raises:
        OSError: no descriptor is free to look for files.
    """
    files = PLATFORM.get().files
    wanted = {(entry.device, entry.inode): entry for entry in entries}
    # Where a link led when the file was last found; and leads now, for registries that did not note that.
    places = {
        place
        for entry in wanted.values()
        for place in (entry.path, entry.target or files.link_target(entry.path) or entry.path)
    }
    found: list[FoundFile] = []
    for folder in {os.path.dirname(place) for place in places}:
        try:
            for name in files.names(folder):
                path = os.path.join(folder, name)
                try:
                    status = files.lstat(path)
                except FileNotFoundError:
                    continue  # it was removed
                entry = wanted.get((status.st_dev, status.st_ino))
                if entry is None or not stat.S_ISREG(status.st_mode):
                    continue
                if status.st_size != entry.offset or entry.changed not in (0, status.st_mtime_ns):
                    found.append(_found(path, "", status))
                    del wanted[entry.device, entry.inode]  # it may have other names
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
    return found


def _found(path: str, target: str, status: os.stat_result) -> FoundFile:
    return FoundFile(path, target, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
