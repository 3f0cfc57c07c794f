"""``python -m tests.simulation.handover FIRST COUNT [MUTANT]``: shards of the bank move while their owner is out of reach.

As `tests.simulation.fleets`; the last number of a line is how many shards were fenced off.

One of two nodes is killed, so the other one owns all shards. When the first one comes back, its shards move to it, but their owner does not
answer for longer than the driver waits. Then it comes back with appends that are late, and with commands that it has not begun.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from typing import Final

import attrs
import trio
from tests.simulation.bank import SETTINGS, Bank
from tests.simulation.fleets import main

from levada.framework.testing.simulation import Faults, World

__all__ = ["FAULTS", "Handover", "scenario"]

FAULTS: Final = Faults(strikes=5, every=8.0, jump=5.0, aims={"Append", "Command", "fdatasync"})
"""Strikes by chance, besides the move; in half of the worlds, also at commands, appends and their syncs."""
_CLOSING: Final = 30.0
"""Seconds for which the driver waits for an owner, see `levada.actors.durable.placement`."""


class Handover(Bank):
    """A bank with one move of its shards that their old owner learns of late."""

    clients = 8
    commands = 10
    entities = 5
    settings = attrs.evolve(SETTINGS, silence=200.0)
    """With less silence the owner would end before it hears the driver again."""
    timeouts = 3.0, 100.0, 100.0
    """Most commands wait for the old owner: if all were given to the new one too, the journal would know them."""
    rests = 0.0, 0.1, 5.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._nodes = 2

    async def run(self) -> None:
        """Run the bank and the move."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            await self._move()

    async def _move(self) -> None:
        """Kill one node, and have the other one deaf, dumb or stopped before the first one is back."""
        world = self._world
        rng = random.Random(f"handover {world.seed}")
        wanted = rng.randrange(5, 30)
        while sum(operation.answered < math.inf for operation in world.history.operations) < wanted:  # noqa: ASYNC110
            await trio.sleep(0.01)
        killed, owner = rng.sample(("n0", "n1"), 2)
        world[killed].kill()
        await trio.sleep(rng.uniform(0.05, 0.2))
        seconds = _CLOSING + rng.uniform(0.0, 15.0)
        match rng.choice(("deaf", "paused", "deaf", "paused", "dumb")):
            case "deaf":
                world.cut("driver", owner, one_way=True, seconds=seconds)
            case "paused":
                world[owner].pause(seconds)
            case _:
                world.cut(owner, "driver", one_way=True, seconds=seconds)


class Fences(logging.Handler):
    """Counts the shards that the journal has fenced off."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a shard that ends because another one has its partition."""
        self.count += "another process has written to it" in record.getMessage()


FENCES: Final = Fences(logging.WARNING)


async def scenario(world: World) -> None:
    """Run a bank with a move."""
    FENCES.count = 0
    await Handover(world).run()


if __name__ == "__main__":
    logging.getLogger().addHandler(FENCES)
    main(*sys.argv[1:], scenario=scenario, faults=FAULTS, more=lambda: FENCES.count)
