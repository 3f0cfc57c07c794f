"""The health port: health checks at every path, and metrics at ``/metrics``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from levada.actors.health_server import Asked, HealthResponse, serve_answers
from levada.actors.metrics.serving import Scrapes

__all__ = ["Report", "serve_health"]

Report = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]
"""Returns whether the program is healthy, and details. It must answer well within the 5 seconds that a request has."""

_STARTING: Final = HealthResponse("503 Service Unavailable", "text/plain; charset=utf-8", b"starting\n")


async def serve_health(
    host: str,
    port: int,
    report: Report,
    scrapes: Callable[[], Scrapes | None],
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until cancelled. Every path but ``/metrics`` is a health check: 200 or 503, with the details as a JSON object.

    An answer also shows that the trio loop of this process is running.

    Args:
        host: the address to listen at.
        port: the port; 0 takes a free one.
        report: called for each health check.
        scrapes: returns the object that answers ``/metrics``, or None while there is no system.
        task_status: gets the URL.

    Raises:
        ConfigurationError: the address cannot be used.
    """

    async def answer(asked: Asked) -> HealthResponse:
        if asked.path == "/metrics":
            found = scrapes()
            return _STARTING if found is None else await found.answer(asked)
        well, facts = await report()
        status = "200 OK" if well else "503 Service Unavailable"
        return HealthResponse(status, "application/json", json.dumps(facts).encode() + b"\n")

    await serve_answers(host, port, answer, task_status)
