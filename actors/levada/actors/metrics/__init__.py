"""Metrics for Prometheus and OpenMetrics. Needs the extra: ``pip install 'levada[prometheus]'``.

`serve_metrics` answers scrapes, `MetricsCollector` adds the figures to a registry that a program has, and `Metrics` collects them without
either. An actor adds figures of its own with `levada.framework.Actor.metrics`. Nothing is collected until a scrape asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from levada.actors.on_demand import on_demand

if TYPE_CHECKING:
    from .collecting import Metrics
    from .rendering import MetricsCollector, render
    from .serving import Scrapes, serve_metrics

__all__ = ["Metrics", "MetricsCollector", "Scrapes", "render", "serve_metrics"]

_MODULES = "collecting", "rendering", "serving"

# Connections need only their metrics' names, and the extra may not be installed.
__getattr__ = on_demand(__name__, _MODULES, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
