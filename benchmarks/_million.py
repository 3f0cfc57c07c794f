"""Many idle actors at once: ``python -m benchmarks._million 1000000``, from the root of the checkout; prints one line of JSON.

Garbage collection stays on: with a million objects alive it is part of their cost.
"""

from __future__ import annotations

import json
import os
import sys
import time

import trio

from levada.framework import Actor, ActorSystem, Asks, handles, message

__all__: list[str] = []


@message
class Hello:
    pass


@message
class Done(Asks[int]):
    pass


class Idler(Actor[Hello | Done]):
    @handles
    def hello(self, m: Hello) -> None:
        pass

    @handles
    def done(self, m: Done) -> int:
        return 1


def resident() -> int:
    """Bytes of memory that this process has now (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def main(n: int) -> dict[str, float]:
    clock = time.perf_counter
    async with ActorSystem() as system:
        before, start = resident(), clock()
        idlers = [system.spawn(Idler) for _ in range(n)]
        spawned, octets = clock(), resident() - before
        hello = Hello()
        for idler in idlers:
            idler.tell(hello)
        told = clock()
        # The oldest message first: when the last one is handled, all are.
        await idlers[-1].ask(Done(), timeout=None)
        handled = clock()
        for idler in idlers:
            idler.stop()
        await idlers[-1].terminated()
        stopped = clock()
        assert system.statistics().actors == 0
    return {
        "spawn": (spawned - start) / n * 1e9,
        "bytes": octets / n,
        "tell": (handled - spawned) / n * 1e9,
        "told": (told - spawned) / n * 1e9,
        "stop": (stopped - handled) / n * 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(trio.run(main, int(sys.argv[1]))))
