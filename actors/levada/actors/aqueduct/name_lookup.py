"""Lookups of the other system's actors: reserved messages on the entrypoint, which no handler sees.

A client sends a `Lookup` to find an actor by its name. A client that exposes actors first sends a `Lookups` with a sender for the server's
own `Lookup` messages. In a fleet, a client sends a `Claim` to find the actor of a ref that came from a third member.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextvars import copy_context
from typing import Any, Protocol, TypeAlias

import attrs

from levada.framework import ActorSystem, OneshotSender, Receiver, Ref, RemotePeer, Sender, message
from levada.framework.embedding import act_for
from levada.framework.errors import ChannelError, ConfigurationError, DecodeError
from levada.transports.text import printable

__all__ = ["Claim", "Expose", "Lookup", "Lookups", "Names", "check_expose"]

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


class Asker(Protocol):
    """Knows the other side."""

    remote: RemotePeer | None
    """The other side."""


class Names:
    """The names that one side lets the other look up."""

    def __init__(self, system: ActorSystem, expose: Expose, asker: Asker) -> None:
        self._system = system
        self._expose = expose
        self._asker = asker

    def find(self, name: str) -> Ref[Any] | None:
        """Find the actor of this name, if it is exposed to the other side."""
        act_for(self._asker.remote)
        expose = self._expose
        return self._system.registry.get(name) if (expose(name) if callable(expose) else name in expose) else None

    def answer(self, question: Lookup) -> None:
        """Answer a lookup. If it fails, the oneshot ends without a value, and the failure is logged."""
        with question.found as found:
            try:
                ref = copy_context().run(self.find, question.name)
            except Exception as error:  # noqa: BLE001 - the failure log has it
                # The predicate is the user's code; the peer only learns that there is no answer.
                text = "the lookup of %s failed"
                self._system.failure_log.log(logger, error, text, printable(question.name), event="lookup_failed")
                return
            try:
                found.send(ref)
            except ChannelError:
                pass  # the peer has withdrawn the lookup

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
