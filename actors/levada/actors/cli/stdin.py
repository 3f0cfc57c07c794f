"""Standard input, read in a thread that a cancellation abandons."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import trio

__all__ = ["chunks", "lines"]


async def chunks() -> AsyncIterator[bytes]:
    """Yield chunks until the end.

    Cancellation:
        a thread may still wait for input and consume it, so a cancelled command should end.
    """
    # Not sys.stdin: the interpreter cannot exit while a waiting thread holds the lock of its buffer.
    while data := await trio.to_thread.run_sync(os.read, sys.stdin.fileno(), 65536, abandon_on_cancel=True):
        yield data


async def lines() -> AsyncIterator[bytes]:
    """Yield lines, without their line ends. Cancellation is as for `chunks`."""
    rest = b""
    async for data in chunks():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
