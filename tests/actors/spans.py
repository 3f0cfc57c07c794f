"""Spans that an exporter of OpenTelemetry's SDK keeps, for tests of tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind

from levada.actors.otel import OpenTelemetry
from levada.framework import ActorSystem

__all__ = ["Spans", "begins_with_link", "facts", "ident", "is_below", "recorded"]


class Spans:
    """A tracer provider and what it exported."""

    def __init__(self, sampler: Any = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def tracing(self) -> OpenTelemetry:
        """Tracing that records here."""
        return OpenTelemetry(self.provider)

    def system(self, **settings: Any) -> ActorSystem:
        """A system that records here."""
        return ActorSystem(tracing=self.tracing(), **settings)

    def all(self) -> tuple[ReadableSpan, ...]:
        """The spans in order of their ends."""
        return self.exporter.get_finished_spans()

    def named(self, name: str, kind: SpanKind | None = None) -> list[ReadableSpan]:
        """The spans of a name, and of a kind."""
        return [span for span in self.all() if span.name == name and kind in (None, span.kind)]

    def one(self, name: str, kind: SpanKind | None = None) -> ReadableSpan:
        """The only span of a name, and of a kind."""
        (span,) = self.named(name, kind)
        return span


@contextmanager
def recorded(sampler: Any = None) -> Iterator[Spans]:
    """A provider that is shut down at the end."""
    spans = Spans(sampler)
    try:
        yield spans
    finally:
        spans.provider.shutdown()


def facts(span: ReadableSpan) -> Mapping[str, Any]:
    """Its attributes; the SDK's types allow a span without any."""
    assert span.attributes is not None
    return span.attributes


def ident(span: ReadableSpan) -> SpanContext:
    """The trace and the span that it is; the SDK's types allow a span without."""
    found: SpanContext | None = span.context
    assert found is not None
    return found


def is_below(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether a span is a child of another one."""
    above, own = child.parent, ident(parent)
    return above is not None and (above.trace_id, above.span_id) == (own.trace_id, own.span_id)


def begins_with_link(child: ReadableSpan, other: ReadableSpan) -> bool:
    """Whether a span begins a trace of its own, with a link to another one."""
    own = ident(other)
    linked = [(link.context.trace_id, link.context.span_id) for link in child.links]
    return child.parent is None and ident(child).trace_id != own.trace_id and linked == [(own.trace_id, own.span_id)]
