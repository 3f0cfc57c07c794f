"""Operations of the peer while the user's code runs: at the gate, at work, and undoing work that was cut short.

* An operation is a record in the core until the core offers it or orders its execution. From then on it belongs to an `Execution`, a
  child that the connection drives by direct calls (`submit`, `execute`, `cancelled`). These run no user code, and raise nothing.
* The user's code runs in a handler of that actor, once the limiter has given it a place: at the gate, at work, and to undo. To end a
  running operation, the connection kills its actor, whose handler undoes the work before the actor stops.
* When its operation is over, the actor is idle until the next one (`levada.actors.pool`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from levada.actors.pool import Pooled
from levada.framework import Actor, Reason, Ref, handles
from levada.framework.errors import ActorStopped, CarrierError, DecodeError, LocalProtocolError
from levada.transports.maop import ErrorCode, FairQueue, OperationCancelled, Received

from .bodies import BodySource, make_source, quick_source
from .errors import OperationError, Refuse
from .handlers import BeforeExecute, Call, Code, Handler, OperationActor, Raised, Reply, StartHandler
from .tracing import serving

if TYPE_CHECKING:
    from .connection import MaopDriver

__all__ = ["Execution", "Limiter", "begin_execution"]


class Limited(Protocol):
    """An object that waits for a place."""

    def begin(self) -> None:
        """Use the place; `Limiter.done` gives it back."""
        ...


class Limiter(Actor[Any]):
    """Bounds how many operations run at once: gives places to jobs by priority class and age. There is one per listener or client.

    Others call it directly: its work is too short for a message. Source: MA-117.
    """

    max_running: int

    def __attrs_post_init__(self) -> None:
        self.running = 0
        """Places in use."""
        self._queue: FairQueue[Limited] = FairQueue()

    @property
    def waiting(self) -> int:
        """Jobs without a place."""
        return len(self._queue)

    def submit(self, job: Limited, priority: int, size: int) -> None:
        """Begin a job, now or when its turn comes.

        Args:
            job: begins when it has a place.
            priority: 0 (first) to 255.
            size: the job's cost, see `FairQueue.push`.
        """
        if self.running < self.max_running:
            self.running += 1
            job.begin()
        else:
            self._queue.push(job, priority, size, trio.current_time())

    def withdraw(self, job: Limited) -> bool:
        """Forget a waiting job; return whether it was waiting."""
        return self._queue.remove(job)

    def done(self) -> None:
        """Give a place back, and let the next job begin."""
        self.running -= 1
        while self._queue.waiting and self.running < self.max_running:
            job = self._queue.pop(trio.current_time())
            if job is None:
                return
            self.running += 1
            job.begin()


class ActorCode:
    """Runs one operation in a user's actor, which the connection supervises."""

    __slots__ = ("_actor", "_ref")

    def __init__(self, connection: MaopDriver, handler: Handler) -> None:
        made: Any = handler.execute
        self._actor: OperationActor = made()
        connection.idle.adopt(self._actor)
        self._ref: Ref[Any] = self._actor.ref

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
        """Ask the actor to decide at the gate."""
        await self._ask(BeforeExecute(call))

    async def execute(self, call: Call) -> Any:
        """Ask the actor to do the work."""
        return await self._ask(StartHandler(call))

    async def undo(self, call: Call, reason: str) -> None:
        """Kill the actor, and wait until its ``on_cancel`` is done."""
        self._actor.cancel(call, reason)
        await self._ref.terminated()

    def close(self) -> None:
        """Stop the actor."""
        self._ref.stop()


class Begin:
    """Tells an execution that the limiter has given it a place."""

    __slots__ = ()


class Undo:
    """Tells an execution without running code that its operation is over."""

    __slots__ = ()


BEGIN, UNDO = Begin(), Undo()


class Turn:
    """Waits for a place to undo an operation that has none, before all operations that wait to begin."""

    __slots__ = ("_come",)

    def __init__(self) -> None:
        self._come = trio.Event()

    def begin(self) -> None:
        """Use the place that the limiter gives."""
        self._come.set()

    async def wait(self, limiter: Limiter) -> None:
        """Wait for the place; if cancelled, there is none to give back."""
        limiter.submit(self, 0, 0)
        try:
            await self._come.wait()
        except trio.Cancelled:
            if not limiter.withdraw(self):
                limiter.done()
            raise


class Execution(Pooled):
    """Serves one operation of the peer after another, each from the first decision to the end of the undoing."""

    connection: MaopDriver
    operation: Received = attrs.field(init=False)
    handler: Handler = attrs.field(init=False)
    call: Call = attrs.field(init=False)
    busy: bool = attrs.field(default=False, init=False)
    """Whether it has an operation; if not, the fields above belong to the last one."""
    code: Code | None = attrs.field(default=None, init=False)
    """The code to run; made when the first place is given."""
    reason: str = attrs.field(default="", init=False)
    """Why the operation was cancelled."""
    working: bool = attrs.field(default=False, init=False)
    """Whether it has passed the gate."""
    running: bool = attrs.field(default=False, init=False)
    """Whether the user's code runs."""
    placed: bool = attrs.field(default=False, init=False)
    """Whether it waits for a place, or for the turn that uses it."""

    def execute(self, body: bytes | None) -> None:
        """Begin to work. `body` is the whole body, or ``None`` if the body comes in pieces."""
        self.working = True
        if body is not None:
            self.call.give(body)
        elif self.operation.length is None:
            self.connection.shared.metrics.streaming_open += 1
        self.submit()

    def submit(self) -> None:
        """Ask for a place: at the gate, where the user's code decides whether the operation may begin, or to work."""
        self.placed = True
        self.connection.shared.limiter.submit(self, self.operation.priority, self.operation.length or 0)

    def cancelled(self, event: OperationCancelled) -> None:
        """End the operation, and undo its work. Source: MA-113, MA-115."""
        self.reason = event.reason or "cancelled"
        if self.operation.length is None:
            self._ended()
        if self.running:
            self.ref.kill()
        elif not self.placed or self.connection.shared.limiter.withdraw(self):
            self.placed = False
            self.ref.tell(UNDO)

    def _ended(self) -> None:
        """Count the end of a body of undefined length."""
        if self.working and self.operation.spec.streaming:
            metrics = self.connection.shared.metrics
            metrics.streaming_open -= 1
            metrics.streaming_duration_ms.observe(1000 * (self.connection.clock() - self.operation.approved_at))

    def begin(self) -> None:
        """Use the place that the limiter gives."""
        self.connection.unbegun += 1
        self.own.tell(BEGIN)

    @handles
    async def on_begin(self, m: Begin) -> None:
        """Run the user's code, unless the operation was cancelled before its turn came."""
        self.placed = False
        self.connection.unbegun -= 1
        if self.reason:
            self.connection.shared.limiter.done()
            await self.on_undo(UNDO)
            return
        self.running, self.fit, in_order = True, False, False  # fit again when it ends normally
        try:
            if self.code is None:
                self.code = self.handler.code or ActorCode(self.connection, self.handler)
            in_order = await (self._work(self.code) if self.working else self._decide(self.code))
        except trio.Cancelled:
            self._give_up()
            raise
        finally:
            self.running = False
            try:
                if self.reason:
                    await self._undo()
            finally:
                self.connection.shared.limiter.done()  # not before: else a peer that cancels at once has any number of them undone
        self.fit = in_order and not self.reason
        if not self.busy:
            self._rest()

    @handles
    async def on_undo(self, m: Undo) -> None:
        """Undo an operation that was cut short between the gate and the work."""
        await self._undo_in_turn()
        self._rest()

    async def _undo_in_turn(self) -> None:
        """Undo work that is cut short while no code of it runs, so it has no place: a peer may cut short any number at once."""
        if self.code is None:
            self.busy = False
            return
        limiter = self.connection.shared.limiter
        await Turn().wait(limiter)
        try:
            await self._undo()
        finally:
            limiter.done()

    async def _undo(self) -> None:
        self.busy = False
        with trio.CancelScope(shield=True, deadline=self.connection.clock() + self.connection.config.cancel_timeout):
            try:
                if self.code is not None:
                    await self.code.undo(self.call, self.reason)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises ends here
                self.connection.records.failed("on_cancel", self.operation, error)

    def _rest(self) -> None:
        self.code = None
        del self.operation, self.handler, self.call  # they may hold a body
        self.connection.idle.put(self)

    async def _decide(self, code: Code) -> bool:
        """Approve the operation at the gate, or refuse it; return false if the code has failed."""
        connection, operation = self.connection, self.operation
        in_order = True
        try:
            await code.before_execute(self.call)
        except Refuse as refusal:
            self._refuse(refusal.code, refusal.retry_after)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes a code
            connection.records.failed("before_execute", operation, error)
            self._refuse(ErrorCode.EXECUTION_ERROR, None)
            in_order = False
        else:
            connection.feed(connection.core.proceed(operation.stream_id, now=connection.clock()))
        connection.shared.metrics.approval_latency_ms.observe(1000 * (connection.clock() - operation.since))
        return in_order

    def _refuse(self, code: int, retry_after: float | None) -> None:
        core, stream_id = self.connection.core, self.operation.stream_id
        try:
            core.refuse(stream_id, code, retry_after or 0.0, now=self.connection.clock())
        except LocalProtocolError:  # the code is reserved
            core.refuse(stream_id, ErrorCode.UNKNOWN_ERROR, now=self.connection.clock())
        self._over()

    def _over(self) -> None:
        """Record that this side has ended the operation."""
        connection = self.connection
        self.busy = False
        if type(self.code) is ActorCode:
            self.code.close()
        if connection.executions.pop(self.operation.stream_id, None) is not None and self.operation.length is None:
            self._ended()
        connection.flush_soon()

    async def _work(self, code: Code) -> bool:
        """Execute the operation and report the result; return false if the code has failed."""
        connection, operation = self.connection, self.operation
        began = connection.core.now
        try:
            tracing = connection.shared.tracing
            if tracing is None:
                size = await self._answer(await code.execute(self.call))
            else:
                with serving(tracing, operation, connection.remote):
                    size = await self._answer(await code.execute(self.call))
            now = connection.core.now
        except OperationError as error:
            self._fail(error.code, error.detail)
        except DecodeError as error:
            self._fail(ErrorCode.INVALID_FORMAT, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes a code
            self._fail(ErrorCode.EXECUTION_ERROR, connection.records.failed("execute", operation, error))
            return False
        else:
            self._over()
            metrics = connection.shared.metrics
            metrics.handler_latency_ms[operation.msg_id].observe(1000 * (now - began))
            if not operation.is_request:
                metrics.upload_latency_ms.observe(1000 * (now - operation.since))
            if connection.records.verbose:
                connection.apply(connection.core.take_events())  # logs its last steps first
                connection.records.step("done", operation, size)
        return True

    def _fail(self, code: int, reason: str) -> None:
        """Report that the handler failed. Source: MA-77, MA-79."""
        core, stream_id = self.connection.core, self.operation.stream_id
        try:
            core.fail(stream_id, code, reason, now=self.connection.clock())
        except LocalProtocolError:  # the code is reserved
            core.fail(stream_id, ErrorCode.UNKNOWN_ERROR, reason, now=self.connection.clock())
        self._over()
        self.connection.records.step("failed", self.operation, code=code)

    def _give_up(self) -> None:
        """End the operation, unless it was cancelled, because this actor is stopping."""
        if not self.reason and self.connection.ending:
            self.connection.shut()
        if not self.reason:
            self._fail(ErrorCode.CANCELLED, "the handler was ended")
            self.reason = "shutdown"

    def stopping(self, reason: Reason) -> Awaitable[None] | None:
        """End the operation that is under way, and undo its work."""
        self.connection.idle.forget(self)
        if not self.busy:
            return None
        self._give_up()
        self.connection.shared.limiter.withdraw(self)
        return self._undo_in_turn()

    def undelivered(self, messages: list[Any]) -> None:
        """Give back the places that were given and not used."""
        for message in messages:
            if message is BEGIN:
                self.connection.unbegun -= 1
                self.connection.shared.limiter.done()

    async def _answer(self, value: Any) -> int:
        """Report the end of the work; return the number of bytes in the answer. Source: MA-65, MA-74, MA-96 to MA-99a."""
        connection, operation = self.connection, self.operation
        core, stream_id = connection.core, operation.stream_id
        if not operation.is_request:
            core.finish(stream_id, now=connection.clock())
            return 0
        if value is None:
            core.respond(stream_id, now=connection.clock())
            return 0
        codec = connection.config.codec
        source = quick_source(value, codec) if type(value) is bytes else await self._source(value)
        wanted = operation.response_msg_id
        typed = wanted == 0 or wanted in operation.spec.success_layout
        kind = source.content_type if typed else None
        if source.whole is not None:
            core.respond(stream_id, source.whole, kind, now=connection.clock())
            size = len(source.whole)
        else:
            size = await self._stream(source, kind)
        connection.shared.metrics.succeeded(kind, size)
        return size

    async def _source(self, value: Any) -> BodySource:
        codec = self.connection.config.codec
        if isinstance(value, Reply):
            return await make_source(value.body, codec, value.length, value.content_type)
        return await make_source(value, codec)

    async def _stream(self, source: BodySource, kind: str | None) -> int:
        """Answer piece by piece, as fast as the peer takes it."""
        connection, stream_id = self.connection, self.operation.stream_id
        core = connection.core
        core.start_response(stream_id, source.length, kind, now=connection.clock())
        size = 0
        if source.length == 0:
            return 0
        async with aclosing(source.pieces()) as pieces:
            async for piece in pieces:
                size += len(piece)
                core.send_body(stream_id, piece, now=connection.clock())
                try:
                    await connection.room(stream_id)
                except CarrierError:
                    # The core learns of it too, and cancels this scope.
                    await trio.sleep_forever()
        core.end_body(stream_id, now=connection.clock())
        return size


def begin_execution(connection: MaopDriver, operation: Received) -> Execution | None:
    """Give an operation of the peer to a child; return ``None`` if the connection is ending, with all its operations."""
    try:
        execution = connection.executions[operation.stream_id] = connection.idle.take(Execution)
    except ActorStopped:
        return None
    execution.operation, execution.handler = operation, connection.shared.handlers[operation.msg_id]
    execution.call = Call(operation, connection)
    execution.busy, execution.reason, execution.working = True, "", False
    return execution
