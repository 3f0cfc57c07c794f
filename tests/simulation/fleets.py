"""``python -m tests.simulation.fleets FIRST COUNT [MUTANT [LEAST [shrink]]]``: run worlds of the bank; print seeds, and digests of what was sent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from tests.simulation.bank import FAULTS, Bank
from tests.simulation.mutants import BRIDGES, MOVES, MUTANTS

from levada.framework.testing.simulation import Faults, SimulationFailure, World, simulate

__all__ = ["main"]

LIMIT: Final = 300.0
"""Virtual seconds of a world at most; a good one has about ten."""


async def scenario(world: World) -> None:
    """Run a bank."""
    await Bank(world).run()


def main(
    first: str,
    count: str,
    mutant: str = "",
    least: str = "1",
    shrink: str = "",
    *,
    scenario: Callable[[World], Awaitable[None]] = scenario,
    faults: Faults = FAULTS,
    more: Callable[[], object] = str,
) -> None:
    """Run worlds, and print the seed of each, its digest, its strikes, and more; or the text of its failure. Exit with 1 when so many have failed."""
    if mutant:
        (MUTANTS | MOVES | BRIDGES)[mutant]()
    left = int(least)
    for seed in range(int(first), int(first) + int(count)):
        try:
            result = simulate(scenario, seeds=[seed], faults=faults, shrink=bool(shrink), limit=LIMIT)
        except SimulationFailure as failure:
            print(failure, flush=True)
            left -= 1
            if not left:
                sys.exit(1)
        else:
            print(seed, result.digests[seed], result.strikes, more(), flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:])
