"""Trace contexts in the fields of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from levada.framework import RemotePeer
from levada.framework.tracing import Span, TraceHeaders, Tracing

__all__ = ["fields_of", "serving"]

_MOST: Final = 128
"""Contexts of one unit that are used: the default limit of OpenTelemetry for the links of a span."""


def fields_of(headers: TraceHeaders) -> dict[str, str]:
    """Return a context as fields of an event. Source: LJ-64."""
    fields = {"traceparent": headers.traceparent}
    if headers.tracestate:
        fields["tracestate"] = headers.tracestate
    return fields


def serving(tracing: Tracing, events: Iterable[Mapping[str, Any]], peer: RemotePeer | None) -> Span:
    """Begin the span of a unit, as a child of the context of its events if they share one, otherwise with links to theirs. Source: LJ-64."""
    found = {TraceHeaders.parse(event.get("traceparent"), event.get("tracestate", "")): None for event in events}
    contexts = [tracing.context(headers, peer) for headers in islice(filter(None, found), _MOST)]
    known = [context for context in contexts if context is not None]
    one, links = (known[0], ()) if len(known) == 1 else (None, known)
    return tracing.serve("lumberjack", "unit", str(peer), one, links)
