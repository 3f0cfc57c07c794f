"""The operations of the peer where code of the user runs: at the gate, at work, and undoing what was cut short.

An `Execution` is made when the core offers an operation or has it executed; until then an operation is a record of the core.
Its code runs in a task of the connection, in a place that the scheduler gave.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import trio

from levada.framework import Ref
from levada.framework.errors import ActorStopped, CarrierError, DecodeError, LocalProtocolError
from levada.transports.maop import ErrorCode, Incoming, OperationCancelled

from .bodies import Source, make_source, quick_source
from .errors import OperationError, Refuse
from .handlers import BeforeExecute, Call, Code, Execute, Handler, OperationActor, Raised, Reply
from .workers import Worker

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["Execution"]


class ActorCode:
    """An actor of the operation's own, supervised by the connection."""

    __slots__ = ("_actor", "_ref")

    def __init__(self, connection: Connection, handler: Handler) -> None:
        made: Any = handler.execute
        self._actor: OperationActor = made()
        self._ref: Ref[Any] = connection.spawn(lambda: self._actor)

    async def _ask(self, message: Any) -> Any:
        try:
            answer = await self._ref.ask(message, timeout=None)
        except ActorStopped as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    async def before_execute(self, call: Call) -> None:
        """See `Code`."""
        await self._ask(BeforeExecute(call))

    async def execute(self, call: Call) -> Any:
        """See `Code`."""
        return await self._ask(Execute(call))

    async def undo(self, call: Call, reason: str) -> None:
        """See `Code`."""
        self._actor.cancel(call, reason)
        await self._ref.terminated()

    def close(self) -> None:
        """See `Code`."""
        self._ref.stop()


class Execution:
    """One operation of the peer that a handler knows."""

    __slots__ = ("_code", "_connection", "_handler", "_placed", "_reason", "_working", "call", "operation", "worker")

    def __init__(self, connection: Connection, operation: Incoming, handler: Handler) -> None:
        self._connection = connection
        self._handler = handler
        self.operation = operation
        self.call = Call(operation, connection.peer, self._consumed)
        self._code: Code | None = None
        self.worker: Worker | None = None
        """See `levada.actors.maop.workers.Job`."""
        self._reason = ""
        """Why it was cancelled."""
        self._working = False
        """Whether the gate is behind it."""
        self._placed = False
        """Whether it waits for a place, or has one."""

    def _consumed(self, octets: int) -> None:
        if self.operation.spec.streaming:
            self._connection.consumed(self.operation.stream_id, octets)

    # ------------------------------------------------ what the core says

    def offered(self) -> None:
        """Decide whether it may begin."""
        self._submit()

    def execute(self, body: bytes | None) -> None:
        """Begin to work, with the whole body, or with one that comes in pieces."""
        self._working = True
        if body is not None:
            self.call.give(body)
        elif self.operation.length is None:
            self._connection.shared.metrics.streaming_open += 1
        self._submit()

    def _submit(self) -> None:
        self._placed = True
        self._connection.shared.scheduler.submit(self, self.operation.priority, self.operation.length or 0)

    def cancelled(self, event: OperationCancelled) -> None:
        """It is over; what it did is to be undone. Source: MA-113, MA-115."""
        self._reason = event.reason or "cancelled"
        connection = self._connection
        self._ended()
        if self.worker is not None:
            self.worker.scope.cancel()
        else:
            if self._placed and not connection.shared.scheduler.withdraw(self):
                if not connection.workers.withdraw(self):
                    return
                connection.shared.scheduler.done()
            self._placed = False
            connection.handlers.start_soon(self._undo)

    def _ended(self) -> None:
        if self._working and self.operation.length is None and self.operation.spec.streaming:
            metrics = self._connection.shared.metrics
            metrics.streaming_open -= 1
            metrics.streaming_duration_ms.observe(1000 * (trio.current_time() - self.operation.approved_at))

    # ------------------------------------------------ at work

    def begin(self) -> None:
        """See `Job`."""
        self._connection.workers.begin(self)

    async def run(self) -> None:
        """See `levada.actors.maop.workers.Job`."""
        working = self._working
        try:
            if self._code is None:
                self._code = self._handler.code or ActorCode(self._connection, self._handler)
            if working:
                await self._work(self._code)
            else:
                await self._decide(self._code)
        except trio.Cancelled:
            self._reason = self._reason or "shutdown"  # the connection itself may be given up
            raise
        finally:
            self.worker = None
            if (
                self._working is working
            ):  # else the approval has led to the work at once, which waits for a place by now
                self._placed = False
            self._connection.shared.scheduler.done()
            if self._reason:
                await self._undo()

    async def _undo(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._connection.config.cancel_grace):
            try:
                code = self._code or self._handler.code
                if code is not None:
                    await code.undo(self.call, self._reason)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises ends here
                self._connection.journal.failed("on_cancel", self.operation, error)

    async def _decide(self, code: Code) -> None:
        connection, stream_id = self._connection, self.operation.stream_id
        core = connection.core
        try:
            await code.before_execute(self.call)
        except Refuse as refusal:
            self._refuse(refusal.code, refusal.retry_after)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes a code
            connection.journal.failed("before_execute", self.operation, error)
            self._refuse(ErrorCode.EXECUTION_ERROR, None)
        else:
            connection.feed(core.proceed(stream_id, now=trio.current_time()))
        connection.shared.metrics.approval_latency_ms.observe(1000 * (trio.current_time() - self.operation.since))

    def _refuse(self, code: int, retry_after: float | None) -> None:
        connection, stream_id = self._connection, self.operation.stream_id
        try:
            connection.core.refuse(stream_id, code, retry_after or 0.0, now=trio.current_time())
        except LocalProtocolError:  # a code that is reserved
            connection.core.refuse(stream_id, ErrorCode.UNKNOWN_ERROR, now=trio.current_time())
        self._over()

    def _over(self) -> None:
        """It has ended by what this side did."""
        connection = self._connection
        connection.executions.pop(self.operation.stream_id, None)
        if self._code is not None:
            self._code.close()
        self._ended()
        connection.turn()

    async def _work(self, code: Code) -> None:
        connection, operation = self._connection, self.operation
        began = connection.core.now
        octets = 0
        try:
            value = await code.execute(self.call)
            if operation.is_request:
                octets = await self._answer(value)
            else:
                connection.core.finish(operation.stream_id, now=trio.current_time())
            now = connection.core.now
        except OperationError as error:
            self._fail(error.code, error.detail)
        except DecodeError as error:
            self._fail(ErrorCode.INVALID_FORMAT, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes a code
            audit = connection.journal.failed("execute", operation, error)
            self._fail(ErrorCode.EXECUTION_ERROR, f"the handler failed [{audit}]")
        else:
            self._over()
            connection.finished(operation, began, now, octets)

    def _fail(self, code: int, reason: str) -> None:
        """The handler failed. Source: MA-77, MA-79."""
        connection, stream_id = self._connection, self.operation.stream_id
        try:
            connection.core.fail(stream_id, code, reason, now=trio.current_time())
        except LocalProtocolError:  # a code that is reserved
            connection.core.fail(stream_id, ErrorCode.UNKNOWN_ERROR, reason, now=trio.current_time())
        self._over()
        connection.journal.step("failed", self.operation, code=code)

    # ------------------------------------------------ the answer

    async def _answer(self, value: Any) -> int:
        """Respond; return the octets of the body. Source: MA-65, MA-96 to MA-99a."""
        core, stream_id = self._connection.core, self.operation.stream_id
        if value is None:
            core.respond(stream_id, now=trio.current_time())
            return 0
        source = await self._source(value)
        wanted = self.operation.response_msg_id
        typed = wanted == 0 or wanted in self.operation.spec.success_layout
        kind = source.content_type if typed else None
        if source.whole is not None:
            core.respond(stream_id, source.whole, kind, now=trio.current_time())
            octets = len(source.whole)
        else:
            octets = await self._stream(source, kind)
        self._connection.shared.metrics.succeeded(kind, octets)
        return octets

    async def _source(self, value: Any) -> Source:
        codec = self._connection.config.codec
        if isinstance(value, Reply):
            return await make_source(value.body, codec, value.length, value.content_type)
        if isinstance(value, bytes):
            return quick_source(value, codec)
        return await make_source(value, codec)

    async def _stream(self, source: Source, kind: str | None) -> int:
        """Answer piece by piece, as fast as the peer takes it."""
        connection, stream_id = self._connection, self.operation.stream_id
        core = connection.core
        core.start_response(stream_id, source.length, kind, now=trio.current_time())
        octets = 0
        if source.length == 0:
            return 0
        async with aclosing(source.pieces()) as pieces:
            async for piece in pieces:
                octets += len(piece)
                core.send_body(stream_id, piece, now=trio.current_time())
                try:
                    await connection.room(stream_id)
                except CarrierError:
                    # The core hears of it too, and cancels this scope.
                    await trio.sleep_forever()
        core.end_body(stream_id, now=trio.current_time())
        return octets
