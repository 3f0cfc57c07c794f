"""Figures of the nodes of a driver: their states, and the figures that each node collects, with the label ``node``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import attrs

from levada.framework import ActorSystem
from levada.framework.errors import DecodeError, LevadaError
from levada.framework.metrics import Distribution, Labels, Metric, Sample, Series, Value

__all__ = ["DRIVER", "AskFleet", "NodeFigures", "find_fleet", "fleet_measured_by", "from_json", "joined", "to_json"]

DRIVER: Final = "driver"
"""The value of the label ``node`` for the driver's own figures."""

NODES = Metric("levada_nodes", "gauge", "Nodes, by state.", ("state",))
UP = Metric("levada_node_up", "gauge", "1 if the node has answered this scrape.", ("node",))
RESTARTS = Metric("levada_node_restarts_total", "counter", "Starts of its process, without the first.", ("node",))


@attrs.frozen
class NodeFigures:
    """One node, as its driver knows it."""

    name: str
    state: str
    """As `levada.actors.nodes.Member.state`."""
    restarts: int
    figures: str | None
    """The node's own figures, from `to_json`; None if it did not answer in time."""


AskFleet = Callable[[], Awaitable[list[NodeFigures]]]
"""Asks the nodes of a driver for their figures, within a few seconds."""

_fleets: WeakKeyDictionary[ActorSystem, AskFleet] = WeakKeyDictionary()


def fleet_measured_by(system: ActorSystem, ask: AskFleet) -> None:
    """Set the function that `Metrics` of a driver's system uses to ask the nodes."""
    _fleets[system] = ask


def find_fleet(system: ActorSystem) -> AskFleet | None:
    """Return the function that asks the nodes of a system, or None if it has no nodes."""
    return _fleets.get(system)


def joined(own: Series, nodes: list[NodeFigures]) -> Series:
    """Merge the series of a driver and its nodes, with the label ``node``."""
    found: dict[Metric, dict[Labels, Value]] = {}
    declared: dict[str, Metric] = {}

    def put(series: Series, node: str) -> None:
        for metric, values in series.items():
            named = _with_node(metric)
            known = declared.setdefault(named.name, named)
            if known.labels == named.labels and known.kind == named.kind:  # otherwise the node runs other code
                place = found.setdefault(known, {})
                for labels, value in values.items():
                    place[labels if named is metric else (node, *labels)] = value

    put(own, DRIVER)
    for node in nodes:
        if node.figures is not None:
            try:
                put(from_json(node.figures), node.name)
            except DecodeError:
                pass  # the node runs another version
    for metric, value, labels in _of_fleet(nodes):
        place = found.setdefault(metric, {})
        before = place.get(labels, 0)
        assert not isinstance(before, Distribution)
        assert not isinstance(value, Distribution)
        place[labels] = before + value
    return found


def _of_fleet(nodes: list[NodeFigures]) -> Iterator[Sample]:
    for node in nodes:
        yield NODES.sample(1, node.state)
        yield UP.sample(int(node.figures is not None), node.name)
        yield RESTARTS.sample(node.restarts, node.name)


@lru_cache(1024)
def _with_node(metric: Metric) -> Metric:
    return metric if "node" in metric.labels else attrs.evolve(metric, labels=("node", *metric.labels))


def to_json(series: Series) -> str:
    """Encode series for another process."""
    return json.dumps(
        [
            [*attrs.astuple(metric), [[labels, _plain(value)] for labels, value in values.items()]]
            for metric, values in series.items()
        ]
    )


def from_json(text: str) -> Series:
    """Undo `to_json`.

    Raises:
        DecodeError: the text is not from `to_json`.
    """
    try:
        found: dict[Metric, dict[Labels, Value]] = {}
        for name, kind, help_, labels, combine, values in json.loads(text):
            metric = Metric(name, kind, help_, tuple(labels), combine)
            samples = (metric.sample(_value(value), *names) for names, value in values)
            found[metric] = {labels: value for _, value, labels in samples}
        return found
    except (ValueError, TypeError, LookupError, LevadaError) as error:
        raise DecodeError(f"not figures of a node: {error}") from error


def _plain(value: Value) -> Any:
    return [value.bounds, value.counts, value.total] if isinstance(value, Distribution) else value


def _value(value: Any) -> Value:
    if isinstance(value, list):
        bounds, counts, total = value
        return Distribution(tuple(bounds), tuple(counts), total)
    return float(value)
