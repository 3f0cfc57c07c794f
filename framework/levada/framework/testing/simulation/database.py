"""SQLite on a simulated disk: a database in memory, whose image is on the disk at each commit.

A commit is atomic and synced, as SQLite's own commits are with ``synchronous=FULL``. SQLite's own files and syncs are not simulated; it has
tests of these. A file beside the database, its name with ``-wal``, is there while a database in that mode is open, and stays behind when the
process is killed.

After a commit that failed, its pages may be in the log. If the process is killed before the next commit, the next process may find the
commit there, in memory. It is on the disk at the next commit or checkpoint.
"""

from __future__ import annotations

import errno
import functools
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from .disk import Inode, failure

if TYPE_CHECKING:
    from .faults import Fault
    from .files import SimulatedFiles

__all__ = ["SimulatedDatabase"]

R = TypeVar("R")

_CODES = {
    errno.ENOSPC: (sqlite3.SQLITE_FULL, "database or disk is full"),
    errno.EMFILE: (sqlite3.SQLITE_CANTOPEN, "unable to open database file"),
    errno.ENOENT: (sqlite3.SQLITE_CANTOPEN, "unable to open database file"),
    errno.EAGAIN: (sqlite3.SQLITE_BUSY, "database is locked"),
    errno.EROFS: (sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
}


def _error(code: int) -> sqlite3.OperationalError:
    number, text = _CODES.get(code, (sqlite3.SQLITE_IOERR, "disk I/O error"))
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = number
    return error


class SimulatedDatabase(sqlite3.Connection):
    """A connection to a database on a simulated disk. Made by `SimulatedFiles.database`; it has no implicit transactions.

    `execute`, `executemany` and `backup` reach the disk, and what else makes statements does not: they are what a program uses that opens its
    database with `Files.database`. ``mode=ro`` and ``immutable=1`` are known options.
    """

    def __init__(self, files: SimulatedFiles, path: str, options: str = "") -> None:
        super().__init__(":memory:", isolation_level=None, check_same_thread=False)
        self._files, self._disk, self._path = files, files.disk, path
        known = dict(parse_qsl(options))
        self._read_only = known.get("mode") == "ro" or known.get("immutable") == "1"
        self._wal = False
        """Whether it has made the log."""
        try:
            files.require_descriptor(path)
            self._node = files.call("database", path, lambda: self._find(makes=known.get("mode") not in ("ro", "rw")))
        except OSError as error:
            super().close()
            raise _error(error.errno or 0) from None
        except BaseException:
            super().close()
            raise
        self._node.opened += 1
        files.keep(self, self._end)
        if self._node.perhaps is not None:
            self._node.cache[:], self._node.perhaps = self._node.perhaps, None
        self._load()

    def _find(self, *, makes: bool) -> Inode:
        folder, name, node = self._disk.place(self._path)
        if node is None and makes:
            self._disk.require_room(self._path)
            return self._disk.make(folder, name, is_folder=False, mode=0o644)
        if node is None or node.folder:
            raise failure(errno.ENOENT, self._path)
        return node

    def _load(self) -> None:
        """Take the image from the disk."""
        self._image = bytes(self._node.cache)
        if self._image:
            self.deserialize(self._image)
        if self._read_only:
            super().execute("PRAGMA query_only=ON")

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        self._files.require_alive()  # a dead process learns nothing, not even that its database is closed
        return super().in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement; `sqlite3.OperationalError` if the disk refuses."""
        with self._disk.lock:
            word = self._prepare(sql)
            if word in ("COMMIT", "END"):
                return self._save(lambda: super(SimulatedDatabase, self).execute(sql))
            if word == "PRAGMA":
                self._follow(sql.replace(" ", "").lower())
            if word in ("BEGIN", "PRAGMA", "ROLLBACK", "SELECT") or self.in_transaction:
                return super().execute(sql, parameters)
            return self._save(lambda: super(SimulatedDatabase, self).execute(sql, parameters))

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        """Execute a statement several times; as `execute`."""
        with self._disk.lock:
            self._prepare(sql)
            if self.in_transaction:
                return super().executemany(sql, parameters)
            return self._save(lambda: super(SimulatedDatabase, self).executemany(sql, parameters))

    def backup(self, target: sqlite3.Connection, **options: Any) -> None:
        """Copy everything that was committed into another database, in one commit of the other one, as `sqlite3.Connection.backup`."""
        with self._disk.lock:
            self._files.require_alive()
            copy = functools.partial(super().backup, target, **options)
            if isinstance(target, SimulatedDatabase):
                target._save(copy)
            else:
                copy()

    def _prepare(self, sql: str) -> str:
        """See what other connections have committed, and let only one of them write; return the first word of a statement."""
        self._files.require_alive()
        words = sql.upper().split(None, 2)
        if not self.in_transaction:
            if self._node.cache != self._image:
                self._load()
            if words[:2] in (["BEGIN", "IMMEDIATE"], ["BEGIN", "EXCLUSIVE"]):
                for other in list(self._node.locks):
                    if isinstance(other, SimulatedDatabase) and not other.in_transaction:
                        del self._node.locks[other]
                try:
                    self._disk.lock_file(self._node, self, shared=False)
                except BlockingIOError:
                    raise _error(errno.EAGAIN) from None
        return words[0]

    def _follow(self, pragma: str) -> None:
        """Do with the files what a pragma does."""
        if pragma == "pragmajournal_mode=wal" and not self._wal and not self._read_only:
            self._wal = True
            folder, name, there = self._disk.place(self._path + "-wal")
            if there is None:
                self._disk.make(folder, name, is_folder=False, mode=0o644)
        elif pragma.startswith("pragmawal_checkpoint"):
            fault = self._files.begin("commit", self._path)
            if fault is not None and (fault.crash or fault.error):
                self._refuse(fault)
            self._disk.replace(self._node, self._image)

    def _save(self, commit: Callable[[], R]) -> R:
        """Commit, and bring the image to the disk."""
        if self._read_only:
            return commit()  # which has nothing to commit, or raises
        fault = self._files.begin("commit", self._path)
        fails = fault is not None and (fault.crash or fault.error)
        if fault is not None and fails and fault.done < 1:
            self._undo()
            self._refuse(fault)
        cursor = commit()
        image = self.serialize()
        if self._disk.room(self._node, 0, len(image)) < len(image):
            self._undo()
            raise _error(errno.ENOSPC)
        if fault is not None and fault.error:
            self._node.perhaps = image
            self._undo()
        else:
            self._image, self._node.perhaps = image, None
            self._disk.replace(self._node, image)
        if fault is not None:
            self._refuse(fault)
        return cursor

    def _undo(self) -> None:
        """Forget a transaction, as SQLite does after most errors of a commit."""
        if self.in_transaction:
            super().execute("ROLLBACK")
        if self._image:
            self.deserialize(self._image)

    def _refuse(self, fault: Fault) -> None:
        try:
            self._files.finish(fault, self._path)
        except OSError as error:
            raise _error(error.errno or 0) from None

    def close(self) -> None:
        """Close the database; an open transaction is forgotten."""
        with self._disk.lock:
            if self._files.let_go(self):
                self._node.perhaps = None  # the log goes, or its end does
                if self._wal and self._node.opened == 1:
                    folder, name, log = self._disk.place(self._path + "-wal")
                    if log is not None:
                        self._disk.take_name(folder, name)
                self._end()

    def _end(self) -> None:
        self._node.opened -= 1
        self._node.locks.pop(self, None)
        self._disk.release(self._node)
        super().close()
