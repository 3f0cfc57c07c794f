"""Copies a log, and kills itself after some pages: ``copying_app.py FROM TO PAGES``."""

from __future__ import annotations

import os
import signal
import sys

import trio

from levada.actors.durable import copy_log
from levada.actors.journal import still
from levada.framework import ActorSystem


async def main(source: str, target: str, pages: int) -> None:
    left = pages

    def progress(*_: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    async with ActorSystem("copy") as system:
        await copy_log(system, source, target, verify=True, progress=progress)


if __name__ == "__main__":
    still.PAGE_ROWS = 7
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
