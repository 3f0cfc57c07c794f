"""A log in PostgreSQL that stands still, to be copied, and the end of a copy into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from psycopg import pq

from levada.actors.journal.still import PAGE_BYTES, PAGE_ROWS, StillLog

from .addresses import PostgresAddress
from .errors import refusal
from .opening import Session, finish_copy, lock_shard, read_log, session_at
from .tables import IN_ORDER, LogTables
from .values import kind_of
from .wire import bigint, integer, number_in, rows_in

__all__ = ["finish_postgres", "locked_postgres", "still_postgres"]

_OFFSET = pa.field("offset", pa.int64(), nullable=False)


def _still(address: PostgresAddress, session: Session) -> StillLog:
    """Read a log in a transaction that sees the rows of one moment."""
    session.execute(IN_ORDER)
    head, ends, trimmed, archives = read_log(session, address)
    tables = LogTables.of(address, head.columns)
    kinds, columns = [kind_of(_OFFSET), *tables.kinds], tables.columns.insert(0, _OFFSET)

    def pages(shard: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        following: int | None = start
        while following is not None and following < end:
            values = [integer(shard), bigint(end), bigint(following), bigint(PAGE_ROWS), bigint(PAGE_BYTES)]
            result = _run(address, session, tables.rows, values)
            page, begun = rows_in(result, 2, kinds, columns, address.shown), following
            if page.num_rows == PAGE_ROWS:
                following = page.column(0)[-1].as_py() + 1
            else:
                following = None if result.get_value(0, 1) is None else number_in(result, 1)
            behind = end if following is None else following
            if page.num_rows < behind - begun:
                _require_gone(address, session, tables, shard, begun, behind)
            if page.num_rows:
                yield page

    return StillLog(head.epoch, head.copy_of, head.columns, ends, trimmed, archives, pages)


def _require_gone(
    address: PostgresAddress, session: Session, tables: LogTables, shard: int, start: int, end: int
) -> None:
    """Raise `JournalDamaged` if a row between two offsets was deleted by hand."""
    found = _run(address, session, tables.missing(), [integer(shard), bigint(start), bigint(end)])
    if found.ntuples:
        tables.require_there(shard, *(number_in(found, column) for column in (1, 2, 3)))


def _run(address: PostgresAddress, session: Session, text: str, values: list[bytes]) -> Any:
    """Run a statement; return its result in the binary format."""
    result = session.pgconn.exec_params(text.encode(), values, None, [1] * len(values), 1)
    if result.status != pq.ExecStatus.TUPLES_OK:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        raise refusal(state, result.get_error_message(), address)
    return result


@contextmanager
def still_postgres(address: PostgresAddress) -> Iterator[StillLog]:
    """Have a log stand still for a block, for this process only. Blocks.

    Raises:
        ConfigurationError: there is no such log.
        DatabaseAway: the database is away, or the connection is lost.
        JournalError: the database refuses.
    """
    with session_at(address) as session:
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield _still(address, session)


@contextmanager
def locked_postgres(address: PostgresAddress, shard: int) -> Iterator[StillLog]:
    """Lock the archive of a shard for a block, and yield the log as it is then. Blocks; errors are as for `still_postgres`.

    Who erases rows of the shard, or trims them, has the lock meanwhile: so its old rows stand still.
    """
    with session_at(address) as session:
        session.execute("BEGIN ISOLATION LEVEL READ COMMITTED")  # what is read was committed before the lock was taken
        lock_shard(session, address, shard)
        yield _still(address, session)


def finish_postgres(address: PostgresAddress, source: StillLog) -> None:
    """Record that a copy of a log is whole. Blocks; errors are as for `still_postgres`."""
    with session_at(address) as session:
        finish_copy(session, address, source)
