"""Messages and channels of a traced system: envelopes with the context of the sender, the span around a handler, spans for the halves of channels.

A system without tracing never makes one of these envelopes. Messages that came over a connection have an envelope in any case
(`RemoteTell`, `RemoteAsk`), with a place for the context.

Private fields used here: ``Actor._cell``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal

from levada.framework.tracing import TRACING

from .ask import Ask, ThreadAsk, Wrapped
from .channel_core import ChannelCore, Half, TerminalState
from .scheduler import coroutine_of

if TYPE_CHECKING:
    from levada.framework.tracing import Span, Tracing

    from .cell import Cell

__all__ = ["TracedAsk", "TracedChannel", "TracedTell", "TracedThreadAsk", "begin", "make_core", "traced"]


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


class TracedChannel(ChannelCore):
    """A channel that keeps the context in which it was opened, and counts its messages."""

    __slots__ = ("opener", "sent")

    def __init__(self, item_type: Any, window: int, name: str | int | None, opener: object) -> None:
        super().__init__(item_type, window, name)
        self.opener = opener
        """The context of the code that opened the channel."""
        self.sent = 0

    def accept(self, entry: Any) -> bool:
        if len(self.queue) >= self.limit:
            return super().accept(entry)
        self.used = True
        self.check_thread()
        self.put(entry)
        return True

    def put(self, entry: Any) -> None:
        super().put(entry)
        self.sent += 1

    def told(self, wrap: Callable[[Any], Any] | None, message: Any) -> TracedTell:
        """Return the entry for an actor's mailbox for a message, after `wrap`."""
        return TracedTell(message if wrap is None else wrap(message), self.opener)

    def trace(self, tracing: Tracing, name: Literal["send", "receive"], half: Half) -> None:
        """Record the life of a half, unless it goes to another system."""
        span = tracing.channel(name, self.name, self.opener)

        def ended() -> None:
            if not half.away:
                span.note("levada.channel.messages", self.sent - (self.undelivered if name == "receive" else 0))
                span.note("levada.channel.state", half.state.value)
                span.end(None if half.state in _AS_MEANT else half.error(self.name))

        half.on_terminated(ended)


_AS_MEANT = (TerminalState.FINISHED, TerminalState.CANCELLED, TerminalState.RECEIVER_CLOSED)
"""Ends that one of the two users asked for."""


def make_core(item_type: Any, window: int, name: str | int | None, *, opener: object = None) -> ChannelCore:
    """Make the core of a channel, traced if the surrounding system is.

    Args:
        item_type, window, name: as for `ChannelCore`.
        opener: the context of the code that opened the channel; None: the current one.
    """
    tracing = TRACING.get()
    if tracing is None:
        return ChannelCore(item_type, window, name)
    core = TracedChannel(item_type, window, name, tracing.current() if opener is None else opener)
    core.trace(tracing, "send", core.sender)
    core.trace(tracing, "receive", core.receiver)
    return core
