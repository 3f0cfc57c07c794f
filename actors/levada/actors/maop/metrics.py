"""Metrics by the names of the protocol, as plain numbers: counters, gauges, and histograms that yield quantiles.

What the cores count themselves is read from them when somebody asks, so that it costs an operation nothing. Source: MA-133.
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
"""Distinct content types in labels; the rest is ``other``. Source: MA-133."""
MAX_IDENTITIES: Final = 32
"""Identities in labels: those with the lowest approval index."""
_BOUNDS: Final = tuple(float(f"{m}e{e}") for e in range(-2, 7) for m in (1, 1.5, 2, 3, 5, 7))
"""Upper bounds of buckets, in milliseconds or octets: 10 µs to 2 hours, or 1 octet to 7 MB, each at most half as much again."""


class Histogram:
    """How often which values came, in buckets that grow by half; quantiles are exact to that."""

    __slots__ = ("buckets", "count", "total")

    bounds: Final = _BOUNDS
    """Upper bounds of all buckets but the last, which has none."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        """How many values fell into each bucket, not cumulative."""
        self.count = 0
        """How many there were."""
        self.total = 0.0
        """Their sum."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.buckets[bisect_left(_BOUNDS, value)] += 1
        self.count += 1
        self.total += value

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket that holds this share of the values; 0 without any.

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
    """As the protocol says."""
    kind: Literal["counter", "gauge", "histogram"]
    """How it behaves."""
    label: str
    """Name of its only label; empty if it has none."""
    samples: Mapping[str, float | Histogram]
    """By value of the label; one entry with an empty key without label."""


class Metrics:
    """What one listener, or one client, has counted."""

    def __init__(self) -> None:
        self.handler_latency_ms: dict[int, Histogram] = {}
        """Time from Execute to the answer, by msg_id."""
        self.success_count: Counter[str] = Counter()
        """Successes sent, by content type; those without body under the empty text."""
        self.success_bytes: Counter[str] = Counter()
        """Octets of their bodies."""
        self.upload_latency_ms = Histogram()
        """Time of Messages of the peer, from header to Done."""
        self.streaming_open = 0
        """Bodies of undefined length that the peer is sending."""
        self.streaming_duration_ms = Histogram()
        """How long they took."""
        self.request_latency_ms = Histogram()
        """Time of Requests of ours, until the Response was complete."""
        self.response_fail: Counter[int] = Counter()
        """Requests of ours that failed or were refused, by code."""
        self.rpc_payload_bytes = Histogram()
        """Octets of the bodies of Responses received."""
        self.drain_ms = Histogram()
        """How long connections drained."""
        self.approval_latency_ms = Histogram()
        """From header to Proceed or Refuse."""
        self.approval_indexes: Callable[[], Mapping[str, float]] = dict
        """Gives the share of approvals among all decisions, by identity."""
        self._cores: dict[MaopCore, None] = {}
        self._past: Counter[str] = Counter()
        self._past_denies: Counter[int] = Counter()
        self._past_fails: Counter[int] = Counter()
        self._rates: dict[str, tuple[float, int, float]] = {}

    def add(self, core: MaopCore) -> None:
        """Read the counters of a connection from now on."""
        self._cores[core] = None

    def remove(self, core: MaopCore) -> None:
        """A connection is over; what it counted stays."""
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
        """Return the latencies of one handler."""
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
        """Operations that have not ended, of either side."""
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
        """Return by how much a total grew in a second, since the reading before, one second ago at least."""
        since, before, rate = self._rates.get(name, (now, 0, 0.0))
        if name not in self._rates or now - since >= 1.0:
            rate = (total - before) / (now - since) if now > since else 0.0
            self._rates[name] = (now, total, rate)
        return rate

    def collect(self, now: float = 0.0) -> Iterator[Family]:
        """Yield everything, for an exporter.

        Args:
            now: seconds by a clock that does not go back, for the two metrics per second.
        """
        counted = sum((self._counted(core) for core in self._cores), Counter(self._past))
        denies = self.denies
        confirms, octets = counted["confirms"], counted["octets"]
        codes = {code_name(code): float(number) for code, number in denies.items()}
        # One sample however many clients there are: the stream with the most, of all connections.
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
