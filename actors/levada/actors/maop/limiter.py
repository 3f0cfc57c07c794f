"""The limiter: bounds how many operations run at once over all connections, and picks the next one. Source: MA-117."""

from __future__ import annotations

from typing import Any, Protocol

import trio

from levada.framework import Actor
from levada.transports.maop import FairQueue

__all__ = ["Limited", "Limiter"]


class Limited(Protocol):
    """An object that waits for a place."""

    def begin(self) -> None:
        """Use the place; `Limiter.done` gives it back."""
        ...


class Limiter(Actor[Any]):
    """Gives places to jobs by priority class and age. There is one limiter per listener or client.

    Others call it directly: its work is too short for a message.
    """

    max_running: int

    def __attrs_post_init__(self) -> None:
        self.running = 0
        """Places in use."""
        self._queue: FairQueue[Limited] = FairQueue()

    @property
    def waiting(self) -> int:
        """Jobs without a place."""
        return len(self._queue)

    def submit(self, job: Limited, priority: int, size: int) -> None:
        """Begin a job, now or when its turn comes.

        Args:
            job: begins when it has a place.
            priority: 0 (first) to 255.
            size: the job's cost, see `FairQueue.push`.
        """
        if self.running < self.max_running:
            self.running += 1
            job.begin()
        else:
            self._queue.push(job, priority, size, trio.current_time())

    def withdraw(self, job: Limited) -> bool:
        """Forget a waiting job; return whether it was waiting."""
        return self._queue.remove(job)

    def done(self) -> None:
        """Give a place back, and let the next job begin."""
        self.running -= 1
        while self._queue.waiting and self.running < self.max_running:
            job = self._queue.pop(trio.current_time())
            if job is None:
                return
            self.running += 1
            job.begin()
