"""Where a dashboard looks: the system of its own program, or another program's console."""

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
    """One browser's look at a system."""

    async def view(self, view: View) -> dict[str, Any]:
        """Return the rows in view. Raises `LevadaError` if the program has gone or does not answer."""
        ...

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare or confirm an action; ``refused`` in the answer says why not."""
        ...


class Source(Protocol):
    """What a dashboard shows."""

    def open(self) -> AbstractAsyncContextManager[Looking]:
        """Begin to look for one browser. Raises `LevadaError` if the program is not there."""
        ...


class SystemSource:
    """A system in this process."""

    def __init__(self, system: ActorSystem, config: DashboardConfig) -> None:
        self._system = system
        self._config = config

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Looking]:
        """Begin to look."""
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
    """A program that serves a console. It may end and start again; each browser has a connection of its own."""

    def __init__(self, path: str | os.PathLike[str], config: DashboardConfig) -> None:
        self._path = path
        self._config = config

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Looking]:
        """Connect."""
        async with connect_console(self._path) as console:
            yield _ConsoleLooking(console.view, console.act, self._config)


class _ConsoleLooking:
    """Leaves out what the program allows and this dashboard does not."""

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
            return {"refused": "this dashboard changes nothing: start it with --actions"}
        answer: dict[str, Any] = await self._act(members)
        return answer
