"""Folders that survive crashes: one process uses a folder at a time, files are replaced as a whole, renames are durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from levada.framework.errors import ConfigurationError
from levada.framework.files import Files, folder_path
from levada.framework.platform import PLATFORM

__all__ = ["locked_folder", "replace_file", "write_all"]


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


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Replace a file by one with these bytes, atomically. The bytes are on the disk when this returns, the name after `Files.sync_folder`. Blocks."""
    beside = path.with_suffix(".new")
    with files.opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        write_all(files, descriptor, data)
        files.fsync(descriptor)
    files.rename(beside, path)


def write_all(files: Files, descriptor: int, data: bytes, at: int = 0) -> None:
    """Write bytes at a place of a file. Blocks."""
    left = memoryview(data)
    while left:
        written = files.pwrite(descriptor, left, at)
        left, at = left[written:], at + written
