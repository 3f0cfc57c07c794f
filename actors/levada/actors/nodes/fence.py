"""`fenced`: a fleet whose nodes start when all processes of the fleet before have ended.

The fence is a lock on a file. The driver takes it and hands the open file to each node, so the operating system frees the lock when the last of
these processes has ended: also one that hangs, was stopped, or has not noticed yet that its driver is gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from levada.framework.errors import ConfigurationError

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows, where there are no local nodes
    fcntl: Any = None  # type: ignore[no-redef]

__all__ = ["fenced"]

logger = logging.getLogger("levada.actors.nodes")

_AGAIN: Final = 0.05  # seconds between two attempts: to wait for the lock in a thread could not be cancelled


@asynccontextmanager
async def fenced(path: str | None, patience: float) -> AsyncIterator[int | None]:
    """Hold the lock of a file while the block lasts.

    Args:
        path: the file, which is made if there is none, and stays; None: there is no fence.
        patience: seconds to wait for the lock.

    Yields:
        The open file, for child processes: the lock lasts until all of them have ended, too.

    Raises:
        ConfigurationError: the processes of another fleet still have the lock, or the file cannot be opened.
    """
    if path is None:
        yield None
        return
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot use the fence {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if not _locked(number):
            logger.warning("waiting for the processes of another fleet to end, which have the fence %s", path)
            with trio.move_on_after(patience) as waiting:
                while not _locked(number):  # noqa: ASYNC110 - the system tells no one
                    await trio.sleep(_AGAIN)
            if waiting.cancelled_caught:
                raise ConfigurationError(
                    f"processes of another fleet have had the fence {path} for {patience:g} s: two fleets with one fence do not run at the "
                    "same time; end its driver and its nodes"
                )
        yield number
    finally:
        os.close(number)


def _locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
