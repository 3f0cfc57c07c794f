"""The connection actor: a core, its streams, the operations of both sides, and their beginning and end.

* What the core has to say and to send is taken once for a batch of turns: `turn` asks for that. Streams are read first.
* Operations of this side are records that their callers wait on (`operations`); those of the peer are records of the core until code
  of the user runs (`executions`).
* Time is the core's: a timer of the actor is set to `next_deadline`, and only ever set anew to be earlier.
* The end is the core's too: `ConnectionEnded` is its last event, each operation has had its own by then. When the carrier ends, all
  that had arrived is given to the core first.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final

import trio

from levada.framework import Actor, Reason, handles
from levada.framework.errors import (
    CarrierError,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    LevadaError,
)
from levada.transports import carriers
from levada.transports.carriers import CarrierInfo, CloseReason
from levada.transports.maop import (
    Approved,
    Audited,
    AuthenticationReceived,
    BodyEnded,
    BodyReceived,
    BodyWanted,
    Completed,
    ConnectionEnded,
    ConnectionState,
    Draining,
    ErrorCode,
    Event,
    Execute,
    Failed,
    Incoming,
    MaopCore,
    OperationCancelled,
    OperationOffered,
    ResponseAcknowledged,
    ResponseRejected,
    ResponseStarted,
    ResponseUnacknowledged,
    StreamUnblocked,
    code_name,
)
from levada.transports.maop import Disapproved as DisapprovedEvent
from levada.transports.maop import Refused as RefusedEvent

from .config import PeerConfig
from .errors import Disapproved
from .executions import Execution
from .operations import CreditQueue, Operation, Outcome
from .peer import Peer
from .shared import Shared
from .streams import Streams

__all__ = ["Carrier", "Connection"]

logger = logging.getLogger("levada.actors.maop")

Carrier = Callable[[], AbstractAsyncContextManager[carriers.Connection]]
"""Connects, or accepts; leaving the context closes."""

_ENDING: Final = (ConnectionState.FLUSHING, ConnectionState.CLOSING)
_LOOK: Final = 0.01
"""Seconds between two looks whether the last signals have been acknowledged."""


class Flush:
    """To the connection: read, and take what its core has to say and to send."""

    __slots__ = ()


class Due:
    """The core's deadline has passed."""

    __slots__ = ()


FLUSH, DUE = Flush(), Due()


class Connection(Actor[Any]):
    """One connection of either side."""

    shared: Shared
    carrier: Carrier

    is_client: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        shared = self.shared
        now = trio.current_time()
        self.config: PeerConfig = shared.config
        self.core = MaopCore(
            client=self.is_client,
            random_bytes=os.urandom,
            config=self.config.core,
            handlers=shared.specs,
            wall_offset=time.time() - now,
            now=now,
            dedup=shared.registry.dedup,
            replay=shared.registry.replay,
        )
        self.peer = Peer(self)
        self.info: CarrierInfo | None = None
        self.approval: Approved | None = None
        """What was agreed on, once it was."""
        self.disapproval: DisapprovedEvent | None = None
        """Why it was not."""
        self.end: ConnectionEnded | None = None
        self.operations: dict[int, Operation] = {}
        """Of this side, by stream id."""
        self.executions: dict[int, Execution] = {}
        """Of the peer, those that a handler knows."""
        self.credit = {request: CreditQueue(self, request=request) for request in (False, True)}
        """Callers that wait for a stream, by whether it is for a Request."""
        self.handlers: trio.Nursery
        """Where code of the user runs."""
        self.tasks: trio.Nursery
        """Where the connection's own tasks run, while it has a carrier."""
        self.streams: Streams | None = None
        self.opened = trio.Event()
        """Set when the session is open, or never will be."""
        self.ended = trio.Event()
        self.refusal: LevadaError | OSError | None = None
        """Why there was no carrier."""
        self.closing = False
        self.turns = 0
        self._flush_due = self._begun = self._looking = False
        self._armed = math.inf
        self._gone = trio.Event()
        self._draining_since = 0.0

    # ------------------------------------------------------------ turns

    def turn(self) -> None:
        """Read and write at the end of the batch of turns that is running."""
        if not self._flush_due:
            self._flush_due = True
            self._cell.tell(FLUSH)

    @handles
    def on_flush(self, m: Flush) -> None:
        """End a turn."""
        self.flush()

    @handles
    def on_due(self, m: Due) -> None:
        """Let the core do what is due."""
        self._armed = math.inf
        self._apply(self.core.handle_timeout(trio.current_time()))
        self.flush()

    def flush(self) -> None:
        """Read what is at hand, write what there is, and set the clock."""
        self._flush_due = False
        core, streams = self.core, self.streams
        self.turns += 1
        if streams is None:
            return
        streams.read()
        events = core.take_events()
        if events:
            self._apply(events)
        streams.write(core.data_to_send(trio.current_time()))
        events = core.take_events()
        if events:
            self._apply(events)
        deadline = core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:
            self._armed = deadline
            self.timers.at("core", deadline, DUE)
        if core.state in _ENDING and not self._looking:
            self._looking = True
            self.tasks.start_soon(self._look)

    async def _look(self) -> None:
        """Tell the core as soon as the peer has all signals, so that nobody waits for nothing. Source: MA-92, MA-93."""
        while self.core.state in _ENDING and self.streams is not None:
            await trio.sleep(_LOOK)
            if self.streams.acknowledged():
                self._apply(self.core.control_acknowledged(now=trio.current_time()))
                self.flush()
        self._looking = False

    def feed(self, events: list[Event]) -> None:
        """Do what the core says, and have sent what follows from it."""
        if events:
            self._apply(events)
        self.turn()

    def _feed(self, events: list[Event]) -> None:
        if events:
            self._apply(events)

    # ------------------------------------------------------------ what the core says

    def _apply(self, events: list[Event]) -> None:
        if events and type(events[-1]) is ConnectionEnded:
            self.end = events[-1]  # before the operations that end with it
        table = self._events
        for event in events:
            table[type(event)](self, event)

    def _on_outcome(self, event: Outcome) -> None:
        stream_id = event.stream_id
        operation = self.operations.pop(stream_id, None)
        if stream_id & 2 and self.streams is not None:
            self.streams.finished(stream_id)
        if operation is not None:
            operation.end(event)

    def _on_wanted(self, event: BodyWanted) -> None:
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            operation.wanted = True
            operation.wake()

    def _on_response(self, event: ResponseStarted) -> None:
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            operation.started = event
            operation.wake()

    def _on_body(self, event: BodyReceived) -> None:
        execution = self.executions.get(event.stream_id)
        if execution is not None:
            execution.call.give_piece(event.data)
            return
        operation = self.operations.get(event.stream_id)
        if operation is not None:
            operation.chunks.append(event.data)
            operation.held += len(event.data)
            if operation.held >= self.config.core.stream_window and self.streams is not None:
                self.streams.held.add(event.stream_id)
            operation.wake()

    def _on_body_end(self, event: BodyEnded) -> None:
        execution = self.executions.get(event.stream_id)
        if execution is not None:
            execution.call.give_end()

    def _on_offered(self, event: OperationOffered) -> None:
        self._execution(event.operation).offered()

    def _on_execute(self, event: Execute) -> None:
        operation = event.operation
        execution = self.executions.get(operation.stream_id) or self._execution(operation)
        self.log("begun", operation)
        if not operation.spec.gated:
            waited = operation.approved_at - operation.since
            self.shared.metrics.approval_latency_ms.observe(1000 * waited)
        execution.execute(event.body)

    def _execution(self, operation: Incoming) -> Execution:
        execution = Execution(self, operation, self.shared.handlers[operation.msg_id])
        self.executions[operation.stream_id] = execution
        return execution

    def _on_cancelled(self, event: OperationCancelled) -> None:
        execution = self.executions.pop(event.stream_id, None)
        if execution is not None:
            self.log("cancelled", execution.operation, result=event.code)
            execution.cancelled(event)

    def _on_unblocked(self, event: StreamUnblocked) -> None:
        if self.streams is not None:
            self.streams.resume(event.stream_id)

    def _on_approved(self, event: Approved) -> None:
        self.approval = event
        self.info_event("approved %s, version %s", event.identifier, ".".join(map(str, event.version)))
        self.opened.set()

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        self.disapproval = event
        logger.warning(
            "%s: authentication: %s: %s",
            self.ref.path,
            code_name(event.code),
            event.reason[:100],
            extra=self.extra("disapproved"),
        )

    def _on_authentication(self, event: AuthenticationReceived) -> None:
        raise NotImplementedError  # a client's core never says this

    def _on_draining(self, event: Draining) -> None:
        self._draining_since = self._draining_since or trio.current_time()
        who = "the peer" if event.by_peer else "this side"
        self.info_event("%s disconnects, %.3f s to drain: %s", who, event.drain_time, event.reason[:100])
        for queue in self.credit.values():
            queue.close()

    def _on_audited(self, event: Audited) -> None:
        logger.warning(
            "%s: audit: %s on stream %d: %s",
            self.ref.path,
            code_name(event.code),
            event.stream_id,
            event.detail,
            extra=self.extra("audit", event.stream_id),
        )

    def _on_acknowledged(self, event: ResponseAcknowledged) -> None:
        pass

    def _on_rejected(self, event: ResponseRejected) -> None:
        name, reason = code_name(event.code), event.reason[:100]
        logger.info(
            "%s: response %d was rejected: %s: %s",
            self.ref.path,
            event.stream_id,
            name,
            reason,
            extra=self.extra("response_rejected", event.stream_id),
        )

    def _on_unacknowledged(self, event: ResponseUnacknowledged) -> None:
        pass  # the core counts them

    def _on_ended(self, event: ConnectionEnded) -> None:
        drained = ""
        if self._draining_since:
            took = trio.current_time() - self._draining_since
            self.shared.metrics.drain_ms.observe(1000 * took)
            drained = f", drained {took:.3f} s"
        statistic = self.core.statistic
        self.info_event(
            "ended by %d (%s)%s; %d operations begun, %d received, %d of them done",
            event.code,
            event.reason[:100],
            drained,
            statistic.opened,
            statistic.received,
            statistic.done,
        )
        self.timers.cancel_all()
        for queue in self.credit.values():
            queue.close()
        self.opened.set()
        self.ended.set()
        self.turn()

    _events: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Approved: _on_approved,
        Audited: _on_audited,
        AuthenticationReceived: lambda self, event: self._on_authentication(event),
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
        ResponseAcknowledged: _on_acknowledged,
        ResponseRejected: _on_rejected,
        ResponseStarted: _on_response,
        ResponseUnacknowledged: _on_unacknowledged,
        StreamUnblocked: _on_unblocked,
    }

    # ------------------------------------------------------------ operations of this side

    @property
    def is_open(self) -> bool:
        """Whether operations may begin."""
        return self.core.state is ConnectionState.OPEN

    def refresh_credit(self) -> None:
        """Tell the core how many streams the peer allows."""
        if self.streams is not None:
            self.streams.refresh_credit()

    async def open_spare(self, *, unidirectional: bool) -> None:
        """Wait for a stream. Errors as `carriers.Connection.open_stream`."""
        if self.streams is None:
            raise ConnectionClosed("the connection has no carrier")
        await self.streams.open_spare(unidirectional=unidirectional)

    def begun(self, stream_id: int) -> Operation:
        """Keep a record of an operation that has begun."""
        operation = self.operations[stream_id] = Operation(self, stream_id)
        self.turn()
        return operation

    def give_up(self, operation: Operation) -> None:
        """Cancel an operation; once more, or when it is over, it does nothing. Source: MA-61, MA-115."""
        if self.operations.pop(operation.stream_id, None) is not None and self.end is None:
            self.core.cancel(operation.stream_id, now=trio.current_time())
            self.turn()

    async def room(self, stream_id: int) -> None:
        """Hand on what was written, and wait until its stream has room for more. Errors as `Streams.room`."""
        self.flush()
        if self.streams is None:
            raise ConnectionClosed("the connection has no carrier")
        await self.streams.room(stream_id)

    def taken(self, operation: Operation, octets: int) -> None:
        """A reader has taken octets of a streamed Response."""
        operation.held -= octets
        streams = self.streams
        if streams is not None and operation.stream_id in streams.held and operation.held < self.config.core.stream_window // 2:
            streams.resume(operation.stream_id)

    def over_error(self) -> LevadaError | None:
        """Return the error that using the connection raises, if it is over or ending."""
        if self.is_open:
            return None
        end = self.end
        if self.closing:
            return ConnectionClosed("this side closed the connection")
        if end is None:
            return ConnectionLost("the peer disconnects: no new operations")
        return ConnectionLost(f"the connection was lost: {end.reason or f'closed with code {end.code}'}", code=end.code)

    # ------------------------------------------------------------ operations of the peer

    def consumed(self, stream_id: int, octets: int) -> None:
        """A handler has taken octets of a streamed body."""
        self.feed(self.core.body_consumed(stream_id, octets, now=trio.current_time()))

    def finished(self, operation: Incoming, began: float, octets: int) -> None:
        """A handler has ended well."""
        now = trio.current_time()
        metrics = self.shared.metrics
        metrics.histogram(operation.msg_id).observe(1000 * (now - began))
        if not operation.is_request:
            metrics.upload_latency_ms.observe(1000 * (now - operation.since))
        self.log("done", operation, octets)

    def audit_failure(self, operation: Incoming, error: Exception) -> str:
        """Log what a handler raised; return the audit id that the peer gets instead. Source: MA-79."""
        audit = os.urandom(4).hex()
        logger.error(
            "%s: handler %d failed, audit id %s",
            self.ref.path,
            operation.msg_id,
            audit,
            exc_info=error,
            extra=self.extra("handler_failed", operation.stream_id),
        )
        return audit

    # ------------------------------------------------------------ logs

    def extra(self, event: str, stream_id: int | None = None) -> dict[str, object]:
        """Fields of a log record. Source: MA-132."""
        fields: dict[str, object] = {
            "protocol": "maop",
            "actor": self.ref.path,
            "event": event,
            "connection_id": self.core.session_id.hex(),
        }
        if stream_id is not None:
            fields["stream_id"] = stream_id
        return fields

    def info_event(self, text: str, *arguments: object) -> None:
        """Log something about the connection as a whole."""
        logger.info(f"%s: {text}", self.ref.path, *arguments, extra=self.extra("connection"))

    def log(self, event: str, operation: Incoming, octets: int = 0, result: int | None = None) -> None:
        """Log a step of an operation of the peer. Source: MA-132."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "%s: stream %d %s: msg_id %d, bytes %d, lat_ms %d, priority %d, result %s",
            self.ref.path,
            operation.stream_id,
            event,
            operation.msg_id,
            octets or operation.length or 0,
            1000 * (trio.current_time() - operation.since),
            operation.priority,
            "-" if result is None else code_name(result),
            extra=self.extra(event, operation.stream_id),
        )

    # ------------------------------------------------------------ beginning and end

    def started(self) -> None:
        """See `Actor.started`."""
        self.start_soon(self._main)

    async def _main(self) -> None:
        try:
            async with trio.open_nursery() as self.handlers:
                try:
                    async with self.carrier() as carrier:
                        await self._carry(carrier)
                except (CarrierError, ConfigurationError, OSError) as error:
                    if not self._begun:
                        self.refusal = error
                finally:
                    self._lose("the connection was given up")
                self.handlers.cancel_scope.deadline = trio.current_time() + self.config.drain
        finally:
            self._gone.set()
        self.stop()

    async def _carry(self, carrier: carriers.Connection) -> None:
        """Move octets until the carrier ends."""
        self._begun = True
        self.info = carrier.info
        async with trio.open_nursery() as self.tasks:
            streams = self.streams = Streams(self.core, self._feed, self.turn, self.tasks)
            streams.carrier = carrier
            self.shared.metrics.add(self.core)
            self.begin()
            self.tasks.start_soon(streams.accept)
            reason = await carrier.closed()
            streams.over = True
            await trio.lowlevel.checkpoint()  # streams that came last are accepted
            streams.read()
            self.tasks.cancel_scope.cancel()
        self._lose(_text(reason), reason.code)

    def begin(self) -> None:
        """The handshake is complete."""
        raise NotImplementedError

    def _lose(self, text: str, code: int = 0) -> None:
        """The carrier is gone."""
        self._apply(self.core.connection_lost(code, text))
        if self.streams is not None:
            self.streams.clear()
        self.shared.metrics.remove(self.core)
        self.opened.set()
        self.ended.set()

    async def ready(self) -> None:
        """Wait until the session is open.

        Raises:
            Disapproved: the server lets nobody in, or not this client.
            ConnectionLost: nobody answers, or not in this protocol.
            ConnectionClosed: the actor was ended meanwhile.
            ConfigurationError: a URL or settings that cannot work.
        """
        await self.opened.wait()
        if self.approval is not None and self.end is None:
            return
        if self.refusal is not None:
            raise self.refusal
        if self.disapproval is not None:
            no = self.disapproval
            raise Disapproved(no.reason, code=no.code, retry_after=no.retry_after)
        raise self.over_error() or ConnectionClosed("the connection was given up before it was there")

    async def aclose(self, reason: str = "") -> None:
        """Let running operations end within the time for it, then disconnect. Source: MA-89 to MA-93.

        Cancellation:
            closed at once.
        """
        try:
            if self._begun and self.end is None:
                self.closing = True
                now = trio.current_time()
                if self.core.state in (ConnectionState.OPEN, ConnectionState.DRAINING):
                    self.feed(self.core.request_disconnect(self.config.drain, reason, now=now))
                    with trio.move_on_at(now + self.config.drain + 3 * self.config.core.flush_timeout):
                        await self.ended.wait()
        finally:
            self.shut()
        await self.ref.terminated()

    def shut(self, code: int = 0, reason: str = "") -> None:
        """Close at once: operations end, the actor ends."""
        self.closing = True
        if self._begun:
            self._apply(self.core.close(code, reason))
            self.flush()
        else:
            self.ref.stop(now=True)

    async def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`: somebody else ends the actor, or it has ended itself."""
        self.shut()
        if self._begun:
            self.handlers.cancel_scope.cancel()
            await self._gone.wait()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: a flush that nobody needs any more."""


def _text(reason: CloseReason) -> str:
    if reason.lost:
        return reason.text or "lost"
    return f"the peer closed it with code {reason.code}{f': {reason.text}' if reason.text else ''}"


class ClientConnection(Connection):
    """A connection that this program opened."""

    token: bytes
    auth_type: str
    pairs: dict[str, str]

    def begin(self) -> None:
        """See `Connection.begin`."""
        self.core.roles = self.server_roles
        self.feed(
            self.core.handshake_completed(
                auth_type=self.auth_type, token=self.token, pairs=self.pairs, now=trio.current_time()
            )
        )


_ = ErrorCode
