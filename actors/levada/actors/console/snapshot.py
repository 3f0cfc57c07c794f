"""Snapshots of a system as plain values, which can be sent to another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import trio

from levada.framework import Histogram, Statistics
from levada.framework.errors import ConfigurationError, DecodeError
from levada.framework.observe import longest_stall

if TYPE_CHECKING:
    from levada.framework import ActorInfo, ActorSystem

__all__ = [
    "MOST_ACTORS", "AskNodes", "NodeSnapshot", "Row", "Snapshot", "Watching", "ask_nodes", "has_nodes", "nodes_asked_by", "take_snapshot",
    "watch_node",
]  # fmt: skip

MOST_ACTORS = 10_000
"""The most actors in one snapshot: about 100 ms of the system's time and 2 MB of JSON."""

_MOST_WAITS = 100


@attrs.frozen(kw_only=True)
class Row:
    """One actor. Fields without a description are as in `levada.framework.ActorInfo`."""

    level: int
    """0 for the root, 1 for its children, and so on."""
    path: str
    kind: str
    state: str
    depth: int
    age: float
    handled: int
    restarts: int
    handler: str | None
    where: str | None
    waits_for: tuple[str, ...]
    """Paths of the actors that it waits for, 100 at most."""
    hidden: int
    """Children that the limit left out."""
    about: str = ""
    own: bool = True
    window: Mapping[str, Any] | None = None
    """The fields of a `levada.framework.FlowWindow`; None for an actor without one."""

    @classmethod
    def of(cls, info: ActorInfo, level: int) -> Row:
        """Make the row of an actor."""
        return cls(
            level=level,
            path=info.path,
            kind=info.kind,
            state=info.state,
            depth=info.depth,
            age=info.age,
            handled=info.handled,
            restarts=info.restarts,
            handler=info.handler,
            where=info.where,
            waits_for=info.waits_for[:_MOST_WAITS],
            hidden=info.hidden,
            about=info.about,
            own=info.own,
            window=None if info.window is None else attrs.asdict(info.window),
        )

    def to_json(self) -> dict[str, Any]:
        """Return values that the `json` module writes."""
        # With `json.dumps` 4.4 µs a row; `attrs.asdict` makes it 7.6.
        return {name: getattr(self, name) for name in _COLUMNS}


_COLUMNS = tuple(field.name for field in attrs.fields(Row))


@attrs.frozen(kw_only=True)
class Snapshot:
    """A system at one moment."""

    system: str
    """Its name."""
    phase: str
    """As `levada.framework.ActorSystem.phase`."""
    pid: int
    """The process id."""
    time: float
    """Seconds on trio's clock; only differences are meaningful."""
    statistics: Statistics
    turn_times: tuple[int, ...]
    """Counts of a `levada.framework.Histogram`: seconds per turn of an actor. Turns longer than 0.5 ms are measured, and one in 63 of the others."""
    queue_times: tuple[int, ...]
    """Likewise: seconds that an actor waited for its turn, of one turn in 63, and of timers that were late."""
    actors: tuple[Row, ...]
    """All actors: the root first, parents before children, siblings in order of start."""
    nodes: tuple[NodeSnapshot, ...] = ()
    """The nodes, if the system is a driver and the snapshot came from its console."""
    stalls: tuple[Sequence[float], ...] = ()
    """As `levada.framework.Stalls`: for how long the event loop was held up, each with the end on the clock of `time`."""
    cpu: float = 0.0
    """Seconds of CPU that the process has used."""

    def longest_stall(self, since: float = 0.0) -> float:
        """Return the seconds of the longest time that the event loop was held up after `since`, the `time` of an earlier snapshot."""
        return longest_stall(self.stalls, since)

    @property
    def waits(self) -> list[tuple[str, str]]:
        """Pairs of paths, where the first actor waits for the second."""
        return [(row.path, target) for row in self.actors for target in row.waits_for]

    @property
    def hidden(self) -> int:
        """The number of actors that the limit left out, not counting the actors below them."""
        return sum(row.hidden for row in self.actors)

    def quantiles(self) -> dict[str, float]:
        """Return the 50 % and 99 % quantiles of both histograms in seconds: ``turn_50``, ``turn_99``, ``queue_50``, ``queue_99``.

        They are 0.0 if nothing was measured yet.
        """
        result = {}
        for name, counts in (("turn", self.turn_times), ("queue", self.queue_times)):
            histogram = Histogram()
            histogram.counts = list(counts)
            for share in (50, 99):
                result[f"{name}_{share}"] = histogram.quantile(share / 100)
        return result

    def to_json(self) -> dict[str, Any]:
        """Return values that the `json` module writes."""
        nodes = {"nodes": [node.to_json() for node in self.nodes]} if self.nodes else {}
        return {
            **attrs.asdict(self, recurse=False, filter=lambda field, _: field.name != "nodes"),
            "statistics": attrs.asdict(self.statistics),
            "actors": [row.to_json() for row in self.actors],
            **nodes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Snapshot:
        """Undo `to_json`; unknown members are ignored.

        Raises:
            DecodeError: a member is missing or of another shape.
        """
        try:
            snapshot: Snapshot = _make(
                cls,
                value,
                statistics=_make(Statistics, value["statistics"]),
                actors=tuple(_make(Row, row) for row in value["actors"]),
                nodes=tuple(NodeSnapshot.from_json(node) for node in value.get("nodes", ())),
            )
            return snapshot
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"not a snapshot: {type(error).__name__} {error}") from error


@attrs.frozen(kw_only=True)
class NodeSnapshot:
    """One node of a driver, and its snapshot if it answered in time."""

    name: str
    state: str
    """As `levada.actors.nodes.Member.state`."""
    pid: int | None
    """Its process id; ``None`` while it has no process."""
    host: str
    restarts: int
    """How often it was restarted."""
    snapshot: Snapshot | None
    error: str = ""
    """Why there is no snapshot."""

    def to_json(self) -> dict[str, Any]:
        """Return values that the `json` module writes."""
        snapshot = None if self.snapshot is None else self.snapshot.to_json()
        return {**attrs.asdict(self, recurse=False), "snapshot": snapshot}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeSnapshot:
        """Undo `to_json`; unknown members are ignored.

        Raises:
            DecodeError: a member is missing or of another shape.
        """
        inner = value.get("snapshot")
        node: NodeSnapshot = _make(cls, value, snapshot=None if inner is None else Snapshot.from_json(inner))
        return node


def _make(cls: type[Any], value: Mapping[str, Any], **known: Any) -> Any:
    wanted = (field for field in attrs.fields(cls) if field.name not in known)
    # An older program does not send newer members.
    fields = {
        field.name: value[field.name] for field in wanted if field.name in value or field.default is attrs.NOTHING
    }
    # JSON turns tuples into lists.
    return cls(**{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}, **known)


AskNodes = Callable[[int], Awaitable[list[dict[str, Any]]]]
"""Asks the nodes of a driver for snapshots, with a limit of actors. Returns values for `NodeSnapshot.from_json` within about a second."""

Watching = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Passes a request to the `Viewer` on a node, and returns its answer."""

WatchNode = Callable[[str, bool, bool], Awaitable[Watching]]
"""Starts a `Viewer` on a node. The arguments are the node's name and the viewer's ``actions`` and ``tracebacks``."""

_nodes: WeakKeyDictionary[ActorSystem, tuple[AskNodes, WatchNode]] = WeakKeyDictionary()


def nodes_asked_by(system: ActorSystem, ask: AskNodes, watch: WatchNode) -> None:
    """Set the functions with which the consoles of a driver's system show its nodes."""
    _nodes[system] = ask, watch


def has_nodes(system: ActorSystem) -> bool:
    """Return whether a system is the driver of nodes."""
    return system in _nodes


async def ask_nodes(system: ActorSystem, limit: int) -> list[dict[str, Any]]:
    """Return the snapshots of a system's nodes as values of JSON; an empty list if the system has no nodes."""
    found = _nodes.get(system)
    return [] if found is None else await found[0](limit)


async def watch_node(system: ActorSystem, name: str, *, actions: bool, tracebacks: bool) -> Watching:
    """Start a `Viewer` on a node.

    Raises:
        ConfigurationError: there is no such node.
        ActorError: the node is not up, or does not answer.
    """
    found = _nodes.get(system)
    if found is None:
        raise ConfigurationError(f"{system.name} has no nodes")
    return await found[1](name, actions, tracebacks)


def take_snapshot(system: ActorSystem, *, limit: int = MOST_ACTORS) -> Snapshot:
    """Take a snapshot of a running system. Call it in the system's thread.

    Args:
        system: has been entered and has not ended.
        limit: the most actors in the snapshot, 1 to `MOST_ACTORS`. Actors near the root are preferred.
    """
    rows: list[Row] = []
    stack: list[tuple[int, ActorInfo]] = [(0, system.observe.tree(limit=max(1, min(limit, MOST_ACTORS))))]
    while stack:
        level, info = stack.pop()
        stack += [(level + 1, child) for child in reversed(info.children)]
        rows.append(Row.of(info, level))
    return Snapshot(
        system=system.name,
        phase=system.phase,
        pid=system.platform.pid(),
        time=trio.current_time(),
        statistics=system.statistics(),
        turn_times=tuple(system.observe.turn_times.counts),
        queue_times=tuple(system.observe.queue_times.counts),
        stalls=tuple(system.observe.stalls),
        cpu=system.platform.process_time(),
        actors=tuple(rows),
    )
