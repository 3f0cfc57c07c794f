"""The small facts of a journal, in SQLite: who has read how far, and which batches of a sink have been delivered.

The ledger decides. A batch is delivered at the moment in which its line is committed here; before that its rows are in the segments, marked
with the number of their transaction, and readers do not see them. What a crash leaves of a transaction without a line is cut off.

Commits are synced (WAL, ``synchronous=FULL``): a line that was promised survives a power failure. Methods belong to one thread at a time.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import attrs

from .errors import JournalDamaged, JournalError

__all__ = ["Delivered", "Ledger"]

KEPT = 1000
"""Newest batches of each query whose ranges are remembered; of older ones only that they were delivered."""

_FORMAT = 1
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE partitions (number INTEGER PRIMARY KEY, end INTEGER NOT NULL);
CREATE TABLE groups (name TEXT, partition INTEGER, offset INTEGER NOT NULL, PRIMARY KEY (name, partition)) WITHOUT ROWID;
CREATE TABLE batches (query TEXT, batch INTEGER, ranges TEXT NOT NULL, PRIMARY KEY (query, batch)) WITHOUT ROWID;
"""


@attrs.frozen
class Delivered:
    """What became of a batch."""

    already: bool
    """It had been delivered before; nothing was written now."""
    ranges: Mapping[int, tuple[int, int]]
    """For each partition that got rows, the offset of the first and the one behind the last. Empty for a batch so old that its ranges are
    forgotten."""


class Ledger:
    """The database of one journal. Made by `Ledger.open`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        facts = dict(connection.execute("SELECT name, value FROM facts"))
        if facts["format"] != _FORMAT:
            raise JournalError(f"format {facts['format']}, this program reads {_FORMAT}", path=str(path))
        self.journal = bytes(facts["journal"])
        """Sixteen octets that tell this journal from all others."""
        self.partitions = int(facts["partitions"])
        self.ready = bool(facts["ready"])
        """Whether all partitions have been made."""
        self.transaction = int(facts["transaction"])
        """Number of the last transaction that was committed."""
        self._groups: dict[str, dict[int, int]] = {}
        for name, partition, offset in connection.execute("SELECT name, partition, offset FROM groups"):
            self._groups.setdefault(name, {})[partition] = offset

    @classmethod
    def open(cls, path: Path, *, partitions: int) -> Ledger:
        """Open the database, or make it for a new journal of so many partitions.

        Raises:
            JournalDamaged: it is no ledger, or a damaged one.
            JournalError: written by a later version of this format.
        """
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            with _transaction(connection):
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _TABLES.split(";"):
                        connection.execute(statement)
                    facts = {
                        "format": _FORMAT,
                        "journal": uuid.uuid4().bytes,
                        "partitions": partitions,
                        "ready": 0,
                        "transaction": 0,
                    }
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
                    connection.executemany("INSERT INTO partitions VALUES (?, 0)", [(n,) for n in range(partitions)])
            return cls(connection, path)
        except (sqlite3.DatabaseError, KeyError) as error:
            connection.close()
            raise JournalDamaged(f"this is no ledger of a journal: {error}", path=str(path)) from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()

    def set_ready(self) -> None:
        """Note that all partitions have been made."""
        with _transaction(self._connection):
            self._connection.execute("UPDATE facts SET value = 1 WHERE name = 'ready'")
        self.ready = True

    def ends(self) -> dict[int, int]:
        """For each partition, the offset up to which it must reach: everything below was delivered, or read by a group."""
        ends = dict(self._connection.execute("SELECT number, end FROM partitions"))
        for offsets in self._groups.values():
            for partition, offset in offsets.items():
                ends[partition] = max(ends[partition], offset)
        return ends

    # ------------------------------------------------------------ batches of a sink

    def delivered(self, query: str, batch: int) -> Delivered | None:
        """Look a batch up; None if it has not been delivered."""
        found = self._connection.execute(
            "SELECT batch, ranges FROM batches WHERE query = ? AND batch >= ? ORDER BY batch LIMIT 1", (query, batch)
        ).fetchone()
        if found is not None and found[0] == batch:
            return Delivered(already=True, ranges={int(n): (a, b) for n, (a, b) in json.loads(found[1]).items()})
        oldest, count = self._connection.execute(
            "SELECT min(batch), count(*) FROM batches WHERE query = ?", (query,)
        ).fetchone()
        # Batches of a query are numbered upwards: one below all that are kept was delivered and forgotten.
        return Delivered(already=True, ranges={}) if count >= KEPT and batch < oldest else None

    def deliver(self, query: str, batch: int, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Commit the transaction `transaction` + 1: the rows in these ranges, which are synced, are this batch.

        Raises:
            sqlite3.Error: nobody knows whether it was committed; only opening the journal again tells.
        """
        with _transaction(self._connection) as connection:
            text = json.dumps({str(number): list(between) for number, between in ranges.items()})
            connection.execute("INSERT INTO batches VALUES (?, ?, ?)", (query, batch, text))
            connection.execute(
                "DELETE FROM batches WHERE query = ? AND batch <= "
                "(SELECT batch FROM batches WHERE query = ? ORDER BY batch DESC LIMIT 1 OFFSET ?)",
                (query, query, KEPT),
            )
            connection.executemany(
                "UPDATE partitions SET end = ? WHERE number = ?", [(end, number) for number, (_, end) in ranges.items()]
            )
            connection.execute("UPDATE facts SET value = ? WHERE name = 'transaction'", (self.transaction + 1,))
        self.transaction += 1

    # ------------------------------------------------------------ groups

    def groups(self) -> dict[str, dict[int, int]]:
        """For each group, the offset behind the last row that it has done with, by partition."""
        return {name: dict(offsets) for name, offsets in self._groups.items()}

    def set_group(self, name: str, offsets: Mapping[int, int]) -> None:
        """Note how far a group has come."""
        with _transaction(self._connection) as connection:
            connection.executemany(
                "INSERT INTO groups VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET offset = excluded.offset",
                [(name, partition, offset) for partition, offset in offsets.items()],
            )
        self._groups.setdefault(name, {}).update(offsets)

    def forget_group(self, name: str) -> None:
        """Drop a group, so that it holds up no retention any more."""
        with _transaction(self._connection) as connection:
            connection.execute("DELETE FROM groups WHERE name = ?", (name,))
        self._groups.pop(name, None)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with closing(connection.cursor()) as cursor:
                cursor.execute("ROLLBACK")
        raise
