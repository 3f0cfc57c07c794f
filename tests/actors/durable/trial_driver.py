"""The driver of a kill trial: ``trial_driver.py FOLDER SHARDS SNAPSHOT_EVERY``. Takes JSON objects, one a line; ends when stdin does."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import trio
from tests.actors.durable.purses import Clerk, Errand, Paid, Pay, Purse, Total
from tests.actors.nodes.processes import START

from levada.actors.durable import Shards, shards
from levada.actors.journal.keeper_process import without_pandas
from levada.actors.nodes import NodeLost, Nodes, NodeSettings, NodeUp, local_nodes
from levada.framework import ActorSystem, Ref, restart
from levada.framework.errors import ActorError, AskTimeout, LevadaError

SETTINGS = NodeSettings(
    start_timeout=START,
    hang_timeout=6.0,
    silence=30.0,
    drain_timeout=5.0,
    restart=restart(max=10_000, within=1.0, initial_backoff=0.0, max_backoff=0.0),
)


NODES = ["n0", "n1", "n2"]
APP = "tests.actors.durable.trial_driver:app"


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def lines() -> AsyncIterator[Any]:
    buffer = b""
    stream = trio.lowlevel.FdStream(os.dup(0))
    while data := await stream.receive_some():
        *whole, buffer = (buffer + data).split(b"\n")
        for line in whole:
            yield json.loads(line)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """What runs on nodes."""
    without_pandas()  # half a second of each process that a trial starts
    yield


class Trial:
    def __init__(self, nodes: Nodes, purses: Shards[Any]) -> None:
        self.nodes = nodes
        self.purses = purses
        self.clerks: dict[str, Ref[Any]] = {}

    async def hire(self, name: str) -> None:
        try:
            self.clerks[name] = await self.nodes.spawn(Clerk, on=name)
        except ActorError:
            pass  # the node has ended

    async def follow(self) -> None:
        for name in NODES:
            await self.hire(name)
        async with self.nodes.events() as events:
            async for event in events:
                if isinstance(event, NodeUp) and event.member.name in NODES:
                    await self.hire(event.member.name)

    async def pay(self, m: dict[str, Any]) -> None:
        pay, via = Pay(m["amount"], m.get("strike", ""), m.get("once", "")), m.get("via")
        while True:
            clerk = self.clerks.get(via) if via else None
            try:
                if clerk is not None and clerk.is_alive:
                    via = None  # once
                    answer = await clerk.ask(Errand(m["entity"], pay, m["id"]), timeout=20.0)
                else:
                    answer = await self.purses[m["entity"]].ask(pay, command=m["id"], timeout=20.0)
                break
            except AskTimeout:
                say(late=m["id"])
            except LevadaError:
                if clerk is None:
                    raise  # a command with an id has an answer, whatever is lost
        if m.get("received"):
            os.kill(os.getpid(), signal.SIGKILL)
        say(id=m["id"], answer=answer)

    async def total(self, m: dict[str, Any]) -> None:
        say(id=m["id"], answer=await self.purses[m["entity"]].ask(Total(), timeout=150.0))

    async def strike(self, m: dict[str, Any]) -> None:
        member = self.nodes[m["node"]]
        if m["how"] == "restart":
            try:
                await self.nodes.restart(member.name)
            except NodeLost as error:
                say(lost=str(error))
        elif member.pid:
            try:
                os.kill(member.pid, getattr(signal, m["how"]))
            except ProcessLookupError:
                pass

    async def guarded(self, m: dict[str, Any]) -> None:
        try:
            await getattr(self, m["do"])(m)
        except Exception as error:  # noqa: BLE001 - the test shows it
            say(error=f"{m}: {error!r}")


async def main(folder: str, count: int, snapshot_every: int) -> None:
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=150.0) as system,
        local_nodes(system, len(NODES), APP, names=NODES, settings=SETTINGS) as nodes,
    ):
        purses = await shards(
            system, Purse, events=Paid, journal=folder, shards=count, nodes=nodes,
            idle=0.5, snapshot_every=snapshot_every, max_live=2 * count, keeper=True,
        )  # fmt: skip
        trial = Trial(nodes, purses)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trial.follow)
            say(ready=[member.pid for member in nodes.members])
            async for line in lines():
                nursery.start_soon(trial.guarded, line)
            nursery.cancel_scope.cancel()
        purses.ref.stop()
        await purses.ref.terminated()


if __name__ == "__main__":
    without_pandas()
    logging.basicConfig(level=logging.WARNING)
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
