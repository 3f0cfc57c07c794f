"""The connection actor: a core, its streams, the operations of both sides, and their beginning and end.

* What the core has to say and to send is taken once for a batch of turns: `turn` asks for that. Streams are read first.
* Operations of this side are children that their callers wait on (`operations`); those of the peer are records of the core until code
  of the user runs, in a child too (`executions`). So are what keeps the control streams going (`control`) and, on a server's side, what
  decides on the client (`authenticator`). Children are driven by direct calls: a turn of a mailbox would cost more than all the rest.
* Time is the core's: a timer of the actor is set to `next_deadline`, and only ever set anew to be earlier.
* The end is the core's too: `ConnectionEnded` is its last event, each operation has had its own by then. When the carrier ends, all
  that had arrived is given to the core first.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final

import trio

from levada.actors.pool import Pool
from levada.framework import Actor, Reason, Ref, handles, restart
from levada.framework.embedding import ActorPhase, local_ref
from levada.framework.errors import (
    ActorStopped,
    CarrierError,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    LevadaError,
)
from levada.transports import carriers
from levada.transports.carriers import CarrierInfo
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
    MaopCore,
    OperationCancelled,
    OperationOffered,
    Received,
    ResponseRejected,
    ResponseStarted,
    RoomWanted,
    Stepped,
    StreamUnblocked,
    code_name,
)
from levada.transports.maop import Disapproved as DisapprovedEvent
from levada.transports.maop import Refused as RefusedEvent

from .config import PeerConfig
from .control import ENDING, LAST, STARVED, ControlPool, Crowded, Last, Starved
from .errors import Disapproved
from .executions import Execution
from .log import MAX_TEXT, Log
from .operations import Begin, CreditQueue, Operation, Outcome
from .peer import Peer
from .registry import Identity
from .shared import Shared
from .streams import Streams

__all__ = ["Carrier", "Connection"]

Carrier = Callable[[], AbstractAsyncContextManager[carriers.Connection]]
"""Connects, or accepts; leaving the context closes."""

_ROUNDS: Final = 8
"""Rounds of trio's loop that a turn waits at most for tasks that can run."""
MAX_IDLE: Final = 256
"""Children without an operation that are kept, of each kind."""


class Due:
    """The core's deadline has passed."""

    __slots__ = ()


DUE = Due()


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
        self._peer: Callable[[], Peer | None] = lambda: None
        self.identity = Identity()
        """Of a client, at its server."""
        self.log: Log
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
        self.credit = {request: CreditQueue(request=request) for request in (False, True)}
        """Callers that wait for a stream, by whether it is for a Request."""
        self.idle = Pool(self, MAX_IDLE)
        """Children without an operation."""
        self.control: Ref[Any]
        """See `ControlPool`."""
        self.tasks: trio.Nursery
        """Where the connection's own tasks run, while it has a carrier."""
        self.streams: Streams | None = None
        self.opened = trio.Event()
        """Set when the session is open, or never will be."""
        self.ended = trio.Event()
        self.refusal: LevadaError | OSError | None = None
        """Why there was no carrier."""
        self.closing = False
        self.unbegun = 0
        """Executions that have a place, and not had their turn."""
        self.starved = False
        """Whether signals wait for a stream that the peer does not allow."""
        self.turns = 0
        self._turn_due = self._unread = self._runs = self._begun = self._ending = False
        self._pumping: trio.lowlevel.Task | None = None
        self._armed = math.inf
        self._gone = trio.Event()
        self._draining_since = 0.0

    @property
    def peer(self) -> Peer:
        """What users call this connection by; it belongs to them, and so is freed without the collector."""
        peer = self._peer()
        if peer is None:
            peer = Peer(self)
            self._peer = weakref.ref(peer)
        return peer

    # ------------------------------------------------------------ turns

    def turn(self) -> None:
        """Read and write soon, when the tasks that can run now have run."""
        if not self._turn_due:
            self._turn_due = True
            if self._pumping is not None:
                trio.lowlevel.reschedule(self._pumping)
                self._pumping = None

    def _readable(self) -> None:
        """A stream can be read."""
        self._unread = True
        if not self._turn_due:
            self.turn()

    def _read(self) -> bool:
        """Give the core what is at hand; say whether there was anything."""
        self._unread = False
        streams = self.streams
        if streams is None:
            return False
        some = bool(streams.ready)
        streams.read()
        if streams.ready:
            self._readable()
        return some

    async def _pump(self) -> None:
        """Take turns. What was read wakes tasks, and what these write goes out together with what the core has to say."""

        def give_up(_: object) -> trio.lowlevel.Abort:
            self._pumping = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            if not self._turn_due:
                self._pumping = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(give_up)
            if self._unread and self._read():
                # Without, the answers to what was read go into packets of their own, which costs a fifth of all requests a second
                # with 64 at a time.
                for _ in range(_ROUNDS):
                    self._turn_due = False
                    await trio.lowlevel.checkpoint()
                    if not self._turn_due and not self.unbegun:
                        break  # nobody had anything to say
            self.flush()

    @handles
    def on_due(self, m: Due) -> None:
        """Let the core do what is due."""
        self._armed = math.inf
        self._apply(self.core.handle_timeout(trio.current_time()))
        self.flush()

    def flush(self) -> None:
        """Read what is at hand, write what there is, and set the clock."""
        self._turn_due = False
        core, streams = self.core, self.streams
        self.turns += 1
        if streams is None:
            return
        if self._unread:
            self._read()
        if len(core.pool.streams) < self.config.core.global_control_pool_size:
            streams.refresh_credit()
        streams.write(core.data_to_send(trio.current_time()))
        events = core.take_events()
        if events:
            self._apply(events)
        deadline = core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:
            self._armed = deadline
            self.timers.at("core", deadline, DUE)
        if core.pool.starved and not self.starved:
            self.starved = True
            self._tell_control(STARVED)
        if core.state in ENDING and not self._ending:
            self._ending = True
            self._tell_control(LAST)

    def acknowledged(self) -> None:
        """The peer has all signals, as `ControlPool` has found out. Source: MA-92, MA-93."""
        self._apply(self.core.control_acknowledged(now=trio.current_time()))
        self.flush()

    def feed(self, events: list[Event]) -> None:
        """Do what the core says, and have sent what follows from it."""
        if events:
            self._apply(events)
        self.turn()

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
            self.streams.forget_later(stream_id)
        if self.log.verbose:
            self.log.outcome(event)
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
            if operation.held >= self.config.core.stream_window and self.streams is not None:
                self.streams.held.add(event.stream_id)
            operation.wake()

    def _on_body_end(self, event: BodyEnded) -> None:
        execution = self.executions.get(event.stream_id)
        if execution is not None:
            execution.call.give_end()

    def _on_offered(self, event: OperationOffered) -> None:
        execution = self._execution(event.operation)
        if execution is not None:
            execution.offered()

    def _on_execute(self, event: Execute) -> None:
        operation = event.operation
        execution = self.executions.get(operation.stream_id) or self._execution(operation)
        if execution is None:
            return
        if self.log.verbose:
            self.log.step("begun", operation)
        if not operation.spec.gated:
            self.shared.metrics.approval_latency_ms.observe(1000 * (operation.approved_at - operation.since))
        execution.execute(event.body)

    def _execution(self, operation: Received) -> Execution | None:
        """Give an operation to a child; ``None`` if there are no more, and all operations end with the connection in a moment."""
        try:
            execution = self.executions[operation.stream_id] = self.idle.take(Execution)
        except ActorStopped:
            return None
        execution.take(operation, self.shared.handlers[operation.msg_id])
        return execution

    def _on_cancelled(self, event: OperationCancelled) -> None:
        execution = self.executions.pop(event.stream_id, None)
        if execution is not None:
            self.log.step("cancelled", execution.operation, code=event.code)
            execution.cancelled(event)

    def _on_unblocked(self, event: StreamUnblocked) -> None:
        if self.streams is not None:
            self.streams.resume(event.stream_id)

    def _on_room_wanted(self, event: RoomWanted) -> None:
        self.tasks.start_soon(self._make_room, event.stream_id)

    async def _make_room(self, stream_id: int) -> None:
        try:
            await self.room(stream_id)
        except CarrierError:
            return  # the core hears of it
        self.feed(self.core.has_room(stream_id, now=trio.current_time()))

    def _on_approved(self, event: Approved) -> None:
        self.approval = event
        self.log.say("approved", f"{event.identifier}, version {'.'.join(map(str, event.version))}")
        self.opened.set()

    def _on_disapproved(self, event: DisapprovedEvent) -> None:
        self.disapproval = event
        # A client's program gets it as an error.
        level = logging.INFO if self.is_client else logging.WARNING
        self.log.say("disapproved", code_name(event.code), level=level, reason=event.reason)

    def _on_draining(self, event: Draining) -> None:
        self._draining_since = self._draining_since or trio.current_time()
        who = "the peer" if event.by_peer else "this side"
        self.log.say("draining", f"{who} disconnects, {event.drain_time:.3f} s", reason=event.reason)
        for queue in self.credit.values():
            queue.close(self)

    def _on_audited(self, event: Audited) -> None:
        text = f"{code_name(event.code)}: {event.detail[:MAX_TEXT]}"
        self.log.say("audit", text, event.stream_id, logging.WARNING)

    def _on_rejected(self, event: ResponseRejected) -> None:
        self.log.say("response rejected", code_name(event.code), event.stream_id, reason=event.reason)

    def _on_ended(self, event: ConnectionEnded) -> None:
        drained = 0.0
        if self._draining_since:
            drained = trio.current_time() - self._draining_since
            self.shared.metrics.drain_ms.observe(1000 * drained)
        counts = self.core.statistic
        self.log.say(
            "ended",
            f"{event.code}, drained {drained:.3f} s, {counts.opened} operations begun, {counts.received} received, "
            f"{counts.done} of them done, {counts.block_octets} octets",
            reason=event.reason,
        )
        self.idle.limit = 0
        self.timers.cancel_all()
        for queue in self.credit.values():
            queue.close(self)
        self.opened.set()
        self.ended.set()
        self.turn()

    def _on_begun(self, event: Begun) -> None:
        self.log.begun(event)

    def _on_stepped(self, event: Stepped) -> None:
        self.log.passed(event)

    _events: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
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

    # ------------------------------------------------------------ operations of this side

    @property
    def is_ending(self) -> bool:
        """Whether this actor is ending, and all its children with it."""
        return local_ref(self).phase is not ActorPhase.RUNNING

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

    def begin_operation(self, begin: Begin) -> Operation:
        """Begin an operation. Errors as of `begin`."""
        if self.is_ending:
            raise ConnectionClosed("the connection's actor is ending")
        operation = self.idle.take(Operation)
        try:
            operation.take(begin())
        except BaseException:
            self.idle.put(operation)
            raise
        self.turn()
        return operation

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
        if (
            streams is not None
            and operation.stream_id in streams.held
            and operation.held < self.config.core.stream_window // 2
        ):
            streams.resume(operation.stream_id)

    def over_error(self) -> CarrierError:
        """Return the error that using the connection raises when it is over, ending, or was never open."""
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

    def finished(self, operation: Received, began: float, now: float, octets: int) -> None:
        """A handler has ended well."""
        metrics = self.shared.metrics
        metrics.histogram(operation.msg_id).observe(1000 * (now - began))
        if not operation.is_request:
            metrics.upload_latency_ms.observe(1000 * (now - operation.since))
        if self.log.verbose:
            self._apply(self.core.take_events())  # its last steps
            self.log.step("done", operation, octets)

    # ------------------------------------------------------------ beginning and end

    def started(self) -> None:
        """See `Actor.started`."""
        self._runs = True
        self.log = Log(self.core, self.ref.path, reasons=self.config.log_reasons)
        self.core.steps = self.log.verbose
        self.core.wake = self.turn
        self.start_soon(self._main)

    async def _main(self) -> None:
        try:
            async with self.carrier() as carrier:
                await self._carry(carrier)
        except (ActorStopped, CarrierError, ConfigurationError, OSError) as error:
            if not self._begun:
                self.refusal = error
        finally:
            self._lose("the connection was given up")
            self.core.let_go()
            self.idle.close()
            self._gone.set()
        self.stop()

    async def _carry(self, carrier: carriers.Connection) -> None:
        """Move octets until the carrier ends."""
        self.control = self.spawn(lambda: ControlPool(self), name="control", supervise=restart())
        self._begun = True
        self.info = carrier.info
        async with trio.open_nursery() as self.tasks:
            signals = self.log.signals if self.log.verbose else None
            streams = self.streams = Streams(self.core, self._apply, self._readable, self._crowded, signals)
            streams.start(carrier, self.tasks)
            self.shared.metrics.add(self.core)
            self.begin()
            self.tasks.start_soon(self._pump)
            reason = await carrier.closed()
            streams.finish()
            self.tasks.cancel_scope.cancel()
        self._lose(str(reason), reason.code)

    def _crowded(self, stream_id: int) -> None:
        self._tell_control(Crowded(stream_id))

    def _tell_control(self, message: Crowded | Starved | Last) -> None:
        if not self.is_ending:  # else it has ended, or is about to
            self.control.tell(message)

    def begin(self) -> None:
        """The handshake is complete."""
        raise NotImplementedError

    def _lose(self, text: str, code: int = 0) -> None:
        """The carrier is gone."""
        self._apply(self.core.connection_lost(code, text, trio.current_time()))
        if self.streams is not None:
            self.streams.clear()
            self.streams = None
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
        raise self.over_error()

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
                    core = self.config.core
                    self.feed(self.core.request_disconnect(core.drain, reason, now))
                    with trio.move_on_at(now + core.drain + 3 * core.flush_timeout):
                        await self.ended.wait()
        finally:
            self.shut()
        await self.ref.terminated()

    def shut(self) -> None:
        """Close at once: operations end, the actor ends."""
        self.closing = self.closing or self.end is None  # else the peer did, before
        if self._begun:
            self._apply(self.core.close(0, "", trio.current_time()))
            self.flush()
        elif self._runs:
            self.ref.stop(now=True)

    async def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`: somebody else ends the actor, or it has ended itself."""
        self.shut()
        if self._begun:
            await self._gone.wait()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: a flush that nobody needs any more."""
