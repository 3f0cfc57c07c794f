"""Durable actors: actors whose state survives their process, because it is rebuilt from events in a journal.

Needs the extra: ``pip install 'levada[journal]'``.

Derive a class from `Durable`, `Durable.record` events in its handlers, mark the methods that change the state with `applies`, and start the
actors with `shards`.
"""

from __future__ import annotations

from levada.actors.journal import CommandReused

from .entity import Durable, applies, upcasts
from .entry import Entity, Shards, shards, shards_of
from .errors import CommandFailed, DurableError, EntityErased, OutcomeUnknown, ReplayFailed, ShardLost
from .moving import CopiedRows, copy_log
from .rows import log_columns, log_config
from .settings import Keep, ShardStatistics
from .trim_log import trim_log

__all__ = [
    "CommandFailed", "CommandReused", "CopiedRows", "Durable", "DurableError", "Entity", "EntityErased", "Keep", "OutcomeUnknown",
    "ReplayFailed", "ShardLost", "ShardStatistics", "Shards", "applies", "copy_log", "log_columns", "log_config", "shards",
    "shards_of", "trim_log", "upcasts",
]  # fmt: skip
