"""Where rows are: the answers of a store."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import attrs

from levada.framework import message

__all__ = ["Appended", "Extent", "Fenced", "StoreStatistics", "partition_of"]


@message("levada.journal.appended", frozen=True)
class Appended:
    """Where rows went."""

    partition: int
    first: int
    """Offset of the first row; the others follow without gaps. If there are none because their command had been taken: of its first row."""
    count: int
    repeated: int = 0
    """Rows that were not written, because their command had been taken (`Keyed.command`)."""


@message("levada.journal.fenced", frozen=True)
class Fenced:
    """Nothing was appended: the partition does not end where `Append.at` says. Another writer has been there."""

    partition: int
    end: int
    """Offset behind its last row."""


@message("levada.journal.extent", frozen=True)
class Extent:
    """What a journal holds."""

    epoch: str
    """The name of this journal. A journal that was deleted and created again has another epoch, and the old offsets mean nothing in it."""
    first: Mapping[int, int]
    """For each partition, the offset of the oldest row."""
    end: Mapping[int, int]
    """For each partition, the offset behind the newest row."""
    opening: str
    """Names this opening of the journal; each opening has a name of its own. See `Store.reach`."""
    trimmed: Mapping[int, int] = attrs.field(factory=dict[int, int])
    """For partitions from which rows were trimmed (`TrimRows`), the offset behind the last of these: before it only some rows are left."""

    @property
    def whole(self) -> dict[int, int]:
        """For each partition, the offset from which on nothing was trimmed."""
        return {number: max(first, self.trimmed.get(number, 0)) for number, first in self.first.items()}


@attrs.frozen(kw_only=True)
class StoreStatistics:
    """Counters since the store was opened, and sizes of this moment."""

    appends: int
    """Batches that were appended; `Journal` may join several appends into one batch."""
    rows_appended: int
    bytes_appended: int
    """On the disk, headers included."""
    syncs: int
    """Of segments; many appends share one."""
    batches_delivered: int
    batches_repeated: int
    """Deliveries that had been done before."""
    bytes_stored: int
    """Size of all segments now."""
    segments: int
    segments_deleted: int
    bytes_cut: int
    """Torn or never committed, cut off when the store was opened."""
    rows_lost: int
    """Found missing when the store was opened, and accepted (`JournalConfig.accept_loss`)."""
    bytes_staged: int
    """Size of all staged batches now."""


def partition_of(key: str | bytes, partitions: int) -> int:
    """Choose the partition of a key; the same in every process.

    Example:
        >>> partition_of("host-1/syslog", 8)
        6
    """
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % partitions
