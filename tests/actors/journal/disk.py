"""A disk that remembers each state in which a crash may leave the files below a folder.

`Disk.watch` is put around work on journals. Before and behind each call that changes a file or a name, and in the middle of each write, it notes a
`Moment`. So one run of the work gives all states, and nothing has to die:

* `Moment.killed`: the process ends. All that it had written is there.
* `Moment.power_failure`: what was synced is there. What came later is there, or not, or in part, or as other bytes; and names that were not
  synced with their folder are there or not.

Calls may fail (`Disk.before`). After a sync that failed, the system has what was written in memory and takes it for written: later syncs do not
bring it to the disk, unless it is written again. So do Linux and others.

The ledger's files are taken as they are: SQLite syncs each commit, and has tests of its own.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest

from levada.framework.platform import REAL

__all__ = ["MEMORY", "Disk", "Files", "Moment", "Watch"]

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where to make journals by the hundred: to open one takes 5 ms in memory, and 30 on a disk."""

Identity = tuple[int, int]
"""An inode, and how often its number has been used."""
_SYNCS = "fdatasync", "fsync"
_IGNORED = "lock", "ledger.sqlite-shm"


@attrs.frozen
class Files:
    """The folders and files below the watched folder, by their paths."""

    folders: Sequence[str]
    content: Mapping[str, bytes]

    def write(self, target: Path) -> Path:
        """Make them below a new folder; return it."""
        target.mkdir()
        for folder in self.folders:
            (target / folder).mkdir()
        for path, octets in self.content.items():
            (target / path).write_bytes(octets)
        return target


@attrs.frozen
class Moment:
    """All files at one moment."""

    call: str
    """The call that comes next, or has begun."""
    told: int
    """How much had been answered, as the test counts it."""
    folders: tuple[str, ...]
    names: Mapping[str, Identity]
    """The files, by path."""
    content: Mapping[Identity, bytes]
    """What a process sees in each file."""
    synced: Mapping[Identity, bytes]
    """What each file held when it was synced the last time."""
    durable: Mapping[str, Mapping[str, Identity | None]]
    """For each folder, the names in it when it was synced the last time; None is a folder."""

    def killed(self) -> Files:
        """Return what a process leaves that is killed now."""
        return Files(self.folders, {path: self.content[file] for path, file in self.names.items()})

    def power_failure(self, chance: random.Random, *, names_lost: bool = False) -> Files:
        """Return what a power failure may leave.

        Args:
            chance: decides what becomes of bytes that were not synced.
            names_lost: names are as they were when their folder was synced; else all are as they are now.
        """
        names, folders = self.names, self.folders
        if names_lost:
            found = dict(self._durable(""))
            folders = tuple(sorted(path for path, file in found.items() if file is None))
            names = {path: file for path, file in found.items() if file is not None}
        return Files(folders, {path: self._after_failure(path, file, chance) for path, file in names.items()})

    def _durable(self, folder: str) -> Iterator[tuple[str, Identity | None]]:
        for name, file in self.durable.get(folder, {}).items():
            path = f"{folder}/{name}".lstrip("/")
            yield path, file
            if file is None:
                yield from self._durable(path)

    def _after_failure(self, path: str, file: Identity, chance: random.Random) -> bytes:
        now = self.content[file]
        return now if "ledger.sqlite" in path else after_failure(self.synced.get(file, b""), now, chance)


def after_failure(known: bytes, now: bytes, chance: random.Random) -> bytes:
    """Return what may be in a file that held `known` when it was synced, and holds `now`."""
    if known == now:
        return now
    same = next((at for at, (a, b) in enumerate(zip(known, now, strict=False)) if a != b), min(len(known), len(now)))
    if same < len(known):  # written over in place, or cut off: any byte is the old one, the new one, or neither
        mixed = (
            bytes(chance.choice([a, b, 0]) if a != b else a for a, b in zip(known, now, strict=False))
            + now[len(known) :]
        )
        return chance.choice([known, now, mixed])
    tail = bytearray(now[same:])
    start, end = sorted((chance.randint(0, len(tail)), chance.randint(0, len(tail))))
    match chance.choice(["kept", "old", "cut", "zeros", "hole", "noise"]):
        case "old":
            tail.clear()
        case "cut":
            del tail[start:]
        case "zeros":
            tail[start:] = bytes(len(tail) - start)
        case "hole":
            tail[start:end] = bytes(end - start)
        case "noise":
            tail[chance.randrange(len(tail))] ^= 0x10
    return now[:same] + tail


@attrs.frozen
class Watch:
    """What is seen below a folder."""

    folder: Path
    told: Callable[[], int]
    moments: list[Moment] = attrs.field(factory=list)
    calls: Counter[str] = attrs.field(factory=Counter)
    """How often each call came."""


class Disk:
    """Watches the calls that change files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[str], None] | None = None
        """Called with the name of each call that comes. It may raise `OSError` in place of it."""
        self._watch: Watch | None = None
        self._notes = True
        self._lock = threading.RLock()  # files are synced in several threads
        self._uses = Counter[int]()
        self._synced: dict[Identity, bytes] = {}
        self._content: dict[Identity, bytes] = {}
        self._written: dict[Identity, set[int]] = {}
        """The bytes of each file that were written since its last sync, also if that failed."""
        self._failed = set[Identity]()
        """Files of which a sync has failed."""
        self._durable: dict[str, dict[str, Identity | None]] = {}
        self._pwrite = os.pwrite
        for name in ("pwritev", "pwrite", "ftruncate", *_SYNCS, "mkdir", "rename", "unlink", "link"):
            monkeypatch.setattr(REAL.files, name, self._wrap(name, getattr(REAL.files, name)))

    @contextmanager
    def watch(self, folder: Path, told: Callable[[], int] = int, *, notes: bool = True) -> Iterator[Watch]:
        """Note the moments of what is done below a folder; all that is there before is synced.

        Args:
            folder: is there.
            told: returns how much has been answered by now.
            notes: False: only the last moment is noted.
        """
        self._written, self._failed, self._notes = {}, set(), notes
        self._watch, self._synced, self._content, self._durable = Watch(folder, told), {}, {}, {}
        folders, names = self._look(folder)
        self._synced = dict(self._content)
        for path in ("", *folders):
            self._sync_names(path, folders, names)
        try:
            yield self._watch
            self._notes = True
            self._note("the end")
        finally:
            self._watch = None

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                watch = self._watch
                if watch is None:
                    return real(*args, **keywords)
                watch.calls[name] += 1
                if self.before is not None:
                    try:
                        self.before(name)
                    except OSError:
                        if name in _SYNCS:
                            self._failed.add(self._identity(args[0]))
                            self._written.pop(self._identity(args[0]), None)
                        raise
                self._note(name)
                if name == "pwritev":
                    self._write_parts([bytes(view) for view in args[1]], args[0], args[2])
                elif name == "pwrite":
                    self._write_parts([bytes(args[1])], args[0], args[2])
                gone = self._forgotten(name, args)
                result = real(*args, **keywords)
                if name in ("pwritev", "pwrite"):
                    self._written.setdefault(self._identity(args[0]), set()).update(range(args[2], args[2] + result))
                if gone is not None:
                    self._uses[gone] += 1
                if name in _SYNCS:
                    self._sync(args[0], watch.folder)
                return result

        return call

    def _write_parts(self, parts: Sequence[bytes], descriptor: int, at: int) -> None:
        """Write some of it and then more, and note the moment behind each part; a single part is cut in the middle."""
        octets = b"".join(parts)
        ends = [*accumulate(len(part) for part in parts[:-1])] or [len(octets) // 2]
        for end in sorted({end for end in ends if 0 < end < len(octets)}):
            self._pwrite(descriptor, octets[:end], at)
            self._note(f"{end} of {len(octets)} bytes written")

    def _identity(self, descriptor: int) -> Identity:
        number = os.fstat(descriptor).st_ino
        return number, self._uses[number]

    @staticmethod
    def _forgotten(name: str, args: tuple[Any, ...]) -> int | None:
        """Return the inode that loses its last name by a call."""
        path = {"unlink": 0, "rename": 1}.get(name)
        if path is None or not os.path.exists(args[path]):
            return None
        state = os.stat(args[path])
        return state.st_ino if state.st_nlink == 1 else None

    def _sync(self, descriptor: int, folder: Path) -> None:
        state = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not os.path.isdir(path):
            identity = self._identity(descriptor)
            now, written = os.pread(descriptor, state.st_size, 0), self._written.pop(identity, set())
            self._content[identity] = now
            if identity in self._failed:
                known = self._synced.get(identity, b"")[: len(now)].ljust(len(now), b"\0")
                now = bytes(octet if at in written else known[at] for at, octet in enumerate(now))
            self._synced[identity] = now
        elif Path(path).is_relative_to(folder.resolve()):
            inside = str(Path(path).relative_to(folder.resolve()))
            self._sync_names("" if inside == "." else inside, *self._look(folder))

    def _sync_names(self, folder: str, folders: Sequence[str], names: Mapping[str, Identity]) -> None:
        here: dict[str, Identity | None] = {path: file for path, file in names.items() if _parent(path) == folder}
        here |= dict.fromkeys(path for path in folders if _parent(path) == folder)
        self._durable[folder] = {path.rpartition("/")[2]: file for path, file in here.items()}

    def _look(self, folder: Path) -> tuple[tuple[str, ...], dict[str, Identity]]:
        folders: list[str] = []
        names: dict[str, Identity] = {}
        for place, below, files in os.walk(folder):
            inside = os.path.relpath(place, folder)
            prefix = "" if inside == "." else f"{inside}/"
            folders += [prefix + name for name in below]
            for name in files:
                if name not in _IGNORED:
                    descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
                    state = os.fstat(descriptor)
                    names[prefix + name] = identity = state.st_ino, self._uses[state.st_ino]
                    self._content[identity] = os.pread(descriptor, state.st_size, 0)
                    os.close(descriptor)
        return tuple(sorted(folders)), names

    def _note(self, call: str) -> None:
        watch = self._watch
        assert watch is not None
        if not self._notes:
            return
        folders, names = self._look(watch.folder)
        durable = {folder: dict(here) for folder, here in self._durable.items()}
        found = Moment(call, watch.told(), folders, names, dict(self._content), dict(self._synced), durable)
        if not watch.moments or attrs.evolve(found, call=watch.moments[-1].call) != watch.moments[-1]:
            watch.moments.append(found)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
