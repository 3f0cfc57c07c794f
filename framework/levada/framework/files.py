"""The files of a process: calls of the operating system that a simulated disk can answer in its place."""

from __future__ import annotations

import fnmatch
import mmap
import os
import re
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import quote

from .errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Files", "StrPath", "folder_path"]

StrPath: TypeAlias = "str | os.PathLike[str]"
"""A path of the file system."""
ReadableBuffer: TypeAlias = "bytes | bytearray | memoryview"

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_BTIME = struct.Struct("=qI")
_BTIME_AT = 80  # in a struct statx

_URL: Final = re.compile(r"\s*(?:(?:[A-Za-z][A-Za-z0-9+.-]+:)+/|postgres(?:ql)?//)")
"""How a URL begins; that of a database also without its colon."""
_KEYWORDS: Final = re.compile(r"(?:^|\s)(?:dbname|host|hostaddr|password|port|service|user)\s*=")

_BINARY: Final = getattr(os, "O_BINARY", 0)
"""Windows would change the ends of lines."""


def folder_path(path: StrPath) -> Path:
    """Return the path of a folder that a user has named.

    Raises:
        ConfigurationError: the name is empty, as a variable that was not set is; as a path it would be the current folder. Or it is a URL: as a path
            it would make folders named after its parts. Or it has keywords such as ``host=``, as libpq takes them. The text does not show it,
            because it may have a password. Or it has a null character. Or it begins with ``~``, which only shells replace.
        TypeError: it is neither a text nor a path.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"the name of a folder is {text!r:.100}, and wanted is a str or a Path: see os.fsdecode")
    if not text:
        raise ConfigurationError("the name of a folder is empty: name one, or the current folder as '.'")
    if "\0" in text:
        raise ConfigurationError(f"the name of a folder is {text!r:.100}, and no name has a null character")
    if _URL.match(text):
        database = "; a database is postgresql://user@host/database" if "postgres" in text[:20].lower() else ""
        raise ConfigurationError(
            f"this is a URL, and wanted is the path of a folder or file on a disk of this machine{database}"
        )
    if len(_KEYWORDS.findall(text)) > 1:
        raise ConfigurationError(
            "these are keywords of a connection to a database, and wanted is a folder or a URL: postgresql://user@host/database"
        )
    if text.startswith("~"):
        raise ConfigurationError(
            f"the path {text!r:.100} begins with ~, which only a shell replaces: give the whole path, as Path.expanduser() returns it"
        )
    return Path(path)


class Files:
    """The real files. All calls block, may be made in any thread, and raise `OSError` as the functions of `os` do."""

    # The functions of `os` are looked up in each call, for 50 ns, because tests replace them to see calls or to let them fail.

    def open(self, path: StrPath, flags: int, mode: int = 0o777) -> int:
        """As `os.open`."""
        return os.open(path, flags | _BINARY, mode)

    def close(self, fd: int) -> None:
        """As `os.close`."""
        os.close(fd)

    def pread(self, fd: int, length: int, offset: int, /) -> bytes:
        """As `os.pread`. On Windows the position of the file moves, so only one thread reads and writes it."""
        if sys.platform == "win32":
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)
        return os.pread(fd, length, offset)

    def pwrite(self, fd: int, data: ReadableBuffer, offset: int, /) -> int:
        """As `os.pwrite`; on Windows see `pread`."""
        if sys.platform == "win32":
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)
        return os.pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int, /) -> int:
        """As `os.pwritev`, or one `pwrite` where the system has no such call."""
        if not hasattr(os, "pwritev"):
            return self.pwrite(fd, b"".join(buffers), offset)
        return os.pwritev(fd, buffers, offset)

    def ftruncate(self, fd: int, length: int, /) -> None:
        """As `os.ftruncate`."""
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        """As `os.fsync`."""
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """As `os.fdatasync`, or `os.fsync` where the system has no such call."""
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """As `os.fstat`."""
        return os.fstat(fd)

    def stat(self, path: StrPath) -> os.stat_result:
        """As `os.stat`."""
        return os.stat(path)

    def lstat(self, path: StrPath) -> os.stat_result:
        """As `os.lstat`."""
        return os.lstat(path)

    def utime(self, path: StrPath, times: tuple[float, float]) -> None:
        """As `os.utime`."""
        os.utime(path, times)

    def mkdir(self, path: StrPath, mode: int = 0o777) -> None:
        """As `os.mkdir`."""
        os.mkdir(path, mode)

    def rename(self, src: StrPath, dst: StrPath) -> None:
        """As `os.replace`."""
        os.replace(src, dst)

    def link(self, src: StrPath, dst: StrPath) -> None:
        """As `os.link`."""
        os.link(src, dst)

    def unlink(self, path: StrPath) -> None:
        """As `os.unlink`."""
        os.unlink(path)

    def rmdir(self, path: StrPath) -> None:
        """As `os.rmdir`."""
        os.rmdir(path)

    def names(self, folder: StrPath) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def map(self, descriptor: int, length: int, offset: int = 0) -> mmap.mmap | bytes:
        """Return bytes of a file, read-only, which may be mapped: then they stay while the result is used, also if the file is deleted.

        `offset` is a multiple of `mmap.ALLOCATIONGRANULARITY`; `length` is 1 or more, and the file has so many bytes.
        """
        return mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=offset)

    def born(self, descriptor: int) -> int:
        """Return the time at which a file was made, in nanoseconds since 1970; 0 if the system does not tell it."""
        born: float | None = getattr(os.fstat(descriptor), "st_birthtime", None)  # macOS and the BSDs
        if born is not None:
            return int(born * 1e9)
        import ctypes  # 2 ms, for programs that need none

        buffer = ctypes.create_string_buffer(256)
        try:
            failed = ctypes.CDLL(None).statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer)
        except (AttributeError, OSError):  # another system, or a C library from before 2018
            return 0
        if failed or not struct.unpack_from("=I", buffer)[0] & _STATX_BTIME:
            return 0
        seconds, nanoseconds = _BTIME.unpack_from(buffer, _BTIME_AT)
        return int(seconds) * 1_000_000_000 + int(nanoseconds)

    def link_target(self, path: StrPath) -> str:
        """Return where symbolic links lead from a path; empty if it is not a link."""
        return os.path.realpath(path) if os.path.islink(path) else ""

    def lock(self, descriptor: int, *, shared: bool = False) -> None:
        """Lock a file until its descriptor is closed. Raises `BlockingIOError` if another descriptor has it locked, unless both are `shared`.

        Does nothing on systems without such locks.
        """
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def lockers(self, descriptor: int) -> list[int]:
        """Return the ids of the processes that have a file locked, as far as the system tells: Linux does, of processes that this one can see."""
        file = os.fstat(descriptor)
        place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        try:
            text = Path("/proc/locks").read_text()
        except OSError:
            return []
        # As in "1: FLOCK  ADVISORY  WRITE 8873 fe:00:11985601 0 EOF". The id is 0 for a process of another container.
        found = re.findall(rf": FLOCK +ADVISORY +\w+ ([1-9]\d*) {place} ", text)
        return sorted(set(map(int, found)))

    def database(self, path: StrPath, options: str = "") -> sqlite3.Connection:
        """Open a SQLite database, for use in any thread, without implicit transactions; `options` go into its URI: ``mode=ro``."""
        import sqlite3  # 4 ms, for programs that need none

        if not options:
            return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        uri = f"file:{quote(os.fsencode(Path(path).absolute()))}?{options}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    @contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Make a folder for temporary files, readable only for its owner; it is deleted with the files in it at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="levada-") as path:
            yield Path(path)

    # What is made of these:

    @contextmanager
    def opened(self, path: StrPath, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Open a file, or make one that only its owner may read, for a block; yield its descriptor. Each error of the block has the path."""
        descriptor = self.open(path, flags, 0o600)
        try:
            yield descriptor
        except OSError as error:
            if error.filename is None:
                error.filename = os.fspath(path)
            raise
        finally:
            self.close(descriptor)

    def exists(self, path: StrPath) -> bool:
        """Return whether there is something of this name."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_taken(self, path: StrPath) -> bool:
        """Return whether there is something of this name, or a symbolic link that leads nowhere."""
        return self.exists(path) or bool(self.link_target(path))

    def discard(self, path: StrPath) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self.unlink(path)

    def read(self, path: StrPath) -> bytes:
        """Return all bytes of a file."""
        parts, at = [], 0
        with self.opened(path) as descriptor:
            while part := self.pread(descriptor, 1 << 20, at):
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def glob(self, folder: StrPath, pattern: str) -> list[Path]:
        """Return the paths in a folder whose names match a pattern of `fnmatch`, sorted; none if there is no such folder."""
        try:
            names = self.names(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [Path(folder, name) for name in fnmatch.filter(names, pattern)]

    def write_all(self, fd: int, data: ReadableBuffer, offset: int = 0) -> None:
        """Write all bytes to a place in a file, which `pwrite` may do in part."""
        left = memoryview(data)
        while left:
            written = self.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written

    def replace(self, path: StrPath, data: ReadableBuffer) -> None:
        """Replace a file by one with these bytes, atomically; only its owner may read it.

        The bytes are on the disk when this returns, the name after `sync_folder`.
        """
        beside = Path(path).with_suffix(".new")
        with self.opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            self.write_all(descriptor, data)
            self.fsync(descriptor)
        self.rename(beside, path)

    def copy(self, source: StrPath, target: StrPath) -> None:
        """Copy the bytes of a file to another one, which is made or replaced, readable only for its owner; unsynced."""
        at = 0
        with self.opened(source) as read, self.opened(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as write:
            while part := self.pread(read, 1 << 20, at):
                self.write_all(write, part, at)
                at += len(part)

    def make_folder(self, path: StrPath) -> None:
        """Make a folder, readable only for its owner, unless it is there; and those above it as usual."""
        self._make_folder(Path(path), 0o700)

    def _make_folder(self, path: Path, mode: int) -> None:
        try:
            self.mkdir(path, mode)
        except FileNotFoundError:
            if path.parent == path:
                raise
            self._make_folder(path.parent, 0o777)
            with suppress(FileExistsError):  # another process made it just now
                self.mkdir(path, mode)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                raise

    def make_durable_folder(self, path: StrPath) -> None:
        """Make a folder as `make_folder` does. Its name and those of new folders above it are on the disk when this returns.

        A process that made it may have been killed right then, so the name is synced also if the folder is there.
        """
        self._make_durable_folder(Path(path), 0o700)

    def _make_durable_folder(self, path: Path, mode: int) -> None:
        try:
            self.stat(path)
        except FileNotFoundError:
            self._make_durable_folder(path.parent, 0o777)  # synced before there is something in it
        self._make_folder(path, mode)
        with suppress(PermissionError):  # a folder that this user may write to and not read cannot be synced
            self.sync_folder(path.parent)

    def sync_folder(self, path: StrPath) -> None:
        """Bring the names in a folder to the disk. Does nothing on systems that cannot open a folder."""
        if hasattr(os, "O_DIRECTORY"):
            with self.opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                self.fsync(descriptor)
