"""`Database`: the connections of one log. One writes, and up to four read; lost ones are made again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import attrs
import pyarrow as pa
import trio
from psycopg.pq.abc import PGresult

from levada.framework.platform import Platform

from .addresses import PostgresAddress
from .connection import LibpqConnection, Sent, Statement, connect
from .errors import DatabaseAway
from .opening import LogHead, Session, grow_log, note_opening, open_log, require_log
from .tables import LogTables

__all__ = ["ANSWERED_WITHIN", "FIRST_PAUSE", "LAST_PAUSE", "PATIENCE", "Database", "OpenLog"]

R = TypeVar("R")

logger = logging.getLogger("levada.actors.postgres")

PATIENCE: Final = 30.0
"""Seconds for which a lost connection is made again before a question fails; below the time that a shard waits for its journal."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between attempts to connect."""
ANSWERED_WITHIN: Final = 15.0
"""Seconds after which a connection without an answer counts as lost; a standby that has to confirm a commit may be slow."""
TOLD_AFTER: Final = 1.0
"""Seconds after which the log has a line about a database that is away, and then one when it answers: a connection that is made again at once is no
outage."""
READERS: Final = 4
"""The most connections that read."""


@attrs.frozen(eq=False)
class OpenLog:
    """A log that this process has opened."""

    head: LogHead
    tables: LogTables
    append_text: str
    append_one_text: str
    copy_text: str
    end_text: str
    found: pa.Schema
    """The columns of rows with their offsets."""

    @classmethod
    def of(cls, address: PostgresAddress, head: LogHead) -> OpenLog:
        """Return the log with this head."""
        tables = LogTables.of(address, head.columns)
        found = tables.columns.insert(0, pa.field("offset", pa.int64(), nullable=False))
        texts = tables.append(), tables.append_one(), tables.append(copied=True), tables.end()
        return cls(head, tables, *texts, found)


class Database:
    """The connections of one log.

    Args:
        platform: of this process.
        address: where the log is.
        shards: the number of shards of a new log.
        copy_of: the log whose rows are copied into this one.
    """

    def __init__(self, platform: Platform, address: PostgresAddress, shards: int, copy_of: str | None = None) -> None:
        self.log: OpenLog | None = None
        """The log, once it has been opened."""
        self.reconnected = 0
        """The number of times that the connection that writes was made again."""
        self._platform = platform
        self._address = address
        self._shards = shards
        self._copy_of = copy_of
        self._writer: LibpqConnection | None = None
        self._connecting = trio.Lock()
        self._idle: list[LibpqConnection] = []
        self._reading = trio.CapacityLimiter(READERS)
        self._away_since: float | None = None
        """When it was noticed that the database is away; None: it answers."""
        self._is_told = False
        """Whether the log has a line about that."""

    async def opened(self) -> OpenLog:
        """Open the log, unless it is open. Errors are as for `patiently`."""
        if self.log is None:
            await self.patiently(self._connect)
        assert self.log is not None
        return self.log

    def send(self, statements: Sequence[Statement]) -> Sent | None:
        """Send statements on the connection that writes; `write` follows. None: there is no connection."""
        return None if self._writer is None else self._writer.send(statements)

    async def write(self, statements: Sequence[Statement], sent: Sent | None = None) -> list[PGresult]:
        """Run statements on the connection that writes, as one transaction; one task at a time does so.

        Args:
            statements: they are run in this order.
            sent: the result of `send`, if it was called for them.

        Raises:
            DatabaseAway: the connection is lost; the transaction may be committed.
            JournalError: the database refuses, and nothing was done.
        """
        connection = self._writer or await self._connect()
        try:
            found = await connection.results(sent or connection.send(statements), timeout=ANSWERED_WITHIN)
        except DatabaseAway:
            self._writer = None
            raise
        self._answers()
        return found

    async def connect(self) -> None:
        """Make the connection that writes, unless there is one; errors are as for `write`, and nothing was sent."""
        if self._writer is None:  # the lock takes a turn of trio, 10 µs
            await self._connect()

    async def read(self, statements: Sequence[Statement], *, timeout: float = ANSWERED_WITHIN) -> list[PGresult]:
        """Run statements on a connection that reads; again if it is lost, so they must do the same when they are repeated.

        Errors are as for `patiently`.
        """
        async with self._reading:
            return await self.patiently(lambda: self._read(statements, timeout))

    async def _read(self, statements: Sequence[Statement], timeout: float) -> list[PGresult]:
        generation = self.reconnected
        connection = self._idle.pop() if self._idle else (await connect(self._platform, self._address))[0]
        try:
            found = await connection.run(statements, timeout=timeout)
        finally:
            if connection.is_open and generation == self.reconnected:
                self._idle.append(connection)
            else:
                connection.close()
        if generation != self.reconnected:
            raise DatabaseAway(f"{self._address}: the connection that writes was made again meanwhile")
        return found

    async def patiently(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Try again while the database is away.

        Raises:
            DatabaseAway: it is away for too long.
            JournalError: it refuses, and nothing was done.
        """
        pause, until = FIRST_PAUSE, trio.current_time() + PATIENCE
        while True:
            try:
                found = await attempt()
            except DatabaseAway as error:
                pause = await self.pause(error, pause, until)
            else:
                self._answers()
                return found

    async def pause(self, error: Exception, pause: float, until: float) -> float:
        """Wait before another attempt; return how long to wait the next time. Raises the error if the time is over."""
        if trio.current_time() > until:
            raise error
        now = trio.current_time()
        if self._away_since is None:
            self._away_since = now
        elif not self._is_told and now - self._away_since >= TOLD_AFTER:
            self._is_told = True
            text = "%s; what needs it waits, and it is tried again until it answers"
            logger.warning(text, error, extra={"event": "database_away"})
        await trio.sleep(pause)
        return min(2 * pause, LAST_PAUSE)

    def _answers(self) -> None:
        if self._away_since is None:
            return
        if self._is_told:
            away = trio.current_time() - self._away_since
            logger.warning("%s answers again, after %.1f s", self._address, away, extra={"event": "database_back"})
        self._away_since, self._is_told = None, False

    async def _connect(self) -> LibpqConnection:
        async with self._connecting:
            if self._writer is None:
                known = self.log
                name, epoch = (self._platform.token_bytes(16).hex() for _ in range(2))

                def prepare(session: Session) -> LogHead:
                    if known is None:
                        head = open_log(session, self._address, self._shards, epoch, self._copy_of)
                    else:
                        head = known.head
                        require_log(session, self._address, head)
                    note_opening(session, self._address, name)
                    return head

                self._writer, head = await connect(self._platform, self._address, prepare)
                if known is None:
                    self.log = OpenLog.of(self._address, head)
                else:
                    # After a fail-over, an old primary that lives on would answer on old connections what is true there.
                    self.reconnected += 1
                    while self._idle:
                        self._idle.pop().close()
            return self._writer

    async def grow(self, wanted: pa.Schema) -> OpenLog:
        """Add the columns to the log that it lacks; return it. Errors are as for `patiently`, and of `grow_log`."""

        async def attempt() -> OpenLog:
            connection, head = await connect(
                self._platform, self._address, lambda session: grow_log(session, self._address, wanted)
            )
            connection.close()
            return OpenLog.of(self._address, head)

        self.log = await self.patiently(attempt)
        return self.log

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._idle, *([self._writer] if self._writer is not None else [])]:
            connection.close()
        self._idle.clear()
        self._writer = None
