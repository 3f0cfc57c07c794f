"""Questions of a driver to its nodes: snapshots, metrics, viewers, and reloading files; and the viewer on a node."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from levada.actors.console import Viewer
from levada.actors.console.history import keep_history
from levada.actors.console.snapshot import Watching
from levada.actors.console.survey import answers_of
from levada.actors.metrics.nodes import NodeFigures
from levada.framework import Reason, Ref, handles
from levada.framework.embedding import UntracedActor
from levada.framework.errors import LevadaError

from .messages import Look, Measure, Member, MemberState, Reload, Show, Watch

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["Watcher", "look", "measure", "reload", "watch"]

logger = logging.getLogger("levada.actors.nodes")

_PATIENCE: Final = 1.0
"""Seconds for an answer; a node that is busy for longer is shown without its actors."""
_MEASURING: Final = 3.0
"""Seconds for metrics: a node visits its actors for 2 s at most."""
_WATCHING: Final = 8.0
"""Seconds for an answer to a browser; a viewer pauses for up to 3 s after an answer that took long."""
_READING: Final = 5.0
"""Seconds to read files."""
SILENCE: Final = 30.0
"""Seconds without a request after which the client counts as gone."""


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

    async def ask(name: str) -> Any:
        return json.loads(await _control(fleet, name).ask(Look(share), timeout=_PATIENCE))

    answers = await answers_of(_up(members), ask)
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, LevadaError)}
    return [
        {
            "name": member.name,
            "state": member.state.value,
            "pid": member.pid or None,
            "host": member.host,
            "restarts": member.restarts,
            "snapshot": None if member.name in errors else answers.get(member.name),
            "error": f"no answer: {errors[member.name]}" if member.name in errors else "",
        }
        for member in members
    ]


async def measure(fleet: Fleet) -> list[NodeFigures]:
    """Ask all nodes for their metrics, at the same time."""

    async def ask(name: str) -> str:
        figures: str = await _control(fleet, name).ask(Measure(), timeout=_MEASURING)
        return figures

    members = fleet.members
    answers = await answers_of(_up(members), ask)
    figures: dict[str, str] = {}
    for name, answer in answers.items():
        if isinstance(answer, LevadaError):
            logger.debug("%s: no metrics: %s", name, answer, extra={"event": "no_metrics"})
        else:
            figures[name] = answer
    return [
        NodeFigures(member.name, member.state.value, member.restarts, figures.get(member.name)) for member in members
    ]


async def watch(fleet: Fleet, name: str, actions: bool, tracebacks: bool) -> Watching:
    """Start a viewer on a node, for a browser.

    Raises:
        ActorError: the node is not up, or does not answer.
        ConfigurationError: there is no such node.
    """
    watcher = await _control(fleet, name).ask(Watch(actions, tracebacks), timeout=_PATIENCE)

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
    lines: list[str] = await _control(fleet, name).ask(Reload(), timeout=_READING)
    return lines


@attrs.frozen
class _Silent:
    pass


class Watcher(UntracedActor[Show | _Silent]):
    """Answers one browser, until it is silent."""

    actions: bool
    tracebacks: bool
    _viewer: Viewer | None = attrs.field(init=False, default=None)

    def started(self) -> None:
        """Start to record events."""
        self._viewer = Viewer(self.system, actions=self.actions, tracebacks=self.tracebacks)
        self.timers.once("silence", SILENCE, _Silent())
        self.start_soon(keep_history, self.system, name="<history>")

    def stopping(self, reason: Reason) -> None:
        """Stop recording events."""
        if self._viewer is not None:
            self._viewer.close()

    @handles
    async def show(self, m: Show) -> str:
        """Answer a request."""
        self.timers.once("silence", SILENCE, _Silent())
        assert self._viewer is not None
        return json.dumps(await self._viewer.answer(json.loads(m.request)))

    @handles
    def silent(self, m: _Silent) -> None:
        """Stop, because the client is gone."""
        self.stop()


def _up(members: Iterable[Member]) -> list[str]:
    return [member.name for member in members if member.state is MemberState.UP]


def _control(fleet: Fleet, name: str) -> Ref[Any]:
    """Return the actor of a node that answers its driver. Raises as `Fleet.choose`."""
    control = fleet.choose(name).control
    assert control is not None
    return control
