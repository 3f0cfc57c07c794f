"""A sink that writes each unit to disk before it is acked, as JSON lines that any tool can read.

One unit is one file, named like `Unit.name`, and the file is there whole or not at all: it is written in a hidden folder,
synced, renamed, and then the folder is synced.  Only after that comes the answer, and with it the ack.  So after a crash at any
moment no acked event is missing; a unit that was in the folder and not acked comes again, in another file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import trio

from levada.framework import Actor, blocking, handles
from levada.transports.private_files import make_private_folder, private

from .folders import sync_folder
from .unit import Unit

__all__ = ["SpoolSink"]

_OLD = 3600.0  # seconds since the last byte was written after which nobody is writing any more

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class SpoolSink(Actor[Unit]):
    """Writes units into a folder; `functools.partial(SpoolSink, folder)` is a sink for `serve`.

    A file is ``<connection>-<number>.jsonl``: one event a line, ASCII only.  Other characters, and surrogate escapes for bytes
    that were not UTF-8, become JSON escapes.  A number that JSON cannot hold, which a writer can make by ``1e999``,
    becomes text.  Ignore ``.writing``: it holds files being written; those left by a crash are removed at the next start after an hour.

    Args:
        folder: made if it is not there, with mode 0700; the files in it have mode 0600.
    """

    folder: Path

    async def started(self) -> None:
        """Make the folder, and remove what dead processes left half written."""
        self.folder = Path(self.folder)
        self.writing = self.folder / ".writing"
        await trio.to_thread.run_sync(self._prepare)

    def _prepare(self) -> None:
        make_private_folder(self.folder)
        make_private_folder(self.writing)
        # Others may be writing there now. Should one of them be that slow its rename fails, and with it the unit, which comes again.
        old = time.time() - _OLD
        for file in self.writing.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < old:
                    file.unlink()

    @handles
    @blocking
    def store(self, unit: Unit) -> str:
        """Write a unit; the answer is the file's name."""
        name = f"{unit.name}.jsonl"
        hidden = self.writing / name
        try:
            with open(hidden, "xb", opener=private) as file:
                file.writelines(map(_line, unit.events))
                file.flush()
                os.fsync(file.fileno())
            hidden.rename(self.folder / name)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        return name


def _line(event: dict[str, Any]) -> bytes:
    try:
        text = _encode(event)
    except ValueError:
        text = _encode(_finite(event))
    return text.encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
