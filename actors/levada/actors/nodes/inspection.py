"""Questions of a driver to its nodes: snapshots, metrics, viewers, and reloading files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import trio

from levada.actors.console.snapshot import Watching
from levada.actors.metrics.nodes import NodeFigures
from levada.framework.errors import LevadaError

from .messages import Look, Measure, MemberState, Reload, Show, Watch

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["look", "measure", "reload", "watch"]

logger = logging.getLogger("levada.actors.nodes")

_PATIENCE: Final = 1.0
"""Seconds for an answer; a node that is busy for longer is shown without its actors."""
_MEASURING: Final = 3.0
"""Seconds for metrics: a node visits its actors for 2 s at most."""
_WATCHING: Final = 8.0
"""Seconds for an answer to a browser; a viewer pauses for up to 3 s after an answer that took long."""
_READING: Final = 5.0
"""Seconds to read files."""


async def look(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    """Ask all nodes for snapshots.

    Args:
        fleet: the driver's fleet.
        limit: the most actors in all snapshots together, the driver's included.

    Returns:
        A value for `levada.actors.console.NodeSnapshot.from_json` for each member.
    """
    members = fleet.members
    share = max(1, limit // (1 + len(members)))
    snapshots: dict[str, Any] = {}
    errors: dict[str, str] = {}

    async def ask(name: str) -> None:
        try:
            control = fleet.choose(name).control
            assert control is not None
            snapshots[name] = json.loads(await control.ask(Look(share), timeout=_PATIENCE))
        except LevadaError as error:
            errors[name] = f"no answer: {error}"

    async with trio.open_nursery() as nursery:
        for member in members:
            if member.state is MemberState.UP:
                nursery.start_soon(ask, member.name)
    return [
        {
            "name": member.name,
            "state": member.state.value,
            "pid": member.pid or None,
            "host": member.host,
            "restarts": member.restarts,
            "snapshot": snapshots.get(member.name),
            "error": errors.get(member.name, ""),
        }
        for member in members
    ]


async def measure(fleet: Fleet) -> list[NodeFigures]:
    """Ask all nodes for their metrics, at the same time."""
    figures: dict[str, str] = {}

    async def ask(name: str) -> None:
        try:
            control = fleet.choose(name).control
            assert control is not None
            figures[name] = await control.ask(Measure(), timeout=_MEASURING)
        except LevadaError as error:
            logger.debug("%s: no metrics: %s", name, error, extra={"event": "no_metrics"})

    members = fleet.members
    async with trio.open_nursery() as nursery:
        for member in members:
            if member.state is MemberState.UP:
                nursery.start_soon(ask, member.name)
    return [
        NodeFigures(member.name, member.state.value, member.restarts, figures.get(member.name)) for member in members
    ]


async def watch(fleet: Fleet, name: str, actions: bool, tracebacks: bool) -> Watching:
    """Start a viewer on a node, for a browser.

    Raises:
        ActorError: the node is not up, or does not answer.
        ConfigurationError: there is no such node.
    """
    control = fleet.choose(name).control
    assert control is not None
    watcher = await control.ask(Watch(actions, tracebacks), timeout=_PATIENCE)

    async def ask(request: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await watcher.ask(Show(json.dumps(request)), timeout=_WATCHING))
        return answer

    return ask


async def reload(fleet: Fleet, name: str) -> list[str]:
    """Make the listeners of a node read their files again; see `levada.actors.listening.ListenerHandle.reload`.

    Returns:
        A line for each listener that has files.

    Raises:
        ActorError: the node is not up, or does not answer.
    """
    control = fleet.choose(name).control
    assert control is not None
    lines: list[str] = await control.ask(Reload(), timeout=_READING)
    return lines
