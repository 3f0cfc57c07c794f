"""Finding an actor of the other system by its name: reserved messages on the entrypoint, which no handler sees.

A client asks with a `Lookup`. A client whose own actors may be looked up says with its first message, `Lookups`, where the server asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from levada.framework import ActorSystem, OneshotSender, Receiver, Ref, Sender, message
from levada.framework.errors import ChannelError, ConfigurationError, DecodeError

__all__ = ["Expose", "Lookup", "Lookups", "Names", "check_expose"]

logger = logging.getLogger("levada.actors.aqueduct")

Expose: TypeAlias = Collection[str] | Callable[[str], bool]
"""Which names of the system's registry the peer may look up: some names, or a function that says so of each."""


@message("levada.lookup")
class Lookup:
    """Ask for a ref of the actor that is registered under a name."""

    name: str
    found: OneshotSender[Ref[Any] | None]


@message("levada.lookups")
class Lookups:
    """Say where actors of the client may be looked up."""

    there: Sender[Lookup]


def check_expose(expose: Expose) -> None:
    """Refuse what says nothing of names.

    Raises:
        ConfigurationError: one text, where several were meant, or neither a collection nor a function.
    """
    if isinstance(expose, str) or not (callable(expose) or isinstance(expose, Collection)):
        raise ConfigurationError(f"expose is a collection of names, or a function of one, not {expose!r}")


class Names:
    """The names that one side lets the other look up."""

    def __init__(self, system: ActorSystem, expose: Expose) -> None:
        self._system = system
        self._expose = expose

    def find(self, name: str) -> Ref[Any] | None:
        """Find the actor of this name, if the peer may have it."""
        expose = self._expose
        return self._system.registry.get(name) if (expose(name) if callable(expose) else name in expose) else None

    def answer(self, question: Lookup) -> None:
        """Answer a lookup; if that fails, it is logged, and the oneshot ends without a value."""
        with question.found as found:
            try:
                found.send(self.find(question.name))
            except ChannelError:
                pass  # nobody wants to know any more
            except Exception:
                # The function is the user's; a peer that cannot be answered hears just that.
                logger.exception("the lookup of %r failed", question.name)

    async def serve(self, questions: Receiver[Lookup]) -> None:
        """Answer the lookups that come on a channel, until it ends; what is no lookup closes it."""
        with questions:
            try:
                async for question in questions:
                    self.answer(question)
            except DecodeError as error:
                logger.warning("a lookup: %s", error)
            except ChannelError:
                pass  # with the connection
