"""The limiter: how many operations are at work at once, and which of those that wait, over all connections, is next. Source: MA-117."""

from __future__ import annotations

from typing import Any, Protocol

import trio

from levada.framework import Actor
from levada.transports.maop import FairQueue

__all__ = ["Job", "Limiter"]


class Job(Protocol):
    """Something that wants a place."""

    def begin(self) -> None:
        """Begin; `Limiter.done` gives the place back."""
        ...


class Limiter(Actor[Any]):
    """Hands out places at work by class of priority and age: one for each listener, or client.

    Others call it directly: what it does is too short for a message.
    """

    max_running: int

    def __attrs_post_init__(self) -> None:
        self.running = 0
        """Places in use."""
        self._queue: FairQueue[Job] = FairQueue()

    @property
    def waiting(self) -> int:
        """Jobs without a place."""
        return len(self._queue)

    def submit(self, job: Job, priority: int, octets: int) -> None:
        """Let a job begin, now or when it is its turn.

        Args:
            job: what begins.
            priority: 0 (first) to 255.
            octets: what it costs, see `FairQueue.push`.
        """
        if self.running < self.max_running:
            self.running += 1
            job.begin()
        else:
            self._queue.push(job, priority, octets, trio.current_time())

    def withdraw(self, job: Job) -> bool:
        """Forget a job that waits; say whether it did."""
        return self._queue.remove(job)

    def done(self) -> None:
        """A place is free."""
        self.running -= 1
        while self._queue.waiting and self.running < self.max_running:
            job = self._queue.pop(trio.current_time())
            if job is None:
                return
            self.running += 1
            job.begin()
