"""How fast packets leave."""

from __future__ import annotations

from aioquic.quic.recovery import K_MICRO_SECOND, K_SECOND, QuicPacketPacer

__all__ = ["BurstPacer"]


class BurstPacer(QuicPacketPacer):
    """Bursts of about 2 ms at 1.25 times the rate, 10 to 64 packets: an event loop wakes once a millisecond at best.

    aioquic's own holds back after 16 packets, which measured 3.2 packets for each flush.
    """

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Take the congestion window in octets and the round trip in seconds."""
        size = self._max_datagram_size
        rate = 1.25 * congestion_window / max(smoothed_rtt, K_MICRO_SECOND)
        self.packet_time = max(K_MICRO_SECOND, min(size / rate, K_SECOND))
        self.bucket_max = min(max(10 * size, rate * 0.002), 64 * size) / rate
        if self.bucket_time > self.bucket_max:
            self.bucket_time = self.bucket_max
