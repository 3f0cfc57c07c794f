"""Operations of this side: waiting for a stream, for Proceed, for room, and for the end.

An `OwnOperation` is a child of the connection, which drives it by direct calls; the caller's task waits on it. It handles no message, so it
costs neither a task nor a turn. When its caller leaves, it stays idle until the next operation (`levada.actors.pool`).
While the peer allows no further stream, callers wait in a queue by priority and age. Source: MA-116, MA-117, MA-130.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from levada.actors.pool import Pooled
from levada.framework import Reason
from levada.framework.embedding import ActorPhase
from levada.framework.errors import CarrierError, ConnectionClosed, LevadaError
from levada.transports.maop import Completed, ConnectionState, ErrorCode, Failed, FairQueue
from levada.transports.maop import Refused as RefusedEvent
from levada.transports.maop.events import ResponseStarted
from levada.transports.maop.initiator import Outgoing

from .bodies import BodySource
from .errors import MaopError, OperationFailed, OperationLost, OperationRefused, OperationStopped, OperationTimeout

if TYPE_CHECKING:
    from .streams import MaopStreams

__all__ = ["Begin", "CreditQueue", "Outcome", "OwnOperation", "begin_operation"]

Outcome: TypeAlias = Completed | RefusedEvent | Failed
Begin: TypeAlias = Callable[..., int]
"""Begins an operation in the core, at the moment given as ``now``; returns its stream id."""


class OwnOperation(Pooled):
    """Serves one operation of this side after another, each from its beginning until its caller leaves it."""

    connection: MaopStreams
    stream_id: int = attrs.field(default=0, init=False)
    busy: bool = attrs.field(default=False, init=False)
    """Whether a caller uses it."""
    outcome: Outcome | OperationStopped | None = attrs.field(default=None, init=False)
    """How it ended."""
    wanted: bool = attrs.field(default=False, init=False)
    """Whether the peer wants the body."""
    head: ResponseStarted | None = attrs.field(default=None, init=False)
    """Header of a streamed Response."""
    chunks: deque[bytes | memoryview] | None = attrs.field(default=None, init=False)
    """Pieces of the Response that the caller has not taken; made with the first piece, as an empty deque takes 760 bytes."""
    held: int = attrs.field(default=0, init=False)
    """Bytes in them."""
    _waiter: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    _uploading: trio.CancelScope | None = attrs.field(default=None, init=False)

    def taken(self, size: int) -> None:
        """Count bytes of a streamed Response that the reader has taken."""
        self.held -= size
        connection, stream_id = self.connection, self.stream_id
        if stream_id in connection.held and self.held < connection.core.config.gate.stream_window // 2:
            connection.resume(stream_id)

    def leave(self) -> None:
        """Release the caller; an operation that is not over is cancelled. Source: MA-61, MA-115."""
        if self.outcome is None:
            self._cancel()
        self.busy = self.wanted = False
        self.outcome = self.head = self.chunks = None
        self.held = 0
        self.connection.idle.put(self)

    def _cancel(self) -> None:
        connection = self.connection
        if connection.operations.pop(self.stream_id, None) is not None and connection.end is None:
            connection.core.cancel(self.stream_id, now=trio.current_time())
            connection.flush_soon()

    def stopping(self, reason: Reason) -> None:
        """End the operation, if it is not over, together with this actor."""
        connection = self.connection
        connection.idle.forget(self)
        self.fit = False
        if self.busy and self.outcome is None:
            if connection.ending:
                connection.shut()
            if self.outcome is None:
                self._cancel()
                self.outcome = OperationStopped(
                    f"the actor of stream {self.stream_id} was stopped",
                    code=ErrorCode.CANCELLED,
                    actor=self.ref.path,
                    reason=reason,
                )
                self.wake()

    def wake(self) -> None:
        """Wake the caller, because something has happened."""
        task = self._waiter
        if task is not None:
            self._waiter = None
            trio.lowlevel.reschedule(task)
        if self._uploading is not None and self.outcome is not None:
            self._uploading.cancel()

    def news(self) -> Awaitable[None]:
        """Wait until something happens; await it at once."""
        self._waiter = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(self._wait_no_more)  # noqa: ASYNC105 - a coroutine less for each request

    def _wait_no_more(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def upload(self, source: BodySource) -> None:
        """Send a body in pieces when the peer asks for it, as fast as the peer takes it, and stop when the peer says so."""
        if source.length == 0:
            return
        while self.outcome is None and not self.wanted:
            await self.news()
        if self.outcome is not None:
            return
        connection, stream_id = self.connection, self.stream_id
        core = connection.core
        with trio.CancelScope() as self._uploading:
            try:
                async with aclosing(source.pieces()) as pieces:
                    async for piece in pieces:
                        if self._is_cut_off():
                            return
                        core.send_body(stream_id, piece, now=trio.current_time())
                        try:
                            await connection.room(stream_id)
                        except CarrierError:
                            return  # the core knows, or will soon
                if not self._is_cut_off():
                    core.end_body(stream_id, now=trio.current_time())
                    connection.flush_soon()
            finally:
                self._uploading = None

    def _is_cut_off(self) -> bool:
        """Whether the peer has stopped the body; its reason follows shortly."""
        entry = self.connection.core.streams.get(self.stream_id)
        return not isinstance(entry, Outgoing) or entry.cut_off

    def result(self) -> Completed:
        """Return the outcome; raise `MaopError` if the operation did not succeed."""
        outcome = self.outcome
        if isinstance(outcome, Completed):
            return outcome
        assert outcome is not None
        if isinstance(outcome, OperationStopped):
            raise outcome
        raise make_error(outcome, lost=self.connection.end is not None, leaving=self.connection.core.heard)


def make_error(outcome: RefusedEvent | Failed, *, lost: bool, leaving: bool) -> MaopError:
    """Make the error for an operation that did not succeed.

    Args:
        outcome: what the core says.
        lost: whether the connection has ended.
        leaving: whether the peer has asked for its end. A refusal on the wire does not say so.
    """
    if isinstance(outcome, RefusedEvent):
        leaving = leaving and outcome.code == ErrorCode.CAPACITY_LIMIT
        detail = "the peer is closing the connection" if leaving else ""
        return OperationRefused(detail, code=outcome.code, retry_after=outcome.retry_after)
    kind: type[OperationFailed] = OperationFailed
    if lost and not outcome.by_peer and outcome.code == ErrorCode.CANCELLED:
        kind = OperationLost
    elif outcome.code == ErrorCode.TIMEOUT:
        kind = OperationTimeout
    return kind(outcome.reason, code=outcome.code, by_peer=outcome.by_peer, not_executed=outcome.not_executed)


def begin_operation(connection: MaopStreams, begin: Begin) -> OwnOperation:
    """Begin an operation; raises the errors of `begin`."""
    if connection.own.phase is not ActorPhase.RUNNING:
        raise ConnectionClosed("the connection's actor is ending")
    operation = connection.idle.take(OwnOperation)
    try:
        operation.stream_id = stream_id = begin(now=connection.clock())
    except BaseException:
        connection.idle.put(operation)
        raise
    operation.busy = True
    connection.operations[stream_id] = operation
    connection.flush_soon()
    return operation


class Waiting:
    """A caller that waits for a stream."""

    __slots__ = ("begin", "error", "event", "operation")

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.event = trio.Event()
        self.operation: OwnOperation | None = None
        self.error: LevadaError | None = None


class CreditQueue:
    """Callers that wait for the peer to allow a stream of one kind."""

    def __init__(self, *, request: bool) -> None:
        self._request = request
        self._queue: FairQueue[Waiting] = FairQueue()
        self._opening = False

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, connection: MaopStreams, begin: Begin) -> OwnOperation | None:
        """Begin an operation if a stream is free and no caller waits for one.

        Raises:
            CarrierError: no operation may begin any more.
            LevadaError: an error of `begin`.
        """
        core = connection.core
        if core.state is not ConnectionState.OPEN:
            raise connection.error()
        if self._queue.waiting:
            return None
        if not core.can_open(request=self._request):
            connection.refresh_credit()
            if not core.can_open(request=self._request):
                return None
        return begin_operation(connection, begin)

    async def wait(self, connection: MaopStreams, begin: Begin, priority: int) -> OwnOperation:
        """Begin an operation as soon as a stream is free and its turn has come.

        Raises:
            LevadaError: an error of `begin`.

        Cancellation:
            nothing was begun.
        """
        waiting = Waiting(begin)
        self._queue.push(waiting, priority, 0, trio.current_time())
        if not self._opening:
            self._opening = True
            connection.start_task(self._open, connection)
        try:
            await waiting.event.wait()
        except BaseException:
            if waiting.operation is not None:
                waiting.operation.leave()
            else:
                self._queue.remove(waiting)
            raise
        if waiting.error is not None:
            raise waiting.error
        assert waiting.operation is not None
        return waiting.operation

    async def _open(self, connection: MaopStreams) -> None:
        try:
            while self._queue and connection.core.state is ConnectionState.OPEN:
                connection.refresh_credit()
                if connection.core.can_open(request=self._request):
                    waiting = self._queue.pop(trio.current_time())
                    if waiting is not None:
                        self._let(connection, waiting)
                else:
                    try:
                        await connection.open_spare(unidirectional=not self._request)
                    except CarrierError:
                        return
        finally:
            self._opening = False
            self.close(connection)

    def _let(self, connection: MaopStreams, waiting: Waiting) -> None:
        try:
            waiting.operation = begin_operation(connection, waiting.begin)
        except LevadaError as error:
            waiting.error = error
        waiting.event.set()

    def close(self, connection: MaopStreams) -> None:
        """Wake all waiting callers with an error, if no more operations may begin."""
        if connection.core.state is ConnectionState.OPEN:
            return
        while (waiting := self._queue.pop(trio.current_time())) is not None:
            waiting.error = connection.error()
            waiting.event.set()
