"""How a log is opened: the session of libpq, what the server must be, and the tables, which are made, or get more columns.

All of it blocks, so it runs in a thread. A log is made and grown in one transaction, which others that open it wait for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import psycopg
import pyarrow as pa

from levada.actors.journal import (
    CopyUnfinished,
    JournalBehind,
    JournalDamaged,
    JournalError,
    JournalLocked,
    JournalUnwritable,
    SchemaMismatch,
    check_growth,
)
from levada.actors.journal.places import Archived
from levada.actors.journal.recovery import why_no_copy
from levada.actors.journal.still import StillLog
from levada.framework.errors import ConfigurationError

from .addresses import PostgresAddress
from .errors import DatabaseAway, DatabaseReadOnly, refusal
from .tables import FORMAT, LogTables, name_of

__all__ = [
    "LogHead", "Session", "count_rows", "finish_copy", "grow_log", "note_opening", "open_log", "open_session", "read_log", "require_log",
    "session_at",
]  # fmt: skip

OLDEST: Final = 14_00_00
"""The oldest version of PostgreSQL that its makers maintain."""
MOST_COUNTED: Final = 1_000_000
"""The most rows that are counted when a log is opened, to notice those that were deleted by hand; it takes 60 to 110 ms."""
KEPT: Final = 1000
"""The number of openings that are kept."""
_READ_ONLY: Final = "it is a standby, or default_transaction_read_only is set. Name the primary, or all hosts"
_LOCK: Final = 0x6C657661
"""The first half of the number of the advisory lock for making tables; the other half is made from their name."""
LOCKED_WITHIN: Final = "30s"
"""How long to wait while another process changes the archive of a shard."""

RIGHTS: Final = {
    "": ("SELECT", "INSERT", "DELETE"),
    "_shards": ("SELECT", "UPDATE"),
    "_trims": ("SELECT", "INSERT", "UPDATE"),
    "_erased": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "_log": ("SELECT",),
    "_openings": ("SELECT", "INSERT", "DELETE"),
}
"""What a role that writes needs, by table; to make a log, and to add columns, it must own the tables."""

Session = psycopg.Connection[Any]


@attrs.frozen(eq=False)
class LogHead:
    """What a log is."""

    epoch: str
    columns: pa.Schema
    shards: int
    copy_of: str | None
    """The log that it is a copy of, if the copy is not whole."""


def open_session(address: PostgresAddress) -> Session:
    """Connect.

    Raises:
        DatabaseAway: there is no database, or it does not take this connection.
        DatabaseReadOnly: it only reads.
    """
    try:
        session = psycopg.connect("", autocommit=True, **address.parameters)  # type: ignore[arg-type]  # all are texts
    except psycopg.Error as error:
        text = " ".join(str(error).split())
        # Its cause would keep the parameters, with the password.
        if "read-only" in text or "hot standby" in text:
            raise DatabaseReadOnly(f"{address}: it only reads: {_READ_ONLY} ({text})") from None
        raise DatabaseAway(f"{address}: {text}") from None
    # Of transactions: a serializable one may fail, or have appends fail.
    session.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return session


@contextmanager
def session_at(address: PostgresAddress) -> Iterator[Session]:
    """Connect for a block. Raises as `open_session`, and as `open_log` if the server refuses something in the block, or the connection is lost."""
    try:
        with open_session(address) as session:
            yield session
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def open_log(
    session: Session, address: PostgresAddress, shards: int, epoch: str, copy_of: str | None = None
) -> LogHead:
    """Open a log; it is made if there is none, without columns.

    Args:
        session: a connection.
        address: where it is.
        shards: the number of shards of a new log.
        epoch: the name of a new log.
        copy_of: the log whose rows are copied into this one, which is new, or such a copy that is not whole; None: it is no copy.

    Raises:
        CopyUnfinished: it is a copy that is not whole.
        ConfigurationError: the server cannot keep a log; or with `copy_of`, it has rows of its own.
        JournalError: the role lacks rights, or the tables were changed by hand.
        DatabaseAway: it only reads, or the connection is lost.
    """
    try:
        _require_server(session, address)
        head = _head(session, address)
        if head is None or head.copy_of != copy_of:
            with session.transaction():
                _lock(session, address)
                head = _head(session, address) or _create(session, address, shards, epoch)
                if head.copy_of != copy_of:
                    head = _as_copy(session, address, head, copy_of)
        _require_columns(session, LogTables.of(address, head.columns))
        _require_rights(session, address, head)
        _require_shards(session, address, head)
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None
    return head


def _as_copy(session: Session, address: PostgresAddress, head: LogHead, copy_of: str | None) -> LogHead:
    """Record that rows of another log are copied into this one."""
    if copy_of is None:
        raise CopyUnfinished(
            "this is a copy of another log, and it is not whole: run levada journal copy again, which goes on where it stopped",
            path=address.shown,
        )
    [end] = _one(session, f'SELECT max("end") FROM {name_of(address, "_shards")}')
    if head.copy_of is not None or end:
        raise ConfigurationError(
            f"{address} {why_no_copy(copy_of, head.copy_of)}. Nothing is overwritten: give the copy another name, ?table="
        )
    session.execute(f"UPDATE {name_of(address, '_log')} SET copy_of = %s".encode(), (copy_of,))
    return attrs.evolve(head, copy_of=copy_of)


def finish_copy(session: Session, address: PostgresAddress, source: StillLog) -> None:
    """Record that all rows of another log are copied into this one; errors are as for `open_log`."""
    text = (
        f"INSERT INTO {name_of(address, '_trims')} (shard, trimmed, archive, archived) VALUES (%s, %s, %s, %s) ON CONFLICT (shard) "
        "DO UPDATE SET trimmed = excluded.trimmed, archive = excluded.archive, archived = excluded.archived"
    )
    try:
        with session.transaction():
            for shard in {*source.trimmed, *source.archives}:
                place = attrs.astuple(source.archives.get(shard, Archived("", 0)))
                session.execute(text.encode(), (shard, source.trimmed.get(shard, 0), *place))
            session.execute(f"UPDATE {name_of(address, '_log')} SET copy_of = NULL".encode())
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def read_log(
    session: Session, address: PostgresAddress
) -> tuple[LogHead, dict[int, int], dict[int, int], dict[int, Archived]]:
    """Return what a log is, where its shards end, how far they were trimmed, and where their archives are.

    Raises:
        ConfigurationError: there is none.
        JournalError, DatabaseAway: as `open_log`.
    """
    try:
        head = _head(session, address)
        if head is None or not len(head.columns):
            raise ConfigurationError(
                f"{address}: there is no log of this name: give the name of its table, ?table=accounts"
            )
        tables = LogTables.of(address, head.columns)
        _require_columns(session, tables)
        _require_shards(session, address, head)
        found = session.execute(tables.shards().encode()).fetchall()
        ends = {shard: end for shard, end, *_ in found}
        tables.require_reached(ends, {shard: reached for shard, _, reached, *_ in found})
        trimmed = {shard: end for shard, _, _, end, _, _ in found if end}
        archives = {shard: Archived(place, end) for shard, *_, place, end in found if place}
        return head, ends, trimmed, archives
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def count_rows(session: Session, address: PostgresAddress, head: LogHead) -> None:
    """Require all rows of a log that were neither erased nor trimmed; of more than `MOST_COUNTED`, only the newest ones.

    Raises:
        JournalDamaged: some were deleted by hand.
        JournalError, DatabaseAway: as `open_log`.
    """
    if not len(head.columns):
        return
    tables = LogTables.of(address, head.columns)
    try:
        found = session.execute(tables.shards().encode()).fetchall()
        tables.require_reached({each[0]: each[1] for each in found}, {each[0]: each[2] for each in found})
        for shard, first in session.execute(tables.early().encode()):
            raise JournalDamaged(
                f"there are rows of shard {shard} before its first one, {first}, in the table {tables.name('_trims')}: set first to 0 there",
                path=address.shown,
            )
        if sum(end - trimmed for _, end, _, trimmed, _, _ in found) <= MOST_COUNTED:
            for each in session.execute(tables.missing("NULL::integer", "0", 's."end"').encode()).fetchall():
                tables.require_there(*each)
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def grow_log(session: Session, address: PostgresAddress, wanted: pa.Schema) -> LogHead:
    """Add the columns to a log that it lacks.

    Raises:
        SchemaMismatch: they are columns of something else.
        ConfigurationError: a table cannot have them.
        JournalError, DatabaseAway: as `open_log`.
    """
    try:
        with session.transaction():
            _lock(session, address)
            head = _head(session, address)
            if head is None:
                raise JournalDamaged(f"the table {name_of(address, '_log')} is gone", path=address.shown)
            columns = _grown(head.columns, wanted)
            if columns == head.columns:
                return head
            tables, known = LogTables.of(address, columns), len(head.columns)
            strict = [field.name for field in list(columns)[known:] if known and not field.nullable]
            if strict:
                raise SchemaMismatch(
                    f"{', '.join(strict)}: a new column of a log in PostgreSQL must be nullable", path=address.shown
                )
            if not known and _is_there(session, tables.name()):
                raise JournalError(
                    f"there is a table {tables.name()} which is no log: give the log another name, ?table=",
                    path=address.shown,
                )
            if len(columns) > known:
                for text in tables.growth(known):
                    session.execute(text.encode())
            data = columns.serialize().to_pybytes()
            session.execute(f"UPDATE {tables.name('_log')} SET columns = %s".encode(), (data,))
            return attrs.evolve(head, columns=columns)
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def require_log(session: Session, address: PostgresAddress, known: LogHead) -> None:
    """Require the log that this process has opened; `JournalBehind` if it was made anew, and errors as `open_log`."""
    try:
        _require_server(session, address)
        head = _head(session, address)
        if head is not None:
            _require_shards(session, address, head)
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None
    if head is None or head.epoch != known.epoch:
        there = "there is none any more" if head is None else f"this one is {head.epoch}"
        raise JournalBehind(
            f"the log {known.epoch} was opened, and {there}: its tables were dropped, or this is another database",
            path=address.shown,
        )


def note_opening(session: Session, address: PostgresAddress, name: str) -> None:
    """Write down where the shards end, for `levada.actors.journal.GetReach`: rows that are gone by then were lost by a fail-over or a restore.

    To its name is added when it began, in µs since 1970: so it can be placed among later ones by a copy that does not know it.
    """
    openings = name_of(address, "_openings")
    try:
        with session.transaction():
            # No append ends between the look at the ends and the commit, or rows of this opening would be behind them.
            session.execute("SET LOCAL lock_timeout = '10s'")
            session.execute(f"LOCK TABLE {name_of(address, '_shards')} IN SHARE MODE".encode())
            [newest] = _one(
                session,
                f"INSERT INTO {openings} (name, ends) SELECT concat(%s::text, '-', (extract(epoch FROM now()) * 1000000)::bigint), "
                f'array_agg("end" ORDER BY shard) FROM {name_of(address, "_shards")} RETURNING number',
                name,
            )
            session.execute(f"DELETE FROM {openings} WHERE number <= %s".encode(), (newest - KEPT,))
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def refuse_server(address: PostgresAddress, version: int, settings: Mapping[str, str]) -> None:
    """Require a server that can keep a log; the settings are this session's.

    Raises:
        DatabaseReadOnly: it only reads.
        ConfigurationError: it is too old, or would forget rows, or has texts in another encoding.
    """
    if version < OLDEST:
        raise ConfigurationError(
            f"{address}: this is PostgreSQL {version // 10_000}, and levada needs {OLDEST // 10_000} or later"
        )
    if settings["recovery"] == "true" or settings["read_only"] == "on":
        raise DatabaseReadOnly(f"{address}: it only reads: {_READ_ONLY}")
    if settings["encoding"] != "UTF8":
        raise ConfigurationError(f"{address}: the encoding of the database is {settings['encoding']}, wanted UTF8")
    if settings["synchronous_commit"] == "off":
        raise ConfigurationError(
            f"{address}: synchronous_commit is off, so a crash of the server would lose rows that were answered: "
            "ALTER ROLE … SET synchronous_commit = on"
        )


def _require_server(session: Session, address: PostgresAddress) -> None:
    found = _one(
        session,
        "SELECT pg_is_in_recovery()::text, current_setting('transaction_read_only'), current_setting('server_encoding'), "
        "current_setting('synchronous_commit')",
    )
    names = ("recovery", "read_only", "encoding", "synchronous_commit")
    refuse_server(address, session.info.server_version, dict(zip(names, found, strict=True)))


def _lock(session: Session, address: PostgresAddress) -> None:
    """Have others wait who open or grow a log of this name, until the end of the transaction."""
    key = zlib.crc32(address.table.encode()) - (1 << 31)
    session.execute("SELECT pg_advisory_xact_lock(%s::integer, %s::integer)", (_LOCK, key))


def lock_shard(session: Session, address: PostgresAddress, shard: int) -> None:
    """Have others wait who change the archive of a shard, until the end of the transaction; `JournalLocked` if one takes half a minute."""
    key = zlib.crc32(f"{address.table} {shard}".encode()) - (1 << 31)
    try:
        # The archive may be slow, and nothing is sent to the server meanwhile.
        session.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        session.execute(f"SET LOCAL lock_timeout = '{LOCKED_WITHIN}'".encode())
        session.execute("SELECT pg_advisory_xact_lock(%s::integer, %s::integer)", (_LOCK + 1, key))
    except psycopg.errors.LockNotAvailable:
        raise JournalLocked(
            f"another process changes the archive of shard {shard}: try again later", path=address.shown
        ) from None
    except psycopg.Error as error:
        raise refusal(error.sqlstate or "", str(error), address) from None


def _one(session: Session, text: str, *values: object) -> Any:
    return session.execute(text.encode(), values or None).fetchone()


def _is_there(session: Session, name: str) -> bool:
    # A table in the FROM has the server look at what others have made meanwhile: it remembers that there was no such name.
    [there] = _one(session, "SELECT to_regclass(%s) IS NOT NULL FROM pg_namespace LIMIT 1", name)
    return bool(there)


def _head(session: Session, address: PostgresAddress) -> LogHead | None:
    log = name_of(address, "_log")
    if not _is_there(session, log):
        return None
    found = _one(session, f"SELECT format, epoch, columns, copy_of FROM {log}")
    if found is None:
        raise JournalDamaged(f"the table {log} is empty", path=address.shown)
    version, epoch, columns, copy_of = found
    if version != FORMAT:
        raise ConfigurationError(
            f"{address}: a newer levada has made this log (format {version}, this one knows {FORMAT})"
        )
    shards, newest = _one(session, f"SELECT count(*), max(shard) FROM {name_of(address, '_shards')}")
    if not shards or newest != shards - 1:
        raise JournalDamaged(
            f"the table {name_of(address, '_shards')} lacks shards: it was changed by hand", path=address.shown
        )
    try:
        return LogHead(epoch, pa.ipc.read_schema(pa.py_buffer(columns)), shards, copy_of)
    except (pa.ArrowException, OSError) as error:
        raise JournalDamaged(f"the columns in {log} cannot be read: {error}", path=address.shown) from error


def _create(session: Session, address: PostgresAddress, shards: int, epoch: str) -> LogHead:
    tables = LogTables.of(address, pa.schema([]))
    for text in tables.creation():
        session.execute(text.encode())
    session.execute(
        f"INSERT INTO {tables.name('_shards')} SELECT number, 0, 0 FROM generate_series(0, %s::integer) AS number".encode(),
        (shards - 1,),
    )
    session.execute(
        f"INSERT INTO {tables.name('_log')} (format, epoch, columns) VALUES (%s, %s, %s)".encode(),
        (FORMAT, epoch, tables.columns.serialize().to_pybytes()),
    )
    return LogHead(epoch, tables.columns, shards, None)


def _grown(there: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """Return the columns of a log, as the wanted ones have them, then those that it lacks; `SchemaMismatch` if it cannot have them."""
    if not len(there):
        return wanted
    fields = {field.name: field for schema in (there, wanted) for field in schema}
    columns = pa.schema(list(fields.values()))
    check_growth(there, columns)
    return columns


_MEDDLERS: Final = (
    b"SELECT 'the trigger ' || tgname FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND NOT tgisinternal AND tgenabled <> 'D' "
    b"AND tgtype & 3 = 3 "  # for each row, before
    b"UNION ALL SELECT 'the rule ' || rulename FROM pg_rewrite WHERE ev_class = to_regclass(%s) "
    b"UNION ALL SELECT 'row security' WHERE row_security_active(to_regclass(%s))"
)
"""The query for what comes between a statement and the rows of a table."""


_KEYS: Final = (
    "SELECT count(*) FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'p' AND ARRAY['_shard', '_offset'] = "
    "ARRAY(SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS k(number, place) "
    "JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place)"
)
"""The query for the number of the primary keys of a table of rows: without one, an offset may be there twice."""


def _require_columns(session: Session, tables: LogTables) -> None:
    """Require that the table of rows has the columns of the log, and gives and takes rows as they are."""
    if not len(tables.columns):
        return
    found: dict[str, str] = dict(
        session.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (tables.name(),),
        ).fetchall()
    )
    differences = [
        f"{name}: {found.get(name, 'missing')}, wanted {kind}"
        for name, kind in tables.types.items()
        if found.get(name, "").replace('"', "") != kind  # quote_all_identifiers
    ]
    if found and not _one(session, _KEYS, tables.name())[0]:
        differences.append("the primary key (_shard, _offset) is missing")
    differences += [f"{what} may change or hide rows" for (what,) in session.execute(_MEDDLERS, [tables.name()] * 3)]
    if differences:
        raise JournalDamaged(
            f"the table {tables.name()} was changed by hand: {'; '.join(differences)}", path=tables.address.shown
        )


def _require_shards(session: Session, address: PostgresAddress, head: LogHead) -> None:
    """Require as many shards as there were when the log was opened last: with others, entities would be looked for where they are not."""
    found = _one(session, f"SELECT cardinality(ends) FROM {name_of(address, '_openings')} ORDER BY number DESC LIMIT 1")
    if found is not None and found[0] != head.shards:
        raise JournalDamaged(
            f"the table {name_of(address, '_shards')} has {head.shards} shards, and the log {found[0]}: it was changed by hand",
            path=address.shown,
        )


def _require_rights(session: Session, address: PostgresAddress, head: LogHead) -> None:
    """Require that the role of this session may use the tables."""
    tables = {suffix: rights for suffix, rights in RIGHTS.items() if suffix or len(head.columns)}
    wanted = [(name_of(address, suffix), right) for suffix, rights in tables.items() for right in rights]
    names, rights = zip(*wanted, strict=True)
    missing = session.execute(
        "SELECT session_user, wanted, name FROM unnest(%s::text[], %s::text[]) AS w(name, wanted) WHERE NOT has_table_privilege(name, wanted)",
        (list(names), list(rights)),
    ).fetchall()
    if missing:
        grants = "; ".join(f'GRANT {right} ON {name} TO "{role}"' for role, right, name in missing)
        raise JournalUnwritable(f"the role of this connection lacks rights: {grants}", path=address.shown)
