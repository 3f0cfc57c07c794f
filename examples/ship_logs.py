"""Logs from files to a reader that is killed and comes back, while the logs are rotated: every line arrives.

::

    access.log ──tail──> writer ══Lumberjack══> reader ──Unit──> Ledger (an actor)

The ledger acknowledges a unit by answering.  It fails on every seventh one, so that connections are lost and windows come again; it
knows by file and offset what came twice.  Meanwhile the log is renamed and begun anew, as logrotate does.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import trio

from levada.actors.lumberjack import TailConfig, Unit, WriterConfig, connect, serve, tail
from levada.framework import Actor, ActorSystem, handles, restart

LINES = 6_000
ROTATE_EVERY = 2_000


class Ledger(Actor[Unit]):
    seen: dict[tuple[str, int], str]  # outlives the actor: what is in it is committed
    enough: trio.Event
    handled: list[int]

    @handles
    def commit(self, unit: Unit) -> None:
        self.handled.append(len(unit.events))
        if len(self.handled) % 7 == 0:
            raise OSError("the disk is full")
        for event in unit.events:
            number = int(event["line"].split()[0])
            self.seen[event["line"], number] = event["file"]
        if len(self.seen) == LINES:
            self.enough.set()


async def write_and_rotate(log: Path) -> None:
    for first in range(0, LINES, ROTATE_EVERY):
        with log.open("w") as file:
            for number in range(first, first + ROTATE_EVERY):
                file.write(f"{number} GET /page/{number % 17}\n")
                if number % 200 == 199:
                    file.flush()
                    await trio.sleep(0.01)
        await trio.Path(log).rename(log.with_suffix(f".log.{first // ROTATE_EVERY}"))


async def main() -> None:
    seen: dict[tuple[str, int], str] = {}
    enough = trio.Event()
    handled: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.log"
        settings = WriterConfig(window=200, linger=0.05, initial_backoff=0.05)
        follow = TailConfig(scan=0.05, poll=0.02)
        async with ActorSystem() as system:
            ledger = system.spawn(Ledger, seen, enough, handled, supervise=restart(max=1000))
            async with (
                serve(system, "lumberjack://127.0.0.1:0", ledger) as reader,
                connect(system, reader.url, config=settings) as writer,
                tail(system, [f"{log}*"], writer.deliver, registry=Path(folder) / "registry", config=follow),
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(write_and_rotate, log)
                await enough.wait()
            faults = writer.statistics().faults
    assert sorted(number for _, number in seen) == list(range(LINES))
    assert faults > 0
    print(f"{sum(handled) - LINES} lines came more than once, in {len(handled)} units, over {faults + 1} connections")
    print(f"{LINES} lines of {LINES // ROTATE_EVERY} files, each at least once")


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # failures are the point here
    trio.run(main)
