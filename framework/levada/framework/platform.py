"""What a process takes from its surroundings: clocks, random bytes, files, threads, its names.

What reads a clock or starts a thread through the `Platform` of the context runs in other surroundings unchanged: in virtual time, or simulated.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from .files import Files

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["PLATFORM", "REAL", "Platform", "RunInThread"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class RunInThread(Protocol):
    """Calls a function in a thread, as `trio.to_thread.run_sync` does."""

    def __call__(
        self,
        function: Callable[[Unpack[Ts]], R],
        /,
        *arguments: *Ts,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> Awaitable[R]:
        """Call it and wait for its result. Cancellation waits for it too, or with `abandon_on_cancel` leaves it alone."""


def _thread_pool(threads: int, name: str) -> Executor:
    from concurrent.futures import ThreadPoolExecutor  # programs that need none need not load it

    return ThreadPoolExecutor(threads, name)


@attrs.frozen(kw_only=True, eq=False)
class Platform:
    """The surroundings of a process: by default the real ones. All functions but `run_in_thread` may be called in any thread."""

    time: Callable[[], float] = time
    """Returns the seconds since 1970, on a clock that may be set."""
    virtual: bool = False
    """Whether time is virtual: it passes when everything waits, so what waits for a time does not look at the world at intervals."""
    monotonic: Callable[[], float] = monotonic
    """Returns the seconds since some moment, on a clock that is never set."""
    perf_counter: Callable[[], float] = perf_counter
    """Returns the seconds since some moment, on the finest clock, to measure work."""
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    """Returns so many random bytes, which no peer can guess."""
    files: Files = attrs.field(factory=Files)
    run_in_thread: RunInThread = trio.to_thread.run_sync
    thread_pool: Callable[[int, str], Executor] = _thread_pool
    """Makes so many threads at most, whose names begin so, for what blocks and is done at once: syncs of many files. Shutting it down ends them."""
    pid: Callable[[], int] = os.getpid
    """Returns the number of the process."""
    host: Callable[[], str] = socket.gethostname
    """Returns the name of the machine."""


REAL: Final = Platform()

PLATFORM: Final[ContextVar[Platform]] = ContextVar("levada_platform", default=REAL)
"""The surroundings of this process."""
