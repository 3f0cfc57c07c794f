"""An app with a singleton, durable actors and names, on nodes under Spark; and its driver: ``whole_app.py FOLDER``.

The driver kills the node that has the singleton, and restarts all nodes one after another. It prints the answers as JSON.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from levada.actors.durable import Durable, applies, shards
from levada.actors.nodes import NodeSettings, NodeUp, nodes_of, singleton, spark_nodes
from levada.framework import Actor, ActorSystem, Asks, handles, message

FOLDER = Path(os.environ.get("WHOLE_APP", "."))
"""On the driver's machine."""


@message("whole_app.Next", frozen=True)
class Next(Asks[int]):
    """Count."""


@message("whole_app.Where", frozen=True)
class Where(Asks[tuple[str, int]]):
    """Ask for the node and its process."""


@message("whole_app.Ask", frozen=True)
class Ask(Asks[tuple[int, int]]):
    """Let a node ask the singleton, and an entity with a command id."""

    command: str


@message("whole_app.counted", frozen=True)
class Counted:
    """An event."""


class House(Actor[Next | Where]):
    """The singleton."""

    count: int = 0

    @handles
    def next(self, m: Next) -> int:
        """Count."""
        self.count += 1
        return self.count

    @handles
    def where(self, m: Where) -> tuple[str, int]:
        """Tell."""
        return self.system.name, os.getpid()


class Till(Durable[Next]):
    """A durable actor."""

    count: int = 0

    @handles
    def next(self, m: Next) -> int:
        """Count."""
        self.record(Counted())
        return self.count

    @applies
    def counted(self, e: Counted) -> None:
        """Apply."""
        self.count += 1


class Desk(Actor[Ask]):
    """Of each node."""

    house: Any
    tills: Any

    @handles
    async def answer(self, m: Ask) -> tuple[int, int]:
        """Ask both."""
        house = await self.house.ask(Next(), timeout=60)
        return house, await self.tills["anna"].ask(Next(), command=m.command, timeout=60)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Use all before the node is up."""
    house = await singleton(system, House)
    tills = await shards(system, Till, events=Counted, journal=FOLDER / "tills", shards=4)
    await nodes_of(system).register(f"desk {system.name}", system.spawn(Desk, house, tills))
    yield


async def drive(spark: Any, told: list[Any]) -> None:
    """Run the nodes, and hurt them."""
    settings = NodeSettings(start_timeout=300.0, drain_timeout=5.0)
    async with (
        ActorSystem("driver", ask_timeout=120.0) as system,
        spark_nodes(system, spark, 2, "whole_app:app", settings=settings) as nodes,
    ):
        number = 0

        async def ask() -> None:
            nonlocal number
            for node in ("n0", "n1"):
                desk = await nodes.lookup(f"desk {node}")
                told.append(await desk.ask(Ask(f"order {number}"), timeout=60))
                number += 1

        await ask()
        house = await nodes.lookup("House")
        _, pid = await house.ask(Where(), timeout=60)
        async with nodes.events() as events:
            os.kill(pid, signal.SIGKILL)
            while not isinstance(await events.receive(), NodeUp):
                pass
        told.append((await house.ask(Where(), timeout=60))[1] != pid)
        await ask()
        await nodes.restart()
        await ask()


def main() -> None:
    """Start Spark, and drive."""
    from levada.actors.spark.session import session

    spark = session(master="local[3,2]", spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    spark.sparkContext.addPyFile(__file__)
    told: list[Any] = []
    trio.run(drive, spark, told)
    spark.stop()
    print(json.dumps(told))
