"""The interface for tracing: how the work that one message causes is followed from actor to actor.

A system that is made with ``ActorSystem(tracing=…)`` sends a context along with each message and calls a `Tracing` when a handler, an ask
or a channel begins. The framework does not know how spans are recorded: `levada.actors.otel` does this with OpenTelemetry.

Without it there is nothing to pay: such a system has other classes of mailboxes and envelopes, chosen when an actor is spawned.

Example:
    >>> import trio
    >>> from levada.framework import ActorSystem, actor
    >>> class Print(Span):
    ...     def __init__(self, name: str) -> None:
    ...         self.name = name
    ...         print(name, "begins")
    ...     def end(self, error: BaseException | None = None) -> None:
    ...         print(self.name, "ends")
    >>> class Printing(Tracing):
    ...     def handle(self, actor, kind, message, context, *, asked):
    ...         return Print(f"{kind} {message!r}")
    >>> async def show(text: str) -> None:
    ...     print("shown")
    >>> async def main() -> None:
    ...     async with ActorSystem(tracing=Printing()) as system:
    ...         system.spawn(show).tell("hello")
    >>> trio.run(main)
    show 'hello' begins
    shown
    show 'hello' ends
"""

from __future__ import annotations

import contextvars
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .identity import RemotePeer
    from .ref import Ref

__all__ = ["Span", "TraceHeaders", "Tracing", "current_tracing"]

TRACING: Final[contextvars.ContextVar[Tracing | None]] = contextvars.ContextVar("levada.tracing", default=None)
"""The tracing of the surrounding system: set in the system's block, and so in the contexts of its actors."""


_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_TRACESTATE: Final = re.compile(r"[\t\x20-\x7e]{1,512}", re.ASCII)


@attrs.frozen
class TraceHeaders:
    """A context as text for another process: the headers of W3C Trace Context."""

    traceparent: str
    """55 characters: version, trace, span and flags in hexadecimal digits."""
    tracestate: str = ""
    """Pairs of tracing systems, at most 512 characters; empty: none."""

    @classmethod
    def parse(cls, traceparent: object, tracestate: object = "") -> TraceHeaders | None:
        """Check what a peer sent.

        Returns:
            None if `traceparent` is not well-formed. A `tracestate` that is not well-formed, or is too long, counts as empty.
        """
        if not isinstance(traceparent, str) or not _TRACEPARENT.fullmatch(traceparent):
            return None
        known = isinstance(tracestate, str) and _TRACESTATE.fullmatch(tracestate) is not None
        return cls(traceparent, str(tracestate) if known else "")


class Span:
    """A piece of work that is being traced: ``with`` leaves and ends it. This class records nothing; derived ones are quick and do not raise."""

    __slots__ = ()

    @property
    def context(self) -> object:
        """The context of what this work causes."""
        return None

    def note(self, name: str, value: str | int) -> None:
        """Add a fact, for example the number of messages."""

    def leave(self) -> None:
        """Undo what `Tracing.handle` or `Tracing.serve` did to the current context; called in the task that called them, before `end`."""

    def end(self, error: BaseException | None = None) -> None:
        """End it; the second call does nothing.

        Args:
            error: what the work ended with; a cancellation is no failure.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.leave()
        self.end(error)


_NOTHING: Final = Span()


class Tracing:
    """Records the work of an actor system; this class records nothing. The methods of derived ones are quick and do not raise.

    A *context* is any object: it stands for the work that caused something, and belongs to the class that made it. None is no context.
    Everything but `current` is called in the system's thread.
    """

    __slots__ = ()

    elsewhere: ClassVar[str] = ""
    """``module:name`` of a class or function without arguments, which makes the tracing of this system's nodes; empty: they have none."""

    def current(self) -> object:
        """Return the context of the running code, which a message takes along. Also called in threads that tell or ask an actor."""
        return None

    def handle(self, actor: Ref[Any], kind: str, message: object, context: object, *, asked: bool) -> Span:
        """Begin a handler, and make its context the current one until `Span.leave`.

        Args:
            actor: the actor.
            kind: the name of its class.
            message: what it handles.
            context: came with the message.
            asked: whether the sender waits for an answer.
        """
        return _NOTHING

    def ask(self, to: Ref[Any], kind: str, message: object) -> Span:
        """Begin an ask, whose context the question takes along; `kind` is empty for an actor in another system."""
        return _NOTHING

    def channel(self, half: Literal["send", "receive"], name: str, context: object) -> Span:
        """Begin the life of one half of a channel. It is never ended if the half goes to another system.

        Args:
            half: which.
            name: the channel's name.
            context: of the code that opened the channel.
        """
        return _NOTHING

    def request(self, protocol: str, method: str, peer: str) -> Span:
        """Begin a request to a peer.

        Args:
            protocol: its name in lower case, for example ``rsocket``.
            method: what is asked for.
            peer: printable text for the other end.
        """
        return _NOTHING

    def serve(self, protocol: str, method: str, peer: str, context: object, links: Sequence[object] = ()) -> Span:
        """Begin to serve a peer's request, and make its context the current one until `Span.leave`.

        Args:
            protocol, method, peer: as for `request`.
            context: came with the request.
            links: further contexts, of requests that bring several pieces of work.
        """
        return _NOTHING

    def headers(self, context: object) -> TraceHeaders | None:
        """Return a context as text for a peer; None: there is nothing to send."""
        return None

    def context(self, headers: TraceHeaders, peer: RemotePeer | None) -> object:
        """Return the context that a peer sent. If it is not `RemotePeer.trace_trusted`, what gets the context begins a trace of its own."""
        return None


def current_tracing() -> Tracing | None:
    """Return the tracing of the system around: in its block, and in its actors and their tasks. None if it has none."""
    return TRACING.get()
