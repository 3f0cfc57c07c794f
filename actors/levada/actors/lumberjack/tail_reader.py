"""The actor that reads one file.

Every call that may wait for a disk runs in a thread, with one bounded read at a time.  A file without new bytes is looked at every
`TailConfig.poll` seconds.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import trio

from levada.framework import Actor, Asks, Reason, handles

from .multiline import LineAssembler, Record
from .tail_delivery import LineDelivery, TailState
from .tail_file import OpenFile, ReadRound
from .tail_registry import FileEntry

__all__ = ["DrainFiles", "FileReader", "Located"]

logger = logging.getLogger("levada.actors.lumberjack.tail")


@attrs.frozen
class DrainFiles(Asks[None]):
    """Stop reading, and wait for lines under way. The scanner answers when all files are closed; the actor of a file then stops."""


@attrs.frozen
class Located:
    """Whether the file still has a name that is looked for."""

    gone: bool
    """Whether no pattern matches the file any more."""


class FileReader(Actor[Located | DrainFiles]):
    """Reads one file and has its lines delivered; stops by itself when there is nothing more to do."""

    file: OpenFile
    entry: FileEntry
    shared: TailState

    def __attrs_post_init__(self) -> None:
        self.key = (self.file.device, self.file.inode)
        self.delivery = LineDelivery(self.shared, self.start_soon)
        self.gone = False
        self.reads = False
        """Whether there is a task that closes the file."""

    def started(self) -> None:
        """Begin to follow the file, from its acknowledged place."""
        self.last_data = trio.current_time()
        self.begin_at(self.entry.offset)
        self.start_soon(self.follow)
        self.reads = True

    def stopping(self, reason: Reason) -> None:
        """Close the file. Lines under way are read again by its next actor."""
        if not self.reads:
            self.file.close()

    def undelivered(self, messages: list[Any]) -> None:
        """Drop the messages: the place of a closed file does not matter, so they are not dead letters."""

    @handles
    def locate(self, m: Located) -> None:
        """Record whether the file is still looked for."""
        self.gone = m.gone

    @handles
    def drain(self, _: DrainFiles) -> None:
        """Stop reading."""
        self.delivery.drain()

    def begin_at(self, offset: int) -> None:
        """Assemble lines from this place on."""
        config = self.shared.config
        self.lines_of = LineAssembler(
            offset,
            max_line=config.max_line,
            start=config.multiline,
            max_record=config.max_record,
            # A writer that does not append goes on behind the bytes that a truncation has removed. The system fills the gap with NULs.
            skip_nuls=offset == 0,
        )

    async def follow(self) -> None:
        """Read and deliver until there is nothing more to do, then stop the actor."""
        try:
            entry = self.entry
            await self.system.platform.run_in_thread(self.file.go_to, entry.offset, entry.size, entry.changed)
            while not self.delivery.draining and await self.read_once():
                pass
            await self.delivery.finished()
        except OSError as error:  # of the file; a delivery is a task of its own
            self.shared.refuse(self.key, self.entry.path, error)
        finally:
            self.file.close()
        self.stop()

    async def read_once(self) -> bool:
        """Read once, or wait; return false when there is nothing more to do."""
        config = self.shared.config
        now = trio.current_time()
        look = await self.system.platform.run_in_thread(self.file.look, config.read_size, now)
        # If this task was cancelled while the thread read, no delivery may begin.
        await trio.lowlevel.checkpoint_if_cancelled()
        self.shared.sizes[self.key] = (self.entry, look.size)
        if look.replaced:
            logger.info("%s was truncated or written over", self.entry.path, extra={"event": "file_replaced"})
            await self.hand_on(self.lines_of.finish(partial=True), look)
            self.begin_again()
            return True
        self.note_size()
        if look.data:
            self.last_data = now
            if self.entry.head_length < len(look.head):
                self.entry.note_head(look.head)
            await self.hand_on(self.lines_of.feed(look.data), look)
            return True
        quiet = now - self.last_data
        if self.file.is_suspected:
            await self.pause()
            return True
        if config.once or (self.gone and quiet >= config.rotate_wait):
            # The last line will not be finished.
            await self.hand_on(self.lines_of.finish(partial=True), look)
            return False
        if self.lines_of.holding and quiet >= config.multiline_timeout:
            await self.hand_on(self.lines_of.finish(), look)
        if quiet >= config.close_inactive or (self.shared.crowded and not self.lines_of.holding):
            self.shared.left[self.key] = (self.file.size, self.file.changed)
            return False
        await self.pause()
        return True

    async def pause(self) -> None:
        """Wait until it is time for the next look."""
        with trio.move_on_after(self.shared.config.poll):
            await self.delivery.woken()

    def note_size(self) -> None:
        """Record the size of the file for the next shipper, which may find it shorter."""
        file, entry = self.file, self.entry
        if (entry.size, entry.changed) != (file.size, file.changed):
            entry.size, entry.changed = file.size, file.changed
            self.shared.registry.dirty = True

    async def hand_on(self, records: list[Record], look: ReadRound) -> None:
        """Deliver records that end in the bytes of the last look."""
        await self.delivery.hand_on(self.entry, records, look.before + look.data, self.file.position)

    def begin_again(self) -> None:
        """Read the file from its start, as a new one. The old entry stays, for lines under way and for copies of the old content."""
        self.shared.counters.replacements += 1
        self.entry = self.shared.registry.add(
            FileEntry(
                path=self.entry.path,
                target=self.entry.target,
                device=self.file.device,
                inode=self.file.inode,
                born=self.file.born,
            )
        )
        self.file.go_to(0)
        self.begin_at(0)
