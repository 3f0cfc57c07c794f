"""The files of a simulated process: calls that a `SimulatedDisk` answers as Linux does."""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from levada.framework.files import Files, StrPath

from .disk import Inode, SimulatedDisk, failure
from .faults import Call, Crashed, DiskFaults, Fault

if TYPE_CHECKING:
    import sqlite3

    from _typeshed import ReadableBuffer

__all__ = ["SimulatedFiles"]

R = TypeVar("R")

_FIRST = 1 << 20
"""The first descriptor, which no real file has."""
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_OWNER = (os.getuid(), os.getgid()) if hasattr(os, "getuid") else (0, 0)
"""The user of all simulated processes, to whom all files belong."""


@attrs.define(eq=False)
class _Opened:
    """An open file."""

    node: Inode
    flags: int


class SimulatedFiles(Files):
    """The files of one process on a simulated disk.

    Paths begin at the root of this disk; a relative path begins there too. There are no symbolic links, and no permissions are checked.

    A process may be killed at any moment, or by a fault at a call. From then on each call raises `Crashed`; its descriptors are closed, its locks
    are free, and its databases go back to their last commit.

    Args:
        disk: the disk of its machine.
        descriptors: files that it may have open.
        faults: says what happens at each call; may be changed at any time.
    """

    def __init__(self, disk: SimulatedDisk, *, descriptors: int = 1024, faults: DiskFaults | None = None) -> None:
        self.disk = disk
        self.faults = faults
        self.dead = False
        """Whether it was killed."""
        self.waiting = 0.0
        """Seconds that its syncs have taken and that nobody has waited for; see `take_waiting`."""
        self._descriptors = descriptors
        self._opened: dict[int, _Opened] = {}
        self._next = _FIRST
        self._counts = dict[tuple[str, str], int]()
        self._closed_with: dict[object, Callable[[], None]] = {}
        disk.attach(self, self.kill)

    # The process

    def kill(self) -> None:
        """End the process: all its calls raise `Crashed` from now on. What it has written stays in the page cache."""
        with self.disk.lock:
            if self.dead:
                return
            self.dead = True
            self.disk.detach(self)
            for close in list(self._closed_with.values()):
                close()
            self._closed_with.clear()
            for number in list(self._opened):
                self._close(number)

    def take_waiting(self) -> float:
        """Return the seconds that calls since the last time would have taken. A simulated thread sleeps them, in virtual time."""
        waiting, self.waiting = self.waiting, 0.0
        return waiting

    def require_alive(self) -> None:
        """Raise `Crashed` if the process is dead."""
        if self.dead:
            raise Crashed

    def begin(self, kind: str, path: str) -> Fault | None:
        """Count a call, and return what happens at it; see `finish`."""
        self._counts[kind, path] = count = self._counts.get((kind, path), 0) + 1
        return None if self.faults is None else self.faults(Call(kind, path, count))

    def calls(self, kind: str, path: str) -> int:
        """Return how many calls of this kind for this path the process has made."""
        return self._counts.get((kind, path), 0)

    def finish(self, fault: Fault, path: str) -> None:
        """Cause a fault, behind the part of the call that is done."""
        if fault.crash:
            self.kill()
            raise Crashed
        if fault.error:
            raise failure(fault.error, path)

    def call(self, kind: str, path: str, effect: Callable[[], R]) -> R:
        """Make a call that is done whole or not at all."""
        fault = self.begin(kind, path)
        if fault is None:
            return effect()
        if fault.done >= 1 or not (fault.crash or fault.error):
            found = effect()
            self.finish(fault, path)
            return found
        self.finish(fault, path)
        raise AssertionError  # a fault that does nothing is handled above

    def keep(self, key: object, close: Callable[[], None]) -> None:
        """Call a function when the process is killed. It counts as a descriptor until `let_go`."""
        self._closed_with[key] = close

    def let_go(self, key: object) -> bool:
        """Undo `keep`; return whether that was to be called."""
        return self._closed_with.pop(key, None) is not None

    def require_descriptor(self, path: str = "") -> None:
        """Require that one more file may be open."""
        if len(self._opened) + len(self._closed_with) >= self._descriptors:
            raise failure(errno.EMFILE, path)

    # Descriptors

    def open(self, path: StrPath, flags: int, mode: int = 0o777) -> int:
        """Open a file or folder, as `os.open`."""
        with self.disk.lock:
            self.require_alive()
            disk, name = self.disk, _text(path)
            self.require_descriptor(name)
            folder, last, node = disk.place(name)
            if node is None:
                if not flags & os.O_CREAT:
                    raise failure(errno.ENOENT, name)
                disk.require_room(name)
                return self._add(
                    self.call("create", name, lambda: disk.make(folder, last, is_folder=False, mode=mode)), flags
                )
            self._check_open(node, flags, name)
            if flags & os.O_TRUNC and node.cache:
                self.call("truncate", name, lambda: disk.truncate(node, 0))
            return self.call("open", name, lambda: self._add(node, flags))

    def _add(self, node: Inode, flags: int) -> int:
        self._next += 1
        self._opened[self._next] = _Opened(node, flags)
        node.opened += 1
        return self._next

    @staticmethod
    def _check_open(node: Inode, flags: int, name: str) -> None:
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise failure(errno.EEXIST, name)
        if node.folder and (flags & _ACCESS != os.O_RDONLY or flags & os.O_CREAT):
            raise failure(errno.EISDIR, name)
        if not node.folder and flags & os.O_DIRECTORY:
            raise failure(errno.ENOTDIR, name)

    def close(self, fd: int) -> None:
        """Close a descriptor, as `os.close`; its lock is free then."""
        with self.disk.lock:
            self.require_alive()
            self._get(fd)
            self._close(fd)

    def _close(self, fd: int) -> None:
        node = self._opened.pop(fd).node
        node.opened -= 1
        node.locks.pop((self, fd), None)
        self.disk.release(node)

    def _get(self, fd: int) -> _Opened:
        opened = self._opened.get(fd)
        if opened is None:
            raise failure(errno.EBADF)
        return opened

    def _file(self, fd: int, refused: int, code: int = errno.EBADF) -> Inode:
        """Return the file of a descriptor, unless it was opened for the other way only."""
        opened = self._get(fd)
        if opened.flags & _ACCESS == refused:
            raise failure(code)
        return opened.node

    def fstat(self, fd: int) -> os.stat_result:
        """Return the state of an open file, as `os.fstat`."""
        with self.disk.lock:
            self.require_alive()
            return _state(self._get(fd).node)

    def born(self, descriptor: int) -> int:
        """Return 0: the disk does not note when a file was made."""
        return 0

    def pread(self, fd: int, length: int, offset: int, /) -> bytes:
        """Read bytes from a place, as `os.pread`."""
        with self.disk.lock:
            self.require_alive()
            node = self._file(fd, os.O_WRONLY)
            if length < 0 or offset < 0:
                raise failure(errno.EINVAL)
            if node.folder:
                raise failure(errno.EISDIR)
            return self.call("read", node.path, lambda: bytes(node.cache[offset : offset + length]))

    def map(self, descriptor: int, length: int, offset: int = 0) -> bytes:
        """Return a copy of bytes of a file, as `Files.map` maps them."""
        with self.disk.lock:
            self.require_alive()
            node = self._get(descriptor).node
            if not node.folder and offset + length > len(node.cache):
                raise ValueError("mmap length is greater than file size")
            if self._file(descriptor, os.O_WRONLY, errno.EACCES).folder:
                raise failure(errno.ENODEV)
            return self.call("map", node.path, lambda: bytes(node.cache[offset : offset + length]))

    def pwrite(self, fd: int, data: ReadableBuffer, offset: int, /) -> int:
        """Write bytes to a place, as `os.pwrite`."""
        return self.pwritev(fd, [data], offset)

    def pwritev(self, fd: int, buffers: Iterable[ReadableBuffer], offset: int, flags: int = 0, /) -> int:
        """Write bytes to a place, as `os.pwritev`. A full disk takes what fits."""
        with self.disk.lock:
            self.require_alive()
            disk, node = self.disk, self._file(fd, os.O_RDONLY)
            if offset < 0:
                raise failure(errno.EINVAL)
            data = b"".join(buffers)
            if self._get(fd).flags & os.O_APPEND:  # on Linux it goes to the end, wherever it was to go
                offset = len(node.cache)
            fault = self.begin("write", node.path)
            if fault is not None:
                part = data[: disk.cut_between_pages(offset, len(data), fault.done)]
                data = part if part or fault.crash or fault.error else data
            wanted = len(data)
            data = data[: disk.room(node, offset, wanted)]
            if wanted and not data:
                raise failure(errno.ENOSPC)
            if data:
                disk.write(node, offset, data)
            if fault is not None and (fault.crash or not data):  # an error behind a part is told at the next write
                self.finish(fault, "")
            return len(data)

    def ftruncate(self, fd: int, length: int, /) -> None:
        """Set the size of a file, as `os.ftruncate`."""
        with self.disk.lock:
            self.require_alive()
            node = self._file(fd, os.O_RDONLY, errno.EINVAL)
            if length < 0:
                raise failure(errno.EINVAL)
            self.call("truncate", node.path, lambda: self.disk.truncate(node, length))

    def fsync(self, fd: int) -> None:
        """Bring a file, or the names in a folder, to the disk, as `os.fsync`."""
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        """Bring the bytes and the size of a file to the disk, as `os.fdatasync`."""
        self._sync("fdatasync", fd)

    def _sync(self, kind: str, fd: int) -> None:
        with self.disk.lock:
            self.require_alive()
            node = self._get(fd).node
            self.waiting += self.disk.sync_time
            fault = self.begin(kind, node.path)
            # If the power fails in the midst of it, the rest survives or not, as before it.
            if fault is not None and fault.error and not node.folder:
                self.disk.fail_sync(node, fault.done)
            elif fault is None or fault.done >= 1 or not (fault.error or fault.crash):
                self.disk.sync(node, only_data=kind == "fdatasync")
            if fault is not None:
                self.finish(fault, node.path)

    def lock(self, descriptor: int, *, shared: bool = False) -> None:
        """Lock a file until its descriptor is closed, as `Files.lock`."""
        with self.disk.lock:
            self.require_alive()
            opened = self._get(descriptor)
            self.disk.lock_file(opened.node, (self, descriptor), shared=shared)

    def lockers(self, descriptor: int) -> list[int]:
        """Return no ids, as `Files.lockers` on a system that does not tell them."""
        return []

    # Names

    def stat(self, path: StrPath) -> os.stat_result:
        """Return the state of a file or folder, as `os.stat`."""
        with self.disk.lock:
            self.require_alive()
            node = self.disk.find(_text(path))
            return self.call("stat", node.path, lambda: _state(node))

    lstat = stat

    def link_target(self, path: StrPath) -> str:
        """Return that nothing is a link."""
        return ""

    def utime(self, path: StrPath, times: tuple[float, float]) -> None:
        """Set the times of a file, as `os.utime`; durable at once."""
        with self.disk.lock:
            self.require_alive()
            self.disk.find(_text(path)).mtime = times[1]

    def names(self, folder: StrPath) -> list[str]:
        """Return the names in a folder, sorted."""
        with self.disk.lock:
            self.require_alive()
            node = self.disk.find(_text(folder))
            if not node.folder:
                raise failure(errno.ENOTDIR, _text(folder))
            return self.call("names", node.path, lambda: sorted(node.names))

    def mkdir(self, path: StrPath, mode: int = 0o777) -> None:
        """Make a folder, as `os.mkdir`."""
        with self.disk.lock:
            self.require_alive()
            disk, name = self.disk, _text(path)
            folder, last, node = disk.place(name)
            if node is not None:
                raise failure(errno.EEXIST, name)
            disk.require_room(name)
            self.call("mkdir", name, lambda: disk.make(folder, last, is_folder=True, mode=mode))

    def rename(self, src: StrPath, dst: StrPath) -> None:
        """Give a file or folder another name, in place of what had it, as `os.replace`."""
        with self.disk.lock:
            self.require_alive()
            disk, old, new = self.disk, _text(src), _text(dst)
            folder, last, node = disk.place(old)
            target, new_last, other = disk.place(new)
            if node is None:
                raise failure(errno.ENOENT, old)
            if not last or not new_last:
                raise failure(errno.EBUSY, old)
            if node.folder and (new + "/").startswith(old + "/") and new != old:
                raise failure(errno.EINVAL, old)
            if old.startswith(new + "/"):
                raise failure(errno.ENOTEMPTY, new)
            if other is not None and other is not node:
                _check_replaced(node, other, old, new)
            if other is not node:  # else nothing happens, says POSIX
                self.call("rename", new, lambda: disk.rename(folder, last, target, new_last))

    def link(self, src: StrPath, dst: StrPath) -> None:
        """Give a file one more name, as `os.link`."""
        with self.disk.lock:
            self.require_alive()
            node, name = self.disk.find(_text(src)), _text(dst)
            folder, last, other = self.disk.place(name)
            if other is not None:
                raise failure(errno.EEXIST, name)
            if node.folder:
                raise failure(errno.EPERM, name)
            self.call("link", name, lambda: self.disk.give_name(folder, last, node))

    def unlink(self, path: StrPath) -> None:
        """Take a name of a file away, as `os.unlink`."""
        self._take("unlink", path, errno.EISDIR, is_folder=False)

    def rmdir(self, path: StrPath) -> None:
        """Delete an empty folder, as `os.rmdir`."""
        self._take("rmdir", path, errno.ENOTDIR, is_folder=True)

    def _take(self, kind: str, path: StrPath, wrong: int, *, is_folder: bool) -> None:
        with self.disk.lock:
            self.require_alive()
            name = _text(path)
            folder, last, node = self.disk.place(name)
            if node is None:
                raise failure(errno.ENOENT, name)
            if node.folder is not is_folder:
                raise failure(wrong, name)
            if not last:
                raise failure(errno.EBUSY, name)
            if node.names:
                raise failure(errno.ENOTEMPTY, name)
            self.call(kind, name, lambda: self.disk.take_name(folder, last))

    # Made of these

    def database(self, path: StrPath, options: str = "") -> sqlite3.Connection:
        """Open a SQLite database, as `Files.database`; see `SimulatedDatabase`."""
        from .database import SimulatedDatabase  # loads sqlite3

        with self.disk.lock:
            self.require_alive()
            return SimulatedDatabase(self, _text(path), options)

    @contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Make a folder for temporary files; it is deleted with the files in it at the end of the block."""
        folder = Path("/tmp")
        number = len(self.names(folder)) if self.exists(folder) else 0
        while self.exists(path := folder / f"levada-{number}"):
            number += 1
        self.make_folder(path)
        try:
            yield path
        finally:
            self._delete(path)

    def _delete(self, folder: Path) -> None:
        for name in self.names(folder):
            if stat.S_ISDIR(self.stat(folder / name).st_mode):
                self._delete(folder / name)
            else:
                self.unlink(folder / name)
        self.rmdir(folder)


def _text(path: StrPath) -> str:
    return _absolute(os.fspath(path))


@functools.lru_cache(4096)
def _absolute(text: str) -> str:
    if not text:
        raise failure(errno.ENOENT)
    return posixpath.normpath(posixpath.join("/", text))


def _check_replaced(node: Inode, other: Inode, old: str, new: str) -> None:
    """Require that one file or folder may take the place of another one."""
    if node.folder and not other.folder:
        raise failure(errno.ENOTDIR, old)
    if not node.folder and other.folder:
        raise failure(errno.EISDIR, old)
    if other.names:
        raise failure(errno.ENOTEMPTY, new)


def _state(node: Inode) -> os.stat_result:
    kind = stat.S_IFDIR if node.folder else stat.S_IFREG
    whole = int(node.mtime)
    times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.mtime)
    nanoseconds = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), int(node.mtime * 1e9))
    fields = (kind | node.mode, node.number, 1, node.links, *_OWNER, len(node.cache), whole, whole, whole)
    return os.stat_result(fields, {**times, **nanoseconds})
