"""Metrics of MAOP for Prometheus. Needs the extra: ``pip install 'levada[prometheus]'``.

Call ``prometheus_client.REGISTRY.register(MaopCollector(listener.metrics))``, then serve the registry, for example with
``start_http_server(9100)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import trio

try:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "levada.actors.maop.prometheus needs prometheus-client: pip install 'levada[prometheus]'",
        name="prometheus_client",
    ) from error

from .metrics import Family, Histogram, Metrics

__all__ = ["MaopCollector"]


class MaopCollector(Collector):
    """Gives a registry the protocol's metrics, under the protocol's names.

    Make it inside `trio.run`. The metrics belong to that thread, so a scrape from another thread, as by ``start_http_server``, is passed to
    it. After `trio.run` has ended there are no metrics.

    Args:
        metrics: of one listener or client, or a mapping from names to several, with the names in the label ``source``.

    Source: MA-133.
    """

    def __init__(self, metrics: Metrics | Mapping[str, Metrics]) -> None:
        self._sources = {"": metrics} if isinstance(metrics, Metrics) else dict(metrics)
        self._labels = [] if isinstance(metrics, Metrics) else ["source"]
        self._trio = trio.lowlevel.current_trio_token()

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as of one moment. The registry calls this, in any thread that does not run another `trio.run`."""
        if trio.lowlevel.in_trio_run():
            return iter(self._collect())
        try:
            return iter(trio.from_thread.run_sync(self._collect, trio_token=self._trio))
        except trio.RunFinishedError:
            return iter(())

    def _collect(self) -> list[Metric]:
        now = trio.current_time()
        found: dict[str, Metric] = {}
        for source, metrics in self._sources.items():
            for family in metrics.collect(now):
                metric = found.get(family.name)
                if metric is None:
                    metric = found[family.name] = self._metric(family)
                for value, sample in family.samples.items():
                    labels = [source] if self._labels else []
                    _add(metric, [*labels, value] if family.label else labels, sample)
        return list(found.values())

    def _metric(self, family: Family) -> Metric:
        labels = [*self._labels, family.label] if family.label else self._labels
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        made: Metric = kinds[family.kind](family.name, _HELP.get(family.name, family.name), labels=labels)
        return made


def _add(metric: Metric, labels: list[str], sample: float | Histogram) -> None:
    if isinstance(sample, Histogram):
        assert isinstance(metric, HistogramMetricFamily)
        bounds = [*map(str, sample.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(sample.buckets)), strict=True))
        metric.add_metric(labels, buckets, sample.total)
    else:
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        metric.add_metric(labels, sample)


_HELP = {
    "ops_inflight": "Operations that have not ended, of either side.",
    "confirms_total": "Operations of peers that were approved.",
    "denies_total": "Operations of peers that were refused.",
    "blocks_rx_bytes_total": "Octets received on streams of operations.",
    "handler_latency_ms": "From the start of a handler to its answer.",
    "maop_success_count_total": "Successes sent.",
    "maop_success_bytes_total": "Octets of their bodies.",
    "maop_invalid_content_type_total": "Successes received with a header that is none.",
    "maop_blocks_rx_bytes_total": "Octets received on streams of operations.",
    "maop_upload_latency_ms": "Messages of peers, from header to Done.",
    "maop_confirms_per_sec": "Approvals in a second.",
    "maop_denies_per_sec": "Refusals in a second.",
    "maop_streaming_sessions_open": "Bodies of undefined length that are coming in.",
    "maop_streaming_duration_ms": "How long they took.",
    "maop_denies_policy_undefined_length_total": "Operations refused for their undefined length.",
    "maop_request_latency_ms": "Requests of this side, until the Response was complete.",
    "maop_response_fail_total": "Requests of this side that failed or were refused.",
    "maop_rpc_payload_bytes": "Octets of the bodies of Responses received.",
    "maop_control_backlog": "Signals that wait on the fullest control stream of all connections.",
    "maop_late_signals_total": "Signals for operations that had ended or were unknown.",
    "maop_response_unacked_total": "Responses whose requester did not say whether it used them.",
    "maop_drain_ms": "How long connections drained.",
    "maop_streams_aborted_total": "Streams that peers have reset.",
    "maop_fail_total": "Fails sent and received.",
    "maop_approval_latency_ms": "From the header of an operation to Proceed or Refuse.",
    "maop_approval_index": "Share of approvals among all decisions, of the 32 identities with the lowest.",
}
