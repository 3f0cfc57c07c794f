"""Errors of durable actors."""

from __future__ import annotations

import attrs

from levada.framework.errors import ActorStopped, LevadaError

__all__ = ["CommandFailed", "DurableError", "EntityErased", "OutcomeUnknown", "ReplayFailed", "ShardLost"]


@attrs.define(eq=False, slots=False, str=False)
class DurableError(LevadaError):
    """A durable actor cannot do this; the subclass says why."""

    entity: str = ""
    """The id of the entity concerned; empty if it is no single one."""


@attrs.define(eq=False, slots=False, str=False)
class ReplayFailed(DurableError):
    """An entity's events cannot be applied, so it takes no commands. Its log is unchanged; other entities go on.

    The error of `applies`, or of the row, is the ``__cause__``. Repair the class and start again.
    """

    type: str = ""
    """Name of the durable class."""
    sequence: int = 0
    """Of the event."""
    kind: str = ""
    """Wire name of the event."""
    offset: int = 0
    """Of its row in the shard's partition of the journal."""


@attrs.define(eq=False, slots=False, str=False)
class OutcomeUnknown(DurableError):
    """The shard was lost before the command was answered: it is not done, or done and not known. Ask again with the same command id.

    If its handler calls `Durable.commit`, the part before may be done without the rest.
    """

    command: str = ""
    """Its id; empty if it has none."""


@attrs.define(eq=False, slots=False, str=False)
class CommandFailed(ActorStopped):
    """The handler of this command raised: an `ActorStopped` of the entity, and not of its shard or its node."""


@attrs.define(eq=False, slots=False, str=False)
class ShardLost(DurableError):
    """A shard cannot go on: its journal failed, or another process owns it now. Its supervisor starts it again."""

    shard: int = 0


@attrs.define(eq=False, slots=False, str=False)
class EntityErased(DurableError):
    """The entity was erased. It takes no commands."""
