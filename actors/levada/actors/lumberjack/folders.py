"""Folders that survive crashes: one process uses a folder at a time, files are replaced as a whole, renames are durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from levada.framework.errors import ConfigurationError
from levada.transports.private_files import make_durable_folder, private

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system: no process is kept out
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked_folder", "replace_file"]


@contextmanager
def locked_folder(folder: str | os.PathLike[str], what: str, user: str) -> Iterator[Path]:
    """Create `folder` if needed, and lock it for this process while the block lasts, or until the process dies. Blocks.

    Args:
        folder: gets a file ``lock``.
        what: the contents of the folder, for error texts.
        user: the user of the folder, for error texts.

    Raises:
        ConfigurationError: the folder cannot be used, or another process uses it.
    """
    path = Path(folder)
    try:
        make_durable_folder(path)
        lock = private(str(path / "lock"), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigurationError(f"cannot keep a {what} in {folder}: {error.strerror or error}") from error
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(f"another {user} uses the {what} in {folder}") from error
        yield path
    finally:
        os.close(lock)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes, atomically. The bytes are on the disk when this returns, the name after `sync_folder`. Blocks."""
    beside = path.with_suffix(".new")
    with open(beside, "wb", opener=private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
