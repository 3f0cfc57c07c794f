"""Metrics of nodes: a driver answers for its fleet, each sample with the label ``node``."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from tests.actors.nodes.apps import Add, Counter
from tests.actors.nodes.conftest import nodes_here

from levada.actors.metrics import Metrics
from levada.actors.metrics.nodes import NodeFigures, fleet_measured_by, from_json, joined, to_json
from levada.framework import Actor, ActorSystem, Distribution, Metric, Sample, handles
from levada.framework.errors import DecodeError
from levada.framework.metrics import Series

from .scraped import part, scrape

DONE = Metric("desk_done_total", "counter", "What desks have done.", ("desk",))
TOOK = Metric("desk_took_seconds", "histogram", "How long it took.")
STATES = Metric("desk_node_state", "gauge", "Has a label of this name already.", ("node",))


class Desk(Actor[int]):
    @handles
    def work(self, m: int) -> None: ...

    def metrics(self) -> Iterable[Sample]:
        return [
            DONE.sample(3, "north"),
            TOOK.sample(Distribution((0.1, 1.0), (1, 2, 0), 1.5)),
            STATES.sample(1, "elsewhere"),
        ]


async def test_a_driver_answers_for_its_nodes(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _):
        metrics = Metrics(system)
        before = await scrape(metrics)
        for on, number in (("n0", 1), ("n1", 2)):
            for _ in range(number):
                counter = await nodes.spawn(Counter, on=on)
                await counter.ask(Add(1))
        system.spawn(Desk)
        found = await scrape(metrics)
        assert part(found, "levada_node") == {
            ("levada_nodes", "up"): 2,
            ("levada_node_up", "n0"): 1,
            ("levada_node_up", "n1"): 1,
            ("levada_node_restarts_total", "n0"): 0,
            ("levada_node_restarts_total", "n1"): 0,
        }
        for node, number in (("n0", 1), ("n1", 2)):
            key = "levada_actors", "Counter", node
            assert found[key] == before.get(key, 0) + number
        assert found["levada_actors", "Desk", "driver"] == 1
        assert found["desk_done_total", "north", "driver"] == 3
        assert found["desk_node_state", "elsewhere"] == 1
        assert found["desk_took_seconds_bucket", "driver", "1"] == 3
        for node in ("n0", "n1", "driver"):
            assert found["levada_scrape_complete", node] == 1
            assert found["levada_actors_spawned_total", node] > 0
        assert found["levada_connections_opened_total", "driver", "aqueduct", "server"] == 2


async def test_a_node_that_does_not_answer_is_left_out(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:

        async def ask() -> list[NodeFigures]:
            await trio.sleep(3)
            return [NodeFigures("n0", "up", 0, to_json({DONE: {("east",): 5}})), NodeFigures("n1", "starting", 4, None)]

        fleet_measured_by(system, ask)
        system.spawn(Desk)
        found = await scrape(Metrics(system))
        assert part(found, "levada_node", "desk_done") == {
            ("levada_nodes", "up"): 1,
            ("levada_nodes", "starting"): 1,
            ("levada_node_up", "n0"): 1,
            ("levada_node_up", "n1"): 0,
            ("levada_node_restarts_total", "n0"): 0,
            ("levada_node_restarts_total", "n1"): 4,
            ("desk_done_total", "east", "n0"): 5,
            ("desk_done_total", "north", "driver"): 3,
        }


def test_nodes_of_another_version_take_nothing_with_them() -> None:
    """Another metric of a name is left out, another text is not; figures that cannot be read are none."""
    own: Series = {DONE: {("north",): 1}}
    other_text = Metric("desk_done_total", "counter", "Another text.", ("desk",))
    other = Metric("desk_done_total", "counter", "Another.", ("place",))
    found = joined(
        own,
        [
            NodeFigures("n0", "up", 0, to_json({other_text: {("a",): 2}})),
            NodeFigures("n1", "up", 0, to_json({other: {("a",): 3}})),
            NodeFigures("n2", "up", 0, "no figures"),
        ],
    )
    assert {metric.name: dict(values) for metric, values in found.items()}["desk_done_total"] == {
        ("driver", "north"): 1,
        ("n0", "a"): 2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[7]",
        '[["x", "counter", "X.", [], "sum", []]]',
        '[["x_total", "counter", "X.", ["a"], "sum", [[[], 1]]]]',
        '[["x_total", "counter", "X.", [], "sum", [[[], "y"]]]]',
        '[["x_seconds", "histogram", "X.", [], "sum", [[[], [1, 2]]]]]',
        json.dumps([["x_total", "counter", "X.", [], "sum", [[[], None]]]]),
    ],
)
def test_what_is_no_figures(text: str) -> None:
    with pytest.raises(DecodeError, match="not figures of a node"):
        from_json(text)


def test_figures_travel() -> None:
    series: Series = {
        DONE: {("north",): 1.0, ("süd",): 2.0},
        TOOK: {(): Distribution((0.1, 1.0), (1, 2, 0), 1.5)},
        STATES: {},
    }
    assert from_json(to_json(series)) == series
