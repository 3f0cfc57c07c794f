"""`JournalConfig`: how a journal is kept."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError

__all__ = ["JournalConfig", "Keyed"]

SEGMENT_BYTES = 128 << 20
"""Default size of a segment."""
REOPEN_EVERY = 5.0
"""Seconds between attempts to open a journal of durable actors, or of a keeper, that cannot be opened."""
_SIZE = [v.instance_of(int), v.ge(1)]
_SECONDS = v.optional([v.instance_of((int, float)), v.gt(0)])  # type: ignore[arg-type]  # a list is taken, the stubs say otherwise


@attrs.frozen(kw_only=True)
class Keyed:
    """The columns of a journal by which rows are found, and taken once. They hold text or bytes; a null is no key.

    `ConfigurationError` if no column is named.
    """

    entity: str | None = attrs.field(default=None, validator=v.optional(v.instance_of(str)))
    """Column that names the entity of a row; `Store.rows_of` finds its rows."""
    command: str | None = attrs.field(default=None, validator=v.optional(v.instance_of(str)))
    """Column with the id of the command that a row is of. Rows of a command that was taken before are not written again.

    The rows of one command follow each other in one append."""
    body: tuple[str, ...] | None = None
    """Columns that must be the same when a command comes again, else `CommandReused`. None: all."""
    remember: int = attrs.field(default=1_000_000, validator=_SIZE)
    """Number of rows of a partition, newest first, whose commands are known."""

    def __attrs_post_init__(self) -> None:
        if self.entity is None and self.command is None:
            raise ConfigurationError("Keyed needs a column: entity= or command=")


@attrs.frozen(kw_only=True)
class JournalConfig:
    """How a journal is kept. Immutable; sizes in bytes, times in seconds. Raises `ConfigurationError` if `max_bytes` is too small."""

    partitions: int = attrs.field(default=1, validator=_SIZE)
    """Fixed when the journal is made. Order holds within a partition."""
    segment_bytes: int | None = attrs.field(default=None, validator=v.optional(_SIZE))
    """Size at which a segment is sealed, and the most that one append may hold. None: 128 MiB, or less if `max_bytes` has no room for that
    in each partition; see `segment_size`."""
    segment_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """Age at which a segment is sealed, however small it is; None: never."""
    block_rows: int = attrs.field(default=16_384, validator=_SIZE)
    """Most rows of one block. Small appends that are written together share blocks."""
    block_bytes: int = attrs.field(default=4 << 20, validator=_SIZE)
    """Largest size of a block, unless a single row is larger."""
    max_bytes: int = attrs.field(default=4 << 30, validator=_SIZE)
    """Largest size of all segments; at this size appends wait until something may be deleted."""
    retain_bytes: int | None = attrs.field(default=1 << 30, validator=v.optional(_SIZE))  # type: ignore[arg-type]
    """Rows that all groups have read are deleted once the rest of the journal has this size."""
    retain_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """Rows that all groups have read are deleted at this age. Without this and `retain_bytes` they are deleted at once; without a group, never."""
    max_staged_bytes: int = attrs.field(default=1 << 30, validator=_SIZE)
    """Largest size of all batches that are staged and not delivered yet."""
    sync: Literal["group", "never"] = attrs.field(default="group", validator=v.in_(("group", "never")))
    """``group``: appends that are written together are synced before any of them is answered. ``never``: the operating system decides when, so a
    power failure may lose the newest appends. Deliveries, appends to several partitions and the
    rows that groups have read are synced in both cases."""
    keyed: Keyed | None = attrs.field(default=None, validator=v.optional(v.instance_of(Keyed)))
    """Columns by which rows are found, and taken once. None: rows are found by their offsets only, and nothing is indexed."""
    accept_loss: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Open the journal even if promised rows are gone or damaged, instead of raising `JournalDamaged`. Meant for one start. Each loss is logged
    as an error. Offsets go on behind the lost rows; reading a lost row raises `OffsetGone`. Damaged files are kept as ``NAME.damaged``."""

    def __attrs_post_init__(self) -> None:
        if self.segment_bytes is not None and self.block_bytes > self.segment_bytes:
            raise ConfigurationError(
                f"block_bytes is {self.block_bytes}, more than segment_bytes, {self.segment_bytes}"
            )
        # Each partition always keeps one segment; one more is the room for the next append.
        wanted = (self.retain_bytes or 0) + (self.partitions + 1) * self.segment_size
        if self.max_bytes < wanted:
            raise ConfigurationError(
                f"max_bytes is {self.max_bytes}, less than {wanted}: retain_bytes and a segment for each partition and one more; "
                f"raise it, or lower retain_bytes or {'block_bytes' if self.segment_bytes is None else 'segment_bytes'}"
            )

    @property
    def segment_size(self) -> int:
        """The value of `segment_bytes`, or its default if that is None: never less than a block."""
        if self.segment_bytes is not None:
            return self.segment_bytes
        room = (self.max_bytes - (self.retain_bytes or 0)) // (self.partitions + 1)
        return max(self.block_bytes, min(SEGMENT_BYTES, room))
