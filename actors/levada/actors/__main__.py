"""``python -m levada.actors`` is the command ``levada``."""

from __future__ import annotations

import sys

from levada.actors.cli import main

if __name__ == "__main__":
    sys.exit(main())
