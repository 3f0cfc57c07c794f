"""Virtual time and what is outside of it: threads that work, sockets on which a peer may send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
import trio.testing

from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.framework.handlers import blocking
from levada.framework.testing import autojump

T = TypeVar("T")
WEEK = 7 * 86_400.0


class Waits(trio.abc.Instrument):
    """Calls a function once, when trio has nothing to run for the third time, or would wait for more than `longer` seconds."""

    def __init__(self, function: Callable[[], object], *, longer: float | None = None) -> None:
        self.timeouts: list[float] = []
        self._function = function
        self._longer = longer

    def before_io_wait(self, timeout: float) -> None:
        self.timeouts.append(timeout)
        if len(self.timeouts) == 3 if self._longer is None else timeout > self._longer:
            trio.lowlevel.remove_instrument(self)
            self._function()


@message("test.clock.work")
class Work(Asks[int]):
    done: threading.Event


class Worker(Actor[Work]):
    @handles
    @blocking
    def work(self, m: Work) -> int:
        return 7 if m.done.wait(60) else 0


async def after_a_week(clock: trio.abc.Clock, happened: list[str]) -> None:
    await trio.sleep(WEEK)
    happened.append("a week")


def run(main: Callable[[], Awaitable[T]], threshold: float) -> T:
    """Run with a clock made in this thread: the oldest trio takes its threshold for that of the run it is made in."""
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=threshold))


@pytest.mark.parametrize("way", ["to_thread", "blocking"])
@pytest.mark.parametrize("threshold", [0.0, 30.0])
async def test_time_stands_still_while_a_thread_works(way: str, threshold: float) -> None:
    happened: list[str] = []

    async def main() -> tuple[float, float]:
        done = threading.Event()
        async with ActorSystem() as system, trio.open_nursery() as nursery:
            worker = system.spawn(Worker)
            nursery.start_soon(after_a_week, trio.lowlevel.current_clock(), happened)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(Waits(done.set))
            found = await (worker.ask(Work(done)) if way == "blocking" else trio.to_thread.run_sync(done.wait, 60))
            happened.append(f"the thread: {found}")
            answered = trio.current_time()
        return answered, trio.current_time()

    assert await trio.to_thread.run_sync(run, main, threshold) == (0.0, WEEK)
    assert happened == [f"the thread: {7 if way == 'blocking' else True}", "a week"]


async def test_autojump_needs_no_system_to_wait_for_threads() -> None:
    happened: list[str] = []

    async def main() -> None:
        done = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(after_a_week, trio.lowlevel.current_clock(), happened)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(Waits(done.set))
            happened.append(f"the thread: {await trio.to_thread.run_sync(done.wait, 60)}")

    await trio.to_thread.run_sync(lambda: trio.run(main, clock=autojump()))
    assert happened == ["the thread: True", "a week"]


async def test_a_threshold_is_kept_while_a_task_waits_for_a_socket() -> None:
    """A peer may send: the clock waits as long as its maker wanted, and jumps at once when no task waits for it."""
    ours, theirs = socket.socketpair()

    async def main() -> tuple[float, float, list[float]]:
        waits = Waits(lambda: theirs.send(b"x"), longer=0.1)
        async with ActorSystem(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, WEEK)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(waits)
            with trio.socket.from_stdlib_socket(ours) as there:
                assert await there.recv(1) == b"x"
            came = trio.current_time()
        return came, trio.current_time(), waits.timeouts

    came, ended, timeouts = await trio.to_thread.run_sync(run, main, 0.2)
    theirs.close()
    assert (came, ended, timeouts[-1]) == (0.0, WEEK, 0.2)


async def test_a_clock_that_does_not_jump_is_left_alone(mock_clock: trio.testing.MockClock) -> None:
    async with ActorSystem() as system:
        assert mock_clock.autojump_threshold == float("inf")
        before = system.platform.time()
        mock_clock.jump(WEEK)
        assert system.platform.time() - before == pytest.approx(WEEK)


def test_the_surroundings_end_with_the_system() -> None:
    from levada.framework.platform import PLATFORM, REAL

    async def main() -> None:
        async with ActorSystem() as system:
            assert PLATFORM.get() is system.platform is not REAL
        assert PLATFORM.get() is REAL

    trio.run(main, clock=autojump())
