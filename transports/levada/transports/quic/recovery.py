"""Loss detection and pacing: aioquic's rules (RFC 9002) at a third of their cost, with another pacer.

**Reordering.** A packet counts as lost once a packet three numbers above it has been acknowledged, or once a later packet has been
acknowledged and it was sent 9/8 of a round trip ago. On a path that reorders, such packets arrive all the same: their loss was *spurious*.
A lost packet is remembered for three probe timeouts after it was sent. If its acknowledgement still comes:

- from then on time alone decides that a packet is lost, and the time grows to what the late packet took (RFC 9002 section 6.1; RFC 8985,
  RACK);
- once all losses that caused a window cut have proved spurious, the cut is undone. The pacer spreads the packets that may then be sent.

After 16 cuts without a spurious loss, the original thresholds apply again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import (
    K_MICRO_SECOND,
    K_PACKET_THRESHOLD,
    K_SECOND,
    K_TIME_THRESHOLD,
    QuicPacketPacer,
    QuicPacketRecovery,
    QuicPacketSpace,
)

from .congestion import Reno, make_controller

__all__ = ["BurstPacer", "LeanRecovery", "narrowed"]

_ACKED = QuicDeliveryState.ACKED
_SHORTEST_ROUND_TRIP = 0.001  # seconds; aioquic measures none shorter
_ORDERLY_AFTER = 16  # cuts without a spurious loss


class BurstPacer(QuicPacketPacer):
    """Sends bursts of about 2 ms at 1.25 times the rate, 10 to 64 packets: an event loop wakes once a millisecond at best.

    aioquic's own pacer stops after 16 packets, which gave 3.2 packets per flush.
    """

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Adapt to a congestion window in bytes and a round-trip time in seconds."""
        size = self._max_datagram_size
        rate = 1.25 * congestion_window / max(smoothed_rtt, K_MICRO_SECOND)
        self.packet_time = max(K_MICRO_SECOND, min(size / rate, K_SECOND))
        self.bucket_max = min(max(10 * size, rate * 0.002), 64 * size) / rate
        if self.bucket_time > self.bucket_max:
            self.bucket_time = self.bucket_max


class LeanRecovery(QuicPacketRecovery):
    """aioquic's recovery, but visiting only the packets that an acknowledgement names; aioquic visits all in flight, four times."""

    _cc: Reno
    _first_on_path = 0  # packets with lower numbers took another path and say nothing about this one

    def __init__(self, *, congestion_control_algorithm: str, max_datagram_size: int, **rest: Any) -> None:
        super().__init__(
            congestion_control_algorithm=congestion_control_algorithm, max_datagram_size=max_datagram_size, **rest
        )
        self._algorithm = congestion_control_algorithm
        self._begin_path(max_datagram_size)

    def _begin_path(self, size: int) -> None:
        self._cc = make_controller(self._algorithm, max_datagram_size=size)
        self._pacer = BurstPacer(max_datagram_size=size)
        self._lateness = 0.0  # seconds beyond a round trip that packets may take; 0 until one was late
        self._given_up: dict[int, tuple[float, float]] = {}  # lost 1-RTT packets: when sent, and the time of their cut
        self._cut_losses = 0  # packets that caused the last cut and have not arrived
        self._cuts = 0  # since the last spurious loss

    def start_afresh(self, packet_number: int, *, size: int) -> None:
        """Forget round-trip time and congestion window, since packets take another path (RFC 9000 section 9.4).

        Args:
            packet_number: number of the first packet on the new path.
            size: largest UDP payload in bytes.
        """
        self._first_on_path = packet_number
        self._rtt_initialized = False
        self._rtt_latest = self._rtt_smoothed = self._rtt_variance = 0.0
        self._rtt_min = math.inf
        for space in self.spaces:
            for packet in space.sent_packets.values():
                packet.in_flight = False
        self._begin_path(size)

    def on_ack_received(self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace) -> None:
        """Handle an ACK frame: forget its packets, measure the round trip (RFC 9002 section 5), detect losses (section 6)."""
        sent = space.sent_packets
        largest = ack_rangeset[-1].stop - 1
        if largest > space.largest_acked_packet:
            space.largest_acked_packet = largest
        if self._given_up and space.is_application_data:
            self._look_for_spurious_losses(ack_rangeset, now)
        if not sent:
            return
        control = self._cc
        newest = None
        eliciting = False
        for numbers in narrowed(ack_rangeset, sent):
            for number in numbers:
                packet = sent.pop(number, None)
                if packet is None:
                    continue
                newest = packet
                if packet.is_ack_eliciting:
                    eliciting = True
                    space.ack_eliciting_in_flight -= 1
                if packet.in_flight:
                    control.on_packet_acked(packet=packet, now=now)
                for handler, arguments in packet.delivery_handlers:
                    handler(_ACKED, *arguments)
        if newest is None:
            return
        if newest.packet_number == largest >= self._first_on_path and eliciting:
            assert newest.sent_time is not None
            self._round_trip_measured(now - newest.sent_time, min(ack_delay, self.max_ack_delay), now)
        if sent and next(iter(sent)) <= space.largest_acked_packet:
            self._detect_loss(now=now, space=space)
        else:
            space.loss_time = None
        if self.peer_completed_address_validation:
            self._pto_count = 0

    def _round_trip_measured(self, measured: float, ack_delay: float, now: float) -> None:
        """Take a sample (RFC 9002 section 5.3). aioquic compares it with the shortest one, so a queue on the path looks like variance."""
        latest = self._rtt_latest = max(measured, _SHORTEST_ROUND_TRIP)
        if latest < self._rtt_min:
            self._rtt_min = latest
        adjusted = latest - ack_delay if latest >= self._rtt_min + ack_delay else latest
        if self._rtt_initialized:
            # In the order of appendix A.7: the variance is measured against the mean before this sample.
            self._rtt_variance = 0.75 * self._rtt_variance + 0.25 * abs(self._rtt_smoothed - adjusted)
            self._rtt_smoothed = 0.875 * self._rtt_smoothed + 0.125 * adjusted
        else:
            self._rtt_first_sample_time = now
            self._rtt_initialized = True
            self._rtt_variance = measured / 2
            self._rtt_smoothed = measured
        self._cc.on_rtt_measurement(now=now, rtt=measured)
        self._pacer.update_rate(congestion_window=self._cc.congestion_window, smoothed_rtt=self._rtt_smoothed)

    def _detect_loss(self, *, now: float, space: QuicPacketSpace) -> None:
        """Give up packets that acknowledged ones have overtaken, by number or time, and set the timer for the next one.

        aioquic has fixed thresholds and looks at all packets in flight.
        """
        round_trip = self._round_trip()
        patience = max(K_TIME_THRESHOLD * round_trip, round_trip + self._lateness)
        overtaken = -1 if self._lateness else space.largest_acked_packet - K_PACKET_THRESHOLD
        lost = []
        space.loss_time = None
        for number, packet in space.sent_packets.items():
            if number > space.largest_acked_packet:
                break
            at = (packet.sent_time or 0.0) + patience
            if number > overtaken and at > now:
                space.loss_time = at  # the later ones were sent later
                break
            lost.append(packet)
        if lost:
            self._give_up(lost, now, space)

    def _give_up(self, lost: list[QuicSentPacket], now: float, space: QuicPacketSpace) -> None:
        control = self._cc
        cut_at = control.cut_at
        persistent = self._in_persistent_congestion(packets=lost)
        self._on_packets_lost(now=now, packets=lost, persistent_congestion=persistent, space=space)
        if persistent:
            self._rtt_min = self._rtt_latest  # RFC 9002 section 5.2: the path may be a longer one now
        if control.cut_at != cut_at:
            self._cut_losses = 0
            self._cuts += 1
            if self._cuts > _ORDERLY_AFTER:
                self._lateness = 0.0
        if space.is_application_data:
            given_up, forgotten = self._given_up, now - 3 * self.get_probe_timeout()
            while given_up and next(iter(given_up.values()))[0] < forgotten:
                del given_up[next(iter(given_up))]
            for packet in lost:
                if packet.in_flight:
                    self._cut_losses += 1
                    given_up[packet.packet_number] = (packet.sent_time or 0.0, control.cut_at)

    def _look_for_spurious_losses(self, acked: RangeSet, now: float) -> None:
        """Find packets that were given up and have arrived after all, and adapt."""
        given_up = self._given_up
        starts = [numbers.start for numbers in acked]
        late = [number for number in given_up if number in acked[bisect_right(starts, number) - 1]]
        round_trip, control = self._round_trip(), self._cc
        for number in late:
            sent_at, cut_at = given_up.pop(number)
            self._cuts = 0
            # A quarter more than measured, since the next packet may be later still; bounded by the round trip, as in RFC 8985 section 6.2.
            lateness = max(1.25 * (now - sent_at - round_trip), round_trip / 4)
            self._lateness = min(max(self._lateness, lateness), 1.25 * round_trip)
            if cut_at == control.cut_at:
                self._cut_losses -= 1
                if not self._cut_losses:
                    control.undo()
                    self._pacer.update_rate(control.congestion_window, self._rtt_smoothed)

    def _round_trip(self) -> float:
        return max(self._rtt_latest, self._rtt_smoothed) if self._rtt_initialized else self._rtt_initial


def narrowed(ranges: RangeSet, sent: dict[int, QuicSentPacket]) -> Iterable[Iterable[int]]:
    """Narrow a peer's ranges, however long, to numbers that may be in flight; keep their order."""
    oldest, beyond = next(iter(sent)), next(reversed(sent)) + 1
    if beyond - oldest <= 2 * len(sent) + 64:
        return [range(max(numbers.start, oldest), min(numbers.stop, beyond)) for numbers in ranges]
    # A few packets are late, and thousands of later ones have been acknowledged.
    left = list(sent)
    return [left[bisect_left(left, numbers.start) : bisect_left(left, numbers.stop)] for numbers in ranges]
