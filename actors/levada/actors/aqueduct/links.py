"""Halves as actors, and the links between them.

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
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from levada.framework import Actor, Lost, Reason, Ref
from levada.framework.embedding import release, signal_exit
from levada.framework.errors import ActorStopped
from levada.transports.aqueduct import ReceiverHalf, ReceiverState, SenderHalf, SenderState

if TYPE_CHECKING:
    from .halves import Halves

__all__ = ["CreationLink", "Half", "HalfActor"]

logger = logging.getLogger("levada.actors.aqueduct")

Half: TypeAlias = SenderHalf | ReceiverHalf

_LOST = (SenderState.LOST, ReceiverState.LOST)
_CONNECTION_LOST = (SenderState.CONNECTION_LOST, ReceiverState.CONNECTION_LOST)


@attrs.frozen(eq=False)
class CreationLink:
    """Links the halves that a message has left here to the half that carries the message. Source: AQ-53."""

    source: Ref[Any]
    """The actor that sent the message."""
    number: int
    """Number of the message; ``~number`` if it went as a datagram."""


class HalfActor(Actor[Any], ABC):
    """An actor that stands in for a peer's half."""

    halves: Halves
    half: Any = attrs.field(default=None, kw_only=True)
    """The half here; `None` only before its message has left."""

    is_actor: bool = attrs.field(default=False, init=False)
    """Whether it runs as an actor."""

    def begin(self) -> None:
        """Become an actor, unless the connection is ending."""
        try:
            self.halves.connection.idle.adopt(self)
            self.is_actor = True
        except ActorStopped:
            pass

    def retire(self) -> None:
        """End the actor, since the half is gone, for the reason that the core gives."""
        if not self.is_actor:
            return
        half, halves = self.half, self.halves
        if half.state in _LOST:
            link = halves.links.get(half)
            source = halves.connection.ref
            if link is not None:
                source = link.source
                logger.debug("%s is lost: message %d of %s was", self.ref.path, link.number, source.path)
            signal_exit(self, source, Lost(halves.peer))
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
