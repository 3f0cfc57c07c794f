"""Metrics for Prometheus and OpenMetrics. Needs the extra: ``pip install 'levada[prometheus]'``.

`serve_metrics` answers scrapes, `MetricsCollector` adds the figures to a registry that a program has, and `Metrics` collects them without
either. An actor adds figures of its own with `levada.framework.Actor.metrics`. Nothing is collected until a scrape asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collecting import Metrics
    from .rendering import MetricsCollector, render
    from .serving import Scrapes, serve_metrics

__all__ = ["Metrics", "MetricsCollector", "Scrapes", "render", "serve_metrics"]

_MODULES = {
    "Metrics": "collecting",
    "MetricsCollector": "rendering",
    "Scrapes": "serving",
    "render": "rendering",
    "serve_metrics": "serving",
}


def __getattr__(name: str) -> object:
    """Import a name on first use: connections need only their metrics' names, and the extra may not be installed."""
    if name in _MODULES:
        found: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
