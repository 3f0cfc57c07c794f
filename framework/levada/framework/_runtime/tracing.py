"""Messages of a traced system: envelopes with the context of the sender, and the span around the handler.

A system without tracing never makes one of these envelopes. Messages that came over a connection have an envelope in any case
(`RemoteTell`, `RemoteAsk`), with a place for the context.

Private fields used here: ``Actor._cell``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from .ask import Ask, ThreadAsk, Wrapped
from .awaitables import coroutine_of

if TYPE_CHECKING:
    from levada.framework.tracing import Span, Tracing

    from .cell import Cell

__all__ = ["TracedAsk", "TracedTell", "TracedThreadAsk", "begin", "traced"]


class TracedTell(Wrapped):
    """A message and the context of its sender."""

    __slots__ = ("context",)

    def __init__(self, message: Any, context: object) -> None:
        self.message = message
        self.context = context


class TracedAsk(Ask):
    """A question and the context of the ask."""

    __slots__ = ("context",)

    def __init__(self, message: Any, target: Cell, context: object) -> None:
        super().__init__(message, target)
        self.context = context


class TracedThreadAsk(ThreadAsk):
    """A question from a thread and the context of the ask."""

    __slots__ = ("context",)

    def __init__(self, message: Any, target: Cell, context: object) -> None:
        super().__init__(message, target)
        self.context = context


def begin(cell: Any, kind: str, entry: Any) -> Span:
    """Begin the span for the handling of an entry, in the current context."""
    tracing: Tracing = cell.system.tracing
    return tracing.handle(cell, kind, entry.message, entry.context, asked=isinstance(entry, Ask))


def traced(handle: Callable[[Any, Any], Any], actor: Any, entry: Any) -> Any:
    """Call the function that handles an entry, and its coroutine, within a span."""
    if isinstance(entry, Ask) and entry.settled:
        return handle(actor, entry)
    cell = actor._cell
    extras = cell.make_extras()
    span = begin(cell, type(actor).__name__, entry)
    extras.traced = entry
    try:
        result = handle(actor, entry)
    except BaseException as error:
        _end(extras, span, error)
        raise
    coroutine = result
    if result is not None and type(result) is not CoroutineType:
        coroutine = coroutine_of(result)
    if coroutine is not None:
        return _finish(extras, span, coroutine)
    _end(extras, span, None)
    return None


async def _finish(extras: Any, span: Span, coroutine: Any) -> None:
    try:
        await coroutine
    except BaseException as error:
        _end(extras, span, error)
        raise
    _end(extras, span, None)


def _end(extras: Any, span: Span, error: BaseException | None) -> None:
    extras.traced = None
    span.leave()
    span.end(error)
