"""The files of a process: calls of the operating system that a simulated disk can answer in its place."""

from __future__ import annotations

import mmap
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Files", "StrPath"]

StrPath: TypeAlias = "str | os.PathLike[str]"


class Files:
    """The real files. All calls block, may be made in any thread, and raise `OSError` as the functions of `os` do."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    pwrite = staticmethod(os.pwrite)
    pwritev = staticmethod(os.pwritev)
    ftruncate = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(getattr(os, "fdatasync", os.fsync))
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    utime = staticmethod(os.utime)
    mkdir = staticmethod(os.mkdir)
    rename = staticmethod(os.replace)
    link = staticmethod(os.link)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)

    def names(self, folder: StrPath) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def map(self, descriptor: int, length: int, offset: int = 0) -> mmap.mmap | bytes:
        """Return bytes of a file, read-only, which may be mapped: then they stay while the result is used, also if the file is deleted.

        `offset` is a multiple of `mmap.ALLOCATIONGRANULARITY`; `length` is 1 or more, and the file has so many bytes.
        """
        return mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=offset)

    def lock(self, descriptor: int, *, shared: bool = False) -> None:
        """Lock a file until its descriptor is closed. Raises `BlockingIOError` if another descriptor has it locked, unless both are `shared`."""
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def database(self, path: StrPath, options: str = "") -> sqlite3.Connection:
        """Open a SQLite database, for use in any thread, without implicit transactions; `options` go into its URI: ``mode=ro``."""
        if not options:
            return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        uri = f"file:{quote(os.fsencode(Path(path).absolute()))}?{options}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    # What is made of these:

    def exists(self, path: StrPath) -> bool:
        """Return whether there is something of this name."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def discard(self, path: StrPath) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self.unlink(path)

    def read(self, path: StrPath) -> bytes:
        """Return all bytes of a file."""
        descriptor = self.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts, at = [], 0
            while part := self.pread(descriptor, 1 << 20, at):
                parts.append(part)
                at += len(part)
            return b"".join(parts)
        finally:
            self.close(descriptor)

    def make_folders(self, path: StrPath) -> None:
        """Make a folder, readable only for its owner, and those above it that are missing."""
        path = Path(path)
        try:
            self.mkdir(path, 0o700)
        except FileNotFoundError:
            self.make_folders(path.parent)
            self.make_folders(path)
        except FileExistsError:
            pass

    def sync_folder(self, path: StrPath) -> None:
        """Bring the names in a folder to the disk. Does nothing on systems that cannot open a folder."""
        if not hasattr(os, "O_DIRECTORY"):
            return
        descriptor = self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            self.close(descriptor)
