"""What stands in for the peer's half of each channel (`HalfRecord`), halves as actors, and the links between them.

* A half that the program uses is a child actor of its connection, from its beginning until the half is gone. The connection and the
  channel drive it by direct calls: a turn of a mailbox would cost more than all the rest. The calls are sync and raise nothing.
* A channel that travels in a message leaves a half here. That half is linked, one way, to the half that carries the message, until the
  core reports that the peer's program has the other half (`Reached`) or will never have it: then the link delivers the exit `Lost`. The
  core finds all lost halves, at any depth, in one step. This module does not repeat that work, and no actor's end ends another by itself.
* If other code ends the actor, the channel is cancelled or closed. The half itself goes on as a record until the peer has answered.
* When the connection ends, its children end first, for the reason of the connection. No new ones begin.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from levada.framework import Actor, Lost, Reason
from levada.framework.embedding import Outcome, TerminalState, release, signal_exit
from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import ReceiverHalf, ReceiverState, SenderHalf, SenderState

if TYPE_CHECKING:
    from .halves import Halves, Letter

__all__ = ["CreationLink", "Half", "HalfActor", "HalfRecord", "OwnHalf"]

logger = logging.getLogger("levada.actors.aqueduct")

Half: TypeAlias = SenderHalf | ReceiverHalf

_LOST = (SenderState.LOST, ReceiverState.LOST)
_CONNECTION_LOST = (SenderState.CONNECTION_LOST, ReceiverState.CONNECTION_LOST)


@attrs.frozen(eq=False)
class CreationLink:
    """Links the halves that a message has left here to the half that carries the message. Source: AQ-53."""

    source: Actor[Any]
    """The actor that sent the message."""
    number: int
    """Number of the message; ``~number`` if it went as a datagram."""


class HalfRecord(ABC):
    """Stands in for a peer's half. The calls are sync and raise nothing."""

    __slots__ = ()

    halves: Halves
    half: Any
    """The half here; None only before its message has left."""

    @abstractmethod
    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""

    @abstractmethod
    def pump(self) -> None:
        """Take arrived messages, or use the room to send."""

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """Report the outcome of messages, in place of a receiver."""
        for letter in letters:
            letter.settle(outcome)

    @abstractmethod
    def ended(self) -> None:
        """End with the half, which is gone."""


class OwnHalf(HalfRecord):
    """A half that a remote ref uses itself, without a handle in the program. It travels in a message as a channel does."""

    __slots__ = ()

    idle: bool
    """Whether a connection that closes in order need not wait for this."""

    def set_idle(self, idle: bool) -> None:
        """Say whether a connection that closes in order need not wait for this."""
        self.idle = idle  # type: ignore[misc]  # each subclass has a slot, or a dict
        half, background = self.half, self.halves.core.background
        if half is not None and not half.ended:
            background.add(half) if idle else background.discard(half)

    def use(self, half: Half) -> None:
        """Go on over this half, since the message with it has left or arrived."""
        self.half = half
        self.halves.records[half] = self
        if self.idle:
            self.halves.core.background.add(half)
        self.halves.start(self)

    def give_back(self) -> None:
        """Go back to the state before: the message could not be encoded."""

    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""
        if self.half.ended:
            self.ended()
        else:
            self.begun()

    def begun(self) -> None:
        """Begin with a half that has not ended."""
        self.pump()

    def ended(self) -> None:
        """End with the half, which is gone."""
        self.halves.records.pop(self.half, None)
        self.halves.core.background.discard(self.half)
        self.over()

    def dispatch(self, letter: Letter) -> None:
        """Send a letter. The connection stands for this half, which has no actor."""
        try:
            self.halves.dispatch(self.half, letter, self.halves.connection)
        except LocalProtocolError:
            letter.settle(Outcome.NOT_PROCESSED)  # it ended meanwhile

    @abstractmethod
    def over(self) -> None:
        """Do what follows from the end of the half; without a half, its message will never leave."""

    @property
    def how_ended(self) -> TerminalState:
        """How the half has ended, for those that wait for something."""
        if self.half is None:
            return TerminalState.CONNECTION_LOST if self.halves.detail else TerminalState.LOST
        return _ENDS.get(self.half.state, TerminalState.LOST)


_ENDS: Final = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


class HalfActor(HalfRecord, Actor[Any]):
    """An actor that stands in for a peer's half."""

    halves: Halves
    half: Any = attrs.field(default=None, kw_only=True)
    """The half here; `None` only before its message has left."""

    is_actor: bool = attrs.field(default=False, init=False)
    """Whether it runs as an actor, which it begins to do unless the connection is ending."""

    def retire(self) -> None:
        """End the actor, since the half is gone, for the reason that the core gives."""
        if not self.is_actor:
            return
        half, halves = self.half, self.halves
        if half.state in _LOST:
            link = halves.links.get(half)
            source = halves.connection if link is None else link.source
            if link is not None:
                logger.debug("%s is lost: message %d of %s was", self.ref.path, link.number, source.ref.path)
            signal_exit(self, source.ref, Lost(halves.peer))
        elif half.state in _CONNECTION_LOST:
            release(self, halves.reason)
        else:
            release(self)

    def stopping(self, reason: Reason) -> None:
        """End the half, unless it is gone already."""
        if not (self.half.ended or self.halves.connection.ending):
            self.give_up(f"the actor of its half was ended ({type(reason).__name__.lower()})")

    @abstractmethod
    def give_up(self, detail: str) -> None:
        """Cancel the sender, or close the receiver.

        Args:
            detail: the cause, for the error that the owner of the channel gets.
        """
