"""Files that only their owner may read: made so from the first moment, and noticed where they are not."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

__all__ = ["make_private_folder", "warn_if_others_can_read"]

logger = logging.getLogger("levada.transports.private_files")


def make_private_folder(path: Path) -> None:
    """Make a folder with mode 0700, unless it is there, and those above it as usual.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def warn_if_others_can_read(path: str | os.PathLike[str], what: str) -> None:
    """Write a warning about a secret that any user of the machine can read; a missing file is another check's error."""
    if os.name != "posix":
        return
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning("%s holds %s and can be read by all users of this machine: chmod 600 it", path, what)
