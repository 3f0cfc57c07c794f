"""A race of two carriers to one server, with a head start for the preferred one, as happy eyeballs does for addresses (RFC 8305).

`race` tries to open two connections. The second attempt begins a moment after the first, or when the first has failed. The first to complete
its handshake wins, and the other is cancelled and closed. `Fallback` remembers for a while which carrier won at each server, and
gives it the head start the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import trio

from levada.framework.errors import CarrierError, ConfigurationError, ConnectionLost, LevadaError
from levada.transports.carriers.contracts import Connection
from levada.transports.carriers.streams import plain_nursery

__all__ = ["Fallback", "race"]

Opens = Callable[[], AbstractAsyncContextManager[Connection]]


@asynccontextmanager
async def race(attempts: Sequence[Opens], *, head_start: float) -> AsyncIterator[tuple[int, Connection]]:
    """Connect with the first attempt that works. Leaving the block closes the connection as its own context manager does.

    Args:
        attempts: functions that connect, the preferred one first. Each is called at most once.
        head_start: seconds between the starts of two attempts; less if all earlier attempts have failed.

    Yields:
        The index of the attempt that won, and its connection, whose handshake is complete.

    Raises:
        ConnectionLost: no attempt worked; the text has the reason for each.
        ConfigurationError: an attempt's settings cannot work, and no other attempt worked.

    Cancellation:
        all attempts are closed at once.
    """
    run = _Race(attempts)
    async with plain_nursery() as nursery:
        for i in range(len(attempts)):
            nursery.start_soon(run.attempt, i)
            with trio.move_on_after(head_start if i + 1 < len(attempts) else float("inf")):
                await run.settled(i + 1)
            if run.won is not None:
                break
        if run.won is None:
            raise run.failure()
        yield run.won
        run.leaving.set()
        await run.closed.wait()


class _Race:
    """The attempts of one race. The task that enters a connection's context also leaves it, as trio's nurseries require."""

    def __init__(self, attempts: Sequence[Opens]) -> None:
        self._attempts = attempts
        self._scopes = [trio.CancelScope() for _ in attempts]
        self._errors: dict[int, LevadaError] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self.won: tuple[int, Connection] | None = None
        self.leaving = trio.Event()
        """Set when the block of the winner has ended."""
        self.closed = trio.Event()
        """Set when the winner is closed."""

    async def attempt(self, i: int) -> None:
        with self._scopes[i]:
            try:
                async with self._attempts[i]() as connection:
                    await connection.handshake()
                    if self.won is not None:
                        return
                    self.won = i, connection
                    self._changed.unpark_all()
                    for other, scope in enumerate(self._scopes):
                        if other != i:
                            scope.cancel()
                    await self.leaving.wait()
            except (CarrierError, ConfigurationError) as error:
                if self.won is None:
                    self._errors[i] = error
                    self._changed.unpark_all()
                elif self.won[0] == i:
                    raise
        if self.won is not None and self.won[0] == i:
            self.closed.set()

    async def settled(self, started: int) -> None:
        """Wait until an attempt has won, or all that have started have failed."""
        while self.won is None and len(self._errors) < started:
            await self._changed.park()

    def failure(self) -> LevadaError:
        """Return the error of a race that has no winner."""
        errors = [self._errors[i] for i in sorted(self._errors)]
        for error in errors:
            if isinstance(error, ConfigurationError):
                return error
        lost = ConnectionLost("; ".join(str(error) for error in errors))
        lost.__cause__ = errors[0]
        return lost


class Fallback:
    """Fallback from QUIC to QMux over TLS, with a memory of the servers that need it.

    Put one object into the settings of all connections of a program: thanks to its memory, later connections do not wait for QUIC.

    Args:
        head_start: seconds by which QUIC, or the carrier that won the last time, starts before the other.
        remember: seconds for which TLS keeps the head start after it has won; then QUIC has it again.
        limit: most servers remembered; the oldest is forgotten.
    """

    def __init__(self, *, head_start: float = 0.25, remember: float = 600.0, limit: int = 1_000) -> None:
        if not (head_start >= 0 and remember >= 0 and limit >= 1):  # false for NaN, too
            raise ConfigurationError("a fallback needs head_start >= 0, remember >= 0 and limit >= 1")
        self.head_start = head_start
        self._remember = remember
        self._limit = limit
        self._since: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"Fallback(head_start={self.head_start:g}, remember={self._remember:g}, limit={self._limit})"

    def preferred(self, server: str) -> Literal["quic", "tls"]:
        """Return the carrier to start with.

        Args:
            server: authority of the URL.
        """
        # The clock of each run of trio has its own zero: a time in the future is from another run.
        age = trio.current_time() - self._since.get(server, float("inf"))
        return "tls" if 0.0 <= age < self._remember else "quic"

    def note(self, server: str, carrier: Literal["quic", "tls"]) -> None:
        """Remember the carrier that won. A win of TLS with the head start does not count, since QUIC may have had no chance."""
        if carrier == "quic":
            self._since.pop(server, None)
        elif self.preferred(server) == "quic":
            self._since.pop(server, None)
            self._since[server] = trio.current_time()
            if len(self._since) > self._limit:
                self._since.popitem(last=False)

    @asynccontextmanager
    async def dial(self, server: str, quic: Opens, tls: Opens) -> AsyncIterator[Connection]:
        """Connect over QUIC or, if that does not work soon, over TLS. Raises the errors of `race`.

        Args:
            server: authority of the URL.
            quic: connects over QUIC.
            tls: connects with QMux over TLS.
        """
        order: list[Literal["quic", "tls"]] = ["quic", "tls"]
        if self.preferred(server) == "tls":
            order.reverse()
        ways = {"quic": quic, "tls": tls}
        async with race([ways[name] for name in order], head_start=self.head_start) as (i, connection):
            self.note(server, order[i])
            yield connection
