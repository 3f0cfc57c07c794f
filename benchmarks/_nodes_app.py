"""The actors and processes of ``levada bench nodes``.

`app` runs on its nodes; ``python -m benchmarks._nodes_app bare LOOPS JOBS`` does jobs without levada when it is told to on standard input;
``… quic FOLDER`` serves an `Echo` over QUIC.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from levada.actors.aqueduct import PeerConfig, serve
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message
from levada.transports.quic import QuicConfig

__all__ = ["Asker", "Burn", "Burner", "Echo", "Measure", "Ping", "app", "burn", "time_asks"]


@message("bench.nodes.Burn", frozen=True)
class Burn(Asks[int]):
    """Compute for a while."""

    loops: int


@message("bench.nodes.Ping", frozen=True)
class Ping(Asks[int]):
    """Ask for the same number."""

    number: int


@message("bench.nodes.Measure", frozen=True)
class Measure(Asks[float]):
    """Ask how many seconds an ask takes."""

    whom: Ref[Ping]
    count: int
    at_once: int


_POWER, _MODULUS = (1 << 61) - 1, (1 << 521) - 1


def burn(loops: int) -> int:
    """Keep a core busy with powers of large numbers: the same loop of small ones is 5 % faster or slower in each process, by chance."""
    total = 3
    for number in range(loops):
        total = pow(total + number, _POWER, _MODULUS)
    return total & 0xFFFFFFFF


async def time_asks(whom: Ref[Ping], count: int, at_once: int) -> float:
    """Ask so often, so many at a time; return the seconds of one ask."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            assert await whom.ask(Ping(number)) == number

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(some)
    return (time.perf_counter() - start) / count


class Burner(Actor[Burn]):
    """Computes."""

    @handles
    def work(self, m: Burn) -> int:
        """Compute, and answer with the result."""
        return burn(m.loops)


class Echo(Actor[Ping]):
    """Answers."""

    @handles
    def answer(self, m: Ping) -> int:
        """Answer."""
        return m.number


class Asker(Actor[Measure]):
    """Asks another actor, to measure that."""

    @handles
    async def measure(self, m: Measure) -> float:
        """Measure, after some asks that do not count."""
        await time_asks(m.whom, m.count // 10, m.at_once)
        return await time_asks(m.whom, m.count, m.at_once)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Run on nodes, which get their actors from the driver."""
    yield


async def _ignore(m: Any) -> None:
    """Take no messages but lookups."""


async def _quic(folder: Path) -> None:
    carrier = QuicConfig(certificate=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    async with ActorSystem() as system:
        system.registry.register("echo", system.spawn(Echo))
        config = PeerConfig(carrier=carrier)
        async with serve(system, "aqueduct://127.0.0.1:0", _ignore, Any, config=config, expose={"echo"}) as listener:
            print(listener.url, flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)


def _bare(loops: int, jobs: int) -> None:
    burn(loops)
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(jobs):
            burn(loops)
        print("done", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare", loops, jobs]:
            _bare(int(loops), int(jobs))
        case ["quic", folder]:
            trio.run(_quic, Path(folder))
