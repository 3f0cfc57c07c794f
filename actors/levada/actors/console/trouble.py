"""The troubles of a system, in a sentence each: mailboxes that grow, crash loops, stalls, failures, groups that lag, refusals, lost nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from levada.framework.embedding import LocalRef
from levada.framework.errors import LevadaError
from levada.framework.text import printable

from .survey import Falling, Survey, answers_of
from .view import duration

__all__ = ["Trouble", "Watchman"]

_MOST: Final = 20
"""The most sentences."""
_RECENT: Final = 60.0
"""Seconds for which a stall or a refusal is worth a sentence."""
_STALL: Final = 0.1
"""Seconds for which the event loop must have been held up."""
_LAG: Final = 1000
"""Rows that a group must be behind, and further behind than before."""
_PATIENCE: Final = 0.5
"""Seconds for all journals and listeners to answer with their figures."""


_Numbers = dict[tuple[LocalRef, str], deque[tuple[float, int]]]
"""Of an actor's report: the times and values of a figure."""


@attrs.frozen
class Trouble:
    """One thing that is wrong."""

    text: str
    actor: str = ""
    """Path of the actor that it is about."""
    page: str = ""
    """The page that shows more, if it is not about an actor."""


class Watchman:
    """Finds the troubles of a system; it compares two moments.

    Args:
        survey: passes over the actors of the system.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._system = survey.system
        self._numbers: _Numbers = {}

    async def look(self, news: Sequence[Mapping[str, Any]], nodes: Iterable[Mapping[str, Any]]) -> list[Trouble]:
        """Return the troubles, twenty at most.

        Args:
            news: the latest events (`Recorder`), oldest first: they name the actors and errors behind some figures.
            nodes: the nodes of the program, as `ask_nodes` returns them.

        Cancellation:
            the next call goes on.
        """
        latest = {(each["what"], each["actor"]): each for each in news}
        found = [
            *self._nodes(nodes),
            *(self._falling(each, latest) for each in self._survey.falling()),
            *self._stalls(news),
            *await self._reports(),
        ]
        return found[:_MOST]

    def _nodes(self, nodes: Iterable[Mapping[str, Any]]) -> Iterable[Trouble]:
        for node in nodes:
            again = node["state"] == "starting" and node["restarts"]
            if node["state"] == "down" or again or node.get("error"):
                why = (
                    f": {node['error']}"
                    if node.get("error")
                    else f", after {node['restarts']:,} restarts"
                    if again
                    else ""
                )
                yield Trouble(printable(f"Node {node['name']} is {node['state']}{why}."), page="nodes")

    def _falling(self, one: Falling, latest: Mapping[tuple[str, str], Mapping[str, Any]]) -> Trouble:
        path = printable(one.actor.path, 1000)
        span = duration(one.seconds)
        if one.restarts:
            failure = latest.get(("failure", path))
            why = f", after {failure['why']}{_where(failure)}" if failure is not None else ""
            return Trouble(f"{path} fails again and again: {one.restarts:,} restarts in {span}{why}.", path)
        age = self._system.observe.actor(one.actor).age
        gets, does = (one.grown + one.handled) / one.seconds, one.handled / one.seconds
        waits = f"{one.depth:,} messages wait, the oldest for {duration(age)}"
        return Trouble(f"{path} falls behind: {waits}. It gets {gets:,.0f} a second and handles {does:,.0f}.", path)

    def _stalls(self, news: Sequence[Mapping[str, Any]]) -> Iterable[Trouble]:
        now = trio.current_time()
        stalls = [(seconds, ended) for ended, seconds in self._system.observe.stalls if ended > now - _RECENT]
        seconds, ended = max(stalls, default=(0.0, 0.0))
        if seconds < _STALL:
            return
        at = self._system.platform.time() - (now - ended)
        by = [each for each in news if each["what"] == "slow turn" and abs(each["at"] - at) < 0.05]
        actor = by[0]["actor"] if by else ""
        who = f"{actor} held up the event loop" if actor else "The event loop was held up"
        what = f" with {by[0]['message']}" if by and by[0].get("message") else ""
        yield Trouble(
            f"{who} for {duration(seconds)}{what}, {duration(now - ended)} ago. Nothing else ran meanwhile.", actor
        )

    async def _reports(self) -> list[Trouble]:
        cells = [(subject, cell) for subject in ("journal", "listener") for cell in self._survey.of(subject)]
        reports = await answers_of([cell for _, cell in cells], self._system.observe.report, _PATIENCE)
        before, self._numbers = self._numbers, {}
        found = []
        for subject, cell in cells:
            report = reports.get(cell, {})
            if isinstance(report, LevadaError):
                continue  # it has ended, or is not open; its page says so
            path = printable(cell.path, 1000)
            groups = report.get("groups") if subject == "journal" else None
            for group, behind in groups.items() if isinstance(groups, Mapping) else ():
                grown = self._grown(before, (cell, group), behind)
                if behind >= _LAG and grown > 0:
                    text = f"Group {group} of the journal {path} is {behind:,} rows behind, {grown:,} more than before."
                    found.append(Trouble(text, page="journals"))
            refused = report.get("refused") if subject == "listener" else None
            if isinstance(refused, int) and (more := self._grown(before, (cell, ""), refused)):
                text = f"{report.get('url') or path} has refused {more:,} clients within the last minute."
                found.append(Trouble(text, page="connections"))
        return found

    def _grown(self, before: _Numbers, key: tuple[LocalRef, str], value: int) -> int:
        """Keep a number, and return by how much it exceeds the one of a minute ago, or the first one."""
        now = trio.current_time()
        numbers = self._numbers[key] = before.get(key) or deque(maxlen=60)
        if not numbers or now >= numbers[-1][0] + 1:
            numbers.append((now, value))
        while numbers[0][0] < now - _RECENT:
            numbers.popleft()
        return value - numbers[0][1]


def _where(failure: Mapping[str, Any]) -> str:
    return f" at {failure['where']}" if failure.get("where") else ""
