"""The seam between what uses a log and what keeps it: the questions that a store answers, and how.

A log is any ref that answers the questions of `Log`: a `Journal` here, in a keeper or on a node, or an actor in front of a database. More questions
make it readable by Spark (`TailedLog`), or a mailbox that Spark writes to (`MailboxLog`). `levada.actors.durable.testing.check_log` tests a store.

The protocols below are for the actor that answers: it has a handler for each question. Names of handlers do not matter to askers.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from levada.framework import ActorSystem, Ref

from .blocks import Block
from .extent import Appended, Extent, Fenced
from .ledger import Delivered, Reach
from .questions import (
    Append,
    AwaitRows,
    CommitGroup,
    CopyRows,
    DeclareGroup,
    Deliver,
    DiscardOlder,
    DiscardStaged,
    Erased,
    EraseEntity,
    ForgetGroup,
    Found,
    GetExtent,
    GetGroups,
    GetReach,
    GetSchema,
    Read,
    ReadEntity,
    ReadRows,
    Rows,
    StageRows,
    Trimmed,
    TrimRows,
)

__all__ = ["Answer", "CopiedLog", "Log", "LogStore", "MailboxLog", "TailedLog", "TrimmedLog"]

R = TypeVar("R")

DATABASES: Final = ("postgresql://", "postgres://")
"""How the URL of a database begins, which is no folder."""

Answer: TypeAlias = R | Coroutine[Any, Any, R | None] | None
"""What a handler returns: the answer; None if it has taken the question by `Actor.reply_later`; or a coroutine of one of them."""


class Log(Protocol):
    """A log of durable actors: an actor that answers six questions.

    Rows are in partitions, one for each shard. How many there are is fixed when the log is made. The rows of a partition have the offsets 0, 1, 2 and
    so on, without gaps, and an offset never means another row.

    A handler may refuse with a `JournalError`; its class says why. A refusal is final: the question is not carried out later. Any other error says
    that the store is out of reach, and has carried out the question or not. The asker sends the same question again, so the store may get each
    question twice.

    Rows travel as an Arrow IPC stream of one record batch (`stream_of`, `rows_of_stream`).
    """

    def append(self, m: Append) -> Answer[Appended | Fenced]:
        """Append rows to `Append.partition`, if it ends at `Append.at`.

        `Append.rows` have the columns of the log, as a record batch or a stream. `Append.waits` is false: a full store refuses at once.

        * If the partition ends at ``at``, the rows get the offsets from there on, and the answer is `Appended`. They are all written, or none of
          them, whatever is killed. They outlive all processes and a loss of power before the answer is sent, and from then on readers see them.
        * Otherwise nothing is written, and the answer is `Fenced`, with the end.
        * To compare and to write is one step: of two appends for the same offset, from any processes, at most one is written.

        An asker whose answer was lost sends the same append again. If it was written, the answer is now `Fenced`, and the row at ``at`` is its own.

        Raises:
            JournalFull: there is no room. Nothing is written.
            JournalUnwritable: the store does not take rows now. Nothing is written.
            SchemaMismatch: the rows do not fit the columns. Nothing is written.
        """
        ...

    def extent(self, m: GetExtent) -> Answer[Extent]:
        """Answer which rows there are. All rows are counted whose append was answered before the question came.

        `Extent.first` and `Extent.end` name every partition, from 0 on. `Extent.epoch` stays the same for as long as the log exists; a log that
        was removed and made again has another one. `Extent.opening` is for a `TailedLog`; others may leave it empty.
        """
        ...

    def schema(self, m: GetSchema) -> Answer[bytes]:
        """Answer with the columns of the log, as an Arrow IPC message.

        If `GetSchema.wanted` has columns that the log lacks, it adds them at its end: they are nullable, and rows from before are null there. A new
        log takes all of ``wanted``. A log that cannot grow while it is open answers with the columns that it has, and the asker refuses them.

        Raises:
            SchemaMismatch: ``wanted`` did not grow from the columns of the log (`check_growth`).
        """
        ...

    def read_entity(self, m: ReadEntity) -> Answer[Found]:
        """Answer with rows of `ReadEntity.partition` whose column ``entity`` has this value, in the order of the log.

        Each row has its offset in a first column ``offset``, then the columns of the log.

        * ``start``: only rows from this offset on.
        * ``since``: the name of a column of offsets. Only rows from the offset on that the newest row of the entity has there, if it is not null.
        * ``newest``: only so many of the newest rows, `Found.next` is None.
        * ``max_bytes``: no more than about so many bytes, but one row at least. `Found.next` is the offset to go on at, None behind the last row.
        * ``stream``: false if `Found.data` may be a record batch.
        """
        ...

    def read_rows(self, m: ReadRows) -> Answer[Rows]:
        """Answer with the rows of `ReadRows.partition` from ``start`` up to ``end``, or to the end of the log; about ``max_bytes``, but one at least.

        They have the columns of the log, and follow each other without gaps. Erased rows are passed over: `Rows.first` is then behind ``start``, or
        the answer ends before them. With `Rows.count` 0 there are no more rows.
        """
        ...

    def erase(self, m: EraseEntity) -> Answer[Erased]:
        """Erase the rows of an entity before the offset `EraseEntity.before`; answer when no file of the store has them any more.

        The other rows keep their offsets. `Erased.rows` counts the rows that were erased now. To erase them again is no error.

        Raises:
            JournalError: `EraseEntity.archive` is out of reach, or the log has no archives. No row is erased.
            JournalFull, JournalUnwritable: not all of them are erased. The asker tries again.
        """
        ...


class CopiedLog(Log, Protocol):
    """A log that another log can be copied into (`levada.actors.durable.copy_log`)."""

    def copy(self, m: CopyRows) -> Answer[Appended | Fenced]:
        """Append rows to `CopyRows.partition` at their own offsets, if it ends at `CopyRows.at`. Afterwards it ends at `CopyRows.end`.

        `CopyRows.placed` returns the offsets and the rows. Offsets without a row stay empty, as if their rows were erased. Everything else is as for
        `append`.
        """
        ...


class TrimmedLog(Log, Protocol):
    """A log that can drop what its durable actors do not need any more (``shards(keep=…)``)."""

    def trim(self, m: TrimRows) -> Answer[Trimmed]:
        """Remove the rows that may go, as `TrimRows` says; answer when they are gone.

        Before the first row goes, `Extent.trimmed` counts it. If this is cut short, some of the rows are gone, and the asker tries again later.
        A row that is the newest of its entity never goes, nor does a snapshot, or a tombstone, that is the newest.

        Raises:
            JournalError: this is no log of durable actors. `TrimRows.archive` is out of reach, or another log's, or the log has no archives: no row
                goes then.
            JournalFull, JournalUnwritable: not all of them are gone.
        """
        ...


class TailedLog(Log, Protocol):
    """A log that Spark reads, in batches and as a stream."""

    def await_rows(self, m: AwaitRows) -> Answer[Extent]:
        """Answer with the extent when `AwaitRows.reached` is true for it. The asker's time-out ends the wait."""
        ...

    def reach(self, m: GetReach) -> Answer[Reach]:
        """Answer how far the rows that there were at an earlier `Extent.opening` are the same today.

        Each start of the store has a name, an opening. If an older copy was put in the place of the log, it does not know the later openings.
        `Reach.known` is false then.
        """
        ...


class MailboxLog(TailedLog, Protocol):
    """A log that Spark also writes to, and whose rows go when all groups have read them. The questions say what each of them promises."""

    def stage(self, m: StageRows) -> Answer[int]:
        """Keep rows of a batch aside."""
        ...

    def deliver(self, m: Deliver) -> Answer[Delivered]:
        """Append a batch that was kept aside, once."""
        ...

    def discard(self, m: DiscardStaged) -> Answer[int]:
        """Drop rows that were kept aside."""
        ...

    def discard_older(self, m: DiscardOlder) -> Answer[list[tuple[str, int]]]:
        """Drop rows that were kept aside long ago."""
        ...

    def declare(self, m: DeclareGroup) -> Answer[Mapping[int, int]]:
        """Keep the rows that a group has not read."""
        ...

    def commit(self, m: CommitGroup) -> Answer[None]:
        """Note what a group has read."""
        ...

    def forget(self, m: ForgetGroup) -> Answer[None]:
        """Forget a group."""
        ...

    def groups(self, m: GetGroups) -> Answer[Mapping[str, Mapping[int, int]]]:
        """Answer with what the groups have read."""
        ...

    def read(self, m: Read) -> Answer[list[Block]]:
        """Answer with blocks of rows."""
        ...


class LogStore(Protocol):
    """A place of logs that each process opens for itself, as a database. `levada.actors.durable.shards` takes one as ``journal=``.

    It is a message (`levada.framework.message`), so that it travels to the nodes. It has no password.
    """

    def open(self, system: ActorSystem, shards: int) -> AbstractAsyncContextManager[Ref[Any]]:
        """Open the log for as long as the block runs; the ref answers the questions of `Log`, and stays the same while the store is out of reach.

        The driver opens it first, and asks for the columns (`GetSchema.wanted`). Each node that has shards opens it then.

        Args:
            system: of the process.
            shards: the number of partitions of a new log.

        Raises:
            JournalError, OSError: it cannot be opened.
        """
        ...
