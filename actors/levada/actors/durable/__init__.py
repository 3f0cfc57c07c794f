"""Durable actors: actors whose state survives, because it is the sum of events in a journal.

Needs the extra: ``pip install 'levada[journal]'``.

Derive from `Durable`, `Durable.record` events in handlers, mark with `applies` what an event changes, and start them with `shards`.
"""

from __future__ import annotations

from levada.actors.journal import CommandReused

from .entity import Durable, applies
from .entry import Entity, Shards, shards, shards_of
from .errors import CommandFailed, DurableError, EntityErased, OutcomeUnknown, ReplayFailed, ShardLost
from .evolution import upcasts
from .rows import log_columns, log_config
from .settings import ShardStatistics

__all__ = [
    "CommandFailed", "CommandReused", "Durable", "DurableError", "Entity", "EntityErased", "OutcomeUnknown", "ReplayFailed", "ShardLost",
    "ShardStatistics", "Shards", "applies", "log_columns", "log_config", "shards", "shards_of", "upcasts",
]  # fmt: skip
