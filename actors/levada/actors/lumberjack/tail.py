"""Following files: an actor that looks for them, and an actor for each file that reads it and has its lines delivered.

The rules of this file:

* **The place in a file moves only when its lines are safe.**  Lines go to `deliver` in batches; several may be under way, they may be
  done in any order, and the place moves over the batches at the front that are done.
* One actor for a file: what goes wrong with it (a disk error, a delivery that fails) ends that actor alone, and the next look for
  files starts another one at the place that is acknowledged.  So `_Tailer` is the supervisor, with its interval as the back-off.
* Everything that may wait for a disk runs in a thread, one bounded read a round; a file with nothing new is looked at
  every `TailConfig.poll` seconds.
* What is read and not delivered is bounded, in lines and in octets, for each file; then reading waits.

How files are told apart stands in `levada.actors.lumberjack.registry`.  All of it needs a POSIX system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
import trio
from attrs import validators as v

from levada.framework import Actor, ActorSystem, Asks, Down, Failed, Reason, Ref, Reply, handles
from levada.framework.errors import ConfigurationError

from .multiline import LineAssembler, Record
from .registry import TAIL, FileEntry, Registry, digest, names_before_rotation, open_registry
from .tail_file import Found, Look, OpenFile, find_files, find_moved

__all__ = ["Deliver", "Tail", "TailConfig", "TailStatus", "tail"]

logger = logging.getLogger("levada.actors.lumberjack.tail")

Deliver = Callable[[list[dict[str, Any]]], Awaitable[object]]
"""Takes events and returns once they are safe: `Writer.deliver`, or an ask of any actor."""

Key = tuple[int, int]

_BATCH = 1024  # lines in one call of `deliver`
_LINE_COST = 256  # octets that a line costs beside its text


def _pattern(value: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    try:
        return value if value is None else re.compile(value)
    except re.error as error:
        raise ConfigurationError(f"not a regular expression: {value!r}: {error}") from error


_positive: Any = [v.instance_of((int, float)), v.gt(0)]
_size: Any = [v.instance_of(int), v.ge(1)]


@attrs.frozen(kw_only=True)
class TailConfig:
    """How files are followed. Immutable; derive with `attrs.evolve`."""

    once: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Read what is there, a last line without its end too, and be done."""
    start: Literal["beginning", "end"] = attrs.field(default="beginning", validator=v.in_(("beginning", "end")))
    """Where to begin with files that are there when a registry is new; files that appear later are read from their beginning."""
    exclude: tuple[str, ...] = attrs.field(default=("*.gz", "*.bz2", "*.xz", "*.zst"), converter=tuple[str, ...])
    """Patterns of names that are left alone although a pattern of files matches them."""
    poll: float = attrs.field(default=0.25, validator=_positive)
    """Seconds between looks at a file that has nothing new."""
    scan: float = attrs.field(default=2.0, validator=_positive)
    """Seconds between looks for files."""
    save: float = attrs.field(default=1.0, validator=_positive)
    """Seconds between writes of the registry; what is acknowledged in between is sent again if the process is killed."""
    rotate_wait: float = attrs.field(default=5.0, validator=_positive)
    """Seconds without a new octet after which a file that no pattern names any more (renamed, unlinked) is let go."""
    close_inactive: float = attrs.field(default=300.0, validator=_positive)
    """Seconds without a new octet after which any file is let go, until its size changes; `rotate_wait` while others wait for a place."""
    max_files: int = attrs.field(default=256, validator=_size)
    """Files open at a time; more wait."""
    multiline: re.Pattern[str] | None = attrs.field(default=None, converter=_pattern)
    """A line in which this is found begins a record, lines in which it is not belong to the record before; ``None``: each line is one."""
    multiline_timeout: float = attrs.field(default=5.0, validator=_positive)
    """Seconds that a record waits for more lines."""
    max_record: int = attrs.field(default=1 << 20, validator=_size)
    """Octets of a record of several lines; further lines are left out and the event is marked."""
    max_line: int = attrs.field(default=1 << 20, validator=[*_size, v.le(8 << 20)])
    """Octets of one line; the rest of it is left out and the event is marked."""
    read_size: int = attrs.field(default=128 * 1024, validator=_size)
    """Octets read at a time."""
    max_lines: int = attrs.field(default=8192, validator=_size)
    """Records of one file that are read and not acknowledged."""
    max_octets: int = attrs.field(default=16 << 20, validator=_size)
    """Octets of such records, with 256 for each; a single batch may be larger."""
    drain_timeout: float = attrs.field(default=10.0, validator=v.ge(0))
    """Seconds that what is under way has to be acknowledged at the end."""
    host: str = attrs.field(factory=socket.gethostname, validator=v.instance_of(str))
    """What the events say about where they are from."""
    fields: Mapping[str, str] = attrs.field(factory=dict)
    """Put into each event, besides ``line``, ``host``, ``file`` and ``offset`` (LJ-9)."""


@attrs.frozen
class TailStatus:
    """Counters of a `Tail`; a snapshot."""

    files: int
    """Files being read."""
    waiting: int
    """Files that wait until others are let go."""
    lines_read: int
    lines_acked: int
    lines_cut: int
    """Lines or records of which a part was left out."""
    octets_acked: int
    octets_behind: int
    """Octets of the files being read that are not acknowledged."""
    replacements: int
    """Files truncated or written over."""
    failures: int
    """Actors of files that ended with an error; their files are tried again."""
    save_errors: int
    """Writes of the registry that failed; they are tried again."""


@attrs.frozen
class _Drain(Asks[None]):
    """Read no more, wait for what is under way; answered when all files are let go. Told to a file, it is the same for that one."""


@attrs.frozen
class _Located:
    """Where the file is now; ``None``: no pattern names it."""

    path: str | None


@attrs.define
class _Counters:
    lines_read: int = 0
    lines_acked: int = 0
    lines_cut: int = 0
    octets_acked: int = 0
    replacements: int = 0
    failures: int = 0
    save_errors: int = 0


@attrs.define(eq=False)
class _Shared:
    """What the tailer and the actors of its files have in common."""

    config: TailConfig
    registry: Registry
    deliver: Deliver
    counters: _Counters = attrs.field(factory=_Counters)
    files: int = 0
    waiting: int = 0
    crowded: bool = False
    """Whether files wait for a place."""
    sizes: dict[Key, tuple[FileEntry, int]] = attrs.field(factory=dict)
    """Entry and last known size of the files being read."""
    left: dict[Key, int] = attrs.field(factory=dict)
    """Size of files that were let go, at that time."""


@attrs.define(eq=False)
class _Batch:
    """Lines that are being delivered."""

    entry: FileEntry
    end: int
    tail: bytes
    lines: int
    cost: int
    done: bool = False


class _FileReader(Actor[_Located | _Drain]):
    """Reads one file and has its lines delivered; stops by itself when there is nothing more to do."""

    file: OpenFile
    entry: FileEntry
    shared: _Shared
    reads: bool = False

    def started(self) -> None:
        self.key = (self.file.device, self.file.inode)
        self.draining = False
        self.gone = False
        self.under_way: deque[_Batch] = deque()
        self.lines = self.cost = 0  # of the batches under way
        self.wake = trio.Event()
        self.last_data = trio.current_time()
        self.begin_at(self.entry.offset)
        self.reads = True
        self.start_soon(self.follow)

    def stopping(self, reason: Reason) -> None:
        self.shared.sizes.pop(self.key, None)
        if not self.reads:
            self.file.close()

    def undelivered(self, messages: list[Any]) -> None:
        pass  # where a file is that was let go is of no interest, and no dead letter

    @handles
    def locate(self, m: _Located) -> None:
        self.gone = m.path is None
        if m.path is not None and m.path != self.entry.path:
            self.entry.path = m.path
            self.shared.registry.dirty = True

    @handles
    def drain(self, _: _Drain) -> None:
        self.draining = True
        self.wake.set()

    def begin_at(self, offset: int) -> None:
        config = self.shared.config
        self.lines_of = LineAssembler(
            offset, max_line=config.max_line, start=config.multiline, max_record=config.max_record
        )

    async def follow(self) -> None:
        try:
            await trio.to_thread.run_sync(self.file.go_to, self.entry.offset)
            while not self.draining and await self.read_once():
                pass
            while self.under_way:
                await self.woken()
        finally:
            self.file.close()
        self.stop()

    async def read_once(self) -> bool:
        """One round; false when there is nothing more to do here."""
        config = self.shared.config
        look = await trio.to_thread.run_sync(self.file.look, config.read_size)
        now = trio.current_time()
        self.shared.sizes[self.key] = (self.entry, look.size)
        if look.replaced:
            logger.info("%s was truncated or written over", self.entry.path, extra={"event": "file_replaced"})
            await self.deliver_all(self.lines_of.finish(partial=True), look)
            self.begin_again()
            return True
        if look.data:
            self.last_data = now
            if self.entry.head_length < len(look.head):
                self.entry.note_head(look.head)
            await self.deliver_all(self.lines_of.feed(look.data), look)
            return True
        quiet = now - self.last_data
        if config.once or (self.gone and quiet >= config.rotate_wait):
            # Nobody will write the end of the last line any more.
            await self.deliver_all(self.lines_of.finish(partial=True), look)
            return False
        if self.lines_of.holding and quiet >= config.multiline_timeout:
            await self.deliver_all(self.lines_of.finish(), look)
        if quiet >= (config.rotate_wait if self.shared.crowded else config.close_inactive):
            self.shared.left[self.key] = look.size
            return False
        with trio.move_on_after(config.poll):
            await self.woken()
        return True

    def begin_again(self) -> None:
        """Read the file from its start, as a new one; the old entry stays with the lines under way and for copies of what was here."""
        self.shared.counters.replacements += 1
        self.entry = self.shared.registry.add(
            FileEntry(path=self.entry.path, device=self.file.device, inode=self.file.inode)
        )
        self.file.go_to(0)
        self.begin_at(0)

    async def woken(self) -> None:
        """Wait until a batch is done or the reader is told to come to an end."""
        if not self.draining or self.under_way:
            self.wake = trio.Event()
            await self.wake.wait()

    async def deliver_all(self, records: list[Record], look: Look) -> None:
        """Hand records on in batches, waiting while too much is under way; what does not get its turn is read again next time."""
        config, counters = self.shared.config, self.shared.counters
        # The octets around the end of a batch, by which the file is known again; behind `look.data` is `file.position`.
        window = look.before + look.data
        base = self.file.position - len(window)
        most = min(_BATCH, config.max_lines)
        for first in range(0, len(records), most):
            part = records[first : first + most]
            cost = sum(len(record.text) for record in part) + _LINE_COST * len(part)
            while self.under_way and (
                self.lines + len(part) > config.max_lines or self.cost + cost > config.max_octets
            ):
                if self.draining:
                    return
                await self.woken()
            end = part[-1].end
            tail = window[max(0, end - base - TAIL) : max(0, end - base)]
            batch = _Batch(self.entry, end, tail, len(part), cost)
            self.under_way.append(batch)
            self.lines += batch.lines
            self.cost += cost
            counters.lines_read += batch.lines
            counters.lines_cut += sum(record.cut for record in part)
            self.start_soon(self.deliver, batch, [self.event(record) for record in part])
            await trio.lowlevel.checkpoint()

    def event(self, record: Record) -> dict[str, Any]:
        config = self.shared.config
        event = {
            "line": record.text,
            "host": config.host,
            "file": self.entry.path,
            "offset": str(record.start),
            **config.fields,
        }
        if record.cut:
            event["cut"] = "true"
        return event

    async def deliver(self, batch: _Batch, events: list[dict[str, Any]]) -> None:
        await self.shared.deliver(events)
        batch.done = True
        counters = self.shared.counters
        while self.under_way and self.under_way[0].done:
            first = self.under_way.popleft()
            self.lines -= first.lines
            self.cost -= first.cost
            counters.lines_acked += first.lines
            counters.octets_acked += first.end - first.entry.offset
            first.entry.move_to(first.end, first.tail)
            self.shared.registry.dirty = True
        self.wake.set()


class _Tailer(Actor[_Drain | Down]):
    """Looks for files, and keeps an actor at each of them."""

    patterns: tuple[str, ...]
    shared: _Shared
    finished: trio.Event
    """Set when, with `TailConfig.once`, everything has been read and delivered."""

    def started(self) -> None:
        self.readers: dict[Key, Ref[_Located | _Drain]] = {}
        self.done: set[Key] = set()  # files of a single run that are not taken up again
        self.unripe: dict[Key, int] = {}  # sizes of what may be copies under way
        # Files that are not read to their end; renamed to a name without a pattern they must be looked for.
        self.unfinished = {(entry.device, entry.inode) for entry in self.shared.registry.entries if entry.inode}
        self.refused: set[tuple[str, str]] = set()
        self.looked = False
        self.freed = trio.Event()
        self.drained: Reply[Any] | None = None
        self.writing = trio.Lock()
        self.start_soon(self.look_for_files)
        self.start_soon(self.save)

    async def stopping(self, reason: Reason) -> None:
        await self.write_registry()

    @handles
    def drain(self, m: _Drain) -> None:
        self.drained = self.reply_later()
        for reader in self.readers.values():
            if reader.is_alive:
                reader.tell(m)
        self.look_whether_done()

    @handles
    def file_ended(self, m: Down) -> None:
        key = m.tag
        del self.readers[key]
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
        if self.readers:
            return
        if self.drained is not None:
            self.drained.send(None)
            self.drained = None
        if self.looked and self.shared.config.once and not self.shared.waiting:
            self.finished.set()

    # ------------------------------------------------------------ the registry

    async def save(self) -> None:
        while True:
            await trio.sleep(self.shared.config.save)
            await self.write_registry()

    async def write_registry(self) -> None:
        registry = self.shared.registry
        async with self.writing:
            data = registry.snapshot()
            if data is None:
                return
            try:
                await trio.to_thread.run_sync(registry.write, data)
            except OSError as error:
                registry.dirty = True
                self.shared.counters.save_errors += 1
                logger.error("the registry of files cannot be written: %s", error, extra={"event": "registry_error"})

    # ------------------------------------------------------------ looking for files

    async def look_for_files(self) -> None:
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
            await self.take_in(here | moved)
            self.unfinished |= moved.keys() - self.readers.keys() - self.done  # there was no place for them
            self.looked = True
            self.look_whether_done()
            with trio.move_on_after(config.scan):
                await self.freed.wait()

    async def take_in(self, here: dict[Key, Found]) -> None:
        """Tell the actors where their files are, and start those that are missing."""
        shared, registry = self.shared, self.shared.registry
        for key, reader in self.readers.items():
            if reader.is_alive:  # else its `Down` is under way
                reader.tell(_Located(here[key].path if key in here else None))
        self.unripe = {key: size for key, size in self.unripe.items() if key in here}
        shared.left = {key: size for key, size in shared.left.items() if key in here}
        missing = [
            (key, file)
            for key, file in here.items()
            if key not in self.readers and key not in self.done and shared.left.get(key) != file.size
        ]
        by_path = registry.by_path() if missing else {}
        taken: list[tuple[Key, OpenFile, FileEntry]] = []
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
                # Before anything is read: killed now and the file renamed then, the next shipper would not know that it must look for it.
                await self.write_registry()
        except BaseException:
            for _, opened, _ in taken:
                opened.close()
            raise
        for key, opened, entry in taken:
            self.readers[key] = reader = self.spawn(_FileReader, opened, entry, shared)
            self.watch(reader, key)
            if self.drained is not None:  # meanwhile
                reader.tell(_Drain())
        shared.files = len(self.readers)
        shared.waiting = len(missing) - looked_at  # not before the actors are there, see `look_whether_done`
        now = time.time()
        for entry in registry.entries:
            if (entry.device, entry.inode) in here:
                entry.seen = now
        registry.forget_old(now)

    async def take_in_file(
        self, key: Key, file: Found, originals: list[FileEntry]
    ) -> tuple[OpenFile | None, FileEntry | None]:
        """Open a file and see to it that it has an entry; nothing if it cannot be read, or not yet."""
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
            opened.close()  # another file has taken its place just now
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
        """Open a file and find its entry, see the rules of the registry; no file if it should be looked at again later. Blocks.

        Args:
            file: as it was found.
            own: the entry of its inode.
            originals: entries of files that it may be a copy of.
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
                    # Perhaps it is still being copied. If it does not grow until the next look, it is a file of its own.
                    self.unripe[key] = opened.size
                    opened.close()
                    return None, None
                if opened.is_described_by(entry):
                    return opened, entry
        except BaseException:
            opened.close()
            raise
        return opened, None


class Tail:
    """Files being followed. Made by `tail`."""

    def __init__(self, shared: _Shared, finished: trio.Event) -> None:
        self._shared = shared
        self._finished = finished

    def status(self) -> TailStatus:
        """Return the counters as they are now, or as they were at the end."""
        shared = self._shared
        behind = sum(max(0, size - entry.offset) for entry, size in shared.sizes.values())
        return TailStatus(
            files=shared.files, waiting=shared.waiting, octets_behind=behind, **attrs.asdict(shared.counters)
        )

    async def finished(self) -> None:
        """Wait until everything has been read and delivered; for ever without `TailConfig.once`."""
        await self._finished.wait()


@asynccontextmanager
async def tail(
    system: ActorSystem,
    patterns: Iterable[str],
    deliver: Deliver,
    *,
    registry: str | os.PathLike[str] | None = None,
    config: TailConfig | None = None,
) -> AsyncIterator[Tail]:
    """Follow files while the block lasts, and hand their lines to `deliver`: each line at least once.

    Leaving the block reads no more, gives what is under way `TailConfig.drain_timeout` seconds to be delivered, and writes the registry.

    Args:
        system: has been entered.
        patterns: names of files, or patterns of them as in a shell, ``**`` included.
        deliver: takes a list of events and returns when they are safe. If it fails, the same events come again.
        registry: folder in which the places are kept; ``None``: nowhere, so the next run begins anew.
        config: ``None``: the defaults.

    Raises:
        ConfigurationError: the registry cannot be used.
    """
    config = config or TailConfig()
    with contextlib.ExitStack() as files:
        entries = await trio.to_thread.run_sync(files.enter_context, open_registry(registry))
        finished = trio.Event()
        shared = _Shared(config, entries, deliver)
        tailer = system.spawn(_Tailer, tuple(patterns), shared, finished, supervise="escalate")
        try:
            yield Tail(shared, finished)
            with trio.move_on_after(config.drain_timeout):
                await tailer.ask(_Drain(), timeout=None)
        finally:
            tailer.stop(now=True)
            with trio.CancelScope(shield=True):
                await tailer.terminated()
