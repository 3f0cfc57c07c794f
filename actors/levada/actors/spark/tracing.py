"""Traces of Spark's processes: which trace a request to a bridge belongs to. Only a bridge of a traced system is told."""

from __future__ import annotations

import sys
from typing import Final

from levada.actors.rsocket.tracing import zipkin
from levada.framework.tracing import TraceHeaders, Tracing, current_tracing
from levada.transports.rsocket.extensions import ZipkinTracing

__all__ = ["TRACES", "belonging_to", "current_trace", "greeting"]

TRACES: Final = b"traces"
"""The answer of a traced bridge to ``hello``. An older process of Spark does not look at it, and an older bridge answers nothing."""


def greeting() -> bytes:
    """Return the answer of the bridge around to ``hello``."""
    return b"" if current_tracing() is None else TRACES


def current_trace() -> TraceHeaders | None:
    """Return the context of the running code: in a traced system, or else of OpenTelemetry, as in a function that Spark runs."""
    tracing = current_tracing() or _open_telemetry()
    return None if tracing is None else tracing.headers(tracing.current())


def _open_telemetry() -> Tracing | None:
    # A process that has a span has imported this; others are spared the import.
    if "opentelemetry.trace" not in sys.modules:
        return None
    from levada.actors.otel import OpenTelemetry

    return OpenTelemetry()


def belonging_to(trace: TraceHeaders | None) -> list[ZipkinTracing]:
    """Return the metadata of a request: the context of the running code; if it has none, the given one. Source: EXT-7."""
    headers = current_trace() or trace
    return [] if headers is None else [zipkin(headers)]
