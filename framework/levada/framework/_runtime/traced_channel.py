"""Channels of a traced system: a span for the life of each half, with the number of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from levada.framework.tracing import TRACING

from .channel_core import ChannelCore, Half, TerminalState
from .tracing import TracedTell

if TYPE_CHECKING:
    from collections.abc import Callable

    from levada.framework.tracing import Tracing

__all__ = ["TracedChannel", "make_core"]


class TracedChannel(ChannelCore):
    """A channel that keeps the context in which it was opened, and counts its messages."""

    __slots__ = ("opener", "sent")

    def __init__(self, item_type: Any, window: int, name: str | None, opener: object) -> None:
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


def make_core(item_type: Any, window: int, name: str | None, *, opener: object = None) -> ChannelCore:
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
