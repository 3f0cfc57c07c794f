"""Errors of the journal."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs

from levada.framework.errors import ActorError, LevadaError, RemoteFailure

__all__ = [
    "BatchReused", "CommandReused", "CopyUnfinished", "JournalBehind", "JournalDamaged", "JournalError", "JournalFull", "JournalLocked",
    "JournalUnwritable", "OffsetGone", "SchemaMismatch", "bare", "fresh", "journal_error", "refusals", "refused",
]  # fmt: skip

E = TypeVar("E", bound=BaseException)


@attrs.define(eq=False, slots=False, str=False)
class JournalError(LevadaError):
    """A journal cannot answer a question; the subclass says why."""

    path: str = ""
    """The file or directory concerned."""

    def _line(self) -> str:
        return f"{self.path}: {self.detail}" if self.path else self.detail


@attrs.define(eq=False, slots=False, str=False)
class JournalLocked(JournalError):
    """Another process, or another store in this one, has the directory open."""

    passing: bool = False
    """Whether it only reads the journal, or trims it, and then leaves it."""


@attrs.define(eq=False, slots=False, str=False)
class JournalBehind(JournalError):
    """This journal lacks rows that were read or written, or batches that were delivered: it was replaced by an older copy, or it lost rows."""

    opening: str = ""
    """The opening of the journal at which the offsets were read; empty for a checkpoint of version 0.1, a shard of durable actors, or batches."""
    partition: int = 0
    wanted: int = 0
    """The offset that was given, or the number of the batch that should be here."""
    kept: int = 0
    """The offset up to which rows are still the same, as far as the journal knows; or the number of the newest batch, -1 without any."""


@attrs.define(eq=False, slots=False, str=False)
class JournalDamaged(JournalError):
    """Bytes that were on the disk are gone or changed. Nothing was cut off or overwritten: the rest can still be copied."""

    offset: int = 0
    """Position in the file."""


@attrs.define(eq=False, slots=False, str=False)
class JournalFull(JournalError):
    """No room: `max_bytes` is reached and nothing may be deleted yet, or the disk is full. Nothing was written."""

    loss = "the journal has no room"

    needed: int = 0
    """Bytes that were to be added."""
    limit: int = 0
    """The limit they would exceed; 0 if the disk is full."""


@attrs.define(eq=False, slots=False, str=False)
class JournalUnwritable(JournalError):
    """The operating system refused to write; the cause is the `OSError`, or the error of SQLite. Readers never see any of these rows."""

    loss = "the journal cannot be written"


@attrs.define(eq=False, slots=False, str=False)
class BatchReused(JournalError):
    """A batch that was delivered comes again with other rows, or its rows can no longer be compared. Nothing was written."""

    query: str = ""
    batch: int = 0


@attrs.define(eq=False, slots=False, str=False)
class CommandReused(JournalError):
    """A command came again with another body. Nothing of this append was written."""

    command: str | bytes = ""
    partition: int = 0
    first: int = 0
    """Offset of the first row that was written for this command."""


@attrs.define(eq=False, slots=False, str=False)
class CopyUnfinished(JournalError):
    """This is a copy of another log that is not whole yet: run ``levada journal copy`` again, which goes on where it stopped."""


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
    """Columns, or the values in them, do not fit."""

    differences: tuple[str, ...] = ()
    """One line for each column that differs."""


def refused(error: OSError, path: Path) -> JournalError:
    """Return the error of the journal for a write that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(
            f"the disk is full ({error.strerror}); nothing of this was written: make room on it", path=str(path)
        )
    return JournalUnwritable(
        f"the disk refuses ({error}); nothing of this was written: see whether this user may write there, and whether the disk is well",
        path=str(path),
    )


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what a disk refuses to write into errors of a journal."""
    try:
        yield
    except OSError as error:
        raise refused(error, path) from error


_WITHOUT_FIELDS = {
    cls.__name__: cls
    for cls in (
        CopyUnfinished,
        JournalBehind,
        JournalDamaged,
        JournalFull,
        JournalLocked,
        JournalUnwritable,
        SchemaMismatch,
    )
}
_OTHERS = {cls.__name__ for cls in (BatchReused, CommandReused, JournalError, OffsetGone)}


def journal_error(error: BaseException) -> JournalError | None:
    """Return the error of a journal in another process as one of its own classes; None if it is not a journal's.

    Its text is the same, with the path. Its fields did not travel, so an error that is little without them is a `JournalError`.
    """
    cause = error.__cause__
    if not isinstance(error, ActorError) or not isinstance(cause, RemoteFailure):
        return None
    cls = _WITHOUT_FIELDS.get(cause.kind)
    if cls is None and cause.kind not in _OTHERS:
        return None
    return (cls or JournalError)(cause.detail)


def bare(error: E) -> E:
    """Return an error that becomes an answer, without its tracebacks: their frames hold the question, with its rows, which holds the error.

    Only the garbage collector would find them: a flood of refused appends of 1 MiB took 15 MB more without this.
    """
    each: BaseException | None = error
    while each is not None and each.__traceback__ is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def fresh(error: E) -> E:
    """Return a copy of an error that is raised again and again: each time, an exception keeps the frames it was raised in."""
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found
