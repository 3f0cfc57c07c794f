"""A simulated disk: the files that the processes of a machine see, and the part of them that outlives a power failure.

Each file has its bytes in the page cache, which all processes see, and its bytes on the disk. A write changes the first. A sync brings
the writes of one file to the second. Names are the same in small: a folder has names that processes see, and names that are on the disk.

A process that is killed takes nothing with it (`SimulatedFiles.kill`). A power failure leaves the state of the disk, and a part of the rest:

* Bytes survive by sector, any of them, in any order. Or the size of the file survives, and zeros where bytes should be.
* ``ordered``, as on ext4 and XFS: changes of names, and the cutting of files, go through a journal. They survive up to some change, and not
  from there on. A sync of any file or folder brings all changes before it to the disk, except `fdatasync` of a file that kept its size.
* ``lax``, as far as POSIX goes: any of the changes survive. A name is sure when its folder was synced, and then only.

After a sync that failed, the pages are in memory and count as written, as on Linux: the next sync succeeds, and does not write them.
"""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from .faults import chance

__all__ = ["Inode", "Model", "SimulatedDisk", "failure"]

Model = Literal["ordered", "lax"]

PAGE = 4096
"""Bytes that are written at a time: a kill comes between two pages."""


def failure(code: int, path: str = "") -> OSError:
    """Return the error of the operating system; Python makes it the fitting subclass of `OSError`."""
    return OSError(code, os.strerror(code), path) if path else OSError(code, os.strerror(code))


@functools.lru_cache(4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


@attrs.define(eq=False)
class Inode:
    """A file or a folder."""

    number: int
    folder: bool
    path: str
    """The name it had last."""
    mtime: float
    mode: int
    born: int
    """The change that made it."""
    links: int = 0
    """Names that processes see."""
    opened: int = 0
    """Descriptors and databases that keep it."""
    locks: dict[object, bool] = attrs.field(factory=dict)
    """Who has it locked, and whether shared."""
    cache: bytearray = attrs.field(factory=bytearray)
    """The bytes that processes see."""
    durable: bytearray = attrs.field(factory=bytearray)
    """The bytes on the disk."""
    unsynced: list[Write] = attrs.field(factory=list)
    """Changes of the bytes that may not be on the disk, in order."""
    perhaps: bytes | None = None
    """Of a database: what it holds after a commit that failed, if its pages are there after a crash."""
    names: dict[str, int] = attrs.field(factory=dict)
    """Of a folder: the inodes that processes see in it."""
    durable_names: dict[str, int] = attrs.field(factory=dict)
    """Of a folder: the inodes in it on the disk."""


@attrs.frozen
class Write:
    """Bytes written to a place, or without bytes the cutting of the file there."""

    at: int
    data: bytes | None
    change: int
    """The number of the change that cut the file; 0 of a write."""

    def apply(self, content: bytearray) -> None:
        """Change the bytes of a file."""
        if self.data is None:
            del content[self.at :]
        if len(content) < self.at:
            content += bytes(self.at - len(content))
        if self.data:
            content[self.at : self.at + len(self.data)] = self.data


@attrs.frozen
class _Change:
    """A change of names in one folder, which survives whole or not at all."""

    number: int
    folder: int
    lost: tuple[str, int] | None
    """A name that goes, and its inode."""
    got: tuple[str, int] | None
    """A name that comes, perhaps in place of another file."""
    text: str
    """The name of this change."""

    def apply(self, names: dict[str, int]) -> None:
        if self.lost is not None and names.get(self.lost[0]) == self.lost[1]:
            del names[self.lost[0]]
        if self.got is not None:
            names[self.got[0]] = self.got[1]


class SimulatedDisk:
    """The disk of one machine. Its methods may be called in any thread, while `lock` is held; `SimulatedFiles` does that.

    Args:
        model: what a power failure leaves; see above.
        size: bytes that fit, in whole pages, one of them for each file and folder; None: any number.
        sector: bytes that the disk writes whole or not at all.
        sync_time: seconds that a sync takes; see `SimulatedFiles.take_waiting`.
        time: returns the seconds since 1970, for the times of files.
    """

    def __init__(
        self,
        model: Model = "ordered",
        *,
        size: int | None = None,
        sector: int = 512,
        sync_time: float = 0.0,
        time: Callable[[], float] = float,
    ) -> None:
        self.model: Model = model
        self.size = size
        """Bytes that fit; may be changed at any time, see `full`."""
        self.sector = sector
        self.sync_time = sync_time
        """Seconds that a sync takes; may be changed at any time."""
        self.lock = threading.RLock()
        self._time = time
        self._root = Inode(1, True, "/", time(), 0o755, 0, links=1)
        self._inodes = {1: self._root}
        self._made = 1
        self._changes: list[_Change] = []
        """Changes of names that may not be on the disk, in order."""
        self._number = 0
        """Of the last change, of names or by the cutting of a file."""
        self._sure = 0
        """All changes up to this number are on the disk, if the model orders them."""
        self._left: list[Inode] = []
        """Files and folders that have lost their last name or descriptor."""
        self._processes: dict[object, Callable[[], None]] = {}

    # Paths

    def find(self, path: str) -> Inode:
        """Return the file or folder of a name; raises as `os.stat`."""
        return self._walk(path, _parts(path))

    def place(self, path: str) -> tuple[Inode, str, Inode | None]:
        """Return the folder of a name, the last part of the name, and the file that has it, if any."""
        parts = _parts(path)
        if not parts:
            return self._root, "", self._root
        folder = self._walk(path, parts[:-1])
        if not folder.folder:
            raise failure(errno.ENOTDIR, path)
        number = folder.names.get(parts[-1])
        return folder, parts[-1], None if number is None else self._inodes[number]

    def _walk(self, path: str, parts: tuple[str, ...]) -> Inode:
        node = self._root
        for part in parts:
            if not node.folder:
                raise failure(errno.ENOTDIR, path)
            number = node.names.get(part)
            if number is None:
                raise failure(errno.ENOENT, path)
            node = self._inodes[number]
        return node

    def paths(self) -> Iterator[str]:
        """Yield the names of all files, in order."""
        yield from self._files(self._root, "/")

    def _files(self, folder: Inode, path: str) -> Iterator[str]:
        for name, number in sorted(folder.names.items()):
            node, here = self._inodes[number], posixpath.join(path, name)
            if node.folder:
                yield from self._files(node, here)
            else:
                yield here

    # Names

    def make(self, folder: Inode, name: str, *, is_folder: bool, mode: int) -> Inode:
        """Make a file or a folder under a new name."""
        self._made += 1
        node = Inode(self._made, is_folder, posixpath.join(folder.path, name), self._time(), mode, self._number + 1)
        self._inodes[node.number] = node
        self.give_name(folder, name, node)
        return node

    def give_name(self, folder: Inode, name: str, node: Inode) -> None:
        """Give a file one more name."""
        self._change(folder, None, (name, node.number))
        node.links += 1

    def take_name(self, folder: Inode, name: str) -> None:
        """Take a name away; a file without a name goes when it is closed."""
        node = self._inodes[folder.names[name]]
        self._change(folder, (name, node.number), None)
        node.links -= 1
        self.release(node)

    def rename(self, folder: Inode, name: str, target: Inode, new: str) -> None:
        """Give a file or folder another name, which may be another one's."""
        node = self._inodes[folder.names[name]]
        replaced = target.names.get(new)
        if folder is target:
            self._change(folder, (name, node.number), (new, node.number))
        else:  # POSIX does not say that both survive together; a journal does
            self._change(target, None, (new, node.number))
            number = self._number
            self._change(folder, (name, node.number), None)
            if self.model == "ordered":
                self._changes[-1] = attrs.evolve(self._changes[-1], number=number)
        self._set_path(node, posixpath.join(target.path, new))
        if replaced is not None:
            self._inodes[replaced].links -= 1
            self.release(self._inodes[replaced])

    def _set_path(self, node: Inode, path: str) -> None:
        node.path = path
        for name, number in node.names.items():
            self._set_path(self._inodes[number], posixpath.join(path, name))

    def _change(self, folder: Inode, lost: tuple[str, int] | None, got: tuple[str, int] | None) -> None:
        self._number += 1
        text = f"{folder.path}: {lost[0] if lost else ''} -> {got[0] if got else ''}"
        change = _Change(self._number, folder.number, lost, got, text)
        self._changes.append(change)
        change.apply(folder.names)
        folder.mtime = self._time()

    def release(self, node: Inode) -> None:
        """Record that a file may have lost its last name or descriptor. A sync forgets its bytes when no power failure can bring it back."""
        if not node.links and not node.opened:
            self._left.append(node)

    def _forget(self) -> None:
        kept = {number for folder in self._inodes.values() for number in folder.durable_names.values()}
        kept |= {change.got[1] for change in self._changes if change.got is not None}
        left, self._left = self._left, []
        for node in left:
            if node.links or node.opened:
                continue
            if node.number in kept:
                self._left.append(node)
            else:
                self._inodes.pop(node.number, None)

    @staticmethod
    def lock_file(node: Inode, owner: object, *, shared: bool) -> None:
        """Lock a file; `BlockingIOError` if another owner has it locked, unless both are `shared`.

        As on Linux, a lock that is changed is first given up: if the change is refused, the owner has none.
        """
        node.locks.pop(owner, None)
        if any(not (shared and other_shared) for other_shared in node.locks.values()):
            raise failure(errno.EAGAIN)
        node.locks[owner] = shared

    # Bytes

    @property
    def used(self) -> int:
        """Bytes that are in use: whole pages, and one page for each file and folder."""
        seen = [node for node in self._inodes.values() if node.links or node.opened]
        return sum(PAGE - (-len(node.cache) // PAGE) * PAGE for node in seen)

    def full(self) -> None:
        """Fill the disk: nothing more fits. Files may be deleted, and `size` set again."""
        self.size = self.used

    def room(self, node: Inode, at: int, size: int) -> int:
        """Return how many of so many bytes from a place on fit."""
        if self.size is None:
            return size
        free = max(0, self.size - self.used)
        return max(0, min(size, -(-len(node.cache) // PAGE) * PAGE + free // PAGE * PAGE - at))

    def require_room(self, path: str) -> None:
        """Require room for one more file or folder."""
        if self.size is not None and self.used + PAGE > self.size:
            raise failure(errno.ENOSPC, path)

    @staticmethod
    def cut_between_pages(at: int, size: int, share: float) -> int:
        """Return how many bytes of a write are written if it ends between pages, after a share of it."""
        ends = [0, *(end - at for end in range((at // PAGE + 1) * PAGE, at + size, PAGE)), size]
        return ends[min(len(ends) - 1, int(share * len(ends)))]

    def write(self, node: Inode, at: int, data: bytes) -> None:
        """Write bytes into the page cache."""
        self._apply(node, Write(at, data, 0))

    def truncate(self, node: Inode, size: int) -> None:
        """Set the size of a file, in the page cache."""
        self._number += 1
        self._apply(node, Write(size, None, self._number))

    def _apply(self, node: Inode, write: Write) -> None:
        write.apply(node.cache)
        node.unsynced.append(write)
        node.mtime = self._time()

    def replace(self, node: Inode, content: bytes) -> None:
        """Give a file other bytes at once, and its folder's names with them, synced: a commit of a database."""
        node.cache[:] = node.durable[:] = content
        node.unsynced = []
        node.mtime = self._time()
        if node.links:
            self._sync_names(self.find(posixpath.dirname(node.path)))

    def sync(self, node: Inode, *, only_data: bool = False) -> None:
        """Bring a file, or the names in a folder, to the disk."""
        if node.folder:
            self._sync_names(node)
            return
        resized = len(node.durable) != len(node.cache) or any(write.data is None for write in node.unsynced)
        for write in node.unsynced:
            write.apply(node.durable)
        node.unsynced = []
        if self.model == "ordered" and (not only_data or resized or node.born > self._sure):
            self._sync_names(node)

    def _sync_names(self, folder: Inode) -> None:
        rest = []
        for change in self._changes:
            if self.model == "ordered" or change.folder == folder.number:
                if (parent := self._inodes.get(change.folder)) is not None:
                    change.apply(parent.durable_names)
            else:
                rest.append(change)
        self._changes = rest
        if self.model == "ordered":
            self._sure = self._number
        if self._left:
            self._forget()

    def fail_sync(self, node: Inode, share: float) -> None:
        """Fail the sync of a file: a share of the sectors is on the disk, and the others count as written."""
        kept = []
        for write in node.unsynced:
            if write.data is None:
                kept.append(write)
            else:
                kept += [part for sector, part in self._sectors(write) if chance(share, node.path, sector) < share]
        node.unsynced = kept

    def _sectors(self, write: Write) -> Iterator[tuple[int, Write]]:
        """Yield the parts of a write, each with the number of its sector."""
        assert write.data is not None
        at, end = write.at, write.at + len(write.data)
        while at < end:
            stop = min(end, (at // self.sector + 1) * self.sector)
            yield at // self.sector, Write(at, write.data[at - write.at : stop - write.at], 0)
            at = stop

    # Failures

    def attach(self, process: object, end: Callable[[], None]) -> None:
        """Call a function when the power fails, before anything is lost: it ends a process."""
        self._processes[process] = end

    def detach(self, process: object) -> None:
        """Forget a process that has ended."""
        self._processes.pop(process, None)

    def power_failure(self, seed: int, *, share: float = 0.5) -> None:
        """End all processes, and lose everything that is not on the disk, but a share.

        Args:
            seed: decides, with its name, what becomes of each sector and of each change of names.
            share: of unsynced changes that survive; 0: none; 1: all.
        """
        with self.lock:
            for end in list(self._processes.values()):
                end()
            sure = self._lose_changes(seed, share)
            alive, waiting = {1: self._root}, [self._root]
            while waiting:
                for number in waiting.pop().durable_names.values():
                    if number not in alive:
                        alive[number] = self._inodes[number]
                        waiting.append(alive[number])
            self._inodes, self._left = alive, []
            for node in alive.values():
                for write in self._surviving(node, seed, share, sure):
                    write.apply(node.durable)
                if node.perhaps is not None and chance(seed, node.path, "commit") < share:
                    node.durable[:] = node.perhaps
                node.perhaps = None
                node.unsynced, node.cache = [], bytearray(node.durable)
                node.links = node.opened = node.born = 0
                node.locks = {}
                node.names = dict(node.durable_names)
            self._root.links = 1
            for node in alive.values():
                for number in node.names.values():
                    alive[number].links += 1
            self._set_path(self._root, "/")
            self._sure = self._number

    def _lose_changes(self, seed: int, share: float) -> int:
        """Bring the changes of names that survive to the disk. Return the number up to which all changes survive, if the model orders them."""
        changes, self._changes = self._changes, []
        if self.model == "lax":
            for change in changes:
                if chance(seed, change.text) < share:
                    change.apply(self._inodes[change.folder].durable_names)
            return 0
        waiting = [(change.number, change.text) for change in changes]
        for node in self._inodes.values():
            cuts = (write for write in node.unsynced if write.data is None and write.change > self._sure)
            waiting += [(cut.change, f"{node.path}: cut at {cut.at}") for cut in cuts]
        # The journal ends before each of ten changes with about the same chance.
        lost = [number for number, text in waiting if chance(seed, text) >= share**0.2]
        sure = min(lost, default=self._number + 1) - 1
        for change in changes:
            if change.number <= sure:
                change.apply(self._inodes[change.folder].durable_names)
        return sure

    def _surviving(self, node: Inode, seed: int, share: float, sure: int) -> Iterator[Write]:
        """Yield the parts of unsynced writes that survive."""
        times = Counter[int]()
        for write in node.unsynced:
            if write.data is not None:
                for sector, part in self._sectors(write):
                    times[sector] += 1
                    if chance(seed, node.path, sector, times[sector]) < share:
                        yield part
            elif write.change <= sure if self.model == "ordered" else chance(seed, node.path, "cut", write.at) < share:
                yield write
        missing = len(node.cache) - len(node.durable)
        if share and missing > 0 and chance(seed, node.path, "size") < 0.3:
            yield Write(len(node.durable) + int(chance(seed, node.path, "zeros") * (missing + 1)), b"", 0)

    def rot(self, path: str, at: int, bit: int = 0) -> None:
        """Change one bit of a file at rest, on the disk and in memory."""
        node = self.find(path)
        for content in (node.cache, node.durable):
            if at < len(content):
                content[at] ^= 1 << bit
