"""Files that only their owner may read: made so from the first moment, and noticed where they are not."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from levada.framework.platform import REAL

__all__ = ["make_durable_folder", "make_private_folder", "private", "sync_folder", "warn_if_others_can_read"]

logger = logging.getLogger("levada.transports.private_files")


def private(path: str, flags: int) -> int:
    """Open a file that is made with mode 0600; an ``opener`` for `open`."""
    return os.open(path, flags, 0o600)


def make_private_folder(path: Path) -> None:
    """Make a folder with mode 0700, unless it is there, and those above it as usual.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_durable_folder(path: Path) -> None:
    """Make a folder as `make_private_folder` does. Its name and those of new folders above it are on the disk when this returns. Blocks.

    A process that made it may have been killed right then, so the name is synced also if the folder is there.

    Raises:
        OSError: it cannot be made, or not be synced.
    """
    REAL.files.make_durable_folder(path)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Blocks. Does nothing on systems that cannot open a folder."""
    REAL.files.sync_folder(folder)


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
