"""The connection actor: a core, the carrier under it, and the actors of its streams.

* What arrives is read by one task of the actor's own nursery, given to the core, and its events are applied at once to the actors of the
  streams, by direct calls. No code of the user runs in that task. It reads on without waiting for handlers; it waits only for actors
  that have not begun yet (so that a flood of requests does not pile up), and for the carrier if reflexes of the core fill it.
* What is to be sent goes to the carrier right away if it is one request, and once for a batch where many frames come of one turn.
* Time is the core's: a timer of the actor is set to `next_deadline`, and only ever set anew to be earlier.
* The end is the core's too: `ConnectionEnded` is its last event, each stream has had its own by then. Everything else follows.

The carrier may be another one later (a session that is resumed), so whoever waits for it finds out anew what is under the connection.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, ClassVar

import attrs
import trio
from trio.lowlevel import current_task, enable_ki_protection, wait_task_rescheduled

from levada.actors.resting import Resting
from levada.framework import Actor, Reason, Receiver, Sender, handles, restart
from levada.framework.embedding import ChannelCore
from levada.framework.errors import (
    ActorStopped,
    CarrierError,
    ConnectionClosed,
    ConnectionLost,
)
from levada.transports.carriers import CarrierInfo, CarrierStatistics
from levada.transports.rsocket import CoreConfig, ErrorCode, LeaseGrant, Payload
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
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

from .config import ClientConfig, ServerConfig
from .dialects import CoreFactory
from .encoding import Encoding
from .errors import connection_lost
from .fired import Fired
from .peers import ConnectedPeer
from .requests import Request
from .routing import Handler, Responder, Routes, make_responder
from .streams import BEGIN, Answer, Call, Channel, Items, Stream
from .wires import Wire

__all__ = ["Connection"]

logger = logging.getLogger("levada.actors.rsocket")

RESTING = 256  # actors without a stream that are kept, of each class: 0.1 MB
PIECE = 8192  # octets given to the core at a time; of small requests those are fewer than RESTING
UNSTARTED = 64  # actors that have a request and have not begun, above which the reader lets them begin first
BREATHS = 64  # fire-and-forget requests from one checkpoint to the next
JOINED = 4096  # octets of the largest request that may wait for others
JOIN_WITHIN = 100e-6  # seconds between fire-and-forget requests; a flush costs 2 us and 10 in the kernel, a joined one less than 1
REFLEX = 1 << 20  # octets above the high-water mark that the core's own answers may fill before the reader waits
SMALL = (
    4096  # octets of a request that are not counted: to count costs time, and 4,096 streams with so many hold 16 MiB
)
PUSHES, PUSHED = 64, 1 << 20  # METADATA_PUSHes that wait for the hook, and octets of them; one may be larger


class Flush:
    """To the connection: hand on what its streams have produced in this turn."""

    __slots__ = ()


class Due:
    """The core's deadline has passed."""

    __slots__ = ()


class Renew:
    """The lease that was granted last has run out."""

    __slots__ = ()


FLUSH, DUE, RENEW = Flush(), Due(), Renew()
FIRE_AND_FORGET = Interaction.FIRE_AND_FORGET


class Connection(Actor[Any]):
    """One connection, or session, of either side. `Client` and `Server` say where carriers come from."""

    config: ClientConfig | ServerConfig
    handler: Handler
    dialect: CoreFactory

    def __attrs_post_init__(self) -> None:
        self.core: ReactiveStreamsCore
        self.begun_core = False
        """Whether there is a core: a client has one once it is connected."""
        self.encoding: Encoding
        self.wire: Wire | None = None
        self._last_wire: Wire | None = None
        self.info: CarrierInfo | None = None
        self.peer = ConnectedPeer(self)
        self.streams: dict[int, Stream] = {}
        self.responder: Responder = make_responder(self.handler)
        self.end: ConnectionEnded | None = None
        self.over = trio.Event()
        self.unusable = trio.Event()
        """Set when there can be no more requests: at the end, or when the peer announces it."""
        self.checks_requests = False
        """Whether `check` is to be called for each request."""
        self.draining = False
        self.suspended = False
        """Whether the session is without a carrier, or has one that has not taken it on yet."""
        self.leases = False
        """Whether this side gives leases, and has begun to."""
        self.unstarted = 0
        self.requests_sent = self.requests_received = self.dropped = self.resumed = 0
        self.fire_and_forget = 0
        """Requests of the peer that are queued or in their handlers."""
        self.fire_and_forget_octets = 0
        """Of data and metadata in them."""
        self.request_octets = 0
        """Of data and metadata in requests that their handlers hold; those of small ones are not counted."""
        self.fired: deque[Request] = deque()
        """Fire-and-forget requests of the peer that have not begun."""
        self.firing = False
        """Whether an actor has been told to take them up, and has not begun to."""
        self.resting = Resting(self, RESTING)
        self._high_water = self.config.high_water
        self._flush_due = False
        self._fired = 0.0
        self._armed = math.inf
        self._reading = trio.CancelScope()
        self._now: Callable[[], float] = trio.current_time
        """The same by two calls fewer, once there is a wire: 0.3 us of each frame."""
        self._reader_waits: trio.Event | None = None
        self._room: trio.Event | None = None
        self.line = trio.Lock()
        """Those who produce more than a slice at a time, or than the carrier takes, go on one after the other."""
        self._wired = trio.Event()
        self._pushes: deque[bytes] = deque()
        self._pushed = 0
        """Octets in the pushes that wait."""
        self._pushing = False
        self.closing = False
        """Whether this side wants the end."""
        self.main_task = False
        self.gone = trio.Event()
        """Set when the main task has ended, and the carrier with it."""

    # ------------------------------------------------------------ carriers

    def attach(self, wire: Wire) -> None:
        """Use a carrier from now on."""
        self._now = trio.lowlevel.current_clock().current_time
        self.wire = self._last_wire = wire
        self._receive = self.core.receive_message if wire.framed else self.core.receive_data
        self.info = wire.info
        self._wired.set()

    async def read(self, wire: Wire) -> None:
        """Read from a carrier until it, or the connection that uses it, is over."""
        text = ""
        with trio.CancelScope() as scope:
            self._reading = scope
            try:
                while data := await wire.receive():
                    if type(data) is bytes and len(data) <= PIECE and self.wire is wire and self.end is None:
                        # As `_feed`, which costs 1 us; and a request-response pays for it at each end.
                        produced = self.feed(data)
                        if self.unstarted > UNSTARTED:
                            await self.all_begun()
                        if not produced:
                            continue
                    else:
                        for part in data if isinstance(data, list) else (data,):
                            await self._feed(wire, part)
                    if wire.unsent > self.config.high_water + REFLEX and (user := self.user(wire)) is not None:
                        await user.room()
                        user.core.touch(trio.current_time())
            except CarrierError as error:
                text = str(error)
        user = self.user(wire)
        if user is not None:
            user.unplugged(text)

    async def _feed(self, wire: Wire, data: bytes) -> None:
        """Give on what came, in pieces, so that actors are there again for the requests of the next piece."""
        at = 0
        while (user := self.user(wire)) is not None:
            # The rest of a frame that has begun is one piece, however large: there is nothing to act on before its end.
            step = len(data) if wire.framed else max(PIECE, user.core.missing)
            user.feed(data[at : at + step] if at or step < len(data) else data)
            if user.unstarted > UNSTARTED:
                await user.all_begun()
            at += step
            if at >= len(data):
                return

    def user(self, wire: Wire) -> Connection | None:
        """Find the connection that uses this carrier: this one, or the one whose session goes on here; ``None``: nobody any more."""
        return self if self.wire is wire and self.end is None else None

    def unplugged(self, text: str) -> None:
        """The carrier has ended by itself."""
        self.wire = None
        self._wired = trio.Event()
        self.apply(self.core.connection_lost(0, text, trio.current_time()))
        self.retime()

    def feed(self, data: bytes) -> bool:
        """Give the core what has come, and apply what it means; say whether anything may have been produced by that."""
        apply, now = self._apply, self._now()
        for event in self._receive(data, now):
            apply[type(event)](self, event)
        # Mostly there is nothing to send, so `flush` is not called to find that out.
        return self._flush_due or (bool(produced := self.core.data_to_send(now)) and self.flush(produced))

    def flush(self, data: list[bytes] | None = None) -> bool:
        """Hand what the core has to send to the carrier, or what was just taken from it; say whether there was anything."""
        wire = self.wire
        if wire is not None:
            if data is None:
                data = self.core.data_to_send(self._now())
            if data:
                try:
                    wire.send(data)
                    return True
                except CarrierError:
                    pass  # the reader finds out, and tells the core
        return False

    def unmatched(self) -> set[int]:
        """Return the ids of streams that only the core has, or only the actors; there are none whenever a task has waited.

        For tests: a stream that one side has forgotten and the other has not is a leak, and whoever uses it waits for ever.
        """
        return self.streams.keys() ^ self.core.stream_ids() if self.begun_core else set()

    def flush_soon(self) -> None:
        """Flush at the end of the batch of turns that is running, together with others."""
        if not self._flush_due and self.end is None:
            self._flush_due = True
            self._cell.tell(FLUSH)

    @handles
    def on_flush(self, m: Flush) -> None:
        """Flush."""
        self._flush_due = False
        self.flush()

    # ------------------------------------------------------------ time

    def retime(self) -> None:
        """Set the timer to the core's deadline, if that is earlier than what it is set to."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:
            self._armed = deadline
            self.timers.at("core", deadline, DUE)

    @handles
    def on_due(self, m: Due) -> None:
        """Let the core do what is due."""
        self._armed = math.inf
        self.apply(self.core.handle_timeout(trio.current_time()))
        self.flush()
        self.retime()

    # ------------------------------------------------------------ back-pressure

    @property
    def crowded(self) -> bool:
        """Whether whoever produces has to wait: the carrier has too much queued, or there is none for now."""
        wire = self.wire
        return wire.unsent > self._high_water if wire is not None else self.end is None

    async def room(self) -> None:
        """Wait until the carrier takes more; returns when the connection is over, too."""
        if self.wire is None:
            await self._wired.wait()
            return
        if self._room is None:
            self._room = trio.Event()
            self.start_soon(self._wait_for_room, self.wire, self._room)
        await self._room.wait()

    async def turn(self) -> None:
        """Wait until it is a producer's turn again, and there is room: one of the connection goes on in each pass of trio.

        So the reader and new handlers wait for one slice, not for one of each producer: of 667 streams the last began after 13 s of
        CPU time, and after 0.7 s with this.
        """
        async with self.line:  # a checkpoint
            self.flush()  # what the one before has produced since counts, too
            if self.crowded:
                await self.room()
            self.system.scheduler.begin_slice()

    async def _wait_for_room(self, wire: Wire, room: trio.Event) -> None:
        try:
            await wire.wait_for_room()
        except CarrierError:
            pass  # the reader finds out
        finally:
            self._room = None
            room.set()

    async def all_begun(self) -> None:
        """Wait until every request that came has been taken up."""
        self._reader_waits = trio.Event()
        await self._reader_waits.wait()

    def begun(self) -> None:
        """An actor has taken up its request."""
        self.unstarted -= 1
        if self._reader_waits is not None and not self.unstarted:
            self._reader_waits.set()
            self._reader_waits = None

    # ------------------------------------------------------------ what the core reports

    def apply(self, events: list[Event]) -> None:
        """Do what events mean."""
        for event in events:
            self._apply[type(event)](self, event)

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
            octets = self.fire_and_forget_octets + event.payload.size
            if self.fire_and_forget and (
                self.fire_and_forget >= self.config.max_fire_and_forget
                or octets > self.config.max_fire_and_forget_octets
            ):
                self.dropped += 1
                return
            self.fired.append(Request(FIRE_AND_FORGET, event.stream_id, event.payload, self.peer, self.encoding, None))
            self.unstarted += 1
            self.fire_and_forget += 1
            self.fire_and_forget_octets = octets
            if not self.firing:
                self.fire_on()
            return
        data, metadata = event.payload.data, event.payload.metadata
        octets = len(data) if metadata is None else len(data) + len(metadata)
        if octets > SMALL and self.request_octets and self.request_octets + octets > self.config.max_request_octets:
            text = f"requests of {self.request_octets} octets are held, at most {self.config.max_request_octets}"
            self._reject(event.stream_id, text)
            return
        try:
            answer = self.resting.take(Answer)
        except ActorStopped:  # the system is ending
            self._reject(event.stream_id, "closing")
            return
        self.unstarted += 1
        if octets > SMALL:
            answer.held = octets
            self.request_octets += octets
        answer.take(event)

    def _reject(self, stream_id: int, text: str) -> None:
        if self.core.has_stream(stream_id):  # a CANCEL may have come with the request
            self.core.send_error(stream_id, ErrorCode.REJECTED, text.encode())

    def fire_on(self) -> bool:
        """Have an actor take up the fire-and-forget requests that are queued; false if there is none to be had any more."""
        if self.fired and not self.firing:
            try:
                actor = self.resting.take(Fired)
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
                await hook(self.peer, metadata)
            except Exception:
                logger.exception("%s: the hook for metadata failed", self.ref.path, extra=self._extra("hook_failed"))
        self._pushing = False

    def _on_draining(self, event: ConnectionDraining) -> None:
        self.draining = True
        self.unusable.set()
        self.retime()

    def _on_suspended(self, event: SessionSuspended) -> None:
        logger.info("%s: without carrier: %s", self.ref.path, event.text, extra=self._extra("suspended"))
        wire, self.wire = self.wire, None
        self.suspended = True
        self._wired = trio.Event()
        self.retime()
        if wire is not None:
            wire.abort()

    def _on_resumed(self, event: SessionResumed) -> None:
        self.resumed += 1
        self.retime()
        logger.info("%s: goes on, %d octets again", self.ref.path, event.octets_resent, extra=self._extra("resumed"))
        self.suspended = False
        if self.leases:
            self.first_lease()  # RS-103: the one of the last carrier holds no more

    def _on_ended(self, event: ConnectionEnded) -> None:
        logger.info("%s ended: %s %s", self.ref.path, event.reason.value, event.text, extra=self._extra("ended"))
        self.end = event
        self.resting.most = 0
        self.flush()
        self.wire = None
        self.timers.cancel_all()
        self._wired.set()
        if self._reader_waits is not None:
            self._reader_waits.set()
        self._reading.cancel()
        self.unusable.set()
        self.over.set()

    # ------------------------------------------------------------ requests of this side

    def check_open(self) -> None:
        """Refuse a request that could not be sent.

        Raises:
            ConnectionClosed: this side has closed the connection, or is closing it.
            ConnectionLost: the peer, or the network, has.
        """
        if self.end is not None:
            raise self.error()
        if self.draining:
            if self.closing:
                raise ConnectionClosed("this side is closing the connection")
            raise ConnectionLost("the peer is closing the connection and takes no more requests")

    def error(self) -> ConnectionClosed | ConnectionLost:
        """Make the error that says how the connection ended."""
        assert self.end is not None
        if self.end.reason is EndReason.CLOSED:
            return ConnectionClosed(self.end.text or "this side closed the connection")
        return connection_lost(self.end.code, self.end.text or self.end.reason.value)

    async def ready(self) -> None:
        """Wait until a request may be sent; errors as `check_open`."""
        if self.crowded:
            await self.room()
        self.check_open()

    @enable_ki_protection
    async def call(self, payload: Payload) -> Payload:
        """Send a request-response and wait for the answer.

        Cancellation:
            a CANCEL has been sent, or nothing was.
        """
        wire = self.wire
        if wire is None or wire.unsent > self._high_water or self.draining:
            await self.ready()
        call = self.resting.take(Call)
        try:
            stream_id = self.core.send_request_response(payload, self._now())
        except BaseException:
            self.resting.put(call)
            raise
        call.stream_id = stream_id
        self.streams[stream_id] = call
        self.sent(payload, alone=len(self.streams) == 1)
        call.task = current_task()
        answer: Payload = await wait_task_rescheduled(call.abort)
        return answer

    async def fire(self, payload: Payload) -> None:
        """Send a fire-and-forget request."""
        if not self.requests_sent % BREATHS:
            # Nothing else here waits, so a loop of these would let nobody else run, the carrier included.
            self.flush()
            await trio.lowlevel.checkpoint()
            self._fired = perf_counter()  # the others' turns are no pause of this one's
        wire = self.wire
        if wire is None or wire.unsent > self._high_water or self.draining:
            await self.ready()
        self.core.send_fire_and_forget(payload, trio.current_time())
        now = perf_counter()
        self.sent(payload, alone=now - self._fired > JOIN_WITHIN)
        self._fired = now

    async def items(
        self,
        kind: Interaction,
        payload: Payload,
        window: int,
        item_type: Any,
        convert: Callable[[Payload], Any] | None,
    ) -> Receiver[Any]:
        """Open a request-stream, or a subscription."""
        await self.ready()
        core = self.core
        send = core.send_request_stream if kind is Interaction.REQUEST_STREAM else core.send_request_subscription
        items = self.resting.take(Items)
        try:
            stream_id = send(payload, window, trio.current_time())
        except BaseException:
            self.resting.put(items)
            raise
        receiver = items.begin(window, item_type, convert)
        items.occupy(stream_id)
        self.sent(payload, alone=len(self.streams) == 1)
        return receiver

    async def open_channel(
        self,
        payload: Payload,
        window: int,
        item_type: Any,
        convert: Callable[[Payload], Any] | None,
        encode: Callable[[Any], Payload],
    ) -> tuple[Sender[Any], Receiver[Any]]:
        """Open a request-channel."""
        await self.ready()
        both = self.resting.take(Channel)
        try:
            stream_id = self.core.send_request_channel(payload, window, trio.current_time())
        except BaseException:
            self.resting.put(both)
            raise
        receiver = both.begin(window, item_type, convert)
        both.occupy(stream_id)
        outbound = ChannelCore(item_type, self.config.window, f"stream {stream_id}")
        both.feed(outbound, encode)
        self.sent(payload, alone=len(self.streams) == 1)
        return Sender(outbound), receiver

    def sent(self, payload: Payload, *, alone: bool) -> None:
        """Count a request, and flush it: at once if it is large or comes alone, else together with others of this moment."""
        self.requests_sent += 1
        if alone or len(payload.data) > JOINED:
            self.flush()
        else:
            self.flush_soon()

    async def push(self, metadata: bytes) -> None:
        """Send a METADATA_PUSH."""
        await self.ready()
        self.core.send_metadata_push(metadata)
        self.flush()

    def carrier_statistics(self) -> CarrierStatistics | None:
        """Counters of the carrier now in use."""
        return self.wire.statistics() if self.wire is not None else None

    # ------------------------------------------------------------ leases

    def first_lease(self) -> None:
        """Let the policy give a lease; one that is always the same the core has given already."""
        self.leases = True
        lease = self.config.lease
        if not isinstance(lease, LeaseGrant):
            self.grant()
        elif lease.ttl > 0:
            self.timers.once("lease", lease.ttl, RENEW)

    def grant(self) -> None:
        """Give the peer what the policy says now, and again when that has run out."""
        lease = self.config.lease
        if lease is None or self.suspended or self.end is not None:
            return
        grant = lease if isinstance(lease, LeaseGrant) else lease(self.peer)
        self.core.send_lease(grant.ttl, grant.n, trio.current_time(), grant.metadata)
        self.flush()
        if grant.ttl > 0:
            self.timers.once("lease", grant.ttl, RENEW)

    @handles
    def on_renew(self, m: Renew) -> None:
        """Grant the next lease."""
        self.grant()

    def core_config(self) -> CoreConfig:
        """Make the core's settings: with a policy both sides need leases, the first of which the policy gives itself."""
        config, lease = self.config.core, self.config.lease
        if lease is None:
            return config
        return attrs.evolve(config, lease=lease if isinstance(lease, LeaseGrant) else LeaseGrant())

    # ------------------------------------------------------------ beginning and end

    def established(self, data_mime_type: str, metadata_mime_type: str) -> None:
        """Know the MIME types, start the handler's actor if it has one, and grant the first lease."""
        self.encoding = Encoding(data_mime_type, metadata_mime_type, self.config.codec)
        if isinstance(self.responder, Routes):
            self.spawn(self.responder.make, name="handler", supervise=restart())

    async def aclose(self) -> None:
        """Take no new requests, let open streams end within the time for it, then close.

        Cancellation:
            closed at once.
        """
        self.closing = True
        try:
            if self.end is None and self.begun_core:
                self.draining = True
                self.apply(self.core.drain(trio.current_time()))
                self.flush()
                self.retime()
                with trio.move_on_after(self.config.drain):
                    await self.over.wait()
        finally:
            self.shut("closed")
        await self.ref.terminated()

    def shut(self, text: str) -> None:
        """Close at once: streams end, the carrier is closed after what is queued, the actor ends."""
        self.closing = True
        if not self.begun_core:
            self.ref.stop(now=True)
        elif self.end is None:
            self.apply(self.core.close(0, text, trio.current_time()))

    def hang_up(self) -> None:
        """Close at once, whatever is still queued."""
        if self._last_wire is not None:
            self._last_wire.abort()
        self.ref.kill()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: a flush or a timer that nobody needs any more."""

    async def stopping(self, reason: Reason) -> None:
        """Close the connection, if the actor is ended by somebody else, and wait for the carrier."""
        self.shut(f"its actor ended: {type(reason).__name__.lower()}")
        if self.main_task:
            await self.gone.wait()
        # Whatever refers back to this object would keep it, and all that was never read, until the collector comes.
        self.resting.close()
        del self.peer

    async def main(self) -> None:
        """Run the carriers, as the task of this actor; then end it."""
        self.main_task = True
        try:
            await self.carry()
        finally:
            self.gone.set()
            self.unusable.set()
        if self.unstarted:
            await self.all_begun()  # once this actor is ending, nobody could take up what came before the end
        self.stop()

    async def check(self, request: Request) -> None:
        """Look at the credentials of a request of its own."""

    async def carry(self) -> None:
        """Get carriers and read from them until the connection is over."""
        raise NotImplementedError

    def _extra(self, event: str) -> dict[str, object]:
        return {"protocol": "rsocket", "actor": self.ref.path, "event": event}

    def _on_unknown(self, event: Event) -> None:
        """Leave what the core has dealt with by itself; its deadline may be another now."""
        self.retime()

    _apply: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ConnectionDraining: _on_draining,
        ConnectionEnded: _on_ended,
        CreditGranted: _on_credit,
        ExtensionReceived: _on_unknown,
        KeepaliveReceived: _on_unknown,
        LeaseGranted: _on_unknown,
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
