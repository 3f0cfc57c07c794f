"""The settings that all shards of a durable class share, and the statistics of a shard."""

from __future__ import annotations

import math
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

__all__ = ["EntityLimits", "GetShardStatistics", "Keep", "ShardSettings", "ShardStatistics", "Terms", "kept_from"]


@message("levada.durable.entity_limits", frozen=True)
class EntityLimits:
    """When entities leave memory, what they remember and how long they wait: arguments of `shards` that travel together.

    Raises:
        ConfigurationError: a value is out of range.
    """

    idle: float = 60.0
    """Seconds without a command after which an entity leaves memory."""
    remember: int = 256
    """How many command ids an entity remembers, the newest first."""
    snapshot_every: int = 1000
    """The number of rows of an entity after which its state is written too, so that reading it begins there."""
    max_live: int = 100_000
    """About the most entities in memory: beyond it the least recently used leave first."""
    patience: float = 30.0
    """Seconds to wait for a journal that is out of reach. Commands wait too, each for its own time. Rows whose answer was lost are sent again, and
    are written once. Behind that, commands whose rows may have been written fail with `OutcomeUnknown`."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.idle, int | float) or not 0 < self.idle < math.inf:
            raise ConfigurationError(f"idle is {self.idle!r}, wanted seconds, more than 0")
        if not is_duration(self.patience, zero=True):
            raise ConfigurationError(f"patience is {self.patience!r}, wanted seconds, 0 or more")
        for setting in ("remember", "snapshot_every", "max_live"):
            value = getattr(self, setting)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{setting} is {value!r}, wanted a whole number of 1 or more")


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


def kept_from(now: float, keep: float) -> float:
    """Return the time from which on rows stay, both in seconds since 1970. `keep` may be infinite, or longer ago than any row."""
    return max(now - keep, 0.0)


@message("levada.durable.terms", frozen=True)
class Terms:
    """The settings that all hosts of a durable class need."""

    cls: str
    """``module:qualname`` of the class, which the node's app has imported."""
    schema: bytes
    """The columns of the log, as an Arrow IPC message."""
    shards: int
    limits: EntityLimits
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
