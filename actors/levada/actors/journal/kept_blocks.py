"""Blocks of segment files that were read for rows here and there, and are likely to be wanted again: entities that wake share them.

An entity has a row in this block and a row in that one, and the entity that wakes next has its rows in the same blocks. To map a file, check a
block and read it as Arrow takes 25 µs, and to take a row out of a block that is kept takes 5.

The rows themselves stay in the file, which is mapped: only Arrow's description of a block is in memory, about 512 bytes for each column.
A file whose place another one takes, or that is deleted, is forgotten at once: erased rows must leave the disk.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import attrs

from .blocks import Block, map_file
from .schema import types_in

if TYPE_CHECKING:
    from .segments import Segment

__all__ = ["Kept", "KeptBlocks"]

MOST_BYTES = 32 << 20
"""Bytes that the kept blocks of a journal have in memory: 4,600 blocks of a log with 13 columns, or 350 MB of its files if a block has 256 rows."""
MOST_FILES = 64
"""Files that stay mapped, each with a descriptor."""
GROWTH = 4 << 20
"""Bytes by which a file grows until it is mapped again; the blocks of these bytes are not kept until then."""
_COLUMN = 512


@attrs.define(eq=False)
class Kept:
    """A mapped file, and its blocks that were read."""

    segment: Segment
    view: memoryview
    """The file, from its first byte on."""
    block_bytes: int
    """About the memory of a block."""
    blocks: dict[int, Block] = attrs.field(factory=dict[int, Block])
    """By position; they are decoded, and have passed their checksum."""


class KeptBlocks:
    """The kept blocks of all partitions of a journal. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Segment, Kept] = {}  # those used last at the end
        self.bytes = 0
        """About the memory of all blocks."""

    def of(self, segment: Segment) -> Kept | None:
        """Return a file with its kept blocks, mapped up to the end or nearly so; None if another file has taken its place.

        Raises:
            FileNotFoundError: the file is deleted.
        """
        with self._lock:
            kept = self._files.get(segment)
            if kept is None or segment.visible - len(kept.view) >= GROWTH:
                self._let_go(segment)
                if segment.replaced:
                    return None
                columns = sum(len(list(types_in(field.type))) for field in segment.schema)
                kept = Kept(segment, map_file(segment.files, segment.path, 0, segment.visible), _COLUMN * (1 + columns))
                while len(self._files) >= MOST_FILES:
                    self._let_go(next(iter(self._files)))
            else:
                del self._files[segment]
            self._files[segment] = kept
            return kept

    def add(self, kept: Kept, at: int, block: Block) -> Block:
        """Keep a block, decoded; return it. If there are too many, blocks of the file that was used longest ago go."""
        block = block.decoded()
        with self._lock:
            if at not in kept.blocks and self._files.get(kept.segment) is kept:
                kept.blocks[at] = block
                self.bytes += kept.block_bytes
                while self.bytes > MOST_BYTES:
                    oldest = next(each for each in self._files.values() if each.blocks)
                    oldest.blocks.popitem()
                    self.bytes -= oldest.block_bytes
        return block

    def drop(self, segment: Segment) -> None:
        """Forget a file for good: another one has taken its place, or it is deleted."""
        with self._lock:
            segment.replaced = True
            self._let_go(segment)

    def clear(self) -> None:
        """Forget all files."""
        with self._lock:
            self._files.clear()
            self.bytes = 0

    def _let_go(self, segment: Segment) -> None:
        kept = self._files.pop(segment, None)
        if kept is not None:
            self.bytes -= kept.block_bytes * len(kept.blocks)
