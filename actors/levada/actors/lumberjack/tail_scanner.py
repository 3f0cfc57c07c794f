"""The actor that looks for files, keeps an actor for each of them, and writes the registry.

An error with a file (a disk error, a failed delivery) ends only the actor of that file.  The next look for files starts another one at the
acknowledged place.  So `Scanner` is the supervisor, with its interval as the back-off.

Files take at most half of the descriptors of the process.  The rest is for connections, the registry, and the looks for files.  While
files wait for a place, files that are read to their end are closed, until they change.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

import attrs
import trio

from levada.actors.descriptors import NO_ROOM, descriptor_limit
from levada.framework import Actor, Down, Failed, Reason, Ref, Reply, handles
from levada.framework.errors import ActorStopped

from .tail_delivery import Key, TailState
from .tail_file import FoundFile, OpenFile, find_files, find_moved
from .tail_identity import identify
from .tail_reader import DrainFiles, FileReader, Located
from .tail_registry import FileEntry, names_before_rotation

__all__ = ["Scanner"]

logger = logging.getLogger("levada.actors.lumberjack.tail")


class Scanner(Actor[DrainFiles | Down]):
    """Looks for files, and keeps an actor for each of them."""

    patterns: tuple[str, ...]
    shared: TailState
    finished: trio.Event
    """Set when, with `TailConfig.once`, all files were read and delivered."""
    readers: dict[Key, Ref[Located | DrainFiles]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.done: set[Key] = set()  # with `once`: files that were read, or cannot be
        self.unripe: dict[Key, int] = {}  # sizes of files that may be copies in the making
        # Closed files that are searched for if no pattern matches them any more, and until when: a writer may add to a renamed file.
        self.sought: dict[Key, float] = {}
        # What cannot be done, and why: each is logged once until it can be done again.
        self.troubles: dict[str, str] = {}
        # With `start` "end": sizes that files had at the first look, until they are opened.
        self.old: dict[Key, int] = {}
        self.looked = False
        self.freed = trio.Event()
        self.drained: Reply[Any] | None = None
        self.writing = trio.Lock()

    def started(self) -> None:
        """Start to look for files and to save the registry."""
        self.seek((entry.device, entry.inode) for entry in self.shared.registry.entries if entry.inode)
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
    def drain(self, m: DrainFiles) -> None:
        """End the reading of all files; the answer comes when all are closed."""
        self.drained = self.reply_later()
        for reader in self.readers.values():
            if reader.is_alive:
                reader.tell(m)
        self.look_whether_done()

    @handles
    def file_ended(self, m: Down) -> None:
        """Record that the actor of a file has ended."""
        key = m.tag
        del self.readers[key]
        if self.drained is None:  # at the end, the entry still says how much is left
            self.shared.sizes.pop(key, None)
        self.shared.files = len(self.readers)
        if isinstance(m.reason, Failed):
            self.shared.counters.failures += 1
            self.seek([key])
        if self.shared.config.once:
            self.done.add(key)
        if len(self.readers) <= self.places // 2:  # one look for many places
            self.freed.set()
        self.look_whether_done()

    @property
    def places(self) -> int:
        """The most files that are open at a time."""
        return max(1, min(self.shared.config.max_files, descriptor_limit() // 2))

    def look_whether_done(self) -> None:
        """If no file is being read any more, answer `DrainFiles` and set `finished`."""
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
            what = "the registry of files cannot be written"
            try:
                await self.system.platform.run_in_thread(registry.write, snapshot)
                self.troubles.pop(what, None)
            except OSError as error:
                registry.dirty = True
                self.shared.counters.save_errors += 1
                self.complain(what, error, "registry_error")

    def complain(self, what: str, error: OSError, event: str) -> None:
        """Log what cannot be done, once until it can be done again or fails for another reason."""
        if self.troubles.get(what) != str(error):
            self.troubles[what] = str(error)
            logger.error("%s: %s", what, error, extra={"event": event})

    async def look_for_files(self) -> None:
        """Look for files every `TailConfig.scan` seconds, or when places are free, and start actors for them."""
        config = self.shared.config
        while self.drained is None and not (self.looked and config.once and not self.shared.waiting):
            self.freed = trio.Event()
            try:
                await self.look_once()
            except OSError as error:
                self.complain("no descriptor is free to look for files", error, "descriptors")
            except ActorStopped:
                return  # the end came while threads looked at files
            else:
                self.looked = True
                self.shared.looked.set()
                self.look_whether_done()
            with trio.move_on_after(config.scan / 2 if self.unripe else config.scan):
                await self.freed.wait()

    async def look_once(self) -> None:
        """Look for files, and start actors for them.

        Raises:
            OSError: no descriptor is free to look for files.
            ActorStopped: this actor is ending.
        """
        files = await self.system.platform.run_in_thread(find_files, self.patterns, self.shared.config.exclude)
        here = {(file.device, file.inode): file for file in files}
        self.seek(self.shared.left.keys() - here.keys() - self.sought.keys())
        sought = self.sought.keys() - here.keys() - self.readers.keys()
        lost = [entry for key in sought if (entry := self.shared.registry.by_inode(*key)) is not None]
        found = await self.system.platform.run_in_thread(find_moved, lost) if lost else []
        moved = {(file.device, file.inode): file for file in found}
        for entry in lost:
            if (entry.device, entry.inode) not in moved and entry.size > entry.offset:
                text = "%s is gone, and its last %d bytes were not shipped"
                logger.warning(text, entry.path, entry.size - entry.offset, extra={"event": "file_gone"})
                entry.size = entry.offset  # said once
                self.shared.registry.dirty = True
        self.troubles.pop("no descriptor is free to look for files", None)
        if self.shared.config.start == "end" and self.shared.registry.is_new and not self.looked:
            self.old = {key: file.size for key, file in here.items()}
        await self.take_in(here | moved)
        now = trio.current_time()
        self.sought = {key: until for key, until in self.sought.items() if until > now}
        self.shared.left = {key: left for key, left in self.shared.left.items() if key in here or key in self.sought}
        self.seek(moved.keys() - self.readers.keys() - self.done)  # they wait until others are closed

    def seek(self, keys: Iterable[Key]) -> None:
        """Search for files for `TailConfig.rotate_wait` seconds, if no pattern matches them."""
        until = trio.current_time() + self.shared.config.rotate_wait
        self.sought.update(dict.fromkeys(keys, until))

    async def take_in(self, here: dict[Key, FoundFile]) -> None:
        """Tell the actors whether their files are still there, and start the missing actors."""
        shared, registry = self.shared, self.shared.registry
        for key, reader in self.readers.items():
            if reader.is_alive:  # else its `Down` is under way
                reader.tell(Located(gone=key not in here))
        self.unripe = {key: size for key, size in self.unripe.items() if key in here}
        shared.refused = {key: why for key, why in shared.refused.items() if key in here}
        missing = [
            (key, file)
            for key, file in here.items()
            if key not in self.readers and key not in self.done and shared.left.get(key) != (file.size, file.changed)
        ]
        by_path = registry.by_path() if missing else {}
        taken: deque[tuple[Key, OpenFile, FileEntry]] = deque()
        looked_at = 0
        try:
            shared.waiting = len(missing)
            shared.crowded = False
            for key, file in missing:
                shared.crowded = len(self.readers) + len(taken) >= self.places
                if shared.crowded or self.drained is not None:
                    break
                try:
                    found = await self.take_in_file(key, file, by_path, here)
                except OSError as error:
                    self.complain("files wait, because no descriptor is free", error, "descriptors")
                    shared.crowded = True
                    break
                looked_at += 1
                if found is not None:
                    taken.append((key, *found))
            else:
                self.troubles.pop("files wait, because no descriptor is free", None)
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
                    reader.tell(DrainFiles())
        except BaseException:
            for _, opened, _ in taken:
                opened.close()
            raise
        shared.files = len(self.readers)
        shared.waiting = len(missing) - looked_at  # not before the actors are there, see `look_whether_done`
        shared.bytes_waiting = sum(self.behind(key, file) for key, file in missing if key not in self.readers)
        now = self.system.platform.time()
        for entry in registry.entries:
            found_as = here.get((entry.device, entry.inode))
            if found_as is not None:
                entry.seen = now
                if (entry.path, entry.target) != (found_as.path, found_as.target):
                    entry.path, entry.target = found_as.path, found_as.target
                    registry.dirty = True
        registry.forget_old(now)

    def behind(self, key: Key, file: FoundFile) -> int:
        """Return the bytes of a file that were not shipped, as far as is known without opening it."""
        entry = self.shared.registry.by_inode(*key)
        return max(0, file.size - (0 if entry is None else entry.offset))

    async def take_in_file(
        self, key: Key, file: FoundFile, by_path: dict[str, list[FileEntry]], here: dict[Key, FoundFile]
    ) -> tuple[OpenFile, FileEntry] | None:
        """Open a file and find or make its entry; return ``None`` if it cannot be read, or not yet.

        Raises:
            OSError: no descriptor is free.
        """
        shared, registry = self.shared, self.shared.registry
        waits = not shared.config.once and self.unripe.get(key) != file.size
        known = functools.partial(
            identify,
            file,
            registry.by_inode(*key),
            by_path.get(file.path, ()),
            [entry for name in names_before_rotation(file.path) for entry in by_path.get(name, ())],
            here,
            waits=waits,
        )
        try:
            found = await self.system.platform.run_in_thread(known)
            if found is None:
                self.unripe[key] = file.size
                return None
            opened, entry = found
            begin = 0
            if key in self.old:
                try:
                    begin = await self.system.platform.run_in_thread(
                        opened.end_of_lines, self.old[key], shared.config.max_line
                    )
                except BaseException:
                    opened.close()
                    raise
                del self.old[key]
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            shared.refuse(key, file.path, error)
            return None
        if (opened.device, opened.inode) != key:
            opened.close()  # another file has replaced it meanwhile
            return None
        if entry is None:
            entry = FileEntry(path=file.path, device=file.device, inode=file.inode, born=opened.born)
            entry.offset = begin
        elif (entry.device, entry.inode) != key:
            logger.info("%s is a copy of %s, shipped up to %d", file.path, entry.path, entry.offset)
            registry.remove(entry)
            entry = attrs.evolve(
                entry,
                device=file.device,
                inode=file.inode,
                born=opened.born,
                size=0,
                changed=0,
                seen=self.system.platform.time(),
            )
        if registry.by_inode(*key) is not entry:
            registry.add(entry)
        entry.path, entry.target, entry.born = file.path, file.target, opened.born
        shared.left.pop(key, None)
        return opened, entry
