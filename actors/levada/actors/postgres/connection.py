"""`LibpqConnection`: a connection of libpq in pipeline mode, which waits in trio.

psycopg connects, in a thread: it knows TLS, SCRAM, service files and several hosts. Everything else is libpq's asynchronous half, because one
question costs 17 µs of CPU that way, and 100 µs in a thread.

The statements of one `run` are one transaction. Each text is prepared once, in the round trip that uses it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import psycopg
import trio
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from levada.actors.journal import JournalError
from levada.framework.platform import Platform

from .addresses import PostgresAddress
from .errors import DatabaseAway, refusal
from .opening import open_session

__all__ = ["LibpqConnection", "Sent", "Statement", "connect"]

Statement = tuple[str, Sequence[bytes | None]]
"""The text of a statement, and its parameters in the binary format."""

_DONE: Final = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)
_SYNC: Final = pq.ExecStatus.PIPELINE_SYNC


@attrs.define(eq=False)
class Sent:
    """What `LibpqConnection.send` has sent."""

    names: dict[str, bytes]
    """The names of the statements that it prepares, by their texts."""
    wanted: list[bool]
    """For each result, whether it is of a statement that was given."""
    failure: Exception | None = None
    """Why not all was sent."""


class LibpqConnection:
    """One connection. Made by `connect`. One task uses it at a time."""

    def __init__(self, address: PostgresAddress, session: psycopg.Connection[Any], name: str) -> None:
        self._address = address
        self._session = session  # it closes libpq's connection when it is dropped
        self._libpq: PGconn = session.pgconn
        self._libpq.nonblocking = 1
        self._libpq.enter_pipeline_mode()
        self._name = name
        """How the names of its prepared statements begin: a pooler may bring it to those of another connection."""
        self._names: dict[str, bytes] = {}
        self._made = 0

    async def run(self, statements: Sequence[Statement], *, timeout: float) -> list[PGresult]:
        """Run statements as one transaction; return their results. Errors and cancellation are as for `results`.

        Args:
            statements: they are run in this order.
            timeout: seconds until the database counts as away.
        """
        return await self.results(self.send(statements), timeout=timeout)

    def send(self, statements: Sequence[Statement]) -> Sent:
        """Send statements as one transaction, as far as that needs no wait. `results` comes before anything else is sent."""
        sent = Sent({}, [])
        try:
            self._send(statements, sent)
        except (psycopg.Error, OSError) as error:
            sent.failure = error
        except BaseException:
            self.close()
            raise
        return sent

    def _send(self, statements: Sequence[Statement], sent: Sent) -> None:
        libpq, names = self._libpq, sent.names
        for text, values in statements:
            name = self._names.get(text) or names.get(text)
            if name is None:
                self._made += 1
                name = names[text] = f"{self._name}_{self._made}".encode()
                libpq.send_prepare(name, text.encode())
                sent.wanted.append(False)
            libpq.send_query_prepared(name, values, [1] * len(values), 1)
            sent.wanted.append(True)
        libpq.pipeline_sync()

    async def results(self, sent: Sent, *, timeout: float) -> list[PGresult]:
        """Return the results of a transaction, in the binary format.

        Args:
            sent: the last result of `send`.
            timeout: seconds until the database counts as away.

        Raises:
            DatabaseAway: the connection is lost, and closed; the transaction may be committed.
            JournalError: the database refuses, and nothing was done.

        Cancellation:
            the connection is closed; the transaction may be committed.
        """
        try:
            if sent.failure is not None:
                raise sent.failure
            with trio.move_on_after(timeout):
                return await self._results(sent)
        except JournalError:
            raise
        except (psycopg.Error, OSError) as error:
            self.close()
            if isinstance(error, DatabaseAway):
                raise
            raise DatabaseAway(f"{self._address}: {' '.join(str(error).split())}") from error
        except BaseException:
            self.close()
            raise
        self.close()
        raise DatabaseAway(f"{self._address}: no answer in {timeout:g} s")

    async def _results(self, sent: Sent) -> list[PGresult]:
        libpq = self._libpq
        while libpq.flush():
            # Its answers are short until it has got everything, so they need not be read meanwhile.
            await trio.lowlevel.wait_writable(libpq.socket)
        found: list[PGresult] = []
        failed: PGresult | None = None
        while True:
            result = await self._result()
            if result is None:  # between two statements; or for ever, if the connection is lost
                if libpq.status != pq.ConnStatus.OK:
                    raise DatabaseAway(f"{self._address}: {_said(libpq.get_error_message())}")
                continue
            status = result.status
            if status == _SYNC:
                break
            if status in _DONE:
                found.append(result)
            elif failed is None:
                failed = result
        if failed is not None:
            raise self._error(failed)
        self._names |= sent.names
        return [result for result, is_wanted in zip(found, sent.wanted, strict=True) if is_wanted]

    async def _result(self) -> PGresult | None:
        libpq = self._libpq
        while libpq.is_busy():
            await trio.lowlevel.wait_readable(libpq.socket)
            libpq.consume_input()
        return libpq.get_result()

    def _error(self, result: PGresult) -> JournalError | DatabaseAway:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        return refusal(state, result.get_error_message(), self._address)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return not self._session.closed

    def close(self) -> None:
        """Close it. The database ends a transaction that it has not finished, or finishes it."""
        self._session.close()


def _said(text: str) -> str:
    return " ".join(text.split()) or "the connection is lost"


async def connect(
    platform: Platform, address: PostgresAddress, prepare: Callable[[psycopg.Connection[Any]], Any] | None = None
) -> tuple[LibpqConnection, Any]:
    """Connect.

    Args:
        platform: of this process.
        address: where to.
        prepare: called with the session in the thread, before anything else is asked; its result is returned too.

    Raises:
        DatabaseAway: there is none, or it does not take connections now.
        JournalError: it refuses, or `prepare` has raised this.

    Cancellation:
        waits for the end of the attempt, and there is no connection.
    """

    def enter() -> tuple[psycopg.Connection[Any], Any]:
        session = open_session(address)
        try:
            return session, None if prepare is None else prepare(session)
        except BaseException:
            session.close()
            raise

    session, found = await platform.run_in_thread(enter)
    return LibpqConnection(address, session, f"levada_{platform.token_bytes(8).hex()}"), found
