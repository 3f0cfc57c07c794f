"""The context of an operation in its header, between two sides that both trace."""

from __future__ import annotations

from levada.framework import RemotePeer
from levada.framework.tracing import Span, TraceHeaders, Tracing
from levada.transports.maop import Received

__all__ = ["field_of", "serving"]


def field_of(tracing: Tracing, span: Span) -> bytes:
    """Return the trace field of an operation. Source: MA-138."""
    headers = tracing.headers(span.context)
    return b"" if headers is None else (headers.traceparent + headers.tracestate).encode("ascii")


def serving(tracing: Tracing, operation: Received, peer: RemotePeer | None) -> Span:
    """Begin the span of a peer's operation. Source: MA-138."""
    text = operation.trace.decode("ascii", "replace")
    headers = TraceHeaders.parse(text[:55], text[55:])
    context = None if headers is None else tracing.context(headers, peer)
    return tracing.serve(
        "maop", f"{'request' if operation.is_request else 'message'} {operation.msg_id}", str(peer), context
    )
