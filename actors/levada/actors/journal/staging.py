"""Staged rows: parts of batches that wait on the disk until a sink's batch is delivered or given up."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import attrs
import pyarrow as pa

from levada.framework.files import Files

from .blocks import Message, pack
from .config import JournalConfig
from .errors import JournalError, JournalFull, JournalUnwritable, refused
from .schema import conform, fingerprint
from .segments import Segment

__all__ = ["Stage", "Staging"]

logger = logging.getLogger("levada.actors.journal")

_STAGE, _STAGE_FORMAT = b"levada.stage", 1
"""Key of the metadata in the schema of a staged file: JSON of the format, query, batch, part and attempt."""
_GONE = ".gone"
"""Suffix of the newest stage of a batch while all of them are deleted. Once it has this name, none of them counts any more."""


@attrs.define(eq=False)
class Staging:
    """All stages of a journal. Its methods belong to the thread that writes; `close` closes the files, which stay on the disk."""

    files: Files
    folder: Path
    schema: pa.Schema = attrs.field(kw_only=True)
    config: JournalConfig = attrs.field(kw_only=True)
    journal: bytes = attrs.field(kw_only=True)
    clock: Callable[[], float] = attrs.field(kw_only=True)
    """Returns seconds since 1970."""
    size: int = attrs.field(default=0, init=False)
    """Size of all stages."""
    _number: int = attrs.field(default=0, init=False)
    _stages: dict[tuple[str, int], dict[tuple[int, int], Stage]] = attrs.field(factory=dict, init=False)

    def recover(self) -> None:
        """Open the files that earlier processes left; delete those that are of no use any more.

        Files of a batch that was delivered stay: they may be of a later attempt, whose `Deliver`, still to come, compares them.
        """
        files = self.files
        files.make_folder(self.folder)
        for path in files.glob(self.folder, "*"):  # in the order in which they were made
            if path.suffix not in (".segment", _GONE):
                files.unlink(path)  # it was being made
                continue
            try:
                stage = Stage.recover(self, path)
            except (JournalError, OSError) as error:
                logger.warning("staged rows are dropped: %s", error, extra={"event": "stage_dropped"})
                files.discard(path)
                continue
            self._number = max(self._number, stage.number)
            self._stages.setdefault(stage.key[:2], {})[stage.key[2:]] = stage
            self.size += stage.size
            if path.suffix == _GONE:
                self.drop(*stage.key[:2])  # a crash cut this short; later stages of the batch come later

    def begin(self, query: str, batch: int, part: int, attempt: int) -> Stage:
        """Return the stage of one attempt at one part of a batch; make it if there is none."""
        stage = self.of(query, batch).get((part, attempt))
        if stage is None:
            self._number += 1
            stage = Stage.create(self, self._number, (query, batch, part, attempt))
            self._stages.setdefault((query, batch), {})[part, attempt] = stage
        return stage

    def of(self, query: str, batch: int) -> Mapping[tuple[int, int], Stage]:
        """Return the stages of a batch by part and attempt."""
        return self._stages.get((query, batch), {})

    def drop(self, query: str, batch: int, part: int | None = None, attempt: int | None = None) -> int:
        """Delete the stages of a batch, or some of them; return how many. After a crash either all stages of a batch are there, or none."""
        stages = self._stages.get((query, batch), {})
        chosen = [key for key in stages if part in (None, key[0]) and attempt in (None, key[1])]
        if not chosen:
            return 0
        dropped = sorted((stages[key] for key in chosen), key=lambda stage: stage.number)
        try:
            if len(chosen) == len(stages):
                dropped[-1].rename(_GONE)
                del self._stages[query, batch]
            for key in chosen:
                del stages[key]
            self.size -= sum(stage.size for stage in dropped)
            for stage in dropped:  # the newest last
                stage.discard()
        except OSError as error:
            raise JournalUnwritable(f"staged rows cannot be deleted: {error}", path=str(self.folder)) from error
        return len(dropped)

    def drop_older(self, age: float) -> list[tuple[str, int]]:
        """Delete the batches that got no rows for `age` seconds; return their queries and numbers."""
        now = self.clock()
        before = now - age
        for stages in self._stages.values():
            for stage in stages.values():
                if stage.touched > now:  # the clock was ahead at that time
                    stage.touch(now)
        old = [key for key, stages in self._stages.items() if all(stage.touched < before for stage in stages.values())]
        for query, batch in old:
            self.drop(query, batch)
        return old

    def close(self) -> None:
        """Close all files."""
        for stages in self._stages.values():
            for stage in stages.values():
                stage.close()


class Stage:
    """Rows on the disk that wait to become part of a batch. Made by `Store.stage`; methods belong to the thread that writes.

    A stage is a segment file of its own; the metadata of its schema says whose rows it has (`_STAGE`). It outlives the process, so the next
    process can deliver the batch. Nothing is synced: after a power failure rows may be missing, and then their number is too small.
    """

    def __init__(self, staging: Staging, segment: Segment, key: tuple[str, int, int, int]) -> None:
        self._staging = staging
        self._segment = segment
        self.key = key
        """Query, batch, part and attempt."""

    @classmethod
    def create(cls, staging: Staging, number: int, key: tuple[str, int, int, int]) -> Stage:
        """Make the file."""
        metadata = {**(staging.schema.metadata or {}), _STAGE: json.dumps([_STAGE_FORMAT, *key]).encode()}
        schema = staging.schema.with_metadata(metadata)
        files, folder, journal = staging.files, staging.folder, staging.journal
        try:
            segment = Segment.create(
                files, folder, partition=0, first=number, schema=schema, journal=journal, durable=False
            )
        except OSError as error:
            raise refused(error, folder) from error
        stage = cls(staging, segment, key)
        stage.touch(staging.clock())
        return stage

    @classmethod
    def recover(cls, staging: Staging, path: Path) -> Stage:
        """Open a file of an earlier process; a `JournalError` says why it is of no use any more."""
        segment = Segment.open(staging.files, path, partition=0, journal=staging.journal)
        try:
            version, query, batch, part, attempt = json.loads((segment.schema.metadata or {}).get(_STAGE, b"[]"))
        except ValueError as error:
            raise JournalError("written by another version", path=str(path)) from error
        if version != _STAGE_FORMAT:
            raise JournalError(f"stage format {version}, this program reads {_STAGE_FORMAT}", path=str(path))
        if segment.fingerprint != fingerprint(staging.schema):
            raise JournalError(f"batch {batch} of {query} has the columns of before the journal grew", path=str(path))
        if segment.examine(0) == "damaged":
            raise segment.damage()
        segment.settle()
        return cls(staging, segment, (query, batch, part, attempt))

    @property
    def number(self) -> int:
        """Number of the file."""
        return self._segment.first

    @property
    def rows(self) -> int:
        """Rows that were staged."""
        return self._segment.end - self._segment.first

    @property
    def size(self) -> int:
        """Size of the rows on the disk."""
        return self._segment.size - self._segment.start

    @property
    def touched(self) -> float:
        """When rows last came, in seconds since 1970. The file knows, since other processes may have written it."""
        return self._staging.files.stat(self._segment.path).st_mtime

    def touch(self, now: float) -> None:
        """Set the time at which rows last came. If the disk refuses, it stays the file system's time of the last write."""
        with suppress(OSError):
            self._staging.files.utime(self._segment.path, (now, now))

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows; nothing is synced.

        Raises:
            SchemaMismatch: the columns differ from the journal's.
            JournalFull: all stages together would exceed `max_staged_bytes`, or the disk is full.
            JournalUnwritable: the disk refuses.
        """
        staging, segment = self._staging, self._segment
        messages = list(pack([conform(batch, staging.schema)], staging.config))
        size, limit = sum(message.size for message in messages), staging.config.max_staged_bytes
        if staging.size + size > limit:
            raise JournalFull(
                f"batches that are not delivered yet hold {staging.size} bytes, at most {limit} (max_staged_bytes), and "
                f"{size} more were to come",
                path=os.fspath(segment.path),
                needed=size,
                limit=limit,
            )
        try:
            segment.write(messages, transaction=0, time=0.0)
        except OSError as error:
            # A part of a write is overwritten by the next, and cut off when the journal is opened.
            with suppress(OSError):
                segment.cut()
            raise refused(error, segment.path) from error
        segment.publish()
        staging.size += size
        self.touch(staging.clock())

    def messages(self) -> Iterator[Message]:
        """Yield the staged rows without copying them."""
        segment = self._segment
        if segment.end == segment.first:
            return
        for block in segment.read(segment.first, segment.end, segment.size, 0):
            yield Message(block.data, block.rows)

    def rename(self, suffix: str) -> None:
        """Give the file another suffix, if it is still there."""
        path, renamed = self._segment.path, self._segment.path.with_suffix(suffix)
        with suppress(FileNotFoundError):
            self._staging.files.rename(path, renamed)
            self._segment.path = renamed

    def close(self) -> None:
        """Close the file, which stays."""
        self._segment.close()

    def discard(self) -> None:
        """Delete the file."""
        self._segment.close()
        self._staging.files.discard(self._segment.path)
