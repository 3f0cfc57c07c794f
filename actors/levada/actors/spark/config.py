"""`JournalConfig`: how a journal is kept."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError

__all__ = ["JournalConfig"]

SEGMENT_BYTES = 128 << 20
"""Default size of a segment."""
_SIZE = [v.instance_of(int), v.ge(1)]
_SECONDS = v.optional([v.instance_of((int, float)), v.gt(0)])  # type: ignore[arg-type]  # a list is taken, the stubs say otherwise


@attrs.frozen(kw_only=True)
class JournalConfig:
    """How a journal is kept. Immutable; sizes in octets, times in seconds.

    Raises:
        ConfigurationError: `max_bytes` has no room for what is always kept.
    """

    partitions: int = attrs.field(default=1, validator=_SIZE)
    """Fixed when the journal is made. Order holds within a partition."""
    segment_bytes: int | None = attrs.field(default=None, validator=v.optional(_SIZE))
    """Size at which a segment is sealed, and the most that one append may hold. None: 128 MiB, or with many partitions what `max_bytes` has
    room for; see `segment_size`."""
    segment_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """Age at which a segment is sealed, however small it is; None: never."""
    block_rows: int = attrs.field(default=16_384, validator=_SIZE)
    """Rows of one block at most. Appends of fewer rows that are written together share blocks."""
    block_bytes: int = attrs.field(default=4 << 20, validator=_SIZE)
    """Size of one block at most, unless a single row is larger."""
    max_bytes: int = attrs.field(default=4 << 30, validator=_SIZE)
    """Size of all segments at most; then appends wait until something may be deleted."""
    retain_bytes: int | None = attrs.field(default=1 << 30, validator=v.optional(_SIZE))  # type: ignore[arg-type]
    """What all groups have read is deleted once there is this much besides it."""
    retain_time: float | None = attrs.field(default=None, validator=_SECONDS)
    """What all groups have read is deleted at this age. Without this and `retain_bytes`: at once, but nothing as long as there is no group."""
    max_staged_bytes: int = attrs.field(default=1 << 30, validator=_SIZE)
    """Size at most of batches that were staged and not delivered yet."""
    sync: Literal["group", "never"] = attrs.field(default="group", validator=v.in_(("group", "never")))
    """``group``: what is written together is synced before anybody is answered. ``never``: it is left to the operating system, so a power
    failure may take the newest appends back; deliveries and what groups have read are synced all the same."""

    accept_loss: bool = attrs.field(default=False, kw_only=True, validator=v.instance_of(bool))
    """Open the journal though rows that were promised are gone or damaged, instead of raising `JournalDamaged`. Each loss is logged as an
    error. Offsets go on behind the lost rows; reading a lost one raises `OffsetGone`. Damaged files are kept as ``NAME.damaged``. Meant for one
    start."""

    def __attrs_post_init__(self) -> None:
        """Check what belongs together."""
        if self.segment_bytes is not None and self.block_bytes > self.segment_bytes:
            raise ConfigurationError(
                f"block_bytes is {self.block_bytes}, more than segment_bytes, {self.segment_bytes}"
            )
        # One segment of each partition is always there, and one more is the room for the next append.
        wanted = (self.retain_bytes or 0) + (self.partitions + 1) * self.segment_size
        if self.max_bytes < wanted:
            raise ConfigurationError(
                f"max_bytes is {self.max_bytes}, less than {wanted}: retain_bytes and a segment for each partition and one more; "
                f"raise it, or lower retain_bytes or {'block_bytes' if self.segment_bytes is None else 'segment_bytes'}"
            )

    @property
    def segment_size(self) -> int:
        """`segment_bytes`, or what it is where that is None: never less than a block."""
        if self.segment_bytes is not None:
            return self.segment_bytes
        room = (self.max_bytes - (self.retain_bytes or 0)) // (self.partitions + 1)
        return max(self.block_bytes, min(SEGMENT_BYTES, room))
