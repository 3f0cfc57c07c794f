"""The connection actor of RSocket and ReactiveSocket: events of the core, requests of this side, leases.

Child actors serve the requests and streams (`levada.actors.rsocket.streams`); the connection drives them by direct calls. The reader goes
on without waiting for handlers. It waits only for children that have not begun yet, so that a flood of requests does not pile up, and
for the carrier if the core's own answers fill it.

A single request goes to the carrier at once. Where many frames are produced together, one flush sends them for a batch of turns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar

import attrs
import trio
from trio.lowlevel import current_task, enable_ki_protection, wait_task_rescheduled

from levada.actors.driver import Phase
from levada.actors.metrics.protocols import request_samples, rsocket_samples
from levada.actors.pool import Pool
from levada.actors.single import SingleDriver
from levada.framework import FlowWindow, Receiver, Sample, Sender, handles, restart
from levada.framework.embedding import ChannelCore, loss_of
from levada.framework.errors import ActorStopped, CarrierError
from levada.framework.platform import PLATFORM
from levada.framework.text import text_of
from levada.framework.tracing import Tracing
from levada.transports.rsocket import ConnectionState, CoreConfig, ErrorCode, LeaseGrant, Payload, RSocketCore
from levada.transports.rsocket.events import (
    ConnectionDraining,
    ConnectionEnded,
    CreditGranted,
    EndReason,
    Event,
    ExtensionReceived,
    Interaction,
    KeepaliveReceived,
    LeaseGranted,
    MetadataPushed,
    PayloadReceived,
    PeerFellSilent,
    RequestReceived,
    ResumeReceived,
    SendingStopped,
    SessionResumed,
    SessionSuspended,
    SetupAccepted,
    SetupReceived,
    StreamCancelled,
    StreamCompleted,
    StreamFailed,
)
from levada.transports.rsocket.extensions import Authentication
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

from .config import ClientConfig, ServerConfig
from .dialects import CoreFactory
from .encoding import Encoding
from .errors import ApplicationError, connection_lost, error_data
from .fire_and_forget import Fired
from .peers import ConnectedPeer
from .requests import Request, Responder
from .routing import Handler, Routes, make_responder
from .streams import BEGIN, EMPTY, SMALL, Answer, AwaitedResponse, Channel, InteractionActor, Items
from .tracing import TracedResponder

__all__ = ["RSocketDriver"]

logger = logging.getLogger("levada.actors.rsocket")

MAX_IDLE = 256  # idle actors that are kept, of each class: 0.1 MB
CHECKPOINT = 64  # fire-and-forget requests from one checkpoint to the next
JOINED = 4096  # bytes of the largest request that may wait for others
JOIN_WITHIN = 100e-6  # seconds between fire-and-forget requests; a flush costs 2 us plus 10 in the kernel, a joined request less than 1
CUT_AT_ONCE = 32_768  # bytes of fragments that a carrier gets when it has room: its queue then holds little more than its watermark
PUSHES, PUSHED = 64, 1 << 20  # METADATA_PUSHes that wait for the hook, and bytes of them; a single one may be larger


class Renew:
    """The last granted lease has run out."""

    __slots__ = ()


RENEW = Renew()
FIRE_AND_FORGET = Interaction.FIRE_AND_FORGET
# Requests may begin. A client that only fires stays early, since the server says nothing.
BEGINNING = (Phase.OPEN, Phase.EARLY)


class RSocketDriver(SingleDriver[ReactiveStreamsCore]):
    """One connection, or session, of either side. `ClientConnection` and `ServerConnection` provide the carriers."""

    config: ClientConfig | ServerConfig
    handler: Handler
    dialect: CoreFactory

    protocol: ClassVar = "rsocket"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.high_watermark = self.config.high_watermark
        self.encoding: Encoding
        self.handle = ConnectedPeer(self)
        """What programs get for this connection."""
        self.streams: dict[int, InteractionActor] = {}
        self.responder: Responder = make_responder(self.handler)
        self.tracing: Tracing | None = None
        """Of the system."""
        self.end: ConnectionEnded | None = None
        self.checks_requests = False
        """Whether each request goes to `check` first."""
        self.leases = False
        """Whether this side gives leases and has begun to."""
        self.answering = 0
        """Requests of streams whose handlers have not ended: after a CANCEL the stream is over, and its handler still cleans up."""
        self.requests_sent = self.requests_received = self.dropped = 0
        self.resumptions = 0
        """How often the session was resumed on another carrier."""
        self.fire_and_forget = 0
        """Requests of the peer that are queued or in their handlers."""
        self.fire_and_forget_bytes = 0
        """Bytes of data and metadata in them."""
        self.request_bytes = 0
        """Bytes of data and metadata in requests that their handlers hold; small requests do not count."""
        self.answer_bytes = 0
        """Bytes of answers that wait for room."""
        self.fired: deque[Request] = deque()
        """Fire-and-forget requests of the peer that have not begun."""
        self.firing = False
        """Whether an actor has been told to take them up but has not begun."""
        self.idle = Pool(self, MAX_IDLE)
        self._large_line = trio.Lock()
        self._cut = trio.lowlevel.ParkingLot()
        self._perf_counter = PLATFORM.get().perf_counter
        self._fired = 0.0
        self._pushes: deque[bytes] = deque()
        self._pushed = 0
        """Bytes in the waiting pushes."""
        self._pushing = False

    @property
    def dialect_name(self) -> str:
        """``rsocket`` or ``reactivesocket``."""
        return "rsocket" if self.dialect is RSocketCore else "reactivesocket"

    def figures(self) -> dict[str, object]:
        """Return the counts of streams and requests."""
        return {
            "open_streams": len(self.streams),
            "requests_sent": self.requests_sent,
            "requests_received": self.requests_received,
            "sessions_resumed": self.resumptions,
        }

    def flow(self, queued: int) -> FlowWindow:
        """Return what REQUEST_N lets pass on all streams together."""
        return FlowWindow(*self.core.credits(), queued, "payloads")

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of requests."""
        return (
            *super().metrics(),
            *request_samples(
                self.dialect_name,
                self.side,
                streams=len(self.streams),
                sent=self.requests_sent,
                received=self.requests_received,
            ),
            *rsocket_samples(self.side, resumed=self.resumptions, dropped=self.dropped),
        )

    @property
    def own_bytes(self) -> int:
        """Bytes of errors, grants, cancellations and the like, without payloads."""
        return self.core.own_bytes

    def flush_waiting(self) -> None:
        """Flush soon what a handler has made, since it is about to wait; mostly it has made nothing yet."""
        if self.core.has_output:
            self.flush_soon()

    def missing(self) -> int:
        """Return how many bytes are missing from a frame that has begun: before its end there is nothing to act on."""
        return self.core.missing

    def read_again(self) -> None:
        """Tell the core not to hold the time when this side did not read against the peer."""
        self.core.touch(trio.current_time())

    def _on_payload(self, event: PayloadReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.received(event.payload, event.complete)

    def _on_completed(self, event: StreamCompleted) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.completed()

    def _on_failed(self, event: StreamFailed) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.failed(event)

    def _on_cancelled(self, event: StreamCancelled) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.cancelled()

    def _on_credit(self, event: CreditGranted) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.credited()

    def _on_request(self, event: RequestReceived) -> None:
        self.requests_received += 1
        if event.kind is FIRE_AND_FORGET:
            size = self.fire_and_forget_bytes + event.payload.size
            if self.fire_and_forget and (
                self.fire_and_forget >= self.config.max_fire_and_forget or size > self.config.max_fire_and_forget_bytes
            ):
                self.dropped += 1
                return
            self.fired.append(
                Request(FIRE_AND_FORGET, event.stream_id, event.payload, self.handle, self.encoding, None)
            )
            self.unbegun += 1
            self.fire_and_forget += 1
            self.fire_and_forget_bytes = size
            if not self.firing:
                self.fire_on()
            return
        if self.answering >= self.config.core.max_streams:
            self._reject(event.stream_id, "too many handlers are running")
            return
        data, metadata = event.payload.data, event.payload.metadata
        size = len(data) if metadata is None else len(data) + len(metadata)
        if size > SMALL and not self.has_room(size):
            text = f"requests of {self.request_bytes} bytes are held, at most {self.config.max_request_bytes}"
            self._reject(event.stream_id, text)
            return
        try:
            answer = self.idle.take(Answer)
        except ActorStopped:  # the system is stopping
            self._reject(event.stream_id, "closing")
            return
        self.unbegun += 1
        if size > SMALL:
            answer.held = size
            self.request_bytes += size
        answer.take(event)

    def _reject(self, stream_id: int, text: str) -> None:
        if self.core.has_stream(stream_id):  # a CANCEL may have come with the request
            self.core.send_error(stream_id, ErrorCode.REJECTED, text.encode())

    def has_room(self, size: int) -> bool:
        """Whether handlers may hold this many more bytes; a request that is alone may have any size."""
        return not self.request_bytes or self.request_bytes + size <= self.config.max_request_bytes

    def unhold(self, size: int) -> None:
        """Record that handlers have released this many bytes."""
        self.request_bytes -= size

    def cut_on(self) -> None:
        """Hand over fragments that wait in the core as soon as the carrier has room."""
        if self.carrier is not None:
            self.await_room(self.carrier)

    def relieved(self) -> None:
        """Hand over more of the fragments; whatever is sent meanwhile waits for these at most (RS-70, RS-82)."""
        core = self.core
        if core.backlog:
            core.room = min(self.high_watermark, CUT_AT_ONCE) or 1
            if self.flush() and core.backlog:
                self.cut_on()
            if self.phase is not Phase.OPEN:
                self.retime()  # a drained connection ends with its last fragment
        if core.backlog <= self.high_watermark:
            self._cut.unpark_all()

    def must_wait(self, payload: Payload, stream_id: int = 0) -> bool:
        """Whether a payload waits until others are cut: a large one, or one behind them on its stream. Small ones of others overtake them."""
        backlog = self.core.backlog
        return backlog > self.high_watermark and (payload.size > SMALL or self.core.is_cut(stream_id))

    async def cut_enough(self) -> None:
        """Wait until little enough of other payloads waits to be cut, or the connection has ended."""
        async with self._large_line:  # first come, first served
            while self.core.backlog > self.high_watermark and self.end is None:
                await self._cut.park()

    async def let_out(self, answer: Payload) -> None:
        """Wait until there is room for an answer.

        Raises:
            ApplicationError: too many bytes of answers wait already.
        """
        if not (self.crowded or self.must_wait(answer)):
            return
        size, most = answer.size, self.config.max_answer_bytes
        if size <= SMALL:
            size = 0
        elif self.answer_bytes and self.answer_bytes + size > most:
            raise ApplicationError(
                f"the answer of {size} bytes was given up: {self.answer_bytes} bytes of answers wait until they are read, at most {most} "
                "(max_answer_bytes)"
            )
        self.answer_bytes += size
        try:
            await self.turn()
            if self.must_wait(answer):
                await self.cut_enough()
        finally:
            self.answer_bytes -= size

    def fire_on(self) -> bool:
        """Give the queued fire-and-forget requests to an actor; return false if no actor is available any more."""
        if self.fired and not self.firing:
            try:
                actor = self.idle.take(Fired)
            except ActorStopped:  # the connection is ending
                return False
            self.firing = True
            actor.ref.tell(BEGIN)
        return True

    def _on_metadata(self, event: MetadataPushed) -> None:
        hook = self.config.metadata_pushed
        if hook is None:
            return
        waiting = self._pushes
        waiting.append(event.metadata)
        self._pushed += len(event.metadata)
        while len(waiting) > 1 and (len(waiting) > PUSHES or self._pushed > PUSHED):
            self._pushed -= len(waiting.popleft())
        if not self._pushing:
            self._pushing = True
            self.start_soon(self._hand_on_pushes, hook)

    async def _hand_on_pushes(self, hook: Callable[[ConnectedPeer, bytes], Awaitable[None]]) -> None:
        while self._pushes:
            metadata = self._pushes.popleft()
            self._pushed -= len(metadata)
            try:
                await hook(self.handle, metadata)
            except Exception as error:  # noqa: BLE001 - the failure log has it
                self.log_failure(error, "%s: the hook for metadata failed", self.ref.path, event="hook_failed")
        self._pushing = False

    def text_for_peer(self, error: Exception) -> bytes:
        """Return what the peer hears of an exception of a handler."""
        text = self.system.failure_log.for_peer(error)
        return error_data(text_of(error) or type(error).__name__) if self.config.error_texts else text.encode()

    def has_lost(self, error: Exception) -> bool:
        """Return whether a handler failed because of others (`FailureLog`), and log it; otherwise the stream's actor is to fail too."""
        if not loss_of(error):
            return False
        self.log_failure(error, "%s: a handler has lost what it needs", self.who, event="handler_lost")
        return True

    def _on_draining(self, event: ConnectionDraining) -> None:
        self.leaving()
        self.retime()

    def _on_suspended(self, event: SessionSuspended) -> None:
        self.log(logging.INFO, "suspended", "without carrier: %s", event.text)
        self.suspended()
        carrier = self.detach()
        self.retime()
        if carrier is not None:
            carrier.abort()

    def _on_resumed(self, event: SessionResumed) -> None:
        self.resumptions += 1
        self.retime()
        self.log(logging.INFO, "resumed", "goes on, %d bytes again", event.bytes_resent)
        self.resumed()
        self.cut_on()
        if self.leases:
            self.first_lease()  # RS-103: the last carrier's lease no longer holds

    def _on_ended(self, event: ConnectionEnded) -> None:
        self.idle.limit = 0
        self._cut.unpark_all()
        self.ended(event, f"{event.reason.value}: {event.text}" if event.text else event.reason.value)

    def error(self) -> CarrierError:
        """Return the error for a request that the connection no longer takes."""
        end = self.end
        if end is not None and end.reason is not EndReason.CLOSED:
            return connection_lost(end.code, end.text or end.reason.value)
        return super().error()

    async def ready(self, payload: Payload) -> None:
        """Wait until a request may be sent; raises the errors of `check_open`."""
        if self.crowded:
            await self.room()
        if self.must_wait(payload):
            await self.cut_enough()
        self.check_open()

    @enable_ki_protection
    async def call(self, payload: Payload) -> Payload:
        """Send a request-response and wait for the answer.

        Cancellation:
            a CANCEL has been sent, or nothing was.
        """
        if self.filled or self.phase not in BEGINNING or self.core.backlog > self.high_watermark:
            await self.ready(payload)
        call = self.idle.take(AwaitedResponse)
        try:
            stream_id = self.core.send_request_response(payload, self._now())
        except BaseException:
            self.idle.put(call)
            raise
        call.stream_id = stream_id
        self.streams[stream_id] = call
        self.sent(payload, alone=len(self.streams) == 1)
        call.task = current_task()
        answer: Payload = await wait_task_rescheduled(call.abort)
        return answer

    async def fire(self, payload: Payload) -> None:
        """Send a fire-and-forget request."""
        if not self.requests_sent % CHECKPOINT:
            # Nothing else here waits, so a loop of these calls would starve all other tasks, the carrier included.
            self.flush()
            await trio.lowlevel.checkpoint()
            self._fired = self._perf_counter()  # the time of other tasks' turns is not a pause of this one
        if self.filled or self.phase not in BEGINNING or self.core.backlog > self.high_watermark:
            await self.ready(payload)
        self.core.send_fire_and_forget(payload, trio.current_time())
        now = self._perf_counter()
        self.sent(payload, alone=now - self._fired > JOIN_WITHIN)
        self._fired = now

    async def items(
        self,
        kind: Interaction,
        payload: Payload,
        window: int | None,
        item_type: Any,
        convert: Callable[[Payload], Any] | None,
    ) -> Receiver[Any]:
        """Open a request-stream, or a subscription."""
        window = self.config.credit(window)
        await self.ready(payload)
        core = self.core
        send = core.send_request_stream if kind is Interaction.REQUEST_STREAM else core.send_request_subscription
        items = self.idle.take(Items)
        try:
            stream_id = send(payload, window, trio.current_time())
        except BaseException:
            self.idle.put(items)
            raise
        receiver = items.begin(window, item_type, convert)
        items.occupy(stream_id)
        self.sent(payload, alone=len(self.streams) == 1)
        return receiver

    async def open_channel(
        self,
        payload: Payload,
        window: int | None,
        item_type: Any,
        convert: Callable[[Payload], Any] | None,
        encode: Callable[[Any], Payload],
    ) -> tuple[Sender[Any], Receiver[Any]]:
        """Open a request-channel."""
        window = self.config.credit(window)
        await self.ready(payload)
        both = self.idle.take(Channel)
        try:
            stream_id = self.core.send_request_channel(payload, window, trio.current_time())
        except BaseException:
            self.idle.put(both)
            raise
        receiver = both.begin(window, item_type, convert)
        both.occupy(stream_id)
        outbound = ChannelCore(item_type, self.config.window, f"stream {stream_id}")
        both.feed(outbound, encode)
        self.sent(payload, alone=len(self.streams) == 1)
        return Sender(outbound), receiver

    def sent(self, payload: Payload, *, alone: bool) -> None:
        """Count and flush a request: at once if it is large or alone, otherwise together with others sent at about the same time."""
        self.requests_sent += 1
        if self.core.backlog:
            self.cut_on()
        if alone or len(payload.data) > JOINED:
            self.flush()
        else:
            self.flush_soon()

    async def push(self, metadata: bytes) -> None:
        """Send a METADATA_PUSH."""
        await self.ready(EMPTY)
        self.core.send_metadata_push(metadata)
        self.flush()

    def first_lease(self) -> None:
        """Ask the policy for the first lease; the core has already given a constant one."""
        self.leases = True
        lease = self.config.lease
        if not isinstance(lease, LeaseGrant):
            self.grant()
        elif lease.ttl > 0:
            self.timers.once("lease", lease.ttl, RENEW)

    def grant(self) -> None:
        """Give the peer the policy's current lease, and the next one when it has run out."""
        lease = self.config.lease
        if lease is None or self.core.state is not ConnectionState.OPEN:
            return
        grant = lease if isinstance(lease, LeaseGrant) else lease(self.handle)
        self.core.send_lease(grant.ttl, grant.n, trio.current_time(), grant.metadata)
        self.flush()
        if grant.ttl > 0:
            self.timers.once("lease", grant.ttl, RENEW)

    @handles
    def on_renew(self, m: Renew) -> None:
        """Grant the next lease."""
        self.grant()

    def core_config(self) -> CoreConfig:
        """Make the core's settings: with a policy both sides need leases, and the policy gives the first one itself."""
        config, lease = self.config.core, self.config.lease
        if lease is None:
            return config
        return attrs.evolve(config, lease=lease if isinstance(lease, LeaseGrant) else LeaseGrant())

    def established(self, data_mime_type: str, metadata_mime_type: str) -> None:
        """Store the MIME types, and start the handler's actor if it has one."""
        self.core.room = 0  # fragments go when the carrier has room
        self.encoding = Encoding(data_mime_type, metadata_mime_type, self.config.codec)
        if isinstance(self.responder, Routes):
            self.spawn(self.responder.make, name="handler", supervise=restart())
        self.tracing = self.system.tracing
        if self.tracing is not None:
            self.responder = TracedResponder(self.responder, self.tracing)

    def release(self) -> None:
        """Release the children and the peer; they, and all unread payloads, would otherwise stay until the garbage collector runs."""
        self.idle.close()
        del self.handle

    async def check(self, request: Request, shown: Authentication) -> None:
        """Check the credentials that a request brings."""

    def _on_lease(self, event: LeaseGranted) -> None:
        """Hand over what the core has begun to send: large requests may have waited for the lease."""
        self.retime()
        if self.core.backlog:
            self.cut_on()

    def _on_unknown(self, event: Event) -> None:
        """Handle an event that the core has dealt with by itself: its deadline may have changed."""
        self.retime()

    events: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        ConnectionDraining: _on_draining,
        ConnectionEnded: _on_ended,
        CreditGranted: _on_credit,
        ExtensionReceived: _on_unknown,
        KeepaliveReceived: _on_unknown,
        LeaseGranted: _on_lease,
        MetadataPushed: _on_metadata,
        PayloadReceived: _on_payload,
        PeerFellSilent: _on_unknown,
        RequestReceived: _on_request,
        ResumeReceived: _on_unknown,
        SendingStopped: _on_cancelled,
        SessionResumed: _on_resumed,
        SessionSuspended: _on_suspended,
        SetupAccepted: _on_unknown,
        SetupReceived: _on_unknown,
        StreamCancelled: _on_cancelled,
        StreamCompleted: _on_completed,
        StreamFailed: _on_failed,
    }
