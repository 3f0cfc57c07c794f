"""Finding an actor of the other system by its name: one reserved message on the entrypoint, answered before any handler sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from levada.framework import ActorSystem, OneshotSender, Ref, message
from levada.framework.channel_core import ChannelCore
from levada.framework.errors import ChannelError, ConfigurationError, LevadaError
from levada.transports.aqueduct import Delivery, ReceiverHalf

from .halves import Halves, Inbound, Outbound, open_delivery

__all__ = ["EntryInbound", "EntryOutbound", "Expose", "Lookup", "Names", "check_expose"]

logger = logging.getLogger("levada.actors.aqueduct")

Expose: TypeAlias = Collection[str] | Callable[[str], bool]
"""Which names of the system's registry clients may look up: some names, or a function that says so of each."""


@message("levada.lookup")
class Lookup:
    """Ask for a ref of the actor that is registered under a name."""

    name: str
    found: OneshotSender[Ref[Any] | None]


_TAG = b"\xadlevada.lookup"


def is_lookup(payload: bytes) -> bool:
    """Whether a message is a `Lookup`: behind the header of its ext type and that of the array comes its tag."""
    return payload.startswith(_TAG, 4) or payload.startswith(_TAG, 5)


def check_expose(expose: Expose) -> None:
    """Refuse what says nothing of names.

    Raises:
        ConfigurationError: one text, where several were meant, or neither a collection nor a function.
    """
    if isinstance(expose, str) or not (callable(expose) or isinstance(expose, Collection)):
        raise ConfigurationError(f"expose is a collection of names, or a function of one, not {expose!r}")


class Names:
    """The names that a server lets its clients look up."""

    def __init__(self, system: ActorSystem, expose: Expose) -> None:
        self._system = system
        self._expose = expose

    def find(self, name: str) -> Ref[Any] | None:
        """Find the actor of this name, if clients may have it."""
        expose = self._expose
        return self._system.registry.get(name) if (expose(name) if callable(expose) else name in expose) else None

    def answer(self, halves: Halves, delivery: Delivery) -> None:
        """Answer a lookup; what cannot be answered is logged, and its oneshot ends without a value."""
        try:
            question, _ = open_delivery(halves, delivery, delivery.payload, Lookup)
        except LevadaError as error:
            logger.warning("%s: a lookup: %s", halves.peer, error)
            return
        with question.found as found:
            try:
                found.send(self.find(question.name))
            except ChannelError:
                pass  # nobody wants to know any more
            except Exception:
                # The function is the user's; a client that cannot be answered hears just that.
                logger.exception("%s: the lookup of %r failed", halves.peer, question.name)


class EntryInbound(Inbound):
    """The place of the client's entrypoint: lookups are answered, everything else is for the handler."""

    __slots__ = ("_names",)

    def __init__(self, halves: Halves, channel: ChannelCore, half: ReceiverHalf, names: Names) -> None:
        super().__init__(halves, channel, half)
        self._names = names

    def _take(self) -> Delivery | None:
        mailbox = self.half.mailbox
        while mailbox:
            delivery = self.half.take()
            if not is_lookup(delivery.payload):
                return delivery
            self.halves.received += 1
            self._names.answer(self.halves, delivery)
        return None


class EntryOutbound(Outbound):
    """The place of the server's entrypoint: lookups may be sent there, whatever its handler takes."""

    __slots__ = ()

    def _encode(self, entry: Any) -> bytes:
        if type(entry) is Lookup:
            packing = self.halves.packing
            packing.channel = self.channel
            return self.halves.codec.encode(entry, attachments=packing)
        return super()._encode(entry)
