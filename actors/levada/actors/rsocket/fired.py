"""Fire-and-forget requests: no stream, no answer, so that one actor can take many of them in a turn.

The connection keeps those that have not begun in a queue. An actor that is told `Begin` handles one after the other for as long as no
handler waits; before one does, the rest of the queue goes to another actor, so a slow one holds up nobody. A turn, an actor taken up
and put back, and a coroutine for each request would cost 4 µs of some 9.
"""

from __future__ import annotations

from inspect import isawaitable
from time import perf_counter
from types import CoroutineType
from typing import Any

from levada.framework import handles
from levada.framework.errors import DecodeError

from .errors import RequestFailed
from .requests import Request
from .streams import BEGIN, Begin, Stream, before_waiting, close_source

__all__ = ["Fired"]

TURN = 500e-6  # seconds of handlers that do not wait, after which other actors have their turn


class Fired(Stream):
    """Runs the user's handlers for the connection's fire-and-forget requests. It never has a stream."""

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: it was ended before it could begin, so another one takes the queue."""
        self.connection.firing = False
        self.connection.fire_on()

    @handles
    async def take(self, m: Begin) -> None:
        """Handle what is queued."""
        connection = self.connection
        connection.firing = False
        self.fit = False  # until it has ended in order
        try:
            await before_waiting(self._take_all(), connection.fire_on)
        finally:
            connection.fire_on()  # the rest, if a handler failed or the turn was long enough
        self.fit = True
        connection.rest(self)

    async def _take_all(self) -> None:
        connection = self.connection
        fired, differs = connection.fired, self.system.scheduler.differs
        until = perf_counter() + TURN
        while fired:
            request = fired.popleft()
            connection.begun()
            try:
                await self._handle(request)
            finally:
                connection.fire_and_forget -= 1
                request.close()

    async def _handle(self, request: Request) -> None: ...
