"""The connection actor: a core, its streams, and the operations of both sides from beginning to end.

* An operation of this side is a child actor that its caller waits on (`operations`). An operation of the peer is a record in the core
  until the user's code runs; then it has a child actor too (`executions`). Further children keep the control streams going (`control`)
  and, on a server, decide on the client (`authenticator`).
* The connection drives its children by direct calls: a turn of a mailbox would cost more than everything else.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import attrs
import trio

from levada.actors.metrics.protocols import request_samples
from levada.framework import Ref, Sample, restart
from levada.framework.errors import ActorStopped, CarrierError
from levada.framework.platform import PLATFORM
from levada.framework.tracing import Tracing
from levada.transports import carriers
from levada.transports.maop import (
    Approved,
    Audited,
    Begun,
    BodyEnded,
    BodyReceived,
    BodyWanted,
    Completed,
    ConnectionEnded,
    ConnectionState,
    Draining,
    Event,
    Execute,
    Failed,
    HandlerSpec,
    MaopCore,
    OperationCancelled,
    OperationOffered,
    ResponseRejected,
    ResponseStarted,
    RoomWanted,
    Stepped,
    StreamData,
    StreamUnblocked,
    code_name,
)
from levada.transports.maop import Disapproved as DisapprovedEvent
from levada.transports.maop import Refused as RefusedEvent

from .config import PeerConfig
from .control import ENDING, LAST, STARVED, ControlKeeper, Crowded, Last, Starved
from .errors import Disapproved
from .executions import Execution, Limiter, begin_execution
from .handlers import Handler
from .log import MAX_TEXT, ConnectionLog
from .metrics import Metrics
from .operations import CreditQueue, Outcome
from .peer import Peer
from .shares import TenantShares
from .streams import MaopStreams

__all__ = ["MaopDriver", "SharedState"]


@attrs.frozen(eq=False)
class SharedState:
    """Handlers, and the counts, queues and memories that span connections."""

    config: PeerConfig
    handlers: dict[int, Handler]
    """Handlers by msg_id; the table never changes. Source: MA-112."""
    limiter: Limiter
    """Bounds the handlers at work."""
    registry: TenantShares
    """State that the connections of each identity share."""
    tracing: Tracing | None = None
    """Of the system."""
    metrics: Metrics = attrs.field(factory=Metrics)
    """The counts of all connections."""
    specs: dict[int, HandlerSpec] = attrs.field(init=False)
    """The declarations of the handlers."""

    def __attrs_post_init__(self) -> None:
        specs = {msg_id: handler.declared() for msg_id, handler in self.handlers.items()}
        object.__setattr__(self, "specs", specs)
        self.metrics.approval_indexes = self.registry.approval_indexes


class MaopDriver(MaopStreams):
    """One connection of either side."""

    shared: SharedState

    protocol: ClassVar = "maop"
    last: ClassVar = ConnectionEnded
    rounds: ClassVar = 8
    amount: ClassVar = sys.maxsize
    is_client: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        shared = self.shared
        now = trio.current_time()
        platform = PLATFORM.get()
        self.config: PeerConfig = shared.config
        self.core = MaopCore(
            client=self.is_client,
            random_bytes=platform.token_bytes,
            config=self.config.core,
            handlers=shared.specs,
            wall_offset=platform.time() - now,
            now=now,
            dedup=shared.registry.dedup,
            replay=shared.registry.replay,
        )
        self._handle: Callable[[], Peer | None] = lambda: None
        self.records: ConnectionLog
        self.farewell = ""
        """The reason that the peer is given when this side drains."""
        self.end: ConnectionEnded | None = None
        self.executions: dict[int, Execution] = {}
        """Operations of the peer that a handler knows."""
        self.credit = {request: CreditQueue(request=request) for request in (False, True)}
        """Callers that wait for a stream; the key says whether it is for a Request."""
        self.control: Ref[Any] | None = None
        """The `ControlKeeper`, once there is a carrier."""
        self._draining_since = 0.0

    @property
    def handle(self) -> Peer:
        """The user's handle for this connection. Users own it, so it is freed without the garbage collector."""
        handle = self._handle()
        if handle is None:
            handle = Peer(self)
            self._handle = weakref.ref(handle)
        return handle

    def outputs(self) -> list[Any]:
        """Refresh the core's stream credit, return its output, and tell the control pool what to wait for."""
        core = self.core
        if len(core.pool.streams) < self.config.core.control.global_control_pool_size:
            self.refresh_credit()
        outputs: list[Any] = core.data_to_send(trio.current_time())
        if core.pool.starved and not self.starved:
            self.starved = True
            self._tell_control(STARVED)
        if core.state in ENDING:
            self._tell_control(LAST)
        return outputs

    def figures(self) -> dict[str, object]:
        """Return the counts of operations and streams."""
        counts = self.core.statistic
        return {
            "operations": self.core.operations,
            "handlers": len(self.executions),
            "opened": counts.opened,
            "received": counts.received,
            "done": counts.done,
            "streams": self.stream_count,
        }

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of operations; those with the protocol's names are its listener's, or its client's."""
        core = self.core
        return (
            *super().metrics(),
            *request_samples(
                self.protocol,
                self.side,
                streams=core.operations,
                sent=core.statistic.opened,
                received=core.statistic.received,
            ),
        )

    def _on_outcome(self, event: Outcome) -> None:
        stream_id = event.stream_id
        operation = self.operations.pop(stream_id, None)
        if stream_id & 2:
            self.forget_later(stream_id)
        if self.records.verbose:
            self.records.outcome(event)
        if operation is not None:
            operation.outcome = event
            operation.wake()

    def _on_wanted(self, event: BodyWanted) -> None:
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            operation.wanted = True
            operation.wake()

    def _on_response(self, event: ResponseStarted) -> None:
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            operation.head = event
            operation.wake()

    def _on_body(self, event: BodyReceived) -> None:
        execution = self.executions.get(event.stream_id)
        if execution is not None:
            execution.call.give_piece(event.data)
            return
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            if operation.chunks is None:
                operation.chunks = deque()
            operation.chunks.append(event.data)
            operation.held += len(event.data)
            if operation.held >= self.config.core.gate.stream_window:
                self.held.add(event.stream_id)
            operation.wake()

    def _on_body_end(self, event: BodyEnded) -> None:
        execution = self.executions.get(event.stream_id)
        if execution is not None:
            execution.call.give_end()

    def _on_offered(self, event: OperationOffered) -> None:
        execution = begin_execution(self, event.operation)
        if execution is not None:
            execution.submit()

    def _on_execute(self, event: Execute) -> None:
        operation = event.operation
        execution = self.executions.get(operation.stream_id) or begin_execution(self, operation)
        if execution is None:
            return
        if self.records.verbose:
            self.records.step("begun", operation)
        if not operation.spec.gated:
            waited = operation.approved_at - operation.since
            if waited:
                self.shared.metrics.approval_latency_ms.observe(1000 * waited)
            else:
                self.shared.metrics.approval_latency_ms.buckets[0] += 1  # as nearly always
        execution.execute(event.body)

    def _on_cancelled(self, event: OperationCancelled) -> None:
        execution = self.executions.pop(event.stream_id, None)
        if execution is not None:
            self.records.step("cancelled", execution.operation, code=event.code)
            execution.cancelled(event)

    def _on_unblocked(self, event: StreamUnblocked) -> None:
        self.resume(event.stream_id)

    def _on_room_wanted(self, event: RoomWanted) -> None:
        self.start_task(self._make_room, event.stream_id)

    async def _make_room(self, stream_id: int) -> None:
        try:
            await self.room(stream_id)
        except CarrierError:
            return  # the core finds out by itself
        self.feed(self.core.has_room(stream_id, now=trio.current_time()))

    def _on_approved(self, event: Approved) -> None:
        self.records.say("approved", f"{event.identifier}, version {'.'.join(map(str, event.version))}")
        self.greeted()

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        self.refusal = Disapproved(event.reason, code=event.code, retry_after=event.retry_after)
        # A client's program gets an error for this, and the listener has warned.
        self.records.say("disapproved", code_name(event.code), reason=event.reason)

    def _on_draining(self, event: Draining) -> None:
        self._draining_since = self._draining_since or trio.current_time()
        who = "the peer" if event.by_peer else "this side"
        self.records.say("draining", f"{who} disconnects, {event.drain_time:.3f} s", reason=event.reason)
        if event.by_peer:
            self.leaving()
        for queue in self.credit.values():
            queue.close(self)

    def _on_audited(self, event: Audited) -> None:
        text = f"{code_name(event.code)}: {event.detail[:MAX_TEXT]}"
        self.records.say("audit", text, event.stream_id, logging.WARNING)

    def _on_rejected(self, event: ResponseRejected) -> None:
        self.records.say("response rejected", code_name(event.code), event.stream_id, reason=event.reason)

    def _on_ended(self, event: ConnectionEnded) -> None:
        self.idle.limit = 0
        self.ended(event, event.reason)
        for queue in self.credit.values():
            queue.close(self)

    def log_end(self, event: ConnectionEnded) -> None:
        """Log how the connection ended and how many operations it carried."""
        drained = 0.0
        if self._draining_since:
            drained = trio.current_time() - self._draining_since
            self.shared.metrics.drain_ms.observe(1000 * drained)
        counts = self.core.statistic
        self.records.say(
            "ended",
            f"{event.code}, drained {drained:.3f} s, {counts.opened} operations begun, {counts.received} received, "
            f"{counts.done} of them done, {counts.block_bytes} bytes",
            reason=event.reason,
        )

    def _on_begun(self, event: Begun) -> None:
        self.records.begun(event)

    def _on_stepped(self, event: Stepped) -> None:
        self.records.passed(event)

    events: ClassVar = {
        Approved: _on_approved,
        Audited: _on_audited,
        Begun: _on_begun,
        BodyEnded: _on_body_end,
        BodyReceived: _on_body,
        BodyWanted: _on_wanted,
        Completed: _on_outcome,
        ConnectionEnded: _on_ended,
        DisapprovedEvent: _on_disapproved,
        Draining: _on_draining,
        Execute: _on_execute,
        Failed: _on_outcome,
        OperationCancelled: _on_cancelled,
        OperationOffered: _on_offered,
        RefusedEvent: _on_outcome,
        ResponseRejected: _on_rejected,
        ResponseStarted: _on_response,
        RoomWanted: _on_room_wanted,
        Stepped: _on_stepped,
        StreamUnblocked: _on_unblocked,
    }

    def consumed(self, stream_id: int, size: int) -> None:
        """Count bytes of a streamed body that the handler has taken."""
        self.feed(self.core.body_consumed(stream_id, size, now=trio.current_time()))

    def started(self) -> None:
        """Create the log, which needs the actor's path, then begin."""
        records = self.records = ConnectionLog(
            self.core, self.ref.path, reasons=self.config.log_reasons, failures=self.system.failure_log
        )
        self.core.steps = records.verbose
        self.core.wake = self.flush_soon
        if records.verbose:
            self.acting = {**self.acts, StreamData: MaopDriver._send_and_log}
        super().started()

    async def run_on(self, carrier: carriers.Connection) -> None:
        """Run the carrier, with a control pool, and count it in the metrics."""
        try:
            self.control = self.spawn(lambda: ControlKeeper(self), name="control", supervise=restart())
        except ActorStopped:
            return  # this actor is stopping
        self.shared.metrics.add(self.core)
        await super().run_on(carrier)

    def _send_and_log(self, output: StreamData) -> None:
        self.send_data(output)
        if not output.fin and output.stream_id in self.core.pool.streams:
            self.records.signals(output)

    def crowded(self, stream_id: int) -> None:
        """Keep the signals of a control stream in the core."""
        if stream_id in self.core.pool.streams:
            self.core.set_control_writable(stream_id, False)
            self._tell_control(Crowded(stream_id))

    def _tell_control(self, message: Crowded | Starved | Last) -> None:
        if self.control is not None and not self.ending:  # otherwise the control pool has stopped, or is about to
            self.control.tell(message)

    def lost(self, code: int, reason: str) -> None:
        """Take the connection out of the metrics."""
        super().lost(code, reason)
        self.shared.metrics.remove(self.core)

    @property
    def drain_limit(self) -> float:
        """Seconds that open operations, and then the last signals, have to finish."""
        times = self.config.core.times
        return times.drain_timeout + 3 * times.flush_timeout

    def begin_drain(self, now: float) -> list[Event]:
        """Ask the peer for the end, with a reason, if the session is open."""
        if self.core.state in (ConnectionState.OPEN, ConnectionState.DRAINING):
            return self.core.request_disconnect(self.config.core.times.drain_timeout, self.farewell, now)
        return self.core.drain(now)

    async def aclose(self, reason: str = "") -> None:
        """Wait for running operations within the drain time, then disconnect. Source: MA-89 to MA-93.

        Cancellation:
            the connection closes at once.
        """
        self.farewell = reason
        await super().aclose()

    def shut(self, code: int = 0, reason: str = "") -> None:
        """Close at once without telling the peer. Operations end, and the actor stops."""
        super().shut(code)

    def release(self) -> None:
        """Release the children, the streams and the core's operations."""
        self.core.let_go()
        super().release()
