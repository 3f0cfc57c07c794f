"""The settings that all shards of a durable class share, and the statistics of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import trio

from levada.actors.journal.places import archive_place
from levada.framework import ActorSystem, Codec, message
from levada.framework.durations import is_duration
from levada.framework.errors import ConfigurationError
from levada.framework.files import StrPath
from levada.framework.message import Asks

from .entity import Durable
from .rows import ShardLog
from .snapshots import Snapshots

__all__ = ["GetShardStatistics", "Keep", "ShardSettings", "ShardStatistics", "Terms"]


@attrs.frozen
class Keep:
    """How long the rows of a log stay in it, and where they go then: ``shards(keep=Keep(90 * 86_400, archive="s3://bucket/accounts"))``.

    Raises:
        ConfigurationError: `seconds` is no time, or `archive` is no place; its URL may have no password.
    """

    seconds: float
    """Younger rows stay."""
    archive: StrPath
    """A folder, or the URL of a file system that Arrow knows. All rows that are old enough are written there, as Parquet, before one of them goes."""

    def __attrs_post_init__(self) -> None:
        require_keep(self.seconds)
        archive_place(self.archive)


def require_keep(seconds: object) -> None:
    """Raise `ConfigurationError` unless these are seconds for which rows may be kept."""
    if not is_duration(seconds, zero=True):
        raise ConfigurationError(f"keep is {seconds!r}, wanted seconds, 0 or more")


@message("levada.durable.terms", frozen=True)
class Terms:
    """The settings that all hosts of a durable class need."""

    cls: str
    """``module:qualname`` of the class, which the node's app has imported."""
    schema: bytes
    """The columns of the log, as an Arrow IPC message."""
    shards: int
    idle: float
    remember: int
    snapshot_every: int
    max_live: int
    """Of one shard."""
    patience: float
    keep: float | None = None
    archive: str = ""


@attrs.frozen
class ShardSettings:
    """The settings that all shards of a durable class share in one process."""

    cls: type[Durable[Any]]
    log: ShardLog
    terms: Terms
    node: str
    """The name of this process in the log."""
    clock: Callable[[], float]
    clock_jumps: bool
    """Whether the clock may be set while a reminder waits for its time."""
    snapshots: Snapshots
    codec: Codec

    @classmethod
    def of(
        cls,
        system: ActorSystem,
        durable: type[Durable[Any]],
        log: ShardLog,
        terms: Terms,
        clock: Callable[[], float] | None = None,
    ) -> ShardSettings:
        """Make the settings for this process; `clock` comes from the program."""
        platform = system.platform
        jumps = clock is not trio.current_time if clock else not platform.virtual
        node = f"{system.name}:{platform.pid()}"
        return cls(durable, log, terms, node, clock or platform.time, jumps, Snapshots(durable), Codec())


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
