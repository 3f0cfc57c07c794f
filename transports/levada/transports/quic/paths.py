"""What belongs to the path of a connection's packets: their size, which `MtuSearch` finds, and the proof of the peer's address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import QuicConnectionState, QuicNetworkPath
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder

from .pmtu import MtuSearch

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["PresentPath"]


class PresentPath:
    """The path that an engine's packets take: its packet size, and the challenge of its address.

    Args:
        engine: sends the probes.
        base: bytes that each path is assumed to carry.
        ceiling: most bytes to probe for.
    """

    def __init__(self, engine: Engine, base: int, ceiling: int):
        self._engine = engine
        self.search = MtuSearch(base, ceiling)
        """The search for the packet size."""
        self._challenge_at = 0.0  # when an unvalidated address may be challenged again

    def changed(self, *, afresh: bool) -> None:
        """Record that packets take another path from now on; `afresh` if more than the peer's port may have changed."""
        engine, loss = self._engine, self._engine._loss
        # Losses on the old path must not delay the probes of the new one: after seven unanswered probes, the next would come long after the
        # time for address validation is over.
        loss._pto_count = 0
        self._challenge_at = 0.0
        self.search = MtuSearch(self.search.base, self.search.ceiling)
        self._use()
        if afresh:
            loss.start_afresh(engine._packet_number, size=self.search.size)

    def challenge_again(self, path: QuicNetworkPath, now: float) -> None:
        """Challenge an unvalidated address again when there is data to send there, at most once in a round trip.

        aioquic repeats a challenge once it counts as lost, which takes an acknowledgement of later data. A peer that has nothing to send and
        received only acknowledgements never sends one: it waits for data that goes to its old address.
        """
        if not path.is_validated and now >= self._challenge_at:
            engine = self._engine
            path.local_challenge_sent = False
            # A congestion window full of packets to the old address must not hold the challenge back.
            engine._probe_pending = True
            self._challenge_at = now + (engine._loss._rtt_smoothed or engine._configuration.initial_rtt)

    def limit(self, size: int) -> None:
        """Send and probe at most the `size` that the peer accepts."""
        self.search.limit(size, 0.0)
        if self.search.size < self._engine._max_datagram_size:
            self._use()

    def probe(self, now: float) -> list[tuple[bytes, Any]]:
        """Return a probe if one is due."""
        engine = self._engine
        if (
            not engine._handshake_confirmed
            or engine._state is not QuicConnectionState.CONNECTED
            or not engine._network_paths[0].is_validated
        ):
            return []
        size = self.search.probe(now)
        if not size:
            return []
        builder = QuicPacketBuilder(
            host_cid=engine.host_cid,
            is_client=engine._is_client,
            max_datagram_size=size,
            packet_number=engine._packet_number,
            peer_cid=engine._peer_cid.cid,
            spin_bit=engine._spin_bit,
            version=engine._version or 0,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, engine._crypto)
        buf = builder.start_frame(QuicFrameType.PING, 1, self._delivered, (self.search, size))
        buf.push_bytes(bytes(builder.remaining_buffer_space))
        assert builder._packet is not None
        # The congestion controller does not count a probe as in flight: its loss says nothing about congestion (RFC 8899 section 3).
        builder._packet.in_flight = False
        engine._loss._time_of_last_sent_ack_eliciting_packet = now
        return engine._flush_builder(
            builder=builder, network_path=engine._network_paths[0], peer_cid=engine._peer_cid.cid, now=now
        )

    def _delivered(self, delivery: QuicDeliveryState, search: MtuSearch, size: int) -> None:
        if delivery is QuicDeliveryState.ACKED:
            search.acked(size, self._engine.now)
            self._use()
        else:
            search.lost(size, self._engine.now)

    def large_acked(self) -> None:
        """Record that a packet above the base size arrived."""
        self.search.large_acked()

    def large_lost(self) -> None:
        """Record that a packet above the base size was lost."""
        if self.search.large_lost(self._engine.now):
            self._use()

    def nothing_arrives(self, now: float) -> None:
        """Return to the base size: a path that drops every large packet drops the loss probes too, since they carry data."""
        if self.search.size > self.search.base:
            self.search.fall_back(now)
            self._use()

    def _use(self) -> None:
        engine, size = self._engine, self.search.size
        engine._max_datagram_size = engine._loss._pacer._max_datagram_size = engine._loss._cc._max_datagram_size = size
