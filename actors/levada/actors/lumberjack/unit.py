"""The message that a sink handles: a unit of events, and their origin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from levada.framework import Actor, Asks, Ref, message

__all__ = ["Origin", "Sink", "Unit"]


@message("levada.lumberjack.Origin", frozen=True)
class Origin:
    """The connection over which events came."""

    connection: str
    """A random name, unique among all connections, also those before a restart of the program."""
    peer: str
    """The writer's address."""
    version: int
    """Version of the protocol."""
    subject: str | None = None
    """Subject of the writer's certificate, if it showed a verified one (LJ-61)."""
    names: tuple[str, ...] = ()
    """Subject alternative names of that certificate, as in ``"DNS:web-01"``."""
    identity: str = ""
    """The name that the ``authenticate`` hook gave the writer; empty without a hook."""


@message("levada.lumberjack.Unit")
class Unit(Asks[object]):
    """Events that are acked together. Any answer means that they are safe (LJ-25).

    A failure closes the connection, and so does a missing answer to a writer of version 1.  Then the writer sends the events again.  So
    answered events are never lost, and any event may come twice, and in a different order (LJ-55, LJ-56).
    """

    events: list[dict[str, Any]]
    """The events as the writer sent them, in order; `levada.transports.lumberjack.UnitReady.events` says how text is decoded."""
    origin: Origin
    number: int
    """Counts the units of the connection from 1, in the order of the asks."""
    whole: bool = True
    """False for a slice of a larger unit, whose ack comes with the rest of it (LJ-42a)."""

    @property
    def name(self) -> str:
        """Connection and number: a unique name, usable as the name of a file."""
        return f"{self.origin.connection}-{self.number:06d}"


Sink: TypeAlias = Ref[Unit] | Callable[[], Actor[Unit]] | Callable[[Unit], Awaitable[object]]
"""A `Ref` of an actor that handles `Unit`, shared by all connections; or an actor class, a factory of actors, or an async function of one
unit: then each connection has an actor of its own."""
