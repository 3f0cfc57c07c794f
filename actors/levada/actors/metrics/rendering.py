"""Figures in the text formats of Prometheus and OpenMetrics. Needs the extra: ``pip install 'levada[prometheus]'``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import trio

from levada.framework.metrics import Distribution, Metric, Series

from .collecting import Metrics

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "metrics need prometheus-client: pip install 'levada[prometheus]'", name="prometheus_client"
    ) from error

__all__ = ["MetricsCollector", "render"]

_INLINE: Final = 1000
"""Values that are rendered at once, in 3 to 5 ms; more are rendered in a thread."""
_UNITS: Final = ("seconds", "bytes")
_OPEN: Final = "application/openmetrics-text"


class MetricsCollector(Collector):
    """Gives the figures of a system to a registry of prometheus-client, for programs that have one.

    Make it inside `trio.run`, and register it: ``REGISTRY.register(MetricsCollector(Metrics(system)))``. A registry collects in another
    thread, for example ``start_http_server`` does. That thread waits for the system's. After `trio.run` has ended there is nothing.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._trio = trio.lowlevel.current_trio_token()

    def describe(self) -> list[Family]:
        """Return nothing, so that a registry does not collect when this is registered."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield all families.

        Raises:
            RuntimeError: this is a thread of trio, which would wait for itself: await ``Metrics.collect`` and call `render`.
        """
        if trio.lowlevel.in_trio_run():
            raise RuntimeError("a registry with levada's metrics is collected in another thread than trio's")
        try:
            series = trio.from_thread.run(self._metrics.collect, trio_token=self._trio)
        except trio.RunFinishedError:
            return
        yield from families(series)


class _Collected(Collector):
    def __init__(self, series: Series) -> None:
        self._series = series

    def collect(self) -> Iterator[Family]:
        return families(self._series)


async def render(series: Series, accept: str = "") -> tuple[str, bytes]:
    """Write collected figures; many of them in a thread.

    Args:
        series: from `Metrics.collect`.
        accept: the header ``Accept`` of the request, which may ask for OpenMetrics.

    Returns:
        The content type, and the text.
    """
    # Only the type: a peer's parameters are not for a parser that raises, nor for our headers.
    types = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
    encode, content_type = choose_encoder(_OPEN if _OPEN in types else "")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(series))
    if sum(map(len, series.values())) <= _INLINE:
        await trio.lowlevel.checkpoint()
        return content_type, encode(registry)
    return content_type, await trio.to_thread.run_sync(encode, registry)


def families(series: Series) -> Iterator[Family]:
    """Yield the families of a library that knows the formats, in the order of their names."""
    for metric in sorted(series, key=lambda metric: metric.name):
        made = _family(metric)
        for labels, value in series[metric].items():
            if isinstance(value, Distribution):
                assert isinstance(made, HistogramMetricFamily)
                bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
                counts = map(float, accumulate(value.counts))
                made.add_metric(labels, list(zip(bounds, counts, strict=True)), value.total)
            else:
                assert isinstance(made, CounterMetricFamily | GaugeMetricFamily)
                made.add_metric(labels, float(value))
        yield made


def _family(metric: Metric) -> Family:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    unit = metric.name.removesuffix("_total").rpartition("_")[2]
    made: Family = kinds[metric.kind](
        metric.name, metric.help, labels=metric.labels, unit=unit if unit in _UNITS else ""
    )
    return made
