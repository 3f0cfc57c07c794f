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
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import attrs

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


@attrs.define(eq=False)
class _Memory:
    """A database in memory."""

    connection: sqlite3.Connection
    image: bytes
    """What it holds, but for an open transaction."""
    functions: dict[tuple[str, int], Any] = attrs.field(factory=dict[tuple[str, int], Any])
    """Functions that it knows, by name and number of arguments."""

    @classmethod
    def of(cls, image: bytes) -> _Memory:
        """Return a database with this content: one that is not in use, or a new one."""
        with _lock:
            for memory in reversed(_idle):
                if memory.image == image:
                    _idle.remove(memory)
                    return memory
        memory = cls(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False), image)
        if image:
            try:
                memory.connection.deserialize(image)
            except BaseException:
                memory.connection.close()
                raise
        return memory

    def leave(self) -> None:
        """Keep it for the next user, without its open transaction; close the oldest one of those that are kept."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")
        with _lock:
            _idle.append(self)
            oldest = _idle.popleft() if len(_idle) > _MOST_IDLE else None
        if oldest is not None:
            oldest.connection.close()


_idle: deque[_Memory] = deque()
"""Databases that are not in use, the newest last. SQLite reads all tables of an image before the first statement, and parses each statement once,
which takes longer than all that most processes ask of it. So the next process goes on with the database of the last one, if the disk has the
same image."""
_MOST_IDLE = 8
_lock = threading.Lock()

_CLOSED = sqlite3.connect(":memory:")
_CLOSED.close()


class SimulatedDatabase(sqlite3.Connection):
    """A connection to a database on a simulated disk. Made by `SimulatedFiles.database`; it has no implicit transactions.

    `execute`, `executemany` and `backup` reach the disk, and what a cursor executes does not: they are what a program uses that opens its
    database with `Files.database`. Other methods of a connection raise `sqlite3.ProgrammingError`. ``mode=ro`` and ``immutable=1`` are known options.
    """

    def __init__(self, files: SimulatedFiles, path: str, options: str = "") -> None:
        # The base class opens no database here: this one is in `_memory`, and so are those before and after it.
        self._files, self._disk, self._path = files, files.disk, path
        known = dict(parse_qsl(options))
        self._read_only = known.get("mode") == "ro" or known.get("immutable") == "1"
        self._wal = False
        """Whether it has made the log."""
        self._functions: list[tuple[str, int, Any, bool]] = []
        try:
            files.require_descriptor(path)
            self._node = files.call("database", path, lambda: self._find(makes=known.get("mode") not in ("ro", "rw")))
        except OSError as error:
            raise _error(error.errno or 0) from None
        if self._node.perhaps is not None:
            self._node.cache[:], self._node.perhaps = self._node.perhaps, None
        self._memory = _Memory.of(bytes(self._node.cache))
        self._base = self._memory.connection
        self._node.opened += 1
        files.keep(self, self._end)

    def _find(self, *, makes: bool) -> Inode:
        folder, name, node = self._disk.place(self._path)
        if node is None and makes:
            self._disk.require_room(self._path)
            return self._disk.make(folder, name, is_folder=False, mode=0o644)
        if node is None or node.folder:
            raise failure(errno.ENOENT, self._path)
        return node

    def _load(self, image: bytes) -> None:
        """Continue with another image."""
        self._memory.leave()
        self._memory = _Memory.of(image)
        self._base = self._memory.connection
        for function in self._functions:
            self._know(*function)

    def create_function(self, name: str, narg: int, func: Any, *, deterministic: bool = False) -> None:
        """Make a function known to statements, as `sqlite3.Connection.create_function`."""
        self._functions.append((name, narg, func, deterministic))
        self._know(name, narg, func, deterministic)

    def _know(self, name: str, narg: int, func: Any, deterministic: bool) -> None:
        if self._memory.functions.get((name, narg)) is not func:  # else all statements would be parsed again
            self._base.create_function(name, narg, func, deterministic=deterministic)
            self._memory.functions[name, narg] = func

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        """Return a cursor, as `sqlite3.Connection.cursor`."""
        return self._base.cursor(factory)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        self._files.require_alive()  # a dead process learns nothing, not even that its database is closed
        return self._base.in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement; `sqlite3.OperationalError` if the disk refuses."""
        with self._disk.lock:
            word = self._prepare(sql)
            if word in ("COMMIT", "END"):
                return self._save(lambda: self._base.execute(sql))
            if word == "PRAGMA":
                self._follow(sql.replace(" ", "").lower())
            if word in ("BEGIN", "PRAGMA", "ROLLBACK", "SELECT"):
                return self._base.execute(sql, parameters)
            return self._change(lambda: self._base.execute(sql, parameters))

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        """Execute a statement several times; as `execute`."""
        with self._disk.lock:
            self._prepare(sql)
            return self._change(lambda: self._base.executemany(sql, parameters))

    def _change(self, change: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        """Make a change; outside of a transaction it is one of its own."""
        if self._read_only:
            raise _error(errno.EROFS)
        return change() if self._base.in_transaction else self._save(change)

    def backup(self, target: sqlite3.Connection, **options: Any) -> None:
        """Copy everything that was committed into another database, in one commit of the other one, as `sqlite3.Connection.backup`."""
        with self._disk.lock:
            self._files.require_alive()
            if isinstance(target, SimulatedDatabase):
                target._save(lambda: self._base.backup(target._base, **options))
            else:
                self._base.backup(target, **options)

    def _prepare(self, sql: str) -> str:
        """See what other connections have committed, and let only one of them write; return the first word of a statement."""
        self._files.require_alive()
        first, second = _words(sql)
        if not self._base.in_transaction:
            if self._node.cache != self._memory.image:
                self._load(bytes(self._node.cache))
            if first == "BEGIN" and second in ("IMMEDIATE", "EXCLUSIVE"):
                for other in list(self._node.locks):
                    if isinstance(other, SimulatedDatabase) and not other.in_transaction:
                        del self._node.locks[other]
                try:
                    self._disk.lock_file(self._node, self, shared=False)
                except BlockingIOError:
                    raise _error(errno.EAGAIN) from None
        return first

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
            self._disk.replace(self._node, self._memory.image)

    def _save(self, commit: Callable[[], R]) -> R:
        """Commit, and bring the image to the disk."""
        if self._read_only:
            return commit()  # which has nothing to commit, or raises
        fault = self._files.begin("commit", self._path)
        fails = fault is not None and (fault.crash or fault.error)
        if fault is not None and fails and fault.done < 1:
            self._undo()
            self._refuse(fault)
        done = commit()
        image = self._base.serialize()
        if self._disk.room(self._node, 0, len(image)) < len(image):
            self._undo()
            raise _error(errno.ENOSPC)
        if fault is not None and fault.error:
            self._node.perhaps = image
            self._undo()
        else:
            self._memory.image, self._node.perhaps = image, None
            self._disk.replace(self._node, image)
        if fault is not None:
            self._refuse(fault)
        return done

    def _undo(self) -> None:
        """Forget a transaction, as SQLite does after most errors of a commit."""
        image = self._memory.image
        if self._base.in_transaction:
            self._base.execute("ROLLBACK")
        else:  # it was committed in memory
            self._memory.image = self._base.serialize()
            self._load(image)

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
        self._memory.leave()
        self._base = _CLOSED


@functools.lru_cache(1024)
def _words(sql: str) -> tuple[str, str]:
    """Return the first two words of a statement, in capitals."""
    first, second, *_ = (*sql.upper().split(None, 2), "", "")
    return first, second
