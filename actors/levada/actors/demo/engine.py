"""Spark for the length of a block: it starts in a thread, and none of its processes outlives the block.

Java is a child of this process. Spark's Python workers are children of Java, in a process group of their own, so a Ctrl-C in the
terminal does not reach them. Java ends some time after this process; this module waits for it. Without ``/proc`` it cannot
find the processes, and leaves them to end by themselves.
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

__all__ = ["descendants", "spark_session"]

STOPPING = 10.0
"""Seconds that Spark has to stop in order, and its processes to end, before they are killed."""


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
    before = set(descendants(os.getpid()))
    found: list[SparkSession] = []
    try:
        with _errors_to(log):
            try:
                await _come_up(conf, before, found)
            except* ConfigurationError as group:
                [*_, error] = group.exceptions
                raise ConfigurationError(f"{error}; Spark's log is {log}") from error
        yield found[0]
    finally:
        with trio.CancelScope(shield=True):
            # Workers of a Java that has ended are nobody's children here, and may take a while to notice.
            family = _family(before)
            if found:
                with trio.move_on_after(STOPPING):
                    await trio.to_thread.run_sync(_stop, found[0], abandon_on_cancel=True)
            await trio.to_thread.run_sync(_end, before, family)


async def _come_up(conf: Mapping[str, Any], before: set[int], found: list[SparkSession]) -> None:
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
                    await trio.to_thread.run_sync(_end, before, {})
                    with trio.move_on_after(0.05):
                        await over.wait()


def descendants(process: int) -> list[int]:
    """List the descendants of a process; empty without ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        parent = _fact(int(entry.parent.name), 1)
        if parent is not None:
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _family(before: set[int]) -> dict[int, str | None]:
    """Find Spark's processes, and when each was started. Nodes are children too, but lead process groups of their own; Java does not."""
    own = str(os.getpgrp())
    found = dict[int, str | None]()
    for process in descendants(os.getpid()):
        if process not in before and (_fact(process, 1), _fact(process, 2)) == (str(os.getpid()), own):
            found |= {each: _began(each) for each in (process, *descendants(process))}
    return found


def _fact(process: int, number: int) -> str | None:
    """Read a field of ``/proc/PID/stat`` behind the program's name; None if the process has ended."""
    try:
        # The name is in parentheses and may have anything in it.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[number] if fields and fields[0] != "Z" else None


def _began(process: int) -> str | None:
    """Return when a process was started, which tells it from a later one with the same number; None if it has ended."""
    return _fact(process, 19)


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


def _end(before: set[int], family: dict[int, str | None]) -> None:
    """End the processes that were started since, and the rest of a known family."""
    deadline = time.monotonic() + STOPPING
    number = signal.SIGTERM
    while True:
        family |= _family(before)
        left = [process for process, began in family.items() if began is not None and _began(process) == began]
        if not left:
            break
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(0.05)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    # A session after this one starts a Java of its own.
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
