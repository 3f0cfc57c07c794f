"""``python -m tests.simulation.keepers FIRST COUNT [MUTANT]``: only the keeper of the bank's journal is struck, and no command has an id.

As `tests.simulation.fleets`; the last number of a line is how many commands the journal has refused.

Each command is given once. It is answered, however often the keeper is killed, stopped, cut off or taken for dead while its rows are under way; or
the journal refuses it, and then it was not done and is given again. Nothing else may come of it: no outcome is unknown.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from typing import Any, Final

import trio
from tests.simulation.bank import Add, Bank
from tests.simulation.fleets import main

from levada.actors.journal import JournalError
from levada.framework.errors import LevadaError
from levada.framework.testing.simulation import Faults, World

__all__ = ["FAULTS", "Keepers", "scenario"]

FAULTS: Final = Faults(
    strikes=40,
    every=0.25,
    begin=1.5,
    kills=2.0,
    crashes=6.0,
    zombies=5.0,
    clock_jumps=0.5,
    jump=5.0,
    lengths=(0.05, 1.0, 8.0),
    aims={"Append", "fdatasync"},
    only={"Account-keeper"},
)
"""Strikes at random times once the fleet is up; in half of the worlds, also at appends and their syncs."""


class Keepers(Bank):
    """A bank on nodes, or without nodes."""

    clients = 5
    commands = 16
    patience = 1000.0
    refused = 0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._keeper = True
        self._alone = random.Random(f"keepers {world.seed}").random() < 0.5

    async def _work(self, accounts: Any, todo: deque[tuple[str, Add]], rng: random.Random) -> None:
        """Give each command once, and again only if it was refused."""
        while todo:
            entity, add = todo[0]
            account: Any = accounts[entity]
            try:
                await self._world.history.call(entity, add.id, lambda _: account.ask(add, timeout=None))  # noqa: B023 - awaited here
            except JournalError:
                type(self).refused += 1
                await trio.sleep(0.2)
            except LevadaError as error:
                raise AssertionError(f"the loss of a keeper is seen: {error!r}") from error
            else:
                todo.popleft()
                await trio.sleep(rng.choice((0.0, 0.0, 0.05, 0.8)))


async def scenario(world: World) -> None:
    """Run a bank."""
    Keepers.refused = 0
    await Keepers(world).run()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:], scenario=scenario, faults=FAULTS, more=lambda: Keepers.refused)
