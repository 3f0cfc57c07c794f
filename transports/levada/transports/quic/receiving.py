"""The short receive path for packets of an established connection: 11 us for one full of stream data, where aioquic takes 45.

It omits everything that such packets do not need: packet numbers and keys other than 1-RTT, other paths, logging, and, for the frames of
nearly all traffic, the table of handlers. A packet or frame that is unusual goes to aioquic's long path before it has changed any state. The
previous key is kept for three probe timeouts after a key update, for packets that were on their way (`keys.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic._crypto import CryptoError
from aioquic.quic.connection import (
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.events import DatagramFrameReceived, StreamDataReceived
from aioquic.quic.packet import QuicFrameType, decode_packet_number, pull_ack_frame
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from .ranges import MAX_RANGES, Ranges, ReceivedPackets
from .stream_state import make_stream

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["ShortReceiver"]

_ONE_RTT = tls.Epoch.ONE_RTT
_ZERO_RTT = tls.Epoch.ZERO_RTT
_CONNECTED = QuicConnectionState.CONNECTED
_ACK = int(QuicFrameType.ACK)
_DATAGRAM = int(QuicFrameType.DATAGRAM_WITH_LENGTH)
_STREAM, _LAST_STREAM = int(QuicFrameType.STREAM_BASE), int(QuicFrameType.STREAM_BASE) | 7


class ShortReceiver:
    """Takes the usual packets of an engine's established connection, and has the record of the packet numbers received."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._context: QuicReceiveContext | None = None
        self._received = ReceivedPackets()
        self._heard_at = -math.inf
        """When the idle timeout began anew: once for all packets that were read together."""

    def begin(self, space: QuicPacketSpace) -> None:
        """Take the packets of a new 1-RTT space, as after a Retry."""
        space.ack_queue = Ranges()
        space.received_packets = self._received = ReceivedPackets()  # type: ignore[assignment]  # has everything used of the class

    def receive(self, data: bytes, path: QuicNetworkPath, now: float) -> bool:
        """Handle a 1-RTT packet; false, with no state changed, if it is unusual."""
        engine, context = self._engine, self._context
        if context is None:
            if engine._cryptos[_ZERO_RTT].recv.aead is not None:
                return False
            context = self._context = QuicReceiveContext(_ONE_RTT, b"", path, None, now, None)
        cid = engine.host_cid
        offset = 1 + len(cid)
        pair = engine._crypto
        if pair.previous is not None:
            pair.give_up_previous(now, 3 * engine._loss.get_probe_timeout())
        keys = pair.recv
        protection = keys.hp
        if len(data) < offset + 20 or protection is None:
            return False
        if data[1:offset] != cid:
            # To a server, another id may mean that the client's address has changed. To a client it means nothing: the server changes ids when
            # the client's address has changed.
            cid = data[1:offset]
            if not engine._is_client or all(cid != known.cid for known in engine._host_cids):
                return False
        mask = protection._mask(data[offset + 4 : offset + 20])
        first = data[0] ^ (mask[0] & 0x1F)
        length = (first & 3) + 1
        space = engine.space
        body = offset + length
        truncated = int.from_bytes(data[offset:body], "big") ^ int.from_bytes(mask[1 : 1 + length], "big")
        number = decode_packet_number(truncated, length * 8, space.expected_packet_number)
        is_current = (first & 4) >> 2 == keys.key_phase
        # A packet in another phase was sent before the peer saw the update, or makes a further update.
        aead = keys.aead if is_current else pair.previous
        if first & 0x18 or aead is None:
            return False
        try:
            plain = aead.decrypt(
                data[body:], bytes((first,)) + data[1:offset] + truncated.to_bytes(length, "big"), number
            )
        except CryptoError:
            return is_current  # drop it; in another phase it may be an update by the peer, which the long path handles
        if not is_current:
            pair.previous_opened(number)
        elif pair.previous is not None and number < pair.first:
            pair.first = number
        received = self._received
        in_order = number == received.following
        if in_order:
            received.following = number + 1
        elif not received.add(number):
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        if number > engine._spin_highest_pn:
            spin = bool(first & 0x20)
            engine._spin_bit = not spin if engine._is_client else spin
            engine._spin_highest_pn = number
        context.host_cid, context.network_path, context.time = cid, path, now
        eliciting = self.receive_frames(context, plain)
        if engine._state is not _CONNECTED or engine._close_pending:
            return True
        if now != self._heard_at:
            self._heard_at = now
            engine._close_at = now + engine._idle_timeout()
        engine._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        space.ack_queue.add(number)
        if len(space.ack_queue) > MAX_RANGES:
            space.ack_queue.shift()
        if eliciting:
            if not in_order:
                space.ack_at = now  # RFC 9000 section 13.2.1: the peer should learn of a gap at once
            elif space.ack_at is None:
                space.ack_at = now + engine._ack_delay
        return True

    def receive_frames(self, context: QuicReceiveContext, plain: bytes) -> bool:
        """Handle the frames of a packet; true if they require an acknowledgement."""
        buf = Buffer(data=plain)
        end = len(plain)
        eliciting = False
        at = 0
        while at < end:
            try:
                kind = buf.pull_uint_var()
                if _STREAM <= kind <= _LAST_STREAM:
                    usual = wants_ack = self._stream_frame(buf, kind)
                elif kind == _ACK:
                    usual, wants_ack = self._ack_frame(buf, context.time), False
                else:
                    usual = wants_ack = kind == _DATAGRAM and self._datagram_frame(buf)
            except ValueError:  # the frame is cut short, or acknowledges packet numbers below 0
                usual = wants_ack = False
            if not usual:
                # This frame and the following ones take the long path, which also reports errors.
                return self._engine._payload_received(context, plain[at:])[0] or eliciting
            eliciting = eliciting or wants_ack
            at = buf.tell()
        return eliciting if end else self._engine._payload_received(context, plain)[0]

    def _stream_frame(self, buf: Buffer, kind: int) -> bool:
        """Take the next bytes of a stream; false if they are out of order or beyond a limit. The stream may then have been created."""
        engine = self._engine
        stream_id = buf.pull_uint_var()
        offset = buf.pull_uint_var() if kind & 4 else 0
        length = buf.pull_uint_var() if kind & 2 else buf.capacity - buf.tell()
        fin = bool(kind & 1)
        stream = engine._streams.get(stream_id)
        if stream is None:
            stream = self._next_stream(stream_id)
            if stream is None:
                return False
        receiver = stream.receiver
        stop = offset + length
        limit = engine._local_max_data
        if (
            offset != receiver._buffer_start
            or receiver.highest_offset != offset
            or receiver.is_finished
            or receiver._final_size is not None
            or stop > stream.max_stream_data_local
            or limit.used + length > limit.value
            or not (length or fin)
        ):
            return False
        data = buf.pull_bytes(length)
        receiver._buffer_start = receiver.highest_offset = stop
        limit.used += length
        if fin:
            receiver._final_size = stop
            receiver.is_finished = True
            engine.ready.receiver_finished(stream)
        engine._events.append(StreamDataReceived(data, fin, stream_id))
        return True

    def _next_stream(self, stream_id: int) -> QuicStream | None:
        """Create the stream that the peer may open next; ``None`` for any other."""
        engine = self._engine
        unidirectional = bool(stream_id & 2)
        limit = engine._local_max_streams_uni if unidirectional else engine._local_max_streams_bidi
        if bool(stream_id & 1) is not engine._is_client or stream_id >> 2 != limit.used or limit.used >= limit.value:
            return None
        limit.used += 1
        stream = engine._streams[stream_id] = make_stream(
            stream_id,
            engine._local_max_stream_data_uni if unidirectional else engine._local_max_stream_data_bidi_remote,
            0 if unidirectional else engine._remote_max_stream_data_bidi_local,
            sends=not unidirectional,
        )
        return stream

    def _ack_frame(self, buf: Buffer, now: float) -> bool:
        engine = self._engine
        loss = engine._loss
        if not loss.peer_completed_address_validation:
            return False
        packets, delay = pull_ack_frame(buf)
        loss.on_ack_received(
            ack_rangeset=packets,
            ack_delay=(delay << engine._remote_ack_delay_exponent) / 1_000_000,
            now=now,
            space=engine.space,
        )
        return True

    def _datagram_frame(self, buf: Buffer) -> bool:
        engine = self._engine
        limit = engine._configuration.max_datagram_frame_size
        start = buf.tell()
        data = buf.pull_bytes(buf.pull_uint_var())
        if limit is None or buf.tell() - start >= limit:
            return False
        engine._events.append(DatagramFrameReceived(data))
        return True
