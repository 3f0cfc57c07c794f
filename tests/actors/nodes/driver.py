"""A driver as a program of its own: ``driver.py APP JSON``, with the settings. Prints what its nodes do, and ends when stdin does."""

from __future__ import annotations

import json
import logging
import sys

import trio

from levada.actors.nodes import NodeSettings, NodeUp, local_nodes
from levada.framework import ActorSystem, Failed, restart


async def main(app: str, count: int, settings: NodeSettings) -> None:
    """Run nodes until stdin ends."""
    async with (
        ActorSystem() as system,
        local_nodes(system, count, app, settings=settings) as nodes,
        nodes.events() as events,
        trio.open_nursery() as nursery,
    ):
        print("READY", *(member.pid for member in nodes.members), flush=True)

        async def wait() -> None:
            await trio.lowlevel.wait_readable(0)
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        async for event in events:
            if isinstance(event, NodeUp):
                print("UP", event.member.name, event.member.pid, flush=True)
            else:
                lost = event.reason.error if isinstance(event.reason, Failed) else "in order"
                print("DOWN", event.member.name, lost, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    more = json.loads(sys.argv[2])
    number = more.pop("nodes", 2)
    if "max" in more:
        more["restart"] = restart(max=more.pop("max"), within=60.0)
    trio.run(main, sys.argv[1], number, NodeSettings(**more))
