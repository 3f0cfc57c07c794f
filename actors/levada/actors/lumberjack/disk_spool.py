"""A spool on disk between senders and the writer. Its events survive the end of the process and the absence of the reader.

Events are appended to segment files in their wire format.  An actor reads them back in order, sends them, and notes the place up to which
all are acked.  Segments before that place are removed.

::

    folder/00000001.spool      a line with its format, the size of the segment before (u64), CRC-32 of both (u32),
                               then records: length (u32), CRC-32 (u32), bytes
    folder/acked               "v2", the end of the acked events, the end of the safe events (segment and offset each), and the
                               CRC-32 of these; replaced as a whole
    folder/lock                held while a process uses the folder

* `Intake.deliver` returns when the events are on the disk, `Intake.put` earlier: its events are written and synced within `SpoolConfig.sync`
  seconds, many at a time, since one sync costs as much as a thousand events.
* A process that is killed between an ack and the note of it sends those events again.  A record that was incomplete when the process died
  is cut off at the next start, because no sender was told that it is safe.
* Lost or damaged events that were safe are logged as errors, with the file and the bytes.  The others are sent.
* Segments of 0.1 do not have the size of the segment before, and its ``acked`` has neither ends nor a checksum.  They are read, and never
  continued.
* The size is bounded.  At the bound senders wait, or their events are dropped and counted (`WriterConfig.drop`).
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import validators as v

from levada.framework import Actor, Reason
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.transports.lumberjack import WriterConfig

from .folders import locked_folder
from .writer_queue import Hub, QueuedEvents

__all__ = ["DiskSpool", "Place", "Segments", "SpoolConfig", "SpoolPump", "check_spool", "open_segments"]

logger = logging.getLogger("levada.actors.lumberjack.spool")

Place = tuple[int, int]
"""Number of a segment, and offset in it."""

_MAGIC = b"levada lumberjack spool %d %s\n"  # version; J or D, the kind of its events
_HEAD_1 = len(_MAGIC % (1, b"J"))
_BEFORE = struct.Struct(">QI")
_HEAD = _HEAD_1 + _BEFORE.size
_RECORD = struct.Struct(">II")
_READ = 1 << 20  # bytes read at a time
_RETRY = 1.0  # seconds until a disk that is full is tried again


@attrs.frozen(kw_only=True)
class SpoolConfig:
    """Where and how events are kept on disk. Immutable; derive with `attrs.evolve`."""

    folder: str | os.PathLike[str]
    """The folder, which is created if needed. One writer at a time can use it."""
    max_bytes: int = attrs.field(default=1 << 30, validator=[v.instance_of(int), v.ge(1)])
    """Bytes of unacked events. At this limit senders wait, or new events are dropped: see `WriterConfig.drop`."""
    segment: int = attrs.field(default=16 << 20, validator=[v.instance_of(int), v.ge(1)])
    """Bytes after which a new segment file is begun. A file is removed when all its events are acked."""
    sync: float = attrs.field(default=0.05, validator=[v.instance_of((int, float)), v.ge(0)])
    """Seconds that events wait for others, so that one sync serves all."""


@attrs.define
class _Segment:
    """The layout of one file."""

    head: int
    """Offset of the first record."""
    size: int
    before: int
    """Size of the segment before; 0 if it is not known, or there was none."""


_NONE = _Segment(0, 0, 0)  # stands for a file that does not exist


class Segments:
    """The files of a spool. All methods block; one thread at a time may use it.

    Args:
        config: the folder, and its limits.
        kind: the frame type of the events, ``b"J"`` or ``b"D"``.

    Raises:
        ConfigurationError: the folder holds events of the other kind, or a file that is not a spool.
        OSError: a file cannot be read or written.
    """

    def __init__(self, config: SpoolConfig, kind: bytes) -> None:
        self._files = PLATFORM.get().files
        self._config = config
        self._folder = Path(config.folder)
        self._kind = kind
        numbers = [int(path.stem) for path in self._files.glob(self._folder, "*.spool") if path.stem.isdecimal()]
        self._segments = {number: self._look_at(number) for number in sorted(numbers)}
        self.acked, end = self._read_acked()
        """Everything before this place is acked."""
        last = max([1, *self._segments, end[0]])
        if last in self._segments:
            self._cut_torn_end(last, end[1] if end[0] == last else 0)
        self._compare(end)
        # The last file may be damaged, or be from 0.1, so it is only reused if it never held an event.
        segment = self._segments.get(last, _NONE)
        self._last = last if segment.size <= segment.head and self.acked <= (last, _HEAD) else last + 1
        self._file = self._begin(self._last)
        if self.acked[1] > self._segments.get(self.acked[0], _NONE).size:
            self.acked = (min(number for number in self._segments if number > self.acked[0]), 0)
        self.acked = self._read_at = max(self.acked, (self.acked[0], self._segments[self.acked[0]].head))
        self.unacked_bytes = 0
        """Bytes on the disk that are not acked; an attribute and not a property, because each send reads it."""
        self._count()
        try:
            self._note(self.acked, self.end)
        except BaseException:
            self.close()
            raise

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.spool"

    def _oldest(self) -> Place:
        number = min(self._segments, default=1)
        return number, self._segments[number].head if self._segments else _HEAD

    def _look_at(self, number: int) -> _Segment:
        path = self._path(number)
        with self._files.opened(path) as descriptor:
            data = self._files.pread(descriptor, _HEAD, 0)
            size = self._files.fstat(descriptor).st_size
        magic, first, second = data[:_HEAD_1], _MAGIC % (1, self._kind), _MAGIC % (2, self._kind)
        if magic == first:
            return _Segment(_HEAD_1, size, 0)
        if len(data) < _HEAD and (first.startswith(magic) or second.startswith(magic)):
            return _Segment(size, size, 0)
        if magic == second and len(data) == _HEAD:
            before, checksum = _BEFORE.unpack_from(data, _HEAD_1)
            if checksum == zlib.crc32(data[:-4]):
                return _Segment(_HEAD, size, before)
        if magic in [_MAGIC % (version, kind) for version in (1, 2) for kind in (b"J", b"D") if kind != self._kind]:
            raise ConfigurationError(f"{path} holds events for the other version of Lumberjack: send those first")
        raise ConfigurationError(
            f"{path} is not a spool of this version, or its beginning is damaged; move it away to continue without its events"
        )

    def _read_acked(self) -> tuple[Place, Place]:
        """Read the end of the acked events and the end of the safe events. The second is (0, 0) if it is not known."""
        path = self._folder / "acked"
        data = self._files.read(path) if self._files.exists(path) else b""
        words = data.split()
        try:
            if words[:1] == [b"v2"]:
                number, offset, end, end_offset, checksum = map(int, words[1:])
                if checksum == zlib.crc32(data.rpartition(b" ")[0]):
                    return (number, offset), (end, end_offset)
            elif words:
                number, offset = map(int, words)
                if number in self._segments and offset <= self._segments[number].size:
                    return (number, offset), (0, 0)
        except ValueError:
            pass
        # 0.1 wrote the file with the first ack, so its spools may have none.
        if data or any(segment.size > segment.head == _HEAD for segment in self._segments.values()):
            text = "%s is %s: all remaining events are sent again, and it is not known whether there were more"
            _log_loss(text, path, "damaged" if data else "gone")
        return self._oldest(), (0, 0)

    def _cut_torn_end(self, number: int, promised: int) -> None:
        """Cut an incomplete record off the end. A record before `promised`, which was safe, stays: reading finds the damage and skips it."""
        path, segment = self._path(number), self._segments[number]
        data = self._files.read(path)
        good = at = segment.head
        while at < len(data):
            good = max([good, *(end for _, end in _records(data, at))])
            at = max(at, good)
            at += _damaged(data, at)
        if promised <= good < len(data):
            logger.warning("%s: the last %d bytes are not a whole record and are cut off", path, len(data) - good)
            with self._files.opened(path, os.O_WRONLY) as descriptor:
                self._files.ftruncate(descriptor, good)
            segment.size = good

    def _compare(self, end: Place) -> None:
        """Log the files that are missing or too short."""
        number, offset = self.acked
        sizes: dict[int, int] = {}
        for at, size in [self.acked, end, *((at - 1, segment.before) for at, segment in self._segments.items())]:
            sizes[at] = max(size, sizes.get(at, 0))
        numbers = sorted(at for at in {*sizes, *self._segments} if at >= number)
        for at, behind in pairwise(numbers):
            if behind > at + 1:
                text = "the files between %s and %s are gone, and the events in them"
                _log_loss(text, self._path(at), self._path(behind))
        for at in numbers:
            there = max(self._segments.get(at, _NONE).size, offset if at == number else _HEAD)
            if there < sizes.get(at, 0):
                text = "%s: %d bytes from %d on are gone, and the events in them"
                _log_loss(text, self._path(at), sizes[at] - there, there)

    def _begin(self, number: int) -> int:
        """Create a segment, or replace an empty one; return its descriptor."""
        before = self._segments.get(number - 1, _NONE).size
        data = _MAGIC % (2, self._kind) + before.to_bytes(8, "big")
        # Readable only for this user, because a log may hold secrets.
        files, flags = self._files, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = files.open(self._path(number), flags, 0o600)
        try:
            files.write_all(file, data + zlib.crc32(data).to_bytes(4, "big"))
            files.fsync(file)
            files.sync_folder(self._folder)
        except BaseException:
            files.close(file)
            raise
        self._segments[number] = _Segment(_HEAD, _HEAD, before)
        return file

    def _note(self, acked: Place, end: Place) -> None:
        """Write the ends of the acked and of the safe events to the disk."""
        text = b"v2 %d %d %d %d" % (*acked, *end)
        self._files.replace(self._folder / "acked", b"%s %d\n" % (text, zlib.crc32(text)))

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._file)

    @property
    def end(self) -> Place:
        """The place behind all events on the disk."""
        return self._last, self._segments[self._last].size

    def _count(self) -> None:
        number, offset = self.acked
        self.unacked_bytes = sum(each.size for at, each in self._segments.items() if at >= number) - offset

    def append(self, bodies: list[bytes]) -> None:
        """Write events. They are on the disk when this returns.

        Raises:
            OSError: none of them is on the disk.
        """
        data = b"".join(part for body in bodies for part in (_RECORD.pack(len(body), zlib.crc32(body)), body))
        files, at = self._files, self._segments[self._last].size
        if at > _HEAD and at + len(data) > self._config.segment:
            before, self._file = self._file, self._begin(self._last + 1)
            self._last += 1
            at = _HEAD
            files.close(before)
        try:
            files.write_all(self._file, data, at)
            files.fsync(self._file)
            path = self._path(self._last)
            if not os.path.samestat(files.stat(path), files.fstat(self._file)):
                raise FileNotFoundError(errno.ENOENT, "it was replaced while in use", str(path))
            self._note(self.acked, (self._last, at + len(data)))
        except OSError:
            files.ftruncate(self._file, at)
            raise
        self._segments[self._last].size = at + len(data)
        self._count()

    def read(self) -> tuple[list[bytes], Place]:
        """Read the next events; return them and the place behind them. An empty list means that there are none now.

        Damage is logged, and skipped up to the next intact record.
        """
        while True:
            number, offset = self._read_at
            size = self._segments.get(number, _NONE).size
            if offset < size:
                with self._files.opened(self._path(number)) as file:
                    data = self._files.pread(file, min(size - offset, _READ), offset)
                    wanted = _RECORD.size + (_RECORD.unpack_from(data)[0] if len(data) >= _RECORD.size else 0)
                    if len(data) < wanted <= size - offset:
                        data += self._files.pread(file, wanted - len(data), offset + len(data))
                    records = list(_records(data, 0))
                    if not records:
                        data += self._files.pread(file, size - offset - len(data), offset + len(data))
                if records:
                    self._read_at = (number, offset + records[-1][1])
                    return [body for body, _ in records], self._read_at
                skipped = _damaged(data.ljust(size - offset, b"\0"), 0)
                text = "%s: %d bytes from %d on are damaged, and the events in them are lost"
                _log_loss(text, self._path(number), skipped, offset)
                self._read_at = (number, offset + skipped)
                continue
            number = min((at for at in self._segments if at > number), default=number)
            if number == self._read_at[0]:
                return [], self._read_at
            self._read_at = (number, self._segments[number].head)

    def note_acked(self, place: Place) -> None:
        """Record that everything before `place` is acked, and remove the segments before it."""
        self._note(place, self.end)
        self.acked = place
        for number in [number for number in self._segments if number < place[0]]:
            self._files.discard(self._path(number))
            del self._segments[number]
        self._count()


def _records(data: bytes, at: int) -> Iterator[tuple[bytes, int]]:
    """Yield the records from `at` on, each with the offset behind it, up to the first that is incomplete or damaged."""
    while at + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + length]
        at += length
        # No event is empty, but zeros would look like an empty record with the right checksum.
        if not body or len(body) < length or zlib.crc32(body) != checksum:
            return
        yield body, at


def _damaged(data: bytes, at: int) -> int:
    """Return the number of bytes from `at` to the next intact record, or to the end. Takes 0.3 s for 1 MiB."""
    for start in range(at + 1, len(data) - _RECORD.size):
        length, checksum = _RECORD.unpack_from(data, start)
        body = start + _RECORD.size
        if 0 < length <= len(data) - body and zlib.crc32(data[body : body + length]) == checksum:
            return start - at
    return len(data) - at


def _log_loss(text: str, *arguments: object) -> None:
    logger.error(text, *arguments, extra={"event": "spool_damaged"})


class DiskSpool:
    """The `Intake` of a writer with a spool. A `SpoolPump` writes its events to the disk.

    Args:
        segments: the files.
        config: the bounds.
        hub: gets the events from the disk.
    """

    def __init__(self, segments: Segments, config: SpoolConfig, hub: Hub) -> None:
        self.segments = segments
        self.config = config
        self.hub = hub
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        """Bytes of the pending events."""
        self.taken = self.written = 0
        """Number of events taken, and of those on the disk."""
        self.work = trio.Event()
        """Set when events are pending."""
        self.changed = trio.Event()
        """Set and replaced when events were written or acked, and when the writer ends."""

    @property
    def full(self) -> bool:
        """Whether senders have to wait, for acks or for the disk."""
        waiting = self.pending_bytes
        return waiting > self.config.segment or self.segments.unacked_bytes + waiting >= self.config.max_bytes

    async def put(self, bodies: list[bytes]) -> None:
        """Wait for room and take events, which are synced within `SpoolConfig.sync` seconds.

        Raises:
            ConnectionClosed: the writer has ended.
        """
        while self.full:
            self.hub.check_open()
            await self.changed.wait()
        self._add(bodies)

    def _add(self, bodies: list[bytes]) -> None:
        self.pending += bodies
        self.taken += len(bodies)
        self.pending_bytes += sum(map(len, bodies)) + _RECORD.size * len(bodies)
        self.work.set()

    def put_nowait(self, body: bytes) -> None:
        """Take one event; if there is no room, drop and count it, or raise `trio.WouldBlock` (`WriterConfig.drop`)."""
        if not self.full:
            self._add([body])
        elif self.hub.config.drop is None:
            raise trio.WouldBlock
        else:
            self.hub.queue.dropped += 1

    async def deliver(self, bodies: list[bytes]) -> None:
        """Wait for room, take events, and return when they are on the disk. Errors as `put`."""
        if bodies:
            await self.put(bodies)
            await self._all_written()

    async def _all_written(self) -> None:
        """Wait until all events taken so far are on the disk."""
        taken = self.taken
        while self.written < taken:
            self.hub.check_open()
            await self.changed.wait()

    async def flush(self) -> None:
        """Wait until all events taken so far are acked, not only on the disk. Errors as `put`."""
        await self._all_written()
        end = self.segments.end
        with self.hub.flushing():
            while self.segments.acked < end:
                self.hub.check_open()
                await self.changed.wait()
        await trio.lowlevel.checkpoint()

    def has_changed(self) -> None:
        """Wake the tasks that wait for room, for events on the disk, or for acks."""
        told, self.changed = self.changed, trio.Event()
        told.set()


class SpoolPump(Actor[Any]):
    """Writes pending events to the disk, reads them back, sends them, and notes the acks."""

    spool: DiskSpool

    def __attrs_post_init__(self) -> None:
        self.under_way: deque[tuple[Place, QueuedEvents]] = deque()
        self.more = trio.Event()
        self.lock = trio.Lock()
        self.writing = trio.Lock()

    def started(self) -> None:
        """Start the tasks that write, send and note."""
        for task in (self.write, self.send, self.note):
            self.start_soon(task)

    async def stopping(self, reason: Reason) -> None:
        """Write the pending events, also if a task of this actor has failed."""
        await self.write_pending()

    async def write(self) -> None:
        """Write pending events whenever there are any."""
        spool = self.spool
        while True:
            await spool.work.wait()
            await trio.sleep(spool.config.sync)
            await self.write_pending()

    async def write_pending(self) -> None:
        """Write the pending events now."""
        spool = self.spool
        async with self.writing:
            if not spool.pending:
                return
            bodies, size = spool.pending[:], spool.pending_bytes
            spool.work = trio.Event()
            await self.insist(spool.segments.append, bodies)
            del spool.pending[: len(bodies)]
            spool.pending_bytes -= size
            spool.written += len(bodies)
            if spool.pending:
                spool.work.set()
            spool.has_changed()

    async def send(self) -> None:
        """Read events back and put them into the writer's queue, waiting while it is full."""
        spool = self.spool
        sent = spool.segments.acked
        while True:
            bodies, place = await self.insist(spool.segments.read)
            if place == sent:
                changed = spool.changed
                if spool.segments.end == place:
                    await changed.wait()
                continue
            sent = place  # also behind damage without any event, or `flush` would wait forever
            self.under_way.append((place, await spool.hub.hand_in(bodies)))
            self.more.set()

    async def note(self) -> None:
        """Write the place of the acked events to the disk as it moves."""
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
        """Call `function` in a thread. After an `OSError`, log it, once for each reason, and try again every `_RETRY` seconds."""
        logged = ""
        while True:
            try:
                async with self.lock:
                    return await self.system.platform.run_in_thread(function, *arguments)
            except OSError as error:
                if str(error) != logged:
                    logged = str(error)
                    logger.error("the spool cannot be used: %s", error, extra={"event": "spool_error"})
                await trio.sleep(_RETRY)


def check_spool(config: WriterConfig, spool: SpoolConfig | None) -> None:
    """Refuse a spool together with `WriterConfig.drop` ``"oldest"``: events cannot be removed from the beginning of a file.

    Raises:
        ConfigurationError: the settings do not go together.
    """
    if spool is not None and config.drop == "oldest":
        raise ConfigurationError("a spool on disk cannot drop its oldest events: use drop='newest', or None to wait")


@contextmanager
def open_segments(config: SpoolConfig, kind: bytes) -> Iterator[Segments]:
    """Open the folder of a spool, and lock it while the block lasts. Blocks.

    Raises:
        ConfigurationError: the folder cannot be used, another writer uses it, or it holds other files.
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
