"""Find the entry of the registry that a file continues, by the rules of `levada.actors.lumberjack.tail_registry`. Blocks.

A copy is only known as one when its original is truncated, and rotation makes the copy first.  So a file that looks like a copy in the
making waits: for its end while it grows, and then for the truncation until the next look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from levada.actors.descriptors import NO_ROOM

from .tail_delivery import Key
from .tail_file import FoundFile, OpenFile
from .tail_registry import FileEntry, digest

__all__ = ["identify"]


def identify(
    file: FoundFile,
    own: FileEntry | None,
    same_path: Iterable[FileEntry],
    originals: Iterable[FileEntry],
    here: Mapping[Key, FoundFile],
    *,
    waits: bool,
) -> tuple[OpenFile, FileEntry | None] | None:
    """Open a file and find the entry that it continues.

    Args:
        file: the file to open.
        own: the entry of its inode.
        same_path: the entries with its path.
        originals: entries of files of which it may be a copy.
        here: the files that were found.
        waits: whether a copy in the making waits.

    Returns:
        File and entry; no entry for a new file; ``None`` for a copy in the making that waits.

    Raises:
        OSError: the file cannot be opened or read.
    """
    opened = OpenFile(file.path)
    try:
        if own is not None and opened.is_born_as(own) and opened.is_described_by(own):
            return opened, own
        for entry in same_path:
            renumbered = entry.inode == opened.inode and entry.born == opened.born != 0
            if renumbered and opened.is_described_by(entry):
                return opened, entry
        others = [entry for entry in originals if entry is not own]
        gone = [entry for entry in others if opened.is_described_by(entry) and _is_gone(entry, here)]
        if waits and any(_is_begun(opened, entry) for entry in others if entry not in gone):
            opened.close()
            return None
    except BaseException:
        opened.close()
        raise
    # If the same text was there several times, this may be the copy of any of them.
    original = min(gone, key=lambda entry: entry.offset, default=None)
    return opened, original if original is not None and original.can_be_copied else None


def _is_begun(copy: OpenFile, entry: FileEntry) -> bool:
    """Whether a file may become a copy of that of `entry`: it is as long, or may still grow."""
    if not entry.can_be_copied or digest(copy.head()) != entry.head_digest:
        return False
    return copy.size < max(entry.offset, entry.size) or copy.is_described_by(entry)


def _is_gone(entry: FileEntry, here: Mapping[Key, FoundFile]) -> bool:
    """Whether the file of an entry was truncated or written over. A file that is not found may have another name."""
    if not entry.inode:
        return True
    file = here.get((entry.device, entry.inode))
    if file is None:
        return False
    try:
        opened = OpenFile(file.path)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return False
    try:
        same = (opened.device, opened.inode) == (entry.device, entry.inode) and opened.is_born_as(entry)
        return same and not opened.is_described_by(entry)
    finally:
        opened.close()
