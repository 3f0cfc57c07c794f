"""`PostgresStore`: where a log in PostgreSQL is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final

import attrs

from levada.actors.journal import JournalError, JournalUnwritable
from levada.framework import ActorSystem, Ref, bounded, message, restart

from .addresses import PostgresAddress
from .errors import DatabaseAway, DatabaseReadOnly
from .log import PostgresLog
from .opening import count_rows, open_log, session_at

__all__ = ["PostgresStore"]

_AGAIN: Final = restart("transient", max=1 << 30, within=60.0, initial_backoff=0.05, max_backoff=5.0)
"""A log has no state that a failure could spoil: its rows are in the database."""


def _shown(url: str) -> str:
    return PostgresAddress.of(url, "log").shown.partition("?")[0]


@message("levada.postgres.store", frozen=True)
class PostgresStore:
    """A log in PostgreSQL: a `levada.actors.journal.LogStore`, which `levada.actors.durable.shards` takes as ``journal=``.

    Each process opens connections of its own: one to write, and up to four to read. Its text does not show a password, and nothing logs
    one. It travels to nodes with all that is in the URL: better give the password by a service file, a password file, or ``PGPASSWORD`` there.

    Raises:
        ConfigurationError: the URL cannot be read, or the table has no such name.

    Example:
        ``shards(system, Account, events=Deposited, journal=PostgresStore("postgresql://db.example/bank?sslmode=verify-full", "accounts"))``
    """

    url: str = attrs.field(repr=_shown)
    """Of the database, as libpq takes it: ``postgresql://user@host:port/database?parameter=value``."""
    table: str
    """The name of the log: of the table of rows, perhaps after the name of its schema and a dot. Lower-case letters, digits and ``_``."""

    takes_values: ClassVar[bool] = True
    """Whether rows come as values of Python (``levada.actors.journal.value_rows``)."""

    def __attrs_post_init__(self) -> None:
        PostgresAddress.of(self.url, self.table)

    @classmethod
    def at(cls, url: str, name: str) -> PostgresStore:
        """Return the store for a URL which may name the table, ``?table=accounts``.

        Args:
            url: as above.
            name: names the table otherwise: ``BankAccount`` is in the table ``bank_account``.

        Raises:
            ConfigurationError: the URL cannot be read, or the table has no such name.
        """
        found = PostgresAddress.of(url, name)
        return cls(found.url, found.table)

    @property
    def address(self) -> PostgresAddress:
        """Where it is, as libpq takes it."""
        return PostgresAddress.of(self.url, self.table)

    @asynccontextmanager
    async def open(self, system: ActorSystem, shards: int, *, copy_of: str | None = None) -> AsyncIterator[Ref[Any]]:
        """Open the log; see `levada.actors.journal.LogStore`. A new one gets its columns by `levada.actors.journal.GetSchema`.

        Args:
            system: of this process.
            shards: the number of partitions of a new log.
            copy_of: the epoch of another log whose rows are copied into this one, see `levada.actors.journal.Store.open`.

        Raises:
            CopyUnfinished: it is a copy that is not whole.
            JournalError: the database cannot be reached, or cannot keep the log.
            ConfigurationError: the server is too old, or its settings would lose rows.
        """
        address = self.address
        epoch = system.platform.token_bytes(16).hex()

        def look() -> None:
            with session_at(address) as session, session.transaction():
                count_rows(session, address, open_log(session, address, shards, epoch, copy_of))

        try:
            await system.platform.run_in_thread(look)
        except DatabaseReadOnly as error:
            raise JournalUnwritable(str(error)) from None
        except DatabaseAway as error:
            raise JournalError(f"the database cannot be reached: {error}") from None
        log = system.spawn(partial(PostgresLog, address, shards, copy_of), mailbox=bounded(256), supervise=_AGAIN)
        try:
            yield log
        finally:
            log.stop()
