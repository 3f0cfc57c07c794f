"""Congestion control: NewReno (RFC 9002) and CUBIC (RFC 9438), instead of aioquic's two controllers.

aioquic's controllers cut the window to a share of the bytes that happen to be in flight, grow it while it is unused, and cannot undo a cut.
Here:

- a **cut** reduces the window itself, once for all packets sent before the cut;
- the window **grows** only while packets fill it, so that an idle connection earns no burst;
- `undo` reverts the last cut once all packets whose loss caused it have arrived after all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from aioquic.quic.congestion.base import K_INITIAL_WINDOW, K_MINIMUM_WINDOW, QuicCongestionControl, QuicRttMonitor
from aioquic.quic.packet_builder import QuicSentPacket

__all__ = ["Cubic", "Reno", "make_controller"]

_NEARLY_FULL = 3  # packets; with room for fewer, the window counts as full
_IDLE = 2.0  # seconds after which an unused window says nothing about the path any more


class Reno(QuicCongestionControl):
    """The controller of RFC 9002, and the parts that CUBIC shares with it."""

    beta = 0.5
    """Share of the window that remains after a cut."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._max_datagram_size = max_datagram_size
        self.ssthresh: int | None = None
        self._monitor = QuicRttMonitor()
        self._full_at = -math.inf  # when a packet last filled the window
        self._acked_at = math.inf
        self._credit = 0.0  # bytes acknowledged in congestion avoidance that have not yet raised the window
        self.cut_at = -math.inf
        """When the window was last cut; the loss of packets sent earlier causes no further cut."""
        self._before: dict[str, Any] | None = None
        self._held_back = 0  # bytes sent before the cut and acknowledged since, which have not raised the window

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        """Count a packet as in flight."""
        now = packet.sent_time or 0.0
        if not self.bytes_in_flight and now - self._acked_at > _IDLE:
            self._restart()
        self.bytes_in_flight = flight = self.bytes_in_flight + packet.sent_bytes
        window = self.congestion_window
        if flight + _NEARLY_FULL * self._max_datagram_size > window or (
            self._is_in_slow_start() and 2 * flight > window
        ):
            self._full_at = now

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """Count a packet as received."""
        size = packet.sent_bytes
        sent = packet.sent_time or 0.0
        self.bytes_in_flight -= size
        self._acked_at = now
        if sent <= self.cut_at:
            self._held_back += size
            return
        if sent > self._full_at:
            self._not_limited()
        elif self._is_in_slow_start():
            self.congestion_window += size
        else:
            self._avoid(size, now)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Stop counting packets as in flight, without counting them as lost."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Count packets as lost, and cut the window if one was sent after the last cut."""
        latest = -math.inf
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            latest = max(latest, packet.sent_time or 0.0)
        if latest > self.cut_at:
            self._before = {name: getattr(self, name) for name in self._restored}
            self.cut_at = now
            self._held_back = 0
            self._cut()

    def on_persistent_congestion(self) -> None:
        """Restart from the smallest window: all packets of three probe timeouts were lost."""
        self.congestion_window = K_MINIMUM_WINDOW * self._max_datagram_size
        self.cut_at = -math.inf

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Leave slow start when the round trip grows (HyStart)."""
        if self.ssthresh is None and self._monitor.is_rtt_increasing(now=now, rtt=rtt):
            self.ssthresh = self.congestion_window

    def undo(self) -> None:
        """Undo the last cut, since no packet was lost."""
        before, self._before = self._before, None
        if before is not None:
            window = self.congestion_window
            for name, value in before.items():
                setattr(self, name, value)
            if self._is_in_slow_start():
                self.congestion_window += self._held_back
            self.congestion_window = max(self.congestion_window, window)

    _restored: tuple[str, ...] = ("congestion_window", "ssthresh", "cut_at", "_credit")

    def _is_in_slow_start(self) -> bool:
        return self.ssthresh is None or self.congestion_window < self.ssthresh

    def _restart(self) -> None:
        self.congestion_window = min(self.congestion_window, K_INITIAL_WINDOW * self._max_datagram_size)
        self.ssthresh = None

    def _not_limited(self) -> None:
        pass

    def _cut(self) -> None:
        smallest = K_MINIMUM_WINDOW * self._max_datagram_size
        self.congestion_window = self.ssthresh = max(int(self.beta * self.congestion_window), smallest)

    def _avoid(self, size: int, now: float) -> None:
        self._credit += size
        if self._credit >= self.congestion_window:
            self._credit -= self.congestion_window
            self.congestion_window += self._max_datagram_size


class Cubic(Reno):
    """The controller of RFC 9438."""

    beta = 0.7
    _scale = 0.4  # C, in packets per second cubed

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._top = 0.0  # W_max, bytes
        self._epoch: float | None = None  # when congestion avoidance began
        self._rise = 0.0  # K, seconds from the epoch until the window reaches the top again
        self._estimate = 0.0  # W_est, Reno's window
        self._round_trip = 0.0

    _restored = (*Reno._restored, "_top", "_epoch", "_rise", "_estimate")

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Leave slow start when the round trip grows (HyStart)."""
        self._round_trip = rtt
        super().on_rtt_measurement(now=now, rtt=rtt)

    def _restart(self) -> None:
        super()._restart()
        self._top, self._epoch = 0.0, None

    def _not_limited(self) -> None:
        self._epoch = None  # time in which the window was not full must not count for its growth

    def _cut(self) -> None:
        window = self.congestion_window
        # Fast convergence: a flow whose window has not reached the old top leaves room for others.
        self._top = window * (1 + self.beta) / 2 if window < self._top else window
        self._epoch = None
        super()._cut()

    def _avoid(self, size: int, now: float) -> None:
        window, packet = self.congestion_window, self._max_datagram_size
        if self._epoch is None:
            self._epoch = now
            self._estimate = window
            self._rise = math.cbrt(max(self._top - window, 0.0) / packet / self._scale)
            self._top = max(self._top, window)
        elapsed = now - self._epoch
        # One packet per round trip, as in quic-go. RFC 9438 has 0.53 packets until the window is as large as before the cut, which makes a flow
        # no faster than Reno's: at 5 % loss, 4 MiB then take 12 s instead of 9 s.
        self._estimate += packet * size / window
        if self._top + self._scale * (elapsed - self._rise) ** 3 * packet < self._estimate:
            self.congestion_window = max(window, int(self._estimate))
            return
        target = self._top + self._scale * (elapsed + self._round_trip - self._rise) ** 3 * packet
        self._credit += (min(max(target, window), 1.5 * window) - window) * size / window
        grown = int(self._credit)
        self._credit -= grown
        self.congestion_window = window + grown


def make_controller(algorithm: str, *, max_datagram_size: int) -> Reno:
    """Return the controller of the configured algorithm."""
    return (Cubic if algorithm == "cubic" else Reno)(max_datagram_size=max_datagram_size)
