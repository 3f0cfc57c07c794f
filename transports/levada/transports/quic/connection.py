"""One QUIC connection: it turns engine events into streams, datagrams and an end, and the application's calls into engine calls.

The rules of this file:

* A connection has no task and no lock: everything happens in the endpoint's two tasks or in the caller's, between two awaits.
* Every call that gives the engine data to send ends in `mark_dirty`; the endpoint then sends once for all that happened in a turn. Only a
  short lone answer is sent at once (`send_promptly`).
* The application learns of the end as soon as it is certain. aioquic's own event comes later, after the closing period.
* The credit for a stream that the peer opened is given back when the engine has dropped the stream *and* the application has accepted it.
  So a peer cannot pile up streams, however short, at an application that does not accept them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import trio
from aioquic.quic import events
from cryptography.hazmat.primitives.serialization import Encoding

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers.connection_stream import ConnectionStream
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, CloseReason, Datagram, Octets
from levada.transports.carriers.sockets import address_towards
from levada.transports.carriers.stream_connection import StreamConnection

from .certificates import names, subject
from .config import QuicConfig
from .engine import EarlyDatagram, Engine
from .port import Address, authority

if TYPE_CHECKING:
    from .endpoint import QuicEndpoint

__all__ = ["QuicConnection", "QuicDetails", "QuicStream"]


class QuicStream(ConnectionStream["QuicConnection"]):
    """A `levada.transports.carriers.contracts.Stream`, made by `QuicConnection.open_stream` and `QuicConnection.accept_stream`.

    `send_all` waits while more than `QuicConfig.high_watermark` bytes are not sent yet, and while the connection has more than
    `QuicConfig.max_unacked` unacknowledged bytes. The peer may send `QuicConfig.stream_window` bytes ahead of `receive_some`.
    """

    __slots__ = ("_forgotten", "_waiting")

    def __init__(self, connection: QuicConnection, stream_id: int, priority: int = 128):
        super().__init__(connection, stream_id, priority)
        self._waiting = False  # for the application to accept it
        self._forgotten = False  # the engine has dropped its state

    def appeared(self) -> None:
        """Record that the stream waits to be accepted."""
        self._waiting = True

    def accepted(self) -> bool:
        """Record that the application has taken the stream. Return whether its credit is due, because the engine has already dropped it."""
        self._waiting = False
        return self._forgotten

    def forgotten(self) -> bool:
        """Record that the engine has dropped the stream. Return whether its credit is due, because the peer opened it and it was accepted."""
        self._forgotten = True
        return not self._waiting and not self.initiated_here

    @property
    def unacked(self) -> int:
        """Bytes queued or sent that the peer has not acknowledged."""
        return self._connection.engine.ready.unacked_of(self.stream_id)

    async def _wait_for_room(self) -> None:
        blocked = self._connection.blocked
        blocked[self] = None
        try:
            await super()._wait_for_room()
        finally:
            blocked.pop(self, None)

    async def _wait_until_flushed(self) -> None:
        self._connection.flushing[self] = None
        await super()._wait_until_flushed()

    async def _wait_for_news(self, *, end: bool) -> None:
        if end:
            await super()._wait_for_news(end=end)
            return
        acking = self._connection.acking
        acking[self] = None
        try:
            await super()._wait_for_news(end=end)
        finally:
            acking.pop(self, None)

    def wake_flushing(self) -> None:
        """Wake `flush`: all bytes have been sent, or never will be."""
        self._connection.flushing.pop(self, None)
        super().wake_flushing()


# aioquic's loss timer can fire at its exact moment and find no packet lost: `sent + delay == now`, but `now - delay` rounds below `sent`.
# Without slack it would be set to the same moment again and again, and virtual time would stand still.
_TIMER_SLACK = 1e-6
_PING = 0  # id of keepalive PINGs, whose acknowledgements are ignored
_ABANDONED = "stateless reset"
# Most bytes of an answer that is sent at once. The flush task costs two turns of trio's scheduler and a look at a timer: a third of the CPU
# time of a request, if they come one at a time. For answers larger than a packet it hardly matters.
_PROMPT = 1_000


@attrs.frozen(kw_only=True)
class QuicDetails:
    """Facts that only a QUIC connection has, as of the call."""

    packets_sent: int
    packets_received: int
    packet_size: int
    """UDP payload of a full packet in bytes, as found by path MTU discovery."""
    round_trip: float
    """Smoothed round-trip time in seconds; 0 if not measured yet."""
    streams: int
    """Streams that have not ended."""


class QuicConnection(StreamConnection[QuicStream]):
    """A `levada.transports.carriers.contracts.Connection`, made by `dial` and by `QuicIncoming.accept`."""

    def __init__(
        self,
        endpoint: QuicEndpoint,
        engine: Engine,
        address: Address,
        *,
        config: QuicConfig,
        is_client: bool,
        now: float,
        early_offered: bool = False,
    ):
        info = CarrierInfo(
            scheme="quic",
            local=authority(address_towards(endpoint.address, address) if is_client else endpoint.address),
            peer=authority(address),
            server_name=engine.configuration.server_name,
        )
        super().__init__(info, is_client=is_client, datagram_queue=config.datagram_queue)
        self.engine = engine
        self.flushing: dict[QuicStream, None] = {}
        """Streams whose `flush` waits."""
        self.acking: dict[QuicStream, None] = {}
        """Streams whose `all_acked` waits."""
        self.cids: set[bytes] = set()
        """Connection ids that the endpoint routes here."""
        self.retired_cids: deque[bytes] = deque()
        """The ids among them that the peer has retired, oldest first."""
        self.reset_tokens: set[bytes] = set()
        self.timer_at = math.inf
        """Latest time at which the endpoint looks at the connection's timers."""
        self.dirty = False
        """Whether the endpoint has the connection in its list to send for."""

        self._endpoint = endpoint
        self._config = config
        self._address = address
        self._early_offered = early_offered
        self._handshake_deadline = now + self._config.handshake_timeout
        self._heard_at = now
        self._lonely = False  # the last input made one event, and nothing was sent since
        self._close_packets: list[tuple[bytes, Address]] = []
        self._late_packets = 0

        self._bytes_sent = 0
        self._bytes_received = 0
        self._packets_received = 0
        self._packets_sent = 0

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now. Bytes include QUIC's overhead; writes and reads are packets."""
        return CarrierStatistics(
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            writes=self._packets_sent,
            reads=self._packets_received,
            unsent=sum(map(self.engine.ready.unsent, self.streams)),
            datagrams_dropped=self._datagrams_dropped,
        )

    def details(self) -> QuicDetails:
        """Return the facts that only a QUIC connection has."""
        return QuicDetails(
            packets_sent=self._packets_sent,
            packets_received=self._packets_received,
            packet_size=self.engine.packet_size,
            round_trip=self.round_trip(),
            streams=len(self.streams),
        )

    def credit(self) -> tuple[int, int]:
        """Return the bytes that this side, and the peer, may send now; (0, 0) after the end. `Connection.credit` says more."""
        return self.engine.credit if not self.closed else (0, 0)

    def round_trip(self) -> float:
        """Return the smoothed round-trip time in seconds; 0 if not measured yet."""
        return self.engine.smoothed_rtt

    async def handshake(self) -> CarrierInfo:
        """Wait until the handshake is complete, and return the facts about both ends.

        Raises:
            ConnectionLost: the handshake failed, or took longer than `QuicConfig.handshake_timeout`.
            ConnectionClosed: this side closed the connection first.
        """
        await self._shaken.wait()
        if not self.engine.handshake_complete and self.closed:
            raise self.error()
        return self._info

    def _open_stream(self, *, unidirectional: bool, priority: int) -> QuicStream | None:
        if not self.engine.stream_credit(unidirectional=unidirectional):
            return None
        stream_id = self.engine.reserve_stream(unidirectional=unidirectional, priority=priority)
        stream = self.streams[stream_id] = QuicStream(self, stream_id, priority)
        return stream

    def _credit_wanted(self, *, unidirectional: bool) -> None:
        self.engine.sending.want_stream(unidirectional=unidirectional)
        self.mark_dirty()

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows to be opened now; 0 after the end."""
        return 0 if self.closed else self.engine.stream_credit(unidirectional=unidirectional)

    def _accepted(self, stream: QuicStream) -> None:
        if stream.accepted() and self.engine.windows.grant_stream(unidirectional=stream.unidirectional):
            self.mark_dirty()

    def max_datagram_size(self) -> int:
        """Return the size in bytes of the largest datagram that fits now; 0 if the peer takes none or its limit is not known yet."""
        return self.engine.datagram_room()

    def _queue_datagram(self, data: Octets) -> bool:
        if self.engine.datagrams_queued >= self._config.datagram_queue:
            return False
        self.engine.send_datagram_frame(bytes(data))
        if not self.dirty:  # only the first of many in a row has to decide how to send
            self.send_promptly(memoryview(data).nbytes)
        return True

    def close(self, code: int = 0, reason: str = "") -> None:
        """End the connection and tell the peer at once; queued data is dropped. Does nothing if the connection has already ended."""
        if self.closed:
            return
        self.engine.close(error_code=code, reason_phrase=reason)
        self._end(
            CloseReason(code, reason), lambda: ConnectionClosed(f"the connection was closed here with code {code}")
        )
        self.mark_dirty()

    async def _drain(self) -> None:
        while not self.closed and self._undelivered():
            if self._drained is None:
                self._drained = trio.Event()
            await self._drained.wait()

    async def _all_closed(self) -> None:
        pass  # the endpoint has other connections

    def _undelivered(self) -> bool:
        return bool(self.engine.datagrams_queued) or any(stream.undelivered for stream in self.streams.values())

    def update_keys(self) -> None:
        """Renew the keys. This is optional: the carrier renews them by itself long before their limit."""
        self.engine.request_key_update()
        self.mark_dirty()

    def change_path(self) -> None:
        """Use another connection id and send a packet, so that the peer learns this side's new address."""
        self.engine.change_connection_id()
        self._endpoint.learn_reset_tokens(self)
        self.engine.send_ping(_PING)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Ask the endpoint to send for this connection once the tasks that can run now have run."""
        self._endpoint.asked += 1
        if not self.dirty:
            self.dirty = True
            self._endpoint.add_dirty(self)

    def send_promptly(self, size: int) -> None:
        """Send a queued datagram or end of a stream at once if it is the only answer to a single input; otherwise as `mark_dirty`."""
        if self._lonely and not self.dirty and size <= _PROMPT:
            self._endpoint.send_for(self)
        else:
            self.mark_dirty()

    def together(self, send: Callable[[], None]) -> None:
        """Call `send`, and send its output at once if it is short and nothing else is to be sent."""
        if self.dirty:
            send()
            return
        ready = self.engine.ready
        before = ready.unacked
        self.dirty = True  # so that no call of `send` asks for a flush
        try:
            send()
        finally:
            self.dirty = False
            if ready.unacked - before <= _PROMPT:
                self._endpoint.send_for(self)
            else:
                self.mark_dirty()

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Change the priority of a stream's data."""
        self.engine.ready.set_priority(stream_id, priority)

    def unsent(self, stream_id: int) -> int:
        """Return the number of bytes of a stream that are queued and not yet sent."""
        return self.engine.ready.unsent(stream_id)

    def send(self, stream_id: int, data: Octets, fin: bool) -> None:
        """Queue bytes of a stream, and have them sent."""
        # aioquic only measures and copies the bytes, so any bytes-like object will do.
        self.engine.send_stream_data(stream_id, data, fin)  # type: ignore[arg-type]
        if fin:
            self.send_promptly(len(data))
        else:
            self.mark_dirty()

    def reset(self, stream_id: int, code: int) -> None:
        """Drop a stream's queued data, and tell the peer."""
        self.engine.discard_stream(stream_id, code)
        self.mark_dirty()

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to send no more on a stream."""
        self.engine.refuse_stream(stream_id, code)
        self.mark_dirty()

    def consumed(self, stream_id: int, size: int) -> None:
        """Record that the application has taken bytes of a stream."""
        if self.engine.consumed(stream_id, size):
            self.mark_dirty()

    def is_full(self, stream_id: int) -> bool:
        """Whether a sender has to wait."""
        ready, config = self.engine.ready, self._config
        return ready.unsent(stream_id) > config.high_watermark or ready.unacked > config.max_unacked

    def has_room(self, stream_id: int) -> bool:
        """Whether a sender that waited may continue."""
        ready, config = self.engine.ready, self._config
        return ready.unsent(stream_id) <= config.low_watermark and ready.unacked <= config.max_unacked

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Take a packet that was routed here."""
        self._bytes_received += len(data)
        self._packets_received += 1
        if self._close_packets:
            # The peer has not seen the close: repeat it, at ever longer intervals (RFC 9000 section 10.2.1).
            self._late_packets += 1
            if self._late_packets & (self._late_packets - 1) == 0:
                self._endpoint.send(self._close_packets)
            return
        self._heard_at = now
        self.engine.receive_datagram(data, address, now)

    def transmit(self, now: float) -> list[tuple[bytes, Address]]:
        """Return the packets to send now."""
        engine = self.engine
        closing = engine.closed and not self._close_packets
        datagrams: list[tuple[bytes, Address]] = engine.datagrams_to_send(now)
        if closing and datagrams:
            if not engine.may_answer:
                datagrams = []
            self._close_packets = datagrams
        elif not closing:
            datagrams += engine.path.probe(now)
        self._packets_sent += len(datagrams)
        for data, _ in datagrams:
            self._bytes_sent += len(data)
        self._lonely = False
        if engine.has_news or self.blocked or self.flushing or self._datagram_writers or self._drained is not None:
            self.settle()
        return datagrams

    def next_deadline(self) -> float:
        """Return when `fire` is due."""
        at = self.engine.get_timer()
        deadline = math.inf if at is None else at
        if self.closed:
            return deadline
        if not self.engine.handshake_complete:
            return min(deadline, self._handshake_deadline)
        keepalive = self._config.keepalive_interval
        return deadline if keepalive is None else min(deadline, self._heard_at + keepalive)

    def fire(self, now: float) -> None:
        """Do the work that is due."""
        engine = self.engine
        if not engine.handshake_complete and not self.closed and now >= self._handshake_deadline:
            self.fail(f"no handshake within {self._config.handshake_timeout} s")
            return
        at = engine.get_timer()
        if at is not None and at <= now:
            engine.handle_timer(now + _TIMER_SLACK)
        keepalive = self._config.keepalive_interval
        if (
            keepalive is not None
            and engine.handshake_complete
            and not self.closed
            and now >= self._heard_at + keepalive
        ):
            engine.send_ping(_PING)
            self._heard_at = now
        self.settle()
        self.mark_dirty()

    def fail(self, why: str, *, code: int = 1) -> None:
        """End the connection as lost; the peer learns the code, but not the reason."""
        if not self.closed:
            said = f"connection to {self._info.peer}: {why}"
            self._end(CloseReason(code, why, lost=True), lambda: ConnectionLost(said))
            self.engine.close(error_code=code, frame_type=0)
            self.mark_dirty()

    def abandon(self, why: str) -> None:
        """End the connection as lost without telling the peer: the peer has no state for it, or the state here is damaged."""
        if not self.closed:
            said = f"connection to {self._info.peer}: {why}"
            self._end(CloseReason(1, why, lost=True), lambda: ConnectionLost(said))
        self.engine.terminate(1, why)
        self._endpoint.forget(self)

    def reset_by_peer(self) -> None:
        """End the connection because a stateless reset arrived."""
        self.abandon(_ABANDONED)

    def settle(self) -> None:
        """Handle the engine's news, and wake the tasks that can continue."""
        engine = self.engine
        happened = engine.take_events()
        self._lonely = len(happened) == 1
        for event in happened:
            if type(event) is events.StreamDataReceived:
                self._data_arrived(event)
            else:
                self._handle(event)
        if engine.closed and not self.closed:
            self._ended_by_engine()
        if engine.reset_tokens_changed:
            engine.reset_tokens_changed = False
            self._endpoint.learn_reset_tokens(self)
        streams = self.streams
        for stream_id in engine.ready.take_settled():
            stream = streams.get(stream_id)
            if stream is not None and not stream.settled:
                stream.sending_settled()
        for stream_id in engine.ready.take_forgotten():
            stream = streams.pop(stream_id, None)
            if (
                stream is not None
                and stream.forgotten()
                and engine.windows.grant_stream(unidirectional=stream.unidirectional)
            ):
                self.mark_dirty()
        if self.blocked:
            for waiting in list(self.blocked):
                if self.has_room(waiting.stream_id):
                    waiting.wake_room()
        if self.flushing:
            for waiting in list(self.flushing):
                if not waiting.unsent:
                    waiting.wake_flushing()
        if self.acking:
            for waiting in self.acking:
                if not waiting.unacked:
                    waiting.wake_sending()
        for unidirectional in (False, True):
            if self._opening[unidirectional]:
                self._credit_came(engine.stream_credit(unidirectional=unidirectional), unidirectional=unidirectional)
        if self._datagram_writers and engine.datagrams_queued < self._config.datagram_queue:
            self._datagram_writers.unpark_all()
        if self._drained is not None and not self._undelivered():
            self._drained.set()
            self._drained = None
        if engine.terminated:
            self._endpoint.forget(self)

    def batch_over(self) -> None:
        """Call the callback of `on_batch`."""
        if self._tell_batch is not None:
            self._tell_batch()

    def forgotten(self) -> None:
        """Release the engine's state and the streams, which refer to the connection. Streams that wait to be accepted stay."""
        self.engine.release()
        self._release_streams()

    def _handle(self, event: events.QuicEvent) -> None:
        match event:
            case events.DatagramFrameReceived():
                self._datagram_came(Datagram(event.data, early=type(event) is EarlyDatagram))
            case events.StreamReset():
                self._stream(event.stream_id).reset_arrived(event.error_code)
            case events.StopSendingReceived():
                self._stream(event.stream_id).stop_arrived(event.error_code)
            case events.ConnectionIdIssued():
                self._endpoint.add_route(event.connection_id, self)
            case events.ConnectionIdRetired():
                self._endpoint.retire_route(event.connection_id, self)
            case events.HandshakeCompleted():
                self._handshake_completed(event)
            case _:
                pass

    def _data_arrived(self, event: events.StreamDataReceived) -> None:
        stream_id = event.stream_id
        stream = self.streams.get(stream_id) or self._stream(stream_id)
        early = self.engine.early_streams
        if early and stream_id in early:
            early.discard(stream_id)
            stream.mark_early()
        stream.data_arrived(event.data, event.end_stream)

    def _stream(self, stream_id: int) -> QuicStream:
        stream = self.streams.get(stream_id)
        if stream is None:
            stream = QuicStream(self, stream_id)
            stream.appeared()
            self._appeared(stream)
        return stream

    def _handshake_completed(self, event: events.HandshakeCompleted) -> None:
        engine = self.engine
        certificate = engine.peer_certificate if not self.is_client or self._config.verify else None
        self._info = attrs.evolve(
            self._info,
            alpn=event.alpn_protocol,
            tls_version="TLSv1.3",
            peer_certificate=None if certificate is None else certificate.public_bytes(Encoding.DER),
            peer_subject=None if certificate is None else subject(certificate),
            peer_names=() if certificate is None else names(certificate),
            resumed=event.session_resumed,
            early_data_accepted=event.early_data_accepted if self._early_offered or event.early_data_accepted else None,
            channel_binding=engine.channel_binding,
        )
        if not self.is_client:
            self._endpoint.handshake_completed(self, self._address)
        self._endpoint.learn_reset_tokens(self)
        self._shaken.set()

    def _ended_by_engine(self) -> None:
        event = self.engine.close_event
        assert event is not None
        peer = self._info.peer
        text, code = event.reason_phrase, event.error_code
        if self.engine.closed_by_peer and event.frame_type is None:
            reason = CloseReason(code, text, by_peer=True)
            said = f"{peer} closed the connection with code {code}" + (f": {text}" if text else "")
            self._end(reason, lambda: ConnectionLost(said, code))
        elif self.engine.closed_by_peer:
            self._end(
                CloseReason(code, text, by_peer=True, lost=True),
                lambda: ConnectionLost(
                    f"{peer} aborted the connection with transport error {code:#x}: {text or 'no reason given'}"
                ),
            )
        elif self.engine.terminated and text == "Idle timeout":
            idle = self._config.idle_timeout
            self._end(
                CloseReason(1, text, lost=True),
                lambda: IdleTimeout(f"nothing from {peer} within the idle timeout, here {idle} s"),
            )
        else:
            self._end(
                CloseReason(code, text, lost=True),
                lambda: ConnectionLost(
                    f"connection to {peer} failed with transport error {code:#x}: {text or 'no reason known'}"
                ),
            )

    def _end(self, reason: CloseReason, make_error: Callable[[], CarrierError]) -> None:
        super()._end(reason, make_error)
        self._drained = None
        self._endpoint.connection_over(self, reason)

    @property
    def peer_address(self) -> Any:
        """Socket address of the peer to send to now."""
        return self.engine.get_peer_address() or self._address
