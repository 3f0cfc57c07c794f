"""``levada serve --url lumberjack://…``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from levada.actors import lumberjack
from levada.actors.authentication import Authenticate
from levada.framework import ActorSystem

__all__ = ["serve"]


def serve(
    system: ActorSystem,
    url: str,
    handler: Any,
    *,
    carrier: Any,
    drain_timeout: float,
    authenticate: Authenticate | None,
) -> AbstractAsyncContextManager[lumberjack.Reader]:
    """Serve one handler."""
    return lumberjack.serve(system, url, handler, carrier=carrier, authenticate=authenticate)
