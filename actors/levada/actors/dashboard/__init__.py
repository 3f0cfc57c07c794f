"""A dashboard of a running system in the browser: ``serve_dashboard(system)``, or ``levada top --web`` beside a program with a console.

It shows actors, connections, channels, journals, queries, nodes, and what goes wrong, live.  It changes nothing unless that is allowed
(`DashboardConfig.actions`).  Nothing is computed while no browser is connected, and only the rows in sight while one is::

    async with ActorSystem() as system, serve_dashboard(system) as dashboard:
        print(dashboard.login_url())

It listens at loopback unless told otherwise.  The address that is printed holds a one-time token; the browser exchanges it for a cookie.

Needs the extra ``dashboard``: h11 parses HTTP, wsproto frames WebSockets.
"""

from __future__ import annotations

try:
    import h11 as _h11  # noqa: F401 - for the text of the error
    import wsproto as _wsproto  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"levada.actors.dashboard needs {missing.name}: pip install 'levada[dashboard]'", name=missing.name
    ) from missing

from .config import DashboardConfig
from .server import Dashboard, serve_console_dashboard, serve_dashboard

__all__ = ["Dashboard", "DashboardConfig", "serve_console_dashboard", "serve_dashboard"]
