"""Errors of durable actors."""

from __future__ import annotations

import attrs

from levada.framework.errors import ActorStopped, LevadaError

__all__ = ["CommandFailed", "DurableError", "EntityErased", "OutcomeUnknown", "ReplayFailed", "ShardLost"]


@attrs.define(eq=False, slots=False, str=False)
class DurableError(LevadaError):
    """A durable actor cannot do this; the subclass says why."""

    entity: str = ""
    """The id of the entity; empty if the error is not about a single entity."""


@attrs.define(eq=False, slots=False, str=False)
class ReplayFailed(DurableError):
    """An entity's events cannot be applied, so it takes no commands. Its log is unchanged, and other entities are not affected.

    The error of the `applies` method, or of the row, is the ``__cause__``. Repair the class and restart.
    If the class could not make an object, no event is named, and the next command tries again.
    """

    type: str = ""
    """The name of the durable class."""
    sequence: int = 0
    """The sequence number of the event; 0 if no event is at fault."""
    kind: str = ""
    """The wire name of the event."""
    offset: int = 0
    """The offset of its row in the shard's partition of the journal."""


@attrs.define(eq=False, slots=False, str=False)
class OutcomeUnknown(DurableError):
    """The shard was lost before it answered the command, which may be done or not. Ask again with the same command id.

    If its handler calls `Durable.commit`, the part before may be done without the rest.
    """

    loss = "the outcome of a durable actor's command is unknown"

    command: str = ""
    """The id of the command; empty if it has none."""


@attrs.define(eq=False, slots=False, str=False)
class CommandFailed(ActorStopped):
    """The handler of this command raised. This is the `ActorStopped` of the entity, not of its shard or its node."""

    loss = "a durable actor has failed at its command"


@attrs.define(eq=False, slots=False, str=False)
class ShardLost(DurableError):
    """A shard cannot continue, because its journal is out of reach or another process owns it now. Its supervisor restarts it."""

    loss = "a shard of durable actors is out of reach"

    shard: int = 0


@attrs.define(eq=False, slots=False, str=False)
class EntityErased(DurableError):
    """The entity was erased, or is being erased. It takes no commands."""
