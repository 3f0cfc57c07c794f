"""Traces over Lumberjack: the context in fields of events, if the writer is told so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from opentelemetry.trace import SpanKind
from tests.actors.spans import Spans, begins_with_link, ident, is_below, recorded

from levada.actors.lumberjack import Unit, WriterConfig, connect, serve
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

URL = "lumberjack+memory://traces"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def take(self, unit: Unit) -> None:
        self.events += unit.events


@pytest.mark.rule("LJ-64")
@pytest.mark.parametrize("version", [1, 2])
async def test_lj64_events_of_one_trace_are_taken_below_it(spans: Spans, version: Literal[1, 2]) -> None:
    """LJ-64: the fields of the events, and the spans of the unit and of its sink."""
    sink, config = Sink(), WriterConfig(version=version, window=16)
    async with (
        spans.system() as system,
        serve(system, URL, sink.take, trust_traces=True),
        connect(system, URL, config=config, traces=True) as writer,
    ):
        with spans.tracer.start_as_current_span("program"):
            await writer.deliver([{"n": 1}, {"n": 2}])
    program = spans.one("program")
    parent = f"00-{ident(program).trace_id:032x}-{ident(program).span_id:016x}"
    assert [event["traceparent"].rpartition("-")[0] for event in sink.events] == [parent, parent]
    unit = spans.one("unit", SpanKind.SERVER)
    assert is_below(unit, program)
    handler, asked = [span for span in spans.all() if span.name.endswith("/Unit")]
    assert is_below(asked, unit)
    assert is_below(handler, asked)


@pytest.mark.rule("LJ-64")
async def test_lj64_events_of_several_traces_are_links(spans: Spans) -> None:
    """LJ-64: a unit has one span, with a link to each context; fields that are none are left alone."""
    sink = Sink()
    async with spans.system() as system, serve(system, URL, sink.take), connect(system, URL, traces=True) as writer:
        for name in ("first", "second"):
            with spans.tracer.start_as_current_span(name):
                await writer.send({"n": 1})
        with spans.tracer.start_as_current_span("third"):
            await writer.send({"traceparent": "mine"})
        await writer.flush()
    assert sink.events[2]["traceparent"] == "mine"
    unit = spans.one("unit")
    assert unit.parent is None
    assert [link.context.span_id for link in unit.links] == [
        ident(spans.one(name)).span_id for name in ("first", "second")
    ]


@pytest.mark.rule("LJ-64")
async def test_lj64_a_writer_that_is_not_told_so_adds_nothing(spans: Spans) -> None:
    """LJ-64: by default events are as the program made them; a reader without tracing leaves fields alone."""
    sink = Sink()
    async with spans.system() as here, ActorSystem() as there, serve(there, URL, sink.take):
        for traces in (False, True):
            async with connect(here, URL, traces=traces) as writer:
                with spans.tracer.start_as_current_span("program"):
                    await writer.deliver([{"n": 1}])
    assert sink.events[0] == {"n": 1}
    assert sink.events[1].keys() == {"n", "traceparent"}
    assert spans.named("unit") == []


async def test_a_writer_without_an_identity_is_not_trusted(spans: Spans) -> None:
    async with (
        spans.system() as system,
        serve(system, URL, Sink().take),
        connect(system, URL, traces=True) as writer,
    ):
        with spans.tracer.start_as_current_span("program"):
            await writer.deliver([{"n": 1}])
    assert begins_with_link(spans.one("unit"), spans.one("program"))


async def test_traces_need_a_traced_system() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="traced system"):
            async with connect(system, URL, traces=True):
                pass
