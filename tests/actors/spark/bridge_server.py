"""A bridge in a process of its own, to be killed by tests: ``bridge_server.py DIRECTORY ROWS``.

Has two mailboxes: ``lines``, filled up to ROWS, and ``out``. Prints its address when it is ready, and runs until it is killed. It kills itself
at a moment that no timing hits when there is a file of that name in DIRECTORY (`MOMENTS`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from levada.actors.journal import GetExtent, JournalConfig
from levada.actors.journal.ledger import Ledger
from levada.actors.journal.staging import Stage
from levada.actors.journal.store import Store
from levada.actors.spark import serve_bridge
from levada.framework import ActorSystem, message

MOMENTS = "staging", "staged", "written", "delivered"
"""Some rows of a task are staged; all are, and the driver commits; the batch is in the segments; the ledger has it, and Spark does not know."""


@message("killed.Line")
class Line:
    number: int


def die_on_demand(directory: Path) -> None:
    def dies(moment: str | None) -> None:
        if moment is not None and (directory / moment).exists():
            (directory / moment).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: type, name: str, *, before: str | None = None, after: str | None = None) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **keywords: Any) -> Any:
            dies(before)
            result = function(*args, **keywords)
            dies(after)
            return result

        setattr(owner, name, wrapped)

    wrap(Stage, "append", after="staging")
    wrap(Store, "deliver", before="staged")
    wrap(Ledger, "deliver", before="written", after="delivered")


async def main(directory: str, rows: int) -> None:
    config = JournalConfig(partitions=2, block_rows=100)
    async with ActorSystem() as system, serve_bridge(system, directory) as bridge:
        lines = await bridge.mailbox("lines", Line, config=config)
        await bridge.mailbox("out", Line, partitions=2)
        there = sum((await lines.ref.ask(GetExtent())).end.values())
        for at in range(there, rows, 1000):
            await lines.append([Line(number) for number in range(at, min(at + 1000, rows))])
        print(bridge.address, flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    die_on_demand(Path(sys.argv[1]))
    trio.run(main, sys.argv[1], int(sys.argv[2]))
