"""``python -m tests.simulation.fleets FIRST COUNT [MUTANT]``: run worlds of the bank; print each seed with the digest of all that was sent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from tests.simulation.bank import FAULTS, Bank
from tests.simulation.mutants import MOVES, MUTANTS

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
    *,
    scenario: Callable[[World], Awaitable[None]] = scenario,
    faults: Faults = FAULTS,
    more: Callable[[], object] = str,
) -> None:
    """Run worlds, and print the seed of each, its digest, its strikes, and more. End with the text of the first failure and the exit code 1."""
    if mutant:
        (MUTANTS | MOVES)[mutant]()
    for seed in range(int(first), int(first) + int(count)):
        try:
            result = simulate(scenario, seeds=[seed], faults=faults, limit=LIMIT)
        except SimulationFailure as failure:
            print(failure)
            sys.exit(1)
        print(seed, result.digests[seed], result.strikes, more(), flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:])
