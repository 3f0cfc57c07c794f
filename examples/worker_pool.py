"""Workers that come and go over a network, and a pool that loses no job: nothing but channels in messages.

A worker connects and sends along a sender that leads to it: whoever holds it may give the worker jobs.  Each job carries a sender of its
own for the one result.  So the pool needs no numbers, no timeouts and no heartbeats: a job whose channel ends without a result was not
done, whatever became of the worker, and goes back into the queue.
"""

from __future__ import annotations

import trio

from levada.actors.aqueduct import connect, serve
from levada.framework import ActorSystem, OneshotSender, Sender, TerminalState, channel, message, oneshot
from levada.framework.errors import ChannelError

NUMBERS = range(60)


@message("pool.Job")
class Job:
    number: int
    result: OneshotSender[int]
    """Used once, or given up."""


@message("pool.Join")
class Join:
    name: str
    jobs: Sender[Job]
    """The pool sends on it; it ends when there are no more, or when the worker is gone."""


class Pool:
    """Gives each worker one job at a time."""

    def __init__(self) -> None:
        self.put, self.queue = channel(int)
        for number in NUMBERS:
            self.put.send_nowait(number)
        self.results: dict[int, int] = {}
        self.given_back: list[str] = []
        self.lost: list[str] = []

    async def employ(self, m: Join) -> None:
        """Handle a worker's message; as long as the worker is there this task is its own."""
        with m.jobs as jobs:
            async for number in self.queue:
                send_result, result = oneshot(int)
                with send_result, result:
                    try:
                        await jobs.send(Job(number, send_result))
                        self.results[number] = await result
                    except ChannelError:
                        self.given_back.append(m.name)
                        await self.put.send(number)
                if len(self.results) == len(NUMBERS):
                    self.put.finish_nowait()  # ends the loops of all workers
                if jobs.state is not TerminalState.OPEN:
                    self.lost.append(m.name)
                    return


class Crash(Exception):
    pass


async def work(system: ActorSystem, url: str, name: str) -> None:
    """Work until there are no more jobs. Bob breaks down in his third, and Cyd refuses every tenth."""
    async with connect(system, url, Join) as peer:
        jobs, inbox = channel(Job)
        await peer.send(Join(name, jobs))
        count = 0
        with inbox:
            async for job in inbox:
                with job.result:
                    count += 1
                    await trio.sleep(0.001)
                    if name == "Bob" and count == 3:
                        raise Crash
                    if name == "Cyd" and count % 10 == 0:
                        job.result.cancel()
                    else:
                        job.result.send(job.number**2)


async def work_or_break(system: ActorSystem, url: str, name: str) -> None:
    try:
        await work(system, url, name)
    except Crash:
        pass  # its connection was closed at once; nobody told the pool


async def main() -> None:
    pool = Pool()
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://pool", pool.employ, Join) as listener,
        trio.open_nursery() as nursery,
    ):
        for name in ("Ada", "Bob", "Cyd"):
            nursery.start_soon(work_or_break, system, listener.url, name)
    assert pool.results == {number: number**2 for number in NUMBERS}
    assert pool.lost == ["Bob"]
    assert pool.given_back.count("Bob") == 1
    assert pool.given_back.count("Cyd") == len(pool.given_back) - 1 >= 1
    print(f"{len(pool.results)} jobs done; Bob was lost at work, and what he and Cyd did not do was done by others")


if __name__ == "__main__":
    trio.run(main)
