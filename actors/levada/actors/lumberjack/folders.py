"""Folders that survive crashes: one process uses a folder at a time, files are replaced as a whole, renames are durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from levada.framework.errors import ConfigurationError
from levada.framework.files import folder_path
from levada.framework.platform import PLATFORM

__all__ = ["locked_folder"]


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
    path, files = folder_path(folder), PLATFORM.get().files
    try:
        files.make_durable_folder(path)
        lock = files.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot keep a {what} in {folder}: {error.strerror or error}") from error
    try:
        try:
            files.lock(lock)
        except OSError as error:
            raise ConfigurationError(f"another {user} uses the {what} in {folder}") from error
        yield path
    finally:
        files.close(lock)
