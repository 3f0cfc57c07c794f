"""Every error that levada raises, as one tree below `LevadaError`.

The rules of this file:

* **Closed** means that this program did it, **lost** that the peer or the network did. Where both can happen there are two classes.
* Programs read fields and never parse text. The text says what was wanted, what came, what to do.
* The text of an error is one printable line, even if a peer chose the contents of its fields: `LevadaError` takes care of this.
  A class with more to say than its `detail` overrides `_line`, never ``__str__``.
* An error holds plain values only, no refs and no tasks, so it survives `pickle` (executors of a data engine send errors home).
* A class also derives from the built-in that fits (`TimeoutError`, `ConnectionError`, `ValueError`, `LookupError`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import attrs

from .text import printable

__all__ = [
    "ActorError", "ActorStopped", "AskCycle", "AskTimeout", "CarrierError", "ChannelCancelled",
    "ChannelConnectionLost", "ChannelError", "ChannelLost", "ConfigurationError", "ConnectionClosed",
    "ConnectionLost", "DatagramTooLarge", "DecodeError", "EndOfChannel", "HandleMoved", "HandleNotForwardable",
    "IdleTimeout", "LevadaError", "LocalProtocolError", "MailboxFull", "NameTaken", "NameUnknown", "NoValue",
    "ProtocolError", "ReceiverClosed", "RemoteFailure", "RemoteProtocolError", "SenderFinished", "StreamError",
    "StreamWasReset", "StreamWasStopped", "Undelivered", "WrongThread",
]  # fmt: skip

_LONGEST: Final = 10_000  # characters; most peers' texts are cut to far less before


@attrs.define(eq=False, slots=False, str=False)
class LevadaError(Exception):
    """Root of every error that levada raises on purpose."""

    detail: str = ""
    """One line: what was wanted, what came, what to do. It may contain a peer's text unchanged: print the error, not this."""
    loss: ClassVar[str] = ""
    """The loss that ends a handler by this error, in words for peers; empty if the handler itself is at fault."""

    def __str__(self) -> str:
        return printable(self._line(), _LONGEST)

    def _line(self) -> str:
        return self.detail


@attrs.define(eq=False, slots=False, str=False)
class ConfigurationError(LevadaError, ValueError):
    """A value, an annotation or a combination of them cannot work; raised where it is given."""


@attrs.define(eq=False, slots=False, str=False)
class WrongThread(LevadaError, RuntimeError):
    """Another thread, or a forked process, used something that belongs to the thread of an actor system; nothing changed."""


def wrong_thread(what: str, cure: str = "trio.from_thread.run_sync()", *, forked: bool = False) -> WrongThread:
    """Make the error for the call `what`; `cure` is the call that works, except in a forked process."""
    if forked:
        cure = "a connection, and multiprocessing's start method spawn"
        return WrongThread(f"{what} in a forked process, where its actor system does not run; use {cure}")
    return WrongThread(f"{what} from a foreign thread or trio run; use {cure}")


@attrs.define(eq=False, slots=False, str=False)
class ProtocolError(LevadaError):
    """A rule of a wire protocol was broken."""

    rule: str = ""
    """The id of the broken rule, for example ``"LJ-2"``; empty if the rule has no id."""


@attrs.define(eq=False, slots=False, str=False)
class LocalProtocolError(ProtocolError):
    """The caller asked for something the protocol forbids now; nothing was sent and no state changed."""


@attrs.define(eq=False, slots=False, str=False)
class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; the connection is over."""

    offset: int = 0
    """The number of bytes received before the one at fault."""

    def _line(self) -> str:
        return f"{self.detail} [{self.rule}, octet {self.offset}]"


@attrs.define(eq=False, slots=False, str=False)
class DecodeError(LevadaError, ValueError):
    """These bytes are not a message: where in the value, and why."""

    path: str = ""
    """The place in the value, for example ``"Follow.prices[3]"``; empty for the outermost value."""

    def _line(self) -> str:
        return f"{self.path}: {self.detail}" if self.path else self.detail


@attrs.define(eq=False, slots=False, str=False)
class CarrierError(LevadaError):
    """A carrier failed or has ended."""


@attrs.define(eq=False, slots=False, str=False)
class ConnectionClosed(CarrierError):
    """This side closed the connection; using it afterwards is a mistake in this program."""


@attrs.define(eq=False, slots=False, str=False)
class ConnectionLost(CarrierError, ConnectionError):
    """The peer, the network or the operating system ended the connection."""

    loss = "a connection was lost"

    code: int | None = None
    """The peer's code, if the carrier has codes and the peer gave one; our own code if this side closed because the peer broke a rule;
    the HTTP status if a WebSocket was refused."""


@attrs.define(eq=False, slots=False, str=False)
class IdleTimeout(ConnectionLost, TimeoutError):
    """Nothing came from the peer for longer than the agreed idle time."""


@attrs.define(eq=False, slots=False, str=False)
class StreamError(CarrierError):
    """One stream of a connection ended early; the connection lives on."""

    loss = "a stream of a connection ended early"

    code: int = 0
    """The code that the peer gave."""


@attrs.define(eq=False, slots=False, str=False)
class StreamWasReset(StreamError):
    """The peer stopped sending on this stream; data that had not arrived is lost."""


@attrs.define(eq=False, slots=False, str=False)
class StreamWasStopped(StreamError):
    """The peer wants no more bytes on this stream."""


@attrs.define(eq=False, slots=False, str=False)
class DatagramTooLarge(CarrierError, ValueError):
    """A datagram does not fit the path."""

    size: int = 0
    """The size of the refused datagram, in bytes."""
    limit: int = 0
    """The largest datagram that fits now, in bytes."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelError(LevadaError):
    """A channel cannot do this; the subclass says why. Errors of a channel are sticky: each later call raises the same one."""

    channel: str = ""
    """The name of the channel, as in logs."""


@attrs.define(eq=False, slots=False, str=False)
class EndOfChannel(ChannelError):
    """`receive()` was called after the last message of a finished channel. Iteration just ends instead."""


@attrs.define(eq=False, slots=False, str=False)
class SenderFinished(ChannelError):
    """This program finished or cancelled this sender; it takes no more messages."""


@attrs.define(eq=False, slots=False, str=False)
class ReceiverClosed(ChannelError):
    """The receiver was closed: by the other side if a sender raises this, by this program if the receiver does."""

    loss = "the reader of a channel has left"


@attrs.define(eq=False, slots=False, str=False)
class ChannelCancelled(ChannelError):
    """The sender cancelled the channel; queued messages are discarded."""

    loss = "a channel was cancelled"

    reason: str = ""
    """Why, as the sender's side says it for others; empty if it does not. From another process it is the text of a peer."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelLost(ChannelError):
    """The message that carried the other half was lost in transit, so no one holds that half."""

    loss = "a channel was lost"


@attrs.define(eq=False, slots=False, str=False)
class ChannelConnectionLost(ChannelError, ConnectionLost):
    """The connection under a networked channel was lost."""

    loss = "the connection under a channel was lost"


@attrs.define(eq=False, slots=False, str=False)
class HandleMoved(ChannelError):
    """This handle was sent inside a message; the receiver of the message has it now."""


@attrs.define(eq=False, slots=False, str=False)
class HandleNotForwardable(ChannelError):
    """This handle came from another system and cannot be sent on to a third."""


@attrs.define(eq=False, slots=False, str=False)
class Undelivered(ChannelError):
    """Some messages did not arrive."""

    loss = "messages of a channel were lost"

    count: int = 0
    """How many."""


@attrs.define(eq=False, slots=False, str=False)
class NoValue(ChannelError):
    """A oneshot ended without a value, or an actor gave up the answer to an ask."""

    loss = "an answer was given up"


@attrs.define(eq=False, slots=False, str=False)
class ActorError(LevadaError):
    """An actor cannot do this; the subclass says why."""

    actor: str = ""
    """The path of the actor, for example ``"/desk/prices"``."""


@attrs.define(eq=False, slots=False, str=False)
class ActorStopped(ActorError):
    """The actor has stopped, or failed on this message; only if it failed on this message, the exception is also the ``__cause__``."""

    loss = "an actor has stopped"

    reason: Any = None
    """Why it stopped: a `levada.framework.Reason`."""
    message: Any = None
    """The message that was not handled, given back."""


@attrs.define(eq=False, slots=False, str=False)
class MailboxFull(ActorError):
    """The mailbox is full, and its policy forbids waiting or dropping."""

    loss = "the mailbox of an actor is full"

    capacity: int = 0
    """The most messages that the mailbox holds."""
    message: Any = None
    """The message that was not taken, given back."""


@attrs.define(eq=False, slots=False, str=False)
class AskTimeout(ActorError, TimeoutError):
    """No answer came in time. The handler may still be running; its late answer is dropped and counted."""

    loss = "an actor did not answer in time"

    seconds: float = 0.0
    """The time that was allowed."""
    message: Any = None
    """The question."""


@attrs.define(eq=False, slots=False, str=False)
class AskCycle(ActorError):
    """A deadlock: the target already waits for the asker, directly or through other actors."""

    cycle: tuple[str, ...] = ()
    """The paths of the actors in the order of waiting; the first is also the last."""


@attrs.define(eq=False, slots=False, str=False)
class NameTaken(ActorError, LookupError):
    """A name that must be unique is in use."""

    name: str = ""
    """The name that was asked for."""


@attrs.define(eq=False, slots=False, str=False)
class NameUnknown(ActorError, LookupError):
    """No actor has this name, or the other system does not expose it."""

    name: str = ""
    """The name that was asked for."""


@attrs.define(eq=False, slots=False, str=False)
class RemoteFailure(ActorError):
    """An exception in another system. Only the name of its class and its text travel."""

    loss = "an actor of another process has failed"

    kind: str = ""
    """The name of its class, for example ``"KeyError"``."""

    def _line(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def loss_of(error: BaseException) -> str:
    """Return the loss that ended the code which raised this error, in words for peers; empty if that code itself has failed.

    Of an actor that failed on a message its own error counts, of a group each of its parts. A channel that was cancelled for a reason was
    lost for that reason.

    Example:
        >>> loss_of(AskTimeout("/desk did not answer"))
        'an actor did not answer in time'
        >>> loss_of(ExceptionGroup("both", [AskTimeout("/desk did not answer"), KeyError("tea")]))
        ''
    """
    if isinstance(error, BaseExceptionGroup):
        losses = [loss_of(each) for each in error.exceptions]
        return losses[0] if all(losses) else ""
    if isinstance(error, ActorStopped) and error.__cause__ is not None:
        return loss_of(error.__cause__)
    if isinstance(error, ChannelCancelled) and error.reason:
        return error.reason
    return error.loss if isinstance(error, LevadaError) else ""
