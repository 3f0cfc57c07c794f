"""Errors of the journal."""

from __future__ import annotations

import errno
from pathlib import Path

import attrs

from levada.framework.errors import LevadaError

__all__ = [
    "JournalBehind",
    "JournalDamaged",
    "JournalError",
    "JournalFull",
    "JournalLocked",
    "JournalUnwritable",
    "OffsetGone",
    "SchemaMismatch",
    "refused",
]


@attrs.define(eq=False, slots=False, str=False)
class JournalError(LevadaError):
    """A journal cannot do what was asked; the subclass says why."""

    path: str = ""
    """The file or directory that this is about."""

    def _line(self) -> str:
        return f"{self.path}: {self.detail}" if self.path else self.detail


@attrs.define(eq=False, slots=False, str=False)
class JournalLocked(JournalError):
    """Another process, or another store in this one, has the directory open."""


@attrs.define(eq=False, slots=False, str=False)
class JournalBehind(JournalError):
    """Offsets come from rows that this journal does not have: an older copy was put in its place, or rows were lost that had been read."""

    opening: str = ""
    """The opening of the journal that the offsets are of; empty for a checkpoint of version 0.1."""
    partition: int = 0
    wanted: int = 0
    """The offset that was given."""
    kept: int = 0
    """The offset up to which rows are still the same, as far as is known."""


@attrs.define(eq=False, slots=False, str=False)
class JournalDamaged(JournalError):
    """Octets that were on the disk are gone or changed. Nothing was cut off or written over: what is left can still be copied."""

    octet: int = 0
    """Where in the file."""


@attrs.define(eq=False, slots=False, str=False)
class JournalFull(JournalError):
    """No room: `max_bytes` is reached and nothing may be deleted yet, or the disk is full. Nothing was written."""

    needed: int = 0
    """Octets that were to be added."""
    limit: int = 0
    """The bound that they would break; 0 if it was the disk that had no room."""


@attrs.define(eq=False, slots=False, str=False)
class JournalUnwritable(JournalError):
    """The operating system refused to write; the cause is the `OSError`. Nothing of it can be read, now or later."""


@attrs.define(eq=False, slots=False, str=False)
class OffsetGone(JournalError, LookupError):
    """Rows that were asked for have been deleted by retention."""

    partition: int = 0
    wanted: int = 0
    """The offset that was asked for."""
    first: int = 0
    """The oldest offset that is still there."""


@attrs.define(eq=False, slots=False, str=False)
class SchemaMismatch(JournalError, TypeError):
    """Columns are not what they should be."""

    differences: tuple[str, ...] = ()
    """One line for each column that differs."""


def refused(error: OSError, path: Path) -> JournalError:
    """Return the error of the journal for a write that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(f"the disk is full ({error.strerror}); nothing of this was written", path=str(path))
    return JournalUnwritable(f"the disk refuses ({error}); nothing of this was written", path=str(path))
