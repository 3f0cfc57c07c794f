"""A spool on disk between those who send and the writer: what is in it survives the process and the reader's absence.

Events are appended to segment files, in the form in which they go on the wire; an actor reads them back in order, has them sent, and
notes the place up to which all is acked.  Segments before that place are removed.

::

    folder/00000001.spool      a line that says what it is, then records: length (u32), CRC-32 (u32), octets
    folder/acked               "<segment> <offset>", replaced as a whole
    folder/lock                held while a process uses the folder

* `Intake.deliver` returns when the events are on the disk, `Intake.put` earlier: its events are written and synced within `SpoolConfig.sync`
  seconds, many at a time, since one sync costs as much as a thousand events.
* A process that is killed between an ack of the reader and the note of it sends those events again.  A record that was not written to
  its end when the process died is cut off at the next start: nobody was told that it was safe.
* The size is bounded; at the bound senders wait, or their events are dropped and counted (`WriterConfig.drop`).
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import trio
from attrs import validators as v

from levada.framework import Actor, Reason
from levada.framework.errors import ConfigurationError
from levada.transports.lumberjack import WriterConfig
from levada.transports.private_files import private

from .folder_lock import locked_folder
from .writer_queue import Hub, Ticket

__all__ = ["DiskSpool", "Place", "Segments", "SpoolConfig", "SpoolPump", "check_spool", "open_segments"]

logger = logging.getLogger("levada.actors.lumberjack.spool")

Place = tuple[int, int]
"""Number of a segment, and octets of it."""

_MAGIC = b"levada lumberjack spool 1 "  # then J or D, the kind of its events
_HEAD = len(_MAGIC) + 2
_RECORD = struct.Struct(">II")
_READ = 1 << 20  # octets read at a time
_RETRY = 1.0  # seconds until a disk that is full is tried again


@attrs.frozen(kw_only=True)
class SpoolConfig:
    """Where and how events are kept on disk. Immutable; derive with `attrs.evolve`."""

    folder: str | os.PathLike[str]
    """Made if need be; for one writer at a time."""
    max_octets: int = attrs.field(default=1 << 30, validator=[v.instance_of(int), v.ge(1)])
    """Octets of events that are not acked; once it is reached senders wait, or new events are dropped, see `WriterConfig.drop`."""
    segment: int = attrs.field(default=16 << 20, validator=[v.instance_of(int), v.ge(1)])
    """Octets after which a new file is begun; space is given back file by file."""
    sync: float = attrs.field(default=0.05, validator=[v.instance_of((int, float)), v.ge(0)])
    """Seconds that events wait for others before all are written and synced."""


class Segments:
    """The files of a spool. Blocks; one thread at a time.

    Args:
        config: where, and how large.
        kind: ``b"J"`` or ``b"D"``, what the events are.

    Raises:
        ConfigurationError: the folder holds events of the other kind, or something that is no spool.
        OSError: it cannot be used.
    """

    def __init__(self, config: SpoolConfig, kind: bytes) -> None:
        self._config = config
        self._folder = Path(config.folder)
        self._magic = _MAGIC + kind + b"\n"
        self.damaged = 0
        """Octets that were no whole record."""
        files = [path for path in self._folder.glob("*.spool") if path.stem.isdecimal()]
        self._sizes = {int(path.stem): self._check(path) for path in sorted(files)}
        self.acked = self._read_acked()
        """Everything before this place is acked."""
        self._last = max([*self._sizes, self.acked[0]])
        self._file = self._open(self._last)
        # Files may have been taken away or cut off; a place behind the end would hide what is appended up to there.
        self.acked = self._read_at = min(self.acked, self.end)
        self.octets = 0
        """Octets on the disk that are not acked; a number and no property, since each event sent looks at it."""
        self._count()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.spool"

    def _check(self, path: Path) -> int:
        with path.open("rb") as file:
            magic = file.read(_HEAD)
        if magic[: len(_MAGIC)] == _MAGIC[: len(magic)] and magic != self._magic and len(magic) == _HEAD:
            raise ConfigurationError(f"{path} holds events for the other version of Lumberjack: send those first")
        if not self._magic.startswith(magic):
            raise ConfigurationError(f"{path} is no spool")
        return path.stat().st_size

    def _read_acked(self) -> Place:
        first = (min(self._sizes, default=1), _HEAD)
        path = self._folder / "acked"
        try:
            number, offset = map(int, path.read_text().split())
        except FileNotFoundError:
            return first
        except ValueError as error:
            raise ConfigurationError(f"{path} does not hold a place in a spool") from error
        return max(first, (number, offset))

    def _open(self, number: int) -> BinaryIO:
        """Open the last segment, cut what is no whole record off its end, and make it if there is none."""
        path = self._path(number)
        good = _HEAD
        if path.exists():
            good = max([_HEAD, *(end for _, end in _records(path.read_bytes(), _HEAD))])
        # Only for this user: what is in a log is nobody else's business.
        path.touch(mode=0o600)
        file = path.open("r+b", buffering=0)
        try:
            size = path.stat().st_size
            if size < _HEAD:
                file.truncate(0)
                file.write(self._magic)
            elif size > good:
                logger.warning("%s: the last %d octets are no whole record", path, size - good)
                self.damaged += size - good
                file.truncate(good)
            file.seek(good)
            os.fsync(file.fileno())
            _sync_folder(self._folder)
        except BaseException:
            file.close()
            raise
        self._sizes[number] = good
        return file

    def close(self) -> None:
        """Let go of the files."""
        self._file.close()

    @property
    def end(self) -> Place:
        """The place behind everything that is on the disk."""
        return self._last, self._sizes[self._last]

    def _count(self) -> None:
        number, offset = self.acked
        self.octets = sum(size for at, size in self._sizes.items() if at >= number) - offset

    def append(self, bodies: list[bytes]) -> None:
        """Write events; they are on the disk when this returns.

        Raises:
            OSError: none of them is.
        """
        data = b"".join(part for body in bodies for part in (_RECORD.pack(len(body), zlib.crc32(body)), body))
        at = self._sizes[self._last]
        if at > _HEAD and at + len(data) > self._config.segment:
            file = self._open(self._last + 1)
            self._file.close()
            self._file = file
            self._last += 1
            at = _HEAD
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(at)
            self._file.seek(at)
            raise
        self._sizes[self._last] = at + len(data)
        self._count()

    def read(self) -> tuple[list[bytes], Place]:
        """Read the next events; return them, and the place behind them. No events: there are none yet."""
        number, offset = self._read_at
        while True:
            size = self._sizes.get(number, _HEAD)
            if offset < size:
                with self._path(number).open("rb") as file:
                    file.seek(offset)
                    data = file.read(min(size - offset, _READ))
                    wanted = _RECORD.size + (_RECORD.unpack_from(data)[0] if len(data) >= _RECORD.size else 0)
                    if len(data) < wanted <= size - offset:
                        data += file.read(wanted - len(data))
                records = list(_records(data, 0))
                if records:
                    self._read_at = (number, offset + records[-1][1])
                    return [body for body, _ in records], self._read_at
                logger.error("%s: %d octets from %d on are damaged", self._path(number), size - offset, offset)
                self.damaged += size - offset
            if number >= self._last:
                self._read_at = (number, max(offset, size))
                return [], self._read_at
            number, offset = number + 1, _HEAD

    def note_acked(self, place: Place) -> None:
        """Note that everything before `place` is acked, and remove the segments before it."""
        beside = self._folder / "acked.new"
        with open(beside, "w", opener=private) as file:
            file.write(f"{place[0]} {place[1]}")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._folder / "acked")
        self.acked = place
        for number in [number for number in self._sizes if number < place[0]]:
            self._path(number).unlink(missing_ok=True)
            del self._sizes[number]
        self._count()


def _records(data: bytes, at: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole records from `at` on, each with the place behind it, up to the first that is not whole."""
    while at + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + length]
        at += length
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        yield body, at


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DiskSpool:
    """Takes events for the disk; an `Intake` of a writer. Worked by a `SpoolPump`.

    Args:
        segments: the files.
        config: bounds.
        hub: where the events go from the disk.
    """

    def __init__(self, segments: Segments, config: SpoolConfig, hub: Hub) -> None:
        self.segments = segments
        self.config = config
        self.hub = hub
        self.pending: list[bytes] = []
        self.pending_octets = 0
        """Of events that are not on the disk yet."""
        self.taken = self.written = 0
        """Events taken, and those of them that are on the disk."""
        self.work = trio.Event()
        """Set when something is pending."""
        self.changed = trio.Event()
        """Set, and replaced, when something was written or acked."""

    @property
    def full(self) -> bool:
        """Whether senders have to wait: for acks, or for a disk that is slower than they are."""
        waiting = self.pending_octets
        return waiting > self.config.segment or self.segments.octets + waiting >= self.config.max_octets

    async def put(self, bodies: list[bytes]) -> None:
        """See `Intake.put`."""
        while self.full:
            await self.changed.wait()
        self._add(bodies)

    def _add(self, bodies: list[bytes]) -> None:
        self.pending += bodies
        self.taken += len(bodies)
        self.pending_octets += sum(map(len, bodies)) + _RECORD.size * len(bodies)
        self.work.set()

    def put_nowait(self, body: bytes) -> None:
        """See `Intake.put_nowait`."""
        if not self.full:
            self._add([body])
        elif self.hub.config.drop is None:
            raise trio.WouldBlock
        else:
            self.hub.queue.dropped += 1

    async def deliver(self, bodies: list[bytes]) -> None:
        """See `Intake.deliver`: safe is what is on the disk."""
        if bodies:
            await self.put(bodies)
            await self._all_written()

    async def _all_written(self) -> None:
        """Wait until what was taken so far is on the disk."""
        taken = self.taken
        while self.written < taken:
            await self.changed.wait()

    async def flush(self) -> None:
        """See `Intake.flush`: waits for acks, not only for the disk."""
        await self._all_written()
        end = self.segments.end
        with self.hub.flushing():
            while self.segments.acked < end:
                await self.changed.wait()
        await trio.lowlevel.checkpoint()

    def has_changed(self) -> None:
        """Wake whoever waits for room, for events to read, or for acks."""
        told, self.changed = self.changed, trio.Event()
        told.set()


class SpoolPump(Actor[Any]):
    """Writes what is pending to the disk, reads it back, has it sent, and notes what is acked."""

    spool: DiskSpool

    def started(self) -> None:
        """Begin all four."""
        self.under_way: deque[tuple[Place, Ticket]] = deque()
        self.more = trio.Event()
        self.lock = trio.Lock()
        self.writing = trio.Lock()
        for task in (self.write, self.send, self.note):
            self.start_soon(task)

    async def stopping(self, reason: Reason) -> None:
        """Write what is pending, whatever became of the rest."""
        await self.write_pending()

    async def write(self) -> None:
        """Write what is pending whenever something is."""
        spool = self.spool
        while True:
            await spool.work.wait()
            await trio.sleep(spool.config.sync)
            await self.write_pending()

    async def write_pending(self) -> None:
        """Write what is pending now."""
        spool = self.spool
        async with self.writing:
            if not spool.pending:
                return
            bodies, octets = spool.pending[:], spool.pending_octets
            spool.work = trio.Event()
            await self.insist(spool.segments.append, bodies)
            del spool.pending[: len(bodies)]
            spool.pending_octets -= octets
            spool.written += len(bodies)
            if spool.pending:
                spool.work.set()
            spool.has_changed()

    async def send(self) -> None:
        """Read events back and put them into the writer's queue, which makes this wait when it is full."""
        spool = self.spool
        while True:
            bodies, place = await self.insist(spool.segments.read)
            if not bodies:
                changed = spool.changed
                if spool.segments.end == place:
                    await changed.wait()
                continue
            self.under_way.append((place, await spool.hub.hand_in(bodies)))
            self.more.set()

    async def note(self) -> None:
        """Note acks, in order."""
        while True:
            await self.more.wait()
            self.more = trio.Event()
            while self.under_way:
                place, ticket = self.under_way[0]
                await self.spool.hub.wait_for(ticket)
                self.under_way.popleft()
                while self.under_way and not self.under_way[0][1].left and len(self.under_way) > 1:
                    place = self.under_way.popleft()[0]
                await self.insist(self.spool.segments.note_acked, place)
                self.spool.has_changed()

    async def insist(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call in a thread, again and again while the disk refuses."""
        while True:
            try:
                async with self.lock:
                    return await trio.to_thread.run_sync(function, *arguments)
            except OSError as error:
                logger.error("the spool cannot be used: %s", error, extra={"event": "spool_error"})
                await trio.sleep(_RETRY)


def check_spool(config: WriterConfig, spool: SpoolConfig | None) -> None:
    """Refuse settings that do not go together.

    Raises:
        ConfigurationError: the oldest events cannot be dropped out of the middle of a file.
    """
    if spool is not None and config.drop == "oldest":
        raise ConfigurationError("a spool on disk cannot drop its oldest events: drop='newest', or None to wait")


@contextmanager
def open_segments(config: SpoolConfig, kind: bytes) -> Iterator[Segments]:
    """Open the folder of a spool, and keep other processes off it while the block lasts. Blocks.

    Raises:
        ConfigurationError: it cannot be used, another writer uses it, or it holds something else.
    """
    with locked_folder(config.folder, "spool", "writer"):
        try:
            segments = Segments(config, kind)
        except OSError as error:
            raise ConfigurationError(f"cannot keep a spool in {config.folder}: {error.strerror or error}") from error
        try:
            yield segments
        finally:
            segments.close()
