"""Nodes of a traced driver are traced, and their spans are told apart."""

from __future__ import annotations

import re
from functools import partial

import pytest
from opentelemetry.trace import SpanKind
from tests.actors.spans import is_below, recorded
from trio.testing import MockClock

from levada.actors.console import View
from levada.actors.console.snapshot import ask_nodes, watch_node
from levada.actors.metrics.nodes import find_fleet
from levada.actors.nodes import local_nodes
from levada.actors.nodes.node_side import run_node
from levada.framework import ActorSystem

from .apps import Add, Ask, Counter, Friend
from .conftest import nodes_here
from .processes import ROOT
from .traced_app import Tracer, Where, app


async def test_a_trace_goes_through_several_nodes(autojump_clock: MockClock) -> None:
    with recorded() as spans:
        body = partial(run_node, tracing=spans.tracing())
        async with spans.system() as system, nodes_here(system, 2, body=body) as (nodes, _):
            counter, friend = await nodes.spawn(Counter, on="n0"), await nodes.spawn(Friend, on="n1")
            assert await counter.ask(Add(1)) == 1
            assert await friend.ask(Ask(counter)) == 2
            assert all(each["snapshot"]["actors"] for each in await ask_nodes(system, 10))
            fleet = find_fleet(system)
            assert fleet is not None
            assert all(each.figures for each in await fleet())
            assert (
                await (await watch_node(system, "n0", actions=False, tracebacks=False))({"view": View().to_json()})
            )["rows"]
        housekeeping = {
            "Control",
            "Coordinator",
            "Watcher",
            "Look",
            "Measure",
            "Watch",
            "Show",
            "Hello",
            "Ready",
            "Leaving",
            "Spawn",
        }
        assert [span.name for span in spans.all() if not housekeeping.isdisjoint(re.split(r"\W", span.name))] == []
    through, friends = spans.one("Ask", SpanKind.CLIENT), spans.one("Friend/Ask", SpanKind.SERVER)
    (_, onwards), (_, counted) = spans.named("Add", SpanKind.CLIENT), spans.named("Counter/Add", SpanKind.SERVER)
    assert is_below(friends, through)
    assert is_below(onwards, friends)
    assert is_below(counted, onwards)


@pytest.mark.ci
async def test_each_process_has_its_own_tracing_and_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=desk,service.instance.id=driver")
    with recorded() as spans:
        async with spans.system() as system, local_nodes(system, 2, app) as nodes:
            tracers = [await nodes.spawn(Tracer, on=name) for name in ("n0", "n1")]
            with spans.tracer.start_as_current_span("program") as program:
                found = [await tracer.ask(Where()) for tracer in tracers]
    assert [(each["node"], each["service"]) for each in found] == [("n0", "desk"), ("n1", "desk")]
    assert len({"driver", *(each["instance"] for each in found)}) == 3
    assert {each["trace"] for each in found} == {f"{program.get_span_context().trace_id:032x}"}


@pytest.mark.ci
async def test_nodes_of_a_driver_that_is_not_traced_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    async with ActorSystem() as system, local_nodes(system, 1, app) as nodes:
        assert (await (await nodes.spawn(Tracer)).ask(Where()))["trace"] == "0" * 32
