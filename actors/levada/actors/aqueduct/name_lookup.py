"""The entrypoint of a connection, and lookups of the other system's actors: reserved messages there, which no handler sees.

A client sends a `Lookup` to find an actor by its name. A client that exposes actors first sends a `Lookups` with a sender for the server's
own `Lookup` messages. In a fleet, a client sends a `Claim` to find the actor of a ref that came from a third member.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextvars import copy_context
from typing import Any, TypeAlias

import attrs

from levada.framework import ActorSystem, OneshotSender, Reason, Receiver, Ref, Sender, bounded, message
from levada.framework.channel import WINDOW
from levada.framework.embedding import Forwarder, act_for
from levada.framework.errors import (
    ActorStopped,
    ChannelError,
    ConfigurationError,
    DecodeError,
    HandleNotForwardable,
    LevadaError,
)
from levada.framework.text import printable
from levada.framework.tracing import Tracing
from levada.transports.aqueduct import Delivery

from .halves import Halves, Inbound, Outbound, open_delivery

__all__ = ["Claim", "EntryInbound", "EntryOutbound", "Expose", "Lookup", "Lookups", "Names", "StandIn", "check_expose"]

logger = logging.getLogger("levada.actors.aqueduct")

Expose: TypeAlias = Collection[str] | Callable[[str], bool]
"""The names of the system's registry that the peer may look up: a collection, or a predicate on names. A predicate
may depend on the peer: `levada.framework.current_peer` returns the one that looks up."""


@message("levada.lookup")
class Lookup:
    """Ask for a ref of the actor registered under a name."""

    name: str
    found: OneshotSender[Ref[Any] | None]


@message("levada.lookups")
class Lookups:
    """Give the server a sender for lookups of the client's actors."""

    there: Sender[Lookup]


@message("levada.claim")
class Claim:
    """Ask for a ref of the actor with this number, which has this key."""

    incarnation: int
    key: bytes = attrs.field(repr=False)
    found: OneshotSender[Ref[Any] | None]


def check_expose(expose: Expose) -> None:
    """Check the type of an `Expose`.

    Raises:
        ConfigurationError: it is a single string, or neither a collection nor a function.
    """
    if isinstance(expose, str) or not (callable(expose) or isinstance(expose, Collection)):
        raise ConfigurationError(f"expose is {expose!r}, wanted a collection of names, or a function of one")


class StandIn(Forwarder):
    """Passes everything on to an actor of a third system, for peers to which the ref of that actor cannot be passed on. It ends with the ref."""

    def __init__(self, ref: Ref[Any]) -> None:
        super().__init__()
        self._ref = ref

    def started(self) -> None:
        """Begin."""
        self.point(self._ref)

    def target_ended(self, reason: Reason) -> None:
        """End with the actor."""
        _stand_ins.get(self.system, {}).pop(self._ref, None)
        self.end(reason)


_stand_ins: weakref.WeakKeyDictionary[ActorSystem, dict[Ref[Any], Ref[Any]]] = weakref.WeakKeyDictionary()
"""The stand-ins of each system, by the refs for which they stand in."""


def stand_in(system: ActorSystem, ref: Ref[Any]) -> Ref[Any]:
    """Return the stand-in of a ref in this system."""
    known = _stand_ins.setdefault(system, {})
    found = known.get(ref)
    if found is None or not found.is_alive:
        found = known[ref] = system.spawn(lambda: StandIn(ref), mailbox=bounded(WINDOW))
    return found


class Names:
    """The names that one side lets the other look up."""

    def __init__(self, system: ActorSystem, expose: Expose, halves: Halves) -> None:
        self._system = system
        self._expose = expose
        self._halves = halves

    def find(self, name: str) -> Ref[Any] | None:
        """Find the actor of this name, if it is exposed to the other side."""
        act_for(self._halves.remote)
        expose = self._expose
        return self._system.registry.get(name) if (expose(name) if callable(expose) else name in expose) else None

    def answer(self, question: Lookup) -> None:
        """Answer a lookup. If it fails, the oneshot ends without a value, and the failure is logged.

        A ref that may not be passed on to the peer, because its actor is in a third system, is answered with a `StandIn` of this system.
        """
        with question.found as found:
            try:
                ref = copy_context().run(self.find, question.name)
            except Exception as error:  # noqa: BLE001 - the failure log has it
                # The predicate is the user's code; the peer only learns that there is no answer.
                text = "the lookup of %s failed"
                self._system.failure_log.log(logger, error, text, printable(question.name), event="lookup_failed")
                return
            try:
                try:
                    found.send(ref)
                except HandleNotForwardable:
                    assert ref is not None
                    found.send(stand_in(self._system, ref))
            except (ChannelError, ActorStopped):
                pass  # the peer has withdrawn the lookup, or this system is ending

    async def serve(self, questions: Receiver[Lookup]) -> None:
        """Answer the lookups on a channel until it ends; any other message closes it."""
        with questions:
            try:
                async for question in questions:
                    self.answer(question)
            except DecodeError as error:
                logger.warning("a lookup: %s", error)
            except ChannelError:
                pass  # the connection has ended


_TAGS = b"\xadlevada.lookup", b"\xaelevada.lookups", b"\xaclevada.claim"


def is_reserved(payload: bytes) -> bool:
    """Whether a message is a `Lookup`, a `Lookups` or a `Claim`: its tag follows the headers of the ext type and of the array."""
    return payload.startswith(_TAGS, 4) or payload.startswith(_TAGS, 5)


class EntryInbound(Inbound):
    """Stands in for the client's entrypoint: handles lookups and claims here, and leaves all other messages to the handler."""

    names: Names

    def _fill(self, queue: deque[Any], most: int) -> int:
        return 0  # each message is looked at

    def _take(self) -> Any:
        half = self.half
        while half.mailbox:
            delivery = half.take()
            if not is_reserved(delivery.payload):
                return delivery
            self.halves.received += 1
            self._open(delivery)
        return None

    def _open(self, delivery: Delivery) -> None:
        halves = self.halves
        item: Any = Lookup | Lookups | Claim
        try:
            reserved, _ = open_delivery(halves, delivery, delivery.payload, item)
        except LevadaError as error:
            logger.warning("%s: a lookup: %s", halves.peer, error)
            return
        if isinstance(reserved, Lookup):
            self.names.answer(reserved)
        elif isinstance(reserved, Claim):
            halves.refs.answer(reserved)
        else:
            halves.connection.look_up_at(reserved.there)


class EntryOutbound(Outbound):
    """Stands in for the server's entrypoint: sends lookups and claims there too, whatever type its handler takes."""

    def _context(self, entry: Any, tracing: Tracing) -> object:
        return None if type(entry) in (Lookup, Lookups, Claim) else tracing.current()

    def _encode(self, message: Any) -> bytes:
        if type(message) in (Lookup, Lookups, Claim):
            packing = self.halves.packing
            packing.channel = self.channel
            return self.halves.codec.encode(message, attachments=packing)
        return super()._encode(message)
