"""Operations of this side: waiting for a stream, for Proceed, for room, and for the end.

An `Operation` is a record that the caller's task waits on; there is no task and no actor for it. Where the peer's credit for streams is
used up, callers wait in a queue by priority and age. Source: MA-116, MA-117, MA-130.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

import trio

from levada.framework.errors import CarrierError, LevadaError
from levada.transports.maop import Completed, ErrorCode, Failed, FairQueue
from levada.transports.maop import Refused as RefusedEvent
from levada.transports.maop.events import ResponseStarted
from levada.transports.maop.initiator import Outgoing

from .bodies import Source
from .errors import MaopError, OperationFailed, OperationLost, OperationTimeout, Refused

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["Begin", "CreditQueue", "Operation", "Outcome"]

Outcome: TypeAlias = Completed | RefusedEvent | Failed
Begin: TypeAlias = Callable[[], int]
"""Begins an operation in the core; returns its stream id."""


class Operation:
    """One operation of this side that has begun."""

    __slots__ = ("_connection", "_uploading", "_waiter", "chunks", "held", "outcome", "started", "stream_id", "wanted")

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self._connection = connection
        self.stream_id = stream_id
        self.outcome: Outcome | None = None
        """How it ended."""
        self.wanted = False
        """Whether the peer wants the body."""
        self.started: ResponseStarted | None = None
        """Header of a streamed Response."""
        self.chunks: deque[bytes | memoryview] | None = None
        """Pieces of it that nobody has taken; made when the first comes, as an empty one takes 760 octets."""
        self.held = 0
        """Their octets."""
        self._waiter: trio.lowlevel.Task | None = None
        self._uploading: trio.CancelScope | None = None

    def wake(self) -> None:
        """Something has happened."""
        task = self._waiter
        if task is not None:
            self._waiter = None
            trio.lowlevel.reschedule(task)
        if self._uploading is not None and self.outcome is not None:
            self._uploading.cancel()

    async def news(self) -> None:
        """Wait until something happens."""
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._wait_no_more)

    def _wait_no_more(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED

    def end(self, outcome: Outcome) -> None:
        """It is over."""
        self.outcome = outcome
        self.wake()

    async def finish(self, source: Source) -> Completed:
        """Send the body, if it comes in pieces, and wait for the end.

        Raises:
            MaopError: how it ended, if not well.
        """
        if source.whole is None:
            await self.upload(source)
        while self.outcome is None:
            await self.news()
        return self.result()

    async def upload(self, source: Source) -> None:
        """Send a body that comes in pieces: when the peer wants it, and as fast as it takes it; stop when it does not."""
        if source.length == 0:
            return
        while self.outcome is None and not self.wanted:
            await self.news()
        if self.outcome is not None:
            return
        connection, stream_id = self._connection, self.stream_id
        core = connection.core
        with trio.CancelScope() as self._uploading:
            try:
                async with aclosing(source.pieces()) as pieces:
                    async for piece in pieces:
                        if self._is_cut_off():
                            return
                        core.send_body(stream_id, piece, now=trio.current_time())
                        await connection.room(stream_id)
                if not self._is_cut_off():
                    core.end_body(stream_id, now=trio.current_time())
                    connection.turn()
            except CarrierError:
                pass  # the core has heard of it, or will
            finally:
                self._uploading = None

    def _is_cut_off(self) -> bool:
        """Whether the peer wants no more of the body; it says why in a moment."""
        entry = self._connection.core.streams.get(self.stream_id)
        return not isinstance(entry, Outgoing) or entry.cut_off

    def result(self) -> Completed:
        """Return how it ended.

        Raises:
            MaopError: not well.
        """
        outcome = self.outcome
        if isinstance(outcome, Completed):
            return outcome
        assert outcome is not None
        raise make_error(outcome, lost=self._connection.end is not None)


def make_error(outcome: RefusedEvent | Failed, *, lost: bool) -> MaopError:
    """Make the error for an operation that ended badly; `lost`: with its connection."""
    if isinstance(outcome, RefusedEvent):
        return Refused(code=outcome.code, retry_after=outcome.retry_after)
    kind: type[OperationFailed] = OperationFailed
    if lost and not outcome.by_peer and outcome.code == ErrorCode.CANCELLED:
        kind = OperationLost
    elif outcome.code == ErrorCode.TIMEOUT:
        kind = OperationTimeout
    return kind(outcome.reason, code=outcome.code, by_peer=outcome.by_peer, not_executed=outcome.not_executed)


class Waiting:
    """A caller that waits for a stream."""

    __slots__ = ("begin", "error", "event", "operation")

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.event = trio.Event()
        self.operation: Operation | None = None
        self.error: LevadaError | None = None


class CreditQueue:
    """Callers that wait for the peer to allow a stream of one kind."""

    def __init__(self, connection: Connection, *, request: bool) -> None:
        self._connection = connection
        self._request = request
        self._queue: FairQueue[Waiting] = FairQueue()
        self._opening = False

    def __len__(self) -> int:
        return len(self._queue)

    async def begin(self, begin: Begin, priority: int) -> Operation:
        """Begin an operation as soon as there is a stream for it and it is its turn.

        Raises:
            LevadaError: what beginning raises.

        Cancellation:
            nothing was begun.
        """
        connection = self._connection
        if not self._queue:
            core = connection.core
            if not core.can_open(request=self._request):
                connection.refresh_credit()
            if core.can_open(request=self._request) or not connection.is_open:
                return connection.begun(begin())
        waiting = Waiting(begin)
        self._queue.push(waiting, priority, 0, trio.current_time())
        if not self._opening:
            self._opening = True
            connection.tasks.start_soon(self._open)
        try:
            await waiting.event.wait()
        except BaseException:
            if waiting.operation is not None:
                connection.give_up(waiting.operation)
            else:
                self._queue.remove(waiting)
            raise
        if waiting.error is not None:
            raise waiting.error
        assert waiting.operation is not None
        return waiting.operation

    async def _open(self) -> None:
        connection = self._connection
        try:
            while self._queue and connection.is_open:
                connection.refresh_credit()
                if connection.core.can_open(request=self._request):
                    waiting = self._queue.pop(trio.current_time())
                    if waiting is not None:
                        self._let(waiting)
                else:
                    await connection.open_spare(unidirectional=not self._request)
        except CarrierError:
            pass
        finally:
            self._opening = False
            self.close()

    def _let(self, waiting: Waiting) -> None:
        try:
            waiting.operation = self._connection.begun(waiting.begin())
        except LevadaError as error:
            waiting.error = error
        waiting.event.set()

    def close(self) -> None:
        """Send everybody away, if no more operations may begin."""
        if self._connection.is_open:
            return
        while (waiting := self._queue.pop(trio.current_time())) is not None:
            waiting.error = self._connection.over_error()
            waiting.event.set()
