"""The actor that looks for files, keeps an actor for each of them, and writes the registry.

An error with a file (a disk error, a failed delivery) ends only the actor of that file.  The next look for files starts another one at the
acknowledged place.  So `Scanner` is the supervisor, with its interval as the back-off.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import attrs
import trio

from levada.framework import Actor, Down, Failed, Reason, Ref, Reply, handles
from levada.framework.errors import ActorStopped

from .tail_delivery import Key, Shared
from .tail_file import Found, OpenFile, find_files, find_moved
from .tail_reader import Drain, FileReader, Located
from .tail_registry import FileEntry, digest, names_before_rotation

__all__ = ["Scanner"]

logger = logging.getLogger("levada.actors.lumberjack.tail")


class Scanner(Actor[Drain | Down]):
    """Looks for files, and keeps an actor for each of them."""

    patterns: tuple[str, ...]
    shared: Shared
    finished: trio.Event
    """Set when, with `TailConfig.once`, all files were read and delivered."""
    readers: dict[Key, Ref[Located | Drain]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.done: set[Key] = set()  # with `once`: files that were read, or cannot be
        self.unripe: dict[Key, int] = {}  # sizes of files that may be unfinished copies
        # Files that are not read to their end. If one is renamed so that no pattern matches, it must be searched for.
        self.unfinished = {(entry.device, entry.inode) for entry in self.shared.registry.entries if entry.inode}
        self.refused: set[tuple[str, str]] = set()
        self.looked = False
        self.freed = trio.Event()
        self.drained: Reply[Any] | None = None
        self.writing = trio.Lock()

    def started(self) -> None:
        """Start to look for files and to save the registry."""
        self.start_soon(self.look_for_files)
        self.start_soon(self.save)

    async def stopping(self, reason: Reason) -> None:
        """Write the registry once more."""
        for key, reader in self.readers.items():
            self.unwatch(reader, key)
        await self.write_registry()

    def undelivered(self, messages: list[Any]) -> None:
        """Drop the messages: the ends of readers do not matter any more, so they are not dead letters."""

    @handles
    def drain(self, m: Drain) -> None:
        """End the reading of all files; the answer comes when all are closed."""
        self.drained = self.reply_later()
        for reader in self.readers.values():
            if reader.is_alive:
                reader.tell(m)
        self.look_whether_done()

    @handles
    def file_ended(self, m: Down) -> None:
        """Note that the actor of a file has ended."""
        key = m.tag
        del self.readers[key]
        if self.drained is None:  # at the end, the entry still says how much is left
            self.shared.sizes.pop(key, None)
        self.shared.files = len(self.readers)
        if isinstance(m.reason, Failed):
            self.shared.counters.failures += 1
            self.unfinished.add(key)
        if self.shared.config.once:
            self.done.add(key)
        if len(self.readers) <= self.shared.config.max_files // 2:  # one look for many places
            self.freed.set()
        self.look_whether_done()

    def look_whether_done(self) -> None:
        """If no file is being read any more, answer `Drain` and set `finished`."""
        if self.readers:
            return
        if self.drained is not None:
            self.drained.send(None)
            self.drained = None
        if self.looked and self.shared.config.once and not self.shared.waiting:
            self.finished.set()

    async def save(self) -> None:
        """Write the registry every `TailConfig.save` seconds."""
        while True:
            await trio.sleep(self.shared.config.save)
            await self.write_registry()

    async def write_registry(self) -> None:
        """Write the registry if it has changed."""
        registry = self.shared.registry
        async with self.writing:
            snapshot = registry.snapshot()
            if snapshot is None:
                return
            try:
                await trio.to_thread.run_sync(registry.write, snapshot)
            except OSError as error:
                registry.dirty = True
                self.shared.counters.save_errors += 1
                logger.error("the registry of files cannot be written: %s", error, extra={"event": "registry_error"})

    async def look_for_files(self) -> None:
        """Look for files every `TailConfig.scan` seconds, or when places are free, and start actors for them."""
        config = self.shared.config
        while self.drained is None and not (self.looked and config.once and not self.shared.waiting):
            self.freed = trio.Event()
            files = await trio.to_thread.run_sync(find_files, self.patterns, config.exclude)
            here = {(file.device, file.inode): file for file in files}
            # Those let go may have grown before they were renamed.
            sought = (self.unfinished | self.shared.left.keys()) - here.keys()
            self.unfinished.clear()
            lost = [entry for key in sought if (entry := self.shared.registry.by_inode(*key)) is not None]
            found = await trio.to_thread.run_sync(find_moved, lost) if lost else []
            moved = {(file.device, file.inode): file for file in found}
            try:
                await self.take_in(here | moved)
            except ActorStopped:
                return  # the end came while threads looked at files
            self.unfinished |= moved.keys() - self.readers.keys() - self.done  # they wait until others are closed
            self.looked = True
            self.shared.looked.set()
            self.look_whether_done()
            with trio.move_on_after(config.scan):
                await self.freed.wait()

    async def take_in(self, here: dict[Key, Found]) -> None:
        """Tell the actors where their files are, and start the missing actors."""
        shared, registry = self.shared, self.shared.registry
        for key, reader in self.readers.items():
            if reader.is_alive:  # else its `Down` is under way
                reader.tell(Located(here[key].path if key in here else None))
        self.unripe = {key: size for key, size in self.unripe.items() if key in here}
        shared.left = {key: size for key, size in shared.left.items() if key in here}
        missing = [
            (key, file)
            for key, file in here.items()
            if key not in self.readers and key not in self.done and shared.left.get(key) != file.size
        ]
        by_path = registry.by_path() if missing else {}
        taken: deque[tuple[Key, OpenFile, FileEntry]] = deque()
        looked_at = 0
        try:
            shared.waiting = len(missing)
            for key, file in missing:
                shared.crowded = len(self.readers) + len(taken) >= shared.config.max_files
                if shared.crowded or self.drained is not None:
                    break
                known = [entry for name in names_before_rotation(file.path) for entry in by_path.get(name, ())]
                opened, entry = await self.take_in_file(key, file, known)
                looked_at += 1
                if opened is not None and entry is not None:
                    taken.append((key, opened, entry))
            if taken:
                # Before anything is read: otherwise, if this process is killed and the file is renamed, the next shipper would not know it.
                await self.write_registry()
            while taken:
                key, opened, entry = taken[0]
                self.readers[key] = reader = self.spawn(FileReader, opened, entry, shared)
                shared.sizes[key] = (entry, opened.size)  # the end may come before the reader looks
                taken.popleft()  # the reader closes it
                self.watch(reader, key)
                if self.drained is not None:  # since the check above
                    reader.tell(Drain())
        except BaseException:
            for _, opened, _ in taken:
                opened.close()
            raise
        shared.files = len(self.readers)
        shared.waiting = len(missing) - looked_at  # not before the actors are there, see `look_whether_done`
        shared.bytes_waiting = sum(self.behind(key, file) for key, file in missing[looked_at:])
        now = time.time()
        for entry in registry.entries:
            if (entry.device, entry.inode) in here:
                entry.seen = now
        registry.forget_old(now)

    def behind(self, key: Key, file: Found) -> int:
        """Return the bytes of a file that were not shipped, as far as is known without opening it."""
        entry = self.shared.registry.by_inode(*key)
        return max(0, file.size - (0 if entry is None else entry.offset))

    async def take_in_file(
        self, key: Key, file: Found, originals: list[FileEntry]
    ) -> tuple[OpenFile | None, FileEntry | None]:
        """Open a file and find or make its entry; return neither if it cannot be read, or not yet."""
        shared, registry = self.shared, self.shared.registry
        try:
            opened, entry = await trio.to_thread.run_sync(self.identify, file, registry.by_inode(*key), originals)
        except OSError as error:
            why = (file.path, str(error))
            if why not in self.refused:
                self.refused.add(why)
                shared.counters.failures += 1
                logger.warning(
                    "cannot read %s: %s", file.path, error.strerror or error, extra={"event": "file_refused"}
                )
            if shared.config.once:
                self.done.add(key)
            return None, None
        if opened is None:
            return None, None
        if (opened.device, opened.inode) != key:
            opened.close()  # another file has replaced it meanwhile
            return None, None
        if entry is None:
            entry = FileEntry(path=file.path, device=file.device, inode=file.inode)
            if shared.config.start == "end" and registry.is_new and not self.looked:
                entry.offset = await trio.to_thread.run_sync(opened.end_of_lines, shared.config.max_line)
        if (entry.device, entry.inode) != key:
            logger.info("%s is a copy of %s, shipped up to %d", file.path, entry.path, entry.offset)
            entry = attrs.evolve(entry, path=file.path, device=file.device, inode=file.inode)
        if registry.by_inode(*key) is not entry:
            registry.add(entry)
        entry.path = file.path
        shared.left.pop(key, None)
        return opened, entry

    def identify(
        self, file: Found, own: FileEntry | None, originals: list[FileEntry]
    ) -> tuple[OpenFile | None, FileEntry | None]:
        """Open a file and find its entry by the rules of the registry. Blocks.

        Args:
            file: the file to open.
            own: the entry of its inode.
            originals: entries of files of which it may be a copy.

        Returns:
            File and entry; no entry for a new file; neither if the file may be an unfinished copy, to be looked at again later.

        Raises:
            OSError: the file cannot be opened or read.
        """
        opened = OpenFile(file.path)
        try:
            key = (opened.device, opened.inode)
            if own is not None and opened.is_described_by(own):
                return opened, own
            head = digest(opened.head())
            for entry in originals:
                if entry is own or head != entry.head_digest:
                    continue
                if opened.size < entry.offset and self.unripe.get(key) != opened.size and not self.shared.config.once:
                    # It may still be being copied. If it has not grown at the next look, it is a new file.
                    self.unripe[key] = opened.size
                    opened.close()
                    return None, None
                if opened.is_described_by(entry):
                    return opened, entry
        except BaseException:
            opened.close()
            raise
        return opened, None
