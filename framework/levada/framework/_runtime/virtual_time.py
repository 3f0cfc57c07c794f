"""Systems under a clock of tests, trio's `MockClock`: their time is its time, and it stands still while a thread works."""

from __future__ import annotations

import sys
from math import inf
from time import sleep
from typing import TYPE_CHECKING, Final, cast

import attrs
import trio

from levada.framework.platform import PLATFORM, REAL, Platform

if TYPE_CHECKING:
    from trio.testing import MockClock

__all__ = ["is_stuck", "platform_of_run", "virtual_time", "wait_for_threads"]


def virtual_time(clock: trio.abc.Clock, *, since: float) -> Platform:
    """Make surroundings that take the time from a clock of tests, with `since` as the time now; all else is real."""
    before = since - clock.current_time()
    return attrs.evolve(REAL, time=lambda: before + clock.current_time(), virtual=True, monotonic=clock.current_time)


_LOOK_EVERY: Final = 0.0001
"""Seconds between looks at threads that work, while all tasks wait."""


def platform_of_run() -> Platform:
    """Return the surroundings for a system that starts now. If trio's clock is one of tests, it waits for threads from now on."""
    found = PLATFORM.get()
    clock = trio.lowlevel.current_clock()
    testing = sys.modules.get("trio.testing")  # a program that does not test does not load it
    if testing is None or not isinstance(clock, testing.MockClock):
        return found
    wait_for_threads(cast("MockClock", clock))
    return virtual_time(clock, since=REAL.time()) if found is REAL else found


def wait_for_threads(clock: MockClock) -> None:
    """Make a clock that jumps wait while a thread of trio works.

    It then jumps at once, whatever its threshold: only a task that waits for a socket has the clock wait for so long, since a peer may wake it.
    """
    from trio.testing import active_thread_count

    jump, threshold = clock._autojump, clock.autojump_threshold
    if threshold == inf or hasattr(jump, "waits_for_threads"):
        return

    def autojump() -> None:
        if active_thread_count():
            sleep(_LOOK_EVERY)
        elif clock.autojump_threshold < threshold and _waits_for_files():
            clock.autojump_threshold = threshold
        else:
            jump()
            clock.autojump_threshold = 0

    autojump.waits_for_threads = True  # type: ignore[attr-defined]
    clock._autojump = autojump  # type: ignore[method-assign]
    clock.autojump_threshold = 0


def is_stuck() -> bool:
    """Return whether nothing will wake a task: there is no deadline, no thread works, and no task waits for a file."""
    from trio.testing import active_thread_count

    deadline = trio.lowlevel.current_statistics().seconds_to_next_deadline
    return deadline == inf and not active_thread_count() and not _waits_for_files()


def _waits_for_files() -> bool:
    """Return whether a task waits for a file descriptor, besides the one by which threads wake trio."""
    found = trio.lowlevel.current_statistics().io_statistics
    return getattr(found, "tasks_waiting_read", 2) + getattr(found, "tasks_waiting_write", 0) > 1
