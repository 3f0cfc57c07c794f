"""Virtual time, and a seed for trio's order of tasks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import trio
from trio.testing import MockClock, active_thread_count

from levada.framework._runtime.scheduler import SLICE
from levada.framework._runtime.virtual_time import is_stuck, virtual_time, wait_for_threads
from levada.framework.platform import Platform

__all__ = ["CountingClock", "autojump", "counted_time", "deterministic", "unshield", "watch"]

_BEGIN: Final = 1_600_000_000.0
"""The first second since 1970 of a run that a seed repeats."""


def autojump() -> MockClock:
    """Make a clock that jumps to the next deadline as soon as every task waits and no thread of trio works; starts at 0.0.

    In a pytest-trio test the fixture ``autojump_clock`` is the same, from the first `ActorSystem` on: a system makes each `MockClock`
    wait for threads.

    Example:
        >>> import trio
        >>> from levada.framework import ActorSystem
        >>> async def main() -> None:
        ...     async with ActorSystem():
        ...         await trio.sleep(3600)
        ...         print(trio.current_time())
        >>> trio.run(main, clock=autojump())
        3600.0
    """
    clock = MockClock(autojump_threshold=0)
    wait_for_threads(clock)
    return clock


def watch(due: Callable[[], float], wake: Callable[[], None], stuck: Callable[[], None]) -> None:
    """Make the clock of this run, which jumps, wait for more than the deadlines of trio.

    Args:
        due: returns the time of something else that comes; `inf` for nothing.
        wake: called at that time, when every task waits: it lets a task run.
        stuck: called when nothing will wake a task any more: there is nothing to jump to.
    """
    clock: Any = trio.lowlevel.current_clock()
    run: Any = trio._core._run
    jump, next_deadline = clock._autojump, run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline
    # A clock that only jumps: its own method reads the real time as well, and multiplies it by 0.
    clock.current_time = lambda: clock._virtual_base

    def step() -> None:
        before, coming = clock.current_time(), due()
        if coming < math.inf and not active_thread_count():
            wait = coming - before
            if wait <= next_deadline() - before:
                clock.jump(max(0.0, wait))
                wake()
                return
        jump()
        if clock.current_time() == before and is_stuck():
            stuck()

    step.waits_for_threads = True  # type: ignore[attr-defined]
    clock._autojump = step


def unshield() -> None:
    """Take the shields from all cancel scopes of this run, so that cancelled tasks end."""
    run: Any = trio._core._run
    for task in run.GLOBAL_RUN_CONTEXT.runner.tasks:
        status: Any = task._cancel_status
        while status is not None:
            status._scope.shield = False
            status = status._parent


class CountingClock:
    """Replaces ``time.perf_counter``: each reading is a step forward, so slices end by count, not by time."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._now = 0.0

    def __call__(self) -> float:
        """Advance by a random part of half a slice."""
        self._now += self._random.random() * SLICE / 2
        return self._now


def counted_time(rng: random.Random, counter: Callable[[], float] | None = None) -> Platform:
    """Make surroundings that a seed decides: the time is trio's, work is measured by a `CountingClock` or `counter`, and `rng` makes bytes."""
    return attrs.evolve(
        virtual_time(trio.lowlevel.current_clock(), since=_BEGIN),
        perf_counter=CountingClock(rng) if counter is None else counter,
        process_time=lambda: 0.0,
        token_bytes=rng.randbytes,
    )


@contextlib.contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Make trio order its tasks by `seed`; restore its state at the end. Raises `RuntimeError` if this trio does not support it."""
    run: Any = trio._core._run
    if not hasattr(run, "_r") or not hasattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING"):
        raise RuntimeError(
            f"trio {trio.__version__} offers no way to repeat its order of tasks; seeds need a trio that hypothesis can steer (0.27 to 0.35 can)"
        )
    before = run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, run.CancelStatus, getattr(run, "id", id)
    collects = gc.isenabled()
    run._r.seed(seed)
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    # Otherwise the tasks of a scope are cancelled in the order of their addresses, and so are scopes with the same deadline.
    numbers = itertools.count()
    run.CancelStatus, run.id = _in_order(run.CancelStatus), lambda _: next(numbers)
    # A collection depends on the number of objects made, also by earlier tests; finalisers may wake tasks.
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        run._r.setstate(before[0])
        run._ALLOW_DETERMINISTIC_SCHEDULING, run.CancelStatus, run.id = before[1:]


class _Ordered(dict[Any, None]):
    """A set that is read in the order of its additions."""

    def add(self, each: Any) -> None:
        self[each] = None

    def remove(self, each: Any) -> None:
        del self[each]


def _in_order(status: Any) -> Any:
    """Return trio's class for the tasks and scopes in a cancel scope, which here have the order in which they came."""

    class InOrder(status):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self._children, self._tasks = _Ordered(), _Ordered()

    return InOrder
