"""Traces of Spark's processes: the trace of a request to a bridge, which is sent only to a bridge of a traced system."""

from __future__ import annotations

import sys
from typing import Final

from levada.actors.rsocket.tracing import zipkin
from levada.framework.tracing import TraceHeaders, Tracing, current_tracing
from levada.transports.rsocket.extensions import ZipkinTracing

__all__ = ["TRACES", "belonging_to", "current_trace", "greeting"]

TRACES: Final = b"traces"
"""The answer of a traced bridge to ``hello``. Older processes of Spark ignore it, and older bridges answer nothing."""


def greeting() -> bytes:
    """Return the answer of the current bridge to ``hello``."""
    return b"" if current_tracing() is None else TRACES


def current_trace() -> TraceHeaders | None:
    """Return the trace context of the running code: from a traced system, or from OpenTelemetry, as in a function that Spark runs."""
    tracing = current_tracing() or _open_telemetry()
    return None if tracing is None else tracing.headers(tracing.current())


def _open_telemetry() -> Tracing | None:
    # A process that has a span has imported this; other processes should not import it.
    if "opentelemetry.trace" not in sys.modules:
        return None
    from levada.actors.otel import OpenTelemetry

    return OpenTelemetry()


def belonging_to(trace: TraceHeaders | None) -> list[ZipkinTracing]:
    """Return the metadata of a request: the trace context of the running code, or the given one. Source: EXT-7."""
    headers = current_trace() or trace
    return [] if headers is None else [zipkin(headers)]
