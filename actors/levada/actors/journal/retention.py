"""Room and retention: how much more a journal may take, which segment may be deleted next, and whether the clock can be trusted to say so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from .blocks import Message, pack
from .config import JournalConfig
from .errors import JournalError, JournalFull
from .ledger import Ledger
from .partitions import Partition
from .segments import Segment

__all__ = ["Clock", "DiskRoom", "Retention"]

logger = logging.getLogger("levada.actors.journal")

JUMP = 3600.0
"""The clock has jumped if it differs by more than this from the time that has passed, in seconds."""
SETTLE = 600.0
"""After a jump ahead, nothing is deleted for its age for so many seconds, unless the clock jumps back: time to put it right. The same after
an opening at which the clock is so far ahead of the newest row."""


class Clock:
    """A wall clock that notices its jumps, also those that came while the journal was closed."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        partitions: Sequence[Partition],
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._monotonic = monotonic
        self._told = clock(), monotonic()
        """What the clock said the last time, and when that was."""
        self._trusted_from = 0.0
        newest = max(partition.segments[-1].last for partition in partitions)
        if any(partition.end for partition in partitions) and self._told[0] - newest > JUMP:
            # The journal was closed for long, or idle, or the clock is wrong: after a new start only the rows can tell.
            self._trusted_from = self._told[1] + SETTLE

    def now(self) -> float:
        """Read the clock, in seconds since 1970; a jump is logged."""
        now, passed = self._clock(), self._monotonic()
        jump = (now - self._told[0]) - (passed - self._told[1])
        if abs(jump) > JUMP:
            way = "ahead" if jump > 0 else "back"
            logger.warning(
                "%s: the clock has jumped %s by %.0f s", self._directory, way, abs(jump), extra={"event": "clock"}
            )
            self._trusted_from = passed + SETTLE if jump > 0 else passed
        self._told = now, passed
        return now

    @property
    def trusted(self) -> bool:
        """Whether it can tell the age of rows."""
        return self._monotonic() >= self._trusted_from


class Retention:
    """Decides what may be deleted."""

    def __init__(self, config: JournalConfig, partitions: Sequence[Partition], ledger: Ledger, clock: Clock) -> None:
        self._config = config
        self._partitions = partitions
        self._ledger = ledger
        self._clock = clock
        self._ahead: dict[Segment, float] = {}
        """Segments with stamps in the future, and when that was noticed."""

    def seal_old(self, now: float) -> None:
        """Begin new segments where `segment_time` has passed."""
        age = self._config.segment_time
        for partition in self._partitions:
            last = partition.segments[-1]
            # A stamp in the future says nothing about the age.
            if age is not None and last.end > last.first and (last.oldest > now or now - last.oldest >= age):
                partition.roll()
                partition.publish()

    def next_to_go(self, now: float) -> Partition | None:
        """Return the partition with the oldest segment that may be deleted."""
        config, groups = self._config, self._ledger.groups().values()
        size = sum(partition.size for partition in self._partitions)
        found: tuple[float, Partition] | None = None
        for partition in self._partitions:
            if len(partition.segments) < 2:
                continue
            oldest, following = partition.segments[:2]
            if any(offsets.get(partition.number, 0) < following.first for offsets in groups):
                continue
            if config.retain_bytes is None and config.retain_time is None:
                if groups:
                    return partition
                continue
            large = config.retain_bytes is not None and size - oldest.size >= config.retain_bytes
            written = self._written(partition, now)
            aged = self._clock.trusted and config.retain_time is not None and now - written >= config.retain_time
            if (large or aged) and (found is None or written < found[0]):
                found = written, partition
        return found[1] if found is not None else None

    def _written(self, partition: Partition, now: float) -> float:
        """Return the latest time at which the oldest segment can have been written.

        That is its latest stamp. If the clock was ahead then, it is the first stamp behind it that is not in the future; if all stamps are,
        it is the time at which this was noticed.
        """
        oldest, *newer = partition.segments
        oldest.index()
        if oldest.newest <= now:
            return oldest.newest
        if oldest not in self._ahead:
            self._ahead[oldest] = now
            logger.warning(
                "%s: rows are stamped %.0f s ahead of the clock; their age is told by the rows behind them, or counted from now",
                oldest.path,
                oldest.newest - now,
                extra={"event": "clock"},
            )
        if 0 < oldest.last <= now:
            return oldest.last
        for segment in newer:
            segment.index()
            for stamp in (segment.oldest, segment.last):
                if 0 < stamp <= now:
                    return stamp
        return self._ahead[oldest]


class DiskRoom:
    """Compares the size of all segments and of new rows with `JournalConfig.max_bytes`."""

    def __init__(self, directory: Path, config: JournalConfig, partitions: Sequence[Partition], ledger: Ledger) -> None:
        self._directory = directory
        self._config = config
        self._partitions = partitions
        self._ledger = ledger
        self._segment_size = config.segment_size  # worked out anew it takes 0.5 µs of an append's 45

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(partition.size for partition in self._partitions)

    @property
    def _header_size(self) -> int:
        """Bytes of a new segment without rows."""
        return self._partitions[0].segments[-1].start

    def takes(self, packed: Iterable[Sequence[Message]]) -> bool:
        """Whether there is room for the messages of some partitions."""
        wanted = self.size
        for messages in packed:
            size = sum(message.size for message in messages)
            # A segment that gives way is at least half full, or the next one is.
            wanted += size + (2 * size // self._segment_size + 1) * self._header_size
        return wanted <= self._config.max_bytes

    def prefix(
        self, parts: list[tuple[int, pa.RecordBatch]]
    ) -> tuple[list[tuple[int, pa.RecordBatch]], dict[int, list[Message]]]:
        """Return the first parts that there is room for, and their messages; `JournalFull` if there is none for the first."""
        packed: dict[int, list[Message]] = {}
        for count, (number, batch) in enumerate(parts):
            messages = list(pack([batch], self._config))
            if not self.takes([*packed.values(), messages]):
                if not count:
                    raise self.full([messages])
                return parts[:count], packed
            packed.setdefault(number, []).extend(messages)
        return parts, packed

    def require_for_batch(self, size: int, more: int) -> None:
        """Require room for `more` bytes of a batch that has `size` with them; `JournalFull` if there is none now, `JournalError` if never."""
        config = self._config
        most = config.max_bytes - (config.retain_bytes or 0) - config.partitions * self._segment_size
        if size > most:
            raise JournalError(
                f"a batch of more than {most} bytes never fits: raise max_bytes, or let batches be smaller",
                path=str(self._directory),
            )
        if self.size + more + self._header_size > config.max_bytes:
            raise self._full(size)

    def full(self, packed: Iterable[Sequence[Message]]) -> JournalFull:
        """Return the error for messages that there is no room for."""
        return self._full(sum(message.size for messages in packed for message in messages))

    def _full(self, needed: int) -> JournalFull:
        limit = self._config.max_bytes
        return JournalFull(
            f"holds {self.size} bytes, at most {limit} (max_bytes), and {needed} more were to come; nothing may be deleted "
            f"before the groups have read it ({', '.join(self._ledger.groups()) or 'there are none'})",
            path=str(self._directory),
            needed=needed,
            limit=limit,
        )
