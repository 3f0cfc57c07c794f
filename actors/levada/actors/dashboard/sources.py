"""The sources of a dashboard: a system in the same process, or another program's console."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from levada.actors.console import View, Viewer, connect_console
from levada.framework import ActorSystem

from .config import DashboardConfig

__all__ = ["ConsoleSource", "Looking", "Source", "SystemSource"]


class Looking(Protocol):
    """A system, as one browser sees it."""

    async def view(self, view: View) -> dict[str, Any]:
        """Return the rows in view. Raises `LevadaError` if the program has ended or does not answer."""
        ...

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare or confirm an action. The answer has ``refused``, with a reason, if it is refused."""
        ...


class Source(Protocol):
    """The system that a dashboard shows."""

    def open(self) -> AbstractAsyncContextManager[Looking]:
        """Open the system for one browser. Raises `LevadaError` if the program is not running."""
        ...


class SystemSource:
    """A system in this process."""

    def __init__(self, system: ActorSystem, config: DashboardConfig) -> None:
        self._system = system
        self._config = config

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Looking]:
        """Start a viewer, and close it at the end of the block."""
        viewer = Viewer(self._system, actions=self._config.actions, tracebacks=self._config.tracebacks)
        try:
            yield _OwnLooking(viewer)
        finally:
            viewer.close()


class _OwnLooking:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    async def view(self, view: View) -> dict[str, Any]:
        return await self._viewer.answer({"view": view.to_json()})

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        return await self._viewer.answer(members)


class ConsoleSource:
    """A program that serves a console. It may restart; each browser has a connection of its own."""

    def __init__(self, path: str | os.PathLike[str], config: DashboardConfig) -> None:
        self._path = path
        self._config = config

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Looking]:
        """Connect to the console."""
        async with connect_console(self._path) as console:
            yield _ConsoleLooking(console.view, console.act, self._config)


class _ConsoleLooking:
    """Removes what the console allows and this dashboard does not."""

    def __init__(self, view: Any, act: Any, config: DashboardConfig) -> None:
        self._view = view
        self._act = act
        self._config = config

    async def view(self, view: View) -> dict[str, Any]:
        answer: dict[str, Any] = await self._view(view)
        if not self._config.actions:
            answer["actions"] = []
        if not self._config.tracebacks:
            for each in answer.get("news", ()):
                each.pop("traceback", None)
        return answer

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        if not self._config.actions:
            return {"refused": "actions are not allowed: start levada top --web with --actions"}
        answer: dict[str, Any] = await self._act(members)
        return answer
