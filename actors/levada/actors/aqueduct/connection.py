"""The connection actor: a core, the carrier under it, and the streams of the carrier.

* The halves of channels and the streams are actors, its children (`levada.actors.aqueduct.links`, `levada.actors.aqueduct.streams`), driven
  by direct calls. What the core says of them it tells them, and why they end. When it ends itself they do so first, and leave it the word.
* One task gives the core what comes on all streams. No code of the user runs in it.
* What the core has to say and to send is taken once for a batch of turns, however many channels were used in it: `turn` asks for that.
* Time is the core's: a timer of the actor is set to `next_deadline`, and only ever set anew to be earlier.
* The end is the core's too, in order or not: `ConnectionEnded` is its last event, each channel has had its own by then. When the carrier
  ends, all that had arrived is given to the core first.
* Octets queued on the carrier are bounded by the windows of the channels; a stream that the peer has stopped is noticed at the next write.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar

import attrs
import trio

from levada.actors.multiplexed import Multiplexed
from levada.actors.pool import Pool
from levada.framework import Actor, Lost, Reason, handles
from levada.framework.channel import WINDOW, Receiver, Sender, channel
from levada.framework.embedding import ActorPhase, ChannelCore, Outcome, TerminalState, local_ref
from levada.framework.errors import (
    CarrierError,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    DatagramTooLarge,
    LevadaError,
)
from levada.transports import carriers
from levada.transports.aqueduct import (
    AqueductCore,
    CloseCode,
    CloseConnection,
    ConnectionEnded,
    ConnectionState,
    DatagramData,
    Ended,
    Event,
    HeadersReceived,
    OpenStream,
    Reached,
    Readable,
    ReceiverHalf,
    ResetCode,
    ResetStream,
    SenderHalf,
    Settled,
    StopStream,
    StreamData,
    StreamDone,
    StreamUnblocked,
    Writable,
)
from levada.transports.carriers import CarrierInfo
from levada.transports.text import printable

from .config import PeerConfig
from .halves import CODEC, Halves
from .lookup import EntryInbound, EntryOutbound, Expose, Lookup, Lookups, Names
from .raw import RawMessage
from .refs import Refs
from .schema import SCHEMA, compare_schema, schema_header
from .streams import AT_ONCE, StreamActors

__all__ = ["Carrier", "Connection"]

logger = logging.getLogger("levada.actors.aqueduct")

Carrier = Callable[[], AbstractAsyncContextManager[carriers.Connection]]
"""Connects, or accepts; leaving the context closes."""

MAX_IDLE = 256  # actors without a stream that are kept: 0.1 MB


_OUTCOMES = {True: Outcome.PROCESSED, False: Outcome.NOT_PROCESSED, None: Outcome.UNKNOWN}


class Due:
    """The core's deadline has passed."""

    __slots__ = ()


DUE = Due()


class Connection(Actor[Any]):
    """One connection of either side."""

    config: PeerConfig
    carrier: Carrier
    item_type: Any
    """Of the entrypoint's messages."""
    client: bool = attrs.field(kw_only=True)
    expose: Expose = attrs.field(default=(), kw_only=True)
    """What the peer may look up."""

    def __attrs_post_init__(self) -> None:
        limit = self.config.core.max_message
        codec = self.config.codec
        self.early = self.client and self.config.early
        """Whether it sends before the handshake is complete."""
        settings = attrs.evolve(self.config.core, drain=self.config.drain)
        self.core = AqueductCore(client=self.client, headers=self._headers(), config=settings, early=self.early)
        self.halves = Halves(self, attrs.evolve(codec, max_bytes=min(codec.max_bytes, limit)))
        self.entry = ChannelCore(self.item_type, WINDOW, "entrypoint")
        """The client's sends, the server's receives."""
        self.entry.receiver.away = int(self.client)
        self.entrance: Sender[Any] | None = Sender(self.entry) if self.client else None
        self.lookups: Sender[Any] | None = self.entrance
        """Where actors of the peer are looked up, if they may be."""
        self._questions: Receiver[Lookup] | None = None
        """Where the server looks up, if it may."""
        self.info: CarrierInfo | None = None
        self.end: ConnectionEnded | None = None
        self._carried = trio.Event()
        """Set when there is a carrier, or never will be."""
        self.opened = trio.Event()
        """Set when both sides have greeted, or never will."""
        self.refusal: LevadaError | OSError | None = None
        """Why there was no carrier."""
        self.greeted = self.closing = False
        self.handlers: trio.Nursery
        self.tasks: trio.Nursery
        """Where the connection's own tasks run, while it has a carrier."""
        self.turns = self.datagrams_dropped = 0
        self._carrier: carriers.Connection | None = None
        self._carrier_over = False
        self.idle = Pool(self, MAX_IDLE)
        self.actors = StreamActors(self)
        self.streams = Multiplexed(
            self.core,
            self._apply_all,
            self.turn,
            watch_all=True,
            at_once=AT_ONCE,
            stopped_code=ResetCode.LOST,
            begun=self.actors.begin,
            ended=self.actors.end,
        )
        self.streams.outputs |= {
            CloseConnection: self._do_close,
            DatagramData: self._do_datagram,
            OpenStream: self.streams.open,
            ResetStream: self.streams.reset,
            StopStream: self.streams.stop,
            StreamData: self.streams.send,
            StreamDone: self.streams.done,
        }
        self._news = trio.Event()
        """Set when there is something to be read or to be flushed."""
        self._flush_due = False
        self._armed = math.inf
        self._runs = self._begun = False
        self._gone = trio.Event()

    def _headers(self) -> tuple[tuple[str, bytes], ...]:
        if self.item_type is RawMessage:
            return self.config.headers
        schema = () if self.config.schema == "off" else schema_header(self.item_type)
        return (CODEC, *schema, *self.config.headers)

    @property
    def ending(self) -> bool:
        """Whether its children are being ended, so that there may be no more of them."""
        return local_ref(self).phase is not ActorPhase.RUNNING

    # ------------------------------------------------------------ turns

    def turn(self) -> None:
        """Take what the core has to say and to send at the end of the batch of turns that is running."""
        if not self._flush_due and self.end is None:
            self._flush_due = True
            self._news.set()

    async def _drive(self) -> None:
        """Give the core what has come, let those run whom that has woken, then end the turn: one flush for all of it."""
        streams = self.streams
        while not self._carrier_over:
            if not (streams.ready or streams.stops or self._flush_due):
                self._news = trio.Event()
                await self._news.wait()
            if streams.ready or streams.stops:
                streams.read()
                self._flush_due = True
            await trio.lowlevel.checkpoint()
            if self._flush_due:
                self._flush_due = False
                if self._flush(AT_ONCE):
                    self._flush_due = True
                    await trio.lowlevel.checkpoint()

    @handles
    def on_due(self, m: Due) -> None:
        """Let the core do what is due."""
        self._armed = math.inf
        carrier = self._carrier
        if carrier is not None and not self._carrier_over:
            self.core.datagram_limit = carrier.max_datagram_size()  # the path may have changed
            self.core.round_trip = carrier.round_trip()
        self.feed(self.core.handle_timeout(trio.current_time()))

    def _flush(self, most: int = sys.maxsize) -> bool:
        """Take what the core has to say, and about so much of what it has to send; whether there may be more."""
        core = self.core
        self.turns += 1
        while events := core.take_events():
            self._apply_all(events)
        outputs = core.data_to_send(trio.current_time(), most)
        self.streams.write(outputs)
        if self.end is None and core.state is ConnectionState.CLOSED:
            self._apply_all(core.take_events())  # it has drained
        deadline = core.next_deadline()
        if deadline is not None and deadline < self._armed:
            self._armed = deadline
            self.timers.at("core", deadline, DUE)
        return len(outputs) >= most

    def feed(self, events: list[Event]) -> None:
        """Apply what the core says about something that came."""
        self._apply_all(events)
        self.turn()

    # ------------------------------------------------------------ what the core says

    def _apply_all(self, events: list[Event]) -> None:
        if events and isinstance(events[-1], ConnectionEnded):
            self._explain(events[-1])
        for event in events:
            self._events[type(event)](self, event)

    def _explain(self, event: ConnectionEnded) -> None:
        """Say how the connection ended to all that end with it."""
        halves = self.halves
        if event.closed_here and event.code == CloseCode.ORDERLY:
            self.closing = True
        if self.closing:
            halves.detail = "this side closed the connection"
        elif event.error is not None:
            halves.detail = f"the peer broke the protocol: {event.reason}"
        else:
            halves.detail = f"the connection was lost: {event.reason or f'closed with code {event.code}'}"
        halves.cause = event.error
        if not self.closing:
            halves.reason = Lost(halves.peer)

    def _on_settled(self, event: Settled) -> None:
        record = self.halves.outbound.get(event.half)
        if record is not None:
            record.settled(event.tokens, _OUTCOMES[event.delivered])

    def _on_readable(self, event: Readable) -> None:
        record = self.halves.inbound.get(event.half)
        if record is not None:
            record.pump()

    def _on_writable(self, event: Writable) -> None:
        record = self.halves.outbound.get(event.half)
        if record is not None:
            record.pump()

    def _on_half_ended(self, event: Ended) -> None:
        half, halves = event.half, self.halves
        record = halves.outbound.get(half) if isinstance(half, SenderHalf) else halves.inbound.get(half)
        if record is not None:
            record.ended()
        halves.links.pop(half, None)

    def _on_reached(self, event: Reached) -> None:
        self.halves.links.pop(event.half, None)

    def _on_unblocked(self, event: StreamUnblocked) -> None:
        self.streams.resume(event.stream_id)

    def _on_headers(self, event: HeadersReceived) -> None:
        reason = "" if self.item_type is RawMessage else self._compare(dict(event.headers))
        if reason:
            self._apply_all(self.core.close(CloseCode.SERIALISATION, reason, trio.current_time()))
            return
        if not self.client:
            self.core.accept(self._headers())
            entrance = self.core.entrypoint
            if isinstance(entrance, ReceiverHalf):
                self.entry.sender.away = 1
                if self.item_type is RawMessage:
                    self.halves.bind(self.entry, entrance)
                else:
                    self.halves.start(EntryInbound(self.halves, self.entry, self.names(), half=entrance))
                self.serve()
        self.greeted = True
        self.opened.set()

    def names(self) -> Names:
        """Return what the peer may look up."""
        return Names(self.system, self.expose)

    def look_up_at(self, there: Sender[Lookup]) -> None:
        """Learn where actors of the client are looked up."""
        if self.lookups is not None:
            self.lookups.finish_nowait()
        self.lookups = there

    def _compare(self, headers: dict[str, bytes]) -> str:
        """Say what of the peer's messages could not be understood, if anything."""
        theirs = headers.get(CODEC[0], CODEC[1])
        if theirs != CODEC[1]:
            return f"{CODEC[0]} is {theirs[:16]!r} there and {CODEC[1]!r} here"
        if SCHEMA not in headers or self.config.schema == "off":
            return ""
        errors, remarks = compare_schema(headers[SCHEMA])
        refused = errors if self.config.schema == "refuse" else []
        for text in remarks if refused else errors + remarks:
            logger.warning(
                "%s: message classes differ: %s", self.ref.path, printable(text), extra=self._extra("schema")
            )
        return f"message classes differ: {'; '.join(refused)}"[:400] if refused else ""

    def serve(self) -> None:
        """Begin to take messages of the entrypoint; a server's connection does."""

    def _on_ended(self, event: ConnectionEnded) -> None:
        logger.info("%s ended: %s %s", self.ref.path, event.code, event.reason, extra=self._extra("ended"))
        self.end = event
        self.timers.cancel_all()
        # No turn follows: what is left is to close the carrier.
        self.streams.write(self.core.data_to_send(trio.current_time()))
        self.opened.set()

    _events: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ConnectionEnded: _on_ended,
        Ended: _on_half_ended,
        HeadersReceived: _on_headers,
        Reached: _on_reached,
        Readable: _on_readable,
        Settled: _on_settled,
        StreamUnblocked: _on_unblocked,
        Writable: _on_writable,
    }

    # ------------------------------------------------------------ what the core wants done

    def _do_datagram(self, output: DatagramData) -> None:
        try:
            if not self._use().send_datagram_nowait(output.data):
                self.datagrams_dropped += 1
        except DatagramTooLarge as error:
            self.datagrams_dropped += 1
            self.core.datagram_limit = error.limit
        except CarrierError:
            pass

    def _do_close(self, output: CloseConnection) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        if output.drain:
            # What ended the channels is still on its way to the peer.
            self.tasks.start_soon(partial(carrier.aclose, output.code, output.reason, drain=output.drain))
        else:
            carrier.close(output.code, output.reason)

    def _use(self) -> carriers.Connection:
        assert self._carrier is not None
        return self._carrier

    # ------------------------------------------------------------ what comes

    async def _receive_datagrams(self, carrier: carriers.Connection) -> None:
        try:
            while True:
                data = (await carrier.receive_datagram()).data
                self.feed(self.core.receive_datagram(data, trio.current_time()))
        except CarrierError:
            pass

    # ------------------------------------------------------------ beginning and end

    def started(self) -> None:
        """See `Actor.started`."""
        self._runs = True
        self.halves.refs = Refs(self.halves, self.system)
        if self.entrance is not None and self.expose:
            there, self._questions = channel(Lookup, name="lookups")
            self.entrance.send_nowait(Lookups(there))
            self.start_soon(self.names().serve, self._questions)
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
        self._met(carrier.info)
        async with trio.open_nursery() as self.tasks:
            self._carrier = carrier
            self._carried.set()
            self.streams.start(carrier, self.tasks)
            self.tasks.start_soon(self._drive)
            if isinstance(self.core.entrypoint, SenderHalf):
                self.halves.start(EntryOutbound(self.halves, self.entry, half=self.core.entrypoint))
            self.tasks.start_soon(self._receive_datagrams, carrier)
            self.turn()
            try:
                self._met(await carrier.handshake())  # complete already, but for an early client
                # Refused streams are sent again by the carrier, under the same numbers: nothing for the core to do.
                self.feed(self.core.handshake_completed(carrier.max_datagram_size()))
            except CarrierError:
                pass  # it has ended
            reason = await carrier.closed()
            self._carrier_over = True
            self._news.set()
        self.streams.finish(blocked=True)
        self._lose(str(reason), reason.code)

    def _met(self, info: CarrierInfo) -> None:
        self.info = info
        self.halves.peer = info.peer

    def _lose(self, text: str, code: int = 0) -> None:
        """The carrier is gone."""
        self._carrier_over = True
        self._apply_all(self.core.connection_lost(code, text, trio.current_time()))
        self.streams.clear()
        if self.client:
            self.halves.end(self.entry, TerminalState.CONNECTION_LOST)  # in case that it never began
        self._carried.set()
        self.opened.set()

    async def ready(self, *, early: bool = False) -> None:
        """Wait until the peer has greeted, or only until it has been called.

        Raises:
            ConnectionLost: nobody answers, or not in this protocol.
            ConnectionClosed: the actor was ended meanwhile.
            ConfigurationError: a URL or settings that cannot work.
        """
        await (self._carried if early else self.opened).wait()
        if self.greeted or (early and self._begun and self.end is None):
            return
        if self.refusal is not None:
            raise self.refusal
        if self.end is None or self.closing:
            raise ConnectionClosed("the connection was given up before it was there")
        raise ConnectionLost(self.halves.detail, code=self.end.code) from self.halves.cause

    async def aclose(self) -> None:
        """Finish the entrypoint, let open channels end within the time for it, then close.

        Cancellation:
            closed at once.
        """
        self.close_entry()
        try:
            if self._carrier is not None and not self._carrier_over:
                self.feed(self.core.drain(trio.current_time()))
                await self.ref.terminated()
        finally:
            self.shut()
        await self.ref.terminated()

    def close_entry(self) -> None:
        """Send nothing more to the handler, or let it take nothing more."""
        if self.lookups is not None:  # a client's is its entrance
            self.lookups.finish_nowait()
        if self._questions is not None:
            self._questions.close()
        if not self.client:
            self.entry.end(TerminalState.RECEIVER_CLOSED)

    def shut(self) -> None:
        """Close at once: channels end, the actor ends."""
        self.closing = True
        if self._begun:
            self._apply_all(self.core.close(CloseCode.ORDERLY, "", trio.current_time()))
            self._flush()
            if self._carrier is not None:
                self._carrier.close(CloseCode.ORDERLY)  # it may be closing in order
        elif self._runs:
            self.ref.stop(now=True)
        elif self.client:
            # Its actor never was: nobody else will end what was to be sent on.
            self.halves.detail = "this side closed the connection"
            self.halves.end(self.entry, TerminalState.CONNECTION_LOST)

    async def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`: somebody else ends the actor, or it has ended itself."""
        self.shut()
        if self._begun:
            self.handlers.cancel_scope.cancel()
            await self._gone.wait()
        # What a `Peer` may still be asked stays, and nothing waits for the collector.
        self.core.entrypoint = None
        self.halves.release()
        self.streams.clear()
        self.actors.release()
        self.idle.close()

    def carrier_statistics(self) -> carriers.CarrierStatistics | None:
        """Return the counters of the carrier."""
        return None if self._carrier is None else self._carrier.statistics()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: a flush that nobody needs any more."""

    def _extra(self, event: str) -> dict[str, object]:
        return {"protocol": "aqueduct", "actor": self.ref.path, "event": event}
