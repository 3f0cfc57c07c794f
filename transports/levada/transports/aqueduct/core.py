"""One Aqueduct connection without I/O: bytes in, events out; calls in, bytes out.

The owner works in turns:

1. Pass in the input: `receive_stream_data`, `stream_reset`, `stream_stopped`, `receive_datagram`, `handle_timeout`. Use the halves:
   `SenderHalf.send`, `ReceiverHalf.take` and so on.
2. Act on the events. Each input returns them; `take_events` returns the events of calls to halves.
3. Once a turn, call `data_to_send(now)`, carry out the outputs, and sleep until `next_deadline`.

`AqueductCore` is a `levada.transports.core.Core` with `levada.transports.core.StreamsInput`. Calls to halves have no time argument: their
delays count from the last time that the core was given.

Creating, losing and ending channels can affect many channels at once. All consequences have happened when a call returns. A broken rule of
the peer ends the connection: the last output closes it, the last event says why, and later calls do nothing.

The protocol uses no randomness: ids are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from levada.framework.errors import LocalProtocolError, RemoteProtocolError
from levada.transports.numbers import Numbers

from .codes import CloseCode, LimitExceeded, ResetCode, violation
from .config import AqueductConfig
from .events import CloseConnection, ConnectionEnded, Event, HeadersReceived, Output, Reached, StreamUnblocked
from .frames import (
    ENTRYPOINT,
    FLOW,
    LARGEST,
    MINTER,
    ONESHOT,
    SPACES,
    VERSION,
    AckNackUnreliable,
    AckReliable,
    Attach,
    ChannelControl,
    ClosedChannelLost,
    CloseReceiver,
    ConnectionControl,
    FinishSender,
    Frame,
    FrameType,
    Headers,
    Incomplete,
    Octets,
    SentUnreliable,
    decode_frame,
    decode_message,
    encode_int,
)
from .links import ConnectionLinks
from .receiver import NO_MESSAGES, Delivery, ReceiverHalf
from .sender import SenderHalf
from .state import (
    CONNECTION,
    ENDS,
    PLACES,
    ConnectionInput,
    ConnectionState,
    ReceiverState,
    SenderState,
    StreamPosition,
    next_place,
)
from .streams import NO_BYTES, AqueductStream, StreamTable
from .timers import AqueductTimers

__all__ = ["AqueductCore"]

# Looking up an enum member takes 6 times as long as looking up a name, and each message needs these.
_SENDING = (SenderState.OPEN, SenderState.UNATTACHED)
_OPEN, _MESSAGES = ConnectionState.OPEN, StreamPosition.MESSAGES
_GREETED = (ConnectionState.OPEN, ConnectionState.DRAINING, ConnectionState.CLOSED)  # AQ-16: the peer speaks Aqueduct
_SMALL = 4096  # bytes
_GREETINGS = (FrameType.VERSION, FrameType.CONNECTION_CONTROL)


class AqueductCore:
    """One side of a connection.

    Args:
        client: whether this side dialled.
        headers: a client's connection headers; a server passes its own to `accept`.
        config: windows, limits and delays.
        early: whether this client sends 0-RTT data, before the handshake is complete. Source: AQ-21.
        delivery: what received messages are made of, so that an owner can queue them with its own fields beside them.
    """

    def __init__(
        self,
        *,
        client: bool,
        headers: Headers = (),
        config: AqueductConfig | None = None,
        early: bool = False,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        self.client = client
        self.delivery = delivery
        self.config = config or AqueductConfig()
        self.state = ConnectionState.HANDSHAKE
        self.peer_headers: Headers | None = None
        """The peer's connection headers, once they are known."""
        self.halves: dict[int, SenderHalf | ReceiverHalf] = {}
        """Senders and receivers that have not ended, by channel id. Read only."""
        self.unclaimed: dict[int, ReceiverHalf] = {}
        """Receivers that ended before the message that attaches them arrived. Source: AQ-30."""
        self.streams = StreamTable(client=client, early=early)
        self.background: set[SenderHalf | ReceiverHalf] = set()
        """Halves for which a drain only waits until everything sent on them is settled."""
        self.links = ConnectionLinks(self.halves, lambda half: self.events.append(Reached(half)), self.streams.announce)
        self.held = 0
        """Bytes held for the peer; see `AqueductConfig.max_held`."""
        self.unacked = 0
        """Bytes sent on all channels and not settled; see `AqueductConfig.max_unacked`."""
        self.crowded: dict[SenderHalf, None] = {}
        """Senders that wait until fewer bytes are unacked."""
        self.datagram_limit = 0
        """Bytes of the largest datagram that fits. The owner may set it when the path changes. Source: AQ-22."""
        self.round_trip = 0.0
        """Estimated round trip in seconds, if the owner sets it. Source: AQ-36, AQ-37."""
        self.entrypoint: SenderHalf | ReceiverHalf | None = None
        """The channel that exists without a message: the client's sender, the server's receiver. Source: AQ-18."""
        self.ack_now: dict[ReceiverHalf, None] = {}
        """Receivers that ack in this turn."""
        self.events: list[Event] = []
        """What to tell the owner; halves add to it."""
        self._timers: AqueductTimers[SenderHalf, ReceiverHalf] = AqueductTimers(self.config)
        self._close: CloseConnection | None = None
        self._control: AqueductStream | None = None
        self._waiting: dict[AqueductStream, None] = {}
        self._datagrams: list[bytes] = []
        self._minted = dict.fromkeys(range(SPACES + 1), 0)
        self._gone = {space: Numbers() for space in range(SPACES + 1)}
        self._unhanded = {space: Numbers() for space in range(SPACES + 1)}
        self._mine = 0 if client else MINTER
        self._inward = FLOW if client else 0
        self._excess: RemoteProtocolError | None = None
        self._most_held = self.config.max_held_early
        self._now = 0.0
        self.ack_later: Callable[[ReceiverHalf], None] = self._timers.ack
        self.declare_soon: Callable[[SenderHalf], None] = self._timers.declare
        self.nack_later: Callable[[ReceiverHalf, int], None] = self._timers.nack
        if client:
            # AQ-15: as soon as it can. AQ-18: the entrypoint exists from the start and has no control stream yet.
            control = self._control = self.streams.open(StreamPosition.ANSWER)
            control.write(ConnectionControl(headers).encode())
            self.entrypoint = SenderHalf(self, ENTRYPOINT, minted_here=True, reachable=True)
            self.halves[ENTRYPOINT] = self.entrypoint
            self._minted[ENTRYPOINT] = 1

    @property
    def control_id(self) -> int | None:
        """Number of the connection control stream, once it has one. Source: AQ-15."""
        return None if self._control is None else self._control.id

    def handshake_completed(
        self, max_datagram: int, *, early_data_accepted: bool | None = None, now: float | None = None
    ) -> list[Event]:
        """Record that the QUIC handshake is complete.

        Args:
            max_datagram: bytes of the largest datagram that fits now; 0 if the peer takes none.
            early_data_accepted: False if QUIC has dropped the early data; it is sent again on new streams.
            now: on a server, the start of the `AqueductConfig.greeting` seconds that the client has to greet; None: no limit.

        Source: AQ-14, AQ-15, AQ-21 (D-11), E-11.
        """
        if self.state is not ConnectionState.HANDSHAKE:
            return self.take_events()
        self._go(ConnectionInput.HANDSHAKE_COMPLETED)
        self.datagram_limit = max_datagram
        if not max_datagram:
            self._fail(violation("E-11"))
            return self.take_events()
        if early_data_accepted is False:
            self.streams.replay()
        self.streams.settle_early()
        if now is not None and not self.client:
            self._timers.greet_at, self._timers.changed = now + self.config.greeting, True
        self._release()
        return self._finish_turn()

    def receive_stream_data(self, stream_id: int, data: Octets, fin: bool, now: float) -> list[Event]:
        """Take bytes of a stream, cut anywhere; return the events.

        `stream_id` is QUIC's for a stream of the peer's, and the core's for a stream that this side opened.
        """
        self._now = now
        stream = self.streams.table.get(stream_id) or self._new_stream(stream_id)
        if stream is not None and stream.receives and not stream.fin_seen:
            try:
                self._read(stream, data, fin)
            except RemoteProtocolError as error:
                self._fail(error)
        return self._finish_turn()

    def stream_reset(self, stream_id: int, code: int, now: float) -> list[Event]:
        """Record that the peer has reset its direction of a stream. Source: AQ-11, AQ-20, AQ-25a, AQ-46, AQ-48."""
        self._now = now
        stream = self.streams.table.get(stream_id) or self._new_stream(stream_id)
        if stream is not None and stream.receives:
            if stream.blocked and not stream_id & 2:
                stream.reset_seen = code
            else:
                try:
                    self._reset(stream, code)
                except RemoteProtocolError as error:
                    self._fail(error)
        return self._finish_turn()

    def stream_stopped(self, stream_id: int, code: int, now: float) -> list[Event]:
        """Record that the peer has stopped a stream, so QUIC has reset this direction; the code has no meaning. Source: AQ-15, AQ-20a."""
        self._now = now
        stream = self.streams.table.get(stream_id) or self._new_stream(stream_id)
        if stream is not None:
            if stream is self._control:
                self._fail(violation("E-13", "stopped"))
            if isinstance(stream.sender, SenderHalf):
                self._timers.stopped(stream.sender)
            stream.stopped()
        return self._finish_turn()

    def receive_datagram(self, data: bytes, now: float) -> list[Event]:
        """Take a datagram; return the events."""
        self._now = now
        if self.state is not ConnectionState.CLOSED:
            try:
                self._datagram(data)
            except RemoteProtocolError as error:
                self._fail(error)
        return self._finish_turn()

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Record that the QUIC connection has ended, by the peer or the network. Source: AQ-19."""
        self._end(code, reason, None, tell=False)
        return self.take_events()

    def accept(self, headers: Headers = ()) -> None:
        """Answer the client, now or later. Data it has sent since its headers is processed now.

        Raises:
            LocalProtocolError: this side is the client, the client was answered already, or `HeadersReceived` has not come.

        Source: AQ-15, AQ-16, AQ-18.
        """
        if self.state is ConnectionState.CLOSED:
            return
        if self.state is not ConnectionState.OFFERED:
            raise LocalProtocolError(f"accept() in state {self.state.value}", rule="AQ-15")
        assert self._control is not None
        self._control.write(VERSION + ConnectionControl(headers).encode())
        self._go(ConnectionInput.ACCEPTED)
        receiver = self._create_receiver(ENTRYPOINT)
        receiver.claimed = receiver.known = True
        self.entrypoint = receiver
        self._release()
        self._enter_drain()
        self.settle()

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """End the connection and everything in it. A second call does nothing. Source: AQ-19 (D-9), AQ-51."""
        self._end(code, reason, None, tell=True)
        return self.take_events()

    def drain(self, now: float) -> list[Event]:
        """Wait for open channels to end, then end the connection.

        The entrypoint takes nothing more: a client finishes it, a server closes it, and waits until the client has ended its direction of the
        entrypoint's control stream (AQ-44): what it sent before on other channels has mostly arrived by then. If the owner of a client's
        entrypoint is waiting for room there, it has more to send and finishes the entrypoint itself. A drain before both sides have greeted
        also waits for that. Messages on open channels may still bring further channels. When no channel is left, or only those in
        `background`, the next `data_to_send` ends the connection; after `AqueductConfig.drain_timeout` seconds it ends in any case.
        """
        if self.state is not ConnectionState.CLOSED and self._timers.end_at is None:
            self._now = now
            self._timers.end_at, self._timers.changed = now + self.config.drain_timeout, True
            self._enter_drain()
        return self._finish_turn()

    def is_blocked(self, stream_id: int) -> bool:
        """Whether bytes of a stream would only be buffered: leave it unread until `StreamUnblocked`. Source: AQ-40 (D-20)."""
        stream = self.streams.table.get(stream_id)
        return stream is not None and stream.blocked

    def take_events(self) -> list[Event]:
        """Take the events since the last call."""
        events, self.events = self.events, []
        return events

    def data_to_send(self, now: float, most: int = LARGEST) -> list[Output]:
        """Take the outputs; call it once a turn.

        `most` is roughly the number of outputs to take, so that an owner of thousands of channels can let other tasks run. Fewer outputs
        than `most` are all there are.
        """
        if self.state is ConnectionState.CLOSED:
            out: list[Output] = [] if self._close is None else [self._close]
            self._close = None
            return out
        self._now = now
        for receiver in self.ack_now:
            receiver.ack(due=False)
        self.ack_now.clear()
        if self.state is ConnectionState.HANDSHAKE and not self.streams.early:
            return []
        out = [*self.streams.flush(most)]
        if self.state is ConnectionState.DRAINING and len(out) < most and self._is_idle():
            assert self._timers.end_at is not None
            self._end(CloseCode.ORDERLY, "", None, tell=True, drain_timeout=max(0.0, self._timers.end_at - now))
            assert self._close is not None
            out.append(self._close)
            self._close = None
        return out

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due; None if never."""
        timers = self._timers
        if timers.changed and self.state is not ConnectionState.CLOSED:
            timers.date(self._now, self.round_trip)
        return timers.next

    def handle_timeout(self, now: float) -> list[Event]:
        """Send the acks, declarations and nacks that are due. Source: AQ-35 to AQ-37, AQ-20a.

        Work for very many channels takes several calls: `next_deadline` stays in the past until it is done.
        """
        if self.state is ConnectionState.CLOSED:
            return self.take_events()
        self._timers.date(self._now, self.round_trip)
        self._timers.changed = True
        self._now = now
        acks, half_due = self._timers.acks_due(now)
        for receiver in half_due:
            receiver.about_to_ack()
        for receiver in acks:
            receiver.acking = False
            receiver.ack(due=True)
        for sender in self._timers.declarations_due(now):
            sender.declaring = False
            sender.declare()
        for due in self._timers.nacks_due(now):
            due.receiver.settle_due(due.end)
        for sender in self._timers.stops_due(now):
            if not sender.ended:
                self._fail(violation("AQ-20a", f"channel {sender.id}"))
        if self._timers.greet_at is not None and now >= self._timers.greet_at:
            self._fail(LimitExceeded(f"no ConnectionControl within {self.config.greeting:g} s", rule="AQ-15"))
        if self._timers.end_at is not None and now >= self._timers.end_at:
            self._end(CloseCode.ORDERLY, "", None, tell=True)
        return self._finish_turn()

    def mint(self, attachments: Sequence[Attach]) -> tuple[SenderHalf | ReceiverHalf, ...]:
        """Create the opposite halves of the attachments of a message about to be written. Source: AQ-6, AQ-26.

        Raises:
            LocalProtocolError: too many channels, or the connection has ended; no half was created.
        """
        if attachments and not self.has_room(len(attachments)):
            raise LocalProtocolError(
                f"more than {self.config.max_channels} channels (raise max_channels)", rule="AQ-19"
            )
        made: list[SenderHalf | ReceiverHalf] = []
        for attach in attachments:
            outward = attach.value & FLOW
            space = (attach.value & ONESHOT) | self._mine | (self._inward ^ outward)
            channel = self._minted[space] << 3 | space
            self._minted[space] += 1
            made.append(
                SenderHalf(self, channel, minted_here=True, reachable=False)
                if outward
                else ReceiverHalf(self, channel, minted_here=True)
            )
            self.halves[channel] = made[-1]
        return tuple(made)

    def receive_attachments(self, channels: tuple[int, ...]) -> tuple[SenderHalf | ReceiverHalf, ...]:
        """Create or find the halves attached to a received message. Source: AQ-28 (4), AQ-30, E-22, E-23."""
        return tuple(
            [
                self._attached_receiver(channel) if channel & FLOW == self._inward else self._attached_sender(channel)
                for channel in channels
            ]
        )

    def forget(self, half: SenderHalf | ReceiverHalf) -> None:
        """Remove a half that has ended. Source: AQ-30, AQ-31 (D-14, D-15)."""
        del self.halves[half.id]
        half.ended = True
        self.background.discard(half)
        if half.minted_here or self.state is ConnectionState.CLOSED:
            return
        self._record_gone(half.id)
        if isinstance(half, ReceiverHalf) and not half.claimed:
            if half.state in (ReceiverState.FINISHED, ReceiverState.CANCELLED):
                self.unclaimed[half.id] = half
            else:
                self._unhanded[half.id & SPACES].add(half.id >> 3)

    def unblock(self, stream: AqueductStream) -> None:
        """Resume reading a stream that had to wait."""
        if not stream.blocked or stream.id is None:
            return
        stream.blocked = False
        self.events.append(StreamUnblocked(stream.id))
        try:
            self._read(stream, b"", stream.fin_seen)
            if stream.reset_seen is not None and not stream.blocked:
                self._reset(stream, stream.reset_seen)
        except RemoteProtocolError as error:
            self._excess = self._excess or error

    def settle(self) -> None:
        """Carry out the consequences of inputs and calls, and check the limits of what is held for the peer."""
        self.links.run()
        if self.crowded and self.unacked <= self.config.max_unacked * 3 // 4:
            crowded, self.crowded = self.crowded, {}
            for sender in crowded:
                if sender.waits_for_room:
                    sender.wake()
        if self.held > self._most_held and self.state is not ConnectionState.CLOSED:
            rule = "AQ-40" if self.state in _GREETED else "AQ-17"
            self._excess = LimitExceeded(f"{self.held} bytes held, at most {self._most_held}", rule=rule)
        if self._excess is not None:
            self._fail(self._excess)

    def _new_stream(self, stream_id: int) -> AqueductStream | None:
        """Accept a stream that is not in the table, if it is the peer's and has not ended."""
        ended = bool(stream_id & 1) != self.client or stream_id in self.streams.done
        return None if ended or self.state is ConnectionState.CLOSED else self.streams.accept(stream_id)

    def _read(self, stream: AqueductStream, data: Octets, fin: bool) -> None:
        """Read bytes after the buffered ones, and buffer the bytes that cannot be read yet."""
        stream.fin_seen = fin
        buffer = stream.buffer
        if buffer and not stream.blocked and len(buffer) < _SMALL and len(buffer) + len(data) >= stream.need:
            # The buffer has the beginning of a message from the last packet. Parsing bytes is twice as fast as parsing a view.
            self.held -= len(buffer)
            data = b"".join((buffer, data))
            buffer = stream.buffer = NO_BYTES
        if buffer or stream.blocked:
            if not buffer:
                buffer = stream.buffer = bytearray()
            buffer += data
            self.held += len(data)
            if stream.blocked or (len(buffer) < stream.need and not fin):
                return
            with memoryview(buffer) as view:
                used = self._parse(stream, view)
            del buffer[:used]
            self.held -= used
        else:
            used = self._parse(stream, data)
            if used < len(data):
                stream.buffer = bytearray(data[used:] if used else data)
                self.held += len(stream.buffer)
        stream.received += used
        if fin and not stream.blocked:
            self._finished(stream)

    def _parse(self, stream: AqueductStream, data: Octets) -> int:
        """Process the frames in `data`; return how many bytes they took."""
        at = 0
        size = len(data)
        halves, inward, max_message = self.halves, self._inward, self.config.max_message
        stream.need = 0
        try:
            while at < size:
                place = stream.place
                kind = data[at]
                if kind != 3 or place is not _MESSAGES or self.state is not _OPEN:
                    if place is StreamPosition.DISCARD:
                        return size
                    following = PLACES.get((place, kind))
                    if following is None or self.state is not _OPEN:
                        following = next_place(place, kind, greeted=self.client or self.state in _GREETED)
                        if self._must_wait(kind):
                            stream.blocked = True
                            self._waiting[stream] = None
                            return at
                    place = following
                    if kind != FrameType.MESSAGE:
                        frame, at = decode_frame(data, at, max_control=self.config.max_control)
                        stream.place = place
                        self._handle(stream, frame)
                        continue
                channel, number, attached, payload, end = decode_message(data, at, max_message)
                receiver = halves.get(channel)
                if receiver is None or channel & FLOW != inward or attached:
                    receiver = self._route(channel, attached)
                if receiver is not None and not receiver.process(number, attached, payload):  # type: ignore[union-attr]
                    stream.blocked = True
                    receiver.stall(stream)  # type: ignore[union-attr]
                    return at
                stream.place = place
                if receiver is not None and end < size and type(data) is bytes:
                    end = receiver.process_run(data, end)  # type: ignore[union-attr]
                at = end
        except IndexError:
            stream.need = size - at + 1
        except Incomplete as cut:
            stream.need = cut.need - at
        except RemoteProtocolError as error:
            error.offset = stream.received + at
            raise
        return at

    def _datagram(self, data: bytes) -> None:
        """Process a datagram, or keep it until the connection is open."""
        place = StreamPosition.DATAGRAM
        at = 0
        try:
            while at < len(data):
                kind = data[at]
                if self.state is not ConnectionState.HANDSHAKE:
                    place = next_place(place, kind, greeted=self.client or self.state in _GREETED)
                if self._must_wait(kind):
                    self._datagrams.append(data[at:])
                    self.held += len(data) - at + 64  # 64: the cost of keeping it, so that empty ones also count
                    return
                if kind != FrameType.MESSAGE:
                    _, at = decode_frame(data, at)
                    continue
                channel, number, attached, payload, end = decode_message(data, at, self.config.max_message)
                receiver = self._route(channel, attached)
                if receiver is not None:
                    receiver.process_unreliable(number, attached, payload)
                at = end
            rule = ENDS[place]
            if rule:
                raise violation(rule)
        except (IndexError, Incomplete):
            raise violation("E-9", "datagram cut") from None
        except RemoteProtocolError as error:
            error.offset = at
            raise

    def _must_wait(self, kind: int) -> bool:
        """Whether a frame is held back. Source: AQ-17 (D-8), AQ-21 (D-11)."""
        state = self.state
        if state is _OPEN or state is ConnectionState.DRAINING:
            return False
        return state is ConnectionState.HANDSHAKE or kind not in _GREETINGS

    def _release(self) -> None:
        """Process the held input, in the order of each stream."""
        waiting, self._waiting = self._waiting, {}
        for stream in waiting:
            self.unblock(stream)
        datagrams, self._datagrams = self._datagrams, []
        for data in datagrams:
            self.held -= len(data) + 64
            try:
                self._datagram(data)
            except RemoteProtocolError as error:
                self._excess = self._excess or error

    def _route(self, channel: int, attached: tuple[int, ...]) -> ReceiverHalf | None:
        """Find or create the receiver of a message; None to discard the message. Source: AQ-27, AQ-31, E-18, E-19."""
        if channel & FLOW != self._inward:
            raise violation("E-18", f"channel {channel}")
        for other in attached:
            if other & MINTER == self._mine:
                raise violation("E-19", f"channel {other}")
        half = self.halves.get(channel)
        if half is None and channel & MINTER != self._mine and channel >> 3 not in self._gone[channel & SPACES]:
            return self._create_receiver(channel)
        assert not isinstance(half, SenderHalf)
        return half

    def _handle(self, stream: AqueductStream, frame: Frame) -> None:
        """Process a frame other than Message."""
        half = stream.half
        match frame:
            case ConnectionControl(headers):
                self._greet(stream, headers)
            case ChannelControl(channel):
                self._attach(stream, channel)
            case ClosedChannelLost(channel):
                self._closed_channel_lost(channel)
            case SentUnreliable(count) if isinstance(half, ReceiverHalf):
                half.declared(count)
            case FinishSender(count) if isinstance(half, ReceiverHalf):
                half.finish_announced(count)
            case AckReliable(runs) if isinstance(half, SenderHalf):
                half.acked(runs)
            case AckNackUnreliable(runs) if isinstance(half, SenderHalf):
                half.settled_unreliable(runs)
            case CloseReceiver(runs) if isinstance(half, SenderHalf):
                half.receiver_closed(runs)
            case _:
                pass  # Version was checked when it was decoded
        if not stream.gate_open:
            stream.gate_open = True
            if stream.half is not None:
                stream.half.gate_opened()

    def _greet(self, stream: AqueductStream, headers: Headers) -> None:
        """Process ConnectionControl. Source: AQ-15, AQ-16, AQ-17, E-12."""
        if self.peer_headers is not None:
            raise violation("E-12")
        self.peer_headers = headers
        self._timers.greet_at, self._timers.changed = None, True
        self.events.append(HeadersReceived(headers))
        if self.client:
            self.streams.prefix = b""
            self._go(ConnectionInput.SERVER_GREETED)
            self._release()
            self._enter_drain()
        else:
            self._control = stream
            self._go(ConnectionInput.CLIENT_GREETED)

    def _attach(self, stream: AqueductStream, channel: int) -> None:
        """Process ChannelControl. Source: AQ-10, AQ-25 (D-12), E-16, E-17."""
        if channel & MINTER != self._mine:
            raise violation("E-16", f"channel {channel}")
        if channel >> 3 >= self._minted[channel & SPACES]:
            raise violation("E-17", f"channel {channel}")
        half = self.halves.get(channel)
        if half is None or half.control is not None:
            stream.reset(ResetCode.LOST)
            stream.stop(ResetCode.LOST)
            return
        stream.place = StreamPosition.RECEIVER_FRAMES if isinstance(half, SenderHalf) else StreamPosition.SENDER_FRAMES
        stream.half = half
        half.attached(stream)

    def _closed_channel_lost(self, channel: int) -> None:
        """Process ClosedChannelLost. Source: AQ-49 (D-24), E-27."""
        if channel & MINTER == self._mine:
            raise violation("E-27", f"channel {channel}")
        half = self.halves.get(channel)
        if half is not None:
            half.lose(told=True)
            return
        unclaimed = self.unclaimed.pop(channel, None)
        if unclaimed is not None:
            unclaimed.drop_mailbox(lost=True)
        elif channel >> 3 in self._gone[channel & SPACES]:
            return
        self._record_gone(channel)
        self._unhanded[channel & SPACES].add(channel >> 3)

    def _finished(self, stream: AqueductStream) -> None:
        """Process the end of the peer's direction. Source: AQ-11, AQ-13, AQ-15."""
        rule = ENDS[stream.place]
        if stream.buffer:
            rule = "E-9"
            self.held -= len(stream.buffer)
            stream.buffer = NO_BYTES
        if rule:
            error = violation(rule, stream.place.value)
            error.offset = stream.received
            raise error
        stream.receives = False
        stream.check()

    def _reset(self, stream: AqueductStream, code: int) -> None:
        """Process a reset of the peer's direction. Source: AQ-11, AQ-15, AQ-20 (D-10), AQ-25a, AQ-46, AQ-48."""
        if stream is self._control:
            raise violation("E-13", "reset")
        self.held -= len(stream.buffer)
        stream.buffer = NO_BYTES
        stream.blocked = False
        self._waiting.pop(stream, None)
        stream.receives = False
        half = stream.half
        if isinstance(half, SenderHalf):
            if code != ResetCode.LOST:
                raise violation("E-15", f"{code} from a receiver")
            half.lose(told=True)
        elif isinstance(half, ReceiverHalf):
            if code not in (ResetCode.CANCELLED, ResetCode.LOST):
                raise violation("E-15", f"{code} from a sender")
            half.sender_reset(code)
        elif stream.place is not StreamPosition.DISCARD and stream.sends:
            stream.reset(ResetCode.LOST)
        stream.check()

    def has_room(self, channels: int) -> bool:
        """Whether this many more channels may be made. Source: AQ-19."""
        live = len(self.halves) + len(self.unclaimed) + len(self.links.tombstones)
        return live + channels <= self.config.max_channels

    def _create_receiver(self, channel: int) -> ReceiverHalf:
        half = ReceiverHalf(self, channel, minted_here=False)
        self._open_control(half, StreamPosition.SENDER)
        return half

    def _open_control(self, half: SenderHalf | ReceiverHalf, place: StreamPosition) -> None:
        """Add a half that the peer minted, and open its control stream. Source: AQ-19, AQ-24."""
        if not self.has_room(1):
            raise LimitExceeded(f"more than {self.config.max_channels} channels", rule="AQ-19")
        self.halves[half.id] = half
        stream = self.streams.open(place)
        stream.half = half
        stream.write(b"\x02" + encode_int(half.id))
        half.attached(stream)

    def _attached_receiver(self, channel: int) -> ReceiverHalf:
        space, index = channel & SPACES, channel >> 3
        half = self.halves.get(channel) or self.unclaimed.pop(channel, None)
        if half is None and index in self._unhanded[space]:
            # Its loss has overtaken this message: the handle is lost from the start.
            self._unhanded[space].discard(index)
            half = ReceiverHalf(self, channel, minted_here=False)
            half.state, half.ended = ReceiverState.LOST, True
        elif half is None:
            if index in self._gone[space]:
                raise violation("E-23", f"channel {channel}")
            half = self._create_receiver(channel)
        assert isinstance(half, ReceiverHalf)
        if half.claimed:
            raise violation("E-23", f"channel {channel}")
        half.claimed = True
        return half

    def _attached_sender(self, channel: int) -> SenderHalf:
        if channel in self.halves or channel >> 3 in self._gone[channel & SPACES]:
            raise violation("E-22", f"channel {channel}")
        half = SenderHalf(self, channel, minted_here=False, reachable=True)
        self._open_control(half, StreamPosition.RECEIVER)
        return half

    def _record_gone(self, channel: int) -> None:
        record = self._gone[channel & SPACES]
        if record.add(channel >> 3) and len(record) > self.config.max_ranges:
            self._excess = LimitExceeded(f"{len(record)} holes in the record of channels", rule="AQ-31")

    def _go(self, what: ConnectionInput) -> None:
        self.state = CONNECTION[self.state, what]
        if self.state in _GREETED:
            self._most_held = self.config.max_held

    def _enter_drain(self) -> None:
        """Finish or close the entrypoint if the connection is to drain and is open."""
        if self._timers.end_at is None:
            return
        if self.state is _OPEN:
            self._go(ConnectionInput.DRAIN)
        entry = self.entrypoint
        if isinstance(entry, ReceiverHalf):
            entry.close()
        elif entry is not None and entry.state in _SENDING and not entry.waits_for_room:
            entry.finish()

    def _is_idle(self) -> bool:
        """Whether a drain need not wait for any channel, nor for a client that may not know yet that its entrypoint is closed."""
        entry, background = self.entrypoint, self.background
        if isinstance(entry, ReceiverHalf) and entry.control is not None and entry.control.receives:
            return False
        return len(self.halves) <= len(background) and not any(
            isinstance(half, SenderHalf) and half.unsettled for half in background
        )

    def _finish_turn(self) -> list[Event]:
        if self.links.todo or self.crowded or self.held > self._most_held or self._excess is not None:
            self.settle()
        events, self.events = self.events, []
        return events

    def _fail(self, error: RemoteProtocolError) -> None:
        code = CloseCode.LIMIT if isinstance(error, LimitExceeded) else CloseCode.PROTOCOL_ERROR
        self._end(code, f"{error.rule}: {error.detail}", error, tell=True)

    def _end(
        self, code: int, reason: str, error: RemoteProtocolError | None, *, tell: bool, drain_timeout: float = 0.0
    ) -> None:
        """Drop everything. Nothing cascades, and no more is written. Source: AQ-19, section 8."""
        if self.state is ConnectionState.CLOSED:
            return
        self._go(ConnectionInput.CLOSED)
        halves = [*self.halves.values(), *self.unclaimed.values()]
        for half in halves:
            if not half.ended:
                half.connection_lost()
            if isinstance(half, ReceiverHalf) and not half.claimed:
                half.mailbox = NO_MESSAGES  # the message that attaches it will never come
        self.unclaimed.clear()
        self.links.close()
        self._timers.close()
        self.streams.close()
        self.streams = StreamTable(client=self.client, early=False)
        self._waiting.clear()
        self._datagrams.clear()
        self.ack_now.clear()
        self.crowded.clear()
        self.background.clear()
        if tell:
            self._close = CloseConnection(code, reason, drain_timeout)
        self.events.append(ConnectionEnded(code, reason, error, closed_here=tell))
