"""The registry: how far each file has been shipped. It is kept on disk, so a shipper that was killed continues at the last ack.

A file is identified by its device, its inode and its time of birth, *and* by its content: a digest of its first bytes, and a digest of
the last bytes that were shipped.  The inode alone is not enough, because systems reuse inodes; the content alone is not enough, because
many logs begin with the same lines, and a job without time stamps writes the same log each night.  These rules are tried in order:

1. Same inode and birth, same content, and not shorter than it was: the same file, renamed or not.  Continue after the last acked byte.
2. Same inode, but another birth or other content, or shorter: it was truncated or replaced.  Begin at its start.  So does an open file
   whose time of change is new while its size is not: it was rewritten with the same text (`levada.actors.lumberjack.tail_file`).
3. Same path, same inode number and birth, other device: the system has renumbered its devices.  Continue.
4. Other inode, the same first `HEAD` bytes and the same last bytes, the path is the old path with a suffix behind ``.``, ``-`` or ``_``,
   *and the original was truncated or written over*: a copy made by rotation.  Continue after the last acked byte, of the least shipped
   if there are several such originals.  Each original has one copy.
5. Anything else is a new file, also if it has the path and the text of an older one.

So doubt ends in lines that come twice, never in lines that are left out.  A file with fewer than `HEAD` bytes is identified by all its
bytes, and by more as it grows.  Rule 4 does not apply to it, so a copy of a short file is shipped again.

The registry is one JSON file.  A new version is written beside the old one, synced, and renamed.  If the process dies between an ack and
the next write, lines are sent twice, but none is lost.  The file ends with a CRC-32 of everything before it; 0.1 (version 1) wrote none.
0.2 (version 2) did not note births, sizes, times of change, and the targets of links: they are not compared until they are known.

The file exists from the first start on.  If it disappears later, all files are read from their beginning, whatever `TailConfig.start`
says, and an error is logged.  Age is measured by the system's clock: if it jumps ahead, files that are missing at that moment are
forgotten early, and sent again if they come back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files
from levada.framework.platform import PLATFORM

from .folders import locked_folder

__all__ = ["HEAD", "TAIL", "FileEntry", "FileRegistry", "digest", "names_before_rotation", "open_registry"]

HEAD = 1024
"""Bytes at the beginning of a file that identify it."""
TAIL = 64
"""Bytes before the acked place that must be unchanged."""
FORGET = 7 * 86400.0
"""Seconds after which a file that is gone is forgotten."""

_COPIES = 8
"""Contents of one path that are gone and can still be recognised in a copy."""

_VERSION = 3
_CHECKSUM = b'"crc32"'

logger = logging.getLogger("levada.actors.lumberjack.tail")


def digest(data: bytes) -> str:
    """Return a digest of bytes of a file, for comparison."""
    return hashlib.sha256(data).hexdigest()[:32]


def names_before_rotation(path: str) -> list[str]:
    """List the paths that rotation may have copied to `path`: the path without a suffix after ``.``, ``-`` or ``_``.

    Example:
        >>> names_before_rotation("/var/app.log-2026.1")
        ['/var/app', '/var/app.log', '/var/app.log-2026']
    """
    first = path.rfind("/") + 1
    return [path[:at] for at in range(first + 1, len(path)) if path[at] in ".-_"]


@attrs.define(kw_only=True)
class FileEntry:
    """One file, and how far it was shipped."""

    path: str
    """Its last known path."""
    target: str = ""
    """The end of the symbolic links at `path`; empty if it is not a link."""
    device: int
    inode: int
    """0, with device 0: this content is gone, because the file was truncated or overwritten."""
    born: int = 0
    """Its time of birth in nanoseconds since 1970; 0: not known. Unlike an inode it is not used again."""
    size: int = 0
    """Bytes of the file when it was last looked at."""
    changed: int = 0
    """Its time of change then, in nanoseconds since 1970; 0: not known."""
    head_length: int = 0
    head_digest: str = ""
    """Digest of the first `head_length` bytes."""
    offset: int = 0
    """Bytes that the reader has acknowledged."""
    tail_length: int = 0
    tail_digest: str = ""
    """Digest of the `tail_length` bytes before `offset`."""
    seen: float = attrs.field(factory=lambda: PLATFORM.get().time())
    """The time at which the file was last found, in seconds since 1970."""

    def describes(self, files: Files, descriptor: int, size: int) -> bool:
        """Whether an open file of `size` bytes has the content that was shipped. Reads the file."""
        return (
            size >= max(self.offset, self.head_length, self.size)
            and (not self.head_length or digest(files.pread(descriptor, self.head_length, 0)) == self.head_digest)
            and (
                not self.tail_length
                or digest(files.pread(descriptor, self.tail_length, self.offset - self.tail_length)) == self.tail_digest
            )
        )

    @property
    def can_be_copied(self) -> bool:
        """Whether enough of the file is known and shipped to recognise a copy of it (rule 4)."""
        return self.offset > 0 and self.head_length == HEAD

    def note_head(self, head: bytes) -> None:
        """Identify the file by these first bytes from now on."""
        self.head_length, self.head_digest = len(head), digest(head)

    def move_to(self, offset: int, tail: bytes) -> None:
        """Record that all bytes before `offset` are acknowledged; `tail` are the last of them."""
        self.offset, self.tail_length, self.tail_digest = offset, len(tail), digest(tail)


_FIELDS = tuple(field.name for field in attrs.fields(FileEntry))
_values = attrgetter(*_FIELDS)

Snapshot = list[tuple[Any, ...]]
"""The entries as they were at one moment."""


class FileRegistry:
    """All entries, and the file that keeps them. Made by `open_registry`. Only `write` may run in another thread.

    Args:
        path: the JSON file; ``None``: nothing is kept on disk.
        entries: the entries in the file.
        is_new: whether there was no such file.
    """

    def __init__(self, path: Path | None, entries: Iterable[FileEntry] = (), *, is_new: bool = True) -> None:
        self._path = path
        self._files = PLATFORM.get().files
        self.entries: list[FileEntry] = list(entries)
        self._by_inode = {(entry.device, entry.inode): entry for entry in self.entries if entry.inode}
        self.is_new = is_new
        """Whether there was no registry before."""
        self.dirty = is_new
        """Whether the entries differ from the file."""

    def by_inode(self, device: int, inode: int) -> FileEntry | None:
        """Find the entry of an existing file."""
        return self._by_inode.get((device, inode))

    def add(self, entry: FileEntry) -> FileEntry:
        """Add an entry. An older entry with the same inode stays only to recognise copies, and not if its file was removed."""
        before = self.by_inode(entry.device, entry.inode)
        if before is not None:
            if before.born and entry.born and before.born != entry.born:
                self.remove(before)
            else:
                before.device = before.inode = 0
                gone = [each for each in self.entries if each.path == before.path and not each.inode]
                for each in gone[:-_COPIES]:
                    self.remove(each)
        self.entries.append(entry)
        self._by_inode[entry.device, entry.inode] = entry
        self.dirty = True
        return entry

    def remove(self, entry: FileEntry) -> None:
        """Remove an entry."""
        self.entries = [each for each in self.entries if each is not entry]
        if self.by_inode(entry.device, entry.inode) is entry:
            del self._by_inode[entry.device, entry.inode]
        self.dirty = True

    def by_path(self) -> dict[str, list[FileEntry]]:
        """Return the entries by path."""
        found: dict[str, list[FileEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.path, []).append(entry)
        return found

    def forget_old(self, now: float) -> None:
        """Drop the entries of files that were not seen for `FORGET` seconds."""
        kept = [entry for entry in self.entries if entry.seen > now - FORGET]
        if len(kept) < len(self.entries):
            self.dirty = True
            self.entries = kept
            self._by_inode = {(entry.device, entry.inode): entry for entry in kept if entry.inode}

    def snapshot(self) -> Snapshot | None:
        """Return the entries for `write`, or ``None`` if the file is up to date. Takes 10 ms for 10,000 files."""
        if not self.dirty:
            return None
        self.dirty = False
        return list(map(_values, self.entries))

    def write(self, snapshot: Snapshot) -> None:
        """Replace the file by a snapshot, which is on the disk when this returns. Blocks: run it in a thread.

        Raises:
            OSError: it cannot be written; the old file is unchanged.
        """
        if self._path is None:
            return
        # One entry at a time is encoded in C. Indented JSON of all entries took 220 ms for 10,000 files, and held the GIL.
        files = ",\n".join(json.dumps(dict(zip(_FIELDS, values, strict=True))) for values in snapshot)
        data = f'{{"version": {_VERSION}, "files": [\n{files}\n],\n'.encode("ascii")
        self._files.replace(self._path, b"%s%s: %d}\n" % (data, _CHECKSUM, zlib.crc32(data)))
        self._files.sync_folder(self._path.parent)


@contextmanager
def open_registry(folder: str | os.PathLike[str] | None) -> Iterator[FileRegistry]:
    """Read the registry in `folder`, which is created if needed, and lock it while the block lasts. Blocks.

    Args:
        folder: ``None``: a registry in memory only.

    Raises:
        ConfigurationError: the folder cannot be used, another shipper uses it, or its file is not a registry.
    """
    if folder is None:
        yield FileRegistry(None)
        return
    used = PLATFORM.get().files.exists(Path(folder, "lock"))
    with locked_folder(folder, "registry", "shipper") as place:
        yield _read(place / "registry.json", used=used)


def _read(path: Path, *, used: bool) -> FileRegistry:
    try:
        encoded = PLATFORM.get().files.read(path)
        data: Any = json.loads(encoded)
        if data["version"] not in (1, 2, _VERSION):
            raise ValueError(f"version {data['version']!r}, expected {_VERSION}")
        if data["version"] != 1 and data["crc32"] != zlib.crc32(encoded.rpartition(_CHECKSUM)[0]):
            raise ValueError("its checksum is wrong")
        return FileRegistry(path, [FileEntry(**entry) for entry in data["files"]], is_new=False)
    except FileNotFoundError:
        if used:
            logger.error(
                "%s is gone: all files are shipped from their beginning", path, extra={"event": "registry_gone"}
            )
        registry = FileRegistry(path, is_new=not used)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{path} is not a registry of files ({error}); move it away to ship everything again"
        ) from error
    try:
        registry.write([])
    except OSError as error:
        raise ConfigurationError(f"cannot keep a registry in {path.parent}: {error.strerror or error}") from error
    return registry
