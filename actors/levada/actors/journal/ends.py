"""The record of ends, a small file beside the segments: how far each partition reaches, and how many commits the ledger has had.

A segment or a ledger that lost its end still looks whole. This file says where the end was. It is written after each group commit, and synced if
the last sync is `SYNC_EVERY` seconds ago. A killed process leaves it exact; a power failure may leave it behind by that time and one group
commit. It is never ahead of the disk.

On the disk
    Two copies at bytes 0 and `_copy_size`. Writes go to the copy that was not synced last, so a power failure leaves the other one whole.
    Numbers are little-endian.

    copy: ``levadaE1``, version (4), partitions (4), journal id (16), number of this copy (8), commits of the ledger (8), for each partition its
    first and its end offset (8 each), crc32 of all of it (4). If the journal was closed in order, ``shut`` and the crc32 again (4) follow. Without
    this, a sync may have failed, so the next opening trusts neither the pages nor the names that the system has in memory.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import attrs

from levada.framework.files import Files
from levada.framework.platform import Platform

from .blocks import Uncertain, write_all
from .errors import JournalDamaged, JournalError

__all__ = ["SYNC_EVERY", "Ends", "PromisedEnds"]

logger = logging.getLogger("levada.actors.journal")

SYNC_EVERY = 0.2
"""Seconds between syncs. One sync for each group commit would cost 0.3 ms, nearly as much as the group's own."""

_MAGIC = b"levadaE1"
_VERSION = 1
_HEAD = struct.Struct("<8sII16sQQ")
_PARTITION = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
_SHUT = b"shut"


@attrs.frozen
class PromisedEnds:
    """The rows and commits that must be there."""

    journal: bytes
    """Sixteen bytes, as `Ledger.journal`."""
    first: Sequence[int]
    """For each partition, the offset of the oldest row."""
    end: Sequence[int]
    """For each partition, the offset behind the newest row that was synced."""
    commits: int
    """Commits of the ledger."""
    closed: bool = False
    """Whether the journal was closed in order after this, so what is promised is on the disk, and no more than that is there."""


class Ends:
    """The record of ends, open for writing. Made by `Ends.create`; methods belong to one thread at a time."""

    def __init__(self, platform: Platform, path: Path, descriptor: int, promise: PromisedEnds) -> None:
        self._files = platform.files
        self._monotonic = platform.monotonic
        self._path = path
        self._descriptor = descriptor
        # The copy is changed in place, in 1 µs with 64 partitions; making it anew for each group commit takes 17 µs.
        self._copy = bytearray(_pack(promise, 2))
        self._journal = promise.journal
        self._partitions = len(promise.end)
        self._size = _copy_size(self._partitions)
        self._number = 2
        self._place = 0
        self._synced_at = self._monotonic()
        self.pending = False
        """Whether something was written and not synced."""

    @classmethod
    def read(cls, files: Files, path: Path) -> PromisedEnds:
        """Read the promise.

        Raises:
            JournalDamaged: the file is gone, or no copy is whole.
            JournalError: written by a later version of this format.
        """
        data = files.read(path) if files.exists(path) else b""
        copies = data[: len(data) // 2], data[len(data) // 2 :]
        found = [each for copy in copies if (each := _parse(copy)) is not None]
        if not found:
            versions = [_HEAD.unpack_from(copy)[1] for copy in copies if len(copy) >= _HEAD.size and copy[:8] == _MAGIC]
            if versions and min(versions) > _VERSION:
                raise JournalError(
                    f"format version {versions[0]}, this program reads {_VERSION}: use the levada that wrote it or a later one",
                    path=str(path),
                )
            raise JournalDamaged(
                f"the record of how far the partitions reach is {'damaged' if data else 'gone'}: restore it",
                path=str(path),
            )
        if len(found) == 1:
            logger.warning(
                "%s: one of two copies is not whole, the other one is used", path, extra={"event": "ends_copy"}
            )
        return max(found, key=lambda each: each[0])[1]

    @classmethod
    def create(cls, platform: Platform, path: Path, promise: PromisedEnds) -> Ends:
        """Replace the file; the new one is on the disk when this returns."""
        files, size = platform.files, _copy_size(len(promise.end))
        beside = path.with_name(path.name + ".new")
        descriptor = files.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(files, descriptor, [_pack(promise, number).ljust(size, b"\0") for number in (1, 2)], 0)
            files.fsync(descriptor)
            files.rename(beside, path)
            files.sync_folder(path.parent)
        except BaseException:
            files.close(descriptor)
            raise
        return cls(platform, path, descriptor, promise)

    def set(self, partition: int, first: int, end: int) -> None:
        """Make the next `write` say how far this partition reaches."""
        _PARTITION.pack_into(self._copy, _HEAD.size + partition * _PARTITION.size, first, end)

    def write(self, commits: int, *, shut: bool = False) -> None:
        """Write the new promise, and sync it if the last sync is long enough ago; `Uncertain` if the disk refuses.

        Args:
            commits: of the ledger.
            shut: it says that the journal was closed in order, and is synced at once.
        """
        self._number += 1
        data = memoryview(self._copy)
        _HEAD.pack_into(data, 0, _MAGIC, _VERSION, self._partitions, self._journal, self._number, commits)
        _CRC.pack_into(data, len(data) - _CRC.size, zlib.crc32(data[: -_CRC.size]))
        if shut:
            data = memoryview(bytes(data) + _SHUT + data[-_CRC.size :])
        self.pending = True
        at = self._place * self._size
        try:
            written = self._files.pwrite(self._descriptor, data, at)
            if written < len(data):
                write_all(self._files, self._descriptor, [data[written:]], at + written)
        except OSError as error:
            raise Uncertain.of(error) from error
        if shut or self._monotonic() - self._synced_at >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Sync what was written, if there is something; `Uncertain` if the disk refuses.

        The next write goes to the other copy, so one that is whole and synced always stays.
        """
        if not self.pending:
            return
        try:
            self._files.fdatasync(self._descriptor)
        except OSError as error:
            raise Uncertain.of(error) from error
        self._place = 1 - self._place
        self.pending = False
        self._synced_at = self._monotonic()

    def finish(self, commits: int) -> None:
        """Write the promise into both copies, so that either may be lost, and that the journal was closed in order."""
        try:
            for _ in range(2):
                self.write(commits, shut=True)
        except OSError as error:
            logger.warning("%s: it is left as it was: %s", self._path, error, extra={"event": "ends_unwritable"})

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)


def _copy_size(partitions: int) -> int:
    """Bytes of one copy: whole pages, so that one write of the disk never touches both."""
    return -(-(_HEAD.size + partitions * _PARTITION.size + 2 * _CRC.size + len(_SHUT)) // 4096) * 4096


def _pack(promise: PromisedEnds, number: int) -> bytes:
    data = _HEAD.pack(_MAGIC, _VERSION, len(promise.end), promise.journal, number, promise.commits)
    data += b"".join(_PARTITION.pack(*each) for each in zip(promise.first, promise.end, strict=True))
    return data + _CRC.pack(zlib.crc32(data))


def _parse(data: bytes) -> tuple[int, PromisedEnds] | None:
    """Read the number of a copy and its promise; None if the copy is not whole, or of another version."""
    if len(data) < _HEAD.size:
        return None
    magic, version, partitions, journal, number, commits = _HEAD.unpack_from(data)
    size = _HEAD.size + partitions * _PARTITION.size
    crc, behind = data[size : size + _CRC.size], size + _CRC.size
    if (magic, version) != (_MAGIC, _VERSION) or _CRC.pack(zlib.crc32(data[:size])) != crc:
        return None
    closed = data[behind : behind + len(_SHUT) + _CRC.size] == _SHUT + crc
    offsets = list(_PARTITION.iter_unpack(data[_HEAD.size : size]))
    return number, PromisedEnds(journal, [first for first, _ in offsets], [end for _, end in offsets], commits, closed)
