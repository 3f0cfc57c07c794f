"""Processes that tests look at, and drivers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

ROOT = Path(__file__).parents[3]
START = 300.0
"""Seconds for nodes to start, on a busy machine."""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(marker: str, *, parent: int | None = None) -> list[int]:
    """Processes that run and have a marker in their environment: nodes, and what they have started.

    The children of `parent` are nodes only. A process that a killed node has started ends a moment later, and is not this one's to wait for.
    """
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if (
                folder.name.isdigit()
                and marker.encode() in (folder / "environ").read_bytes()
                and is_alive(int(folder.name))
                and parent in (None, _parent(folder))
            ):
                found.append(int(folder.name))
        except OSError:
            pass  # it has just ended, or is another user's
    return found


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


async def gone(pid: int, within: float) -> bool:
    """Wait until a process has ended; whether it has in time."""
    try:
        number = os.pidfd_open(pid)
    except OSError:  # no such process, or "invalid argument" while the system takes it out of its tables
        return True
    try:
        with trio.move_on_after(within):
            await trio.lowlevel.wait_readable(number)
            return True
        return False
    finally:
        os.close(number)


class Driver:
    """A driver in a process of its own."""

    def __init__(self, process: trio.Process, marker: str) -> None:
        self.process = process
        self.marker = marker
        """In the environment of all its processes."""
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self) -> list[str]:
        """Wait for the next line of its output."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            data = await self.process.stdout.receive_some()
            assert data, "the driver has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode().split(maxsplit=2)

    async def ready(self) -> list[int]:
        """Wait until its nodes are up; return their processes."""
        with trio.fail_after(START):
            word, *pids = " ".join(await self.line()).split()
        assert word == "READY"
        return [int(pid) for pid in pids]


@asynccontextmanager
async def driver(app: str = "app", **settings: Any) -> AsyncIterator[Driver]:
    """Run a driver; whatever happens, nothing of it is left."""
    marker = f"LEVADA_TEST={uuid.uuid4()}"
    name, _, value = marker.partition("=")
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.actors.nodes.driver", f"tests.actors.nodes.apps:{app}", json.dumps({"start_timeout": START, **settings})],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, name: value}, process_group=0,
    )  # fmt: skip
    try:
        yield Driver(process, marker)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            left = [pid for pid in processes_of(marker) if not await gone(pid, 15.0)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert left == []
