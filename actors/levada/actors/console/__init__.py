"""Snapshots of a running system's actors, as text in the program itself or over a Unix socket for ``levada top``.

Until a client asks, the console costs a row of figures every five seconds (`levada.actors.console.history`).

A snapshot is taken in the system's thread without a pause, at about 10 µs for each actor,
so the number of actors in it is limited.

In the program::

    async with ActorSystem() as system, serve_console(system, "/run/user/1000/desk.console"):
        ...

and in a terminal: ``levada top /run/user/1000/desk.console``.
"""

from __future__ import annotations

from .client import ConsoleClient, connect_console
from .server import Console, serve_console
from .snapshot import NodeSnapshot, Row, Snapshot, take_snapshot
from .view import SORTS, Sort, show, table, text
from .viewing import View, Viewer

__all__ = [
    "SORTS", "Console", "ConsoleClient", "NodeSnapshot", "Row", "Snapshot", "Sort", "View", "Viewer", "connect_console", "serve_console",
    "show", "table", "take_snapshot", "text",
]  # fmt: skip
