"""``python -m tests.simulation.app_worlds CERTIFICATE SEED``: run a world at each kind of URL; print the digest of all that was sent in it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from tests.simulation.apps import FAULTS, MACHINES, Counters, Ledgers

from levada.framework.testing.simulation import simulate

REPEATED: Final = ("aqueduct", "maop+tls", "rsocket+wss", "rsocket+unix", "reactivesocket+quic", "lumberjack")


def main(certificate: str, seed: str) -> None:
    """Run the worlds."""
    logging.disable(logging.CRITICAL)
    runs = {scheme: Ledgers(scheme, Path(certificate)).run for scheme in REPEATED} | {"nodes": Counters().run}
    for name, run in runs.items():
        done = simulate(run, seeds=[int(seed)], machines=MACHINES, faults=FAULTS, limit=900.0)
        print(name, done.digests[int(seed)], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
