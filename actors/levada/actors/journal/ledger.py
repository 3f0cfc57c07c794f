"""The ledger of a journal, in SQLite: how far each group has read, and which batches of a sink have been delivered.

The ledger decides. A batch is delivered when its line is committed here. Before that its rows are in the segments, marked with the number of
their transaction, and readers do not see them. Rows of a transaction without a line, left by a crash, are cut off.

Commits are synced (WAL, ``synchronous=FULL``): a line that was promised survives a power failure. Methods belong to one thread at a time.

SQLite only finds damage to its own structure. So the table ``checks`` has the number of rows of each other table and the sum of their checksums,
kept by triggers. The fact ``commits`` counts commits: a ledger that lost its newest ones is behind the count in `levada.actors.journal.ends`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import attrs

from levada.framework import message
from levada.framework.files import Files
from levada.framework.platform import PLATFORM, Platform

from .asking import write
from .errors import JournalDamaged, JournalError, JournalFull, JournalUnwritable
from .places import Archived

__all__ = ["Delivered", "Erasure", "Ledger", "LedgerLine", "Reach", "drop_unfinished", "ledger_errors"]

KEPT = 1000
"""Batches of each query whose lines are kept, newest first. Of an older batch the ledger knows only that it was delivered."""

KEPT_OPENINGS = 4096
"""Openings that are kept, newest first."""

_FORMAT = 3
"""2 has the tables `_TABLES_2`; since 3 the ranges of a batch may be followed by what identifies its rows, see `LedgerLine`."""
_COLUMNS = {
    "facts": ("name", "value"),
    "partitions": ("number", "end"),
    "groups": ("name", "partition", "offset"),
    "batches": ("query", "batch", "ranges"),
    "openings": ("number", "name", "ends"),
    "losses": ("partition", "end", "first"),
}
"""The tables that have checks."""
_TABLES_1 = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE partitions (number INTEGER PRIMARY KEY, end INTEGER NOT NULL)",
    "CREATE TABLE groups (name TEXT, partition INTEGER, offset INTEGER NOT NULL, PRIMARY KEY (name, partition)) WITHOUT ROWID",
    "CREATE TABLE batches (query TEXT, batch INTEGER, ranges TEXT NOT NULL, PRIMARY KEY (query, batch)) WITHOUT ROWID",
)
_TABLES_2 = (
    "CREATE TABLE openings (number INTEGER PRIMARY KEY, name TEXT NOT NULL, ends TEXT NOT NULL)",
    "CREATE TABLE losses (partition INTEGER, end INTEGER, first INTEGER NOT NULL, PRIMARY KEY (partition, end)) WITHOUT ROWID",
    "CREATE TABLE checks (name TEXT PRIMARY KEY, rows INTEGER NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID",
)

_REFUSALS = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY,
}  # fmt: skip
"""Errors of the disk, of permissions and of locks: they say nothing about the content of a ledger."""
_SHARED = 32 << 10
_MAGIC, _PAGE = b"SQLite format 3\0", 4096
"""Bytes that SQLite shares between processes, in a file beside the ledger."""


def _triggers() -> Iterator[str]:
    for table, columns in _COLUMNS.items():
        new, old = (", ".join(f"{row}.{column}" for column in columns) for row in ("NEW", "OLD"))
        for event, rows, total in (
            ("INSERT", 1, f"row_sum({new})"),
            ("UPDATE", 0, f"row_sum({new}) - row_sum({old})"),
            ("DELETE", -1, f"-row_sum({old})"),
        ):
            yield (
                f"CREATE TRIGGER check_{event.lower()}_{table} AFTER {event} ON {table} BEGIN "
                f"UPDATE checks SET rows = rows + {rows}, sum = sum + {total} WHERE name = '{table}'; END"
            )


def _row_sum(*values: object) -> int:
    return zlib.crc32(ascii(values).encode())


@attrs.frozen
class Delivered:
    """The place of a batch in the journal."""

    already: bool
    """It had been delivered before; nothing was written now."""
    ranges: Mapping[int, tuple[int, int]]
    """For each partition that got rows, the offset of the first and the offset behind the last. Empty if the batch is too old (`KEPT`)."""


@attrs.frozen
class LedgerLine:
    """What the ledger knows of a batch that was delivered."""

    ranges: Mapping[int, tuple[int, int]]
    """As `Delivered.ranges`."""
    digest: int | None = None
    """CRC-32 of the messages that were delivered, in their order. None: levada 0.2 or older delivered it."""
    attempts: str | None = None
    """Identifies the `Deliver` that was answered last."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(end - first for first, end in self.ranges.values())

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        ranges = {str(number): list(between) for number, between in self.ranges.items()}
        return {**ranges, "digest": self.digest, "attempts": self.attempts}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> LedgerLine:
        """Undo `to_json`. A line of an older format has only ranges."""
        digest, attempts = found.pop("digest", None), found.pop("attempts", None)
        return cls({int(number): (first, end) for number, (first, end) in found.items()}, digest, attempts)


@message("levada.journal.reach", frozen=True)
class Reach:
    """How far the rows of an earlier opening are still the same rows."""

    known: bool
    """Whether the history has this opening. If not, an older copy was restored; `ends` is then the end of that copy when it was opened."""
    ends: Mapping[int, int]
    """For each partition, the offset up to which rows are the same."""


@attrs.frozen
class Erasure:
    """An erasure: all rows of an entity before an offset go."""

    partition: int
    column: str
    entity: str | bytes
    before: int

    def to_json(self) -> list[Any]:
        """Turn it into what the `json` module writes."""
        entity = [self.entity.hex()] if isinstance(self.entity, bytes) else self.entity
        return [self.partition, self.column, entity, self.before]

    @classmethod
    def of_json(cls, text: list[Any]) -> Erasure:
        """Undo `to_json`."""
        partition, column, entity, before = text
        return cls(partition, column, entity if isinstance(entity, str) else bytes.fromhex(entity[0]), before)

    def covers(self, other: Erasure) -> bool:
        """Whether no row of the other one is left after this one."""
        return attrs.evolve(other, before=self.before) == self and other.before <= self.before


@attrs.frozen
class _Opening:
    """One line of the history."""

    number: int
    name: str
    ends: Mapping[int, int]
    """The end of each partition at that time."""


class Ledger:
    """The database of one journal. Made by `Ledger.open`."""

    def __init__(self, platform: Platform, connection: sqlite3.Connection, path: Path) -> None:
        self._files = platform.files
        self._time = platform.time
        self._token_bytes = platform.token_bytes
        self._connection = connection
        self._path = path
        facts = dict(connection.execute("SELECT name, value FROM facts"))
        self.format = int(facts["format"])
        """Version of the format; the first change brings an older one up to date."""
        self.journal = bytes(facts["journal"])
        """Sixteen bytes that identify this journal."""
        self.partitions = int(facts["partitions"])
        self.ready = bool(facts["ready"])
        """Whether all partitions had been made when this was opened."""
        self.transaction = int(facts["transaction"])
        """Number of the last transaction that was committed."""
        self.commits = int(facts.get("commits", 0))
        """Changes of this ledger so far."""
        self._groups: dict[str, dict[int, int]] = {}
        for name, partition, offset in connection.execute("SELECT name, partition, offset FROM groups"):
            self._groups.setdefault(name, {})[partition] = offset
        self.copy_of: str | None = facts.get("copy_of")
        """The epoch of the log that this journal is a copy of, as long as the copy is not whole."""
        self._erasures = [Erasure.of_json(each) for each in json.loads(facts.get("erasures", "[]"))]
        self.trimmed = {int(number): end for number, end in json.loads(facts.get("trimmed", "{}")).items()}
        """For partitions from which rows were trimmed, the offset behind the last of them. Not changed, but replaced."""
        self.archives = {int(n): Archived(*each) for n, each in json.loads(facts.get("archives", "{}")).items()}
        """For partitions that have an archive: where it is. Not changed, but replaced."""
        self._openings: list[_Opening] = []
        self._losses: dict[int, dict[int, int]] = {}
        if self.format > 1:
            for number, name, ends in connection.execute("SELECT number, name, ends FROM openings ORDER BY number"):
                self._openings.append(_Opening(number, name, dict(enumerate(json.loads(ends)))))
            for partition, first, end in connection.execute("SELECT partition, first, end FROM losses"):
                self._losses.setdefault(partition, {})[end] = first
        self.opening = self._openings[-1].name if self._openings else ""
        """Name of the current opening, see `begin`; empty before the first."""

    @classmethod
    def open(cls, platform: Platform, path: Path, *, partitions: int, commits: int = 0) -> Ledger:
        """Open the database, or make it for a new journal. An older format is brought up to date by the first change.

        Raises:
            JournalDamaged: this is no ledger, it is damaged, or has had fewer commits than `commits`; nothing was changed.
            JournalUnwritable: it cannot be read or written; it may be whole.
            JournalError: written by a later version of this format.
        """
        files = platform.files
        try:
            if files.exists(path):
                _verify(files, path, commits)
            log = files.exists(_beside(path, "-wal"))
            # The files that SQLite makes beside it get its mode.
            with files.opened(path, os.O_RDWR | os.O_CREAT):
                pass
            connection = files.database(path)
            try:
                connection.create_function("row_sum", -1, _row_sum, deterministic=True)
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                if log:  # of a killed process, whose last sync may have failed: its commits are written anew, into the database, and synced
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    _create(connection, partitions, platform.token_bytes(16))
                return cls(platform, connection, path)
            except BaseException:
                connection.close()
                raise
        except (sqlite3.DatabaseError, KeyError, ValueError, TypeError) as error:
            if _refuses(error):
                raise _unwritable(error, path) from error
            raise JournalDamaged(f"this is no ledger of a journal: {error}", path=str(path)) from error

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def copy_to(self, path: Path) -> None:
        """Copy everything that was committed into a new database, unsynced. Raises `sqlite3.Error` or `OSError` if the disk refuses."""
        with closing(self._files.database(path)) as target:
            target.execute("PRAGMA synchronous=OFF")
            self._connection.backup(target)

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with _transaction(self._connection) as connection:
            if self.format < _FORMAT:
                _grow(connection, self.format)
            yield connection
            connection.execute("UPDATE facts SET value = value + 1 WHERE name = 'commits'")
        self.format = _FORMAT
        self.commits += 1

    def ends(self) -> dict[int, int]:
        """Return the offset that each partition must reach: all rows below were delivered, or read by a group."""
        ends = dict(self._connection.execute("SELECT number, end FROM partitions"))
        for offsets in self._groups.values():
            for partition, offset in offsets.items():
                ends[partition] = max(ends[partition], offset)
        return ends

    @property
    def openings(self) -> int:
        """Number of openings so far."""
        return self._openings[-1].number if self._openings else 0

    @property
    def begun(self) -> bool:
        """Whether there is a history; a ledger of format 1 has none."""
        return bool(self._openings)

    @property
    def erasures(self) -> list[Erasure]:
        """Erasures that are not finished."""
        return list(self._erasures)

    def begin_erasure(self, erasure: Erasure) -> None:
        """Record that rows are about to be erased, so that a crash does not leave some of them."""
        if erasure not in self._erasures:
            self._set_erasures([*(each for each in self._erasures if not erasure.covers(each)), erasure])

    def end_erasure(self, erasure: Erasure) -> None:
        """Record that all rows are gone."""
        self._set_erasures([each for each in self._erasures if each != erasure])

    def _set_erasures(self, erasures: list[Erasure]) -> None:
        self._set_fact("erasures", [each.to_json() for each in erasures])
        self._erasures = erasures

    def set_copy_of(self, epoch: str | None) -> None:
        """Record that this journal is a copy that is not whole; None: it is whole."""
        with self._change() as connection:
            connection.execute("DELETE FROM facts WHERE name = 'copy_of'")
            if epoch is not None:
                connection.execute("INSERT INTO facts VALUES ('copy_of', ?)", (epoch,))
        self.copy_of = epoch

    def set_trimmed(self, partition: int, end: int) -> None:
        """Record that rows before an offset are about to be trimmed."""
        if end > self.trimmed.get(partition, 0):
            trimmed = {**self.trimmed, partition: end}
            self._set_fact("trimmed", trimmed)
            self.trimmed = trimmed

    def set_archived(self, partition: int, archived: Archived | None) -> None:
        """Record where the old rows of a partition are archived; None: nowhere."""
        archives = {number: each for number, each in self.archives.items() if number != partition}
        if archived is not None:
            archives[partition] = archived
        self._set_fact("archives", {number: attrs.astuple(each) for number, each in archives.items()})
        self.archives = archives

    def _set_fact(self, name: str, value: Any) -> None:
        with self._change() as connection:
            connection.execute("DELETE FROM facts WHERE name = ?", (name,))
            if value:
                connection.execute("INSERT INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def make_ready(self) -> None:
        """Record that all files of a new journal are there, although its history has not begun."""
        with self._change() as connection:
            connection.execute("UPDATE facts SET value = 1 WHERE name = 'ready'")

    def begin(self, ends: Mapping[int, int]) -> None:
        """Add a line to the history once all partitions are in order. `ends` has the offset behind the last row of each partition."""
        number = self._openings[-1].number + 1 if self._openings else 1
        # With number and time, an opening that is not known can be placed among those that are.
        name = f"{number}-{self._token_bytes(8).hex()}-{int(self._time() * 1e6)}"
        opening = _Opening(number, name, dict(ends))
        with self._change() as connection:
            text = json.dumps([ends[partition] for partition in range(self.partitions)])
            connection.execute("INSERT INTO openings VALUES (?, ?, ?)", (number, opening.name, text))
            connection.execute("DELETE FROM openings WHERE number <= ?", (number - KEPT_OPENINGS,))
            connection.execute("UPDATE facts SET value = 1 WHERE name = 'ready'")
        self._openings = [*self._openings, opening][-KEPT_OPENINGS:]
        self.opening = opening.name

    def add_losses(self, losses: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Record ranges of lost rows, whose loss was accepted, for some partitions."""
        with self._change() as connection:
            for partition, ranges in losses.items():
                known = self._losses.setdefault(partition, {})
                for first, end in ranges:
                    known[end] = min(first, known.get(end, first))
                connection.executemany(
                    "INSERT INTO losses VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET first = excluded.first",
                    [(partition, end, first) for end, first in known.items()],
                )

    def losses(self, partition: int) -> dict[int, int]:
        """Return the accepted losses of a partition: the offset behind each range, and its first offset."""
        return dict(self._losses.get(partition, {}))

    def reach(self, opening: str | None, now: Mapping[int, int]) -> Reach:
        """Say how far the rows of an opening are still the same.

        Args:
            opening: its name; None for any time before the history began.
            now: the end of each partition.
        """
        number, began = (0, math.inf) if opening is None else _placed(opening)
        if opening is None or any(each.name == opening for each in self._openings):
            later = [each.ends for each in self._openings if each.number > number]
            return Reach(True, {partition: min(ends[partition] for ends in [*later, now]) for partition in now})
        # An older copy was put back after this opening, and may have been opened several times since; or the history is too short.
        later = [each.ends for each in self._openings if each.number >= number or _placed(each.name)[1] >= began]
        since = [*later, self._openings[-1].ends]
        return Reach(False, {partition: min(ends[partition] for ends in since) for partition in now})

    def line(self, query: str, batch: int) -> LedgerLine | None:
        """Return what is known of a batch; None if it has not been delivered, or is forgotten (`KEPT`)."""
        found = self._connection.execute(
            "SELECT ranges FROM batches WHERE query = ? AND batch = ?", (query, batch)
        ).fetchone()
        return None if found is None else LedgerLine.of_json(json.loads(found[0]))

    def newest(self, query: str) -> int | None:
        """Return the highest number of a batch of this query; None if there is none."""
        [newest] = self._connection.execute("SELECT max(batch) FROM batches WHERE query = ?", (query,)).fetchone()
        return cast("int | None", newest)

    def delivered(self, query: str, batch: int) -> Delivered | None:
        """Look up a batch; None if it has not been delivered."""
        line = self.line(query, batch)
        if line is not None:
            return Delivered(already=True, ranges=line.ranges)
        oldest, count = self._connection.execute(
            "SELECT min(batch), count(*) FROM batches WHERE query = ?", (query,)
        ).fetchone()
        # The numbers of a query grow: a batch below all that are kept was delivered and forgotten.
        return Delivered(already=True, ranges={}) if count >= KEPT and batch < oldest else None

    def deliver(self, query: str, batch: int, line: LedgerLine) -> None:
        """Commit the transaction `transaction` + 1: the rows in the ranges of this line, which are synced, are this batch.

        Raises:
            sqlite3.Error: it may have been committed or not; only opening the journal again tells.
        """
        with self._change() as connection:
            connection.execute("INSERT INTO batches VALUES (?, ?, ?)", (query, batch, json.dumps(line.to_json())))
            connection.execute(
                "DELETE FROM batches WHERE query = ? AND batch <= "
                "(SELECT batch FROM batches WHERE query = ? ORDER BY batch DESC LIMIT 1 OFFSET ?)",
                (query, query, KEPT),
            )
            self._add_transaction(connection, line.ranges)
        self.transaction += 1

    def set_attempts(self, query: str, batch: int, attempts: str) -> None:
        """Record the attempts under which a delivered batch came last; see `LedgerLine.attempts`."""
        line = self.line(query, batch)
        if line is None or line.attempts == attempts:
            return
        text = json.dumps(attrs.evolve(line, attempts=attempts).to_json())
        with self._change() as connection:
            connection.execute("UPDATE batches SET ranges = ? WHERE query = ? AND batch = ?", (text, query, batch))

    def append(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Commit the transaction `transaction` + 1: the rows in these ranges of partitions, which are synced, are one append. Raises as `deliver`."""
        with self._change() as connection:
            self._add_transaction(connection, ranges)
        self.transaction += 1

    def _add_transaction(self, connection: sqlite3.Connection, ranges: Mapping[int, tuple[int, int]]) -> None:
        connection.executemany(
            "UPDATE partitions SET end = ? WHERE number = ?", [(end, number) for number, (_, end) in ranges.items()]
        )
        connection.execute("UPDATE facts SET value = ? WHERE name = 'transaction'", (self.transaction + 1,))

    def groups(self) -> dict[str, dict[int, int]]:
        """For each group, the offset behind the last row it has done with, by partition."""
        return {name: dict(offsets) for name, offsets in list(self._groups.items())}

    def set_group(self, name: str, offsets: Mapping[int, int]) -> None:
        """Record how far a group has come."""
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO groups VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET offset = excluded.offset",
                [(name, partition, offset) for partition, offset in offsets.items()],
            )
        self._groups.setdefault(name, {}).update(offsets)

    def forget_group(self, name: str) -> None:
        """Drop a group, so that it no longer holds up retention."""
        with self._change() as connection:
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


def _create(connection: sqlite3.Connection, partitions: int, journal: bytes) -> None:
    with _transaction(connection):
        for statement in _TABLES_1:
            connection.execute(statement)
        facts = {"format": 1, "journal": journal, "partitions": partitions, "ready": 0, "transaction": 0}
        connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        connection.executemany("INSERT INTO partitions VALUES (?, 0)", [(number,) for number in range(partitions)])
        _grow(connection, 1)


def _grow(connection: sqlite3.Connection, version: int) -> None:
    """Turn an older format into this one."""
    connection.execute("UPDATE facts SET value = ? WHERE name = 'format'", (_FORMAT,))
    if version > 1:
        return
    for statement in _TABLES_2:
        connection.execute(statement)
    connection.execute("INSERT INTO facts VALUES ('commits', 0)")
    for table in _COLUMNS:
        connection.execute("INSERT INTO checks VALUES (?, ?, ?)", (table, *_check(connection, table)))
    for statement in _triggers():
        connection.execute(statement)


def _check(connection: sqlite3.Connection, table: str) -> tuple[int, int]:
    sums = [_row_sum(*row) for row in connection.execute(f"SELECT {', '.join(_COLUMNS[table])} FROM {table}")]
    return len(sums), sum(sums)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def drop_unfinished(files: Files, path: Path) -> bool:
    """Delete a ledger that has no tables yet, because the process that made it was killed or the power failed; return whether it had none.

    A ledger with tables is left alone, even if it cannot be read: opening it says why.

    Raises:
        JournalUnwritable: it cannot be read; it may be whole.
        JournalError: written by a later version of this format.
    """
    if files.exists(path) and not files.exists(_beside(path, "-journal")):  # there is one before the first tables only
        try:
            _verify(files, path, 0)
            return False
        except (sqlite3.DatabaseError, KeyError, ValueError, TypeError, JournalDamaged) as error:
            if _refuses(error):
                raise _unwritable(error, path) from error
            left = files.read(path)
            # The first page has been there alone, perhaps not all of it; or the file had its size first.
            if left.strip(b"\0") and (len(left) > _PAGE or not left.startswith(_MAGIC)):
                return False
    for suffix in ("", "-journal", "-wal", "-shm"):
        files.discard(_beside(path, suffix))
    return True


def _verify(files: Files, path: Path, commits: int) -> None:
    """Require that a ledger is whole. Changes nothing: a connection that may write changes the file even when it is closed."""
    log = _beside(path, "-wal")
    way = "mode=ro" if files.exists(log) else "mode=ro&immutable=1"  # mode=ro alone makes an empty log if there is none
    with closing(files.database(path, way)) as connection:
        problems = [text for (text,) in connection.execute("PRAGMA integrity_check")]
        if problems != ["ok"]:
            raise JournalDamaged(f"the ledger is damaged ({problems[0]}): restore it from a copy", path=str(path))
        found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if not found:
            raise JournalDamaged("the ledger is empty: restore it from a copy", path=str(path))
        [version] = connection.execute("SELECT value FROM facts WHERE name = 'format'").fetchone() or (None,)
        if isinstance(version, int) and version > _FORMAT:
            raise JournalError(
                f"format version {version}, this program reads 1 to {_FORMAT}: use the levada that wrote it or a later one",
                path=str(path),
            )
        wanted = {*_TABLES_1} if version == 1 else {*_TABLES_1, *_TABLES_2, *_triggers()}
        if found != wanted:
            raise JournalDamaged("the tables of the ledger are damaged: restore it from a copy", path=str(path))
        if version == 1:
            return
        [had] = connection.execute("SELECT value FROM facts WHERE name = 'commits'").fetchone() or (0,)
        if had < commits:
            raise JournalDamaged(
                f"the ledger has had {commits} commits, and the newest {commits - had} of them are gone: restore it",
                path=str(path),
            )
        checks = {name: (rows, total) for name, rows, total in connection.execute("SELECT * FROM checks")}
        for table in _COLUMNS:
            now, then = _check(connection, table), checks.get(table)
            if now != then:
                raise JournalDamaged(
                    f"table {table} of the ledger has rows and sum {now}, and should have {then}: restore it from a copy",
                    path=str(path),
                )


def _placed(opening: str) -> tuple[int, float]:
    """Return the number of an opening, and when it began, in µs since 1970; levada 0.2 and older wrote no time."""
    number, _, began = [*opening.split("-"), "", ""][:3]
    return (int(number) if _is_number(number) else 0), (int(began) if _is_number(began) else math.inf)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _refuses(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)  # Python's own errors, as of texts that are not UTF-8, have none
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF in _REFUSALS


def _unwritable(error: Exception, path: Path) -> JournalError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and not _has_room(path)):
        return JournalFull(f"the disk is full ({error}); nothing of this was written: make room on it", path=str(path))
    return JournalUnwritable(
        f"the ledger cannot be read or written ({error}): see whether the disk has room and works, whether this user may write there, and "
        "whether another program has the file open",
        path=str(path),
    )


def _has_room(path: Path) -> bool:
    """Whether there is room beside a ledger: on a full disk, SQLite says no more than that there was an I/O error, if it makes its shared file."""
    files, probe = PLATFORM.get().files, (path.parent if path.suffix == ".sqlite" else path) / "room"
    try:
        write(files, probe, bytes(_SHARED))
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            files.discard(probe)
    return True


@contextmanager
def ledger_errors(directory: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the disk into `JournalUnwritable`, or `JournalFull`."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _unwritable(error, directory) from error
