"""The connection actor: a core, the carrier under it, and the streams of the carrier.

* The halves of channels and the streams are child actors (`levada.actors.aqueduct.links`, `levada.actors.aqueduct.streams`), driven by
  direct calls. The connection passes the core's events to them, and the reason when they end. When the connection ends, they end first.
* The windows of the channels bound the bytes queued on the carrier.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import attrs
import trio

from levada.actors.driver import Phase
from levada.actors.metrics.protocols import aqueduct_samples
from levada.framework import ActorSystem, Lost, Sample
from levada.framework.channel import WINDOW, Receiver, Sender, channel
from levada.framework.embedding import ChannelCore, Outcome, TerminalState
from levada.framework.errors import CarrierError, DatagramTooLarge
from levada.framework.text import printable
from levada.transports import carriers
from levada.transports.aqueduct import (
    AqueductCore,
    CloseCode,
    CloseConnection,
    ConnectionEnded,
    DatagramData,
    Ended,
    Headers,
    HeadersReceived,
    Reached,
    Readable,
    SenderHalf,
    Settled,
    StreamUnblocked,
    Writable,
)
from levada.transports.carriers import CarrierInfo

from .config import PeerConfig
from .envelopes import ANSWERS_GREETING, TRACE_GREETING, WORK_GREETING
from .fleet import FleetRefs
from .halves import CODEC, REASONS, Arrival, Halves
from .name_lookup import EntryOutbound, Expose, Lookup, Lookups, Names
from .raw import RawMessage
from .ref_tables import Refs
from .schema import SCHEMA, compare_schema, schema_header
from .streams import AT_ONCE, AqueductStreams

__all__ = ["AqueductDriver"]

logger = logging.getLogger("levada.actors.aqueduct")

_OUTCOMES = {True: Outcome.PROCESSED, False: Outcome.NOT_PROCESSED, None: Outcome.UNKNOWN}


class AqueductDriver(AqueductStreams):
    """One connection of either side."""

    config: PeerConfig
    item_type: Any
    """The type of the entrypoint's messages."""
    client: bool = attrs.field(kw_only=True)
    expose: Expose = attrs.field(default=(), kw_only=True)
    """What the peer may look up."""
    home: ActorSystem = attrs.field(kw_only=True)
    """This side's system: `system`, which an actor has only when it is spawned."""

    protocol: ClassVar = "aqueduct"
    last: ClassVar = ConnectionEnded
    rounds: ClassVar = 1

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        limit = self.config.core.max_message
        codec = self.config.codec
        self.early = self.client and self.config.early
        self.core = AqueductCore(
            client=self.client, headers=self.headers(), config=self.config.core, early=self.early, delivery=Arrival
        )
        codec = attrs.evolve(codec, max_bytes=min(codec.max_bytes, limit))
        self.halves = Halves(self, codec, self.config.max_answer_bytes)
        self.entry = ChannelCore(self.item_type, WINDOW, "entrypoint")
        """The client's sends, the server's receives."""
        self.entry.receiver.away = int(self.client)
        self.entrance: Sender[Any] | None = Sender(self.entry) if self.client else None
        self.lookups = self.entrance
        self._questions: Receiver[Lookup] | None = None
        """Receives the server's lookups, if this client exposes actors."""
        self.end: ConnectionEnded | None = None
        self.welcome = trio.Event()
        """Set when the peer has greeted, or when the connection has ended before that."""
        self.unwelcome: CarrierError | None = None
        """The error of a connection that ended before the peer greeted."""
        self.datagrams_dropped = 0
        self.halves.refs = self.refs = Refs(self.halves, self.home)
        self.halves.unattached = self.refs.unattached

    def headers(self) -> Headers:
        """Return the headers that this side sends."""
        if self.item_type is RawMessage:
            return self.config.headers
        schema = () if self.config.schema == "off" else schema_header(self.item_type)
        fleet = self.config.fleet
        node = () if fleet is None else (fleet.header,)
        trace = () if self.home.tracing is None else (TRACE_GREETING,)
        return (CODEC, REASONS, WORK_GREETING, ANSWERS_GREETING, *trace, *schema, *node, *self.config.headers)

    def figures(self) -> dict[str, object]:
        """Return the counts of channels and messages."""
        return {
            "channels": len(self.core.halves),
            "streams": self.stream_count,
            "messages_sent": self.halves.sent,
            "messages_received": self.halves.received,
            "bytes_held": self.core.held,
        }

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of channels and messages."""
        return (
            *super().metrics(),
            *aqueduct_samples(
                self.side,
                channels=len(self.core.halves),
                streams=self.stream_count,
                sent=self.halves.sent,
                received=self.halves.received,
                held=self.core.held,
            ),
        )

    def time_out(self, now: float) -> list[Any]:
        """Give the core the current datagram limit and round trip, and handle its timeouts."""
        carrier = self.live
        if carrier is not None:
            self.core.datagram_limit = carrier.max_datagram_size()
            self.core.round_trip = carrier.round_trip()
        return super().time_out(now)

    def outputs(self) -> list[Any]:
        """Take the outputs of the core; let records go on that have left some of what has arrived."""
        outputs: list[Any] = self.core.data_to_send(trio.current_time(), AT_ONCE)
        if self.halves.going_on:
            self.halves.go_on()
        return outputs

    def ends(self, event: ConnectionEnded) -> None:
        """Record how the connection ended, for the halves that end with it."""
        halves = self.halves
        if self.phase is Phase.CLOSED or (event.closed_here and event.code == CloseCode.ORDERLY):
            halves.detail = "this side closed the connection"
        else:
            halves.reason = Lost(halves.peer)
            if event.error is not None:
                halves.detail = f"the peer broke the protocol: {event.reason}"
            else:
                halves.detail = f"the connection was lost: {event.reason or f'closed with code {event.code}'}"
        halves.cause = event.error

    def _on_settled(self, event: Settled) -> None:
        record = self.halves.records.get(event.half)
        if record is not None:
            record.settled(event.tokens, _OUTCOMES[event.delivered])

    def _on_movable(self, event: Readable | Writable) -> None:
        record = self.halves.records.get(event.half)
        if record is not None:
            record.pump()

    def _on_half_ended(self, event: Ended) -> None:
        record = self.halves.records.get(event.half)
        if record is not None:
            record.ended()
        self.halves.links.pop(event.half, None)

    def _on_reached(self, event: Reached) -> None:
        self.halves.links.pop(event.half, None)

    def _on_unblocked(self, event: StreamUnblocked) -> None:
        self.resume(event.stream_id)

    def _on_headers(self, event: HeadersReceived) -> None:
        if self.differs(event.headers):
            return
        self.greeted()
        self.welcome.set()

    def differs(self, headers: Headers) -> bool:
        """Whether the peer does not fit, so that the connection was closed: by its message classes, or by its node id."""
        if self.item_type is RawMessage:
            return False
        known = dict(headers)
        reason, code = self._compare(known), CloseCode.SERIALISATION
        if not reason and self.config.fleet is not None:
            try:
                self._join(self.config.fleet, known)
            except ValueError as error:
                reason, code = str(error), CloseCode.REFUSED
        if reason:
            self.feed(self.core.close(code, reason, trio.current_time()))
        elif TRACE_GREETING in headers:
            self.halves.tracing = self.home.tracing
        return bool(reason)

    def _join(self, fleet: FleetRefs, headers: dict[str, bytes]) -> None:
        """Allow refs of the fleet to travel, if the peer is a member.

        Raises:
            ValueError: the peer says nonsense of itself, or has ended.
        """
        node_id = fleet.admit(headers)
        if node_id:
            self.refs.join(fleet, node_id)
            fleet.connected(node_id, self, self.shut)

    def names(self) -> Names:
        """Return the names that the peer may look up."""
        return Names(self.system, self.expose, self.halves)

    def _compare(self, headers: dict[str, bytes]) -> str:
        """Describe the message classes of the peer that are incompatible; empty if all are compatible."""
        theirs = headers.get(CODEC[0], CODEC[1])
        if theirs != CODEC[1]:
            return f"{CODEC[0]} is {theirs[:16]!r} there and {CODEC[1]!r} here"
        if SCHEMA not in headers or self.config.schema == "off":
            return ""
        errors, remarks = compare_schema(headers[SCHEMA])
        refused = errors if self.config.schema == "refuse" else []
        for text in remarks if refused else errors + remarks:
            logger.warning("%s: message classes differ: %s", self.who, printable(text), extra=self.extra("schema"))
        return f"message classes differ: {'; '.join(refused)}"[:400] if refused else ""

    def _on_ended(self, event: ConnectionEnded) -> None:
        self.ended(event, event.reason if event.error is None else f"the peer broke the protocol: {event.reason}")
        if not self.welcome.is_set():
            self.unwelcome = self.error()
            self.welcome.set()

    events: ClassVar = {
        ConnectionEnded: _on_ended,
        Ended: _on_half_ended,
        HeadersReceived: _on_headers,
        Reached: _on_reached,
        Readable: _on_movable,
        Settled: _on_settled,
        StreamUnblocked: _on_unblocked,
        Writable: _on_movable,
    }

    def _do_datagram(self, output: DatagramData) -> None:
        try:
            if self.carrier is not None and not self.carrier.send_datagram_nowait(output.data):
                self.datagrams_dropped += 1
        except DatagramTooLarge as error:
            self.datagrams_dropped += 1
            self.core.datagram_limit = error.limit
        except CarrierError:
            pass

    def _do_close(self, output: CloseConnection) -> None:
        carrier = self.carrier
        if carrier is None:
            return
        if output.drain_timeout:
            # The bytes that ended the channels are still on their way to the peer.
            self.start_task(partial(carrier.aclose, output.code, output.reason, drain_timeout=output.drain_timeout))
        else:
            carrier.close(output.code, output.reason)

    acts: ClassVar = {**AqueductStreams.acts, CloseConnection: _do_close, DatagramData: _do_datagram}

    async def _receive_datagrams(self, carrier: carriers.Connection) -> None:
        while True:
            try:
                data = (await carrier.receive_datagram()).data
            except CarrierError:
                return  # it has ended
            self.feed(self.core.receive_datagram(data, trio.current_time()))

    def started(self) -> None:
        """Answer lookups, if there are names to look up, and begin."""
        if self.entrance is not None and self.expose:
            there, self._questions = channel(Lookup, name="lookups")
            self.entrance.send_nowait(Lookups(there))
            self.start_soon(self.names().serve, self._questions)
        super().started()

    def meet(self, info: CarrierInfo) -> None:
        """Record who is at the other end, also for errors and handlers."""
        super().meet(info)
        self.halves.peer, self.halves.remote = info.peer, self.remote

    async def begin(self, carrier: carriers.Connection) -> None:
        """Wait for the handshake; only an early client really waits."""
        if isinstance(self.core.entrypoint, SenderHalf):
            self.halves.start(EntryOutbound(self.halves, self.entry, half=self.core.entrypoint))
        self.start_task(self._receive_datagrams, carrier)
        self.flush_soon()
        try:
            info, largest = await carrier.handshake(), carrier.max_datagram_size()
        except CarrierError:
            return  # it has ended
        self.meet(info)
        # The carrier sends refused streams again under the same numbers, so the core has nothing to do.
        self.feed(self.core.handshake_completed(largest, now=trio.current_time()))

    def lost(self, code: int, reason: str) -> None:
        """End the entrypoint as well, which may never have begun."""
        super().lost(code, reason)
        if self.client:
            self.halves.detail = self.halves.detail or str(self.error())
            self.halves.end(self.entry, TerminalState.CONNECTION_LOST)

    def error(self) -> CarrierError:
        """Make the error for a call that needs the connection; a protocol error of the peer is its cause."""
        error = super().error()
        error.__cause__ = self.halves.cause
        return error

    async def aclose(self) -> None:
        """Finish the entrypoint, let open channels end within `AqueductConfig.drain_timeout` seconds, then close.

        Cancellation:
            closed at once.
        """
        self.close_entry()
        await super().aclose()

    def close_entry(self) -> None:
        """Stop sending to the peer's handler, or stop the handler of this side from receiving."""
        if self.lookups is not None:  # on a client it is the entrance
            self.lookups.finish_nowait()
        if self._questions is not None:
            self._questions.close()
        if not self.client:
            self.entry.end(TerminalState.RECEIVER_CLOSED)

    def shut(self, code: int = CloseCode.ORDERLY, reason: str = "") -> None:
        """Close at once, even if the carrier is closing in order."""
        super().shut(code)
        if self.carrier is not None:
            self.carrier.close(CloseCode.ORDERLY)

    def refuse(self) -> None:
        """End the entrypoint, since no task will do it."""
        self.lost(0, "")

    def release(self) -> None:
        """Drop all but the state that a `Peer` still reads."""
        self.core.entrypoint = None
        if self.config.fleet is not None and self.refs.node:
            self.config.fleet.disconnected(self.refs.node, self)
        self.halves.release()
        super().release()
