"""Standard input, read in a thread that a cancellation leaves behind."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import trio

__all__ = ["chunks", "lines"]


async def chunks() -> AsyncIterator[bytes]:
    """Yield chunks until the end.

    Cancellation:
        a thread may still wait for input, and takes what comes next with it; so a command that was cancelled should end.
    """
    # Not by sys.stdin: the interpreter cannot end while a thread that waits has the lock of its buffer.
    while data := await trio.to_thread.run_sync(os.read, sys.stdin.fileno(), 65536, abandon_on_cancel=True):
        yield data


async def lines() -> AsyncIterator[bytes]:
    """Yield lines, without their ends; cancellation as for `chunks`."""
    rest = b""
    async for data in chunks():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
