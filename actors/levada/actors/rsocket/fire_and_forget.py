"""Fire-and-forget requests: they have no stream and no answer, so one actor can take many of them in a turn.

The connection queues requests that have not begun. An actor that receives `Begin` handles one after the other as long as no handler
waits. Before one does, the rest of the queue goes to another actor, so a slow handler does not hold up the others. The same happens when
a handler has failed, or has set a ContextVar, which the next one must not see. A failure is the actor's, as everywhere, and is not
reported to the peer (RS-62).
With an actor for each request the server took 12 µs of CPU time per request; this way it takes 6.
"""

from __future__ import annotations

from contextvars import copy_context
from inspect import isawaitable
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from trio.lowlevel import checkpoint

from levada.actors.pool import Pooled
from levada.framework import Reason, handles
from levada.framework.errors import DecodeError

from .errors import RequestFailed
from .streams import Begin, before_waiting, close_source

if TYPE_CHECKING:
    from .connection import RSocketDriver

__all__ = ["Fired"]

TURN = 500e-6  # seconds of handlers that do not wait, after which other actors have their turn


class Fired(Pooled):
    """Runs the user's handlers for the fire-and-forget requests of a connection."""

    connection: RSocketDriver

    def stopping(self, reason: Reason) -> None:
        """Leave the pool."""
        self.connection.idle.forget(self)

    def undelivered(self, messages: list[Any]) -> None:
        """Pass the queue on: this actor was stopped before it could begin."""
        self.connection.firing = False
        self.connection.fire_on()

    @handles
    async def take(self, m: Begin) -> None:
        """Handle the queued requests, or as many as fit into a turn."""
        connection = self.connection
        connection.firing = False
        self.fit = False  # fit again when it ends normally
        try:
            await before_waiting(self._take(), connection.fire_on)
            while not connection.fire_on():
                # The connection is stopping and gives out no more actors: this one takes them all.
                await checkpoint()
                await self._take()
        finally:
            connection.fire_on()
        self.fit = True
        connection.idle.put(self)

    async def _take(self) -> None:
        connection = self.connection
        fired, differs = connection.fired, self.system.scheduler.differs
        perf_counter = self.system.platform.perf_counter
        until = perf_counter() + TURN
        while fired:
            request = fired.popleft()
            connection.begun()
            try:
                if connection.checks_requests and (shown := request.credentials) is not None:
                    await connection.check(request, shown)
                result: Any = connection.responder(request)
                if type(result) is CoroutineType or (result is not None and isawaitable(result)):
                    result = await result
                if result is not None and hasattr(result, "__aiter__"):
                    await close_source(result)
            except (RequestFailed, DecodeError):
                pass  # this is an answer, and the requester gets none
            except Exception as error:
                if not connection.has_lost(error):
                    raise
            finally:
                connection.fire_and_forget -= 1
                connection.fire_and_forget_bytes -= request.payload.size
                request.close()
            if perf_counter() > until or differs(copy_context()):
                return
