"""The short send path: the packets of an established connection, written from the ready streams.

- acknowledgements travel with outgoing data;
- only ready streams are visited, and only limits that are due;
- `ShortPacketBuilder` makes the packets.

What needs the long path (handshake, migration) is written by aioquic, with the ready streams in its queue. A frame of the long path must get
the same delivery handler as one of the short path (`ShortSender.adopt`). Otherwise its loss would never reach the ready streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioquic.buffer import size_uint_var
from aioquic.quic.connection import QuicConnectionState, QuicNetworkPath
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from .packets import ShortPacketBuilder

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["ShortSender"]

_ACKED = QuicDeliveryState.ACKED
_CONNECTED = QuicConnectionState.CONNECTED
_ACK_FRAME = 33  # bytes at most with one range: type and four variable-length integers
_BLOCKED_FRAME = 9
_LARGE = 1_160  # bytes of stream data; only a packet above 1,200 bytes can hold more


class ShortSender:
    """Writes the usual packets of an engine's established connection, and has what waits for them: a token, ids, wishes for streams."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._builder = ShortPacketBuilder(is_client=engine.configuration.is_client)
        self._new_token = b""
        self._wanted: set[bool] = set()  # kinds of streams that the peer's limits block: true for unidirectional
        self.cids_unsent = True
        """Whether a connection id of this side may have to be sent."""

    def is_due(self, now: float) -> bool:
        """Whether there is something to send besides an acknowledgement that may wait."""
        engine = self._engine
        ack_at = engine.space.ack_at if engine._handshake_confirmed else now
        return (
            (ack_at is not None and ack_at <= now)
            or bool(engine._datagrams_pending)
            or any(engine.ready.levels.values())
            or engine._state is not _CONNECTED
            or engine._close_pending
            or self._has_control_frames()
            or self.needs_long_path(engine._network_paths[0])
        )

    def needs_long_path(self, path: QuicNetworkPath) -> bool:
        """Whether aioquic has to write the next packet."""
        engine = self._engine
        return bool(
            not engine._handshake_confirmed
            or not path.is_validated
            or path.remote_challenges
            or engine._handshake_done_pending
            or engine._retire_connection_ids
            or engine._streams_blocked_pending
        )

    def _has_control_frames(self) -> bool:
        """Whether there are frames to send other than acknowledgements, datagrams and stream frames."""
        engine = self._engine
        return bool(
            engine._probe_pending
            or engine._ping_pending
            or engine.windows.due
            or not engine.handshake_stream.sender.buffer_is_empty
            or self._new_token
            or self._wanted
            or self.cids_unsent
        )

    def packets(self, path: QuicNetworkPath, now: float) -> list[tuple[bytes, Any]]:
        """Return the packets to send now, for a connection that needs only 1-RTT packets on its one path."""
        engine, builder = self._engine, self._builder
        space, loss, size = engine.space, engine._loss, engine._max_datagram_size
        control = loss._cc
        flight = control.congestion_window - control.bytes_in_flight
        builder.begin(
            keys=engine._crypto,
            peer_cid=engine._peer_cid.cid,
            packet_number=engine._packet_number,
            size=size,
            flight=max(flight, size) if engine._probe_pending else flight,
            spin_bit=engine._spin_bit,
        )
        engine._pacing_at = None
        try:
            self.write_packets(builder, now)
        except QuicPacketBuilderStop:
            pass
        datagrams, packets = builder.flush()
        engine._packet_number = builder.packet_number
        for packet in packets:
            packet.sent_time = now
            space.sent_packets[packet.packet_number] = packet  # type: ignore[assignment]  # has what is used of the class
            path.bytes_sent += packet.sent_bytes
            if packet.in_flight:
                control.on_packet_sent(packet=packet)  # type: ignore[arg-type]
            if packet.is_ack_eliciting:
                space.ack_eliciting_in_flight += 1
                loss._time_of_last_sent_ack_eliciting_packet = now
                if not engine._ack_eliciting_sent_since_receipt:
                    engine._close_at = now + engine._idle_timeout()
                    engine._ack_eliciting_sent_since_receipt = True
        address = path.addr
        return [(datagram, address) for datagram in datagrams]

    def write_packets(self, builder: QuicPacketBuilder, now: float) -> None:
        """Write 1-RTT packets for as long as there is something to send, and pacing and the congestion window allow it."""
        engine = self._engine
        ready = engine.ready
        if ready.done:
            ready.discard_done()
        crypto, space, pacer = engine._crypto, engine.space, engine._loss._pacer
        control = self._has_control_frames()
        while True:
            if space.ack_at is None or space.ack_at > now:
                engine._pacing_at = pacer.next_send_time(now=now)
                if engine._pacing_at is not None or not (
                    control or engine._datagrams_pending or any(ready.levels.values())
                ):
                    break
            builder.start_packet(QuicPacketType.ONE_RTT, crypto)
            if space.ack_at is not None:  # due or not, since a packet is sent anyway
                if len(space.ack_queue) > 1:
                    engine._write_ack_frame(builder=builder, space=space, now=now)
                else:
                    self.write_ack(builder, space, now)
            if control:
                self._write_control_frames(builder, space)
                control = False  # no frame of a stream makes another one
            try:
                if engine._datagrams_pending:
                    self._write_datagrams(builder)
                self._write_streams(builder)
            except QuicPacketBuilderStop:
                if builder.packet_is_empty:
                    raise
            if builder.packet_is_empty:
                break
            pacer.update_after_send(now=now)

    def write_ack(self, builder: QuicPacketBuilder, space: QuicPacketSpace, now: float) -> None:
        """Write an ACK frame with one range."""
        engine = self._engine
        numbers = space.ack_queue[0]
        last = numbers.stop - 1
        buf = builder.start_frame(
            QuicFrameType.ACK, _ACK_FRAME, engine._on_ack_delivery, (space, space.largest_received_packet)
        )
        buf.push_uint_var(last)
        buf.push_uint_var(
            int((now - (space.largest_received_time or now)) * 1_000_000) >> engine._local_ack_delay_exponent
        )
        buf.push_uint_var(0)
        buf.push_uint_var(last - numbers.start)
        space.ack_at = None

    def _write_control_frames(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        engine = self._engine
        windows, stream = engine.windows, engine.handshake_stream
        if self.cids_unsent:
            for cid in engine._host_cids:
                if not cid.was_sent:
                    engine._write_new_connection_id_frame(builder=builder, connection_id=cid)
            self.cids_unsent = False
        windows.write_connection_limits(builder)
        while windows.owing:
            windows.write_stream_limit(builder, next(iter(windows.owing)))
        if self._wanted:
            self._write_wanted(builder)
        if self._new_token:
            self._write_new_token(builder)
        if engine._ping_pending:
            engine._write_ping_frame(builder, engine._ping_pending)
            engine._ping_pending.clear()
        if engine._probe_pending:
            engine._write_ping_frame(builder, comment="probe")
            engine._probe_pending = False
        if not stream.sender.buffer_is_empty:
            engine._write_crypto_frame(builder=builder, space=space, stream=stream)

    def want_stream(self, *, unidirectional: bool) -> None:
        """Tell the peer that its limit blocks new streams (frame STREAMS_BLOCKED)."""
        self._wanted.add(unidirectional)

    def _write_wanted(self, builder: QuicPacketBuilder) -> None:
        engine = self._engine
        while self._wanted:
            unidirectional = next(iter(self._wanted))
            if not engine.stream_credit(unidirectional=unidirectional):
                limit = engine._remote_max_streams_uni if unidirectional else engine._remote_max_streams_bidi
                kind = QuicFrameType.STREAMS_BLOCKED_UNI if unidirectional else QuicFrameType.STREAMS_BLOCKED_BIDI
                buf = builder.start_frame(kind, _BLOCKED_FRAME, self._wanted_delivered, (unidirectional,))
                buf.push_uint_var(limit)
            self._wanted.discard(unidirectional)

    def _wanted_delivered(self, delivery: QuicDeliveryState, unidirectional: bool) -> None:
        if delivery is not _ACKED:
            self._wanted.add(unidirectional)

    def send_new_token(self, token: bytes) -> None:
        """Give the client a token for its next connection (frame NEW_TOKEN)."""
        self._new_token = token

    def _write_new_token(self, builder: QuicPacketBuilder) -> None:
        token = self._new_token
        buf = builder.start_frame(QuicFrameType.NEW_TOKEN, 3 + len(token), self._new_token_delivered, (token,))
        buf.push_uint_var(len(token))
        buf.push_bytes(token)
        self._new_token = b""

    def _new_token_delivered(self, delivery: QuicDeliveryState, token: bytes) -> None:
        if delivery is not _ACKED:
            self._new_token = token

    def _write_datagrams(self, builder: QuicPacketBuilder) -> None:
        engine = self._engine
        pending = engine._datagrams_pending
        packet = builder._packet
        if not pending or packet is None:
            return
        largest = engine.datagram_room()
        room = builder.remaining_flight_space
        buf = builder._buffer
        # As `start_frame`, without its checks for each frame, which are two thirds of the cost of a small datagram.
        while pending:
            length = len(pending[0])
            if length > largest:
                pending.popleft()  # packets have become smaller since it was queued, so it would block the queue forever
                continue
            room -= 1 + size_uint_var(length) + length
            if room < 0:
                return
            packet.is_ack_eliciting = packet.in_flight = True
            buf.push_uint8(QuicFrameType.DATAGRAM_WITH_LENGTH)
            buf.push_uint_var(length)
            buf.push_bytes(pending.popleft())

    def _write_streams(self, builder: QuicPacketBuilder) -> None:
        for level in self._engine.ready.levels.values():
            while level:
                stream = next(iter(level))
                finished = self._write_stream(builder, stream)
                del level[stream]
                if not finished:
                    level[stream] = None  # now the last of its level
                    if builder.remaining_flight_space < 32:
                        return

    def _write_stream(self, builder: QuicPacketBuilder, stream: QuicStream) -> bool:
        """Write one frame of a stream's data, and any stop or reset; true if the stream has no more to send for now."""
        engine = self._engine
        sender, stream_id = stream.sender, stream.stream_id or 0
        if stream.receiver.stop_pending:
            engine._write_stop_sending_frame(builder, stream)
        if sender.reset_pending:
            engine._write_reset_stream_frame(builder, stream)
            return True
        if sender.buffer_is_empty or stream.is_blocked:
            return True
        offset = sender.next_offset
        overhead = 3 + size_uint_var(stream_id) + (size_uint_var(offset) if offset else 0)
        room = builder.remaining_flight_space - overhead
        if room < 0:
            raise QuicPacketBuilderStop
        highest = sender.highest_offset
        frame = sender.get_frame(
            room, min(highest + engine._remote_max_data - engine._remote_max_data_used, stream.max_stream_data_remote)
        )
        if frame is None:
            if sender.buffer_is_empty:
                return True
            if room == 0:
                raise QuicPacketBuilderStop
            engine.ready.stalled[stream] = None
            return True
        length = len(frame.data)
        buf = builder.start_frame(
            0x0A | (4 if frame.offset else 0) | (1 if frame.fin else 0),
            overhead,
            self.data_delivered,
            (stream, frame.offset, frame.offset + length, frame.fin),
        )
        buf.push_uint_var(stream_id)
        if frame.offset:
            buf.push_uint_var(frame.offset)
        buf.push_uint16(length | 0x4000)
        buf.push_bytes(frame.data)
        engine._remote_max_data_used += sender.highest_offset - highest
        return sender.buffer_is_empty

    def adopt(
        self, builder: QuicPacketBuilder, stream: QuicStream, theirs: Callable[..., None], ours: Callable[..., None]
    ) -> None:
        """Replace the delivery handler that aioquic has just registered with ours."""
        packet = builder._packet
        handlers = packet.delivery_handlers if packet is not None else None
        if handlers and handlers[-1][0] == theirs:
            handlers[-1] = (ours, (stream, *handlers[-1][1]))

    def data_delivered(self, delivery: QuicDeliveryState, stream: QuicStream, start: int, stop: int, fin: bool) -> None:
        """Handle the acknowledgement or the loss of a STREAM frame."""
        engine, sender = self._engine, stream.sender
        ready = engine.ready
        if delivery is _ACKED:
            freed = sender._buffer_start
            sender.on_data_delivery(delivery, start, stop, fin)
            ready.unacked -= sender._buffer_start - freed
            if stop - start > _LARGE and engine.path.search.losses:
                engine.path.large_acked()
            if sender.is_finished:
                ready.sender_finished(stream)
            return
        sender.on_data_delivery(delivery, start, stop, fin)
        if stop - start > _LARGE:
            engine.path.large_lost()
        if not sender.buffer_is_empty:
            ready.add(stream)

    def reset_delivered(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        """Handle the acknowledgement or the loss of a RESET_STREAM frame."""
        stream.sender.on_reset_delivery(delivery)
        if delivery is _ACKED:
            self._engine.ready.sender_finished(stream)
        else:
            self._engine.ready.add(stream)

    def stop_delivered(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        """Handle the acknowledgement or the loss of a STOP_SENDING frame."""
        if delivery is not _ACKED and not stream.receiver.is_finished:
            stream.receiver.on_stop_sending_delivery(delivery)
            self._engine.ready.add(stream)
