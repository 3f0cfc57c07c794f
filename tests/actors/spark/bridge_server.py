"""A bridge in a process of its own, to be killed by tests: ``bridge_server.py DIRECTORY ROWS [die-after-ledger]``.

Has two mailboxes: ``lines``, filled up to ROWS, and ``out``. Prints its address when it is ready, and runs until it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import trio

from levada.actors.spark import GetExtent, JournalConfig, serve_bridge
from levada.actors.spark.ledger import Ledger
from levada.framework import ActorSystem, message


@message("killed.Line")
class Line:
    number: int


def die_after_the_ledger_has_written() -> None:
    deliver = Ledger.deliver

    def and_die(self: Ledger, *args: Any) -> None:
        deliver(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Ledger, "deliver", and_die)  # noqa: B010 - the moment that no timing hits


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
    if sys.argv[3:]:
        die_after_the_ledger_has_written()
    trio.run(main, sys.argv[1], int(sys.argv[2]))
