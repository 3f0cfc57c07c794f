"""Spark for the length of a block: it starts in a thread, and none of its processes outlives the block.

Java is a child of this process. Spark's Python workers are children of Java, in a process group of their own, so a Ctrl-C in the
terminal does not reach them, and once Java has ended they are nobody's children. They are known by their environment: PySpark gives Java the
name of a file in it, another one each time, and Java's processes inherit it. Java ends some time after this process; this module waits
for it. Without ``/proc`` it cannot find the processes, and leaves them to end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from pyspark import SparkContext

from levada.actors.spark import session
from levada.framework.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_session"]

STOPPING = 10.0
"""Seconds that Spark has to stop in order, and its processes to end, before they are killed."""

_MARK = b"_PYSPARK_DRIVER_CONN_INFO_PATH="
"""The variable of the file in which Java tells PySpark its port."""


@asynccontextmanager
async def spark_session(conf: Mapping[str, Any], log: Path) -> AsyncIterator[SparkSession]:
    """Start Spark on this machine, and stop it at the end unless it was running before.

    While Spark starts, the standard error of this process is `log`; Java and the workers keep it.

    Raises:
        ConfigurationError: there is no Java, or Spark does not start.

    Cancellation:
        Spark ends, also if it was still starting. That takes a second or two.
    """
    if SparkContext._active_spark_context is not None:
        yield await trio.to_thread.run_sync(partial(session, **conf))
        return
    processes = _Processes()
    found: list[SparkSession] = []
    try:
        with _errors_to(log):
            try:
                await _come_up(conf, processes, found)
            except* ConfigurationError as group:
                [*_, error] = group.exceptions
                raise ConfigurationError(f"{error}; Spark's log is {log}") from error
        yield found[0]
    finally:
        with trio.CancelScope(shield=True):
            processes.running()  # Java's environment is gone when Java has ended
            if found:
                with trio.move_on_after(STOPPING):
                    await trio.to_thread.run_sync(_stop, found[0], abandon_on_cancel=True)
            await trio.to_thread.run_sync(_end, processes)


async def _come_up(conf: Mapping[str, Any], processes: _Processes, found: list[SparkSession]) -> None:
    """Start Spark; if cancelled, end its processes, also those that it still starts, until the start is over."""
    over = trio.Event()
    given_up = False

    async def start() -> None:
        try:
            with trio.CancelScope(shield=True):
                found.append(await trio.to_thread.run_sync(partial(session, **conf)))
        except Exception:
            if not given_up:
                raise
        finally:
            over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        try:
            await over.wait()
        finally:
            given_up = True
            with trio.CancelScope(shield=True):
                while not over.is_set():
                    await trio.to_thread.run_sync(_end, processes)
                    with trio.move_on_after(0.05):
                        await over.wait()


class _Processes:
    """Java, if it began after this object was made, and its processes, also those with another parent by now."""

    def __init__(self) -> None:
        self._before = _children()
        self._own = _mark(os.getpid())  # if this process is itself Spark's, and of a Java that is about to begin
        self._marks: set[bytes] = set()

    def running(self) -> set[int]:
        """List those that run; empty without ``/proc``."""
        found = _children() - self._before
        self._marks |= {mark for mark in map(_mark, found) if mark and mark != self._own}
        return found | {process for process in _processes() if _mark(process) in self._marks}


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _children() -> set[int]:
    """List the children of this process in its process group, as Java is; nodes lead process groups of their own."""
    wanted = [str(os.getpid()), str(os.getpgrp())]
    return {process for process in _processes() if _facts(process)[1:3] == wanted}


def _facts(process: int) -> list[str]:
    """Read the fields of ``/proc/PID/stat`` behind the program's name: state, parent, process group; empty if the process has ended."""
    try:
        # The name is in parentheses and may have anything in it.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[:1] == ["Z"] else fields


def _mark(process: int) -> bytes | None:
    """Return the variable in the environment of Java and its processes; None of others, and of a process that has ended."""
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or of another user
        return None
    return next((each for each in variables if each.startswith(_MARK)), None)


@contextlib.contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Direct the standard error of processes that start now to a file.

    Workers report each end of a pipe there, and their work, at any level of Spark's log.
    """
    saved = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _stop(spark: SparkSession) -> None:
    context: Any = spark.sparkContext
    with contextlib.suppress(Exception):  # whatever it is, the processes are ended next
        context.setLogLevel("OFF")
        spark.stop()
        java = context._gateway.proc
        context._gateway.shutdown()
        java.stdin.close()  # the sign for Java to end
        java.wait(STOPPING)


def _end(processes: _Processes) -> None:
    """End the processes, also those that they start meanwhile."""
    deadline = time.monotonic() + STOPPING
    number = signal.SIGTERM
    while left := processes.running():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(0.05)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    # A session after this one starts a Java of its own.
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
