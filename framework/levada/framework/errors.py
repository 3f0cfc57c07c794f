"""Every error that levada raises, as one tree below `LevadaError`.

The rules of this file:

* **Closed** means that this program did it, **lost** that somebody else did: two classes wherever both can happen.
* What a program may want to know is a field, never text to be parsed; the text says what was wanted, what came, what to do.
* The text of an error is one printable line, whatever a peer has put into its fields: `LevadaError` sees to that for all of them. A
  class that has more to say than its `detail` overrides `_line`, never ``__str__``.
* An error holds plain values only, no refs and no tasks, so that each one survives `pickle` (executors of a data engine send them home).
* A class also derives from the built-in that fits (`TimeoutError`, `ConnectionError`, `ValueError`, `LookupError`).
"""

from __future__ import annotations

from typing import Any, Final

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
    """What was wanted, what came, what to do about it; one line. Text of a peer is in it as it came: print the error, not this."""

    def __str__(self) -> str:
        return printable(self._line(), _LONGEST)

    def _line(self) -> str:
        return self.detail


@attrs.define(eq=False, slots=False, str=False)
class ConfigurationError(LevadaError, ValueError):
    """A value, an annotation or a combination of them that cannot work; raised where it is given, not where it hurts."""


@attrs.define(eq=False, slots=False, str=False)
class WrongThread(LevadaError, RuntimeError):
    """Something that belongs to the thread of an actor system was used in another thread; nothing was put in and nothing changed."""


def wrong_thread(what: str, cure: str = "trio.from_thread.run_sync()") -> WrongThread:
    """Make the error for `what` was tried; `cure` is the way that works."""
    return WrongThread(f"{what} from a foreign thread or trio run; use {cure}")


@attrs.define(eq=False, slots=False, str=False)
class ProtocolError(LevadaError):
    """A rule of a wire protocol was broken."""

    rule: str = ""
    """Id of the broken rule, for example ``"LJ-2"``; empty if the rule has no id."""


@attrs.define(eq=False, slots=False, str=False)
class LocalProtocolError(ProtocolError):
    """The caller asked for something the protocol forbids now; nothing was sent and no state changed."""


@attrs.define(eq=False, slots=False, str=False)
class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; the connection is over."""

    offset: int = 0
    """Octets received before the one at fault."""

    def _line(self) -> str:
        return f"{self.detail} [{self.rule}, octet {self.offset}]"


@attrs.define(eq=False, slots=False, str=False)
class DecodeError(LevadaError, ValueError):
    """Octets that are not a message: where in the value, and why."""

    path: str = ""
    """The place in the value, for example ``"Follow.prices[3]"``; empty for the outermost value."""

    def _line(self) -> str:
        return f"{self.path}: {self.detail}" if self.path else self.detail


@attrs.define(eq=False, slots=False, str=False)
class CarrierError(LevadaError):
    """What moves the octets failed or has ended."""


@attrs.define(eq=False, slots=False, str=False)
class ConnectionClosed(CarrierError):
    """This side closed the connection; using it afterwards is a mistake in this program."""


@attrs.define(eq=False, slots=False, str=False)
class ConnectionLost(CarrierError, ConnectionError):
    """The peer, the network or the operating system ended the connection."""

    code: int | None = None
    """The peer's code, if the carrier has codes and the peer gave one; the own one, where this side closed as the peer broke a rule;
    the HTTP status, where a WebSocket was refused."""


@attrs.define(eq=False, slots=False, str=False)
class IdleTimeout(ConnectionLost, TimeoutError):
    """Nothing came from the peer for longer than the agreed idle time."""


@attrs.define(eq=False, slots=False, str=False)
class StreamError(CarrierError):
    """One stream of a connection ended early; the connection lives on."""

    code: int = 0
    """The code that the peer gave."""


@attrs.define(eq=False, slots=False, str=False)
class StreamWasReset(StreamError):
    """The peer gave up sending on this stream; what it had not delivered is lost."""


@attrs.define(eq=False, slots=False, str=False)
class StreamWasStopped(StreamError):
    """The peer asked for no more octets on this stream."""


@attrs.define(eq=False, slots=False, str=False)
class DatagramTooLarge(CarrierError, ValueError):
    """A datagram does not fit the path."""

    size: int = 0
    """Octets of the datagram that was refused."""
    limit: int = 0
    """Largest datagram that fits now, in octets."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelError(LevadaError):
    """A channel cannot do what was asked; the subclass says why. Errors of a channel are sticky: each later call raises the same."""

    channel: str = ""
    """Name of the channel, as in logs."""


@attrs.define(eq=False, slots=False, str=False)
class EndOfChannel(ChannelError):
    """`receive()` after the last message of a channel that was finished. Iteration just ends instead."""


@attrs.define(eq=False, slots=False, str=False)
class SenderFinished(ChannelError):
    """This sender was finished or cancelled by this program; it takes no more messages."""


@attrs.define(eq=False, slots=False, str=False)
class ReceiverClosed(ChannelError):
    """The receiver was closed: by the other side, seen from a sender; by this program, seen from the receiver itself."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelCancelled(ChannelError):
    """The sender gave the channel up; messages that were on their way are discarded."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelLost(ChannelError):
    """The message that carried the other half was lost in transit, so nobody holds it."""


@attrs.define(eq=False, slots=False, str=False)
class ChannelConnectionLost(ChannelError, ConnectionLost):
    """The connection under a networked channel was lost."""


@attrs.define(eq=False, slots=False, str=False)
class HandleMoved(ChannelError):
    """This handle was sent away inside a message; the receiver of that message has it now."""


@attrs.define(eq=False, slots=False, str=False)
class HandleNotForwardable(ChannelError):
    """This handle came from another system and cannot be sent on to a third one."""


@attrs.define(eq=False, slots=False, str=False)
class Undelivered(ChannelError):
    """Messages are known not to have arrived."""

    count: int = 0
    """How many."""


@attrs.define(eq=False, slots=False, str=False)
class NoValue(ChannelError):
    """A oneshot ended, or the answer to an ask was given up, without a value."""


@attrs.define(eq=False, slots=False, str=False)
class ActorError(LevadaError):
    """An actor cannot do what was asked; the subclass says why."""

    actor: str = ""
    """Path of the actor, for example ``"/desk/prices"``."""


@attrs.define(eq=False, slots=False, str=False)
class ActorStopped(ActorError):
    """The actor has stopped, or failed while it handled this very message.

    If a handler's exception was the cause, it is also the ``__cause__``.
    """

    reason: Any = None
    """Why it stopped: a `levada.framework.Reason`."""
    message: Any = None
    """The message that was not handled, given back."""


@attrs.define(eq=False, slots=False, str=False)
class MailboxFull(ActorError):
    """The mailbox has no room and its policy forbids waiting or dropping."""

    capacity: int = 0
    """Messages that the mailbox holds at most."""
    message: Any = None
    """The message that was not taken, given back."""


@attrs.define(eq=False, slots=False, str=False)
class AskTimeout(ActorError, TimeoutError):
    """No answer in time. The handler may still be at work; its late answer is dropped and counted."""

    seconds: float = 0.0
    """The time that was allowed."""
    message: Any = None
    """The question."""


@attrs.define(eq=False, slots=False, str=False)
class AskCycle(ActorError):
    """Waiting would never end: the actor waited for is itself, over one or more others, waiting for the one that asks."""

    cycle: tuple[str, ...] = ()
    """Paths of the actors in the order of waiting; the first is also the last."""


@attrs.define(eq=False, slots=False, str=False)
class NameTaken(ActorError, LookupError):
    """A name that must be unique is in use."""

    name: str = ""
    """The name that was asked for."""


@attrs.define(eq=False, slots=False, str=False)
class NameUnknown(ActorError, LookupError):
    """Nobody can be found under this name: no actor has it, or the other system does not let it be looked up."""

    name: str = ""
    """The name that was asked for."""


@attrs.define(eq=False, slots=False, str=False)
class RemoteFailure(ActorError):
    """What is known here of an exception in another system: its class and its text. The exception itself stays there."""

    kind: str = ""
    """Name of its class, for example ``"KeyError"``."""

    def _line(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind
