"""The health port: health checks at every path, and metrics at ``/metrics``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from levada.actors.answering import Asked, Response, serve_answers
from levada.actors.metrics.serving import Scrapes

__all__ = ["Report", "serve_health"]

Report = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]
"""Returns whether all is well, and details, within a second or so."""

_STARTING: Final = Response("503 Service Unavailable", "text/plain; charset=utf-8", b"starting\n")


async def serve_health(
    host: str,
    port: int,
    report: Report,
    scrapes: Callable[[], Scrapes | None],
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until cancelled: for any path but ``/metrics`` with 200 if all is well, else 503, and a JSON object.

    An answer also shows that the trio loop of this process runs.

    Args:
        host: to listen at.
        port: 0 takes a free one.
        report: is called for each request.
        scrapes: returns what answers requests for ``/metrics``; None as long as there is no system.
        task_status: gets the URL.

    Raises:
        ConfigurationError: the address cannot be used.
    """

    async def answer(asked: Asked) -> Response:
        if asked.path == "/metrics":
            found = scrapes()
            return _STARTING if found is None else await found.answer(asked)
        well, facts = await report()
        status = "200 OK" if well else "503 Service Unavailable"
        return Response(status, "application/json", json.dumps(facts).encode() + b"\n")

    await serve_answers(host, port, answer, task_status)
