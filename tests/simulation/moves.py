"""``python -m tests.simulation.moves FIRST COUNT [MUTANT]``: run worlds of the app with everything in it.

As `tests.simulation.fleets`; the last number of a line is how often a singleton began.
"""

from __future__ import annotations

import logging
import sys

from tests.simulation import one_app
from tests.simulation.fleets import main

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:], scenario=one_app.scenario, faults=one_app.FAULTS, more=lambda: one_app.WORLDS[-1].begun)
