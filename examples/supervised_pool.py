"""A crew that crashes on purpose and recovers: workers of a pool are started anew, with growing pauses between restarts.

A worker's handler simply raises.  What follows is not its business: the pool was given a restart policy, so the runtime makes a new object
for the worker, with the same ref and the same mailbox.  The job on which it failed is dropped (delivery is at most once) and given to
`restarting`, which here hands it back to the foreman, who tries it again or gives it up.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import trio

from levada.framework import Actor, ActorSystem, Asks, Ref, Reply, bounded, handles, message, restart
from levada.framework.router import pool, pull

JOBS = range(1, 201)
TRIES = 3


@message
class Job:
    number: int
    tries: int = 1


@message
class Done:
    job: Job


@message
class Crashed:
    job: Job


@message
class Work(Asks["Outcome"]):
    """Do all jobs; answered when each is done or given up."""


@attrs.frozen
class Outcome:
    done: list[int]
    given_up: list[int]


class Worker(Actor[Job]):
    foreman: Ref[Done | Crashed | Work]

    @handles
    async def work(self, m: Job) -> None:
        await trio.sleep(0.001)
        if m.number % 50 == 13:
            raise RuntimeError(f"job {m.number} cannot be done")
        if m.number % 7 == 0 and m.tries == 1:
            raise RuntimeError(f"job {m.number} fails the first time")
        self.foreman.tell(Done(m))

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.foreman.tell(Crashed(message))


class Foreman(Actor[Done | Crashed | Work]):
    def started(self) -> None:
        self.done: list[int] = []
        self.given_up: list[int] = []
        # The first restart of a worker is at once; the pauses before the next ones double from 1 ms to 20 ms.
        policy = restart(max=100, within=10.0, initial_backoff=0.001, max_backoff=0.02)
        crew = pool(Worker, self.ref, size=4, routing=pull(), supervise=policy)
        self.crew = self.spawn(crew, name="crew", mailbox=bounded(8))
        self.reply: Reply[Outcome]

    @handles
    def work(self, m: Work) -> None:
        self.reply = self.reply_later()
        self.start_soon(self.hand_out)

    async def hand_out(self) -> None:
        for number in JOBS:
            await self.crew.send(Job(number))  # waits while eight jobs are waiting

    @handles
    def note(self, m: Done) -> None:
        self.done.append(m.job.number)
        self.answer_if_over()

    @handles
    async def try_again(self, m: Crashed) -> None:
        if m.job.tries < TRIES:
            await self.crew.send(Job(m.job.number, m.job.tries + 1))
        else:
            self.given_up.append(m.job.number)
            self.answer_if_over()

    def answer_if_over(self) -> None:
        if len(self.done) + len(self.given_up) == len(JOBS):
            self.reply.send(Outcome(sorted(self.done), sorted(self.given_up)))


async def main() -> None:
    # Each crash is logged with its traceback, as it should be; here they are on purpose.
    logging.getLogger("levada").setLevel(logging.CRITICAL)
    async with ActorSystem() as system:
        foreman = system.spawn(Foreman, name="foreman")
        outcome = await foreman.ask(Work(), timeout=60)
        crashes = system.statistics().failures
    hopeless = [number for number in JOBS if number % 50 == 13]
    assert outcome == Outcome([number for number in JOBS if number not in hopeless], hopeless)
    # 28 jobs fail at first, one of which is among the four that fail three times.
    assert crashes == 27 + 4 * TRIES
    print(f"{len(outcome.done)} jobs done, {outcome.given_up} given up after {TRIES} tries, {crashes} crashes survived")


if __name__ == "__main__":
    trio.run(main)
