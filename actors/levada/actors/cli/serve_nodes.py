"""``levada serve --nodes``: one app in several processes that share its addresses.

This process serves no clients. It binds the addresses, starts and restarts the nodes, and has the health endpoint and the console.
"""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import trio

from levada.actors.metrics.collecting import Metrics
from levada.actors.metrics.serving import Scrapes
from levada.actors.nodes import Member, MemberState, NodeLost, NodeSettings, local_nodes
from levada.actors.nodes.fleet import Fleet
from levada.actors.nodes.inspection import look, reload
from levada.actors.nodes.local import output
from levada.framework import ActorSystem, Failed, Reason, restart
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.platform import PLATFORM
from levada.framework.text import printable
from levada.transports.carriers.shared_sockets import SharedSockets, share_sockets

from . import report
from .dashboard import serve_own_dashboard
from .health import serve_health
from .reloading import CodeChanges, import_again, project_of, shown
from .serve import WITHOUT, node_app, tracing
from .servers import own_console, serve_own_console
from .signals import RELOAD, Terminal

__all__ = ["NodesRun", "logs_of_nodes"]

logger = logging.getLogger("levada.serve")

_RESTART: Final = restart("transient", max=1000, within=300.0, initial_backoff=0.2, max_backoff=30.0)
"""Restarts never stop: with this backoff a node starts at most 17 times in 300 s."""
_LOOK_EVERY: Final = 1.0  # seconds
_SUMS: Final[tuple[str, ...]] = ("actors", "failures", "restarts", "dead_letters")
_KILL: Final = 5.0
"""Seconds after ``--drain-timeout`` for killing the nodes that have not ended."""

State = Literal["starting", "serving", "draining"]


class NodesRun:
    """One run of an app on nodes: start, serve, drain."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._app, env = node_app(args)
        self._args = args
        self._settings = NodeSettings(drain_timeout=args.drain_timeout, restart=_RESTART, env=env, fence=args.fence)
        self._state: State = "starting"
        self._terminal = Terminal()
        self._urls: Sequence[str] = ()
        self._fleet: Fleet | None = None
        self._scrapes: Scrapes | None = None
        self._end = trio.Event()
        """Set when the server is to end."""
        self._over = trio.Event()
        """Set when the app is to drain."""
        self._start = trio.CancelScope()
        """Around the current start of the app."""
        self._first = 0
        """The first signal to end; 0 before it."""
        self._undrained: list[str] = []
        """Nodes that did not drain in time; the log says why."""
        self._failed: list[NodeLost] = []
        """How apps have failed at their end."""
        self._lost: set[str] = set()
        """Nodes that failed, until they are up again."""
        self._restarting = trio.Lock()
        self._looking = trio.Lock()
        self._statistics: dict[tuple[str, int], dict[str, int]] = {}
        """The statistics of the nodes that answered, by name and number of restarts."""
        self._looked_at = -math.inf
        self._patience = trio.CancelScope()
        """Around the nodes. Its deadline is the time when they are killed."""

    async def main(self, numbers: list[int]) -> int:
        """Run the nodes; return the exit code."""
        with PLATFORM.get().signals(*numbers) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals)
                if self._args.health is not None:
                    url = await nursery.start(serve_health, *self._args.health, self._report, lambda: self._scrapes)
                    print(f"HEALTH {url}", flush=True)
                with self._patience:
                    await self._run()
                nursery.cancel_scope.cancel()
        for error in self._failed:
            _say(str(error))
        if self._patience.cancelled_caught or self._undrained:
            where = "" if self._patience.cancelled_caught else f" on {', '.join(sorted(self._undrained))}"
            print(
                f"levada: open work{where} was cut off (--drain-timeout {self._args.drain_timeout:g})", file=sys.stderr
            )
            return 1
        if self._failed:
            return 2
        return 130 if self._first == signal.SIGINT else 0

    async def _run(self) -> None:
        """Serve until the server is to end; with ``--reload`` once more after each change of the code."""
        args = self._args
        # The dashboard outlasts the system that it shows.
        shown = None if args.dashboard is None else own_console(nodes=True)
        async with (
            serve_own_dashboard(shown, args.dashboard),
            share_sockets() as shared,
            trio.open_nursery() as nursery,
        ):
            if args.reload:
                changes = CodeChanges(project_of(args.target))
                nursery.start_soon(changes.watch)
                nursery.start_soon(self._follow, changes)
            await self._serve(shared)
            while not self._end.is_set():
                await self._serve(shared, again=True)
            nursery.cancel_scope.cancel()

    async def _serve(self, shared: SharedSockets, *, again: bool = False) -> None:
        """Run the app until it is to drain. All but the addresses begins anew: an actor of the old code may have other arguments."""
        self._state, self._over, self._start = "starting", trio.Event(), trio.CancelScope()
        if self._end.is_set():
            self._over.set()
        for forgotten in (self._undrained, self._failed, self._lost, self._statistics):
            forgotten.clear()
        commands = {"nodes": self._list, "restart": self._restart}
        async with (
            ActorSystem("serve", tracing=tracing(self._args)) as system,
            serve_own_console(system, commands),
        ):
            self._fleet = Fleet.of(system)
            self._scrapes = Scrapes(Metrics(system))
            self._fleet.directory.watchers.append(self._changed)
            try:
                with self._start:
                    await self._serve_nodes(self._fleet, shared, again)
            except Exception as error:
                if not again or report(error) is None:
                    raise
                _say("the next change starts it again")
                await self._over.wait()

    async def _serve_nodes(self, fleet: Fleet, shared: SharedSockets, again: bool) -> None:
        args = self._args
        async with local_nodes(fleet.system, args.nodes, self._app, settings=self._settings, sockets=shared):
            known, self._urls = self._urls, _common_urls(fleet)
            if not self._over.is_set():
                self._state = "serving"
                for url in self._urls:
                    if url not in known:
                        print(f"SERVING {url}", flush=True)
                if not self._urls and not again:
                    print(WITHOUT, flush=True)
                if again:
                    _say("the new code serves")
            await self._over.wait()
            self._state = "draining"
            if self._end.is_set():
                shared.close()  # otherwise clients would connect, and no node would accept them

    async def _follow(self, changes: CodeChanges) -> None:
        """End this start of the app whenever code has changed."""
        while True:
            paths = shown(await changes.next())
            try:
                # This process knows the app's messages, and refuses nodes that have others. What it cannot import, no node can.
                await trio.to_thread.run_sync(import_again, self._args.target, changes.folder, abandon_on_cancel=True)
            except ConfigurationError as error:
                report(error)
                _say(f"{paths} changed, and the new code cannot be imported, so nothing is restarted")
            else:
                _say(f"{paths} changed: restarting")
                self._leave()

    def _leave(self) -> None:
        """Drain the app. A start that takes long, or hangs, is given up: there is nothing to drain."""
        self._over.set()
        if self._state == "starting":
            self._start.cancel()

    def _changed(self, member: Member, reason: Reason | None) -> None:
        """Log nodes that come up and go down."""
        if member.state is MemberState.UP:
            level = logging.WARNING if member.name in self._lost else logging.INFO
            logger.log(level, "NODE %s up pid %d", member.name, member.pid)
            self._lost.discard(member.name)
        elif member.state is MemberState.DOWN:
            logger.info("NODE %s down pid %d", member.name, member.pid)
            if isinstance(reason, Failed):
                self._lost.add(member.name)
                if self._state != "draining":
                    return
                error = reason.error
                if isinstance(error, NodeLost) and hasattr(error, "__notes__"):  # the traceback of the app
                    self._failed.append(error)
                else:
                    self._undrained.append(member.name)

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == RELOAD and not self._terminal.closed:
                    for member in self._members():
                        if member.state is MemberState.UP:  # the others read their files when they start
                            nursery.start_soon(self._reload, member.name)
                elif not self._first:
                    self._first = number
                    self._end.set()
                    self._leave()
                    self._patience.deadline = trio.current_time() + self._args.drain_timeout + _KILL
                else:
                    self._patience.cancel()

    async def _reload(self, name: str) -> None:
        """Make a node read its files again, and print the result."""
        assert self._fleet is not None
        try:
            lines = await reload(self._fleet, name)
        except LevadaError as error:
            lines = [f"has not read its files again: {error}"]
        for line in lines:
            _say(f"{name}: {printable(line)}")

    async def _list(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer ``levada nodes ls``."""
        fleet = self._fleet
        if fleet is None:
            return {"nodes": []}
        return {"nodes": [_facts(member) | {"starts_in": fleet.starts_in(member.name)} for member in fleet.members]}

    async def _restart(self, members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer ``levada nodes restart``, which asks for one node after another."""
        assert self._fleet is not None
        name = members.get("node")
        async with self._restarting:
            if self._state != "serving":
                raise ConfigurationError("the server is starting or ending: no node is restarted")
            try:
                await self._fleet.restart(str(name))
            except NodeLost as error:
                raise ConfigurationError(
                    f"{name} does not serve again, the others are as they were: {error}"
                ) from error
            return _facts(self._fleet[str(name)])

    def _members(self) -> Sequence[Member]:
        return [] if self._fleet is None else self._fleet.members

    async def _report(self) -> tuple[bool, Mapping[str, object]]:
        """Answer a health check: healthy while at least one node serves, because it serves all clients."""
        await self._look()
        nodes: list[dict[str, Any]] = []
        sums: dict[str, int] = dict.fromkeys(_SUMS, 0)
        answering = serving = 0
        for member in self._members():
            statistics = self._statistics.get((member.name, member.restarts), {})
            answers = member.state is MemberState.UP and bool(statistics)
            answering += answers
            serving += answers and self._fleet is not None and self._fleet.is_for_any(member.name)
            for name, value in statistics.items():
                sums[name] += value
            facts = _facts(member)
            nodes.append(
                {name: facts[name] for name in ("name", "state", "pid", "restarts")}
                | {"actors": statistics.get("actors")}
            )
        state: str = self._state
        if state == "serving" and answering < len(nodes):
            state = "degraded" if serving else "down"
        return state in ("serving", "degraded"), {"state": state, "urls": self._urls, "nodes": nodes, **sums}

    async def _look(self) -> None:
        """Ask the nodes for their statistics, at most once a second."""
        async with self._looking:
            if self._fleet is not None and trio.current_time() >= self._looked_at + _LOOK_EVERY:
                self._statistics = {
                    (node["name"], node["restarts"]): {name: node["snapshot"]["statistics"][name] for name in _SUMS}
                    for node in await look(self._fleet, 1)
                    if node["snapshot"] is not None
                }
                self._looked_at = trio.current_time()


def _common_urls(fleet: Fleet) -> list[str]:
    """Return the URLs that all nodes serve. Keepers of journals, which the app may start, serve none.

    Raises:
        ConfigurationError: they serve different ones.
    """
    members = (member for member in fleet.members if fleet.is_for_any(member.name))
    served = {member.name: fleet.choose(member.name).listeners for member in members}
    first = next(iter(served))
    for name, urls in served.items():
        if urls != served[first]:
            raise ConfigurationError(
                f"{first} serves {', '.join(served[first]) or 'nothing'}, and {name} serves {', '.join(urls) or 'nothing'}: "
                "an app must open the same listeners in the same order on each node; or give them ports instead of 0"
            )
    return served[first]


def _say(text: str) -> None:
    print(f"levada: {text}", file=sys.stderr, flush=True)


def _facts(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "state": member.state.value,
        "pid": member.pid or None,
        "restarts": member.restarts,
        "host": member.host,
        "started": member.started,
    }


@contextmanager
def logs_of_nodes() -> Iterator[None]:
    """While the block lasts, print the standard output of nodes; their standard error goes to the log."""

    def take(record: logging.LogRecord) -> bool:
        if getattr(record, "stream", "") != "stdout":
            return record.levelno >= logging.getLogger().level
        try:
            print(record.getMessage(), flush=True)
        except OSError:
            pass  # no process reads it any more
        return False

    before = output.level
    output.addFilter(take)
    output.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        output.removeFilter(take)
        output.setLevel(before)
