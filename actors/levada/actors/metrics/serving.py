"""Scrapes over HTTP: `serve_metrics`, and `Scrapes` for programs that have an HTTP endpoint of their own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from levada.actors.health_server import Asked, HealthResponse, serve_answers
from levada.framework import ActorSystem
from levada.framework.embedding import FailureLog
from levada.framework.metrics import Series
from levada.framework.platform import PLATFORM
from levada.transports.carriers.streams import plain_nursery

from .collecting import Metrics

__all__ = ["Scrapes", "serve_metrics"]

logger = logging.getLogger("levada.actors.metrics")

_PLAIN: Final = "text/plain; charset=utf-8"
_FRESH: Final = 1.0
"""Seconds for which scrapes get the same figures."""
_SHARE: Final = 0.1
"""The largest share of a core for scrapes: figures that took long to collect are reused for longer."""


class Scrapes:
    """Answers scrapes of one system."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._series: Series = {}
        self._fresh_until = 0.0
        self._perf_counter = PLATFORM.get().perf_counter
        self._line = trio.Lock()
        self._failures = FailureLog()

    async def answer(self, asked: Asked) -> HealthResponse:
        """Answer a request in the format that it asks for.

        The status is 501 if the extra is not installed, and 500 if collecting fails; the traceback is in the log.
        """
        try:
            from .rendering import render
        except ModuleNotFoundError as error:
            return HealthResponse("501 Not Implemented", _PLAIN, f"{error}\n".encode())
        try:
            async with self._line:
                if trio.current_time() >= self._fresh_until:
                    began = self._perf_counter()
                    self._series = await self._metrics.collect()
                    self._fresh_until = trio.current_time() + max(_FRESH, (self._perf_counter() - began) / _SHARE)
                content_type, body = await render(self._series, asked.accept)
        except Exception as error:  # noqa: BLE001 - a bug in metrics must not end the program that they measure
            self._failures.log(logger, error, "a scrape failed", event="scrape_failed")
            return HealthResponse("500 Internal Server Error", _PLAIN, b"the scrape failed; see the log\n")
        return HealthResponse("200 OK", content_type, body)


@asynccontextmanager
async def serve_metrics(system: ActorSystem, host: str = "127.0.0.1", port: int = 9464) -> AsyncIterator[str]:
    """Answer the scrapes of Prometheus while the block lasts, at any path.

    ``levada serve --health HOST:PORT`` has this at ``/metrics``. There is no login: every process that can reach the port can read the
    figures, with the names of classes, journals, queries and listeners.

    Args:
        system: has been entered.
        host: the address to listen at.
        port: the port; 0 takes a free one.

    Yields:
        The URL to scrape.

    Raises:
        ConfigurationError: the address cannot be used.
        ModuleNotFoundError: the extra is not installed: ``pip install 'levada[prometheus]'``.
    """
    from . import rendering  # noqa: F401 - fails at once if the extra is missing

    async with plain_nursery() as nursery:
        url: str = await nursery.start(serve_answers, host, port, Scrapes(Metrics(system)).answer)
        yield f"{url}metrics"
        nursery.cancel_scope.cancel()
