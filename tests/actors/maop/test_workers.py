"""The tasks that run handlers: one runs all that do not wait, and who waits holds up nobody."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Awaitable, Callable

import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.maop.workers import MAX_IDLE, SLICE, Worker, Workers

SEEN: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


class Job:
    """Notes its number and task, then does what it is told."""

    def __init__(self, log: list[tuple[int, trio.lowlevel.Task]], number: int, then: Callable[[], Awaitable[None]]):
        self.worker: Worker | None = None
        self.log = log
        self.number = number
        self.then = then
        self.ended = ""

    async def run(self) -> None:
        assert SEEN.get() == 0
        SEEN.set(self.number)
        self.log.append((self.number, trio.lowlevel.current_task()))
        try:
            await self.then()
            assert SEEN.get() == self.number
            self.ended = "done"
        except trio.Cancelled:
            self.ended = "cancelled"
            raise
        finally:
            self.worker = None


async def nothing() -> None:
    pass


async def test_jobs_that_do_not_wait_share_a_task_and_no_context() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        jobs = [Job(log, n, nothing) for n in range(1, 11)]
        for job in jobs:
            workers.begin(job)
        await wait_all_tasks_blocked()
        workers.begin(Job(log, 11, nothing))
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        workers.close()
    assert [number for number, _ in log] == list(range(1, 12))
    assert len({task for _, task in log}) == 1
    assert {job.ended for job in jobs} == {"done"}


async def test_a_job_that_waits_holds_up_nobody() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    gate = trio.Event()
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        waiting = [Job(log, 1, gate.wait), Job(log, 2, trio.lowlevel.checkpoint), Job(log, 3, gate.wait)]
        others = [Job(log, n, nothing) for n in (4, 5)]
        for job in waiting + others:
            workers.begin(job)
        await wait_all_tasks_blocked()
        assert [number for number, _ in log] == [1, 2, 3, 4, 5]
        assert [job.ended for job in waiting + others] == ["", "done", "", "done", "done"]
        gate.set()
        await wait_all_tasks_blocked()
        assert [job.ended for job in waiting] == ["done"] * 3
        workers.close()


async def test_the_scope_of_a_worker_ends_its_job_only() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        jobs = [Job(log, n, trio.sleep_forever) for n in (1, 2, 3)]
        for job in jobs:
            workers.begin(job)
        await wait_all_tasks_blocked()
        assert jobs[1].worker is not None
        jobs[1].worker.scope.cancel()
        await wait_all_tasks_blocked()
        assert [job.ended for job in jobs] == ["", "cancelled", ""]
        last = Job(log, 4, trio.lowlevel.checkpoint)
        workers.begin(last)
        await wait_all_tasks_blocked()
        assert last.ended == "done"
        nursery.cancel_scope.cancel()
    assert [job.ended for job in jobs] == ["cancelled"] * 3


async def test_a_job_that_is_cancelled_without_waiting_takes_no_other_with_it() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []

    async def cancels_itself() -> None:
        assert jobs[0].worker is not None
        jobs[0].worker.scope.cancel()

    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        jobs = [Job(log, 1, cancels_itself), Job(log, 2, trio.lowlevel.checkpoint)]
        for job in jobs:
            workers.begin(job)
        await wait_all_tasks_blocked()
        assert [job.ended for job in jobs] == ["done", "done"]
        assert log[0][1] is not log[1][1]
        workers.close()


async def test_a_job_that_has_not_begun_can_be_withdrawn() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        first, second = Job(log, 1, trio.sleep_forever), Job(log, 2, nothing)
        workers.begin(first)
        workers.begin(second)
        assert workers.withdraw(second)
        assert not workers.withdraw(second)
        await wait_all_tasks_blocked()
        assert not workers.withdraw(first)
        assert [number for number, _ in log] == [1]
        nursery.cancel_scope.cancel()


async def test_others_have_their_turn_between_many_jobs() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    seen: list[int] = []

    async def other() -> None:
        while len(log) < 10 * SLICE:
            await trio.lowlevel.checkpoint()
            seen.append(len(log))

    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        nursery.start_soon(other)
        for n in range(1, 10 * SLICE + 1):
            workers.begin(Job(log, n, nothing))
        await wait_all_tasks_blocked()
        workers.close()
    steps = [b - a for a, b in itertools.pairwise(seen)]
    assert max(steps) <= 2 * SLICE


async def test_only_so_many_tasks_wait_for_work() -> None:
    log: list[tuple[int, trio.lowlevel.Task]] = []
    gate = trio.Event()
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery)
        for n in range(1, MAX_IDLE + 20):
            workers.begin(Job(log, n, gate.wait))
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) >= MAX_IDLE + 19
        gate.set()
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == MAX_IDLE
        workers.close()
