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

__all__ = ["Keepers", "scenario"]

_KEEPER: Final = "Account-keeper"
_LENGTHS: Final = 0.05, 1.0, 8.0
"""Seconds of a pause, a cut, or a life out of reach."""


class Keepers(Bank):
    """A bank on nodes, or without nodes, whose keeper is struck."""

    clients = 5
    commands = 10
    patience = 1000.0
    refused = 0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._keeper = True
        self._alone = random.Random(f"keepers {world.seed}").random() < 0.5

    async def run(self) -> None:
        """Run the bank, and strike its keeper."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._strike)
            await super().run()
            nursery.cancel_scope.cancel()

    async def _strike(self) -> None:
        """Strike at any moment, but no sooner than the work begins."""
        world = self._world
        rng = random.Random(f"strikes {world.seed}")
        for _ in range(rng.randint(1, 6)):
            wanted = len(world.history.operations) + rng.randint(1, 8)
            while len(world.history.operations) < wanted:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await trio.sleep(rng.choice((0.0, 0.0005, 0.001, 0.003, 0.02)))
            keeper, seconds = world[_KEEPER], rng.choice(_LENGTHS)
            match rng.choice(("kill", "kill", "crash", "crash", "pause", "cut", "zombie")):
                case "kill":
                    keeper.kill()
                case "crash":
                    keeper.crash_in(rng.randint(1, 12))
                case "pause":
                    keeper.pause(seconds)
                case "cut":
                    world.cut("driver", _KEEPER, one_way=rng.random() < 0.5, seconds=seconds)
                case _:
                    keeper.zombie(seconds)

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
    """Run a bank whose keeper is struck."""
    Keepers.refused = 0
    await Keepers(world).run()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:], scenario=scenario, faults=Faults(strikes=0), more=lambda: Keepers.refused)
