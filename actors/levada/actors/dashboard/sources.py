"""The sources of a dashboard: a system in the same process, or another program's console."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from levada.actors.console import View, Viewer, connect_console
from levada.actors.console.snapshot import Watching
from levada.framework import ActorSystem

from .config import DashboardConfig

__all__ = ["Source", "console_source", "system_source"]

Source = Callable[[], AbstractAsyncContextManager[Watching]]
"""Opens the system that a dashboard shows for one browser. That, and each request, raises `LevadaError` if the program has ended or hangs."""


@asynccontextmanager
async def system_source(system: ActorSystem, config: DashboardConfig) -> AsyncIterator[Watching]:
    """Start a viewer of a system in this process, and close it at the end of the block."""
    viewer = Viewer(system, actions=config.actions, tracebacks=config.tracebacks)
    try:
        yield viewer.answer
    finally:
        viewer.close()


@asynccontextmanager
async def console_source(path: str | os.PathLike[str], config: DashboardConfig) -> AsyncIterator[Watching]:
    """Connect to the console of a program, which may restart. What the console allows and this dashboard does not is left out."""
    async with connect_console(path) as console:

        async def answer(members: Mapping[str, Any]) -> dict[str, Any]:
            if "view" not in members:
                if not config.actions:
                    return {"refused": "actions are not allowed: start levada top --web with --actions"}
                return await console.act(members)
            found = await console.view(View.from_json(members["view"]))
            if not config.actions:
                found["actions"] = []
            if not config.tracebacks:
                for each in found.get("news", ()):
                    each.pop("traceback", None)
            return found

        yield answer
