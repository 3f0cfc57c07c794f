"""A dashboard of a running system in the browser: ``serve_dashboard(system)``, or ``levada top --web`` for a program with a console.

It shows actors, connections, channels, journals, queries, nodes and failures, live.  It can change nothing unless `DashboardConfig.actions`
allows it.  Without a browser it takes a row of figures every five seconds, and for a browser it computes the rows in view only::

    async with ActorSystem() as system, serve_dashboard(system) as dashboard:
        print(dashboard.login_url())

By default it listens at loopback.  The printed address has a one-time token, which the browser exchanges for a cookie.

Needs the extra ``dashboard``: h11 parses HTTP, wsproto frames WebSockets.
"""

from __future__ import annotations

try:
    import h11 as _h11  # noqa: F401 - to name the missing package
    import wsproto as _wsproto  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"levada.actors.dashboard needs {missing.name}: pip install 'levada[dashboard]'", name=missing.name
    ) from missing

from .config import DashboardConfig
from .server import Dashboard, serve_console_dashboard, serve_dashboard

__all__ = ["Dashboard", "DashboardConfig", "serve_console_dashboard", "serve_dashboard"]
