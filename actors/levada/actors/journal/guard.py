"""The guard of a store: it stops all writes once the files are gone, and takes back half a write."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from levada.framework.platform import Platform

from .blocks import Uncertain
from .errors import JournalError, JournalUnwritable, refused
from .partitions import Partition

__all__ = ["Guard", "Undone"]

logger = logging.getLogger("levada.actors.journal")

LOOK_EVERY = 1.0
"""Seconds between checks that the files are still there; one costs 2 µs a partition and 5 µs."""


class Guard:
    """Knows whether a store may write."""

    def __init__(self, platform: Platform, directory: Path, partitions: Sequence[Partition]) -> None:
        self._files = platform.files
        self._monotonic = platform.monotonic
        self.directory = directory
        self.broken = ""
        """Why the store can do no more until it is opened again; empty if it can."""
        self._gone = ""
        """Why nothing may be written: the files are not where they were; empty if they are. See `look`."""
        self._partitions = partitions
        self._inodes = {
            path: self._files.stat(path).st_ino
            for path in (directory / "lock", directory / "ends", directory / "ledger.sqlite")
        }
        """Inodes of the files that must stay where they are."""
        self._looked = self._monotonic()

    def require_usable(self) -> None:
        """Require that the store may write; look at the files if that was `LOOK_EVERY` seconds ago.

        Raises:
            JournalError: the store is broken.
            JournalUnwritable: the files are not where they were.
        """
        if self.broken:
            raise JournalError(self.broken, path=str(self.directory))
        if self._gone or self._monotonic() - self._looked >= LOOK_EVERY:
            self.look()
        if self._gone:
            raise JournalUnwritable(self._gone, path=str(self.directory))

    def refused(self, error: OSError) -> JournalError:
        """Return the error of the journal for a call that the disk refused. After one that leaves the disk uncertain, the store is broken."""
        if not isinstance(error, Uncertain):
            return refused(error, self.directory)
        self.broken = f"what is on the disk is not known after a failure ({error}), open the journal again"
        return JournalUnwritable(f"nothing of this was written, and {self.broken}", path=str(self.directory))

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of the disk into the journal's."""
        try:
            yield
        except OSError as error:
            raise self.refused(error) from error

    def look(self) -> None:
        """Check that the files are where they were; if not, all writes fail from now on."""
        self._looked = self._monotonic()
        files = {**self._inodes, **dict(partition.written_file() for partition in self._partitions)}
        missing = [path for path, inode in files.items() if self._inode(path) != inode]
        if not missing:
            self._gone = ""
        elif not self._gone:
            self._gone = (
                f"{missing[0].relative_to(self.directory)} was deleted, moved or replaced while this journal is open, and rows appended since are "
                "lost: nothing more is written. Put the directory back, or start again"
            )
            logger.error("%s: %s", self.directory, self._gone, extra={"event": "journal_gone"})

    def _inode(self, path: Path) -> int:
        try:
            return self._files.stat(path).st_ino
        except OSError:
            return 0


class Undone:
    """Takes back all writes to some partitions if the block fails."""

    __slots__ = ("_guard", "_touched")

    def __init__(self, guard: Guard, touched: Sequence[Partition]) -> None:
        self._guard, self._touched = guard, touched

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        try:
            for partition in self._touched:
                partition.rollback()
        except BaseException as failure:
            self._guard.broken = "half a write cannot be taken back, open the journal again"
            if not isinstance(failure, OSError):
                raise
            text = f"{self._guard.broken}, which tells what is left of it ({failure})"
            raise JournalUnwritable(text, path=str(self._guard.directory)) from failure
        if isinstance(error, FileNotFoundError):
            self._guard.look()
            self._guard.require_usable()
        if isinstance(error, OSError):
            raise self._guard.refused(error) from error
