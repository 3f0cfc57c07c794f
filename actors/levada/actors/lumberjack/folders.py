"""Folders that survive crashes: one process at a time in them, files replaced as a whole, renames that last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from levada.framework.errors import ConfigurationError
from levada.transports.private_files import make_private_folder, private

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked_folder", "replace_file", "sync_folder"]


@contextmanager
def locked_folder(folder: str | os.PathLike[str], what: str, user: str) -> Iterator[Path]:
    """Make `folder` if need be, and keep other processes that ask for it out while the block lasts; death lets go of it too. Blocks.

    Args:
        folder: gets a file ``lock``.
        what: is kept there, for messages.
        user: who uses it, for messages.

    Raises:
        ConfigurationError: the folder cannot be used, or is in use.
    """
    path = Path(folder)
    try:
        make_private_folder(path)
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


def replace_file(path: Path, octets: bytes) -> None:
    """Put `octets` in the place of a file, whole or not at all; they are on the disk when this returns, the name after `sync_folder`."""
    beside = path.with_suffix(".new")
    with open(beside, "wb", opener=private) as file:
        file.write(octets)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def sync_folder(folder: Path) -> None:
    """Let renames in the folder survive a loss of power; a folder cannot be opened everywhere."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
