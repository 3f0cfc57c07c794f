"""The tracing of the surrounding system: set in the system's block, and so in the contexts of its actors."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from levada.framework.tracing import Tracing

__all__ = ["TRACING"]

TRACING: Final[contextvars.ContextVar[Tracing | None]] = contextvars.ContextVar("levada.tracing", default=None)
