"""The settings that all shards of a durable class share, and the statistics of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from levada.framework import Codec, message
from levada.framework.message import Asks

from .entity import Durable
from .rows import ShardLog
from .snapshots import Snapshots

__all__ = ["GetShardStatistics", "ShardSettings", "ShardStatistics"]


@attrs.frozen(kw_only=True)
class ShardSettings:
    """The settings that all shards of a durable class share."""

    cls: type[Durable[Any]]
    log: ShardLog
    node: str
    """The name of this process in the log."""
    idle: float
    remember: int
    snapshot_every: int
    snapshots: Snapshots
    max_live: int
    """Of one shard."""
    clock: Callable[[], float]
    clock_jumps: bool
    """Whether the clock may be set while a reminder waits for its time."""
    codec: Codec
    keep: float | None
    """Seconds for which rows behind snapshots are kept; None: for ever."""


@message("levada.durable.shard_statistics", frozen=True)
class ShardStatistics:
    """Counters of a shard since it started, and its current sizes."""

    live: int
    """Entities in memory."""
    loading: int
    """Entities that are being read."""
    under_way: int
    """Commands that are not answered yet."""
    rows: int
    """Rows written."""
    end: int
    """The offset after the last row."""
    replayed: int
    """Entities that were loaded."""
    failed: int
    """Entities that cannot be replayed."""
    repeated: int
    """Commands that were repeated with the same id."""


@message("levada.durable.get_shard_statistics", frozen=True)
class GetShardStatistics(Asks[ShardStatistics]):
    """Ask a shard for `ShardStatistics`."""
