"""The queue of a journal's writes, and the task that hands them to the thread that writes, one after the other.

Appends that come while the disk is busy form the next group. Questions that are `urgent` go before it: some of them make room.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import TypeVar

import trio

from levada.framework import Reply
from levada.framework.platform import Platform

from .appends import Answer, Appends, Told, WriteJob
from .ends import SYNC_EVERY
from .errors import JournalError, JournalFull, bare, fresh
from .extent import Appended, Extent
from .questions import AwaitRows
from .store import Store

__all__ = ["GROUP_BYTES", "JournalWriter", "Queue", "let_askers_come"]

T = TypeVar("T")

logger = logging.getLogger("levada.actors.journal")

GROUP_APPENDS = 4096
"""Most appends that share one sync."""
GROUP_BYTES = 32 << 20
"""Most bytes that share one sync, unless one append is larger."""
QUICK = 0.002
"""Seconds: a disk that took no longer for the last group may hold up a process that has journals only."""
QUICK_BYTES = 64 << 10
"""Most bytes that may do so."""


async def let_askers_come(queue: Collection[object], expected: int) -> None:
    """Wait for askers that got answers to ask again before the next group is written: it halves the number of groups for the same rows."""
    there = 0
    while there < len(queue) < expected:
        there = len(queue)
        for _ in range(3):  # one for the askers, one for a busy actor that they ask, one for the actors below it
            await trio.lowlevel.checkpoint()


class Queue:
    """The writes of a journal that wait."""

    def __init__(self, directory: str, max_waiting: int) -> None:
        self.directory = directory
        self.waiting: deque[WriteJob] = deque()
        """Appends and deliveries, in order."""
        self.urgent: deque[WriteJob] = deque()
        """Questions that go before them."""
        self.waiting_bytes = 0
        """Bytes of the appends that wait."""
        self.full: JournalFull | None = None
        """Why appends wait."""
        self.refused = 0
        """Appends that were refused because too many wait while the journal is full."""
        self._max_waiting = max_waiting
        self._wake = trio.Event()
        self._progress = trio.Event()

    def put(self, job: WriteJob) -> None:
        """Add an append or a delivery, or have it fail."""
        if self.full is not None and not job.waits:
            job.reply.fail(fresh(self.full))
            return
        if self.full is not None and len(self.waiting) >= self._max_waiting:
            self.refused += 1
            what = f"it is full, and {self._max_waiting} appends wait already (max_waiting)"
            job.reply.fail(JournalFull(what, path=self.directory))
            return
        self.waiting.append(job)
        self.waiting_bytes += job.size
        self._wake.set()

    def put_first(self, job: WriteJob) -> None:
        """Add a question that goes before appends and deliveries."""
        self.urgent.append(job)
        self._wake.set()

    def take(self, jobs: Sequence[WriteJob]) -> None:
        """Remove the first appends and deliveries, which are these."""
        for job in jobs:
            self.waiting.popleft()
            self.waiting_bytes -= job.size

    def put_back(self, jobs: Sequence[WriteJob]) -> None:
        """Put appends before all others."""
        self.waiting.extendleft(reversed(jobs))
        self.waiting_bytes += sum(job.size for job in jobs)

    def made_room(self) -> None:
        """Try again, if the journal was full."""
        self.full = None
        self._wake.set()

    def note_progress(self) -> None:
        """Wake all who wait for `progress`."""
        self._progress.set()
        self._progress = trio.Event()

    async def progress(self) -> None:
        """Wait until something has been written."""
        await self._progress.wait()

    async def work(self, seconds: float) -> bool:
        """Wait until there is something new, for so many seconds at most; return whether there is."""
        self._wake = trio.Event()
        with trio.move_on_after(seconds) as waiting:
            await self._wake.wait()
        return not waiting.cancelled_caught

    async def drain(self) -> None:
        """Wait until everything is written, as far as there is room."""
        while self.urgent or (self.waiting and not self.full):
            await self._progress.wait()


class JournalWriter:
    """Hands the writes of a queue to the thread that writes. Its `run` is a task of the journal. It calls `full` when an append has no room."""

    def __init__(
        self,
        platform: Platform,
        queue: Queue,
        store: Store,
        appends: Appends,
        limiter: trio.CapacityLimiter,
        *,
        dedicated: bool,
        full: Callable[[], None],
    ) -> None:
        self.appended = 0
        """Appends that are on the disk."""
        self._run_in_thread = platform.run_in_thread
        self._perf_counter = platform.perf_counter
        self._queue = queue
        self._store = store
        self._appends = appends
        self._limiter = limiter
        self._watchers: list[tuple[AwaitRows, Reply[Extent]]] = []
        self._told = Told(queue.directory)
        self._warned = False
        self._expected = 0
        """Appends that may be there soon: those that waited when the last group was answered, and as many as were answered."""
        self._dedicated = dedicated
        self._full = full
        self._took = math.inf
        """Seconds that the last group took."""

    async def run(self) -> None:
        """Write. Raises if the store is broken: only a new start tells what was committed."""
        queue = self._queue
        while True:
            idle = not queue.urgent and (queue.full or not queue.waiting)
            if idle and not await queue.work(SYNC_EVERY if self._store.unsynced else math.inf):
                await self._run(WriteJob(self._store.sync_ends, self._told))
            # Only the jobs that are there now: tasks that stage block after block would hold up appends forever.
            for _ in range(len(queue.urgent)):
                self._require_whole()
                job = queue.urgent[0]
                if job.reply.wanted:
                    await self._run(job)
                queue.urgent.popleft()
                if not job.size:  # any job may have made room, except staging, which takes some
                    queue.full = None
                queue.note_progress()
            if queue.waiting and not queue.full:
                await (self._run_group() if queue.waiting[0].append is not None else self._run_first())
                self._tell_watchers()
                queue.note_progress()
            self._require_whole()

    def _require_whole(self) -> None:
        """Raise if the store broke behind something that was answered: the next question need not fail for it."""
        if self._store.broken:
            raise JournalError(self._store.broken, path=self._queue.directory)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that writes."""
        return await self._run_in_thread(function, limiter=self._limiter)

    def require_store(self, error: Exception) -> None:
        """Raise an error if the store is broken, so that a new start reads the state from the disk."""
        if self._store.broken:
            raise error

    async def _run(self, job: WriteJob) -> None:
        try:
            assert job.run is not None
            job.reply.send(await self.in_thread(job.run))
        except (JournalError, OSError) as error:
            self._refuse(job, error)

    async def _run_first(self) -> None:
        job = self._queue.waiting[0]
        try:
            if job.reply.wanted and job.run is not None:
                job.reply.send(await self.in_thread(job.run))
        except JournalFull as error:
            if job.waits:
                self._note_full(error)
                return
            self._refuse(job, error)
        except (JournalError, OSError) as error:
            self._refuse(job, error)
        self._queue.take([job])

    def _refuse(self, job: WriteJob, error: Exception) -> None:
        """Fail a question. Raises as `require_store`."""
        if self._store.broken:
            job.reply.fail(fresh(error))
            raise error
        job.reply.fail(bare(error))

    async def _run_group(self) -> None:
        queue = self._queue
        if len(queue.waiting) < self._expected:
            await let_askers_come(queue.waiting, min(self._expected, GROUP_APPENDS))
        jobs: list[WriteJob] = []
        size = 0
        for job in islice(queue.waiting, GROUP_APPENDS):
            size += job.size
            if job.append is None or (jobs and size > GROUP_BYTES):
                break
            jobs.append(job)
        wanted = [job for job in jobs if job.reply.wanted]
        answers: list[tuple[WriteJob, Answer]] = []
        error: Exception | None = None
        if wanted:
            write = functools.partial(self._write, wanted)
            answers, error = (
                write() if self._may_write(wanted) else await self._run_in_thread(write, limiter=self._limiter)
            )
        queue.take(jobs)
        if len(answers) < len(wanted):  # the others wait for room
            answered = {job for job, _ in answers}
            left = [job for job in wanted if job not in answered]
            if isinstance(error, JournalFull):
                for job in left:
                    if not job.waits:
                        job.reply.fail(fresh(error))
                left = [job for job in left if job.waits]
            queue.put_back(left)
        done = 0
        for job, answer in answers:
            if isinstance(answer, Exception):
                job.reply.fail(answer if answer is error else bare(answer))  # the writer may raise its own
            else:
                job.reply.send(answer)
                done += isinstance(answer, Appended)
        self._expected = len(queue.waiting) + len(answers)
        if done:
            self.appended += done
            self._warned = False
        if isinstance(error, JournalFull):
            self._note_full(error)
        elif error is not None:
            self.require_store(error)

    def _may_write(self, jobs: Sequence[WriteJob]) -> bool:
        """Return whether this thread may write a group itself: an append that comes alone, if that may hold it up and costs less."""
        # A third of the time that a command to a durable actor took went to the change of threads.
        return (
            self._dedicated
            and len(jobs) == 1
            and self._expected <= 1
            and not self._limiter.borrowed_tokens
            and jobs[0].size <= QUICK_BYTES
            and self._took <= QUICK
        )

    def _write(self, jobs: Sequence[WriteJob]) -> tuple[list[tuple[WriteJob, Answer]], Exception | None]:
        start = self._perf_counter()
        try:
            return self._appends.write(jobs)
        finally:
            self._took = self._perf_counter() - start

    def _note_full(self, error: JournalFull) -> None:
        self._queue.full = error
        self._full()
        if not self._warned:
            logger.warning("%s: appends wait: %s", self._queue.directory, error.detail, extra={"event": "journal_full"})
            self._warned = True

    @property
    def readers_waiting(self) -> int:
        """Questions that wait for rows."""
        return sum(reply.wanted for _, reply in self._watchers)

    def watch(self, question: AwaitRows, reply: Reply[Extent]) -> None:
        """Answer a question when the rows that it waits for are there."""
        self._watchers = [each for each in self._watchers if each[1].wanted]
        self._watchers.append((question, reply))

    def _tell_watchers(self) -> None:
        if self._watchers:
            extent, waiting = self._store.extent(), self._watchers
            self._watchers = [each for each in waiting if not each[0].reached(extent)]
            for question, reply in waiting:
                if question.reached(extent):
                    reply.send(extent)
