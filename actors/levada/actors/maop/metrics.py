"""Metrics by the protocol's names, as plain numbers: counters, gauges, and histograms that yield quantiles.

Counters that the cores keep themselves are read only on request, so they cost an operation nothing. Source: MA-133.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import attrs

from levada.transports.maop import MaopCore, code_name

__all__ = ["Family", "Histogram", "Metrics"]

MAX_CONTENT_TYPES: Final = 32
"""Distinct content types in labels; all others are ``other``. Source: MA-133."""
MAX_IDENTITIES: Final = 32
"""Identities in labels: the ones with the lowest approval index."""
_BOUNDS: Final = tuple(float(f"{m}e{e}") for e in range(-2, 7) for m in (1, 1.5, 2, 3, 5, 7))
"""Upper bounds of buckets, in milliseconds or bytes: 10 µs to 2 hours, or 1 byte to 7 MB. Each is at most half as large again as the last."""


class Histogram:
    """Counts values in buckets that grow by half; quantiles have the same precision."""

    __slots__ = ("buckets", "count", "total")

    bounds: Final = _BOUNDS
    """Upper bounds of all buckets but the last, which has none."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        """The number of values in each bucket, not cumulative."""
        self.count = 0
        """The number of values."""
        self.total = 0.0
        """The sum of the values."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.buckets[bisect_left(_BOUNDS, value)] += 1
        self.count += 1
        self.total += value

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket that holds this share of the values; 0 without values.

        Example:
            >>> h = Histogram()
            >>> for value in range(1, 101): h.observe(value)
            >>> h.quantile(0.5), h.quantile(0.99)
            (50.0, 100.0)
        """
        wanted, seen = share * self.count, 0
        for bound, number in zip((*_BOUNDS, float("inf")), self.buckets, strict=True):
            seen += number
            if seen >= wanted and number:
                return bound
        return 0.0


@attrs.frozen
class Family:
    """One metric with all its labels."""

    name: str
    """The protocol's name for the metric."""
    kind: Literal["counter", "gauge", "histogram"]
    """The kind of metric."""
    label: str
    """Name of the only label; empty without one."""
    samples: Mapping[str, float | Histogram]
    """Values by label; a metric without a label has one entry with an empty key."""


class Metrics:
    """Everything that one listener, or one client, counts."""

    def __init__(self) -> None:
        self.handler_latency_ms: dict[int, Histogram] = {}
        """Time from Execute to the answer, by msg_id."""
        self.success_count: Counter[str] = Counter()
        """Successes sent, by content type; the empty text stands for those without a body."""
        self.success_bytes: Counter[str] = Counter()
        """Bytes of their bodies."""
        self.upload_latency_ms = Histogram()
        """Time of the peer's Messages, from header to Done."""
        self.streaming_open = 0
        """Bodies of undefined length that the peer is sending."""
        self.streaming_duration_ms = Histogram()
        """How long such bodies took."""
        self.request_latency_ms = Histogram()
        """Time of this side's Requests, until the Response was complete."""
        self.response_fail: Counter[int] = Counter()
        """This side's Requests that failed or were refused, by code."""
        self.rpc_payload_bytes = Histogram()
        """Bytes in the bodies of received Responses."""
        self.drain_ms = Histogram()
        """How long connections drained."""
        self.approval_latency_ms = Histogram()
        """Time from header to Proceed or Refuse."""
        self.approval_indexes: Callable[[], Mapping[str, float]] = dict
        """Returns approvals as a fraction of all decisions, by identity."""
        self._cores: dict[MaopCore, None] = {}
        self._past: Counter[str] = Counter()
        self._past_denies: Counter[int] = Counter()
        self._past_fails: Counter[int] = Counter()
        self._rates: dict[str, tuple[float, int, float]] = {}

    def add(self, core: MaopCore) -> None:
        """Read the counters of a connection from now on."""
        self._cores[core] = None

    def remove(self, core: MaopCore) -> None:
        """Stop reading an ended connection, and keep its counts."""
        if core in self._cores:
            del self._cores[core]
            self._past += self._counted(core)
            self._past_denies += core.statistic.refused
            self._past_fails += core.statistic.failed

    @staticmethod
    def _counted(core: MaopCore) -> Counter[str]:
        statistic = core.statistic
        return Counter(
            confirms=statistic.approved,
            octets=statistic.block_octets,
            aborted=statistic.streams_aborted,
            unacked=statistic.responses_unacked,
            late=core.signals.late,
            invalid=statistic.invalid_content_types,
        )

    def histogram(self, msg_id: int) -> Histogram:
        """Return the latency histogram of one handler."""
        found = self.handler_latency_ms.get(msg_id)
        if found is None:
            found = self.handler_latency_ms[msg_id] = Histogram()
        return found

    def succeeded(self, content_type: str | None, octets: int) -> None:
        """Count a Success that was sent."""
        kind = content_type or ""
        if kind not in self.success_count and len(self.success_count) >= MAX_CONTENT_TYPES:
            kind = "other"
        self.success_count[kind] += 1
        self.success_bytes[kind] += octets

    @property
    def ops_inflight(self) -> int:
        """Operations of either side that have not ended."""
        return sum(core.operations for core in self._cores)

    @property
    def confirms_total(self) -> int:
        """Operations of peers that were approved."""
        return self._past["confirms"] + sum(core.statistic.approved for core in self._cores)

    @property
    def denies(self) -> Counter[int]:
        """Operations of peers that were refused, by code."""
        return sum((core.statistic.refused for core in self._cores), Counter(self._past_denies))

    @property
    def fails(self) -> Counter[int]:
        """Fails sent and received, by code."""
        return sum((core.statistic.failed for core in self._cores), Counter(self._past_fails))

    def rate(self, name: str, total: int, now: float) -> float:
        """Return the growth of a total per second, since a previous reading at least one second ago."""
        since, before, rate = self._rates.get(name, (now, 0, 0.0))
        if name not in self._rates or now - since >= 1.0:
            rate = (total - before) / (now - since) if now > since else 0.0
            self._rates[name] = (now, total, rate)
        return rate

    def collect(self, now: float = 0.0) -> Iterator[Family]:
        """Yield everything, for an exporter.

        Args:
            now: seconds by a monotonic clock, for the two per-second metrics.
        """
        counted = sum((self._counted(core) for core in self._cores), Counter(self._past))
        denies = self.denies
        confirms, octets = counted["confirms"], counted["octets"]
        codes = {code_name(code): float(number) for code, number in denies.items()}
        # One sample for any number of clients: the fullest stream of all connections.
        backlog = {"fullest": float(max((core.pool.backlog for core in self._cores), default=0))}
        yield Family("ops_inflight", "gauge", "", {"": float(self.ops_inflight)})
        yield Family("confirms_total", "counter", "", {"": float(confirms)})
        yield Family("denies_total", "counter", "reason", codes)
        yield Family("blocks_rx_bytes_total", "counter", "", {"": float(octets)})
        latencies = {str(msg_id): histogram for msg_id, histogram in self.handler_latency_ms.items()}
        yield Family("handler_latency_ms", "histogram", "msg_id", latencies)
        yield Family("maop_success_count_total", "counter", "", {"": float(self.success_count.total())})
        yield Family("maop_success_bytes_total", "counter", "content_type", dict(self.success_bytes))
        yield Family("maop_invalid_content_type_total", "counter", "", {"": float(counted["invalid"])})
        yield Family("maop_blocks_rx_bytes_total", "counter", "", {"": float(octets)})
        yield Family("maop_upload_latency_ms", "histogram", "", {"": self.upload_latency_ms})
        yield Family("maop_confirms_per_sec", "gauge", "", {"": self.rate("confirms", confirms, now)})
        yield Family("maop_denies_per_sec", "gauge", "", {"": self.rate("denies", denies.total(), now)})
        yield Family("maop_streaming_sessions_open", "gauge", "", {"": float(self.streaming_open)})
        yield Family("maop_streaming_duration_ms", "histogram", "", {"": self.streaming_duration_ms})
        yield Family("maop_denies_policy_undefined_length_total", "counter", "", {"": float(denies[15])})
        yield Family("maop_request_latency_ms", "histogram", "", {"": self.request_latency_ms})
        fails = {code_name(code): float(number) for code, number in self.response_fail.items()}
        yield Family("maop_response_fail_total", "counter", "error_code", fails)
        yield Family("maop_rpc_payload_bytes", "histogram", "", {"": self.rpc_payload_bytes})
        yield Family("maop_control_backlog", "gauge", "stream", backlog)
        yield Family("maop_late_signals_total", "counter", "", {"": float(counted["late"])})
        yield Family("maop_response_unacked_total", "counter", "", {"": float(counted["unacked"])})
        yield Family("maop_drain_ms", "histogram", "", {"": self.drain_ms})
        yield Family("maop_streams_aborted_total", "counter", "", {"": float(counted["aborted"])})
        every = {code_name(code): float(number) for code, number in self.fails.items()}
        yield Family("maop_fail_total", "counter", "error_code", every)
        yield Family("maop_approval_latency_ms", "histogram", "", {"": self.approval_latency_ms})
        indexes = self.approval_indexes()
        lowest = heapq.nsmallest(MAX_IDENTITIES, indexes, key=indexes.__getitem__)
        yield Family("maop_approval_index", "gauge", "identity", {name: indexes[name] for name in lowest})
