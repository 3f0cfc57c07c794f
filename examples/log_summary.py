"""Real log lines through a pool of actors and two channels, and a result that is checked.

The program is in `levada.actors.demo.log_summary`, since ``levada demo`` runs it too.
"""

from __future__ import annotations

import sys

from levada.actors.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
