"""What the database says, in the words of a journal."""

from __future__ import annotations

from typing import Final

from levada.actors.journal import (
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalUnwritable,
    SchemaMismatch,
)

from .addresses import PostgresAddress

__all__ = ["DatabaseAway", "DatabaseReadOnly", "refusal"]


class DatabaseAway(ConnectionError):
    """The database cannot be reached, or the connection is lost: the last statements may have been done."""


class DatabaseReadOnly(DatabaseAway):
    """All that can be reached only reads: a standby during a fail-over, which may take writes soon."""


_GOES_AWAY: Final = (
    "08",  # connection exceptions
    "25P03",  # idle_in_transaction_session_timeout
    "40001",  # serialization_failure: of two writers one has to try again
    "40P01",  # deadlock_detected
    "53300",  # too_many_connections
    "55P03",  # lock_not_available
    "57P",  # an administrator, a crash of the server, or one that starts up or shuts down
)
"""States, or how they begin, after which the same statement may succeed."""
_KINDS: Final[dict[str, tuple[type[JournalError], str]]] = {
    "53100": (JournalFull, "the disk of the database is full, and nothing of this was written: make room on it"),
    "53200": (JournalUnwritable, "the database is out of memory, and nothing of this was written"),
    "25006": (
        JournalUnwritable,
        "the database only reads: it is a standby, or default_transaction_read_only is set. Name the primary, or all hosts",
    ),
    "42501": (
        JournalUnwritable,
        "the role of this connection lacks a right: GRANT it, or let the owner of the tables start the program once",
    ),
    "42P01": (JournalDamaged, "a table of the log is gone"),
    "42P07": (JournalDamaged, "some tables of the log are there, and others are gone"),
    "42703": (JournalDamaged, "a column of the log is gone"),
    "42804": (JournalDamaged, "a column of the log has another type"),
    "0A000": (JournalDamaged, "a table of the log was changed"),
    "23505": (JournalDamaged, "there are rows behind the end of the log, which levada has not written"),
    "26000": (
        JournalError,
        "a pooler in between forgets prepared statements: let pgbouncer pool sessions, or give it max_prepared_statements (1.21 and later)",
    ),
    "57014": (JournalUnwritable, "the database cancelled a statement: see its statement_timeout"),
}
"""The error of the journal for a state, and what it says."""
_CLASSES: Final[dict[str, type[JournalError]]] = {
    "22": SchemaMismatch,  # a value out of range
    "23": SchemaMismatch,  # a constraint that was added by hand
    "53": JournalUnwritable,
    "54": SchemaMismatch,  # a row that is too large
    "58": JournalUnwritable,  # the disk
}


def refusal(state: str, text: str, address: PostgresAddress) -> JournalError | DatabaseAway:
    """Return the error for one of the server.

    Args:
        state: its SQLSTATE, or nothing.
        text: what the server says.
        address: of the log.
    """
    said = " ".join(text.split())
    said = said.removeprefix("ERROR: ").removeprefix("FATAL: ")
    if not state or state.startswith(_GOES_AWAY):
        return DatabaseAway(f"{address}: {said or 'the connection is lost'}")
    kind, meaning = _KINDS.get(state) or (_CLASSES.get(state[:2], JournalError), "the database refuses")
    return kind(f"{meaning} ({said}, SQLSTATE {state})", path=address.shown)
