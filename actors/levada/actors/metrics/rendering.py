"""Figures in the text formats of Prometheus and OpenMetrics. Needs the extra: ``pip install 'levada[prometheus]'``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import trio

from levada.framework.metrics import Distribution, Metric, Series
from levada.framework.platform import PLATFORM

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
"""The most values that are rendered without a thread, in 3 to 5 ms."""
_UNITS: Final = ("seconds", "bytes")
_OPEN: Final = "application/openmetrics-text"


class MetricsCollector(Collector):
    """Adds the figures of a system to a registry of prometheus-client, for programs that have one.

    Make it inside `trio.run`, and register it: ``REGISTRY.register(MetricsCollector(Metrics(system)))``. The registry must collect in another
    thread, as ``start_http_server`` does; that thread waits for the thread of the system. Once `trio.run` ends, nothing is collected.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._trio = trio.lowlevel.current_trio_token()

    def describe(self) -> list[Family]:
        """Return nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield all families.

        Raises:
            RuntimeError: called in the thread of trio, which would wait for itself. Use `Metrics.collect` and `render` there.
        """
        if trio.lowlevel.in_trio_run():
            raise RuntimeError(
                "a registry with levada's metrics cannot be collected in the thread of trio: await Metrics.collect() and render() there"
            )
        try:
            series = trio.from_thread.run(self._metrics.collect, trio_token=self._trio)
        except (trio.RunFinishedError, trio.Cancelled):  # in this thread it means that trio.run is ending
            return
        yield from families(series)


class _Collected(Collector):
    def __init__(self, series: Series) -> None:
        self._series = series

    def collect(self) -> Iterator[Family]:
        return families(self._series)


async def render(series: Series, accept: str = "") -> tuple[str, bytes]:
    """Render collected figures as text, in a thread if there are many.

    Args:
        series: from `Metrics.collect`.
        accept: the ``Accept`` header of the request, which may ask for OpenMetrics.

    Returns:
        The content type, and the text.
    """
    # Only the media type: a peer's parameters could make the parser raise, or end up in our headers.
    types = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
    encode, content_type = choose_encoder(_OPEN if _OPEN in types else "")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(series))
    if sum(map(len, series.values())) <= _INLINE:
        await trio.lowlevel.checkpoint()
        return content_type, encode(registry)
    return content_type, await PLATFORM.get().run_in_thread(encode, registry)


def families(series: Series) -> Iterator[Family]:
    """Yield the families of prometheus-client, ordered by name."""
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
    stem, _, unit = metric.name.removesuffix("_total").rpartition("_")
    made: Family = kinds[metric.kind](
        metric.name, metric.help, labels=metric.labels, unit=unit if stem and unit in _UNITS else ""
    )
    return made
