"""A sink that writes each unit to disk before it is acked, as JSON lines that any tool can read.

One unit is one file, named after `Unit.name`.  The file appears complete or not at all: it is written in a hidden folder, synced and
renamed, and then the folder is synced.  Only after that does the sink answer, which sends the ack.  So no acked event is missing after
a crash at any moment.  A unit that was in the folder and not acked comes again, in another file.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from levada.framework import Actor, blocking, handles
from levada.framework.files import folder_path
from levada.framework.platform import PLATFORM
from levada.framework.text import finite

from .unit import Unit

__all__ = ["SpoolSink", "prepare_spool", "store_unit"]

_WRITING = ".writing"
_OLD = 3600.0  # seconds without a new byte after which a file is considered abandoned

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class SpoolSink(Actor[Unit]):
    """Writes units into a folder; `functools.partial(SpoolSink, folder)` is a sink for `serve`.

    A file ``<connection>-<number>.jsonl`` has one event on each line, in ASCII.  Other characters, and surrogate escapes for bytes
    that were not UTF-8, become JSON escapes.  NaN and the infinities, which no reader delivers but a program may add, become text.
    The folder ``.writing`` holds unfinished files.  Those that a crash has left are removed at a start at least an hour later.

    Args:
        folder: created with mode 0700 if it does not exist; its files have mode 0600.
    """

    folder: Path

    async def started(self) -> None:
        """Create the folder, and remove the unfinished files of processes that died."""
        self.folder = folder_path(self.folder)
        await self.system.platform.run_in_thread(prepare_spool, self.folder)

    @handles
    @blocking
    def store(self, unit: Unit) -> str:
        """Write a unit to disk, and answer with the name of the file.

        Raises:
            OSError: the file cannot be written; nothing of it stays.
        """
        return store_unit(self.folder, unit)


def prepare_spool(folder: Path) -> None:
    """Create the folder of a spool, and remove the unfinished files of processes that died. Blocks.

    Raises:
        OSError: the folder cannot be used.
    """
    platform = PLATFORM.get()
    files, writing = platform.files, folder / _WRITING
    if not files.exists(folder):  # each client may have a sink of its own, which does not wait for a sync
        files.make_durable_folder(folder)
    files.make_folder(writing)
    # Other processes may be writing here. If one is slower than that, its rename fails, and the unit comes again.
    old = platform.time() - _OLD
    for path in files.glob(writing, "*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            if files.stat(path).st_mtime < old:
                files.unlink(path)


def store_unit(folder: Path, unit: Unit) -> str:
    """Write a unit into a prepared folder; return the name of the file, which is on the disk. Blocks.

    Raises:
        OSError: the file cannot be written; nothing of it stays.
    """
    files = PLATFORM.get().files
    name = f"{unit.name}.jsonl"
    hidden = folder / _WRITING / name
    try:
        with files.opened(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            files.write_all(descriptor, b"".join(map(_line, unit.events)))
            files.fsync(descriptor)
        files.rename(hidden, folder / name)
    except BaseException:
        files.discard(hidden)
        raise
    files.sync_folder(folder)
    return name


def _line(event: dict[str, Any]) -> bytes:
    try:
        text = _encode(event)
    except ValueError:
        text = _encode(finite(event))
    return text.encode("ascii") + b"\n"
