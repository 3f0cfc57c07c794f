"""How a process asks the one that has a journal open: through the folder, because that is all it knows of the writer, which may be any program.

The question is a file. The writer looks for it every second, and deletes it behind its answer, another file. One process asks at a time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, Final, TypeVar

import trio

from levada.framework.files import Files
from levada.framework.platform import Platform

from .blocks import write_all
from .errors import JournalLocked

__all__ = [
    "COPIED",
    "TRIM_LOCK",
    "ask_writer",
    "held",
    "locked",
    "locked_in_turn",
    "put",
    "read_answer",
    "until_free",
    "write",
]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.journal")

COPIED = "another process copies this journal"
PASSED_WITHIN: Final = 600.0
"""Seconds to wait for a process that only reads or trims a journal."""
TOLD_AFTER: Final = 1.0
"""Seconds of waiting after which the log says for whom."""
LOCKED_PAUSE: Final = 0.1
"""The least seconds between two looks whether a journal is free; later a fiftieth of the wait."""
TRIM_LOCK = "trim.lock"
"""In the folder of a journal: locked by the process that trims it, or has it trimmed."""
_POLL = 0.02
"""Seconds between looks for the answer."""
_POLLS = 50
"""Looks for the answer between looks whether a process still has the journal open."""


def ask_writer(
    platform: Platform,
    request: Path,
    question: bytes,
    answer: Callable[[], T | None],
    closed: Callable[[], T],
    timeout: float,
    reasons: str,
) -> T:
    """Ask the process that has a journal open, and wait for its answer. Blocks.

    Args:
        platform: the surroundings.
        request: the file for the question, in the folder of the journal. The caller deletes it.
        question: tells itself from other questions.
        answer: reads the answer; returns None as long as there is none to this question.
        closed: is called instead, under the lock of the journal, if no process has it open.
        timeout: seconds to wait.
        reasons: why a process may not answer, for the error.

    Raises:
        JournalLocked: the writer does not answer.
        OSError: this user may not write into the folder.
    """
    files, directory = platform.files, request.parent
    deadline, tick, polls = platform.monotonic() + timeout, Event(), 0
    while True:
        if polls % _POLLS == 0:  # seldom: a writer that starts in this moment finds the folder locked
            with suppress(JournalLocked), locked(files, directory / "lock", shared=True):
                return closed()
        # In this order: the writer deletes the question behind the answer.
        is_asked = polls and files.exists(request)
        found = answer()
        if found is not None:
            return found
        if not is_asked:  # yet, or it was deleted with the question of a process that was killed
            put(files, request, question)
        polls += 1
        if platform.monotonic() >= deadline:
            raise JournalLocked(
                f"a process has this journal open and did not answer for {timeout:g} s: {reasons}, or its levada is too old. Wait longer, or stop "
                "it first",
                path=str(directory),
            )
        _pause(tick)


def _pause(tick: Event) -> None:
    """Wait for a little; raise if the task that waits for this thread is cancelled."""
    with suppress(RuntimeError):  # no task waits
        trio.from_thread.check_cancelled()
    tick.wait(_POLL)


def read_answer(files: Files, path: Path, **mark: str) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no file, or this mark is not in it: it answers another question."""
    try:
        found: dict[str, Any] = json.loads(files.read(path))
    except FileNotFoundError:
        return None
    return found if found.items() >= mark.items() else None


def put(files: Files, path: Path, data: bytes) -> None:
    """Write a file as a whole, which the other side may read: it may be another user."""
    beside = path.with_name(path.name + "-new")
    write(files, beside, data, 0o644)
    files.rename(beside, path)


def write(files: Files, path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file, and sync nothing."""
    descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        write_all(files, descriptor, [data], 0)
    finally:
        files.close(descriptor)


@contextmanager
def locked_in_turn(platform: Platform, path: Path, refusal: str, timeout: float) -> Iterator[None]:
    """Lock a file for a block, after other processes. Blocks; raises as `locked` after `timeout` seconds."""
    deadline, tick = platform.monotonic() + timeout, Event()
    with ExitStack() as resources:
        while True:
            try:
                resources.enter_context(locked(platform.files, path, refusal))
                break
            except JournalLocked:
                if platform.monotonic() >= deadline:
                    raise
            _pause(tick)
        yield


def held(platform: Platform, directory: Path, lock: int) -> JournalLocked:
    """Return the error for a journal that is locked; it names the process and what it does, as far as the system tells.

    Args:
        platform: the surroundings.
        directory: of the journal.
        lock: descriptor of the lock, which is closed after this.
    """
    files, trims = platform.files, directory / TRIM_LOCK
    others = [str(each) for each in files.lockers(lock)]
    who = f"process {' and '.join(others)}" if others else "another process, or this one,"
    does = ""
    try:
        files.lock(lock, shared=True)
    except OSError:
        if files.exists(trims):
            try:
                with locked(files, trims, shared=True):
                    pass
            except JournalLocked:
                does = " and trims it"
    else:
        does = " and reads it"  # locked for writing, it could not be shared
    return JournalLocked(f"{who} has this journal open{does}", path=str(directory), passing=bool(does))


async def until_free(attempt: Callable[[], Awaitable[T]], within: float = 0.0) -> T:
    """Open a journal; again, as long as another process has it open that leaves it soon.

    Args:
        attempt: opens it.
        within: seconds to wait for a program. A process that only reads or trims it is waited for in any case, for `PASSED_WITHIN` seconds.

    Raises:
        JournalLocked: it is still open.
    """
    started = trio.current_time()
    until, told = started + within, ""
    while True:
        try:
            return await attempt()
        except JournalLocked as error:
            now, text = trio.current_time(), str(error)
            if now >= (started + PASSED_WITHIN if error.passing else until):
                raise
            if error.passing:
                until = now + within
            if now - started >= TOLD_AFTER and text != told:
                told = text
                logger.warning("%s; waiting until it is free", text, extra={"event": "journal_waited_for"})
        await trio.sleep(max(LOCKED_PAUSE, (now - started) / 50))


@contextmanager
def locked(files: Files, path: Path, refusal: str = COPIED, *, shared: bool = False) -> Iterator[None]:
    """Lock a file for a block; it is made if it is not there.

    Raises:
        JournalLocked: another process has it locked; `refusal` is the text.
    """
    descriptor = files.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            files.lock(descriptor, shared=shared)
        except OSError as error:
            raise JournalLocked(refusal, path=str(path)) from error
        yield
    finally:
        files.close(descriptor)
