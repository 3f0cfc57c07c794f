"""Metrics by the protocol's names, as plain numbers: counters, gauges, and histograms that yield quantiles.

Counters that the cores keep themselves are read only on request, so they cost an operation nothing. Source: MA-133.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from levada.framework import Distribution, Metric, Sample
from levada.transports.maop import ErrorCode, MaopCore, code_name

__all__ = ["NAMES", "Histogram", "Metrics"]

MAX_CONTENT_TYPES: Final = 32
"""Distinct content types in labels; all others are ``other``. Source: MA-133."""
_NAMED: Final = frozenset(ErrorCode)
MAX_OWN_CODES: Final = 64
"""Codes of applications in labels, the lowest ones; all others are ``other``."""
_BOUNDS: Final = tuple(float(f"{m}e{e}") for e in range(-2, 7) for m in (1, 1.5, 2, 3, 5, 7))
"""Upper bounds of buckets, in milliseconds or bytes: 10 µs to 2 hours, or 1 byte to 7 MB. Each is at most half as large again as the last."""


class Histogram:
    """Counts values in buckets that grow by half; quantiles have the same precision."""

    __slots__ = ("buckets", "total")

    bounds: Final = _BOUNDS
    """Upper bounds of all buckets but the last, which has none."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        """The number of values in each bucket, not cumulative."""
        self.total = 0.0
        """The sum of the values."""

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.buckets)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.buckets[bisect_left(_BOUNDS, value)] += 1
        self.total += value

    def distribution(self) -> Distribution:
        """Return the counts as an exporter takes them."""
        return Distribution(_BOUNDS, tuple(self.buckets), self.total)

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


class Metrics:
    """Everything that one listener, or one client, counts."""

    def __init__(self) -> None:
        self.handler_latency_ms: defaultdict[int, Histogram] = defaultdict(Histogram)
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
            octets=statistic.block_bytes,
            aborted=statistic.streams_aborted,
            unacked=statistic.responses_unacked,
            late=core.signals.late,
            invalid=statistic.invalid_content_types,
        )

    def succeeded(self, content_type: str | None, size: int) -> None:
        """Count a Success that was sent."""
        kind = content_type or ""
        if kind not in self.success_count and len(self.success_count) >= MAX_CONTENT_TYPES:
            kind = "other"
        self.success_count[kind] += 1
        self.success_bytes[kind] += size

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

    def samples(self, now: float = 0.0) -> Iterator[Sample]:
        """Yield everything, for an exporter.

        Args:
            now: seconds by a monotonic clock, for the two per-second metrics.
        """
        for name, label, value in self._values(now):
            yield _METRICS[name].sample(value.distribution() if isinstance(value, Histogram) else value, *label)

    def _values(self, now: float) -> Iterator[tuple[str, tuple[str, ...], float | Histogram]]:
        counted = sum((self._counted(core) for core in self._cores), Counter(self._past))
        denies = self.denies
        indexes = self.approval_indexes().values()
        alone: dict[str, float | Histogram] = {
            "ops_inflight": self.ops_inflight,
            "confirms_total": counted["confirms"],
            "blocks_rx_bytes_total": counted["octets"],
            "maop_success_count_total": self.success_count.total(),
            "maop_invalid_content_type_total": counted["invalid"],
            "maop_blocks_rx_bytes_total": counted["octets"],
            "maop_upload_latency_ms": self.upload_latency_ms,
            "maop_confirms_per_sec": self.rate("confirms", counted["confirms"], now),
            "maop_denies_per_sec": self.rate("denies", denies.total(), now),
            "maop_streaming_sessions_open": self.streaming_open,
            "maop_streaming_duration_ms": self.streaming_duration_ms,
            "maop_denies_policy_undefined_length_total": denies[15],
            "maop_request_latency_ms": self.request_latency_ms,
            "maop_rpc_payload_bytes": self.rpc_payload_bytes,
            "maop_late_signals_total": counted["late"],
            "maop_response_unacked_total": counted["unacked"],
            "maop_drain_ms": self.drain_ms,
            "maop_streams_aborted_total": counted["aborted"],
            "maop_approval_latency_ms": self.approval_latency_ms,
            **({"maop_approval_index": min(indexes)} if indexes else {}),
        }
        for name, value in alone.items():
            yield name, (), value
        # One sample for any number of clients: the fullest stream of all connections.
        yield "maop_control_backlog", ("fullest",), max((core.pool.backlog for core in self._cores), default=0)
        for reason, number in _by_reason(denies):
            yield "denies_total", (reason,), number
        for reason, number in _by_reason(self.response_fail):
            yield "maop_response_fail_total", (reason,), number
        for reason, number in _by_reason(self.fails):
            yield "maop_fail_total", (reason,), number
        for kind, size in self.success_bytes.items():
            yield "maop_success_bytes_total", (kind,), size
        for msg_id, histogram in self.handler_latency_ms.items():
            yield "handler_latency_ms", (str(msg_id),), histogram


def _by_reason(counts: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """Name the codes; a peer may choose among 65,536, so only the first of those without a name have labels of their own."""
    own = sorted(code for code in counts if code not in _NAMED)
    others = set(own[MAX_OWN_CODES:])
    for code, number in counts.items():
        if code not in others:
            yield code_name(code), number
    if others:
        yield "other", sum(counts[code] for code in others)


_METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric("ops_inflight", "gauge", "Operations that have not ended, of either side."),
        Metric("confirms_total", "counter", "Operations of peers that were approved."),
        Metric("denies_total", "counter", "Operations of peers that were refused.", ("reason",)),
        Metric("blocks_rx_bytes_total", "counter", "Bytes received on streams of operations."),
        Metric("handler_latency_ms", "histogram", "From the start of a handler to its answer.", ("msg_id",)),
        Metric("maop_success_count_total", "counter", "Successes that were sent."),
        Metric("maop_success_bytes_total", "counter", "Bytes of the bodies of Successes sent.", ("content_type",)),
        Metric("maop_invalid_content_type_total", "counter", "Successes received with a header that is none."),
        Metric("maop_blocks_rx_bytes_total", "counter", "Bytes received on streams of operations."),
        Metric("maop_upload_latency_ms", "histogram", "Messages of peers, from header to Done."),
        Metric("maop_confirms_per_sec", "gauge", "Approvals in a second."),
        Metric("maop_denies_per_sec", "gauge", "Refusals in a second."),
        Metric("maop_streaming_sessions_open", "gauge", "Bodies of undefined length that are coming in."),
        Metric("maop_streaming_duration_ms", "histogram", "How long bodies of undefined length took to come in."),
        Metric(
            "maop_denies_policy_undefined_length_total", "counter", "Operations refused for their undefined length."
        ),
        Metric("maop_request_latency_ms", "histogram", "Requests of this side, until the Response was complete."),
        Metric(
            "maop_response_fail_total", "counter", "Requests of this side that failed or were refused.", ("error_code",)
        ),
        Metric("maop_rpc_payload_bytes", "histogram", "Bytes of the bodies of Responses received."),
        Metric(
            "maop_control_backlog",
            "gauge",
            "Signals that wait on the fullest control stream of all connections.",
            ("stream",),
            combine="max",
        ),
        Metric("maop_late_signals_total", "counter", "Signals for operations that had ended or were unknown."),
        Metric("maop_response_unacked_total", "counter", "Responses whose requester did not say whether it used them."),
        Metric("maop_drain_ms", "histogram", "How long connections drained."),
        Metric("maop_streams_aborted_total", "counter", "Streams that peers have reset."),
        Metric("maop_fail_total", "counter", "Fails sent and received.", ("error_code",)),
        Metric("maop_approval_latency_ms", "histogram", "From the header of an operation to Proceed or Refuse."),
        Metric(
            "maop_approval_index",
            "gauge",
            "Share of approvals among all decisions, of the identity with the lowest.",
            combine="min",
        ),
    )
}
"""By the names that the protocol gives them, which have no prefix and count milliseconds. Source: MA-133."""

NAMES: Final = frozenset(_METRICS)
"""Of all metrics."""
