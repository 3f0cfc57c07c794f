"""The signals of long-running commands: some end the command, others request something of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["COUNT", "ENDS", "RELOAD", "Terminal", "late_ones_dropped", "third_one_exits"]

ENDS = (signal.SIGINT, signal.SIGTERM)
# Windows has neither, and no signal has the number 0.
COUNT = getattr(signal, "SIGUSR1", 0)
RELOAD = getattr(signal, "SIGHUP", 0)


class Terminal:
    """The terminal that a command began on, if any. When it is closed the kernel sends SIGHUP, and Ctrl-C cannot end the command any more.

    Args:
        number: a file descriptor that may be of a terminal.
    """

    def __init__(self, number: int = 2) -> None:
        self._number = number
        self._was_open = os.isatty(number)

    @property
    def closed(self) -> bool:
        """Whether there was a terminal, and is none."""
        return self._was_open and not os.isatty(self._number)


@contextmanager
def late_ones_dropped(*wishes: int) -> Iterator[list[int]]:
    """Yield the signals to listen for, and drop requests that arrive after the listener has ended. For use around ``trio.run``.

    trio raises signals again that its receiver did not hand out, and by default a request (`COUNT`, `RELOAD`) would kill a program that is
    about to exit with its own code. A request can arrive after a SIGTERM that was sent later, because any thread may receive either.

    Args:
        wishes: the requests that the program knows; 0 is ignored.
    """
    wanted = [number for number in wishes if number]
    before = [(number, signal.signal(number, _drop)) for number in wanted]
    try:
        yield [*ENDS, *wanted]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def third_one_exits() -> Iterator[None]:
    """While the block lasts, the third signal of `ENDS` ends the process at once, with exit code 1. For use inside trio's signal receiver.

    Python calls this handler even while a handler of an actor, or an app, holds up trio's loop.
    """
    times = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        if times == 3:
            os._exit(1)  # a thread cannot be cancelled, and Python would wait for it
        before[number](number, frame)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        signal.signal(number, count)
    try:
        yield
    finally:
        for number in ENDS:
            signal.signal(number, before[number])


def _drop(number: int, frame: object) -> None:
    """Do nothing. With ``SIG_IGN``, Python would warn about a signal that arrives while handlers change."""
